"""Linear layers, divided over the ranks of a tensor-parallel group. Each owns its rank's part of weight and bias.

A column-parallel layer has some of the outputs. A row-parallel layer takes some of the inputs and sums over ranks. A
column-parallel layer followed by a row-parallel one needs only that one sum: Megatron-LM (Shoeybi et al. 2019),
section 3.

`Weight` holds a matrix, quantised if the checkpoint's is and stays so. Where a kernel reads another layout than the
checkpoint's, `finish_loading` packs it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from sgl_kernel import elementwise, quantized
from sgl_kernel.cpu import few_rows
from sgl_kernel.cpu.library import takes
from sgl_kernel.cpu.packed_weight import PackedGate, PackedWeight
from sgl_kernel.quantized import MatrixFormat, QuantizedMatrix
from sglang.srt.distributed.parallel_state import Shard, TensorParallelGroup
from sglang.srt.layers.weights import QuantizedTarget, WeightTarget


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def plain_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, of a weight as it was loaded."""
    if few_rows.takes_few_rows(x, weight):
        return few_rows.linear(x, weight, bias)
    return F.linear(x, weight, bias)


class Weight(nn.Module):
    """A layer with a matrix. weight: (out_features, in_features) as loaded; None once it is packed, and if it is
    quantised. stored_as: of a quantised one."""

    def __init__(
        self, out_features: int, in_features: int, dtype: torch.dtype, stored_as: MatrixFormat | None = None
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None
        self.packed: PackedWeight | None = None
        self.quantized: QuantizedMatrix | None = None
        if stored_as is None:
            self.weight = _empty(out_features, in_features, dtype=dtype)
            return
        self.quantized = QuantizedMatrix.empty(stored_as, out_features, in_features)
        for name, tensor in self.quantized.tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

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
        if self.quantized is not None:
            return quantized.linear(x, self.quantized, bias)
        assert self.weight is not None
        return plain_product(x, self.weight, bias)


class MergedColumnParallelLinear(Weight):
    """Several projections of the same input as one matrix. shards: this rank's rows of each projection, one below the
    other in `weight` (sum of their sizes, in_features)."""

    def __init__(
        self,
        in_features: int,
        shards: Sequence[Shard],
        bias: bool,
        dtype: torch.dtype,
        stored_as: MatrixFormat | None = None,
    ) -> None:
        total = sum(shard.size for shard in shards)
        super().__init__(total, in_features, dtype, stored_as)
        self.shards = tuple(shards)
        self.bias = _empty(total, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, in_features). Returns (num_tokens, sum of the shards' sizes)."""
        return self.product(x, self.bias)

    def weight_targets(self, names: Sequence[str]) -> dict[str, WeightTarget]:
        """The places of the checkpoint's separate projections: "<name>.weight" and "<name>.bias" -> parts of this
        layer's."""
        assert len(names) == len(self.shards)
        targets: dict[str, WeightTarget] = {}
        begin = 0
        for name, shard in zip(names, self.shards):
            if self.quantized is not None:
                shape = (shard.full, self.quantized.shape[1])
                part = self.quantized.outputs(begin, shard.size)
                targets[f"{name}.weight"] = QuantizedTarget.of(part, shape, 0, shard.start)
            for kind, fused in (("weight", self.weight), ("bias", self.bias)):
                if fused is not None:
                    rows = fused[begin : begin + shard.size]
                    targets[f"{name}.{kind}"] = WeightTarget(rows, (shard.full, *fused.shape[1:]), 0, shard.start)
            begin += shard.size
        return targets


class GatedLinear(MergedColumnParallelLinear):
    """The first half of a gated feed-forward layer: gate and up, of one input and as many outputs each. activation:
    "silu" or "gelu_tanh"."""

    def __init__(
        self,
        in_features: int,
        shard: Shard,
        bias: bool,
        dtype: torch.dtype,
        stored_as: MatrixFormat | None = None,
        activation: str = "silu",
    ) -> None:
        super().__init__(in_features, (shard, shard), bias, dtype, stored_as)
        self._gate: PackedGate | None = None
        self._is_silu = activation == "silu"

    def finish_loading(self) -> None:
        if not self._is_silu:
            super().finish_loading()
        elif self.weight is not None and takes(self.weight):
            self._gate = PackedGate(self.weight)
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, in_features). Returns activation(gate) * up, (num_tokens, the shard's size)."""
        if self._gate is not None:
            return self._gate.linear(x, self.bias)
        activate = elementwise.silu_and_mul if self._is_silu else elementwise.gelu_tanh_and_mul
        return activate(super().forward(x))


class RowParallelLinear(Weight):
    """shard: this rank's part of the inputs. weight: (out_features, shard.size); bias: whole on every rank. is_part:
    the caller sums over ranks."""

    def __init__(
        self,
        shard: Shard,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        group: TensorParallelGroup,
        stored_as: MatrixFormat | None = None,
        is_part: bool = False,
    ) -> None:
        super().__init__(out_features, shard.size, dtype, stored_as)
        self.shard = shard
        self.group = group
        self.is_part = is_part
        self.bias = _empty(out_features, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, shard.size). Returns (num_tokens, out_features), the same on every rank, or its part; the
        caller may overwrite it."""
        if self.group.size == 1 or self.is_part:
            # The bias counts once and not once per rank.
            return self.product(x, self.bias if self.group.rank == 0 else None)
        out = self.group.all_reduce(self.product(x))
        # After the sum, for the same reason.
        return out if self.bias is None else out.add_(self.bias)

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        if self.quantized is not None:
            shape = (self.quantized.shape[0], self.shard.full)
            target: WeightTarget = QuantizedTarget.of(self.quantized, shape, 1, self.shard.start)
        else:
            weight = self.loaded()
            target = WeightTarget(weight, (weight.shape[0], self.shard.full), 1, self.shard.start)
        targets = {f"{name}.weight": target}
        if self.bias is not None:
            targets[f"{name}.bias"] = WeightTarget.whole(self.bias)
        return targets
