"""`WeightQuantization`: how a checkpoint stores its matrices, as `quantization_config` of config.json tells.

Owns which ways are read and what the others are told. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

READABLE = "fp8, compressed-tensors of 8 bits or packed, modelopt with FP8, awq, gptq, mxfp4, or a GGUF file"
# What checkpoints have beside their weights, and nothing here computes with: activations keep the model's data type.
# Those of K and V are read apart, see kv_cache_dtype.py.
UNUSED = tuple(
    f".{of}_{what}"
    for of in ("input", "activation", "output", "q", "k", "v", "kv", "prob", "prob_output")
    for what in ("scale", "zero_point")
)

# The size of a group that is all inputs.
WHOLE = -1
# Inputs that share a scale, of mxfp4.
MXFP4_GROUP = 32


class Packing(StrEnum):
    """Several numbers in an int32, or two in a byte: whose way. See model_loader/packed_weights.py, and
    mxfp4_weights.py for the last one, which only experts have."""

    AWQ = "awq"
    GPTQ = "gptq"
    COMPRESSED = "compressed-tensors"
    MXFP4 = "mxfp4"


class QuantizationError(ValueError):
    """The way is not read here; the message names those that are."""


@dataclass(frozen=True)
class WeightQuantization:
    """A matrix is stored as whole numbers or floats of few bits, times scales.

    is_int: whole numbers, not e4m3. block: values of a scale, (outputs, inputs); None: one for each output, or as the
    scale's shape tells, one for all. The next three are for packed numbers. has_zeros: groups may have zeros of their
    own. zero_offset: what is added to a stored zero. has_order: the inputs of a group may be no neighbours. method:
    the checkpoint's name for it, as of --quantization.
    """

    bits: int = 8
    is_int: bool = False
    block: tuple[int, int] | None = None
    packing: Packing | None = None
    has_zeros: bool = False
    zero_offset: int = 0
    has_order: bool = False
    method: str = field(default="", compare=False)


def read_quantization(config: object) -> WeightQuantization | None:
    """config: `quantization_config`; None or empty for a checkpoint that is not quantised. Raises
    QuantizationError."""
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise QuantizationError(f"its quantization_config is {config!r}, not an object; use {READABLE}")
    method = config.get("quant_method")
    method = "compressed-tensors" if method == "compressed_tensors" else method
    readers: dict[str, Callable[[Mapping[str, Any]], WeightQuantization | None]]
    readers = {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "modelopt": _modelopt,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": lambda config: WeightQuantization(bits=4, block=(1, MXFP4_GROUP), packing=Packing.MXFP4),
    }
    if not isinstance(method, str) or method not in readers:
        raise QuantizationError(f"it is quantized as {method!r}, which is not supported; use {READABLE}")
    found = readers[method](config)
    return None if found is None else replace(found, method=method)


def _fp8(config: Mapping[str, Any]) -> WeightQuantization:
    if (kind := config.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise QuantizationError(f"its weights are fp8 of the kind {kind!r}, and only e4m3 is read; use {READABLE}")
    block = config.get("weight_block_size")
    return WeightQuantization(block=None if block is None else _block(block))


def _compressed_tensors(config: Mapping[str, Any]) -> WeightQuantization | None:
    kind = config.get("format")
    sparsity, groups = config.get("sparsity_config") or {}, config.get("config_groups") or {}
    for name, value in (("sparsity_config", sparsity), ("config_groups", groups)):
        if not isinstance(value, Mapping):
            raise QuantizationError(f"its {name} is {value!r}, not an object; use {READABLE}")
    if (sparse := sparsity.get("format") or "dense") != "dense":
        raise QuantizationError(f"its compressed-tensors are sparse, {sparse!r}; use {READABLE}")
    for group in groups.values():
        if not isinstance(group, Mapping):
            raise QuantizationError(f"one of its config_groups is {group!r}, not an object; use {READABLE}")
    weights = [group["weights"] for group in groups.values() if group.get("weights") is not None]
    if not weights and (groups or config.get("kv_cache_scheme")):
        # It is of activations, of attention or of the KV cache alone.
        return None
    if kind == "pack-quantized":
        found = set(map(_of_packed_group, weights))
    elif kind in ("float-quantized", "int-quantized", "naive-quantized"):
        found = {_of_group(each, "float" if kind == "float-quantized" else "int") for each in weights}
    else:
        raise QuantizationError(f"its compressed-tensors have the format {kind!r}; use {READABLE}")
    if len(found) != 1:
        raise QuantizationError(f"its compressed-tensors have {len(found)} ways of storing weights; use {READABLE}")
    return found.pop()


def _of_group(weights: object, usual_type: str) -> WeightQuantization:
    if not isinstance(weights, Mapping) or weights.get("num_bits") != 8 or not weights.get("symmetric", True):
        raise QuantizationError(f"its compressed-tensors are not of 8 symmetric bits: {weights!r}; use {READABLE}")
    strategy, is_int = weights.get("strategy"), weights.get("type", usual_type) == "int"
    if strategy == "block":
        return WeightQuantization(is_int=is_int, block=_block(weights.get("block_structure")))
    group_size = weights.get("group_size")
    if strategy == "group" and group_size != WHOLE:
        return WeightQuantization(is_int=is_int, block=_block((1, group_size)))
    if strategy in ("tensor", "channel", "group"):
        return WeightQuantization(is_int=is_int)
    raise QuantizationError(f"its compressed-tensors have the strategy {strategy!r}; use {READABLE}")


def _of_packed_group(weights: object) -> WeightQuantization:
    if not isinstance(weights, Mapping) or weights.get("num_bits") not in (4, 8) or weights.get("type") != "int":
        raise QuantizationError(f"its packed compressed-tensors are not of 4 or 8 bits: {weights!r}; use {READABLE}")
    strategy, group_size = weights.get("strategy"), weights.get("group_size")
    if strategy not in ("group", "channel"):
        raise QuantizationError(f"its packed compressed-tensors have the strategy {strategy!r}; use {READABLE}")
    is_whole = strategy == "channel" or group_size == WHOLE
    return WeightQuantization(
        bits=weights["num_bits"],
        is_int=True,
        block=None if is_whole else _block((1, group_size)),
        packing=Packing.COMPRESSED,
        has_zeros=not weights.get("symmetric", True),
        has_order=weights.get("actorder") in ("group", "dynamic", True),
    )


def _modelopt(config: Mapping[str, Any]) -> WeightQuantization | None:
    kind = config.get("quant_algo")
    if kind is None and config.get("kv_cache_quant_algo"):
        # Scales for the KV cache alone.
        return None
    if kind != "FP8":
        raise QuantizationError(f"its modelopt weights have the quant_algo {kind!r}; use {READABLE}")
    return WeightQuantization()


def _awq(config: Mapping[str, Any]) -> WeightQuantization:
    version = str(config.get("version", "gemm")).lower()
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4 or version != "gemm" or not config.get("zero_point", True):
        raise QuantizationError(
            f"its AWQ weights have {bits!r} bits, version {version!r}, zero_point "
            f"{config.get('zero_point', True)!r}; only 4 bits of version 'gemm' with zero points are read"
        )
    group_size = config.get("group_size", config.get("q_group_size"))
    block = None if group_size == WHOLE else _block((1, group_size))
    return WeightQuantization(bits=4, is_int=True, block=block, packing=Packing.AWQ, has_zeros=True)


def _gptq(config: Mapping[str, Any]) -> WeightQuantization:
    bits, group_size = config.get("bits"), config.get("group_size")
    kind = config.get("checkpoint_format") or config.get("format") or "gptq"
    word = config.get("pack_dtype") or "int32"
    if bits not in (4, 8) or kind not in ("gptq", "gptq_v2") or word != "int32":
        raise QuantizationError(
            f"its GPTQ weights have {bits!r} bits, the format {kind!r} and words of {word!r}; only 4 and 8 bits of "
            "the formats 'gptq' and 'gptq_v2' in int32 are read"
        )
    return WeightQuantization(
        bits=bits,
        is_int=True,
        block=None if group_size == WHOLE else _block((1, group_size)),
        packing=Packing.GPTQ,
        has_zeros=not config.get("sym", True),
        # Its first format stores zeros less one.
        zero_offset=1 if kind == "gptq" else 0,
        has_order=bool(config.get("desc_act", False)),
    )


def _block(sizes: Any) -> tuple[int, int]:
    """sizes: two, maybe as text, "128x128"."""
    rows: Any
    columns: Any
    try:
        rows, columns = map(int, sizes.split("x")) if isinstance(sizes, str) else sizes
    except (TypeError, ValueError):
        rows = columns = None
    if not all(isinstance(size, int) and size > 0 for size in (rows, columns)):
        raise QuantizationError(f"its scales are for blocks of {sizes!r}, not of two sizes above 0")
    return rows, columns
