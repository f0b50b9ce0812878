"""`Scheduler`: the replicated state machine. `step(StepInputs) -> BatchDecision`, nothing else.

Takes a step's inputs in, applies them in a fixed order, and hands the decision out. Contains no clock, thread,
socket, torch or unordered set: ranks that get the same inputs take the same decisions, and a recorded run replays
byte for byte. Which launch comes next is decided in launch_chooser.py, who starts in admission.py, what waits for
loads in load_planner.py; launches are made in batch_builder.py; all that concerns pages goes through kv_cache.py.

A step, in order:

    results of completed launches -> tokens, finished requests
    a failed launch               -> it and all later ones are void: requests requeued, what they inserted dropped
    completed operations          -> commit, or abort and requeue their readers; what storage found and brought
    new requests, aborts
    reap                          -> frames whose fence has passed and that no transfer pins are free
    flush
    slabs                         -> idle and wanted ones begin to drain, missing ones are recalled or asked for
    the next launch               -> prefill first; a decode step between two chunks of one prompt

A request's life: waiting, perhaps for storage -> (admitted: lock the match, load, hold) -> prefilling, chunk by
chunk -> running -> `end_hold`, which is the only way a hold ends, whether the request finished, was aborted,
retracted or lost its KV.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglang.srt.managers.admission import Admission
from sglang.srt.managers.batch_builder import BatchBuilder
from sglang.srt.managers.cache_admin import ERASED, CacheAdmin
from sglang.srt.managers.canary import Canary
from sglang.srt.managers.io_struct import (
    EraseSaltReqInput,
    FinishReason,
    TokenizedGenerateReqInput,
    TokenOutput,
    bytes_to_ids,
)
from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.launch_batches import LaunchRecord
from sglang.srt.managers.launch_chooser import LaunchChooser
from sglang.srt.managers.layer_streaming import LayerStreaming, NoLayerStreaming
from sglang.srt.managers.load_planner import LoadPlanner
from sglang.srt.managers.lost_hits import REASONS
from sglang.srt.managers.request_queues import RequestQueues
from sglang.srt.managers.request_times import RequestTimes
from sglang.srt.managers.schedule_batch import FAILURE_LIMIT, BatchDecision, ControlReply, EndReason, Req, StepInputs
from sglang.srt.managers.schedule_policy import decode_reserve, pages_for
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.slab_exchange import SlabBorrower, SlabLender
from sglang.srt.managers.storage_admin import StorageAdmin
from sglang.srt.managers.too_long import TooLongRequests, end_without_room
from sglang.srt.mem_cache.namespaces import alone, is_private, private
from sglang.srt.mem_cache.transfer import (
    CHECK,
    COPY_LINKS,
    EXEC,
    STALLING_LINKS,
    STORAGE_LINKS,
    Ticket,
    Tier,
)
from sglang.srt.mem_cache.tree_checks import check_locks
from sglang.srt.model_executor.launch import NO_TOKEN, Launch
from sglang.srt.peer.lending import DeviceLending
from sglang.srt.sampling.logprob_types import LaunchFindings
from sglang.srt.utils.time_units import LaunchClock, Seconds

# Up to `FAILURE_LIMIT`. A launch that waited for loads counts little: each failed load takes its source out of the
# cache, so these failures end by themselves.
FAILURE_WITH_LOADS = 1
FAILURE_WITHOUT_LOADS = 10
# What the scheduler did about loads.
SCHEDULING_COUNTERS = ("deferred", "bundle_hits", "deprioritised", "bubbles_filled", "recomputed_instead")
# Tokens of a request that is not streamed are passed on in groups.
EMIT_EVERY_UNSTREAMED = 64


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        config.check()
        self.config = config
        self.page_size = config.page_size
        self.clock = LaunchClock()
        self.cache = KVCache(config, self.clock)
        self.storage = self.cache.storage
        self.queues = RequestQueues(config.max_running_requests)
        self.planner = LoadPlanner(config, self.cache, self.queues)
        self.streaming = NoLayerStreaming(config)
        if config.layer_stream is not None:
            self.streaming = LayerStreaming(config, self.cache, self.queues, self.planner)
        self.builder = BatchBuilder(config, self.cache, self.queues, self.planner.expected, self.streaming)
        self.canary = Canary(config, self.cache)
        self.times = RequestTimes()
        self.admission = Admission(
            config, self.cache, self.queues, self.planner, self.builder, self.streaming, self.canary, self.times
        )
        order = lambda: (req for req, _ in self.admission.iter_admissible())  # noqa: E731
        self.planner.set_queue_order(order, self.admission.first_in_turn)
        self.storage_admin = StorageAdmin(self.storage, self._note_storage_opened)
        self.cache_admin = CacheAdmin(self.cache, self.planner, self.queues, self._end_erased)
        if config.storage is not None:
            self.storage_admin.attach(config.storage)
        self.lender: SlabLender | None = None
        if config.lending is not None:
            self.lender = SlabLender(config, config.lending, self.cache, self.max_total_len)
        self.borrower: SlabBorrower | None = None
        if config.borrowing is not None:
            self.borrower = SlabBorrower(config, config.borrowing, self.cache)
        self._counters: Counter[str] = Counter()
        # A step is due then, for something that ended late in the last one.
        self._step_again_at: float | None = None
        self._launches: dict[int, LaunchRecord] = {}
        patience_s = config.borrowing.patience_s if config.borrowing is not None else 0.0
        self._too_long = TooLongRequests(self.streaming, self.borrower, patience_s)
        self.chooser = LaunchChooser(self)
        self._outputs: list[TokenOutput] = []
        # Requests with tokens to pass on at the end of the step.
        self._changed: list[Req] = []

    @property
    def max_total_len(self) -> int:
        """The most tokens of a request, prompt and output, with the memory that is there now."""
        return self.streaming.max_total_len

    @property
    def lending(self) -> DeviceLending | None:
        """The policy of an engine that lends."""
        return self.lender.policy if self.lender is not None else None

    @property
    def accepted_len(self) -> int:
        """The most tokens of a request that may wait: for what peers may lend, too."""
        return self._too_long.accepted_len

    @property
    def max_unanswered_len(self) -> int:
        """The most tokens of a prompt without an answer. It may fill the device; one that streams may not fill all
        tiers."""
        return self.accepted_len if self.accepted_len <= self.config.max_resident_len else self.accepted_len - 1

    @property
    def num_reqs(self) -> int:
        return len(self.queues)

    @property
    def may_launch(self) -> bool:
        """Whether a launch may follow those that are issued."""
        return self.clock.next - self.clock.done < self.config.max_ahead

    @property
    def steps_after_launch(self) -> bool:
        """Whether a step right after one that launched could do anything: launch again, or ask peers for what the
        launch has left too little of, which is looked at before a launch."""
        return self.may_launch or self.lender is not None or self.borrower is not None

    @property
    def wake_at(self) -> float | None:
        """Seconds, as in `StepInputs.now`: a step is due then even if nothing comes in."""
        slabs_at = [each.wake_at for each in (self.lender, self.borrower) if each is not None]
        canary_at = self.canary.wake_at(is_idle=not self.num_reqs)
        times = [self.storage.wake_at, self.planner.wake_at, *slabs_at, canary_at, self._step_again_at]
        times.append(self._too_long.wake_at)
        if self.streaming.reqs:
            # A request that streams waits for what storage pins, until it hangs.
            times.append(self.storage.stores.write_hangs_at)
        return min((t for t in times if t is not None), default=None)

    def step(self, inputs: StepInputs) -> BatchDecision:
        self._outputs, self._changed = [], []
        self.times.begin_step(inputs.now)
        self.planner.set_now(inputs.now)
        self.storage.set_now(inputs.now)
        self._step_again_at = None
        reset = self._take_launches(inputs)
        self._take_operations(inputs)
        self.planner.note_sick_links()
        self._end_waits_for_late_copies()
        for msg in inputs.new:
            self._add(msg, inputs.now)
        # After the new ones: a request and its abort may have come together.
        for rid in inputs.aborts:
            self._abort(rid)
        if self.config.canary_rate:
            self._run_canary(inputs.now)
        # After everything that gives memory up: perhaps no completion is to come that would cause another step.
        self.cache.reap()
        if inputs.admin:
            if any(isinstance(each, EraseSaltReqInput) for each in inputs.admin):
                self._end_check()
                self.canary.forget()
            self.cache_admin.serve(inputs.admin, inputs.now)
        replies = self.storage_admin.take_replies()
        replies += [ControlReply(i, *self._flush()) for i in inputs.flush]
        self.storage_admin.serve(inputs.storage)
        replies += self.storage_admin.take_replies()
        if self.lender is not None:
            self.lender.step(inputs.now, self._demand(), self.planner.expected.costs)
        if self.borrower is not None:
            costs = self.planner.expected.costs
            if self.borrower.step(inputs.now, costs, self.streaming.room_lacking(), self._lose_to_lenders):
                self._step_again_at = inputs.now
        if self._too_long.is_possible:
            self._too_long.note_room()
            for req, message in self._too_long.take_ended(self.queues.waiting, inputs.now):
                self._leave(req)
                self._end(req, end_without_room(req, message))
        launch = self._issue(inputs.now) if self.may_launch else None
        self.cache_admin.step(inputs.now)
        replies += self.cache_admin.take_replies()
        self.cache.write_ahead(len(self.queues.running))
        if self.storage.fetches_due:
            self.storage.begin_fetches()
        for req in self._changed:
            self._emit(req, None)
        ops, cancels = self.cache.take_ops()
        if ops and self.borrower is not None:
            self.borrower.note_ops(inputs.now, ops, self.planner.expected.costs)
        if launch is not None and launch.streams and self.borrower is not None:
            self.borrower.note_streams(inputs.now, launch.streams, self.planner.expected.costs)
        if ops:
            self.planner.watch_copies()
            self.storage.watch()
        drained, given_up = self._take_drained()
        return BatchDecision(
            step=inputs.step,
            reset=reset,
            cancels=cancels,
            ops=ops,
            launch=launch,
            freed=self.cache.take_freed(),
            freed_windowed=self.cache.take_freed_windowed(),
            outputs=tuple(self._outputs),
            replies=tuple(replies),
            slabs_drained=drained,
            slabs_given_up=given_up,
            num_slabs_recalled=self.lender.take_num_recalled() if self.lender is not None else 0,
            peer_demand=self.borrower.take_demand(inputs.now) if self.borrower is not None else None,
        )

    # -- what came in -------------------------------------------------------------------------------------------

    def _take_launches(self, inputs: StepInputs) -> int | None:
        """Completed launches. Returns the reset mark if one failed: launches below it that have not completed are
        void."""
        done, failed = inputs.done[EXEC], inputs.failed.get(EXEC)
        if self.cache.host is not None or self.lender is not None:
            self.planner.take_costs(inputs, self._launches)
        self.planner.expected.complete(inputs.done)
        self.times.take_costs(inputs, self._launches)
        for seq in range(self.clock.done, done):
            if seq != failed and seq in self._launches:
                self._take_results(self._launches.pop(seq), inputs.results[seq], inputs.findings.get(seq))
        reset = self._reset(failed) if failed is not None else None
        self.clock.complete(done)
        return reset

    def _take_operations(self, inputs: StepInputs) -> None:
        cache = self.cache
        ended = [cache.num_done(link) for link in STALLING_LINKS]
        for link in COPY_LINKS:
            cache.complete_copies(
                link,
                inputs.done.get(link, 0),
                inputs.failed.get(link),
                losing=self._end_readers,
                committed=self.streaming.committed,
            )
        for tier in self.canary.complete(inputs.done.get(CHECK, 0), inputs.failed.get(CHECK)):
            self._distrust(tier)
        for link in STORAGE_LINKS:
            done, counts = inputs.done.get(link, 0), inputs.counts.get(link, ())
            probed = inputs.far_counts, inputs.part_counts
            cache.complete_storage_ops(link, done, counts, probed, self._administered)
        if cache.update_borrowed(inputs.slab_report, self._lose_to_lenders):
            self._step_again_at = inputs.now
        for each in (self.lender, self.borrower):
            if each is not None:
                each.update(inputs.slab_report)
        if cache.is_withdrawing:
            self._step_again_at = inputs.now
        if inputs.storage_has_room != self.storage.stores.has_room:
            self.storage.note_room(inputs.storage_has_room)
        self.storage.watch()
        self.storage.expire(inputs.now)
        self.times.note_storage(self.storage.take_let_start())
        if self.storage.fetches_due or [cache.num_done(link) for link in STALLING_LINKS] != ended:
            self.storage.begin_fetches()

    def _note_storage_opened(self) -> None:
        self.planner.expected.costs.forget_storage()
        self.cache_admin.note_storage_opened()

    def _administered(self, ticket: Ticket, count: int) -> bool:
        return self.storage_admin.end(ticket, count) or self.cache_admin.end(ticket, count)

    def _take_results(self, record: LaunchRecord, results: bytes, found: LaunchFindings | None) -> None:
        tokens = bytes_to_ids(results).tolist()
        assert len(tokens) == len(record.sampled), f"{len(tokens)} tokens for {len(record.sampled)} requests"
        if found is not None:
            self._take_findings(record, found)
        for (req, epoch), token in zip(record.sampled, tokens):
            if req.epoch == epoch:
                self._take_token(req, token)
        if not self.config.inserts_late:
            return
        for (req, epoch), end in zip(record.reqs, record.ends):
            if req.epoch == epoch and req.hold is not None:
                self.builder.insert_prefix(req, end)
        for req, epoch in record.sampled:
            if req.epoch == epoch:
                self.cache.claims.release(req.rid)

    @staticmethod
    def _take_findings(record: LaunchRecord, found: LaunchFindings) -> None:
        for place, logprobs in found.prompt.items():
            req, epoch = record.reqs[place]
            if req.epoch == epoch:
                req.prompt_logprobs += logprobs
        for place, logprob in found.sampled.items():
            req, epoch = record.sampled[place]
            if req.epoch == epoch:
                req.logprobs.append(logprob)
        for place, embedding in found.embeddings.items():
            req, epoch = record.sampled[place]
            if req.epoch == epoch:
                req.embedding = embedding

    def _take_token(self, req: Req, token: int) -> None:
        if token == NO_TOKEN:
            self._end_without_grammar(req)
            return
        if req.spec.params.max_new_tokens == 0:  # only the prompt was wanted
            self.times.first_token(req.rid)
            self._finish(req, FinishReason(type="length", length=0))
            return
        req.tokens[req.num_known] = token
        req.num_known += 1
        self._counters["generation_tokens"] += 1
        if req.num_known == req.num_prompt + 1:
            self.times.first_token(req.rid)
        if req.num_failures:
            req.num_failures = 0  # it can be computed: what failed was not its fault
        if token in req.stop_ids:
            self._finish(req, FinishReason(type="stop", matched=token))
        elif req.num_known == req.max_len:
            self._finish(req, FinishReason(type="length", length=req.num_known - req.num_prompt))
        elif req.num_known - req.num_emitted >= req.emit_every:
            self._changed.append(req)

    def _reset(self, failed: int) -> int:
        """Launch `failed` failed: it and all later ones are void, and so is what they inserted."""
        record = self._launches.get(failed)
        if record is not None:
            for req, epoch in dict(record.reqs).items():
                if req.epoch == epoch:
                    req.num_failures += FAILURE_WITH_LOADS if record.has_gates else FAILURE_WITHOUT_LOADS
        for seq in [s for s in self._launches if s >= failed]:
            del self._launches[seq]
        self.planner.expected.complete({EXEC: self.clock.next})
        self.admission.end_preloads(self.queues.waiting)
        self.chooser.forget_chunk()
        for req in self.queues.active():
            self.end_hold(req, EndReason.LOST)
            if req.num_failures >= FAILURE_LIMIT:
                message = "the model failed again and again on batches with this request; see the server's log"
                self._end(req, FinishReason(type="abort", message=message, status_code=500))
            else:
                self._requeue(req)
        self.cache.drop_written_since(failed)
        self._counters["failed_launches"] += 1
        return self.clock.next

    def _end_readers(self, ticket: Ticket) -> None:
        """A load failed, or a spill: requests that count on these nodes start again, and will compute what they
        had."""
        for reader in self.streaming.readers_of(ticket):
            self._lose(reader)
        if lost := self.cache.nodes_lost_with(ticket):
            self._lose_readers(lost)

    def _end_waits_for_late_copies(self) -> None:
        """Requests that stream, and lack a part that a copy has which hangs: they end, or start again without that
        link."""
        for ticket in self.cache.late_copies:
            for req in self.streaming.readers_of(ticket):
                if message := self._too_long.note_late_copy(req, ticket.link):
                    self._end_for_room(req, message)
                else:
                    self._lose(req)
                # As in `end_too_long`; and what nothing locks any more is taken back from the copy then.
                self._step_again_at = self.planner.expected.now

    def _lose_to_lenders(self, lost: set[int]) -> None:
        """As `_lose_readers`, where lenders take back the memory."""
        for req in self._readers(lost):
            req.num_recalls += 1
        self._lose_readers(lost)

    def _lose_readers(self, lost: set[int]) -> None:
        """Nodes, by their ids, are about to be lost: requests that count on them start again."""
        cache = self.cache
        for req in self._readers(lost):
            self._lose(req)
        waiting = [r for r in self.queues.waiting if r.preload is not None and cache.reads(r.preload.receipt, lost)]
        self.admission.end_preloads(waiting)

    def _readers(self, nodes: set[int]) -> list[Req]:
        """Running requests that count on some of the nodes, by their ids."""
        found = []
        for req in self.queues.active():
            assert req.hold is not None
            if self.cache.reads(req.hold.receipt, nodes):
                found.append(req)
        return found

    def _lose(self, req: Req) -> None:
        """A running request lacks a part of its KV: it starts again."""
        self.end_hold(req, EndReason.LOST)
        self._requeue(req)

    def _distrust(self, tier: Tier) -> None:
        """The canary found wrong KV that came from a tier: no more is read from there, nor from storage, which may
        have copies and what was computed from it. Memory may have them, too: all of that goes, and requests that
        read it start again."""
        for each in (tier, *self.storage.tiers):
            self.cache.turn_tier(each, reads=False, writes=None)
        for req in self.queues.active():
            self._lose(req)
        self.admission.end_preloads(self.queues.waiting)
        self.canary.forget()
        self.cache.flush("distrusted")

    def _run_canary(self, now: Seconds) -> None:
        if self.num_reqs > (self.canary.req is not None):
            self.canary.note_busy(now)
        elif (msg := self.canary.next_request(now)) is not None:
            self._enqueue(msg, now, is_check=True)

    def _end_check(self) -> None:
        if self.canary.req is not None:
            self._abort(self.canary.req.rid)

    def _add(self, msg: TokenizedGenerateReqInput, now: Seconds) -> None:
        self._end_check()
        assert msg.rid not in self.queues, f"request id {msg.rid} is in use"
        prompt = bytes_to_ids(msg.input_ids)
        longest = self.accepted_len - 1
        if msg.sampling_params.max_new_tokens == 0:
            longest = self.max_unanswered_len
        if not 0 < len(prompt) <= longest:
            message = (
                f"the prompt has {len(prompt)} tokens; this server takes 1 to {longest} "
                f"(see {self.streaming.limit_flags})"
            )
            self._refuse(msg.rid, len(prompt), message)
            return
        if msg.sampling_params.grammar is not None and not (
            self.config.eos_token_ids or msg.sampling_params.stop_token_ids
        ):
            message = "this model has no token that ends an answer, which a grammar needs: give stop_token_ids"
            self._refuse(msg.rid, len(prompt), message)
            return
        if message := self.streaming.refusal(len(prompt)):
            self._refuse(msg.rid, len(prompt), message)
            return
        self._enqueue(msg, now)
        self._counters["requests"] += 1

    def _enqueue(self, msg: TokenizedGenerateReqInput, now: Seconds, is_check: bool = False) -> None:
        prompt, sampling = bytes_to_ids(msg.input_ids), msg.sampling_params
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos or sampling.grammar is not None:
            stop_ids |= frozenset(self.config.eos_token_ids)
        # A token is sampled behind each prompt. Where the prompt alone is wanted, it may have no room.
        max_len = min(len(prompt) + max(1, sampling.max_new_tokens), self.accepted_len)
        req = Req(msg, self.queues.next_order, prompt, max_len, stop_ids)
        req.set_cache_mode(self.cache.switches.cache_mode(msg.cache))
        if self.config.bypass_local:
            # No other request's tokens are there; what storage has is found, by the same names as ever.
            req.namespace, req.session = private(req.namespace, req.order), None
        if not req.fills_cache and self.streaming.may_stream(req):
            # What is streamed lies in the tree: where no other request finds it, nor storage.
            req.namespace = alone(req.namespace, req.order)
            req.reads_cache = req.fills_cache = True
        if msg.stream:
            req.emit_every = self.config.stream_interval
        elif not sampling.stop:
            req.emit_every = EMIT_EVERY_UNSTREAMED
        if is_check:
            req.is_check = True
            self.canary.began(req)
        self.queues.add(req)
        self.admission.claim(req)
        self.cache.begin_turn(req)
        self.storage.begin(req.rid, req.namespace, self.cache.cacheable_tokens(req), now, self.cache.prompt_keys(req))
        if not is_check:
            self.times.arrived(req.rid, waits_for_storage=not self.storage.may_start(req.rid))

    def _refuse(self, rid: str, prompt_tokens: int, message: str) -> None:
        self._outputs.append(
            TokenOutput(
                rid=rid,
                output_ids=b"",
                finish_reason=FinishReason(type="abort", message=message, status_code=400),
                prompt_tokens=prompt_tokens,
                completion_tokens=0,
                cached_tokens=0,
            )
        )

    def _abort(self, rid: str) -> None:
        if (req := self.queues.get(rid)) is not None:
            self._end_early(req, "the request was aborted", 499)

    def _end_erased(self, req: Req) -> None:
        self._end_early(req, ERASED, 503)

    def _end_early(self, req: Req, message: str, status_code: int) -> None:
        """End a request that waits or runs."""
        if req.hold is not None:
            self.end_hold(req, EndReason.ABORT)
        else:
            self._leave(req)
        self._counters["aborted_reqs"] += not req.is_check
        self._end(req, FinishReason(type="abort", message=message, status_code=status_code))

    def _leave(self, req: Req) -> None:
        """A waiting request ends without having started."""
        self.admission.end_preloads([req])
        self.storage.detach(req.rid)
        self.cache.forget_candidate(req)
        self.queues.leave_waiting(req)

    def _flush(self) -> tuple[bool, str]:
        self._end_check()
        if self.num_reqs:
            return False, f"{self.num_reqs} requests are queued or running; the cache is flushed only when idle"
        self.canary.forget()
        self.cache.flush()
        return True, ""

    # -- ends ---------------------------------------------------------------------------------------------------

    def end_hold(self, req: Req, reason: EndReason) -> None:
        """End the request's hold: the only way back for its memory and its lock.

        Except when its KV is lost, what it computed enters the tree first: a retracted request finds it there.
        """
        assert req.hold is not None
        if reason != EndReason.LOST:
            self.builder.insert_prefix(req, min(req.computed, req.num_known))
        self.streaming.end_hold(req, keep=reason != EndReason.LOST)
        if reason in (EndReason.FINISH, EndReason.ABORT):
            # A stop string ends an answer by an abort.
            self.cache.end_turn(req)
        self.cache.release(req.hold)
        req.reset()
        self.queues.stop(req)

    def _finish(self, req: Req, reason: FinishReason) -> None:
        if req.is_check:
            self.canary.compare()
        self.end_hold(req, EndReason.FINISH)
        self._end(req, reason)

    def _end(self, req: Req, reason: FinishReason) -> None:
        self.queues.remove(req)
        self.times.ended(req.rid)
        self.cache.claims.release(req.rid)
        self.cache.leave_turn(req)
        if req.is_check:
            self.canary.ended()
        if is_private(req.namespace):
            self.cache.retire(req.namespace)
        self._emit(req, reason)

    def _end_without_grammar(self, req: Req) -> None:
        self.end_hold(req, EndReason.ABORT)
        self._counters["aborted_reqs"] += 1
        message = "the answer's grammar cannot be followed any further: it takes too long here, or allows nothing"
        self._end(req, FinishReason(type="abort", message=message, status_code=400))

    def end_too_long(self, req: Req) -> None:
        """No tier has any more room for the only request: it ends, or starts again."""
        if message := self._too_long.note_no_room(req, self.cache.broken_links, self.cache.late_links):
            self._end_for_room(req, message)
        else:
            self.retract(req)
        # Others may wait for its memory, and perhaps nothing is on its way that would cause another step.
        self._step_again_at = self.planner.expected.now

    def _end_for_room(self, req: Req, message: str) -> None:
        self.end_hold(req, EndReason.ABORT)
        self._end(req, end_without_room(req, message))

    def retract(self, req: Req) -> None:
        """Take a request's memory; it starts again when there is room."""
        self.end_hold(req, EndReason.RETRACT)
        req.num_retractions += 1
        self._counters["retracted_reqs"] += 1
        self._requeue(req)

    def _requeue(self, req: Req) -> None:
        """Back among the waiting, at the request's age."""
        self.queues.requeue(req)
        self.admission.claim(req)

    def _emit(self, req: Req, reason: FinishReason | None) -> None:
        if req.is_check:
            return
        if reason is None and (req.rid not in self.queues or req.num_emitted == req.num_known):
            return
        # A stop string ends an answer without the scheduler.
        may_be_last = reason is not None or req.spec.params.stop
        self._outputs.append(
            TokenOutput(
                rid=req.rid,
                output_ids=req.tokens[req.num_emitted : req.num_known].tobytes(),
                finish_reason=reason,
                prompt_tokens=req.num_prompt,
                completion_tokens=req.num_known - req.num_prompt,
                cached_tokens=sum(req.cached_tokens_details.values()),
                cached_tokens_details=req.cached_tokens_details,
                computed_tokens_details=req.computed_tokens_details if may_be_last else {},
                logprobs=req.logprobs[req.num_emitted - req.num_prompt : req.num_known - req.num_prompt],
                prompt_logprobs=req.prompt_logprobs if req.num_emitted == req.num_prompt else [],
                embedding=req.embedding if reason is not None else b"",
            )
        )
        req.num_emitted = req.num_known

    # -- the next launch ----------------------------------------------------------------------------------------

    def _issue(self, now: Seconds) -> Launch | None:
        issued = self.chooser.next()
        if self.chooser.asks_for_step:
            self._step_again_at = now
        if issued is None:
            return None
        launch, record = issued
        self._launches[launch.seq] = record
        return launch

    # -- slabs ------------------------------------------------------------------------------------------------------

    def _demand(self) -> int:
        """Device pages that requests need at the same time: what they have, what those that run may still need at
        most, and the longest of those that wait, which may share nothing."""
        page, queues = self.page_size, self.queues
        pages = self.cache.locked_pages
        pages += decode_reserve((r.max_len - r.length for r in queues.active()), 1.0, page)
        if queues.prefilling is not None:
            pages += self.builder.pages_to(queues.prefilling, queues.prefilling.num_known)
        if queues.waiting:
            # One more than it may fill, as in `pages_to_admit`.
            pages += pages_for(max([r.max_len for r in queues.waiting]), page) + 1
        return pages

    def _take_drained(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Slabs of which no page is in use any more, and those of them that a borrower chose."""
        if self.lender is not None:
            return self.lender.take_drained(), ()
        if self.borrower is not None:
            return self.borrower.take_drained()
        return (self.cache.borrowed.slabs.take_drained() if self.cache.borrowed is not None else ()), ()

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counter[str]:
        """Of all parts; those that never counted are missing."""
        parts = [self.admission.counters, self.builder.counters, self.chooser.counters, self.streaming.counters]
        if self.lender is not None:
            parts.append(self.lender.counters)
        return sum(parts, self._counters + self.cache.all_counters())

    def state(self, is_brief: bool = False) -> dict[str, Any]:
        """What `GET /hicache/state` shows: plain numbers. is_brief: without what takes longer for many prefixes."""
        storage, claims = self.storage_admin.state(), self.cache.claims
        num_windowed, window_reach = self.config.model_windows
        return {
            "page_size": self.page_size,
            "page_bytes": self.config.page_bytes,
            "windowed_page_bytes": self.config.page_bytes * num_windowed // self.config.num_layers,
            "window_reach": window_reach,
            "tiers": self.cache.tiers_state(),
            "links": self.cache.links_state(has_storage=storage is not None),
            "queues": {
                "waiting": len(self.queues.waiting),
                "waiting_tokens": sum([req.num_known for req in self.queues.waiting]),
                "waiting_for_storage": self.storage.num_waiting,
                "running": len(self.queues.active()),
            },
            "storage": storage,
            "switches": self.cache.switch_state(),
            "launches": {"issued": self.clock.next, "done": self.clock.done},
            "tree": self.cache.tree_state(),
            "sessions": self.cache.sessions.state(),
            "stall_seconds": round(self.planner.stall_s, 6),
            "costs": self.planner.expected.costs.state(),
            "transient": {
                "in_queue_tokens": claims.tokens_in_queue,
                "in_flight_tokens": claims.tokens_in_flight,
            },
            "layer_stream": self.streaming.state(),
            "canary": self.canary.state(),
            "admin": {} if is_brief else self.cache_admin.state(self.planner.expected.now),
            "lost_hits": {reason: self.cache.lost_hits.counts[reason] for reason in REASONS},
            "counters": dict(sorted(self.counters.items())),
        }

    def check_invariants(self) -> None:
        """Everything that must hold after every step; quadratic here and there, for tests and idle moments."""
        active, waiting = self.queues.active(), self.queues.waiting
        self.cache.check_invariants(waiting, active, self.streaming.held)
        self.streaming.check_invariants()
        self.queues.check_invariants()
        self.cache_admin.check_invariants()
        storage, rids = self.storage, [req.rid for req in [*active, *waiting]]
        self.times.check_invariants(rids, lambda rid: not storage.may_start(rid) or rid in storage.let_start)
        for each in (self.lender, self.borrower):
            if each is not None:
                each.policy.check_invariants()
        for req in active:
            assert req.last_launch < self.clock.next
            req.check_invariants()
        receipts = [r.hold.receipt for r in active if r.hold is not None]
        preloads = [r.preload.receipt for r in waiting if r.preload is not None]
        assert len(preloads) == self.admission.num_preloads
        receipts += preloads
        check_locks(self.cache.tree, receipts)
        if self.config.bypass_local:
            self._check_private_namespaces()

    def _check_private_namespaces(self) -> None:
        tree, alive = self.cache.tree, self.queues.namespaces()
        assert len(alive) == self.num_reqs, "two requests share a namespace"
        for node in tree.walk():
            is_alive = tree.root_of(node).namespace in alive
            assert is_alive or node.last_access < 0, f"{node}: no request can ask for it, and it stays"
