"""One simulated run of the union of the three papers' tiers: `UnionSettings` -> `UnionOutcome`.

Owns the table TIERS: which tiers each row of the figure has. All rows have the same scheduler, kernels and page size,
so that only the tiers differ. All numbers but wall_s are simulated. `Runs` (runs.py) remembers them.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from benchmark.common import percentiles
from benchmark.papers.runs import CHUNK_TOKENS, MAX_PREFILL_TOKENS
from benchmark.papers.shadowserve_runs import SECRET
from benchmark.papers.shadowserve_systems import STREAMED_CHUNKS, Assumptions
from benchmark.papers.swiftcache_runs import HOST_BYTES, LENGTHS, peer_tokens, warm_up
from benchmark.papers.systems import SYSTEMS
from benchmark.simulator.cost_models import ModelShape
from benchmark.simulator.profiles import CHUNK_TOKENS as BLOCK_TOKENS
from benchmark.simulator.profiles import H20X4, L40S_BLUEFIELD3, MODELS, device_tokens, host_tokens
from benchmark.simulator.smoke import check_answers
from benchmark.simulator.workloads import L_EVAL, Turn, Workload

from benchmark.papers import shadowserve_systems
from sglang.simulator.simulation import SimulatedHardware, Simulation
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.placement import WRITE_POLICIES
from sglang.srt.mem_cache.transfer import STORAGE_LINKS, TIER_NAMES, Tier
from sglang.srt.model_executor.launch import LaunchMode

MODEL = "Qwen3-14B"
# SwiftCache's four H20s, each with ShadowServe's SmartNIC.
MACHINE = replace(H20X4, name="h20x4-bluefield3", nic=L40S_BLUEFIELD3.nic)
# As in SwiftCache's figures.
PAGE_SIZE = 16
# ShadowServe 6: of the link that its figures show first.
NETWORK_BYTES_PER_S = 20e9 / 8
# Without a host tier, what the remote tier lands in: so many of the longest conversations.
LANDING_CONVERSATIONS = 2
DEFAULT_WRITE_POLICY = "auto" if "auto" in WRITE_POLICIES else "write_through"


@dataclass(frozen=True)
class Tiers:
    """A row of the figure. name: as in its legend; paper: whose tiers they are."""

    name: str
    paper: str
    peers: bool = False
    host: bool = False
    remote: bool = False
    # The device holds everything.
    unlimited: bool = False

    def describe(self) -> str:
        """For the list of systems."""
        if self.unlimited:
            return "A device with room for everything, as a bound."
        tiers = ["device", *(n for n, there in (("peers", self.peers), ("host", self.host)) if there)]
        return f"{', '.join([*tiers, 'remote'] if self.remote else tiers)} ({self.paper})."

    def is_part_of(self, other: Tiers) -> bool:
        """Whether the other row has all tiers of this one."""
        mine, theirs = ((t.peers, t.host, t.remote) for t in (self, other))
        return not self.unlimited and all(b or not a for a, b in zip(mine, theirs, strict=True))


LACKS = (
    "Requests of workers and of other servers; the remote store's own time, its limit, and what quantizing loses; a "
    "disk. Without a host tier the remote tier lands in host memory for two conversations, which caches too."
)
_ALL = (
    Tiers("device", "no paper"),
    Tiers("host", "Strata", host=True),
    Tiers("peers", "SwiftCache", peers=True),
    Tiers("remote", "ShadowServe", remote=True),
    Tiers("peers+host", "SwiftCache, Strata", peers=True, host=True),
    Tiers("host+remote", "Strata, ShadowServe", host=True, remote=True),
    Tiers("peers+remote", "SwiftCache, ShadowServe", peers=True, remote=True),
    Tiers("union", "all three", peers=True, host=True, remote=True),
    Tiers("unlimited", "no paper", unlimited=True),
)
TIERS = {tiers.name: tiers for tiers in _ALL}


@dataclass(frozen=True)
class UnionSettings:
    """One run."""

    # A name of TIERS.
    tiers: str
    # Tokens of all conversations at their end, over the sum of device, peers and host.
    working_set: float
    # Requests per second.
    rate: float
    # Of each conversation on average; every one is equally probable to come next.
    turns: int = 4
    load_ratio: float | str = "auto"
    write_policy: str = DEFAULT_WRITE_POLICY
    # Factor of all capacities, and so of the number of conversations.
    share: float = 1.0
    seed: int = 1
    # Of `Runs`.
    dataset: str = L_EVAL.name

    def describe(self) -> dict[str, Any]:
        """The fields that identify a run: the first three, and each field that differs from its default."""
        usual = {f.name: f.default for f in fields(self)}
        always = ("tiers", "working_set", "rate")
        return {name: v for name, v in asdict(self).items() if name in always or v != usual[name]}


@dataclass(frozen=True)
class UnionOutcome:
    """hit_rates: share of prompt tokens found, by tier, the nearest first. bound: the share that a cache of this
    size can find when every conversation is equally probable to come next."""

    num_requests: int
    requests_per_s: float
    output_tokens_per_s: float
    mean_ttft_s: float
    p99_ttft_s: float
    hit_rates: dict[str, float]
    bound: float
    stall_s: float
    simulated_s: float
    counters: dict[str, int]
    wall_s: float = field(compare=False)

    @property
    def hit_rate(self) -> float:
        return sum(self.hit_rates.values())

    def row(self) -> dict[str, Any]:
        return {
            "requests/s": self.requests_per_s,
            "tokens/s": self.output_tokens_per_s,
            "mean TTFT s": self.mean_ttft_s,
            "p99 TTFT s": self.p99_ttft_s,
            **{f"{tier} hits %": 100 * rate for tier, rate in self.hit_rates.items()},
            "hits %": 100 * self.hit_rate,
            "bound %": 100 * self.bound,
            "stall s": self.stall_s,
            "wall s": self.wall_s,
        }


@dataclass(frozen=True)
class Capacities:
    """Tokens of each tier of the machine."""

    device: int
    peers: int
    host: int

    @property
    def total(self) -> int:
        return self.device + self.peers + self.host

    def of(self, tiers: Tiers) -> int:
        """The sum of a row's tiers, less the remote one, which has no limit."""
        return self.device + self.peers * tiers.peers + self.host * tiers.host


def capacities(share: float = 1.0) -> Capacities:
    model = MODELS[MODEL]
    sizes = (device_tokens(model, MACHINE.gpu), peer_tokens(MODEL), host_tokens(model, HOST_BYTES))
    return Capacities(*(int(size * share) for size in sizes))


def workload_of(settings: UnionSettings) -> Workload:
    """The same for all rows of the figure. Every conversation is used once at least."""
    wanted = settings.working_set * capacities(settings.share).total
    between = LENGTHS[MODEL]
    growth = settings.turns * (L_EVAL.mean_message + L_EVAL.mean_out)
    n = max(1, round(wanted / (L_EVAL.mean_context(between) + growth)))
    num_tokens = wanted - n * growth
    evenly = L_EVAL.generate(settings.seed, settings.rate, n * settings.turns, between, num_tokens, 1.0)
    rng = np.random.default_rng(settings.seed)
    whose = rng.permutation(np.concatenate((np.arange(n), rng.integers(0, n, n * (settings.turns - 1)))))
    return deal(evenly, whose)


def deal(workload: Workload, whose: np.ndarray) -> Workload:
    """The same turns at the same times. whose: of each turn, in order of time, the conversation that has it now."""
    turns: list[list[Turn]] = [[] for _ in workload.conversations]
    by_time = sorted((turn for talk in workload.conversations for turn in talk.turns), key=lambda turn: turn.earliest)
    for i, turn in zip(whose.tolist(), by_time, strict=True):
        turns[i].append(turn)
    talks = [
        replace(talk, start=own[0].earliest, turns=tuple(own))
        for talk, own in zip(workload.conversations, turns, strict=True)
    ]
    return replace(workload, conversations=tuple(talks))


def simulate(settings: UnionSettings) -> UnionOutcome:
    """Warm up, run to the end, and check that every request was answered in full."""
    begin = time.perf_counter()
    tiers, model = TIERS[settings.tiers], MODELS[MODEL]
    workload = workload_of(settings)
    longest = workload.stats().max_total
    sizes = capacities(settings.share)
    working_set = settings.working_set * sizes.total
    assert longest < sizes.device, f"a conversation grows to {longest} tokens, and the device holds {sizes.device}"
    host = sizes.host if tiers.host else LANDING_CONVERSATIONS * longest if tiers.remote else PAGE_SIZE
    has_host = tiers.host or tiers.peers or tiers.remote
    policy = replace(SYSTEMS["ours"].policy, load_ratio=settings.load_ratio, write_policy=settings.write_policy)
    system = replace(SYSTEMS["ours"], policy=policy, has_host=has_host)
    config = system.config(
        model,
        MACHINE,
        PAGE_SIZE,
        context_len=longest + 1,
        num_device_tokens=int(2 * working_set) + longest if tiers.unlimited else sizes.device,
        num_host_tokens=host,
        num_peer_tokens=sizes.peers if tiers.peers else 0,
        chunked_prefill_size=CHUNK_TOKENS,
        max_prefill_tokens=MAX_PREFILL_TOKENS,
        storage=_storage(host // PAGE_SIZE, settings.write_policy) if tiers.remote else None,
    )
    sim = Simulation(config, _hardware(model, tiers.remote))
    workload = warm_up(sim, workload)
    started, before, stall_s = sim.now, sim.core.scheduler.counters.copy(), sim.executor.stall_s
    times = sim.run(workload.source())
    check_answers(times, workload)
    counters = sim.core.scheduler.counters.copy()
    counters.subtract(before)
    elapsed = sim.now - started
    ttft = [t.ttft for t in times.values()]
    found = {name: counters[f"hit_tokens_{name}"] / counters["prompt_tokens"] for name in TIER_NAMES}
    is_enough = tiers.unlimited or tiers.remote
    return UnionOutcome(
        num_requests=len(times),
        requests_per_s=len(times) / elapsed,
        output_tokens_per_s=counters["generation_tokens"] / elapsed,
        mean_ttft_s=float(np.mean(ttft)),
        p99_ttft_s=percentiles(ttft, 99)[0],
        hit_rates={name: rate for name, rate in found.items() if name != TIER_NAMES[Tier.DISK]},
        bound=1.0 if is_enough else min(1.0, sizes.of(tiers) / working_set),
        stall_s=sim.executor.stall_s - stall_s,
        simulated_s=elapsed,
        counters=dict(sorted(counters.items())),
        wall_s=time.perf_counter() - begin,
    )


def _storage(num_host_pages: int, write_policy: str) -> StorageSetup:
    """Limits as the server sets them."""
    return StorageSetup(
        backend="simulated",
        setup="",
        secret=SECRET,
        block_tokens=BLOCK_TOKENS,
        limits=StorageLimits.of_host(num_host_pages, BLOCK_TOKENS // PAGE_SIZE, STREAMED_CHUNKS),
        prefetch=PrefetchConfig(threshold=BLOCK_TOKENS),
        write_policy=write_policy,
        tiers=(Tier.REMOTE,),
    )


def _hardware(model: ModelShape, has_remote: bool) -> SimulatedHardware:
    """Peers over NVLink, the host over PCIe, both beside computing. The remote tier streams through the SmartNIC into
    host memory. Writes to it take the network's rate (assumed: compressing keeps up)."""
    if not has_remote:
        return SYSTEMS["ours"].hardware(model, MACHINE, PAGE_SIZE)
    remote, assumed = shadowserve_systems.SYSTEMS["ours"], Assumptions()
    hardware = remote.hardware(model, MACHINE, PAGE_SIZE, NETWORK_BYTES_PER_S, assumed)
    by_links = hardware.interference
    assert by_links is not None

    def interference(mode: LaunchMode, link: str) -> float:
        return 0.0 if link in STORAGE_LINKS else by_links(mode, link)

    rate = NETWORK_BYTES_PER_S / assumed.compressed
    stores = (replace(hardware.stores[0], store_bandwidth=rate),)
    return replace(hardware, interference=interference, stores=stores)
