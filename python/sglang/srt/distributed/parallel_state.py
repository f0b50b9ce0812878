"""`TensorParallelGroup`: the ranks that share one model, and their collectives. Owns the process groups.

Every rank calls the same collectives in the same order, whatever has happened to it. A launch that failed on one rank
still takes part, with values that are never read. All ranks end a collective with the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang.srt.utils.device import CPU

# all_gather_into_tensor's name since torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# The timeout for a rank that hangs. A rank that has ended breaks its connections at once.
_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Shard:
    """A rank's part of a dimension of `full` entries: `size` of them from `start` on. Entries beyond the end are
    padding."""

    full: int
    start: int
    size: int

    def times(self, width: int) -> Shard:
        """The same part where each entry is `width` long: heads -> rows of a projection."""
        return Shard(self.full * width, self.start * width, self.size * width)


@dataclass(frozen=True)
class Replicas:
    """Which ranks cache the same: they form a group, with one host pool and one storage tier. The first rank of a
    group, its leader, writes there. leaders: of each rank, its leader."""

    rank: int
    leaders: tuple[int, ...]

    @property
    def leader(self) -> int:
        """Of this rank's group."""
        return self.leaders[self.rank]

    @property
    def is_follower(self) -> bool:
        """Another rank writes what this rank reads."""
        return self.leader != self.rank

    @property
    def num_groups(self) -> int:
        return len(set(self.leaders))

    @property
    def index(self) -> int:
        """Of this rank's group, in the order of leaders."""
        return sorted(set(self.leaders)).index(self.leader)


@dataclass(frozen=True)
class TensorParallelGroup:
    """rank of size. model: the process group of the forward pass, on the compute stream; control: the scheduler's,
    on its thread. Both None for a single rank, where every operation is the identity."""

    rank: int = 0
    size: int = 1
    model: Any = None
    control: Any = None

    def shard(self, full: int) -> Shard:
        """This rank's part if all have the same size, rounded up. The last ranks' parts may be padding."""
        size = -(-full // self.size)
        return Shard(full, self.rank * size, size)

    def shard_kv_heads(self, num_kv_heads: int) -> Shard:
        """This rank's KV heads, see `kv_heads_of_ranks`."""
        return self.kv_heads_of_ranks(num_kv_heads)[self.rank]

    def kv_heads_of_ranks(self, num_kv_heads: int) -> list[Shard]:
        """The KV heads of each rank. A head is never divided: if there are fewer heads than ranks, neighbouring ranks
        keep the same one."""
        size = max(1, num_kv_heads // self.size)
        return [Shard(num_kv_heads, rank * num_kv_heads // self.size, size) for rank in range(self.size)]

    def replicas(self, cached: Sequence[object]) -> Replicas:
        """cached: of each rank, what the bytes in its cache depend on, beside what all ranks have in common."""
        return Replicas(self.rank, tuple(cached.index(each) for each in cached))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.size > 1 and x.numel():
            dist.all_reduce(x, group=self.model)
        return x

    def connect(self, device: torch.device) -> None:
        """Connect the ranks' GPUs, which takes memory of each. Raises RuntimeError where they cannot be."""
        if self.size > 1 and device.type == "cuda":
            self.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)

    def all_gather(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Concatenate the ranks' x: (..., n) to (..., size * n), in the order of ranks, and in another dtype if it is
        given."""
        if self.size == 1:
            return x if dtype is None else x.to(dtype)
        of_ranks = x.new_empty((self.size, *x.shape))
        if x.numel():
            _all_gather(of_ranks.flatten(0, 1), x.contiguous(), group=self.model)
        # One copy puts them side by side.
        together = torch.empty((*x.shape[:-1], self.size, x.shape[-1]), dtype=dtype or x.dtype, device=x.device)
        return together.copy_(of_ranks.movedim(0, -2)).flatten(-2)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, in place, on the model's group."""
        if self.size > 1:
            dist.broadcast(x, 0, group=self.model)
        return x

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise minimum over ranks, in place, on the control group."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self.control)
        return values


SINGLE_RANK = TensorParallelGroup()


def init_tensor_parallel(rank: int, size: int, store_file: str, device: torch.device = CPU) -> TensorParallelGroup:
    """Meet the other ranks. store_file: a path in a directory that only this user can enter. The connections stay on
    the loopback interface. device: this rank's, for the model's collectives. Collectives between GPUs have never
    run."""
    if size == 1:
        return SINGLE_RANK
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    dist.init_process_group(
        "gloo", rank=rank, world_size=size, store=dist.FileStore(store_file, size), timeout=_TIMEOUT
    )
    ranks = list(range(size))
    backend = "nccl" if device.type == "cuda" else "gloo"
    model = dist.new_group(ranks, timeout=_TIMEOUT, backend=backend)
    control = dist.new_group(ranks, timeout=_TIMEOUT)
    return TensorParallelGroup(rank, size, model, control)
