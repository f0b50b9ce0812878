"""The Triton backend on latents, whose values are the first part of their keys: right under Triton's interpreter,
where this file runs as a script, and compiled for sm_90."""

from __future__ import annotations

import math
import random
import re
import sys
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import WINDOW_TILE, AttentionMetadata, PartialMask
from sglang.srt.layers.attention.merge_state import merge_state
from sglang.srt.mem_cache.kv_view import KVSegment, KVView, PagedSegments
from sglang.srt.mem_cache.page_memory import indexable
from support.triton_runs import (
    NO_ROTARY,
    SHARED_BYTES,
    compile_kernel,
    needs_triton,
    run_interpreted,
    spilled_bytes,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
# Values of a latent, and the rotated ones behind them.
SMALL, DEEPSEEK = (32, 16), (512, 64)
# kv_len and q_len: decodes beside extends of every kind, some of them long enough for splits.
MIXED = ((70, 1), (41, 7), (0, 1), (17, 17), (0, 3), (200, 1), (150, 5))
DECODES = ((33, 1), (0, 1), (150, 1), (1, 1))
MASKS: list[dict[str, Any]] = [
    {"window": 13},
    {"softcap": 0.7},
    {"window": 90, "softcap": 1.5, "sinks": torch.linspace(-2, 2, 16)},
]


class LatentCase:
    """A batch of pages in one table, in a pool that is full of NaN elsewhere. k and v share memory."""

    def __init__(self, seed, page_size, dtype, reqs, group=16, dims=SMALL, kv_dtype=None):
        torch.manual_seed(seed)
        self.seed, self.page_size, self.value_dim = seed, page_size, dims[0]
        self.scale = 0.8 * sum(dims) ** -0.5
        self.num_pages = sum(-(-kv_len // page_size) for kv_len, _ in reqs) + 3
        # Layers lie beside each other in a page.
        pool = torch.full((self.num_pages, 3, page_size, 1, sum(dims)), math.nan, dtype=kv_dtype or dtype)
        k = pool[:, 1]
        self.view = KVView(k, k[..., : self.value_dim])
        self.q = torch.randn(sum(q_len for _, q_len in reqs), group, sum(dims)).to(dtype)
        self.meta = AttentionMetadata(tuple(q_len for _, q_len in reqs), self.scale)
        columns = np.zeros(len(reqs), np.int64), *(np.array(each, np.int64) for each in zip(*reqs))
        table = torch.zeros(self.num_pages + 2 * len(reqs), dtype=torch.int32)
        on_device = (torch.zeros(len(reqs), dtype=torch.int64) for _ in range(2))
        self.segments = PagedSegments(table, page_size, *columns, *on_device)
        self.fill(*zip(*reqs))

    def fill(self, kv_lens, q_lens):
        """Other latents in other pages, as before the replay of a graph."""
        segments, rng = self.segments, random.Random(self.seed)
        segments.kv_lens[:], segments.q_lens[:] = kv_lens, q_lens
        self.view.k.fill_(math.nan)
        pages, end = rng.sample(range(1, self.num_pages), self.num_pages - 1), 1
        # By request, the keys.
        self.keys = []
        for i, kv_len in enumerate(kv_lens):
            mine = torch.tensor([pages.pop() for _ in range(-(-kv_len // self.page_size))], dtype=torch.int64)
            segments.starts[i] = end
            segments.table[end : end + len(mine)] = mine
            end += len(mine) + 1
            keys = torch.randn(kv_len, self.q.shape[2]).to(self.view.k.dtype)
            slots = torch.arange(kv_len)
            indexable(self.view.k)[mine[slots // self.page_size], slots % self.page_size, 0] = indexable(keys)
            self.keys.append(keys.double())
        segments.device_starts.copy_(torch.from_numpy(segments.starts))
        segments.device_kv_lens.copy_(torch.from_numpy(segments.kv_lens))

    def want(self, meta):
        row, results = 0, []
        for keys, q_len in zip(self.keys, self.segments.q_lens.tolist()):
            q = self.q[row : row + q_len].double()
            row += q_len
            before = len(keys) - q_len
            results.append(reference(q, keys, self.value_dim, meta, before)[0])
        return torch.cat(results)

    def check(self, backend, meta=None, times=1):
        meta = meta or self.meta
        want = self.want(meta)
        for _ in range(times):  # the second call repeats what the first one recorded
            got = backend.forward(self.q, self.view, self.segments, meta)
            assert got.shape == (*self.q.shape[:2], self.value_dim)
            assert got.dtype == self.q.dtype and got.is_contiguous()
            error = (got[: len(want)].double() - want).abs().max().item()
            tolerance = 2e-2 if self.q.dtype != torch.float32 else 2e-5 if self.q.is_cuda else 3e-6
            assert error < tolerance, f"page {self.page_size}, {self.q.dtype}, {meta}: off by {error}"


def reference(q, keys, value_dim, meta, before):
    """Query i sees the keys up to before + i. Returns out and lse, zeros and -inf without keys."""
    if not len(keys):
        return torch.zeros(*q.shape[:2], value_dim, dtype=torch.float64), torch.full(q.shape[:2], -math.inf)
    scores = torch.einsum("qhd,kd->qhk", q, keys) * meta.scale
    if meta.softcap is not None:
        scores = meta.softcap * (scores / meta.softcap).tanh()
    ahead = torch.arange(len(keys)) - (before + torch.arange(len(q)))[:, None]
    hidden = (ahead > 0) | (ahead <= -(meta.window or len(keys) + len(q) + before))
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    total = lse if meta.sinks is None else torch.logaddexp(lse, meta.sinks.double().expand_as(lse))
    return torch.einsum("qhk,kd->qhd", (scores - total[..., None]).exp(), keys[:, :value_dim]), lse


# -- without the interpreter ---------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("what", ["quick", pytest.param("batches,splits,graphs,parts,masks", marks=pytest.mark.slow)])
def test_under_the_interpreter(what: str):
    assert run_interpreted(__file__, *what.split(",")).count("are right") == what.count(",") + 1


@needs_triton
def test_other_sizes_and_other_memory_are_refused():
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend = TritonAttnBackend(num_sms=132)
    for value_dim, rotary_dim in ((48, 16), (32, 24), (32, 8)):
        case = LatentCase(1, 4, torch.float32, ((9, 1),), dims=(value_dim, rotary_dim))
        with pytest.raises(ValueError, match=f"values of {value_dim} .* powers of two"):
            backend.forward(case.q, case.view, case.segments, case.meta)
    case = LatentCase(1, 4, torch.float32, ((9, 1),))
    for v in (case.view.v.clone(), case.view.k[..., SMALL[1] :]):
        view = KVView(case.view.k, v)
        with pytest.raises(ValueError, match="in the same memory"):
            backend.forward(case.q, view, case.segments, case.meta)
        with pytest.raises(ValueError, match="in the same memory"):
            backend.partial(case.q, view, case.segments[0][0], 1.0)


@needs_triton
def test_few_requests_fill_a_gpu():
    from sglang.srt.layers.attention.triton_backend import split_extends
    from sglang.srt.layers.attention.triton_tiles import HOPPER_SHARED_BYTES, Heads, Tiles

    bf16 = torch.bfloat16
    # Tokens of a decode's split times the multiprocessors: 32 K keys fill them, and 8 K those of 16 heads.
    for group, split in ((16, 64), (32, 64), (64, 128), (128, 128)):
        tiles = Tiles.of_latents(bf16, bf16, group, HOPPER_SHARED_BYTES)
        assert tiles.least_decode_split == split and split % tiles.decode_keys == 0
        assert max(tiles.decode_keys, tiles.extend.keys) <= WINDOW_TILE
        assert tiles.fewest_queries(Heads(1, group), 132) is None
        q_lens, before = np.array([48]), np.array([12_288])
        splits = split_extends(q_lens, q_lens + before, before, Heads(1, group), tiles.extend, 132)
        assert 96 <= len(splits.blocks[0]) <= 132


@needs_triton
@pytest.mark.parametrize(
    ("heads", "kv", "page_size", "most_spilled"),
    [
        (16, "bf16", 64, 0),
        pytest.param(16, "bf16", 1, 0, marks=pytest.mark.slow),
        pytest.param(16, "fp8e4nv", 64, 192, marks=pytest.mark.slow),
        pytest.param(32, "bf16", 64, 96, marks=pytest.mark.slow),
        pytest.param(128, "bf16", 64, 1024, marks=pytest.mark.slow),
        pytest.param(128, "bf16", 1, 1024, marks=pytest.mark.slow),
        pytest.param(128, "fp8e4nv", 64, 1024, marks=pytest.mark.slow),
    ],
)
def test_decodes_compile_for_sm_90(heads: int, kv: str, page_size: int, most_spilled: int):
    from sglang.srt.layers.attention.triton_kernels import decode_kernel

    tiles = tiles_of(heads, kv)
    rows = min(tiles.decode_rows, heads)
    given = {"BLOCK_H": rows, "BLOCK_N": tiles.decode_keys, "LEAST": tiles.least_decode_split, "AT_ONCE": 128}
    given |= {"reqs_ptr": None, "row_starts_ptr": None}
    check_compiled(compiled(decode_kernel, heads, kv, page_size, given, tiles), rows, most_spilled)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv", "page_size", "most_spilled"),
    [(16, "bf16", 64, 512), (128, "bf16", 1, 512), (128, "fp8e4nv", 64, 1024)],
)
def test_extends_compile_for_sm_90(heads: int, kv: str, page_size: int, most_spilled: int):
    from sglang.srt.layers.attention.triton_kernels import extend_kernel

    tiles = tiles_of(heads, kv)
    given = {"BLOCK_M": tiles.extend.queries, "BLOCK_N": tiles.extend.keys}
    check_compiled(compiled(extend_kernel, heads, kv, page_size, given, tiles), tiles.extend.queries, most_spilled)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("masked", [(), ("sinks_ptr",)], ids=str)
def test_merges_compile_for_sm_90(masked: tuple[str, ...]):
    """The parts of the next splits come while others are added."""
    from sglang.srt.layers.attention.triton_merge_kernels import merge_decodes_kernel, merge_extends_kernel

    tiles = tiles_of(16, "bf16")
    merged = {"HEAD_DIM": 512, **tiles.merge.options(512)}
    of_decode = merged | {"LEAST": 64, "AT_ONCE": 128, "reqs_ptr": None, "row_starts_ptr": None}
    of_extend = merged | {"GROUP": 16, "BLOCK_M": 64}
    for kernel, given in ((merge_decodes_kernel, of_decode), (merge_extends_kernel, of_extend)):
        result = compile_for(kernel, given, "bf16", 4, 3, masked=masked)
        assert "cp.async.cg.shared.global" in result.asm["ptx"] and spilled_bytes(result) == 0


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype", "kv", "heads"),
    [
        (80, "bf16", "bf16", 128),
        (80, "fp32", "fp8e5", 128),
        (89, "bf16", "fp8e4nv", 128),
        (89, "bf16", "bf16", 128),
        (90, "fp32", "fp32", 128),
        # Rows of 40 heads are those of 64.
        (90, "bf16", "bf16", 40),
        (100, "bf16", "bf16", 128),
        (100, "bf16", "bf16", 40),
        (100, "fp16", "fp16", 16),
        (100, "bf16", "fp8e4nv", 128),
        (100, "bf16", "fp8e4nv", 16),
        (100, "fp32", "fp32", 128),
        (120, "bf16", "bf16", 128),
        (120, "bf16", "fp8e4nv", 128),
    ],
)
def test_tiles_fit_into_shared_memory(capability: int, dtype: str, kv: str, heads: int):
    from sglang.srt.layers.attention.triton_kernels import decode_kernel, extend_kernel

    tiles = tiles_of(heads, kv, dtype, capability)
    rows = min(tiles.decode_rows, 1 << (heads - 1).bit_length())
    of_decode = {"BLOCK_H": rows, "BLOCK_N": tiles.decode_keys, "LEAST": 64, "AT_ONCE": 128}
    of_extend = {"BLOCK_M": tiles.extend.queries, "BLOCK_N": tiles.extend.keys}
    for kernel, given in ((decode_kernel, of_decode), (extend_kernel, of_extend)):
        compiled(kernel, heads, kv, 16, given, tiles, dtype, capability)


@needs_triton
def test_where_keys_take_more_memory_there_are_fewer_of_them():
    hopper = [tiles_of(n, "bf16") for n in (16, 40, 128)]
    assert [(each.decode_keys, each.decode_stages) for each in hopper] == [(64, 5), (64, 3), (64, 3)]
    blackwell = [tiles_of(n, kv, capability=100) for kv in ("bf16", "fp8e4nv") for n in (16, 40, 128)]
    assert [each.decode_keys for each in blackwell] == [64, 32, 32, 64, 64, 64]
    assert [each.extend.keys for each in blackwell] == [32, 32, 32, 64, 64, 64]


TORCH_TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


def tiles_of(heads: int, kv: str, dtype: str = "bf16", capability: int = 90) -> Any:
    from sglang.srt.layers.attention.triton_tiles import Tiles

    shared_bytes = SHARED_BYTES[capability]
    return Tiles.of_latents(TORCH_TYPES[dtype], TORCH_TYPES[kv], heads, shared_bytes, capability == 100)


def compiled(
    kernel: Any,
    heads: int,
    kv: str,
    page_size: int,
    given: dict[str, Any],
    tiles: Any,
    dtype: str = "bf16",
    capability: int = 90,
) -> Any:
    """Of DeepSeek's latents."""
    value_dim, rotary_dim = DEEPSEEK
    constants = {"HEAD_DIM": value_dim, "ROTARY_DIM": rotary_dim, "BLOCK_D": value_dim, "GROUP": heads}
    constants |= {"PAGE_SIZE": page_size, "BY_SLOT": False, "IN_TOKENS": True, "TILE_IN_PAGE": False}
    constants |= {"v_ptr": None, **given}
    stages = tiles.decode_stages if "BLOCK_H" in given else tiles.num_stages
    return compile_for(kernel, constants, dtype, tiles.warps, stages, kv, capability)


def compile_for(
    kernel: Any,
    constants: dict[str, Any],
    dtype: str,
    num_warps: int,
    num_stages: int,
    kv: str | None = None,
    capability: int = 90,
    masked: tuple[str, ...] = (),
) -> Any:
    """Of a batch in a table of int32."""
    names = kernel.arg_names
    of_name = {"q_ptr": dtype, "out_ptr": dtype, "k_ptr": kv or dtype, "starts_ptr": "i64", "kv_lens_ptr": "i64"}
    of_name |= dict.fromkeys(("parts_ptr", "part_lses_ptr", "sinks_ptr"), "fp32")

    def type_of(name: str) -> str:
        if name.endswith("_ptr"):
            return f"*{of_name.get(name, 'i32')}"
        return "fp32" if name in ("scale", "cap") else "i64" if name.endswith("stride") else "i32"

    left_out = {"window", "cap", "sinks_ptr", "lse_ptr", *NO_ROTARY}.intersection(names).difference(masked)
    aligned = {"q_ptr", "k_ptr", "out_ptr", "parts_ptr", "part_lses_ptr"}
    aligned |= {name for name in names if name.endswith("stride")}
    types = {name: type_of(name) for name in names}
    return compile_kernel(
        kernel, types, dict.fromkeys(left_out) | constants, aligned, num_warps, num_stages, capability
    )


def check_compiled(result: Any, rows: int, most_spilled: int) -> None:
    """64 rows are multiplied by Hopper's instructions. Keys are copied while others are multiplied: they are in
    shared memory twice."""
    assert ("wgmma.mma_async" if rows == 64 else "mma.sync") in result.asm["ptx"]
    assert "cp.async.cg.shared.global" in result.asm["ptx"]
    buffers = re.findall(r"local_alloc : .*memdesc<(\d)x64x512x", result.asm["ttgir"])
    assert buffers and int(max(buffers)) >= 2, "keys are copied into one place"
    spilled = spilled_bytes(result)
    assert spilled <= most_spilled, f"{spilled} bytes a thread"


@needs_triton
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_on_a_gpu(group: int, page_size: int, kv_dtype: torch.dtype):
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend = TritonAttnBackend()
    for reqs in (((3000, 1), (0, 1), (1, 1), (9000, 1)), ((3000, 1), (700, 48), (5, 5), (300, 300))):
        case = LatentCase(1, page_size, torch.bfloat16, reqs, group, DEEPSEEK, kv_dtype)
        want = case.want(case.meta)
        to = {"table": case.segments.table.cuda(), "device_starts": case.segments.device_starts.cuda()}
        segments = replace(case.segments, **to, device_kv_lens=case.segments.device_kv_lens.cuda())
        k = torch.empty_strided(case.view.k.shape, case.view.k.stride(), dtype=kv_dtype, device="cuda")
        k.copy_(case.view.k)
        for _ in range(2):
            got = backend.forward(case.q.cuda(), KVView(k, k[..., :512]), segments, case.meta)
            assert (got.cpu().double() - want).abs().max() < 2e-2


# -- under the interpreter -----------------------------------------------------------------------------------------


def quick(backend: Any) -> None:
    """Decodes and an extend, some of them in splits; then a segment alone."""
    LatentCase(1, 4, torch.float32, ((70, 1), (0, 1), (75, 3), (5, 1))).check(backend)
    case = LatentCase(8, 16, torch.float16, ((40, 1),))
    case.check(backend, replace(case.meta, **MASKS[2]))
    parts(backend, (2,))


def batches(backend: Any) -> None:
    for page_size, group, dtype, kv_dtype in (
        (1, 16, torch.float32, None),
        (4, 1, torch.float16, None),
        (16, 16, torch.float32, torch.float8_e4m3fn),
    ):
        LatentCase(1, page_size, dtype, MIXED, group, kv_dtype=kv_dtype).check(backend, times=2)
    # More heads than a program has rows.
    LatentCase(2, 4, torch.float32, ((40, 1), (9, 3)), group=128).check(backend)


def splits(backend: Any) -> None:
    """Of one request, so many that a merge takes several turns, and of several."""
    from sglang.srt.layers.attention import triton_backend

    launched: set[str] = set()
    original = triton_backend.Recording.launch

    def launch(self: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launched.add(kernel.fn.__name__)
        original(self, kernel, grid, *args, **options)

    triton_backend.Recording.launch = launch
    for reqs in (((330, 1),), ((330, 2),), ((150, 1), (330, 4), (200, 1))):
        LatentCase(3, 16, torch.float32, reqs).check(backend)
    assert {"merge_extends_kernel", "merge_decodes_kernel"} <= launched, launched
    triton_backend.Recording.launch = original


def graphs(backend: Any) -> None:
    """What is captured reads lengths on the device, and plans of extends that the host wrote before a replay."""
    backend.capturing = True
    case = LatentCase(4, 4, torch.float32, DECODES)
    case.check(backend)
    case.fill((3, 100, 0, 70), (1, 1, 1, 1))
    case.segments.kv_lens[:] = 1 << 40
    case.check(backend)
    case = LatentCase(5, 4, torch.float32, ((500, 6), (0, 0), (0, 0)))
    case.check(backend)
    case.fill((12, 300, 0), (2, 4, 0))
    backend.before_replay(case.segments)
    case.segments.kv_lens[:] = 1 << 40
    case.check(backend)
    backend.capturing = False


def parts(backend: Any, q_lens: tuple[int, ...] = (1, 5)) -> None:
    """Segments one by one, merged; that begin inside of a page, too; and lists of them."""
    for q_len in q_lens:
        case = LatentCase(6, 4, torch.float32, ((150, q_len),))
        (pages,) = [case.segments.table[1 : 1 + -(-150 // 4)].long()]
        before = 150 - q_len
        lists = [
            KVSegment(pages[:18], 70),
            KVSegment(pages[17 : -(-before // 4)], before - 70, skip=70 % 4),
            KVSegment(pages[before // 4 :], q_len, q_len > 1, before % 4),
        ]
        want, want_lse = reference(case.q.double(), case.keys[0], case.value_dim, case.meta, before)
        parts = [backend.partial(case.q, case.view, segment, case.scale) for segment in lists]
        assert all(out.shape == (q_len, 16, 32) and out.dtype == lse.dtype == torch.float32 for out, lse in parts)
        out, lse = reduce(lambda a, b: merge_state(*a, *b), parts)
        forward = backend.forward(case.q, case.view, [lists], case.meta)
        for got, right in ((out, want), (lse, want_lse), (forward, want)):
            assert (got - right).abs().max() < 5e-6
    mask = PartialMask(40, 0.7, before - 70)
    out, lse = backend.partial(case.q, case.view, lists[1], case.scale, mask)
    meta = replace(case.meta, window=40, softcap=0.7)
    want, want_lse = reference(case.q.double(), case.keys[0][70:before], case.value_dim, meta, before - 70)
    assert (out - want).abs().max() < 5e-6 and (lse - want_lse).abs().max() < 5e-6


def masks(backend: Any) -> None:
    for mask in MASKS:
        case = LatentCase(7, 16, torch.float32, ((150, 1), (90, 9), (2, 2)))
        case.check(backend, replace(case.meta, **mask))


def main() -> None:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.attention.triton_tiles import ExtendTile, MergeTile, Tiles

    torch.set_num_threads(1)
    tiles = Tiles(ExtendTile(64, 16, 16, least_split=32), decode_keys=16, decode_rows=64, least_decode_split=32)
    tiles = replace(tiles, more_decodes_per_sm=1, uses_whole_pages=False, merge=MergeTile(16, splits=4, values=16))
    backend = TritonAttnBackend(tiles, num_sms=6)
    for what in sys.argv[1:]:
        globals()[what](backend)
        print(f"{what} are right")


if __name__ == "__main__":
    main()
