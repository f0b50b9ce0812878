"""Which tier holds which page, over plain numbers."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.placement import (
    CONVENIENT,
    LAST,
    PINNED,
    SPARE,
    Room,
    choose_tier,
    class_of_copy,
    is_worth_copying,
    pages_ahead,
    pages_to_write_ahead,
)
from sglang.srt.mem_cache.transfer import Tier

PEER, HOST = Tier.PEER, Tier.HOST


def room(num_free: int = 0, num_allowed: int = 10, next_class: int | None = None, next_rank: int = 0) -> Room:
    return Room(num_free, num_allowed, next_class, (next_rank,))


# -- what a copy is worth ----------------------------------------------------------------------------------------


def test_the_less_a_copy_is_worth_the_sooner_it_goes():
    assert SPARE < CONVENIENT < LAST < PINNED


@pytest.mark.parametrize(
    ("on_nearer", "on_farther", "is_next", "expected"),
    [
        (True, False, False, SPARE),
        (True, True, False, SPARE),
        # The device gives it up: then this copy is what is left, or the nearest.
        (True, False, True, LAST),
        (False, False, False, LAST),
        (False, False, True, LAST),
        (False, True, False, CONVENIENT),
        (False, True, True, CONVENIENT),
    ],
)
def test_class_of_copy(on_nearer: bool, on_farther: bool, is_next: bool, expected: int):
    assert class_of_copy(on_nearer, on_farther, is_next) == expected
    assert class_of_copy(on_nearer, on_farther, is_next, is_pinned=True) == PINNED


# -- how much is written ahead -----------------------------------------------------------------------------------


def test_what_can_go_at_once_serves_two_decode_steps_and_a_chunk():
    assert pages_ahead(0, 16) == 16
    assert pages_ahead(5, 16) - pages_ahead(4, 16) == 2


def test_nothing_is_written_ahead_while_enough_is_free():
    assert pages_to_write_ahead(num_ahead=20, num_free=20, num_known=0) == 0
    assert pages_to_write_ahead(num_ahead=20, num_free=500, num_known=0) == 0


def test_what_is_lacking_is_written_ahead_and_a_little_more():
    wanted = pages_to_write_ahead(num_ahead=40, num_free=0, num_known=0)
    assert 40 < wanted <= 60
    assert pages_to_write_ahead(num_ahead=40, num_free=20, num_known=0) == wanted // 2


def test_what_was_looked_at_is_not_looked_at_again_until_too_little_of_it_is_left():
    wanted = pages_to_write_ahead(num_ahead=40, num_free=0, num_known=0)
    assert pages_to_write_ahead(num_ahead=40, num_free=0, num_known=wanted) == 0
    assert pages_to_write_ahead(num_ahead=40, num_free=0, num_known=40) == 0
    assert pages_to_write_ahead(num_ahead=40, num_free=0, num_known=39) == wanted


# -- what is copied ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there_and_back_s", "recompute_s", "expected"),
    [
        (1.0, 2.0, True),
        (2.0, 1.0, False),
        (1.0, 1.0, False),
        # Not measured yet.
        (None, 1.0, True),
        (1.0, None, True),
        (None, None, True),
    ],
)
def test_a_copy_must_be_faster_than_computing(
    there_and_back_s: float | None, recompute_s: float | None, expected: bool
):
    assert is_worth_copying(there_and_back_s, recompute_s) is expected


# -- where a copy goes -------------------------------------------------------------------------------------------


def test_the_nearest_tier_with_free_room_gets_the_copy():
    assert choose_tier(4, (5,), {PEER: room(4), HOST: room(9)}) == PEER
    assert choose_tier(4, (5,), {PEER: room(3), HOST: room(4)}) == HOST
    assert choose_tier(4, (5,), {HOST: room(4)}) == HOST


def test_free_room_comes_before_what_is_worth_least():
    assert choose_tier(4, (5,), {PEER: room(3, next_class=SPARE), HOST: room(4)}) == HOST


def test_a_full_tier_that_gives_up_the_least_gets_the_copy():
    assert choose_tier(4, (5,), {PEER: room(next_class=CONVENIENT), HOST: room(next_class=SPARE)}) == HOST
    assert choose_tier(4, (5,), {PEER: room(next_class=CONVENIENT), HOST: room(next_class=LAST)}) == PEER
    both_last = {PEER: room(next_class=LAST, next_rank=4), HOST: room(next_class=LAST, next_rank=3)}
    assert choose_tier(4, (5,), both_last) == HOST, "the older one"


def test_of_equals_the_nearer_tier():
    assert choose_tier(4, (5,), {HOST: room(next_class=SPARE), PEER: room(next_class=SPARE)}) == PEER


def test_nothing_of_more_worth_is_given_up():
    assert choose_tier(4, (5,), {HOST: room(next_class=LAST, next_rank=6)}) is None
    assert choose_tier(4, (5,), {HOST: room(next_class=LAST, next_rank=5)}) == HOST
    assert choose_tier(4, (5,), {HOST: room(next_class=SPARE, next_rank=6)}) == HOST, "a spare one is worth nothing"
    assert choose_tier(4, (5,), {HOST: room(next_class=CONVENIENT, next_rank=6)}) == HOST
    younger_last = {PEER: room(next_class=LAST, next_rank=9), HOST: room(next_class=LAST, next_rank=2)}
    assert choose_tier(4, (5,), younger_last) == HOST


def test_a_tier_with_nothing_to_give_up_gets_nothing():
    assert choose_tier(4, (5,), {PEER: room(), HOST: room()}) is None
    assert choose_tier(4, (5,), {}) is None


def test_a_busy_link_gets_nothing():
    assert choose_tier(4, (5,), {PEER: room(9, num_allowed=0), HOST: room(9)}) == HOST
    assert choose_tier(4, (5,), {PEER: room(9, num_allowed=-3)}) is None
    assert choose_tier(4, (5,), {PEER: room(num_allowed=0, next_class=SPARE)}) is None


def test_of_a_node_larger_than_what_may_be_in_flight_a_part_needs_room():
    assert choose_tier(40, (5,), {PEER: room(10, num_allowed=10), HOST: room(99)}) == PEER
    assert choose_tier(40, (5,), {PEER: room(9, num_allowed=10), HOST: room(99)}) == HOST
