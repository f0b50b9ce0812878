"""`LayerStreaming`: one request that is longer than the device, and where each part of it is.

Owns the role, which one request has at a time: two would halve each other's link. `NoLayerStreaming` is the interface
and its null object. Never decides which request streams: admission does. Allocates nothing on the device.

The request's tokens, from the first to the last:

    | on the device, in the tree | the gap: streamed               | going         | HELD    |
    0                        start                              stop                     computed
                                   host, perhaps a peer | swap file  device and there  device
                                                    inserted_len

- *Spill*: the oldest HELD pages go to the host, as nodes of the tree that the device does not have; once they are
  there, the device frames are free and launches stream these pages.
- *Swap*: once the host is full they go to the swap file, where no other request finds them. Behind the first of them
  nothing enters the tree, and with the request they are gone.
- *Demote*: the last pages before `start` leave the device; the host has them.
- *Promote*: pages from `start` on are loaded, while there is room; a request that shares them may load them, too.

So the context is bounded by host pool, swap file and what the device holds beside them. Where there is no gap, or it
is being loaded as a whole, the request is like any other: it enters the tree as it is computed, behind `stop`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.load_planner import LoadPlanner
from sglang.srt.managers.request_queues import RequestQueues
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import LoadTimes, decode_reserve, pages_for
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.node import MatchResult, Node
from sglang.srt.mem_cache.transfer import D2H, Ticket, Tier
from sglang.srt.model_executor.launch import PageRun, StreamedPrefix
from sglang.srt.utils.time_units import NO_LAUNCH

# Chunks of a prompt for which the device has room beside what it keeps: one that is computed, one that is spilled,
# and one that may be launched ahead.
_CHUNKS = 3


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


def check_room_for_chunks(chunk_pages: int, num_usable_pages: int) -> None:
    """Parameters: see `LayerStreaming`. Raises ValueError."""
    if num_usable_pages < 2 * chunk_pages + 2:
        raise ValueError(
            f"layer streaming needs room for two chunks of a prompt on the device, {2 * chunk_pages + 2} pages, "
            f"and it has {num_usable_pages}: lower --chunked-prefill-size, raise --max-total-tokens or "
            "give a smaller --layer-stream-tokens (0 is all that the host has)"
        )


class NoLayerStreaming:
    """The interface, of an engine whose requests all fit on the device: the null object."""

    is_enabled = False
    # The flags that bound a request's length.
    limit_flags = "--context-length and --max-total-tokens"
    # The request that streams.
    req: Req | None = None
    # Pages that must be free, or could be, for a request that begins to stream.
    headroom = 0
    # The last launch when pages were given up for a waiting request.
    gave_way_at = NO_LAUNCH

    def __init__(self, config: SchedulerConfig) -> None:
        self.max_resident_len = config.max_resident_len
        # The most tokens of a request, prompt and output.
        self.max_total_len = config.max_resident_len
        self.counters: Counter[str] = Counter()

    # -- whom it concerns ---------------------------------------------------------------------------------------

    def must_stream(self, req: Req) -> bool:
        """Whether the device has no room for what is known of a request."""
        return False

    def may_stream(self, req: Req) -> bool:
        """Whether the device may have no room for it before its end."""
        return False

    def is_streaming(self, req: Req) -> bool:
        return req is self.req

    def future_len(self, req: Req) -> int:
        """Tokens that a request may still need room for on the device."""
        return min(req.max_len, self.max_resident_len) - req.length

    def admissible(self, ready: list[Req]) -> list[Req]:
        """Those of the waiting requests that may start beside the request that streams."""
        return ready

    def refusal(self, num_prompt: int) -> str:
        """Why a prompt is refused as it would have to stream more than there is time for; "" if it is not."""
        return ""

    # -- the role -----------------------------------------------------------------------------------------------

    def make_streamable(self, req: Req, match: MatchResult) -> MatchResult:
        """Leave the device room for more than what it has of a request that is longer."""
        raise AssertionError("no request streams")

    def begin(self, req: Req) -> None:
        """The request, which has just got its hold, may stream from now on."""
        raise AssertionError("no request streams")

    def begin_if_outgrown(self, req: Req) -> bool:
        """A request that runs alone has no more room on the device. False if it may not stream."""
        return False

    def end_hold(self, req: Req, keep: bool) -> None:
        """A request's hold is about to end. keep: what it computed stays in the cache."""

    # -- launches -----------------------------------------------------------------------------------------------

    def begin_chunk(self, req: Req) -> LoadTimes:
        """A chunk of the request that streams has got its pages. Returns when what its launch streams arrives."""
        raise AssertionError("no request streams")

    def streams(self, reqs: list[Req], page_runs: list[PageRun]) -> tuple[StreamedPrefix, ...]:
        """What the next launch streams, which has these requests. page_runs: takes the pages that the device has
        again."""
        return ()

    # -- room ---------------------------------------------------------------------------------------------------

    def shrink(self, num_pages: int) -> bool:
        """Take device pages from the request that streams; they become free at once, or soon. False if it has none
        to give."""
        return False

    def shrink_stream_for(self, num_pages: int, others: list[Req]) -> None:
        """Take device pages from the request that streams for one that waits, which lacks so many, and for those
        others that a launch could take along."""

    def pages_of_rest(self, req: Req, num_pages: int) -> int:
        """How many of the pages for the rest of a prompt are kept free."""
        return num_pages

    # -- operations ---------------------------------------------------------------------------------------------

    def committed(self, ticket: Ticket) -> None:
        """An operation has ended well."""

    def reader_of(self, ticket: Ticket) -> Req | None:
        """The request that streams, if it lacks a part of its KV when this operation has failed."""
        return None

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def gap_len(self) -> int:
        """Tokens that a launch of the request that streams reads through the layer stream cache."""
        return 0

    @property
    def held(self) -> np.ndarray:
        """HELD device frames that are a request's beside those of its hold."""
        return np.empty(0, np.int32)

    def state(self) -> dict[str, int] | None:
        """What `GET /hicache/state` shows; None if no request can stream."""
        return None

    def check_invariants(self) -> None:
        pass


class LayerStreaming(NoLayerStreaming):
    is_enabled = True
    limit_flags = "--context-length, --max-total-tokens, --hicache-size and --layer-stream-disk-size"

    def __init__(self, config: SchedulerConfig, cache: KVCache, queues: RequestQueues, planner: LoadPlanner) -> None:
        super().__init__(config)
        chunk_pages = pages_for(config.chunk_budget, config.page_size)
        num_usable_pages = config.num_usable_pages
        check_room_for_chunks(chunk_pages, num_usable_pages)
        assert cache.host is not None and config.layer_stream is not None
        self.config = config
        # The most pages that a launch computes.
        self.chunk_pages = chunk_pages
        self.headroom = min(_CHUNKS * chunk_pages + 2, num_usable_pages)
        max_pages = cache.host.num_pages + num_usable_pages - 2 * chunk_pages - 2
        max_pages += cache.swap.num_pages if cache.swap is not None else 0
        self.max_total_len = max(self.max_resident_len, min(config.context_len, max_pages * config.page_size))
        self._cache = cache
        self._queues = queues
        self._planner = planner
        self._host = cache.host
        self._controller = cache.controller
        self._clock = cache.clock
        self._tree = cache.tree
        self._device = cache.device
        self._page = config.page_size
        # Tokens before the gap, as the executor knows.
        self._start = 0
        # What is going to the host or the swap file: the operation, and the device frames.
        self._spill: Ticket | None = None
        self._spilling = np.empty(0, np.int32)
        # Frames of the swap file, and those that are being written.
        self._swapped = self._swapping = np.empty(0, np.int32)
        self._parts: tuple[tuple[Tier, np.ndarray], ...] = ()

    # -- whom it concerns ---------------------------------------------------------------------------------------

    def must_stream(self, req: Req) -> bool:
        return req.num_known > self.max_resident_len

    def may_stream(self, req: Req) -> bool:
        return req.max_len > self.max_resident_len

    def future_len(self, req: Req) -> int:
        return 0 if req is self.req or self.must_stream(req) else super().future_len(req)

    def admissible(self, ready: list[Req]) -> list[Req]:
        # One streams at a time; the others that must let the younger ones pass.
        return ready if self.req is None else [r for r in ready if not self.must_stream(r)]

    def refusal(self, num_prompt: int) -> str:
        assert self.config.layer_stream is not None
        most, expected = self.config.layer_stream.max_tpot_s, self._planner.expected
        if most is None or num_prompt <= self.max_resident_len:
            return ""
        streamed = num_prompt - (self.max_resident_len - self.chunk_pages * self._page)
        from_disk = max(0, streamed - self._host.num_pages * self._page)
        seconds = max(expected.stream_seconds(streamed, from_disk), expected.decode_seconds())
        if seconds <= most:
            return ""
        return (
            f"the device has no room for {streamed} of the prompt's {num_prompt} tokens: each new token would take "
            f"{seconds:.3g} s, and this server allows {most:g} s (see --layer-stream-max-tpot)"
        )

    # -- the role -----------------------------------------------------------------------------------------------

    def begin(self, req: Req) -> None:
        assert self.req is None and req.hold is not None
        self.req = req
        self._start = self._layout().start
        self.counters["streamed_reqs"] += 1

    def begin_if_outgrown(self, req: Req) -> bool:
        if self.req is not None or req.max_len <= self.max_resident_len:
            return False
        self.begin(req)
        return True

    def make_streamable(self, req: Req, match: MatchResult) -> MatchResult:
        too_many = self._tree.evictable_pages_in(match) + self.headroom - self._cache.available_pages
        if too_many > 0:
            self._cut_back(match, too_many)
            match = self._cache.match(req)
        return self._streamable(match)

    def end_hold(self, req: Req, keep: bool) -> None:
        """What is kept goes to the host where the device lacks what is before it. Frees what the request has beside
        its hold."""
        if req is not self.req:
            return
        assert req.hold is not None
        if keep and self._is_cut_off() and not req.hold.num_swapped:
            self._begin_spill(min(req.computed, req.num_known))
        self._device.free_after(self._spilling, FrameState.HELD, req.last_launch)
        if (swap := self._cache.swap) is not None:
            swap.free_after(np.concatenate((self._swapped, self._swapping)), FrameState.HELD, req.last_launch)
        none = self._spilling[:0]
        self.req, self._spill, self._parts = None, None, ()
        self._spilling = self._swapped = self._swapping = none

    @property
    def held(self) -> np.ndarray:
        return self._spilling

    @property
    def gap_len(self) -> int:
        if self.req is None:
            return 0
        layout = self._layout()
        return layout.stop - layout.start

    def state(self) -> dict[str, int] | None:
        """Tokens of the request that streams, and where they are."""
        req = self.req
        if req is None or req.hold is None:
            return {"resident_tokens": 0, "streamed_tokens": 0}
        gap_len = self.gap_len
        return {"resident_tokens": req.computed - gap_len, "streamed_tokens": gap_len}

    # -- launches -----------------------------------------------------------------------------------------------

    def begin_chunk(self, req: Req) -> LoadTimes:
        assert req is self.req and req.hold is not None
        if self._cache.available_pages < 2 * self.chunk_pages:
            # Room for the chunk after the next.
            self._begin_spill(req.computed)
        from_disk = req.hold.num_swapped * self._page
        return self._planner.expected.arrival_of_stream(self.gap_len, from_disk)

    def streams(self, reqs: list[Req], page_runs: list[PageRun]) -> tuple[StreamedPrefix, ...]:
        if self.req is None or self.req not in reqs:
            return ()
        self._promote()
        prefix, runs = self._prefix(reqs.index(self.req))
        page_runs += runs
        return (prefix,) if prefix is not None else ()

    def _prefix(self, place: int) -> tuple[StreamedPrefix | None, list[PageRun]]:
        """What the next launch streams for the request, which has that place in it; and what the device has again."""
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
        req = self.req
        if req is None:
            return False
        assert req.hold is not None
        if req is self._queues.prefilling:
            num_pages = max(num_pages, self.headroom)
        if self._spill is not None:
            assert self._spill in self._cache.in_flight, f"{self._spill} is over, and is still waited for"
            return True
        upto = min(req.computed, req.num_known)
        if self._is_cut_off() and self._begin_spill(upto):
            return True
        if self._demote(max(num_pages, 1 + self.chunk_pages // 8)):
            return True
        # Once something is swapped, the host takes nothing more: not for want of room that comes by itself.
        return (not req.hold.num_swapped and self._host_is_busy()) or self._swap_out(upto)

    def shrink_stream_for(self, num_pages: int, others: list[Req]) -> None:
        if self.req is None or num_pages <= 0:
            return
        along, ratio = 0, self.config.new_token_ratio
        for req in others:
            along += pages_for(req.num_known + int(ratio * self.future_len(req)), self._page)
            if along >= self.chunk_pages:
                break
        # What others have given up comes by itself.
        num_pages += min(along, self.chunk_pages) - self._device.counts[FrameState.PENDING_FREE]
        if self._give_up(num_pages):
            self.gave_way_at = self._clock.last

    def pages_of_rest(self, req: Req, num_pages: int) -> int:
        return min(num_pages, self.headroom) if req is self.req else num_pages

    def _give_up(self, num_pages: int) -> bool:
        """Give up so many device pages, of those that the host has as well. False if there are none."""
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
            num_pages -= self._demote_node(node, num_pages)
        self._start = min(self._start, self._layout().start)
        return num_pages < before

    def _begin_spill(self, upto: int) -> bool:
        """Begin to move HELD pages before token `upto` to the host; False if none can go, or are going already."""
        req = self.req
        assert req is not None and req.hold is not None
        hold, page = req.hold, self._page
        if self._spill is not None or hold.num_swapped:
            return False
        start, node = hold.inserted_len, hold.receipt.node
        tokens = req.tokens[start : upto - upto % page]
        if upto - start < page:
            return False
        if (child := self._tree.child_on(node, tokens)) is not None:
            # Another request has computed the same.
            tokens = tokens[: len(child.key)]
            if child.tickets[Tier.HOST] is not None:
                return True
            if child.frames[Tier.HOST] is not None:
                n = len(tokens) // page
                frames = hold.frames[:n].copy()
                self._extend_hold(child, n)
                self._device.free_after(frames, FrameState.HELD, req.last_launch)
                return True
        n = len(tokens) // page
        frames = hold.frames[:n].copy()
        found = self._controller.begin_spill(node, tokens, frames, req.last_launch, req.priority)
        if found is None:
            return False
        self._spill, new = found
        n = len(new.key) // page
        self._spilling = frames[:n]
        self._extend_hold(new, n)
        self.counters["spilled_tokens"] += n * page
        return True

    def committed(self, ticket: Ticket) -> None:
        if ticket != self._spill:
            return
        assert self.req is not None
        self._swapped, self._swapping = np.concatenate((self._swapped, self._swapping)), self._swapping[:0]
        self._device.free_after(self._spilling, FrameState.HELD, self.req.last_launch)
        self._spill, self._spilling = None, self._spilling[:0]

    def reader_of(self, ticket: Ticket) -> Req | None:
        return self.req if self._depends_on(ticket) else None

    def _depends_on(self, ticket: Ticket) -> bool:
        """Whether the request lacks a part of its KV if this operation failed."""
        if self.req is None or ticket.link != D2H:
            return self.req is not None and ticket == self._spill
        assert self.req.hold is not None
        filled = {node.id for node in self._tree.nodes_of(ticket)}
        return any(node.id in filled for node in self._tree.path_of(self.req.hold.receipt.node))

    def _promote(self) -> None:
        """Load what the request streams where no other has use for the room."""
        queues, req = self._queues, self.req
        if req is None or not self.gap_len or queues.waiting:
            return
        futures = [self.future_len(r) for r in queues.active() if r is not req]
        reserve = decode_reserve(futures, self.config.new_token_ratio, self._page)
        prefills = req is queues.prefilling
        reserve += self.headroom if prefills else self._tail_pages(req)
        spare = min(self._cache.available_pages - reserve, self.chunk_pages)
        # A decode grows by little, and what it may need is reserved. An eighth is as much as it gives up at once.
        at_least = self.chunk_pages if prefills else 1 + self.chunk_pages // 8
        if spare < min(at_least, self.gap_len // self._page):
            return
        nodes = self._to_promote(spare)
        num_pages = sum(len(node.key) for node in nodes) // self._page
        if nodes and self._cache.make_room(num_pages):
            self._planner.begin_load(nodes)
            self.counters["promoted_tokens"] += num_pages * self._page

    def _tail_pages(self, req: Req) -> int:
        """Pages for what a request that streams may still generate, as far as it is kept free for that."""
        return min(pages_for(req.max_len - req.length, self._page) + 1, self.chunk_pages)

    def _to_promote(self, num_pages: int) -> list[Node]:
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

    def _cut_back(self, match: MatchResult, num_pages: int) -> None:
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
            self._controller.drop(node, Tier.DEVICE)
            num_pages -= n

    def _streamable(self, match: MatchResult) -> MatchResult:
        """The part of a match that the device has, or the host."""
        pos = 0
        for i, node in enumerate(match.path):
            on_device = node.frames[Tier.DEVICE] is not None and node.tickets[Tier.DEVICE] is None
            on_host = node.frames[Tier.HOST] is not None and node.tickets[Tier.HOST] is None
            if not (on_device or on_host):
                last_len = len(match.path[i - 1].key) if i else 0
                runs = tuple((start, min(end, pos)) for start, end in match.peer_runs if start < pos)
                return MatchResult(match.namespace, match.path[:i], last_len, match.device_len, pos, runs)
            pos += len(node.key)
        return match

    def check_invariants(self) -> None:
        assert self.req is not None or not len(self._spilling)
        assert (self._device.state[self._spilling] == FrameState.HELD).all()
        assert (self._spill is not None) == bool(len(self._spilling))
        if self.req is None:
            return
        assert self.req.hold is not None
        assert self._spill is None or self._spill in self._cache.in_flight
        layout = self._layout()
        assert layout.start <= layout.stop <= self.req.hold.inserted_len + len(self._swapped) * self._page
        assert len(self._swapping) in (0, len(self._spilling))
        assert self.req.hold.num_swapped == len(self._swapped) + len(self._swapping)
        if (swap := self._cache.swap) is not None:
            swap.check_invariants()
            mine = np.concatenate((self._swapped, self._swapping))
            assert (swap.state[mine] == FrameState.HELD).all() and swap.counts[FrameState.HELD] == len(mine)
        for node in layout.streamed:
            self._source_of(node)

    # -- inside -------------------------------------------------------------------------------------------------

    def _layout(self) -> _Layout:
        assert self.req is not None and self.req.hold is not None
        # What is going to the host is locked already.
        end = self.req.hold.inserted_len - (len(self._spilling) - len(self._swapping)) * self._page
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
        tier = self._tree.order.ready_tier(node)
        if tier is None and node.frames[Tier.DEVICE] is not None and node.tickets[Tier.DEVICE] is None:
            # Computed behind the gap, or loaded before what is above it was, and since given up below.
            return Tier.DEVICE
        assert tier is not None, f"{node} is streamed and ready nowhere"
        return tier

    def _host_is_busy(self) -> bool:
        """Whether transfers or launches that are under way will give some of the host back, or let it be evicted."""
        host = self._host
        host.reap(self._clock.done)
        return host.counts[FrameState.FILLING] + host.counts[FrameState.PENDING_FREE] > 0

    def _take_back(self, node: Node) -> None:
        assert self.req is not None and self.req.hold is not None and node.parent is not None
        hold = self.req.hold
        self._cache.extend_lock(hold, node.parent)
        hold.take_back(self._controller.take_back(node), len(node.key))
        # Others that are gone may have launches under way that read them.
        self.req.last_launch = self._clock.last

    def _swap_out(self, upto: int) -> bool:
        assert self.req is not None and self.req.hold is not None
        hold = self.req.hold
        n = min((upto - hold.inserted_len) // self._page - hold.num_swapped, self.chunk_pages)
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
        assert self.req is not None and self.req.hold is not None
        node = self.req.hold.receipt.node
        return node.parent is not None and node.frames[Tier.DEVICE] is None

    def _extend_hold(self, node: Node, num_pages: int) -> None:
        assert self.req is not None and self.req.hold is not None
        hold, old = self.req.hold, self.req.hold.replace_receipt(self._tree.lock_node(node, self._clock.next))
        self._tree.count_use(node, self.req.priority, num_uses=0)
        self._cache.unlock(old)
        hold.pass_on(num_pages, num_pages * self._page)

    def _demote(self, num_pages: int) -> bool:
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
                if self._controller.begin_backup(node) is not None:
                    return True
                if node is not self.req.hold.receipt.node or self.req.hold.num_swapped:
                    if self._back_up_end(node):
                        return True
                    break
                # The host has no room for all of it: the end can only go as the request's own.
                above = self._split_for_host(node) or above
                self._take_back(node)
            else:
                num_pages -= self._demote_node(node, num_pages)
            node = above
        self._start = min(self._start, self._layout().start)
        return num_pages < before

    def _back_up_end(self, node: Node) -> bool:
        """Begin to copy to the host as much of a node's end as that has room for, without what lies above. False if
        it has none."""
        assert self.req is not None and self.req.hold is not None
        kept = self._tree.path_of(self.req.hold.receipt.node)
        room = self._host_room(kept)
        if room < 1:
            return False
        if (surplus := len(node.key) // self._page - room) > 0:
            self._tree.split(node, surplus * self._page)
        return self._controller.back_up([node], Tier.HOST, kept) is not None

    def _host_room(self, kept: list[Node]) -> int:
        """Pages that the host has free, or could give up. kept: nodes that stay."""
        self._host.reap(self._clock.done)
        return self._host.num_free + self._tree.evictable_pages(Tier.HOST, kept)

    def _split_for_host(self, node: Node) -> Node | None:
        """Cut off the front of a node that the host has room for, with what it lacks above. None if there is none."""
        room = self._host_room(self._tree.path_of(node))
        step = node.parent
        while step is not None and step.parent is not None and step.frames[Tier.HOST] is None:
            room -= len(step.key) // self._page
            step = step.parent
        if not 0 < room < len(node.key) // self._page:
            return None
        return self._tree.split(node, room * self._page)

    def _demote_node(self, node: Node, num_pages: int) -> int:
        n = min(num_pages, len(node.key) // self._page)
        self._controller.demote(node, n * self._page)
        self.counters["demoted_tokens"] += n * self._page
        return n
