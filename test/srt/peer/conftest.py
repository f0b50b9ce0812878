"""Lenders in these tests are given all the time that they need, however busy the machine is."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.peer.memory import copy_session
from sglang.srt.peer.protocol import lender_breaker
from support.children import DEADLINE_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of what happens without it sets them again."""
    monkeypatch.setattr(copy_session, "COPY_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(lender_breaker, "SILENT_S", 10 * DEADLINE_S)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path
