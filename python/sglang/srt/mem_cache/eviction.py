"""Which node a tier gives up first: the registry of policies, and the candidates of a tier as a lazy heap.

A policy is a function of a node; the node with the least result goes first. Its docstring is what `--help` shows. To
add one: a function, and one line in `EVICTION_POLICIES`. The flag --radix-eviction-policy takes its names.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Flags take their choices from here, and load nothing heavy.
    from sglang.srt.mem_cache.node import Node

Rank = tuple[int, ...]
# Of a node that no request will ask for again: below every other.
RETIRED_PRIORITY = -(1 << 62)


def least_recent(node: Node) -> Rank:
    """least recently used"""
    return node.last_access, 0


def least_frequent(node: Node) -> Rank:
    """used by the fewest requests"""
    return node.hits, node.last_access


def least_important(node: Node) -> Rank:
    """used only by requests of low priority"""
    return node.priority, node.last_access


EVICTION_POLICIES: dict[str, Callable[[Node], Rank]] = {
    "lru": least_recent,
    "lfu": least_frequent,
    "priority": least_important,
}


class EvictionHeap:
    """The candidates of one tier. Entries go stale freely: `pop` checks them. But a node whose rank falls must be
    offered again, else `pop` comes to it too late.

    is_candidate: whether a node can be given up now. rank: what goes first, the least.
    """

    def __init__(self, is_candidate: Callable[[Node], bool], rank: Callable[[Node], Rank]) -> None:
        self._is_candidate = is_candidate
        self._rank = rank
        self._entries: list[tuple[Rank, int, Node]] = []

    def offer(self, node: Node, num_nodes: int) -> None:
        """Enter a candidate. num_nodes: of the tree, which bounds the stale entries."""
        heapq.heappush(self._entries, (self._rank(node), node.id, node))
        if len(self._entries) > 64 + 4 * num_nodes:
            best = {n.id: n for _, _, n in self._entries if self._is_candidate(n)}
            self._entries = [(self._rank(n), n.id, n) for n in best.values()]
            heapq.heapify(self._entries)

    def pop(self) -> Node | None:
        """Take out the candidate that goes first; None if there is none."""
        while self._entries:
            entry = heapq.heappop(self._entries)
            node = entry[2]
            if not self._is_candidate(node):
                continue
            if entry[0] == (rank := self._rank(node)):
                return node
            heapq.heappush(self._entries, (rank, node.id, node))
        return None

    def peek(self) -> Node | None:
        """The candidate that goes first; None if there is none."""
        node = self.pop()
        if node is not None:
            heapq.heappush(self._entries, (self._rank(node), node.id, node))
        return node

    def put_back(self, nodes: Iterable[Node]) -> None:
        """Nodes that were popped and are kept."""
        for node in nodes:
            heapq.heappush(self._entries, (self._rank(node), node.id, node))

    def ranks(self) -> dict[int, list[Rank]]:
        """By the id of their node, those of all entries; for checks."""
        found: dict[int, list[Rank]] = {}
        for rank, node_id, _ in self._entries:
            found.setdefault(node_id, []).append(rank)
        return found
