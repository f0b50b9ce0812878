"""A cache's controller over small pools of letters, with storage whose answers a test gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.storage_checks import check_storage_ops
from sglang.srt.managers.storage_controller import StorageController
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.managers.transfer_ledger import Pools, TransferLedger
from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.border_slabs import BorderSlabs
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.transfer import (
    D2H,
    STORE,
    Ticket,
    Tier,
    TransferOp,
)
from sglang.srt.mem_cache.windowed_pool import WindowedPool
from sglang.srt.utils.time_units import LaunchClock, LaunchSeq
from support.storage_rig import DEVICE, HOST, tokens


class Rig:
    """A tree of letters, page size 1, over small pools. window_reach: see `SchedulerConfig`; half of the layers have
    a window. windowed_host: pages of the host's pool for these, 0 for none; with one the device has one, too. border:
    what of the host's two pools may be either's."""

    def __init__(
        self,
        device: int = 12,
        host: int = 8,
        write_policy: str = "write_through",
        eviction: str = "lru",
        peer: int = 0,
        window_reach: int = 0,
        windowed_host: int = 0,
        border: BorderSlabs | None = None,
    ) -> None:
        self.tree = HiRadixTree(1, eviction, window_reach)
        self.device = FrameTable(device)
        self.host = FrameTable(host) if host else None
        self.peer = FrameTable(peer) if peer else None
        self.clock = LaunchClock()
        self.clock.next = LaunchSeq(1000)
        self.windowed = WindowedPool(self.tree, self.device, device) if windowed_host else None
        self.windowed_host = None
        if self.host is not None and windowed_host:
            self.windowed_host = WindowedPool(self.tree, self.host, windowed_host, Tier.HOST)
        pools = Pools(self.device, self.host, self.peer, None, self.windowed, self.windowed_host, border)
        self.ledger = TransferLedger(self.tree, pools, self.clock, 100, 0.5)
        self.controller = HiCacheController(self.ledger, write_policy)

    def at(self, done: int, next: int = 1000) -> HiCacheController:
        """The controller, once launches below `done` are over and those below `next` are issued."""
        self.clock.done, self.clock.next = LaunchSeq(done), LaunchSeq(next)
        return self.controller

    def insert(self, text: str, below: Node | None = None, fence: int = 0, now: int = 0) -> Node:
        frames = self.device.allocate(len(text))
        assert frames is not None
        if self.windowed is not None:
            self.windowed.give(frames)
        result = self.tree.insert_prefix("", below, tokens(text), frames, LaunchSeq(fence), LaunchSeq(now))
        for node in result.created:
            created = node.frames[DEVICE]
            assert created is not None
            self.device.transition(created, FrameState.HELD, FrameState.CACHED)
        self.device.free_after(result.duplicates, FrameState.HELD, fence)
        self.ledger.free(result.replaced, DEVICE)
        self.check()
        return result.node

    def back_up(self, node: Node) -> None:
        """Start a backup and bring it to its end."""
        ticket = self.at(10).begin_backup(node)
        assert ticket is not None
        self.ledger.take_ops()
        self.at(10).commit(ticket)
        self.check()

    def copy(self, node: Node, tier: Tier) -> None:
        """Copy a node alone to a tier, to the end."""
        ticket = self.at(10).back_up([node], tier)
        assert ticket is not None
        self.ledger.take_ops()
        self.at(10).commit(ticket)
        self.check()

    def on_host_only(self, text: str, below: Node | None = None) -> Node:
        node = self.insert(text, below)
        self.back_up(node)
        self.at(10).evict(DEVICE, len(text))
        self.check()
        assert node.frames[DEVICE] is None and node.frames[HOST] is not None
        return node

    def lengths(self, text: str) -> tuple[int, int]:
        match = self.tree.match("", tokens(text))
        return match.device_len, match.total_len

    def check(self) -> None:
        self.tree.check_invariants()
        self.ledger.check_invariants()
        if (border := self.controller.windowed_host.border) is not None:
            border.check_invariants()

    def states(self, tier: Tier) -> str:
        self.check()
        return "".join("FHICDLQ"[s] for s in self.controller.tables[tier].state)


def ops_of(rig: Rig) -> list[tuple[Ticket, list[int], list[int], int | None]]:
    """Copies that have begun: ticket, frames of the source and of the destination, launch that they wait for."""
    ops, _ = rig.ledger.take_ops()
    copies = [op for op in ops if isinstance(op, TransferOp)]
    assert len(copies) == len(ops)
    return [(op.ticket, op.src_frames.tolist(), op.dst_frames.tolist(), op.after) for op in copies]


def load(rig: Rig, nodes: list[Node]) -> Ticket:
    """A load that one tier can serve."""
    (ticket,) = rig.controller.begin_load(nodes)
    return ticket


NAMES = BlockKeys(b"secret", 2)


class StorageRig(Rig):
    """Blocks of two letters; storage is what the test says."""

    def __init__(self, device: int = 16, host: int = 16, blocks_per_op: int = 8, store: int = 99, **rig: Any) -> None:
        super().__init__(device, host, **rig)
        self.storage = StorageController(self.controller)
        self.attach(blocks_per_op, store)

    def check(self) -> None:
        super().check()
        check_storage_ops(self.storage)

    def attach(self, blocks_per_op: int = 8, store: int = 99, is_lossy: bool = False) -> None:
        limits, write_policy = StorageLimits(blocks_per_op, 99, store), self.controller.write_policy
        setup = StorageSetup("test", "", NAMES.secret, NAMES.block_tokens, limits, PrefetchConfig(), write_policy)
        self.storage.attach_storage(replace(setup, is_lossy=is_lossy))

    def fetch(self, text: str, start: int = 0) -> Ticket:
        """Fetch what lies behind the first `start` letters, to the end of the text."""
        match = self.tree.match("", tokens(text), fetching=True)
        assert match.total_len == start
        keys = NAMES.of_prompt("", tokens(text))[start // 2 :]
        ticket = self.storage.begin_fetch(match, tokens(text[start:]), keys)
        self.check()
        return ticket

    def end_fetch(self, ticket: Ticket, count: int) -> None:
        self.storage.end_fetch(ticket, count)
        assert self.host is not None
        self.host.reap(10)
        self.check()

    def begun(self) -> list[tuple[str, int, list[str], list[int]]]:
        """Link, number, blocks by their letters, host frames; of copies, the frames they fill."""
        found: list[tuple[str, int, list[str], list[int]]] = []
        for op in self.ledger.take_ops()[0]:
            if isinstance(op, TransferOp):
                found.append((op.ticket.link, op.ticket.seq, [], op.dst_frames.tolist()))
            else:
                found.append(
                    (op.ticket.link, op.ticket.seq, [LETTERS[k.tobytes()] for k in op.keys], op.frames.tolist())
                )
        return found

    def commit(self, seq: int) -> None:
        self.at(10).commit(Ticket(D2H, seq))
        self.check()

    def end_store(self, seq: int, count: int = 1) -> None:
        self.storage.stores.near.writer.end(Ticket(STORE, seq), count)
        self.check()


LETTERS: dict[bytes, str] = {}
for _text in ("abcdefghijkl", "uvwxyz", "pqrs"):
    for _i, _key in enumerate(NAMES.of_prompt("", tokens(_text))):
        LETTERS[_key.tobytes()] = _text[2 * _i : 2 * _i + 2]
