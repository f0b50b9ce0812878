"""Which architectures have a native model here. Imports a model's module only when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

# Architecture as config.json names it -> module and class.
_MODELS = {
    "LlamaForCausalLM": ("sglang.srt.models.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("sglang.srt.models.mistral", "MistralForCausalLM"),
    # Its checkpoints hold fused projections and longrope factors; the layers are Mistral's.
    "Phi3ForCausalLM": ("sglang.srt.models.mistral", "MistralForCausalLM"),
    "Qwen2ForCausalLM": ("sglang.srt.models.qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("sglang.srt.models.qwen3", "Qwen3ForCausalLM"),
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(_MODELS)


def get_model_class(architecture: str) -> Any:
    """The model class, constructed as `Class(config: ModelConfig, attn_backend, group)`. KeyError where there is
    none: `ModelConfig` has refused it before."""
    module, name = _MODELS[architecture]
    return getattr(importlib.import_module(module), name)
