"""Slabs that only one rank of a borrower has: none may use them, so they are not kept."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sglang.srt.peer.borrowed_places import BorrowedOptions, BorrowedPlaces
from sglang.srt.peer.protocol.borrower import BorrowerEvent, LenderOffer, SlabLent
from sglang.srt.peer.protocol.messages import LeaseId
from sglang.srt.utils.peer_timing import PeerTiming

SLAB_BYTES = 100
PATIENCE_S = 2.0


class Leases:
    """A lender's slabs, which a test lends."""

    def __init__(self) -> None:
        self.events: list[BorrowerEvent] = []
        self.returned: list[int] = []
        self.demand_bytes = 0

    def poll(self) -> list[BorrowerEvent]:
        events, self.events = self.events, []
        return events

    def lend(self, *slabs: int) -> None:
        self.events += [SlabLent("w", LeaseId(1, slab), slab, SLAB_BYTES, None) for slab in slabs]

    def set_demand(self, lender: str, size_bytes: int, value_us: int = 0) -> None:
        self.demand_bytes = size_bytes

    def give_back(self, lender: str, lease: LeaseId) -> None:
        self.returned.append(lease.number)

    def connected(self) -> dict[str, bool]:
        return {"w": True}

    def offers(self) -> Mapping[str, LenderOffer | None]:
        return {"w": LenderOffer(SLAB_BYTES, strict=False, can_lend=True)}


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
