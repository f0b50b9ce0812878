"""A subscriber of KV events: what it believes of each medium, from the events alone."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import numpy as np

from sglang.srt.disaggregation.kv_events import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.namespaces import is_private, parts_of_namespace
from sglang.srt.mem_cache.node import path_of, root_of
from sglang.srt.mem_cache.page_hashes import PageHashes
from sglang.srt.mem_cache.transfer import FRAME_TIERS, TIER_NAMES, Tier
from support.memory_store import MemoryStore


class KvSubscriber:
    """An event that does not fit what came before it fails."""

    def __init__(self) -> None:
        # Medium -> hashes of the blocks that it has.
        self.blocks: dict[str, set[int]] = {}
        # Those that have ever had any.
        self.media: set[str] = set()
        # Hash -> all tokens of the prompt up to the block's end, for each block that was ever stored.
        self.prompts: dict[int, tuple[int, ...]] = {}
        # Blocks that came before those before them.
        self.orphans: set[int] = set()
        # The next number that is expected, and the gaps [first, end) that were seen.
        self.next = 0
        self.gaps: list[tuple[int, int]] = []

    def take(self, number: bytes, payload: bytes) -> None:
        """A message that came live or by replay. Earlier numbers are ignored."""
        n = int.from_bytes(number, "big")
        if n < self.next:
            return
        if n > self.next:
            self.gaps.append((self.next, n))
        self.next = n + 1
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert batch.attn_dp_rank == 0
        self.apply(batch.events)

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                assert event.medium is not None
                medium = self.blocks[event.medium]
                assert medium.issuperset(event.block_hashes), f"{event.medium} never had what it has lost"
                assert len(set(event.block_hashes)) == len(event.block_hashes)
                medium.difference_update(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.blocks = {}

    def _store(self, event: BlockStored) -> None:
        assert event.medium is not None
        self.media.add(event.medium)
        medium = self.blocks.setdefault(event.medium, set())
        size, last = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        for i, block in enumerate(event.block_hashes):
            assert block not in medium or event.medium == "EXTERNAL", f"{event.medium} has it already"
            medium.add(block)
            before = () if last is None else self.prompts.get(last)
            if before is None:
                self.orphans.add(block)
            else:
                prompt = before + tuple(event.token_ids[i * size : (i + 1) * size])
                assert self.prompts.setdefault(block, prompt) == prompt, "two prompts have one hash"
            last = block


class WatchedByRouter:
    """A cache and a subscriber of its events, which are compared. Now and then the subscriber misses some; then it is
    told all anew. stores: of its storage tiers."""

    def __init__(self, cache: KVCache, stores: list[MemoryStore], seed: int = 0) -> None:
        self.cache = cache
        self.stores = stores
        self.recorder = KVCacheEventRecorder(cache.page_size, is_stored=self._is_stored)
        self.subscriber = KvSubscriber()
        self._random = random.Random(f"{seed} gaps")
        self._has_gap = False
        cache.watch_pages(self.recorder)

    def take_events(self) -> None:
        disk = self._store_of(Tier.DISK)
        self.recorder.lost([key for key in self.recorder.on_disk if disk is None or key not in disk.blocks])
        events = self.recorder.take()
        self._has_gap = self._has_gap or self._random.random() < 0.005
        if not self._has_gap:
            self.subscriber.apply(events)
        elif self._random.random() < 0.2:
            self._end_gap()

    def _end_gap(self) -> None:
        self._has_gap = False
        self.subscriber.apply(self.recorder.take_anew(self.cache.tree.walk()))

    def check(self) -> None:
        """It has what is ready in the tree, and of the disk and the remote store nothing that was never there."""
        self.take_events()
        if self._has_gap:
            self._end_gap()
        tree, page = self.cache.tree, self.cache.page_size
        expected: dict[str, set[int]] = {MEDIA[TIER_NAMES[tier]]: set() for tier in FRAME_TIERS}
        for node in tree.walk():
            if is_private(namespace := root_of(node).namespace):
                continue
            salt, extra_key = parts_of_namespace(namespace)
            names = PageHashes(page, salt or None, extra_key or None, "default")
            tokens = np.concatenate([each.key for each in path_of(node)])
            hashes = names.published(names.chain(names.first, tokens))[node.start // page :]
            for tier in FRAME_TIERS:
                if node.frames[tier] is not None and node.tickets[tier] is None:
                    expected[MEDIA[TIER_NAMES[tier]]].update(hashes)
        for medium, blocks in expected.items():
            assert self.subscriber.blocks.get(medium, set()) == blocks, f"a router is wrong about {medium}"
        on_disk = {block for blocks in self.recorder.on_disk.values() for block in blocks}
        assert self.subscriber.blocks.get("DISK", set()) == on_disk
        if (disk := self._store_of(Tier.DISK)) is not None:
            assert self.recorder.on_disk.keys() <= disk.blocks.keys()

    def _store_of(self, tier: Tier) -> MemoryStore | None:
        tiers = self.cache.storage.tiers
        return self.stores[tiers.index(tier)] if tier in tiers and self.stores else None

    def _is_stored(self, tier: Tier, key: bytes) -> bool:
        store = self._store_of(tier)
        return store is not None and key in store.blocks
