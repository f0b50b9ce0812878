"""`QuantizedWeights`: the matrices of a quantised checkpoint, dequantised when they are read, or as they are stored.

Owns the decision which of both, `pick_weight_formats`, and what is quantised when it is read. Names are those of the
same checkpoint without quantization: `x.weight` stands for `x.weight` with `x.weight_scale` (or `_scale_inv`), or for
what packed_weights.py reads, and `x_proj` for what mxfp4_weights.py reads. A part of a matrix costs the time and
memory of that part alone. Scales of activations are not used: activations keep the model's data type.

    fp8, int8    weight = values * scale        values (outputs, inputs)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sgl_kernel.quantized import E2M1, FOUR_BITS, LEAST_GROUP, MatrixFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import NATIVE
from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.configs.quantization import UNUSED, Packing, WeightQuantization
from sglang.srt.model_loader.mxfp4_weights import BLOCKS, SCALES, Mxfp4Tensor
from sglang.srt.model_loader.non_finite import check_scales
from sglang.srt.model_loader.packed_weights import PARTS, PackedTensor, Readable, bounds, stem_of
from sglang.srt.utils.device import has_e4m3

logger = logging.getLogger(__name__)

_SCALES = (".weight_scale", ".weight_scale_inv")
# Of the names of matrices. The last is one whose products are with parts of it.
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERTS = ".experts."
_ALWAYS_DEQUANTIZED = ".kv_b_proj.weight"


class WeightFormats(NamedTuple):
    """How matrices are kept: those of attention and dense layers, and those of experts. None: in the model's type."""

    layers: MatrixFormat | None = None
    experts: MatrixFormat | None = None


def pick_weight_formats(
    config: ModelConfig, names: Iterable[str], num_ranks: int, device: torch.device
) -> WeightFormats:
    """As a quantised checkpoint has them, on a GPU that computes with it. None where no kernel reads them, or where
    some are not quantised. names: of the checkpoint's tensors; none for made-up weights. Logs what it picks."""
    stored = config.quantization
    assert stored is not None, "asked of a quantised checkpoint"
    format = MatrixFormat(kept_dtype(stored), 0 if stored.block is None else stored.block[1])
    found: list[MatrixFormat | None] = []
    for part in _parts(config, num_ranks):
        reason = _reason_to_dequantize(config, stored, part, frozenset(names), device)
        if reason is None:
            logger.info("weights of %s are kept in %d bits", part.name, stored.bits)
        else:
            dtype = str(config.dtype).removeprefix("torch.")
            logger.info("quantized weights of %s are kept in %s: %s", part.name, dtype, reason)
        found.append(format if reason is None else None)
    return WeightFormats(*found)


def kept_dtype(stored: WeightQuantization) -> torch.dtype:
    """Of a `MatrixFormat`."""
    if stored.packing == Packing.MXFP4:
        return E2M1
    return FOUR_BITS if stored.bits == 4 else torch.int8 if stored.is_int else torch.float8_e4m3fn


def formats_asked(config: ModelConfig, asked: str, num_ranks: int, device: torch.device) -> WeightFormats:
    """Of a checkpoint that is not quantised: e4m3, with a scale for each output of a rank's part. asked: as of
    --quantization. Raises ModelConfigError if that cannot be."""
    if asked != "fp8":
        raise ModelConfigError(
            f"--quantization {asked}: the checkpoint is not quantized; leave the flag out, or use fp8."
        )
    if config.model_impl != NATIVE:
        raise ModelConfigError("--quantization fp8 is for models with a native implementation; leave it out.")
    parts = _parts(config, num_ranks)
    for part in parts:
        reason = _reason_to_dequantize(config, WeightQuantization(), part, frozenset(), device)
        if reason is not None:
            raise ModelConfigError(f"--quantization fp8 cannot be used here: {reason}; leave it out.")
        logger.info("weights of %s are quantized to fp8", part.name)
    return WeightFormats(*(MatrixFormat(torch.float8_e4m3fn) for _ in parts))


class _Part(NamedTuple):
    """Matrices that are kept alike. inputs: that have to divide into groups, all sizes that occur. has: tells by name
    whether a checkpoint's tensor is one of the matrices, not quantised or with scales beside it."""

    name: str
    inputs: tuple[int, ...]
    has: Callable[[str], bool]
    is_experts: bool = False


def _parts(config: ModelConfig, num_ranks: int) -> tuple[_Part, ...]:
    """As the fields of `WeightFormats`; the second one is only of mixtures."""
    latent, experts = config.latent, config.experts
    value_dim = config.head_dim if latent is None else latent.value_dim
    inputs = [config.hidden_size, config.num_heads * value_dim // num_ranks]
    if latent is not None and config.hf_config.q_lora_rank is not None:
        inputs.append(config.hf_config.q_lora_rank)
    if experts is None or not all(experts.layers):
        inputs.append(config.intermediate_size // num_ranks)
    if experts is not None and experts.shared_size:
        inputs.append(experts.shared_size // num_ranks)

    def is_computed(name: str) -> bool:
        # Layers behind the last one predict further tokens.
        layer = _LAYER.search(name)
        return layer is not None and int(layer[1]) < config.num_layers

    def is_of_layers(name: str) -> bool:
        is_matrix = name.endswith("_proj.weight") and not name.endswith(_ALWAYS_DEQUANTIZED)
        return is_matrix and _EXPERTS not in name and is_computed(name)

    def is_of_experts(name: str) -> bool:
        return _EXPERTS in name and name.endswith(("_proj", ".weight")) and is_computed(name)

    layers = _Part("decoder layers", tuple(inputs), is_of_layers)
    if experts is None:
        return (layers,)
    # The latter are divided in whole groups, see `Mixture`.
    inputs_of_experts = (config.hidden_size, experts.intermediate_size)
    return layers, _Part("experts", inputs_of_experts, is_of_experts, is_experts=True)


def _reason_to_dequantize(
    config: ModelConfig,
    stored: WeightQuantization,
    part: _Part,
    names: frozenset[str],
    device: torch.device,
) -> str | None:
    if device.type != "cuda":
        return "on a CPU there is no faster kernel"
    if config.dtype not in (torch.bfloat16, torch.float16):
        return "kernels are for bfloat16 and float16"
    if stored.packing == Packing.MXFP4 and not part.is_experts:
        return "mxfp4 is of experts"
    if stored.packing == Packing.MXFP4 and config.dtype == torch.float16:
        return "float16 does not hold all scales of mxfp4"
    if kept_dtype(stored) == torch.float8_e4m3fn and not has_e4m3(device):
        return "this GPU does not compute with e4m3"
    if stored.bits == 4 and stored.block is None:
        return "the kernel is for groups of inputs"
    if stored.bits == 8 and stored.has_zeros:
        return "the kernel for 8 bits knows no zeros"
    if stored.has_order:
        return "the inputs of a group are no neighbours"
    group = LEAST_GROUP if stored.block is None else stored.block[1]
    for inputs in part.inputs:
        if inputs % group or group % LEAST_GROUP:
            return f"{inputs} inputs do not divide into groups of {group}"
    for name in sorted(names):
        stem = name.removesuffix(".weight")
        if part.has(name) and not any(stem + suffix in names for suffix in _SCALES):
            return f"{name} is not quantized"
    return None


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """The names without quantization -> those of the tensors that hold the values. Raises ModelConfigError where two
    hold the same."""
    stored, held = frozenset(names), dict[str, str]()
    for name in sorted(stored):
        if name.endswith(BLOCKS):
            plain = _name_of_blocks(name)
        elif name.endswith((*_SCALES, *UNUSED, *PARTS)) or name.removesuffix(SCALES) + BLOCKS in stored:
            continue
        else:
            stem = stem_of(name)
            plain = name if stem is None else f"{stem}.weight"
        if plain in held:
            raise ModelConfigError(f"{held[plain]!r} and {name!r} hold the same weights; one of them is too many.")
        held[plain] = name
    return held


def _name_of_blocks(name: str) -> str:
    """Without quantization."""
    return name.removesuffix(BLOCKS) + "_proj"


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
        packing, has_blocks = self._quantization.packing, held.endswith(BLOCKS)
        if has_blocks or stem_of(held) is not None:
            if packing is None or has_blocks != (packing == Packing.MXFP4):
                raise ModelConfigError(f"{held!r} holds packed numbers, of which config.json tells nothing.")
            if has_blocks:
                return Mxfp4Tensor(held, values, self._needed(held.removesuffix(BLOCKS) + SCALES, held))
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
