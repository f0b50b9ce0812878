"""What a lender's rank does with slabs that not all ranks have."""

from __future__ import annotations

from typing import Any

from sglang.srt.peer.lent_places import LentOptions, LentPlaces
from sglang.srt.peer.protocol.lender import DemandChanged, LendOutcome, SlabGivenBack
from sglang.srt.utils.peer_timing import PeerTiming

PATIENCE_S = 5.0


class Lent:
    """The leases of a lender, and a scrubber that is done at once."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.lent: list[list[int]] = []
        self.reclaimed: list[int] = []
        self.scrubbed: list[int] = []

    def poll(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def lend(self, slabs: Any) -> None:
        self.lent.append(list(slabs))

    def recall(self, num_slabs: int, timeout_s: float) -> None: ...

    def reclaim(self, slab: int) -> None:
        self.reclaimed.append(slab)

    def status(self) -> dict[str, int]:
        return {"quarantined_slabs": 0}

    def submit(self, slabs: Any) -> None:
        self.scrubbed += slabs

    def take_done(self) -> list[int]:
        done, self.scrubbed = self.scrubbed, []
        return done


def test_a_slab_that_is_back_on_one_rank_alone_is_lent_again() -> None:
    now, lent = [0.0], Lent()
    each: Any = lent
    places = LentPlaces(each, each, 3, 100, LentOptions(timing=PeerTiming(offer=PATIENCE_S)), now=lambda: now[0])
    places.lend([1, 2])
    assert places.poll_mapped().mapped == b"\1\0\0" and lent.lent == [[1, 2]]
    lent.events = [SlabGivenBack(1), SlabGivenBack(2)]
    assert places.poll_mapped().mapped == b"\1\1\1" and lent.reclaimed == [1, 2]
    places.mark_in_use(b"\1\1\0")  # slab 2 is not back on another rank
    now[0] = PATIENCE_S + 0.1
    places.mark_in_use(b"\1\1\0")
    assert places.poll_mapped().mapped == b"\1\1\1", "no borrower would take it"
    lent.events = [DemandChanged(100)]
    now[0] = PATIENCE_S
    assert places.poll_mapped().mapped == b"\1\1\1", "it may come to the other rank soon"
    now[0] = PATIENCE_S + 0.1
    assert places.poll_mapped().mapped == b"\1\1\0" and lent.lent[1:] == [[2]]
    assert places.poll_mapped().mapped == b"\1\1\0" and lent.lent[1:] == [[2]], "once"
    lent.events = [LendOutcome((), (2,))]
    assert places.poll_mapped().mapped == b"\1\1\1"
