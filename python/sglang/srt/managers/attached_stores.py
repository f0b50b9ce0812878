"""`AttachedStores`: the one or two stores that are attached, the nearest first. See `AttachedStore`.

Owns them, and asks or tells all of them. Of two, what is stored goes to each by a writer of its own. Nothing waits
for the second one's writes, which may be far slower than the first one's reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from sglang.srt.managers.attached_store import AttachedStore
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.storage_breaker import StorageBreaker
from sglang.srt.managers.storage_setup import StorageSetup
from sglang.srt.managers.storage_trial import StorageTrial
from sglang.srt.mem_cache.block_names import MAX_STORES
from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.transfer import FETCH_LINKS, STORE_LINKS, StorageOp, Ticket
from sglang.srt.utils.time_units import Seconds

# More than what a `GuardedStore` may take to answer.
_PROBE_S = 1.5


class AttachedStores:
    """counters, read_hang_s, expected_s: see `AttachedStore`."""

    def __init__(
        self,
        controller: HiCacheController,
        counters: Counter[str],
        read_hang_s: float,
        expected_s: Callable[[StorageOp], float],
    ) -> None:
        self.near, self.far = (
            AttachedStore(place, controller, counters, read_hang_s, expected_s) for place in range(MAX_STORES)
        )
        self._num_attached = 0
        controller.watch_host(self.store_nodes, self.store_leaving)
        controller.is_worth_storing = self.is_worth_storing

    def __iter__(self) -> Iterator[AttachedStore]:
        return iter((self.near, self.far)[: self._num_attached])

    def __len__(self) -> int:
        return self._num_attached

    def of_link(self, link: str) -> AttachedStore:
        """The store that a link reads or writes."""
        links = FETCH_LINKS if link in FETCH_LINKS else STORE_LINKS
        return (self.near, self.far)[links.index(link)]

    def open(self, setup: StorageSetup | None) -> None:
        """Storage was attached, emptied or detached."""
        self._num_attached = len(setup.tiers) if setup is not None else 0
        for store in (self.near, self.far):
            store.open(setup if store.place < self._num_attached else None)

    def close(self) -> None:
        """Begin no more writes."""
        for store in self:
            store.writer.close()

    def reset(self) -> None:
        """Nothing is known of them any more."""
        for store in (self.near, self.far):
            store.reset()

    def set_now(self, now: Seconds) -> None:
        for store in (self.near, self.far):
            store.set_now(now)

    def set_read_hang(self, seconds: float) -> None:
        """The least time after which a read hangs."""
        self.far.reads.hang_s = seconds
        # A probe asks both, and may wait for the second one.
        self.near.reads.hang_s = max(seconds, _PROBE_S) if len(self) > 1 else seconds

    # -- whether they are used ----------------------------------------------------------------------------------

    @property
    def is_read(self) -> bool:
        """Whether one of them is."""
        return any(store.is_read for store in self)

    @property
    def unread(self) -> tuple[int, ...]:
        """The places of those that are not read; see `StorageOp.skips`."""
        return tuple(store.place for store in self if not store.is_read)

    @property
    def breakers(self) -> list[StorageBreaker]:
        return [breaker for store in (self.near, self.far) for breaker in store.breakers]

    @property
    def write_hangs_at(self) -> float | None:
        """When a write hangs if none ends before; None: none can."""
        times = (store.writes.next_at for store in self)
        return min((at for at in times if at is not None), default=None)

    def trial_of(self, ticket: Ticket) -> StorageTrial | None:
        return next((store.trial for store in (self.near, self.far) if ticket == store.trial.ticket), None)

    # -- what is under way --------------------------------------------------------------------------------------

    @property
    def num_fetches(self) -> int:
        return sum(len(store.fetches) for store in self)

    @property
    def fetching_pages(self) -> int:
        """Host pages that reads are filling."""
        return self.near.fetching_pages + self.far.fetching_pages

    @property
    def storing_pages(self) -> int:
        """Host pages that writes hold on to."""
        return self.near.writer.storing_pages + self.far.writer.storing_pages

    @property
    def unawaited_links(self) -> list[str]:
        """Links whose operations are not waited for where the host has no room."""
        writes = [store.writer.link for store in self if not self._is_awaited(store)]
        return writes + [store.fetch_link for store in self if store.reads.is_open]

    @property
    def unawaited_pages(self) -> int:
        """Host pages that these operations hold."""
        writes = sum(store.writer.storing_pages for store in self if not self._is_awaited(store))
        return writes + sum(store.fetching_pages for store in self if store.reads.is_open)

    def _is_awaited(self, store: AttachedStore) -> bool:
        """Whether what needs room on the host waits for writes to a store."""
        return store is self.near and not store.writes.is_late

    # -- writing ------------------------------------------------------------------------------------------------

    def is_worth_storing(self, start: int, end: int) -> bool:
        """Whether tokens [start, end) of a path are worth it, for one of them."""
        return any(store.writer.is_worth_storing(start, end) for store in self)

    def store_nodes(self, nodes: list[Node]) -> None:
        """See `BlockWriter`, also for the following."""
        for store in self:
            store.writer.store_nodes(nodes)

    def store_leaving(self, nodes: list[Node]) -> None:
        for store in self:
            store.writer.store_leaving(nodes)

    def note_answer(self, end: Node, leaves_at: int) -> None:
        for store in self:
            store.writer.note_answer(end, leaves_at)

    def begin_step(self, num_pages: int) -> None:
        for store in self:
            store.writer.begin_step(num_pages)

    def note_request(self, end: Node) -> None:
        """A request starts on the path to `end`."""
        for store in self:
            store.writer.touches.note_request(end)

    def note_kept(self, end: Node) -> None:
        """The path to `end` is to be kept."""
        for store in self:
            store.writer.touches.note(end)

    @property
    def has_room(self) -> tuple[bool, ...]:
        """Of each place, whether its store can take more blocks without giving up others."""
        return tuple(store.writer.has_room for store in (self.near, self.far))

    def note_room(self, has_room: tuple[bool, ...]) -> None:
        for store in self:
            store.writer.touches.is_full = not has_room[store.place]

    @property
    def take_early(self) -> bool:
        """Whether one of them takes what is computed at once."""
        return any(not store.writer.stores_late for store in self)
