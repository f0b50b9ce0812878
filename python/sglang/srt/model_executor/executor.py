"""`Executor`: runs launches in order. `ModelExecutor` runs a model, layer by layer, on a stream.

Owns the mirror of the page table, the last token of every slot and the order of launches. Never allocates pages and
never decides what runs: the scheduler's `Launch` says everything. The model, the pool and the streams come through
the constructor.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.mem_cache.kv_view import KVSegment
from sglang.srt.mem_cache.transfer import LayerGate, Link, LoadFailedError
from sglang.srt.model_executor.forward_batch_info import CausalLM, ForwardBatch, ForwardMode, KVPool
from sglang.srt.model_executor.launch import Launch, LaunchMode, PageRun
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.stream import Event, Stream

logger = logging.getLogger(__name__)

_KEPT_FENCES = 256


@dataclass(frozen=True)
class StepResult:
    """One completed launch. tokens: int32 bytes, one per sampled request; empty when it failed or was void."""

    seq: int
    tokens: bytes = b""
    failed: bool = False


class Executor(Protocol):
    def launch(self, launch: Launch) -> None: ...

    def reset(self, mark: int) -> None:
        """Launches from `mark` on are valid again after a failure."""
        ...

    def poll(self) -> list[StepResult]:
        """Launches completed since the last poll, in order. Raises if the worker died."""
        ...


class NonFiniteLogitsError(RuntimeError):
    """A forward pass read memory that nobody had written (poison), or the model overflowed."""


@dataclass
class _Run:
    """One launch on its way through the stream."""

    launch: Launch
    gates: list[LayerGate]
    ends_void: bool
    batch: ForwardBatch | None = None
    state: Any = None
    void: bool = False
    error: Exception | None = None


@dataclass(frozen=True)
class LaunchFence:
    """What a backup waits for: the end of the launch that writes its source."""

    event: Event
    _run: _Run = field(repr=False)

    @property
    def failed(self) -> bool:
        return self._run.void or self._run.error is not None


class PageTable:
    """slot -> frames of its pages, int64. Ragged: sized by tokens in use, not by requests times context."""

    def __init__(self) -> None:
        # The same memory twice: numpy writes single numbers ten times faster than torch.
        self._arrays: dict[int, np.ndarray] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def apply(self, run: PageRun) -> None:
        end = run.first_page + len(run.frames)
        if run.fresh or run.slot not in self._arrays:
            # Never the old array: a launch in flight may still read the slot's last owner there.
            self._set(run.slot, np.empty(max(64, 2 * end), np.int64))
        self._room(run.slot, end)[run.first_page : end] = run.frames

    def append(self, appends: np.ndarray) -> None:
        """appends: (3, n) int32 as in `Launch`."""
        for slot, place, frame in appends.T.tolist():
            self._room(slot, place + 1)[place] = frame

    def pages(self, slot: int, first: int, end: int) -> torch.Tensor:
        return self._tensors[slot][first:end]

    def _room(self, slot: int, num_pages: int) -> np.ndarray:
        array = self._arrays[slot]
        if num_pages > len(array):
            grown = np.empty(2 * num_pages, np.int64)
            grown[: len(array)] = array
            self._set(slot, grown)
            return grown
        return array

    def _set(self, slot: int, array: np.ndarray) -> None:
        self._arrays[slot] = array
        self._tensors[slot] = torch.from_numpy(array)


class ModelExecutor:
    """links: where gates come from. notify: called from the stream after every launch. check_finite: fail loudly on
    a logit that is not finite; the tests' poison relies on it. lockstep: other ranks compute the same launches and
    meet this one in collectives, so that a failed or void launch must run to its end; its values are not read.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        page_size: int,
        scale: float,
        sampler: Callable[[torch.Tensor, SamplingBatchInfo], torch.Tensor],
        stream: Stream,
        links: dict[str, Link],
        max_slots: int,
        vocab_size: int,
        notify: Callable[[], None] = lambda: None,
        check_finite: bool = False,
        lockstep: bool = False,
    ) -> None:
        self.model = model
        self.pool = pool
        self.page_size = page_size
        self.scale = scale
        self.sampler = sampler
        self.stream = stream
        self.links = links
        self.vocab_size = vocab_size
        self.notify = notify
        self.check_finite = check_finite
        self.lockstep = lockstep
        self._page_table = PageTable()
        self._last_tokens = torch.zeros(max_slots, dtype=torch.int64)
        self._next_seq = 0
        self._reset_pending = False
        self._fences: dict[int, LaunchFence] = {}
        self._results: deque[StepResult] = deque()
        # Touched on the stream only: a launch failed and no reset has come.
        self._void = False

    def launch(self, launch: Launch) -> None:
        assert launch.seq == self._next_seq, f"launch {launch.seq} out of order, {self._next_seq} expected"
        self._next_seq += 1
        gates = [self.links[ticket.link].gate(ticket) for ticket in launch.gates]
        run = _Run(launch, gates, ends_void=self._reset_pending)
        self._reset_pending = False
        stream = self.stream
        stream.enqueue(partial(self._prepare, run))
        for layer in range(self.model.num_layers):
            for gate in gates:
                gate.wait(layer, stream)
            stream.enqueue(partial(self._layer, run, layer))
        stream.enqueue(partial(self._finish, run))
        self._fences[launch.seq] = LaunchFence(stream.record(), run)
        self._fences.pop(launch.seq - _KEPT_FENCES, None)

    def reset(self, mark: int) -> None:
        assert mark == self._next_seq, "the first launch after a reset is the mark"
        self._reset_pending = True

    def fence(self, seq: int) -> LaunchFence | None:
        """The fence of a launch; None once it is long over."""
        assert seq < self._next_seq, f"launch {seq} has not been issued: a backup would read too early"
        return self._fences.get(seq)

    def poll(self) -> list[StepResult]:
        self.stream.raise_if_dead()
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    # -- on the stream ------------------------------------------------------------------------------------------

    def _prepare(self, run: _Run) -> None:
        for page_run in run.launch.page_runs:
            self._page_table.apply(page_run)
        self._page_table.append(run.launch.page_appends)
        if run.ends_void:
            self._void = False
        run.void = self._void
        if self._skips(run):
            return
        with torch.inference_mode():
            run.batch = self._forward_batch(run.launch)
        run.batch.gates = run.gates
        self._guard(run, self.model.embed)

    def _layer(self, run: _Run, layer: int) -> None:
        if not run.void:
            try:
                for gate in run.gates:
                    gate.check()
            except LoadFailedError as error:
                run.error = run.error or error
        self._guard(run, lambda batch: self.model.forward_layer(layer, run.state, batch, self.pool))

    def _finish(self, run: _Run) -> None:
        tokens = b""

        def logits(batch: ForwardBatch) -> torch.Tensor | None:
            return self.model.logits(run.state, batch) if len(batch.sample_rows) else None

        def sample(batch: ForwardBatch) -> bytes:
            if run.state is None:
                return b""
            if self.check_finite and not bool(torch.isfinite(run.state).all()):
                raise NonFiniteLogitsError(f"launch {run.launch.seq}: a logit is not finite")
            next_tokens = self.sampler(run.state, batch.sampling)
            self._last_tokens[torch.from_numpy(run.launch.slots[run.launch.samples]).long()] = next_tokens
            return next_tokens.to(torch.int32).numpy().tobytes()

        self._guard(run, logits)
        if run.error is None and not run.void:
            self._guard(run, sample)
        if run.error is not None:
            self._void = True
            if isinstance(run.error, NonFiniteLogitsError):
                raise run.error
        elif not run.void:
            tokens = run.state
        self._results.append(StepResult(run.launch.seq, tokens, failed=run.error is not None))
        run.batch = run.state = None
        self.notify()

    def _skips(self, run: _Run) -> bool:
        return (run.void or run.error is not None) and not self.lockstep

    def _guard(self, run: _Run, work: Callable[[ForwardBatch], Any]) -> None:
        """Run one stage of a launch; an error fails the launch, not the stream. In lockstep it ends the rank: the
        others would wait for it for ever."""
        if self._skips(run):
            return
        assert run.batch is not None
        try:
            with torch.inference_mode():
                run.state = work(run.batch)
        except Exception as error:
            if self.lockstep:
                raise
            if not isinstance(error, NonFiniteLogitsError):
                logger.exception("launch %d failed", run.launch.seq)
            run.error = error

    def _forward_batch(self, launch: Launch) -> ForwardBatch:
        page = self.page_size
        decode = launch.mode == LaunchMode.DECODE
        input_ids = torch.from_numpy(launch.input_ids).to(torch.int64)
        slots, starts, lens = launch.slots.tolist(), launch.starts.tolist(), launch.lens.tolist()
        segments: list[list[KVSegment]] = []
        for slot, start, length in zip(slots, starts, lens):
            end = start + length
            if decode:
                pages = self._page_table.pages(slot, 0, start // page + 1)
                segments.append([KVSegment(pages, end)])
                continue
            own = KVSegment(
                self._page_table.pages(slot, start // page, -(-end // page)), length, causal=True, skip=start % page
            )
            if start:
                segments.append([KVSegment(self._page_table.pages(slot, 0, -(-start // page)), start), own])
            else:
                segments.append([own])
        if decode:
            positions = torch.from_numpy(launch.starts).to(torch.int64)
            last_pages = torch.stack([s[0].pages[-1] for s in segments])
            out_loc = last_pages * page + positions % page
            unknown = input_ids < 0
            input_ids = torch.where(unknown, self._last_tokens[torch.from_numpy(launch.slots).long()], input_ids)
            last_rows = np.arange(len(slots))
        else:
            positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lens)])
            out_loc = torch.cat(
                [
                    (seg[-1].pages[:, None] * page + torch.arange(page)).flatten()[seg[-1].skip :][: seg[-1].length]
                    for seg in segments
                ]
            )
            last_rows = np.cumsum(launch.lens) - 1
        ends = (launch.starts + launch.lens)[launch.samples]
        return ForwardBatch(
            seq=launch.seq,
            mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            input_ids=input_ids,
            positions=positions,
            out_loc=out_loc,
            segments=segments,
            attn=AttentionMetadata(q_lens=tuple(lens), scale=self.scale),
            sample_rows=torch.from_numpy(last_rows[launch.samples]).to(torch.int64),
            sampling=self._sampling_info(launch, ends),
        )

    def _sampling_info(self, launch: Launch, positions: np.ndarray) -> SamplingBatchInfo:
        params = launch.sampling
        return SamplingBatchInfo(
            temperatures=torch.tensor([p.temperature for p in params], dtype=torch.float32),
            top_ps=torch.tensor([p.top_p for p in params], dtype=torch.float32),
            top_ks=torch.tensor([p.top_k if p.top_k > 0 else self.vocab_size for p in params], dtype=torch.int64),
            seeds=torch.tensor([p.sampling_seed or 0 for p in params], dtype=torch.int64),
            positions=torch.from_numpy(positions).to(torch.int64),
            is_all_greedy=all(p.temperature == 0 for p in params),
        )
