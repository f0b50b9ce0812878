"""One run: settings do what they say, and what has been run is not run again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmark.papers.runs import Outcome, Runs, RunSettings, points, simulate

from benchmark.papers import runs as module

# Five documents of some 2,100 tokens and 121 questions; two or three documents fit the device.
SMALL = RunSettings("Strata-IO", counts=0.05, lengths=0.1)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return simulate(SMALL)


def test_an_outcome_adds_up(outcome: Outcome) -> None:
    assert outcome.num_requests == 120
    assert outcome.counters["requests"] == 120 and outcome.requests_per_s * outcome.simulated_s == pytest.approx(120)
    # Each document once, and each question.
    assert 0.94 < outcome.hit_rate < 0.97
    assert outcome.hit_rates["host"] > 0.3
    assert 0 < outcome.mean_ttft_s <= outcome.p99_ttft_s and outcome.p90_ttft_s <= outcome.p99_ttft_s
    computed, loaded, busy_s, stall_s = outcome.batches.sum(axis=0)
    assert computed == outcome.counters["prefill_tokens"] and loaded == outcome.counters["load_back_tokens"]
    assert outcome.stall_share == pytest.approx(stall_s / (busy_s + stall_s))
    assert busy_s < outcome.busy_share * outcome.simulated_s < outcome.simulated_s
    assert 45e9 < outcome.load_bytes_per_s < 50e9 and outcome.sustained_bytes_per_s < outcome.load_bytes_per_s


def test_no_hierarchy_hits_less_and_loads_nothing(outcome: Outcome) -> None:
    without = simulate(replace(SMALL, system="no hierarchy"))
    assert without.hit_rate < outcome.hit_rate and without.hit_rates["host"] == 0 == without.load_bytes_per_s
    assert without.requests_per_s < outcome.requests_per_s


def test_a_warm_host_has_all_contexts_and_the_device_none() -> None:
    cold, warm = (simulate(replace(SMALL, dataset="NarrativeQA", warm=w)) for w in (False, True))
    assert warm.num_requests == cold.num_requests == 73 == warm.counters["requests"]
    assert warm.hit_rate > 0.99 > cold.hit_rate
    assert warm.batches[0, 1] > 0, "the first batch loads nothing"
    assert 0 < warm.mean_ttft_s < cold.mean_ttft_s


def test_blocking_loads_stall_more() -> None:
    overlapped, blocking = (
        simulate(replace(SMALL, system=name, page_size=32)) for name in ("Strata-IO", "vLLM-LMCache")
    )
    # Per byte: whoever loads faster loads more often.
    stalls = [o.batches[:, 3].sum() / o.counters["load_back_tokens"] for o in (overlapped, blocking)]
    assert stalls[0] < stalls[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ({"efficiency": 0.3}, -1),
        ({"bandwidth": 0.5}, -1),
        ({"bandwidth": 2.0}, +1),
        ({"device": 6.0}, +1),
        ({"question": 3000}, -1),
    ],
    ids=str,
)
def test_what_a_sensitivity_table_changes_matters(outcome: Outcome, change: dict[str, float], sign: int) -> None:
    changed = simulate(replace(SMALL, **change))  # type: ignore[arg-type]
    assert sign * (changed.requests_per_s - outcome.requests_per_s) > 0


@pytest.mark.slow
def test_in_flight_and_batch_tokens_reach_the_run(outcome: Outcome) -> None:
    """5 % of the queries: 6 of 128, and 50 of 1,000."""
    assert simulate(replace(SMALL, in_flight=1000)).mean_ttft_s > 2 * outcome.mean_ttft_s
    assert simulate(replace(SMALL, batch_tokens=512)).batches[:, 0].max() == 512 < outcome.batches[:, 0].max()


def test_runs_are_remembered(monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> None:
    asked = []

    def counting(settings: RunSettings) -> Outcome:
        asked.append(settings)
        return outcome

    monkeypatch.setattr(module, "simulate", counting)
    runs = Runs(scale={"LooGLE": {"counts": 0.05, "lengths": 0.1}}, quiet=True)
    settings = [RunSettings("Strata-IO"), RunSettings("Strata"), RunSettings("Strata-IO")]
    assert len(runs(settings)) == 3 and len(runs(settings)) == 3
    assert asked == [SMALL, replace(SMALL, system="Strata")]
    assert points(settings, runs(settings))[1]["system"] == "Strata"


@pytest.mark.slow
def test_processes_give_what_one_gives(outcome: Outcome) -> None:
    first, _ = Runs(jobs=2, quiet=True)([SMALL, replace(SMALL, system="Strata")])
    assert first == outcome
