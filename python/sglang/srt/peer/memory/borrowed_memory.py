"""`BorrowedMemory`: a borrower's pool of slabs that lenders lend it, on one rank.

Owns the places (ranges of addresses) that slabs are mapped at, and the coordinator. What is at which place, and what
lenders are told, is `BorrowedPlaces`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.peer.borrowed_places import BorrowedOptions, BorrowedPlaces
from sglang.srt.peer.borrower_coordinator import BorrowerCoordinator
from sglang.srt.peer.memory.borrowed_pool import BorrowedPool
from sglang.srt.peer.memory.copy_session import StrictSlab
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig, reserve_slabs
from sglang.srt.peer.memory.slabs import SlabError
from sglang.srt.peer.protocol.borrower import SlabLent

# How much is unmapped at once: 8 ms of the scheduler's time where the lender is dead and the memory goes with the
# mapping, on a core of an AMD EPYC.
_UNMAPPED_BYTES = 32 << 20


class BorrowedMemory(BorrowedPlaces):
    """config.num_slabs places.

    pool: the pages in the places, of the given layout. endpoints, name, notify: see `BorrowerCoordinator`. leads: see
    `BorrowedPlaces`. On a GPU, slabs that a lender does not let be mapped (strict mode) are given back at once.
    Raises PeerError, SlabError, and ValueError where a slab has no room for a page.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        name: str,
        config: SlabsConfig,
        layout: PageLayout,
        notify: Callable[[], None] = lambda: None,
        options: BorrowedOptions | None = None,
        leads: bool = True,
    ) -> None:
        options = options or BorrowedOptions()
        self._notify = notify
        self.slabs = reserve_slabs(config, layout.page_bytes)
        self.pool = BorrowedPool(self.slabs, layout, notify)
        self.coordinator = BorrowerCoordinator(
            endpoints, name, layout.page_bytes, notify, options.timing.heartbeat, options.num_ranks
        )
        maps_only = config.device.type != "cpu"
        super().__init__(
            self.coordinator, endpoints, config.num_slabs, self.slabs.slab_bytes, options, maps_only, leads
        )
        self._released_at_once = max(1, _UNMAPPED_BYTES // self.slab_bytes)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "slab_padding_bytes": self.pool.slab_padding_bytes}

    def disconnect(self) -> None:
        """Called before the process ends, which unmaps all. The links may still use what is mapped."""
        self.coordinator.close()

    def close(self) -> None:
        """The links have ended before. What is mapped stays mapped until the process ends."""
        self.disconnect()
        self.pool.close()

    def _take(self, place: int, event: SlabLent) -> None:
        if event.fd is not None:
            self.slabs.map(place, event.fd)
            return
        if self._maps_only:
            raise SlabError("its worker has --peer-strict; a GPU uses what it maps alone")
        slab = StrictSlab(event.slab_socket, self.coordinator.id, event.lease, event.token)
        self.pool.reach_by_copies(place, slab)

    def _drop(self, event: SlabLent) -> None:
        if event.fd is not None:
            os.close(event.fd)

    def _release(self, place: int) -> None:
        if self.pool.is_strict(place):
            self.pool.forget(place)
        else:
            self.slabs.unmap(place)

    def _call_again(self) -> None:
        self._notify()

    def _is_strict(self, place: int) -> bool:
        return self.pool.is_strict(place)

    def _unusable(self) -> list[int]:
        return self.pool.unusable()

    def _left_alone_why(self, place: int) -> str:
        return self.pool.left_alone(place)

    def _stop_asking(self, place: int, reason: str) -> None:
        self.pool.leave_alone(place, reason)
