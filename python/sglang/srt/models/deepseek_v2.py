"""DeepSeek-V2 and -V3: Llama with latent attention, and mixtures that choose among groups of experts.

DeepSeek-V2 (2024), section 2.1: a token's latent and a rotated key that all heads share are cached in place of the
heads' keys and values. Every rank caches all of both, and has some of the heads. Queries are made queries of latents,
unless the batch has a long extend that is computed otherwise, see `LatentAttention`.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import Shard, TensorParallelGroup
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.kv_scale import kv_scale_of
from sglang.srt.layers.latent_attention import LatentAttention
from sglang.srt.layers.latent_projections import LatentProjections
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.radix_attention import Slots
from sglang.srt.layers.rotary_embedding import Rotation
from sglang.srt.layers.weights import WeightTarget
from sglang.srt.mem_cache.kv_view import KVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.llama import DecoderAttention, DecoderState, LlamaForCausalLM

# Of the norms inside of attention; config.json names another for those between layers.
_EPS = 1e-6


class DeepseekV2AttentionMLA(nn.Module):
    """See `DecoderAttention`. Its result before `output` are sums of latents, (num_heads, rank) of each token, or of
    values, (num_heads, value_dim)."""

    def __init__(
        self, config: ModelConfig, layer_id: int, backend: AttentionBackend, group: TensorParallelGroup
    ) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None
        hf, dtype, bias = config.hf_config, config.dtype, config.attention_bias
        stored_as = config.weight_format
        heads = group.shard(config.num_heads)
        self.config, self.num_heads = latent, heads.size
        # The config of DeepSeek-V2 has no such field, and may carry the name.
        self.is_interleaved = bool(hf.rope_interleave) if hasattr(type(hf), "rope_interleave") else True
        q = heads.times(latent.key_dim + latent.rotary_dim)
        cached = Shard(latent.cached_dim, 0, latent.cached_dim)
        self.q_b_proj: MergedColumnParallelLinear | None = None
        if hf.q_lora_rank is None:
            # Beside the projection of queries, which has no bias.
            assert not bias, "ModelConfig refuses it"
            self.first_proj = MergedColumnParallelLinear(config.hidden_size, (q, cached), False, dtype, stored_as)
        else:
            compressed = Shard(hf.q_lora_rank, 0, hf.q_lora_rank)
            first = (compressed, cached)
            self.first_proj = MergedColumnParallelLinear(config.hidden_size, first, bias, dtype, stored_as)
            self.q_a_layernorm = RMSNorm(hf.q_lora_rank, _EPS, dtype)
            self.q_b_proj = MergedColumnParallelLinear(hf.q_lora_rank, (q,), False, dtype, stored_as)
        self.kv_a_layernorm = RMSNorm(latent.rank, _EPS, dtype)
        # Dequantised: products are with parts of it and with their transposes.
        self.kv_b_proj = MergedColumnParallelLinear(
            latent.rank, (heads.times(latent.key_dim + latent.value_dim),), False, dtype
        )
        values = heads.times(latent.value_dim)
        self.o_proj = RowParallelLinear(values, config.hidden_size, bias, dtype, group, stored_as)
        kv_scale = kv_scale_of(config.kv_scales, group.rank, layer_id, 1, has_latents=True)
        # Has the projections in place of kv_b_proj, once that is loaded.
        self.attn = LatentAttention(layer_id, backend, kv_scale, config.windows[layer_id], latent)

    @property
    def attended_size(self) -> int:
        return self.num_heads * self.config.rank

    def project(
        self, x: torch.Tensor, rotation: Rotation, out_loc: Slots, pool: KVPool, expands: bool
    ) -> torch.Tensor:
        q, cached = self.first_proj(x).split([shard.size for shard in self.first_proj.shards], dim=1)
        if self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.unflatten(1, (self.num_heads, -1))
        of_keys, to_rotate = q.split((self.config.key_dim, self.config.rotary_dim), dim=2)
        first_dim = self.config.key_dim if expands else self.config.rank
        queries = x.new_empty(len(x), self.num_heads, first_dim + self.config.rotary_dim)
        self._store(to_rotate, queries, cached, rotation, out_loc, pool)
        queries[..., :first_dim] = of_keys if expands else self.projections.queries(of_keys)
        return queries

    def _store(
        self,
        q: torch.Tensor,
        queries: torch.Tensor,
        cached: torch.Tensor,
        rotation: Rotation,
        out_loc: Slots,
        pool: KVPool,
    ) -> None:
        """q: (num_tokens, num_heads, rotary_dim), to be rotated into the end of queries, (num_tokens, num_heads,
        rotary_dim and more). cached: (num_tokens, rank + rotary_dim), before its norm and rotation."""
        norm, view = self.kv_a_layernorm, pool.view(self.attn.layer_id)
        if self.attn.kv_scale.of_heads is None and rotation.store_latents(
            q, queries, cached, norm, view, self.attn.slots_of(out_loc), self.is_interleaved
        ):
            return
        latent, key = cached.split((self.config.rank, self.config.rotary_dim), dim=1)
        together = torch.cat((q, key[:, None]), dim=1)
        if self.is_interleaved:
            # Pairs of neighbours -> first and second half.
            together = together.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        rotated = rotation(together)
        queries[..., -self.config.rotary_dim :] = rotated[:, : self.num_heads]
        latents = torch.cat((norm(latent)[:, None], rotated[:, self.num_heads :]), dim=2)
        self.attn.store_latents(latents, out_loc, pool)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        if attended.shape[1] == self.attended_size:
            sums = attended.view(len(attended), self.num_heads, self.config.rank)
            attended = self.projections.values(sums).flatten(1)
        return self.o_proj(attended)

    @property
    def projections(self) -> LatentProjections:
        assert self.attn.projections is not None, "the weights are not complete"
        return self.attn.projections

    def make_projections(self) -> None:
        """Called once, when the weights are complete."""
        weight = self.kv_b_proj.loaded()
        self.attn.projections = LatentProjections(self.config, weight.detach().unflatten(0, (self.num_heads, -1)))
        del self.kv_b_proj

    def weight_targets(self) -> dict[str, WeightTarget]:
        first = "q_proj" if self.q_b_proj is None else "q_a_proj"
        targets = self.first_proj.weight_targets((first, "kv_a_proj_with_mqa"))
        targets |= self.kv_b_proj.weight_targets(("kv_b_proj",)) | self.o_proj.weight_targets("o_proj")
        targets["kv_a_layernorm.weight"] = WeightTarget.whole(self.kv_a_layernorm.weight)
        if self.q_b_proj is not None:
            targets |= self.q_b_proj.weight_targets(("q_b_proj",))
            targets["q_a_layernorm.weight"] = WeightTarget.whole(self.q_a_layernorm.weight)
        return targets


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    shared_expert_name = "shared_experts"
    # Whether all layers can.
    _can_expand = False

    def make_attention(self, config: ModelConfig, layer_id: int, attn_backend: AttentionBackend) -> DecoderAttention:
        return DeepseekV2AttentionMLA(config, layer_id, attn_backend, self.group)

    @torch.inference_mode()
    def embed(self, batch: ForwardBatch) -> DecoderState:
        state = super().embed(batch)
        attn = self._layer(0).self_attn.attn
        assert isinstance(attn, LatentAttention)
        state.expands = self._can_expand and not batch.streamed and attn.expands(batch)
        return state

    def finish_loading(self) -> None:
        for layer in self.modules():
            if isinstance(layer, DeepseekV2AttentionMLA):
                layer.make_projections()
        self._can_expand = all(each.can_expand for each in self.modules() if isinstance(each, LatentAttention))
        super().finish_loading()

    def ignores_weight(self, name: str) -> bool:
        # Layers behind the last one predict further tokens. Not all configs tell how many.
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return (layer is not None and int(layer[1]) >= self.num_layers) or super().ignores_weight(name)
