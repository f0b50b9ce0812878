"""From an architecture to its model class. Imports a model's module only when it is asked for.

The list of architectures is `MODEL_FAMILIES` in configs/model_families.py.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.model_families import MODEL_FAMILIES
from sglang.srt.utils.registry import load_object


def get_model_class(architecture: str) -> Any:
    """The model class, constructed as `Class(config: ModelConfig, attn_backend, group)`. KeyError where there is
    none: `ModelConfig` has refused it before."""
    return load_object(MODEL_FAMILIES[architecture])
