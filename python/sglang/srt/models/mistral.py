"""Mistral: Llama without any bias."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    def biases(self, config: ModelConfig) -> tuple[bool, bool]:
        return False, False
