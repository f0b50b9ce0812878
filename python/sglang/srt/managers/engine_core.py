"""`EngineCore`: one rank's scheduler with its executor and links.

Owns the order in which a decision is carried out, and the account of completed launches and operations. Takes no
decisions, reads no clock, opens no socket: the scheduler process, the tests and the simulator each bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sglang.srt.managers.cost_model import MEASURED_LINKS
from sglang.srt.managers.io_struct import AdminReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.progress import COUNTED, COUNTS_PER_STEP, PARTS_OF_LAUNCHES, Progress
from sglang.srt.managers.schedule_batch import BatchDecision, StepInputs, StorageRequest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.step_record import Recorder
from sglang.srt.mem_cache.slab_ledger import BorrowedSlabs, LentSlabs, SlabReport, SlabSource
from sglang.srt.mem_cache.transfer import (
    EXEC,
    FETCH_LINKS,
    PROBE,
    STALL,
    STORAGE_LINKS,
    STORE_LINKS,
    STREAM,
    Link,
    Tier,
)
from sglang.srt.model_executor.executor import Executor
from sglang.srt.sampling.logprob_types import LaunchFindings
from sglang.srt.utils.time_units import Seconds

_MEASURED = (EXEC, *PARTS_OF_LAUNCHES, *MEASURED_LINKS, *FETCH_LINKS, *STORE_LINKS)


class EngineCore:
    """links may be empty (no host tier). poison: tier -> a function that fills freed frames with NaN (tests);
    poison_windowed: of the pools for layers with a window. record: takes every step's inputs and the digest of its
    decision. slabs: lent or borrowed memory, if any."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        links: dict[str, Link],
        poison: dict[Tier, Callable[[np.ndarray], None]] | None = None,
        record: Recorder | None = None,
        slabs: SlabSource | None = None,
        poison_windowed: Mapping[Tier, Callable[[np.ndarray], None]] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.links = links
        self.poison = poison or {}
        self.poison_windowed = poison_windowed or {}
        self.record = record
        self.slabs = slabs
        self._borrowed = slabs if isinstance(slabs, BorrowedSlabs) else None
        self.num_steps = 0
        # Numbers of completed launches and operations, and of failed ones that no step has taken yet.
        self._completed = dict.fromkeys(COUNTED, 0)
        self._failures: dict[str, list[int]] = {name: [] for name in COUNTED}
        # Results that completed on this rank and that no step has taken yet; see Progress.
        self._results: dict[int, bytes] = {}
        self._findings: dict[int, LaunchFindings] = {}
        self._counts: dict[str, list[int]] = {name: [] for name in STORAGE_LINKS}
        self._far_counts: list[int] = []
        self._part_counts: list[int] = []
        self._cost: dict[str, dict[int, float]] = {name: {} for name in _MEASURED}
        # The result of the last `progress` (done, failed, slabs), and the result on which the last step was taken.
        self._seen: tuple[dict[str, int], dict[str, int], SlabReport] = (dict(self._completed), {}, SlabReport())
        self._stepped_on = self._seen
        # Launches below this number are void.
        self._reset_mark = 0
        # After the last step, whatever completes.
        self._steps_again = False

    def progress(self, slab_sources: bytes = b"") -> Progress:
        """Poll the executor and the links. Returns what has completed on this rank and is not consumed. slab_sources:
        see `Tick`."""
        if slab_sources and self._borrowed is not None:
            self._borrowed.follow(slab_sources)
        # The executor first. Then the cause of a failed launch is seen together with the launch, and never after it.
        for result in self.executor.poll():
            assert result.seq == self._completed[EXEC], "launches complete in order"
            self._completed[EXEC] += 1
            self._results[result.seq] = result.tokens
            self._cost[EXEC][result.seq] = result.seconds
            if result.stall_s:
                self._cost[STALL][result.seq] = result.stall_s
            if result.stream_s:
                self._cost[STREAM][result.seq] = result.stream_s
            if result.findings is not None:
                self._findings[result.seq] = result.findings
            if result.failed and result.seq >= self._reset_mark:
                self._failures[EXEC].append(result.seq)
        for name, link in self.links.items():
            for op in link.poll():
                assert op.seq == self._completed[name], f"{name}: operations complete in order"
                self._completed[name] += 1
                if name in self._cost:
                    self._cost[name][op.seq] = op.seconds
                if name in self._counts:
                    self._counts[name].append(op.count)
                    if name == PROBE:
                        self._far_counts.append(op.far_count)
                        self._part_counts.append(op.part_count)
                    continue
                if not op.ok:
                    self._failures[name].append(op.seq)
        failed = {name: seqs[0] for name, seqs in self._failures.items() if seqs}
        done = {name: min(n, failed[name] + 1) if name in failed else n for name, n in self._completed.items()}
        counts, consumed = {}, {}
        for name, of_link in self._counts.items():
            counts[name] = tuple(of_link[:COUNTS_PER_STEP])
            consumed[name] = self._completed[name] - len(of_link)
            done[name] = consumed[name] + len(counts[name])
        report = self.slabs.poll_mapped() if self.slabs is not None else SlabReport()
        self._seen = (done, failed, report)
        return Progress(
            done=done,
            failed=failed,
            results=dict(self._results),
            findings=dict(self._findings),
            counts=counts,
            far_counts=tuple(self._far_counts[:COUNTS_PER_STEP]),
            part_counts=tuple(self._part_counts[:COUNTS_PER_STEP]),
            consumed=consumed,
            cost={name: dict(costs) for name, costs in self._cost.items() if costs},
            slab_report=report,
            storage_has_room=tuple(getattr(self.links.get(name), "has_room", True) for name in STORE_LINKS),
        )

    def has_work(self, now: Seconds) -> bool:
        """Whether a step could do anything without new requests. It can if the last `progress` found that something
        completed since the last step, if that step launched and left something to do at once, or if a request has
        waited long enough. now: seconds of the clock that `step` is passed."""
        if self._steps_again or self._seen != self._stepped_on:
            return True
        wake_at = self.scheduler.wake_at
        return wake_at is not None and wake_at <= now

    def step(
        self,
        now: Seconds,
        progress: Progress,
        new: Sequence[TokenizedGenerateReqInput] = (),
        aborts: Sequence[str] = (),
        flush: Sequence[str] = (),
        storage: Sequence[StorageRequest] = (),
        admin: Sequence[AdminReqInput] = (),
    ) -> BatchDecision:
        """Take one step, on reduced progress, and carry its decision out."""
        inputs = StepInputs(
            step=self.num_steps,
            now=now,
            new=tuple(new),
            aborts=tuple(aborts),
            done=progress.done,
            failed=progress.failed,
            counts=progress.counts,
            far_counts=progress.far_counts,
            part_counts=progress.part_counts,
            results=progress.results,
            findings=progress.findings,
            cost=progress.cost,
            flush=tuple(flush),
            storage=tuple(storage),
            admin=tuple(admin),
            slab_report=progress.slab_report,
            storage_has_room=progress.storage_has_room,
        )
        self.num_steps += 1
        if self.slabs is not None:
            self.slabs.mark_in_use(progress.slab_report.mapped)
        if self.record is not None:
            self.record.inputs(inputs)
        decision = self.scheduler.step(inputs)
        if self.record is not None:
            self.record.decision(decision)
        self._consume(progress, decision)
        self._carry_out(decision)
        return decision

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or running, and no operation in flight."""
        return self.scheduler.num_reqs == 0 and not self.has_outstanding

    @property
    def has_outstanding(self) -> bool:
        """Whether some launch or operation has not been consumed yet, so that inputs will come by themselves."""
        return self.scheduler.cache.has_outstanding

    def _consume(self, progress: Progress, decision: BatchDecision) -> None:
        self._stepped_on = self._seen
        for seq in [s for s in self._results if s < progress.done[EXEC]]:
            del self._results[seq]
            self._findings.pop(seq, None)
        for name, costs in self._cost.items():
            end = progress.done[EXEC if name in PARTS_OF_LAUNCHES else name]
            for seq in [s for s in costs if s < end]:
                del costs[seq]
        for name, of_link in progress.counts.items():
            del self._counts[name][: len(of_link)]
        del self._far_counts[: len(progress.far_counts)]
        del self._part_counts[: len(progress.part_counts)]
        for name, first in progress.failed.items():
            seqs = self._failures[name]
            self._failures[name] = [s for s in seqs if s > first]
        if decision.reset is not None:
            # Launches below the mark are void: their failures do not matter any more.
            self._reset_mark = decision.reset
            self._failures[EXEC] = [s for s in self._failures[EXEC] if s >= decision.reset]

    def _carry_out(self, decision: BatchDecision) -> None:
        for freed, poisons in ((decision.freed, self.poison), (decision.freed_windowed, self.poison_windowed)):
            for tier, frames in freed.items():
                poison = poisons.get(Tier(tier))
                if poison is not None and len(frames):
                    poison(frames)
        # Before slabs go back, for which a lender that does not know of it would lend others.
        if decision.peer_demand is not None and self._borrowed is not None:
            self._borrowed.set_demand(*decision.peer_demand)
        if decision.slabs_drained and self._borrowed is not None:
            self._borrowed.give_back(decision.slabs_drained, decision.slabs_given_up)
        elif decision.slabs_drained:
            assert isinstance(self.slabs, LentSlabs)
            self.slabs.lend(decision.slabs_drained)
        if decision.num_slabs_recalled:
            assert isinstance(self.slabs, LentSlabs)
            self.slabs.recall(decision.num_slabs_recalled)
        if decision.reset is not None:
            self.executor.reset(decision.reset)
        for ticket in decision.cancels:
            self.links[ticket.link].cancel(ticket)
        for op in decision.ops:
            if op.after is None:
                self.links[op.ticket.link].submit(op)
        if decision.launch is not None:
            self.executor.launch(decision.launch)
        for op in decision.ops:
            if op.after is not None:
                self.links[op.ticket.link].submit(op)
        self._steps_again = decision.launch is not None and self.scheduler.steps_after_launch
