"""`PageCounts`: how many pages each tier has, how many of them eviction may give up, and how many are soft-pinned.

`HiRadixTree` takes a node out before it changes on a tier, and puts it in again afterwards.
"""

from __future__ import annotations

from sglang.srt.mem_cache.node import NUM_TIERS, Node, is_pinned_copy
from sglang.srt.mem_cache.transfer import Tier

_DEVICE = int(Tier.DEVICE)


class PageCounts:
    """Lists by tier. evictable: see `evictable_pages`; unpinned: those of them that are no pinned copies, see
    `is_pinned_copy`. soft_pinned: of nodes with soft pins, below the device. partial: pages of partial nodes."""

    def __init__(self) -> None:
        self.resident = [0] * NUM_TIERS
        self.evictable = [0] * NUM_TIERS
        self.unpinned = [0] * NUM_TIERS
        self.soft_pinned = [0] * NUM_TIERS
        self.partial = 0

    def put_in(self, node: Node, tier: int) -> None:
        self._add(node, tier, 1)

    def take_out(self, node: Node, tier: int) -> None:
        self._add(node, tier, -1)

    def _add(self, node: Node, tier: int, sign: int) -> None:
        frames = node.frames[tier]
        if frames is None:
            return
        num_pages, num_evictable = sign * len(frames), sign * evictable_pages(node, tier)
        self.resident[tier] += num_pages
        if node.is_partial and tier == _DEVICE:
            self.partial += num_pages
        self.evictable[tier] += num_evictable
        if tier == _DEVICE or not is_pinned_copy(node):
            self.unpinned[tier] += num_evictable
        if tier != _DEVICE and node.soft_pins:
            self.soft_pinned[tier] += num_pages


def evictable_pages(node: Node, tier: int) -> int:
    """Pages that a tier could give up sooner or later: ready, not locked if on the device, and on another tier not
    what a request reads from there, or loads."""
    frames = node.frames[tier]
    if frames is None or node.tickets[tier] is not None:
        return 0
    if tier == _DEVICE:
        return 0 if node.lock else len(frames)
    is_read = node.tickets[_DEVICE] is not None or (node.lock > 0 and node.frames[_DEVICE] is None)
    return 0 if is_read else len(frames)
