"""Matrices of 8 and 4 bits: what they mean, and their kernels, under Triton's interpreter, where this file runs as a
script, and compiled for sm_90."""

from __future__ import annotations

import re
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from sgl_kernel import quantized
from sgl_kernel.quantized import E2M1, FOUR_BITS, MatrixFormat, QuantizedMatrix
from support.triton_runs import compile_kernel, needs_triton, run_interpreted

FP8 = torch.float8_e4m3fn
FORMATS = [
    MatrixFormat(FP8),
    MatrixFormat(FP8, 128),
    MatrixFormat(torch.int8),
    MatrixFormat(torch.int8, 32),
    MatrixFormat(FOUR_BITS, 64),
    MatrixFormat(FOUR_BITS, 128),
    MatrixFormat(E2M1, 32),
]
# What e2m1's numbers mean.
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix_of(format: MatrixFormat, outputs: int, inputs: int, seed: int = 1) -> tuple[QuantizedMatrix, torch.Tensor]:
    """One with numbers of all kinds, and what it means, number by number."""
    generator = torch.Generator().manual_seed(seed)
    matrix = QuantizedMatrix.empty(format, outputs, inputs)
    groups = matrix.scales.shape[1]
    scales = torch.rand(outputs, groups, generator=generator) * 0.1
    zeros = torch.randint(16, (outputs, groups), generator=generator)
    if format.dtype == E2M1:
        scales = 2.0 ** torch.randint(-7, 2, (outputs, groups), generator=generator)
    if format.dtype == FP8:
        values = random(seed, outputs, inputs).mul_(100).to(FP8)
    else:
        least, most = (0, 16) if format.is_packed else (-128, 128)
        values = torch.randint(least, most, (outputs, inputs), generator=generator)
    matrix.take(values, scales, zeros)
    if format.dtype == E2M1:
        values = torch.tensor(E2M1_VALUES)[values]
    per_input = inputs // groups
    shift = zeros if format.dtype == FOUR_BITS else torch.zeros_like(zeros)
    means = torch.stack(
        [(values[:, i].float() - shift[:, i // per_input]) * scales[:, i // per_input] for i in range(inputs)], dim=1
    )
    return matrix, means


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_what_is_stored_is_what_is_multiplied(format):
    matrix, means = matrix_of(format, 24, 256)
    assert matrix.shape == (24, 256)
    assert torch.equal(matrix.dequantized(torch.float32), means)
    assert torch.equal(matrix.outputs(5, 9).dequantized(torch.bfloat16), means[5:14].bfloat16())
    x, bias = random(2, 3, 256), random(3, 24)
    assert torch.equal(quantized.linear(x, matrix, bias), F.linear(x, means, bias))
    assert quantized.linear(x[:0], matrix).shape == (0, 24)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_quantizing_finds_the_nearest(format):
    weight = random(4, 24, 256)
    weight[3] = 0.0
    weight[4] = weight[4].abs() + 1
    matrix = QuantizedMatrix.empty(format, 24, 256)
    matrix.quantize(weight)
    got = matrix.dequantized(torch.float32)
    assert torch.equal(got[3], weight[3])
    error = (got - weight).abs()
    scales = matrix.scales if format.dtype != E2M1 else torch.exp2(matrix.scales - 127.0)
    step = scales.repeat_interleave(matrix.group, dim=1)
    if format.dtype == E2M1:
        # One bit behind the first one. The largest number is 6, and may stand for all below 8.
        assert bool((error <= torch.maximum(weight.abs() / 4, step / 4) * 1.001).all())
    elif format.dtype == FP8:
        # Three bits behind the first one, and a least exponent.
        assert bool((error <= torch.maximum(weight.abs() / 16, step * 2**-9) * 1.001).all())
    else:
        assert bool((error <= step * (1.001 if format.dtype == FOUR_BITS else 0.501)).all())
    # What it finds it keeps.
    again = QuantizedMatrix.empty(format, 24, 256)
    again.quantize(got)
    assert torch.allclose(again.dequantized(torch.float32), got, rtol=1e-5, atol=1e-6)


@needs_triton
def test_under_the_interpreter():
    assert run_interpreted(__file__, "products", "matrices").count("are right") == 2


@needs_triton
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("format", FORMATS[1:], ids=str)
def test_they_compile_for_sm_90(dtype, format):
    from sgl_kernel.quantized import triton_kernels as kernels

    values = "u8" if format.is_packed else "fp8e4nv" if format.dtype == FP8 else "i8"
    scales = "u8" if format.dtype == E2M1 else "fp32"
    pointers = {"values_ptr": f"*{values}", "scales_ptr": f"*{scales}", "zeros_ptr": "*u8"}
    absent = {} if format.dtype == FOUR_BITS else {"zeros_ptr": None}

    def compiled(kernel, constants, **options):
        types = {
            name: pointers.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32") for name in kernel.arg_names
        }
        aligned = {name for name in types if not name.startswith("num_")}
        result = compile_kernel(kernel, types, constants | absent, aligned, **options)
        assert result.metadata.shared <= 227 << 10
        return result.asm["ptx"]

    # Of an RTX 4090, whose programs may have less memory.
    assert kernels._tile(40, 4096, 128, 99 << 10) == kernels._tile(40, 6144, 132, 227 << 10)
    tiles = {kernels._tile(*each, 132, 227 << 10) for each in ((1, 4096), (40, 4096), (40, 6144), (40, 28672))}
    assert len(tiles) == 4
    for tile in tiles:
        constants = {"bias_ptr": None, "ROWS": tile.rows, "OUTPUTS": tile.outputs}
        constants |= kernels.stored_constants(matrix_of(format, 64, 256)[0], 256, 128)
        ptx = compiled(kernels._linear_kernel, constants, num_stages=tile.stages)
        assert "mma" in ptx and "cp.async" in ptx, ptx
        # Values come many with one load. Single bytes are zeros of groups.
        num_bytes = len(re.findall(r"ld\.global[a-z.:0-9]*\.b8", ptx))
        assert num_bytes <= (8 if values == "u8" else 0), ptx
        assert ("e4m3x2" in ptx) == (values == "fp8e4nv")
    constants = kernels.stored_constants(matrix_of(format, 64, 256)[0], 256, 256)
    compiled(kernels._dequantize_kernel, {"ROWS": 16, "COLUMNS": 256, "FORMAT": constants["FORMAT"]})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_on_a_gpu(format, dtype):
    for num_rows, outputs, inputs in ((1, 4096, 4096), (17, 1000, 1024), (256, 64, 384), (300, 512, 1024)):
        matrix, means = matrix_of(format, outputs, inputs)
        on_gpu = QuantizedMatrix(
            format,
            *(tensor.cuda() for tensor in matrix.tensors.values()),
            *(() if matrix.zeros is not None else (None,)),
        )
        assert torch.equal(on_gpu.dequantized(dtype).cpu(), means.to(dtype))
        x, bias = random(8, num_rows, inputs).to(dtype), random(9, outputs).to(dtype)
        got = quantized.linear(x.cuda(), on_gpu, bias.cuda()).cpu().float()
        want = F.linear(x.double(), means.double(), bias.double()).float()
        assert (got - want).abs().max() <= 4 * torch.finfo(dtype).eps * want.abs().max()


# -- under the interpreter -----------------------------------------------------------------------------------------


def products() -> None:
    from sgl_kernel.quantized import triton_kernels

    for format in FORMATS:
        for num_rows, outputs, inputs in ((1, 40, 256), (17, 100, 128), (70, 64, 384), (9, 40, 320)):
            if inputs % (format.group or 1):
                continue
            matrix, means = matrix_of(format, outputs, inputs)
            wide = random(5, num_rows, inputs + 16).half()
            x, bias = wide[:, :inputs], random(6, outputs).half()
            for some_bias in (None, bias):
                got = triton_kernels.linear(x, matrix, some_bias)
                want = F.linear(x.float(), means, None if some_bias is None else some_bias.float())
                assert got.dtype == x.dtype and got.shape == want.shape
                # Of a sum of as many terms, rounded to 16 bits.
                error, size = (got.float() - want).abs().max(), want.abs().max()
                assert error <= 2e-3 * size, (format, num_rows, error, size)
        if format.dtype == E2M1:
            # The numbers of a float16 reach down to them, and no farther.
            matrix.scales.sub_(8)
            want = F.linear(x.float(), means * 2.0**-8)
            assert (triton_kernels.linear(x, matrix, None).float() - want).abs().max() <= 2e-3 * want.abs().max()


def matrices() -> None:
    from sgl_kernel.quantized import triton_kernels

    for format in FORMATS:
        for outputs, inputs in ((3, 128), (20, 640)):
            matrix, means = matrix_of(format, outputs, inputs)
            assert torch.equal(triton_kernels.dequantized(matrix, torch.float16), means.half()), format
            with mock.patch.object(quantized, "_kernels", lambda x: triton_kernels):
                assert torch.equal(matrix.outputs(1, 2).dequantized(torch.float16), means[1:3].half())
                many = random(7, quantized.MOST_ROWS + 1, inputs).half()
                assert torch.equal(quantized.linear(many, matrix), F.linear(many, means.half())), "by the library"
            if format.dtype == E2M1:
                # The least and the largest power of two of which any number times it is finite.
                matrix.scales[0] = torch.tensor([1, 252] * (inputs // 64))
                assert torch.equal(
                    triton_kernels.dequantized(matrix, torch.float32), matrix.dequantized(torch.float32)
                )


def main() -> None:
    for name in sys.argv[1:]:
        globals()[name]()
        print(f"{name} are right")


if __name__ == "__main__":
    main()
