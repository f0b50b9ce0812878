"""Merging attention over disjoint sets of keys by their log-sum-exp. Pure functions; owns nothing."""

from __future__ import annotations

import math

import torch


def merge_state(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the union of two disjoint key sets.

    out_a, out_b: (..., value_dim), any floating dtype. lse_a, lse_b: the shape of out without its last dimension,
    natural logarithm, -inf where the set was empty. Returns out and lse in float32.
    """
    lse_a, lse_b = lse_a.float(), lse_b.float()
    # exp(lse_b) / (exp(lse_a) + exp(lse_b)), without the overflow. Two empty sets give -inf - -inf = nan: take a,
    # which is zero.
    weight_b = torch.sigmoid(lse_b - lse_a).nan_to_num_(nan=0.0)
    out = torch.lerp(out_a.float(), out_b.float(), weight_b.unsqueeze(-1))
    return out, torch.logaddexp(lse_a, lse_b)


def share_beside(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """What is left of attention over some keys, whose scores have the lse (num_tokens, num_q_heads), beside a sink of
    each head: (num_tokens, num_q_heads, 1) factors."""
    # Also where a sink is -inf.
    return torch.sigmoid(lse - sinks.float()).masked_fill_(lse == -math.inf, 0.0)[..., None]
