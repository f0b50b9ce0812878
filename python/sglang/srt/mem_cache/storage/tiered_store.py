"""`TieredStore`: a local store before a remote one. Owns both.

An operation reads or writes one of them; which, and what each gets, is decided above. A probe asks both, the far one
for the blocks behind those of the near one. Either may fail or be empty without the other. A far store that may hang
is a `GuardedStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from sglang.srt.mem_cache.block_store import BlockStore, ExistsFailed, OverlappingStore, TenantStore
from sglang.srt.mem_cache.storage.windowed_store import find
from sglang.srt.mem_cache.transfer import Tier


class TieredStore:
    def __init__(self, near: BlockStore, far: BlockStore) -> None:
        assert near.block_tokens == far.block_tokens
        self.name = f"{near.name},{far.name}"
        self.block_tokens = near.block_tokens
        self.near = near
        self.far = far

    @property
    def is_synchronous(self) -> bool:
        """As the far store."""
        return getattr(self.far, "is_synchronous", False)

    def only(self, skips: Collection[int]) -> BlockStore:
        """The store that is not left out. skips: 0 for the near one, 1 for the far one."""
        (store,) = (part for place, part in enumerate(parts_of(self)) if place not in skips)
        return store

    def locate(self, keys: Sequence[bytes], skips: Collection[int] = ()) -> tuple[int, int, int]:
        """How many of the leading blocks the near store has, how many of the blocks behind them the far one, and how
        many leading ones one of them has in layers with full attention. skips: those that are not asked."""
        near, near_part = _find(self.near, keys) if 0 not in skips else (0, 0)
        far, far_part = _find(self.far, keys[near:]) if 1 not in skips and near < len(keys) else (0, 0)
        return near, far, max(near_part, near + far_part)

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

    def clear(self) -> bool:
        are_cleared = [store.clear() for store in (self.near, self.far)]
        return all(are_cleared)

    def close(self) -> None:
        self.near.close()
        self.far.close()


class FallbackReads:
    """Reads of the far store, and from the near one what that lacks. It has no other method."""

    def __init__(self, stores: TieredStore) -> None:
        self._near, self._far = stores.near, stores.far

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        return self._and_near(keys, frames, self._far.get(keys, frames))

    def start_get(
        self, keys: Sequence[bytes], frames: np.ndarray, on_end: Callable[[int], None]
    ) -> Callable[[], None]:
        """See OverlappingStore. A store of another kind is read before this returns."""
        if not isinstance(self._far, OverlappingStore):
            on_end(self.get(keys, frames))
            return lambda: None
        return self._far.start_get(keys, frames, lambda count: on_end(self._and_near(keys, frames, count)))

    def _and_near(self, keys: Sequence[bytes], frames: np.ndarray, count: int) -> int:
        if count == len(keys):
            return count
        return count + self._near.get(keys[count:], frames[len(frames) // len(keys) * count :])


# What may be attached.
AnyStore = BlockStore | TieredStore


def parts_of(store: AnyStore) -> list[BlockStore]:
    """The stores that a store consists of, nearest first."""
    return [store.near, store.far] if isinstance(store, TieredStore) else [store]


def _find(store: BlockStore, keys: Sequence[bytes]) -> tuple[int, int]:
    """See `WindowedStore.find`; (0, 0) if the store fails: the other one may have them."""
    try:
        return find(store, keys)
    except ExistsFailed:
        return 0, 0
