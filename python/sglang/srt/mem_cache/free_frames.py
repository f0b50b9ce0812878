"""Three free lists of a pool's frames, which decide which free frame comes next. All are deterministic.

They own which frames are free, and no other state of frames. A `FrameTable` owns its list.

    FreeStack    the frame that was freed last comes first. Cheapest; after a while, frames come scattered.
    FreeBlocks   aligned blocks of frames; whole blocks stay whole. For a pool whose pages leave in blocks: storage
                 and copy engines move a run of adjacent pages as one piece.
    FreeLowest   the lowest free frame comes first. For a pool that lends its end to others: used frames stay low.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

_GROUP = 1024


class FreeList(Protocol):
    def take(self, n: int) -> np.ndarray:
        """Take n frames, (n,) int32. The caller has checked that as many are free."""
        ...

    def give(self, frames: np.ndarray) -> None:
        """Add frames (int32) that are free again."""
        ...

    def remove(self, frames: np.ndarray) -> None:
        """Take these frames (int32), each of which is free."""
        ...

    def frames(self) -> np.ndarray:
        """All free frames, in no order. For checks."""
        ...


class FreeStack:
    def __init__(self, num_pages: int) -> None:
        # The lowest frames lie on top, so that a fresh pool hands out ascending runs.
        self._stack = np.arange(num_pages, dtype=np.int32)[::-1].copy()
        self._height = num_pages

    def take(self, n: int) -> np.ndarray:
        self._height -= n
        return self._stack[self._height : self._height + n][::-1].copy()

    def give(self, frames: np.ndarray) -> None:
        n = len(frames)
        self._stack[self._height : self._height + n] = frames[::-1]
        self._height += n

    def remove(self, frames: np.ndarray) -> None:
        """Search the whole stack."""
        stack = self.frames()
        kept = stack[~np.isin(stack, frames)]
        self._height = len(kept)
        self._stack[: self._height] = kept

    def frames(self) -> np.ndarray:
        return self._stack[: self._height]


class FreeBlocks:
    """Frames in aligned blocks of block_pages.

    A request for n frames takes n // block_pages whole blocks, and the rest from the broken block that it fits best:

        blocks      | . . . . | x x . . | . . . . | . . . . | x . . . |       . free   x in use
        take(10)                  8 9     0 1 2 3   4 5 6 7                   block_pages 4

    The whole blocks are a run of exactly as many free blocks, else the front of a longer run, else several runs. The
    rest breaks a whole block only where it fits into no broken one.
    """

    def __init__(self, num_pages: int, block_pages: int) -> None:
        self._block = block_pages
        num_blocks = -(-num_pages // block_pages)
        self._is_free = np.zeros((num_blocks, block_pages), np.bool_)
        self._flat = self._is_free.reshape(-1)
        self._flat[:num_pages] = True  # the last block may be short: it is never whole
        # Free frames per block. Narrow, because every request looks at all blocks; unsigned, for `_take_rest`.
        self._count = self._is_free.sum(1).astype(np.min_scalar_type(block_pages))
        # Of the same type as the counts, because `np.add.at` takes 20 times as long with another.
        self._one = self._count.dtype.type(1)
        self._ids = np.arange(num_blocks * block_pages, dtype=np.int32)

    def take(self, n: int) -> np.ndarray:
        num_blocks, rest = divmod(n, self._block)
        parts = self._take_blocks(num_blocks) if num_blocks else []
        rest = n - sum(map(len, parts))
        if rest:
            parts.append(self._take_rest(rest) if rest < self._block else self._gather(rest))
        if len(parts) == 1:
            return parts[0].copy()
        return np.concatenate(parts) if parts else self._ids[:0].copy()

    def give(self, frames: np.ndarray) -> None:
        self._flat[frames] = True
        np.add.at(self._count, frames // self._block, self._one)

    def remove(self, frames: np.ndarray) -> None:
        self._flat[frames] = False
        np.subtract.at(self._count, frames // self._block, self._one)

    def frames(self) -> np.ndarray:
        assert (self._count == self._is_free.sum(1)).all(), "a block's count is wrong"
        return np.flatnonzero(self._flat).astype(np.int32)

    def _take_blocks(self, n: int) -> list[np.ndarray]:
        """The frames of n whole blocks, or of all whole blocks if there are fewer, in few runs."""
        is_whole = self._count == self._block
        bits = int.from_bytes(np.packbits(is_whole, bitorder="little").tobytes(), "little")  # bit i: block i is whole
        parts = []
        length, shortest = n, n // 8
        while n and bits and length > shortest:
            starts = _runs_of(bits, length)
            if not starts:
                length //= 2
                continue
            exact = starts & ~(bits << 1) & ~(bits >> length)
            at = _lowest(exact or starts)
            parts.append(self._take_run(at, length))
            bits ^= ((1 << length) - 1) << at
            n -= length
            length = min(length, n)
        if n and bits:  # scattered: a search for so many short runs takes too long
            scattered = np.flatnonzero(self._count == self._block)[:n]
            self._is_free[scattered] = False
            self._count[scattered] = 0
            parts.append(self._ids.reshape(self._is_free.shape)[scattered].reshape(-1))
        return parts

    def _take_run(self, at: int, num_blocks: int) -> np.ndarray:
        self._is_free[at : at + num_blocks] = False
        self._count[at : at + num_blocks] = 0
        return self._ids[at * self._block : (at + num_blocks) * self._block]

    def _take_rest(self, n: int) -> np.ndarray:
        """n frames, fewer than a block, adjacent if possible, from the block with the fewest free frames that has
        n."""
        # A block with fewer than n free frames wraps around to a large number. A whole block counts more than all
        # broken ones that fit.
        at = int((self._count - self._count.dtype.type(n)).argmin())
        if self._count[at] < n:
            return self._gather(n)
        free = np.flatnonzero(self._is_free[at])
        adjacent = np.flatnonzero(free[n - 1 :] - free[: len(free) - n + 1] == n - 1)
        first = int(adjacent[0]) if len(adjacent) else 0
        frames = self._ids[at * self._block + free[first : first + n]]
        self._flat[frames] = False
        self._count[at] -= self._count.dtype.type(n)
        return frames

    def _gather(self, n: int) -> np.ndarray:
        """n frames from as few blocks as possible, where no single block has n."""
        order = np.argsort(self._count, kind="stable")[::-1]
        num_rows = int(np.searchsorted(np.cumsum(self._count[order], dtype=np.int64), n)) + 1
        rows = order[:num_rows]
        row, column = np.nonzero(self._is_free[rows])
        frames = self._ids[(rows[row] * self._block + column)[:n]]
        self.remove(frames)
        return frames


class FreeLowest:
    """The lowest free frames first, ascending. Free frames are counted per group of _GROUP frames, so that a request
    looks at one number per group and at the frames of the groups that it takes from."""

    def __init__(self, num_pages: int) -> None:
        self._is_free = np.zeros((-(-num_pages // _GROUP), _GROUP), np.bool_)
        self._flat = self._is_free.reshape(-1)
        self._flat[:num_pages] = True
        self._count = self._is_free.sum(1).astype(np.int16)
        self._one = np.int16(1)  # of the same type, as in `FreeBlocks`

    def take(self, n: int) -> np.ndarray:
        lowest = int((self._count != 0).argmax())
        if n <= self._count[lowest]:  # nearly always, and then one group is enough
            column = np.flatnonzero(self._is_free[lowest])[:n]
            self._is_free[lowest, column] = False
            self._count[lowest] -= n
            return (lowest * _GROUP + column).astype(np.int32)
        groups = np.flatnonzero(self._count)
        groups = groups[: int(self._count[groups].cumsum(dtype=np.int64).searchsorted(n)) + 1]
        row, column = np.divmod(np.flatnonzero(self._is_free[groups])[:n], _GROUP)
        frames = (groups[row] * _GROUP + column).astype(np.int32)
        self.remove(frames)
        return frames

    def give(self, frames: np.ndarray) -> None:
        self._flat[frames] = True
        np.add.at(self._count, frames // _GROUP, self._one)

    def remove(self, frames: np.ndarray) -> None:
        self._flat[frames] = False
        np.subtract.at(self._count, frames // _GROUP, self._one)

    def frames(self) -> np.ndarray:
        assert (self._count == self._is_free.sum(1)).all(), "a group's count is wrong"
        return np.flatnonzero(self._flat).astype(np.int32)


def _runs_of(bits: int, n: int) -> int:
    """A bit set where n set bits follow each other: bit i stands for i to i + n - 1."""
    have = 1
    while have < n:
        step = min(have, n - have)
        bits &= bits >> step
        have += step
    return bits


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
