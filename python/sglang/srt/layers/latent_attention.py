"""`LatentAttention`: a layer's attention over cached latents.

Owns the layer's `LatentProjections`, once the weights are complete. Queries are queries of latents, the absorbed
form. In a batch with a long extend they are those of the heads' own keys, which `LatentExpansion` makes. Which form a
batch has is known before its first layer.
"""

from __future__ import annotations

import torch

from sglang.srt.configs.latent import LatentConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.kv_scale import KVScale
from sglang.srt.layers.latent_projections import LatentProjections
from sglang.srt.layers.radix_attention import AttentionBatch, RadixAttention
from sglang.srt.mem_cache.kv_view import KVPool, PagedSegments


class LatentAttention(RadixAttention):
    """See `RadixAttention`."""

    def __init__(
        self, layer_id: int, backend: AttentionBackend, kv_scale: KVScale, window: int | None, latent: LatentConfig
    ) -> None:
        super().__init__(layer_id, backend, kv_scale, window, latent.rank)
        self.latent = latent
        self.projections: LatentProjections | None = None

    @property
    def can_expand(self) -> bool:
        """Whether long extends are computed by keys and values of heads."""
        expansion, projections = self.backend.expansion, self.projections
        if expansion is None or projections is None or self.window is not None or self.sinks is not None:
            return False
        return projections.makes_keys and expansion.takes(self.latent, projections.dtype)

    def expands(self, batch: AttentionBatch) -> bool:
        """Whether a batch, of which no request streams, has queries of the heads' own keys. Not in a CUDA graph."""
        if not self.can_expand or self.backend.capturing:
            return False
        assert self.backend.expansion is not None
        return self.backend.expansion.has_long(batch.segments, batch.attn)

    def batches_of_kernels(self) -> list[tuple[tuple[int, int], ...]]:
        """See `LatentExpansion`."""
        if not self.can_expand:
            return []
        expansion, projections = self.backend.expansion, self.projections
        assert expansion is not None and projections is not None
        piece_tokens = expansion.piece_tokens(self.latent, projections.num_heads, projections.dtype)
        return expansion.batches_of_kernels(piece_tokens)

    def forward(self, q: torch.Tensor, batch: AttentionBatch, pool: KVPool) -> torch.Tensor:
        """q: (num_tokens, num_heads, rank + rotary_dim), of latents; returns (num_tokens, num_heads, rank). Or q:
        (num_tokens, num_heads, key_dim + rotary_dim), of the heads' own keys; returns (num_tokens, num_heads,
        value_dim)."""
        if q.shape[2] == self.latent.cached_dim:
            return super().forward(q, batch, pool)
        expansion, projections, segments = self.backend.expansion, self.projections, batch.segments
        assert expansion is not None and projections is not None and isinstance(segments, PagedSegments)
        view = pool.view(self.layer_id)
        out, short = expansion.forward(q, view, segments, batch.attn, self.latent, self._expanded)
        if short is not None:
            attended = super().forward(self._absorbed(q.index_select(0, short.rows)), short, pool)
            out.index_copy_(0, short.rows, projections.values(attended))
        return out

    def _absorbed(self, q: torch.Tensor) -> torch.Tensor:
        """Queries of the heads' own keys -> queries of latents."""
        assert self.projections is not None
        own, rotated = q.split((self.latent.key_dim, self.latent.rotary_dim), dim=2)
        return torch.cat((self.projections.queries(own), rotated), dim=2)

    def _expanded(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Expand`. latents: as they are stored, in the queries' dtype."""
        assert self.projections is not None
        latents, rotated = self.kv_scale.loaded(latents).split((self.latent.rank, self.latent.rotary_dim), dim=1)
        keys, values = self.projections.keys_and_values(latents)
        return keys, values, rotated[:, None]
