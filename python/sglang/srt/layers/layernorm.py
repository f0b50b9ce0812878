"""RMS normalisation. Owns its weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32
    and rounded to x's dtype before the weight is multiplied on, as transformers does.

    weight: `shape`, broadcast against x; its last dimension is the one that is normalised.
    """

    def __init__(self, shape: int | tuple[int, ...], eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., *shape). Returns the same shape and dtype."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), eps=self.eps).mul_(self.weight)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(self.eps))
        return wide.to(x.dtype).mul_(self.weight)
