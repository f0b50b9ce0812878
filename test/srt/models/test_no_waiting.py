"""No step of a model waits for a device: every one is run on torch's meta device, with and without fused kernels."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, Qwen2MoeConfig, Qwen3Config

from sgl_kernel import experts
from sgl_kernel.experts import reference
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import SINGLE_RANK
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.mem_cache.kv_view import KVSegment, KVView
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, StreamedRows
from sglang.srt.models.registry import get_model_class
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from support import fake_flashinfer
from support.no_waiting import DEVICE, NoWaiting
from support.tiny_runner import TinyRunner

SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=128,
)
EXPERTS = dict(
    hidden_size=256,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=80,
    num_experts=4,
    num_experts_per_tok=2,
)
CONFIGS = {
    "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen3": (Qwen3Config, {}),
    "qwen2_moe": (Qwen2MoeConfig, EXPERTS),
    "gemma2": (Gemma2Config, {"sliding_window": 16}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 16}),
}


class NoAttention:
    """Shapes alone: what backends and pools do is not a model's affair."""

    computes_masked = True

    def forward(self, q, view, segments, meta):
        return torch.empty_like(q)

    def partial(self, q, view, segment, scale, mask=None):
        return q.float(), q[..., 0].float()

    def view(self, layer_id):
        return KVView(self.none, self.none)

    def store(self, layer_id, loc, k, v):
        assert k.shape == v.shape and len(loc) == len(k)

    none = torch.empty(0, 1, 1, 1)


class NoExperts:
    """Shapes alone, in the place of kernels that run on a GPU."""

    choose = staticmethod(reference.choose)

    @staticmethod
    def group_by_expert(chosen, num_experts):
        places = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
        return places, torch.empty(num_experts, dtype=torch.int32, device=chosen.device)

    @staticmethod
    def product_of_tokens(x, weights, groups, bias):
        return x.new_empty(len(groups.places), weights.shape[1])

    @staticmethod
    def product_to_places(x, weights, groups, bias):
        return x.new_empty(len(x) // groups.top_k, groups.top_k, weights.shape[1])

    @staticmethod
    def weighted_sum(outputs, weights):
        assert outputs.shape[:2] == weights.shape
        return outputs[:, 0]


def load_config(tmp_path, name, dtype):
    config_class, changes = CONFIGS[name]
    config = config_class(**SIZES | changes)
    family = config_class.__name__.removesuffix("Config").removesuffix("Text")
    config.dtype, config.architectures = dtype, [f"{family}ForCausalLM"]
    config.save_pretrained(tmp_path)
    return ModelConfig.from_pretrained(str(tmp_path))


def make_batch(num_tokens, sample_rows, streamed):
    def ints(n):
        return torch.empty(n, dtype=torch.int64, device=DEVICE)

    segments = [KVSegment(ints(4), 4)]
    of_device = [[] if streamed else segments]
    return ForwardBatch(
        seq=0,
        mode=ForwardMode.EXTEND,
        input_ids=ints(num_tokens),
        positions=ints(num_tokens),
        out_loc=ints(num_tokens).expand(2, -1),
        segments=of_device,
        windowed_segments=of_device,
        attn=AttentionMetadata((num_tokens,), 1.0),
        sample_rows=ints(sample_rows),
        sample_slots=ints(0),
        sampling=SamplingBatchInfo.from_params([], 96, ints(0), DEVICE),
        streamed=[StreamedRows(slice(0, num_tokens), 4, 8, segments)] if streamed else [],
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_waits_for_nothing(tmp_path, monkeypatch, name, dtype, fused):
    monkeypatch.setattr(experts, "_module", lambda x: NoExperts)
    config, nothing = load_config(tmp_path, name, dtype), NoAttention()
    with DEVICE:
        model = get_model_class(config)(config, nothing, SINGLE_RANK)
    assert all(t.device == DEVICE for t in (*model.parameters(), *model.buffers()))
    with fake_flashinfer.installed() if fused else nullcontext({}) as calls, NoWaiting():
        for num_tokens, sample_rows, streamed in ((5, 2, False), (1, 1, False), (7, 0, False), (6, 1, True)):
            batch = make_batch(num_tokens, sample_rows, streamed)
            state = model.embed(batch)
            for layer in range(model.num_layers):
                state = model.begin_layer(layer, state, batch, nothing)
                if streamed:
                    segment = KVSegment(batch.out_loc[0, :4], 4)
                    state = model.attend(layer, state, batch, 0, nothing.view(layer), segment, 4)
                state = model.end_layer(layer, state, batch)
            logits = model.logits(state, batch)
            assert logits.shape == (sample_rows, 96) and logits.device == DEVICE
    used = {function for function, call in calls.items() if call.called}
    wanted = {"rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "apply_rope_with_cos_sin_cache_inplace"}
    if name.startswith("gemma"):
        # Its norms have weights of float32, and its activation is another.
        wanted = {"apply_rope_with_cos_sin_cache_inplace"}
    assert used == (wanted if fused and dtype == "bfloat16" else set())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fused_kernels_give_the_same_logits(tmp_path, name):
    config = load_config(tmp_path, name, "bfloat16")
    runner = TinyRunner(config, "dummy", seed=1)
    prompts = [[(7 * i + n) % 96 for i in range(n)] for n in (20, 1, 9)]

    def logits():
        seqs = runner.start(prompts, page_size=4)
        runner.forward([(seqs[0], 11)])
        return runner.forward([(seq, len(seq.tokens) - seq.num_cached) for seq in seqs])

    want = logits()
    with fake_flashinfer.installed() as calls:
        got = logits()
    # Every layer has one norm of its own, the first, and adds before the others; the last one norms what is sampled.
    per_head = 2 * config.num_layers if name == "qwen3" else 0
    assert calls["rmsnorm"].call_count == 2 * (1 + per_head)
    # The first launch samples nothing, so that its last layer has no rows to add and to activate.
    assert calls["fused_add_rmsnorm"].call_count == (2 * config.num_layers - 2) + 2 * config.num_layers
    assert calls["silu_and_mul"].call_count == 2 * config.num_layers - 1
    assert calls["apply_rope_with_cos_sin_cache_inplace"].call_count == 2 * config.num_layers
    assert not torch.equal(got, want)
    # bfloat16 rounds to 2 ** -9; a few times on the way.
    assert (got - want).abs().max() < 0.05 * want.std()
