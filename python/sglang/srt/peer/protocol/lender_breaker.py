"""`LenderBreaker`: whether a borrower has a lender copy for it (strict mode), or leaves it alone.

Owns why it is left alone, and how long it is not probed. A pure state machine: the caller passes the time, and tells
what came of a probe.

    closed ──a copy fails, or no heartbeat comes──► open: nothing is copied from or to its slabs
       ▲                                              │ a pause
       └──────────────── it answers ──────────────── a probe, for which no request waits

The pause is longer each time that a probe fails, and each time that the breaker opens again soon after it has closed.

`Silence`: whether a lender's heartbeats have stopped.
"""

from __future__ import annotations

import math

from sglang.srt.utils.time_units import Seconds

# Between a failure and the first probe.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 64.0
# Closed for so long, and the lender is sound.
SOUND_S = 30.0
# A lender sends a heartbeat every 0.5 s.
SILENT_S = 2.0
# A turn that took longer tells nothing of the lender: this process did not run.
_LONGEST_TURN_S = 0.25


class LenderBreaker:
    """Of one lender's life. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        # Why it is open; empty while it is closed.
        self.reason = ""
        # From the failure, or from the last probe, to the next probe.
        self.pause_s = FIRST_PAUSE_S
        self._closed_at = -math.inf

    @property
    def is_open(self) -> bool:
        return bool(self.reason)

    def open(self, now: Seconds, reason: str) -> bool:
        """The lender has failed. False: it is open already."""
        if self.is_open:
            return False
        self.reason = reason
        if now >= self._closed_at + SOUND_S:
            self.pause_s = FIRST_PAUSE_S
        else:
            self.fail_probe()
        return True

    def fail_probe(self) -> None:
        """The lender has not answered the probe, or could not be asked."""
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def close(self, now: Seconds) -> None:
        """The lender has answered."""
        self.reason = ""
        self._closed_at = now


class Silence:
    """How long a lender has sent no heartbeat, as far as this process ran and could have received one."""

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._turn_at: float | None = None

    def end(self) -> None:
        """A heartbeat has come."""
        self._silent_s = 0.0

    def begins(self, now: Seconds) -> bool:
        """Called at every turn of the process. True once, when the heartbeats have stopped."""
        before = self._silent_s
        if self._turn_at is not None:
            self._silent_s += min(now - self._turn_at, _LONGEST_TURN_S)
        self._turn_at = now
        return before < SILENT_S <= self._silent_s
