"""Mistral: Llama without any bias; and Mixtral, the same with mixtures of experts."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    def biases(self, config: ModelConfig) -> tuple[bool, bool]:
        return False, False


class MixtralForCausalLM(MistralForCausalLM):
    mlp_name = "block_sparse_moe"
    expert_names = ("w1", "w3", "w2")
