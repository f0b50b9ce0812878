"""`CudaGraphRunner`: decodes as CUDA graphs, one per batch size.

Owns the graphs and the memory that they read their inputs from. A decode starts some ten kernels per layer, which
takes the host longer than the GPU takes for a small batch; a graph starts all of them at once. The model's forward
pass and logits are captured. Sampling is not. Used on the executor's stream only.

A batch that is smaller than its graph is filled up with rows that have no keys and write to the pool's scratch slot.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionMetadata
from sglang.srt.mem_cache.kv_view import PagedSegments
from sglang.srt.mem_cache.memory_pool import DevicePool
from sglang.srt.model_executor.forward_batch_info import BatchNumbers, CausalLM, ForwardBatch, ForwardMode
from sglang.srt.model_executor.page_table import PageTable
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_plan import SamplingPlan
from sglang.srt.utils.cuda_stream import capturing

logger = logging.getLogger(__name__)

_WARM_UPS = 2


@dataclass(frozen=True)
class _Captured:
    """A captured decode of one batch size."""

    graph: torch.cuda.CUDAGraph
    # (6 or 7, batch size) int64 on the device, the graph's inputs: of `BatchNumbers` input_ids, positions, slots,
    # starts, kv_lens and the rows of out_loc.
    inputs: torch.Tensor
    batch: ForwardBatch
    segments: PagedSegments
    windowed_segments: PagedSegments
    # Of the page table.
    version: int


def batch_sizes(largest: int) -> list[int]:
    """The batch sizes that are captured. They keep both the rows of padding and the number of graphs small."""
    sizes = [1, 2, 4, 8, *range(16, min(largest, 256) + 1, 8), *range(288, largest + 1, 32)]
    return sorted({size for size in sizes if size < largest} | {largest})


class CudaGraphRunner:
    """attention: the model's backend. last_tokens: (max_slots,) int64, of every slot, on the device. max_batch_size:
    larger batches have no graph."""

    def __init__(
        self,
        model: CausalLM,
        pool: DevicePool,
        attention: AttentionBackend,
        page_table: PageTable,
        last_tokens: torch.Tensor,
        scale: float,
        max_batch_size: int,
    ) -> None:
        if pool.scratch_slot is None or pool.windowed_scratch_slot is None:
            raise ValueError("CUDA graphs need a device pool with a scratch slot")
        self._model = model
        self._pool = pool
        self._attention = attention
        self._page_table = page_table
        self._last_tokens = last_tokens
        self._scale = scale
        self._sizes = batch_sizes(max_batch_size)
        # The values of a row without a request.
        scratch_slots = [pool.scratch_slot, pool.windowed_scratch_slot][: 2 if pool.num_windowed_pages else 1]
        self._padding = np.array([0] * 5 + scratch_slots)[:, None]
        self._captured: dict[int, _Captured] = {}
        # Memory that all graphs use in turn.
        self._memory: Any = None
        # (max_batch_size, vocab_size) float32, of the last replay. Kept by each graph, they would take as much again
        # for each batch size.
        self._logits: torch.Tensor | None = None

    @property
    def max_batch_size(self) -> int:
        """0: there is no graph."""
        return self._sizes[-1] if self._sizes else 0

    def capture_all(self) -> None:
        """Capture all graphs before the first request, which would wait for them otherwise."""
        began = time.monotonic()
        # The largest first: the others fit into its memory.
        for size in reversed(self._sizes):
            self._capture(size)
        logger.info("captured CUDA graphs of %d batch sizes in %.1f s", len(self._sizes), time.monotonic() - began)

    def replay(
        self,
        seq: int,
        numbers: BatchNumbers,
        plan: SamplingPlan,
        to_device: Callable[[list[np.ndarray]], list[torch.Tensor]],
    ) -> tuple[torch.Tensor, ForwardBatch]:
        """A decode of n requests, one token each. plan: how they are sampled. to_device: copies arrays, and with them
        the changes that the device lacks. Returns logits (n, vocab_size) float32, and a batch of which only
        sample_slots and `sampling` are valid; the next replay overwrites both."""
        n = len(numbers.slots)
        size = self._sizes[bisect_left(self._sizes, n)]
        captured = self._captured.get(size)
        if captured is None or captured.version != self._page_table.version:
            captured = self._capture_again(size)
        rows = np.tile(self._padding, size)
        rows[:, :n] = (
            numbers.input_ids,
            numbers.positions,
            numbers.slots,
            numbers.starts,
            numbers.kv_lens,
            *numbers.out_loc,
        )
        (there,) = to_device([rows.ravel()])
        captured.inputs.copy_(there.view_as(captured.inputs))
        # The windowed segments have the same arrays.
        captured.segments.starts[:], captured.segments.kv_lens[:] = rows[3], rows[4]
        self._attention.before_replay(captured.segments)
        if captured.windowed_segments is not captured.segments:
            self._attention.before_replay(captured.windowed_segments)
        captured.graph.replay()
        batch = replace(
            captured.batch,
            seq=seq,
            sample_slots=captured.inputs[2, :n],
            sampling=plan.info(captured.inputs[4, :n]),
        )
        assert self._logits is not None
        return self._logits[:n], batch

    def _capture_again(self, size: int) -> _Captured:
        """If that fails, as for want of memory, decodes of that size go on without a graph; this one fails."""
        try:
            return self._capture(size)
        except Exception:
            logger.error("no CUDA graph of %d requests could be captured: decodes of so many have none now", size)
            self._sizes = [each for each in self._sizes if each < size]
            raise

    def _capture(self, size: int) -> _Captured:
        """Capture on the current stream."""
        table = self._page_table
        rows = np.tile(self._padding, size)
        inputs = torch.from_numpy(rows).to(self._last_tokens.device)
        input_ids, positions, slots, starts, kv_lens = inputs[:5].unbind()
        segments = PagedSegments(
            table.table,
            self._pool.page_size,
            rows[3].copy(),
            rows[4].copy(),
            np.ones(size, np.int64),
            starts,
            kv_lens,
        )
        windowed_segments = table.windowed(segments)
        batch = ForwardBatch(
            seq=-1,
            mode=ForwardMode.DECODE,
            input_ids=input_ids,
            positions=positions,
            out_loc=inputs[5:].expand(2, -1),
            segments=segments,
            windowed_segments=windowed_segments,
            attn=AttentionMetadata((1,) * size, self._scale),
            sample_rows=torch.arange(size, device=inputs.device),
            sample_slots=slots,
            sampling=SamplingBatchInfo.from_params([], 1, kv_lens[:0], inputs.device),
        )

        def forward() -> torch.Tensor:
            known = torch.where(input_ids < 0, self._last_tokens.index_select(0, slots), input_ids)
            batch.input_ids = known
            state = self._model.embed(batch)
            for layer in range(self._model.num_layers):
                state = self._model.forward_layer(layer, state, batch, self._pool)
            return self._model.logits(state, batch)

        self._attention.capturing = True
        try:
            with torch.inference_mode():
                for _ in range(_WARM_UPS):
                    logits = forward()
                if self._logits is None:
                    self._logits = logits.new_empty((self.max_batch_size, logits.shape[1]))
                # Warmed up too.
                self._logits[:size].copy_(logits)
                del logits
                graph = torch.cuda.CUDAGraph()
                with capturing(graph, self._memory):
                    self._logits[:size].copy_(forward())
        finally:
            self._attention.capturing = False
        self._memory = graph.pool()
        captured = self._captured[size] = _Captured(graph, inputs, batch, segments, windowed_segments, table.version)
        return captured
