"""`TieredStore`: a local store before a remote one, as one `BlockStore`. Owns both.

Blocks that the near store has are read there, the rest from the far one. Every block is written to both: each store
by itself then serves a prompt as far as its blocks reach. Either may fail or be empty without the other. A far store
that may hang is a `GuardedStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from sglang.srt.mem_cache.block_store import (
    BlockStore,
    ExistsFailed,
    OverlappingStore,
    TenantStore,
    TouchedStore,
    has_room,
)
from sglang.srt.mem_cache.storage.windowed_store import WindowedStore, find
from sglang.srt.mem_cache.transfer import Tier


class TieredStore:
    """near: its `exists` is called with every read, and has to be quick, such as an index in memory."""

    def __init__(self, near: BlockStore, far: BlockStore) -> None:
        assert near.block_tokens == far.block_tokens
        self.name = f"{near.name},{far.name}"
        self.block_tokens = near.block_tokens
        self.near = near
        self.far = far

    @property
    def has_room(self) -> bool:
        return has_room(self.near) and has_room(self.far)

    @property
    def is_synchronous(self) -> bool:
        """As the far store."""
        return getattr(self.far, "is_synchronous", False)

    def without(self, skips: tuple[int, ...]) -> TieredStore:
        """A view that leaves stores out. skips: 0 for the near one, 1 for the far one."""
        near, far = (_NoBlocks(self.block_tokens) if i in skips else part for i, part in enumerate(parts_of(self)))
        return TieredStore(near, far)

    def exists(self, keys: Sequence[bytes]) -> int:
        near, far, _ = self.locate(keys)
        return near + far

    def locate(self, keys: Sequence[bytes]) -> tuple[int, int, int]:
        """How many of the leading blocks the near store has, how many of the blocks behind them the far one, and how
        many leading ones one of them has in layers with full attention."""
        near, near_part = _find(self.near, keys)
        far, far_part = _find(self.far, keys[near:]) if near < len(keys) else (0, 0)
        return near, far, max(near_part, near + far_part)

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        count = self._get_near(keys, frames)
        return count + (self.far.get(*_from(count, keys, frames)) if count < len(keys) else 0)

    def start_get(
        self, keys: Sequence[bytes], frames: np.ndarray, on_end: Callable[[int], None]
    ) -> Callable[[], None]:
        """The near store's part is read before this returns."""
        count = self._get_near(keys, frames)
        if count == len(keys):
            on_end(count)
            return lambda: None
        rest = _from(count, keys, frames)
        if not isinstance(self.far, OverlappingStore):
            on_end(count + self.far.get(*rest))
            return lambda: None
        return self.far.start_get(*rest, partial(_add, count, on_end))

    def set(self, keys: Sequence[bytes], frames: np.ndarray, tenant: bytes = b"") -> int:
        """How many leading blocks at least one of the stores has taken."""
        return max(self.near.set(keys, frames, tenant), self.far.set(keys, frames, tenant))

    def erase(self, tenant: bytes, tier: Tier) -> bool:
        """See TenantStore."""
        store = self._store_of(tier)
        return isinstance(store, TenantStore) and store.erase(tenant, tier)

    def limit(self, tenant: bytes, num_blocks: int, tier: Tier) -> bool:
        """See TenantStore."""
        store = self._store_of(tier)
        return isinstance(store, TenantStore) and store.limit(tenant, num_blocks, tier)

    def _store_of(self, tier: Tier) -> BlockStore:
        return self.far if tier == Tier.REMOTE else self.near

    def touch(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks all stores have that are told; of one that fails it is not known that it has lost
        any."""
        count = len(keys)
        for store in (self.near, self.far):
            if isinstance(store, TouchedStore):
                with suppress(ExistsFailed):
                    count = min(count, store.touch(keys))
        return count

    def clear(self) -> bool:
        are_cleared = [store.clear() for store in (self.near, self.far)]
        return all(are_cleared)

    def close(self) -> None:
        self.near.close()
        self.far.close()

    def stats(self) -> dict[str, int]:
        """The near store's. For those of both, see `parts_of`."""
        return self.near.stats()

    def _get_near(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        # What windows do not reach from the end of a fetch need not be there.
        near = self.near
        exists = partial(near.exists_for, frames=frames) if isinstance(near, WindowedStore) else near.exists
        there = _count_existing(exists, keys)
        if not there:
            return 0
        return self.near.get(keys[:there], frames[: len(frames) // len(keys) * there])


class _NoBlocks:
    """A store that is left out."""

    name = ""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens

    def exists(self, keys: Sequence[bytes]) -> int:
        return 0

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        return 0

    def set(self, keys: Sequence[bytes], frames: np.ndarray, tenant: bytes = b"") -> int:
        return 0

    def clear(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def stats(self) -> dict[str, int]:
        return {}


def parts_of(store: BlockStore) -> list[BlockStore]:
    """The stores that a store consists of, nearest first."""
    return [store.near, store.far] if isinstance(store, TieredStore) else [store]


def _count_existing(exists: Callable[[Sequence[bytes]], int], keys: Sequence[bytes]) -> int:
    """0 if the store fails: the other one may have them. exists: the store's."""
    try:
        return exists(keys)
    except ExistsFailed:
        return 0


def _find(store: BlockStore, keys: Sequence[bytes]) -> tuple[int, int]:
    """See `WindowedStore.find`; (0, 0) if the store fails."""
    try:
        return find(store, keys)
    except ExistsFailed:
        return 0, 0


def _from(count: int, keys: Sequence[bytes], frames: np.ndarray) -> tuple[Sequence[bytes], np.ndarray]:
    return keys[count:], frames[len(frames) // len(keys) * count :]


def _add(count: int, on_end: Callable[[int], None], more: int) -> None:
    on_end(count + more)
