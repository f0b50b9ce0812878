"""The native decoders against transformers, on random weights that transformers itself wrote."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from sglang.srt.configs.model_config import ModelConfig
from support.tiny_runner import TinyRunner

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

BASE = dict(
    vocab_size=131,
    hidden_size=48,
    intermediate_size=88,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=20,
    max_position_embeddings=512,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=None,
)
EXPERTS = dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=40, tie_word_embeddings=True)

# A head's queries have 20 values, its values 12; 24 are cached of a token.
LATENT: dict[str, Any] = dict(
    q_lora_rank=28,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=12,
    head_dim=8,
    num_key_value_heads=6,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    first_k_dense_replace=1,
    pad_token_id=None,
)
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "llama_tied_mha": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama_biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    "llama3_rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1}),
    "linear_rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "num_key_value_heads": 3}),
    "mistral_window_as_long_as_the_context": (MistralConfig, MistralForCausalLM, {"sliding_window": 512}),
    "mistral_window": (MistralConfig, MistralForCausalLM, {"sliding_window": 11, "head_dim": 32}),
    # Of every layer but the first.
    "qwen2_windows": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "head_dim": 20},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2_window_not_used": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1, "head_dim": 8},
    ),
    # Fused projections in the files; the size of a head follows from that of the hidden state.
    "phi3": (Phi3Config, Phi3ForCausalLM, {"head_dim": 8, "pad_token_id": 0}),
    "phi3_window": (Phi3Config, Phi3ForCausalLM, {"head_dim": 8, "pad_token_id": 0, "sliding_window": 24}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False, "num_attention_heads": 4}),
    "qwen3_tied_biased": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True, "attention_bias": True}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 5, "num_experts_per_tok": 2}),
    # Layers 0 and 2 are dense; a shared expert.
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        EXPERTS | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "head_dim": 8},
    ),
    "qwen2_moe_unbiased": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        EXPERTS | {"qkv_bias": False, "norm_topk_prob": True, "mlp_only_layers": [2], "head_dim": 8},
    ),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS | {"norm_topk_prob": True}),
    # Sinks, biases, windows in layers 0 and 2, and activations far beyond the limit.
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=16, swiglu_limit=0.9, head_dim=32)
        | {"rope_parameters": GPT_OSS_ROPE},
    ),
    "gpt_oss_one_window": (
        GptOssConfig,
        GptOssForCausalLM,
        dict(num_local_experts=4, num_experts_per_tok=4, sliding_window=11, tie_word_embeddings=True)
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "num_key_value_heads": 3},
    ),
    # Experts of the two best of four groups; the first layer is dense.
    "deepseek_v2": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        LATENT
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7, "n_shared_experts": 2}
        | {"rope_parameters": DEEPSEEK_ROPE},
    ),
    "deepseek_v2_lite": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        LATENT
        | {"q_lora_rank": None, "topk_method": "greedy", "n_group": None, "topk_group": None, "n_shared_experts": 0}
        # Not its own: they mean nothing.
        | {"rope_interleave": False, "mlp_layer_types": ["dense"]},
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LATENT | {"attention_bias": True, "rope_parameters": DEEPSEEK_ROPE | {"mscale": 0.7}},
    ),
    "deepseek_v3_dense": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LATENT
        | {"first_k_dense_replace": 3, "rope_interleave": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mscale_all_dim": 1.0, "factor": 4.0}},
    ),
    # Capped scores and logits; windows in layers 0 and 2.
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        dict(sliding_window=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=11),
    ),
    "gemma2_uncapped": (
        Gemma2Config,
        Gemma2ForCausalLM,
        dict(sliding_window=512, attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True),
    ),
    # Full attention in layer 1, whose rotation is stretched.
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        dict(sliding_window=16, query_pre_attn_scalar=11, head_dim=32)
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
            }
        },
    ),
    # All see all of the context, and still rotate by their kind.
    "gemma3_one_kv_head": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        dict(sliding_window=512, num_key_value_heads=1, query_pre_attn_scalar=20)
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "glm4_moe_lite": (
        Glm4MoeLiteConfig,
        Glm4MoeLiteForCausalLM,
        LATENT | {"num_attention_heads": 5, "num_key_value_heads": 5, "rms_norm_eps": 1e-5, "v_head_dim": 16},
    ),
}
SEED = 3


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """A model in transformers, the same in ours (from sharded safetensors), and prompts."""
    config_class, model_class, changes = MODELS[request.param]
    torch.manual_seed(SEED)
    theirs = model_class(config_class(**BASE | changes)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            # Fresh norms are 1 and fresh biases 0, which would hide a norm or a bias that nobody applies.
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    path = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(path, max_shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    rng = random.Random(SEED)
    prompts = [[rng.randrange(BASE["vocab_size"]) for _ in range(n)] for n in (37, 1, 90, 8)]
    return SimpleNamespace(
        theirs=theirs, path=path, prompts=prompts, ours=TinyRunner(ModelConfig.from_pretrained(str(path)))
    )


@torch.no_grad()
def logits_of(theirs, tokens):
    return theirs(torch.tensor([tokens])).logits[0].float()


def assert_close(got, want, what, tolerance=5e-5):
    error = ((got - want).abs().max() / want.std()).item()
    assert error < tolerance, f"{what}, weights and prompts of seed {SEED}: off by {error} standard deviations"


def test_whole_prompt(pair):
    for tokens in pair.prompts:
        (seq,) = pair.ours.start([tokens])
        got = pair.ours.forward([(seq, len(tokens))], all_rows=True)
        assert got.dtype == torch.float32
        assert_close(got, logits_of(pair.theirs, tokens), f"{len(tokens)} tokens")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("page_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 16))])
def test_chunks_of_odd_sizes(pair, page_size):
    tokens = pair.prompts[2]
    want = logits_of(pair.theirs, tokens)
    for chunk in (1, 7, 40):
        (seq,) = pair.ours.start([tokens], page_size=page_size)
        got = []
        while seq.num_cached < len(tokens):
            got.append(pair.ours.forward([(seq, min(chunk, len(tokens) - seq.num_cached))], all_rows=True))
        assert_close(torch.cat(got), want, f"chunks of {chunk}, pages of {page_size}")


def test_chunk_in_mid_prompt_samples_nothing(pair):
    tokens = pair.prompts[2]
    (seq,) = pair.ours.start([tokens])
    assert pair.ours.forward([(seq, 50)]).shape == (0, BASE["vocab_size"])
    assert_close(pair.ours.forward([(seq, 40)]), logits_of(pair.theirs, tokens)[-1:], "second chunk")


def test_batch_of_extends_and_decodes(pair):
    seqs = pair.ours.start(pair.prompts, page_size=4)
    # The first is one token short of done, the third in the middle, the others have not begun.
    pair.ours.forward([(seqs[0], 36), (seqs[2], 51)])
    got = pair.ours.forward([(seq, len(seq.tokens) - seq.num_cached) for seq in seqs])
    want = torch.stack([logits_of(pair.theirs, tokens)[-1] for tokens in pair.prompts])
    assert_close(got, want, "mixed batch")


@pytest.mark.sampled(3)
def test_greedy_tokens(pair):
    num_tokens = 24
    got = pair.ours.generate(pair.prompts, num_tokens, page_size=3)
    for prompt, mine in zip(pair.prompts, got):
        want = pair.theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert mine == want[0, len(prompt) :].tolist(), f"prompt of {len(prompt)} tokens, seed {SEED}"


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(pair, dtype):
    ours = TinyRunner(ModelConfig.from_pretrained(str(pair.path), dtype=dtype))
    theirs = type(pair.theirs).from_pretrained(pair.path, dtype=getattr(torch, dtype))
    tokens = pair.prompts[2]
    exact = logits_of(pair.theirs, tokens)
    (seq,) = ours.start([tokens])
    got = ours.forward([(seq, 50)], all_rows=True)
    got = torch.cat((got, ours.forward([(seq, 40)], all_rows=True)))
    # A token for which two experts are almost equally good takes one or the other: most tokens do not.
    spread = torch.Tensor.std if pair.ours.model.config.experts is None else torch.Tensor.median
    # As far from the float32 result as transformers' own is in that type, give or take.
    noise = spread((logits_of(theirs, tokens) - exact).abs()).item()
    mine = spread((got - exact).abs()).item()
    assert mine < 1.5 * noise < 0.2 * exact.std().item(), f"seed {SEED}: {mine} beside transformers' {noise}"


def test_replay_gives_the_same_bits(pair):
    runs = []
    for seed in (1, 2):  # other frames, same batch
        seqs = pair.ours.start(pair.prompts[:3], page_size=2, seed=seed)
        first = pair.ours.forward([(seqs[0], 20), (seqs[1], 1), (seqs[2], 60)], all_rows=True)
        runs.append(torch.cat((first, pair.ours.forward([(seqs[0], 17), (seqs[2], 30)], all_rows=True))))
    assert torch.equal(*runs)


TEXT = BASE | dict(sliding_window=16, head_dim=32, query_pre_attn_scalar=20)
IMAGES = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)


@pytest.mark.parametrize(
    "names", ["new", "old", "tied head", "own head", "named as of text", "named as without a head"]
)
def test_of_text_and_images_the_text_is_served(tmp_path, names: str):
    """Its checkpoints have other names, older ones yet others, and what text and images share stands outside. Caps in
    its config are not read."""
    torch.manual_seed(SEED)
    is_tied = names != "own head"
    text = TEXT | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "tie_word_embeddings": is_tied}
    config = Gemma3Config(text_config=text, vision_config=IMAGES, dtype="float32", eos_token_id=[5, 7])
    theirs = Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    assert any(name.startswith("vision_tower.") for name in weights)
    head = "language_model.lm_head.weight"
    if names == "new":
        weights = {
            f"model.{name.replace('language_model.model.', 'language_model.')}": tensor
            for name, tensor in weights.items()
        }
    elif names == "tied head":
        weights[head] = weights["language_model.model.embed_tokens.weight"].clone()
    elif names == "own head":
        weights[head] = torch.randn(weights["language_model.model.embed_tokens.weight"].shape)
        theirs.lm_head.weight = torch.nn.Parameter(weights[head])
    elif names.startswith("named as"):
        changed = json.loads((tmp_path / "config.json").read_text())
        changed["architectures"] = ["Gemma3ForCausalLM" if names == "named as of text" else "Gemma3Model"]
        # As a text model has it, which reads this one.
        changed["text_config"]["final_logit_softcapping"] = None
        (tmp_path / "config.json").write_text(json.dumps(changed))
    if names == "named as without a head":
        weights = {name.replace("language_model.model.", "language_model."): t for name, t in weights.items()}
    save_file(weights, path)
    found = ModelConfig.from_pretrained(str(tmp_path))
    assert found.dtype == torch.float32 and found.eos_token_ids == (5, 7) and found.tie_word_embeddings == is_tied
    assert found.windows == (16, 16, 16) and found.attn_scale == 20**-0.5
    ours, tokens = TinyRunner(found), list(range(7, 67))
    (seq,) = ours.start([tokens])
    assert_close(ours.forward([(seq, len(tokens))], all_rows=True), logits_of(theirs, tokens), "text of Gemma 3")


def test_rotations_of_older_configs(tmp_path):
    """As on the hub: one factor, and a base for each kind of layers."""
    torch.manual_seed(SEED)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0}}
    ropes |= {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    theirs = Gemma3ForCausalLM(Gemma3TextConfig(**TEXT, layer_types=kinds, rope_parameters=ropes)).eval()
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config |= {
        "rope_theta": 900.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8},
    }
    path.write_text(json.dumps(config))
    tokens = list(range(60))
    ours = TinyRunner(ModelConfig.from_pretrained(str(tmp_path)))
    (seq,) = ours.start([tokens])
    assert_close(ours.forward([(seq, 60)], all_rows=True), logits_of(theirs, tokens), "Gemma 3")


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    """Checkpoints of DeepSeek-V3 hold one behind the last layer."""
    torch.manual_seed(SEED)
    DeepseekV3ForCausalLM(DeepseekV3Config(**BASE | LATENT)).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, path)
    TinyRunner(ModelConfig.from_pretrained(str(tmp_path)))


def test_latents_in_eight_bits_with_a_scale(tmp_path):
    """Values are a part of keys, and have their scale, whatever is given for values."""
    torch.manual_seed(SEED)
    DeepseekV3ForCausalLM(DeepseekV3Config(**BASE | LATENT)).save_pretrained(tmp_path)
    config = ModelConfig.from_pretrained(str(tmp_path))
    tokens = list(range(60))
    logits = []
    for scale in (None, 1.0, 0.25):
        scales = () if scale is None else ((((scale, 7.0),) * 3),)
        kv_dtype = None if scale is None else torch.float8_e4m3fn
        runner = TinyRunner(replace(config, kv_cache_dtype=kv_dtype, kv_scales=scales))
        (seq,) = runner.start([tokens], page_size=4)
        logits.append(torch.cat([runner.forward([(seq, n)], all_rows=True) for n in (40, 20)]))
    exact, *rounded = logits
    for each in rounded:
        error = ((each - exact).std() / exact.std()).item()
        assert 0 < error < 0.2, f"seed {SEED}: off by {error} standard deviations"
