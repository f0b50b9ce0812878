"""Products of few rows with matrices of 8 and 4 bits, and dequantising, in Triton.

A decode step's products take as long as their matrices are read: programs are many and narrow, and the next steps'
values are on their way while one is computed. Sums are in float32. For few rows a scale is multiplied onto the sum of
its group. `product` is also for matrices of experts. Which tiles are fastest was worked out, not measured.
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
# Inputs that share a scale where numbers are e2m1.
_FLOAT4_GROUP = tl.constexpr(32)
# Of their numbers, as a kernel has them first. The largest scale times it would be infinite.
_FLOAT4_FACTOR = tl.constexpr(16384.0)


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
        **stored_constants(matrix, inputs, _STEP),
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
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
        FORMAT=stored_constants(matrix, inputs, columns)["FORMAT"],
    )
    return out


def stored_constants(weights: QuantizedMatrix | torch.Tensor, inputs: int, most: int, many: bool = False) -> dict:
    """How `product` reads weights. most: inputs of a step at most. many: there are so many rows that each value is
    scaled once and not each row's sum, which also is how `QuantizedMatrix` defines the result."""
    in_steps = {"STEP": most, "GROUP": most, "MAY_END": inputs % most > 0}
    if isinstance(weights, torch.Tensor):
        return in_steps | {"FORMAT": "plain", "SCALES": "none"}
    name = {torch.uint8: "int4", torch.float4_e2m1fn_x2: "e2m1"}.get(weights.format.dtype, "eight_bits")
    if name == "e2m1":
        return in_steps | {"FORMAT": name, "SCALES": "none"}
    group = weights.group
    if group < most and most % group == 0:
        # Several in a step: shorter steps would have too little of the matrix on its way.
        return in_steps | {"FORMAT": name, "SCALES": "of_parts", "GROUP": group}
    # The largest power of two that divides a group.
    step = min(most, group & -group)
    scales = "last" if group == inputs and name == "eight_bits" else "first" if many else "of_sums"
    return {"STEP": step, "GROUP": step, "FORMAT": name, "SCALES": scales, "MAY_END": False}


@triton.jit
def _values(
    values_ptr,
    scales_ptr,
    places,
    begin,
    inputs,
    mask,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    MAY_END: tl.constexpr,
):
    """(ROWS, COLUMNS): stored numbers of COLUMNS inputs from begin on, in float32, or as they are where they are not
    quantised. Those of e2m1 are multiplied by their scales, of _FLOAT4_GROUP inputs each, and lack _FLOAT4_FACTOR.
    places: of outputs, 64 bits, a column. mask: of outputs, a column. MAY_END: some may lie behind the last input,
    and are 0."""
    if FORMAT == "int4" or FORMAT == "e2m1":
        # Whole bytes, side by side, so that many come with one load.
        half = begin // 2 + tl.arange(0, COLUMNS // 2)[None, :]
        of_pairs = mask
        if MAY_END:
            of_pairs = mask & (half < inputs // 2)
        pairs = tl.load(values_ptr + places * (inputs // 2) + half, mask=of_pairs, other=0)
        numbers = tl.interleave(pairs & 15, pairs >> 4)
        if FORMAT == "int4":
            return numbers.to(tl.float32)
        numbers = numbers.to(tl.int16)
        # Exponent and mantissa, and the sign, in their places in a float16, whose exponent is less by 14.
        floats = (((numbers & 7) << 9) | ((numbers & 8) << 12)).to(tl.float16, bitcast=True).to(tl.float32)
        groups = begin // _FLOAT4_GROUP + tl.arange(0, COLUMNS // _FLOAT4_GROUP)[None, :]
        of_groups = mask
        if MAY_END:
            of_groups = mask & (groups < inputs // _FLOAT4_GROUP)
        exponents = tl.load(scales_ptr + places * (inputs // _FLOAT4_GROUP) + groups, mask=of_groups, other=0)
        scales = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        floats = tl.reshape(floats, (ROWS, COLUMNS // _FLOAT4_GROUP, _FLOAT4_GROUP)) * scales[:, :, None]
        return tl.reshape(floats, (ROWS, COLUMNS))
    else:
        columns = begin + tl.arange(0, COLUMNS)[None, :]
        if MAY_END:
            mask = mask & (columns < inputs)
        found = tl.load(values_ptr + places * inputs + columns, mask=mask, other=0.0)
        if FORMAT != "plain":
            found = found.to(tl.float32)
        return found


@triton.jit
def product(
    x_rows,
    some_rows,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    outputs,
    some_outputs,
    inputs,
    group,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    MAY_END: tl.constexpr,
):
    """(OUTPUTS, ROWS) float32: the matrix's part times the rows' transpose, so that a scale belongs to few of a
    thread's sums, and that few rows fill the tensor cores' tiles. x_rows: pointers to rows, a column. outputs: rows
    of the matrix, 64 bits. group: a multiple of STEP, or all inputs, but for e2m1; or GROUP, several of which are a
    step. FORMAT, SCALES: see `stored_constants`. MAY_END: the last step has fewer inputs."""
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    groups = outputs * (inputs // group)
    places, mask = outputs[:, None], some_outputs[:, None]
    # Triton loads ahead only what goes into a product. Scales of sums are loaded a step ahead. (With zeros, too, the
    # values would come late.)
    if SCALES == "of_sums":
        next_scales = tl.load(scales_ptr + groups, mask=some_outputs, other=0.0)
    for begin in range(0, inputs, STEP):
        columns = begin + tl.arange(0, STEP)[None, :]
        x_mask = some_rows[:, None]
        if MAY_END:
            x_mask = x_mask & (columns < inputs)
        x = tl.load(x_rows + columns, mask=x_mask, other=0.0)
        values = _values(values_ptr, scales_ptr, places, begin, inputs, mask, STEP, OUTPUTS, FORMAT, MAY_END)
        if SCALES == "of_parts":
            parts = begin // GROUP + tl.arange(0, STEP // GROUP)[None, :]
            of_parts = mask & (parts < inputs // GROUP)
            in_parts = tl.reshape(values, (OUTPUTS, STEP // GROUP, GROUP))
            if FORMAT == "int4":
                zeros = tl.load(zeros_ptr + groups[:, None] + parts, mask=of_parts, other=0)
                in_parts -= zeros.to(tl.float32)[:, :, None]
            in_parts *= tl.load(scales_ptr + groups[:, None] + parts, mask=of_parts, other=0.0)[:, :, None]
            values = tl.reshape(in_parts, (OUTPUTS, STEP))
        elif FORMAT == "int4":
            zeros = tl.load(zeros_ptr + groups + begin // group, mask=some_outputs, other=0)
            values -= zeros.to(tl.float32)[:, None]
        if SCALES == "first":
            values *= tl.load(scales_ptr + groups + begin // group, mask=some_outputs, other=0.0)[:, None]
        if FORMAT == "e2m1" and x.dtype == tl.float16:
            # It has no exponent for what lacks the factor.
            values *= _FLOAT4_FACTOR
        # Whole numbers up to 127, and e4m3, are exact in 16 bits. Only float32 could lose something in it.
        weight, x = values.to(x.dtype), tl.trans(x)
        if SCALES == "of_sums":
            scales, after = next_scales, begin + STEP
            next_scales = tl.load(scales_ptr + groups + after // group, some_outputs & (after < inputs), other=0.0)
            total += tl.dot(weight, x, input_precision="ieee") * scales[:, None]
        else:
            total = tl.dot(weight, x, total, input_precision="ieee")
    if FORMAT == "e2m1" and x_rows.dtype.element_ty != tl.float16:
        total *= _FLOAT4_FACTOR
    if SCALES == "last":
        total *= tl.load(scales_ptr + outputs, mask=some_outputs, other=0.0)[:, None]
    return total


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
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    MAY_END: tl.constexpr,
):
    """Program (m, n): OUTPUTS outputs of ROWS rows. Those of the same outputs run together, so that their part of the
    matrix is read once."""
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    some_rows, some_outputs = rows < num_rows, outputs < num_outputs
    total = product(
        x_ptr + rows.to(tl.int64)[:, None] * x_stride,
        some_rows,
        values_ptr,
        scales_ptr,
        zeros_ptr,
        outputs.to(tl.int64),
        some_outputs,
        inputs,
        group,
        ROWS,
        OUTPUTS,
        STEP,
        GROUP,
        FORMAT,
        SCALES,
        MAY_END,
    )
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=some_outputs, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(out, tl.trans(total), mask=some_rows[:, None] & some_outputs[None, :])


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
    FORMAT: tl.constexpr,
):
    """Program (n, k): COLUMNS inputs of ROWS outputs."""
    outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places = outputs.to(tl.int64)[:, None]
    mask = (outputs < num_outputs)[:, None] & (columns < inputs)[None, :]
    some_outputs = (outputs < num_outputs)[:, None]
    begin = tl.program_id(1) * COLUMNS
    values = _values(values_ptr, scales_ptr, places, begin, inputs, some_outputs, COLUMNS, ROWS, FORMAT, True)
    if FORMAT != "e2m1":
        groups = places * (inputs // group) + (columns // group)[None, :]
        if FORMAT == "int4":
            values -= tl.load(zeros_ptr + groups, mask=mask, other=0).to(tl.float32)
        values *= tl.load(scales_ptr + groups, mask=mask, other=0.0)
    else:
        values *= _FLOAT4_FACTOR
    tl.store(out_ptr + places * inputs + columns[None, :], values, mask=mask)
