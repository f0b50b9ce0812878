"""`TorchNativeAttnBackend` against five lines of torch, over every way to cut a request into segments."""

from __future__ import annotations

import math
import random
from functools import reduce

import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.layers.attention.merge_state import merge_state
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend, _group_by_length
from sglang.srt.mem_cache.kv_view import KVSegment, KVView


def reference(q, k, v, scale, causal_tail=0):
    """q: (n, heads, d), k, v: (length, kv_heads, d), float64. The last `causal_tail` keys are the queries' own."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    hidden = torch.ones(q.shape[0], k.shape[0]).triu(k.shape[0] - causal_tail + 1).bool()
    scores = scores.masked_fill(hidden, -math.inf) if causal_tail else scores
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


LAYOUTS = ("layer_first", "block_major", "odd_stride")


def make_view(layout, num_pages, page_size, kv_heads, head_dim, dtype):
    """A view over memory full of NaN; the neighbours of the layer are NaN as well."""
    if layout == "layer_first":
        buf = torch.full((2, num_pages, page_size, kv_heads, head_dim), math.nan, dtype=dtype)
        return KVView(buf[0], buf[1])
    if layout == "block_major":
        buf = torch.full((num_pages, 3, 2, page_size, kv_heads, head_dim), math.nan, dtype=dtype)
        return KVView(buf[:, 1, 0], buf[:, 1, 1])
    # Pages that lie no whole number of tokens apart, K and V unlike each other.
    token = kv_heads * head_dim
    strides = [(page_size * token + head_dim, token), (page_size * (token + 2) + 1, token + 2)]
    k, v = (
        torch.full((num_pages * s[0] + 2 * token,), math.nan, dtype=dtype).as_strided(
            (num_pages, page_size, kv_heads, head_dim), (*s, head_dim, 1)
        )
        for s in strides
    )
    return KVView(k, v)


class Case:
    """A random batch in a poisoned pool, and what attention to it must give."""

    def __init__(self, seed, page_size, layout, dtype, q_lens=None, max_prefix=90, kv_heads=2, group=4, head_dim=32):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        # Not always the usual one, which the kernel would take by itself.
        self.scale = head_dim**-0.5 * rng.choice((1.0, 0.6))
        num_reqs = rng.randint(1, 6)
        self.q_lens = q_lens or tuple(rng.choice((1, 1, 2, 7, 40)) for _ in range(num_reqs))
        cut = [self.split(rng, rng.choice((0, 1, 5, max_prefix)), q_len, page_size) for q_len in self.q_lens]
        needed = sum(-(-(skip + length) // page_size) for parts in cut for length, skip, _ in parts)
        pages = list(range(needed + 9))
        rng.shuffle(pages)
        self.view = make_view(layout, len(pages), page_size, kv_heads, head_dim, dtype)
        self.q = torch.randn(sum(self.q_lens), kv_heads * group, head_dim).to(dtype)
        self.segments, self.want, self.want_lse = [], [], []
        row = 0
        for q_len, parts in zip(self.q_lens, cut):
            segments, keys, values = [], [], []
            for length, skip, causal in parts:
                mine = torch.tensor([pages.pop() for _ in range(-(-(skip + length) // page_size))], dtype=torch.int64)
                k, v = (torch.randn(length, kv_heads, head_dim).to(dtype) for _ in range(2))
                slots = torch.arange(skip, skip + length)
                self.view.k[mine[slots // page_size], slots % page_size] = k
                self.view.v[mine[slots // page_size], slots % page_size] = v
                segments.append(KVSegment(mine, length, causal, skip))
                keys.append(k.double())
                values.append(v.double())
            self.segments.append(segments)
            q = self.q[row : row + q_len].double()
            row += q_len
            out, lse = reference(
                q, torch.cat(keys), torch.cat(values), self.scale, parts[-1][0] if parts[-1][2] else 0
            )
            self.want.append(out)
            self.want_lse.append(lse)
        self.meta = AttentionMetadata(self.q_lens, self.scale)

    @staticmethod
    def split(rng, prefix, q_len, page_size):
        """[(length, skip, causal)], ending with the request's own tokens; empty segments now and then."""
        parts = []
        while prefix > 0 or rng.random() < 0.2:
            length = rng.randint(0, prefix)
            parts.append((length, rng.randrange(page_size), False))
            prefix -= length
        # A decode may also come as a single segment that is not called causal.
        if q_len == 1 and rng.random() < 0.5:
            return [*parts, (rng.randint(1, 60), rng.randrange(page_size), False)]
        return [*parts, (q_len, rng.randrange(page_size), True)]

    def tolerance(self):
        return 2e-6 if self.q.dtype == torch.float32 else 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_random_batches(page_size, layout, dtype):
    backend = TorchNativeAttnBackend()
    for seed in range(12):
        case = Case(seed, page_size, layout, dtype)
        for _ in range(2):  # the second call runs from the cached plan
            got = backend.forward(case.q, case.view, case.segments, case.meta)
            assert got.shape == case.q.shape and got.dtype == dtype and got.is_contiguous()
            error = (got.double() - torch.cat(case.want)).abs().max().item()
            assert error < case.tolerance(), f"seed {seed}: off by {error}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_partials_merge_to_the_whole(page_size, dtype):
    backend = TorchNativeAttnBackend()
    for seed in range(12):
        case = Case(seed, page_size, "block_major", dtype)
        row = 0
        for q_len, segments, want, want_lse in zip(case.q_lens, case.segments, case.want, case.want_lse):
            q = case.q[row : row + q_len]
            row += q_len
            parts = [backend.partial(q, case.view, segment, case.scale) for segment in segments]
            assert all(o.dtype == lse.dtype == torch.float32 for o, lse in parts)
            out, lse = reduce(lambda a, b: merge_state(*a, *b), parts)
            assert (out.double() - want).abs().max() < case.tolerance(), f"seed {seed}"
            assert (lse.double() - want_lse).abs().max() < case.tolerance(), f"seed {seed}"


def test_decode_batches_of_very_unlike_lengths():
    for seed in range(2):
        rng = random.Random(seed)
        case = Case(seed, 3, "layer_first", torch.float32, q_lens=(1,) * 40, max_prefix=rng.choice((300, 2000)))
        backend = TorchNativeAttnBackend()
        got = backend.forward(case.q, case.view, case.segments, case.meta)
        assert (got.double() - torch.cat(case.want)).abs().max() < 2e-6, f"seed {seed}"
        assert len(backend._plan.groups) < 20, f"seed {seed}: decodes are not grouped"


@pytest.mark.parametrize("heads", [(1, 1, 8), (3, 2, 24), (5, 1, 33), (1, 8, 128)], ids=str)
def test_head_shapes(heads):
    kv_heads, group, head_dim = heads
    for seed in range(4):
        case = Case(seed, 2, "layer_first", torch.float32, kv_heads=kv_heads, group=group, head_dim=head_dim)
        got = TorchNativeAttnBackend().forward(case.q, case.view, case.segments, case.meta)
        assert (got.double() - torch.cat(case.want)).abs().max() < 3e-6, f"seed {seed}"


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
