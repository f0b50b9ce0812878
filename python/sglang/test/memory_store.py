"""`MemoryStore`: a `BlockStore` in a dictionary, with faults injected by seed. The storage tier of the nets."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost


class MemoryStore:
    """blocks: key -> its bytes, page after page as a page-first pool has them. fail_rate: chance per block that it is
    lost when it is read, or not stored, or that a call raises."""

    name = "memory"

    def __init__(self, pool: MHATokenToKVPoolHost, block_tokens: int, seed: int = 0, fail_rate: float = 0.0) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.blocks: dict[bytes, np.ndarray] = {}
        self.is_open = True
        self._pages_per_block = block_tokens // pool.page_size
        self._random = random.Random(seed)
        self._fail_rate = fail_rate

    def exists(self, keys: Sequence[bytes]) -> int:
        self._maybe_raise()
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        self._maybe_raise()
        for i, (key, pages) in enumerate(zip(keys, self._pages_of(keys, frames))):
            if self._fails():
                # What a torn read leaves behind.
                self.pool.copy_in(pages, np.full(len(pages) * self.pool.page_bytes, 0xA5, np.uint8))
                self.blocks.pop(key, None)
            if key not in self.blocks:
                return i
            self.pool.copy_in(pages, self.blocks[key])
        return len(keys)

    def set(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        self._maybe_raise()
        for i, (key, pages) in enumerate(zip(keys, self._pages_of(keys, frames))):
            if key not in self.blocks:
                if self._fails():
                    return i
                self.blocks[key] = np.empty(len(pages) * self.pool.page_bytes, np.uint8)
                self.pool.copy_out(pages, self.blocks[key])
        return len(keys)

    def clear(self) -> None:
        self.blocks.clear()

    def close(self) -> None:
        self.is_open = False

    def stats(self) -> dict[str, int]:
        size = sum(block.nbytes for block in self.blocks.values())
        return {"blocks": len(self.blocks), "size_bytes": size, "limit_bytes": 0, "read_errors": 0, "write_errors": 0}

    def _pages_of(self, keys: Sequence[bytes], frames: np.ndarray) -> np.ndarray:
        assert self.is_open, "the store is closed"
        return frames.reshape(len(keys), self._pages_per_block)

    def _fails(self) -> bool:
        return self._random.random() < self._fail_rate

    def _maybe_raise(self) -> None:
        if self._random.random() < self._fail_rate / 4:
            raise OSError("injected")
