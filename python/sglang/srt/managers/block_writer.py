"""`BlockWriter`: what of the host goes to a store, and when. Of two stores each has one, so that neither waits for
the other.

Owns the writes in flight and the paths that wait for room; the host keeps these longer than others, by soft pins. All
goes through the host: `store_nodes` is called when a copy has brought nodes there, `begin_step` in every step.

    storage has room     what comes to the host is stored at once
    the disk is full     with the policy auto, what the host gives up next is stored, so that memory and disk hold
                         different blocks

Blocks are written a few at a time. Lossy KV is never written under a name that promises exact bytes.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from itertools import takewhile

import numpy as np

from sglang.srt.managers.block_touches import BlockTouches
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.storage_breaker import StorageBreaker
from sglang.srt.managers.storage_setup import StorageSetup, others_than
from sglang.srt.managers.window_blocks import WindowBlocks, ends_within
from sglang.srt.mem_cache.block_names import NOT_STORED, STORED, WITHOUT_WINDOWS
from sglang.srt.mem_cache.namespaces import is_alone, salt_of
from sglang.srt.mem_cache.node import Node, is_ready, is_whole, survivor_of
from sglang.srt.mem_cache.transfer import FRAME_TIERS, STORE_LINKS, StorageAction, StorageOp, Ticket, Tier
from sglang.srt.utils.time_units import Seconds

# Paths that are to be stored when there is room: the most that are remembered, and when those that have left the tree
# are looked for.
_MAX_DEFERRED_STORES = 4096
_TIDY_DEFERRED_STORES = 64
# While storing is not worth it, a block now and then shows whether it has become faster. It holds host pages, so that
# the next one waits so many times as long as the last one took, and so many seconds at most.
_TRIAL_PAUSE_TIMES, _MAX_TRIAL_PAUSE_S = 4.0, 32.0
# See `_most_windowed_pages`.
_STORED_SHARE = 8


class BlockWriter:
    """counters: takes what is counted. breaker: of writes to the store. place: the store's."""

    def __init__(
        self, controller: HiCacheController, counters: Counter[str], breaker: StorageBreaker, place: int = 0
    ) -> None:
        self.place = place
        self.link = STORE_LINKS[place]
        self.controller = controller
        self.ledger = controller.ledger
        self.tree = controller.tree
        self.counters = counters
        self.breaker = breaker
        # None while the store is not attached, or is being emptied or detached.
        self.setup: StorageSetup | None = None
        # None where all layers of a block are stored.
        self._window_blocks: WindowBlocks | None = None
        # Whether an administrator wants nothing stored.
        self.is_off = False
        # Host pages that writes hold on to.
        self.storing_pages = 0
        self.touches = BlockTouches(controller, counters, self.store_path, place)
        # Ends of paths that are to be stored when writes have ended, oldest first.
        self._deferred: dict[int, Node] = {}
        # Those of them that are soft-pinned.
        self.pinned: dict[int, Node] = {}
        self._tidy_at = _TIDY_DEFERRED_STORES
        # Whether tokens [start, end) of a path are worth it.
        self.is_worth_storing: Callable[[int, int], bool] = lambda start, end: True
        # The write that shows whether storage has become faster, when it began, and when the next one may.
        self._trial: Ticket | None = None
        self._trial_began = self._next_trial_at = Seconds(-math.inf)

    @property
    def has_room(self) -> bool:
        """Whether storage can take more blocks without giving up others."""
        return not self.touches.is_full

    def open(self, setup: StorageSetup | None) -> None:
        """Storage was attached, emptied or detached. None: nothing at this place is attached any more."""
        self.setup = setup
        self._window_blocks = None
        if setup is not None and setup.has_windowed_store:
            num_seen = -(-self.tree.windows.num_tokens // setup.block_tokens)
            self._window_blocks = WindowBlocks(setup.block_tokens, num_seen)
        # What memory has by now is stored when it is used.
        self.touches.catches_up = setup is not None and any(map(self.tree.resident_pages, FRAME_TIERS))
        self._trial, self._next_trial_at = None, Seconds(-math.inf)

    def close(self) -> None:
        """Begin nothing new."""
        self.unpin()
        self.touches.close()
        self.setup, self._deferred = None, {}

    def obey_switch(self, is_off: bool) -> None:
        """See `TierSwitches`."""
        if is_off and not self.is_off:
            self.unpin()
            self.touches.close()
            self._deferred = {}
        # What was not stored meanwhile is, when it is used.
        self.touches.catches_up |= self.is_off and not is_off
        self.is_off = is_off

    def unpin(self) -> None:
        """What waits for room is kept no longer than anything else."""
        for node in self.pinned.values():
            self.tree.end_soft_pin(node)
        self.pinned = {}

    def end(self, ticket: Ticket, count: int) -> None:
        """The first `count` blocks are stored, on every rank. The others are marked as stored too, until a request
        misses them and computes them."""
        if ticket == self.touches.ticket:
            self.breaker.answer(self.link)
            self.touches.end(count)
            return
        op = self.ledger.end(ticket)
        assert isinstance(op, StorageOp)
        self.storing_pages -= len(op.frames)
        if ticket == self._trial:
            now = self.breaker.now
            pause_s = min(_TRIAL_PAUSE_TIMES * (now - self._trial_began), _MAX_TRIAL_PAUSE_S)
            self._trial, self._next_trial_at = None, Seconds(now + pause_s)
        self.breaker.end(self.link, succeeded=count > 0)
        self.touches.note_stored(count)
        self.tree.pages.stored(ticket, count, op.skips)
        block_tokens = len(op.frames) * self.tree.page_size // len(op.keys)
        self.counters["backuped_tokens"] += count * block_tokens
        self.counters["storage_backup_failed_tokens"] += (len(op.keys) - count) * block_tokens
        while self._deferred and self._num_storable_blocks() > 0:
            end = self._deferred.pop(next(iter(self._deferred)))
            was_pinned = self.pinned.pop(end.id, None) is not None
            if (node := survivor_of(end)) is not None:
                self.store_path(node)
            if was_pinned:
                self.tree.end_soft_pin(end)

    def note_answer(self, end: Node, leaves_at: int) -> None:
        """A prompt was answered, and its path ends with `end`. leaves_at: see `Prefetch`. The host may have had the
        path before that was known."""
        blocks, names = self._window_blocks, self.tree.names
        if blocks is None or names.keys is None or is_alone(self.tree.root_of(end).namespace):
            return
        names.name_path(end)
        for node in ends_within(self.tree.path_of(end)):
            names.note_seen(node, *blocks.seen_from(node.end))
        for place in (leaves_at, end.asked_end, end.end):
            names.note_seen(end, *blocks.seen_from(place))
        if not self.stores_late:
            self.store_path(end)

    def store_nodes(self, nodes: list[Node]) -> None:
        """Copies have brought these nodes to the host: store what lacks no page any more."""
        if not self.stores_late:
            self._store_ends(nodes)

    def store_leaving(self, nodes: list[Node]) -> None:
        """The host has these nodes whole, and soon partial: what storage lacks of them is stored before."""
        if not self.is_off:
            self._store_ends(self.tree.take_to_store(nodes, self.place) if self.stores_late else nodes)

    def _store_ends(self, nodes: list[Node]) -> None:
        if self.setup is None or self.tree.names.keys is None:
            return
        size, above = self.tree.names.keys.block_tokens, {id(node.parent) for node in nodes}
        for node in nodes:
            if id(node) not in above:
                self.store_path(node)
            if node.end % size:
                # The last block ends below.
                for child in list(node.children.values()):
                    if self._can_store(child):
                        self.store_path(child)

    @property
    def stores_late(self) -> bool:
        """Whether only what leaves memory is stored. What the disk still has is not written again."""
        return self.setup is not None and self.setup.is_exclusive(self.place) and not self.has_room

    def begin_step(self, num_pages: int) -> None:
        """Tell storage what is used, and store what the host gives up next, with num_pages to spare, where storage is
        full."""
        if self.is_off or self.setup is None:
            return
        # What is lost and counts as stored gives an open breaker no write to try, unless storage is asked for it.
        if not self.breaker.is_open or self.breaker.may_try:
            self.touches.begin(only_shared=self.stores_late)
        if self.stores_late:
            self._store_ahead(num_pages)

    def _store_ahead(self, num_pages: int) -> None:
        if wanted := self.controller.num_to_look_at(Tier.HOST, num_pages):
            self._store_ends(self.tree.take_to_store(self.tree.victims(Tier.HOST, wanted), self.place))
            self.controller.num_looked_at[Tier.HOST] = wanted

    def store_path(self, end: Node) -> None:
        """Write to storage what it is not believed to have of the path to `end`, as far as that is on the host, and
        exact if storage is: lossy KV is never written under a name that promises exact bytes."""
        if self.setup is None or self.is_off or is_alone(self.tree.root_of(end).namespace):
            return
        tree, page = self.tree, self.tree.page_size
        path = tree.path_of(end)
        if not self.setup.is_lossy:
            path = list(takewhile(lambda node: not node.is_lossy, path))
        while path and not self._can_store(path[-1]):
            path.pop()
        if not path:
            return
        end = path[-1]
        tree.names.name_path(end)
        assert tree.names.keys is not None
        size = tree.names.keys.block_tokens
        wanted = self._window_blocks.of(path) if self._window_blocks is not None else None
        first = self._first_lacking(path, wanted)
        if first is None:
            return
        tenant = tree.names.keys.tenant(salt_of(tree.root_of(end).namespace))
        # The first block may begin in a node above.
        begin, top = path[first].start // size * size, first
        while path[top].start > begin:
            top -= 1
        keys = np.concatenate([n.block_keys for n in path[first:]])  # type: ignore[misc]
        stored = tree.names.stored_in(path[first:], self.place)
        by_page = np.concatenate([self._host_frames(n) for n in path[top:]])[(begin - path[top].start) // page :]
        frames = by_page[: len(keys) * (size // page)].reshape(len(keys), size // page)
        is_whole = self._gets_windows(frames, wanted[begin // size :] if wanted is not None else None)
        is_there = (frames >= 0).all(axis=1)
        lacking = np.flatnonzero(is_there & ((stored == NOT_STORED) | ((stored == WITHOUT_WINDOWS) & is_whole)))
        # write_through promises all of it.
        controller = self.controller
        is_worth_it = controller.write_policy == "write_through" or self.is_worth_storing(begin, end.end)
        if not is_worth_it:
            # An open breaker has a pace of its own.
            is_due = self.breaker.is_open or self.breaker.now >= self._next_trial_at
            is_trial_due = is_due and not self.storing_pages
            lacking = lacking[: int(is_trial_due)]
        if (room := self._num_storable_blocks()) < len(lacking):
            self._defer_store(end)
            lacking = lacking[: max(0, room)]
        per_op = self.setup.limits.blocks_per_op
        for i in range(0, len(lacking), per_op):
            blocks = lacking[i : i + per_op]
            ticket = self.ledger.begin_storage_op(
                self.link,
                StorageAction.SET,
                keys[blocks],
                frames[blocks].ravel(),
                without_windows=np.repeat(~is_whole[blocks], size // page),
                skips=others_than(self.place, len(self.setup.tiers)),
                tenant=tenant,
            )
            tree.pages.storing(ticket, path[top:], keys[blocks], begin + blocks * size)
            self.storing_pages += frames[blocks].size
            if not is_worth_it:
                self._trial, self._trial_began = ticket, self.breaker.now
        stored_now = np.where(is_whole[lacking], STORED, WITHOUT_WINDOWS)
        tree.names.mark_stored(path[first:], self.place, lacking, stored_now)
        if len(lacking):
            self.touches.note(end)

    # -- inside -----------------------------------------------------------------------------------------------

    def _can_store(self, node: Node) -> bool:
        """Whether the host has what is stored of a node."""
        assert self.setup is not None
        return is_ready(node, Tier.HOST) if self.setup.has_windowed_store else is_whole(node, Tier.HOST)

    def _host_frames(self, node: Node) -> np.ndarray:
        """(pages of the node,) int32; -1 for each that the host has not."""
        frames = node.frames[Tier.HOST]
        if frames is not None and self._can_store(node):
            return frames
        return np.full(len(node.key) // self.tree.page_size, -1, np.int32)

    def _first_lacking(self, path: list[Node], wanted: np.ndarray | None) -> int | None:
        """The place of the first node of which the store may lack something. wanted: of the path's blocks, see
        `WindowBlocks`; None: all are stored whole."""
        stored = self.tree.names.stored_in(path, self.place)
        lacks = stored == NOT_STORED
        if wanted is not None:
            lacks |= wanted & (stored == WITHOUT_WINDOWS)
        if not lacks.any():
            return None
        ends = np.cumsum([len(node.stored) for node in path])  # type: ignore[arg-type]
        return int(np.searchsorted(ends, int(lacks.argmax()), side="right"))

    def _gets_windows(self, frames: np.ndarray, wanted: np.ndarray | None) -> np.ndarray:
        """(num_blocks,) bool: which blocks are stored with layers with a window. frames: (num_blocks, pages of a
        block) int32. wanted: as of `_first_lacking`."""
        pool = self.controller.windowed_host.pool
        if wanted is None or pool is None:
            return np.ones(len(frames), np.bool_)
        return wanted & (pool.frame_of[frames] >= 0).all(axis=1)

    def _num_storable_blocks(self) -> int:
        """Blocks that may be handed to storage now."""
        if self.setup is None or self.tree.names.keys is None:
            return 0
        if self.breaker.is_open:
            return int(self.breaker.may_try and not self.storing_pages)
        pages_per_block = self.tree.names.keys.block_tokens // self.tree.page_size
        most = max(pages_per_block, min(self.setup.limits.max_store_pages, self._most_windowed_pages))
        return (most - self.storing_pages) // pages_per_block

    @property
    def _most_windowed_pages(self) -> int:
        """Pages that may be on their way to storage, and as many that wait for that: they are not to keep the host's
        pool for layers with a window from what is computed."""
        pool = self.controller.windowed_host.pool
        return pool.table.num_usable // _STORED_SHARE if pool is not None else sys.maxsize

    def _defer_store(self, end: Node) -> None:
        deferred = self._deferred
        if end.id not in deferred and len(deferred) >= self._tidy_at:
            # Nodes that have left the tree keep their tokens alive.
            for gone in [i for i, n in deferred.items() if survivor_of(n) is None]:
                del deferred[gone]
                self.pinned.pop(gone, None)
            if len(deferred) >= _MAX_DEFERRED_STORES:
                dropped = next(iter(deferred))
                del deferred[dropped]
                if (node := self.pinned.pop(dropped, None)) is not None:
                    self.tree.end_soft_pin(node)
                self.counters["storage_backup_dropped_paths"] += 1
            self._tidy_at = min(2 * len(deferred) + _TIDY_DEFERRED_STORES, _MAX_DEFERRED_STORES)
        deferred[end.id] = end
        assert self.setup is not None
        most = min(self.setup.limits.most_pinned_pages, self._most_windowed_pages)
        # The whole path is pinned.
        is_full = self.tree.counts.soft_pinned[Tier.HOST] + end.end // self.tree.page_size > most
        # Reads of the first store are not to wait for the second one. What that misses it is told of when it is used.
        may_pin = self.place == 0 and not is_full and not self.breaker.is_open
        if end.id not in self.pinned and may_pin:
            self.pinned[end.id] = end
            self.tree.soft_pin(end)
