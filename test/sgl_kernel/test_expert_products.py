"""Choosing experts, and products with their matrices: against one row at a time, and their kernels, under Triton's
interpreter, where this file runs as a script, and compiled for sm_90."""

from __future__ import annotations

import math
import random
import re
import sys

import pytest
import torch
import torch.nn.functional as F

from sgl_kernel import experts
from sgl_kernel.experts import Choice, Weights, reference
from sgl_kernel.quantized import E2M1, FOUR_BITS, MatrixFormat, QuantizedMatrix
from support.triton_runs import PRODUCT_INSTRUCTIONS, SHARED_BYTES, compile_kernel, needs_triton, run_interpreted

FP8 = torch.float8_e4m3fn
SCORES = ("softmax", "sigmoid", "softmax_of_chosen")
# None: not quantised.
FORMATS = (
    None,
    MatrixFormat(FP8),
    MatrixFormat(FP8, 64),
    MatrixFormat(torch.int8, 32),
    MatrixFormat(FOUR_BITS, 32),
    MatrixFormat(E2M1, 32),
)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(
    format: MatrixFormat | None, num_experts: int, outputs: int, inputs: int, seed: int, dtype: torch.dtype
) -> tuple[Weights, torch.Tensor]:
    """Random ones, and what they mean, (num_experts, outputs, inputs) in float32."""
    if format is None:
        plain = (drawn(seed, num_experts, outputs, inputs) * 0.2).to(dtype)
        return plain, plain.float()
    matrix = QuantizedMatrix.empty(format, num_experts * outputs, inputs)
    if format.dtype == E2M1:
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(16, matrix.shape, generator=generator)
        matrix.take(numbers, 2.0 ** torch.randint(-5, 0, matrix.scales.shape, generator=generator), None)
    else:
        matrix.quantize(drawn(seed, *matrix.shape) * 0.2)
    return matrix, matrix.dequantized(torch.float32).view(num_experts, outputs, inputs)


def chosen_of(num_tokens: int, num_experts: int, top_k: int, seed: int) -> torch.Tensor:
    """Some experts are chosen by no token, one by most."""
    likely = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    likely += (torch.arange(num_experts) % 3 == 0).float() + 2.0 * (torch.arange(num_experts) == 3)
    return likely.topk(top_k).indices


def random_choice(rng: random.Random) -> tuple[Choice, int, bool]:
    """One, the number of experts, and whether there is a correction."""
    num_groups = rng.choice((1, 1, 2, 4, 8))
    per_group = rng.choice((1, 2, 3, 20, 32))
    kept = rng.randint(1, num_groups)
    scores = rng.choice(("softmax", "sigmoid")) if num_groups > 1 else rng.choice(SCORES)
    has_correction = scores == "sigmoid"
    top_k = rng.randint(1, min(kept * per_group, 10))
    scale = rng.choice((1.0, 2.5)) if scores != "softmax_of_chosen" else 1.0
    is_normalized = rng.random() < 0.5 and scores != "softmax_of_chosen"
    choice = Choice(top_k, scores, is_normalized, scale, num_groups, kept)
    return choice, num_groups * per_group, has_correction


def choose_one(logits: list[float], choice: Choice, correction: list[float] | None) -> tuple[list[float], list[int]]:
    """Of one token, number by number."""
    if choice.scores == "sigmoid":
        scores = [1 / (1 + math.exp(-each)) for each in logits]
    elif choice.scores == "softmax":
        total = sum(math.exp(each - max(logits)) for each in logits)
        scores = [math.exp(each - max(logits)) / total for each in logits]
    else:
        scores = logits
    ranks = [score + (0.0 if correction is None else correction[i]) for i, score in enumerate(scores)]
    size = len(ranks) // choice.num_groups
    groups = [sorted(ranks[i : i + size], reverse=True) for i in range(0, len(ranks), size)]
    of_groups = [sum(group[: 1 if correction is None else 2]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda group: -of_groups[group])[: choice.kept_groups]
    allowed = [i for i in range(len(ranks)) if i // size in kept]
    chosen = sorted(allowed, key=lambda i: -ranks[i])[: choice.top_k]
    weights = [scores[i] for i in chosen]
    if choice.scores == "softmax_of_chosen":
        weights = [math.exp(each - max(weights)) for each in weights]
    if choice.is_normalized or choice.scores == "softmax_of_chosen":
        weights = [each / sum(weights) for each in weights]
    return [each * choice.scale for each in weights], chosen


def check_choice(module, seed: int) -> None:
    choice, num_experts, has_correction = random_choice(random.Random(seed))
    # Numbers in 16 bits are often equal, and any of those may be chosen: no two are here.
    logits = torch.stack(
        [each[torch.randperm(num_experts)] for each in torch.linspace(-3, 3, num_experts).expand(5, -1)]
    )
    logits += drawn(seed, 5, num_experts) * 1e-3
    correction = drawn(seed + 1, num_experts) if has_correction else None
    wide = torch.cat((logits, logits), 1)[:, :num_experts]
    weights, chosen = module.choose(wide, choice, correction)
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int64
    for i, row in enumerate(logits.tolist()):
        want, experts_of_row = choose_one(row, choice, None if correction is None else correction.tolist())
        assert chosen[i].tolist() == experts_of_row, f"seed {seed}: {choice}"
        assert_near(weights[i], torch.tensor(want), 1e-5, f"seed {seed}: {choice}")


def check_groups(module, chosen: torch.Tensor, num_experts: int) -> None:
    places, ends = module.group_by_expert(chosen, num_experts)
    flat = chosen.flatten().tolist()
    assert places.tolist() == sorted(range(len(flat)), key=lambda place: flat[place])
    assert ends.tolist() == [sum(expert <= each for expert in flat) for each in range(num_experts)]


def check_products(module, format: MatrixFormat | None, dtype: torch.dtype, seed: int) -> None:
    """A layer: rows to their experts, on to other matrices of the same experts, back and added up."""
    rng = random.Random(seed)
    num_experts = rng.choice((1, 4, 5, 9))
    top_k, num_tokens = rng.randint(1, min(4, num_experts)), rng.choice((1, 3, 40))
    inputs, inside = rng.choice((64, 192)), rng.choice((64, 128))
    # Not all are multiples of a tile's step.
    inputs += 32 * (format is None or format.dtype == E2M1)
    outputs = rng.choice((24, 80))
    where = f"seed {seed}: {num_tokens} tokens, {top_k} of {num_experts}, {inputs} to {inside} to {outputs}, {format}"
    chosen = chosen_of(num_tokens, num_experts, top_k, seed)
    first, of_first = weights_of(format, num_experts, inside, inputs, seed, dtype)
    second, of_second = weights_of(format, num_experts, outputs, inside, seed + 1, dtype)
    x = drawn(seed + 2, num_tokens, inputs + 16).to(dtype)[:, :inputs]
    biases = [None, None]
    if seed % 2:
        biases = [drawn(seed + 3, num_experts, size).to(dtype) for size in (inside, outputs)]
    groups = experts.Groups(*module.group_by_expert(chosen, num_experts), top_k)

    in_order = module.product_of_tokens(x, first, groups, biases[0])
    at_places = torch.empty_like(in_order).index_copy_(0, groups.places.long(), in_order)
    got = module.product_to_places(in_order, second, groups, biases[1])
    share = torch.rand(num_tokens, top_k, generator=torch.Generator().manual_seed(seed))
    total = module.weighted_sum(got, share)
    assert in_order.dtype == got.dtype == total.dtype == dtype
    assert got.shape == (num_tokens, top_k, outputs) and total.shape == (num_tokens, outputs)

    tolerance = 1e-5 if dtype == torch.float32 else 3e-3 if dtype == torch.float16 else 2e-2
    for place, expert in enumerate(chosen.flatten().tolist()):
        bias = [None if each is None else each[expert].float() for each in biases]
        want = F.linear(x[place // top_k].float(), of_first[expert], bias[0])
        assert_near(at_places[place], want, tolerance, where)
        want = F.linear(at_places[place].float(), of_second[expert], bias[1])
        assert_near(got.flatten(0, 1)[place], want, tolerance, where)
    assert_near(total, (got.float() * share[..., None]).sum(1), tolerance, where)


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float, where: str) -> None:
    error, size = (got.float() - want).abs().max().item(), want.abs().max().item()
    assert error <= tolerance * max(size, 1e-3), f"{where}: off by {error} of {size}"


def test_a_token_has_the_best_experts_of_the_best_groups():
    torch.manual_seed(0)
    for seed in range(60):
        check_choice(reference, seed)
    weights, chosen = experts.choose(torch.empty(0, 8), Choice(3, "softmax"))
    assert weights.shape == chosen.shape == (0, 3)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_row_is_multiplied_by_its_experts_matrix(format, dtype):
    for seed in range(6):
        check_products(reference, format, dtype, seed)


def test_rows_of_an_expert_lie_side_by_side_in_their_order():
    for seed, (num_tokens, num_experts, top_k) in enumerate(((1, 1, 1), (5, 8, 3), (70, 40, 6))):
        check_groups(reference, chosen_of(num_tokens, num_experts, top_k, seed), num_experts)


@needs_triton
def test_a_long_prompt_has_no_more_programs_than_a_grid_may_have(monkeypatch: pytest.MonkeyPatch):
    from sgl_kernel.experts import triton_kernels

    grids = []
    monkeypatch.setattr(triton_kernels, "launch", lambda kernel, grid, *args, **options: grids.append(grid))
    num_tokens, top_k, num_experts = 131_072, 8, 64
    groups = experts.Groups(
        torch.empty(num_tokens * top_k, dtype=torch.int32, device="meta"),
        torch.empty(num_experts, dtype=torch.int32, device="meta"),
        top_k,
    )
    x, weights = torch.empty(num_tokens, 64, device="meta"), torch.empty(num_experts, 128, 64, device="meta")
    triton_kernels.product_of_tokens(x, weights, groups, None)
    (grid,) = grids
    assert grid[0] < 1 << 31 and all(size <= 65_535 for size in grid[1:])


@needs_triton
def test_under_the_interpreter():
    assert run_interpreted(__file__, "choices", "groups", "products", "long_prompts").count("are right") == 4


@needs_triton
@pytest.mark.parametrize("capability", [90, 89, 80, *(pytest.param(c, marks=pytest.mark.slow) for c in (100, 120))])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_they_compile(format, capability):
    """For GPUs with such compute capabilities."""
    from sgl_kernel.experts import triton_kernels as kernels

    if capability == 80 and format is not None and format.dtype == FP8:
        return  # computes with no e4m3
    for dtype in ("bf16", "fp16"):
        weights, _ = weights_of(format, 2, 64, 256, 0, torch.bfloat16)
        values = "*" + dtype
        if format is not None:
            values = {FP8: "*fp8e4nv", torch.int8: "*i8"}.get(format.dtype, "*u8")
        pointers = {"values_ptr": values, "scales_ptr": "*u8" if format and format.dtype == E2M1 else "*fp32"}
        pointers |= {"zeros_ptr": "*u8", "places_ptr": "*i32", "ends_ptr": "*i32"}
        absent = [("scales_ptr", format is None), ("zeros_ptr", format is None or format.dtype != FOUR_BITS)]
        types = {
            name: pointers.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
            for name in kernels._product_kernel.arg_names
        }
        for tile in kernels._TILES:
            constants = {name: None for name, is_absent in absent if is_absent}
            constants |= {"EXPERTS": 128, "READS_PLACES": True, "ROWS": tile.rows, "OUTPUTS": tile.outputs}
            constants |= kernels.stored_constants(weights, 256, tile.step, many=tile.rows > 16)
            aligned = {name for name in types if name not in ("num_experts", "top_k")}
            compiled = compile_kernel(
                kernels._product_kernel, types, constants, aligned, tile.warps, tile.stages, capability
            )
            ptx = compiled.asm["ptx"]
            assert PRODUCT_INSTRUCTIONS[capability] in ptx and "cp.async" in ptx
            assert compiled.metadata.shared <= SHARED_BYTES[capability]
            if format is not None and format.dtype != FOUR_BITS:
                # Values come many with one load.
                assert len(re.findall(r"ld\.global[a-z.:0-9]*\.b8", ptx)) <= 8, ptx


@needs_triton
@pytest.mark.parametrize("scores", SCORES)
def test_choosing_compiles_without_spills(scores):
    from sgl_kernel.experts import triton_kernels as kernels

    names = kernels._choose_kernel.arg_names
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in names} | {"scale": "fp32"}
    types |= {"chosen_ptr": "*i64", "logits_ptr": "*fp32" if scores == "sigmoid" else "*bf16"}
    constants = {"SCORES": scores, "IS_NORMALIZED": True, "TOP_K": 8, "NUM_GROUPS": 1, "KEPT_GROUPS": 1}
    constants |= {"GROUPS": 1, "MEMBERS": 256, "PLACES": 8}
    if scores == "sigmoid":
        constants |= {"NUM_GROUPS": 8, "KEPT_GROUPS": 4, "GROUPS": 8, "MEMBERS": 32}
    else:
        constants["correction_ptr"] = None
    compiled = compile_kernel(kernels._choose_kernel, types, constants, set(), num_warps=1)
    assert ".local" not in compiled.asm["ptx"] and "shfl" in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_choosing_on_a_gpu():
    torch.manual_seed(0)
    for seed in range(60):
        check_choice(OnCuda, seed)


class OnCuda:
    @staticmethod
    def choose(logits, choice, correction):
        found = experts.choose(logits.cuda(), choice, None if correction is None else correction.cuda())
        return [each.cpu() for each in found]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_on_a_gpu(format, dtype):
    for num_tokens, num_experts, top_k in ((1, 128, 8), (33, 40, 4), (700, 9, 3), (3000, 8, 2)):
        chosen = chosen_of(num_tokens, num_experts, top_k, 1)
        weights, _ = weights_of(format, num_experts, 384, 512, 2, dtype)
        x = drawn(3, num_tokens, 512).to(dtype)
        groups = experts.group_by_expert(chosen.cuda(), num_experts)
        assert torch.equal(groups.places.cpu().long(), reference.group_by_expert(chosen, num_experts)[0])
        at = experts.Groups(*reference.group_by_expert(chosen, num_experts), top_k)
        on_gpu = weights.cuda() if isinstance(weights, torch.Tensor) else on_cuda(weights)
        got = experts.product_of_tokens(x.cuda(), on_gpu, groups)
        assert_near(got.cpu(), reference.product_of_tokens(x, weights, at, None).float(), 2e-2, str(format))
        back = experts.product_to_places(x[:1].cuda().expand(len(at.places), -1), on_gpu, groups)
        want = reference.product_to_places(x[:1].expand(len(at.places), -1), weights, at, None)
        assert_near(back.cpu(), want.float(), 2e-2, str(format))


def on_cuda(matrix: QuantizedMatrix) -> QuantizedMatrix:
    zeros = None if matrix.zeros is None else matrix.zeros.cuda()
    return QuantizedMatrix(matrix.format, matrix.values.cuda(), matrix.scales.cuda(), zeros)


# -- under the interpreter -----------------------------------------------------------------------------------------


def choices() -> None:
    from sgl_kernel.experts import triton_kernels

    for seed in range(40):
        check_choice(triton_kernels, seed)
    # An expert of NaN is one of the experts.
    _, chosen = triton_kernels.choose(torch.full((2, 6), torch.nan), Choice(3, "softmax"), None)
    assert bool((chosen >= 0).all()) and bool((chosen < 6).all())


def groups() -> None:
    from sgl_kernel.experts import triton_kernels

    for seed, (num_tokens, num_experts, top_k) in enumerate(((1, 1, 1), (1, 40, 8), (70, 40, 6), (700, 3, 2))):
        check_groups(triton_kernels, chosen_of(num_tokens, num_experts, top_k, seed), num_experts)


def products() -> None:
    from sgl_kernel.experts import triton_kernels

    # It multiplies no matrices of bfloat16.
    for format in FORMATS:
        for seed in range(3):
            check_products(triton_kernels, format, torch.float16, seed)
    check_products(triton_kernels, None, torch.float32, 4)


def long_prompts() -> None:
    """Tiles with many rows, whose values are scaled one by one."""
    from sgl_kernel.experts import triton_kernels

    triton_kernels._TILES = triton_kernels._TILES[-1:]
    for seed, format in enumerate(FORMATS):
        check_products(triton_kernels, format, torch.float16, seed)


def main() -> None:
    for name in sys.argv[1:]:
        globals()[name]()
        print(f"{name} are right")


if __name__ == "__main__":
    main()
