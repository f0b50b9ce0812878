"""`HiRadixTree`: the radix tree that knows *where* every cached page is, on every tier.

Owns the nodes, their keys and their residency. Never touches memory, frame states (see frame_table.py), links or
clocks: numpy arrays in, decisions out. Time is counted in launches.

A node covers a page-aligned run of tokens below its parent. Its residency on a tier is all or nothing: the frames
(int32, one per page) or None. The device is prefix-closed. Behind what it has, each node is on peers, on the host, on
both, or is a hole: a node that no tier has, with residents below it.

    root --- [system prompt] --- [turn 1] --- [turn 2] --- [turn 3] --- [turn 4]
              device+host         device        peer         host        peer+host   2 nodes DEVICE, 3 to LOAD
                                                  if it leaves the peer: a hole, and the match ends above it

A match ends at a hole. Inserting or fetching fills it. A hole below which nothing is left leaves the tree.

A split keeps the identity of the lower half, so that locks, which name the end of a path, stay valid:

    before   parent --- node(abcdef)             after   parent --- upper(abc) --- node(def)
             frames 0 1 2 3 4 5                          frames 0 1 2    frames 3 4 5
             ticket t, fence f, lock n                   t, f, n         t, f, n

Matching never splits. Locking, inserting, loading, fetching and eviction may.

What storage has is no residency: a node that no tier has leaves the tree, or stays as a hole while others are below
it. The names of blocks, by which storage knows them, are in block_names.py; what requests are about to compute is in
transient_nodes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator

import numpy as np

from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.block_names import BlockNames
from sglang.srt.mem_cache.eviction import EVICTION_POLICIES, RETIRED_PRIORITY
from sglang.srt.mem_cache.eviction_order import EvictionOrder
from sglang.srt.mem_cache.node import (
    NUM_TIERS,
    Dropped,
    FilledRun,
    InsertResult,
    MatchResult,
    Node,
    Receipt,
    Root,
    is_fetching,
    is_hole,
    is_lacking,
    is_nowhere_whole,
    is_partial_on,
    is_pinned_copy,
    is_ready,
    is_whole,
    path_of,
    root_of,
)
from sglang.srt.mem_cache.page_counts import PageCounts, evictable_pages
from sglang.srt.mem_cache.page_watcher import PageWatcher
from sglang.srt.mem_cache.placement import LAST
from sglang.srt.mem_cache.radix import PageKey, common_len, join_keys, page_key_of, put_above, trimmed
from sglang.srt.mem_cache.transfer import FETCH_LINKS, FRAME_TIERS, Ticket, Tier
from sglang.srt.mem_cache.transient_nodes import TransientNodes
from sglang.srt.mem_cache.tree_checks import check_tree
from sglang.srt.mem_cache.window_reach import WindowReach
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchSeq

# Plain integers: looking up a member of an enumeration costs as much as the rest of a line.
_DEVICE, _PEER, _HOST = int(Tier.DEVICE), int(Tier.PEER), int(Tier.HOST)


class HiRadixTree:
    """eviction_policy: of `EVICTION_POLICIES`. window_reach: see `SchedulerConfig`."""

    def __init__(self, page_size: int, eviction_policy: str = "lru", window_reach: int = 0) -> None:
        self.page_size = page_size
        self.page_key = page_key_of(page_size)
        self.names = BlockNames()
        # What requests are about to compute.
        self.claims = TransientNodes(page_size)
        self.roots: dict[str, Root] = {}
        self.num_nodes = 0
        self._next_id = 0
        self._by_ticket: dict[Ticket, list[Node]] = {}
        self.counts = PageCounts()
        # What each tier gives up next, and the name of the policy.
        self.order = EvictionOrder(EVICTION_POLICIES[eviction_policy], page_size, self.split)
        self.eviction_policy = eviction_policy
        # Which nodes have to be whole.
        self.windows = WindowReach(window_reach, page_size, self.order, self.split)
        self._changed: Callable[[Node], None] = lambda node: None
        # Called with each node that leaves its last tier, while it is still in the tree.
        self.lost: Callable[[Node, Tier], None] = lambda node, tier: None
        self._grown: Callable[[int | str, PageKey], None] = lambda parent, page: None
        # Told what comes to tiers and leaves them.
        self.pages = PageWatcher()

    def watch(self, changed: Callable[[Node], None], grown: Callable[[int | str, PageKey], None]) -> None:
        """Have every change told that could make a match come out differently. changed: a node got or lost a tier,
        was cut or merged. grown: a node, named by its id, or the root of a namespace got a child that begins with the
        page."""
        self._changed, self._grown = changed, grown

    # -- reading ------------------------------------------------------------------------------------------------

    def match(self, namespace: str, tokens: np.ndarray, fetching: bool = False, wanted: int = 0) -> MatchResult:
        """The longest cached prefix of tokens (int32), in whole pages. Changes nothing.

        fetching: also what is on its way from storage to the host, up to what storage may have; see
        `WindowReach.known`, also for wanted.
        """
        node: Node | None = self.roots.get(namespace)
        path: list[Node] = []
        last_len = device_len = pos = 0
        peer_runs: list[tuple[int, int]] = []
        page = self.page_size
        end = len(tokens) - len(tokens) % page
        on_device = True
        while node is not None and pos < end:
            child = node.children.get(tokens.item(pos) if page == 1 else tokens[pos : pos + page].tobytes())
            if child is None:
                break
            if child.frames[_DEVICE] is None:
                source = self.source_of(child)
                if source is None and not (fetching and is_fetching(child)):
                    break  # a hole, or on its way: no tier has it ready
                on_device = False
            key = child.key
            last_len = common_len(key, tokens, pos, end, page)
            path.append(child)
            pos += last_len
            if on_device:
                device_len = pos
            elif source == _PEER:
                is_adjacent = peer_runs and peer_runs[-1][1] == pos - last_len
                peer_runs.append((peer_runs.pop()[0] if is_adjacent else pos - last_len, pos))
            if last_len < len(key):
                break
            node = child
        match = MatchResult(namespace, tuple(path), last_len, device_len, pos, tuple(peer_runs))
        if fetching:
            return self.windows.known(match, self._comes_whole, wanted)
        return self.windows.longest_whole(match, self.whole_source_of)

    def source_of(self, node: Node) -> Tier | None:
        """The first tier of the load order that is read and has a node; None while all it has is on its way."""
        for tier in self.order.load_order:
            if node.frames[tier] is not None and node.tickets[tier] is None and tier not in self.order.unread:
                return tier
        return None

    def whole_source_of(self, node: Node) -> Tier | None:
        """The same of those that have all its layers."""
        for tier in self.order.load_order:
            if is_whole(node, tier) and tier not in self.order.unread:
                return tier
        return None

    def has_whole_below(self, node: Node) -> bool:
        """Whether a tier below the device has all layers of a node, read or not."""
        return self.order.ready_tier(node, whole=True) is not None

    def is_coming(self, node: Node) -> bool:
        """Whether a tier that is read will have a node that is under way to it."""
        return any(node.tickets[tier] is not None for tier in self.order.load_order if tier not in self.order.unread)

    def _comes_whole(self, node: Node) -> bool:
        """Whether such a tier has all its layers, or will."""
        read = [tier for tier in self.order.load_order if tier not in self.order.unread]
        return any([node.frames[tier] is not None and not is_partial_on(node, tier) for tier in read])

    def next_unmatched(self, match: MatchResult, tokens: np.ndarray) -> Node | None:
        """The node at which the match ended though it continues the tokens: a hole, one that has left the device
        while its backup is on the way, one that only tiers have that are not read, or a partial one, which it may end
        in. tokens: what was matched, and at least a page more."""
        node = match.path[-1] if match.path else self.roots.get(match.namespace)
        if node is None:
            return None
        if match.path and match.last_len < len(node.key):
            is_same = self.page_key(node.key, match.last_len) == self.page_key(tokens, match.total_len)
            return node if is_same else None
        return node.children.get(self.page_key(tokens, match.total_len))

    def evictable_pages(self, tier: Tier, kept: Iterable[Node] = (), spares_pinned: bool = False) -> int:
        """Pages that eviction could give up sooner or later, see `page_counts.evictable_pages`. Of peers and host
        some may have to wait for those below them, on other tiers. kept: nodes that stay. spares_pinned: pinned
        copies stay, too, see `is_pinned_copy`."""
        if not spares_pinned:
            return self.counts.evictable[tier] - sum(evictable_pages(node, tier) for node in kept)
        return self.counts.unpinned[tier] - sum(evictable_pages(n, tier) for n in kept if not is_pinned_copy(n))

    def evictable_pages_in(self, match: MatchResult) -> int:
        """Evictable device pages that locking the match would take out of eviction's reach."""
        pages = 0
        for node in match.path:
            pages += evictable_pages(node, Tier.DEVICE)
        if match.path and pages and evictable_pages(match.path[-1], Tier.DEVICE):
            pages -= (len(match.path[-1].key) - match.last_len) // self.page_size
        return pages

    def resident_pages(self, tier: Tier) -> int:
        return self.counts.resident[tier]

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

    @staticmethod
    def walk_below(root: Root) -> Iterator[Node]:
        """Every node of a namespace, parents first."""
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- locks --------------------------------------------------------------------------------------------------

    def lock(self, match: MatchResult, launch: LaunchSeq) -> Receipt:
        """Lock the matched path, splitting its last node if it matched in part."""
        return self.lock_node(self._end_of(match), launch)

    def count_use(self, node: Node, priority: int = 0, num_uses: int = 1) -> None:
        """A request uses the path to `node`: eviction and writing may go by that. num_uses: 0 for a request that
        starts again; its priority counts for what it finds now."""
        step: Node | None = node
        while step is not None:
            step.hits += num_uses
            if priority > step.priority:
                step.priority = priority
            step = step.parent

    def lock_node(self, node: Node, launch: LaunchSeq) -> Receipt:
        node.last_end = launch
        step: Node | None = node
        while step is not None:
            if step.lock == 0:
                self._count_lock(step, 1)
            else:
                step.lock += 1
            step.last_access = launch
            step.is_stored_ahead = False
            if step.is_next:
                step.is_next = False
                self._offer(step, _PEER)
                self._offer(step, _HOST)
            step = step.parent
        return Receipt(node)

    def unlock(self, receipt: Receipt, launch: LaunchSeq, fence: LaunchSeq) -> None:
        """Release exactly what the receipt's lock took. fence: the last launch that may read the path."""
        step: Node | None = receipt.node
        while step is not None:
            assert step.lock > 0, f"{step} is not locked"
            if step.lock == 1:
                self._count_lock(step, -1)
            else:
                step.lock -= 1
            step.last_access = launch
            if fence > step.last_use:
                step.last_use = fence
            if step.lock == 0:
                if step.num_device_children == 0:
                    self._offer(step, _DEVICE)
                if step.frames[_DEVICE] is None or step.is_partial:
                    self._offer(step, _PEER)
                    self._offer(step, _HOST)
                if step.parent is None:
                    self._prune(step)
            step = step.parent

    def _count_lock(self, node: Node, change: int) -> None:
        """The first lock of a node is taken, or the last one released: other pages can be evicted then."""
        # Of what the device has whole, the copies on other tiers can be evicted, locked or not.
        tiers = FRAME_TIERS if is_lacking(node) else (_DEVICE,)
        for tier in tiers:
            self.counts.take_out(node, tier)
        node.lock += change
        for tier in tiers:
            self.counts.put_in(node, tier)

    def soft_pin(self, node: Node) -> None:
        """A waiting request is about to load the path to `node`: peers and host give it up after everything else."""
        self._add_soft_pins(node, 1)

    def end_soft_pin(self, node: Node) -> None:
        """End one soft pin; a no-op if the node has left the tree, and the pin with it."""
        if node.parent is not None:
            self._add_soft_pins(node, -1)

    def _add_soft_pins(self, node: Node, num: int) -> None:
        step: Node | None = node
        while step is not None:
            for tier in (_PEER, _HOST):
                self.counts.take_out(step, tier)
            step.soft_pins += num
            assert step.soft_pins >= 0, f"{step} has no soft pin"
            for tier in (_PEER, _HOST):
                self.counts.put_in(step, tier)
                if not step.soft_pins:
                    self._offer(step, tier)
            step = step.parent

    def weight(self, node: Node, until: tuple[LaunchSeq, ...]) -> None:
        """Have the path to `node` count as last accessed then, per tier, unless it is later already."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            step.take_weight(until)
            step = step.parent

    # -- growing ------------------------------------------------------------------------------------------------

    def insert_prefix(
        self,
        namespace: str,
        below: Node | None,
        tokens: np.ndarray,
        frames: np.ndarray,
        fence: LaunchSeq,
        launch: LaunchSeq,
        priority: int = 0,
    ) -> InsertResult:
        """Enter device pages that launch `fence` writes, below the node where their prefix ends (None: the root).

        tokens: int32, whole pages; kept by reference. frames: one per page. Pages that the tree has already are
        returned as duplicates; a node that the device lacks adopts the offered frames, and one that is partial takes
        them in place of its own; a FILLING node ends the run, and a partial one that is locked.
        """
        page = self.page_size
        assert len(tokens) == len(frames) * page
        node = below if below is not None else self._root(namespace)
        taken: list[np.ndarray] = []
        duplicates: list[np.ndarray] = []
        created: list[Node] = []
        replaced = Dropped()
        pos = 0
        while pos < len(tokens):
            child = node.children.get(self.page_key(tokens, pos))
            if child is None:
                child = self._new_node(tokens[pos:], node)
                self._set_frames(child, Tier.DEVICE, frames[pos // page :], None, fence)
                child.last_access = launch
                child.hits = _first_hits(node)
                child.priority = priority
                self._offer(child, Tier.DEVICE)
                taken.append(frames[pos // page :])
                created.append(child)
                node, pos = child, len(tokens)
                break
            if child.tickets[Tier.DEVICE] is not None or (child.is_partial and child.lock):
                break
            common = common_len(child.key, tokens, pos, len(tokens), page)
            if common < len(child.key):
                child = self.split(child, common)
            child.last_access = max(child.last_access, launch)
            child.priority = max(child.priority, priority)
            offered = frames[pos // page : (pos + common) // page]
            mine = child.frames[Tier.DEVICE]
            if mine is not None and not child.is_partial:
                taken.append(mine)
                duplicates.append(offered)
            else:
                if is_nowhere_whole(child):
                    child.is_lossy = node.is_lossy
                    child.came_from = Tier.DEVICE
                    # A request has missed it: what counts as stored may not be.
                    self.names.forget_stored(child)
                if mine is not None:
                    replaced.cached.append((mine, max(child.fences[_DEVICE], child.last_use)))
                    self.pages.left(child, _DEVICE)
                self._set_frames(child, Tier.DEVICE, offered, None, fence)
                # If it was locked as the source of a load, it need not stay on the host any more.
                for tier in FRAME_TIERS:
                    self._offer(child, tier)
                taken.append(offered)
                created.append(child)
            node = child
            pos += common
        none = frames[:0]
        return InsertResult(
            node=node,
            end=pos,
            frames=np.concatenate(taken) if len(taken) > 1 else (taken[0] if taken else none),
            duplicates=np.concatenate(duplicates) if len(duplicates) > 1 else (duplicates[0] if duplicates else none),
            created=tuple(created),
            replaced=replaced,
        )

    def begin_fill(
        self,
        nodes: list[Node],
        source: Tier,
        tier: Tier,
        frames: np.ndarray,
        ticket: Ticket,
        num_partial: int = 0,
    ) -> None:
        """Give nodes (of a path, top first) frames that the operation will fill from those of `source`, in order. The
        first num_partial will be partial."""
        pos = 0
        for i, node in enumerate(nodes):
            assert node.frames[tier] is None
            n = len(node.key) // self.page_size
            self._set_frames(node, tier, frames[pos : pos + n], ticket, node.fences[source], i < num_partial)
            node.was_copied = True
            self._offer(node, source)
            pos += n
        assert pos == len(frames)
        self._by_ticket[ticket] = list(nodes)

    def begin_completing(self, nodes: list[Node], ticket: Ticket) -> None:
        """The operation will load what the device lacks of partial nodes."""
        for node in nodes:
            assert node.is_partial and node.tickets[_DEVICE] is None
            self._changed(node)
            self.pages.left(node, _DEVICE)
            self._count_out(node, _DEVICE)
            node.is_partial, node.tickets[_DEVICE] = False, ticket
            self._count_in(node, _DEVICE)
        self._by_ticket[ticket] = list(nodes)

    def make_partial(self, node: Node, tier: Tier = Tier.DEVICE) -> None:
        """The device, or the host, loses what layers with a window have of a node."""
        assert is_whole(node, tier)
        self._changed(node)
        self._count_out(node, tier)
        if tier == _DEVICE:
            node.is_partial = True
        else:
            node.is_host_partial = True
        self._count_in(node, tier)
        if is_nowhere_whole(node):
            self.lost(node, tier)
        self._offer(node, _PEER)
        self._offer(node, _HOST)

    def child_on(self, node: Node, tokens: np.ndarray) -> Node | None:
        """The child that begins with the first page of tokens (int32, whole pages), split where they part."""
        child = node.children.get(self.page_key(tokens, 0))
        if child is None:
            return None
        common = common_len(child.key, tokens, 0, len(tokens), self.page_size)
        return self.split(child, common) if common < len(child.key) else child

    def put_run(self, below: Node, run: FilledRun, tier: Tier, launch: LaunchSeq) -> Node:
        """Enter a run of tokens on a tier other than the device, in frames that an operation will fill. Returns its
        node.

        below: where the run begins. A child that begins with the run's tokens has all of them, and is not on the
        tier.
        """
        node = self.child_on(below, run.tokens)
        if node is None:
            node = self._new_node(run.tokens, below)
            node.hits = _first_hits(below)
            node.priority = run.priority
        assert len(node.key) == len(run.tokens) and node.frames[tier] is None
        self._set_frames(node, tier, run.frames, run.ticket, run.fence)
        node.was_copied = True
        step: Node | None = node
        while step is not None and step.last_access < launch:
            step.last_access = launch
            step = step.parent
        self._by_ticket[run.ticket] = [node]
        return node

    def take_off_device(self, node: Node, num_tokens: int) -> tuple[Dropped, Dropped]:
        """Take the last num_tokens of a node off the device, and what is below them. Returns what was below, and the
        node's own. Unlike `drop`, the node itself may be locked: its user reads another tier's copy from now on."""
        if num_tokens < len(node.key):
            self.split(node, len(node.key) - num_tokens)
        below, own = Dropped(), Dropped()
        for child in list(node.children.values()):
            self._drop_subtree(child, below)
        self._take_frames(node, Tier.DEVICE, own)
        return below, own

    @staticmethod
    def note_read(node: Node, launch: LaunchSeq) -> None:
        """Launches up to this one may read the node's device frames."""
        node.last_use = launch

    def begin_fetch(
        self,
        match: MatchResult,
        run: FilledRun,
        block_keys: np.ndarray,
        launch: LaunchSeq,
        is_lossy: bool,
        lacking: Collection[int] = (),
    ) -> tuple[Node, Dropped]:
        """Enter what storage has below a match (made with `fetching`), in host frames that the operation will fill.
        Returns their end, and the frames in whose place they come, of what the host has partial.

        run: its tokens end with a block, or where the node ends that it fills: a hole, one that peers have, or that
        the host has partial. block_keys: of the blocks that end in it. lacking: see `BlockNames.name_fetched`.
        """
        parent, replaced = self._end_of(match), Dropped()
        if (node := self.child_on(parent, run.tokens)) is not None and node.is_host_partial:
            self._take_partial(node, replaced)
        node = self.put_run(parent, run, Tier.HOST, launch)
        self.names.name_fetched(node, block_keys, lacking)
        self._note_fetch(node, parent, is_lossy)
        if num_tokens := run.num_partial * self.page_size:
            front = self.split(node, num_tokens) if num_tokens < len(node.key) else node
            front.is_host_partial = True
        return node, replaced

    def _take_partial(self, node: Node, replaced: Dropped) -> None:
        """Take off the host what it has partial, as all of it comes at once."""
        frames = node.frames[_HOST]
        assert frames is not None and node.tickets[_HOST] is None
        self._changed(node)
        self._count_out(node, _HOST)
        self.pages.left(node, _HOST)
        replaced.cached.append((frames, node.last_stream))
        node.frames[_HOST], node.is_host_partial = None, False
        self._count_in(node, _HOST)

    @staticmethod
    def _note_fetch(node: Node, parent: Node, is_lossy: bool) -> None:
        """How exact, and how much used, is what storage brings."""
        if node.frames[_PEER] is not None or node.frames[_DEVICE] is not None:
            return  # as before
        # No request has computed it. A hole was used as often as what is behind it.
        if not node.children:
            node.hits = 0
        if parent.parent is not None:
            node.priority = min(node.priority, parent.priority)
        node.is_lossy = parent.is_lossy or is_lossy
        stack = list(node.children.values()) if node.is_lossy else []
        while stack:
            # What is below a hole must not count as exact behind a prefix that is not.
            child = stack.pop()
            child.is_lossy = True
            stack.extend(child.children.values())

    def replace_frames(self, node: Node, tier: Tier, frames: np.ndarray) -> None:
        """The tier has the node's pages in other frames, ready, int32, one per page."""
        assert is_ready(node, tier)
        node.frames[tier] = trimmed(frames)

    def cut(self, ticket: Ticket, tier: Tier, end: int) -> Dropped:
        """The fetch filled its nodes only up to token `end` of their path: drop what lies behind, and what is being
        fetched below it."""
        dropped = Dropped()
        stack = []
        for node in list(self.nodes_of(ticket)):
            if node.end <= end:
                continue
            if node.start < end:
                self.split(node, end - node.start)
            stack.append(node)
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if is_fetching(node):
                self._take_frames(node, tier, dropped)
        return dropped

    def commit(self, ticket: Ticket, tier: Tier) -> list[Node]:
        """The operation has filled its frames. Returns the nodes that still wanted them."""
        nodes = self._by_ticket.pop(ticket, [])
        for node in nodes:
            self._changed(node)
            self._count_out(node, tier)
            node.tickets[tier] = None
            self._count_in(node, tier)
            self._offer_everywhere(node)
        for node in sorted(nodes, key=lambda n: n.start):
            self.pages.placed(node, tier)
        return nodes

    def retire(self, namespace: str) -> None:
        """No request will ask for this namespace again: what it has is evicted first, whatever the policy."""
        root = self.roots.get(namespace)
        stack = list(root.children.values()) if root is not None else []
        while stack:
            node = stack.pop()
            assert node.lock == 0, f"{node} is retired, and in use"
            node.last_access, node.hits, node.priority = NO_LAUNCH, 0, RETIRED_PRIORITY
            node.weighted_until = None
            stack.extend(node.children.values())
            self._offer_everywhere(node)

    def set_load_order(self, order: tuple[Tier, ...], unread: frozenset[Tier] = frozenset()) -> None:
        """order: see `EvictionOrder`. unread: no match counts on what only these tiers have."""
        if (order, unread) == (self.order.load_order, self.order.unread):
            return
        # What one tier has comes from there in any order, if it is read.
        at_least = 2 if unread == self.order.unread else 1
        self.order.load_order, self.order.unread = order, unread
        for node in self.walk():
            if sum([node.frames[tier] is not None for tier in order]) >= at_least:
                self._changed(node)
                self._offer_everywhere(node)

    def set_placement(self, adds_up: bool) -> None:
        """adds_up: see `EvictionOrder`."""
        if adds_up == self.order.adds_up:
            return
        self.order.adds_up = adds_up
        for node in self.walk():
            self._offer_everywhere(node)

    def set_eviction_policy(self, name: str) -> None:
        """name: of `EVICTION_POLICIES`."""
        self.eviction_policy = name
        self.order.policy = EVICTION_POLICIES[name]
        for node in self.walk():
            self._offer_everywhere(node)

    def rename_blocks(self, block_keys: BlockKeys | None, num_stores: int = 1) -> None:
        """Another storage, or none: forget all names of blocks and what was stored."""
        self.names.rename(block_keys, num_stores, self.walk())
        self.order.cut_tokens = block_keys.block_tokens if block_keys is not None else self.page_size

    def take_to_store(self, nodes: Iterable[Node], place: int) -> list[Node]:
        """Of nodes that the host gives up soon, those that nothing else has and that were not taken since their last
        use. It is not known that the store at that place still has them."""
        last = [n for n in nodes if self.order.class_of(n, Tier.HOST) == LAST]
        taken = [node for node in last if not node.is_stored_ahead]
        for node in taken:
            node.is_stored_ahead = True
            self.names.forget_stored(node, place)
        return taken

    def note_answer(self, end: Node, num_prompt: int) -> None:
        """A path ends with the answer to a prompt of so many tokens, of which the last is computed when it is asked
        again."""
        end.asked_end = (num_prompt - 1) // self.page_size * self.page_size

    @staticmethod
    def note_stream(node: Node, launch: LaunchSeq) -> None:
        """The launch reads the node's frames below the device through the layer stream cache."""
        node.last_stream = launch

    path_of, root_of = staticmethod(path_of), staticmethod(root_of)

    # -- shrinking ----------------------------------------------------------------------------------------------
    def victims(
        self, tier: Tier, num_pages: int, kept: Container[int] = (), stay: bool = True, splits: bool = True
    ) -> list[Node]:
        """See `EvictionOrder.victims`. All stay where they are; `give_up` takes them off in this order. stay: False
        if they are given up next."""
        return self.order.victims(tier, num_pages, kept, stay, splits)

    def give_up(self, nodes: Iterable[Node], tier: Tier) -> Dropped:
        """Take victims off a tier."""
        dropped = Dropped()
        for node in nodes:
            self._take_frames(node, tier, dropped)
        return dropped

    def drop(self, nodes: Iterable[Node], tier: Tier) -> Dropped:
        """Take nodes off a tier, whatever their age. The device loses all below them, too, which must not be locked.
        On other tiers the rest stays, behind a hole if need be. What the tier does not have is left alone."""
        dropped = Dropped()
        for node in nodes:
            if tier == Tier.DEVICE:
                self._drop_subtree(node, dropped)
            elif node.frames[tier] is not None:
                self._take_frames(node, tier, dropped)
        return dropped

    def _drop_subtree(self, node: Node, dropped: Dropped) -> None:
        """Take a node and all below it off the device."""
        stack, order = [node], []
        while stack:
            step = stack.pop()
            if step.frames[_DEVICE] is not None:
                order.append(step)
                stack.extend(step.children.values())
        for step in reversed(order):
            assert step.lock == 0, f"{step} is locked: end the holds of its readers first"
            self._take_frames(step, Tier.DEVICE, dropped)

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
                or upper.soft_pins != node.soft_pins
                or (upper.is_lossy, upper.came_from) != (node.is_lossy, node.came_from)
                or not self._is_settled(upper, done)
                or any((upper.frames[t] is None) != (node.frames[t] is None) for t in FRAME_TIERS)
                or (upper.is_partial, upper.is_host_partial) != (node.is_partial, node.is_host_partial)
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
        node.key = join_keys([n.key for n in chain])
        for tier in FRAME_TIERS:
            if node.frames[tier] is not None:
                node.frames[tier] = np.concatenate([n.frames[tier] for n in chain])  # type: ignore[misc]
            node.fences[tier] = max(n.fences[tier] for n in chain)
        node.merge_use_of(chain)
        self.names.join(chain)
        self.pages.joined(chain)
        node.start = top.start
        node.parent = top.parent
        top.parent.children[first_key] = node
        self._changed(node)
        for gone in chain[:-1]:
            self._changed(gone)
            gone.parent, gone.merged_into = None, node
            gone.children = {}
            gone.frames = [None] * NUM_TIERS
            self.num_nodes -= 1

    # -- invariants ---------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        check_tree(self)

    # -- inside -------------------------------------------------------------------------------------------------

    def _end_of(self, match: MatchResult) -> Node:
        """The node that the match ends with, split if it matched in part."""
        if not match.path:
            return self._root(match.namespace)
        node = match.path[-1]
        return self.split(node, match.last_len) if match.last_len < len(node.key) else node

    def _root(self, namespace: str) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace)
        return root

    def _prune(self, node: Node) -> None:
        """Forget a root that is not used; namespaces come and go with their tenants."""
        if isinstance(node, Root) and not node.children and node.lock == 0:
            del self.roots[node.namespace]

    def _new_node(self, key: np.ndarray, parent: Node) -> Node:
        node = Node(self._next_id, trimmed(key), parent)
        self._next_id += 1
        self.num_nodes += 1
        first_page = self.page_key(key, 0)
        parent.children[first_page] = node
        self._grown(parent.namespace if isinstance(parent, Root) else parent.id, first_page)
        return node

    def split(self, node: Node, num_tokens: int) -> Node:
        """Cut a node behind its first num_tokens, whole pages and not all. Returns the new upper part."""
        assert 0 < num_tokens < len(node.key) and num_tokens % self.page_size == 0
        parent = node.parent
        assert parent is not None
        self._changed(node)
        upper = self._new_node(node.key[:num_tokens], parent)
        num_pages = num_tokens // self.page_size
        second_page = self.page_key(node.key, num_tokens)
        put_above(node, upper, self.page_key(upper.key, 0), second_page)
        self.names.split(upper, node)
        self.pages.split(upper, node)
        node.key = trimmed(node.key[num_tokens:])
        node.start = upper.end
        upper.copy_use_of(node)
        upper.num_device_children = int(node.frames[_DEVICE] is not None)
        upper.is_partial, upper.is_host_partial = node.is_partial, node.is_host_partial
        for tier in FRAME_TIERS:
            frames = node.frames[tier]
            if frames is None:
                continue
            upper.frames[tier] = trimmed(frames[:num_pages])
            node.frames[tier] = trimmed(frames[num_pages:])
            upper.fences[tier] = node.fences[tier]
            ticket = upper.tickets[tier] = node.tickets[tier]
            if ticket is not None:
                self._by_ticket[ticket].append(upper)
        self._offer(upper, _PEER)
        self._offer(upper, _HOST)
        # It begins later now.
        self._offer_everywhere(node)
        return upper

    def _set_frames(
        self,
        node: Node,
        tier: Tier,
        frames: np.ndarray,
        ticket: Ticket | None,
        fence: LaunchSeq,
        is_partial: bool = False,
    ) -> None:
        """is_partial: on that tier."""
        assert node.parent is not None
        self._changed(node)
        self._count_out(node, tier)
        if tier == _DEVICE:
            node.parent.num_device_children += node.frames[tier] is None
            node.is_partial = is_partial
        elif tier == _HOST:
            node.is_host_partial = is_partial
        node.frames[tier] = trimmed(frames)
        node.tickets[tier] = ticket
        node.fences[tier] = fence
        self._count_in(node, tier)
        if ticket is None:
            self.pages.placed(node, tier)

    def _count_out(self, node: Node, tier: int) -> None:
        """A node is about to change on a tier. What the device has of it decides what the others may give up."""
        for each in FRAME_TIERS if tier == _DEVICE else (tier,):
            self.counts.take_out(node, each)

    def _count_in(self, node: Node, tier: int) -> None:
        """It has changed."""
        for each in FRAME_TIERS if tier == _DEVICE else (tier,):
            self.counts.put_in(node, each)

    def _take_frames(self, node: Node, tier: Tier, dropped: Dropped) -> None:
        """Take a node off a tier, on the device one without children there. A node on no tier is a hole as long as
        nodes are below it."""
        frames, ticket, parent = node.frames[tier], node.tickets[tier], node.parent
        assert frames is not None and parent is not None
        self._changed(node)
        self._count_out(node, tier)
        if ticket is None:
            self.pages.left(node, tier)
            fence = max(node.fences[tier], node.last_use) if tier == _DEVICE else node.last_stream
            dropped.cached.append((frames, fence))
        else:
            waiting = self._by_ticket[ticket]
            waiting.remove(node)
            if not waiting:
                del self._by_ticket[ticket]
            dropped.filling.append((frames, ticket))
        node.frames[tier] = None
        node.tickets[tier] = None
        if tier == _DEVICE:
            node.is_partial = False
        elif tier == _HOST:
            node.is_host_partial = False
        self._count_in(node, tier)
        # Where a copy did not end that was the last; what storage was to bring was lost before.
        if (ticket is None or ticket.link not in FETCH_LINKS) and is_nowhere_whole(node):
            self.lost(node, tier)
        if tier == _DEVICE:
            assert node.num_device_children == 0
            parent.num_device_children -= 1
        if node.children or not is_hole(node):
            dropped.staying.append(node)
            if tier == _DEVICE:
                self._offer(parent, tier)
        else:
            node = self._remove(node)
            self._prune(node)
        self._offer_everywhere(node)

    def _remove(self, node: Node) -> Node:
        """Take a hole without children out of the tree, and those above that are such then. Returns what is above."""
        while (above := node.parent) is not None:
            if node.soft_pins:
                self._add_soft_pins(node, -node.soft_pins)
            del above.children[self.page_key(node.key, 0)]
            node.parent = None
            self.num_nodes -= 1
            node = above
            if node.children or not is_hole(node):
                break
        return node

    def _offer(self, node: Node, tier: int) -> None:
        """Enter a node among the candidates for eviction, if it is one; also when its rank has fallen."""
        if node.frames[tier] is not None:
            self.order.offer(node, tier, self.num_nodes)

    def _offer_everywhere(self, node: Node) -> None:
        for tier in FRAME_TIERS:
            if node.frames[tier] is not None:
                self.order.offer(node, tier, self.num_nodes)

    def _is_settled(self, node: Node, done: int) -> bool:
        return all(t is None for t in node.tickets) and all(f < done for f in node.fences)


def _first_hits(parent: Node) -> int:
    """Of a new node behind one that no request has counted, none."""
    return 1 if parent.parent is None else min(1, parent.hits)
