"""The FlashInfer backend: what it plans, by a stand-in on the CPU; that FlashInfer takes its calls, where it is
installed; and on a GPU, if there is one."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import math
import random
import weakref

import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.mem_cache.kv_view import KVSegment, KVView
from support.attention_cases import (
    DECODES,
    EXTENDS,
    Case,
    PagedCase,
    check_batch,
    check_pages_and_graphs,
    check_partials,
    make_view,
    on_gpu,
)
from support.fake_attention_wrappers import FakeFlashInfer

FLASHINFER = importlib.util.find_spec("flashinfer") is not None
needs_flashinfer = pytest.mark.skipif(not FLASHINFER, reason="FlashInfer is not installed: flashinfer-python")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SHAPE = {"kv_heads": 2, "group": 4, "head_dim": 32}


def make_backend() -> tuple[FlashInferAttnBackend, FakeFlashInfer]:
    fake = FakeFlashInfer()
    return FlashInferAttnBackend(fake, workspace_bytes=64), fake


def num_plans(fake: FakeFlashInfer) -> int:
    return sum(method == "plan" for _, method, _, _ in fake.calls)


@pytest.mark.parametrize("layout", ["layer_first", "block_major"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_lists_of_segments(page_size, layout):
    backend, _ = make_backend()
    for seed in range(4):
        check_batch(backend, Case(seed, page_size, layout, torch.float16, **SHAPE))
        check_partials(backend, Case(seed, page_size, layout, torch.float16, **SHAPE))


@pytest.mark.parametrize("table", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_pages(page_size, table):
    backend, fake = make_backend()
    for seed, reqs in enumerate((DECODES, EXTENDS, ((0, 1), (0, 1)), ((0, 5),))):
        planned = num_plans(fake)
        case = PagedCase(seed, page_size, "block_major", torch.bfloat16, reqs, table, **SHAPE)
        check_batch(backend, case)
        assert num_plans(fake) == planned + any(kv_len for kv_len, _ in reqs), "one plan for all layers"
        assert not case.segments._lists, "segments were made one by one"
    # A decode and an extend: their wrappers are used again.
    assert len(fake.wrappers) == 2


def test_a_plan_in_numbers():
    backend, fake = make_backend()
    case = PagedCase(0, 16, "layer_first", torch.float16, ((33, 1), (0, 1), (16, 4)), **SHAPE)
    backend.forward(case.q, case.view, case.segments, case.meta)
    qo_indptr, indptr, indices, last = next(args[:4] for _, method, args, _ in fake.calls if method == "plan")
    assert qo_indptr.tolist() == [0, 1, 2, 6] and indptr.tolist() == [0, 3, 3, 4] and last.tolist() == [1, 0, 16]
    first, _, third = case.segments.starts.tolist()
    table = case.segments.table.tolist()
    assert indices.tolist() == [*table[first : first + 3], table[third]]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_graph_is_planned_again_into_the_buffers_it_reads(page_size):
    backend, fake = make_backend()
    case = PagedCase(2, page_size, "layer_first", torch.float16, DECODES, **SHAPE)
    backend.capturing = True
    out = backend.forward(case.q, case.view, case.segments, case.meta)
    out = backend.forward(case.q, case.view, case.segments, case.meta)
    backend.capturing = False
    assert num_plans(fake) == 1, "the capture itself plans nothing"
    (wrapper,) = fake.wrappers
    places = [buffer.data_ptr() for buffer in wrapper.buffers]
    for kv_lens in ((3, 70, 0, 0, 90), (0, 0, 0, 0, 0), (0, 0, 168, 0, 0)):
        case.fill(random.Random(page_size), kv_lens)
        backend.before_replay(case.segments)
        wrapper.replay()
        error = (out.double() - torch.cat(case.want)).abs().max()
        assert error < case.tolerance(), f"{kv_lens}: off by {error}"
        check_batch(backend, PagedCase(3, page_size, "layer_first", torch.float16, DECODES, **SHAPE))
        # Without capturing, the very same segments are planned as they are now.
        check_batch(backend, case)
    assert places == [buffer.data_ptr() for buffer in wrapper.buffers]


def test_graphs_of_one_table_share_the_buffer_of_pages_as_long_as_one_is_there():
    backend, fake = make_backend()
    graphs = []
    case = PagedCase(2, 1, "layer_first", torch.float16, DECODES, **SHAPE)
    backend.capturing = True
    for num_reqs in (5, 3):
        s = case.segments
        columns = (x[:num_reqs] for x in (s.starts, s.kv_lens, s.q_lens, s.device_starts, s.device_kv_lens))
        graphs.append(segments := type(s)(s.table, 1, *columns))
        got = backend.forward(case.q[:num_reqs], case.view, segments, AttentionMetadata((1,) * num_reqs, case.scale))
        assert (got.double() - torch.cat(case.want)[:num_reqs]).abs().max() < case.tolerance()
    first, second = (wrapper.buffers for wrapper in fake.wrappers)
    assert first[1] is second[1] and first[0] is not second[0]
    buffer = weakref.ref(first[1])
    fake.wrappers.clear()
    fake.calls.clear()
    del first, second, segments
    graphs.pop()
    assert len(backend._graphs) == 1 and buffer() is not None
    graphs.pop()
    gc.collect()  # the stand-in's wrappers know themselves
    assert len(backend._graphs) == 0 and buffer() is None


def test_the_plan_of_a_partial_serves_every_piece_of_a_length():
    backend, fake = make_backend()
    view = make_view("layer_first", 12, 16, 2, 32, torch.float16)
    view.k.normal_()
    view.v.normal_()
    q = torch.randn(3, 8, 32, dtype=torch.float16)
    pages = torch.arange(12)
    whole, lse = backend.partial(q, view, KVSegment(pages[:8], 128), 0.2)
    for _ in range(3):
        again, _ = backend.partial(q, view, KVSegment(pages[:8], 128), 0.2)
        assert torch.equal(again, whole)
        other, _ = backend.partial(q, view, KVSegment(pages[4:], 128), 0.2)
        assert not torch.equal(other, whole)
    assert num_plans(fake) == 1 and lse.dtype == torch.float32
    # More lengths than are kept: wrappers, which are large, are used again.
    for length in range(1, 30):
        backend.partial(q, view, KVSegment(pages, length), 0.2)
    assert len(fake.wrappers) == 8
    again, _ = backend.partial(q, view, KVSegment(pages[:8], 128), 0.2)
    assert torch.equal(again, whole)


def test_no_keys_at_all():
    backend, _ = make_backend()
    view = make_view("layer_first", 4, 1, 2, 32, torch.float16)
    empty = KVSegment(torch.empty(0, dtype=torch.int64), 0)
    q = torch.randn(3, 4, 32, dtype=torch.float16)
    out, lse = backend.partial(q, view, empty, 1.0)
    assert not out.any() and out.dtype == torch.float32 and bool((lse == -math.inf).all())
    assert not backend.forward(q, view, [[empty], []], AttentionMetadata((2, 1), 1.0)).any()
    assert backend.forward(q[:0], view, [], AttentionMetadata((), 1.0)).shape == (0, 4, 32)


def test_what_flashinfer_cannot_do_is_said():
    backend, _ = make_backend()
    for layout, dtype, reason in (
        ("layer_first", torch.float32, "computes in float16 or bfloat16"),
        ("odd_stride", torch.float16, "K and V with equal strides"),
    ):
        case = Case(1, 3, layout, dtype, **SHAPE)
        with pytest.raises(ValueError, match=reason):
            backend.forward(case.q, case.view, case.segments, case.meta)
    case = Case(1, 1, "layer_first", torch.float16, q_lens=(3,), **SHAPE)
    segments = [[KVSegment(s.pages, s.length, False, s.skip) for s in case.segments[0]]]
    with pytest.raises(ValueError, match="has causal ones only"):
        backend.forward(case.q, case.view, segments, case.meta)


def test_latents_are_refused():
    backend, fake = make_backend()
    k = torch.zeros(4, 16, 1, 576, dtype=torch.bfloat16)
    q, view, segment = torch.zeros(1, 16, 576, dtype=torch.bfloat16), KVView(k, k[..., :512]), torch.arange(2)
    remedy = "values of 512 beside keys of 576: use the attention backend triton"
    with pytest.raises(ValueError, match=remedy):
        backend.forward(q, view, [[KVSegment(segment, 20)]], AttentionMetadata((1,), 1.0))
    with pytest.raises(ValueError, match=remedy):
        backend.partial(q, view, KVSegment(segment, 20), 1.0)
    assert not fake.calls


@needs_flashinfer
def test_flashinfer_takes_these_calls():
    try:
        flashinfer = importlib.import_module("flashinfer")
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"FlashInfer does not import here: {error}")
    backend, fake = make_backend()
    for reqs in (DECODES, EXTENDS):
        case = PagedCase(1, 16, "layer_first", torch.float16, reqs, **SHAPE)
        backend.capturing = reqs is DECODES
        for _ in range(2):
            backend.forward(case.q, case.view, case.segments, case.meta)
            backend.capturing = False
    check_partials(backend, Case(1, 16, "layer_first", torch.float16, **SHAPE))
    seen = set()
    for kind, method, args, kwargs in fake.calls:
        inspect.signature(getattr(getattr(flashinfer, kind), method)).bind(None, *args, **kwargs)
        seen.add((kind, method, tuple(sorted(kwargs))))
    # With and without buffers, with and without lse.
    assert len(seen) == 8, seen


@needs_flashinfer
@needs_gpu
@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kernels", ["fa2", "auto"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_on_a_gpu(page_size: int, kernels: str):
    """The first of each kind compiles, which takes minutes."""
    backend = FlashInferAttnBackend(extend_kernels=kernels)
    for layout in ("layer_first", "block_major"):
        check_pages_and_graphs(backend, page_size, layout)
        for seed in range(4):
            options = {"kv_heads": 8, "group": 4, "head_dim": 128, "max_prefix": 3000}
            case = on_gpu(Case(seed, page_size, layout, torch.bfloat16, **options))
            check_batch(backend, case)
            check_partials(backend, case)
