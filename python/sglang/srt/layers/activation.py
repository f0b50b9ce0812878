"""Activations of gated feed-forward layers. Stateless."""

from __future__ import annotations

import torch
from torch import nn

from sgl_kernel import elementwise


class SiluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, 2 * d), gate and up side by side. Returns silu(gate) * up, (num_tokens, d)."""
        return elementwise.silu_and_mul(x)
