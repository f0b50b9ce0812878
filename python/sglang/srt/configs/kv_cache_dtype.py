"""Data types of the KV cache other than the model's, and the scales of what is stored in them, from a file of their
own or from the names of a checkpoint's tensors. Owns nothing."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang.srt.configs.model_files import ModelConfigError

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
KV_CACHE_DTYPE_CHOICES = ("auto", *_DTYPES)
# A scale for all of a rank's KV heads, or one for each.
HeadScales = float | tuple[float, ...]
# Of each rank and layer, what K and what V is divided by before it is stored; () where all are 1.
KVScales = tuple[tuple[tuple[HeadScales, HeadScales], ...], ...]
# Of a scale.
_LEAST, _MOST = 1e-6, 1e6
# As compressed-tensors, ModelOpt and AutoFP8 name them; the last one wrote kv_scale for both.
_SCALE_NAME = re.compile(
    r"(?:model\.|language_model\.)*layers\.(?P<layer>\d{1,6})\.self_attn\.(?:attn\.)?"
    r"(?:(?:(?:k|v|qkv)_proj\.)?(?P<of>k|v|kv)_scale|(?P<projection>[kv])_proj\.output_scale)"
)


def pick_kv_cache_dtype(name: str) -> torch.dtype | None:
    """By a name of KV_CACHE_DTYPE_CHOICES; None for the model's."""
    return _DTYPES.get(name)


def read_kv_scales(path: str, dtype: torch.dtype, num_ranks: int, num_layers: int) -> KVScales:
    """path: a JSON file as SGLang and vLLM read it, {"kv_cache": {"dtype": name, "scaling_factor": {rank: {layer:
    scale}}}}, of K and V alike. Raises ModelConfigError."""
    flag = f"--quantization-param-path {path}"
    try:
        cache: Any = json.loads(Path(path).read_text())["kv_cache"]
        by_rank, made_for = cache["scaling_factor"], cache.get("dtype", _name_of(dtype))
        scales = tuple(
            tuple(float(by_rank[str(rank)][str(layer)]) for layer in range(num_layers)) for rank in range(num_ranks)
        )
    except OSError as error:
        raise ModelConfigError(f"{flag} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelConfigError(f"{flag} is not a file of KV scales: {error}") from error
    except KeyError as error:
        raise ModelConfigError(
            f"{flag} has no {error}; it needs kv_cache, scaling_factor, {num_ranks} ranks from 0 on and {num_layers} "
            "layers, one inside the other"
        ) from error
    if made_for != _name_of(dtype):
        raise ModelConfigError(f"{flag} has scales for {made_for}, and the KV cache is {_name_of(dtype)}")
    if len(by_rank) != num_ranks:
        raise ModelConfigError(f"{flag} has scales for {len(by_rank)} ranks, and --tp-size is {num_ranks}")
    if not all(_LEAST <= scale <= _MOST for of_rank in scales for scale in of_rank):
        raise ModelConfigError(f"{flag}: scales are numbers from {_LEAST:g} to {_MOST:g}")
    return _unless_all_are_1([[(scale, scale) for scale in of_rank] for of_rank in scales])


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is a scale of K or V."""
    return _SCALE_NAME.fullmatch(name) is not None


def stored_kv_scales(
    names: Iterable[str],
    read: Callable[[str], torch.Tensor | None],
    num_layers: int,
    num_kv_heads: int,
    heads_of_ranks: Sequence[slice],
) -> KVScales:
    """The scales that a checkpoint has for a KV cache of fp8_e4m3, one a layer or one a KV head; () if it has none.
    read: a tensor by its name. heads_of_ranks: which of num_kv_heads each rank has. Raises ModelConfigError."""
    names_of = defaultdict[tuple[int, str], list[str]](list)
    for match in filter(None, map(_SCALE_NAME.fullmatch, names)):
        of = match["of"] or match["projection"]
        for letter in of:
            names_of[int(match["layer"]), letter if len(of) == 1 else f"{letter} of both"].append(match.string)
    if not names_of:
        return ()
    scales = []
    for layer in range(num_layers):
        k_scale, v_scale = (
            _scale_of(names_of[layer, letter] or names_of[layer, f"{letter} of both"], read, num_kv_heads)
            for letter in "kv"
        )
        if k_scale is None or v_scale is None:
            raise ModelConfigError(
                f"the checkpoint has KV scales, but lacks one of layer {layer}; give all by --quantization-param-path"
            )
        scales.append((k_scale, v_scale))
    return _unless_all_are_1(
        [[(_of_heads(k, heads), _of_heads(v, heads)) for k, v in scales] for heads in heads_of_ranks]
    )


def _scale_of(
    names: Sequence[str], read: Callable[[str], torch.Tensor | None], num_kv_heads: int
) -> HeadScales | None:
    """Of tensors that mean the same scale, of all heads; None if there are none."""
    found = None
    for name in names:
        tensor = read(name)
        assert tensor is not None, f"{name} is among the names"
        # compressed-tensors has (num_kv_heads, 1, 1) for one each.
        if tensor.numel() not in (1, num_kv_heads) or tensor.squeeze().ndim > 1:
            raise ModelConfigError(
                f"{name!r} has the shape {tuple(tensor.shape)}, and a layer has one KV scale or one for each of its "
                f"{num_kv_heads} KV heads; give others by --quantization-param-path"
            )
        of_heads = tensor.flatten().float().tolist()
        for each in of_heads:
            if not _LEAST <= each <= _MOST:
                raise ModelConfigError(
                    f"{name!r} is {each:g}, and KV scales are numbers from {_LEAST:g} to {_MOST:g}"
                )
        scale = of_heads[0] if len(set(of_heads)) == 1 else tuple(of_heads)
        if found is not None and scale != found:
            raise ModelConfigError(f"{names[0]!r} and {name!r} are scales of the same, and differ")
        found = scale
    return found


def _of_heads(scale: HeadScales, heads: slice) -> HeadScales:
    return scale[heads] if isinstance(scale, tuple) else scale


def _unless_all_are_1(scales: Sequence[Sequence[tuple[HeadScales, HeadScales]]]) -> KVScales:
    flat = [scale for of_rank in scales for of_layer in of_rank for scale in of_layer]
    return tuple(map(tuple, scales)) if any(scale != 1.0 for scale in flat) else ()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
