"""`SlabLedger`: which slabs of a pool are this engine's to use, alike on all ranks.

A slab is a run of frames that one engine lends another as a whole (see docs/guides/peers.md).
Owns the states below; the pool's frame table has the frames, and whoever maps and unmaps memory (a `SlabSource`, on
each rank) hears of what has left.

            all ranks have it
    AWAY ─────────────────────► HERE ──────────► LEAVING ──────────► AWAY
                                 ▲  asked back,     │  its frames are
                                 │  lost, or lent   │  free, and LENT
                                 └──────────────────┘
                                    stay: a lender keeps it

At a borrower HERE is what it has been lent and has mapped; at a lender, what it has not given away: there a slab
comes back only when it was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, runtime_checkable

import numpy as np

from sglang.srt.mem_cache.frame_table import FrameState, FrameTable


@dataclass(frozen=True)
class SlabReport:
    """What a rank, or all ranks, may use of borrowed or lent memory."""

    # A byte per slab: 1 if it may be used, else 0.
    mapped: bytes = b""
    # At a lender: how many more slabs borrowers would take.
    num_borrowable: int = 0
    # At a lender: how many slabs were asked for and have not come back in time.
    num_late: int = 0


class SlabSource(Protocol):
    """The memory behind the slabs, on one rank."""

    def here(self) -> SlabReport:
        """What this rank may use: not what it may use no longer, or was told that it left."""
        ...

    def left(self, slabs: Sequence[int]) -> None:
        """Nobody uses these any more: unmap and return them, or lend them. From now on `here` has 0 for what went."""
        ...


@runtime_checkable
class BorrowedSlabs(SlabSource, Protocol):
    """The same at a borrower, where all slabs are away at first. A rank may have one that another rank lacks: it is
    not used, and goes without being told that it left when it is asked back."""

    def agreed(self, here: bytes) -> None:
        """What all ranks have, before each step: from now on these slabs are in use, until they left."""
        ...


@runtime_checkable
class LentSlabs(SlabSource, Protocol):
    """The same at a lender, where all slabs are here at first."""

    def wanted(self, num_slabs: int) -> None:
        """So many more should come home, the lowest of those that have left and were not asked for, so that all ranks
        mean the same. `here` has 1 for them once their memory is this rank's again, however late."""
        ...


class SlabState(Enum):
    AWAY = auto()
    HERE = auto()
    LEAVING = auto()


class SlabLedger:
    """frames: [first, end) of each slab in the table; what lies in none is never used. here: whether all slabs are,
    at first."""

    def __init__(self, table: FrameTable, frames: Sequence[tuple[int, int]], here: bool) -> None:
        self.table = table
        self.states = [SlabState.HERE if here else SlabState.AWAY] * len(frames)
        self._frames = [np.arange(first, end, dtype=np.int32) for first, end in frames]
        in_slabs = np.zeros(table.num_pages, np.bool_)
        for each in self._frames:
            assert len(each) and not in_slabs[each].any(), "slabs are empty or overlap"
            in_slabs[each] = True
        unused = ~in_slabs if here else np.ones_like(in_slabs)
        table.lend(np.flatnonzero(unused).astype(np.int32))

    def frames_of(self, slab: int) -> np.ndarray:
        """(n,) int32, ascending."""
        return self._frames[slab]

    def update(self, here: bytes) -> list[int]:
        """What all ranks have. Returns the slabs that begin to leave: their pages are to be dropped."""
        leaving = []
        for slab, is_here in enumerate(here):
            if is_here and self.states[slab] == SlabState.AWAY:
                self.table.take_back(self._frames[slab])
                self.states[slab] = SlabState.HERE
            elif not is_here and self.states[slab] == SlabState.HERE:
                leaving.append(slab)
                self.leave(slab)
        return leaving

    def leave(self, slab: int) -> None:
        assert self.states[slab] == SlabState.HERE, f"slab {slab} is not here"
        self.states[slab] = SlabState.LEAVING
        self.table.lend(self._frames[slab])

    def stay(self, slab: int) -> None:
        """A slab that is still leaving is kept: its pages can be used again at once."""
        assert self.states[slab] == SlabState.LEAVING, f"slab {slab} is not leaving"
        self.states[slab] = SlabState.HERE
        self.table.keep(self._frames[slab])

    def take_left(self) -> tuple[int, ...]:
        """Leaving slabs of which nothing is in use any more. They are AWAY now."""
        left = []
        for slab, state in enumerate(self.states):
            if state == SlabState.LEAVING and (self.table.state[self._frames[slab]] == FrameState.LENT).all():
                self.states[slab] = SlabState.AWAY
                left.append(slab)
        return tuple(left)

    def check_invariants(self) -> None:
        for slab, state in enumerate(self.states):
            lent = self.table.state[self._frames[slab]] == FrameState.LENT
            assert {SlabState.AWAY: lent.all(), SlabState.HERE: not lent.any(), SlabState.LEAVING: True}[state], (
                f"slab {slab} is {state.name.lower()}, {lent.sum()} of {len(lent)} frames are lent"
            )
