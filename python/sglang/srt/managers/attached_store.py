"""`AttachedStore`: one of the stores that are attached, the first (near) one or the one behind it.

Owns what is under way to it, whether it is left alone, and the operation that tries it. The first store also answers
probes, of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sglang.srt.managers.block_writer import BlockWriter
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.storage_breaker import StorageBreaker
from sglang.srt.managers.storage_setup import StorageSetup
from sglang.srt.managers.storage_trial import StorageTrial
from sglang.srt.mem_cache.transfer import FETCH_LINKS, PROBE, STORE_LINKS, StorageOp, Ticket
from sglang.srt.utils.time_units import Seconds

# Nothing waits for writes, so they may take that long.
_WRITE_HANG_S = 5.0


class AttachedStore:
    """place: 0 or 1. counters: takes what is counted. read_hang_s: the least time after which a read hangs.
    expected_s: what an operation is expected to take, in seconds; 0 while that is not known."""

    def __init__(
        self,
        place: int,
        controller: HiCacheController,
        counters: Counter[str],
        read_hang_s: float,
        expected_s: Callable[[StorageOp], float],
    ) -> None:
        self.place = place
        self.fetch_link = FETCH_LINKS[place]
        links = (self.fetch_link,) if place else (PROBE, self.fetch_link)
        self.reads = StorageBreaker(links, read_hang_s, expected_s)
        self.writes = StorageBreaker((STORE_LINKS[place],), _WRITE_HANG_S, expected_s)
        self.writer = BlockWriter(controller, counters, self.writes, place)
        self.trial = StorageTrial(controller, self.reads, place)
        # Whether an administrator wants nothing read.
        self.is_unread = False
        # Fetches under way, each with the place of its first block on its path, and the host pages that they fill.
        self.fetches: dict[Ticket, int] = {}
        self.fetching_pages = 0
        # How often reads had been given up at the last step; see `take_opened`.
        self._num_opened = 0

    @property
    def is_read(self) -> bool:
        return not (self.is_unread or self.reads.is_open)

    @property
    def breakers(self) -> tuple[StorageBreaker, StorageBreaker]:
        return self.reads, self.writes

    def open(self, setup: StorageSetup | None) -> None:
        """It was attached, emptied or detached; None: nothing is attached at this place any more."""
        self.writer.open(setup)
        self.trial.num_stores = len(setup.tiers) if setup is not None else 0
        self.is_unread = self.is_unread and setup is not None

    def reset(self) -> None:
        """Nothing is known of it any more."""
        self.reads.reset()
        self.writes.reset()

    def set_now(self, now: Seconds) -> None:
        self.reads.now = self.writes.now = now

    def take_opened(self) -> bool:
        """Whether reads have been given up since the last call; failures do that before a step looks."""
        has_opened = self.reads.is_open and self.reads.num_opened > self._num_opened
        self._num_opened = self.reads.num_opened
        return has_opened
