"""Mixtures of experts against one token at a time, by each of the ways in which devices compute them."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from sgl_kernel.experts import group_by_expert, weighted_sum
from sgl_kernel.quantized import E2M1, FOUR_BITS, MatrixFormat
from sglang.srt.configs.experts import ClampedExperts, ExpertGroups, ExpertsConfig
from sglang.srt.distributed.parallel_state import SINGLE_RANK, Shard
from sglang.srt.layers.expert_router import ExpertRouter
from sglang.srt.layers.mixture import ExpertNames, Experts, Mixture
from support.triton_runs import needs_triton, run_interpreted

WAYS = ("_one_by_one", "_in_groups", "_in_tiles")
HIDDEN, WIDTH = 24, 40
# How a layer's tokens choose, and how its weights are stored.
LAYERS = (
    ({}, None),
    ({}, MatrixFormat(torch.float8_e4m3fn, 32)),
    ({"groups": ExpertGroups(4, 2, True, 2.5)}, MatrixFormat(FOUR_BITS, 32)),
    ({"groups": ExpertGroups(4, 2, False, 1.5)}, MatrixFormat(torch.int8)),
    ({"clamped": ClampedExperts(1.702, 7.0)}, MatrixFormat(E2M1, 32)),
)
NAMES = ExpertNames("gate", "up", "down", "shared")


CLAMPED = ClampedExperts(alpha=1.702, limit=0.7)


def make_experts(num_experts: int, dtype: torch.dtype, seed: int, clamped: ClampedExperts | None = None) -> Experts:
    experts = Experts(num_experts, HIDDEN, Shard(WIDTH, 0, WIDTH), dtype, clamped)
    generator = torch.Generator().manual_seed(seed)
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return experts


def drawn(num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """x, chosen and weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    # Some experts are chosen by no token.
    likely = torch.rand(num_tokens, num_experts, generator=generator) + (torch.arange(num_experts) % 3 == 0)
    weights, chosen = likely.softmax(-1).topk(top_k)
    return [x, chosen, weights]


def one_token(experts: Experts, x: torch.Tensor, chosen: list[int], weights: list[float]) -> torch.Tensor:
    total = torch.zeros(HIDDEN, dtype=torch.float64)
    for expert, weight in zip(chosen, weights):
        inside = experts.gate_up[expert].double() @ x.double()
        if experts.clamped is None:
            gate, up = inside.chunk(2)
            total += weight * (experts.down[expert].double() @ (F.silu(gate) * up))
        else:
            gate, up = (inside + experts.gate_up_bias[expert]).chunk(2)
            alpha, limit = experts.clamped.alpha, experts.clamped.limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out = experts.down[expert].double() @ ((up + 1) * gate * torch.sigmoid(alpha * gate))
            total += weight * (out + experts.down_bias[expert])
    return total


def compute(experts: Experts, way: str, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return weighted_sum(getattr(experts, way)(x, group_by_expert(chosen, experts.num_experts)), weights)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("clamped", [None, CLAMPED], ids=["silu", "clamped"])
def test_each_way_computes_the_sum_over_a_tokens_experts(
    way: str,
    dtype: torch.dtype,
    tolerance: float,
    clamped: ClampedExperts | None,
) -> None:
    rng = random.Random(4)
    for seed in range(12):
        num_experts = rng.choice((1, 2, 5, 16))
        top_k, num_tokens = rng.randint(1, num_experts), rng.choice((1, 2, 7, 33))
        experts = make_experts(num_experts, dtype, seed, clamped)
        x, chosen, weights = drawn(num_tokens, num_experts, top_k, dtype, seed)
        got = compute(experts, way, x, chosen, weights)
        assert got.shape == x.shape and got.dtype == dtype
        want = torch.stack([one_token(experts, *each) for each in zip(x, chosen.tolist(), weights.tolist())])
        error = ((got.double() - want).abs().max() / want.abs().max()).item()
        assert error < tolerance, f"seeds 4, {seed}: {num_tokens} tokens, {top_k} of {num_experts}: off by {error}"


@pytest.mark.parametrize("clamped", [None, CLAMPED], ids=["silu", "clamped"])
def test_in_the_kernel_of_a_cpu_a_token_does_not_depend_on_others(clamped: ClampedExperts | None) -> None:
    experts = make_experts(6, torch.float32, 1, clamped)
    batch = drawn(50, 6, 3, torch.float32, 2)
    plain = experts(*batch)
    experts.finish_loading()
    assert experts.gate_up is None, "no kernel took the weights"
    together = experts(*batch)
    assert torch.allclose(together, plain, atol=1e-5)
    for rows in (slice(0, 1), slice(7, 9), slice(20, 50)):
        assert torch.equal(experts(*(each[rows] for each in batch)), together[rows])


@pytest.mark.parametrize("way", ["_one_by_one", "_in_tiles"])
@pytest.mark.parametrize("format", [MatrixFormat(torch.float8_e4m3fn, 4), MatrixFormat(FOUR_BITS, 4)], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_experts_that_stay_quantised_are_what_was_quantised(way: str, format: MatrixFormat, num_ranks: int) -> None:
    """Each rank's part by itself, through the places of a checkpoint's tensors."""
    whole, batch = make_experts(6, torch.float32, 7), drawn(9, 6, 3, torch.float32, 8)
    sources = whole.weight_targets(NAMES)
    total = torch.zeros(9, HIDDEN)
    # What the ranks' parts mean, put together.
    means = {name: torch.empty(target.shape) for name, target in sources.items()}
    for rank in range(num_ranks):
        shard = Shard(WIDTH, rank * WIDTH // num_ranks, WIDTH // num_ranks)
        part = Experts(6, HIDDEN, shard, torch.float32, stored_as=format)
        assert part.gate_up is None and sum(each.numel() for each in part.parameters()) > 0
        for name, target in part.weight_targets(NAMES).items():
            target.fill(sources[name].tensor)
            assert target.shape == sources[name].shape
            means[name][target.index()] = target.matrix.dequantized(torch.float32)
        part.finish_loading()
        total += compute(part, way, *batch)
    for name, target in sources.items():
        assert (means[name] - target.tensor).abs().max() < 0.1, "as it was quantised"
        target.fill(means[name])
    assert torch.allclose(total, compute(whole, way, *batch), atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_the_ranks_parts_add_up_with_each_bias_once(way: str) -> None:
    whole = make_experts(4, torch.float32, 3, CLAMPED)
    batch = drawn(9, 4, 2, torch.float32, 4)
    want, total = compute(whole, way, *batch), torch.zeros(9, HIDDEN)
    targets = whole.weight_targets(NAMES)
    for rank in range(2):
        part = Experts(4, HIDDEN, Shard(WIDTH, rank * WIDTH // 2, WIDTH // 2), torch.float32, CLAMPED)
        for name, target in part.weight_targets(NAMES).items():
            target.fill(targets[name].tensor)
        total += compute(part, way, *batch)
    assert torch.allclose(total, want, atol=1e-5)


def test_a_router_with_a_bias_weighs_a_tokens_experts_alone() -> None:
    torch.manual_seed(6)
    router = ExpertRouter(ExpertsConfig(7, 3, WIDTH, True, 0, (True,), clamped=CLAMPED), HIDDEN, torch.float32)
    for parameter in router.parameters():
        parameter.normal_()
    x = torch.randn(11, HIDDEN)
    weights, chosen = router(x)
    best, want = (x @ router.gate.weight.T + router.bias).sort(descending=True)
    assert torch.equal(chosen, want[:, :3])
    assert torch.allclose(weights, best[:, :3].softmax(-1))
    assert set(router.weight_targets()) == {"weight", "bias"}


def test_a_shared_expert_and_no_tokens() -> None:
    """The shared expert's weight is the sigmoid of a gate of its own; the chosen ones' weights add up to 1 or not."""
    torch.manual_seed(3)
    shared = torch.nn.Linear(HIDDEN, HIDDEN)
    x = torch.randn(9, HIDDEN)
    with torch.inference_mode():
        for is_normalized in (False, True):
            config = ExpertsConfig(5, 2, WIDTH, is_normalized, HIDDEN, (True,))
            mixture = Mixture(config, HIDDEN, torch.float32, SINGLE_RANK, NAMES, shared)
            gate, shared_gate = mixture.router.gate, mixture.shared_expert_gate
            for parameter in (*mixture.experts.parameters(), gate.weight, shared_gate.weight):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            likely = (x @ gate.weight.T).softmax(-1)
            weights, chosen = likely.topk(2)
            if is_normalized:
                weights /= weights.sum(-1, keepdim=True)
            want = mixture.experts(x, chosen, weights)
            want += (x @ shared_gate.weight.T).sigmoid() * shared(x)
            assert torch.allclose(mixture(x), want, atol=1e-5)
            assert mixture(x[:0]).shape == (0, HIDDEN)


@needs_triton
def test_a_layer_by_a_gpus_kernels_under_the_interpreter() -> None:
    assert run_interpreted(__file__).count("is right") == len(LAYERS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clamped", [None, CLAMPED], ids=["silu", "clamped"])
def test_a_gpu_computes_what_the_cpu_does(dtype: torch.dtype, clamped: ClampedExperts | None) -> None:
    """Also as a CUDA graph, which is replayed with other tokens and other choices."""
    experts = make_experts(16, dtype, 5, clamped)
    batches = [drawn(num_tokens, 16, 4, dtype, num_tokens) for num_tokens in (1, 300, 40)]
    want = [experts(*batch) for batch in batches]
    experts.cuda()

    def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
        error = (got.cpu().float() - wanted.float()).abs().max() / wanted.float().abs().max()
        assert error < 0.05, f"off by {error}"

    with torch.inference_mode():
        for batch, wanted in zip(batches, want):
            near(experts(*(each.cuda() for each in batch)), wanted)
        held = [each.cuda() for each in batches[2]]
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            experts(*held)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            out = experts(*held)
        for to, other in zip(held, drawn(40, 16, 4, dtype, 8)):
            to.copy_(other)
        graph.replay()
        experts_there = [each.cpu() for each in held]
        result = out.clone()
    near(result, experts.cpu()(*experts_there))


# -- under the interpreter -----------------------------------------------------------------------------------------


def main() -> None:
    """It multiplies no matrices of bfloat16."""
    from sgl_kernel import experts
    from sgl_kernel.experts import triton_kernels

    for seed, (how, format) in enumerate(LAYERS):
        torch.manual_seed(seed)
        config = ExpertsConfig(8, 2, 64, True, 0, (True,), **how)
        mixture = Mixture(config, 64, torch.float16, SINGLE_RANK, NAMES, None, format)
        for target in mixture.weight_targets().values():
            target.fill(torch.randn(target.shape) * 0.2)
        x = torch.randn(9 + 30 * seed, 64).half()
        want = mixture(x)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "_module", lambda x: triton_kernels)
            weights, chosen = mixture.router(x)
            groups = group_by_expert(chosen, 8)
            got = weighted_sum(mixture.experts._in_tiles(x, groups), weights)
        error = ((got - want).abs().max() / want.abs().max()).item()
        assert error < 5e-3, f"{how}, {format}: off by {error}"
        print(f"layer {seed} is right")


if __name__ == "__main__":
    main()
