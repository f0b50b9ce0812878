"""`BatchBuilder`: makes launches of requests that were admitted.

Owns the batch of running requests and the page runs that go out with the next launch. Enters what launches compute
into the tree. Decides neither who is prefilled nor where memory comes from: admission.py and launch_chooser.py hand
it requests and frames.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from sglang.srt.managers.expected_times import ExpectedTimes
from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.launch_batches import DecodeBatch, ExtendBatch, LaunchRecord
from sglang.srt.managers.layer_streaming import NoLayerStreaming
from sglang.srt.managers.request_queues import RequestQueues
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import chunk_of, pages_for
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.model_executor.launch import Launch, LaunchMode, PageRun, PromptRows, StreamedPrefix

# Tokens of prompts in one launch whose log-probabilities are asked for. Each holds the logits of the whole vocabulary
# two and a half times over: 3 GB in all for 152,000 tokens.
MAX_PROMPT_LOGPROBS = 2048


class BatchBuilder:
    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        queues: RequestQueues,
        expected: ExpectedTimes,
        streaming: NoLayerStreaming,
    ) -> None:
        self.config = config
        self.page_size = config.page_size
        self.counters: Counter[str] = Counter()
        self._cache = cache
        self._clock = cache.clock
        self._claims = cache.claims
        self._queues = queues
        self._expected = expected
        self._streaming = streaming
        self._insert_every = max(1, config.insert_every_tokens // config.page_size) * config.page_size
        self._decode_batch: DecodeBatch | None = None
        # For slots whose launch is already built; they go out with the next one.
        self._page_runs: list[PageRun] = []

    # -- both kinds ---------------------------------------------------------------------------------------------

    def pages_to(self, req: Req, num_tokens: int) -> int:
        """Pages that a request lacks to compute up to num_tokens."""
        return pages_for(num_tokens, self.page_size) - pages_for(req.computed, self.page_size)

    def insert_prefix(self, req: Req, upto: int) -> None:
        """See `KVCache.insert_prefix`; pages that change go out with the next launch."""
        self._cache.insert_prefix(req, upto, self._page_runs)

    def _take_page_runs(self) -> list[PageRun]:
        runs, self._page_runs = self._page_runs, []
        return runs

    def _note_launch(self, record: LaunchRecord, streams: tuple[StreamedPrefix, ...]) -> None:
        of_disk = [frames for each in streams for tier, frames in each.parts if tier == Tier.DISK]
        record.streamed = sum(each.end - each.start for each in streams)
        record.from_disk = sum(map(len, of_disk)) * self.page_size
        self.counters["launches"] += 1

    # -- prefill ------------------------------------------------------------------------------------------------

    def begin_extend(self) -> ExtendBatch:
        return ExtendBatch(self._clock.next, self._take_page_runs())

    def discard(self, batch: ExtendBatch) -> None:
        """Nothing was added to it."""
        self._page_runs = batch.page_runs + self._page_runs

    def chunk_from(self, batch: ExtendBatch, req: Req, start: int, budget: int) -> int:
        """How many tokens of a prompt from `start` on go into this launch, at most `budget`; 0 if not even a page."""
        page, budget = self.page_size, min(budget, req.chunk_limit)
        if req.prompt_logprobs_asked < req.num_prompt:
            left = max(MAX_PROMPT_LOGPROBS, page) - sum(len(rows.targets) for rows in batch.prompt_logprobs)
            budget = min(budget, max(0, req.prompt_logprobs_asked - 1 - start) + left)
        return chunk_of(req.num_known - start, budget, page)

    def extend(self, batch: ExtendBatch, req: Req, chunk: int, frames: np.ndarray) -> None:
        """Compute the next `chunk` tokens of a prompt in this launch. frames: the pages that it lacks for them."""
        hold = req.hold
        assert hold is not None and self._queues.is_prefilling(req)
        start, end = req.computed, req.computed + chunk
        self._cache.windowed.note_computed(hold, start, end)
        if len(frames):
            batch.page_runs.append(PageRun(req.slot, pages_for(start, self.page_size), frames))
            hold.extend(frames)
        samples = end == req.num_known
        batch.add(req, start, req.tokens[start:end], samples)
        if samples and (req.spec.params.has_penalties or req.spec.params.grammar is not None):
            batch.output_ids.append((req.slot, req.tokens[req.num_prompt : req.num_known]))
        _ask_prompt_logprobs(batch, req, start, end)
        for span in req.plan:
            if span.ticket is not None and span.ticket in self._cache.in_flight:
                batch.gates.setdefault(span.ticket)
        if self._streaming.is_streaming(req):
            batch.loads = batch.loads.and_also(self._streaming.begin_chunk(req))
        req.computed = end
        # Spread over the run, so that requests that start together do not insert together.
        req.insert_at = end + 1 + req.slot * self._insert_every // self.config.max_running_requests
        req.last_launch = batch.seq
        if not self.config.inserts_late:
            self.insert_prefix(req, end)
        if samples and not self.config.inserts_late:
            self._claims.release(req.rid)
        elif req.rid in self._claims:
            self._claims.begin(req.rid)
        if samples:
            req.length = min(req.length + 1, req.max_len)
            self._queues.join_running(req)

    def recompute(self, batch: ExtendBatch, req: Req, start: int, num_tokens: int) -> None:
        """Compute tokens that the host has, the first of what the request would load: they enter the tree at once, so
        that what is loaded behind them has its prefix on the device."""
        assert req.hold is not None
        tokens = req.tokens[start : start + num_tokens]
        self._cache.windowed.note_computed(req.hold, start, start + num_tokens)
        self._cache.insert_recomputed(req, tokens, start, batch.seq)
        batch.add(req, start, tokens, samples=False)
        self.counters["recomputed_instead"] += 1
        self.counters["recomputed_instead_tokens"] += num_tokens

    def issue_extend(self, batch: ExtendBatch) -> tuple[Launch, LaunchRecord]:
        batch.streams = self._streaming.streams(batch.reqs, batch.page_runs)
        batch.windowed_frames = self._cache.windowed.take_given()
        record = batch.record()
        self._note_launch(record, batch.streams)
        self._expected.begin_prefill(batch.seq, batch.work, batch.loads)
        self._clock.issue()
        self.counters["prefill_tokens"] += sum(batch.lens)
        return batch.launch(), record

    # -- decode -------------------------------------------------------------------------------------------------

    def decode_batch(self) -> DecodeBatch:
        """The requests that the next decode step has a token for."""
        batch, queues = self._decode_batch, self._queues
        if batch is None or batch.steps_left == 0 or batch.version != queues.running_version:
            reqs = [r for r in queues.running if r.length < r.max_len]
            batch = self._decode_batch = DecodeBatch(reqs, queues.running_version)
        return batch

    def growing(self, batch: DecodeBatch) -> np.ndarray:
        """Places of the requests whose next token begins a page."""
        return np.flatnonzero(batch.starts % self.page_size == 0) if self.page_size > 1 else batch.everyone

    def issue_decode(
        self, batch: DecodeBatch, growing: np.ndarray, frames: np.ndarray
    ) -> tuple[Launch, LaunchRecord]:
        """One token for every request of the batch. frames: a page for each of the growing ones. Steady decoding
        touches each request in one short loop."""
        page, seq = self.page_size, self._clock.next
        starts, reqs, page_runs = batch.starts, batch.reqs, self._take_page_runs()
        for i in np.flatnonzero(starts >= batch.insert_at).tolist():
            req = reqs[i]
            self._cache.insert_prefix(req, min(req.computed, req.num_known), page_runs)
            batch.insert_at[i] = req.insert_at = req.computed + self._insert_every
        slots = batch.slots[growing]
        for i, frame in zip(growing.tolist(), frames.tolist()):
            reqs[i].hold.append(frame)  # type: ignore[union-attr]
        for req in reqs:
            req.computed += 1
            req.length += 1
            req.last_launch = seq
        batch.starts = starts + 1
        batch.steps_left -= 1
        streams = self._streaming.streams(reqs, page_runs)
        record = LaunchRecord(batch.members, batch.members, context=int(starts.sum()))
        self._note_launch(record, streams)
        self._expected.begin_decode(seq, record.streamed, record.from_disk)
        self._clock.issue()
        self.counters["decode_tokens"] += len(reqs)
        launch = Launch(
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
            windowed_frames=self._cache.windowed.take_given(),
        )
        return launch, record


def _ask_prompt_logprobs(batch: ExtendBatch, req: Req, start: int, end: int) -> None:
    first, last = max(start, req.prompt_logprobs_asked - 1), min(end, req.num_prompt - 1)
    spec = req.spec.logprobs
    if spec is None or first >= last:
        return
    targets = req.tokens[first + 1 : last + 1]
    batch.prompt_logprobs.append(PromptRows(len(batch.reqs) - 1, first - start, targets, spec))
    req.prompt_logprobs_asked = last + 1
