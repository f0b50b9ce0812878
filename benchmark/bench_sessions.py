"""Sessions of coding agents, with and without `session_id`: hits by tier, computed tokens, time to first token.

    python -m benchmark.bench_sessions simulate --trace FILE [--host 0.3,1.2,3] [--num-sessions N] [--beside SHARE]
    python -m benchmark.bench_sessions serve --trace FILE --model DIR [--num-sessions N] [--rounds N]

simulate: the whole trace, the real scheduler on the virtual clock, Llama-3.1-8B on an H200. All its numbers are
simulated. serve: a real server on this machine and the first sessions, lengths divided by 32. Three servers:

    plain LRU      --radix-eviction-policy lru --hicache-write-policy write_through, no session_id
    without ids    the default, which ranks by last use too, while capacities add up
    with ids       the default, and each request names its session
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmark.common import percentiles, print_table, write_json
from benchmark.simulator.hardware import scheduler_config, simulated_hardware
from benchmark.simulator.profiles import HARDWARE, MODELS
from benchmark.simulator.traces import read_agentic
from benchmark.simulator.workloads import Conversation, Turn, Workload, random_tokens

from sglang.simulator.simulation import Simulation

PAGE_SIZE = 64
# Sessions at a time.
NUM_OPEN = 16
# Of the device. The sessions that are open have about 1.8 million.
DEVICE_TOKENS = 600_000
HOST_TOKENS = (300_000, 1_200_000, 3_000_000)
# Single prompts beside the sessions: tokens of each.
SINGLE_TOKENS = 8192


@dataclass(frozen=True)
class Variant:
    name: str
    write_policy: str
    names_sessions: bool


VARIANTS = (
    Variant("plain LRU", "write_through", False),
    Variant("without ids", "auto", False),
    Variant("with ids", "auto", True),
)


@dataclass(frozen=True)
class Case:
    """host_tokens: 0 for no host. singles_per_s: prompts that never come back, each of SINGLE_TOKENS and one answer
    token. seed: of their times. loners: whether each turn is a session of its own, which never returns."""

    trace: Path
    variant: Variant
    host_tokens: int
    num_sessions: int | None = None
    singles_per_s: float = 0.0
    loners: bool = False
    seed: int = 0


def workload_of(case: Case) -> Workload:
    workload = read_agentic(case.trace, NUM_OPEN)
    if case.num_sessions is not None:
        workload = workload.first(case.num_sessions)
    if case.loners:
        first = [replace(c, turns=c.turns[:1]) for c in workload.conversations]
        return replace(workload, conversations=tuple(first))
    return workload


class BesideSingles:
    """A `RequestSource`: sessions, and single prompts at Poisson times while the sessions go on."""

    def __init__(self, workload: Workload, names_sessions: bool, per_s: float, seed: int) -> None:
        self._sessions = workload.source(names_sessions)
        self._num_left = workload.stats().num_queries
        rng = np.random.default_rng(seed)
        self._rng = rng
        self._per_s = per_s
        self._next_s = float(rng.exponential(1 / per_s))
        self._num_singles = 0
        self.single_rids: list[str] = []

    def next_at(self) -> float | None:
        times = [self._sessions.next_at(), self._next_s if self._num_left else None]
        return min((t for t in times if t is not None), default=None)

    def take(self, now: float) -> list[Any]:
        sent = self._sessions.take(now)
        while self._num_left and self._next_s <= now:
            turn = Turn(random_tokens(self._rng, SINGLE_TOKENS), 1)
            single = Workload("single", (Conversation(0.0, turn.message[:0], (turn,)),)).source()
            (request,) = single.take(0.0)
            rid = f"single-{self._num_singles}"
            self._num_singles += 1
            self.single_rids.append(rid)
            sent.append(type(request)(rid=rid, input_ids=request.input_ids, sampling_params=request.sampling_params))
            self._next_s += float(self._rng.exponential(1 / self._per_s))
        return sent

    def finished(self, rid: str, now: float) -> None:
        if not rid.startswith("single"):
            self._num_left -= 1
            self._sessions.finished(rid, now)


def simulate(case: Case) -> dict[str, Any]:
    """One run; a row of the table."""
    workload = workload_of(case)
    model, hardware = MODELS["Llama-3.1-8B"], HARDWARE["h200"]
    config = scheduler_config(
        model,
        hardware,
        PAGE_SIZE,
        DEVICE_TOKENS,
        case.host_tokens,
        context_len=262_144,
        write_policy=case.variant.write_policy,
    )
    sim = Simulation(config, simulated_hardware(model, hardware, PAGE_SIZE))
    begin = time.perf_counter()
    if case.singles_per_s:
        source: Any = BesideSingles(workload, case.variant.names_sessions, case.singles_per_s, case.seed)
    else:
        source = workload.source(case.variant.names_sessions)
    times = sim.run(source)
    counters = Counter(sim.core.scheduler.counters)
    sim.core.scheduler.check_invariants()
    ttft = [t.ttft for rid, t in times.items() if not rid.startswith("single")]
    p50, p99 = percentiles(ttft, 50, 99)
    prompt = counters["prompt_tokens"]
    return {
        "host tokens": case.host_tokens,
        "singles per s": case.singles_per_s,
        "variant": case.variant.name,
        "device hits %": 100 * counters["hit_tokens_device"] / prompt,
        "host hits %": 100 * counters["hit_tokens_host"] / prompt,
        "computed, M tokens": counters["prefill_tokens"] / 1e6,
        "kept, M tokens": counters["session_kept_tokens"] / 1e6,
        "TTFT mean s (simulated)": float(np.mean(ttft)),
        "P50": p50,
        "P99": p99,
        "whole run s (simulated)": float(sim.now),
        "wall s": time.perf_counter() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    simulated = commands.add_parser("simulate")
    simulated.add_argument("--trace", type=Path, required=True)
    simulated.add_argument("--host", default=",".join(map(str, HOST_TOKENS)), help="tokens of the host, one per case")
    simulated.add_argument("--num-sessions", type=int)
    simulated.add_argument(
        "--singles", default="0", help="single prompts per second beside the sessions, one per case"
    )
    simulated.add_argument("--variants", default=",".join(v.name for v in VARIANTS))
    simulated.add_argument("--loners", action="store_true", help="first turns only: no session returns")
    simulated.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    cases = [
        Case(args.trace, variant, int(host), args.num_sessions, float(singles), args.loners)
        for host in args.host.split(",")
        for singles in args.singles.split(",")
        for variant in VARIANTS
        if variant.name in args.variants.split(",")
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(simulate, cases))
    print_table("Sessions of coding agents (simulated)", rows)
    write_json("bench_sessions_simulated", vars(args) | {"trace": args.trace.name}, rows)


if __name__ == "__main__":
    main()
