"""One simulated run of a SwiftCache master: `ServingSettings` -> `ServingOutcome`, and the systems that are compared.
All numbers but wall_s are simulated. `Runs` (runs.py) remembers them.

Master and workers are engines on one clock; the workers have bursts of work of their own, and take memory back for
them (swiftcache_workers.py).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from benchmark.common import percentiles
from benchmark.papers.runs import CHUNK_TOKENS, MAX_PREFILL_TOKENS
from benchmark.papers.swiftcache_workers import (
    COSTS,
    PAGE,
    RESERVED_TOKENS,
    SLAB_BYTES,
    WINDOW_S,
    WorkerOutcome,
    Workers,
    slab_runs,
    token_seconds,
)
from benchmark.papers.systems import SYSTEMS, System
from benchmark.simulator.cost_models import DMA
from benchmark.simulator.profiles import H20X4, MODELS, Hardware, device_tokens, host_tokens, loading_at_once
from benchmark.simulator.smoke import check_answers
from benchmark.simulator.workloads import L_EVAL, SHAREGPT_LONG, SessionSpec, Turn, Workload

from sglang.simulator.cluster import Cluster, SimulatedBorrowed
from sglang.simulator.simulation import Clock, SimulatedEngine, SimulatedHardware, Simulation
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.mem_cache.transfer import Tier, TransferOp
from sglang.srt.model_executor.launch import LaunchMode
from sglang.srt.peer.borrowed_places import BorrowedOptions
from sglang.srt.peer.borrowing import BorrowingConfig
from sglang.srt.peer.protocol.elastic_units import layer_stream_sizes

MASTERS = ("LWM-7B", "Qwen3-14B", "Qwen3-32B")
DATASETS: dict[str, SessionSpec] = {spec.name: spec for spec in (SHAREGPT_LONG, L_EVAL)}
# 5.1: "greater than 20K, with no upper limit", and "approximately 20K to 40K". 100,000 for LWM is ours: a running
# request lies on the device as a whole here, which has room for 135,000 tokens.
LENGTHS = {"LWM-7B": (20_000, 100_000), "Qwen3-14B": (20_000, 37_000), "Qwen3-32B": (20_000, 37_000)}
# 5.1, of both baselines; 128 GB of host memory hold it once, so the master has all of it.
HOST_BYTES = 96e9
# Nothing is said of the length of a run: these seconds, and at least 100 requests.
RUN_S, LEAST_REQUESTS = 300, 100
# Where no master is: what workers do by themselves.
ALONE = "workers alone"
# Our engine keeps room on the device for three chunks of each request that streams; messages are shorter than one.
STREAM_CHUNK_TOKENS = 4096
# SwiftCache streams every history that it does not have on the device; in this engine requests above a length do.
STREAMED_TOKENS = 8192


@dataclass(frozen=True)
class ServingSystem:
    """name, models, lacks: as in `System`. peers: how it borrows from workers; "": not at all. "by value": as our
    engine does. "all": whatever workers do not need at once, as in the paper (Algorithm 1), with layer streaming, and
    KV stored as it is computed. host_bytes: None: a single page, which the engine wants."""

    name: str
    models: str
    lacks: str
    system: System
    peers: str
    host_bytes: float | None


def _with_defaults(system: System) -> System:
    """Page size and write policy as the engine has them by default."""
    return replace(system, page_size=16, policy=replace(system.policy, write_policy="auto"))


TODAY = "SGLang (HiCache 0.5.21)"
_ALL = (
    ServingSystem(
        "SGLang (HiCache)",
        "Strata's SGLang-HiCache: a copy per page, layer, K and V; page size 32; layer-wise overlap; write-through.",
        "The version measured (0.5.3) can move pages by GPU kernels: see the next row.",
        SYSTEMS["SGLang-HiCache"],
        "",
        HOST_BYTES,
    ),
    ServingSystem(
        TODAY,
        "Strata's SGLang-HiCache 0.5.21: GPU-assisted I/O, LPM, page size 64. In headlines only.",
        "As there.",
        SYSTEMS["SGLang-HiCache 0.5.21"],
        "",
        HOST_BYTES,
    ),
    ServingSystem(
        "vLLM (LMCache)",
        "Strata's vLLM-LMCache: the wire's rate, a launch waits for all of it, one step at a time; page size 32.",
        "Chunks of 256 tokens, a contiguous buffer, stores that block: all of it favours this row.",
        SYSTEMS["vLLM-LMCache"],
        "",
        HOST_BYTES,
    ),
    ServingSystem(
        "SwiftCache",
        "Workers' memory instead of the host's, all that they do not need at once (Algorithm 1); the layer stream "
        "cache of Eq. 4, with one buffer of a layer, beside the regular cache of Eq. 5; KV stored as it is computed; "
        "copies over NVLink beside computing; page size 16; first come, first served. The host tier is one page.",
        "Which histories the regular cache has: here the beginning of each that there is room for. Chunks of 4,096 "
        "tokens. A request waits while three chunks of each that streams do not fit the device.",
        replace(SYSTEMS["SGLang-HiCache"], load=DMA, page_size=16),
        "all",
        None,
    ),
    ServingSystem(
        "ours",
        "Device, what workers lend by value, then the host's 96 GB by GPU kernels; all mechanisms of Strata's row of "
        "that name; page size 16.",
        "Nothing: these are the engine's defaults, but for the load ratio and the page size.",
        _with_defaults(SYSTEMS["ours"]),
        "by value",
        HOST_BYTES,
    ),
)
SERVING = {system.name: system for system in _ALL}
COMPARED = tuple(name for name in SERVING if name != TODAY)


@dataclass(frozen=True)
class ServingSettings:
    """system: of SERVING, or ALONE. rate: requests per second. working_set: tokens of all conversations at their end,
    as a share of what the host of a baseline or device and idle workers together hold, whichever is less. requests:
    0: as many as come in RUN_S. length: None: contexts as the paper selects them; else all have so many tokens.
    bursts: factor of the sizes of the workers' bursts; 0: they are idle. What a sensitivity table changes: sharers
    (GPUs that load from the host at once), lent and device (factors of capacities), efficiency (of matrices and
    attention), answers (a factor of their lengths)."""

    system: str
    model: str = "Qwen3-14B"
    dataset: str = "ShareGPT"
    rate: float = 0.5
    requests: int = 0
    working_set: float = 0.75
    length: int | None = None
    bursts: float = 1.0
    seed: int = 1
    sharers: int = 1
    lent: float = 1.0
    device: float = 1.0
    efficiency: float | None = None
    answers: float = 1.0

    @property
    def num_requests(self) -> int:
        return self.requests or max(LEAST_REQUESTS, round(RUN_S * self.rate))

    @property
    def horizon_s(self) -> float:
        """For which requests come, on average."""
        return self.num_requests / self.rate

    def describe(self) -> dict[str, Any]:
        """The fields that identify a run: the first four, and each field that differs from its default."""
        usual = {f.name: f.default for f in fields(self)}
        always = ("system", "model", "dataset", "rate")
        return {name: v for name, v in asdict(self).items() if name in always or v != usual[name]}


@dataclass(frozen=True)
class ServingOutcome:
    """hit_rates: share of prompt tokens found, by tier. queue_s, stall_s, execute_s: summed over requests, and
    together their time to first token: until the launch that gave it began, the part of that in which it waited for
    KV, and the rest. tpot_s: seconds per output token after the first, mean over requests. loads_s, stores_s: of each
    copy to the device, and from it, over the link that it took; what a prefill streams is one copy. borrowed_tokens:
    that were lent on average. workers: by model."""

    num_requests: int
    requests_per_s: float
    mean_ttft_s: float
    p99_ttft_s: float
    tpot_s: float
    hit_rates: dict[str, float]
    queue_s: float
    stall_s: float
    execute_s: float
    loads_s: np.ndarray = field(compare=False, repr=False)
    stores_s: np.ndarray = field(compare=False, repr=False)
    simulated_s: float
    counters: dict[str, int]
    borrowed_tokens: float
    workers: dict[str, WorkerOutcome]
    wall_s: float = field(compare=False)

    def row(self) -> dict[str, Any]:
        return {
            "requests/s": self.requests_per_s,
            "mean TTFT s": self.mean_ttft_s,
            "p99 TTFT s": self.p99_ttft_s,
            "s/token": self.tpot_s,
            **{f"{tier} hits %": 100 * rate for tier, rate in self.hit_rates.items()},
            "queue s": self.queue_s,
            "load s": float(self.loads_s.sum()),
            "stall s": self.stall_s,
            "execute s": self.execute_s,
            "store s": float(self.stores_s.sum()),
            "borrowed tokens": self.borrowed_tokens,
            "workers": {name: asdict(each) for name, each in self.workers.items()},
            "wall s": self.wall_s,
        }


class Phases:
    """What launches and copies took; to be called after every step. prefills: by when a launch ends, the seconds that
    it computes and stalls."""

    def __init__(self, engine: SimulatedEngine, hardware: SimulatedHardware) -> None:
        assert hardware.op_seconds is not None
        self.prefills: dict[float, tuple[float, float]] = {}
        self.loads_s: list[float] = []
        self.stores_s: list[float] = []
        self._engine = engine
        self._op_seconds = hardware.op_seconds
        self._booked = self._account()

    def _account(self) -> np.ndarray:
        executor = self._engine.executor
        return np.array([executor.busy_s, executor.stall_s, executor.stream_s])

    def __call__(self, decision: BatchDecision) -> None:
        for op in decision.ops:
            if isinstance(op, TransferOp):
                seconds = self.loads_s if op.dst == Tier.DEVICE else self.stores_s
                seconds.append(self._op_seconds(op))
        if decision.launch is None:
            return
        before, self._booked = self._booked, self._account()
        busy_s, stall_s, stream_s = (self._booked - before).tolist()
        if decision.launch.mode == LaunchMode.EXTEND:
            self.prefills[self._engine.executor.launch_end(decision.launch.seq)] = busy_s, stall_s
            if stream_s:
                self.loads_s.append(stream_s)


class BorrowedMean:
    """The mean number of slabs over time."""

    def __init__(self, borrowed: SimulatedBorrowed | None, clock: Clock) -> None:
        self._borrowed, self._clock = borrowed, clock
        self._began = self._at = clock.now
        self._sum = 0.0

    def note(self) -> None:
        if self._borrowed is not None:
            self._sum += self._borrowed.num_mapped * (self._clock.now - self._at)
        self._at = self._clock.now

    @property
    def value(self) -> float:
        return self._sum / max(1e-9, self._at - self._began)


def peer_tokens(master: str, reserved: int = RESERVED_TOKENS) -> int:
    """Tokens of the master that the two other models' GPUs have idle."""
    idle = 0
    for name in MASTERS:
        if name != master:
            worker = MODELS[name]
            free = max(0, device_tokens(worker, H20X4.gpu) - reserved)
            idle += free * worker.kv_bytes_per_token // MODELS[master].kv_bytes_per_token
    return idle


def simulate(settings: ServingSettings) -> ServingOutcome:
    """Warm up, run to the end, and check that every request of all engines was answered in full."""
    begin = time.perf_counter()
    cluster = Cluster(COSTS)
    is_alone = settings.system == ALONE
    serving = SERVING["ours" if is_alone else settings.system]
    workers = None
    if is_alone or serving.peers:
        workers = Workers(cluster, [name for name in MASTERS if name != settings.model], lends=not is_alone)
    if is_alone:
        assert workers is not None
        workers.begin(settings.seed, cluster.clock.now, settings.horizon_s, settings.bursts)
        cluster.run()
        return _outcome_of_workers(workers, cluster.clock.now, time.perf_counter() - begin)
    workload = workload_of(settings)
    master, hardware, borrowed = _master(cluster, settings, workload, workers)
    # What workers keep for a while after their start comes to be lent.
    cluster.run(2 * WINDOW_S)
    master.begin(begun(workload).source())
    cluster.run()
    started = cluster.clock.now
    before = master.core.scheduler.counters
    workload = from_now(workload, started)
    phases, lent = Phases(master, hardware), BorrowedMean(borrowed, cluster.clock)

    def after_step(decision: BatchDecision) -> None:
        phases(decision)
        lent.note()

    master.begin(workload.source(), after_step)
    if workers is not None:
        workers.begin(settings.seed, started, settings.horizon_s, settings.bursts)
    cluster.run()
    times = master.times
    check_answers(times, workload)
    counters = master.core.scheduler.counters - before
    ttft = np.array([t.ttft for t in times.values()])
    execute_s, stall_s = np.array([phases.prefills[t.tokens[0]] for t in times.values()]).sum(axis=0).tolist()
    slab_tokens = SLAB_BYTES // (PAGE * MODELS[settings.model].kv_bytes_per_token) * PAGE
    ended = max(t.tokens[-1] for t in times.values())
    return ServingOutcome(
        num_requests=len(times),
        requests_per_s=len(times) / (ended - started),
        mean_ttft_s=float(ttft.mean()),
        p99_ttft_s=percentiles(ttft.tolist(), 99)[0],
        tpot_s=token_seconds(times.values()),
        hit_rates={t: counters[f"hit_tokens_{t}"] / counters["prompt_tokens"] for t in ("device", "peer", "host")},
        queue_s=float(ttft.sum()) - execute_s - stall_s,
        stall_s=stall_s,
        execute_s=execute_s,
        loads_s=np.array(phases.loads_s),
        stores_s=np.array(phases.stores_s),
        simulated_s=ended - started,
        counters=dict(sorted(counters.items())),
        borrowed_tokens=lent.value * slab_tokens,
        workers=workers.outcomes() if workers is not None else {},
        wall_s=time.perf_counter() - begin,
    )


def _outcome_of_workers(workers: Workers, simulated_s: float, wall_s: float) -> ServingOutcome:
    none = np.empty(0)
    return ServingOutcome(
        0, 0.0, 0.0, 0.0, 0.0, {}, 0.0, 0.0, 0.0, none, none, simulated_s, {}, 0.0, workers.outcomes(), wall_s
    )


def _master(
    cluster: Cluster, settings: ServingSettings, workload: Workload, workers: Workers | None
) -> tuple[SimulatedEngine, SimulatedHardware, SimulatedBorrowed | None]:
    serving, model, machine = SERVING[settings.system], MODELS[settings.model], _machine(settings)
    system, page_size = serving.system, serving.system.page_size
    device = int(device_tokens(model, machine.gpu) * settings.device)
    longest = workload.stats().max_total
    assert longest < device, f"a conversation grows to {longest} tokens, and the device holds {device}"
    sizes: dict[str, Any] = {"chunked_prefill_size": CHUNK_TOKENS, "max_prefill_tokens": MAX_PREFILL_TOKENS}
    host = page_size if serving.host_bytes is None else host_tokens(model, serving.host_bytes)
    borrowed = None
    if serving.peers:
        assert workers is not None
        page_bytes = page_size * model.kv_bytes_per_token
        slab_pages = SLAB_BYTES // page_bytes
        num_places = int(settings.lent * sum(workers.num_slabs.values()))
        options = BorrowedOptions(num_wanted=0)
        if serving.peers == "all":
            # Worth more than whatever a worker caches.
            options = BorrowedOptions(value_us=1 << 40)
            # Of the room that idle workers lend.
            idle_pages = int(settings.lent * peer_tokens(settings.model)) // PAGE
            device_pages = device // page_size * model.num_layers
            streamed, regular = layer_stream_sizes(device_pages, [idle_pages], model.num_layers)
            device = regular * page_size
            sizes["layer_stream"] = LayerStreamConfig(1, streamed, max_resident_tokens=STREAMED_TOKENS)
            sizes |= dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens"), STREAM_CHUNK_TOKENS)
            sizes["peers_written_through"] = True
        else:
            sizes["borrowing"] = BorrowingConfig(COSTS.timing.demand, COSTS.timing.idle)
        sizes["slabs"] = slab_runs(num_places, slab_pages)
        sizes["num_peer_tokens"] = num_places * slab_pages * page_size
        borrowed = cluster.borrow("master", list(workers.num_slabs), num_places, SLAB_BYTES, page_bytes, options)
    config = system.config(
        model,
        machine,
        page_size,
        context_len=longest + 1,
        num_device_tokens=device,
        num_host_tokens=host,
        **sizes,
    )
    hardware = system.hardware(model, machine, page_size)
    master = SimulatedEngine(config, hardware, cluster.clock, borrowed)
    cluster.add(master)
    if workers is not None and borrowed is not None:
        workers.traffic.watch(master, borrowed)
    return master, hardware, borrowed


def workload_of(settings: ServingSettings) -> Workload:
    """The same for all systems."""
    model = MODELS[settings.model]
    device = device_tokens(model, H20X4.gpu)
    held = min(host_tokens(model, HOST_BYTES), device + peer_tokens(settings.model))
    spec = DATASETS[settings.dataset]
    growth = settings.num_requests * (spec.mean_message + spec.mean_out * settings.answers)
    return spec.generate(
        settings.seed,
        settings.rate,
        settings.num_requests,
        LENGTHS[settings.model] if settings.length is None else (settings.length, settings.length + 1),
        settings.working_set * held - growth,
        settings.answers,
    )


def _machine(settings: ServingSettings) -> Hardware:
    machine = loading_at_once(H20X4, settings.sharers)
    if settings.efficiency is None:
        return machine
    gpu = replace(machine.gpu, matmul_efficiency=settings.efficiency, attention_efficiency=settings.efficiency)
    return replace(machine, gpu=gpu)


def warm_up(sim: Simulation, workload: Workload) -> Workload:
    """Compute the turns so far (5.1: "the initial rounds"), one conversation after another. Their KV stays on the
    tiers where that leaves it. Returns the workload, beginning now."""
    sim.run(begun(workload).source())
    return from_now(workload, sim.now)


def begun(workload: Workload) -> Workload:
    """The turns so far, one conversation after another. Its requests have the ids of later ones."""
    said = (Turn(np.empty(0, np.int32), 1),)
    first = tuple(replace(c, start=0.0, turns=said) for c in workload.conversations)
    return replace(workload, conversations=first, max_in_flight=1)


def from_now(workload: Workload, now: float) -> Workload:
    later = tuple(
        replace(c, start=c.start + now, turns=tuple(replace(t, earliest=t.earliest + now) for t in c.turns))
        for c in workload.conversations
    )
    return replace(workload, conversations=later)
