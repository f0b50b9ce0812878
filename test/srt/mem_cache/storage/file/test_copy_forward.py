"""Hot blocks are copied out of a segment before it goes: which, how many, and what is left of them after a kill."""

from __future__ import annotations

import errno
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang.srt.mem_cache.storage.file.eviction import Candidates, Victim, choose_victim
from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile
from sglang.srt.mem_cache.storage.file.segment import ALIGNMENT, ENTRY_BYTES, SegmentLayout
from sglang.srt.mem_cache.storage.file.segment_index import Segment, number_of
from sglang.srt.mem_cache.storage.file.write_budget import WriteBudget
from support.fake_pages import BLOCK_TOKENS, FakePages, keys_of

SLOT_BYTES = BLOCK_TOKENS * 256
SLOTS = 20
SEGMENT_BYTES = 2 * ALIGNMENT + SLOTS * (SLOT_BYTES + ENTRY_BYTES)
LIMIT = 8 * SEGMENT_BYTES
# With the default share.
MAX_COPIES = 4
# Of a conversation, blocks: as hot as can be copied.
HOT = keys_of(0, 1, 2)
COLD = 1000
TENANT = b"a tenant"


class Killed(BaseException):
    pass


class Process:
    """A store with a host pool of its own."""

    def __init__(self, root: Path, page_size: int = 16, real_time: bool = False, **options: object) -> None:
        self.pool = FakePages(32 * BLOCK_TOKENS // page_size, page_size)
        self.now = 0.0
        settings = FileStoreOptions(**{"limit_bytes": LIMIT, "segment_bytes": SEGMENT_BYTES, **options})  # type: ignore[arg-type]
        self.store = HiCacheFile(root, "model", self.pool, BLOCK_TOKENS, settings, lambda: self.now)
        self.cold = itertools.count(COLD)
        if not real_time:
            # Later than the times of files, so that no other process seems to use them.
            self.store._index._wall_ns = itertools.count(time.time_ns() + 10**12, 10**6).__next__

    def frames(self, keys: list[bytes]) -> np.ndarray:
        return np.arange(len(keys) * self.pool.pages_per_block, dtype=np.int32)

    def set(self, keys: list[bytes], tenant: bytes = b"") -> int:
        self.pool.put(keys, self.frames(keys))
        return self.store.set(keys, self.frames(keys), tenant)

    def get(self, keys: list[bytes]) -> int:
        self.pool.kv[:] = 0xAA
        count = self.store.get(keys, self.frames(keys))
        for key, pages in zip(keys[:count], self.frames(keys).reshape(len(keys), -1)):
            assert self.pool.holds(key, pages)
        self.store.check_invariants()
        return count

    def set_cold(self, num_blocks: int) -> None:
        """Prompts that are used once."""
        for number in itertools.islice(self.cold, num_blocks):
            assert self.set(keys_of(number)) == 1

    def fill(self) -> None:
        """Until the next segment has to go, with the hot blocks in the first one."""
        self.set(HOT, TENANT)
        while self.store._writer.fits(SEGMENT_BYTES) or self.store._index.active is not None:
            self.set_cold(1)
        assert {number_of(self.store._index.places[key]) for key in HOT} == {1}
        assert self.store.stats()["evicted_blocks"] == 0

    def evict_first(self) -> None:
        """The first segment, and perhaps others that are not much younger and have no hot blocks."""
        while 1 in self.store._index.segments:
            self.set_cold(1)

    def use_hot(self) -> None:
        assert self.store.touch(HOT) == len(HOT)

    def stat(self, name: str) -> int:
        return self.store.stats()[name]

    def die(self) -> None:
        """As a killed process: what it has open is closed, and nothing else happens."""
        if (turn := self.store._sync.changes._turn).locked():
            turn.release()
        self.store._writer.close()
        for fd in self.store._index.clear():
            os.close(fd)
        self.store._sync.changes.close()
        self.store._folder.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(folder: str = "root", **options: object) -> Process:
        started.append(Process(tmp_path / folder, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.store.close()


def bytes_on_disk(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*.kv"))


# -- what stays -----------------------------------------------------------------------------------------------------


def test_hot_blocks_outlive_their_segments_and_cold_ones_go(start, tmp_path: Path):
    a = start()
    a.fill()
    for _ in range(30):
        a.use_hot()
        a.set_cold(SLOTS)
        assert bytes_on_disk(tmp_path) <= LIMIT
    assert a.get(HOT) == len(HOT)
    assert a.store.exists(keys_of(COLD)) == 0, "their neighbours have gone"
    written, copied = a.stat("written_bytes"), a.stat("copied_bytes")
    assert 0 < copied == a.stat("copied_blocks") * SLOT_BYTES < 0.25 * written
    assert copied < 0.06 * written, "three blocks a time, and not each time"
    assert a.stat("read_errors") == a.stat("write_errors") == 0
    a.store.close()
    b = start()
    assert b.get(HOT) == len(HOT)


def test_growing_conversations_among_cold_prompts_stay(start):
    """Their blocks lie in many segments, each of which holds cold blocks for the most part."""

    def found(process: Process) -> float:
        talks: list[list[bytes]] = [[] for _ in range(4)]
        numbers = itertools.count(0)
        num_found = num_asked = 0
        for turn in range(100):
            talk = talks[turn % len(talks)]
            if len(talk) == 8:
                talk.clear()
            if turn > 40:
                num_asked += len(talk)
                num_found += process.store.touch(talk)
            talk.extend(keys_of(next(numbers)))
            process.set(talk)
            process.set_cold(10)
        return num_found / num_asked

    assert found(start()) > 0.95
    assert found(start("other", rewrite_share=0.0)) < 0.7


def test_nothing_is_copied_where_it_is_turned_off(start):
    a = start(rewrite_share=0.0)
    a.fill()
    for _ in range(10):
        a.use_hot()
        a.set_cold(SLOTS)
    assert a.stat("copied_blocks") == a.stat("copied_bytes") == 0
    assert a.get(HOT) == len(HOT), "their segment was used"


def test_copies_stay_within_their_share_and_fronts_go_first(start):
    a = start()
    prompt = keys_of(*range(16))
    a.set(prompt)
    a.set_cold(8 * SLOTS)
    for _ in range(20):
        a.store.touch(prompt)
        a.set_cold(SLOTS)
        left = [key in a.store._index for key in prompt]
        assert left == sorted(left, reverse=True), "the end goes before the front"
        assert a.stat("copied_bytes") <= 0.25 * a.stat("written_bytes")


@pytest.mark.parametrize("copy_blocks", [1, 100])
def test_a_damaged_block_is_not_copied(start, tmp_path: Path, copy_blocks: int):
    """Those behind it are, however many are copied at a time."""
    a = start()
    a.store._files.copy_blocks = copy_blocks
    a.fill()
    path = a.store._index.segments[1].path
    stat = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(a.store._files.layout.slot_offset(1) + 7)
        file.write(b"damaged")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    a.use_hot()
    a.evict_first()
    assert not os.path.exists(path)
    assert [a.store.exists([key]) for key in HOT] == [1, 0, 1]
    assert a.stat("read_errors") == 1 and a.stat("copied_blocks") == 2
    assert a.set(HOT) == a.get(HOT) == len(HOT)


@pytest.mark.parametrize(("call", "code"), [("write_copies", errno.ENOSPC), ("open_to_read", errno.EIO)])
def test_a_segment_whose_blocks_cannot_be_copied_goes_without(start, call: str, code: int):
    a = start()
    a.fill()
    a.use_hot()

    def fail(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a.store._files, call, fail)
        a.evict_first()
    assert a.stat("copied_blocks") == a.stat("write_errors") == 0
    assert a.stat("read_errors") == (len(HOT) if call == "open_to_read" else 0)
    assert a.set(HOT) == a.get(HOT) == len(HOT)


def test_a_write_that_fails_while_blocks_are_copied_ends_the_call(start):
    a = start()
    a.fill()
    a.use_hot()

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a.store._files, "write_copies", fail)
        while not a.stat("write_errors"):
            a.set(keys_of(next(a.cold)))
    assert a.get(HOT) == len(HOT), "they are where they were"
    a.now += 60.0
    a.evict_first()
    assert a.get(HOT) == len(HOT) and a.stat("copied_blocks") == len(HOT)


# -- several processes, and kills -----------------------------------------------------------------------------------


STEPS = {
    "before they are read": ("_files", "read_copies", False),
    "after they are read": ("_files", "read_copies", True),
    "before the claim": ("_files", "claim", False),
    "after the claim": ("_files", "claim", True),
    "before they are written": ("_files", "write_copies", False),
    "after they are written": ("_files", "write_copies", True),
    "before they are complete": ("_files", "complete", False),
    "after they are complete": ("_files", "complete", True),
    "before others are told": ("_sync", "ring_stored", False),
    "after others are told": ("_sync", "ring_stored", True),
    "before the old segment is deleted": ("_writer", "unlink", False),
    "after the old segment is deleted": ("_writer", "unlink", True),
}


def arm(process: Process, part: str, name: str, is_after: bool) -> None:
    """Kill it when it next copies."""
    owner = getattr(process.store, part)
    call = getattr(owner, name)
    copies = process.store._writer._copy_some

    def die(*args: object) -> object:
        if is_after:
            call(*args)
        raise Killed

    def copy(*args: object) -> int:
        setattr(owner, name, die)
        return copies(*args)  # type: ignore[arg-type]

    process.store._writer._copy_some = copy  # type: ignore[method-assign]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", STEPS)
def test_a_process_killed_while_it_copies_loses_nothing(start, tmp_path: Path, step: str):
    a, b = start(), start()
    a.fill()
    a.use_hot()
    assert b.get(HOT) == len(HOT)
    arm(a, *STEPS[step])
    with pytest.raises(Killed):
        a.evict_first()
    assert b.get(HOT) == len(HOT), "while it hangs there"
    a.die()
    assert b.get(HOT) == len(HOT)
    c = start()
    for process in (b, c):
        process.cold = itertools.count(COLD + 1000 + id(process))
        for _ in range(12):
            process.use_hot()
            process.set_cold(SLOTS)
            assert bytes_on_disk(tmp_path) <= LIMIT
        assert b.get(HOT) == c.get(HOT) == len(HOT)
        assert process.stat("read_errors") == process.stat("write_errors") == 0
        assert process.stat("copied_blocks") > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_calls_of_several_that_are_killed_while_they_copy(start, tmp_path: Path, seed: int):
    print(f"seed {seed}")
    rng = random.Random(seed)
    processes = [start(), start()]
    num_copied = num_killed = 0
    for _ in range(300):
        i = rng.randrange(len(processes))
        process = processes[i]
        first = 8 * (rng.randrange(6) if rng.random() < 0.4 else rng.randrange(6, 1000))
        keys = keys_of(*range(first, first + rng.randint(1, 8)))
        part, name, is_after = STEPS[rng.choice(list(STEPS))]
        if rng.random() < 0.03:
            arm(process, part, name, is_after)
        try:
            if first >= 48 or rng.random() < 0.3:
                count = process.set(keys)
                assert process.store.exists(keys) == count
            else:
                assert process.get(keys) <= process.store.touch(keys)
            process.store.check_invariants()
        except Killed:
            num_killed += 1
            process.die()
            process = processes[i] = start(rewrite_share=rng.choice((0.25, 1.0)))
        num_copied += process.stat("copied_blocks")
        assert bytes_on_disk(tmp_path) <= LIMIT
        assert process.stat("read_errors") == process.stat("write_errors") == 0
    assert num_copied and num_killed


def test_another_process_finds_copies_at_once_and_reads_a_segment_that_goes(start, monkeypatch: pytest.MonkeyPatch):
    a, b = start(), start()
    a.fill()
    a.use_hot()
    assert b.store.exists(HOT) == len(HOT)
    preadv = os.preadv

    def meanwhile(fd: int, buffers: list[memoryview], at: int) -> int:
        monkeypatch.setattr(os, "preadv", preadv)
        a.evict_first()
        assert a.stat("copied_blocks") == len(HOT) and 1 not in a.store._index.segments
        assert b.store.exists(HOT) == len(HOT)
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", meanwhile)
    assert b.get(HOT) == len(HOT)
    assert b.get(HOT) == len(HOT) and b.stat("read_errors") == 0
    assert {number_of(b.store._index.places[key]) for key in HOT} != {1}


def test_what_another_process_uses_goes_last(start):
    a, b = start(real_time=True), start(real_time=True)
    a.fill()
    assert b.get(HOT) == len(HOT)
    b.now += 100.0
    assert b.store.exists(HOT) == len(HOT), "which a sees at the file"
    a.set_cold(2 * SLOTS)
    assert b.get(HOT) == a.get(HOT) == len(HOT) and 1 in a.store._index.segments


def test_blocks_with_another_page_size_are_not_copied(start):
    a = start()
    a.fill()
    a.store.close()
    b = start(page_size=64)
    for _ in range(10):
        b.use_hot()
        b.set_cold(SLOTS)
    assert b.stat("copied_blocks") == 0 and b.get(HOT) == len(HOT), "their segment was used, and stays"


# -- which segment goes ---------------------------------------------------------------------------------------------


def segment(number: int, uses: list[int]) -> Segment:
    pool = FakePages(4)
    made = Segment(number, "", SegmentLayout(bytes(32), BLOCK_TOKENS, pool.page_layout, len(uses)), 0)
    made.keys = bytearray(16 * len(uses))
    made.uses[:] = uses
    made.live = sum(use > 0 for use in uses)
    made.used_ns = max(uses)
    return made


def choose(segments: list[Segment], max_copies: int = 2) -> Victim:
    victim = choose_victim([Candidates(segments, max_copies, 16)], segments)
    assert victim is not None
    return victim


def test_a_segment_with_few_hot_blocks_goes_before_one_full_of_them():
    full = segment(1, [90, 91, 92, 93])
    mixed = segment(2, [1, 2, 95, 3])
    young = segment(3, [60, 61, 62, 63])
    assert choose([full, mixed, young]) == Victim(mixed, [2])


def test_without_hot_blocks_the_oldest_goes():
    segments = [segment(n, [10 * n + i for i in range(4)]) for n in (3, 1, 2, 4, 5)]
    assert choose(segments) == Victim(segments[1], [])


def test_more_hot_blocks_than_can_be_copied_are_the_last_choice():
    old = segment(1, [1, 97, 98, 99])
    middle = segment(2, [40, 41, 42, 43])
    lowest = segment(3, [2, 3, 4, 50])
    assert choose([old, middle, lowest]).segment is lowest
    assert choose([old, middle, segment(3, [45, 46, 47, 48])]).segment is middle
    assert choose([old]) == Victim(old, [2, 3]), "the front was used last"


def test_where_nothing_can_be_copied_the_least_recently_used_goes():
    first, second = segment(1, [1, 2, 3, 99]), segment(2, [4, 5, 6, 98])
    assert choose([first, second], max_copies=0) == Victim(second, [])


def test_spare_blocks_are_not_hot():
    old = segment(1, [1, 2, 98, 99])
    old.spare = {2}
    assert choose([old]) == Victim(old, [3])


# -- budgets --------------------------------------------------------------------------------------------------------


def test_credit_comes_from_what_is_stored_and_is_bounded():
    budget = WriteBudget(0.25, max_credit_bytes=100)
    assert budget.credit_bytes == 0
    budget.count_stored(200)
    assert budget.credit_bytes == 50
    budget.count_copied(30)
    assert budget.credit_bytes == 20
    budget.count_stored(10_000)
    assert budget.credit_bytes == 100


def test_the_last_day_is_counted_by_hours():
    now = [0.0]
    budget = WriteBudget(daily_bytes=100, clock=lambda: now[0])
    for hour in range(24):
        now[0] = hour * 3600.0
        budget.count_written(4)
    assert budget.stats()["last_day_written_bytes"] == 96 and not budget.is_used_up
    budget.count_written(4)
    assert budget.is_used_up
    now[0] += 3600.0
    assert budget.stats()["last_day_written_bytes"] == 96 and not budget.is_used_up
    now[0] += 100 * 3600.0
    assert budget.stats()["last_day_written_bytes"] == 0 and budget.stats()["device_written_bytes"] == 100


def test_all_writes_are_counted(start, tmp_path: Path):
    a = start()
    assert a.set(keys_of(0)) == 1
    # The header; the claim and the entry, a page of the table each; the payload; the numbers of `changes`.
    ringing = a.stat("device_written_bytes") - (3 * ALIGNMENT + SLOT_BYTES)
    assert a.stat("written_bytes") == SLOT_BYTES and 0 < ringing < 100
    before = a.stat("device_written_bytes")
    assert a.get(keys_of(0)) == a.set(keys_of(0)) == 1
    assert a.stat("device_written_bytes") == before


def test_writes_end_with_the_daily_limit_and_reads_go_on(start, caplog: pytest.LogCaptureFixture):
    a = start(daily_write_bytes=10 * SLOT_BYTES)
    a.set(keys_of(0, 1, 2, 3))
    while not a.stat("refused_blocks"):
        a.set(keys_of(next(a.cold)))
    assert 10 * SLOT_BYTES <= a.stat("last_day_written_bytes") < 12 * SLOT_BYTES
    assert a.set(keys_of(0, 1, 2, 3, 4, 5)) == a.get(keys_of(0, 1, 2, 3, 4)) == 4
    assert a.stat("refused_blocks") == 3 and a.stat("write_errors") == 0
    (line,) = [r.getMessage() for r in caplog.records]
    assert "daily_write_gb" in line
    a.now += 24 * 3600.0
    assert a.set(keys_of(4, 5)) == 2


def test_copies_are_still_their_tenants(start) -> None:
    process = start()
    process.fill()
    process.use_hot()
    process.evict_first()
    assert process.stat("copied_blocks") and process.get(HOT) == len(HOT)
    assert process.store.erase(TENANT) and process.store.exists(HOT) == 0
    process.store.check_invariants()
