"""The benchmark of the cache controller: that it runs on the classes as they are."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmark"


def test_every_round_measures_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARK)
    bench = importlib.import_module("bench_controller")
    operations = [row["operation"] for row in bench.measure(page_size=1, num_tokens=128, rounds=5)]
    assert operations[-4:] == ["fetch, begin", "fetch, end", "store, begin", "store, end"] and len(operations) == 9
