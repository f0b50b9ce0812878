"""Sessions of coding agents, with and without `session_id`: hits by tier, computed tokens, time to first token.

    python -m benchmark.bench_sessions simulate --trace FILE [--host TOKENS,…] [--num-sessions N] [--singles RATE,…]
    python -m benchmark.bench_sessions serve --trace FILE [--num-sessions N] [--rounds N]

simulate: the whole trace, the real scheduler on the virtual clock, Llama-3.1-8B on an H200. All its numbers are
simulated. serve: a real server on this machine with SmolLM2, and the first sessions, lengths divided by 32. Three
servers:

    plain LRU      --radix-eviction-policy lru --hicache-write-policy write_through, no session_id
    without ids    the default, which ranks by last use too, while capacities add up
    with ids       the default, and each request names its session
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from benchmark.common import percentiles, print_table, write_json
from benchmark.simulator.hardware import scheduler_config, simulated_hardware
from benchmark.simulator.profiles import HARDWARE, MODELS
from benchmark.simulator.traces import read_agentic
from benchmark.simulator.workloads import Conversation, Turn, Workload, random_tokens

from sglang.serving_benchmark.datasets.traces import agentic
from sglang.serving_benchmark.vocabulary import Vocabulary
from sglang.serving_benchmark.workload import Limits, Session, fit
from sglang.simulator.simulation import Simulation
from sglang.srt.configs.smollm2_model import ensure_smollm2

PAGE_SIZE = 64
# Sessions at a time.
NUM_OPEN = 16
# Of the device. The sessions that are open have about 1.8 million.
DEVICE_TOKENS = 600_000
HOST_TOKENS = (300_000, 1_200_000, 3_000_000)
# Single prompts beside the sessions: tokens of each.
SINGLE_TOKENS = 8192
# Of the real server: lengths are divided by it, sessions at a time, tokens of the device, the host's share of that.
DIVISOR = 32
SERVER_OPEN = 4
SERVER_DEVICE_TOKENS = 6144
SERVER_HOST_RATIO = 0.5


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
    token. seed: of their times. loners: only first turns, of sessions that never return. answer_divisor: answers are
    shorter by it, since a simulated decode step takes a millisecond."""

    trace: Path
    variant: Variant
    host_tokens: int
    num_sessions: int | None = None
    singles_per_s: float = 0.0
    loners: bool = False
    answer_divisor: int = 1
    seed: int = 0


def workload_of(case: Case) -> Workload:
    workload = read_agentic(case.trace, NUM_OPEN)
    if case.num_sessions is not None:
        workload = workload.first(case.num_sessions)
    if case.answer_divisor > 1:
        shorter = [
            replace(
                c, turns=tuple(replace(t, output_len=max(1, t.output_len // case.answer_divisor)) for t in c.turns)
            )
            for c in workload.conversations
        ]
        workload = replace(workload, conversations=tuple(shorter))
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


# -- a real server --------------------------------------------------------------------------------------------------


@contextmanager
def serving(variant: Variant) -> Iterator[str]:
    """The server's address while it runs."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "smollm2", "--port", str(port)]
    command += ["--max-total-tokens", str(SERVER_DEVICE_TOKENS), "--random-seed", "1", "--hicache"]
    command += ["--hicache-ratio", str(SERVER_HOST_RATIO), "--hicache-write-policy", variant.write_policy]
    command += ["--radix-eviction-policy", "lru"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(log.read()[-2000:])
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


async def replay(url: str, sessions: tuple[Session, ...], vocabulary: Vocabulary, names: bool) -> list[float]:
    """Send the sessions, `SERVER_OPEN` at a time, each turn so long after the answer before as the trace has it.
    Returns the times to first token, in seconds."""
    waiting = iter(enumerate(sessions))
    times: list[float] = []

    async def ask(http: httpx.AsyncClient, ids: list[int], num_out: int, name: str) -> list[int]:
        params = {"max_new_tokens": num_out, "temperature": 0, "ignore_eos": True}
        body = {
            "input_ids": ids,
            "sampling_params": params,
            "stream": True,
            **({"session_id": name} if names else {}),
        }
        began, first, last = time.perf_counter(), 0.0, ""
        async with http.stream("POST", url + "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first, last = first or time.perf_counter(), line
        times.append(first - began)
        return list(json.loads(last.removeprefix("data: "))["output_ids"])

    async def client(http: httpx.AsyncClient) -> None:
        for number, session in waiting:
            history: list[int] = []
            for turn in session.turns:
                await asyncio.sleep(turn.delay_s)
                history += turn.message.ids_in(vocabulary, salt=1)
                history += await ask(http, history, turn.output_len, f"session {number}")

    async with httpx.AsyncClient(timeout=600) as http:
        await asyncio.gather(*(client(http) for _ in range(SERVER_OPEN)))
    return times


def serve(trace: Path, num_sessions: int, max_turns: int, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows, and the rules by which the trace was cut."""
    vocabulary = Vocabulary.load(str(ensure_smollm2()))
    args = argparse.Namespace(
        dataset_path=str(trace), num_prompts=1 << 30, scale_lengths=1 / DIVISOR, mooncake_slowdown_factor=1.0
    )
    whole = agentic(args, vocabulary)
    first = tuple(replace(s, turns=s.turns[:max_turns]) for s in whole.sessions[:num_sessions])
    workload = fit(replace(whole, sessions=first), Limits(SERVER_DEVICE_TOKENS))
    rules = [*workload.notes, "A block's tokens follow from its hash: what sessions share, they share here."]
    rules.append(f"The first {max_turns} turns of the first {num_sessions} sessions, {SERVER_OPEN} at a time.")
    rules.append("Delays are as in the trace.")
    rules.append(f"{workload.num_requests} turns; {workload.num_dropped} are longer than the server takes.")
    rows = []
    for i in range(rounds):
        # By turns forward and backward, so that a machine that gets slower favours none.
        for variant in VARIANTS[:: 1 if i % 2 == 0 else -1]:
            with serving(variant) as url:
                began = time.perf_counter()
                ttft = asyncio.run(replay(url, workload.sessions, vocabulary, variant.names_sessions))
                wall_s = time.perf_counter() - began
                counters = Counter(httpx.get(url + "/hicache/state").json()["counters"])
            p50, p99 = percentiles(ttft, 50, 99)
            rows.append(
                {
                    "round": i,
                    "variant": variant.name,
                    "device hits %": 100 * counters["hit_tokens_device"] / counters["prompt_tokens"],
                    "host hits %": 100 * counters["hit_tokens_host"] / counters["prompt_tokens"],
                    "computed, K tokens": counters["prefill_tokens"] / 1e3,
                    "kept, K tokens": counters["session_kept_tokens"] / 1e3,
                    "TTFT mean s (measured)": float(np.mean(ttft)),
                    "P50": p50,
                    "P99": p99,
                    "whole run s (measured)": wall_s,
                    "load average": os.getloadavg()[0],
                }
            )
            print_table("So far", rows)
    return rows, rules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    simulated = commands.add_parser("simulate")
    simulated.add_argument("--trace", type=Path, required=True)
    simulated.add_argument("--host", default=",".join(map(str, HOST_TOKENS)), help="tokens of the host, one per case")
    simulated.add_argument("--num-sessions", type=int)
    simulated.add_argument("--singles", default="0", help="prompts per second beside the sessions, one per case")
    simulated.add_argument("--variants", default=",".join(v.name for v in VARIANTS))
    simulated.add_argument("--loners", action="store_true", help="first turns only: no session returns")
    simulated.add_argument("--answer-divisor", type=int, default=1, help="answers are shorter by it: runs end sooner")
    simulated.add_argument("--jobs", type=int, default=1)
    served = commands.add_parser("serve")
    served.add_argument("--trace", type=Path, required=True)
    served.add_argument("--num-sessions", type=int, default=8)
    served.add_argument("--max-turns", type=int, default=30, help="of a session")
    served.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    settings = vars(args) | {"trace": args.trace.name}
    if args.command == "serve":
        rows, rules = serve(args.trace, args.num_sessions, args.max_turns, args.rounds)
        print("\n".join(rules))
        print_table("Sessions of coding agents (measured)", rows)
        write_json("bench_sessions", settings | {"rules": rules}, rows)
        return
    cases = [
        Case(
            args.trace,
            variant,
            int(host),
            args.num_sessions,
            float(singles),
            args.loners,
            answer_divisor=args.answer_divisor,
        )
        for host in args.host.split(",")
        for singles in args.singles.split(",")
        for variant in VARIANTS
        if variant.name in args.variants.split(",")
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(simulate, cases))
    print_table("Sessions of coding agents (simulated)", rows)
    write_json("bench_sessions_simulated", settings, rows)


if __name__ == "__main__":
    main()
