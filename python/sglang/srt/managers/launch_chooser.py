"""`LaunchChooser`: which launch comes next, and whose memory is taken for it.

Owns whether a decode step is due, and whose turn it is while prompts stream. Who starts is decided in admission.py;
launches are made in batch_builder.py; the scheduler ends holds.

    prefill first           a prompt that streams and the others' prompts take turns, see `StreamingTurns`
    then a decode step      also between two chunks of one prompt
    where memory is short   preloads are cancelled, streams shrink, then a running request is retracted
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sglang.srt.managers.launch_batches import ExtendBatch, LaunchRecord
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import choose_victim, pages_for
from sglang.srt.managers.streaming_turns import StreamingTurns
from sglang.srt.model_executor.launch import Launch

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

_Issued = tuple[Launch, LaunchRecord]


class LaunchChooser:
    """scheduler: all its parts are there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.counters: Counter[str] = Counter()
        # Whether another step is due at once: perhaps nothing is under way that would cause one.
        self.asks_for_step = False
        self._scheduler = scheduler
        self._config = scheduler.config
        self._cache = scheduler.cache
        self._clock = scheduler.clock
        self._queues = scheduler.queues
        self._planner = scheduler.planner
        self._streaming = scheduler.streaming
        self._builder = scheduler.builder
        self._admission = scheduler.admission
        # Whether a decode step is due before the next chunk of a prompt.
        self._decode_owed = False
        self._turns = StreamingTurns()

    def forget_chunk(self) -> None:
        """All launches are void."""
        self._turns.forget_chunk()

    def next(self) -> _Issued | None:
        """The launch that is issued now, and what is remembered of it; None if there is none."""
        self.asks_for_step = False
        self._planner.begin_launch()
        launch = self._prefill_or_decode()
        if launch is not None and self._planner.deferred:
            self.counters["bubbles_filled"] += 1
        return launch

    def _prefill_or_decode(self) -> _Issued | None:
        queues = self._queues
        if not (self._decode_owed and queues.has_decode):
            launch = self._prefill()
            if launch is not None:
                return launch
        self._decode_owed = False
        if queues.waiting and self._clock.done <= self._streaming.gave_way_at:
            # Launches under way still read what was given up for waiting requests; one more would only come first.
            return None
        num_running = len(queues.running)
        launch = self._decode()
        if launch is None and num_running and not queues.running:
            # All were retracted, for a prompt: nothing is on its way that would cause another step.
            launch = self._prefill()
        if launch is None and self._turns.has_time(self._planner.expected.now) and not self._is_giving_way:
            # Those that decode make no use of it.
            launch = self._prefill_streaming()
        return launch

    def _prefill(self) -> _Issued | None:
        """See `StreamingTurns`. Whose turn it is not has the launch if the other has nothing to launch."""
        turns, now, launch = self._turns, self._planner.expected.now, None
        turns.watch(self._clock.done, now)
        is_others = turns.is_others(now)
        if not is_others:
            launch = self._prefill_streaming()
        self._streaming.is_giving_way = False
        if launch is None and (launch := self._prefill_others()) is not None:
            turns.note_others(self._queues.prefilling, now)
        if launch is None and is_others:
            if self._is_giving_way:
                # Another chunk would only come before the request that gets its pages.
                if not self._cache.will_free_pages:
                    self.asks_for_step = True
                return None
            if not (turns.has_time(now) and self._queues.has_decode):
                launch = self._prefill_streaming()
        return launch

    @property
    def _is_giving_way(self) -> bool:
        """Whether pages of a request that streams come free for one that waits."""
        return self._streaming.is_giving_way and (self._cache.will_free_pages or self._cache.num_free_soon > 0)

    def _prefill_streaming(self) -> _Issued | None:
        queues = self._queues
        if not queues.streaming or not self._turns.is_chunk_done(self._clock.done):
            return None
        batch = self._builder.begin_extend()
        for req in list(queues.streaming):
            # One that was just retracted, for another, is in the list still.
            if req in queues.streaming and self._next_chunk(batch, req, self._config.chunk_budget):
                queues.end_turn(req)
                self._turns.note_chunk(batch.seq, self._clock.done, self._planner.expected.now)
                return self._issue_prefill(batch)
        self._builder.discard(batch)
        return None

    def _preempt(self) -> None:
        """Retract running requests for a waiting one of higher priority that has no room."""
        for victim in self._admission.preemptible_streams():
            self._take_memory_of(victim)
        req = self._admission.first_in_line()
        victims = self._admission.preemptible_for(req) if req is not None else []
        prompt = self._queues.prefilling
        if req is None or not victims or (prompt is not None and prompt not in victims):
            return
        if prompt is not None:  # no other request starts before it is computed
            victims = [prompt, *(r for r in victims if r is not prompt)]
        for victim in victims:
            if not self._admission.lacks_room(req):
                return
            self._take_memory_of(victim)

    def _take_memory_of(self, victim: Req) -> None:
        self._scheduler.retract(victim)
        self.counters["preempted_reqs"] += 1
        # What no launch uses any more is free at once: perhaps no completion is to come that causes another step.
        self._cache.reap()

    def _prefill_others(self) -> _Issued | None:
        if self._config.priorities is not None and self._queues.waiting:
            self._preempt()
        batch = self._builder.begin_extend()
        budget = self._config.chunk_budget
        req = self._queues.prefilling
        if req is not None:
            budget -= self._next_chunk(batch, req, budget)
        num_continued = len(batch.reqs)
        # While a prompt lacks memory nothing is loaded ahead: it would take that back, and so on, step after step.
        if self._queues.prefilling is None or batch.reqs:
            self._admission.admit_waiting(batch, budget)
        if not batch.reqs:
            self._builder.discard(batch)
            return None
        self._admission.note_passed(batch.reqs[num_continued:])
        return self._issue_prefill(batch)

    def _issue_prefill(self, batch: ExtendBatch) -> _Issued:
        self._decode_owed = bool(self._queues.prompts())
        self._cache.takes.note(pages_for(sum(batch.lens), self._config.page_size))
        return self._builder.issue_extend(batch)

    def _next_chunk(self, batch: ExtendBatch, req: Req, budget: int) -> int:
        """Add the next chunk of the prompt that is being computed. Returns its tokens, 0 if there is no room yet."""
        cache = self._cache
        chunk = self._builder.chunk_from(batch, req, req.computed, budget)
        num_pages = self._builder.pages_to(req, req.computed + chunk)
        if cache.windowed.pool is not None and not self._config.inserts_late:
            # In the tree layers with a window give up what it sees no more. Others may have kept it from there.
            cache.insert_prefix(req, req.computed, batch.page_runs)
        frames = cache.allocate(num_pages)
        if frames is None and self._admission.cancel_preloads(self._queues.waiting):
            frames = cache.allocate(num_pages)
        if frames is None and self._streaming.is_enabled and not cache.will_progress:
            # Its place in the tree was being loaded when it was computed. Only what is in the tree can shrink.
            cache.insert_prefix(req, req.computed, batch.page_runs)
            frames = cache.allocate(num_pages)
        # Where nothing is on its way that would cause another step, all that can be given up at once is.
        while frames is None and self._streaming.shrink(num_pages, req):
            frames = cache.allocate(num_pages)
            if cache.will_progress:
                break
        if frames is not None:
            self._builder.extend(batch, req, chunk, frames)
            return chunk
        if self._streaming.is_streaming(req) and not (self._queues.running or cache.will_progress):
            if len(active := self._queues.active()) == 1:
                self._scheduler.end_too_long(req)
            else:
                self.asks_for_step = True
                self._scheduler.retract(active[choose_victim([self._admission.turn_of(r) for r in active])])
        return 0

    def _decode(self) -> _Issued | None:
        """One token for every running request."""
        while True:
            batch = self._builder.decode_batch()
            if not batch.reqs:
                return None
            growing = self._builder.growing(batch)
            frames = self._cache.allocate(len(growing))
            if frames is not None:
                return self._builder.issue_decode(batch, growing, frames)
            if not self._make_room_to_decode(len(growing)):
                return None

    def _make_room_to_decode(self, num_pages: int) -> bool:
        """Take memory from waiting requests, the one that streams, or a running one. False if it must wait."""
        cache, streaming, lending = self._cache, self._streaming, self._scheduler.lending
        if self._admission.cancel_preloads(self._queues.waiting):
            return True
        if streaming.shrink(num_pages) and cache.make_room(num_pages):
            return True
        # What was given up comes back when launches and transfers end: taking more from others would not help.
        if cache.will_free_pages_soon:
            return False
        active = self._queues.active()
        is_alone = len(active) == 1
        if is_alone and streaming.begin_if_outgrown(active[0]):
            return True
        if is_alone and lending is not None and lending.awaits_slabs:
            return False  # there is no other request to take from: it waits for the slabs that were recalled
        victim = active[choose_victim([self._admission.turn_of(r) for r in active])]
        if is_alone and streaming.is_streaming(victim):
            if cache.will_progress:
                return False
            assert victim.hold is not None
            before = victim.hold.inserted_len
            # As in `_next_chunk`.
            self._builder.insert_prefix(victim, victim.computed)
            # What was inserted may have been taken back for want of a tier below, and would be again.
            if victim.hold.inserted_len == before or not streaming.shrink(num_pages):
                self._scheduler.end_too_long(victim)
            return True
        self._scheduler.retract(victim)
        return True
