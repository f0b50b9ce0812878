"""`StorageRig`: tree, controllers and ledger without an engine.

Letters are tokens, blocks have four, and storage is a set of names. Everything is checked after every call.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.storage_controller import StorageController
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.managers.tier_switches import TierSwitches
from sglang.srt.managers.transfer_ledger import Pools, TransferLedger
from sglang.srt.mem_cache.block_keys import BlockKeys, to_bytes
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Node, ready_frames
from sglang.srt.mem_cache.transfer import (
    COPY_LINKS,
    FETCH_LINKS,
    PROBE,
    STALLING_LINKS,
    StorageAction,
    StorageOp,
    Ticket,
    Tier,
)
from sglang.srt.mem_cache.windowed_pool import WindowedPool
from sglang.srt.utils.time_units import LaunchClock, LaunchSeq, Seconds

DEVICE, PEER, HOST = Tier.DEVICE, Tier.PEER, Tier.HOST
NAMES = BlockKeys(b"secret", 4)
DONE = 10


def tokens(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)


class StorageRig:
    """stored: texts whose whole blocks storage has. Everything is checked after every call."""

    def __init__(
        self,
        *stored: str,
        device: int = 64,
        host: int = 64,
        peer: int = 0,
        blocks_per_op: int = 2,
        max_fetch_pages: int = 64,
        fetch_window_ops: int = 8,
        max_store_pages: int = 64,
        window_reach: int = 0,
        windowed: int = 0,
        windowed_host: int = 0,
        switches: TierSwitches | None = None,
        tiers: tuple[Tier, ...] = (Tier.DISK,),
        **config: object,
    ) -> None:
        self.tree = HiRadixTree(1, window_reach=window_reach)
        self.device, self.host = FrameTable(device), FrameTable(host)
        table = FrameTable(peer) if peer else None
        self.clock = LaunchClock()
        self.clock.next, self.clock.done = LaunchSeq(20), LaunchSeq(DONE)
        pool = WindowedPool(self.tree, self.device, windowed) if windowed else None
        self.windowed_host = WindowedPool(self.tree, self.host, windowed_host, HOST) if windowed_host else None
        pools = Pools(self.device, self.host, table, windowed=pool, windowed_host=self.windowed_host)
        self.ledger = TransferLedger(self.tree, pools, self.clock, 100)
        self.controller = HiCacheController(self.ledger, "write_through")
        config = {"policy": "wait_complete", "threshold": 1} | config
        limits = StorageLimits(blocks_per_op, max_fetch_pages, max_store_pages, fetch_window_ops)
        prefetch = PrefetchConfig(**config)  # type: ignore[arg-type]
        self.storage = StorageController(self.controller, switches)
        self.storage.attach_storage(
            StorageSetup("test", "", NAMES.secret, NAMES.block_tokens, limits, prefetch, "write_through", tiers)
        )
        self.stored = {key for text in stored for key in to_bytes(NAMES.of_prompt("", tokens(text)))}
        self.ops: dict[Ticket, object] = {}
        self.cancelled: list[Ticket] = []

    def collect(self) -> list[Ticket]:
        """Tickets of what was begun since the last call."""
        ops, cancels = self.ledger.take_ops()
        self.ops |= {op.ticket: op for op in ops}
        self.cancelled += cancels
        self.check()
        return [op.ticket for op in ops]

    def check(self) -> None:
        self.tree.check_invariants()
        self.ledger.check_invariants()
        self.storage.check_invariants()

    def begin(self, rid: str, text: str, now: float = 0.0) -> list[Ticket]:
        self.storage.begin(rid, "", tokens(text), Seconds(now))
        return self.collect()

    def detach(self, rid: str) -> list[Ticket]:
        """The request starts, or ends; then whatever had to wait for its room goes on. Returns what is begun."""
        self.storage.detach(rid)
        if self.storage.fetches_due:
            self.storage.begin_fetches()
        return self.collect()

    def start_ready(self, rids: Iterable[str]) -> None:
        """Start each request that need not wait any more."""
        for rid in rids:
            if self.storage.may_start(rid):
                self.detach(rid)

    def finish(
        self, ticket: Ticket, count: int | None = None, far_count: int = 0, part_count: int = 0
    ) -> list[Ticket]:
        """Storage answers; then whatever had to wait goes on. Returns what is begun."""
        op = self.ops.pop(ticket)
        if ticket.link in COPY_LINKS:
            self.controller.commit(ticket)
        else:
            assert isinstance(op, StorageOp)
            if count is None:
                keys = to_bytes(op.keys)
                count = next((i for i, key in enumerate(keys) if key not in self.stored), len(keys))
                count += op.action == StorageAction.TOUCH
            if ticket.link == PROBE:
                self.storage.end_probe(ticket, count, far_count, part_count)
            elif ticket.link in FETCH_LINKS:
                self.storage.end_fetch(ticket, count)
            else:
                self.storage.stores.of_link(ticket.link).writer.end(ticket, count)
        if ticket.link in STALLING_LINKS or self.storage.fetches_due:
            self.storage.begin_fetches()
        self.host.reap(DONE)
        return self.collect()

    def finish_all(self) -> None:
        while self.ops:
            self.finish(min(self.ops, key=lambda t: (t.link, t.seq)))

    def insert(self, text: str, below: Node | None = None) -> Node:
        frames = self.device.allocate(len(text))
        assert frames is not None
        result = self.tree.insert_prefix("", below, tokens(text), frames, LaunchSeq(0), LaunchSeq(0))
        for node in result.created:
            self.device.transition(ready_frames(node, DEVICE), FrameState.HELD, FrameState.CACHED)
        self.device.free_after(result.duplicates, FrameState.HELD, -1)
        return result.node

    def on_host(self, text: str) -> int:
        return self.tree.match("", tokens(text)).total_len

    def found(self, rid: str) -> tuple[int, int]:
        """From the first to the last token that storage has brought for a request."""
        runs = [run for of_tier in self.storage.found_by_tier(rid) for run in of_tier]
        return (min(start for start, _ in runs), max(end for _, end in runs)) if runs else (0, 0)

    def over(self, *rids: str) -> list[bool]:
        return [self.storage.may_start(rid) for rid in rids]

    def assert_nothing_left(self) -> None:
        self.finish_all()
        assert not self.ledger.in_flight and self.storage.stores.fetching_pages == 0
        assert not self.storage._waiters and not self.storage._unfinished
        self.host.reap(DONE)
        counts = self.host.counts
        assert counts[FrameState.FREE] + counts[FrameState.CACHED] == self.host.num_pages


def keys_of(rig: StorageRig, ticket: Ticket) -> int:
    op = rig.ops[ticket]
    assert isinstance(op, StorageOp)
    return len(op.keys)


def expire(rig: StorageRig, now: float) -> None:
    rig.storage.expire(Seconds(now))
    rig.collect()
