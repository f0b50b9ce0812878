"""What a cache could reach at best: the formula, the best choice in hindsight, and a device that holds everything.

`usable_share` and `hindsight_hits` are pure. `run_documents` runs the real scheduler on the virtual clock, so its
numbers are simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from benchmark.common import percentiles
from benchmark.simulator.small_machine import SmallMachine
from benchmark.simulator.workloads import Conversation, Turn, Workload, poisson_times, random_tokens

from sglang.simulator.simulation import RequestTimes, Simulation
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.transfer import TIER_NAMES, Tier


@dataclass(frozen=True)
class Documents:
    """Questions about documents drawn uniformly, after one question about each. Question and answer fill no page of
    16 tokens, so that documents are all that is cached."""

    num_documents: int
    num_questions: int
    document_tokens: int = 512
    question_tokens: int = 8
    output_tokens: int = 8
    # Questions per second, Poisson.
    rate: float = 5.0
    seed: int = 1

    @property
    def working_set(self) -> int:
        return self.num_documents * self.document_tokens

    def is_measured(self, rid: str) -> bool:
        """Whether a request comes after the first question about each document."""
        return int(rid.partition("-")[0]) >= self.num_documents

    def about(self) -> np.ndarray:
        """The document of each question, the first one about each included."""
        rng = np.random.default_rng(self.seed)
        return np.concatenate(
            (rng.permutation(self.num_documents), rng.integers(0, self.num_documents, self.num_questions))
        )

    def workload(self) -> Workload:
        about = self.about()
        rng = np.random.default_rng(self.seed + 1)
        documents = [random_tokens(rng, self.document_tokens) for _ in range(self.num_documents)]
        asked = [
            Conversation(
                float(start),
                documents[document],
                (Turn(random_tokens(rng, self.question_tokens), self.output_tokens),),
            )
            for start, document in zip(poisson_times(rng, len(about), self.rate), about.tolist(), strict=True)
        ]
        return Workload("documents", tuple(asked), max_in_flight=None)


@dataclass(frozen=True)
class BoundsOutcome:
    """Of the measured requests. All simulated."""

    # Tier's name -> share of the documents' tokens that was found there.
    hits: dict[str, float]
    mean_ttft_s: float
    p99_ttft_s: float
    # Mean tokens that running requests hold outside of the tree, and that transfers hold on any tier.
    held_tokens: float
    peak_running: int

    @property
    def hit_rate(self) -> float:
        return sum(self.hits.values())


def run_documents(machine: SmallMachine, documents: Documents) -> tuple[BoundsOutcome, list[np.ndarray]]:
    """The outcome, and the prompts in the order in which the engine started them."""
    sim = Simulation(machine.config(), machine.hardware())
    workload = documents.workload()
    steps = _Steps(sim)
    times = sim.run(workload.source(), after_step=steps)
    measured = {rid: each for rid, each in times.items() if documents.is_measured(rid)}
    assert all(each.finish_reason == "length" for each in times.values()), "a request was not answered"
    ttft = [each.ttft for each in measured.values()]
    outcome = BoundsOutcome(
        hits=_hit_shares(measured, documents.document_tokens * len(measured)),
        mean_ttft_s=float(np.mean(ttft)),
        p99_ttft_s=percentiles(ttft, 99)[0],
        held_tokens=steps.mean_held_pages * machine.page_size,
        peak_running=steps.peak_running,
    )
    prompts = [_prompt(workload.conversations[int(rid.partition("-")[0])]) for rid in steps.started]
    assert len(prompts) == len(times), "a request never started"
    return outcome, prompts


def _hit_shares(times: dict[str, RequestTimes], document_tokens: int) -> dict[str, float]:
    names = [name for name in TIER_NAMES if any(name in each.cached_tokens_details for each in times.values())]
    return {n: sum(each.cached_tokens_details.get(n, 0) for each in times.values()) / document_tokens for n in names}


def _prompt(conversation: Conversation) -> np.ndarray:
    return np.concatenate((conversation.context, conversation.turns[0].message))


class _Steps:
    """Looks at the scheduler after each step."""

    def __init__(self, sim: Simulation) -> None:
        # Ids of requests, in the order in which they started.
        self.started: dict[str, None] = {}
        self.peak_running = 0
        self._scheduler = sim.core.scheduler
        self._pages = 0
        self._steps = 0

    def __call__(self, decision: BatchDecision) -> None:
        queues = self._scheduler.queues
        # The request that is cut into chunks started last.
        active = [*queues.running, *([queues.prefilling] if queues.prefilling is not None else [])]
        self.started.update(dict.fromkeys(req.rid for req in active))
        self.peak_running = max(self.peak_running, len(active))
        self._steps += 1
        for table in self._scheduler.cache.tables.values():
            self._pages += table.num_pages - table.counts[FrameState.FREE] - table.counts[FrameState.CACHED]

    @property
    def mean_held_pages(self) -> float:
        """Pages that are neither free nor part of the tree: of running requests, and of transfers under way."""
        return self._pages / max(1, self._steps)


# -- yardsticks -----------------------------------------------------------------------------------------------------


def reserved_tokens(machine: SmallMachine, running: int) -> int:
    """R: two decode steps, at worst a page per request each, and one chunk."""
    return 2 * running * machine.page_size + machine.chunk_tokens


def usable_share(machine: SmallMachine, working_set: int, held_tokens: float, running: int) -> float:
    """min(1, usable sum of the tiers / working set), where usable is what running requests,
    transfers and R do not hold. Under uniform reuse no policy that does not know the future is better, since every
    document is as likely as any other to be next."""
    usable = machine.sum_tokens - held_tokens - reserved_tokens(machine, running)
    return min(1.0, max(0.0, usable) / working_set)


def with_unlimited_device(machine: SmallMachine, documents: Documents) -> SmallMachine:
    """The same machine with one tier that holds all, questions and answers included."""
    each = documents.document_tokens + documents.question_tokens + documents.output_tokens + machine.page_size
    room = documents.working_set + (documents.num_documents + documents.num_questions) * each
    return replace(machine, sizes={Tier.DEVICE: room})


Trace = Sequence[Sequence[int]]


def page_trace(prompts: Sequence[np.ndarray], page_size: int) -> list[list[int]]:
    """The pages of each prompt, numbered so that equal numbers mean equal prefixes. The last token of a prompt is
    always computed, so a page with it is left out."""
    ids: dict[tuple[int, bytes], int] = {}
    trace = []
    for prompt in prompts:
        row: list[int] = []
        for end in range(page_size, len(prompt), page_size):
            key = (row[-1] if row else -1, prompt[end - page_size : end].tobytes())
            row.append(ids.setdefault(key, len(ids)))
        trace.append(row)
    return trace


def hindsight_hits(trace: Trace, capacity: int, counted_from: int = 0) -> int:
    """The most pages that requests from number counted_from on can find in a memory of `capacity` pages, whatever is
    kept and given up, by one who knows the future.

    Requests are served one after another. Each finds those of its pages that the memory has. Then any of its pages
    and of the memory's may be kept. Keeping the pages of nearest next use is optimal: each hit is an interval between
    two uses of a page, all of equal value, of which at most `capacity` may overlap. Of equal next uses the page
    nearest to the front is kept. A prefix is used whenever what is behind it is used. So if all
    requests count, what is kept is always closed under prefixes, and the bound is reached by a prefix cache. An
    engine can find no more, if the trace is in the order in which it starts requests, because the pages on all its
    tiers together are such a memory. It also holds pages of running requests, answers and copies.
    """
    never = len(trace)
    next_use: dict[int, int] = {}
    # For each request, the next use of each of its pages that counts.
    following: list[list[int]] = [[]] * len(trace)
    for place in range(len(trace) - 1, -1, -1):
        following[place] = [next_use.get(page, never) for page in trace[place]]
        for page in trace[place]:
            next_use[page] = place if place >= counted_from else never
    kept: dict[int, int] = {}
    # Entries (-next use, -depth, page); stale ones are those that `kept` does not confirm.
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for place, pages in enumerate(trace):
        for depth, (page, use) in enumerate(zip(pages, following[place], strict=True)):
            hits += place >= counted_from and kept.pop(page, never) == place
            if use != never:
                kept[page] = use
                heapq.heappush(farthest, (-use, -depth, page))
            else:
                kept.pop(page, None)
        while len(kept) > capacity:
            use, _, page = heapq.heappop(farthest)
            if kept.get(page) == -use:
                del kept[page]
    return hits


def hindsight_share(prompts: Sequence[np.ndarray], machine: SmallMachine, documents: Documents) -> float:
    """`hindsight_hits` of a memory of the summed size, as a share of the measured documents' tokens. The prompts are
    in the order in which they were started."""
    trace = page_trace(prompts, machine.page_size)
    pages = hindsight_hits(trace, machine.sum_tokens // machine.page_size, documents.num_documents)
    return pages * machine.page_size / (documents.num_questions * documents.document_tokens)
