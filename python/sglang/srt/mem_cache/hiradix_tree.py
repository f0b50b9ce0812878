"""`HiRadixTree`: the radix tree that says *where* every cached page is, on every tier.

Owns the nodes, their keys and their residency. Never touches memory, frame states (see frame_table.py), links or
clocks: numpy arrays in, decisions out. Time is counted in launches.

A node covers a page-aligned run of tokens below its parent. Its residency on a tier is all or nothing: the frames
(int32, one per page) or None. Residency is prefix-closed on each tier, so a path reads device, then peer, then host:

    root --- [system prompt] --- [turn 1] --- [turn 2] --- [turn 3]
              device+host         device+host   peer+host   host     match: 2 nodes DEVICE, 2 nodes to LOAD

A split keeps the identity of the lower half, so that locks, which name the end of a path, stay valid:

    before   parent --- node(abcdef)             after   parent --- upper(abc) --- node(def)
             frames 0 1 2 3 4 5                          frames 0 1 2    frames 3 4 5
             ticket t, fence f, lock n                   t, f, n         t, f, n

Matching never splits; locking, publishing and fetching do.

What storage has is no residency: a node that neither device nor host has is gone. Nodes know the names of their
*blocks* (see block_keys.py), computed when first asked for, and whether each is believed stored. A block belongs
to the node that holds its last token, so that a split divides names and never makes new ones:

    blocks        |   0   |   1   |   2   |          block_tokens 4, page size 1
    before        [ node: a b c d e f g h i j ]      keys 0 1
    after         [ upper: a b c d e ][ f g h i j ]  keys 0 | 1
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.time_units import LaunchSeq
from sglang.srt.mem_cache.transfer import FETCH, FRAME_TIERS, Ticket, Tier
from sglang.srt.mem_cache.transient_nodes import TransientNodes

_NO_FENCE = -1
# Of a node that nobody will ask for again.
_RETIRED_PRIORITY = -(1 << 62)
_TIERS = FRAME_TIERS
# Plain integers: looking up a member of an enumeration costs as much as the rest of a line.
_DEVICE, _PEER, _HOST = int(Tier.DEVICE), int(Tier.PEER), int(Tier.HOST)
# Tokens. Above, the copies cost more than numpy's overhead.
_COMPARE_AS_BYTES = 4096
# Bytes of a base that a slice of it may keep alive beyond its own size, whatever that is.
_KEPT_FOR_NOTHING = 4096


class Node:
    """One edge of the tree and the pages on it.

    key: int32, a slice of some request's tokens; start: tokens before it. frames, tickets, fences: per tier; a ticket
    means that the frames are FILLING under that operation; the fence is the launch that wrote the data. lock: holds
    that end here plus those of the children. hits: requests that computed it or found it. priority: the highest of
    theirs. last_use: the last launch that may read the device frames; last_stream: that may read those of other
    tiers, through the layer stream cache. num_resident_children: per tier.
    block_keys: (n, 16) uint8, the names of the blocks that end in this node; None while nobody has asked. stored:
    (n,) bool, which of them storage is believed to have. is_lossy: came through a codec that changes KV, or was
    computed from what did; whatever is published below inherits it.
    """

    __slots__ = (
        "block_keys",
        "children",
        "fences",
        "frames",
        "hits",
        "id",
        "is_lossy",
        "key",
        "last_access",
        "last_stream",
        "last_use",
        "lock",
        "num_resident_children",
        "parent",
        "priority",
        "start",
        "stored",
        "tickets",
    )

    def __init__(self, node_id: int, key: np.ndarray, parent: Node | None) -> None:
        self.id = node_id
        self.start = 0 if parent is None else parent.end
        self.key = key
        self.parent = parent
        self.children: dict[int | bytes, Node] = {}
        self.frames: list[np.ndarray | None] = [None] * len(_TIERS)
        self.tickets: list[Ticket | None] = [None] * len(_TIERS)
        self.fences = [_NO_FENCE] * len(_TIERS)
        self.num_resident_children = [0] * len(_TIERS)
        self.lock = 0
        self.hits = 0
        self.priority = 0
        self.is_lossy: bool = parent is not None and parent.is_lossy
        self.last_access = 0
        self.last_use = _NO_FENCE
        self.last_stream = _NO_FENCE
        self.block_keys: np.ndarray | None = None
        self.stored: np.ndarray | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.key)

    def __repr__(self) -> str:
        where = "+".join(t.name.lower() for t in _TIERS if self.frames[t] is not None)
        return f"Node({self.id}, {len(self.key)} tokens, {where or 'nowhere'}, lock {self.lock})"


class Root(Node):
    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(-1, np.empty(0, np.int32), None)
        self.namespace = namespace


def is_fetching(node: Node) -> bool:
    """Whether storage is bringing it to the host."""
    ticket = node.tickets[_HOST]
    return ticket is not None and ticket.link == FETCH


@dataclass(frozen=True)
class MatchResult:
    """path: nodes from the root down, the last one matched for last_len tokens. device_len, peer_len, total_len:
    tokens found on the device; on the device or a peer; on these or the host. Multiples of the page size."""

    namespace: str
    path: tuple[Node, ...]
    last_len: int
    device_len: int
    peer_len: int
    total_len: int


@dataclass(frozen=True)
class Receipt:
    """A lock on the path that ends with `node`."""

    node: Node


@dataclass(frozen=True)
class InsertResult:
    """end: tokens taken over, counted from the start of the published run; fewer than offered when a node is FILLING.
    frames: the tree's frames for those tokens. duplicates: offered frames that the tree did not need."""

    node: Node
    end: int
    frames: np.ndarray
    duplicates: np.ndarray
    created: tuple[Node, ...]


@dataclass
class Dropped:
    """Frames that left the tree: cached ones with the fence after which they may be reused, and filling ones with
    the operation that still writes them. elsewhere: their nodes that stay in the tree, on another tier."""

    cached: list[tuple[np.ndarray, int]] = field(default_factory=list)
    filling: list[tuple[np.ndarray, Ticket]] = field(default_factory=list)
    elsewhere: list[Node] = field(default_factory=list)


def _least_recent(node: Node) -> tuple[int, int]:
    return node.last_access, 0


def _least_frequent(node: Node) -> tuple[int, int]:
    return node.hits, node.last_access


def _least_important(node: Node) -> tuple[int, int]:
    return node.priority, node.last_access


# What goes first: the smallest.
EVICTION_POLICIES = {"lru": _least_recent, "lfu": _least_frequent, "priority": _least_important}


class HiRadixTree:
    """eviction_policy: lru gives up what was not used for longest, lfu what the fewest requests have used, priority
    what only requests of low priority have used. block_keys: how blocks are named, None while there is no storage."""

    def __init__(self, page_size: int, eviction_policy: str = "lru", block_keys: BlockKeys | None = None) -> None:
        if page_size < 1:
            raise ValueError(f"page size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.block_keys = block_keys
        # What requests are about to compute.
        self.claims = TransientNodes(page_size)
        self.roots: dict[str, Root] = {}
        self.num_nodes = 0
        self._next_id = 0
        self._by_ticket: dict[Ticket, list[Node]] = {}
        self._evictable = [0] * len(_TIERS)
        self._resident = [0] * len(_TIERS)
        self._rank = EVICTION_POLICIES[eviction_policy]
        self._changed: Callable[[Node], None] = lambda node: None
        self._grown: Callable[[int | str, int | bytes], None] = lambda parent, page: None
        self._heaps: list[list[tuple[tuple[int, ...], int, Node]]] = [[] for _ in _TIERS]

    def watch(self, changed: Callable[[Node], None], grown: Callable[[int | str, int | bytes], None]) -> None:
        """Have every change told that could make a match come out differently. changed: a node got or lost a tier,
        was cut or merged. grown: a node, named by its id, or the root of a namespace got a child that begins with the
        page."""
        self._changed, self._grown = changed, grown

    # -- reading ------------------------------------------------------------------------------------------------

    def match(self, namespace: str, tokens: np.ndarray, fetching: bool = False) -> MatchResult:
        """The longest cached prefix of tokens (int32), in whole pages. Changes nothing.

        fetching: also what is on its way from storage to the host.
        """
        node: Node | None = self.roots.get(namespace)
        path: list[Node] = []
        last_len = device_len = peer_len = pos = 0
        page = self.page_size
        end = len(tokens) - len(tokens) % page
        on_device = is_near = True
        while node is not None and pos < end:
            child = node.children.get(tokens.item(pos) if page == 1 else tokens[pos : pos + page].tobytes())
            if child is None:
                break
            if child.frames[_DEVICE] is None:
                source = self.source_of(child)
                if source is None and not (fetching and is_fetching(child)):
                    break  # its backup, or its fetch, is still on the way: it is nowhere yet
                on_device = False
                is_near = is_near and source == _PEER
            key = child.key
            last_len = self._common(key, tokens, pos, end)
            path.append(child)
            pos += last_len
            if on_device:
                device_len = peer_len = pos
            elif is_near:
                peer_len = pos
            if last_len < len(key):
                break
            node = child
        return MatchResult(namespace, tuple(path), last_len, device_len, peer_len, pos)

    @staticmethod
    def source_of(node: Node) -> Tier | None:
        """The tier that a node is loaded from: the nearest that has it. None while all it has is on its way."""
        if node.frames[_PEER] is not None and node.tickets[_PEER] is None:
            return Tier.PEER
        if node.frames[_HOST] is not None and node.tickets[_HOST] is None:
            return Tier.HOST
        return None

    def is_nowhere(self, match: MatchResult, tokens: np.ndarray) -> bool:
        """Whether the match ended at a node that has left the device while its backup is still on the way. tokens:
        what was matched, and at least a page more."""
        node = match.path[-1] if match.path else self.roots.get(match.namespace)
        if node is None or (match.path and match.last_len < len(node.key)):
            return False
        return self.page_key(tokens, match.total_len) in node.children

    def evictable_pages(self, tier: Tier, keep: Node | None = None) -> int:
        """Pages that eviction could give up sooner or later: ready, and not locked if on the device. keep: as for
        `evict`."""
        pages = self._evictable[tier]
        while keep is not None:
            pages -= self._evictable_pages(keep, tier)
            keep = keep.parent
        return pages

    def evictable_pages_in(self, match: MatchResult) -> int:
        """Evictable device pages that locking the match would take out of eviction's reach."""
        pages = 0
        for node in match.path:
            pages += self._evictable_pages(node, Tier.DEVICE)
        if match.path and pages and self._evictable_pages(match.path[-1], Tier.DEVICE):
            pages -= (len(match.path[-1].key) - match.last_len) // self.page_size
        return pages

    def resident_pages(self, tier: Tier) -> int:
        return self._resident[tier]

    def nodes_of(self, ticket: Ticket) -> list[Node]:
        """Nodes whose frames the operation fills; none once it is committed or all were dropped."""
        return self._by_ticket.get(ticket, [])

    def walk(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack: list[Node] = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    # -- locks --------------------------------------------------------------------------------------------------

    def lock(self, match: MatchResult, now: int) -> Receipt:
        """Lock the matched path, splitting its last node if it matched in part."""
        return self.lock_node(self._end_of(match), now)

    def count_use(self, node: Node, priority: int = 0, num_uses: int = 1) -> None:
        """A request uses the path to `node`: eviction and writing may go by that. num_uses: 0 for a request that
        starts again; its priority counts for what it finds now."""
        step: Node | None = node
        while step is not None:
            step.hits += num_uses
            if priority > step.priority:
                step.priority = priority
            step = step.parent

    def lock_node(self, node: Node, now: int) -> Receipt:
        step: Node | None = node
        while step is not None:
            if step.lock == 0:
                self._evictable[_DEVICE] -= self._evictable_pages(step, _DEVICE)
            step.lock += 1
            step.last_access = now
            step = step.parent
        return Receipt(node)

    def unlock(self, receipt: Receipt, now: int, fence: int) -> None:
        """Release exactly what the receipt's lock took. fence: the last launch that may read the path."""
        step: Node | None = receipt.node
        while step is not None:
            assert step.lock > 0, f"{step} is not locked"
            step.lock -= 1
            step.last_access = now
            if fence > step.last_use:
                step.last_use = fence
            if step.lock == 0:
                self._evictable[_DEVICE] += self._evictable_pages(step, _DEVICE)
                if step.num_resident_children[_DEVICE] == 0:
                    self._offer(step, _DEVICE)
                    if step.frames[_DEVICE] is None:
                        self._offer(step, _PEER)
                        self._offer(step, _HOST)
                if step.parent is None:
                    self._prune(step)
            step = step.parent

    # -- growing ------------------------------------------------------------------------------------------------

    def insert_prefix(
        self,
        namespace: str,
        below: Node | None,
        tokens: np.ndarray,
        frames: np.ndarray,
        fence: int,
        now: int,
        priority: int = 0,
    ) -> InsertResult:
        """Enter device pages that launch `fence` writes, below the node where their prefix ends (None: the root).

        tokens: int32, whole pages; kept by reference. frames: one per page. Pages that the tree has already are
        returned as duplicates; a node that the device lacks adopts the offered frames; a FILLING node ends the run.
        """
        page = self.page_size
        assert len(tokens) == len(frames) * page
        node = below if below is not None else self._root(namespace)
        taken: list[np.ndarray] = []
        duplicates: list[np.ndarray] = []
        created: list[Node] = []
        pos = 0
        while pos < len(tokens):
            child = node.children.get(self.page_key(tokens, pos))
            if child is None:
                child = self._new_node(tokens[pos:], node)
                self._set_frames(child, Tier.DEVICE, frames[pos // page :], None, fence)
                child.last_access = now
                child.hits = 1
                child.priority = priority
                self._offer(child, Tier.DEVICE)
                taken.append(frames[pos // page :])
                created.append(child)
                node, pos = child, len(tokens)
                break
            if child.tickets[Tier.DEVICE] is not None:
                break
            common = self._common(child.key, tokens, pos, len(tokens))
            if common < len(child.key):
                child = self._split(child, common)
            offered = frames[pos // page : (pos + common) // page]
            mine = child.frames[Tier.DEVICE]
            if mine is None:
                self._set_frames(child, Tier.DEVICE, offered, None, fence)
                # If it was locked as the source of a load, it need not stay on the host any more.
                for tier in _TIERS:
                    self._offer(child, tier)
                taken.append(offered)
                created.append(child)
            else:
                taken.append(mine)
                duplicates.append(offered)
            child.last_access = now
            if priority > child.priority:
                child.priority = priority
            node = child
            pos += common
        none = frames[:0]
        return InsertResult(
            node=node,
            end=pos,
            frames=np.concatenate(taken) if len(taken) > 1 else (taken[0] if taken else none),
            duplicates=np.concatenate(duplicates) if len(duplicates) > 1 else (duplicates[0] if duplicates else none),
            created=tuple(created),
        )

    def begin_fill(self, nodes: list[Node], source: Tier, tier: Tier, frames: np.ndarray, ticket: Ticket) -> None:
        """Give nodes (of a path, top first) frames that the operation will fill from those of `source`, in order."""
        pos = 0
        for node in nodes:
            assert node.frames[tier] is None
            n = len(node.key) // self.page_size
            self._set_frames(node, tier, frames[pos : pos + n], ticket, node.fences[source])
            pos += n
        assert pos == len(frames)
        self._by_ticket[ticket] = list(nodes)

    def split(self, node: Node, num_tokens: int) -> Node:
        """Cut a node behind its first num_tokens, whole pages and not all. Returns the new upper part."""
        return self._split(node, num_tokens)

    def child_on(self, node: Node, tokens: np.ndarray) -> Node | None:
        """The child that begins with the first page of tokens (int32, whole pages), split where they part."""
        child = node.children.get(self.page_key(tokens, 0))
        if child is None:
            return None
        common = self._common(child.key, tokens, 0, len(tokens))
        return self._split(child, common) if common < len(child.key) else child

    def begin_spill(
        self,
        below: Node,
        tokens: np.ndarray,
        frames: np.ndarray,
        ticket: Ticket,
        fence: int,
        now: int,
        priority: int = 0,
    ) -> Node:
        """Enter pages that a request computed on the device, in host frames that the operation will fill; the device
        frames stay the request's own. For prefixes that the device has no room for.

        below: where they begin; it is on the host, or its backup is on the way. tokens: int32, whole pages; a child
        that begins with them has all of them, and is not on the host. frames: one per page. fence: the launch that
        computes the last of them.
        """
        assert below.parent is None or below.frames[_HOST] is not None, f"{below} is not on the host"
        node = self.child_on(below, tokens)
        if node is None:
            node = self._new_node(tokens, below)
            node.hits = 1
            node.priority = priority
        assert len(node.key) == len(tokens) and node.frames[_HOST] is None
        self._set_frames(node, Tier.HOST, frames, ticket, fence)
        node.last_access = now
        self._by_ticket[ticket] = [node]
        return node

    def take_back(self, node: Node) -> tuple[np.ndarray, Dropped]:
        """Take a node that nobody locks off the device, whose frames its caller keeps, and with it what is below.
        Returns the node's frames, and what was below it."""
        below, own = Dropped(), Dropped()
        for child in list(node.children.values()):
            self._drop(child, Tier.DEVICE, below)
        self._drop(node, Tier.DEVICE, own)
        ((frames, _),) = own.cached
        return frames, below

    def demote(self, node: Node, num_tokens: int, last_launch: int) -> Dropped:
        """Take the last num_tokens of a locked node off the device, and what is below them: its only user reads the
        host's copy from now on, through the layer stream cache. Launches up to last_launch may read them still."""
        assert node.lock == 1 and node.frames[_HOST] is not None and node.tickets[_HOST] is None
        if num_tokens < len(node.key):
            self._split(node, len(node.key) - num_tokens)
        dropped = Dropped()
        for child in list(node.children.values()):
            self._drop(child, Tier.DEVICE, dropped)
        node.last_use = last_launch
        self._take_frames(node, Tier.DEVICE, dropped)
        return dropped

    def begin_fetch(
        self,
        match: MatchResult,
        tokens: np.ndarray,
        frames: np.ndarray,
        block_keys: np.ndarray,
        ticket: Ticket,
        now: int,
        is_lossy: bool = False,
    ) -> Node:
        """Enter what storage has below a match (made with `fetching`), in host frames that the operation will fill.

        tokens: int32, whole pages up to the end of a block; frames: one per page; block_keys: of the blocks that end
        in them. The end of the match is on the host, or the root.
        """
        parent = self._end_of(match)
        assert parent.parent is None or parent.frames[_HOST] is not None, f"{parent} is not on the host"
        assert self.page_key(tokens, 0) not in parent.children
        node = self._new_node(tokens, parent)
        self._set_frames(node, Tier.HOST, frames, ticket, _NO_FENCE)
        node.last_access = now
        if parent.parent is not None:
            node.priority = min(node.priority, parent.priority)
        node.block_keys = block_keys
        node.stored = np.ones(len(block_keys), np.bool_)
        node.is_lossy |= is_lossy
        assert len(block_keys) == self._num_blocks(node)
        self._by_ticket[ticket] = [node]
        return node

    def cut(self, ticket: Ticket, tier: Tier, end: int) -> Dropped:
        """The operation filled its nodes only up to token `end` of their path: drop what lies behind."""
        dropped = Dropped()
        for node in list(self.nodes_of(ticket)):
            if node.frames[tier] is None or node.end <= end:
                continue
            if node.start < end:
                self._split(node, end - node.start)
            self._drop(node, tier, dropped)
        return dropped

    def commit(self, ticket: Ticket, tier: Tier) -> list[Node]:
        """The operation has filled its frames. Returns the nodes that still wanted them."""
        nodes = self._by_ticket.pop(ticket, [])
        for node in nodes:
            self._changed(node)
            node.tickets[tier] = None
            self._evictable[tier] += self._evictable_pages(node, tier)
            for t in _TIERS:
                self._offer(node, t)
        return nodes

    def retire(self, namespace: str) -> None:
        """Nobody will ask for this namespace again: what it has goes first, whatever the policy."""
        root = self.roots.get(namespace)
        stack = list(root.children.values()) if root is not None else []
        while stack:
            node = stack.pop()
            assert node.lock == 0, f"{node} is retired, and in use"
            node.last_access, node.hits, node.priority = _NO_FENCE, 0, _RETIRED_PRIORITY
            stack.extend(node.children.values())
            for tier in _TIERS:
                self._offer(node, tier)

    # -- blocks, as storage names them ------------------------------------------------------------------------------

    def name_blocks(self, node: Node) -> None:
        """Give the nodes on the path to `node` the keys of their blocks, where they have none yet."""
        names = self.block_keys
        assert names is not None
        path = self.path_of(node)
        first = next((i for i, n in enumerate(path) if n.block_keys is None), len(path))
        if first == len(path):
            return
        root = path[0].parent
        assert isinstance(root, Root)
        last, tail, lacking = names.root(root.namespace), path[0].key[:0], path[first].start % names.block_tokens
        for above in path[:first]:
            if above.block_keys is not None and len(above.block_keys):
                last = above.block_keys[-1].tobytes()
        # The tokens since the last border of a block.
        for above in reversed(path[:first]):
            if len(tail) >= lacking:
                break
            tail = np.concatenate((above.key, tail))
        tail = tail[len(tail) - lacking :]
        for each in path[first:]:
            run = np.concatenate((tail, each.key)) if len(tail) else each.key
            if each.block_keys is None:
                each.block_keys = names.chain(last, run)
                each.stored = np.zeros(len(each.block_keys), np.bool_)
            if len(each.block_keys):
                last = each.block_keys[-1].tobytes()
            tail = run[len(run) - each.end % names.block_tokens :]

    @staticmethod
    def mark_stored(path: list[Node], num_blocks: int) -> None:
        """The first blocks of these nodes, which follow each other and have their names, are believed stored."""
        for node in path:
            assert node.stored is not None
            node.stored[: max(0, num_blocks)] = True
            num_blocks -= len(node.stored)

    @staticmethod
    def forget_stored(node: Node) -> None:
        """Nothing of the node is believed stored."""
        if node.stored is not None:
            node.stored[:] = False

    @staticmethod
    def note_stream(node: Node, launch: LaunchSeq) -> None:
        """The launch reads the node's frames below the device through the layer stream cache."""
        node.last_stream = launch

    def rename_blocks(self, block_keys: BlockKeys | None) -> None:
        """Another storage, or none: forget all names and what was stored."""
        self.block_keys = block_keys
        for node in self.walk():
            node.block_keys = node.stored = None

    def path_of(self, node: Node) -> list[Node]:
        """Top first, without the root."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def root_of(self, node: Node) -> Root:
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, Root)
        return node

    # -- shrinking ----------------------------------------------------------------------------------------------

    def evict(
        self,
        tier: Tier,
        num_pages: int,
        keep: Node | None = None,
        before: Callable[[Node], object] = lambda node: None,
    ) -> Dropped:
        """Give up leaves of a tier, in the order of `_rank_on`, until num_pages are gone or none is left.

        The last leaf is split if a part of it is enough. keep: nodes on the path to it stay. before: told of each
        node while it still has its frames; it may save them elsewhere.
        """
        dropped = Dropped()
        kept = set()
        step = keep
        while step is not None:
            kept.add(step.id)
            step = step.parent
        put_back = []
        while num_pages > 0 and self._heaps[tier]:
            entry = heapq.heappop(self._heaps[tier])
            node = entry[2]
            if not self._is_evictable_leaf(node, tier):
                continue
            if entry[0] != (rank := self._rank_on(node, tier)):
                heapq.heappush(self._heaps[tier], (rank, node.id, node))
                continue
            if node.id in kept:
                put_back.append(entry)
                continue
            n = len(node.key) // self.page_size
            if n > num_pages:
                self._split(node, (n - num_pages) * self.page_size)
                n = num_pages
            num_pages -= n
            before(node)
            self._take_frames(node, tier, dropped)
        for entry in put_back:
            heapq.heappush(self._heaps[tier], entry)
        return dropped

    def drop(self, node: Node, tier: Tier) -> Dropped:
        """Take a node and all below it off a tier, whatever their age. On the device they must not be locked."""
        dropped = Dropped()
        self._drop(node, tier, dropped)
        return dropped

    def _drop(self, node: Node, tier: Tier, dropped: Dropped) -> None:
        stack, order = [node], []
        while stack:
            step = stack.pop()
            if step.frames[tier] is not None:
                order.append(step)
                stack.extend(step.children.values())
        for step in reversed(order):
            assert tier != Tier.DEVICE or step.lock == 0, f"{step} is locked: close its readers first"
            self._take_frames(step, tier, dropped)

    def compact(self, node: Node, done: int) -> None:
        """Merge the chain of single children that ends with `node` into its end, where all its parts are alike: same
        residency, nothing in flight, no lock that ends inside. Launches below `done` are over.

        Where the last parts are still in flight, as those of a request that has just ended are, the chain ends above
        them; the next request that ends there takes them in.
        """
        while node.parent is not None and not self._is_settled(node, done):
            node = node.parent
        chain = [node]
        while True:
            upper = chain[-1].parent
            if (
                upper is None
                or upper.parent is None
                or len(upper.children) != 1
                or upper.lock != node.lock
                or upper.is_lossy != node.is_lossy
                or not self._is_settled(upper, done)
                or any((upper.frames[t] is None) != (node.frames[t] is None) for t in _TIERS)
                or (upper.block_keys is None) != (node.block_keys is None)
            ):
                break
            chain.append(upper)
        if len(chain) == 1:
            return
        chain.reverse()
        top = chain[0]
        assert top.parent is not None
        first_key = self.page_key(top.key, 0)
        node.key = _join_keys([n.key for n in chain])
        for tier in _TIERS:
            if node.frames[tier] is not None:
                node.frames[tier] = np.concatenate([n.frames[tier] for n in chain])  # type: ignore[misc]
            node.fences[tier] = max(n.fences[tier] for n in chain)
        node.last_use = max(n.last_use for n in chain)
        node.last_stream = max(n.last_stream for n in chain)
        node.last_access = max(n.last_access for n in chain)
        node.hits = max(n.hits for n in chain)
        node.priority = max(n.priority for n in chain)
        if node.block_keys is not None:
            node.block_keys = np.concatenate([n.block_keys for n in chain])  # type: ignore[misc]
            node.stored = np.concatenate([n.stored for n in chain])  # type: ignore[misc]
        node.start = top.start
        node.parent = top.parent
        top.parent.children[first_key] = node
        self._changed(node)
        for gone in chain[:-1]:
            self._changed(gone)
            gone.parent = None
            gone.children = {}
            gone.frames = [None] * len(_TIERS)
            self.num_nodes -= 1

    def check_locks(self, receipts: Iterable[Receipt]) -> None:
        """receipts: of all locks that were taken and not released."""
        own = Counter(id(receipt.node) for receipt in receipts)
        for node in [*self.walk(), *self.roots.values()]:
            locks = own[id(node)] + sum(c.lock for c in node.children.values())
            assert node.lock == locks, f"{node}: locked {node.lock} times, {locks} known"

    # -- invariants ---------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        evictable, resident = [0] * len(_TIERS), [0] * len(_TIERS)
        num_nodes = 0
        filling: dict[Ticket, set[int]] = {}
        for node in self.walk():
            num_nodes += 1
            parent = node.parent
            assert parent is not None
            assert parent.children[self.page_key(node.key, 0)] is node
            assert len(node.key) > 0 and len(node.key) % self.page_size == 0
            assert node.is_lossy or not parent.is_lossy, f"{node} is computed from lossy KV and does not say so"
            assert node.start == parent.end, f"{node} starts at {node.start}, its parent ends at {parent.end}"
            if node.block_keys is not None:
                assert node.stored is not None and len(node.block_keys) == len(node.stored) == self._num_blocks(node)
            assert any(f is not None for f in node.frames), f"{node} is on no tier"
            assert node.lock >= sum(c.lock for c in node.children.values())
            assert parent.parent is None or node.priority <= parent.priority, f"{node} matters more than its prefix"
            is_there = node.frames[Tier.DEVICE] is not None or node.frames[Tier.HOST] is not None
            assert node.lock == 0 or is_there, f"{node} is locked and neither on the device nor on the host"
            for tier in _TIERS:
                frames, ticket = node.frames[tier], node.tickets[tier]
                count = sum(c.frames[tier] is not None for c in node.children.values())
                assert count == node.num_resident_children[tier]
                if frames is None:
                    assert ticket is None and count == 0, f"{node} has residents below it on {tier.name}"
                    continue
                assert len(frames) * self.page_size == len(node.key)
                resident[tier] += len(frames)
                evictable[tier] += self._evictable_pages(node, tier)
                if ticket is not None:
                    filling.setdefault(ticket, set()).add(node.id)
        assert num_nodes == self.num_nodes
        assert resident == self._resident, f"resident {self._resident}, by walk {resident}"
        assert evictable == self._evictable, f"evictable {self._evictable}, by walk {evictable}"
        listed = {t: {n.id for n in nodes} for t, nodes in self._by_ticket.items()}
        assert filling == listed, "tickets on nodes differ from the register"
        for tier in _TIERS:
            offered = {n.id for _, _, n in self._heaps[tier]}
            for node in self.walk():
                assert not self._is_evictable_leaf(node, tier) or node.id in offered, f"{node} can never be evicted"
        first = {n.id for rank, _, n in self._heaps[_PEER] if rank[0] == 0}
        for node in self.walk():
            if self._is_evictable_leaf(node, _PEER) and self._rank_on(node, _PEER)[0] == 0:
                assert node.id in first, f"{node} is on the device, and leaves the peer as if it were not"

    # -- inside -------------------------------------------------------------------------------------------------

    def page_key(self, tokens: np.ndarray, pos: int) -> int | bytes:
        if self.page_size == 1:
            return tokens.item(pos)
        return tokens[pos : pos + self.page_size].tobytes()

    def _common(self, key: np.ndarray, tokens: np.ndarray, pos: int, end: int) -> int:
        """Length of the prefix that key and tokens[pos:end] share, in whole pages; at least one page, as the caller
        found `key` by its first."""
        n = len(key)
        if n > end - pos:
            n = end - pos
            key = key[:n]
        part = tokens[pos : pos + n]
        # All but the last node of a path match as a whole: for short ones bytes tell that three times as fast.
        if n <= _COMPARE_AS_BYTES and key.tobytes() == part.tobytes():
            return n
        differs = key != part
        first = int(differs.argmax())
        return first - first % self.page_size if differs[first] else n

    def _end_of(self, match: MatchResult) -> Node:
        """The node that the match ends with, split if it matched in part."""
        if not match.path:
            return self._root(match.namespace)
        node = match.path[-1]
        return self._split(node, match.last_len) if match.last_len < len(node.key) else node

    def _num_blocks(self, node: Node) -> int:
        assert self.block_keys is not None
        size = self.block_keys.block_tokens
        return node.end // size - node.start // size

    def _root(self, namespace: str) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace)
        return root

    def _prune(self, node: Node) -> None:
        """Forget a root that nobody uses; namespaces come and go with their tenants."""
        if isinstance(node, Root) and not node.children and node.lock == 0:
            del self.roots[node.namespace]

    def _new_node(self, key: np.ndarray, parent: Node) -> Node:
        node = Node(self._next_id, _trimmed(key), parent)
        self._next_id += 1
        self.num_nodes += 1
        first_page = self.page_key(key, 0)
        parent.children[first_page] = node
        self._grown(parent.namespace if isinstance(parent, Root) else parent.id, first_page)
        return node

    def _split(self, node: Node, num_tokens: int) -> Node:
        assert 0 < num_tokens < len(node.key) and num_tokens % self.page_size == 0
        parent = node.parent
        assert parent is not None
        self._changed(node)
        upper = self._new_node(node.key[:num_tokens], parent)
        num_pages = num_tokens // self.page_size
        if node.block_keys is not None and node.stored is not None:
            n = self._num_blocks(upper)
            upper.block_keys, node.block_keys = node.block_keys[:n], node.block_keys[n:]
            upper.stored, node.stored = node.stored[:n].copy(), node.stored[n:].copy()
        node.key = _trimmed(node.key[num_tokens:])
        node.start = upper.end
        node.parent = upper
        upper.children[self.page_key(node.key, 0)] = node
        upper.lock = node.lock
        upper.hits = node.hits
        upper.priority = node.priority
        upper.is_lossy = node.is_lossy
        upper.last_access = node.last_access
        upper.last_use = node.last_use
        upper.last_stream = node.last_stream
        for tier in _TIERS:
            frames = node.frames[tier]
            if frames is None:
                continue
            upper.frames[tier] = _trimmed(frames[:num_pages])
            node.frames[tier] = _trimmed(frames[num_pages:])
            upper.fences[tier] = node.fences[tier]
            upper.num_resident_children[tier] = 1
            ticket = upper.tickets[tier] = node.tickets[tier]
            if ticket is not None:
                self._by_ticket[ticket].append(upper)
        return upper

    def _set_frames(self, node: Node, tier: Tier, frames: np.ndarray, ticket: Ticket | None, fence: int) -> None:
        assert node.parent is not None
        self._changed(node)
        node.frames[tier] = _trimmed(frames)
        node.tickets[tier] = ticket
        node.fences[tier] = fence
        node.parent.num_resident_children[tier] += 1
        self._resident[tier] += len(frames)
        self._evictable[tier] += self._evictable_pages(node, tier)

    def _take_frames(self, node: Node, tier: Tier, dropped: Dropped) -> None:
        """Take a leaf of the tier off it; a node on no tier leaves the tree."""
        frames, ticket, parent = node.frames[tier], node.tickets[tier], node.parent
        assert frames is not None and parent is not None and node.num_resident_children[tier] == 0
        self._changed(node)
        self._evictable[tier] -= self._evictable_pages(node, tier)
        self._resident[tier] -= len(frames)
        if ticket is None:
            fence = max(node.fences[tier], node.last_use) if tier == Tier.DEVICE else node.last_stream
            dropped.cached.append((frames, fence))
        else:
            waiting = self._by_ticket[ticket]
            waiting.remove(node)
            if not waiting:
                del self._by_ticket[ticket]
            dropped.filling.append((frames, ticket))
        node.frames[tier] = None
        node.tickets[tier] = None
        parent.num_resident_children[tier] -= 1
        if all(f is None for f in node.frames):
            del parent.children[self.page_key(node.key, 0)]
            node.parent = None
            self.num_nodes -= 1
            self._prune(parent)
        else:
            dropped.elsewhere.append(node)
            for t in _TIERS:
                self._offer(node, t)
        self._offer(parent, tier)

    def _evictable_pages(self, node: Node, tier: int) -> int:
        frames = node.frames[tier]
        if frames is None or node.tickets[tier] is not None or (tier == _DEVICE and node.lock > 0):
            return 0
        return len(frames)

    def _is_evictable_leaf(self, node: Node, tier: int) -> bool:
        """The source of a load stays where it is: while the load is in flight, else its failure could not be told
        from eviction, and from the lock of its path on, while room is made for it."""
        return (
            node.parent is not None
            and node.frames[tier] is not None
            and node.tickets[tier] is None
            and node.num_resident_children[tier] == 0
            and (
                node.lock == 0
                if tier == _DEVICE
                else node.tickets[_DEVICE] is None and (node.lock == 0 or node.frames[_DEVICE] is not None)
            )
        )

    def _rank_on(self, node: Node, tier: int) -> tuple[int, ...]:
        """What goes first of a tier: the smallest, as the policy says. Of peers before all else what the device has
        as well, so that together they hold different pages. Not so of the host, where pages are written once: what
        the device has and the host gave up would be lost when the device evicts it."""
        rank = self._rank(node)
        if tier != _PEER:
            return rank
        return int(node.frames[_DEVICE] is None and node.priority != _RETIRED_PRIORITY), *rank

    def _offer(self, node: Node, tier: int) -> None:
        """Enter a node among the candidates for eviction, if it is one. Entries go stale freely; `evict` checks. But
        whoever makes a rank fall offers the node again, else `evict` comes to it too late."""
        if not self._is_evictable_leaf(node, tier):
            return
        heap = self._heaps[tier]
        heapq.heappush(heap, (self._rank_on(node, tier), node.id, node))
        if len(heap) > 64 + 4 * self.num_nodes:
            best = {n.id: n for _, _, n in heap if self._is_evictable_leaf(n, tier)}
            self._heaps[tier] = [(self._rank_on(n, tier), n.id, n) for n in best.values()]
            heapq.heapify(self._heaps[tier])

    def _is_settled(self, node: Node, done: int) -> bool:
        return all(t is None for t in node.tickets) and all(f < done for f in node.fences)


def _trimmed(array: np.ndarray) -> np.ndarray:
    """A copy if the array is a small part of one that it would keep alive."""
    base = array.base
    if isinstance(base, np.ndarray) and base.nbytes > _KEPT_FOR_NOTHING + 4 * array.nbytes:
        return array.copy()
    return array


def _join_keys(keys: list[np.ndarray]) -> np.ndarray:
    """Concatenate; without a copy where the keys are neighbours in one array, as chunks of one request are."""
    base = keys[0].base
    if isinstance(base, np.ndarray) and base.ndim == 1 and all(k.base is base for k in keys):
        size = keys[0].itemsize
        starts = [(k.ctypes.data - base.ctypes.data) // size for k in keys]
        if all(s + len(k) == t for s, k, t in zip(starts, keys, starts[1:])):
            return base[starts[0] : starts[-1] + len(keys[-1])]
    return np.concatenate(keys)
