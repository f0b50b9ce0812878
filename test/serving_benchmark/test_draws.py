"""Draws against plain statistics, each with its seed printed."""

from __future__ import annotations

import numpy as np
import pytest

from sglang.serving_benchmark.arrivals import poisson_starts, trace_starts
from sglang.serving_benchmark.draws import bursty_times, lengths_in_range, splitmix64, zipf_ranks
from sglang.serving_benchmark.workload import Session, Turn, Workload, made_up

SEEDS = range(3)


def workload(num_sessions: int, turns: int = 1, starts: list[float] | None = None) -> Workload:
    turn = Turn(made_up(0, 4), 2)
    times = starts or [None] * num_sessions
    return Workload(tuple(Session((turn,) * turns, start_s=time) for time in times))


@pytest.mark.parametrize("seed", SEEDS)
def test_lengths_reach_both_ends_and_lie_evenly_between(seed: int) -> None:
    print("seed", seed)
    lengths = lengths_in_range(np.random.default_rng(seed), 20_000, 100, 0.5)
    assert lengths.min() == 50 and lengths.max() == 100
    assert abs(lengths.mean() - 75) < 0.5
    assert lengths_in_range(np.random.default_rng(seed), 100, 3, 0.0).min() == 1
    assert (lengths_in_range(np.random.default_rng(seed), 10, 7, 1.0) == 7).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_zipf_ranks_come_as_often_as_their_weights(seed: int) -> None:
    print("seed", seed)
    counts = np.bincount(zipf_ranks(np.random.default_rng(seed), 60_000, 4, 1.0), minlength=4) / 60_000
    assert np.abs(counts - np.array([12, 6, 4, 3]) / 25).max() < 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_bursts_vary_as_asked_for(seed: int) -> None:
    print("seed", seed)
    times = bursty_times(np.random.default_rng(seed), 40_000, 2.0, 9.0)
    assert len(times) == 40_000 and (np.diff(times) >= 0).all()
    counts = np.bincount((times // 60).astype(int))[:-1]
    assert counts.mean() == pytest.approx(120, rel=0.07) and counts.var() / counts.mean() == pytest.approx(
        9, rel=0.35
    )
    plain = bursty_times(np.random.default_rng(seed), 40_000, 2.0, 1.0)
    counts = np.bincount((plain // 60).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1, rel=0.35)


def test_numbers_are_mixed_as_published() -> None:
    # The first numbers of the generator with the state 0, from its authors' program.
    state = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    golden = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    assert splitmix64(state * np.uint64(inverse)).tolist() == golden


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("turns", [1, 4])
def test_sessions_begin_as_a_poisson_process_of_their_requests(seed: int, turns: int) -> None:
    print("seed", seed)
    starts = np.array(poisson_starts(workload(20_000, turns), rate=8.0, seed=seed))
    gaps = np.diff(starts)
    assert starts[0] == 0 and (gaps >= 0).all()
    # A model: exponential gaps have as large a deviation as mean, and a share of 1/e above it.
    assert abs(gaps.mean() * 8 / turns - 1) < 0.03 and abs(gaps.std() / gaps.mean() - 1) < 0.03
    assert abs((gaps > gaps.mean()).mean() - np.exp(-1)) < 0.02
    assert poisson_starts(workload(20_000, turns), rate=8.0, seed=seed) == starts.tolist()


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert poisson_starts(workload(3), float("inf"), 0) == [0, 0, 0]
    assert poisson_starts(workload(0), 1.0, 0) == []


def test_the_times_of_a_trace_count_from_its_first() -> None:
    assert trace_starts(workload(3, starts=[5.0, 6.0, 9.5]), slowdown=2) == [0.0, 2.0, 9.0]
