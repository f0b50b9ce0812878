"""`Origin`, where the bytes of a write come from; and the pages of an engine in shared memory as one. tcp_channel.py
has the one of an engine on another machine. Where a fetch goes is the data plane's (csrc/kvplane/destinations.c).

A byte is named by its block in the operation and its offset in that block.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class OriginLostError(Exception):
    """The bytes do not come: the engine has gone, is silent, or has given the write up."""


class Origin(Protocol):
    def read(self, block: int, start: int, end: int, buffer: np.ndarray) -> np.ndarray:
        """Bytes start..end of a block, (end - start,) uint8, for the calling thread until it reads again. buffer:
        memory for them, which need not be used. Pieces of a block are read from its front on, each once. Raises
        OriginLostError."""
        ...


class PoolPages:
    """Pages of a pool in this process's memory, for one operation. memory: (num_pages * page_bytes,) uint8. pages:
    (blocks, pages per block) int32."""

    def __init__(self, memory: np.ndarray, page_bytes: int, pages: np.ndarray) -> None:
        self.pages = pages
        self._memory = memory
        self._page_bytes = page_bytes

    def read(self, block: int, start: int, end: int, buffer: np.ndarray) -> np.ndarray:
        runs = self.runs(block, start, end)
        return runs[0] if len(runs) == 1 else np.concatenate(runs, out=buffer[: end - start])

    def runs(self, block: int, start: int, end: int) -> list[np.ndarray]:
        """Where bytes start..end of a block are, in order: views, of which adjacent ones are merged."""
        page_bytes = self._page_bytes
        first, last = start // page_bytes, (end - 1) // page_bytes
        here = self.pages[block, first : last + 1].astype(np.int64)
        breaks = np.flatnonzero(np.diff(here) != 1) + 1
        begins = np.concatenate(([0], breaks))
        ends = np.concatenate((breaks, [len(here)]))
        offsets, sizes = here[begins] * page_bytes, (ends - begins) * page_bytes
        skipped = start - first * page_bytes
        offsets[0] += skipped
        sizes[0] -= skipped
        sizes[-1] -= (last + 1) * page_bytes - end
        return [self._memory[o : o + n] for o, n in zip(offsets.tolist(), sizes.tolist())]
