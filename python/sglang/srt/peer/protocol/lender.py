"""`Lender`: which slabs of an engine are lent to whom, and when the engine may use them again.

A pure state machine: messages, deaths and the time are passed in; events for the engine and heartbeats come out.
Never touches memory, a socket or a clock.

            lend               allow_fetch           recall, silence               deadline
    FREE ----------> GRANTED -------------> HELD -------------------> RECALLED ---------------> QUARANTINED
     ^                  | recall,             |                           |                         | (an alarm)
     |                  | silence             |                           |                         |
     | reclaim          |     the borrower's heartbeat has it as given back, or the borrower is proven dead
     |                  v                     v                           v                         v
     +------------- GIVEN_BACK <--------------+---------------------------+-------------------------+

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

from sglang.srt.peer.protocol.leases import LeaseState
from sglang.srt.peer.protocol.messages import (
    BorrowerHeartbeat,
    BorrowerId,
    Fetch,
    Lease,
    LenderHeartbeat,
    Register,
    Stage,
)
from sglang.srt.utils.time_units import Seconds

# Heartbeats of more borrowers are ignored.
MAX_BORROWERS = 64
# Slabs that a borrower may use, and that are not recalled.
_USABLE = (LeaseState.GRANTED, LeaseState.HELD)


@dataclass(frozen=True)
class LendOutcome:
    """The answer to `lend`."""

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
    """How much borrowers would like to have, beyond what they have, has changed."""

    unmet_bytes: int


LenderEvent = LendOutcome | SlabGivenBack | SlabQuarantined | DemandChanged


@dataclass(frozen=True)
class LenderTiming:
    """All in seconds."""

    # A heartbeat is repeated after this time.
    heartbeat_s: float = 0.5
    # A borrower that sends nothing for this time is lent nothing more, and its slabs are recalled.
    silence_s: float = 5.0
    # The deadline of such a recall.
    grace_s: float = 10.0


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
    strict: bool
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


class Lender:
    """Slabs 0..num_slabs-1 of slab_bytes each, of one life of a lender. The lowest slabs are recalled first.

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
        self._unmet_bytes = 0
        self._ticked_at = math.inf
        self._events: list[LenderEvent] = []

    @property
    def borrowers(self) -> Collection[BorrowerId]:
        return self._borrowers.keys()

    # -- from the engine ----------------------------------------------------------------------------------------

    def lend(self, slabs: Collection[int], now: Seconds) -> LendOutcome:
        """The engine does not need these FREE slabs, and has overwritten them. Each, the highest first, goes to the
        borrower with the fewest leases among those with unmet demand, by name where they have as many. The result is
        an event too."""
        lent = []
        unmet = {borrower_id: self._unmet_demand(borrower_id, now) for borrower_id in self._borrowers}
        for slab in sorted(slabs, reverse=True):
            assert self.states[slab] == LeaseState.FREE, f"slab {slab} is {self.states[slab].name}"
            candidates = [borrower_id for borrower_id in unmet if unmet[borrower_id] > 0]
            if candidates:
                chosen = min(candidates, key=lambda each: (len(self._borrowers[each].leases), each))
                self._grant(slab, chosen)
                unmet[chosen] -= self.slab_bytes
                lent.append(slab)
        outcome = LendOutcome(tuple(lent), tuple(sorted(set(slabs) - set(lent))))
        self._events.append(outcome)
        return outcome

    def recall(self, num_slabs: int, deadline: float) -> list[int]:
        """Recall the lowest num_slabs slabs that are lent and not recalled yet. Returns which, fewer if there are
        fewer."""
        slabs = [slab for slab, state in enumerate(self.states) if state in _USABLE][:num_slabs]
        for slab in slabs:
            self._recall(self._leases[slab], deadline)
        return slabs

    def reclaim(self, slab: int) -> None:
        """The engine has overwritten a slab that was given back: the slab is the engine's own again."""
        assert self.states[slab] == LeaseState.GIVEN_BACK, f"slab {slab} is {self.states[slab].name}"
        self.states[slab] = LeaseState.FREE

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
        if lease is None or lease.strict or self.states[lease.slab] not in _USABLE:
            return None
        self.states[lease.slab] = LeaseState.HELD
        return lease.slab

    def may_stage(self, message: Stage) -> bool:
        """Whether the sender has the strict lease that the message names."""
        lease = self._claimed_lease(message)
        return lease is not None and lease.strict

    def copy_grants(self) -> dict[int, CopyGrant]:
        """By number of the lease: the slabs that may be copied from and to at present."""
        leases = self._leases.values()
        return {lease.number: CopyGrant(lease.slab, lease.borrower, lease.token) for lease in leases if lease.strict}

    def on_borrower_death(self, borrower_id: BorrowerId) -> None:
        """The borrower's process is proven to have ended, and with it its mappings."""
        self._dead.append(borrower_id)
        if borrower_id in self._borrowers:
            for lease in list(self._borrowers[borrower_id].leases.values()):
                self._end_lease(lease)
            del self._borrowers[borrower_id]

    def tick(self, now: Seconds) -> None:
        """Time has passed. Messages that have already come are to be received first."""
        # While the lender itself stood still it could hear no borrower.
        if now - self._ticked_at > self.timing.silence_s / 2:
            for borrower in self._borrowers.values():
                borrower.heard_at = min(now, borrower.heard_at + now - self._ticked_at)
        self._ticked_at = now
        for borrower_id, borrower in list(self._borrowers.items()):
            is_silent = self._is_silent(borrower, now)
            if is_silent or self._is_superseded(borrower_id):
                for lease in list(borrower.leases.values()):
                    self._recall(lease, now + self.timing.grace_s)
            if is_silent and not borrower.leases:
                del self._borrowers[borrower_id]
        for lease in list(self._leases.values()):
            is_recalled = self.states[lease.slab] == LeaseState.RECALLED
            if is_recalled and lease.deadline is not None and now >= lease.deadline:
                self._expire(lease)
        unmet_bytes = sum(self._unmet_demand(borrower_id, now) for borrower_id in self._borrowers)
        if unmet_bytes != self._unmet_bytes:
            self._unmet_bytes = unmet_bytes
            self._events.append(DemandChanged(unmet_bytes))

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

    def _unmet_demand(self, borrower_id: BorrowerId, now: Seconds) -> int:
        """Bytes that a borrower would like to have and may get. It may get nothing if it cannot use slabs of this
        size, is silent or superseded, or has not given back a slab by its deadline."""
        borrower = self._borrowers[borrower_id]
        unmet = borrower.register.demand_bytes - len(borrower.leases) * self.slab_bytes
        if unmet <= 0 or borrower.register.page_bytes > self.slab_bytes:
            return 0
        if self._is_silent(borrower, now) or self._is_superseded(borrower_id):
            return 0
        in_default = any(self.states[lease.slab] == LeaseState.QUARANTINED for lease in borrower.leases.values())
        return 0 if in_default else unmet

    def _grant(self, slab: int, borrower_id: BorrowerId) -> None:
        borrower = self._borrowers[borrower_id]
        strict = self.strict or borrower.register.strict
        lease = _GrantedLease(self._next_number, slab, borrower_id, self._make_token(), strict)
        self._next_number += 1
        self._leases[slab] = borrower.leases[lease.number] = lease
        self.states[slab] = LeaseState.HELD if strict else LeaseState.GRANTED
        borrower.is_sent = False

    def _recall(self, lease: _GrantedLease, deadline: float) -> None:
        if self.states[lease.slab] == LeaseState.GRANTED:
            self._end_lease(lease)
        elif self.states[lease.slab] == LeaseState.HELD:
            self.states[lease.slab], lease.deadline = LeaseState.RECALLED, deadline
            self._borrowers[lease.borrower].is_sent = False

    def _expire(self, lease: _GrantedLease) -> None:
        if lease.strict:
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
                    strict=lease.strict,
                    due_in_s=None if lease.deadline is None else max(0.0, lease.deadline - now),
                )
                for lease in borrower.leases.values()
            ),
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
            assert has_lease == (slab in self._leases), f"slab {slab} is {state.name}"
            if has_lease:
                lease = self._leases[slab]
                assert lease.borrower in self._borrowers and lease.slab == slab
                assert self._borrowers[lease.borrower].leases[lease.number] is lease
                assert (lease.deadline is None) == (state in _USABLE)
                assert not (lease.strict and state in (LeaseState.GRANTED, LeaseState.QUARANTINED))
