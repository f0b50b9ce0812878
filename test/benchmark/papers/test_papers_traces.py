"""Whole traces on tiny ones: what is read, how far a system is from the bound, and the command to its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.papers.__main__ import main
from benchmark.papers.runs import Outcome, Runs
from benchmark.papers.traces import SYSTEM_NAMES, figure, gap_closed, paths_of, verdict
from benchmark.papers.traces_runs import (
    TRACES,
    UNLIMITED,
    TraceSettings,
    capacities,
    simulate,
    system_of,
    total_tokens,
    trace_name,
    workload_of,
)

from benchmark import common
from benchmark.papers import figures

# Three documents of six blocks, each asked three times by turns, at once.
PROMPTS = [(0, [10 * (i % 3) + b for b in range(6)] + [100 + i]) for i in range(9)]


def lines(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 60_000 * i, "input_length": 3500, "output_length": 4, "hash_ids": blocks}
        for i, (_, blocks) in enumerate(PROMPTS)
    ]
    return lines(tmp_path / "mooncake_conversation.jsonl", rows)


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    rows = [
        {
            "session_id": str(s),
            "input_length": 600,
            "output_length": 8,
            "hash_ids": [100 * s + 10 * t, 100 * s + 10 * t + 1],
            **({"delay": 1000} if t else {"timestamp": 0}),
        }
        for s in range(3)
        for t in range(3)
    ]
    return lines(tmp_path / "agentic_200k.jsonl", rows)


def test_arrivals(chats: Path, agents: Path) -> None:
    settings = TraceSettings("ours", chats)
    assert [c.start for c in workload_of(settings).conversations] == [60.0 * i for i in range(9)]
    assert workload_of(replace(settings, slowdown=2.0)).conversations[1].start == 120
    assert len(workload_of(replace(settings, share=0.34)).conversations) == 3
    assert [len(workload_of(replace(settings, first=n)).conversations) for n in (4, 99)] == [4, 9]
    assert total_tokens(workload_of(settings)) == 9 * 3504
    sessions = workload_of(TraceSettings("ours", agents, max_open=2))
    assert sessions.max_open == 2 and [len(c.turns) for c in sessions.conversations] == [3, 3, 3]
    assert sessions.max_in_flight is None


def test_the_machine_holds_every_known_prompt() -> None:
    device, host = capacities(TraceSettings("ours", Path("x.jsonl")))
    assert 210_000 < device < host
    assert capacities(TraceSettings("ours", Path("x.jsonl"), share=0.5, host=0.5))[1] == pytest.approx(
        host / 4, abs=1
    )


def test_a_run_finds_what_came_before(chats: Path) -> None:
    """Six of the nine find their document; a question has the rest. A minute apart, everything is cached."""
    outcome = simulate(TraceSettings("Strata", chats))
    assert outcome.num_requests == 9 and outcome.hit_rate == pytest.approx(6 * 6 * 512 / (9 * 3500))
    assert simulate(TraceSettings(UNLIMITED, chats)).hit_rates == {"device": outcome.hit_rate, "host": 0.0}
    assert not system_of(UNLIMITED).has_host and system_of("Strata").has_host


@pytest.mark.slow
def test_every_system_beside_the_bound(chats: Path, agents: Path) -> None:
    result = figure(Runs(quiet=True, run=simulate), chats)
    assert "(recorded:" in result.title and result.name == "papers_traces_mooncake_conversation"
    assert [row["system"] for row in result.table] == list(SYSTEM_NAMES)
    assert result.table[-1]["mean TTFT / unlimited"] == 1
    hits = [claim for claim in result.claims if "hits" in claim.what]
    assert len(hits) == len(SYSTEM_NAMES) and {claim.paper for claim in hits} == {"58.5"}
    assert all(claim.ours == pytest.approx(58.5, abs=0.05) for claim in hits)
    few = figure(Runs(quiet=True, run=simulate), agents, systems=("no hierarchy", "ours"))
    assert "(generated:" in few.title and "gap closed %" not in few.table[0]


def outcome(mean_s: float) -> Outcome:
    return Outcome(1, mean_s, 0, 0, 0, 0, {}, 0, 0, 0, 0, 0, {}, 0, None)  # type: ignore[arg-type]


def test_distance() -> None:
    assert gap_closed(outcome(4.0), outcome(10.0), outcome(2.0)) == 75
    assert gap_closed(outcome(12.0), outcome(10.0), outcome(2.0)) == -25
    assert gap_closed(outcome(1.0), outcome(1.01), outcome(1.0)) is None
    assert [verdict(x) for x in (1.02, 0.98, 1.5, 0.5)] == ["no difference", "no difference", "helps", "harms"]


def test_a_missing_file_is_told_and_skipped(tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats.rename(tmp_path / "mooncake_conversation.jsonl.gz")
    assert [trace_name(path) for path in paths_of("all", tmp_path)] == ["mooncake_conversation"]
    shown = capsys.readouterr().out
    assert shown.count("it is skipped") == 2 and all(name in shown for name in list(TRACES)[1:])
    assert paths_of(str(tmp_path / "none.jsonl"), tmp_path) == []


def test_the_command(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "OUT", tmp_path / "out")
    monkeypatch.setattr(figures, "OUT", tmp_path / "out")
    command = ["papers", "traces", "--trace", str(chats), "--quick", "--systems", "no hierarchy,ours"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    written = json.loads((tmp_path / "out" / "papers_traces_mooncake_conversation.json").read_text())
    assert written["settings"]["scale"] == {"mooncake_conversation": {"share": 0.02}}
    assert "recorded" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command[:-1], "none"])
    with pytest.raises(SystemExit):
        main()
    assert "'none' is none of no hierarchy" in capsys.readouterr().err
