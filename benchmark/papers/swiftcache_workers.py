"""SwiftCache's workers on the simulator: engines with bursts of work of their own, which lend what they have idle.

A cluster on one clock (`sglang.simulator.cluster`): the schedulers, `DeviceLending`, `Borrowing` and the leases are
the real ones. A master's copies to and from a worker's memory take bandwidth of that memory from it. All numbers are
simulated. What the paper does not print is set here, and was before the first run (docs/records/papers.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from benchmark.common import percentiles
from benchmark.papers.systems import SYSTEMS
from benchmark.simulator.cost_models import ModelShape, pass_cost, prefill_seconds
from benchmark.simulator.hardware import simulated_hardware
from benchmark.simulator.profiles import H20X4, MODELS, device_tokens
from benchmark.simulator.smoke import check_answers
from benchmark.simulator.workloads import SHAREGPT_LONG, Conversation, Turn, Workload, random_tokens

from sglang.serving_benchmark.draws import lengths_with_mean, poisson_times
from sglang.simulator.cluster import Cluster, PeerCosts, SimulatedBorrowed
from sglang.simulator.simulation import RequestTimes, SimulatedEngine
from sglang.srt.mem_cache.transfer import D2P, P2D, P2H, Tier
from sglang.srt.model_executor.launch import Launch, LaunchMode
from sglang.srt.peer.lending import LendingConfig

PAGE = 16
# On both sides. A multiple of LWM's and Qwen3-32B's pages, and less than two pages of padding for Qwen3-14B.
SLAB_BYTES = 256 << 20
# A worker keeps room for one request of 40 K tokens, the most that the Qwen3 models permit.
RESERVED_TOKENS = 40_960
# Algorithm 1: "e.g., 1 minute".
WINDOW_S = 60.0
# Overwriting a slab is a write at the memory's rate.
COSTS = PeerCosts(scrub_s=SLAB_BYTES / (H20X4.gpu.hbm_bytes_per_s * H20X4.gpu.hbm_efficiency))

# Bursts begin at Poisson times, so far apart on average. The conversations of one begin within BEGIN_S, so many that
# computing their contexts takes half of that time, and that they fill at most half of the device. They have three
# turns TURN_S apart, so that a burst is over after 90 s.
BURST_S, BEGIN_S, LOAD, FILL = 60.0, 30.0, 0.5, 0.5
NUM_TURNS, TURN_S = 3, 30.0
# Tokens of a worker's contexts; messages and answers are ShareGPT's.
CONTEXTS = (2_000, 20_000)


@dataclass(frozen=True)
class WorkerOutcome:
    """One worker's own requests. tpot_s: seconds per output token after the first, mean over requests. hit_rate: of
    prompt tokens. asked_back: slabs that it recalled."""

    num_requests: int
    mean_ttft_s: float
    p99_ttft_s: float
    tpot_s: float
    hit_rate: float
    asked_back: int


class PeerTraffic:
    """Seconds in which a master's copies use a worker's memory. They are spread over workers as the slabs are."""

    def __init__(self) -> None:
        self._master: SimulatedEngine | None = None
        self._borrowed: SimulatedBorrowed | None = None

    def watch(self, master: SimulatedEngine, borrowed: SimulatedBorrowed) -> None:
        self._master, self._borrowed = master, borrowed

    def between(self, worker: str, start: float, end: float) -> float:
        if self._master is None or self._borrowed is None:
            return 0.0
        links = [self._master.links[name] for name in (P2D, D2P, P2H)]
        seconds = sum(link.busy_between(start, end) for link in links)
        seconds += self._master.executor.streamed_between(Tier.PEER, start, end)
        return seconds * self._borrowed.share_of(worker) if seconds else 0.0


class Workers:
    """Engines of these models on a cluster. lends: else they are alone."""

    def __init__(self, cluster: Cluster, names: Sequence[str], lends: bool) -> None:
        self.traffic = PeerTraffic()
        self.num_slabs: dict[str, int] = {}
        self._engines: dict[str, SimulatedEngine] = {}
        self._workloads: dict[str, Workload] = {}
        self._counters: dict[str, Counter[str]] = {}
        for name in names:
            model = MODELS[name]
            slab_pages = SLAB_BYTES // (PAGE * model.kv_bytes_per_token)
            num_slabs = device_tokens(model, H20X4.gpu) * model.kv_bytes_per_token // SLAB_BYTES
            self.num_slabs[name] = num_slabs
            config = SYSTEMS["ours"].config(
                model,
                H20X4,
                PAGE,
                context_len=RESERVED_TOKENS,
                num_device_tokens=num_slabs * slab_pages * PAGE,
                num_host_tokens=0,
            )
            slabs = cluster.lend(name, num_slabs, SLAB_BYTES) if lends else None
            if lends:
                config = replace(
                    config,
                    slabs=slab_runs(num_slabs, slab_pages),
                    lending=LendingConfig(keep_tokens=RESERVED_TOKENS, window_s=WINDOW_S),
                )
            hardware = simulated_hardware(model, H20X4, PAGE)
            contention_s = _contention(model, name, self.traffic)
            self._engines[name] = SimulatedEngine(config, hardware, cluster.clock, slabs, contention_s)
            cluster.add(self._engines[name])

    def begin(self, seed: int, now: float, horizon_s: float, bursts: float) -> None:
        """Bursts come from now on for horizon_s. bursts: factor of their sizes; 0: none come."""
        for i, (name, engine) in enumerate(self._engines.items()):
            self._workloads[name] = burst_workload(name, [seed, i], now, horizon_s, bursts)
            self._counters[name] = engine.core.scheduler.counters.copy()
            engine.begin(self._workloads[name].source())

    def outcomes(self) -> dict[str, WorkerOutcome]:
        found = {}
        for name, engine in self._engines.items():
            if not self._workloads[name].conversations:
                continue
            check_answers(engine.times, self._workloads[name])
            counters = engine.core.scheduler.counters - self._counters[name]
            found[name] = _outcome(list(engine.times.values()), counters)
        return found


def slab_runs(num_slabs: int, slab_pages: int) -> tuple[tuple[int, int], ...]:
    return tuple((i * slab_pages, (i + 1) * slab_pages) for i in range(num_slabs))


def burst_workload(name: str, seed: Sequence[int], now: float, horizon_s: float, bursts: float) -> Workload:
    """Nothing is common to conversations."""
    rng = np.random.default_rng(seed)
    num_most = int(4 + 3 * horizon_s / BURST_S)
    begins = poisson_times(rng, num_most, 1 / BURST_S)
    mean = SHAREGPT_LONG.mean_context(CONTEXTS)
    by_time = LOAD * BEGIN_S / prefill_seconds(MODELS[name], H20X4.gpu, 0, round(mean))
    each = round(bursts * min(by_time, FILL * device_tokens(MODELS[name], H20X4.gpu) / mean))
    talks = []
    for begin in begins[begins < horizon_s].tolist() if each else ():
        lengths = SHAREGPT_LONG.contexts(rng.random(each), CONTEXTS)
        messages = lengths_with_mean(rng, each * NUM_TURNS, SHAREGPT_LONG.mean_message, SHAREGPT_LONG.cv)
        outputs = lengths_with_mean(rng, each * NUM_TURNS, SHAREGPT_LONG.mean_out, SHAREGPT_LONG.cv)
        starts = now + begin + rng.uniform(0, BEGIN_S, each)
        for i, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
            said = range(i * NUM_TURNS, (i + 1) * NUM_TURNS)
            turns = tuple(
                Turn(random_tokens(rng, int(messages[q])), int(outputs[q]), start + t * TURN_S)
                for t, q in enumerate(said)
            )
            talks.append(Conversation(start, random_tokens(rng, length), turns))
    return Workload("bursts", tuple(talks), max_in_flight=None)


def token_seconds(times: Iterable[RequestTimes]) -> float:
    """Per output token after the first, mean over requests."""
    steps = [(t.tokens[-1] - t.tokens[0]) / (len(t.tokens) - 1) for t in times if len(t.tokens) > 1]
    return float(np.mean(steps)) if steps else 0.0


def _contention(model: ModelShape, name: str, traffic: PeerTraffic) -> Callable[[Launch, float, float], float]:
    """By how many seconds a launch is longer as others read or write the memory while it runs."""
    gpu = H20X4.gpu
    left = replace(gpu, hbm_bytes_per_s=gpu.hbm_bytes_per_s - H20X4.peer_link.wire / gpu.hbm_efficiency)

    def seconds(launch: Launch, start: float, cost: float) -> float:
        busy_s = traffic.between(name, start, start + cost)
        if not busy_s:
            return 0.0
        decode = launch.mode == LaunchMode.DECODE
        slow, usual = (
            pass_cost(model, on, launch.starts, launch.lens, int(launch.samples.sum()), decode).seconds
            for on in (left, gpu)
        )
        return (slow - usual) * busy_s / cost

    return seconds


def _outcome(times: list[RequestTimes], counters: Counter[str]) -> WorkerOutcome:
    ttft = [t.ttft for t in times]
    hits = sum(count for name, count in counters.items() if name.startswith("hit_tokens_"))
    return WorkerOutcome(
        len(times),
        float(np.mean(ttft)),
        percentiles(ttft, 99)[0],
        token_seconds(times),
        hits / counters["prompt_tokens"],
        counters["slabs_asked_back"],
    )
