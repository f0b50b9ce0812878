"""`StoragePrefetcher`: brings what storage has of a queued prompt to the host, while the request waits.

Owns what each waiting request expects from storage, and which requests wait for which operation. Decides when a
request need not wait any more; takes no frames and no nodes itself (see cache_controller.py). No clock: time is told.

    begin ──► probe: how many blocks beyond the local match? ──► fetches, a few blocks each, in order ──► over
                                                                   a few at once: who is next says `fetch_rank`
                                                                   shared: they are nodes of the tree, and whoever
                                                                   finds them there waits for the same operation
    detach, at dispatch, at its deadline or at its end: a fetch that nobody waits for any more is given up
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.schedule_policy import FETCH_ORDERS, fetch_rank
from sglang.srt.mem_cache.hiradix_tree import MatchResult
from sglang.srt.mem_cache.transfer import D2H, D2P, FETCH, Ticket, Tier, unpack_found

# Links whose operations a fetch may have to wait for before it can begin. When one ends, call `go_on`.
STALLING_LINKS = (FETCH, D2H, D2P)
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
# A medium that does not answer must not keep a request for ever, whatever the policy says.
WAIT_COMPLETE_LIMIT_S = 60.0


@dataclass(frozen=True)
class PrefetchConfig:
    """policy: best_effort goes without what has not come when the request could start, wait_complete waits for all of
    it, timeout for at most timeout_base_s + timeout_per_ki_token_s per 1,024 tokens, from arrival. threshold: fewer
    tokens than that beyond the local match are not worth asking for. fetch_order: who is given the link next, see
    `fetch_rank`."""

    policy: str = "timeout"
    threshold: int = 256
    timeout_base_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25
    fetch_order: str = "fifo"


@dataclass
class Prefetch:
    """What one request expects. tokens: int32, up to the end of the last block that storage may have; keys: of all
    its blocks from the first on, (n, 16). probe: not answered yet; it asks for the blocks from `probed` on. end:
    storage has the blocks up to that token; 0 when nothing more is to be begun. tickets: fetches that it waits for.
    found: tokens [start, end) that storage has brought for it;
    far_from: those from there on lie on the second storage tier. blocks_left: to be begun, as far as it is known;
    begun_before: see `fetch_rank`."""

    namespace: str
    tokens: np.ndarray
    keys: np.ndarray
    deadline: float
    probe: Ticket | None = None
    probed: int = 0
    end: int = 0
    tickets: dict[Ticket, None] = field(default_factory=dict)
    found: tuple[int, int] = (0, 0)
    far_from: int = 0
    blocks_left: int = 0
    begun_before: int = 0

    @property
    def asked(self) -> list[Ticket]:
        """Operations that it waits for."""
        return ([self.probe] if self.probe is not None else []) + list(self.tickets)

    @property
    def is_over(self) -> bool:
        return self.probe is None and not self.tickets and not self.end


class _Outcome(Enum):
    """Of an attempt to begin a fetch: BEGUN, and there is more to begin; STALLED, its prefix is on its way to the
    host; FULL, too much is on its way; OVER, nothing more is to be begun."""

    BEGUN = auto()
    STALLED = auto()
    FULL = auto()
    OVER = auto()


class StoragePrefetcher:
    """rids name the requests; those with a prefetch are waiting ones.

    begun: told of each fetch, its number and tokens. worth_fetching: told of a request, its blocks that are there or
    on their way, those that it lacks and storage has, and those that others will be given before, says how many of
    its own to fetch; the rest is computed.
    """

    def __init__(
        self,
        controller: HiCacheController,
        config: PrefetchConfig,
        begun: Callable[[int, int], None] = lambda seq, num_tokens: None,
        worth_fetching: Callable[[str, int, int, int], int] = lambda rid, first, num_blocks, ahead: num_blocks,
    ) -> None:
        if config.policy not in PREFETCH_POLICIES:
            raise ValueError(f"prefetch policy {config.policy!r} is none of {', '.join(PREFETCH_POLICIES)}")
        if config.fetch_order not in FETCH_ORDERS:
            raise ValueError(f"the order of fetches {config.fetch_order!r} is none of {', '.join(FETCH_ORDERS)}")
        self.controller = controller
        self.tree = controller.tree
        self.config = config
        self.counters: Counter[str] = Counter()
        self._tell_begun = begun
        self._worth_fetching = worth_fetching
        self._prefetches: dict[str, Prefetch] = {}
        self._waiters: dict[Ticket, dict[str, None]] = {}
        # Those that have something to begin, the oldest answer first: too much is on its way, or their prefix is not
        # on the host yet.
        self._unfinished: dict[str, None] = {}
        # Blocks that were ever begun.
        self._num_begun = 0
        # Of all that have begun; entries go stale.
        self._deadlines: list[tuple[float, str]] = []

    def begin(self, rid: str, namespace: str, tokens: np.ndarray, now: float) -> None:
        """A request was queued. tokens: int32, all of its prompt that a cache may serve."""
        names = self.tree.block_keys
        if self.controller.storage is None or names is None:
            return
        size = names.block_tokens
        tokens = tokens[: len(tokens) // size * size]
        match = self.tree.match(namespace, tokens, fetching=True)
        lacking = len(tokens) - match.total_len
        if lacking < max(1, self.config.threshold) and not self._fetching(match):
            return
        config = self.config
        limit = WAIT_COMPLETE_LIMIT_S
        if config.policy == "timeout":
            limit = config.timeout_base_s + config.timeout_per_ki_token_s * lacking / 1024
        prefetch = Prefetch(namespace, tokens, names.of_prompt(namespace, tokens), now + limit)
        self._prefetches[rid] = prefetch
        heapq.heappush(self._deadlines, (prefetch.deadline, rid))
        self._join(rid, prefetch, match)
        if lacking >= max(1, config.threshold):
            prefetch.probed = match.total_len // size
            prefetch.probe = self.controller.probe(prefetch.keys[prefetch.probed :])
            self._waiters[prefetch.probe] = {rid: None}
            self.counters["storage_probes"] += 1

    @property
    def is_idle(self) -> bool:
        """Whether no waiting request has ever asked storage."""
        return not self._prefetches

    @property
    def num_waiting(self) -> int:
        """Requests that wait for storage."""
        return sum(not prefetch.is_over for prefetch in self._prefetches.values())

    def may_start(self, rid: str) -> bool:
        """Whether the request need not wait for storage (any longer)."""
        return self.config.policy == "best_effort" or rid not in self._prefetches or self._prefetches[rid].is_over

    def found(self, rid: str) -> tuple[int, int]:
        """Tokens [start, end) of the prompt that storage has brought to the host for this request."""
        prefetch = self._prefetches.get(rid)
        return prefetch.found if prefetch is not None else (0, 0)

    def found_by_tier(self, rid: str) -> tuple[tuple[int, int], ...]:
        """The same, of each storage tier; empty if nothing was brought."""
        start, end = self.found(rid)
        if not end:
            return ()
        border = min(max(start, self._prefetches[rid].far_from), end)
        return (start, border), (border, end)

    def detach(self, rid: str, done: int) -> None:
        """The request starts, or ends: it waits for nothing more."""
        prefetch = self._prefetches.pop(rid, None)
        if prefetch is None:
            return
        self._unfinished.pop(rid, None)
        self._leave(rid, prefetch, done)

    def detach_all(self, done: int) -> None:
        """Storage is about to go: nobody waits for it any more."""
        for rid in list(self._prefetches):
            self.detach(rid, done)

    def expire(self, now: float, done: int) -> None:
        """Let requests go whose deadline has passed, with what has come."""
        while (deadline := self.next_deadline) is not None and deadline <= now:
            _, rid = heapq.heappop(self._deadlines)
            self._unfinished.pop(rid, None)
            self._leave(rid, self._prefetches[rid], done)
            self.counters["prefetch_timeouts"] += 1

    @property
    def next_deadline(self) -> float | None:
        """When a request stops waiting though not everything has come, in the seconds that `begin` was told."""
        while self._deadlines:
            deadline, rid = self._deadlines[0]
            prefetch = self._prefetches.get(rid)
            if prefetch is not None and prefetch.deadline == deadline and not prefetch.is_over:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def end_probe(self, ticket: Ticket, count: int, now: int, done: int) -> None:
        """Storage has blocks of those that it was asked for, `unpack_found(count)`. now: in launches, as the tree
        counts time."""
        count, far = unpack_found(count)
        for rid in self._waiters.pop(ticket, {}):
            prefetch, names = self._prefetches[rid], self.tree.block_keys
            assert names is not None
            prefetch.probe = None
            if count:
                self.counters["storage_hit_tokens"] += count * names.block_tokens
                prefetch.end = (prefetch.probed + count) * names.block_tokens
                prefetch.far_from = prefetch.end - far * names.block_tokens
                prefetch.blocks_left, prefetch.begun_before = count, self._num_begun
                self._unfinished[rid] = None
                rank = self._rank(rid)
                others = (self._prefetches[r] for r in self._unfinished if r != rid and self._rank(r) <= rank)
                if not self._cut(rid, prefetch, prefetch.probed, sum(other.blocks_left for other in others)):
                    prefetch.end = 0
                    del self._unfinished[rid]
                self.go_on(now, done)

    def end_fetch(self, ticket: Ticket, start: int, end: int, whole: bool) -> None:
        """The operation is over; tokens [start, end) of the path are on the host. whole: all blocks came."""
        for rid in self._waiters.pop(ticket, {}):
            prefetch = self._prefetches[rid]
            del prefetch.tickets[ticket]
            if end > start:
                prefetch.found = (prefetch.found[0] if prefetch.found[1] else start, end)
            if not whole or end == start or self._is_begun(rid, prefetch):
                prefetch.end = 0
                self._unfinished.pop(rid, None)

    def go_on(self, now: int, done: int) -> None:
        """Fetches or backups have ended, or somebody came: begin as much as may be on its way, by `fetch_rank`.
        Whoever is next and finds too little room lets nobody pass; whoever waits for its prefix does."""
        stalled = set()
        while ready := [rid for rid in self._unfinished if rid not in stalled]:
            rid = min(ready, key=self._rank)
            outcome = self._begin_fetch(rid, self._prefetches[rid], now, done)
            if outcome == _Outcome.FULL:
                return
            if outcome == _Outcome.STALLED:
                stalled.add(rid)
            elif outcome == _Outcome.OVER:
                self._prefetches[rid].end = 0
                del self._unfinished[rid]

    def check_invariants(self) -> None:
        for ticket, rids in self._waiters.items():
            assert ticket in self.controller.in_flight, f"{list(rids)} wait for {ticket}, which is over"
            assert rids, f"nobody waits for {ticket}"
        for ticket in self.controller.in_flight:
            wanted = ticket.link == FETCH and self.tree.nodes_of(ticket)
            assert not wanted or ticket in self._waiters, f"{ticket} goes on, but nobody waits for it"
        for rid, prefetch in self._prefetches.items():
            assert all(rid in self._waiters[ticket] for ticket in prefetch.asked)
        for rid in self._unfinished:
            assert self._prefetches[rid].end and self._prefetches[rid].blocks_left, f"{rid} has nothing to begin"
        awaited = any(ticket.link in STALLING_LINKS for ticket in self.controller.in_flight)
        assert awaited or not self._unfinished, f"{list(self._unfinished)} wait for nothing"

    # -- inside -------------------------------------------------------------------------------------------------

    def _rank(self, rid: str) -> int:
        prefetch = self._prefetches[rid]
        return fetch_rank(self.config.fetch_order, prefetch.blocks_left, prefetch.begun_before)

    def _cut(self, rid: str, prefetch: Prefetch, first: int, ahead: int) -> bool:
        """Give up what of the blocks from `first` on is sooner computed. Whether anything is left to fetch."""
        assert self.tree.block_keys is not None
        size = self.tree.block_keys.block_tokens
        left = prefetch.end // size - first
        assert left > 0, f"{rid} has nothing to begin"
        prefetch.blocks_left = self._worth_fetching(rid, first, left, ahead)
        if prefetch.blocks_left < left:
            self.counters["fetches_cut"] += 1
            self.counters["fetch_cut_tokens"] += (left - prefetch.blocks_left) * size
            prefetch.end = (first + prefetch.blocks_left) * size
        return prefetch.blocks_left > 0

    def _is_begun(self, rid: str, prefetch: Prefetch) -> bool:
        """Whether others have begun what the request lacks; then it waits for that."""
        match = self._match(prefetch)
        self._join(rid, prefetch, match)
        return match.total_len >= prefetch.end

    def _begin_fetch(self, rid: str, prefetch: Prefetch, now: int, done: int) -> _Outcome:
        """Begin the next operation for one of the unfinished."""
        controller, names = self.controller, self.tree.block_keys
        assert controller.storage is not None and names is not None
        match = self._match(prefetch)
        self._join(rid, prefetch, match)
        start = match.total_len
        if start >= prefetch.end:
            return _Outcome.OVER
        first, size = start // names.block_tokens, names.block_tokens
        if not self._cut(rid, prefetch, first, 0):
            return _Outcome.OVER
        last = min(prefetch.end // size, first + controller.storage.blocks_per_op)
        assert last > first, f"{rid} has nothing to begin"
        num_pages = (last - first) * size // self.tree.page_size
        if not controller.may_fetch(num_pages):
            return _Outcome.FULL
        if self.tree.is_nowhere(match, prefetch.tokens):
            return _Outcome.STALLED
        above = match.path[-1] if match.path else None
        if above is not None:
            ticket = above.tickets[Tier.HOST]
            if above.frames[Tier.HOST] is None:
                if self._fetching(match):
                    return _Outcome.STALLED  # computed below what is being fetched: it is backed up after that
                # None also for a prefix that only a peer has: nothing copies from there to the host.
                ticket = controller.begin_backup(above, done)
                if ticket is None:
                    self.counters["prefetch_dropped_tokens"] += prefetch.end - start
                    return _Outcome.OVER
            if ticket is not None and ticket.link != FETCH:
                return _Outcome.STALLED
        if not controller.make_room(Tier.HOST, num_pages, above, done):
            self.counters["prefetch_dropped_tokens"] += prefetch.end - start
            return _Outcome.OVER
        # Once more: making room may have merged nodes.
        match, end = self._match(prefetch), last * size
        ticket = controller.begin_fetch(match, prefetch.tokens[start:end], prefetch.keys[first:last], now)
        self._num_begun += last - first
        self._tell_begun(ticket.seq, (last - first) * size)
        prefetch.blocks_left = max(1, prefetch.blocks_left - (last - first))
        self._wait(rid, prefetch, ticket)
        self._let_join(rid, prefetch, ticket, first)
        return _Outcome.OVER if end >= prefetch.end else _Outcome.BEGUN

    def _let_join(self, rid: str, prefetch: Prefetch, ticket: Ticket, first: int) -> None:
        """Others that lack the same block need not wait for their turn. A block's key names all before it."""
        key = prefetch.keys[first].tobytes()
        for other in self._unfinished:
            joining = self._prefetches[other]
            if other == rid or joining.namespace != prefetch.namespace or len(joining.keys) <= first:
                continue
            if joining.keys[first].tobytes() == key:
                self._wait(other, joining, ticket)

    def _match(self, prefetch: Prefetch) -> MatchResult:
        return self.tree.match(prefetch.namespace, prefetch.tokens[: prefetch.end], fetching=True)

    def _join(self, rid: str, prefetch: Prefetch, match: MatchResult) -> None:
        for ticket in self._fetching(match):
            self._wait(rid, prefetch, ticket)

    def _fetching(self, match: MatchResult) -> list[Ticket]:
        tickets = (node.tickets[Tier.HOST] for node in match.path)
        return [t for t in tickets if t is not None and t.link == FETCH]

    def _wait(self, rid: str, prefetch: Prefetch, ticket: Ticket) -> None:
        prefetch.tickets[ticket] = None
        self._waiters.setdefault(ticket, {})[rid] = None

    def _leave(self, rid: str, prefetch: Prefetch, done: int) -> None:
        # The last of a path first: each takes what lies below with it.
        for ticket in reversed(prefetch.asked):
            waiters = self._waiters[ticket]
            del waiters[rid]
            if not waiters:
                del self._waiters[ticket]
                if ticket.link == FETCH:
                    self.controller.cancel_fetch(ticket, done)
                else:
                    self.controller.cancel_probe(ticket)
        prefetch.probe, prefetch.end, prefetch.tickets = None, 0, {}
