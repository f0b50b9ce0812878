"""`LentMemory`: a worker's own pool, of slabs that it can lend, on one rank.

Owns the memory and says which slabs are at home. Decides nothing: the scheduler (`SlabLedger`) says which slabs
leave, the coordinator to whom they go and when they are back. Slabs are overwritten with zeros on both ways.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sglang.srt.peer.coordinator import LenderCoordinator
from sglang.srt.peer.elastic_pool import ElasticPool
from sglang.srt.peer.elastic_units import stride_bytes
from sglang.srt.peer.lender import Offered, Quarantined, ToScrub
from sglang.srt.peer.slabs import GRANULARITY, SlabRange

logger = logging.getLogger(__name__)

# What a borrower has to give a slab back, which takes it some launches and copies.
RECLAIM_TIMEOUT_S = 30.0


class LentMemory:
    """A `SlabSource` (managers/slab_ledger.py) of num_slabs slabs of slab_bytes, all at home at first.

    pool: the engine's device pool in them, of the shape that is given as for `ElasticPool`. endpoint, directory,
    notify: see `LenderCoordinator`. Raises PeerError, and ValueError where a slab has no room for a page.
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
    ) -> None:
        self.slabs = SlabRange.owned(num_slabs, slab_bytes, stride_bytes(slab_bytes, page_bytes, GRANULARITY))
        self.pool = ElasticPool(self.slabs, *shape, dtype)
        self._here = bytearray(b"\1" * num_slabs)
        self.coordinator = LenderCoordinator(endpoint, directory, num_slabs, slab_bytes, self.slabs.fileno, notify)

    @property
    def frames(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of the pages in each slab, for `SlabLedger`."""
        each = (self.pool.frames_of(slab) for slab in range(self.slabs.num_slabs))
        return tuple((int(frames[0]), int(frames[-1]) + 1) for frames in each)

    def here(self) -> bytes:
        for event in self.coordinator.poll():
            if isinstance(event, Offered):
                for slab in event.kept:
                    self._here[slab] = 1
            elif isinstance(event, ToScrub):
                self.slabs.scrub(event.slab)
                self.coordinator.scrubbed(event.slab)
                self._here[event.slab] = 1
            elif isinstance(event, Quarantined):
                logger.error(
                    "%s has not given back a slab in time: %d bytes are lost until it does, or ends",
                    event.borrower.name,
                    self.slabs.slab_bytes,
                )
        return bytes(self._here)

    def left(self, slabs: Sequence[int]) -> None:
        for slab in slabs:
            self._here[slab] = 0
            self.slabs.scrub(slab)
        self.coordinator.offer(slabs)

    def wanted(self, num_slabs: int) -> None:
        """Ask so many slabs back."""
        self.coordinator.reclaim(num_slabs, RECLAIM_TIMEOUT_S)

    def close(self) -> None:
        self.coordinator.close()
