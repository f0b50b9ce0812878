"""`WindowedRoom`: room in the device's pool for layers with a window, see `WindowedPool`.

Knows what the launch that is being made reads, and how much of the pool requests keep. Without such a pool there is
always room.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.schedule_batch import Req, ReqHold
from sglang.srt.managers.schedule_policy import pages_for
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.node import MatchResult, Node, Receipt, is_lacking, path_of, survivor_of
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchSeq

# The pool gives up one in so many of its pages at least, and those of a launch: the whole tree is looked through.
_SHED_AT_ONCE = 16
_FAR = 1 << 62


@dataclass
class _Held:
    """What is known of a hold. start: the tokens that the cache had, which others may read too, and the node that
    they end with."""

    hold: ReqHold
    start: int
    start_node: Node
    # Its own pages keep all layers, to be compared.
    is_check: bool
    # The last launch that computes tokens of its prompt, and which.
    seq: LaunchSeq = NO_LAUNCH
    first: int = 0
    end: int = 0


class WindowedRoom:
    def __init__(self, config: SchedulerConfig, controller: HiCacheController) -> None:
        self.pool = controller.ledger.pools.windowed
        self._config = config
        self._page = config.page_size
        self._controller = controller
        self._tree = controller.tree
        self._clock = controller.clock
        # By the ids of holds.
        self._held: dict[int, _Held] = {}

    # -- frames -------------------------------------------------------------------------------------------------

    def make_room(self, num_pages: int) -> bool:
        """Have pages that no request sees give up their frames until num_pages are free; False if they are not, or
        not yet."""
        if self.pool is None:
            return True
        table = self.pool.table
        if num_pages <= table.num_free:
            return True
        self._reap_all()
        lacking = num_pages - table.num_free - self._num_coming()
        if lacking > 0:
            at_once = max(table.num_pages // _SHED_AT_ONCE, pages_for(self._config.chunk_budget, self._page))
            self._controller.shed(max(lacking, at_once), self._reads_from())
            if num_pages > table.num_free + self._num_coming():
                for held in self._held.values():
                    # Others enter the tree soon, and give it up there.
                    self._shed_own(held, self._config.insert_every_tokens + self._page)
            self._reap_all()
        return table.num_free >= num_pages

    def _reap_all(self) -> None:
        """Pages that become free on the device give back their frames."""
        self._controller.tables[Tier.DEVICE].reap(self._clock.done)
        self.reap()

    def _num_coming(self) -> int:
        """Frames that come free when launches end, here and with their pages on the device."""
        assert self.pool is not None
        device = self._controller.tables[Tier.DEVICE]
        given_up = (device.state == int(FrameState.PENDING_FREE)) & (device.pins == 0)
        return self.num_free_soon + int(np.count_nonzero(self.pool.frame_of[given_up] >= 0))

    @property
    def num_free_soon(self) -> int:
        """Frames that were given up, and that launches or transfers still read, but for those that a slow copy
        reads."""
        if self.pool is None:
            return 0
        slow = min(self.pool.table.num_pinned_only, self._controller.links.num_slow_pages)
        return self.pool.table.counts[FrameState.PENDING_FREE] - slow

    def give(self, pages: np.ndarray) -> None:
        """New pages of the device are about to be computed; there is room."""
        if self.pool is not None:
            self.pool.give(pages)

    def reap(self) -> None:
        """Free what may be reused."""
        if self.pool is not None:
            self.pool.table.reap(self._clock.done)

    def take_given(self) -> np.ndarray | None:
        """See `Launch.windowed_frames`."""
        return self.pool.take_given() if self.pool is not None else None

    # -- what requests need -------------------------------------------------------------------------------------

    def num_to_complete(self, receipt: Receipt) -> int:
        """Pages of a locked path that its end sees and that lack frames: partial, or not on the device."""
        if self.pool is None:
            return 0
        first = max(0, self._tree.windows.cut(receipt.node.end))
        path = [node for node in path_of(receipt.node) if node.end > first and is_lacking(node)]
        return sum(node.end - max(first, node.start) for node in path) // self._page

    def make_to_complete(self, receipt: Receipt, num_more: int = 0) -> bool:
        """Make room for what a locked path lacks, and num_more pages. False also if what is partial is whole nowhere
        any more: making room moves copies, too."""
        if not self.make_room(self.num_to_complete(receipt) + num_more):
            return False
        first, path = self._tree.windows.first_seen(receipt.node.end), path_of(receipt.node)
        partial = [node for node in path if node.is_partial and node.end > first]
        return all(self._tree.has_whole_below(node) for node in partial)

    def lacking(self, req: Req, match: MatchResult, active: list[Req], num_preloads: int) -> int:
        """By how many pages the pool is too small for a waiting request to start beside others. A launch computes new
        pages before older ones are given up for the next. Besides, a request keeps what windows reach; or all that it
        computes, and what windows reach of the prefix that it found, which others may share."""
        if self.pool is None or not (active or num_preloads):
            return 0
        page, most = self._page, self.most_pages
        whole, own = most * num_preloads, most * num_preloads
        # By the node that each ends with, and where.
        prefixes: dict[tuple[int, int], int] = {}
        end = match.path[-1] if match.path else None
        starts = [(req.max_len, match.total_len, end)]
        for each in active:
            assert each.hold is not None
            held = self._held[each.hold.id]
            starts.append((each.max_len, held.start, survivor_of(held.start_node)))
        for max_len, start, node in starts:
            whole += min(most, pages_for(max_len, page))
            own += min(most, pages_for(max_len - start, page) + 1)
            prefixes[node.id if node is not None else -1, start] = min(most, pages_for(start, page))
        num_pages = min(whole, own + sum(prefixes.values()))
        return num_pages + 2 * pages_for(self._config.chunk_budget, page) - self.pool.table.num_pages

    @property
    def most_pages(self) -> int:
        """That a request keeps, besides those of two launches: from where windows reach from its last insertion, as
        nodes can be cut, to the next one."""
        tokens = self._tree.windows.num_tokens + self._config.insert_every_tokens + self._tree.order.cut_tokens
        return pages_for(tokens, self._page) + 2

    # -- what launches read -------------------------------------------------------------------------------------

    def begin(self, hold: ReqHold, is_check: bool) -> None:
        """A request starts, with what the cache had for it."""
        if self.pool is not None:
            self._held[hold.id] = _Held(hold, hold.inserted_len, hold.receipt.node, is_check)

    def end(self, hold: ReqHold) -> None:
        self._held.pop(hold.id, None)

    def note_computed(self, hold: ReqHold, start: int, end: int) -> None:
        """The launch that is being made computes tokens [start, end) of a request."""
        if self.pool is None:
            return
        held = self._held[hold.id]
        held.first = start if held.seq != self._clock.next else min(held.first, start)
        held.seq, held.end = self._clock.next, end

    def shed_own(self, req: Req, upto: int, spares: int = 0) -> None:
        """Of pages that do not enter the tree, those that a request sees no more give up their frames. They stay its
        own then. upto: what is computed, or being computed, ends there. spares: tokens that may be kept, as they may
        enter the tree later."""
        if self.pool is None:
            return
        assert req.hold is not None
        held = self._held[req.hold.id]
        held.end = max(held.end, upto)
        self._shed_own(held, spares)

    def _shed_own(self, held: _Held, spares: int) -> None:
        assert self.pool is not None
        hold = held.hold
        num_unseen = self._tree.windows.first_seen(self._position(held)) - hold.inserted_len
        if held.is_check or num_unseen <= spares:
            return
        if self.pool.take_away(hold.frames[: num_unseen // self._page], self._clock.last):
            hold.note_partial()

    def _position(self, held: _Held) -> int:
        """The first token that the next launch computes of a request, or an earlier one."""
        return held.first if held.seq == self._clock.next else max(held.end, held.hold.receipt.node.end)

    def _reads_from(self) -> dict[int, tuple[int, int]]:
        """See `WindowedPool.victims`."""
        found: dict[int, tuple[int, int]] = {}
        for held in self._held.values():
            end, first = held.hold.receipt.node.id, self._tree.windows.first_seen(self._position(held))
            count, least = found.get(end, (0, _FAR))
            found[end] = count + 1, min(first, least)
        return found
