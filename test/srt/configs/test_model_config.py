"""`ModelConfig`: what it reads, and the sentence it refuses with."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save, save_file

from sglang.srt.configs import model_config, weights_digest
from sglang.srt.configs.experts import ClampedExperts, ExpertsConfig
from sglang.srt.configs.latent import LatentConfig
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.configs.model_families import NATIVE
from sglang.srt.configs.model_files import check_config, rope_parameters_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
    "tie_word_embeddings": False,
}


def write(path, generation=None, **changes):
    content = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    (path / "config.json").write_text(json.dumps(content))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return str(path)


def test_reads_a_directory(tmp_path):
    config = ModelConfig.from_pretrained(write(tmp_path, {"eos_token_id": [9, 7]}, dtype="bfloat16"))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert (config.vocab_size, config.context_length, config.dtype) == (100, 256, torch.bfloat16)
    assert config.eos_token_ids == (7, 9)
    assert config.attn_scale == 8**-0.5
    assert config.local_path == tmp_path


def test_ends_that_the_model_cannot_draw_are_left_out(tmp_path):
    """A minimum length would set a logit that is not there, which fails all requests of the launch."""
    config = ModelConfig.from_pretrained(write(tmp_path, {"eos_token_id": [99, 100, -1]}, eos_token_id=100))
    assert config.eos_token_ids == (99,)


END = {"content": "<|im_end|>", "special": True}


GEMMA = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}


@pytest.mark.parametrize(
    "config, added, want",
    [
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"31": END, "7": {"content": "</s>"}}}, None, (7, 31)),
        ({"eos_token": END, "added_tokens_decoder": {"7": {"content": "</s>"}}}, [{"id": 32, **END}], (7, 32)),
        ({"eos_token": "<|im_end|>"}, [{"id": 100, **END}], (7,)),
        ({"eos_token": "<|im_end|>"}, None, (7,)),
        ({"eos_token": None}, None, (7,)),
        ({"eos_token": 5, "added_tokens_decoder": [END]}, None, (7,)),
    ],
)
def test_the_tokenizers_end_ends_an_answer(tmp_path, config, added, want):
    """As of a model that was tuned to another template, whose config.json still names its base's end."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if added is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert ModelConfig.from_pretrained(write(tmp_path)).eos_token_ids == want


@pytest.mark.parametrize("token, want", [(31, (7, 31)), (7, (7,)), (100, (7,))])
def test_the_end_of_a_tokenizer_elsewhere_ends_an_answer(tmp_path, token, want):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": {str(token): END}}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    assert ModelConfig.from_pretrained(write(tmp_path)).with_tokenizer(str(tokenizer)).eos_token_ids == want


@pytest.mark.parametrize("ends", ["</s>", [[7]]])
def test_ends_that_are_no_tokens(tmp_path, ends):
    with pytest.raises(ModelConfigError, match="is not a valid generation config"):
        ModelConfig.from_pretrained(write(tmp_path, {"eos_token_id": ends}))
    with pytest.raises(ModelConfigError, match="is not a valid generation config: it is no JSON object"):
        ModelConfig.from_pretrained(write(tmp_path, []))


@pytest.mark.parametrize(
    "stored,asked,want",
    [
        (None, "auto", torch.float32),
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.float16),
        ("bfloat16", "half", torch.float16),
        ("float16", "bf16", torch.bfloat16),
        ("bfloat16", "float", torch.float32),
    ],
)
def test_dtype(tmp_path, stored, asked, want):
    # torch_dtype is the name that configs before transformers 5 use.
    for key in ("dtype", "torch_dtype"):
        assert ModelConfig.from_pretrained(write(tmp_path, **{key: stored}), dtype=asked).dtype == want


@pytest.mark.parametrize(
    "changes,rope_type,theta,factor",
    [
        ({"rope_theta": 5e5}, "default", 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, "default", 2e4, None),
        ({"rope_theta": 3e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear", 3e4, 2.0),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            "llama3",
            5e5,
            8.0,
        ),
        (
            {
                "max_position_embeddings": 64,
                "original_max_position_embeddings": 32,
                "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
            },
            "longrope",
            1e4,
            2.0,
        ),
        ({}, "default", 1e4, None),
    ],
)
def test_rope_of_old_and_new_configs(tmp_path, changes, rope_type, theta, factor):
    rope = ModelConfig.from_pretrained(write(tmp_path, **changes)).rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope.get("factor")) == (rope_type, theta, factor)


@pytest.mark.parametrize(
    "changes,sentence",
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM, which is neither native here nor a causal"),
        ({"architectures": None}, "unknown.*supported are LlamaForCausalLM, MistralForCausalLM, .*Qwen3ForCausalLM"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "'proportional' is not supported"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantized"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"is_causal": False}, "its tokens see those behind them"),
        (GEMMA | {"hidden_activation": "relu"}, "'relu' is not supported natively, only 'gelu_pytorch_tanh' is"),
        (
            GEMMA | {"query_pre_attn_scalar": -4},
            "query_pre_attn_scalar in its config is -4, but it has to be a number",
        ),
        (GEMMA | {"final_logit_softcapping": 0.0}, "final_logit_softcapping in its config is 0.0, but it has to be"),
        # Flat, though model_type is that of text and images.
        (GEMMA | {"model_type": "gemma3"}, "Gemma3ForCausalLM, but model_type 'gemma3' is of Gemma3Config"),
        (GEMMA | {"use_bidirectional_attention": True}, "tokens see those behind them cannot be served"),
        (
            GEMMA | {"rope_parameters": {"sliding_attention": {"rope_type": "proportional"}, "full_attention": {}}},
            "'proportional' is not supported",
        ),
        (
            GEMMA | {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}, "full_attention": {}}},
            "part of the head",
        ),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        ({"head_dim": 9}, "transformers cannot read .* even rotary dimension"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "part of the head"),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 0},
            "has to be 1 or more",
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM, but model_type 'llama' is of LlamaConfig"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
            | {"layer_types": ["chunked_attention", "full_attention"]},
            "Layers of the kinds chunked_attention",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
            | {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": False},
            "layers with a window, but there is no sliding_window",
        ),
    ],
)
def test_refuses_with_a_reason(tmp_path, changes, sentence):
    with pytest.raises(ModelConfigError, match=sentence):
        ModelConfig.from_pretrained(write(tmp_path, **changes))


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"factor": "a"}, "factor .* is 'a', but it has to be a number above 0"),
        ({"factor": 0}, "factor .* is 0, but it has to be a number above 0"),
        ({"rope_theta": None}, "rope_theta .* is None, but it has to be a number above 0"),
        ({"rope_theta": -5.0}, "rope_theta .* is -5.0"),
        ({"rope_theta": math.inf}, "rope_theta .* is inf"),
        ({"factor": 10**400}, "factor .* is 1000"),
        ({"original_max_position_embeddings": "x"}, "original_max_position_embeddings .* is 'x'"),
        ({"beta_fast": "x"}, "beta_fast .* is 'x', but it has to be a number"),
        ({"full_attention": {"rope_theta": 1e4}}, "of kinds of layers .full_attention."),
    ],
)
def test_rope_parameters_are_numbers(changes, sentence):
    hf_config = SimpleNamespace(max_position_embeddings=256, rope_parameters=YARN)
    assert rope_parameters_of(hf_config) == YARN
    hf_config.rope_parameters = YARN | {"attention_factor": None}
    assert rope_parameters_of(hf_config)["factor"] == 4.0
    for name in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ModelConfigError, match=f"{name} in its config is 'yarn', but it has to be an object"):
            rope_parameters_of(SimpleNamespace(max_position_embeddings=256, **{name: "yarn"}))
    hf_config.rope_parameters = YARN | changes
    with pytest.raises(ModelConfigError, match=sentence):
        rope_parameters_of(hf_config)


def test_a_width_of_experts_that_a_family_does_not_read(tmp_path):
    raw = LLAMA | {"moe_intermediate_size": 7}
    assert check_config("x", raw, "auto", None, num_ranks=2) == NATIVE
    with pytest.raises(ModelConfigError, match="7 intermediate rows cannot be divided"):
        check_config("x", raw | {"architectures": ["Qwen3MoeForCausalLM"]}, "auto", None, num_ranks=2)


QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 24,
}
QWEN3_MOE = QWEN2_MOE | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}


def test_experts(tmp_path):
    """What a family's config does not know has no effect, whatever stands in the file."""
    config = ModelConfig.from_pretrained(write(tmp_path, **QWEN2_MOE, mlp_only_layers=[1], mlp_bias=True))
    assert config.experts == ExpertsConfig(4, 2, 16, False, 24, (True, False)) and not config.mlp_bias
    config = ModelConfig.from_pretrained(write(tmp_path, **QWEN3_MOE, norm_topk_prob=True, intermediate_size=63))
    assert config.experts == ExpertsConfig(4, 2, 16, True, 0, (True, True))
    # No layer has the dense width.
    config.check_tensor_parallel(2)
    assert ModelConfig.from_pretrained(write(tmp_path)).experts is None


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 6,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 100,
}


def test_experts_with_biases_and_a_clamped_activation(tmp_path):
    """The published checkpoints name the limit, and not alpha."""
    config = ModelConfig.from_pretrained(write(tmp_path, **GPT_OSS))
    width, clamped = config.hf_config.intermediate_size, ClampedExperts(1.702, 7.0)
    assert config.experts == ExpertsConfig(4, 2, width, True, 0, (True, True), clamped=clamped)
    assert config.model_impl == "native" and config.attention_bias and config.windows == (100, None)
    changes = {"swiglu_limit": 5.0, "layer_types": ["full_attention"] * 2}
    other = ModelConfig.from_pretrained(write(tmp_path, **GPT_OSS, **changes))
    assert other.experts.clamped == ClampedExperts(1.702, 5.0) and other.windows == (None, None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"swiglu_limit": 0.0}, "swiglu_limit in its config is 0.0, but it has to be a number above 0"),
        ({"num_experts_per_tok": 5}, "each token has 5 of 4 experts"),
        ({"num_local_experts": 0}, "num_local_experts in its config is 0"),
    ],
)
def test_what_makes_no_clamped_experts(tmp_path, changes, sentence):
    with pytest.raises(ModelConfigError, match=f"cannot be served: {sentence}"):
        ModelConfig.from_pretrained(write(tmp_path, **GPT_OSS | changes))


@pytest.mark.parametrize(
    "changes,sentence",
    [
        ({"num_experts_per_tok": 5}, "each token has 5 of 4 experts"),
        ({"decoder_sparse_step": 0}, "one in 0 layers is a mixture"),
        ({"shared_expert_intermediate_size": -3}, "an expert is 16 wide, and the one of every token -3"),
    ],
)
def test_what_makes_no_mixture(tmp_path, changes, sentence):
    with pytest.raises(ModelConfigError, match=f"cannot be served: {sentence}"):
        ModelConfig.from_pretrained(write(tmp_path, **QWEN2_MOE | changes))


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "topk_method": "group_limited_greedy",
}
GLM = {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}


def test_latent_attention(tmp_path):
    config = ModelConfig.from_pretrained(write(tmp_path, **DEEPSEEK))
    assert config.latent == LatentConfig(rank=16, rotary_dim=8, key_dim=12, value_dim=10)
    assert (config.num_kv_heads, config.head_dim, config.rotary_dim) == (1, 24, 8)
    assert config.attn_scale == 20**-0.5 and config.kv_heads_per_rank(4) == 1
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    scaled = ModelConfig.from_pretrained(write(tmp_path, **DEEPSEEK, rope_parameters=rope))
    assert scaled.attn_scale == pytest.approx(20**-0.5 * (1 + 0.05 * math.log(4)) ** 2)
    theirs = ModelConfig.from_pretrained(write(tmp_path, **DEEPSEEK), model_impl="transformers")
    assert (theirs.latent, theirs.num_kv_heads, theirs.head_dim) == (config.latent, 1, 24)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"v_head_dim": None}, "v_head_dim in its config is None"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim in its config is 0"),
        ({"n_group": None}, "n_group in its config is None"),
        ({"n_group": 3}, r"each token has 2 of 3 groups of 8 experts \(topk_group, n_group\)"),
        ({"topk_group": 5}, "each token has 5 of 4 groups"),
        ({"topk_group": 1}, r"1 groups \(topk_group\) have too few experts for 3 each token"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace in its config is None"),
        (DEEPSEEK_V2 | {"topk_group": None}, "topk_group in its config is None"),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, "experts are chosen by 'noaux_tc'"),
        (GLM | {"mlp_layer_types": ["dense"]}, r"mlp_layer_types in its config has 1 entries \(dense\)"),
    ],
)
def test_what_makes_no_latent_attention_or_groups(tmp_path, changes, sentence):
    # With None as it is.
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | DEEPSEEK | changes))
    with pytest.raises(ModelConfigError, match=f"cannot be served: {sentence}"):
        ModelConfig.from_pretrained(str(tmp_path))


def test_the_widths_of_experts_are_divided_over_ranks(tmp_path):
    config = ModelConfig.from_pretrained(write(tmp_path, **QWEN2_MOE | {"shared_expert_intermediate_size": 21}))
    with pytest.raises(ModelConfigError, match="21 intermediate rows cannot be divided over 2 ranks"):
        config.check_tensor_parallel(2)


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}
USED = {"use_sliding_window": True, "sliding_window": 100}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (MISTRAL | {"sliding_window": 100}, (100, 100)),
        (MISTRAL | {"sliding_window": 256}, (None, None)),
        (QWEN2 | {"sliding_window": 100}, (None, None)),  # use_sliding_window is false unless it says otherwise
        (QWEN2 | USED | {"max_window_layers": 1}, (None, 100)),
        (QWEN2 | USED | {"max_window_layers": 2}, (None, None)),  # from layer 2 on, and there are 2
        (QWEN2 | USED | {"layer_types": ["full_attention", "sliding_attention"]}, (None, 100)),
        (QWEN3 | {"use_sliding_window": False, "sliding_window": 100}, (None, None)),
        (QWEN3 | USED | {"max_window_layers": 0}, (100, 100)),
        ({"sliding_window": 100}, (None, None)),  # Llama has none, whatever its config carries
        # transformers reads these of Qwen alone, and takes a Mistral with layer_types for a Ministral.
        (MISTRAL | {"use_sliding_window": False, "sliding_window": 100}, (100, 100)),
        (PHI3 | {"use_sliding_window": False, "sliding_window": 100}, (100, 100)),
        (PHI3 | {"layer_types": ["full_attention"] * 2, "sliding_window": 100}, (100, 100)),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 100}, (None, 100)),
    ],
)
def test_sliding_windows(tmp_path, changes, windows):
    path = write(tmp_path, **changes)
    assert ModelConfig.from_pretrained(path).windows == windows
    # Within the window attention is full.
    short = ModelConfig.from_pretrained(path, context_length=100)
    assert short.windows == (None, None)
    prints = {config.fingerprint("dummy") for config in (short, ModelConfig.from_pretrained(path))}
    assert len(prints) == (1 if windows == (None, None) else 2)


def test_a_mistral_without_a_window(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | MISTRAL | {"sliding_window": None}))
    assert ModelConfig.from_pretrained(str(tmp_path)).context_length == 256


def test_longrope_needs_a_factor_per_frequency(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 3}
    with pytest.raises(ModelConfigError, match="needs 4 factors in both"):
        ModelConfig.from_pretrained(write(tmp_path, rope_parameters=rope))


def test_refuses_settings(tmp_path):
    path = write(tmp_path)
    assert ModelConfig.from_pretrained(path, context_length=128).context_length == 128
    with pytest.raises(ModelConfigError, match="300 is more than the model's 256"):
        ModelConfig.from_pretrained(path, context_length=300)
    with pytest.raises(ModelConfigError, match="must be positive"):
        ModelConfig.from_pretrained(path, context_length=0)
    with pytest.raises(ModelConfigError, match="'int3' is not supported; choose from auto"):
        ModelConfig.from_pretrained(path, dtype="int3")


def test_refuses_places_without_a_model(tmp_path, monkeypatch):
    with pytest.raises(ModelConfigError, match=r"has no config\.json"):
        ModelConfig.from_pretrained(str(tmp_path))
    with pytest.raises(ModelConfigError, match="no directory"):
        ModelConfig.from_pretrained(str(tmp_path / "absent"))
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelConfigError, match="is a file"):
        ModelConfig.from_pretrained(str(file))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="not valid JSON"):
        ModelConfig.from_pretrained(str(tmp_path))

    def refuse(*args, **kwargs):
        raise OSError("404 Client Error.\nMore lines.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelConfigError, match=r"could not be fetched.*404 Client Error\.\)") as e:
        ModelConfig.from_pretrained("nobody/nothing")
    assert "\n" not in str(e.value)


def test_hub_names(tmp_path, monkeypatch):
    write(tmp_path)
    asked = {}

    def download(name, **kwargs):
        asked.update(kwargs, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = ModelConfig.from_pretrained("somebody/model-1.5B")
    assert asked["name"] == "somebody/model-1.5B"
    assert "*.safetensors" in asked["allow_patterns"] and "*.bin" not in asked["allow_patterns"]
    assert config.model_path == "somebody/model-1.5B" and config.local_path == tmp_path


def test_a_config_is_read_without_activation_functions(tmp_path, monkeypatch):
    """They would import torch's compiler. Models of transformers import them later."""
    modules = ("transformers.activations", "transformers.utils.type_validators")
    for name in modules:
        importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
    ModelConfig.from_pretrained(write(tmp_path))
    activations, validators = map(sys.modules.get, modules)
    assert activations is None and validators is not None and validators.ACT2FN == {}
    assert importlib.import_module(modules[0]).ACT2FN


def test_fingerprint(tmp_path):
    path = write(tmp_path)
    weights = {"a": torch.arange(5000.0), "b": torch.ones(3, 4)}

    def fingerprint(**kwargs):
        return ModelConfig.from_pretrained(path).fingerprint(**kwargs)

    save_file(weights, tmp_path / "model.safetensors")
    first = fingerprint()
    assert len(first) == 32 and first == fingerprint() and int(first, 16) > 0
    # Who saved it last, and what the file says about itself, is not the model.
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write(tmp_path, transformers_version="99")
    assert fingerprint() == first
    one_row = lambda: weights["a"][4321].add_(1)  # noqa: E731
    for change in (one_row, lambda: weights["b"].add_(1), lambda: weights.pop("b")):
        change()
        save_file(weights, tmp_path / "model.safetensors")
        second = fingerprint()
        assert second != first
        first = second
    write(tmp_path, rope_theta=77.0)
    assert fingerprint() != first
    assert fingerprint() == ModelConfig.from_pretrained(path, context_length=8).fingerprint()
    dummies = {fingerprint(load_format="dummy", seed=seed) for seed in (0, 1)} | {fingerprint()}
    assert len(dummies) == 3


def replaced(folder: Path) -> None:
    save_file({"a": torch.ones(3)}, folder / "new")
    os.replace(folder / "new", folder / "model.safetensors")


def link_moved(folder: Path) -> None:
    (folder.parent / "new").symlink_to(folder.parent / "other")
    os.replace(folder.parent / "new", folder)


def being_written(folder: Path) -> None:
    (folder / "new").write_bytes(b"")
    os.replace(folder / "new", folder / "model.safetensors")


def written_with_the_same_times(folder: Path) -> None:
    """As an archive does whose files all have one time."""
    file = folder / "model.safetensors"
    before = file.stat()
    other = save({"a": torch.ones(3)})
    assert len(other) == before.st_size
    file.write_bytes(other)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def config_changed(folder: Path) -> None:
    write(folder, rope_theta=77.0)


@pytest.mark.parametrize("while_read", [False, True])
@pytest.mark.parametrize("change", [replaced, being_written, link_moved, written_with_the_same_times, config_changed])
def test_files_that_have_changed_name_no_kv(tmp_path, monkeypatch, change, while_read):
    """The weights in memory may be of those before."""
    folder, digest = tmp_path / "model", model_config.digest_weights
    for name in ("first", "other"):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
        save_file({"a": torch.zeros(3)}, tmp_path / name / "model.safetensors")
    folder.symlink_to(tmp_path / "first")
    config = ModelConfig.from_pretrained(str(folder))
    config.fingerprint()
    if while_read:
        monkeypatch.setattr(model_config, "digest_weights", lambda *args: (digest(*args), change(folder))[0])
    else:
        change(folder)
    with pytest.raises(ModelConfigError, match="have changed since this server read them: start it anew"):
        config.fingerprint()
    monkeypatch.undo()
    if change is not being_written:
        ModelConfig.from_pretrained(str(folder)).fingerprint()


@pytest.mark.parametrize(("kind", "has_changed"), [("fuse.gcsfuse", False), ("ext4", True)])
def test_a_bucket_may_give_a_file_another_inode(tmp_path, monkeypatch, kind, has_changed):
    path = write(tmp_path)
    device = (tmp_path / "config.json").stat().st_dev
    mounts = tmp_path / "mountinfo"
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts.write_bytes(
        f"1 2 0:0 / /caf\xe9\x0c rw - tmpfs a rw\n1 2 {number} / /m rw shared:3 - {kind} a rw\n".encode("latin-1")
    )
    monkeypatch.setattr(weights_digest, "_MOUNTS", mounts)
    config = ModelConfig.from_pretrained(path)
    shutil.copy2(tmp_path / "config.json", tmp_path / "copy")
    os.replace(tmp_path / "copy", tmp_path / "config.json")
    assert (weights_digest.stamp_files(tmp_path) != config.file_stamps) == has_changed
    os.utime(tmp_path / "config.json", ns=(1, 1))
    assert weights_digest.stamp_files(tmp_path) != config.file_stamps


def test_weights_that_cannot_be_read_are_a_sentence(tmp_path):
    path = write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    config = ModelConfig.from_pretrained(path)
    with pytest.raises(ModelConfigError, match="cannot be read: cannot mmap an empty file"):
        config.fingerprint()
    shutil.rmtree(path)
    with pytest.raises(ModelConfigError, match=r"cannot be read: .*No such file or directory"):
        config.fingerprint()
