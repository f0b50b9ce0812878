"""`PageBuffers`: the memory from which blocks are written and into which they are read.

Owns a scratch buffer for each direction, made when it is first needed. Otherwise that memory is the host pool's own.
One read and one write may be under way at a time.
"""

from __future__ import annotations

import numpy as np

from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.storage.file.page_order import reorder_pages
from sglang.srt.mem_cache.storage.file.segment import ALIGNMENT, pieces
from sglang.srt.mem_cache.storage.host_pages import HostPages


class PageBuffers:
    """Pages are (n, pages per block) frames of the pool, n at most max_blocks; blocks are lists of buffers, whose
    sizes add up to payload_bytes."""

    def __init__(self, pool: HostPages, payload_bytes: int, max_blocks: int) -> None:
        self._pool = pool
        self._payload_bytes = payload_bytes
        self._shape = (max_blocks, payload_bytes)
        self._read_scratch: np.ndarray | None = None
        self._write_scratch: np.ndarray | None = None

    def is_pool_memory(self, pages: np.ndarray) -> bool:
        return self._pool.buffers(pages) is not None

    def for_reading(self, pages: np.ndarray) -> list[list[memoryview]]:
        """Where to read each block to; `deliver` follows."""
        buffers = self._pool.buffers(pages.reshape(-1))
        if buffers is None:
            if self._read_scratch is None:
                self._read_scratch = aligned_empty(*self._shape)
            buffers = [self._read_scratch[: len(pages)].reshape(-1).data]
        return self._blocks(buffers, len(pages))

    def deliver(self, pages: np.ndarray, verified: np.ndarray) -> None:
        """Blocks have been read: the verified ones, (n,) bool, are brought to their pages."""
        if self._read_scratch is not None and verified.any():
            data = self._read_scratch[: len(pages)][verified].reshape(-1, self._pool.page_bytes)
            self._pool.copy_in(pages[verified].reshape(-1), data)

    def for_writing(self, pages: np.ndarray, aligned: bool) -> list[list[memoryview]]:
        """What each block holds. aligned: copied to memory that is aligned for direct writes."""
        buffers = None if aligned else self._pool.buffers(pages.reshape(-1))
        if buffers is None:
            if self._write_scratch is None:
                self._write_scratch = aligned_empty(*self._shape)
            scratch = self._write_scratch[: len(pages)]
            self._pool.copy_out(pages.reshape(-1), scratch.reshape(-1, self._pool.page_bytes))
            buffers = [scratch.reshape(-1).data]
        return self._blocks(buffers, len(pages))

    def _blocks(self, buffers: list[memoryview], num_blocks: int) -> list[list[memoryview]]:
        blocks = pieces(buffers, self._payload_bytes)
        assert len(blocks) == num_blocks and sum(map(len, blocks[-1])) == self._payload_bytes
        return blocks


class OtherPages:
    """As `PageBuffers`, for reading blocks that a pool with another page size wrote: by way of a scratch buffer."""

    def __init__(self, pool: HostPages, of: PageLayout, payload_bytes: int, max_blocks: int) -> None:
        self._pool = pool
        self._of = of
        self._payload_bytes = payload_bytes
        self._scratch = np.empty((max_blocks, payload_bytes), np.uint8)

    def for_reading(self, pages: np.ndarray) -> list[list[memoryview]]:
        return pieces([self._scratch[: len(pages)].reshape(-1).data], self._payload_bytes)

    def deliver(self, pages: np.ndarray, verified: np.ndarray) -> None:
        if verified.any():
            data = reorder_pages(self._scratch[: len(pages)][verified], self._of, self._pool.page_layout)
            self._pool.copy_in(pages[verified].reshape(-1), data.reshape(-1, self._pool.page_bytes))


def aligned_empty(num_rows: int, row_bytes: int) -> np.ndarray:
    memory = np.empty(num_rows * row_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_rows * row_bytes].reshape(num_rows, row_bytes)
