"""`TorchNativeAttnBackend` against five lines of torch, over every way to cut a request into segments."""

from __future__ import annotations

import math
import random

import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.layers.attention.merge_state import merge_state
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend, _group_by_length
from sglang.srt.mem_cache.kv_view import KVSegment
from support.attention_cases import (
    DECODES,
    EXTENDS,
    LAYOUTS,
    SMALL_TYPES,
    UNLIKE_SIZES,
    Case,
    PagedCase,
    check_batch,
    check_partials,
    make_view,
)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_random_batches(page_size, layout, dtype):
    backend = TorchNativeAttnBackend()
    for seed in range(12):
        check_batch(backend, Case(seed, page_size, layout, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_partials_merge_to_the_whole(page_size, dtype):
    backend = TorchNativeAttnBackend()
    for seed in range(12):
        check_partials(backend, Case(seed, page_size, "block_major", dtype))


@pytest.mark.parametrize("kv_dtype", SMALL_TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kv_of_other_types(layout, kv_dtype):
    backend = TorchNativeAttnBackend()
    for seed, (page_size, dtype) in enumerate(((1, torch.float32), (3, torch.float32), (16, torch.bfloat16))):
        check_batch(backend, Case(seed, page_size, layout, dtype, kv_dtype=kv_dtype))
        check_partials(backend, Case(seed, page_size, layout, dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("reqs", [DECODES, EXTENDS], ids=["decodes", "extends"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_in_a_table(page_size, reqs):
    for seed, table in enumerate((torch.int64, torch.int32)):
        check_batch(TorchNativeAttnBackend(), PagedCase(seed, page_size, "block_major", torch.float32, reqs, table))


def test_decode_batches_of_very_unlike_lengths():
    for seed in range(2):
        rng = random.Random(seed)
        case = Case(seed, 3, "layer_first", torch.float32, q_lens=(1,) * 40, max_prefix=rng.choice((300, 2000)))
        backend = TorchNativeAttnBackend()
        got = backend.forward(case.q, case.view, case.segments, case.meta)
        assert (got.double() - torch.cat(case.want)).abs().max() < 2e-6, f"seed {seed}"
        assert len(backend._recent._plans[0].groups) < 20, f"seed {seed}: decodes are not grouped"


@pytest.mark.parametrize("heads", [(1, 1, 8), (3, 2, 24), (5, 1, 33), (1, 8, 128)], ids=str)
def test_head_shapes(heads):
    kv_heads, group, head_dim = heads
    for seed in range(4):
        case = Case(seed, 2, "layer_first", torch.float32, kv_heads=kv_heads, group=group, head_dim=head_dim)
        got = TorchNativeAttnBackend().forward(case.q, case.view, case.segments, case.meta)
        assert (got.double() - torch.cat(case.want)).abs().max() < 3e-6, f"seed {seed}"


@pytest.mark.parametrize("sizes", UNLIKE_SIZES, ids=str)
def test_values_of_another_size_than_keys(sizes):
    backend = TorchNativeAttnBackend()
    for seed, (page_size, layout, heads, dtype, kv_dtype) in enumerate(
        (
            (1, "layer_first", (1, 16), torch.float32, None),
            (4, "block_major", (2, 4), torch.float32, torch.float8_e4m3fn),
            (16, "odd_stride", (1, 128), torch.bfloat16, None),
        )
    ):
        shape = dict(zip(("kv_heads", "group", "head_dim", "value_dim", "v_in_k"), (*heads, *sizes)))
        case = Case(seed, page_size, layout, dtype, (1, 7, 1, 1), kv_dtype=kv_dtype, **shape)
        check_batch(backend, case)
        check_partials(backend, case)
        reqs = ((70, 1), (0, 1), (33, 3), (0, 2))
        check_batch(backend, PagedCase(seed, page_size, layout, dtype, reqs, kv_dtype=kv_dtype, **shape))


def test_strided_queries():
    # The model passes a slice of its fused projection.
    case = Case(5, 1, "layer_first", torch.float32, q_lens=(1, 9, 1))
    fused = torch.full((case.q.shape[0], case.q.shape[1] + 4, case.q.shape[2]), math.nan)
    fused[:, 2:-2] = case.q
    got = TorchNativeAttnBackend().forward(fused[:, 2:-2], case.view, case.segments, case.meta)
    assert (got.double() - torch.cat(case.want)).abs().max() < 2e-6
    decode = Case(6, 1, "layer_first", torch.float32, q_lens=(1, 1))
    fused = torch.full((2, decode.q.shape[1] + 4, decode.q.shape[2]), math.nan)
    fused[:, 2:-2] = decode.q
    got = TorchNativeAttnBackend().forward(fused[:, 2:-2], decode.view, decode.segments, decode.meta)
    assert (got.double() - torch.cat(decode.want)).abs().max() < 2e-6


def test_frames_and_layout_do_not_change_a_bit():
    for seed in range(6):
        outs = [
            TorchNativeAttnBackend().forward(case.q, case.view, case.segments, case.meta)
            for case in (Case(seed, 4, layout, torch.float32) for layout in LAYOUTS)
        ]
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]), f"seed {seed}"


def test_no_keys_at_all():
    view = make_view("layer_first", 4, 1, 2, 8, torch.float32)
    empty = KVSegment(torch.empty(0, dtype=torch.int64), 0)
    q = torch.randn(3, 4, 8)
    backend = TorchNativeAttnBackend()
    out, lse = backend.partial(q, view, empty, 1.0)
    assert torch.equal(out, torch.zeros(3, 4, 8)) and bool((lse == -math.inf).all()) and lse.shape == (3, 4)
    assert torch.equal(backend.forward(q, view, [[empty], []], AttentionMetadata((2, 1), 1.0)), torch.zeros(3, 4, 8))
    assert backend.forward(q[:0], view, [], AttentionMetadata((), 1.0)).shape == (0, 4, 8)


def test_plan_follows_the_segments_it_is_given():
    # The same list object, refilled in place: an id() would not notice.
    backend = TorchNativeAttnBackend()
    a, b = (Case(seed, 1, "layer_first", torch.float32, q_lens=(1, 5)) for seed in (1, 2))
    segments = list(a.segments)
    backend.forward(a.q, a.view, segments, a.meta)
    segments[:] = b.segments
    got = backend.forward(b.q, b.view, segments, b.meta)
    assert (got.double() - torch.cat(b.want)).abs().max() < 2e-6


def test_merge_with_an_empty_set_changes_nothing():
    torch.manual_seed(3)
    out, lse = torch.randn(4, 2, 8), torch.randn(4, 2)
    zero, none = torch.zeros(4, 2, 8), torch.full((4, 2), -math.inf)
    for pair in ((out, lse, zero, none), (zero, none, out, lse)):
        merged, merged_lse = merge_state(*pair)
        assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
    merged, merged_lse = merge_state(zero, none, zero, none)
    assert torch.equal(merged, zero) and torch.equal(merged_lse, none)


def test_groups_bound_their_padding():
    for seed in range(20):
        rng = random.Random(seed)
        lengths = [int(10 ** rng.uniform(0, 4)) for _ in range(rng.randint(0, 80))]
        groups = _group_by_length(lengths)
        assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
        for group in groups:
            longest, shortest = (f(lengths[i] for i in group) for f in (max, min))
            assert longest <= shortest * 1.25 + 64, f"seed {seed}"
