"""`Forecast`: when operations that run one after another will end, as far as their costs are known.

Owns the expected times of what has been issued and is not over. Reads no clock: times come with the calls.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Issued:
    """Seconds: when it was issued, what it takes, and when it is expected to end."""

    at: float
    seconds: float
    end: float


class Forecast:
    """Seconds, as in `StepInputs.now`. free_at: when all that has been issued is expected to be over."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self._issued: dict[int, _Issued] = {}

    def begin(self, seq: int, seconds: float, now: float) -> None:
        """Operation seq is issued, and takes so long once those before it are over."""
        self.free_at = max(now, self.free_at) + seconds
        self._issued[seq] = _Issued(now, seconds, self.free_at)

    def complete(self, done: int, now: float) -> None:
        """Operations below `done` are over, the last of them now: the next ones follow from here."""
        over = [seq for seq in self._issued if seq < done]
        if not over:
            return
        for seq in over:
            del self._issued[seq]
        self.free_at = now
        for each in self._issued.values():
            self.free_at = each.end = max(self.free_at, each.at) + each.seconds

    def times_of(self, seq: int) -> tuple[float, float] | None:
        """When an operation is expected to begin, or began, and to end; None if it is over."""
        each = self._issued.get(seq)
        return None if each is None else (each.end - each.seconds, each.end)
