"""`BlockStore`: what a storage tier is to the engine.

A store keeps *blocks*: the KV of `block_tokens` tokens at a multiple of that offset, all layers, under a key that
depends on every token before it and on the namespace (see `HiRadixTree`). It is the truth about itself: what the tree
believes to be stored is a hint, and a block counts only if its read brings the bytes and the checksum agrees.

Calls block; `StorageLink` makes them on threads of its own. One `exists`, one `get` and one `set` may run at the same
time, `clear` and `close` only alone. No call raises for what can go wrong with a medium: the number of blocks that it
returns says how far it got, and the store logs why and counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np


class BlockStore(Protocol):
    """name: what a person calls the backend, as in --hicache-storage-backend. block_tokens: tokens per block, a
    multiple of the host pool's page size."""

    name: str
    block_tokens: int

    def exists(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are stored. keys: 16 bytes each, blocks of one prompt in order."""
        ...

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        """Read blocks into pages of the host pool. Returns how many leading blocks came whole and verified; the pages
        of the others hold anything. A block that does not verify is forgotten, so that it can be stored anew.

        frames: (len(keys) * block_tokens / page_size,) int32, block after block.
        """
        ...

    def set(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        """Store blocks from pages of the host pool. Returns how many leading ones are stored now, those that were
        there already included."""
        ...

    def clear(self) -> None:
        """Forget every block of this store's namespace."""
        ...

    def close(self) -> None:
        """Write down what a quick start needs; nothing is called afterwards."""
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
        """As `get`, without waiting: on_end(count) follows once, from any thread, perhaps before this returns; the
        pages are the store's until then. Returns a hint that nobody wants it any more, after which it still ends."""
        ...


class StoreError(ValueError):
    """A store cannot be opened as asked; one sentence that says what to do."""
