"""`StorageController`: everything between the host pool and storage: probe, fetch, store, prefetch.

Owns what each waiting request expects from storage, which requests wait for which operation, and the stores that are
attached. Decides when a request need not wait any more. Never reads a clock: the time comes with the calls.

    begin ──► probe: how many blocks beyond the local match? ──► fetches, a few blocks each, in order ──► over
                                                                 a few at once, see `FetchOrder`. They are
                                                                 nodes of the tree, so requests that find them there
                                                                 wait for the same operation
    detach, at dispatch or at its end: a fetch that no request waits for is cancelled; so it is at the deadline

    From its first fetch to its dispatch a request soft-pins its path, within a limit. Others wait for that room, with
    their deadlines put off. What was found and is gone at dispatch is asked for again.

    two stores: a probe asks both, the second one for what is behind the blocks of the first. A fetch reads one of
    them. Each has links of its own, and is left alone for itself.

    writers (block_writer.py): what goes from the host to storage
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial

import numpy as np

from sglang.srt.managers.attached_store import AttachedStore
from sglang.srt.managers.attached_stores import AttachedStores
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.fetch_order import Attempt, FetchOrder
from sglang.srt.managers.lost_hits import StorageOutcome
from sglang.srt.managers.prefetch import Prefetch, joined_runs
from sglang.srt.managers.probe_value import ProbeValue
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import FETCH_ORDERS
from sglang.srt.managers.scheduler_config import MOST_CUT_TOKENS
from sglang.srt.managers.storage_advice import StorageAdvice
from sglang.srt.managers.storage_checks import check_storage
from sglang.srt.managers.storage_setup import (
    PREFETCH_POLICIES,
    PrefetchConfig,
    StorageLimits,
    StorageSetup,
    others_than,
)
from sglang.srt.managers.tier_switches import TierSwitches
from sglang.srt.mem_cache.block_keys import NO_KEYS, BlockKeys
from sglang.srt.mem_cache.block_names import MAX_STORES
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.namespaces import is_alone
from sglang.srt.mem_cache.node import (
    Dropped,
    FilledRun,
    MatchResult,
    Node,
    is_alone_and_partial,
    is_fetching,
    is_hole,
    note_source,
)
from sglang.srt.mem_cache.radix import common_len
from sglang.srt.mem_cache.transfer import (
    FETCH_LINKS,
    OPS_OF_BLOCKS,
    PROBE,
    PROBE_FAILED,
    STALLING_LINKS,
    STORAGE_LINKS,
    STORE_LINKS,
    StorageAction,
    StorageOp,
    Ticket,
    Tier,
)
from sglang.srt.utils.time_units import NO_LAUNCH, Seconds

# A medium that does not answer must not keep a request for ever, whatever the policy.
WAIT_COMPLETE_LIMIT_S = Seconds(60.0)
# Nodes are cut between blocks where these are no larger than that share of the device.
MAX_CUT_RATIO = 1 / 256
# A block has no more than this part of a pool for layers with a window, which keeps up to a block more than is seen.
_CUTS_IN_WINDOWED = 16
# So often storage is asked for one request.
MAX_ASKED = 3
# A deadline is put off by so much at least.
MIN_PUT_OFF_S = Seconds(1.0)


class StorageController:
    """rids name the requests; those with a prefetch are waiting ones."""

    def __init__(self, controller: HiCacheController, switches: TierSwitches | None = None) -> None:
        self.controller = controller
        self._switches = switches or TierSwitches()
        self.ledger = controller.ledger
        self.tree = controller.tree
        self.counters: Counter[str] = Counter()
        self.stores = AttachedStores(
            controller, self.counters, WAIT_COMPLETE_LIMIT_S, lambda op: self._advice.expected_s(op)
        )
        self.config = PrefetchConfig()
        # Those that have something to begin: too much is on its way, or their prefix is not on the host yet.
        self._unfinished = FetchOrder(self.config.fetch_order)
        # What is attached.
        self.setup: StorageSetup | None = None
        # Whether something is attached, and not being emptied or detached.
        self.is_open = False
        # Whether an administrator wants nothing read.
        self.is_unread = False
        # Whether `begin_fetches` is due: storage has answered, or something ended that others may have waited for.
        self.fetches_due = False
        self._clock = controller.ledger.clock
        self._advice = StorageAdvice()
        # What probes are worth, and when those began that are not over.
        self._probe_value = ProbeValue()
        self._probes: dict[Ticket, float] = {}
        self._prefetches: dict[str, Prefetch] = {}
        # Those of them that are not over.
        self._waiting: dict[str, None] = {}
        # Those that may have ceased to be among them; see `take_let_start`.
        self.let_start: list[str] = []
        self._waiters: dict[Ticket, dict[str, None]] = {}
        # Blocks that were ever begun, and fetches that have ended.
        self._num_begun = self._num_ended = 0
        # Of all that have begun; entries go stale.
        self._deadlines: list[tuple[float, str]] = []

    def set_advice(self, advice: StorageAdvice) -> None:
        self._advice = advice
        for store in (self.stores.near, self.stores.far):
            store.writer.is_worth_storing = partial(advice.is_worth_storing, store.place)

    def set_config(self, config: PrefetchConfig) -> None:
        if config.policy not in PREFETCH_POLICIES:
            raise ValueError(f"prefetch policy {config.policy!r} is none of {', '.join(PREFETCH_POLICIES)}")
        if config.fetch_order not in FETCH_ORDERS:
            raise ValueError(f"the order of fetches {config.fetch_order!r} is none of {', '.join(FETCH_ORDERS)}")
        assert not self._unfinished, "the order of fetches changes only where there are none"
        self.config, self._unfinished = config, FetchOrder(config.fetch_order)
        self._set_patience()

    def _set_patience(self) -> None:
        is_limited = self.config.policy == "timeout"
        self.stores.set_read_hang(self.config.timeout_base_s if is_limited else WAIT_COMPLETE_LIMIT_S)

    # -- attaching ----------------------------------------------------------------------------------------------

    def attach_storage(self, setup: StorageSetup, works: bool = True) -> None:
        """Storage was opened, or emptied. works: False if it could not be emptied."""
        assert self.controller.has_host, "storage needs a host tier"
        self.controller.set_write_policy(setup.write_policy)
        self.set_config(setup.prefetch)
        self._change_storage(setup)
        if works:
            self.stores.reset()
        self.obey_switches()

    def detach_storage(self) -> None:
        self._change_storage(None)
        self.stores.reset()

    def _change_storage(self, setup: StorageSetup | None) -> None:
        """Storage was attached, emptied or detached: nothing that the tree knew of it holds any more."""
        self.setup, self.is_open = setup, setup is not None
        names = BlockKeys(setup.secret, setup.block_tokens, setup.tenant_key) if setup is not None else None
        self.tree.rename_blocks(names, len(self.tiers))
        self.tree.pages.opened(self.tiers, names.block_tokens if names is not None else 0)
        device_tokens = self.controller.tables[Tier.DEVICE].num_pages * self.tree.page_size
        most = MAX_CUT_RATIO * device_tokens
        for windowed in self.ledger.windowed.values():
            most = min(most, MOST_CUT_TOKENS, windowed.table.num_usable * self.tree.page_size // _CUTS_IN_WINDOWED)
        if names is not None and names.block_tokens > most:
            # To evict up to a block more than is needed would cost too much.
            self.tree.order.cut_tokens = self.tree.page_size
        self._probe_value = ProbeValue()
        self.stores.open(setup)
        self.controller.feeds_storage = self.is_open
        self._set_patience()
        self.note_room((True,) * MAX_STORES)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Of what is attached."""
        return self.setup.tiers if self.setup is not None else ()

    def note_room(self, has_room: tuple[bool, ...]) -> None:
        """has_room: of each store, whether it can take more blocks without giving up others."""
        self.stores.note_room(has_room)
        has_peers = Tier.PEER in self.controller.tables
        self.controller.stores_early = has_peers and self.is_open and self.stores.take_early

    def close(self) -> None:
        """Begin nothing new, and cancel what is on its way."""
        for rid in list(self._prefetches):
            self.detach(rid)
        self.is_open = False
        self.stores.close()
        self.controller.stores_early = False
        for ticket, op in list(self.ledger.in_flight.items()):
            if any(ticket in store.fetches for store in self.stores):
                self._cancel_fetch(ticket)
            if isinstance(op, StorageOp) and op.action in OPS_OF_BLOCKS:
                self.ledger.cancel(ticket)

    @property
    def limits(self) -> StorageLimits | None:
        """None while storage is not open."""
        return self.setup.limits if self.setup is not None and self.is_open else None

    @property
    def leaves_out_windows(self) -> bool:
        """Whether fetches bring of layers with a window only what windows reach from their end: the rest takes time,
        and of what was stored in part it is not there. So nothing of what comes is of use before all has come."""
        return self.setup is not None and self.setup.has_windowed_store

    def _comes_in_time(self, prefetch: Prefetch, num_tokens: int) -> bool:
        """Whether what a request begins to fetch is expected to be there before it stops waiting."""
        if not self.leaves_out_windows or prefetch.is_pinned or self.config.policy != "timeout":
            return True
        fetch_s = self._advice.fetch_s(self._store_of(prefetch, prefetch.end - num_tokens).place, num_tokens)
        return fetch_s is None or fetch_s <= prefetch.deadline - self.stores.near.reads.now

    def hangs_on(self, link: str) -> bool:
        """Whether what is under way on a link is not expected to end."""
        return any(breaker.hangs and link in breaker.links for breaker in self.stores.breakers)

    @property
    def has_outstanding(self) -> bool:
        """Whether an operation of storage is under way."""
        return self.ledger.is_busy(STORAGE_LINKS)

    def administer(self, action: StorageAction, setup: str = "") -> Ticket:
        """Attach, detach or clear; nothing else is in flight to storage."""
        assert not self.has_outstanding
        return self.ledger.begin_storage_op(PROBE, action, setup=setup)

    def tell(self, action: StorageAction, tenant: bytes, limit: int = -1, tier: Tier = Tier.DISK) -> Ticket:
        """Erase or limit a tenant's blocks, behind the writes that are under way. See `StorageOp`."""
        place = self.tiers.index(tier) if tier in self.tiers else 0
        return self.ledger.begin_storage_op(STORE_LINKS[place], action, tenant=tenant, limit=limit, tier=tier)

    def set_prefetch_policy(self, policy: str) -> None:
        """Of `PREFETCH_POLICIES`; requests that wait already go on as they began."""
        assert self.setup is not None
        self.config = replace(self.config, policy=policy)
        self.let_start += self._waiting
        self.setup = replace(self.setup, prefetch=self.config)
        self._set_patience()

    # -- requests -----------------------------------------------------------------------------------------------

    def begin(self, rid: str, namespace: str, tokens: np.ndarray, now: Seconds, keys: np.ndarray = NO_KEYS) -> None:
        """A request was queued. tokens: int32, all of its prompt that a cache may serve. keys: of the prompt's
        blocks, if they are known."""
        names = self.tree.names.keys
        if not self.is_open or names is None or is_alone(namespace):
            return
        size = names.block_tokens
        num_blocks = len(tokens) // size
        prefetch = Prefetch(namespace, tokens[: num_blocks * size], WAIT_COMPLETE_LIMIT_S, keys=keys[:num_blocks])
        self._prefetches[rid] = prefetch
        is_read = self.stores.is_read
        prefetch.unread = "switched_off" if self.is_unread else "" if is_read else "storage_off"
        if is_read:
            self._ask(rid, prefetch, now)
        for store in self.stores if num_blocks else ():
            if store.reads.is_open and not store.is_unread and store.trial.ticket is None and store.reads.may_try:
                store.trial.begin(names.of_prompt(namespace, tokens[:size]))
                self.counters["storage_trials"] += 1

    def ask_again(self, rid: str, num_found: int, now: Seconds) -> bool:
        """A request could start with num_found tokens found. Whether it waits once more, as more was found before, or
        was left to storage for lack of room."""
        prefetch = self._prefetches.get(rid)
        if (
            prefetch is None
            or not self.is_open
            or not self.stores.is_read
            or self.config.policy == "best_effort"
            or prefetch.num_asked >= MAX_ASKED
            or prefetch.probe is not None
            or not prefetch.is_over
            or prefetch.reach < num_found + max(1, self.config.threshold)
        ):
            return False
        self._ask(rid, prefetch, now)
        if prefetch.is_over:
            return False
        self.counters["storage_asked_again"] += 1
        return True

    @property
    def num_waiting(self) -> int:
        """Requests that wait for storage."""
        return len(self._waiting)

    def may_start(self, rid: str) -> bool:
        """Whether storage does not hold the request up."""
        return rid not in self._waiting or self.config.policy == "best_effort"

    def take_let_start(self) -> list[str]:
        """Requests that storage has ceased to hold up since the last call. Some may be gone."""
        ceased, self.let_start = self.let_start, []
        return [rid for rid in ceased if self.may_start(rid)]

    def startable(self, waiting: Collection[Req]) -> list[Req]:
        """Those that storage does not hold up, in their order. waiting: all that wait."""
        held_up = self._waiting
        if not held_up or self.config.policy == "best_effort":
            return list(waiting)
        return [req for req in waiting if req.rid not in held_up] if len(held_up) < len(waiting) else []

    def found_by_tier(self, rid: str) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each storage tier, runs [start, end) of the prompt's tokens that it has brought to the host for this
        request; empty if nothing was brought."""
        prefetch = self._prefetches.get(rid)
        if prefetch is None or not prefetch.found:
            return ()
        of_place = ([(start, end) for at, start, end in prefetch.found if at == place] for place in range(MAX_STORES))
        return tuple(joined_runs(runs) for runs in of_place)

    def outcome(self, rid: str) -> StorageOutcome:
        """What a request that starts got; before `detach`."""
        prefetch = self._prefetches.get(rid)
        if prefetch is None or self.is_unread:
            return StorageOutcome("switched_off" if self.is_unread else "storage_not_awaited")
        return StorageOutcome(prefetch.trouble, prefetch.stored_end, prefetch.cut_from)

    def leaves_at(self, rid: str) -> int:
        """See `Prefetch`; before `detach`."""
        prefetch = self._prefetches.get(rid)
        return prefetch.leaves_at if prefetch is not None else 0

    def awaited_ids(self) -> set[int]:
        """Ids of the nodes on the soft-pinned paths of requests: what was fetched for them, and what is above."""
        found: set[int] = set()
        for prefetch in self._prefetches.values():
            node = prefetch.pinned
            while node is not None and node.id not in found:
                found.add(node.id)
                node = node.parent
        return found

    def detach(self, rid: str) -> None:
        """The request starts, or ends: it waits for nothing more."""
        prefetch = self._prefetches.pop(rid, None)
        if prefetch is None:
            return
        self._begin_no_more(rid)
        self._leave(rid, prefetch)
        self._unpin(prefetch)

    def expire(self, now: Seconds) -> None:
        """Let requests go whose deadline has passed, with what has come. Those that could begin no fetch, as they or
        others before them find too much soft-pinned, go on waiting."""
        order, first, is_known = self._unfinished, None, False
        while (deadline := self.next_deadline) is not None and deadline <= now:
            _, rid = heapq.heappop(self._deadlines)
            prefetch = self._prefetches[rid]
            # Not where storage hangs, which would cost one timeout after the other.
            has_progressed = not self.stores.num_fetches or self._num_ended > prefetch.num_ended_before
            if not is_known or (first is not None and first not in order):
                first, is_known = self._first_held_up(), True
            has_begun = rid not in order or prefetch.is_pinned
            is_held_up = first is not None and not has_begun and not order.is_before(rid, first)
            if is_held_up and has_progressed and now < prefetch.last_deadline:
                self._set_deadline(rid, prefetch, now, max(prefetch.limit_s, MIN_PUT_OFF_S))
                continue
            self._let_go(rid, prefetch)

    def set_now(self, now: Seconds) -> None:
        """At the beginning of a step; as for `begin`."""
        self.stores.set_now(now)

    def watch(self) -> None:
        """After operations have been taken in, and again after they were begun: no request waits for storage that
        hangs or fails."""
        for breaker in self.stores.breakers:
            oldest = [self.ledger.oldest(link) for link in breaker.links]
            # To erase a tenant's blocks may take long.
            breaker.watch(op for op in oldest if isinstance(op, StorageOp) and op.action in OPS_OF_BLOCKS)
        if self.stores.near.take_opened():
            self._give_up_near()
        if self.stores.far.take_opened():
            self._give_up_far()
        for store in self.stores:
            if store.writes.is_open or (store.writes.is_late and self._unfinished):
                store.writer.unpin()
                self.fetches_due |= bool(self._unfinished)

    def _begin_no_more(self, rid: str) -> None:
        """What is behind the request may have waited for it."""
        if rid in self._unfinished:
            self._unfinished.remove(rid)
            self.fetches_due = True

    def obey_switches(self) -> None:
        """After they were turned, or other storage was attached: no request waits for what is off."""
        switches = self._switches
        through_host = {Tier.HOST} & (switches.unread | switches.unwritten)
        for store, tier in zip(self.stores, self.tiers):
            store.is_unread = bool(through_host) or tier in switches.unread
            store.writer.obey_switch(tier in switches.unwritten)
        self.is_unread = bool(through_host) or (bool(self.stores) and all(s.is_unread for s in self.stores))
        if self.is_unread:
            self._let_all_go()
        elif self.stores.near.is_unread:
            self._give_up_near()
        elif self.stores.far.is_unread:
            self._give_up_far()

    def _let_all_go(self) -> None:
        for rid, prefetch in self._prefetches.items():
            # An answer that is not waited for would begin fetches, too.
            if not prefetch.is_over or prefetch.probe is not None:
                self._let_go(rid, prefetch)

    def _give_up_near(self) -> None:
        """No request waits for the first store. One that waits for the second one alone goes on; the others may ask
        that when they could start."""
        for rid, prefetch in self._prefetches.items():
            is_far = all(ticket.link == self.stores.far.fetch_link for ticket in prefetch.asked)
            if is_far and (not prefetch.end or self._next_store(prefetch) is self.stores.far):
                continue
            num_asked, wanted_end = prefetch.num_asked, max(prefetch.end, prefetch.begun_end)
            self._let_go(rid, prefetch)
            if self.stores.far.is_read and len(self.stores) > 1:
                prefetch.num_asked, prefetch.reach = num_asked, max(prefetch.reach, wanted_end)

    def _give_up_far(self) -> None:
        """No request waits for the second store; what the first one has is still fetched."""
        size = self.tree.names.keys.block_tokens if self.tree.names.keys is not None else 0
        for rid, prefetch in self._prefetches.items():
            reads_far = [ticket for ticket in prefetch.tickets if ticket.link == self.stores.far.fetch_link]
            if not reads_far and prefetch.end <= prefetch.far_from:
                continue
            self._cease_waiting(rid, prefetch, reads_far)
            for ticket in reads_far:
                del prefetch.tickets[ticket]
            prefetch.timed_out = True
            begun_end = max(prefetch.probed * size, prefetch.begun_end)
            prefetch.end = prefetch.far_from if rid in self._unfinished and begun_end < prefetch.far_from else 0
            if prefetch.end:
                prefetch.blocks_left = max(1, (prefetch.end - begun_end) // size)
                self._unfinished.update(rid, prefetch)
            else:
                self._begin_no_more(rid)
            self.counters["prefetch_timeouts"] += 1
            self._note_waiting(rid, prefetch)

    def _let_go(self, rid: str, prefetch: Prefetch) -> None:
        """A request waits no longer."""
        self._begin_no_more(rid)
        # A slow storage is not asked again.
        prefetch.num_asked, prefetch.timed_out = MAX_ASKED, True
        self._leave(rid, prefetch)
        self.counters["prefetch_timeouts"] += 1

    @property
    def wake_at(self) -> float | None:
        """A step is due then even if nothing comes in; in the seconds that `begin` was told."""
        if not self._prefetches:
            return None
        late_at = [store.writes.late_at for store in self.stores] if self._unfinished else []
        times = [self.next_deadline, *(store.reads.next_at for store in self.stores), *late_at]
        wake_at = min((t for t in times if t is not None), default=math.inf)
        return wake_at if wake_at < math.inf else None

    @property
    def next_deadline(self) -> float | None:
        """When a request stops waiting though not everything has come."""
        while self._deadlines:
            deadline, rid = self._deadlines[0]
            prefetch = self._prefetches.get(rid)
            if prefetch is not None and prefetch.deadline == deadline and not prefetch.is_over:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def end_probe(self, ticket: Ticket, count: int, far_count: int = 0, part_count: int = 0) -> None:
        """Storage has the first `count` of the blocks that it was asked for, the last `far_count` of them on its
        second tier. PROBE_FAILED: it did not answer. part_count: see `OpResult`."""
        op = self.ledger.end(ticket)
        assert isinstance(op, StorageOp)
        if has_failed := count == PROBE_FAILED:
            self.stores.near.reads.end(PROBE, succeeded=False)
            count = 0
        if (began := self._probes.pop(ticket, None)) is not None:
            self._probe_value.add(self.stores.near.reads.now - began, count / len(op.keys))
        if (trial := self.stores.trial_of(ticket)) is not None:
            trial.end_probe(found=count > 0)
            return
        for rid in self._waiters.pop(ticket, {}):
            prefetch, names = self._prefetches[rid], self.tree.names.keys
            assert names is not None
            prefetch.probe, prefetch.probe_failed = None, has_failed
            if part_count:
                prefetch.leaves_at = (prefetch.probed + part_count) * names.block_tokens
            if count:
                self.counters["storage_hit_tokens"] += count * names.block_tokens
                prefetch.end = prefetch.stored_end = (prefetch.probed + count) * names.block_tokens
                prefetch.far_from = prefetch.end - far_count * names.block_tokens
                prefetch.blocks_left, prefetch.begun_before = count, self._num_begun
                heapq.heappush(self._deadlines, (prefetch.deadline, rid))
                first = prefetch.probed
                if self.leaves_out_windows:
                    # The host may have more, of which only what windows reach is to come.
                    first = max(first, self._match(prefetch, prefetch.end).total_len // names.block_tokens)
                is_begun = first * names.block_tokens >= prefetch.end
                if is_begun or self._cut(rid, prefetch, first, self._unfinished.blocks_before(prefetch)):
                    self._unfinished.add(rid, prefetch)
                else:
                    prefetch.end = 0
                self.fetches_due = True
            self._note_waiting(rid, prefetch)

    def begin_fetches(self) -> None:
        """Begin as many as may be on their way, in the order of `FetchOrder`. Where the next request finds too little
        room, no other passes. Others do where it waits for its prefix; where its store is busy, those of the other
        one; and where it waits for others' soft pins, those that have some."""
        self.fetches_due = False
        only_pinned = False
        busy: set[int] = set()
        for rid in self._unfinished:
            prefetch, outcome = self._prefetches[rid], Attempt.BEGUN
            if only_pinned and not prefetch.is_pinned:
                continue
            if busy and self._next_store(prefetch).place in busy:
                continue
            if self._waits_for_pinned(prefetch):
                only_pinned = True
                continue
            # It stays the first of those that may begin: a rank never rises.
            while outcome == Attempt.BEGUN:
                outcome = self._begin_next(rid, prefetch)
            if outcome == Attempt.OVER:
                prefetch.end = 0
                self._unfinished.remove(rid)
                self._note_waiting(rid, prefetch)
                continue
            self._unfinished.update(rid, prefetch)
            if outcome == Attempt.BUSY:
                busy.add(self._next_store(prefetch).place)
            if outcome == Attempt.FULL or len(busy) == len(self.stores):
                return

    # -- operations ---------------------------------------------------------------------------------------------

    def begin_fetch(
        self,
        match: MatchResult,
        tokens: np.ndarray,
        keys: np.ndarray,
        place: int = 0,
        num_partial: int = 0,
        lacking: Collection[int] = (),
    ) -> Ticket:
        """Fetch the blocks that cover tokens [match.total_len, …), of which the first may begin before, from a store.
        The caller has made room on the host.

        match: made with `fetching`. tokens: int32, up to the end of the last block, or of the node that is filled.
        keys: (n, 16). num_partial: of the first so many pages layers with a window are left out. lacking: see
        `BlockNames.name_fetched`.
        """
        names, page, host = self.tree.names.keys, self.tree.page_size, self.controller.tables[Tier.HOST]
        assert names is not None and self.setup is not None
        num_pages = len(keys) * names.block_tokens // page
        frames = host.allocate(num_pages, FrameState.FILLING)
        assert frames is not None, "a fetch needs free frames: make room first"
        if (pool := self.ledger.windowed.get(Tier.HOST)) is not None:
            pool.give(frames[num_partial:])
        store, skips = self.stores.of_link(FETCH_LINKS[place]), others_than(place, len(self.stores))
        falls_back = bool(lacking) and self.stores.near.is_read
        ticket = self.ledger.begin_storage_op(
            store.fetch_link, StorageAction.GET, keys, frames, skips=skips, falls_back=falls_back
        )
        store.fetches[ticket] = match.total_len // names.block_tokens
        first = match.total_len % names.block_tokens // page
        last = first + len(tokens) // page
        num_partial = min(max(0, num_partial - first), last - first)
        run = FilledRun(tokens, frames[first:last], ticket, NO_LAUNCH, num_partial=num_partial)
        num_ended = (match.total_len + len(tokens)) // names.block_tokens - match.total_len // names.block_tokens
        of_ended, is_lossy = keys[:num_ended], self.setup.is_lossy
        _, replaced = self.tree.begin_fetch(match, run, of_ended, self._clock.next, is_lossy, lacking)
        self.ledger.free(replaced, Tier.HOST)
        # The parts of the first and last block that are there already are read into pages that no node gets.
        host.free_after(np.concatenate((frames[:first], frames[last:])), FrameState.FILLING, NO_LAUNCH)
        store.fetching_pages += num_pages
        return ticket

    def end_fetch(self, ticket: Ticket, count: int) -> None:
        """The operation brought its first `count` blocks, on every rank. The tree takes those that it still wants."""
        op = self.ledger.end(ticket)
        assert isinstance(op, StorageOp) and self.tree.names.keys is not None
        if (trial := self.stores.trial_of(ticket)) is not None:
            trial.end_read(op, count)
            return
        store = self.stores.of_link(ticket.link)
        first = store.fetches.pop(ticket)
        self._num_ended += 1
        if count or ticket in self._waiters:
            store.reads.end(ticket.link, succeeded=count > 0)
        store.fetching_pages -= len(op.frames)
        dropped = self.tree.cut(ticket, Tier.HOST, (first + count) * self.tree.names.keys.block_tokens)
        self.ledger.free(dropped, Tier.HOST)
        for node in dropped.staying:
            # Computed meanwhile: what did not come is stored anew.
            self.tree.names.forget_stored(node)
        nodes = self.controller.commit_nodes(ticket, Tier.HOST)
        if nodes:
            note_source(nodes, self.tiers[store.place])
            self.tree.pages.fetched(nodes, self.tiers[store.place], 0, sys.maxsize)
        start, end = min((n.start for n in nodes), default=0), max((n.end for n in nodes), default=0)
        self.counters["prefetched_tokens"] += end - start
        self._save_computed(dropped)
        self.stores.store_nodes(nodes)
        for node in reversed(nodes):
            if node.parent is not None:
                self.tree.compact(node, self._clock.done)
        self._tell_waiters(ticket, start, end, whole=count == len(op.keys))

    def check_invariants(self) -> None:
        check_storage(self)

    # -- inside -------------------------------------------------------------------------------------------------

    def _ask(self, rid: str, prefetch: Prefetch, now: Seconds) -> None:
        """Join what others fetch of a prompt, and ask storage for the rest."""
        names, config = self.tree.names.keys, self.config
        assert names is not None
        # How far storage goes on is not known.
        match = self.tree.match(prefetch.namespace, prefetch.tokens, fetching=True)
        # What is being fetched for others may not come.
        coming = next((n.start for n in match.path if is_fetching(n)), match.total_len)
        prefetch.reach = max(prefetch.reach, coming)
        begin = match.total_len
        if self.leaves_out_windows and match.whole_len is not None:
            # Windows may be stored for an end before that alone.
            begin = match.whole_len
        lacking = len(prefetch.tokens) - begin
        is_worth_asking = lacking >= max(1, config.threshold)
        if not is_worth_asking and not self._fetching(match):
            return
        if not len(prefetch.keys):
            prefetch.keys = names.of_prompt(prefetch.namespace, prefetch.tokens)
        prefetch.num_asked += 1
        prefetch.begun_end = 0
        if config.policy == "timeout":
            prefetch.limit_s = config.timeout_base_s + config.timeout_per_ki_token_s * lacking / 1024
        self._set_deadline(rid, prefetch, now, prefetch.limit_s)
        prefetch.last_deadline = now + max(prefetch.limit_s, WAIT_COMPLETE_LIMIT_S)
        self._join(rid, prefetch, match)
        if is_worth_asking:
            prefetch.probed = begin // names.block_tokens
            keys = prefetch.keys[prefetch.probed :]
            gains = {
                store.place: self._advice.fetch_gain_s(store.place, begin, len(prefetch.tokens))
                for store in self.stores
                if store.is_read
            }
            slow = {place for place, gain_s in gains.items() if gain_s is not None and gain_s <= 0}
            # Of two stores one that is slower than computing is not asked.
            left_out = slow if len(slow) < len(gains) else ()
            prefetch.skips = (*self.stores.unread, *left_out)
            prefetch.probe = self.ledger.begin_storage_op(PROBE, StorageAction.EXISTS, keys, skips=prefetch.skips)
            self._probes[prefetch.probe] = now
            for store in self.stores:
                if store.is_read:
                    store.trial.begin_doubt(prefetch.keys[:1], is_slow=store.place in slow)
            if config.policy == "timeout":
                known = [gain_s for gain_s in gains.values() if gain_s is not None]
                most_s = max(known) if len(known) == len(gains) else None
                prefetch.waits_for_probe = self._probe_value.is_worth_waiting(most_s)
            self._waiters[prefetch.probe] = {rid: None}
            self.counters["storage_probes"] += 1
        self._note_waiting(rid, prefetch)

    def _note_waiting(self, rid: str, prefetch: Prefetch) -> None:
        """After its operations have changed."""
        if prefetch.is_over:
            self._end_wait(rid)
        else:
            self._waiting[rid] = None

    def _end_wait(self, rid: str) -> None:
        if rid in self._waiting:
            del self._waiting[rid]
            self.let_start.append(rid)

    def _set_deadline(self, rid: str, prefetch: Prefetch, now: Seconds, limit_s: float) -> None:
        prefetch.deadline, prefetch.num_ended_before = now + limit_s, self._num_ended
        heapq.heappush(self._deadlines, (prefetch.deadline, rid))

    def _pin(self, prefetch: Prefetch, match: MatchResult) -> None:
        """Soft-pin what a request has of its path."""
        before, prefetch.pinned = prefetch.pinned, match.path[-1] if match.path else None
        if prefetch.pinned is not None:
            self.tree.soft_pin(prefetch.pinned)
        if before is not None:
            self.tree.end_soft_pin(before)

    def _unpin(self, prefetch: Prefetch) -> None:
        if prefetch.pinned is not None:
            self.tree.end_soft_pin(prefetch.pinned)
            prefetch.pinned = None
            self.fetches_due = True

    def _waits_for_pinned(self, prefetch: Prefetch) -> bool:
        """Whether a request that has begun nothing finds too much soft-pinned for others."""
        assert self.limits is not None and self.tree.names.keys is not None
        num_pinned = self.tree.counts.soft_pinned[Tier.HOST]
        num_pages = prefetch.blocks_left * self.tree.names.keys.block_tokens // self.tree.page_size
        return not prefetch.is_pinned and num_pinned > 0 and num_pinned + num_pages > self.limits.most_pinned_pages

    def _first_held_up(self) -> str | None:
        """The first of the unfinished that has begun nothing because it finds too much soft-pinned for others."""
        return next((rid for rid in self._unfinished if self._waits_for_pinned(self._prefetches[rid])), None)

    def _tell_waiters(self, ticket: Ticket, start: int, end: int, whole: bool) -> None:
        """A fetch is over; tokens [start, end) of the path are on the host. whole: all blocks came."""
        place = self.stores.of_link(ticket.link).place
        for rid in self._waiters.pop(ticket, {}):
            prefetch = self._prefetches[rid]
            del prefetch.tickets[ticket]
            if end > start:
                prefetch.found.append((place, start, end))
                prefetch.reach = max(prefetch.reach, end)
                self._pin(prefetch, self._match(prefetch, len(prefetch.tokens)))
            if not whole and place < len(self.stores) - 1:
                # What the first store has lost may be on the second one: it is asked once more.
                prefetch.reach = max(prefetch.reach, prefetch.end, prefetch.begun_end)
            if not whole or end == start or self._join_what_is_begun(rid, prefetch):
                prefetch.end = 0
                self._begin_no_more(rid)
            self._note_waiting(rid, prefetch)

    def _cancel_fetch(self, ticket: Ticket) -> None:
        """No request waits for it any more."""
        dropped = self.tree.cut(ticket, Tier.HOST, 0)
        self.ledger.free(dropped, Tier.HOST)
        self._save_computed(dropped)

    def _save_computed(self, dropped: Dropped) -> None:
        """What did not come, and was computed meanwhile, goes to the host as anything computed."""
        for node in dropped.staying:
            self.controller.back_up_inserted(node)

    def _may_fetch(self, store: AttachedStore, num_pages: int) -> bool:
        """Whether so much more may be fetched from a store now; if nothing is on its way, some always may."""
        assert self.limits is not None
        in_flight = len(store.fetches)
        fits = store.fetching_pages + num_pages <= self.limits.max_fetch_pages
        return not in_flight or (fits and in_flight < self.limits.fetch_window_ops)

    def _store_of(self, prefetch: Prefetch, start: int) -> AttachedStore:
        """The store that has the block from token `start` on."""
        return self.stores.far if len(self.stores) > 1 and start >= prefetch.far_from else self.stores.near

    def _next_store(self, prefetch: Prefetch) -> AttachedStore:
        """The store that the next fetch of a request reads, as far as that is known without a match."""
        assert self.tree.names.keys is not None
        return self._store_of(prefetch, max(prefetch.probed * self.tree.names.keys.block_tokens, prefetch.begun_end))

    def _cut(self, rid: str, prefetch: Prefetch, first: int, ahead: int) -> bool:
        """Give up what of the blocks from `first` on is sooner computed. Whether anything is left to fetch."""
        assert self.tree.names.keys is not None
        size = self.tree.names.keys.block_tokens
        left = prefetch.end // size - first
        assert left > 0, f"{rid} has nothing to begin"
        num_near = max(0, min(prefetch.end, prefetch.far_from) // size - first) if len(self.stores) > 1 else left
        prefetch.blocks_left = self._advice.blocks_worth_fetching(rid, first, (num_near, left - num_near), ahead)
        if self.leaves_out_windows:
            # Windows may be stored for its end alone.
            prefetch.blocks_left = left if 2 * prefetch.blocks_left >= left else 0
        if prefetch.blocks_left < left:
            self._cut_at(prefetch, (first + prefetch.blocks_left) * size)
        return prefetch.blocks_left > 0

    def _cut_at(self, prefetch: Prefetch, end: int) -> None:
        """The request computes what storage has from this token on."""
        self.counters["fetches_cut"] += 1
        self.counters["fetch_cut_tokens"] += prefetch.end - end
        prefetch.end = prefetch.cut_from = end

    def _join_what_is_begun(self, rid: str, prefetch: Prefetch) -> bool:
        """Whether others have begun what the request lacks; then it waits for that."""
        match = self._match(prefetch, prefetch.end)
        self._join(rid, prefetch, match)
        return match.total_len >= prefetch.end

    def _begin_next(self, rid: str, prefetch: Prefetch, tries: int = 2) -> Attempt:
        """Begin the next operation for one of the unfinished. tries: how often room is made anew where that changes
        what is to be fetched."""
        names, limits = self.tree.names.keys, self.limits
        assert limits is not None and names is not None
        match = self._match(prefetch, prefetch.end)
        self._join(rid, prefetch, match)
        start = match.total_len
        if start >= prefetch.end:
            return Attempt.OVER
        if start < prefetch.begun_end:
            # It was fetched for the request, and is gone again.
            return self._without_room(prefetch, start)
        first, size = start // names.block_tokens, names.block_tokens
        # Where it ends is settled once something has come without what windows do not reach from there.
        is_settled = self.leaves_out_windows and prefetch.is_pinned
        if not is_settled and not self._cut(rid, prefetch, first, 0):
            return Attempt.OVER
        if not self._comes_in_time(prefetch, prefetch.end - start):
            self._cut_at(prefetch, start)
            return Attempt.OVER
        following = self.tree.next_unmatched(match, prefetch.tokens)
        if following is not None and not self._is_to_fill(following):
            return Attempt.STALLED if self.tree.is_coming(following) else Attempt.OVER
        # It is filled by operations of its own.
        most = following.end if following is not None else prefetch.end
        store = self._store_of(prefetch, first * size)
        if not store.is_read:
            # It was left alone after it was asked.
            prefetch.timed_out = True
            return Attempt.OVER
        if len(self.stores) > 1 and store is self.stores.near:
            most = min(most, prefetch.far_from)
        last = min(-(-min(most, prefetch.end) // size), first + limits.blocks_per_op)
        assert last > first, f"{rid} has nothing to begin"
        num_pages = (last - first) * size // self.tree.page_size
        if not self._may_fetch(store, num_pages):
            return Attempt.BUSY
        num_partial = self._num_without_windows(num_pages, match, prefetch.end)
        if not self._make_room(num_pages, num_pages - num_partial, match):
            if self._is_room_to_come():
                return Attempt.FULL
            return self._without_room(prefetch, start)
        # Once more: making room may have merged nodes, or removed a hole.
        match, end = self._match(prefetch, prefetch.end), last * size
        if match.total_len != start:
            # Windows reach other pages from where it ends now.
            return self._begin_next(rid, prefetch, tries - 1) if tries else Attempt.OVER
        if (node := self.tree.next_unmatched(match, prefetch.tokens)) is not None:
            end = node.start + common_len(node.key, prefetch.tokens, node.start, end, self.tree.page_size)
        keys = prefetch.keys[first:last]
        # A store behind the first one was asked for what that lacks.
        lacking = [place for place in range(store.place) if place not in prefetch.skips]
        ticket = self.begin_fetch(match, prefetch.tokens[start:end], keys, store.place, num_partial, lacking)
        self._num_begun += last - first
        self._advice.fetch_begun(ticket, self.ledger.in_flight[ticket].size_bytes)
        prefetch.blocks_left = max(1, prefetch.blocks_left - (last - first))
        self._wait(rid, prefetch, ticket)
        self._pin(prefetch, self._match(prefetch, end))
        prefetch.begun_end = end
        self._let_join(rid, prefetch, [*self._fetching(match), ticket], first)
        return Attempt.OVER if end >= prefetch.end else Attempt.BEGUN

    def _without_room(self, prefetch: Prefetch, start: int) -> Attempt:
        """The host has no room for what a request lacks from token `start` on, or does not keep it."""
        self.counters["prefetch_dropped_tokens"] += prefetch.end - start
        prefetch.reach, prefetch.no_room = max(prefetch.reach, prefetch.end), True
        return Attempt.OVER

    def _num_without_windows(self, num_pages: int, match: MatchResult, wanted: int) -> int:
        """Of so many pages that are fetched behind a match, the first from which layers with a window are left out:
        windows do not reach them from token `wanted` on, and that takes time, or room that the host has not."""
        names, page, host = self.tree.names.keys, self.tree.page_size, self.controller.windowed_host
        if names is None or not (self.leaves_out_windows or not host.make_room(num_pages, match.path)):
            return 0
        begin = match.total_len // names.block_tokens * names.block_tokens
        num_blocks = max(0, self.tree.windows.cut(wanted) - begin) // names.block_tokens
        return min(num_blocks * names.block_tokens // page, num_pages)

    def _is_to_fill(self, node: Node) -> bool:
        """Whether storage brings what a node of the tree lacks: a hole, what no tier has whole, or what only peers
        have that are not read. Not where a request reads it there, as its slab could not go before the fetch ends, or
        loads it; nor in the place of exact pages what is not."""
        if is_hole(node):
            return True
        is_partial = node.is_host_partial and node.tickets[Tier.DEVICE] is None
        is_apart = (node.frames[Tier.HOST] is None or is_partial) and not self.tree.is_coming(node)
        is_read = node.lock > 0 and not is_alone_and_partial(node)
        return is_apart and not is_read and self.setup is not None and not self.setup.is_lossy

    def _let_join(self, rid: str, prefetch: Prefetch, tickets: list[Ticket], first: int) -> None:
        """Others that lack block `first`, too, need not wait for their turn. A block's key names all before it.
        tickets: the fetches of the path up to that block, in its order; if one is cancelled, so are those below."""
        key = prefetch.keys[first].tobytes()
        for other in self._unfinished.alike(prefetch, first):
            joining = self._prefetches[other]
            if other == rid or joining.namespace != prefetch.namespace or len(joining.keys) <= first:
                continue
            if joining.keys[first].tobytes() == key:
                for ticket in tickets:
                    self._wait(other, joining, ticket)

    def _make_room(self, num_pages: int, num_whole: int, match: MatchResult) -> bool:
        """Make room on the host for a fetch, unless what was given up already will be enough. num_whole: so many of
        the pages have all layers."""
        host = self.controller.tables[Tier.HOST]
        host.reap(self._clock.done)
        missing = num_pages - host.num_free
        num_coming = host.counts[FrameState.PENDING_FREE] - self.stores.unawaited_pages
        if 0 < missing <= num_coming and self._is_room_to_come():
            return False
        has_room = self.controller.make_room(Tier.HOST, num_pages, match.path, spares_pinned=True)
        return has_room and self.controller.windowed_host.make_room(num_whole, match.path)

    def _is_room_to_come(self) -> bool:
        """Whether an operation is in flight after which `begin_fetches` is called."""
        unawaited = self.stores.unawaited_links
        return self.ledger.is_busy(link for link in STALLING_LINKS if link not in unawaited)

    def _match(self, prefetch: Prefetch, end: int) -> MatchResult:
        wanted = max(end, prefetch.end)
        return self.tree.match(prefetch.namespace, prefetch.tokens[:end], fetching=True, wanted=wanted)

    def _join(self, rid: str, prefetch: Prefetch, match: MatchResult) -> None:
        for ticket in self._fetching(match):
            self._wait(rid, prefetch, ticket)

    def _fetching(self, match: MatchResult) -> list[Ticket]:
        tickets = (node.tickets[Tier.HOST] for node in match.path)
        return [t for t in tickets if t is not None and t.link in FETCH_LINKS]

    def _wait(self, rid: str, prefetch: Prefetch, ticket: Ticket) -> None:
        prefetch.tickets[ticket] = self._waiting[rid] = None
        self._waiters.setdefault(ticket, {})[rid] = None

    def _leave(self, rid: str, prefetch: Prefetch) -> None:
        self._cease_waiting(rid, prefetch, prefetch.asked)
        prefetch.probe, prefetch.end, prefetch.tickets = None, 0, {}
        self._end_wait(rid)

    def _cease_waiting(self, rid: str, prefetch: Prefetch, tickets: list[Ticket]) -> None:
        """A request waits for these operations no longer. One that no other waits for is cancelled."""
        # The last of a path first: each takes what lies below with it.
        for ticket in reversed(tickets):
            waiters = self._waiters[ticket]
            del waiters[rid]
            if not waiters:
                del self._waiters[ticket]
                if ticket.link in FETCH_LINKS:
                    self._cancel_fetch(ticket)
                elif prefetch.waits_for_probe:
                    self.ledger.cancel(ticket)
                    self._probe_value.add_wait(self.stores.near.reads.now - self._probes.pop(ticket))
