"""`LayerStreaming`: one request that is longer than the device, and where each part of it is.

Owns the role, which one request has at a time: two would halve each other's link. Never decides who gets it: the
scheduler does. Allocates nothing on the device.

The request's tokens, from the first to the last:

    | on the device, in the tree | the hole: streamed              | going         | HELD    |
    0                        start                              stop                     computed
                                   host, perhaps a peer | swap file  device and there  device
                                                    published

- *Spill*: the oldest HELD pages go to the host, as nodes of the tree that the device does not have; once they are
  there, the device frames are free and launches stream these pages.
- *Swap*: once the host is full they go to the swap file, where nobody else finds them. Behind the first of them
  nothing enters the tree, and with the request they are gone.
- *Demote*: the last pages before `start` leave the device; the host has them.
- *Promote*: pages from `start` on are loaded, while there is room; a request that shares them may load them, too.

So the context is bounded by host pool, swap file and what the device holds beside them. Where there is no hole, or it
is being loaded as a whole, the request is like any other: it enters the tree as it is computed, behind `stop`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.hiradix_tree import MatchResult, Node, is_fetching
from sglang.srt.mem_cache.transfer import D2H, Ticket, Tier, TransferOp
from sglang.srt.model_executor.launch import PageRun, StreamedPrefix

# Chunks of a prompt for which the device has room beside what it keeps: one that is computed, one that is spilled,
# and one that may be launched ahead.
_CHUNKS = 3


@dataclass(frozen=True)
class _Layout:
    """Where a request's tokens are, as far as they are in the tree and not being spilled. start, stop: of the hole;
    equal if there is none. before: frames of what the device has before it. streamed: the nodes in it; the rest of it
    is in the swap file."""

    start: int
    stop: int
    before: list[np.ndarray]
    streamed: list[Node]


@dataclass(frozen=True)
class LayerStreamConfig:
    """num_buffers, buffer_pages: of the layer stream cache. max_tpot_s: a request whose tokens are expected to take
    longer each is refused; None for no limit."""

    num_buffers: int
    buffer_pages: int
    max_tpot_s: float | None = None


def check_room_for_chunks(chunk_pages: int, num_usable_pages: int) -> None:
    """Parameters: see `LayerStreaming`. Raises ValueError."""
    if num_usable_pages < 2 * chunk_pages + 2:
        raise ValueError(
            f"layer streaming needs room for two chunks of a prompt on the device, {2 * chunk_pages + 2} pages, "
            f"and it has {num_usable_pages}: lower --chunked-prefill-size, raise --max-total-tokens or "
            "give a smaller --layer-stream-tokens (0 is all that the host has)"
        )


class LayerStreaming:
    """chunk_pages: the most pages that a launch computes. num_usable_pages: of the device."""

    def __init__(self, controller: HiCacheController, chunk_pages: int, num_usable_pages: int) -> None:
        check_room_for_chunks(chunk_pages, num_usable_pages)
        self.req: Req | None = None
        self.chunk_pages = chunk_pages
        # Free for a request that begins, or is made to shrink.
        self.headroom = min(_CHUNKS * chunk_pages + 2, num_usable_pages)
        self.max_pages = controller.tables[Tier.HOST].num_pages + num_usable_pages - 2 * chunk_pages - 2
        self.max_pages += controller.swap.num_pages if controller.swap is not None else 0
        self.counters: Counter[str] = Counter()
        self._controller = controller
        self._tree = controller.tree
        self._device = controller.tables[Tier.DEVICE]
        self._page = controller.tree.page_size
        self._start = 0
        # What is going to the host or the swap file: the operation, and the device frames.
        self._spill: Ticket | None = None
        self._spilling = np.empty(0, np.int32)
        # Frames of the swap file, and those that are being written.
        self._swapped = self._swapping = np.empty(0, np.int32)
        self._parts: tuple[tuple[Tier, np.ndarray], ...] = ()

    # -- the role -----------------------------------------------------------------------------------------------

    def begin(self, req: Req) -> None:
        """The request, which has just got its hold or has grown too long, may stream from now on."""
        assert self.req is None and req.hold is not None
        self.req = req
        self._start = self._layout().start
        self.counters["streamed_reqs"] += 1

    def end(self, keep: bool, now: int, done: int) -> None:
        """The request's hold is about to end. keep: what it computed stays, on the host where the device lacks what
        is before it. Frees what the request has beside its hold."""
        assert self.req is not None
        if keep and self._is_cut_off() and not self.num_beside:
            self.spill(min(self.req.computed, self.req.num_known), now, done)
        self._device.doom(self._spilling, FrameState.HELD, self.req.last_launch)
        if (swap := self._controller.swap) is not None:
            swap.doom(np.concatenate((self._swapped, self._swapping)), FrameState.HELD, self.req.last_launch)
        none = self._spilling[:0]
        self.req, self._spill, self._parts = None, None, ()
        self._spilling = self._swapped = self._swapping = none

    @property
    def held(self) -> np.ndarray:
        """HELD frames that are the request's beside those of its hold."""
        return self._spilling

    @property
    def num_beside(self) -> int:
        """Pages that are neither in the tree nor in the request's hold."""
        return len(self._swapped) + len(self._swapping)

    @property
    def hole(self) -> int:
        """Tokens that a launch of the request streams."""
        if self.req is None:
            return 0
        layout = self._layout()
        return layout.stop - layout.start

    def state(self) -> dict[str, int]:
        """What `GET /hicache/state` shows: tokens of the request that streams, and where they are."""
        req = self.req
        if req is None or req.hold is None:
            return {"resident_tokens": 0, "streamed_tokens": 0}
        hole = self.hole
        return {"resident_tokens": req.computed - hole, "streamed_tokens": hole}

    # -- launches -----------------------------------------------------------------------------------------------

    def prefix(self, place: int, launch: int) -> tuple[StreamedPrefix | None, list[PageRun]]:
        """What the launch streams for the request, which has that place in it; and what the device has again."""
        req = self.req
        assert req is not None and req.hold is not None
        layout = self._layout()
        before, self._start = self._start, layout.start
        page_runs = []
        if layout.start > before:
            first = before // self._page
            page_runs.append(PageRun(req.slot, first, np.concatenate(layout.before)[first:]))
        parts = []
        for node in layout.streamed:
            tier = self._source_of(node)
            frames = node.frames[tier]
            assert frames is not None
            parts.append((tier, frames))
            node.last_stream = launch
        if len(self._swapped):
            parts.append((Tier.DISK, self._swapped))
        if len(parts) != len(self._parts) or any(a is not b for (_, a), (_, b) in zip(parts, self._parts)):
            self._parts = tuple(parts)
        if not parts:
            return None, page_runs
        self.counters["streamed_tokens"] += layout.stop - layout.start
        return StreamedPrefix(place, layout.start, layout.stop, self._parts), page_runs

    # -- room ---------------------------------------------------------------------------------------------------

    def make_room(self, num_pages: int, now: int, done: int) -> bool:
        """Give up so many device pages, or begin to. False if nothing more can be given up."""
        req = self.req
        assert req is not None
        if self._spill is not None:
            assert self._spill in self._controller.in_flight, f"{self._spill} is over, and is still waited for"
            return True
        upto = min(req.computed, req.num_known)
        if self._is_cut_off() and self.spill(upto, now, done):
            return True
        if self._demote(max(num_pages, 1 + self.chunk_pages // 8), now - 1, done):
            return True
        # Once something is swapped, the host takes nothing more: not for want of room that comes by itself.
        return (not self.num_beside and self._host_is_busy(done)) or self._swap_out(upto, done)

    def give_way(self, num_pages: int, last_launch: int) -> bool:
        """Give up so many device pages for others, of those that the host has as well. False if there are none."""
        assert self.req is not None and self.req.hold is not None
        before = num_pages
        for node in reversed(self._tree.path_of(self.req.hold.receipt.node)):
            if num_pages <= 0 or node.lock > 1:
                break
            if node.frames[Tier.DEVICE] is None:
                continue
            is_on_its_way = any(node.tickets[tier] is not None for tier in (Tier.DEVICE, Tier.HOST))
            if is_on_its_way or node.frames[Tier.HOST] is None:
                break
            num_pages -= self._demote_node(node, num_pages, last_launch)
        self._start = min(self._start, self._layout().start)
        return num_pages < before

    def spill(self, upto: int, now: int, done: int) -> bool:
        """Begin to move HELD pages before token `upto` to the host; False if none can go, or are going already. now:
        the next launch."""
        req = self.req
        assert req is not None and req.hold is not None
        hold, page = req.hold, self._page
        if self._spill is not None or self.num_beside:
            return False
        start, node = hold.published, hold.receipt.node
        tokens = req.tokens[start : upto - upto % page]
        if upto - start < page:
            return False
        if is_fetching(node):
            return True  # nothing below goes to the host before that has ended
        if (child := self._tree.child_on(node, tokens)) is not None:
            # Another request has computed the same.
            tokens = tokens[: len(child.key)]
            if child.tickets[Tier.HOST] is not None:
                return True
            if child.frames[Tier.HOST] is not None:
                n = len(tokens) // page
                frames = hold.frames[:n].copy()
                self._extend_hold(child, n, now)
                self._device.doom(frames, FrameState.HELD, req.last_launch)
                return True
        if node.parent is not None and node.frames[Tier.HOST] is None:
            if self._controller.begin_backup(node, done) is None:
                return False
            node = hold.receipt.node
        n = len(tokens) // page
        frames = hold.frames[:n].copy()
        found = self._controller.begin_spill(node, tokens, frames, req.last_launch, now, done, req.priority)
        if found is None:
            return False
        self._spill, new = found
        n = len(new.key) // page
        self._spilling = frames[:n]
        self._extend_hold(new, n, now)
        self.counters["spilled_tokens"] += n * page
        return True

    def committed(self, ticket: Ticket) -> None:
        """An operation has ended well: perhaps a spill."""
        if ticket != self._spill:
            return
        assert self.req is not None
        self._swapped, self._swapping = np.concatenate((self._swapped, self._swapping)), self._swapping[:0]
        self._device.doom(self._spilling, FrameState.HELD, self.req.last_launch)
        self._spill, self._spilling = None, self._spilling[:0]

    def depends_on(self, ticket: Ticket) -> bool:
        """Whether the request lacks a part of its KV if this backup failed."""
        if self.req is None or ticket.link != D2H:
            return self.req is not None and ticket == self._spill
        assert self.req.hold is not None
        filled = {node.id for node in self._tree.nodes_of(ticket)}
        return any(node.id in filled for node in self._tree.path_of(self.req.hold.receipt.node))

    def to_promote(self, num_pages: int) -> list[Node]:
        """The nodes to load next, of num_pages at most; none while any of the request is on its way."""
        assert self.req is not None and self.req.hold is not None
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

    def cut_back(self, match: MatchResult, num_pages: int, last_launch: int) -> None:
        """Of a request that is about to begin: drop so many pages from the end of what the device has of it."""
        for node in reversed(match.path):
            if num_pages <= 0 or node.lock:
                break
            if node.frames[Tier.DEVICE] is None:
                continue
            if node.tickets[Tier.DEVICE] is not None:
                break
            n = len(node.key) // self._page
            if n > num_pages:
                self._tree.split(node, (n - num_pages) * self._page)
            self._controller.drop(node, Tier.DEVICE, last_launch)
            num_pages -= n

    def streamable(self, match: MatchResult) -> MatchResult:
        """The part of a match that the device has, or the host."""
        pos = 0
        for i, node in enumerate(match.path):
            on_device = node.frames[Tier.DEVICE] is not None and node.tickets[Tier.DEVICE] is None
            on_host = node.frames[Tier.HOST] is not None and node.tickets[Tier.HOST] is None
            if not (on_device or on_host):
                last_len = len(match.path[i - 1].key) if i else 0
                near_len = min(match.near_len, pos)
                return MatchResult(match.namespace, match.path[:i], last_len, match.device_len, near_len, pos)
            pos += len(node.key)
        return match

    def check_invariants(self) -> None:
        assert self.req is not None or not len(self._spilling)
        assert (self._device.state[self._spilling] == FrameState.HELD).all()
        assert (self._spill is not None) == bool(len(self._spilling))
        if self.req is None:
            return
        assert self.req.hold is not None
        assert self._spill is None or self._spill in self._controller.in_flight
        layout = self._layout()
        assert layout.start <= layout.stop <= self.req.hold.published + len(self._swapped) * self._page
        assert len(self._swapping) in (0, len(self._spilling))
        if (swap := self._controller.swap) is not None:
            swap.check_invariants()
            mine = np.concatenate((self._swapped, self._swapping))
            assert (swap.state[mine] == FrameState.HELD).all() and swap.counts[FrameState.HELD] == len(mine)
        for node in layout.streamed:
            self._source_of(node)

    # -- inside -------------------------------------------------------------------------------------------------

    def _layout(self) -> _Layout:
        assert self.req is not None and self.req.hold is not None
        # What is going to the host is locked already.
        end = self.req.hold.published - (len(self._spilling) - len(self._swapping)) * self._page
        start = stop = 0
        before: list[np.ndarray] = []
        streamed: list[Node] = []
        behind: list[Node] = []
        for node in self._tree.path_of(self.req.hold.receipt.node):
            if node.start >= end:
                break
            frames = node.frames[Tier.DEVICE]
            if frames is None or node.tickets[Tier.DEVICE] is not None:
                # What the device has between two that it lacks is streamed with them: the host has it, too.
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
        tier = self._tree.source_of(node)
        if tier is None and node.frames[Tier.DEVICE] is not None and node.tickets[Tier.DEVICE] is None:
            # Loaded before what is above it was, and since given up below. Its launches are over: what is swapped was
            # computed after it.
            assert len(self._swapped)
            return Tier.DEVICE
        assert tier is not None, f"{node} is streamed and ready nowhere"
        return tier

    def _host_is_busy(self, done: int) -> bool:
        """Whether transfers or launches that are under way will give some of the host back, or let it be evicted."""
        host = self._controller.tables[Tier.HOST]
        host.reap(done)
        return host.counts[FrameState.FILLING] + host.counts[FrameState.DOOMED] > 0

    def _take_back(self, node: Node, last_launch: int) -> None:
        assert self.req is not None and self.req.hold is not None and node.parent is not None
        hold = self.req.hold
        old, hold.receipt = hold.receipt, self._tree.lock_node(node.parent, last_launch + 1)
        self._tree.unlock(old, last_launch + 1, -1)
        hold.take_back(self._controller.unpublish(node, last_launch), len(node.key))
        # Others that are gone may have launches under way that read them.
        self.req.last_launch = last_launch

    def _swap_out(self, upto: int, done: int) -> bool:
        assert self.req is not None and self.req.hold is not None
        hold = self.req.hold
        n = min((upto - hold.published) // self._page - self.num_beside, self.chunk_pages)
        if n < 1:
            return False
        frames = hold.frames[:n].copy()
        self._spill = self._controller.begin_swap(frames, self.req.last_launch, done)
        if self._spill is None:
            return False
        op = self._controller.in_flight[self._spill]
        assert isinstance(op, TransferOp)
        self._spilling, self._swapping = frames, op.dst_frames
        hold.pass_on(n, 0)
        self.counters["swapped_tokens"] += n * self._page
        return True

    def _is_cut_off(self) -> bool:
        """Whether the device lacks what is right before the request's HELD pages."""
        assert self.req is not None and self.req.hold is not None
        node = self.req.hold.receipt.node
        return node.parent is not None and node.frames[Tier.DEVICE] is None

    def _extend_hold(self, node: Node, num_pages: int, now: int) -> None:
        assert self.req is not None and self.req.hold is not None
        hold = self.req.hold
        old = hold.receipt
        hold.receipt = self._tree.lock_node(node, now)
        self._tree.count_use(node, self.req.priority, num_uses=0)
        self._tree.unlock(old, now, -1)
        hold.pass_on(num_pages, num_pages * self._page)

    def _demote(self, num_pages: int, last_launch: int, done: int) -> bool:
        assert self.req is not None and self.req.hold is not None
        before, node = num_pages, self.req.hold.receipt.node
        while node.parent is not None and num_pages > 0:
            above = node.parent
            if node.frames[Tier.DEVICE] is None:
                node = above
                continue
            if node.tickets[Tier.DEVICE] is not None or node.tickets[Tier.HOST] is not None:
                return True  # on its way
            if node.lock > 1:
                break  # others use it
            if node.frames[Tier.HOST] is None:
                if self._controller.begin_backup(node, done) is not None:
                    return True
                if node is not self.req.hold.receipt.node or self.num_beside:
                    break
                # The host has no room for all of it: the end can only go as the request's own.
                above = self._split_for_host(node) or above
                self._take_back(node, last_launch)
            else:
                num_pages -= self._demote_node(node, num_pages, last_launch)
            node = above
        self._start = min(self._start, self._layout().start)
        return num_pages < before

    def _split_for_host(self, node: Node) -> Node | None:
        """Cut off the front of a node that the host has room for, with what it lacks above. None if there is none."""
        room = self._controller.tables[Tier.HOST].num_free + self._tree.evictable_pages(Tier.HOST, keep=node)
        step = node.parent
        while step is not None and step.parent is not None and step.frames[Tier.HOST] is None:
            room -= len(step.key) // self._page
            step = step.parent
        if not 0 < room < len(node.key) // self._page:
            return None
        return self._tree.split(node, room * self._page)

    def _demote_node(self, node: Node, num_pages: int, last_launch: int) -> int:
        n = min(num_pages, len(node.key) // self._page)
        self._controller.demote(node, n * self._page, last_launch)
        self.counters["demoted_tokens"] += n * self._page
        return n
