"""`Lender`, step by step, with exact slabs and times."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sglang.srt.peer.protocol.lender import Demand, Lender, LenderTiming, Offered, Quarantined, SlabState, ToScrub
from sglang.srt.peer.protocol.messages import BorrowerHeartbeat, BorrowerId, Fetch, Lend, Register

FREE, LENT, RECLAIMING, QUARANTINED, SCRUBBING = SlabState
EPOCH = 1000
A, B = BorrowerId("a", 1), BorrowerId("b", 1)
_sequences = itertools.count()


def lender(num_slabs: int = 4, strict: bool = False) -> Lender:
    tokens = itertools.count()
    timing = LenderTiming(heartbeat_s=1.0, silence_s=5.0, grace_s=10.0)
    return Lender(EPOCH, num_slabs, 100, lambda: b"secret %d" % next(tokens), strict, timing)


def heartbeat(
    borrower: BorrowerId = A, want: int = 1000, released: tuple[int, ...] = (), **fields: Any
) -> BorrowerHeartbeat:
    register = Register(
        name=borrower.name,
        incarnation=borrower.incarnation,
        page_bytes=fields.pop("page_bytes", 10),
        want_bytes=want,
        strict=fields.pop("strict", False),
    )
    message = {"sequence": next(_sequences), "epoch": EPOCH, "mapped": (), "released": released}
    return BorrowerHeartbeat(register=register, **(message | fields))


def lends(owner: Lender, borrower: BorrowerId = A, now: float = 0.0) -> tuple[Lend, ...]:
    """What the borrower is told."""
    return dict(owner.outgoing(now))[borrower].lends


def fetch(owner: Lender, lend: Lend, borrower: BorrowerId = A, **fields: Any) -> int | None:
    message = {"epoch": EPOCH, "number": lend.number, "token": lend.token}
    return owner.fetch(Fetch(name=borrower.name, incarnation=borrower.incarnation, **(message | fields)))


def lent_and_fetched(num_slabs: int = 4) -> Lender:
    owner = lender(num_slabs)
    owner.receive(heartbeat(), 0)
    owner.offer(range(num_slabs), 0)
    for lend in lends(owner):
        assert fetch(owner, lend) == lend.slab
    owner.take_events()
    return owner


def test_nobody_is_lent_anything_before_asking():
    owner = lender()
    assert owner.offer([2, 3], 0) == Offered((), (2, 3))
    assert owner.states == [FREE] * 4


def test_the_highest_slabs_go_first_and_as_many_as_are_wanted():
    owner = lender()
    owner.receive(heartbeat(want=150), 0)
    assert owner.offer([1, 2, 3], 0) == Offered((3, 2), (1,))
    assert [(lend.number, lend.slab, lend.size_bytes) for lend in lends(owner)] == [(0, 3, 100), (1, 2, 100)]


def test_two_that_want_the_same_slab_share_evenly():
    owner = lender(6)
    owner.receive(heartbeat(B), 0)
    owner.receive(heartbeat(A), 0)
    owner.offer([5, 4, 3], 0)
    assert [lend.slab for lend in lends(owner, A)] == [5, 3]
    owner.offer([2, 1], 0)
    views = dict(owner.outgoing(1))
    assert [lend.slab for lend in views[B].lends] == [4, 2]
    assert [lend.slab for lend in views[A].lends] == [5, 3, 1]


def test_who_cannot_use_a_slab_of_this_size_gets_none():
    owner = lender()
    owner.receive(heartbeat(page_bytes=101), 0)
    assert owner.offer([3], 0).lent == ()


def test_the_engine_hears_what_is_wanted():
    owner = lender()
    owner.receive(heartbeat(want=350), 0)
    owner.tick(0)
    owner.offer([3], 0)
    owner.tick(0)
    owner.tick(0)
    assert owner.take_events() == [Demand(350), Offered((3,), ()), Demand(250)]


def test_low_slabs_are_asked_back_first_and_come_back_scrubbed():
    owner = lent_and_fetched()
    assert owner.reclaim(2, 7.0) == [0, 1]
    assert owner.states == [RECLAIMING, RECLAIMING, LENT, LENT]
    assert {lend.slab: lend.reclaim_in_s for lend in lends(owner, now=3)} == {3: None, 2: None, 1: 4.0, 0: 4.0}
    owner.receive(heartbeat(released=(3,)), 4)
    assert owner.take_events() == [ToScrub(0)]
    assert owner.states[0] == SCRUBBING
    owner.scrubbed(0)
    assert owner.states[0] == FREE


def test_a_deadline_that_passes_is_an_alarm_and_a_late_release_ends_it():
    owner = lent_and_fetched(1)
    owner.reclaim(1, 7.0)
    owner.tick(6.9)
    assert owner.states == [RECLAIMING]
    owner.receive(heartbeat(), 6.95)
    owner.tick(7.0)
    assert Quarantined(0, A) in owner.take_events() and owner.counters["quarantined"] == 1
    assert lends(owner, now=8)[0].reclaim_in_s == 0.0  # it is still asked back
    owner.receive(heartbeat(released=(0,)), 100)
    assert owner.states == [SCRUBBING] and owner.take_events() == [ToScrub(0)]


def test_who_is_in_default_gets_nothing_new():
    owner = lent_and_fetched(3)
    owner.receive(heartbeat(released=(0,)), 0)
    owner.scrubbed(2)
    owner.reclaim(1, 1.0)
    owner.tick(1.0)
    assert owner.states == [QUARANTINED, LENT, FREE]
    assert owner.offer([2], 1.0).lent == ()
    owner.receive(heartbeat(released=(2,)), 2)
    assert owner.offer([2], 2.0).lent == (2,)


def test_death_gives_everything_back():
    owner = lent_and_fetched(3)
    owner.reclaim(2, 1.0)
    owner.tick(1.0)
    owner.take_events()
    owner.died(A)
    assert owner.states == [SCRUBBING] * 3
    assert sorted(event.slab for event in owner.take_events() if isinstance(event, ToScrub)) == [0, 1, 2]
    assert not owner.receive(heartbeat(), 2), "a dead borrower's message, late"
    assert not owner.borrowers


def test_silence_asks_back_but_frees_nothing():
    owner = lent_and_fetched(2)
    owner.tick(5.0)
    assert owner.states == [LENT] * 2
    owner.tick(5.1)
    assert owner.states == [RECLAIMING] * 2
    owner.tick(15.2)
    assert owner.states == [QUARANTINED] * 2
    owner.tick(1e6)
    assert owner.states == [QUARANTINED] * 2


def test_who_is_silent_gets_nothing_new():
    owner = lender()
    owner.receive(heartbeat(), 0)
    assert owner.offer([3], 5.1).lent == ()
    owner.receive(heartbeat(), 5.2)
    assert owner.offer([3], 5.2).lent == (3,)


def test_a_lender_that_stood_still_takes_nobody_for_silent():
    owner = lent_and_fetched(1)
    owner.tick(1)
    owner.tick(101)
    assert owner.states == [LENT]
    for now in range(102, 110):
        owner.tick(now)
    assert owner.states == [RECLAIMING]


def test_a_lease_that_nobody_has_fetched_ends_at_once():
    owner = lender(2)
    owner.receive(heartbeat(), 0)
    owner.offer([0, 1], 0)
    first, _ = lends(owner)
    owner.reclaim(1, 100.0)
    assert owner.states == [SCRUBBING, LENT]
    owner.tick(5.1)
    assert owner.states == [SCRUBBING, SCRUBBING] and not owner.borrowers
    assert fetch(owner, first) is None


def test_a_strict_lease_is_never_fetched_and_ends_at_its_deadline():
    for owner, heartbeat_strict in ((lender(1, strict=True), False), (lender(1), True)):
        owner.receive(heartbeat(strict=heartbeat_strict), 0)
        owner.offer([0], 0)
        (lend,) = lends(owner)
        assert lend.strict and fetch(owner, lend) is None
        owner.reclaim(1, 3.0)
        owner.tick(2.9)
        assert owner.states == [RECLAIMING]
        owner.tick(3.0)
        assert owner.states == [SCRUBBING]


@pytest.mark.parametrize(
    "wrong", [{"token": b"secret 1"}, {"token": b""}, {"epoch": EPOCH - 1}, {"number": 7}, {"borrower": B}]
)
def test_only_the_lease_and_its_token_open_a_slab(wrong: dict[str, Any]):
    owner = lender(1)
    owner.receive(heartbeat(A), 0)
    owner.receive(heartbeat(B, want=0), 0)
    owner.offer([0], 0)
    (lend,) = lends(owner)
    assert fetch(owner, lend, **wrong) is None
    assert fetch(owner, lend) == 0
    owner.reclaim(1, 5.0)
    assert fetch(owner, lend) is None, "what is asked back is given to nobody"


def test_releases_count_once_for_their_owner_in_their_epoch():
    owner = lent_and_fetched(2)
    owner.receive(heartbeat(B, released=(0,)), 0)
    owner.receive(heartbeat(released=(1,), epoch=EPOCH - 1), 0)
    assert owner.states == [LENT, LENT]
    message = heartbeat(released=(0,))
    assert owner.receive(message, 0) and not owner.receive(message, 0)
    owner.scrubbed(1)
    assert owner.offer([1], 0).lent == (1,)
    owner.receive(heartbeat(released=(0,)), 0)
    assert owner.states == [LENT, LENT]


def test_an_older_message_changes_nothing():
    owner = lender()
    old, new = heartbeat(want=400), heartbeat(want=100)
    assert owner.receive(new, 0) and not owner.receive(old, 1)
    assert len(owner.offer(range(4), 1).lent) == 1


def test_the_next_life_of_a_name_inherits_nothing():
    owner = lent_and_fetched(2)
    next_life = BorrowerId("a", 2)
    owner.receive(heartbeat(next_life), 1)
    owner.receive(heartbeat(A), 1)
    owner.tick(1)
    assert owner.states == [RECLAIMING] * 2, "asked back, for the former life may still have them mapped"
    owner.receive(heartbeat(A, released=(0,)), 2)
    owner.scrubbed(1)
    owner.receive(heartbeat(next_life, want=0), 2)
    assert owner.offer([1], 2).lent == (), "the former life borrows no more"
    owner.receive(heartbeat(next_life), 2)
    owner.offer([1], 2)
    assert [lend.slab for lend in lends(owner, next_life, 2)] == [1]


def test_a_borrower_that_uses_what_is_not_lent_is_counted():
    owner = lent_and_fetched(1)
    owner.receive(heartbeat(mapped=(0,)), 0)
    assert owner.counters["disputed"] == 0
    owner.receive(heartbeat(mapped=(0, 9)), 0)
    assert owner.counters["disputed"] == 1


def test_strangers_do_not_fill_the_memory():
    owner = lender()
    for i in range(1000):
        owner.receive(heartbeat(BorrowerId(f"s{i}", 1)), 0)
    assert len(owner.borrowers) == 64
    owner.tick(6)
    assert not owner.borrowers


def test_views_are_sent_on_change_and_every_heartbeat():
    owner = lender()
    owner.receive(heartbeat(), 0)
    assert len(owner.outgoing(0)) == 1
    assert owner.outgoing(0.9) == []
    owner.offer([0], 0.9)
    assert len(owner.outgoing(0.9)) == 1
    assert len(owner.outgoing(2.0)) == 1
