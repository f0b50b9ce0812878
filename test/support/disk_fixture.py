"""A disk tier in a folder of its own, beside a host pool, for tests of `HiCacheFile`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile
from sglang.srt.mem_cache.storage.file.segment import ALIGNMENT, ENTRY_BYTES
from support.fake_pages import BLOCK_TOKENS, FakePages, keys_of

NUM_BLOCKS = 32
# Of the default pool: 16 KiB per block; header and table.
SLOT_BYTES = BLOCK_TOKENS * 256
DATA = 2 * ALIGNMENT


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Disk:
    """A root folder, a host pool of NUM_BLOCKS blocks with scattered pages, and the store that is open on them."""

    def __init__(self, root: Path, **pool: object) -> None:
        self.root = root
        options = {"page_size": 16, **pool}
        self.pool = FakePages(2 * NUM_BLOCKS * BLOCK_TOKENS // options["page_size"], **options)  # type: ignore[arg-type, operator]
        pages = np.random.default_rng(0).permutation(len(self.pool.kv))[: NUM_BLOCKS * self.pool.pages_per_block]
        # The first blocks lie in runs, the others are scattered.
        pages[: 8 * self.pool.pages_per_block].sort()
        self.pages = pages.astype(np.int32).reshape(NUM_BLOCKS, -1)
        self.clock = Clock()
        self.stores: list[HiCacheFile] = []

    def open(self, namespace: str = "model A", **options: object) -> HiCacheFile:
        options = {"segment_bytes": DATA + 8 * (SLOT_BYTES + ENTRY_BYTES), **options}
        settings = FileStoreOptions(**options)  # type: ignore[arg-type]
        store = HiCacheFile(self.root, namespace, self.pool, BLOCK_TOKENS, settings, self.clock)
        self.stores.append(store)
        return store

    def set(self, store: HiCacheFile, keys: list[bytes]) -> int:
        frames = self.pages[: len(keys)].reshape(-1)
        self.pool.put(keys, frames)
        return store.set(keys, frames)

    def get(self, store: HiCacheFile, keys: list[bytes]) -> int:
        """Into pages that held something else; what is counted must be right."""
        self.pool.kv[:] = 0xAA
        count = store.get(keys, self.pages[: len(keys)].reshape(-1))
        for key, pages in zip(keys[:count], self.pages):
            assert self.pool.holds(key, pages), f"{key.hex()} has other bytes than were stored"
        store.check_invariants()
        return count

    @property
    def folder(self) -> Path:
        (folder,) = [p for p in self.root.iterdir() if p.is_dir()]
        return folder

    def segments(self) -> list[Path]:
        return sorted(self.folder.glob("*.kv"))

    def num_open(self) -> int:
        """Descriptors of segments that this process has; others come and go beside them."""
        count = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
                count += path.startswith(str(self.folder)) and path.endswith(".kv")
        return count


def fill(disk: Disk) -> tuple[HiCacheFile, list[list[bytes]]]:
    """A full exclusive store without room for another block, and groups of four blocks that it holds."""
    store = disk.open(limit_bytes=8 * (6 * SLOT_BYTES + DATA), is_exclusive=True)
    keys: list[bytes] = []
    while store._writer.fits(SLOT_BYTES + (DATA if store._index.active is None else 0)):
        keys += keys_of(len(keys))
        assert disk.set(store, keys[-1:]) == 1
        if store.has_room:
            assert disk.get(store, keys[:1]) == 1 and not store._index.num_spare
    assert not store.has_room and store.stats()["evicted_blocks"] == 0
    return store, [keys[i : i + 4] for i in range(0, len(keys) - 3, 4)]


def flip(path: Path, offset: int) -> None:
    """One bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def swap(path: Path, a: int, b: int, size: int) -> None:
    """Two parts of a file."""
    data = bytearray(path.read_bytes())
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    path.write_bytes(data)
