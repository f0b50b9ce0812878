"""Models divided over ranks that are threads: every family and several sizes, against one rank."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_loader import loader, transformers_loader
from sglang.srt.model_loader.loader import ModelLoadError, load_model
from support.thread_group import thread_groups
from support.tiny_runner import TinyRunner

VOCAB = 101
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT = dict(
    num_key_value_heads=12,
    head_dim=8,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=36,
    first_k_dense_replace=1,
)
MODELS = {
    "llama_biased": LlamaConfig(**BASE, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**BASE, sliding_window=12),
    "phi3_fused": Phi3Config(**{**BASE, "hidden_size": 48, "head_dim": 4}),
    "qwen2_one_kv_head_tied": Qwen2Config(**BASE | {"num_key_value_heads": 1}, tie_word_embeddings=True),
    "qwen3_two_kv_heads": Qwen3Config(**BASE | {"num_key_value_heads": 2}),
    "mixtral": MixtralConfig(**BASE, num_local_experts=3, num_experts_per_tok=2),
    # Its first layer is dense.
    "qwen2_moe": Qwen2MoeConfig(
        **BASE | {"hidden_size": 72},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=36,
        decoder_sparse_step=2,
    ),
    "deepseek_v3": DeepseekV3Config(**BASE | LATENT, n_group=2, topk_group=1),
    # Biases, and a sink for each head.
    "gpt_oss": GptOssConfig(**BASE, num_local_experts=3, num_experts_per_tok=2, sliding_window=12),
    "gemma2": Gemma2Config(**BASE, sliding_window=12, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3_one_kv_head": Gemma3TextConfig(**BASE | {"num_key_value_heads": 1}, sliding_window=12),
    # The shared expert has a bias, which counts once.
    "deepseek_v2": DeepseekV2Config(**BASE | LATENT | {"q_lora_rank": None}, n_shared_experts=2, mlp_bias=True),
}


# Computed by transformers: with plans that divide heads, that give all heads to all ranks, and without a plan; with
# capped scores and windows, norms over all heads, fused projections, experts, sinks, and latent attention.
OF_TRANSFORMERS = {
    "llama_biased": MODELS["llama_biased"],
    "gemma2": MODELS["gemma2"],
    "gemma3_one_kv_head": MODELS["gemma3_one_kv_head"],
    # Looks at the mean over the whole width inside of its first layer, which is not divided.
    "gemma3n": Gemma3nTextConfig(
        **BASE,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        num_kv_shared_layers=0,
        layer_types=["full_attention"] * 2,
        activation_sparsity_pattern=[0.5, 0.0],
    ),
    "olmo2": Olmo2Config(**{**BASE, "hidden_size": 72}),
    "phi3": MODELS["phi3_fused"],
    "gpt2": GPT2Config(**{n: x for n, x in BASE.items() if n not in ("num_key_value_heads", "head_dim")}),
    "gpt_oss": MODELS["gpt_oss"],
    "qwen2_moe": MODELS["qwen2_moe"],
    "deepseek_v3": MODELS["deepseek_v3"],
}


def write(config, path):
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path, max_shard_size="30KB")
    return str(path)


@pytest.fixture(scope="module", params=MODELS)
def path(request, tmp_path_factory):
    return write(MODELS[request.param], tmp_path_factory.mktemp(request.param))


def on_all_ranks(size, work):
    """work(group) on a thread per rank; the results in the order of ranks."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, thread_groups(size)))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("size", [2, 4, 12])
def test_logits_equal_one_ranks(path, size):
    check_logits(ModelConfig.from_pretrained(path), size)


@pytest.fixture
def read_one_by_one(monkeypatch):
    """While transformers reads a checkpoint, it changes its own code: other threads may not."""
    lock, read = threading.Lock(), transformers_loader._read

    def locked(config):
        with lock:
            return read(config)

    monkeypatch.setattr(transformers_loader, "_read", locked)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [2, 4, 12])
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_logits_of_transformers_models_equal_one_ranks(tmp_path, name, size, read_one_by_one):
    path = write(OF_TRANSFORMERS[name], tmp_path)
    check_logits(ModelConfig.from_pretrained(path, model_impl="transformers", dtype="float32"), size)


def test_a_rank_of_a_transformers_model_keeps_its_part(tmp_path, read_one_by_one):
    """Of what the plan divides; the rest is whole on all ranks."""
    config = ModelConfig.from_pretrained(write(OF_TRANSFORMERS["gemma2"], tmp_path), model_impl="transformers")
    divided = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}

    def parts(group):
        return TinyRunner(config, group=group).model.model.state_dict()

    whole, (first, second) = TinyRunner(config).model.model.state_dict(), on_all_ranks(2, parts)
    assert whole.keys() == first.keys()
    for name, tensor in whole.items():
        dim = divided.get(name.split(".")[-2])
        together = first[name] if dim is None else torch.cat((first[name], second[name]), dim)
        assert torch.equal(together, tensor), name
        assert dim is None or first[name].shape[dim] == tensor.shape[dim] // 2, name


def test_code_that_fails_on_a_part_is_refused(tmp_path, read_one_by_one):
    """Its norms have a weight for each head."""
    config = CohereConfig(**BASE, use_qk_norm=True)
    config = ModelConfig.from_pretrained(write(config, tmp_path), model_impl="transformers")
    TinyRunner(config)
    with pytest.raises(ModelLoadError, match=r"modelling code fails.*, divided over 2 ranks: choose --tp-size 1\.$"):
        load_model(config, "auto", TorchNativeAttnBackend(), group=thread_groups(2)[0])


def test_a_width_that_no_rank_can_have_a_part_of_is_refused(tmp_path):
    config = ModelConfig.from_pretrained(
        write(Gemma2Config(**BASE | {"intermediate_size": 61}), tmp_path), model_impl="transformers"
    )
    with pytest.raises(ModelLoadError, match=r"over 2 ranks: model\.layers\.0\.mlp\.gate_proj has 61 outputs"):
        load_model(config, "auto", TorchNativeAttnBackend(), group=thread_groups(2)[0])


def check_logits(config, size):
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (23, 1, 40)]

    def run(runner):
        seqs = runner.start(prompts, page_size=3)
        # One in the middle of its prompt: no row is sampled in this launch.
        got = [runner.forward([(seqs[2], 17)])]
        got.append(runner.forward([(seqs[0], 23), (seqs[1], 1), (seqs[2], 23)]))
        for seq in seqs:
            seq.tokens.append(7)
        got.append(runner.forward([(seq, 1) for seq in seqs]))
        return torch.cat(got)

    want = run(TinyRunner(config))
    got = on_all_ranks(size, lambda group: run(TinyRunner(config, group=group)))
    assert got[0].shape == want.shape == (6, VOCAB) and got[0].dtype == torch.float32
    assert all(torch.equal(got[0], other) for other in got[1:]), "the ranks sample from different logits"
    assert ((got[0] - want).abs().max() / want.std()).item() < 5e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(path, dtype):
    config = ModelConfig.from_pretrained(path, dtype=dtype)
    tokens = list(range(40))

    def run(runner):
        (seq,) = runner.start([tokens])
        return runner.forward([(seq, 40)], all_rows=True)

    want = run(TinyRunner(config))
    got = on_all_ranks(2, lambda group: run(TinyRunner(config, group=group)))
    assert torch.equal(*got)
    assert ((got[0] - want).std() / want.std()).item() < (0.08 if dtype == "bfloat16" else 0.01)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_slices_of_the_whole(path, size, load_format):
    config = ModelConfig.from_pretrained(path)

    def load(group):
        return load_model(config, load_format, TorchNativeAttnBackend(), 3, group=group).weight_targets()

    whole = load_model(config, load_format, TorchNativeAttnBackend(), 3).weight_targets()
    parts = [load(group) for group in thread_groups(size)]
    for name, full in whole.items():
        seen = torch.zeros(full.shape[full.dim], dtype=torch.bool)
        for part in (rank[name] for rank in parts):
            assert part.shape == full.shape
            if part.tensor.dim() != len(part.shape):  # a norm, repeated over heads
                assert torch.equal(part.tensor[0], full.tensor[0]), name
                seen[:] = True
                continue
            rows = range(part.start, part.start + part.num_read)
            taken = part.tensor.narrow(part.dim, 0, part.num_read)
            assert torch.equal(taken, full.tensor.narrow(part.dim, part.start, part.num_read)), name
            padding = part.tensor.narrow(part.dim, part.num_read, part.tensor.shape[part.dim] - part.num_read)
            assert not bool(padding.any())
            seen[list(rows)] = True
        assert bool(seen.all()), f"nobody has all of {name}"


def test_a_rank_reads_only_its_part(path, monkeypatch):
    config = ModelConfig.from_pretrained(path)
    read = 0

    class Counting:
        """A safetensors file that counts the entries read."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            self.opened = self.file.__enter__()
            return self

        def __exit__(self, *args):
            return self.file.__exit__(*args)

        def keys(self):
            return self.opened.keys()

        def get_tensor(self, name):
            nonlocal read
            tensor = self.opened.get_tensor(name)
            read += tensor.numel()
            return tensor

        def get_slice(self, name):
            source = self.opened.get_slice(name)

            class Slice:
                def get_shape(self):
                    return source.get_shape()

                def __getitem__(self, index):
                    nonlocal read
                    tensor = source[index]
                    read += tensor.numel()
                    return tensor

            return Slice()

    opens = loader._open
    monkeypatch.setattr(loader, "_open", lambda file: Counting(opens(file)))
    group = thread_groups(2)[1]
    model = load_model(config, "auto", TorchNativeAttnBackend(), group=group)
    padding = (model.lm_head.shard.size * 2 - VOCAB) * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    held = sum(p.numel() for p in model.parameters())
    assert 0 < read <= held - padding
    stored = sum(t.numel() for file in config.local_path.glob("*.safetensors") for t in load_file(file).values())
    assert read < 0.6 * stored


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        (5, r"12 attention heads cannot be divided over 5 ranks; choose a --tp-size that divides 12\.$"),
        (3, r"4 KV heads can neither be divided over 3 ranks nor evenly repeated"),
    ],
)
def test_refuses_what_does_not_divide(tmp_path, size, sentence):
    MistralConfig(**BASE, sliding_window=None, architectures=["MistralForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ModelConfigError, match=sentence):
        load_model(
            ModelConfig.from_pretrained(str(tmp_path)),
            "dummy",
            TorchNativeAttnBackend(),
            group=thread_groups(size)[0],
        )


def test_refuses_an_intermediate_size_that_does_not_divide(tmp_path):
    config = LlamaConfig(**BASE | {"intermediate_size": 61}, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelConfigError, match="61 intermediate rows cannot be divided over 2 ranks"):
        ModelConfig.from_pretrained(str(tmp_path)).check_tensor_parallel(2)
