"""`Borrower`: what a master has been lent by one worker, and what it has to give back.

A pure state machine: messages, deaths and the time are passed in; events for the engine and heartbeats come out.
Never touches memory, a socket or a clock.

          the lender's view has a new lease       fetched               asked back
    (none) ------------------------------> OFFERED ------> HELD ---------------------> DRAINING
                                              |             |                             |
                                   asked back |             | unmapped                    | unmapped
                                              v             v                             |
    (none) <----------------------------- RELEASED <--------------------------------------+
              the lender's view has it not

A silent lender keeps what it has lent usable: without the release it cannot use the memory itself. Its death, or its
next life (a higher epoch), ends every lease: the engine is told that it is lost, from any state above.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang.srt.peer.protocol.messages import BorrowerHeartbeat, LeaseId, Lend, LenderHeartbeat, Register


class LeaseState(Enum):
    """OFFERED: to be fetched. RELEASED: never touched again, until the lender knows."""

    OFFERED = 0
    HELD = 1
    DRAINING = 2
    RELEASED = 3


@dataclass(frozen=True)
class Lent:
    """A slab may be used. fd: its memory, which is the engine's to map and to close; None in strict mode: then copies
    are asked for at slab_socket, with the token."""

    lender: str
    lease: LeaseId
    slab: int
    size_bytes: int
    fd: int | None
    token: bytes = b""
    slab_socket: str = ""


@dataclass(frozen=True)
class AskedBack:
    """Move or drop what is in the slab, unmap it, then say `unmapped`, before the deadline."""

    lender: str
    lease: LeaseId
    deadline: float


@dataclass(frozen=True)
class Lost:
    """What is in the slab is gone, now: drop its pages, unmap it."""

    lender: str
    lease: LeaseId


BorrowerEvent = Lent | AskedBack | Lost


@dataclass
class _Lease:
    lend: Lend
    state: LeaseState = LeaseState.OFFERED


class Borrower:
    """One life of a master, and one worker.

    lender: what events call it. name, incarnation: see `BorrowerId`. page_bytes, strict: see `Register`. Times are
    seconds of one monotonic clock."""

    def __init__(
        self,
        lender: str,
        name: str,
        incarnation: int,
        page_bytes: int,
        strict: bool = False,
        heartbeat_s: float = 0.5,
    ) -> None:
        self.lender = lender
        self.name = name
        self.incarnation = incarnation
        self.epoch = 0
        self._page_bytes = page_bytes
        self._strict = strict
        self._heartbeat_s = heartbeat_s
        self._want_bytes = 0
        self._leases: dict[int, _Lease] = {}  # of this epoch, by number
        self._oldest_epoch = 1  # earlier ones are not believed
        self._heard_sequence = -1
        self._next_sequence = 0
        self._sent_at = 0.0
        self._is_told = False
        self._slab_socket = ""
        self._events: list[BorrowerEvent] = []

    # -- from the engine ----------------------------------------------------------------------------------------

    def want(self, size_bytes: int) -> None:
        """How much it would like to have from this lender, all in all. Less than it has gives nothing back."""
        self._want_bytes = size_bytes
        self._is_told = False

    def unmapped(self, lease: LeaseId) -> None:
        """The engine will not touch the slab again, asked or not. Nothing happens if the lease is lost."""
        if lease.epoch == self.epoch and self.state(lease.number) in (LeaseState.HELD, LeaseState.DRAINING):
            self._leases[lease.number].state = LeaseState.RELEASED
            self._is_told = False

    def take_events(self) -> list[BorrowerEvent]:
        events, self._events = self._events, []
        return events

    # -- from outside -------------------------------------------------------------------------------------------

    def receive(self, message: LenderHeartbeat, now: float) -> bool:
        """Whether the message was news: for this life, not of an earlier life of the lender, not older than
        another."""
        if message.incarnation != self.incarnation or message.epoch < self._oldest_epoch:
            return False
        if message.epoch > self.epoch:
            self._begin_epoch(message.epoch)
        if message.sequence <= self._heard_sequence:
            return False
        self._heard_sequence = message.sequence
        self._slab_socket = message.slab_socket
        for number in self._leases.keys() - {lend.number for lend in message.lends}:
            self._forget(number)
        for lend in message.lends:
            lease = self._leases.setdefault(lend.number, _Lease(lend))
            if lend.strict and lease.state == LeaseState.OFFERED:
                self.fetched(LeaseId(self.epoch, lend.number), None)
            if lend.reclaim_in_s is not None:
                self._asked_back(lease, now + lend.reclaim_in_s)
        return True

    def to_fetch(self) -> list[Lend]:
        """Leases whose memory is to be asked for."""
        return [lease.lend for lease in self._leases.values() if lease.state == LeaseState.OFFERED]

    def fetched(self, lease: LeaseId, fd: int | None) -> bool:
        """The memory has come. False: it comes too late; close it, and never map it."""
        if lease.epoch != self.epoch or self.state(lease.number) != LeaseState.OFFERED:
            return False
        found = self._leases[lease.number]
        found.state = LeaseState.HELD
        lend = found.lend
        access = (lend.token, self._slab_socket) if lend.strict else ()
        self._events.append(Lent(self.lender, lease, lend.slab, lend.size_bytes, fd, *access))
        return True

    def lender_died(self, epoch: int) -> None:
        """The process of the lender's life `epoch` is proven to have ended."""
        self._oldest_epoch = max(self._oldest_epoch, epoch + 1)
        if epoch == self.epoch:
            self._lose_all()

    def outgoing(self, now: float) -> BorrowerHeartbeat | None:
        """The view, if it has changed or is to be repeated."""
        if self._is_told and now - self._sent_at < self._heartbeat_s:
            return None
        self._is_told, self._sent_at = True, now
        self._next_sequence += 1
        return BorrowerHeartbeat(
            sequence=self._next_sequence,
            register=Register(
                name=self.name,
                incarnation=self.incarnation,
                page_bytes=self._page_bytes,
                want_bytes=self._want_bytes,
                strict=self._strict,
            ),
            epoch=self.epoch,
            mapped=tuple(
                n for n in self._in(LeaseState.HELD, LeaseState.DRAINING) if not self._leases[n].lend.strict
            ),
            released=tuple(self._in(LeaseState.RELEASED)),
        )

    def state(self, number: int) -> LeaseState | None:
        """Of a lease of this epoch; None: there is none."""
        lease = self._leases.get(number)
        return None if lease is None else lease.state

    def states(self) -> list[LeaseState]:
        return [lease.state for lease in self._leases.values()]

    # -- inside -------------------------------------------------------------------------------------------------

    def _in(self, *states: LeaseState) -> list[int]:
        return [number for number, lease in self._leases.items() if lease.state in states]

    def _begin_epoch(self, epoch: int) -> None:
        self._lose_all()
        self.epoch = self._oldest_epoch = epoch
        self._heard_sequence = -1
        self._is_told = False

    def _lose_all(self) -> None:
        for number in list(self._leases):
            self._forget(number)

    def _forget(self, number: int) -> None:
        if self._leases.pop(number).state in (LeaseState.HELD, LeaseState.DRAINING):
            self._events.append(Lost(self.lender, LeaseId(self.epoch, number)))

    def _asked_back(self, lease: _Lease, deadline: float) -> None:
        if lease.state == LeaseState.OFFERED:
            lease.state = LeaseState.RELEASED
            self._is_told = False
        elif lease.state == LeaseState.HELD:
            lease.state = LeaseState.DRAINING
            self._events.append(AskedBack(self.lender, LeaseId(self.epoch, lease.lend.number), deadline))

    def check_invariants(self) -> None:
        assert self.epoch == 0 or self._oldest_epoch in (self.epoch, self.epoch + 1)
        assert not self._leases or self._oldest_epoch == self.epoch, "leases of a lender that is dead"
        for number, lease in self._leases.items():
            assert lease.lend.number == number
            assert not (lease.lend.strict and lease.state == LeaseState.OFFERED)
