"""Linear layers, divided over the ranks of a tensor-parallel group. Each owns its rank's part of weight and bias.

A column-parallel layer has some of the outputs. A row-parallel layer takes some of the inputs and sums over ranks. A
column-parallel layer followed by a row-parallel one needs only that one sum: Megatron-LM (Shoeybi et al. 2019),
section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.distributed.parallel_state import Shard, TensorParallelGroup
from sglang.srt.layers.weights import WeightTarget


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class MergedColumnParallelLinear(nn.Module):
    """Several projections of the same input as one matrix. shards: this rank's rows of each projection, one below the
    other in `weight` (sum of their sizes, in_features)."""

    def __init__(self, in_features: int, shards: Sequence[Shard], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.shards = tuple(shards)
        total = sum(shard.size for shard in shards)
        self.weight = _empty(total, in_features, dtype=dtype)
        self.bias = _empty(total, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, in_features). Returns (num_tokens, sum of the shards' sizes)."""
        return F.linear(x, self.weight, self.bias)

    def weight_targets(self, names: Sequence[str]) -> dict[str, WeightTarget]:
        """The places of the checkpoint's separate projections: "<name>.weight" and "<name>.bias" -> parts of this
        layer's."""
        assert len(names) == len(self.shards)
        targets = {}
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is None:
                continue
            parts = fused.split([shard.size for shard in self.shards])
            for name, part, shard in zip(names, parts, self.shards):
                shape = (shard.full, *fused.shape[1:])
                targets[f"{name}.{kind}"] = WeightTarget(part, shape, 0, shard.start)
        return targets


class RowParallelLinear(nn.Module):
    """shard: this rank's part of the inputs. weight: (out_features, shard.size); bias: whole on every rank."""

    def __init__(
        self, shard: Shard, out_features: int, bias: bool, dtype: torch.dtype, group: TensorParallelGroup
    ) -> None:
        super().__init__()
        self.shard = shard
        self.group = group
        self.weight = _empty(out_features, shard.size, dtype=dtype)
        self.bias = _empty(out_features, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, shard.size). Returns (num_tokens, out_features), the same on every rank; the caller may
        overwrite it."""
        if self.group.size == 1:
            return F.linear(x, self.weight, self.bias)
        out = self.group.all_reduce(F.linear(x, self.weight))
        # The bias is added after the sum, so that it counts once and not once per rank.
        return out if self.bias is None else out.add_(self.bias)

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        shape = (self.weight.shape[0], self.shard.full)
        targets = {f"{name}.weight": WeightTarget(self.weight, shape, 1, self.shard.start)}
        if self.bias is not None:
            targets[f"{name}.bias"] = WeightTarget.whole(self.bias)
        return targets
