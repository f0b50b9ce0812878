"""`SlabUse`: when each slab of a pool was used last, and what that has saved.

Owns an array per slab; knows frames and seconds alone. The same calls give the same numbers on every rank.

A slab's *value* is the seconds that hits on its pages have saved, where older ones count less: to a third after
`VALUE_S`. Borrowers and lenders compare these values, which are seconds of computing on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.utils.time_units import Seconds

VALUE_S = 60.0


class Fading:
    """A sum of seconds that fade, see `VALUE_S`."""

    def __init__(self) -> None:
        self._value = 0.0
        self._now = -math.inf

    def add(self, now: Seconds, seconds: float) -> None:
        self._value = self.at(now) + seconds
        self._now = now

    def at(self, now: Seconds) -> float:
        return self._value * math.exp((self._now - now) / VALUE_S) if self._value else 0.0


class SlabFill(NamedTuple):
    """By slab: pages that hold cached KV, and pages that requests or transfers have to themselves."""

    num_cached: np.ndarray
    num_busy: np.ndarray


class SlabUse:
    """frames: [first, end) of each slab. num_pages: of the pool."""

    def __init__(self, frames: Sequence[tuple[int, int]], num_pages: int) -> None:
        self.num_slabs = len(frames)
        # When pages of the slab were filled or hit last; -inf: never.
        self.used_at = np.full(self.num_slabs, -math.inf)
        # All slabs together.
        self.saved = Fading()
        # As of `_faded_at`.
        self._saved_s = np.zeros(self.num_slabs)
        self._faded_at = 0.0
        # Frame -> slab; num_slabs for frames in no slab.
        self._slab_of = np.full(num_pages, self.num_slabs, np.int32)
        for slab, (first, end) in enumerate(frames):
            self._slab_of[first:end] = slab

    def note(self, now: Seconds, frames: np.ndarray, page_s: float = 0.0) -> None:
        """Pages (int32) were filled or hit. page_s: what that has saved for each, in seconds."""
        counts = np.bincount(self._slab_of[frames], minlength=self.num_slabs + 1)[: self.num_slabs]
        self.used_at[counts > 0] = now
        if page_s > 0:
            self._saved_s = self.values(now)
            self._faded_at = now
            self._saved_s += counts * page_s
            self.saved.add(now, len(frames) * page_s)

    def forget(self, slab: int) -> None:
        """The slab is empty, or another memory."""
        self.used_at[slab] = -math.inf
        self._saved_s[slab] = 0.0

    def values(self, now: Seconds) -> np.ndarray:
        """(num_slabs,) seconds."""
        return self._saved_s * math.exp((self._faded_at - now) / VALUE_S)

    def fill_of(self, states: np.ndarray) -> SlabFill:
        """states: of the pool's frames, (num_pages,) of FrameState."""
        is_cached = states == FrameState.CACHED
        is_busy = (states != FrameState.FREE) & (states != FrameState.LENT) & ~is_cached
        return SlabFill(
            *(np.bincount(self._slab_of[each], minlength=self.num_slabs + 1) for each in (is_cached, is_busy))
        )

    def coldest(self, slabs: Sequence[int], now: Seconds, fill: SlabFill) -> list[int]:
        """slabs in the order in which they should go: those that no request or transfer uses, of them empty ones,
        then those of the least value, then those that were used the longest time ago; of equals the highest."""
        values = self.values(now)

        def rank(slab: int) -> tuple[bool, bool, float, float, int]:
            return fill.num_busy[slab] > 0, fill.num_cached[slab] > 0, values[slab], self.used_at[slab], -slab

        return sorted(slabs, key=rank)
