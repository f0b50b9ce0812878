"""Which node a tier gives up first: the registry of policies. eviction_order.py applies them.

A policy is a function of a node and its last use; the node with the least result goes first. The last use of pages
that a session weights is later than the node's own, see session_weights.py. A policy's docstring is what `--help`
shows. To add one: a function, and one line in `EVICTION_POLICIES`. The flag --radix-eviction-policy takes its names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Flags take their choices from here, and load nothing heavy.
    from sglang.srt.mem_cache.node import Node
    from sglang.srt.utils.time_units import LaunchSeq

Rank = tuple[int, ...]
# Of a node that no request will ask for again: below every other.
RETIRED_PRIORITY = -(1 << 62)


def least_recent(node: Node, last_access: LaunchSeq) -> Rank:
    """least recently used"""
    return last_access, 0


def least_frequent(node: Node, last_access: LaunchSeq) -> Rank:
    """used by the fewest requests"""
    return node.hits, last_access


def least_important(node: Node, last_access: LaunchSeq) -> Rank:
    """used only by requests of low priority"""
    return node.priority, last_access


EVICTION_POLICIES: dict[str, Callable[[Node, LaunchSeq], Rank]] = {
    "lru": least_recent,
    "lfu": least_frequent,
    "priority": least_important,
}
