"""Headlines over seeds and over ranges, from runs that are arithmetic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark.papers.__main__ import HEADLINES, main
from benchmark.papers.figures import Claim, Result, report
from benchmark.papers.runs import Outcome, Runs, RunSettings
from benchmark.papers.sensitivity import Fragile, Headline, Setting, over_seeds, ranges, sensitivity
from benchmark.simulator.cost_models import DIRECT, link_rate
from benchmark.simulator.profiles import H200, MODELS

from benchmark import common
from benchmark.papers import figures, runs, strata_headlines


@dataclass(frozen=True)
class Point:
    """Of a run that gives factor * seed."""

    factor: float
    seed: int = 1


@dataclass(frozen=True)
class Formula:
    factor: float


def first(outcomes: Sequence[float]) -> float:
    return outcomes[0]


def make_runs() -> Runs:
    return Runs(quiet=True, run=lambda s: s.factor * getattr(s, "seed", 1))


SEEDED = Headline("seeded", (Point(2.0),), first)
FIXED = Headline("a formula", (Formula(5.0),), first, is_varied=False)


def test_mean_and_ends_over_three_seeds() -> None:
    runs = make_runs()
    seeded, fixed = over_seeds(runs, [SEEDED, FIXED])
    assert seeded == {"headline": "seeded", "mean": 4.0, "lowest": 2.0, "highest": 6.0, "by seed": [2.0, 4.0, 6.0]}
    assert fixed["by seed"] == [5.0], "a cost model has no seeds"
    assert len(runs.outcomes) == 4


def test_a_range_has_the_headline_at_each_end() -> None:
    low, usual, high = (Setting(f"{x:g}", {"factor": x}) for x in (1.0, 2.0, 8.0))
    row, _ = ranges(make_runs(), [Fragile("factor", (SEEDED, FIXED), low, usual, high)])
    assert (row["low"], row["at low"], row["at usual"], row["at high"]) == ("1", 1.0, 2.0, 8.0)
    assert row["assumption"] == "factor" and row["headline"] == "seeded"


def test_a_sensitivity_table_leaves_out_what_is_not_varied() -> None:
    rows = sensitivity(make_runs(), [SEEDED, FIXED], [("as usual", {}), ("twice", {"factor": 4.0})])
    assert rows == [{"with": "as usual", "seeded": 2.0}, {"with": "twice", "seeded": 4.0}]


def test_a_record_has_all_numbers_but_those_of_single_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "OUT", tmp_path / "out")
    monkeypatch.setattr(figures, "RECORDS", tmp_path / "records")
    setting = Setting("1", {})
    fragile = [Fragile("factor", (SEEDED,), setting, setting, setting)]
    claims = [Claim("what", "-", 1.23456789, "")]
    result = Result("papers_x", "x", "simulated", claims, [{"a": 1}], (), (), [SEEDED], (), fragile)
    report(result, make_runs(), {"systems": {}, "only": ""}, with_record=True)
    record = json.loads((tmp_path / "records" / "papers_x.json").read_text())
    assert record["claims"][0]["ours"] == 1.235 and record["headlines"][0]["highest"] == 6.0
    assert record["fragile"][0]["at low"] == 2.0 and "points" not in record and "systems" not in record["settings"]
    written = json.loads((tmp_path / "out" / "papers_x.json").read_text())["rows"][0]
    assert written["points"] == [{"a": 1}] and written["claims"][0]["ours"] == 1.23456789
    assert written["headlines"][0]["by seed"] == [2.0, 4.0, 6.0]


def outcome_of(settings: RunSettings) -> Outcome:
    """As many requests per second as its seed, by whatever else is changed."""
    rate = settings.seed * settings.copy_cost * settings.in_flight
    none = np.empty((0, 4))
    return Outcome(1, 1.0, 1.0, 1.0, 1.0, rate, {"host": 0.5}, 0.25, 0.5, 1.0, 1.0, 1.0, {}, 0.0, none)


@pytest.mark.parametrize("number", strata_headlines.FIGURES)
def test_headlines_without_curves(number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has settings that exist, and a range changes fields that they have."""
    monkeypatch.setattr(common, "OUT", tmp_path / "out")
    runs = Runs(quiet=True, run=outcome_of)
    result = HEADLINES["strata"][number](number, runs)
    assert len({h.name for h in result.headlines}) == len(result.headlines) > 2
    assert all(len(headline.settings) == 2 for headline in result.headlines)
    assert result.table and result.table[0]["stalled %"] == 25 and result.table[0]["hits %"] == 50
    report(result, runs, {}, with_sensitivity=False)
    (rows,) = json.loads((tmp_path / "out" / f"papers_strata_fig{number}_headlines.json").read_text())["rows"]
    # A ratio of runs of one seed, and of runs with one change.
    assert {x for row in rows["headlines"] for x in row["by seed"]} == {1.0}
    assert all(row["at low"] == row["at high"] == 1.0 for row in rows["fragile"])


def test_only_some_headlines() -> None:
    """What is left out does not run."""
    runs = Runs(quiet=True, run=outcome_of)
    result = HEADLINES["strata"]["8"]("8", runs, only="LooGLE, 70B").with_only("LooGLE, 70B")
    assert {settings.model for settings in runs.outcomes} == {"Llama-3.1-70B"}
    assert [h.name for h in result.headlines if "70B" not in h.name] == [] != result.headlines
    assert [h.name for h in result.fragile[0].headlines] == ["LooGLE, 70B: Strata / SGLang-HiCache, peak"]


def test_a_quarter_of_a_copys_cost_is_what_pieces_of_64_kib_give() -> None:
    """70B at tp 4 and page size 32: 16 KiB."""
    piece = 32 * MODELS["Llama-3.1-70B"].row_bytes
    assert piece == 16 << 10
    cheaper = runs._machine(RunSettings("SGLang-HiCache", copy_cost=0.25)).link
    assert link_rate(cheaper, DIRECT, piece) == pytest.approx(link_rate(H200.link, DIRECT, 4 * piece))


def test_a_figure_without_headlines_of_its_own_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["papers", "strata", "--figure", "9", "14", "--headlines"])
    with pytest.raises(SystemExit):
        main()
    assert "figure 14 has no headlines by itself: 8, 9, 11, 13 have" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("strata", "--figure", "14", "--quick", "--record"), "--record is for whole runs"),
        (("traces", "--systems", "ours", "--record"), "--record is for all systems of a whole trace"),
        (("traces", "--trace", "nothing.jsonl"), "there is no trace to run"),
        (("traces", "--first", "0"), "0 is not 1 or more"),
    ],
)
def test_what_would_not_be_a_result_is_refused(
    arguments: tuple[str, ...], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["papers", *arguments])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 2 and error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", "has no requests"),
        ("not JSON\n", "(line 1:"),
        ('{"timestamp": -5, "input_length": 3, "output_length": 1, "hash_ids": [1]}\n', "trace.jsonl:1"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_before_anything_runs(
    content: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text(content)
    monkeypatch.setattr("sys.argv", ["papers", "traces", "--trace", str(tmp_path / "trace.jsonl")])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 2 and error in capsys.readouterr().err


def test_a_record_of_some_headlines_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "RECORDS", tmp_path)

    def rows(**means: float) -> dict[str, list[dict[str, Any]]]:
        return {"headlines": [{"headline": name, "mean": mean, "by seed": [mean]} for name, mean in means.items()]}

    figures.record("x", {"only": "", "quick": False}, rows(a=1.0, b=2.0))
    figures.record("x", {"only": "b", "quick": False}, rows(b=3.0, c=4.0))
    record = json.loads((tmp_path / "x.json").read_text())
    assert {row["headline"]: row["mean"] for row in record["headlines"]} == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert [run["only"] for run in record["runs"]] == ["", "b"] and record["settings"] == {"quick": False}
    # Of a curve, whose rows no text tells apart, all are replaced.
    figures.record("x", {"only": "c", "quick": False}, rows(c=5.0) | {"table": [{"rate": 1.0}, {"rate": 2.0}]})
    assert json.loads((tmp_path / "x.json").read_text())["table"] == [{"rate": 1.0}, {"rate": 2.0}]
    assert all(run["seeds"] == [1, 2, 3] and run["commit"] and run["date"] for run in record["runs"])
