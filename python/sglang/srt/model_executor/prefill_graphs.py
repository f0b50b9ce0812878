"""`PrefillGraphs`: a model whose short prefills are CUDA graphs.

Owns the graphs and the memory that they read from and leave their results in. 48 new tokens behind a long prefix take
a GPU less time than the host takes for 27 kernels a layer. Where all KV is there, a prefill is one graph, up to the
rest of the last layer: only sampled rows. A layer's KV may still be on its way, and not all backends can capture
their attention. Then it is one graph per layer:

    graph 0         embedding, and layer 0 up to its queries, with K and V in the pool
                    the host starts layer 0's attention
    graph 1         the rest of layer 0, and layer 1 up to its queries, with K and V in the pool
    ...
                    the last layer's attention, and the rest of it

A batch with fewer tokens than its graphs is filled up with rows of earlier batches, whose results are not read, and
whose K and V go to the pool's scratch slot: no row depends on another but in attention. Used on the executor's stream
only.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionMetadata
from sglang.srt.layers.radix_attention import AttentionBatch
from sglang.srt.mem_cache.kv_view import KVPool, KVSegment, KVView, PagedSegments
from sglang.srt.mem_cache.memory_pool import DevicePool
from sglang.srt.model_executor.forward_batch_info import CausalLM, ForwardBatch, ForwardMode
from sglang.srt.model_executor.page_table import PageTable
from sglang.srt.utils.cuda_stream import capturing

logger = logging.getLogger(__name__)

_WARM_UPS = 2
_SMALLEST = 16
_LARGEST_STEP = 128
# Of a prefill that is one graph.
_MOST_REQUESTS = 16


class CutModel(CausalLM, Protocol):
    """A model whose layers can be cut before and after their attention. `state` stands before a layer, or after what
    is named."""

    # Of attention, before the projection of its output.
    attended_size: int
    dtype: torch.dtype

    def start(self, input_ids: torch.Tensor, positions: torch.Tensor, out_loc: torch.Tensor) -> Any:
        """The state before layer 0. See `ForwardBatch`."""
        ...

    def project(self, layer_id: int, state: Any, pool: KVPool) -> torch.Tensor:
        """The layer up to its queries, (num_tokens, heads, head_dim), which are returned, and its keys and values,
        which are stored."""
        ...

    def attend_own(self, layer_id: int, q: torch.Tensor, batch: AttentionBatch, pool: KVPool) -> torch.Tensor:
        """(num_tokens, attended_size)."""
        ...

    def finish_layer(
        self, layer_id: int, state: Any, attended: torch.Tensor, rows: torch.Tensor | None = None
    ) -> Any:
        """The layer behind its attention. rows: (n,) int64, those that are read afterwards; None for all."""
        ...

    def first_rows(self, state: Any, num_rows: int) -> Any:
        """The state of the first rows alone, in the same memory."""
        ...


@dataclass(frozen=True)
class _Captured:
    """Prefills of num_tokens tokens, as a graph of each layer."""

    num_tokens: int
    graphs: list[torch.cuda.CUDAGraph]
    # Before the last layer's attention.
    state: Any


@dataclass(frozen=True)
class _Whole:
    """Prefills of num_tokens tokens, as one graph."""

    num_tokens: int
    graph: torch.cuda.CUDAGraph
    segments: PagedSegments
    windowed_segments: PagedSegments
    # Of the last layer, (num_tokens, attended_size), and the state behind its attention.
    attended: torch.Tensor
    state: Any
    # Of the page table.
    version: int


@dataclass(frozen=True)
class _OfGraph:
    """See `AttentionBatch`."""

    segments: PagedSegments
    windowed_segments: PagedSegments
    attn: AttentionMetadata


@dataclass(frozen=True)
class _Replayed:
    """The state of a batch between two graphs, or after the only one."""

    captured: _Captured | _Whole
    num_tokens: int


def token_counts(most: int) -> list[int]:
    """The numbers of tokens for which there are graphs: twice as many each time, up to a step; then by steps, because
    more tokens take the device longer than the host, and what is computed for nothing costs."""
    counts = []
    count = min(_SMALLEST, most)
    while count < most:
        counts.append(count)
        count += min(count, _LARGEST_STEP)
    return [*counts, most]


@dataclass(frozen=True)
class CapturedAttention:
    """The model's backend, which captures extends, the table that its batches read, and their scale."""

    backend: AttentionBackend
    page_table: PageTable
    scale: float


def _max_requests(num_tokens: int) -> int:
    return min(num_tokens, _MOST_REQUESTS)


class PrefillGraphs:
    """See `CausalLM`. max_tokens: of a batch; larger ones, and those that stream, run kernel by kernel. pool: of all
    batches. attention: None for a graph of each layer alone. Raises ValueError if the pool has no scratch slot."""

    def __init__(
        self,
        model: CutModel,
        pool: DevicePool,
        max_tokens: int,
        device: torch.device,
        attention: CapturedAttention | None = None,
    ) -> None:
        if pool.scratch_slot is None or pool.windowed_scratch_slot is None:
            raise ValueError("CUDA graphs need a device pool with a scratch slot")
        self.model = model
        self._pool = pool
        self.num_layers, self.windows = model.num_layers, model.windows
        self._counts = token_counts(max_tokens)
        self._input_ids, self._positions = torch.zeros((2, max_tokens), dtype=torch.int64, device=device)
        scratch_slots = [pool.scratch_slot, pool.windowed_scratch_slot][: 2 if pool.num_windowed_pages else 1]
        self._scratch_slots = torch.from_numpy(np.array(scratch_slots)).to(device)[:, None]
        # One row where the device has one pool.
        self._out_loc = self._scratch_slots.repeat(1, max_tokens)
        self._attended = torch.zeros((max_tokens, model.attended_size), dtype=model.dtype, device=device)
        # (max_tokens, heads, head_dim): a layer's queries.
        self._queries: torch.Tensor | None = None
        self._captured: dict[int, _Captured] = {}
        self._attention = attention
        self._whole: dict[int, _Whole] = {}
        # Memory that all graphs use in turn.
        self._memory: Any = None

    def capture_all(self) -> None:
        """Capture all graphs before the first request; until then there are none."""
        began = time.monotonic()
        with torch.inference_mode():
            # The largest first: the others fit into its memory.
            for count in reversed(self._counts):
                self._captured[count] = self._capture(count)
                if self._attention is not None:
                    self._whole[count] = self._capture_whole(count, self._attention)
        seconds = time.monotonic() - began
        logger.info("captured CUDA graphs of prefills of up to %d tokens in %.1f s", self._counts[-1], seconds)

    @torch.inference_mode()
    def embed(self, batch: ForwardBatch) -> Any:
        num_tokens = len(batch.input_ids)
        captured = None
        if batch.mode == ForwardMode.EXTEND and not batch.streamed and num_tokens <= self._counts[-1]:
            captured = self._captured.get(self._counts[bisect_left(self._counts, num_tokens)])
        if captured is None:
            return self.model.embed(batch)
        self._input_ids[:num_tokens].copy_(batch.input_ids)
        self._positions[:num_tokens].copy_(batch.positions)
        self._out_loc[:, :num_tokens].copy_(batch.out_loc[: len(self._out_loc)])
        self._out_loc[:, num_tokens : captured.num_tokens].copy_(self._scratch_slots)
        if (whole := self._whole_for(captured.num_tokens, batch)) is not None:
            whole.graph.replay()
            return _Replayed(whole, num_tokens)
        captured.graphs[0].replay()
        return _Replayed(captured, num_tokens)

    @torch.inference_mode()
    def forward_layer(self, layer_id: int, state: Any, batch: ForwardBatch, pool: KVPool) -> Any:
        if not isinstance(state, _Replayed):
            return self.model.forward_layer(layer_id, state, batch, pool)
        captured, num_tokens = state.captured, state.num_tokens
        if isinstance(captured, _Whole):
            if layer_id < self.num_layers - 1:
                return state
            last, attended = self.model.first_rows(captured.state, num_tokens), captured.attended[:num_tokens]
            return self.model.finish_layer(layer_id, last, attended, batch.sample_rows)
        assert self._queries is not None and pool is self._pool
        attended = self.model.attend_own(layer_id, self._queries[:num_tokens], batch, pool)
        if layer_id == self.num_layers - 1:
            last = self.model.first_rows(captured.state, num_tokens)
            return self.model.finish_layer(layer_id, last, attended, batch.sample_rows)
        self._attended[:num_tokens].copy_(attended)
        captured.graphs[layer_id + 1].replay()
        return state

    def begin_layer(self, layer_id: int, state: Any, batch: ForwardBatch, pool: KVPool) -> Any:
        return self.model.begin_layer(layer_id, state, batch, pool)

    def attend(
        self,
        layer_id: int,
        state: Any,
        batch: ForwardBatch,
        place: int,
        view: KVView,
        segment: KVSegment,
        position: int,
    ) -> Any:
        return self.model.attend(layer_id, state, batch, place, view, segment, position)

    def end_layer(self, layer_id: int, state: Any, batch: ForwardBatch) -> Any:
        return self.model.end_layer(layer_id, state, batch)

    def logits(self, state: Any, batch: ForwardBatch) -> torch.Tensor:
        return self.model.logits(state, batch)

    def _whole_for(self, count: int, batch: ForwardBatch) -> _Whole | None:
        """The graph, with the batch's lengths and places; None if its attention cannot be in one."""
        attention, ours = self._attention, batch.segments
        if (
            attention is None
            or batch.gates
            or not isinstance(ours, PagedSegments)
            or len(ours) > _max_requests(count)
        ):
            return None
        whole = self._whole.get(count)
        if whole is None:
            return None
        if whole.version != attention.page_table.version:
            # If that fails, prefills go on with a graph a layer.
            del self._whole[count]
            whole = self._whole[count] = self._capture_whole(count, attention)
        theirs, num_reqs = whole.segments, len(ours)
        for there, here in (
            (theirs.starts, ours.starts),
            (theirs.kv_lens, ours.kv_lens),
            (theirs.q_lens, ours.q_lens),
        ):
            there[:num_reqs], there[num_reqs:] = here, 0
        theirs.device_starts[:num_reqs].copy_(ours.device_starts)
        theirs.device_kv_lens[:num_reqs].copy_(ours.device_kv_lens)
        # The windowed segments have the same arrays.
        attention.backend.before_replay(theirs)
        if whole.windowed_segments is not theirs:
            attention.backend.before_replay(whole.windowed_segments)
        return whole

    def _capture(self, count: int) -> _Captured:
        """On the current stream."""
        for _ in range(_WARM_UPS):
            self._run(count, lambda work: work())
        graphs: list[torch.cuda.CUDAGraph] = []

        def capture(work: Callable[[], Any]) -> Any:
            graph, found = self._graph_of(work)
            graphs.append(graph)
            return found

        return _Captured(count, graphs, self._run(count, capture))

    def _capture_whole(self, count: int, attention: CapturedAttention) -> _Whole:
        """On the current stream."""
        table, num_reqs = attention.page_table, _max_requests(count) + 1
        starts, kv_lens, q_lens = np.zeros((3, num_reqs), np.int64)
        q_lens[0] = count
        on_device = torch.zeros((2, num_reqs), dtype=torch.int64, device=self._input_ids.device)
        segments = PagedSegments(table.table, self._pool.page_size, starts, kv_lens, q_lens, *on_device)
        meta = AttentionMetadata(tuple(q_lens.tolist()), attention.scale)
        batch = _OfGraph(segments, table.windowed(segments), meta)

        def forward() -> tuple[Any, torch.Tensor]:
            state = self.model.start(*self._rows(count))
            for layer in range(self.num_layers):
                queries = self.model.project(layer, state, self._pool)
                attended = self.model.attend_own(layer, queries, batch, self._pool)
                if layer < self.num_layers - 1:
                    state = self.model.finish_layer(layer, state, attended)
            return state, attended

        attention.backend.capturing = True
        try:
            for _ in range(_WARM_UPS):
                forward()
            graph, (state, attended) = self._graph_of(forward)
        finally:
            attention.backend.capturing = False
        return _Whole(count, graph, segments, batch.windowed_segments, attended, state, table.version)

    def _rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a graph of so many tokens reads: for `CutModel.start`."""
        return self._input_ids[:count], self._positions[:count], self._out_loc[:, :count].expand(2, -1)

    def _graph_of(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """What the work starts on the device, and what it returns."""
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._memory):
            found = work()
        self._memory = graph.pool()
        return graph, found

    def _run(self, count: int, each: Callable[[Callable[[], Any]], Any]) -> Any:
        """The parts of a prefill that are graphs, each by `each`. Returns the state before the last attention."""
        attended = self._attended[:count]

        def first() -> Any:
            state = self.model.start(*self._rows(count))
            self._keep(self.model.project(0, state, self._pool))
            return state

        state = each(first)
        for layer in range(1, self.num_layers):

            def following(layer: int = layer, state: Any = state) -> Any:
                state = self.model.finish_layer(layer - 1, state, attended)
                self._keep(self.model.project(layer, state, self._pool))
                return state

            state = each(following)
        return state

    def _keep(self, queries: torch.Tensor) -> None:
        """For the attention, which has read it before the next graph writes there."""
        if self._queries is None:
            self._queries = queries.new_zeros((len(self._input_ids), *queries.shape[1:]))
        self._queries[: queries.shape[0]].copy_(queries)
