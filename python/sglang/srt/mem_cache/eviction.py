"""Which node a tier gives up first: the registry of policies. eviction_order.py applies them.

A policy is a function of a node; the node with the least result goes first. Its docstring is what `--help` shows. To
add one: a function, and one line in `EVICTION_POLICIES`. The flag --radix-eviction-policy takes its names.
"""

from __future__ import annotations

from collections.abc import Callable
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
