"""`RadixAttention`: a layer's attention over the KV cache. Owns nothing; knows layer, backend and scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionMetadata, longest_request
from sglang.srt.layers.attention.masked_attention import masked_attention
from sglang.srt.layers.attention.merge_state import merge_state
from sglang.srt.layers.kv_scale import KVScale
from sglang.srt.mem_cache.kv_view import KVPool, KVSegment, KVView

# out (q_len, num_q_heads, head_dim) and lse (q_len, num_q_heads), float32; see `AttentionBackend.partial`.
PartialState = tuple[torch.Tensor, torch.Tensor]


class AttentionBatch(Protocol):
    """The part of a `ForwardBatch` that attention uses."""

    @property
    def segments(self) -> Sequence[list[KVSegment]]: ...

    @property
    def attn(self) -> AttentionMetadata: ...


class StreamedRows(Protocol):
    """The part of a `StreamedRequest` that attention uses."""

    @property
    def rows(self) -> slice: ...

    @property
    def segments(self) -> list[KVSegment]: ...


class RadixAttention(nn.Module):
    """window: tokens that a query sees, itself included; None for all."""

    def __init__(
        self, layer_id: int, backend: AttentionBackend, kv_scale: KVScale, window: int | None = None
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.backend = backend
        self.kv_scale = kv_scale
        self.window = window

    def store(self, k: torch.Tensor, v: torch.Tensor, loc: torch.Tensor, pool: KVPool) -> None:
        """k, v: (num_tokens, num_kv_heads, head_dim), into slots loc."""
        pool.store(self.layer_id, loc, *self.kv_scale.stored(k, v))

    def forward(self, q: torch.Tensor, batch: AttentionBatch, pool: KVPool) -> torch.Tensor:
        """q: (num_tokens, num_q_heads, head_dim), of the batch's own tokens, whose K and V are in the pool. Returns
        q's shape; rows of streamed requests are zero."""
        q, attn = self.kv_scale.scored(q, batch.attn)
        window, attend = self.window, self.backend.forward
        if not self.backend.computes_masked:
            if window is not None and longest_request(batch.segments) <= window:
                window = None
            if window is not None or not attn.is_ordinary:
                attend = masked_attention
        if window is not None:
            attn = replace(attn, window=window)
        return self.kv_scale.loaded(attend(q, pool.view(self.layer_id), batch.segments, attn))

    def partial(
        self,
        q: torch.Tensor,
        view: KVView,
        segments: list[KVSegment],
        attn: AttentionMetadata,
        state: PartialState | None = None,
    ) -> PartialState:
        """Attention of one request's queries q (q_len, num_q_heads, head_dim) to segments of a view, merged with what
        they have attended to before. It has neither windows nor capped scores nor sinks."""
        assert self.window is None and attn.is_ordinary, "a partial attention without its mask"
        q, attn = self.kv_scale.scored(q, attn)
        for segment in segments:
            out, lse = self.backend.partial(q, view, segment, attn.scale)
            found = self.kv_scale.loaded(out), lse
            state = found if state is None else merge_state(*state, *found)
        assert state is not None
        return state


class StreamedAttention:
    """A layer's attention of the requests that stream, which begins with their tokens on the device and goes on with
    each piece of their prefixes. q: (num_tokens, num_q_heads, head_dim), of the whole batch."""

    def __init__(
        self,
        attention: RadixAttention,
        q: torch.Tensor,
        attn: AttentionMetadata,
        requests: Sequence[StreamedRows],
        pool: KVPool,
    ) -> None:
        self._attention, self._attn, self._rows = attention, attn, [req.rows for req in requests]
        self._queries = [q[rows] for rows in self._rows]
        view = pool.view(attention.layer_id)
        self._partials = [
            attention.partial(queries, view, req.segments, attn) for queries, req in zip(self._queries, requests)
        ]

    def attend(self, place: int, view: KVView, segment: KVSegment) -> None:
        """The next piece of the request at this place among those that stream."""
        queries, before = self._queries[place], self._partials[place]
        self._partials[place] = self._attention.partial(queries, view, [segment], self._attn, before)

    def write_to(self, attended: torch.Tensor) -> None:
        """attended: (num_tokens, ...), of the whole batch, with a row's heads in order."""
        for rows, (out, _) in zip(self._rows, self._partials):
            attended[rows] = out.reshape(attended[rows].shape).to(attended.dtype)
