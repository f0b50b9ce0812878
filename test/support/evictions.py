"""`evict`: what the controller does to a tree's tier that is full, alone."""

from __future__ import annotations

from collections.abc import Container

from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Dropped
from sglang.srt.mem_cache.transfer import Tier


def evict(tree: HiRadixTree, tier: Tier, num_pages: int, kept: Container[int] = ()) -> Dropped:
    """Take the victims of a tier off it."""
    return tree.give_up(tree.victims(tier, num_pages, kept, stay=False), tier)
