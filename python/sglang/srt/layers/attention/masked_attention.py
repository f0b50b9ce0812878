"""Attention with a sliding window, capped scores, or sinks, for what backends do not compute of it. In plain torch.

Owns nothing. Reads only the slots that the segments name, as a backend does. The pages of tokens that have left the
window stay where they are, so that every prefix can be matched; only the mask leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata, PartialMask
from sglang.srt.mem_cache.kv_view import KVSegment, KVView, segment_slots
from sglang.srt.mem_cache.page_memory import indexable

# Queries at a time: the scores of a block take num_q_heads * _BLOCK * keys * 4 bytes.
_BLOCK = 128


def masked_attention(
    q: torch.Tensor, view: KVView, segments: Sequence[list[KVSegment]], meta: AttentionMetadata
) -> torch.Tensor:
    """As `AttentionBackend.forward`: q (num_tokens, num_q_heads, head_dim) to (num_tokens, num_q_heads, value_dim) in
    the same dtype."""
    out = q.new_zeros(*q.shape[:2], view.v.shape[3])
    row = 0
    for of_req, q_len in zip(segments, meta.q_lens):
        kv_len = sum(segment.length for segment in of_req)
        if q_len and kv_len:
            held = [segment for segment in of_req if segment.length]
            slots = torch.cat(segment_slots(held, view.page_size))
            for first in range(0, q_len, _BLOCK):
                rows = min(_BLOCK, q_len - first)
                # The block's queries are tokens start..end of the request.
                end = kv_len - q_len + first + rows
                start = end - rows
                seen = 0 if meta.window is None else max(0, start - meta.window + 1)
                at = slice(row + first, row + first + rows)
                out[at], _ = _attend(q[at], *_gather(view, slots[seen:end], q.dtype), start - seen, meta)
        row += q_len
    return out


def masked_partial(
    q: torch.Tensor, view: KVView, segment: KVSegment, scale: float, mask: PartialMask
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `AttentionBackend.partial`."""
    meta = AttentionMetadata((), scale, mask.window, mask.softcap)
    (slots,) = segment_slots([segment], view.page_size)
    k, v = _gather(view, slots, q.dtype)
    out = q.new_empty((*q.shape[:2], view.v.shape[3]), dtype=torch.float32)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    for first in range(0, len(q), _BLOCK):
        at = slice(first, first + _BLOCK)
        out[at], lse[at] = _attend(q[at], k, v, mask.distance + first, meta)
    return out, lse


def seen_parts(
    segment: KVSegment, num_queries: int, distance: int, window: int | None, page_size: int
) -> list[tuple[KVSegment, int, bool]]:
    """A segment without the tokens that no query sees any more, in two: what the last queries do not see, and what
    all see. distance: see `PartialMask`. Of each part its offset in the segment, and whether a window cuts it.
    """
    if window is None:
        return [(segment, 0, False)]
    if segment.causal:
        return [(segment, 0, num_queries > window)]
    first_seen, seen_by_all = (
        min(max(distance + query + 1 - window, 0), segment.length) for query in (0, num_queries - 1)
    )
    parts = []
    for begin, end, is_cut in ((first_seen, seen_by_all, True), (seen_by_all, segment.length, False)):
        if begin < end:
            first, last = segment.skip + begin, segment.skip + end - 1
            pages = segment.pages[first // page_size : last // page_size + 1]
            parts.append((KVSegment(pages, end - begin, False, first % page_size), begin, is_cut))
    return parts


def _gather(view: KVView, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K (len(slots), num_kv_heads, head_dim) and V (len(slots), num_kv_heads, value_dim)."""
    index = slots // view.page_size, slots % view.page_size
    k, v = (indexable(x)[index].view(x.dtype).to(dtype) for x in (view.k, view.v))
    return k, v


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, distance: int, meta: AttentionMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: (rows, num_q_heads, head_dim); k: (num_keys, num_kv_heads, head_dim); v: (num_keys, num_kv_heads,
    value_dim). distance: the first query follows the first key by so many tokens. Returns out (rows, num_q_heads,
    value_dim), zeros for a query that sees no key, and (rows, num_q_heads) float32, the lse, with sinks."""
    rows, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[:2]
    grouped = q.view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if q.dtype == torch.float16:
        # Products with stored keys that have a scale of their own may be beyond its largest value.
        grouped, k = grouped.float(), k.float()
    scores = torch.einsum("rkgd,nkd->kgrn", grouped, k).float() * meta.scale
    if meta.softcap is not None:
        scores = meta.softcap * torch.tanh(scores / meta.softcap)
    own = torch.arange(distance, distance + rows, device=q.device)[:, None]
    key = torch.arange(num_keys, device=q.device)[None, :]
    hidden = key > own
    if meta.window is not None:
        hidden |= key <= own - meta.window
    scores.masked_fill_(hidden, -math.inf)
    if meta.sinks is not None:
        sinks = meta.sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, rows, 1)
        scores = torch.cat((scores, sinks), -1)
    lse = scores.logsumexp(-1)
    # A query that sees no key has weights of 0, not NaN: products of bfloat16 may carry NaN to other rows.
    weights = scores[..., :num_keys].sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp_().to(v.dtype)
    out = torch.einsum("kgrn,nkd->rkgd", weights, v).reshape(rows, num_heads, v.shape[2])
    return out, lse.permute(2, 0, 1).reshape(rows, num_heads)
