"""`LatentProjections`: what makes a head's queries queries of latents, and a sum of latents a sum of values.

Owns the two matrices of each head. Attention then reads latents as they are cached, as if all heads shared one key
whose first values are the value. No key or value of a head is ever made: DeepSeek-V2 (2024), section 2.1.2.
"""

from __future__ import annotations

import torch
from torch import nn

from sgl_kernel.cpu.library import takes
from sgl_kernel.cpu.packed_weight import PackedHeads
from sglang.srt.configs.latent import LatentConfig


class LatentProjections(nn.Module):
    """weight: (num_heads, key_dim + value_dim, rank), which makes keys and values of a latent; this rank's heads. It
    is copied where a kernel reads another layout."""

    def __init__(self, config: LatentConfig, weight: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        to_keys, to_values = weight.split((config.key_dim, config.value_dim), dim=1)
        self._to_latents, self._to_values = _PerHead(to_keys.transpose(1, 2)), _PerHead(to_values)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """q: (num_tokens, num_heads, key_dim). Returns (num_tokens, num_heads, rank): the product with a latent is
        that of q with the key that the head makes of it."""
        return self._to_latents.product(q)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """attended: (num_tokens, num_heads, rank), sums of latents. Returns (num_tokens, num_heads, value_dim)."""
        return self._to_values.product(attended)


class _PerHead:
    """weight: (num_heads, out_features, in_features)."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = PackedHeads(weight) if takes(weight) else None
        self._weight = weight.transpose(1, 2) if self._packed is None else None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, num_heads, in_features). Returns (num_tokens, num_heads, out_features)."""
        if self._packed is not None:
            return self._packed.product(x)
        assert self._weight is not None
        return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)
