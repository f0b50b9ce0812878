"""Statistics of a trace by hand, and that a generator fitted to a trace gives another one like it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from benchmark.simulator.trace_statistics import CAPACITIES, compare, curve_of, dispersion, fit, measure, shares
from benchmark.simulator.traces import read_prompts
from benchmark.simulator.workloads import BLOCK, Lengths, Prompt, ReuseSpec

from sglang.cli.reference_sources import read_trace

SPEC = ReuseSpec(
    "small",
    num_requests=1500,
    rate=4.0,
    dispersion=5.0,
    single=0.4,
    continued=0.4,
    single_input=Lengths(8000, 1.5),
    first_input=Lengths(6000, 1.0),
    added=Lengths(2000, 1.0),
    longest=60_000,
    whole=0.8,
    kept_mean=0.4,
    kept_sd=0.2,
    lag_median=60,
    lag_sigma=1.0,
    output=Lengths(100, 1.0),
    num_common=1,
)


def prompt(start: float, blocks: Sequence[int], input_len: int | None = None) -> Prompt:
    return Prompt(start, np.array(blocks), input_len or BLOCK * len(blocks), 10)


def written(path: Path, prompts: Sequence[Prompt]) -> Path:
    rows = [
        {
            "timestamp": 1000 * p.start,
            "input_length": p.input_len,
            "output_length": p.output_len,
            "hash_ids": p.blocks.tolist(),
        }
        for p in prompts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_statistics_by_hand() -> None:
    """Block 0 begins all. The second goes on from the first and keeps all but its cut block; the fourth goes on from
    the second and keeps half; the third is single."""
    found = measure(
        [
            prompt(0, [0, 1, 2, 3], 3 * BLOCK + 100),
            prompt(1, [0, 1, 2, 4, 5, 6]),
            prompt(2, [0, 9]),
            prompt(3, [0, 1, 2, 7]),
            prompt(4, [0, 8], 600),
        ]
    )
    assert (found.num_requests, found.rate, found.num_common, found.longest) == (5, 1.0, 1, 6 * BLOCK)
    assert (found.continued, found.single, found.whole) == (0.4, 0.4, 0.5)
    assert found.used_once == pytest.approx(7 / 10) and found.kept_mean == 0.5
    assert found.added.mean == 2 * BLOCK and found.first_input.mean == 3 * BLOCK + 100
    assert found.lag_median == pytest.approx(2**0.5) and found.single_input.mean == (2 * BLOCK + 600) / 2
    assert found.popular == 3 / 5


def test_nothing_to_fit_is_told() -> None:
    with pytest.raises(AssertionError, match="no request goes on"):
        measure([prompt(0, [1, 2]), prompt(1, [3])])


def test_dispersion() -> None:
    even = np.arange(600) * 1.0
    assert dispersion(even) == 0 and dispersion(np.array([0.0])) == 1
    assert dispersion(np.array([0.0, 1.0, 2.0, 130.0])) == pytest.approx(1.5)


def test_what_is_generated_is_as_it_was_asked_for() -> None:
    prompts = SPEC.prompts(seed=3)
    assert [p.start for p in prompts] == sorted(p.start for p in prompts) and len(prompts) == SPEC.num_requests
    assert all(-(-p.input_len // BLOCK) == len(p.blocks) and p.blocks[0] == 0 for p in prompts)
    own = measure(prompts)
    assert own.num_common == 1 and own.rate == pytest.approx(4.0, rel=0.15)
    assert own.continued == pytest.approx(0.4, abs=0.05) and own.whole == pytest.approx(0.8, abs=0.1)
    assert own.lag_median == pytest.approx(60, rel=0.25) and own.added.mean == pytest.approx(2000, rel=0.15)
    assert own.dispersion > 1.5 and own.input.cv > 0.8 and own.longest <= 60_000
    assert 0.6 < own.used_once < 0.95
    assert own.popular > 0.25, "a tenth of the beginnings has more than twice its share"
    again = SPEC.prompts(seed=3)
    assert all(np.array_equal(p.blocks, q.blocks) for p, q in zip(prompts, again, strict=True))


def test_tokens_are_shared_as_blocks_are() -> None:
    spec = ReuseSpec(**{**vars(SPEC), "num_requests": 40, "lag_median": 3.0})
    prompts, talks = spec.prompts(1), spec.generate(1).conversations
    for (p, a), (q, b) in zip(zip(prompts, talks), zip(prompts[1:], talks[1:]), strict=False):
        n = min(p.input_len, q.input_len)
        same = int(np.argmin(np.append(a.turns[0].message[:n] == b.turns[0].message[:n], False)))
        blocks = min(len(p.blocks), len(q.blocks))
        shared = int(np.argmin(np.append(p.blocks[:blocks] == q.blocks[:blocks], False)))
        assert same == min(n, shared * BLOCK) and len(a.turns[0].message) == p.input_len


def test_a_curve_is_that_of_the_same_trace_in_a_file(tmp_path: Path) -> None:
    prompts = SPEC.prompts(2)[:200]
    path = written(tmp_path / "trace.jsonl", prompts)
    log, _ = read_trace(path, 1000)
    ours, theirs = curve_of(prompts), log.curve()
    assert ours.prompt_tokens == theirs.prompt_tokens and ours.most == theirs.most > 0
    assert [ours.hits(size) for size in CAPACITIES] == [theirs.hits(size) for size in CAPACITIES]
    assert [p.blocks.tolist() for p in read_prompts(path)] == [p.blocks.tolist() for p in prompts]


def test_a_fit_is_near_its_own_trace_and_another_is_not(tmp_path: Path) -> None:
    other = ReuseSpec(**{**vars(SPEC), "continued": 0.05, "single": 0.9})
    first = written(tmp_path / "first.jsonl", SPEC.prompts(5))
    second = written(tmp_path / "second.jsonl", other.prompts(6))
    statistics, rows = compare(first, second, num_seeds=1)
    assert [row["of"] for row in statistics[:2]] == ["first", "second"]
    own, beside = (row["mean distance"] for row in rows if row[""] == "generated, fitted on first")
    assert own < 5 < beside
    refitted = fit(measure(SPEC.prompts(5)), "again")
    assert refitted.num_requests == SPEC.num_requests and refitted.longest <= SPEC.longest
    assert float(shares(curve_of(refitted.prompts(7)))[-1]) == pytest.approx(rows[0]["128 M"], abs=6)
