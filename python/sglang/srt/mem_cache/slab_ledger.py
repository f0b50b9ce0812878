"""`SlabLedger`: which slabs of a pool this engine may use, alike on all ranks.

A slab is a run of frames that one engine lends another as a whole (docs/guides/peers.md). Owns the state of each
slab. The pool's frame table owns the frames, and a `SlabSource` on each rank maps and unmaps the memory.

              mapped on all ranks              recalled, lost, given up, or to be lent
    UNMAPPED ─────────────────────► MAPPED ───────────────────────────────────► DRAINING ──────► UNMAPPED
                                      ▲                                            │    all of its
                                      └────────────────────────────────────────────┘    frames are
                                         cancel_drain: a lender needs it after all      free, and LENT

At a borrower, a slab is MAPPED while the borrower has mapped what it was lent. At a lender, a slab is MAPPED while
the lender has not lent it. It becomes MAPPED again when no borrower has it any more, and its memory was overwritten.
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
    # At a lender: how many recalled slabs are past their deadline.
    num_late: int = 0
    # At a lender: what a slab is worth to these borrowers, and to the one to which it is worth least, of those that
    # have some. In microseconds, see `SlabUse`.
    value_us: int = 0
    lent_value_us: int = 0
    # At a borrower: (num_slabs,) int64, the number of what is mapped at each, alike on all ranks; 0 if nothing is.
    # Ranks that have mapped different memory there do not use it. The number is of `source_of`. Empty: that is not
    # known.
    sources: bytes = b""
    # At a borrower: by lender, how many slabs of the borrower's choice it wants back.
    num_wanted: tuple[int, ...] = ()
    # At a borrower: how many slabs its lenders may ever lend it; all while one is not connected.
    num_lendable: int = 1 << 20
    # At a borrower, a byte per slab: 0 if what is in it cannot be copied elsewhere any more. Empty: all can.
    readable: bytes = b""

    def is_readable(self, slab: int) -> bool:
        return not self.readable or bool(self.readable[slab])


# Of slabs of one lender.
_MAX_SLABS = 1 << 20


def source_of(lender: int, slab: int) -> int:
    """lender: its place among the borrower's lenders. slab: its number at the lender."""
    return 1 + lender * _MAX_SLABS + slab % _MAX_SLABS


def lender_of(source: int) -> int:
    return (source - 1) // _MAX_SLABS


class SlabSource(Protocol):
    """The memory behind the slabs, on one rank."""

    def poll_mapped(self) -> SlabReport:
        """What this rank may use now."""
        ...

    def mark_in_use(self, mapped: bytes) -> None:
        """mapped: what all ranks have mapped, a byte per slab. These slabs are in use until `give_back` or `lend`
        names them. Called before each step."""
        ...


@runtime_checkable
class BorrowedSlabs(SlabSource, Protocol):
    """A borrower's memory. No slab is mapped at first.

    A rank may have mapped a slab that another rank has not. Such a slab is not used. When its lender recalls it, it
    goes back without a call of `give_back`."""

    def give_back(self, slabs: Sequence[int], chosen: Sequence[int] = ()) -> None:
        """No rank uses these slabs any more. Those that were recalled or lost are unmapped and returned. chosen:
        those that go in any case."""
        ...

    def follow(self, sources: bytes) -> None:
        """What rank 0 has at each place, see `SlabReport`: other ranks have the same slabs at the same places."""
        ...

    def set_demand(self, num_slabs: int, value_us: int) -> None:
        """How many slabs the engine would like to have in all, and what one is worth, see `SlabUse`."""
        ...


@runtime_checkable
class LentSlabs(SlabSource, Protocol):
    """A lender's memory. All slabs are mapped at first."""

    def lend(self, slabs: Sequence[int]) -> None:
        """This engine does not use these slabs any more: borrowers may have them. They are unmapped from now on."""
        ...

    def recall(self, num_slabs: int) -> None:
        """Ask for the return of num_slabs more unmapped slabs. Borrowers choose which. A slab is mapped again once
        its memory is this rank's, however late, whether it was recalled or not."""
        ...


class SlabState(Enum):
    """See the picture above."""

    # The engine must not use the slab.
    UNMAPPED = auto()
    # The engine may use the slab.
    MAPPED = auto()
    # The engine allocates nothing more in the slab, and some of its frames may still be in use.
    DRAINING = auto()


class SlabLedger:
    """table: the pool's. frames: [first, end) of each slab; other frames of the table are never used. mapped: whether
    all slabs are mapped at first, else none."""

    def __init__(self, table: FrameTable, frames: Sequence[tuple[int, int]], mapped: bool) -> None:
        self.table = table
        self.states = [SlabState.MAPPED if mapped else SlabState.UNMAPPED] * len(frames)
        self._frames = [np.arange(first, end, dtype=np.int32) for first, end in frames]
        in_slabs = np.zeros(table.num_pages, np.bool_)
        for each in self._frames:
            assert len(each) and not in_slabs[each].any(), "slabs are empty or overlap"
            in_slabs[each] = True
        unused = ~in_slabs if mapped else np.ones_like(in_slabs)
        table.lend(np.flatnonzero(unused).astype(np.int32))
        self._num_frames = np.array([len(each) for each in self._frames], np.int64)
        # By state: (n,) bool, the slabs in it.
        self._is_in = {state: np.array([each == state for each in self.states], np.bool_) for state in SlabState}

    def frames_of(self, slab: int) -> np.ndarray:
        """(n,) int32, ascending."""
        return self._frames[slab]

    def slabs_in(self, state: SlabState) -> np.ndarray:
        """(n,) int64, ascending."""
        return np.flatnonzero(self._is_in[state])

    def count(self, state: SlabState) -> int:
        return int(np.count_nonzero(self._is_in[state]))

    def update(self, mapped: bytes) -> list[int]:
        """mapped: what all ranks have mapped, a byte per slab. Returns the slabs that begin to drain: the caller
        drops their pages."""
        if not mapped:
            return []
        is_mapped = np.frombuffer(mapped, np.bool_)
        come = np.flatnonzero(is_mapped & self._is_in[SlabState.UNMAPPED]).tolist()
        gone = np.flatnonzero(~is_mapped & self._is_in[SlabState.MAPPED]).tolist()
        if come:
            self.table.reclaim(self._frames_of_all(come))
            self._set_state(come, SlabState.MAPPED)
        self._drain(gone)
        return gone

    def drain(self, slab: int) -> None:
        """Allocate nothing more in a slab, so that it becomes free."""
        assert self.states[slab] == SlabState.MAPPED, f"slab {slab} is not mapped"
        self._drain([slab])

    def _drain(self, slabs: list[int]) -> None:
        if not slabs:
            return
        self.table.lend(self._frames_of_all(slabs))
        self._set_state(slabs, SlabState.DRAINING)

    def _set_state(self, slabs: list[int], state: SlabState) -> None:
        for slab in slabs:
            self.states[slab] = state
        for each, is_in in self._is_in.items():
            is_in[slabs] = each == state

    def _frames_of_all(self, slabs: list[int]) -> np.ndarray:
        return np.concatenate([self._frames[slab] for slab in slabs])

    def cancel_drain(self, slab: int) -> None:
        """Use a draining slab again, at once."""
        assert self.states[slab] == SlabState.DRAINING, f"slab {slab} is not draining"
        self._set_state([slab], SlabState.MAPPED)
        self.table.cancel_lend(self._frames[slab])

    def take_drained(self) -> tuple[int, ...]:
        """The draining slabs of which no frame is in use any more. They become UNMAPPED."""
        slabs = np.flatnonzero(self._is_in[SlabState.DRAINING]).tolist()
        if not slabs:
            return ()
        is_lent = self.table.state[self._frames_of_all(slabs)] == FrameState.LENT
        firsts = np.cumsum([0, *(len(self._frames[slab]) for slab in slabs[:-1])])
        drained = [slab for slab, is_free in zip(slabs, np.logical_and.reduceat(is_lent, firsts).tolist()) if is_free]
        self._set_state(drained, SlabState.UNMAPPED)
        return tuple(drained)

    @property
    def num_mapped_frames(self) -> int:
        """Of the slabs that are MAPPED."""
        return int(self._num_frames[self._is_in[SlabState.MAPPED]].sum())

    def check_invariants(self) -> None:
        for state, is_in in self._is_in.items():
            assert is_in.tolist() == [each == state for each in self.states], f"{state.name} is counted wrong"
        for slab, state in enumerate(self.states):
            lent = self.table.state[self._frames[slab]] == FrameState.LENT
            is_right = {
                SlabState.UNMAPPED: lent.all(),
                SlabState.MAPPED: not lent.any(),
                SlabState.DRAINING: True,
            }
            assert is_right[state], (
                f"slab {slab} is {state.name.lower()}, {lent.sum()} of {len(lent)} frames are lent"
            )
