"""`CpuAttnBackend`: attention on the CPU that reads keys and values where they lie.

Kernels in C read the pages of all requests at once: no Python runs per request. Other types than float32 and bfloat16
and odd head sizes go to `TorchNativeAttnBackend`, which defines the result, as do several queries of a request in
bfloat16, which torch multiplies by instructions for matrices. With a mask the former go to `masked_attention`, as do
capped scores, and masks of `partial`. Owns the plans of the last forward batches. Writes no KV and reads
only the slots that the segments name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sgl_kernel.cpu.paged_attention import PagedAttention, takes_heads
from sglang.srt.layers.attention.base_attn_backend import (
    AttentionMetadata,
    BatchKey,
    PartialMask,
    RecentPlans,
    longest_request,
)
from sglang.srt.layers.attention.masked_attention import masked_attention, masked_partial
from sglang.srt.layers.attention.merge_state import share_beside
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.kv_view import KVSegment, KVView, PagedSegments, segment_slots


@dataclass(frozen=True)
class _Plans:
    """The part of a batch's work that is the same in all layers with the same window. longest: see
    `longest_request`."""

    # What the plans were made for; a `PagedSegments` is known by its identity.
    batch: BatchKey | PagedSegments
    longest: int
    by_window: dict[int | None, PagedAttention] = field(default_factory=dict)

    def matches(self, segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> bool:
        if isinstance(self.batch, PagedSegments):
            return self.batch is segments
        return self.batch.matches(segments, page_size, q_lens)


class CpuAttnBackend:
    """See `AttentionBackend`. One instance serves one model; calls do not overlap. A batch's segments do not change
    while its layers are computed."""

    captures_extends = False
    computes_masked = True
    long_extend_len = None
    expansion = None

    def __init__(self) -> None:
        self.capturing = False
        self._torch = TorchNativeAttnBackend()
        self._recent: RecentPlans[_Plans] = RecentPlans()

    def forward(
        self, q: torch.Tensor, view: KVView, segments: Sequence[list[KVSegment]], meta: AttentionMetadata
    ) -> torch.Tensor:
        """q: (num_tokens, num_q_heads, head_dim). Returns (num_tokens, num_q_heads, value_dim) in q's dtype,
        contiguous."""
        plans = self._recent.find(segments, view.page_size, meta.q_lens)
        if plans is None:
            batch: BatchKey | PagedSegments
            if isinstance(segments, PagedSegments):
                batch = segments
            else:
                batch = BatchKey.of(segments, view.page_size, meta.q_lens)
            plans = self._recent.keep(_Plans(batch, longest_request(segments)))
        window = None if meta.window is None or meta.window >= plans.longest else meta.window
        is_ordinary = window is None and meta.softcap is None and meta.sinks is None
        if (
            meta.softcap is not None
            or not takes_heads(q, view.k, view.v)
            or (is_ordinary and _has_faster(q, view.v, len(meta.q_lens)))
        ):
            attend = self._torch.forward if is_ordinary else masked_attention
            return attend(q, view, segments, meta)
        attention = plans.by_window.get(window)
        if attention is None:
            attention = plans.by_window[window] = _plan(segments, view.page_size, meta.q_lens, window)
        assert sum(meta.q_lens) == q.shape[0], f"{q.shape[0]} rows of q for q_lens {meta.q_lens}"
        out = torch.empty(*q.shape[:2], view.v.shape[3])
        lse = None if meta.sinks is None else torch.empty(q.shape[:2])
        attention.attend(q, view.k, view.v, meta.scale, out, lse)
        if lse is not None and meta.sinks is not None:
            out *= share_beside(lse, meta.sinks)
        return out.to(q.dtype)

    def before_replay(self, segments: PagedSegments) -> None:
        """There are no CUDA graphs on the CPU."""

    def partial(
        self, q: torch.Tensor, view: KVView, segment: KVSegment, scale: float, mask: PartialMask | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q: (q_len, num_q_heads, head_dim). Returns out (q_len, num_q_heads, value_dim) and lse (q_len,
        num_q_heads), float32."""
        if mask is not None:
            return masked_partial(q, view, segment, scale, mask)
        if not takes_heads(q, view.k, view.v) or _has_faster(q, view.v, 1):
            return self._torch.partial(q, view, segment, scale)
        out, lse = torch.empty(*q.shape[:2], view.v.shape[3]), torch.empty(q.shape[:2])
        length = np.array([segment.length])
        sees = np.array([1]) if segment.causal else length
        attention = PagedAttention(
            segment.pages, np.zeros(1), length, np.array([len(q)]), sees, np.array([segment.skip])
        )
        attention.attend(q, view.k, view.v, scale, out, lse)
        return out, lse


def _has_faster(q: torch.Tensor, v: torch.Tensor, num_reqs: int) -> bool:
    """Whether torch is faster: where a request has several queries in bfloat16. It pads values that are shorter than
    keys."""
    return q.dtype == torch.bfloat16 and len(q) > num_reqs and v.shape[3] == q.shape[2]


def _plan(
    segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...], window: int | None
) -> PagedAttention:
    lens = np.array(q_lens, np.int64)
    if isinstance(segments, PagedSegments):
        sees = segments.kv_lens - lens + 1
        return PagedAttention(segments.table, segments.starts, segments.kv_lens, lens, sees, window=window)
    # Any number of segments per request, of any tokens.
    flat = [segment for of_req in segments for segment in of_req if segment.length]
    slots = torch.cat(segment_slots(flat, page_size)) if flat else torch.empty(0, dtype=torch.int64)
    kv_lens = np.array([sum(segment.length for segment in of_req) for of_req in segments], np.int64)
    causal = np.array([bool(of_req) and of_req[-1].causal for of_req in segments], bool)
    sees = np.where(causal, kv_lens - lens + 1, kv_lens)
    starts = np.cumsum(kv_lens) - kv_lens
    return PagedAttention(slots, starts, kv_lens, lens, sees, by_slot=True, window=window)
