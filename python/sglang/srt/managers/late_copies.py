"""`LateCopies`: which links from the device take far longer than they should, so that nothing waits for them.

Owns, per link, since when its oldest copy could have been under way. A link that hangs keeps the device pages that it
was given; nothing more is copied by it, and no request waits for these pages, until it answers.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.mem_cache.transfer import BACKUP_LINKS, Ticket, TransferOp
from sglang.srt.utils.time_units import LaunchSeq, Seconds

# A copy is late after so long, or so many times what it is expected to take.
_LATE_S = 1.0
_LATE_TIMES = 10.0


class LateCopies:
    """expected_s: what an operation of a link is expected to take, in seconds: (bytes, link)."""

    def __init__(self, expected_s: Callable[[int, str], float | None]) -> None:
        self.links: frozenset[str] = frozenset()
        self._expected_s = expected_s
        # By link: the oldest copy, since when nothing else held it up, and when it is late.
        self._oldest: dict[str, tuple[int, float]] = {}

    def update(self, now: Seconds, oldest: dict[str, TransferOp | None], done: LaunchSeq) -> None:
        """oldest: by link, the first operation that is not over. done: launches below are over."""
        for link, op in oldest.items():
            if op is None or (op.after is not None and op.after >= done):
                self._oldest.pop(link, None)
            elif link not in self._oldest or self._oldest[link][0] != op.ticket.seq:
                limit_s = max(_LATE_S, _LATE_TIMES * (self._expected_s(op.size_bytes, link) or 0.0))
                self._oldest[link] = op.ticket.seq, now + limit_s
        self.links = frozenset(link for link, (_, late_at) in self._oldest.items() if late_at <= now)

    @property
    def is_watching(self) -> bool:
        """Whether any copy was under way at the last update."""
        return bool(self._oldest)

    @property
    def next_late_at(self) -> float | None:
        """When the next link is late if nothing ends before; seconds, as in `StepInputs.now`."""
        if not self._oldest:
            return None
        return min((at for link, (_, at) in self._oldest.items() if link not in self.links), default=None)


def oldest_copies(in_flight: dict[Ticket, object]) -> dict[str, TransferOp | None]:
    """By link from the device, the first operation in flight."""
    oldest: dict[str, TransferOp | None] = dict.fromkeys(BACKUP_LINKS.values())
    for ticket, op in in_flight.items():
        if ticket.link in oldest and oldest[ticket.link] is None and isinstance(op, TransferOp):
            oldest[ticket.link] = op
    return oldest
