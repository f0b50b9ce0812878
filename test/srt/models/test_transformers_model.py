"""Models that transformers computes with our attention, against transformers alone, on random weights."""

from __future__ import annotations

import copy
import gc
import json
import random
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    Gemma2Config,
    Gemma4TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3MoeConfig,
    RobertaConfig,
)

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.layers.attention.masked_attention import masked_attention
from sglang.srt.layers.latent_projections import LatentProjections
from sglang.srt.managers.startup.device import page_layout
from sglang.srt.mem_cache.kv_view import KVView
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.model_loader.loader import ModelLoadError
from support.no_waiting import DEVICE, NoWaiting
from support.tiny_runner import TinyRunner

BASE: dict[str, Any] = dict(
    vocab_size=131,
    hidden_size=48,
    intermediate_size=88,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=20,
    max_position_embeddings=256,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
GPT2 = {name: value for name, value in BASE.items() if name not in ("num_key_value_heads", "head_dim")}
MOE: dict[str, Any] = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
MLA: dict[str, Any] = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    head_dim=8,
    num_key_value_heads=6,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
SEED = 3
# What each has: the tokens that its layers see, None for all.
MODELS = {
    "gpt2": (GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True), {None}),
    "gemma": (GemmaConfig(**BASE), {None}),
    "qwen3_moe": (Qwen3MoeConfig(**BASE, **MOE), {None}),
    "llama": (LlamaConfig(**BASE), {None}),
    # Windows and capped scores; every second layer sees all.
    "gemma2": (Gemma2Config(**BASE, sliding_window=16, attn_logit_softcapping=2.0), {16, None}),
    "mistral": (MistralConfig(**BASE, sliding_window=9), {9}),
    # Rotary embeddings over a part of the head, which the native model refuses.
    "phi3": (Phi3Config(**BASE | {"pad_token_id": 0, "head_dim": 8}, partial_rotary_factor=0.5), {None}),
    # Sinks.
    "gpt_oss": (GptOssConfig(**BASE, num_local_experts=4, num_experts_per_tok=2, sliding_window=16), {16, None}),
    # Latent attention: values are shorter than keys.
    "deepseek_v3": (DeepseekV3Config(**BASE | MLA), {None}),
}


def write(path: Path, config: Any) -> Any:
    torch.manual_seed(SEED)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                # Fresh norms and biases would hide one that is not applied.
                parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(path)
    return theirs


def of_transformers(path: Path, **options: Any) -> ModelConfig:
    return ModelConfig.from_pretrained(str(path), **{"model_impl": "transformers", "dtype": "float32", **options})


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.slow) if n in ("mistral", "phi3") else n for n in MODELS],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    config, windows = MODELS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    theirs = write(path, config)
    rng = random.Random(SEED)
    prompts = [[rng.randrange(1, BASE["vocab_size"]) for _ in range(n)] for n in (37, 1, 70, 8)]
    ours = TinyRunner(of_transformers(path))
    assert {attention.window for attention in ours.model.attention} == windows
    return SimpleNamespace(theirs=theirs, path=path, prompts=prompts, ours=ours, name=request.param)


@torch.no_grad()
def logits_of(theirs: Any, tokens: list[int]) -> torch.Tensor:
    return theirs(torch.tensor([tokens])).logits[0].float()


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float = 1e-4) -> None:
    error = ((got - want).abs().max() / want.std()).item()
    assert error < tolerance, f"{what}, weights and prompts of seed {SEED}: off by {error} standard deviations"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_of_odd_sizes(pair: SimpleNamespace, page_size: int) -> None:
    tokens = pair.prompts[2]
    want = logits_of(pair.theirs, tokens)
    for chunk in (7, 33, len(tokens)):
        (seq,) = pair.ours.start([tokens], page_size=page_size)
        got = []
        while seq.num_cached < len(tokens):
            got.append(pair.ours.forward([(seq, min(chunk, len(tokens) - seq.num_cached))], all_rows=True))
        assert_close(torch.cat(got), want, f"chunks of {chunk}, pages of {page_size}")


def test_batch_of_extends_and_decodes(pair: SimpleNamespace) -> None:
    seqs = pair.ours.start(pair.prompts, page_size=4)
    # The first is one token short of done, the third in the middle, the others have not begun.
    assert pair.ours.forward([(seqs[0], 36), (seqs[2], 51)]).shape == (0, BASE["vocab_size"])
    got = pair.ours.forward([(seq, len(seq.tokens) - seq.num_cached) for seq in seqs])
    want = torch.stack([logits_of(pair.theirs, tokens)[-1] for tokens in pair.prompts])
    assert_close(got, want, "mixed batch")


def test_a_layer_reads_and_writes_nothing_before_its_turn(pair: SimpleNamespace) -> None:
    """Its gate may not be open."""
    tokens = pair.prompts[2]
    (seq,) = pair.ours.start([tokens])
    pair.ours.forward([(seq, 60)])
    batch, model, pool = pair.ours.batch([(seq, 10)]), pair.ours.model, pair.ours.pool
    loaded = pool.kv[:, 1:].clone()
    pool.kv[:, 1:] = torch.nan
    state = model.embed(batch)
    for layer_id in range(model.num_layers):
        new = pool.kv[:, :, seq.pages[60:70]]
        assert new[:, layer_id:].isnan().all() and not new[:, :layer_id].isnan().any(), layer_id
        if layer_id:
            pool.kv[:, layer_id] = loaded[:, layer_id - 1]
        state = model.forward_layer(layer_id, state, batch, pool)
    assert_close(model.logits(state, batch), logits_of(pair.theirs, tokens)[-1:], "layer by layer")


def test_a_pass_that_is_given_up_leaves_nothing(pair: SimpleNamespace) -> None:
    """Neither where it ends on its own thread, nor on another, and the next one is not disturbed."""
    (seq,) = pair.ours.start([pair.prompts[3]])
    batch, model, pool = pair.ours.batch([(seq, 8)]), pair.ours.model, pair.ours.pool
    batch.wants_hidden = True

    def give_up(num_layers: int, held: list[Any]) -> None:
        state = model.embed(batch)
        for layer_id in range(num_layers):
            state = model.forward_layer(layer_id, state, batch, pool)
        given_up.append(weakref.ref(state.asked.query))
        held.append(state)

    for num_layers in (0, 1):
        for is_same_thread in (True, False):
            held: list[Any] = []
            given_up: list[Any] = []
            gc.disable()
            try:
                give_up(num_layers, held)
                if is_same_thread:
                    held.clear()
                    assert given_up[0]() is None, "its tensors are kept"
                else:
                    in_thread(held.clear)
                got = pair.ours.forward([(seq, 8)])
                seq.num_cached = 0
                assert given_up[0]() is None, "its tensors are kept beside the next pass"
            finally:
                gc.enable()
            assert not model.model.base_model._forward_hooks
            assert_close(got, logits_of(pair.theirs, pair.prompts[3])[-1:], f"after {num_layers} layers")


def test_passes_of_a_thread_that_has_ended_disturb_no_others(pair: SimpleNamespace) -> None:
    (seq,) = pair.ours.start([pair.prompts[3]])
    batch = pair.ours.batch([(seq, 8)])
    held: list[Any] = []
    in_thread(lambda: held.append(pair.ours.model.embed(batch)))
    got = pair.ours.forward([(seq, 8)])
    assert_close(got, logits_of(pair.theirs, pair.prompts[3])[-1:], "beside it")


def in_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class ShapesAlone:
    """A backend, and a pool of a page."""

    computes_masked = True

    def __init__(self, layout: PageLayout) -> None:
        self._view = KVView(*(torch.empty(1, 1, *each.shape, device=DEVICE) for each in layout.components))

    def forward(self, q: torch.Tensor, view: KVView, segments: Any, meta: AttentionMetadata) -> torch.Tensor:
        assert q.shape[2] == view.k.shape[3]
        return q.new_empty(*q.shape[:2], view.v.shape[3])

    def view(self, layer_id: int) -> KVView:
        return self._view

    def store(self, layer_id: int, loc: torch.Tensor, *values: torch.Tensor) -> None:
        for value, component in zip(values, self._view.components, strict=True):
            assert len(value) == len(loc) and value.shape[1:] == component.shape[2:]


def test_a_pass_does_not_wait_for_the_device(pair: SimpleNamespace) -> None:
    """Where transformers builds masks, it asks for positions."""
    ours = pair.ours
    nothing = ShapesAlone(page_layout(ours.config, 1, 1))
    # Weights for the CPU's kernels stay there.
    projections = [
        LatentProjections(each.config, torch.empty(6, 22, 16, device=DEVICE)) for each in ours.model.projections
    ]
    model = copy.deepcopy(ours.model, {id(ours.model.backend): nothing, id(ours.model.projections): projections})
    # Grouped products of matrices are for this type on the meta device.
    model.to(DEVICE, torch.bfloat16)
    seqs = pair.ours.start(pair.prompts[:2])
    batch = pair.ours.batch([(seqs[0], 37), (seqs[1], 1)])
    for name in ("input_ids", "positions", "out_loc", "sample_rows"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    with NoWaiting():
        state = model.embed(batch)
        for layer_id in range(model.num_layers):
            state = model.forward_layer(layer_id, state, batch, nothing)
        logits = model.logits(state, batch)
    assert logits.shape == (2, BASE["vocab_size"]) and logits.device == DEVICE


class Masking:
    """A backend that computes windows, capped scores and sinks. asked: the windows of its layers."""

    computes_masked = True

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def forward(self, q: torch.Tensor, view: KVView, segments: Any, meta: AttentionMetadata) -> torch.Tensor:
        self.asked.append(meta.window)
        return masked_attention(q, view, segments, meta)


def test_a_backend_that_computes_masks_gets_them(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones for all batches, as for others it would compile other kernels while it serves."""
    backend, model = Masking(), pair.ours.model
    monkeypatch.setattr(model, "backend", backend)
    for attention in model.attention:
        monkeypatch.setattr(attention, "backend", backend)
    for tokens in (pair.prompts[2], pair.prompts[3]):
        (seq,) = pair.ours.start([tokens], page_size=4)
        got = pair.ours.forward([(seq, len(tokens))], all_rows=True)
        assert_close(got, logits_of(pair.theirs, tokens), f"{len(tokens)} tokens")
    assert backend.asked == 2 * [attention.window for attention in model.attention]


@pytest.mark.sampled(2)
def test_greedy_tokens(pair: SimpleNamespace) -> None:
    num_tokens = 16
    got = pair.ours.generate(pair.prompts, num_tokens, page_size=3)
    for prompt, mine in zip(pair.prompts, got):
        want = pair.theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert mine == want[0, len(prompt) :].tolist(), f"prompt of {len(prompt)} tokens, seed {SEED}"


def test_the_native_model_computes_the_same(tmp_path: Path) -> None:
    write(tmp_path, MODELS["llama"][0])
    prompt = [[random.Random(1).randrange(131) for _ in range(50)]]
    logits = {}
    for impl in ("auto", "native", "sglang", "transformers"):
        config = of_transformers(tmp_path, model_impl=impl)
        assert config.model_impl == ("transformers" if impl == "transformers" else "native")
        runner = TinyRunner(config)
        (seq,) = runner.start(prompt, page_size=4)
        logits[impl] = runner.forward([(seq, 50)], all_rows=True)
    assert torch.equal(logits["auto"], logits["native"]) and torch.equal(logits["auto"], logits["sglang"])
    assert_close(logits["transformers"], logits["native"], "transformers' Llama")
    assert not torch.equal(logits["transformers"], logits["native"]), "the same code has run twice"
    prints = [of_transformers(tmp_path, model_impl=impl).fingerprint() for impl in ("native", "transformers")]
    assert prints[0] == of_transformers(tmp_path, model_impl="auto").fingerprint() != prints[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tmp_path: Path, dtype: str) -> None:
    theirs = write(tmp_path, MODELS["gemma"][0])
    ours = TinyRunner(of_transformers(tmp_path, dtype=dtype))
    assert {p.dtype for p in ours.model.parameters()} == {getattr(torch, dtype)}
    tokens = [random.Random(2).randrange(131) for _ in range(40)]
    (seq,) = ours.start([tokens])
    got = ours.forward([(seq, 40)], all_rows=True)
    assert got.dtype == torch.float32
    exact = logits_of(theirs, tokens)
    noise = (logits_of(theirs.to(getattr(torch, dtype)), tokens) - exact).std().item()
    assert (got - exact).std().item() < 1.5 * noise < 0.2 * exact.std().item()


def test_dummy_weights(tmp_path: Path) -> None:
    MODELS["gpt2"][0].save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["GPT2LMHeadModel"]}))
    drawn = torch.get_rng_state()
    first, again, other = (
        torch.cat([p.flatten() for p in TinyRunner(of_transformers(tmp_path), "dummy", seed).model.parameters()])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), drawn), "other random numbers are not those that they would have been"


# -- what is refused --------------------------------------------------------------------------------------------


def written(path: Path, config: Any, architecture: str) -> Path:
    config.architectures = [architecture]
    config.save_pretrained(path)
    return path


SMALL: dict[str, Any] = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)


@pytest.mark.parametrize(
    ("config", "architecture", "sentence"),
    [
        (LlamaConfig(**SMALL), "LlamaForTokenClassification", "neither native here nor a causal language model of"),
        (
            BertConfig(**SMALL),
            "OtherForCausalLM",
            "neither native here nor a causal language model of transformers 5",
        ),
        (
            MistralConfig(**SMALL, num_key_value_heads=2, layer_types=["full_attention"] * 2),
            "MistralForCausalLM",
            "reads its config as a MinistralConfig, of another; use the native model",
        ),
        (GPT2Config(**SMALL, add_cross_attention=True), "GPT2LMHeadModel", "it attends to an encoder, and only"),
        (MambaConfig(**SMALL), "MambaForCausalLM", "it keeps a state other than keys and values"),
        (BloomConfig(**SMALL), "BloomForCausalLM", "does not call attention through AttentionInterface"),
        (Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), "Lfm2ForCausalLM", "layers of the kind conv"),
        (Llama4TextConfig(**SMALL), "Llama4ForCausalLM", "layers of the kind chunked_attention"),
        (Gemma4TextConfig(), "Gemma4ForCausalLM", "one number of heads and one head size for all layers"),
    ],
)
def test_what_the_config_shows(config: Any, architecture: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError) as refused:
        of_transformers(written(tmp_path, config, architecture))
    assert sentence in str(refused.value) and str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("config", "architecture", "sentence"),
    [
        (BertConfig(**SMALL), "BertLMHeadModel", "a token of it sees other tokens than itself and the ones before"),
        (RobertaConfig(**SMALL, is_decoder=True), "RobertaForCausalLM", "the positions of its tokens are not 0, 1"),
        (DiffLlamaConfig(**SMALL), "DiffLlamaForCausalLM", "its layers [0, 0, 1, 1] attend, and layers 0 to 1"),
        (LlamaConfig(**SMALL), "LlamaForCausalLM", "its config asks for ((1, 2, 2, 10), (1, 2, 2, 10)) in every"),
    ],
)
def test_what_the_built_model_shows(config: Any, architecture: str, sentence: str, tmp_path: Path) -> None:
    found = of_transformers(written(tmp_path, config, architecture))
    if "every" in sentence:
        object.__setattr__(found, "head_dim", 10)
    with pytest.raises(ModelLoadError) as refused:
        TinyRunner(found, "dummy")
    assert sentence in str(refused.value)


@pytest.mark.parametrize("config_class", [Phi3Config, MistralConfig])
def test_rotations_that_depend_on_the_length(tmp_path: Path, config_class: Any) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
    shape = BASE | {"head_dim": 8, "pad_token_id": 0, "original_max_position_embeddings": 64}
    architecture = config_class.__name__.replace("Config", "ForCausalLM")
    written(tmp_path, config_class(**shape, rope_parameters=rope), architecture)
    with pytest.raises(ModelConfigError, match=r"'longrope' rotates keys by.* use --context-length 64 or less"):
        of_transformers(tmp_path)
    assert of_transformers(tmp_path, context_length=64).context_length == 64
    with pytest.raises(ModelConfigError, match="257 is more than the model's 256"):
        of_transformers(tmp_path, context_length=257)


def test_several_ranks(tmp_path: Path) -> None:
    config = of_transformers(written(tmp_path, LlamaConfig(**SMALL), "LlamaForCausalLM"))
    for num_ranks in (1, config.num_heads):
        config.check_tensor_parallel(num_ranks)
    with pytest.raises(ModelConfigError, match=f"{config.num_heads} attention heads cannot be divided over 7 ranks"):
        config.check_tensor_parallel(7)


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    write(tmp_path, MODELS["gpt2"][0])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "transformer.h.1.mlp.c_fc.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"do not fit GPT2LMHeadModel; missing: {name}\."):
        TinyRunner(of_transformers(tmp_path))
    save_file(tensors | {"transformer.h.7.x": torch.zeros(1)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"unexpected: transformer\.h\.7\.x\."):
        TinyRunner(of_transformers(tmp_path))
    save_file(tensors | {name: torch.zeros(3, 4)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=name):
        TinyRunner(of_transformers(tmp_path))
    file.write_bytes(b"\0" * 20)
    with pytest.raises(ModelLoadError, match="transformers cannot load the weights in"):
        TinyRunner(of_transformers(tmp_path))
