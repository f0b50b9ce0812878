"""The gate "do no harm": a tier that is added must not make the server slower, whatever its speed and health.

    make harm                     all cases, minutes
    python -m benchmark.harm [--only disk] [--conditions healthy,slow] [--workloads documents] [--jobs 2]

A server with and without one tier gets the same requests on the virtual clock. The exit code is 1 if any case does
harm. All numbers are simulated. docs/records/bounds.md has the bounds with their reasons, and results.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from benchmark.common import percentiles, print_table, write_json
from benchmark.simulator.small_machine import SmallMachine
from benchmark.simulator.workloads import Conversation, Turn, Workload, poisson_times, random_tokens

from sglang.simulator.health import HEALTHY, LinkHealth
from sglang.simulator.simulation import RequestTimes, Simulation
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.storage_setup import PrefetchConfig
from sglang.srt.mem_cache.placement import WRITE_POLICIES
from sglang.srt.mem_cache.transfer import STORE_LINKS, StorageAction, StorageOp, Tier, TransferOp
from sglang.srt.peer.memory.copy_session import COPY_TIMEOUT_S

# -- what is compared -----------------------------------------------------------------------------------------------

SIZES = {Tier.DEVICE: 8192, Tier.PEER: 8192, Tier.HOST: 8192, Tier.DISK: 16384, Tier.REMOTE: 16384}
# Base and the tier that is added. Storage needs a host.
ADDITIONS: tuple[tuple[tuple[Tier, ...], Tier], ...] = (
    ((Tier.DEVICE,), Tier.HOST),
    ((Tier.DEVICE,), Tier.PEER),
    ((Tier.DEVICE, Tier.HOST), Tier.PEER),
    ((Tier.DEVICE, Tier.HOST), Tier.DISK),
    ((Tier.DEVICE, Tier.HOST), Tier.REMOTE),
    ((Tier.DEVICE, Tier.HOST, Tier.DISK), Tier.REMOTE),
    ((Tier.DEVICE, Tier.HOST, Tier.REMOTE), Tier.DISK),
    ((Tier.DEVICE, Tier.HOST, Tier.DISK), Tier.PEER),
)
# How many times faster than computing a token the added link moves one, each way.
SPEEDS = (100.0, 10.0, 1.0, 0.1, 0.01)
CONDITIONS = ("healthy", "slow", "hung", "flapping hangs", "flapping fails")
WORKLOADS = ("documents", "chats", "unique")
# A case is judged by all requests of these workloads together. P99 of 300 requests is the third slowest, which
# differs by a fifth from seed to seed where a tier changes nothing but the order of things.
SEEDS = (3, 4, 5)
NUM_REQUESTS = 300
RATE = 5.0
OUTPUT_TOKENS = 16
DOCUMENT_TOKENS = 512
CHAT_TURNS, THINK_S = 5, 4.0
# Documents, over the sum of the tiers with the added one.
WORKING_SET = 1.5
FLAPS, FLAP_S, FLAP_EVERY_S = 5, 0.5, 4.0

# -- what is allowed ------------------------------------------------------------------------------------------------

MOST_SLOWER = 0.05
# A page of new KV may be written to a tier when it is computed, and once more after its copy was given up while it
# was in use.
COPIES_OF_NEW = 2.0
# What a memory tier gives back to the device it may give up, so that capacities add up. It is written again when it
# leaves the device. Storage keeps what it gives.
COPIES_OF_LOADED = {Tier.HOST: 1.0, Tier.PEER: 1.0, Tier.DISK: 0.0, Tier.REMOTE: 0.0}
# What the engine waits for an operation that does not end. A prompt is below 1,024 tokens. Copies between device and
# host have no timeout in the engine; they are allowed the peers'.
TIMEOUTS = {
    Tier.HOST: COPY_TIMEOUT_S,
    Tier.PEER: COPY_TIMEOUT_S,
    Tier.DISK: PrefetchConfig.timeout_base_s + PrefetchConfig.timeout_per_ki_token_s,
    Tier.REMOTE: PrefetchConfig.timeout_base_s + PrefetchConfig.timeout_per_ki_token_s,
}


@dataclass(frozen=True)
class Case:
    base: tuple[Tier, ...]
    added: Tier
    speed: float
    condition: str
    workload: str
    page_size: int = 16
    # None: the engine's default.
    write_policy: str | None = None
    # Of each workload.
    num_requests: int = NUM_REQUESTS
    num_workloads: int = len(SEEDS)
    # For short runs: prompts and answers are so many times shorter and come so many times as often, and tiers are
    # smaller by its square.
    scale: int = 1

    @property
    def name(self) -> str:
        base = "+".join(tier.name.lower() for tier in self.base)
        page = "" if self.page_size == 16 else f", page size {self.page_size}"
        page += "" if self.scale == 1 else f", scale {self.scale}"
        return f"{base} + {self.added.name.lower()} at {self.speed:g}, {self.condition}, {self.workload}{page}"

    @property
    def without(self) -> SmallMachine:
        sizes = {tier: self._size(tier) for tier in self.base}
        return SmallMachine(sizes, page_size=self.page_size, write_policy=self.write_policy)

    @property
    def machine(self) -> SmallMachine:
        without = self.without
        return replace(
            without,
            sizes={**without.sizes, self.added: self._size(self.added)},
            speeds={self.added: self.speed},
            health={self.added: self.health},
        )

    @property
    def half_s(self) -> float:
        """When the link begins to deviate: half of the requests have come."""
        return self.num_requests / RATE / self.scale / 2

    @property
    def health(self) -> LinkHealth:
        return health_of(self.condition, self.added, self.half_s)

    def requests(self) -> tuple[Workload, ...]:
        sum_tokens = self.machine.sum_tokens
        return tuple(
            workload_of(self.workload, sum_tokens, self.num_requests, seed, self.scale)
            for seed in SEEDS[: self.num_workloads]
        )

    def _size(self, tier: Tier) -> int:
        return SIZES[tier] // self.scale**2


@dataclass(frozen=True)
class Hang:
    """Of a case's link: from `begin` for at most `seconds`, in which the engine may wait for it once."""

    begin: float
    seconds: float


def health_of(condition: str, tier: Tier, half: float) -> LinkHealth:
    """half: seconds, when it begins to deviate."""
    starts = [half + FLAP_EVERY_S * n for n in range(FLAPS)]
    if condition == "slow":
        return LinkHealth(rates=((half, 0.1),))
    if condition == "hung":
        if tier == Tier.PEER:
            # The borrower's copy fails at its timeout, and then the lender is there again.
            return LinkHealth(rates=((half, 0.0), (half + COPY_TIMEOUT_S, 1.0)), timeout_s=COPY_TIMEOUT_S)
        return LinkHealth(rates=((half, 0.0),))
    if condition == "flapping hangs":
        return LinkHealth(rates=tuple(each for at in starts for each in ((at, 0.0), (at + FLAP_S, 1.0))))
    if condition == "flapping fails":
        return LinkHealth(failing=tuple((at, at + FLAP_S) for at in starts))
    return HEALTHY


def hangs_of(case: Case) -> list[Hang]:
    half = case.half_s
    if case.condition == "hung":
        return [Hang(half, TIMEOUTS[case.added])]
    if case.condition == "flapping hangs":
        return [Hang(half + FLAP_EVERY_S * n, min(FLAP_S, TIMEOUTS[case.added])) for n in range(FLAPS)]
    return []


# -- workloads ------------------------------------------------------------------------------------------------------


@cache
def workload_of(name: str, sum_tokens: int, num_requests: int, seed: int, scale: int = 1) -> Workload:
    """documents: uniform reuse, more than the tiers hold. chats: turns of conversations. unique: no reuse."""
    rng = np.random.default_rng(seed)

    def text(num_tokens: int) -> np.ndarray:
        return random_tokens(rng, num_tokens // scale)

    def turns(num_turns: int, message_tokens: int) -> tuple[Turn, ...]:
        return tuple(Turn(text(message_tokens), OUTPUT_TOKENS // scale) for _ in range(num_turns))

    if name == "documents":
        number = round(WORKING_SET * sum_tokens * scale / DOCUMENT_TOKENS)
        texts = [text(DOCUMENT_TOKENS) for _ in range(number)]
        about = rng.integers(0, number, num_requests).tolist()
        asked = [(texts[i], turns(1, 8)) for i in about]
    elif name == "unique":
        asked = [(text(DOCUMENT_TOKENS), turns(1, 8)) for _ in range(num_requests)]
    else:
        asked = [(text(128), turns(CHAT_TURNS, 96)) for _ in range(num_requests // CHAT_TURNS)]
    starts = poisson_times(rng, len(asked), RATE * scale * len(asked) / num_requests).tolist()
    talks = [
        Conversation(start, context, said, think_s=THINK_S / scale)
        for start, (context, said) in zip(starts, asked, strict=True)
    ]
    return Workload(name, tuple(talks), max_in_flight=None)


# -- one run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerRun:
    """Of one server, over all its workloads. Simulated seconds. A request without an answer has infinite times."""

    ttft_s: tuple[float, ...]
    # Mean time between the tokens of each request.
    tpot_s: tuple[float, ...]
    arrivals_s: tuple[float, ...]
    hit_rate: float
    # Tokens that were written to the tiers below the device, and that were computed or loaded to the device.
    written: dict[Tier, int]
    computed: int
    loaded: int
    # Seconds that launches waited for loads.
    stall_s: float
    counters: dict[str, int]


def run_server(machine: SmallMachine, workloads: Iterable[Workload]) -> ServerRun:
    """One server after another, each with one workload from time 0 on."""
    times: list[RequestTimes] = []
    writes = _Writes(machine)
    counters: Counter[str] = Counter()
    stall_s = 0.0
    for workload in workloads:
        sim = Simulation(machine.config(), machine.hardware())
        times += sim.run(workload.source(), after_step=writes).values()
        counters.update(sim.core.scheduler.counters)
        stall_s += sim.executor.stall_s
    prompts = max(1, counters["prompt_tokens"])
    return ServerRun(
        ttft_s=tuple(each.ttft if each.tokens else float("inf") for each in times),
        tpot_s=tuple(_tpot(each) for each in times),
        arrivals_s=tuple(each.arrival for each in times),
        hit_rate=sum(n for name, n in counters.items() if name.startswith("hit_tokens_")) / prompts,
        written=dict(writes.tokens),
        computed=counters["prefill_tokens"] + counters["decode_tokens"],
        loaded=counters["load_back_tokens"],
        stall_s=stall_s,
        counters=dict(sorted(counters.items())),
    )


def _tpot(times: RequestTimes) -> float:
    if times.finish_reason != "length":
        return float("inf")
    return (times.tokens[-1] - times.tokens[0]) / (len(times.tokens) - 1)


class _Writes:
    """Counts what each step hands to links that write."""

    def __init__(self, machine: SmallMachine) -> None:
        self.tokens: Counter[Tier] = Counter()
        self._machine = machine

    def __call__(self, decision: BatchDecision) -> None:
        for op in decision.ops:
            if isinstance(op, TransferOp) and op.dst != Tier.DEVICE:
                self.tokens[op.dst] += len(op.dst_frames) * self._machine.page_size
            elif isinstance(op, StorageOp) and op.action == StorageAction.SET:
                tier = self._machine.storage[STORE_LINKS.index(op.ticket.link)]
                self.tokens[tier] += len(op.frames) * self._machine.page_size


# -- the gate -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One metric of one case: what it is with the tier, what it was without, and the most that is allowed."""

    case: Case
    metric: str
    value: float
    without: float
    limit: float

    @property
    def does_harm(self) -> bool:
        return not self.value <= self.limit

    @property
    def harm(self) -> float:
        """By how much the limit is exceeded, as a share of it."""
        return self.value / self.limit - 1 if self.limit else float("inf")


def judge(case: Case, base: ServerRun, tier: ServerRun) -> list[Verdict]:
    """All metrics of a case.

    A hang may cost one timeout: P99 of the time to first token gets one, and the mean gets one for each request that
    was under way or arrived until twice the timeout had passed. Within that time the backlog of a server that stood
    still for one timeout is done, as it is at most half busy. A request's time per token gets its share of a timeout.
    """
    hangs = hangs_of(case)
    longest = max((hang.seconds for hang in hangs), default=0.0)
    gaps = OUTPUT_TOKENS // case.scale - 1
    affected = sum(_num_affected(base, hang, gaps) * hang.seconds for hang in hangs) / len(base.ttft_s)
    verdicts = []
    for name, value, without, allowance in (
        ("mean TTFT ms", np.mean(tier.ttft_s), np.mean(base.ttft_s), affected),
        ("P99 TTFT ms", _p99(tier.ttft_s), _p99(base.ttft_s), longest),
        ("mean TPOT ms", np.mean(tier.tpot_s), np.mean(base.tpot_s), affected / gaps),
        ("P99 TPOT ms", _p99(tier.tpot_s), _p99(base.tpot_s), longest / gaps),
    ):
        limit = (1 + MOST_SLOWER) * float(without) + allowance
        verdicts.append(Verdict(case, name, 1e3 * float(value), 1e3 * float(without), 1e3 * limit))
    for written_to, tokens in tier.written.items():
        limit = COPIES_OF_NEW + COPIES_OF_LOADED[written_to] * tier.loaded / tier.computed
        before = base.written.get(written_to, 0) / base.computed
        name = f"{written_to.name.lower()} writes per new token"
        verdicts.append(Verdict(case, name, tokens / tier.computed, before, limit))
    return verdicts


def _p99(samples: Iterable[float]) -> float:
    return percentiles(list(samples), 99)[0]


def _num_affected(base: ServerRun, hang: Hang, gaps: int) -> int:
    """Requests that arrive in a hang or in the same time after it, and those that are under way when it begins."""
    ends = zip(base.arrivals_s, base.ttft_s, base.tpot_s, strict=True)
    return sum(at < hang.begin + 2 * hang.seconds and at + ttft + tpot * gaps > hang.begin for at, ttft, tpot in ends)


@cache
def _base_run(case: Case) -> ServerRun:
    return run_server(case.without, case.requests())


def run_case(case: Case) -> tuple[list[Verdict], ServerRun, ServerRun]:
    """Verdicts, the run without the tier, and the run with it."""
    base = _base_run(replace(case, speed=1.0, condition="healthy"))
    tier = run_server(case.machine, case.requests())
    return judge(case, base, tier), base, tier


# -- all cases ------------------------------------------------------------------------------------------------------


# What one process takes at a time; these share the run without the tier.
CASES_PER_REPORT = len(SPEEDS) * len(CONDITIONS)


def all_cases(write_policy: str | None = None) -> Iterator[Case]:
    for base, added in ADDITIONS:
        for workload in WORKLOADS:
            for condition in CONDITIONS:
                for speed in SPEEDS:
                    yield Case(base, added, speed, condition, workload, write_policy=write_policy)
    # Pages of one token, once.
    for base, added in ADDITIONS:
        yield Case(base, added, 10.0, "healthy", "documents", page_size=1, write_policy=write_policy)


def row_of(verdicts: list[Verdict], base: ServerRun, tier: ServerRun) -> dict[str, Any]:
    """What a report holds of one case, with what tells why a case is slower."""
    told = ("load_back_tokens", "backup_dropped_tokens", "peer_backup_dropped_tokens", "prefetch_timeouts")
    told += ("storage_probes", "prefetched_tokens", "recomputed_instead_tokens", "retracted_reqs", "failed_ops")
    return {
        "case": verdicts[0].case.name,
        "does harm": any(v.does_harm for v in verdicts),
        **{v.metric: {"with": v.value, "without": v.without, "limit": v.limit} for v in verdicts},
        "hit rate": {"with": tier.hit_rate, "without": base.hit_rate},
        "stall_s": {"with": tier.stall_s, "without": base.stall_s},
        "counters": {name: tier.counters.get(name, 0) for name in told},
        "kind": "simulated",
    }


def shown(verdicts: list[Verdict], base: ServerRun, tier: ServerRun) -> dict[str, Any]:
    """The worst metric of a case that does harm, and how many of its metrics do."""
    worst = max(verdicts, key=lambda v: v.harm)
    return {
        "case": worst.case.name,
        "metric": worst.metric,
        "without": worst.without,
        "with": worst.value,
        "limit": worst.limit,
        "above limit %": 100 * worst.harm,
        "metrics that fail": sum(v.does_harm for v in verdicts),
        "hits without / with %": f"{100 * base.hit_rate:.0f} / {100 * tier.hit_rate:.0f}",
        "stall s": tier.stall_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases of the given added tiers, such as peer,disk")
    parser.add_argument("--conditions", default=",".join(CONDITIONS))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--policy", choices=WRITE_POLICIES, help="default: the engine's")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    tiers = args.only.split(",") if args.only else [tier.name.lower() for tier in SIZES]
    cases = [
        case
        for case in all_cases(args.policy)
        if case.added.name.lower() in tiers
        and case.condition in args.conditions.split(",")
        and case.workload in args.workloads.split(",")
    ]
    settings = vars(args) | {"write policy": args.policy or SchedulerConfig.write_policy}
    rows, failing = [], []
    with ProcessPoolExecutor(args.jobs) as pool:
        for found in pool.map(run_case, cases, chunksize=CASES_PER_REPORT):
            rows.append(row_of(*found))
            if rows[-1]["does harm"]:
                failing.append(shown(*found))
            if len(rows) % CASES_PER_REPORT == 0:
                write_json("harm", settings, rows, complete=False)
    failing.sort(key=lambda row: -row["above limit %"])
    print_table(f"Simulated: cases that do harm, with {settings['write policy']}; worst metric of each", failing)
    print(f"\n{len(failing)} of {len(cases)} cases do harm (simulated)")
    write_json("harm", settings, rows)
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
