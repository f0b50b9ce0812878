"""Slabs that are mapped and unmapped at random times, by seed, for tests: `ComingAndGoing` is a borrower's memory,
`LentOut` a lender's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from sglang.srt.mem_cache.slab_ledger import SlabReport, source_of


def padded_slabs(num_pages: int) -> tuple[tuple[int, int], ...]:
    """Slabs of four pages and a page of padding, as many as fit."""
    return tuple((first, first + 4) for first in range(0, num_pages - 3, 5))


class ComingAndGoing:
    """`BorrowedSlabs`. rate: the chance at each poll that one slab is lent or recalled. has_lenders: there are
    two, which want slabs of the borrower's choice back. poison: fills pages (int32)
    with what must never be read; called for slabs that were given back, as their memory is another engine's then."""

    def __init__(
        self,
        slabs: Sequence[tuple[int, int]],
        rate: float,
        seed: int,
        poison: Callable[[np.ndarray], None],
        has_lenders: bool = False,
    ) -> None:
        self._slabs = slabs
        self._rate = rate
        self._random = random.Random(seed)
        self._poison = poison
        self._has_lenders = has_lenders
        self._wanted = [0, 0]
        self._mapped = [False] * len(slabs)
        self._in_use: set[int] = set()
        self._recalled: set[int] = set()

    def poll_mapped(self) -> SlabReport:
        if self._slabs and self._random.random() < self._rate:
            slab = self._random.randrange(len(self._slabs))
            if self._mapped[slab]:
                self._recalled.add(slab)
            # A recalled slab is lent again only after it was given back.
            self._mapped[slab] = not self._mapped[slab] and slab not in self._recalled
        if not self._has_lenders:
            return SlabReport(bytes(self._mapped))
        lenders = [sum(self._mapped[i::2]) for i in range(2)]
        if self._random.random() < self._rate:
            self._wanted = [self._random.randrange(2) for _ in lenders]
        # The first slab is sometimes another one than on other ranks.
        own = self._random.randrange(2)
        sources = (source_of(slab % 2, slab + len(self._slabs) * (own if slab == 0 else 0)) for slab in self._places)
        return SlabReport(
            bytes(self._mapped),
            sources=np.where(self._mapped, list(sources), 0).tobytes(),
            num_wanted=tuple(min(n, num) for n, num in zip(self._wanted, lenders)),
        )

    @property
    def _places(self) -> range:
        return range(len(self._slabs))

    def mark_in_use(self, mapped: bytes) -> None:
        self._in_use.update(slab for slab, is_mapped in enumerate(mapped) if is_mapped)
        self._give_back_unused()

    def give_back(self, slabs: Sequence[int], chosen: Sequence[int] = ()) -> None:
        self._in_use.difference_update(slabs)
        for slab in chosen:
            self._mapped[slab] = False
            self._recalled.add(slab)
        self._give_back_unused()

    def follow(self, sources: bytes) -> None:
        pass

    def set_demand(self, num_slabs: int, value_us: int) -> None:
        self.demand = (num_slabs, value_us)

    def _give_back_unused(self) -> None:
        for slab in self._recalled - self._in_use:
            self._recalled.discard(slab)
            first, end = self._slabs[slab]
            self._poison(np.arange(first, end, dtype=np.int32))

    def settle(self) -> None:
        """Nothing is lent or recalled any more."""
        self._rate = 0.0
        self._wanted = [0, 0]

    @property
    def num_owed(self) -> int:
        """Slabs that were recalled and are not given back yet."""
        return len(self._recalled)


class LentOut:
    """`LentSlabs`. rate: the chance at each poll that the slab that was recalled first comes back. num_borrowable:
    how many more slabs borrowers would take. poison: as for `ComingAndGoing`; a slab that comes back is poisoned
    too."""

    def __init__(
        self, slabs: Sequence[tuple[int, int]], rate: float, seed: int, poison: Callable[[np.ndarray], None]
    ) -> None:
        self._slabs = slabs
        self.rate = rate
        self.num_borrowable = 255
        self._random = random.Random(seed)
        self._poison = poison
        self._mapped = [True] * len(slabs)
        self._lent: set[int] = set()
        self._recalled: list[int] = []

    def poll_mapped(self) -> SlabReport:
        if self._recalled and self._random.random() < self.rate:
            self._mapped[self._recalled.pop(0)] = True
        return SlabReport(bytes(self._mapped), self.num_borrowable)

    def mark_in_use(self, mapped: bytes) -> None:
        assert not any(use > here for use, here in zip(mapped, self._mapped)), "a slab is used that is lent"

    def lend(self, slabs: Sequence[int]) -> None:
        for slab in slabs:
            assert self._mapped[slab], f"slab {slab} is lent twice"
            self._mapped[slab] = False
            self._lent.add(slab)
            first, end = self._slabs[slab]
            self._poison(np.arange(first, end, dtype=np.int32))

    def recall(self, num_slabs: int) -> None:
        assert 0 < num_slabs <= len(self._lent), f"{num_slabs} slabs are recalled, {len(self._lent)} are lent"
        chosen = sorted(self._lent)[:num_slabs]
        self._lent -= set(chosen)
        self._recalled += chosen

    def settle(self) -> None:
        """Nothing comes back any more."""
        self.rate = 0.0
