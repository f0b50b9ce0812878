"""Planted bugs that change no byte and no token: the random test of the tree catches them, and the soak does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from sglang.srt.mem_cache import eviction_order, hiradix_tree
from sglang.srt.mem_cache.eviction_order import EvictionOrder
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Dropped, Node
from sglang.srt.mem_cache.placement import LAST, class_of_copy
from sglang.srt.mem_cache.transfer import Tier

TREE_MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {}


def tree_mutation(function: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[], Any]:
    TREE_MUTATIONS[function.__name__] = function
    return function


@tree_mutation
def fronts_before_ends() -> Any:
    """Peers and the host give up the front of a path before what is behind it."""
    rank_on = EvictionOrder.rank_on

    def patched(self: Any, node: Any, tier: int) -> Any:
        *others, last = rank_on(self, node, tier)
        return (*others, -last) if tier != Tier.DEVICE else (*others, last)

    return mock.patch.object(EvictionOrder, "rank_on", patched)


@tree_mutation
def kept_nodes_given_up() -> Any:
    """A tier gives up what it was told to keep: a copy of one victim of the device for another's."""
    victims = HiRadixTree.victims
    return mock.patch.object(
        HiRadixTree,
        "victims",
        lambda self, tier, num_pages, kept=(), stay=True: victims(self, tier, num_pages, (), stay),
    )


@tree_mutation
def computed_hole_stays_lossy() -> Any:
    """A hole that is computed anew from exact KV still counts as lossy."""
    insert_prefix = HiRadixTree.insert_prefix

    def patched(self: Any, *args: Any) -> Any:
        with mock.patch.object(hiradix_tree, "is_nowhere_whole", lambda node: False):
            return insert_prefix(self, *args)

    return mock.patch.object(HiRadixTree, "insert_prefix", patched)


@tree_mutation
def fetched_hole_leaves_exact_what_is_below() -> Any:
    """A lossy fetch into a hole leaves what is below it marked as exact."""
    begin_fetch = HiRadixTree.begin_fetch

    def patched(self: Any, *args: Any) -> tuple[Node, Dropped]:
        marks = [(node, node.is_lossy) for node in self.walk()]
        fetched, replaced = begin_fetch(self, *args)
        for node, mark in marks:
            if node is not fetched:
                node.is_lossy = mark
        return fetched, replaced

    return mock.patch.object(HiRadixTree, "begin_fetch", patched)


@tree_mutation
def soft_pins_ignored() -> Any:
    """What waiting requests fetched goes as anything else."""
    unpinned = lambda *args: class_of_copy(*args[:3])  # noqa: E731
    return mock.patch.object(eviction_order, "class_of_copy", unpinned)


@tree_mutation
def spare_copies_kept() -> Any:
    """With `auto`, a full tier gives up by age, whatever other tiers have."""
    return mock.patch.object(eviction_order, "class_of_copy", lambda *args: LAST)
