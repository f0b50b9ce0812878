"""`ResidencyEvents`: what a run does to the residency of nodes, counted by kind, and a net of its own.

The net: with the policy `auto`, pages that were copied once, or came from elsewhere, are not copied again because
something below them is inserted. It keeps its own account of such pages by their device frames, and trusts no mark on
a node.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np

from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.mem_cache.node import Dropped, Node, is_hole
from sglang.srt.mem_cache.transfer import FETCH, FRAME_TIERS, STORE_LINKS, Ticket, Tier

# Kinds of events.
HOLE = "a hole"
COMPUTED_HOLE = "a hole computed"
FETCHED_HOLE = "a hole fetched"
TWO_LOADS = "a path loaded from two tiers"
ALTERNATING_LOADS = "a path loaded from tiers by turns"
GIVEN_UP_DUPLICATE = "a duplicate given up"
REWRITTEN_DUPLICATE = "a duplicate rewritten"
MOVED = "a move from a peer to the host"
LATE_LINK = "a late link"
LOSSY = "lossy pages fetched"
PARTIAL = "a partial load"
COMPLETED = "a partial node completed"
COMPUTED_PARTIAL = "a partial node computed"
WINDOW_EVENTS = (PARTIAL, COMPLETED, COMPUTED_PARTIAL)
EVENTS = (
    *(HOLE, COMPUTED_HOLE, FETCHED_HOLE, TWO_LOADS, ALTERNATING_LOADS),
    *(GIVEN_UP_DUPLICATE, REWRITTEN_DUPLICATE, MOVED, LATE_LINK, LOSSY),
)


class CopiedTwiceError(AssertionError):
    pass


class ResidencyEvents:
    """Watches the tree and the controllers of a cache by wrapping their methods."""

    def __init__(self, cache: KVCache) -> None:
        self.counts: Counter[str] = Counter()
        self._cache = cache
        self._controller = cache.controller
        # Device frames in the tree whose bytes another tier has had.
        self._copied: set[int] = set()
        self._is_writing_through = False
        self._wrap(cache.tree, "_take_frames", self._taking)
        self._wrap(cache.tree, "_set_frames", self._setting)
        self._wrap(cache.tree, "begin_fill", self._filling)
        self._wrap(cache.tree, "begin_completing", self._completing)
        self._wrap(cache.tree, "give_up", self._giving_up)
        self._wrap(cache.tree, "begin_fetch", self._fetching)
        self._wrap(cache.controller, "begin_load", self._loading)
        self._wrap(cache.controller.auto, "write_through", self._writing_through)
        self._wrap(cache.ledger, "begin_storage_op", self._storing)

    def note_late_links(self) -> None:
        """At the end of a step."""
        self.counts[LATE_LINK] += bool(self._controller.links.late)

    @staticmethod
    def _wrap(owner: Any, name: str, before: Any) -> None:
        """before: called with the arguments; what it returns is called afterwards, if anything."""
        method = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            after = before(*args, **kwargs)
            result = method(*args, **kwargs)
            if after is not None:
                after()
            return result

        setattr(owner, name, wrapped)

    def _taking(self, node: Node, tier: Tier, dropped: Dropped) -> Any:
        frames = node.frames[tier]
        if tier == Tier.DEVICE and frames is not None:
            self._copied.difference_update(frames.tolist())

        def taken() -> None:
            self.counts[HOLE] += bool(node.children) and is_hole(node)

        return taken

    def _setting(
        self,
        node: Node,
        tier: Tier,
        frames: np.ndarray,
        ticket: Ticket | None,
        fence: int,
        is_partial: bool = False,
    ) -> None:
        if tier == Tier.DEVICE and (before := node.frames[tier]) is not None:
            self.counts[COMPUTED_PARTIAL] += 1
            self._copied.difference_update(before.tolist())
        if node.children and is_hole(node):
            self.counts[COMPUTED_HOLE] += tier == Tier.DEVICE
            self.counts[FETCHED_HOLE] += ticket is not None and ticket.link == FETCH

    def _filling(
        self, nodes: list[Node], source: Tier, tier: Tier, frames: np.ndarray, ticket: Ticket, num_partial: int
    ) -> None:
        self.counts[MOVED] += (source, tier) == (Tier.PEER, Tier.HOST)
        self.counts[PARTIAL] += num_partial > 0
        if tier == Tier.DEVICE:
            self._copied.update(frames.tolist())
        if source != Tier.DEVICE:
            return
        for node in nodes:
            device_frames = node.frames[Tier.DEVICE]
            assert device_frames is not None
            is_rewritten = not self._copied.isdisjoint(device_frames.tolist())
            others = [t for t in FRAME_TIERS if t not in (Tier.DEVICE, tier) and node.frames[t] is not None]
            self.counts[REWRITTEN_DUPLICATE] += is_rewritten and not others
            is_free = self._is_front_of_block(node) or not self._is_writing_through
            if is_rewritten and not is_free and self._controller.write_policy == "auto":
                raise CopiedTwiceError(f"{node} was copied before, and stays on the device")
            self._copied.update(device_frames.tolist())

    def _completing(self, nodes: list[Node], ticket: Ticket) -> None:
        self.counts[COMPLETED] += 1

    def _is_front_of_block(self, node: Node) -> bool:
        """Whether it is a part of a block that ends below: that is copied again with what is below it."""
        names = self._cache.tree.names.keys
        return names is not None and bool(node.end % names.block_tokens) and len(node.key) < names.block_tokens

    def _giving_up(self, nodes: list[Node], tier: Tier) -> None:
        if tier != Tier.DEVICE:
            self.counts[GIVEN_UP_DUPLICATE] += sum(node.frames[Tier.DEVICE] is not None for node in nodes)

    def _writing_through(self, node: Node) -> Any:
        self._is_writing_through = True
        return lambda: setattr(self, "_is_writing_through", False)

    def _loading(self, nodes: list[Node]) -> None:
        sources = [self._cache.tree.source_of(node) for node in nodes]
        changes = sum(above != below for above, below in pairwise(sources))
        self.counts[TWO_LOADS] += changes > 0
        self.counts[ALTERNATING_LOADS] += changes > 1

    def _fetching(self, match: Any, run: Any, block_keys: Any, launch: Any, is_lossy: bool, lacking: Any) -> None:
        self.counts[LOSSY] += is_lossy

    def _is_store_lossy(self) -> bool:
        setup = self._cache.storage.setup
        return setup is not None and setup.is_lossy

    def _storing(self, link: str, action: Any, keys: Any = None, frames: Any = None, **more: Any) -> None:
        if link not in STORE_LINKS or not self.counts[LOSSY] or self._is_store_lossy():
            return
        for node in self._cache.tree.walk():
            host_frames = node.frames[Tier.HOST]
            if node.is_lossy and host_frames is not None:
                assert not np.isin(host_frames, frames).any(), f"{node} is lossy, and goes to an exact store"
