"""When what was issued will be over, as far as anybody knows."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from sglang.srt.managers.expected_times import Forecast


def test_operations_follow_each_other() -> None:
    forecast = Forecast()
    assert forecast.free_at == 0.0 and forecast.times_of(0) is None
    forecast.begin(0, 2.0, now=10.0)
    forecast.begin(1, 3.0, now=11.0)
    assert (forecast.times_of(0), forecast.times_of(1)) == ((10.0, 12.0), (12.0, 15.0))
    assert forecast.free_at == 15.0
    # Nothing was to do for a while.
    forecast.begin(2, 1.0, now=20.0)
    assert forecast.times_of(2) == (20.0, 21.0)
    assert forecast.free_at == 21.0


@pytest.mark.parametrize("late_by", [-1.0, 0.0, 5.0])
def test_what_ends_late_makes_the_others_late(late_by: float) -> None:
    forecast = Forecast()
    for seq in range(3):
        forecast.begin(seq, 2.0, now=0.0)
    forecast.complete(1, now=2.0 + late_by)
    assert forecast.times_of(0) is None
    assert forecast.times_of(1) == (2.0 + late_by, 4.0 + late_by)
    assert forecast.times_of(2) == (4.0 + late_by, 6.0 + late_by)
    assert forecast.free_at == 6.0 + late_by


def test_several_that_end_at_once_count_by_the_last() -> None:
    forecast = Forecast()
    for seq in range(4):
        forecast.begin(seq, 1.0, now=0.0)
    forecast.complete(3, now=7.0)
    assert [forecast.times_of(seq) for seq in range(4)] == [None, None, None, (7.0, 8.0)]


def test_nothing_new_is_over() -> None:
    """A step without completions changes nothing, however late it is."""
    forecast = Forecast()
    forecast.complete(0, now=5.0)
    assert forecast.free_at == 0.0
    forecast.begin(0, 2.0, now=5.0)
    forecast.complete(0, now=50.0)
    assert forecast.times_of(0) == (5.0, 7.0) and forecast.free_at == 7.0


def test_when_all_is_over_it_is_free() -> None:
    forecast = Forecast()
    forecast.begin(0, 100.0, now=0.0)
    forecast.begin(1, 100.0, now=0.0)
    forecast.complete(2, now=3.0)
    assert forecast.free_at == 3.0
    forecast.begin(2, 1.0, now=3.0)
    assert forecast.times_of(2) == (3.0, 4.0)


def test_what_is_void_is_over() -> None:
    """After a failed launch all that were issued end at once, and the next begins then."""
    forecast = Forecast()
    for seq in range(5):
        forecast.begin(seq, 10.0, now=0.0)
    forecast.complete(5, now=1.0)
    assert forecast.free_at == 1.0 and not any(forecast.times_of(seq) for seq in range(5))
    forecast.complete(5, now=9.0)
    assert forecast.free_at == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_a_server_whose_costs_are_known_is_foreseen(seed: int) -> None:
    """Against one that carries the operations out: if each takes what was said, each begins and ends when foreseen,
    whenever completions are heard of; if not, what has not begun ends no earlier than all before it can."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    forecast, now, free_at = Forecast(), 0.0, 0.0
    ends: list[float] = []
    done = 0
    exact = seed % 2 == 0
    for _ in range(200):
        now += rng.choice((0.0, 0.5, 3.0))
        # Completions are heard of one by one and at once, so that the clock of `complete` is right.
        while done < len(ends) and ends[done] <= now:
            done += 1
            forecast.complete(done, ends[done - 1])
        if rng.random() < 0.5:
            said = rng.choice((0.0, 0.25, 2.0))
            took = said if exact else said * rng.choice((0.5, 1.0, 3.0))
            forecast.begin(len(ends), said, now)
            free_at = max(now, free_at) + took
            ends.append(free_at)
            if exact:
                assert forecast.times_of(len(ends) - 1) == pytest.approx((free_at - took, free_at))
        spans = [forecast.times_of(seq) for seq in range(done, len(ends))]
        assert all(forecast.times_of(seq) is None for seq in range(done))
        for seq, span in zip(range(done, len(ends)), spans):
            assert span is not None and span[0] <= span[1] <= forecast.free_at
            if exact:
                assert span[1] == pytest.approx(ends[seq])
        assert all(a is not None and b is not None and a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))
    assert done > 20


def test_after_an_operation_that_took_too_long_one_at_a_time_is_tried() -> None:
    forecast = Forecast()
    forecast.begin(0, 0.01, now=0.0)
    forecast.begin(1, 0.01, now=0.0)
    assert not forecast.is_doubtful(0.03) and forecast.is_doubtful(0.04), "it is overdue"
    forecast.complete(1, now=5.0)
    forecast.note(5.0, 0.01, now=5.0)
    # The second takes no longer than expected, and clears the first, however soon it comes.
    forecast.complete(2, now=5.01)
    forecast.note(0.01, 0.01, now=5.01)
    forecast.begin(2, 0.01, now=5.01)
    assert not forecast.is_doubtful(5.01)
    for seq, seconds, waits_s in ((2, 0.1, 0.2), (3, 60.0, 0.25)):
        now = 100.0 * seq
        forecast.complete(seq + 1, now=now)
        forecast.note(seconds, 0.01, now=now)
        assert forecast.is_doubtful(now + waits_s - 0.01), (
            "for twice as long as it took, and a quarter of a second at most"
        )
        assert not forecast.is_doubtful(now + waits_s + 0.01)
        assert not forecast.is_doubtful(now, seconds) and forecast.is_doubtful(now, seconds - 0.02), "it is bearable"
        forecast.begin(seq + 1, 0.01, now=now + 50.0)
        assert forecast.is_doubtful(now + 50.0), "no other beside it"
    forecast.complete(5, now=400.0)
    forecast.note(0.02, 0.01, now=400.0)
    forecast.begin(5, 0.01, now=400.0)
    assert not forecast.is_doubtful(400.0)
    forecast.complete(6, now=500.0)
    forecast.note_failed(now=500.0)
    assert forecast.is_doubtful(500.24, bearable_s=99.0), "it failed"
    assert forecast.is_doubtful(500.24) and not forecast.is_doubtful(500.26)
    forecast.begin(6, 0.01, now=501.0)
    assert forecast.is_doubtful(501.0)
