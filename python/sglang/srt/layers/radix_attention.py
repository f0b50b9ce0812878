"""`RadixAttention`: a layer's attention over the KV cache. Owns nothing; knows its layer and the backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionMetadata
from sglang.srt.layers.attention.merge_state import merge_state
from sglang.srt.mem_cache.kv_view import KVPool, KVSegment, KVView

# out (q_len, num_q_heads, head_dim) and lse (q_len, num_q_heads), float32; see `AttentionBackend.partial`.
PartialState = tuple[torch.Tensor, torch.Tensor]


class AttentionBatch(Protocol):
    """The part of a `ForwardBatch` that attention uses."""

    @property
    def out_loc(self) -> torch.Tensor: ...

    @property
    def segments(self) -> Sequence[list[KVSegment]]: ...

    @property
    def attn(self) -> AttentionMetadata: ...


class RadixAttention(nn.Module):
    def __init__(self, layer_id: int, backend: AttentionBackend) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.backend = backend

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch, pool: KVPool
    ) -> torch.Tensor:
        """q: (num_tokens, num_q_heads, head_dim), k, v: (num_tokens, num_kv_heads, head_dim), the batch's own
        tokens; k and v are written to the pool first. Returns q's shape; rows of streamed requests are zero."""
        pool.store(self.layer_id, batch.out_loc, k, v)
        return self.backend.forward(q, pool.view(self.layer_id), batch.segments, batch.attn)

    def partial(
        self,
        q: torch.Tensor,
        view: KVView,
        segments: list[KVSegment],
        scale: float,
        state: PartialState | None = None,
    ) -> PartialState:
        """Attention of one request's queries q (q_len, num_q_heads, head_dim) to segments of a view, merged with what
        they have attended to before."""
        for segment in segments:
            found = self.backend.partial(q, view, segment, scale)
            state = found if state is None else merge_state(*state, *found)
        assert state is not None
        return state
