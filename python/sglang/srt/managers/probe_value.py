"""`ProbeValue`: whether a request should wait until storage has answered what it has of its prompt.

Owns what recent probes took and found. A prompt for which that is not worth the wait starts when it can; what storage
has of it is fetched only if the answer comes before.
"""

from __future__ import annotations

# Of each new probe in the means; of one that took longer than usual, in the mean of their seconds.
_WEIGHT = 1 / 8
_WEIGHT_OF_SLOW = 1 / 2
# However many probes found nothing: prompts of which storage has much may come next. A probe that takes less than a
# hundredth of what it may save is always waited for.
_LEAST_SHARE = 0.01


class ProbeValue:
    """Until something is known, it is worth it."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        # Of what was asked for.
        self._found_share = 1.0

    def add(self, seconds: float, found_share: float) -> None:
        """A probe took so long, and storage had that share of what it was asked for."""
        self._add_seconds(seconds)
        self._found_share += _WEIGHT * (found_share - self._found_share)

    def add_wait(self, seconds: float) -> None:
        """A request gave up waiting for a probe after so long."""
        if self._seconds is None or seconds > self._seconds:
            self._add_seconds(seconds)

    def _add_seconds(self, seconds: float) -> None:
        before = seconds if self._seconds is None else self._seconds
        self._seconds = before + (_WEIGHT_OF_SLOW if seconds > before else _WEIGHT) * (seconds - before)

    def is_worth_waiting(self, gain_s: float | None) -> bool:
        """gain_s: seconds that fetching is faster than computing if storage has all; None: not known."""
        if self._seconds is None or gain_s is None:
            return True
        return self._seconds <= max(self._found_share, _LEAST_SHARE) * gain_s
