"""`SlabWithdrawal`: what becomes of pages in borrowed slabs that go, because their lender wants them back or is gone.

Owns the ledger of slabs, which of their pages a request still reads, and the copies that are made within the peer
pool. Memory of slabs that go stays readable until no page in them is in use any more.

    a page that ...                                what becomes of it
    no request reads, and is worth it              copied to the host, and dropped at once
    a request streams, and no other tier has       copied to the host, else to another slab; dropped when that is done
    ... and there is no room, or the copy fails    lost: its readers start again, and compute it
    a request reads, of a lender that is silent    the same, at once
    any other                                      dropped at once

One pass over the tree finds all that goes. Of thousands of nodes a step drops a part: a server is not to stop for a
peer that is lost with all its slabs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.node import Node, is_ready
from sglang.srt.mem_cache.slab_ledger import SlabLedger, SlabReport
from sglang.srt.mem_cache.transfer import P2P, Tier, TransferOp
from sglang.srt.utils.time_units import NO_LAUNCH

# Nodes that a step drops, and that are looked at together for what of them is copied to the host.
_NODES_PER_STEP = 512
_NODES_PER_COPY = 64


class SlabWithdrawal:
    """controller: of the cache that borrows. slabs: of its peer pool."""

    def __init__(self, controller: HiCacheController, slabs: SlabLedger) -> None:
        self.slabs = slabs
        self.counters: Counter[str] = Counter()
        self._controller = controller
        self._tree = controller.tree
        self._ledger = controller.ledger
        self._peer = controller.tables[Tier.PEER]
        # Frames of slabs that go, while nodes may be left in them.
        self._going: list[np.ndarray] = []
        # Nodes that are still to be dropped, as the last pass found them.
        self._leaving: deque[Node] = deque()
        # Frames of the peer pool of which a copy was begun, or which cannot be read; and of which a copy within the
        # pool is under way.
        self._tried, self._moving = (np.zeros(self._peer.num_pages, np.bool_) for _ in range(2))
        # Whether copies or requests have ended that could let more pages go.
        self._is_due = False

    def note_end(self) -> None:
        """A copy or a request has ended."""
        self._is_due = True

    @property
    def has_more(self) -> bool:
        """Whether the next call of `update` has something to do, without anything else happening."""
        return bool(self._leaving) or (self._is_due and bool(self._going))

    def update(self, report: SlabReport, losing: Callable[[set[int]], None]) -> bool:
        """report: what all ranks have mapped. Pages of other slabs go. losing: called with the ids of nodes that are
        about to be lost though requests read them; it ends their holds. Returns whether slabs have begun to go."""
        return self._withdraw(self.slabs.update(report.mapped), report, losing)

    def give_back(self, slabs: list[int], losing: Callable[[set[int]], None]) -> bool:
        """These slabs have begun to drain; as `update`."""
        return self._withdraw(slabs, SlabReport(), losing)

    def _withdraw(self, slabs: list[int], report: SlabReport, losing: Callable[[set[int]], None]) -> bool:
        """Have the pages of slabs go, and those that were to go before."""
        self.counters["slabs_withdrawn"] += len(slabs)
        if slabs:
            runs = [self.slabs.frames_of(slab) for slab in slabs]
            # Nothing can be copied of what cannot be read.
            unreadable = [not report.is_readable(slab) for slab in slabs]
            self._tried[np.concatenate(runs)] = np.repeat(unreadable, [len(run) for run in runs])
            self._going += runs
            self._leaving.clear()
            self._is_due = True
        self._go_on(losing)
        # Perhaps nothing causes another step.
        self._peer.reap(self._controller.clock.done)
        return bool(slabs)

    def _go_on(self, losing: Callable[[set[int]], None]) -> None:
        if self._leaving:
            self._drop_some()
            return
        if not (self._is_due and self._going):
            return
        self._is_due = False
        going = self._controller.nodes_in(Tier.PEER, self._going)
        read = [node for node in going if self._is_read(node)]
        if read:
            lost = self._copy_elsewhere([node for node in read if not self._is_being_copied(node)], going)
            if lost:
                losing({node.id for node in lost})
            going = self._controller.nodes_in(Tier.PEER, self._going)
            read = [node for node in going if self._is_read(node)]
        stay = {node.id for node in read}
        self._leaving = deque(node for node in going if node.id not in stay)
        if not going:
            self._going = []
        if len(self._leaving) <= _NODES_PER_STEP // 4:
            self._drop_some()

    def _drop_some(self) -> None:
        """Drop the first of what leaves, as many as a step may; of what can be read, some is copied to the host."""
        for _ in range(0, min(len(self._leaving), _NODES_PER_STEP), _NODES_PER_COPY):
            part = [self._leaving.popleft() for _ in range(min(len(self._leaving), _NODES_PER_COPY))]
            # They may have left since, been merged into others, or be read now.
            part = [
                n for n in part if n.parent is not None and n.frames[Tier.PEER] is not None and not self._is_read(n)
            ]
            if self._controller.has_host:
                self._controller.move_to_host([n for n in part if not self._tried[n.frames[Tier.PEER]].any()])
            self._drop(part)
            # Another pass finds what was split or merged meanwhile.
            self._is_due = True

    def _drop(self, nodes: list[Node]) -> None:
        self._ledger.free(self._tree.drop(nodes, Tier.PEER), Tier.PEER)

    def end_move(self, op: TransferOp, is_done: bool) -> None:
        """A copy within the pool has ended. Nodes that still want it have it in place of what they had."""
        self._moving[op.src_frames] = False
        taken = np.zeros(self._peer.num_pages, np.bool_)
        for node in self._controller.nodes_in(Tier.PEER, [op.src_frames]) if is_done else ():
            if not is_ready(node, Tier.PEER):
                continue
            before = node.frames[Tier.PEER]
            assert before is not None
            to = np.full(self._peer.num_pages, -1, np.int32)
            to[op.src_frames] = op.dst_frames
            frames = np.where(to[before] >= 0, to[before], before)
            taken[frames] = True
            self._peer.transition(frames[frames != before], FrameState.HELD, FrameState.CACHED)
            self._peer.free_after(before[frames != before], FrameState.CACHED, node.last_stream)
            self._tree.replace_frames(node, Tier.PEER, frames)
        self._peer.free_after(op.dst_frames[~taken[op.dst_frames]], FrameState.HELD, NO_LAUNCH)
        self._is_due = True

    # -- inside -------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_read(node: Node) -> bool:
        """Whether a request reads a node from the peer as no other tier has it, or has it on its way there. What is
        streamed is read until its load has ended."""
        is_lacking = node.frames[Tier.DEVICE] is None or (
            node.tickets[Tier.DEVICE] is not None and node.last_stream > NO_LAUNCH
        )
        return node.lock > 0 and is_lacking and not is_ready(node, Tier.HOST)

    def _is_being_copied(self, node: Node) -> bool:
        frames = node.frames[Tier.PEER]
        is_on_its_way = node.tickets[Tier.PEER] is not None or node.tickets[Tier.HOST] is not None
        return is_on_its_way or bool(self._moving[frames].any())

    def _copy_elsewhere(self, nodes: list[Node], going: list[Node]) -> list[Node]:
        """Begin to copy nodes to the host, and within the pool. Returns those for which there is no room, or of which
        a copy has failed. going: nodes in slabs that go."""
        lost = [node for node in nodes if self._tried[node.frames[Tier.PEER]].any()]
        tried = {node.id for node in lost}
        left = [node for node in nodes if node.id not in tried]
        for tier in (Tier.HOST, Tier.PEER):
            fitting, left = self._fitting(left, tier, going)
            if not fitting:
                continue
            for node in fitting:
                self._tried[node.frames[Tier.PEER]] = True
            num_tokens = sum(len(node.key) for node in fitting)
            if tier == Tier.HOST:
                self._controller.copy_to_host(fitting)
            else:
                self._move(fitting)
                self.counters["moved_to_peer_tokens"] += num_tokens
        return lost + left

    def _fitting(self, nodes: list[Node], tier: Tier, going: list[Node]) -> tuple[list[Node], list[Node]]:
        """Those nodes for which a tier has room now, and the others. One is split where a part of it fits."""
        table, page = self._controller.tables[tier], self._tree.page_size
        table.reap(self._controller.clock.done)
        room = table.num_free + self._tree.evictable_pages(tier, going)
        fitting, left = [], []
        for node in nodes:
            num_pages = len(node.key) // page
            part = node if num_pages <= room else (self._tree.split(node, room * page) if room > 0 else None)
            if part is not node:
                left.append(node)
            if part is not None:
                fitting.append(part)
                room -= len(part.key) // page
        num_pages = sum(len(node.key) for node in fitting) // page
        if fitting and not self._controller.make_room(tier, num_pages, going):
            return [], fitting + left
        return fitting, left

    def _move(self, nodes: list[Node]) -> None:
        """Begin to copy nodes within the pool."""
        src = np.concatenate([node.frames[Tier.PEER] for node in nodes])  # type: ignore[arg-type]
        dst = self._peer.allocate(len(src))
        assert dst is not None, "there was room"
        self._moving[src] = True
        self._ledger.begin_transfer(P2P, (Tier.PEER, Tier.PEER), src, dst, None)
