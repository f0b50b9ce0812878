"""`BorrowedMemory`: a master's pool of slabs that workers lend it, on one rank.

Owns the addresses that slabs are mapped at, and who lent which. Decides nothing: the coordinator says what was lent
and asked back, the scheduler (`SlabLedger`) when nobody uses a slab any more.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sglang.srt.mem_cache.slab_ledger import SlabReport
from sglang.srt.peer.coordinator import BorrowerCoordinator
from sglang.srt.peer.memory.borrowed_pool import BorrowedPool
from sglang.srt.peer.memory.copy_session import StrictSlab
from sglang.srt.peer.memory.cuda_driver import CudaDriver
from sglang.srt.peer.memory.cuda_slabs import reserve_slabs
from sglang.srt.peer.memory.slabs import SlabError
from sglang.srt.peer.protocol.borrower import AskedBack, Lent, Lost
from sglang.srt.peer.protocol.messages import LeaseId
from sglang.srt.utils.device import CPU

logger = logging.getLogger(__name__)


class BorrowedMemory:
    """`BorrowedSlabs` (mem_cache/slab_ledger.py): num_slabs places for slabs of slab_bytes, which lenders must agree
    on.

    pool: the pages in them, of the shape that is given as for `ElasticPool`. endpoints, name, notify: see
    `BorrowerCoordinator`. maps_only: what a lender does not let be mapped (strict mode) is given back; on a GPU it
    always is. device, driver: see `reserve_slabs`. Raises PeerError, SlabError, and ValueError where a slab has no
    room for a page.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        name: str,
        num_slabs: int,
        slab_bytes: int,
        page_bytes: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        notify: Callable[[], None] = lambda: None,
        maps_only: bool = False,
        device: torch.device = CPU,
        driver: CudaDriver | None = None,
    ) -> None:
        self._maps_only = maps_only or device.type != "cpu"
        self.slabs = reserve_slabs(device, num_slabs, slab_bytes, page_bytes, driver)
        self.pool = BorrowedPool(self.slabs, *shape, dtype)
        # Place -> lender and lease; None where nothing is.
        self._leases: list[tuple[str, LeaseId] | None] = [None] * num_slabs
        self._here = bytearray(num_slabs)
        # Places that all ranks have had since they left last.
        self._in_use: set[int] = set()
        # Places that lenders want back, or whose lenders are gone.
        self._going: set[int] = set()
        self._lost: set[int] = set()
        self.coordinator = BorrowerCoordinator(endpoints, name, page_bytes, notify)
        for endpoint in endpoints:
            self.coordinator.want(endpoint, num_slabs * slab_bytes)

    def here(self) -> SlabReport:
        lost: Counter[tuple[str, bool]] = Counter()
        for event in self.coordinator.poll():
            if isinstance(event, Lent):
                self._take(event)
                continue
            place = next((i for i, lease in enumerate(self._leases) if lease == (event.lender, event.lease)), None)
            if place is None:
                continue  # it was given back at once
            self._here[place] = 0
            self._going.add(place)
            if isinstance(event, Lost):
                self._lost.add(place)
                lost[event.lender, self.pool.is_strict(place)] += 1
            else:
                assert isinstance(event, AskedBack)
        for (lender, is_strict), count in lost.items():
            slabs = "1 slab" if count == 1 else f"{count} slabs"
            if is_strict:
                logger.warning("the worker at %s has taken %s back, or is gone", lender, slabs)
            else:
                logger.warning("the worker at %s is gone, and %s of its memory with it", lender, slabs)
        return SlabReport(bytes(self._here))

    def agreed(self, here: bytes) -> None:
        self._in_use.update(np.flatnonzero(np.frombuffer(here, np.uint8)).tolist())
        self._give_back()

    def left(self, slabs: Sequence[int]) -> None:
        # What goes only on another rank stays here: it is used again with the next that that rank is lent.
        self._in_use.difference_update(slabs)
        self._give_back()

    def _give_back(self) -> None:
        for place in self._going - self._in_use:
            lease = self._leases[place]
            assert lease is not None
            if self.pool.is_strict(place):
                self.pool.forget(place)
            else:
                self.slabs.unmap(place)
            self._leases[place] = None
            self._going.discard(place)
            if place in self._lost:
                self._lost.discard(place)
            else:
                self.coordinator.unmapped(*lease)

    def state(self) -> dict[str, Any]:
        """For people, as docs/reference/state.md lists it."""
        held = Counter(lease[0] for lease in self._leases if lease is not None)
        going = Counter(lease[0] for i in self._going if (lease := self._leases[i]) is not None)
        lenders = [
            {
                "endpoint": lender,
                "connected": connected,
                "slabs": {"held": held[lender] - going[lender], "asked_back": going[lender]},
            }
            for lender, connected in self.coordinator.connected().items()
        ]
        return {"role": "master", "slab_bytes": self.slabs.slab_bytes, "lenders": lenders}

    def disconnect(self) -> None:
        """Before the process ends, which gives back what is mapped. The links may still be using it."""
        self.coordinator.close()

    def close(self) -> None:
        """The links have ended before. What is mapped stays mapped until the process ends."""
        self.disconnect()
        self.pool.close()

    def _take(self, event: Lent) -> None:
        """Map what was lent, unless its lender copies for itself; give it back at once if that cannot be."""
        try:
            free = next((i for i, lease in enumerate(self._leases) if lease is None), None)
            if free is None:
                raise SlabError("there is no place left for it")
            if event.size_bytes != self.slabs.slab_bytes:
                raise SlabError(
                    f"a slab of {event.size_bytes:,} bytes, where {self.slabs.slab_bytes:,} were agreed on"
                )
            if event.fd is not None:
                self.slabs.map(free, event.fd)
            else:
                self._take_strictly(free, event)
        except SlabError as error:
            logger.error(
                "a slab from %s cannot be used: %s (see --peer-slab-size, on both sides)", event.lender, error
            )
            self.coordinator.unmapped(event.lender, event.lease)
            return
        finally:
            if event.fd is not None:
                os.close(event.fd)
        self._leases[free] = (event.lender, event.lease)
        self._here[free] = 1

    def _take_strictly(self, place: int, event: Lent) -> None:
        """Raises SlabError if it is of no use."""
        if self._maps_only:
            self.coordinator.want(event.lender, 0)
            raise SlabError("its worker has --peer-strict; a GPU, and --layer-stream, use what they map alone")
        slab = StrictSlab(event.slab_socket, self.coordinator.id, event.lease, event.token)
        self.pool.reach_by_copies(place, slab)
