"""`CpuAttnBackend`: attention on the CPU that reads keys and values where they lie.

Requests with one query go to a kernel in C. It reads the pages of all requests at once: nothing is gathered, and no
Python runs per request. Requests with several queries, other types than float32 and odd head sizes go to
`TorchNativeAttnBackend`, which defines the result. Owns the plan of the forward batch it is working on. Writes no KV
and reads only the slots that the segments name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_kernel.cpu.paged_attention import PagedDecode, takes_heads
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata, BatchKey
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.kv_view import KVSegment, KVView, PagedSegments, segment_slots


@dataclass(frozen=True)
class _Extends:
    """The requests with several queries, as a batch of their own."""

    # Their rows of q: a slice where they stand together.
    rows: slice | torch.Tensor
    segments: Sequence[list[KVSegment]]
    q_lens: tuple[int, ...]


@dataclass(frozen=True)
class _Plan:
    """The part of a batch's work that is the same in every layer."""

    # What the plan was made for; a `PagedSegments` is known by its identity.
    batch: BatchKey | PagedSegments
    decode: PagedDecode | None
    extends: _Extends | None

    def matches(self, segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> bool:
        if isinstance(self.batch, PagedSegments):
            return self.batch is segments
        return self.batch.matches(segments, page_size, q_lens)


class CpuAttnBackend:
    """See `AttentionBackend`. One instance serves one model; calls do not overlap. A batch's segments do not change
    while its layers are computed."""

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
        extends = plan.extends
        if plan.decode is None:
            return self._torch.forward(q, view, segments, meta)
        out = torch.empty(q.shape, dtype=q.dtype)
        plan.decode.attend(q, view.k, view.v, meta.scale, out)
        if extends is not None:
            its = AttentionMetadata(extends.q_lens, meta.scale)
            out[extends.rows] = self._torch.forward(q[extends.rows], view, extends.segments, its)
        return out

    def before_replay(self, segments: PagedSegments) -> None:
        """There are no CUDA graphs on the CPU."""

    def partial(
        self, q: torch.Tensor, view: KVView, segment: KVSegment, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q: (q_len, num_q_heads, head_dim). Returns out, same shape, float32, and lse (q_len, num_q_heads)."""
        if q.shape[0] != 1 or not takes_heads(q, view.k):
            return self._torch.partial(q, view, segment, scale)
        out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
        zero = np.zeros(1, np.int64)
        decode = PagedDecode(segment.pages, zero, zero, np.array([segment.length]), np.array([segment.skip]))
        decode.attend(q, view.k, view.v, scale, out, lse)
        return out, lse


def _build_plan(segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> _Plan:
    lens = np.array(q_lens, np.int64)
    first_rows = np.cumsum(lens) - lens
    singles = np.flatnonzero(lens == 1)
    decode = None
    if isinstance(segments, PagedSegments):
        batch: BatchKey | PagedSegments = segments
        if len(singles):
            starts, kv_lens = segments.starts[singles], segments.kv_lens[singles]
            decode = PagedDecode(segments.table, first_rows[singles], starts, kv_lens)
    else:
        batch = BatchKey.of(segments, page_size, q_lens)
        if len(singles):
            decode = _decode_slots([segments[i] for i in singles.tolist()], first_rows[singles], page_size)
    return _Plan(batch, decode, _extends(segments, lens, first_rows))


def _decode_slots(segments: list[list[KVSegment]], rows: np.ndarray, page_size: int) -> PagedDecode:
    """Requests with any number of segments."""
    flat = [segment for of_req in segments for segment in of_req if segment.length]
    table = torch.cat(segment_slots(flat, page_size)) if flat else torch.empty(0, dtype=torch.int64)
    kv_lens = np.array([sum(segment.length for segment in of_req) for of_req in segments], np.int64)
    return PagedDecode(table, rows, np.cumsum(kv_lens) - kv_lens, kv_lens, by_slot=True)


def _extends(segments: Sequence[list[KVSegment]], q_lens: np.ndarray, first_rows: np.ndarray) -> _Extends | None:
    several = np.flatnonzero(q_lens > 1)
    if not len(several):
        return None
    runs = [np.arange(first_rows[i], first_rows[i] + q_lens[i]) for i in several]
    rows = np.concatenate(runs)
    first, end = int(rows[0]), int(rows[-1]) + 1
    return _Extends(
        slice(first, end) if end - first == len(rows) else torch.from_numpy(rows),
        [segments[i] for i in several.tolist()],
        tuple(q_lens[several].tolist()),
    )
