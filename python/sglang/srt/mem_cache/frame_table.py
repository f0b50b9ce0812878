"""`FrameTable`: *when* a pool's memory may be reused: the state and pins of every frame (one page of a pool).

Owns two arrays and a free list (`free_frames.py`: which free frame comes next). Never touches the memory itself,
never reads the tree (which alone knows *where* a page is), and knows nothing of requests or links.

                allocate           free_after                  reap: pins 0 and fence passed
    FREE ------------------> HELD ------------> PENDING_FREE -------------------------------------> FREE
      |                       | insert            ^  ^
      | allocate(FILLING)     v                   |  |
      +-------> FILLING --> CACHED ---------------+  |
                  |  commit         evict, drop      |
                  +----------------------------------+
                      failed, cancelled

      lend           reclaim                             LENT: another engine's, or another pool's. What is not FREE
FREE ------> LENT ------------> FREE                     when it is lent becomes LENT where it would become FREE; a
                                                         slab is lent when all its frames are LENT. Until then,
                                                         `cancel_lend` undoes it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np

from sglang.srt.mem_cache.free_frames import FreeBlocks, FreeList, FreeLowest, FreeStack

# Frames; fewer are faster as they are.
_LONG = 128


class FrameState(IntEnum):
    FREE = 0
    HELD = 1
    FILLING = 2
    CACHED = 3
    PENDING_FREE = 4
    LENT = 5


class FrameTable:
    """Frames 0..num_pages-1 of one pool.

    state: (num_pages,) uint8 of FrameState. pins: (num_pages,) int32, transfers that read or write the frame.
    block_pages: above 1, frames are handed out as whole aligned blocks of so many where that is possible.
    lowest_first: the lowest free frames are handed out, for a pool that lends its end; not with block_pages.
    """

    def __init__(self, num_pages: int, block_pages: int = 1, lowest_first: bool = False) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, got {num_pages}")
        if lowest_first and block_pages > 1:
            raise ValueError("a table hands out whole blocks or the lowest frames, not both")
        self.num_pages = num_pages
        self.block_pages = block_pages
        self.state = np.zeros(num_pages, np.uint8)
        self.pins = np.zeros(num_pages, np.int32)
        self.counts = [0] * len(FrameState)
        self.counts[FrameState.FREE] = num_pages
        self._ids = np.arange(num_pages, dtype=np.int32)
        self._free: FreeList
        if lowest_first:
            self._free = FreeLowest(num_pages)
        elif block_pages > 1:
            self._free = FreeBlocks(num_pages, block_pages)
        else:
            self._free = FreeStack(num_pages)
        self._pending: dict[int, list[np.ndarray]] = {}
        self._pending_pinned: list[np.ndarray] = []
        self._unpinned_since_reap = False
        # Not FREE yet, and to be LENT then.
        self._to_lend = np.zeros(num_pages, np.bool_)
        self._lends = False
        self._freed: list[np.ndarray] = []
        self._became_free: Callable[[np.ndarray], object] = lambda frames: None

    def watch_freed(self, became_free: Callable[[np.ndarray], object]) -> None:
        """became_free: called with frames (int32) that become FREE, or LENT before they are."""
        self._became_free = became_free

    @property
    def num_free(self) -> int:
        return self.counts[FrameState.FREE]

    @property
    def num_usable(self) -> int:
        """Frames that are not LENT."""
        return self.num_pages - self.counts[FrameState.LENT]

    @property
    def num_pinned_only(self) -> int:
        """Frames that are given up, and that only transfers still use."""
        return sum(map(len, self._pending_pinned))

    def allocate(self, n: int, state: FrameState = FrameState.HELD, first_page: int = 0) -> np.ndarray | None:
        """Take n frames. Returns (n,) int32, or None if fewer are free (then nothing changes).

        first_page: the place of the first in its sequence, whose blocks are to lie in blocks of frames.
        """
        if n > self.counts[FrameState.FREE]:
            return None
        head = -first_page % self.block_pages
        if 0 < head < n:
            frames = np.concatenate((self._free.take(head), self._free.take(n - head)))
        else:
            frames = self._free.take(n)
        self.state[self._where(frames)] = state
        self._count(n, FrameState.FREE, state)
        return frames

    def transition(self, frames: np.ndarray, before: FrameState, after: FrameState) -> None:
        """Move frames between live states (insert, commit). Asserts that all are in `before`."""
        where = self._where(frames)
        # As a plain integer: numpy compares with a member of an enumeration four times slower.
        assert (self.state[where] == int(before)).all(), f"frames are not all {before.name}"
        self.state[where] = after
        self._count(len(frames), before, after)

    def pin(self, frames: np.ndarray) -> None:
        """A transfer starts to read or write these frames (each listed once)."""
        self.pins[self._where(frames)] += 1

    def unpin(self, frames: np.ndarray) -> None:
        where = self._where(frames)
        self.pins[where] -= 1
        assert (self.pins[where] >= 0).all(), "unpinned more often than pinned"
        self._unpinned_since_reap = True

    def free_after(self, frames: np.ndarray, before: FrameState, fence: int) -> None:
        """Give frames up. They become FREE in `reap`, once launch number `fence` is done and no transfer pins them.

        fence: the last launch that may use the frames, -1 if none does.
        """
        if len(frames) == 0:
            return
        self.transition(frames, before, FrameState.PENDING_FREE)
        self._pending.setdefault(fence, []).append(frames)

    def reap(self, done: int) -> None:
        """Free what may be reused: launches below `done` have completed."""
        passed: list[np.ndarray] = []
        for fence in [f for f in self._pending if f < done]:
            passed += self._pending.pop(fence)
        if self._unpinned_since_reap:
            passed += self._pending_pinned
            self._pending_pinned = []
            self._unpinned_since_reap = False
        if not passed:
            return
        frames = np.concatenate(passed) if len(passed) > 1 else passed[0]
        where = self._where(frames)
        pins = self.pins[where]
        if pins.any():
            pinned = pins > 0
            self._pending_pinned.append(frames[pinned])
            frames = frames[~pinned]
            where = frames
        if self._lends and self._to_lend[where].any():
            # A copy: where `where` is a slice, it would be a view of what the next line but one clears.
            to_lend = self._to_lend[where].copy()
            lent = frames[to_lend]
            self._to_lend[lent] = False
            self.transition(lent, FrameState.PENDING_FREE, FrameState.LENT)
            self._freed.append(lent)
            self._became_free(lent)
            frames = where = frames[~to_lend]
        self._set_free(frames, where, FrameState.PENDING_FREE)

    def lend(self, frames: np.ndarray) -> None:
        """Frames (each listed once) become another engine's: FREE ones at once, others when they would be FREE."""
        self._lends = True
        is_lent = (self.state[frames] == FrameState.LENT) | self._to_lend[frames]
        assert not is_lent.any(), "some are lent already"
        is_free = self.state[frames] == FrameState.FREE
        free = frames[is_free]
        self.transition(free, FrameState.FREE, FrameState.LENT)
        self._free.remove(free)
        self._to_lend[frames[~is_free]] = True

    def cancel_lend(self, frames: np.ndarray) -> None:
        """Undo `lend` before another engine has the frames: LENT ones become FREE, others will be FREE."""
        self._to_lend[frames] = False
        self.reclaim(frames[self.state[frames] == FrameState.LENT])

    def reclaim(self, frames: np.ndarray) -> None:
        """LENT frames are this engine's again: the borrower has unmapped them, or is dead, and the caller has
        scrubbed them."""
        where = self._where(frames)
        assert (self.state[where] == FrameState.LENT).all(), "frames are not all LENT"
        assert not self.pins[where].any(), "a transfer still reads or writes what is to be free"
        self._set_free(frames, where, FrameState.LENT)

    def take_freed(self) -> np.ndarray:
        """Frames (int32) that became FREE since the last call; some may be in use again."""
        freed, self._freed = self._freed, []
        return np.concatenate(freed) if freed else self._ids[:0]

    def check_invariants(self) -> None:
        counted = np.bincount(self.state, minlength=len(FrameState)).tolist()
        assert counted == self.counts, f"counts {self.counts}, states {counted}"
        assert sum(self.counts) == self.num_pages
        free = self._free.frames()
        assert self._are_all(free, FrameState.FREE)
        pending = [f for fs in self._pending.values() for f in fs] + self._pending_pinned
        listed = np.concatenate(pending) if pending else self._ids[:0]
        assert self._are_all(listed, FrameState.PENDING_FREE), "a frame that is to be free is lost"
        assert (self.pins >= 0).all() and not self.pins[free].any(), "a free frame is pinned"
        to_lend = self.state[self._to_lend]
        assert not ((to_lend == FrameState.FREE) | (to_lend == FrameState.LENT)).any(), "lent late"

    def _are_all(self, frames: np.ndarray, state: FrameState) -> bool:
        """Whether these are the frames in this state, each once."""
        listed = np.zeros(self.num_pages, bool)
        listed[frames] = True
        return len(frames) == self.counts[state] and np.array_equal(listed, self.state == state)

    def _set_free(self, frames: np.ndarray, where: np.ndarray | slice, before: FrameState) -> None:
        self.state[where] = FrameState.FREE
        self._free.give(frames)
        self._count(len(frames), before, FrameState.FREE)
        self._freed.append(frames)
        self._became_free(frames)

    def _count(self, n: int, before: FrameState, after: FrameState) -> None:
        self.counts[before] -= n
        self.counts[after] += n

    def _where(self, frames: np.ndarray) -> np.ndarray | slice:
        """A slice where the frames are an ascending run: 20 times faster than scattered access when long. Else, when
        long, numpy's own index type, which it would convert to on every access."""
        n = len(frames)
        if n >= _LONG:
            first = int(frames[0])
            if int(frames[-1]) == first + n - 1 and (frames == self._ids[first : first + n]).all():
                return slice(first, first + n)
            return frames.astype(np.intp)
        return frames
