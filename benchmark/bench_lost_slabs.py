"""What slabs cost the steps of the scheduler: those in which all slabs of a lender go, and those in which none does.

Owns nothing outside the process: a tree, frame tables, the ledger of slabs and the controller. Half of what the peer
has is on the host, too; the rest moves there as far as there is room. A slab of 8 pages has the pages of four nodes.
In the second table every slab is lent and was used lately, and nothing happens: what the bookkeeping of a step costs
a borrower, and a lender that keeps all its slabs, on one rank.

    python benchmark/bench_lost_slabs.py [--slabs 1000,1800,10000] [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import numpy as np
from common import print_table, write_json

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.progress import COUNTED, Progress
from sglang.srt.managers.slab_withdrawal import SlabWithdrawal
from sglang.srt.managers.transfer_ledger import Pools, TransferLedger
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.slab_ledger import SlabLedger, SlabReport
from sglang.srt.mem_cache.slab_use import SlabUse
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.peer.borrowed_places import BorrowedOptions, BorrowedPlaces
from sglang.srt.peer.borrowing import Borrowing, BorrowingConfig, Shortage
from sglang.srt.peer.lending import DeviceLending, LendingConfig
from sglang.srt.peer.lent_places import LentOptions, LentPlaces
from sglang.srt.peer.protocol.borrower import SlabLent
from sglang.srt.peer.protocol.messages import LeaseId
from sglang.srt.utils.time_units import LaunchClock, Seconds
from support.reduction import reduce_progress

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
            frames = device.allocate(NODE_PAGES)
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
    withdrawal, steps = SlabWithdrawal(controller, slabs), []
    while not steps or withdrawal.has_more:
        start = time.process_time()
        withdrawal.update(SlabReport(bytes(num_slabs)), losing=lambda ids: None)
        slabs.take_drained()
        steps.append(time.process_time() - start)
        ledger.take_ops()
    gc.unfreeze()
    tree.check_invariants()
    ledger.check_invariants()
    return {"longest ms": max(steps) * 1e3, "all ms": sum(steps) * 1e3, "steps": len(steps), "nodes": num_nodes}


class _Leases:
    """Nothing happens to them any more."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def poll(self) -> list[Any]:
        events, self._events = self._events, []
        return events

    def set_demand(self, lender: str, size_bytes: int, value_us: int = 0) -> None: ...

    def offers(self) -> dict[str, None]:
        return {}

    def status(self) -> dict[str, int]:
        return {"quarantined_slabs": 0}

    def take_done(self) -> list[int]:
        return []


def idle_steps(num_slabs: int, num_steps: int) -> dict[str, float]:
    """CPU microseconds of a step."""
    frames = [(i * SLAB_PAGES, (i + 1) * SLAB_PAGES) for i in range(num_slabs)]
    done = dict.fromkeys(COUNTED, 0)
    lent = [SlabLent("lender", LeaseId(1, i), i, 1, None) for i in range(num_slabs)]
    borrowed = BorrowedPlaces(_Leases(lent), ["lender"], num_slabs, 1, BorrowedOptions())  # type: ignore[arg-type]
    use = SlabUse(frames, num_slabs * SLAB_PAGES)
    borrowing = Borrowing(
        BorrowingConfig(), SlabLedger(FrameTable(num_slabs * SLAB_PAGES), frames, mapped=False), use
    )
    home = LentPlaces(_Leases([]), _Leases([]), num_slabs, 1, LentOptions())  # type: ignore[arg-type]
    table = FrameTable(num_slabs * SLAB_PAGES)
    lending = DeviceLending(LendingConfig(), SlabLedger(table, frames, mapped=True), SLAB_PAGES, 0, use)

    def borrower_step(step: int) -> None:
        report = reduce_progress([Progress(done, {}, {}, slab_report=borrowed.poll_mapped())]).slab_report
        borrowed.mark_in_use(report.mapped)
        borrowing.ledger.update(report.mapped)
        borrowing.update(report)
        borrowing.use.note(Seconds(step), np.arange(0, 8 * SLAB_PAGES, dtype=np.int32), 1.0)
        borrowing.adjust(Seconds(step * 1e-3), Shortage())
        borrowing.take_demand(Seconds(step * 1e-3))
        borrowing.ledger.take_drained()

    def lender_step(step: int) -> None:
        report = reduce_progress([Progress(done, {}, {}, slab_report=home.poll_mapped())]).slab_report
        home.mark_in_use(report.mapped)
        lending.update(report)
        lending.adjust(Seconds(step * 1e-3), SLAB_PAGES)
        lending.ledger.take_drained()

    found = {}
    for name, step in (("borrower", borrower_step), ("lender", lender_step)):
        step(0)
        start = time.process_time()
        for i in range(1, num_steps + 1):
            step(i)
        found[f"CPU us of a {name}'s step"] = (time.process_time() - start) / num_steps * 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slabs", default="1000,1800,10000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of the second table")
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
    idle = [{"slabs": n, **idle_steps(n, args.steps)} for n in map(int, args.slabs.split(","))]
    print_table("Nothing happens", idle)
    write_json(
        "lost_slabs", {"rounds": args.rounds, "slab_pages": SLAB_PAGES, "node_pages": NODE_PAGES}, [*rows, *idle]
    )


if __name__ == "__main__":
    main()
