"""Matrices of 8 and 4 bits a value, and products with them.

`QuantizedMatrix` owns the values and their scales. On a GPU few rows are multiplied by a Triton kernel, which reads
the stored values and nothing else. For more rows, where a product computes longer than it reads, and everywhere else
the matrix is dequantised first. That also defines the result: each value in float32, rounded once to x's data type.
The kernel rounds less often.

    8 bits    weight = values * scales                values (outputs, inputs): float8_e4m3fn or int8
    4 bits    weight = (values - zeros) * scales      values (outputs, inputs / 2): uint8, of two the lower bits first
    e2m1      weight = values * 2 ** (scales - 127)   values as of 4 bits

e2m1 has a sign, two bits of exponent and one of mantissa. With its scales it is MXFP4: Open
Compute Project, Microscaling Formats, version 1.0 (2023), sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F

from sgl_kernel.triton_modules import triton_module

# Above so many rows a product computes longer than it reads, and a library's kernel does that better.
MOST_ROWS = 256
# The kernel's step along the inputs is a part of a group.
LEAST_GROUP = 32
FOUR_BITS = torch.uint8
E2M1 = torch.float4_e2m1fn_x2
# What e2m1's numbers from 0 to 7 mean; 8 to 15 are their negatives.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of a power of two in a byte, and the byte that is NaN.
_EXPONENT_BIAS, E2M1_NAN = 127, 255


@dataclass(frozen=True)
class MatrixFormat:
    """dtype: of the values; `FOUR_BITS` and `E2M1` have two in a byte. group: inputs of an output that share a scale;
    0: all."""

    dtype: torch.dtype
    group: int = 0

    @property
    def is_packed(self) -> bool:
        return self.dtype in (FOUR_BITS, E2M1)


@dataclass(frozen=True)
class QuantizedMatrix:
    """values: see above. scales: (outputs, groups) float32, of e2m1 uint8. zeros: (outputs, groups) uint8, for 4 bits
    that are no e2m1."""

    format: MatrixFormat
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    @classmethod
    def empty(cls, format: MatrixFormat, outputs: int, inputs: int) -> QuantizedMatrix:
        """inputs: a multiple of the group, and even for 4 bits."""
        groups = inputs // format.group if format.group else 1
        assert not format.group or groups * format.group == inputs, f"{inputs} inputs in groups of {format.group}"
        values = (inputs // 2, torch.uint8) if format.is_packed else (inputs, format.dtype)
        return cls(
            format,
            torch.empty(outputs, values[0], dtype=values[1]),
            torch.empty(outputs, groups, dtype=torch.uint8 if format.dtype == E2M1 else torch.float32),
            torch.empty(outputs, groups, dtype=torch.uint8) if format.dtype == FOUR_BITS else None,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, columns = self.values.shape
        return outputs, 2 * columns if self.format.is_packed else columns

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        found = {"values": self.values, "scales": self.scales}
        return found if self.zeros is None else found | {"zeros": self.zeros}

    def outputs(self, begin: int, size: int) -> QuantizedMatrix:
        """Some of them, the same memory."""
        values, scales, *zeros = (tensor[begin : begin + size] for tensor in self.tensors.values())
        return QuantizedMatrix(self.format, values, scales, zeros[0] if zeros else None)

    def inputs(self, size: int) -> QuantizedMatrix:
        """The first ones, whole groups, the same memory."""
        whole = self.shape[1]
        tensors = [t[:, : t.shape[1] * size // whole] for t in self.tensors.values()]
        if self.scales.shape[1] == 1:
            tensors[1:] = list(self.tensors.values())[1:]
        values, scales, *zeros = tensors
        return QuantizedMatrix(self.format, values, scales, zeros[0] if zeros else None)

    def clear(self) -> None:
        """All values become 0."""
        for tensor in self.tensors.values():
            tensor.zero_()

    def take(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        """values: (outputs, inputs), of 4 bits one in each. scales, zeros: (outputs, groups), or (outputs, 1). Scales
        of e2m1 are powers of two."""
        if self.format.is_packed:
            low, high = values.to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
            values = low | (high << 4)
        self.values.copy_(values)
        if self.format.dtype == E2M1:
            exponents = torch.frexp(scales.float()).exponent + (_EXPONENT_BIAS - 1)
            scales = exponents.masked_fill_(~scales.isfinite(), E2M1_NAN)
        self.scales.copy_(scales)
        if self.zeros is not None:
            assert zeros is not None
            self.zeros.copy_(zeros)

    def quantize(self, weight: torch.Tensor) -> None:
        """weight: (outputs, inputs) of floats. Each group's largest value gets the largest that can be stored; of
        e2m1, whose scales are powers of two, that or up to a quarter less (section 6.3 there)."""
        groups = weight.float().unflatten(1, (self.scales.shape[1], -1))
        if self.format.dtype == FOUR_BITS:
            low, high = groups.amin(2).clamp(max=0.0), groups.amax(2).clamp(min=0.0)
            scales = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
            zeros = (-low / scales).round()
            values = ((groups / scales.unsqueeze(2)).round() + zeros.unsqueeze(2)).clamp(0, 15)
            self.take(values.flatten(1), scales, zeros)
            return
        if self.format.dtype == E2M1:
            # The largest number has the exponent 2, and `frexp` one more than the floor of a logarithm.
            exponents = (torch.frexp(groups.abs().amax(2)).exponent - 3).clamp(1 - _EXPONENT_BIAS, _EXPONENT_BIAS)
            scales = torch.ldexp(torch.ones(exponents.shape, device=weight.device), exponents)
            means = torch.tensor(E2M1_VALUES, device=weight.device)
            numbers = torch.bucketize((groups.abs() / scales.unsqueeze(2)).flatten(1), (means[1:] + means[:-1]) / 2)
            self.take(numbers + 8 * (groups < 0).flatten(1), scales, None)
            return
        is_int = self.format.dtype == torch.int8
        most = 127.0 if is_int else torch.finfo(self.format.dtype).max
        scales = (groups.abs().amax(2) / most).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = (groups / scales.unsqueeze(2)).clamp(-most, most).flatten(1)
        self.take(scaled.round() if is_int else scaled, scales, None)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """(outputs, inputs), a new tensor."""
        kernels = _kernels(self.values)
        if kernels is not None and dtype in kernels.DTYPES and self.group % LEAST_GROUP == 0:
            return kernels.dequantized(self, dtype)  # type: ignore[no-any-return]
        values, scales = self.values, self.scales
        if self.format.is_packed:
            values = torch.stack((values & 15, values >> 4), dim=2)
        if self.format.dtype == E2M1:
            means = torch.tensor(E2M1_VALUES, device=values.device)
            values = torch.cat((means, -means))[values.long()]
            scales = (scales.int() << 23).view(torch.float32)
        groups = values.reshape(*self.scales.shape, -1).float()
        if self.zeros is not None:
            groups = groups - self.zeros.unsqueeze(2)
        return (groups * scales.unsqueeze(2)).to(dtype).flatten(1)


def linear(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: (num_rows, inputs). Returns x @ weight.T + bias, (num_rows, outputs) in x's data type."""
    if not x.shape[0]:
        return x.new_empty(0, matrix.shape[0])
    kernels = _kernels(x)
    if kernels is None or x.dtype not in kernels.DTYPES or x.shape[0] > MOST_ROWS or matrix.group % LEAST_GROUP:
        return F.linear(x, matrix.dequantized(x.dtype), bias)
    return kernels.linear(x, matrix, bias)  # type: ignore[no-any-return]


def _kernels(x: torch.Tensor) -> ModuleType | None:
    return triton_module(f"{__name__}.triton_kernels") if x.is_cuda else None
