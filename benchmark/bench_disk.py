"""The disk tier: storing and reading 8,192 tokens of a Llama-8B, beside one large write and read of as many bytes.

    python benchmark/bench_disk.py [--tokens N] [--layers N] [--rounds N] [--folder PATH] [--page-sizes 1,32]
    python benchmark/bench_disk.py --start-up 1000000
    python benchmark/bench_disk.py --fronts 800

`HiCacheFile` with a page-first and a layer-first host pool, pages in runs (ascending) or scattered (a random half of
a pool of twice the size). *Piece by piece* is the way of a store that knows only layer-first pools: one read per
page, layer, K and V, without a checksum (Strata, figure 12). The limit is the same bytes in one contiguous buffer and
one file, 16 MiB per call.

Write: until the calls return, when the data lies in the page cache, or on the disk where the store bypasses the page
cache (memory here is aligned as pinned memory is; *page cache*: the same store without the bypass); and with the
fsync of all files. Read cold: after fsync and POSIX_FADV_DONTNEED of all files, which empties the guest's page cache,
not the virtual disk's host. Read warm: once more. Variants take turns within a round, each right after the limit. The
numbers are medians, also of the ratios.

--start-up: opening a store of N blocks whose segments hold tables and no payload (the store reads no payload then).

--fronts: N turns of conversations that grow by a block each, after a shared prompt of 8 blocks, among three prompts
of 12 blocks per turn that are used once, on a disk of 8 segments of 50 blocks; what is found after the first quarter.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import percentiles, print_table, timed, write_json

from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile
from sglang.srt.mem_cache.storage.file.write_budget import DEFAULT_REWRITE_SHARE

BLOCK_TOKENS = 64
CHUNK_BYTES = 16 << 20
HEADS, DIM, ITEM_BYTES = 8, 128, 2
KEY_SEED = np.random.default_rng(0)


class Pool:
    """Host pages in memory that has been written once, in either layout. The layer-first one is seen as (num_pages, 2
    * num_layers, bytes of a page's layer)."""

    def __init__(self, memory: np.ndarray, num_layers: int, page_size: int, layer_first: bool) -> None:
        piece_bytes = page_size * HEADS * DIM * ITEM_BYTES
        self.page_size, self.page_bytes = page_size, 2 * num_layers * piece_bytes
        self.page_layout = PageLayout.kv(page_size, num_layers, HEADS, DIM, "float16")
        self.num_pages = memory.nbytes // self.page_bytes
        self.layer_first = layer_first
        self.flat = memory
        if layer_first:
            self.pages = memory.reshape(2 * num_layers, self.num_pages, piece_bytes).transpose(1, 0, 2)
        else:
            self.pages = memory.reshape(self.num_pages, 2 * num_layers, piece_bytes)

    def buffers(self, frames: np.ndarray) -> list[memoryview] | None:
        if self.layer_first:
            return None
        cuts = np.flatnonzero(np.diff(frames) != 1) + 1
        starts = frames[np.concatenate(([0], cuts))].astype(np.int64) * self.page_bytes
        sizes = np.diff(np.concatenate(([0], cuts, [len(frames)]))) * self.page_bytes
        view = self.flat.data
        return [view[a : a + n] for a, n in zip(starts.tolist(), sizes.tolist())]

    def copy_out(self, frames: np.ndarray, out: np.ndarray) -> None:
        out.reshape(len(frames), *self.pages.shape[1:])[:] = self.pages[frames]

    def copy_in(self, frames: np.ndarray, data: np.ndarray) -> None:
        self.pages[frames] = data.reshape(len(frames), *self.pages.shape[1:])


def memory_of(size_bytes: int) -> np.ndarray:
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    memory.view(np.uint64)[:] = np.arange(size_bytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return memory


def each_file(folder: Path, work: Callable[[int], Any]) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            work(fd)
            os.close(fd)


def fsync(folder: Path) -> None:
    each_file(folder, os.fsync)


def drop_from_page_cache(folder: Path) -> None:
    each_file(folder, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))


def measure(folder: Path, size_bytes: int, write: Callable[[], Any], read: Callable[[], Any]) -> dict[str, float]:
    """GB/s."""
    written = timed(write)
    synced = written + timed(lambda: fsync(folder))
    drop_from_page_cache(folder)
    cold = timed(read)
    warm = timed(read)
    seconds = {"write": written, "write + fsync": synced, "read cold": cold, "read warm": warm}
    return {name: size_bytes / s / 1e9 for name, s in seconds.items()}


class Bench:
    def __init__(self, folder: Path, num_tokens: int, num_layers: int) -> None:
        self.folder, self.num_tokens, self.num_layers = folder, num_tokens, num_layers
        self.size_bytes = num_tokens * 2 * num_layers * HEADS * DIM * ITEM_BYTES
        self.memory = memory_of(2 * self.size_bytes)
        self.keys = [KEY_SEED.bytes(16) for _ in range(num_tokens // BLOCK_TOKENS)]

    def frames(self, pool: Pool, order: str) -> np.ndarray:
        n = self.num_tokens // pool.page_size
        if order == "in runs":
            return np.arange(n, dtype=np.int32)
        return np.random.default_rng(1).permutation(2 * n)[:n].astype(np.int32)

    def limit(self) -> dict[str, float]:
        path = self.folder / "limit"
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        view = self.memory.data

        def over(call: Callable[..., int]) -> None:
            for at in range(0, self.size_bytes, CHUNK_BYTES):
                done = 0
                size = min(CHUNK_BYTES, self.size_bytes - at)
                while done < size:
                    done += call(fd, [view[at + done : at + size]], at + done)

        rates = measure(self.folder, self.size_bytes, lambda: over(os.pwritev), lambda: over(os.preadv))
        os.close(fd)
        path.unlink()
        return rates

    def store(self, page_size: int, layer_first: bool, order: str, direct: bool = True) -> dict[str, float]:
        pool = Pool(self.memory, self.num_layers, page_size, layer_first)
        frames = self.frames(pool, order)
        store = HiCacheFile(self.folder, "bench", pool, BLOCK_TOKENS, FileStoreOptions(4 * self.size_bytes))
        if not direct:
            store._files._direct = False

        def check(count: int) -> None:
            assert count == len(self.keys), store.stats()

        rates = measure(
            self.folder,
            self.size_bytes,
            lambda: check(store.set(self.keys, frames)),
            lambda: check(store.get(self.keys, frames)),
        )
        store.clear()
        store.close()
        return rates

    def piece_by_piece(self, page_size: int, order: str) -> dict[str, float]:
        pool = Pool(self.memory, self.num_layers, page_size, True)
        frames = self.frames(pool, order)
        path = self.folder / "pieces"
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        piece_bytes = pool.pages.shape[2]

        def over(call: Callable[..., int]) -> None:
            at = 0
            for frame in frames.tolist():
                for piece in pool.pages[frame]:
                    at += call(fd, [piece], at)
            assert at == len(frames) * 2 * self.num_layers * piece_bytes

        rates = measure(self.folder, self.size_bytes, lambda: over(os.pwritev), lambda: over(os.preadv))
        os.close(fd)
        path.unlink()
        return rates

    def variants(self, page_sizes: list[int]) -> Iterator[tuple[dict[str, object], Callable[[], dict[str, float]]]]:
        for page_size in page_sizes:
            for order in ("in runs", "scattered"):
                name = {"page size": page_size, "host": "page_first", "pages": order}
                yield name, lambda p=page_size, o=order: self.store(p, False, o)  # type: ignore[misc]
                name = {"page size": page_size, "host": "layer_first", "pages": order}
                yield name, lambda p=page_size, o=order: self.store(p, True, o)  # type: ignore[misc]
            name = {"page size": page_size, "host": "page_first, page cache", "pages": "scattered"}
            yield name, lambda p=page_size: self.store(p, False, "scattered", False)  # type: ignore[misc]
            name = {"page size": page_size, "host": "layer_first, piece by piece", "pages": "scattered"}
            yield name, lambda p=page_size: self.piece_by_piece(p, "scattered")  # type: ignore[misc]


def run(bench: Bench, page_sizes: list[int], rounds: int) -> list[dict[str, object]]:
    """Each variant right after the limit, because the disk may have other work."""
    variants = list(bench.variants(page_sizes))
    samples: list[list[tuple[dict[str, float], dict[str, float]]]] = [[] for _ in variants]
    for _ in range(rounds):
        for taken, (_, work) in zip(samples, variants):
            taken.append((bench.limit(), work()))
    rows: list[dict[str, object]] = []
    for (name, _), taken in zip(variants, samples):
        row = dict(name)
        for what in taken[0][0]:
            row[f"{what} GB/s"] = percentiles([rates[what] for _, rates in taken], 50)[0]
            row[f"{what} ratio"] = percentiles([rates[what] / limit[what] for limit, rates in taken], 50)[0]
        rows.append(row)
    # Instead of a ratio: the 10th and 90th percentile of the limit itself.
    limits = [limit for taken in samples for limit, _ in taken]
    row = {"page size": None, "host": "one buffer", "pages": ""}
    for what in limits[0]:
        low, middle, high = percentiles([limit[what] for limit in limits], 10, 50, 90)
        row[f"{what} GB/s"] = middle
        row[f"{what} ratio"] = f"{low:.2f} to {high:.2f}"
    return [row, *rows]


class OnePage:
    """A pool of the same shape that is never read or written."""

    page_size = BLOCK_TOKENS

    def __init__(self, num_layers: int) -> None:
        self.page_layout = PageLayout.kv(BLOCK_TOKENS, num_layers, HEADS, DIM, "float16")
        self.page_bytes = self.page_layout.page_bytes

    def buffers(self, frames: np.ndarray) -> list[memoryview] | None:
        raise AssertionError

    def copy_out(self, frames: np.ndarray, out: np.ndarray) -> None:
        raise AssertionError

    def copy_in(self, frames: np.ndarray, data: np.ndarray) -> None:
        raise AssertionError


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def start_up(folder: Path, num_blocks: int, num_layers: int) -> list[dict[str, object]]:
    pool, unlimited = OnePage(num_layers), FileStoreOptions(1 << 62)
    empty = HiCacheFile(folder, "start", pool, BLOCK_TOKENS, unlimited)
    layout = empty._files.layout
    directory = empty._folder.path
    empty.close()
    for number, first in enumerate(range(0, num_blocks, layout.num_slots), 1):
        n = min(layout.num_slots, num_blocks - first)
        table = b"".join(layout.entry(slot, KEY_SEED.bytes(16), bytes(16)) for slot in range(n))
        with open(directory / f"{number:08d}.kv", "wb") as file:
            file.write(layout.header() + table)
            file.truncate(layout.size_bytes(n))
    fsync(folder)
    rows: list[dict[str, object]] = []
    for state in ("cold", "warm"):
        if state == "cold":
            drop_from_page_cache(folder)
        before = resident_bytes()
        start = time.perf_counter()
        store = HiCacheFile(folder, "start", pool, BLOCK_TOKENS, unlimited)
        seconds = time.perf_counter() - start
        stats = store.stats()
        assert stats["blocks"] == num_blocks
        rows.append(
            {
                "blocks": num_blocks,
                "segments": stats["segments"],
                "page cache": state,
                "seconds": seconds,
                "MB of memory": (resident_bytes() - before) / 1e6,
            }
        )
        store.close()
        del store
    return rows


class SmallPool:
    """A pool of `num_blocks` blocks of 16 KiB in memory of zeros; a block is one page."""

    page_size = BLOCK_TOKENS

    def __init__(self, num_blocks: int) -> None:
        self.page_layout = PageLayout.kv(BLOCK_TOKENS, 1, 1, 64, "float16")
        self.page_bytes = self.page_layout.page_bytes
        self.memory = memory_of(num_blocks * self.page_bytes)

    def buffers(self, frames: np.ndarray) -> list[memoryview] | None:
        view = self.memory.data
        return [view[f * self.page_bytes : (f + 1) * self.page_bytes] for f in frames.tolist()]

    def copy_out(self, frames: np.ndarray, out: np.ndarray) -> None:
        out[:] = self.memory.reshape(-1, self.page_bytes)[frames]

    def copy_in(self, frames: np.ndarray, data: np.ndarray) -> None:
        self.memory.reshape(-1, self.page_bytes)[frames] = data


def fronts(folder: Path, num_turns: int, rewrite_share: float, num_talks: int) -> dict[str, object]:
    """Conversations that grow by a block per turn, among prompts that are used once, on a disk that is full."""
    pool = SmallPool(32)
    slot_bytes, num_slots = pool.page_bytes, 50
    segment_bytes = num_slots * (slot_bytes + 64) + 3 * 4096
    store = HiCacheFile(
        folder,
        "fronts",
        pool,
        BLOCK_TOKENS,
        FileStoreOptions(8 * segment_bytes, segment_bytes, rewrite_share=rewrite_share),
    )

    def put(keys: list[bytes]) -> None:
        store.set(keys, np.arange(len(keys), dtype=np.int32))

    shared = [KEY_SEED.bytes(16) for _ in range(8)]
    talks: list[list[bytes]] = [[] for _ in range(num_talks)]
    found = {"shared": 0, "talk": 0}
    asked = {"shared": 0, "talk": 0}
    put(shared)
    for turn in range(num_turns):
        talk = talks[turn % len(talks)]
        if len(talk) == 12:
            talk.clear()
        count = store.touch([*shared, *talk])
        if turn > num_turns // 4:  # the disk is full
            for name, keys in (("shared", shared), ("talk", talk)):
                found[name] += min(count, len(keys))
                asked[name] += len(keys)
                count = max(0, count - len(keys))
        talk.append(KEY_SEED.bytes(16))
        put([*shared, *talk])
        for _ in range(3):
            put([KEY_SEED.bytes(16) for _ in range(12)])
    stats = store.stats()
    store.close()
    written = stats["written_bytes"]
    return {
        "conversations": num_talks,
        "rewrite_share": rewrite_share,
        "shared prompt found": found["shared"] / asked["shared"],
        "conversation found": found["talk"] / asked["talk"],
        "copied / stored": stats["copied_bytes"] / written,
        "write amplification": stats["device_written_bytes"] / written,
        "stored blocks": written // slot_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page-sizes", default="1,32")
    parser.add_argument("--folder", default="bench-out/disk")
    parser.add_argument("--start-up", type=int, default=0)
    parser.add_argument("--fronts", type=int, default=0)
    args = parser.parse_args()
    folder = Path(args.folder)
    folder.mkdir(parents=True)
    try:
        if args.start_up:
            rows = start_up(folder, args.start_up, args.layers)
            print_table("Opening a store", rows)
        elif args.fronts:
            rows = [
                fronts(folder / f"{num_talks}-{share}", args.fronts, share, num_talks)
                for num_talks in (4, 6, 8)
                for share in (0.0, DEFAULT_REWRITE_SHARE)
            ]
            print_table("Fronts on a full disk", rows)
        else:
            bench = Bench(folder, args.tokens, args.layers)
            rows = run(bench, [int(p) for p in args.page_sizes.split(",")], args.rounds)
            print_table(f"{args.tokens:,} tokens, {bench.size_bytes / 1e9:.2f} GB", rows)
        write_json("disk_start_up" if args.start_up else "disk_fronts" if args.fronts else "disk", vars(args), rows)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
