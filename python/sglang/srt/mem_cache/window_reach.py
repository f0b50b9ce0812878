"""`WindowReach`: what layers with a sliding window see of a prefix, and which of its nodes must be whole for that.

The tokens behind a prefix see all of it in layers with full attention, and its end alone in layers with a window. So
a load leaves out the rest of the latter, and the device has a *partial* node: all its frames, and the KV of some
layers. It serves what continues the prefix. What leaves the prefix in the middle sees its windows, too:

                       ┌──────── seen from b
                       │              ┌──── seen from a
    [ system prompt, document .. b .. a ][ question a ]
      partial          to complete    whole
                               └──[ question b ]

The end of such a match is loaded in the missing layers (`MatchResult.to_complete`). Where no tier has it whole, and
storage does not bring it, the match ends above. A partial node is never copied to another tier.

The host may have partial nodes, too (`WindowedPool`). They are loaded where windows do not reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sglang.srt.mem_cache.eviction_order import EvictionOrder
from sglang.srt.mem_cache.node import MatchResult, Node, is_lacking, path_of
from sglang.srt.mem_cache.transfer import Tier

# A plain integer: looking up a member of an enumeration costs as much as the rest of a line.
_DEVICE = int(Tier.DEVICE)


class WindowReach:
    """Owns nothing.

    num_tokens: before the first new one, that layers with a window may read; 0: all nodes are whole. order: the
    tree's, which knows where nodes are cut. split: the tree's, which cuts a node behind so many tokens.
    """

    def __init__(
        self, num_tokens: int, page_size: int, order: EvictionOrder, split: Callable[[Node, int], Node]
    ) -> None:
        self.num_tokens = num_tokens
        self._page_size = page_size
        self._order = order
        self._split = split

    def first_seen(self, num_tokens: int) -> int:
        """Where the first page begins that windows reach from behind num_tokens tokens; 0 or less for all."""
        return (num_tokens - self.num_tokens) // self._page_size * self._page_size

    def cut(self, num_tokens: int) -> int:
        """What ends there, or before, is loaded without layers with a window, for tokens behind num_tokens ones."""
        size = self._order.cut_tokens
        return self.first_seen(num_tokens) // size * size if self.num_tokens else 0

    def on_device(self, match: MatchResult) -> MatchResult:
        """The longest part of what the device has of a match from whose end windows reach no partial node."""
        found = match.on_device()
        if not self.num_tokens:
            return found
        for place in reversed(range(len(found.path))):
            node = found.path[place]
            if node.end <= self.first_seen(found.total_len):
                break
            if node.is_partial:
                found = found.above(place)
        return found

    def longest_whole(self, match: MatchResult, whole_source_of: Callable[[Node], Tier | None]) -> MatchResult:
        """The longest part of a match from whose end windows reach nothing that no tier has whole. whole_source_of:
        the tree's."""
        if not self.num_tokens or not any([node.is_partial or node.is_host_partial for node in match.path]):
            return match
        whole, place = match, len(match.path)
        to_complete: list[Node] = []
        awaits_load = False
        while place:
            place -= 1
            node = match.path[place]
            if node.end <= self.first_seen(whole.total_len):
                break
            if not is_lacking(node):
                continue
            if whole_source_of(node) is None and (node.tickets[_DEVICE] is None or node.is_host_partial):
                whole, to_complete, awaits_load = whole.above(place), [], False
                continue
            if not node.is_partial:
                continue
            to_complete.append(node)
            awaits_load |= node.tickets[_DEVICE] is not None
        beyond = match.path[len(whole.path) :]
        return replace(whole, to_complete=tuple(to_complete[::-1]), awaits_load=awaits_load, beyond=beyond)

    def known(self, match: MatchResult, comes_whole: Callable[[Node], bool], wanted: int = 0) -> MatchResult:
        """A match up to the first page that windows reach from its end and that no tier has whole: storage may have
        it. comes_whole: whether a tier below the device has a node whole, or gets it. wanted: a fetch goes on up to
        there, and windows will reach from there."""
        if not self.num_tokens or not any([node.is_partial or node.is_host_partial for node in match.path]):
            return match
        cut = self.cut(max(match.total_len, wanted))
        for place, node in enumerate(match.path):
            if node.end > cut and is_lacking(node) and node.tickets[_DEVICE] is None and not comes_whole(node):
                end = max(cut, node.start)
                if end >= match.total_len:
                    return match  # the tokens part from the node before that
                whole = self.longest_whole(match, lambda node: Tier.HOST if comes_whole(node) else None)
                return replace(match.up_to(place, end), whole_len=whole.total_len)
        return match

    def cut_to_complete(self, end: Node) -> list[Node]:
        """The partial nodes of the path to `end` that windows reach from there, top first. They are cut where what is
        reached begins."""
        if not self.num_tokens:
            return []
        first = self.first_seen(end.end)
        found = [node for node in path_of(end) if node.is_partial and node.end > first]
        for node in found:
            self._cut(node, end)
        return found

    def cut_to_load(self, end: Node) -> list[Node]:
        """The nodes of the path to `end` that the device lacks, top first, cut where windows reach begins."""
        found = [node for node in path_of(end) if node.frames[_DEVICE] is None]
        uppers = [upper for node in found if (upper := self._cut(node, end)) is not None]
        return sorted([*uppers, *found], key=lambda node: node.start)

    def _cut(self, node: Node, end: Node) -> Node | None:
        """Split what begins before and ends behind `cut`. Returns the new upper part."""
        cut = self.cut(end.end)
        return self._split(node, cut - node.start) if node.start < cut < node.end else None
