"""Random batches in poisoned pools for the tests of attention backends, and five lines of torch that say what is
right."""

from __future__ import annotations

import math
import random
from functools import reduce
from typing import Any

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.layers.attention.merge_state import merge_state
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
        self.name = f"seed {seed}, page {page_size}, {layout}, {dtype}, {kv_heads} x {group} heads of {head_dim}"

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


def check_batch(backend: Any, case: Case) -> None:
    for _ in range(2):  # the second call runs from the cached plan
        got = backend.forward(case.q, case.view, case.segments, case.meta)
        assert got.shape == case.q.shape and got.dtype == case.q.dtype and got.is_contiguous()
        error = (got.double() - torch.cat(case.want)).abs().max().item()
        assert error < case.tolerance(), f"{case.name}: off by {error}"


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
