"""`Borrower`, step by step."""

from __future__ import annotations

import itertools

from sglang.srt.peer.protocol.borrower import AskedBack, Borrower, LeaseState, Lent, Lost
from sglang.srt.peer.protocol.messages import BorrowerHeartbeat, LeaseId, Lend, LenderHeartbeat

EPOCH = 1000
_sequences = itertools.count()


def borrower(strict: bool = False) -> Borrower:
    return Borrower("worker", "a", 5, 10, strict, heartbeat_s=1.0)


def lend(number: int, reclaim_in_s: float | None = None, strict: bool = False) -> Lend:
    return Lend(number=number, slab=40 + number, size_bytes=100, token=b"t", strict=strict, reclaim_in_s=reclaim_in_s)


def view(*lends: Lend, epoch: int = EPOCH, incarnation: int = 5) -> LenderHeartbeat:
    return LenderHeartbeat(
        sequence=next(_sequences), epoch=epoch, incarnation=incarnation, lends=lends, slab_socket="SOCKET"
    )


def lease(number: int, epoch: int = EPOCH) -> LeaseId:
    return LeaseId(epoch, number)


def holding(*numbers: int) -> Borrower:
    owner = borrower()
    owner.receive(view(*(lend(number) for number in numbers)), 0)
    for number in numbers:
        assert owner.fetched(lease(number), 7)
    owner.take_events()
    return owner


def said(owner: Borrower, now: float = 0.0) -> BorrowerHeartbeat:
    message = owner.outgoing(now)
    assert message is not None
    return message


def test_a_lease_from_offer_to_release():
    owner = borrower()
    owner.receive(view(lend(0)), 0)
    assert [offered.number for offered in owner.to_fetch()] == [0]
    assert owner.fetched(lease(0), 7) and not owner.to_fetch()
    assert said(owner).mapped == (0,)
    owner.receive(view(lend(0, reclaim_in_s=4.0)), 10)
    assert owner.take_events() == [
        Lent("worker", lease(0), 40, 100, 7),
        AskedBack("worker", lease(0), 14.0),
    ]
    owner.unmapped(lease(0))
    assert (said(owner).mapped, said(owner, 5).released) == ((), (0,))
    owner.receive(view(lend(0, reclaim_in_s=3.0)), 11)  # the lender does not know yet
    assert owner.state(0) == LeaseState.RELEASED and owner.take_events() == []
    owner.receive(view(), 12)
    assert said(owner, 50).released == () and owner.state(0) is None and owner.take_events() == []


def test_what_is_asked_back_before_it_came_is_never_used():
    owner = borrower()
    owner.receive(view(lend(0)), 0)
    owner.receive(view(lend(0, reclaim_in_s=4.0), lend(1, reclaim_in_s=4.0)), 0)
    assert owner.to_fetch() == [] and said(owner).released == (0, 1)
    assert not owner.fetched(lease(0), 7) and owner.take_events() == []


def test_it_may_release_without_being_asked():
    owner = holding(0, 1)
    owner.unmapped(lease(1))
    owner.unmapped(lease(1))
    message = said(owner)
    assert (message.mapped, message.released) == ((0,), (1,))


def test_strict_leases_need_no_memory():
    owner = borrower(strict=True)
    owner.receive(view(lend(0, strict=True)), 0)
    assert owner.take_events() == [Lent("worker", lease(0), 40, 100, None, b"t", "SOCKET")]
    message = said(owner)
    assert message.register.strict and message.mapped == () and owner.to_fetch() == []


def test_the_lenders_death_ends_its_leases_for_good():
    owner = holding(0)
    owner.receive(view(lend(0), lend(1)), 0)
    owner.lender_died(EPOCH)
    assert owner.take_events() == [Lost("worker", lease(0))]
    assert not owner.receive(view(lend(0)), 1), "the dead lender's message, late"
    assert not owner.fetched(lease(1), 7)
    owner.unmapped(lease(0))
    assert said(owner).released == ()
    owner.check_invariants()


def test_a_new_epoch_ends_the_earlier_ones():
    owner = holding(0)
    owner.receive(view(lend(0), epoch=EPOCH + 1), 0)
    assert owner.take_events() == [Lost("worker", lease(0))]
    assert owner.state(0) == LeaseState.OFFERED and owner.epoch == EPOCH + 1
    assert not owner.fetched(lease(0), 7), "the earlier epoch's memory under the same number"
    assert not owner.receive(view(epoch=EPOCH), 0)
    owner.lender_died(EPOCH)
    assert owner.fetched(lease(0, EPOCH + 1), 8)


def test_a_silent_lender_keeps_its_leases_usable():
    owner = holding(0)
    for now in range(1000):
        owner.outgoing(float(now))
    assert owner.state(0) == LeaseState.HELD and owner.take_events() == []


def test_messages_that_are_late_or_for_another_life_change_nothing():
    owner = borrower()
    late, news = view(), view(lend(0))
    assert owner.receive(news, 0) and not owner.receive(late, 0) and not owner.receive(news, 0)
    assert not owner.receive(view(incarnation=4), 0)
    assert owner.state(0) == LeaseState.OFFERED


def test_a_lender_that_does_not_know_a_lease_any_more_ends_it():
    owner = holding(0, 1)
    owner.receive(view(lend(1)), 0)
    assert owner.take_events() == [Lost("worker", lease(0))]


def test_views_are_sent_on_change_and_every_heartbeat():
    owner = borrower()
    assert said(owner).register.want_bytes == 0
    assert owner.outgoing(0.9) is None
    owner.want(500)
    assert said(owner, 0.9).register.want_bytes == 500
    assert said(owner, 2.0).sequence == 3
