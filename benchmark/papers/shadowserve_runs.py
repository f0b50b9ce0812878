"""One simulated run of ShadowServe's evaluation: `RemoteSettings` -> `RemoteOutcome`. All numbers but wall_s are
simulated. `Runs` (runs.py) remembers them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from benchmark.papers.runs import ALL_AT_ONCE
from benchmark.papers.shadowserve_systems import SYSTEMS, Assumptions
from benchmark.simulator.hardware import scheduler_config
from benchmark.simulator.profiles import CHUNK_TOKENS, L40S_BLUEFIELD3, MODELS, Hardware, device_tokens
from benchmark.simulator.smoke import check_answers
from benchmark.simulator.workloads import LONGBENCH_NARRATIVEQA, TRIVIAQA, Workload

from sglang.simulator.simulation import Simulation
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.block_keys import BlockKeys

DATASETS = {"TriviaQA": TRIVIAQA, "NarrativeQA": LONGBENCH_NARRATIVEQA}
# vLLM's page size, which all systems here share.
PAGE_SIZE = 16
# One prefill batch of vLLM 0.8.1, without chunked prefill (4.1): any prompt here is shorter.
BATCH_TOKENS = 16_384
# Requests per second that never meet: what the paper calls unloaded. Fewer of them tell the mean.
UNLOADED, UNLOADED_QUERIES = 0.1, 30
SECRET = b"shadowserve"


@dataclass(frozen=True)
class RemoteSettings:
    """gbps: of the network. rate: requests per second, ALL_AT_ONCE for the peak. stored: `all` prompts, or `mixed`: a
    third of them whole, a third of them up to a block drawn at random, and a third not at all. queries: None: the
    data set's. What a sensitivity table changes: those of `Assumptions`, None for as usual; efficiency (of matrices
    and attention), device (a factor of its capacity)."""

    system: str
    model: str = "Llama-3.1-8B"
    dataset: str = "NarrativeQA"
    gbps: float = 20.0
    output: int = 32
    rate: float = ALL_AT_ONCE
    stored: str = "all"
    queries: int | None = None
    seed: int = 1
    compressed: float | None = None
    cachegen_size: float | None = None
    network: float | None = None
    slower: float | None = None
    loss: float | None = None
    efficiency: float | None = None
    device: float = 1.0

    @property
    def assumptions(self) -> Assumptions:
        changed = {f.name: getattr(self, f.name) for f in fields(Assumptions)}
        return replace(Assumptions(), **{name: value for name, value in changed.items() if value is not None})

    def describe(self) -> dict[str, Any]:
        """The fields that identify a run: the first six, and each field that differs from its default."""
        always = ("system", "model", "dataset", "gbps", "output", "rate")
        values = asdict(self)
        usual = {f.name: f.default for f in fields(self)}
        shown = {name: v for name, v in values.items() if name in always or v != usual[name]}
        return shown | {"rate": "all at once" if self.rate == ALL_AT_ONCE else self.rate}


@dataclass(frozen=True)
class RemoteOutcome:
    """mean_tpot_s: mean over requests of the time between their tokens. remote_share: of prompt tokens, those that
    were fetched. link_share: of the whole run, that in which something is fetched."""

    num_requests: int
    requests_per_s: float
    mean_ttft_s: float
    p95_ttft_s: float
    mean_tpot_s: float
    remote_share: float
    link_share: float
    busy_share: float
    simulated_s: float
    counters: dict[str, int]
    wall_s: float = field(compare=False)

    def row(self) -> dict[str, Any]:
        return {
            "requests/s": self.requests_per_s,
            "mean TTFT s": self.mean_ttft_s,
            "p95 TTFT s": self.p95_ttft_s,
            "mean TPOT ms": 1e3 * self.mean_tpot_s,
            "fetched %": 100 * self.remote_share,
            "link busy %": 100 * self.link_share,
            "GPU busy %": 100 * self.busy_share,
            "wall s": self.wall_s,
        }


def simulate(settings: RemoteSettings) -> RemoteOutcome:
    begin = time.perf_counter()
    system, model = SYSTEMS[settings.system], MODELS[settings.model]
    machine = _machine(settings)
    queries = settings.queries
    if settings.rate == UNLOADED:
        queries = min(queries or UNLOADED_QUERIES, UNLOADED_QUERIES)
    workload = DATASETS[settings.dataset].generate(settings.seed, settings.rate, settings.output, queries)
    longest = workload.stats().max_total
    fetches = system.plane is not None
    # Nothing is written, because no prompt is used twice. No request stops waiting.
    storage = StorageSetup(
        backend="simulated",
        setup="",
        secret=SECRET,
        block_tokens=CHUNK_TOKENS,
        limits=StorageLimits(
            blocks_per_op=system.blocks_per_op(model),
            max_fetch_pages=1 << 40,
            max_store_pages=1 << 40,
            fetch_window_ops=1 if system.in_rounds else 8,
        ),
        prefetch=PrefetchConfig("timeout", CHUNK_TOKENS, timeout_base_s=1e6, fetch_order=system.fetch_order),
        write_policy="write_through_selective",
    )
    config = scheduler_config(
        model,
        machine,
        PAGE_SIZE,
        context_len=longest + 1,
        num_device_tokens=max(int(device_tokens(model, machine.gpu) * settings.device), 2 * longest),
        # What has been fetched and is not launched yet finds room (the paper's is on the GPU, and holds fetches up).
        num_host_tokens=2 * sum(len(c.context) for c in workload.conversations) if fetches else 0,
        chunked_prefill_size=BATCH_TOKENS,
        max_prefill_tokens=BATCH_TOKENS,
        enable_radix_cache=fetches,
        bypass_local=fetches,
        storage=storage if fetches else None,
        load_or_recompute=system.or_recompute,
        bubble_filling=system.on_host,
        load_ratio=0.0,
        deferral_threshold=0,
    )
    network = settings.gbps * 1e9 / 8
    sim = Simulation(config, system.hardware(model, machine, PAGE_SIZE, network, settings.assumptions))
    if fetches:
        _store(sim, workload, settings, system.partial_hits)
    times = sim.run(workload.source())
    check_answers(times, workload)
    scheduler = sim.core.scheduler
    counters = scheduler.counters
    ttft = np.array([t.ttft for t in times.values()])
    gaps = [(t.tokens[-1] - t.tokens[0]) / (len(t.tokens) - 1) for t in times.values() if len(t.tokens) > 1]
    fetch = sim.links.get("fetch")
    return RemoteOutcome(
        num_requests=len(times),
        requests_per_s=len(times) / sim.now,
        mean_ttft_s=float(ttft.mean()),
        p95_ttft_s=float(np.percentile(ttft, 95)),
        mean_tpot_s=float(np.mean(gaps)),
        remote_share=(counters["hit_tokens_disk"] + counters["hit_tokens_remote"]) / counters["prompt_tokens"],
        link_share=fetch.busy_s / sim.now if fetch is not None else 0.0,
        busy_share=sim.executor.busy_s / sim.now,
        simulated_s=sim.now,
        counters=dict(sorted(counters.items())),
        wall_s=time.perf_counter() - begin,
    )


def _machine(settings: RemoteSettings) -> Hardware:
    if settings.efficiency is None:
        return L40S_BLUEFIELD3
    gpu = replace(
        L40S_BLUEFIELD3.gpu, matmul_efficiency=settings.efficiency, attention_efficiency=settings.efficiency
    )
    return replace(L40S_BLUEFIELD3, gpu=gpu)


def _store(sim: Simulation, workload: Workload, settings: RemoteSettings, partial_hits: bool) -> None:
    """Fill the storage beforehand. Without partial_hits it holds whole prompts only."""
    rng = np.random.default_rng(settings.seed)
    names = BlockKeys(SECRET, CHUNK_TOKENS)
    for i, conversation in enumerate(workload.conversations):
        keys = names.of_prompt("", conversation.context)
        part = int(rng.integers(0, len(keys) + 1))
        if settings.stored == "mixed" and i % 3:
            keys = keys[:part] if i % 3 == 1 and partial_hits else keys[:0]
        sim.stores[0].add(keys)
