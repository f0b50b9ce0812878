"""`BorrowedMemory`: a borrower's pool of slabs that lenders lend it, on one rank.

Owns the places (ranges of addresses) that slabs are mapped at, and knows which lease each place belongs to. Decides
nothing: the coordinator tells what was lent and recalled, the scheduler (`SlabLedger`) which slabs no request uses
any more.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.slab_ledger import SlabReport
from sglang.srt.peer.borrower_coordinator import BorrowerCoordinator
from sglang.srt.peer.memory.borrowed_pool import BorrowedPool
from sglang.srt.peer.memory.copy_session import StrictSlab
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig, reserve_slabs
from sglang.srt.peer.memory.slabs import SlabError
from sglang.srt.peer.protocol.borrower import LenderSilent, SlabLent, SlabLost, SlabRecalled
from sglang.srt.peer.protocol.messages import LeaseId

logger = logging.getLogger(__name__)


class BorrowedMemory:
    """`BorrowedSlabs` (mem_cache/slab_ledger.py): config.num_slabs places. Lenders must have slabs of the same size.

    pool: the pages in the places, of the given layout. endpoints, name, notify: see
    `BorrowerCoordinator`. On a GPU, slabs that a lender does not let be mapped (strict mode) are given back at once.
    Slabs of a strict lender that does not answer are not mapped, for the scheduler, until it does; the lease stays.
    Raises PeerError, SlabError, and ValueError where a slab has no room for a page.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        name: str,
        config: SlabsConfig,
        layout: PageLayout,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self._maps_only = config.device.type != "cpu"
        self.slabs = reserve_slabs(config, layout.page_bytes)
        self.pool = BorrowedPool(self.slabs, layout, notify)
        # Place -> lender and lease; None: the place is free.
        self._leases: list[tuple[str, LeaseId] | None] = [None] * config.num_slabs
        # A byte per place, see `SlabReport`.
        self._mapped = bytearray(config.num_slabs)
        # Places that all ranks have had mapped since `give_back` named them last.
        self._in_use: set[int] = set()
        # Places to be given back: recalled by their lenders, or lost.
        self._ending: set[int] = set()
        # Those whose lenders are gone.
        self._lost: set[int] = set()
        # Lenders that are left alone, and how often each was.
        self._left_alone: set[str] = set()
        self._times_left_alone: Counter[str] = Counter()
        self.coordinator = BorrowerCoordinator(endpoints, name, layout.page_bytes, notify)
        for endpoint in endpoints:
            self.coordinator.set_demand(endpoint, config.num_slabs * config.slab_bytes)

    def poll_mapped(self) -> SlabReport:
        """See `SlabSource`."""
        lost: Counter[tuple[str, bool]] = Counter()
        for event in self.coordinator.poll():
            if isinstance(event, SlabLent):
                self._borrow(event)
                continue
            if isinstance(event, LenderSilent):
                self._leave_alone(event.lender)
                continue
            place = next((i for i, lease in enumerate(self._leases) if lease == (event.lender, event.lease)), None)
            if place is None:
                continue  # it was given back at once
            self._mapped[place] = 0
            self._ending.add(place)
            if isinstance(event, SlabLost):
                self._lost.add(place)
                lost[event.lender, self.pool.is_strict(place)] += 1
            else:
                assert isinstance(event, SlabRecalled)
        for (lender, is_strict), count in lost.items():
            slabs = "1 slab" if count == 1 else f"{count} slabs"
            if is_strict:
                logger.warning("the worker at %s has reclaimed %s, or is gone", lender, slabs)
            else:
                logger.warning("the worker at %s is gone, and %s of its memory with it", lender, slabs)
        unusable = self.pool.unusable()
        if unusable or self._left_alone:
            self._note_left_alone()
        mapped, readable = bytearray(self._mapped), bytearray(b"\1" * len(self._mapped))
        for place in unusable:
            mapped[place] = readable[place] = 0
        for place in self._lost:
            # What is mapped is there as long as this process has it.
            readable[place] = not self.pool.is_strict(place)
        return SlabReport(bytes(mapped), readable=b"" if all(readable) else bytes(readable))

    def mark_in_use(self, mapped: bytes) -> None:
        """See `BorrowedSlabs`."""
        self._in_use.update(np.flatnonzero(np.frombuffer(mapped, np.uint8)).tolist())
        self._give_back_unused()

    def give_back(self, slabs: Sequence[int]) -> None:
        """See `BorrowedSlabs`. A slab that only another rank gives back stays here: it is used again when that rank
        is lent another one in its place."""
        self._in_use.difference_update(slabs)
        self._give_back_unused()

    def _give_back_unused(self) -> None:
        """Unmap places that are ending and not in use, and tell their lenders."""
        for place in self._ending - self._in_use:
            lease = self._leases[place]
            assert lease is not None
            if self.pool.is_strict(place):
                self.pool.forget(place)
            else:
                self.slabs.unmap(place)
            self._leases[place] = None
            self._ending.discard(place)
            if place in self._lost:
                self._lost.discard(place)
            else:
                self.coordinator.give_back(*lease)

    def state(self) -> dict[str, Any]:
        """For people, as docs/reference/state.md lists it."""
        held = Counter(lease[0] for lease in self._leases if lease is not None)
        ending = Counter(lease[0] for i in self._ending if (lease := self._leases[i]) is not None)
        lenders = [
            {
                "endpoint": lender,
                "connected": connected,
                "left_alone": lender in self._left_alone,
                "times_left_alone": self._times_left_alone[lender],
                "slabs": {"held": held[lender] - ending[lender], "asked_back": ending[lender]},
            }
            for lender, connected in self.coordinator.connected().items()
        ]
        return {
            "role": "master",
            "slab_bytes": self.slabs.slab_bytes,
            "slab_padding_bytes": self.pool.slab_padding_bytes,
            "lenders": lenders,
        }

    def disconnect(self) -> None:
        """Called before the process ends, which unmaps all. The links may still use what is mapped."""
        self.coordinator.close()

    def close(self) -> None:
        """The links have ended before. What is mapped stays mapped until the process ends."""
        self.disconnect()
        self.pool.close()

    def _leave_alone(self, lender: str) -> None:
        """The lender's heartbeats have stopped. What is mapped can be used without it."""
        for place, lease in enumerate(self._leases):
            if lease is not None and lease[0] == lender:
                self.pool.leave_alone(place, "it has sent no heartbeat for a while")

    def _note_left_alone(self) -> None:
        """A line in the log for each lender that is left alone, or used again, since the last call."""
        reasons = {
            lease[0]: reason
            for place, lease in enumerate(self._leases)
            if lease is not None and (reason := self.pool.left_alone(place))
        }
        for lender in reasons.keys() - self._left_alone:
            self._times_left_alone[lender] += 1
            logger.warning("the worker at %s is left alone until it answers: %s", lender, reasons[lender])
        for lender in self._left_alone - reasons.keys():
            logger.warning("the worker at %s is not left alone any more", lender)
        self._left_alone = set(reasons)

    def _borrow(self, event: SlabLent) -> None:
        """Map a slab, or have its lender copy it (strict mode). A slab that is of no use is given back at once."""
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
                self._borrow_strict(free, event)
        except SlabError as error:
            logger.error(
                "a slab from %s cannot be used: %s (see --peer-slab-size, on both sides)", event.lender, error
            )
            self.coordinator.give_back(event.lender, event.lease)
            return
        finally:
            if event.fd is not None:
                os.close(event.fd)
        self._leases[free] = (event.lender, event.lease)
        self._mapped[free] = 1

    def _borrow_strict(self, place: int, event: SlabLent) -> None:
        """Raises SlabError if the slab is of no use."""
        if self._maps_only:
            self.coordinator.set_demand(event.lender, 0)
            raise SlabError("its worker has --peer-strict; a GPU uses what it maps alone")
        slab = StrictSlab(event.slab_socket, self.coordinator.id, event.lease, event.token)
        self.pool.reach_by_copies(place, slab)
