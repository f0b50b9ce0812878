"""`Mixture`: a feed-forward layer of experts, of which each token takes a few. Divided over ranks like a dense one.

Owns this rank's part of every expert: some of the width inside, so that all ranks compute the same tokens. Shazeer et
al. 2017, "Outrageously Large Neural Networks", section 2: the output is the sum of the chosen experts' outputs, each
times its weight. `ExpertRouter` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from sgl_kernel import elementwise, experts
from sgl_kernel.cpu.library import takes
from sgl_kernel.cpu.packed_weight import PackedGate, PackedWeight
from sgl_kernel.experts import Groups
from sgl_kernel.quantized import LEAST_GROUP, MatrixFormat, QuantizedMatrix
from sglang.srt.configs.experts import ClampedExperts, ExpertsConfig
from sglang.srt.distributed.parallel_state import Shard, TensorParallelGroup
from sglang.srt.layers.expert_router import ExpertRouter
from sglang.srt.layers.linear import Weight, plain_product
from sglang.srt.layers.weights import QuantizedTarget, WeightTarget

# If experts have more rows in the mean, torch's kernel for groups computes those of bfloat16. It has one on GPUs with
# such compute capabilities (Hopper and B200), for rows in pieces of so many bytes. Elsewhere it may copy the groups'
# sizes to the host first, and wait, or have no kernel: for a B300 none is known.
_MEAN_FOR_LIBRARY = 64
_HAVE_GROUPS = ((9, 0), (10, 0))
_ALIGNMENT = 16


class ExpertNames(NamedTuple):
    """In checkpoints: of gate, up and down in an expert, of the expert that computes every token besides, and of what
    chooses experts."""

    gate: str
    up: str
    down: str
    shared: str
    router: str = "gate"


class FeedForward(Protocol):
    """A layer of (num_tokens, hidden_size) to the same shape."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def weight_targets(self) -> dict[str, WeightTarget]: ...


class Experts(nn.Module):
    """gate_up: (num_experts, 2 * shard.size, hidden_size), the gate's rows above up's. down: (num_experts,
    hidden_size, shard.size). None once packed, and if they are quantised. shard: this rank's part of the width inside
    an expert. clamped: with biases, (num_experts, 2 * shard.size) and (num_experts, hidden_size). The latter is whole
    on every rank, and only the first one adds it. stored_as: of quantised ones."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        shard: Shard,
        dtype: torch.dtype,
        clamped: ClampedExperts | None = None,
        stored_as: MatrixFormat | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.shard, self.clamped = num_experts, shard, clamped

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        sizes = {"gate_up": (2 * shard.size, hidden_size), "down": (hidden_size, shard.size)}
        self.gate_up: nn.Parameter | None = None
        self.down: nn.Parameter | None = None
        # All experts' outputs one below the other.
        self.quantized: dict[str, QuantizedMatrix] = {}
        for name, (outputs, inputs) in sizes.items():
            if stored_as is None:
                setattr(self, name, empty(num_experts, outputs, inputs))
                continue
            matrix = self.quantized[name] = QuantizedMatrix.empty(stored_as, num_experts * outputs, inputs)
            for kind, tensor in matrix.tensors.items():
                self.register_parameter(f"{name}_{kind}", nn.Parameter(tensor, requires_grad=False))
        self.gate_up_bias = None if clamped is None else empty(num_experts, 2 * shard.size)
        self.down_bias = None if clamped is None else empty(num_experts, hidden_size)
        self._packed: list[tuple[PackedGate, PackedWeight]] = []

    @property
    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Those that this rank adds, of gate_up and of down."""
        return self.gate_up_bias, self.down_bias if self.shard.start == 0 else None

    def finish_loading(self) -> None:
        """As of `Weight`."""
        gate_up, down = self._loaded()
        if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor) and takes(gate_up):
            self.gate_up = self.down = None
            clamp = None if self.clamped is None else (self.clamped.alpha, self.clamped.limit)
            self._packed = [(PackedGate(gate, clamp), PackedWeight(out)) for gate, out in zip(gate_up, down)]

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, hidden_size). chosen: (num_tokens, top_k) int64, experts; weights: the same shape, float32.
        Returns (num_tokens, hidden_size), this rank's part of the sum over a token's experts. Does not wait for a
        GPU."""
        if not len(x):
            return torch.empty_like(x)
        groups = experts.group_by_expert(chosen, self.num_experts)
        if x.is_cpu:
            outputs = self._one_by_one(x, groups)
        elif len(groups.places) > _MEAN_FOR_LIBRARY * self.num_experts and _multiplies_groups(*self._loaded()):
            outputs = self._in_groups(x, groups)
        else:
            outputs = self._in_tiles(x, groups)
        return experts.weighted_sum(outputs, weights)

    # Each of the three returns (num_tokens, top_k, hidden_size).

    def _one_by_one(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Waits for what was chosen. With packed weights a token's result does not depend on the others."""
        compute = self._compute_packed() if self._packed else self._compute_loaded()
        in_order = experts.each_expert(x[groups.places // groups.top_k], groups, compute)
        return torch.empty_like(in_order).index_copy_(0, groups.places, in_order).unflatten(0, (len(x), -1))

    def _compute_packed(self) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """What computes an expert's rows."""
        packed, (of_gate_up, of_down) = self._packed, self.biases

        def compute(expert: int, x: torch.Tensor) -> torch.Tensor:
            gate, down = packed[expert]
            inside = gate.linear(x, None if of_gate_up is None else of_gate_up[expert])
            return down.linear(inside, None if of_down is None else of_down[expert])

        return compute

    def _compute_loaded(self) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """The same, with weights that are not packed."""
        weights, biases = self._loaded(), self.biases

        def compute(expert: int, x: torch.Tensor) -> torch.Tensor:
            gate_up, down = (experts.weight_of(each, expert, self.num_experts, x.dtype) for each in weights)
            of_gate_up, of_down = (None if bias is None else bias[expert] for bias in biases)
            return plain_product(self._activate(plain_product(x, gate_up, of_gate_up)), down, of_down)

        return compute

    def _activate(self, inside: torch.Tensor) -> torch.Tensor:
        """inside: (rows, 2 * shard.size), gate and up. Returns (rows, shard.size)."""
        if self.clamped is None:
            return elementwise.silu_and_mul(inside)
        return elementwise.clamped_swish_and_mul(inside, self.clamped.alpha, self.clamped.limit)

    def _in_tiles(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """By our own kernel, which reads quantised weights too."""
        gate_up, down = self._loaded()
        of_gate_up, of_down = self.biases
        inside = self._activate(experts.product_of_tokens(x, gate_up, groups, of_gate_up))
        return experts.product_to_places(inside, down, groups, of_down)

    def _in_groups(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """By torch's kernel for groups."""
        gate_up, down = self._loaded()
        assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
        of_gate_up, of_down = self.biases
        places, ends = groups.places.long(), groups.ends.int()
        # Each row's expert.
        experts_of_rows = None
        if of_gate_up is not None:
            experts_of_rows = torch.searchsorted(ends, torch.arange(len(places), device=x.device), right=True)
        inside = F.grouped_mm(x[places // groups.top_k], gate_up.transpose(1, 2), offs=ends)
        if of_gate_up is not None:
            inside += of_gate_up[experts_of_rows]
        in_order = F.grouped_mm(self._activate(inside), down.transpose(1, 2), offs=ends)
        if of_down is not None:
            in_order += of_down[experts_of_rows]
        return torch.empty_like(in_order).index_copy_(0, places, in_order).unflatten(0, (len(x), -1))

    def _loaded(self) -> tuple[experts.Weights, experts.Weights]:
        gate_up, down = self.quantized.get("gate_up", self.gate_up), self.quantized.get("down", self.down)
        assert gate_up is not None and down is not None, "packed weights are not read as they were"
        return gate_up, down

    def weight_targets(self, names: ExpertNames) -> dict[str, WeightTarget]:
        """A name like "<expert>.<name>.weight" or "<expert>.<name>.bias" -> a part of a parameter."""
        (gate_up, down), shard, targets = self._loaded(), self.shard, {}
        hidden_size = down.shape[0] // self.num_experts if isinstance(down, QuantizedMatrix) else down.shape[1]
        for expert in range(self.num_experts):
            # The first of the gate, and of up.
            for name, begin in ((names.gate, 0), (names.up, shard.size)):
                rows = _rows(gate_up, expert * 2 * shard.size + begin, shard.size)
                targets[f"{expert}.{name}.weight"] = _target(rows, (shard.full, hidden_size), 0, shard.start)
            rows = _rows(down, expert * hidden_size, hidden_size)
            targets[f"{expert}.{names.down}.weight"] = _target(rows, (hidden_size, shard.full), 1, shard.start)
            if self.gate_up_bias is not None and self.down_bias is not None:
                for name, bias in zip((names.gate, names.up), self.gate_up_bias[expert].chunk(2)):
                    targets[f"{expert}.{name}.bias"] = WeightTarget(bias, (shard.full,), 0, shard.start)
                targets[f"{expert}.{names.down}.bias"] = WeightTarget.whole(self.down_bias[expert])
        return targets


def _rows(weights: experts.Weights, begin: int, size: int) -> experts.Weights:
    """Of all experts' outputs one below the other."""
    if isinstance(weights, QuantizedMatrix):
        return weights.outputs(begin, size)
    return weights.flatten(0, 1)[begin : begin + size]


def _target(rows: experts.Weights, shape: tuple[int, int], dim: int, start: int) -> WeightTarget:
    if isinstance(rows, QuantizedMatrix):
        return QuantizedTarget.of(rows, shape, dim, start)
    return WeightTarget(rows, shape, dim, start)


class Mixture(nn.Module):
    """shared: the expert that computes every token besides; its result is this rank's part. Where experts have no
    groups it has a weight, the sigmoid of a score."""

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        dtype: torch.dtype,
        group: TensorParallelGroup,
        names: ExpertNames,
        shared: FeedForward | None,
        stored_as: MatrixFormat | None = None,
    ) -> None:
        super().__init__()
        self.names, self.group = names, group
        self.router = ExpertRouter(config, hidden_size, dtype)
        # Ranks share whole groups of quantised inputs. If these do not divide, the last ranks' parts are padded.
        step = 1 if stored_as is None else stored_as.group or LEAST_GROUP
        assert config.intermediate_size % step == 0, "a format whose groups do not divide the width"
        shard = group.shard(config.intermediate_size // step).times(step)
        self.experts = Experts(config.num_experts, hidden_size, shard, dtype, config.clamped, stored_as)
        self.shared_expert = shared
        has_gate = shared is not None and config.groups is None
        self.shared_expert_gate = Weight(1, hidden_size, dtype) if has_gate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, hidden_size), the same on every rank, as is the result, (num_tokens, hidden_size)."""
        weights, chosen = self.router(x)
        out = self.experts(x, chosen, weights)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is None:
                out = out.add_(shared)
            else:
                out = out.addcmul_(self.shared_expert_gate.product(x).sigmoid(), shared)
        return self.group.all_reduce(out)

    def tokens_of_kernels(self) -> list[int]:
        """From so many tokens on, other kernels multiply."""
        share = self.router.config.top_k / self.experts.num_experts
        return sorted({int(mean / share) + 1 for mean in (*experts.row_limits(), _MEAN_FOR_LIBRARY)})

    def weight_targets(self) -> dict[str, WeightTarget]:
        parts = {"experts": self.experts.weight_targets(self.names), self.names.router: self.router.weight_targets()}
        if self.shared_expert is not None:
            parts[self.names.shared] = self.shared_expert.weight_targets()
        if self.shared_expert_gate is not None:
            parts["shared_expert_gate"] = {"weight": WeightTarget.whole(self.shared_expert_gate.loaded())}
        return {f"{part}.{name}": target for part, targets in parts.items() for name, target in targets.items()}


def _multiplies_groups(*weights: experts.Weights) -> bool:
    """Whether torch has a kernel for them that takes the groups from the device."""
    return all(
        isinstance(weight, torch.Tensor)
        and weight.dtype == torch.bfloat16
        and weight.stride(1) * weight.element_size() % _ALIGNMENT == 0
        and _has_groups(weight.device)
        for weight in weights
    )


@cache
def _has_groups(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in _HAVE_GROUPS
