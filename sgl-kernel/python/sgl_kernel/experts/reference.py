"""Choosing experts, and products with their matrices, in torch. Products wait for the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from sgl_kernel.experts import Choice, Groups, Weights


# Of a group, the scores that are added up for its own where there is a correction.
_OF_A_GROUP = 2


def choose(
    logits: torch.Tensor, choice: Choice, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if choice.scores == "softmax_of_chosen":
        best, chosen = logits.topk(choice.top_k)
        return best.softmax(-1, torch.float32), chosen
    scores = logits.softmax(-1, torch.float32) if choice.scores == "softmax" else logits.float().sigmoid()
    ranks = scores if correction is None else scores + correction
    if choice.kept_groups < choice.num_groups:
        of_groups = ranks.unflatten(1, (choice.num_groups, -1))
        if correction is None:
            best = of_groups.amax(-1)
        else:
            best = of_groups.topk(min(_OF_A_GROUP, of_groups.shape[2])).values.sum(-1)
        is_left_out = torch.ones_like(best, dtype=torch.bool)
        is_left_out.scatter_(1, best.topk(choice.kept_groups).indices, False)
        ranks = of_groups.masked_fill(is_left_out[..., None], -math.inf).flatten(1)
    weights, chosen = ranks.topk(choice.top_k)
    if ranks is not scores:
        weights = scores.gather(1, chosen)
    if choice.is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights if choice.scale == 1.0 else weights * choice.scale), chosen


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
