"""`DeviceLending`: which slabs of its own device pool a lender lends, and when it recalls them (SwiftCache 3.4).

Owns the ledger of the slabs, the demand that decides, and which slabs were recalled. Knows numbers alone: no
request and no tree. In every step the scheduler passes the demand, drops what is cached in slabs that begin to drain,
and passes on how many slabs to recall.

    MAPPED ─────────────────► DRAINING ──────► UNMAPPED ───────────► UNMAPPED, recalled ──────► MAPPED
      ▲  more pages are mapped   │   all frames           demand above                mapped
      │  than the peak of a      │   are free             what is mapped              on all ranks
      │  window needs, and       │
      │  borrowers would take it │
      └──────────────────────────┘
        demand above what is mapped: at once, since no borrower has the slab yet

A demand above what is mapped first cancels draining. A request that still uses a page of a draining slab thus never
waits for that slab.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.mem_cache.slab_ledger import SlabLedger, SlabReport, SlabState
from sglang.srt.peer.protocol.elastic_units import WINDOW_S, DemandWindow, scale_down, scale_up
from sglang.srt.utils.time_units import Seconds


@dataclass(frozen=True)
class LendingConfig:
    """How much of its device memory a lender keeps."""

    # Room for this many tokens is never lent. None: room for the longest request that the server takes.
    keep_tokens: int | None = None
    # Room beside the demand, for cached tokens that no request uses. They are evicted otherwise.
    cache_tokens: int = 0
    # What requests needed in the last window_s seconds is kept.
    window_s: float = WINDOW_S
    # Slabs begin to drain at most once in interval_s seconds.
    interval_s: float = 1.0


class DeviceLending:
    """ledger: all its slabs have the same length and are mapped. keep_pages, cache_pages: the config's tokens in
    pages. The demand before the first step counts as the whole pool.

    wake_at: when `adjust` is due next if nothing else happens, in seconds; None: never."""

    def __init__(self, config: LendingConfig, ledger: SlabLedger, keep_pages: int, cache_pages: int) -> None:
        self.ledger = ledger
        self._slab_pages = len(ledger.frames_of(0))
        self._num_pages = self._slab_pages * len(ledger.states)
        self._keep_pages = keep_pages
        self._cache_pages = cache_pages
        self._interval_s = config.interval_s
        self._window = DemandWindow(config.window_s)
        # When slabs may begin to drain next, in seconds.
        self._drain_at: float | None = None
        # Slabs that were recalled and are not mapped yet.
        self._recalled: list[int] = []
        # How many were recalled since the last call of `take_num_recalled`.
        self._num_new_recalled = 0
        self._num_borrowable = self._num_late = 0
        self.wake_at: float | None = None

    @property
    def awaits_slabs(self) -> bool:
        """Whether recalled slabs are not mapped yet."""
        return bool(self._recalled)

    @property
    def draining(self) -> list[int]:
        """The slabs that are draining, ascending."""
        return self._slabs_in(SlabState.DRAINING)

    def update(self, report: SlabReport) -> None:
        """report: what all ranks agree on."""
        unmapped = self.ledger.update(report.mapped)
        assert not unmapped, f"slabs {unmapped} were unmapped without being lent"
        self._num_borrowable, self._num_late = report.num_borrowable, report.num_late
        if self._recalled:
            self._recalled = [slab for slab in self._recalled if self.ledger.states[slab] != SlabState.MAPPED]

    def adjust(self, now: Seconds, demand: int) -> list[int]:
        """demand: pages that requests need at the same time. Returns the slabs that begin to drain: the caller drops
        the cached pages in them that no request uses."""
        if self._drain_at is None:
            self._drain_at = now
            self._window.add(now, self._num_pages)
        needed = max(min(demand, self._num_pages), self._keep_pages)
        self._window.add(now, needed)
        if self._num_lacking(needed):
            self._get_back(needed)
        num_pages = self._num_mapped_pages()
        spare = scale_down(num_pages, self._window.peak(now) + self._cache_pages, self._slab_pages)
        # A slab that no borrower would take is of more use as a cache here.
        spare = max(0, min(spare, self._num_borrowable - len(self.draining)))
        began: list[int] = []
        if spare and now >= self._drain_at:
            began = self._slabs_in(SlabState.MAPPED)[-spare:]
            for slab in began:
                self.ledger.drain(slab)
            self._drain_at = now + self._interval_s
        self.wake_at = self._drain_at if spare and not began else self._window.falls_at
        return began

    def take_num_recalled(self) -> int:
        """How many slabs were recalled since the last call."""
        num_slabs, self._num_new_recalled = self._num_new_recalled, 0
        return num_slabs

    def check_invariants(self) -> None:
        self.ledger.check_invariants()
        is_unmapped = [self.ledger.states[slab] == SlabState.UNMAPPED for slab in self._recalled]
        assert all(is_unmapped), "a slab that is mapped was recalled"

    def _get_back(self, needed: int) -> None:
        """Cancel draining, then recall the lowest unmapped slabs, each once."""
        for slab in self.draining[: self._num_lacking(needed)]:
            self.ledger.cancel_drain(slab)
        # Other slabs are recalled in place of the late ones.
        num_new = self._num_lacking(needed) - max(0, len(self._recalled) - self._num_late)
        if num_new > 0:
            new = [slab for slab in self._slabs_in(SlabState.UNMAPPED) if slab not in self._recalled][:num_new]
            self._recalled += new
            self._num_new_recalled += len(new)

    def _num_lacking(self, needed: int) -> int:
        """How many more slabs have to be mapped for `needed` pages."""
        return scale_up(self._num_mapped_pages(), needed, self._slab_pages)

    def _num_mapped_pages(self) -> int:
        return self.ledger.states.count(SlabState.MAPPED) * self._slab_pages

    def _slabs_in(self, state: SlabState) -> list[int]:
        return [slab for slab, each in enumerate(self.ledger.states) if each == state]
