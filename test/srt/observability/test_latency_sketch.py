"""Quantiles in bounded memory, against those of a sorted list."""

from __future__ import annotations

import math
import random

import pytest

from sglang.srt.observability.latency_sketch import LatencySketch


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_near_those_of_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.lognormvariate(-3, 2) for _ in range(rng.randrange(1, 400))]
    sketch = LatencySketch()
    for value in values:
        sketch.add(value)
    parts = (0.1, 0.5, 0.95, 1.0)
    for part, found in zip(parts, sketch.take(parts)):
        exact = sorted(values)[math.ceil(part * len(values)) - 1]
        assert abs(found / exact - 1) < 0.05, f"seed {seed}, {part}"


def test_what_was_taken_is_forgotten() -> None:
    sketch = LatencySketch()
    sketch.add(1.0, 19)
    sketch.add(8.0)
    half, most = sketch.take((0.5, 1.0))
    assert abs(half - 1) < 0.05 and abs(most / 8 - 1) < 0.05
    assert all(math.isnan(value) for value in sketch.take((0.5, 1.0)))


def test_any_latency_has_a_bucket_and_there_are_few() -> None:
    sketch = LatencySketch()
    for value in (0.0, -1.0, 1e-9, 1e9, *(1.001**i for i in range(-10000, 10000))):
        sketch.add(value)
    assert len(sketch._counts) < 300
