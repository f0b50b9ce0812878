"""Slabs that come and go at random times, by seed, for tests: `ComingAndGoing`, a borrower's `BorrowedSlabs`, and
`LentOut`, a lender's `LentSlabs`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from sglang.srt.mem_cache.slab_ledger import SlabReport


def padded_slabs(num_pages: int) -> tuple[tuple[int, int], ...]:
    """Slabs of four pages and a page of padding, as many as fit."""
    return tuple((first, first + 4) for first in range(0, num_pages - 3, 5))


class ComingAndGoing:
    """rate: chance, each time that it is asked, that one slab comes or is asked back. poison: fills pages (int32)
    with what must never be read; called for what has left, as its memory is another's then."""

    def __init__(
        self, slabs: Sequence[tuple[int, int]], rate: float, seed: int, poison: Callable[[np.ndarray], None]
    ) -> None:
        self.num_left = 0
        self._slabs = slabs
        self._rate = rate
        self._random = random.Random(seed)
        self._poison = poison
        self._here = [False] * len(slabs)
        self._in_use: set[int] = set()
        self._asked_back: set[int] = set()

    def here(self) -> SlabReport:
        if self._slabs and self._random.random() < self._rate:
            slab = self._random.randrange(len(self._slabs))
            if self._here[slab]:
                self._asked_back.add(slab)
            # What was asked back comes again only after it has left.
            self._here[slab] = not self._here[slab] and slab not in self._asked_back
        return SlabReport(bytes(self._here))

    def agreed(self, here: bytes) -> None:
        self._in_use.update(slab for slab, is_here in enumerate(here) if is_here)
        self._give_back()

    def left(self, slabs: Sequence[int]) -> None:
        self._in_use.difference_update(slabs)
        self._give_back()

    def _give_back(self) -> None:
        for slab in self._asked_back - self._in_use:
            self._asked_back.discard(slab)
            first, end = self._slabs[slab]
            self._poison(np.arange(first, end, dtype=np.int32))
            self.num_left += 1

    def settle(self) -> None:
        """Nothing comes or goes any more."""
        self._rate = 0.0

    @property
    def num_owed(self) -> int:
        """Slabs that were asked back and are still here."""
        return len(self._asked_back)


class LentOut:
    """rate: chance, each time that it is asked, that the oldest slab of those that are wanted comes home. borrowable:
    how many more others would take. poison: as for `ComingAndGoing`; what comes home is not worth reading either."""

    def __init__(
        self, slabs: Sequence[tuple[int, int]], rate: float, seed: int, poison: Callable[[np.ndarray], None]
    ) -> None:
        self._slabs = slabs
        self.rate = rate
        self.borrowable = 255
        self._random = random.Random(seed)
        self._poison = poison
        self._here = [True] * len(slabs)
        self._lent: set[int] = set()
        self._wanted: list[int] = []

    def here(self) -> SlabReport:
        if self._wanted and self._random.random() < self.rate:
            self._here[self._wanted.pop(0)] = True
        return SlabReport(bytes(self._here), self.borrowable)

    def left(self, slabs: Sequence[int]) -> None:
        for slab in slabs:
            assert self._here[slab], f"slab {slab} is lent twice"
            self._here[slab] = False
            self._lent.add(slab)
            first, end = self._slabs[slab]
            self._poison(np.arange(first, end, dtype=np.int32))

    def wanted(self, num_slabs: int) -> None:
        assert 0 < num_slabs <= len(self._lent), f"{num_slabs} slabs are wanted, {len(self._lent)} are lent"
        chosen = sorted(self._lent)[:num_slabs]
        self._lent -= set(chosen)
        self._wanted += chosen

    def settle(self) -> None:
        """Nothing comes any more."""
        self.rate = 0.0
