"""`StoragePrefetcher`: brings what storage has of a queued prompt to the host, while the request waits.

Owns what each waiting request expects from storage, and which requests wait for which operation. Decides when a
request need not wait any more; takes no frames and no nodes itself (see cache_controller.py). No clock: time is told.

    begin ──► probe: how many blocks beyond the local match? ──► fetches, a few blocks each, in order ──► over
                                                                   shared: they are nodes of the tree, and whoever
                                                                   finds them there waits for the same operation
    detach, at dispatch, at its deadline or at its end: a fetch that nobody waits for any more is given up
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hiradix_tree import MatchResult
from sglang.srt.mem_cache.transfer import D2H, FETCH, Ticket, Tier

PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
# A medium that does not answer must not keep a request for ever, whatever the policy says.
WAIT_COMPLETE_LIMIT_S = 60.0


@dataclass(frozen=True)
class PrefetchConfig:
    """policy: best_effort goes without what has not come when the request could start, wait_complete waits for all of
    it, timeout for at most timeout_base_s + timeout_per_ki_token_s per 1,024 tokens, from arrival. threshold: fewer
    tokens than that beyond the local match are not worth asking for."""

    policy: str = "timeout"
    threshold: int = 256
    timeout_base_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25


@dataclass
class Prefetch:
    """What one request expects. tokens: int32, up to the end of the last block that storage may have; keys: of all
    its blocks from the first on, (n, 16). probe: not answered yet; it asks for the blocks from `probed` on. end:
    storage has the blocks up to that token; 0 when nothing more is to be begun. tickets: fetches that it waits for.
    found: tokens [start, end) that storage has brought for it."""

    namespace: str
    tokens: np.ndarray
    keys: np.ndarray
    deadline: float
    probe: Ticket | None = None
    probed: int = 0
    end: int = 0
    tickets: dict[Ticket, None] = field(default_factory=dict)
    found: tuple[int, int] = (0, 0)

    @property
    def asked(self) -> list[Ticket]:
        """Operations that it waits for."""
        return ([self.probe] if self.probe is not None else []) + list(self.tickets)

    @property
    def is_over(self) -> bool:
        return self.probe is None and not self.tickets and not self.end


class StoragePrefetcher:
    """rids name the requests; those with a prefetch are waiting ones."""

    def __init__(self, controller: HiCacheController, config: PrefetchConfig) -> None:
        if config.policy not in PREFETCH_POLICIES:
            raise ValueError(f"prefetch policy {config.policy!r} is none of {', '.join(PREFETCH_POLICIES)}")
        self.controller = controller
        self.tree = controller.tree
        self.config = config
        self.counters: Counter[str] = Counter()
        self._prefetches: dict[str, Prefetch] = {}
        self._waiters: dict[Ticket, dict[str, None]] = {}
        # Those that have something to begin and found too much on its way, or their prefix not on the host yet, the
        # oldest first; whether it was too much: then younger ones queue up behind them.
        self._unfinished: dict[str, None] = {}
        self._is_full = False
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
        """Storage has the first `count` blocks that it was asked for. now: in launches, as the tree counts time."""
        for rid in self._waiters.pop(ticket, {}):
            prefetch, names = self._prefetches[rid], self.tree.block_keys
            assert names is not None
            prefetch.probe = None
            if count:
                self.counters["storage_hit_tokens"] += count * names.block_tokens
                prefetch.end = (prefetch.probed + count) * names.block_tokens
                self._unfinished[rid] = None
                if not self._is_full:
                    self._begin_fetches(rid, prefetch, now, done)

    def end_fetch(self, ticket: Ticket, start: int, end: int, whole: bool) -> None:
        """The operation is over; tokens [start, end) of the path are on the host. whole: all blocks came."""
        for rid in self._waiters.pop(ticket, {}):
            prefetch = self._prefetches[rid]
            del prefetch.tickets[ticket]
            if end > start:
                prefetch.found = (prefetch.found[0] if prefetch.found[1] else start, end)
            if not whole or end == start:
                prefetch.end = 0
                self._unfinished.pop(rid, None)

    def go_on(self, now: int, done: int) -> None:
        """Fetches or backups have ended: begin what had to wait for them, oldest first."""
        self._is_full = False
        for rid in list(self._unfinished):
            if not self._begin_fetches(rid, self._prefetches[rid], now, done):
                return

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
            assert self._prefetches[rid].end, f"{rid} has nothing to begin"
        awaited = any(ticket.link in (FETCH, D2H) for ticket in self.controller.in_flight)
        assert awaited or not self._unfinished, f"{list(self._unfinished)} wait for nothing"

    # -- inside -------------------------------------------------------------------------------------------------

    def _begin_fetches(self, rid: str, prefetch: Prefetch, now: int, done: int) -> bool:
        """Begin what the request, one of the unfinished, lacks. False if too much is in flight; then, and while the
        page above is on its way to the host, it keeps its place, and the rest is tried again when operations have
        ended."""
        controller, names = self.controller, self.tree.block_keys
        while prefetch.end:
            assert controller.storage is not None and names is not None
            match = self._match(prefetch)
            self._join(rid, prefetch, match)
            start = match.total_len
            first = start // names.block_tokens
            last = min(prefetch.end // names.block_tokens, first + controller.storage.blocks_per_op)
            num_pages = (last - first) * names.block_tokens // self.tree.page_size
            if start >= prefetch.end:
                break
            if (
                controller.fetching_pages
                and controller.fetching_pages + num_pages > controller.storage.max_fetch_pages
            ):
                self._is_full = True
                return False
            if self.tree.is_nowhere(match, prefetch.tokens):
                return True
            above = match.path[-1] if match.path else None
            if above is not None:
                ticket = above.tickets[Tier.HOST]
                if above.frames[Tier.HOST] is None:
                    if self._fetching(match):
                        return True  # computed below what is being fetched: it is backed up after that
                    ticket = controller.begin_backup(above, done)
                    if ticket is None:
                        break
                if ticket is not None and ticket.link != FETCH:
                    return True
            if not controller.make_host_room(num_pages, above, done):
                self.counters["prefetch_dropped_tokens"] += prefetch.end - start
                break
            # Once more: making room may have merged nodes.
            match, end = self._match(prefetch), last * names.block_tokens
            ticket = controller.begin_fetch(match, prefetch.tokens[start:end], prefetch.keys[first:last], now)
            self._wait(rid, prefetch, ticket)
        prefetch.end = 0
        del self._unfinished[rid]
        return True

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
