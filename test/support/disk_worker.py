"""One of several processes that share a folder of the disk tier: random calls, each checked against what a block must
hold.

    python -m support.disk_worker '{"root": "/there", "seed": 1, ...}'

Ends with a line of JSON, the store's stats, and what it has counted itself; with an error where a block has other
bytes than those that belong to its key. May be killed and stopped at any moment.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile
from support.fake_pages import BLOCK_TOKENS, FakePages, keys_of

LONGEST = 6


@dataclass(frozen=True)
class WorkerConfig:
    root: str
    seed: int
    page_size: int
    limit_bytes: int
    segment_bytes: int
    num_keys: int
    num_calls: int
    is_exclusive: bool
    # Of calls; the others read.
    write_share: float
    rewrite_share: float

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def pool_of(page_size: int, page_first: bool = True) -> FakePages:
    return FakePages(2 * LONGEST * BLOCK_TOKENS // page_size, page_size, page_first=page_first)


def open_store(config: WorkerConfig, pool: FakePages, calls: list[int]) -> HiCacheFile:
    """calls: how many were made, the store's seconds: a pause is over after so many calls."""
    options = FileStoreOptions(config.limit_bytes, config.segment_bytes, config.is_exclusive, config.rewrite_share)
    return HiCacheFile(Path(config.root), "model", pool, BLOCK_TOKENS, options, lambda: float(calls[0]))


def work(config: WorkerConfig) -> dict[str, int]:
    rng = random.Random(config.seed)
    pool = pool_of(config.page_size, page_first=rng.random() < 0.5)
    calls = [0]
    store = open_store(config, pool, calls)
    found = stored = 0
    print("ready", flush=True)
    for calls[0] in range(config.num_calls):
        start = rng.randrange(config.num_keys)
        keys = keys_of(*range(start, min(config.num_keys, start + rng.randint(1, LONGEST))))
        frames = np.array(rng.sample(range(len(pool.kv)), len(keys) * pool.pages_per_block), np.int32)
        what = rng.random()
        if what < config.write_share:
            pool.put(keys, frames)
            stored += store.set(keys, frames)
        elif what < config.write_share + 0.05:
            store.touch(keys)
        else:
            pool.kv[:] = 0xAA
            count = store.get(keys, frames)
            for key, pages in zip(keys[:count], frames.reshape(len(keys), -1)):
                assert pool.holds(key, pages), f"{key.hex()} has other bytes than were stored"
            found += count
    store.check_invariants()
    stats = store.stats()
    store.close()
    return {"found": found, "stored": stored, **stats}


if __name__ == "__main__":
    print(json.dumps(work(WorkerConfig(**json.loads(sys.argv[1])))), flush=True)
