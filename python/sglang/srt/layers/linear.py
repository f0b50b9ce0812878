"""Linear layers, divided over the ranks of a tensor-parallel group. Each owns its rank's part of weight and bias.

A column-parallel layer has some of the outputs. A row-parallel layer takes some of the inputs and sums over ranks. A
column-parallel layer followed by a row-parallel one needs only that one sum: Megatron-LM (Shoeybi et al. 2019),
section 3.

`Weight` holds a matrix. Where a kernel reads another layout than the checkpoint's, `finish_loading` packs it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from sgl_kernel import elementwise
from sgl_kernel.cpu.library import takes
from sgl_kernel.cpu.packed_weight import PackedGate, PackedWeight
from sglang.srt.distributed.parallel_state import Shard, TensorParallelGroup
from sglang.srt.layers.weights import WeightTarget


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Weight(nn.Module):
    """A layer with a matrix. weight: (out_features, in_features) as loaded; None once it is packed."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = _empty(out_features, in_features, dtype=dtype)
        self.packed: PackedWeight | None = None

    def finish_loading(self) -> None:
        """Pack the weight if there is a kernel for its device and type. It can be loaded no more afterwards."""
        if self.weight is not None and takes(self.weight):
            self.packed = PackedWeight(self.weight)
            self.weight = None

    def loaded(self) -> nn.Parameter:
        assert self.weight is not None, "a packed weight cannot be loaded"
        return self.weight

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: (num_rows, in_features). Returns x @ weight.T + bias, a new tensor."""
        if self.packed is not None:
            return self.packed.linear(x, bias)
        assert self.weight is not None
        return F.linear(x, self.weight, bias)


class MergedColumnParallelLinear(Weight):
    """Several projections of the same input as one matrix. shards: this rank's rows of each projection, one below the
    other in `weight` (sum of their sizes, in_features)."""

    def __init__(self, in_features: int, shards: Sequence[Shard], bias: bool, dtype: torch.dtype) -> None:
        total = sum(shard.size for shard in shards)
        super().__init__(total, in_features, dtype)
        self.shards = tuple(shards)
        self.bias = _empty(total, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, in_features). Returns (num_tokens, sum of the shards' sizes)."""
        return self.product(x, self.bias)

    def weight_targets(self, names: Sequence[str]) -> dict[str, WeightTarget]:
        """The places of the checkpoint's separate projections: "<name>.weight" and "<name>.bias" -> parts of this
        layer's."""
        assert len(names) == len(self.shards)
        targets = {}
        for kind, fused in (("weight", self.loaded()), ("bias", self.bias)):
            if fused is None:
                continue
            parts = fused.split([shard.size for shard in self.shards])
            for name, part, shard in zip(names, parts, self.shards):
                shape = (shard.full, *fused.shape[1:])
                targets[f"{name}.{kind}"] = WeightTarget(part, shape, 0, shard.start)
        return targets


class GatedLinear(MergedColumnParallelLinear):
    """The first half of a gated feed-forward layer: gate and up, of one input and as many outputs each."""

    def __init__(self, in_features: int, shard: Shard, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, (shard, shard), bias, dtype)
        self._gate: PackedGate | None = None

    def finish_loading(self) -> None:
        if self.weight is not None and takes(self.weight):
            self._gate = PackedGate(self.weight)
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, in_features). Returns silu(gate) * up, (num_tokens, the shard's size)."""
        if self._gate is not None:
            return self._gate.linear(x, self.bias)
        return elementwise.silu_and_mul(super().forward(x))


class RowParallelLinear(Weight):
    """shard: this rank's part of the inputs. weight: (out_features, shard.size); bias: whole on every rank."""

    def __init__(
        self, shard: Shard, out_features: int, bias: bool, dtype: torch.dtype, group: TensorParallelGroup
    ) -> None:
        super().__init__(out_features, shard.size, dtype)
        self.shard = shard
        self.group = group
        self.bias = _empty(out_features, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, shard.size). Returns (num_tokens, out_features), the same on every rank; the caller may
        overwrite it."""
        if self.group.size == 1:
            return self.product(x, self.bias)
        out = self.group.all_reduce(self.product(x))
        # The bias is added after the sum, so that it counts once and not once per rank.
        return out if self.bias is None else out.add_(self.bias)

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        weight = self.loaded()
        shape = (weight.shape[0], self.shard.full)
        targets = {f"{name}.weight": WeightTarget(weight, shape, 1, self.shard.start)}
        if self.bias is not None:
            targets[f"{name}.bias"] = WeightTarget.whole(self.bias)
        return targets
