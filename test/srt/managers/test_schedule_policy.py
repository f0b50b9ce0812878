"""Scheduling policy: tables in, decisions out."""

from __future__ import annotations

import pytest

from sglang.srt.managers.schedule_policy import (
    Admission,
    choose_victim,
    chunk_of,
    decode_reserve,
    may_admit,
    pages_for,
)


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "pages"),
    [(0, 1, 0), (1, 1, 1), (7, 1, 7), (0, 16, 0), (1, 16, 1), (15, 16, 1), (16, 16, 1), (17, 16, 2), (32, 16, 2)],
)
def test_pages_for(num_tokens: int, page_size: int, pages: int):
    assert pages_for(num_tokens, page_size) == pages


@pytest.mark.parametrize(
    ("active", "ratio", "page_size", "reserve"),
    [
        ([], 0.3, 1, 0),
        ([100], 0.3, 1, 30),
        ([100, 50], 0.3, 1, 45),
        ([100, 50], 1.0, 1, 150),
        ([100, 50], 1.0, 16, 7 + 4),
        ([100], 0.3, 16, 2),
        # At least one page each, whatever is left.
        ([0, 1, 2], 0.3, 1, 3),
        ([0, 1, 2], 1.0, 16, 3),
        ([5], 0.0, 4, 1),
    ],
)
def test_decode_reserve(active: list[int], ratio: float, page_size: int, reserve: int):
    assert decode_reserve(iter(active), ratio, page_size) == reserve


#   need, own future, retracted before, available, reserve, worst reserve, anything active -> admitted
@pytest.mark.parametrize(
    ("need", "future", "retracted", "available", "reserve", "worst", "active", "admitted"),
    [
        # Nothing active: whatever fits, and no reserve.
        (10, 90, False, 10, 0, 0, False, True),
        (11, 90, False, 10, 0, 0, False, False),
        (10, 90, True, 10, 0, 0, False, True),
        (0, 90, False, 0, 0, 0, False, True),
        # Beside others: the optimistic reserve, and one page.
        (10, 90, False, 16, 5, 50, True, True),
        (10, 90, False, 15, 5, 50, True, False),
        (1, 90, False, 2, 0, 0, True, True),
        (1, 90, False, 1, 0, 0, True, False),
        # Retracted once: only if its worst case and everybody's fit.
        (10, 90, True, 150, 5, 50, True, True),
        (10, 90, True, 149, 5, 50, True, False),
        (10, 0, True, 60, 5, 50, True, True),
        (10, 0, True, 59, 5, 50, True, False),
    ],
)
def test_may_admit(need, future, retracted, available, reserve, worst, active, admitted):
    req = Admission(need=need, own_future=future, was_retracted=retracted)
    assert may_admit(req, available, reserve, worst, active) is admitted


def test_a_retracted_request_is_never_admitted_more_readily():
    for need in (1, 5):
        for future in range(4):
            for available in range(20):
                for worst in range(1, 8):
                    for reserve in range(1, worst + 1):
                        again = may_admit(Admission(need, future, True), available, reserve, worst, True)
                        first = may_admit(Admission(need, future, False), available, reserve, worst, True)
                        if future + worst > reserve:
                            assert first or not again


@pytest.mark.parametrize(("orders", "victim"), [([3], 0), ([1, 2, 3], 2), ([7, 2, 5], 0), ([0, 9, 4], 1)])
def test_choose_victim_takes_the_youngest(orders: list[int], victim: int):
    assert choose_victim(orders) == victim


@pytest.mark.parametrize(
    ("num_tokens", "budget", "page_size", "chunk"),
    [
        (10, 100, 1, 10),
        (100, 100, 16, 100),
        (101, 100, 1, 100),
        # Only the last chunk may end inside a page.
        (101, 100, 16, 96),
        (17, 16, 16, 16),
        (17, 15, 16, 0),
        (5, 15, 16, 5),
        (0, 15, 16, 0),
        (3, 0, 1, 0),
    ],
)
def test_chunk_of(num_tokens: int, budget: int, page_size: int, chunk: int):
    assert chunk_of(num_tokens, budget, page_size) == chunk
