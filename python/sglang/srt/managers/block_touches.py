"""`BlockTouches`: tells a store which of its blocks serve requests from memory, so that it keeps them, fronts first.

Owns the paths that are to be told, the operation that tells some of them, one at a time, and which blocks many of the
last requests used. The answer shows what storage has lost; `BlockWriter` stores it again. Nothing waits for it.

    a request starts on a path, or its end was stored --note--> pending --begin--> TOUCH --end--> lost blocks: stored
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.storage_setup import others_than
from sglang.srt.mem_cache.block_keys import to_bytes
from sglang.srt.mem_cache.block_names import NOT_STORED
from sglang.srt.mem_cache.node import Node, survivor_of
from sglang.srt.mem_cache.transfer import STORE_LINKS, StorageAction, Ticket

# Of paths that wait to be told.
_MAX_PENDING = 256
# Blocks of one operation, but for its first path.
_MAX_BLOCKS_PER_OP = 4096
# A block is shared by many if that share of so many requests used it.
_WINDOW = 64
_SHARED_BY = _WINDOW // 8
# Of each path, the leading blocks that are counted.
_MAX_COUNTED = 512
# For each block that is stored, full storage gets back so much of a lost one. What is not used is saved up to the
# second number, half of it for what many share. What memory uses may be more than storage holds.
_SHARE_BACK = 0.25
MAX_BACK = 128.0
# Holes that are remembered, and paths that storage got back.
_MAX_HOLES = 4096


@dataclass(frozen=True)
class _Told:
    """The part of an operation that is one path's."""

    end: Node
    # The places on the path of the blocks that are believed stored, (n,) int64, counted from the namespace's root.
    blocks: np.ndarray


class BlockTouches:
    """store_path: stores what the store lacks of a path. place: the store's."""

    def __init__(
        self, controller: HiCacheController, counters: Counter[str], store_path: Callable[[Node], None], place: int
    ) -> None:
        self.place = place
        self.ledger = controller.ledger
        self.tree = controller.tree
        self.counters = counters
        self.store_path = store_path
        # Whether what memory has of a path may never have been stored.
        self.catches_up = False
        # Whether storage is known to give up blocks for new ones.
        self.is_full = False
        # Whether it seems to: it had lost what it had just got back.
        self._evicts = False
        # Last blocks of paths that it got back and was not told of since, oldest first.
        self._got_back: dict[bytes, None] = {}
        # Blocks that it may get back.
        self.num_back = MAX_BACK
        # Blocks that full storage has lost and not got back, oldest first. What is behind them is not told: without
        # them it is of no use, and is to go first.
        self._holes: dict[bytes, None] = {}
        # What is under way.
        self.ticket: Ticket | None = None
        self._told: list[_Told] = []
        # Ends of paths, the oldest use first.
        self._pending: dict[int, Node] = {}
        # Blocks that each of the last requests used while storage was full, and how many requests used each.
        self._last: deque[list[bytes]] = deque()
        self._num_uses: Counter[bytes] = Counter()

    def close(self) -> None:
        """Begin nothing new."""
        self._pending, self._told, self._holes = {}, [], {}
        self._evicts, self._got_back = False, {}
        self._last.clear()
        self._num_uses.clear()

    def note(self, end: Node) -> None:
        """The path to `end` was used, or stored."""
        if (node := survivor_of(end)) is None:
            return
        self._pending.pop(node.id, None)
        self._pending[node.id] = node
        if len(self._pending) > _MAX_PENDING:
            del self._pending[next(iter(self._pending))]

    def note_stored(self, num_blocks: int) -> None:
        self.num_back = min(self.num_back + _SHARE_BACK * num_blocks, MAX_BACK)

    def note_request(self, end: Node) -> None:
        """A request starts on the path to `end`."""
        self.note(end)
        if not self._has_no_room:
            return
        keys = self._keys_of(self._named(end))
        used = to_bytes(np.concatenate(keys)[:_MAX_COUNTED]) if keys else []
        self._last.append(used)
        self._num_uses.update(used)
        if len(self._last) > _WINDOW:
            for each in self._last.popleft():
                self._num_uses[each] -= 1
                if not self._num_uses[each]:
                    del self._num_uses[each]

    @property
    def _has_no_room(self) -> bool:
        return self.is_full or self._evicts

    def begin(self, only_shared: bool) -> None:
        """Tell storage of some paths, unless it is being told. only_shared: only of blocks that many requests use, as
        storage is to have what memory lacks; what it lacks of them is stored."""
        if self.ticket is not None or not self._pending:
            return
        keys: list[np.ndarray] = []
        num_blocks = 0
        while self._pending and num_blocks < _MAX_BLOCKS_PER_OP:
            end = survivor_of(self._pending.pop(next(iter(self._pending))))
            if end is None:
                continue
            if self.catches_up and not only_shared:
                self.store_path(end)
            # It may have split or merged nodes of the path.
            path = self._named(end)
            if not path:
                continue
            of_path = np.concatenate(self._keys_of(path))
            stored = self.tree.names.stored_in(path, self.place)
            if only_shared:
                num_shared = self._num_shared(of_path)
                of_path, stored = of_path[:num_shared], stored[:num_shared]
                if not stored.all():
                    self.store_path(path[-1])
            if (hole := self._hole_of(of_path)) is not None:
                # It may be affordable now.
                self._note_lost(path[-1], np.arange(hole, len(of_path)))
                stored = stored[:hole]
            if not stored.any():
                continue
            blocks = np.flatnonzero(stored)
            keys.append(of_path[blocks])
            self._told.append(_Told(path[-1], blocks))
            num_blocks += len(blocks)
        if keys:
            joined = np.concatenate(keys)
            link, skips = STORE_LINKS[self.place], others_than(self.place, self.tree.names.num_stores)
            self.ticket = self.ledger.begin_storage_op(link, StorageAction.TOUCH, joined, skips=skips)

    def end(self, count: int) -> None:
        """count: see `StorageOp`."""
        assert self.ticket is not None
        self.ledger.end(self.ticket)
        told, self.ticket, self._told = self._told, None, []
        # 0: it is not known what is there.
        num_there = count - 1 if count else sum(len(each.blocks) for each in told)
        for each in told:
            if num_there >= len(each.blocks):
                num_there -= len(each.blocks)
                self._note_there(each.end)
                continue
            if num_there < 0:
                # Not known either.
                self.note(each.end)
            else:
                self._note_lost(each.end, each.blocks[num_there:])
            num_there = -1

    def _note_there(self, end: Node) -> None:
        """Storage has all that is believed stored of the path to `end`."""
        if not self._got_back or (node := survivor_of(end)) is None:
            return
        if keys := [each for each in self._keys_of(self._named(node)) if len(each)]:
            self._got_back.pop(keys[-1][-1].tobytes(), None)

    def _named(self, end: Node) -> list[Node]:
        """The nodes of the path to `end`, as far as their blocks have names."""
        return list(takewhile(lambda node: node.block_keys is not None, self.tree.path_of(end)))

    @staticmethod
    def _keys_of(path: list[Node]) -> list[np.ndarray]:
        return [node.block_keys for node in path]  # type: ignore[misc]

    def _num_shared(self, keys: np.ndarray) -> int:
        """How many of the leading blocks many of the last requests used."""
        uses = (self._num_uses[key] for key in to_bytes(keys[:_MAX_COUNTED]))
        return sum(1 for _ in takewhile(lambda count: count >= _SHARED_BY, uses))

    def _hole_of(self, keys: np.ndarray) -> int | None:
        """The first of the blocks that is known as a hole."""
        if not self._holes:
            return None
        return next((i for i, key in enumerate(to_bytes(keys)) if key in self._holes), None)

    def _note_lost(self, end: Node, blocks: np.ndarray) -> None:
        """Storage lacks the first of the blocks; of the others it may have some, which are not written twice."""
        node = survivor_of(end)
        path = self.tree.path_of(node) if node is not None else []
        if node is None or any(part.stored is None for part in path):
            return
        keys = np.concatenate(self._keys_of(path))
        hole, last = keys[blocks[0]].tobytes(), keys[-1].tobytes()
        self._holes.pop(hole, None)
        self._evicts |= last in self._got_back
        if self._has_no_room:
            is_shared = self._num_uses[hole] >= _SHARED_BY
            affordable = int(self.num_back - (0 if is_shared else MAX_BACK / 2))
            if affordable <= 0:
                self._holes[hole] = None
                if len(self._holes) > _MAX_HOLES:
                    del self._holes[next(iter(self._holes))]
                return
            # The front first.
            blocks = blocks[:affordable]
            self.num_back -= len(blocks)
        self.tree.names.mark_stored(path, self.place, blocks, NOT_STORED)
        self.counters["storage_losses"] += 1
        self._got_back[last] = None
        if len(self._got_back) > _MAX_HOLES:
            del self._got_back[next(iter(self._got_back))]
        self.store_path(node)
