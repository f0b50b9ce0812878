"""Evaluations in these tests write their reports and figures into a folder of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark import common
from benchmark.papers import figures


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(common, "OUT", tmp_path / "out")
    monkeypatch.setattr(figures, "OUT", tmp_path / "out")
    return tmp_path / "out"
