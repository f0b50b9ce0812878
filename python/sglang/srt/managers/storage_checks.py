"""What must hold of a `StorageController` at any time; part of that class, in a file of its own. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.node import path_of
from sglang.srt.mem_cache.transfer import (
    FETCH_LINKS,
    OPS_OF_BLOCKS,
    OPS_OF_TENANTS,
    PROBE,
    STORAGE_LINKS,
    StorageOp,
    Tier,
)
from sglang.srt.mem_cache.tree_checks import check_soft_pins

if TYPE_CHECKING:
    from sglang.srt.managers.storage_controller import StorageController


def check_storage_ops(storage: StorageController) -> None:
    """What is counted of the operations in flight."""
    by_link: dict[str, int] = dict.fromkeys(STORAGE_LINKS, 0)
    for ticket, op in storage.ledger.in_flight.items():
        if isinstance(op, StorageOp):
            by_link[ticket.link] += len(op.frames)
            num_ops = sum(t.link in STORAGE_LINKS for t in storage.ledger.in_flight)
            goes_beside = op.action in (*OPS_OF_BLOCKS, *OPS_OF_TENANTS)
            assert num_ops == 1 or goes_beside, f"{op.action.name} beside other operations"
    assert by_link[PROBE] == 0
    for store in (storage.stores.near, storage.stores.far):
        assert by_link[store.fetch_link] == store.fetching_pages + store.trial.num_pages
        assert by_link[store.writer.link] == store.writer.storing_pages
        fetches = {t for t in storage.ledger.in_flight if t.link == store.fetch_link and t != store.trial.ticket}
        assert store.fetches.keys() == fetches


def check_storage(storage: StorageController) -> None:
    """Requests, what they wait for, and the operations in flight."""
    check_storage_ops(storage)
    for ticket, rids in storage._waiters.items():
        assert ticket in storage.ledger.in_flight, f"{list(rids)} wait for {ticket}, which is over"
        assert rids, f"no request waits for {ticket}"
    for ticket in storage.ledger.in_flight:
        wanted = ticket.link in FETCH_LINKS and storage.tree.nodes_of(ticket)
        assert not wanted or ticket in storage._waiters, f"{ticket} goes on, but no request waits for it"
    for rid, prefetch in storage._prefetches.items():
        assert all(rid in storage._waiters[ticket] for ticket in prefetch.asked)
        for ticket in prefetch.tickets:
            above = {n.tickets[Tier.HOST] for node in storage.tree.nodes_of(ticket) for n in path_of(node)}
            # What began later fills a hole that came about above.
            earlier = {t for t in above if t is not None and t.link == ticket.link and t.seq < ticket.seq}
            left_out = earlier - prefetch.tickets.keys()
            assert not left_out, f"{rid} waits for {ticket}, but not for {left_out} above it"
        assert prefetch.is_over == (rid not in storage._waiting), rid
    assert storage._waiting.keys() <= storage._prefetches.keys()
    for rid in storage._unfinished:
        assert storage._prefetches[rid].end and storage._prefetches[rid].blocks_left, f"{rid} has nothing to begin"
    storage._unfinished.check_invariants(storage._prefetches)
    awaited = storage._is_room_to_come()
    pinned = [p.pinned for p in storage._prefetches.values() if p.pinned is not None]
    pinned += [node for store in (storage.stores.near, storage.stores.far) for node in store.writer.pinned.values()]
    check_soft_pins(storage.tree, pinned)
    assert awaited or pinned or not storage._unfinished, f"{list(storage._unfinished)} wait for nothing"
