"""`LayerStreaming`: which requests are longer than the device and stream, and whose memory they give up for others.

Owns the role, which several requests may have at a time. Where the parts of one are is in streamed_request.py.
`NoLayerStreaming` is the interface and its null object. Never decides which request starts: admission does.

The context is bounded by peers, host, swap file and what the device holds beside them. Peers count with the memory
that is borrowed now. A request starts to stream only if everything that streams has room together, at its longest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import numpy as np

from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.load_planner import LoadPlanner
from sglang.srt.managers.request_queues import RequestQueues
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import LoadTimes, decode_reserve, pages_for
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.streamed_request import StreamedRequest
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.node import MatchResult, is_ready
from sglang.srt.mem_cache.transfer import Ticket, Tier
from sglang.srt.model_executor.launch import PageRun, StreamedPrefix
from sglang.srt.utils.time_units import NO_LAUNCH

# Chunks of a prompt for which the device has room beside what it keeps: one that is computed, one that is spilled,
# and one that may be launched ahead.
_CHUNKS = 3
# How often lenders take back what a request reads before it goes on without them.
_MAX_RECALLS = 2


def check_room_for_chunks(chunk_pages: int, num_usable_pages: int) -> None:
    """Parameters: see `LayerStreaming`. Raises ValueError."""
    if num_usable_pages < (wanted := pages_without_context(chunk_pages)):
        raise ValueError(
            f"layer streaming needs room for two chunks of a prompt on the device, {wanted} pages, "
            f"and it has {num_usable_pages}: lower --chunked-prefill-size or --page-size, raise "
            "--max-total-tokens or give a smaller --layer-stream-tokens (0 is all that the host has)"
        )


def pages_without_context(chunk_pages: int) -> int:
    """Device pages of a request that streams which are no part of its context: a chunk that is computed, one that is
    on its way below the device, and two that are not whole."""
    return 2 * chunk_pages + 2


def pages_of_all_tiers(config: SchedulerConfig, num_borrowed: int) -> int:
    """Pages in which requests that stream may lie, with so many borrowed ones."""
    return config.num_usable_pages + num_borrowed + config.num_host_pages + config.num_swap_pages


def longest_streamed_len(config: SchedulerConfig, num_borrowed: int) -> int:
    """The most tokens of a request, prompt and output, with so many borrowed pages: the sum of the tiers less
    `pages_without_context`."""
    overhead = pages_without_context(pages_for(config.chunk_budget, config.page_size))
    num_pages = pages_of_all_tiers(config, num_borrowed) - overhead
    return max(config.max_resident_len, min(config.context_len, num_pages * config.page_size))


class NoLayerStreaming:
    """The interface, of an engine whose requests all fit on the device: the null object."""

    is_enabled = False
    # The flags that bound a request's length.
    limit_flags = "--context-length and --max-total-tokens"
    # Pages that must be free, or could be, for a request that begins to stream.
    headroom = 0
    # The last launch when pages were given up for a waiting request.
    gave_way_at = NO_LAUNCH
    # Whether the last request that was asked about gets pages that are on their way.
    is_giving_way = False

    def __init__(self, config: SchedulerConfig) -> None:
        self.max_resident_len = config.max_resident_len
        self.counters: Counter[str] = Counter()

    # -- whom it concerns ---------------------------------------------------------------------------------------

    @property
    def reqs(self) -> list[Req]:
        """The requests that stream, in the order in which they began to."""
        return []

    @property
    def max_total_len(self) -> int:
        """The most tokens of a request, prompt and output, with the memory that is there now."""
        return self.max_resident_len

    @property
    def longest_len(self) -> int:
        """The same when all that may be borrowed is."""
        return self.max_resident_len

    def max_len_with(self, num_borrowed: int) -> int:
        """The same with so many borrowed pages."""
        return self.max_resident_len

    def must_stream(self, req: Req) -> bool:
        """Whether the device has no room for what is known of a request."""
        return False

    def may_stream(self, req: Req) -> bool:
        """Whether the device may have no room for it before its end."""
        return False

    def may_begin(self, req: Req, without: Collection[Req] = ()) -> bool:
        """Whether a request that must stream has room beside those that do. without: such as end for it."""
        return True

    def is_streaming(self, req: Req) -> bool:
        return False

    def future_len(self, req: Req) -> int:
        """Tokens that a request may still need room for on the device."""
        return min(req.max_len, self.max_resident_len) - req.length

    def room_lacking(self) -> tuple[bool, int]:
        """Whether requests wait or run that are longer than the device, and how many pages more than there are the
        longest needs."""
        return False, 0

    def lacks_only_room(self, req: Req) -> bool:
        """Whether a request must stream, and would have room if no other did."""
        return False

    def admissible(self, ready: list[Req], turn_of: Callable[[Req], tuple[int, int]]) -> list[Req]:
        """Those of the waiting requests that may start beside the requests that stream. turn_of: the least is the
        first that room is kept for."""
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
        """A chunk of a request that streams has got its pages. Returns when what its launch streams arrives."""
        raise AssertionError("no request streams")

    def streams(self, reqs: list[Req], page_runs: list[PageRun]) -> tuple[StreamedPrefix, ...]:
        """What the next launch streams, which has these requests. page_runs: takes the pages that the device has
        again."""
        return ()

    # -- room ---------------------------------------------------------------------------------------------------

    def shrink(self, num_pages: int, wanted_by: Req | None = None) -> bool:
        """Take device pages from requests that stream, first from the one that wants them; they become free at once,
        or soon. False if there are none to give."""
        return False

    def shrink_stream_for(self, num_pages: int, others: list[Req]) -> None:
        """Take device pages from requests that stream for one that waits, which lacks so many, and for those others
        that a launch could take along."""

    # -- operations ---------------------------------------------------------------------------------------------

    def committed(self, ticket: Ticket) -> None:
        """An operation has ended well."""

    def readers_of(self, ticket: Ticket) -> list[Req]:
        """The requests that stream and lack a part of their KV if this operation fails, or does not end."""
        return []

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def gap_len(self) -> int:
        """Tokens that launches of the requests that stream read through the layer stream cache."""
        return 0

    @property
    def held(self) -> np.ndarray:
        """HELD device frames that requests have beside those of their holds."""
        return np.empty(0, np.int32)

    def state(self) -> dict[str, int] | None:
        """What `GET /hicache/state` shows; None if no request can stream."""
        return None

    def check_invariants(self) -> None:
        pass


class LayerStreaming(NoLayerStreaming):
    is_enabled = True
    limit_flags = "--context-length, --max-total-tokens, --hicache-size, --peer-size and --layer-stream-disk-size"

    def __init__(self, config: SchedulerConfig, cache: KVCache, queues: RequestQueues, planner: LoadPlanner) -> None:
        super().__init__(config)
        chunk_pages = pages_for(config.chunk_budget, config.page_size)
        check_room_for_chunks(chunk_pages, config.num_usable_pages)
        assert cache.host is not None and config.layer_stream is not None
        self.config = config
        # The most pages that a launch computes.
        self.chunk_pages = chunk_pages
        self.headroom = min(_CHUNKS * chunk_pages + 2, config.num_usable_pages)
        # By request id.
        self._streams: dict[str, StreamedRequest] = {}
        self._cache = cache
        self._queues = queues
        self._planner = planner
        self._controller = cache.controller
        self._clock = cache.clock
        self._tree = cache.tree
        self._device = cache.device
        self._page = config.page_size

    # -- whom it concerns ---------------------------------------------------------------------------------------

    @property
    def reqs(self) -> list[Req]:
        return [stream.req for stream in self._streams.values()]

    @property
    def max_total_len(self) -> int:
        return self.max_len_with(self._cache.num_borrowed_pages)

    @property
    def longest_len(self) -> int:
        return self.max_len_with(self.config.most_borrowed_pages)

    def max_len_with(self, num_borrowed: int) -> int:
        return longest_streamed_len(self.config, num_borrowed)

    def must_stream(self, req: Req) -> bool:
        return req.num_known > self.max_resident_len

    def may_stream(self, req: Req) -> bool:
        return req.max_len > self.max_resident_len

    def may_begin(self, req: Req, without: Collection[Req] = ()) -> bool:
        streaming = [each for each in self.reqs if each not in without]
        if not streaming:
            return req.num_known < self.max_total_len
        reqs = [*streaming, req]
        num_pages = sum(pages_for(r.max_len, self._page) + pages_without_context(self.chunk_pages) for r in reqs)
        most = pages_of_all_tiers(self.config, self._cache.num_borrowed_pages)
        return num_pages <= most and len(reqs) * self.headroom <= self.config.num_usable_pages

    def is_streaming(self, req: Req) -> bool:
        return req.rid in self._streams

    def future_len(self, req: Req) -> int:
        return 0 if self.is_streaming(req) or self.must_stream(req) else super().future_len(req)

    def lacks_only_room(self, req: Req) -> bool:
        return self.must_stream(req) and req.num_known < self.max_total_len and not self.may_begin(req)

    def admissible(self, ready: list[Req], turn_of: Callable[[Req], tuple[int, int]]) -> list[Req]:
        # What has no room now lets shorter ones pass. No other begins to stream before it: while some always do, it
        # would never have room.
        first = min((turn_of(r) for r in ready if self.lacks_only_room(r)), default=None)
        return [
            r
            for r in ready
            if not self.must_stream(r) or (self.may_begin(r) and (first is None or turn_of(r) < first))
        ]

    def room_lacking(self) -> tuple[bool, int]:
        reqs = [*self.reqs, *(r for r in self._queues.waiting if self.must_stream(r))]
        reqs = [req for req in reqs if not self.spares_peers(req)]
        if not reqs:
            return False, 0
        wanted = pages_for(max([r.max_len for r in reqs]), self._page) + pages_without_context(self.chunk_pages)
        return True, max(0, wanted - pages_of_all_tiers(self.config, self._cache.num_borrowed_pages))

    def spares_peers(self, req: Req) -> bool:
        """Whether a request that streams goes on without peers. Those that have taken back what it had there again
        and again would do so once more."""
        return req.num_recalls >= _MAX_RECALLS and req.max_len <= self.max_len_with(0)

    def refusal(self, num_prompt: int) -> str:
        assert self.config.layer_stream is not None
        most, expected = self.config.layer_stream.max_tpot_s, self._planner.expected
        if most is None or num_prompt <= self.max_resident_len:
            return ""
        streamed = num_prompt - (self.max_resident_len - self.chunk_pages * self._page)
        assert self._cache.host is not None
        from_disk = max(0, streamed - (self._cache.host.num_pages + self._cache.num_borrowed_pages) * self._page)
        seconds = max(expected.stream_seconds(streamed, from_disk), expected.decode_seconds())
        if seconds <= most:
            return ""
        return (
            f"the device has no room for {streamed} of the prompt's {num_prompt} tokens: each new token would take "
            f"{seconds:.3g} s, and this server allows {most:g} s (see --layer-stream-max-tpot)"
        )

    # -- the role -----------------------------------------------------------------------------------------------

    def begin(self, req: Req) -> None:
        assert req.rid not in self._streams
        self._streams[req.rid] = StreamedRequest(
            req, self._cache, self._planner, self.chunk_pages, self.counters, self.spares_peers(req)
        )
        req.most_room = max(req.most_room, self.max_total_len)
        self.counters["streamed_reqs"] += 1

    def begin_if_outgrown(self, req: Req) -> bool:
        if self._streams or req.max_len <= self.max_resident_len:
            return False
        self.begin(req)
        self._queues.note_streaming(req)
        return True

    def make_streamable(self, req: Req, match: MatchResult) -> MatchResult:
        too_many = self._tree.evictable_pages_in(match) + self.headroom - self._cache.available_pages
        if too_many > 0:
            self._cut_back(match, too_many)
            match = self._cache.match(req)
        return self._streamable(match)

    def end_hold(self, req: Req, keep: bool) -> None:
        if (stream := self._streams.pop(req.rid, None)) is not None:
            stream.end(keep)

    @property
    def held(self) -> np.ndarray:
        return np.concatenate([stream.held for stream in self._streams.values()] or [super().held])

    @property
    def gap_len(self) -> int:
        return sum(stream.gap_len for stream in self._streams.values())

    def state(self) -> dict[str, int] | None:
        """Tokens of the requests that stream, and where they are."""
        computed = sum(req.computed for req in self.reqs)
        return {
            "requests": len(self._streams),
            "resident_tokens": computed - self.gap_len,
            "streamed_tokens": self.gap_len,
            "max_total_tokens": self.max_total_len,
        }

    # -- launches -----------------------------------------------------------------------------------------------

    def begin_chunk(self, req: Req) -> LoadTimes:
        stream = self._streams[req.rid]
        if self._cache.available_pages < 2 * self.chunk_pages:
            # Room for the chunk after the next.
            stream.begin_spill(req.computed)
        return self._planner.expected.arrival_of_stream(stream.gap_len, stream.swapped_len)

    def streams(self, reqs: list[Req], page_runs: list[PageRun]) -> tuple[StreamedPrefix, ...]:
        found = []
        for place, req in enumerate(reqs) if self._streams else ():
            stream = self._streams.get(req.rid)
            if stream is None:
                continue
            self._promote(stream)
            prefix, runs = stream.prefix(place)
            page_runs += runs
            if prefix is not None:
                found.append(prefix)
        return tuple(found)

    # -- room ---------------------------------------------------------------------------------------------------

    def shrink(self, num_pages: int, wanted_by: Req | None = None) -> bool:
        streams = sorted(self._streams.values(), key=lambda stream: (stream.req is not wanted_by, -stream.req.order))
        for stream in streams:
            wanted = max(num_pages, self.headroom) if self._queues.is_prefilling(stream.req) else num_pages
            if stream.shrink(wanted):
                return True
        return False

    def shrink_stream_for(self, num_pages: int, others: list[Req]) -> None:
        if not self._streams or num_pages <= 0:
            return
        along, ratio = 0, self.config.new_token_ratio
        for req in others:
            along += pages_for(req.num_known + int(ratio * self.future_len(req)), self._page)
            if along >= self.chunk_pages:
                break
        # What others have given up comes by itself.
        num_pages += min(along, self.chunk_pages) - self._device.counts[FrameState.PENDING_FREE]
        given = 0
        for stream in sorted(self._streams.values(), key=lambda stream: -stream.req.order):
            given += stream.give_up(num_pages - given)
        if given:
            self.gave_way_at = self._clock.last
            self.is_giving_way = True
        elif num_pages > 0:
            # No tier below has it yet.
            self.is_giving_way = any([stream.shrink(num_pages) for stream in self._streams.values()])

    def _promote(self, stream: StreamedRequest) -> None:
        """Load what a request streams where no other has use for the room."""
        queues, req = self._queues, stream.req
        if queues.waiting or not (gap_len := stream.gap_len):
            return
        futures = [self.future_len(r) for r in queues.active() if r is not req]
        reserve = decode_reserve(futures, self.config.new_token_ratio, self._page)
        reserve += sum(self._reserve_of(r) for r in self.reqs)
        if (prompt := queues.prefilling) is not None:
            # Of another request: its next chunks.
            reserve += pages_for(prompt.num_known, self._page) - pages_for(prompt.computed, self._page)
        spare = min(self._cache.available_pages - reserve, self.chunk_pages)
        # A decode grows by little, and what it may need is reserved. An eighth is as much as it gives up at once.
        at_least = self.chunk_pages if queues.is_prefilling(req) else 1 + self.chunk_pages // 8
        if spare >= min(at_least, gap_len // self._page):
            stream.promote(spare)

    def _reserve_of(self, req: Req) -> int:
        """Pages that are kept free for the next chunks of a request that streams, or for what it may generate."""
        if self._queues.is_prefilling(req):
            return self.headroom
        return min(pages_for(req.max_len - req.length, self._page) + 1, self.chunk_pages)

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
        """The part of a match that the device has, peers or the host."""
        for i, node in enumerate(match.path):
            if not is_ready(node, Tier.DEVICE) and self._tree.order.ready_tier(node) is None:
                return match.above(i)
        return match

    # -- operations ---------------------------------------------------------------------------------------------

    def committed(self, ticket: Ticket) -> None:
        for stream in self._streams.values():
            stream.committed(ticket)

    def readers_of(self, ticket: Ticket) -> list[Req]:
        return [stream.req for stream in self._streams.values() if stream.depends_on(ticket)]

    def check_invariants(self) -> None:
        for stream in self._streams.values():
            assert stream.req.hold is not None
            stream.check_invariants()
        if (swap := self._cache.swap) is not None:
            swap.check_invariants()
            held = np.concatenate([s.swap_frames for s in self._streams.values()] or [super().held])
            assert (swap.state[held] == FrameState.HELD).all()
            assert swap.counts[FrameState.HELD] == len(held) == len(np.unique(held))
