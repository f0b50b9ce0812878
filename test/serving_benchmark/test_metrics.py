"""Records and metrics under a clock that the test sets, against plain numpy."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sglang.serving_benchmark import metrics, plot, report
from sglang.serving_benchmark.records import Progress, RequestRecord, tiers_of
from sglang.serving_benchmark.runner import Outcome


def record(start: float, steps: list[tuple[float, str, int | None]], end: float, **fields: object) -> RequestRecord:
    """steps: (time, new text, tokens so far)."""
    made = RequestRecord(prompt_len=10, start_s=start)
    for now, text, tokens in steps:
        made.add(Progress(text=text, num_tokens=tokens), now)
    for name, value in fields.items():
        setattr(made, name, value)
    made.finish(end)
    return made


def test_tokens_that_come_together_share_their_time() -> None:
    made = record(1.0, [(1.5, "", 1), (2.0, "a", 2), (2.6, "bcd", 5), (2.7, "", 6), (3.0, "e", 7)], 3.25)
    assert made.ttft_s == 1.0 and made.latency_s == 2.25 and made.output_len == 7 and made.text == "abcde"
    # Tokens without text count with the next text: 3 of them in 0.6 s, then 2 in 0.4.
    assert made.itl_s == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.2])


def test_events_count_where_the_server_counts_nothing() -> None:
    made = record(0.0, [(1.0, "a", None), (1.5, "", None), (3.0, "bc", None)], 3.0)
    assert made.output_len == 2 and made.itl_s == [2.0]


def test_an_answer_that_came_whole_has_no_times_of_tokens() -> None:
    made = RequestRecord(prompt_len=10, start_s=0.0)
    made.add(Progress(text="abc", num_tokens=3, prompt_tokens=12, cached_tokens=4), None)
    made.finish(2.0)
    assert (made.ttft_s, made.itl_s, made.prompt_len, made.cached_tokens) == (None, [], 12, 4)


@pytest.mark.parametrize("seed", range(3))
def test_metrics_are_those_of_numpy(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    records = []
    for _ in range(50):
        start = rng.uniform(0, 20)
        times = start + np.cumsum(rng.exponential(0.2, rng.integers(1, 9)))
        steps = [(float(t), "x", i + 1) for i, t in enumerate(times)]
        records.append(record(start, steps, float(times[-1]), error="broken" if rng.random() < 0.2 else None))
    duration = 30.0
    found = metrics.summarize(Outcome(records, duration, cpu_s=3.0))
    done = [r for r in records if r.error is None]
    reference = {
        "ttft": [r.ttft_s for r in done],
        "e2e_latency": [r.latency_s for r in done],
        "tpot": [(r.latency_s - r.ttft_s) / (r.output_len - 1) for r in done if r.output_len > 1 and r.ttft_s],
        "itl": [x for r in done for x in r.itl_s],
    }
    for name, values in reference.items():
        ms = 1000 * np.array(values)
        assert found[f"mean_{name}_ms"] == pytest.approx(np.mean(ms))
        assert found[f"median_{name}_ms"] == pytest.approx(np.percentile(ms, 50))
        assert found[f"std_{name}_ms"] == pytest.approx(np.std(ms))
        assert found[f"max_{name}_ms"] == pytest.approx(np.max(ms))
        for p in (90, 95, 99):
            assert found[f"p{p}_{name}_ms"] == pytest.approx(np.percentile(ms, p))
    assert found["completed"] == len(done) and found["failed"] == 50 - len(done) == found["error_counts"]["broken"]
    assert found["request_throughput"] == len(done) / duration
    assert found["output_throughput"] == sum(r.output_len for r in done) / duration
    assert found["concurrency"] == pytest.approx(sum(r.latency_s for r in done) / duration)
    moments = [r.start_s for r in done]
    at_once = [sum(r.start_s <= t < r.start_s + r.latency_s for r in done) for t in moments]
    assert found["max_concurrent_requests"] == max(at_once)
    begun = min(moments)
    ends = [r.start_s - begun + (r.ttft_s or 0) + x for r in done for x in [0.0, *np.cumsum(r.itl_s)]]
    assert found["max_output_tokens_per_s"] == np.bincount(np.floor(ends).astype(int)).max()
    assert found["client_cpu_share"] == pytest.approx(0.1)


def test_hits_are_of_the_requests_that_report_them() -> None:
    tiered = record(0, [(1, "x", 1)], 1, cached_tokens=6, cached_tokens_by_tier={"device": 4, "host": 2})
    plain = record(0, [(1, "x", 1)], 1, cached_tokens=2)
    silent = record(0, [(1, "x", 1)], 1)
    failed = record(0, [], 1, cached_tokens=9, error="broken")
    found = metrics.summarize(Outcome([tiered, plain, silent, failed], 1.0))
    assert (found["total_cached_tokens"], found["cached_share"]) == (8, 0.4)
    assert found["cached_tokens_by_tier"] == {"device": 4, "host": 2}
    assert found["cached_share_by_tier"] == {"device": 0.2, "host": 0.1}
    found = metrics.summarize(Outcome([plain], 1.0))
    assert found["cached_share"] == 0.2 and found["cached_tokens_by_tier"] is None
    assert metrics.summarize(Outcome([silent], 1.0))["total_cached_tokens"] is None


def test_tiers_are_the_numbers_of_the_details() -> None:
    assert tiers_of({"device": 3, "storage": 0, "storage_backend": "file"}) == {"device": 3, "storage": 0}
    assert tiers_of(None) is None


def result(outcome: Outcome, rate: float = 2.0) -> dict:
    known = {
        "backend": "sglang",
        "model": "m",
        "dataset_name": "random",
        "request_rate": rate,
        "max_concurrency": None,
    }
    return {**known, "dropped": 0, **metrics.summarize(outcome)}


def test_nothing_measured_gives_a_table_and_a_line_without_numbers() -> None:
    found = result(Outcome([record(0, [], 1, error=f"kind {i}") for i in range(7)], 1.0), float("inf"))
    text = report.table(found, ["Lengths are scaled."])
    assert "Mean TTFT (ms):                          not measured" in text
    assert "     1 x kind 0" in text and "and 2 other kinds" in text and "Note: Lengths are scaled." in text
    line = json.loads(json.dumps(report.json_ready(found), allow_nan=False))
    assert line["request_rate"] == "inf" and line["mean_ttft_ms"] is None and line["completed"] == 0
    assert " -" in report.comparison([found])


def test_the_table_has_upstreams_labels() -> None:
    made = record(0, [(1, "x", 1), (2, "y", 2)], 2, cached_tokens=5, cached_tokens_by_tier={"device": 5, "host": 0})
    text = report.table(result(Outcome([made], 4.0, cpu_s=3.9)), [])
    for label, value in {
        "Successful requests": "1",
        "Request throughput (req/s)": "0.25",
        "Total generated tokens": "2",
        "Median TTFT (ms)": "1000.00",
        "P90 TPOT (ms)": "1000.00",
        "P99 ITL (ms)": "1000.00",
        "Mean E2E Latency (ms)": "2000.00",
        "Cached prompt tokens": "5 (50.0%)",
        "  Device": "5 (50.0%)",
    }.items():
        assert f"{label + ':':<40} {value}" in text.splitlines(), label
    assert "used 98% of a core" in text


def test_details_have_one_entry_per_request() -> None:
    records = [record(3, [(4, "x", 1)], 5), record(2, [], 3, error="broken")]
    found = metrics.details(records)
    assert {len(values) for values in found.values()} == {2}
    assert found["start_times"] == [1, 0] and found["errors"] == ["", "broken"] and found["output_lens"] == [1, 0]


def test_a_picture_is_drawn_without_the_rates_at_which_all_failed(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    one = Outcome([record(0, [(1, "x", 1), (2, "y", 2)], 2)], 4.0)
    path = tmp_path / "load.png"
    assert plot.problem_with(str(path)) is None
    plot.draw([result(one), result(Outcome([record(0, [], 1, error="x")], 1.0))], str(path), ["A note."])
    assert path.stat().st_size > 1000


def test_a_picture_that_cannot_be_drawn_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "must end in" in (plot.problem_with("x.gif") or "")
    assert "folder" in (plot.problem_with("/no/where/x.svg") or "")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda _: None)
    assert "pip install matplotlib" in (plot.problem_with("x.svg") or "")


def test_no_key_of_a_line_stands_for_two_things() -> None:
    made = [record(0, [(1, "x", 1)], 1)]
    assert not metrics.details(made).keys() & result(Outcome(made, 1.0)).keys()
