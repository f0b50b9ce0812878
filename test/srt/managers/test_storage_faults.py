"""Faults of storage under a whole engine: real segment files and plugins, damaged, full, slow, lying or hanging.

Whatever happens, requests end with the tokens that transformers computes, a fault is counted and said once, what was
bad is stored anew, and nothing is left over.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import BatchDecision, StorageRequest
from sglang.srt.managers.startup.storage import StorageOpener
from sglang.srt.managers.storage_breaker import TRIAL_PAUSE_S
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.block_store import BlockStore, StoreError
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.dynamic.dynamic_store import PluginStore
from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile
from sglang.srt.mem_cache.storage.file.segment import ALIGNMENT, ENTRY_BYTES
from sglang.srt.mem_cache.storage.file.segment_writer import WRITE_PAUSE_S
from sglang.srt.mem_cache.storage.registry import StoreParams
from sglang.srt.mem_cache.transfer import PROBE, StorageAction, Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.clock import monotonic
from sglang.srt.utils.time_units import Seconds
from support.children import child_environment
from support.disk_fixture import flip, swap
from support.faults import Gate
from support.kv_oracle import check_kv
from support.local_engine import Generation, LocalEngine

MARGIN = 1e-4
KV_TOLERANCE = 1e-4
VOCAB = 97
PAGE = 4
BLOCK = 16
# 2 layers, 2 heads of 8, float32: a block fills a slot, so that writes go past the page cache where they can.
SLOT_BYTES = BLOCK * 256
DATA = 2 * ALIGNMENT
# Four blocks to a segment, so that six lie in two.
SEGMENT_BYTES = DATA + 4 * (SLOT_BYTES + ENTRY_BYTES)
OPTIONS = FileStoreOptions(segment_bytes=SEGMENT_BYTES)
NUM_TOKENS = 100
ALL = NUM_TOKENS // BLOCK * BLOCK
SETUP = StorageSetup(
    backend="file",
    setup="",
    secret=b"test",
    block_tokens=BLOCK,
    limits=StorageLimits(blocks_per_op=2, max_fetch_pages=1000, max_store_pages=1000),
    prefetch=PrefetchConfig(policy="wait_complete", threshold=1),
    write_policy="write_through",
)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}
OpenStore = Callable[[MHATokenToKVPoolHost], BlockStore]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True, sampling_seed=0)


PARAMS = greedy(3)


class Model:
    """As transformers and as ours see it."""

    def __init__(self, path: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.hf = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval()
        self.hf.save_pretrained(path)
        self.path = path
        self.config = ModelConfig.from_pretrained(str(path), dtype="float32")

    def check(self, prompt: np.ndarray, answer: Generation, num_tokens: int = 3) -> None:
        """A token is right if it is the best, or as good as that: batches of other shapes differ in the last bits."""
        assert answer.finish_reason == "length" and len(answer.tokens) == num_tokens
        self.check_tokens(prompt, answer.tokens)

    def check_tokens(self, prompt: np.ndarray, tokens: list[int]) -> None:
        whole = torch.tensor(np.concatenate((prompt, np.array(tokens, np.int32))))[None].long()
        with torch.inference_mode():
            logits = self.hf(whole).logits[0, len(prompt) - 1 : -1]
        gap = logits.max(-1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)]
        assert not len(tokens) or gap.max() < MARGIN, f"token {int(gap.argmax())} is {float(gap.max())} off"

    def reference_kv(self, tokens: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            cache = self.hf(torch.tensor(tokens)[None].long(), use_cache=True).past_key_values
        layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
        # (layers, 2, heads, tokens, dim) -> (tokens, 2, layers, heads, dim)
        return torch.stack(layers).permute(3, 1, 0, 2, 4).double().numpy()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("other model"), seed=4)


def prompt(seed: int, n: int = NUM_TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, n).astype(np.int32)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine(LocalEngine):
    def __init__(self, config: ModelConfig, open_store: OpenStore, **options: Any) -> None:
        options = {
            "storage": SETUP,
            "num_device_pages": 60,
            "num_host_pages": 80,
            "page_size": PAGE,
            "clock": lambda: Seconds(monotonic() + self.skipped_s),
        } | options
        # What is left alone because it failed is tried again after a pause.
        self.skipped_s = 0.0
        super().__init__(config, open_store=open_store, **options)

    def counter(self, name: str) -> int:
        return self.scheduler.state()["counters"].get(name, 0)

    def ask(self, text: np.ndarray, **options: Any) -> Generation:
        return self.generate([text], PARAMS, **options)[0]

    def assert_nothing_left(self) -> None:
        self.settle()
        scheduler = self.scheduler
        scheduler.check_invariants()
        for table in scheduler.cache.tables.values():
            assert table.counts[FrameState.FREE] + table.counts[FrameState.CACHED] == table.num_pages
        assert not scheduler.cache.in_flight and scheduler.num_reqs == 0
        prefetcher = scheduler.storage
        assert not (prefetcher._prefetches or prefetcher._waiters or prefetcher._unfinished)
        assert prefetcher.next_deadline is None

    def end(self) -> None:
        """Of a test, or of a server's life: all that a clean stop does."""
        self.assert_nothing_left()
        self.close()
        if self.store is not None:
            self.store.close()


class Files:
    """A root folder, and the engines that are opened over it, one at a time."""

    def __init__(self, model: Model, root: Path) -> None:
        self.model = model
        self.root = root
        self.clock = Clock()

    def open_store(self, pool: MHATokenToKVPoolHost) -> HiCacheFile:
        return HiCacheFile(self.root, "model", pool, BLOCK, OPTIONS, self.clock)

    def engine(self, **options: Any) -> Engine:
        return Engine(self.model.config, self.open_store, **options)

    def fill(self, *texts: np.ndarray, **options: Any) -> None:
        """An engine's life, after which these are on disk."""
        engine = self.engine(**options)
        for text in texts:
            engine.ask(text)
            engine.settle()
        engine.end()

    @property
    def folder(self) -> Path:
        (folder,) = [p for p in self.root.iterdir() if p.is_dir()]
        return folder

    def segments(self) -> list[Path]:
        return sorted(self.folder.glob("*.kv"))


@pytest.fixture
def files(model: Model, tmp_path: Path) -> Files:
    return Files(model, tmp_path / "root")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What we said about faults."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("sglang")]


def until_all_comes_from_disk(engine: Engine, model: Model, text: np.ndarray, turns: int = 12) -> None:
    """What is bad is found when it is read, an operation's first block first; then it is replaced. After failures in
    a row only one block is tried at a time."""
    for _ in range(turns):
        engine.skipped_s += TRIAL_PAUSE_S
        engine.forget()
        answer = engine.ask(text)
        model.check(text, answer)
        engine.settle()
        if answer.cached_tokens_details["disk"] == len(text) // BLOCK * BLOCK:
            return
    pytest.fail(f"after {turns} turns {answer.cached_tokens_details}, {engine.store.stats()}")


# -- on disk ------------------------------------------------------------------------------------------------------


def put_another_models_segment(path: Path) -> None:
    """Of a store with the same keys in the same slots, and other bytes under them."""
    foreign = path.parent.parent.parent / "foreign"
    shutil.copyfile(next(foreign.glob("*/00000001.kv")), path)


# What is done to the first segment -> how much of a prompt comes from disk while the server runs, and after a start.
DAMAGE: dict[str, tuple[Callable[[Path], object], int, int]] = {
    "cut short": (lambda p: os.truncate(p, DATA + SLOT_BYTES + 100), BLOCK, BLOCK),
    "cut inside the table": (lambda p: os.truncate(p, ALIGNMENT + ENTRY_BYTES + 10), 0, 0),
    "bit of a payload": (lambda p: flip(p, DATA + SLOT_BYTES + 777), BLOCK, BLOCK),
    "bit of an entry": (lambda p: flip(p, ALIGNMENT + ENTRY_BYTES + 30), ALL, BLOCK),
    "bit of the header": (lambda p: flip(p, 20), ALL, 0),
    "foreign version": (lambda p: flip(p, 8), ALL, 0),
    "another model's segment": (put_another_models_segment, 0, 0),
    "deleted": (Path.unlink, 0, 0),
    "swapped payloads": (lambda p: swap(p, DATA + SLOT_BYTES, DATA + 2 * SLOT_BYTES, SLOT_BYTES), BLOCK, BLOCK),
    "swapped entries": (
        lambda p: swap(p, ALIGNMENT + ENTRY_BYTES, ALIGNMENT + 2 * ENTRY_BYTES, ENTRY_BYTES),
        ALL,
        BLOCK,
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("when", ["while it runs", "between two starts"])
@pytest.mark.parametrize("what", DAMAGE)
def test_damage_on_disk(
    files: Files,
    model: Model,
    other_model: Model,
    tmp_path: Path,
    what: str,
    when: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = prompt(1)
    if what == "another model's segment":
        foreign = Engine(
            other_model.config,
            lambda pool: HiCacheFile(tmp_path / "foreign", "another", pool, BLOCK, OPTIONS),
        )
        foreign.ask(text)
        foreign.end()
    damage, found_running, found_started = DAMAGE[what]
    files.fill(text)
    engine = files.engine()
    if when == "while it runs":
        damage(files.segments()[0])
        found = found_running
    else:
        engine.end()
        damage(files.segments()[0])
        engine = files.engine()
        found = found_started
    answer = engine.ask(text)
    model.check(text, answer)
    assert answer.cached_tokens_details == {"device": 0, "host": 0, "disk": found}
    engine.settle()
    until_all_comes_from_disk(engine, model, text)
    # Another process may have deleted the file, to make room.
    if found < ALL and what != "deleted":
        assert engine.store.stats()["read_errors"] > 0
    assert engine.store.stats()["write_errors"] == 0
    assert len(lines(caplog)) <= 1
    engine.store.check_invariants()
    engine.end()
    if when == "while it runs":
        again = files.engine()
        until_all_comes_from_disk(again, model, text)
        again.end()


def test_the_whole_folder_disappears_under_a_running_server(
    files: Files, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = prompt(1), prompt(2)
    engine = files.engine()
    engine.ask(first)
    engine.forget()
    shutil.rmtree(files.root)
    for text, found in ((first, 0), (second, 0), (first, ALL)):
        answer = engine.ask(text)
        model.check(text, answer)
        assert answer.cached_tokens_details["disk"] == found, "the folder was made anew"
        engine.forget()
    stats = engine.store.stats()
    assert stats["read_errors"] == stats["write_errors"] == 0
    assert len(lines(caplog)) == 1
    engine.end()
    again = files.engine()
    until_all_comes_from_disk(again, model, first)
    again.end()


# -- writing ------------------------------------------------------------------------------------------------------


class Failing:
    """os.`name` fails from call number `first` on, `times` times. only: arguments for which it does."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        error: int,
        first: int = 0,
        times: int = 1_000_000,
        only: Callable[..., bool] = lambda *args: True,
    ) -> None:
        self.mended = False
        self.calls = self.failed = 0
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.mended or not only(*args):
                return real(*args, **kwargs)
            self.calls += 1
            if first < self.calls <= first + times:
                self.failed += 1
                raise OSError(error, os.strerror(error))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)


def is_write_of_segment(path: Any, flags: int, *rest: Any) -> bool:
    return str(path).endswith(".kv") and bool(flags & (os.O_WRONLY | os.O_RDWR))


WRITE_FAULTS: dict[str, dict[str, Any]] = {
    **{f"full at write {n}": {"name": "pwritev", "error": errno.ENOSPC, "first": n} for n in (0, 1, 3)},
    "I/O error at once": {"name": "pwritev", "error": errno.EIO},
    "I/O error at write 2": {"name": "pwritev", "error": errno.EIO, "first": 2},
    "I/O error once": {"name": "pwritev", "error": errno.EIO, "first": 1, "times": 1},
    "read-only": {"name": "open", "error": errno.EROFS, "only": is_write_of_segment},
    "turns read-only": {"name": "open", "error": errno.EROFS, "only": is_write_of_segment, "first": 3},
    "no file system left": {"name": "statvfs", "error": errno.EIO},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", WRITE_FAULTS)
def test_storing_fails(
    files: Files, model: Model, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text, other = prompt(3), prompt(4)
    fault = Failing(monkeypatch, **WRITE_FAULTS[what])
    engine = files.engine()
    for each in (text, other, text):
        model.check(each, engine.ask(each))
        engine.settle()
    assert fault.failed > 0
    assert engine.store.stats()["write_errors"] >= 1
    assert engine.counter("storage_backup_failed_tokens") > 0
    assert fault.failed <= 8, "a medium that takes nothing is asked once per pause"
    assert len(lines(caplog)) <= 1
    engine.store.check_invariants()
    fault.mended = True
    files.clock.now += WRITE_PAUSE_S
    for each in (text, other):
        until_all_comes_from_disk(engine, model, each)
    assert engine.store.stats()["read_errors"] == 0
    engine.end()
    again = files.engine()
    answer = again.ask(text)
    model.check(text, answer)
    assert answer.cached_tokens_details["disk"] == ALL
    assert again.store.stats()["read_errors"] == 0, "what failed halfway left nothing behind"
    again.end()


# -- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 2])
def test_reading_fails(
    files: Files, model: Model, first: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = prompt(5)
    files.fill(text)
    engine = files.engine()
    fault = Failing(monkeypatch, "preadv", errno.EIO, first)
    for _ in range(3):
        answer = engine.ask(text)
        model.check(text, answer)
        assert answer.cached_tokens_details["disk"] < ALL
        engine.forget()
    assert fault.failed > 0 and engine.store.stats()["read_errors"] > 0
    assert len(lines(caplog)) == 1
    fault.mended = True
    until_all_comes_from_disk(engine, model, text)
    engine.end()


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_slow_reads(files: Files, model: Model, policy: str) -> None:
    """Of three operations with two blocks each, as many come as are permitted."""
    text, other = prompt(6), prompt(7, 12)
    files.fill(text)
    prefetch = PrefetchConfig(policy, threshold=1, timeout_base_s=600.0, timeout_per_ki_token_s=0.0)
    clock = Clock()
    engine = files.engine(storage=dataclasses.replace(SETUP, prefetch=prefetch), clock=clock)
    permits, get = threading.Semaphore(0), engine.store.get

    def slow(*args: Any) -> int:
        assert permits.acquire(timeout=60), "the test forgot to let it read"
        return get(*args)

    engine.store.get = slow
    over = permitted = 0

    def look(decision: BatchDecision) -> None:
        nonlocal over
        over += sum(output.finish_reason is not None for output in decision.outputs)

    def come_slowly() -> None:
        nonlocal permitted
        if over and permitted < (1 if policy == "timeout" else 3):
            permitted += 1
            permits.release()
        elif policy == "timeout" and engine.counter("prefetched_tokens") == 2 * BLOCK:
            clock.now = 600.0

    if policy != "best_effort":
        engine.when_idle = come_slowly
    answers = engine.generate([text, other], PARAMS, after_step=look)
    model.check(text, answers[0])
    model.check(other, answers[1])
    found = answers[0].cached_tokens_details["disk"]
    assert found == {"best_effort": 0, "wait_complete": ALL, "timeout": 2 * BLOCK}[policy]
    assert engine.counter("prefetch_timeouts") == (policy == "timeout")
    assert policy == "best_effort" or answers[1].end_s < answers[0].first_token_s, "the other waited with it"
    permits.release(10)
    engine.end()


# -- plugins ------------------------------------------------------------------------------------------------------


class Plugin(HiCacheStorage):
    """Both interfaces over a dictionary; like most of upstream's, it skips a key that exists."""

    def __init__(self, data: dict[str, bytes] | None = None) -> None:
        self.data: dict[str, bytes] = {} if data is None else data

    def get(self, key, target_location=None, target_sizes=None):
        raise AssertionError("nobody calls it")

    set = exists = get

    def batch_exists(self, keys, extra_info=None):
        return next((i for i, key in enumerate(keys) if key not in self.data), len(keys))

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        return [
            torch.frombuffer(bytearray(self.data[key]), dtype=target.dtype) if key in self.data else None
            for key, target in zip(keys, target_locations)
        ]

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        for key, value in zip(keys, values):
            self.data.setdefault(key, value.view(torch.uint8).numpy().tobytes())
        return True

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        page_size = self.mem_pool_host.page_size
        for i, key in enumerate(keys):
            if key in self.data:
                page = torch.frombuffer(bytearray(self.data[key]), dtype=self.mem_pool_host.dtype)
                self.mem_pool_host.set_from_flat_data_page(int(host_indices[i * page_size]), page)
        return [key in self.data for key in keys]

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        page_size = self.mem_pool_host.page_size
        for i, key in enumerate(keys):
            page = self.mem_pool_host.get_data_page(host_indices[i * page_size])
            self.data.setdefault(key, page.view(torch.uint8).numpy().tobytes())
        return [True] * len(keys)

    def clear(self):
        self.data.clear()

    def close(self):
        pass


def over(plugin: Any, v1: bool = False) -> OpenStore:
    return lambda pool: PluginStore(plugin, StoreParams({}, "model", pool, BLOCK, "name"), "mine", v1, 256_000_000)


def plugin_with(model: Model, *texts: np.ndarray, v1: bool = False) -> Plugin:
    plugin = Plugin()
    engine = Engine(model.config, over(plugin, v1))
    for text in texts:
        engine.ask(text)
        engine.settle()
    engine.end()
    assert len(plugin.data) == sum(len(text) // BLOCK for text in texts)
    return plugin


@pytest.mark.sampled(2)
@pytest.mark.parametrize("v1", [False, True], ids=["generic", "v1"])
@pytest.mark.parametrize("method", ["batch_exists", "batch_get", "batch_set"])
@pytest.mark.parametrize("error", [RuntimeError("refused"), SystemExit(1)], ids=repr)
def test_a_plugin_raises(
    model: Model, method: str, error: BaseException, v1: bool, caplog: pytest.LogCaptureFixture
) -> None:
    text, new = prompt(8), prompt(9)
    plugin = plugin_with(model, text, v1=v1)
    engine = Engine(model.config, over(plugin, v1))
    broken = True
    name = method + "_v1" if v1 and method != "batch_exists" else method
    real = getattr(plugin, name)

    def raising(*args: Any) -> Any:
        if broken:
            raise error
        return real(*args)

    setattr(plugin, name, raising)
    for each in (text, new):
        answer = engine.ask(each)
        model.check(each, answer)
        engine.forget()
        assert answer.cached_tokens_details["disk"] == (ALL if method == "batch_set" and each is text else 0)
    assert engine.store.stats()["write_errors" if method == "batch_set" else "read_errors"] > 0
    assert len(lines(caplog)) <= 1
    broken = False
    for each in (text, new):
        until_all_comes_from_disk(engine, model, each)
    engine.end()


@pytest.mark.parametrize("method", ["clear", "close"])
def test_a_plugin_raises_when_it_is_cleared_or_detached(model: Model, method: str) -> None:
    text = prompt(8)
    plugin = plugin_with(model, text)
    engine = Engine(model.config, over(plugin))
    engine.ask(text)
    engine.settle()  # a backup that ends later is stored under the new names

    def raising() -> None:
        raise RuntimeError("refused")

    setattr(plugin, method, raising)
    if method == "clear":
        success, message = engine.administer(StorageAction.CLEAR)
        assert not success and "did not succeed" in message
        engine.forget()
        answer = engine.ask(text)
        model.check(text, answer)
        assert answer.cached_tokens_details["disk"] == 0, "what was there has other names now"
        until_all_comes_from_disk(engine, model, text)
    assert engine.administer(StorageAction.DETACH) == (True, "")
    model.check(text, engine.ask(text))
    assert engine.administer(StorageAction.ATTACH, SETUP) == (True, "")
    until_all_comes_from_disk(engine, model, text)
    engine.end()


def test_what_is_left_alone_stays_so_where_storage_cannot_be_emptied(model: Model) -> None:
    plugin = plugin_with(model, prompt(8))
    engine = Engine(model.config, over(plugin))
    engine.ask(prompt(8))
    engine.settle()
    clear, breakers = (
        plugin.clear,
        (engine.core.scheduler.storage.stores.near.reads, engine.core.scheduler.storage.stores.near.writes),
    )
    for breaker in breakers:
        breaker._open("it fails")

    def raising() -> None:
        raise RuntimeError("refused")

    plugin.clear = raising  # type: ignore[method-assign]
    assert not engine.administer(StorageAction.CLEAR)[0]
    assert all(breaker.is_open for breaker in breakers)
    plugin.clear = clear  # type: ignore[method-assign]
    assert engine.administer(StorageAction.CLEAR)[0]
    assert not any(breaker.is_open for breaker in breakers)
    engine.end()


@pytest.mark.parametrize("error", [StoreError("say what to do"), RuntimeError("a bug")], ids=repr)
def test_a_store_that_does_not_open_leaves_the_engine_without(model: Model, error: Exception) -> None:
    text = prompt(8)
    refused = True

    def open_store(pool: MHATokenToKVPoolHost) -> BlockStore:
        if refused:
            raise error
        return over(Plugin())(pool)

    engine = Engine(model.config, open_store, storage=None)
    success, message = engine.administer(StorageAction.ATTACH, SETUP)
    assert not success and message
    assert engine.scheduler.state()["storage"] is None
    model.check(text, engine.ask(text))
    refused = False
    assert engine.administer(StorageAction.ATTACH, SETUP) == (True, "")
    engine.forget()
    engine.ask(text)
    until_all_comes_from_disk(engine, model, text)
    engine.end()


class Liar(Plugin):
    """Of what was there when it began to lie. lie: what it does instead."""

    def __init__(self, data: dict[str, bytes], lie: str) -> None:
        super().__init__(data)
        self.lie = lie
        self.bad = set(data)

    def batch_exists(self, keys, extra_info=None):
        if self.lie == "exists says yes":
            return len(keys)
        return super().batch_exists(keys, extra_info)

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        found = super().batch_get(keys, target_locations)
        return [self._lie(value) if key in self.bad else value for key, value in zip(keys, found)]

    def _lie(self, value):
        if self.lie == "other bytes":
            value.view(torch.uint8)[17] ^= 1
            return value
        if self.lie == "another block":
            other = bytearray(self.data[next(iter(self.data))])
            return torch.frombuffer(other, dtype=value.dtype)
        return {"true without bytes": True, "exists says yes": None, "too short": value[:-3]}[self.lie]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "lie", ["true without bytes", "other bytes", "another block", "exists says yes", "too short"]
)
def test_a_plugin_lies(model: Model, lie: str, caplog: pytest.LogCaptureFixture) -> None:
    text = prompt(10)
    plugin = Liar(plugin_with(model, text).data, lie)
    engine = Engine(model.config, over(plugin))
    answer = engine.ask(text)
    model.check(text, answer)
    assert answer.cached_tokens_details["disk"] <= (BLOCK if lie == "another block" else 0)
    assert engine.store.stats()["read_errors"] > 0
    if lie == "exists says yes":
        # It may be an outage until blocks of another prompt come.
        until_all_comes_from_disk(engine, model, prompt(11))
    until_all_comes_from_disk(engine, model, text)
    assert len(lines(caplog)) == 1
    engine.end()


def note_replies(engine: Engine) -> list[Any]:
    replies: list[Any] = []
    step = engine.core.step

    def noting(*args: Any, **kwargs: Any) -> Any:
        decision = step(*args, **kwargs)
        replies.extend(decision.replies)
        return decision

    engine.core.step = noting  # type: ignore[method-assign]
    return replies


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
@pytest.mark.parametrize("method", ["batch_exists", "batch_get", "batch_set"])
def test_a_plugin_hangs(model: Model, method: str, policy: str) -> None:
    texts = [prompt(11), prompt(12), prompt(13)]
    plugin = plugin_with(model, *texts)
    if method == "batch_set":
        plugin.data.clear()
    prefetch = PrefetchConfig(policy, threshold=1, timeout_base_s=600.0, timeout_per_ki_token_s=0.0)
    clock = Clock()
    setup = dataclasses.replace(SETUP, prefetch=prefetch)
    # One by one, so that some still wait when storage has said what it has, though nobody waits for that.
    one_by_one = {"max_running_requests": 1} if policy == "best_effort" else {}
    engine = Engine(model.config, over(plugin), storage=setup, clock=clock, **one_by_one)
    gate = Gate(plugin, method)
    short = prompt(14, 12)
    num_over = 0

    def look(decision: BatchDecision) -> None:
        nonlocal num_over
        num_over += sum(output.finish_reason is not None for output in decision.outputs)
        if one_by_one and method == "batch_get":
            engine.core.links[PROBE].stream.record().synchronize()

    def time_is_up() -> None:
        if num_over and gate.entered.is_set():
            clock.now = 600.0

    engine.when_idle = time_is_up
    answers = engine.generate([*texts, short], PARAMS, after_step=look)
    for text, answer in zip([*texts, short], answers):
        model.check(text, answer)
        assert answer.cached_tokens_details["disk"] == 0
    if policy == "timeout" and method != "batch_set":
        assert clock.now == 600.0 and engine.counter("prefetch_timeouts") == 3
        assert answers[3].end_s < min(a.first_token_s for a in answers[:3]), "it waited with them"
    engine.step_until(gate.entered.is_set)
    # Detaching waits for what hangs; meanwhile the engine goes on, and asks storage for nothing more.
    replies = note_replies(engine)
    request = StorageRequest(id="detach", action=StorageAction.DETACH)
    engine.core.step(engine.clock(), engine.core.progress(), storage=[request])
    text = prompt(15)
    model.check(text, engine.ask(text))
    assert not replies and not gate.open.is_set()
    gate.open.set()
    engine.settle()
    assert [(r.id, r.success) for r in replies] == [("detach", True)]
    assert engine.scheduler.state()["storage"] is None and engine.store is None
    model.check(text, engine.ask(text))
    engine.end()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["batch_exists", "batch_get", "batch_set"])
def test_decoding_goes_on_while_storage_hangs(model: Model, method: str) -> None:
    """The device is full: somebody has to give way, as no operation of storage will ever give device memory back."""
    long, texts = prompt(16), [prompt(20 + i, 20) for i in range(6)]
    plugin = plugin_with(model, long)
    if method == "batch_set":
        plugin.data.clear()
    prefetch = PrefetchConfig("timeout", threshold=1, timeout_base_s=600.0)
    clock = Clock()
    engine = Engine(
        model.config,
        over(plugin),
        storage=dataclasses.replace(SETUP, prefetch=prefetch),
        num_device_pages=40,
        new_token_ratio=0.05,
        clock=clock,
    )
    gate = Gate(plugin, method)

    def time_goes_by() -> None:
        if gate.entered.is_set():
            clock.now += 700.0

    engine.when_idle = time_goes_by
    model.check(long, engine.ask(long))
    # The answer may be there before the backup that is to be stored.
    engine.step_until(gate.entered.is_set)
    try:
        for text, answer in zip(texts, engine.generate(texts, greedy(30))):
            model.check(text, answer, 30)
    finally:
        gate.open.set()
    assert engine.counter("retracted_reqs") > 0
    engine.end()


# -- who shares what ----------------------------------------------------------------------------------------------


def test_salts_share_nothing(files: Files, model: Model) -> None:
    text = prompt(30)
    engine = files.engine()
    for extra_key, found in (("a", 0), ("b", 0), ("", 0), ("a", ALL), ("b", ALL), ("", ALL)):
        answer = engine.ask(text, extra_key=extra_key)
        model.check(text, answer)
        assert answer.cached_tokens_details == {"device": 0, "host": 0, "disk": found}, extra_key
        engine.forget()
    assert engine.store.stats()["blocks"] == 3 * (ALL // BLOCK)
    engine.end()


def opened(config: ModelConfig, root: Path, **options: Any) -> Engine:
    """As a server makes it from its flags."""
    openers: list[tuple[StorageOpener, StorageSetup]] = []
    engine = Engine(
        config,
        lambda pool: openers[0][0].open(openers[0][1].setup),
        storage=None,
        **{"num_host_pages": 128, **options},
    )
    assert engine.host_pool is not None
    opener = StorageOpener(config.fingerprint, "model", engine.host_pool, 0, 1)
    extra = {"path": str(root), "block_tokens": BLOCK, "prefetch_threshold": 1}
    setup = opener.setup("file", json.dumps(extra), "wait_complete", "write_through")
    openers.append((opener, setup))
    assert engine.administer(StorageAction.ATTACH, setup) == (True, "")
    return engine


def test_other_models_and_dtypes_share_nothing_and_other_page_sizes_do(
    model: Model, other_model: Model, tmp_path: Path
) -> None:
    text = prompt(31)
    configs: list[tuple[ModelConfig, dict[str, Any]]] = [
        (model.config, {}),
        (other_model.config, {}),
        (ModelConfig.from_pretrained(str(model.path), dtype="bfloat16"), {}),
        (model.config, {"page_size": 2, "num_device_pages": 120, "num_host_pages": 256}),
    ]
    tokens = []
    for found in (0, ALL):
        # All at once, as several servers may have one folder.
        engines = [opened(config, tmp_path / "root", **options) for config, options in configs]
        for i, engine in enumerate(engines):
            answer = engine.ask(text)
            assert answer.cached_tokens_details["disk"] == (ALL if i == 3 else found), configs[i]
            engine.settle()
            if not found:
                tokens.append(answer.tokens)
            assert answer.tokens == tokens[i]
            if i in (0, 3):
                model.check(text, answer)
            elif i == 1:
                other_model.check(text, answer)
        for engine in engines:
            assert engine.store.stats()["read_errors"] == 0
            engine.end()


def test_the_same_weights_elsewhere_share(model: Model, tmp_path: Path) -> None:
    """What is shared does not depend on where the model's files lie."""
    shutil.copytree(model.path, tmp_path / "copy")
    text = prompt(32)
    for path, found in ((model.path, 0), (tmp_path / "copy", ALL)):
        engine = opened(ModelConfig.from_pretrained(str(path), dtype="float32"), tmp_path / "root")
        answer = engine.ask(text)
        model.check(text, answer)
        assert answer.cached_tokens_details["disk"] == found
        engine.end()


# -- a host pool that is too small --------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize("method", ["get", "set"])
def test_a_host_pool_that_storage_holds_entirely(files: Files, model: Model, method: str, policy: str) -> None:
    """Reads and writes hang and may hold every page of the host."""
    texts = [prompt(40 + i, 100) for i in range(6)]
    files.fill(*texts, num_host_pages=256)
    limits = StorageLimits(blocks_per_op=2, max_fetch_pages=24, max_store_pages=24)
    prefetch = PrefetchConfig(policy, threshold=1, timeout_base_s=600.0, timeout_per_ki_token_s=0.0)
    setup = dataclasses.replace(SETUP, limits=limits, prefetch=prefetch)
    clock = Clock()
    engine = files.engine(storage=setup, num_host_pages=24, clock=clock)
    if method == "set":
        engine.store.clear()
    gate = Gate(engine.store, method)
    full = False

    def look(_: object) -> None:
        nonlocal full
        full |= int((engine.scheduler.cache.host.pins > 0).sum()) == 24

    def only_time_helps() -> None:
        look(None)
        if policy == "timeout" and (full or method == "set"):
            clock.now += 700.0
        elif policy == "wait_complete" and full and method == "get":
            gate.open.set()  # these really wait

    engine.when_idle = only_time_helps
    for _ in range(2):
        for text, answer in zip(texts, engine.generate(texts, PARAMS, after_step=look)):
            model.check(text, answer)
    if method == "set":
        assert engine.counter("backup_dropped_tokens") > 0, "writes hold what backups need"
    elif policy != "best_effort":  # those start before they have begun to read
        assert full
    gate.open.set()
    engine.settle()
    for text, answer in zip(texts, engine.generate(texts, PARAMS)):
        model.check(text, answer)
    engine.store.check_invariants()
    engine.end()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_a_prompt_on_disk_that_the_host_cannot_hold(files: Files, model: Model, policy: str) -> None:
    texts = [prompt(50 + i, 200) for i in range(3)]
    files.fill(*texts, num_host_pages=256, num_device_pages=256)
    limits = StorageLimits(blocks_per_op=2, max_fetch_pages=20, max_store_pages=10)
    prefetch = PrefetchConfig(policy, threshold=1, timeout_base_s=600.0, timeout_per_ki_token_s=0.0)
    setup = dataclasses.replace(SETUP, limits=limits, prefetch=prefetch)
    clock = Clock()
    engine = files.engine(storage=setup, num_host_pages=40, num_device_pages=256, clock=clock)

    def only_time_helps() -> None:
        if not engine.core.has_outstanding:
            clock.now += 700.0

    engine.when_idle = only_time_helps
    for alone in (True, False):
        for turn in range(2):
            groups = [[text] for text in texts] if alone else [texts]
            for group in groups:
                answers = engine.generate(group, PARAMS)
                for text, answer in zip(group, answers):
                    model.check(text, answer)
                if alone and policy == "wait_complete":
                    assert answers[0].cached_tokens_details["disk"] == (40 * PAGE), f"turn {turn}: as much as fits"
                engine.forget()
    engine.end()


# -- kill -9 ------------------------------------------------------------------------------------------------------


def serve_until_killed(root: Path, model_path: str, seed: int) -> None:
    """What a child does: serves prompts that share beginnings, and stores what it computes."""
    config = ModelConfig.from_pretrained(model_path, dtype="float32")
    engine = Engine(
        config,
        lambda pool: HiCacheFile(root, "model", pool, BLOCK, OPTIONS),
        num_host_pages=160,
        num_device_pages=120,
    )
    rng = random.Random(seed)
    while True:
        engine.generate([conversation(rng.randrange(1 << 20)) for _ in range(3)], PARAMS)


def conversation(number: int) -> np.ndarray:
    return np.concatenate((prompt(60 + number % 3, 40), prompt(1000 + number, 60)))


@pytest.fixture(scope="module")
def forker() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported everything; for each line it forks a child, and answers its process id."""
    # The folder of `support` is on this process's path only.
    env = child_environment()
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=env
    )
    yield process
    process.communicate()


@pytest.mark.slow
def test_kill_9_while_it_stores(files: Files, model: Model, forker: subprocess.Popen[str]) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    used = 0
    files.root.mkdir()
    for _ in range(2):
        assert forker.stdin is not None and forker.stdout is not None
        before = {p: p.stat().st_size for p in files.root.glob("*/*.kv")}
        child_seed = rng.randrange(1 << 30)
        forker.stdin.write(json.dumps([str(files.root), str(model.path), child_seed]) + "\n")
        started = forker.stdout.readline()
        assert started, f"the process that forks has ended with exit code {forker.wait(120)}"
        child = int(started)
        until = time.monotonic() + 120
        while {p: p.stat().st_size for p in files.root.glob("*/*.kv")} == before:
            assert time.monotonic() < until, "the child has stored nothing"
            time.sleep(0.001)
        time.sleep(rng.random() * 0.3)
        os.kill(child, signal.SIGKILL)
        assert forker.stdout.readline() == "over\n"
        engine = files.engine(num_host_pages=320)
        known = engine.store.stats()["blocks"]
        asked = random.Random(child_seed)
        for _ in range(3):
            text = conversation(asked.randrange(1 << 20))
            answer = engine.ask(text)
            model.check(text, answer)
            used += answer.cached_tokens_details["disk"]
            engine.settle()
        assert engine.store.stats()["read_errors"] == 0 and engine.store.stats()["blocks"] >= known
        engine.store.check_invariants()
        engine.end()
    assert used > 0


# -- everything at once -------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("page_size", [1, 4])
def test_random_requests_over_files_with_tiny_pools(model: Model, tmp_path: Path, page_size: int) -> None:
    """Retractions, aborts, evictions on all tiers, damage and errors while the disk is read and written."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    run_randomly(model, tmp_path, page_size, seed, rounds=3)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("turn", range(4))
def test_many_random_requests(model: Model, tmp_path: Path, page_size: int, turn: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    run_randomly(model, tmp_path, page_size, seed, rounds=40)


def run_randomly(model: Model, root: Path, page_size: int, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    limits = StorageLimits(blocks_per_op=2, max_fetch_pages=80 // page_size, max_store_pages=60 // page_size)
    prefetch = PrefetchConfig(
        rng.choice(["best_effort", "wait_complete", "timeout"]),
        threshold=1,
        timeout_base_s=0.02,
        timeout_per_ki_token_s=0.0,
    )
    write_policy = rng.choice(["write_through", "write_through", "write_back", "write_through_selective"])
    setup = dataclasses.replace(SETUP, limits=limits, prefetch=prefetch, write_policy=write_policy)
    clock = Clock()
    block_bytes = BLOCK * 256 + ENTRY_BYTES

    def open_store(pool: MHATokenToKVPoolHost) -> HiCacheFile:
        # Room for some forty blocks, so that segments are evicted too.
        options = FileStoreOptions(30 * DATA + 40 * block_bytes, SEGMENT_BYTES)
        return HiCacheFile(root, "model", pool, BLOCK, options, clock)

    engine = Engine(
        model.config,
        open_store,
        storage=setup,
        write_policy=write_policy,
        page_size=page_size,
        num_device_pages=240 // page_size,
        num_host_pages=320 // page_size,
        chunked_prefill_size=rng.choice([32, 64, 512]),
        new_token_ratio=0.05,
        load_fail_rate=rng.choice([0.0, 0.2]),
        late_rate=rng.choice([0.0, 0.3]),
        seed=seed,
    )
    base = [prompt(seed + i, 160) for i in range(5)]
    for number in range(4 * rounds):
        # With large pages few answers need another page, and a round seldom retracts a request.
        if number >= rounds and (rounds < 40 or engine.counter("retracted_reqs") > 0):
            break
        texts = []
        for i in range(rng.randint(3, 10)):
            shared = rng.choice(base)[: rng.choice([16, 33, 64, 100, 160])]
            texts.append(np.concatenate((shared, prompt(rng.choice([1, 2, 3, seed + i]), rng.randint(1, 40)))))
        lengths = [rng.choice([1, 4, 12, 30 + 2 * page_size]) for _ in texts]
        aborts = {i: rng.randrange(4) for i in range(len(texts)) if rng.random() < 0.2}
        answers = engine.generate(texts, [greedy(n) for n in lengths], aborts, extra_key=rng.choice(["", "", "x"]))
        for i, (text, answer) in enumerate(zip(texts, answers)):
            if answer.finish_reason == "abort" and i in aborts:
                model.check_tokens(text, answer.tokens)
            else:
                model.check(text, answer, min(lengths[i], engine.scheduler.max_total_len - len(text)))
        # Now and then something happens to the disk, all is forgotten, or storage goes and comes back.
        segments = sorted(root.glob("*/*.kv"))
        event = rng.random()
        if event < 0.15 and segments:
            flip(path := rng.choice(segments), rng.randrange(DATA, max(DATA + 1, path.stat().st_size)))
        elif event < 0.2 and segments:
            rng.choice(segments).unlink()
        elif event < 0.35:
            engine.forget()
        elif event < 0.4:
            assert engine.administer(StorageAction.CLEAR) == (True, "")
        elif event < 0.5:
            assert engine.administer(StorageAction.DETACH) == (True, "")
            assert engine.administer(StorageAction.ATTACH, setup) == (True, "")
        clock.now += 5
        if rng.random() < 0.2:
            engine.assert_nothing_left()
            engine.store.check_invariants()
    engine.assert_nothing_left()
    engine.store.check_invariants()
    if rounds >= 40:
        assert engine.counter("retracted_reqs") > 0
    pools = {Tier.DEVICE: engine.device_pool, Tier.HOST: engine.host_pool}
    compared = check_kv(engine.scheduler, pools, model.reference_kv, atol=KV_TOLERANCE)
    # What is on disk is right as well.
    for text in base:
        engine.forget()
        model.check(text, engine.ask(text))
        engine.settle()
        compared += check_kv(engine.scheduler, pools, model.reference_kv, atol=KV_TOLERANCE)
    assert compared > 0
    engine.end()


def fork_children() -> None:
    """For each line of stdin a child, one after another; threads start in the children only."""
    for line in sys.stdin:
        root, model_path, seed = json.loads(line)
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            serve_until_killed(Path(root), model_path, seed)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("over", flush=True)


if __name__ == "__main__":
    fork_children()
