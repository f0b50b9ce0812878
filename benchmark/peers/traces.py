"""Traces of services on a real server, with lengths divided so that they fit its model.

    python -m benchmark.peers.traces [--trace NAME,...] [--trace-folder DIR] [--systems NAME,...]

The first requests of each trace, at the times of the trace. The rule by which lengths are divided is printed, and
written, with the results. Pools are divided by the same factor: of the device and the host that
`benchmark.papers.traces` simulates. One system after the other, at most 20 minutes for a trace. Requests that have no
answer by then count as later than all others. vLLM has no row: blocks of 128 tokens share nothing of prompts that are
so short. JSON in bench-out/traces_server_<trace>.json.

How long a token of a prompt takes is measured first. Where computing all of a trace with times would take more than
three quarters of its time, the context is halved, twice at most, and then time is stretched, so that fewer requests
are sent. On a slower machine the systems stand under the same load, then.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.common import print_table, write_json
from benchmark.papers.traces import FOLDER, paths_of
from benchmark.papers.traces_runs import MAX_OPEN, TRACES, TraceSettings, capacities, trace_name
from benchmark.peers.client import ask, quantile
from benchmark.peers.servers import RunningServer, ServerError, ServerKind, Setting, compiled_parts, make_model
from benchmark.peers.signals import running

from sglang.serving_benchmark.datasets import traces as datasets
from sglang.serving_benchmark.workload import Limits, Session, Workload

# Of a trace, shared by its systems.
LIMIT_S = 20 * 60.0
# For the last answers, after the last request.
LAST_ANSWERS_S = 20.0
SEED = 20_261_126
# Computing time over the trace's time, if nothing is found.
MOST_LOAD = 0.75
MOST_HALVINGS = 2
# Of the prompts that are measured first.
PROBE_TOKENS, NUM_PROBES = 256, 8


@dataclass(frozen=True)
class Case:
    """context: in tokens; the longest request is divided down to it, or to a half or a quarter of it. has_times:
    requests come at the trace's times. pool_share: of the simulated pools, where as small a part of the sessions is
    sent at a time."""

    dataset: str
    num_requests: int
    context: int
    has_times: bool = True
    flags: tuple[str, ...] = ()
    pool_share: float = 1.0


CASES = {
    "mooncake_conversation": Case("mooncake", 800, 2048),
    "mooncake_synthetic": Case("mooncake", 800, 2048),
    "agentic_200k": Case("agentic-trace", 200, 4096, False, ("--max-concurrency", "8"), 8 / MAX_OPEN),
}
_WRITE_THROUGH = ("--hicache-write-policy", "write_through", "--hicache-publish-at", "completion")
_NO_SCHEDULING = ("--hicache-deferral-threshold", "0", "--hicache-load-ratio", "0", "--hicache-bubble-filling", "off")
_NO_RECOMPUTING = ("--hicache-load-or-recompute", "off")
ON_DEVICE = "everything on the device"
# Name -> flags; None: no host.
SYSTEMS: dict[str, tuple[str, ...] | None] = {
    "no hierarchy": None,
    "as SGLang-HiCache": (*_WRITE_THROUGH, *_NO_SCHEDULING, *_NO_RECOMPUTING),
    "as Strata": (*_WRITE_THROUGH, "--hicache-bubble-filling", "decode", *_NO_RECOMPUTING),
    "ours": (),
    ON_DEVICE: None,
}


@dataclass(frozen=True)
class Plan:
    """What is sent of a trace, and what holds it."""

    case: Case
    path: Path
    context: int
    factor: float
    # 2: the trace's times are twice as long.
    slowdown: float
    num_requests: int
    device_tokens: int
    host_tokens: int
    # All prompts and answers.
    all_tokens: int


def plan_of(path: Path, token_s: float = 0.0, limit_s: float = math.inf) -> Plan:
    """token_s: seconds in which a token of a prompt is computed. limit_s: of a system."""
    case = CASES[trace_name(path)]
    load = datasets.mooncake if case.dataset == "mooncake" else datasets.agentic

    def scaled(factor: float) -> Workload:
        return load(
            Namespace(
                dataset_path=str(path),
                num_prompts=case.num_requests,
                mooncake_workload="",
                mooncake_num_rounds=1,
                mooncake_slowdown_factor=1.0,
                scale_lengths=factor,
            ),
            None,
        )

    whole, halvings = scaled(1.0), 0
    while True:
        context = case.context >> halvings
        factor = datasets.fitting_scale(whole, Limits(context, 0, 0))
        sessions = scaled(factor).sessions
        first = min(map(_start, sessions))
        trace_s = max(map(_start, sessions)) - first
        computing_s = token_s * sum(turn.message.num_tokens for session in sessions for turn in session.turns)
        excess = computing_s / (MOST_LOAD * trace_s) if case.has_times else 0.0
        if excess <= 1 or halvings == MOST_HALVINGS:
            break
        halvings += 1
    slowdown = max(1.0, round(excess, 2))
    if case.has_times:
        sessions = tuple(each for each in sessions if (_start(each) - first) * slowdown <= limit_s - LAST_ANSWERS_S)
    turns = [turn for session in sessions for turn in session.turns]
    device, host = (int(size * factor * case.pool_share) for size in capacities(TraceSettings("ours", path)))
    all_tokens = sum(turn.message.num_tokens + turn.output_len for turn in turns)
    return Plan(case, path, context, factor, slowdown, len(turns), device, host, all_tokens)


def _start(session: Session) -> float:
    return session.start_s or 0.0


def measure_token_s(model: Path, folder: Path, threads: int) -> float:
    """Seconds in which a server computes a token of a prompt. Raises ServerError."""

    def command(setting: Setting, port: int) -> list[str]:
        return [*_command(setting, port, 2 * PROBE_TOKENS), "--max-total-tokens", "16384", "--no-hicache"]

    server = RunningServer(ServerKind("probe", command, _environment), Setting(model, 16384, threads, folder))
    flags = (
        *("--dataset-name", "random", "--num-prompts", str(NUM_PROBES), "--max-concurrency", "1"),
        *("--random-input-len", str(PROBE_TOKENS), "--random-output-len", "1", "--random-range-ratio", "1"),
    )
    with running(server):
        result = ask(server, flags, 2 * PROBE_TOKENS, SEED)
    median = quantile(result["ttfts"], NUM_PROBES, 0.5)
    if median is None:
        raise server.failure("left prompts without an answer")
    return median / PROBE_TOKENS


def _command(setting: Setting, port: int, context: int) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(setting.model), "--port", str(port)),
        *("--dtype", "float32", "--context-length", str(context), "--log-level", "error"),
    )


def _environment(setting: Setting) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(setting.threads)}


def server_kind(name: str, plan: Plan) -> ServerKind:
    flags = SYSTEMS[name]
    device = plan.all_tokens if name == ON_DEVICE else plan.device_tokens

    def command(setting: Setting, port: int) -> list[str]:
        ratio = plan.host_tokens / plan.device_tokens
        return [
            *_command(setting, port, plan.context),
            *("--max-total-tokens", str(device), "--max-running-requests", "64", "--random-seed", "1"),
            *(("--no-hicache",) if flags is None else ("--hicache", "--hicache-ratio", f"{ratio:g}", *flags)),
        ]

    return ServerKind(name, command, _environment)


def measure(server: RunningServer, plan: Plan, limit_s: float) -> tuple[dict[str, Any], list[str]]:
    """A row, and the sentences of bench_serving about it. Raises ServerError."""
    case = plan.case
    flags = (
        *("--dataset-name", case.dataset, "--dataset-path", str(plan.path)),
        *("--scale-lengths", repr(plan.factor)),
        *("--num-prompts", str(plan.num_requests), "--benchmark-duration", f"{limit_s:g}", *case.flags),
        *("--mooncake-slowdown-factor", f"{plan.slowdown:g}"),
    )
    result = ask(server, flags, plan.context, SEED)
    assert result["length_scale"] == plan.factor, (result["length_scale"], plan.factor)
    count = result["num_prompts"]
    known = [time for time in result["ttfts"] if time is not None]
    shares = result["cached_share_by_tier"] or {}
    row = {
        "system": server.kind.name,
        "device hits %": 100 * shares.get("device", 0.0),
        "host hits %": 100 * shares.get("host", 0.0),
        # Where some have none, it tells too little.
        "mean TTFT s": sum(known) / count if len(known) == count else None,
        "median TTFT s": quantile(result["ttfts"], count, 0.5),
        "P90 TTFT s": quantile(result["ttfts"], count, 0.9),
        "P99 TTFT s": quantile(result["ttfts"], count, 0.99),
        "requests": count,
        "answered": result["completed"],
        "requests/s": result["request_throughput"],
        "seconds": result["duration"],
    }
    return row, result["notes"]


def run(path: Path, systems: list[str], folder: Path, model: Path, token_s: float) -> None:
    """Raises ServerError."""
    began, threads, limit_s = time.monotonic(), os.cpu_count() or 1, LIMIT_S / len(systems)
    plan = plan_of(path, token_s, limit_s)
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct, float32",
        "trace": trace_name(path),
        "device tokens": plan.device_tokens,
        "host tokens": plan.host_tokens,
        "tokens of everything on the device": plan.all_tokens,
        "seconds to compute a token": token_s,
        "context": plan.context,
        "slowdown of time": plan.slowdown,
        "threads": threads,
        **compiled_parts(),
    }
    for name in systems:
        server = RunningServer(server_kind(name, plan), Setting(model, plan.device_tokens, threads, folder))
        with running(server):
            row, settings["notes"] = measure(server, plan, limit_s)
        rows.append(row)
        settings["seconds"] = round(time.monotonic() - began)
        is_whole = len(rows) == len(SYSTEMS)
        write_json(f"traces_server_{trace_name(path)}", settings, rows, complete=is_whole)
    print_table(f"{trace_name(path)} ({TRACES[trace_name(path)].kind}), measured", rows)
    print("\n" + "\n".join(settings["notes"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", default=",".join(CASES), help="names of traces, with commas between")
    parser.add_argument("--trace-folder", type=Path, default=FOLDER, help="where the files NAME.jsonl.gz are")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="names of systems, with commas between")
    args = parser.parse_args()
    names, systems = args.trace.split(","), args.systems.split(",")
    for given, known in ((names, CASES), (systems, SYSTEMS)):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"{', '.join(unknown)} is not one of {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="bench-traces-") as folder:
        model = make_model()
        try:
            token_s = measure_token_s(model, Path(folder), os.cpu_count() or 1)
            for name in names:
                for path in paths_of(str(args.trace_folder / f"{name}.jsonl.gz"), args.trace_folder):
                    run(path, systems, Path(folder), model, token_s)
        except ServerError as error:
            print(f"{error}\n{error.log}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
