"""The rule by which a session's pages stay longer, by examples and against its definition with exact fractions."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from sglang.srt.mem_cache.session_weights import Returns, bonus_launches, expected_returns

NO_GAPS = np.empty(0, np.int64)


def returns(*gaps: int, share: float = 1.0) -> Returns:
    """Equally likely gaps."""
    return Returns(np.array(gaps, np.int64), np.full(len(gaps), share / len(gaps)))


def test_a_session_that_is_back_before_the_page_goes_needs_no_bonus():
    assert bonus_launches(returns(5, 80, 100), age=100) == 0


def test_a_certain_return_is_worth_a_use():
    assert bonus_launches(returns(130), age=100) == bonus_launches(returns(101, 200), age=100) == 100


def test_what_comes_back_too_late_gets_nothing():
    assert bonus_launches(returns(201), age=100) == 0


def test_a_tier_that_gives_nothing_up_needs_no_bonus():
    assert bonus_launches(returns(1, 2, 3), age=0) == 0


def test_nothing_is_known_before_any_session_has_returned():
    assert bonus_launches(expected_returns((), NO_GAPS, 0.5), age=100) == 0


def test_who_seldom_returns_gets_little():
    assert bonus_launches(returns(130, share=0.25), age=100) == 25


def test_only_those_count_that_are_not_back_already():
    """Of ten answers five are followed within T, three within 2 T, and two by none: of five that are left, three."""
    assert bonus_launches(Returns(np.array([60, 150]), np.array([0.5, 0.3])), age=100) == 60


def test_a_sessions_own_gaps_outweigh_what_is_known_of_all():
    known = np.array([10] * 8, np.int64)
    mixed = expected_returns((150, 150, 150), known, return_share=0.5)
    assert mixed.gaps.tolist() == [150] * 3 + [10] * 8
    # The whole of what is known counts as one gap, and half of it as no return.
    assert mixed.weights.sum() == pytest.approx((3 + 0.5) / 4)
    assert mixed.weights[:3].tolist() == [0.25] * 3
    assert bonus_launches(mixed, age=100) == round(100 * 0.75 / (1 - 0.125))
    assert bonus_launches(expected_returns((), known, 0.5), age=100) == 0


@pytest.mark.parametrize("seed", range(10))
def test_against_the_definition(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(50):
        age = rng.randrange(1, 60)
        own = [rng.randrange(150) for _ in range(rng.randrange(6))]
        known = [rng.randrange(150) for _ in range(rng.randrange(1, 9))]
        share = Fraction(rng.randrange(1, 9), 9)
        likely = expected_returns(own, np.array(known, np.int64), float(share))
        assert 0 < likely.weights.sum() < 1 + 1e-9

        def returned_by(launch: int, own=own, known=known, share=share) -> Fraction:
            of_all = share * sum(gap <= launch for gap in known) / len(known)
            return (sum(gap <= launch for gap in own) + of_all) / (len(own) + 1)

        first, second = returned_by(age), returned_by(2 * age)
        exact = age * (second - first) / (1 - first) if second > first else Fraction(0)
        found = bonus_launches(likely, age)
        assert 0 <= found <= age, "more than one use is worth"
        assert abs(found - exact) <= Fraction(1, 2) + Fraction(1, 10**9)
