"""`DeviceLending`: which slabs of its own device pool a lender lends, and when it recalls them (SwiftCache 3.4).

Owns the ledger of the slabs, the demand that decides, and how many slabs were recalled. Knows numbers alone: no
request and no tree. In every step the scheduler passes the demand, drops what is cached in slabs that begin to drain,
and passes on how many slabs to recall.

    MAPPED ─────────────────► DRAINING ──────► UNMAPPED ──────────────────────────────────────► MAPPED
      ▲  more pages are mapped   │   all frames           recalled, given back, or taken by no
      │  than the peak of a      │   are free             borrower; mapped on all ranks
      │  window needs, borrowers │
      │  would take it, and it   │
      │  is worth more to them   │
      └──────────────────────────┘
        demand above what is mapped: at once, since no borrower has the slab yet

A demand above what is mapped first cancels draining. A request that still uses a page of a draining slab thus never
waits for that slab.

**By value.** Slabs without cached pages go first, then those whose pages were not used in the window. One that was
used in the window goes only if a slab is worth far more to a borrower than to this engine. An unknown value is not.
While the device evicts what was used in the window, slabs are recalled as room for it, unless they are worth more to
those that have them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from sglang.srt.mem_cache.slab_ledger import SlabLedger, SlabReport, SlabState
from sglang.srt.mem_cache.slab_use import Fading, SlabUse
from sglang.srt.peer.protocol.elastic_units import WINDOW_S, DemandWindow, scale_down, scale_up
from sglang.srt.utils.time_units import LaunchSeq, Seconds

FIRST_LAUNCH = LaunchSeq(0)
# A slab that was used in the window goes if it is worth so many times more to a borrower. Between that and once as
# much nothing moves, else it would go to and fro.
FAR_MORE = 2.0


@dataclass(frozen=True)
class LendingConfig:
    """How much of its device memory a lender keeps."""

    # Room for this many tokens is never lent. None: room for the longest request that the server takes.
    keep_tokens: int | None = None
    # Room beside the demand, for cached tokens that no request uses. They are evicted otherwise.
    cache_tokens: int = 0
    # What requests needed in the last window_s seconds is kept, and what was used then is kept as cache.
    window_s: float = WINDOW_S
    # Slabs begin to drain at most once in interval_s seconds.
    interval_s: float = 1.0


@dataclass(frozen=True)
class OwnCache:
    """What a lender's own cache does with the device. Alike on all ranks."""

    # Pages that the device has evicted since the start.
    num_evicted: int = 0
    # When what it evicts next was used last; None: it has nothing to evict.
    next_victim: LaunchSeq | None = None
    # The next launch's number.
    launch: LaunchSeq = FIRST_LAUNCH
    # Tokens of prompts that were computed because they had been evicted, since the start.
    lost_tokens: int = 0
    # What it takes to compute a token, at present, in seconds; 0: not known.
    token_s: float = 0.0


def why_nothing_is_lent(
    num_pages: int,
    keep_pages: int,
    slab_pages: int,
    page_size: int,
    most_kept_pages: int | None = None,
    most_slab_pages: int | None = None,
) -> str:
    """A sentence for people, with the flag to change, if a worker can never lend a slab; "" if it can. num_pages: of
    its device pool, in whole slabs. keep_pages: that it never lends. most_kept_pages: that it would never lend of a
    larger pool, where its context is longer than this one. most_slab_pages: that a slab of a larger pool may have,
    where layers with a window get a pool of their own. None: the same."""
    lacking = keep_pages + slab_pages - num_pages
    if lacking <= 0:
        return ""
    needed = max(keep_pages, most_kept_pages or 0) + max(slab_pages, most_slab_pages or 0)
    num_slabs = -(-(needed - num_pages) // slab_pages)
    most = (keep_pages - 1 - lacking) * page_size
    shorter = f", or lower --context-length to {most}" if most > 0 else ""
    return (
        f"this worker can lend nothing: of {num_pages * page_size} tokens on its device it keeps "
        f"{keep_pages * page_size} for its longest request, and the rest is no whole slab of "
        f"{slab_pages * page_size} tokens. Raise --max-total-tokens to "
        f"{(num_pages + num_slabs * slab_pages) * page_size}{shorter}"
    )


class _LaunchTimes:
    """Which launches were issued in the last window_s seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        # (when, the next launch then), about twenty per window.
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, now: Seconds, launch: int) -> None:
        if not self._samples or now - self._samples[-1][0] >= self._window_s / 20:
            self._samples.append((now, launch))
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()

    def first_in_window(self) -> int:
        return self._samples[0][1] if self._samples else 0


class DeviceLending:
    """ledger: all its slabs have the same length and are mapped. keep_pages, cache_pages: the config's tokens in
    pages. use: of its slabs. The demand before the first step counts as the whole pool.

    wake_at: when `adjust` is due next if nothing else happens, in seconds; None: never."""

    def __init__(
        self,
        config: LendingConfig,
        ledger: SlabLedger,
        keep_pages: int,
        cache_pages: int,
        use: SlabUse,
    ) -> None:
        self.ledger = ledger
        self.use = use
        self._slab_pages = len(ledger.frames_of(0))
        self._num_pages = self._slab_pages * len(ledger.states)
        self._keep_pages = keep_pages
        self._cache_pages = cache_pages
        self._config = config
        self._window = DemandWindow(config.window_s)
        self._launches = _LaunchTimes(config.window_s)
        # When slabs may begin to drain next, in seconds; and when the first that stayed for its use has become old.
        self._drain_at: float | None = None
        self._ages_at = math.inf
        # How many slabs were recalled and are not mapped yet.
        self._num_awaited = 0
        # How many were recalled since the last call of `take_num_recalled`.
        self._num_new_recalled = 0
        self._report = SlabReport()
        self._seen = OwnCache()
        # Pages that were evicted although they were used in the window, and have no room yet.
        self._lacking = 0
        self._regret = Fading()
        self.wake_at: float | None = None

    @property
    def awaits_slabs(self) -> bool:
        """Whether recalled slabs are not mapped yet."""
        return self._num_awaited > 0

    @property
    def draining(self) -> list[int]:
        """The slabs that are draining, ascending."""
        return self.ledger.slabs_in(SlabState.DRAINING).tolist()

    def update(self, report: SlabReport) -> None:
        """report: what all ranks agree on."""
        before = self.ledger.count(SlabState.UNMAPPED)
        unmapped = self.ledger.update(report.mapped)
        assert not unmapped, f"slabs {unmapped} were unmapped without being lent"
        num_away = self.ledger.count(SlabState.UNMAPPED)
        num_back = before - num_away
        self._num_awaited = min(max(0, self._num_awaited - num_back), num_away)
        self._lacking = max(0, self._lacking - num_back * self._slab_pages)
        self._report = report

    def adjust(self, now: Seconds, demand: int, own: OwnCache = OwnCache()) -> list[int]:
        """demand: pages that requests need at the same time. Returns the slabs that begin to drain: the caller drops
        the cached pages in them that no request uses."""
        if self._drain_at is None:
            self._drain_at = now
            self._window.add(now, self._num_pages)
        needed = max(min(demand, self._num_pages), self._keep_pages)
        self._window.add(now, needed)
        self._note_own(now, own)
        self._get_back(self._num_lacking(needed), now)
        num_pages = self._num_mapped_pages()
        spare = scale_down(num_pages, self._window.peak(now) + self._cache_pages, self._slab_pages)
        # A slab that no borrower would take is of more use as a cache here.
        spare = max(0, min(spare, self._report.num_borrowable - self.ledger.count(SlabState.DRAINING)))
        began: list[int] = []
        wakes_at = self._window.falls_at
        is_due = now >= self._drain_at
        if spare and is_due:
            began = self._to_lend(spare, now)
            for slab in began:
                self.ledger.drain(slab)
            self._drain_at = now + self._config.interval_s
        if spare > len(began):
            due_at = max(self._drain_at, self._ages_at) if is_due and not began else self._drain_at
            wakes_at = due_at if wakes_at is None else min(due_at, wakes_at)
        self.wake_at = wakes_at if wakes_at is None or wakes_at < math.inf else None
        return began

    def take_num_recalled(self) -> int:
        """How many slabs were recalled since the last call."""
        num_slabs, self._num_new_recalled = self._num_new_recalled, 0
        return num_slabs

    def check_invariants(self) -> None:
        self.ledger.check_invariants()
        assert 0 <= self._num_awaited <= self.ledger.count(SlabState.UNMAPPED), "more was recalled than is away"

    def _note_own(self, now: Seconds, own: OwnCache) -> None:
        self._launches.note(now, own.launch)
        num_new, first = own.num_evicted - self._seen.num_evicted, self._launches.first_in_window()
        is_recent = own.next_victim is not None and own.next_victim >= first and own.launch > first
        if not is_recent:
            self._lacking = 0
        elif num_new > 0:
            self._lacking = min(self._lacking + num_new, self._num_pages)
        if more := own.lost_tokens - self._seen.lost_tokens:
            self._regret.add(now, more * own.token_s)
        self._seen = own

    def _value(self, now: Seconds) -> float:
        """What a slab of this engine is worth to it, in seconds: what its cache saved, and what it did not for lack
        of room."""
        num_mapped = self.ledger.count(SlabState.MAPPED)
        return (self.use.saved.at(now) + self._regret.at(now)) / max(1, num_mapped)

    def _to_lend(self, num_slabs: int, now: Seconds) -> list[int]:
        """Up to num_slabs, the coldest first; in the order of their numbers."""
        fill = self.use.fill_of(self.ledger.table.state)
        coldest = self.use.coldest(self.ledger.slabs_in(SlabState.MAPPED).tolist(), now, fill)[:num_slabs]
        own, values = self._value(now), self.use.values(now)
        in_window = now - self._config.window_s

        def goes(slab: int) -> bool:
            if not fill.num_cached[slab]:
                return not self._lacking
            if self.use.used_at[slab] <= in_window:
                return True
            own_s = max(own, values[slab])
            return own_s > 0 and self._report.value_us * 1e-6 > FAR_MORE * own_s

        going = sorted(slab for slab in coldest if goes(slab))
        stay = [slab for slab in coldest if slab not in going and fill.num_cached[slab]]
        self._ages_at = (
            min((float(self.use.used_at[slab]) for slab in stay), default=math.inf) + self._config.window_s
        )
        return going

    def _get_back(self, num_needed: int, now: Seconds) -> None:
        """num_needed: slabs that requests lack. Cancel draining for them, then recall, each slab once. Also recall
        what the cache lacks, if that is worth it."""
        cancelled = self.draining[:num_needed]
        for slab in cancelled:
            self.ledger.cancel_drain(slab)
        num_needed -= len(cancelled)
        num_away = self.ledger.count(SlabState.UNMAPPED)
        num_for_cache = 0
        if self._lacking and self._report.lent_value_us * 1e-6 <= self._value(now):
            num_for_cache = -(-self._lacking // self._slab_pages)
        # Other slabs are recalled in place of the late ones.
        num_coming = max(0, self._num_awaited - self._report.num_late)
        num_new = min(max(num_needed, num_for_cache) - num_coming, num_away - self._num_awaited)
        if num_new > 0:
            self._num_awaited += num_new
            self._num_new_recalled += num_new

    def _num_lacking(self, needed: int) -> int:
        """How many more slabs have to be mapped for `needed` pages."""
        return scale_up(self._num_mapped_pages(), needed, self._slab_pages)

    def _num_mapped_pages(self) -> int:
        return self.ledger.count(SlabState.MAPPED) * self._slab_pages
