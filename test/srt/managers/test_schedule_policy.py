"""Scheduling policy: tables in, decisions out."""

from __future__ import annotations

import random

import pytest

from sglang.srt.managers.cost_model import LoadLimit
from sglang.srt.managers.schedule_policy import (
    Admission,
    Candidate,
    balanced_order,
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


def order(queue: list[Candidate], load_ratio: float = 10) -> str:
    return "".join("abcdefgh"[place] for place, _ in balanced_order(queue, LoadLimit(0, load_ratio, 0)))


@pytest.mark.parametrize(
    ("queue", "expected"),
    [
        ([], ""),
        # Nothing to load: first come, first served.
        ([Candidate(5), Candidate(1), Candidate(9)], "abc"),
        # Strata, Figure 7: C and D both load; F, which only computes, comes between.
        ([Candidate(1, ((1, 10),)), Candidate(1, ((2, 11),)), Candidate(9)], "acb"),
        # The oldest comes first, whatever it loads; then those that it leaves room for.
        ([Candidate(1, ((1, 99),)), Candidate(1, ((2, 1),)), Candidate(1)], "acb"),
        # Enough computation has come before: it may load.
        ([Candidate(10), Candidate(1, ((1, 99),)), Candidate(1)], "abc"),
        # D0 and D1 load the same: D1 comes right after D0, and costs nothing more.
        ([Candidate(1, ((1, 5),)), Candidate(1), Candidate(1, ((1, 5),))], "acb"),
        # ... also if what they load goes on differently, and although the batch is then bound by loading.
        ([Candidate(1, ((1, 5),)), Candidate(1), Candidate(1, ((1, 5), (2, 90)))], "acb"),
        # Put off twice, kept in order, behind all others.
        ([Candidate(1), Candidate(1, ((1, 50),)), Candidate(1, ((2, 40),)), Candidate(1), Candidate(1)], "adebc"),
        # Put off, then taken along with one that shares its load once there is enough to compute.
        ([Candidate(1), Candidate(1, ((1, 50),)), Candidate(9), Candidate(1, ((1, 50),))], "acdb"),
    ],
)
def test_batches_are_balanced(queue: list[Candidate], expected: str) -> None:
    assert order(queue) == expected


def printed_algorithm(queue: list[Candidate], load_ratio: float) -> list[int]:
    """Algorithm 1 of Strata as it is printed, for a batch that is never full; only that bundle hits are looked for
    among those that were put off, too."""
    left, batch, deprioritised = list(range(len(queue))), list[int](), list[int]()

    def loads(batch: list[int]) -> float:
        cost: dict[int, float] = {}
        for place in batch:
            for node, tokens in queue[place].loads:
                cost[node] = max(cost.get(node, 0), tokens)
        return sum(cost.values())

    def is_bundle_hit(place: int) -> bool:
        nodes = {node for each in batch for node, _ in queue[each].loads}
        return any(node in nodes for node, _ in queue[place].loads)

    def add_bundle_hits() -> None:
        for place in sorted(left + deprioritised):
            if is_bundle_hit(place):
                batch.append(place)
                (left if place in left else deprioritised).remove(place)

    def loading_bound(place: int) -> bool:
        more = loads([*batch, place]) - loads(batch)
        compute = sum(queue[each].compute for each in [*batch, place])
        return more > 0 and loads(batch) + more > load_ratio * compute

    if left:
        batch.append(left.pop(0))
        add_bundle_hits()
    while left:
        place = left.pop(0)
        if loading_bound(place):
            deprioritised.append(place)
        else:
            batch.append(place)
            add_bundle_hits()
    return batch + deprioritised


@pytest.mark.parametrize("seed", range(60))
def test_balanced_order_is_the_printed_algorithm(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    # Documents as paths of nodes; a request needs some of one's nodes, the last perhaps in part.
    documents = [[(10 * d + i, rng.choice((1, 20, 300))) for i in range(rng.randint(1, 3))] for d in range(4)]
    queue = []
    for _ in range(rng.randint(1, 20)):
        loads = list(rng.choice(documents))[: rng.randint(1, 3)] if rng.random() < 0.6 else []
        if loads and rng.random() < 0.3:
            loads[-1] = (loads[-1][0], max(1, loads[-1][1] // 2))
        queue.append(Candidate(rng.choice((1, 5, 50)), tuple(loads)))
    found = [place for place, _ in balanced_order(queue, LoadLimit(0, 4, 0))]
    assert sorted(found) == list(range(len(queue))) and found[:1] == [0]
    assert found == printed_algorithm(queue, 4)
