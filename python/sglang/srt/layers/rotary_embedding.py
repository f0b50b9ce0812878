"""Rotary position embeddings. Owns one table of cosines and sines, shared by all layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


def rope_frequencies(head_dim: int, rope_parameters: dict[str, Any]) -> torch.Tensor:
    """(head_dim / 2,) float32: radians per position. rope_parameters: see `ModelConfig`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope_parameters["rope_theta"] ** exponents)
    rope_type = rope_parameters["rope_type"]
    if rope_type == "default":
        return frequencies
    factor = rope_parameters["factor"]
    if rope_type == "linear":
        return frequencies / factor
    if rope_type == "llama3":
        # Llama 3.1: wavelengths that fit often into the original context stay, long ones are stretched by
        # `factor`, those between are blended.
        low, high = rope_parameters["low_freq_factor"], rope_parameters["high_freq_factor"]
        turns = rope_parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * frequencies / factor + blend * frequencies
    raise ValueError(f"rope type {rope_type!r}")


class RotaryEmbedding(nn.Module):
    """max_position: positions 0 to max_position - 1 can be looked up.

    A table, not a computation per batch: torch's vectorised cos differs in the last bit between the vector body and
    the tail of a tensor, and a position must give the same bits wherever it stands in a batch.
    """

    table: torch.Tensor

    def __init__(self, head_dim: int, max_position: int, rope_parameters: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        frequencies = rope_frequencies(head_dim, rope_parameters)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        # (max_position, head_dim): cosines, then sines.
        self.register_buffer("table", torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype), persistent=False)

    def lookup(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: (num_tokens,) int64. Returns cos and sin for `apply_rotary`, (num_tokens, 1, head_dim)."""
        cos, sin = self.table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: (num_tokens, num_heads, head_dim); the first half of a head turns with its second half. cos, sin: from
    `RotaryEmbedding.lookup`; the sign of the rotation is in sin, so that a roll stands for rotate-half."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)
