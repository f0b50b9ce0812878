"""`PageCounts`: how many pages each tier has, how many of them eviction may give up, and how many are soft-pinned.

`HiRadixTree` takes a node out before it changes on a tier, and puts it in again afterwards.
"""

from __future__ import annotations

from sglang.srt.mem_cache.node import NUM_TIERS, Node
from sglang.srt.mem_cache.transfer import Tier


class PageCounts:
    """Lists by tier. evictable: see `evictable_pages`. soft_pinned: of nodes with soft pins, below the device."""

    def __init__(self) -> None:
        self.resident = [0] * NUM_TIERS
        self.evictable = [0] * NUM_TIERS
        self.soft_pinned = [0] * NUM_TIERS

    def put_in(self, node: Node, tier: int) -> None:
        self._add(node, tier, 1)

    def take_out(self, node: Node, tier: int) -> None:
        self._add(node, tier, -1)

    def _add(self, node: Node, tier: int, sign: int) -> None:
        frames = node.frames[tier]
        if frames is None:
            return
        num_pages = sign * len(frames)
        self.resident[tier] += num_pages
        self.evictable[tier] += sign * evictable_pages(node, tier)
        if node.soft_pins and tier != Tier.DEVICE:
            self.soft_pinned[tier] += num_pages


def evictable_pages(node: Node, tier: int) -> int:
    """Pages that a tier could give up sooner or later: ready, and not locked if on the device."""
    frames = node.frames[tier]
    if frames is None or node.tickets[tier] is not None or (tier == Tier.DEVICE and node.lock > 0):
        return 0
    return len(frames)
