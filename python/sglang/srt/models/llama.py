"""The dense decoder: Llama, and by small variations most other families.

Owns the weights. KV lives in the pool that each call brings; the model never waits for it: the executor calls layer
by layer and opens each layer's gate first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedLinear
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, apply_rotary
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, KVPool


@dataclass
class DecoderState:
    """What travels between layers. hidden: (num_tokens, hidden_size); after the last layer only the rows of
    batch.sample_rows. cos, sin: see `RotaryEmbedding`, looked up once per batch."""

    hidden: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class LlamaAttention(nn.Module):
    """qk_norm: normalise each head of q and k before the rotation."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        backend: AttentionBackend,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = MergedLinear(config.hidden_size, (q_size, kv_size, kv_size), qkv_bias, config.dtype)
        self.o_proj = MergedLinear(q_size, (config.hidden_size,), o_bias, config.dtype)
        # One normalisation for q and k: the weight of q's norm repeats over its heads, then that of k's.
        self.qk_norm = None
        if qk_norm:
            shape = (self.num_heads + self.num_kv_heads, self.head_dim)
            self.qk_norm = RMSNorm(shape, config.rms_norm_eps, config.dtype)
        self.attn = RadixAttention(layer_id, backend)

    def forward(self, x: torch.Tensor, state: DecoderState, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        """x: (num_tokens, hidden_size). Returns (num_tokens, num_heads * head_dim), before `o_proj`."""
        num_tokens = x.shape[0]
        qkv = self.qkv_proj(x).view(num_tokens, -1, self.head_dim)
        qk, v = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        q, k = apply_rotary(qk, state.cos, state.sin).split((self.num_heads, self.num_kv_heads), dim=1)
        return self.attn(q, k, v, batch, pool).reshape(num_tokens, -1)

    def weight_targets(self) -> dict[str, torch.Tensor]:
        targets = self.qkv_proj.shards(("q_proj", "k_proj", "v_proj")) | self.o_proj.shards(("o_proj",))
        if self.qk_norm is not None:
            q_weight, k_weight = self.qk_norm.weight.split((self.num_heads, self.num_kv_heads))
            targets |= {"q_norm.weight": q_weight, "k_norm.weight": k_weight}
        return targets


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = (config.intermediate_size, config.intermediate_size)
        self.gate_up_proj = MergedLinear(config.hidden_size, sizes, config.mlp_bias, config.dtype)
        self.down_proj = MergedLinear(config.intermediate_size, (config.hidden_size,), config.mlp_bias, config.dtype)
        self.act = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))

    def weight_targets(self) -> dict[str, torch.Tensor]:
        return self.gate_up_proj.shards(("gate_proj", "up_proj")) | self.down_proj.shards(("down_proj",))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, self_attn: LlamaAttention) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)

    def forward(
        self, state: DecoderState, batch: ForwardBatch, pool: KVPool, rows: torch.Tensor | None
    ) -> DecoderState:
        """rows: (n,) int64, the rows that anybody reads after this layer; None for all."""
        hidden = state.hidden
        attended = self.self_attn(self.input_layernorm(hidden), state, batch, pool)
        if rows is not None:
            hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
        hidden = self.self_attn.o_proj(attended).add_(hidden)
        state.hidden = self.mlp(self.post_attention_layernorm(hidden)).add_(hidden)
        return state

    def weight_targets(self) -> dict[str, torch.Tensor]:
        targets = {f"self_attn.{name}": target for name, target in self.self_attn.weight_targets().items()}
        targets |= {f"mlp.{name}": target for name, target in self.mlp.weight_targets().items()}
        targets["input_layernorm.weight"] = self.input_layernorm.weight
        targets["post_attention_layernorm.weight"] = self.post_attention_layernorm.weight
        return targets


class LlamaForCausalLM(nn.Module):
    """See `CausalLM`. A family that differs overrides the class attribute or `make_attention`."""

    qk_norm = False

    def __init__(self, config: ModelConfig, attn_backend: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        self.num_layers = config.num_layers
        shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Parameter(torch.empty(shape, dtype=config.dtype), requires_grad=False)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, self.make_attention(config, layer_id, attn_backend))
            for layer_id in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = nn.Parameter(torch.empty(shape, dtype=config.dtype), requires_grad=False)
        self.rotary = RotaryEmbedding(config.head_dim, config.context_length, config.rope_parameters, config.dtype)

    def make_attention(self, config: ModelConfig, layer_id: int, attn_backend: AttentionBackend) -> LlamaAttention:
        bias = config.attention_bias
        return LlamaAttention(config, layer_id, attn_backend, qkv_bias=bias, o_bias=bias, qk_norm=self.qk_norm)

    @torch.inference_mode()
    def embed(self, batch: ForwardBatch) -> DecoderState:
        cos, sin = self.rotary.lookup(batch.positions)
        return DecoderState(F.embedding(batch.input_ids, self.embed_tokens), cos, sin)

    @torch.inference_mode()
    def forward_layer(self, layer_id: int, state: DecoderState, batch: ForwardBatch, pool: KVPool) -> DecoderState:
        """Stores the layer's K and V of all rows; see `DecoderState` for what the last layer returns."""
        # After the last attention only sampled rows are read: none in the middle of a long prompt.
        rows = batch.sample_rows if layer_id == self.num_layers - 1 else None
        return self.layers[layer_id](state, batch, pool, rows)

    @torch.inference_mode()
    def logits(self, state: DecoderState, batch: ForwardBatch) -> torch.Tensor:
        """(num_samples, vocab_size) float32."""
        return F.linear(self.norm(state.hidden), self.lm_head).float()

    def weight_targets(self) -> dict[str, torch.Tensor]:
        """Every tensor a checkpoint must have -> the (part of a) parameter that takes it. A target of more
        dimensions than the checkpoint's tensor takes it broadcast."""
        targets: dict[str, torch.Tensor] = {"model.embed_tokens.weight": self.embed_tokens}
        for layer_id, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaDecoderLayer)
            targets |= {f"model.layers.{layer_id}.{name}": t for name, t in layer.weight_targets().items()}
        targets["model.norm.weight"] = self.norm.weight
        if self.lm_head is not self.embed_tokens:
            targets["lm_head.weight"] = self.lm_head
        return targets

    def ignores_weight(self, name: str) -> bool:
        """Tensors that checkpoints may carry and nobody needs."""
        return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.config.tie_word_embeddings)
