"""`Mixture`: a feed-forward layer of experts, of which each token takes a few. Divided over ranks like a dense one.

Owns this rank's part of every expert: some of the width inside, so that all ranks compute the same tokens. Shazeer et
al. 2017, "Outrageously Large Neural Networks", section 2: the output is the sum of the chosen experts' outputs, each
times its weight. `ExpertRouter` chooses.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from sgl_kernel import elementwise
from sgl_kernel.cpu.library import takes
from sgl_kernel.cpu.packed_weight import PackedGate, PackedWeight
from sglang.srt.configs.experts import ClampedExperts, ExpertsConfig
from sglang.srt.distributed.parallel_state import Shard, TensorParallelGroup
from sglang.srt.layers.expert_router import ExpertRouter
from sglang.srt.layers.linear import Weight, plain_product
from sglang.srt.layers.weights import WeightTarget

# Where no kernel multiplies groups, each expert computes so many tokens at a time, whether it is theirs or not.
_MASKED_TOKENS = 256
# torch multiplies groups by a kernel on GPUs with such compute capabilities (Hopper, B200 and B300), rows in pieces
# of so many bytes. Elsewhere it copies the groups' sizes to the host first, and waits.
_HAVE_GROUPS = (9, 10)
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
    hidden_size, shard.size). None once packed. shard: this rank's part of the width inside an expert. clamped: with
    biases, (num_experts, 2 * shard.size) and (num_experts, hidden_size). The latter is whole on every rank, and only
    the first one adds it."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        shard: Shard,
        dtype: torch.dtype,
        clamped: ClampedExperts | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.shard, self.clamped = num_experts, shard, clamped

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        self.gate_up: nn.Parameter | None = empty(num_experts, 2 * shard.size, hidden_size)
        self.down: nn.Parameter | None = empty(num_experts, hidden_size, shard.size)
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
        if takes(gate_up):
            self.gate_up = self.down = None
            self._packed = [(PackedGate(gate), PackedWeight(out)) for gate, out in zip(gate_up, down)]

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, hidden_size). chosen: (num_tokens, top_k) int64, experts; weights: the same shape, float32.
        Returns (num_tokens, hidden_size), this rank's part of the sum over a token's experts."""
        if not len(x):
            return torch.empty_like(x)
        if x.is_cpu:
            return self._one_by_one(x, chosen, weights)
        if _multiplies_groups(*self._loaded()):
            return self._in_groups(x, chosen, weights)
        return torch.cat(
            [self._masked(*each) for each in zip(*(t.split(_MASKED_TOKENS) for t in (x, chosen, weights)))]
        )

    def _one_by_one(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Waits for what was chosen. With packed weights a token's result does not depend on the others."""
        top_k = chosen.shape[1]
        places = chosen.flatten().argsort(stable=True)
        inputs = x[places // top_k]
        ends = chosen.flatten().bincount(minlength=self.num_experts).cumsum(0).tolist()
        parts = [
            self._compute(expert, inputs[begin:end])
            for expert, (begin, end) in enumerate(pairwise((0, *ends)))
            if end > begin
        ]
        outputs = torch.empty_like(inputs).index_copy_(0, places, torch.cat(parts))
        outputs = outputs.view(*chosen.shape, -1)
        total = outputs[:, 0].float() * weights[:, :1]
        for place in range(1, top_k):
            total.addcmul_(outputs[:, place].float(), weights[:, place : place + 1])
        return total.to(x.dtype)

    def _compute(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        of_gate, of_down = (None if bias is None else bias[expert] for bias in self.biases)
        if self._packed:
            gate, down = self._packed[expert]
            limits = () if self.clamped is None else (self.clamped.alpha, self.clamped.limit)
            return down.linear(gate.linear(x, of_gate, *limits), of_down)
        gate_up, out = self._loaded()
        return plain_product(self._activate(plain_product(x, gate_up[expert], of_gate)), out[expert], of_down)

    def _activate(self, inside: torch.Tensor) -> torch.Tensor:
        """inside: (rows, 2 * shard.size), gate and up. Returns (rows, shard.size)."""
        if self.clamped is None:
            return elementwise.silu_and_mul(inside)
        return elementwise.clamped_swish_and_mul(inside, self.clamped.alpha, self.clamped.limit)

    def _in_groups(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Tokens in the order of their experts, each of which multiplies its own. Waits for nothing."""
        gate_up, down = self._loaded()
        gate_up_bias, down_bias = self.biases
        experts, places = chosen.flatten().sort(stable=True)
        every = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        inside = F.grouped_mm(x[places // chosen.shape[1]], gate_up.transpose(1, 2), offs=ends)
        if gate_up_bias is not None:
            inside += gate_up_bias[experts]
        sorted_outputs = F.grouped_mm(self._activate(inside), down.transpose(1, 2), offs=ends)
        if down_bias is not None:
            sorted_outputs += down_bias[experts]
        outputs = torch.empty_like(sorted_outputs).index_copy_(0, places, sorted_outputs)
        return _weighted_sum(outputs.view(*chosen.shape, -1), weights)

    def _masked(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Every expert computes every token. Waits for nothing."""
        gate_up, down = self._loaded()
        gate_up_bias, down_bias = self.biases
        every = x.expand(self.num_experts, *x.shape)
        inside = torch.bmm(every, gate_up.transpose(1, 2))
        if gate_up_bias is not None:
            inside += gate_up_bias[:, None]
        activated = self._activate(inside.flatten(0, 1))
        outputs = torch.bmm(activated.view(self.num_experts, len(x), -1), down.transpose(1, 2))
        if down_bias is not None:
            outputs += down_bias[:, None]
        tokens = torch.arange(len(x), device=x.device)
        return _weighted_sum(outputs[chosen, tokens[:, None]], weights)

    def _loaded(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.gate_up is not None and self.down is not None, "packed weights are not read as they were"
        return self.gate_up, self.down

    def weight_targets(self, names: ExpertNames) -> dict[str, WeightTarget]:
        """A name like "<expert>.<name>.weight" or "<expert>.<name>.bias" -> a part of a parameter."""
        (gate_up, down), shard, targets = self._loaded(), self.shard, {}
        for expert in range(self.num_experts):
            for name, rows in zip((names.gate, names.up), gate_up[expert].chunk(2)):
                shape = (shard.full, rows.shape[1])
                targets[f"{expert}.{name}.weight"] = WeightTarget(rows, shape, 0, shard.start)
            shape = (down.shape[1], shard.full)
            targets[f"{expert}.{names.down}.weight"] = WeightTarget(down[expert], shape, 1, shard.start)
            if self.gate_up_bias is not None and self.down_bias is not None:
                for name, rows in zip((names.gate, names.up), self.gate_up_bias[expert].chunk(2)):
                    targets[f"{expert}.{name}.bias"] = WeightTarget(rows, (shard.full,), 0, shard.start)
                targets[f"{expert}.{names.down}.bias"] = WeightTarget.whole(self.down_bias[expert])
        return targets


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
    ) -> None:
        super().__init__()
        self.names, self.group = names, group
        self.router = ExpertRouter(config, hidden_size, dtype)
        shard = group.shard(config.intermediate_size)
        self.experts = Experts(config.num_experts, hidden_size, shard, dtype, config.clamped)
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

    def weight_targets(self) -> dict[str, WeightTarget]:
        parts = {"experts": self.experts.weight_targets(self.names), self.names.router: self.router.weight_targets()}
        if self.shared_expert is not None:
            parts[self.names.shared] = self.shared_expert.weight_targets()
        if self.shared_expert_gate is not None:
            parts["shared_expert_gate"] = {"weight": WeightTarget.whole(self.shared_expert_gate.loaded())}
        return {f"{part}.{name}": target for part, targets in parts.items() for name, target in targets.items()}


def _multiplies_groups(*weights: torch.Tensor) -> bool:
    """Whether torch has a kernel for them that takes the groups from the device."""
    return all(
        weight.dtype == torch.bfloat16
        and weight.stride(1) * weight.element_size() % _ALIGNMENT == 0
        and _has_groups(weight.device)
        for weight in weights
    )


@cache
def _has_groups(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in _HAVE_GROUPS


def _weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """outputs: (num_tokens, top_k, hidden_size). Returns (num_tokens, hidden_size)."""
    return torch.bmm(weights.to(outputs.dtype)[:, None], outputs)[:, 0]
