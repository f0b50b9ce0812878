"""`Node`: one edge of the radix tree and the pages on it; `Root`: where a namespace begins; and what the tree's
methods take and return. Plain data: hiradix_tree.py, block_names.py, radix.py and events.py alone write into nodes,
and controllers by `note_source` and `mark_next`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from sglang.srt.mem_cache.transfer import FETCH_LINKS, FRAME_TIERS, Ticket, Tier
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchSeq

NUM_TIERS = len(FRAME_TIERS)


class Node:
    """A page-aligned run of tokens below its parent. Its residency on a tier is all or nothing."""

    __slots__ = (
        "asked_end",
        "block_keys",
        "came_from",
        "children",
        "fences",
        "frames",
        "hits",
        "id",
        "is_host_partial",
        "is_lossy",
        "is_next",
        "is_partial",
        "is_stored_ahead",
        "key",
        "last_access",
        "last_end",
        "last_stream",
        "last_use",
        "lock",
        "merged_into",
        "num_device_children",
        "page_digests",
        "parent",
        "priority",
        "seen",
        "soft_pins",
        "start",
        "stored",
        "tickets",
        "was_copied",
        "weighted_until",
    )

    def __init__(self, node_id: int, key: np.ndarray, parent: Node | None) -> None:
        self.id = node_id
        # Tokens before it.
        self.start = 0 if parent is None else parent.end
        # int32, a slice of some request's tokens.
        self.key = key
        self.parent = parent
        # By the key of their first page, see radix.py.
        self.children: dict[int | bytes, Node] = {}
        # Per tier: int32, one per page, or None.
        self.frames: list[np.ndarray | None] = [None] * NUM_TIERS
        # Per tier: the operation that is filling the frames, or None when they are ready.
        self.tickets: list[Ticket | None] = [None] * NUM_TIERS
        # Per tier: the launch that wrote the data.
        self.fences: list[LaunchSeq] = [NO_LAUNCH] * NUM_TIERS
        # Whether the device frames lack what layers with a window have of it, as those that load it did not see it.
        self.is_partial = False
        # The same of the host, where layers with a window have pages of their own there.
        self.is_host_partial = False
        # Children that have device frames.
        self.num_device_children = 0
        # Locks that end here, plus those of the children.
        self.lock = 0
        # Waiting requests that are about to load it: those whose path ends here, plus those of the children.
        self.soft_pins = 0
        # Requests that computed it or found it.
        self.hits = 0
        # The highest priority of those requests; never above the parent's.
        self.priority = 0
        # Whether it came through a codec that changes KV, or was computed from what did.
        self.is_lossy: bool = parent is not None and parent.is_lossy
        # The farthest tier that its KV passed through on the way to where it is.
        self.came_from = Tier.DEVICE
        # Whether it was ever copied from the device, or came from elsewhere.
        self.was_copied = False
        # Whether the device gives it up soon, so that copies of it are kept. Ends with the next use.
        self.is_next = False
        # Whether it was stored since its last use, as the host gives it up soon.
        self.is_stored_ahead = False
        # The launch at which it was last locked, unlocked or inserted.
        self.last_access = LaunchSeq(0)
        # The launch at which a request's path last ended with it.
        self.last_end = NO_LAUNCH
        # Of the last prompt whose answer ends with this node: its tokens but the last, in whole pages. The same
        # prompt ends there.
        self.asked_end = 0
        # Per tier: as late as a session's weight makes its last access, see session_weights.py; None without one.
        # Never above the parent's.
        self.weighted_until: tuple[LaunchSeq, ...] | None = None
        # The last launch that may read the device frames.
        self.last_use = NO_LAUNCH
        # The last launch that may read the frames of other tiers, through the layer stream cache.
        self.last_stream = NO_LAUNCH
        # (n, 16) uint8, names of the blocks that end in this node; None until they are asked for.
        self.block_keys: np.ndarray | None = None
        # (n,) bool, of which of them layers with a window must be stored, too, see `WindowBlocks`.
        self.seen: np.ndarray | None = None
        # (n,) int8, what storage is believed to have of them, see block_names.py.
        self.stored: np.ndarray | None = None
        # (pages, 32) uint8, by which KV events name pages; None until one does.
        self.page_digests: np.ndarray | None = None
        # What it has become a part of, since when it is not in the tree.
        self.merged_into: Node | None = None

    def copy_use_of(self, node: Node) -> None:
        """Take over how a node was used, of which this one was a part."""
        self.lock, self.soft_pins = node.lock, node.soft_pins
        self.hits, self.priority, self.is_lossy = node.hits, node.priority, node.is_lossy
        self.came_from = node.came_from
        self.was_copied, self.is_next, self.is_stored_ahead = node.was_copied, node.is_next, node.is_stored_ahead
        self.last_access, self.last_use, self.last_stream = node.last_access, node.last_use, node.last_stream
        self.weighted_until = node.weighted_until

    def merge_use_of(self, chain: list[Node]) -> None:
        """Take over how nodes were used that become one; this is the last of them."""
        for name in (
            "last_use",
            "last_stream",
            "last_access",
            "last_end",
            "asked_end",
            "hits",
            "priority",
            "was_copied",
            "is_next",
        ):
            setattr(self, name, max(getattr(n, name) for n in chain))
        self.is_stored_ahead = all(n.is_stored_ahead for n in chain)
        for node in chain:
            if node.weighted_until is not None:
                self.take_weight(node.weighted_until)

    def take_weight(self, until: tuple[LaunchSeq, ...]) -> None:
        """Of several sessions' weights the largest counts."""
        before = self.weighted_until
        self.weighted_until = until if before is None else tuple(map(max, before, until))

    @property
    def end(self) -> int:
        return self.start + len(self.key)

    def __repr__(self) -> str:
        where = "+".join(t.name.lower() for t in FRAME_TIERS if self.frames[t] is not None)
        return f"Node({self.id}, {len(self.key)} tokens, {where or 'nowhere'}, lock {self.lock})"


def last_access_on(node: Node, tier: int) -> LaunchSeq:
    """The last access as a tier's eviction takes it."""
    if node.weighted_until is None:
        return node.last_access
    return max(node.last_access, node.weighted_until[tier])


def survivor_of(node: Node) -> Node | None:
    """The node, or what it has become a part of; None for a root and for what has left the tree."""
    while node.parent is None and node.merged_into is not None:
        node = node.merged_into
    return node if node.parent is not None else None


class Root(Node):
    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(-1, np.empty(0, np.int32), None)
        self.namespace = namespace


def is_ready(node: Node, tier: Tier) -> bool:
    """Whether a tier has a node, and nothing of it is on its way there."""
    return node.frames[tier] is not None and node.tickets[tier] is None


def is_whole(node: Node, tier: Tier) -> bool:
    """Whether a tier has all layers of a node, ready."""
    return is_ready(node, tier) and not is_partial_on(node, tier)


def is_partial_on(node: Node, tier: int) -> bool:
    """Whether what a tier has of a node, or gets, lacks layers with a window."""
    return (node.is_partial and tier == Tier.DEVICE) or (node.is_host_partial and tier == Tier.HOST)


def ready_frames(node: Node, tier: Tier, whole: bool = True) -> np.ndarray:
    """The frames of a node on a tier, which has it ready. whole: with all layers."""
    frames, is_there = node.frames[tier], is_whole if whole else is_ready
    assert frames is not None and is_there(node, tier), f"{node} is not ready on the {tier.name.lower()}"
    return frames


def is_lacking(node: Node) -> bool:
    """Whether the device lacks a node, or what layers with a window have of it."""
    return node.frames[Tier.DEVICE] is None or node.is_partial


def is_nowhere_whole(node: Node) -> bool:
    """Whether no tier has all layers of a node, or gets them."""
    return all([frames is None or is_partial_on(node, tier) for tier, frames in enumerate(node.frames)])


def is_alone_and_partial(node: Node) -> bool:
    """Whether the device has a node partial, and no tier has it whole, or gets it."""
    return node.is_partial and is_nowhere_whole(node)


def is_only_on_device(node: Node) -> bool:
    """Whether the device has a node whole, and no other tier has it or gets it."""
    return is_whole(node, Tier.DEVICE) and node.frames[Tier.PEER] is None and node.frames[Tier.HOST] is None


def is_hole(node: Node) -> bool:
    """Whether no tier has it, though some have what is below it."""
    return all([frames is None for frames in node.frames])


def is_pinned_copy(node: Node) -> bool:
    """Whether a waiting request has fetched on a node's path, or a running one reads it partial: as long as it does,
    what the device lacks of it comes from its copies alone."""
    return node.soft_pins > 0 or (node.is_partial and node.lock > 0)


def is_fetching(node: Node) -> bool:
    """Whether storage is bringing it to the host."""
    ticket = node.tickets[Tier.HOST]
    return ticket is not None and ticket.link in FETCH_LINKS


def path_of(node: Node) -> list[Node]:
    """Top first, without the root."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def root_of(node: Node) -> Root:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node


@dataclass(frozen=True)
class MatchResult:
    """Lengths are in tokens, multiples of the page size."""

    namespace: str
    # Nodes from the root down, the last one matched for last_len tokens.
    path: tuple[Node, ...]
    last_len: int
    # Found on the device; on any tier.
    device_len: int
    total_len: int
    # Runs [start, end) of those behind device_len that come from peers.
    peer_runs: tuple[tuple[int, int], ...] = ()
    # Partial nodes of which layers with a window see something from total_len on: that has to be loaded.
    to_complete: tuple[Node, ...] = ()
    # Whether one of them is on its way, partial, and has to arrive before the rest of it can be loaded.
    awaits_load: bool = False
    # Nodes that continue the tokens, and were cut off because no tier has what layers with a window would see there.
    beyond: tuple[Node, ...] = ()
    # Set if the match was cut where such layers lack something that storage may have: the length without a lack.
    whole_len: int | None = None

    @property
    def from_peers(self) -> int:
        """Tokens that come from peers."""
        return sum([end - start for start, end in self.peer_runs])

    def on_device(self) -> MatchResult:
        """The part of it that the device has."""
        pos, path = 0, []
        for node in self.path:
            if pos >= self.device_len:
                break
            path.append(node)
            pos += len(node.key)
        last_len = len(path[-1].key) - (pos - self.device_len) if path else 0
        return MatchResult(self.namespace, tuple(path), last_len, self.device_len, self.device_len)

    def above(self, place: int) -> MatchResult:
        """The part of it above the node at a place of the path."""
        path, end = self.path[:place], self.path[place].start
        runs = tuple((start, min(last, end)) for start, last in self.peer_runs if start < end)
        last_len = len(path[-1].key) if path else 0
        return MatchResult(self.namespace, path, last_len, min(self.device_len, end), end, runs)

    def up_to(self, place: int, end: int) -> MatchResult:
        """The part of it that ends at token `end`, which is in the node at a place of the path, or begins it."""
        node = self.path[place]
        if end == node.start:
            return self.above(place)
        runs = tuple((start, min(last, end)) for start, last in self.peer_runs if start < end)
        path = self.path[: place + 1]
        return MatchResult(self.namespace, path, end - node.start, min(self.device_len, end), end, runs)

    def to_load_behind(self, start: int) -> tuple[int, int]:
        """Tokens behind `start` that come from the host, and from peers. start: not below device_len."""
        from_peers = sum([max(0, end - max(begin, start)) for begin, end in self.peer_runs])
        return self.total_len - start - from_peers, from_peers


@dataclass(frozen=True)
class Receipt:
    """A lock on the path that ends with `node`."""

    node: Node


@dataclass(frozen=True)
class InsertResult:
    # Where the run ends.
    node: Node
    # Tokens taken over, counted from the start of the run; fewer than offered when a node is FILLING.
    end: int
    # The tree's frames for those tokens.
    frames: np.ndarray
    # Offered frames that the tree did not need.
    duplicates: np.ndarray
    # Nodes that took offered frames.
    created: tuple[Node, ...]
    # Frames of partial nodes in whose place offered ones came.
    replaced: Dropped


@dataclass(frozen=True)
class FilledRun:
    """Pages that an operation fills, of tokens that come below a node."""

    # int32, whole pages.
    tokens: np.ndarray
    # int32, one per page.
    frames: np.ndarray
    ticket: Ticket
    # The launch that computes the last of the tokens; NO_LAUNCH if storage brings them.
    fence: LaunchSeq
    priority: int = 0
    # Of the first so many pages layers with a window are left out.
    num_partial: int = 0


@dataclass
class Dropped:
    """Frames that left the tree."""

    # With the fence after which they may be reused, and those being filled with the operation that still writes them.
    cached: list[tuple[np.ndarray, int]] = field(default_factory=list)
    filling: list[tuple[np.ndarray, Ticket]] = field(default_factory=list)
    # Their nodes that stay in the tree, on another tier or as holes.
    staying: list[Node] = field(default_factory=list)


def note_source(nodes: Iterable[Node], tier: Tier) -> None:
    """Their KV has come from a tier."""
    for node in nodes:
        node.came_from = max(node.came_from, tier)


def mark_next(nodes: Iterable[Node]) -> None:
    """A tier gives these up soon: copies on farther tiers stay."""
    for node in nodes:
        node.is_next = True
