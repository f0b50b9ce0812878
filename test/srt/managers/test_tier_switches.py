"""Tiers whose reads or writes an administrator turns off and on while the server runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_storage import PARAMS, Engine, computed, prompt, stored

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.storage.tiered_store import FallbackReads, TieredStore
from sglang.srt.mem_cache.transfer import Tier
from support.faults import Gate
from support.memory_store import MemoryStore
from support.tiny_model import tiny_llama

NOTHING = {"device": 0, "host": 0, "disk": 0}


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny_llama(tmp_path_factory.mktemp("model"), eos_token_id=2)


def ask(engine: Engine, text: np.ndarray) -> dict[str, int]:
    """Where tokens of the prompt were found, by an answer that is right."""
    (answer,) = engine.generate([text], PARAMS)
    assert answer.tokens == computed(engine.model_config, text)
    engine.assert_nothing_left()
    return answer.cached_tokens_details


def test_reads_of_the_disk(model_config: ModelConfig):
    text = prompt(1, 100)
    engine = Engine(model_config, store=stored(model_config, text))
    assert engine.switch("disk", reads=False) == ""
    assert ask(engine, text) == NOTHING and engine.counter("storage_probes") == 0
    assert engine.scheduler.state()["switches"]["disk"] == {"reads": False, "writes": True}
    engine.forget()
    engine.switch("disk", reads=True)
    assert ask(engine, text) == NOTHING | {"disk": 96}
    engine.close()


def test_writes_of_the_disk(model_config: ModelConfig):
    text = prompt(2, 100)
    engine = Engine(model_config)
    engine.switch("disk", writes=False)
    ask(engine, text)
    assert not engine.store.blocks
    engine.switch("disk", writes=True)
    ask(engine, text)
    ask(engine, prompt(3, 20))
    assert len(engine.store.blocks) >= 6, "what memory has is stored when it is used"
    engine.close()


def test_reads_of_the_host(model_config: ModelConfig):
    text = prompt(4, 100)
    engine = Engine(model_config, storage=None)
    ask(engine, text)
    engine.scheduler.cache.controller.evict(Tier.DEVICE, 60)
    engine.settle()
    engine.switch("host", reads=False)
    # The host keeps what it has, and the device gets its own copy.
    assert ask(engine, text) == {"device": 0, "host": 0}
    assert ask(engine, text) == {"device": 96, "host": 0}
    engine.scheduler.cache.controller.evict(Tier.DEVICE, 60)
    engine.settle()
    engine.switch("host", reads=True)
    assert ask(engine, text) == {"device": 0, "host": 96}
    engine.close()


def test_writes_of_the_host(model_config: ModelConfig):
    texts = [prompt(seed, 100) for seed in range(5, 9)]
    engine = Engine(model_config)
    engine.switch("host", writes=False)
    for text in texts:
        ask(engine, text)
    host = engine.scheduler.cache.tables[Tier.HOST]
    assert host.counts[FrameState.FREE] == host.num_pages and not engine.store.blocks
    assert engine.counter("storage_probes") == 0, "what storage reads goes through the host"
    assert ask(engine, texts[-1])["device"] > 0
    engine.switch("host", writes=True)
    ask(engine, prompt(9, 100))
    assert host.counts[FrameState.CACHED] > 0
    engine.close()


def test_the_device_serves_and_keeps_nothing(model_config: ModelConfig):
    text, other = prompt(10, 100), prompt(11, 100)
    engine = Engine(model_config)
    ask(engine, text)
    engine.switch("device", reads=False)
    assert ask(engine, text) == NOTHING
    engine.switch("device", reads=True, writes=False)
    assert ask(engine, text)["device"] == 96
    assert ask(engine, other) == NOTHING and ask(engine, other) == NOTHING
    engine.switch("device", writes=True)
    assert ask(engine, other) == NOTHING and ask(engine, other)["device"] == 96
    engine.close()


def test_no_request_waits_for_what_is_turned_off(model_config: ModelConfig):
    text = prompt(12, 100)
    engine = Engine(model_config, store=stored(model_config, text))
    gate = Gate(engine.store, "get")
    turned: list[str] = []

    def when_idle() -> None:
        if gate.entered.is_set() and not turned:
            turned.append(engine.switch("disk", reads=False))

    engine.when_idle = when_idle
    (answer,) = engine.generate([text], PARAMS)
    assert turned == [""] and answer.tokens == computed(model_config, text)
    assert answer.cached_tokens_details == NOTHING
    gate.open.set()
    engine.assert_nothing_left()
    engine.close()


def test_switches_stay_when_other_storage_is_attached(model_config: ModelConfig):
    engine = Engine(model_config)
    engine.switch("disk", reads=False, writes=False)
    engine.scheduler.storage.attach_storage(engine.scheduler.storage.setup)
    assert engine.scheduler.storage.is_unread and engine.scheduler.storage.stores.near.writer.is_off
    engine.close()


def test_a_tier_that_is_off_is_turned_on_while_it_is_detached(model_config: ModelConfig):
    engine = Engine(model_config)
    cache, setup = engine.scheduler.cache, engine.scheduler.storage.setup
    engine.switch("disk", reads=False)
    cache.storage.close()
    cache.storage.detach_storage()
    assert cache.shown_switches() == "no reads of disk"
    assert engine.scheduler.state()["switches"]["disk"] == {"reads": False, "writes": True}
    assert engine.switch("disk", reads=True) == "" and cache.shown_switches() == "all reads and writes are on"
    assert "disk" not in engine.scheduler.state()["switches"]
    assert engine.switch("disk", reads=False) == "this server has no tier 'disk'; it has device, host"
    cache.storage.attach_storage(setup)
    assert not cache.storage.is_unread
    engine.close()


def test_a_tier_that_is_not_there(model_config: ModelConfig):
    engine = Engine(model_config, storage=None)
    assert engine.switch("disk", reads=False) == "this server has no tier 'disk'; it has device, host"
    assert engine.scheduler.state()["switches"].keys() == {"device", "host"}
    engine.close()


def test_one_of_two_stores_is_left_out():
    pool = MHATokenToKVPoolHost(MHATokenToKVPool(4, PageLayout.kv(4, 2, 1, 8, torch.float32)), 8)
    near, far = MemoryStore(pool, 4), MemoryStore(pool, 4)
    both = TieredStore(near, far)
    keys, frames = [b"a" * 16, b"b" * 16], np.arange(2, dtype=np.int32)
    assert both.only((0,)) is far and both.only((1,)) is near
    far.set(keys, frames)
    assert both.locate(keys) == (0, 2, 2) and both.locate(keys, (1,)) == (0, 0, 0)
    near.set(keys[:1], frames[:1])
    assert both.locate(keys) == (1, 1, 2) and both.locate(keys, (0,)) == (0, 2, 2)
    far.clear()
    far.set(keys[:1], frames[:1])
    near.set(keys, frames)
    assert far.get(keys, frames) == 1 and FallbackReads(both).get(keys, frames) == 2
