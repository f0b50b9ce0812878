"""RMS normalisation. Each module owns its weight; on a GPU the kernels are fused, see `sgl_kernel.elementwise`."""

from __future__ import annotations

import torch
from torch import nn

from sgl_kernel import elementwise


class Norm(nn.Module):
    """The weight of a norm. from_one: checkpoints have what is to be added to 1 (Gemma); then the weight is float32,
    and the result is rounded after it is multiplied on, otherwise before, as transformers does."""

    def __init__(self, shape: tuple[int, ...], eps: float, dtype: torch.dtype, from_one: bool) -> None:
        super().__init__()
        self.eps, self.from_one = eps, from_one
        kept = torch.float32 if from_one else dtype
        self.weight = nn.Parameter(torch.empty(shape, dtype=kept), requires_grad=False)

    def finish_loading(self) -> None:
        """Called once, when the weight is complete."""
        if self.from_one:
            self.weight.add_(1)


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32. weight: (size,). from_one: see
    `Norm`."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, from_one: bool = False) -> None:
        super().__init__((size,), eps, dtype, from_one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, size). Returns a new tensor of the same shape and dtype."""
        return elementwise.rmsnorm(x, self.weight, self.eps)

    def after_add(self, x: torch.Tensor, update: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Both (num_tokens, size), overwritten. Returns the norm of x + update, and x + update; None adds nothing."""
        if update is None:
            return self(x), x
        return elementwise.fused_add_rmsnorm(update, x, self.weight, self.eps)


class QKNorm(Norm):
    """RMS normalisation of each head of queries and keys by itself. weight: (num_heads + num_kv_heads, head_dim), the
    queries' for each of their heads, then the keys'. With one weight, one operation serves both on the CPU. from_one:
    see `Norm`."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        dtype: torch.dtype,
        from_one: bool = False,
    ) -> None:
        super().__init__((num_heads + num_kv_heads, head_dim), eps, dtype, from_one)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """qk: (num_tokens, num_heads + num_kv_heads, head_dim). Returns a new tensor of the same shape and dtype."""
        return elementwise.qk_rmsnorm(qk, self.weight, self.num_heads, self.eps)

    def split_weight(self) -> tuple[torch.Tensor, torch.Tensor]:
        q_weight, k_weight = self.weight.split((self.num_heads, self.num_kv_heads))
        return q_weight, k_weight
