"""One host pool for all ranks: the memory is one, rank 0 alone writes, and the ranks agree on what it has done."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import TensorParallelGroup
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.shared_host import LeftToRank0, share_memory
from sglang.srt.mem_cache.storage.file.file_store import HiCacheFile
from sglang.srt.mem_cache.transfer import D2H, FETCH, GateError, OpResult, Ticket, Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.shared_memory import SharedMemory
from support.local_engine import Generation, LocalEngine, device_under_test
from support.two_ranks import TwoRanks

SIZE = 10_000
MODEL = DeepseekV3Config(
    vocab_size=211,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    max_position_embeddings=512,
    initializer_range=0.3,
    eos_token_id=2,
    q_lora_rank=None,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
)
BLOCK = 16
SETUP = StorageSetup(
    backend="file",
    setup="",
    secret=b"test",
    block_tokens=BLOCK,
    limits=StorageLimits(blocks_per_op=4, max_fetch_pages=400, max_store_pages=400),
    prefetch=PrefetchConfig(policy="wait_complete", threshold=1),
    write_policy="write_through",
)


class Group(TensorParallelGroup):
    """Rank 0 told this number to the others."""

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            told[:] = values.tolist()
        return torch.minimum(values, torch.tensor(told))


told: list[int] = []


ADD_ONE = """
import sys
from sglang.srt.utils.shared_memory import SharedMemory
SharedMemory.of_process(*map(int, sys.argv[1:])).memory[:] += 1
"""


def test_another_process_writes_to_the_same_memory() -> None:
    memory = share_memory(SharedMemory.allocate(SIZE, "test"), SIZE, Group(0, 2))
    memory.memory[:] = 7
    of_rank_1 = share_memory(None, SIZE, Group(1, 2))
    assert (of_rank_1.memory == 7).all() and of_rank_1.fd != memory.fd
    subprocess.run([sys.executable, "-c", ADD_ONE, *map(str, (os.getpid(), memory.fd, SIZE))], check=True)
    assert (memory.memory == 8).all() and (of_rank_1.memory == 8).all()


def test_memory_that_is_not_there_is_an_error() -> None:
    told[:] = [os.getpid(), 1_000_000]
    with pytest.raises(OSError, match="1000000"):
        share_memory(None, SIZE, Group(1, 2))


def test_a_link_that_is_left_to_rank_0_ends_all_at_once() -> None:
    link = LeftToRank0(FETCH)
    ops = [type("Op", (), {"ticket": Ticket(FETCH, seq)}) for seq in range(3)]
    for op in ops[:2]:
        link.submit(op)
    link.cancel(ops[1].ticket)
    results = link.poll()
    assert [(result.seq, result.ok) for result in results] == [(0, True), (1, True)] and not link.poll()
    # Whatever rank 0 counts is less.
    assert all(OpResult(0, True, count=1 << 40).count < result.count == result.far_count for result in results)
    with pytest.raises(AssertionError, match="out of order"):
        link.submit(ops[0])
    with pytest.raises(GateError):
        LeftToRank0(D2H).gate(Ticket(D2H, 0))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = str(tmp_path_factory.mktemp("model"))
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(MODEL).save_pretrained(path)
    return ModelConfig.from_pretrained(path)


def ask(engine: LocalEngine, prompts: list[np.ndarray], num_tokens: int = 4) -> list[Generation]:
    params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True, sampling_seed=0)
    answers = engine.generate(prompts, params)
    engine.settle()
    return answers


# Ranks in one process meet on the host alone.
@pytest.mark.skipif(device_under_test() != "cpu", reason="two ranks of one process are on the CPU")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("fails", [0.0, 0.3])
@pytest.mark.parametrize("page_size", [1, 16])
def test_two_ranks_over_one_host_and_one_disk(
    config: ModelConfig, tmp_path: Path, layout: str, fails: float, page_size: int
) -> None:
    """More documents than device and host hold, in random order, against answers of one rank without any cache."""
    seed = random.Random(f"{layout} {fails} {page_size}").randrange(1000)
    rng = np.random.default_rng(seed)
    documents = [rng.integers(3, 211, 80).astype(np.int32) for _ in range(8)]
    prompts = [
        np.concatenate((documents[i], rng.integers(3, 211, 5).astype(np.int32))) for i in rng.integers(0, 8, 24)
    ]
    alone = LocalEngine(config, 1000 // page_size, page_size=page_size, enable_radix_cache=False)
    want = [ask(alone, [prompt])[0].tokens for prompt in prompts]
    alone.close()
    engine = TwoRanks(
        config,
        (fails, fails),
        num_device_pages=208 // page_size,
        num_host_pages=320 // page_size,
        page_size=page_size,
        host_layout=layout,
        open_store=lambda pool: HiCacheFile(tmp_path, "all 2 ranks", pool, BLOCK),
        storage=SETUP,
    )
    assert engine.host_pool is engine.other.host_pool
    found = dict.fromkeys(("device", "host", "disk"), 0)
    for prompt, tokens in zip(prompts, want):
        (answer,) = ask(engine, [prompt])
        assert answer.tokens == tokens, f"seed {seed}"
        for tier, count in answer.cached_tokens_details.items():
            found[tier] += count
    for pair in zip(prompts[::2], prompts[1::2]):
        ask(engine, list(pair))
    assert found["host"] > 0 and found["disk"] > 0, (seed, found)
    assert engine.store is not None and engine.other.store is None
    for rank in (engine, engine.other):
        assert rank.scheduler.cache.tables[Tier.HOST].num_pages == 320 // page_size
    engine.close()
