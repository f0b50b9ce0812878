"""`Admission`: the order of the queue, who may start, and what is loaded ahead for those who wait.

Owns no request and no memory. A request that waits for storage lets others pass. Of the rest the first in order (the
oldest, unless priorities or `lpm` order the queue) keeps all behind it waiting if it has no room.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, takewhile

import numpy as np

from sglang.srt.managers.batch_builder import BatchBuilder
from sglang.srt.managers.canary import Canary
from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.launch_batches import ExtendBatch
from sglang.srt.managers.layer_streaming import NoLayerStreaming
from sglang.srt.managers.load_planner import LoadPlanner, Outlook
from sglang.srt.managers.lost_hits import Lookup
from sglang.srt.managers.prefill_plan import hits_by_tier, plan_spans
from sglang.srt.managers.request_queues import RequestQueues
from sglang.srt.managers.request_times import RequestTimes
from sglang.srt.managers.schedule_batch import Preload, Req
from sglang.srt.managers.schedule_policy import (
    MOST_PASSED,
    QUEUE_POLICIES,
    AdmissionNeed,
    balanced_order,
    decode_reserve,
    first_come_first_served,
    pages_for,
    pages_to_admit,
)
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.node import MatchResult, Node, Receipt
from sglang.srt.mem_cache.placement import pages_ahead
from sglang.srt.mem_cache.transfer import TIER_NAMES, Tier
from sglang.srt.model_executor.launch import PageRun

# From here on a request runs alone, so that what cannot be computed takes no other with it.
FAILURES_OF_A_SUSPECT = 20


class Admission:
    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        queues: RequestQueues,
        planner: LoadPlanner,
        builder: BatchBuilder,
        streaming: NoLayerStreaming,
        canary: Canary,
        times: RequestTimes,
    ) -> None:
        self.config = config
        self.page_size = config.page_size
        self.counters: Counter[str] = Counter()
        self._cache = cache
        self._storage = cache.storage
        self._claims = cache.claims
        self._queues = queues
        self._planner = planner
        self._builder = builder
        self._streaming = streaming
        self._canary = canary
        self._times = times
        self._policies = planner.policies
        self._priorities = config.priorities
        # Of all waiting requests.
        self.num_preloads = 0

    # -- the next prefill ---------------------------------------------------------------------------------------

    def admit_waiting(self, batch: ExtendBatch, budget: int) -> None:
        """Start waiting requests, and the loads of those that should not start before their load is in."""
        outlook = self._planner.look_ahead(batch)
        if self._is_full(budget) and outlook.link_is_busy:
            return
        # The first that was deferred as the link is busy: the link's next load is its own.
        due: Req | None = None
        for req, came_along in self.iter_admissible():
            if self._cache.candidate(req).awaits_load:
                continue
            is_full = self._is_full(budget)
            if is_full and outlook.link_is_busy:
                break
            computes = self._may_compute(req) and self._planner.is_slow_load(req)
            if is_full or (not computes and self._should_defer(batch, req, budget, outlook)):
                wants_preload = not computes and self._wants_preload(req)
                if wants_preload and outlook.link_is_busy:
                    due = due or req
                elif wants_preload:
                    match = self._cache.match(req)
                    if not (self.may_start(req, match) and self._begin_preload(req, match)):
                        break
                    outlook = self._planner.look_ahead(batch)
                continue
            if self._storage.ask_again(req.rid, self._cache.candidate(req).prefix, self._planner.expected.now):
                continue
            match = self._match(req)
            if not self.may_start(req, match):
                break
            num_instead = self._cache.candidate(req).prefix - match.total_len
            used = self._start(batch, req, match, budget)
            if used == 0:
                break
            if num_instead:
                self.counters["recomputed_instead"] += 1
                self.counters["recomputed_instead_tokens"] += num_instead
            budget -= used
            self.counters["bundle_hits"] += came_along
            outlook = self._planner.look_ahead(batch)
            if due is not None and not outlook.link_is_busy:
                match = self._cache.match(due)
                if self._wants_preload(due) and self.may_start(due, match) and self._begin_preload(due, match):
                    outlook = self._planner.look_ahead(batch)
                due = None

    def note_passed(self, started: list[Req]) -> None:
        """Note the requests that could start and were passed by younger ones, which did in this launch. One that is
        deferred is put off for its load; it was passed if that has not begun."""
        orders = sorted({r.order for r in started})
        for req in takewhile(lambda r: r.order < orders[-1], self._queues.waiting if orders else ()):
            if not self._storage.may_start(req.rid):
                continue
            is_deferred = req in self._planner.deferred
            self.counters["deprioritised"] += not is_deferred
            if not (is_deferred and self._is_loading(req)):
                req.num_passed += len(orders) - bisect(orders, req.order)

    def _may_compute(self, req: Req) -> bool:
        """Whether a request may compute what it would load."""
        return req.preload is None and not self._streaming.must_stream(req)

    def _match(self, req: Req) -> MatchResult:
        """What a request that starts takes from the cache."""
        match = self._cache.match(req)
        return self._planner.part_to_take(req, match) if self._may_compute(req) else match

    def _is_full(self, budget: int) -> bool:
        """Whether a launch with so many tokens left can take no other request."""
        return self._queues.prefilling is not None or not self._queues.has_free_slot or budget < self.page_size

    def _should_defer(self, batch: ExtendBatch, req: Req, budget: int, outlook: Outlook) -> bool:
        if self._streaming.must_stream(req):
            return False
        return self._planner.should_defer_for_load(batch, req, budget, outlook)

    def _wants_preload(self, req: Req) -> bool:
        known = self._cache.candidate(req)
        return bool((known.load or known.from_peers) and not self._streaming.must_stream(req) and req.preload is None)

    # -- the order of the queue ---------------------------------------------------------------------------------

    def iter_admissible(self) -> Iterator[tuple[Req, bool]]:
        """Waiting requests, in the order in which they fill the batch, and whether each came along with another.
        Yields nothing if the first of them cannot start. Before that it cancels preloads and shrinks streams for it.
        """
        ready = self._storage.startable(self._queues.waiting)
        if any([r.delay_end for r in ready]):
            ready = self._after_delay_hits(ready)
        ready = self._streaming.admissible(ready, self.turn_of)
        if not ready:
            return
        rank = QUEUE_POLICIES[self._policies.schedule_policy]
        if rank is not first_come_first_served:
            ready.sort(key=lambda r: rank(self._cache.candidate(r)) if r.num_passed < MOST_PASSED else -math.inf)
        if self._priorities is not None:
            ready.sort(key=self._priority_rank)
        if not self._make_room_for_first(ready[0], ready[1:]):
            return
        if self._cache.host is None or not self._policies.load_ratio:
            yield from ((r, False) for r in ready)
            return
        for _, equals in groupby(ready, self._priority_rank):
            reqs = list(equals)
            for place, came_along in balanced_order(self._cache.candidates(reqs), self._planner.load_limit()):
                yield reqs[place], came_along

    def _priority_rank(self, req: Req) -> int:
        """The least goes first; the same of all where priorities do not order the queue."""
        return self._priorities.rank(req.priority) if self._priorities is not None else 0

    def turn_of(self, req: Req) -> tuple[int, int]:
        """The least goes first, and is the last to lose its memory to others."""
        return self._priority_rank(req), req.order

    def preemptible_for(self, req: Req) -> list[Req]:
        """Running requests whose memory a waiting one may take, in the order in which they lose it. Those that stream
        give up pages without that, but no slot."""
        streams, others = self._lower_than(req)
        return others or (streams if not self._queues.has_free_slot else [])

    def preemptible_streams(self) -> list[Req]:
        """Requests that stream, and without which a waiting one of higher priority can."""
        if not self._streaming.reqs:
            return []
        ready = self._storage.startable(self._queues.waiting)
        waiting = [r for r in ready if self._streaming.lacks_only_room(r)]
        if not waiting:
            return []
        first = min(waiting, key=self.turn_of)
        streams, _ = self._lower_than(first)
        for num in range(1, len(streams) + 1):
            if self._streaming.may_begin(first, without=streams[:num]):
                return streams[:num]
        return []

    def _lower_than(self, req: Req) -> tuple[list[Req], list[Req]]:
        """Running requests that stream, and others, whose memory a waiting one may take; the last in line first."""
        assert self._priorities is not None
        threshold = self._priorities.preemption_threshold
        if threshold is None:
            return [], []
        least = self._priority_rank(req) + threshold
        lower = [r for r in self._queues.active() if self._priority_rank(r) > least and not r.is_check]
        lower.sort(key=self.turn_of, reverse=True)
        streams = [r for r in lower if self._streaming.is_streaming(r)]
        return streams, [r for r in lower if r not in streams]

    def first_in_turn(self) -> Req | None:
        """Of the waiting requests that may start: the oldest of the highest priority."""
        return min(self._admissible(), key=self.turn_of, default=None)

    def first_in_line(self) -> Req | None:
        """The waiting request that starts next, whether there is room for it or not. One whose load is under way
        starts when that is in: others keep their memory until then."""
        able = (r for r in self._admissible() if not self._streaming.must_stream(r) and not self._is_loading(r))
        return min(able, key=self.turn_of, default=None)

    def _admissible(self) -> list[Req]:
        """Waiting requests that wait neither for storage nor for those that stream."""
        return self._streaming.admissible(self._storage.startable(self._queues.waiting), self.turn_of)

    def _is_loading(self, req: Req) -> bool:
        known = self._cache.candidate(req)
        return known.awaits_load or (req.preload is not None and bool(known.loading))

    def lacks_room(self, req: Req) -> bool:
        """Whether others keep a waiting request from starting: by their slots, a prompt, or their memory."""
        is_full = self._queues.prefilling is not None or not self._queues.has_free_slot
        match = self._match(req)
        lacks_pages = self._lacking_pages(req, match) > self._cache.num_free_soon
        return is_full or lacks_pages or not self._fits_windows(req, match)

    def _make_room_for_first(self, first: Req, others: list[Req]) -> bool:
        """If the first request lacks memory, take or ask for what others have of it. Whether it may start."""
        match = self._match(first)
        if self.may_start(first, match) or self._cache.candidate(first).awaits_load:
            return True
        if self._queues.prefilling is not None or self._fills_too_much(match):
            return False
        # What others have loaded ahead may be what it lacks.
        if self.cancel_preloads(r for r in self._queues.waiting if r is not first) and self.may_start(first, match):
            return True
        if self._streaming.reqs:
            self._streaming.shrink_stream_for(self._lacking_pages(first, match), others)
        return False

    # -- delay hits (Strata 4.3.1) ------------------------------------------------------------------------------

    def claim(self, req: Req) -> None:
        """Enter what a request is about to compute, and note how much of that it shares with an older one."""
        self._claims.release(req.rid)
        if not self._policies.deferral_threshold or not req.fills_cache:
            req.delay_end = 0  # it waits for others no more
            return
        self._claims.claim(req.rid, req.order, req.namespace, self._cache.cacheable_tokens(req))
        claimed = self._claims.claimed_by_older(req.rid, lambda rid: False)
        if claimed and claimed - self._cache.candidate(req).prefix > self._policies.deferral_threshold:
            self.counters["deferred"] += not req.delay_end
            req.delay_end = claimed

    def _after_delay_hits(self, ready: list[Req]) -> list[Req]:
        """A request that shares much with what others compute, or are about to, comes after them: right after the
        oldest as soon as that is in the cache. Until then it keeps its age; and where it would find nothing before
        the others' launches are complete, it lets them go first."""
        hits, rest = [], []
        for req in ready[1:]:
            is_delayed = req.delay_end > 0 and self._is_delayed(req)
            if not req.delay_end or (is_delayed and not self.config.inserts_late):
                rest.append(req)
            elif not is_delayed:
                hits.append(req)
        first = [r for r in ready[:1] if not (self.config.inserts_late and self._is_delayed(r))]
        return first + hits + rest

    def _is_delayed(self, req: Req) -> bool:
        threshold = self._policies.deferral_threshold
        prefix = self._cache.candidate(req).prefix
        if req.delay_end - prefix <= threshold or not self.config.inserts_late:
            return req.delay_end - prefix > threshold
        # The others may have gone, or what they computed.
        stalled = lambda rid: not self._storage.may_start(rid)  # noqa: E731
        return self._claims.claimed_by_older(req.rid, stalled) - prefix > threshold

    # -- who may start ------------------------------------------------------------------------------------------

    def may_start(self, req: Req, match: MatchResult) -> bool:
        """Whether memory and the other requests permit a waiting request to start."""
        active = self._queues.active()
        if active and max(req.num_failures, active[0].num_failures) >= FAILURES_OF_A_SUSPECT:
            return False
        if self._streaming.must_stream(req):
            if not self._streaming.may_begin(req):
                return False
        elif self._fills_too_much(match):
            return False
        return self._lacking_pages(req, match) <= 0 and self._fits_windows(req, match)

    def _lacking_pages(self, req: Req, match: MatchResult) -> int:
        """By how many pages the device has too little room for a waiting request to start."""
        page, streaming, queues = self.page_size, self._streaming, self._queues
        available = self._cache.available_pages
        if (prompt := queues.prefilling) is not None:
            available -= self._builder.pages_to(prompt, prompt.num_known)
        rests = [self._builder.pages_to(each, each.num_known) for each in queues.streaming]
        # They take turns, and give up pages for each other.
        available -= min(max(rests, default=0), streaming.headroom)
        if streaming.must_stream(req):
            # It takes no more than there is, and shrinks for others.
            need = streaming.headroom
        else:
            need = pages_for(req.num_known, page) - match.device_len // page
            available -= self._cache.evictable_pages_in(match)
        active = queues.active()
        futures = [streaming.future_len(r) for r in active]
        wanted = pages_to_admit(
            AdmissionNeed(need, pages_for(streaming.future_len(req), page), req.num_retractions > 0),
            reserve=decode_reserve(futures, self.config.new_token_ratio, page),
            worst_reserve=decode_reserve(futures, 1.0, page),
            anything_active=bool(active),
        )
        return wanted - available

    def _fits_windows(self, req: Req, match: MatchResult) -> bool:
        """Whether the device's pool for layers with a window has room for a waiting request beside others."""
        num_preloads = self.num_preloads - (req.preload is not None)
        return self._cache.windowed.lacking(req, match, self._queues.active(), num_preloads) <= 0

    def _fills_too_much(self, match: MatchResult) -> bool:
        """Whether loads would be filling too large a share of the device."""
        num_load = (match.total_len - match.device_len) // self.page_size
        filling = self._cache.filling_pages
        most = self.config.max_filling_ratio * self.config.num_device_pages
        return num_load > 0 and filling > 0 and filling + num_load > most

    # -- loading ahead ------------------------------------------------------------------------------------------

    def _begin_preload(self, req: Req, match: MatchResult) -> bool:
        """Begin a request's load while it waits; False if there is no room."""
        receipt = self._cache.lock(match)
        has_room = self._cache.windowed.make_to_complete(receipt)
        if has_room:
            self._planner.complete_partial(receipt)
            num_pages = (match.total_len - match.device_len) // self.page_size
            has_room = self._cache.make_room(num_pages, self._decode_pages)
        if not has_room:
            self._cache.unlock(receipt)
            return False
        if lacking := self._cache.lacking_nodes(receipt):
            self._planner.begin_load(lacking)
        self._note_loads(req, self._cache.path_of(receipt))
        req.preload = Preload(receipt, match.device_len, match.total_len, match.peer_runs)
        self.num_preloads += 1
        return True

    @property
    def _decode_pages(self) -> int:
        """That running requests take while copies are under way."""
        return pages_ahead(len(self._queues.running), 0)

    def end_preloads(self, reqs: Iterable[Req]) -> int:
        """What these have loaded ahead is not kept for them any more. Returns how many had."""
        ended = self._with_preload(reqs)
        for req in ended:
            assert req.preload is not None
            self._cache.end_preload(req.preload)
            req.loaded += ((req.preload.start, req.preload.end),)
            req.loaded_from_peers += req.preload.from_peers
            req.preload = None
        self.num_preloads -= len(ended)
        return len(ended)

    def cancel_preloads(self, reqs: Iterable[Req]) -> int:
        """As `end_preloads`, since others need the memory."""
        cancelled = self._with_preload(reqs)
        for req in cancelled:
            req.preload_cancelled = True
        return self.end_preloads(cancelled)

    def _with_preload(self, reqs: Iterable[Req]) -> list[Req]:
        """The queue is looked through only where it has some."""
        return [req for req in reqs if req.preload is not None] if self.num_preloads else []

    # -- starting -----------------------------------------------------------------------------------------------

    def _start(self, batch: ExtendBatch, req: Req, match: MatchResult, budget: int) -> int:
        """Start a waiting request with the first chunk of its new tokens, if there is room. Returns the tokens that
        it computes in this launch, 0 if it waits."""
        page, cache, planner = self.page_size, self._cache, self._planner
        streams = self._streaming.must_stream(req)
        if streams:
            match = self._streaming.make_streamable(req, match)
        chunk = self._builder.chunk_from(batch, req, match.total_len, budget)
        if chunk == 0:
            return 0
        receipt = cache.lock(match)
        num_load = 0 if streams else (match.total_len - match.device_len) // page
        num_own = pages_for(match.total_len + chunk, page) - match.total_len // page
        if not cache.windowed.make_to_complete(receipt, num_own):
            cache.unlock(receipt)
            return 0
        completing = planner.complete_partial(receipt)
        if not cache.make_room(num_load + num_own, self._decode_pages):
            cache.unlock(receipt)
            return 0
        num_recomputed = planner.recompute_prefix_len(batch, match, chunk, budget - chunk) if num_load else 0
        num_windowed = cache.windowed.num_to_complete(receipt) + num_own + num_recomputed // page
        if num_recomputed and not cache.windowed.make_room(num_windowed):
            num_recomputed = 0
        lookup = cache.lookup(req)
        self._leave_queue(req, receipt, match)
        if streams:
            self._streaming.begin(req)
        self._end_waiting(req)
        loading = (node.tickets[Tier.DEVICE] for node in match.path)
        under_way = planner.expected.arrival_of(t for t in loading if t is not None)
        batch.loads = batch.loads.and_also(under_way).and_also(completing)
        if num_recomputed:
            self._builder.recompute(batch, req, match.device_len, num_recomputed)
        lacking = [] if streams else cache.lacking_nodes(receipt)
        path = cache.path_of(receipt)
        if lacking:
            batch.loads = batch.loads.and_also(planner.begin_load(lacking))
        if lacking or match.to_complete:
            self._note_loads(req, path)
        req.plan = plan_spans(path, req.num_known, (match.device_len, match.device_len + num_recomputed))
        self._count_found(req, path, lookup)
        prefix = [frames for n in path if (frames := n.frames[Tier.DEVICE]) is not None]
        batch.page_runs.append(
            PageRun(req.slot, 0, np.concatenate(prefix) if prefix else np.empty(0, np.int32), fresh=True)
        )
        # After the load has its source and the path was read: room for a backup is made on the host, which may cut
        # nodes of the path.
        cache.back_up_reused(receipt)
        own = cache.take_free(num_own)
        self._queues.begin_prefill(req, streams)
        self._builder.extend(batch, req, chunk, own)
        return chunk + num_recomputed

    def _note_loads(self, req: Req, path: list[Node]) -> None:
        tickets = (node.tickets[Tier.DEVICE] for node in path)
        self._times.note_loads(req.rid, dict.fromkeys(ticket for ticket in tickets if ticket is not None))

    def _leave_queue(self, req: Req, receipt: Receipt, match: MatchResult) -> None:
        cache = self._cache
        cache.count_use(receipt, req)
        self._queues.leave_waiting(req)
        cache.forget_candidate(req)
        req.hold = cache.hold(receipt, match, req.is_check)
        self._queues.take_slot(req)
        self._times.started(req.rid)
        req.computed = match.total_len

    def _end_waiting(self, req: Req) -> None:
        """It waits for storage no more, and has a lock of its own on what was loaded ahead."""
        req.fetched = self._storage.found_by_tier(req.rid) or req.fetched
        # Before the path is looked at: cancelling a fetch may merge nodes.
        req.leaves_at = self._storage.leaves_at(req.rid) or req.leaves_at
        self._storage.detach(req.rid)
        self.end_preloads([req])

    def _count_found(self, req: Req, path: list[Node], lookup: Lookup) -> None:
        """Count what the cache saves a request that has its plan, and why not more, once per request."""
        if req.num_emitted != req.num_prompt or req.num_retractions or req.is_check:
            return
        found = hits_by_tier(req, self._cache.tokens_from_peers(path), self._storage.tiers)
        if not req.cached_tokens_details:
            self.counters["prompt_tokens"] += req.num_prompt
            for name, n in found.items():
                self.counters[f"hit_tokens_{name}"] += n
            req.computed_tokens_details = self._cache.explain(req, lookup, sum(found.values()))
            self._canary.note_hit(req)
        before = req.cached_tokens_details or found
        # On another start less may be there; what is there beyond is the request's own work.
        tiers = [*self._cache.tables, *self._storage.tiers]
        req.cached_tokens_details = {
            TIER_NAMES[t]: min(found[TIER_NAMES[t]], before.get(TIER_NAMES[t], 0)) for t in tiers
        }
        lacking = req.num_prompt - sum(req.cached_tokens_details.values()) - sum(req.computed_tokens_details.values())
        if lacking:
            assert lacking > 0, f"{req}: {req.computed_tokens_details} of {req.cached_tokens_details}"
            req.computed_tokens_details["restarted"] = req.computed_tokens_details.get("restarted", 0) + lacking
