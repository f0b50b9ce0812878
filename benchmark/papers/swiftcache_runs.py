"""One simulated run of a SwiftCache master: `ServingSettings` -> `ServingOutcome`, and the systems that are compared.
All numbers but wall_s are simulated. `Runs` (runs.py) remembers them.

Workers only lend: what they have idle is there all the time, and their own requests are a cost model (figure 8).
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from benchmark.common import percentiles
from benchmark.papers.runs import CHUNK_TOKENS, MAX_PREFILL_TOKENS
from benchmark.papers.systems import SYSTEMS, System
from benchmark.simulator.cost_models import DMA
from benchmark.simulator.profiles import H20X4, MODELS, Hardware, device_tokens, host_tokens, loading_at_once
from benchmark.simulator.smoke import check_answers
from benchmark.simulator.workloads import L_EVAL, SHAREGPT_LONG, SessionSpec, Turn, Workload

from sglang.simulator.simulation import SimulatedHardware, Simulation
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.mem_cache.transfer import Tier, TransferOp
from sglang.srt.model_executor.launch import LaunchMode

MASTERS = ("LWM-7B", "Qwen3-14B", "Qwen3-32B")
DATASETS: dict[str, SessionSpec] = {spec.name: spec for spec in (SHAREGPT_LONG, L_EVAL)}
# 5.1: "greater than 20K, with no upper limit", and "approximately 20K to 40K". 100,000 for LWM is ours: a running
# request lies on the device as a whole here, which has room for 135,000 tokens.
LENGTHS = {"LWM-7B": (20_000, 100_000), "Qwen3-14B": (20_000, 37_000), "Qwen3-32B": (20_000, 37_000)}
# 5.1, of both baselines; 128 GB of host memory hold it once, so the master has all of it.
HOST_BYTES = 96e9
# A worker keeps room for one request of 40 K tokens, the most that the Qwen3 models permit (Algorithm 1 with one such
# request in the window), and lends the rest.
RESERVED_TOKENS = 40_960


@dataclass(frozen=True)
class ServingSystem:
    """name, models, lacks: as in `System`. peers: whether workers lend it what they have idle. host_bytes: None: a
    single page, which the engine wants."""

    name: str
    models: str
    lacks: str
    system: System
    peers: bool
    host_bytes: float | None


_KERNELS = "SGLang (HiCache, kernels)"
_ALL = (
    ServingSystem(
        "SGLang (HiCache)",
        "Strata's SGLang-HiCache: a copy per page, layer, K and V; page size 32; layer-wise overlap; write-through.",
        "The version measured (0.5.3) can move pages by GPU kernels: see the next row.",
        SYSTEMS["SGLang-HiCache"],
        False,
        HOST_BYTES,
    ),
    ServingSystem(
        _KERNELS,
        "The same with GPU-assisted I/O at page size 1: what a later HiCache can do. In sensitivity only.",
        "Nothing known.",
        SYSTEMS["Strata-IO"],
        False,
        HOST_BYTES,
    ),
    ServingSystem(
        "vLLM (LMCache)",
        "Strata's vLLM-LMCache: the wire's rate, a launch waits for all of it, one step at a time; page size 32.",
        "Chunks of 256 tokens, a contiguous buffer, stores that block: all of it favours this row.",
        SYSTEMS["vLLM-LMCache"],
        False,
        HOST_BYTES,
    ),
    ServingSystem(
        "SwiftCache",
        "Workers' memory instead of the host's, copies over NVLink, layer by layer beside computing; page size 16; "
        "first come, first served. The host tier is one page.",
        "The layer stream cache: a running request's KV is on the device as a whole, and waits for room there. KV "
        "goes to workers when it leaves the device, not when it is computed. Both are against this row.",
        replace(SYSTEMS["SGLang-HiCache"], load=DMA, page_size=16),
        True,
        None,
    ),
    ServingSystem(
        "ours",
        "Device, workers, then the host's 96 GB by GPU kernels; all mechanisms of Strata's row of that name; page "
        "size 16.",
        "Nothing: these are the engine's defaults, but for the load ratio and the page size.",
        replace(SYSTEMS["ours"], page_size=16),
        True,
        HOST_BYTES,
    ),
)
SERVING = {system.name: system for system in _ALL}
COMPARED = tuple(name for name in SERVING if name != _KERNELS)


@dataclass(frozen=True)
class ServingSettings:
    """rate: requests per second. working_set: tokens of all conversations at their end, as a share of what the host
    of a baseline or device and workers together hold, whichever is less. What a sensitivity table changes: sharers
    (GPUs that load from the host at once), lend_device (whether workers lend as many tokens more as the device has),
    lent and device (factors of capacities), efficiency (of matrices and attention), answers (a factor of their
    lengths)."""

    system: str
    model: str = "Qwen3-14B"
    dataset: str = "ShareGPT"
    rate: float = 0.5
    requests: int = 100
    working_set: float = 0.95
    seed: int = 1
    sharers: int = 1
    lend_device: bool = False
    lent: float = 1.0
    device: float = 1.0
    efficiency: float | None = None
    answers: float = 1.0

    def describe(self) -> dict[str, Any]:
        """The fields that identify a run: the first four, and each field that differs from its default."""
        usual = {f.name: f.default for f in fields(self)}
        always = ("system", "model", "dataset", "rate")
        return {name: v for name, v in asdict(self).items() if name in always or v != usual[name]}


@dataclass(frozen=True)
class ServingOutcome:
    """hit_rates: share of prompt tokens found, by tier. queue_s, stall_s, execute_s: summed over requests, and
    together their time to first token: until the launch that gave it began, the part of that in which it waited for
    KV, and the rest. loads_s, stores_s: of each copy to the device, and from it, over the link that it took."""

    num_requests: int
    requests_per_s: float
    mean_ttft_s: float
    p99_ttft_s: float
    hit_rates: dict[str, float]
    queue_s: float
    stall_s: float
    execute_s: float
    loads_s: np.ndarray = field(compare=False, repr=False)
    stores_s: np.ndarray = field(compare=False, repr=False)
    simulated_s: float
    counters: dict[str, int]
    wall_s: float = field(compare=False)

    def row(self) -> dict[str, Any]:
        return {
            "requests/s": self.requests_per_s,
            "mean TTFT s": self.mean_ttft_s,
            "p99 TTFT s": self.p99_ttft_s,
            **{f"{tier} hits %": 100 * rate for tier, rate in self.hit_rates.items()},
            "queue s": self.queue_s,
            "load s": float(self.loads_s.sum()),
            "stall s": self.stall_s,
            "execute s": self.execute_s,
            "store s": float(self.stores_s.sum()),
            "wall s": self.wall_s,
        }


class Phases:
    """What launches and copies took; to be called after every step. prefills: by when a launch ends, the seconds that
    it computes and stalls."""

    def __init__(self, sim: Simulation, hardware: SimulatedHardware) -> None:
        assert hardware.op_seconds is not None
        self.prefills: dict[float, tuple[float, float]] = {}
        self.loads_s: list[float] = []
        self.stores_s: list[float] = []
        self._sim = sim
        self._op_seconds = hardware.op_seconds
        self._booked = sim.executor.busy_s, sim.executor.stall_s

    def __call__(self, decision: BatchDecision) -> None:
        for op in decision.ops:
            if isinstance(op, TransferOp):
                seconds = self.loads_s if op.dst == Tier.DEVICE else self.stores_s
                seconds.append(self._op_seconds(op))
        if decision.launch is None:
            return
        executor = self._sim.executor
        busy_s, stall_s = executor.busy_s - self._booked[0], executor.stall_s - self._booked[1]
        self._booked = executor.busy_s, executor.stall_s
        if decision.launch.mode == LaunchMode.EXTEND:
            self.prefills[executor.launch_end(decision.launch.seq)] = busy_s, stall_s


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
    """Warm up, run to the end, and check that every request was answered in full."""
    begin = time.perf_counter()
    serving, model = SERVING[settings.system], MODELS[settings.model]
    system, machine = serving.system, _machine(settings)
    page_size = system.page_size
    workload = workload_of(settings)
    device = int(device_tokens(model, machine.gpu) * settings.device)
    host = page_size if serving.host_bytes is None else host_tokens(model, serving.host_bytes)
    longest = workload.stats().max_total
    assert longest < device, f"a conversation grows to {longest} tokens, and the device holds {device}"
    config = system.config(
        model,
        machine,
        page_size,
        context_len=longest + 1,
        num_device_tokens=device,
        num_host_tokens=host,
        num_peer_tokens=_peer_tokens(settings, device) if serving.peers else 0,
        chunked_prefill_size=CHUNK_TOKENS,
        max_prefill_tokens=MAX_PREFILL_TOKENS,
    )
    hardware = system.hardware(model, machine, page_size)
    sim = Simulation(config, hardware)
    workload = warm_up(sim, workload)
    started, before = sim.now, _counters(sim)
    phases = Phases(sim, hardware)
    times = sim.run(workload.source(), after_step=phases)
    check_answers(times, workload)
    counters = _counters(sim) - before
    ttft = np.array([t.ttft for t in times.values()])
    execute_s, stall_s = np.array([phases.prefills[t.tokens[0]] for t in times.values()]).sum(axis=0).tolist()
    return ServingOutcome(
        num_requests=len(times),
        requests_per_s=len(times) / (sim.now - started),
        mean_ttft_s=float(ttft.mean()),
        p99_ttft_s=percentiles(ttft.tolist(), 99)[0],
        hit_rates={t: counters[f"hit_tokens_{t}"] / counters["prompt_tokens"] for t in ("device", "peer", "host")},
        queue_s=float(ttft.sum()) - execute_s - stall_s,
        stall_s=stall_s,
        execute_s=execute_s,
        loads_s=np.array(phases.loads_s),
        stores_s=np.array(phases.stores_s),
        simulated_s=sim.now - started,
        counters=dict(sorted(counters.items())),
        wall_s=time.perf_counter() - begin,
    )


def workload_of(settings: ServingSettings) -> Workload:
    """The same for all systems."""
    model = MODELS[settings.model]
    device = device_tokens(model, H20X4.gpu)
    held = min(host_tokens(model, HOST_BYTES), device + peer_tokens(settings.model))
    spec = DATASETS[settings.dataset]
    growth = settings.requests * (spec.mean_message + spec.mean_out * settings.answers)
    return spec.generate(
        settings.seed,
        settings.rate,
        settings.requests,
        LENGTHS[settings.model],
        settings.working_set * held - growth,
        settings.answers,
    )


def _peer_tokens(settings: ServingSettings, device: int) -> int:
    return int(peer_tokens(settings.model) * settings.lent) + (device if settings.lend_device else 0)


def _counters(sim: Simulation) -> Counter[str]:
    return sim.core.scheduler.counters


def _machine(settings: ServingSettings) -> Hardware:
    machine = loading_at_once(H20X4, settings.sharers)
    if settings.efficiency is None:
        return machine
    gpu = replace(machine.gpu, matmul_efficiency=settings.efficiency, attention_efficiency=settings.efficiency)
    return replace(machine, gpu=gpu)


def warm_up(sim: Simulation, workload: Workload) -> Workload:
    """Compute the turns so far (5.1: "the initial rounds"), one conversation after another. Their KV stays on the
    tiers where that leaves it. Returns the workload, beginning now. The warm-up's requests have the ids of later
    ones."""
    said = (Turn(np.empty(0, np.int32), 1),)
    first = tuple(replace(c, start=0.0, turns=said) for c in workload.conversations)
    sim.run(replace(workload, conversations=first, max_in_flight=1).source())
    later = tuple(
        replace(c, start=c.start + sim.now, turns=tuple(replace(t, earliest=t.earliest + sim.now) for t in c.turns))
        for c in workload.conversations
    )
    return replace(workload, conversations=later)
