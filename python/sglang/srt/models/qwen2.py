"""Qwen2 and Qwen2.5, dense or of experts: Llama with biases on queries, keys and values."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    def biases(self, config: ModelConfig) -> tuple[bool, bool]:
        hf_config = config.hf_config
        # Only where transformers' model of this family has it: another config may carry the name without a reader.
        return hf_config.qkv_bias if hasattr(type(hf_config), "qkv_bias") else True, False
