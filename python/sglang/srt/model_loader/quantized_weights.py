"""`QuantizedWeights`: the matrices of a quantised checkpoint, dequantised when they are read, or as they are stored.

Owns the decision which of both, `pick_weight_format`, and what is quantised when it is read. Names are those of the
same checkpoint without quantization: `x.weight` stands for `x.weight` with `x.weight_scale` (or `_scale_inv`), or for
what packed_weights.py reads. A part of a matrix costs the time and memory of that part alone. Scales of activations
are not used: activations keep the model's data type.

    fp8, int8    weight = values * scale        values (outputs, inputs)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from sgl_kernel.quantized import FOUR_BITS, LEAST_GROUP, MatrixFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import NATIVE
from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.configs.quantization import UNUSED, WeightQuantization
from sglang.srt.model_loader.non_finite import check_scales
from sglang.srt.model_loader.packed_weights import PARTS, PackedTensor, Readable, bounds, stem_of
from sglang.srt.utils.device import has_e4m3

logger = logging.getLogger(__name__)

_SCALES = (".weight_scale", ".weight_scale_inv")


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
    logger.info("weights of decoder layers are kept in %d bits", stored.bits)
    return MatrixFormat(kept_dtype(stored), group)


def kept_dtype(stored: WeightQuantization) -> torch.dtype:
    """Of a `MatrixFormat`."""
    return FOUR_BITS if stored.bits == 4 else torch.int8 if stored.is_int else torch.float8_e4m3fn


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
    if config.experts is not None:
        return "no kernel reads experts that are quantized"
    if config.dtype not in (torch.bfloat16, torch.float16):
        return "kernels are for bfloat16 and float16"
    if not (stored.is_int or has_e4m3(device)):
        return "this GPU does not compute with e4m3"
    if stored.bits == 4 and stored.block is None:
        return "the kernel is for groups of inputs"
    if stored.bits == 8 and stored.has_zeros:
        return "the kernel for 8 bits knows no zeros"
    if stored.has_order:
        return "the inputs of a group are no neighbours"
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
        if not name.endswith((*_SCALES, *UNUSED, *PARTS)):
            stem = stem_of(name)
            held[name if stem is None else f"{stem}.weight"] = name
    return held


def unused_biases(
    names: Iterable[str], files: Mapping[str, Path], read: Callable[[str], torch.Tensor | None]
) -> set[str]:
    """Of names that a model does not have, the biases that are all 0: tools for GPTQ give every matrix one. files,
    read: as `QuantizedWeights` takes them."""
    found = set()
    for name in names:
        stem, is_bias = name.removesuffix(".bias"), name.endswith(".bias")
        if is_bias and f"{stem}.qweight" in files:
            bias = read(name)
            if bias is not None and not bool(bias.any()):
                found.add(name)
    return found


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
        if stem_of(held) is not None:
            if self._quantization.packing is None:
                raise ModelConfigError(f"{held!r} holds packed numbers, of which config.json tells nothing.")
            return PackedTensor(held, values, self._quantization, self._part)
        scale_name = next((stem + suffix for suffix in _SCALES if stem + suffix in self._files), None)
        if name.endswith(".weight") and scale_name is not None:
            scale = self._needed(scale_name, held)
            wanted = torch.int8 if self._quantization.is_int else torch.float8_e4m3fn
            _check_matrix(held, values, wanted)
            check_scales(scale_name, self._files[scale_name], scale, may_be_any=False)
            return ScaledTensor(held, values, scale, self._quantization.block)
        if values.get_shape() and values[:1].dtype.itemsize == 1:
            raise ModelConfigError(f"{held!r} has 8 bits a value, and there is no {stem + _SCALES[0]!r} beside it.")
        return values  # type: ignore[no-any-return]

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[:]

    def _part(self, name: str) -> torch.Tensor | None:
        """Of a packed matrix."""
        tensor = self._read(name)
        if tensor is not None and tensor.is_floating_point():
            check_scales(name, self._files[name], tensor, may_be_any=True)
        return tensor

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
        rows, columns = bounds(index, self.get_shape())
        scales = self._scale[torch.arange(*rows) // self._block[0]]
        if scales.shape[1] > 1:
            assert group == self._block[1] and not columns[0] % group
            scales = scales[:, columns[0] // group : -(-columns[1] // group)]
        return self._values[slice(*rows), slice(*columns)], scales, None

    def __getitem__(self, index: Any) -> torch.Tensor:
        """float32."""
        rows, columns = bounds(index, self.get_shape())
        of_rows = self._scale[torch.arange(*rows) // self._block[0]]
        # One for all inputs goes to each by itself.
        scale = of_rows if of_rows.shape[1] == 1 else of_rows[:, torch.arange(*columns) // self._block[1]]
        return self._values[slice(*rows), slice(*columns)].float() * scale


def _check_matrix(name: str, values: Readable, dtype: torch.dtype) -> None:
    if len(values.get_shape()) != 2 or values[:1].dtype != dtype:
        wanted = str(dtype).removeprefix("torch.")
        raise ModelConfigError(f"{name!r} has a scale beside it, but is no matrix of {wanted}.")
