"""The same bits, whatever tier a prefix came from: transfers change no byte, and the launches are the same.

A prompt is computed once. Then a continuation of it is run three times, with the prefix from the device, the host
and the disk, and every logit of every launch is compared bit by bit; so are the KV bytes of the prefix on each tier.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, GemmaConfig, GptOssConfig, LlamaConfig, Qwen3Config

from sglang.srt.configs.kv_cache_dtype import pick_kv_cache_dtype
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.file.file_store import HiCacheFile
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.device import to_device
from support.local_engine import LocalEngine, device_under_test
from support.pool_pages import pages_of
from support.two_ranks import TwoRanks

BLOCK = 64
PREFIX = 3 * BLOCK
SHAPE = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}
LATENT = dict(
    q_lora_rank=16,
    kv_lora_rank=32,
    qk_nope_head_dim=12,
    qk_rope_head_dim=16,
    v_head_dim=8,
    num_key_value_heads=6,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    topk_method="greedy",
)
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    # Computed by transformers.
    "gemma": GemmaConfig(**SHAPE),
    # Latents in the cache.
    "deepseek": DeepseekV2Config(**SHAPE | LATENT),
    # Sinks, and experts with biases. No window is reached: a load would leave out what it hides.
    "gpt_oss": GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=1 << 20),
}
SETUP = StorageSetup(
    backend="file",
    setup="",
    secret=b"test",
    block_tokens=BLOCK,
    limits=StorageLimits(blocks_per_op=2, max_fetch_pages=1000, max_store_pages=1000),
    prefetch=PrefetchConfig(policy="wait_complete", threshold=1),
    write_policy="write_through",
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for name, config in FAMILIES.items():
        torch.manual_seed(7)
        found[name] = str(tmp_path_factory.mktemp(name))
        AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
    return found


def watch_logits(engine: LocalEngine) -> list[torch.Tensor]:
    """Every launch's logits from now on."""
    seen: list[torch.Tensor] = []
    real = engine.model.logits

    def logits(*args: Any) -> torch.Tensor:
        found = real(*args)
        seen.append(found.cpu())
        return found

    engine.model.logits = logits
    return seen


def ranks_of(engine: LocalEngine) -> list[LocalEngine]:
    return [engine, *([engine.other] if isinstance(engine, TwoRanks) else [])]


def forget_continuation(engine: LocalEngine, prefix: np.ndarray) -> None:
    """Drop everything below the prefix on device and host."""
    for rank in ranks_of(engine):
        scheduler = rank.scheduler
        end = scheduler.cache.tree.lock(scheduler.cache.tree.match("", prefix), scheduler.clock.next)
        scheduler.cache.tree.unlock(end, scheduler.clock.next, scheduler.clock.last)
        for child in list(end.node.children.values()):
            for tier in (Tier.DEVICE, Tier.HOST):
                if child.frames[tier] is not None:
                    scheduler.cache.controller.drop(child, tier)
        for table in scheduler.cache.tables.values():
            table.reap(scheduler.clock.done)


def kv_bytes(engine: LocalEngine, prefix: np.ndarray) -> dict[Tier, bytes]:
    """The prefix's KV on the device and on the host, all ranks."""
    found: dict[Tier, bytes] = {}
    for tier in (Tier.DEVICE, Tier.HOST):
        for rank in ranks_of(engine):
            match = rank.scheduler.cache.tree.match("", prefix)
            frames = np.concatenate([node.frames[tier] for node in match.path])[: PREFIX // rank.scheduler.page_size]
            pool = rank.device_pool if tier == Tier.DEVICE else rank.host_pool
            assert pool is not None
            pages = pages_of(pool, to_device(frames.astype(np.int64), pool.kv.device)).cpu().contiguous()
            found[tier] = found.get(tier, b"") + pages.view(torch.uint8).numpy().tobytes()
    return found


CASES = [
    # family, dtype and that of the KV cache, page size, tp, host layout, chunk
    ("llama", "float32", 1, 1, "page_first", 512),
    ("llama", "float32", 16, 1, "layer_first", 512),
    ("llama", "float32", 64, 1, "page_first", 512),
    ("llama", "bfloat16", 1, 1, "layer_first", 512),
    ("llama", "bfloat16", 16, 1, "page_first", 512),
    ("qwen3", "float32", 1, 1, "page_first", 16),
    ("qwen3", "float32", 64, 1, "page_first", 64),
    ("qwen3", "bfloat16", 16, 1, "page_first", 32),
    ("gemma", "float32", 16, 1, "page_first", 48),
    ("deepseek", "float32", 1, 1, "page_first", 48),
    ("deepseek", "float32", 16, 2, "layer_first", 512),
    ("deepseek", "bfloat16", 64, 1, "page_first", 512),
    ("deepseek", "float32, fp8_e4m3", 16, 1, "page_first", 48),
    ("gpt_oss", "float32", 16, 1, "page_first", 48),
    ("gpt_oss", "float32", 16, 2, "layer_first", 512),
    ("llama", "float32, fp8_e4m3", 16, 1, "page_first", 512),
    ("gemma", "float32, fp8_e5m2", 1, 1, "layer_first", 48),
    ("qwen3", "bfloat16, fp8_e4m3", 64, 2, "page_first", 512),
    ("llama", "float32", 1, 2, "page_first", 512),
    ("llama", "bfloat16", 16, 2, "page_first", 32),
    ("qwen3", "float32", 16, 2, "layer_first", 512),
    ("qwen3", "bfloat16", 64, 2, "page_first", 512),
]


# Ranks in one process meet on the host alone. An emulated device does not run the code of transformers.
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "dtype", "page_size", "tp", "layout", "chunk"),
    [case for case in CASES if (case[3] == 1 and case[0] != "gemma") or device_under_test() == "cpu"],
)
def test_a_prefix_gives_the_same_bits_from_every_tier(
    paths: dict[str, str], tmp_path: Path, family: str, dtype: str, page_size: int, tp: int, layout: str, chunk: int
) -> None:
    opened = 0

    def open_store(pool: MHATokenToKVPoolHost) -> HiCacheFile:
        nonlocal opened
        opened += 1
        return HiCacheFile(tmp_path, f"rank {opened}", pool, BLOCK)

    of_model, _, of_kv = dtype.partition(", ")
    config = replace(ModelConfig.from_pretrained(paths[family], of_model), kv_cache_dtype=pick_kv_cache_dtype(of_kv))
    options: dict[str, Any] = {
        "num_device_pages": 320 // page_size,
        "num_host_pages": 640 // page_size,
        "page_size": page_size,
        "chunked_prefill_size": max(chunk, page_size),
        "open_store": open_store,
        "host_layout": layout,
        "storage": SETUP,
    }
    engine = TwoRanks(config, (0.0, 0.0), **options) if tp == 2 else LocalEngine(config, **options)
    rng = np.random.default_rng(5)
    prefix = rng.integers(3, 211, PREFIX).astype(np.int32)
    # Shorter than a block: the continuation itself is never stored.
    prompt = np.concatenate((prefix, rng.integers(3, 211, 37).astype(np.int32)))
    params = SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True, sampling_seed=0)
    engine.generate([prefix], SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, sampling_seed=0))
    engine.settle()
    computed = kv_bytes(engine, prefix)
    assert computed[Tier.DEVICE] == computed[Tier.HOST]

    seen = watch_logits(engine)
    logits: dict[str, list[torch.Tensor]] = {}
    for tier in ("device", "host", "disk"):
        forget_continuation(engine, prefix)
        for rank in ranks_of(engine):
            scheduler = rank.scheduler
            if tier != "device":
                scheduler.cache.controller.evict(Tier.DEVICE, scheduler.cache.device.num_pages)
            if tier == "disk":
                scheduler.cache.controller.evict(Tier.HOST, 10_000)
        del seen[:]
        (answer,) = engine.generate([prompt], params)
        engine.settle()
        assert answer.cached_tokens_details == {"device": 0, "host": 0, "disk": 0} | {tier: PREFIX}
        logits[tier] = list(seen)
        assert kv_bytes(engine, prefix) == computed, tier
    for tier in ("host", "disk"):
        assert len(logits[tier]) == len(logits["device"]) > 0
        assert all(torch.equal(a, b) for a, b in zip(logits["device"], logits[tier])), tier
    engine.close()
