"""`StorageBreaker`: whether storage is used at all, or left alone because it hangs or fails.

Owns, per link, since when its oldest operation is under way, and the failures in a row. Derives its state from the
inputs of steps alone, so all ranks agree. Begins nothing: who would, asks first.

    closed ──an operation hangs, or some in a row fail──► open: no request waits for the links or gives them any work
       ▲                                                    │ nothing is in flight, and a pause is over
       └── it succeeds, or some in a row find nothing ──── a trial, for which no request waits

The pause is longer each time that it opens again soon after it has closed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sglang.srt.mem_cache.transfer import StorageOp
from sglang.srt.utils.time_units import Seconds

# An operation hangs after so many times what it is expected to take, and no sooner than the breaker's own limit.
_HANG_TIMES = 10.0
# So many failures in a row open it.
FAILURES_IN_A_ROW = 3
# An operation is late after so many times what it is expected to take, and no sooner than this.
_LATE_TIMES = 2.0
_LATE_S = 0.25
# Between a failure, or the end of what hung, and a trial; at most so many times that.
TRIAL_PAUSE_S = Seconds(1.0)
MAX_PAUSES = 8
# Closed for so long, and it is sound.
SOUND_S = Seconds(30.0)
# So many trials in a row that find nothing to read close it. The next failure then opens it again.
EMPTY_TRIALS = 3


@dataclass(frozen=True)
class _Oldest:
    seq: int
    # Seconds, as in `StepInputs.now`.
    since: float
    late_at: float
    hangs_at: float


class StorageBreaker:
    """links: those that are left alone together. hang_s: the least time after which an operation hangs. expected_s:
    what one is expected to take, in seconds; 0 while that is not known."""

    def __init__(self, links: tuple[str, ...], hang_s: float, expected_s: Callable[[StorageOp], float]) -> None:
        self.links = links
        self.hang_s = hang_s
        # Seconds, as in `StepInputs.now`, set at every step.
        self.now = Seconds(0.0)
        # Why it is open; empty while it is closed.
        self.reason = ""
        self.num_opened = 0
        self._expected_s = expected_s
        self._oldest: dict[str, _Oldest] = {}
        self._hung = ""
        self._failures = 0
        self._empty_trials = 0
        self._trial_at = self._closed_at = -math.inf
        self._num_pauses = 1

    @property
    def is_open(self) -> bool:
        return bool(self.reason)

    @property
    def hangs(self) -> bool:
        """Whether it is open because an operation does not end."""
        return bool(self._hung)

    @property
    def next_at(self) -> float | None:
        """When it opens if nothing ends before; None: it is open, or nothing is under way."""
        return None if self.is_open else min((each.hangs_at for each in self._oldest.values()), default=None)

    @property
    def is_late(self) -> bool:
        """Whether nothing should wait for its links: it is open, or an operation takes far longer than expected."""
        return self.is_open or any(self.now >= each.late_at for each in self._oldest.values())

    @property
    def late_at(self) -> float:
        """When an operation becomes late; infinite if none can, or one is."""
        return min((each.late_at for each in self._oldest.values() if self.now < each.late_at), default=math.inf)

    @property
    def may_try(self) -> bool:
        """Whether an open one has nothing under way, and a trial is due."""
        return not self._oldest and self.now >= self._trial_at

    def reset(self) -> None:
        """Other storage is attached."""
        self.reason = self._hung = ""
        self._failures, self._empty_trials = 0, 0
        self._trial_at, self._closed_at, self._num_pauses = -math.inf, -math.inf, 1

    def watch(self, in_flight: Iterable[StorageOp]) -> None:
        """in_flight: operations of any links, in the order in which they began. At each step."""
        oldest: dict[str, StorageOp] = {}
        for op in in_flight:
            if op.ticket.link in self.links:
                oldest.setdefault(op.ticket.link, op)
        for link in self.links:
            before = self._oldest.get(link)
            if link not in oldest:
                self._oldest.pop(link, None)
                continue
            op = oldest[link]
            if before is None or before.seq != op.ticket.seq:
                expected_s = self._expected_s(op)
                late_s, hang_s = max(_LATE_S, _LATE_TIMES * expected_s), max(self.hang_s, _HANG_TIMES * expected_s)
                self._oldest[link] = _Oldest(op.ticket.seq, self.now, self.now + late_s, self.now + hang_s)
            elif self.now >= before.hangs_at:
                self._hung = link
                self._open(f"an operation on {link} has taken over {before.hangs_at - before.since:.1f} s")

    def end(self, link: str, succeeded: bool) -> None:
        """An operation that tells whether storage works is over."""
        self._empty_trials = 0
        if succeeded:
            if self._hung != link and self._hung in self._oldest:
                return  # the other link hangs, as of the last step
            # What had begun before others failed may have had little to do.
            if not self.is_open or self._hung or self.now >= self._trial_at:
                self._failures = 0
                self._close()
            return
        self._failures += 1
        if self.is_open or self._failures >= FAILURES_IN_A_ROW:
            self._open(f"{self._failures} operations in a row have failed")

    def answer(self, link: str) -> None:
        """An operation is over that tells nothing but that its link does not hang."""
        if self._hung == link:
            self._close()

    def end_empty_trial(self) -> None:
        """A trial was answered, and found nothing to read. Where storage has lost what requests ask for, no request
        waits for it, and no trial would ever end the matter."""
        self._pause()
        self._empty_trials += 1
        if self._empty_trials >= EMPTY_TRIALS:
            self._failures, self._empty_trials = FAILURES_IN_A_ROW - 1, 0
            self._close()

    def end_unread_trial(self) -> None:
        """A trial was answered, and its block was not read, for lack of room."""
        self._pause()

    def _open(self, reason: str) -> None:
        if not self.is_open:
            self.reason = reason
            self.num_opened += 1
            is_sound = self.now >= self._closed_at + SOUND_S
            self._num_pauses = 1 if is_sound else min(2 * self._num_pauses, MAX_PAUSES)
        self._pause()

    def _close(self) -> None:
        if self.is_open:
            self._closed_at = self.now
        self.reason = self._hung = ""

    def _pause(self) -> None:
        self._trial_at = self.now + self._num_pauses * TRIAL_PAUSE_S
