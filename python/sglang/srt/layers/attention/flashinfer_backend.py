"""`FlashInferAttnBackend`: attention on a GPU by FlashInfer's kernels over paged KV.

Owns FlashInfer's wrappers, their workspace, and the plan of the forward batch it is working on. Writes no KV and
reads only the pages that the segments name.

Without a GPU the tests check its calls against the signatures of FlashInfer 0.6.14, and its plans with a stand-in
that computes attention from the same arguments.

FlashInfer (0.6.14, `page.cuh`, `batch_prefill.cu`) needs 16-bit queries and KV; K and V of one pool with equal
strides, whole 16-byte words, the values of a head side by side. The distance between pages and between tokens is
free, so that block-major pools will do. It plans on the host from lengths that the host knows. A plan names a
request's pages in one array without gaps, which is gathered on the device without a wait. A run of segments with
borders inside of pages is planned as pages of one token, which needs tokens to lie evenly in a pool.

All kernels are those of its prefill, for decodes too: its decode kernel divides by zero where a request has no keys.
"""

from __future__ import annotations

import importlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata, BatchKey, PartialMask
from sglang.srt.mem_cache.kv_view import KVSegment, KVView, PagedSegments, segment_slots

_LN_2 = math.log(2)
# The plans of partials that are kept. A request that streams has one for its pieces, one for its last piece, and a
# few for the tokens on the device. Each takes 8 MiB of the device and as much pinned memory.
_KEPT_PARTIALS = 8
# Memory for the parts of split keys. FlashInfer raises an error when it is too small.
_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class _Pages:
    """A batch's keys in FlashInfer's form. A request without keys has no pages, and a last one of 0 tokens."""

    # (num_reqs + 1,) int32, on the CPU.
    indptr: torch.Tensor
    # (num_reqs,) int32, on the CPU.
    last_page_lens: torch.Tensor
    # (indptr[-1],) int32, on the device.
    indices: torch.Tensor
    # 1 also where keys are named one by one.
    page_size: int


@dataclass(frozen=True)
class _Shape:
    """The other inputs of a plan. scale: on q.k."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float

    @classmethod
    def of(cls, q: torch.Tensor, view: KVView, scale: float) -> _Shape:
        return cls(q.shape[1], view.k.shape[2], q.shape[2], q.dtype, scale)

    def arguments(self) -> dict[str, Any]:
        return {"sm_scale": self.scale, "q_data_type": self.dtype, "kv_data_type": self.dtype}


class _Planned:
    """One of FlashInfer's wrappers. A plan is copied to the device from the wrapper's own pinned memory. The next
    plan must not overwrite it before the copy, and therefore waits for the launch before the last."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.run = wrapper.run
        self._wrapper = wrapper
        self._left = torch.cuda.Event() if device.type == "cuda" else None

    def plan_decode(self, pages: _Pages, shape: _Shape) -> None:
        self._plan(
            pages.indptr,
            pages.indices,
            pages.last_page_lens,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            pages.page_size,
            **shape.arguments(),
        )

    def plan_extend(self, q_lens: np.ndarray, pages: _Pages, shape: _Shape, causal: bool) -> None:
        self._plan(
            _indptr(q_lens),
            pages.indptr,
            pages.indices,
            pages.last_page_lens,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            pages.page_size,
            causal=causal,
            **shape.arguments(),
        )

    def _plan(self, *args: Any, **kwargs: Any) -> None:
        if self._left is not None:
            self._left.synchronize()
        self._wrapper.plan(*args, **kwargs)
        if self._left is not None:
            self._left.record()


@dataclass(frozen=True)
class _Batch:
    """The batch that forward works on. source: the segments, kept so that no others can come to lie at their address.
    planned: None if no request has keys. by_token: keys are named one by one."""

    source: PagedSegments | BatchKey
    q_lens: tuple[int, ...]
    scale: float
    planned: _Planned | None
    by_token: bool

    def matches(self, segments: Sequence[list[KVSegment]], page_size: int, meta: AttentionMetadata) -> bool:
        if self.scale != meta.scale:
            return False
        if isinstance(segments, PagedSegments):
            return self.source is segments and self.q_lens == meta.q_lens
        return isinstance(self.source, BatchKey) and self.source.matches(segments, page_size, meta.q_lens)


@dataclass(frozen=True)
class _Graph:
    """A decode that was captured; its wrapper plans into buffers that the graph reads, with pages in indices."""

    planned: _Planned
    shape: _Shape
    indices: torch.Tensor


@dataclass(frozen=True)
class _Partial:
    """indices: (num_pages,) int32, on the device; the plan reads it, and each call writes its pages there."""

    planned: _Planned
    indices: torch.Tensor


class FlashInferAttnBackend:
    """See `AttentionBackend`. One instance serves one model; calls do not overlap, and are all on one stream.

    The plan of a batch is made in its first layer and kept until other segments arrive.

    A CUDA graph of a decode: the first `forward` while `capturing` makes a wrapper for the given `PagedSegments`,
    whose plans lie in buffers of their own. Later ones only run it. `before_replay` plans again from its numpy arrays
    and gathers the pages that its table on the device then holds, at most table.numel() of them.

    flashinfer: the module, which a test replaces. extend_kernels: FlashInfer's name for them; "auto" are fa3 on
    Hopper, "fa2" are the kernels that decodes have compiled anyway.
    """

    captures_extends = False
    computes_masked = False
    long_extend_len = None
    expansion = None

    def __init__(
        self, flashinfer: Any = None, workspace_bytes: int = _WORKSPACE_BYTES, extend_kernels: str = "auto"
    ) -> None:
        self.capturing = False
        self._flashinfer = flashinfer or importlib.import_module("flashinfer")
        self._workspace_bytes = workspace_bytes
        self._extend_kernels = extend_kernels
        self._workspace: torch.Tensor | None = None
        self._decode: _Planned | None = None
        self._extend: _Planned | None = None
        self._batch: _Batch | None = None
        # As long as a graph's owner keeps its segments.
        self._graphs: WeakKeyDictionary[PagedSegments, _Graph] = WeakKeyDictionary()
        self._partials: OrderedDict[tuple[Any, ...], _Partial] = OrderedDict()

    def forward(
        self, q: torch.Tensor, view: KVView, segments: Sequence[list[KVSegment]], meta: AttentionMetadata
    ) -> torch.Tensor:
        """q: (num_tokens, num_q_heads, head_dim). Returns the same shape and dtype, contiguous."""
        assert sum(meta.q_lens) == q.shape[0], f"{q.shape[0]} rows of q for q_lens {meta.q_lens}"
        _check(q, view)
        if self.capturing and isinstance(segments, PagedSegments) and set(meta.q_lens) == {1}:
            planned = self._captured(segments, _Shape.of(q, view, meta.scale))
            return planned.run(q, (view.k, view.v), out=q.new_empty(q.shape))
        batch = self._batch
        if batch is None or not batch.matches(segments, view.page_size, meta):
            batch = self._batch = self._make_batch(segments, meta, q, view)
        if batch.planned is None:
            return q.new_zeros(q.shape)
        return batch.planned.run(
            q, _tokens_of(view) if batch.by_token else (view.k, view.v), out=q.new_empty(q.shape)
        )

    def before_replay(self, segments: PagedSegments) -> None:
        """Plans the graph's decode again, on the current stream, which the replay has to be on too."""
        if self._batch is not None and self._batch.source is segments:
            self._batch = None
        graph = self._graphs[segments]
        graph.planned.plan_decode(_pages_of(segments), graph.shape)

    def partial(
        self, q: torch.Tensor, view: KVView, segment: KVSegment, scale: float, mask: PartialMask | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q: (q_len, num_q_heads, head_dim). Returns out, same shape, float32, and lse (q_len, num_q_heads). The
        kernels write out in q's dtype: FlashInfer has none that write float32."""
        assert mask is None, "see computes_masked"
        assert not segment.causal or segment.length == q.shape[0], "a causal segment's tokens are the queries"
        lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
        if segment.length == 0 or q.shape[0] == 0:
            return q.new_zeros(q.shape, dtype=torch.float32), lse
        _check(q, view)
        # FlashInfer cannot skip tokens.
        by_token = segment.skip > 0
        names = _rows_of([segment], view) if by_token else segment.pages[: -(-segment.length // view.page_size)]
        key = (q.shape[0], segment.length, segment.causal, by_token, scale)
        partial = self._partials.pop(key, None)
        if partial is None:
            partial = self._plan_partial(q, segment, 1 if by_token else view.page_size, _Shape.of(q, view, scale))
        self._partials[key] = partial
        partial.indices.copy_(names)
        out = q.new_empty(q.shape)
        kv = _tokens_of(view) if by_token else (view.k, view.v)
        partial.planned.run(q, kv, out=out, lse=lse, return_lse=True)
        return out.float(), lse.mul_(_LN_2)

    # -- inside -------------------------------------------------------------------------------------------------

    def _make_batch(
        self, segments: Sequence[list[KVSegment]], meta: AttentionMetadata, q: torch.Tensor, view: KVView
    ) -> _Batch:
        q_lens = np.array(meta.q_lens, np.int64)
        source: PagedSegments | BatchKey
        if isinstance(segments, PagedSegments):
            source, pages = segments, _pages_of(segments)
            assert segments.page_size == view.page_size, f"{segments.page_size} tokens a page in {view.page_size}"
            assert np.array_equal(segments.q_lens, q_lens), "queries that the segments were not made for"
        else:
            source = BatchKey.of(segments, view.page_size, meta.q_lens)
            pages = _pages_of_lists(segments, q_lens, view, q.device)
        planned = None
        if pages.indptr[-1] > 0:
            shape = _Shape.of(q, view, meta.scale)
            if bool((q_lens == 1).all()):
                planned = self._decode = self._decode or self._decode_wrapper(q.device)
                planned.plan_decode(pages, shape)
            else:
                planned = self._extend = self._extend or self._extend_wrapper(q.device, self._extend_kernels)
                planned.plan_extend(q_lens, pages, shape, causal=True)
        return _Batch(source, meta.q_lens, meta.scale, planned, not isinstance(segments, PagedSegments))

    def _captured(self, segments: PagedSegments, shape: _Shape) -> _Planned:
        graph = self._graphs.get(segments)
        if graph is None:
            table = segments.table
            if table.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a forward pass with these segments has to come before the capture, to plan it")
            indices = self._shared_indices(table)
            planned = self._decode_wrapper(
                table.device,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=table.new_zeros(len(segments) + 1, dtype=torch.int32),
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=table.new_zeros(len(segments), dtype=torch.int32),
            )
            graph = self._graphs[segments] = _Graph(planned, shape, indices)
            planned.plan_decode(_pages_of(segments), shape)
        return graph.planned

    def _shared_indices(self, table: torch.Tensor) -> torch.Tensor:
        """Graphs with the same table share the pages' buffer, because one of them runs at a time."""
        for segments, graph in self._graphs.items():
            if segments.table.data_ptr() == table.data_ptr() and len(graph.indices) >= table.numel():
                return graph.indices
        return table.new_zeros(table.numel(), dtype=torch.int32)

    def _plan_partial(self, q: torch.Tensor, segment: KVSegment, page_size: int, shape: _Shape) -> _Partial:
        if len(self._partials) < _KEPT_PARTIALS:
            # Compiled for decodes anyway.
            planned = self._extend_wrapper(q.device, "fa2")
        else:
            planned = self._partials.popitem(last=False)[1].planned
        num_pages = -(-segment.length // page_size)
        indices = torch.empty(num_pages, dtype=torch.int32, device=q.device)
        kv_lens, q_lens = np.array([segment.length]), np.array([q.shape[0]])
        # FlashInfer keeps the tensor itself, because it has the right device and dtype.
        pages = _Pages(_indptr(-(-kv_lens // page_size)), _last_page_lens(kv_lens, page_size), indices, page_size)
        planned.plan_extend(q_lens, pages, shape, segment.causal)
        return _Partial(planned, indices)

    def _decode_wrapper(self, device: torch.device, **buffers: Any) -> _Planned:
        make = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
        wrapper = make(self._workspace_on(device), "NHD", use_tensor_cores=True, backend="fa2", **buffers)
        return _Planned(wrapper, device)

    def _extend_wrapper(self, device: torch.device, kernels: str) -> _Planned:
        make = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        return _Planned(make(self._workspace_on(device), "NHD", backend=kernels), device)

    def _workspace_on(self, device: torch.device) -> torch.Tensor:
        """The workspace, shared by all wrappers: a kernel reads only what the same run has written there."""
        if self._workspace is None:
            self._workspace = torch.zeros(self._workspace_bytes, dtype=torch.uint8, device=device)
        return self._workspace


def _indptr(lens: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))


def _last_page_lens(kv_lens: np.ndarray, page_size: int) -> torch.Tensor:
    return torch.from_numpy(np.where(kv_lens > 0, (kv_lens - 1) % page_size + 1, 0).astype(np.int32))


def _pages_of(segments: PagedSegments) -> _Pages:
    """The table's pages, gathered on its device. The host knows their number and waits for nothing."""
    page_size = segments.page_size
    indptr = _indptr(-(-segments.kv_lens // page_size))
    total = int(indptr[-1])
    assert total <= segments.table.numel(), f"{total} pages in a table of {segments.table.numel()}"
    counts = (segments.device_kv_lens + (page_size - 1)) // page_size
    # From a page's place among all pages to its place in the table.
    shifts = segments.device_starts - (counts.cumsum(0) - counts)
    places = torch.arange(total, device=counts.device) + shifts.repeat_interleave(counts, output_size=total)
    indices = segments.table[places].to(torch.int32)
    return _Pages(indptr, _last_page_lens(segments.kv_lens, page_size), indices, page_size)


def _pages_of_lists(
    segments: Sequence[list[KVSegment]], q_lens: np.ndarray, view: KVView, device: torch.device
) -> _Pages:
    """Pages of one token each."""
    for of_req, q_len in zip(segments, q_lens.tolist()):
        if q_len > 1 and any(segment.length for segment in of_req) and not of_req[-1].causal:
            raise ValueError("several queries that all see all keys: FlashInfer's forward has causal ones only")
    flat = [segment for of_req in segments for segment in of_req if segment.length > 0]
    rows = _rows_of(flat, view) if flat else torch.zeros(0, dtype=torch.int64)
    kv_lens = np.array([sum(segment.length for segment in of_req) for of_req in segments], np.int64)
    return _Pages(_indptr(kv_lens), _last_page_lens(kv_lens, 1), rows.to(device, torch.int32), 1)


def _rows_of(segments: list[KVSegment], view: KVView) -> torch.Tensor:
    """(num_tokens,) int64, the places of tokens in the result of `_tokens_of` for their pool."""
    slots = torch.cat(segment_slots(segments, view.page_size))
    return slots + slots // view.page_size * (_tokens_per_page(view) - view.page_size)


def _tokens_of(view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool as pages of one token; between those of two pages lie tokens of other layers, in block-major pools."""
    num_pages, page_size, num_heads, head_dim = view.k.shape
    if page_size == 1:
        return view.k, view.v
    num_rows = (num_pages - 1) * _tokens_per_page(view) + page_size
    token, head = view.k.stride()[1:3]
    k, v = (x.as_strided((num_rows, 1, num_heads, head_dim), (token, token, head, 1)) for x in (view.k, view.v))
    return k, v


def _tokens_per_page(view: KVView) -> int:
    """The distance of pages, in tokens."""
    page, token = view.k.stride()[:2]
    if view.page_size == 1:
        return 1
    if page % token != 0:
        raise ValueError(
            "FlashInfer needs pages to lie a whole number of tokens apart, "
            f"not {page} values with tokens of {token}: use the attention backend triton"
        )
    return page // token


def _check(q: torch.Tensor, view: KVView) -> None:
    """Raise for inputs that FlashInfer does not check itself."""
    if view.v.shape[3] != q.shape[2]:
        raise ValueError(
            f"FlashInfer is not asked for values of {view.v.shape[3]} beside keys of {q.shape[2]}: use the attention "
            "backend triton"
        )
    if q.dtype not in (torch.float16, torch.bfloat16) or view.k.dtype != q.dtype:
        raise ValueError(
            f"FlashInfer computes in float16 or bfloat16, not {q.dtype} on KV of {view.k.dtype}: use the attention "
            "backend triton"
        )
    strides = view.k.stride()
    words = all(stride * q.dtype.itemsize % 16 == 0 for stride in (*strides[:3], *q.stride()[:2]))
    if view.v.stride() != strides or strides[3] != 1 or q.stride(2) != 1 or not words:
        raise ValueError(
            "FlashInfer needs K and V with equal strides, and heads of whole 16-byte words with their values side by "
            f"side, not strides {strides} and {view.v.stride()} and queries of {q.stride()}: use the attention "
            "backend triton"
        )
