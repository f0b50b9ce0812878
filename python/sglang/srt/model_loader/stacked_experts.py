"""All experts of a layer in one tensor of a checkpoint, as gpt-oss has them. Reads them one by one, a rank its part.

    gate_up_proj        (experts, inputs, 2 * width)    columns gate 0, up 0, gate 1, up 1, ...
    gate_up_proj_bias   (experts, 2 * width)            the same
    down_proj           (experts, width, outputs)
    down_proj_bias      (experts, outputs)

Inputs come before outputs, unlike in other matrices. A reader that knows other experts than columns of a tensor, as
mxfp4_weights.py does, gives them by a method `expert`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.layers.weights import QuantizedSource, WeightTarget
from sglang.srt.model_loader.packed_weights import Readable, bounds

T = TypeVar("T")
# As of `QuantizedSource`.
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def fill_stacked(
    name: str, source: Readable, targets: Sequence[WeightTarget], num_experts: int, config_name: str
) -> None:
    """targets: of an expert, one or two, whose outputs alternate, for each expert. Raises ModelConfigError if they do
    not fit; name, config_name: for that."""
    shape, per_expert = tuple(source.get_shape()), len(targets) // num_experts
    outputs, *inputs = targets[0].shape
    wanted = (num_experts, *inputs, per_expert * outputs)
    if shape != wanted:
        raise ModelConfigError(f"{name!r} has the shape {shape}, but {config_name} asks for {wanted}.")
    for expert in range(num_experts):
        matrix = source.expert(expert) if hasattr(source, "expert") else StackedExpert(source, expert)
        own = targets[expert * per_expert :][:per_expert]
        for target, of_target in zip(own, alternating(matrix, per_expert), strict=True):
            target.fill(of_target)


class StackedExpert:
    """(outputs, inputs), or (outputs,), of one expert, as a slice of an open file."""

    def __init__(self, stacked: Readable, expert: int) -> None:
        self._stacked, self._expert = stacked, expert

    def get_shape(self) -> list[int]:
        return self._stacked.get_shape()[:0:-1]

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = (slice(*each) for each in reversed(bounds(index, self.get_shape())))
        return self._stacked[(slice(self._expert, self._expert + 1), *part)][0].t()


def alternating(matrix: Any, number: int) -> list[Any]:
    """So many matrices whose outputs alternate in one. matrix: as a slice of an open file, and a `QuantizedSource` if
    they are to be such."""
    if number == 1:
        return [matrix]
    read = _LastRead(matrix.__getitem__)
    if isinstance(matrix, QuantizedSource):
        read_parts = _LastRead(matrix.parts)
        return [_QuantizedEveryOther(matrix, read, read_parts, place, number) for place in range(number)]
    return [_EveryOther(matrix, read, place, number) for place in range(number)]


class _LastRead(Generic[T]):
    """Keeps what was read last of a matrix: each part is asked for once by gate and once by up."""

    def __init__(self, read: Callable[..., T]) -> None:
        self._read = read
        self._last: tuple[tuple[Any, ...], T] | None = None

    def __call__(self, *asked: Any) -> T:
        if self._last is None or self._last[0] != asked:
            self._last = asked, self._read(*asked)
        return self._last[1]


class _EveryOther:
    """Of the outputs of a matrix, those of a place among `step` that alternate."""

    def __init__(self, matrix: Any, read: _LastRead[torch.Tensor], place: int, step: int) -> None:
        self._matrix, self._read, self._place, self._step = matrix, read, place, step

    def get_shape(self) -> list[int]:
        outputs, *inputs = self._matrix.get_shape()
        return [outputs // self._step, *inputs]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read(self._wider(index))[self._place :: self._step]

    def _wider(self, index: Any) -> tuple[slice, ...]:
        (begin, end), *inputs = bounds(index, self.get_shape())
        return (slice(begin * self._step, end * self._step), *(slice(*each) for each in inputs))


class _QuantizedEveryOther(_EveryOther):
    def __init__(
        self, matrix: Any, read: _LastRead[torch.Tensor], read_parts: _LastRead[Parts], place: int, step: int
    ) -> None:
        super().__init__(matrix, read, place, step)
        self._read_parts = read_parts

    def parts(self, index: tuple[slice, ...], group: int) -> Parts:
        """See `QuantizedSource`."""
        values, scales, zeros = self._read_parts(self._wider(index), group)
        which = slice(self._place, None, self._step)
        return values[which], scales[which], None if zeros is None else zeros[which]
