"""`CpuAttnBackend`: attention on the CPU that reads keys and values where they lie.

Kernels in C read the pages of all requests at once: no Python runs per request. Other types than float32 and odd head
sizes go to `TorchNativeAttnBackend`, which defines the result. Owns the plan of the forward batch it is working on.
Writes no KV and reads only the slots that the segments name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_kernel.cpu.paged_attention import PagedAttention, takes_heads
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata, BatchKey
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.kv_view import KVSegment, KVView, PagedSegments, segment_slots


@dataclass(frozen=True)
class _Plan:
    """The part of a batch's work that is the same in every layer."""

    # What the plan was made for; a `PagedSegments` is known by its identity.
    batch: BatchKey | PagedSegments
    attention: PagedAttention

    def matches(self, segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> bool:
        if isinstance(self.batch, PagedSegments):
            return self.batch is segments
        return self.batch.matches(segments, page_size, q_lens)


class CpuAttnBackend:
    """See `AttentionBackend`. One instance serves one model; calls do not overlap. A batch's segments do not change
    while its layers are computed."""

    captures_extends = False
    computes_masked = False
    long_extend_len = None

    def __init__(self) -> None:
        self.capturing = False
        self._torch = TorchNativeAttnBackend()
        self._plan: _Plan | None = None

    def forward(
        self, q: torch.Tensor, view: KVView, segments: Sequence[list[KVSegment]], meta: AttentionMetadata
    ) -> torch.Tensor:
        """q: (num_tokens, num_q_heads, head_dim). Returns the same shape and dtype, contiguous."""
        if not takes_heads(q, view.k):
            return self._torch.forward(q, view, segments, meta)
        plan = self._plan
        if plan is None or not plan.matches(segments, view.page_size, meta.q_lens):
            plan = self._plan = _build_plan(segments, view.page_size, meta.q_lens)
        assert sum(meta.q_lens) == q.shape[0], f"{q.shape[0]} rows of q for q_lens {meta.q_lens}"
        out = torch.empty(q.shape, dtype=q.dtype)
        plan.attention.attend(q, view.k, view.v, meta.scale, out)
        return out

    def before_replay(self, segments: PagedSegments) -> None:
        """There are no CUDA graphs on the CPU."""

    def partial(
        self, q: torch.Tensor, view: KVView, segment: KVSegment, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q: (q_len, num_q_heads, head_dim). Returns out, same shape, float32, and lse (q_len, num_q_heads)."""
        if not takes_heads(q, view.k):
            return self._torch.partial(q, view, segment, scale)
        out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
        length = np.array([segment.length])
        sees = np.array([1]) if segment.causal else length
        attention = PagedAttention(
            segment.pages, np.zeros(1), length, np.array([len(q)]), sees, np.array([segment.skip])
        )
        attention.attend(q, view.k, view.v, scale, out, lse)
        return out, lse


def _build_plan(segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> _Plan:
    lens = np.array(q_lens, np.int64)
    if isinstance(segments, PagedSegments):
        sees = segments.kv_lens - lens + 1
        return _Plan(segments, PagedAttention(segments.table, segments.starts, segments.kv_lens, lens, sees))
    # Any number of segments per request, of any tokens.
    batch = BatchKey.of(segments, page_size, q_lens)
    flat = [segment for of_req in segments for segment in of_req if segment.length]
    slots = torch.cat(segment_slots(flat, page_size)) if flat else torch.empty(0, dtype=torch.int64)
    kv_lens = np.array([sum(segment.length for segment in of_req) for of_req in segments], np.int64)
    causal = np.array([bool(of_req) and of_req[-1].causal for of_req in segments], bool)
    sees = np.where(causal, kv_lens - lens + 1, kv_lens)
    return _Plan(batch, PagedAttention(slots, np.cumsum(kv_lens) - kv_lens, kv_lens, lens, sees, by_slot=True))
