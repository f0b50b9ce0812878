"""`Lender`: which slabs of a worker are lent to whom, and when they may be used again.

A pure state machine: messages, deaths and the time are passed in; events for the engine and heartbeats come out.
Never touches memory, a socket or a clock.

              offer            reclaim, silence              deadline
    FREE ---------------> LENT -----------------> RECLAIMING ---------> QUARANTINED (alarm)
     ^                     |                          |                      |
     | scrubbed            |  the borrower says that it released, or is proven dead
     |                     v                          v                      v
     +----------------- SCRUBBING <------------------------------------------+

A mapping of GPU memory cannot be revoked from outside. So once its memory was fetched, a slab comes back by the
borrower's word or by its process's death, never by time: a borrower that is late or silent costs capacity, not
correctness. A lease whose memory nobody has (not fetched yet, or strict) ends by the lender's word alone: a strict
one at its deadline.
"""

from __future__ import annotations

import hmac
import math
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import IntEnum

from sglang.srt.peer.protocol.messages import (
    BorrowerHeartbeat,
    BorrowerId,
    Fetch,
    Lend,
    LenderHeartbeat,
    Register,
    Stage,
)

# More are strangers.
MAX_BORROWERS = 64


class SlabState(IntEnum):
    """FREE: the engine's own. SCRUBBING: to be overwritten by the engine before it is FREE."""

    FREE = 0
    LENT = 1
    RECLAIMING = 2
    QUARANTINED = 3
    SCRUBBING = 4


@dataclass(frozen=True)
class Offered:
    """Answer to `offer`. lent: slabs that are not the engine's any more. kept: those that still are."""

    lent: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True)
class ToScrub:
    """Nobody else uses the slab any more: overwrite it, then say `scrubbed`."""

    slab: int


@dataclass(frozen=True)
class Quarantined:
    """An alarm: the deadline has passed, the borrower lives and has not released. The capacity is lost until it does,
    or dies."""

    slab: int
    borrower: BorrowerId


@dataclass(frozen=True)
class Demand:
    """What the borrowers would like to have beyond what they have has changed."""

    unmet_bytes: int


LenderEvent = Offered | ToScrub | Quarantined | Demand


@dataclass(frozen=True)
class LenderTiming:
    """silence_s: a borrower that is not heard for so long gets nothing new, and is asked back with a deadline
    grace_s later."""

    heartbeat_s: float = 0.5
    silence_s: float = 5.0
    grace_s: float = 10.0


@dataclass(frozen=True)
class Grant:
    """Of a strict lease: its borrower, who knows the token, may have the slab copied to and from."""

    slab: int
    borrower: BorrowerId
    token: bytes


@dataclass
class _Lease:
    """deadline: once asked back. is_fetched: somebody may have mapped it."""

    number: int
    slab: int
    borrower: BorrowerId
    token: bytes
    strict: bool
    is_fetched: bool = False
    deadline: float | None = None


@dataclass
class _Borrower:
    """leases: by number. sequence: of the newest message. is_told: its view has not changed since `sent_at`."""

    register: Register
    heard_at: float
    sequence: int = -1
    sent_at: float = 0.0
    is_told: bool = False
    leases: dict[int, _Lease] = field(default_factory=dict)


class Lender:
    """Slabs 0..num_slabs-1, slab_bytes each, of one life of a worker; low ones are next to its own boundary.

    epoch: see `LeaseId`. make_token: secrets for leases. strict: nobody is given memory. slab_socket: path that
    borrowers are told. Times are seconds of one monotonic clock."""

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
        self.states = [SlabState.FREE] * num_slabs
        # "quarantined": alarms. "disputed": leases that a borrower says it uses and that had ended: a bug, or a
        # message that came later than silence_s.
        self.counters = Counter(quarantined=0, disputed=0)
        self._make_token = make_token
        self._slab_socket = slab_socket
        self._borrowers: dict[BorrowerId, _Borrower] = {}
        self._leases: dict[int, _Lease] = {}  # by slab
        self._dead: deque[BorrowerId] = deque(maxlen=MAX_BORROWERS)  # of whom late messages may still come
        self._next_number = 0
        self._next_sequence = 0
        self._unmet_bytes = 0
        self._ticked_at = math.inf
        self._events: list[LenderEvent] = []

    @property
    def borrowers(self) -> Collection[BorrowerId]:
        return self._borrowers.keys()

    # -- from the engine ----------------------------------------------------------------------------------------

    def offer(self, slabs: Collection[int], now: float) -> Offered:
        """The engine does not need these FREE slabs, and has overwritten them. Each, the highest first, goes to the
        borrower that has least of those that want more, by name where they are equal."""
        lent = []
        unmet = {me: self._unmet(me, now) for me in self._borrowers}
        for slab in sorted(slabs, reverse=True):
            assert self.states[slab] == SlabState.FREE, f"slab {slab} is {self.states[slab].name}"
            wanting = [me for me in unmet if unmet[me] > 0]
            if wanting:
                me = min(wanting, key=lambda me: (len(self._borrowers[me].leases), me))
                self._lend(slab, me)
                unmet[me] -= self.slab_bytes
                lent.append(slab)
        answer = Offered(tuple(lent), tuple(sorted(set(slabs) - set(lent))))
        self._events.append(answer)
        return answer

    def reclaim(self, num_slabs: int, deadline: float) -> list[int]:
        """Ask so many more LENT slabs back, the lowest first. Returns which, fewer if fewer are LENT."""
        lent = [slab for slab, state in enumerate(self.states) if state == SlabState.LENT][:num_slabs]
        for slab in lent:
            self._ask_back(self._leases[slab], deadline)
        return lent

    def scrubbed(self, slab: int) -> None:
        assert self.states[slab] == SlabState.SCRUBBING, f"slab {slab} is {self.states[slab].name}"
        self.states[slab] = SlabState.FREE

    def take_events(self) -> list[LenderEvent]:
        events, self._events = self._events, []
        return events

    # -- from outside -------------------------------------------------------------------------------------------

    def receive(self, message: BorrowerHeartbeat, now: float) -> bool:
        """Whether the message was news: not of a dead borrower, not older than another."""
        me = BorrowerId(message.register.name, message.register.incarnation)
        borrower = self._borrowers.get(me)
        if borrower is None:
            if me in self._dead or len(self._borrowers) >= MAX_BORROWERS:
                return False
            borrower = self._borrowers[me] = _Borrower(message.register, now)
        elif message.sequence <= borrower.sequence:
            return False
        borrower.sequence, borrower.heard_at, borrower.register = message.sequence, now, message.register
        if message.epoch == self.epoch:
            for number in message.released:
                if number in borrower.leases:
                    self._take_back(borrower.leases[number])
            self.counters["disputed"] += sum(number not in borrower.leases for number in message.mapped)
        return True

    def fetch(self, message: Fetch) -> int | None:
        """Somebody wants to map a slab. Returns which it is; from now on it may be mapped. None: they may not."""
        lease = self._claimed(message)
        if lease is None or lease.strict or self.states[lease.slab] != SlabState.LENT:
            return None
        lease.is_fetched = True
        return lease.slab

    def may_stage(self, message: Stage) -> bool:
        """Whether who says this has a strict lease."""
        lease = self._claimed(message)
        return lease is not None and lease.strict

    def grants(self) -> dict[int, Grant]:
        """By number of the lease: what is to be copied for whom, at present."""
        leases = self._leases.values()
        return {lease.number: Grant(lease.slab, lease.borrower, lease.token) for lease in leases if lease.strict}

    def died(self, me: BorrowerId) -> None:
        """The borrower's process is proven to have ended, and with it its mappings."""
        self._dead.append(me)
        if me in self._borrowers:
            for lease in list(self._borrowers[me].leases.values()):
                self._take_back(lease)
            del self._borrowers[me]

    def tick(self, now: float) -> None:
        """Time has passed. Messages that have already come are to be received first."""
        # While the lender itself stood still it could hear nobody.
        if now - self._ticked_at > self.timing.silence_s / 2:
            for borrower in self._borrowers.values():
                borrower.heard_at = min(now, borrower.heard_at + now - self._ticked_at)
        self._ticked_at = now
        for me, borrower in list(self._borrowers.items()):
            is_silent = self._is_silent(borrower, now)
            if is_silent or self._is_superseded(me):
                for lease in list(borrower.leases.values()):
                    self._ask_back(lease, now + self.timing.grace_s)
            if is_silent and not borrower.leases:
                del self._borrowers[me]
        for lease in list(self._leases.values()):
            is_awaited = self.states[lease.slab] == SlabState.RECLAIMING
            if is_awaited and lease.deadline is not None and now >= lease.deadline:
                self._expire(lease)
        unmet_bytes = sum(self._unmet(b, now) for b in self._borrowers)
        if unmet_bytes != self._unmet_bytes:
            self._unmet_bytes = unmet_bytes
            self._events.append(Demand(unmet_bytes))

    def outgoing(self, now: float) -> list[tuple[BorrowerId, LenderHeartbeat]]:
        """Views that have changed, and those that are to be repeated."""
        messages = []
        for me, borrower in self._borrowers.items():
            if not borrower.is_told or now - borrower.sent_at >= self.timing.heartbeat_s:
                borrower.is_told, borrower.sent_at = True, now
                messages.append((me, self._view(me.incarnation, borrower, now)))
        return messages

    # -- inside -------------------------------------------------------------------------------------------------

    def _claimed(self, message: Fetch | Stage) -> _Lease | None:
        """The lease that somebody says is theirs; None if it is not."""
        borrower = self._borrowers.get(BorrowerId(message.name, message.incarnation))
        lease = borrower.leases.get(message.number) if borrower is not None and message.epoch == self.epoch else None
        if lease is None or not hmac.compare_digest(lease.token, message.token):
            return None
        return lease

    def _is_silent(self, borrower: _Borrower, now: float) -> bool:
        return now - borrower.heard_at > self.timing.silence_s

    def _is_superseded(self, me: BorrowerId) -> bool:
        """Its name has begun another life: this one borrows no more."""
        return any(other.name == me.name and other.incarnation > me.incarnation for other in self._borrowers)

    def _unmet(self, me: BorrowerId, now: float) -> int:
        """Bytes that a borrower would like to have and may get: nothing if it cannot use slabs of this size, is
        silent or superseded, or has not released what it should have."""
        borrower = self._borrowers[me]
        missing = borrower.register.want_bytes - len(borrower.leases) * self.slab_bytes
        if missing <= 0 or borrower.register.page_bytes > self.slab_bytes:
            return 0
        if self._is_silent(borrower, now) or self._is_superseded(me):
            return 0
        in_default = any(self.states[lease.slab] == SlabState.QUARANTINED for lease in borrower.leases.values())
        return 0 if in_default else missing

    def _lend(self, slab: int, me: BorrowerId) -> None:
        borrower = self._borrowers[me]
        strict = self.strict or borrower.register.strict
        lease = _Lease(self._next_number, slab, me, self._make_token(), strict)
        self._next_number += 1
        self._leases[slab] = borrower.leases[lease.number] = lease
        self.states[slab] = SlabState.LENT
        borrower.is_told = False

    def _ask_back(self, lease: _Lease, deadline: float) -> None:
        if self.states[lease.slab] != SlabState.LENT:
            return
        if not lease.is_fetched and not lease.strict:
            self._take_back(lease)
            return
        self.states[lease.slab], lease.deadline = SlabState.RECLAIMING, deadline
        self._borrowers[lease.borrower].is_told = False

    def _expire(self, lease: _Lease) -> None:
        if lease.strict:
            self._take_back(lease)
            return
        self.states[lease.slab] = SlabState.QUARANTINED
        self.counters["quarantined"] += 1
        self._events.append(Quarantined(lease.slab, lease.borrower))

    def _take_back(self, lease: _Lease) -> None:
        """Nobody can use the slab any more."""
        borrower = self._borrowers[lease.borrower]
        del self._leases[lease.slab], borrower.leases[lease.number]
        self.states[lease.slab] = SlabState.SCRUBBING
        self._events.append(ToScrub(lease.slab))
        borrower.is_told = False

    def _view(self, incarnation: int, borrower: _Borrower, now: float) -> LenderHeartbeat:
        self._next_sequence += 1
        return LenderHeartbeat(
            sequence=self._next_sequence,
            epoch=self.epoch,
            incarnation=incarnation,
            slab_socket=self._slab_socket,
            lends=tuple(
                Lend(
                    number=lease.number,
                    slab=lease.slab,
                    size_bytes=self.slab_bytes,
                    token=lease.token,
                    strict=lease.strict,
                    reclaim_in_s=None if lease.deadline is None else max(0.0, lease.deadline - now),
                )
                for lease in borrower.leases.values()
            ),
        )

    def check_invariants(self) -> None:
        of_borrowers = {lease.slab: lease for b in self._borrowers.values() for lease in b.leases.values()}
        assert of_borrowers == self._leases, "a lease has no borrower, or a borrower a lease that is not"
        numbers = [lease.number for lease in self._leases.values()]
        assert len(numbers) == len(set(numbers)) and all(number < self._next_number for number in numbers)
        for slab, state in enumerate(self.states):
            has_lease = state in (SlabState.LENT, SlabState.RECLAIMING, SlabState.QUARANTINED)
            assert has_lease == (slab in self._leases), f"slab {slab} is {state.name}"
            if has_lease:
                lease = self._leases[slab]
                assert lease.borrower in self._borrowers and not (lease.strict and lease.is_fetched)
                assert self._borrowers[lease.borrower].leases[lease.number] is lease and lease.slab == slab
                assert (lease.deadline is None) == (state == SlabState.LENT)
                if state != SlabState.LENT:
                    assert lease.is_fetched or lease.strict, f"slab {slab} is waited for, and nobody has it"
                assert state != SlabState.QUARANTINED or lease.is_fetched
