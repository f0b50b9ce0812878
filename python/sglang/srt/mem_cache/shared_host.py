"""One host pool for ranks that cache the same (`Replicas`).

With fewer KV heads than ranks, neighbouring ranks keep the same one. With latent attention every rank caches all
latents. Such ranks share the host pool of their leader, and it alone writes there and to storage. Ranks decide alike,
so they have the same pages in the same frames. An operation has ended once it has on all ranks (`rank_sync.py`): on
the followers it has at once.
"""

from __future__ import annotations

import os

import torch

from sglang.srt.distributed.parallel_state import Replicas, TensorParallelGroup
from sglang.srt.mem_cache.transfer import (
    D2H,
    P2H,
    STORAGE_LINKS,
    GateError,
    LayerGate,
    OpResult,
    StorageOp,
    Ticket,
    TransferOp,
)
from sglang.srt.utils.shared_memory import SharedMemory

# What writes to the host or to storage, or asks storage.
LEADERS_LINKS = (D2H, P2H, *STORAGE_LINKS)
# Above all that a leader can count: ranks agree on the least.
_MOST = 1 << 62


class LeftToLeader:
    """A link of a follower, whose operations its leader carries out. name: of `LEADERS_LINKS`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._next_seq = 0
        self._ended: list[OpResult] = []

    def submit(self, op: TransferOp | StorageOp) -> None:
        link, seq = op.ticket
        assert link == self.name and seq == self._next_seq, f"{op.ticket} out of order, {self._next_seq} expected"
        self._next_seq += 1
        # All in the first store, of which ranks agree on the least, too.
        self._ended.append(OpResult(seq, True, count=_MOST, far_count=0, part_count=_MOST))

    def cancel(self, ticket: Ticket) -> None:
        """It has ended."""

    def gate(self, ticket: Ticket) -> LayerGate:
        raise GateError(f"{ticket}: nothing waits for what goes to the host or to storage")

    def poll(self) -> list[OpResult]:
        ended, self._ended = self._ended, []
        return ended


def share_memory(
    memory: SharedMemory | None, size_bytes: int, group: TensorParallelGroup, replicas: Replicas
) -> SharedMemory:
    """The leader's memory, at its followers too. All ranks of all groups call this together. memory: a leader's; None
    at followers. Raises OSError at a follower that may not open it."""
    # Of each rank, its process and the memory's file descriptor in there.
    places = torch.full((group.size, 2), _MOST)
    if memory is not None:
        places[group.rank] = torch.tensor([os.getpid(), memory.fd])
    pid, fd = group.reduce_min(places)[replicas.leader].tolist()
    return memory or SharedMemory.of_process(pid, fd, size_bytes)
