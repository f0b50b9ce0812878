"""`Forecast`: when operations that run one after another will end, as far as their costs are known.

Owns the expected ends of what has been issued and has not completed. Reads no clock: times come with the calls.
"""

from __future__ import annotations


class Forecast:
    """Seconds, as in `StepInputs.now`. free_at: when all that has been issued is expected to be over."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self._ends: dict[int, float] = {}
        self._seconds: dict[int, float] = {}

    def begin(self, seq: int, seconds: float, now: float) -> float:
        """Operation seq is issued and takes so long once it begins. Returns when it is expected to begin."""
        start = max(now, self.free_at)
        self.free_at = self._ends[seq] = start + seconds
        self._seconds[seq] = seconds
        return start

    def complete(self, done: int, now: float) -> None:
        """Operations below `done` are over, the last of them now: later ones end as much later, or earlier."""
        over = [seq for seq in self._ends if seq < done]
        if not over:
            return
        late_by = now - self._ends[over[-1]]
        self._ends = {seq: end + late_by for seq, end in self._ends.items() if seq >= done}
        for seq in over:
            del self._seconds[seq]
        self.free_at = max(self._ends.values(), default=now)

    def times_of(self, seq: int) -> tuple[float, float] | None:
        """When an operation is expected to begin, or began, and to end; None if it is over."""
        end = self._ends.get(seq)
        return None if end is None else (end - self._seconds[seq], end)
