"""The decoder: Llama, and by small variations most other families.

Owns this rank's part of the weights: attention heads, rows of the feed-forward layers and of the vocabulary. KV lives
in the pool that each call brings; the model never waits for it: the executor calls layer by layer and opens each
layer's gate first. What goes from layer to layer is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from sglang.srt.configs.experts import HAVE_SHARED_EXPERTS
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quantization import UNUSED
from sglang.srt.distributed.parallel_state import Shard, TensorParallelGroup
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.kv_scale import kv_scale_of
from sglang.srt.layers.layernorm import Norm, QKNorm, RMSNorm
from sglang.srt.layers.linear import GatedLinear, MergedColumnParallelLinear, RowParallelLinear, Weight
from sglang.srt.layers.mixture import ExpertNames, Experts, Mixture
from sglang.srt.layers.radix_attention import AttentionBatch, RadixAttention, Slots, StreamedAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, Rotation
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.layers.weights import WeightTarget
from sglang.srt.mem_cache.kv_view import KVPool, KVSegment, KVView
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Projections that are one matrix here, and in some checkpoints.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass
class DecoderState:
    """What travels between layers. hidden: (num_tokens, hidden_size); after the last layer only the rows of
    batch.sample_rows. update: what the last layer adds to it, same shape, left to the next norm, which adds on its
    way; None at the start. rotation, out_loc: of the batch's rows, see `ForwardBatch`. windowed_rotation: of layers
    with a window, where that is another. expands: whether its queries
    are those of the heads' own keys where latents are cached, see `LatentAttention`. Within a layer, attended:
    (num_tokens, num_heads * head_dim), its output, and streamed: that of requests that stream."""

    hidden: torch.Tensor
    rotation: Rotation
    out_loc: Slots
    update: torch.Tensor | None = None
    windowed_rotation: Rotation | None = None
    expands: bool = False
    attended: torch.Tensor | None = None
    streamed: StreamedAttention | None = None


class LlamaAttention(nn.Module):
    """See `DecoderAttention`. num_heads, num_kv_heads: this rank's. qk_norm: normalise each head of q and k before
    the rotation."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        backend: AttentionBackend,
        group: TensorParallelGroup,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool,
    ) -> None:
        super().__init__()
        heads, kv_heads = group.shard(config.num_heads), group.shard_kv_heads(config.num_kv_heads)
        self.num_heads, self.num_kv_heads, self.head_dim = heads.size, kv_heads.size, config.head_dim
        q, kv = heads.times(self.head_dim), kv_heads.times(self.head_dim)
        stored_as = config.weight_format
        self.qkv_proj = MergedColumnParallelLinear(config.hidden_size, (q, kv, kv), qkv_bias, config.dtype, stored_as)
        self.o_proj = RowParallelLinear(q, config.hidden_size, o_bias, config.dtype, group, stored_as)
        self.qk_norm = None
        if qk_norm:
            shape = self.num_heads, self.num_kv_heads, self.head_dim
            self.qk_norm = QKNorm(*shape, config.rms_norm_eps, config.dtype, config.norms_from_one)
        kv_scale = kv_scale_of(config.kv_scales, group.rank, layer_id, kv_heads.size)
        self.attn = RadixAttention(layer_id, backend, kv_scale, config.windows[layer_id])

    def project(
        self, x: torch.Tensor, rotation: Rotation, out_loc: Slots, pool: KVPool, expands: bool
    ) -> torch.Tensor:
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        qk, v = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        slots = self.attn.slots_of(out_loc)
        if rotation.store(qk, v, pool.view(self.attn.layer_id), slots, self.attn.kv_scale):
            return qk[:, : self.num_heads]
        q, k = rotation(qk).split((self.num_heads, self.num_kv_heads), dim=1)
        self.attn.store(k, v, out_loc, pool)
        return q

    @property
    def attended_size(self) -> int:
        return self.num_heads * self.head_dim

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        return self.o_proj(attended)

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = self.qkv_proj.weight_targets(FUSED["qkv_proj"]) | self.o_proj.weight_targets("o_proj")
        if self.qk_norm is not None:
            q_weight, k_weight = self.qk_norm.split_weight()
            shape = (self.head_dim,)
            targets |= {
                "q_norm.weight": WeightTarget(q_weight, shape),
                "k_norm.weight": WeightTarget(k_weight, shape),
            }
        return targets


class LlamaMLP(nn.Module):
    """shard: this rank's part of the width inside. group: the ranks over which the result is summed; is_part: by the
    caller."""

    def __init__(self, config: ModelConfig, shard: Shard, group: TensorParallelGroup, is_part: bool = False) -> None:
        super().__init__()
        bias, dtype, stored_as = config.mlp_bias, config.dtype, config.weight_format
        self.gate_up_proj = GatedLinear(config.hidden_size, shard, bias, dtype, stored_as, config.activation)
        self.down_proj = RowParallelLinear(shard, config.hidden_size, bias, dtype, group, stored_as, is_part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x))

    def weight_targets(self) -> dict[str, WeightTarget]:
        return self.gate_up_proj.weight_targets(FUSED["gate_up_proj"]) | self.down_proj.weight_targets("down_proj")


class DecoderAttention(Protocol):
    """A layer's attention. attn: over the cache. attended_size: of a token's attention, before `output`."""

    @property
    def attn(self) -> RadixAttention: ...

    @property
    def attended_size(self) -> int: ...

    def project(
        self, x: torch.Tensor, rotation: Rotation, out_loc: Slots, pool: KVPool, expands: bool
    ) -> torch.Tensor:
        """x: (num_tokens, hidden_size). Stores what the cache holds, and returns queries, (num_tokens, heads,
        head_dim). expands: see `DecoderState`."""
        ...

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """attended: (num_tokens, attended_size), or another size where `project` got expands. Returns (num_tokens,
        hidden_size)."""
        ...

    def weight_targets(self) -> dict[str, WeightTarget]: ...


def make_norm(config: ModelConfig) -> RMSNorm:
    """Of the residual stream."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype, config.norms_from_one)


class LlamaDecoderLayer(nn.Module):
    """mlp_name: its name in checkpoints."""

    def __init__(
        self, config: ModelConfig, self_attn: DecoderAttention, mlp: LlamaMLP | Mixture, mlp_name: str
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp, self.mlp_name = mlp, mlp_name
        self.input_layernorm, self.post_attention_layernorm = make_norm(config), make_norm(config)

    def project(self, state: DecoderState, pool: KVPool) -> torch.Tensor:
        normed, state.hidden = self.input_layernorm.after_add(state.hidden, state.update)
        state.update = None
        return self.self_attn.project(normed, self.rotation(state), state.out_loc, pool, state.expands)

    def rotation(self, state: DecoderState) -> Rotation:
        return state.rotation

    def finish(self, state: DecoderState, attended: torch.Tensor, rows: torch.Tensor | None) -> DecoderState:
        """rows: (n,) int64, the rows that are read after this layer; None for all."""
        hidden = state.hidden
        if rows is not None:
            hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
        normed, state.hidden = self.post_attention_layernorm.after_add(hidden, self.self_attn.output(attended))
        state.update = self.mlp(normed)
        return state

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = {f"self_attn.{name}": target for name, target in self.self_attn.weight_targets().items()}
        targets |= {f"{self.mlp_name}.{name}": target for name, target in self.mlp.weight_targets().items()}
        targets["input_layernorm.weight"] = WeightTarget.whole(self.input_layernorm.weight)
        targets["post_attention_layernorm.weight"] = WeightTarget.whole(self.post_attention_layernorm.weight)
        return targets


class LlamaForCausalLM(nn.Module):
    """See `CausalLM`. A family that differs overrides class attributes, `biases`, `make_attention` or `make_layer`.

    group: the ranks that share the model; all call the same methods in the same order, on one thread each."""

    qk_norm = False
    # In checkpoints: of a feed-forward layer, and of gate, up and down in an expert.
    mlp_name = "mlp"
    expert_names = ("gate_proj", "up_proj", "down_proj")
    shared_expert_name = "shared_expert"
    router_name = "gate"

    def __init__(self, config: ModelConfig, attn_backend: AttentionBackend, group: TensorParallelGroup) -> None:
        super().__init__()
        self.config = config
        self.group = group
        self.num_layers, self.windows = config.num_layers, config.windows
        self.dtype = config.dtype
        vocab = (config.vocab_size, config.hidden_size, config.dtype, group)
        self.embed_tokens = VocabParallelEmbedding(*vocab)
        self.layers = nn.ModuleList(
            self.make_layer(config, layer_id, attn_backend) for layer_id in range(config.num_layers)
        )
        self.attended_size = self._layer(0).self_attn.attended_size
        self.norm = make_norm(config)
        self.lm_head = ParallelLMHead(*vocab, tied=self.embed_tokens if config.tie_word_embeddings else None)
        self.rotary = RotaryEmbedding(config.rotary_dim, config.context_length, config.rope_parameters, config.dtype)

    def biases(self, config: ModelConfig) -> tuple[bool, bool]:
        """Whether q, k and v have biases, and whether the projection of attention's output has one."""
        return config.attention_bias, config.attention_bias

    def make_layer(self, config: ModelConfig, layer_id: int, attn_backend: AttentionBackend) -> LlamaDecoderLayer:
        attention = self.make_attention(config, layer_id, attn_backend)
        return LlamaDecoderLayer(config, attention, self.make_mlp(config, layer_id), self.mlp_name)

    def make_attention(self, config: ModelConfig, layer_id: int, attn_backend: AttentionBackend) -> DecoderAttention:
        qkv_bias, o_bias = self.biases(config)
        return LlamaAttention(config, layer_id, attn_backend, self.group, qkv_bias, o_bias, self.qk_norm)

    def make_mlp(self, config: ModelConfig, layer_id: int) -> LlamaMLP | Mixture:
        experts, group = config.experts, self.group
        if experts is None or not experts.layers[layer_id]:
            return LlamaMLP(config, group.shard(config.intermediate_size), group)
        shared = None
        if experts.shared_size:
            shared = LlamaMLP(config, group.shard(experts.shared_size), group, is_part=True)
        names = ExpertNames(*self.expert_names, self.shared_expert_name, self.router_name)
        return Mixture(experts, config.hidden_size, config.dtype, group, names, shared, config.expert_format)

    @torch.inference_mode()
    def embed(self, batch: ForwardBatch) -> DecoderState:
        return self.start(batch.input_ids, batch.positions, batch.out_loc)

    def forward_layer(self, layer_id: int, state: DecoderState, batch: ForwardBatch, pool: KVPool) -> DecoderState:
        """Stores the layer's K and V of all rows; see `DecoderState` for what the last layer returns."""
        return self.end_layer(layer_id, self.begin_layer(layer_id, state, batch, pool), batch)

    @torch.inference_mode()
    def begin_layer(self, layer_id: int, state: DecoderState, batch: ForwardBatch, pool: KVPool) -> DecoderState:
        q = self.project(layer_id, state, pool)
        state.attended = self.attend_own(layer_id, q, batch, pool)
        if batch.streamed:
            attention = self._layer(layer_id).self_attn.attn
            state.streamed = StreamedAttention(attention, q, batch.attn, batch.streamed, pool)
        return state

    @torch.inference_mode()
    def attend(
        self,
        layer_id: int,
        state: DecoderState,
        batch: ForwardBatch,
        place: int,
        view: KVView,
        segment: KVSegment,
        position: int,
    ) -> DecoderState:
        assert state.streamed is not None
        state.streamed.attend(place, view, segment, position)
        return state

    @torch.inference_mode()
    def end_layer(self, layer_id: int, state: DecoderState, batch: ForwardBatch) -> DecoderState:
        attended = state.attended
        assert attended is not None
        if state.streamed is not None:
            state.streamed.write_to(attended)
        # After the last attention only sampled rows are read: none in the middle of a long prompt.
        rows = batch.sample_rows if layer_id == self.num_layers - 1 else None
        return self.finish_layer(layer_id, state, attended, rows)

    # The parts of a layer, see `CutModel`.

    @torch.inference_mode()
    def start(self, input_ids: torch.Tensor, positions: torch.Tensor, out_loc: torch.Tensor) -> DecoderState:
        return DecoderState(self.embed_tokens(input_ids), self.rotary.at(positions), out_loc.unbind())

    @torch.inference_mode()
    def project(self, layer_id: int, state: DecoderState, pool: KVPool) -> torch.Tensor:
        return self._layer(layer_id).project(state, pool)

    @torch.inference_mode()
    def attend_own(self, layer_id: int, q: torch.Tensor, batch: AttentionBatch, pool: KVPool) -> torch.Tensor:
        return self._layer(layer_id).self_attn.attn(q, batch, pool).reshape(q.shape[0], -1)

    @torch.inference_mode()
    def finish_layer(
        self, layer_id: int, state: DecoderState, attended: torch.Tensor, rows: torch.Tensor | None = None
    ) -> DecoderState:
        return self._layer(layer_id).finish(state, attended, rows)

    def first_rows(self, state: DecoderState, num_rows: int) -> DecoderState:
        out_loc = tuple(slots[:num_rows] for slots in state.out_loc)
        return replace(state, hidden=state.hidden[:num_rows], out_loc=out_loc)

    def _layer(self, layer_id: int) -> LlamaDecoderLayer:
        layer = self.layers[layer_id]
        assert isinstance(layer, LlamaDecoderLayer)
        return layer

    @torch.inference_mode()
    def logits(self, state: DecoderState, batch: ForwardBatch) -> torch.Tensor:
        """(num_samples, vocab_size) float32, on every rank."""
        normed, _ = self.norm.after_add(state.hidden, state.update)
        if batch.wants_hidden:
            batch.hidden = normed
        return self.lm_head(normed)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Every tensor a checkpoint must have -> where it goes."""
        targets = self.embed_tokens.weight_targets("model.embed_tokens")
        for layer_id, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaDecoderLayer)
            targets |= {f"model.layers.{layer_id}.{name}": t for name, t in layer.weight_targets().items()}
        targets["model.norm.weight"] = WeightTarget.whole(self.norm.weight)
        if not self.config.tie_word_embeddings:
            targets |= self.lm_head.weight_targets("lm_head")
        return targets

    def finish_loading(self) -> None:
        """Called once, when the weights are complete. Packs them for the kernels that need it."""
        for module in self.modules():
            if isinstance(module, Weight | Experts | Norm):
                module.finish_loading()

    def parts_of_fused(self, name: str) -> tuple[str, ...]:
        """The tensors, one below the other, that a checkpoint may hold as one, `name`; () if it is no such name."""
        *path, module, kind = name.split(".")
        if self.config.experts is not None and path and path[-1] == "mlp":
            # As transformers has them in memory.
            path[-1] = self.mlp_name
            gate, up, down = self.expert_names
            if module == "experts":
                of, is_bias = kind.removesuffix("_bias"), kind.endswith("_bias")
                parts = {"gate_up_proj": (gate, up), "down_proj": (down,)}.get(of, ())
                end, experts = "bias" if is_bias else "weight", range(self.config.experts.num_experts)
                return tuple(".".join((*path, module, f"{e}.{part}.{end}")) for e in experts for part in parts)
            if module == "gate":
                return (".".join((*path, module, kind)),)
        return tuple(".".join((*path, part, kind)) for part in FUSED.get(module, ()))

    def stacks_experts(self, name: str) -> bool:
        """Whether a checkpoint's tensor `name` has experts as model_loader/stacked_experts.py reads them; those of
        `parts_of_fused` stand one below the other in all others."""
        return False

    def ignores_weight(self, name: str) -> bool:
        """Tensors that checkpoints may contain and the model does not need."""
        experts = self.config.experts
        if experts is not None and not experts.shared_size and f".{self.mlp_name}.{self.shared_expert_name}" in name:
            # transformers saves one without width, whose result is 0.
            return self.config.architecture in HAVE_SHARED_EXPERTS
        return name.endswith(("rotary_emb.inv_freq", *UNUSED)) or (
            name == "lm_head.weight" and self.config.tie_word_embeddings
        )
