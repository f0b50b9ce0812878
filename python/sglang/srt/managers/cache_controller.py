"""`HiCacheController`: starts, commits and aborts transfers between tiers.

Owns the numbering of operations and what each one pins. Decides nothing about requests, executes nothing: links do.
Between `begin_*` and `commit` or `abort` the frames on both sides are pinned, so that neither eviction nor the end
of a request can give the memory away; the tree shows the ticket on the nodes that are being filled.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import Dropped, HiRadixTree, Node
from sglang.srt.mem_cache.transfer import D2H, H2D, LINKS, Ticket, Tier, TransferOp

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
# With write_through_selective, pages that so many requests have used go to the host.
SELECTIVE_HITS = 2


class HiCacheController:
    """device, host: the pools' frame tables; host None turns the host tier off. page_bytes: K and V of one page,
    all layers. write_policy: when pages go to the host: write_through at once, write_through_selective when a second
    request uses them, write_back when they leave the device."""

    def __init__(
        self,
        tree: HiRadixTree,
        device: FrameTable,
        host: FrameTable | None,
        page_bytes: int,
        write_policy: str = "write_through",
    ) -> None:
        if write_policy not in WRITE_POLICIES:
            raise ValueError(f"write policy {write_policy!r} is none of {', '.join(WRITE_POLICIES)}")
        self.tree = tree
        self.write_policy = write_policy
        self.tables: dict[Tier, FrameTable] = {Tier.DEVICE: device}
        if host is not None:
            self.tables[Tier.HOST] = host
        self.page_bytes = page_bytes
        self.in_flight: dict[Ticket, TransferOp] = {}
        self.counters: Counter[str] = Counter()
        self._next_seq = {link: 0 for link in LINKS}
        self._new_ops: list[TransferOp] = []
        self._new_cancels: list[Ticket] = []

    @property
    def has_host(self) -> bool:
        return Tier.HOST in self.tables

    def begin_load(self, nodes: list[Node]) -> Ticket:
        """Load a path of host-resident nodes (top first). The caller has seen to it that enough frames are free."""
        src = np.concatenate([self._host_frames(node) for node in nodes])
        frames = self.tables[Tier.DEVICE].allocate(len(src), -1 - self._next_seq[H2D], FrameState.FILLING)
        assert frames is not None, "a load needs free frames: make room first"
        op = self._begin(H2D, Tier.HOST, Tier.DEVICE, src, frames, nodes, after=None)
        self.counters["load_back_tokens"] += len(frames) * self.tree.page_size
        return op.ticket

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

    def begin_backup(self, node: Node, done: int) -> Ticket | None:
        """Back up the part of the path to `node` that the host lacks. None if it lacks nothing or has no room."""
        if not self.has_host:
            return None
        nodes = []
        step: Node | None = node
        while step is not None and step.parent is not None and step.frames[Tier.HOST] is None:
            nodes.append(step)
            step = step.parent
        if not nodes:
            return None
        nodes.reverse()
        src = np.concatenate([self._device_frames(n) for n in nodes])
        host = self.tables[Tier.HOST]
        missing = len(src) - host.num_free
        # What could not make room anyway stays cached.
        if 0 < missing <= self.tree.evictable_pages(Tier.HOST, keep=node):
            self.evict(Tier.HOST, missing, done, keep=node)
        dst = host.allocate(len(src), -1 - self._next_seq[D2H], FrameState.FILLING)
        num_tokens = len(src) * self.tree.page_size
        if dst is None:
            self.counters["backup_dropped_tokens"] += num_tokens
            return None
        after = max(n.fences[Tier.DEVICE] for n in nodes)
        self.counters["backup_tokens"] += num_tokens
        return self._begin(D2H, Tier.DEVICE, Tier.HOST, src, dst, nodes, after).ticket

    def commit(self, ticket: Ticket, done: int) -> None:
        """The operation brought its bytes on every rank."""
        op = self.in_flight.pop(ticket)
        nodes = self.tree.commit(ticket, op.dst)
        for node in nodes:
            frames = node.frames[op.dst]
            assert frames is not None
            self.tables[op.dst].transition(frames, FrameState.FILLING, FrameState.CACHED)
        self._unpin(op)
        # The last one takes in all above it.
        for node in reversed(nodes):
            self.tree.compact(node, done)

    def abort(self, ticket: Ticket, last_launch: int) -> None:
        """The operation failed on some rank. A failed load also loses its source, else it is retried for ever; the
        scheduler has closed all requests that read these nodes."""
        op = self.in_flight.pop(ticket)
        for node in list(self.tree.nodes_of(ticket)):
            for tier in (Tier.DEVICE, Tier.HOST):
                if tier == op.dst or op.dst == Tier.DEVICE:
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
        saving = tier == Tier.DEVICE and self.write_policy == "write_back" and self.has_host
        save = (lambda node: self.begin_backup(node, done)) if saving else (lambda node: None)
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

    def take_ops(self) -> tuple[tuple[TransferOp, ...], tuple[Ticket, ...]]:
        """Operations begun and tickets cancelled since the last call."""
        ops, cancels = tuple(self._new_ops), tuple(t for t in self._new_cancels if t in self.in_flight)
        self._new_ops, self._new_cancels = [], []
        return ops, cancels

    def check_invariants(self) -> None:
        for tier, table in self.tables.items():
            table.check_invariants()
            pins = np.zeros_like(table.pins)
            for op in self.in_flight.values():
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
                    filled = self.in_flight[ticket].dst_frames
                    assert np.isin(frames, filled).all(), f"{node}: {ticket} fills other pages"
                    # A load's source stays, else its failure could not be told from eviction.
                    ready = node.frames[Tier.HOST] is not None and node.tickets[Tier.HOST] is None
                    assert tier != Tier.DEVICE or ready, f"{node}: its load has no source"
            in_tree = expected >= 0
            assert (table.state[in_tree] == expected[in_tree]).all(), f"{tier.name}: tree and frame table disagree"
            rest = table.state[~in_tree]
            assert not np.isin(rest, (FrameState.CACHED, FrameState.FILLING)).any(), f"{tier.name}: a page is lost"

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
        ticket = Ticket(link, self._next_seq[link])
        self._next_seq[link] += 1
        self.tables[src].pin(src_frames)
        self.tables[dst].pin(dst_frames)
        self.tree.begin_fill(nodes, dst, dst_frames, ticket)
        op = TransferOp(ticket, src, dst, src_frames, dst_frames, len(src_frames) * self.page_bytes, after)
        self.in_flight[ticket] = op
        self._new_ops.append(op)
        return op

    def _unpin(self, op: TransferOp) -> None:
        self.tables[op.src].unpin(op.src_frames)
        self.tables[op.dst].unpin(op.dst_frames)

    def _release(self, dropped: Dropped, tier: Tier, last_launch: int) -> None:
        table = self.tables[tier]
        by_fence: dict[int, list[np.ndarray]] = {}
        for frames, fence in dropped.cached:
            by_fence.setdefault(fence, []).append(frames)
        for fence, parts in by_fence.items():
            table.doom(np.concatenate(parts), FrameState.CACHED, fence)
        for frames, _ in dropped.filling:
            # Host frames are read by loads alone, which pin them; device frames may be awaited by any launch.
            table.doom(frames, FrameState.FILLING, last_launch if tier == Tier.DEVICE else -1)
        tickets = dict.fromkeys(ticket for _, ticket in dropped.filling)
        self._new_cancels += [ticket for ticket in tickets if not self.tree.nodes_of(ticket)]

    @staticmethod
    def _host_frames(node: Node) -> np.ndarray:
        frames = node.frames[Tier.HOST]
        assert frames is not None and node.tickets[Tier.HOST] is None, f"{node} is not ready on the host"
        return frames

    @staticmethod
    def _device_frames(node: Node) -> np.ndarray:
        frames = node.frames[Tier.DEVICE]
        assert frames is not None and node.tickets[Tier.DEVICE] is None, f"{node} is not ready on the device"
        return frames
