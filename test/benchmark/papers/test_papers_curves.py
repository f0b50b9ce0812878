"""Ratios at equal TTFT, on curves drawn by hand."""

from __future__ import annotations

import pytest
from benchmark.papers.curves import largest_ratio, peak_ratio, throughput_at

# Throughput doubles, then stays; TTFT rises.
FAST = [(100.0, 1.0), (200.0, 2.0), (400.0, 6.0), (400.0, 12.0)]
SLOW = [(50.0, 2.0), (100.0, 4.0), (110.0, 20.0)]


@pytest.mark.parametrize(
    ("ttft_s", "expected"), [(0.9, None), (1.0, 100), (1.5, 150), (2.0, 200), (4.0, 300), (6.0, 400), (99.0, 400)]
)
def test_between_points_throughput_is_a_line(ttft_s: float, expected: float | None) -> None:
    assert throughput_at(FAST, ttft_s) == expected


def test_a_curve_that_bends_back_gives_its_best() -> None:
    """Overloaded, a system may lose throughput: what it had at a lower rate, and a lower TTFT, still counts."""
    thrashing = [(100.0, 1.0), (300.0, 3.0), (200.0, 9.0)]
    assert throughput_at(thrashing, 9.0) == 300
    # And a TTFT that falls with the rate, as batches grow, counts from where it falls below.
    assert throughput_at([(10.0, 4.0), (20.0, 2.0)], 3.0) == 20


def test_the_largest_ratio_is_where_both_have_a_point() -> None:
    # At 2 s: 200 / 50, at 4 s: 300 / 100, at 6 s: 400 / 101.25.
    assert largest_ratio(FAST, SLOW) == (pytest.approx(4.0), 2.0)
    assert largest_ratio(SLOW, FAST)[0] == pytest.approx(1 / 3, rel=0.3)
    assert peak_ratio(FAST, SLOW) == pytest.approx(400 / 110)


def test_a_system_against_itself_gives_one() -> None:
    assert largest_ratio(FAST, FAST)[0] == 1 == peak_ratio(FAST, FAST)
