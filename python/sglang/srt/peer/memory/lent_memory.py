"""`LentMemory`: a worker's own pool, of slabs that it can lend, on one rank.

Owns the memory and says which slabs are at home. Decides nothing: the scheduler (`SlabLedger`) says which slabs
leave and how many come home, the coordinator to whom they go and when they are back. What nobody borrows waits here
for somebody who would. Slabs are overwritten with zeros on both ways.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang.srt.mem_cache.slab_ledger import SlabReport
from sglang.srt.peer.coordinator import LenderCoordinator
from sglang.srt.peer.memory.cuda_driver import CudaDriver
from sglang.srt.peer.memory.cuda_slabs import reserve_slabs
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from sglang.srt.peer.protocol.lender import Offered, Quarantined, ToScrub
from sglang.srt.utils.device import CPU

logger = logging.getLogger(__name__)

# What a borrower has to give a slab back, which takes it some launches and copies.
RECLAIM_TIMEOUT_S = 30.0


class LentMemory:
    """A `SlabSource` (mem_cache/slab_ledger.py) of num_slabs slabs of slab_bytes, all at home at first.

    pool: the engine's device pool in them, of the shape that is given as for `ElasticPool`. endpoint, directory,
    notify: see `LenderCoordinator`. strict: nobody maps what is lent, this process copies for them, in host memory.
    device, driver: see `reserve_slabs`. Raises PeerError, SlabError, and ValueError where a slab has no room for a
    page.
    """

    def __init__(
        self,
        endpoint: str,
        directory: Path,
        num_slabs: int,
        slab_bytes: int,
        page_bytes: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        notify: Callable[[], None] = lambda: None,
        strict: bool = False,
        device: torch.device = CPU,
        driver: CudaDriver | None = None,
    ) -> None:
        assert not strict or device.type == "cpu", "copies for others are made in host memory"
        self.slabs = reserve_slabs(device, num_slabs, slab_bytes, page_bytes, driver)
        self.slabs.allocate_all()
        self.pool = ElasticPool(self.slabs, *shape, dtype)
        self._here = bytearray(b"\1" * num_slabs)
        # Slabs that have left: those that nobody has borrowed yet, or any more, and those that were asked for.
        self._idle: set[int] = set()
        self._asked_for: set[int] = set()
        # What borrowers would like to have beyond what they have.
        self._unmet_bytes = 0
        self.coordinator = LenderCoordinator(
            endpoint, directory, num_slabs, slab_bytes, self.slabs.fileno, notify, strict
        )

    def here(self) -> SlabReport:
        for event in self.coordinator.poll():
            if isinstance(event, Offered):
                for slab in event.kept:
                    self._came_back(slab)
            elif isinstance(event, ToScrub):
                self.slabs.scrub(event.slab)
                self.coordinator.scrubbed(event.slab)
                self._came_back(event.slab)
            elif isinstance(event, Quarantined):
                logger.error(
                    "%s has not given back a slab in time: %d bytes are lost until it does, or ends",
                    event.borrower.name,
                    self.slabs.slab_bytes,
                )
            else:
                self._unmet_bytes = event.unmet_bytes
        if self._unmet_bytes and self._idle:
            # The highest first: the lowest are the first to be asked for.
            self.coordinator.offer(sorted(self._idle, reverse=True))
            self._idle.clear()
        late = self.coordinator.status()["quarantined_slabs"]
        borrowable = -(-self._unmet_bytes // self.slabs.slab_bytes)
        return SlabReport(bytes(self._here), borrowable, late)

    def left(self, slabs: Sequence[int]) -> None:
        for slab in slabs:
            self._here[slab] = 0
            self.slabs.scrub(slab)
        self.coordinator.offer(slabs)

    def wanted(self, num_slabs: int) -> None:
        """So many more should come home, the lowest of those that have left and were not asked for."""
        away = (slab for slab, is_here in enumerate(self._here) if not is_here and slab not in self._asked_for)
        lowest = [slab for slab, _ in zip(away, range(num_slabs))]
        self._asked_for.update(lowest)
        idle = self._idle.intersection(lowest)
        for slab in idle:
            self._idle.discard(slab)
            self._came_back(slab)
        self.coordinator.reclaim(len(lowest) - len(idle), RECLAIM_TIMEOUT_S)

    def _came_back(self, slab: int) -> None:
        """Nobody has borrowed it, or any more: it is zeros, and home if it was asked for."""
        if slab in self._asked_for:
            self._asked_for.discard(slab)
            self._here[slab] = 1
        else:
            self._idle.add(slab)

    def state(self) -> dict[str, Any]:
        """For people, as docs/reference/state.md lists it. Each slab counts once."""
        home, status = sum(self._here), self.coordinator.status()
        slabs = {
            "home": home,
            "lent": status["lent_slabs"],
            "asked_back": status["reclaiming_slabs"],
            "quarantined": status["quarantined_slabs"],
        }
        # The coordinator's counts are as new as its last event: whatever it counts has left here before.
        slabs["offered"] = len(self._here) - sum(slabs.values())
        return {
            "role": "worker",
            "slab_bytes": self.slabs.slab_bytes,
            "borrowers": status["borrowers"],
            "slabs": slabs,
            "copies": {"bytes": status["copied_bytes"], "refused": status["refused_copies"]},
        }

    def close(self) -> None:
        """Ends the coordinator. What is lent stays the borrowers' until they let go of it or end."""
        self.coordinator.close()
