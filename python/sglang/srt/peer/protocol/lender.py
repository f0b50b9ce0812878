"""`Lender`: which slabs of an engine are lent to whom, and when the engine may use them again.

A pure state machine: messages, deaths and the time are passed in; events for the engine and heartbeats come out.
Never touches memory, a socket or a clock.

            lend               allow_fetch         not given back in time         deadline
    FREE ----------> GRANTED -------------> HELD -------------------> RECALLED ---------------> QUARANTINED
     ^                  | recall              |                           |                         | (an alarm)
     |                  |                     |                           |                         |
     | reclaim          |     the borrower's heartbeat has it as given back, or the borrower is proven dead
     |                  v                     v                           v                         v
     +------------- GIVEN_BACK <--------------+---------------------------+-------------------------+

A recall is a number: how many slabs a borrower may keep. The borrower gives back those that are worth least to it.
Only where it keeps more past the deadline, slabs are recalled by name, the lowest first. Slabs that no borrower takes
stay FREE, are offered for a while, and then the engine has them again.

A mapping of GPU memory cannot be revoked from outside. Once the memory of a slab was fetched, the slab comes back by
the borrower's word or by the death of the borrower's process, never by time: a borrower that is late or silent costs
capacity, not correctness. A lease whose memory no borrower has ends by the lender's word alone: one that is not
fetched yet when it is recalled, a strict one at its deadline.
"""

from __future__ import annotations

import hmac
import math
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from sglang.srt.peer.protocol.leases import LeaseState, ranks_differ
from sglang.srt.peer.protocol.messages import (
    BorrowerHeartbeat,
    BorrowerId,
    Fetch,
    Lease,
    LenderHeartbeat,
    Register,
    Stage,
)
from sglang.srt.utils.peer_timing import PeerTiming
from sglang.srt.utils.time_units import Seconds

# Heartbeats of more borrowers are ignored.
MAX_BORROWERS = 64
# Slabs that a borrower may use, and that are not recalled.
_USABLE = (LeaseState.GRANTED, LeaseState.HELD)


@dataclass(frozen=True)
class LendOutcome:
    """What has become of slabs that were lent."""

    # Slabs that borrowers have now: not the engine's any more.
    lent: tuple[int, ...]
    # Slabs that no borrower would take: still the engine's.
    kept: tuple[int, ...]


@dataclass(frozen=True)
class SlabGivenBack:
    """No borrower uses the slab any more. The engine has to overwrite it and call `reclaim`."""

    slab: int


@dataclass(frozen=True)
class SlabQuarantined:
    """An alarm: the deadline has passed, and the borrower lives and has not given the slab back. The capacity is lost
    until it does, or dies."""

    slab: int
    borrower: BorrowerId


@dataclass(frozen=True)
class DemandChanged:
    """What borrowers would like to have, or what slabs are worth to them, has changed."""

    # Beyond what they have: of the borrowers to which a slab is worth most, among those that would like to have more.
    unmet_bytes: int
    # What a slab is worth to these, see `Register`.
    value_us: int = 0
    # What a slab is worth to the borrower to which it is worth least, among those that have some.
    lent_value_us: int = 0


LenderEvent = LendOutcome | SlabGivenBack | SlabQuarantined | DemandChanged


@dataclass(frozen=True)
class LenderTiming:
    """All in seconds."""

    # A heartbeat is repeated after this time.
    heartbeat_s: float = PeerTiming.heartbeat
    # A borrower that sends nothing for this time is lent nothing more. It keeps what it has mapped: a process that
    # stands still goes on, and one that has ended is known by its pidfd.
    silence_s: float = PeerTiming.silence
    # A borrower that has not given back enough by the deadline of a recall has so long for slabs that are named then.
    grace_s: float = PeerTiming.grace
    # Slabs that no borrower takes are offered for this time.
    offer_s: float = PeerTiming.offer

    @classmethod
    def of(cls, timing: PeerTiming) -> LenderTiming:
        """A lender's part of what the two sides of a loan wait for."""
        return cls(timing.heartbeat, timing.silence, timing.grace, timing.offer)


@dataclass(frozen=True)
class LenderLimits:
    """How much a lender may lend, and to whom. Borrowers are told."""

    # How many slabs it may ever lend; None: all.
    num_lendable: int | None = None
    # Its ranks. Engines with as many are lent slabs. 0: not told.
    num_ranks: int = 0


@dataclass(frozen=True)
class CopyGrant:
    """A strict lease: its borrower, which knows the token, may have the slab copied from and to."""

    slab: int
    borrower: BorrowerId
    token: bytes


@dataclass
class _GrantedLease:
    number: int
    slab: int
    borrower: BorrowerId
    token: bytes
    # Of the recall; None: the slab is not recalled.
    deadline: float | None = None


@dataclass
class _Borrower:
    register: Register
    # When its newest message came.
    heard_at: float
    # Of its newest message.
    sequence: int = -1
    sent_at: float = 0.0
    # Whether the heartbeat of sent_at holds today's view.
    is_sent: bool = False
    # By number.
    leases: dict[int, _GrantedLease] = field(default_factory=dict)
    # How many usable leases it may keep; None: all. And until when it has to have given back the others.
    num_allowed: int | None = None
    allowed_until: float = math.inf


class Lender:
    """Slabs 0..num_slabs-1 of slab_bytes each, of one life of a lender.

    epoch: see `LeaseId`. make_token: returns a secret for a lease. strict: no borrower is given memory. slab_socket:
    the path of the slab channel, which borrowers are told. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        epoch: int,
        num_slabs: int,
        slab_bytes: int,
        make_token: Callable[[], bytes],
        strict: bool = False,
        timing: LenderTiming | None = None,
        slab_socket: str = "",
    ) -> None:
        self.epoch = epoch
        self.slab_bytes = slab_bytes
        self.strict = strict
        self.timing = timing or LenderTiming()
        self.states = [LeaseState.FREE] * num_slabs
        # "quarantined": alarms. "disputed": ended leases that a borrower believes to have mapped, which is a bug, or
        # a message that came later than silence_s.
        self.counters = Counter(quarantined=0, disputed=0)
        self._make_token = make_token
        self._slab_socket = slab_socket
        self._borrowers: dict[BorrowerId, _Borrower] = {}
        # By slab.
        self._leases: dict[int, _GrantedLease] = {}
        # Dead borrowers, whose late messages may still come.
        self._dead: deque[BorrowerId] = deque(maxlen=MAX_BORROWERS)
        self._next_number = 0
        self._sent_sequence = 0
        self.limits = LenderLimits()
        # FREE slabs that are offered -> until when.
        self._offered: dict[int, float] = {}
        self._demand = DemandChanged(0)
        self._ticked_at: float = math.inf
        self._events: list[LenderEvent] = []

    @property
    def borrowers(self) -> Collection[BorrowerId]:
        return self._borrowers.keys()

    @property
    def num_usable_borrowers(self) -> int:
        """Borrowers that can use this lender's slabs."""
        return sum(self._can_use_slabs(borrower.register) for borrower in self._borrowers.values())

    # -- from the engine ----------------------------------------------------------------------------------------

    def lend(self, slabs: Collection[int], now: Seconds) -> LendOutcome:
        """The engine does not need these FREE slabs, and has overwritten them. Each, the highest first, goes to the
        borrower with unmet demand to which it is worth most; of equal ones to that with the fewest leases. Others are
        offered for `offer_s`. Returns what has become of them at once; `LendOutcome` events tell it of each."""
        for slab in slabs:
            assert self.states[slab] == LeaseState.FREE and slab not in self._offered, f"slab {slab} is lent twice"
            self._offered[slab] = now + self.timing.offer_s
        return self._grant_offered(now)

    def recall(self, num_slabs: int, deadline: float) -> int:
        """Get back so many more slabs than were recalled before. Offered ones, and those that were not fetched, end
        at once. For the rest borrowers keep less from now on: first those that can be heard, and of them those to
        which a slab is worth least. Returns how many slabs were found."""
        kept = sorted(self._offered)
        self._end_offers([], kept)
        granted = [slab for slab, state in enumerate(self.states) if state == LeaseState.GRANTED]
        granted = granted[: max(0, num_slabs - len(kept))]
        for slab in granted:
            self._end_lease(self._leases[slab])
        left = max(0, num_slabs - len(kept) - len(granted))
        order = sorted(self._borrowers, key=self._recall_order)
        for borrower in (self._borrowers[borrower_id] for borrower_id in order):
            allowed = self._num_usable(borrower) if borrower.num_allowed is None else borrower.num_allowed
            num_taken = min(left, allowed)
            if num_taken:
                borrower.num_allowed = allowed - num_taken
                # A later recall does not put an earlier one off.
                borrower.allowed_until = min(borrower.allowed_until, deadline)
                borrower.is_sent = False
                left -= num_taken
        return num_slabs - left

    def reclaim(self, slab: int) -> None:
        """The engine has overwritten a slab that was given back: the slab is the engine's own again."""
        assert self.states[slab] == LeaseState.GIVEN_BACK, f"slab {slab} is {self.states[slab].name}"
        self.states[slab] = LeaseState.FREE

    @property
    def num_wanted(self) -> int:
        """Slabs that borrowers have to give back, of their choice."""
        borrowers = self._borrowers.values()
        return sum(max(0, self._num_usable(b) - b.num_allowed) for b in borrowers if b.num_allowed is not None)

    def take_events(self) -> list[LenderEvent]:
        events, self._events = self._events, []
        return events

    # -- from outside -------------------------------------------------------------------------------------------

    def receive(self, message: BorrowerHeartbeat, now: Seconds) -> bool:
        """Whether the message is used. It is ignored if its borrower is dead, if there are too many borrowers, or if
        it is older than a message that came before."""
        borrower_id = BorrowerId(message.register.name, message.register.incarnation)
        borrower = self._borrowers.get(borrower_id)
        if borrower is None:
            if borrower_id in self._dead or len(self._borrowers) >= MAX_BORROWERS:
                return False
            borrower = self._borrowers[borrower_id] = _Borrower(message.register, now)
        elif message.sequence <= borrower.sequence:
            return False
        borrower.sequence, borrower.heard_at, borrower.register = message.sequence, now, message.register
        if message.epoch == self.epoch:
            for number in message.given_back:
                if number in borrower.leases:
                    self._end_lease(borrower.leases[number])
            self.counters["disputed"] += sum(number not in borrower.leases for number in message.mapped)
        return True

    def allow_fetch(self, message: Fetch) -> int | None:
        """A borrower asks for the memory of a lease. Returns the slab, which the borrower may map from now on; None:
        the borrower must not have it."""
        lease = self._claimed_lease(message)
        if lease is None or self.strict or self.states[lease.slab] not in _USABLE:
            return None
        self.states[lease.slab] = LeaseState.HELD
        return lease.slab

    def may_stage(self, message: Stage) -> bool:
        """Whether the sender has the strict lease that the message names."""
        return self.strict and self._claimed_lease(message) is not None

    def copy_grants(self) -> dict[int, CopyGrant]:
        """By number of the lease: the slabs that may be copied from and to at present."""
        leases = self._leases.values() if self.strict else ()
        return {lease.number: CopyGrant(lease.slab, lease.borrower, lease.token) for lease in leases}

    def on_borrower_death(self, borrower_id: BorrowerId) -> None:
        """The borrower's process is proven to have ended, and with it its mappings."""
        self._dead.append(borrower_id)
        if borrower_id in self._borrowers:
            for lease in list(self._borrowers[borrower_id].leases.values()):
                self._end_lease(lease)
            del self._borrowers[borrower_id]

    def on_borrower_unreachable(self, borrower_id: BorrowerId) -> None:
        """The borrower's connection has ended. That does not end a lease. A borrower without one is forgotten: if it
        lives, its next message registers it again."""
        borrower = self._borrowers.get(borrower_id)
        if borrower is not None and not borrower.leases:
            del self._borrowers[borrower_id]

    def tick(self, now: Seconds) -> None:
        """Time has passed. Messages that have already come are to be received first."""
        # While the lender itself stood still it could hear no borrower.
        if now - self._ticked_at > self.timing.silence_s / 2:
            for borrower in self._borrowers.values():
                borrower.heard_at = min(now, borrower.heard_at + now - self._ticked_at)
        self._ticked_at = now
        for borrower_id, borrower in list(self._borrowers.items()):
            is_superseded, is_silent = self._is_superseded(borrower_id), self._is_silent(borrower, now)
            for lease in list(borrower.leases.values()) if is_superseded or is_silent else ():
                # Of what was never mapped no process needs to be heard, and none is watched.
                if is_superseded or self.strict or self.states[lease.slab] == LeaseState.GRANTED:
                    self._recall(lease, now + self.timing.grace_s)
            self._check_allowance(borrower, now)
            if is_silent and not borrower.leases:
                del self._borrowers[borrower_id]
        for lease in list(self._leases.values()):
            is_recalled = self.states[lease.slab] == LeaseState.RECALLED
            if is_recalled and lease.deadline is not None and now >= lease.deadline:
                self._expire(lease)
        self._grant_offered(now)
        if (demand := self._current_demand(now)) != self._demand:
            self._demand = demand
            self._events.append(demand)

    def take_outgoing(self, now: Seconds) -> list[tuple[BorrowerId, LenderHeartbeat]]:
        """Views that have changed, and those that are to be repeated."""
        messages = []
        for borrower_id, borrower in self._borrowers.items():
            if not borrower.is_sent or now - borrower.sent_at >= self.timing.heartbeat_s:
                borrower.is_sent, borrower.sent_at = True, now
                messages.append((borrower_id, self._make_heartbeat(borrower_id.incarnation, borrower, now)))
        return messages

    # -- inside -------------------------------------------------------------------------------------------------

    def _claimed_lease(self, message: Fetch | Stage) -> _GrantedLease | None:
        """The lease that a message names; None if it is not the sender's."""
        borrower = self._borrowers.get(BorrowerId(message.name, message.incarnation))
        lease = borrower.leases.get(message.number) if borrower is not None and message.epoch == self.epoch else None
        if lease is None or not hmac.compare_digest(lease.token, message.token):
            return None
        return lease

    def _is_silent(self, borrower: _Borrower, now: Seconds) -> bool:
        return now - borrower.heard_at > self.timing.silence_s

    def _is_superseded(self, borrower_id: BorrowerId) -> bool:
        """Whether the borrower's name has begun another life: this one borrows no more."""
        return any(
            other.name == borrower_id.name and other.incarnation > borrower_id.incarnation
            for other in self._borrowers
        )

    def _can_use_slabs(self, register: Register) -> bool:
        """Whether a slab has room for the borrower's pages, and each rank of the two engines has one in the other."""
        return register.page_bytes <= self.slab_bytes and not ranks_differ(register.num_ranks, self.limits.num_ranks)

    def _unmet_demand(self, borrower_id: BorrowerId, now: Seconds) -> int:
        """Bytes that a borrower would like to have and may get. It may get nothing if it cannot use these slabs, is
        silent or superseded, is to give slabs back, or has not given back a slab by its deadline."""
        borrower = self._borrowers[borrower_id]
        unmet = borrower.register.demand_bytes - len(borrower.leases) * self.slab_bytes
        if unmet <= 0 or not self._can_use_slabs(borrower.register) or borrower.num_allowed is not None:
            return 0
        if self._is_silent(borrower, now) or self._is_superseded(borrower_id):
            return 0
        in_default = any(self.states[lease.slab] == LeaseState.QUARANTINED for lease in borrower.leases.values())
        return 0 if in_default else unmet

    def _current_demand(self, now: Seconds) -> DemandChanged:
        unmet = {each: self._unmet_demand(each, now) for each in self._borrowers}
        best_us = max((self._value_us(each) for each in unmet if unmet[each]), default=0)
        having = [self._value_us(each) for each, borrower in self._borrowers.items() if self._num_usable(borrower)]
        return DemandChanged(
            sum(unmet[each] for each in unmet if self._value_us(each) == best_us), best_us, min(having, default=0)
        )

    def _value_us(self, borrower_id: BorrowerId) -> int:
        return self._borrowers[borrower_id].register.slab_value_us

    def _num_usable(self, borrower: _Borrower) -> int:
        return sum(self.states[lease.slab] in _USABLE for lease in borrower.leases.values())

    def _recall_order(self, borrower_id: BorrowerId) -> tuple[bool, int, BorrowerId]:
        """Who gives back first: the least. Of the silent nothing is to be expected soon."""
        borrower = self._borrowers[borrower_id]
        is_silent = self._ticked_at - borrower.heard_at > self.timing.silence_s and self._ticked_at < math.inf
        return is_silent, self._value_us(borrower_id), borrower_id

    def _check_allowance(self, borrower: _Borrower, now: Seconds) -> None:
        """A borrower has given back what it had to, or its time is over."""
        if borrower.num_allowed is None:
            return
        num_excess = self._num_usable(borrower) - borrower.num_allowed
        if num_excess > 0 and now < borrower.allowed_until:
            return
        borrower.num_allowed, borrower.allowed_until, borrower.is_sent = None, math.inf, False
        if num_excess <= 0:
            return
        usable = [lease for lease in borrower.leases.values() if self.states[lease.slab] in _USABLE]
        for lease in sorted(usable, key=lambda each: each.slab)[:num_excess]:
            # A strict one needs no more time: its borrower has mapped nothing.
            self._recall(lease, now if self.strict else now + self.timing.grace_s)

    def _grant_offered(self, now: Seconds) -> LendOutcome:
        """Give offered slabs to borrowers, and those that were offered for long to the engine."""
        lent: list[int] = []
        unmet = {borrower_id: self._unmet_demand(borrower_id, now) for borrower_id in self._borrowers}
        for slab in sorted(self._offered, reverse=True):
            candidates = [borrower_id for borrower_id in unmet if unmet[borrower_id] > 0]
            if not candidates:
                break
            chosen = min(
                candidates, key=lambda each: (-self._value_us(each), len(self._borrowers[each].leases), each)
            )
            del self._offered[slab]
            self._grant(slab, chosen)
            unmet[chosen] -= self.slab_bytes
            lent.append(slab)
        return self._end_offers(lent, sorted(slab for slab, until in self._offered.items() if until <= now))

    def _end_offers(self, lent: list[int], kept: list[int]) -> LendOutcome:
        """kept: slabs that are not offered any more; the engine has them."""
        for slab in kept:
            del self._offered[slab]
        outcome = LendOutcome(tuple(lent), tuple(kept))
        if lent or kept:
            self._events.append(outcome)
        return outcome

    def _grant(self, slab: int, borrower_id: BorrowerId) -> None:
        borrower = self._borrowers[borrower_id]
        lease = _GrantedLease(self._next_number, slab, borrower_id, self._make_token())
        self._next_number += 1
        self._leases[slab] = borrower.leases[lease.number] = lease
        self.states[slab] = LeaseState.HELD if self.strict else LeaseState.GRANTED
        borrower.is_sent = False

    def _recall(self, lease: _GrantedLease, deadline: float) -> None:
        if self.states[lease.slab] == LeaseState.GRANTED:
            self._end_lease(lease)
        elif self.states[lease.slab] == LeaseState.HELD:
            self.states[lease.slab], lease.deadline = LeaseState.RECALLED, deadline
            self._borrowers[lease.borrower].is_sent = False

    def _expire(self, lease: _GrantedLease) -> None:
        if self.strict:
            self._end_lease(lease)
            return
        self.states[lease.slab] = LeaseState.QUARANTINED
        self.counters["quarantined"] += 1
        self._events.append(SlabQuarantined(lease.slab, lease.borrower))

    def _end_lease(self, lease: _GrantedLease) -> None:
        """No borrower can use the slab any more."""
        borrower = self._borrowers[lease.borrower]
        del self._leases[lease.slab], borrower.leases[lease.number]
        self.states[lease.slab] = LeaseState.GIVEN_BACK
        self._events.append(SlabGivenBack(lease.slab))
        borrower.is_sent = False

    def _make_heartbeat(self, incarnation: int, borrower: _Borrower, now: Seconds) -> LenderHeartbeat:
        self._sent_sequence += 1
        return LenderHeartbeat(
            sequence=self._sent_sequence,
            epoch=self.epoch,
            incarnation=incarnation,
            slab_socket=self._slab_socket,
            leases=tuple(
                Lease(
                    number=lease.number,
                    slab=lease.slab,
                    size_bytes=self.slab_bytes,
                    token=lease.token,
                    strict=self.strict,
                    due_in_s=None if lease.deadline is None else max(0.0, lease.deadline - now),
                )
                for lease in borrower.leases.values()
            ),
            num_allowed=borrower.num_allowed,
            slab_bytes=self.slab_bytes,
            strict=self.strict,
            num_lendable=len(self.states) if self.limits.num_lendable is None else self.limits.num_lendable,
            num_ranks=self.limits.num_ranks,
        )

    def check_invariants(self) -> None:
        of_borrowers = {lease.slab: lease for b in self._borrowers.values() for lease in b.leases.values()}
        assert of_borrowers == self._leases, (
            "a lease without a borrower, or a borrower with a lease that is not there"
        )
        numbers = [lease.number for lease in self._leases.values()]
        assert len(numbers) == len(set(numbers)) and all(number < self._next_number for number in numbers)
        for slab, state in enumerate(self.states):
            has_lease = state not in (LeaseState.FREE, LeaseState.GIVEN_BACK)
            assert slab not in self._offered or state == LeaseState.FREE, f"slab {slab} is offered, and {state.name}"
            assert has_lease == (slab in self._leases), f"slab {slab} is {state.name}"
            if has_lease:
                lease = self._leases[slab]
                assert lease.borrower in self._borrowers and lease.slab == slab
                assert self._borrowers[lease.borrower].leases[lease.number] is lease
                assert (lease.deadline is None) == (state in _USABLE)
                assert not (self.strict and state in (LeaseState.GRANTED, LeaseState.QUARANTINED))
