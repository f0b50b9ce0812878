"""`csrc/cpu_few_rows.c`: products of a few rows in bfloat16, as fast as the matrix is read."""

from __future__ import annotations

import torch

from sgl_kernel.cpu.library import LIBRARY, function

# With more, torch's product is as fast.
MOST_ROWS = 8
# A multiple of what the kernel takes of a row at once, on any CPU.
_STEP = 32


def takes_few_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """x: (num_rows, in_features); weight: (out_features, in_features)."""
    return (
        x.is_cpu
        and x.dtype == weight.dtype == torch.bfloat16
        and len(x) <= MOST_ROWS
        and x.shape[1] % _STEP == 0
        and weight.is_contiguous()
        and LIBRARY.is_available()
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Of what `takes_few_rows`: x @ weight.T + bias, (num_rows, out_features) bfloat16. Raises MemoryError."""
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(len(x), len(weight))
    failed = function("cpu_few_rows")(
        x.data_ptr(),
        len(x),
        x.shape[1],
        x.stride(0),
        weight.data_ptr(),
        len(weight),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory to multiply a few rows")
    return out
