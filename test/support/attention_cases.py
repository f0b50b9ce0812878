"""Random batches in poisoned pools for the tests of attention backends, and five lines of torch that say what is
right."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata, PartialMask
from sglang.srt.layers.attention.masked_attention import masked_attention, masked_partial
from sglang.srt.layers.attention.merge_state import merge_state
from sglang.srt.mem_cache.kv_view import KVSegment, KVView, PagedSegments
from sglang.srt.mem_cache.page_memory import indexable


def reference(q, k, v, scale, causal_tail=0):
    """q: (n, heads, d), k, v: (length, kv_heads, d), float64. The last `causal_tail` keys are the queries' own."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    hidden = torch.ones(q.shape[0], k.shape[0]).triu(k.shape[0] - causal_tail + 1).bool()
    scores = scores.masked_fill(hidden, -math.inf) if causal_tail else scores
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


# Of KV that becomes the queries' dtype when it is read.
SMALL_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16)
LAYOUTS = ("layer_first", "block_major", "odd_stride")


# Sizes of a head of keys and of values, and whether the values are a part of the keys.
UNLIKE_SIZES = ((576, 512, True), (576, 512, False), (48, 32, True), (48, 32, False), (32, 48, False))


def make_view(layout, num_pages, page_size, kv_heads, head_dim, dtype, value_dim=None, v_in_k=False):
    """A view over memory full of NaN; the neighbours of the layer are NaN as well. value_dim: None for head_dim.
    v_in_k: the values are the keys' first numbers."""
    sizes = head_dim, value_dim or head_dim
    if layout == "layer_first":
        k, v = (torch.full((2, num_pages, page_size, kv_heads, each), math.nan, dtype=dtype)[1] for each in sizes)
    elif layout == "block_major":
        bounds = [0, *(page_size * kv_heads * sum(sizes[:n]) for n in (1, 2))]
        buf = torch.full((num_pages, 3, bounds[2]), math.nan, dtype=dtype)
        k, v = (
            buf[:, 1, begin:end].unflatten(1, (page_size, kv_heads, each))
            for begin, end, each in zip(bounds, bounds[1:], sizes)
        )
    else:
        # Pages that lie no whole number of tokens apart, K and V unlike each other.
        tokens = [kv_heads * each for each in sizes]
        strides = [(page_size * tokens[0] + head_dim, tokens[0]), (page_size * (tokens[1] + 2) + 1, tokens[1] + 2)]
        k, v = (
            torch.full((num_pages * s[0] + 2 * token,), math.nan, dtype=dtype).as_strided(
                (num_pages, page_size, kv_heads, each), (*s, each, 1)
            )
            for s, token, each in zip(strides, tokens, sizes)
        )
    return KVView(k, k[..., :value_dim] if v_in_k else v)


def random_kv(view, length, v_in_k):
    """Keys and values of so many tokens, in the view's type."""
    k, v = (torch.randn(length, *x.shape[2:]).to(x.dtype) for x in (view.k, view.v))
    return k, k[..., : v.shape[2]] if v_in_k else v


class Case:
    """A random batch in a poisoned pool, and what attention to it must give."""

    def __init__(
        self,
        seed,
        page_size,
        layout,
        dtype,
        q_lens=None,
        max_prefix=90,
        kv_heads=2,
        group=4,
        head_dim=32,
        kv_dtype=None,
        value_dim=None,
        v_in_k=False,
    ):
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
        self.view = make_view(layout, len(pages), page_size, kv_heads, head_dim, kv_dtype or dtype, value_dim, v_in_k)
        self.q = torch.randn(sum(self.q_lens), kv_heads * group, head_dim).to(dtype)
        self.segments, self.want, self.want_lse = [], [], []
        row = 0
        for q_len, parts in zip(self.q_lens, cut):
            segments, keys, values = [], [], []
            for length, skip, causal in parts:
                mine = torch.tensor([pages.pop() for _ in range(-(-(skip + length) // page_size))], dtype=torch.int64)
                k, v = random_kv(self.view, length, v_in_k)
                slots = torch.arange(skip, skip + length)
                for pool, x in ((self.view.k, k), (self.view.v, v)):
                    indexable(pool)[mine[slots // page_size], slots % page_size] = indexable(x)
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
        self.name = f"seed {seed}, page {page_size}, {layout}, {dtype}, {kv_heads} x {group} heads of {head_dim}"
        self.name += f", {value_dim or head_dim}{' within' if v_in_k else ''}, KV {self.view.k.dtype}"

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
        if self.q.dtype != torch.float32:
            return 2e-2
        # A GPU's powers of two are approximate. Longer sums are rounded more.
        return 2e-5 if self.q.is_cuda else 2e-6 if self.q.shape[2] <= 256 else 4e-6


class PagedCase(Case):
    """A random batch whose pages stand in one table, in any order, with gaps that name a page of NaN.

    reqs: kv_len and q_len of each; a kv_len of 0 asks for rows of zero. table_dtype: of the table.
    """

    def __init__(
        self,
        seed,
        page_size,
        layout,
        dtype,
        reqs,
        table_dtype=torch.int32,
        kv_heads=2,
        group=4,
        head_dim=32,
        kv_dtype=None,
        value_dim=None,
        v_in_k=False,
    ):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.scale = head_dim**-0.5 * rng.choice((1.0, 0.6))
        self.q_lens = tuple(q_len for _, q_len in reqs)
        num_pages = sum(-(-kv_len // page_size) for kv_len, _ in reqs) + 3
        self.view = make_view(layout, num_pages, page_size, kv_heads, head_dim, kv_dtype or dtype, value_dim, v_in_k)
        self.v_in_k = v_in_k
        self.q = torch.randn(sum(self.q_lens), kv_heads * group, head_dim).to(dtype)
        table = torch.zeros(num_pages + 3 * len(reqs), dtype=table_dtype)
        columns = (np.zeros(len(reqs), np.int64), np.array([kv_len for kv_len, _ in reqs]), np.array(self.q_lens))
        on_device = (torch.zeros(len(reqs), dtype=torch.int64) for _ in range(2))
        self.segments = PagedSegments(table, page_size, *columns, *on_device)
        self.meta = AttentionMetadata(self.q_lens, self.scale)
        self.name = f"seed {seed}, page {page_size}, {layout}, {dtype}, KV {self.view.k.dtype}, paged {reqs}"
        self.name += f", {kv_heads} x {group} heads of {head_dim}, {value_dim or head_dim}"
        self.fill(rng)

    def fill(self, rng, kv_lens=None, q_lens=None):
        """Other KV in other pages at other places of the table, in the same memory, as before a replay. q_lens: of
        fewer rows, maybe."""
        view, segments = self.view, self.segments
        if kv_lens is not None:
            segments.kv_lens[:] = kv_lens
        if q_lens is not None:
            segments.q_lens[:] = self.q_lens = q_lens
        view.k.fill_(math.nan)
        view.v.fill_(math.nan)
        pages = list(range(1, len(view.k)))
        rng.shuffle(pages)
        segments.table.zero_()
        end = 0
        for i in rng.sample(range(len(segments)), len(segments)):
            segments.starts[i] = end + rng.randrange(3)
            end = segments.starts[i] - (-segments.kv_lens[i] // view.page_size)
        segments.device_starts.copy_(torch.from_numpy(segments.starts))
        segments.device_kv_lens.copy_(torch.from_numpy(segments.kv_lens))
        self.want, self.want_lse = [], []
        rows = self.q[: sum(self.q_lens)].split(tuple(self.q_lens))
        for q, start, kv_len, q_len in zip(rows, segments.starts.tolist(), segments.kv_lens.tolist(), self.q_lens):
            mine = torch.tensor([pages.pop() for _ in range(-(-kv_len // view.page_size))], dtype=torch.int64)
            segments.table[start : start + len(mine)] = mine
            slots = torch.arange(kv_len)
            k, v = random_kv(view, kv_len, self.v_in_k)
            for pool, x in ((view.k, k), (view.v, v)):
                indexable(pool)[mine[slots // view.page_size], slots % view.page_size] = indexable(x).to(pool.device)
            out = torch.zeros(*q.shape[:2], view.v.shape[3], dtype=torch.float64)
            if kv_len:
                out, _ = reference(q.double().cpu(), k.double(), v.double(), self.scale, q_len)
            self.want.append(out.to(q.device))


def on_gpu(case: Case) -> Case:
    case.q = case.q.cuda()
    case.want, case.want_lse = ([each.cuda() for each in of_reqs] for of_reqs in (case.want, case.want_lse))
    k, v = (
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)
        for x in (case.view.k, case.view.v)
    )
    case.view = KVView(k, v)
    if isinstance(case.segments, PagedSegments):
        old = case.segments
        tensors = old.device_starts.cuda(), old.device_kv_lens.cuda()
        case.segments = PagedSegments(old.table.cuda(), old.page_size, old.starts, old.kv_lens, old.q_lens, *tensors)
    else:
        case.segments = [
            [KVSegment(s.pages.cuda(), s.length, s.causal, s.skip) for s in each] for each in case.segments
        ]
    return case


# kv_len and q_len: decodes among empty rows, and extends of every kind.
DECODES = ((70, 1), (0, 1), (1, 1), (64, 1), (33, 1))
EXTENDS = ((41, 7), (20, 1), (0, 20), (17, 17), (0, 1), (66, 18))
# A graph of 40 rows and four requests at most, with room for the keys of all replays; and what they have.
CAPTURED_EXTENDS = ((3200, 40), (0, 0), (0, 0), (0, 0), (0, 0))
REPLAYED_EXTENDS = [
    ((3000, 0, 0, 0, 0), (40, 0, 0, 0, 0)),
    ((2500, 12, 70, 300, 0), (1, 12, 2, 25, 0)),
    ((30, 3, 0, 0, 0), (30, 1, 0, 0, 0)),
    ((700, 900, 1300, 0, 0), (17, 2, 1, 0, 0)),
]


def check_batch(backend: Any, case: Case) -> None:
    for _ in range(2):  # the second call runs from the cached plan
        got = backend.forward(case.q, case.view, case.segments, case.meta)
        assert got.shape == (*case.q.shape[:2], case.view.v.shape[3])
        assert got.dtype == case.q.dtype and got.is_contiguous()
        error = (got.double() - torch.cat(case.want)).abs().max().item()
        assert error < case.tolerance(), f"{case.name}: off by {error}"


def masks_of(num_heads: int) -> list[dict[str, Any]]:
    sinks = torch.linspace(-2, 2, num_heads)
    return [
        {"window": 1},
        {"window": 13, "sinks": sinks},
        {"window": 13, "sinks": sinks.flip(0)},
        {"softcap": 0.7},
        {"softcap": 1000.0},
        {"sinks": torch.full((num_heads,), -math.inf)},
        {"window": 600, "softcap": 1.5, "sinks": sinks.bfloat16()},
    ]


def check_masks(backend: Any, case: Case) -> None:
    """One layer after the other of the same batch. What is right is computed in float32."""
    masks = masks_of(case.q.shape[1])
    for mask in (*masks, *masks, {}):
        on_device = {name: x.to(case.q.device) if name == "sinks" else x for name, x in mask.items()}
        meta = replace(case.meta, **on_device)
        want = masked_attention(case.q.float(), case.view, case.segments, meta)
        error = (backend.forward(case.q, case.view, case.segments, meta) - want).abs().max()
        assert error < case.tolerance(), f"{case.name}, {mask}: off by {error}"


def check_masked_partials(backend: Any, case: Case) -> None:
    """As `masked_partial` has them in float32; of queries that follow a segment at once, and later."""
    rows = zip(case.q.split(case.q_lens), case.segments)
    for q, segment in [(q, segment) for q, of_req in rows for segment in of_req if segment.length and len(q) > 1]:
        length = segment.length
        for distance in (0,) if segment.causal else (length, length + 15):
            for window, softcap in ((1, None), (9, None), (9, 0.7), (None, 0.7), (length + 11, 1.5)):
                mask = PartialMask(window, softcap, distance)
                got = backend.partial(q, case.view, segment, case.scale, mask)
                want = masked_partial(q.float(), case.view, segment, case.scale, mask)
                what = f"{case.name}, {mask} of {segment.length}"
                assert torch.equal(got[1] == -math.inf, want[1] == -math.inf), what
                for mine, right in zip(got, want):
                    error = (mine - right).nan_to_num(nan=0.0).abs().max()
                    assert error < case.tolerance() and not mine.isnan().any(), f"{what}: off by {error}"


def check_partials(backend: Any, case: Case) -> None:
    row = 0
    for q_len, segments, want, want_lse in zip(case.q_lens, case.segments, case.want, case.want_lse):
        q = case.q[row : row + q_len]
        row += q_len
        parts = [backend.partial(q, case.view, segment, case.scale) for segment in segments]
        assert all(o.dtype == lse.dtype == torch.float32 for o, lse in parts)
        out, lse = reduce(lambda a, b: merge_state(*a, *b), parts)
        for got, right in ((out, want), (lse, want_lse)):
            error = (got.double() - right).abs().max().item()
            assert error < case.tolerance(), f"{case.name}: off by {error}"


def check_pages_and_graphs(backend: Any, page_size: int, layout: str) -> None:
    """On a GPU: decodes and extends of pages, then a CUDA graph of a decode, and of extends where the backend can
    capture them, replayed with other KV, lengths and pages in the same memory."""
    options = {"kv_heads": 8, "group": 4, "head_dim": 128}
    decodes = ((3000, 1), (0, 1), (1, 1), (64, 1), (515, 1))
    for table, reqs in ((torch.int32, decodes), (torch.int64, decodes), (torch.int32, EXTENDS)):
        check_batch(backend, on_gpu(PagedCase(1, page_size, layout, torch.bfloat16, reqs, table, **options)))

    decode_lens = ((3000, 0, 1, 64, 515), (17, 2000, 0, 0, 900), (1, 1, 1, 1, 3500), (0, 0, 0, 0, 0))
    case = on_gpu(PagedCase(2, page_size, layout, torch.bfloat16, decodes, **options))
    check_graph(backend, case, [(kv_lens, None) for kv_lens in decode_lens])
    if backend.captures_extends:
        case = on_gpu(PagedCase(3, page_size, layout, torch.bfloat16, CAPTURED_EXTENDS, **options))
        check_graph(backend, case, REPLAYED_EXTENDS)


def check_graph(
    backend: Any, case: PagedCase, replays: Sequence[tuple[tuple[int, ...], tuple[int, ...] | None]]
) -> None:
    """replays: kv_lens and q_lens; None for those of the case."""
    backend.capturing = True
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.forward(case.q, case.view, case.segments, case.meta)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(case.q, case.view, case.segments, case.meta)
    backend.capturing = False
    for seed, (kv_lens, q_lens) in enumerate(replays):
        case.fill(random.Random(seed), kv_lens, q_lens)
        backend.before_replay(case.segments)
        graph.replay()
        want = torch.cat(case.want)
        error = (out[: len(want)].double() - want).abs().max().item()
        assert error < case.tolerance(), f"replay {seed} of {case.name}: off by {error}"
        # Between replays the backend works on other batches.
        (kv_heads, head_dim), group = case.view.k.shape[2:], case.q.shape[1] // case.view.k.shape[2]
        options = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim}
        other = PagedCase(9, case.view.page_size, "layer_first", case.q.dtype, EXTENDS, **options)
        check_batch(backend, on_gpu(other))
