"""`LentPlaces`: which slabs of a lender's device pool this rank may use, and which are lent or on their way.

Owns that table, and what is told to the coordinator. Knows no memory: a `Scrubs` overwrites it. Decides nothing: the
scheduler (`DeviceLending`) chooses the slabs to lend and how many to recall, the coordinator which borrower gets
them. A slab is overwritten with zeros before it is lent and after it was given back.

    MAPPED ── lend ──► scrubbed ──► offered, or with a borrower ── given back ──► scrubbed ──► MAPPED
      ▲                                │ no borrower takes it for some seconds
      └────────────────────────────────┘

A slab that is back on this rank alone is not used: it is lent again if a borrower would take it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np

from sglang.srt.mem_cache.slab_ledger import SlabReport
from sglang.srt.peer.protocol.lender import DemandChanged, LenderEvent, LendOutcome, SlabGivenBack, SlabQuarantined
from sglang.srt.utils.clock import monotonic
from sglang.srt.utils.peer_timing import PeerTiming

logger = logging.getLogger(__name__)


class _Scrubbing(Enum):
    """Why a slab is overwritten."""

    # Borrowers may have it then.
    TO_LEND = auto()
    # It was to be lent, and the engine needs it after all.
    TURNED_BACK = auto()
    # A borrower had it.
    GIVEN_BACK = auto()


@dataclass(frozen=True)
class LentOptions:
    """How a lender lends."""

    # Borrowers map nothing, this process copies for them, in host memory.
    strict: bool = False
    timing: PeerTiming = field(default_factory=PeerTiming)
    # How many slabs this lender may ever lend; None: all.
    num_lendable: int | None = None
    # A sentence if that is none, for people.
    problem: str = ""
    # Ranks of the engine; 0: borrowers are not told.
    num_ranks: int = 0


class LentLeases(Protocol):
    """What a lender has agreed on with its borrowers; see `LenderCoordinator`."""

    def poll(self) -> list[LenderEvent]: ...

    def lend(self, slabs: Sequence[int]) -> None: ...

    def recall(self, num_slabs: int, timeout_s: float) -> None: ...

    def reclaim(self, slab: int) -> None: ...

    def status(self) -> dict[str, int]: ...


class Scrubs(Protocol):
    """Overwrites slabs; see `Scrubber`."""

    def submit(self, slabs: Iterable[int]) -> None: ...

    def take_done(self) -> list[int]: ...


class LentPlaces:
    """`LentSlabs` (mem_cache/slab_ledger.py): num_slabs slabs of slab_bytes. now: seconds of a monotonic clock."""

    def __init__(
        self,
        coordinator: LentLeases,
        scrubber: Scrubs,
        num_slabs: int,
        slab_bytes: int,
        options: LentOptions,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._scrubber = scrubber
        self.slab_bytes = slab_bytes
        self._options = options
        self._now = now
        # A byte per slab, see `SlabReport`.
        self._mapped = bytearray(b"\1" * num_slabs)
        # Slabs that are back here and not on all ranks -> since when.
        self._unused_since: dict[int, float] = {}
        # Slabs that the scrubber has.
        self._scrubbed: dict[int, _Scrubbing] = {}
        self._demand = DemandChanged(0)

    def poll_mapped(self) -> SlabReport:
        """See `SlabSource`. Also lends slabs that only this rank has back, as soon as a borrower would take them."""
        for event in self._coordinator.poll():
            if isinstance(event, LendOutcome):
                self._bring_home(event.kept)
            elif isinstance(event, SlabGivenBack):
                self._scrub([event.slab], _Scrubbing.GIVEN_BACK)
            elif isinstance(event, SlabQuarantined):
                logger.error(
                    "%s has not given back a slab in time: %d bytes are lost until it does, or ends",
                    event.borrower.name,
                    self.slab_bytes,
                )
            else:
                self._demand = event
        self._take_scrubbed()
        if self._demand.unmet_bytes and self._unused_since:
            self._lend_unused()
        return SlabReport(
            mapped=bytes(self._mapped),
            num_borrowable=-(-self._demand.unmet_bytes // self.slab_bytes),
            num_late=self._coordinator.status()["quarantined_slabs"],
            value_us=self._demand.value_us,
            lent_value_us=self._demand.lent_value_us,
        )

    def mark_in_use(self, mapped: bytes) -> None:
        """See `LentSlabs`."""
        here, agreed = (np.frombuffer(each, np.uint8) for each in (bytes(self._mapped), mapped))
        unused, now = np.flatnonzero(here > agreed).tolist(), self._now()
        self._unused_since = {slab: self._unused_since.get(slab, now) for slab in unused}

    def lend(self, slabs: Sequence[int]) -> None:
        """See `LentSlabs`."""
        for slab in slabs:
            self._mapped[slab] = 0
        self._scrub(slabs, _Scrubbing.TO_LEND)

    def recall(self, num_slabs: int) -> None:
        """See `LentSlabs`. Slabs that are on their way to a borrower turn back first."""
        turned = sorted(slab for slab, why in self._scrubbed.items() if why == _Scrubbing.TO_LEND)[:num_slabs]
        self._scrubbed.update(dict.fromkeys(turned, _Scrubbing.TURNED_BACK))
        if num_slabs > len(turned):
            self._coordinator.recall(num_slabs - len(turned), self._options.timing.recall)

    def _lend_unused(self) -> None:
        """Other ranks have lent these slabs for some time."""
        long_ago = self._now() - self._options.timing.offer
        unused = [slab for slab, since in self._unused_since.items() if since < long_ago]
        for slab in unused:
            self._mapped[slab] = 0
            del self._unused_since[slab]
        if unused:
            self._coordinator.lend(unused)

    def _scrub(self, slabs: Sequence[int], why: _Scrubbing) -> None:
        self._scrubbed.update(dict.fromkeys(slabs, why))
        self._scrubber.submit(slabs)

    def _take_scrubbed(self) -> None:
        to_lend = []
        for slab in self._scrubber.take_done():
            why = self._scrubbed.pop(slab)
            if why == _Scrubbing.TO_LEND:
                to_lend.append(slab)
                continue
            if why == _Scrubbing.GIVEN_BACK:
                self._coordinator.reclaim(slab)
            self._bring_home([slab])
        if to_lend:
            self._coordinator.lend(to_lend)

    def _bring_home(self, slabs: Sequence[int]) -> None:
        """No borrower has these slabs, which hold zeros."""
        for slab in slabs:
            self._mapped[slab] = 1

    def state(self) -> dict[str, Any]:
        """For people, as docs/reference/state.md lists it. Each slab counts once."""
        num_mapped, status = sum(self._mapped), self._coordinator.status()
        slabs = {
            "home": num_mapped,
            "lent": status["granted_slabs"] + status["held_slabs"] - status["wanted_slabs"],
            "asked_back": status["recalled_slabs"] + status["wanted_slabs"],
            "quarantined": status["quarantined_slabs"],
        }
        # The coordinator's counts are as new as its last event: every slab that it counts is unmapped here. The rest
        # is offered to borrowers, or being overwritten.
        slabs["offered"] = len(self._mapped) - sum(slabs.values())
        return {
            "role": "worker",
            "slab_bytes": self.slab_bytes,
            "borrowers": status["borrowers"],
            "slabs": slabs,
            "copies": {"bytes": status["copied_bytes"], "refused": status["refused_copies"]},
            "problems": [self._options.problem] if self._options.problem else [],
        }
