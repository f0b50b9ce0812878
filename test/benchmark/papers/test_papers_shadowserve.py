"""ShadowServe's evaluation: systems are what they claim, runs add up, and each figure comes to its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.papers.figures import report
from benchmark.papers.runs import Runs
from benchmark.papers.shadowserve_runs import DATASETS, UNLOADED, RemoteSettings, simulate
from benchmark.papers.shadowserve_systems import SYSTEMS, Assumptions
from benchmark.simulator.cost_models import prefill_seconds
from benchmark.simulator.profiles import CHUNK_TOKENS, L40S_BLUEFIELD3, MODELS

from benchmark import common
from benchmark.papers import figures, shadowserve, shadowserve_size

LLAMA = MODELS["Llama-3.1-8B"]
CHUNK = CHUNK_TOKENS * LLAMA.kv_bytes_per_token
FEW = RemoteSettings("ShadowServe", queries=6, output=4)


def pace_ms(name: str, gbps: float, busy: bool = False) -> float:
    plane = SYSTEMS[name].plane
    assert plane is not None
    return 1e3 * plane(L40S_BLUEFIELD3, gbps * 1e9 / 8, Assumptions()).pace(CHUNK, busy)


def test_every_system_says_what_it_is() -> None:
    for system in SYSTEMS.values():
        assert system.models.endswith(".") and system.lacks.endswith(".")
    steps = [SYSTEMS[name] for name in shadowserve.STEPS]
    assert [s.partial_hits for s in steps] == [False, True, True, True, True]
    assert [s.fetch_order for s in steps] == ["fifo"] * 3 + ["sjf"] * 2
    assert [s.or_recompute for s in steps] == [False] * 4 + [True]


def test_paces_of_a_chunk_by_hand() -> None:
    assert pace_ms("ShadowServe", 10) == pytest.approx(4.8)
    assert pace_ms("ShadowServe", 20) == pytest.approx(2.4)
    # 20.6 Gbit/s is all that the SmartNIC takes.
    assert pace_ms("ShadowServe", 40) == pace_ms("ours", 40) == pytest.approx(2.33, rel=0.01)
    assert pace_ms("No MM", 20) == pytest.approx(7.2)
    assert pace_ms("No CP", 20) == pytest.approx(2.4 + 0.479 + 1.607 + 1.167, rel=0.01)
    assert pace_ms("raw", 20) == pytest.approx(33.55 / 2.5, rel=0.01)
    assert pace_ms("CacheGen-Async", 20) == pytest.approx(3.0)
    assert pace_ms("CacheGen-Async", 40) == pytest.approx(1.5)
    assert pace_ms("CacheGen-Async", 40, busy=True) == pytest.approx(7.5 / 4)
    assert pace_ms("CacheGen-Async-d", 40, busy=True) == pytest.approx(7.5 / 4 * 0.7 / 0.4)


def test_an_unloaded_request_takes_its_fetch_and_its_tail() -> None:
    outcome = simulate(replace(FEW, rate=UNLOADED))
    lengths = [len(c.context) + 1 for c in DATASETS["NarrativeQA"].generate(1, UNLOADED, 4, 6).conversations]
    expected = 0.0
    for n in lengths:
        chunks = (n - 1) // CHUNK_TOKENS
        rounds = -(-chunks // 16)
        fetch = 1e-3 + chunks * 2.4e-3 + rounds * (0.66 + 1.61 + 1.54) * 1e-3
        tail = n - chunks * CHUNK_TOKENS
        expected += fetch + prefill_seconds(LLAMA, L40S_BLUEFIELD3.gpu, n - tail, tail)
    assert outcome.mean_ttft_s == pytest.approx(expected / len(lengths), rel=0.05)
    assert outcome.remote_share > 0.98 and outcome.num_requests == 6


def test_nobody_fetches_for_vllm_and_everybody_for_the_others() -> None:
    vllm = simulate(replace(FEW, system="vLLM"))
    assert vllm.remote_share == 0 == vllm.link_share and vllm.mean_ttft_s > 0.5
    for name in ("CacheGen-Async", "ours"):
        outcome = simulate(replace(FEW, system=name, rate=UNLOADED))
        assert outcome.remote_share > 0.95 and outcome.mean_ttft_s < 0.3


def test_blocking_fetches_slow_decoding_and_nothing_else() -> None:
    some = replace(FEW, queries=12, output=16, gbps=10.0)
    outcome, blocking = simulate(some), simulate(replace(some, system="No AF"))
    assert blocking.mean_tpot_s > 1.3 * outcome.mean_tpot_s
    alone = [simulate(replace(FEW, system=name, rate=UNLOADED)).mean_ttft_s for name in ("ShadowServe", "No AF")]
    assert alone[0] == pytest.approx(alone[1], rel=0.02)


def test_partial_hits_are_hits_only_for_those_that_take_them() -> None:
    mixed = replace(FEW, queries=9, stored="mixed")
    whole, partial = (simulate(replace(mixed, system=name)) for name in ("ShadowServe", "+ partial hits"))
    assert 0.2 < whole.remote_share < partial.remote_share < 0.8
    assert partial.requests_per_s > whole.requests_per_s


@pytest.mark.parametrize(
    "change",
    [{"compressed": 0.7}, {"network": 5.0}, {"slower": 30.0}, {"efficiency": 0.3}, {"cachegen_size": 3.0}],
    ids=str,
)
def test_what_a_sensitivity_table_changes_matters(change: dict[str, float]) -> None:
    system = {"slower": "No MM", "cachegen_size": "CacheGen-Async"}.get(next(iter(change)), "ShadowServe")
    settings = replace(FEW, system=system, rate=UNLOADED)
    assert simulate(replace(settings, **change)).mean_ttft_s > simulate(settings).mean_ttft_s  # type: ignore[arg-type]


def test_where_a_headline_rises_through_a_level() -> None:
    sizes = (1.0, 2.0, 3.0)
    assert shadowserve_size.size_at([0.5, 1.5, 1.7], sizes=sizes) == pytest.approx(1.5)
    assert shadowserve_size.size_at([0.5, 1.5, 1.7], 1.6, sizes) == pytest.approx(2.5)
    # Only downwards, or not at all.
    assert shadowserve_size.size_at([1.5, 0.5, 0.5], sizes=sizes) is None
    assert shadowserve_size.size_at([0.2, 0.3, 0.4], sizes=sizes) is None


def test_sources_of_a_size_lie_on_both_sides_of_equality(runs: Runs) -> None:
    """At 20 Gbit/s. The time to first token grows by CacheGen's fetch alone, in proportion to the size."""
    ttft = shadowserve_size.TTFT[20.0].values(runs, (0.8, 1.0, 1.2))
    assert ttft[2] - ttft[1] == pytest.approx(ttft[1] - ttft[0], rel=0.05) and ttft[0] < ttft[1]
    equal = shadowserve_size.size_at(shadowserve_size.TTFT[20.0].values(runs))
    assert equal is not None and shadowserve_size.LEAST < equal < shadowserve_size.MOST
    assert all(source.least <= source.most for source in shadowserve_size.SOURCES)


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs(scale={name: {"queries": 4} for name in DATASETS}, quiet=True, run=simulate)


@pytest.mark.slow
@pytest.mark.parametrize("number", shadowserve.FIGURES)
def test_a_figure(number: str, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few requests, rates and networks; two changes are enough for a sensitivity table."""
    monkeypatch.setattr(common, "OUT", tmp_path)
    monkeypatch.setattr(figures, "OUT", tmp_path)
    monkeypatch.setattr(shadowserve, "OUTPUTS", (4, 8, 16, 32, 128))
    monkeypatch.setattr(shadowserve, "RATES", (UNLOADED, shadowserve.ALL_AT_ONCE))
    result = shadowserve.FIGURES[number](runs)
    assert result.kind == ("cost model" if number == "13" else "simulated")
    object.__setattr__(result, "changes", result.changes[:2])
    claims = report(result, runs, {})
    assert len(claims) == len(result.claims) > 0 and result.points
    assert (tmp_path / f"{result.name}.json").exists() and (tmp_path / f"{result.name}.png").stat().st_size > 5000
