"""`RadixAttention`: a layer's attention over the KV cache. Owns nothing; knows layer, backend, scale and window.

`StreamedAttention` is its part for requests whose prefixes come piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from sglang.srt.layers.attention.base_attn_backend import (
    AttentionBackend,
    AttentionMetadata,
    PartialMask,
    longest_request,
)
from sglang.srt.layers.attention.masked_attention import masked_attention, masked_partial, seen_parts
from sglang.srt.layers.attention.merge_state import merge_state, share_beside
from sglang.srt.layers.kv_scale import KVScale
from sglang.srt.mem_cache.kv_view import KVPool, KVSegment, KVView

# out (q_len, num_q_heads, head_dim) and lse (q_len, num_q_heads), float32; see `AttentionBackend.partial`.
PartialState = tuple[torch.Tensor, torch.Tensor]
# The rows of `ForwardBatch.out_loc`: of layers with full attention, and of layers with a window.
Slots = tuple[torch.Tensor, ...]


class AttentionBatch(Protocol):
    """The part of a `ForwardBatch` that attention uses."""

    @property
    def segments(self) -> Sequence[list[KVSegment]]: ...

    @property
    def windowed_segments(self) -> Sequence[list[KVSegment]]: ...

    @property
    def attn(self) -> AttentionMetadata: ...


class StreamedRows(Protocol):
    """The part of a `StreamedRows` that attention uses."""

    @property
    def rows(self) -> slice: ...

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def segments(self) -> list[KVSegment]: ...


class RadixAttention(nn.Module):
    """window: tokens that a query sees, itself included; None for all. latent_rank: of latents, which are cached in
    place of keys and values; None where these are. sinks, softcap: see `AttentionMetadata`, of this layer."""

    def __init__(
        self,
        layer_id: int,
        backend: AttentionBackend,
        kv_scale: KVScale,
        window: int | None = None,
        latent_rank: int | None = None,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.backend = backend
        self.kv_scale = kv_scale
        self.window = window
        self.latent_rank = latent_rank
        self.sinks: torch.Tensor | None = None
        self.softcap: float | None = None

    def store(self, k: torch.Tensor, v: torch.Tensor, out_loc: Slots, pool: KVPool) -> None:
        """k, v: (num_tokens, num_kv_heads, head_dim), into the layer's slots of out_loc."""
        pool.store(self.layer_id, self.slots_of(out_loc), *self.kv_scale.stored(k, v))

    def store_latents(self, latents: torch.Tensor, out_loc: Slots, pool: KVPool) -> None:
        """latents: (num_tokens, 1, latent_rank + rotary_dim)."""
        pool.store(self.layer_id, self.slots_of(out_loc), self.kv_scale.stored_keys(latents))

    def keys_and_values(self, view: KVView) -> KVView:
        """view: of a pool's layer."""
        return view if self.latent_rank is None else view.with_values_in_keys(self.latent_rank)

    def with_own(self, attn: AttentionMetadata) -> AttentionMetadata:
        """With this layer's sinks and cap. A model that transformers computes brings those of attn."""
        if self.sinks is None and self.softcap is None:
            return attn
        return replace(attn, sinks=self.sinks, softcap=self.softcap)

    def slots_of(self, out_loc: Slots) -> torch.Tensor:
        """(num_tokens,) int64, where this layer's keys and values go."""
        return out_loc[0 if self.window is None else 1]

    def forward(self, q: torch.Tensor, batch: AttentionBatch, pool: KVPool) -> torch.Tensor:
        """q: (num_tokens, num_q_heads, head_dim), of the batch's own tokens, whose K and V are in the pool. Returns
        (num_tokens, num_q_heads, value_dim); rows of streamed requests are zero."""
        q, attn = self.kv_scale.scored(q, self.with_own(batch.attn))
        window, attend = self.window, self.backend.forward
        segments = batch.segments if window is None else batch.windowed_segments
        if not self.backend.computes_masked:
            if window is not None and longest_request(segments) <= window:
                window = None
            if window is not None or not attn.is_ordinary:
                attend = masked_attention
        if window is not None:
            attn = replace(attn, window=window)
        view = self.keys_and_values(pool.view(self.layer_id))
        return self.kv_scale.loaded(attend(q, view, segments, attn))


@dataclass
class _Streamed:
    """One request in a layer."""

    rows: slice
    # (q_len, num_q_heads, head_dim).
    queries: torch.Tensor
    # Its position in the request.
    first_query: int
    found: PartialState | None = None


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
        self._attention = attention
        q, attn = attention.kv_scale.scored(q, attention.with_own(attn))
        self._attn = replace(attn, window=attention.window)
        self._requests = []
        view = pool.view(attention.layer_id)
        for given in requests:
            queries = q[given.rows]
            num_tokens = sum(segment.length for segment in given.segments) + given.end - given.start
            req = _Streamed(given.rows, queries, num_tokens - len(queries))
            self._requests.append(req)
            position = 0
            for segment in given.segments:
                # What streams lies between those on the device.
                position = given.end if position == given.start else position
                self._attend(req, view, segment, position)
                position += segment.length

    def attend(self, place: int, view: KVView, segment: KVSegment, position: int) -> None:
        """A piece of the request at this place among those that stream. position: of its first token in the
        request."""
        self._attend(self._requests[place], view, segment, position)

    def write_to(self, attended: torch.Tensor) -> None:
        """attended: (num_tokens, ...), of the whole batch, with a row's heads in order."""
        for req in self._requests:
            assert req.found is not None, "a query sees itself"
            out, lse = req.found
            if self._attn.sinks is not None:
                out = out * share_beside(lse, self._attn.sinks)
            attended[req.rows] = out.reshape(attended[req.rows].shape).to(attended.dtype)

    def _attend(self, req: _Streamed, view: KVView, segment: KVSegment, position: int) -> None:
        backend, kv_scale, attn = self._attention.backend, self._attention.kv_scale, self._attn
        view = self._attention.keys_and_values(view)
        distance = req.first_query - position
        for part, offset, is_cut in seen_parts(segment, len(req.queries), distance, attn.window, view.page_size):
            mask = None
            if is_cut or attn.softcap is not None:
                mask = PartialMask(attn.window if is_cut else None, attn.softcap, distance - offset)
            if mask is None or backend.computes_masked:
                out, lse = backend.partial(req.queries, view, part, attn.scale, mask)
            else:
                out, lse = masked_partial(req.queries, view, part, attn.scale, mask)
            found = kv_scale.loaded(out), lse
            req.found = found if req.found is None else merge_state(*req.found, *found)
