"""`DeviceLending`: which slabs of its own device pool a worker lends, and when it wants them back (SwiftCache 3.4).

Owns the ledger of these slabs, the demand that decides, and which slabs were asked for. Knows numbers alone: no
request and no tree. The scheduler tells it the demand in every step, takes what is cached off the slabs that begin to
leave, and passes on what it wants back.

    HERE ──────────────────► LEAVING ──────► AWAY ──────────► AWAY, asked for ──────► HERE
      ▲  more than the peak     │   all free         demand       on all ranks again
      │  of a window needs, and │                 above what is here
      │  somebody would borrow  │
      └─────────────────────────┘
        demand above what is here: at once, nobody has heard of it yet

Demand above what is here first keeps what is only leaving, so a request that still uses a page of a leaving slab
never waits for that slab.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.mem_cache.slab_ledger import SlabLedger, SlabReport, SlabState
from sglang.srt.peer.protocol.elastic_units import WINDOW_S, DemandWindow, ElasticUnit, scale_down, scale_up


@dataclass(frozen=True)
class LendingConfig:
    """keep_tokens: room for so many is never lent; None: for the longest request that the server takes. cache_tokens:
    room beside the demand for what is cached and unused, which is evicted otherwise. window_s: what was needed in so
    many seconds is kept. interval_s: slabs begin to leave at most that often."""

    keep_tokens: int | None = None
    cache_tokens: int = 0
    window_s: float = WINDOW_S
    interval_s: float = 1.0


class DeviceLending:
    """keep_pages, cache_pages: as the config's tokens. page_bytes: of the device pool. All slabs are as long, and
    here at first; what was needed before the first step counts as the whole pool. wake_at: see `adjust`."""

    def __init__(
        self, config: LendingConfig, ledger: SlabLedger, page_bytes: int, keep_pages: int, cache_pages: int
    ) -> None:
        self.ledger = ledger
        slab_pages = len(ledger.frames_of(0))
        self._unit = ElasticUnit(slab_pages * page_bytes, page_bytes, page_bytes)
        self._num_pages = slab_pages * len(ledger.states)
        self._keep_pages = keep_pages
        self._cache_pages = cache_pages
        self._interval_s = config.interval_s
        self._window = DemandWindow(config.window_s)
        self._lend_at: float | None = None
        # Asked for and not here yet.
        self._asked: list[int] = []
        self._new_wanted = 0
        self._borrowable = self._num_late = 0
        self.wake_at: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether slabs were asked for that are not here yet."""
        return bool(self._asked)

    @property
    def leaving(self) -> list[int]:
        return self._in(SlabState.LEAVING)

    def update(self, report: SlabReport) -> None:
        """What all ranks have."""
        gone = self.ledger.update(report.mapped)
        self._borrowable, self._num_late = report.num_borrowable, report.num_late
        assert not gone, f"slabs {gone} went without being lent"
        if self._asked:
            self._asked = [slab for slab in self._asked if self.ledger.states[slab] != SlabState.HERE]

    def adjust(self, now: float, demand: int) -> list[int]:
        """demand: pages that requests need at the same time. Returns the slabs that begin to leave: what is cached in
        them and not in use is to be dropped. If nothing else happens, the next call is due at wake_at."""
        if self._lend_at is None:
            self._lend_at = now
            self._window.add(now, self._num_pages)
        needed = max(min(demand, self._num_pages), self._keep_pages)
        self._window.add(now, needed)
        if self._lacking(needed):
            self._fetch(needed)
        num_pages = self._pages_here()
        spare = self._units(scale_down(num_pages, self._window.peak(now) + self._cache_pages, self._unit))
        # What nobody would borrow is of more use as a cache here.
        spare = max(0, min(spare, self._borrowable - len(self.leaving)))
        began: list[int] = []
        if spare and now >= self._lend_at:
            began = self._in(SlabState.HERE)[-spare:]
            for slab in began:
                self.ledger.leave(slab)
            self._lend_at = now + self._interval_s
        self.wake_at = self._lend_at if spare and not began else self._window.falls_at
        return began

    def take_wanted(self) -> int:
        """So many more slabs should come home than were asked for so far."""
        wanted, self._new_wanted = self._new_wanted, 0
        return wanted

    def check_invariants(self) -> None:
        self.ledger.check_invariants()
        assert all(self.ledger.states[slab] == SlabState.AWAY for slab in self._asked), "what is here was asked for"

    def _fetch(self, needed: int) -> None:
        """Keep what is leaving, then ask for the lowest slabs that are away, each once."""
        for slab in self.leaving[: self._lacking(needed)]:
            self.ledger.stay(slab)
        # Others are asked for in place of those that are late.
        num_new = self._lacking(needed) - max(0, len(self._asked) - self._num_late)
        if num_new > 0:
            new = [slab for slab in self._in(SlabState.AWAY) if slab not in self._asked][:num_new]
            self._asked += new
            self._new_wanted += len(new)

    def _lacking(self, needed: int) -> int:
        """In slabs."""
        return self._units(scale_up(self._pages_here(), needed, self._unit))

    def _pages_here(self) -> int:
        return self.ledger.states.count(SlabState.HERE) * self._unit.lender_pages

    def _units(self, pages: tuple[int, int]) -> int:
        return pages[0] // self._unit.lender_pages

    def _in(self, state: SlabState) -> list[int]:
        return [slab for slab, each in enumerate(self.ledger.states) if each == state]
