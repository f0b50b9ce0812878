"""`Lender`, step by step, with exact slabs and times."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sglang.srt.peer.protocol.leases import LeaseState
from sglang.srt.peer.protocol.lender import (
    DemandChanged,
    Lender,
    LenderTiming,
    LendOutcome,
    SlabGivenBack,
    SlabQuarantined,
)
from sglang.srt.peer.protocol.messages import BorrowerHeartbeat, BorrowerId, Fetch, Lease, Register

FREE, GRANTED, HELD, RECALLED, QUARANTINED, GIVEN_BACK = LeaseState
EPOCH = 1000
A, B = BorrowerId("a", 1), BorrowerId("b", 1)
_sequences = itertools.count()


def lender(num_slabs: int = 4, strict: bool = False) -> Lender:
    tokens = itertools.count()
    timing = LenderTiming(heartbeat_s=1.0, silence_s=5.0, grace_s=10.0)
    return Lender(EPOCH, num_slabs, 100, lambda: b"secret %d" % next(tokens), strict, timing)


def heartbeat(
    borrower: BorrowerId = A, demand: int = 1000, given_back: tuple[int, ...] = (), **fields: Any
) -> BorrowerHeartbeat:
    register = Register(
        name=borrower.name,
        incarnation=borrower.incarnation,
        page_bytes=fields.pop("page_bytes", 10),
        demand_bytes=demand,
        strict=fields.pop("strict", False),
    )
    message = {"sequence": next(_sequences), "epoch": EPOCH, "mapped": (), "given_back": given_back}
    return BorrowerHeartbeat(register=register, **(message | fields))


def leases_of(owner: Lender, borrower: BorrowerId = A, now: float = 0.0) -> tuple[Lease, ...]:
    """What the borrower is told."""
    return dict(owner.take_outgoing(now))[borrower].leases


def fetch(owner: Lender, lease: Lease, borrower: BorrowerId = A, **fields: Any) -> int | None:
    message = {"epoch": EPOCH, "number": lease.number, "token": lease.token}
    return owner.allow_fetch(Fetch(name=borrower.name, incarnation=borrower.incarnation, **(message | fields)))


def lent_and_fetched(num_slabs: int = 4) -> Lender:
    owner = lender(num_slabs)
    owner.receive(heartbeat(), 0)
    owner.lend(range(num_slabs), 0)
    for lease in leases_of(owner):
        assert fetch(owner, lease) == lease.slab
    owner.take_events()
    return owner


def test_nothing_is_lent_without_demand():
    owner = lender()
    assert owner.lend([2, 3], 0) == LendOutcome((), (2, 3))
    assert owner.states == [FREE] * 4


def test_the_highest_slabs_are_lent_first_up_to_the_demand():
    owner = lender()
    owner.receive(heartbeat(demand=150), 0)
    assert owner.lend([1, 2, 3], 0) == LendOutcome((3, 2), (1,))
    assert [(lease.number, lease.slab, lease.size_bytes) for lease in leases_of(owner)] == [(0, 3, 100), (1, 2, 100)]


def test_two_borrowers_share_evenly():
    owner = lender(6)
    owner.receive(heartbeat(B), 0)
    owner.receive(heartbeat(A), 0)
    owner.lend([5, 4, 3], 0)
    assert [lease.slab for lease in leases_of(owner, A)] == [5, 3]
    owner.lend([2, 1], 0)
    views = dict(owner.take_outgoing(1))
    assert [lease.slab for lease in views[B].leases] == [4, 2]
    assert [lease.slab for lease in views[A].leases] == [5, 3, 1]


def test_a_borrower_that_cannot_use_a_slab_of_this_size_gets_none():
    owner = lender()
    owner.receive(heartbeat(page_bytes=101), 0)
    assert owner.lend([3], 0).lent == ()


def test_the_engine_hears_of_unmet_demand():
    owner = lender()
    owner.receive(heartbeat(demand=350), 0)
    owner.tick(0)
    owner.lend([3], 0)
    owner.tick(0)
    owner.tick(0)
    assert owner.take_events() == [DemandChanged(350), LendOutcome((3,), ()), DemandChanged(250)]


def test_low_slabs_are_recalled_first_and_scrubbed_before_they_are_free():
    owner = lent_and_fetched()
    assert owner.recall(2, 7.0) == [0, 1]
    assert owner.states == [RECALLED, RECALLED, HELD, HELD]
    assert {lease.slab: lease.due_in_s for lease in leases_of(owner, now=3)} == {3: None, 2: None, 1: 4.0, 0: 4.0}
    owner.receive(heartbeat(given_back=(3,)), 4)
    assert owner.take_events() == [SlabGivenBack(0)]
    assert owner.states[0] == GIVEN_BACK
    owner.reclaim(0)
    assert owner.states[0] == FREE


def test_a_deadline_that_passes_is_an_alarm_and_a_slab_that_is_given_back_late_ends_it():
    owner = lent_and_fetched(1)
    owner.recall(1, 7.0)
    owner.tick(6.9)
    assert owner.states == [RECALLED]
    owner.receive(heartbeat(), 6.95)
    owner.tick(7.0)
    assert SlabQuarantined(0, A) in owner.take_events() and owner.counters["quarantined"] == 1
    assert leases_of(owner, now=8)[0].due_in_s == 0.0  # it is still recalled
    owner.receive(heartbeat(given_back=(0,)), 100)
    assert owner.states == [GIVEN_BACK] and owner.take_events() == [SlabGivenBack(0)]


def test_a_borrower_in_default_gets_nothing_new():
    owner = lent_and_fetched(3)
    owner.receive(heartbeat(given_back=(0,)), 0)
    owner.reclaim(2)
    owner.recall(1, 1.0)
    owner.tick(1.0)
    assert owner.states == [QUARANTINED, HELD, FREE]
    assert owner.lend([2], 1.0).lent == ()
    owner.receive(heartbeat(given_back=(2,)), 2)
    assert owner.lend([2], 2.0).lent == (2,)


def test_death_gives_everything_back():
    owner = lent_and_fetched(3)
    owner.recall(2, 1.0)
    owner.tick(1.0)
    owner.take_events()
    owner.on_borrower_death(A)
    assert owner.states == [GIVEN_BACK] * 3
    assert sorted(event.slab for event in owner.take_events() if isinstance(event, SlabGivenBack)) == [0, 1, 2]
    assert not owner.receive(heartbeat(), 2), "a dead borrower's message, late"
    assert not owner.borrowers


def test_silence_recalls_but_frees_nothing():
    owner = lent_and_fetched(2)
    owner.tick(5.0)
    assert owner.states == [HELD] * 2
    owner.tick(5.1)
    assert owner.states == [RECALLED] * 2
    owner.tick(15.2)
    assert owner.states == [QUARANTINED] * 2
    owner.tick(1e6)
    assert owner.states == [QUARANTINED] * 2


def test_a_silent_borrower_gets_nothing_new():
    owner = lender()
    owner.receive(heartbeat(), 0)
    assert owner.lend([3], 5.1).lent == ()
    owner.receive(heartbeat(), 5.2)
    assert owner.lend([3], 5.2).lent == (3,)


def test_a_lender_that_stood_still_takes_no_borrower_for_silent():
    owner = lent_and_fetched(1)
    owner.tick(1)
    owner.tick(101)
    assert owner.states == [HELD]
    for now in range(102, 110):
        owner.tick(now)
    assert owner.states == [RECALLED]


def test_a_lease_that_was_not_fetched_ends_at_once():
    owner = lender(2)
    owner.receive(heartbeat(), 0)
    owner.lend([0, 1], 0)
    first, _ = leases_of(owner)
    owner.recall(1, 100.0)
    assert owner.states == [GIVEN_BACK, GRANTED]
    owner.tick(5.1)
    assert owner.states == [GIVEN_BACK, GIVEN_BACK] and not owner.borrowers
    assert fetch(owner, first) is None


def test_a_strict_lease_is_never_fetched_and_ends_at_its_deadline():
    for owner, heartbeat_strict in ((lender(1, strict=True), False), (lender(1), True)):
        owner.receive(heartbeat(strict=heartbeat_strict), 0)
        owner.lend([0], 0)
        (lease,) = leases_of(owner)
        assert lease.strict and fetch(owner, lease) is None
        owner.recall(1, 3.0)
        owner.tick(2.9)
        assert owner.states == [RECALLED]
        owner.tick(3.0)
        assert owner.states == [GIVEN_BACK]


@pytest.mark.parametrize(
    "wrong", [{"token": b"secret 1"}, {"token": b""}, {"epoch": EPOCH - 1}, {"number": 7}, {"borrower": B}]
)
def test_only_the_lease_and_its_token_open_a_slab(wrong: dict[str, Any]):
    owner = lender(1)
    owner.receive(heartbeat(A), 0)
    owner.receive(heartbeat(B, demand=0), 0)
    owner.lend([0], 0)
    (lease,) = leases_of(owner)
    assert fetch(owner, lease, **wrong) is None
    assert fetch(owner, lease) == 0
    owner.recall(1, 5.0)
    assert fetch(owner, lease) is None, "a recalled slab is given to no borrower"


def test_giving_back_counts_once_for_its_borrower_in_its_epoch():
    owner = lent_and_fetched(2)
    owner.receive(heartbeat(B, given_back=(0,)), 0)
    owner.receive(heartbeat(given_back=(1,), epoch=EPOCH - 1), 0)
    assert owner.states == [HELD, HELD]
    message = heartbeat(given_back=(0,))
    assert owner.receive(message, 0) and not owner.receive(message, 0)
    owner.reclaim(1)
    assert owner.lend([1], 0).lent == (1,)
    owner.receive(heartbeat(given_back=(0,)), 0)
    assert owner.states == [HELD, GRANTED]


def test_an_older_message_changes_nothing():
    owner = lender()
    old, new = heartbeat(demand=400), heartbeat(demand=100)
    assert owner.receive(new, 0) and not owner.receive(old, 1)
    assert len(owner.lend(range(4), 1).lent) == 1


def test_the_next_life_of_a_name_inherits_nothing():
    owner = lent_and_fetched(2)
    next_life = BorrowerId("a", 2)
    owner.receive(heartbeat(next_life), 1)
    owner.receive(heartbeat(A), 1)
    owner.tick(1)
    assert owner.states == [RECALLED] * 2, "recalled, for the former life may still have them mapped"
    owner.receive(heartbeat(A, given_back=(0,)), 2)
    owner.reclaim(1)
    owner.receive(heartbeat(next_life, demand=0), 2)
    assert owner.lend([1], 2).lent == (), "the former life borrows no more"
    owner.receive(heartbeat(next_life), 2)
    owner.lend([1], 2)
    assert [lease.slab for lease in leases_of(owner, next_life, 2)] == [1]


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
    assert len(owner.take_outgoing(0)) == 1
    assert owner.take_outgoing(0.9) == []
    owner.lend([0], 0.9)
    assert len(owner.take_outgoing(0.9)) == 1
    assert len(owner.take_outgoing(2.0)) == 1
