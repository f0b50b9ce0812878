"""Slabs of a borrower with several ranks: all have them at the same places. What only one has is not kept."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest

from sglang.srt.managers.progress import COUNTED, Progress
from sglang.srt.mem_cache.slab_ledger import SlabReport
from sglang.srt.peer.borrowed_places import BorrowedOptions, BorrowedPlaces
from sglang.srt.peer.protocol.borrower import (
    BorrowerEvent,
    LenderOffer,
    SlabLent,
    SlabLost,
    SlabRecalled,
    SlabsWanted,
)
from sglang.srt.peer.protocol.messages import LeaseId
from sglang.srt.utils.peer_timing import PeerTiming
from support.reduction import reduce_progress

SLAB_BYTES = 100
PATIENCE_S = 2.0


class Leases:
    """Slabs of lenders, which a test lends."""

    def __init__(self) -> None:
        self.events: list[BorrowerEvent] = []
        self.returned: list[int] = []
        self.demand_bytes = 0
        self.offer: LenderOffer | None = None

    def poll(self) -> list[BorrowerEvent]:
        events, self.events = self.events, []
        return events

    def lend(self, *slabs: int, lender: str = "w", size_bytes: int = SLAB_BYTES) -> None:
        self.events += [SlabLent(lender, LeaseId(1, slab), slab, size_bytes, None) for slab in slabs]

    def set_demand(self, lender: str, size_bytes: int, value_us: int = 0) -> None:
        self.demand_bytes = size_bytes

    def give_back(self, lender: str, lease: LeaseId) -> None:
        self.returned.append(lease.number)

    def connected(self) -> dict[str, bool]:
        return {}

    def offers(self) -> Mapping[str, LenderOffer | None]:
        return {"w": self.offer}


class Rank:
    """Four places of a rank, whose engine steps."""

    def __init__(self) -> None:
        self.leases = Leases()
        self.now = 0.0
        options = BorrowedOptions(timing=PeerTiming(offer=PATIENCE_S))
        self.places = BorrowedPlaces(self.leases, ["w"], 4, SLAB_BYTES, options, now=lambda: self.now)

    def step(self, now: float, others_have: bytes) -> list[int]:
        """others_have: a byte per place, 1 where other ranks have the same slab. Returns the places in use."""
        self.now = now
        mine = np.frombuffer(self.places.poll_mapped().mapped, np.uint8)
        agreed = mine & np.frombuffer(others_have, np.uint8)
        self.places.mark_in_use(agreed.tobytes())
        return np.flatnonzero(agreed).tolist()


def test_slabs_that_other_ranks_lack_for_long_are_given_back() -> None:
    rank = Rank()
    rank.leases.lend(3, 2, 1)
    assert rank.step(0.0, b"\0\0\1\1") == [2, 3]
    assert rank.step(PATIENCE_S, b"\0\0\1\1") == [2, 3] and not rank.leases.returned
    rank.step(PATIENCE_S + 0.1, b"\0\0\1\1")
    assert rank.leases.returned == [1]
    assert rank.leases.demand_bytes == 4 * SLAB_BYTES, "another slab is asked for in its place"
    rank.leases.lend(5)
    assert rank.step(PATIENCE_S + 0.2, b"\0\1\1\1") == [1, 2, 3]


def test_a_slab_that_comes_to_another_rank_later_is_used() -> None:
    rank = Rank()
    rank.leases.lend(1)
    assert rank.step(0.0, b"\0\0\0\0") == []
    assert rank.step(PATIENCE_S - 0.1, b"\0\1\0\0") == [1]
    assert rank.step(PATIENCE_S + 0.1, b"\0\1\0\0") == [1] and not rank.leases.returned


def test_a_slab_that_another_rank_has_lost_is_kept_while_requests_use_it() -> None:
    rank = Rank()
    rank.leases.lend(1)
    assert rank.step(0.0, b"\0\1\0\0") == [1]
    rank.step(1.0, b"\0\0\0\0")
    rank.step(100.0, b"\0\0\0\0")
    assert not rank.leases.returned
    rank.places.give_back([1])
    rank.step(101.0, b"\0\0\0\0")
    assert not rank.leases.returned, "the other rank may be lent it again"
    rank.step(101.0 + PATIENCE_S, b"\0\0\0\0")
    rank.step(101.1 + PATIENCE_S, b"\0\0\0\0")
    assert rank.leases.returned == [1]


def test_a_slab_in_the_place_of_another_has_its_own_time() -> None:
    rank = Rank()
    rank.leases.lend(1)
    rank.step(0.0, b"\0\0\0\0")
    rank.step(PATIENCE_S + 0.1, b"\0\0\0\0")
    assert rank.leases.returned == [1]
    rank.leases.lend(5)
    rank.step(PATIENCE_S + 0.2, b"\0\0\0\0")
    rank.step(2 * PATIENCE_S, b"\0\0\0\0")
    assert rank.leases.returned == [1]


def test_a_worker_that_was_gone_and_lends_again_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank()
    rank.leases.lend(1, 2)
    rank.step(0.0, b"\1\1\0\0")
    rank.leases.events += [SlabLost("w", LeaseId(1, slab)) for slab in (1, 2)]
    rank.step(1.0, b"\0\0\0\0")
    rank.places.give_back([0, 1])
    with caplog.at_level("INFO"):
        for slab in (3, 4):
            rank.leases.lend(slab)
            rank.step(2.0, b"\1\1\0\0")
    assert [record.getMessage() for record in caplog.records if record.levelname == "INFO"] == [
        "the worker at w lends again"
    ]


def test_a_lender_whose_slabs_are_of_no_use_is_asked_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    rank, all_four = Rank(), bytes([1] * 4)
    rank.leases.offer = LenderOffer(SLAB_BYTES, strict=False, num_lendable=4)
    asked_at = []
    for second in range(1, 1200):
        if asks := rank.leases.demand_bytes > 0:
            asked_at.append(second)
            rank.leases.lend(1, 2, size_bytes=SLAB_BYTES + 1)
        rank.step(float(second), all_four)
        assert not asks or len(rank.places.state()["problems"]) == 1
    assert len(asked_at) < 12 and max(np.diff(asked_at)) <= 301
    assert len(rank.leases.returned) == 2 * len(asked_at)
    assert len([record for record in caplog.records if "cannot be used: a slab of 101 bytes" in record.message]) == 1
    while not rank.leases.demand_bytes:
        second += 1
        rank.step(float(second), all_four)
    rank.leases.lend(1, 2)
    assert len(rank.step(second + 1.0, all_four)) == 2 and not rank.places.state()["problems"]
    rank.leases.lend(3, size_bytes=SLAB_BYTES + 1)
    rank.step(second + 2.0, all_four)
    rank.step(second + 3.0, all_four)
    assert len(caplog.records) == 1 and rank.leases.demand_bytes == 2 * SLAB_BYTES
    assert rank.places.poll_mapped().num_lendable == 2, "what it has lent stays of use"
    rank.leases.offer = None
    rank.step(second + 4.0, all_four)
    rank.leases.offer = LenderOffer(SLAB_BYTES, strict=False, num_lendable=4)
    rank.step(second + 5.0, all_four)
    assert rank.leases.demand_bytes == 4 * SLAB_BYTES, "who comes back is asked at once"
    rank.leases.lend(3, size_bytes=SLAB_BYTES + 1)
    rank.step(second + 6.0, all_four)
    assert len(caplog.records) == 2, "it is news again"


def test_the_demand_falls_before_slabs_that_are_not_used_go_back() -> None:
    """Else their lender lends as many again."""
    rank = Rank()
    rank.leases.lend(1, 2, 3, 4)
    assert rank.step(0.0, bytes([1] * 4)) == [0, 1, 2, 3]
    # The demand is told once, while the slabs drain.
    rank.places.set_demand(2, 0)
    told: list[int] = []
    rank.leases.give_back = lambda lender, lease: told.append(rank.leases.demand_bytes)  # type: ignore[method-assign]
    rank.places.give_back([0, 1], [0, 1])
    assert told == [2 * SLAB_BYTES] * 2


class Ranks:
    """Two ranks with so many places, which step together: what both have at the same places is used."""

    def __init__(self, num_places: int, lenders: list[str]) -> None:
        self.leases = [Leases(), Leases()]
        self.now = 0.0
        options = BorrowedOptions(timing=PeerTiming(offer=PATIENCE_S))
        self.ranks = [
            BorrowedPlaces(leases, lenders, num_places, SLAB_BYTES, options, leads=rank == 0, now=lambda: self.now)
            for rank, leases in enumerate(self.leases)
        ]

    def step(self, now: float) -> SlabReport:
        """What both may use."""
        self.now = now
        reports = [self.ranks[0].poll_mapped()]
        self.ranks[1].follow(reports[0].sources)
        reports.append(self.ranks[1].poll_mapped())
        done = {name: 0 for name in COUNTED}
        agreed = reduce_progress([Progress(done, {}, {}, slab_report=each) for each in reports]).slab_report
        for rank in self.ranks:
            rank.mark_in_use(agreed.mapped)
        return agreed


@pytest.mark.parametrize("seed", range(5))
def test_slabs_of_lenders_of_any_size_come_to_ranks_in_any_order(seed: int) -> None:
    """More slabs than places of a lender's part, lent to each rank one by one. All are used in the end."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    ranks = Ranks(24, ["a", "b"])
    lent = [("a", slab) for slab in range(19)] + [("b", slab) for slab in (40, 3, 4, 5, 11)]
    to_come = [rng.sample(lent, len(lent)) for _ in ranks.leases]
    while any(to_come):
        leases, coming = rng.choice([each for each in zip(ranks.leases, to_come) if each[1]])
        lender, slab = coming.pop()
        leases.lend(slab, lender=lender)
        if rng.random() < 0.5:
            ranks.step(0.0)
    assert sum(ranks.step(0.1).mapped) == 24
    ranks.step(PATIENCE_S + 0.2)
    assert not any(leases.returned for leases in ranks.leases)


def test_a_slab_that_rank_0_does_not_get_is_given_back() -> None:
    ranks = Ranks(4, ["w"])
    ranks.leases[1].lend(1, 2)
    ranks.leases[0].lend(2)
    assert sum(ranks.step(0.0).mapped) == 1
    assert ranks.leases[1].demand_bytes == 4 * SLAB_BYTES, "more is asked for than there is room for"
    ranks.step(PATIENCE_S)
    assert not ranks.leases[1].returned
    ranks.step(PATIENCE_S + 0.1)
    assert ranks.leases[1].returned == [1] and sum(ranks.step(PATIENCE_S + 0.2).mapped) == 1


@pytest.mark.parametrize("event", [SlabRecalled, SlabLost])
def test_a_slab_ends_that_waits_for_rank_0(event: type[SlabRecalled | SlabLost]) -> None:
    ranks = Ranks(4, ["w"])
    ranks.leases[1].lend(1)
    ranks.step(0.0)
    deadline = (9.0,) if event is SlabRecalled else ()
    ranks.leases[1].events.append(event("w", LeaseId(1, 1), *deadline))
    ranks.step(0.1)
    assert ranks.leases[1].returned == ([1] if event is SlabRecalled else [])
    ranks.leases[0].lend(1)
    assert sum(ranks.step(0.2).mapped) == 0


def test_a_slab_that_waits_for_rank_0_goes_first_where_some_are_wanted() -> None:
    ranks = Ranks(4, ["w"])
    ranks.leases[0].lend(1)
    ranks.leases[1].lend(1, 2)
    assert sum(ranks.step(0.0).mapped) == 1
    ranks.leases[1].events.append(SlabsWanted("w", 1))
    assert sum(ranks.step(0.1).mapped) == 1 and ranks.leases[1].returned == [2]


def test_what_was_given_back_is_not_wanted_any_more_though_it_was_not_counted_yet() -> None:
    """Else another slab is given up in its place."""
    rank = Rank()
    rank.leases.lend(0, 1, 2, 3)
    rank.step(0.0, b"\1" * 4)
    rank.leases.events.append(SlabsWanted("w", 2))
    assert rank.places.poll_mapped().num_wanted == (2,)
    rank.places.give_back([2], [2])
    assert rank.leases.returned == [2] and rank.places.poll_mapped().num_wanted == (1,)
    rank.leases.events.append(SlabsWanted("w", 3))  # counted before
    assert rank.places.poll_mapped().num_wanted == (2,)
    rank.leases.events.append(SlabsWanted("w", 2, num_given_back=1))
    assert rank.places.poll_mapped().num_wanted == (2,)


def test_what_is_about_to_be_given_back_is_not_wanted_any_more() -> None:
    """A few are released at a time."""
    rank = Rank()
    rank.places._released_at_once = 1
    rank.places._call_again = lambda: None  # type: ignore[method-assign]
    rank.leases.lend(0, 1, 2, 3)
    rank.step(0.0, b"\1" * 4)
    rank.leases.events.append(SlabsWanted("w", 2))
    assert rank.places.poll_mapped().num_wanted == (2,)
    rank.places.give_back([2, 3], [2, 3])
    assert len(rank.leases.returned) == 1 and rank.places._wanted == [0]
    assert rank.places.poll_mapped().num_wanted == (0,) and sorted(rank.leases.returned) == [2, 3]
    # One that its lender wants by name is none of this rank's choice.
    rank.leases.events += [SlabsWanted("w", 1, num_given_back=2), SlabRecalled("w", LeaseId(1, 0), 9.0)]
    rank.places.mark_in_use(b"\1\1\0\0")
    assert rank.places.poll_mapped().num_wanted == (1,)


class TwoLenders(Leases):
    """Notes how many slabs each is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.demands: dict[str, int] = {}
        self.all_offers: dict[str, LenderOffer | None] = {}

    def set_demand(self, lender: str, size_bytes: int, value_us: int = 0) -> None:
        self.demands[lender] = size_bytes // SLAB_BYTES

    def offers(self) -> Mapping[str, LenderOffer | None]:
        return self.all_offers


def test_a_lender_whose_slabs_cannot_be_used_is_asked_for_none_and_the_other_for_all() -> None:
    leases = TwoLenders()
    places = BorrowedPlaces(leases, ["v", "w"], 4, SLAB_BYTES, BorrowedOptions(), now=lambda: 0.0)
    assert leases.demands == {"v": 2, "w": 2}
    leases.all_offers = {"v": LenderOffer(SLAB_BYTES + 1, False, 4), "w": LenderOffer(SLAB_BYTES, False, 4)}
    places.poll_mapped()
    assert leases.demands == {"v": 0, "w": 4}


def test_a_lender_with_other_ranks_is_asked_for_nothing_until_it_has_as_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    leases = Leases()
    places = BorrowedPlaces(leases, ["w"], 4, SLAB_BYTES, BorrowedOptions(num_ranks=1), now=lambda: 0.0)
    leases.offer = LenderOffer(SLAB_BYTES, False, 4, num_ranks=2)
    for _ in range(3):
        assert places.poll_mapped().num_lendable == 0 and leases.demand_bytes == 0
    (problem,) = places.state()["problems"]
    assert problem == (
        "slabs from w cannot be used: its worker has --tp-size 2, where this master has --tp-size 1: start both with "
        "the same --tp-size"
    )
    assert [record.getMessage() for record in caplog.records] == [problem]
    for num_ranks in (1, 0):  # 0: it does not tell
        leases.offer = LenderOffer(SLAB_BYTES, False, 4, num_ranks)
        assert places.poll_mapped().num_lendable == 4 and leases.demand_bytes == 4 * SLAB_BYTES
        assert not places.state()["problems"]


def test_more_than_there_are_places_for_goes_back_at_once() -> None:
    rank = Rank()
    rank.leases.lend(0, 1, 2, 3, 4)
    assert rank.step(0.0, b"\1" * 4) == [0, 1, 2, 3]
    assert rank.leases.returned == [4] and not rank.places.state()["problems"]


def test_a_lender_that_was_refused_and_comes_back_is_asked_at_once() -> None:
    rank = Rank()
    rank.leases.offer = LenderOffer(SLAB_BYTES, False, 4)
    rank.leases.lend(0, size_bytes=SLAB_BYTES + 1)
    rank.step(0.0, b"\0" * 4)
    assert rank.leases.returned == [0] and rank.leases.demand_bytes == 0 and rank.places.state()["problems"]
    rank.leases.offer = None  # its process has ended: another may come
    rank.step(0.1, b"\0" * 4)
    assert rank.leases.demand_bytes == 4 * SLAB_BYTES and not rank.places.state()["problems"]


def test_many_slabs_are_released_a_few_at_a_time() -> None:
    """Because the memory of a dead lender goes with its mapping, which takes time."""
    rank, calls = Rank(), []
    rank.places._released_at_once = 2
    rank.places._call_again = lambda: calls.append(None)  # type: ignore[method-assign]
    rank.leases.lend(0, 1, 2)
    assert rank.step(0.0, b"\1" * 4) == [0, 1, 2]
    rank.leases.events += [SlabLost("w", LeaseId(1, slab)) for slab in (0, 1, 2)]
    assert rank.step(1.0, b"\1" * 4) == []
    rank.places.give_back([0, 1, 2])
    assert len(calls) == 1 and sum(lease is not None for lease in rank.places._leases) == 1
    rank.step(1.0, b"\1" * 4)
    assert len(calls) == 1 and rank.places._leases == [None] * 4
