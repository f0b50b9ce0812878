"""`LateCopies`: which links from the device take longer than they should.

Owns, per link, since when its oldest copy could have been under way. No request waits for the device pages that an
overdue link was given, as long as others can go. A late one gives them back, what it copies is not used, and nothing
more is copied by it until it answers. A request that streams, and waits for such a copy, ends or starts again.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.mem_cache.transfer import TransferOp
from sglang.srt.utils.time_units import LaunchSeq, Seconds

# A copy is overdue, and late, after so long, or so many times what it is expected to take.
OVERDUE_S, OVERDUE_TIMES = 0.02, 2.0
_LATE_S, _LATE_TIMES = 1.0, 10.0


class LateCopies:
    """expected_s: what an operation of a link is expected to take, in seconds: (bytes, link)."""

    def __init__(self, expected_s: Callable[[int, str], float | None]) -> None:
        self.links: frozenset[str] = frozenset()
        self.overdue: frozenset[str] = frozenset()
        self._expected_s = expected_s
        self._now = 0.0
        # By link: the number of the oldest copy, and when it is overdue and late, from when nothing else held it up.
        self._oldest: dict[str, tuple[int, float, float]] = {}

    def update(self, now: Seconds, oldest: dict[str, TransferOp | None], done: LaunchSeq) -> None:
        """oldest: by link, the first operation that is not over. done: launches below are over."""
        for link, op in oldest.items():
            if op is None or (op.after is not None and op.after >= done):
                self._oldest.pop(link, None)
            elif link not in self._oldest or self._oldest[link][0] != op.ticket.seq:
                expected_s = self._expected_s(op.size_bytes, link) or 0.0
                overdue_at = now + max(OVERDUE_S, OVERDUE_TIMES * expected_s)
                self._oldest[link] = op.ticket.seq, overdue_at, now + max(_LATE_S, _LATE_TIMES * expected_s)
        self._now = now
        self.overdue = frozenset(link for link, (_, overdue_at, _) in self._oldest.items() if overdue_at <= now)
        self.links = frozenset(link for link, (_, _, late_at) in self._oldest.items() if late_at <= now)

    @property
    def next_at(self) -> float | None:
        """When the next link is overdue or late if nothing ends before; seconds, as in `StepInputs.now`."""
        return min((at for _, *both in self._oldest.values() for at in both if at > self._now), default=None)
