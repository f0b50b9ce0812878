"""`HiRadixTree`: the radix tree that knows *where* every cached page is, on every tier.

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

Matching never splits; locking, inserting and fetching do.

What storage has is no residency: a node that neither device nor host has is gone. The names of blocks, by which
storage knows them, are in block_names.py; what requests are about to compute is in transient_nodes.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.block_names import BlockNames
from sglang.srt.mem_cache.eviction import EVICTION_POLICIES, RETIRED_PRIORITY, EvictionHeap, Rank
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
    path_of,
    root_of,
)
from sglang.srt.mem_cache.radix import PageKey, common_len, join_keys, page_key_of, put_above, trimmed
from sglang.srt.mem_cache.transfer import FRAME_TIERS, Ticket, Tier
from sglang.srt.mem_cache.transient_nodes import TransientNodes
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchSeq

_ALIKE_IN_BOTH_HALVES = ("lock", "hits", "priority", "is_lossy", "last_access", "last_use", "last_stream")
# Plain integers: looking up a member of an enumeration costs as much as the rest of a line.
_DEVICE, _PEER, _HOST = int(Tier.DEVICE), int(Tier.PEER), int(Tier.HOST)


class HiRadixTree:
    """eviction_policy: of `EVICTION_POLICIES`. block_keys: how blocks are named, None while there is no storage."""

    def __init__(self, page_size: int, eviction_policy: str = "lru", block_keys: BlockKeys | None = None) -> None:
        self.page_size = page_size
        self.page_key = page_key_of(page_size)
        self.names = BlockNames(block_keys)
        # What requests are about to compute.
        self.claims = TransientNodes(page_size)
        self.roots: dict[str, Root] = {}
        self.num_nodes = 0
        self._next_id = 0
        self._by_ticket: dict[Ticket, list[Node]] = {}
        self._evictable = [0] * NUM_TIERS
        self._resident = [0] * NUM_TIERS
        self._rank: Callable[[Node], Rank] = EVICTION_POLICIES[eviction_policy]
        self._changed: Callable[[Node], None] = lambda node: None
        self._grown: Callable[[int | str, PageKey], None] = lambda parent, page: None
        self._heaps = [
            EvictionHeap(partial(self._is_evictable_leaf, tier=t), partial(self._rank_on, tier=t))
            for t in FRAME_TIERS
        ]

    def watch(self, changed: Callable[[Node], None], grown: Callable[[int | str, PageKey], None]) -> None:
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
                    break  # its backup, or its fetch, is still on the way: no tier has it ready yet
                on_device = False
                is_near = is_near and source == _PEER
            key = child.key
            last_len = common_len(key, tokens, pos, end, page)
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
        step: Node | None = node
        while step is not None:
            if step.lock == 0:
                self._evictable[_DEVICE] -= self._evictable_pages(step, _DEVICE)
            step.lock += 1
            step.last_access = launch
            step = step.parent
        return Receipt(node)

    def unlock(self, receipt: Receipt, launch: LaunchSeq, fence: LaunchSeq) -> None:
        """Release exactly what the receipt's lock took. fence: the last launch that may read the path."""
        step: Node | None = receipt.node
        while step is not None:
            assert step.lock > 0, f"{step} is not locked"
            step.lock -= 1
            step.last_access = launch
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
        fence: LaunchSeq,
        launch: LaunchSeq,
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
                child.last_access = launch
                child.hits = 1
                child.priority = priority
                self._offer(child, Tier.DEVICE)
                taken.append(frames[pos // page :])
                created.append(child)
                node, pos = child, len(tokens)
                break
            if child.tickets[Tier.DEVICE] is not None:
                break
            common = common_len(child.key, tokens, pos, len(tokens), page)
            if common < len(child.key):
                child = self.split(child, common)
            offered = frames[pos // page : (pos + common) // page]
            mine = child.frames[Tier.DEVICE]
            if mine is None:
                self._set_frames(child, Tier.DEVICE, offered, None, fence)
                # If it was locked as the source of a load, it need not stay on the host any more.
                for tier in FRAME_TIERS:
                    self._offer(child, tier)
                taken.append(offered)
                created.append(child)
            else:
                taken.append(mine)
                duplicates.append(offered)
            child.last_access = launch
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

        below: where the run begins; it is on the tier, or on its way there. A child that begins with the run's tokens
        has all of them, and is not on the tier.
        """
        assert below.parent is None or below.frames[tier] is not None, f"{below} is not on the {tier.name.lower()}"
        node = self.child_on(below, run.tokens)
        if node is None:
            node = self._new_node(run.tokens, below)
            node.hits = 1
            node.priority = run.priority
        assert len(node.key) == len(run.tokens) and node.frames[tier] is None
        self._set_frames(node, tier, run.frames, run.ticket, run.fence)
        node.last_access = launch
        self._by_ticket[run.ticket] = [node]
        return node

    def take_off(self, node: Node, tier: Tier, num_tokens: int) -> tuple[Dropped, Dropped]:
        """Take the last num_tokens of a node off a tier, and what is below them there. Returns what was below, and
        the node's own. Unlike `drop`, the node itself may be locked: its user reads another tier's copy from now
        on."""
        if num_tokens < len(node.key):
            self.split(node, len(node.key) - num_tokens)
        below, own = Dropped(), Dropped()
        for child in list(node.children.values()):
            self._drop(child, tier, below)
        self._take_frames(node, tier, own)
        return below, own

    @staticmethod
    def note_read(node: Node, launch: LaunchSeq) -> None:
        """Launches up to this one may read the node's device frames."""
        node.last_use = launch

    def begin_fetch(
        self, match: MatchResult, run: FilledRun, block_keys: np.ndarray, launch: LaunchSeq, is_lossy: bool
    ) -> Node:
        """Enter what storage has below a match (made with `fetching`), in host frames that the operation will fill.

        run: its tokens end with a block. block_keys: of the blocks that end in it. The end of the match is on the
        host, or the root; nothing continues it with the run's tokens.
        """
        parent = self._end_of(match)
        assert self.page_key(run.tokens, 0) not in parent.children
        node = self.put_run(parent, run, Tier.HOST, launch)
        # No request has computed it.
        node.hits = 0
        if parent.parent is not None:
            node.priority = min(node.priority, parent.priority)
        self.names.name_fetched(node, block_keys)
        node.is_lossy |= is_lossy
        return node

    def cut(self, ticket: Ticket, tier: Tier, end: int) -> Dropped:
        """The operation filled its nodes only up to token `end` of their path: drop what lies behind."""
        dropped = Dropped()
        for node in list(self.nodes_of(ticket)):
            if node.frames[tier] is None or node.end <= end:
                continue
            if node.start < end:
                self.split(node, end - node.start)
            self._drop(node, tier, dropped)
        return dropped

    def commit(self, ticket: Ticket, tier: Tier) -> list[Node]:
        """The operation has filled its frames. Returns the nodes that still wanted them."""
        nodes = self._by_ticket.pop(ticket, [])
        for node in nodes:
            self._changed(node)
            node.tickets[tier] = None
            self._evictable[tier] += self._evictable_pages(node, tier)
            for t in FRAME_TIERS:
                self._offer(node, t)
        return nodes

    def retire(self, namespace: str) -> None:
        """No request will ask for this namespace again: what it has is evicted first, whatever the policy."""
        root = self.roots.get(namespace)
        stack = list(root.children.values()) if root is not None else []
        while stack:
            node = stack.pop()
            assert node.lock == 0, f"{node} is retired, and in use"
            node.last_access, node.hits, node.priority = NO_LAUNCH, 0, RETIRED_PRIORITY
            stack.extend(node.children.values())
            for tier in FRAME_TIERS:
                self._offer(node, tier)

    def rename_blocks(self, block_keys: BlockKeys | None) -> None:
        """Another storage, or none: forget all names of blocks and what was stored."""
        self.names.rename(block_keys, self.walk())

    @staticmethod
    def note_stream(node: Node, launch: LaunchSeq) -> None:
        """The launch reads the node's frames below the device through the layer stream cache."""
        node.last_stream = launch

    path_of, root_of = staticmethod(path_of), staticmethod(root_of)
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
        while num_pages > 0 and (node := self._heaps[tier].pop()) is not None:
            if node.id in kept:
                put_back.append(node)
                continue
            n = len(node.key) // self.page_size
            if n > num_pages:
                self.split(node, (n - num_pages) * self.page_size)
                n = num_pages
            num_pages -= n
            before(node)
            self._take_frames(node, tier, dropped)
        self._heaps[tier].put_back(put_back)
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
                or any((upper.frames[t] is None) != (node.frames[t] is None) for t in FRAME_TIERS)
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
        for name in ("last_use", "last_stream", "last_access", "hits", "priority"):
            setattr(node, name, max(getattr(n, name) for n in chain))
        self.names.join(chain)
        node.start = top.start
        node.parent = top.parent
        top.parent.children[first_key] = node
        self._changed(node)
        for gone in chain[:-1]:
            self._changed(gone)
            gone.parent = None
            gone.children = {}
            gone.frames = [None] * NUM_TIERS
            self.num_nodes -= 1

    def check_locks(self, receipts: Iterable[Receipt]) -> None:
        """receipts: of all locks that were taken and not released."""
        own = Counter(id(receipt.node) for receipt in receipts)
        for node in [*self.walk(), *self.roots.values()]:
            locks = own[id(node)] + sum(c.lock for c in node.children.values())
            assert node.lock == locks, f"{node}: locked {node.lock} times, {locks} known"

    # -- invariants ---------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        evictable, resident = [0] * NUM_TIERS, [0] * NUM_TIERS
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
            self.names.check(node)
            assert any(f is not None for f in node.frames), f"{node} is on no tier"
            assert node.lock >= sum(c.lock for c in node.children.values())
            assert parent.parent is None or node.priority <= parent.priority, f"{node} matters more than its prefix"
            is_there = node.frames[Tier.DEVICE] is not None or node.frames[Tier.HOST] is not None
            assert node.lock == 0 or is_there, f"{node} is locked and neither on the device nor on the host"
            for tier in FRAME_TIERS:
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
        self._check_candidates()

    def _check_candidates(self) -> None:
        for tier in FRAME_TIERS:
            ranks = self._heaps[tier].ranks()
            for node in self.walk():
                if not self._is_evictable_leaf(node, tier):
                    continue
                assert node.id in ranks, f"{node} can never be evicted"
                goes_first = tier == Tier.PEER and self._rank_on(node, tier)[0] == 0
                assert not goes_first or any(rank[0] == 0 for rank in ranks[node.id]), (
                    f"{node} is on the device, and leaves the peer as if it were not"
                )

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
        node.key = trimmed(node.key[num_tokens:])
        node.start = upper.end
        for name in _ALIKE_IN_BOTH_HALVES:
            setattr(upper, name, getattr(node, name))
        for tier in FRAME_TIERS:
            frames = node.frames[tier]
            if frames is None:
                continue
            upper.frames[tier] = trimmed(frames[:num_pages])
            node.frames[tier] = trimmed(frames[num_pages:])
            upper.fences[tier] = node.fences[tier]
            upper.num_resident_children[tier] = 1
            ticket = upper.tickets[tier] = node.tickets[tier]
            if ticket is not None:
                self._by_ticket[ticket].append(upper)
        return upper

    def _set_frames(
        self, node: Node, tier: Tier, frames: np.ndarray, ticket: Ticket | None, fence: LaunchSeq
    ) -> None:
        assert node.parent is not None
        self._changed(node)
        node.frames[tier] = trimmed(frames)
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
            for t in FRAME_TIERS:
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
        """What goes first of a tier: the smallest rank of the policy. Of peers before all else what the device has
        as well, so that together they hold different pages. Not so of the host, where pages are written once: what
        the device has and the host gave up would be lost when the device evicts it."""
        is_alive = int(node.priority != RETIRED_PRIORITY)
        if tier != _PEER:
            return is_alive, *self._rank(node)
        return int(node.frames[_DEVICE] is None) * is_alive, is_alive, *self._rank(node)

    def _offer(self, node: Node, tier: int) -> None:
        """Enter a node among the candidates for eviction, if it is one; also when its rank has fallen."""
        if self._is_evictable_leaf(node, tier):
            self._heaps[tier].offer(node, self.num_nodes)

    def _is_settled(self, node: Node, done: int) -> bool:
        return all(t is None for t in node.tickets) and all(f < done for f in node.fences)
