"""Drawing tokens on a GPU, `draw`, and cutting probabilities off without sorting them: flashinfer's functions, under
its names, and where it is not installed `keep_top`, in Triton. And penalties there, `penalize`.

There is no fallback here: a caller asks `has_renorm_kernels` and `has_triton`, and has ways of its own.
probs: (n, vocab_size) float32, contiguous. Every token that ties with the last kept one is kept. Top-p ends where
float32 sums of the probabilities reach it; the same input gives the same bits. flashinfer's functions return new
tensors. In these, probabilities that are cut off become 0, and the rest is scaled to sum 1.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from sgl_kernel.flashinfer_kernels import flashinfer_function, is_on_gpu
from sgl_kernel.triton_modules import triton_module


def has_renorm_kernels(probs: torch.Tensor) -> bool:
    names = ("top_k_renorm_probs", "top_p_renorm_probs")
    return is_on_gpu(probs) and all(flashinfer_function(name, probs.device) is not None for name in names)


def top_k_renorm_probs(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """top_ks: (n,) int64, from 1; the vocabulary's size or more keeps all."""
    kernel = flashinfer_function("top_k_renorm_probs", probs.device)
    assert kernel is not None
    return kernel(probs, top_ks.to(torch.int32))


def top_p_renorm_probs(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """top_ps: (n,) float32, below 1; 1 may cut off probabilities that float32 sums lose."""
    kernel = flashinfer_function("top_p_renorm_probs", probs.device)
    assert kernel is not None
    # Without `deterministic`, threads would add floats in the order of their arrival.
    return kernel(probs, top_ps, is_deterministic=True)


def has_triton(tensor: torch.Tensor) -> bool:
    """Whether `draw`, `keep_top` and `penalize` are for its device."""
    return tensor.is_cuda and _triton() is not None


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    cut: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Tokens, (n,) int64: the likeliest where the temperature is 0 (any one, with NaN), and else the first one up to
    which the probabilities exceed the number that `random_uniform` gives; the last one of a row with NaN.

    logits: (n, vocab_size) float32, values of a row side by side. temperatures, min_ps: (n,) float32; seeds,
    positions: (n,) int64. cut: zeroes probabilities, (n, vocab_size) float32, in place, but the likeliest's; None
    where nothing is cut but by min-p.
    """
    ours = _triton()
    assert ours is not None, "no kernel takes it: ask has_triton"
    return ours.draw(logits, temperatures, min_ps, seeds, positions, cut)


def keep_top(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> None:
    """Zero what top-k or top-p cut off, in place, without scaling the rest. top_ks: (n,) int64, from 1; the
    vocabulary's size or more cuts nothing off. top_ps: (n,) float32; 1 cuts nothing off."""
    ours = _triton()
    assert ours is not None, "no kernel takes it: ask has_triton"
    ours.keep_top(probs, top_ks, top_ps)


def penalize(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor
) -> None:
    """As `sgl_kernel.cpu.sampling.penalize`."""
    ours = _triton()
    assert ours is not None, "no kernel takes it: ask has_triton"
    ours.penalize(logits, rows, slots, counts, penalties)


def _triton() -> ModuleType | None:
    return triton_module(f"{__name__}.triton_kernels")
