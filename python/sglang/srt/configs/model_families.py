"""The registry of model families: which architectures of config.json have a native model here.

Owns the list, and the choice between a native model and the modelling code of transformers. Imports no model;
`models/registry.py` does, when a model is built.
"""

from __future__ import annotations

# Architecture as config.json names it -> "module:class". A new family is a file in models/ and a line here.
MODEL_FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "sglang.srt.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "sglang.srt.models.mistral:MistralForCausalLM",
    # Its checkpoints hold fused projections and longrope factors; the layers are Mistral's.
    "Phi3ForCausalLM": "sglang.srt.models.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "sglang.srt.models.mistral:MixtralForCausalLM",
    "Qwen2ForCausalLM": "sglang.srt.models.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "sglang.srt.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "sglang.srt.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "sglang.srt.models.qwen3:Qwen3ForCausalLM",
    "Gemma2ForCausalLM": "sglang.srt.models.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "sglang.srt.models.gemma:Gemma3ForCausalLM",
    # Of text and images, of which the text alone is served.
    "Gemma3ForConditionalGeneration": "sglang.srt.models.gemma:Gemma3ForConditionalGeneration",
    "GptOssForCausalLM": "sglang.srt.models.gpt_oss:GptOssForCausalLM",
    "DeepseekV2ForCausalLM": "sglang.srt.models.deepseek_v2:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "sglang.srt.models.deepseek_v2:DeepseekV2ForCausalLM",
    # GLM-4.7-Flash.
    "Glm4MoeLiteForCausalLM": "sglang.srt.models.deepseek_v2:DeepseekV2ForCausalLM",
}

# Norms' weights are what is added to 1, and gates have another activation.
GEMMA_FAMILIES = frozenset(name for name in MODEL_FAMILIES if name.startswith("Gemma"))

NATIVE = "native"
TRANSFORMERS = "transformers"


def pick_model_impl(architecture: str, model_impl: str) -> str:
    """NATIVE or TRANSFORMERS. model_impl: as --model-impl takes it; "auto" prefers a native model, and "sglang" is
    upstream's name for NATIVE."""
    if model_impl == "auto":
        return NATIVE if architecture in MODEL_FAMILIES else TRANSFORMERS
    return TRANSFORMERS if model_impl == TRANSFORMERS else NATIVE
