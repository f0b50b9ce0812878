"""`Scheduler`: the replicated state machine. `step(StepInputs) -> BatchDecision`, nothing else.

Owns requests, the tree, both frame tables and the cache controller. Contains no clock, thread, socket, torch or
unordered set: ranks that get the same inputs take the same decisions, and a recorded run replays byte for byte.

A step, in order:

    results of completed launches -> tokens, finished requests
    a failed launch               -> void everything from it on, requeue, drop what it published
    completed operations          -> commit, or abort and requeue their readers; what storage found and brought
    new requests, aborts
    reap                          -> frames whose fence has passed and that nobody pins are free
    flush
    slabs                         -> what nobody needs begins to leave, what somebody lacks is wanted back
    the next launch               -> prefill first; a decode step between two chunks of one prompt

A request's life: waiting, perhaps for storage -> (admitted: lock the match, load, hold) -> prefilling, chunk by
chunk -> running -> `close`, which is the only way a hold ends, whether the request finished, was aborted, retracted
or lost its KV.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.cost_model import LoadLimit
from sglang.srt.managers.expected_times import ExpectedTimes
from sglang.srt.managers.io_struct import FinishReason, TokenizedGenerateReqInput, TokenOutput, bytes_to_ids
from sglang.srt.managers.layer_streaming import LayerStreamConfig, LayerStreaming
from sglang.srt.managers.match_cursors import MatchCursors
from sglang.srt.managers.schedule_batch import (
    BatchDecision,
    ControlReply,
    Preload,
    Req,
    ReqHold,
    Span,
    SpanSource,
    StepInputs,
    StorageRequest,
    StorageSetup,
)
from sglang.srt.managers.schedule_policy import (
    NO_LOADS,
    Admission,
    Candidate,
    LoadTimes,
    PrefillWork,
    balanced_order,
    blocks_to_fetch,
    choose_victim,
    chunk_of,
    decode_reserve,
    front_to_recompute,
    pages_for,
    pages_to_admit,
    waits_for_load,
)
from sglang.srt.managers.storage_prefetch import STALLING_LINKS, PrefetchConfig, StoragePrefetcher
from sglang.srt.mem_cache.block_keys import BlockKeys, private
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree, MatchResult, Node, Receipt
from sglang.srt.mem_cache.slab_ledger import SlabLedger
from sglang.srt.mem_cache.transfer import (
    BACKUP_LINKS,
    COPY_LINKS,
    D2S,
    EXEC,
    FETCH,
    FRAME_TIERS,
    LINKS,
    LOAD_LINKS,
    P2D,
    STALL,
    STORAGE_LINKS,
    STORE,
    STREAM,
    TIER_NAMES,
    StorageAction,
    StorageOp,
    Ticket,
    Tier,
)
from sglang.srt.mem_cache.transient_nodes import TransientNodes
from sglang.srt.model_executor.launch import Launch, LaunchMode, PageRun, PromptRows, StreamedPrefix
from sglang.srt.peer.lending import DeviceLending, LendingConfig
from sglang.srt.sampling.logprob_types import LaunchLogprobs

# A request ends with an error when launches with it failed too often. A launch that waited for loads counts little:
# each failed load takes its source out of the cache, so these failures end by themselves.
FAILURE_LIMIT = 30
FAILURE_WITH_LOADS = 1
FAILURE_WITHOUT_LOADS = 10
# From here on it runs alone, so that what cannot be computed takes no neighbour with it.
FAILURES_OF_A_SUSPECT = 20
# A decoding request publishes many small nodes; they are merged once per so many tokens.
COMPACT_EVERY_TOKENS = 512
# Host pages come in whole blocks of so many tokens where they can: those of most storage backends.
HOST_BLOCK_TOKENS = 64
# What the scheduler did about loads.
SCHEDULING_COUNTERS = ("deferred", "bundle_hits", "deprioritised", "bubbles_filled", "recomputed_instead")
# Strata 4.3.2, and what `auto` goes by before anything was measured.
DEFAULT_LOAD_RATIO = 100.0
# Tokens of a request that is not streamed are passed on in groups.
EMIT_EVERY_UNSTREAMED = 64


@dataclass(frozen=True)
class SchedulerConfig:
    """page_bytes: K and V of one page, all layers. num_host_pages 0: no host tier. context_len: prompt and output.
    max_filling_ratio: share of the device that loads may be filling. publish_tokens: decoded tokens enter the tree
    in runs of about this many. stream_interval: tokens per output of a streamed request. max_ahead: launches issued
    and not completed, 2 executes one step ahead. num_layers: of the model, which loads hide behind. storage: attached
    from the start; needs a host tier. num_peer_pages: borrowed from peers; they need a host tier, too. slabs: of
    these pages, as `SlabLedger` has them, which come and go; without any, all pages are there all the time. lending:
    the slabs are the device's instead, of one length, and lent to others when nobody here needs them; who lends does
    not borrow. layer_stream: a request may be longer than the device, see `LayerStreaming`; needs a host tier.
    num_swap_pages: of the swap file of such a request.

    How the queue goes with a host tier (docs/hicache.md, "The scheduler"): load_ratio: tokens loaded per token
    computed before a batch counts as bound by loading, see `balanced_order`; "auto": as many as take as long; 0
    turns that off. bubble_filling: see `waits_for_load`. load_or_recompute: see `front_to_recompute`, and
    `blocks_to_fetch` for storage. publish_at: when what a launch computes can be shared, at its "launch", since
    later ones follow it on the device, or at its "completion", as upstream. deferral_threshold: a request that
    shares more than so many tokens with what an older one is about to compute comes right after it, see
    `_after_delay_hits`; 0 turns that off. schedule_policy: "fcfs", or "lpm", the longest cached prefix first.
    bypass_local: for experiments: a request finds nothing on the device or the host but what was fetched for it, see
    `_add`."""

    page_size: int
    num_device_pages: int
    num_host_pages: int
    page_bytes: int
    context_len: int
    eos_token_ids: tuple[int, ...] = ()
    max_running_requests: int = 256
    chunked_prefill_size: int = 2048
    max_prefill_tokens: int = 16384
    new_token_ratio: float = 0.3
    max_filling_ratio: float = 0.5
    publish_tokens: int = 64
    stream_interval: int = 1
    max_ahead: int = 2
    enable_radix_cache: bool = True
    eviction_policy: str = "lru"
    write_policy: str = "write_through"
    num_layers: int = 1
    schedule_policy: str = "fcfs"
    bypass_local: bool = False
    load_ratio: float | str = DEFAULT_LOAD_RATIO
    bubble_filling: bool = True
    load_or_recompute: bool = True
    publish_at: str = "launch"
    deferral_threshold: int = 100
    storage: StorageSetup | None = None
    num_peer_pages: int = 0
    slabs: tuple[tuple[int, int], ...] = ()
    lending: LendingConfig | None = None
    layer_stream: LayerStreamConfig | None = None
    num_swap_pages: int = 0

    @property
    def num_usable_pages(self) -> int:
        """Pages of the device, less those that lie in no slab of a lender."""
        if self.lending is None:
            return self.num_device_pages
        return sum(end - first for first, end in self.slabs)


@dataclass
class _LaunchRecord:
    """What a launch will answer: the requests that it samples, and the epoch in which they asked. Of a prefill, ends:
    how far each request is computed then, and the work. context: tokens that a decode attends to. streamed: tokens
    that come through the layer stream cache, from_disk: so many of them."""

    reqs: list[tuple[Req, int]]
    sampled: list[tuple[Req, int]]
    has_gates: bool
    ends: tuple[int, ...] = ()
    work: PrefillWork | None = None
    context: int = 0
    streamed: int = 0
    from_disk: int = 0


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        if config.chunked_prefill_size < config.page_size:
            raise ValueError(
                f"chunked prefill size {config.chunked_prefill_size} is below the page size {config.page_size}; "
                "set --chunked-prefill-size to at least one page"
            )
        self.config = config
        self.page_size = config.page_size
        if config.lending is not None:
            _check_lending(config)
        self.device = FrameTable(config.num_device_pages, lowest_first=config.lending is not None)
        # Blocks of consecutive pages are one read or write of storage.
        block_pages = max(1, HOST_BLOCK_TOKENS // config.page_size)
        self.host = FrameTable(config.num_host_pages, block_pages) if config.num_host_pages else None
        self.tree = HiRadixTree(config.page_size, config.eviction_policy)
        assert self.host is not None or not config.num_peer_pages, "memory of peers needs a host tier"
        peer = FrameTable(config.num_peer_pages) if config.num_peer_pages else None
        swap = FrameTable(config.num_swap_pages) if config.num_swap_pages and config.layer_stream else None
        self.controller = HiCacheController(
            self.tree, self.device, self.host, config.page_bytes, config.write_policy, peer, swap
        )
        self.slabs = SlabLedger(peer, config.slabs, here=False) if peer is not None and config.slabs else None
        self.cursors = MatchCursors(self.tree)
        self.transient = TransientNodes(config.page_size)
        self.expected = ExpectedTimes(config.page_bytes / config.page_size, config.num_layers)
        self.stall_s = 0.0
        if config.load_or_recompute:
            self.prefetcher = StoragePrefetcher(
                self.controller, PrefetchConfig(), self.expected.begin_fetch, self._worth_fetching
            )
        else:
            self.prefetcher = StoragePrefetcher(self.controller, PrefetchConfig(), self.expected.begin_fetch)
        self.storage: StorageSetup | None = None
        if config.storage is not None:
            self._open_storage(config.storage)
        self._storage_requests: deque[StorageRequest] = deque()
        self._storage_request_ticket: Ticket | None = None
        self.counters: Counter[str] = Counter()
        # One page stays free of any single request: the step that runs ahead of a finish may ask for it.
        self.max_resident_len = min(config.context_len, (config.num_usable_pages - 1) * config.page_size)
        self.max_total_len = self.max_resident_len
        self.streaming: LayerStreaming | None = None
        if config.layer_stream is not None:
            self.streaming = self._open_streaming(config)
            most = self.streaming.max_pages * config.page_size
            self.max_total_len = max(self.max_resident_len, min(config.context_len, most))
        self.lending = self._open_lending(config.lending) if config.lending is not None else None
        # Whether nodes may have been unlocked since leaving slabs were last looked at.
        self._unlocked = False
        self.waiting: deque[Req] = deque()
        self.prefilling: Req | None = None
        self.running: list[Req] = []
        self.exec_done = 0
        self.next_launch = 0
        self._reqs: dict[str, Req] = {}
        self._link_done = dict.fromkeys(LINKS, 0)
        self._link_bytes = dict.fromkeys(LINKS, 0)
        self._launches: dict[int, _LaunchRecord] = {}
        self._free_slots = list(range(config.max_running_requests))[::-1]
        self._next_order = 0
        self._next_hold = 0
        self._publish_run = max(1, config.publish_tokens // config.page_size) * config.page_size
        self._decode_owed = False
        self._decode_batch: _DecodeBatch | None = None
        # Of this step: requests left out of the launch as their loads are not in, the loads that these wait for, and
        # whether anybody needs none, once that was asked.
        self._held_up: dict[Req, None] = {}
        self._awaited: dict[Ticket, None] = {}
        self._needs_no_load: bool | None = None
        # The last launch when the request that streams gave up pages for others.
        self._gave_way = -1
        # Page runs for slots whose launch is already built; they go out with the next one.
        self._page_runs: list[PageRun] = []
        self._outputs: list[TokenOutput] = []
        self._replies: list[ControlReply] = []
        self._changed: list[Req] = []

    @property
    def last_launch(self) -> int:
        return self.next_launch - 1

    @property
    def num_reqs(self) -> int:
        return len(self._reqs)

    @property
    def _is_under_way(self) -> bool:
        """Whether a launch or an operation will cause another step."""
        return self.next_launch > self.exec_done or bool(self.controller.in_flight)

    @property
    def _publishes_late(self) -> bool:
        return self.config.publish_at == "completion"

    @property
    def wake_at(self) -> float | None:
        """Seconds, as in `StepInputs.now`: a step is due then even if nothing comes in."""
        times = [self.prefetcher.next_deadline, self.lending.wake_at if self.lending is not None else None]
        return min((t for t in times if t is not None), default=None)

    def active(self) -> list[Req]:
        """Requests that hold device memory."""
        return ([self.prefilling] if self.prefilling else []) + self.running

    def step(self, inputs: StepInputs) -> BatchDecision:
        self._outputs, self._changed = [], []
        self.expected.now = inputs.now
        done, failed = inputs.done[EXEC], inputs.failed.get(EXEC)
        if self.host is not None:
            self._take_costs(inputs, done, failed)
        self._take_results(inputs, done, failed)
        reset = None
        if failed is not None:
            reset = self._reset(failed)
        self.exec_done = done
        ended = [self._link_done[link] for link in STALLING_LINKS]
        for link in COPY_LINKS:
            self._take_completions(link, inputs.done.get(link, 0), inputs.failed.get(link))
        self._replies = []
        for link in STORAGE_LINKS:
            self._take_counts(link, inputs.done.get(link, 0), inputs.counts.get(link, ()))
        if self.slabs is not None:
            for slab in self.slabs.update(inputs.slabs):
                self.controller.withdraw(Tier.PEER, self.slabs.frames_of(slab), self.last_launch)
                self.counters["slabs_withdrawn"] += 1
        if self.lending is not None:
            self.lending.update(inputs.slabs)
        self.prefetcher.expire(inputs.now, done)
        if [self._link_done[link] for link in STALLING_LINKS] != ended:
            self.prefetcher.go_on(self.next_launch, done)
        for msg in inputs.new:
            self._add(msg, inputs.now)
        # After the new ones: a request and its abort may have come together.
        for rid in inputs.aborts:
            self._abort(rid)
        # After everything that gives memory up: perhaps no completion is to come that would cause another step.
        for table in self.controller.tables.values():
            table.reap(done)
        self._replies += [ControlReply(i, *self._flush()) for i in inputs.flush]
        self._storage_requests.extend(inputs.storage)
        self._serve_storage_requests()
        if self.lending is not None:
            self._lend(self.lending, inputs.now)
        launch = None
        if self.next_launch - self.exec_done < self.config.max_ahead:
            launch = self._next()
        for req in self._changed:
            self._emit(req, None)
        ops, cancels = self.controller.take_ops()
        return BatchDecision(
            step=inputs.step,
            reset=reset,
            cancels=cancels,
            ops=ops,
            launch=launch,
            freed={tier.value: table.take_freed() for tier, table in self.controller.tables.items()},
            outputs=tuple(self._outputs),
            replies=tuple(self._replies),
            slabs_left=self._take_left(),
            slabs_wanted=self._take_wanted(),
        )

    # -- what came in -------------------------------------------------------------------------------------------

    def _take_costs(self, inputs: StepInputs, done: int, failed: int | None) -> None:
        """What launches and loads took, as far as they succeeded."""
        costs = self.expected.costs
        for seq, seconds in inputs.cost.get(EXEC, {}).items():
            record = self._launches.get(seq)
            if record is None or seq == failed or seq >= done:
                continue
            self.stall_s += inputs.cost.get(STALL, {}).get(seq, 0.0)
            if record.streamed:
                size, disk = (
                    n * self.config.page_bytes // self.page_size for n in (record.streamed, record.from_disk)
                )
                costs.add_stream(size, disk, inputs.cost.get(STREAM, {}).get(seq, 0.0))
            if record.work is not None:
                costs.add_prefill(*record.work, seconds)
            else:
                costs.add_decode(len(record.reqs), record.context, seconds)
        for link in LOAD_LINKS.values():
            for seq, seconds in inputs.cost.get(link, {}).items():
                if seq != inputs.failed.get(link) and seq < inputs.done[link]:
                    costs.add_load(self.controller.in_flight[Ticket(link, seq)].size_bytes, seconds, link)
        first = self._link_done[FETCH]
        for seq, seconds in inputs.cost.get(FETCH, {}).items():
            op = self.controller.in_flight.get(Ticket(FETCH, seq))
            counts = inputs.counts.get(FETCH, ())
            # What did not bring everything says little.
            if isinstance(op, StorageOp) and seq - first < len(counts) and counts[seq - first] == len(op.keys):
                costs.add_fetch(op.size_bytes, seconds)
        self.expected.complete(inputs.done)

    def _take_results(self, inputs: StepInputs, done: int, failed: int | None) -> None:
        for seq in range(self.exec_done, done):
            if seq == failed or seq not in self._launches:
                continue
            record = self._launches.pop(seq)
            tokens = bytes_to_ids(inputs.results[seq]).tolist()
            assert len(tokens) == len(record.sampled), f"launch {seq} sampled {len(tokens)} of {len(record.sampled)}"
            if seq in inputs.logprobs:
                self._take_logprobs(record, inputs.logprobs[seq])
            for (req, epoch), token in zip(record.sampled, tokens):
                if req.epoch == epoch:
                    self._take_token(req, token)
            if self._publishes_late:
                for (req, epoch), end in zip(record.reqs, record.ends):
                    if req.epoch == epoch and req.hold is not None:
                        self._publish(req, min(end, req.num_known), self._page_runs)
                for req, epoch in record.sampled:
                    if req.epoch == epoch:
                        self.transient.release(req.rid)

    def _take_logprobs(self, record: _LaunchRecord, found: LaunchLogprobs) -> None:
        for place, logprobs in found.prompt.items():
            req, epoch = record.reqs[place]
            if req.epoch == epoch:
                req.prompt_logprobs += logprobs
        for place, logprob in found.sampled.items():
            req, epoch = record.sampled[place]
            if req.epoch == epoch:
                req.logprobs.append(logprob)

    def _take_token(self, req: Req, token: int) -> None:
        req.tokens[req.num_known] = token
        req.num_known += 1
        self.counters["generation_tokens"] += 1
        if req.num_failures:
            req.num_failures = 0  # it can be computed: what failed was not its fault
        if token in req.stop_ids:
            self._finish(req, FinishReason(type="stop", matched=token))
        elif req.num_known == req.max_len:
            self._finish(req, FinishReason(type="length", length=req.num_known - req.num_prompt))
        elif req.num_known - req.num_emitted >= req.emit_every:
            self._changed.append(req)

    def _reset(self, failed: int) -> int:
        """Launch `failed` failed: it and all later ones are void, and so is what they published."""
        record = self._launches.get(failed)
        if record is not None:
            for req, epoch in dict(record.reqs).items():
                if req.epoch == epoch:
                    req.num_failures += FAILURE_WITH_LOADS if record.has_gates else FAILURE_WITHOUT_LOADS
        for seq in [s for s in self._launches if s >= failed]:
            del self._launches[seq]
        self.expected.complete({EXEC: self.next_launch})
        self._end_preloads(self.waiting)
        for req in self.active():
            self.close(req, "lost")
            if req.num_failures >= FAILURE_LIMIT:
                message = "the model failed again and again on batches with this request; see the server's log"
                self._end(req, FinishReason(type="abort", message=message, status_code=500))
            else:
                self._requeue(req)
        for node in list(self.tree.walk()):
            for tier in FRAME_TIERS:
                if node.frames[tier] is not None and node.fences[tier] >= failed:
                    self.controller.drop(node, tier, self.last_launch)
        self.counters["failed_launches"] += 1
        return self.next_launch

    def _take_completions(self, link: str, done: int, failed: int | None) -> None:
        for seq in range(self._link_done[link], done):
            ticket = Ticket(link, seq)
            if seq == failed:
                self._close_readers(ticket)
                self.controller.abort(ticket, self.last_launch)
            else:
                self._link_bytes[link] += self.controller.in_flight[ticket].size_bytes
                self.controller.commit(ticket, self.exec_done)
                if self.streaming is not None:
                    self.streaming.committed(ticket)
        self._link_done[link] = done

    def _take_counts(self, link: str, done: int, counts: tuple[int, ...]) -> None:
        for seq, count in zip(range(self._link_done[link], done), counts, strict=True):
            ticket = Ticket(link, seq)
            op = self.controller.in_flight[ticket]
            assert isinstance(op, StorageOp)
            if len(op.keys):
                self._link_bytes[link] += op.size_bytes * count // len(op.keys)
            if link == FETCH:
                start, end = self.controller.end_fetch(ticket, count, self.exec_done)
                self.prefetcher.end_fetch(ticket, start, end, whole=count == len(op.keys))
            elif link == STORE:
                self.controller.end_store(ticket, count)
            else:
                self.controller.end_probe(ticket)
                if ticket == self._storage_request_ticket:
                    self._end_storage_request(count > 0)
                else:
                    self.prefetcher.end_probe(ticket, count, self.next_launch, self.exec_done)
        self._link_done[link] = done

    def _close_readers(self, ticket: Ticket) -> None:
        """A load failed, or a spill: whoever counts on these nodes starts again, and will compute what they had."""
        streaming = self.streaming
        if streaming is not None and streaming.req is not None and streaming.depends_on(ticket):
            self._lose(streaming.req)
        lost = {node.id for node in self.controller.tree.nodes_of(ticket) if node.tickets[Tier.DEVICE] == ticket}
        if not lost:
            return

        def reads(receipt: Receipt) -> bool:
            node: Node | None = receipt.node
            while node is not None and node.id not in lost:
                node = node.parent
            return node is not None

        for req in self.active():
            assert req.hold is not None
            if reads(req.hold.receipt):
                self._lose(req)
        self._end_preloads([r for r in self.waiting if r.preload is not None and reads(r.preload.receipt)])

    def _lose(self, req: Req) -> None:
        """A running request lacks a part of its KV: it starts again."""
        self.close(req, "lost")
        self._requeue(req)

    def _add(self, msg: TokenizedGenerateReqInput, now: float) -> None:
        assert msg.rid not in self._reqs, f"request id {msg.rid} is in use"
        prompt = bytes_to_ids(msg.input_ids)
        sampling = msg.sampling_params
        if not 0 < len(prompt) < self.max_total_len:
            flags = "--context-length and --max-total-tokens"
            if self.streaming is not None:
                flags = "--context-length, --max-total-tokens, --hicache-size and --layer-stream-disk-size"
            message = (
                f"the prompt has {len(prompt)} tokens; this server takes 1 to {self.max_total_len - 1} (see {flags})"
            )
            self._refuse(msg.rid, len(prompt), message)
            return
        if message := self._too_slow(len(prompt)):
            self._refuse(msg.rid, len(prompt), message)
            return
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= frozenset(self.config.eos_token_ids)
        max_len = min(len(prompt) + max(1, sampling.max_new_tokens), self.max_total_len)
        req = Req(msg, self._next_order, prompt, max_len, stop_ids)
        if self.config.bypass_local:
            # Nobody else's tokens are there; what storage has is found, by the same names as ever.
            req.namespace = private(req.namespace, req.order)
        if msg.stream:
            req.emit_every = self.config.stream_interval
        elif not sampling.stop:
            req.emit_every = EMIT_EVERY_UNSTREAMED
        self._next_order += 1
        self._reqs[req.rid] = req
        self.waiting.append(req)
        self.counters["requests"] += 1
        self._claim(req)
        self.prefetcher.begin(req.rid, req.namespace, req.tokens[: self._cacheable(req)], now)

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
        req = self._reqs.get(rid)
        if req is None:
            return
        if req.hold is not None:
            self.close(req, "abort")
        else:
            self._end_preloads([req])
            self.prefetcher.detach(rid, self.exec_done)
            self.cursors.forget(rid)
            self.waiting.remove(req)
        self.counters["aborted_reqs"] += 1
        self._end(req, FinishReason(type="abort", message="the request was aborted", status_code=499))

    def _flush(self) -> tuple[bool, str]:
        if self._reqs:
            return False, f"{len(self._reqs)} requests are queued or running; the cache is flushed only when idle"
        for tier in FRAME_TIERS:
            for root in list(self.tree.roots.values()):
                for node in list(root.children.values()):
                    if node.frames[tier] is not None:
                        self.controller.drop(node, tier, self.last_launch)
        for table in self.controller.tables.values():
            table.reap(self.exec_done)
        return True, ""

    # -- storage, as an administrator sees it -------------------------------------------------------------------

    def _open_storage(self, setup: StorageSetup) -> None:
        assert self.host is not None, "storage needs a host tier"
        self.storage = setup
        self.controller.write_policy = setup.write_policy
        self.prefetcher.config = setup.prefetch
        self.expected.costs.forget_fetches()
        self.controller.open_storage(setup.limits, BlockKeys(setup.secret, setup.block_tokens), setup.is_lossy)

    def _serve_storage_requests(self) -> None:
        """One after another, each when nothing else is on its way to storage or from it."""
        while self._storage_requests and self._storage_request_ticket is None:
            request = self._storage_requests[0]
            refusal = self._refusal(request)
            if refusal:
                self._storage_requests.popleft()
                self._replies.append(ControlReply(request.id, False, refusal))
                continue
            if self.controller.storage is not None:
                self.prefetcher.detach_all(self.exec_done)
                self.controller.close_storage(self.exec_done)
            if self.controller.storage_in_flight:
                return
            setup = request.what.setup if request.what is not None else ""
            self._storage_request_ticket = self.controller.administer(request.action, setup)

    def _refusal(self, request: StorageRequest) -> str:
        if self.host is None:
            return "there is no host tier for storage to fill: start the server with --hicache"
        if request.action == StorageAction.ATTACH and self.storage is not None:
            return f"the backend {self.storage.backend!r} is attached: detach it first"
        if request.action != StorageAction.ATTACH and self.storage is None:
            return "no storage backend is attached"
        return ""

    def _end_storage_request(self, success: bool) -> None:
        request = self._storage_requests.popleft()
        self._storage_request_ticket = None
        if request.action == StorageAction.CLEAR:
            assert self.storage is not None
            self._open_storage(self.storage)
        elif request.action == StorageAction.DETACH:
            self.storage = None
            self.controller.open_storage(None, None)
        elif success and request.what is not None:
            self._open_storage(request.what)
        message = "" if success else "the backend did not succeed; the server's log says why"
        self._replies.append(ControlReply(request.id, success, message))
        self._serve_storage_requests()

    # -- ends ---------------------------------------------------------------------------------------------------

    def close(self, req: Req, why: str) -> None:
        """End the request's hold: the only way back for its memory and its lock. why: finish, abort, retract or lost.

        Except when its KV is lost, what it computed enters the tree first: a retracted request finds it there.
        """
        hold = req.hold
        assert hold is not None
        if why != "lost":
            self._publish(req, min(req.computed, req.num_known), self._page_runs)
        if self.streaming is not None and req is self.streaming.req:
            self.streaming.end(why != "lost", self.next_launch, self.exec_done)
        self.device.doom(hold.frames.copy(), FrameState.HELD, self.last_launch)
        self._unlocked = True
        end = hold.receipt.node
        self.tree.unlock(hold.receipt, self.next_launch, self.last_launch)
        if end.parent is not None:
            self.tree.compact(end, self.exec_done)
        req.hold = None
        req.epoch += 1
        req.length = req.num_known
        req.prompt_logprobs_asked = req.next_prompt_logprob
        req.computed = 0
        self._free_slots.append(req.slot)
        req.slot = -1
        if req is self.prefilling:
            self.prefilling = None
        else:
            self.running.remove(req)
            self._decode_batch = None

    def _finish(self, req: Req, reason: FinishReason) -> None:
        self.close(req, "finish")
        self._end(req, reason)

    def _end(self, req: Req, reason: FinishReason) -> None:
        del self._reqs[req.rid]
        self.transient.release(req.rid)
        if self.config.bypass_local:
            self.tree.retire(req.namespace)
        self._emit(req, reason)

    def _requeue(self, req: Req) -> None:
        """Back among the waiting, at the request's age."""
        at = next((i for i, other in enumerate(self.waiting) if other.order > req.order), len(self.waiting))
        self.waiting.insert(at, req)
        self._claim(req)

    def _emit(self, req: Req, reason: FinishReason | None) -> None:
        if reason is None and (req.rid not in self._reqs or req.num_emitted == req.num_known):
            return
        self._outputs.append(
            TokenOutput(
                rid=req.rid,
                output_ids=req.tokens[req.num_emitted : req.num_known].tobytes(),
                finish_reason=reason,
                prompt_tokens=req.num_prompt,
                completion_tokens=req.num_known - req.num_prompt,
                cached_tokens=sum(req.cached_tokens_details.values()),
                cached_tokens_details=req.cached_tokens_details,
                logprobs=req.logprobs[req.num_emitted - req.num_prompt :] if req.logprobs else [],
                prompt_logprobs=req.prompt_logprobs if req.num_emitted == req.num_prompt else [],
            )
        )
        req.num_emitted = req.num_known

    # -- the next launch ----------------------------------------------------------------------------------------

    def _next(self) -> Launch | None:
        self._held_up, self._awaited, self._needs_no_load = {}, {}, None
        launch = self._prefill_or_decode()
        if launch is not None and self._held_up:
            self.counters["bubbles_filled"] += 1
        return launch

    def _prefill_or_decode(self) -> Launch | None:
        wants_decode = self._decode_owed and any(r.length < r.max_len for r in self.running)
        if not wants_decode:
            launch = self._prefill()
            if launch is not None:
                return launch
        self._decode_owed = False
        if self.waiting and self.exec_done <= self._gave_way:
            # Launches under way still read what was given up for those who wait; one more would only be before them.
            return None
        num_running = len(self.running)
        launch = self._decode()
        if launch is None and num_running and not self.running:
            # All were retracted, for a prompt: nothing is on its way that would cause another step.
            launch = self._prefill()
        return launch

    def _prefill(self) -> Launch | None:
        build = _ExtendBuilder(self.next_launch, self._take_page_runs())
        budget = min(self.config.chunked_prefill_size, self.config.max_prefill_tokens)
        req = self.prefilling
        if req is not None:
            chunk = chunk_of(req.num_known - req.computed, budget, self.page_size)
            num_pages = self._pages_to(req, req.computed + chunk)
            frames = self._allocate(num_pages, FrameState.HELD, req.slot)
            if frames is None and self._take_back_preloads(self.waiting):
                frames = self._allocate(num_pages, FrameState.HELD, req.slot)
            if frames is None and self.streaming is not None and not self._is_under_way:
                # Its place in the tree was being loaded when it was computed. Only what is in the tree can shrink.
                self._publish(req, req.computed, build.page_runs)
                frames = self._allocate(num_pages, FrameState.HELD, req.slot)
            # Where nothing is on its way that would cause another step, all that can be given up at once is.
            while frames is None and self._shrink_streamed(num_pages):
                frames = self._allocate(num_pages, FrameState.HELD, req.slot)
                if self._is_under_way:
                    break
            if frames is not None:
                assert req.hold is not None
                self._extend(build, req, chunk, frames)
                budget -= chunk
            elif (
                self.streaming is not None and req is self.streaming.req and not (self.running or self._is_under_way)
            ):
                self._end_too_long(req)
        # While a prompt lacks memory nothing is loaded ahead: it would take that back, and so on, step after step.
        if self.prefilling is None or build.reqs:
            self._admit_waiting(build, budget)
        if not build.reqs:
            self._page_runs = build.page_runs + self._page_runs
            return None
        self._decode_owed = self.prefilling is not None
        youngest = max(r.order for r in build.reqs)
        overtaken = takewhile(lambda r: r.order < youngest, self.waiting)
        self.counters["deprioritised"] += sum(
            self.prefetcher.may_start(r.rid) and r not in self._held_up for r in overtaken
        )
        return self._issue_extend(build)

    def _admit_waiting(self, build: _ExtendBuilder, budget: int) -> None:
        """Start waiting requests, and the loads of those that should not start before their load is in."""
        outlook = self._look_ahead(build)
        if self._is_full(budget) and outlook.link_is_busy:
            return
        for req, came_along in self._candidates():
            is_full = self._is_full(budget)
            if is_full and outlook.link_is_busy:
                break
            if is_full or self._is_held_up(build, req, budget, outlook):
                known = self._candidate(req)
                wants_load = (known.load or known.near) and not self._must_stream(req)
                if not outlook.link_is_busy and wants_load and req.preload is None:
                    match = self._match(req)
                    if not (self._may_start(req, match) and self._preload(req, match)):
                        break
                    outlook = self._look_ahead(build)
                continue
            match = self._match(req)
            if not self._may_start(req, match):
                break
            used = self._admit(build, req, match, budget)
            if used == 0:
                break
            budget -= used
            self.counters["bundle_hits"] += came_along
            outlook = self._look_ahead(build)

    def _is_full(self, budget: int) -> bool:
        """Whether a launch with so many tokens left can take nobody else."""
        return self.prefilling is not None or not self._free_slots or budget < self.page_size

    def _admit(self, build: _ExtendBuilder, req: Req, match: MatchResult, budget: int) -> int:
        """Start a waiting request with the first chunk of its new tokens, if there is room. Returns the tokens that
        it computes in this launch, 0 if it waits."""
        page = self.page_size
        streams = self._must_stream(req)
        if streams:
            match = self._make_streamable(req, match)
        chunk = chunk_of(req.num_known - match.total_len, budget, page)
        if chunk == 0:
            return 0
        receipt = self.tree.lock(match, self.next_launch)
        num_load = 0 if streams else (match.total_len - match.device_len) // page
        num_own = pages_for(match.total_len + chunk, page) - match.total_len // page
        if not self._make_room(num_load + num_own):
            self.tree.unlock(receipt, self.next_launch, -1)
            return 0
        front = self._front(build, match, chunk, budget - chunk) if num_load else 0
        self.tree.count_use(receipt.node, req.priority, num_uses=int(req.epoch == 0))
        self.waiting.remove(req)
        self.cursors.forget(req.rid)
        self._next_hold += 1
        req.hold = ReqHold(self._next_hold, receipt, match.total_len)
        req.slot = self._free_slots.pop()
        req.computed = match.total_len
        if streams:
            assert self.streaming is not None
            self.streaming.begin(req)
        req.fetched = self.prefetcher.found_by_tier(req.rid) or req.fetched
        # Before anybody looks at the path: giving up a fetch may merge nodes.
        self.prefetcher.detach(req.rid, self.exec_done)
        if req.preload is not None:
            req.loaded = (req.preload.start, req.preload.end)
            req.loaded_near = (req.preload.start, req.preload.near_end)
            self._end_preloads([req])
        loading = (node.tickets[Tier.DEVICE] for node in match.path)
        build.loads = build.loads.and_also(self.expected.arrival_of(t for t in loading if t is not None))
        if front:
            self._recompute(build, req, receipt, match.device_len, front)
        path = self.tree.path_of(receipt.node)
        if num_load * page > front:
            lacking = [n for n in path if n.frames[Tier.DEVICE] is None]
            build.loads = build.loads.and_also(self._begin_load(lacking))
        # After the load has its source: room for a backup may be made on the host.
        self.controller.used(receipt.node, self.exec_done)
        self._plan(req, path, (match.device_len, match.device_len + front))
        prefix = [frames for n in path if (frames := n.frames[Tier.DEVICE]) is not None]
        build.page_runs.append(
            PageRun(req.slot, 0, np.concatenate(prefix) if prefix else np.empty(0, np.int32), fresh=True)
        )
        own = self.device.allocate(num_own, req.slot, FrameState.HELD)
        assert own is not None
        self.prefilling = req
        self._extend(build, req, chunk, own)
        return chunk + front

    def _candidates(self) -> Iterator[tuple[Req, bool]]:
        """Waiting requests, in the order in which they fill the batch, and whether they came along with another.
        Whoever waits for storage lets the younger ones pass; the oldest of the others keeps all behind it waiting if
        it cannot start (with "lpm", the one that has most)."""
        ready = list(self.waiting)
        if not self.prefetcher.is_idle:
            ready = [r for r in ready if self.prefetcher.may_start(r.rid)]
        if any([r.delay_end for r in ready]):
            ready = self._after_delay_hits(ready)
        if self.streaming is not None and self.streaming.req is not None:
            # One at a time; the others let the younger ones pass.
            ready = [r for r in ready if not self._must_stream(r)]
        if not ready:
            return
        if self.config.schedule_policy == "lpm":
            ready.sort(key=lambda r: -self._candidate(r).prefix)
        first = ready[0]
        match = self._match(first)
        if not self._may_start(first, match):
            if self.prefilling is not None or self._fills_too_much(match):
                return
            # What others have loaded ahead may be what it lacks.
            others = [r for r in self.waiting if r is not first]
            if not self._take_back_preloads(others) or not self._may_start(first, match):
                self._give_way(first, match, ready[1:])
                return
        if self.host is None or not self.config.load_ratio:
            yield from ((r, False) for r in ready)
            return
        known = self.cursors.candidates.get
        queue = [known(r.rid) or self._find(r) for r in ready]
        for place, came_along in balanced_order(queue, self._load_limit()):
            yield ready[place], came_along

    def _claim(self, req: Req) -> None:
        """Say what a request is about to compute, and find out whether it shares much of that with an older one."""
        if not self.config.deferral_threshold:
            return
        self.transient.release(req.rid)
        self.transient.claim(req.rid, req.order, req.namespace, req.tokens[: self._cacheable(req)])
        claimed = self.transient.claimed_by_older(req.rid, lambda rid: False)
        if claimed and claimed - self._candidate(req).prefix > self.config.deferral_threshold:
            self.counters["deferred"] += not req.delay_end
            req.delay_end = claimed

    def _after_delay_hits(self, ready: list[Req]) -> list[Req]:
        """Strata 4.3.1: who shares much with what others compute, or are about to, comes after them: right after the
        oldest as soon as that is in the cache. Until then it keeps its age; and where it would find nothing before
        the others' launches are complete, it lets them go first."""
        hits, rest = [], []
        for req in ready[1:]:
            is_delayed = req.delay_end > 0 and self._is_delayed(req)
            if not req.delay_end or (is_delayed and not self._publishes_late):
                rest.append(req)
            elif not is_delayed:
                hits.append(req)
        first = [r for r in ready[:1] if not (self._publishes_late and self._is_delayed(r))]
        return first + hits + rest

    def _is_delayed(self, req: Req) -> bool:
        threshold = self.config.deferral_threshold
        prefix = self._candidate(req).prefix
        if req.delay_end - prefix <= threshold or not self._publishes_late:
            return req.delay_end - prefix > threshold
        # The others may have gone, or what they computed.
        stalled = lambda rid: not self.prefetcher.may_start(rid)  # noqa: E731
        return self.transient.claimed_by_older(req.rid, stalled) - prefix > threshold

    def _load_limit(self) -> LoadLimit:
        if self.config.load_ratio != "auto":
            return LoadLimit(0.0, float(self.config.load_ratio), 0.0)
        return self.expected.costs.load_limit() or LoadLimit(0.0, DEFAULT_LOAD_RATIO, 0.0)

    def _candidate(self, req: Req) -> Candidate:
        return self.cursors.candidates.get(req.rid) or self._find(req)

    def _find(self, req: Req) -> Candidate:
        return self.cursors.find(req.rid, req.namespace, req.tokens[: self._cacheable(req)], req.num_known)

    # -- loads and what they cost -------------------------------------------------------------------------------

    def _is_held_up(self, build: _ExtendBuilder, req: Req, budget: int, outlook: _Outlook) -> bool:
        """Whether a request's load should be in before it is launched."""
        if outlook.other_work_s is None:
            return False
        if req.preload_taken_back and req is next(r for r in self.waiting if self.prefetcher.may_start(r.rid)):
            return False  # else those that pass the oldest could take its memory back again and again
        known = self._candidate(req)
        if (not known.load and not known.near and not known.loading) or self._must_stream(req):
            return False
        if req.preload is not None and not known.loading:
            return False  # its load is in; what has come to its match since is loaded in its launch
        # Cheap to see in a long queue: its load can not even begin, or another waits for the same.
        if known.load and outlook.link_is_busy:
            self._held_up[req] = None
            return True
        if not any(t in self._awaited for t in known.loading):
            loads = self.expected.arrival_of(known.loading).and_also(
                self.expected.arrival_if_begun(known.load, known.near)
            )
            work = build.work.plus(known.prefix, chunk_of(known.compute, budget, self.page_size))
            added_s = self.expected.stall_seconds(work, build.loads.and_also(loads)) - outlook.stall_s
            if not waits_for_load(added_s, outlook.other_work_s):
                return False
        self._held_up[req] = None
        self._awaited.update(dict.fromkeys(known.loading))
        return True

    def _look_ahead(self, build: _ExtendBuilder) -> _Outlook:
        if self.host is None or not self.config.bubble_filling:
            return _Outlook(None, 0.0, True)
        stall_s = self.expected.stall_seconds(build.work, build.loads)
        return _Outlook(self._other_work_seconds(build), stall_s, self.expected.link_lasts(build.work, stall_s))

    def _other_work_seconds(self, build: _ExtendBuilder) -> float | None:
        """What goes on while a request waits for its load: a decode step, or a prefill of those that need none."""
        if any(r.length < r.max_len for r in self.running):
            return self.expected.decode_seconds()
        if not build.reqs and self._needs_no_load is None:
            known = (self._candidate(r) for r in self.waiting if self.prefetcher.may_start(r.rid))
            self._needs_no_load = any(not each.load and not each.near and not each.loading for each in known)
        return self.expected.compute_seconds(PrefillWork(1, 0, 1)) if build.reqs or self._needs_no_load else None

    def _preload(self, req: Req, match: MatchResult) -> bool:
        """Begin a request's load while it waits; False if there is no room."""
        receipt = self.tree.lock(match, self.next_launch)
        if not self._make_room((match.total_len - match.device_len) // self.page_size):
            self.tree.unlock(receipt, self.next_launch, -1)
            return False
        nodes = [n for n in self.tree.path_of(receipt.node) if n.frames[Tier.DEVICE] is None]
        self._begin_load(nodes)
        req.preload = Preload(receipt, match.device_len, match.near_len, match.total_len)
        return True

    def _end_preloads(self, reqs: Iterable[Req]) -> int:
        """What these have loaded ahead is not kept for them any more. Returns how many had."""
        ended = [r for r in reqs if r.preload is not None]
        for req in ended:
            assert req.preload is not None
            self.tree.unlock(req.preload.receipt, self.next_launch, -1)
            self._unlocked = True
            req.preload = None
        return len(ended)

    def _take_back_preloads(self, reqs: Iterable[Req]) -> int:
        """As `_end_preloads`, since others need the memory."""
        for req in reqs:
            req.preload_taken_back |= req.preload is not None
        return self._end_preloads(reqs)

    def _begin_load(self, nodes: list[Node]) -> LoadTimes:
        tickets = self.controller.begin_load(nodes)
        for ticket in tickets:
            self.expected.begin_load(ticket, sum(len(n.key) for n in self.tree.nodes_of(ticket)))
        return self.expected.arrival_of(tickets)

    def _front(self, build: _ExtendBuilder, match: MatchResult, chunk: int, budget: int) -> int:
        """Tokens of what is to be loaded that the launch computes instead; see `front_to_recompute`."""
        num_load, near, expected = (
            match.total_len - match.device_len,
            match.near_len - match.device_len,
            self.expected,
        )
        if not num_load or not self.config.load_or_recompute or self._publishes_late:
            return 0
        is_idle = not build.reqs and not self.running and len(self.waiting) == 1

        def seconds_of(front: int) -> float:
            work = build.work.plus(match.total_len, chunk)
            if front:
                work = work.plus(match.device_len, front)
            from_peers = max(0, near - front)
            loads = build.loads.and_also(expected.arrival_if_begun(num_load - front - from_peers, from_peers))
            return expected.stall_seconds(work, loads) + expected.compute_seconds(work)

        known = expected.costs.known_prefill - build.work.new - chunk
        front = front_to_recompute(num_load, self.page_size, seconds_of, max(0, min(budget, known)))
        # Where others could use the time, computing must be the cheaper way.
        compute_s = expected.compute_seconds(PrefillWork().plus(match.device_len, front))
        load_s = expected.load_seconds(min(front, near), P2D) + expected.load_seconds(max(0, front - near))
        return front if is_idle or compute_s <= load_s else 0

    def _worth_fetching(self, rid: str, first: int, num_blocks: int, ahead: int) -> int:
        """See StoragePrefetcher."""
        assert self.storage is not None
        req, expected, size = self._reqs[rid], self.expected, self.storage.block_tokens
        per_op, chunk = self.storage.limits.blocks_per_op * size, self.config.chunked_prefill_size
        if expected.fetch_seconds(size, per_op) is None:
            return num_blocks
        on_link_s = max(0.0, expected.fetches.free_at - expected.now)

        def fetch_s(n: int) -> float:
            return on_link_s + (expected.fetch_seconds((ahead + n) * size, per_op) or 0.0)

        def compute_s(n: int) -> float | None:
            return expected.costs.prompt_seconds((first + n) * size, req.num_known, chunk)

        # Computed at once, as when nobody else is there, it would take this long at least.
        if (alone_s := compute_s(0)) is None or alone_s >= fetch_s(num_blocks) + (compute_s(num_blocks) or 0.0):
            return num_blocks
        # Where others take longer than the whole fetch, it does not matter how much longer.
        return blocks_to_fetch(num_blocks, fetch_s, compute_s, self._others_seconds(req, fetch_s(num_blocks)))

    def _others_seconds(self, req: Req, enough_s: float) -> float:
        """How long the device is busy with launches that are issued, and with whoever is ready to be computed; not
        looked into any further from enough_s on, as the queue may be long."""
        expected, chunk = self.expected, self.config.chunked_prefill_size
        seconds = max(0.0, expected.launches.free_at - expected.now)
        if self.prefilling is not None:
            seconds += (
                expected.costs.prompt_seconds(self.prefilling.computed, self.prefilling.num_known, chunk) or 0.0
            )
        for other in self.waiting:
            if seconds >= enough_s:
                break
            if other is not req and self.prefetcher.may_start(other.rid):
                start = self._candidate(other).prefix
                seconds += expected.costs.prompt_seconds(start, other.num_known, chunk) or 0.0
        return seconds

    def _recompute(self, build: _ExtendBuilder, req: Req, receipt: Receipt, start: int, num_tokens: int) -> None:
        """Compute tokens that the host has, as the front of what the request would load: they enter the tree at once,
        so that what is loaded behind them has its prefix on the device."""
        tokens = req.tokens[start : start + num_tokens]
        frames = self.device.allocate(num_tokens // self.page_size, req.slot, FrameState.HELD)
        assert frames is not None
        above = next((n for n in self.tree.path_of(receipt.node) if n.end == start), None)
        result = self.tree.publish(req.namespace, above, tokens, frames, build.seq, self.next_launch, req.priority)
        assert result.end == num_tokens and not len(result.duplicates)
        self.device.transition(frames, FrameState.HELD, FrameState.CACHED)
        build.add(req, start, tokens, samples=False)
        self.counters["recomputed_instead"] += 1
        self.counters["recomputed_instead_tokens"] += num_tokens

    def _may_start(self, req: Req, match: MatchResult) -> bool:
        """Whether memory and the other requests permit a waiting request to start."""
        active = self.active()
        if active and max(req.num_failures, active[0].num_failures) >= FAILURES_OF_A_SUSPECT:
            return False
        if self._must_stream(req):
            assert self.streaming is not None
            if self.streaming.req is not None:
                return False
        elif self._fills_too_much(match):
            return False
        return self._lacking_pages(req, match) <= 0

    def _lacking_pages(self, req: Req, match: MatchResult) -> int:
        """By how many pages the device has too little room for a waiting request to start."""
        page = self.page_size
        available = self.device.num_free + self.tree.evictable_pages(Tier.DEVICE)
        if self.prefilling is not None:
            available -= self._pages_of_rest(self.prefilling)
        if self._must_stream(req):
            # It takes no more than there is, and shrinks for others.
            assert self.streaming is not None
            need = self.streaming.headroom
        else:
            need = pages_for(req.num_known, page) - match.device_len // page
            available -= self.tree.evictable_pages_in(match)
        active = self.active()
        futures = [self._future(r) for r in active]
        wanted = pages_to_admit(
            Admission(
                need=need,
                own_future=pages_for(self._future(req), page),
                was_retracted=req.num_retractions > 0,
            ),
            reserve=decode_reserve(futures, self.config.new_token_ratio, page),
            worst_reserve=decode_reserve(futures, 1.0, page),
            anything_active=bool(active),
        )
        return wanted - available

    def _fills_too_much(self, match: MatchResult) -> bool:
        """Whether loads would be filling too large a share of the device."""
        num_load = (match.total_len - match.device_len) // self.page_size
        filling = self.device.counts[FrameState.FILLING]
        most = self.config.max_filling_ratio * self.device.num_pages
        return num_load > 0 and filling > 0 and filling + num_load > most

    def _match(self, req: Req) -> MatchResult:
        """What the cache has of the tokens that it may serve."""
        return self.tree.match(req.namespace, req.tokens[: self._cacheable(req)])

    def _cacheable(self, req: Req) -> int:
        """How many tokens the cache may serve: the last must be computed, to sample the next one."""
        if not self.config.enable_radix_cache:
            return 0
        # A prompt token's log-probability comes from the row before it, which must be computed too.
        wanted = req.next_prompt_logprob
        return (wanted if wanted < req.num_prompt else req.num_known) - 1

    def _plan(self, req: Req, path: list[Node], recomputed: tuple[int, int]) -> None:
        """Where every token of the sequence comes from; counts what the cache saved, once per request. recomputed:
        tokens [start, end) that the cache has and the request computes."""
        spans: list[Span] = []
        pos = from_peers = 0
        for node in path:
            ticket = node.tickets[Tier.DEVICE]
            source = SpanSource.DEVICE if ticket is None else SpanSource.LOAD
            if node.frames[Tier.DEVICE] is None:
                source = SpanSource.STREAM
                from_peers += len(node.key) if self.tree.source_of(node) == Tier.PEER else 0
            if recomputed[0] <= node.start < recomputed[1]:
                source = SpanSource.COMPUTE
            end = pos + len(node.key)
            if spans and (spans[-1].source, spans[-1].ticket) == (source, ticket):
                spans[-1] = Span(spans[-1].start, end, source, ticket)
            else:
                spans.append(Span(pos, end, source, ticket))
            pos = end
        spans.append(Span(pos, req.num_known, SpanSource.COMPUTE))
        req.plan = tuple(spans)
        if req.num_emitted == req.num_prompt and req.num_retractions == 0:
            found = dict.fromkeys(TIER_NAMES, 0)
            for span in spans[:-1]:
                if span.source == SpanSource.COMPUTE:
                    continue
                size = span.end - span.start
                loaded = size if span.source != SpanSource.DEVICE else _common(span, req.loaded)
                found["device"] += size - loaded
                if span.source == SpanSource.STREAM:
                    near = min(size, from_peers)
                    from_peers -= near
                elif span.source == SpanSource.LOAD:
                    near = size if span.ticket is not None and span.ticket.link == P2D else 0
                else:
                    near = _common(span, req.loaded_near)
                found["peer"] += near
                loaded -= near
                for tier, fetched in zip(self.storage.tiers if self.storage is not None else (), req.fetched):
                    brought = min(loaded, _common(span, fetched))
                    found[TIER_NAMES[tier]] += brought
                    loaded -= brought
                found["host"] += loaded
            if not req.cached_tokens_details:
                self.counters["prompt_tokens"] += req.num_prompt
                for name, n in found.items():
                    self.counters[f"hit_tokens_{name}"] += n
            before = req.cached_tokens_details or found
            # On another start less may be there; what is there beyond is the request's own work.
            tiers = [*self.controller.tables, *(self.storage.tiers if self.storage is not None else ())]
            req.cached_tokens_details = {
                TIER_NAMES[t]: min(found[TIER_NAMES[t]], before.get(TIER_NAMES[t], 0)) for t in tiers
            }

    def _extend(self, build: _ExtendBuilder, req: Req, chunk: int, frames: np.ndarray) -> None:
        """Compute the next `chunk` tokens of a prompt in this launch."""
        hold = req.hold
        assert hold is not None and req is self.prefilling
        start, end = req.computed, req.computed + chunk
        if len(frames):
            build.page_runs.append(PageRun(req.slot, pages_for(start, self.page_size), frames))
            hold.extend(frames)
        samples = end == req.num_known
        build.add(req, start, req.tokens[start:end], samples)
        if samples and req.spec.params.has_penalties:
            build.said.append((req.slot, req.tokens[req.num_prompt : req.num_known]))
        self._ask_prompt_logprobs(build, req, start, end)
        for span in req.plan:
            if span.ticket is not None and span.ticket in self.controller.in_flight:
                build.gates.setdefault(span.ticket)
        if self.streaming is not None and req is self.streaming.req:
            self._stream_extend(build, req)
        req.computed = end
        # Spread over the run, so that requests that start together do not publish together.
        req.publish_at = end + 1 + req.slot * self._publish_run // self.config.max_running_requests
        req.last_launch = build.seq
        if not self._publishes_late:
            self._publish(req, end, self._page_runs)
        if samples and not self._publishes_late:
            self.transient.release(req.rid)
        elif req.rid in self.transient:
            self.transient.begin(req.rid)
        if samples:
            req.length += 1
            self.prefilling = None
            self.running.append(req)
            self._decode_batch = None

    @staticmethod
    def _ask_prompt_logprobs(build: _ExtendBuilder, req: Req, start: int, end: int) -> None:
        first, last = max(start, req.prompt_logprobs_asked - 1), min(end, req.num_prompt - 1)
        spec = req.spec.logprobs
        if spec is None or first >= last:
            return
        targets = req.tokens[first + 1 : last + 1]
        build.prompt_logprobs.append(PromptRows(len(build.reqs) - 1, first - start, targets, spec))
        req.prompt_logprobs_asked = last + 1

    def _decode(self) -> Launch | None:
        """One token for every running request. Steady decoding touches each request in one short loop."""
        page = self.page_size
        while True:
            batch = self._decode_batch
            if batch is None or batch.steps_left == 0:
                batch = self._decode_batch = _DecodeBatch([r for r in self.running if r.length < r.max_len])
            if not batch.reqs:
                return None
            growing = np.flatnonzero(batch.starts % page == 0) if page > 1 else batch.everyone
            frames = self._allocate(len(growing), FrameState.HELD, owner=-1)
            if frames is not None:
                break
            if self._take_back_preloads(self.waiting):
                continue
            if self._shrink_streamed(len(growing)) and self._make_room(len(growing)):
                continue
            # What was given up comes back when launches and transfers end: taking more from others would not help.
            if (
                self.next_launch > self.exec_done
                or self.device.counts[FrameState.DOOMED]
                or any(ticket.link in COPY_LINKS for ticket in self.controller.in_flight)
            ):
                return None
            active = self.active()
            if len(active) == 1 and self._begin_streaming(active[0]):
                continue
            if len(active) == 1 and self.lending is not None and self.lending.is_waiting:
                return None  # taking from the last one gives nobody anything: it waits for what was asked back
            victim = active[choose_victim([r.order for r in active])]
            if len(active) == 1 and self.streaming is not None and victim is self.streaming.req:
                if self.controller.in_flight:
                    return None
                self._end_too_long(victim)
                continue
            self.close(victim, "retract")
            victim.num_retractions += 1
            self.counters["retracted_reqs"] += 1
            self._requeue(victim)
        seq, starts, reqs = self.next_launch, batch.starts, batch.reqs
        page_runs = self._take_page_runs()
        for i in np.flatnonzero(starts >= batch.publish_at).tolist():
            req = reqs[i]
            self._publish(req, min(req.computed, req.num_known), page_runs)
            batch.publish_at[i] = req.publish_at = req.computed + self._publish_run
        slots = batch.slots[growing]
        self.device.owner[frames] = slots
        for i, frame in zip(growing.tolist(), frames.tolist()):
            reqs[i].hold.append(frame)  # type: ignore[union-attr]
        for req in reqs:
            req.computed += 1
            req.length += 1
            req.last_launch = seq
        batch.starts = starts + 1
        batch.steps_left -= 1
        streams = self._streams(reqs, page_runs, seq)
        streamed = self._streamed_tokens(streams)
        self._launches[seq] = _LaunchRecord(
            batch.members, batch.members, False, (), None, int(starts.sum()), *streamed
        )
        self.expected.begin_decode(seq, *streamed)
        self.next_launch += 1
        self.counters["launches"] += 1
        self.counters["decode_tokens"] += len(reqs)
        return Launch(
            seq=seq,
            mode=LaunchMode.DECODE,
            slots=batch.slots,
            starts=starts,
            lens=batch.ones,
            input_ids=batch.unknown,
            samples=batch.samples,
            sampling=batch.sampling,
            page_runs=tuple(page_runs),
            page_appends=np.stack((slots, starts[growing] // page, frames)),
            gates=(),
            streams=streams,
        )

    def _issue_extend(self, build: _ExtendBuilder) -> Launch:
        build.streams = self._streams(build.reqs, build.page_runs, build.seq)
        self._launches[build.seq] = _LaunchRecord(
            [(r, r.epoch) for r in build.reqs],
            [(r, r.epoch) for r, s in zip(build.reqs, build.samples) if s],
            bool(build.gates),
            tuple(start + n for start, n in zip(build.starts, build.lens)),
            build.work,
            0,
            *self._streamed_tokens(build.streams),
        )
        self.expected.begin_prefill(build.seq, build.work, build.loads)
        self.next_launch += 1
        self.counters["launches"] += 1
        self.counters["prefill_tokens"] += sum(build.lens)
        return build.launch()

    # -- requests that are longer than the device ---------------------------------------------------------------

    def _open_streaming(self, config: SchedulerConfig) -> LayerStreaming:
        if self.host is None or not config.enable_radix_cache:
            raise ValueError("layer streaming needs a host tier, for what the device has no room for: --hicache")
        if config.lending is not None:
            raise ValueError(
                "an engine that lends memory of its device has none to stream through: use one of the two"
            )
        chunk_pages = pages_for(min(config.chunked_prefill_size, config.max_prefill_tokens), config.page_size)
        return LayerStreaming(self.controller, chunk_pages, config.num_usable_pages)

    def _too_slow(self, num_prompt: int) -> str:
        """Why a prompt is refused as it would have to stream more than there is time for; "" if it is not."""
        streaming, most = self.streaming, self.config.layer_stream.max_tpot_s if self.config.layer_stream else None
        if streaming is None or most is None or num_prompt <= self.max_resident_len:
            return ""
        streamed = num_prompt - (self.max_resident_len - streaming.chunk_pages * self.page_size)
        assert self.host is not None
        from_disk = max(0, streamed - self.host.num_pages * self.page_size)
        seconds = max(self.expected.stream_seconds(streamed, from_disk), self.expected.decode_seconds())
        if seconds <= most:
            return ""
        return (
            f"the device has no room for {streamed} of the prompt's {num_prompt} tokens: each new token would take "
            f"{seconds:.3g} s, and this server allows {most:g} s (see --layer-stream-max-tpot)"
        )

    def _must_stream(self, req: Req) -> bool:
        """Whether the device has no room for what is known of a request."""
        return self.streaming is not None and req.num_known > self.max_resident_len

    def _future(self, req: Req) -> int:
        """Tokens that a request may still need room for on the device."""
        if self.streaming is not None and (req is self.streaming.req or self._must_stream(req)):
            return 0
        return min(req.max_len, self.max_resident_len) - req.length

    def _pages_of_rest(self, req: Req) -> int:
        """Pages that are kept free for the rest of a prompt."""
        pages = self._pages_to(req, req.num_known)
        if self.streaming is not None and req is self.streaming.req:
            return min(pages, self.streaming.headroom)
        return pages

    def _make_streamable(self, req: Req, match: MatchResult) -> MatchResult:
        """Leave the device room for more than what it has of a request that is longer."""
        streaming = self.streaming
        assert streaming is not None
        available = self.device.num_free + self.tree.evictable_pages(Tier.DEVICE)
        too_many = self.tree.evictable_pages_in(match) + streaming.headroom - available
        if too_many > 0:
            streaming.cut_back(match, too_many, self.last_launch)
            match = self._match(req)
        return streaming.streamable(match)

    def _begin_streaming(self, req: Req) -> bool:
        """A request that runs alone has outgrown the device. False if it may not."""
        if self.streaming is None or self.streaming.req is not None or req.max_len <= self.max_resident_len:
            return False
        self.streaming.begin(req)
        return True

    def _shrink_streamed(self, num_pages: int) -> bool:
        """Take device pages from the request that streams; they become free at once, or soon."""
        streaming = self.streaming
        if streaming is None or streaming.req is None:
            return False
        if streaming.req is self.prefilling:
            num_pages = max(num_pages, streaming.headroom)
        return streaming.make_room(num_pages, self.next_launch, self.exec_done)

    def _give_way(self, first: Req, match: MatchResult, others: list[Req]) -> None:
        """The request that streams shrinks for one that waits, and that would wait for its end otherwise; and for
        those others that a launch could take along."""
        streaming = self.streaming
        if streaming is None or streaming.req is None:
            return
        lacking = self._lacking_pages(first, match)
        if lacking <= 0:
            return
        along = 0
        for req in others:
            along += pages_for(req.num_known + int(self.config.new_token_ratio * self._future(req)), self.page_size)
            if along >= streaming.chunk_pages:
                break
        # What others have given up comes by itself.
        lacking += min(along, streaming.chunk_pages) - self.device.counts[FrameState.DOOMED]
        if streaming.give_way(lacking, self.last_launch):
            self._gave_way = self.last_launch

    def _stream_extend(self, build: _ExtendBuilder, req: Req) -> None:
        """A chunk of the request that streams has got its pages: make room for the one after the next, and say what
        the launch waits for."""
        streaming = self.streaming
        assert streaming is not None
        if self.device.num_free + self.tree.evictable_pages(Tier.DEVICE) < 2 * streaming.chunk_pages:
            streaming.spill(req.computed, self.next_launch, self.exec_done)
        from_disk = streaming.num_beside * self.page_size
        build.loads = build.loads.and_also(self.expected.arrival_of_stream(streaming.hole, from_disk))

    def _streams(self, reqs: list[Req], page_runs: list[PageRun], seq: int) -> tuple[StreamedPrefix, ...]:
        streaming = self.streaming
        if streaming is None or streaming.req is None or streaming.req not in reqs:
            return ()
        self._promote(streaming)
        prefix, runs = streaming.prefix(reqs.index(streaming.req), seq)
        page_runs += runs
        return (prefix,) if prefix is not None else ()

    def _streamed_tokens(self, streams: tuple[StreamedPrefix, ...]) -> tuple[int, int]:
        """All, and those from disk."""
        of_disk = [frames for each in streams for tier, frames in each.parts if tier == Tier.DISK]
        return sum(each.end - each.start for each in streams), sum(map(len, of_disk)) * self.page_size

    def _promote(self, streaming: LayerStreaming) -> None:
        """Load what a request streams where nobody else has use for the room."""
        if not streaming.hole or self.waiting:
            return
        futures = [self._future(r) for r in self.active() if r is not streaming.req]
        reserve = decode_reserve(futures, self.config.new_token_ratio, self.page_size)
        prefills = streaming.req is self.prefilling
        reserve += streaming.headroom if prefills else self._tail_pages(streaming.req)
        spare = self.device.num_free + self.tree.evictable_pages(Tier.DEVICE) - reserve
        spare = min(spare, streaming.chunk_pages)
        # A decode grows by little, and what it may need is reserved. An eighth is as much as it gives up at once.
        at_least = streaming.chunk_pages if prefills else 1 + streaming.chunk_pages // 8
        if spare < min(at_least, streaming.hole // self.page_size):
            return
        nodes = streaming.to_promote(spare)
        num_pages = sum(len(node.key) for node in nodes) // self.page_size
        if nodes and self._make_room(num_pages):
            self._begin_load(nodes)
            streaming.counters["promoted_tokens"] += num_pages * self.page_size

    def _tail_pages(self, req: Req | None) -> int:
        """Pages for what a request that streams may still generate, as far as it is kept free for that."""
        assert req is not None and self.streaming is not None
        return min(pages_for(req.max_len - req.length, self.page_size) + 1, self.streaming.chunk_pages)

    def _end_too_long(self, req: Req) -> None:
        """Neither device nor host has any more room for the only request."""
        message = (
            f"after {req.num_known} tokens neither the device nor the host has room for more; see --hicache-size "
            "and --layer-stream-disk-size"
        )
        self.close(req, "abort")
        self._end(req, FinishReason(type="abort", message=message, status_code=503))

    # -- memory -------------------------------------------------------------------------------------------------

    def _pages_to(self, req: Req, num_tokens: int) -> int:
        """Pages that a request lacks to compute up to num_tokens."""
        return pages_for(num_tokens, self.page_size) - pages_for(req.computed, self.page_size)

    def _open_lending(self, config: LendingConfig) -> DeviceLending:
        ledger = SlabLedger(self.device, self.config.slabs, here=True)
        # As for `max_total_len`, with a page that stays free.
        keep = pages_for(self.max_total_len if config.keep_tokens is None else config.keep_tokens, self.page_size) + 1
        cache = pages_for(config.cache_tokens, self.page_size)
        return DeviceLending(config, ledger, self.config.page_bytes, keep, cache)

    def _lend(self, lending: DeviceLending, now: float) -> None:
        """Before the next launch, which may be the one that lacks what is kept. Of slabs that leave, what nobody has
        locked is dropped at once, and the rest as soon as it is unlocked: requests are never held up for it."""
        began = lending.adjust(now, self._demand())
        slabs = lending.leaving if self._unlocked else began
        self._unlocked = False
        for slab in slabs:
            self.controller.withdraw(Tier.DEVICE, lending.ledger.frames_of(slab), self.last_launch)
        if slabs:
            # As in `step`: perhaps nothing causes another one.
            self.device.reap(self.exec_done)

    def _demand(self) -> int:
        """Device pages that requests need at the same time: what they have, what those that run may still need at
        most, and the longest of those that wait, which may share nothing."""
        page, counts = self.page_size, self.device.counts
        pages = sum(counts[state] for state in (FrameState.HELD, FrameState.FILLING, FrameState.CACHED))
        pages -= self.tree.evictable_pages(Tier.DEVICE)
        pages += decode_reserve((r.max_len - r.length for r in self.active()), 1.0, page)
        if self.prefilling is not None:
            pages += self._pages_to(self.prefilling, self.prefilling.num_known)
        if self.waiting:
            # One more than it may fill, as in `pages_to_admit`.
            pages += pages_for(max([r.max_len for r in self.waiting]), page) + 1
        return pages

    def _take_left(self) -> tuple[int, ...]:
        if self.lending is None:
            return self.slabs.take_left() if self.slabs is not None else ()
        left = self.lending.ledger.take_left()
        self.counters["slabs_lent"] += len(left)
        return left

    def _take_wanted(self) -> int:
        wanted = self.lending.take_wanted() if self.lending is not None else 0
        self.counters["slabs_asked_back"] += wanted
        return wanted

    def _make_room(self, num_pages: int) -> bool:
        """Evict until num_pages are free at once; False if they are not, or not yet."""
        if num_pages > self.device.num_free:
            self.device.reap(self.exec_done)
            # What was given up and is still being read or written will be free soon: no need to give up more for it.
            lacking = num_pages - self.device.num_free - self.device.counts[FrameState.DOOMED]
            if lacking > 0:
                self.controller.evict(Tier.DEVICE, lacking, self.exec_done)
        return self.device.num_free >= num_pages

    def _allocate(self, num_pages: int, state: FrameState, owner: int) -> np.ndarray | None:
        return self.device.allocate(num_pages, owner, state) if self._make_room(num_pages) else None

    def _publish(self, req: Req, upto: int, page_runs: list[PageRun]) -> None:
        """Enter the whole pages of tokens [published, upto) into the tree and back them up.

        page_runs: takes the pages that change for the request because the tree had them already; the launch that
        computes them still writes the duplicates, so they must reach the executor after it.
        """
        hold = req.hold
        assert hold is not None
        page = self.page_size
        start, end = hold.published, upto - upto % page
        if end <= start or not self.config.enable_radix_cache:
            return
        node = hold.receipt.node
        if node.parent is not None and node.frames[Tier.DEVICE] is None:
            return  # the device lacks what is before it, see `LayerStreaming`
        if self.streaming is not None and req is self.streaming.req and self.streaming.num_beside:
            return
        num_pages = (end - start) // page
        result = self.tree.publish(
            req.namespace,
            hold.receipt.node,
            req.tokens[start:end],
            hold.frames[:num_pages],
            req.last_launch,
            self.next_launch,
            req.priority,
        )
        if result.end == 0:
            return
        old = hold.receipt
        hold.receipt = self.tree.lock_node(result.node, self.next_launch)
        self.tree.unlock(old, self.next_launch, -1)
        for node in result.created:
            frames = node.frames[Tier.DEVICE]
            assert frames is not None
            self.device.transition(frames, FrameState.HELD, FrameState.CACHED)
        hold.pass_on(result.end // page, result.end)
        if len(result.duplicates):
            self.device.doom(result.duplicates, FrameState.HELD, req.last_launch)
            page_runs.append(PageRun(req.slot, start // page, result.frames))
        self.controller.published(result.node, self.exec_done)
        if end // COMPACT_EVERY_TOKENS > start // COMPACT_EVERY_TOKENS:
            self.tree.compact(result.node, self.exec_done)

    def _take_page_runs(self) -> list[PageRun]:
        runs, self._page_runs = self._page_runs, []
        return runs

    # -- looking ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What `GET /hicache/state` shows: plain numbers."""
        page = self.page_size
        tiers = {}
        for tier, table in self.controller.tables.items():
            counts = {state.name.lower(): table.counts[state] for state in FrameState}
            evictable = self.tree.evictable_pages(tier)
            # What is another engine's now is no part of the tier.
            num_pages = table.num_pages - counts["lent"]
            tiers[TIER_NAMES[tier]] = {
                "num_pages": num_pages,
                "total_tokens": num_pages * page,
                "used_tokens": (num_pages - table.num_free - evictable) * page,
                "cached_tokens": self.tree.resident_pages(tier) * page,
                "evictable_tokens": evictable * page,
                "free_pages": table.num_free,
                "pages": counts,
            }
        links = {}
        below = [tier for tier in (Tier.HOST, Tier.PEER) if tier in self.controller.tables]
        shown = [link for tier in below for link in (LOAD_LINKS[tier], BACKUP_LINKS[tier])]
        shown += (D2S,) if self.controller.swap is not None else ()
        shown += STORAGE_LINKS if self.storage is not None else ()
        for link in shown:
            pending = [op for ticket, op in self.controller.in_flight.items() if ticket.link == link]
            links[link] = {
                "operations_done": self._link_done[link],
                "bytes_done": self._link_bytes[link],
                "operations_in_flight": len(pending),
                "bytes_in_flight": sum(op.size_bytes for op in pending),
            }
        return {
            "page_size": page,
            "page_bytes": self.config.page_bytes,
            "tiers": tiers,
            "links": links,
            "queues": {
                "waiting": len(self.waiting),
                "waiting_for_storage": self.prefetcher.num_waiting,
                "running": len(self.active()),
            },
            "storage": None if self.storage is None else self._storage_state(self.storage),
            "launches": {"issued": self.next_launch, "done": self.exec_done},
            "tree": {"nodes": self.tree.num_nodes, "namespaces": len(self.tree.roots)},
            "stall_seconds": round(self.stall_s, 6),
            "costs": self.expected.costs.state(),
            "transient": {
                "in_queue_tokens": self.transient.tokens_in_queue,
                "in_flight_tokens": self.transient.tokens_in_flight,
            },
            "layer_stream": None if self.streaming is None else self.streaming.state(),
            "counters": dict(sorted(self._all_counters().items())),
        }

    def _all_counters(self) -> Counter[str]:
        counters = self.counters + self.controller.counters + self.prefetcher.counters
        return counters + self.streaming.counters if self.streaming is not None else counters

    def _storage_state(self, setup: StorageSetup) -> dict[str, Any]:
        page, controller = self.page_size, self.controller
        return {
            "backend": setup.backend,
            "tiers": [TIER_NAMES[tier] for tier in setup.tiers],
            "prefetch_policy": setup.prefetch.policy,
            "fetch_order": setup.prefetch.fetch_order,
            "write_policy": setup.write_policy,
            "block_tokens": setup.block_tokens,
            "fetching_tokens": controller.fetching_pages * page,
            "fetching_limit_tokens": setup.limits.max_fetch_pages * page,
            "storing_tokens": controller.storing_pages * page,
            "storing_limit_tokens": setup.limits.max_store_pages * page,
        }

    def check_invariants(self) -> None:
        """Everything that must hold after every step; quadratic here and there, for tests and idle moments."""
        self.tree.check_invariants()
        self.controller.check_invariants()
        self.prefetcher.check_invariants()
        if self.slabs is not None:
            self.slabs.check_invariants()
        if self.lending is not None:
            self.lending.check_invariants()
        self.cursors.check_invariants(
            {r.rid: (r.namespace, r.tokens[: self._cacheable(r)], r.num_known) for r in self.waiting}
        )
        active = self.active()
        held = [r.hold.frames for r in active if r.hold is not None]
        if self.streaming is not None:
            self.streaming.check_invariants()
            held.append(self.streaming.held)
        frames = np.concatenate(held) if held else np.empty(0, np.int32)
        assert len(np.unique(frames)) == len(frames) == self.device.counts[FrameState.HELD], "a held page is lost"
        assert (self.device.state[frames] == FrameState.HELD).all()
        locked = [r.preload.receipt.node for r in self.waiting if r.preload is not None]
        for req in active:
            assert req.hold is not None and self._reqs[req.rid] is req
            locked.append(req.hold.receipt.node)
            assert req.hold.published % self.page_size == 0
            depth, node, keys = 0, req.hold.receipt.node, []
            while node.parent is not None:
                keys.append(node.key)
                depth, node = depth + len(node.key), node.parent
            said = req.tokens[: min(depth, req.num_known)]
            assert not keys or np.array_equal(np.concatenate(keys[::-1]), said), (
                f"{req}: locks other tokens than its own"
            )
            assert req.last_launch < self.next_launch
            assert depth == req.hold.published, f"{req}: locked to {depth}, published {req.hold.published}"
            pages = pages_for(req.computed, self.page_size) - depth // self.page_size
            if self.streaming is not None and req is self.streaming.req:
                pages -= self.streaming.num_beside
            assert len(req.hold.frames) == pages
            assert req.num_known <= req.length <= req.max_len
            pos = 0
            for span in req.plan:
                assert span.start == pos and span.end >= pos, f"{req}: a gap in its plan"
                pos = span.end
            assert pos >= req.num_prompt
        assert all(req.preload is None for req in active)
        own = Counter(map(id, locked))
        for node in [*self.tree.walk(), *self.tree.roots.values()]:
            locks = own[id(node)] + sum(c.lock for c in node.children.values())
            assert node.lock == locks, f"{node}: locked {node.lock} times, {locks} known"
        for node in self.tree.walk():
            assert max(*node.fences, node.last_use) < self.next_launch, (
                f"{node}: waits for a launch that does not exist"
            )
        if self.config.bypass_local:
            alive = {r.namespace for r in self._reqs.values()}
            assert len(alive) == len(self._reqs), "two requests share a namespace"
            for node in self.tree.walk():
                root = self.tree.root_of(node)
                assert root.namespace in alive or node.last_access < 0, f"{node}: nobody can ask for it, and it stays"
        assert len({r.slot for r in active} | set(self._free_slots)) == self.config.max_running_requests
        orders = [r.order for r in self.waiting]
        assert orders == sorted(orders)
        assert all(r.hold is None and r.slot == -1 for r in self.waiting)
        assert len(self._reqs) == len(self.waiting) + len(active)
        assert len(self._free_slots) + len(active) == self.config.max_running_requests


@dataclass(frozen=True)
class _Outlook:
    """What a launch comes to as far as it is built. other_work_s: what would go on while a request waits for its
    load, None for nothing; stall_s: how long the launch waits; link_is_busy: loads have been begun that last until
    the next launch can be built."""

    other_work_s: float | None
    stall_s: float
    link_is_busy: bool


class _ExtendBuilder:
    """Collects one prefill launch."""

    def __init__(self, seq: int, page_runs: list[PageRun]) -> None:
        self.seq = seq
        self.page_runs = page_runs
        self.reqs: list[Req] = []
        self.starts: list[int] = []
        self.lens: list[int] = []
        self.ids: list[np.ndarray] = []
        self.samples: list[bool] = []
        self.gates: dict[Ticket, None] = {}
        self.said: list[tuple[int, np.ndarray]] = []
        self.prompt_logprobs: list[PromptRows] = []
        self.work = PrefillWork()
        self.loads = NO_LOADS
        self.streams: tuple[StreamedPrefix, ...] = ()

    def add(self, req: Req, start: int, ids: np.ndarray, samples: bool) -> None:
        self.reqs.append(req)
        self.starts.append(start)
        self.lens.append(len(ids))
        self.ids.append(ids)
        self.samples.append(samples)
        self.work = self.work.plus(start, len(ids))

    def launch(self) -> Launch:
        return Launch(
            seq=self.seq,
            mode=LaunchMode.EXTEND,
            slots=np.array([r.slot for r in self.reqs], np.int32),
            starts=np.array(self.starts, np.int32),
            lens=np.array(self.lens, np.int32),
            input_ids=np.concatenate(self.ids),
            samples=np.array(self.samples, np.bool_),
            sampling=tuple(r.spec for r, s in zip(self.reqs, self.samples) if s),
            page_runs=tuple(self.page_runs),
            page_appends=np.empty((3, 0), np.int32),
            gates=tuple(self.gates),
            said=tuple(self.said),
            prompt_logprobs=tuple(self.prompt_logprobs),
            streams=self.streams,
        )


class _DecodeBatch:
    """The running requests as arrays, kept from launch to launch until one joins, leaves or has all its tokens on
    their way. starts: what each computes next. publish_at: when its decoded tokens enter the tree."""

    def __init__(self, reqs: list[Req]) -> None:
        n = len(reqs)
        self.reqs = reqs
        self.members = [(r, r.epoch) for r in reqs]
        self.slots = np.array([r.slot for r in reqs], np.int32)
        self.starts = np.array([r.computed for r in reqs], np.int32)
        self.publish_at = np.array([r.publish_at for r in reqs], np.int32)
        self.everyone = np.arange(n)
        self.ones = np.ones(n, np.int32)
        self.unknown = np.full(n, -1, np.int32)
        self.samples = np.ones(n, np.bool_)
        self.sampling = tuple(r.spec for r in reqs)
        self.steps_left = min((r.max_len - r.length for r in reqs), default=0)


def _check_lending(config: SchedulerConfig) -> None:
    if config.num_peer_pages:
        raise ValueError("an engine that lends memory of its device cannot borrow from peers: use one of the two")
    if len({end - first for first, end in config.slabs}) != 1:
        raise ValueError("an engine that lends needs slabs of its device pool, all of the same length")


def _common(span: Span, tokens: tuple[int, int]) -> int:
    """How many tokens of the span lie in [start, end)."""
    return max(0, min(span.end, tokens[1]) - max(span.start, tokens[0]))
