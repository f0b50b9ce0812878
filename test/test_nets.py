"""The nets hold: a short soak survives, and every planted bug is caught."""

from __future__ import annotations

import logging

import pytest

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
    for config in configurations():
        Soak(config).run()


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(name: str) -> None:
    assert hunt(name) is not None, f"{name} survives the soak"
