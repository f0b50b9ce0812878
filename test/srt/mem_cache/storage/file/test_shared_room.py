"""Two stores of a process within one limit: what is worth least of both goes, each under its own folder's lock."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.mem_cache.storage.file import eviction, shared_changes
from sglang.srt.mem_cache.storage.file.eviction import Candidates, Victim, choose_victim
from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile
from sglang.srt.mem_cache.storage.file.segment import ALIGNMENT, SegmentLayout
from sglang.srt.mem_cache.storage.file.segment_index import Segment
from sglang.srt.mem_cache.storage.file.segment_writer import WRITE_PAUSE_S
from sglang.srt.mem_cache.storage.file.shared_changes import SharedChanges
from sglang.srt.mem_cache.storage.windowed_store import WindowedStore
from support.fake_pages import BLOCK_TOKENS, FakePages, keys_of

# Of a block in layers with full attention, and in those with a window.
SLOT_BYTES, WINDOWED_SLOT_BYTES = 8192, 5 * 8192
DATA = 2 * ALIGNMENT
LIMIT = 64 * WINDOWED_SLOT_BYTES
SEGMENT_BYTES = LIMIT // 8
# A file takes more than its blocks where the file system needs a block for the places of others.
SLACK_BYTES = 8192
LONGEST = 24
ALL = range(LONGEST)


class Pair:
    """The stores of one process, as one, with a host pool for each kind of layers."""

    def __init__(self, root: Path, page_size: int = 16, real_time: bool = False, **options: Any) -> None:
        self.root = root
        self.pools = [FakePages(LONGEST * BLOCK_TOKENS // page_size, page_size, num_layers=n) for n in (1, 5)]
        self.windowed = np.zeros(0, np.int32)
        self.now = 0.0
        settings = FileStoreOptions(**{"limit_bytes": LIMIT, "segment_bytes": SEGMENT_BYTES, **options})
        open_one = [root, BLOCK_TOKENS, settings, lambda: self.now]
        self.full = self._open("full", self.pools[0], open_one)
        try:
            self.of_windows = self._open("windows", self.pools[1], open_one, self.full)
        except StoreError:
            self.full.close()
            raise
        self.store = WindowedStore(self.full, self.of_windows, lambda frames: self.windowed[frames], 2)
        if not real_time:
            # Later than the times of files, so that no other process seems to use them.
            self.full._index._wall_ns = self.of_windows._index._wall_ns = itertools.count(
                time.time_ns() + 10**12, 10**6
            ).__next__

    @staticmethod
    def _open(namespace: str, pool: FakePages, args: list[Any], beside: HiCacheFile | None = None) -> HiCacheFile:
        root, block_tokens, settings, clock = args
        return HiCacheFile(root, namespace, pool, block_tokens, settings, clock, beside)

    @property
    def stores(self) -> tuple[HiCacheFile, HiCacheFile]:
        return self.full, self.of_windows

    def frames(self, num_blocks: int, ends: Sequence[int]) -> np.ndarray:
        """Pages of blocks, of which those at positions `ends` have some in layers with a window."""
        frames = np.arange(num_blocks * self.pools[0].pages_per_block, dtype=np.int32)
        has_window = np.isin(np.arange(num_blocks), list(ends)).repeat(self.pools[0].pages_per_block)
        self.windowed = np.where(has_window, frames, -1).astype(np.int32)
        return frames

    def set(self, keys: list[bytes], ends: Sequence[int] = ALL) -> int:
        frames = self.frames(len(keys), ends)
        for pool in self.pools:
            pool.put(keys, frames)
        return self.store.set(keys, frames)

    def get(self, keys: list[bytes], ends: Sequence[int] = ALL) -> int:
        for pool in self.pools:
            pool.kv[:] = 0xAA
        frames = self.frames(len(keys), ends)
        count = self.store.get(keys, frames)
        for i, pages in enumerate(frames.reshape(len(keys), -1)[:count]):
            assert self.pools[0].holds(keys[i], pages)
            assert i not in ends or self.pools[1].holds(keys[i], pages)
        return count

    def set_each(self, numbers: Sequence[int], ends: Sequence[int] = ALL) -> None:
        """Prompts of one block."""
        for number in numbers:
            assert self.set(keys_of(number), ends) == 1
            self.check()

    def stored(self, keys: list[bytes]) -> list[set[bytes]]:
        return [{key for key in keys if key in store} for store in self.stores]

    def check(self) -> None:
        for store in self.stores:
            store.check_invariants()
        if limit := self.full.limit_bytes:
            assert bytes_on_disk(self.root) <= limit

    def stat(self, name: str) -> int:
        return self.store.stats()[name]

    def no_errors(self) -> bool:
        return self.stat("read_errors") == self.stat("write_errors") == 0

    def die(self) -> None:
        """As a killed process: what it has open is closed, and nothing else happens."""
        for store in self.stores:
            store._writer.close()
            for fd in store._index.clear():
                os.close(fd)
            store._sync.changes.close()
            store._folder.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    started: list[Pair] = []

    def start(**options: Any) -> Pair:
        started.append(Pair(tmp_path / "root", **options))
        return started[-1]

    yield start
    for each in started:
        each.store.close()


@pytest.fixture(autouse=True)
def one_lock_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread has the locks of two folders."""
    held = threading.local()
    lock, unlock = SharedChanges.lock, SharedChanges.unlock

    def checked_lock(self: SharedChanges, short: bool = False) -> bool:
        assert not getattr(held, "is_held", False)
        held.is_held = lock(self, short)
        return held.is_held

    def checked_unlock(self: SharedChanges) -> None:
        held.is_held = False
        unlock(self)

    monkeypatch.setattr(SharedChanges, "lock", checked_lock)
    monkeypatch.setattr(SharedChanges, "unlock", checked_unlock)


def bytes_on_disk(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 - SLACK_BYTES for path in root.rglob("*.kv"))


# -- what goes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_limit", [True, False])
def test_the_older_kind_goes_in_both_directions(start, monkeypatch: pytest.MonkeyPatch, has_limit: bool):
    if has_limit:
        pair = start()
    else:
        pair = start(limit_bytes=0)
        fill_from(monkeypatch, pair.root)
    pair.set_each(range(320), ends=())
    assert pair.full.stats()["size_bytes"] > 0.9 * LIMIT and pair.of_windows.stats()["size_bytes"] == 0
    evicted = pair.full.stats()["evicted_blocks"]
    pair.set_each(range(1000, 1040))
    assert pair.of_windows.stats()["evicted_blocks"] == 0 and pair.full.stats()["evicted_blocks"] > evicted
    assert pair.of_windows.stats()["size_bytes"] >= 40 * WINDOWED_SLOT_BYTES, "most of the limit"
    pair.set_each(range(2000, 2320), ends=())
    assert pair.of_windows.stats()["size_bytes"] < 2 * SEGMENT_BYTES, "what it still writes to, and one more"
    assert pair.full.stats()["size_bytes"] > 0.7 * LIMIT
    assert pair.no_errors() and bytes_on_disk(pair.root) <= LIMIT


def fill_from(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Of the file system nine tenths are LIMIT, and others take nothing of it."""
    num_blocks = LIMIT * 10 // 9 // 4096

    def statvfs(path: object) -> SimpleNamespace:
        return SimpleNamespace(f_blocks=num_blocks, f_frsize=4096, f_bavail=num_blocks - bytes_on_disk(root) // 4096)

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_hot_blocks_of_the_other_store_are_copied_forward(start):
    pair, hot = start(), keys_of(0, 1, 2)
    assert pair.set(hot, ends=()) == 3
    with mock.patch.object(pair.full._writer._member, "give_up", wraps=pair.full._writer.give_up_segment) as asked:
        for number in range(1000, 1250):
            assert pair.store.touch(hot) == 3
            pair.set_each([number])
            if number % 2:
                pair.set_each([number + 1000], ends=())
    assert asked.call_count and pair.full.stats()["copied_blocks"] >= 3
    assert 1 not in pair.full._index.segments and pair.get(hot, ends=()) == 3 and pair.no_errors()


def test_hot_blocks_with_a_window_are_copied_forward(start):
    pair, hot = start(), keys_of(0)
    assert pair.set(hot) == 1
    pair.set_each(range(100, 106))
    with mock.patch.object(
        pair.of_windows._writer._member, "give_up", wraps=pair.of_windows._writer.give_up_segment
    ) as asked:
        for number in range(1000, 1400):
            assert pair.store.touch(hot) == 1
            pair.set_each([number], ends=())
    assert asked.call_count and pair.of_windows.stats()["copied_blocks"] == 1
    assert pair.get(hot) == 1 and pair.no_errors()


@pytest.mark.parametrize("rewrite_share", [0.0, 0.25])
def test_a_set_evicts_nothing_that_it_stored_or_found_in_either_store(start, rewrite_share: float):
    pair = start(limit_bytes=LIMIT // 4, rewrite_share=rewrite_share)
    rng = random.Random(1)
    num_cut = 0
    for first in range(0, 750, 30):
        found = keys_of(*range(first, first + rng.randint(1, 12)))
        pair.set(found, ends=rng.choice(((), ALL, ALL)))
        keys = [*found, *keys_of(*range(first + len(found), first + LONGEST))]
        before = pair.stored(keys)
        count = pair.set(keys, ends=range(rng.randrange(LONGEST), LONGEST))
        num_cut += count < LONGEST
        after = pair.stored(keys)
        assert all(old <= new for old, new in zip(before, after))
        assert {*keys[:count]} <= after[0], "what it has counted"
        pair.check()
    assert num_cut > 5 and pair.no_errors()


def test_what_only_the_first_store_takes_stays_while_the_second_makes_room(start):
    """Of the same call, though the second one could evict nothing else."""
    pair = start(limit_bytes=LIMIT // 4, rewrite_share=0.0)
    assert pair.set(keys_of(*range(LONGEST)), ends=()) == LONGEST
    keys = keys_of(*range(100, 100 + LONGEST))
    count = pair.set(keys)
    assert 0 < count < LONGEST and len(pair.stored(keys)[0]) == LONGEST
    assert pair.full.exists(keys_of(*range(LONGEST))) == 0 and pair.get(keys[:count]) == count


def test_where_others_fill_the_disk_one_segment_goes_for_a_block(start, monkeypatch: pytest.MonkeyPatch):
    pair = start(limit_bytes=0, rewrite_share=0.0)
    pair.set_each(range(14))
    pair.set_each(range(100, 180), ends=())
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=1000, f_frsize=4096, f_bavail=99))
    num_full, num_windowed = (store.stats()["segments"] for store in pair.stores)
    assert num_windowed == 2
    pair.set_each([200], ends=())
    assert [store.stats()["segments"] for store in pair.stores] == [num_full, 1]


def test_a_disk_that_others_fill_has_room_made_by_the_other_store(start, monkeypatch: pytest.MonkeyPatch):
    pair = start(limit_bytes=0)
    pair.set_each(range(14))
    pair.set_each(range(100, 110), ends=())
    write, full = pair.full._files.write_payloads, [OSError(28, "planted")]

    def fails_once(*args: Any) -> list[bytes]:
        if full:
            raise full.pop()
        return write(*args)

    monkeypatch.setattr(pair.full._files, "write_payloads", fails_once)
    pair.set_each([200], ends=())
    assert not full and pair.of_windows.stats()["segments"] == 1 and pair.full.exists(keys_of(100)) == 1


def segment(number: int, num_layers: int, uses: list[int]) -> Segment:
    pool = FakePages(4, num_layers=num_layers)
    made = Segment(number, "", SegmentLayout(bytes(32), BLOCK_TOKENS, pool.page_layout, len(uses)), 0)
    made.keys = bytearray(16 * len(uses))
    made.uses[:] = uses
    made.live = len(uses)
    made.used_ns = max(uses)
    return made


def test_a_quarter_of_all_bytes_is_cold():
    """Not of all blocks: one with a window takes as much as five others."""
    full = segment(1, 1, [*range(11, 21)])
    of_windows = segment(1, 5, [1, 2, 3, 100])
    stores = [Candidates([full], 10, 16), Candidates([of_windows], 4, 16)]
    # A quarter of 30 parts: behind 1, which has five, and within the use at 2.
    assert choose_victim(stores, [of_windows]) == Victim(of_windows, [2, 3])
    assert choose_victim(stores, [full]) == Victim(full, list(range(10)))
    # Of 14 blocks it were that at 11.
    small = Candidates([segment(1, 1, [1, 2, 3, 100])], 4, 16)
    assert choose_victim([stores[0], small], small.segments) == Victim(small.segments[0], [3])


def test_a_quarter_of_many_blocks_is_found_in_a_sample(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eviction, "_SAMPLED_USES", 1000)
    rng = np.random.default_rng(1)
    # A third of the bytes in blocks of 1, used before the others.
    full = [segment(i, 1, rng.integers(1, 1000, 100).tolist()) for i in range(50)]
    of_windows = [segment(i, 5, rng.integers(1001, 2000, 100).tolist()) for i in range(20)]
    stores = [Candidates(full, 100, 16), Candidates(of_windows, 100, 16)]
    victim = choose_victim(stores, full[:1])
    assert victim is not None
    assert min(victim.segment.uses[victim.hot]) == pytest.approx(750, abs=60)


# -- one limit ------------------------------------------------------------------------------------------------------


def test_what_is_told_of_both_counts_once(start):
    pair = start(daily_write_bytes=10**9)
    pair.set_each(range(10))
    assert pair.stat("limit_bytes") == LIMIT and pair.stat("daily_limit_bytes") == 10**9
    assert pair.stat("last_day_written_bytes") == pair.stat("device_written_bytes") > 10 * 6 * SLOT_BYTES
    assert pair.stat("size_bytes") == sum(store.stats()["size_bytes"] for store in pair.stores)
    assert pair.stat("leftover_bytes") == 0, "the folder of the other store is none"


def test_leftovers_count_once_and_go_first(tmp_path: Path, start):
    pool = FakePages(64, num_layers=5)
    old = HiCacheFile(tmp_path / "root", "old", pool, BLOCK_TOKENS, FileStoreOptions(segment_bytes=SEGMENT_BYTES))
    assert old.set(keys_of(*range(14)), np.arange(56, dtype=np.int32)) == 14
    old.close()
    left = bytes_on_disk(tmp_path)
    pair = start()
    pair.set_each([0])
    assert left <= pair.stat("leftover_bytes") < 1.1 * left and pair.stat("evicted_blocks") == 0
    pair.set_each(range(1, 50))
    assert pair.stat("leftover_bytes") == 0 == pair.stat("evicted_blocks")
    pair.set_each(range(50, 60))
    assert pair.stat("evicted_blocks") > 0


def test_the_daily_limit_is_one(start):
    pair = start(daily_write_bytes=10 * (SLOT_BYTES + WINDOWED_SLOT_BYTES))
    numbers = iter(range(100))
    while not pair.stat("refused_blocks"):
        pair.set(keys_of(next(numbers)))
    written = pair.stat("last_day_written_bytes")
    assert pair.stat("daily_limit_bytes") <= written < pair.stat("daily_limit_bytes") + 2 * WINDOWED_SLOT_BYTES
    before = [store.stats()["refused_blocks"] for store in pair.stores]
    assert pair.set(keys_of(200)) == 0 and pair.of_windows.set(keys_of(200), pair.frames(1, ALL)) == 0
    assert [store.stats()["refused_blocks"] for store in pair.stores] == [n + 1 for n in before]
    pair.now += 24 * 3600.0
    pair.set_each([200])


def test_a_limit_has_room_for_one_block_of_each(start):
    least = SLOT_BYTES + WINDOWED_SLOT_BYTES + 2 * DATA
    with pytest.raises(StoreError, match=f"less than one block of this model with its header .{least / 1e9:g}"):
        start(limit_bytes=least - 1)
    pair = start(limit_bytes=least)
    for number in range(3):
        pair.set_each([number])
        assert pair.get(keys_of(number)) == 1
    assert pair.store.exists(keys_of(0)) == 0


def test_a_smaller_limit_holds_once_both_are_open(start):
    pair = start(real_time=True)
    pair.set_each(range(45))
    pair.set_each(range(100, 140), ends=())
    pair.store.close()
    again = start(real_time=True, limit_bytes=LIMIT // 4)
    again.check()
    assert again.full.exists(keys_of(*range(100, 140))) == 40 and again.of_windows.exists(keys_of(0)) == 0


def test_room_may_be_asked_for_while_the_stores_are_closed(start):
    """By the scheduler's thread, as the storage's detaches them."""
    pair = start()
    for store in pair.stores:
        store.close()
        assert isinstance(pair.full.has_room, bool)


def test_room_is_that_of_both(start):
    pair = start(is_exclusive=True)
    numbers = itertools.count()
    while pair.store.has_room:
        pair.set_each([next(numbers)], ends=())
    assert pair.full.stats()["evicted_blocks"] == 0 and not pair.of_windows.has_room
    assert pair.store.clear() and pair.store.has_room


# -- other processes ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lock_of(store: HiCacheFile) -> Iterator[None]:
    """Another process has the lock of the folder."""
    fd = os.open(store._folder.path / "changes", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def test_one_that_keeps_the_other_folder_locked_delays_little(start, monkeypatch: pytest.MonkeyPatch):
    pair = start()
    monkeypatch.setattr(shared_changes, "_WAITS_S", (0.001,) * 3)
    pair.set_each(range(45))
    with lock_of(pair.of_windows):
        pair.set_each(range(100, 200), ends=())
        assert pair.of_windows.stats()["lock_timeouts"] == 1, "then it is not asked for a while"
        assert pair.of_windows.stats()["evicted_blocks"] == 0 < pair.full.stats()["evicted_blocks"]
        pair.now += WRITE_PAUSE_S
        pair.set_each(range(200, 260), ends=())
        assert pair.of_windows.stats()["lock_timeouts"] == 2
    pair.now += WRITE_PAUSE_S
    pair.set_each(range(300, 340), ends=())
    assert pair.of_windows.stats()["evicted_blocks"] > 0 and pair.no_errors()


def test_what_another_process_has_stored_in_the_other_folder_counts(start):
    a, b = start(rewrite_share=0.0), start(rewrite_share=0.0)
    b.set_each([0], ends=())
    a.set_each(range(100, 140))
    for number in itertools.count(200):
        if not a.full._room.fits(SLOT_BYTES + DATA):
            break
        a.set_each([number], ends=())
    assert a.stat("evicted_blocks") == 0
    b.set_each([1, 2], ends=())
    assert b.stat("evicted_blocks") > 0


def test_of_what_others_write_to_nothing_goes(start):
    a, b = start(), start()
    b.set_each(range(3))
    a.set_each(range(100, 400), ends=())
    assert b.get(keys_of(0, 1, 2)) == 3 and a.full.stats()["evicted_blocks"] > 0


def test_two_that_claim_the_same_room_in_different_folders_stay_within_the_limit(start):
    # Each block in a segment of its own, and room for one of either kind.
    limit = 6 * (SLOT_BYTES + DATA) + WINDOWED_SLOT_BYTES + DATA + SLOT_BYTES
    a, b = start(limit_bytes=limit, rewrite_share=0.0), start(limit_bytes=limit, rewrite_share=0.0)
    a.set_each(range(6), ends=())
    other = keys_of(1000)

    def store_other() -> None:
        frames = b.frames(1, ALL)
        b.pools[1].put(other, frames)
        b.of_windows.set(other, frames)

    def meanwhile(tenant: bytes, keys: Sequence[bytes]) -> None:
        a.full._writer.claiming = claiming
        process = threading.Thread(target=store_other)
        process.start()
        process.join()
        assert other[0] in b.of_windows
        claiming(tenant, keys)

    claiming, a.full._writer.claiming = a.full._writer.claiming, meanwhile
    keys = keys_of(2000)
    assert a.set(keys, ends=()) == 0 and not a.full._index.claims
    assert b.full.exists(keys) == 0 and a.full._room.size_bytes <= limit and b.full._room.size_bytes <= limit
    a.check()
    assert a.set(keys, ends=()) == 1 == b.full.exists(keys) and a.no_errors() and b.no_errors()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(8))
def test_random_calls_of_several_on_one_folder(start, tmp_path: Path, seed: int):
    print(f"seed {seed}")
    rng = random.Random(seed)
    options = {
        "limit_bytes": rng.choice((LIMIT // 4, LIMIT // 2)),
        "rewrite_share": rng.choice((0.0, 0.25, 1.0)),
        "is_exclusive": rng.random() < 0.5,
        "real_time": True,
    }
    pairs = [start(page_size=rng.choice((16, 64)), **options) for _ in range(3)]
    num_read = 0
    for _ in range(120):
        i = rng.randrange(len(pairs))
        pair = pairs[i]
        first = 12 * (rng.randrange(4) if rng.random() < 0.5 else rng.randrange(60))
        keys = keys_of(*range(first, first + rng.randint(1, 12)))
        ends = range(rng.choice((0, len(keys) - 1, len(keys))), len(keys))
        what = rng.random()
        if what < 0.5:
            for store in pair.stores:
                store.exists(keys)  # others may have evicted them
            before = pair.stored(keys)
            count = pair.set(keys, ends)
            assert all(old <= new for old, new in zip(before, pair.stored(keys)))
            assert pair.get(keys, ends) == count
        elif what < 0.8:
            num_read += pair.get(keys, ends)
        elif what < 0.9:
            pair.store.touch(keys)
        elif what < 0.95:
            pair.now += 20.0
        else:
            (pair.store.close if rng.random() < 0.5 else pair.die)()
            pairs[i] = start(page_size=rng.choice((16, 64)), **options)
        pair = pairs[i]
        pair.check()
        assert pair.no_errors() and pair.stat("lock_timeouts") == 0
    assert num_read


def test_several_at_once(start, tmp_path: Path):
    pairs = [start(real_time=True, limit_bytes=LIMIT // 4, rewrite_share=0.0) for _ in range(3)]
    failures: list[BaseException] = []

    def work(pair: Pair, seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                first = 12 * rng.randrange(40)
                keys = keys_of(*range(first, first + rng.randint(1, 12)))
                ends = range(rng.choice((0, len(keys) - 1, len(keys))), len(keys))
                if rng.random() < 0.7:
                    pair.set(keys, ends)
                else:
                    pair.get(keys, ends)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(pair, seed)) for seed, pair in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for pair in pairs:
        pair.check()
        assert pair.no_errors() and pair.stat("lock_timeouts") == 0 < pair.stat("evicted_blocks")
