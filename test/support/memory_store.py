"""`MemoryStore`: a `BlockStore` in a dictionary, with faults injected by seed. The storage tier of the nets.

`OverlappingMemoryStore` has several reads under way on an emulated stream. Each writes into its pages when it pleases
until it says that it has ended, also after it was given up, so that whoever uses them again too early finds out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sglang.srt.mem_cache.block_store import longest_seen
from sglang.srt.mem_cache.storage.host_pages import HostPages
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.utils.stream import Stream


class MemoryStore:
    """blocks: key -> its bytes, page after page as a page-first pool has them. fail_rate: chance per block that it is
    lost when it is read, or not stored, or that a call raises. max_blocks: beyond that the oldest goes; 0 for any
    number."""

    name = "memory"

    def __init__(
        self,
        pool: HostPages,
        block_tokens: int,
        seed: int = 0,
        fail_rate: float = 0.0,
        max_blocks: int = 0,
    ) -> None:
        self.pool = pool
        # Those of which blocks have bytes; None for all.
        self.layers: list[int] | None = None
        self.block_tokens = block_tokens
        self.blocks: dict[bytes, np.ndarray] = {}
        self.is_open = True
        self._pages_per_block = block_tokens // pool.page_size
        self._random = random.Random(seed)
        self._fail_rate = fail_rate
        self._max_blocks = max_blocks
        # Key -> whose block it is, of all that were ever stored.
        self.tenants: dict[bytes, bytes] = {}
        self.limits: dict[tuple[bytes, Tier], int] = {}

    def exists(self, keys: Sequence[bytes]) -> int:
        self._maybe_raise()
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def longest_seen(self, keys: Sequence[bytes], num_seen: int) -> int:
        self._maybe_raise()
        return longest_seen([key in self.blocks for key in keys], num_seen)

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        self._maybe_raise()
        for i, (key, pages) in enumerate(zip(keys, self._pages_of(keys, frames))):
            if self._fails():
                self._tear(pages)
                self.blocks.pop(key, None)
            if key not in self.blocks:
                return i
            self.pool.copy_in(pages, self.blocks[key])
        return len(keys)

    def set(self, keys: Sequence[bytes], frames: np.ndarray, tenant: bytes = b"") -> int:
        self._maybe_raise()
        for i, (key, pages) in enumerate(zip(keys, self._pages_of(keys, frames))):
            self.tenants[key] = tenant
            if key not in self.blocks:
                if self._fails():
                    return i
                self.blocks[key] = np.empty(len(pages) * self.pool.page_bytes, np.uint8)
                self.pool.copy_out(pages, self.blocks[key])
                if len(self.blocks) > self._max_blocks > 0:
                    del self.blocks[next(iter(self.blocks))]
        return len(keys)

    def touch(self, keys: Sequence[bytes]) -> int:
        self._maybe_raise()
        for key in reversed(keys):
            if (block := self.blocks.pop(key, None)) is not None:
                self.blocks[key] = block
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def erase(self, tenant: bytes, tier: Tier) -> bool:
        self._maybe_raise()
        for key in [key for key in self.blocks if self.tenants[key] == tenant]:
            del self.blocks[key]
        return True

    def limit(self, tenant: bytes, num_blocks: int, tier: Tier) -> bool:
        self.limits[tenant, tier] = num_blocks
        return True

    def clear(self) -> bool:
        self.blocks.clear()
        return True

    def close(self) -> None:
        self.is_open = False

    def stats(self) -> dict[str, int]:
        size = sum(block.nbytes for block in self.blocks.values())
        return {"blocks": len(self.blocks), "size_bytes": size, "limit_bytes": 0, "read_errors": 0, "write_errors": 0}

    def _pages_of(self, keys: Sequence[bytes], frames: np.ndarray) -> np.ndarray:
        assert self.is_open, "the store is closed"
        return frames.reshape(len(keys), self._pages_per_block)

    def _tear(self, pages: np.ndarray) -> None:
        """What a read that was torn, or is not done, leaves behind."""
        self.pool.copy_in(pages, np.full(len(pages) * self.pool.page_bytes, 0xA5, np.uint8))

    def _fails(self) -> bool:
        return self._random.random() < self._fail_rate

    def _maybe_raise(self) -> None:
        if self._random.random() < self._fail_rate / 4:
            raise OSError("injected")


class _Read:
    """One that is under way. steps: what it still does, after which it ends."""

    def __init__(self, steps: Iterator[None], num_steps: int) -> None:
        self.steps = steps
        self.left = num_steps
        self.is_given_up = False

    def give_up(self) -> None:
        self.is_given_up = True


class OverlappingMemoryStore(MemoryStore):
    """stream: reads go on there a step at a time, whichever the seed picks."""

    def __init__(
        self, pool: HostPages, block_tokens: int, stream: Stream, seed: int = 0, fail_rate: float = 0.0
    ) -> None:
        super().__init__(pool, block_tokens, seed, fail_rate)
        self.under_way: list[_Read] = []
        self._stream = stream

    def start_get(
        self, keys: Sequence[bytes], frames: np.ndarray, on_end: Callable[[int], None]
    ) -> Callable[[], None]:
        self._maybe_raise()
        pages = self._pages_of(keys, frames)
        if self._fails():
            on_end(0)  # nothing to ask, as it turns out
            return lambda: None
        # A block is torn, then whole; now and then it takes its time, at the end too.
        waits = self._random.choice((0, 0, 30))
        read = _Read(iter(()), 2 * len(keys) + waits + 1)
        read.steps = self._read(read, keys, pages, waits, on_end)
        self.under_way.append(read)
        for _ in range(read.left):
            self._stream.enqueue(self._go_on)
        return read.give_up

    def clear(self) -> bool:
        assert not self.under_way, "the store is emptied while it is read"
        return super().clear()

    def close(self) -> None:
        assert not self.under_way, "the store is closed while it is read"
        super().close()

    def _go_on(self) -> None:
        read = self._random.choice(self.under_way)
        read.left -= 1
        if not read.left:
            self.under_way.remove(read)
        next(read.steps, None)

    def _read(
        self, read: _Read, keys: Sequence[bytes], pages: np.ndarray, waits: int, on_end: Callable[[int], None]
    ) -> Iterator[None]:
        """Blocks in any order. Once it is given up it brings nothing whole any more, and still touches its pages."""
        steps = [i for i in range(len(keys)) for _ in range(2)] + [-1] * waits
        self._random.shuffle(steps)
        touched, whole = set(), set()
        for i in steps:
            if i >= 0 and i not in touched:
                touched.add(i)
                self._tear(pages[i])
            elif i >= 0 and self._fails():
                self.blocks.pop(keys[i], None)
            elif i >= 0 and keys[i] in self.blocks and not read.is_given_up:
                whole.add(i)
                self.pool.copy_in(pages[i], self.blocks[keys[i]])
            elif i >= 0:
                self._tear(pages[i])
            yield
        on_end(next((i for i in range(len(keys)) if i not in whole), len(keys)))
