"""All experts of a layer in one tensor of a checkpoint, as gpt-oss has them. Reads them one by one, a rank its part.

    gate_up_proj        (experts, inputs, 2 * width)    columns gate 0, up 0, gate 1, up 1, ...
    gate_up_proj_bias   (experts, 2 * width)            the same
    down_proj           (experts, width, outputs)
    down_proj_bias      (experts, outputs)

Inputs come before outputs, unlike in other matrices. A reader that knows other experts than columns of a tensor, as
mxfp4_weights.py does, gives them by a method `expert`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.layers.weights import QuantizedSource, WeightTarget
from sglang.srt.model_loader.packed_weights import Readable, bounds


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
        for place in range(per_expert):
            targets[expert * per_expert + place].fill(_every(matrix, place, per_expert))


class StackedExpert:
    """(outputs, inputs), or (outputs,), of one expert, as a slice of an open file."""

    def __init__(self, stacked: Readable, expert: int) -> None:
        self._stacked, self._expert = stacked, expert
        # The last part that was read: gate and up alternate in it.
        self._last: tuple[list[tuple[int, int]], torch.Tensor] | None = None

    def get_shape(self) -> list[int]:
        return self._stacked.get_shape()[:0:-1]

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = bounds(index, self.get_shape())
        if self._last is None or self._last[0] != found:
            columns = (slice(*each) for each in reversed(found))
            part = self._stacked[(slice(self._expert, self._expert + 1), *columns)][0]
            self._last = found, part.t()
        return self._last[1]


class _EveryOther:
    """Of the outputs of a matrix, those of a place among `step` that alternate."""

    def __init__(self, matrix: Any, place: int, step: int) -> None:
        self._matrix, self._place, self._step = matrix, place, step

    def get_shape(self) -> list[int]:
        outputs, *inputs = self._matrix.get_shape()
        return [outputs // self._step, *inputs]

    def __getitem__(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self._matrix[self._wider(index)]
        return found[self._place :: self._step]

    def _wider(self, index: Any) -> tuple[slice, ...]:
        (begin, end), *inputs = bounds(index, self.get_shape())
        return (slice(begin * self._step, end * self._step), *(slice(*each) for each in inputs))


class _QuantizedEveryOther(_EveryOther):
    def parts(self, index: tuple[slice, ...], group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `QuantizedSource`."""
        values, scales, zeros = self._matrix.parts(self._wider(index), group)
        which = slice(self._place, None, self._step)
        return values[which], scales[which], None if zeros is None else zeros[which]


def _every(matrix: Any, place: int, step: int) -> Any:
    if step == 1:
        return matrix
    kind = _QuantizedEveryOther if isinstance(matrix, QuantizedSource) else _EveryOther
    return kind(matrix, place, step)
