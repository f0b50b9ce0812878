"""Every prompt token that is computed has a reason, and it is the right one."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from test_storage import PARAMS, SETUP, Clock, Engine, computed, prompt, stored

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.lost_hits import REASONS
from sglang.srt.managers.storage_breaker import FAILURES_IN_A_ROW
from sglang.srt.managers.storage_setup import PrefetchConfig
from sglang.srt.mem_cache.block_history import FORGOTTEN, BlockHistory, Left
from sglang.srt.mem_cache.block_store import ExistsFailed
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.namespaces import namespace_of
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.utils.time_units import Seconds
from support.faults import Gate
from support.tiny_model import tiny_llama

# 199 tokens may be cached: 49 pages of 4, and 3 tokens that fill none. Blocks of the history have 64.
LENGTH = 200
USUAL = {"last_token": 1, "page_tail": 3}


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny_llama(tmp_path_factory.mktemp("model"), eos_token_id=2)


def ask(engine: Engine, text: np.ndarray, **options: object) -> dict[str, int]:
    """The reasons of an answer that is right. They add up."""
    (answer,) = engine.generate([text], PARAMS, **options)  # type: ignore[arg-type]
    assert answer.tokens == computed(engine.model_config, text)
    reasons = answer.computed_tokens_details
    assert reasons.keys() <= REASONS.keys()
    assert sum(reasons.values()) + sum(answer.cached_tokens_details.values()) == len(text)
    engine.settle()
    return reasons


def flush(engine: Engine) -> None:
    engine.core.step(engine.clock(), engine.core.progress(), flush=["f"])
    engine.settle()


def engine_of(model_config: ModelConfig, **options: object) -> Engine:
    return Engine(model_config, **{"storage": None, "num_host_pages": 0} | options)  # type: ignore[arg-type]


def test_a_prompt_that_is_new_and_one_that_is_not(model_config: ModelConfig):
    engine = engine_of(model_config)
    text = prompt(1, LENGTH)
    assert ask(engine, text) == USUAL | {"never_cached": 196}
    assert ask(engine, text) == USUAL
    longer = np.concatenate([text[:100], prompt(2, 40)])
    assert ask(engine, longer) == {"last_token": 1, "page_tail": 3, "never_cached": 36}
    assert engine.scheduler.state()["lost_hits"] == dict.fromkeys(REASONS, 0) | {
        "never_cached": 232,
        "page_tail": 9,
        "last_token": 3,
    }
    engine.close()


def test_a_request_that_reads_no_cache(model_config: ModelConfig):
    engine = engine_of(model_config)
    text = prompt(3, LENGTH)
    ask(engine, text)
    assert ask(engine, text, cache="bypass") == {"bypassed": LENGTH}
    engine.close()


def test_log_probabilities(model_config: ModelConfig):
    engine = engine_of(model_config)
    text = prompt(4, LENGTH)
    ask(engine, text)
    spec = LogprobSpec(prompt_from=100)
    # The row before token 100 is computed: 99 tokens may be cached, 24 pages.
    assert ask(engine, text, logprobs=spec) == {"last_token": 1, "logprobs": 100, "page_tail": 3}
    engine.close()


@pytest.mark.parametrize("num_host_pages", [0, 80])
def test_eviction(model_config: ModelConfig, num_host_pages: int):
    engine = engine_of(model_config, num_host_pages=num_host_pages)
    text, tier = prompt(5, LENGTH), Tier.HOST if num_host_pages else Tier.DEVICE
    ask(engine, text)
    for each in (Tier.DEVICE, Tier.HOST)[: 2 if num_host_pages else 1]:
        engine.scheduler.cache.controller.evict(each, 80)
        engine.settle()
    # The last block that left memory is not whole: it counts as the one before it.
    assert ask(engine, text) == USUAL | {f"evicted_{tier.name.lower()}": 196}
    engine.close()


def test_a_flush(model_config: ModelConfig):
    engine = engine_of(model_config)
    text = prompt(6, LENGTH)
    ask(engine, text)
    flush(engine)
    assert ask(engine, text) == USUAL | {"flushed": 196}
    engine.close()


@pytest.mark.parametrize("cause", ["flushed", "erased"])
def test_what_was_being_copied_when_it_was_dropped(model_config: ModelConfig, cause: str):
    engine = engine_of(model_config, num_host_pages=80)
    where, text = namespace_of("alice", ""), prompt(18, LENGTH)
    ask(engine, text, extra_key=where)
    cache = engine.scheduler.cache
    (node,) = cache.tree.walk()
    cache.controller.drop(node, Tier.HOST)
    assert cache.controller.begin_backup(node) is not None
    engine.core.step(engine.clock(), engine.core.progress())
    if cause == "flushed":
        cache.flush()
    else:
        cache.erase("alice")
    engine.settle()
    assert ask(engine, text, extra_key=where) == USUAL | {cause: 196}
    engine.close()


def test_what_is_behind_a_hole_or_on_a_tier_that_is_off(model_config: ModelConfig):
    engine = engine_of(model_config, num_host_pages=80)
    text = prompt(7, LENGTH)
    ask(engine, text[:120])
    ask(engine, text)
    controller, tree = engine.scheduler.cache.controller, engine.scheduler.cache.tree
    controller.evict(Tier.DEVICE, 80)
    engine.settle()
    engine.switch("host", reads=False)
    assert ask(engine, text) == USUAL | {"switched_off": 196}
    engine.switch("host", reads=True)
    controller.evict(Tier.DEVICE, 80)
    engine.settle()
    tree.unlock(tree.lock(tree.match("", text[:128]), 0), 0, 0)  # cuts a node there
    (front,) = (node for node in tree.walk() if node.start == 0)
    controller.drop(front, Tier.HOST)
    size = len(front.key)
    assert ask(engine, text) == USUAL | {"evicted_host": size, "behind_hole": 196 - size}
    engine.close()


def storage_engine(
    model_config: ModelConfig, text: np.ndarray, bypass_local: bool = False, **prefetch: object
) -> Engine:
    config = dataclasses.replace(SETUP.prefetch, **prefetch)  # type: ignore[arg-type]
    setup = dataclasses.replace(SETUP, prefetch=config)
    return Engine(model_config, store=stored(model_config, text), storage=setup, bypass_local=bypass_local)


def test_storage_that_has_lost_what_memory_gave_up(model_config: ModelConfig):
    text = prompt(8, LENGTH)
    engine = storage_engine(model_config, text)
    # Storage has 192 tokens in blocks of 16.
    assert ask(engine, text) == USUAL | {"never_cached": 4}
    engine.forget()
    engine.store.blocks.clear()
    # Storage never had the last 4, which fill no block of it.
    assert ask(engine, text) == USUAL | {"storage_missing": 192, "evicted_host": 4}
    engine.close()


def test_the_tail_of_a_prompt_whose_blocks_come_from_storage_again(model_config: ModelConfig):
    text = prompt(8, LENGTH)
    engine = storage_engine(model_config, text)
    ask(engine, text)
    flush(engine)
    assert ask(engine, text) == USUAL | {"flushed": 4}
    flush(engine)
    # Three blocks of the history, which memory had, and 20 tokens that no request had.
    longer = np.concatenate([text[:192], prompt(17, 21)])
    assert ask(engine, longer) == {"last_token": 1, "never_cached": 20}
    engine.close()


def test_storage_that_was_not_asked(model_config: ModelConfig):
    text = prompt(13, LENGTH)
    engine = storage_engine(model_config, prompt(14, 16), threshold=LENGTH)
    ask(engine, text)
    flush(engine)
    assert ask(engine, text) == USUAL | {"storage_not_awaited": 192, "flushed": 4}
    engine.close()


@pytest.mark.parametrize("bypass_local", [False, True])
def test_storage_that_does_not_tell_what_it_has_is_left_alone(model_config: ModelConfig, bypass_local: bool):
    text = prompt(15, LENGTH)
    engine = storage_engine(model_config, prompt(14, 16), bypass_local=bypass_local)
    # They fill no block.
    tail = USUAL | {"never_cached" if bypass_local else "flushed": 4}
    ask(engine, text)

    def fail(keys: object) -> int:
        raise ExistsFailed

    engine.store.exists = fail  # type: ignore[method-assign]
    for _ in range(FAILURES_IN_A_ROW):
        flush(engine)
        assert ask(engine, text) == tail | {"storage_failed": 192}
    flush(engine)
    assert ask(engine, text) == tail | {"storage_off": 192}
    engine.close()


@pytest.mark.parametrize("cause", ["storage_off", "switched_off"])
def test_reads_that_are_on_again_when_a_request_starts(model_config: ModelConfig, cause: str):
    engine = storage_engine(model_config, prompt(14, 16))
    storage = engine.scheduler.storage
    if cause == "storage_off":
        storage.stores.near.reads.reason = "it failed"
    else:
        engine.switch("disk", reads=False)
    storage.begin("rid", "", prompt(16, LENGTH), Seconds(0.0))
    storage.stores.near.reads.reason = ""
    if cause == "switched_off":
        engine.switch("disk", reads=True)
    assert storage.outcome("rid").reason == cause and storage.may_start("rid")
    storage.detach("rid")
    engine.close()


def test_storage_whose_blocks_do_not_come(model_config: ModelConfig):
    text = prompt(9, LENGTH)
    engine = storage_engine(model_config, text)
    engine.store.get = lambda keys, frames: 0  # type: ignore[method-assign]
    assert ask(engine, text) == USUAL | {"storage_failed": 192, "never_cached": 4}
    engine.close()


@pytest.mark.parametrize("policy", ["timeout", "best_effort"])
def test_storage_that_is_not_waited_for(model_config: ModelConfig, policy: str):
    text, clock = prompt(10, LENGTH), Clock()
    prefetch = PrefetchConfig(policy, threshold=1, timeout_base_s=1.0)
    engine = Engine(
        model_config,
        store=stored(model_config, text),
        storage=dataclasses.replace(SETUP, prefetch=prefetch),
        clock=clock,
    )
    gate = Gate(engine.store, "get" if policy == "timeout" else "exists")

    def when_idle() -> None:
        if gate.entered.is_set():
            clock.now += 0.5

    engine.when_idle = when_idle
    reasons = ask_while_it_hangs(engine, text)
    reason = "storage_timeout" if policy == "timeout" else "storage_not_awaited"
    # Where storage has not answered, it is not known what it has.
    assert reasons == USUAL | ({reason: 192, "never_cached": 4} if policy == "timeout" else {"never_cached": 196})
    gate.open.set()
    engine.settle()
    engine.close()


def ask_while_it_hangs(engine: Engine, text: np.ndarray) -> dict[str, int]:
    (answer,) = engine.generate([text], PARAMS)
    assert answer.tokens == computed(engine.model_config, text)
    return answer.computed_tokens_details


def left_as(history: BlockHistory, text: np.ndarray, cause: str, is_stored: bool = False) -> None:
    tree = HiRadixTree(4)
    node = tree.insert_prefix("", None, text, np.arange(len(text) // 4, dtype=np.int32), 0, 0).node
    node.stored = np.array([is_stored])
    with history.because(cause):
        history.note(node, Tier.HOST)


def test_a_block_that_storage_had_once_stays_known_as_such():
    history, text = BlockHistory(4), np.arange(64, dtype=np.int32)
    left_as(history, text, "flushed", is_stored=True)
    left_as(history, text, "failed")
    assert history.find("", text, 0) == [Left("failed", True)]


@pytest.mark.parametrize("length", [8, 64 + 8, 3 * 64 + 20])
def test_tails(length: int):
    history, text, other = BlockHistory(4), np.arange(length, dtype=np.int32), np.arange(900, 964, dtype=np.int32)
    left_as(history, text, "flushed")
    for end, known in ((length, length % 64), (length - 4, length % 64 - 4)):
        assert history.find_tail("", text[:end]) == (known, Left("flushed", False))
    longer = np.concatenate([text, other[:8]])
    assert history.find_tail("", longer) == (length % 64, Left("flushed", False))
    assert history.find_tail("", np.concatenate([other, text])) == (0, FORGOTTEN)
    assert history.find_tail("tenant", text) == (0, FORGOTTEN)
    # A node below leaves memory before the one above it.
    left_as(history, longer, "failed")
    left_as(history, text, "flushed")
    assert history.find_tail("", longer) == (length % 64 + 8, Left("failed", False))


def test_of_tails_whose_tokens_are_dropped_the_first_page_tells_why_they_left():
    history, text = BlockHistory(4), np.arange(64 + 20, dtype=np.int32)
    left_as(history, text, "erased")
    history.forget_tokens()
    assert not any(tail.tokens is not None for tail in history._tails.values())
    longer = np.concatenate([text, text[:8]])
    for asked, known in ((text, 20), (text[:72], 8), (longer, 20)):
        assert history.find_tail("", asked) == (known, Left("erased", False))
    assert history.find_tail("", np.concatenate([text[:64], text[:8]])) == (0, FORGOTTEN)
    # It was cached once more.
    left_as(history, text[:72], "flushed")
    assert history.find_tail("", text) == (8, Left("flushed", False))


def test_tails_that_are_forgotten_are_known_as_such(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sglang.srt.mem_cache.block_history.NUM_TAILS", 2)
    history = BlockHistory(4)
    for first in range(3):
        left_as(history, np.arange(first, first + 8, dtype=np.int32), "flushed")
    found = [history.find_tail("", np.arange(first, first + 8, dtype=np.int32)) for first in range(4)]
    assert found == [(8, FORGOTTEN), (8, Left("flushed", False)), (8, Left("flushed", False)), (0, FORGOTTEN)]


def test_what_was_never_seen_stays_so_however_much_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    monkeypatch.setattr("sglang.srt.mem_cache.block_history._FILTER_BLOCKS", 128)
    monkeypatch.setattr("sglang.srt.mem_cache.block_history._FILTER_SIZE", 2048)
    rng = np.random.default_rng(seed)
    history = BlockHistory(4, size=16)
    texts = rng.integers(0, 1000, (40, 64 * 20)).astype(np.int32)
    for text in texts:
        left_as(history, text, "flushed")
    # 16 blocks are known, and of the 128 before them that they are forgotten.
    assert [history.find("", text, 0) for text in texts[-7:-1]] == [[FORGOTTEN] * 20] * 6
    new = [left for _ in range(100) for left in history.find("", rng.integers(0, 1000, 64 * 20).astype(np.int32), 0)]
    assert new.count(FORGOTTEN) < 0.06 * len(new)


def test_random_blocks_beside_a_dictionary():
    """The table forgets the oldest; the filter remembers that they were there."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    history = BlockHistory(4, size=50)
    model: dict[bytes, str] = {}
    texts = [rng.integers(0, 1000, 64 * 5).astype(np.int32) for _ in range(30)]
    for text in texts:
        tree = HiRadixTree(4)
        cut = int(rng.integers(1, 80)) * 4
        node = tree.insert_prefix("", None, text, np.arange(80, dtype=np.int32), 0, 0).node
        upper = tree.split(node, cut) if cut < 320 else node
        cause = str(rng.choice(["", "flushed", "failed"]))
        with history.because(cause):
            for each in {id(n): n for n in (upper, node)}.values():
                history.note(each, Tier.HOST)
        for place in range(5):
            model.pop(key := text.tobytes() + bytes([place]), None)
            model[key] = cause or "evicted_host"
    assert len(history) == 50
    kept = dict(list(model.items())[-50:])
    for text in texts:
        found = history.find("", text, 0)
        for place, left in enumerate(found):
            assert left is not None
            assert left.cause == kept.get(text.tobytes() + bytes([place]), "forgotten")
    assert history.find("", rng.integers(2000, 3000, 64 * 5).astype(np.int32), 0) == [None] * 5
    assert history.find("tenant", texts[-1], 0) == [None] * 5
    assert history.find("", texts[-1], 1) == [None] * 5
