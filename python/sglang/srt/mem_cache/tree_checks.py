"""What must hold of a `HiRadixTree` at any time; a part of that class, in a file of its own. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.node import Node, Receipt, is_hole
from sglang.srt.mem_cache.page_counts import PageCounts
from sglang.srt.mem_cache.placement import SPARE
from sglang.srt.mem_cache.transfer import FRAME_TIERS, Ticket, Tier

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hiradix_tree import HiRadixTree


def check_tree(tree: HiRadixTree) -> None:
    """Every node, the counts and the registers."""
    counts = PageCounts()
    num_nodes = 0
    filling: dict[Ticket, set[int]] = {}
    for node in tree.walk():
        num_nodes += 1
        _check_place(tree, node)
        _check_residency(node)
        for tier in FRAME_TIERS:
            frames, ticket = node.frames[tier], node.tickets[tier]
            if frames is None:
                assert ticket is None
                continue
            assert len(frames) * tree.page_size == len(node.key)
            counts.put_in(node, tier)
            if ticket is not None:
                filling.setdefault(ticket, set()).add(node.id)
    assert num_nodes == tree.num_nodes
    assert tree.windows.num_tokens or not counts.partial, "no layer has a window, and nodes are partial"
    for name in ("resident", "evictable", "unpinned", "soft_pinned", "partial"):
        kept, walked = getattr(tree.counts, name), getattr(counts, name)
        assert kept == walked, f"{name} {kept}, by walk {walked}"
    registered = {t: {n.id for n in nodes} for t, nodes in tree._by_ticket.items()}
    assert filling == registered, "tickets on nodes differ from the register"
    for tier in FRAME_TIERS:
        _check_order(tree, tier)


def check_locks(tree: HiRadixTree, receipts: Iterable[Receipt]) -> None:
    """receipts: of all locks that were taken and not released."""
    own = Counter(id(receipt.node) for receipt in receipts)
    for node in [*tree.walk(), *tree.roots.values()]:
        locks = own[id(node)] + sum(c.lock for c in node.children.values())
        assert node.lock == locks, f"{node}: locked {node.lock} times, {locks} known"


def check_ages(tree: HiRadixTree) -> None:
    """A use of a node is a use of all before it, which therefore goes last by any policy. A locked path gets its age
    when the lock ends."""
    for node in tree.walk():
        parent = node.parent
        if parent is None or parent.parent is None:
            continue
        assert node.hits <= parent.hits, f"{node} was used more often than its prefix"
        assert parent.lock or node.last_access <= parent.last_access, f"{node} was used after its prefix"


def check_soft_pins(tree: HiRadixTree, ends: Iterable[Node]) -> None:
    """ends: of all paths that are soft-pinned."""
    own = Counter(id(node) for node in ends)
    for node in tree.walk():
        pins = own[id(node)] + sum(c.soft_pins for c in node.children.values())
        assert node.soft_pins == pins, f"{node}: {node.soft_pins} soft pins, {pins} known"


def _check_order(tree: HiRadixTree, tier: Tier) -> None:
    """Nothing is evicted later than its rank permits. Of a spare copy the class is kept up to date alone, see
    `EvictionOrder.rank_on`."""
    entered = tree.order.entered(tier)
    for node in tree.walk():
        if not tree.order.is_evictable(node, tier):
            continue
        assert node.id in entered, f"{node} can never be evicted"
        rank = tree.order.rank_on(node, tier)
        is_spare = tier != Tier.DEVICE and tree.order.adds_up and rank[1] == SPARE
        length = 2 if is_spare else len(rank)
        assert entered[node.id][:length] <= rank[:length], f"{node} leaves {tier.name} too late"


def _check_place(tree: HiRadixTree, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    assert parent.children[tree.page_key(node.key, 0)] is node
    assert len(node.key) > 0 and len(node.key) % tree.page_size == 0
    assert node.start == parent.end, f"{node} starts at {node.start}, its parent ends at {parent.end}"
    assert node.is_lossy or not parent.is_lossy, f"{node} is computed from lossy KV and is not marked as lossy"
    assert node.lock >= sum(c.lock for c in node.children.values())
    assert node.soft_pins >= sum(c.soft_pins for c in node.children.values())
    assert parent.parent is None or node.priority <= parent.priority, f"{node} matters more than its prefix"
    if node.weighted_until is not None and parent.parent is not None:
        above = parent.weighted_until
        assert above is not None and all(map(int.__le__, node.weighted_until, above)), f"{node} outweighs its prefix"
    tree.names.check(node)


def _check_residency(node: Node) -> None:
    on_device = node.frames[Tier.DEVICE] is not None
    num_device_children = sum(c.frames[Tier.DEVICE] is not None for c in node.children.values())
    assert num_device_children == node.num_device_children
    assert on_device or not num_device_children, f"{node} has residents below it on the device"
    assert node.children or not is_hole(node), f"{node} is on no tier, and nothing is below it"
    assert node.lock == 0 or not is_hole(node), f"{node} is locked, and on no tier"
    assert on_device or not node.is_partial, f"{node} is partial, and not on the device"
    on_host = node.frames[Tier.HOST] is not None
    assert on_host or not node.is_host_partial, f"{node} is partial on the host, and not there"
