"""`LentMemory`: a lender's device pool, in slabs that it can lend, on one rank.

Owns the memory and knows which slabs this rank may use. Decides nothing: the scheduler (`DeviceLending`) chooses the
slabs to lend and how many to recall, the coordinator which borrower gets them. Slabs that no borrower takes wait here
for one that would. A slab is overwritten with zeros before it is lent and after it was given back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.slab_ledger import SlabReport
from sglang.srt.peer.lender_coordinator import LenderCoordinator
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig, reserve_slabs
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from sglang.srt.peer.memory.slabs import SlabFiles
from sglang.srt.peer.protocol.lender import LendOutcome, SlabGivenBack, SlabQuarantined

logger = logging.getLogger(__name__)

# The deadline of a recall. To give a slab back takes a borrower some launches and copies.
RECALL_TIMEOUT_S = 30.0


class LentMemory:
    """`LentSlabs` (mem_cache/slab_ledger.py).

    pool: the engine's device pool in the slabs, of the given layout. endpoint, directory,
    notify: see `LenderCoordinator`. strict: borrowers map nothing, this process copies for them, in host memory.
    Raises PeerError, SlabError, and ValueError where a slab has no room for a page.
    """

    def __init__(
        self,
        endpoint: str,
        directory: Path,
        config: SlabsConfig,
        layout: PageLayout,
        notify: Callable[[], None] = lambda: None,
        strict: bool = False,
    ) -> None:
        assert not strict or config.device.type == "cpu", "copies for borrowers are made in host memory"
        self.slabs = reserve_slabs(config, layout.page_bytes)
        self.slabs.allocate_all()
        self.pool = ElasticPool(self.slabs, layout)
        # A byte per slab, see `SlabReport`.
        self._mapped = bytearray(b"\1" * config.num_slabs)
        # Unmapped slabs that no borrower has.
        self._unborrowed: set[int] = set()
        # Unmapped slabs that the scheduler has recalled.
        self._recalled: set[int] = set()
        # What borrowers would like to have beyond what they have.
        self._unmet_bytes = 0
        files = SlabFiles(config.num_slabs, config.slab_bytes, self.slabs.fileno)
        self.coordinator = LenderCoordinator(endpoint, directory, files, notify, strict)

    def poll_mapped(self) -> SlabReport:
        """See `SlabSource`. Also lends slabs that no borrower has, as soon as one would take them."""
        for event in self.coordinator.poll():
            if isinstance(event, LendOutcome):
                for slab in event.kept:
                    self._get_back(slab)
            elif isinstance(event, SlabGivenBack):
                self.slabs.scrub(event.slab)
                self.coordinator.reclaim(event.slab)
                self._get_back(event.slab)
            elif isinstance(event, SlabQuarantined):
                logger.error(
                    "%s has not given back a slab in time: %d bytes are lost until it does, or ends",
                    event.borrower.name,
                    self.slabs.slab_bytes,
                )
            else:
                self._unmet_bytes = event.unmet_bytes
        if self._unmet_bytes and self._unborrowed:
            self.coordinator.lend(sorted(self._unborrowed, reverse=True))
            self._unborrowed.clear()
        return SlabReport(
            mapped=bytes(self._mapped),
            num_borrowable=-(-self._unmet_bytes // self.slabs.slab_bytes),
            num_late=self.coordinator.status()["quarantined_slabs"],
        )

    def lend(self, slabs: Sequence[int]) -> None:
        """See `LentSlabs`."""
        for slab in slabs:
            self._mapped[slab] = 0
            self.slabs.scrub(slab)
        self.coordinator.lend(slabs)

    def recall(self, num_slabs: int) -> None:
        """See `LentSlabs`. A slab that no borrower has is mapped again at once."""
        unmapped = (
            slab for slab, is_mapped in enumerate(self._mapped) if not is_mapped and slab not in self._recalled
        )
        lowest = [slab for slab, _ in zip(unmapped, range(num_slabs))]
        self._recalled.update(lowest)
        unborrowed = self._unborrowed.intersection(lowest)
        for slab in unborrowed:
            self._unborrowed.discard(slab)
            self._get_back(slab)
        self.coordinator.recall(len(lowest) - len(unborrowed), RECALL_TIMEOUT_S)

    def _get_back(self, slab: int) -> None:
        """No borrower has the slab, which holds zeros. It is mapped again if it was recalled."""
        if slab in self._recalled:
            self._recalled.discard(slab)
            self._mapped[slab] = 1
        else:
            self._unborrowed.add(slab)

    def state(self) -> dict[str, Any]:
        """For people, as docs/reference/state.md lists it. Each slab counts once."""
        num_mapped, status = sum(self._mapped), self.coordinator.status()
        slabs = {
            "home": num_mapped,
            "lent": status["granted_slabs"] + status["held_slabs"],
            "asked_back": status["recalled_slabs"],
            "quarantined": status["quarantined_slabs"],
        }
        # The coordinator's counts are as new as its last event: every slab that it counts is unmapped here.
        slabs["offered"] = len(self._mapped) - sum(slabs.values())
        return {
            "role": "worker",
            "slab_bytes": self.slabs.slab_bytes,
            "slab_padding_bytes": self.pool.slab_padding_bytes,
            "borrowers": status["borrowers"],
            "slabs": slabs,
            "copies": {"bytes": status["copied_bytes"], "refused": status["refused_copies"]},
        }

    def close(self) -> None:
        """Ends the coordinator. Borrowers keep what they have until they give it back or end."""
        self.coordinator.close()
