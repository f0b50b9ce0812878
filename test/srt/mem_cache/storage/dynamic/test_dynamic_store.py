"""`PluginStore` and `DynamicBackend`: plugins that behave, and all the ways in which they may not."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.block_store import ExistsFailed, StoreError
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.mem_cache.storage.dynamic.block_troubles import MAX_REST_S, MAX_REWRITES, SICK_REST_S
from sglang.srt.mem_cache.storage.dynamic.dynamic_store import PluginStore
from sglang.srt.mem_cache.storage.registry import StoreParams, parse_backends, storage_backend
from support.plugin_fixture import Blocks, FakePool, block_keys
from support.pool_pages import pages_of

BLOCK = 64


class Plugin(HiCacheStorage):
    """Both interfaces over a dictionary. Like most of upstream's, it skips a key that exists."""

    def __init__(self, storage_config=None, kwargs=None):
        self.config = storage_config
        self.data: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.closed = False

    def put(self, key, value: bytes):
        self.data.setdefault(key, value)

    def get(self, key, target_location=None, target_sizes=None):
        raise AssertionError("nobody calls it")

    set = exists = get

    def batch_exists(self, keys, extra_info=None):
        assert isinstance(extra_info, HiCacheStorageExtraInfo) and extra_info.prefix_keys is None
        self.calls.append("batch_exists")
        return next((i for i, key in enumerate(keys) if key not in self.data), len(keys))

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        self.calls.append("batch_get")
        return [
            torch.frombuffer(bytearray(self.data[key]), dtype=target.dtype) if key in self.data else None
            for key, target in zip(keys, target_locations)
        ]

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        self.calls.append("batch_set")
        for key, value in zip(keys, values):
            self.put(key, value.view(torch.uint8).numpy().tobytes())
        return True

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        """Through addresses, as plugins for RDMA do."""
        self.calls.append("batch_get_v1")
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        for i, key in enumerate(keys):
            if key in self.data:
                value = self.data[key]
                assert len(value) == sizes[2 * i] + sizes[2 * i + 1]
                ctypes.memmove(pointers[2 * i], value[: sizes[2 * i]], sizes[2 * i])
                ctypes.memmove(pointers[2 * i + 1], value[sizes[2 * i] :], sizes[2 * i + 1])
        return [key in self.data for key in keys]

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        self.calls.append("batch_set_v1")
        page_size = self.mem_pool_host.page_size
        for i, key in enumerate(keys):
            page = self.mem_pool_host.get_data_page(host_indices[i * page_size])
            self.put(key, page.view(torch.uint8).numpy().tobytes())
        return [True] * len(keys)

    def clear(self):
        self.data.clear()

    def close(self):
        self.closed = True


STAGING_BYTES = 256_000_000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    plugin, v1=False, pool=None, namespace="ns", staging_bytes=STAGING_BYTES, clock=time.monotonic, **ranks
) -> tuple[PluginStore, Blocks]:
    pool = pool or FakePool()
    params = StoreParams({}, namespace, pool, BLOCK, "a/model", **ranks)
    store = PluginStore(plugin, params, "mine", v1, staging_bytes, clock)
    return store, Blocks(pool, BLOCK)


def exists(store: PluginStore, keys: list[bytes]) -> int | None:
    """None: the store cannot tell."""
    try:
        return store.exists(keys)
    except ExistsFailed:
        return None


both = pytest.mark.parametrize("v1", [False, True], ids=["generic", "v1"])


# What works


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_blocks_come_back(page_size, dtype, v1):
    pool = FakePool(num_pages=10 * BLOCK // page_size, page_size=page_size, dtype=dtype)
    plugin = Plugin()
    store, blocks = make(plugin, v1, pool)
    keys = block_keys(5)
    assert store.exists(keys) == 0 and blocks.load(store, keys) == 0
    assert blocks.store(store, keys[:3]) == 3
    assert store.exists(keys) == 3 and blocks.load(store, keys) == 3
    assert blocks.store(store, keys) == 5 and blocks.load(store, keys) == 5
    assert {call for call in plugin.calls if "_v1" in call} == ({"batch_get_v1", "batch_set_v1"} if v1 else set())
    stats = store.stats()
    assert stats["read_errors"] == stats["write_errors"] == stats["rewritten_blocks"] == 0
    assert all(re.fullmatch("[0-9a-f]{64}", name) for name in plugin.data)
    store.clear()
    assert store.exists(keys) == 0
    store.close()
    assert plugin.closed


@both
def test_batches_are_cut_to_the_staging_memory_and_stop_at_the_first_gap(v1):
    plugin = Plugin()
    store, blocks = make(plugin, v1, staging_bytes=1)
    assert store.staging.page_num == 2
    keys = block_keys(5)
    assert blocks.store(store, keys) == 5
    del plugin.data[list(plugin.data)[3]]
    plugin.calls.clear()
    assert blocks.load(store, keys) == 3
    assert sum("get" in call for call in plugin.calls) == 4
    assert store.exists(keys) == 3
    assert store.get([], np.empty(0, np.int32)) == store.set([], np.empty(0, np.int32)) == store.exists([]) == 0


@both
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_blocks_come_back_into_the_real_host_pool(layout, v1):
    device_pool = MHATokenToKVPool(1, PageLayout.kv(16, 2, 2, 4, torch.bfloat16))
    pool = MHATokenToKVPoolHost(device_pool, 64, layout)
    pool.kv.normal_()
    store = PluginStore(Plugin(), StoreParams({}, "ns", pool, BLOCK, "a/model"), "mine", v1, STAGING_BYTES)
    keys, frames = block_keys(5), np.random.default_rng(0).permutation(64).astype(np.int32)
    written, read = frames[:20], frames[20:40]
    others = torch.from_numpy(np.setdiff1d(np.arange(64), read))
    before = pages_of(pool, others)
    assert store.set(keys, written) == 5 and store.get(keys, read) == 5
    assert torch.equal(
        pages_of(pool, torch.from_numpy(read).long()), pages_of(pool, torch.from_numpy(written).long())
    )
    assert torch.equal(pages_of(pool, others), before)


def test_blocks_of_other_namespaces_ranks_dtypes_and_sizes_are_never_found():
    plugin, keys = Plugin(), block_keys(2)
    variants = [
        {},
        {"namespace": "other"},
        {"tp_size": 2},
        {"tp_size": 2, "tp_rank": 1},
        {"pool": FakePool(dtype=torch.float16)},
        {"pool": FakePool(page_size=64)},
    ]
    for kwargs in variants:
        store, blocks = make(plugin, **kwargs)
        assert store.exists(keys) == 0
        assert blocks.store(store, keys) == 2 and blocks.load(store, keys) == 2
    assert len(plugin.data) == 2 * len(variants)
    store, blocks = make(plugin)
    assert blocks.load(store, keys) == 2


def test_a_record_of_another_namespace_under_the_right_name_does_not_verify():
    plugin, key = Plugin(), block_keys(1)
    one, blocks = make(plugin)
    blocks.store(one, key)
    (value,) = plugin.data.values()
    plugin.data.clear()
    other, blocks = make(plugin, namespace="other")
    blocks.store(other, key)
    plugin.data = {name: value for name in plugin.data}
    assert blocks.load(other, key) == 0 and other.stats()["read_errors"] == 1


# The pool that a plugin sees


@pytest.mark.parametrize(("page_size", "dtype"), [(64, torch.bfloat16), (48, torch.float32), (1, torch.uint8)])
def test_sizes_of_the_facade_agree(page_size, dtype):
    pool = HostKVCache(4, page_size, 5000, dtype)
    assert pool.page_bytes >= 5000 and pool.page_bytes % (2 * 4096) == 0
    assert pool.size_per_token * page_size == pool.page_bytes == 2 * pool.get_page_buffer_element_size()
    assert pool.get_ksize_per_token() * 2 == pool.get_size_per_token()
    assert pool.kv_buffer.nbytes == pool.page_num * pool.page_bytes and pool.kv_buffer.is_contiguous()
    assert pool.get_dummy_flat_data_page().nbytes == pool.page_bytes
    assert pool.is_stride_page_aligned() and not pool.is_stride_page_aligned(1 << 16)

    flat = torch.arange(pool.page_bytes, dtype=torch.int32).to(torch.uint8).view(dtype)
    indices = torch.arange(page_size, 3 * page_size)
    pool.set_from_flat_data_page(indices[0], flat)
    pointers, sizes = pool.get_page_buffer_meta(indices)
    assert len(pointers) == 4 and set(sizes) == {pool.run_bytes}
    assert pointers[0] == pool.k_buffer[page_size:].data_ptr() and pointers[1] == pool.v_buffer[page_size:].data_ptr()
    assert pointers[0] % 4096 == 0
    read = b"".join(ctypes.string_at(p, n) for p, n in zip(pointers[:2], sizes))
    assert read == flat.view(torch.uint8).numpy().tobytes()
    page = pool.get_data_page(page_size)
    assert torch.equal(page.view(torch.uint8), flat.view(torch.uint8))
    view = pool.get_data_page(page_size, flat=False)
    assert view.shape == (2, page_size, 1, 1, pool.head_dim) and view[0].data_ptr() == pointers[0]
    assert view[0].is_contiguous() and view[1].is_contiguous()
    view.view(torch.uint8).fill_(0)
    assert torch.equal(page.view(torch.uint8), flat.view(torch.uint8)), "a flat page is the caller's own"


def test_a_flat_page_is_a_copy_even_of_the_only_page():
    pool = HostKVCache(1, 16, 5000, torch.float32)
    assert pool.get_data_page(0).data_ptr() != pool.kv_buffer.data_ptr()


def test_the_facade_refuses_what_is_not_a_page():
    pool = HostKVCache(4, 16, 5000, torch.float32)
    with pytest.raises(IndexError):
        pool.get_data_page(8)
    with pytest.raises(IndexError):
        pool.get_page_buffer_meta(torch.arange(64, 80))
    with pytest.raises(ValueError):
        pool.get_page_buffer_meta(torch.arange(15))
    with pytest.raises(ValueError):
        pool.set_from_flat_data_page(0, torch.zeros(3))
    with pytest.raises(NotImplementedError):
        pool.get_page_buffer_element_size(2)
    with pytest.raises(AttributeError):
        pool.alloc(16)


# Plugins that raise


@both
@pytest.mark.parametrize(
    "error",
    [RuntimeError("no"), SystemExit(1), AssertionError(), asyncio.CancelledError()],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("method", ["batch_exists", "get", "set", "clear", "close"])
def test_an_exception_is_counted_and_the_rest_goes_on(method, error, v1):
    plugin = Plugin()
    store, blocks = make(plugin, v1)
    keys = block_keys(3)
    if method != "set":
        assert blocks.store(store, keys) == 3

    def fail(*args):
        raise error

    name = method if method in ("batch_exists", "clear", "close") else f"batch_{method}{'_v1' if v1 else ''}"
    setattr(plugin, name, fail)
    answers = {
        "batch_exists": lambda: exists(store, keys),
        "get": lambda: blocks.load(store, keys),
        "set": lambda: blocks.store(store, keys),
        "clear": lambda: store.clear(),
        "close": lambda: store.close(),
    }
    assert not answers[method]()
    stats = store.stats()
    assert stats["read_errors" if method in ("batch_exists", "get") else "write_errors"] > 0
    delattr(plugin, name)
    if method == "clear":
        assert plugin.data and store.exists(keys) == 0, "forgotten though the plugin kept it"
    if method != "set":
        assert blocks.store(store, keys) == 3
    if method == "get":
        assert len(plugin.data) == 3, "an outage is no reason to store a block under another name"
    if method != "set":
        assert blocks.load(store, keys) == 3


@both
def test_one_block_that_raises_does_not_take_the_others_along(v1):
    class Picky(Plugin):
        poison: str = ""

        def batch_get(self, keys, target_locations=None, target_sizes=None):
            assert self.poison not in keys
            return super().batch_get(keys, target_locations)

        def batch_get_v1(self, keys, host_indices, extra_info=None):
            assert self.poison not in keys
            return super().batch_get_v1(keys, host_indices)

    plugin = Picky()
    store, blocks = make(plugin, v1)
    keys = block_keys(5)
    blocks.store(store, keys)
    plugin.poison = list(plugin.data)[2]
    assert blocks.load(store, keys) == 2 and store.exists(keys) == 5, "this may be an outage"
    assert blocks.load(store, keys) == 2 and store.exists(keys) == 2, "two blocks have come right meanwhile"
    assert blocks.store(store, keys) == 5 and blocks.load(store, keys) == 5


@both
def test_an_outage_renames_nothing(v1):
    plugin = Plugin()
    store, blocks = make(plugin, v1)
    keys = block_keys(3)
    blocks.store(store, keys)

    def fail(*args):
        raise ConnectionError("the store is down")

    for name in ("batch_exists", "batch_get", "batch_get_v1", "batch_set", "batch_set_v1"):
        setattr(plugin, name, fail)
    for _ in range(5):
        assert exists(store, keys) is None and blocks.load(store, keys) == blocks.store(store, keys) == 0
    plugin.__dict__ = {k: v for k, v in plugin.__dict__.items() if v is not fail}
    assert blocks.load(store, keys) == 3 and store.stats()["rewritten_blocks"] == 0


# Plugins that lie


def lie_corrupt(plugin, name):
    value = bytearray(plugin.data[name])
    value[100] ^= 1
    plugin.data[name] = bytes(value)


def lie_swap(plugin, name):
    plugin.data[name] = next(value for other, value in plugin.data.items() if other != name)


def lie_zero(plugin, name):
    plugin.data[name] = bytes(len(plugin.data[name]))


def lie_half(plugin, name):
    """V of the right block, K of another one."""
    other = next(value for other, value in plugin.data.items() if other != name)
    half = len(other) // 2
    plugin.data[name] = other[:half] + plugin.data[name][half:]


@both
@pytest.mark.parametrize("lie", [lie_corrupt, lie_swap, lie_zero, lie_half])
def test_a_block_that_comes_wrong_is_replaced_and_then_verifies(lie, v1):
    plugin = Plugin()
    store, blocks = make(plugin, v1)
    keys = block_keys(4)
    blocks.store(store, keys)
    lie(plugin, list(plugin.data)[1])
    assert store.exists(keys) == 4
    assert blocks.load(store, keys) == 1
    assert store.stats()["read_errors"] == 1 and store.stats()["rewritten_blocks"] == 1
    assert store.exists(keys) == 1, "forgotten"
    assert blocks.store(store, keys) == 4 and len(plugin.data) == 5
    assert store.exists(keys) == 4 and blocks.load(store, keys) == 4

    restarted, blocks = make(plugin, v1)
    assert blocks.load(restarted, keys) == 1, "the first name again"
    assert restarted.exists(keys) == 4 and blocks.load(restarted, keys) == 4, "then the second"


READ_FAULTS = {
    "raises": lambda keys, *_: 1 / 0,
    "none": lambda keys, *_: None,
    "nothing": lambda keys, *_: [None] * len(keys),
}


@both
@pytest.mark.parametrize("fault", READ_FAULTS)
def test_an_outage_of_reads_alone_renames_nothing(fault, v1):
    """`batch_exists` works all the time."""
    plugin, clock = Plugin(), Clock()
    store, blocks = make(plugin, v1, clock=clock)
    prompts = [block_keys(3, f"prompt {i}") for i in range(4)]
    for keys in prompts:
        blocks.store(store, keys)
    num_stored = len(plugin.data)
    plugin.batch_get = plugin.batch_get_v1 = READ_FAULTS[fault]
    for _ in range(20):
        clock.now += 1
        for keys in prompts:
            assert blocks.load(store, keys) == 0 and store.exists(keys) == 3 == blocks.store(store, keys)
    del plugin.batch_get, plugin.batch_get_v1
    assert [blocks.load(store, keys) for keys in prompts] == [3] * 4
    assert len(plugin.data) == num_stored and store.stats()["rewritten_blocks"] == 0


def damage_reads(plugin: Plugin, is_on: bool) -> None:
    """What is kept stays as it is."""
    right = dict(plugin.data)

    def damaged(*args):
        plugin.data = {name: value[:100] + bytes([value[100] ^ 1]) + value[101:] for name, value in right.items()}
        try:
            return read(*args)
        finally:
            plugin.data = right

    if is_on:
        read, plugin.batch_get = Plugin.batch_get.__get__(plugin), damaged
    else:
        del plugin.batch_get


def test_an_outage_that_damages_reads_costs_few_names_and_is_soon_forgotten():
    plugin, clock = Plugin(), Clock()
    store, blocks = make(plugin, clock=clock)
    prompts = [block_keys(3, f"prompt {i}") for i in range(4)]
    for keys in prompts:
        blocks.store(store, keys)
    for clock.now in map(float, range(300)):
        damage_reads(plugin, True)
        for keys in prompts:
            assert blocks.load(store, keys) == 0
        damage_reads(plugin, False)
        for keys in prompts:
            assert blocks.store(store, keys) == 3, "a block that rests is no failed write"
    # Failures: 3, and one each 4 s. Another name: three times, and where their number doubles.
    assert len(plugin.data) == 4 * (3 + 3 + 5)
    clock.now += SICK_REST_S
    assert [store.exists(keys) for keys in prompts] == [blocks.load(store, keys) for keys in prompts] == [3] * 4


def test_a_block_that_comes_right_ends_the_rest_of_all_others_in_an_outage():
    plugin, clock = Plugin(), Clock()
    store, blocks = make(plugin, clock=clock)
    bad, good = block_keys(1, "bad"), block_keys(1, "good")
    blocks.store(store, good)
    for _ in range(MAX_REWRITES + 1):
        blocks.store(store, bad)
        damage_reads(plugin, True)
        assert blocks.load(store, bad) == 0
        damage_reads(plugin, False)
    assert blocks.store(store, bad) == 1 and store.exists(bad) == 0
    assert blocks.load(store, good) == 1
    assert store.exists(bad) == blocks.load(store, bad) == 1


@pytest.mark.sampled(1)
@both
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_block_that_never_comes_right_is_read_less_and_less_often(is_lost, v1):
    plugin, clock = Plugin(), Clock()
    store, blocks = make(plugin, v1, clock=clock)
    good, (bad,) = block_keys(2, "good"), block_keys(1)
    keys = [*good, bad]
    if is_lost:
        plugin.put = lambda key, value: bad.hex() in key or plugin.data.setdefault(key, value)
        plugin.batch_exists = lambda keys, _: len(keys)
    at = []
    for clock.now in map(float, range(0, 5000, 5)):
        before = store.stats()["read_errors"]
        assert blocks.store(store, keys) == 3
        for name in plugin.data:
            if name.startswith(bad.hex()):
                lie_zero(plugin, name)
        assert blocks.load(store, keys) == 2
        if store.stats()["read_errors"] > before:
            at.append(clock.now)
    pauses = np.diff(at)
    assert len(at) < 25 and pauses[-1] >= MAX_REST_S and (pauses[1:] >= pauses[:-1]).all()
    assert store.exists(keys) == 2
    assert sum(name.startswith(bad.hex()) for name in plugin.data) == (0 if is_lost else len(at) + 1)


@both
def test_true_without_filling_is_caught_though_the_memory_held_the_block_before(v1):
    plugin = Plugin()
    store, blocks = make(plugin, v1)
    keys = block_keys(3)
    blocks.store(store, keys)
    assert blocks.load(store, keys) == 3  # staging holds all three now
    plugin.batch_get = plugin.batch_get_v1 = lambda keys, *_: [True] * len(keys)
    assert blocks.load(store, keys) == 0 and store.stats()["read_errors"] == 1


@both
def test_a_plugin_that_goes_on_writing_afterwards_spoils_nothing(v1):
    """It may still write while the block is on its way to the host pool."""
    plugin = Plugin()
    store, blocks = make(plugin, v1)
    (key,) = block_keys(1)
    blocks.store(store, [key])
    answers = []
    original = plugin.batch_get
    plugin.batch_get = lambda *args: answers.append(original(*args)) or answers[-1]
    copy_in = blocks.pool.copy_in

    def late(frames, data):
        store.staging.kv_buffer.view(torch.uint8).fill_(7)
        for (value,) in answers:
            value.view(torch.uint8).fill_(7)
        copy_in(frames, data)

    blocks.pool.copy_in = late
    frames = blocks.frames(1, second_half=True)
    assert store.get([key], frames) == 1
    blocks.pool.copy_in = copy_in
    assert (blocks.pool.bytes[frames] == blocks.pool.bytes[blocks.frames(1)]).all()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (2, 2),
        (np.int64(2), 2),
        (99, 3),
        (-1, 0),
        (None, 0),
        ("3", 0),
        (2.0, 0),
        (True, 3),
        (np.True_, 3),
        (False, 0),
        ([True, True, False], 2),
        ([True], 1),
        (np.array([True, False, True]), 1),
        (torch.tensor(2), 2),
        (torch.tensor([True, True, True, True]), 3),
        (object(), 0),
    ],
)
def test_answers_of_exists_are_believed_as_far_as_they_can_be(answer, expected):
    plugin = Plugin()
    store, _ = make(plugin)
    plugin.batch_exists = lambda *_: answer
    assert store.exists(block_keys(3)) == expected
    unreadable = answer is None or isinstance(answer, (str, float)) or type(answer) is object
    assert store.stats()["read_errors"] == int(unreadable)


class Mind:
    def __bool__(self):
        raise RuntimeError("neither true nor false")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([True, True, True], 3),
        ([np.True_, np.False_, True], 1),
        ((True, True), 2),
        ([True] * 9, 3),
        (np.array([1, 1, 0]), 2),
        (torch.tensor([True, False, True]), 1),
        ([], 0),
        (True, 3),
        (2, 2),
        (7, 3),
        (None, 0),
        ({}, 0),
        ([True, Mind(), True], 1),
        ([True, torch.zeros(3), True], 1),
    ],
)
def test_answers_of_v1_reads_are_believed_as_far_as_they_can_be(answer, expected):
    plugin = Plugin()
    store, blocks = make(plugin, v1=True)
    keys = block_keys(3)
    blocks.store(store, keys)
    read = plugin.batch_get_v1
    plugin.batch_get_v1 = lambda *args: (read(*args), answer)[1]
    plugin.batch_exists = lambda *_: 0
    assert blocks.load(store, keys) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda values, targets: values, 3),
        (lambda values, targets: tuple(values), 3),
        (lambda values, targets: values[:2], 2),
        (lambda values, targets: values * 2, 3),
        (lambda values, targets: [values[0], None, values[2]], 1),
        (lambda values, targets: [v.view(2, -1) for v in values], 3),
        (lambda values, targets: [v.view(torch.uint8) for v in values], 3),
        (lambda values, targets: [v.to(torch.float64) for v in values], 0),
        (lambda values, targets: [v[:-1] for v in values], 0),
        (lambda values, targets: [torch.cat((v, v))[::2] for v in values], 0),
        (lambda values, targets: [v.to("meta") for v in values], 0),
        (lambda values, targets: [t.copy_(v) for t, v in zip(targets, values)], 3),
        (lambda values, targets: [t.copy_(v) is t for t, v in zip(targets, values)], 3),
        (lambda values, targets: len([t.copy_(v) for t, v in zip(targets, values)]), 3),
        (lambda values, targets: [t.copy_(v) for t, v in zip(targets, values)] and 99, 3),
        (lambda values, targets: [b"bytes"] * 3, 0),
        (lambda values, targets: None, 0),
        (lambda values, targets: [], 0),
        (lambda values, targets: "values", 0),
    ],
)
def test_answers_of_generic_reads_are_believed_as_far_as_they_can_be(change, expected):
    plugin = Plugin()
    store, blocks = make(plugin, pool=FakePool(dtype=torch.float32))
    keys = block_keys(3)
    blocks.store(store, keys)
    read = plugin.batch_get
    plugin.batch_get = lambda keys, targets: change(read(keys, targets), targets)
    plugin.batch_exists = lambda *_: 0
    assert blocks.load(store, keys) == expected


@both
@pytest.mark.parametrize(
    ("answer", "stored", "expected"),
    [
        (True, 3, 3),
        ([True, True, True], 3, 3),
        ([True, False, True], 1, 1),
        ([True], 1, 1),
        ([True] * 5, 3, 3),
        (False, 2, 2),  # upstream's file backend: not all, and does not say which
        (None, 3, 3),  # no answer, but it says that it has them
        (None, 0, 0),
        ("yes", 1, 1),
        (3, 0, 0),  # a count is none of the answers that a set may give
    ],
)
def test_answers_of_writes_are_believed_as_far_as_they_can_be(answer, stored, expected, v1):
    plugin = Plugin()
    store, blocks = make(plugin, v1)
    name = "batch_set_v1" if v1 else "batch_set"
    write = getattr(plugin, name)
    page_size = store.staging.page_size

    def some(keys, values, *_):
        if stored:
            write(keys[:stored], values[: stored * (page_size if v1 else 1)])
        return answer

    setattr(plugin, name, some)
    assert blocks.store(store, block_keys(3)) == expected
    assert store.stats()["write_errors"] == int(expected < 3 or answer is None)
    assert store.stats()["blocks"] == expected


@both
def test_stored_by_its_own_word_only_is_noticed_when_it_is_read(v1):
    plugin = Plugin()
    store, blocks = make(plugin, v1)
    plugin.put = lambda *_: None
    keys = block_keys(2)
    assert blocks.store(store, keys) == 2
    assert store.exists(keys) == blocks.load(store, keys) == 0


def test_a_clear_that_does_nothing_is_noticed():
    plugin = Plugin()
    store, blocks = make(plugin)
    keys = block_keys(2)
    blocks.store(store, keys)
    plugin.clear = lambda: None
    assert not store.clear()
    assert plugin.data and store.exists(keys) == blocks.load(store, keys) == 0
    assert blocks.store(store, keys) == 2 and blocks.load(store, keys) == 2


def test_errors_are_logged_once_a_minute_with_the_plugins_name(caplog):
    plugin, clock = Plugin(), Clock()
    store, _ = make(plugin, clock=clock)
    plugin.batch_exists = lambda *_: 1 / 0
    with caplog.at_level(logging.WARNING):
        for clock.now in (0.0, 1.0, 59.0, 61.0):
            assert exists(store, block_keys(1)) is None
    assert [record.getMessage() for record in caplog.records] == [
        "storage plugin mine: <lambda> raised ZeroDivisionError: division by zero",
        "storage plugin mine: <lambda> raised ZeroDivisionError: division by zero"
        " (2 more read errors since the last line)",
    ]
    assert store.stats()["read_errors"] == 4


@both
def test_a_slow_read_stands_in_nobodys_way(v1):
    plugin = Plugin()
    store, blocks = make(plugin, v1)
    keys = block_keys(6)
    blocks.store(store, keys[:3])
    entered, leave = threading.Event(), threading.Event()
    name = "batch_get_v1" if v1 else "batch_get"
    read = getattr(plugin, name)

    def slow(*args):
        entered.set()
        assert leave.wait(120)
        return read(*args)

    setattr(plugin, name, slow)
    counts = []
    thread = threading.Thread(target=lambda: counts.append(blocks.load(store, keys[:3])))
    thread.start()
    assert entered.wait(120)
    assert blocks.store(store, keys) == 6 and store.exists(keys) == 6
    assert store.stats()["blocks"] == 9
    leave.set()
    thread.join(120)
    assert counts == [3]


class Flaky(Plugin):
    """Every call may fail in a seeded way, as long as `faults` is set."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.faults = True

    def _hit(self) -> bool:
        return self.faults and self.rng.random() < 0.15

    def put(self, key, value):
        if self._hit():
            return
        if self._hit():
            at = self.rng.randrange(len(value))
            value = value[:at] + bytes([value[at] ^ 255]) + value[at + 1 :]
        super().put(key, value)

    def _call(self, method, *args):
        if self._hit():
            raise OSError("flaky")
        if self.data and self._hit():
            self.data.pop(self.rng.choice(list(self.data)))
        answer = method(*args)
        return self.rng.choice([None, [], True, False, 1, answer]) if self._hit() else answer

    def batch_exists(self, *args):
        return self._call(super().batch_exists, *args)

    def batch_get(self, *args):
        return self._call(super().batch_get, *args)

    def batch_set(self, *args):
        return self._call(super().batch_set, *args)

    def batch_get_v1(self, *args):
        return self._call(super().batch_get_v1, *args)

    def batch_set_v1(self, *args):
        return self._call(super().batch_set_v1, *args)


@pytest.mark.sampled(3)
@both
@pytest.mark.parametrize("seed", range(4))
def test_a_flaky_plugin_never_yields_wrong_bytes(seed, v1):
    print(f"seed {seed}")
    rng = random.Random(seed)
    plugin, clock = Flaky(rng), Clock()
    store, blocks = make(plugin, v1, FakePool(num_pages=64), clock=clock)
    prompts = [block_keys(rng.randint(1, 6), f"prompt {i}") for i in range(40)]
    for _ in range(300):
        keys = rng.choice(prompts)
        do = rng.choice([blocks.store, blocks.load, exists])
        assert 0 <= (do(store, keys) or 0) <= len(keys)
    plugin.faults = False
    for keys in prompts:
        for _ in keys * (MAX_REWRITES + 2):  # each round finds at most one bad block
            clock.now += MAX_REST_S
            blocks.store(store, keys)
            if blocks.load(store, keys) == len(keys):
                break
        assert blocks.load(store, keys) == len(keys)
    assert store.stats()["rewritten_blocks"] > 0


# The factory


def create(config, pool=None):
    return storage_backend("dynamic").open(StoreParams(config, "ns", pool or FakePool(), BLOCK, "a/model"))


def mine(class_name, **more):
    return {"backend_name": "mine", "module_path": __name__, "class_name": class_name, **more}


def test_a_plugin_is_made_as_upstream_makes_it():
    store = create(mine("Plugin", its_own="setting"))
    config = store._plugin.config
    assert isinstance(config, HiCacheStorageConfig)
    assert (config.model_name, config.tp_rank, config.tp_size) == ("a/model", 0, 1)
    assert config.extra_config["its_own"] == "setting" and config.is_page_first_layout and not config.is_mla_model
    assert store._plugin.mem_pool_host is store.staging and store.staging.page_size == BLOCK
    assert store.name == "dynamic" and store.block_tokens == BLOCK
    assert store.staging.page_num == 256
    assert create(mine("Plugin", staging_mb=0.001)).staging.page_num == 2


class Grabby(Plugin):
    def __init__(self, storage_config, kwargs):
        super().__init__(storage_config, kwargs)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def test_signals_that_a_plugin_takes_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    create(mine("Grabby"))
    assert signal.getsignal(signal.SIGTERM) is before


class DuckTyped:
    """Derives from nothing, like a class whose HiCacheStorage is another installation's."""

    def __init__(self, storage_config, kwargs): ...

    register_mem_pool_host = Plugin.register_mem_pool_host
    batch_exists = batch_get = batch_set = clear = lambda self, *args: None


@pytest.mark.parametrize(
    ("value", "is_v1"), [(0, False), ("0", False), (False, False), (1, True), ("1", True), (True, True)]
)
def test_which_interface_is_called(value, is_v1):
    pool = FakePool()
    store = create(mine("Plugin", interface_v1=value), pool)
    Blocks(pool, BLOCK).store(store, block_keys(1))
    assert store._plugin.calls[-1] == ("batch_set_v1" if is_v1 else "batch_set")


def test_a_class_with_the_methods_will_do():
    assert create(mine("DuckTyped")).exists(block_keys(1)) == 0


class Incomplete(HiCacheStorage):
    def __init__(self, storage_config, kwargs): ...


class OnlyGeneric(Incomplete):
    get = set = exists = batch_get = batch_set = lambda self, *args: None


class TakesOne(Plugin):
    def __init__(self, storage_config): ...


class RefusesPool(Plugin):
    def register_mem_pool_host(self, mem_pool_host):
        raise RuntimeError("no RDMA here")


class IsCancelled(Plugin):
    def register_mem_pool_host(self, mem_pool_host):
        raise asyncio.CancelledError


class RefusesAllPools(Plugin):
    def on_host_pools_registered(self):
        raise RuntimeError(f"no room for {self.mem_pool_host.page_num} pages")


not_a_class = 3


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "lacks backend_name, module_path, class_name; it has to be like"),
        (mine("Plugin") | {"backend_name": ""}, "lacks backend_name;"),
        (mine("Plugin") | {"module_path": 3}, "lacks module_path;"),
        (mine("Plugin", staging_mb="much"), 'staging_mb is "much", but it has to be a number above 0'),
        (mine("Plugin", staging_mb=True), "staging_mb is true, but it has to be a number above 0"),
        (
            mine("X") | {"module_path": "no.such.module"},
            "No module named 'no'); install it and what it needs, or put",
        ),
        (
            mine("X") | {"module_path": "sglang.srt.environ"},
            "needs a part of upstream SGLang that this engine does not",
        ),
        (mine("Absent"), "has no class Absent; correct class_name"),
        (mine("not_a_class"), "has no class not_a_class"),
        (
            mine("Clock"),
            "is no storage plugin, it lacks register_mem_pool_host, batch_exists, clear, batch_get, batch_",
        ),
        (mine("DuckTyped", interface_v1=1), "it lacks batch_get_v1, batch_set_v1; derive it from"),
        *((mine("Plugin", interface_v1=value), "but it has to be 0 or 1") for value in ("no", "", 2, None, [1])),
        (
            mine("OnlyGeneric", interface_v1=1),
            "does not define batch_get_v1 and batch_set_v1; leave interface_v1 out",
        ),
        (mine("Incomplete"), "Incomplete does not start (TypeError: Can't instantiate abstract class"),
        (mine("TakesOne"), "it is made as TakesOne(storage_config, {})"),
        (mine("RefusesPool"), "RefusesPool does not start (RuntimeError: no RDMA here)"),
        (mine("IsCancelled"), "IsCancelled does not start (CancelledError: )"),
        (mine("RefusesAllPools"), "RefusesAllPools does not start (RuntimeError: no room for "),
    ],
)
def test_a_wrong_config_is_refused_with_a_sentence(config, sentence):
    with pytest.raises(StoreError) as refused:
        create(config)
    message = str(refused.value)
    assert message.startswith("--hicache-storage-backend dynamic: ") and sentence in message and "\n" not in message


def test_a_module_that_breaks_is_refused(tmp_path, monkeypatch):
    (tmp_path / "broken_plugin_module.py").write_text("raise SystemExit('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StoreError, match="cannot be imported \\(SystemExit: not today\\); correct the cause"):
        create(mine("X") | {"module_path": "broken_plugin_module"})


@pytest.mark.parametrize("name", ["mooncake", "nixl", "hf3fs", "no such thing"])
def test_a_backend_that_is_not_built_in_is_refused(name):
    with pytest.raises(StoreError, match=f"{name} is not built in.*'dynamic' loads plugins"):
        parse_backends(name)


def test_the_plugin_of_the_docs_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[5] / "docs" / "guides" / "plugins.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "memory_storage.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    pool = FakePool()
    store = create(
        {"backend_name": "memory", "module_path": "memory_storage", "class_name": "MemoryStorage"}, pool=pool
    )
    blocks, keys = Blocks(pool, BLOCK), block_keys(4)
    assert blocks.store(store, keys) == 4 and store.exists(keys) == 4 and blocks.load(store, keys) == 4
    store.clear()
    assert store.exists(keys) == 0
    store.close()
    assert store.stats()["read_errors"] == store.stats()["write_errors"] == 0
    sys.modules.pop("memory_storage")
