"""Random schedules of lending, recalling, faults and deaths, and a proof that these tests catch bugs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator

import msgspec
import pytest

from sglang.srt.peer.protocol.borrower import Borrower, SlabLent
from sglang.srt.peer.protocol.leases import LeaseState
from sglang.srt.peer.protocol.lender import Lender, _Borrower, _GrantedLease
from sglang.srt.peer.protocol.messages import BorrowerHeartbeat, Fetch, LeaseId, LenderHeartbeat
from support.peer_world import NUM_SLABS, SLAB_BYTES, World

STEPS = 3000


def play(world: World, steps: int = STEPS) -> None:
    """Chaos, then peace; in the end every slab can be had back."""
    for _ in range(steps):
        world.step()
    for lender_side in world.lender_sides.values():
        lender_side.is_stopped = False
    stopped = world.borrower_sides[0]
    for borrower_side in world.borrower_sides:
        borrower_side.is_stopped = borrower_side is stopped
        for borrower in borrower_side.borrowers.values():
            borrower.set_demand(2 * NUM_SLABS * SLAB_BYTES)
    world.settle(30)
    world.check_settled()
    for lender_side in world.lender_sides.values():
        lender_side.lender.recall(NUM_SLABS, world.now + 2)
    # Those that go on choose at once; the stopped one is named slabs after 2 s, which are quarantined 5 s later.
    world.settle(10)
    world.check_settled()
    for lender_side in world.lender_sides.values():
        assert not {LeaseState.GRANTED, LeaseState.HELD} & set(lender_side.lender.states), (
            "slabs were recalled in vain"
        )
    stopped.is_stopped = False
    world.settle(10)
    for lender_side in world.lender_sides.values():
        assert set(lender_side.lender.states) == {LeaseState.FREE}, "capacity is lost"
        world.lend_all(lender_side)
        assert set(lender_side.lender.states) <= {LeaseState.GRANTED, LeaseState.HELD}
    world.settle(5)
    world.check_settled()


def test_random_schedules():
    seen: set[str] = set()
    first = int(os.environ.get("SEED", 0))
    for seed in range(first, first + 3):
        print(f"seed {seed}")
        world = World(seed)
        play(world)
        seen |= world.seen
    everything = {
        "lent",
        "kept",
        "chosen",
        "recalled by name",
        "held",
        "held strictly",
        "lost",
        "stale",
        "refused",
        "slab came too late",
    }
    everything |= {"quarantined", "quarantine ended", "borrower died", "lender died", "fetched after death"}
    assert seen == everything, "what these schedules are to show does not happen in them"


# -- planted bugs ------------------------------------------------------------------------------------------------


class FreesAtDeadline(Lender):
    def _expire(self, lease: _GrantedLease) -> None:
        self._end_lease(lease)


class ForgetsWhoWasToGiveBack(Lender):
    def _check_allowance(self, borrower: _Borrower, now: float) -> None:
        if now >= borrower.allowed_until:
            borrower.num_allowed, borrower.allowed_until = None, math.inf


class EndsLeasesBeyondWhatIsAllowed(Lender):
    def recall(self, num_slabs: int, deadline: float) -> int:
        held = [slab for slab, state in enumerate(self.states) if state == LeaseState.HELD][:num_slabs]
        for slab in held:
            self._end_lease(self._leases[slab])
        return len(held)


class FreesWhenSilent(Lender):
    def tick(self, now: float) -> None:
        for borrower in self._borrowers.values():
            if self._is_silent(borrower, now):
                for lease in list(borrower.leases.values()):
                    self._end_lease(lease)
        super().tick(now)


class TakesTheNextLifeForTheFormersDeath(Lender):
    def receive(self, message: BorrowerHeartbeat, now: float) -> bool:
        news = super().receive(message, now)
        for other in list(self._borrowers):
            if other.name == message.register.name and other.incarnation < message.register.incarnation:
                self.on_borrower_death(other)
        return news


class FreesBeforeScrubbing(Lender):
    def _end_lease(self, lease: _GrantedLease) -> None:
        super()._end_lease(lease)
        self._events.pop()
        self.reclaim(lease.slab)


class ForgetsWhoHasFetched(Lender):
    def allow_fetch(self, message: Fetch) -> int | None:
        slab = super().allow_fetch(message)
        if slab is not None:
            self.states[slab] = LeaseState.GRANTED
        return slab


class BelievesEarlierEpochs(Borrower):
    def receive(self, message: LenderHeartbeat, now: float) -> bool:
        if message.incarnation == self.config.incarnation and message.epoch != self.epoch:
            self._begin_epoch(message.epoch)
        return super().receive(message, now)


class TakesLateMessagesForNews(Borrower):
    def receive(self, message: LenderHeartbeat, now: float) -> bool:
        self._received_sequence = -1
        return super().receive(message, now)


class MapsWhatComesTooLate(Borrower):
    def hold(self, lease: LeaseId, fd: int | None) -> bool:
        if lease.epoch == self.epoch and self.state(lease.number) == LeaseState.GIVEN_BACK:
            terms = self._leases[lease.number].terms
            self._events.append(SlabLent(self.lender, lease, terms.slab, terms.size_bytes, fd))
            return True
        return super().hold(lease, fd)


class DoesNotCountWhatItGivesBack(Borrower):
    def give_back(self, lease: LeaseId) -> None:
        self._count_wanted, counted = lambda **_: None, self._count_wanted  # type: ignore[method-assign]
        super().give_back(lease)
        self._count_wanted = counted  # type: ignore[method-assign]


class GivesBackInOneHeartbeatOnly(Borrower):
    sent: frozenset[int] = frozenset()

    def take_outgoing(self, now: float) -> BorrowerHeartbeat | None:
        message = super().take_outgoing(now)
        if message is None:
            return None
        given_back = set(message.given_back) - self.sent
        self.sent |= given_back
        return msgspec.structs.replace(message, given_back=tuple(given_back))


MAPPED = "has mapped"
LOST = "but its lender lives"
LENDER_BUGS = [
    (FreesAtDeadline, MAPPED),
    (EndsLeasesBeyondWhatIsAllowed, MAPPED),
    (ForgetsWhoWasToGiveBack, "were recalled in vain"),
    (FreesWhenSilent, MAPPED),
    (TakesTheNextLifeForTheFormersDeath, MAPPED),
    (FreesBeforeScrubbing, "with what others wrote"),
    (ForgetsWhoHasFetched, MAPPED),
]
BORROWER_BUGS = [
    (BelievesEarlierEpochs, LOST),
    (TakesLateMessagesForNews, LOST),
    (MapsWhatComesTooLate, MAPPED),
    (GivesBackInOneHeartbeatOnly, "capacity is lost"),
    (DoesNotCountWhatItGivesBack, "more is to be given back than is held"),
]


@pytest.mark.parametrize(("bug", "says"), LENDER_BUGS)
def test_a_bug_of_the_lender_is_caught(bug: type[Lender], says: str):
    assert any(says in found for found in found_with(lambda seed: World(seed, lender_class=bug)))


@pytest.mark.parametrize(("bug", "says"), BORROWER_BUGS)
def test_a_bug_of_the_borrower_is_caught(bug: type[Borrower], says: str):
    assert any(says in found for found in found_with(lambda seed: World(seed, borrower_class=bug)))


def found_with(world_of: Callable[[int], World]) -> Iterator[str]:
    """What fails, seed by seed."""
    for seed in range(8):
        try:
            play(world_of(seed), STEPS // 4)
        except AssertionError as error:
            yield str(error)
