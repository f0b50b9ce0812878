"""`BorrowedPlaces`: which lease each place of a borrower's pool belongs to, on one rank.

Owns that table, and what is told to the coordinator. Knows no memory: a subclass has it, takes slabs and releases
them. Decides nothing: the coordinator tells what was lent and how much is wanted back, the scheduler (`Borrowing`)
how much to ask for and which slabs to give up, and `SlabLedger` which slabs no request uses any more.

Rank 0 chooses the place of a slab, and the other ranks follow: there a slab waits until rank 0 has it as well. What
not all ranks have for some seconds is of no use: it is given back, and may be lent again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np

from sglang.srt.mem_cache.slab_ledger import SlabReport, source_of
from sglang.srt.peer.memory.slabs import SlabError
from sglang.srt.peer.protocol.borrower import (
    BorrowerEvent,
    LenderOffer,
    LenderSilent,
    SlabLent,
    SlabLost,
    SlabRecalled,
    SlabsWanted,
)
from sglang.srt.peer.protocol.leases import ranks_differ
from sglang.srt.peer.protocol.messages import LeaseId
from sglang.srt.utils.clock import monotonic
from sglang.srt.utils.peer_timing import PeerTiming

logger = logging.getLogger(__name__)
# A lender whose slab is of no use is asked for none for so many seconds, each time for twice as long.
_FIRST_REFUSAL_S, _MAX_REFUSAL_S = 5.0, 300.0


@dataclass(frozen=True)
class _Refusal:
    problem: str
    until: float
    wait_s: float


@dataclass(frozen=True)
class BorrowedOptions:
    """How a borrower borrows."""

    # How many slabs are asked for before `set_demand` tells; None: as many as there are places.
    num_wanted: int | None = None
    # What one is worth until then, see `Register`.
    value_us: int = 0
    # Ranks of the engine; 0: lenders are not told.
    num_ranks: int = 0
    timing: PeerTiming = field(default_factory=PeerTiming)


class BorrowedLeases(Protocol):
    """What a borrower has agreed on with its lenders; see `BorrowerCoordinator`."""

    def poll(self) -> list[BorrowerEvent]: ...

    def set_demand(self, lender: str, size_bytes: int, value_us: int = 0) -> None: ...

    def give_back(self, lender: str, lease: LeaseId) -> None: ...

    def connected(self) -> dict[str, bool]: ...

    def offers(self) -> Mapping[str, LenderOffer | None]: ...


class BorrowedPlaces:
    """`BorrowedSlabs` (mem_cache/slab_ledger.py): num_places places for slabs of slab_bytes. Lenders must have slabs
    of the same size. lenders: their endpoints. maps_only: slabs that a lender does not let be mapped are of no use.
    leads: whether this is rank 0. now: seconds of a monotonic clock.

    Slabs of a strict lender that does not answer are not mapped, for the scheduler, until it does; the lease stays.
    """

    def __init__(
        self,
        coordinator: BorrowedLeases,
        lenders: Sequence[str],
        num_places: int,
        slab_bytes: int,
        options: BorrowedOptions,
        maps_only: bool = False,
        leads: bool = True,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._now = now
        # For how many seconds a slab that other ranks lack is kept.
        self._patience_s = options.timing.offer
        # The most places that are released at once, because that takes time.
        self._released_at_once = num_places
        # Places that are mapped here and not on all ranks -> since when.
        self._unagreed_since: dict[int, float] = {}
        self.slab_bytes = slab_bytes
        self._num_ranks = options.num_ranks
        self._maps_only = maps_only
        self._leads = leads
        # Where rank 0 does not lead here: what it has -> at which place.
        self._places_of_leader: dict[int, int] = {}
        # Slabs that rank 0 does not have yet, by lender and lease, and since when.
        self._unplaced: dict[tuple[str, LeaseId], tuple[SlabLent, float]] = {}
        # Place -> lender and lease; None: the place is free.
        self._leases: list[tuple[str, LeaseId] | None] = [None] * num_places
        # The other way round.
        self._places: dict[tuple[str, LeaseId], int] = {}
        # Place -> see `SlabReport`.
        self._sources = np.zeros(num_places, np.int64)
        # Lender -> its place among all.
        self._lenders = {endpoint: i for i, endpoint in enumerate(dict.fromkeys(lenders))}
        # By lender: how many slabs of this rank's choice it wanted back when that was counted, and how many were
        # given back to it.
        self._last_wanted = [SlabsWanted(endpoint, 0) for endpoint in self._lenders]
        self._num_given_back = [0] * len(self._lenders)
        # See `SlabReport`.
        self._num_lendable = num_places
        # Lender -> why none of its slabs can be used; was logged.
        self._problems: dict[str, str] = {}
        # By lender whose last slab was of no use.
        self._refused: dict[str, _Refusal] = {}
        num_wanted = num_places if options.num_wanted is None else options.num_wanted
        self._demand = (num_wanted, options.value_us)
        # (n,) whether the place may be used, see `SlabReport`.
        self._mapped = np.zeros(num_places, np.bool_)
        # What `poll_mapped` has returned last, while nothing has changed.
        self._report: SlabReport | None = None
        # The places that cannot be used for now, as of that.
        self._not_used: list[int] = []
        # Places that all ranks have had mapped since `give_back` named them last, and what they have.
        self._in_use: set[int] = set()
        self._agreed = b""
        # Places to be given back: recalled by their lenders, or lost.
        self._ending: set[int] = set()
        # Those whose lenders are gone, and those that their lenders want back by name.
        self._lost: set[int] = set()
        self._recalled: set[int] = set()
        # Lenders that were gone, and have lent nothing since.
        self._gone: set[str] = set()
        # Lenders that are left alone, and how often each was.
        self._left_alone: set[str] = set()
        self._times_left_alone: Counter[str] = Counter()
        self._spread_demand()

    def poll_mapped(self) -> SlabReport:
        """See `SlabSource`."""
        lost: Counter[tuple[str, bool]] = Counter()
        events = self._coordinator.poll()
        for event in events:
            if isinstance(event, SlabLent):
                self._borrow(event)
                continue
            if isinstance(event, LenderSilent):
                self._leave_alone(event.lender)
                continue
            if isinstance(event, SlabsWanted):
                self._last_wanted[self._lenders[event.lender]] = event
                continue
            lease = (event.lender, event.lease)
            place = self._places.get(lease)
            if place is None:
                # Else it was given back at once.
                if lease in self._unplaced:
                    self._give_back_unplaced([lease], is_lost=isinstance(event, SlabLost))
                continue
            self._mapped[place] = False
            self._ending.add(place)
            if isinstance(event, SlabLost):
                self._lost.add(place)
                lost[event.lender, self._is_strict(place)] += 1
            else:
                assert isinstance(event, SlabRecalled)
                self._recalled.add(place)
        for (lender, is_strict), count in lost.items():
            self._gone.add(lender)
            slabs = "1 slab" if count == 1 else f"{count} slabs"
            if is_strict:
                logger.warning("the worker at %s has reclaimed %s, or is gone", lender, slabs)
            else:
                logger.warning("the worker at %s is gone, and %s of its memory with it", lender, slabs)
        if self._unplaced:
            self._place_unplaced()
        if self._ending:
            self._give_back_unused()
        if any(self._wanted):
            self._give_back_unagreed()
        if self._unagreed_since:
            self._give_back_long_unagreed()
        self._note_offers()
        if events:
            self._report = None
            self._spread_demand()
        unusable = self._unusable()
        if unusable or self._left_alone:
            self._note_left_alone()
        if self._report is None or unusable != self._not_used:
            self._not_used = unusable
            self._report = self._new_report()
        return self._report

    def _new_report(self) -> SlabReport:
        mapped, readable, unusable = self._mapped.copy(), np.ones_like(self._mapped), self._not_used
        mapped[unusable] = readable[unusable] = False
        for place in self._lost:
            # What is mapped is there as long as this process has it.
            readable[place] = not self._is_strict(place)
        return SlabReport(
            mapped.tobytes(),
            readable=b"" if readable.all() else readable.tobytes(),
            sources=np.where(mapped, self._sources, 0).tobytes(),
            num_wanted=tuple(self._wanted),
            num_lendable=self._num_lendable,
        )

    @property
    def _wanted(self) -> list[int]:
        """By lender: how many more slabs of this rank's choice it wants back. The coordinator may not have counted
        those that were given back last, and others are about to be."""
        ending = Counter(self._leases[place][0] for place in self._ending - self._lost - self._recalled)  # type: ignore[index]
        return [
            max(0, last.num_slabs - (num - last.num_given_back) - ending[last.lender])
            for last, num in zip(self._last_wanted, self._num_given_back)
        ]

    def _return(self, lender: str, lease: LeaseId) -> None:
        self._num_given_back[self._lenders[lender]] += 1
        self._coordinator.give_back(lender, lease)

    def follow(self, sources: bytes) -> None:
        """See `BorrowedSlabs`."""
        table = np.frombuffer(sources, np.int64)
        places = np.flatnonzero(table)
        self._places_of_leader = dict(zip(table[places].tolist(), places.tolist()))

    def set_demand(self, num_slabs: int, value_us: int) -> None:
        """See `BorrowedSlabs`."""
        self._demand = (num_slabs, value_us)
        self._spread_demand()

    def mark_in_use(self, mapped: bytes) -> None:
        """See `BorrowedSlabs`."""
        if mapped != self._agreed:
            self._agreed = mapped
            self._in_use.update(np.flatnonzero(np.frombuffer(mapped, np.uint8)).tolist())
        self._note_unagreed(mapped)
        self._give_back_unused()

    def give_back(self, slabs: Sequence[int], chosen: Sequence[int] = ()) -> None:
        """See `BorrowedSlabs`. A slab that another rank has lost, and that was not chosen, stays here: it is used
        again when that rank is lent another one in its place."""
        self._in_use.difference_update(slabs)
        self._agreed = b""
        self._end(place for place in chosen if self._leases[place] is not None)
        self._spread_demand()
        self._give_back_unused()

    def _end(self, places: Iterable[int]) -> None:
        for place in places:
            self._mapped[place] = False
            self._ending.add(place)
            self._report = None

    def _give_back_unagreed(self) -> None:
        """Slabs that other ranks lack are of no use: they go first where a lender wants some back."""
        for lender, num_wanted in zip(self._lenders, self._wanted):
            unplaced = [lease for lease in self._unplaced if lease[0] == lender][:num_wanted]
            self._give_back_unplaced(unplaced)
            idle = (
                place
                for place, lease in enumerate(self._leases)
                if lease is not None
                and lease[0] == lender
                and place not in self._in_use
                and place not in self._ending
            )
            self._end([place for place, _ in zip(idle, range(num_wanted - len(unplaced)))])
        self._give_back_unused()

    def _note_unagreed(self, agreed: bytes) -> None:
        """agreed: see `mark_in_use`. What cannot be used here either waits for its lender, not for other ranks."""
        lacking = np.flatnonzero(self._mapped & ~np.frombuffer(agreed, np.bool_))
        if not len(lacking):
            self._unagreed_since = {}
            return
        places, now = set(lacking.tolist()) - self._in_use - set(self._not_used), self._now()
        self._unagreed_since = {place: self._unagreed_since.get(place, now) for place in places}

    def _give_back_long_unagreed(self) -> None:
        long_ago = self._now() - self._patience_s
        places = [place for place, since in self._unagreed_since.items() if since < long_ago]
        if not places:
            return
        for place in places:
            del self._unagreed_since[place]
        self._end(place for place in places if self._leases[place] is not None and place not in self._in_use)
        self._give_back_unused()
        self._spread_demand()

    def _spread_demand(self) -> None:
        """Ask each lender for what it has lent, and for its part of what is lacking. A part that one cannot lend is
        asked of the others as soon as those have lent theirs."""
        num_wanted, value_us = self._demand
        held = Counter(
            lease[0] for place, lease in enumerate(self._leases) if lease is not None and place not in self._ending
        )
        held.update(lender for lender, _ in self._unplaced)
        useful = [lender for lender in self._lenders if lender not in self._problems]
        part = -(-max(0, num_wanted - sum(held.values())) // len(useful)) if useful else 0
        for lender in self._lenders:
            num_slabs = held[lender] + (part if lender in useful else 0)
            self._coordinator.set_demand(lender, num_slabs * self.slab_bytes, value_us)

    def _note_offers(self) -> None:
        """How much lenders may lend, and in the log, once, why one is of no use."""
        num_lendable = 0
        for lender, offer in self._coordinator.offers().items():
            refusal = self._refused.get(lender)
            if offer is None:
                num_lendable = len(self._leases)
                if refusal is not None:  # a worker that comes back may be another
                    del self._refused[lender]
                    self._problems.pop(lender, None)
                    self._spread_demand()
                continue
            if refusal is not None and self._now() < refusal.until:
                num_lendable += sum(lease is not None and lease[0] == lender for lease in self._leases)
                continue
            problem = self._problem_of(lender, offer)
            if problem != self._problems.get(lender, ""):
                if problem:
                    logger.error(problem)
                    self._problems[lender] = problem
                else:
                    del self._problems[lender]
                self._spread_demand()
            num_lendable += 0 if problem else offer.num_lendable
        num_lendable = min(num_lendable, len(self._leases))
        if num_lendable != self._num_lendable:
            self._num_lendable, self._report = num_lendable, None

    def _problem_of(self, lender: str, offer: LenderOffer) -> str:
        """A sentence, or "" if its slabs can be used."""
        if ranks_differ(offer.num_ranks, self._num_ranks):
            return (
                f"slabs from {lender} cannot be used: its worker has --tp-size {offer.num_ranks}, where this master "
                f"has --tp-size {self._num_ranks}: start both with the same --tp-size"
            )
        if offer.slab_bytes != self.slab_bytes:
            return (
                f"slabs from {lender} cannot be used: they have {offer.slab_bytes:,} bytes, where this master has "
                f"slabs of {self.slab_bytes:,}: start both with --peer-slab-size "
                f"{max(self.slab_bytes, offer.slab_bytes) >> 20}"
            )
        if offer.strict and self._maps_only:
            return (
                f"slabs from {lender} cannot be used: its worker has --peer-strict, and a GPU uses what it "
                "maps alone: start the worker without it"
            )
        if not offer.num_lendable:
            return f"the worker at {lender} can lend nothing: its log and its /hicache/state have the flag to change"
        return ""

    def _give_back_unused(self) -> None:
        """Unmap places that are ending and not in use, as many as may be at once, and tell their lenders."""
        unused = self._ending - self._in_use
        for place in islice(unused, self._released_at_once):
            lease = self._leases[place]
            assert lease is not None
            self._release(place)
            self._leases[place], self._sources[place], self._report = None, 0, None
            del self._places[lease]
            self._ending.discard(place)
            self._recalled.discard(place)
            if place in self._lost:
                self._lost.discard(place)
            else:
                self._return(*lease)
        if len(unused) > self._released_at_once:
            self._call_again()

    def state(self) -> dict[str, Any]:
        """For people, as docs/reference/state.md lists it."""
        lenders = [
            {
                "endpoint": lender,
                "connected": connected,
                "left_alone": lender in self._left_alone,
                "times_left_alone": self._times_left_alone[lender],
                "slabs": self._counts_of(lender),
            }
            for lender, connected in self._coordinator.connected().items()
        ]
        return {
            "role": "master",
            "slab_bytes": self.slab_bytes,
            "lenders": lenders,
            "wanted_slabs": self._demand[0],
            "slab_value_s": self._demand[1] / 1e6,
            "problems": list(self._problems.values()),
        }

    def _counts_of(self, lender: str) -> dict[str, int]:
        places = [place for place, lease in enumerate(self._leases) if lease is not None and lease[0] == lender]
        num_ending = sum(place in self._ending for place in places)
        num_asked = min(len(places), num_ending + self._wanted[self._lenders[lender]])
        return {"held": len(places) - num_asked, "asked_back": num_asked}

    def _leave_alone(self, lender: str) -> None:
        """The lender's heartbeats have stopped. What is mapped can be used without it."""
        for place, lease in enumerate(self._leases):
            if lease is not None and lease[0] == lender:
                self._stop_asking(place, "it has sent no heartbeat for a while")

    def _note_left_alone(self) -> None:
        """A line in the log for each lender that is left alone, or used again, since the last call."""
        reasons = {
            lease[0]: reason
            for place, lease in enumerate(self._leases)
            if lease is not None and (reason := self._left_alone_why(place))
        }
        for lender in reasons.keys() - self._left_alone:
            self._times_left_alone[lender] += 1
            logger.warning("the worker at %s is left alone until it answers: %s", lender, reasons[lender])
        for lender in self._left_alone - reasons.keys():
            logger.warning("the worker at %s is not left alone any more", lender)
        self._left_alone = set(reasons)

    def _borrow(self, event: SlabLent) -> None:
        """Have a slab that was lent, or wait until rank 0 has it."""
        free = self._free_place(event)
        if free is None and not self._leads:
            self._unplaced[event.lender, event.lease] = (event, self._now())
        else:
            self._borrow_at(free, event)

    def _place_unplaced(self) -> None:
        """Slabs that rank 0 has by now; those that it does not get are given back."""
        long_ago = self._now() - self._patience_s
        for lease, (event, since) in list(self._unplaced.items()):
            free = self._free_place(event)
            if free is not None:
                del self._unplaced[lease]
                self._borrow_at(free, event)
            elif since < long_ago:
                self._give_back_unplaced([lease])
                self._spread_demand()

    def _give_back_unplaced(self, leases: Iterable[tuple[str, LeaseId]], is_lost: bool = False) -> None:
        for lease in leases:
            event, _ = self._unplaced.pop(lease)
            self._drop(event)
            if not is_lost:
                self._return(*lease)

    def _borrow_at(self, free: int | None, event: SlabLent) -> None:
        """Map a slab, or have its lender copy it (strict mode). A slab that is of no use is given back at once."""
        try:
            if free is None:
                # More than was asked for, while demands crossed.
                self._return(event.lender, event.lease)
                return
            if event.size_bytes != self.slab_bytes:
                raise SlabError(f"a slab of {event.size_bytes:,} bytes, where {self.slab_bytes:,} were agreed on")
            self._take(free, event)
        except SlabError as error:
            self._refuse(event.lender, f"slabs from {event.lender} cannot be used: {error}")
            self._return(event.lender, event.lease)
            return
        finally:
            self._drop(event)
        if event.lender in self._gone:
            self._gone.discard(event.lender)
            logger.info("the worker at %s lends again", event.lender)
        lease = (event.lender, event.lease)
        self._leases[free], self._sources[free], self._places[lease] = lease, self._source_of(event), free
        self._unagreed_since.pop(free, None)
        self._mapped[free] = True
        self._report = None

    def _refuse(self, lender: str, problem: str) -> None:
        """Ask a lender for nothing for a while: it would clear memory for us again and again."""
        before, now = self._refused.get(lender), self._now()
        if before is not None and now < before.until:
            return  # it has lent several
        if before is not None and now >= before.until + _MAX_REFUSAL_S:
            before = None  # it was of use for so long
        if before is None or problem != before.problem:
            logger.error(problem)
        wait_s = _FIRST_REFUSAL_S if before is None else min(2 * before.wait_s, _MAX_REFUSAL_S)
        self._refused[lender] = _Refusal(problem, now + wait_s, wait_s)
        self._problems[lender] = problem
        self._spread_demand()

    def _source_of(self, event: SlabLent) -> int:
        return source_of(self._lenders[event.lender], event.slab)

    def _free_place(self, event: SlabLent) -> int | None:
        """The place for a slab: at rank 0 the first that is free, from one on that is likely to be; else rank 0's."""
        if self._leads:
            num_places = len(self._leases)
            first = self._lenders[event.lender] * num_places // len(self._lenders) + event.slab
            order = ((first + i) % num_places for i in range(num_places))
            return next((place for place in order if self._leases[place] is None), None)
        place = self._places_of_leader.get(self._source_of(event))
        return place if place is not None and self._leases[place] is None else None

    # -- the memory ---------------------------------------------------------------------------------------------

    def _take(self, place: int, event: SlabLent) -> None:
        """Have a lent slab at a place. Raises SlabError if it is of no use."""

    def _drop(self, event: SlabLent) -> None:
        """Let go of what came with a slab that is lent, whether it was taken or not."""

    def _release(self, place: int) -> None:
        """The slab at a place is not used any more."""

    def _call_again(self) -> None:
        """Places are to be released: `poll_mapped` must be called again, although nothing happens."""

    def _is_strict(self, place: int) -> bool:
        """Whether its lender copies what is there."""
        return False

    def _unusable(self) -> list[int]:
        """The places that cannot be used now."""
        return []

    def _left_alone_why(self, place: int) -> str:
        """Why the lender of a slab is not asked for copies; empty if it is, or if the slab is mapped."""
        return ""

    def _stop_asking(self, place: int, reason: str) -> None:
        """The lender of a slab does not answer."""
