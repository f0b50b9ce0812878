"""`Borrower`: what one borrower has borrowed from one lender, and what it has to give back.

A pure state machine: messages, deaths and the time are passed in; events for the engine and heartbeats come out.
Never touches memory, a socket or a clock.

          the lender's view has a new lease       hold              the lender recalls it by name
    (none) ------------------------------> GRANTED ------> HELD ----------------------> RECALLED
                                              |             |                              |
                                     recalled |             | give_back                    | give_back
                                              v             v                              |
    (none) <---------------------------- GIVEN_BACK <--------------------------------------+
           the lease is not in the lender's view any more

A lender that wants slabs back gives the number that the borrower may keep. What the borrower has beyond it, less what
it has given back and the lender has not heard of yet, is `SlabsWanted`: the engine chooses which slabs those are. A
lost, doubled or late message thus never costs a slab more.

A silent lender's slabs stay usable: the lender cannot use the memory itself before it is given back. The lender's
death, or its next life (a higher epoch), ends every lease: the engine is told that the slab is lost, from any state
above.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang.srt.peer.protocol.leases import LeaseState
from sglang.srt.peer.protocol.messages import BorrowerHeartbeat, Lease, LeaseId, LenderHeartbeat, Register
from sglang.srt.utils.peer_timing import PeerTiming
from sglang.srt.utils.time_units import Seconds


@dataclass(frozen=True)
class SlabLent:
    """The engine may use a slab."""

    # The endpoint of the lender.
    lender: str
    lease: LeaseId
    slab: int
    size_bytes: int
    # The slab's memory, which the engine maps and closes. None in strict mode.
    fd: int | None
    # In strict mode: copies are asked for at slab_socket, with the token.
    token: bytes = b""
    slab_socket: str = ""


@dataclass(frozen=True)
class SlabRecalled:
    """The engine has to move or drop what is in the slab, unmap it, and call `give_back`."""

    lender: str
    lease: LeaseId
    # In seconds of the clock that `receive` is told.
    deadline: float


@dataclass(frozen=True)
class SlabsWanted:
    """How many HELD slabs of a lender the engine has to give back, of its choice, has changed, or some were given
    back."""

    lender: str
    num_slabs: int
    # How often `give_back` was called before this was counted. What the engine has given back since comes off.
    num_given_back: int = field(default=0, compare=False)


@dataclass(frozen=True)
class LenderOffer:
    """What a lender has told of itself."""

    # Of each of its slabs.
    slab_bytes: int
    # It copies for its borrowers, which get no memory.
    strict: bool
    # How many slabs it may ever lend.
    num_lendable: int
    # Ranks of its engine; 0: not told.
    num_ranks: int = 0


@dataclass(frozen=True)
class SlabLost:
    """What is in the slab is gone now. The engine has to drop its pages and unmap it."""

    lender: str
    lease: LeaseId


@dataclass(frozen=True)
class LenderSilent:
    """The lender's heartbeats have stopped. What is mapped stays usable; copies may not be answered."""

    lender: str


BorrowerEvent = SlabLent | SlabRecalled | SlabsWanted | SlabLost | LenderSilent


@dataclass
class _BorrowedLease:
    terms: Lease
    state: LeaseState


@dataclass(frozen=True)
class BorrowerConfig:
    """What a lender is told of a borrower; see `Register`."""

    name: str
    incarnation: int
    page_bytes: int
    num_ranks: int = 0
    # A heartbeat is repeated after so many seconds.
    heartbeat_s: float = PeerTiming.heartbeat


class Borrower:
    """One life of a borrower, towards one lender. lender: the name of the lender in events. Times are seconds of one
    monotonic clock."""

    def __init__(self, lender: str, config: BorrowerConfig) -> None:
        self.lender = lender
        self.config = config
        self.epoch = 0
        # None before its first message.
        self.offer: LenderOffer | None = None
        self._demand_bytes = self._value_us = 0
        # Of the newest message, see `LenderHeartbeat`.
        self._num_allowed: int | None = None
        # Of the last `SlabsWanted`.
        self._num_wanted = 0
        # Calls of `give_back`.
        self._num_given_back = 0
        # Of this epoch, by number.
        self._leases: dict[int, _BorrowedLease] = {}
        # Messages of earlier epochs are ignored.
        self._oldest_epoch = 1
        self._received_sequence = -1
        self._sent_sequence = 0
        self._sent_at = 0.0
        # Whether the newest heartbeat holds today's view.
        self._is_sent = False
        self._slab_socket = ""
        self._events: list[BorrowerEvent] = []

    # -- from the engine ----------------------------------------------------------------------------------------

    def set_demand(self, size_bytes: int, value_us: int = 0) -> None:
        """How much the engine would like to borrow from this lender in all, and what a slab is worth to it, see
        `Register`. A demand below what it has gives nothing back."""
        self._is_sent &= (size_bytes, value_us) == (self._demand_bytes, self._value_us)
        self._demand_bytes, self._value_us = size_bytes, value_us

    def give_back(self, lease: LeaseId) -> None:
        """The engine will not touch the slab again, whether it was recalled or not. A lease that is lost stays
        lost."""
        self._num_given_back += 1
        if lease.epoch == self.epoch and self.state(lease.number) in (LeaseState.HELD, LeaseState.RECALLED):
            self._leases[lease.number].state = LeaseState.GIVEN_BACK
            self._is_sent = False
        self._count_wanted(is_given_back=True)

    def take_events(self) -> list[BorrowerEvent]:
        events, self._events = self._events, []
        return events

    # -- from outside -------------------------------------------------------------------------------------------

    def receive(self, message: LenderHeartbeat, now: Seconds) -> bool:
        """Whether the message is used. It is ignored if it is for another life of the borrower, of an earlier life of
        the lender, or older than a message that came before."""
        if message.incarnation != self.config.incarnation or message.epoch < self._oldest_epoch:
            return False
        if message.epoch > self.epoch:
            self._begin_epoch(message.epoch)
        if message.sequence <= self._received_sequence:
            return False
        self._received_sequence = message.sequence
        self._slab_socket = message.slab_socket
        for number in self._leases.keys() - {terms.number for terms in message.leases}:
            self._forget(number)
        for terms in message.leases:
            lease = self._leases.setdefault(terms.number, _BorrowedLease(terms, LeaseState.GRANTED))
            if terms.strict:
                self.hold(LeaseId(self.epoch, terms.number), None)
            if terms.due_in_s is not None:
                self._recall(lease, now + terms.due_in_s)
        self.offer = LenderOffer(message.slab_bytes, message.strict, message.num_lendable, message.num_ranks)
        self._num_allowed = message.num_allowed
        self._count_wanted()
        return True

    def leases_to_fetch(self) -> list[Lease]:
        """The leases whose memory the borrower has to ask for."""
        return [lease.terms for lease in self._leases.values() if lease.state == LeaseState.GRANTED]

    def hold(self, lease: LeaseId, fd: int | None) -> bool:
        """The memory of a lease has come. False: it comes too late; the caller closes it and never maps it."""
        if lease.epoch != self.epoch or self.state(lease.number) != LeaseState.GRANTED:
            return False
        found = self._leases[lease.number]
        found.state = LeaseState.HELD
        terms = found.terms
        access = (terms.token, self._slab_socket) if terms.strict else ()
        self._events.append(SlabLent(self.lender, lease, terms.slab, terms.size_bytes, fd, *access))
        self._count_wanted()
        return True

    def on_lender_death(self, epoch: int) -> None:
        """The process of the lender's life `epoch` is proven to have ended."""
        self._oldest_epoch = max(self._oldest_epoch, epoch + 1)
        if epoch == self.epoch:
            self._forget_all()

    def take_outgoing(self, now: Seconds) -> BorrowerHeartbeat | None:
        """The view, if it has changed or is to be repeated."""
        if self._is_sent and now - self._sent_at < self.config.heartbeat_s:
            return None
        self._is_sent, self._sent_at = True, now
        self._sent_sequence += 1
        held = self._numbers_in(LeaseState.HELD, LeaseState.RECALLED)
        return BorrowerHeartbeat(
            sequence=self._sent_sequence,
            register=Register(
                name=self.config.name,
                incarnation=self.config.incarnation,
                page_bytes=self.config.page_bytes,
                demand_bytes=self._demand_bytes,
                slab_value_us=self._value_us,
                num_ranks=self.config.num_ranks,
            ),
            epoch=self.epoch,
            mapped=tuple(number for number in held if not self._leases[number].terms.strict),
            given_back=tuple(self._numbers_in(LeaseState.GIVEN_BACK)),
        )

    def state(self, number: int) -> LeaseState | None:
        """Of a lease of this epoch; None: there is no such lease."""
        lease = self._leases.get(number)
        return None if lease is None else lease.state

    def states(self) -> list[LeaseState]:
        return [lease.state for lease in self._leases.values()]

    # -- inside -------------------------------------------------------------------------------------------------

    def _numbers_in(self, *states: LeaseState) -> list[int]:
        return [number for number, lease in self._leases.items() if lease.state in states]

    def _begin_epoch(self, epoch: int) -> None:
        self._forget_all()
        self.epoch = self._oldest_epoch = epoch
        self.offer = None
        self._received_sequence = -1
        self._is_sent = False

    def _forget_all(self) -> None:
        for number in list(self._leases):
            self._forget(number)
        self._num_allowed = None
        self._count_wanted()

    def _count_wanted(self, is_given_back: bool = False) -> None:
        """After every change of what the borrower has, or may keep. Leases whose memory has not come go first."""
        num_wanted = 0
        if self._num_allowed is not None:
            granted, held = self._numbers_in(LeaseState.GRANTED), self._numbers_in(LeaseState.HELD)
            num_excess = max(0, len(granted) + len(held) - self._num_allowed)
            for number in granted[:num_excess]:
                self._leases[number].state = LeaseState.GIVEN_BACK
                self._is_sent = False
            num_wanted = max(0, num_excess - len(granted))
        if num_wanted != self._num_wanted or (is_given_back and num_wanted):
            self._num_wanted = num_wanted
            self._events.append(SlabsWanted(self.lender, num_wanted, self._num_given_back))

    def _forget(self, number: int) -> None:
        """The lease has ended. A slab that the engine has is lost."""
        if self._leases.pop(number).state in (LeaseState.HELD, LeaseState.RECALLED):
            self._events.append(SlabLost(self.lender, LeaseId(self.epoch, number)))

    def _recall(self, lease: _BorrowedLease, deadline: float) -> None:
        if lease.state == LeaseState.GRANTED:
            lease.state = LeaseState.GIVEN_BACK
            self._is_sent = False
        elif lease.state == LeaseState.HELD:
            lease.state = LeaseState.RECALLED
            self._events.append(SlabRecalled(self.lender, LeaseId(self.epoch, lease.terms.number), deadline))

    def check_invariants(self) -> None:
        assert self.epoch == 0 or self._oldest_epoch in (self.epoch, self.epoch + 1)
        assert not self._leases or self._oldest_epoch == self.epoch, "leases of a lender that is dead"
        assert self._num_wanted <= len(self._numbers_in(LeaseState.HELD)), "more is to be given back than is held"
        for number, lease in self._leases.items():
            assert lease.terms.number == number
            assert lease.state not in (LeaseState.FREE, LeaseState.QUARANTINED), f"lease {number} is {lease.state}"
            assert not (lease.terms.strict and lease.state == LeaseState.GRANTED)
