"""`StreamedRequest`: a request that is longer than the device, and where each part of it is.

Owns what the request has beside its hold: pages on their way below the device, and those in the swap file. Decides
neither which requests stream nor when they give memory up: layer_streaming.py does. Allocates nothing on the device.

The request's tokens, from the first to the last:

    | on the device, in the tree | the gap: streamed                 | going         | HELD    |
    0                        start                                stop                     computed
                                   peers and host       | swap file   device and there  device
                                                   inserted_len

- *Spill*: the oldest HELD pages go to a peer, or to the host where peers have no room, as nodes of the tree that the
  device does not have; once they are there, the device frames are free and launches stream these pages.
- *Swap*: once peers and host are full they go to the swap file, where no other request finds them. Behind the first
  of them nothing enters the tree, and with the request they are gone.
- *Demote*: the last pages before `start` leave the device; a peer or the host has them.
- *Promote*: pages from `start` on are loaded, while there is room; a request that shares them may load them, too.

Where there is no gap, or it is being loaded as a whole, the request is like any other: it enters the tree as it is
computed, behind `stop`.

A request from which lenders have taken back again and again what it had on peers puts nothing more there, if host and
swap file have room for it: see `LayerStreaming.spares_peers`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.load_planner import LoadPlanner
from sglang.srt.managers.schedule_batch import Req, ReqHold
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.node import Node, is_ready
from sglang.srt.mem_cache.transfer import BACKUP_LINKS, COPY_LINKS, LOAD_LINKS, Ticket, Tier
from sglang.srt.model_executor.launch import PageRun, StreamedPrefix

# Links that bring what a launch of the request reads.
_FILLING = set(COPY_LINKS) - set(LOAD_LINKS.values())
# The tiers below the device that the tree knows.
_BELOW = tuple(BACKUP_LINKS)


@dataclass(frozen=True)
class _Layout:
    """Where a request's tokens are, as far as they are in the tree and not being spilled."""

    # Of the gap, in tokens; equal if there is none.
    start: int
    stop: int
    # Frames of what the device has before it.
    before: list[np.ndarray]
    # The nodes in it; the rest of it is in the swap file.
    streamed: list[Node]


class StreamedRequest:
    """req: has just got its hold. chunk_pages: the most that a launch computes. counters: of all that stream.
    spares_peers: whether it puts nothing on peers."""

    def __init__(
        self,
        req: Req,
        cache: KVCache,
        planner: LoadPlanner,
        chunk_pages: int,
        counters: Counter[str],
        spares_peers: bool,
    ) -> None:
        self.req = req
        self.counters = counters
        self._chunk_pages = chunk_pages
        self._spares_peers = spares_peers
        self._cache = cache
        self._planner = planner
        self._controller = cache.controller
        self._clock = cache.clock
        self._tree = cache.tree
        self._device = cache.device
        self._page = cache.page_size
        # What is going below the device: the operation, the device frames, and the token at which those end that go
        # to a tier of the tree.
        self._spill: Ticket | None = None
        self._spilling = np.empty(0, np.int32)
        self._spill_end = 0
        # Frames of the swap file, and those that are being written.
        self._swapped = self._swapping = np.empty(0, np.int32)
        self._parts: tuple[tuple[Tier, np.ndarray], ...] = ()
        # Tokens before the gap, as the executor knows.
        self._start = self._layout().start

    @property
    def _hold(self) -> ReqHold:
        assert self.req.hold is not None
        return self.req.hold

    @property
    def held(self) -> np.ndarray:
        """HELD device frames that are the request's beside those of its hold."""
        return self._spilling

    @property
    def gap_len(self) -> int:
        """Tokens that a launch of the request reads through the layer stream cache."""
        layout = self._layout()
        return layout.stop - layout.start

    @property
    def swapped_len(self) -> int:
        """Those of them in the swap file, or on their way there."""
        return self._hold.num_swapped * self._page

    def end(self, keep: bool) -> None:
        """The hold is about to end. What is kept goes below the device where that lacks what is before it. Frees what
        the request has beside its hold."""
        if keep and self._is_cut_off() and not self._hold.num_swapped:
            self.begin_spill(min(self.req.computed, self.req.num_known))
        self._device.free_after(self._spilling, FrameState.HELD, self.req.last_launch)
        if (swap := self._cache.swap) is not None:
            swap.free_after(np.concatenate((self._swapped, self._swapping)), FrameState.HELD, self.req.last_launch)

    # -- launches -----------------------------------------------------------------------------------------------

    def prefix(self, place: int) -> tuple[StreamedPrefix | None, list[PageRun]]:
        """What the next launch streams for the request, which has that place in it; and what the device has again."""
        layout = self._layout()
        before, self._start = self._start, layout.start
        page_runs = []
        if layout.start > before:
            first = before // self._page
            page_runs.append(PageRun(self.req.slot, first, np.concatenate(layout.before)[first:]))
        parts = []
        for node in layout.streamed:
            tier = self._source_of(node)
            frames = node.frames[tier]
            assert frames is not None
            parts.append((tier, frames))
            self._tree.note_stream(node, self._clock.next)
        if len(self._swapped):
            parts.append((Tier.DISK, self._swapped))
        if len(parts) != len(self._parts) or any(a is not b for (_, a), (_, b) in zip(parts, self._parts)):
            self._parts = tuple(parts)
        if not parts:
            return None, page_runs
        self.counters["streamed_tokens"] += layout.stop - layout.start
        return StreamedPrefix(place, layout.start, layout.stop, self._parts), page_runs

    # -- room ---------------------------------------------------------------------------------------------------

    def shrink(self, num_pages: int) -> bool:
        """Take device pages from the request; they become free at once, or soon. False if it has none to give."""
        if self._spill is not None:
            assert self._spill in self._cache.in_flight, f"{self._spill} is over, and is still waited for"
            # One that hangs has ended the request's hold.
            return self._will_end(self._spill)
        upto = min(self.req.computed, self.req.num_known)
        if self._is_cut_off() and self.begin_spill(upto):
            return True
        if self._demote(max(num_pages, 1 + self._chunk_pages // 8)):
            return True
        if not self._hold.num_swapped and self._drop_doubles(max(num_pages, self._chunk_pages)):
            return True
        # Once something is swapped, the tree takes nothing more: not for want of room that comes by itself.
        return (not self._hold.num_swapped and self._is_room_coming()) or self._swap_out(upto)

    def give_up(self, num_pages: int) -> int:
        """Give up so many device pages, of those that another tier has as well; returns how many there were."""
        before = num_pages
        for node in reversed(self._tree.path_of(self._hold.receipt.node)):
            if num_pages <= 0 or node.lock > 1:
                break
            if node.frames[Tier.DEVICE] is None:
                continue
            if _is_on_its_way(node) or self._tree.order.ready_tier(node) is None:
                break
            num_pages -= self._demote_node(node, num_pages)
        self._start = min(self._start, self._layout().start)
        return before - num_pages

    def begin_spill(self, upto: int) -> bool:
        """Begin to move HELD pages before token `upto` below the device; False if none can go, or are going
        already."""
        req, hold, page = self.req, self._hold, self._page
        if self._spill is not None or hold.num_swapped:
            return False
        start, node = hold.inserted_len, hold.receipt.node
        tokens = req.tokens[start : upto - upto % page]
        if upto - start < page:
            return False
        if (child := self._tree.child_on(node, tokens)) is not None:
            # Another request has computed the same.
            tokens = tokens[: len(child.key)]
            if self._tree.order.ready_tier(child) is not None:
                n = len(tokens) // page
                frames = hold.frames[:n].copy()
                self._extend_hold(child, n)
                self._device.free_after(frames, FrameState.HELD, req.last_launch)
                return True
            tickets = [child.tickets[tier] for tier in _BELOW]
            if any(tickets):
                return any(map(self._will_end, tickets))
        n = len(tokens) // page
        frames = hold.frames[:n].copy()
        found = self._controller.begin_spill(node, tokens, frames, req.last_launch, req.priority, self._tiers_below())
        if found is None:
            return False
        self._spill, new = found
        n = len(new.key) // page
        self._spilling = frames[:n]
        self._extend_hold(new, n)
        self._spill_end = hold.inserted_len
        self.counters["spilled_tokens"] += n * page
        return True

    def promote(self, num_pages: int) -> None:
        """Load the first of what is streamed, so many pages at most."""
        nodes = self._to_promote(num_pages)
        num_pages = sum(len(node.key) for node in nodes) // self._page
        if nodes and self._cache.make_room(num_pages):
            self._planner.begin_load(nodes)
            self.counters["promoted_tokens"] += num_pages * self._page

    # -- operations ---------------------------------------------------------------------------------------------

    def committed(self, ticket: Ticket) -> None:
        """An operation has ended well."""
        if ticket != self._spill:
            return
        self._swapped, self._swapping = np.concatenate((self._swapped, self._swapping)), self._swapping[:0]
        self._device.free_after(self._spilling, FrameState.HELD, self.req.last_launch)
        self._spill, self._spilling = None, self._spilling[:0]

    def depends_on(self, ticket: Ticket) -> bool:
        """Whether the request lacks a part of its KV if this operation failed."""
        if ticket == self._spill:
            return True
        if ticket.link not in _FILLING:
            return False
        filled = {node.id for node in self._tree.nodes_of(ticket) if self._tree.order.ready_tier(node) is None}
        return any(
            node.id in filled and node.frames[Tier.DEVICE] is None
            for node in self._tree.path_of(self._hold.receipt.node)
        )

    # -- looking ------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        assert (self._device.state[self._spilling] == FrameState.HELD).all()
        assert (self._spill is not None) == bool(len(self._spilling))
        assert self._spill is None or self._spill in self._cache.in_flight
        layout, hold = self._layout(), self._hold
        assert layout.start <= layout.stop <= hold.inserted_len + len(self._swapped) * self._page
        assert len(self._swapping) in (0, len(self._spilling))
        assert hold.num_swapped == len(self._swapped) + len(self._swapping)
        for node in layout.streamed:
            self._source_of(node)

    @property
    def swap_frames(self) -> np.ndarray:
        """(n,) int32, frames of the swap file that the request has."""
        return np.concatenate((self._swapped, self._swapping))

    # -- inside -------------------------------------------------------------------------------------------------

    def _layout(self) -> _Layout:
        end = self._hold.inserted_len
        if len(self._spilling) and not len(self._swapping):
            # What is being spilled is locked already. Behind it may be pages that were inserted since, where the
            # device gets it as well.
            end = self._spill_end - len(self._spilling) * self._page
        start = stop = 0
        before: list[np.ndarray] = []
        streamed: list[Node] = []
        behind: list[Node] = []
        for node in self._tree.path_of(self._hold.receipt.node):
            if node.start >= end:
                break
            frames = node.frames[Tier.DEVICE]
            if frames is None or node.tickets[Tier.DEVICE] is not None:
                # What the device has between two that it lacks is streamed with them: other tiers have it, too.
                streamed += [*behind, node]
                behind, stop = [], node.end
            elif streamed:
                behind.append(node)
            else:
                before.append(frames)
                start = stop = node.end
        if len(self._swapped):
            streamed += behind
            stop = end + len(self._swapped) * self._page
        return _Layout(start, stop, before, streamed)

    def _source_of(self, node: Node) -> Tier:
        tier = self._tree.order.ready_tier(node)
        if tier is None and is_ready(node, Tier.DEVICE):
            # Computed behind the gap, or loaded before what is above it was, and since given up below.
            return Tier.DEVICE
        assert tier is not None, f"{node} is streamed and ready nowhere"
        return tier

    def _to_promote(self, num_pages: int) -> list[Node]:
        """The nodes to load next, of num_pages at most; none while any of the request is on its way."""
        page, nodes = self._page, []
        for node in self._layout().streamed:
            if node.tickets[Tier.DEVICE] is not None:
                return []
            if num_pages < 1 or node.frames[Tier.DEVICE] is not None:
                break
            n = len(node.key) // page
            part = node if n <= num_pages else self._tree.split(node, num_pages * page)
            nodes.append(part)
            num_pages -= len(part.key) // page
        return nodes

    def _tiers_below(self) -> list[Tier]:
        """The tiers that may take what the device has no room for, the fastest first."""
        tiers = self._controller.tiers_below()
        return [tier for tier in tiers if tier != Tier.PEER] if self._spares_peers else tiers

    def _will_end(self, ticket: Ticket | None) -> bool:
        """Whether it is an operation that does not hang."""
        return ticket is not None and ticket.link not in self._cache.late_links

    def _is_room_coming(self) -> bool:
        """Whether transfers or launches that are under way will give some of the tiers below the device back, or let
        it be evicted."""
        if not self._cache.will_progress:
            return False
        tables = [self._cache.tables[tier] for tier in self._tiers_below()]
        for table in tables:
            table.reap(self._clock.done)
        return any(t.counts[FrameState.FILLING] + t.counts[FrameState.PENDING_FREE] > 0 for t in tables)

    def _take_back(self, node: Node) -> None:
        assert node.parent is not None
        self._cache.extend_lock(self._hold, node.parent)
        self._hold.take_back(self._controller.take_back(node), len(node.key))
        # Others that are gone may have launches under way that read them.
        self.req.last_launch = self._clock.last

    def _swap_out(self, upto: int) -> bool:
        hold = self._hold
        n = min((upto - hold.inserted_len) // self._page - hold.num_swapped, self._chunk_pages)
        if n < 1:
            return False
        frames = hold.frames[:n].copy()
        op = self._controller.begin_swap(frames, self.req.last_launch)
        if op is None:
            return False
        self._spill, self._spilling, self._swapping = op.ticket, frames, op.dst_frames
        hold.swap_out(n)
        self.counters["swapped_tokens"] += n * self._page
        return True

    def _is_cut_off(self) -> bool:
        """Whether the device lacks what is right before the request's HELD pages."""
        node = self._hold.receipt.node
        return node.parent is not None and node.frames[Tier.DEVICE] is None

    def _extend_hold(self, node: Node, num_pages: int) -> None:
        self._cache.extend_lock(self._hold, node)
        self._tree.count_use(node, self.req.priority, num_uses=0)
        self._hold.pass_on(num_pages, num_pages * self._page)

    def _demote(self, num_pages: int) -> bool:
        before, node = num_pages, self._hold.receipt.node
        while node.parent is not None and num_pages > 0:
            above = node.parent
            if node.frames[Tier.DEVICE] is None:
                node = above
                continue
            if _is_on_its_way(node):
                if any(map(self._will_end, node.tickets)):
                    return True
                break
            if node.lock > 1:
                break  # others use it
            if self._tree.order.ready_tier(node) is None:
                if self._copy_path_below(node):
                    return True
                if node is not self._hold.receipt.node or self._hold.num_swapped:
                    if self._copy_end_below(node):
                        return True
                    break
                # No tier has room for all of it: the end can only go as the request's own.
                above = self._split_for_room(node) or above
                self._take_back(node)
            else:
                num_pages -= self._demote_node(node, num_pages)
            node = above
        self._start = min(self._start, self._layout().start)
        return num_pages < before

    def _drop_doubles(self, num_pages: int) -> bool:
        """Give what the device lacks room for the place of copies below it of what it has before the gap. False if
        there are none."""
        before = num_pages
        for node in self._tree.path_of(self._hold.receipt.node):
            if num_pages <= 0 or node.frames[Tier.DEVICE] is None:
                break
            if node.lock > 1 or _is_on_its_way(node) or (tier := self._tree.order.ready_tier(node)) is None:
                continue
            n = min(num_pages, len(node.key) // self._page)
            double = self._tree.split(node, n * self._page) if n < len(node.key) // self._page else node
            self._controller.drop(double, tier)
            num_pages -= n
        return num_pages < before

    def _copy_path_below(self, node: Node) -> bool:
        """Begin to copy the path to a node to the first tier that has room for what no tier has of it."""
        path = self._tree.path_of(node)
        num_pages = sum(len(n.key) for n in path if self._tree.order.ready_tier(n) is None) // self._page
        for tier in self._tiers_below():
            if self._room_on(tier, path) >= num_pages and self._controller.begin_backup(
                node, tier, only_uncopied=True
            ):
                return True
        return False

    def _copy_end_below(self, node: Node) -> bool:
        """Begin to copy as much of a node's end as a tier has room for, without what lies above. False if none has
        any."""
        kept = self._tree.path_of(self._hold.receipt.node)
        for tier in self._tiers_below():
            room = self._room_on(tier, kept)
            if room < 1 or node.frames[tier] is not None:
                continue
            if (surplus := len(node.key) // self._page - room) > 0:
                self._tree.split(node, surplus * self._page)
            return self._controller.back_up([node], tier, kept) is not None
        return False

    def _split_for_room(self, node: Node) -> Node | None:
        """Cut off the front of a node that a tier has room for, with what no tier has above it. None if there is no
        such part."""
        path = self._tree.path_of(node)
        room = max((self._room_on(tier, path) for tier in self._tiers_below()), default=0)
        above = [n for n in path if n is not node and self._tree.order.ready_tier(n) is None]
        room -= sum(len(n.key) for n in above) // self._page
        if not 0 < room < len(node.key) // self._page:
            return None
        return self._tree.split(node, room * self._page)

    def _room_on(self, tier: Tier, kept: list[Node]) -> int:
        """Pages that a tier has free, or could give up. kept: nodes that stay."""
        table = self._cache.tables[tier]
        table.reap(self._clock.done)
        return table.num_free + self._tree.evictable_pages(tier, kept)

    def _demote_node(self, node: Node, num_pages: int) -> int:
        n = min(num_pages, len(node.key) // self._page)
        self._controller.demote(node, n * self._page, self._tiers_below())
        self.counters["demoted_tokens"] += n * self._page
        return n


def _is_on_its_way(node: Node) -> bool:
    """Whether an operation fills a node's frames on some tier."""
    return any(ticket is not None for ticket in node.tickets)
