"""`Borrowing`: how many slabs a borrower asks for, and which it gives back (SwiftCache 3.5, by value).

Owns the demand, and what was lacking. Knows numbers alone: no request and no tree. In every step the scheduler passes
what the cache lacked room for and what lenders want back. It drops, or moves, what is cached in slabs that are given
up.

    asked for     the slabs that are there, and room for what was evicted lately and no peer had room for
    given back    slabs that were not used for `idle_s`; and as many as lenders want, the coldest first

An idle borrower thus asks for nothing, and soon has nothing. What it has is worth nothing to it once it has neither
used nor lacked a slab for `demand_s`: its lender may have that back for cache in use. Ranks pass the same numbers
and decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang.srt.mem_cache.slab_ledger import SlabLedger, SlabReport, SlabState, lender_of
from sglang.srt.mem_cache.slab_use import Fading, SlabUse
from sglang.srt.utils.peer_timing import PeerTiming
from sglang.srt.utils.time_units import Seconds


@dataclass(frozen=True)
class BorrowingConfig:
    """All in seconds."""

    # What was lacking in this time is asked for. A borrower that lacked and used nothing in it is idle.
    demand_s: float = PeerTiming.demand
    # Slabs that were not used for this time are given back.
    idle_s: float = PeerTiming.idle
    # A request that is longer than the memory that is there waits this long for what peers may lend.
    patience_s: float = PeerTiming.patience


@dataclass(frozen=True)
class Shortage:
    """What a borrower's cache lacked, since its start. Alike on all ranks."""

    # Pages that the device, or peers, gave up and no peer had room for.
    num_pages: int = 0
    # Tokens of prompts that were computed because they had been evicted.
    lost_tokens: int = 0
    # What it takes to compute a token, at present; 0: not known.
    token_s: float = 0.0
    # Whether requests wait or run that are longer than the device, and how many pages more than there are the longest
    # needs, at present.
    has_long_reqs: bool = False
    num_awaited_pages: int = 0


class Borrowing:
    """ledger: of the peer pool, whose slabs have the same length. use: of its slabs.

    wake_at: when `adjust` is due next if nothing else happens, in seconds; None: never."""

    def __init__(self, config: BorrowingConfig, ledger: SlabLedger, use: SlabUse) -> None:
        self.ledger = ledger
        self.use = use
        self.wake_at: float | None = None
        self._config = config
        self._slab_pages = len(ledger.frames_of(0))
        self._sources = np.empty(0, np.int64)
        self._num_wanted: tuple[int, ...] = ()
        # By slab: when it became MAPPED, and whether it is, as of the last step.
        self._mapped_at = np.full(len(ledger.states), -math.inf)
        self._was_mapped = np.zeros(len(ledger.states), np.bool_)
        # Slabs that are DRAINING because they were chosen.
        self._chosen: set[int] = set()
        # Pages that were lacking and not lent yet, and when the last one was.
        self._lacking = 0
        self._lacked_at = -math.inf
        self._seen = Shortage()
        self._regret = Fading()
        self._told: tuple[int, int] | None = None

    def update(self, report: SlabReport) -> None:
        """report: what all ranks agree on; after the ledger was updated."""
        self._sources, self._num_wanted = np.frombuffer(report.sources, np.int64), report.num_wanted

    def adjust(self, now: Seconds, shortage: Shortage) -> list[int]:
        """Returns the slabs that are to be given up, which have begun to drain: the caller drops their pages."""
        self._note_mapped(now)
        self._note_shortage(now, shortage)
        # A long request may need at its end what it has not used yet.
        given_up = [] if shortage.has_long_reqs else self._idle(now)
        given_up += self._wanted_back(set(given_up), now)
        for slab in given_up:
            self.ledger.drain(slab)
        self._chosen.update(given_up)
        self._was_mapped[given_up] = False
        self._set_wake_up(now)
        return given_up

    def take_demand(self, now: Seconds) -> tuple[int, int] | None:
        """How many slabs to have in all, and what one is worth in microseconds, if that has changed."""
        num_mapped = self.ledger.count(SlabState.MAPPED)
        num_more = -(-max(self._lacking, self._seen.num_awaited_pages) // self._slab_pages)
        num_slabs = min(num_mapped + num_more, len(self.ledger.states))
        value_us = 0
        if now < self._idle_from or self._seen.has_long_reqs:
            value_us = round(1e6 * (self.use.saved.at(now) + self._regret.at(now)) / max(1, num_slabs))
        # To a power of two: a value that fades is told from time to time only.
        demand = (num_slabs, 1 << (value_us.bit_length() - 1) if value_us else 0)
        if demand == self._told:
            return None
        self._told = demand
        return demand

    def take_chosen(self, drained: Sequence[int]) -> tuple[int, ...]:
        """Those of the slabs that have just become UNMAPPED that were chosen here."""
        chosen = tuple(slab for slab in drained if slab in self._chosen)
        self._chosen.difference_update(chosen)
        return chosen

    def check_invariants(self) -> None:
        assert self._lacking >= 0
        for slab in self._chosen:
            assert self.ledger.states[slab] == SlabState.DRAINING, f"slab {slab} was given up and is in use"

    def _note_mapped(self, now: Seconds) -> None:
        mapped = self.ledger.slabs_in(SlabState.MAPPED)
        for slab in mapped[~self._was_mapped[mapped]].tolist():
            self.use.forget(slab)
            self._mapped_at[slab] = now
            self._lacking = max(0, self._lacking - self._slab_pages)
        self._was_mapped[:] = False
        self._was_mapped[mapped] = True

    def _note_shortage(self, now: Seconds, shortage: Shortage) -> None:
        if num_new := shortage.num_pages - self._seen.num_pages:
            self._lacking += num_new
            self._lacked_at = now
        elif self._lacked_at + self._config.demand_s <= now:
            self._lacking = 0
        if more := shortage.lost_tokens - self._seen.lost_tokens:
            self._regret.add(now, more * shortage.token_s)
        self._seen = shortage
        # More than that cannot be lent in any case.
        self._lacking = min(self._lacking, len(self.ledger.states) * self._slab_pages)

    def _last_used(self, slabs: np.ndarray) -> np.ndarray:
        return np.maximum(self.use.used_at[slabs], self._mapped_at[slabs])

    @property
    def _idle_from(self) -> float:
        """When the borrower counts as idle, if it neither uses a slab nor lacks one until then."""
        return max(float(self.use.used_at.max()), self._lacked_at) + self._config.demand_s

    def _idle(self, now: Seconds) -> list[int]:
        mapped = self.ledger.slabs_in(SlabState.MAPPED)
        return mapped[self._last_used(mapped) + self._config.idle_s <= now].tolist()

    def _wanted_back(self, given_up: set[int], now: Seconds) -> list[int]:
        """The coldest slabs of each lender that wants some back, less those that were chosen before."""
        if not any(self._num_wanted):
            return []
        mapped = [slab for slab in self.ledger.slabs_in(SlabState.MAPPED).tolist() if slab not in given_up]
        lenders = {slab: lender_of(self._sources[slab]) for slab in (*mapped, *self._chosen) if self._sources[slab]}
        fill = self.use.fill_of(self.ledger.table.state)
        chosen: list[int] = []
        for lender, num_wanted in enumerate(self._num_wanted):
            num_left = num_wanted - sum(lenders.get(slab) == lender for slab in self._chosen)
            if num_left > 0:
                of_lender = [slab for slab in mapped if lenders.get(slab) == lender]
                chosen += self.use.coldest(of_lender, now, fill)[:num_left]
        return chosen

    def _set_wake_up(self, now: Seconds) -> None:
        mapped = self.ledger.slabs_in(SlabState.MAPPED)
        times = []
        # What is kept for a long request is not given back: a time that has passed would wake again and again.
        if len(mapped) and not self._seen.has_long_reqs:
            times.append(float(self._last_used(mapped).min()) + self._config.idle_s)
        if self._lacking:
            times.append(self._lacked_at + self._config.demand_s)
        if len(mapped) and now < self._idle_from:
            times.append(self._idle_from)
        self.wake_at = min(times, default=None)
