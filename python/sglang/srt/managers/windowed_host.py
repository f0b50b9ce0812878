"""`WindowedHost`: room in the host's pool for layers with a window, see `WindowedPool`.

Decides which pages of the host give up what these layers have of them, and which of those that come get none. Without
such a pool there is always room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.managers.host_border import HostBorder
from sglang.srt.mem_cache.border_slabs import BorderSlabs
from sglang.srt.mem_cache.node import Node, is_whole, ready_frames
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchSeq

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import HiCacheController

# The pool gives up one in so many of its pages at least: the whole tree is looked through.
_SHED_AT_ONCE = 16
# Where less than half of what was wanted could go, that is not done again for so many launches.
_PAUSE = 16


class WindowedHost:
    """border: what may be of this pool or of the host's other one; None: nothing."""

    def __init__(self, controller: HiCacheController, border: BorderSlabs | None = None) -> None:
        self.pool = controller.ledger.windowed.get(Tier.HOST)
        # Called with nodes that the host has whole, and soon partial.
        self.leaving: Callable[[list[Node]], None] = lambda nodes: None
        self._controller = controller
        self._tree = controller.tree
        self._clock = controller.clock
        # While a pause lasts: when it ends, and the pages that were held and soft-pinned when it began.
        self._paused = LaunchSeq(0), 0, 0
        # None where the border between the host's pools stays.
        self.border: HostBorder | None = None
        if self.pool is not None and border is not None:
            self.border = HostBorder(controller, self.pool, border, self._make_partial)

    def make_room(self, num_pages: int, kept: Sequence[Node] = (), spares_seen: bool = False) -> bool:
        """Have pages that are not likely to be seen give up what the pool has of them, until num_pages of it are
        free, and some more where storage may have to take them first. Whether they are free. kept: nodes that stay
        whole. spares_seen: what ends of paths see stays, too."""
        if self.pool is None:
            return True
        table = self.pool.table
        at_once = table.num_usable // _SHED_AT_ONCE
        least = num_pages + (at_once if self._controller.feeds_storage else 0)
        if table.num_free < least:
            # Pages that nothing reads any more give theirs back.
            self._controller.tables[Tier.HOST].reap(self._clock.done)
            table.reap(self._clock.done)
        if table.num_free < least and not self._is_paused(at_once):
            wanted = least + at_once - table.num_free
            num_shed = self._shed(wanted, kept, spares_seen)
            # What is being copied can go soon.
            if num_shed + np.count_nonzero(table.pins) < wanted // 2 and not spares_seen:
                self._paused = LaunchSeq(self._clock.next + _PAUSE), *self._held()
        return table.num_free >= num_pages

    def fitting(self, nodes: list[Node]) -> tuple[list[Node], int]:
        """Nodes that are copied to the host, and of how many of the first the pool gets nothing, as it has no room.
        One is split where that ends."""
        num_lacking = self._controller.pages_of(nodes)
        if self.pool is None or self.make_room(num_lacking, spares_seen=True):
            return nodes, 0
        # Not for what windows do not reach from its own end.
        end = nodes[-1].end
        num_seen = (end - max(self._tree.windows.cut(end), nodes[-1].start)) // self._tree.page_size
        self.make_room(min(num_lacking, num_seen))
        num_lacking = max(0, num_lacking - self.pool.table.num_free)
        for i, node in enumerate(nodes):
            if num_lacking <= 0:
                return nodes, i
            num_pages = len(node.key) // self._tree.page_size
            if num_lacking < num_pages:
                front = self._tree.split(node, num_lacking * self._tree.page_size)
                return [*nodes[:i], front, *nodes[i:]], i + 1
            num_lacking -= num_pages
        return nodes, len(nodes)

    def drop_partial_ends(self, node: Node, end: int | None = None) -> bool:
        """Take off the host what is partial there of what windows reach from the last block before token `end` of
        the path to `node`, by default where the host's part ends, as far as the device has it whole: it has been
        computed again, and is copied anew. Whether there was any."""
        if self.pool is None:
            return False
        step: Node | None = node
        while step is not None and step.frames[Tier.HOST] is None:
            step = step.parent
        if step is None:
            return False
        size, end = self._tree.order.cut_tokens, step.end if end is None else min(end, step.end)
        cut, has_dropped = self._tree.windows.cut(end // size * size), False
        while step is not None and step.end > cut:
            above = step.parent
            is_partial = step.is_host_partial and step.tickets[Tier.HOST] is None
            if step.start < end and is_partial and is_whole(step, Tier.DEVICE):
                if step.start < cut:
                    self._tree.split(step, cut - step.start)
                self._controller.drop(step, Tier.HOST)
                has_dropped = True
            step = above
        return has_dropped

    # -- inside -------------------------------------------------------------------------------------------------

    def _held(self) -> tuple[int, int]:
        """Pages of the pool that are not free, and of the host that have soft pins."""
        assert self.pool is not None
        return self.pool.table.num_pages - self.pool.table.num_free, self._tree.counts.soft_pinned[Tier.HOST]

    def _is_paused(self, at_once: int) -> bool:
        """Whether so little has changed since too little could go that it would be the same."""
        ends, held_then, pinned_then = self._paused
        held, pinned = self._held()
        return self._clock.next < ends and abs(held - held_then) <= at_once and pinned == pinned_then

    def _shed(self, num_pages: int, kept: Sequence[Node], spares_seen: bool) -> int:
        """Returns how many pages it is."""
        assert self.pool is not None
        counters, page, seen_before = self._controller.counters, self._tree.page_size, self.pool.num_seen_given_up
        ids = {node.id for node in kept}
        victims = self.pool.victims(num_pages, kept=ids, spares_seen=spares_seen)
        counters["evicted_tokens_seen_host"] += (self.pool.num_seen_given_up - seen_before) * page
        return self._make_partial(victims)

    def _make_partial(self, victims: list[Node]) -> int:
        """Returns how many pages it is."""
        assert self.pool is not None
        num_shed = 0
        self.leaving(victims)
        for node in victims:
            pages = ready_frames(node, Tier.HOST)
            if self.pool.table.pins[self.pool.of(pages)].any():
                continue  # it is being stored
            self._tree.make_partial(node, Tier.HOST)
            num_shed += self.pool.take_away(pages, NO_LAUNCH)
            self._controller.compact_later(node)
        self._controller.counters["evicted_tokens_windowed_host"] += num_shed * self._tree.page_size
        return num_shed
