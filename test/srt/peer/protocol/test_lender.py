"""`Lender`, step by step, with exact slabs and times."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sglang.srt.peer.protocol.leases import LeaseState
from sglang.srt.peer.protocol.lender import (
    DemandChanged,
    Lender,
    LenderLimits,
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


def lender(num_slabs: int = 4, strict: bool = False, offer_s: float = 0.0) -> Lender:
    tokens = itertools.count()
    timing = LenderTiming(heartbeat_s=1.0, silence_s=5.0, grace_s=10.0, offer_s=offer_s)
    return Lender(EPOCH, num_slabs, 100, lambda: b"secret %d" % next(tokens), strict, timing)


def heartbeat(
    borrower: BorrowerId = A, demand: int = 1000, given_back: tuple[int, ...] = (), **fields: Any
) -> BorrowerHeartbeat:
    register = Register(
        name=borrower.name,
        incarnation=borrower.incarnation,
        page_bytes=fields.pop("page_bytes", 10),
        demand_bytes=demand,
        slab_value_us=fields.pop("value_us", 0),
        num_ranks=fields.pop("num_ranks", 0),
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


def test_the_borrower_chooses_which_slabs_it_gives_back_and_they_are_scrubbed_before_they_are_free():
    owner = lent_and_fetched()
    assert owner.recall(2, 7.0) == 2 and owner.num_wanted == 2
    view = dict(owner.take_outgoing(3))[A]
    assert view.num_allowed == 2 and {lease.due_in_s for lease in view.leases} == {None}
    owner.receive(heartbeat(given_back=(1,)), 4)
    assert owner.take_events() == [SlabGivenBack(2)] and owner.num_wanted == 1
    assert owner.states == [HELD, HELD, GIVEN_BACK, HELD]
    owner.reclaim(2)
    assert owner.states[2] == FREE
    owner.receive(heartbeat(given_back=(1, 3)), 5)
    owner.tick(5)
    assert dict(owner.take_outgoing(5))[A].num_allowed is None
    owner.tick(100)
    assert owner.states == [GIVEN_BACK, HELD, FREE, HELD], "no slab is named"


def test_slabs_are_named_when_the_borrower_has_not_chosen_in_time():
    owner = lent_and_fetched()
    owner.recall(2, 7.0)
    owner.receive(heartbeat(given_back=(2,)), 4)
    owner.tick(6.9)
    assert owner.states == [HELD, GIVEN_BACK, HELD, HELD]
    owner.tick(7.0)
    assert owner.states == [RECALLED, GIVEN_BACK, HELD, HELD]
    view = dict(owner.take_outgoing(8))[A]
    assert view.num_allowed is None
    assert {lease.slab: lease.due_in_s for lease in view.leases} == {3: None, 2: None, 0: 9.0}


def test_a_recall_does_not_put_off_an_earlier_one():
    owner = lent_and_fetched()
    assert owner.recall(1, 7.0) == 1 and owner.recall(9, 20.0) == 3 and owner.num_wanted == 4
    owner.tick(7.0)
    assert owner.states == [RECALLED] * 4


def test_slabs_are_recalled_from_those_that_value_them_least_and_from_silent_ones_last():
    owner = lender(6)
    for borrower, value_us in ((A, 1), (B, 8), (BorrowerId("c", 1), 0)):
        owner.receive(heartbeat(borrower, demand=200, value_us=value_us), 0)
    owner.lend(range(6), 0)
    views = dict(owner.take_outgoing(0))
    for borrower, view in views.items():
        for lease in view.leases:
            assert fetch(owner, lease, borrower) is not None
    # The third one is silent.
    owner.receive(heartbeat(A, demand=200, value_us=1), 6)
    owner.receive(heartbeat(B, demand=200, value_us=8), 6)
    owner.tick(6)
    assert owner.recall(5, 10) == 5
    allowed = {borrower.name: view.num_allowed for borrower, view in owner.take_outgoing(6)}
    assert allowed == {"a": 0, "b": 0, "c": 1}


def test_a_borrower_that_is_to_give_back_is_lent_nothing():
    owner = lent_and_fetched(2)
    owner.receive(heartbeat(given_back=(0,)), 0)
    owner.reclaim(1)
    owner.recall(1, 5.0)
    assert owner.lend([1], 0).lent == ()
    owner.receive(heartbeat(given_back=(1,)), 1)
    owner.tick(1)
    assert owner.lend([1], 1).lent == (1,)


def test_slabs_go_to_those_that_value_them_most():
    owner = lender()
    owner.receive(heartbeat(A, demand=300, value_us=2), 0)
    owner.receive(heartbeat(B, demand=200, value_us=9), 0)
    owner.tick(0)
    assert owner.take_events() == [DemandChanged(200, 9, 0)]
    owner.lend([3, 2, 1], 0)
    assert [lease.slab for lease in leases_of(owner, B)] == [3, 2]
    owner.tick(0)
    assert owner.take_events()[-1] == DemandChanged(200, 2, 2)


def test_what_no_borrower_takes_is_offered_for_a_while():
    owner = lender(offer_s=2.0)
    assert owner.lend([2, 3], 0) == LendOutcome((), ())
    owner.receive(heartbeat(demand=100), 1)
    owner.tick(1)
    owner.tick(1.9)
    assert owner.take_events() == [LendOutcome((3,), ())]
    owner.tick(2.0)
    assert owner.take_events() == [LendOutcome((), (2,))] and owner.states == [FREE, FREE, FREE, GRANTED]
    owner.lend([1], 3)
    assert owner.recall(1, 9.0) == 1 and owner.take_events() == [LendOutcome((), (1,))], "it is the engine's at once"
    assert owner.states[3] == GRANTED


def test_a_deadline_that_passes_is_an_alarm_and_a_slab_that_is_given_back_late_ends_it():
    owner = lent_and_fetched(1)
    owner.recall(1, 7.0)
    owner.receive(heartbeat(), 6.95)
    owner.tick(7.0)
    owner.receive(heartbeat(), 16.95)
    owner.tick(16.9)
    assert owner.states == [RECALLED]
    owner.tick(17.0)
    assert SlabQuarantined(0, A) in owner.take_events() and owner.counters["quarantined"] == 1
    assert leases_of(owner, now=18)[0].due_in_s == 0.0  # it is still recalled
    owner.receive(heartbeat(given_back=(0,)), 100)
    assert owner.states == [GIVEN_BACK] and owner.take_events() == [SlabGivenBack(0)]


def test_the_alarm_of_a_slab_that_stays_away_is_raised_once():
    owner = lent_and_fetched(1)
    owner.recall(1, 7.0)
    owner.tick(7.0)
    assert owner.states == [RECALLED]
    owner.tick(17.0)
    assert owner.states == [QUARANTINED] and owner.take_events() == [SlabQuarantined(0, A)]
    owner.tick(18.0)
    assert owner.take_events() == [] and owner.counters["quarantined"] == 1


def test_a_borrower_in_default_gets_nothing_new():
    owner = lent_and_fetched(3)
    owner.receive(heartbeat(given_back=(0,)), 0)
    owner.reclaim(2)
    owner.recall(1, 1.0)
    owner.tick(1.0)
    owner.receive(heartbeat(), 11.0)
    owner.tick(11.0)
    assert owner.states == [QUARANTINED, HELD, FREE]
    assert owner.lend([2], 11.0).lent == ()
    owner.receive(heartbeat(given_back=(2,)), 12)
    assert owner.lend([2], 12.0).lent == (2,)


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


def test_a_silent_borrower_keeps_what_it_has_until_the_engine_needs_it():
    owner = lent_and_fetched(2)
    owner.tick(5.1)
    owner.tick(1e6)
    assert owner.states == [HELD] * 2
    owner.recall(1, 1e6 + 7)
    owner.tick(1e6 + 7)
    assert owner.states == [RECALLED, HELD]
    owner.tick(1e6 + 17)
    assert owner.states == [QUARANTINED, HELD]
    owner.tick(2e6)
    assert owner.states == [QUARANTINED, HELD], "time frees nothing"


def test_strict_slabs_of_a_silent_borrower_come_home():
    owner = lender(1, strict=True)
    owner.receive(heartbeat(), 0)
    owner.lend([0], 0)
    owner.tick(5.1)
    assert owner.states == [RECALLED]
    owner.tick(15.1)
    assert owner.states == [GIVEN_BACK]


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
    owner.recall(1, 1000)
    assert owner._recall_order(A)[0] is False
    for now in range(102, 110):
        owner.tick(now)
    assert owner._recall_order(A)[0] is True


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
    owner = lender(1, strict=True)
    owner.receive(heartbeat(), 0)
    owner.lend([0], 0)
    (lease,) = leases_of(owner)
    assert lease.strict and fetch(owner, lease) is None
    owner.recall(1, 3.0)
    owner.tick(2.9)
    assert owner.states == [HELD]
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
    owner.recall(1, 1.0)
    owner.tick(1.0)
    assert owner.states == [RECALLED] and fetch(owner, lease) is None, "a recalled slab is given to no borrower"


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


def test_an_engine_with_other_ranks_is_lent_nothing_not_counted_and_told_why():
    owner = lender()
    owner.limits = LenderLimits(num_ranks=2)
    owner.receive(heartbeat(num_ranks=1), 0)
    assert owner.num_usable_borrowers == 0 and owner.lend([0], 0).lent == ()
    assert dict(owner.take_outgoing(0))[A].num_ranks == 2
    owner.receive(heartbeat(B, num_ranks=2), 0)
    assert owner.num_usable_borrowers == 1 and owner.lend([1], 0).lent == (1,)
    owner.receive(heartbeat(), 0)
    assert owner.num_usable_borrowers == 2, "A does not tell its ranks any more"


def test_an_unreachable_borrower_without_leases_is_forgotten_until_it_is_heard():
    owner = lent_and_fetched(1)
    owner.receive(heartbeat(B), 0)
    owner.on_borrower_unreachable(A)
    owner.on_borrower_unreachable(B)
    owner.on_borrower_unreachable(B)
    assert list(owner.borrowers) == [A] and owner.states == [HELD], "its process may still have mapped the slab"
    owner.receive(heartbeat(B), 0)
    assert list(owner.borrowers) == [A, B]
    owner.check_invariants()


def test_views_are_sent_on_change_and_every_heartbeat():
    owner = lender()
    owner.receive(heartbeat(), 0)
    assert len(owner.take_outgoing(0)) == 1
    assert owner.take_outgoing(0.9) == []
    owner.lend([0], 0.9)
    assert len(owner.take_outgoing(0.9)) == 1
    assert len(owner.take_outgoing(2.0)) == 1
