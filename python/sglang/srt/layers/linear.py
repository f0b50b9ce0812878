"""`MergedLinear`: several projections of the same input as one matrix. Owns its weight and bias."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class MergedLinear(nn.Module):
    """out_features: rows of each projection, one below the other in `weight` (sum(out_features), in_features)."""

    def __init__(self, in_features: int, out_features: Sequence[int], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features = tuple(out_features)
        total = sum(out_features)
        self.weight = nn.Parameter(torch.empty(total, in_features, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(total, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_tokens, in_features). Returns (num_tokens, sum(out_features))."""
        return F.linear(x, self.weight, self.bias)

    def shards(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Where the checkpoint's separate projections go: "<name>.weight" and "<name>.bias" -> views."""
        assert len(names) == len(self.out_features)
        targets = {}
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                parts = fused.split(self.out_features)
                targets.update({f"{name}.{kind}": part for name, part in zip(names, parts)})
        return targets
