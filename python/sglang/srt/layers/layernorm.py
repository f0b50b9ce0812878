"""RMS normalisation. Each module owns its weight; on a GPU the kernels are fused, see `sgl_kernel.elementwise`."""

from __future__ import annotations

import torch
from torch import nn

from sgl_kernel import elementwise


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32 and rounded to x's dtype before
    the weight is multiplied on, as transformers does. weight: (size,)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, size). Returns a new tensor of the same shape and dtype."""
        return elementwise.rmsnorm(x, self.weight, self.eps)

    def after_add(self, x: torch.Tensor, update: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Both (num_tokens, size), overwritten. Returns the norm of x + update, and x + update; None adds nothing."""
        if update is None:
            return self(x), x
        return elementwise.fused_add_rmsnorm(update, x, self.weight, self.eps)


class QKNorm(nn.Module):
    """RMS normalisation of each head of queries and keys by itself. weight: (num_heads + num_kv_heads, head_dim), the
    queries' for each of their heads, then the keys'. With one weight, one operation serves both on the CPU."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.eps = num_heads, num_kv_heads, eps
        shape = (num_heads + num_kv_heads, head_dim)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """qk: (num_tokens, num_heads + num_kv_heads, head_dim). Returns a new tensor of the same shape and dtype."""
        return elementwise.qk_rmsnorm(qk, self.weight, self.num_heads, self.eps)

    def split_weight(self) -> tuple[torch.Tensor, torch.Tensor]:
        q_weight, k_weight = self.weight.split((self.num_heads, self.num_kv_heads))
        return q_weight, k_weight
