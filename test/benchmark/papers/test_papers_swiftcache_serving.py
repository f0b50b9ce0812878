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
    ALONE,
    COMPARED,
    LENGTHS,
    MASTERS,
    SERVING,
    TODAY,
    ServingOutcome,
    ServingSettings,
    peer_tokens,
    simulate,
    workload_of,
)
from benchmark.papers.swiftcache_serving import (
    CHANGES,
    HEADLINES,
    alone,
    figure7,
    figure8,
    figure10,
    figure11,
    load_share,
    loss,
    reduction,
    stall_share,
    store_share,
)
from benchmark.papers.swiftcache_workers import FILL, LOAD, burst_workload
from benchmark.simulator.profiles import H20X4, MODELS, device_tokens
from benchmark.simulator.workloads import SHAREGPT_LONG

SCALE = {name: {"requests": 12, "answers": 0.02} for name in ("ShareGPT", "L-Eval")}
TINY = {name: {"requests": 3, "answers": 0.02} for name in SCALE}
# Two conversations of 30,000 tokens fit the device, and there are eleven.
SMALL = ServingSettings(
    "SwiftCache",
    "Qwen3-32B",
    "ShareGPT",
    0.15,
    working_set=0.95,
    bursts=0.0,
    **SCALE["ShareGPT"],  # type: ignore[arg-type]
)


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
    workload = workload_of(ServingSettings("ours", master, dataset, 2.0, 100, working_set=0.95))
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


def test_messages_as_the_paper_prints_them() -> None:
    """2.2: 90 % of the prompts are shorter than 132 tokens."""
    workload = workload_of(ServingSettings("ours", "Qwen3-14B", "ShareGPT", 2.0, 2000))
    lengths = [len(t.message) for c in workload.conversations for t in c.turns]
    assert np.mean(np.array(lengths) < 132) == pytest.approx(0.9, abs=0.01)


def test_contexts_of_one_length() -> None:
    workload = workload_of(ServingSettings("ours", "LWM-7B", "L-Eval", 1.0, 20, length=16_384))
    assert {len(c.context) for c in workload.conversations} <= {16_384, 16_385}


def test_as_many_requests_as_come_in_the_time() -> None:
    assert ServingSettings("ours", rate=0.1).num_requests == 100
    assert ServingSettings("ours", rate=2.0).num_requests == 600
    assert ServingSettings("ours", rate=2.0, requests=7).num_requests == 7


@pytest.mark.parametrize(("name", "each"), [("LWM-7B", 11), ("Qwen3-14B", 11), ("Qwen3-32B", 4)])
def test_bursts_by_hand(name: str, each: int) -> None:
    workload = burst_workload(name, [1, 0], 50.0, 3000.0, 1.0)
    model, gpu, mean = MODELS[name], H20X4.gpu, SHAREGPT_LONG.mean_context((2_000, 20_000))
    # Operations of one context: two per parameter and token. Attention adds a tenth.
    operations = 2 * model.num_layers * model.layer_params * mean * 1.1
    by_time = LOAD * 30 / (operations / (gpu.matrix_flops * gpu.matmul_efficiency))
    assert each == round(min(by_time, FILL * device_tokens(model, gpu) / mean))
    assert len(workload.conversations) % each == 0
    assert len(workload.conversations) / each == pytest.approx(3000 / 60, rel=0.35)
    starts = np.sort([c.start for c in workload.conversations])
    assert starts[0] >= 50 and starts[-1] < 3050 + 30
    for talk in workload.conversations:
        assert [t.earliest for t in talk.turns] == pytest.approx([talk.start, talk.start + 30, talk.start + 60])
    assert not burst_workload(name, [1, 0], 0.0, 300.0, 0.0).conversations


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


@pytest.mark.slow
def test_where_a_history_comes_from(found: dict[str, ServingOutcome]) -> None:
    prompts = {o.counters["prompt_tokens"] for o in found.values()}
    assert len(prompts) == 1, "systems got different requests"
    for name, outcome in found.items():
        assert outcome.num_requests == 12 and sum(outcome.hit_rates.values()) > 0.98
        assert (outcome.borrowed_tokens > 0) == bool(SERVING[name].peers)
    # Idle workers have room for all of it; those who load faster wait less.
    assert found["SwiftCache"].hit_rates["peer"] > 0.5 and found["SwiftCache"].hit_rates["host"] < 0.01
    # Ours asks only for what has no room: most is on the host.
    assert found["ours"].hit_rates["peer"] > 0.01 and found["ours"].hit_rates["host"] > 0.1
    p99 = {name: o.p99_ttft_s for name, o in found.items()}
    assert p99["SwiftCache"] < p99["vLLM (LMCache)"] < p99["SGLang (HiCache)"]
    assert p99[TODAY] < p99["SGLang (HiCache)"]


@pytest.mark.slow
def test_phases_add_up(found: dict[str, ServingOutcome]) -> None:
    for outcome in found.values():
        total = outcome.queue_s + outcome.stall_s + outcome.execute_s
        assert total == pytest.approx(outcome.mean_ttft_s * 12)
        assert outcome.execute_s > 0 and outcome.stall_s >= 0
        assert 0 < load_share(outcome) < 100 and 0 <= store_share(outcome) < 100 and 0 <= stall_share(outcome) < 100


@pytest.mark.slow
def test_the_row_of_the_paper_streams_and_stores_at_once(found: dict[str, ServingOutcome]) -> None:
    swift, ours = found["SwiftCache"], found["ours"]
    assert swift.counters["streamed_reqs"] == 12 and "streamed_reqs" not in ours.counters
    # What is new goes to workers at once, a few tokens at a time; ours has whole conversations leave the device.
    assert len(swift.stores_s) >= 12 and swift.stores_s.max() < 0.01 < ours.stores_s.max()


@pytest.mark.slow
def test_the_link_to_the_host_has_sharers_and_that_to_peers_none(found: dict[str, ServingOutcome]) -> None:
    shared = {name: simulate(replace(SMALL, system=name, sharers=4)) for name in ("SwiftCache", "vLLM (LMCache)")}
    assert shared["SwiftCache"] == found["SwiftCache"]
    loads = [o.loads_s.sum() for o in (shared["vLLM (LMCache)"], found["vLLM (LMCache)"])]
    assert loads[0] == pytest.approx(4 * loads[1], rel=0.05)


@pytest.mark.slow
def test_workers_that_lend_less(found: dict[str, ServingOutcome]) -> None:
    """Half of 373,000 tokens do not hold 310,000: SwiftCache computes again, ours loads from the host."""
    less = simulate(replace(SMALL, lent=0.5))
    assert sum(less.hit_rates.values()) < 0.95 < sum(found["SwiftCache"].hit_rates.values())
    assert less.borrowed_tokens < 0.7 * found["SwiftCache"].borrowed_tokens
    ours = simulate(replace(SMALL, system="ours", lent=0.5))
    assert ours.hit_rates["host"] > 0.1 and sum(ours.hit_rates.values()) > 0.95


@pytest.mark.slow
def test_what_bursts_of_workers_cost_both() -> None:
    """The paper's row takes what workers cache; ours takes less of it. Workers that lend lose something, and take
    memory back."""
    busy = replace(SMALL, rate=0.3, bursts=1.0, requests=24)
    outcomes = {name: simulate(replace(busy, system=name)) for name in ("SwiftCache", "ours")}
    home = simulate(alone(busy))
    assert home.workers.keys() == {"LWM-7B", "Qwen3-14B"}
    for outcome in outcomes.values():
        assert {n: w.num_requests for n, w in outcome.workers.items()} == {
            n: w.num_requests for n, w in home.workers.items()
        }
        assert any(w.asked_back for w in outcome.workers.values())
    lost = {name: loss((o, home), "mean_ttft_s") for name, o in outcomes.items()}
    assert lost["SwiftCache"] > lost["ours"] and lost["SwiftCache"] > 0
    assert loss((home, home), "tpot_s") == 0
    assert replace(home, wall_s=0.0) == replace(simulate(replace(busy, system=ALONE)), wall_s=0.0)


@pytest.mark.slow
def test_a_reduction_by_hand(found: dict[str, ServingOutcome]) -> None:
    one, other = (replace(found["ours"], p99_ttft_s=s) for s in (0.33, 1.0))
    assert reduction((one, other)) == pytest.approx(67)


@pytest.mark.slow
def test_what_workers_lose_by_hand() -> None:
    result = figure8(Runs(scale=TINY, quiet=True, run=simulate))
    row = next(r for r in result.table if (r["master"], r["worker"], r["tokens"]) == ("LWM-7B", "Qwen3-14B", 16384))
    # Weights without the embedding, and 16,385 tokens of KV, from 3.4 TB/s less 177.8 GB/s; half a millisecond
    # beside the memory.
    read = 28e9 + 16385 * 160 * 2**10
    whole, left = (read / rate + 0.5e-3 for rate in (3.4e12, 3.4e12 - 177.8e9))
    assert row["bound: TPOT +%, reads"] == pytest.approx(100 * (left / whole - 1), rel=0.02)
    assert row["bound: TTFT +%, reads and writes"] == pytest.approx(0, abs=1e-9)
    assert row["bound: TPOT +%, reads"] < row["bound: TPOT +%, reads and writes"]


@pytest.mark.slow
@pytest.mark.parametrize("figure", [figure7, figure8, figure10, figure11], ids=["7", "8", "10", "11"])
def test_a_figure(figure, out: Path) -> None:
    runs = Runs(scale=TINY, quiet=True, run=simulate)
    result = figure(runs)
    claims = report(result, runs, {}, with_sensitivity=False)
    written = json.loads((out / f"{result.name}.json").read_text())
    assert len(written["rows"][0]["claims"]) == len(claims) == len(result.claims) > 0
    assert written["rows"][0]["points"] and result.kind == "simulated"
    assert (out / f"{result.name}.png").stat().st_size > 5000


def test_headlines_compare_systems_that_are_there() -> None:
    assert {s.system for h in HEADLINES for s in h.settings} == {*SERVING, ALONE} > set(COMPARED)
    for _, change in CHANGES:
        replace(SMALL, **change)


@pytest.mark.slow
def test_the_command_line(out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["papers", "swiftcache", "--figure", "10", "--quick"])
    main()
    assert {path.name for path in out.iterdir()} == {f"papers_swiftcache_fig10.{kind}" for kind in ("json", "png")}
    assert "Simulated: Fig. 10, phases of a prefill, sensitivity" in capsys.readouterr().out
