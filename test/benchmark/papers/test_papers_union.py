"""The union's figure: capacities by hand, uniform reuse, what each row finds where, and both figures to the end."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmark.papers.__main__ import main
from benchmark.papers.figures import report
from benchmark.papers.runs import Runs
from benchmark.papers.union import LIGHT, PARTS, WORKING_SETS, best_part, figure
from benchmark.papers.union_runs import TIERS, UnionOutcome, UnionSettings, capacities, deal, simulate, workload_of
from benchmark.simulator.workloads import Conversation, Turn, Workload

from benchmark.papers import load_ratio

TINY = {"share": 0.25, "turns": 1}
QUESTIONS = {"counts": 0.015, "lengths": 0.1}
SCALE = {"L-Eval": TINY, "LooGLE": QUESTIONS, "NarrativeQA": QUESTIONS, "ReviewMT": QUESTIONS}
# Six conversations, and 84,000 tokens on the device.
SMALL = UnionSettings("union", 0.5, 0.1, **TINY)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found() -> dict[str, UnionOutcome]:
    return {name: simulate(replace(SMALL, tiers=name)) for name in TIERS}


def test_capacities_by_hand() -> None:
    """0.88 of 96 GB less the weights, what the two other models leave, and 96 GB: 160 KiB per token."""
    sizes = capacities()
    assert sizes.device == pytest.approx((0.88 * 96e9 - 29.54e9) / (160 * 2**10), rel=2e-3)
    assert sizes.host == int(96e9 // (160 * 2**10))
    assert sizes.of(TIERS["device"]) == sizes.of(TIERS["remote"]) == sizes.device
    assert sizes.of(TIERS["peers+host"]) == sizes.of(TIERS["union"]) == sizes.total
    assert capacities(0.5).host == sizes.host // 2


@pytest.mark.parametrize("size", WORKING_SETS)
def test_the_working_set_is_what_was_asked_for(size: float) -> None:
    settings = UnionSettings("union", size, 1.0)
    workload = workload_of(settings)
    ends = [len(c.context) + sum(len(t.message) + t.output_len for t in c.turns) for c in workload.conversations]
    assert sum(ends) == pytest.approx(size * capacities().total, rel=0.02)
    assert workload_of(replace(settings, tiers="device")).stats() == workload.stats()


def test_reuse_is_uniform() -> None:
    """As many turns per conversation as independent draws give, but for the one that every conversation has."""
    workload = workload_of(UnionSettings("union", 4.0, 1.0, turns=9))
    turns = np.array([len(c.turns) for c in workload.conversations])
    assert turns.min() >= 1 and turns.mean() == 9
    assert turns.var() == pytest.approx(8, rel=0.3), "eight draws each: a Poisson distribution, nearly"
    for talk in workload.conversations:
        times = [turn.earliest for turn in talk.turns]
        assert times == sorted(times) and talk.start == times[0]


def test_dealing_keeps_the_turns_and_their_times() -> None:
    context = np.arange(3, dtype=np.int32)
    turns = [Turn(np.full(2, i, np.int32), i + 1, float(i)) for i in range(4)]
    talks = (Conversation(0.0, context, (turns[0], turns[3])), Conversation(1.0, context, (turns[1], turns[2])))
    dealt = deal(Workload("two", talks), np.array([1, 0, 1, 1]))
    assert [[t.output_len for t in c.turns] for c in dealt.conversations] == [[2], [1, 3, 4]]
    assert [c.start for c in dealt.conversations] == [1.0, 0.0]


def test_parts() -> None:
    assert [tiers.name for tiers in PARTS] == [name for name in TIERS if name not in ("union", "unlimited")]
    assert TIERS["host"].is_part_of(TIERS["host+remote"]) and not TIERS["host"].is_part_of(TIERS["peers+remote"])


@pytest.mark.slow
def test_hits_come_from_tiers_that_a_row_has(found: dict[str, UnionOutcome]) -> None:
    assert len({o.counters["prompt_tokens"] for o in found.values()}) == 1, "rows got different requests"
    for name, outcome in found.items():
        tiers = TIERS[name]
        assert outcome.num_requests == 6 and 0 < outcome.hit_rate <= 1
        assert (outcome.hit_rates["peer"] > 0) <= tiers.peers
        # Without a host tier the remote one lands in host memory.
        assert (outcome.hit_rates["host"] > 0) <= (tiers.host or tiers.remote)
        assert (outcome.hit_rates["remote"] > 0) <= tiers.remote
        assert outcome.bound == (1.0 if name != "device" else pytest.approx(2 * 335353 / 1273755, rel=1e-3))
    assert found["unlimited"].hit_rates["device"] > 0.99
    assert min(found.values(), key=lambda o: o.mean_ttft_s) is found["unlimited"]
    assert max(found.values(), key=lambda o: o.mean_ttft_s) is found["device"]


@pytest.mark.slow
def test_the_best_part(found: dict[str, UnionOutcome]) -> None:
    named = {(name, 0.5, LIGHT): outcome for name, outcome in found.items()}
    best = best_part(named, 0.5, LIGHT)
    assert found[best].mean_ttft_s == min(o.mean_ttft_s for n, o in found.items() if n not in ("union", "unlimited"))


def test_settings_change_what_they_name() -> None:
    """A policy that writes back stores less in advance than one that writes through."""
    through, back = (simulate(replace(SMALL, write_policy=policy)) for policy in ("write_through", "write_back"))
    assert through.counters != back.counters
    assert SMALL.describe().keys() == {"tiers", "working_set", "rate", "share", "turns"}


@pytest.mark.slow
@pytest.mark.parametrize("function", [figure, load_ratio.figure], ids=["union", "ratio"])
def test_a_figure(function, out: Path) -> None:
    runs = Runs(scale=SCALE, quiet=True, run=load_ratio.simulate)
    result = function(runs, (0.5,)) if function is figure else function(runs)
    claims = report(result, runs, {}, with_sensitivity=False)
    written = json.loads((out / f"{result.name}.json").read_text())
    # The load ratio has ratios alone.
    assert len(written["rows"][0]["claims"]) == len(claims) == len(result.claims)
    assert bool(claims) == (function is figure)
    assert written["rows"][0]["points"] and result.kind == "simulated"
    if function is figure:
        assert (out / f"{result.name}.png").stat().st_size > 5000


@pytest.mark.slow
def test_the_command_line(out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        sys, "argv", ["papers", "union", "--figure", "union", "--quick", "--no-sensitivity", "--jobs", "1"]
    )
    main()
    assert {path.name for path in out.iterdir()} == {"papers_union.json", "papers_union.png"}
    assert "Simulated: the union of the tiers" in capsys.readouterr().out
