"""`Borrower`, step by step."""

from __future__ import annotations

import itertools

import msgspec

from sglang.srt.peer.protocol.borrower import Borrower, BorrowerConfig, SlabLent, SlabLost, SlabRecalled, SlabsWanted
from sglang.srt.peer.protocol.leases import LeaseState
from sglang.srt.peer.protocol.messages import BorrowerHeartbeat, Lease, LeaseId, LenderHeartbeat

EPOCH = 1000
_sequences = itertools.count()


def borrower() -> Borrower:
    return Borrower("lender", BorrowerConfig("a", 5, 10, heartbeat_s=1.0))


def terms(number: int, due_in_s: float | None = None, strict: bool = False) -> Lease:
    return Lease(number=number, slab=40 + number, size_bytes=100, token=b"t", strict=strict, due_in_s=due_in_s)


def view(*leases: Lease, epoch: int = EPOCH, incarnation: int = 5, num_allowed: int | None = None) -> LenderHeartbeat:
    return LenderHeartbeat(
        sequence=next(_sequences),
        epoch=epoch,
        incarnation=incarnation,
        leases=leases,
        slab_socket="SOCKET",
        num_allowed=num_allowed,
    )


def lease(number: int, epoch: int = EPOCH) -> LeaseId:
    return LeaseId(epoch, number)


def test_both_sides_tell_their_ranks():
    owner = Borrower("lender", BorrowerConfig("a", 5, 10, num_ranks=2))
    message = owner.take_outgoing(0)
    assert message is not None and message.register.num_ranks == 2
    owner.receive(msgspec.structs.replace(view(), num_ranks=4), 0)
    assert owner.offer is not None and owner.offer.num_ranks == 4


def holding(*numbers: int) -> Borrower:
    owner = borrower()
    owner.receive(view(*(terms(number) for number in numbers)), 0)
    for number in numbers:
        assert owner.hold(lease(number), 7)
    owner.take_events()
    return owner


def sent(owner: Borrower, now: float = 0.0) -> BorrowerHeartbeat:
    message = owner.take_outgoing(now)
    assert message is not None
    return message


def test_a_lease_from_grant_to_giving_back():
    owner = borrower()
    owner.receive(view(terms(0)), 0)
    assert [granted.number for granted in owner.leases_to_fetch()] == [0]
    assert owner.hold(lease(0), 7) and not owner.leases_to_fetch()
    assert sent(owner).mapped == (0,)
    owner.receive(view(terms(0, due_in_s=4.0)), 10)
    assert owner.take_events() == [
        SlabLent("lender", lease(0), 40, 100, 7),
        SlabRecalled("lender", lease(0), 14.0),
    ]
    owner.give_back(lease(0))
    assert (sent(owner).mapped, sent(owner, 5).given_back) == ((), (0,))
    owner.receive(view(terms(0, due_in_s=3.0)), 11)  # the lender does not know yet
    assert owner.state(0) == LeaseState.GIVEN_BACK and owner.take_events() == []
    owner.receive(view(), 12)
    assert sent(owner, 50).given_back == () and owner.state(0) is None and owner.take_events() == []


def test_a_slab_that_is_recalled_before_its_memory_came_is_never_used():
    owner = borrower()
    owner.receive(view(terms(0)), 0)
    owner.receive(view(terms(0, due_in_s=4.0), terms(1, due_in_s=4.0)), 0)
    assert owner.leases_to_fetch() == [] and sent(owner).given_back == (0, 1)
    assert not owner.hold(lease(0), 7) and owner.take_events() == []


def test_a_slab_may_be_given_back_without_a_recall():
    owner = holding(0, 1)
    owner.give_back(lease(1))
    owner.give_back(lease(1))
    message = sent(owner)
    assert (message.mapped, message.given_back) == ((0,), (1,))


def test_what_a_lender_wants_is_counted_once_however_often_it_is_told():
    owner = holding(0, 1, 2)
    all_three = [terms(number) for number in range(3)]
    for _ in range(2):
        owner.receive(view(*all_three, num_allowed=1), 0)
    assert owner.take_events() == [SlabsWanted("lender", 2)]
    owner.give_back(lease(2))
    (wanted,) = owner.take_events()
    assert wanted == SlabsWanted("lender", 1) and isinstance(wanted, SlabsWanted) and wanted.num_given_back == 1
    owner.receive(view(*all_three, num_allowed=1), 1)  # the lender does not know yet
    assert owner.take_events() == [], "a slab that was given back counts"
    owner.give_back(lease(0))
    assert owner.take_events() == [SlabsWanted("lender", 0)] and sent(owner).mapped == (1,)
    owner.receive(view(terms(1)), 2)
    assert owner.take_events() == []
    owner.check_invariants()


def test_a_lease_whose_memory_has_not_come_is_given_back_first():
    owner = holding(0)
    owner.receive(view(terms(0), terms(1), terms(2), num_allowed=1), 0)
    assert sent(owner).given_back == (1, 2) and owner.take_events() == []
    owner.receive(view(terms(0), num_allowed=0), 0)
    assert owner.take_events() == [SlabsWanted("lender", 1)]
    owner.receive(view(terms(0)), 0)
    assert owner.take_events() == [SlabsWanted("lender", 0)], "the lender needs it no more"


def test_the_death_of_a_lender_ends_what_it_wanted():
    owner = holding(0)
    owner.receive(view(terms(0), num_allowed=0), 0)
    owner.on_lender_death(EPOCH)
    assert owner.take_events() == [SlabsWanted("lender", 1), SlabLost("lender", lease(0)), SlabsWanted("lender", 0)]
    owner.check_invariants()


def test_strict_leases_need_no_memory():
    owner = borrower()
    owner.receive(view(terms(0, strict=True)), 0)
    assert owner.take_events() == [SlabLent("lender", lease(0), 40, 100, None, b"t", "SOCKET")]
    message = sent(owner)
    assert message.mapped == () and owner.leases_to_fetch() == []


def test_the_lenders_death_ends_its_leases_for_good():
    owner = holding(0)
    owner.receive(view(terms(0), terms(1)), 0)
    owner.on_lender_death(EPOCH)
    assert owner.take_events() == [SlabLost("lender", lease(0))]
    assert not owner.receive(view(terms(0)), 1), "the dead lender's message, late"
    assert not owner.hold(lease(1), 7)
    owner.give_back(lease(0))
    assert sent(owner).given_back == ()
    owner.check_invariants()


def test_a_new_epoch_ends_the_earlier_ones():
    owner = holding(0)
    owner.receive(view(terms(0), epoch=EPOCH + 1), 0)
    assert owner.take_events() == [SlabLost("lender", lease(0))]
    assert owner.state(0) == LeaseState.GRANTED and owner.epoch == EPOCH + 1
    assert not owner.hold(lease(0), 7), "the earlier epoch's memory under the same number"
    assert not owner.receive(view(epoch=EPOCH), 0)
    owner.on_lender_death(EPOCH)
    assert owner.hold(lease(0, EPOCH + 1), 8)


def test_a_silent_lender_keeps_its_leases_usable():
    owner = holding(0)
    for now in range(1000):
        owner.take_outgoing(float(now))
    assert owner.state(0) == LeaseState.HELD and owner.take_events() == []


def test_messages_that_are_late_or_for_another_life_change_nothing():
    owner = borrower()
    late, news = view(), view(terms(0))
    assert owner.receive(news, 0) and not owner.receive(late, 0) and not owner.receive(news, 0)
    assert not owner.receive(view(incarnation=4), 0)
    assert owner.state(0) == LeaseState.GRANTED


def test_a_lender_that_does_not_know_a_lease_any_more_ends_it():
    owner = holding(0, 1)
    owner.receive(view(terms(1)), 0)
    assert owner.take_events() == [SlabLost("lender", lease(0))]


def test_views_are_sent_on_change_and_every_heartbeat():
    owner = borrower()
    assert sent(owner).register.demand_bytes == 0
    assert owner.take_outgoing(0.9) is None
    owner.set_demand(500)
    assert sent(owner, 0.9).register.demand_bytes == 500
    assert sent(owner, 2.0).sequence == 3
