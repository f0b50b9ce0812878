"""`KVScale`: what a layer's K and V are divided by in the KV cache. Owns nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata


@dataclass(frozen=True)
class KVScale:
    """A data type of 8 bits has few values near 0 and none above its largest. factor moves a layer's values to where
    it has enough. 1 changes nothing and costs nothing."""

    factor: float = 1.0

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """K or V as a pool takes them."""
        return x if self.factor == 1.0 else x / self.factor

    def of_scores(self, attn: AttentionMetadata) -> AttentionMetadata:
        """With the factor on the scores of queries and stored keys."""
        return attn if self.factor == 1.0 else replace(attn, scale=attn.scale * self.factor)

    def loaded(self, out: torch.Tensor) -> torch.Tensor:
        """A weighted sum of stored values."""
        return out if self.factor == 1.0 else out * self.factor


def kv_scale_of(kv_scales: tuple[tuple[float, ...], ...], rank: int, layer_id: int) -> KVScale:
    """kv_scales: as in `ModelConfig`."""
    return KVScale(kv_scales[rank][layer_id]) if kv_scales else KVScale()
