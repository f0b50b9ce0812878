"""Products of few rows with matrices of 8 and 4 bits, and dequantising, in Triton.

A decode step's products take as long as their matrices are read: programs are many and narrow, and the next steps'
values are on their way while one is computed. Sums are in float32. A scale is multiplied onto the sum of its group.
Which tiles are fastest was worked out, not measured.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_launch import launch

if TYPE_CHECKING:
    from sgl_kernel.quantized import QuantizedMatrix

DTYPES = (torch.bfloat16, torch.float16)
# Of rows: decodes, and short prefills.
_FEW_ROWS, _SOME_ROWS = 16, 64
# Outputs of a program: the fewer, the more programs, and the more of the matrix is on its way at once.
_NARROW, _WIDE = 32, 64
_STEP = 128
# More hold more of the matrix on its way, and take more of an SM's memory.
_MANY_STAGES, _STAGES = 8, 4
_MANY_STAGES_BYTES = 164 << 10
# Rows and columns that a program dequantises.
_TILE = (16, 256)


def linear(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, inputs = x.shape
    outputs = matrix.shape[0]
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    tile = _tile(num_rows, outputs, *_sms_and_shared_bytes(x.device))
    launch(
        _linear_kernel,
        (triton.cdiv(num_rows, tile.rows), triton.cdiv(outputs, tile.outputs)),
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
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        STEP=_step(matrix),
        ONE_SCALE=matrix.group == inputs,
        num_warps=4,
        num_stages=tile.stages,
    )
    return out


class Tile(NamedTuple):
    """What a program of a product works on at once."""

    rows: int
    outputs: int
    stages: int


def _tile(num_rows: int, outputs: int, sms: int, shared_bytes: int) -> Tile:
    """One program for each multiprocessor, or more: those of a matrix with few outputs are narrow. With 64 rows two
    programs fit there if they have few stages. shared_bytes: that a program may have."""
    if num_rows <= _FEW_ROWS:
        return Tile(_FEW_ROWS, _NARROW, _MANY_STAGES)
    if num_rows <= _SOME_ROWS and triton.cdiv(outputs, _WIDE) < 2 * sms:
        is_alone = triton.cdiv(outputs, _NARROW) <= sms and shared_bytes >= _MANY_STAGES_BYTES
        return Tile(_SOME_ROWS, _NARROW, _MANY_STAGES if is_alone else _STAGES)
    return Tile(_SOME_ROWS, _WIDE, _STAGES)


@cache
def _sms_and_shared_bytes(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 1, 0
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


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
def _values(
    values_ptr, places, begin, inputs, mask, COLUMNS: tl.constexpr, IS_PACKED: tl.constexpr, MAY_END: tl.constexpr
):
    """Stored numbers of COLUMNS inputs from begin on, in float32. places: of outputs, 64 bits, a column. mask: of
    outputs, a column. MAY_END: some may lie behind the last input, and are 0."""
    if IS_PACKED:
        # Whole bytes, side by side, so that many come with one load.
        half = begin // 2 + tl.arange(0, COLUMNS // 2)[None, :]
        if MAY_END:
            mask = mask & (half < inputs // 2)
        pairs = tl.load(values_ptr + places * (inputs // 2) + half, mask=mask, other=0)
        return tl.interleave(pairs & 15, pairs >> 4).to(tl.float32)
    else:
        columns = begin + tl.arange(0, COLUMNS)[None, :]
        if MAY_END:
            mask = mask & (columns < inputs)
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
    ONE_SCALE: tl.constexpr,
):
    """Program (m, n): BLOCK_N outputs of BLOCK_M rows. Those of the same outputs run together, so that their part of
    the matrix is read once. group: a multiple of STEP. ONE_SCALE: it is all inputs."""
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    some_rows, some_outputs = rows < num_rows, outputs < num_outputs
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    places = outputs.to(tl.int64)[:, None]
    groups = outputs.to(tl.int64) * (inputs // group)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, inputs, STEP):
        columns = begin + tl.arange(0, STEP)
        x = tl.load(x_rows + columns[None, :], mask=some_rows[:, None], other=0.0)
        values = _values(values_ptr, places, begin, inputs, some_outputs[:, None], STEP, zeros_ptr is not None, False)
        of_group = groups + begin // group
        if zeros_ptr is not None:
            values -= tl.load(zeros_ptr + of_group, mask=some_outputs, other=0).to(tl.float32)[:, None]
        # Whole numbers up to 127, and e4m3, are exact in 16 bits.
        part = tl.dot(x, tl.trans(values.to(x.dtype)))
        if ONE_SCALE:
            total += part
        else:
            total += part * tl.load(scales_ptr + of_group, mask=some_outputs, other=0.0)[None, :]
    if ONE_SCALE:
        total *= tl.load(scales_ptr + outputs, mask=some_outputs, other=0.0)[None, :]
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
    some_outputs = (outputs < num_outputs)[:, None]
    begin = tl.program_id(1) * COLUMNS
    values = _values(values_ptr, places, begin, inputs, some_outputs, COLUMNS, zeros_ptr is not None, True)
    groups = places * (inputs // group) + (columns // group)[None, :]
    if zeros_ptr is not None:
        values -= tl.load(zeros_ptr + groups, mask=mask, other=0).to(tl.float32)
    values *= tl.load(scales_ptr + groups, mask=mask, other=0.0)
    tl.store(out_ptr + places * inputs + columns[None, :], values, mask=mask)
