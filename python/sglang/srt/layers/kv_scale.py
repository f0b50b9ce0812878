"""`KVScale`: what a layer's K and V are divided by in the KV cache. Owns nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang.srt.configs.kv_cache_dtype import KVScales
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata


@dataclass(frozen=True)
class KVScale:
    """A data type of 8 bits has few values near 0 and none above its largest. k_scale and v_scale move a layer's
    values to where it has enough. 1 changes nothing and costs nothing."""

    k_scale: float = 1.0
    v_scale: float = 1.0

    def stored(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as a pool takes them."""
        return _divided(k, self.k_scale), _divided(v, self.v_scale)

    def of_scores(self, attn: AttentionMetadata) -> AttentionMetadata:
        """With k_scale on the scores of queries and stored keys."""
        return attn if self.k_scale == 1.0 else replace(attn, scale=attn.scale * self.k_scale)

    def loaded(self, out: torch.Tensor) -> torch.Tensor:
        """A weighted sum of stored values."""
        return out if self.v_scale == 1.0 else out * self.v_scale


def kv_scale_of(kv_scales: KVScales, rank: int, layer_id: int) -> KVScale:
    return KVScale(*kv_scales[rank][layer_id]) if kv_scales else KVScale()


def _divided(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1.0 else x / scale
