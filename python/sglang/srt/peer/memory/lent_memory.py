"""`LentMemory`: a lender's device pool, in slabs that it can lend, on one rank.

Owns the memory and knows which slabs this rank may use. Decides nothing: the scheduler (`DeviceLending`) chooses the
slabs to lend and how many to recall, the coordinator which borrower gets them. A slab is overwritten with zeros
before it is lent and after it was given back, by a thread of its own.

    MAPPED ── lend ──► scrubbed ──► offered, or with a borrower ── given back ──► scrubbed ──► MAPPED
      ▲                                │ no borrower takes it for some seconds
      └────────────────────────────────┘

A slab that is back on this rank alone is not used: it is lent again if a borrower would take it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import numpy as np

from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.slab_ledger import SlabReport
from sglang.srt.peer.lender_coordinator import LenderCoordinator
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig, reserve_slabs
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from sglang.srt.peer.memory.scrubber import Scrubber
from sglang.srt.peer.memory.slabs import SlabFiles
from sglang.srt.peer.protocol.lender import DemandChanged, LenderTiming, LendOutcome, SlabGivenBack, SlabQuarantined
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
    # A sentence if this lender can never lend anything, for people.
    problem: str = ""


class LentMemory:
    """`LentSlabs` (mem_cache/slab_ledger.py).

    pool: the engine's device pool in the slabs, of the given layout. endpoint, directory, notify: see
    `LenderCoordinator`. Raises PeerError, SlabError, and ValueError where a slab has no room for a page.
    """

    def __init__(
        self,
        endpoint: str,
        directory: Path,
        config: SlabsConfig,
        layout: PageLayout,
        notify: Callable[[], None] = lambda: None,
        options: LentOptions | None = None,
    ) -> None:
        self._options = options = options or LentOptions()
        assert not options.strict or config.device.type == "cpu", "copies for borrowers are made in host memory"
        self.slabs = reserve_slabs(config, layout.page_bytes)
        self.slabs.allocate_all()
        self.pool = ElasticPool(self.slabs, layout)
        # A byte per slab, see `SlabReport`.
        self._mapped = bytearray(b"\1" * config.num_slabs)
        # Slabs that are back here and not on all ranks -> since when, in seconds of `monotonic`.
        self._unused_since: dict[int, float] = {}
        # Slabs that the scrubber has.
        self._scrubbed: dict[int, _Scrubbing] = {}
        self._demand = DemandChanged(0)
        self._scrubber = Scrubber(lambda slab: self.slabs.scrub(slab), notify)
        timing = options.timing
        files = SlabFiles(config.num_slabs, config.slab_bytes, self.slabs.fileno)
        self.coordinator = LenderCoordinator(
            endpoint,
            directory,
            files,
            notify,
            options.strict,
            LenderTiming(timing.heartbeat, timing.silence, timing.grace, timing.offer),
            can_lend=not options.problem,
        )

    def poll_mapped(self) -> SlabReport:
        """See `SlabSource`. Also lends slabs that only this rank has back, as soon as a borrower would take them."""
        for event in self.coordinator.poll():
            if isinstance(event, LendOutcome):
                self._bring_home(event.kept)
            elif isinstance(event, SlabGivenBack):
                self._scrub([event.slab], _Scrubbing.GIVEN_BACK)
            elif isinstance(event, SlabQuarantined):
                logger.error(
                    "%s has not given back a slab in time: %d bytes are lost until it does, or ends",
                    event.borrower.name,
                    self.slabs.slab_bytes,
                )
            else:
                self._demand = event
        self._take_scrubbed()
        if self._demand.unmet_bytes and self._unused_since:
            self._lend_unused()
        return SlabReport(
            mapped=bytes(self._mapped),
            num_borrowable=-(-self._demand.unmet_bytes // self.slabs.slab_bytes),
            num_late=self.coordinator.status()["quarantined_slabs"],
            value_us=self._demand.value_us,
            lent_value_us=self._demand.lent_value_us,
        )

    def mark_in_use(self, mapped: bytes) -> None:
        """See `LentSlabs`."""
        here, agreed = (np.frombuffer(each, np.uint8) for each in (bytes(self._mapped), mapped))
        unused, now = np.flatnonzero(here > agreed).tolist(), monotonic()
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
            self.coordinator.recall(num_slabs - len(turned), self._options.timing.recall)

    def _lend_unused(self) -> None:
        """Other ranks have lent these slabs for some time."""
        long_ago = monotonic() - self._options.timing.offer
        unused = [slab for slab, since in self._unused_since.items() if since < long_ago]
        for slab in unused:
            self._mapped[slab] = 0
            del self._unused_since[slab]
        if unused:
            self.coordinator.lend(unused)

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
                self.coordinator.reclaim(slab)
            self._bring_home([slab])
        if to_lend:
            self.coordinator.lend(to_lend)

    def _bring_home(self, slabs: Sequence[int]) -> None:
        """No borrower has these slabs, which hold zeros."""
        for slab in slabs:
            self._mapped[slab] = 1

    def state(self) -> dict[str, Any]:
        """For people, as docs/reference/state.md lists it. Each slab counts once."""
        num_mapped, status = sum(self._mapped), self.coordinator.status()
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
            "slab_bytes": self.slabs.slab_bytes,
            "slab_padding_bytes": self.pool.slab_padding_bytes,
            "borrowers": status["borrowers"],
            "slabs": slabs,
            "copies": {"bytes": status["copied_bytes"], "refused": status["refused_copies"]},
            "problems": [self._options.problem] if self._options.problem else [],
        }

    def close(self) -> None:
        """Ends the threads. Borrowers keep what they have until they give it back or end."""
        self.coordinator.close()
        self._scrubber.close()
