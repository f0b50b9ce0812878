"""Residency behind the device by example: holes, peer and host in turn on one path, and what a tier gives up next."""

from __future__ import annotations

import pytest
from test_hiradix_tree import (
    DEVICE,
    HOST,
    PEER,
    both,
    cached,
    fetch,
    fill,
    filling,
    insert,
    lengths,
    load_all,
    match,
    move,
    named_tree,
    pages,
    shape,
    text_of,
    ticket_to,
    tokens,
)

from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Node, is_hole
from sglang.srt.mem_cache.transfer import D2P, FETCH, H2D, P2D, Ticket
from support.evictions import evict


def path(tree: HiRadixTree, *texts: str) -> list[Node]:
    """Nodes below each other on the device, frames 0, 1, …"""
    nodes: list[Node] = []
    first = 0
    for text in texts:
        nodes.append(insert(tree, text, first, below=nodes[-1] if nodes else None).node)
        first += len(text)
    return nodes


def hole_between(tree: HiRadixTree) -> list[Node]:
    """aabbcc, of which the host has aa at 50 and cc at 54, and no tier has bb."""
    top, hole, low = path(tree, "aa", "bb", "cc")
    load_all(tree, [top], HOST, 50, seq=0)
    load_all(tree, [low], HOST, 54, seq=1)
    tree.drop([top], DEVICE)
    tree.check_invariants()
    assert is_hole(hole) and lengths(match(tree, "aabbcc")) == (0, 2)
    return [top, hole, low]


# -- where holes come from ---------------------------------------------------------------------------------------


def test_the_device_leaves_a_hole_when_it_evicts_what_has_no_copy():
    tree = HiRadixTree(1)
    top, low = path(tree, "aa", "bb")
    load_all(tree, [low], HOST, 50, seq=0)
    assert cached(evict(tree, DEVICE, 4)) == [([2, 3], 0), ([0, 1], 0)], "eviction of the device never refuses"
    assert shape(tree) == {"aa": [None, None], "aabb": [None, [50, 51]]} and is_hole(top)
    assert lengths(match(tree, "aabb")) == (0, 0), "a match ends at a hole"
    assert tree.next_unmatched(match(tree, "aabb"), tokens("aabb")) is top


@pytest.mark.parametrize("loaded", [True, False])
def test_a_lost_copy_leaves_a_hole(loaded: bool):
    """A slab is lost; or a load fails, which loses its source, too."""
    tree = HiRadixTree(1)
    top, low = path(tree, "aa", "bb")
    move(tree, [top], DEVICE, PEER, 20)
    load_all(tree, [low], HOST, 50, seq=0)
    evict(tree, DEVICE, 4)
    assert lengths(match(tree, "aabb")) == (0, 4)
    if loaded:
        tree.begin_fill([top], PEER, DEVICE, pages(10, 2), Ticket(P2D, 9))
        assert filling(tree.drop([top], DEVICE)) == [([10, 11], Ticket(P2D, 9))]
    assert cached(tree.drop([top], PEER)) == [([20, 21], -1)], "nothing below is lost"
    tree.check_invariants()
    assert is_hole(top) and low.frames[HOST].tolist() == [50, 51] and lengths(match(tree, "aabb")) == (0, 0)


def test_a_failed_backup_leaves_a_hole():
    tree = HiRadixTree(1)
    top, low = path(tree, "aa", "bb")
    load_all(tree, [low], HOST, 52, seq=0)
    backup = fill(tree, [top], HOST, 50, seq=1)
    evict(tree, DEVICE, 4)
    assert not is_hole(top) and lengths(match(tree, "aabb")) == (0, 0), "on its way"
    assert filling(tree.drop([top], HOST)) == [([50, 51], backup)]
    tree.check_invariants()
    assert is_hole(top) and low.frames[HOST].tolist() == [52, 53] and tree.nodes_of(backup) == []


# -- what fills them ---------------------------------------------------------------------------------------------


def test_inserting_fills_a_hole():
    tree = HiRadixTree(1)
    top, hole, low = hole_between(tree)
    insert(tree, "aabb", 10)
    assert hole.frames[DEVICE].tolist() == [12, 13], "a node of the tree again, not a new one"
    assert lengths(match(tree, "aabbcc")) == (4, 6) and top.children and low.parent is hole


def test_inserting_fills_a_part_of_a_hole():
    tree = HiRadixTree(1)
    hole_between(tree)
    insert(tree, "aab", 10)
    assert shape(tree)["aab"] == [[12], None] and shape(tree)["aabb"] == [None, None]
    assert lengths(match(tree, "aabbcc")) == (3, 3)
    insert(tree, "aabx", 20)
    assert lengths(match(tree, "aabx")) == (4, 4), "beside the rest of the hole"
    assert lengths(match(tree, "aabb")) == (3, 3)


def test_a_fetch_fills_a_hole_with_the_part_of_its_block_that_is_lacking():
    """Blocks of four: the one of the hole begins before it, and the next one ends behind it."""
    tree = named_tree()
    top, hole, low = path(tree, "xxxxy", "yyyz", "zzzw")
    load_all(tree, [top], HOST, 50, seq=0)
    load_all(tree, [low], HOST, 60, seq=1)
    tree.drop([top], DEVICE)
    assert is_hole(hole) and tree.next_unmatched(match(tree, "xxxxyyyyzz"), tokens("xxxxyyyyzz")) is hole
    assert fetch(tree, "xxxxyyyyz", 70) is hole
    assert hole.frames[HOST].tolist() == [70, 71, 72, 73] and hole.tickets[HOST] == Ticket(FETCH, 0)
    assert len(hole.block_keys) == 1 and hole.stored.tolist() == [True], "the block that ends in it"
    assert tree.match("", tokens("xxxxyyyyzzzzw"), fetching=True).total_len == 13
    assert lengths(match(tree, "xxxxyyyyzzzzw")) == (0, 5)
    tree.commit(Ticket(FETCH, 0), HOST)
    tree.check_invariants()
    assert lengths(match(tree, "xxxxyyyyzzzzw")) == (0, 13)


def test_a_fetch_that_brings_a_part_of_a_hole_leaves_the_rest():
    tree = named_tree()
    top, hole, low = path(tree, "aaaa", "bbbbcccc", "dddd")
    load_all(tree, [low], HOST, 60, seq=1)
    tree.drop([top], DEVICE)
    insert(tree, "aaaa", 10)
    fetch(tree, "aaaabbbbcccc", 70)
    dropped = tree.cut(Ticket(FETCH, 0), HOST, 8)
    assert filling(dropped) == [([74, 75, 76, 77], Ticket(FETCH, 0))] and [*map(text_of, dropped.staying)] == ["cccc"]
    tree.commit(Ticket(FETCH, 0), HOST)
    tree.check_invariants()
    assert lengths(match(tree, "aaaabbbbccccdddd")) == (4, 8) and is_hole(hole)
    assert low.frames[HOST] is not None, "what is behind the hole stays"


def test_a_fetch_given_up_leaves_the_hole():
    tree = named_tree()
    top, hole, low = path(tree, "aaaa", "bbbb", "cccc")
    load_all(tree, [top], HOST, 50, seq=0)
    load_all(tree, [low], HOST, 60, seq=1)
    tree.drop([top], DEVICE)
    fetch(tree, "aaaabbbb", 70)
    tree.cut(Ticket(FETCH, 0), HOST, 0)
    tree.check_invariants()
    assert is_hole(hole) and low.parent is hole and low.frames[HOST].tolist() == [60, 61, 62, 63]


def test_a_hole_goes_with_the_last_node_below_it():
    tree = HiRadixTree(1)
    top, hole, low = hole_between(tree)
    other = insert(tree, "aabbxx", 20).node
    load_all(tree, [other], HOST, 60, seq=2)
    tree.drop([top], DEVICE)
    tree.check_invariants()
    assert len(hole.children) == 2
    assert cached(tree.drop([low], HOST)) == [([54, 55], -1)]
    assert hole.parent is top, "one is below it still"
    tree.drop([other], HOST)
    tree.check_invariants()
    assert shape(tree) == {"aa": [None, [50, 51]]} and hole.parent is None


def test_holes_above_each_other_go_together():
    tree = HiRadixTree(1)
    top, middle, low = path(tree, "aa", "bb", "cc")
    load_all(tree, [low], HOST, 50, seq=0)
    evict(tree, DEVICE, 6)
    assert is_hole(top) and is_hole(middle)
    tree.drop([low], HOST)
    tree.check_invariants()
    assert tree.num_nodes == 0 and not tree.roots


def test_a_front_goes_by_its_age_though_another_tier_has_what_is_behind_it():
    tree = HiRadixTree(1)
    top, low = path(tree, "aa", "bb")
    load_all(tree, [top], HOST, 50, seq=0)
    move(tree, [low], DEVICE, PEER, 20)
    evict(tree, DEVICE, 4)
    (other,) = path(tree, "xx")
    load_all(tree, [other], HOST, 60, seq=1)
    tree.drop([other], DEVICE)
    tree.unlock(tree.lock(match(tree, "xx"), 9), 9, -1)
    assert cached(evict(tree, HOST, 2)) == [([50, 51], -1)] and is_hole(top), "the other was used later"
    assert cached(evict(tree, HOST, 2)) == [([60, 61], -1)]
    assert cached(evict(tree, PEER, 2)) == [([20, 21], -1)] and tree.num_nodes == 0
    tree.check_invariants()


def test_what_storage_brings_makes_what_is_before_it_as_young():
    """Else the front would go first, and nothing would reach what came."""
    tree = named_tree()
    (top,) = path(tree, "aaaa")
    load_all(tree, [top], HOST, 50, seq=0)
    tree.drop([top], DEVICE)
    insert(tree, "xxxx", 10, now=5)
    low = fetch(tree, "aaaabbbb", 60, now=7)
    assert (top.last_access, low.last_access) == (7, 7)


def test_neighbouring_holes_are_merged_and_cut_like_nodes():
    tree = HiRadixTree(1)
    _, middle, low = path(tree, "aa", "bb", "cc")
    load_all(tree, [low], HOST, 50, seq=0)
    evict(tree, DEVICE, 6)
    tree.compact(middle, done=1)
    assert shape(tree) == {"aabb": [None, None], "aabbcc": [None, [50, 51]]} and is_hole(middle)
    insert(tree, "aax", 20)
    assert shape(tree) == {
        "aa": [[20, 21], None],
        "aabb": [None, None],
        "aabbcc": [None, [50, 51]],
        "aax": [[22], None],
    }


# -- lossy nodes around a hole -----------------------------------------------------------------------------------


def test_a_hole_that_was_lossy_is_exact_when_it_is_computed_from_exact_kv():
    tree = named_tree()
    top, hole, low = path(tree, "aaaa", "bbbb", "cccc")
    for node in (hole, low):
        node.is_lossy = True
    load_all(tree, [low], HOST, 60, seq=0)
    tree.drop([top], DEVICE)
    insert(tree, "aaaabbbb", 10)
    assert [n.is_lossy for n in (top, hole, low)] == [False, False, True], "what lies below came through the codec"


def test_a_hole_computed_behind_lossy_kv_is_lossy():
    tree = named_tree()
    top, hole, low = path(tree, "aaaa", "bbbb", "cccc")
    for node in (top, hole, low):
        node.is_lossy = True
    load_all(tree, [top], HOST, 50, seq=0)
    load_all(tree, [low], HOST, 60, seq=1)
    tree.drop([top], DEVICE)
    load_all(tree, [top], DEVICE, 10, seq=2)
    insert(tree, "aaaabbbb", 20)
    assert [n.is_lossy for n in (top, hole, low)] == [True] * 3


@pytest.mark.parametrize("is_lossy", [True, False])
def test_what_is_below_a_hole_that_is_fetched_is_as_lossy_as_the_fetch(is_lossy: bool):
    tree = named_tree()
    top, hole, low = path(tree, "aaaa", "bbbb", "cccc")
    lowest = insert(tree, "dddd", 12, below=low).node
    load_all(tree, [top], HOST, 50, seq=0)
    load_all(tree, [low, lowest], HOST, 60, seq=1)
    tree.drop([top], DEVICE)
    fetch(tree, "aaaabbbb", 70, is_lossy=is_lossy)
    assert [n.is_lossy for n in (top, hole, low, lowest)] == [False, *[is_lossy] * 3]


# -- peer and host in turn ---------------------------------------------------------------------------------------


def alternating(tree: HiRadixTree) -> list[Node]:
    """aabbccdd: aa on the device, bb on the peer, cc on the host, dd on the peer."""
    nodes = path(tree, "aa", "bb", "cc", "dd")
    for i, (node, tier) in enumerate(zip(nodes[1:], (PEER, HOST, PEER))):
        if tier == PEER:
            move(tree, [node], DEVICE, PEER, 20 + 2 * i)
        else:
            load_all(tree, [node], HOST, 50, seq=i)
    evict(tree, DEVICE, 6)
    tree.check_invariants()
    return nodes


def test_a_match_names_the_runs_that_come_from_peers():
    tree = HiRadixTree(1)
    alternating(tree)
    m = match(tree, "aabbccdd")
    assert lengths(m) == (2, 8) and m.peer_runs == ((2, 4), (6, 8)) and m.from_peers == 4
    assert [m.to_load_behind(start) for start in (2, 3, 4, 5, 7, 8)] == [
        (2, 4),
        (2, 3),
        (2, 2),
        (1, 2),
        (0, 1),
        (0, 0),
    ]
    m = match(tree, "aabbccd")
    assert m.peer_runs == ((2, 4), (6, 7)) and m.to_load_behind(2) == (2, 3)
    part = m.on_device()
    assert (lengths(part), part.path, part.last_len, part.peer_runs) == ((2, 2), m.path[:1], 2, ())


def test_neighbours_on_peers_are_one_run():
    tree = HiRadixTree(1)
    for first, node in zip((20, 30), path(tree, "aa", "bb")):
        move(tree, [node], DEVICE, PEER, first)
    evict(tree, DEVICE, 4)
    assert match(tree, "aabb").peer_runs == ((0, 4),)


def test_alternating_nodes_are_loaded_by_two_operations():
    tree = HiRadixTree(1)
    _, b, c, d = alternating(tree)
    receipt = tree.lock(match(tree, "aabbccdd"), launch=5)
    tree.begin_fill([b, d], PEER, DEVICE, pages(30, 4), Ticket(P2D, 1))
    tree.begin_fill([c], HOST, DEVICE, pages(40, 2), ticket_to(DEVICE, 0))
    tree.check_invariants()
    assert tree.commit(Ticket(H2D, 0), DEVICE) == [c]
    tree.check_invariants()
    assert b.tickets[DEVICE] == d.tickets[DEVICE] == Ticket(P2D, 1)
    assert tree.commit(Ticket(P2D, 1), DEVICE) == [b, d]
    tree.check_invariants()
    assert [n.frames[DEVICE].tolist() for n in receipt.node.parent.children.values()] == [[32, 33]]
    m = match(tree, "aabbccdd")
    assert lengths(m) == (8, 8) and m.peer_runs == () and m.on_device().path == m.path


# -- victims -----------------------------------------------------------------------------------------------------


def texts(nodes: list[Node]) -> list[str]:
    return [text_of(node) for node in nodes]


def state(tree: HiRadixTree) -> list[tuple[str, list[object], int]]:
    tree.check_invariants()
    return sorted((text_of(n), [*map(str, n.frames), *map(str, n.tickets)], n.lock) for n in tree.walk())


def test_victims_are_what_eviction_takes_and_stay_until_then():
    tree = HiRadixTree(1)
    top = insert(tree, "aa", 0, now=1).node
    low = insert(tree, "bb", 2, below=top, now=5).node
    other = insert(tree, "xx", 4, now=3).node
    before = state(tree)
    assert tree.victims(DEVICE, 6) == [other, low, top], "by age, and nothing before what is below it"
    assert state(tree) == before
    assert tree.victims(DEVICE, 6) == [other, low, top], "asking changes no order"
    assert tree.victims(DEVICE, 4) == [other, low] and tree.victims(DEVICE, 0) == []
    assert cached(tree.give_up(tree.victims(DEVICE, 4), DEVICE)) == [([4, 5], 0), ([2, 3], 0)]
    tree.check_invariants()
    assert tree.victims(DEVICE, 99) == [top]


def test_the_last_victim_is_cut_to_what_is_needed():
    tree = HiRadixTree(2)
    node = insert(tree, "aabbccdd", 0).node
    assert tree.victims(DEVICE, 3) == [node] and text_of(node) == "bbccdd"
    assert shape(tree) == {"aa": [[0], None], "aabbccdd": [[1, 2, 3], None]}, "it has lost nothing"
    upper = node.parent
    assert texts(tree.victims(DEVICE, 4)) == ["bbccdd", "aa"] and upper is not None and upper.parent is not None


def test_kept_nodes_are_no_victims_and_cover_what_is_above_on_the_device():
    tree = HiRadixTree(1)
    top, low = path(tree, "aa", "bb")
    other = insert(tree, "xx", 4, now=9).node
    assert tree.victims(DEVICE, 9, {low.id}) == [other]
    assert tree.victims(DEVICE, 9, {top.id}) == [low, other]
    assert tree.victims(DEVICE, 9) == [low, top, other], "kept once, not for ever"


def test_victims_of_the_host_need_not_be_leaves_where_another_tier_has_them():
    tree = HiRadixTree(1)
    top, low = path(tree, "aa", "bb")
    load_all(tree, [top, low], HOST, 50, seq=0)
    tree.unlock(tree.lock(match(tree, "aabb"), 7), 7, -1)
    assert tree.victims(HOST, 9) == [low, top]
    assert tree.victims(HOST, 9, {low.id}) == [top], "the device has it, too"
    evict(tree, DEVICE, 4)
    assert tree.victims(HOST, 9, {low.id}) == [top], "though it would leave a hole"


def test_of_a_path_the_end_goes_first():
    tree = HiRadixTree(1)
    top = insert(tree, "aa", 0, now=5).node
    low = insert(tree, "bb", 2, below=top, now=5).node
    young = insert(tree, "xx", 4, now=9).node
    load_all(tree, [top, low, young], HOST, 50, seq=0)
    evict(tree, DEVICE, 6)
    assert tree.victims(HOST, 6) == [low, top, young]


def test_a_hole_leaves_the_tree_with_the_last_node_below_it():
    tree = HiRadixTree(1)
    top, hole, low = hole_between(tree)
    before = state(tree)
    assert tree.victims(HOST, 9) == [low, top], "the hole leaves the tree with the last node below it"
    assert state(tree) == before and hole.parent is top
    assert [frames for frames, _ in cached(evict(tree, HOST, 9))] == [[54, 55], [50, 51]]
    assert tree.num_nodes == 0


def test_victims_of_peers_and_host_leave_out_what_is_loaded():
    tree = HiRadixTree(1)
    _, b, c, d = alternating(tree)
    tree.begin_fill([b, d], PEER, DEVICE, pages(30, 4), Ticket(P2D, 1))
    assert tree.victims(PEER, 9) == [] and tree.victims(DEVICE, 9) == [], "the device's last is covered"
    tree.lock(match(tree, "aabbccdd"), launch=5)
    assert tree.victims(HOST, 9) == [], "it is about to be loaded"
    assert both(c.tickets) == [None, None]


def test_a_peer_s_victims_are_what_others_have_first_though_a_backup_there_is_under_way():
    tree = HiRadixTree(1)
    a, b = insert(tree, "aa", 0, now=1).node, insert(tree, "bb", 2, now=2).node
    for first, node in zip((20, 30), (a, b)):
        move(tree, [node], DEVICE, PEER, first)
    tree.drop([a], DEVICE)
    c = insert(tree, "cc", 4).node
    tree.begin_fill([c], DEVICE, PEER, pages(40, 2), Ticket(D2P, 99))
    assert tree.victims(PEER, 9) == [b, a], "what is being filled stays"
