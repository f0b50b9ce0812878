"""`KVScale`: what a layer's K and V are divided by in the KV cache. Owns nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang.srt.configs.kv_cache_dtype import HeadScales, KVScales
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata


@dataclass(frozen=True, eq=False)
class KVScale:
    """A data type of 8 bits has few values near 0 and none above its largest. Scales move a layer's values to where
    it has enough. Those of K come back as factors on scores, those of V as factors on sums of values. Scales of 1
    change nothing and cost nothing.

    of_heads: (2, num_kv_heads) float32, of K and of V; None where all are 1. scores: factor on all heads' scores.
    queries: (num_kv_heads,) float32 of at most 1, another factor on a head's; None where heads do not differ. sums:
    factor on the sums of all heads, or (num_kv_heads,) float32.
    """

    of_heads: torch.Tensor | None = None
    scores: float = 1.0
    queries: torch.Tensor | None = None
    sums: float | torch.Tensor = 1.0

    def stored(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as a pool takes them: (num_tokens, num_kv_heads, head_dim) each."""
        if self.of_heads is None:
            return k, v
        k_scales, v_scales = self.of_heads[..., None]
        # In float32, and rounded once.
        return torch.div(k, k_scales, out=torch.empty_like(k)), torch.div(v, v_scales, out=torch.empty_like(v))

    def stored_keys(self, k: torch.Tensor) -> torch.Tensor:
        """K alone, which V is a part of."""
        return k if self.of_heads is None else torch.div(k, self.of_heads[0, :, None], out=torch.empty_like(k))

    def scored(self, q: torch.Tensor, attn: AttentionMetadata) -> tuple[torch.Tensor, AttentionMetadata]:
        """What attends to stored keys. q: (num_tokens, num_q_heads, head_dim), which is not overwritten."""
        if self.queries is not None:
            grouped = q.unflatten(1, (len(self.queries), -1))
            out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
            q = torch.mul(grouped, self.queries[:, None, None], out=out).flatten(1, 2)
        return q, attn if self.scores == 1.0 else replace(attn, scale=attn.scale * self.scores)

    def loaded(self, out: torch.Tensor) -> torch.Tensor:
        """A weighted sum of stored values, (num_tokens, num_q_heads, head_dim), which may be overwritten."""
        if isinstance(self.sums, torch.Tensor):
            return out.unflatten(1, (len(self.sums), -1)).mul_(self.sums[:, None, None]).flatten(1, 2)
        return out if self.sums == 1.0 else out * self.sums


def kv_scale_of(
    kv_scales: KVScales, rank: int, layer_id: int, num_kv_heads: int, has_latents: bool = False
) -> KVScale:
    """num_kv_heads: of the rank. has_latents: V is a part of K, and has its scales. On torch's default device."""
    if not kv_scales:
        return KVScale()
    k_scales, v_scales = (_of_each(scales, num_kv_heads) for scales in kv_scales[rank][layer_id])
    v_scales = k_scales if has_latents else v_scales
    most = max(k_scales)
    return KVScale(
        of_heads=torch.tensor([k_scales, v_scales]) if any(scale != 1.0 for scale in k_scales + v_scales) else None,
        scores=most,
        queries=None if min(k_scales) == most else torch.tensor([scale / most for scale in k_scales]),
        sums=v_scales[0] if min(v_scales) == max(v_scales) else torch.tensor(v_scales),
    )


def _of_each(scales: HeadScales, num_kv_heads: int) -> list[float]:
    return [scales] * num_kv_heads if isinstance(scales, float) else list(scales)
