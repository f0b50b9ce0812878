"""`StreamedAttention`, piece by piece and with every mask, against `masked_attention` over the whole request."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata, PartialMask
from sglang.srt.layers.attention.cpu_backend import CpuAttnBackend
from sglang.srt.layers.attention.masked_attention import masked_attention, masked_partial
from sglang.srt.layers.kv_scale import KVScale
from sglang.srt.layers.radix_attention import RadixAttention, StreamedAttention
from sglang.srt.mem_cache.kv_view import KVSegment, KVView

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 16
SINKS = torch.linspace(-2, 2, KV_HEADS * GROUP)


@dataclass
class Request:
    """See `StreamedRows`."""

    rows: slice
    start: int
    end: int
    segments: list[KVSegment]


class Pool:
    def __init__(self, view: KVView) -> None:
        self._view = view

    def view(self, layer_id: int) -> KVView:
        return self._view


def segment(pages: torch.Tensor, begin: int, end: int, page_size: int, causal: bool = False) -> KVSegment:
    part = pages[begin // page_size : -(-end // page_size)]
    return KVSegment(part, end - begin, causal, begin % page_size)


def check(seed: int, page_size: int, q_len: int, window: int | None, **mask: Any) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    length = q_len + rng.randrange(2 * page_size + 90, 300)
    first = length - q_len
    pages = torch.tensor(rng.sample(range(-(-length // page_size) + 5), -(-length // page_size)))
    shape = (-(-length // page_size) + 5, page_size, KV_HEADS, HEAD_DIM)
    view = KVView(torch.randn(shape), torch.randn(shape))
    # Borders of pages; the rest of the prefix is on the device before and behind.
    start = rng.choice((0, rng.randrange(first // page_size) * page_size))
    end = rng.randrange(start // page_size + 1, first // page_size + 1) * page_size
    runs = [(0, start, False), (end, first, False), (first, length, True)]
    if q_len == 1:
        runs[1:] = [(end, length, False)]
    own = [segment(pages, a, b, page_size, causal) for a, b, causal in runs if a < b]

    # Another request's rows come first.
    q = torch.randn(2 + q_len, KV_HEADS * GROUP, HEAD_DIM)
    attn = AttentionMetadata((2, q_len), HEAD_DIM**-0.5, **mask)
    attention = RadixAttention(0, CpuAttnBackend(), KVScale(), window)
    request = Request(slice(2, 2 + q_len), start, end, own)
    streamed = StreamedAttention(attention, q, attn, [request], Pool(view))  # type: ignore[arg-type]
    at = start
    while at < end:
        more = min(end, at + page_size * rng.randrange(1, 5))
        streamed.attend(0, view, segment(pages, at, more, page_size), at)
        at = more
    got = torch.zeros(2 + q_len, KV_HEADS * GROUP * HEAD_DIM)
    streamed.write_to(got)

    whole = [segment(pages, 0, first, page_size), segment(pages, first, length, page_size, True)]
    meta = AttentionMetadata((q_len,), HEAD_DIM**-0.5, window, **mask)
    want = masked_attention(q[2:], view, [whole], meta)
    assert not got[:2].any()
    error = (got[2:].view_as(want) - want).abs().max()
    what = f"seed {seed}: {q_len} behind {first}, {start}..{end} streamed, pages of {page_size}"
    assert error < 1e-5, f"{what}, window {window}, {mask}: off by {error}"


@pytest.mark.parametrize("window", [None, 1, 4, 64, 200])
@pytest.mark.parametrize("q_len", [1, 5, 90])
def test_random_requests(q_len: int, window: int | None) -> None:
    masks: list[dict[str, Any]] = [{}, {"softcap": 0.7}, {"sinks": SINKS}, {"softcap": 1.5, "sinks": SINKS}]
    for seed in range(6):
        for mask in masks:
            check(seed, (1, 3, 16)[seed % 3], q_len, window, **mask)


@pytest.mark.parametrize("num_queries", [17, 49, 108])
def test_queries_that_see_nothing_change_no_others_in_bfloat16(num_queries: int) -> None:
    torch.manual_seed(num_queries)
    window, num_keys = 14, 59
    view = KVView(*(torch.randn(num_keys, 1, KV_HEADS, HEAD_DIM).bfloat16() for _ in range(2)))
    q = torch.randn(num_queries, KV_HEADS, HEAD_DIM).bfloat16()
    mask = PartialMask(window, None, num_keys)
    out, lse = masked_partial(q, view, KVSegment(torch.arange(num_keys), num_keys), 1.0, mask)
    assert out[: window - 1].isfinite().all() and lse[: window - 1].isfinite().all()
    assert not out[window - 1 :].any() and (lse[window - 1 :] == -torch.inf).all()
