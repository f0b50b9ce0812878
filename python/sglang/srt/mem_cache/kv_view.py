"""How attention sees KV memory: views of pools and segments of a sequence.

Owns no memory. A pool hands out `KVView`s, the executor builds `KVSegment`s, an attention backend reads both;
none of them knows which tier a page came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVView:
    """One layer of a pool.

    k, v: (num_pages, page_size, num_kv_heads, head_dim), any outer strides: layer-first and block-major pools look
    alike. The innermost two dimensions are contiguous.
    """

    k: torch.Tensor
    v: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.k.shape[1]


@dataclass(frozen=True)
class KVSegment:
    """A run of one request's tokens, in pages of one pool.

    pages: (ceil((skip + length) / page_size),) int64. The segment's tokens are `length` tokens after the first
    `skip` of pages[0]. causal: queries and keys are the same tokens, query i sees keys 0..i; only the last segment
    of a request may be causal, and its length equals the number of queries. An empty segment has length 0.
    """

    pages: torch.Tensor
    length: int
    causal: bool = False
    skip: int = 0


def segment_slots(segments: list[KVSegment], page_size: int) -> list[torch.Tensor]:
    """The slots of each segment's tokens, (length,) int64 each."""
    for segment in segments:
        assert segment.pages.shape[0] * page_size >= segment.skip + segment.length, "a segment with too few pages"
    if page_size == 1:
        return [segment.pages[segment.skip : segment.skip + segment.length] for segment in segments]
    # All segments at once: a handful of operations per batch, not per request.
    pages = torch.cat([segment.pages for segment in segments])
    offsets = torch.arange(page_size, dtype=torch.int64, device=pages.device)
    slots = (pages[:, None] * page_size + offsets).view(-1)
    runs, base = [], 0
    for segment in segments:
        runs.append(slots[base + segment.skip : base + segment.skip + segment.length])
        base += segment.pages.shape[0] * page_size
    return runs
