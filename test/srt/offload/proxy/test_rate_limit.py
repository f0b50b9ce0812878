from __future__ import annotations

import pytest

from sglang.srt.offload.proxy.rate_limit import RateLimit


def test_what_is_moved_takes_its_time_in_turn() -> None:
    now, slept = [10.0], []
    limit = RateLimit(8.0, lambda: now[0], slept.append)  # 10^9 bytes per second
    limit.wait(500_000_000)
    limit.wait(250_000_000)
    assert slept == pytest.approx([0.5, 0.75])
    now[0] = 20.0
    limit.wait(1_000_000)
    assert slept[2] == pytest.approx(0.001), "what was not used before is not saved up"


def test_without_a_limit_nothing_waits() -> None:
    RateLimit(0.0, sleep=pytest.fail).wait(1 << 40)
