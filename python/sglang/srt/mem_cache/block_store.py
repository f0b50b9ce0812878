"""`BlockStore`: the interface of a storage tier to the engine.

A store keeps *blocks*: the KV of `block_tokens` tokens at a multiple of that offset, all layers. A block's key
depends on every token before it and on the namespace (see `HiRadixTree`). The tree's view of what is stored is a
hint. A block counts only if its read brings the bytes and the checksum agrees.

Calls block; `StorageLink` makes them on threads of its own. One `exists`, one `get` and one `set` may run at the same
time, `clear` and `close` only alone. The store logs a failure of the medium and counts it. No call but `exists`
raises for such a failure; it returns the number of blocks for which it succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sglang.srt.mem_cache.transfer import Tier

if TYPE_CHECKING:
    import numpy as np


class BlockStore(Protocol):
    """name: the backend's name, as in --hicache-storage-backend. block_tokens: tokens per block, a multiple of the
    host pool's page size. A store may have an attribute `has_room`: whether it can take more blocks without giving up
    others; and a method `is_of_all(name)`: whether what `stats` tells under a name is told by others on the same
    medium, too."""

    name: str
    block_tokens: int

    def exists(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are stored. keys: 16 bytes each, blocks of one prompt in order. Raises
        `ExistsFailed` where a failure of the medium keeps it from knowing."""
        ...

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        """Read blocks into pages of the host pool. Returns how many leading blocks were read whole and verified. The
        pages of the other blocks hold anything. A block that does not verify is forgotten, so that it can be stored
        again.

        frames: (len(keys) * block_tokens / page_size,) int32, block after block.
        """
        ...

    def set(self, keys: Sequence[bytes], frames: np.ndarray, tenant: bytes = b"") -> int:
        """Store blocks from pages of the host pool. Returns how many leading blocks are stored now. Blocks that were
        stored before are included. tenant: whose they are, see `TenantStore`."""
        ...

    def clear(self) -> bool:
        """Forget every block of this store's namespace. False: not all are gone, or they come back when the store is
        opened again; the log has the reason."""
        ...

    def close(self) -> None:
        """Write down what a quick start needs. No calls follow."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters and sizes for metrics and `/hicache/state`: at least `blocks`, `size_bytes`, `limit_bytes` (0:
        none), `read_errors` and `write_errors`. Called from another thread at any time."""
        ...


@runtime_checkable
class OverlappingStore(Protocol):
    """A `BlockStore` that can have several reads under way; `exists` and `set` may run beside all of them."""

    def start_get(
        self, keys: Sequence[bytes], frames: np.ndarray, on_end: Callable[[int], None]
    ) -> Callable[[], None]:
        """As `get`, without waiting. on_end(count) follows once, from any thread, perhaps before this returns. The
        store owns the pages until then. Returns a function that hints that the result is not needed any more; on_end
        follows all the same."""
        ...


@runtime_checkable
class TouchedStore(Protocol):
    """A `BlockStore` that gives up what was used least recently, and is told what memory serves. May run beside
    `exists` and `get`."""

    def touch(self, keys: Sequence[bytes]) -> int:
        """These blocks are in use: of each prompt the front most of all. keys: of one prompt or several, each in
        order. Returns how many of the leading keys are stored; those behind count as used all the same. Raises
        `ExistsFailed` where a failure of the medium keeps it from knowing."""
        ...


@runtime_checkable
class TenantStore(Protocol):
    """A `BlockStore` that knows whose blocks are whose. tenant: see `BlockKeys.tenant`. Neither call may run beside
    `set`."""

    def erase(self, tenant: bytes, tier: Tier) -> bool:
        """Drop all blocks of a tenant, so that the medium does not have their bytes any more. tier: DISK or REMOTE,
        for a store that has both. False: not all are gone; the log has the reason."""
        ...

    def limit(self, tenant: bytes, num_blocks: int, tier: Tier) -> bool:
        """Keep at most so many blocks of a tenant from now on, below 0 as many as there are: what is over goes, the
        least recently used first. tier: as of `erase`. False: the store cannot do that;
        the log has the reason."""
        ...


@runtime_checkable
class WindowStore(BlockStore, Protocol):
    """A `BlockStore` of layers with a window, of which it need not have every block."""

    def longest_seen(self, keys: Sequence[bytes], num_seen: int) -> int:
        """The most leading keys of which the last num_seen are stored, or all if these are fewer. Raises
        `ExistsFailed` as `exists` does."""
        ...


def longest_seen(are_stored: Sequence[bool], num_seen: int) -> int:
    """See `WindowStore`."""
    end = len(are_stored)
    for i in range(end - 1, -1, -1):
        if not are_stored[i]:
            end = i
        elif end - i >= num_seen:
            break
    return end


def has_room(store: BlockStore | None) -> bool:
    """Whether the store can take more blocks without giving up others; a store that does not tell is taken to be
    without a limit."""
    return getattr(store, "has_room", True)


class ExistsFailed(Exception):
    """The medium did not tell what it has; the store has logged why."""


class StoreError(ValueError):
    """A store cannot be opened as asked; the message is one sentence with the remedy."""
