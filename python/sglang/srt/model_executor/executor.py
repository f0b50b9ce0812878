"""`Executor`: runs launches in order. `ModelExecutor` runs a model, layer by layer, on a stream.

Owns the page table, the last token of every slot and the order of launches. Never allocates pages and
never decides what runs: the scheduler's `Launch` has everything. The model, the pool and the streams come through
the constructor.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol, cast

import numpy as np
import torch

from sglang.srt.constrained.grammar_rows import GrammarRows
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionMetadata
from sglang.srt.mem_cache.kv_view import KVSegment, PagedSegments
from sglang.srt.mem_cache.layer_stream_cache import FilledPiece, LayerStreamCache, Piece
from sglang.srt.mem_cache.memory_pool import DevicePool
from sglang.srt.mem_cache.transfer import LayerGate, Link, LoadFailedError, Tier
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.forward_batch_info import (
    BatchNumbers,
    CausalLM,
    ForwardBatch,
    ForwardMode,
    StreamedRows,
)
from sglang.srt.model_executor.kernel_warm_up import warm_up_kernels
from sglang.srt.model_executor.launch import NO_TOKEN, Launch, LaunchMode, StreamedPrefix
from sglang.srt.model_executor.page_table import PageTable
from sglang.srt.model_executor.prefill_graphs import CapturedAttention, CutModel, PrefillGraphs
from sglang.srt.sampling.logprob_types import LaunchFindings, TokenLogprob
from sglang.srt.sampling.logprobs import LogprobQuery, LogprobTensors
from sglang.srt.sampling.penalties import PenaltyTable
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_plan import SamplingPlan
from sglang.srt.utils.device import CPU, to_device, to_device_together
from sglang.srt.utils.stream import Event, Stream

logger = logging.getLogger(__name__)

_KEPT_FENCES = 256
# Requests that stream at the same time are few.
_KEPT_PREFIXES = 16
# Of each slot, for which the page table has room at first.
_SHARED_PAGES = 1 << 14


@dataclass(frozen=True)
class StepResult:
    """One completed launch."""

    seq: int
    # int32 bytes, one per sampled request, NO_TOKEN where a request's grammar could not be followed; empty if it
    # failed or was void.
    tokens: bytes = b""
    failed: bool = False
    findings: LaunchFindings | None = None
    # Its time on the device, without stall_s.
    seconds: float = 0.0
    # Seconds in which it waited for loads.
    stall_s: float = 0.0
    # Seconds of the copies of what it streamed.
    stream_s: float = 0.0


class Executor(Protocol):
    def launch(self, launch: Launch) -> None: ...

    def reset(self, mark: int) -> None:
        """Launches from `mark` on are valid again after a failure."""
        ...

    def poll(self) -> list[StepResult]:
        """Launches completed since the last poll, in order. Raises if the worker died."""
        ...


class NonFiniteLogitsError(RuntimeError):
    """A forward pass read memory that was never written (poison), or the model overflowed."""


@dataclass
class _ActiveLaunch:
    """One launch on its way through the stream."""

    launch: Launch
    gates: list[LayerGate]
    ends_void: bool
    is_graph: bool
    batch: ForwardBatch | None = None
    state: Any = None
    # What the requests with a grammar may draw, see `GrammarRows.mask`.
    mask: torch.Tensor | None = None
    void: bool = False
    # Not the error: its traceback would keep what the launch had in device memory.
    has_failed: bool = False
    # Marks of the stream.
    began: Any = None
    ended: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    filled: list[FilledPiece] = field(default_factory=list)


@dataclass(frozen=True)
class _PendingLogprobs:
    """Log-probabilities, with their copy in host memory, which is complete once the device is done."""

    tensors: LogprobTensors
    copy: torch.Tensor

    @classmethod
    def of(cls, tensors: LogprobTensors) -> _PendingLogprobs:
        return cls(tensors, tensors.packed.to("cpu", non_blocking=True))

    def finish(self) -> list[TokenLogprob]:
        return self.tensors.finish(self.copy)


@dataclass(frozen=True)
class _Sampled:
    """A launch's results for the host, in host memory once the device is done."""

    # (num_samples,) int32.
    tokens: torch.Tensor
    # The samples whose log-probabilities were requested.
    logprob_rows: tuple[int, ...]
    logprobs: _PendingLogprobs | None
    prompt_logprobs: dict[int, _PendingLogprobs]
    # Of the samples whose hidden state was requested: (n, hidden_size) float32.
    embedding_rows: tuple[int, ...]
    embeddings: torch.Tensor | None
    # The samples whose grammar could not be followed.
    failed_rows: tuple[int, ...]
    # A bool, if it was requested.
    is_finite: torch.Tensor | None

    def token_bytes(self) -> bytes:
        """`StepResult.tokens`."""
        tokens = self.tokens.numpy()
        if self.failed_rows:
            tokens = tokens.copy()
            tokens[list(self.failed_rows)] = NO_TOKEN
        return tokens.tobytes()

    def found(self) -> LaunchFindings | None:
        if self.logprobs is None and not self.prompt_logprobs and self.embeddings is None:
            return None
        sampled = {} if self.logprobs is None else dict(zip(self.logprob_rows, self.logprobs.finish()))
        embeddings = {} if self.embeddings is None else dict(zip(self.embedding_rows, self.embeddings.numpy()))
        return LaunchFindings(
            sampled,
            {req: each.finish() for req, each in self.prompt_logprobs.items()},
            {row: embedding.tobytes() for row, embedding in embeddings.items()},
        )


@dataclass(frozen=True)
class LaunchFence:
    """The event for which a backup waits: the end of the launch that writes its source."""

    event: Event
    _run: _ActiveLaunch = field(repr=False)

    @property
    def failed(self) -> bool:
        return self._run.void or self._run.has_failed


@dataclass(frozen=True)
class ExecutorOptions:
    page_size: int
    # Of attention.
    scale: float
    vocab_size: int
    # Slots of the page table: requests that run at a time.
    max_slots: int
    # Logits (num_samples, vocab_size) -> tokens (num_samples,).
    sampler: Callable[[torch.Tensor, SamplingBatchInfo], torch.Tensor]
    # Called from the stream after every launch.
    notify: Callable[[], None] = lambda: None
    # Fail loudly on a logit that is not finite; the tests' poison relies on it.
    check_finite: bool = False
    # Other ranks compute the same launches and meet this one in collectives. So a failed or void launch must run to
    # its end; its values are not read.
    lockstep: bool = False
    # The model's and the pool's.
    device: torch.device = CPU
    # What the model attends with, if there are to be CUDA graphs; the pool then has a scratch slot. graph_batch_size:
    # requests of the largest decode that is one.
    attention: AttentionBackend | None = None
    graph_batch_size: int = 0
    # Prefills of so many tokens at most are CUDA graphs; the model is a `CutModel` then.
    graph_prefill_tokens: int = 0
    # None: no request has a grammar.
    grammars: GrammarRows | None = None


class ModelExecutor:
    """links: they give the gates. layer_stream: carries streamed prefixes, if there are any."""

    def __init__(
        self,
        model: CausalLM,
        pool: DevicePool,
        stream: Stream,
        links: dict[str, Link],
        options: ExecutorOptions,
        layer_stream: LayerStreamCache | None = None,
    ) -> None:
        max_slots, vocab_size, device = options.max_slots, options.vocab_size, options.device
        # The table starts with room for every page several times over, and for long prompts that share them, because
        # CUDA graphs are captured again when it grows.
        shared = min(pool.num_pages, _SHARED_PAGES)
        num_places = (64 + shared) * max_slots + 4 * pool.num_pages
        num_mapped = pool.num_pages if pool.num_windowed_pages else 0
        self._page_table = PageTable(max_slots, device, num_places, num_mapped)
        self.model: CausalLM = model
        self._prefill_graphs: PrefillGraphs | None = None
        if options.graph_prefill_tokens:
            captured = None
            if options.attention is not None and options.attention.captures_extends:
                captured = CapturedAttention(options.attention, self._page_table, options.scale)
            self.model = self._prefill_graphs = PrefillGraphs(
                cast(CutModel, model), pool, options.graph_prefill_tokens, device, captured
            )
        self.pool = pool
        self.page_size = options.page_size
        self.scale = options.scale
        self.sampler = options.sampler
        self.stream = stream
        self.links = links
        self.vocab_size = vocab_size
        self.notify = options.notify
        self.check_finite = options.check_finite
        self.lockstep = options.lockstep
        self._device = device
        self._attention = options.attention
        self._layer_stream = layer_stream
        # The prefixes that were streamed last, cut into pieces. They are the same in most launches.
        self._pieces: deque[tuple[tuple[tuple[Tier, np.ndarray], ...], list[Piece]]] = deque(maxlen=_KEPT_PREFIXES)
        self._last_tokens = torch.zeros(max_slots, dtype=torch.int64, device=device)
        self._graphs: CudaGraphRunner | None = None
        if options.attention is not None and options.graph_batch_size:
            self._graphs = CudaGraphRunner(
                model,
                pool,
                options.attention,
                self._page_table,
                self._last_tokens,
                options.scale,
                options.graph_batch_size,
            )
        self._penalties = PenaltyTable(max_slots, vocab_size, device)
        self._grammars = options.grammars
        self._sampling_plan = SamplingPlan((), vocab_size, device)
        self._next_seq = 0
        self._reset_pending = False
        self._fences: dict[int, LaunchFence] = {}
        self._results: deque[StepResult] = deque()
        # Set on the stream only: a launch failed, and no reset has come.
        self._void = False

    def launch(self, launch: Launch) -> None:
        assert launch.seq == self._next_seq, f"launch {launch.seq} out of order, {self._next_seq} expected"
        self._next_seq += 1
        gates = [self.links[ticket.link].gate(ticket) for ticket in launch.gates]
        run = _ActiveLaunch(launch, gates, self._reset_pending, self._has_graph(launch))
        self._reset_pending = False
        stream = self.stream
        stream.enqueue(partial(self._prepare, run))
        if any(tier == Tier.DEVICE for prefix in launch.streams for tier, _ in prefix.parts):
            # The launch before may write what this one streams.
            assert self._layer_stream is not None
            self._layer_stream.stream.wait(stream.record())
        if run.is_graph:
            stream.enqueue(partial(self._replay, run))
        else:
            for layer in range(self.model.num_layers):
                self._wait(run, layer)
                if launch.streams:
                    self._stream_layer(run, layer)
                else:
                    stream.enqueue(partial(self._layer, run, layer))
        stream.enqueue(partial(self._sample, run))
        stream.when_done(partial(self._finish, run))
        self._fences[launch.seq] = LaunchFence(stream.record(), run)
        self._fences.pop(launch.seq - _KEPT_FENCES, None)

    def warm_up(self) -> None:
        """Compile kernels before the first launch; see `kernel_warm_up`. Returns when that is done."""
        self._run_to_end(
            partial(
                warm_up_kernels,
                self.model,
                self.pool,
                self.scale,
                self.vocab_size,
                self.sampler,
                self._attention,
                self._layer_stream is not None,
            )
        )
        if self._grammars is not None and find_spec("xgrammar") is not None:
            self._run_to_end(self._grammars.warm_up)

    def capture_graphs(self) -> None:
        """Capture the graphs before the first launch, if decodes are CUDA graphs. Returns when that is done."""
        if self._graphs is not None:
            self._run_to_end(self._graphs.capture_all)
        if self._prefill_graphs is not None:
            self._run_to_end(self._prefill_graphs.capture_all)

    def _run_to_end(self, work: Callable[[], None]) -> None:
        done = threading.Event()
        self.stream.enqueue(work)
        self.stream.when_done(done.set)
        while not done.wait(0.05):
            self.stream.raise_if_dead()

    def _has_graph(self, launch: Launch) -> bool:
        return (
            self._graphs is not None
            and launch.mode == LaunchMode.DECODE
            and len(launch.slots) <= self._graphs.max_batch_size
            and not launch.gates  # it cannot wait inside
            and not launch.streams
            and not launch.prompt_logprobs
            and bool(launch.samples.all())
        )

    def _wait(self, run: _ActiveLaunch, layer: int) -> None:
        if run.gates:
            self.stream.enqueue(partial(self._begin_wait, run))
        for gate in run.gates:
            gate.wait(layer, self.stream)

    def _stream_layer(self, run: _ActiveLaunch, layer: int) -> None:
        stream, cache = self.stream, self._layer_stream
        assert cache is not None, "a launch streams, and there is no layer stream cache"
        stream.enqueue(partial(self._begin_layer, run, layer))
        window, page = self.model.windows[layer], self.page_size
        for place, prefix in enumerate(run.launch.streams):
            first_seen = 0 if window is None else int(run.launch.starts[prefix.req]) + 1 - window
            for piece in self._pieces_of(prefix):
                position = prefix.start + piece.first_page * page
                if position + piece.num_pages * page <= first_seen:
                    continue
                filled = cache.fill(layer, piece)
                stream.enqueue(partial(self._begin_wait, run))
                stream.wait(filled.ready)
                stream.enqueue(partial(self._attend, run, layer, place, filled, position))
                cache.has_read(stream.record())
        stream.enqueue(partial(self._end_layer, run, layer))

    def _pieces_of(self, prefix: StreamedPrefix) -> list[Piece]:
        assert self._layer_stream is not None
        for parts, pieces in self._pieces:
            if parts is prefix.parts:
                return pieces
        self._pieces.append((prefix.parts, self._layer_stream.pieces(prefix.parts)))
        return self._pieces[-1][1]

    def reset(self, mark: int) -> None:
        assert mark == self._next_seq, "the first launch after a reset is the mark"
        self._reset_pending = True

    def fence(self, seq: int) -> LaunchFence | None:
        """The fence of a launch; None if the launch ended long ago."""
        assert seq < self._next_seq, f"launch {seq} has not been issued: a backup would read too early"
        return self._fences.get(seq)

    def poll(self) -> list[StepResult]:
        self.stream.raise_if_dead()
        if self._layer_stream is not None:
            self._layer_stream.stream.raise_if_dead()
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    # -- on the stream ------------------------------------------------------------------------------------------

    def _prepare(self, run: _ActiveLaunch) -> None:
        run.began = self.stream.mark()
        launch = run.launch
        self._page_table.apply(launch.page_runs, launch.page_appends, launch.windowed_frames)
        if run.ends_void:
            self._void = False
        run.void = self._void
        # The first request with a penalty takes memory, of which there may be too little.
        self._try(run, partial(self._start_sampling, launch))
        if not run.is_graph:
            self._guard(run, self.model.embed)

    def _start_sampling(self, launch: Launch) -> None:
        if not launch.output_ids:
            return
        specs = dict(zip(launch.slots[launch.samples].tolist(), launch.sampling))
        for slot, ids in launch.output_ids:
            params = specs[slot].params
            if params.has_penalties:
                self._penalties.start(slot, to_device(ids.astype(np.int64), self._device))
            if params.grammar is not None:
                self._grammar_rows.start(slot, specs[slot], ids)

    @property
    def _grammar_rows(self) -> GrammarRows:
        assert self._grammars is not None, "a request has a grammar, and this executor follows none"
        return self._grammars

    def _begin_wait(self, run: _ActiveLaunch) -> None:
        run.waits.append((self.stream.mark(), None))

    def _end_wait(self, run: _ActiveLaunch, waited_for: Sequence[LayerGate | FilledPiece]) -> None:
        if not waited_for:
            return
        run.waits[-1] = run.waits[-1][0], self.stream.mark()
        if not run.void:
            try:
                for each in waited_for:
                    each.check()
            except LoadFailedError:
                run.has_failed = True

    def _layer(self, run: _ActiveLaunch, layer: int) -> None:
        self._end_wait(run, run.gates)
        self._guard(run, lambda batch: self.model.forward_layer(layer, run.state, batch, self.pool))

    def _replay(self, run: _ActiveLaunch) -> None:
        def replay() -> torch.Tensor:
            assert self._graphs is not None
            launch = run.launch
            logits, run.batch = self._graphs.replay(
                launch.seq, self._numbers(launch), self._plan_of(launch), self._to_device
            )
            return logits

        self._try(run, replay)

    def _begin_layer(self, run: _ActiveLaunch, layer: int) -> None:
        self._end_wait(run, run.gates)
        self._guard(run, lambda batch: self.model.begin_layer(layer, run.state, batch, self.pool))

    def _attend(self, run: _ActiveLaunch, layer: int, place: int, filled: FilledPiece, position: int) -> None:
        self._end_wait(run, [filled])
        run.filled.append(filled)
        view, segment = filled.view, filled.segment
        self._guard(run, lambda batch: self.model.attend(layer, run.state, batch, place, view, segment, position))

    def _end_layer(self, run: _ActiveLaunch, layer: int) -> None:
        self._guard(run, lambda batch: self.model.end_layer(layer, run.state, batch))

    def _sample(self, run: _ActiveLaunch) -> None:
        """The end of a launch on the device. The copy of the results to the host is under way afterwards."""

        def logits(batch: ForwardBatch) -> torch.Tensor | None:
            if run.is_graph:
                return run.state
            return self.model.logits(run.state, batch) if len(batch.sample_rows) else None

        def sample(batch: ForwardBatch) -> _Sampled | None:
            return None if run.state is None else self._sampled(run.launch, run.state, batch, run.mask)

        self._guard(run, logits)
        self._guard(run, lambda _: self._ask_grammars(run))
        if not run.has_failed and not run.void:
            self._guard(run, sample)
        if run.has_failed:
            self._void = True
        run.ended = self.stream.mark()

    def _finish(self, run: _ActiveLaunch) -> None:
        """On the host, once the device is done."""
        tokens, findings = b"", None
        if not run.has_failed and not run.void and run.state is not None:
            sampled: _Sampled = run.state
            if sampled.is_finite is not None and not bool(sampled.is_finite):
                raise NonFiniteLogitsError(f"launch {run.launch.seq}: a logit is not finite")
            tokens, findings = sampled.token_bytes(), sampled.found()
        seconds = self.stream.seconds
        stall_s = sum(seconds(begin, end) for begin, end in run.waits if end is not None)
        stream_s = sum(self._layer_stream.seconds(filled) for filled in run.filled) if self._layer_stream else 0.0
        self._results.append(
            StepResult(
                run.launch.seq,
                tokens,
                run.has_failed,
                findings,
                seconds(run.began, run.ended) - stall_s,
                stall_s,
                stream_s,
            )
        )
        # The run stays, as a fence.
        run.batch = run.state = run.mask = None
        run.waits, run.filled = [], []
        self.notify()

    def _skips(self, run: _ActiveLaunch) -> bool:
        return (run.void or run.has_failed) and not self.lockstep

    def _guard(self, run: _ActiveLaunch, work: Callable[[ForwardBatch], Any]) -> None:
        """Run one stage of a launch on its batch; see `_try`."""

        def on_batch() -> Any:
            if run.batch is None:
                run.batch = self._forward_batch(run.launch)
                run.batch.gates = run.gates
            return work(run.batch)

        self._try(run, on_batch)

    def _try(self, run: _ActiveLaunch, work: Callable[[], Any]) -> None:
        """Run a stage, whose result is the launch's state. An error fails the launch, not the stream. In lockstep it
        ends the rank, because the other ranks would wait for it for ever."""
        if self._skips(run):
            return
        try:
            with torch.inference_mode():
                run.state = work()
        except Exception:
            if self.lockstep:
                raise
            logger.exception("launch %d failed", run.launch.seq)
            run.has_failed = True

    def _numbers(self, launch: Launch) -> BatchNumbers:
        table, page = self._page_table, self.page_size
        slots, starts, lens = (each.astype(np.int64) for each in (launch.slots, launch.starts, launch.lens))
        row_ends = np.cumsum(lens)
        # Of each token: its place in its request.
        positions = np.repeat(starts + lens - row_ends, lens) + np.arange(int(row_ends[-1]))
        first_pages = table.starts[slots]
        pages = table.at(np.repeat(first_pages, lens) + positions // page)
        return BatchNumbers(
            launch.input_ids.astype(np.int64),
            positions,
            pages * page + positions % page,
            slots,
            first_pages,
            starts + lens,
            lens,
        )

    def _forward_batch(self, launch: Launch) -> ForwardBatch:
        numbers = self._numbers(launch)
        lens, last_rows = numbers.q_lens, np.cumsum(numbers.q_lens) - 1
        wanted_rows = [last_rows[launch.samples]]
        for wanted in launch.prompt_logprobs:
            first = int(last_rows[wanted.req] - lens[wanted.req]) + 1 + wanted.first_row
            wanted_rows.append(np.arange(first, first + len(wanted.targets)))
        kv_lens = numbers.kv_lens.copy()
        # The keys of streamed requests do not come from the page table.
        kv_lens[[prefix.req for prefix in launch.streams]] = 0
        input_ids, positions, slots, starts, kv_lens_there, sample_rows, sample_slots, ends, *out_loc = (
            self._to_device(
                [
                    numbers.input_ids,
                    numbers.positions,
                    numbers.slots,
                    numbers.starts,
                    kv_lens,
                    np.concatenate(wanted_rows),
                    numbers.slots[launch.samples],
                    numbers.kv_lens[launch.samples],
                    *numbers.out_loc,
                ]
            )
        )
        decode = launch.mode == LaunchMode.DECODE
        if decode:
            input_ids = torch.where(input_ids < 0, self._last_tokens.index_select(0, slots), input_ids)
        segments = PagedSegments(
            self._page_table.table, self.page_size, numbers.starts, kv_lens, lens, starts, kv_lens_there
        )
        return ForwardBatch(
            seq=launch.seq,
            mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            input_ids=input_ids,
            positions=positions,
            out_loc=torch.stack(out_loc) if len(out_loc) > 1 else out_loc[0].expand(2, -1),
            segments=segments,
            windowed_segments=self._page_table.windowed(segments),
            attn=AttentionMetadata(q_lens=tuple(lens.tolist()), scale=self.scale),
            sample_rows=sample_rows,
            sample_slots=sample_slots,
            sampling=self._plan_of(launch).info(ends),
            streamed=self._streamed(launch),
            wants_hidden=any(spec.wants_embedding for spec in launch.sampling),
        )

    @staticmethod
    def _embeddings(hidden: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        """rows: (n,) int64 on the device. (n, hidden_size) float32, of length 1 each; on its way to the host."""
        assert hidden is not None, "the model has left no hidden states"
        found = torch.nn.functional.normalize(hidden.index_select(0, rows).float(), dim=-1)
        return found.to("cpu", non_blocking=True)

    def _to_device(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """Copy all of a launch's numbers, and the changes of the page table, at once."""
        found = to_device_together([*arrays, *self._page_table.changes()], self._device)
        self._page_table.write(*found[len(arrays) :])
        return found[: len(arrays)]

    def _streamed(self, launch: Launch) -> list[StreamedRows]:
        page, table = self.page_size, self._page_table
        assert not launch.streams or not self.pool.num_windowed_pages, "what streams has one pool for all layers"
        found, row_ends = [], np.cumsum(launch.lens).tolist()
        for prefix in launch.streams:
            i = prefix.req
            slot, start, length = int(launch.slots[i]), int(launch.starts[i]), int(launch.lens[i])
            # The device's tokens without the gap, whose borders are page borders. A single query sees all of its own
            # segment.
            runs = [(0, prefix.start, False), (prefix.end, start, False), (start, start + length, True)]
            if length == 1:
                runs[1:] = [(prefix.end, start + 1, False)]
            segments = [
                KVSegment(table.pages(slot, a // page, -(-b // page)), b - a, causal, a % page)
                for a, b, causal in runs
                if a < b
            ]
            found.append(StreamedRows(slice(row_ends[i] - length, row_ends[i]), prefix.start, prefix.end, segments))
        return found

    def _plan_of(self, launch: Launch) -> SamplingPlan:
        """The plan for sampling a launch. Steady decoding brings the same tuple every time, and reuses the plan."""
        if launch.sampling is not self._sampling_plan.specs:
            self._sampling_plan = SamplingPlan(launch.sampling, self.vocab_size, self._device)
        return self._sampling_plan

    def _ask_grammars(self, run: _ActiveLaunch) -> Any:
        """A stage of its own, because ranks meet in it: in lockstep it runs where the launch has failed, too."""
        if rows := self._plan_of(run.launch).grammar_rows:
            run.mask = self._grammar_rows.mask(run.launch.slots[run.launch.samples][list(rows)].tolist())
        return run.state

    def _sampled(
        self, launch: Launch, logits: torch.Tensor, batch: ForwardBatch, mask: torch.Tensor | None
    ) -> _Sampled:
        """logits: (num_samples + rows of prompt_logprobs, vocab_size) float32. mask: of the plan's grammar_rows."""
        plan, slots = self._plan_of(launch), batch.sample_slots
        num_samples = len(plan.specs)
        positions = (launch.starts + launch.lens)[launch.samples]
        shaped = plan.shape(logits[:num_samples], slots, positions, self._penalties)
        if mask is not None and plan.grammar_index is not None:
            # Log-probabilities are those of the model's own logits.
            shaped = shaped.clone() if shaped.data_ptr() == logits.data_ptr() else shaped
            GrammarRows.apply(shaped, plan.grammar_index, mask)
        next_tokens = self.sampler(shaped, batch.sampling)
        self._last_tokens.index_copy_(0, slots, next_tokens)
        plan.count(self._penalties, slots, next_tokens)
        asked = plan.begin_logprobs(logits[:num_samples], next_tokens)
        prompt, row = {}, num_samples
        for rows in launch.prompt_logprobs:
            n = len(rows.targets)
            targets = to_device(rows.targets.astype(np.int64), self._device)
            query = LogprobQuery([rows.spec] * n, self._device)
            prompt[rows.req] = _PendingLogprobs.of(query.begin(logits[row : row + n], targets))
            row += n
        on_host = next_tokens.to(torch.int32).to("cpu", non_blocking=True)
        failed_rows: tuple[int, ...] = ()
        if mask is not None:
            places = plan.grammar_rows
            with_grammar = launch.slots[launch.samples][list(places)].tolist()
            wait = partial(self.stream.wait_for_mark, self.stream.mark())
            failed_rows = self._grammar_rows.drawn(with_grammar, on_host, places, wait)
        return _Sampled(
            on_host,
            plan.logprob_rows,
            None if asked is None else _PendingLogprobs.of(asked),
            prompt,
            plan.embedding_rows,
            self._embeddings(batch.hidden, plan.embedding_index) if plan.embedding_index is not None else None,
            failed_rows,
            torch.isfinite(logits).all().to("cpu", non_blocking=True) if self.check_finite else None,
        )
