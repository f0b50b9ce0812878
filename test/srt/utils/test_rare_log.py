from __future__ import annotations

import logging

import pytest

from sglang.srt.utils.rare_log import INTERVAL_S, RareLog


def test_each_kind_has_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 5.0
    log = RareLog(logging.getLogger("test"), lambda: now)
    for i in range(3):
        log.warn("full", "block %d found no room", i)
        log.warn("damaged", "block %d is damaged", i)
    assert caplog.messages == ["block 0 found no room", "block 0 is damaged"]
    now += INTERVAL_S
    log.warn("full", "block %d found no room", 7)
    log.warn("full", "block %d found no room", 8)
    assert caplog.messages[2:] == ["block 7 found no room (2 more of this kind since the last line)"]
