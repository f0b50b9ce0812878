"""`RadixAttention`: a layer's attention over the KV cache. Owns nothing; knows layer, backend and scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionMetadata
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


class RadixAttention(nn.Module):
    def __init__(self, layer_id: int, backend: AttentionBackend, kv_scale: KVScale) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.backend = backend
        self.kv_scale = kv_scale

    def store(self, k: torch.Tensor, v: torch.Tensor, loc: torch.Tensor, pool: KVPool) -> None:
        """k, v: (num_tokens, num_kv_heads, head_dim), into slots loc."""
        pool.store(self.layer_id, loc, *self.kv_scale.stored(k, v))

    def forward(self, q: torch.Tensor, batch: AttentionBatch, pool: KVPool) -> torch.Tensor:
        """q: (num_tokens, num_q_heads, head_dim), of the batch's own tokens, whose K and V are in the pool. Returns
        q's shape; rows of streamed requests are zero."""
        q, attn = self.kv_scale.scored(q, batch.attn)
        return self.kv_scale.loaded(self.backend.forward(q, pool.view(self.layer_id), batch.segments, attn))

    def partial(
        self,
        q: torch.Tensor,
        view: KVView,
        segments: list[KVSegment],
        attn: AttentionMetadata,
        state: PartialState | None = None,
    ) -> PartialState:
        """Attention of one request's queries q (q_len, num_q_heads, head_dim) to segments of a view, merged with what
        they have attended to before."""
        q, attn = self.kv_scale.scored(q, attn)
        for segment in segments:
            out, lse = self.backend.partial(q, view, segment, attn.scale)
            found = self.kv_scale.loaded(out), lse
            state = found if state is None else merge_state(*state, *found)
        assert state is not None
        return state
