"""Products of few rows with matrices of 8 and 4 bits, and dequantising, in Triton.

A decode step's products take as long as their matrices are read: programs are many and narrow, and the next steps'
values are on their way while one is computed. Sums are in float32. A scale is multiplied onto the sum of its group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_launch import launch

if TYPE_CHECKING:
    from sgl_kernel.quantized import QuantizedMatrix

DTYPES = (torch.bfloat16, torch.float16)
# Of rows: decodes, and short prefills.
_FEW_ROWS, _SOME_ROWS = 16, 64
_STEP = 128
_STAGES = 4
# Rows and columns that a program dequantises.
_TILE = (16, 256)


def linear(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, inputs = x.shape
    outputs = matrix.shape[0]
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    block_m = _FEW_ROWS if num_rows <= _FEW_ROWS else _SOME_ROWS
    block_n = 32 if num_rows <= _FEW_ROWS else 64
    launch(
        _linear_kernel,
        (triton.cdiv(outputs, block_n), triton.cdiv(num_rows, block_m)),
        x,
        matrix.values,
        matrix.scales,
        matrix.zeros,
        bias,
        out,
        x.stride(0),
        num_rows,
        outputs,
        inputs,
        matrix.group,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STEP=_step(matrix),
        num_warps=4,
        num_stages=_STAGES,
    )
    return out


def dequantized(matrix: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
    outputs, inputs = matrix.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=matrix.values.device)
    rows, columns = _TILE
    launch(
        _dequantize_kernel,
        (triton.cdiv(outputs, rows), triton.cdiv(inputs, columns)),
        matrix.values,
        matrix.scales,
        matrix.zeros,
        out,
        outputs,
        inputs,
        matrix.group,
        ROWS=rows,
        COLUMNS=columns,
    )
    return out


def _step(matrix: QuantizedMatrix) -> int:
    """The largest power of two that divides a group, and at most `_STEP`."""
    return min(_STEP, matrix.group & -matrix.group)


@triton.jit
def _values(values_ptr, places, columns, inputs, mask, IS_PACKED: tl.constexpr):
    """Stored numbers, in float32. places: of outputs, 64 bits, a column. columns: of inputs, a row."""
    if IS_PACKED:
        pairs = tl.load(values_ptr + places * (inputs // 2) + columns // 2, mask=mask, other=0)
        return ((pairs >> ((columns % 2) * 4).to(tl.uint8)) & 15).to(tl.float32)
    else:
        return tl.load(values_ptr + places * inputs + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    num_rows,
    num_outputs,
    inputs,
    group,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (n, m): BLOCK_N outputs of BLOCK_M rows. group: a multiple of STEP."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    some_rows, some_outputs = rows < num_rows, outputs < num_outputs
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    places = outputs.to(tl.int64)[:, None]
    groups = outputs.to(tl.int64) * (inputs // group)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, inputs, STEP):
        columns = begin + tl.arange(0, STEP)
        x = tl.load(x_rows + columns[None, :], mask=some_rows[:, None], other=0.0)
        values = _values(values_ptr, places, columns[None, :], inputs, some_outputs[:, None], zeros_ptr is not None)
        of_group = groups + begin // group
        if zeros_ptr is not None:
            values -= tl.load(zeros_ptr + of_group, mask=some_outputs, other=0).to(tl.float32)[:, None]
        # Whole numbers up to 127, and e4m3, are exact in 16 bits.
        part = tl.dot(x, tl.trans(values.to(x.dtype)))
        total += part * tl.load(scales_ptr + of_group, mask=some_outputs, other=0.0)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=some_outputs, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(out, total, mask=some_rows[:, None] & some_outputs[None, :])


@triton.jit
def _dequantize_kernel(
    values_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    num_outputs,
    inputs,
    group,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (n, k): COLUMNS inputs of ROWS outputs."""
    outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places = outputs.to(tl.int64)[:, None]
    mask = (outputs < num_outputs)[:, None] & (columns < inputs)[None, :]
    values = _values(values_ptr, places, columns[None, :], inputs, mask, zeros_ptr is not None)
    groups = places * (inputs // group) + (columns // group)[None, :]
    if zeros_ptr is not None:
        values -= tl.load(zeros_ptr + groups, mask=mask, other=0).to(tl.float32)
    values *= tl.load(scales_ptr + groups, mask=mask, other=0.0)
    tl.store(out_ptr + places * inputs + columns[None, :], values, mask=mask)
