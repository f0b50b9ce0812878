"""`thread_groups`: the ranks of one model as threads of this process. For tests that look at all ranks at once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from sglang.srt.distributed.parallel_state import TensorParallelGroup


class _Meeting:
    def __init__(self, size: int, timeout_s: float) -> None:
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._values: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's x, in the order of ranks. Raises BrokenBarrierError if somebody does not come in time."""
        self._values[rank] = x.clone()
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        assert all(v.shape == x.shape for v in values), f"the ranks meet in different places: {values}"
        return values


@dataclass(frozen=True)
class ThreadGroup(TensorParallelGroup):
    meeting: _Meeting = field(default_factory=lambda: _Meeting(1, 0))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        values = self.meeting.exchange(self.rank, x)
        x.copy_(values[0])
        for value in values[1:]:
            x.add_(value)
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self.meeting.exchange(self.rank, x)[0])

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(torch.stack(self.meeting.exchange(self.rank, values)).amin(0))

    def all_gather(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=-1).to(dtype or x.dtype)


def thread_groups(size: int, timeout_s: float = 120.0) -> list[ThreadGroup]:
    """One per rank. Each rank uses its own from a thread of its own; who waits longer than timeout_s for the others
    fails, and so do they."""
    meeting = _Meeting(size, timeout_s)
    return [ThreadGroup(rank, size, meeting=meeting) for rank in range(size)]
