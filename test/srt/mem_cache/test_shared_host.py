"""One host pool for ranks that cache the same: the memory is one, the leader alone writes, and the ranks agree on
what it has done."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
)

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import Replicas, TensorParallelGroup
from sglang.srt.managers.engine_core import EngineCore
from sglang.srt.managers.startup import engine as startup_engine
from sglang.srt.managers.startup import sizes
from sglang.srt.managers.startup.engine import Storage, build_core
from sglang.srt.managers.startup.rank_setup import RankSetup
from sglang.srt.managers.startup.sizes import replicas_of
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.shared_host import LeftToLeader, share_memory
from sglang.srt.mem_cache.storage.file.file_store import HiCacheFile
from sglang.srt.mem_cache.transfer import D2H, FETCH, P2H, STORAGE_LINKS, GateError, OpResult, Ticket, Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.shared_memory import SharedMemory
from support.local_engine import Generation, LocalEngine, device_under_test
from support.thread_group import thread_groups
from support.two_ranks import Ranks

Result = TypeVar("Result")
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


@pytest.mark.parametrize(
    ("num_kv_heads", "leaders"),
    [
        (8, (0, 1, 2, 3)),
        (4, (0, 1, 2, 3)),
        (2, (0, 0, 2, 2)),
        (1, (0, 0, 0, 0)),
        # Ranks of which some have a head alone. No model is divided so.
        (3, (0, 0, 2, 3)),
        (1, (0,)),
        (4, (0, 0, 2, 2, 4, 4, 6, 6)),
        (2, (0, 0, 0, 3, 3, 3)),
    ],
)
def test_ranks_with_the_same_heads_follow_the_first_of_them(num_kv_heads: int, leaders: tuple[int, ...]) -> None:
    model, size = ModelConfig.from_pretrained("embedded"), len(leaders)
    model = replace(model, num_kv_heads=num_kv_heads)
    indices = []
    for rank, leader in enumerate(leaders):
        group = TensorParallelGroup(rank, size)
        found = replicas_of(model, group)
        assert (found.leaders, found.leader, found.is_follower) == (leaders, leader, leader < rank)
        assert found.num_groups == min(num_kv_heads, size)
        assert group.shard_kv_heads(num_kv_heads) == TensorParallelGroup(leader, size).shard_kv_heads(num_kv_heads)
        indices.append(found.index)
    assert indices == sorted(indices) and {*indices} == {*range(found.num_groups)}


def test_ranks_whose_caches_differ_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the scales that a file gives a rank. Or the system has no memory to share."""
    model = replace(ModelConfig.from_pretrained("embedded"), num_kv_heads=1)
    of_rank = [((scale, scale),) for scale in (1.0, 2.0, 2.0, 1.0)]
    group = TensorParallelGroup(2, 4)
    assert replicas_of(replace(model, kv_scales=tuple(of_rank)), group) == Replicas(2, (0, 1, 1, 0))
    monkeypatch.setattr(sizes, "has_shared_memory", lambda: False)
    assert replicas_of(model, group) == Replicas(2, (0, 1, 2, 3))


def on_all_ranks(size: int, act: Callable[[TensorParallelGroup], Result]) -> list[Result | BaseException]:
    """What each rank returned or raised, in a thread each."""
    with ThreadPoolExecutor(size) as threads:
        ended = [threads.submit(act, group) for group in thread_groups(size)]
        return [each.exception() or each.result() for each in ended]


ADD_ONE = """
import sys
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.shared_memory import SharedMemory
SharedMemory.of_process(*map(int, sys.argv[1:])).memory[:] += 1
"""


def shared_on(leaders: tuple[int, ...], forget: int | None = None) -> list[SharedMemory | BaseException]:
    """Each leader's memory begins with its rank. forget: a leader that tells of a file that it has not."""

    def share(group: TensorParallelGroup) -> SharedMemory:
        replicas, memory = Replicas(group.rank, leaders), None
        if not replicas.is_follower:
            memory = SharedMemory.allocate(SIZE, "test")
            memory.memory[:] = group.rank
        told = SimpleNamespace(fd=1_000_000) if group.rank == forget else memory
        found = share_memory(cast(Any, told), SIZE, group, replicas)
        return found if told is memory else cast(SharedMemory, memory)

    return on_all_ranks(len(leaders), share)


@pytest.mark.parametrize("leaders", [(0, 0), (0, 0, 2, 2), (0, 0, 2, 3, 3, 3)])
def test_followers_see_the_memory_of_their_leader(leaders: tuple[int, ...]) -> None:
    memories = shared_on(leaders)
    assert len({memory.fd for memory in memories}) == len(leaders)
    assert [memory.memory[0] for memory in memories] == [*leaders]
    memories[-1].memory[:] = 77
    assert [(memory.memory == 77).all() for memory in memories] == [leader == leaders[-1] for leader in leaders]


def test_another_process_writes_to_the_same_memory() -> None:
    leader, follower = shared_on((0, 0))
    leader.memory[:] = 7
    subprocess.run([sys.executable, "-c", ADD_ONE, *map(str, (os.getpid(), leader.fd, SIZE))], check=True)
    assert (leader.memory == 8).all() and (follower.memory == 8).all()


def test_memory_that_is_not_there_is_an_error_of_its_followers() -> None:
    *others, last = shared_on((0, 0, 2, 2), forget=2)
    assert [memory.memory[0] for memory in others] == [0, 0, 2]
    assert isinstance(last, OSError) and "1000000" in str(last)


def test_a_link_that_is_left_to_its_leader_ends_all_at_once() -> None:
    link = LeftToLeader(FETCH)
    ops = [type("Op", (), {"ticket": Ticket(FETCH, seq)}) for seq in range(3)]
    for op in ops[:2]:
        link.submit(op)
    link.cancel(ops[1].ticket)
    results = link.poll()
    assert [(result.seq, result.ok) for result in results] == [(0, True), (1, True)] and not link.poll()
    # Whatever the leader counts is less.
    assert all(
        OpResult(0, True, count=1 << 40).count < result.count == result.part_count and not result.far_count
        for result in results
    )
    with pytest.raises(AssertionError, match="out of order"):
        link.submit(ops[0])
    with pytest.raises(GateError):
        LeftToLeader(D2H).gate(Ticket(D2H, 0))


@dataclass(frozen=True)
class Kind:
    """A model whose ranks cache the same. options: of `LocalEngine`."""

    config: PretrainedConfig
    num_ranks: int = 2
    model_impl: str = "auto"
    options: dict[str, int] = field(default_factory=dict)


SHAPE = dict(
    vocab_size=211,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=512,
    initializer_range=0.3,
    eos_token_id=2,
)
LLAMA = LlamaConfig(**SHAPE, num_key_value_heads=1)
WINDOWED = Qwen2Config(
    **SHAPE, num_key_value_heads=1, use_sliding_window=True, sliding_window=16, max_window_layers=1
)
WINDOWED_OPTIONS = {
    "window_tile": 1,
    "num_windowed_pages": 176,
    "num_windowed_host_pages": 176,
    "chunked_prefill_size": 32,
    "insert_every_tokens": 16,
}
KINDS = {
    "latents": Kind(MODEL),
    "one head": Kind(LLAMA),
    "one head by transformers": Kind(LLAMA, model_impl="transformers"),
    "one head, and windows": Kind(WINDOWED, options=WINDOWED_OPTIONS),
    "one head, and peers": Kind(LLAMA, options={"num_peer_pages": 100}),
    "two heads on four ranks": Kind(LlamaConfig(**SHAPE, num_key_value_heads=2), num_ranks=4),
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], ModelConfig]:
    paths: dict[int, str] = {}

    def made(kind: Kind) -> ModelConfig:
        if (path := paths.get(id(kind.config))) is None:
            path = paths[id(kind.config)] = str(tmp_path_factory.mktemp("model"))
            torch.manual_seed(1)
            AutoModelForCausalLM.from_config(kind.config).save_pretrained(path)
        return ModelConfig.from_pretrained(path, "float32", model_impl=kind.model_impl)

    return made


def ask(engine: LocalEngine, prompts: list[np.ndarray], num_tokens: int = 4) -> list[Generation]:
    params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True, sampling_seed=0)
    answers = engine.generate(prompts, params)
    engine.settle()
    return answers


@pytest.mark.skipif(device_under_test() != "cpu", reason="ranks of one process are on the CPU")
def test_a_rank_starts_as_a_leader_or_as_a_follower(
    model_of: Callable[[Kind], ModelConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks, of which each two have one head, and once more where they can share no memory."""
    args = ServerArgs(
        model_path=model_of(KINDS["two heads on four ranks"]).model_path,
        tp_size=4,
        device="cpu",
        enable_hierarchical_cache=True,
        max_total_tokens=256,
        # Starts without it.
        peer_role="master",
        peer_endpoint=f"ipc://{tmp_path}/peer",
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=json.dumps({"path": str(tmp_path / "store"), "limit_gb": 4}),
    )
    # Signals are the main thread's.
    monkeypatch.setattr(startup_engine, "without_stopping", nullcontext)
    folders: list[int] = []
    for leaders in ((0, 0, 2, 2), (0, 1, 2, 3)):
        with ExitStack() as on_exit:

            def build(group: TensorParallelGroup, on_exit: ExitStack = on_exit) -> tuple[EngineCore, Storage]:
                rank = RankSetup(group, lambda: None, tmp_path, on_exit)
                return cast(tuple[EngineCore, Storage], build_core(args, rank))

            ranks = on_all_ranks(4, build)
            pools = [storage.opener.pool for _, storage in ranks]
            pools[0].shared.memory[:] = 7
            assert [int(pool.shared.memory[0]) for pool in pools] == [7 if leader == 0 else 0 for leader in leaders]
            for rank, leader in enumerate(leaders):
                core, storage = ranks[rank]
                left = {name for name, link in core.links.items() if isinstance(link, LeftToLeader)}
                assert left == ({D2H, P2H, *STORAGE_LINKS} if rank != leader else set())
                assert (storage.slot.store is None) == (rank != leader)
                assert core.scheduler.config == ranks[0][0].scheduler.config
        folders.append(sum(path.is_dir() for path in (tmp_path / "store").iterdir()))
        monkeypatch.setattr(sizes, "has_shared_memory", lambda: False)
    # The leaders have the names that they have by themselves.
    assert folders == [2, 4]


# Ranks in one process meet on the host alone.
@pytest.mark.skipif(device_under_test() != "cpu", reason="ranks of one process are on the CPU")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("fails", [0.0, 0.3])
@pytest.mark.parametrize("page_size", [1, 16])
def test_ranks_over_one_host_and_one_disk(
    model_of: Callable[[Kind], ModelConfig], tmp_path: Path, kind: str, layout: str, fails: float, page_size: int
) -> None:
    """More documents than device and host hold, in random order, against answers of one rank without any cache."""
    model, config = KINDS[kind], model_of(KINDS[kind])
    seed = random.Random(f"{kind} {layout} {fails} {page_size}").randrange(1000)
    rng = np.random.default_rng(seed)
    documents = [rng.integers(3, 211, 80).astype(np.int32) for _ in range(8)]
    prompts = [
        np.concatenate((documents[i], rng.integers(3, 211, 5).astype(np.int32))) for i in rng.integers(0, 8, 24)
    ]
    alone = LocalEngine(config, 1000 // page_size, page_size=page_size, enable_radix_cache=False)
    want = [ask(alone, [prompt])[0].tokens for prompt in prompts]
    alone.close()
    stores: list[HiCacheFile] = []

    def open_store(pool: MHATokenToKVPoolHost) -> HiCacheFile:
        stores.append(HiCacheFile(tmp_path, f"store {len(stores)}", pool, BLOCK))
        return stores[-1]

    options = {name: -(-n // page_size) if "pages" in name else n for name, n in model.options.items()}
    engine = Ranks(
        config,
        # With more of them nearly every load would fail.
        (fails, fails, 0.0, 0.0)[: model.num_ranks],
        num_device_pages=208 // page_size,
        num_host_pages=320 // page_size,
        page_size=page_size,
        host_layout=layout,
        open_store=open_store,
        storage=SETUP,
        **options,
    )
    leaders = [engine.ranks[leader] for leader in engine.replicas.leaders]
    assert len({id(leader) for leader in leaders}) == len(stores) == model.num_ranks // 2
    found = dict.fromkeys(("device", "host", "disk"), 0)
    for prompt, tokens in zip(prompts, want):
        (answer,) = ask(engine, [prompt])
        assert answer.tokens == tokens, f"seed {seed}"
        for tier, count in answer.cached_tokens_details.items():
            found[tier] = found.get(tier, 0) + count
    for pair in zip(prompts[::2], prompts[1::2]):
        ask(engine, list(pair))
    assert found["host"] > 0 and found["disk"] > 0, (seed, found)
    for rank, leader in zip(engine.ranks, leaders):
        assert rank.host_pool is leader.host_pool and (rank.store is None) == (rank is not leader)
        assert rank.scheduler.cache.tables[Tier.HOST].num_pages == 320 // page_size
        if not fails:
            # What a follower computes is what its leader wrote for it.
            kv, of_leader = (each.device_pool.kv.view(torch.uint8) for each in (rank, leader))
            assert torch.equal(kv, of_leader)
    engine.close()
