"""`HeldBatch`: bubble filling as Strata has it (4.3.3). A prefill batch whose loads would stall it waits as a whole,
and only decode steps run meanwhile.

Owns which waiting requests are that batch. Starts nothing and loads nothing: load_planner.py asks it, and
admission.py starts requests and their loads.

    empty ──► prepare: the first requests of the queue that fit one launch ──► held, while it would stall for longer
      ▲                                                                        than a decode step takes
      └──────────────── all have started or left the queue ◄──────────────────── released: only they may start
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang.srt.managers.expected_times import ExpectedTimes
from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.launch_batches import ExtendBatch
from sglang.srt.managers.request_queues import RequestQueues
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import (
    BatchRoom,
    chunk_of,
    count_prepared,
    decode_reserve,
    should_fill_bubble,
    tokens_to_load,
)
from sglang.srt.managers.scheduler_config import SchedulerConfig


class HeldBatch:
    def __init__(
        self, config: SchedulerConfig, cache: KVCache, queues: RequestQueues, expected: ExpectedTimes
    ) -> None:
        self.config = config
        # Whether the batch waits for its loads.
        self.is_held = False
        self._cache = cache
        self._queues = queues
        self._expected = expected
        # The requests of the batch that had not started at the last update, and their epochs: one that has started,
        # and lost its memory to others, is none of them any more.
        self._reqs: dict[Req, int] = {}
        # Whether it was decided for the launch that is being built.
        self._is_decided = False

    def begin_launch(self) -> None:
        self._is_decided = False

    def must_wait(self, req: Req) -> bool:
        """Whether a request is left out of this launch. Without a decode step to run meanwhile none is."""
        if not self._queues.has_decode:
            return False
        return self.is_held or bool(self._reqs and not self._is_member(req))

    def _is_member(self, req: Req) -> bool:
        return self._reqs.get(req) == req.epoch

    @property
    def has_loads_to_begin(self) -> bool:
        """Whether the batch waits for a load that has not begun."""
        return self.is_held and any(self._has_load_to_begin(r) for r in self._reqs if self._queues.is_waiting(r))

    def update(self, batch: ExtendBatch, order: Callable[[], Iterable[Req]]) -> None:
        """Decide for the launch that is being built, once. order: the requests that may start, in the order in which
        they fill a batch."""
        if self._is_decided:
            return
        was_held = self.is_held
        self._is_decided, self.is_held = True, False
        if not self._queues.has_decode:
            self._reqs = {}
            return
        ready = list(order())
        rest = {r: r.epoch for r in ready if self._is_member(r)}
        self._reqs = rest or self._prepare(batch, ready)
        if was_held and rest and self._links_rest():
            # A load that has not begun lacks room. The rest of the batch does not wait for it.
            self._reqs = {r: r.epoch for r in self._reqs if not self._has_load_to_begin(r)}
        # A preload that was given up was in the way of another request, and would be again.
        if not self._reqs or any(r.preload_cancelled for r in self._reqs):
            return
        self.is_held = should_fill_bubble(self._stall_seconds(batch), self._expected.decode_seconds())

    def _prepare(self, batch: ExtendBatch, ready: list[Req]) -> dict[Req, int]:
        config = self.config
        room = BatchRoom(
            num_reqs=config.max_running_requests - len(self._queues.active()),
            new_tokens=config.chunk_budget - batch.work.new,
            num_pages=self._cache.available_pages - self._reserved_pages(),
        )
        n = count_prepared(self._cache.candidates(ready), room, config.page_size)
        return {r: r.epoch for r in ready[:n]}

    def _reserved_pages(self) -> int:
        """Device pages that are kept for what runs."""
        remaining = (r.max_len - r.length for r in self._queues.active())
        return decode_reserve(remaining, self.config.new_token_ratio, self.config.page_size)

    def _links_rest(self) -> bool:
        return all(link.free_at <= self._expected.now for link in self._expected.loads.values())

    def _has_load_to_begin(self, req: Req) -> bool:
        known = self._cache.candidate(req)
        return req.preload is None and bool(known.load or known.from_peers)

    def _stall_seconds(self, batch: ExtendBatch) -> float:
        """How long the whole batch would wait for loads if it were launched now."""
        known = self._cache.candidates(self._reqs)
        work, budget = batch.work, self.config.chunk_budget - batch.work.new
        for each in known:
            chunk = chunk_of(each.compute, budget, self.config.page_size)
            work, budget = work.plus(each.prefix, chunk), budget - chunk
        under_way = self._expected.arrival_of(ticket for each in known for ticket in each.loading)
        to_begin = self._expected.arrival_if_begun(tokens_to_load(known), sum(each.from_peers for each in known))
        return self._expected.stall_seconds(work, batch.loads.and_also(under_way).and_also(to_begin))
