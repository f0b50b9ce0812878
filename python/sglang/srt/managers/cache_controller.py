"""`HiCacheController`: starts, commits and aborts transfers between tiers.

Owns the numbering of operations and what each one pins. Decides nothing about requests, executes nothing: links do.
Between `begin_*` and `commit` or `abort` the frames on both sides are pinned, so that neither eviction nor the end
of a request can give the memory away; the tree shows the ticket on the nodes that are being filled.

    device ── D2H: begin_backup, begin_spill ──► host ── STORE: _store_path, by itself after each backup ──► storage
    device ◄── H2D: begin_load ──── host ◄── FETCH: begin_fetch, for storage_prefetch.py ────── storage
    device ── D2P: begin_backup, when it evicts ──► peer
    device ◄── P2D: begin_load ──────────────────── peer

What storage brings and what the device computes may be the same page: such a node is CACHED on the device and FILLING
on the host. Nothing below a node that is being fetched is backed up before the fetch has ended, so that of two pages
on the host the upper one is always ready first, and its failure can take the lower one with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from sglang.srt.mem_cache.block_keys import NO_KEYS, BlockKeys
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import Dropped, HiRadixTree, MatchResult, Node, is_fetching
from sglang.srt.mem_cache.transfer import (
    BACKUP_LINKS,
    D2H,
    D2S,
    FETCH,
    LINKS,
    LOAD_LINKS,
    PROBE,
    STORE,
    StorageAction,
    StorageOp,
    Ticket,
    Tier,
    TransferOp,
)

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
# With write_through_selective, pages that so many requests have used go to the host.
SELECTIVE_HITS = 2
_NO_FRAMES = np.empty(0, np.int32)
_MAX_STORE_LATER = 4096
_TIDY_STORE_LATER = 64


@dataclass(frozen=True)
class StorageLimits:
    """What storage may have in flight, so that it neither takes the host pool away from others nor stands in its own
    way. blocks_per_op: one operation reads or writes that many, a fraction of a second of work. max_fetch_pages,
    max_store_pages: host pages that reads may be filling, and that writes may be holding on to. fetch_window_ops:
    reads that may be on their way at once: enough that the link never runs dry, and no more, as what has been begun
    is served before whoever comes next, however urgent."""

    blocks_per_op: int
    max_fetch_pages: int
    max_store_pages: int
    fetch_window_ops: int = 8


class HiCacheController:
    """device, host, peer: the pools' frame tables; None turns a tier off. page_bytes: K and V of one page, all
    layers. write_policy: when pages go to the host: write_through at once, write_through_selective when a second
    request uses them, write_back when they leave the device. To peers they always go when they leave the device, so
    that peers hold what it has no room for. swap: frames of the swap file, which is no tier: the tree knows nothing
    of it."""

    def __init__(
        self,
        tree: HiRadixTree,
        device: FrameTable,
        host: FrameTable | None,
        page_bytes: int,
        write_policy: str = "write_through",
        peer: FrameTable | None = None,
        swap: FrameTable | None = None,
    ) -> None:
        if write_policy not in WRITE_POLICIES:
            raise ValueError(f"write policy {write_policy!r} is none of {', '.join(WRITE_POLICIES)}")
        self.tree = tree
        self.write_policy = write_policy
        tables = {Tier.DEVICE: device, Tier.PEER: peer, Tier.HOST: host}
        self.tables: dict[Tier, FrameTable] = {tier: table for tier, table in tables.items() if table is not None}
        self.swap = swap
        self.page_bytes = page_bytes
        self.in_flight: dict[Ticket, TransferOp | StorageOp] = {}
        # None while no storage is attached, or is being emptied or detached.
        self.storage: StorageLimits | None = None
        # Whether what it stores comes back changed.
        self.storage_is_lossy = False
        self.fetching_pages = 0
        self.storing_pages = 0
        self.counters: Counter[str] = Counter()
        self._next_seq = {link: 0 for link in LINKS}
        self._new_ops: list[TransferOp | StorageOp] = []
        self._new_cancels: list[Ticket] = []
        # FETCH operations -> the place of their first block on its path.
        self._fetches: dict[Ticket, int] = {}
        # Ends of paths that are to be stored and found too much on its way, oldest first.
        self._store_later: dict[int, Node] = {}
        self._tidy_store_later_at = _TIDY_STORE_LATER

    @property
    def has_host(self) -> bool:
        return Tier.HOST in self.tables

    def begin_load(self, nodes: list[Node]) -> list[Ticket]:
        """Load a path of nodes (top first) that are not on the device, each from the nearest tier that has it. The
        caller has seen to it that enough frames are free."""
        by_source: dict[Tier, list[Node]] = {}
        for node in nodes:
            source = self.tree.source_of(node)
            assert source is not None, f"{node} is ready nowhere"
            by_source.setdefault(source, []).append(node)
        tickets = []
        for source, part in by_source.items():
            link = LOAD_LINKS[source]
            src = np.concatenate([self._ready_frames(node, source) for node in part])
            frames = self.tables[Tier.DEVICE].allocate(len(src), -1 - self._next_seq[link], FrameState.FILLING)
            assert frames is not None, "a load needs free frames: make room first"
            tickets.append(self._begin(link, source, Tier.DEVICE, src, frames, part, after=None).ticket)
            self.counters["load_back_tokens"] += len(frames) * self.tree.page_size
            if source == Tier.PEER:
                self.counters["load_peer_tokens"] += len(frames) * self.tree.page_size
        return tickets

    def published(self, node: Node, done: int) -> None:
        """A path has pages that the host may lack."""
        if self.write_policy == "write_through":
            self.begin_backup(node, done)

    def used(self, node: Node, done: int) -> None:
        """Another request uses the path to `node`."""
        if self.write_policy != "write_through_selective" or not self.has_host:
            return
        step: Node | None = node
        while step is not None and step.parent is not None and step.hits < SELECTIVE_HITS:
            step = step.parent
        if step is not None and step.parent is not None:
            self.begin_backup(step, done)

    def begin_backup(self, node: Node, done: int, tier: Tier = Tier.HOST) -> Ticket | None:
        """Back up the part of the path to `node` that the tier lacks. None if it lacks nothing or has no room, or if
        the device lacks a part of it: that is still being loaded, or only a peer has it."""
        if tier not in self.tables:
            return None
        nodes = []
        step: Node | None = node
        while step is not None and step.parent is not None and step.frames[tier] is None:
            if step.frames[Tier.DEVICE] is None or step.tickets[Tier.DEVICE] is not None:
                return None
            nodes.append(step)
            step = step.parent
        if not nodes or (step is not None and is_fetching(step) and tier == Tier.HOST):
            return None
        nodes.reverse()
        src = np.concatenate([self._ready_frames(n, Tier.DEVICE) for n in nodes])
        self.make_room(tier, len(src), node, done)
        first_page = nodes[0].start // self.tree.page_size
        link = BACKUP_LINKS[tier]
        dst = self.tables[tier].allocate(len(src), -1 - self._next_seq[link], FrameState.FILLING, first_page)
        num_tokens = len(src) * self.tree.page_size
        if dst is None and tier == Tier.HOST:
            self.counters["backup_dropped_tokens"] += num_tokens
        elif dst is None:
            self.counters["peer_backup_dropped_tokens"] += num_tokens
        elif tier == Tier.HOST:
            self.counters["backup_tokens"] += num_tokens
        else:
            self.counters["peer_backup_tokens"] += num_tokens
        if dst is None:
            return None
        after = max(n.fences[Tier.DEVICE] for n in nodes)
        return self._begin(link, Tier.DEVICE, tier, src, dst, nodes, after).ticket

    def begin_spill(
        self, below: Node, tokens: np.ndarray, src: np.ndarray, fence: int, now: int, done: int, priority: int
    ) -> tuple[Ticket, Node] | None:
        """Move to the host what a request has computed below a node, on pages src that are its own, as much of it as
        there is room for; None if there is none. See `HiRadixTree.begin_spill`; the request locks what it gets."""
        host = self.tables[Tier.HOST]
        num_pages = min(len(src), host.num_free + self.tree.evictable_pages(Tier.HOST, keep=below))
        if num_pages < 1 or not self.make_room(Tier.HOST, num_pages, below, done):
            return None
        src, tokens = src[:num_pages], tokens[: num_pages * self.tree.page_size]
        dst = host.allocate(num_pages, -1 - self._next_seq[D2H], FrameState.FILLING, below.end // self.tree.page_size)
        assert dst is not None
        op = self._issue(D2H, Tier.DEVICE, Tier.HOST, src, dst, fence)
        self.counters["backup_tokens"] += len(tokens)
        return op.ticket, self.tree.begin_spill(below, tokens, dst, op.ticket, fence, now, priority)

    def begin_swap(self, src: np.ndarray, fence: int, done: int) -> Ticket | None:
        """Write pages src of the device, a request's own, to the swap file; None if that has no room for them all."""
        if self.swap is None:
            return None
        self.swap.reap(done)
        dst = self.swap.allocate(len(src), -1 - self._next_seq[D2S])
        return self._issue(D2S, Tier.DEVICE, Tier.DISK, src, dst, fence).ticket if dst is not None else None

    def unpublish(self, node: Node, last_launch: int) -> np.ndarray:
        """Give the device pages of a node, of which nothing is on its way, back to who computed them; they are HELD
        again. See `HiRadixTree.unpublish`."""
        frames, below = self.tree.unpublish(node)
        self._release(below, Tier.DEVICE, last_launch)
        self.tables[Tier.DEVICE].transition(frames, FrameState.CACHED, FrameState.HELD)
        return frames

    def demote(self, node: Node, num_tokens: int, last_launch: int) -> None:
        """See `HiRadixTree.demote`."""
        self._release(self.tree.demote(node, num_tokens, last_launch), Tier.DEVICE, last_launch)

    def commit(self, ticket: Ticket, done: int) -> None:
        """The operation brought its bytes on every rank."""
        op = self.in_flight.pop(ticket)
        assert isinstance(op, TransferOp)
        self._unpin(op)
        if op.dst == Tier.DISK:
            return
        nodes = self._commit_nodes(ticket, op.dst)
        if op.dst == Tier.HOST and nodes:
            self._store_path(max(nodes, key=lambda n: n.end))
        if op.src == Tier.PEER:
            self._back_up_below([node for node in nodes if node.frames[Tier.HOST] is None], done)
        # The last one takes in all above it.
        for node in reversed(nodes):
            self.tree.compact(node, done)

    def abort(self, ticket: Ticket, last_launch: int) -> None:
        """The operation failed on some rank. A failed load also loses its source, else it is retried for ever; the
        scheduler has closed all requests that read these nodes."""
        op = self.in_flight.pop(ticket)
        assert isinstance(op, TransferOp)
        for node in list(self.tree.nodes_of(ticket)):
            for tier in (op.dst, op.src) if op.dst == Tier.DEVICE else (op.dst,):
                self._release(self.tree.drop(node, tier), tier, last_launch)
        self._unpin(op)
        self.counters["failed_ops"] += 1

    def evict(self, tier: Tier, num_pages: int, done: int, keep: Node | None = None) -> None:
        """Evict up to num_pages and free what may be reused at once; the rest follows when its fence passes.

        What stays on another tier is merged: the device gives up a page per decode step when it is full, and each
        would become a node on the host.
        """
        table = self.tables[tier]
        before = table.counts[FrameState.CACHED]
        saved_to: list[Tier] = []
        if tier == Tier.DEVICE:
            saved_to = [Tier.PEER] + ([Tier.HOST] if self.write_policy == "write_back" else [])

        def save(node: Node) -> None:
            for other in saved_to:
                self.begin_backup(node, done, other)

        dropped = self.tree.evict(tier, num_pages, keep, save)
        self._release(dropped, tier, -1)
        for node in dropped.elsewhere:
            if len(node.children) == 1:
                self.tree.compact(next(iter(node.children.values())), done)
        self.counters[f"evicted_tokens_{tier.name.lower()}"] += (
            before - table.counts[FrameState.CACHED]
        ) * self.tree.page_size
        table.reap(done)

    def drop(self, node: Node, tier: Tier, last_launch: int) -> None:
        """Take a node and all below it off a tier; operations that fill nothing any more are cancelled."""
        self._release(self.tree.drop(node, tier), tier, last_launch)

    def withdraw(self, tier: Tier, frames: np.ndarray, last_launch: int) -> None:
        """Drop every node that has one of these frames (a run of them, ascending), and what lies below it, off the
        tier: they are about to go. What else has the pages, keeps them; locked nodes stay on the device."""
        nodes = [n for n in self.tree.walk() if n.frames[tier] is not None and not (tier == Tier.DEVICE and n.lock)]
        if not nodes:
            return
        parts: list[np.ndarray] = [n.frames[tier] for n in nodes]  # type: ignore[misc]
        # All nodes at once: one by one it took four times as long, and a server is not to stop for a slab.
        held = np.concatenate(parts)
        goes = np.logical_or.reduceat(
            (held >= frames[0]) & (held <= frames[-1]), np.cumsum([0, *map(len, parts[:-1])])
        )
        for i in np.flatnonzero(goes).tolist():
            # Parents come first, and take what is below along.
            if nodes[i].frames[tier] is not None:
                self.drop(nodes[i], tier, last_launch)

    # -- storage ------------------------------------------------------------------------------------------------

    def probe(self, keys: np.ndarray) -> Ticket:
        """Ask storage how many of the leading keys it has."""
        return self._begin_storage(PROBE, StorageAction.EXISTS, keys, _NO_FRAMES)

    def end_probe(self, ticket: Ticket) -> None:
        del self.in_flight[ticket]

    def cancel_probe(self, ticket: Ticket) -> None:
        """Nobody waits for it any more: those that come later must not wait behind it."""
        self._new_cancels.append(ticket)

    def administer(self, action: StorageAction, setup: str = "") -> Ticket:
        """Attach, detach or clear; nothing else is in flight to storage."""
        assert not self.storage_in_flight
        return self._begin_storage(PROBE, action, NO_KEYS, _NO_FRAMES, setup)

    def make_room(self, tier: Tier, num_pages: int, keep: Node | None, done: int) -> bool:
        """Evict until so many pages of a tier below the device are free; what is on the path to `keep` stays, and
        everything if that would not be enough. Whether they are free."""
        table = self.tables[tier]
        table.reap(done)
        missing = num_pages - table.num_free
        if 0 < missing <= self.tree.evictable_pages(tier, keep=keep):
            self.evict(tier, missing, done, keep=keep)
        return table.num_free >= num_pages

    def begin_fetch(self, match: MatchResult, tokens: np.ndarray, keys: np.ndarray, now: int) -> Ticket:
        """Fetch the blocks that cover tokens [match.total_len, …), of which the first may begin before. The caller
        has made room.

        match: made with `fetching`; its end is ready on the host, or being fetched, or the root. tokens: int32, up to
        the end of the last block. keys: (n, 16).
        """
        names, page, host = self.tree.block_keys, self.tree.page_size, self.tables[Tier.HOST]
        assert names is not None
        num_pages = len(keys) * names.block_tokens // page
        frames = host.allocate(num_pages, -1 - self._next_seq[FETCH], FrameState.FILLING)
        assert frames is not None, "a fetch needs free frames: make room first"
        ticket = self._begin_storage(FETCH, StorageAction.GET, keys, frames)
        self._fetches[ticket] = match.total_len // names.block_tokens
        spare = num_pages - len(tokens) // page
        self.tree.begin_fetch(match, tokens, frames[spare:], keys, ticket, now, self.storage_is_lossy)
        # The part of the first block that is there already is read into pages that nobody gets.
        host.doom(frames[:spare], FrameState.FILLING, -1)
        self.fetching_pages += num_pages
        return ticket

    def end_fetch(self, ticket: Ticket, count: int, done: int) -> tuple[int, int]:
        """The operation brought its first `count` blocks, on every rank. Returns which tokens [start, end) of their
        path are on the host now, as far as the tree still wanted them."""
        op = self.in_flight.pop(ticket)
        assert isinstance(op, StorageOp) and self.tree.block_keys is not None
        first = self._fetches.pop(ticket)
        self.fetching_pages -= len(op.frames)
        dropped = self.tree.cut(ticket, Tier.HOST, (first + count) * self.tree.block_keys.block_tokens)
        self._release(dropped, Tier.HOST, -1)
        for node in dropped.elsewhere:
            # Computed meanwhile: what did not come is stored anew.
            if node.stored is not None:
                node.stored[:] = False
        self.tables[Tier.HOST].unpin(op.frames)
        nodes = self._commit_nodes(ticket, Tier.HOST)
        start, end = min((n.start for n in nodes), default=0), max((n.end for n in nodes), default=0)
        self.counters["prefetched_tokens"] += end - start
        self._back_up_below(nodes + dropped.elsewhere, done)
        if nodes:
            # What is to be stored of the path above is merged with these.
            self._store_path(max(nodes, key=lambda n: n.end))
        for node in reversed(nodes):
            self.tree.compact(node, done)
        return start, end

    def cancel_fetch(self, ticket: Ticket, done: int) -> None:
        """Nobody waits for it any more."""
        dropped = self.tree.cut(ticket, Tier.HOST, 0)
        self._release(dropped, Tier.HOST, -1)
        self._back_up_below(dropped.elsewhere, done)

    def end_store(self, ticket: Ticket, count: int) -> None:
        """The first `count` blocks are stored, on every rank. The others are taken for stored as well: whoever misses
        them computes them, and they are stored then."""
        op = self.in_flight.pop(ticket)
        assert isinstance(op, StorageOp)
        self.tables[Tier.HOST].unpin(op.frames)
        self.storing_pages -= len(op.frames)
        block_tokens = len(op.frames) * self.tree.page_size // len(op.keys)
        self.counters["backuped_tokens"] += count * block_tokens
        self.counters["storage_backup_failed_tokens"] += (len(op.keys) - count) * block_tokens
        while self._store_later and self._store_room() > 0:
            node = self._store_later.pop(next(iter(self._store_later)))
            if node.parent is not None:
                self._store_path(node)

    def may_fetch(self, num_pages: int) -> bool:
        """Whether so much more may be fetched now; if nothing is on its way, some always may."""
        assert self.storage is not None
        limits, in_flight = self.storage, len(self._fetches)
        fits = self.fetching_pages + num_pages <= limits.max_fetch_pages
        return not in_flight or (fits and in_flight < limits.fetch_window_ops)

    @property
    def storage_in_flight(self) -> bool:
        return any(ticket.link in (FETCH, STORE, PROBE) for ticket in self.in_flight)

    def close_storage(self, done: int) -> None:
        """Begin nothing new, and give up what is on its way."""
        self.storage = None
        self._store_later = {}
        for ticket, op in list(self.in_flight.items()):
            if ticket.link == FETCH:
                self.cancel_fetch(ticket, done)
            if isinstance(op, StorageOp) and op.action in (
                StorageAction.EXISTS,
                StorageAction.GET,
                StorageAction.SET,
            ):
                self._new_cancels.append(ticket)

    def open_storage(
        self, limits: StorageLimits | None, block_keys: BlockKeys | None, is_lossy: bool = False
    ) -> None:
        """Storage was attached, emptied or detached: nothing that the tree knew of it holds any more."""
        self.tree.rename_blocks(block_keys)
        self.storage = limits
        self.storage_is_lossy = is_lossy

    def take_ops(self) -> tuple[tuple[TransferOp | StorageOp, ...], tuple[Ticket, ...]]:
        """Operations begun and tickets cancelled since the last call."""
        ops, cancels = tuple(self._new_ops), tuple(t for t in self._new_cancels if t in self.in_flight)
        self._new_ops, self._new_cancels = [], []
        return ops, cancels

    def check_invariants(self) -> None:
        for tier, table in self.tables.items():
            table.check_invariants()
            pins = np.zeros_like(table.pins)
            for op in self.in_flight.values():
                if isinstance(op, StorageOp):
                    if tier == Tier.HOST:
                        np.add.at(pins, op.frames, 1)
                    continue
                if op.src == tier:
                    np.add.at(pins, op.src_frames, 1)
                if op.dst == tier:
                    np.add.at(pins, op.dst_frames, 1)
            assert (pins == table.pins).all(), f"{tier.name}: pins differ from the operations in flight"
            expected = np.full(table.num_pages, -1, np.int64)
            for node in self.tree.walk():
                frames = node.frames[tier]
                if frames is not None:
                    assert (expected[frames] == -1).all(), f"{tier.name}: a frame belongs to two nodes"
                    filling = node.tickets[tier] is not None
                    expected[frames] = FrameState.FILLING if filling else FrameState.CACHED
                ticket = node.tickets[tier]
                if ticket is not None:
                    assert frames is not None and ticket in self.in_flight, (
                        f"{node} waits for {ticket}, which is over"
                    )
                    op = self.in_flight[ticket]
                    filled = op.frames if isinstance(op, StorageOp) else op.dst_frames
                    assert np.isin(frames, filled).all(), f"{node}: {ticket} fills other pages"
                    # A load's source stays, else its failure could not be told from eviction; but slabs of peers
                    # are withdrawn whatever is loaded from them.
                    if isinstance(op, TransferOp) and op.src == Tier.HOST:
                        ready = node.frames[Tier.HOST] is not None and node.tickets[Tier.HOST] is None
                        assert ready, f"{node}: its load has no source"
            in_tree = expected >= 0
            assert (table.state[in_tree] == expected[in_tree]).all(), f"{tier.name}: tree and frame table disagree"
            rest = table.state[~in_tree]
            assert not np.isin(rest, (FrameState.CACHED, FrameState.FILLING)).any(), f"{tier.name}: a page is lost"
        by_link: dict[str, int] = dict.fromkeys((PROBE, FETCH, STORE), 0)
        for ticket, op in self.in_flight.items():
            if isinstance(op, StorageOp):
                by_link[ticket.link] += len(op.frames)
        assert by_link == {PROBE: 0, FETCH: self.fetching_pages, STORE: self.storing_pages}
        assert self._fetches.keys() == {t for t in self.in_flight if t.link == FETCH}
        for node in self.tree.walk():
            parent = node.parent
            if parent is not None and is_fetching(parent) and node.frames[Tier.HOST] is not None:
                assert is_fetching(node), f"{node} is on the host, its prefix is still being fetched"

    def _commit_nodes(self, ticket: Ticket, tier: Tier) -> list[Node]:
        nodes = self.tree.commit(ticket, tier)
        for node in nodes:
            frames = node.frames[tier]
            assert frames is not None
            self.tables[tier].transition(frames, FrameState.FILLING, FrameState.CACHED)
        return nodes

    def _store_path(self, end: Node) -> None:
        """Write to storage what it is not believed to have of the path to `end`, as far as that is on the host, and
        exact if storage is: lossy KV is never written under a name that promises exact bytes."""
        if self.storage is None:
            return
        tree, page = self.tree, self.tree.page_size
        path = tree.path_of(end)
        if not self.storage_is_lossy:
            path = list(takewhile(lambda node: not node.is_lossy, path))
        while path and (path[-1].frames[Tier.HOST] is None or path[-1].tickets[Tier.HOST] is not None):
            path.pop()
        if not path:
            return
        end = path[-1]
        tree.name_blocks(end)
        first = next((i for i, n in enumerate(path) if n.stored is not None and not n.stored.all()), None)
        if first is None:
            return
        assert tree.block_keys is not None
        size = tree.block_keys.block_tokens
        keys = np.concatenate([n.block_keys for n in path[first:]])  # type: ignore[misc]
        lacking = np.flatnonzero(~np.concatenate([n.stored for n in path[first:]]))  # type: ignore[misc]
        if (room := self._store_room()) < len(lacking):
            self._put_off(end)
            lacking = lacking[: max(0, room)]
        if not len(lacking):
            return
        # The first block may begin in a node above.
        begin, top = path[first].start // size * size, first
        while path[top].start > begin:
            top -= 1
        frames = np.concatenate([self._ready_frames(n, Tier.HOST) for n in path[top:]])[
            (begin - path[top].start) // page :
        ]
        pages_per_block = size // page
        for i in range(0, len(lacking), self.storage.blocks_per_op):
            blocks = lacking[i : i + self.storage.blocks_per_op]
            pages = blocks[:, None] * pages_per_block + np.arange(pages_per_block)
            self._begin_storage(STORE, StorageAction.SET, keys[blocks], frames[pages.ravel()])
            self.storing_pages += pages.size
        pos = 0
        for node in path[first:]:
            assert node.stored is not None
            node.stored[: max(0, lacking[-1] + 1 - pos)] = True
            pos += len(node.stored)

    def _put_off(self, end: Node) -> None:
        later = self._store_later
        if end.id not in later and len(later) >= self._tidy_store_later_at:
            # Nodes that have left the tree keep their tokens alive.
            for gone in [i for i, n in later.items() if n.parent is None]:
                del later[gone]
            if len(later) >= _MAX_STORE_LATER:
                del later[next(iter(later))]
                self.counters["storage_backup_dropped_paths"] += 1
            self._tidy_store_later_at = min(2 * len(later) + _TIDY_STORE_LATER, _MAX_STORE_LATER)
        later[end.id] = end

    def _store_room(self) -> int:
        """Blocks that may be handed to storage now."""
        if self.storage is None or self.tree.block_keys is None:
            return 0
        pages_per_block = self.tree.block_keys.block_tokens // self.tree.page_size
        return (self.storage.max_store_pages - self.storing_pages) // pages_per_block

    def _back_up_below(self, nodes: list[Node], done: int) -> None:
        """The host side of these nodes is decided: what was computed on and below them meanwhile may follow."""
        stack = list(nodes)
        while stack:
            node = stack.pop()
            below = [
                c for c in node.children.values() if c.frames[Tier.DEVICE] is not None and c.frames[Tier.HOST] is None
            ]
            stack += below
            if node.parent is not None and node.frames[Tier.HOST] is None and not below:
                self.published(node, done)

    def _begin_storage(
        self, link: str, action: StorageAction, keys: np.ndarray, frames: np.ndarray, setup: str = ""
    ) -> Ticket:
        ticket = Ticket(link, self._next_seq[link])
        self._next_seq[link] += 1
        if len(frames):
            self.tables[Tier.HOST].pin(frames)
        op = StorageOp(ticket, action, keys, frames, len(frames) * self.page_bytes, setup)
        self.in_flight[ticket] = op
        self._new_ops.append(op)
        return ticket

    def _begin(
        self,
        link: str,
        src: Tier,
        dst: Tier,
        src_frames: np.ndarray,
        dst_frames: np.ndarray,
        nodes: list[Node],
        after: int | None,
    ) -> TransferOp:
        op = self._issue(link, src, dst, src_frames, dst_frames, after)
        self.tree.begin_fill(nodes, src, dst, dst_frames, op.ticket)
        return op

    def _issue(
        self, link: str, src: Tier, dst: Tier, src_frames: np.ndarray, dst_frames: np.ndarray, after: int | None
    ) -> TransferOp:
        ticket = Ticket(link, self._next_seq[link])
        self._next_seq[link] += 1
        self._table(src).pin(src_frames)
        self._table(dst).pin(dst_frames)
        op = TransferOp(ticket, src, dst, src_frames, dst_frames, len(src_frames) * self.page_bytes, after)
        self.in_flight[ticket] = op
        self._new_ops.append(op)
        return op

    def _unpin(self, op: TransferOp) -> None:
        self._table(op.src).unpin(op.src_frames)
        self._table(op.dst).unpin(op.dst_frames)

    def _table(self, tier: Tier) -> FrameTable:
        if tier == Tier.DISK:
            assert self.swap is not None
            return self.swap
        return self.tables[tier]

    def _release(self, dropped: Dropped, tier: Tier, last_launch: int) -> None:
        table = self.tables[tier]
        by_fence: dict[int, list[np.ndarray]] = {}
        for frames, fence in dropped.cached:
            by_fence.setdefault(fence, []).append(frames)
        for fence, parts in by_fence.items():
            table.doom(np.concatenate(parts), FrameState.CACHED, fence)
        for frames, _ in dropped.filling:
            # Other frames are read by loads alone, which pin them; device frames may be awaited by any launch.
            table.doom(frames, FrameState.FILLING, last_launch if tier == Tier.DEVICE else -1)
        tickets = dict.fromkeys(ticket for _, ticket in dropped.filling)
        self._new_cancels += [ticket for ticket in tickets if not self.tree.nodes_of(ticket)]

    @staticmethod
    def _ready_frames(node: Node, tier: Tier) -> np.ndarray:
        frames = node.frames[tier]
        assert frames is not None and node.tickets[tier] is None, f"{node} is not ready on the {tier.name.lower()}"
        return frames
