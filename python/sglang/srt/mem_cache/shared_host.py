"""One host pool for all ranks, of models whose ranks cache the same.

With latent attention every rank caches all latents. The ranks share rank 0's host pool, and it alone writes there and
to storage. Ranks decide alike, so they have the same pages in the same frames. An operation has ended once it has on
all ranks (`rank_sync.py`): on the others it has at once.
"""

from __future__ import annotations

import os

import torch

from sglang.srt.distributed.parallel_state import TensorParallelGroup
from sglang.srt.mem_cache.transfer import GateError, LayerGate, OpResult, StorageOp, Ticket, TransferOp
from sglang.srt.utils.shared_memory import SharedMemory

# Above all that rank 0 can count: ranks agree on the least.
_MOST = 1 << 62


class LeftToRank0:
    """A link of another rank than 0, whose operations rank 0 carries out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._next_seq = 0
        self._ended: list[OpResult] = []

    def submit(self, op: TransferOp | StorageOp) -> None:
        link, seq = op.ticket
        assert link == self.name and seq == self._next_seq, f"{op.ticket} out of order, {self._next_seq} expected"
        self._next_seq += 1
        self._ended.append(OpResult(seq, True, count=_MOST, far_count=_MOST))

    def cancel(self, ticket: Ticket) -> None:
        """It has ended."""

    def gate(self, ticket: Ticket) -> LayerGate:
        raise GateError(f"{ticket}: nothing waits for what goes to the host or to storage")

    def poll(self) -> list[OpResult]:
        ended, self._ended = self._ended, []
        return ended


def share_memory(memory: SharedMemory | None, size_bytes: int, group: TensorParallelGroup) -> SharedMemory:
    """Rank 0's memory, on all ranks, which call this together. memory: at rank 0. Raises OSError where another one
    may not open it."""
    place = [os.getpid(), memory.fd] if memory is not None else [_MOST, _MOST]
    pid, fd = group.reduce_min(torch.tensor(place)).tolist()
    return memory or SharedMemory.of_process(pid, fd, size_bytes)
