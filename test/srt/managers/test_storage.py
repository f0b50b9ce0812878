"""The storage tier under real schedulers, models and threads: what it brings is what was computed, and nobody waits
for what does not come."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.io_struct import PromptKeys
from sglang.srt.managers.schedule_batch import BatchDecision, StepInputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.block_keys import BlockKeys, to_bytes
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.guarded_store import GuardedStore
from sglang.srt.mem_cache.storage.tiered_store import TieredStore
from sglang.srt.mem_cache.transfer import STORE, StorageAction, Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from support.faults import Gate
from support.local_engine import LocalEngine
from support.memory_store import MemoryStore
from support.tiny_model import tiny_llama

PAGE = 4
BLOCK = 16
SETUP = StorageSetup(
    backend="memory",
    setup="",
    secret=b"test",
    block_tokens=BLOCK,
    limits=StorageLimits(blocks_per_op=2, max_fetch_pages=1000, max_store_pages=1000),
    prefetch=PrefetchConfig(policy="wait_complete", threshold=1),
    write_policy="write_through",
)
PARAMS = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True, sampling_seed=0)


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny_llama(tmp_path_factory.mktemp("model"), eos_token_id=2)


def prompt(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 97, n).astype(np.int32)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine(LocalEngine):
    def __init__(self, model_config: ModelConfig, store: MemoryStore | None = None, **options: object) -> None:
        kept = {} if store is None else store.blocks

        def open_store(pool: object) -> MemoryStore:
            fresh = MemoryStore(pool, BLOCK)  # type: ignore[arg-type]
            fresh.blocks = kept
            return fresh

        options = {"storage": SETUP, "num_device_pages": 60, "num_host_pages": 80} | options
        super().__init__(model_config, page_size=PAGE, open_store=open_store, **options)  # type: ignore[arg-type]

    def counter(self, name: str) -> int:
        return self.scheduler.state()["counters"].get(name, 0)

    def assert_nothing_left(self) -> None:
        self.settle()
        self.scheduler.check_invariants()
        for table in self.scheduler.cache.tables.values():
            assert table.counts[FrameState.FREE] + table.counts[FrameState.CACHED] == table.num_pages


def test_a_new_server_finds_what_the_last_one_stored(model_config: ModelConfig) -> None:
    text = prompt(1, 100)
    first = Engine(model_config)
    wanted = first.generate([text], PARAMS)[0]
    assert wanted.cached_tokens_details == {"device": 0, "host": 0, "disk": 0}
    first.assert_nothing_left()
    # 105 tokens have been computed, 6 whole blocks of 16.
    assert len(first.store.blocks) == 6
    first.close()

    second = Engine(model_config, store=first.store)
    got = second.generate([text], PARAMS)[0]
    assert got.tokens == wanted.tokens
    assert got.cached_tokens_details == {"device": 0, "host": 0, "disk": 96}
    assert second.counter("prefetched_tokens") == 96
    again = second.generate([text], PARAMS)[0]
    assert again.tokens == wanted.tokens
    assert again.cached_tokens_details == {"device": 96, "host": 0, "disk": 0}
    second.assert_nothing_left()
    second.close()


def test_a_prompt_is_put_together_from_device_host_disk_and_computation(model_config: ModelConfig) -> None:
    text = prompt(2, 120)
    first = stored(model_config, text)
    engine = Engine(model_config, store=first)
    engine.generate([text[:50]], PARAMS)  # 48 from disk, the rest computed
    engine.settle()
    scheduler = engine.scheduler
    # Leaves first: the answer's 4 whole pages after token 48 are no part of the prompt, then 5 of its own.
    scheduler.cache.controller.evict(Tier.DEVICE, 5)
    match = scheduler.cache.tree.match("", text[:48])
    assert 0 < match.device_len < match.total_len == 48
    got = engine.generate([text], PARAMS)[0]
    assert got.tokens == computed(model_config, text)
    assert got.cached_tokens_details == {"device": match.device_len, "host": 48 - match.device_len, "disk": 64}
    engine.assert_nothing_left()
    engine.close()


def stored(model_config: ModelConfig, *texts: np.ndarray, extra_key: str = "") -> MemoryStore:
    """A store with the blocks of these texts and their answers."""
    engine = Engine(model_config)
    engine.generate(texts, PARAMS, extra_key=extra_key)
    engine.assert_nothing_left()
    engine.close()
    assert engine.store.blocks
    return engine.store


_answers: dict[bytes, list[int]] = {}


def computed(model_config: ModelConfig, text: np.ndarray) -> list[int]:
    """The answer without any cache."""
    if text.tobytes() not in _answers:
        engine = LocalEngine(model_config, 80, page_size=PAGE, enable_radix_cache=False)
        _answers[text.tobytes()] = engine.generate([text], PARAMS)[0].tokens
        engine.close()
    return _answers[text.tobytes()]


@pytest.mark.parametrize("blocks_per_op", [2, 6])
def test_requests_with_the_same_prompt_read_it_once(model_config: ModelConfig, blocks_per_op: int) -> None:
    text = prompt(3, 100)
    limits = dataclasses.replace(SETUP.limits, blocks_per_op=blocks_per_op)
    engine = Engine(model_config, store=stored(model_config, text), storage=dataclasses.replace(SETUP, limits=limits))
    reads: list[bytes] = []
    get = engine.store.get
    engine.store.get = lambda keys, frames: (reads.extend(keys), get(keys, frames))[1]
    answers = engine.generate([text, text, np.concatenate((text[:70], text[:10]))], PARAMS)
    assert [a.tokens for a in answers[:2]] == [computed(model_config, text)] * 2
    assert len(reads) == len(set(reads)) == 6
    # The first one loads what the others then find on the device. With several reads that may be the third, as it
    # needs less of them.
    if blocks_per_op == 6:
        assert answers[0].cached_tokens_details["disk"] == 96
    assert sum(answers[2].cached_tokens_details.values()) >= 64
    engine.assert_nothing_left()
    engine.close()


def test_a_block_that_is_lost_is_computed_and_stored_anew(model_config: ModelConfig) -> None:
    text = prompt(4, 100)
    store = stored(model_config, text)
    lost = to_bytes(BlockKeys(SETUP.secret, BLOCK).of_prompt("", text))[2]
    kept = store.blocks[lost].copy()
    engine = Engine(model_config, store=store)
    exists = engine.store.exists
    # Storage believes that it has the block, and finds out when it reads.
    engine.store.exists = lambda keys: len(keys) if lost in keys else exists(keys)
    del engine.store.blocks[lost]
    got = engine.generate([text], PARAMS)[0]
    assert got.tokens == computed(model_config, text)
    assert got.cached_tokens_details == {"device": 0, "host": 0, "disk": 32}
    engine.assert_nothing_left()
    np.testing.assert_allclose(
        engine.store.blocks[lost].view(np.float32), kept.view(np.float32), atol=1e-5
    )  # computed in a chunk of another shape
    engine.close()


def test_tenants_share_no_block(model_config: ModelConfig) -> None:
    text = prompt(5, 100)
    store = stored(model_config, text, extra_key="tenant a")
    engine = Engine(model_config, store=store)
    for extra_key, disk in (("tenant b", 0), ("", 0), ("tenant a", 96)):
        got = engine.generate([text], PARAMS, extra_key=extra_key)[0]
        assert got.cached_tokens_details["disk"] == disk, extra_key
        assert got.tokens == computed(model_config, text)
    engine.settle()
    assert len(store.blocks) == 3 * 6
    engine.close()


def with_policy(policy: str, **fields: object) -> StorageSetup:
    prefetch = dataclasses.replace(SETUP.prefetch, policy=policy, **fields)  # type: ignore[arg-type]
    return dataclasses.replace(SETUP, prefetch=prefetch)


@pytest.mark.parametrize("method", ["exists", "get"])
def test_best_effort_starts_without_what_has_not_come(model_config: ModelConfig, method: str) -> None:
    text = prompt(6, 100)
    engine = Engine(model_config, store=stored(model_config, text), storage=with_policy("best_effort"))
    gate = Gate(engine.store, method)
    got = engine.generate([text], PARAMS)[0]
    assert got.tokens == computed(model_config, text)
    assert got.cached_tokens_details["disk"] == 0
    gate.open.set()
    engine.assert_nothing_left()
    engine.close()


@pytest.mark.parametrize("method", ["exists", "get"])
def test_a_request_waits_no_longer_than_its_time_for_storage_that_hangs(
    model_config: ModelConfig, method: str
) -> None:
    text = prompt(7, 100)
    setup = with_policy("timeout", timeout_base_s=600.0, timeout_per_ki_token_s=0.0)
    clock = Clock()
    engine = Engine(model_config, store=stored(model_config, text), storage=setup, clock=clock)
    gate = Gate(engine.store, method)
    others_over = 0

    def look(decision: BatchDecision) -> None:
        nonlocal others_over
        assert clock.now > 0 or len(decision.outputs) <= 1, "it did not wait"
        others_over += sum(output.finish_reason is not None for output in decision.outputs)

    def time_is_up() -> None:
        # The other one did not wait with it.
        if others_over == 1 and gate.entered.is_set():
            clock.now = 600.0

    engine.when_idle = time_is_up
    got = engine.generate([text, prompt(8, 12)], PARAMS, after_step=look)
    assert clock.now == 600.0 and len(got[1].tokens) == 6
    assert got[0].tokens == computed(model_config, text)
    assert got[0].cached_tokens_details["disk"] == 0
    assert engine.counter("prefetch_timeouts") == 1
    gate.open.set()
    engine.assert_nothing_left()
    engine.close()


@pytest.mark.parametrize("method", ["exists", "get"])
def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(model_config: ModelConfig, method: str) -> None:
    text = prompt(9, 100)
    engine = Engine(model_config, store=stored(model_config, text))
    gate = Gate(engine.store, method)
    assert engine.generate([text], PARAMS, abort_after={0: 0})[0].finish_reason == "abort"
    gate.open.set()
    engine.assert_nothing_left()
    assert engine.scheduler.cache.tree.resident_pages(Tier.HOST) == 0
    engine.close()


def test_what_is_in_flight_stays_within_its_limits(model_config: ModelConfig) -> None:
    texts = [prompt(20 + i, 90) for i in range(4)]
    limits = StorageLimits(blocks_per_op=1, max_fetch_pages=8, max_store_pages=8)
    setup = dataclasses.replace(SETUP, limits=limits)
    engine = Engine(model_config, storage=setup, num_device_pages=120, num_host_pages=160)
    seen = []
    # Nothing ends before as much is on its way as may be.
    gates = [Gate(engine.store, "set")]

    def look(_: object) -> None:
        storage = engine.scheduler.storage
        seen.append((storage.stores.fetching_pages, storage.stores.near.writer.storing_pages))
        if max(seen[-1]) == 8:
            gates[-1].open.set()

    engine.generate(texts, PARAMS, after_step=look)
    # Answers may be there before the host has what they cached.
    engine.step_until(lambda: look(None) or gates[-1].open.is_set())
    engine.settle()
    assert len(engine.store.blocks) == 4 * 5, "what had to wait was stored later"
    reader = Engine(model_config, store=engine.store, storage=setup, num_device_pages=120, num_host_pages=160)
    engine.close()
    engine = reader
    gates.append(Gate(engine.store, "get"))
    answers = engine.generate(texts, PARAMS, after_step=look)
    assert [a.cached_tokens_details["disk"] for a in answers] == [80] * 4
    assert [max(pages) for pages in zip(*seen)] == [8, 8]
    engine.assert_nothing_left()
    engine.close()


def test_attach_clear_and_detach_at_run_time(model_config: ModelConfig) -> None:
    text = prompt(10, 100)
    engine = Engine(model_config, storage=None)
    assert engine.administer(StorageAction.DETACH) == (False, "no storage backend is attached")
    engine.generate([text], PARAMS)
    engine.settle()
    assert engine.store is None
    assert engine.administer(StorageAction.ATTACH, SETUP) == (True, "")
    success, message = engine.administer(StorageAction.ATTACH, SETUP)
    assert not success and "detach it first" in message
    # The next request backs nothing up, as the host has it all: it is stored when something new is inserted below.
    engine.generate([np.concatenate((text, text[:40]))], PARAMS)
    engine.settle()
    assert len(engine.scheduler.cache.tree.match("", text).path) and len(engine.store.blocks) == 9
    assert engine.administer(StorageAction.CLEAR) == (True, "")
    assert not engine.store.blocks
    engine.generate([np.concatenate((text, text[:80]))], PARAMS)
    engine.settle()
    assert engine.store.blocks
    assert engine.administer(StorageAction.DETACH) == (True, "")
    assert engine.scheduler.state()["storage"] is None
    assert engine.generate([text], PARAMS)[0].tokens == computed(model_config, text)
    engine.assert_nothing_left()
    engine.close()


def test_detaching_lets_go_of_those_who_wait(model_config: ModelConfig) -> None:
    text = prompt(11, 100)
    engine = Engine(model_config, store=stored(model_config, text))
    gate = Gate(engine.store, "get")

    def detach_once_it_reads() -> None:
        gate.entered.wait(60)
        gate.open.set()

    threading.Thread(target=detach_once_it_reads).start()
    asked = False

    def ask(_: object) -> None:
        nonlocal asked
        if gate.entered.is_set() and not asked:
            asked = True
            engine.begin_to_administer(StorageAction.DETACH)

    got = engine.generate([text, prompt(12, 30)], PARAMS, after_step=ask)
    assert asked
    assert got[0].tokens == computed(model_config, text)
    engine.assert_nothing_left()
    engine.close()


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_what_reaches_the_host_later_is_stored_later(model_config: ModelConfig, policy: str) -> None:
    text = prompt(13, 100)
    setup = dataclasses.replace(SETUP, write_policy=policy)
    engine = Engine(model_config, storage=setup, write_policy=policy)
    engine.generate([text], PARAMS)
    engine.settle()
    assert not engine.store.blocks
    if policy == "write_back":
        engine.generate([prompt(14, 200)], PARAMS)  # takes the device
    else:
        engine.generate([text], PARAMS)
    engine.settle()
    assert engine.store.blocks
    engine.assert_nothing_left()
    engine.close()


@pytest.mark.parametrize(("policy", "all_of_it"), [("auto", False), ("write_through", True)])
def test_slow_storage_gets_everything_if_it_is_written_through(
    model_config: ModelConfig, policy: str, all_of_it: bool
) -> None:
    setup = dataclasses.replace(SETUP, write_policy=policy)
    engine = Engine(model_config, num_device_pages=200, num_host_pages=200, storage=setup)
    engine.scheduler.storage.stores.near.writer.is_worth_storing = lambda start, end: False
    for seed in (11, 12):
        engine.generate([prompt(seed, 100)], PARAMS)
        engine.assert_nothing_left()
    assert engine.store.blocks and (len(engine.store.blocks) == 12) == all_of_it
    engine.close()


def test_trials_of_slow_storage_hold_memory_a_fifth_of_the_time(model_config: ModelConfig) -> None:
    """A block takes two seconds: the next one waits for eight."""
    setup = dataclasses.replace(SETUP, write_policy="auto")
    clock = Clock()
    engine = Engine(model_config, num_device_pages=900, num_host_pages=900, storage=setup, clock=clock)
    writer = engine.scheduler.cache.storage.stores.near.writer
    writer.is_worth_storing = lambda start, end: False
    gate = Gate(engine.store, "set")
    engine.generate([prompt(0, 100)], PARAMS)
    engine.step_until(gate.entered.is_set)
    clock.now = 2.0
    gate.open.set()
    engine.settle()
    num_stored = {}
    for seed, clock.now in enumerate((2.1, 5.0, 9.9, 10.1), 1):
        engine.generate([prompt(seed, 100)], PARAMS)
        engine.settle()
        num_stored[clock.now] = len(engine.store.blocks)
    # Those that end at once make no later one wait.
    assert num_stored.pop(10.1) > 1 and set(num_stored.values()) == {1}, num_stored
    engine.assert_nothing_left()
    engine.close()


def test_a_store_that_hangs_does_not_stop_requests_that_need_memory(model_config: ModelConfig) -> None:
    """What is being stored gives the device nothing back: somebody has to be retracted all the same."""
    params = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True, sampling_seed=0)
    texts = [prompt(40 + i, 40) for i in range(3)]
    # All are admitted at once, whenever storage answers.
    setup = with_policy("best_effort")
    engine = Engine(model_config, storage=setup, num_device_pages=34, new_token_ratio=0.0)
    gate = Gate(engine.store, "set")
    answers = engine.generate(texts, params)
    engine.step_until(gate.entered.is_set)
    assert engine.counter("retracted_reqs") > 0
    assert [len(a.tokens) for a in answers] == [60] * 3
    gate.open.set()
    engine.assert_nothing_left()
    engine.close()


def test_a_store_that_hangs_does_not_stop_a_request_that_streams(model_config: ModelConfig) -> None:
    """Nor those that wait for its pages. What is being stored keeps its pages on the host, here 8 of them at most."""
    texts = [prompt(5, 230), *(prompt(40 + i, 40) for i in range(6))]
    limits = StorageLimits(blocks_per_op=1, max_fetch_pages=1000, max_store_pages=2 * BLOCK // PAGE)
    setup = dataclasses.replace(with_policy("best_effort"), write_policy="write_back", limits=limits)
    clock = Clock()
    options = {"num_host_pages": 60, "layer_stream": LayerStreamConfig(2, 8), "chunked_prefill_size": 16}
    engine = Engine(model_config, storage=setup, num_device_pages=32, new_token_ratio=0.0, clock=clock, **options)
    gate = Gate(engine.store, "set")

    def time_goes_by() -> None:
        """Only where all wait for the store: a launch or a copy may take many turns."""
        scheduler = engine.scheduler
        if gate.entered.is_set() and not scheduler.clock.is_running:
            is_copying = any(scheduler.cache.ledger.oldest(link) for link in engine.core.links if link != STORE)
            clock.now += 0.0 if is_copying else 1.0

    engine.when_idle = time_goes_by
    engine.generate([prompt(60 + i, 60) for i in range(4)], PARAMS)
    try:
        for text, answer in zip(texts, engine.generate(texts, PARAMS)):
            assert answer.tokens == computed(model_config, text)
    finally:
        gate.open.set()
    assert gate.entered.is_set() and engine.counter("streamed_reqs") == 1
    engine.assert_nothing_left()
    engine.close()


def test_a_question_that_hangs_does_not_hold_up_the_next_for_ever(model_config: ModelConfig) -> None:
    """Those who gave up are not asked for any more: the next one's answer comes as soon as the medium is back."""
    texts = [prompt(50 + i, 100) for i in range(4)]
    setup = with_policy("timeout", timeout_base_s=600.0, timeout_per_ki_token_s=0.0)
    clock = Clock()
    engine = Engine(model_config, store=stored(model_config, *texts), storage=setup, clock=clock)
    asked: list[bytes] = []
    exists = engine.store.exists
    engine.store.exists = lambda keys: (asked.append(keys[0]), exists(keys))[1]  # type: ignore[method-assign]
    gate = Gate(engine.store, "exists")

    def time_is_up() -> None:
        if gate.entered.is_set():
            clock.now = 600.0

    engine.when_idle = time_is_up
    assert [a.cached_tokens_details["disk"] for a in engine.generate(texts[:3], PARAMS)] == [0, 0, 0]
    gate.open.set()
    engine.settle()
    assert len(asked) == 1, "two had given up before they were asked for"
    engine.assert_nothing_left()
    engine.close()


def test_a_failed_load_of_what_was_just_fetched_is_computed(model_config: ModelConfig) -> None:
    text = prompt(60, 100)
    engine = Engine(model_config, store=stored(model_config, text), load_fail_rate=1.0)
    got = engine.generate([text], PARAMS)[0]
    assert got.tokens == computed(model_config, text)
    assert engine.counter("load_back_tokens") == 96, "once: it is not tried again"
    assert got.cached_tokens_details["disk"] == 0
    engine.assert_nothing_left()
    engine.close()


def test_a_flush_leaves_what_is_being_read_and_written_alone(model_config: ModelConfig) -> None:
    text = prompt(61, 100)
    engine = Engine(model_config, store=stored(model_config, text, prompt(62, 40)))
    gates = [Gate(engine.store, method) for method in ("get", "set")]
    engine.generate([prompt(63, 40)], PARAMS)  # is being written
    assert engine.generate([text], PARAMS, abort_after={0: 0})[0].finish_reason == "abort"
    decision = engine.core.step(engine.clock(), engine.core.progress(), flush=["f"])
    assert [r.success for r in decision.replies] == [True]
    assert engine.scheduler.cache.tree.num_nodes == 0
    engine.scheduler.check_invariants()
    for gate in gates:
        gate.open.set()
    engine.assert_nothing_left()
    host = engine.scheduler.cache.host
    assert host is not None and host.num_free == host.num_pages
    assert engine.generate([text], PARAMS)[0].cached_tokens_details["disk"] == 96
    engine.close()


# -- nothing but storage ----------------------------------------------------------------------------------------


def test_bypassing_the_local_tiers_everything_comes_from_storage(model_config: ModelConfig) -> None:
    text, other = prompt(30, 100), prompt(31, 100)
    store = stored(model_config, text, extra_key="tenant")
    wanted = computed(model_config, text)
    # Room for every round, even where the backups of the one before are still on their way.
    engine = Engine(model_config, store=store, bypass_local=True, num_host_pages=240)
    known = len(store.blocks)
    for _ in range(3):
        twins = engine.generate([text, text], PARAMS, extra_key="tenant")
        for got in twins:
            assert got.tokens == wanted
            assert got.cached_tokens_details == {"device": 0, "host": 0, "disk": 96}
    assert engine.counter("prefetched_tokens") == 6 * 96, "no fetch is shared"
    assert engine.generate([text], PARAMS, extra_key="stranger")[0].cached_tokens_details["disk"] == 0
    engine.settle()
    # The stranger's are new; what the others computed again was there.
    assert len(store.blocks) == 2 * known
    assert engine.generate([other], PARAMS, extra_key="stranger")[0].tokens == computed(model_config, other)
    engine.assert_nothing_left()
    engine.close()


def test_bypassing_the_local_tiers_a_retracted_request_finds_its_own_work(model_config: ModelConfig) -> None:
    texts = [prompt(40 + i, 60) for i in range(6)]
    params = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True, sampling_seed=0)
    plain = Engine(model_config, num_device_pages=400)
    wanted = [g.tokens for g in plain.generate(texts, params)]
    plain.close()
    engine = Engine(model_config, bypass_local=True, num_device_pages=60, new_token_ratio=0.0)
    got = engine.generate(texts, params)
    assert [g.tokens for g in got] == wanted
    assert engine.counter("retracted_reqs") > 0
    assert engine.counter("prefill_tokens") < 60 * (6 + engine.counter("retracted_reqs")), "nothing was found again"
    engine.assert_nothing_left()
    engine.close()


def test_a_step_hashes_no_prompt_whose_keys_came_with_it(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prompt(31, 100)
    engine = Engine(model_config)
    make, in_step = BlockKeys.chain, []
    monkeypatch.setattr(Scheduler, "step", _noting(Scheduler.step, in_step))

    def chain(names: BlockKeys, last: bytes, tokens: np.ndarray) -> np.ndarray:
        assert not in_step or len(tokens) < BLOCK, f"{len(tokens)} tokens are hashed inside a step"
        return make(names, last, tokens)

    monkeypatch.setattr(BlockKeys, "chain", chain)
    engine.generate([text], PARAMS)
    engine.assert_nothing_left()
    assert engine.store.blocks.keys() == set(to_bytes(BlockKeys(b"test", BLOCK).of_prompt("", text)))
    engine.close()


def _noting(step: Callable[..., BatchDecision], steps: list[int]) -> Callable[..., BatchDecision]:
    def noted(scheduler: Scheduler, inputs: StepInputs) -> BatchDecision:
        steps.append(inputs.step)
        try:
            return step(scheduler, inputs)
        finally:
            steps.pop()

    return noted


def test_keys_of_another_storage_are_not_used(model_config: ModelConfig) -> None:
    text = prompt(32, 100)
    engine = Engine(model_config)
    keys = PromptKeys.make(BlockKeys(b"another", BLOCK), "", text)
    names = engine.scheduler.cache.tree.names.keys
    assert names is not None
    assert not len(keys.of_naming(names)) and not len(keys.of_naming(BlockKeys(b"another", 2 * BLOCK)))
    assert np.array_equal(PromptKeys.make(names, "", text).of_naming(names), names.of_prompt("", text))
    engine.close()


def test_storage_that_was_slow_is_measured_again_and_used_again(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [prompt(60 + i, 100) for i in range(8)]
    clock = Clock()
    setup = with_policy("timeout", timeout_base_s=600.0)
    engine = Engine(model_config, stored(model_config, *texts), storage=setup, clock=clock, load_or_recompute=True)
    costs = engine.scheduler.planner.expected.costs
    for _ in range(5):
        costs.add_prefill(100, 0, 5050.0, 0.1)
        costs.stores[0].add_fetch(6 * BLOCK * 1024, 50.0)
    # From now on it is fast, and launches take as long as before, on a busy machine too.
    monkeypatch.setattr(costs, "add_prefill", lambda *work: None)
    add_fetch = costs.stores[0].add_fetch
    monkeypatch.setattr(costs.stores[0], "add_fetch", lambda num_bytes, _: add_fetch(num_bytes, 0.001))
    hits = []
    for text in texts:
        got = engine.generate([text], PARAMS)[0]
        assert got.tokens == computed(model_config, text)
        hits.append(got.cached_tokens_details["disk"])
        engine.settle()
        # Reads that show that it is fast are begun this often at first, and later more seldom.
        clock.now += 4.0
    assert hits[0] == 0 and hits[-1] == 96, hits
    engine.assert_nothing_left()
    engine.close()


def test_no_fetch_waits_for_what_a_hung_write_holds(model_config: ModelConfig) -> None:
    text = prompt(70, 100)
    clock = Clock()
    setup = with_policy("timeout", timeout_base_s=600.0)
    # The host has room for one prompt and its answer, and a few pages.
    engine = Engine(model_config, stored(model_config, text), storage=setup, clock=clock, num_host_pages=36)
    gate = Gate(engine.store, "set")
    engine.generate([prompt(71, 100)], PARAMS)
    assert gate.entered.wait(60)

    def pass_time() -> None:
        # Only where all else has ended.
        in_flight = {ticket.link for ticket in engine.scheduler.cache.in_flight}
        if in_flight == {"store"} and not engine.scheduler.clock.is_running:
            clock.now += 0.125

    engine.when_idle = pass_time
    got = engine.generate([text], PARAMS)[0]
    assert got.tokens == computed(model_config, text)
    assert got.cached_tokens_details["disk"] > 0 and clock.now < 2.0, "their breaker opens after five seconds"
    gate.open.set()
    engine.assert_nothing_left()
    engine.close()


class StoppedProxy(MemoryStore):
    """It stops while a read is under way, and answers that, and any question, only when it goes on."""

    goes_on = threading.Event()
    ends: list[Callable[[int], None]]
    is_stopped = False

    def exists(self, keys: Sequence[bytes]) -> int:
        if self.is_stopped:
            self.goes_on.wait()
        return super().exists(keys)

    def start_get(
        self, keys: Sequence[bytes], frames: np.ndarray, on_end: Callable[[int], None]
    ) -> Callable[[], None]:
        self.is_stopped = True
        self.ends.append(on_end)
        return lambda: None


def test_the_disk_goes_on_while_a_read_of_the_far_store_hangs(model_config: ModelConfig) -> None:
    far_text, near_texts = prompt(1, 10 * BLOCK), [prompt(10 + i, 10 * BLOCK) for i in range(3)]
    stores: list[StoppedProxy] = []

    def open_store(pool: MHATokenToKVPoolHost) -> TieredStore:
        near, far = MemoryStore(pool, BLOCK), StoppedProxy(pool, BLOCK)
        near.blocks = {key: kv for text in near_texts for key, kv in stored(model_config, text).blocks.items()}
        far.blocks, far.ends = dict(stored(model_config, far_text).blocks), []
        stores.append(far)
        return TieredStore(near, GuardedStore(far, limit_s=0.05))

    patience = PrefetchConfig(policy="timeout", threshold=1, timeout_base_s=0.2)
    setup = dataclasses.replace(SETUP, tiers=(Tier.DISK, Tier.REMOTE), prefetch=patience)
    engine = LocalEngine(
        model_config, open_store=open_store, storage=setup, num_host_pages=400, page_size=PAGE, num_device_pages=200
    )
    try:
        for text in (far_text, *near_texts):
            assert engine.generate([text], PARAMS)[0].tokens == computed(model_config, text)
        storage, counters = engine.scheduler.storage, engine.scheduler.state()["counters"]
        assert storage.stores.far.reads.hangs and not storage.stores.near.reads.is_open
        assert counters["hit_tokens_disk"] == sum(len(text) // BLOCK * BLOCK - BLOCK for text in near_texts)
    finally:
        (far,) = stores
        far.goes_on.set()
        for end in far.ends:
            end(0)
        engine.close()
