"""Data types of the KV cache other than the model's, and the scales of what is stored in them. Owns nothing."""

from __future__ import annotations

import json
import math
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


def pick_kv_cache_dtype(name: str) -> torch.dtype | None:
    """By a name of KV_CACHE_DTYPE_CHOICES; None for the model's."""
    return _DTYPES.get(name)


def read_kv_scales(path: str, num_layers: int, rank: int) -> tuple[float, ...]:
    """Of each layer, what K and V are divided by before they are stored. path: a JSON file as SGLang and vLLM read
    it, {"kv_cache": {"scaling_factor": {rank: {layer: scale}}}}. Raises ModelConfigError."""
    try:
        factors: Any = json.loads(Path(path).read_text())["kv_cache"]["scaling_factor"][str(rank)]
        scales = tuple(float(factors[str(layer)]) for layer in range(num_layers))
    except OSError as error:
        raise ModelConfigError(f"--quantization-param-path {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise ModelConfigError(f"--quantization-param-path {path} is not a file of KV scales: {error}") from error
    except KeyError as error:
        raise ModelConfigError(
            f"--quantization-param-path {path} has no {error}; it needs kv_cache, scaling_factor, rank {rank} and "
            f"{num_layers} layers, one inside the other"
        ) from error
    if not all(math.isfinite(scale) and scale > 0 for scale in scales):
        raise ModelConfigError(f"--quantization-param-path {path}: scales are numbers above 0")
    return scales
