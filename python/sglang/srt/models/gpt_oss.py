"""gpt-oss: Llama with biases, a sink for each attention head, windows in some layers, and experts with clamped swish.

OpenAI's model card (2025), section 2. A sink is a score that takes part in a head's softmax and has no value.
"""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import TensorParallelGroup
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.weights import WeightTarget
from sglang.srt.models.llama import DecoderAttention, LlamaAttention, LlamaForCausalLM


class GptOssAttention(LlamaAttention):
    """sinks: (num_heads,), this rank's."""

    def __init__(
        self, config: ModelConfig, layer_id: int, backend: AttentionBackend, group: TensorParallelGroup
    ) -> None:
        bias = config.attention_bias
        super().__init__(config, layer_id, backend, group, bias, bias, qk_norm=False)
        self.heads = group.shard(config.num_heads)
        self.sinks = nn.Parameter(torch.empty(self.num_heads, dtype=config.dtype), requires_grad=False)
        self.attn.sinks = self.sinks

    def weight_targets(self) -> dict[str, WeightTarget]:
        sinks = WeightTarget(self.sinks, (self.heads.full,), 0, self.heads.start)
        return super().weight_targets() | {"sinks": sinks}


class GptOssForCausalLM(LlamaForCausalLM):
    router_name = "router"

    def make_attention(self, config: ModelConfig, layer_id: int, attn_backend: AttentionBackend) -> DecoderAttention:
        return GptOssAttention(config, layer_id, attn_backend, self.group)

    def stacks_experts(self, name: str) -> bool:
        return name.rpartition(".")[0].endswith(f".{self.mlp_name}.experts")
