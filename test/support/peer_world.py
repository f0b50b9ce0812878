"""Lenders and borrowers as whole processes on a virtual clock and a bad network, with the real `Lender` and
`Borrower` in them. Knows what they cannot know: which process has mapped which slab, and what lies in it.

A process lives, stands still (SIGSTOP: messages to it wait) or is dead. A name's next life may begin while the former
one still lives. Heartbeats are lost, doubled, late and out of order, and may reach another life than the one they
were for. A request for memory ends with its connection, but may be late before.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.peer.protocol.borrower import Borrower, BorrowerConfig, SlabLent, SlabLost, SlabRecalled, SlabsWanted
from sglang.srt.peer.protocol.leases import LeaseState
from sglang.srt.peer.protocol.lender import Lender, LenderTiming, LendOutcome, SlabGivenBack, SlabQuarantined
from sglang.srt.peer.protocol.messages import BorrowerHeartbeat, BorrowerId, Fetch, LeaseId, LenderHeartbeat

SLAB_BYTES = 100
NUM_SLABS = 6
TIMING = LenderTiming(heartbeat_s=0.5, silence_s=5.0, grace_s=5.0, offer_s=1.0)


@dataclass
class Process:
    name: str
    life: int
    is_stopped: bool = False
    inbox: list[Any] = field(default_factory=list)


@dataclass(kw_only=True)
class LenderSide(Process):
    lender: Lender
    # Slabs that borrowers may have written to since they were last overwritten.
    foreign: set[int] = field(default_factory=set)
    # Slabs that were given back, and are not overwritten yet.
    to_scrub: set[int] = field(default_factory=set)
    # Slabs that were lent, and neither taken by a borrower nor kept since.
    offered: set[int] = field(default_factory=set)
    # Slabs with an alarm.
    alarms: set[int] = field(default_factory=set)


@dataclass(kw_only=True)
class BorrowerSide(Process):
    """Keys are (lender, lease)."""

    # By lender.
    borrowers: dict[str, Borrower]
    # Key -> slab.
    mapped: dict[tuple[str, LeaseId], int] = field(default_factory=dict)
    # Slabs that were recalled.
    draining: set[tuple[str, LeaseId]] = field(default_factory=set)
    # By lender: how many slabs of its choice it is to give back.
    wanted: dict[str, int] = field(default_factory=dict)
    # Slabs that were lost, and are still mapped.
    unmapping: set[tuple[str, LeaseId]] = field(default_factory=set)

    @property
    def id(self) -> BorrowerId:
        return BorrowerId(self.name, self.life)


@dataclass(frozen=True)
class SlabReply:
    lender: str
    lease: LeaseId


@dataclass(frozen=True)
class Death:
    """What a pidfd tells."""

    name: str
    life: int


class World:
    def __init__(self, seed: int, lender_class: type[Lender] = Lender, borrower_class: type[Borrower] = Borrower):
        self.rng = random.Random(seed)
        self.lender_class, self.borrower_class = lender_class, borrower_class
        self.now = 0.0
        self.is_faulty = True
        self._order = itertools.count()
        self._lives = itertools.count(1)
        self._tokens = itertools.count()
        self._in_flight: list[tuple[float, int, str, int | None, Any]] = []
        # What has happened at least once.
        self.seen: set[str] = set()
        self.lender_sides: dict[str, LenderSide] = {}
        self.borrower_sides: list[BorrowerSide] = []
        for name in ("w0", "w1"):
            self.start_lender_side(name)
        for name in ("m0", "m1"):
            self.start_borrower_side(name)

    # -- lives --------------------------------------------------------------------------------------------------

    def start_lender_side(self, name: str) -> None:
        life, strict = next(self._lives), self.rng.random() < 0.2
        lender = self.lender_class(life, NUM_SLABS, SLAB_BYTES, self._token, strict, TIMING, slab_socket=name)
        self.lender_sides[name] = LenderSide(name, life, lender=lender)

    def start_borrower_side(self, name: str) -> None:
        life = next(self._lives)
        borrowers = {w: self.borrower_class(w, BorrowerConfig(name, life, SLAB_BYTES)) for w in ("w0", "w1")}
        self.borrower_sides.append(BorrowerSide(name, life, borrowers=borrowers))
        for borrower in borrowers.values():
            borrower.set_demand(self.rng.randrange(7 * SLAB_BYTES), self.rng.randrange(3))

    def kill_lender_side(self, name: str) -> None:
        dead = self.lender_sides[name]
        for borrower_side in self.borrower_sides:
            if any(lender_side == name and lease.epoch == dead.life for lender_side, lease in borrower_side.mapped):
                self._post(self.rng.random() * 3, borrower_side.name, borrower_side.life, Death(name, dead.life))
        self.start_lender_side(name)
        self.seen.add("lender died")

    def kill_borrower_side(self, borrower_side: BorrowerSide) -> None:
        self.borrower_sides.remove(borrower_side)
        for lender_side in self.lender_sides.values():
            lender = lender_side.lender
            leases = () if lender.strict else lender._leases.values()
            fetched = [each for each in leases if lender.states[each.slab] != LeaseState.GRANTED]
            if any(lease.borrower == borrower_side.id for lease in fetched):
                self._tell_death(lender_side, borrower_side.id)
        self.seen.add("borrower died")

    def _tell_death(self, lender_side: LenderSide, dead: BorrowerId) -> None:
        """A lender has a pidfd of every borrower that has fetched something, and of no other."""
        self._post(self.rng.random() * 3, lender_side.name, lender_side.life, Death(dead.name, dead.incarnation))

    def _token(self) -> bytes:
        return b"%d" % next(self._tokens)

    # -- network ------------------------------------------------------------------------------------------------

    def _post(self, delay_s: float, to: str, life: int | None, message: Any) -> None:
        """life: of the receiver, the only one that may receive it; None: any life may."""
        heapq.heappush(self._in_flight, (self.now + delay_s, next(self._order), to, life, message))

    def send(self, to: str, life: int | None, message: Any) -> None:
        if not self.is_faulty:
            self._post(0.01, to, life, message)
            return
        if self.rng.random() < 0.1:
            self.seen.add("lost")
            return
        for _ in range(2 if self.rng.random() < 0.1 else 1):
            late = self.rng.random() < 0.1
            self._post(self.rng.random() * (20 if late else 0.5), to, life, message)

    def deliver(self) -> None:
        while self._in_flight and self._in_flight[0][0] <= self.now:
            _, _, to, life, message = heapq.heappop(self._in_flight)
            lives: list[Process] = [m for m in self.borrower_sides if m.name == to]
            if to in self.lender_sides:
                lives = [self.lender_sides[to]]
            lives = [p for p in lives if life is None or p.life == life]
            if lives:
                self.rng.choice(lives).inbox.append(message)

    # -- what a process does ------------------------------------------------------------------------------------

    def run_lender_side(self, lender_side: LenderSide) -> None:
        lender = lender_side.lender
        inbox, lender_side.inbox = lender_side.inbox, []
        for message in inbox:
            if isinstance(message, BorrowerHeartbeat):
                lender.receive(message, self.now)
            elif isinstance(message, Death):
                lender.on_borrower_death(BorrowerId(message.name, message.life))
            else:
                self._answer(lender_side, message)
        lender.tick(self.now)
        self.take_lender_events(lender_side)
        for borrower, heartbeat in lender.take_outgoing(self.now):
            self.send(borrower.name, None if self.is_faulty else borrower.incarnation, heartbeat)

    def _answer(self, lender_side: LenderSide, message: Fetch) -> None:
        slab = lender_side.lender.allow_fetch(message)
        if slab is not None:
            lender_side.foreign.add(slab)
            reply = SlabReply(lender_side.name, LeaseId(message.epoch, message.number))
            self.send(message.name, message.incarnation, reply)
            if not any(m.id == (message.name, message.incarnation) for m in self.borrower_sides):
                self._tell_death(lender_side, BorrowerId(message.name, message.incarnation))
                self.seen.add("fetched after death")
        else:
            self.seen.add("refused")

    def take_lender_events(self, lender_side: LenderSide) -> None:
        for event in lender_side.lender.take_events():
            if isinstance(event, SlabGivenBack):
                assert event.slab not in lender_side.to_scrub
                lender_side.to_scrub.add(event.slab)
                if event.slab in lender_side.alarms:
                    lender_side.alarms.remove(event.slab)
                    self.seen.add("quarantine ended")
            elif isinstance(event, SlabQuarantined):
                lender_side.alarms.add(event.slab)
                self.seen.add("quarantined")
            elif isinstance(event, LendOutcome):
                lender_side.offered.difference_update(event.lent, event.kept)
                self.seen |= {name for name, slabs in (("lent", event.lent), ("kept", event.kept)) if slabs}

    def run_borrower_side(self, borrower_side: BorrowerSide) -> None:
        inbox, borrower_side.inbox = borrower_side.inbox, []
        for message in inbox:
            if isinstance(message, LenderHeartbeat):
                # Sockets belong to one lender each; here it is told apart by its slab socket.
                if not borrower_side.borrowers[message.slab_socket].receive(message, self.now):
                    self.seen.add("stale")
            elif isinstance(message, Death):
                borrower_side.borrowers[message.name].on_lender_death(message.life)
            else:
                # Any number stands for a file descriptor.
                if not borrower_side.borrowers[message.lender].hold(message.lease, 7):
                    self.seen.add("slab came too late")
        for name, borrower in borrower_side.borrowers.items():
            for lend in borrower.leases_to_fetch():
                if not self.is_faulty or self.rng.random() < 0.3:
                    fetch = Fetch(
                        name=borrower_side.name,
                        incarnation=borrower_side.life,
                        epoch=borrower.epoch,
                        number=lend.number,
                        token=lend.token,
                    )
                    self.send(name, borrower.epoch, fetch)
            self._take_borrower_events(borrower_side, borrower)
            heartbeat = borrower.take_outgoing(self.now)
            if heartbeat is not None:
                self.send(name, None, heartbeat)

    def _take_borrower_events(self, borrower_side: BorrowerSide, borrower: Borrower) -> None:
        for event in borrower.take_events():
            if isinstance(event, SlabsWanted):
                borrower_side.wanted[event.lender] = event.num_slabs
                continue
            key = (event.lender, event.lease)
            if isinstance(event, SlabLent):
                if event.fd is not None:
                    borrower_side.mapped[key] = event.slab
                self.seen.add("held" if event.fd is not None else "held strictly")
            elif isinstance(event, SlabRecalled):
                borrower_side.draining.add(key)
                self.seen.add("recalled by name")
            elif isinstance(event, SlabLost):
                is_alive = self.lender_sides[event.lender].life == event.lease.epoch
                assert not is_alive or key not in borrower_side.mapped, f"{event}, but its lender lives and has not"
                borrower_side.draining.discard(key)
                if key in borrower_side.mapped:
                    borrower_side.unmapping.add(key)

    def unmap(self, borrower_side: BorrowerSide, key: tuple[str, LeaseId]) -> None:
        borrower_side.mapped.pop(key, None)
        borrower_side.draining.discard(key)
        borrower_side.unmapping.discard(key)
        borrower_side.borrowers[key[0]].give_back(key[1])

    def scrub(self, lender_side: LenderSide, slab: int) -> None:
        lender_side.foreign.discard(slab)
        lender_side.to_scrub.remove(slab)
        lender_side.lender.reclaim(slab)

    # -- steps --------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        self.now += seconds
        self.deliver()
        for process in [*self.lender_sides.values(), *self.borrower_sides]:
            if not process.is_stopped:
                self.run_lender_side(process) if isinstance(process, LenderSide) else self.run_borrower_side(process)
        self.check_invariants()

    def step(self) -> None:
        """Anything may happen."""
        rng = self.rng
        lender_side = rng.choice(list(self.lender_sides.values()))
        borrower_side = rng.choice(self.borrower_sides)
        dice = rng.random()
        if dice < 0.01:
            process = rng.choice([lender_side, borrower_side])
            process.is_stopped = not process.is_stopped
        elif dice < 0.013:
            self.kill_lender_side(lender_side.name)
        elif dice < 0.02:
            self.kill_borrower_side(borrower_side)
        elif not lender_side.is_stopped and dice < 0.3:
            rng.choice([self.lend_all, self._recall, self._scrub_one])(lender_side)
        elif not borrower_side.is_stopped and dice < 0.5:
            self._unmap_one(borrower_side)
        elif dice < 0.53:
            rng.choice(list(borrower_side.borrowers.values())).set_demand(
                rng.randrange(7 * SLAB_BYTES), rng.randrange(3)
            )
        for name in ("m0", "m1"):
            lives = [m for m in self.borrower_sides if m.name == name]
            if not lives or (len(lives) == 1 and lives[0].is_stopped and rng.random() < 0.02):
                self.start_borrower_side(name)
        self.run(rng.random() * (3 if rng.random() < 0.02 else 0.3))

    def lend_all(self, lender_side: LenderSide) -> None:
        free = {s for s in range(NUM_SLABS) if lender_side.lender.states[s] == LeaseState.FREE} - lender_side.offered
        lender_side.offered |= free
        lender_side.lender.lend(sorted(free), self.now)

    def _recall(self, lender_side: LenderSide) -> None:
        lender_side.lender.recall(self.rng.randrange(4), self.now + self.rng.random() * 8)

    def _scrub_one(self, lender_side: LenderSide) -> None:
        if lender_side.to_scrub:
            self.scrub(lender_side, self.rng.choice(sorted(lender_side.to_scrub)))

    def _unmap_one(self, borrower_side: BorrowerSide) -> None:
        self._choose_wanted(borrower_side)
        voluntary = list(borrower_side.mapped) if self.rng.random() < 0.1 else []
        keys = sorted({*borrower_side.draining, *borrower_side.unmapping, *voluntary})
        if keys:
            self.unmap(borrower_side, self.rng.choice(keys))

    def _choose_wanted(self, borrower_side: BorrowerSide) -> None:
        """Those of lenders that want some back: any, as many as they want."""
        for name, num_wanted in borrower_side.wanted.items():
            epoch, draining = borrower_side.borrowers[name].epoch, borrower_side.draining
            held = [key for key in self._held(borrower_side, name) if key not in draining]
            # Those that were recalled by name count on their own.
            chosen = len(self._held(borrower_side, name)) - len(held)
            for key in self.rng.sample(sorted(held), min(len(held), max(0, num_wanted - chosen))):
                assert key[1].epoch == epoch
                draining.add(key)
                self.seen.add("chosen")

    @staticmethod
    def _held(borrower_side: BorrowerSide, name: str) -> list[tuple[str, LeaseId]]:
        borrower = borrower_side.borrowers[name]
        numbers = [number for number in borrower._leases if borrower.state(number) == LeaseState.HELD]
        return [(name, LeaseId(borrower.epoch, number)) for number in numbers]

    def settle(self, seconds: float) -> None:
        """The network behaves, and processes that are not stopped do at once what they should."""
        self.is_faulty = False
        for _ in range(round(seconds / 0.25)):
            self.run(0.25)
            for lender_side in self.lender_sides.values():
                if not lender_side.is_stopped:
                    for slab in sorted(lender_side.to_scrub):
                        self.scrub(lender_side, slab)
            for borrower_side in self.borrower_sides:
                if not borrower_side.is_stopped:
                    self._choose_wanted(borrower_side)
                    for key in sorted({*borrower_side.draining, *borrower_side.unmapping}):
                        self.unmap(borrower_side, key)

    # -- what must always hold ----------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        for lender_side in self.lender_sides.values():
            lender_side.lender.check_invariants()
            self.take_lender_events(lender_side)
            states = lender_side.lender.states
            assert {s for s in range(NUM_SLABS) if states[s] == LeaseState.GIVEN_BACK} == lender_side.to_scrub
            assert {s for s in range(NUM_SLABS) if states[s] == LeaseState.QUARANTINED} == lender_side.alarms
            free = {s for s in range(NUM_SLABS) if states[s] == LeaseState.FREE}
            assert not free & lender_side.foreign, "a slab is the engine's own, with what others wrote"
            mappers: dict[int, BorrowerId] = {}
            for borrower_side in self.borrower_sides:
                for (name, lease), slab in borrower_side.mapped.items():
                    if name == lender_side.name and lease.epoch == lender_side.life:
                        assert slab not in free and slab not in lender_side.to_scrub, (
                            f"{borrower_side.id} has mapped {slab}"
                        )
                        assert slab not in mappers, f"{borrower_side.id} and {mappers[slab]} have mapped {slab}"
                        mappers[slab] = borrower_side.id
        for borrower_side in self.borrower_sides:
            for borrower in borrower_side.borrowers.values():
                borrower.check_invariants()

    def check_settled(self) -> None:
        """Views agree, and only borrowers that stand still cost capacity."""
        living = {borrower_side.id: borrower_side for borrower_side in self.borrower_sides}
        for lender_side in self.lender_sides.values():
            for slab, state in enumerate(lender_side.lender.states):
                if state not in (LeaseState.FREE, LeaseState.GRANTED, LeaseState.HELD):
                    borrower = living.get(lender_side.lender._leases[slab].borrower)
                    is_waited_for = state in (LeaseState.QUARANTINED, LeaseState.RECALLED)
                    assert is_waited_for and borrower is not None and borrower.is_stopped, (
                        f"capacity is lost: {state}"
                    )
            for borrower_side in self.borrower_sides:
                if not borrower_side.is_stopped:
                    lent = {
                        lease.number
                        for lease in lender_side.lender._leases.values()
                        if lease.borrower == borrower_side.id
                    }
                    borrower = borrower_side.borrowers[lender_side.name]
                    held = {number: borrower.state(number) for number in borrower._leases}
                    assert held == dict.fromkeys(lent, LeaseState.HELD), f"{borrower_side.id}: {held}, lent {lent}"
