"""`LatentProjections`: what makes a head's queries queries of latents, and a sum of latents a sum of values.

Owns the two matrices of each head. With queries of latents attention reads these as they are cached, as if all heads
shared one key whose first values are the value: DeepSeek-V2 (2024), section 2.1.2. A head's keys and values are made
for long extends alone, see `LatentExpansion`.
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
        self.num_heads, self.dtype = len(weight), weight.dtype
        to_keys, to_values = weight.split((config.key_dim, config.value_dim), dim=1)
        self._to_latents, self._to_values = _PerHead(to_keys.transpose(1, 2)), _PerHead(to_values)
        # All of it, which takes no more memory where the heads' parts are parts of it.
        self._weight = None if takes(weight) else weight.flatten(0, 1)

    @property
    def makes_keys(self) -> bool:
        """Whether there is `keys_and_values`."""
        return self._weight is not None

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """q: (num_tokens, num_heads, key_dim). Returns (num_tokens, num_heads, rank): the product with a latent is
        that of q with the key that the head makes of it."""
        return self._to_latents.product(q)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """attended: (num_tokens, num_heads, rank), sums of latents. Returns (num_tokens, num_heads, value_dim)."""
        return self._to_values.product(attended)

    def keys_and_values(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """latents: (num_tokens, rank). Returns (num_tokens, num_heads, key_dim) and (num_tokens, num_heads,
        value_dim), beside each other in memory."""
        assert self._weight is not None, "the heads' parts are packed"
        both = torch.nn.functional.linear(latents, self._weight).unflatten(1, (self.num_heads, -1))
        keys, values = both.split((self.config.key_dim, self.config.value_dim), dim=2)
        return keys, values


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
