"""Products with matrices of experts in torch, one expert at a time. Waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from sgl_kernel.experts import Groups, Weights


def group_by_expert(chosen: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = chosen.flatten()
    return flat.argsort(stable=True), flat.bincount(minlength=num_experts).cumsum(0)


def product_of_tokens(x: torch.Tensor, weights: Weights, groups: Groups, bias: torch.Tensor | None) -> torch.Tensor:
    return _product(x[groups.places // groups.top_k], weights, groups, bias)


def product_to_places(x: torch.Tensor, weights: Weights, groups: Groups, bias: torch.Tensor | None) -> torch.Tensor:
    in_order = _product(x, weights, groups, bias)
    outputs = torch.empty_like(in_order).index_copy_(0, groups.places, in_order)
    return outputs.unflatten(0, (-1, groups.top_k))


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One expert after the other, each rounded to float32 once, so that a token's sum does not depend on others."""
    total = outputs[:, 0].float() * weights[:, :1]
    for place in range(1, outputs.shape[1]):
        total.addcmul_(outputs[:, place].float(), weights[:, place : place + 1])
    return total.to(outputs.dtype)


def each_expert(
    x: torch.Tensor, groups: Groups, compute: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """x: (num_rows, inputs), in the order of experts. compute(expert, rows): for each that has rows. Returns all
    results, one below the other."""
    ends = pairwise((0, *groups.ends.tolist()))
    return torch.cat([compute(expert, x[begin:end]) for expert, (begin, end) in enumerate(ends) if end > begin])


def _product(x: torch.Tensor, weights: Weights, groups: Groups, bias: torch.Tensor | None) -> torch.Tensor:
    """x: (num_rows, inputs), in the order of experts."""

    def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
        weight = weight_of(weights, expert, len(groups.ends), x.dtype)
        return F.linear(rows, weight, None if bias is None else bias[expert])

    return each_expert(x, groups, compute)


def weight_of(weights: Weights, expert: int, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    """(outputs, inputs), the expert's, dequantised if it is not."""
    if isinstance(weights, torch.Tensor):
        return weights[expert]
    outputs = weights.shape[0] // num_experts
    return weights.outputs(expert * outputs, outputs).dequantized(dtype)
