"""The age at which a tier gives pages up, by examples and with random events."""

from __future__ import annotations

import random

import pytest

from sglang.srt.mem_cache.tier_age import TierAge


def test_a_tier_that_has_given_nothing_up_has_no_age():
    assert TierAge(100).launches == 0


def test_the_age_follows_what_is_given_up():
    age = TierAge(100)
    age.note_given_up(80, 1)
    assert age.launches == 80
    for _ in range(20):
        age.note_given_up(40, 10)
    assert age.launches == 40


def test_many_pages_count_more_than_few():
    few, many = TierAge(100), TierAge(100)
    for age, num_pages in ((few, 1), (many, 50)):
        age.note_given_up(80, 1)
        age.note_given_up(40, num_pages)
    assert 40 < many.launches < few.launches < 80


def test_pages_that_a_bonus_has_not_saved_count_as_just_used():
    age = TierAge(100)
    age.note_given_up(-30, 5)
    assert age.launches == 0


@pytest.mark.parametrize("seed", range(5))
def test_it_stays_between_the_least_and_the_most(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    age, ages = TierAge(rng.choice((1, 10, 1000))), []
    for _ in range(200):
        ages.append(rng.randrange(500))
        age.note_given_up(ages[-1], rng.randrange(1, 200))
        assert min(ages) <= age.launches <= max(ages)
