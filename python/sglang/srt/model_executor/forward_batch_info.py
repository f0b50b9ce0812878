"""`ForwardBatch`: one launch, as the model sees it. Built by the executor from a `BatchDecision`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.mem_cache.kv_view import KVPool, KVSegment, KVView
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class ForwardMode(IntEnum):
    EXTEND = 0
    DECODE = 1


@dataclass(frozen=True)
class StreamedRequest:
    """A request whose tokens [start, end) come through the layer stream cache. rows: its rows of the batch. segments:
    what the device has, those before `start` first."""

    rows: slice
    start: int
    end: int
    segments: list[KVSegment]


@dataclass(frozen=True)
class BatchNumbers:
    """What a launch is made of, on the host, int64. Per token: input_ids (-1 for what the slot's last launch has
    sampled), positions and out_loc. Per request: slots, starts (where its pages begin in the page table), kv_lens
    (tokens that it has after the launch) and q_lens (tokens that are computed)."""

    input_ids: np.ndarray
    positions: np.ndarray
    out_loc: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    kv_lens: np.ndarray
    q_lens: np.ndarray


@dataclass
class ForwardBatch:
    """The rows of all requests stand one after the other.

    input_ids, positions, out_loc: (num_tokens,) int64; out_loc is the slot `page * page_size + offset` that takes
    the token's KV. segments: per request, see `KVSegment`. sample_rows: (num_samples,) int64, the rows whose logits
    are wanted: first those that are sampled, one entry each in `sample_slots` (which slots draw, int64) and in
    `sampling`, then those of prompt log-probabilities. streamed: requests that the device does not have as a whole;
    their lists in `segments` are empty.
    """

    seq: int
    mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_loc: torch.Tensor
    segments: Sequence[list[KVSegment]]
    attn: AttentionMetadata
    sample_rows: torch.Tensor
    sample_slots: torch.Tensor
    sampling: SamplingBatchInfo
    gates: list[Any] = field(default_factory=list)
    streamed: list[StreamedRequest] = field(default_factory=list)


class CausalLM(Protocol):
    """A model that the executor can run layer by layer, so that a layer's KV may still be on its way when the
    layers before it run. `state` is whatever the model carries between layers."""

    num_layers: int

    def embed(self, batch: ForwardBatch) -> Any: ...

    def forward_layer(self, layer_id: int, state: Any, batch: ForwardBatch, pool: KVPool) -> Any:
        """A layer of a batch without streamed requests. With them it goes in parts: `begin_layer`, up to the
        attention over what the device has; `attend` for every piece of every streamed request; `end_layer`."""
        ...

    def begin_layer(self, layer_id: int, state: Any, batch: ForwardBatch, pool: KVPool) -> Any: ...

    def attend(
        self, layer_id: int, state: Any, batch: ForwardBatch, place: int, view: KVView, segment: KVSegment
    ) -> Any:
        """The rows of batch.streamed[place] attend to another piece of its streamed tokens; these come in order."""
        ...

    def end_layer(self, layer_id: int, state: Any, batch: ForwardBatch) -> Any: ...

    def logits(self, state: Any, batch: ForwardBatch) -> torch.Tensor:
        """(num_samples, vocab_size) float32, for batch.sample_rows."""
        ...
