"""`Cluster`: engines on one virtual clock, some of which lend memory of their devices to others.

Owns the clock, the messages that are under way, and the order in which engines take steps. Real are the policies in
the engines' steps (`DeviceLending`, `Borrowing`), the leases (`Lender`, `Borrower`) and the tables of slabs
(`LentPlaces`, `BorrowedPlaces`). Sockets, mappings and the overwriting of slabs only take time. All processes live,
no message is lost, and no borrower is strict. Every number that comes out of it is simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sglang.simulator.simulation import Clock, SimulatedEngine
from sglang.srt.peer.borrowed_places import BorrowedOptions, BorrowedPlaces
from sglang.srt.peer.lent_places import LentOptions, LentPlaces
from sglang.srt.peer.protocol.borrower import Borrower, BorrowerConfig, BorrowerEvent, LenderOffer
from sglang.srt.peer.protocol.leases import LeaseState
from sglang.srt.peer.protocol.lender import Lender, LenderEvent, LenderTiming
from sglang.srt.peer.protocol.messages import BorrowerHeartbeat, BorrowerId, Fetch, Lease, LeaseId, LenderHeartbeat
from sglang.srt.utils.peer_timing import PeerTiming
from sglang.srt.utils.time_units import Seconds


@dataclass(frozen=True)
class PeerCosts:
    """What takes time between lenders and borrowers. All in seconds."""

    # From the sending of a message until the other side has taken it.
    message_s: float = 1e-3
    # To map a slab.
    map_s: float = 1e-3
    # To overwrite a slab, one after another.
    scrub_s: float = 1e-3
    timing: PeerTiming = field(default_factory=PeerTiming)


class _Network:
    """What is to happen at which time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    @property
    def now(self) -> Seconds:
        return self._clock.now

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), call))

    def next_at(self) -> float | None:
        return self._due[0][0] if self._due else None

    def run_due(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2]()


class SimulatedLentLeases:
    """A lender's coordinator: see `LenderCoordinator`."""

    def __init__(self, network: _Network, costs: PeerCosts, epoch: int, num_slabs: int, slab_bytes: int) -> None:
        numbers = itertools.count()
        self.lender = Lender(
            epoch,
            num_slabs,
            slab_bytes,
            make_token=lambda: next(numbers).to_bytes(16, "little"),
            timing=LenderTiming.of(costs.timing),
        )
        # Who is told.
        self.borrowers: dict[BorrowerId, Callable[[LenderHeartbeat], None]] = {}
        self._network = network
        self._costs = costs
        self._events: deque[LenderEvent] = deque()
        self._tick()

    @property
    def has_news(self) -> bool:
        return bool(self._events)

    def poll(self) -> list[LenderEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def lend(self, slabs: Sequence[int]) -> None:
        self.lender.lend(tuple(slabs), self._network.now)
        self.turn()

    def recall(self, num_slabs: int, timeout_s: float) -> None:
        self.lender.recall(num_slabs, self._network.now + timeout_s)
        self.turn()

    def reclaim(self, slab: int) -> None:
        self.lender.reclaim(slab)

    def status(self) -> dict[str, int]:
        states = Counter(self.lender.states)
        slabs = {f"{state.name.lower()}_slabs": states[state] for state in LeaseState}
        return {**slabs, "borrowers": len(self.lender.borrowers), "wanted_slabs": self.lender.num_wanted}

    def receive(self, message: BorrowerHeartbeat) -> None:
        self.lender.receive(message, self._network.now)
        self.turn()

    def turn(self) -> None:
        now = self._network.now
        self.lender.tick(now)
        for borrower_id, message in self.lender.take_outgoing(now):
            self._network.after(self._costs.message_s, partial(self.borrowers[borrower_id], message))
        self._events.extend(self.lender.take_events())

    def _tick(self) -> None:
        self.turn()
        self._network.after(self._costs.timing.heartbeat, self._tick)


class SimulatedBorrowedLeases:
    """A borrower's coordinator: see `BorrowerCoordinator`. lenders: by endpoint."""

    def __init__(
        self, network: _Network, costs: PeerCosts, name: str, page_bytes: int, lenders: dict[str, SimulatedLentLeases]
    ) -> None:
        self._network = network
        self._costs = costs
        config = BorrowerConfig(name, 1, page_bytes, heartbeat_s=costs.timing.heartbeat)
        self._lenders = lenders
        self.borrowers = {endpoint: Borrower(endpoint, config) for endpoint in lenders}
        self._events: deque[BorrowerEvent] = deque()
        # Leases whose memory was asked for since their lender's last message.
        self._requested: set[tuple[str, LeaseId]] = set()
        for lender, leases in lenders.items():
            leases.borrowers[BorrowerId(name, 1)] = partial(self._receive, lender)
        self._tick()

    @property
    def has_news(self) -> bool:
        return bool(self._events)

    def poll(self) -> list[BorrowerEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def set_demand(self, lender: str, size_bytes: int, value_us: int = 0) -> None:
        self.borrowers[lender].set_demand(size_bytes, value_us)
        self.turn()

    def give_back(self, lender: str, lease: LeaseId) -> None:
        self.borrowers[lender].give_back(lease)
        self.turn()

    def connected(self) -> dict[str, bool]:
        return {lender: borrower.epoch > 0 for lender, borrower in self.borrowers.items()}

    def offers(self) -> dict[str, LenderOffer | None]:
        return {lender: borrower.offer for lender, borrower in self.borrowers.items()}

    def _receive(self, lender: str, message: LenderHeartbeat) -> None:
        if self.borrowers[lender].receive(message, self._network.now):
            self._requested = {each for each in self._requested if each[0] != lender}
            for lease in self.borrowers[lender].leases_to_fetch():
                self._fetch(lender, lease)
        self.turn()

    def turn(self) -> None:
        for lender, borrower in self.borrowers.items():
            message = borrower.take_outgoing(self._network.now)
            if message is not None:
                self._network.after(self._costs.message_s, partial(self._lenders[lender].receive, message))
            self._events.extend(borrower.take_events())

    def _fetch(self, lender: str, lease: Lease) -> None:
        borrower = self.borrowers[lender]
        found = LeaseId(borrower.epoch, lease.number)
        if (lender, found) in self._requested:
            return
        self._requested.add((lender, found))
        config = borrower.config
        message = Fetch(
            name=config.name,
            incarnation=config.incarnation,
            epoch=found.epoch,
            number=found.number,
            token=lease.token,
        )

        def ask() -> None:
            if self._lenders[lender].lender.allow_fetch(message) is not None:
                self._network.after(self._costs.message_s + self._costs.map_s, have)

        def have() -> None:
            borrower.hold(found, None)
            self.turn()

        self._network.after(self._costs.message_s, ask)

    def _tick(self) -> None:
        self.turn()
        self._network.after(self._costs.timing.heartbeat, self._tick)


class SimulatedScrubber:
    """See `Scrubber`."""

    def __init__(self, network: _Network, scrub_s: float) -> None:
        self._network = network
        self._scrub_s = scrub_s
        self._free_at = 0.0
        self._done: deque[int] = deque()

    @property
    def has_news(self) -> bool:
        return bool(self._done)

    def submit(self, slabs: Iterable[int]) -> None:
        for slab in slabs:
            self._free_at = max(self._network.now, self._free_at) + self._scrub_s
            self._network.after(self._free_at - self._network.now, partial(self._done.append, slab))

    def take_done(self) -> list[int]:
        return [self._done.popleft() for _ in range(len(self._done))]


class SimulatedLent(LentPlaces):
    """Slabs of a simulated lender."""

    def __init__(self, network: _Network, costs: PeerCosts, epoch: int, num_slabs: int, slab_bytes: int) -> None:
        self.leases = SimulatedLentLeases(network, costs, epoch, num_slabs, slab_bytes)
        self.scrubber = SimulatedScrubber(network, costs.scrub_s)
        options = LentOptions(timing=costs.timing)
        super().__init__(self.leases, self.scrubber, num_slabs, slab_bytes, options, lambda: network.now)

    @property
    def has_news(self) -> bool:
        return self.leases.has_news or self.scrubber.has_news


class SimulatedBorrowed(BorrowedPlaces):
    """Places of a simulated borrower. lenders: by endpoint."""

    def __init__(
        self,
        network: _Network,
        leases: SimulatedBorrowedLeases,
        lenders: Sequence[str],
        num_places: int,
        slab_bytes: int,
        options: BorrowedOptions,
    ) -> None:
        self.leases = leases
        super().__init__(leases, lenders, num_places, slab_bytes, options, now=lambda: network.now)

    @property
    def has_news(self) -> bool:
        return self.leases.has_news

    @property
    def num_mapped(self) -> int:
        return int(self._mapped.sum())

    def share_of(self, lender: str) -> float:
        """Of all slabs that are here, those of one lender."""
        held = [held_from for held_from, _ in self._places]
        return held.count(lender) / len(held) if held else 0.0


class Cluster:
    """clock: of all engines that are added."""

    def __init__(self, costs: PeerCosts | None = None) -> None:
        self.clock = Clock()
        self._costs = costs or PeerCosts()
        self._network = _Network(self.clock)
        self._lent: dict[str, SimulatedLent] = {}
        self._engines: list[tuple[SimulatedEngine, SimulatedLent | SimulatedBorrowed | None]] = []

    def lend(self, name: str, num_slabs: int, slab_bytes: int) -> SimulatedLent:
        """The slabs of a lender, which borrowers find under its name."""
        epoch = 1 + len(self._lent)
        self._lent[name] = SimulatedLent(self._network, self._costs, epoch, num_slabs, slab_bytes)
        return self._lent[name]

    def borrow(
        self,
        name: str,
        lenders: Sequence[str],
        num_places: int,
        slab_bytes: int,
        page_bytes: int,
        options: BorrowedOptions | None = None,
    ) -> SimulatedBorrowed:
        """What a borrower has of its lenders. options: its timing is the cluster's."""
        leases = SimulatedBorrowedLeases(
            self._network, self._costs, name, page_bytes, {each: self._lent[each].leases for each in lenders}
        )
        options = options or BorrowedOptions(num_wanted=0)
        return SimulatedBorrowed(self._network, leases, lenders, num_places, slab_bytes, options)

    def add(self, engine: SimulatedEngine) -> None:
        slabs = engine.core.slabs
        assert engine.clock is self.clock and (slabs is None or isinstance(slabs, SimulatedLent | SimulatedBorrowed))
        self._engines.append((engine, slabs))
        # What it may use at first.
        engine.advance()

    def run(self, until: float = 0.0) -> None:
        """Run until all requests of all engines have ended, and then to `until`, in seconds of the clock."""
        while True:
            self._take_steps()
            upcoming = [self._network.next_at(), *(engine.next_at() for engine, _ in self._engines)]
            now = max(self.clock.now, min((t for t in upcoming if t is not None), default=math.inf))
            if now > until and all(engine.is_done for engine, _ in self._engines):
                return
            assert now < math.inf, "requests wait, and nothing is under way"
            self.clock.now = Seconds(now)

    def _take_steps(self) -> None:
        """All that can be done now."""
        has_changed = True
        while has_changed:
            has_changed = False
            self._network.run_due()
            for engine, slabs in self._engines:
                next_at = engine.next_at()
                is_due = next_at is not None and next_at <= self.clock.now
                if is_due or engine.core.has_work(self.clock.now) or (slabs is not None and slabs.has_news):
                    has_changed |= engine.advance()
