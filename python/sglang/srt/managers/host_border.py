"""`HostBorder`: which slabs of the host's memory layers with a window have, and which the others (border_slabs.py).

Short prompts are seen to their beginning and want as many pages of the one kind as of the other; long ones want few
for windows. After a loss a slab changes hands, if what is in it is older than what the loser lost. Both kinds then
give up what is oldest, as one pool would:

    lost                                          what is in the slab that goes over
    what ends of paths see, last at launch 50     prefixes, most of which were last used before launch 50
    a prefix, last used at launch 50              what ends of paths saw last before launch 50

What is free, or what no end sees, is worth as much as what was lost last for lack of it.

Owns whose each slab is. Moves no bytes: what is in a slab is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.mem_cache.border_slabs import BorderSlabs
from sglang.srt.mem_cache.eviction import RETIRED_PRIORITY, least_recent
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.node import Node, is_lacking, is_pinned_copy, is_whole, last_access_on
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.mem_cache.windowed_pool import FREE_TO_GO, STAYS, WindowedPool

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import HiCacheController

# The tree is looked through when one in so many pages was lost, so that it takes little of the time.
_LOST_SHARE = 16
# Of the pages that windows get with a slab, so many of what it had may be newer than what they lost: it is the oldest
# in few slabs, as pages of many prefixes mix.
_NEWER_SHARE = 0.5


class HostBorder:
    """slabs: all are of layers with full attention at first. make_partial: called with nodes that give up what layers
    with a window have of them on the host."""

    def __init__(
        self,
        controller: HiCacheController,
        pool: WindowedPool,
        slabs: BorderSlabs,
        make_partial: Callable[[list[Node]], object],
    ) -> None:
        self._controller = controller
        self._tree = controller.tree
        self._host = controller.tables[Tier.HOST]
        self._pool = pool
        self._make_partial = make_partial
        # The frames of each slab, as the one kind of pages and as the other.
        full = np.arange(self._host.num_pages, dtype=np.int32)[-slabs.num_full :]
        self._full = full.reshape(slabs.num_slabs, slabs.full_pages)
        self._windowed = np.arange(slabs.num_windowed, dtype=np.int32).reshape(slabs.num_slabs, slabs.windowed_pages)
        self._is_windowed = np.zeros(slabs.num_slabs, np.bool_)
        pool.table.lend(self._windowed.ravel())
        # What the pool had given up when the tree was last looked through for it.
        self._num_seen_before = 0
        # Of prefixes, since the tree was last looked through: pages lost, and the launch that last used the oldest.
        self._num_lost, self._oldest_lost = 0, STAYS
        # Of the oldest that was lost when the tree was last looked through, of prefixes and of what windows see.
        self._worth_of_full = self._worth_of_windowed = FREE_TO_GO

    def note_given_up(self, nodes: Iterable[Node]) -> None:
        """The host gives up nodes to make room."""
        for node in nodes:
            if is_lacking(node) and node.priority != RETIRED_PRIORITY:
                self._num_lost += len(node.key) // self._tree.page_size
                self._oldest_lost = min(self._oldest_lost, last_access_on(node, Tier.HOST))

    def update(self) -> None:
        """Move slabs if enough was lost. Nothing else looks at nodes meanwhile."""
        if self._tree.order.policy is not least_recent:
            return  # what is oldest is not worth least
        num_seen = self._pool.num_seen_given_up - self._num_seen_before
        if num_seen * _LOST_SHARE > self._pool.table.num_usable:
            self._worth_of_windowed = self._pool.take_oldest_given_up()
            self._num_seen_before += num_seen
            if not self._is_windowed.all():
                self._to_windows(num_seen, self._worth_of_windowed)
        if self._num_lost * _LOST_SHARE > self._host.num_usable:
            num_lost, self._worth_of_full = self._num_lost, self._oldest_lost
            self._num_lost, self._oldest_lost = 0, STAYS
            if self._is_windowed.any():
                self._to_full(num_lost, self._worth_of_full)

    # -- inside -------------------------------------------------------------------------------------------------

    def _to_windows(self, num_pages: int, lost: int) -> None:
        """Slabs of num_pages go over, of which few pages were used from launch `lost` on."""
        per_slab = self._windowed.shape[1]
        ages = np.maximum(self._last_used(), self._worth_of_full)[self._full]
        slabs = self._oldest(~self._is_windowed, ages, lost, int(_NEWER_SHARE * per_slab))
        slabs = slabs[: -(-num_pages // per_slab)]
        if len(slabs):
            going = self._controller.nodes_in(Tier.HOST, [self._full[slabs].ravel()])
            # What is below goes first.
            self._controller.give_up_on_host(going[::-1])
        self._move(slabs[(self._host.state[self._full[slabs]] == int(FrameState.FREE)).all(1)])

    def _to_full(self, num_pages: int, lost: int) -> None:
        """Slabs of num_pages go back, of which ends of paths saw none from launch `lost` on."""
        ages = np.maximum(self._pool.last_seen(), self._worth_of_windowed)[self._windowed]
        slabs = self._oldest(self._is_windowed, ages, lost, 0)[: -(-num_pages // self._full.shape[1])]
        goes = np.zeros(self._pool.table.num_pages, np.bool_)
        goes[self._windowed[slabs]] = True
        self._make_partial([self._front_of(node, goes) for node in self._nodes_with(goes)] if len(slabs) else [])
        self._move(slabs[(self._pool.table.state[self._windowed[slabs]] == int(FrameState.FREE)).all(1)])

    @staticmethod
    def _oldest(may_go: np.ndarray, ages: np.ndarray, lost: int, most_newer: int) -> np.ndarray:
        """Slabs of which at most so many pages were used from launch `lost` on, the fewest first. may_go:
        (num_slabs,) bool. ages: (num_slabs, pages) int64, of what they have."""
        num_newer, newest = (ages >= lost).sum(1), ages.max(1)
        order = np.lexsort((newest, num_newer))
        return order[(may_go & (newest < STAYS) & (num_newer <= most_newer))[order]]

    def _move(self, slabs: np.ndarray) -> None:
        """Free slabs of one owner change hands."""
        if not len(slabs):
            return
        full, windowed = (self._host, self._full[slabs].ravel()), (self._pool.table, self._windowed[slabs].ravel())
        (giver, given), (taker, taken) = (windowed, full) if self._is_windowed[slabs[0]] else (full, windowed)
        giver.lend(given)
        taker.reclaim(taken)
        self._is_windowed[slabs] = ~self._is_windowed[slabs]
        self._controller.counters["moved_slabs_host"] += len(slabs)

    def _last_used(self) -> np.ndarray:
        """(num_host_pages,) int64: the launch that last used what is in a frame; `FREE_TO_GO` if nothing is, `STAYS`
        of what cannot go now."""
        found = np.where(self._host.state == int(FrameState.FREE), FREE_TO_GO, STAYS)
        for node in self._tree.walk():
            frames = node.frames[Tier.HOST]
            if frames is not None and not is_pinned_copy(node) and self._tree.order.is_evictable(node, Tier.HOST):
                is_retired = node.priority == RETIRED_PRIORITY
                found[frames] = FREE_TO_GO if is_retired else last_access_on(node, Tier.HOST)
        # A transfer reads or writes these.
        found[self._host.pins > 0] = STAYS
        return found

    def _nodes_with(self, goes: np.ndarray) -> list[Node]:
        """Nodes that have frames which go. goes: (num_windowed_pages,) bool."""
        nodes = [node for node in self._tree.walk() if is_whole(node, Tier.HOST)]
        return [node for node in nodes if goes[self._pool.of(node.frames[Tier.HOST])].any()]  # type: ignore[arg-type]

    def _front_of(self, node: Node, goes: np.ndarray) -> Node:
        """The front of a node up to the last of its frames that go, in whole blocks. What ends see is behind."""
        page, size = self._tree.page_size, self._tree.order.cut_tokens
        going = np.flatnonzero(goes[self._pool.of(node.frames[Tier.HOST])])  # type: ignore[arg-type]
        end = -(-(node.start + (int(going[-1]) + 1) * page) // size) * size
        return self._tree.split(node, end - node.start) if end < node.end else node

    def check_invariants(self) -> None:
        lent = int(FrameState.LENT)
        assert ((self._host.state[self._full] == lent) == self._is_windowed[:, None]).all(), "a slab has two owners"
        has_none = self._pool.table.state[self._windowed] == lent
        assert (has_none != self._is_windowed[:, None]).all(), "a slab has no owner"
        assert self._host.counts[FrameState.LENT] + self._pool.table.counts[FrameState.LENT] == (
            self._full[self._is_windowed].size + self._windowed[~self._is_windowed].size
        )
