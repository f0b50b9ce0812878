"""Workers and masters as whole processes on a virtual clock and a bad network, with the real `Lender` and `Borrower`
in them. Knows what they cannot know: which process has mapped which slab, and what lies in it.

A process lives, stands still (SIGSTOP: what is sent to it waits) or is dead. A name's next life may begin while the
former one still lives. Heartbeats are lost, doubled, late and out of order, and may reach another life than the one
they were for; requests for memory end with their connection, but not before they have wandered about.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.peer.protocol.borrower import Borrower, BorrowerConfig, SlabLent, SlabLost, SlabRecalled
from sglang.srt.peer.protocol.leases import LeaseState
from sglang.srt.peer.protocol.lender import Lender, LenderTiming, LendOutcome, SlabGivenBack, SlabQuarantined
from sglang.srt.peer.protocol.messages import BorrowerHeartbeat, BorrowerId, Fetch, LeaseId, LenderHeartbeat

SLAB_BYTES = 100
NUM_SLABS = 6
TIMING = LenderTiming(heartbeat_s=0.5, silence_s=5.0, grace_s=5.0)


@dataclass
class Process:
    name: str
    life: int
    is_stopped: bool = False
    inbox: list[Any] = field(default_factory=list)


@dataclass(kw_only=True)
class Worker(Process):
    """foreign: slabs that others may have written to since they were last overwritten. to_scrub: what the lender
    said. alarms: slabs it was told are quarantined."""

    lender: Lender
    foreign: set[int] = field(default_factory=set)
    to_scrub: set[int] = field(default_factory=set)
    alarms: set[int] = field(default_factory=set)


@dataclass(kw_only=True)
class Master(Process):
    """borrowers: by worker. mapped: (worker, lease) -> slab. draining: what was asked back. unmapping: what
    was lost, and is still mapped."""

    borrowers: dict[str, Borrower]
    mapped: dict[tuple[str, LeaseId], int] = field(default_factory=dict)
    draining: set[tuple[str, LeaseId]] = field(default_factory=set)
    unmapping: set[tuple[str, LeaseId]] = field(default_factory=set)

    @property
    def id(self) -> BorrowerId:
        return BorrowerId(self.name, self.life)


@dataclass(frozen=True)
class SlabReply:
    worker: str
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
        self.seen: set[str] = set()  # what has happened at least once
        self.workers: dict[str, Worker] = {}
        self.masters: list[Master] = []
        for name in ("w0", "w1"):
            self.start_worker(name)
        for name in ("m0", "m1"):
            self.start_master(name)

    # -- lives --------------------------------------------------------------------------------------------------

    def start_worker(self, name: str) -> None:
        life = next(self._lives)
        lender = self.lender_class(life, NUM_SLABS, SLAB_BYTES, self._token, timing=TIMING, slab_socket=name)
        self.workers[name] = Worker(name, life, lender=lender)

    def start_master(self, name: str) -> None:
        life, strict = next(self._lives), self.rng.random() < 0.2
        borrowers = {w: self.borrower_class(w, BorrowerConfig(name, life, SLAB_BYTES, strict)) for w in ("w0", "w1")}
        self.masters.append(Master(name, life, borrowers=borrowers))
        for borrower in borrowers.values():
            borrower.set_demand(self.rng.randrange(7 * SLAB_BYTES))

    def kill_worker(self, name: str) -> None:
        dead = self.workers[name]
        for master in self.masters:
            if any(worker == name and lease.epoch == dead.life for worker, lease in master.mapped):
                self._post(self.rng.random() * 3, master.name, master.life, Death(name, dead.life))
        self.start_worker(name)
        self.seen.add("worker died")

    def kill_master(self, master: Master) -> None:
        self.masters.remove(master)
        for worker in self.workers.values():
            states, leases = worker.lender.states, worker.lender._leases.values()
            fetched = [each for each in leases if not each.strict and states[each.slab] != LeaseState.GRANTED]
            if any(lease.borrower == master.id for lease in fetched):
                self._tell_death(worker, master.id)
        self.seen.add("master died")

    def _tell_death(self, worker: Worker, dead: BorrowerId) -> None:
        """Only of who has fetched something does the lender have a pidfd; of such, always."""
        self._post(self.rng.random() * 3, worker.name, worker.life, Death(dead.name, dead.incarnation))

    def _token(self) -> bytes:
        return b"%d" % next(self._tokens)

    # -- network ------------------------------------------------------------------------------------------------

    def _post(self, delay_s: float, to: str, life: int | None, message: Any) -> None:
        """life: of the receiver, the only one that may have it; None: any may."""
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
            lives: list[Process] = [m for m in self.masters if m.name == to]
            if to in self.workers:
                lives = [self.workers[to]]
            lives = [p for p in lives if life is None or p.life == life]
            if lives:
                self.rng.choice(lives).inbox.append(message)

    # -- what a process does ------------------------------------------------------------------------------------

    def run_worker(self, worker: Worker) -> None:
        lender = worker.lender
        inbox, worker.inbox = worker.inbox, []
        for message in inbox:
            if isinstance(message, BorrowerHeartbeat):
                lender.receive(message, self.now)
            elif isinstance(message, Death):
                lender.on_borrower_death(BorrowerId(message.name, message.life))
            else:
                self._answer(worker, message)
        lender.tick(self.now)
        self.take_lender_events(worker)
        for borrower, heartbeat in lender.take_outgoing(self.now):
            self.send(borrower.name, None if self.is_faulty else borrower.incarnation, heartbeat)

    def _answer(self, worker: Worker, message: Fetch) -> None:
        slab = worker.lender.allow_fetch(message)
        if slab is not None:
            worker.foreign.add(slab)
            reply = SlabReply(worker.name, LeaseId(message.epoch, message.number))
            self.send(message.name, message.incarnation, reply)
            if not any(m.id == (message.name, message.incarnation) for m in self.masters):
                self._tell_death(worker, BorrowerId(message.name, message.incarnation))
                self.seen.add("fetched after death")
        else:
            self.seen.add("refused")

    def take_lender_events(self, worker: Worker) -> None:
        for event in worker.lender.take_events():
            if isinstance(event, SlabGivenBack):
                assert event.slab not in worker.to_scrub
                worker.to_scrub.add(event.slab)
                if event.slab in worker.alarms:
                    worker.alarms.remove(event.slab)
                    self.seen.add("quarantine ended")
            elif isinstance(event, SlabQuarantined):
                worker.alarms.add(event.slab)
                self.seen.add("quarantined")
            elif isinstance(event, LendOutcome) and event.lent:
                self.seen.add("lent")

    def run_master(self, master: Master) -> None:
        inbox, master.inbox = master.inbox, []
        for message in inbox:
            if isinstance(message, LenderHeartbeat):
                # Sockets belong to one lender each; here it is told apart by its slab socket.
                if not master.borrowers[message.slab_socket].receive(message, self.now):
                    self.seen.add("stale")
            elif isinstance(message, Death):
                master.borrowers[message.name].on_lender_death(message.life)
            else:
                # Any number stands for a file descriptor.
                if not master.borrowers[message.worker].hold(message.lease, 7):
                    self.seen.add("slab came too late")
        for name, borrower in master.borrowers.items():
            for lend in borrower.leases_to_fetch():
                if not self.is_faulty or self.rng.random() < 0.3:
                    fetch = Fetch(
                        name=master.name,
                        incarnation=master.life,
                        epoch=borrower.epoch,
                        number=lend.number,
                        token=lend.token,
                    )
                    self.send(name, borrower.epoch, fetch)
            self._take_borrower_events(master, borrower)
            heartbeat = borrower.take_outgoing(self.now)
            if heartbeat is not None:
                self.send(name, None, heartbeat)

    def _take_borrower_events(self, master: Master, borrower: Borrower) -> None:
        for event in borrower.take_events():
            key = (event.lender, event.lease)
            if isinstance(event, SlabLent):
                if event.fd is not None:
                    master.mapped[key] = event.slab
                self.seen.add("held" if event.fd is not None else "held strictly")
            elif isinstance(event, SlabRecalled):
                master.draining.add(key)
            elif isinstance(event, SlabLost):
                is_alive = self.workers[event.lender].life == event.lease.epoch
                assert not is_alive or key not in master.mapped, f"{event}, but its lender lives and has not"
                master.draining.discard(key)
                if key in master.mapped:
                    master.unmapping.add(key)

    def unmap(self, master: Master, key: tuple[str, LeaseId]) -> None:
        master.mapped.pop(key, None)
        master.draining.discard(key)
        master.unmapping.discard(key)
        master.borrowers[key[0]].give_back(key[1])

    def scrub(self, worker: Worker, slab: int) -> None:
        worker.foreign.discard(slab)
        worker.to_scrub.remove(slab)
        worker.lender.reclaim(slab)

    # -- steps --------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        self.now += seconds
        self.deliver()
        for process in [*self.workers.values(), *self.masters]:
            if not process.is_stopped:
                self.run_worker(process) if isinstance(process, Worker) else self.run_master(process)
        self.check_invariants()

    def step(self) -> None:
        """Anything may happen."""
        rng = self.rng
        worker = rng.choice(list(self.workers.values()))
        master = rng.choice(self.masters)
        dice = rng.random()
        if dice < 0.01:
            process = rng.choice([worker, master])
            process.is_stopped = not process.is_stopped
        elif dice < 0.013:
            self.kill_worker(worker.name)
        elif dice < 0.02:
            self.kill_master(master)
        elif not worker.is_stopped and dice < 0.3:
            rng.choice([self._offer, self._reclaim, self._scrub_one])(worker)
        elif not master.is_stopped and dice < 0.5:
            self._unmap_one(master)
        elif dice < 0.53:
            rng.choice(list(master.borrowers.values())).set_demand(rng.randrange(7 * SLAB_BYTES))
        for name in ("m0", "m1"):
            lives = [m for m in self.masters if m.name == name]
            if not lives or (len(lives) == 1 and lives[0].is_stopped and rng.random() < 0.02):
                self.start_master(name)
        self.run(rng.random() * (3 if rng.random() < 0.02 else 0.3))

    def _offer(self, worker: Worker) -> None:
        worker.lender.lend([s for s in range(NUM_SLABS) if worker.lender.states[s] == LeaseState.FREE], self.now)

    def _reclaim(self, worker: Worker) -> None:
        worker.lender.recall(self.rng.randrange(4), self.now + self.rng.random() * 8)

    def _scrub_one(self, worker: Worker) -> None:
        if worker.to_scrub:
            self.scrub(worker, self.rng.choice(sorted(worker.to_scrub)))

    def _unmap_one(self, master: Master) -> None:
        voluntary = list(master.mapped) if self.rng.random() < 0.1 else []
        keys = sorted({*master.draining, *master.unmapping, *voluntary})
        if keys:
            self.unmap(master, self.rng.choice(keys))

    def settle(self, seconds: float) -> None:
        """The network behaves, who is not stopped does at once what it should."""
        self.is_faulty = False
        for _ in range(round(seconds / 0.25)):
            self.run(0.25)
            for worker in self.workers.values():
                if not worker.is_stopped:
                    for slab in sorted(worker.to_scrub):
                        self.scrub(worker, slab)
            for master in self.masters:
                if not master.is_stopped:
                    for key in sorted({*master.draining, *master.unmapping}):
                        self.unmap(master, key)

    # -- what must always hold ----------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        for worker in self.workers.values():
            worker.lender.check_invariants()
            self.take_lender_events(worker)
            states = worker.lender.states
            assert {s for s in range(NUM_SLABS) if states[s] == LeaseState.GIVEN_BACK} == worker.to_scrub
            assert {s for s in range(NUM_SLABS) if states[s] == LeaseState.QUARANTINED} == worker.alarms
            free = {s for s in range(NUM_SLABS) if states[s] == LeaseState.FREE}
            assert not free & worker.foreign, "a slab is the engine's own, with what others wrote"
            mappers: dict[int, BorrowerId] = {}
            for master in self.masters:
                for (name, lease), slab in master.mapped.items():
                    if name == worker.name and lease.epoch == worker.life:
                        assert slab not in free and slab not in worker.to_scrub, f"{master.id} has mapped {slab}"
                        assert slab not in mappers, f"{master.id} and {mappers[slab]} have mapped {slab}"
                        mappers[slab] = master.id
        for master in self.masters:
            for borrower in master.borrowers.values():
                borrower.check_invariants()

    def check_settled(self) -> None:
        """Views agree, and only borrowers that stand still cost capacity."""
        living = {master.id: master for master in self.masters}
        for worker in self.workers.values():
            for slab, state in enumerate(worker.lender.states):
                if state not in (LeaseState.FREE, LeaseState.GRANTED, LeaseState.HELD):
                    borrower = living.get(worker.lender._leases[slab].borrower)
                    is_waited_for = state in (LeaseState.QUARANTINED, LeaseState.RECALLED)
                    assert is_waited_for and borrower is not None and borrower.is_stopped, (
                        f"capacity is lost: {state}"
                    )
            for master in self.masters:
                if not master.is_stopped:
                    lent = {lease.number for lease in worker.lender._leases.values() if lease.borrower == master.id}
                    borrower = master.borrowers[worker.name]
                    held = {number: borrower.state(number) for number in borrower._leases}
                    assert held == dict.fromkeys(lent, LeaseState.HELD), f"{master.id}: {held}, lent {lent}"
