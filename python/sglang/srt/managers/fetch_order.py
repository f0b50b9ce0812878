"""`FetchOrder`: the waiting requests that have blocks to fetch, in the order in which they are given the link.

Owns the order and nothing else. An entry's place changes only by `update`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from enum import Enum, auto

from sglang.srt.managers.prefetch import Prefetch
from sglang.srt.managers.schedule_policy import fetch_rank
from sglang.srt.mem_cache.block_keys import to_bytes

# Rank, arrival, id of the request.
_Entry = tuple[int, int, str]


class Attempt(Enum):
    """How an attempt to begin a fetch ends."""

    # There is more to begin.
    BEGUN = auto()
    # Its prefix is on its way to a tier that is read.
    STALLED = auto()
    # Enough is on its way from its store.
    BUSY = auto()
    # The host has no room yet.
    FULL = auto()
    # Nothing more is to be begun.
    OVER = auto()


class FetchOrder:
    """policy: one of `FETCH_ORDERS`."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._entries: dict[str, _Entry] = {}
        # The same in order, and beside it each one's blocks that are to be begun.
        self._sorted: list[_Entry] = []
        self._blocks: list[int] = []
        self._num_blocks = 0
        # The first block that storage was asked for -> those that asked for it.
        self._by_first_key: dict[bytes, dict[str, None]] = {}
        self._first_keys: dict[str, bytes] = {}
        self._num_arrived = 0

    def __contains__(self, rid: str) -> bool:
        return rid in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        """Of a copy: entries may change or leave meanwhile."""
        for _, _, rid in self._sorted.copy():
            yield rid

    def add(self, rid: str, prefetch: Prefetch) -> None:
        self._insert((self._rank(prefetch), self._num_arrived, rid), prefetch.blocks_left)
        self._num_arrived += 1
        first = prefetch.keys[prefetch.probed].tobytes()
        self._first_keys[rid] = first
        self._by_first_key.setdefault(first, {})[rid] = None

    def update(self, rid: str, prefetch: Prefetch) -> None:
        """Its blocks_left has changed; begun_before never does."""
        _, arrival, _ = self._take_out(rid)
        self._insert((self._rank(prefetch), arrival, rid), prefetch.blocks_left)

    def remove(self, rid: str) -> None:
        self._take_out(rid)
        first = self._first_keys.pop(rid)
        alike = self._by_first_key[first]
        del alike[rid]
        if not alike:
            del self._by_first_key[first]

    def blocks_before(self, prefetch: Prefetch) -> int:
        """Blocks that are begun before those of a request that comes now."""
        place = bisect_left(self._sorted, (self._rank(prefetch) + 1,))
        if 2 * place < len(self._blocks):
            return sum(self._blocks[:place])
        return self._num_blocks - sum(self._blocks[place:])

    def is_before(self, rid: str, other: str) -> bool:
        """Whether a request is given the link before another."""
        return self._entries[rid] < self._entries[other]

    def alike(self, prefetch: Prefetch, last: int) -> list[str]:
        """Those that first asked for a block among the request's own blocks [0, last]: all that lack block `last` of
        its prompt are among them."""
        found = (self._by_first_key.get(key) for key in to_bytes(prefetch.keys[: last + 1]))
        return [rid for rids in found if rids is not None for rid in rids]

    def check_invariants(self, prefetches: dict[str, Prefetch]) -> None:
        assert self._sorted == sorted(self._entries.values())
        assert self._blocks == [prefetches[rid].blocks_left for _, _, rid in self._sorted]
        assert self._num_blocks == sum(self._blocks)
        assert all(rank == self._rank(prefetches[rid]) for rank, _, rid in self._sorted)
        assert {r: k for k, rids in self._by_first_key.items() for r in rids} == self._first_keys
        assert self._first_keys.keys() == self._entries.keys()

    def _rank(self, prefetch: Prefetch) -> int:
        return fetch_rank(self._policy, prefetch.blocks_left, prefetch.begun_before)

    def _insert(self, entry: _Entry, num_blocks: int) -> None:
        place = bisect_left(self._sorted, entry)
        self._sorted.insert(place, entry)
        self._blocks.insert(place, num_blocks)
        self._num_blocks += num_blocks
        self._entries[entry[2]] = entry

    def _take_out(self, rid: str) -> _Entry:
        entry = self._entries.pop(rid)
        place = bisect_left(self._sorted, entry)
        del self._sorted[place]
        self._num_blocks -= self._blocks.pop(place)
        return entry
