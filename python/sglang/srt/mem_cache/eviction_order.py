"""`EvictionOrder`: what each tier gives up next; `EvictionHeap`: the candidates of one tier as a lazy heap.

Takes no node off a tier, see hiradix_tree.py. The device gives up ends of paths. Peers and the host give up any node,
by its rank: what was used was used up to its front, so that of one path the end goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable
from functools import partial

from sglang.srt.mem_cache.eviction import RETIRED_PRIORITY, Rank
from sglang.srt.mem_cache.node import Node, is_lacking, is_pinned_copy, is_ready, is_whole, last_access_on
from sglang.srt.mem_cache.placement import SPARE, class_of_copy
from sglang.srt.mem_cache.transfer import FRAME_TIERS, Tier
from sglang.srt.utils.time_units import LaunchSeq

# Plain integers: looking up a member of an enumeration costs as much as the rest of a line.
_DEVICE, _PEER, _HOST = int(Tier.DEVICE), int(Tier.PEER), int(Tier.HOST)


class EvictionHeap:
    """The candidates of one tier. Entries go stale freely: `peek` checks them. But a node whose rank falls must be
    offered again, else `peek` comes to it too late.

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

    def peek(self) -> tuple[Rank, int, Node] | None:
        """The candidate that goes first, with its rank and id; None if there is none."""
        entries = self._entries
        while entries:
            rank, node_id, node = entry = entries[0]
            if not self._is_candidate(node):
                heapq.heappop(entries)
            elif rank == (now := self._rank(node)):
                return entry
            else:
                heapq.heapreplace(entries, (now, node_id, node))
        return None

    def pop(self) -> None:
        """Take out what `peek` has just returned."""
        heapq.heappop(self._entries)

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


class EvictionOrder:
    """What each tier gives up next. Owns the candidates of all tiers.

    policy: of `EVICTION_POLICIES`. split: the tree's, which cuts a node behind so many tokens.
    """

    def __init__(
        self,
        policy: Callable[[Node, LaunchSeq], Rank],
        page_size: int,
        split: Callable[[Node, int], Node],
    ) -> None:
        # Whether peers and host first give up copies of what nearer tiers have, see placement.py.
        self.adds_up = False
        # Where nodes are loaded from, the fastest tier first; and tiers that nothing is loaded from now.
        self.load_order: tuple[Tier, ...] = (Tier.PEER, Tier.HOST)
        self.unread: frozenset[Tier] = frozenset()
        # Nodes are cut between these: pages, or the blocks of storage, which takes no part of one.
        self.cut_tokens = page_size
        self.policy = policy
        self._page_size = page_size
        self._split = split
        self._heaps = [
            EvictionHeap(partial(self.is_evictable, tier=tier), partial(self.rank_on, tier=tier))
            for tier in FRAME_TIERS
        ]

    def offer(self, node: Node, tier: int, num_nodes: int) -> None:
        """Enter a node among a tier's candidates, if it is one; also when its rank has fallen. num_nodes: of the
        tree."""
        if self.is_evictable(node, tier):
            self._heaps[tier].offer(node, num_nodes)

    def entered(self, tier: int) -> dict[int, Rank]:
        """By their ids, the least rank with which nodes are entered for a tier; for checks."""
        return {node_id: min(ranks) for node_id, ranks in self._heaps[tier].ranks().items()}

    def victims(
        self, tier: Tier, num_pages: int, kept: Container[int] = (), stay: bool = True, splits: bool = True
    ) -> list[Node]:
        """The nodes that a tier would give up next, in the order of `rank_on`, until they have num_pages or none is
        left. Changes nothing but this: the last one is split if a part of it is enough.

        stay: whether they remain candidates; else the tree gives them up next. kept: ids of nodes that are no
        victims. splits: whether the last one may be split; else it is there as a whole.
        """
        heap = self._heaps[tier]
        found: dict[int, Node] = {}
        popped: dict[int, Node] = {}
        # Of the device: nodes without children there once the victims are gone, and by id how many children are left.
        new_ends: list[tuple[Rank, int, Node]] = []
        num_children: dict[int, int] = {}
        while num_pages > 0:
            while (top := heap.peek()) is not None and (top[1] in popped or top[1] in kept):
                popped[top[1]] = top[2]
                heap.pop()
            if new_ends and (top is None or new_ends[0][:2] < top[:2]):
                node = heapq.heappop(new_ends)[2]
            elif top is not None:
                popped[top[1]] = node = top[2]
                heap.pop()
            else:
                break
            if splits and (kept_tokens := self.whole_blocks(node, len(node.key) - num_pages * self._page_size)) > 0:
                self._split(node, kept_tokens)
            num_pages -= len(node.key) // self._page_size
            found[node.id] = node
            if num_pages <= 0:
                break
            above = node.parent
            if tier != _DEVICE or above is None:
                continue
            num_children[above.id] = left = num_children.get(above.id, above.num_device_children) - 1
            if not left and above.id not in kept and self._is_free_to_go(above, tier):
                heapq.heappush(new_ends, (self.rank_on(above, tier), above.id, above))
        heap.put_back(popped.values() if stay else [node for node in popped.values() if node.id not in found])
        return list(found.values())

    def whole_blocks(self, node: Node, num_tokens: int) -> int:
        """The most of the first num_tokens of a node behind which it may be cut; 0 or less if there is no such
        place."""
        return (node.start + num_tokens) // self.cut_tokens * self.cut_tokens - node.start

    def is_evictable(self, node: Node, tier: int) -> bool:
        """Of the device the leaves go. On other tiers all may go, see `rank_on`."""
        return (tier != _DEVICE or node.num_device_children == 0) and self._is_free_to_go(node, tier)

    @staticmethod
    def _is_free_to_go(node: Node, tier: int) -> bool:
        """Whether a tier may give the node up, as far as its children permit. The source of a load stays where it is:
        while the load is in flight, else its failure could not be told from eviction, and from the lock of its path
        on, while room is made for it."""
        return (
            node.parent is not None
            and node.frames[tier] is not None
            and node.tickets[tier] is None
            and (
                node.lock == 0
                if tier == _DEVICE
                else node.tickets[_DEVICE] is None and (node.lock == 0 or node.frames[_DEVICE] is not None)
            )
        )

    def rank_on(self, node: Node, tier: int) -> Rank:
        """What goes first of a tier: the smallest. Of equals the deepest."""
        is_alive = int(node.priority != RETIRED_PRIORITY)
        by_policy = (*self.policy(node, last_access_on(node, tier)), -node.start)
        if tier == _DEVICE:
            return is_alive, *by_policy
        if self.adds_up:
            copy = self.class_of(node, tier)
            # Of what the device has, that which it keeps longest, as far as that was known when it was entered.
            return (is_alive, copy, -last_access_on(node, _DEVICE)) if copy == SPARE else (is_alive, copy, *by_policy)
        is_pinned = int(is_pinned_copy(node))
        if tier != _PEER:
            # What peers have, too, goes first: by age alone the host, which repeats the device, would forget sooner.
            on_peer = Tier.PEER not in self.unread and is_ready(node, Tier.PEER)
            return is_alive, is_pinned, int(not on_peer), *by_policy
        # Peers hold what the device has no room for. The host holds all, where pages are written once.
        is_farther = int(is_lacking(node))
        return is_farther * is_alive, is_alive, is_pinned, *by_policy

    def class_of(self, node: Node, tier: int) -> int:
        """See `class_of_copy`."""
        ready = [frames is not None and ticket is None for frames, ticket in zip(node.frames, node.tickets)]
        ready[_DEVICE] = ready[_DEVICE] and not node.is_partial
        ready[_HOST] = ready[_HOST] and not node.is_host_partial
        other = _PEER if tier == _HOST else _HOST
        ready[other] = ready[other] and other not in self.unread
        is_first = self.load_order[0] == tier
        on_other = ready[other] and not is_first
        is_next = node.is_next and not (on_other and ready[_DEVICE])
        # Peers behind the host are much slower: what they have, the host is not to give up for it.
        on_farther = is_first and tier == _PEER and ready[_HOST]
        return class_of_copy(ready[_DEVICE] or on_other, on_farther, is_next, is_pinned_copy(node))

    def ready_tier(self, node: Node, whole: bool = False) -> Tier | None:
        """The first tier of the load order that has a node ready. whole: with all layers."""
        ready = (t for t in self.load_order if (is_whole if whole else is_ready)(node, t))
        return next(ready, None)

    def next_of(self, tier: Tier) -> Node | None:
        """The node that a tier would give up next."""
        top = self._heaps[tier].peek()
        return top[2] if top is not None else None

    def rank(self, node: Node) -> Rank:
        """By the eviction policy, on any tier below the device: the least goes first."""
        last_access = max(last_access_on(node, _PEER), last_access_on(node, _HOST))
        return *self.policy(node, last_access), -node.start
