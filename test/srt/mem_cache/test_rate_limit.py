"""The rate of a link, on a clock that a test moves."""

from __future__ import annotations

import threading
import time

import pytest

from sglang.srt.mem_cache.rate_limit import RateLimit


class FakeTime:
    """sleep lasts late_s longer than asked."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now = 100.0
        self.late_s = late_s
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 9))
        self.now += seconds + self.late_s


def make(late_s: float = 0.0) -> tuple[FakeTime, RateLimit]:
    """10 bytes per second."""
    fake = FakeTime(late_s)
    return fake, RateLimit(10, fake.clock, fake.sleep)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_is_above_zero(rate: float):
    with pytest.raises(ValueError, match="above 0"):
        RateLimit(rate)


def test_what_has_been_moved_is_waited_for_in_turn():
    fake, limit = make()
    limit.wait(50)
    fake.now += 2
    limit.wait(10)
    assert fake.slept == [5, 1], "time in which nothing moved is not saved up"


def test_a_quick_transfer_takes_as_long_as_the_rate_says():
    fake, limit = make()
    with limit.transfer(50):
        fake.now += 2
        assert fake.slept == [], "the bytes come first"
    assert fake.slept == [3] and fake.now == 105


def test_a_slow_transfer_is_not_delayed():
    fake, limit = make()
    with limit.transfer(50):
        fake.now += 7
    assert fake.slept == [] and fake.now == 107


def test_transfers_follow_each_other_and_idle_time_is_lost():
    fake, limit = make()
    for _ in range(3):
        with limit.transfer(20):
            pass
    assert fake.now == 106
    fake.now += 50
    with limit.transfer(20):
        pass
    assert fake.now == 158, "no credit for 50 idle seconds"


def test_nothing_takes_no_time():
    fake, limit = make()
    with limit.transfer(0):
        pass
    assert fake.slept == []


def test_sleeping_late_does_not_add_up():
    fake, limit = make(late_s=0.3)
    for _ in range(100):
        with limit.transfer(20):
            pass
    assert fake.now == pytest.approx(300.3), "2 s each, late once"


def test_an_error_is_passed_on_without_a_wait():
    fake, limit = make()
    with pytest.raises(RuntimeError, match="broken"), limit.transfer(50):
        raise RuntimeError("broken")
    assert fake.slept == []


def test_threads_share_the_rate():
    limit = RateLimit(1e6)

    def work() -> None:
        for _ in range(5):
            with limit.transfer(2000):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start > 0.039, "20 transfers of 2 ms, none beside another"
