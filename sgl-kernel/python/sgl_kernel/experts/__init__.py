"""Which experts compute a token, and products of rows with matrices of experts, each with that of its own expert.

`Groups` is the order in which rows of one expert lie side by side. On a GPU, Triton kernels choose, find this order
and multiply, and never wait for the device; elsewhere torch does. `reference` defines the result. Weights are a
tensor (num_experts, outputs, inputs), or a `QuantizedMatrix` whose outputs are those of all experts, one below the
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from sgl_kernel.experts import reference
from sgl_kernel.experts.reference import each_expert, weight_of
from sgl_kernel.quantized import QuantizedMatrix
from sgl_kernel.triton_modules import triton_module

__all__ = [
    "Choice",
    "Groups",
    "Weights",
    "choose",
    "each_expert",
    "group_by_expert",
    "product_of_tokens",
    "product_to_places",
    "row_limits",
    "weight_of",
    "weighted_sum",
]

Weights = torch.Tensor | QuantizedMatrix
_KERNELS = f"{__name__}.triton_kernels"


@dataclass(frozen=True)
class Choice:
    """How tokens choose experts by their scores. The best experts are those with the highest scores, to which a
    correction may be added."""

    top_k: int
    # Of all logits "softmax" or "sigmoid"; "softmax_of_chosen" is the softmax of the chosen experts' alone.
    scores: str
    # The weights of a token's experts add up to 1; then they are multiplied with a factor.
    is_normalized: bool = False
    scale: float = 1.0
    # A token has experts of so many groups, each of as many neighbours. Those are the best groups by their best
    # expert; with a correction, by the sum of their best two.
    num_groups: int = 1
    kept_groups: int = 1


class Groups(NamedTuple):
    """Of the experts that tokens chose, (num_tokens, top_k). places: (num_tokens * top_k,), indices into the
    flattened choice in the order of experts, those of one expert in their own order. ends: (num_experts,), where each
    expert's end in `places`. Both are int32 on a GPU, else int64. top_k: experts of a token."""

    places: torch.Tensor
    ends: torch.Tensor
    top_k: int


def choose(
    logits: torch.Tensor, choice: Choice, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: (num_tokens, num_experts). correction: (num_experts,) float32. Returns the weights, float32, and the
    experts, int64, of each token, (num_tokens, top_k) each, the best first. Which of equal ones is not defined."""
    module = _module(logits) if len(logits) else reference
    return module.choose(logits, choice, correction)  # type: ignore[no-any-return]


def group_by_expert(chosen: torch.Tensor, num_experts: int) -> Groups:
    """chosen: (num_tokens, top_k) int64, at least one token."""
    places, ends = _module(chosen).group_by_expert(chosen.contiguous(), num_experts)
    return Groups(places, ends, chosen.shape[1])


def product_of_tokens(
    x: torch.Tensor, weights: Weights, groups: Groups, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x: (num_tokens, inputs). bias: (num_experts, outputs). Returns (num_tokens * top_k, outputs), in the order of
    experts: each token's row times its experts' matrices."""
    return _module(x).product_of_tokens(x, weights, groups, bias)  # type: ignore[no-any-return]


def product_to_places(
    x: torch.Tensor, weights: Weights, groups: Groups, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x: (num_tokens * top_k, inputs), in the order of experts. bias: (num_experts, outputs). Returns (num_tokens,
    top_k, outputs): each row times its expert's matrix, in the order of tokens."""
    return _module(x).product_to_places(x, weights, groups, bias)  # type: ignore[no-any-return]


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """outputs: (num_tokens, top_k, hidden_size), contiguous; weights: (num_tokens, top_k) float32. Returns
    (num_tokens, hidden_size): the sum over a token's experts in float32, rounded once."""
    return _module(outputs).weighted_sum(outputs, weights)  # type: ignore[no-any-return]


def row_limits() -> tuple[int, ...]:
    """Rows of an expert, in the mean, above which other kernels of a GPU multiply; from small to large."""
    module = triton_module(_KERNELS)
    return () if module is None else module.row_limits()


def _module(x: torch.Tensor) -> ModuleType:
    return (triton_module(_KERNELS) if x.is_cuda else None) or reference
