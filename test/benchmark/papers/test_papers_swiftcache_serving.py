"""SwiftCache's master on the simulator: who holds what by hand, what a run adds up to, and each figure to its end."""

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
from benchmark.papers.swiftcache_runs import (
    COMPARED,
    LENGTHS,
    MASTERS,
    SERVING,
    ServingOutcome,
    ServingSettings,
    peer_tokens,
    simulate,
    workload_of,
)
from benchmark.papers.swiftcache_serving import (
    CHANGES,
    HEADLINES,
    figure7,
    figure8,
    figure10,
    figure11,
    load_share,
    reduction,
    stall_share,
    store_share,
)

from benchmark import common
from benchmark.papers import figures

SCALE = {name: {"requests": 12, "answers": 0.02} for name in ("ShareGPT", "L-Eval")}
TINY = {name: {"requests": 3, "answers": 0.02} for name in SCALE}
# Two conversations of 30,000 tokens fit the device, and there are eleven.
SMALL = ServingSettings("SwiftCache", "Qwen3-32B", "ShareGPT", 0.15, **SCALE["ShareGPT"])  # type: ignore[arg-type]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(common, "OUT", tmp_path / "out")
    monkeypatch.setattr(figures, "OUT", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture(scope="module")
def found() -> dict[str, ServingOutcome]:
    return {name: simulate(replace(SMALL, system=name)) for name in SERVING}


def test_every_system_says_what_it_is() -> None:
    for system in SERVING.values():
        assert system.models.endswith(".") and system.lacks.endswith(".")


def test_what_workers_lend_by_hand() -> None:
    """To Qwen3-32B lend LWM and Qwen3-14B: 0.88 of 96 GB, less weights and 40,960 tokens of 512 and 160 KiB."""
    idle = [0.88 * 96e9 - 13.48e9 - 40960 * 2**19, 0.88 * 96e9 - 29.54e9 - 40960 * 160 * 2**10]
    assert peer_tokens("Qwen3-32B") == pytest.approx(sum(idle) / 2**18, rel=1e-3)
    # Qwen3-32B has 72,000 tokens, and would keep them all.
    less = peer_tokens("LWM-7B", reserved=100_000)
    assert less == pytest.approx((0.88 * 96e9 - 29.54e9 - 100_000 * 160 * 2**10) / 2**19, rel=1e-3)


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("dataset", ["ShareGPT", "L-Eval"])
def test_conversations(master: str, dataset: str) -> None:
    workload = workload_of(ServingSettings("ours", master, dataset, 2.0))
    low, high = LENGTHS[master]
    contexts = [len(c.context) for c in workload.conversations]
    assert low <= min(contexts) and max(contexts) <= high
    ends = [len(c.context) + sum(len(t.message) + t.output_len for t in c.turns) for c in workload.conversations]
    assert max(ends) == workload.stats().max_total < (42_000 if master != "LWM-7B" else 135_000)
    # 0.95 of 96 GB, the host's, of 512, 160 and 256 KiB; LWM has few conversations.
    held = 96e9 / {"LWM-7B": 2**19, "Qwen3-14B": 160 * 2**10, "Qwen3-32B": 2**18}[master]
    assert sum(ends) == pytest.approx(0.95 * held, rel=0.1)
    turns = [len(c.turns) for c in workload.conversations]
    assert sum(turns) == 100 and max(turns) - min(turns) <= 1
    times = np.sort([t.earliest for c in workload.conversations for t in c.turns])
    assert np.diff(times).mean() == pytest.approx(1 / 2, rel=0.3)


def test_the_next_turn_waits_for_its_time_and_for_the_answer() -> None:
    workload = workload_of(replace(SMALL, requests=30))
    source = workload.source()
    sent: dict[str, float] = {}
    now = 0.0
    while (at := source.next_at()) is not None:
        now = max(now, at)
        for request in source.take(now):
            sent[request.rid] = now
            # An answer takes five seconds.
            source.finished(request.rid, now + 5.0)
    assert len(sent) == 30
    for i, talk in enumerate(workload.conversations):
        for t, turn in enumerate(talk.turns):
            answered = sent[f"{i}-{t - 1}"] + 5.0 if t else 0.0
            assert sent[f"{i}-{t}"] >= max(turn.earliest, answered)


def test_where_a_history_comes_from(found: dict[str, ServingOutcome]) -> None:
    prompts = {o.counters["prompt_tokens"] for o in found.values()}
    assert len(prompts) == 1, "systems got different requests"
    for name, outcome in found.items():
        assert outcome.num_requests == 12 and sum(outcome.hit_rates.values()) > 0.99
        used = {tier for tier, rate in outcome.hit_rates.items() if rate > 0.1 and tier != "device"}
        assert used == ({"peer"} if SERVING[name].peers else {"host"})
    # Workers have room for all of it; those who load faster wait less.
    assert found["SwiftCache"].hit_rates == found["ours"].hit_rates
    p99 = {name: o.p99_ttft_s for name, o in found.items()}
    assert p99["SwiftCache"] < p99["vLLM (LMCache)"] < p99["SGLang (HiCache)"]
    assert p99["SGLang (HiCache, kernels)"] < p99["SGLang (HiCache)"]


def test_phases_add_up(found: dict[str, ServingOutcome]) -> None:
    for outcome in found.values():
        total = outcome.queue_s + outcome.stall_s + outcome.execute_s
        assert total == pytest.approx(outcome.mean_ttft_s * 12)
        assert outcome.execute_s > 0 and outcome.stall_s >= 0
        assert 0 < load_share(outcome) < 100 and 0 <= store_share(outcome) < 100 and 0 <= stall_share(outcome) < 100
    swift = found["SwiftCache"]
    # 178 GB/s, and 20 us for each copy and some for its runs.
    loaded = swift.counters["load_peer_tokens"] * 2**18
    assert loaded / (200e9 * 0.889) < swift.loads_s.sum() < 1.05 * loaded / (200e9 * 0.889)
    assert len(swift.loads_s) <= 12 and swift.counters["load_peer_tokens"] == swift.counters["load_back_tokens"]


def test_the_link_to_the_host_has_sharers_and_that_to_peers_none(found: dict[str, ServingOutcome]) -> None:
    shared = {name: simulate(replace(SMALL, system=name, sharers=4)) for name in ("SwiftCache", "vLLM (LMCache)")}
    assert shared["SwiftCache"] == found["SwiftCache"]
    loads = [o.loads_s.sum() for o in (shared["vLLM (LMCache)"], found["vLLM (LMCache)"])]
    assert loads[0] == pytest.approx(4 * loads[1], rel=0.05)


def test_workers_that_lend_less(found: dict[str, ServingOutcome]) -> None:
    """Half of 373,000 tokens do not hold 310,000: SwiftCache computes again, ours loads from the host."""
    less = simulate(replace(SMALL, lent=0.5))
    assert sum(less.hit_rates.values()) < 0.9 < sum(found["SwiftCache"].hit_rates.values())
    more = simulate(replace(SMALL, lent=0.5, lend_device=True))
    assert sum(less.hit_rates.values()) < sum(more.hit_rates.values())
    ours = simulate(replace(SMALL, system="ours", lent=0.5))
    assert ours.hit_rates["host"] > 0.1 and sum(ours.hit_rates.values()) > 0.95


def test_a_reduction_by_hand(found: dict[str, ServingOutcome]) -> None:
    one, other = (replace(found["ours"], p99_ttft_s=s) for s in (0.33, 1.0))
    assert reduction((one, other)) == pytest.approx(67)


def test_what_workers_lose_by_hand() -> None:
    result = figure8(Runs())
    row = next(r for r in result.points if (r["master"], r["worker"], r["tokens"]) == ("LWM-7B", "Qwen3-14B", 16384))
    # Weights without the embedding, and 16,385 tokens of KV, from 3.4 TB/s less 177.8 GB/s; half a millisecond
    # beside the memory.
    read = 28e9 + 16385 * 160 * 2**10
    whole, left = (read / rate + 0.5e-3 for rate in (3.4e12, 3.4e12 - 177.8e9))
    assert row["TPOT +%, reads"] == pytest.approx(100 * (left / whole - 1), rel=0.02)
    assert row["TTFT +%, reads and writes"] == pytest.approx(0, abs=1e-9)
    assert row["TPOT +%, reads, as busy"] < row["TPOT +%, reads"] < row["TPOT +%, reads and writes"]


@pytest.mark.parametrize(
    "figure",
    [pytest.param(figure7, marks=pytest.mark.slow), figure8, figure10, figure11],
    ids=["7", "8", "10", "11"],
)
def test_a_figure(figure, out: Path) -> None:
    runs = Runs(scale=TINY, quiet=True, run=simulate)
    result = figure(runs)
    claims = report(result, runs, {}, with_sensitivity=False)
    written = json.loads((out / f"{result.name}.json").read_text())
    assert len(written["rows"][0]["claims"]) == len(claims) == len(result.claims) > 0
    assert written["rows"][0]["points"] and result.kind == ("cost model" if figure is figure8 else "simulated")
    assert (out / f"{result.name}.png").stat().st_size > 5000


def test_headlines_compare_systems_that_are_there() -> None:
    assert {s.system for h in HEADLINES for s in h.settings} == set(SERVING) > set(COMPARED)
    for _, change in CHANGES:
        replace(SMALL, **change)


@pytest.mark.slow
def test_the_command_line(out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["papers", "swiftcache", "--figure", "10", "--quick"])
    main()
    assert {path.name for path in out.iterdir()} == {f"papers_swiftcache_fig10.{kind}" for kind in ("json", "png")}
    assert "Simulated: Fig. 10, phases of a prefill, sensitivity" in capsys.readouterr().out
