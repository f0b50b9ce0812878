"""The fused kernels of a decoder and of sampling, in Triton: as torch under its interpreter, where this file runs as
a script, and compiled for sm_90."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from support.triton_runs import compile_kernel, needs_triton, run_interpreted

TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Memory, and in it pages of K and of V.
Pools = tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
# Of rows, as large models have them; and of no power of two.
WIDTHS = (64, 100, 4096)
CHECKS = (
    "norms",
    "heads_of_queries_and_keys",
    "activations",
    "rotations",
    "stores",
    "rotations_into_slots",
    "latents_into_slots",
    "cuts",
    "penalties",
    "draws",
)


@needs_triton
def test_under_the_interpreter():
    assert run_interpreted(__file__, *CHECKS).count("are right") == len(CHECKS)


@needs_triton
@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_they_compile_for_sm_90(dtype: str):
    """In a process without the interpreter. Aligned rows are moved 16 bytes at a time."""
    from sgl_kernel.elementwise import triton_kernels as kernels
    from sgl_kernel.sampling import triton_kernels as of_sampling

    def compiled(
        kernel: Any, constants: dict[str, Any], num_warps: int = 4, types: Mapping[str, str] = MappingProxyType({})
    ) -> str:
        names, floats = kernel.arg_names, ("eps",)
        pointers = {"positions_ptr": "*i64", "loc_ptr": "*i64", "table_ptr": "*fp32", "scales_ptr": "*fp32"}
        pointers |= {"probs_ptr": "*fp32", "top_ks_ptr": "*i64", "top_ps_ptr": "*fp32"}
        pointers |= dict.fromkeys(("logits_ptr", "penalties_ptr"), "*fp32")
        pointers |= {"rows_ptr": "*i64", "slots_ptr": "*i64", "counts_ptr": "*i16"}
        pointers |= types
        types = {name: pointers.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32") for name in names}
        types |= {name: "fp32" for name in names if name in floats}
        aligned = {name for name in names if name not in floats and not name.startswith("num_")}
        return compile_kernel(kernel, types, constants, aligned, num_warps).asm["ptx"]

    for residual in ({"residual_ptr": None}, {}):
        ptx = compiled(kernels._rmsnorm_kernel, {"BLOCK": 4096, **residual}, 16)
        assert "rsqrt" in ptx and "st.global.v4.b32" in ptx, ptx
    assert "rsqrt" in compiled(kernels._qk_rmsnorm_kernel, {"ROWS": 16, "BLOCK_D": 128})
    for limit in (None, 7.0):
        ptx = compiled(kernels._activation_kernel, {"ALPHA": 1.702, "LIMIT": limit, "BLOCK": 1024})
        assert "ex2" in ptx and ("min." in ptx) == (limit is not None), ptx
    assert "st.global" in compiled(kernels._rope_kernel, {"ROWS": 16, "BLOCK_D": 64})
    # Of a power of two, a slot's page takes no division.
    alone = {"ROWS": 8, "BLOCK_D": 128, "PAGE_SIZE": 16, "MOST": None}
    ptx = compiled(kernels._store_kv_kernel, alone)
    assert "st.global.v4.b32" in ptx and "div.s64" not in ptx, ptx
    together = {"ROWS": 16, "BLOCK_D": 64, "PAGE_SIZE": 16, "MOST": None}
    for scales, divides in (({}, True), ({"scales_ptr": None}, False)):
        ptx = compiled(kernels._rope_and_store_kernel, together | scales)
        assert "st.global.v4.b32" in ptx and ("div.rn" in ptx) == divides, ptx
    pages = dict.fromkeys(("k_pages_ptr", "v_pages_ptr"), "*fp8e4nv")
    ptx = compiled(kernels._store_kv_kernel, alone | {"MOST": 448.0}, types=pages)
    assert "e4m3x2" in ptx and "min." in ptx, ptx
    ptx = compiled(kernels._rope_and_store_kernel, together | {"MOST": 448.0}, types=pages)
    assert "e4m3x2" in ptx and "min." in ptx, ptx
    pages = dict.fromkeys(("k_pages_ptr", "v_pages_ptr"), "*fp8e5")
    ptx = compiled(kernels._store_kv_kernel, alone | {"MOST": 57344.0}, types=pages)
    assert "e5m2" not in ptx and "cvt.rz" not in ptx and "st.global.v" in ptx, ptx
    of_latent = {"ROWS": 32, "BLOCK_D": 32, "BLOCK_R": 512, "PAGE_SIZE": 64, "INTERLEAVED": True}
    if dtype != "fp32":
        ptx = compiled(kernels._store_latent_kernel, of_latent | {"MOST": None})
        assert "rsqrt" in ptx and "div.s64" not in ptx, ptx
        of_pages = {"pages_ptr": "*fp8e4nv"}
        assert "e4m3x2" in compiled(kernels._store_latent_kernel, of_latent | {"MOST": 448.0}, types=of_pages)
    if dtype == "fp32":
        assert "st.global.v4.b32" in compiled(of_sampling._keep_top_kernel, {"BLOCK": 8192}, 16)
        # Eight counts at a time.
        assert "ld.global.v4.b32" in compiled(of_sampling._penalize_kernel, {"BLOCK": 4096})
        drawn = dict.fromkeys(("temperatures_ptr", "min_ps_ptr", "peaks_ptr", "masses_ptr", "values_ptr"), "*fp32")
        drawn |= {"places_ptr": "*i32", "sums_ptr": "*fp64"}
        drawn |= dict.fromkeys(("seeds_ptr", "positions_ptr", "tokens_ptr"), "*i64")
        assert "ld.global.v4.b32" in compiled(of_sampling._peaks_kernel, {"BLOCK": 2048}, types=drawn)
        assert "st.global.v4.b32" in compiled(of_sampling._probs_kernel, {"BLOCK": 2048, "COLUMNS": 128}, types=drawn)
        for is_probs in (False, True):
            options = {"BLOCK": 2048, "COLUMNS": 128, "IS_PROBS": is_probs}
            assert "add.f64" in compiled(of_sampling._sums_kernel, options, types=drawn)
            ptx = compiled(of_sampling._draw_kernel, options, types=drawn)
            assert "mul.lo.s64" in ptx and "add.f64" in ptx, ptx


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rotations_into_slots_on_a_gpu():
    rotations_into_slots("cuda")
    latents_into_slots("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_stores_on_a_gpu():
    stores("cuda")


@needs_triton
def test_none_is_compiled_again_where_a_launchs_numbers_lie_elsewhere():
    """They come as one copy, so that each array begins where others end."""
    from sgl_kernel.elementwise import triton_kernels as of_elements
    from sgl_kernel.sampling import triton_kernels as of_sampling

    found = 0
    for kernel in (*vars(of_elements).values(), *vars(of_sampling).values()):
        for param in getattr(kernel, "params", ()):
            if param.name in ("positions_ptr", "loc_ptr"):
                found += 1
                assert param.do_not_specialize_on_alignment, kernel
    assert found >= 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_draws_on_a_gpu():
    draws("cuda")


# -- under the interpreter -----------------------------------------------------------------------------------------


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Torch rounds in between, the kernels once at the end."""
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.float() - want.float()).abs()
    bound = 3 * torch.finfo(want.dtype).eps * want.float().abs().clamp(min=0.5)
    assert bool((error <= bound).all()), f"off by {error.max()}"


def numbers(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norms() -> None:
    from sgl_kernel.elementwise import reference, triton_kernels

    for dtype in TORCH_TYPES.values():
        for width in WIDTHS:
            x, residual = (numbers(seed, 3, width, dtype=dtype) for seed in (1, 2))
            weight = numbers(3, width, dtype=dtype)
            # A row's neighbours are not its own.
            wide = torch.full((3, width + 8), torch.nan, dtype=dtype)
            wide[:, :width] = x
            near(triton_kernels.rmsnorm(wide[:, :width], weight, 1e-5), reference.rmsnorm(x.clone(), weight, 1e-5))
            want = reference.fused_add_rmsnorm(x.clone(), residual.clone(), weight, 1e-5)
            got = triton_kernels.fused_add_rmsnorm(x, residual, weight, 1e-5)
            assert got[0] is x and got[1] is residual
            for a, b in zip(got, want, strict=True):
                near(a, b)
            of_float32 = numbers(3, width, dtype=torch.float32)
            near(triton_kernels.rmsnorm(x, of_float32, 1e-5), reference.rmsnorm(x.clone(), of_float32, 1e-5))


def heads_of_queries_and_keys() -> None:
    from sgl_kernel.elementwise import reference, triton_kernels

    for dtype, head_dim in ((torch.float16, 128), (torch.float32, 80), (torch.bfloat16, 24)):
        qkv = numbers(4, 3, 45, head_dim, dtype=dtype)
        before = qkv.clone()
        weight = torch.cat(
            (numbers(5, 1, head_dim, dtype=dtype).expand(30, -1), numbers(6, 9, head_dim, dtype=dtype))
        )
        for each in (weight, weight.float() + 0.001):
            near(triton_kernels.qk_rmsnorm(qkv[:, :39], each, 1e-5), reference.rmsnorm(qkv[:, :39], each, 1e-5))
        assert torch.equal(qkv, before)


def activations() -> None:
    from sgl_kernel.elementwise import reference, triton_kernels

    for dtype in TORCH_TYPES.values():
        for width in (8, 1500):
            x = 4 * numbers(7, 3, 2 * width, dtype=dtype)
            near(triton_kernels.silu_and_mul(x), reference.silu_and_mul(x.clone()))
            # In float32 torch's 1 + tanh loses digits of what is nearly 0.
            near(triton_kernels.gelu_tanh_and_mul(x), reference.gelu_tanh_and_mul(x.double()).to(dtype))
            clamped = triton_kernels.clamped_swish_and_mul(x, 1.702, 2.0)
            near(clamped, reference.clamped_swish_and_mul(x, 1.702, 2.0))


def rotations() -> None:
    from sgl_kernel.elementwise import reference, triton_kernels

    for dtype, head_dim in ((torch.float16, 128), (torch.float32, 24), (torch.bfloat16, 96)):
        angles = torch.rand(50, head_dim // 2, generator=torch.Generator().manual_seed(8)) * 6
        table = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype).float()
        positions = torch.tensor([49, 0, 7])
        qkv = numbers(9, 3, 45, head_dim, dtype=dtype)
        values = qkv[:, 39:].clone()
        cos, sin = table[positions].to(dtype)[:, None].chunk(2, dim=-1)
        want = reference.apply_rope(qkv[:, :39].clone(), torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
        triton_kernels.apply_rope(positions, qkv[:, :39], table)
        near(qkv[:, :39], want)
        assert torch.equal(qkv[:, 39:], values)


def pools(page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> Pools:
    """Pages of K and V in one tensor, as a layer of each pool has them: one behind the other, and page by page in
    turns, with something else between."""
    shape = page_size, num_kv_heads, head_dim
    layer_first = torch.zeros(2, 12 // page_size, *shape, dtype=dtype, device=device)
    page_first = torch.zeros(12 // page_size, 3, *shape, dtype=dtype, device=device)
    return (layer_first, *layer_first), (page_first, page_first[:, 0], page_first[:, 2])


def stores(device: str = "cpu") -> None:
    from sgl_kernel.elementwise import saturating_cast, triton_kernels

    loc = torch.tensor([8, 0, 11, 5], device=device)
    for dtype, num_heads, head_dim in ((torch.float16, 8, 128), (torch.float32, 3, 24), (torch.bfloat16, 40, 64)):
        qkv = numbers(10, 4, 3 * num_heads, head_dim, dtype=dtype).to(device)
        k, v = qkv[:, num_heads : 2 * num_heads], qkv[:, 2 * num_heads :]
        for page_size in (1, 2, 6):
            for memory, *pages in pools(page_size, num_heads, head_dim, dtype, device):
                triton_kernels.store_kv(*pages, loc, k, v)
                got = memory.clone()
                memory.zero_()
                for each, values in zip(pages, (k, v), strict=True):
                    each[loc // page_size, loc % page_size] = values
                assert torch.equal(got, memory)
    # All numbers of bfloat16 and float16, and some between, with NaN.
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    some = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(5)).to(torch.int32)
    for k in (every.view(torch.bfloat16), every.view(torch.float16), some.view(torch.float32)):
        memory = torch.zeros(2, 1 << 10, 1, 1, 64, dtype=torch.float8_e5m2, device=device)
        k = k.view(1 << 10, 1, 64).to(device)
        triton_kernels.store_kv(*memory, torch.arange(1 << 10, device=device), k, k)
        k = k.flatten()
        want = saturating_cast(k, torch.float8_e5m2)
        for got in memory.flatten(1):
            assert torch.equal(got.isnan(), k.isnan())
            assert torch.equal(got.view(torch.uint8)[~k.isnan()], want.view(torch.uint8)[~k.isnan()])
    # All values that there are, and larger ones. The interpreter rounds others, and NaN, in its own way.
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        k = torch.cat((values[values.isfinite()], torch.tensor([470.0, -1e5, 1e9]))).repeat(3)[:528]
        k = k.view(11, 3, 16).to(device)
        (_, *pages), _ = pools(1, 3, 16, dtype, device)
        loc = torch.arange(11, device=device) + 1
        triton_kernels.store_kv(*pages, loc, k, -k)
        for each, stored in zip(pages, (k, -k), strict=True):
            assert torch.equal(each[loc, 0].float(), saturating_cast(stored, dtype).float())


def rotations_into_slots(device: str = "cpu") -> None:
    from sgl_kernel.elementwise import triton_kernels
    from sglang.srt.layers.kv_scale import KVScale

    fp8 = torch.float8_e4m3fn
    # Queries, keys and values; in slots of another type; divided, heads alike or each by its own.
    for dtype, heads, head_dim, stored, scales in (
        (torch.float16, (30, 5, 5), 128, torch.float16, None),
        (torch.float32, (4, 2, 2), 24, torch.float32, None),
        (torch.bfloat16, (9, 9, 9), 96, torch.bfloat16, None),
        (torch.float16, (8, 2, 2), 64, fp8, [[0.5, 0.5], [0.25, 0.25]]),
        (torch.float16, (8, 2, 2), 64, torch.float16, [[0.3, 0.4], [1.7, 1.0]]),
        (torch.float32, (8, 3, 3), 128, fp8, [[0.3, 2.0, 1.0], [0.01, 0.02, 0.03]]),
    ):
        angles = torch.rand(50, head_dim // 2, generator=torch.Generator().manual_seed(12)) * 6
        table = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype).float().to(device)
        positions, loc = torch.tensor([49, 0, 7], device=device), torch.tensor([5, 0, 2], device=device)
        qkv = numbers(13, 3, sum(heads), head_dim, dtype=dtype).to(device)
        apart = qkv.clone()
        num_qk = heads[0] + heads[1]
        triton_kernels.apply_rope(positions, apart[:, :num_qk], table)
        of_heads = None if scales is None else torch.tensor(scales, device=device)
        scaled = KVScale(of_heads).stored(apart[:, heads[0] : num_qk], apart[:, num_qk:])
        for page_size in (1, 4):
            for memory, *pages in pools(page_size, heads[1], head_dim, stored, device):
                triton_kernels.store_kv(*pages, loc, *scaled)
                wanted = memory.clone()
                memory.zero_()
                rotated = qkv.clone()
                triton_kernels.apply_rope_and_store(
                    positions, rotated[:, :num_qk], rotated[:, num_qk:], table, *pages, loc, of_heads
                )
                # A GPU's compiler may round a product and a sum once in the one and twice in the other.
                for one, other in ((rotated[:, : heads[0]], apart[:, : heads[0]]), (memory, wanted)):
                    near(one, other) if device != "cpu" else np.testing.assert_array_equal(one.float(), other.float())


def latents_into_slots(device: str = "cpu") -> None:
    from sgl_kernel.elementwise import reference, triton_kernels

    # Queries of latents, or with as many values before the rotated ones as a head's own keys have.
    for dtype, num_heads, (rank, rotary_dim, before), page_size, interleaved in (
        (torch.float16, 40, (512, 64, 512), 4, True),
        (torch.bfloat16, 16, (512, 64, 128), 1, True),
        (torch.float16, 3, (48, 24, 48), 6, False),
    ):
        angles = torch.rand(50, rotary_dim // 2, generator=torch.Generator().manual_seed(14)) * 6
        angles[0] = 0
        table = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype).float().to(device)
        positions, loc = torch.tensor([49, 0, 7], device=device), torch.tensor([11, 0, 5], device=device)
        # Parts of wider projections, and of a pool whose pages hold other layers, too.
        q = numbers(15, 3, num_heads, 32 + rotary_dim, dtype=dtype).to(device)[..., 32:]
        latent = numbers(16, 3, 8 + rank + rotary_dim, dtype=dtype).to(device)[:, 8:]
        weight = numbers(17, rank, dtype=dtype).to(device)
        # Beyond what 8 bits have: without a rotation, so that no large values cancel, and normalised.
        latent[1] *= 1000
        weight[5] = 1500
        results = []
        for way in (triton_kernels, reference):
            q_out = torch.zeros(3, num_heads, before + rotary_dim, dtype=dtype, device=device)
            memory = torch.zeros(12 // page_size, 3, page_size, 1, rank + rotary_dim, dtype=dtype, device=device)
            way.store_latent(positions, q, q_out, latent, weight, 1e-6, table, memory[:, 1], loc, interleaved)
            results.append((q_out, memory))
        (q_out, memory), (want_q, want) = results
        near(q_out, want_q)
        near(memory, want)
        # The interpreter rounds to 8 bits in its own way, but always alike.
        small, small_want = (torch.zeros_like(memory, dtype=torch.float8_e4m3fn) for _ in range(2))
        rows = memory[loc // page_size, 1, loc % page_size]
        assert rows.abs().max() > 448
        triton_kernels.store_kv(small_want[:, 1], small_want[:, 0], loc, rows, torch.zeros_like(rows))
        triton_kernels.store_latent(positions, q, q_out, latent, weight, 1e-6, table, small[:, 1], loc, interleaved)
        assert torch.equal(small.float(), small_want.float())


def cuts() -> None:
    from sgl_kernel.sampling import triton_kernels
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingCuts

    def all_limited(deepest_top_k: int) -> SamplingCuts:
        return SamplingCuts(8, None, deepest_top_k, True, True, False, False)

    seed = 11
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    for vocab_size, flatness in ((5, 1.0), (1000, 0.3), (20_000, 3.0)):
        probs = (torch.randn(8, vocab_size, generator=generator) * flatness).softmax(-1)
        # Ties, and a row of one certain token.
        probs[1] = probs[1].sort().values[torch.arange(vocab_size) // 3 * 3]
        probs[1] /= probs[1].sum()
        probs[2] = 0
        probs[2, vocab_size // 2] = 1
        top_ks = torch.tensor([1, 2, 3, vocab_size, vocab_size, 40, vocab_size + 7, 3])
        top_ps = torch.tensor([1.0, 1.0, 0.5, 0.3, 0.7, 0.9, 1e-50, 0.999])
        want, got = probs.clone(), probs.clone()
        sampler._keep_top(want, top_ks, top_ps, all_limited(vocab_size))
        triton_kernels.keep_top(got, top_ks, top_ps)
        assert torch.equal(got, want), (vocab_size, (got != want).nonzero())


def penalties() -> None:
    from sgl_kernel.sampling import triton_kernels
    from sglang.srt.sampling import penalties as of_torch

    generator = torch.Generator().manual_seed(12)
    for vocab_size in (3, 4096, 9001):
        table = of_torch.PenaltyTable(6, vocab_size)
        for slot in range(5):
            table.start(slot, torch.randint(0, vocab_size, (50 * slot,), generator=generator))
        rows, slots = torch.tensor([4, 0, 3]), torch.tensor([2, 0, 4])
        values = torch.tensor([[0.5, 0.0, -0.25], [0.0, 1.5, 0.2], [1.0, 1.3, 0.8]])
        logits = torch.randn(5, vocab_size, generator=generator) * 4
        want, got = logits.clone(), logits.clone()
        with mock.patch.object(of_torch, "takes", lambda logits: False):
            table.apply(want, rows, slots, values)
        triton_kernels.penalize(got, rows, slots, table._counts, values)
        near(got, want)
        assert torch.equal(got[1], logits[1]) and not torch.equal(got[4], logits[4])


def draws(device: str = "cpu") -> None:
    """Beside torch on the CPU, which defines what is drawn. A row's token does not depend on the others."""
    from sgl_kernel import sampling as kernels
    from sgl_kernel.sampling import triton_kernels
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams

    def tokens(
        logits: torch.Tensor, params: list[SamplingParams], positions: torch.Tensor, by_triton: bool
    ) -> torch.Tensor:
        place = torch.device(device if by_triton else "cpu")
        info = SamplingBatchInfo.from_params(params, logits.shape[1], positions.to(place), place)
        cuts = {"has_renorm_kernels": lambda probs: False, "has_triton": lambda logits: by_triton}
        with (
            mock.patch.multiple(kernels, **cuts, _triton=lambda: triton_kernels),
            mock.patch.object(sampler, "takes", lambda logits: False),
        ):
            return sampler.Sampler()(logits.to(place), info).cpu()

    seed = 13
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    kinds = (
        {},
        {"temperature": 0.0},
        {"temperature": 1e-38},
        {"temperature": 1.7, "min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 3},
        {"top_p": 0.6, "min_p": 0.2},
        {"top_k": 40, "top_p": 0.9, "temperature": 0.5},
    )
    for vocab_size, flatness in ((1, 1.0), (40, 1.0), (2048, 3.0), (9001, 0.3), (20_000, 4.0)):
        for some in (kinds, kinds[:5], kinds[1:3]):
            params = [SamplingParams(sampling_seed=7 - 5 * i, **kind) for i, kind in enumerate(some * 3)]
            wide = torch.randn(len(params), vocab_size + 3, generator=generator) * flatness
            # Of rows, one with ties, and one of which a grammar allows a single token, the last.
            wide[1] = wide[1].round()
            wide[0, : vocab_size - 1] = -torch.inf
            logits = wide[:, :vocab_size]
            positions = torch.randint(0, 1 << 40, (len(params),), generator=generator)
            want, got = tokens(logits, params, positions, False), tokens(logits, params, positions, True)
            differ = (got != want).nonzero().flatten().tolist()
            # A GPU's exponentials are off by units in the last place: a number next to a border may fall beyond.
            assert got.dtype == torch.int64 and len(differ) <= int(device == "cuda"), (vocab_size, differ)
            assert (logits.gather(1, got[:, None]) > -torch.inf).all()
            for i in (0, len(params) - 1):
                assert tokens(logits[i : i + 1], params[i : i + 1], positions[i : i + 1], True).item() == got[i]
    # The draw is next to a border between tokens: float32 sums in another order would give another one.
    logits = torch.randn(151_936, generator=torch.Generator().manual_seed(5)).expand(2, -1).contiguous()
    alone, beside = [SamplingParams(sampling_seed=0)], SamplingParams(sampling_seed=0, top_k=5)
    positions = torch.tensor([287_902, 1])
    token = tokens(logits[:1], alone, positions[:1], True)
    assert token == tokens(logits, [*alone, beside], positions, True)[0]
    assert device == "cuda" or token == tokens(logits[:1], alone, positions[:1], False)
    logits = torch.full((4, 5000), torch.nan)
    logits[1] = -torch.inf
    logits[2] = torch.arange(-5000, 0)
    logits[2, 700] = torch.nan
    got = tokens(logits, [SamplingParams()] * 3 + [SamplingParams(temperature=0.0)], torch.arange(4), True)
    assert got[:3].tolist() == [4999] * 3 and 0 <= got[3] < 5000, got


def main() -> None:
    for name in sys.argv[1:]:
        globals()[name]()
        print(f"{name} are right")


if __name__ == "__main__":
    main()
