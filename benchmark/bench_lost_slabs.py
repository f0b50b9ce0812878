"""Losing a peer: what the steps of the scheduler cost in which all slabs of a lender go.

Owns nothing outside the process: a tree, frame tables, the ledger of slabs and the controller. Half of what the peer
has is on the host, too; the rest moves there as far as there is room. A slab of 8 pages has the pages of four nodes.

    python benchmark/bench_lost_slabs.py [--slabs 1000,1800,10000] [--rounds N]
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np
from common import print_table, write_json

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.slab_withdrawal import SlabWithdrawal
from sglang.srt.managers.transfer_ledger import Pools, TransferLedger
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.slab_ledger import SlabLedger
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.utils.time_units import LaunchClock

PAGE = 16
SLAB_PAGES = 8
NODE_PAGES = 2
# Nodes of a conversation: they are a path.
PATH_NODES = 8
HOST_SHARE = 0.5


def lose(num_slabs: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    num_pages = num_slabs * SLAB_PAGES
    tree, clock = HiRadixTree(PAGE), LaunchClock()
    device, peer, host = FrameTable(num_pages), FrameTable(num_pages), FrameTable(num_pages)
    ledger = TransferLedger(tree, Pools(device, host, peer), clock, page_bytes=1)
    controller = HiCacheController(ledger)
    slabs = SlabLedger(peer, [(i * SLAB_PAGES, (i + 1) * SLAB_PAGES) for i in range(num_slabs)], mapped=False)
    slabs.update(b"\1" * num_slabs)
    num_nodes = num_pages // NODE_PAGES
    for first in range(0, num_nodes, PATH_NODES):
        above = None
        for _ in range(min(PATH_NODES, num_nodes - first)):
            tokens = rng.integers(0, 1 << 30, NODE_PAGES * PAGE).astype(np.int32)
            frames = device.allocate(NODE_PAGES, 0)
            assert frames is not None
            result = tree.insert_prefix("", above, tokens, frames, -1, 0)
            device.transition(frames, FrameState.HELD, FrameState.CACHED)
            above = result.node
            tiers = [Tier.PEER] + [Tier.HOST] * (rng.random() < HOST_SHARE)
            for tier in tiers:
                ticket = controller.back_up([above], tier)
                assert ticket is not None
                controller.commit(ticket)
    controller.evict(Tier.DEVICE, num_pages)
    device.reap(0)
    ledger.take_ops()
    # What the set-up has put off: stale entries of the order of eviction, and Python's garbage.
    tree.order.next_of(Tier.HOST)
    gc.collect()
    gc.freeze()
    withdrawal, steps = SlabWithdrawal(controller), []
    while not steps or withdrawal.has_more:
        start = time.process_time()
        runs = [slabs.frames_of(slab) for slab in slabs.update(bytes(num_slabs))]
        withdrawal.withdraw(runs, [], losing=lambda ids: None)
        peer.reap(0)
        slabs.take_drained()
        steps.append(time.process_time() - start)
        ledger.take_ops()
    gc.unfreeze()
    tree.check_invariants()
    ledger.check_invariants()
    return {"longest ms": max(steps) * 1e3, "all ms": sum(steps) * 1e3, "steps": len(steps), "nodes": num_nodes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slabs", default="1000,1800,10000")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for num_slabs in map(int, args.slabs.split(",")):
        found = [lose(num_slabs) for _ in range(args.rounds)]
        rows.append(
            {
                "slabs": num_slabs,
                "nodes": found[0]["nodes"],
                "steps": found[0]["steps"],
                "CPU ms of the longest step": min(each["longest ms"] for each in found),
                "of all": min(each["all ms"] for each in found),
            }
        )
    print_table("All slabs of a lender are lost at once", rows)
    write_json("lost_slabs", {"rounds": args.rounds, "slab_pages": SLAB_PAGES, "node_pages": NODE_PAGES}, rows)


if __name__ == "__main__":
    main()
