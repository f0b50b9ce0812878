"""`WeightTarget`: the place of a checkpoint's tensor, and `QuantizedTarget` of one that stays quantised. Own nothing;
layers make targets, the loader fills them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from sgl_kernel.quantized import E2M1, E2M1_NAN, QuantizedMatrix


@runtime_checkable
class QuantizedSource(Protocol):
    """A checkpoint's matrix that is quantised."""

    def parts(self, index: tuple[slice, ...], group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Values, scales and zeros as `QuantizedMatrix.take` has them. group: inputs that share a scale."""
        ...


@dataclass(frozen=True)
class WeightTarget:
    """shape: the tensor's, in the checkpoint. tensor: the parameter, or the part of one, that takes it. Its shape is
    the same except along `dim`, where it takes the entries from `start` on; entries beyond the checkpoint's end are
    padding. A tensor with more dimensions than `shape` takes it broadcast."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> WeightTarget:
        return cls(tensor, tuple(tensor.shape))

    @property
    def is_whole(self) -> bool:
        return self.tensor.dim() != len(self.shape) or self.tensor.shape == self.shape

    @property
    def num_read(self) -> int:
        """Entries along `dim` that come from the checkpoint."""
        if self.tensor.dim() != len(self.shape):
            return self.shape[self.dim]
        return max(0, min(self.tensor.shape[self.dim], self.shape[self.dim] - self.start))

    def index(self, offset: int = 0) -> tuple[slice, ...]:
        """An index into the checkpoint's tensor. offset: where the part for this target begins in a tensor that holds
        several parts, one below the other."""
        assert self.dim == 0 or offset == 0
        begin = offset + self.start
        return (*(slice(None) for _ in range(self.dim)), slice(begin, begin + self.num_read))

    def fill(self, source: Any, offset: int = 0) -> None:
        """source: the checkpoint's tensor, or an object that gives tensors when it is indexed. Padding becomes 0."""
        if self.is_whole:
            self.tensor.copy_(source[self.index(offset)])
            return
        if self.num_read:
            self.tensor.narrow(self.dim, 0, self.num_read).copy_(source[self.index(offset)])
        self.tensor.narrow(self.dim, self.num_read, self.tensor.shape[self.dim] - self.num_read).zero_()

    def extremes(self) -> list[torch.Tensor]:
        """As the function, of all that the target holds."""
        return extremes(self.tensor)


@dataclass(frozen=True)
class QuantizedTarget(WeightTarget):
    """matrix: takes the part of the checkpoint's. tensor: its scales, for device and data type."""

    matrix: QuantizedMatrix = field(kw_only=True)

    @classmethod
    def of(cls, matrix: QuantizedMatrix, shape: tuple[int, int], dim: int, start: int) -> QuantizedTarget:
        return cls(matrix.scales, shape, dim, start, matrix=matrix)

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def num_read(self) -> int:
        return max(0, min(self.matrix.shape[self.dim], self.shape[self.dim] - self.start))

    def fill(self, source: Any, offset: int = 0) -> None:
        """What is not quantised yet is. Padding means 0."""
        index, matrix, num_read = self.index(offset), self.matrix, self.num_read
        if num_read < matrix.shape[self.dim]:
            matrix.clear()
            matrix = matrix.inputs(num_read) if self.dim else matrix.outputs(0, num_read)
        if not num_read:
            return
        if isinstance(source, QuantizedSource):
            matrix.take(*source.parts(index, self.matrix.group))
        else:
            matrix.quantize(source[index].to(matrix.scales.device))

    def extremes(self) -> list[torch.Tensor]:
        if self.matrix.format.dtype == E2M1:
            return [torch.where(self.matrix.scales.amax() == E2M1_NAN, torch.nan, 0.0)]
        found, values = extremes(self.matrix.scales), self.matrix.values
        if values.dtype == torch.float8_e4m3fn and values.numel():
            # NaN has the bytes 0x7f and 0xff, each the largest in one of two readings.
            has_nan = (values.view(torch.int8).amax() == 0x7F) | (values.view(torch.uint8).amax() == 0xFF)
            found.append(torch.where(has_nan, torch.nan, 0.0))
        return found


def extremes(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The least and the largest number, or NaN if there is one: on the tensor's device, which is not waited for."""
    return list(torch.aminmax(tensor)) if tensor.numel() else []
