"""The cost of the cache controller per operation and per page: backups, loads, fetches from storage and writes to it.

Owns nothing outside the process: a tree, two frame tables and the controller, no memory, link or thread. Each sample
begins an operation on a new path and ends it. The host pool is large and 90 % full, so that nothing is evicted.

    python benchmark/bench_controller.py [--rounds N]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from common import print_table, summary, write_json

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.storage_controller import StorageController
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.managers.transfer_ledger import Pools, TransferLedger
from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.transfer import FETCH, STORE, Tier
from sglang.srt.utils.time_units import LaunchClock

BLOCK = 64
HOST_TOKENS = 1 << 20


class Rig:
    def __init__(self, page_size: int, storage: bool) -> None:
        self.page_size = page_size
        self.rng = np.random.default_rng(1)
        self.names = BlockKeys(b"bench", BLOCK)
        self.tree = HiRadixTree(page_size)
        self.device = FrameTable(HOST_TOKENS // 4 // page_size)
        self.host = FrameTable(HOST_TOKENS // page_size, max(1, BLOCK // page_size))
        self.clock = LaunchClock()
        self.ledger = TransferLedger(self.tree, Pools(self.device, self.host), self.clock, page_bytes=1)
        self.controller = HiCacheController(self.ledger)
        self.storage = StorageController(self.controller)
        if storage:
            limits = StorageLimits(256, self.host.num_pages, self.host.num_pages)
            setup = StorageSetup("bench", "", b"bench", BLOCK, limits, PrefetchConfig(), "write_through")
            self.storage.attach_storage(setup)
        # Most of the host pool is in use. Free frames lie in runs, as prompts leave them.
        held = self.host.allocate(self.host.num_pages)
        assert held is not None
        runs = np.array_split(held, HOST_TOKENS // 1500)
        for i in self.rng.permutation(len(runs))[: len(runs) // 10]:
            self.host.free_after(runs[i], FrameState.HELD, -1)
        self.host.reap(0)

    def insert(self, num_tokens: int) -> Node:
        tokens = self.rng.integers(0, 1 << 30, num_tokens).astype(np.int32)
        frames = self.device.allocate(num_tokens // self.page_size)
        assert frames is not None
        result = self.tree.insert_prefix("", None, tokens, frames, -1, 0)
        self.device.transition(frames, FrameState.HELD, FrameState.CACHED)
        return result.node

    def clean(self, node: Node) -> None:
        for tier in (Tier.DEVICE, Tier.HOST):
            if node.frames[tier] is not None:
                self.controller.drop(node, tier)
        self.device.reap(0)
        self.host.reap(0)
        self.ledger.take_ops()


def measure(page_size: int, num_tokens: int, rounds: int) -> list[dict[str, object]]:
    samples: dict[str, list[float]] = {}
    clock = time.perf_counter

    def timed(name: str, start: float) -> None:
        samples.setdefault(name, []).append(clock() - start)

    rig, stored = Rig(page_size, storage=False), Rig(page_size, storage=True)
    for _ in range(rounds):
        node, controller = rig.insert(num_tokens), rig.controller
        start = clock()
        ticket = controller.begin_backup(node)
        timed("backup, begin", start)
        assert ticket is not None
        start = clock()
        controller.commit(ticket)
        timed("backup, commit", start)
        controller.evict(Tier.DEVICE, num_tokens // page_size)
        start = clock()
        (ticket,) = controller.begin_load([node])
        timed("load, begin", start)
        start = clock()
        controller.commit(ticket)
        timed("load, commit", start)
        rig.clean(node)
        if num_tokens % BLOCK:
            continue
        tokens = rig.rng.integers(0, 1 << 30, num_tokens).astype(np.int32)
        controller, storage, tree = stored.controller, stored.storage, stored.tree
        start = clock()
        keys = stored.names.of_prompt("", tokens)
        timed("keys of the prompt", start)
        start = clock()
        match = tree.match("", tokens, fetching=True)
        ticket = storage.begin_fetch(match, tokens, keys)
        timed("fetch, begin", start)
        start = clock()
        storage.end_fetch(ticket, len(keys))
        timed("fetch, end", start)
        stored.clean(tree.match("", tokens).path[-1])
        node = stored.insert(num_tokens)
        ticket = controller.begin_backup(node)
        assert ticket is not None
        # The part of the commit that hands the blocks to storage.
        storage.stores.near.writer.obey_switch(True)
        controller.commit(ticket)
        storage.stores.near.writer.obey_switch(False)
        start = clock()
        storage.stores.near.writer.store_path(node)
        timed("store, begin", start)
        for ticket, op in [(t, op) for t, op in stored.ledger.in_flight.items() if t.link == STORE]:
            start = clock()
            storage.stores.near.writer.end(ticket, len(op.keys))
            timed("store, end", start)
        assert not any(t.link == FETCH for t in stored.ledger.in_flight)
        stored.clean(node)
    pages = num_tokens // page_size
    return [
        {
            "operation": name,
            "page size": page_size,
            "pages": pages,
            "median µs": summary(of_name)["median_us"],
            "p99 µs": summary(of_name)["p99_us"],
            "µs per page": summary(of_name)["median_us"] / pages,
        }
        for name, of_name in samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    shapes = [(1, 1), (1, 64), (1, 1024), (1, 8192), (16, 1024), (64, 1024)]
    rows = [row for page, tokens in shapes for row in measure(page, tokens, args.rounds)]
    print_table("Controller, one operation on one path", rows)
    write_json("controller", {"rounds": args.rounds, "host_tokens": HOST_TOKENS, "block_tokens": BLOCK}, rows)


if __name__ == "__main__":
    main()
