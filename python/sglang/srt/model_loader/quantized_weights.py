"""`QuantizedWeights`: the matrices of a quantised checkpoint, dequantised when they are read, or as they are stored.

Owns the decision which of both, `pick_weight_format`, and what is quantised when it is read. Names are those of the
same checkpoint without quantization: `x.weight` stands for `x.weight` with `x.weight_scale` (or `_scale_inv`), or for
AWQ's `x.qweight`, `x.qzeros` and `x.scales`. A part of a matrix costs the time and memory of that part alone. Scales
of activations are not used: activations keep the model's data type.

    fp8, int8    weight = values * scale                           values (outputs, inputs)
    awq          weight = ((values - zeros) * scales) transposed   values (inputs, outputs), eight in an int32

AWQ: Lin et al. 2023, section 2; the order of the eight is that of its authors' GEMM kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from sgl_kernel.quantized import FOUR_BITS, LEAST_GROUP, MatrixFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import NATIVE
from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.configs.quantization import UNUSED, WeightQuantization
from sglang.srt.model_loader.non_finite import check_scales
from sglang.srt.utils.device import has_e4m3

logger = logging.getLogger(__name__)

_SCALES = (".weight_scale", ".weight_scale_inv")
_PACKED, _ZEROS, _PACKED_SCALES = ".qweight", ".qzeros", ".scales"
# Of eight numbers of 4 bits, the lowest first: which column of eight each is.
_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


class Readable(Protocol):
    """A slice of an open safetensors file."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


def pick_weight_format(
    config: ModelConfig, names: Iterable[str], num_ranks: int, device: torch.device
) -> MatrixFormat | None:
    """How decoder layers keep their matrices: as the checkpoint has them, on a GPU that computes with it. None for
    the model's data type: where no kernel reads them, or where some are not quantised. names: of the checkpoint's
    tensors; none for made-up weights. Logs what it picks."""
    stored = config.quantization
    assert stored is not None, "asked of a quantised checkpoint"
    group = 0 if stored.block is None else stored.block[1]
    reason = _reason_to_dequantize(config, stored, frozenset(names), num_ranks, device)
    if reason is not None:
        logger.info("quantized weights are kept in %s: %s", str(config.dtype).removeprefix("torch."), reason)
        return None
    dtype = FOUR_BITS if stored.is_awq else torch.int8 if stored.is_int else torch.float8_e4m3fn
    logger.info("weights of decoder layers are kept in %d bits", 4 if stored.is_awq else 8)
    return MatrixFormat(dtype, group)


def format_asked(config: ModelConfig, asked: str, num_ranks: int, device: torch.device) -> MatrixFormat:
    """How decoder layers keep the matrices of a checkpoint that is not quantised: e4m3, with a scale for each output
    of a rank's part. asked: as of --quantization. Raises ModelConfigError if that cannot be."""
    if asked != "fp8":
        raise ModelConfigError(
            f"--quantization {asked}: the checkpoint is not quantized; leave the flag out, or use fp8."
        )
    if config.model_impl != NATIVE:
        raise ModelConfigError("--quantization fp8 is for models with a native implementation; leave it out.")
    reason = _reason_to_dequantize(config, WeightQuantization(), frozenset(), num_ranks, device)
    if reason is not None:
        raise ModelConfigError(f"--quantization fp8 cannot be used here: {reason}; leave it out.")
    logger.info("weights of decoder layers are quantized to fp8")
    return MatrixFormat(torch.float8_e4m3fn)


def _reason_to_dequantize(
    config: ModelConfig,
    stored: WeightQuantization,
    names: frozenset[str],
    num_ranks: int,
    device: torch.device,
) -> str | None:
    if device.type != "cuda":
        return "on a CPU there is no faster kernel"
    if config.dtype not in (torch.bfloat16, torch.float16):
        return "kernels are for bfloat16 and float16"
    if not (stored.is_awq or stored.is_int or has_e4m3(device)):
        return "this GPU does not compute with e4m3"
    if stored.is_awq and stored.block is None:
        return "the kernel is for groups of inputs"
    group = LEAST_GROUP if stored.block is None else stored.block[1]
    heads = config.num_heads * config.head_dim
    for inputs in (config.hidden_size, heads // num_ranks, config.intermediate_size // num_ranks):
        if inputs % group or group % LEAST_GROUP:
            return f"{inputs} inputs do not divide into groups of {group}"
    for name in names:
        if name.endswith("_proj.weight") and not any(
            name.removesuffix(".weight") + suffix in names for suffix in _SCALES
        ):
            return f"{name} is not quantized"
    return None


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """The names without quantization -> those of the tensors that hold the values."""
    held = {}
    for name in names:
        if name.endswith((*_SCALES, *UNUSED, _ZEROS, _PACKED_SCALES)):
            continue
        held[name.removesuffix(_PACKED) + ".weight" if name.endswith(_PACKED) else name] = name
    return held


class QuantizedWeights:
    """As an open safetensors file. files: the checkpoint's tensors -> where each is. read: a whole one of them; None
    if there is none."""

    def __init__(
        self,
        file: Any,
        quantization: WeightQuantization,
        files: Mapping[str, Path],
        read: Callable[[str], torch.Tensor | None],
    ) -> None:
        self._file = file
        self._quantization = quantization
        self._files = files
        self._read = read
        self._held: Mapping[str, str] = plain_names(file.keys())

    def keys(self) -> list[str]:
        return list(self._held)

    def get_slice(self, name: str) -> Readable:
        """Raises ModelConfigError if its scales are not there, do not fit or are no scales."""
        held = self._held[name]
        values = self._file.get_slice(held)
        stem = name.removesuffix(".weight")
        if held.endswith(_PACKED):
            _check_matrix(held, values, torch.int32, "is AWQ's")
            zeros, scales = (self._needed(stem + suffix, held) for suffix in (_ZEROS, _PACKED_SCALES))
            check_scales(stem + _PACKED_SCALES, self._files[stem + _PACKED_SCALES], scales, may_be_any=True)
            block = self._quantization.block
            return PackedTensor(held, values, zeros, scales, block[1] if block else values.get_shape()[0])
        scale_name = next((stem + suffix for suffix in _SCALES if stem + suffix in self._files), None)
        if name.endswith(".weight") and scale_name is not None:
            scale = self._needed(scale_name, held)
            wanted = torch.int8 if self._quantization.is_int else torch.float8_e4m3fn
            _check_matrix(held, values, wanted, "has a scale beside it")
            check_scales(scale_name, self._files[scale_name], scale, may_be_any=False)
            return ScaledTensor(held, values, scale, self._quantization.block)
        if values.get_shape() and values[:1].dtype.itemsize == 1:
            raise ModelConfigError(f"{held!r} has 8 bits a value, and there is no {stem + _SCALES[0]!r} beside it.")
        return values  # type: ignore[no-any-return]

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[:]

    def _needed(self, name: str, held: str) -> torch.Tensor:
        tensor = self._read(name)
        if tensor is None:
            raise ModelConfigError(f"There is no {name!r} beside {held!r}.")
        return tensor


class ScaledTensor:
    """values: (outputs, inputs) of 8 bits. scale: of the whole matrix, one or none of dimensions; of each output,
    (outputs,) or (outputs, 1); or of each block of outputs and inputs, (blocks, blocks)."""

    def __init__(self, name: str, values: Readable, scale: torch.Tensor, block: tuple[int, int] | None) -> None:
        self._values = values
        rows, columns = values.get_shape()
        if block is None:
            block = (rows if scale.numel() == 1 else 1, columns)
        self._block = block
        wanted = (-(-rows // block[0]), -(-columns // block[1]))
        if scale.numel() != wanted[0] * wanted[1] or (scale.dim() == 2 and tuple(scale.shape) != wanted):
            raise ModelConfigError(
                f"The scale of {name!r} has the shape {tuple(scale.shape)}; a matrix of {rows} by {columns} in "
                f"blocks of {block[0]} by {block[1]} has {wanted}."
            )
        self._scale = scale.float().reshape(wanted)

    def get_shape(self) -> list[int]:
        return self._values.get_shape()

    def parts(self, index: Any, group: int) -> tuple[torch.Tensor, torch.Tensor, None]:
        """See `QuantizedSource`."""
        rows, columns = _bounds(index, self.get_shape())
        scales = self._scale[torch.arange(*rows) // self._block[0]]
        if scales.shape[1] > 1:
            assert group == self._block[1] and not columns[0] % group
            scales = scales[:, columns[0] // group : -(-columns[1] // group)]
        return self._values[slice(*rows), slice(*columns)], scales, None

    def __getitem__(self, index: Any) -> torch.Tensor:
        """float32."""
        rows, columns = _bounds(index, self.get_shape())
        of_rows = self._scale[torch.arange(*rows) // self._block[0]]
        # One for all inputs goes to each by itself.
        scale = of_rows if of_rows.shape[1] == 1 else of_rows[:, torch.arange(*columns) // self._block[1]]
        return self._values[slice(*rows), slice(*columns)].float() * scale


@dataclass(frozen=True)
class PackedTensor:
    """values: (inputs, outputs / 8), zeros: (groups, outputs / 8) int32. scales: (groups, outputs). group: inputs
    that share a zero and a scale."""

    name: str
    values: Readable
    zeros: torch.Tensor
    scales: torch.Tensor
    group: int

    def __post_init__(self) -> None:
        outputs, inputs = self.get_shape()
        groups = -(-inputs // self.group)
        for what, tensor, wanted in (
            ("zeros", self.zeros, (groups, outputs // 8)),
            ("scales", self.scales, (groups, outputs)),
        ):
            if what == "zeros" and tensor.dtype != torch.int32:
                raise ModelConfigError(f"The zeros of {self.name!r} have the type {tensor.dtype}, not int32.")
            if tuple(tensor.shape) != wanted:
                raise ModelConfigError(
                    f"The {what} of {self.name!r} have the shape {tuple(tensor.shape)}; {inputs} inputs in groups of "
                    f"{self.group} and {outputs} outputs have {wanted}."
                )

    def get_shape(self) -> list[int]:
        inputs, words = self.values.get_shape()
        return [8 * words, inputs]

    def parts(self, index: Any, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `QuantizedSource`."""
        (begin, end), inputs = _bounds(index, self.get_shape())
        assert group == self.group and not inputs[0] % group
        words, groups = slice(begin // 8, -(-end // 8)), slice(inputs[0] // group, -(-inputs[1] // group))
        outputs = slice(begin - 8 * words.start, end - 8 * words.start)
        values = _unpacked(self.values[slice(*inputs), words])[:, outputs].t()
        zeros = _unpacked(self.zeros[groups, words])[:, outputs].t()
        return values, self.scales[groups, begin:end].float().t(), zeros

    def __getitem__(self, index: Any) -> torch.Tensor:
        """float32."""
        (begin, end), inputs = _bounds(index, self.get_shape())
        # From the border of a group on.
        first = inputs[0] // self.group * self.group
        stored = self.parts((slice(begin, end), slice(first, inputs[1])), self.group)
        # Computed as it lies in the file, group by group: turned around it would take several times as long.
        values, scales, zeros = (part.t() for part in stored)
        found = torch.empty(values.shape, dtype=torch.float32)
        for i in range(len(scales)):
            rows = slice(i * self.group, (i + 1) * self.group)
            torch.mul(values[rows] - zeros[i], scales[i], out=found[rows])
        return found[inputs[0] - first :].t()


def _check_matrix(name: str, values: Readable, dtype: torch.dtype, what: str) -> None:
    if len(values.get_shape()) != 2 or values[:1].dtype != dtype:
        raise ModelConfigError(f"{name!r} {what}, but is no matrix of {str(dtype).removeprefix('torch.')}.")


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """words: (n, m) int32. Returns (n, 8 * m) int8, from 0 to 15."""
    found = torch.empty(*words.shape, len(_COLUMNS), dtype=torch.int8)
    for i, column in enumerate(_COLUMNS):
        found[..., column] = (words >> (4 * i)) & 15
    return found.flatten(1)


def _bounds(index: Any, shape: list[int]) -> list[tuple[int, int]]:
    """Where the slices of an index begin and end, for all dimensions."""
    given = index if isinstance(index, tuple) else (index,)
    slices = [*given, *[slice(None)] * (len(shape) - len(given))]
    return [each.indices(size)[:2] for each, size in zip(slices, shape, strict=True)]
