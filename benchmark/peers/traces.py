"""Traces of services on a real server, with lengths divided so that they fit its model.

    python -m benchmark.peers.traces [--trace NAME,...] [--trace-folder DIR] [--systems NAME,...]

The first requests of each trace, at the times of the trace. The rule by which lengths are divided is printed, and
written, with the results. Pools are divided by the same factor: of the device and the host that
`benchmark.papers.traces` simulates. One system after the other, at most 20 minutes for a trace. Requests that have no
answer by then count as later than all others. vLLM has no row: blocks of 128 tokens share nothing of prompts that are
so short. JSON in bench-out/traces_server_<trace>.json.
"""

from __future__ import annotations

import argparse
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
from benchmark.peers.signals import stop_on_signals, stop_undisturbed

from sglang.serving_benchmark.datasets import traces as datasets
from sglang.serving_benchmark.workload import Limits, Workload

# Of a trace, shared by its systems.
LIMIT_S = 20 * 60.0
SEED = 20_261_126


@dataclass(frozen=True)
class Case:
    """context: in tokens; the longest request is divided down to it. pool_share: of the simulated pools, where as
    small a part of the sessions is sent at a time."""

    dataset: str
    num_requests: int
    context: int
    flags: tuple[str, ...] = ()
    pool_share: float = 1.0


CASES = {
    "mooncake_conversation": Case("mooncake", 800, 2048),
    "mooncake_synthetic": Case("mooncake", 800, 2048),
    "agentic_200k": Case("agentic-trace", 200, 4096, ("--max-concurrency", "8"), pool_share=8 / MAX_OPEN),
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
    factor: float
    device_tokens: int
    host_tokens: int
    # All prompts and answers.
    all_tokens: int


def plan_of(path: Path) -> Plan:
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

    factor = datasets.fitting_scale(scaled(1.0), Limits(case.context, 0, 0))
    turns = [turn for session in scaled(factor).sessions for turn in session.turns]
    device, host = (int(size * factor * case.pool_share) for size in capacities(TraceSettings("ours", path)))
    return Plan(case, path, factor, device, host, sum(turn.message.num_tokens + turn.output_len for turn in turns))


def server_kind(name: str, plan: Plan) -> ServerKind:
    flags = SYSTEMS[name]
    device = plan.all_tokens if name == ON_DEVICE else plan.device_tokens

    def command(setting: Setting, port: int) -> list[str]:
        ratio = plan.host_tokens / plan.device_tokens
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(setting.model), "--port", str(port)),
            *("--dtype", "float32", "--context-length", str(plan.case.context), "--log-level", "error"),
            *("--max-total-tokens", str(device), "--max-running-requests", "64", "--random-seed", "1"),
            *(("--no-hicache",) if flags is None else ("--hicache", "--hicache-ratio", f"{ratio:g}", *flags)),
        ]

    return ServerKind(name, command, lambda setting: {"OMP_NUM_THREADS": str(setting.threads)})


def measure(server: RunningServer, plan: Plan, limit_s: float) -> tuple[dict[str, Any], list[str]]:
    """A row, and the sentences of bench_serving about it. Raises ServerError."""
    case = plan.case
    flags = (
        *("--dataset-name", case.dataset, "--dataset-path", str(plan.path), "--scale-lengths", "fit"),
        *("--num-prompts", str(case.num_requests), "--benchmark-duration", f"{limit_s:g}", *case.flags),
    )
    result = ask(server, flags, case.context, SEED)
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


def run(path: Path, systems: list[str], folder: Path, model: Path) -> None:
    """Raises ServerError."""
    plan, began, threads = plan_of(path), time.monotonic(), os.cpu_count() or 1
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct, float32",
        "trace": trace_name(path),
        "device tokens": plan.device_tokens,
        "host tokens": plan.host_tokens,
        "tokens of everything on the device": plan.all_tokens,
        "threads": threads,
        **compiled_parts(),
    }
    for name in systems:
        server = RunningServer(server_kind(name, plan), Setting(model, plan.device_tokens, threads, folder))
        try:
            server.start()
            row, settings["notes"] = measure(server, plan, LIMIT_S / len(systems))
        finally:
            stop_undisturbed([server])
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
    stop_on_signals()
    with tempfile.TemporaryDirectory(prefix="bench-traces-") as folder:
        model = make_model()
        for name in names:
            for path in paths_of(str(args.trace_folder / f"{name}.jsonl.gz"), args.trace_folder):
                try:
                    run(path, systems, Path(folder), model)
                except ServerError as error:
                    print(f"{error}\n{error.log}", file=sys.stderr)
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
