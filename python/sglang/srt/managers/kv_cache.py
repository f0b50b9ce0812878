"""`KVCache`: the seam between scheduler and cache. All that the scheduler sees of pages, tiers and transfers.

Owns the tree, the pools' frame tables, the controllers and the ledger of transfers. Knows requests by their tokens,
namespace, hold, priority and session; never decides which of them goes next.

    match          what the cache has of a request; `candidate` is the same, remembered while the tree stays as it is
    lock           keep what matched where it is; the last node is cut if it matched in part
    hold           give a request that has locked its match a hold
    allocate       device pages for a hold; make_room evicts for them
    insert_prefix  enter what a hold has computed into the tree
    release        end a hold: its pages and its lock
    complete_copies, complete_storage_ops    what the links have done: commit, or abort
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.lost_hits import Lookup, LostHits
from sglang.srt.managers.match_cursors import MatchCursors
from sglang.srt.managers.schedule_batch import Preload, Req, ReqHold
from sglang.srt.managers.schedule_policy import Candidate, pages_for
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.session_keeper import SessionKeeper
from sglang.srt.managers.slab_withdrawal import SlabWithdrawal
from sglang.srt.managers.storage_controller import StorageController
from sglang.srt.managers.tenant_quotas import TenantQuotas
from sglang.srt.managers.tier_switches import TierSwitches
from sglang.srt.managers.transfer_ledger import Pools, TransferLedger
from sglang.srt.managers.windowed_room import WindowedRoom
from sglang.srt.mem_cache.block_keys import NO_KEYS
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.namespaces import is_alone, salt_of
from sglang.srt.mem_cache.node import MatchResult, Node, Receipt
from sglang.srt.mem_cache.page_watcher import PageWatcher
from sglang.srt.mem_cache.placement import pages_ahead
from sglang.srt.mem_cache.recent_takes import RecentTakes
from sglang.srt.mem_cache.slab_ledger import SlabLedger, SlabReport
from sglang.srt.mem_cache.transfer import (
    BACKUP_LINKS,
    COPY_LINKS,
    D2S,
    FETCH_LINKS,
    FRAME_TIERS,
    LINKS,
    LOAD_LINKS,
    P2H,
    P2P,
    STORAGE_LINKS,
    STORE_LINKS,
    TIER_NAMES,
    StorageOp,
    Ticket,
    Tier,
    TransferOp,
)
from sglang.srt.mem_cache.tree_checks import check_ages
from sglang.srt.mem_cache.windowed_pool import WindowedPool
from sglang.srt.model_executor.launch import PageRun
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchClock, LaunchSeq, Seconds

_FROM_DEVICE = (*BACKUP_LINKS.values(), D2S)
# A decoding request inserts many small nodes; they are merged once per so many tokens.
COMPACT_EVERY_TOKENS = 512


class KVCache:
    def __init__(self, config: SchedulerConfig, clock: LaunchClock) -> None:
        self.config = config
        self.page_size = config.page_size
        self.clock = clock
        self.tree = HiRadixTree(config.page_size, config.eviction_policy, config.window_reach)
        # What requests are about to compute.
        self.claims = self.tree.claims
        pools = _open_pools(config, self.tree)
        self.device = pools.device
        self.host = pools.host
        self.swap = pools.swap
        self.ledger = TransferLedger(self.tree, pools, clock, config.page_bytes, config.windowed_share)
        self.tables = self.ledger.tables
        self.controller = HiCacheController(self.ledger, config.write_policy, config.peers_written_through)
        self.windowed = WindowedRoom(config, self.controller)
        self.sessions = SessionKeeper(self.tree, self.tables, clock)
        self.controller.evicting = self.sessions.note_given_up
        self.switches = TierSwitches()
        self.storage = StorageController(self.controller, self.switches)
        self.quotas = TenantQuotas(
            self.tree, tuple(self.tables), clock, self.controller.evict_of, self.storage.awaited_ids
        )
        self.controller.is_over_quota = self.quotas.is_over
        # Slabs of the peer pool that come and go; None if it stays as it is.
        self.borrowed: SlabWithdrawal | None = None
        if pools.peer is not None and config.slabs:
            self.borrowed = SlabWithdrawal(self.controller, SlabLedger(pools.peer, config.slabs, mapped=False))
        self.takes = RecentTakes(pages_for(config.chunk_budget, config.page_size))
        self.lost_hits = LostHits(self.tree, config.page_size)
        self._has_unlocked = False
        # Of an engine that lends, since `take_device_use`: device pages that were filled, and that requests found.
        self._filled: list[np.ndarray] = []
        self._found: list[np.ndarray] = []
        self._cursors = MatchCursors(self.tree)
        self._link_bytes = dict.fromkeys(LINKS, 0)
        self._next_hold = 0

    def watch_pages(self, watcher: PageWatcher) -> None:
        """Tell it what comes to tiers and leaves them, from now on; nothing is cached yet."""
        self.tree.pages = watcher
        if self.storage.setup is not None:
            watcher.opened(self.storage.tiers, self.storage.setup.block_tokens)

    # -- what is there ------------------------------------------------------------------------------------------

    def cacheable_len(self, req: Req) -> int:
        """How many tokens the cache may serve: the last must be computed, to sample the next one."""
        if not self.config.enable_radix_cache or not req.reads_cache:
            return 0
        # A prompt token's log-probability comes from the row before it, which must be computed too.
        wanted = req.next_prompt_logprob
        return (wanted if wanted < req.num_prompt else req.num_known) - 1

    def cacheable_tokens(self, req: Req) -> np.ndarray:
        return req.tokens[: self.cacheable_len(req)]

    def prompt_keys(self, req: Req) -> np.ndarray:
        """The names of the prompt's whole blocks that came with the request, (n, 16) uint8; none if storage has
        changed since."""
        names, given = self.tree.names.keys, req.prompt_keys
        return given.of_naming(names) if names is not None and given is not None else NO_KEYS

    def match(self, req: Req) -> MatchResult:
        """What the cache has of the tokens that it may serve."""
        return self.tree.match(req.namespace, self.cacheable_tokens(req))

    def candidate(self, req: Req) -> Candidate:
        """What a waiting request has to load and to compute."""
        known = self._cursors.candidates.get(req.rid)
        if known is not None:
            return known
        return self._cursors.find(req.rid, req.namespace, self.cacheable_tokens(req), req.num_known)

    def candidates(self, reqs: Iterable[Req]) -> list[Candidate]:
        """The same of a long queue, in its order."""
        known = self._cursors.candidates.get
        return [known(req.rid) or self.candidate(req) for req in reqs]

    def forget_candidate(self, req: Req) -> None:
        """The request waits no more."""
        self._cursors.forget(req.rid)

    @property
    def available_pages(self) -> int:
        """Device pages that are free, or could be."""
        return self.device.num_free + self.tree.evictable_pages(Tier.DEVICE)

    @property
    def locked_pages(self) -> int:
        """Device pages that requests have, share or load."""
        counts = self.device.counts
        pages = sum(counts[state] for state in (FrameState.HELD, FrameState.FILLING, FrameState.CACHED))
        return pages - self.tree.evictable_pages(Tier.DEVICE)

    @property
    def filling_pages(self) -> int:
        """Device pages that loads are filling."""
        return self.device.counts[FrameState.FILLING]

    @property
    def num_free_soon(self) -> int:
        """Device pages that were given up, and are free when launches and transfers have ended, but for those that a
        slow copy reads."""
        slow = min(self.device.num_pinned_only, self.controller.links.num_slow_pages)
        return self.device.counts[FrameState.PENDING_FREE] - slow

    def evictable_pages_in(self, match: MatchResult) -> int:
        """Device pages that locking the match takes out of eviction's reach."""
        return self.tree.evictable_pages_in(match)

    @property
    def block_tokens(self) -> int:
        """Of storage's blocks; storage is attached."""
        assert self.tree.names.keys is not None
        return self.tree.names.keys.block_tokens

    # -- holds --------------------------------------------------------------------------------------------------

    def lock(self, match: MatchResult) -> Receipt:
        return self.tree.lock(match, self.clock.next)

    def unlock(self, receipt: Receipt) -> None:
        """Release a lock under which no launch has read."""
        self.tree.unlock(receipt, self.clock.next, NO_LAUNCH)

    def end_preload(self, preload: Preload) -> None:
        self.unlock(preload.receipt)
        self._has_unlocked = True

    def take_unlocked(self) -> bool:
        """Whether nodes may have been unlocked since the last call."""
        has_unlocked, self._has_unlocked = self._has_unlocked, False
        return has_unlocked

    def hold(self, receipt: Receipt, match: MatchResult, is_check: bool) -> ReqHold:
        """A hold for the request that has locked a match. is_check: the canary's."""
        self._next_hold += 1
        hold = ReqHold(self._next_hold, receipt, match.total_len)
        self.windowed.begin(hold, is_check)
        return hold

    def extend_lock(self, hold: ReqHold, node: Node) -> None:
        """The hold's path ends with `node` from now on."""
        old = hold.replace_receipt(self.tree.lock_node(node, self.clock.next))
        self.unlock(old)

    def path_of(self, receipt: Receipt) -> list[Node]:
        """The locked nodes, top first."""
        return self.tree.path_of(receipt.node)

    def lacking_nodes(self, receipt: Receipt) -> list[Node]:
        """Of a locked path, see `WindowReach.cut_to_load`."""
        return self.tree.windows.cut_to_load(receipt.node)

    def on_device(self, match: MatchResult) -> MatchResult:
        """See `WindowReach`."""
        return self.tree.windows.on_device(match)

    def before(self, match: MatchResult, tiers: Collection[Tier]) -> MatchResult:
        """The part of a match before the first node that would be loaded from a tier of the list. With windows, what
        the device has."""
        if self.tree.windows.num_tokens:
            return self.on_device(match)
        for place, node in enumerate(match.path):
            if node.frames[Tier.DEVICE] is None and self.tree.source_of(node) in tiers:
                return match.above(place)
        return match

    def tokens_from_peers(self, path: list[Node]) -> int:
        """Tokens of a locked path that are streamed from peers."""
        lacking = (node for node in path if node.frames[Tier.DEVICE] is None)
        return sum(len(node.key) for node in lacking if self.tree.source_of(node) == Tier.PEER)

    def count_use(self, receipt: Receipt, req: Req) -> None:
        """The request starts on a locked path; eviction and write policies use the count. It counts once, also when
        it starts again."""
        self.tree.count_use(receipt.node, req.priority, num_uses=int(req.epoch == 0))
        if req.session is not None and req.epoch == 0:
            self.sessions.note_start(req.came_at)
        if self.ledger.lends_device:
            frames = (node.frames[Tier.DEVICE] for node in self.path_of(receipt))
            self._found += [each for each in frames if each is not None]
        if self.storage.is_open:
            self.storage.stores.note_request(receipt.node)

    def back_up_reused(self, receipt: Receipt) -> None:
        """See `HiCacheController.back_up_reused`."""
        self.controller.back_up_reused(receipt.node)

    def explain(self, req: Req, lookup: Lookup, found: int) -> dict[str, int]:
        """Why a request that starts computes tokens of its prompt: reason -> tokens. found: how many it does not."""
        if not self.config.enable_radix_cache or not req.reads_cache or is_alone(req.namespace):
            return self.lost_hits.explain_bypass(req.num_prompt)
        return self.lost_hits.explain(lookup, req.num_prompt, found)

    def lookup(self, req: Req) -> Lookup:
        """What a waiting request looked for, before it starts."""
        return Lookup(
            req.namespace,
            self.cacheable_tokens(req),
            min(self.candidate(req).prefix, self.cacheable_len(req)),
            self.storage.outcome(req.rid),
        )

    def begin_turn(self, req: Req) -> None:
        """A request has come. If it is a session's, what it finds counts as used."""
        if req.session is not None:
            self.sessions.begin_turn(req.session, self.match(req))
            req.came_at = self.clock.next

    def end_turn(self, req: Req) -> None:
        """A request that has a hold is answered. If it is a session's, its path gets weights."""
        assert req.hold is not None
        end = req.hold.receipt.node
        self.tree.note_answer(end, req.num_prompt)
        # A fetch for another request may have brought it without windows, while this one computed it.
        if req.leaves_at and self.controller.windowed_host.drop_partial_ends(end, req.leaves_at):
            self.controller.back_up_inserted(end)
        self.storage.stores.note_answer(end, req.leaves_at)
        if req.session is not None:
            self.sessions.end_turn(req.session, end)

    def leave_turn(self, req: Req) -> None:
        """A request has ended, with or without a hold."""
        if req.session is not None:
            self.sessions.table.leave_turn(req.session, self.clock.next)

    def retire(self, namespace: str) -> None:
        """No request will ask for the namespace again. What must leave nothing goes at once."""
        if is_alone(namespace):
            self._drop_namespace(namespace)
        else:
            self.tree.retire(namespace)

    def release(self, hold: ReqHold) -> None:
        """End a hold: give back its frames and its lock. Launches that were issued may still read both."""
        self.device.free_after(hold.frames.copy(), FrameState.HELD, self.clock.last)
        self._has_unlocked = True
        self.windowed.end(hold)
        self._note_end()
        end = hold.receipt.node
        self.tree.unlock(hold.receipt, self.clock.next, self.clock.last)
        if end.parent is not None:
            self.tree.compact(end, self.clock.done)

    def insert_prefix(self, req: Req, upto: int, page_runs: list[PageRun]) -> None:
        """Enter the whole pages of tokens [inserted_len, upto) into the tree and back them up.

        page_runs: takes the pages that change for the request because the tree had them already; the launch that
        computes them still writes the duplicates, so they must reach the executor after it.
        """
        hold = req.hold
        assert hold is not None
        page = self.page_size
        start, end = hold.inserted_len, upto - upto % page
        if hold.is_partial or not self.config.enable_radix_cache or not req.fills_cache:
            self.windowed.shed_own(req, upto)
            return
        if end <= start or hold.num_swapped:
            return
        node = hold.receipt.node
        if node.parent is not None and node.frames[Tier.DEVICE] is None:
            return  # the device lacks what is before it, see `LayerStreaming`
        num_pages = (end - start) // page
        result = self.tree.insert_prefix(
            req.namespace,
            node,
            req.tokens[start:end],
            hold.frames[:num_pages],
            req.last_launch,
            self.clock.next,
            req.priority,
        )
        if result.end == 0:
            self.windowed.shed_own(req, upto, spares=self.config.chunk_budget)
            return
        self.quotas.note(req.namespace)
        self.extend_lock(hold, result.node)
        self._count_as_cached(result.created)
        if len(keys := self.prompt_keys(req)):
            self.tree.names.name_created(result.created, keys)
        hold.pass_on(result.end // page, result.end)
        self.ledger.free(result.replaced, Tier.DEVICE)
        if len(result.duplicates):
            self.device.free_after(result.duplicates, FrameState.HELD, req.last_launch)
            page_runs.append(PageRun(req.slot, start // page, result.frames))
        self.controller.windowed_host.drop_partial_ends(result.node)
        self.controller.back_up_inserted(result.node)
        if end // COMPACT_EVERY_TOKENS > start // COMPACT_EVERY_TOKENS:
            self.tree.compact(result.node, self.clock.done)

    def insert_recomputed(self, req: Req, tokens: np.ndarray, start: int, launch: LaunchSeq) -> None:
        """Enter the first tokens of what a request would load, which a launch computes instead, on new device pages.
        start: their place in the prompt, where the part ends that the device has."""
        assert req.hold is not None
        frames = self.take_free(len(tokens) // self.page_size)
        above = next((n for n in self.tree.path_of(req.hold.receipt.node) if n.end == start), None)
        result = self.tree.insert_prefix(req.namespace, above, tokens, frames, launch, self.clock.next, req.priority)
        assert result.end == len(tokens) and not len(result.duplicates)
        self.device.transition(frames, FrameState.HELD, FrameState.CACHED)
        self._note_filled(frames)

    def _count_as_cached(self, created: Iterable[Node]) -> None:
        for node in created:
            frames = node.frames[Tier.DEVICE]
            assert frames is not None
            self.device.transition(frames, FrameState.HELD, FrameState.CACHED)
            self._note_filled(frames)

    def _note_filled(self, frames: np.ndarray) -> None:
        if self.ledger.lends_device:
            self._filled.append(frames)

    def take_device_use(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Device pages (int32) that were filled, and that requests have found, since the last call; none of an engine
        that does not lend."""
        use, self._filled, self._found = (self._filled, self._found), [], []
        return use

    # -- device memory ------------------------------------------------------------------------------------------

    def make_room(self, num_pages: int, meanwhile: int | None = None) -> bool:
        """Evict until num_pages of the device are free at once; False if they are not, or not yet. meanwhile: pages
        that others take if the caller waits till links have taken what is to be copied; None: the caller does not
        wait, what links do not take at once is lost. Layers with a window: see `WindowedRoom`."""
        if num_pages <= self.device.num_free:
            return True
        waits = meanwhile is not None
        self.device.reap(self.clock.done)
        # What was given up and is still being read or written will be free soon: no need to give up more for it. But
        # what a slow copy reads will not: on with what is behind it, as long as less and less of that is copied.
        for _ in range(self.device.num_pages if self.controller.bounds_copies else 2):
            lacking = num_pages + (meanwhile or 0) - self.device.num_free - self.num_free_soon
            num_cached = self.device.counts[FrameState.CACHED]
            if lacking <= 0 or not num_cached:
                break
            self.controller.evict(Tier.DEVICE, lacking, waits)
            if num_cached == self.device.counts[FrameState.CACHED]:
                break
        return self.device.num_free >= num_pages

    def write_ahead(self, num_running: int) -> None:
        """Copy what the device gives up next, so that it can go at once. num_running: requests that decode."""
        num_pages = pages_ahead(num_running, self.takes.num_pages)
        self.controller.auto.write_ahead(num_pages)
        self.storage.stores.begin_step(num_pages)

    def begin_load(self, nodes: list[Node]) -> list[tuple[Ticket, int]]:
        """See `HiCacheController.begin_load`. Returns the operations and the bytes of each."""
        self.takes.note(sum(len(node.key) for node in nodes) // self.page_size)
        return self._with_sizes(self.controller.begin_load(nodes))

    def complete_partial(self, receipt: Receipt) -> list[tuple[Ticket, int]]:
        """Begin to load what windows reach of the partial nodes of a locked path, which takes no new pages. Returns
        the operations and the bytes of each."""
        return self._with_sizes(self.controller.complete_partial(self.tree.windows.cut_to_complete(receipt.node)))

    def _with_sizes(self, tickets: list[Ticket]) -> list[tuple[Ticket, int]]:
        return [(ticket, self.in_flight[ticket].size_bytes) for ticket in tickets]

    def take_free(self, num_pages: int) -> np.ndarray:
        """HELD device pages of those that are free; the caller has made room."""
        frames = self.device.allocate(num_pages, FrameState.HELD)
        assert frames is not None
        self.windowed.give(frames)
        return frames

    def allocate(self, num_pages: int) -> np.ndarray | None:
        """HELD device pages, (num_pages,) int32; None if there is no room, or not yet."""
        has_room = self.windowed.make_room(num_pages) and self.make_room(num_pages)
        return self.take_free(num_pages) if has_room else None

    def reap(self) -> None:
        """Free what may be reused, on all tiers, and merge what eviction has cut."""
        self.controller.tidy()
        for table in self.tables.values():
            table.reap(self.clock.done)
        self.windowed.reap()

    # -- what is under way --------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> dict[Ticket, Any]:
        """Operations that have begun and are not over; to be read only."""
        return self.ledger.in_flight

    @property
    def has_outstanding(self) -> bool:
        """Whether a launch or an operation is under way. Its end, if there is one, causes another step."""
        return self.clock.is_running or bool(self.in_flight)

    @property
    def will_progress(self) -> bool:
        """The same without what is not expected to end: copies that hang, and operations of storage that does."""
        late = self.late_links
        return self.clock.is_running or any(
            not (ticket.link in late or self.storage.hangs_on(ticket.link)) for ticket in self.in_flight
        )

    @property
    def will_free_pages(self) -> bool:
        """Whether a launch or a copy is under way, whose end may give device pages back. No operation of storage
        does, and no copy that hangs."""
        return self.clock.is_running or self.ledger.is_busy(set(COPY_LINKS) - self.late_links)

    @property
    def will_free_pages_soon(self) -> bool:
        """The same without copies by slow links, and whether device pages were given up that will be free soon."""
        quick = set(COPY_LINKS) - self.controller.links.slow
        is_due = self.num_free_soon > 0 or self.windowed.num_free_soon > 0
        return self.clock.is_running or is_due or self.ledger.is_busy(quick)

    # -- links --------------------------------------------------------------------------------------------------

    def take_ops(self) -> tuple[tuple[TransferOp | StorageOp, ...], tuple[Ticket, ...]]:
        """Operations begun and tickets cancelled since the last call."""
        return self.ledger.take_ops()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All that are there, storage's last."""
        return (*self.tables, *self.storage.tiers)

    def turn(self, name: str, reads: bool | None, writes: bool | None) -> str:
        """See `TierSwitches`. Returns why that cannot be, "" if it is done."""
        tiers = {TIER_NAMES[tier]: tier for tier in self._switched_tiers()}
        if (tier := tiers.get(name)) is None:
            return f"this server has no tier {name!r}; it has {', '.join(tiers)}"
        self.turn_tier(tier, reads, writes)
        return ""

    def turn_tier(self, tier: Tier, reads: bool | None, writes: bool | None) -> None:
        """Of storage, also one that is not attached: the switch is kept for when it is."""
        self.switches.turn(tier, reads, writes)
        self.set_load_order(self.tree.order.load_order)
        self.controller.unwritten = self.switches.unwritten
        self.storage.obey_switches()

    def shown_switches(self) -> str:
        """For the log."""
        off = [
            f"no {what} of {tier}"
            for tier, on in self.switch_state().items()
            for what, is_on in on.items()
            if not is_on
        ]
        return ", ".join(off) or "all reads and writes are on"

    def switch_state(self) -> dict[str, dict[str, bool]]:
        """By the tier's name: whether reads and writes are on."""
        return self.switches.state(self._switched_tiers())

    def _switched_tiers(self) -> list[Tier]:
        """What was turned off before it was detached is still off when it is attached again."""
        return sorted({*self.tiers, *self.switches.unread, *self.switches.unwritten})

    def _note_end(self) -> None:
        """An operation or a request has ended: pages of slabs that go may have waited for it."""
        if self.borrowed is not None:
            self.borrowed.note_end()

    def take_freed(self) -> dict[int, np.ndarray]:
        """Tier -> frames that became free since the last call. Those of the swap file are not told."""
        if self.swap is not None:
            self.swap.take_freed()
        return {tier.value: table.take_freed() for tier, table in self.tables.items()}

    def take_freed_windowed(self) -> dict[int, np.ndarray]:
        """The same of the tiers' pools for layers with a window."""
        return {tier.value: pool.table.take_freed() for tier, pool in self.ledger.windowed.items()}

    def oldest_copies(self) -> dict[str, TransferOp | None]:
        """By link from the device, the first operation in flight."""
        oldest = {link: self.ledger.oldest(link) for link in (*BACKUP_LINKS.values(), D2S)}
        return {link: op if isinstance(op, TransferOp) else None for link, op in oldest.items()}

    def set_advice(
        self, is_worth_copying: Callable[[Tier, int, int], bool], is_believed: Callable[[Tier], bool]
    ) -> None:
        """See `BackupLinks`."""
        links = self.controller.links
        links.is_worth_copying, links.is_believed = is_worth_copying, is_believed

    def set_load_order(self, order: tuple[Tier, ...]) -> None:
        """order: the tiers that nodes are loaded from, the fastest first."""
        self.tree.set_load_order(order, self.switches.unread)

    def note_lending(self) -> None:
        """Device pages may become another engine's."""
        self.ledger.lends_device = True

    def note_sick_links(self, late: frozenset[str], overdue: frozenset[str], now: Seconds) -> None:
        """See `LateCopies` and `FailingLinks`."""
        links = self.controller.links
        links.late, links.overdue = late, overdue
        links.failing.update(now)
        if late:
            self.controller.give_up_late_copies()

    @property
    def late_copies(self) -> list[Ticket]:
        """Copies in flight by links that hang."""
        late = self.late_links
        return [ticket for ticket in self.in_flight if ticket.link in late] if late else []

    @property
    def late_links(self) -> frozenset[str]:
        """Links from the device that hang."""
        return self.controller.links.late

    @property
    def broken_links(self) -> frozenset[str]:
        """Links from the device by which nothing at all is copied now, as copies failed."""
        return self.controller.links.failing.broken

    def num_done(self, link: str) -> int:
        """Operations of a link that are over."""
        return self.ledger.num_done(link)

    def complete_copies(
        self,
        link: str,
        done: int,
        failed: int | None,
        losing: Callable[[Ticket], None],
        committed: Callable[[Ticket], None],
    ) -> None:
        """Copies below `done` are over on all ranks. losing: called before one that failed is taken back; committed:
        after one that succeeded."""
        for seq in range(self.num_done(link), done):
            ticket, is_ok = Ticket(link, seq), seq != failed
            op = self.ledger.in_flight[ticket]
            self._note_growth(ticket)
            if is_ok:
                self._link_bytes[link] += op.size_bytes
                self.controller.commit(ticket)
                committed(ticket)
                if isinstance(op, TransferOp) and op.dst == Tier.DEVICE:
                    self._note_filled(op.dst_frames)
            else:
                # Also where its launch failed.
                was_cancelled = self.ledger.is_cancelled(ticket)
                losing(ticket)
                with self.lost_hits.history.because("failed"):
                    self.controller.abort(ticket, was_cancelled)
            if self.borrowed is not None and link == P2P:
                assert isinstance(op, TransferOp)
                self.borrowed.end_move(op, is_ok)
            self._note_end()

    def complete_storage_ops(
        self,
        link: str,
        done: int,
        counts: tuple[int, ...],
        probed: tuple[tuple[int, ...], tuple[int, ...]],
        administered: Callable[[Ticket, int], bool],
    ) -> None:
        """Storage operations below `done` are over. counts: what each brought or found. probed: the far counts of
        probes, and their part counts, see `OpResult`. administered: whether it was an administrator's, and has been
        dealt with."""
        for i, (seq, count) in enumerate(zip(range(self.num_done(link), done), counts, strict=True)):
            ticket = Ticket(link, seq)
            op = self.ledger.in_flight[ticket]
            assert isinstance(op, StorageOp)
            if len(op.keys):
                self._link_bytes[link] += op.size_bytes * count // len(op.keys)
            if link in FETCH_LINKS:
                self._note_growth(ticket)
                self.storage.end_fetch(ticket, count)
            elif administered(ticket, count):
                pass
            elif link in STORE_LINKS:
                self.storage.stores.of_link(link).writer.end(ticket, count)
            else:
                far_counts, part_counts = probed
                self.storage.end_probe(ticket, count, far_counts[i], part_counts[i])
            self._note_end()

    def _note_growth(self, ticket: Ticket) -> None:
        """What the operation fills is about to be a tier's."""
        if self.quotas.is_used:
            for node in self.tree.nodes_of(ticket):
                self.quotas.note(self.tree.root_of(node).namespace, is_new=False)

    # -- losing what is cached ----------------------------------------------------------------------------------

    def drop_written_since(self, launch: int) -> None:
        """Drop what launches from this one on were to write: they are void."""
        with self.lost_hits.history.because("failed"):
            for node in list(self.tree.walk()):
                for tier in FRAME_TIERS:
                    if node.frames[tier] is not None and node.fences[tier] >= launch:
                        self.controller.drop(node, tier)

    def flush(self, cause: str = "flushed") -> None:
        """Drop everything; no request reads it. cause: see `REASONS`."""
        with self.lost_hits.history.because(cause):
            for node in list(self.tree.walk()):
                for tier in self.tables:
                    self.controller.drop(node, tier)
        self.reap()

    def erase(self, salt: str) -> dict[Tier, int]:
        """Drop all that requests with a `cache_salt` have left in memory; none reads it. Returns how many tokens that
        was, by tier."""
        namespaces = {name for name in self.tree.roots if salt_of(name) == salt}
        erased = dict.fromkeys(self.tables, 0)
        with self.lost_hits.history.because("erased"):
            for namespace in sorted(namespaces):
                for tier, num_tokens in self._drop_namespace(namespace).items():
                    erased[tier] += num_tokens
        self.lost_hits.history.forget_tokens()
        self.sessions.table.forget_salt(salt)
        self.reap()
        return erased

    def _drop_namespace(self, namespace: str) -> dict[Tier, int]:
        """Drop what no request reads. Returns how many tokens that was, by tier."""
        root = self.tree.roots.get(namespace)
        nodes = list(self.tree.walk_below(root)) if root is not None else []
        dropped = {tier: sum([len(n.key) for n in nodes if n.frames[tier] is not None]) for tier in self.tables}
        for node in nodes:
            for tier in self.tables:
                # The device drops with a node all below it.
                if node.frames[tier] is not None:
                    self.controller.drop(node, tier)
        return dropped

    def nodes_lost_with(self, ticket: Ticket) -> set[int]:
        """Ids of the nodes that the device will lack if this load has failed."""
        return {node.id for node in self.tree.nodes_of(ticket) if node.tickets[Tier.DEVICE] == ticket}

    @staticmethod
    def reads(receipt: Receipt, node_ids: set[int]) -> bool:
        """Whether a locked path contains any node of the list."""
        node: Node | None = receipt.node
        while node is not None and node.id not in node_ids:
            node = node.parent
        return node is not None

    def withdraw_from_device(self, slabs: Iterable[np.ndarray]) -> None:
        """Drop what is cached and not locked in these runs of device frames, which are about to be lent."""
        runs = list(slabs)
        if runs:
            self.controller.withdraw_from_device(runs)
            # Perhaps nothing causes another step.
            self.device.reap(self.clock.done)

    @property
    def is_withdrawing(self) -> bool:
        """Whether the next step goes on with what lost slabs had."""
        return self.borrowed is not None and self.borrowed.has_more

    @property
    def num_borrowed_pages(self) -> int:
        """Pages of the peer pool that are there now, and stay as far as is known."""
        if self.borrowed is not None:
            return self.borrowed.slabs.num_mapped_frames
        return self.config.num_peer_pages

    def update_borrowed(self, report: SlabReport, losing: Callable[[set[int]], None]) -> bool:
        """See `SlabWithdrawal.update`."""
        if self.borrowed is None:
            return False
        with self.lost_hits.history.because("slab_lost"):
            return self.borrowed.update(report, losing)

    def give_back_borrowed(self, slabs: list[int], losing: Callable[[set[int]], None]) -> bool:
        """See `SlabWithdrawal.give_back`."""
        if self.borrowed is None or not slabs:
            return False
        with self.lost_hits.history.because("slab_lost"):
            return self.borrowed.give_back(slabs, losing)

    # -- looking ------------------------------------------------------------------------------------------------

    def tree_state(self) -> dict[str, int]:
        return {"nodes": self.tree.num_nodes, "namespaces": len(self.tree.roots)}

    def tiers_state(self) -> dict[str, Any]:
        page = self.page_size
        tiers = {}
        for tier, table in self.tables.items():
            counts = {state.name.lower(): table.counts[state] for state in FrameState}
            evictable = self.tree.evictable_pages(tier)
            # Another engine's pages are no part of the tier.
            num_pages = table.num_usable
            tiers[TIER_NAMES[tier]] = {
                "num_pages": num_pages,
                "total_tokens": num_pages * page,
                "used_tokens": (num_pages - table.num_free - evictable) * page,
                "cached_tokens": self.tree.resident_pages(tier) * page,
                "evictable_tokens": evictable * page,
                "free_pages": table.num_free,
                "pages": counts,
            }
        for tier, pool in self.ledger.windowed.items():
            tiers[TIER_NAMES[tier]]["windowed"] = {
                "total_tokens": pool.table.num_usable * page,
                "free_tokens": pool.table.num_free * page,
            }
        return tiers

    def links_state(self, has_storage: bool) -> dict[str, Any]:
        below = [tier for tier in (Tier.HOST, Tier.PEER) if tier in self.tables]
        shown = [link for tier in below for link in (LOAD_LINKS[tier], BACKUP_LINKS[tier])]
        if Tier.PEER in below:
            shown += (P2P, *((P2H,) if Tier.HOST in below else ()))
        shown += (D2S,) if self.swap is not None else ()
        shown += STORAGE_LINKS if has_storage else ()
        links: dict[str, Any] = {}
        for link in shown:
            pending = [op for ticket, op in self.in_flight.items() if ticket.link == link]
            links[link] = {
                "operations_done": self.num_done(link),
                "bytes_done": self._link_bytes[link],
                "operations_in_flight": len(pending),
                "bytes_in_flight": sum(op.size_bytes for op in pending),
            }
            if link in _FROM_DEVICE:
                links[link]["left_alone"] = bool(self.controller.links.trouble_of(link))
        return links

    def links_left_alone(self) -> dict[str, str]:
        """Links from the device by which nothing more is copied now -> why."""
        return {link: trouble for link in _FROM_DEVICE if (trouble := self.controller.links.trouble_of(link))}

    def all_counters(self) -> Counter[str]:
        counters = self.controller.counters + self.storage.counters + self.sessions.counters
        return counters + self.borrowed.counters if self.borrowed is not None else counters

    def check_invariants(self, waiting: Iterable[Req], active: list[Req], also_held: np.ndarray) -> None:
        """also_held: HELD device frames that belong to no hold."""
        self.tree.check_invariants()
        check_ages(self.tree)
        self.ledger.check_invariants()
        self.storage.check_invariants()
        self.sessions.check_invariants()
        if self.borrowed is not None:
            self.borrowed.slabs.check_invariants()
        if (border := self.controller.windowed_host.border) is not None:
            border.check_invariants()
        self._cursors.check_invariants({r.rid: (r.namespace, self.cacheable_tokens(r), r.num_known) for r in waiting})
        held = [also_held, *(r.hold.frames for r in active if r.hold is not None)]
        frames = np.concatenate(held)
        assert len(np.unique(frames)) == len(frames) == self.device.counts[FrameState.HELD], "a held page is lost"
        assert (self.device.state[frames] == FrameState.HELD).all()
        for req in active:
            self._check_hold(req)
        for node in self.tree.walk():
            assert max(*node.fences, node.last_use) < self.clock.next, (
                f"{node}: waits for a launch that does not exist"
            )

    def _check_hold(self, req: Req) -> None:
        assert req.hold is not None
        hold, page = req.hold, self.page_size
        assert hold.inserted_len % page == 0
        path = self.tree.path_of(hold.receipt.node)
        depth = sum(len(node.key) for node in path)
        tokens = req.tokens[: min(depth, req.num_known)]
        assert not path or np.array_equal(np.concatenate([node.key for node in path]), tokens), (
            f"{req}: locks other tokens than its own"
        )
        assert depth == hold.inserted_len, f"{req}: locked to {depth}, inserted {hold.inserted_len}"
        first_seen = self.tree.windows.first_seen(req.computed)
        assert all(node.end <= first_seen for node in path if node.is_partial), f"{req}: its windows see what lacks"
        assert len(hold.frames) == pages_for(req.computed, page) - depth // page - hold.num_swapped


def _open_pools(config: SchedulerConfig, tree: HiRadixTree) -> Pools:
    device = FrameTable(config.num_device_pages, lowest_first=config.lending is not None)
    host = FrameTable(config.num_host_pages, config.host_block_pages) if config.num_host_pages else None
    num_windowed = config.num_windowed_host_pages
    return Pools(
        device,
        host,
        FrameTable(config.num_peer_pages) if config.num_peer_pages else None,
        FrameTable(config.num_swap_pages) if config.num_swap_pages and config.layer_stream else None,
        WindowedPool(tree, device, config.num_windowed_pages) if config.num_windowed_pages else None,
        WindowedPool(tree, host, num_windowed, Tier.HOST) if host is not None and num_windowed else None,
        config.host_border,
    )
