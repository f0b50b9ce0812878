"""Each figure comes to its end on a tiny workload, with its claims, its rows, its plot and its file."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from benchmark.papers.figures import Result, report
from benchmark.papers.runs import ALL_AT_ONCE, Runs
from benchmark.papers.sensitivity import over_seeds
from benchmark.papers.strata_micro import disk_result, figure3

from benchmark.papers import figures, strata

TINY = {
    "LooGLE": {"counts": 0.015, "lengths": 0.1},
    "NarrativeQA": {"counts": 0.02, "lengths": 0.02},
    "ReviewMT": {"counts": 0.01, "lengths": 0.02},
    "ShareGPT": {"counts": 0.0001, "lengths": 0.2},
}


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Shared, as figures share their runs."""
    return Runs(scale=TINY, quiet=True)


def check(result: Result, runs: Runs, out: Path) -> None:
    claims = report(result, runs, {})
    assert len(claims) == len(result.claims) > 0 and result.points
    assert f"ours ({result.kind})" in claims[0]
    written = json.loads((out / f"{result.name}.json").read_text())
    assert written["settings"]["kind"] == result.kind and written["settings"]["title"].lower().startswith(result.kind)
    assert len(written["rows"][0]["claims"]) == len(claims)
    rows = written["rows"][0]
    assert len(rows["sensitivity"]) == (len(result.changes) if result.headlines else 0)
    assert len(rows["headlines"]) == len(result.headlines) and len(rows["table"]) == len(result.table)
    assert len(rows["fragile"]) == sum(len(each.headlines) for each in result.fragile)
    assert (out / f"{result.name}.png").stat().st_size > 5000


# Those that run longest, on what the others run, too.
LONG = ("2", "8", "9", "10", "11", "13", "14")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in strata.SIMULATED]
)
def test_a_simulated_figure(number: str, runs: Runs, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figure 8 with one model, and one rate, one seed and no ranges everywhere; two changes are enough for a
    sensitivity table."""
    few = dict.fromkeys(strata.RATES, (ALL_AT_ONCE,))
    monkeypatch.setattr(strata, "RATES", few)
    monkeypatch.setattr(strata, "GH_RATES", (ALL_AT_ONCE,))
    monkeypatch.setattr(strata, "MODELS", ("Llama-3.1-70B",))
    result = strata.SIMULATED[number](runs)
    assert result.kind == "simulated" and result.headlines
    monkeypatch.setattr(figures, "over_seeds", partial(over_seeds, seeds=(1,)))
    check(replace(result, changes=result.changes[:2], fragile=()), runs, out)


def test_figure_3_is_the_cost_model(runs: Runs, out: Path) -> None:
    result = figure3()
    assert [round(c.ours) for c in result.claims[:2] if isinstance(c.ours, float)] == [22, 5]
    check(result, runs, out)


def test_figure_12_is_read_from_the_measurement(runs: Runs, out: Path) -> None:
    rates = {"page_first": 2.0, "layer_first, piece by piece": 0.5}
    rows = [
        {"page size": page, "host": host, "pages": "scattered", "read cold GB/s": rate * page, "read warm GB/s": rate}
        for host, rate in rates.items()
        for page in (1, 32)
    ]
    result = disk_result(rows)
    assert result.kind == "measured" and [c.ours for c in result.claims] == [4.0] * 4
    check(result, runs, out)


def test_all_figures_are_known() -> None:
    assert {*strata.SIMULATED, "3", "12"} == set(strata.FIGURES)
