"""Attention that no backend computes: with a sliding window, capped scores, or sinks. In plain torch.

Owns nothing. Reads only the slots that the segments name, as a backend does. The pages of tokens that have left the
window stay where they are, so that every prefix can be matched; only the mask leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.mem_cache.kv_view import KVSegment, KVView, segment_slots
from sglang.srt.mem_cache.page_memory import indexable

# Queries at a time: the scores of a block take num_q_heads * _BLOCK * keys * 4 bytes.
_BLOCK = 128


@dataclass(frozen=True)
class MaskedAttention:
    """The attention of one layer."""

    # Factor on q.k.
    scale: float
    # Tokens that a query sees, itself included; None for all.
    window: int | None = None
    # Scores are softcap * tanh(score / softcap).
    softcap: float | None = None
    # (num_q_heads,): a score that takes part in the softmax and has no value.
    sinks: torch.Tensor | None = None

    @property
    def is_ordinary(self) -> bool:
        """Any backend computes it."""
        return self.window is None and self.softcap is None and self.sinks is None

    def forward(
        self, q: torch.Tensor, view: KVView, segments: Sequence[list[KVSegment]], q_lens: tuple[int, ...]
    ) -> torch.Tensor:
        """As `AttentionBackend.forward`: q (num_tokens, num_q_heads, head_dim) to the same shape and dtype."""
        out = torch.zeros_like(q)
        row = 0
        for of_req, q_len in zip(segments, q_lens):
            kv_len = sum(segment.length for segment in of_req)
            if q_len and kv_len:
                held = [segment for segment in of_req if segment.length]
                slots = torch.cat(segment_slots(held, view.page_size))
                for first in range(0, q_len, _BLOCK):
                    rows = min(_BLOCK, q_len - first)
                    # The block's queries are tokens start..end of the request.
                    end = kv_len - q_len + first + rows
                    start = end - rows
                    seen = 0 if self.window is None else max(0, start - self.window + 1)
                    where = slots[seen:end]
                    index = where // view.page_size, where % view.page_size
                    k, v = (indexable(x)[index].view(x.dtype).to(q.dtype) for x in (view.k, view.v))
                    at = slice(row + first, row + first + rows)
                    out[at] = self._attend(q[at], k, v, start - seen)
            row += q_len
        return out

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, before: int) -> torch.Tensor:
        """q: (rows, num_q_heads, head_dim); k, v: (before + rows, num_kv_heads, head_dim), the last are the queries'
        own."""
        rows, num_heads, head_dim = q.shape
        num_keys, num_kv_heads = k.shape[:2]
        grouped = q.view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        if q.dtype == torch.float16:
            # Products with stored keys that have a scale of their own may be beyond its largest value.
            grouped, k = grouped.float(), k.float()
        scores = torch.einsum("rkgd,nkd->kgrn", grouped, k).float() * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        own = torch.arange(before, before + rows, device=q.device)[:, None]
        key = torch.arange(num_keys, device=q.device)[None, :]
        hidden = key > own
        if self.window is not None:
            hidden |= key <= own - self.window
        scores.masked_fill_(hidden, -math.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, rows, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., :num_keys].to(v.dtype)
        return torch.einsum("kgrn,nkd->rkgd", weights, v).reshape(rows, num_heads, head_dim)
