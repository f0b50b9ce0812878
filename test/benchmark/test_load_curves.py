"""Runs of `benchmark.peers.load` and `benchmark.peers.traces`, with servers that are not there."""

from __future__ import annotations

import gzip
import hashlib
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmark.papers.traces_runs import TraceSettings, capacities
from benchmark.peers import load, signals, traces
from benchmark.peers.client import quantile
from benchmark.peers.load import Load

from sglang.serving_benchmark.datasets.traces import BLOCK


@pytest.mark.parametrize(
    "times, share, expected",
    [
        ([3.0, 1.0, 2.0, 4.0], 0.5, 2.0),
        ([3.0, 1.0, 2.0, 4.0], 0.9, 4.0),
        ([1.0, None, 2.0, None], 0.5, 2.0),
        ([1.0, None, 2.0, None], 0.75, None),
        ([], 0.5, None),
    ],
)
def test_requests_without_an_answer_are_later_than_all_others(
    times: list[float | None], share: float, expected: float | None
) -> None:
    assert quantile(times, 4, share) == expected


def result(*times: float | None, hits: float | None = None) -> dict[str, Any]:
    """As of bench_serving."""
    answered = sum(time is not None for time in times)
    return {
        **{"num_prompts": len(times), "ttfts": list(times), "completed": answered, "failed": 0},
        **{"unfinished": len(times) - answered, "request_throughput": 1.0, "median_tpot_ms": None},
        **{"cached_share": hits, "cached_share_by_tier": None if hits is None else {"disk": hits}},
    }


def test_what_is_overloaded_is_not_asked_at_higher_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = {"slow": 0.5, "fast": 2.0}
    asked: list[tuple[str, float]] = []
    counts: list[int] = []

    def measure(server: Any, load: Load, rate: float, count: int, *_: Any) -> dict[str, Any]:
        asked.append((server.kind.name, rate))
        counts.append(count)
        return result(0.1 if rate <= capacity[server.kind.name] else None)

    monkeypatch.setattr(load, "measure", measure)
    servers: Any = [SimpleNamespace(kind=SimpleNamespace(name=name)) for name in capacity]
    rows: list[dict[str, Any]] = []
    written: list[int] = []
    load.run(servers, Load("any", (), (0.5, 1.0, 2.0)), 20.0, 1, rows, lambda rows: written.append(len(rows)))
    # At the second rate the other one begins.
    assert asked == [("slow", 0.5), ("fast", 0.5), ("fast", 1.0), ("slow", 1.0), ("fast", 2.0)]
    assert written == [2, 4, 5] and counts == [12, 12, 20, 20, 40]


@pytest.mark.parametrize("warm_up", [None, ("--flag",)])
def test_each_round_asks_something_else(monkeypatch: pytest.MonkeyPatch, warm_up: tuple[str, ...] | None) -> None:
    asked: list[tuple[int, int]] = []

    def measure(server: Any, load: Load, rate: float, count: int, seconds: float, seed: int) -> dict[str, Any]:
        asked.append((count, seed))
        return result(0.1, 0.2)

    monkeypatch.setattr(load, "measure", measure)
    monkeypatch.setattr(load, "ask", lambda *_: None)
    servers: Any = [SimpleNamespace(kind=SimpleNamespace(name="ours"))]
    rows: list[dict[str, Any]] = []
    load.run(servers, Load("any", (), (0.25, 0.5, 1.0, 2.0), warm_up), 24.0, 3, rows, lambda _: None)
    assert len(rows) == 4 and len(set(asked)) == len(asked) == 12
    # Texts that are warm are the same in all rounds, so that only the number draws others.
    if warm_up:
        assert {seed for _, seed in asked} == {load.SEED} and [count for count, _ in asked][6:9] == [24, 25, 26]


def test_a_row_is_of_the_requests_of_all_rounds() -> None:
    rounds = [result(0.1, 0.2, 0.3, hits=0.5), result(1.0, None, None, hits=None), result(0.2, 0.4, 5.0, hits=0.1)]
    row = load.summary("documents", 2.0, "ours", rounds)
    assert (row["rounds"], row["requests"], row["completed"], row["unfinished"]) == (3, 9, 7, 2)
    assert (row["median TTFT s"], row["P90 TTFT s"]) == (0.4, None)
    assert (row["least TTFT s"], row["greatest TTFT s"]) == (0.2, None)
    assert row["disk hits"] == pytest.approx(0.3) and row["median_tpot_ms"] is None


def test_lengths_and_pools_are_divided_by_one_factor(tmp_path: Path) -> None:
    lengths = [100 * BLOCK, 3 * BLOCK + 256, 40 * BLOCK]
    rows = [
        {
            "timestamp": 1000 * n,
            "input_length": length,
            "output_length": 256,
            "hash_ids": list(range(-(-length // BLOCK))),
        }
        for n, length in enumerate(lengths)
    ]
    path = tmp_path / "mooncake_conversation.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    plan = traces.plan_of(path)
    # 100 blocks of 20 tokens and an answer of 10 fit 2,048 tokens; with blocks of 21 they would not.
    assert plan.factor == 20 / BLOCK and plan.all_tokens == (100 + 3 + 40) * 20 + 10 + 3 * 10
    sizes = capacities(TraceSettings("ours", path))
    assert [plan.device_tokens, plan.host_tokens] == [int(size * 20 / BLOCK) for size in sizes]
    assert (plan.context, plan.slowdown, plan.num_requests) == (2048, 1.0, 3)
    # 143 blocks in two seconds. At 1.2 ms a token, 10 tokens a block are too many, 5 are not.
    plan = traces.plan_of(path, token_s=0.0012)
    assert (plan.context, plan.factor, plan.slowdown, plan.num_requests) == (512, 5 / BLOCK, 1.0, 3)
    # 7.15 seconds of computing should be three quarters of 9.53. Two of three requests have come after 5 seconds.
    plan = traces.plan_of(path, token_s=0.01, limit_s=25.0)
    assert (plan.factor, plan.slowdown, plan.num_requests) == (5 / BLOCK, 4.78, 2)


@pytest.mark.parametrize("shade", ["light", "dark"])
def test_the_plot_is_of_the_results(shade: str) -> None:
    docs = Path(__file__).parents[2] / "docs"
    loads = ("documents", "conversations", "agents")
    content = b"".join((docs / "records" / "results" / f"load_{load}.json").read_bytes() for load in loads)
    drawn = (docs / "images" / f"load-{shade}.svg").read_text()
    assert hashlib.sha256(content).hexdigest() in drawn, "run: make docs"


def test_a_signal_stops_the_second_server_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[Any] = []
    monkeypatch.setattr(signals, "stop_all", lambda servers, _: stopped.append(list(servers)))
    server: Any = SimpleNamespace(start=lambda: None)
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    try:
        with signals.running(server):
            pass
        with pytest.raises(SystemExit) as raised, signals.running(server):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert raised.value.code == 128 + signal.SIGTERM and stopped == [[server]] * 2


def test_every_system_has_a_command_line(tmp_path: Path) -> None:
    plan = traces.Plan(traces.CASES["agentic_200k"], tmp_path, 4096, 0.02, 1.0, 200, 1000, 2500, 9000)
    setting: Any = SimpleNamespace(model=tmp_path, threads=2)
    commands = {name: traces.server_kind(name, plan).command(setting, 1) for name in traces.SYSTEMS}
    for name, command in commands.items():
        has_host = "--no-hicache" not in command
        assert has_host == (name in ("as SGLang-HiCache", "as Strata", "ours"))
        assert not has_host or command[command.index("--hicache-ratio") + 1] == "2.5"
        assert command[command.index("--max-total-tokens") + 1] == ("9000" if name == traces.ON_DEVICE else "1000")
