"""`PackedTensor`: a matrix of 4 or 8 bits a number, several to an int32, as the tools that quantise store it.

    weight = (values - zeros) * scales        for all three, here (outputs, inputs)

              values                  zeros                   scales
    AWQ       (inputs, outputs / 8)   (groups, outputs / 8)   (groups, outputs)
    GPTQ      (inputs / 8, outputs)   (groups, outputs / 8)   (groups, outputs)
    compressed-tensors
              (outputs, inputs / 8)   (outputs / 8, groups)   (outputs, groups)

With 8 bits there are 4 to an int32. The first has the lowest bits; AWQ's order is 0 2 4 6 1 3 5 7. Neighbouring
inputs are a group; where a tool has ordered them by activations, `g_idx` holds each input's group. Without zeros of
their own all are 2 ** (bits - 1).

AWQ: Lin et al. 2023, section 2, and its authors' GEMM kernel. GPTQ: Frantar et al. 2022; `desc_act` is section 3.3's
order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.configs.quantization import Packing, WeightQuantization


class Readable(Protocol):
    """A slice of an open safetensors file."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


class _Layout(NamedTuple):
    """Names of tensors, behind a matrix's own; None: there is none. is_turned: stored (inputs, outputs). packed_dim:
    of the stored values. order: which of its neighbours each number in an int32 is, from the lowest bits on."""

    values: str
    zeros: str
    scales: str
    groups: str | None
    is_turned: bool
    packed_dim: int
    order: tuple[int, ...] | None = None


_LAYOUTS = {
    Packing.AWQ: _Layout(".qweight", ".qzeros", ".scales", None, True, 1, (0, 2, 4, 6, 1, 3, 5, 7)),
    Packing.GPTQ: _Layout(".qweight", ".qzeros", ".scales", ".g_idx", True, 0),
    Packing.COMPRESSED: _Layout(".weight_packed", ".weight_zero_point", ".weight_scale", ".weight_g_idx", False, 1),
}
VALUES = tuple({layout.values for layout in _LAYOUTS.values()})
# What stands beside them.
PARTS = (
    *{suffix for layout in _LAYOUTS.values() for suffix in (layout.zeros, layout.scales, layout.groups) if suffix},
    ".weight_shape",
)


def stem_of(values_name: str) -> str | None:
    """The matrix's own name, without ".weight"; None for a tensor that is not packed."""
    for suffix in VALUES:
        if values_name.endswith(suffix):
            return values_name.removesuffix(suffix)
    return None


class PackedTensor:
    """As a slice of an open file. group: inputs that share a scale and a zero."""

    def __init__(
        self,
        name: str,
        values: Readable,
        quantization: WeightQuantization,
        tensor: Callable[[str], torch.Tensor | None],
    ) -> None:
        """name: of the stored values. tensor: by name, None if there is none. Raises ModelConfigError if one is not
        there or does not fit."""
        assert quantization.packing is not None
        self._name = name
        self._values = values
        self._bits = quantization.bits
        self._layout = layout = _LAYOUTS[quantization.packing]
        shape = values.get_shape()
        if len(shape) != 2 or values[:1].dtype != torch.int32:
            raise ModelConfigError(f"{name!r} holds packed numbers, but is no matrix of int32.")
        shape[layout.packed_dim] *= self._per_word
        self._shape = shape[::-1] if layout.is_turned else shape
        inputs = self._shape[1]
        self.group = quantization.block[1] if quantization.block else inputs
        stem = name.removesuffix(layout.values)

        def needed(suffix: str) -> torch.Tensor:
            found = tensor(f"{stem}{suffix}")
            if found is None:
                raise ModelConfigError(f"There is no {stem + suffix!r} beside {name!r}.")
            return found

        # Both (outputs, groups).
        self._scales = self._fitting("scales", needed(layout.scales), 1).float()
        if quantization.has_zeros or quantization.packing != Packing.COMPRESSED:
            self._zeros = self._unpacked_zeros(needed(layout.zeros), quantization.zero_offset)
        else:
            self._zeros = torch.full(self._scales.shape, 1 << (self._bits - 1), dtype=self._dtype)
        groups = tensor(f"{stem}{layout.groups}") if layout.groups is not None else None
        # Of each input; None where those of a group are neighbours.
        self._group_of = None if groups is None else self._ordered(groups)

    @property
    def _per_word(self) -> int:
        return 32 // self._bits

    @property
    def _dtype(self) -> torch.dtype:
        """Takes differences, too."""
        return torch.int8 if self._bits == 4 else torch.int16

    def get_shape(self) -> list[int]:
        """Outputs and inputs."""
        return list(self._shape)

    def parts(self, index: Any, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `QuantizedSource`; 8 bits have no zeros. Raises ModelConfigError where config.json promised it."""
        outputs, inputs = bounds(index, self._shape)
        has_one = self._scales.shape[1] == 1  # a rank's part of the inputs has it, too
        assert has_one or (group == self.group and not inputs[0] % group)
        if self._group_of is not None:
            raise ModelConfigError(f"The groups of {self._name!r} are not of neighbours, as config.json has it.")
        groups = slice(1) if has_one else slice(inputs[0] // group, -(-inputs[1] // group))
        values, scales = self._read(outputs, inputs), self._scales[slice(*outputs), groups]
        zeros = self._zeros[slice(*outputs), groups]
        if self._bits == 4:
            return values, scales, zeros
        if not bool((zeros == 128).all()):
            raise ModelConfigError(f"The zeros of {self._name!r} are not 128, as config.json has it.")
        return (values - 128).to(torch.int8), scales, None

    def __getitem__(self, index: Any) -> torch.Tensor:
        """float32."""
        outputs, inputs = bounds(index, self._shape)
        values = self._read(outputs, inputs)
        zeros, scales = self._zeros[slice(*outputs)], self._scales[slice(*outputs)]
        # Both as the values lie in the file: turned around this would take several times as long.
        found = torch.empty_like(values, dtype=torch.float32)
        if self._group_of is not None:
            of = self._group_of[slice(*inputs)]
            return torch.mul(values - zeros[:, of], scales[:, of], out=found)
        for i in range(inputs[0] // self.group, -(-inputs[1] // self.group)):
            begin = max(i * self.group - inputs[0], 0)
            columns = slice(begin, (i + 1) * self.group - inputs[0])
            torch.mul(values[:, columns] - zeros[:, i : i + 1], scales[:, i : i + 1], out=found[:, columns])
        return found

    def _read(self, outputs: tuple[int, int], inputs: tuple[int, int]) -> torch.Tensor:
        """(outputs, inputs), turned where the file has it so."""
        dim, per_word = self._layout.packed_dim, self._per_word
        ranges = [inputs, outputs] if self._layout.is_turned else [outputs, inputs]
        begin, end = ranges[dim]
        ranges[dim] = (begin // per_word, -(-end // per_word))
        words = self._values[tuple(slice(*each) for each in ranges)]
        values = self._unpacked(words, dim).narrow(dim, begin % per_word, end - begin)
        return values.t() if self._layout.is_turned else values

    def _unpacked(self, words: torch.Tensor, dim: int) -> torch.Tensor:
        """words: int32, with several numbers along dim."""
        per_word = self._per_word
        found = torch.empty(*words.shape[: dim + 1], per_word, *words.shape[dim + 1 :], dtype=self._dtype)
        for i, place in enumerate(self._layout.order or range(per_word)):
            found.select(dim + 1, place).copy_((words >> (self._bits * i)) & ((1 << self._bits) - 1))
        return found.flatten(dim, dim + 1)

    def _unpacked_zeros(self, words: torch.Tensor, offset: int) -> torch.Tensor:
        if words.dtype != torch.int32:
            raise ModelConfigError(f"The zeros of {self._name!r} have the type {words.dtype}, not int32.")
        words = self._fitting("zeros", words, self._per_word)
        # Of outputs in all layouts. One less than 0 has all bits.
        return (self._unpacked(words, 0)[: self._shape[0]] + offset) & ((1 << self._bits) - 1)

    def _fitting(self, what: str, tensor: torch.Tensor, per_word: int) -> torch.Tensor:
        """(outputs / per_word, groups)."""
        outputs, inputs = self._shape
        wanted = (-(-outputs // per_word), -(-inputs // self.group))
        stored = wanted[::-1] if self._layout.is_turned else wanted
        if tuple(tensor.shape) != stored:
            raise ModelConfigError(
                f"The {what} of {self._name!r} have the shape {tuple(tensor.shape)}; {inputs} inputs in groups of "
                f"{self.group} and {outputs} outputs have {stored}."
            )
        return tensor.t() if self._layout.is_turned else tensor

    def _ordered(self, groups: torch.Tensor) -> torch.Tensor | None:
        """None where they are of neighbours."""
        inputs, num_groups = self._shape[1], self._scales.shape[1]
        if bool((groups == -1).all()):
            return None  # as older compressed-tensors leave it where no order was found
        if tuple(groups.shape) != (inputs,) or not bool(((groups >= 0) & (groups < num_groups)).all()):
            raise ModelConfigError(
                f"The groups of the inputs of {self._name!r} are not {inputs} numbers from 0 to {num_groups - 1}."
            )
        are_neighbours = torch.equal(groups.long(), torch.arange(inputs) // self.group)
        return None if are_neighbours else groups.long()


def bounds(index: Any, shape: list[int]) -> list[tuple[int, int]]:
    """Where the slices of an index begin and end, for all dimensions."""
    given = index if isinstance(index, tuple) else (index,)
    slices = [*given, *[slice(None)] * (len(shape) - len(given))]
    return [each.indices(size)[:2] for each, size in zip(slices, shape, strict=True)]
