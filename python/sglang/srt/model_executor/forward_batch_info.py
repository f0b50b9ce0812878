"""`ForwardBatch`: one launch, as the model sees it. The executor builds it from a `Launch`."""

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
class StreamedRows:
    """A request whose tokens [start, end) come through the layer stream cache."""

    # The request's rows of the batch.
    rows: slice
    start: int
    end: int
    # The tokens on the device; the ones before `start` come first.
    segments: list[KVSegment]


@dataclass(frozen=True)
class BatchNumbers:
    """The numbers of a launch on the host, int64."""

    # Per token; -1 stands for the token that the slot's last launch has sampled.
    input_ids: np.ndarray
    # Per token.
    positions: np.ndarray
    # (1 or 2, num_tokens): where a token's KV goes; the second row is of layers with a window, if they have a pool of
    # their own.
    out_loc: np.ndarray
    # Per request.
    slots: np.ndarray
    # Per request: where its pages begin in the page table.
    starts: np.ndarray
    # Per request: its tokens after the launch.
    kv_lens: np.ndarray
    # Per request: the tokens that the launch computes.
    q_lens: np.ndarray


@dataclass
class ForwardBatch:
    """The tensors of a launch. The rows of all requests stand one after the other."""

    seq: int
    mode: ForwardMode
    # (num_tokens,) int64 each.
    input_ids: torch.Tensor
    positions: torch.Tensor
    # (2, num_tokens) int64: the slot `page * page_size + offset` that takes the token's KV, in layers with full
    # attention and in layers with a window. The rows are one memory where the device has one pool.
    out_loc: torch.Tensor
    # Per request, see `KVSegment`; empty for streamed requests.
    segments: Sequence[list[KVSegment]]
    # The same for layers with a window; the same object where the device has one pool.
    windowed_segments: Sequence[list[KVSegment]]
    attn: AttentionMetadata
    # (num_samples,) int64, the rows whose logits are needed: first the sampled rows, then the rows of prompt
    # log-probabilities.
    sample_rows: torch.Tensor
    # (num_sampled,) int64, the slots that sample; `sampling` has their parameters.
    sample_slots: torch.Tensor
    sampling: SamplingBatchInfo
    gates: list[Any] = field(default_factory=list)
    # Requests that are not on the device as a whole.
    streamed: list[StreamedRows] = field(default_factory=list)
    # Whether `hidden` is wanted: (num_samples, hidden_size), the state of each of sample_rows behind the last norm.
    # The model sets it.
    wants_hidden: bool = False
    hidden: torch.Tensor | None = None


class CausalLM(Protocol):
    """A model that the executor can run layer by layer, so that the KV of later layers may still be on its way.
    `state` holds what the model passes from layer to layer. windows: of each layer, the tokens that a query sees,
    itself included; None for all."""

    num_layers: int
    windows: Sequence[int | None]

    def embed(self, batch: ForwardBatch) -> Any: ...

    def forward_layer(self, layer_id: int, state: Any, batch: ForwardBatch, pool: KVPool) -> Any:
        """One layer of a batch without streamed requests. With them, the layer runs in parts: `begin_layer`, up to
        the attention over the tokens on the device; `attend` for every piece of every streamed request;
        `end_layer`."""
        ...

    def begin_layer(self, layer_id: int, state: Any, batch: ForwardBatch, pool: KVPool) -> Any: ...

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
        """The rows of batch.streamed[place] attend to the next piece of its streamed tokens. Pieces that none of them
        sees are left out. position: of the segment's first token in the request."""
        ...

    def end_layer(self, layer_id: int, state: Any, batch: ForwardBatch) -> Any: ...

    def logits(self, state: Any, batch: ForwardBatch) -> torch.Tensor:
        """(num_samples, vocab_size) float32, for batch.sample_rows."""
        ...
