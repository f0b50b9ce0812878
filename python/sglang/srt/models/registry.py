"""From an architecture to its model class. Imports a model's module only when it is asked for.

The list of architectures is `MODEL_FAMILIES` in configs/model_families.py.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import MODEL_FAMILIES, TRANSFORMERS
from sglang.srt.utils.registry import load_object

_TRANSFORMERS_CLASS = "sglang.srt.models.transformers_model:TransformersForCausalLM"


def get_model_class(config: ModelConfig) -> Any:
    """The model class, constructed as `Class(config, attn_backend, group)`. KeyError where there is none:
    `ModelConfig` has refused it before."""
    if config.model_impl == TRANSFORMERS:
        return load_object(_TRANSFORMERS_CLASS)
    return load_object(MODEL_FAMILIES[config.architecture])
