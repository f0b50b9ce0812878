"""One simulated run: `RunSettings` -> `Outcome`; and `Runs`, which remembers them and spreads them over processes.

Owns the processes and what has been run in this invocation. Knows no figure. All numbers are simulated, but wall_s.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from benchmark.common import percentiles
from benchmark.papers.systems import SYSTEMS
from benchmark.simulator.cost_models import ModelShape
from benchmark.simulator.profiles import HARDWARE, MODELS, Hardware, device_tokens
from benchmark.simulator.smoke import check_answers
from benchmark.simulator.workloads import (
    LOOGLE,
    LOOGLE_CLOZE,
    MAX_IN_FLIGHT,
    NARRATIVEQA,
    REVIEWMT,
    SHAREGPT,
    ConversationSpec,
    Order,
    QuestionSpec,
    Turn,
    Workload,
)

from sglang.simulator.simulation import Simulation
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.mem_cache.transfer import H2D, Ticket, Tier, TransferOp
from sglang.srt.model_executor.launch import LaunchMode

DATASETS: dict[str, QuestionSpec | ConversationSpec] = {
    d.name: d for d in (LOOGLE, LOOGLE_CLOZE, NARRATIVEQA, REVIEWMT, SHAREGPT)
}
ALL_AT_ONCE = float("inf")
# SGLang 0.4.5's --chunked-prefill-size and --max-prefill-tokens on such GPUs, from memory.
CHUNK_TOKENS, MAX_PREFILL_TOKENS = 8192, 16384
# Strata 5.1: "we restrict GPU memory to approximately 500K tokens" for ShareGPT.
SHAREGPT_DEVICE_TOKENS = 500_000


@dataclass(frozen=True)
class RunSettings:
    """rate: queries per second; ALL_AT_ONCE gives the peak throughput, as in_flight are always out. page_size: None:
    the system's. warm: the host has the KV of all contexts, the device nothing (Strata 5.2.2).

    counts, lengths: share of the data set's contexts and queries, and of its lengths; pools and in_flight shrink
    alike, so that as large a part of the contexts fits. What a sensitivity table changes: efficiency (of matrices
    and attention; None: the profile's), bandwidth, device and copy_cost (factors; of what an asynchronous copy costs
    besides its bytes), batch_tokens, in_flight, question (tokens), load_ratio (None: the system's).
    """

    system: str
    model: str = "Qwen2.5-14B"
    machine: str = "h200"
    dataset: str = "LooGLE"
    rate: float = ALL_AT_ONCE
    order: Order = Order.SHUFFLE
    page_size: int | None = None
    warm: bool = False
    counts: float = 1.0
    lengths: float = 1.0
    seed: int = 1
    efficiency: float | None = None
    bandwidth: float = 1.0
    device: float = 1.0
    copy_cost: float = 1.0
    batch_tokens: int | None = None
    in_flight: int = MAX_IN_FLIGHT
    question: int | None = None
    load_ratio: float | str | None = None

    def describe(self) -> dict[str, Any]:
        """The fields that identify a run: the first five, and each field that differs from its default."""
        usual = {f.name: f.default for f in fields(self)}
        always = ("system", "model", "machine", "dataset", "rate")
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        shown = {name: v for name, v in values.items() if name in always or v != usual[name]}
        return shown | {"rate": "all at once" if self.rate == ALL_AT_ONCE else self.rate}


@dataclass(frozen=True)
class Outcome:
    """hit_rates: share of prompt tokens found, by tier. stall_share: of the time of prefill launches, that in which
    nothing is computed. busy_share: of the whole run, that in which the GPU computes. load_bytes_per_s: of one rank,
    while the link loads; sustained_bytes_per_s: the same bytes over the whole run. batches: (n, 4), of each prefill
    launch the new tokens, those loaded for it, and the seconds it computed and stalled."""

    num_requests: int
    mean_ttft_s: float
    p90_ttft_s: float
    p99_ttft_s: float
    output_tokens_per_s: float
    requests_per_s: float
    hit_rates: dict[str, float]
    stall_share: float
    busy_share: float
    load_bytes_per_s: float
    sustained_bytes_per_s: float
    simulated_s: float
    counters: dict[str, int]
    wall_s: float = field(compare=False)
    batches: np.ndarray = field(compare=False, repr=False)

    @property
    def hit_rate(self) -> float:
        return sum(self.hit_rates.values())

    def row(self) -> dict[str, Any]:
        """For a table, and for JSON with the counters."""
        return {
            "requests/s": self.requests_per_s,
            "tokens/s": self.output_tokens_per_s,
            "mean TTFT s": self.mean_ttft_s,
            "p90 TTFT s": self.p90_ttft_s,
            "p99 TTFT s": self.p99_ttft_s,
            **{f"{tier} hits %": 100 * rate for tier, rate in self.hit_rates.items()},
            "stall % of prefill": 100 * self.stall_share,
            "GPU busy %": 100 * self.busy_share,
            "loading GB/s": self.load_bytes_per_s / 1e9,
            "wall s": self.wall_s,
        }


class Batches:
    """What each prefill launch had to load and how long it waited; to be called after every step."""

    def __init__(self, sim: Simulation, page_size: int) -> None:
        self.rows: list[tuple[int, int, float, float]] = []
        self._sim = sim
        self._page_size = page_size
        self._loading: dict[Ticket, int] = {}
        self._booked = sim.executor.busy_s, sim.executor.stall_s

    def __call__(self, decision: BatchDecision) -> None:
        for op in decision.ops:
            if isinstance(op, TransferOp) and op.ticket.link == H2D:
                # The first launch behind a load counts it.
                self._loading[op.ticket] = len(op.src_frames) * self._page_size
        launch, executor = decision.launch, self._sim.executor
        if launch is None:
            return
        busy_s, stall_s = executor.busy_s - self._booked[0], executor.stall_s - self._booked[1]
        self._booked = executor.busy_s, executor.stall_s
        if launch.mode == LaunchMode.EXTEND:
            loaded = sum(self._loading.pop(ticket, 0) for ticket in launch.gates)
            self.rows.append((int(launch.lens.sum()), loaded, busy_s, stall_s))


def simulate(settings: RunSettings) -> Outcome:
    """One run, with or without a warm-up."""
    begin = time.perf_counter()
    system, model, machine = SYSTEMS[settings.system], MODELS[settings.model], _machine(settings)
    if settings.load_ratio is not None:
        system = replace(system, policy=replace(system.policy, load_ratio=settings.load_ratio))
    page_size = settings.page_size or system.page_size
    workload = _workload(settings)
    longest = workload.stats().max_total
    device = device_tokens(model, machine.gpu) * settings.device
    if settings.dataset == SHAREGPT.name:
        device = min(device, SHAREGPT_DEVICE_TOKENS * settings.device)
    else:
        device *= settings.counts * settings.lengths
    batch = settings.batch_tokens
    config = system.config(
        model,
        machine,
        page_size,
        context_len=longest + 1,
        num_device_tokens=max(int(device), 2 * longest + 2 * page_size),
        chunked_prefill_size=max(batch or CHUNK_TOKENS, page_size),
        max_prefill_tokens=max(batch or MAX_PREFILL_TOKENS, page_size),
    )
    sim = Simulation(config, system.hardware(model, machine, page_size))
    if settings.warm:
        workload = _warm_up(sim, workload)
    return run_to_the_end(sim, workload, model, page_size, begin)


def run_to_the_end(sim: Simulation, workload: Workload, model: ModelShape, page_size: int, begin: float) -> Outcome:
    """Run the workload, and check that every query was answered in full. begin: on time.perf_counter, of wall_s."""
    started, before = sim.now, _counters(sim)
    busy_s = sim.executor.busy_s
    loading_s = sim.links[H2D].busy_s if H2D in sim.links else 0.0
    batches = Batches(sim, page_size)
    times = sim.run(workload.source(), after_step=batches)
    check_answers(times, workload)
    elapsed = sim.now - started
    counters = _counters(sim) - before
    prompt = counters["prompt_tokens"]
    loaded = counters["load_back_tokens"] * model.kv_bytes_per_token
    loading_s = sim.links[H2D].busy_s - loading_s if H2D in sim.links else 0.0
    rows = np.array(batches.rows, np.float64).reshape(-1, 4)
    ttft = [t.ttft for t in times.values()]
    p90, p99 = percentiles(ttft, 90, 99)
    return Outcome(
        num_requests=len(times),
        mean_ttft_s=float(np.mean(ttft)),
        p90_ttft_s=p90,
        p99_ttft_s=p99,
        output_tokens_per_s=counters["generation_tokens"] / elapsed,
        requests_per_s=len(times) / elapsed,
        hit_rates={tier: counters[f"hit_tokens_{tier}"] / prompt for tier in ("device", "host")},
        stall_share=max(0.0, float(rows[:, 3].sum() / rows[:, 2:].sum())),
        busy_share=(sim.executor.busy_s - busy_s) / elapsed,
        load_bytes_per_s=loaded / loading_s if loading_s else 0.0,
        sustained_bytes_per_s=loaded / elapsed,
        simulated_s=elapsed,
        counters=dict(sorted(counters.items())),
        wall_s=time.perf_counter() - begin,
        batches=rows,
    )


def _counters(sim: Simulation) -> Counter[str]:
    return sim.core.scheduler.counters


def _machine(settings: RunSettings) -> Hardware:
    machine = HARDWARE[settings.machine]
    gpu, link = machine.gpu, machine.link
    if settings.efficiency is not None:
        gpu = replace(gpu, matmul_efficiency=settings.efficiency, attention_efficiency=settings.efficiency)
    link = replace(link, peak=link.peak * settings.bandwidth, copy_s=link.copy_s * settings.copy_cost)
    return replace(machine, gpu=gpu, link=link)


def _workload(settings: RunSettings) -> Workload:
    spec = DATASETS[settings.dataset].scaled(settings.lengths, settings.counts)
    if isinstance(spec, QuestionSpec):
        if settings.question is not None:
            # The documents stay as long as they are.
            longer = settings.question * settings.lengths - spec.mean_question
            spec = replace(spec, mean_question=spec.mean_question + longer, mean_in=spec.mean_in + longer)
        workload = spec.generate(settings.seed, settings.rate, settings.order)
    else:
        workload = spec.generate(settings.seed, settings.rate)
    shrunk = 1.0 if settings.dataset == SHAREGPT.name else settings.counts
    return replace(workload, max_in_flight=max(4, round(settings.in_flight * shrunk)))


def _warm_up(sim: Simulation, workload: Workload) -> Workload:
    """Compute the KV of every context, then take all of it off the device; the host keeps it. Returns the workload,
    beginning now. The warm-up's requests have the ids of some that come later."""
    contexts = {id(c.context): c for c in workload.conversations}
    asked = (Turn(np.empty(0, np.int32), 1),)
    first = tuple(replace(c, start=0.0, turns=asked) for c in contexts.values())
    sim.run(replace(workload, conversations=first).source())
    scheduler = sim.core.scheduler
    scheduler.cache.controller.evict(Tier.DEVICE, scheduler.cache.device.num_pages)
    assert scheduler.cache.tree.resident_pages(Tier.DEVICE) == 0 < scheduler.cache.tree.resident_pages(Tier.HOST)
    later = tuple(replace(c, start=c.start + sim.now) for c in workload.conversations)
    return replace(workload, conversations=later)


class Runs:
    """jobs: processes; 1: this one. scale: by data set, replaces fields of all settings, such as counts. run: how
    settings become an outcome, if not by `simulate`; both are then that paper's own."""

    def __init__(
        self,
        jobs: int = 1,
        scale: dict[str, dict[str, Any]] | None = None,
        quiet: bool = False,
        run: Callable[[Any], Any] | None = None,
    ) -> None:
        self.outcomes: dict[Any, Any] = {}
        self._run = run
        self._jobs = jobs
        self._scale = scale or {}
        self._quiet = quiet

    def __call__(self, wanted: Iterable[Any]) -> list[Any]:
        """Outcomes in the order asked for; what has been run is not run again."""
        asked = [self.scaled(s) for s in wanted]
        missing = [s for s in dict.fromkeys(asked) if s not in self.outcomes]
        run = self._run or simulate
        if self._jobs == 1 or len(missing) < 2:
            for settings in missing:
                self._keep(settings, run(settings))
        else:
            with ProcessPoolExecutor(self._jobs, initializer=gc.freeze) as pool:
                futures = {pool.submit(run, settings): settings for settings in missing}
                for future in as_completed(futures):
                    self._keep(futures[future], future.result())
        return [self.outcomes[settings] for settings in asked]

    def scaled(self, settings: Any) -> Any:
        """What is run for them."""
        return replace(settings, **self._scale.get(getattr(settings, "dataset", ""), {}))

    def _keep(self, settings: Any, outcome: Any) -> None:
        self.outcomes[settings] = outcome
        if not self._quiet and hasattr(outcome, "wall_s"):
            said = ", ".join(f"{v}" for v in settings.describe().values())
            print(f"{said}: {outcome.requests_per_s:.2f} requests/s, {outcome.wall_s:.1f} s of wall", file=sys.stderr)


def points(settings: Sequence[Any], outcomes: Sequence[Any]) -> list[dict[str, Any]]:
    """A row per run."""
    return [s.describe() | o.row() | {"counters": o.counters} for s, o in zip(settings, outcomes, strict=True)]
