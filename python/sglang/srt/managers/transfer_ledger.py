"""`TransferLedger`: every operation between tiers, from its number to its end.

Owns the numbering of operations, the pins that each holds and the list of those in flight. Decides nothing and
executes nothing: the controllers begin operations, links carry them out. Between the beginning and the end of an
operation the frames on both sides are pinned, so that neither eviction nor the end of a request can give the memory
away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang.srt.mem_cache.block_keys import NO_KEYS
from sglang.srt.mem_cache.border_slabs import BorderSlabs
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Dropped, is_ready
from sglang.srt.mem_cache.transfer import (
    CHECK,
    LINKS,
    CheckOp,
    StorageAction,
    StorageOp,
    Ticket,
    Tier,
    TransferOp,
)
from sglang.srt.mem_cache.windowed_pool import WindowedPool
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchClock, LaunchSeq

NO_FRAMES = np.empty(0, np.int32)


@dataclass(frozen=True)
class Pools:
    """The frame tables of the pools; None for a pool that is not there."""

    device: FrameTable
    host: FrameTable | None = None
    # Memory borrowed from peers.
    peer: FrameTable | None = None
    # The swap file of a request that streams. It is no tier: the tree has nothing of it.
    swap: FrameTable | None = None
    # Of the device and of the host, for layers with a window; None where one pool has all layers.
    windowed: WindowedPool | None = None
    windowed_host: WindowedPool | None = None
    # What of the host's two may be either's.
    border: BorderSlabs | None = None


class TransferLedger:
    """page_bytes: of one page, all layers. windowed_share: of the layers, those with a window."""

    def __init__(
        self, tree: HiRadixTree, pools: Pools, clock: LaunchClock, page_bytes: int, windowed_share: float = 0.0
    ) -> None:
        self.tree = tree
        self.pools = pools
        self.clock = clock
        self.page_bytes = page_bytes
        self._windowed_share = windowed_share
        tables = {Tier.DEVICE: pools.device, Tier.PEER: pools.peer, Tier.HOST: pools.host}
        self.tables: dict[Tier, FrameTable] = {tier: table for tier, table in tables.items() if table is not None}
        windowed = {Tier.DEVICE: pools.windowed, Tier.HOST: pools.windowed_host}
        # Of the tiers that have one.
        self.windowed: dict[Tier, WindowedPool] = {tier: pool for tier, pool in windowed.items() if pool is not None}
        self.in_flight: dict[Ticket, TransferOp | StorageOp] = {}
        # The same of each link; the first of an OrderedDict is found at once, whatever has gone before it.
        self._by_link: dict[str, OrderedDict[Ticket, TransferOp | StorageOp]] = {
            link: OrderedDict() for link in LINKS
        }
        self._next_seq = dict.fromkeys(LINKS, 0)
        self._new_ops: list[TransferOp | StorageOp] = []
        self._new_cancels: list[Ticket] = []
        # Whether device pages may become another engine's.
        self.lends_device = False
        # Of those in flight, the ones whose source is not pinned any more.
        self._released: set[Ticket] = set()
        # And those that are cancelled.
        self._cancelled: set[Ticket] = set()
        self._num_done = dict.fromkeys(LINKS, 0)
        self._pages_in_flight = dict.fromkeys(LINKS, 0)

    def oldest(self, link: str) -> TransferOp | StorageOp | None:
        """The first operation of a link that is not over."""
        return next(iter(self._by_link[link].values()), None)

    def is_busy(self, links: Iterable[str]) -> bool:
        """Whether an operation of one of them is not over."""
        return any(self._by_link[link] for link in links)

    def num_pages_on(self, link: str) -> int:
        """Pages that operations of a link are moving, or will."""
        return self._pages_in_flight[link]

    def num_done(self, link: str) -> int:
        """Operations of a link that are over."""
        return self._num_done[link]

    def begin_transfer(
        self,
        link: str,
        tiers: tuple[Tier, Tier],
        src_frames: np.ndarray,
        dst_frames: np.ndarray,
        after: LaunchSeq | None,
        num_full_only_pages: int = 0,
        num_windowed_only_pages: int = 0,
    ) -> TransferOp:
        """tiers: source and destination; `Tier.DISK` is the swap file. The rest: see `TransferOp`."""
        src, dst = tiers
        self._table(src).pin(src_frames)
        self._table(dst).pin(dst_frames)
        src_windowed = self._windowed_of(src, src_frames[num_full_only_pages:])
        dst_windowed = self._give_windowed(dst, dst_frames[num_full_only_pages:])
        left_out = num_full_only_pages * self._windowed_share + num_windowed_only_pages * (1 - self._windowed_share)
        size_bytes = round((len(src_frames) - left_out) * self.page_bytes)
        op = TransferOp(
            self._take_ticket(link),
            src,
            dst,
            src_frames,
            dst_frames,
            size_bytes,
            after,
            num_full_only_pages,
            num_windowed_only_pages,
            src_windowed,
            dst_windowed,
        )
        self._pages_in_flight[link] += len(src_frames)
        self._begin(op)
        return op

    def begin_check(self, cached: np.ndarray, computed: np.ndarray, tokens: np.ndarray, came_from: Tier) -> None:
        """See `CheckOp`. Pins both, so that neither is written until the operation is over."""
        windowed = [self._windowed_of(Tier.DEVICE, frames) for frames in (cached, computed)]
        for frames in (cached, computed):
            self.tables[Tier.DEVICE].pin(frames)
        op = CheckOp(
            self._take_ticket(CHECK),
            Tier.DEVICE,
            Tier.DEVICE,
            cached,
            computed,
            len(cached) * self.page_bytes,
            src_windowed=windowed[0],
            dst_windowed=windowed[1],
            tokens=tokens,
            came_from=came_from,
        )
        self._pages_in_flight[CHECK] += len(cached)
        self._begin(op)

    def begin_storage_op(
        self,
        link: str,
        action: StorageAction,
        keys: np.ndarray = NO_KEYS,
        frames: np.ndarray = NO_FRAMES,
        without_windows: np.ndarray | None = None,
        **more: Any,
    ) -> Ticket:
        """keys, frames, more: see `StorageOp`. What is read got its frames for layers with a window before.
        without_windows: (len(frames),) bool, pages that are written without these layers."""
        windowed, num_left_out = None, 0
        if len(frames):
            self.tables[Tier.HOST].pin(frames)
            if (pool := self.windowed.get(Tier.HOST)) is not None:
                windowed = pool.frame_of[frames]
                if without_windows is not None:
                    windowed[without_windows] = -1
                pool.table.pin(windowed[windowed >= 0])
                num_left_out = int(np.count_nonzero(windowed < 0))
        size_bytes = round((len(frames) - num_left_out * self._windowed_share) * self.page_bytes)
        ticket = self._take_ticket(link)
        self._begin(StorageOp(ticket, action, keys, frames, size_bytes, windowed=windowed, **more))
        return ticket

    def end(self, ticket: Ticket) -> TransferOp | StorageOp:
        """The operation is over on every rank: its frames are unpinned."""
        op = self.in_flight.pop(ticket)
        del self._by_link[ticket.link][ticket]
        self._num_done[ticket.link] += 1
        is_released = ticket in self._released
        self._released.discard(ticket)
        self._cancelled.discard(ticket)
        if isinstance(op, TransferOp):
            self._pages_in_flight[ticket.link] -= len(op.src_frames)
            if not is_released:
                self._table(op.src).unpin(op.src_frames)
            self._table(op.dst).unpin(op.dst_frames)
        elif len(op.frames):
            self.tables[Tier.HOST].unpin(op.frames)
        for tier, frames in self._pinned_windowed(op, is_released):
            self.windowed[tier].table.unpin(frames)
        return op

    def can_release(self, ticket: Ticket) -> bool:
        """See `release_source`. Not twice, and not of a device that is lent: the memory may go while it is read."""
        op = self.in_flight[ticket]
        return (
            isinstance(op, TransferOp)
            and op.src == Tier.DEVICE
            and ticket not in self._released
            and not self.lends_device
        )

    def release_source(self, ticket: Ticket) -> None:
        """Unpin the device pages that an operation reads, though it is not over: what it brings must not be used."""
        op = self.in_flight[ticket]
        assert isinstance(op, TransferOp) and not self.tree.nodes_of(ticket), "what it brings is still wanted"
        if op.src_windowed is not None:
            self.windowed[op.src].table.unpin(op.src_windowed)
        self._released.add(ticket)
        self._table(op.src).unpin(op.src_frames)

    def cancel(self, ticket: Ticket) -> None:
        """A hint to the link that the operation is not wanted any more."""
        self._new_cancels.append(ticket)
        if ticket in self.in_flight:
            self._cancelled.add(ticket)

    def is_cancelled(self, ticket: Ticket) -> bool:
        """Of an operation in flight."""
        return ticket in self._cancelled

    def free(self, dropped: Dropped, tier: Tier, last_launch: LaunchSeq = NO_LAUNCH) -> None:
        """Give up frames that left the tree, and cancel the operations that fill nothing any more. last_launch: the
        last launch that may wait for device frames that were being filled."""
        table = self.tables[tier]
        by_fence: dict[int, list[np.ndarray]] = {}
        for frames, fence in dropped.cached:
            by_fence.setdefault(fence, []).append(frames)
        for fence, parts in by_fence.items():
            table.free_after(np.concatenate(parts), FrameState.CACHED, fence)
        for frames, _ in dropped.filling:
            # Frames of other tiers are read by loads alone, which pin them.
            table.free_after(frames, FrameState.FILLING, last_launch if tier == Tier.DEVICE else NO_LAUNCH)
        tickets = dict.fromkeys(ticket for _, ticket in dropped.filling)
        for ticket in tickets:
            if not self.tree.nodes_of(ticket):
                self.cancel(ticket)

    def take_ops(self) -> tuple[tuple[TransferOp | StorageOp, ...], tuple[Ticket, ...]]:
        """Operations begun and tickets cancelled since the last call."""
        ops, cancels = tuple(self._new_ops), tuple(t for t in self._new_cancels if t in self.in_flight)
        self._new_ops, self._new_cancels = [], []
        return ops, cancels

    def check_invariants(self) -> None:
        assert sum(len(ops) for ops in self._by_link.values()) == len(self.in_flight)
        for tier, table in self.tables.items():
            table.check_invariants()
            self._check_pins(tier, table)
            self._check_residency(tier, table)
        pins = {tier: np.zeros_like(pool.table.pins) for tier, pool in self.windowed.items()}
        for op in self.in_flight.values():
            for tier, frames in self._pinned_windowed(op, op.ticket in self._released):
                np.add.at(pins[tier], frames, 1)
        for tier, pool in self.windowed.items():
            state = self.tables[tier].state
            pool.check_invariants((state == FrameState.FREE) | (state == FrameState.LENT))
            assert (pins[tier] == pool.table.pins).all(), f"{tier.name}: pins of layers with a window differ"

    def _check_pins(self, tier: Tier, table: FrameTable) -> None:
        pins = np.zeros_like(table.pins)
        for op in self.in_flight.values():
            if isinstance(op, StorageOp):
                if tier == Tier.HOST:
                    np.add.at(pins, op.frames, 1)
                continue
            if op.src == tier and op.ticket not in self._released:
                np.add.at(pins, op.src_frames, 1)
            if op.dst == tier:
                np.add.at(pins, op.dst_frames, 1)
        assert (pins == table.pins).all(), f"{tier.name}: pins differ from the operations in flight"

    def _check_residency(self, tier: Tier, table: FrameTable) -> None:
        expected = np.full(table.num_pages, -1, np.int64)
        for node in self.tree.walk():
            frames, ticket = node.frames[tier], node.tickets[tier]
            if frames is not None:
                assert (expected[frames] == -1).all(), f"{tier.name}: a frame belongs to two nodes"
                expected[frames] = FrameState.FILLING if ticket is not None else FrameState.CACHED
            if ticket is None:
                continue
            assert frames is not None and ticket in self.in_flight, f"{node} waits for {ticket}, which is over"
            op = self.in_flight[ticket]
            filled = op.frames if isinstance(op, StorageOp) else op.dst_frames
            is_filled = np.zeros(table.num_pages, bool)
            is_filled[filled] = True
            assert is_filled[frames].all(), f"{node}: {ticket} fills other pages"
            # A load's source stays, else its failure could not be told from eviction; but slabs of peers are
            # withdrawn whatever is loaded from them.
            if isinstance(op, TransferOp) and op.src == Tier.HOST:
                assert is_ready(node, Tier.HOST), f"{node}: its load has no source"
        in_tree = expected >= 0
        assert (table.state[in_tree] == expected[in_tree]).all(), f"{tier.name}: tree and frame table disagree"
        rest = table.state[~in_tree]
        is_lost = (rest == FrameState.CACHED) | (rest == FrameState.FILLING)
        assert not is_lost.any(), f"{tier.name}: a page is lost"

    def _windowed_of(self, tier: Tier, pages: np.ndarray) -> np.ndarray | None:
        """What a tier's pages are in its pool for layers with a window, if it has one. Pins that."""
        if (pool := self.windowed.get(tier)) is None:
            return None
        frames = pool.of(pages)
        pool.table.pin(frames)
        return frames

    def _give_windowed(self, tier: Tier, pages: np.ndarray) -> np.ndarray | None:
        """The same of pages that are filled, and get it now."""
        if (pool := self.windowed.get(tier)) is None:
            return None
        frames = pool.give(pages)
        pool.table.pin(frames)
        return frames

    @staticmethod
    def _pinned_windowed(op: TransferOp | StorageOp, is_released: bool) -> list[tuple[Tier, np.ndarray]]:
        """By tier, frames for layers with a window that an operation has pinned. is_released: its source is not."""
        if isinstance(op, StorageOp):
            return [] if op.windowed is None else [(Tier.HOST, op.windowed[op.windowed >= 0])]
        parts = [(op.dst, op.dst_windowed), (op.src, None if is_released else op.src_windowed)]
        return [(tier, frames) for tier, frames in parts if frames is not None]

    def _take_ticket(self, link: str) -> Ticket:
        ticket = Ticket(link, self._next_seq[link])
        self._next_seq[link] += 1
        return ticket

    def _begin(self, op: TransferOp | StorageOp) -> None:
        self.in_flight[op.ticket] = self._by_link[op.ticket.link][op.ticket] = op
        self._new_ops.append(op)

    def _table(self, tier: Tier) -> FrameTable:
        if tier == Tier.DISK:
            assert self.pools.swap is not None
            return self.pools.swap
        return self.tables[tier]
