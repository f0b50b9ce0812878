"""Gemma 2 and 3: Llama with norms also behind attention and behind the feed-forward layer, scaled embeddings, gelu,
and windows in most layers.

Gemma 2 (Gemma Team, 2024, section 2) caps scores and logits. Gemma 3 (Gemma Team, 2025, section 2) normalises queries
and keys in place of that, and layers with a window rotate by other frequencies.
"""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import TensorParallelGroup
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.mixture import Mixture
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, Rotation
from sglang.srt.layers.weights import WeightTarget
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.llama import (
    DecoderAttention,
    DecoderState,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    make_norm,
)


class GemmaDecoderLayer(LlamaDecoderLayer):
    """has_window: also where the context is no longer than that."""

    def __init__(
        self,
        config: ModelConfig,
        self_attn: DecoderAttention,
        mlp: LlamaMLP | Mixture,
        mlp_name: str,
        has_window: bool,
    ) -> None:
        super().__init__(config, self_attn, mlp, mlp_name)
        self.has_window = has_window
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = make_norm(config), make_norm(config)

    def rotation(self, state: DecoderState) -> Rotation:
        return state.windowed_rotation or state.rotation if self.has_window else state.rotation

    def finish(self, state: DecoderState, attended: torch.Tensor, rows: torch.Tensor | None) -> DecoderState:
        hidden = state.hidden
        if rows is not None:
            hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
        update = self.post_attention_layernorm(self.self_attn.output(attended))
        normed, state.hidden = self.pre_feedforward_layernorm.after_add(hidden, update)
        state.update = self.post_feedforward_layernorm(self.mlp(normed))
        return state

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = super().weight_targets()
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            targets[f"{name}.weight"] = WeightTarget.whole(getattr(self, name).weight)
        return targets


class Gemma2ForCausalLM(LlamaForCausalLM):
    # Where the config has a cap. Gemma 3's may have caps that transformers' models do not read.
    caps_scores = caps_logits = True

    def __init__(self, config: ModelConfig, attn_backend: AttentionBackend, group: TensorParallelGroup) -> None:
        super().__init__(config, attn_backend, group)
        # In the type of the weights, as it was trained.
        self.embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=config.dtype, device="cpu"))
        self.logit_softcap: float | None = None
        if self.caps_logits:
            self.logit_softcap = config.hf_config.final_logit_softcapping
        self.windowed_rotary = None
        if config.windowed_rope_parameters is not None:
            self.windowed_rotary = RotaryEmbedding(
                config.rotary_dim, config.context_length, config.windowed_rope_parameters, config.dtype
            )

    def make_layer(self, config: ModelConfig, layer_id: int, attn_backend: AttentionBackend) -> LlamaDecoderLayer:
        attention = self.make_attention(config, layer_id, attn_backend)
        if self.caps_scores:
            attention.attn.softcap = config.hf_config.attn_logit_softcapping
        has_window = config.hf_config.layer_types[layer_id] == "sliding_attention"
        return GemmaDecoderLayer(config, attention, self.make_mlp(config, layer_id), self.mlp_name, has_window)

    @torch.inference_mode()
    def start(self, input_ids: torch.Tensor, positions: torch.Tensor, out_loc: torch.Tensor) -> DecoderState:
        state = super().start(input_ids, positions, out_loc)
        state.hidden = state.hidden * self.embedding_scale
        if self.windowed_rotary is not None:
            state.windowed_rotation = self.windowed_rotary.at(positions)
        return state

    @torch.inference_mode()
    def logits(self, state: DecoderState, batch: ForwardBatch) -> torch.Tensor:
        logits = super().logits(state, batch)
        if self.logit_softcap is None:
            return logits
        return logits.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Also the text model of one that reads images, where its checkpoint has that architecture."""

    qk_norm = True
    caps_scores = False

    def ignores_weight(self, name: str) -> bool:
        is_of_images = name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector."))
        return is_of_images or super().ignores_weight(name)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    caps_logits = False
