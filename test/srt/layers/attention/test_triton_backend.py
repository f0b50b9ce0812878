"""The Triton backend: right under Triton's interpreter, where this file runs as a script, and compiled for sm_90; on
a GPU, if there is one."""

from __future__ import annotations

import itertools
import math
import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import WINDOW_TILE, AttentionMetadata
from sglang.srt.layers.attention.masked_attention import masked_attention
from sglang.srt.mem_cache.kv_view import KVSegment, KVView
from support.attention_cases import (
    CAPTURED_EXTENDS,
    DECODES,
    EXTENDS,
    LAYOUTS,
    REPLAYED_EXTENDS,
    SMALL_TYPES,
    Case,
    PagedCase,
    check_batch,
    check_masked_partials,
    check_masks,
    check_pages_and_graphs,
    check_partials,
    make_view,
    on_gpu,
)
from support.triton_runs import (
    NO_ROTARY,
    SHARED_BYTES,
    compile_kernel,
    needs_triton,
    run_interpreted,
    spilled_bytes,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
# KV heads, query heads for each, head size: a size of no tile, more than a tile of heads, and the usual one.
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TORCH_TYPES |= {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
HEADS = [(2, 5, 24), (1, 80, 8), (1, 8, 128)]
HEADS_ON_A_GPU = [*HEADS, (8, 4, 128), (8, 1, 64)]
SMALL: dict[str, Any] = {"kv_heads": 2, "group": 1, "head_dim": 16}
INT_TYPES = (torch.int32, torch.int64)


@needs_triton
@pytest.mark.parametrize(
    "what",
    [
        "paged,capture",
        "captured_extends,batches,partials",
        "heads,splits,many_keys,edges,small_types",
        "masked",
        "engine",
    ],
)
def test_under_the_interpreter(what: str):
    assert run_interpreted(__file__, what).count("are right") == what.count(",") + 1


@needs_triton
def test_no_tile_reaches_farther_before_a_window_than_loads_do():
    from sglang.srt.layers.attention.triton_tiles import Tiles

    sizes = itertools.product(
        (8, 64, 128, 256, 512, 1024), TORCH_TYPES.values(), (1, 3, 16, 64, 128), SHARED_BYTES.values()
    )
    for head_dim, dtype, page_size, shared_bytes in sizes:
        tiles = Tiles.of(head_dim, dtype, page_size, shared_bytes)
        extends = [tile for tile in (tiles.extend, tiles.short) if tile is not None]
        assert max(tiles.decode_keys, *(max(t.keys, t.keys_of_pages) for t in extends)) <= WINDOW_TILE


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size", "table", "kv"),
    [
        ("bf16", 128, 1, "i32", "bf16"),
        ("bf16", 128, 64, "i64", "bf16"),
        ("fp16", 64, 16, "i32", "fp16"),
        ("bf16", 256, 16, "i32", "bf16"),
        ("bf16", 512, 16, "i32", "bf16"),
        ("fp32", 128, 16, "slots", "fp32"),
        ("bf16", 128, 16, "i32", "fp8e4nv"),
        ("fp16", 128, 1, "i32", "fp8e5"),
    ],
)
def test_it_compiles_for_sm_90(dtype: str, head_dim: int, page_size: int, table: str, kv: str):
    """In a process without the interpreter. Products of 16-bit matrices must be Hopper's, loads of keys copies into
    shared memory that overlap with them, K and V twice in shared memory, which must suffice."""
    from sglang.srt.layers.attention.triton_kernels import decode_kernel, extend_kernel
    from sglang.srt.layers.attention.triton_merge_kernels import merge_decodes_kernel, merge_extends_kernel
    from sglang.srt.layers.attention.triton_tiles import HOPPER_SHARED_BYTES, Tiles

    tiles, block_d = (
        Tiles.of(head_dim, TORCH_TYPES[dtype], page_size, HOPPER_SHARED_BYTES),
        1 << (head_dim - 1).bit_length(),
    )
    shape = {"HEAD_DIM": head_dim, "BLOCK_D": block_d}
    # Pools where K and V lie alike; once unlike each other.
    paged = {**shape, "PAGE_SIZE": page_size, "BY_SLOT": table == "slots", "GROUP": 4, "IN_TOKENS": head_dim != 256}
    paged["TILE_IN_PAGE"] = page_size == 64
    tile = tiles.extend
    tile_keys = tile.keys if table == "slots" else tile.keys_of_pages
    of_extend = {**paged, "BLOCK_M": tile.queries, "BLOCK_N": tile_keys}
    of_decode = {**paged, "BLOCK_H": 16, "BLOCK_N": tiles.decode_keys, "LEAST": 256, "AT_ONCE": 128}
    merged = {**shape, "ROWS": 16}
    pages = "i64" if table == "slots" else table
    extend = compiled(
        extend_kernel, dtype, {**of_extend, "lse_ptr": None}, tile.warps, tiles.num_stages, pages, kv=kv
    )
    ptx, kv_bytes = extend.asm["ptx"], 2 * tile_keys * block_d * TORCH_TYPES[kv].itemsize
    assert 2 * kv_bytes < extend.metadata.shared <= HOPPER_SHARED_BYTES
    if dtype != "fp32":
        assert "wgmma.mma_async" in ptx and "cp.async.cg.shared.global" in ptx, ptx
    if (short := tiles.short) is not None and (dtype, table) == ("bf16", "i32"):
        given = {**paged, "BLOCK_M": short.queries, "BLOCK_N": short.keys_of_pages, "lse_ptr": None}
        of_short = compiled(extend_kernel, dtype, given, short.warps, tiles.num_stages, pages, kv=kv)
        # Of an SM's memory each program costs another KiB.
        assert "wgmma" in of_short.asm["ptx"] and short.per_sm * (of_short.metadata.shared + 1024) <= 228 << 10
    of_merge = {**merged, "GROUP": 4, "BLOCK_M": tile.queries, "lse_ptr": None}
    assert "ex2" in compiled(merge_extends_kernel, dtype, of_merge, 4, 3, pages).asm["ptx"]
    # A batch of decodes, and once those beside extends.
    for reqs in [{"reqs_ptr": None, "row_starts_ptr": None}] + [{}] * (head_dim == 64):
        given = {**of_decode, **reqs}
        warps = tiles.decode_warps(16, block_d, TORCH_TYPES[dtype])
        decode = compiled(decode_kernel, dtype, given, warps, tiles.decode_stages, pages, kv=kv)
        ptx, kv_bytes = decode.asm["ptx"], 2 * tiles.decode_keys * block_d * TORCH_TYPES[kv].itemsize
        assert decode.metadata.shared > 2 * kv_bytes
        if dtype != "fp32":
            assert "mma" in ptx and "cp.async.cg.shared.global" in ptx, ptx
        for lse in ({"lse_ptr": None}, {}):
            of_merge = {**merged, "LEAST": 256, "AT_ONCE": 128, **reqs, **lse}
            assert "ex2" in compiled(merge_decodes_kernel, dtype, of_merge, 4, 3, pages).asm["ptx"]


@needs_triton
@pytest.mark.parametrize("masked", [("window",), ("cap",), ("window", "cap", "sinks_ptr")], ids=", ".join)
def test_masks_compile_for_sm_90(masked: tuple[str, ...]):
    """With the same products and copies as without."""
    from sglang.srt.layers.attention.triton_kernels import decode_kernel, extend_kernel
    from sglang.srt.layers.attention.triton_merge_kernels import merge_decodes_kernel, merge_extends_kernel
    from sglang.srt.layers.attention.triton_tiles import HOPPER_SHARED_BYTES, Tiles

    tiles = Tiles.of(128, torch.bfloat16, 64, HOPPER_SHARED_BYTES)
    merged = {"HEAD_DIM": 128, "BLOCK_D": 128, "lse_ptr": None}
    paged = merged | {"PAGE_SIZE": 64, "BY_SLOT": False, "GROUP": 4, "IN_TOKENS": True, "TILE_IN_PAGE": True}
    of_extend = paged | {"BLOCK_M": tiles.extend.queries, "BLOCK_N": tiles.extend.keys_of_pages}
    decodes = {"LEAST": 256, "AT_ONCE": 128, "reqs_ptr": None, "row_starts_ptr": None}
    of_decode = paged | decodes | {"BLOCK_H": 16, "BLOCK_N": tiles.decode_keys}
    warps = tiles.decode_warps(16, 128, torch.bfloat16)
    for kernel, given, num_warps in (
        (extend_kernel, of_extend, tiles.extend.warps),
        (decode_kernel, of_decode, warps),
    ):
        result = compiled(kernel, "bf16", given, num_warps, tiles.num_stages, "i32", masked=masked)
        assert result.metadata.shared <= HOPPER_SHARED_BYTES
        assert "mma" in result.asm["ptx"] and "cp.async.cg.shared.global" in result.asm["ptx"]
    if "sinks_ptr" in masked:
        of_extends = merged | {"GROUP": 4, "BLOCK_M": tiles.extend.queries, "ROWS": 16}
        for kernel, given in (
            (merge_extends_kernel, of_extends),
            (merge_decodes_kernel, merged | decodes | {"ROWS": 16}),
        ):
            assert "ex2" in compiled(kernel, "bf16", given, 4, 3, "i32", masked=masked).asm["ptx"]


@needs_triton
@pytest.mark.parametrize(("pages", "masked"), [("i64", ()), ("i64", ("window", "cap")), ("i32", ())])
def test_partials_compile_for_sm_90(pages: str, masked: tuple[str, ...]):
    """float32 out, and lse; of the pages of a buffer, and of the executor's table."""
    from sglang.srt.layers.attention.triton_kernels import decode_kernel, extend_kernel
    from sglang.srt.layers.attention.triton_tiles import HOPPER_SHARED_BYTES, Tiles

    tiles = Tiles.of(128, torch.bfloat16, 16, HOPPER_SHARED_BYTES)
    constants = {"PAGE_SIZE": 16, "BY_SLOT": False, "HEAD_DIM": 128, "BLOCK_D": 128, "GROUP": 4}
    constants |= {"IN_TOKENS": True, "TILE_IN_PAGE": False}
    of_extend = constants | {"BLOCK_M": tiles.extend.queries, "BLOCK_N": tiles.extend.keys}
    of_decode = constants | {"BLOCK_H": 16, "BLOCK_N": tiles.decode_keys, "LEAST": 256, "AT_ONCE": 128}
    of_decode |= {"reqs_ptr": None, "row_starts_ptr": None}
    for kernel, given, num_warps in (
        (extend_kernel, of_extend, tiles.extend.warps),
        (decode_kernel, of_decode, tiles.decode_warps(16, 128, torch.bfloat16)),
    ):
        result = compiled(
            kernel, "bf16", given, num_warps, tiles.num_stages, pages, "fp32", starts="i32", masked=masked
        )
        assert "st.global" in result.asm["ptx"] and result.metadata.shared <= HOPPER_SHARED_BYTES


def compiled(
    kernel: Any,
    dtype: str,
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
    pages: str,
    out: str | None = None,
    starts: str | None = None,
    kv: str | None = None,
    capability: int = 90,
    masked: tuple[str, ...] = (),
) -> Any:
    """As `compile_kernel`, of arguments that are aligned as torch's are. pages: type of the table. starts: of
    starts and kv_lens; by default int64 where pages is int32, as in a `PagedSegments`, and else int32. out,
    kv: dtypes, where they are not q's. masked: what of window, cap and sinks there is."""
    names = kernel.arg_names
    of_dtype = {"q_ptr": dtype, "out_ptr": out or dtype, "table_ptr": pages}
    of_dtype["k_ptr"] = of_dtype["v_ptr"] = kv or dtype
    of_dtype["starts_ptr"] = of_dtype["kv_lens_ptr"] = starts or ("i64" if pages == "i32" else "i32")
    aligned = {"q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr", "parts_ptr", "part_lses_ptr"}
    aligned |= {name for name in names if name.endswith("stride")}

    def type_of(name: str) -> str:
        if name in of_dtype:
            return f"*{of_dtype[name]}"
        if name.endswith("_ptr"):
            return "*fp32" if name in ("parts_ptr", "part_lses_ptr", "lse_ptr", "sinks_ptr") else "*i32"
        return "fp32" if name in ("scale", "cap") else "i64" if name.endswith("stride") else "i32"

    types = {name: type_of(name) for name in names}
    unmasked = {"window", "cap", "sinks_ptr", *NO_ROTARY}.intersection(names).difference(masked)
    # No latents, and splits that are merged one by one.
    ordinary = {name: value for name, value in (("ROTARY_DIM", 0), ("SPLITS", 1)) if name in names}
    constants = dict.fromkeys(unmasked) | ordinary | constants
    return compile_kernel(kernel, types, constants, aligned, num_warps, num_stages, capability)


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim"),
    [
        (89, "fp32", 64),
        (89, "bf16", 512),
        pytest.param(89, "fp32", 512, marks=pytest.mark.slow),
        *(
            pytest.param(capability, dtype, head_dim, marks=pytest.mark.slow)
            for capability in (90, 100, 120)
            for dtype in ("fp32", "bf16")
            for head_dim in (64, 128, 512)
        ),
    ],
)
def test_tiles_fit_into_shared_memory(capability: int, dtype: str, head_dim: int):
    """Of 64 query heads to a KV head, too."""
    from sglang.srt.layers.attention.triton_kernels import decode_kernel, extend_kernel
    from sglang.srt.layers.attention.triton_tiles import Tiles

    tiles = Tiles.of(head_dim, TORCH_TYPES[dtype], 16, SHARED_BYTES[capability], None, capability == 100)
    shape = {"PAGE_SIZE": 16, "BY_SLOT": False, "HEAD_DIM": head_dim, "BLOCK_D": head_dim, "GROUP": 64}
    shape |= {"IN_TOKENS": True, "TILE_IN_PAGE": False, "lse_ptr": None}
    of_extend = {**shape, "BLOCK_M": tiles.extend.queries, "BLOCK_N": tiles.extend.keys_of_pages}
    compiled(extend_kernel, dtype, of_extend, tiles.extend.warps, tiles.num_stages, "i32", capability=capability)
    of_decode = {**shape, "BLOCK_H": tiles.decode_rows, "BLOCK_N": tiles.decode_keys, "LEAST": 256, "AT_ONCE": 128}
    of_decode |= {"reqs_ptr": None, "row_starts_ptr": None}
    warps = tiles.decode_warps(tiles.decode_rows, head_dim, TORCH_TYPES[dtype])
    compiled(decode_kernel, dtype, of_decode, warps, tiles.decode_stages, "i32", capability=capability)


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "kv", "head_dim"),
    [
        (90, "fp32", "fp8e5", 128),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (80, "bf16", "bf16", 256),
                (80, "bf16", "bf16", 512),
                (80, "fp32", "bf16", 256),
                (90, "fp32", "fp8e5", 64),
                (90, "fp32", "fp32", 128),
                (100, "fp32", "fp32", 256),
            )
        ),
    ],
)
def test_programs_spill_little(capability: int, dtype: str, kv: str, head_dim: int):
    """Of 64 query heads to a KV head, too. A GPU reserves what a thread spills for all threads that it can hold: 10
    KiB are GiB."""
    from sglang.srt.layers.attention.triton_kernels import decode_kernel, extend_kernel
    from sglang.srt.layers.attention.triton_tiles import Tiles

    types = TORCH_TYPES[dtype], TORCH_TYPES[kv]
    tiles = Tiles.of(head_dim, types[0], 64, SHARED_BYTES[capability], types[1], capability == 100)
    tile, rows = tiles.extend, tiles.decode_rows
    shape = {"PAGE_SIZE": 64, "BY_SLOT": False, "HEAD_DIM": head_dim, "BLOCK_D": head_dim, "GROUP": 64}
    shape |= {"IN_TOKENS": True, "TILE_IN_PAGE": True, "lse_ptr": None}
    of_extend = {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys_of_pages}
    of_decode = {"BLOCK_H": rows, "BLOCK_N": tiles.decode_keys, "LEAST": 256, "AT_ONCE": 128}
    of_decode |= {"reqs_ptr": None, "row_starts_ptr": None}
    decode_warps = tiles.decode_warps(rows, head_dim, types[0])
    for kernel, given, warps, stages in (
        (extend_kernel, of_extend, tile.warps, tiles.num_stages),
        (decode_kernel, of_decode, decode_warps, tiles.decode_stages),
    ):
        result = compiled(kernel, dtype, shape | given, warps, stages, "i32", kv=kv, capability=capability)
        assert spilled_bytes(result) <= 320


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("kv", ["bf16", "fp8e4nv"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_blackwell_multiplies_float32_exactly(head_dim: int, kv: str):
    """Beside keys of fewer bits, too, where Triton takes TF32 for tiles of more rows."""
    from sglang.srt.layers.attention.triton_kernels import decode_kernel, extend_kernel
    from sglang.srt.layers.attention.triton_tiles import Tiles

    kv_dtype = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}[kv]
    tiles = Tiles.of(head_dim, torch.float32, 16, SHARED_BYTES[100], kv_dtype, True)
    shape = {"PAGE_SIZE": 16, "BY_SLOT": False, "HEAD_DIM": head_dim, "BLOCK_D": head_dim, "GROUP": 64}
    shape |= {"IN_TOKENS": True, "TILE_IN_PAGE": True, "lse_ptr": None}

    def ptx_of(kernel: Any, given: dict[str, Any], warps: int, stages: int) -> str:
        options = {"capability": 100, "kv": kv}
        return compiled(kernel, "fp32", {**shape, **given}, warps, stages, "i32", **options).asm["ptx"]

    extend, rows, keys = tiles.extend, tiles.decode_rows, tiles.decode_keys
    of_decode = {"BLOCK_H": rows, "BLOCK_N": keys, "LEAST": 256, "AT_ONCE": 128, "reqs_ptr": None}
    warps = tiles.decode_warps(rows, head_dim, torch.float32)
    for ptx in (
        ptx_of(extend_kernel, {"BLOCK_M": extend.queries, "BLOCK_N": extend.keys_of_pages}, extend.warps, 5),
        ptx_of(decode_kernel, of_decode | {"row_starts_ptr": None}, warps, tiles.decode_stages),
    ):
        assert "tf32" not in ptx and "fma.rn.f32" in ptx


@needs_triton
def test_blackwell_gets_other_tiles():
    from sglang.srt.layers.attention.triton_tiles import HOPPER_SHARED_BYTES, Tiles

    def tiles_of(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Tiles:
        return Tiles.of(head_dim, dtype, 1, HOPPER_SHARED_BYTES, kv_dtype, True)

    bf16, fp32 = torch.bfloat16, torch.float32
    assert [tiles_of(head_dim, bf16, bf16).short.per_sm for head_dim in (64, 128)] == [2, 1]
    assert tiles_of(128, bf16, bf16).extend.keys_of_pages == 64
    assert tiles_of(128, fp32, fp32) == Tiles.of(128, fp32, 1, HOPPER_SHARED_BYTES)
    narrow = [tiles_of(head_dim, fp32, bf16) for head_dim in (64, 128)]
    assert [each.extend.queries for each in narrow] == [each.decode_rows for each in narrow] == [32, 16]


@needs_triton
def test_a_gpu_with_less_shared_memory_and_wide_heads_get_other_tiles():
    from sglang.srt.layers.attention.triton_tiles import HOPPER_SHARED_BYTES, SHORT_TILE, ExtendTile, Heads, Tiles

    ada, bf16 = SHARED_BYTES[89], torch.bfloat16
    assert Tiles.of(128, bf16, 1, HOPPER_SHARED_BYTES).extend.keys_of_pages == 128
    assert Tiles.of(128, bf16, 64, HOPPER_SHARED_BYTES) == Tiles(short=SHORT_TILE)
    assert Tiles.of(128, bf16, 1, ada) == Tiles.of(64, torch.float32, 1, HOPPER_SHARED_BYTES) == Tiles()
    wide = {32: [(256, bf16, HOPPER_SHARED_BYTES)], 16: [(512, bf16, HOPPER_SHARED_BYTES), (256, bf16, ada)]}
    for keys, of in wide.items():
        assert all(Tiles.of(dim, dtype, 16, shared).decode_keys == keys for dim, dtype, shared in of)
    tiles, heads = Tiles(short=SHORT_TILE), Heads(8, 4)
    for q_lens, short in (((48,), True), ((48,) * 4, True), ((48,) * 5, False), ((512,), False), ((256,), True)):
        assert tiles.pick(np.array(q_lens), heads, 132) == (SHORT_TILE if short else ExtendTile())
        assert Tiles().pick(np.array(q_lens), heads, 132) == ExtendTile()
    warps = [Tiles().decode_warps(*each) for each in ((16, 128, bf16), (32, 128, bf16), (16, 64, torch.float32))]
    assert warps == [2, 4, 2] and Tiles().decode_warps(16, 256, bf16) == 4


@needs_triton
def test_pools_of_several_page_sizes_have_tiles_of_their_own():
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend, q = TritonAttnBackend(num_sms=132), torch.zeros(1, 4, 128, dtype=torch.bfloat16)
    keys = []
    for page_size in (1, 64, 1):
        view = make_view("layer_first", 2, page_size, 2, 128, torch.bfloat16)
        keys.append(backend._tiles_for(q, view).extend.keys_of_pages)
    assert keys == [128, 64, 128]


@needs_triton
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_from_how_many_queries_on_a_request_has_the_large_tile(num_kv_heads: int, group: int):
    from sglang.srt.layers.attention.triton_backend import split_extends
    from sglang.srt.layers.attention.triton_tiles import SHORT_TILE, Heads, Tiles

    tiles, heads, sms = Tiles(short=SHORT_TILE), Heads(num_kv_heads, group), 132
    long = tiles.fewest_queries(heads, sms)
    assert long is not None and Tiles().fewest_queries(heads, sms) is None
    picked = [tiles.pick(np.array([n]), heads, sms) for n in (long - 1, long, 4 * long)]
    assert picked == [SHORT_TILE, tiles.extend, tiles.extend]
    # What compiles kernels: its longest request is split, so that parts are merged.
    q_lens, kv_lens = np.array([4, long]), np.array([8192, long])
    assert tiles.pick(q_lens, heads, sms) == tiles.extend
    assert len(split_extends(q_lens, kv_lens, kv_lens - q_lens, heads, tiles.extend, sms).merges[0])


@needs_triton
def test_splits_of_extends_cover_each_key_once():
    from sglang.srt.layers.attention.triton_backend import ExtendRoom, split_extends
    from sglang.srt.layers.attention.triton_tiles import ExtendTile, Heads

    seed = 26
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        num_reqs, num_sms = rng.randint(1, 6), rng.choice((1, 24, 132))
        heads = Heads(rng.choice((1, 2, 8)), rng.choice((1, 3, 4, 80)))
        tile = ExtendTile(rng.choice((16, 128)), keys_of_pages=rng.choice((64, 128)), per_sm=rng.choice((1, 2)))
        q_lens = np.array([rng.choice((1, 2, 48, 700)) for _ in range(num_reqs)])
        before = np.array([rng.choice((0, 5, 12_000)) for _ in range(num_reqs)])
        kv_lens = before + q_lens
        fewest = rng.choice((1, 2))
        splits = split_extends(q_lens, kv_lens, before, heads, tile, num_sms, fewest)
        reqs, firsts, keys, ends, slots = splits.blocks
        split_tokens = int((ends - keys).max(initial=0))
        assert bool((ends - keys == split_tokens).all())
        keys_of: dict[tuple[int, int], list[int]] = {}
        slots_of: dict[tuple[int, int], list[int]] = {}
        for req, first, key, slot in zip(*(column.tolist() for column in (reqs, firsts, keys, slots)), strict=True):
            keys_of.setdefault((req, first), []).append(key)
            slots_of.setdefault((req, first), []).append(slot)
        rows = tile.queries
        wanted = {(i, r) for i, n in enumerate(q_lens) if n >= fewest for r in range(0, n * heads.group, rows)}
        assert keys_of.keys() == wanted
        for (req, first), starts in keys_of.items():
            end = before[req] + min((first + rows - 1) // heads.group + 1, q_lens[req])
            assert starts == list(range(0, end, split_tokens))
            assert split_tokens % tile.keys == 0
        at_once = max(1, tile.per_sm * num_sms // heads.num_kv_heads)
        full_rounds = -(-len(wanted) // at_once) * at_once
        assert len(keys) <= len(wanted) + at_once
        # With the next smaller splits there were too many, or they are the smallest, or need not be.
        sizes = [before[req] + min((first + rows - 1) // heads.group + 1, q_lens[req]) for req, first in wanted]
        smaller = max(split_tokens - max(tile.keys, tile.keys_of_pages), 1)
        most = full_rounds if len(keys) <= full_rounds else len(wanted) + at_once
        assert split_tokens in (0, 512) or sum(-(-n // smaller) for n in sizes) > min(most, len(wanted) + at_once)
        of_merges = {
            (req, first): list(range(slot, slot + count))
            for req, first, slot, count in zip(*(column.tolist() for column in splits.merges), strict=True)
        }
        assert of_merges == {block: each for block, each in slots_of.items() if len(each) > 1}
        assert all(each == [-1] for each in slots_of.values() if len(each) == 1)
        assert sorted(itertools.chain(*of_merges.values())) == list(range(splits.num_slots))
        room = ExtendRoom.of(int(q_lens.sum()) + rng.choice((0, 9)), num_reqs + 1, heads, tile, num_sms)
        of_reqs = [np.append(column, 0) for column in (np.cumsum(q_lens) - q_lens, q_lens, before)]
        filled = np.split(room.filled(splits, of_reqs), np.cumsum(room.sizes)[:-1])
        assert (filled[0][len(reqs) :] == num_reqs).all() and (filled[4][len(reqs) :] == -1).all()
        assert [*map(len, filled)] == room.sizes and filled[0][: len(reqs)].tolist() == reqs.tolist()


@needs_triton
def test_a_long_request_among_short_ones_is_split():
    """They fill a round of programs without it."""
    from sglang.srt.layers.attention.triton_backend import split_extends
    from sglang.srt.layers.attention.triton_tiles import ExtendTile, Heads

    q_lens, before = np.full(16, 20), np.array([65_536] + [500] * 15)
    splits = split_extends(q_lens, q_lens + before, before, Heads(8, 4), ExtendTile(), 132)
    sizes = splits.blocks[3] - splits.blocks[2]
    assert int(sizes.max()) <= 5000 and len(sizes) <= 2 * 16
    # Nothing is gained where all are alike.
    alike = split_extends(q_lens, q_lens + 500, np.full(16, 500), Heads(8, 4), ExtendTile(), 132)
    assert len(alike.blocks[0]) == 16


@needs_triton
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("page_size", "dtype", "kv_dtype"),
    [
        (3, torch.float32, None),
        (16, torch.float16, None),
        (1, torch.bfloat16, None),
        (16, torch.bfloat16, None),
        (64, torch.bfloat16, None),
        (16, torch.bfloat16, torch.float8_e4m3fn),
        (1, torch.bfloat16, torch.float8_e5m2),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(len(HEADS_ON_A_GPU)))
def test_on_a_gpu(page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None, seed: int):
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    kv_heads, group, head_dim = HEADS_ON_A_GPU[seed]
    backend = TritonAttnBackend()
    for layout in LAYOUTS:
        options = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "max_prefix": 3000}
        case = on_gpu(Case(seed, page_size, layout, dtype, **options, kv_dtype=kv_dtype))
        check_batch(backend, case)
        check_partials(backend, case)


@needs_triton
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page_size", [1, 64])
def test_masks_on_a_gpu(page_size: int, dtype: torch.dtype):
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    reqs = ((3000, 1), (3, 1), (3000, 20), (0, 1), (200, 200))
    options: dict[str, Any] = {"kv_heads": 8, "group": 4, "head_dim": 128}
    check_masks(TritonAttnBackend(), on_gpu(PagedCase(1, page_size, "layer_first", dtype, reqs, **options)))
    case = Case(1, page_size, "layer_first", dtype, q_lens=(20, 300), max_prefix=3000, **options)
    check_masked_partials(TritonAttnBackend(), on_gpu(case))


@needs_triton
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_and_graphs_on_a_gpu(page_size: int):
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    check_pages_and_graphs(TritonAttnBackend(), page_size, "block_major")


# -- under the interpreter, and on a GPU ---------------------------------------------------------------------------


def batches(backend: Any) -> int:
    """Lists of segments, as slots."""
    for i, layout in enumerate(LAYOUTS):
        q_lens = ((1, 7, 1), (20, 1), (1, 2, 1, 9))[i]
        for page_size, dtype in ((1, torch.float32), (3, torch.float16)):
            check_batch(backend, Case(page_size + i, page_size, layout, dtype, q_lens=q_lens, max_prefix=40, **SMALL))
    return 6


def paged(backend: Any) -> int:
    """Pages, looked up by the kernels. A decode's plan takes no copy to the device."""
    from sglang.srt.layers.attention import triton_backend

    copies: list[int] = []
    original = triton_backend.to_device_together
    triton_backend.to_device_together = lambda *args: copies.append(1) or original(*args)
    for page_size, layout, table in zip((1, 16, 64, 3), (*LAYOUTS, "block_major"), INT_TYPES * 2):
        for reqs in (DECODES, EXTENDS):
            copies.clear()
            case = PagedCase(page_size, page_size, layout, torch.float32, reqs, table, **SMALL)
            check_batch(backend, case)
            assert len(copies) == (reqs is EXTENDS), copies
            assert not case.segments._lists, "segments were made one by one"
    triton_backend.to_device_together = original
    return 8


def capture(backend: Any) -> int:
    """What is captured for a graph asks nothing of the host: with the numpy arrays of another batch, what the device
    holds counts, and the grid is the same."""
    kernels = watch_grids()
    case = PagedCase(16, 16, "layer_first", torch.float32, DECODES, **SMALL)
    plain = backend.forward(case.q, case.view, case.segments, case.meta)
    grid_of_plain = dict(kernels)
    backend.capturing = True
    captured = backend.forward(case.q, case.view, case.segments, case.meta)
    grid = dict(kernels)
    assert grid["decode_kernel"][0] > grid_of_plain["decode_kernel"][0], (grid, grid_of_plain)
    assert (captured - plain).abs().max() < 2e-6 and not captured[1].any()
    for kv_lens in ((3, 70, 0, 0, 90), (0, 0, 0, 0, 0)):
        case.fill(random.Random(1), kv_lens)
        case.segments.kv_lens[:] = 1 << 40
        case.segments.starts[:] = -1
        got = backend.forward(case.q, case.view, case.segments, case.meta)
        assert (got.double() - torch.cat(case.want)).abs().max() < 2e-6, kv_lens
        assert kernels == grid, (kernels, grid)
    backend.capturing = False
    return 2


def captured_extends(backend: Any) -> int:
    """The same of extends: the host divides them before a replay, and the grid stays. Layers of two kinds, whose
    pages have other numbers, are in one graph."""
    kernels = watch_grids()
    case = PagedCase(16, 16, "layer_first", torch.float32, CAPTURED_EXTENDS, **SMALL)
    other = replace(case.segments, table=case.segments.table.clone())

    def check(replay: object) -> None:
        other.table.copy_((case.segments.table + 1) % len(case.view.k))
        rolled, want = KVView(*(each.roll(1, 0) for each in case.view.components)), torch.cat(case.want)
        for view, segments in ((case.view, case.segments), (rolled, other)):
            got = backend.forward(case.q, view, segments, case.meta)
            assert (got[: len(want)].double() - want).abs().max() < 2e-6, replay

    backend.capturing = True
    check("none")
    grid = dict(kernels)
    for seed, (kv_lens, q_lens) in enumerate(REPLAYED_EXTENDS):
        case.fill(random.Random(seed), kv_lens, q_lens)
        backend.before_replay(case.segments)
        backend.before_replay(other)
        for hidden in (case.segments.kv_lens, case.segments.starts, case.segments.q_lens):
            hidden[:] = 1 << 40
        check((kv_lens, q_lens))
        assert kernels == grid and "decode_kernel" not in grid, (kernels, grid)
    backend.capturing = False
    return 1 + len(REPLAYED_EXTENDS)


def watch_grids() -> dict[str, tuple[int, ...]]:
    """The grids that kernels were launched with last, by name."""
    from sglang.srt.layers.attention import triton_backend

    grids: dict[str, tuple[int, ...]] = {}

    class Watched:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(triton_backend, name)
            self.arg_names = self.kernel.arg_names

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids[self.name] = grid
            return self.kernel[grid]

    for name in ("extend_kernel", "merge_extends_kernel", "decode_kernel", "merge_decodes_kernel"):
        setattr(triton_backend, name, Watched(name))
    return grids


def partials(backend: Any) -> int:
    """And their plans, which do not name pages, are kept."""
    made: list[int] = []
    original = backend._make_plan
    backend._make_plan = lambda *args: made.append(1) or original(*args)
    # Seed 37 has segments of more than a tile that begin inside of a page, for a decode and for an extend.
    for seed, page_size in ((0, 1), (1, 16), (37, 16)):
        options = {"q_lens": (1, 3), "max_prefix": 40, **SMALL}
        case = Case(seed, page_size, "block_major", torch.float32, **options)
        check_partials(backend, case)
        num_plans = len(made)
        case.segments = [
            [KVSegment(s.pages.clone(), s.length, s.causal, s.skip) for s in each] for each in case.segments
        ]
        check_partials(backend, case)
        assert len(made) == num_plans, f"{len(made)} plans made, {num_plans} needed"
    return 6


def heads(backend: Any) -> int:
    for seed, (kv_heads, group, head_dim) in enumerate(HEADS):
        options: dict[str, Any] = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim}
        case = Case(seed, 2, "layer_first", torch.float32, q_lens=(1, 3)[: 80 // group], max_prefix=20, **options)
        # The model passes a slice of its fused projection.
        fused = torch.full((case.q.shape[0], case.q.shape[1] + 4, case.q.shape[2]), math.nan)
        fused[:, 2:-2] = case.q
        case.q = fused[:, 2:-2]
        check_batch(backend, case)
    return len(HEADS)


def small_types(backend: Any) -> int:
    """Keys and values that become the queries' dtype when they are read."""
    for i, kv_dtype in enumerate(SMALL_TYPES):
        for reqs in (DECODES, EXTENDS):
            case = PagedCase(i, (1, 16, 3)[i], LAYOUTS[i], torch.float32, reqs, **SMALL, kv_dtype=kv_dtype)
            check_batch(backend, case)
        check_partials(backend, Case(i, 16, LAYOUTS[i], torch.float32, (1, 5), 40, **SMALL, kv_dtype=kv_dtype))
    return 3 * len(SMALL_TYPES)


def splits(backend: Any) -> int:
    """Requests of very unlike lengths, decodes and extends, of which the long ones alone are split."""
    from sglang.srt.layers.attention import triton_backend

    grids = watch_grids()
    reqs = ((700, 1), (3, 1), (700, 20), (0, 1), (2, 2))
    check_batch(backend, PagedCase(1, 3, "layer_first", torch.float32, reqs, **SMALL))
    assert {"merge_extends_kernel", "merge_decodes_kernel"} <= grids.keys(), grids
    grids.clear()
    case = Case(10, 3, "block_major", torch.float32, q_lens=(1, 20, 1), max_prefix=700, **SMALL)
    check_batch(backend, case)
    check_partials(backend, case)
    assert {"merge_extends_kernel", "merge_decodes_kernel"} <= grids.keys(), grids
    # More decodes than are read at once, some of them long; also beside an extend, in another order than the rows'.
    one_head: dict[str, Any] = {"kv_heads": 1, "group": 1, "head_dim": 16}
    original, triton_backend._LENS_AT_ONCE = triton_backend._LENS_AT_ONCE, 4
    for extra in ((), ((300, 3),)):
        reqs = (*extra, *((each, 1) for each in (5, 0, 9, 3, 7, 700, 2, 300, 1)))
        check_batch(backend, PagedCase(1, 16, "layer_first", torch.float32, reqs, **one_head))
        # 48 programs beside one each: the longest two have 3 and 2, of 256 keys.
        assert grids["decode_kernel"] == (9 + 48, 1), grids
    triton_backend._LENS_AT_ONCE = original
    return 4


def many_keys(backend: Any) -> int:
    """All decodes together have more keys than 32 bits count, as they share a prefix."""
    global decode_split_tokens  # Triton looks for names in the module alone
    import triton
    import triton.language as tl

    from sglang.srt.layers.attention.triton_merge_kernels import decode_split_tokens

    @triton.jit
    def kernel(lens_ptr, out_ptr, num_decodes, num_more, LEAST: tl.constexpr, AT_ONCE: tl.constexpr):
        tl.store(out_ptr, decode_split_tokens(lens_ptr, None, num_decodes, num_more, LEAST, AT_ONCE))

    for num_decodes, length in ((2148, 1_000_000), (16_385, 131_072), (2, 5)):
        lens, found = torch.full((num_decodes,), length, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        kernel[(1,)](lens, found, num_decodes, 33, 256, 128)
        assert found.item() == max(1, math.ceil(num_decodes * math.ceil(length / 16) / 33 / 16)) * 256
    return 3


def masked(backend: Any) -> int:
    """Windows, capped scores and sinks, as `masked_attention` has them; also of requests whose keys are divided."""
    long = ((700, 1), (3, 1), (700, 20), (0, 1), (2, 2))
    groups: dict[str, Any] = {"kv_heads": 2, "group": 3, "head_dim": 16}
    cases = [PagedCase(1, 64, "layer_first", torch.float32, long, **SMALL)]
    cases += [PagedCase(2, 3, "odd_stride", torch.float32, reqs, **SMALL) for reqs in (DECODES, EXTENDS)]
    cases += [Case(3, 16, "block_major", torch.float32, q_lens=(1, 20, 1), max_prefix=90, **groups)]
    for case in cases:
        check_masks(backend, case)
    long_prefix = Case(4, 3, "layer_first", torch.float32, q_lens=(1, 20, 3), max_prefix=700, **SMALL)
    for case in (cases[-1], long_prefix):
        check_masked_partials(backend, case)
    # What lies a tile before all that queries see is not read: it may never have been loaded.
    for window in (90, 9):
        case = PagedCase(1, 64, "layer_first", torch.float32, ((700, 1), (700, 20)), **SMALL)
        meta = replace(case.meta, window=window)
        want = masked_attention(case.q, case.view, case.segments, meta)
        for start, kv_len, q_len in zip(case.segments.starts, case.segments.kv_lens, case.segments.q_lens):
            unread = (kv_len - q_len + 1 - window - WINDOW_TILE) // 64
            gone = case.segments.table[start : start + unread].long()
            case.view.k[gone] = case.view.v[gone] = math.nan
        got = backend.forward(case.q, case.view, case.segments, meta)
        assert (got - want).abs().max() < case.tolerance(), window
    return len(cases)


def edges(backend: Any) -> int:
    view = make_view("layer_first", 4, 1, 2, 8, torch.float32)
    empty = KVSegment(torch.empty(0, dtype=torch.int64), 0)
    for rows in (1, 3):
        q = torch.randn(rows, 4, 8)
        out, lse = backend.partial(q, view, empty, 1.0)
        assert torch.equal(out, torch.zeros(rows, 4, 8)) and bool((lse == -math.inf).all()), (out, lse)
    q = torch.randn(4, 4, 8)
    assert torch.equal(
        backend.forward(q, view, [[empty], [], []], AttentionMetadata((2, 1, 1), 1.0)), torch.zeros(4, 4, 8)
    )
    assert backend.forward(q[:0], view, [], AttentionMetadata((), 1.0)).shape == (0, 4, 8)
    # The same list object, refilled in place: an id() would not notice.
    a, b = (Case(seed, 1, "layer_first", torch.float32, q_lens=(1, 5)) for seed in (1, 2))
    segments = list(a.segments)
    backend.forward(a.q, a.view, segments, a.meta)
    segments[:] = b.segments
    got = backend.forward(b.q, b.view, segments, b.meta)
    assert (got.double() - torch.cat(b.want)).abs().max() < 2e-6
    return 5


def engine(backend: Any) -> int:
    """A whole engine, on the CPU: what is computed, found, loaded and streamed ends in the same greedy tokens."""
    import tempfile

    from transformers import LlamaConfig, LlamaForCausalLM

    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.managers.scheduler_config import LayerStreamConfig
    from sglang.srt.model_loader.loader import load_model
    from sglang.srt.sampling.sampling_params import SamplingParams
    from support.local_engine import LocalEngine

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 97, n).astype(np.int32) for n in (40, 90)]
    params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True, sampling_seed=0)
    with tempfile.TemporaryDirectory() as path:
        LlamaForCausalLM(config).save_pretrained(path)
        model_config = ModelConfig.from_pretrained(path, dtype="float32")
        answers = []
        for each in (TorchNativeAttnBackend(), backend):
            model = load_model(model_config, "auto", each)
            local = LocalEngine(
                model_config,
                num_device_pages=20,
                num_host_pages=120,
                page_size=4,
                model=model,
                layer_stream=LayerStreamConfig(2, 3),
                chunked_prefill_size=32,
            )
            answers.append([[list(a.tokens) for a in local.generate([p], params)] for p in prompts * 2])
            counters = local.scheduler.state()["counters"]
            assert counters["streamed_reqs"] > 0 and counters["load_back_tokens"] > 0, counters
            local.close()
        assert answers[0] == answers[1], answers
    return len(answers[0])


def main() -> None:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.attention.triton_tiles import ExtendTile, Tiles

    torch.set_num_threads(1)
    # Small tiles: several of them, with tails in both directions.
    backend = TritonAttnBackend(
        Tiles(ExtendTile(32, 16, 32), short=ExtendTile(16, 16, 16, 4, per_sm=2), decode_keys=32), num_sms=24
    )
    for what in sys.argv[1].split(","):
        print(f"{globals()[what](backend)} {what} are right")


if __name__ == "__main__":
    main()
