"""Greedy tokens (float32) equal transformers' on the same weights, whatever the cache, the batch and the faults were.

A token counts as equal if its logit, recomputed by transformers on the same prefix, is the largest or within MARGIN
of it: GEMM results change with the batch's shape in the last bits.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV3Config,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.managers.step_record import replay
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.layer_stream_cache import FilledPiece, LayerStreamCache, Piece
from sglang.srt.mem_cache.storage.file.file_store import HiCacheFile
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from support.kv_oracle import check_kv
from support.local_engine import Generation, LocalEngine

MARGIN = 1e-4
KV_TOLERANCE = 1e-4
VOCAB = 211
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
# Powers of two, which kernels of a GPU want.
LATENT = dict(
    head_dim=16,
    q_lora_rank=20,
    kv_lora_rank=32,
    qk_nope_head_dim=10,
    qk_rope_head_dim=16,
    v_head_dim=12,
    num_key_value_heads=6,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)


class Model:
    """One random model, as transformers and as ours see it."""

    def __init__(self, hf_config: PretrainedConfig, path: str, model_impl: str = "auto") -> None:
        torch.manual_seed(7)
        self.hf = AutoModelForCausalLM.from_config(hf_config).eval()
        with torch.no_grad():
            for name, parameter in self.hf.named_parameters():
                if name.endswith("bias"):  # fresh ones are 0
                    parameter.normal_(0, 0.3)
        self.hf.save_pretrained(path)
        self.config = ModelConfig.from_pretrained(path, dtype="float32", model_impl=model_impl)

    def engine(self, **options: object) -> LocalEngine:
        return LocalEngine(self.config, **{"num_device_pages": 600, **options})  # type: ignore[arg-type]

    def check_behind_documents(self, engine: LocalEngine) -> None:
        """Questions behind the ends of three documents, which the device has no room for together, and in their
        middles."""
        rng = np.random.default_rng(5)
        documents = [rng.integers(3, VOCAB, length).astype(np.int32) for length in (200, 160, 180)]
        for number in range(4):
            for document in documents:
                whole = len(document)
                for length in ((whole,), (whole - 40,), (whole // 2,), (whole, whole // 3))[number]:
                    question = rng.integers(3, VOCAB, 7 + number).astype(np.int32)
                    prompt = np.concatenate((document[:length], question))
                    (answer,) = engine.generate([prompt], greedy(5))
                    self.check(prompt, answer, 5)
                    engine.settle()

    def check(self, prompt: np.ndarray, answer: Generation, num_tokens: int, reason: str = "length") -> None:
        assert answer.finish_reason == reason
        assert len(answer.tokens) == num_tokens
        whole = torch.tensor(np.concatenate([prompt, answer.tokens]))[None].long()
        with torch.inference_mode():
            logits = self.hf(whole).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(num_tokens), torch.tensor(answer.tokens)]
        gap = logits.max(-1).values - chosen
        assert gap.max() < MARGIN, (
            f"token {int(gap.argmax())} differs: its logit is {float(gap.max())} below the best"
        )

    def reference_kv(self, tokens: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            # One of no config keeps what has left a window, too.
            cache = self.hf(torch.tensor(tokens)[None].long(), past_key_values=DynamicCache()).past_key_values
        if self.config.latent is None:
            layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
        else:
            layers = [torch.cat((layer.keys, layer.values), dim=3) for layer in cache.layers]
        # (layers, components, heads, tokens, dim) -> (tokens, components, layers, heads, dim)
        return torch.stack(layers).permute(3, 1, 0, 2, 4).double().numpy()


ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=24),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS),
    "deepseek_v3": DeepseekV3Config(**SHAPE | LATENT),
    # Sinks, and windows in its first and its last layer.
    "gpt_oss": GptOssConfig(
        **SHAPE | {"initializer_range": 0.15}, num_local_experts=4, num_experts_per_tok=2, sliding_window=24
    ),
    # Capped scores and windows. Tied, it would repeat its last token for ever.
    "gemma2": Gemma2Config(**SHAPE, sliding_window=24, tie_word_embeddings=False),
    # Windows in its first and its last layer, which rotate otherwise.
    "gemma3": Gemma3TextConfig(**SHAPE, sliding_window=24, layer_types=ALTERNATING, tie_word_embeddings=False),
    # Computed by transformers, with our attention; the last has windows.
    "gpt2": GPT2Config(
        **{name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
    ),
    "gemma": GemmaConfig(**SHAPE),
    "olmoe": OlmoeConfig(
        **{name: value for name, value in SHAPE.items() if name != "head_dim"}, num_experts=4, num_experts_per_tok=2
    ),
    "cohere2": Cohere2Config(**SHAPE, sliding_window=24, layer_types=ALTERNATING, tie_word_embeddings=False),
}


OF_TRANSFORMERS = ("gpt2", "gemma", "olmoe", "cohere2")
not_emulated = pytest.mark.skipif(
    os.environ.get("SGLANG_TEST_DEVICE") == "emulated", reason="transformers needs the CPU or a real GPU"
)


# The others differ from these in nothing that caching touches; test_models.py runs all. What is special to models
# that transformers computes is in `test_every_tier_of_a_model_of_transformers`.
@pytest.fixture(
    scope="module",
    params=[
        *("llama", "qwen3", "deepseek_v3"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("mistral", "qwen2", "qwen3_moe", "gpt_oss", "gemma2", "gemma3")
        ),
        *(pytest.param(name, marks=(pytest.mark.slow, not_emulated)) for name in OF_TRANSFORMERS),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(MODELS[request.param], str(tmp_path_factory.mktemp(request.param)))


def prompts(seed: int, lengths: list[int], shared: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    prefix = rng.integers(3, VOCAB, shared)
    return [np.concatenate([prefix, rng.integers(3, VOCAB, n)]).astype(np.int32) for n in lengths]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True, sampling_seed=0)


def check_memory(model: Model, engine: LocalEngine) -> None:
    """Nothing is left over, and every cached byte is what transformers computes."""
    engine.settle()
    scheduler = engine.scheduler
    for table in scheduler.cache.tables.values():
        there = table.num_pages - table.counts[FrameState.LENT]
        assert table.counts[FrameState.FREE] + table.counts[FrameState.CACHED] == there
    pools = {Tier.DEVICE: engine.device_pool}
    for tier, pool in ((Tier.HOST, engine.host_pool), (Tier.PEER, engine.peer_pool)):
        if pool is not None:
            pools[tier] = pool
    assert check_kv(scheduler, pools, model.reference_kv, atol=KV_TOLERANCE) > 0
    engine.close()


def test_alone_and_again(model: Model) -> None:
    engine = model.engine()
    (prompt,) = prompts(1, [37])
    for expected_hit in (0, 36):
        (answer,) = engine.generate([prompt], greedy(12))
        model.check(prompt, answer, 12)
        assert answer.cached_tokens_details == {"device": expected_hit}
    check_memory(model, engine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_batched_with_device_hits(model: Model, page_size: int) -> None:
    engine = model.engine(page_size=page_size)
    batch = prompts(2, [1, 5, 30, 64, 17], shared=40)
    for turn in range(2):
        for prompt, answer in zip(batch, engine.generate(batch, greedy(9))):
            model.check(prompt, answer, 9)
            if turn == 1:
                assert (
                    answer.cached_tokens_details["device"] >= (len(prompt) - 1) // page_size * page_size - page_size
                )
    check_memory(model, engine)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_host_hits(model: Model, page_size: int) -> None:
    """Conversations that do not fit the device together come back from the host."""
    engine = model.engine(page_size=page_size, num_device_pages=160 // page_size, num_host_pages=1200 // page_size)
    batch = prompts(3, [80, 90, 100], shared=16)
    hits = 0
    for _ in range(3):
        for prompt in batch:
            (answer,) = engine.generate([prompt], greedy(6))
            model.check(prompt, answer, 6)
            hits += answer.cached_tokens_details["host"]
            engine.settle()
    assert hits > 100
    check_memory(model, engine)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chunk", [5, 16, 33])
def test_chunked_at_odd_sizes(model: Model, chunk: int) -> None:
    engine = model.engine(num_host_pages=900, num_device_pages=300, chunked_prefill_size=chunk)
    batch = prompts(4, [70, 12, 101], shared=9)
    for _ in range(2):
        for prompt, answer in zip(batch, engine.generate(batch, greedy(8))):
            model.check(prompt, answer, 8)
    check_memory(model, engine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page_size", [1, 4])
def test_retracted(model: Model, page_size: int) -> None:
    """More is admitted than fits in the end; the youngest give way and resume exactly."""
    engine = model.engine(
        page_size=page_size, num_device_pages=200 // page_size, num_host_pages=100 // page_size, new_token_ratio=0.05
    )
    batch = prompts(5, [20] * 8)
    for prompt, answer in zip(batch, engine.generate(batch, greedy(40))):
        model.check(prompt, answer, 40)
    assert engine.scheduler.counters["retracted_reqs"] > 0
    check_memory(model, engine)


def test_aborted_neighbours(model: Model) -> None:
    engine = model.engine(num_device_pages=300, num_host_pages=300, chunked_prefill_size=32)
    batch = prompts(6, [50, 60, 40, 70], shared=8)
    answers = engine.generate(batch, greedy(20), abort_after={0: 3, 2: 0})
    assert [a.finish_reason for a in answers] == ["abort", "length", "abort", "length"]
    for i in (1, 3):
        model.check(batch[i], answers[i], 20)
    model.check(batch[0], answers[0], len(answers[0].tokens), "abort")
    check_memory(model, engine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fail_rate", [0.0, 0.3])
def test_peer_hits(model: Model, fail_rate: float) -> None:
    """The host holds less than one conversation: what leaves the device comes back from the peer."""
    engine = model.engine(
        page_size=3, num_device_pages=53, num_host_pages=30, num_peer_pages=400, load_fail_rate=fail_rate, seed=3
    )
    batch = prompts(5, [80, 90, 100], shared=16)
    hits = 0
    for _ in range(3):
        for prompt in batch:
            (answer,) = engine.generate([prompt], greedy(6))
            model.check(prompt, answer, 6)
            assert sum(answer.cached_tokens_details.values()) <= len(prompt) - 1
            hits += answer.cached_tokens_details["peer"]
            engine.settle()
    counters = engine.scheduler.state()["counters"]
    # Who has lost what was loaded counts it once.
    assert 100 < hits <= counters["hit_tokens_peer"] and (fail_rate or counters["hit_tokens_peer"] == hits)
    assert (counters.get("failed_ops", 0) > 0) == (fail_rate > 0), "seed 3"
    check_memory(model, engine)


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mistral", "gemma2"),
        *(pytest.param(each, marks=(not_emulated, pytest.mark.slow)) for each in ("olmoe", "cohere2")),
    ],
)
@pytest.mark.parametrize("fail_rate", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_longer_than_device_and_host(tmp_path: Path, name: str, fail_rate: float) -> None:
    """What neither has room for comes from a file, layer by layer; also with windows and capped scores."""
    model = Model(MODELS[name], str(tmp_path))
    engine = model.engine(
        page_size=4,
        num_device_pages=20,
        num_host_pages=12,
        num_swap_pages=60,
        chunked_prefill_size=32,
        layer_stream=LayerStreamConfig(2, 5),
        load_fail_rate=fail_rate,
        seed=3,
    )
    (prompt,) = prompts(9, [180])
    (answer,) = engine.generate([prompt], greedy(4))
    model.check(prompt, answer, 4)
    counters = engine.scheduler.state()["counters"]
    assert counters["swapped_tokens"] > 0 and (counters.get("failed_ops", 0) > 0) == (fail_rate > 0), "seed 3"
    engine.close()


def test_what_a_window_hides_is_not_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen's first layer sees all, the others 24 tokens."""
    config = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=24, max_window_layers=1)
    model = Model(config, str(tmp_path))
    engine = model.engine(
        page_size=4,
        num_device_pages=20,
        num_host_pages=60,
        chunked_prefill_size=32,
        layer_stream=LayerStreamConfig(2, 5),
    )
    filled, fill = Counter[int](), LayerStreamCache.fill

    def watched(cache: LayerStreamCache, layer: int, piece: Piece) -> FilledPiece:
        filled[layer] += piece.num_pages
        return fill(cache, layer, piece)

    monkeypatch.setattr(LayerStreamCache, "fill", watched)
    (prompt,) = prompts(9, [180])
    (answer,) = engine.generate([prompt], greedy(12))
    model.check(prompt, answer, 12)
    assert filled[0] > 4 * filled[1] and filled[1] == filled[2], filled
    engine.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))])
def test_loads_fail(model: Model, seed: int) -> None:
    """Half of all loads fail, completions come late: requests compute what did not come."""
    engine = model.engine(
        num_device_pages=230, num_host_pages=900, page_size=1, load_fail_rate=0.5, late_rate=0.3, seed=seed
    )
    batch = prompts(7, [80, 60, 70], shared=20)
    for _ in range(6):
        for pair in (batch[:2], batch[1:], batch[::2]):
            for prompt, answer in zip(pair, engine.generate(pair, greedy(5))):
                model.check(prompt, answer, 5)
    counters = engine.scheduler.state()["counters"]
    assert counters["failed_ops"] > 0 and counters["failed_launches"] > 0, f"seed {seed}: nothing failed"
    check_memory(model, engine)


def test_without_overlap_and_without_radix_cache(model: Model) -> None:
    batch = prompts(8, [30, 41], shared=11)
    for options in ({"max_ahead": 1}, {"enable_radix_cache": False}):
        engine = model.engine(**options)
        for _ in range(2):
            for prompt, answer in zip(batch, engine.generate(batch, greedy(10))):
                model.check(prompt, answer, 10)
        engine.settle()
        if "enable_radix_cache" in options:
            assert answer.cached_tokens_details == {"device": 0}
            assert engine.scheduler.cache.device.counts[FrameState.CACHED] == 0
        engine.close()


def test_a_live_run_replays(model: Model) -> None:
    """What threads did, late and out of step, is in the inputs: the same inputs give the same decisions."""
    record = io.BytesIO()
    engine = model.engine(
        num_device_pages=230, num_host_pages=700, load_fail_rate=0.3, late_rate=0.2, seed=5, record=record
    )
    batch = prompts(9, [80, 60, 70, 20], shared=20)
    for _ in range(3):
        engine.generate(batch, greedy(6), abort_after={3: 2})
    engine.settle()
    record.seek(0)
    assert replay(record) == engine.core.num_steps
    engine.close()


@pytest.mark.sampled(1)
def test_sampling_resumes_exactly_after_retraction(model: Model) -> None:
    """Token i is drawn from (seed, i): with and without retraction the same tokens come, other seeds give others."""
    params = [
        SamplingParams(max_new_tokens=40, temperature=0.9, top_p=0.95, top_k=40, ignore_eos=True, sampling_seed=seed)
        for seed in range(8)
    ]
    batch = [prompts(10, [20])[0]] * 8
    wide = model.engine(num_device_pages=2000)
    calm = [a.tokens for a in wide.generate(batch, params)]
    tiny = model.engine(num_device_pages=130, new_token_ratio=0.01)
    tight = [a.tokens for a in tiny.generate(batch, params)]
    assert tiny.scheduler.counters["retracted_reqs"] > 0
    assert calm == tight
    assert len({tuple(tokens) for tokens in calm}) == 8
    wide.close()
    tiny.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write_policy", ["write_back", "write_through_selective"])
@pytest.mark.parametrize("eviction_policy", ["lru", "lfu"])
def test_host_hits_under_other_policies(model: Model, write_policy: str, eviction_policy: str) -> None:
    engine = model.engine(
        num_device_pages=200, num_host_pages=1200, write_policy=write_policy, eviction_policy=eviction_policy
    )
    batch = prompts(11, [80, 90, 100], shared=16)
    hits = 0
    for turn in range(3):
        for prompt in batch:
            for use in range(2):
                (answer,) = engine.generate([prompt], greedy(6))
                model.check(prompt, answer, 6)
                hits += answer.cached_tokens_details["host"]
                engine.settle()
                if turn == 0 and use == 0 and prompt is batch[0]:
                    # Nothing has left the device, and nothing was used twice.
                    assert engine.scheduler.cache.tree.resident_pages(Tier.HOST) == 0
    assert hits > 100
    check_memory(model, engine)


SETUP = StorageSetup(
    backend="file",
    setup="",
    secret=b"test",
    block_tokens=16,
    limits=StorageLimits(blocks_per_op=2, max_fetch_pages=1000, max_store_pages=1000),
    prefetch=PrefetchConfig(policy="wait_complete", threshold=1),
    write_policy="write_through",
)


@pytest.mark.sampled(1)
@not_emulated
@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "olmoe", "deepseek_v3"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma", "gemma2")),
    ],
)
def test_every_tier_of_a_model_of_transformers(name: str, tmp_path: Path) -> None:
    """Cold and in chunks, from the device, from the host while half of the loads fail, and from the disk of an engine
    that has ended; beside a request that is aborted, and with more requests than fit."""
    model = Model(MODELS[name], str(tmp_path / "model"), "transformers")
    page_size = 1 if name == "gpt2" else 16

    def engine(**options: object) -> LocalEngine:
        return model.engine(
            page_size=page_size,
            num_host_pages=800 // page_size,
            chunked_prefill_size=37,
            open_store=lambda pool: HiCacheFile(tmp_path / "store", "model", pool, 16),
            storage=SETUP,
            seed=4,
            **{"num_device_pages": 600 // page_size, **options},
        )

    batch = prompts(12, [61, 5, 90, 70], shared=32)
    first = engine()
    for turn in range(2):
        answers = first.generate(batch, greedy(7), abort_after={3: 2} if turn else None)
        for prompt, answer in list(zip(batch, answers))[: 3 if turn else 4]:
            model.check(prompt, answer, 7)
    assert answers[2].cached_tokens_details["device"] >= 112 and answers[3].finish_reason == "abort"
    first.settle()
    check_memory(model, first)

    again = engine(num_device_pages=176 // page_size, load_fail_rate=0.5, new_token_ratio=0.05)
    hits = dict.fromkeys(("device", "host", "disk"), 0)
    for _ in range(3):
        for prompt in batch:
            # One at a time, and all that was computed is on the host: what comes back does not depend on the clock.
            (answer,) = again.generate([prompt], greedy(5))
            again.settle()
            model.check(prompt, answer, 5)
            for tier, found in answer.cached_tokens_details.items():
                hits[tier] += found
    many = prompts(13, [20] * 6)
    for prompt, answer in zip(many, again.generate(many, greedy(36))):
        model.check(prompt, answer, 36)
    counters = again.scheduler.state()["counters"]
    assert hits["host"] > 0 and hits["disk"] > 0, hits
    assert counters["failed_ops"] > 0 and counters["failed_launches"] > 0, "seed 4: nothing failed"
    assert counters["retracted_reqs"] > 0
    check_memory(model, again)
