"""Attention with a sliding window, capped scores, or sinks, for backends that do not compute it. In plain torch.

Owns nothing. Reads only the slots that the segments name, as a backend does. The pages of tokens that have left the
window stay where they are, so that every prefix can be matched; only the mask leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.mem_cache.kv_view import KVSegment, KVView, segment_slots
from sglang.srt.mem_cache.page_memory import indexable

# Queries at a time: the scores of a block take num_q_heads * _BLOCK * keys * 4 bytes.
_BLOCK = 128


def masked_attention(
    q: torch.Tensor, view: KVView, segments: Sequence[list[KVSegment]], meta: AttentionMetadata
) -> torch.Tensor:
    """As `AttentionBackend.forward`: q (num_tokens, num_q_heads, head_dim) to the same shape and dtype."""
    out = torch.zeros_like(q)
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
                where = slots[seen:end]
                index = where // view.page_size, where % view.page_size
                k, v = (indexable(x)[index].view(x.dtype).to(q.dtype) for x in (view.k, view.v))
                at = slice(row + first, row + first + rows)
                out[at] = _attend(q[at], k, v, start - seen, meta)
        row += q_len
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, before: int, meta: AttentionMetadata) -> torch.Tensor:
    """q: (rows, num_q_heads, head_dim); k, v: (before + rows, num_kv_heads, head_dim), the last are the queries'
    own."""
    rows, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[:2]
    grouped = q.view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if q.dtype == torch.float16:
        # Products with stored keys that have a scale of their own may be beyond its largest value.
        grouped, k = grouped.float(), k.float()
    scores = torch.einsum("rkgd,nkd->kgrn", grouped, k).float() * meta.scale
    if meta.softcap is not None:
        scores = meta.softcap * torch.tanh(scores / meta.softcap)
    own = torch.arange(before, before + rows, device=q.device)[:, None]
    key = torch.arange(num_keys, device=q.device)[None, :]
    hidden = key > own
    if meta.window is not None:
        hidden |= key <= own - meta.window
    scores.masked_fill_(hidden, -math.inf)
    if meta.sinks is not None:
        sinks = meta.sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, rows, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., :num_keys].to(v.dtype)
    return torch.einsum("kgrn,nkd->rkgd", weights, v).reshape(rows, num_heads, head_dim)
