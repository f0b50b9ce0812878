"""`csrc/cpu_elementwise.c`, on tensors that `takes`. `sgl_kernel.elementwise` chooses and describes the functions."""

from __future__ import annotations

import torch

from sgl_kernel.cpu.library import function, takes


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


def takes_rows(values: torch.Tensor) -> bool:
    """Whether `store_rows` and `store_in_pages` take values."""
    return takes(values) and values.dim() == 3 and values.stride(2) == 1 and values.stride(1) == values.shape[2]


def store_rows(slots: torch.Tensor, loc: torch.Tensor, values: torch.Tensor) -> None:
    """slots[loc] = values. slots: (num_slots, heads, d), rows contiguous. loc: (n,) int64. values: (n, heads, d)."""
    store_in_pages(slots[:, None], loc, values)


def store_in_pages(pages: torch.Tensor, loc: torch.Tensor, values: torch.Tensor) -> None:
    """pages[loc // page_size, loc % page_size] = values. pages: (num_pages, page_size, heads, d), rows contiguous,
    any strides between them. loc: (n,) int64. values: (n, heads, d)."""
    n, heads, d = values.shape
    assert loc.is_contiguous() and pages.stride(2) == d
    function("cpu_store_rows")(
        values.data_ptr(),
        loc.data_ptr(),
        pages.data_ptr(),
        n,
        heads * d,
        values.stride(0),
        pages.shape[1],
        pages.stride(0),
        pages.stride(1),
    )
