"""The nets hold: a short soak survives, and every planted bug is caught."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from sglang.srt.managers.scheduler import SCHEDULING_COUNTERS
from sglang.test.mutations import MUTATIONS, configurations, hunt
from sglang.test.soak import Soak, SoakConfig


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Injected failures are logged with their tracebacks, thousands of them."""
    logging.getLogger("sglang").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("seed", range(100, 116))
def test_soak(seed: int) -> None:
    soak = Soak(SoakConfig.draw(seed, 250))
    soak.run()
    assert soak.num_finished > 0


def test_without_a_bug_the_hunt_finds_nothing() -> None:
    counters: Counter[str] = Counter()
    for config in configurations():
        soak = Soak(config)
        soak.run()
        counters.update(soak.ranks[0].core.scheduler.counters)
    assert all(counters[name] > 0 for name in SCHEDULING_COUNTERS), f"idle: {counters}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(name: str) -> None:
    assert hunt(name) is not None, f"{name} survives the soak"
