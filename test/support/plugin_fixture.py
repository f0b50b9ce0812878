"""A host pool as plugins' stores need it, and blocks whose bytes follow from their keys."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from sglang.srt.mem_cache.page_layout import PageLayout


class FakePool:
    """Page-first, and a dictionary's worth of behaviour."""

    def __init__(self, num_pages: int = 256, page_size: int = 16, dtype: torch.dtype = torch.bfloat16) -> None:
        self.page_layout = PageLayout.kv(page_size, 2, 2, 4, dtype)
        self.page_size, self.page_bytes = page_size, self.page_layout.page_bytes
        self.bytes = np.zeros((num_pages, self.page_bytes), np.uint8)

    def copy_out(self, frames: np.ndarray, out: np.ndarray) -> None:
        assert out.flags.c_contiguous and out.nbytes == len(frames) * self.page_bytes
        out.reshape(len(frames), -1)[:] = self.bytes[frames]

    def copy_in(self, frames: np.ndarray, data: np.ndarray) -> None:
        self.bytes[frames] = data.reshape(len(frames), self.page_bytes)


def block_keys(num_blocks: int, salt: str = "") -> list[bytes]:
    return [hashlib.blake2b(f"{salt}{i}".encode(), digest_size=16).digest() for i in range(num_blocks)]


def bytes_of_block(key: bytes, size_bytes: int) -> np.ndarray:
    """All byte values occur, so also those that are NaN as floats."""
    rng = np.random.default_rng(int.from_bytes(key, "little"))
    return rng.integers(0, 256, size_bytes, np.uint8)


class Blocks:
    """Blocks in a pool: written at the pages of its first half, read back into those of the second."""

    def __init__(self, pool: FakePool, block_tokens: int) -> None:
        self.pool = pool
        self.per_block = block_tokens // pool.page_size

    def frames(self, num_blocks: int, second_half: bool = False) -> np.ndarray:
        start = len(self.pool.bytes) // 2 if second_half else 0
        n = num_blocks * self.per_block
        assert n <= len(self.pool.bytes) // 2
        # Pages of a block lie anywhere.
        return np.arange(start + n - 1, start - 1, -1, dtype=np.int32)

    def store(self, store, keys: list[bytes]) -> int:
        frames = self.frames(len(keys))
        for key, pages in zip(keys, frames.reshape(len(keys), -1)):
            self.pool.copy_in(pages, bytes_of_block(key, self.per_block * self.pool.page_bytes))
        return store.set(keys, frames)

    def load(self, store, keys: list[bytes]) -> int:
        """How many come; those have the right bytes."""
        frames = self.frames(len(keys), second_half=True)
        self.pool.bytes[frames] = 0x55
        count = store.get(keys, frames)
        for key, pages in list(zip(keys, frames.reshape(len(keys), -1)))[:count]:
            expected = bytes_of_block(key, self.per_block * self.pool.page_bytes)
            assert (self.pool.bytes[pages].reshape(-1) == expected).all(), "wrong bytes under the right key"
        return count
