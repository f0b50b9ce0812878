"""`HiCacheFile` beside a plain dict, under random operations; then with damage, failing calls and a limit, where what
it returns need only be right, and stored anew after it was not."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest

from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile
from sglang.srt.mem_cache.storage.file.segment_writer import WRITE_PAUSE_S
from support.fake_pages import BLOCK_TOKENS, FakePages, keys_of

NUM_KEYS = 40
LONGEST = 12


class World:
    def __init__(self, root: Path, seed: int, limit_bytes: int = 0) -> None:
        print(f"seed {seed}")
        self.rng = random.Random(seed)
        self.root, self.limit_bytes = root, limit_bytes
        page_size = self.rng.choice((1, 16, 64))
        self.pool = FakePages(
            3 * LONGEST * BLOCK_TOKENS // page_size,
            page_size,
            token_bytes=self.rng.choice((40, 64)),
            page_first=self.rng.random() < 0.6,
            aligned=self.rng.random() < 0.5,
        )
        self.now = 0.0
        self.store = self.open()

    def open(self) -> HiCacheFile:
        options = FileStoreOptions(
            self.limit_bytes,
            segment_bytes=self.rng.choice((1, 50_000, 150_000)),
            is_exclusive=self.rng.random() < 0.5,
            rewrite_share=self.rng.choice((0.0, 0.25, 1.0)),
        )
        return HiCacheFile(self.root, "m", self.pool, BLOCK_TOKENS, options, lambda: self.now)

    def prompt(self) -> list[bytes]:
        """Neighbours, mostly: prompts share prefixes."""
        start = self.rng.choice((0, 0, self.rng.randrange(NUM_KEYS)))
        numbers = list(range(start, min(NUM_KEYS, start + self.rng.randint(1, LONGEST))))
        if self.rng.random() < 0.2:
            self.rng.shuffle(numbers)
        return keys_of(*numbers)

    def frames(self, keys: list[bytes]) -> np.ndarray:
        num_pages = len(self.pool.kv)
        n = len(keys) * self.pool.pages_per_block
        if self.rng.random() < 0.5:
            start = self.rng.randrange(num_pages - n)
            return np.arange(start, start + n, dtype=np.int32)
        return np.array(self.rng.sample(range(num_pages), n), np.int32)

    def set(self, keys: list[bytes]) -> int:
        frames = self.frames(keys)
        self.pool.put(keys, frames)
        return self.store.set(keys, frames)

    def get(self, keys: list[bytes]) -> int:
        self.pool.kv[:] = 0xAA
        frames = self.frames(keys)
        count = self.store.get(keys, frames)
        for key, pages in zip(keys[:count], frames.reshape(len(keys), -1)):
            assert self.pool.holds(key, pages)
        return count

    def reopen(self) -> None:
        # A killed process closes nothing; the lock goes with its files.
        if self.rng.random() < 0.5:
            self.store.close()
        else:
            die(self.store)
        self.store = self.open()


def die(store: HiCacheFile) -> None:
    store._writer.close()
    store._sync.changes.close()
    store._folder.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_beside_a_dict(tmp_path: Path, seed: int):
    world = World(tmp_path, seed)
    stored: set[bytes] = set()

    def leading(keys: list[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in stored), len(keys))

    for _ in range(80):
        keys = world.prompt()
        what = world.rng.random()
        if what < 0.4:
            assert world.set(keys) == len(keys)
            stored.update(keys)
        elif what < 0.75:
            assert world.get(keys) == leading(keys)
        elif what < 0.9:
            assert world.store.exists(keys) == leading(keys)
        elif what < 0.98:
            world.reopen()
        else:
            world.store.clear()
            stored.clear()
        world.store.check_invariants()
        assert world.store.stats()["blocks"] == len(stored)
    assert world.store.stats()["read_errors"] == world.store.stats()["write_errors"] == 0
    world.store.close()


class Sharer(World):
    """One of several that share a folder."""

    def __init__(self, root: Path, seed: int, clock: list[float]) -> None:
        self.clock = clock
        super().__init__(root, seed)

    def open(self) -> HiCacheFile:
        options = FileStoreOptions(
            segment_bytes=self.rng.choice((1, 50_000, 150_000)), is_exclusive=self.rng.random() < 0.5
        )
        clock = self.clock
        return HiCacheFile(self.root, "m", self.pool, BLOCK_TOKENS, options, lambda: clock[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(200, 208))
def test_several_beside_one_dict(tmp_path: Path, seed: int):
    """What one has stored the others have, at once; each page size."""
    rng = random.Random(seed)
    clock = [0.0]
    sharers = [Sharer(tmp_path, seed + 1000 * i, clock) for i in range(3)]
    for sharer in sharers[1:]:  # blocks of one namespace have tokens of one size
        old = sharers[0].pool
        token_bytes = old.page_bytes // (4 * old.page_size)
        sharer.store.close()
        page_size = rng.choice((1, 16, 32, 64))
        sharer.pool = FakePages(3 * LONGEST * BLOCK_TOKENS // page_size, page_size, token_bytes)
        sharer.store = sharer.open()
    stored: set[bytes] = set()

    def leading(keys: list[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in stored), len(keys))

    for _ in range(150):
        sharer = rng.choice(sharers)
        keys = sharer.prompt()
        what = rng.random()
        clock[0] += rng.choice((0.0, 20.0))
        before = sharer.store.stats()["written_blocks"]
        if what < 0.35:
            assert sharer.set(keys) == len(keys)
            assert sharer.store.stats()["written_blocks"] - before == len(set(keys) - stored), "each block once"
            stored.update(keys)
        elif what < 0.7:
            assert sharer.get(keys) == leading(keys)
        elif what < 0.85:
            assert sharer.store.exists(keys) == leading(keys)
        elif what < 0.9:
            assert sharer.store.touch(keys) == leading(keys)
        elif what < 0.98:
            assert sharer.store.stats()["read_errors"] == sharer.store.stats()["write_errors"] == 0
            sharer.reopen()
        else:
            sharer.store.clear()
            stored.clear()
        sharer.store.exists(keys)
        sharer.store.check_invariants()
        assert sharer.store.stats()["blocks"] == len(stored)
    for sharer in sharers:
        assert sharer.store.stats()["read_errors"] == sharer.store.stats()["write_errors"] == 0
        sharer.store.close()


def damage(world: World) -> None:
    """Change a random file somehow."""
    files = sorted(world.root.rglob("*.kv"))
    if not files:
        return
    path = world.rng.choice(files)
    size = path.stat().st_size
    if not size:
        return
    what = world.rng.random()
    at = world.rng.randrange(size if world.rng.random() < 0.6 else min(size, 4096 + 64 * 8))
    if what < 0.1:
        path.unlink()
    elif what < 0.3:
        os.truncate(path, at)
    else:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(world.rng.randbytes(world.rng.choice((1, 64, 5000))))
            file.truncate(size)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(100, 116))
def test_whatever_happens_to_the_disk_what_comes_back_is_right(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
):
    limit = random.Random(seed).choice((0, 400_000, 1_500_000))
    world = World(tmp_path, seed, limit)
    rng = world.rng
    failing = [0.0]
    calls = {name: getattr(os, name) for name in ("preadv", "pwritev")}

    def faulty(name: str, fd: int, buffers: list[memoryview], at: int) -> int:
        if rng.random() < failing[0]:
            if rng.random() < 0.5:
                code = rng.choice((errno.EIO, errno.ENOSPC))
                raise OSError(code, os.strerror(code))
            buffers = buffers[: rng.randint(1, len(buffers))]
        return calls[name](fd, buffers, at)

    for name in calls:
        monkeypatch.setattr(os, name, lambda fd, buffers, at, name=name: faulty(name, fd, buffers, at))
    for _ in range(80):
        keys = world.prompt()
        failing[0] = rng.choice((0, 0, 0.3))
        what = rng.random()
        if what < 0.4:
            count = world.set(keys)
            assert world.store.exists(keys) == count
        elif what < 0.75:
            count = world.store.exists(keys)
            got = world.get(keys)
            assert got <= count
            assert world.store.exists(keys) == got or failing[0]
        elif what < 0.9:
            damage(world)
        elif what < 0.98:
            world.reopen()
        else:
            world.store.clear()
        world.now += rng.choice((0, WRITE_PAUSE_S))
        world.store.check_invariants()
        if limit:
            assert sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*.kv")) <= limit
    # The disk is well again: whatever was bad is replaced.
    failing[0] = 0
    keys = keys_of(0, 1, 2)
    for _ in range(4):
        world.now += WRITE_PAUSE_S
        world.set(keys)
        if world.get(keys) == 3:
            break
    assert world.get(keys) == 3
    world.reopen()
    world.set(keys)
    assert world.get(keys) == 3
    world.store.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(300, 308))
def test_what_comes_back_to_several_is_right_whatever_happens_to_the_disk(tmp_path: Path, seed: int):
    limit = random.Random(seed).choice((0, 400_000, 1_500_000))
    worlds = [World(tmp_path, seed, limit), World(tmp_path, seed, limit)]
    rng = worlds[0].rng
    for _ in range(120):
        world = rng.choice(worlds)
        keys = world.prompt()
        what = rng.random()
        if what < 0.4:
            count = world.set(keys)
            assert world.store.exists(keys) == count
        elif what < 0.75:
            count = world.store.exists(keys)
            assert world.get(keys) <= count
        elif what < 0.9:
            damage(world)
        else:
            world.reopen()
        world.now += rng.choice((0, WRITE_PAUSE_S))
        world.store.check_invariants()
    keys = keys_of(0, 1, 2)
    for _ in range(4):
        for world in worlds:
            world.now += WRITE_PAUSE_S
            world.set(keys)
            world.get(keys)
    assert [world.get(keys) for world in worlds] == [3, 3]
    for world in worlds:
        world.store.close()
