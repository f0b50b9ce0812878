"""`SchedulerKvEventsPublisher`: hands what a scheduler's cache tells of its pages to a publisher, after each step."""

from __future__ import annotations

import time
from typing import Protocol

from sglang.srt.disaggregation.kv_events import EventBatch, KVEventsConfig
from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.mem_cache.block_store import BlockStore
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.storage.file.file_store import HiCacheFile
from sglang.srt.mem_cache.storage.guarded_store import GuardedStore
from sglang.srt.mem_cache.storage.tiered_store import parts_of
from sglang.srt.mem_cache.storage.windowed_store import WindowedStore
from sglang.srt.mem_cache.storage_link import StoreSlot
from sglang.srt.mem_cache.transfer import Tier


class EventPublisher(Protocol):
    """has_gap: a batch was dropped since all blocks were told. keeps_up: nothing waits to be sent."""

    has_gap: bool

    @property
    def keeps_up(self) -> bool: ...

    def publish(self, events: EventBatch) -> None: ...


class SchedulerKvEventsPublisher:
    """slot: the attached store, if there is a host tier."""

    def __init__(
        self, cache: KVCache, publisher: EventPublisher, config: KVEventsConfig, slot: StoreSlot | None
    ) -> None:
        self._publisher = publisher
        self._slot = slot
        self._recorder = KVCacheEventRecorder(cache.page_size, config.format, self._is_stored)
        self._tree = cache.tree
        cache.watch_pages(self._recorder)

    def publish_kv_events(self) -> None:
        if (disk := self._disk) is not None:
            self._recorder.lost(disk.take_given_up())
        events = self._recorder.take()
        if self._publisher.has_gap:
            # What follows a gap is of no use, until all is told anew. That is much, and waits until the rest is sent.
            if not self._publisher.keeps_up:
                return
            self._publisher.has_gap = False
            events = self._recorder.take_anew(self._tree.walk())
        if events:
            self._publisher.publish(EventBatch(time.time(), events))

    @property
    def _parts(self) -> list[BlockStore]:
        store = self._slot.store if self._slot is not None else None
        return parts_of(store) if store is not None else []

    @property
    def _disk(self) -> HiCacheFile | None:
        stores = [part.full if isinstance(part, WindowedStore) else part for part in self._parts]
        return next((store for store in stores if isinstance(store, HiCacheFile)), None)

    def _is_stored(self, tier: Tier, key: bytes) -> bool:
        if tier == Tier.DISK:
            disk = self._disk
            return disk is None or key in disk
        return not any(part.has_missed(key) for part in self._parts if isinstance(part, GuardedStore))
