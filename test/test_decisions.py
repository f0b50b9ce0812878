"""The recorded decisions: read back whole, differences are found and named. `make test-all` compares all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from support import decisions
from support.decisions import decide, entries_of, first_difference, load, runs
from support.soak_config import SoakConfig


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("sglang")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def test_a_run_decides_as_recorded_and_a_difference_is_named() -> None:
    recorded = load()
    assert recorded.keys() == {name for name, _ in runs()}
    # With storage, whose operations name most of what a change may rename.
    name = "mix disk"
    config = dict(runs())[name]
    decided = decide(config)
    assert first_difference(entries_of(recorded[name]), decided) is None
    with_launch = next(entry for entry in decided if entry.get("launch"))
    with_launch["launch"]["seq"] += 1
    assert "launch.seq was" in (first_difference(entries_of(recorded[name]), decided) or "")
    assert "entries" in (first_difference(decided, decided[:-1]) or "")


def test_a_renamed_field_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "RENAMED", {"ops": "operations"})
    entry = entries_of(next(iter(load().values())))[0]
    assert "operations" in entry and "ops" not in entry


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), list(runs()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_run_decides_as_recorded(name: str, config: SoakConfig) -> None:
    assert first_difference(entries_of(load()[name]), decide(config)) is None
