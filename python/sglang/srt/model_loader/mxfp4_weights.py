"""`Mxfp4Tensor`: the experts of a layer of 4 bits a number, as gpt-oss's published checkpoints store them.

    <name>_blocks   (experts, outputs, inputs / 32, 16) uint8   two numbers each, the first in the lower 4 bits
    <name>_scales   (experts, outputs, inputs / 32)     uint8   the exponent of a power of two, plus 127

    weight = value * 2 ** (scale - 127)

A number is an e2m1 float: OCP Microscaling Formats specification 1.0 (2023), sections 5.3.3 and 5.4.1. `<name>` is
the tensor's without quantization, which is (experts, inputs, outputs): see stacked_experts.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from sgl_kernel.quantized import E2M1_VALUES
from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.configs.quantization import MXFP4_GROUP
from sglang.srt.model_loader.packed_weights import Readable, bounds

BLOCKS, SCALES = "_proj_blocks", "_proj_scales"
_BYTES = MXFP4_GROUP // 2
# The number of each code.
_NUMBERS = torch.tensor((*E2M1_VALUES, *(-each for each in E2M1_VALUES)))
# Both numbers of each byte, the first one first.
_PAIRS = torch.stack((_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)), dim=1)
_POWERS = torch.tensor((*(2.0 ** (byte - 127) for byte in range(255)), math.nan))


class Mxfp4Tensor:
    """As a slice of an open file, of the tensor without quantization."""

    def __init__(self, name: str, blocks: Readable, scales: torch.Tensor) -> None:
        """name: of the blocks. Raises ModelConfigError if they do not fit."""
        shape = blocks.get_shape()
        if len(shape) != 4 or shape[3] != _BYTES or blocks[:1, :1].dtype != torch.uint8:
            raise ModelConfigError(
                f"{name!r} has the shape {tuple(shape)}, and blocks of mxfp4 are uint8 of (experts, outputs, groups, "
                f"{_BYTES})."
            )
        if list(scales.shape) != shape[:3] or scales.dtype != torch.uint8:
            raise ModelConfigError(
                f"The scales of {name!r} are {str(scales.dtype).removeprefix('torch.')} of the shape "
                f"{tuple(scales.shape)}, and have to be uint8 of {tuple(shape[:3])}."
            )
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        experts, outputs, groups, _ = self._blocks.get_shape()
        return [experts, groups * MXFP4_GROUP, outputs]

    def expert(self, number: int) -> Mxfp4Matrix:
        return Mxfp4Matrix(self._blocks, self._scales, number)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """float32."""
        experts, inputs, outputs = bounds(index, self.get_shape())
        part = slice(*outputs), slice(*inputs)
        return torch.stack([self.expert(number)[part].t() for number in range(*experts)])


class Mxfp4Matrix:
    """One expert's, (outputs, inputs)."""

    def __init__(self, blocks: Readable, scales: torch.Tensor, expert: int) -> None:
        self._blocks, self._scales, self._expert = blocks, scales, expert

    def get_shape(self) -> list[int]:
        _, outputs, groups, _ = self._blocks.get_shape()
        return [outputs, groups * MXFP4_GROUP]

    def parts(self, index: Any, group: int) -> tuple[torch.Tensor, torch.Tensor, None]:
        """See `QuantizedSource`. Values are codes from 0 to 15, uint8, of `E2M1_VALUES` and their negatives."""
        outputs, inputs = bounds(index, self.get_shape())
        assert group == MXFP4_GROUP and not inputs[0] % group and not inputs[1] % group
        packed, scales = self._read(outputs, inputs)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1)
        return codes.flatten(1), scales, None

    def __getitem__(self, index: Any) -> torch.Tensor:
        """float32."""
        outputs, inputs = bounds(index, self.get_shape())
        packed, scales = self._read(outputs, inputs)
        numbers = _PAIRS.index_select(0, packed.flatten().int()).view(*scales.shape, MXFP4_GROUP)
        return numbers.mul_(scales[..., None]).flatten(1).narrow(1, inputs[0] % MXFP4_GROUP, inputs[1] - inputs[0])

    def _read(self, outputs: tuple[int, int], inputs: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the groups in which the inputs lie: bytes, (outputs, groups, 16), and factors, (outputs, groups)."""
        groups = slice(inputs[0] // MXFP4_GROUP, -(-inputs[1] // MXFP4_GROUP))
        part = slice(self._expert, self._expert + 1), slice(*outputs), groups
        scales = self._scales[part][0]
        return self._blocks[(*part, slice(None))][0], _POWERS.index_select(0, scales.flatten().int()).view_as(scales)
