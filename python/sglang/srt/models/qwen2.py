"""Qwen2 and Qwen2.5, dense or of experts: Llama with biases on queries, keys and values."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    def biases(self, config: ModelConfig) -> tuple[bool, bool]:
        return getattr(config.hf_config, "qkv_bias", True), False
