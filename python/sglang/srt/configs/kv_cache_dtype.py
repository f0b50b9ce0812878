"""Data types of the KV cache other than the model's, and the scales of what is stored in them. Owns nothing."""

from __future__ import annotations

import json
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
# Of a scale.
_LEAST, _MOST = 1e-6, 1e6


def pick_kv_cache_dtype(name: str) -> torch.dtype | None:
    """By a name of KV_CACHE_DTYPE_CHOICES; None for the model's."""
    return _DTYPES.get(name)


def read_kv_scales(path: str, dtype: torch.dtype, num_ranks: int, num_layers: int) -> tuple[tuple[float, ...], ...]:
    """Of each rank and layer, what K and V are divided by before they are stored; () where all are 1. path: a JSON
    file as SGLang and vLLM read it, {"kv_cache": {"dtype": name, "scaling_factor": {rank: {layer: scale}}}}. Raises
    ModelConfigError."""
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
    return scales if any(scale != 1.0 for of_rank in scales for scale in of_rank) else ()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
