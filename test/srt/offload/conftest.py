from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang.srt.offload import proxy_client
from support.clocks import LaterClock
from support.plane_rig import close_sources

__all__ = ["close_sources"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LaterClock:
    """By which a client knows when it has heard its proxy."""
    one = LaterClock()
    monkeypatch.setattr(proxy_client, "time", SimpleNamespace(monotonic=one))
    return one
