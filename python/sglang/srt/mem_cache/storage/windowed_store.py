"""`WindowedStore`: a store of layers with full attention and one of those with a window, as one `BlockStore`. Owns
both.

For a host in which these layers have pages of their own (`HybridPages`): each store reads and writes one kind of them
where they lie. Of blocks that windows do not reach, the second one is not read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from sglang.srt.mem_cache.block_store import (
    BlockStore,
    OverlappingStore,
    TenantStore,
    TouchedStore,
    WindowStore,
    has_room,
)
from sglang.srt.mem_cache.transfer import Tier

logger = logging.getLogger(__name__)


@runtime_checkable
class FindingStore(Protocol):
    """A store that is a `WindowedStore`, or has one."""

    def find(self, keys: Sequence[bytes]) -> tuple[int, int]: ...


class WindowedStore:
    """windowed_of: pages of the host -> what they are in layers with a window, -1 for none; both int32. num_seen:
    blocks that windows reach from the end of a block. name, block_tokens, and blocks of `stats`: those of `full`."""

    def __init__(
        self,
        full: BlockStore,
        of_windows: WindowStore,
        windowed_of: Callable[[np.ndarray], np.ndarray],
        num_seen: int,
    ) -> None:
        assert full.block_tokens == of_windows.block_tokens
        self.name = full.name
        self.block_tokens = full.block_tokens
        self.full = full
        self.of_windows = of_windows
        self._windowed_of = windowed_of
        self._num_seen = num_seen

    @property
    def has_room(self) -> bool:
        return has_room(self.full) and has_room(self.of_windows)

    @property
    def is_synchronous(self) -> bool:
        return getattr(self.full, "is_synchronous", False)

    def exists(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are stored, up to one from whose end windows reach nothing that is not."""
        return self.find(keys)[0]

    def find(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """As `exists`, and how many leading blocks `full` has. Raises `ExistsFailed`."""
        count = self.full.exists(keys)
        return self.of_windows.longest_seen(keys[:count], self._num_seen) if count else 0, count

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        """Of blocks whose pages are none in layers with a window, these are left out."""
        return self._and_windows(keys, frames, self.full.get(keys, frames), self.of_windows.get)

    def set(self, keys: Sequence[bytes], frames: np.ndarray, tenant: bytes = b"") -> int:
        """As `get`. `full` is first, as `SharedRoom.begin_set` requires."""
        count = self.full.set(keys, frames, tenant)
        return self._and_windows(keys, frames, count, partial(self.of_windows.set, tenant=tenant))

    def _and_windows(
        self,
        keys: Sequence[bytes],
        frames: np.ndarray,
        count: int,
        carry_out: Callable[[Sequence[bytes], np.ndarray], int],
    ) -> int:
        """Of the leading `count` blocks also what their pages are in layers with a window. Returns how many of them
        are whole then."""
        if not count:
            return 0
        wanted, windowed = self._wanted(count, frames[: len(frames) // len(keys) * count])
        there = carry_out([keys[i] for i in wanted], windowed) if wanted else 0
        return count if there == len(wanted) else wanted[there]

    def _wanted(self, count: int, frames: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Of `count` blocks those that have pages in layers with a window, and these. frames: (n,) int32."""
        windowed = self._windowed_of(frames).reshape(count, -1)
        wanted = np.flatnonzero((windowed >= 0).all(axis=1)).tolist()
        return wanted, windowed[wanted].ravel()

    def touch(self, keys: Sequence[bytes]) -> int:
        """See TouchedStore. How much `full` has: of a path that was stored in part, windows lack in front."""
        if isinstance(self.of_windows, TouchedStore):
            self.of_windows.touch(keys)
        return self.full.touch(keys) if isinstance(self.full, TouchedStore) else len(keys)

    def erase(self, tenant: bytes, tier: Tier) -> bool:
        """See TenantStore."""
        parts = (self.full, self.of_windows)
        return all([isinstance(part, TenantStore) and part.erase(tenant, tier) for part in parts])

    def limit(self, tenant: bytes, num_blocks: int, tier: Tier) -> bool:
        """See TenantStore."""
        parts = (self.full, self.of_windows)
        return all([isinstance(part, TenantStore) and part.limit(tenant, num_blocks, tier) for part in parts])

    def clear(self) -> bool:
        return all([self.full.clear(), self.of_windows.clear()])

    def close(self) -> None:
        self.full.close()
        self.of_windows.close()

    def stats(self) -> dict[str, int]:
        full, of_windows = self.full.stats(), self.of_windows.stats()
        is_of_all = getattr(self.full, "is_of_all", lambda name: False)
        sums = {name: value if is_of_all(name) else value + of_windows.get(name, 0) for name, value in full.items()}
        blocks, others = full["blocks"], of_windows["blocks"]
        if is_of_all("blocks") and blocks and others:
            # Each takes all keys for those of its blocks.
            blocks = blocks * others // (blocks + others)
        return sums | {"blocks": blocks}


class OverlappingWindowedStore(WindowedStore):
    """Of two that can have several reads under way: both kinds of layers are read at once."""

    def start_get(
        self, keys: Sequence[bytes], frames: np.ndarray, on_end: Callable[[int], None]
    ) -> Callable[[], None]:
        """See OverlappingStore."""
        assert isinstance(self.full, OverlappingStore) and isinstance(self.of_windows, OverlappingStore)
        wanted, windowed = self._wanted(len(keys), frames)
        if not wanted:
            return self.full.start_get(keys, frames, on_end)
        both = _Both(on_end)

        def windows_ended(there: int) -> None:
            both.end(len(keys) if there == len(wanted) else wanted[there])

        give_up = self.full.start_get(keys, frames, both.end)
        try:
            give_up_windows = self.of_windows.start_get([keys[i] for i in wanted], windowed, windows_ended)
        except Exception as error:
            # The pages are the other read's until it ends.
            logger.warning("a read of layers with a window has not begun: %r", error)
            windows_ended(0)
            return give_up

        def give_both_up() -> None:
            give_up()
            give_up_windows()

        return give_both_up


class _Both:
    """The end of two reads, each of which ends once, from any thread. on_end: called with the smaller count."""

    def __init__(self, on_end: Callable[[int], None]) -> None:
        self._on_end = on_end
        self._lock = threading.Lock()
        self._counts: list[int] = []

    def end(self, count: int) -> None:
        with self._lock:
            self._counts.append(count)
            is_over = len(self._counts) == 2
        if is_over:
            self._on_end(min(self._counts))


def find(store: BlockStore, keys: Sequence[bytes]) -> tuple[int, int]:
    """See `WindowedStore.find`; of any store."""
    if isinstance(store, FindingStore):
        return store.find(keys)
    count = store.exists(keys)
    return count, count
