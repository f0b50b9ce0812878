"""The sampling parameters of a batch, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingBatchInfo:
    """One entry per sampled row.

    temperatures, top_ps: (n,) float32. top_ks: (n,) int64, vocabulary size where unlimited. seeds: (n,) int64.
    min_ps: (n,) float32. positions: (n,) int64, index of the token to be drawn in its sequence (prompt included).
    is_all_greedy: every temperature is 0.
    """

    temperatures: torch.Tensor
    top_ps: torch.Tensor
    top_ks: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    is_all_greedy: bool
