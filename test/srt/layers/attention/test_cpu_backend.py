"""`CpuAttnBackend` against five lines of torch, and against itself: other batches, frames and threads."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
import torch

from sgl_kernel.cpu.library import LIBRARY
from sgl_kernel.cpu.paged_attention import PagedAttention
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.layers.attention.cpu_backend import CpuAttnBackend
from sglang.srt.layers.attention.masked_attention import masked_attention
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.kv_view import KVSegment
from support.attention_cases import (
    DECODES,
    EXTENDS,
    LAYOUTS,
    UNLIKE_SIZES,
    Case,
    PagedCase,
    check_batch,
    check_masked_partials,
    check_masks,
    check_partials,
    make_view,
)

needs_compiler = pytest.mark.skipif(not LIBRARY.is_available(), reason="no C compiler")


@pytest.fixture
def no_torch(monkeypatch):
    """Fails where torch is asked for what the kernel should do."""

    def fail(*args):
        raise AssertionError("the kernel did not take it")

    for name in ("forward", "partial"):
        monkeypatch.setattr(TorchNativeAttnBackend, name, fail)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_random_batches(page_size, layout):
    backend = CpuAttnBackend()
    for seed in range(12):
        check_batch(backend, Case(seed, page_size, layout, torch.float32))


MIXED = ((700, 1), (3, 1), (700, 20), (0, 1), (2, 2), (0, 3), (300, 300), (65, 64))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_masks(page_size, layout):
    for seed in range(2):
        for reqs in (MIXED, DECODES, EXTENDS):
            check_masks(CpuAttnBackend(), PagedCase(seed, page_size, layout, torch.float32, reqs, torch.int64))
        case = Case(seed, page_size, layout, torch.float32, q_lens=(1, 20, 1), max_prefix=90)
        check_masks(CpuAttnBackend(), case)
        check_masked_partials(CpuAttnBackend(), case)
    check_masks(CpuAttnBackend(), PagedCase(3, page_size, layout, torch.bfloat16, MIXED, torch.int64))


@needs_compiler
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 64, 65, 200])
def test_windows_of_any_size(window, kv_dtype, no_torch):
    """Blocks of keys begin at multiples of 64, chunks of a decode at 256. What no query sees is not read."""
    reqs = tuple((kv_len, q_len) for kv_len in (63, 64, 65, 200, 201, 257, 600) for q_len in (1, 2, 60))
    case = PagedCase(1, 16, "block_major", torch.float32, reqs, torch.int64, kv_dtype=kv_dtype)
    meta = dataclasses.replace(case.meta, window=window)
    want = masked_attention(case.q, case.view, case.segments, meta)
    for start, kv_len, q_len in zip(case.segments.starts, case.segments.kv_lens, case.segments.q_lens):
        # Whole blocks before the first that is seen.
        unseen = max(0, kv_len - q_len + 1 - window) // 64 * 64 // 16
        gone = case.segments.table[start : start + unseen]
        case.view.k[gone] = case.view.v[gone] = math.nan
    got = CpuAttnBackend().forward(case.q, case.view, case.segments, meta)
    assert (got - want).abs().max() < case.tolerance()


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_keys_and_values_in_bfloat16(page_size, layout, no_torch):
    """Of queries in float32, and of decodes in bfloat16."""
    for seed, reqs in enumerate((MIXED, DECODES, EXTENDS)):
        check_batch(
            CpuAttnBackend(),
            PagedCase(seed, page_size, layout, torch.float32, reqs, torch.int64, kv_dtype=torch.bfloat16),
        )
    check_batch(CpuAttnBackend(), PagedCase(4, page_size, layout, torch.bfloat16, DECODES, torch.int64))
    check_partials(CpuAttnBackend(), Case(5, page_size, layout, torch.float32, kv_dtype=torch.bfloat16))
    decode = Case(6, page_size, layout, torch.bfloat16, q_lens=(1, 1, 1))
    check_partials(CpuAttnBackend(), decode)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_other_types_go_to_torch(dtype):
    for seed in range(3):
        check_batch(CpuAttnBackend(), Case(seed, 4, "block_major", dtype))
        check_partials(CpuAttnBackend(), Case(seed, 4, "block_major", dtype))
        check_batch(CpuAttnBackend(), Case(seed, 4, "block_major", torch.float32, kv_dtype=torch.float8_e4m3fn))


def test_without_a_compiler_torch_does_it_all(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    LIBRARY.forget()
    try:
        for seed in range(3):
            case = Case(seed, 4, "block_major", torch.float32)
            check_batch(CpuAttnBackend(), case)
            check_partials(CpuAttnBackend(), case)
    finally:
        LIBRARY.forget()


@pytest.mark.parametrize("q_lens", [None, (1, 1, 1)], ids=["any", "decodes"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_partials_merge_to_the_whole(page_size, q_lens):
    for seed in range(8):
        check_partials(CpuAttnBackend(), Case(seed, page_size, "block_major", torch.float32, q_lens))


@pytest.mark.parametrize("reqs", [DECODES, EXTENDS], ids=["decodes", "extends"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 2, 7, 16, 64])
def test_pages_in_a_table(page_size, layout, reqs):
    for seed, table in enumerate((torch.int64, torch.int32)):
        check_batch(CpuAttnBackend(), PagedCase(seed, page_size, layout, torch.float32, reqs, table))


@needs_compiler
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 1, 16), (3, 3, 64), (2, 7, 48), (5, 1, 80), (1, 8, 128), (2, 5, 256)], ids=str)
def test_head_shapes(heads, kv_dtype, no_torch):
    kv_heads, group, head_dim = heads
    shape = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "kv_dtype": kv_dtype}
    reqs = ((1, 1), (255, 1), (256, 1), (257, 1), (0, 1), (900, 1), (2, 2), (65, 65), (0, 3), (300, 130))
    for seed in range(2):
        check_batch(CpuAttnBackend(), PagedCase(seed, 4, "block_major", torch.float32, reqs, torch.int64, **shape))


@pytest.mark.sampled(12)
@needs_compiler
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 4, 16, 128])
@pytest.mark.parametrize("sizes", UNLIKE_SIZES, ids=str)
def test_values_of_another_size_than_keys(sizes, group, kv_dtype, no_torch):
    """One KV head as of latent attention, and two."""
    head_dim, value_dim, v_in_k = sizes
    for kv_heads, page_size, layout in zip((1, 2, 1), (1, 4, 16), LAYOUTS):
        if group == 128 and kv_heads == 2:
            continue
        shape = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "kv_dtype": kv_dtype}
        shape |= {"value_dim": value_dim, "v_in_k": v_in_k}
        reqs = ((1, 1), (300 if group < 128 else 66, 1), (0, 1), (64, 1), (2, 2), (0, 3), (67, 3))
        check_batch(CpuAttnBackend(), PagedCase(1, page_size, layout, torch.float32, reqs, torch.int64, **shape))
        if group == 4:
            case = Case(2, page_size, layout, torch.float32, (1, 20, 1), **shape)
            check_batch(CpuAttnBackend(), case)
            check_partials(CpuAttnBackend(), case)
            check_masks(CpuAttnBackend(), case)
            check_masked_partials(CpuAttnBackend(), case)


@pytest.mark.parametrize("sizes", UNLIKE_SIZES[2:], ids=str)
def test_values_of_another_size_go_to_torch(sizes):
    """Of several queries in bfloat16, of other types, and of no whole vector."""
    head_dim, value_dim, v_in_k = sizes
    shape = {"value_dim": value_dim, "v_in_k": v_in_k}
    for dtype, kv_dtype in ((torch.bfloat16, None), (torch.float32, torch.float8_e4m3fn)):
        case = Case(3, 4, "block_major", dtype, head_dim=head_dim, kv_dtype=kv_dtype, **shape)
        check_batch(CpuAttnBackend(), case)
        check_partials(CpuAttnBackend(), case)
    check_batch(
        CpuAttnBackend(), Case(4, 2, "layer_first", torch.float32, head_dim=head_dim, value_dim=13, v_in_k=v_in_k)
    )


def test_a_head_size_that_is_no_whole_vector():
    for head_dim in (12, 33):
        check_batch(CpuAttnBackend(), Case(1, 2, "layer_first", torch.float32, head_dim=head_dim))


@needs_compiler
def test_scores_of_any_size(no_torch):
    """Weights that underflow, and a greatest score that comes last or first."""
    for scale in (1e-3, 30.0, 300.0):
        for order in (1, -1):
            case = PagedCase(3, 16, "layer_first", torch.float32, ((700, 1), (40, 1)), torch.int64)
            slots = torch.arange(700)
            pages = case.segments.table[case.segments.starts[0] + slots // 16]
            size = torch.linspace(0, 1, 700)[:, None, None]
            k = case.view.k[pages, slots % 16] * (size if order == 1 else 1 - size)
            case.view.k[pages, slots % 16] = k
            v = case.view.v[pages, slots % 16].double()
            q = case.q[0].double().view(2, 4, 32)
            scores = torch.einsum("hgd,khd->hgk", q, k.double()) * scale
            want = torch.einsum("hgk,khd->hgd", scores.softmax(-1), v).reshape(8, 32)
            meta = AttentionMetadata(case.q_lens, scale)
            got = CpuAttnBackend().forward(case.q, case.view, case.segments, meta)[0].double()
            # The scores themselves are rounded: e^score is off by as many roundings as the score is large.
            assert (got - want).abs().max() < 1e-5 * (1 + scale), f"scale {scale}, order {order}"


# Of latent attention, with few heads, and with so many that a query's are cut into tasks.
LATENT = {"kv_heads": 1, "group": 16, "head_dim": 576, "value_dim": 512, "v_in_k": True}
SHAPES = [{}, LATENT, {"kv_heads": 1, "group": 100, "head_dim": 96, "value_dim": 64}]
SHAPE_NAMES = ["ordinary", "latent", "many heads"]


@needs_compiler
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_a_requests_bits_depend_on_its_keys_alone(shape, kv_dtype, no_torch):
    """Alone or among others, in any frames and layout, with any number of threads."""
    reqs = ((1000, 1), (70, 1), (256, 1), (3, 1), (2000, 1)) if not shape else ((500, 1), (3, 1), (65, 1))
    for seed in range(1 if shape else 3):
        outs = []
        for layout in LAYOUTS:
            case = PagedCase(seed, 4, layout, torch.float32, reqs, torch.int64, kv_dtype=kv_dtype, **shape)
            # The same numbers in every layout, as torch's generator is seeded.
            outs.append(CpuAttnBackend().forward(case.q, case.view, case.segments, case.meta))
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]), f"seed {seed}: frames"
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            assert torch.equal(CpuAttnBackend().forward(case.q, case.view, case.segments, case.meta), outs[2])
        finally:
            torch.set_num_threads(threads)
        meta = AttentionMetadata((1,), case.scale)
        for i in range(len(reqs)):
            alone = CpuAttnBackend().forward(case.q[i : i + 1], case.view, [case.segments[i]], meta)
            assert torch.equal(alone[0], outs[2][i]), f"seed {seed}: request {i} alone"


@pytest.mark.sampled(4)
@needs_compiler
@pytest.mark.parametrize(
    "shape", [{}, {"kv_heads": 1, "group": 17, "value_dim": 16}], ids=["few heads", "many heads"]
)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_requests_that_share_pages_get_the_bits_that_they_get_alone(page_size, threads, shape, no_torch):
    """Their first pages are the same ones, in rows of the table of their own. Some differ in one page in the middle,
    some end inside; there are more than are computed together."""
    lengths = [2000, 2000, 1400, 1999, 700, 256, 40, *[1800] * 20]
    reqs = tuple((n, 1) for n in lengths)
    case = PagedCase(1, page_size, "block_major", torch.float32, reqs, torch.int64, **shape)
    starts, table = case.segments.starts, case.segments.table.clone()
    own = table.clone()
    for i, length in enumerate(lengths[1:], 1):
        whole = (length - 1) // page_size
        table[starts[i] : starts[i] + whole] = table[starts[0] : starts[0] + whole]
    for i, page in ((1, 0), (3, 600 // page_size), (8, 1100 // page_size)):
        table[starts[i] + page] = own[starts[i] + page]
    segments = dataclasses.replace(case.segments, table=table)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for as_lists in (segments, list(segments)):
            out = CpuAttnBackend().forward(case.q, case.view, as_lists, case.meta)
            for i in range(len(lengths)):
                meta = AttentionMetadata((1,), case.scale)
                alone = CpuAttnBackend().forward(case.q[i : i + 1], case.view, [segments[i]], meta)
                assert torch.equal(alone[0], out[i]), f"request {i}"
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_a_tokens_bits_do_not_depend_on_its_chunk(shape, window, no_torch):
    """A prompt at once, in chunks, and its end behind a cached prefix: with any tasks, frames and threads."""
    length, cuts_of = 333, (((200,), 1), ((2, 66, 130), 3), ((64, 128, 330), 2))
    if shape:
        length, cuts_of = 70, (((66,), 3),)
    for seed, layout in enumerate(LAYOUTS):
        case = PagedCase(seed, 4, layout, torch.float32, ((length, length), (40, 7)), torch.int64, **shape)
        masked = dataclasses.replace(case.meta, window=window)
        whole = CpuAttnBackend().forward(case.q, case.view, case.segments, masked)
        threads = torch.get_num_threads()
        for cuts, num_threads in cuts_of:
            bounds = (0, *cuts, length)
            try:
                torch.set_num_threads(num_threads)
                for begin, end in itertools.pairwise(bounds):
                    segments = dataclasses.replace(
                        case.segments, kv_lens=np.array([end, 40]), q_lens=np.array([end - begin, 7])
                    )
                    meta = AttentionMetadata((end - begin, 7), case.scale, window)
                    q = torch.cat([case.q[begin:end], case.q[length:]])
                    got = CpuAttnBackend().forward(q, case.view, segments, meta)
                    # as lists of segments, it is the same work
                    again = CpuAttnBackend().forward(q, case.view, list(segments), meta)
                    where = f"seed {seed}: {begin}..{end} of {bounds}"
                    assert torch.equal(got[: end - begin], whole[begin:end]), where
                    assert torch.equal(got[end - begin :], whole[length:]), where
                    assert torch.equal(again, got), where
            finally:
                torch.set_num_threads(threads)


@needs_compiler
def test_strided_queries(no_torch):
    # The model passes a slice of its fused projection.
    for reqs in (DECODES, EXTENDS):
        case = PagedCase(5, 1, "layer_first", torch.float32, reqs, torch.int64)
        fused = torch.full((case.q.shape[0], case.q.shape[1] + 4, case.q.shape[2]), math.nan)
        fused[:, 2:-2] = case.q
        got = CpuAttnBackend().forward(fused[:, 2:-2], case.view, case.segments, case.meta)
        assert (got.double() - torch.cat(case.want)).abs().max() < 2e-6


@needs_compiler
def test_memory_that_was_never_written_shows(no_torch):
    for part in ("k", "v"):
        case = PagedCase(7, 4, "layer_first", torch.float32, ((70, 1), (600, 1), (5, 1)), torch.int64)
        page = int(case.segments.table[case.segments.starts[1] + 100])
        getattr(case.view, part)[page, 2] = math.nan
        got = CpuAttnBackend().forward(case.q, case.view, case.segments, case.meta)
        assert bool(got[1].isnan().all()) and bool(got[[0, 2]].isfinite().all()), part


def test_no_keys_at_all():
    view = make_view("layer_first", 4, 1, 2, 16, torch.float32)
    empty = KVSegment(torch.empty(0, dtype=torch.int64), 0)
    backend = CpuAttnBackend()
    for q_len in (1, 3):
        q = torch.randn(q_len, 4, 16)
        out, lse = backend.partial(q, view, empty, 1.0)
        assert torch.equal(out, torch.zeros(q_len, 4, 16)) and bool((lse == -math.inf).all())
        assert lse.shape == (q_len, 4)
    q = torch.randn(3, 4, 16)
    for segments, q_lens in (([[empty], []], (2, 1)), ([[], [empty], []], (1, 1, 1))):
        assert torch.equal(backend.forward(q, view, segments, AttentionMetadata(q_lens, 1.0)), torch.zeros(3, 4, 16))
    assert backend.forward(q[:0], view, [], AttentionMetadata((), 1.0)).shape == (0, 4, 16)


@needs_compiler
@pytest.mark.parametrize("q_len", [3, 65])
def test_queries_before_the_first_key_find_nothing(q_len):
    torch.manual_seed(9)
    q, k, v = torch.randn(q_len, 2, 64), torch.randn(q_len, 1, 1, 64), torch.randn(q_len, 1, 1, 64)
    out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
    kv_len = np.array([q_len - 2])
    attention = PagedAttention(torch.arange(q_len), np.zeros(1), kv_len, np.array([q_len]), kv_len - q_len + 1)
    attention.attend(q, k, v, 0.125, out, lse)
    assert not out[:2].any() and bool((lse[:2] == -math.inf).all())
    assert torch.allclose(out[2], v[0].expand(2, -1, -1)[:, 0], atol=1e-6)
    assert bool(out[2:].isfinite().all() and lse[2:].isfinite().all())


def test_the_plan_follows_the_segments_it_is_given():
    # The same list object, refilled in place: an id() would not notice.
    backend = CpuAttnBackend()
    a, b = (Case(seed, 1, "layer_first", torch.float32, q_lens=(1, 5, 1)) for seed in (1, 2))
    segments = list(a.segments)
    backend.forward(a.q, a.view, segments, a.meta)
    segments[:] = b.segments
    got = backend.forward(b.q, b.view, segments, b.meta)
    assert (got.double() - torch.cat(b.want)).abs().max() < 2e-6


def test_decodes_between_extends():
    for seed in range(4):
        rng = random.Random(seed)
        reqs = tuple((rng.randint(q_len, 300), q_len) for q_len in (1, 5, 1, 1, 9, 1))
        check_batch(CpuAttnBackend(), PagedCase(seed, 8, "block_major", torch.float32, reqs))
