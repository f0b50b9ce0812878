"""`csrc/cpu_elementwise.c`, on tensors that `takes`. `sgl_kernel.elementwise` chooses and describes the functions."""

from __future__ import annotations

import torch

from sgl_kernel.cpu.library import function


def rmsnorm(x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, update: (n, d), contiguous. update is added to x in place, before. Returns a new tensor."""
    out = torch.empty_like(x)
    n, d = x.shape
    function("cpu_rmsnorm")(
        x.data_ptr(),
        None if update is None else update.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        n,
        d,
        eps,
        torch.get_num_threads(),
    )
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (n, 2 * d), contiguous."""
    n, d = x.shape[0], x.shape[1] // 2
    out = x.new_empty((n, d))
    function("cpu_silu_and_mul")(x.data_ptr(), out.data_ptr(), n, d, torch.get_num_threads())
    return out


def apply_rope(positions: torch.Tensor, x: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """x: (n, heads, d), the innermost dimension contiguous. Rotated in place."""
    n, heads, d = x.shape
    function("cpu_rope")(
        x.data_ptr(),
        positions.data_ptr(),
        cos_sin_cache.data_ptr(),
        n,
        heads,
        d,
        x.stride(0),
        x.stride(1),
        torch.get_num_threads(),
    )
