"""The sampling parameters of a batch, as tensors, and what the host knows about them without asking a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.device import CPU, to_device


@dataclass(frozen=True)
class SamplingCuts:
    """Which of a batch's rows are cut, and how deep. On the host: a sampler that looked into its tensors would wait
    for the device.

    num_limited: rows that draw and that top-k or top-p may cut. limited: (num_limited,) int64, these rows, beside
    the columns; None where all are or none is. deepest_top_k: the largest top-k among them. has_top_k, has_top_p:
    whether one of them has it. has_min_p: whether any row has. has_greedy: whether any row draws nothing.
    """

    num_limited: int
    limited: torch.Tensor | None
    deepest_top_k: int
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool
    has_greedy: bool


@dataclass(frozen=True)
class SamplingBatchInfo:
    """One entry per sampled row; all columns on one device.

    temperatures, top_ps: (n,) float32. top_ks: (n,) int64, the vocabulary's size at most. seeds: (n,) int64.
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
    cuts: SamplingCuts

    @classmethod
    def from_params(
        cls,
        params: Sequence[SamplingParams],
        vocab_size: int,
        positions: torch.Tensor,
        device: torch.device = CPU,
    ) -> SamplingBatchInfo:
        """positions: on `device`."""
        temperatures = np.minimum([p.temperature for p in params], np.finfo(np.float32).max).astype(np.float32)
        top_ps = np.array([p.top_p for p in params], np.float32)
        top_ks = np.array([min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params], np.int64)
        min_ps = np.array([p.min_p for p in params], np.float32)
        # In the precision of the columns: what rounds to 1 there cuts nothing.
        drawn = temperatures > 0
        by_top_k, by_top_p = drawn & (top_ks < vocab_size), drawn & (top_ps < 1)
        rows = np.flatnonzero(by_top_k | by_top_p)
        return cls(
            temperatures=to_device(temperatures, device),
            top_ps=to_device(top_ps, device),
            top_ks=to_device(top_ks, device),
            min_ps=to_device(min_ps, device),
            seeds=to_device(np.array([p.sampling_seed or 0 for p in params], np.int64), device),
            positions=positions,
            is_all_greedy=not drawn.any(),
            cuts=SamplingCuts(
                num_limited=len(rows),
                limited=to_device(rows, device) if 0 < len(rows) < len(params) else None,
                deepest_top_k=int(top_ks[rows].max()) if len(rows) else vocab_size,
                has_top_k=bool(by_top_k.any()),
                has_top_p=bool(by_top_p.any()),
                has_min_p=bool((min_ps > 0).any()),
                has_greedy=not drawn.all(),
            ),
        )

    def at(self, positions: torch.Tensor) -> SamplingBatchInfo:
        """The same rows, about to draw the tokens at `positions`."""
        return replace(self, positions=positions)
