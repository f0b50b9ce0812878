"""Every RoPE scaling against transformers, at positions beyond the context that the model was first trained for."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import (
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.configs.model_files import rope_parameters_of
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, rope_frequencies
from support.tiny_runner import TinyRunner

ORIGINAL, EXTENDED, HEAD_DIM, VOCAB = 32, 256, 12, 97
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": EXTENDED,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SHORT, LONG = [1.0, 1.1, 1.3, 1.5, 1.9, 2.4], [1.0, 2.0, 4.5, 6.0, 7.5, 9.0]
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": ORIGINAL,
}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    # transformers scales beyond max_position_embeddings only, which is where a context ends here.
    "dynamic": {"rope_type": "dynamic", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": YARN,
    "yarn_other_ramp": YARN | {"beta_fast": 6.0, "beta_slow": 0.5, "truncate": False},
    "yarn_attention_factor": YARN | {"attention_factor": 1.4},
    "yarn_mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    "longrope": LONGROPE,
    "longrope_factor": LONGROPE | {"factor": 16.0},
    "longrope_attention_factor": LONGROPE | {"attention_factor": 0.8},
}
CASES = [("llama", scaling) for scaling in SCALINGS] + [
    ("mistral", "yarn"),
    ("qwen2", "yarn"),
    ("qwen3", "yarn_mscale"),
    ("mistral", "llama3"),
    ("mistral", "longrope"),
    ("qwen2", "dynamic"),
    ("qwen2", "longrope"),
    ("phi3", "longrope"),
]


def save(path, family, scaling):
    config_class, model_class = CLASSES[family]
    parameters = {"rope_theta": 300.0, **SCALINGS[scaling]}
    changes = {"sliding_window": None}
    if family in ("phi3", "mistral"):
        # Phi-3's config names the original length beside, not inside. Any config may.
        changes["original_max_position_embeddings"] = parameters.pop("original_max_position_embeddings")
    torch.manual_seed(5)
    theirs = model_class(config_class(**BASE | changes, rope_parameters=parameters)).eval()
    theirs.save_pretrained(path)
    if "original_max_position_embeddings" in changes:
        # As its maker wrote it: transformers saves the length in both places.
        config = json.loads((path / "config.json").read_text())
        config["rope_parameters"].pop("original_max_position_embeddings")
        (path / "config.json").write_text(json.dumps(config))
    return theirs


@pytest.mark.parametrize(("family", "scaling"), CASES)
def test_logits_beyond_the_original_context(tmp_path, family, scaling):
    theirs = save(tmp_path, family, scaling)
    rng = random.Random(5)
    tokens = [rng.randrange(1, VOCAB) for _ in range(EXTENDED)]
    ours = TinyRunner(ModelConfig.from_pretrained(str(tmp_path)))
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0]
    (seq,) = ours.start([tokens], room=0, page_size=4)
    got = torch.cat(
        [ours.forward([(seq, n)], all_rows=True) for n in (ORIGINAL - 5, 90, 1, EXTENDED - 86 - ORIGINAL)]
    )
    assert ((got - want).abs().max() / want.std()).item() < 1e-4


def test_longrope_in_a_short_context_takes_the_short_factors(tmp_path):
    theirs = save(tmp_path, "phi3", "longrope")
    ours = TinyRunner(ModelConfig.from_pretrained(str(tmp_path), context_length=ORIGINAL))
    tokens = list(range(2, 2 + ORIGINAL))
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0]
    (seq,) = ours.start([tokens], room=0)
    assert ((ours.forward([(seq, ORIGINAL)], all_rows=True) - want).abs().max() / want.std()).item() < 1e-4


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta", "original"), [(64, 1e4, 4096), (128, 5e5, 8192), (12, 70.0, 9)])
def test_frequencies_at_real_sizes(scaling, head_dim, theta, original):
    parameters = {"rope_theta": theta, **SCALINGS[scaling]}
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = original
    for name in ("short_factor", "long_factor"):
        if name in parameters:
            parameters[name] = [1 + i / 3 for i in range(head_dim // 2)]
    config = LlamaConfig(**BASE | {"head_dim": head_dim, "max_position_embeddings": 8 * original})
    config.rope_parameters = dict(parameters)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(config)
    ours = {"factor": 8.0, "original_max_position_embeddings": original, **parameters}
    frequencies, factor = rope_frequencies(head_dim, original, ours)
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-5, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling)


def test_cosines_of_gpt_oss_are_transformers():
    """At its real sizes, where the ramp's ends are no whole dimensions (truncate is false)."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    config = GptOssConfig()
    assert config.rope_parameters["truncate"] is False
    positions = torch.arange(0, config.max_position_embeddings, 63)
    theirs = GptOssRotaryEmbedding(config)(torch.zeros(1), positions[None])
    parameters = rope_parameters_of(config)
    ours = RotaryEmbedding(config.head_dim, config.max_position_embeddings, parameters, torch.float32)
    found = ours.table.index_select(0, positions).chunk(2, dim=1)
    for mine, wanted in zip(found, theirs, strict=True):
        assert torch.equal(mine, wanted[0])
    whole = {**parameters, "truncate": True}
    frequencies = [rope_frequencies(config.head_dim, 1, each)[0] for each in (parameters, whole)]
    assert not torch.equal(*frequencies)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": None},
        {"rope_type": "longrope", "long_factor": ["x"] * 8, "short_factor": [1.0] * 8, "factor": 2.0},
        {"rope_type": "longrope", "long_factor": [0.0] * 8, "short_factor": [1.0] * 8, "factor": 2.0},
        {"rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8, "factor": 2.0}
        | {"original_max_position_embeddings": 1},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1.0},
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.0},
        {"rope_type": "default", "rope_theta": 1e-320},
    ],
    ids=str,
)
def test_parameters_that_give_no_frequencies_are_refused(parameters):
    whole = {"rope_theta": 1e4, "original_max_position_embeddings": 16, **parameters}
    with pytest.raises(ModelConfigError, match="The rope parameters of its config give no frequencies"):
        RotaryEmbedding(16, 64, whole, torch.float32)


def test_how_far_a_context_may_reach(tmp_path):
    save(tmp_path, "llama", "dynamic")
    with pytest.raises(ModelConfigError, match=rf"more than the model's {EXTENDED} \(max_position_embeddings\)"):
        ModelConfig.from_pretrained(str(tmp_path), context_length=EXTENDED + 1)
    # As Qwen's guides have it: the factor beside an unchanged max_position_embeddings.
    config = Qwen2Config(**BASE | {"max_position_embeddings": ORIGINAL}, rope_parameters=YARN | {"rope_theta": 300.0})
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path)
    assert ModelConfig.from_pretrained(str(tmp_path)).context_length == ORIGINAL
    assert ModelConfig.from_pretrained(str(tmp_path), context_length=8 * ORIGINAL).context_length == 8 * ORIGINAL
    with pytest.raises(ModelConfigError, match=r"257 is more than the model's 256 \(YaRN"):
        ModelConfig.from_pretrained(str(tmp_path), context_length=8 * ORIGINAL + 1)
