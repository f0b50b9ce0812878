"""`WindowedStore`: two stores as one, of which the second is read only where windows reach."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from sglang.srt.distributed.parallel_state import Replicas
from sglang.srt.managers.startup.storage import StorageOpener
from sglang.srt.mem_cache.block_store import ExistsFailed, StoreError, TenantStore, TouchedStore
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.storage.file.backend import FileBackend
from sglang.srt.mem_cache.storage.file.file_store import HiCacheFile
from sglang.srt.mem_cache.storage.guarded_store import GuardedStore
from sglang.srt.mem_cache.storage.tiered_store import TieredStore
from sglang.srt.mem_cache.storage.windowed_store import OverlappingWindowedStore, WindowedStore
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.offload.remote_store import RemoteStore
from support.memory_store import MemoryStore
from support.remote_fixture import PATIENCE_S, PROXY, close_to_the_end

WINDOWED = (True, False, True, True, False)
PAGE, BLOCK, HOST_PAGES, WINDOWED_PAGES = 4, 8, 64, 32
NUM_SEEN = 2
PAGES_PER_BLOCK = BLOCK // PAGE


def make_pool(order: str = "page_first") -> MHATokenToKVPoolHost:
    layout = PageLayout.kv(PAGE, len(WINDOWED), 2, 4, torch.float32)
    pool = MHATokenToKVPoolHost(
        MHATokenToKVPool(1, layout), HOST_PAGES, order, num_windowed_pages=WINDOWED_PAGES, windowed=WINDOWED
    )
    pool.kv.copy_(torch.randint(0, 256, pool.kv.shape, generator=torch.Generator().manual_seed(3)))
    return pool


class Pair:
    """The store, over two in memory."""

    def __init__(self) -> None:
        self.pool = make_pool()
        self.full, self.of_windows = (MemoryStore(region, BLOCK) for region in self.pool.regions)
        self.store = WindowedStore(self.full, self.of_windows, self.pool.windowed_of, NUM_SEEN)

    def frames(self, num_blocks: int, num_partial: int = 0, first: int = 0) -> np.ndarray:
        """Pages of so many blocks, the first of which are none in layers with a window."""
        frames = np.arange(first, first + num_blocks * PAGES_PER_BLOCK, dtype=np.int32)
        windowed = np.arange(len(frames), dtype=np.int32) - num_partial * PAGES_PER_BLOCK
        self.pool.set_windowed(frames, np.maximum(windowed, -1))
        return frames


def keys(num: int) -> list[bytes]:
    return [bytes([i]) * 16 for i in range(num)]


def test_blocks_come_back_in_both_kinds_of_layers():
    pair = Pair()
    frames = pair.frames(4)
    wanted = np.empty((len(frames), pair.pool.page_bytes), np.uint8)
    pair.pool.copy_out(frames, wanted)
    assert pair.store.set(keys(4), frames) == 4
    pair.pool.kv.zero_()
    assert pair.store.exists(keys(5)) == 4 and pair.store.get(keys(5), pair.frames(5)) == 4
    found = np.empty_like(wanted)
    pair.pool.copy_out(frames, found)
    assert np.array_equal(found, wanted)


def test_what_windows_do_not_reach_is_neither_read_nor_written():
    pair = Pair()
    assert pair.store.set(keys(6), pair.frames(6, num_partial=4)) == 6
    assert sorted(pair.full.blocks) == keys(6) and sorted(pair.of_windows.blocks) == keys(6)[4:]
    before = pair.pool.regions[1].memory.memory.clone()
    with mock.patch.object(pair.of_windows, "get", wraps=pair.of_windows.get) as get:
        assert pair.store.get(keys(6), pair.frames(6, num_partial=6)) == 6
        get.assert_not_called()
        assert torch.equal(pair.pool.regions[1].memory.memory, before)
        assert pair.store.get(keys(6), pair.frames(6, num_partial=5)) == 6
        assert get.call_args.args[0] == keys(6)[5:]


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ((), 8),
        ((0, 1, 2, 3, 4, 5), 8),
        ((7,), 7),
        ((6,), 6),
        ((4,), 8),
        ((5, 7), 5),
        ((1, 3, 5, 7), 1),
        (range(8), 0),
    ],
)
def test_a_prompt_is_there_up_to_where_its_windows_are(missing: tuple[int, ...], found: int):
    pair = Pair()
    pair.store.set(keys(8), pair.frames(8))
    for i in missing:
        del pair.of_windows.blocks[keys(8)[i]]
    assert pair.store.exists(keys(8)) == found


def test_a_store_that_does_not_tell_makes_the_pair_not_tell():
    pair = Pair()
    pair.store.set(keys(2), pair.frames(2))
    with mock.patch.object(pair.of_windows, "longest_seen", side_effect=ExistsFailed), pytest.raises(ExistsFailed):
        pair.store.exists(keys(2))


def test_a_read_ends_at_the_first_block_of_which_a_part_fails():
    pair = Pair()
    pair.store.set(keys(6), pair.frames(6))
    del pair.of_windows.blocks[keys(6)[4]]
    assert pair.store.get(keys(6), pair.frames(6, num_partial=3)) == 4
    assert pair.store.get(keys(6), pair.frames(6, num_partial=5)) == 6
    del pair.full.blocks[keys(6)[2]]
    assert pair.store.get(keys(6), pair.frames(6, num_partial=5)) == 2


def test_a_write_counts_what_both_have_taken():
    pair = Pair()
    pair.full._fail_rate = 0.0
    with mock.patch.object(pair.of_windows, "set", return_value=1):
        assert pair.store.set(keys(4), pair.frames(4, num_partial=2)) == 3


def test_both_are_told_what_is_used_erased_limited_and_closed():
    pair = Pair()
    assert isinstance(pair.store, TouchedStore) and isinstance(pair.store, TenantStore)
    pair.store.set(keys(4), pair.frames(4), b"tenant")
    assert pair.store.touch(keys(5)) == 4
    del pair.of_windows.blocks[keys(4)[2]]
    assert pair.store.touch(keys(4)) == 4, "of what was stored in part windows lack"
    del pair.full.blocks[keys(4)[1]]
    assert pair.store.touch(keys(4)) == 1
    assert pair.store.limit(b"tenant", 3, Tier.DISK)
    assert pair.of_windows.limits == pair.full.limits == {(b"tenant", Tier.DISK): 3}
    assert pair.store.erase(b"tenant", Tier.DISK) and not pair.full.blocks and not pair.of_windows.blocks
    pair.store.set(keys(4), pair.frames(4))
    assert pair.store.clear() and not pair.full.blocks and not pair.of_windows.blocks
    pair.store.close()
    assert not pair.full.is_open and not pair.of_windows.is_open


# -- several reads at once ----------------------------------------------------------------------------------------


class Slow(MemoryStore):
    """Reads end when the test says so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ends: list[Callable[[int], None]] = []
        self.num_given_up = 0
        self.is_refusing = False

    def start_get(
        self, keys: Sequence[bytes], frames: np.ndarray, on_end: Callable[[int], None]
    ) -> Callable[[], None]:
        if self.is_refusing:
            raise OSError("no thread is left")
        self.ends.append(on_end)

        def give_up() -> None:
            self.num_given_up += 1

        return give_up


class SlowPair(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.full, self.of_windows = (Slow(region, BLOCK) for region in self.pool.regions)
        self.store = OverlappingWindowedStore(self.full, self.of_windows, self.pool.windowed_of, NUM_SEEN)
        self.counts: list[int] = []

    def read(self, num_partial: int) -> Callable[[], None]:
        return self.store.start_get(keys(6), self.frames(6, num_partial), self.counts.append)

    def end(self, of_full: int, of_windows: int) -> list[int]:
        """of_windows: of those that it was asked for."""
        self.full.ends.pop()(of_full)
        assert not self.counts, "the other one still writes"
        self.of_windows.ends.pop()(of_windows)
        return self.counts


@pytest.mark.parametrize(
    ("num_partial", "of_full", "of_windows", "count"),
    [(0, 6, 6, 6), (4, 6, 2, 6), (4, 5, 2, 5), (4, 6, 1, 5), (4, 3, 0, 3)],
)
def test_both_kinds_are_read_at_once(num_partial: int, of_full: int, of_windows: int, count: int):
    pair = SlowPair()
    pair.read(num_partial)
    assert pair.end(of_full, of_windows) == [count]


def test_what_windows_do_not_reach_is_not_waited_for():
    pair = SlowPair()
    pair.read(6)
    assert not pair.of_windows.ends
    pair.full.ends.pop()(6)
    assert pair.counts == [6]


def test_a_read_is_given_up_in_both():
    pair = SlowPair()
    pair.read(4)()
    assert pair.full.num_given_up == pair.of_windows.num_given_up == 1 and not pair.counts
    assert pair.end(0, 0) == [0]


def test_pages_stay_taken_where_the_second_read_does_not_begin():
    pair = SlowPair()
    pair.of_windows.is_refusing = True
    pair.read(4)()
    assert not pair.counts and pair.full.num_given_up == 1
    pair.full.ends.pop()(6)
    assert pair.counts == [4]


def test_one_question_is_asked_of_each():
    """Each goes over a network, while a request waits."""
    pair = Pair()
    with (
        mock.patch.object(pair.full, "exists", return_value=60) as of_full,
        mock.patch.object(pair.of_windows, "longest_seen", return_value=0) as of_windows,
    ):
        assert pair.store.exists(keys(64)) == 0
    of_full.assert_called_once_with(keys(64))
    of_windows.assert_called_once_with(keys(60), NUM_SEEN)


@pytest.mark.parametrize("others", ["nothing", "the store", "the store and the proxy"])
def test_what_both_tell_of_one_store_counts_once(others: str):
    pair = SlowPair()
    told = {"size_bytes": 100, "blocks": 6, "read_bytes": 10, "read_errors": 1}
    of_all = {"nothing": (), "the store": ("size_bytes", "blocks"), "the store and the proxy": tuple(told)[:3]}[
        others
    ]
    pair.full.is_of_all = of_all.__contains__  # type: ignore[attr-defined]
    with (
        mock.patch.object(pair.full, "stats", lambda: told),
        mock.patch.object(pair.of_windows, "stats", lambda: told | {"blocks": 3}),
    ):
        found = pair.store.stats()
    assert found["size_bytes"] == (200 if others == "nothing" else 100)
    # 18 keys: two for each block of the one kind and four of the other, or as many as the first has.
    assert found["blocks"] == (6 if others == "nothing" else 2)
    assert found["read_bytes"] == (10 if others == "the store and the proxy" else 20) and found["read_errors"] == 2


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ({"codec": "binned", "k_bins": [[3, 255], [2, 128]]}, ""),
        ({"codec": "binned", "v_bins": [[4, 8]]}, "bins for 4 layers, the model has 5"),
    ],
)
def test_a_codec_takes_layers_as_those_of_the_model(tmp_path: Path, codec: dict[str, Any], message: str):
    opener = replace(opener_of(make_pool()), directory=tmp_path)
    config = {"in_process": True, "limit_gb": 0.1, "block_tokens": BLOCK, "proxy": PROXY, "codec": codec}
    setup = opener.setup("remote", json.dumps(config), "timeout", "write_through").setup
    if message:
        with pytest.raises(StoreError, match=message):
            opener.open(setup)
        return
    store = opener.open(setup)
    assert isinstance(store, WindowedStore)
    # Layers 1 and 4 see all, the others have a window.
    assert [part.codec.split("k=")[1].split()[0] for part in (store.full, store.of_windows)] == [  # type: ignore[attr-defined]
        "1x255,1x128",
        "2x255,1x128",
    ]
    close_to_the_end(store)


def test_it_is_known_how_far_either_tier_has_layers_with_full_attention():
    near, far = Pair(), Pair()
    store = TieredStore(near.store, GuardedStore(far.store))
    far.store.set(keys(6), far.frames(6, num_partial=6))
    assert store.locate(keys(7)) == (0, 0, 6)
    near.store.set(keys(4), near.frames(4, num_partial=2))
    assert store.locate(keys(7)) == (4, 0, 6)
    store.close()


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_remote_store_has_a_session_for_each_kind(tmp_path: Path, in_process: bool):
    """And the proxies write into the pages of their kind alone."""
    pool = make_pool()
    opener = replace(opener_of(pool), directory=tmp_path)
    config = {"in_process": in_process, "limit_gb": 0.1, "block_tokens": BLOCK, "proxy": PROXY}
    setup = opener.setup("remote", json.dumps(config), "timeout", "write_through")
    assert setup.has_windowed_store
    store = opener.open(setup.setup)
    assert isinstance(store, OverlappingWindowedStore)
    frames, before = np.arange(8, dtype=np.int32), pool.kv.clone()
    pool.set_windowed(frames, np.arange(8, dtype=np.int32)[::-1].copy())
    wanted = np.empty((8, pool.page_bytes), np.uint8)
    pool.copy_out(frames, wanted)
    assert store.set(keys(4), frames) == 4 and store.exists(keys(5)) == 4
    pool.copy_in(frames, np.zeros_like(wanted))
    counts: Queue[int] = Queue()
    store.start_get(keys(4), frames, counts.put)
    assert counts.get(timeout=PATIENCE_S) == 4
    found = np.empty_like(wanted)
    pool.copy_out(frames, found)
    assert np.array_equal(found, wanted) and torch.equal(pool.kv, before)
    # Of the third block on only what windows reach.
    pool.set_windowed(frames[:4], np.full(4, -1, np.int32))
    pool.regions[1].copy_in(np.arange(8, dtype=np.int32), np.zeros((8, pool.regions[1].page_bytes), np.uint8))
    store.start_get(keys(4), frames, counts.put)
    assert counts.get(timeout=PATIENCE_S) == 4
    ends = np.empty((8, pool.regions[1].page_bytes), np.uint8)
    pool.regions[1].copy_out(np.arange(8, dtype=np.int32), ends)
    assert ends[:4].any(axis=1).all() and not ends[4:].any()
    close_to_the_end(store)


def test_both_sessions_share_the_store_that_is_started_for_them(tmp_path: Path):
    """Its limit is theirs together, and it ends with the last of them."""
    opener = replace(opener_of(make_pool()), directory=tmp_path)
    config = {"in_process": True, "limit_gb": 0.1, "block_tokens": BLOCK, "proxy": PROXY}
    store = opener.open(opener.setup("remote", json.dumps(config), "timeout", "write_through").setup)
    assert isinstance(store, WindowedStore)
    full, of_windows = store.full, store.of_windows
    assert isinstance(full, RemoteStore) and isinstance(of_windows, RemoteStore)
    kept = full.kept_store
    assert kept is not None and kept is of_windows.kept_store and kept.store is not None
    assert len(list(tmp_path.rglob("store"))) == 1 and Path(f"/proc/{kept.store.pid}").exists()
    close_to_the_end(full)
    assert kept.store is not None and Path(f"/proc/{kept.store.pid}").exists()
    close_to_the_end(of_windows)
    assert kept.store is None


# -- on a disk ----------------------------------------------------------------------------------------------------


def opener_of(pool: MHATokenToKVPoolHost, replicas: Replicas | None = None) -> StorageOpener:
    return StorageOpener(lambda: "model", "name", pool, 0, 1, replicas=replicas, window_reach=11)


def setup_of(opener: StorageOpener, root: Path, **more: object) -> str:
    config = f'{{"path": "{root}", "block_tokens": {BLOCK}'
    config += "".join(f', "{name}": {value}' for name, value in more.items()) + "}"
    setup = opener.setup("file", config, "timeout", "write_through")
    assert setup.has_windowed_store == bool(opener.pool.num_windowed_pages)
    return setup.setup


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
def test_the_file_store_has_a_folder_for_each_kind(tmp_path: Path, order: str):
    pool = make_pool(order)
    opener = opener_of(pool)
    store = opener.open(setup_of(opener, tmp_path, limit_gb=0.01))
    assert isinstance(store, WindowedStore) and store._num_seen == 2
    assert isinstance(store.full, HiCacheFile) and isinstance(store.of_windows, HiCacheFile)
    assert store.full._room is store.of_windows._room and store.full.limit_bytes == 10_000_000
    frames = np.arange(8, dtype=np.int32)
    pool.set_windowed(frames, np.arange(8, dtype=np.int32)[::-1].copy())
    wanted = np.empty((8, pool.page_bytes), np.uint8)
    pool.copy_out(frames, wanted)
    assert store.set(keys(4), frames) == 4
    assert store.stats()["blocks"] == 4 and store.stats()["written_blocks"] == 8
    assert store.stats()["limit_bytes"] == 10_000_000
    store.close()
    pool.kv.zero_()
    again = opener.open(setup_of(opener, tmp_path))
    assert again.exists(keys(4)) == 4 and again.get(keys(4), frames) == 4
    found = np.empty_like(wanted)
    pool.copy_out(frames, found)
    assert np.array_equal(found, wanted)
    again.close()


def test_pages_are_read_where_they_lie(tmp_path: Path):
    """Without a copy in between, as of a host with one pool."""
    pool = make_pool()
    opener = opener_of(pool)
    store = opener.open(setup_of(opener, tmp_path))
    assert isinstance(store, WindowedStore)
    frames = np.arange(4, dtype=np.int32)
    pool.set_windowed(frames, frames)
    with (
        mock.patch.object(pool, "copy_in", side_effect=AssertionError),
        mock.patch.object(pool, "copy_out", side_effect=AssertionError),
    ):
        assert store.set(keys(2), frames) == 2 and store.get(keys(2), frames) == 2
    for part in (store.full, store.of_windows):
        assert isinstance(part, HiCacheFile) and part._files._buffers.is_pool_memory(frames)
    store.close()


def test_a_host_with_one_pool_has_one_store(tmp_path: Path):
    layout = PageLayout.kv(PAGE, len(WINDOWED), 2, 4, torch.float32)
    opener = opener_of(MHATokenToKVPoolHost(MHATokenToKVPool(1, layout), HOST_PAGES))
    store = opener.open(setup_of(opener, tmp_path))
    assert isinstance(store, HiCacheFile)
    store.close()


def test_where_the_second_does_not_open_the_first_is_closed(tmp_path: Path):
    opener, opened, closed = opener_of(make_pool()), [], []
    open_one = FileBackend.open

    def open_first(self: FileBackend, params: object) -> HiCacheFile:
        if opened:
            raise StoreError(f"no room ({errno.ENOSPC})")
        opened.append(store := open_one(self, params))  # type: ignore[arg-type]
        close = store.close
        store.close = lambda: (closed.append(store), close())  # type: ignore[method-assign]
        return store

    with mock.patch.object(FileBackend, "open", open_first), pytest.raises(StoreError, match="no room"):
        opener.open(setup_of(opener, tmp_path))
    assert opened == closed != []
