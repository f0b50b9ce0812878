"""`Destination`, where a fetch is delivered, and `Origin`, where the bytes of a write come from; and the engine's
pages in shared memory as both.

A byte is named by its block in the operation and its offset in that block. Only a destination knows where in an
engine's memory that is. tcp_channel.py has the ones of an engine on another machine; docs/design/remote.md lists what
one of a SmartNIC has to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Destination(Protocol):
    """Called from several threads at once, for different bytes. can_stall: whether the other side decides when what
    was submitted is delivered."""

    can_stall: bool

    def window(self, block: int, start: int, end: int) -> np.ndarray | None:
        """Memory, (end - start,) uint8, that becomes bytes start..end of the block without a delivery. None where
        there is none: the caller fills a slot and submits it."""
        ...

    def submit(self, block: int, start: int, data: np.ndarray, on_end: Callable[[bool], None]) -> None:
        """Deliver data, (n,) uint8, to the block from byte start on. Data stays as it is until on_end(whether it was
        delivered), which follows from any thread, perhaps before this returns."""
        ...

    def give_up(self) -> None:
        """What was submitted need not be delivered any more. Its on_end follows all the same."""
        ...


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

    can_stall = False

    def __init__(self, memory: np.ndarray, page_bytes: int, pages: np.ndarray) -> None:
        self.pages = pages
        self._memory = memory
        self._page_bytes = page_bytes

    def window(self, block: int, start: int, end: int) -> np.ndarray | None:
        runs = self.runs(block, start, end)
        return runs[0] if len(runs) == 1 else None

    def submit(self, block: int, start: int, data: np.ndarray, on_end: Callable[[bool], None]) -> None:
        self.write(block, start, data)
        on_end(True)

    def give_up(self) -> None:
        pass

    def write(self, block: int, start: int, data: np.ndarray) -> None:
        at = 0
        for run in self.runs(block, start, start + len(data)):
            np.copyto(run, data[at : at + len(run)])
            at += len(run)

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
