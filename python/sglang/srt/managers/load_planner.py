"""`LoadPlanner`: wait for a load, do other work meanwhile, or compute instead.

Owns what is expected of launches, loads and fetches (`ExpectedTimes`), which copies are late (`LateCopies`), and in
each step which requests were left out of the launch because their loads are not in. Starts no request and evicts
nothing. Loads begin through it, so that it knows when they arrive; admission.py and streamed_request.py decide which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from sglang.srt.managers.cache_policies import CachePolicies
from sglang.srt.managers.cost_model import MEASURED_LINKS, LoadLimit
from sglang.srt.managers.expected_times import ExpectedTimes
from sglang.srt.managers.held_batch import HeldBatch
from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.late_copies import LateCopies
from sglang.srt.managers.launch_batches import ExtendBatch, LaunchRecord
from sglang.srt.managers.request_queues import RequestQueues
from sglang.srt.managers.schedule_batch import Req, StepInputs
from sglang.srt.managers.schedule_policy import (
    Candidate,
    LoadTimes,
    PrefillWork,
    best_recompute_len,
    blocks_to_fetch,
    chunk_of,
    should_fill_bubble,
)
from sglang.srt.managers.scheduler_config import DEFAULT_LOAD_RATIO, SchedulerConfig
from sglang.srt.managers.storage_advice import StorageAdvice
from sglang.srt.mem_cache.node import MatchResult, Node, Receipt
from sglang.srt.mem_cache.placement import is_worth_copying
from sglang.srt.mem_cache.transfer import (
    BACKUP_LINKS,
    D2S,
    EXEC,
    FETCH_LINKS,
    H2D,
    LOAD_LINKS,
    P2D,
    STALL,
    STORE_LINKS,
    STREAM,
    StorageAction,
    StorageOp,
    Ticket,
    Tier,
)
from sglang.srt.utils.time_units import Seconds

# Peers so many times slower than the host are loaded from only where the host lacks a page, until they are less than
# _A_LITTLE_SLOWER: a change of the order looks at every node.
_MUCH_SLOWER = 1.5
_A_LITTLE_SLOWER = 1.25
# That a tier does not pay is believed for so long after the last copy to it: what may have been slow for a moment is
# not copied to any more, and would never be measured again.
BELIEVED_S = 10.0
# What is computed in so much less time than it is loaded is not loaded in part either.
_FAR_SOONER = 8.0
# The last load of a link may have been late by so much of the time in which a request could compute its own: to be a
# little late, too, costs less than to compute a long prompt.
_BEARABLE = 0.25
# A swap file is expected to take no more than this: what its writes took while they went to memory tells nothing of
# the disk, which they wait for later.
_SWAP_BYTES_PER_S = 5e8


@dataclass(frozen=True)
class Outlook:
    """What a launch comes to as far as it is built."""

    # What would go on while a request waits for its load, in seconds; None for nothing.
    other_work_s: float | None
    # How long the launch waits.
    stall_s: float
    # Loads have been begun that last until the next launch can be built.
    link_is_busy: bool


class LoadPlanner:
    def __init__(self, config: SchedulerConfig, cache: KVCache, queues: RequestQueues) -> None:
        self.config = config
        self.policies = CachePolicies.of(config)
        self.expected = ExpectedTimes(
            config.page_bytes / config.page_size,
            config.num_layers,
            config.kernel_links,
            config.windowed_share,
            config.window_reach,
        )
        # Seconds that launches have waited for loads.
        self.stall_s = 0.0
        # Requests that this step's launch leaves out because their loads are not in.
        self.deferred: dict[Req, None] = {}
        self._cache = cache
        self._held = HeldBatch(config, cache, queues, self.expected) if config.holds_batches else None
        self._order: Callable[[], Iterable[Req]] = lambda: ()
        self._first_in_turn: Callable[[], Req | None] = lambda: None
        self._storage = cache.storage
        self._queues = queues
        # The loads that the deferred ones wait for, and whether any waiting request needs none, once that was asked.
        self._awaited: dict[Ticket, None] = {}
        self._needs_no_load: bool | None = None
        self._late = LateCopies(self._copy_seconds)
        self._peers_are_slow = False
        # When a copy of a link was last measured, as in `StepInputs.now`.
        self._measured_at: dict[str, Seconds] = {}
        self.obey_policies()

    def obey_policies(self) -> None:
        """After they were changed."""
        advice = StorageAdvice(self._expected_storage_s, self._fetch_s, fetch_begun=self.expected.begin_fetch)
        self._cache.set_advice(self._is_worth_copying, self._is_believed)
        if self.policies.load_or_recompute:
            advice = replace(
                advice,
                fetch_gain_s=self._fetch_gain_s,
                blocks_worth_fetching=self.blocks_worth_fetching,
                is_worth_storing=self._is_worth_storing,
            )
        else:
            self._peers_are_slow = False
            self._cache.set_load_order((Tier.PEER, Tier.HOST))
        self._storage.set_advice(advice)

    def set_now(self, now: Seconds) -> None:
        """At the beginning of a step."""
        self.expected.now = now

    def set_queue_order(self, order: Callable[[], Iterable[Req]], first_in_turn: Callable[[], Req | None]) -> None:
        """order: the requests that may start, in the order in which they fill a batch. first_in_turn: see
        `Admission.first_in_turn`."""
        self._order, self._first_in_turn = order, first_in_turn

    def note_sick_links(self) -> None:
        """After operations have been taken in: have nothing wait for links that hang, or use those that fail."""
        if self.policies.load_or_recompute and self.config.num_peer_pages:
            self._set_load_order()
        self.watch_copies()
        self._cache.note_sick_links(self._late.links, self._late.overdue, self.expected.now)

    def _copy_seconds(self, num_bytes: int, link: str) -> float | None:
        """What a copy from the device is expected to take; None while that is not known."""
        expected_s = self.expected.costs.load_seconds(num_bytes, link)
        return expected_s if link != D2S else max(expected_s or 0.0, num_bytes / _SWAP_BYTES_PER_S)

    def watch_copies(self) -> None:
        """At the end of a step, too: `wake_at` includes the copies that the step began."""
        self._late.update(self.expected.now, self._cache.oldest_copies(), self._cache.clock.done)

    def _set_load_order(self) -> None:
        """Peers come first unless the host is known to be much faster, or peers are not known."""
        peer_s, host_s = (self.expected.costs.usual_load_seconds(LOAD_LINKS[tier]) for tier in (Tier.PEER, Tier.HOST))
        if host_s is None:
            return
        if peer_s is not None:
            at_most = _A_LITTLE_SLOWER if self._peers_are_slow else _MUCH_SLOWER
            self._peers_are_slow = peer_s > at_most * host_s
        is_host_first = peer_s is None or self._peers_are_slow
        self._cache.set_load_order((Tier.HOST, Tier.PEER) if is_host_first else (Tier.PEER, Tier.HOST))

    @property
    def wake_at(self) -> float | None:
        """Seconds, as in `StepInputs.now`: a step is due then, since requests may wait for a copy that hangs."""
        return self._late.next_at if self._queues.waiting or self._queues.active() else None

    def begin_launch(self) -> None:
        """Before the next launch is built."""
        self.deferred, self._awaited, self._needs_no_load = {}, {}, None
        if self._held is not None:
            self._held.begin_launch()

    # -- what was measured --------------------------------------------------------------------------------------

    def take_costs(self, inputs: StepInputs, launches: Mapping[int, LaunchRecord]) -> None:
        """What launches, loads and fetches took, as far as they succeeded."""
        self._take_launch_costs(inputs, launches)
        costs, in_flight = self.expected.costs, self._cache.in_flight
        for link in self.expected.loads:
            if inputs.failed.get(link) is not None:
                self.expected.note_failed_load(link)
        for link in MEASURED_LINKS:
            for seq, seconds in inputs.cost.get(link, {}).items():
                if seq != inputs.failed.get(link) and seq < inputs.done[link]:
                    num_bytes = in_flight[Ticket(link, seq)].size_bytes
                    if link in self.expected.loads:
                        self.expected.note_load(link, num_bytes, seconds)
                    # What is far faster than expected is tried again at once.
                    if not costs.add_copy(num_bytes, seconds, link):
                        self._measured_at[link] = self.expected.now
        adds = [each for store in costs.stores for each in (store.add_fetch, store.add_store)]
        for link, add in zip([link for links in zip(FETCH_LINKS, STORE_LINKS) for link in links], adds):
            first, counts = self._cache.num_done(link), inputs.counts.get(link, ())
            for seq, seconds in inputs.cost.get(link, {}).items():
                op = in_flight.get(Ticket(link, seq))
                if not isinstance(op, StorageOp) or not op.size_bytes or seq - first >= len(counts):
                    continue
                # An operation that did not move everything tells little.
                if counts[seq - first] == len(op.keys):
                    add(op.size_bytes, seconds)

    def _take_launch_costs(self, inputs: StepInputs, launches: Mapping[int, LaunchRecord]) -> None:
        costs, done, failed = self.expected.costs, inputs.done[EXEC], inputs.failed.get(EXEC)
        for seq, seconds in inputs.cost.get(EXEC, {}).items():
            record = launches.get(seq)
            if record is None or seq == failed or seq >= done:
                continue
            self.stall_s += inputs.cost.get(STALL, {}).get(seq, 0.0)
            if record.streamed:
                size, disk = (
                    n * self.config.page_bytes // self.config.page_size for n in (record.streamed, record.from_disk)
                )
                costs.add_stream(size, disk, inputs.cost.get(STREAM, {}).get(seq, 0.0))
            if record.work is not None:
                costs.add_prefill(*record.work, seconds)
            else:
                costs.add_decode(len(record.reqs), record.context, seconds)

    # -- wait, or fill the bubble -------------------------------------------------------------------------------

    def look_ahead(self, batch: ExtendBatch) -> Outlook:
        if self._cache.host is None or not self.policies.bubble_filling:
            return Outlook(None, 0.0, True)
        stall_s = self.expected.stall_seconds(batch.work, batch.loads)
        link_lasts = self.expected.link_lasts(batch.work, stall_s)
        if self._held is not None:
            self._held.update(batch, self._order)
            return Outlook(None, stall_s, link_lasts or not self._held.has_loads_to_begin)
        return Outlook(self._other_work_seconds(batch), stall_s, link_lasts)

    def should_defer_for_load(self, batch: ExtendBatch, req: Req, budget: int, outlook: Outlook) -> bool:
        """Whether a request's load should be in before it is launched (bubble filling, Strata 4.3.3). A request that
        is left out is noted in `deferred`."""
        if self._held is not None:
            if self._held.is_held:
                self.deferred[req] = None
            return self._held.must_wait(req)
        if outlook.other_work_s is None:
            return False
        if req.preload_cancelled and req is self._first_in_turn():
            return False  # else those that pass the first in turn could take its memory back again and again
        known = self._cache.candidate(req)
        if not known.load and not known.from_peers and not known.loading:
            return False
        if req.preload is not None and not known.loading:
            return False  # its load is in; what has come to its match since is loaded in its launch
        # Cheap to see in a long queue: its load can not even begin, or another waits for the same.
        if known.load and outlook.link_is_busy:
            self.deferred[req] = None
            return True
        if not any(t in self._awaited for t in known.loading):
            loads = self.expected.arrival_of(known.loading).and_also(
                self.expected.arrival_if_begun(known.load, known.from_peers)
            )
            work = batch.work.plus(known.prefix, chunk_of(known.compute, budget, self.config.page_size))
            added_s = self.expected.stall_seconds(work, batch.loads.and_also(loads)) - outlook.stall_s
            if not should_fill_bubble(added_s, outlook.other_work_s):
                return False
        self.deferred[req] = None
        self._awaited.update(dict.fromkeys(known.loading))
        return True

    def _other_work_seconds(self, batch: ExtendBatch) -> float | None:
        """What goes on while a request waits for its load: a decode step, or a prefill of those that need none."""
        if self._queues.has_decode:
            return self.expected.decode_seconds()
        if not batch.reqs and self._needs_no_load is None:
            known = (self._cache.candidate(r) for r in self._storage.startable(self._queues.waiting))
            self._needs_no_load = any(not each.load and not each.from_peers and not each.loading for each in known)
        return self.expected.compute_seconds(PrefillWork(1, 0, 1)) if batch.reqs or self._needs_no_load else None

    # -- loads --------------------------------------------------------------------------------------------------

    def begin_load(self, nodes: list[Node]) -> LoadTimes:
        """See `HiCacheController.begin_load`."""
        return self._note_begun(self._cache.begin_load(nodes))

    def complete_partial(self, receipt: Receipt) -> LoadTimes:
        """See `KVCache.complete_partial`; before room is made for anything, which may cost what is loaded."""
        return self._note_begun(self._cache.complete_partial(receipt))

    def _note_begun(self, loads: list[tuple[Ticket, int]]) -> LoadTimes:
        for ticket, num_bytes in loads:
            self.expected.begin_load(ticket, num_bytes)
        return self.expected.arrival_of(ticket for ticket, _ in loads)

    def load_limit(self) -> LoadLimit:
        if self.policies.load_ratio != "auto":
            return LoadLimit(0.0, float(self.policies.load_ratio), 0.0)
        return self.expected.costs.load_limit() or LoadLimit(0.0, DEFAULT_LOAD_RATIO, 0.0)

    # -- load or recompute --------------------------------------------------------------------------------------

    def _is_worth_copying(self, tier: Tier, start: int, end: int) -> bool:
        """Whether tokens [start, end) of a prompt are better copied to a tier, for a load, than computed again."""
        costs = self.expected.costs
        return not self.policies.load_or_recompute or is_worth_copying(
            costs.there_and_back_seconds(end - start, LOAD_LINKS[tier]), costs.recompute_seconds(start, end)
        )

    def _is_believed(self, tier: Tier) -> bool:
        """Whether what was measured of copies to a tier is no older than `BELIEVED_S`."""
        return self.expected.now < self._measured_at.get(BACKUP_LINKS[tier], -math.inf) + BELIEVED_S

    def _is_worth_storing(self, place: int, start: int, end: int) -> bool:
        """Whether tokens [start, end) of a prompt are better fetched than computed. Nothing waits for writes."""
        costs = self.expected.costs
        return is_worth_copying(costs.stores[place].usual_seconds(end - start), costs.recompute_seconds(start, end))

    def _fetch_s(self, place: int, num_tokens: int) -> float | None:
        limits = self._storage.limits
        if limits is None:
            return None
        per_op = limits.blocks_per_op * self._cache.block_tokens
        return self.expected.fetch_seconds(num_tokens, per_op, True, place)

    def _fetch_gain_s(self, place: int, start: int, end: int) -> float | None:
        """How much sooner tokens [start, end) of a prompt are fetched than computed, in seconds, at most; None: not
        known. While no fetch was measured, it takes no time."""
        limits, expected = self._storage.limits, self.expected
        if limits is None:
            return None
        compute_s = expected.costs.most_prompt_seconds(start, end, self.config.chunked_prefill_size)
        per_op = limits.blocks_per_op * self._cache.block_tokens
        fetch_s = expected.fetch_seconds(end - start, per_op, self._storage.leaves_out_windows, place)
        return None if compute_s is None else compute_s - (fetch_s or 0.0)

    def _expected_storage_s(self, op: StorageOp) -> float:
        """Of a read or write. What a probe takes is not measured."""
        costs, link = self.expected.costs.stores, op.ticket.link
        if op.action == StorageAction.GET:
            return costs[FETCH_LINKS.index(link)].fetch_seconds(1, op.size_bytes) or 0.0
        is_write = op.action == StorageAction.SET
        return (is_write and costs[STORE_LINKS.index(link)].store_seconds(op.size_bytes)) or 0.0

    def part_to_take(self, req: Req, match: MatchResult) -> MatchResult:
        """What a waiting request that starts takes of its match. It computes all that it would load where that is
        longer than a launch and sooner computed, or far sooner, but for what comes before the first slow link. Of
        other loads a launch computes a part meanwhile, see `recompute_prefix_len`."""
        known = self._cache.candidate(req)
        is_long = known.load + known.from_peers > self.config.chunk_budget
        if not self.is_slow_load(req, times=1.0 if is_long else _FAR_SOONER):
            return match
        loads = {Tier.HOST: known.load, Tier.PEER: known.from_peers}
        slow = [tier for tier, n in loads.items() if n and self._is_slow(LOAD_LINKS[tier], n, known)]
        return self._cache.before(match, slow) if len(slow) == 1 else self._cache.on_device(match)

    def is_slow_load(self, req: Req, times: float = 1.0) -> bool:
        """Whether to compute all that a waiting request would load, so many times, takes no longer than the load, or
        its link is in doubt."""
        if not self.policies.load_or_recompute or self.config.inserts_late:
            return False
        known = self._cache.candidate(req)
        to_load = known.load + known.from_peers
        if not to_load:
            return False
        loads = self.expected.loads
        needed = [link for n, link in ((known.load, H2D), (known.from_peers, P2D)) if n]
        start = known.prefix - to_load if known.on_device is None else known.on_device
        compute_s = self.expected.costs.recompute_seconds(start, known.prefix)
        bearable_s = _BEARABLE * (compute_s or 0.0)
        if any(loads[link].is_doubtful(self.expected.now, bearable_s) for link in needed):
            return True
        load_s = self.expected.load_seconds(known.load) + self.expected.load_seconds(known.from_peers, P2D)
        return compute_s is not None and times * compute_s <= load_s

    def _is_slow(self, link: str, num_tokens: int, known: Candidate) -> bool:
        """Whether a link is in doubt, or takes longer for its part of a match than computing as much."""
        start = known.prefix - known.load - known.from_peers
        compute_s = self.expected.costs.recompute_seconds(start, start + num_tokens) or 0.0
        is_doubtful = self.expected.loads[link].is_doubtful(self.expected.now, _BEARABLE * compute_s)
        return is_doubtful or compute_s <= self.expected.load_seconds(num_tokens, link)

    def recompute_prefix_len(self, batch: ExtendBatch, match: MatchResult, chunk: int, budget: int) -> int:
        """How many of the first tokens that a request would load its launch computes instead; see
        `best_recompute_len`. chunk: new tokens that the launch computes; budget: tokens that it may compute
        besides."""
        num_load = match.total_len - match.device_len
        if not num_load or not self.policies.load_or_recompute or self.config.inserts_late:
            return 0
        if match.to_complete or self._cache.on_device(match).total_len < match.device_len:
            return 0  # windows reach partial nodes from there
        expected, queues = self.expected, self._queues
        is_idle = not batch.reqs and not queues.running and len(queues.waiting) == 1

        def seconds_of(recomputed: int) -> float:
            work = batch.work.plus(match.total_len, chunk)
            if recomputed:
                work = work.plus(match.device_len, recomputed)
            to_load = match.to_load_behind(match.device_len + recomputed)
            loads = batch.loads.and_also(expected.arrival_if_begun(*to_load))
            return expected.stall_seconds(work, loads) + expected.compute_seconds(work)

        known = expected.costs.known_prefill - batch.work.new - chunk
        most = max(0, min(budget, known))
        recomputed = best_recompute_len(num_load, self.config.page_size, seconds_of, most)
        # Where others could use the time, computing must be the cheaper way.
        compute_s = expected.compute_seconds(PrefillWork().plus(match.device_len, recomputed))
        rest, all_of_it = match.to_load_behind(match.device_len + recomputed), match.to_load_behind(match.device_len)
        host_s = expected.load_seconds(all_of_it[0] - rest[0], behind=sum(rest))
        load_s = host_s + expected.load_seconds(all_of_it[1] - rest[1], P2D, behind=sum(rest))
        return recomputed if is_idle or compute_s <= load_s else 0

    def blocks_worth_fetching(self, rid: str, first: int, num_by_store: tuple[int, int], ahead: int) -> int:
        """See `StorageAdvice`. The stores are read at the same time."""
        req, limits = self._queues.get(rid), self._storage.limits
        assert req is not None and limits is not None
        expected, size = self.expected, self._cache.block_tokens
        per_op, chunk = limits.blocks_per_op * size, self.config.chunked_prefill_size
        num_near, num_blocks = num_by_store[0], sum(num_by_store)
        places = [place for place, num in enumerate(num_by_store) if num]
        is_known = all(expected.fetch_seconds(size, per_op, place=place) is not None for place in places)
        if not is_known or expected.costs.recompute_seconds(0, size) is None:
            return num_blocks
        on_link_s = [max(0.0, forecast.free_at - expected.now) for forecast in expected.fetches]
        seen_only = self._storage.leaves_out_windows

        def store_s(place: int, n: int) -> float:
            if not n:
                return 0.0
            num_ahead = ahead if place == places[0] else 0
            seconds = expected.fetch_seconds((num_ahead + n) * size, per_op, seen_only, place)
            return on_link_s[place] + (seconds or 0.0)

        def fetch_s(n: int) -> float:
            return max(store_s(place, min(n, num_near) if place == 0 else max(0, n - num_near)) for place in places)

        def compute_s(n: int) -> float:
            return expected.costs.most_prompt_seconds((first + n) * size, req.num_known, chunk) or 0.0

        # Computed at once, as when no other request is there, it would take this long at least.
        if compute_s(0) >= fetch_s(num_blocks) + compute_s(num_blocks):
            return num_blocks
        # Where others take longer than the whole fetch, it does not matter how much longer.
        return blocks_to_fetch(num_blocks, fetch_s, compute_s, self._others_seconds(req, fetch_s(num_blocks)))

    def _others_seconds(self, req: Req, enough_s: float) -> float:
        """How long the device is busy with launches that are issued, and with requests that are ready to be computed;
        not looked into any further from enough_s on, as the queue may be long."""
        expected, chunk = self.expected, self.config.chunked_prefill_size
        seconds = max(0.0, expected.launches.free_at - expected.now)
        for other in self._queues.prompts():
            seconds += expected.costs.prompt_seconds(other.computed, other.num_known, chunk) or 0.0
        for other in self._queues.waiting:
            if seconds >= enough_s:
                break
            if other is not req and self._storage.may_start(other.rid):
                start = self._cache.candidate(other).prefix
                seconds += expected.costs.prompt_seconds(start, other.num_known, chunk) or 0.0
        return seconds
