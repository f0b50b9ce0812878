"""The tree by example: letters are tokens, lists are frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.eviction import EVICTION_POLICIES
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Dropped, FilledRun, InsertResult, MatchResult, Node
from sglang.srt.mem_cache.transfer import D2H, D2P, FETCH, H2D, P2D, Ticket, Tier
from sglang.srt.utils.time_units import NO_LAUNCH
from support.evictions import evict

DEVICE, PEER, HOST = Tier.DEVICE, Tier.PEER, Tier.HOST


def tokens(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)


def ids(*frames: int) -> np.ndarray:
    return np.array(frames, np.int32)


def pages(first: int, n: int) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.int32)


def insert(
    tree: HiRadixTree, text: str, first: int, below: Node | None = None, fence: int = 0, now: int = 0, ns: str = ""
) -> InsertResult:
    """Publish text with frames first, first + 1, …"""
    n = len(text) // tree.page_size
    result = tree.insert_prefix(ns, below, tokens(text), pages(first, n), fence, now)
    tree.check_invariants()
    return result


def match(tree: HiRadixTree, text: str, ns: str = "") -> MatchResult:
    return tree.match(ns, tokens(text))


def lengths(m: MatchResult) -> tuple[int, int]:
    return m.device_len, m.total_len


def text_of(node: Node) -> str:
    return "".join(chr(t) for t in node.key)


def path_of(m: MatchResult) -> list[str]:
    return [text_of(n) for n in m.path]


def shape(tree: HiRadixTree) -> dict[str, list[list[int] | None]]:
    """Every path from its root -> frames on device and host of its last node."""
    tree.check_invariants()
    found = {}
    for node in tree.walk():
        text, step = "", node
        while step is not None:
            text, step = text_of(step) + text, step.parent
        found[text] = [None if f is None else f.tolist() for f in both(node.frames)]
    return dict(sorted(found.items()))


def both(per_tier: Sequence[Any]) -> list[Any]:
    """Of the device and of the host."""
    return [per_tier[DEVICE], per_tier[HOST]]


def load_all(tree: HiRadixTree, nodes: list[Node], tier: Tier, first: int, seq: int) -> None:
    """Fill nodes on a tier, and commit."""
    fill(tree, nodes, tier, first, seq)
    tree.commit(ticket_to(tier, seq), tier)
    tree.check_invariants()


def fill(tree: HiRadixTree, nodes: list[Node], tier: Tier, first: int, seq: int) -> Ticket:
    n = sum(len(node.key) for node in nodes) // tree.page_size
    tree.begin_fill(nodes, HOST if tier == DEVICE else DEVICE, tier, pages(first, n), ticket_to(tier, seq))
    tree.check_invariants()
    return ticket_to(tier, seq)


def ticket_to(tier: Tier, seq: int) -> Ticket:
    return Ticket(H2D if tier == DEVICE else D2H, seq)


def cached(dropped: Dropped) -> list[tuple[list[int], int]]:
    return [(frames.tolist(), fence) for frames, fence in dropped.cached]


def filling(dropped: Dropped) -> list[tuple[list[int], Ticket]]:
    return [(frames.tolist(), ticket) for frames, ticket in dropped.filling]


# -- match ------------------------------------------------------------------------------------------------------


def test_page_size_zero_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        HiRadixTree(0)


def test_match_in_an_empty_tree():
    tree = HiRadixTree(1)
    m = match(tree, "abc")
    assert (m.path, m.last_len, lengths(m)) == ((), 0, (0, 0))
    assert tree.roots == {}, "matching creates nothing"


def test_match_ends_where_the_tokens_differ():
    tree = HiRadixTree(1)
    insert(tree, "abcdef", 10)
    for text, n in (("abcdef", 6), ("abcxyz", 3), ("abc", 3), ("abcdefgh", 6), ("a", 1), ("x", 0), ("", 0)):
        m = match(tree, text)
        assert lengths(m) == (n, n), text
        assert m.last_len == n
    assert tree.num_nodes == 1, "matching never splits"


def test_match_over_several_nodes():
    tree = HiRadixTree(1)
    top = insert(tree, "abc", 0).node
    insert(tree, "de", 3, below=top)
    insert(tree, "xy", 5, below=top)
    m = match(tree, "abcdz")
    assert path_of(m) == ["abc", "de"] and m.last_len == 1 and lengths(m) == (4, 4)
    assert path_of(match(tree, "abcxy!")) == ["abc", "xy"]
    assert path_of(match(tree, "abq")) == ["abc"]


def test_match_counts_whole_pages_only():
    tree = HiRadixTree(4)
    insert(tree, "aaaabbbbcccc", 7)
    for text, n in (("aaaabbbbcccc", 12), ("aaaabbbbcccx", 8), ("aaaabbb", 4), ("aaab", 0), ("aaaaxbbb", 4)):
        assert lengths(match(tree, text)) == (n, n), text
    top = match(tree, "aaaa").path[-1]
    assert text_of(top) == "aaaabbbbcccc" and tree.num_nodes == 1


def test_pages_that_share_a_first_token_are_different_children():
    tree = HiRadixTree(2)
    insert(tree, "abab", 0)
    insert(tree, "acac", 2)
    assert shape(tree) == {"abab": [[0, 1], None], "acac": [[2, 3], None]}
    assert lengths(match(tree, "acabxx")) == (2, 2)


def test_match_reads_device_then_host():
    tree = HiRadixTree(1)
    top = insert(tree, "abc", 0).node
    low = insert(tree, "de", 3, below=top).node
    load_all(tree, [top, low], HOST, 50, seq=0)
    evict(tree, DEVICE, 2)
    m = match(tree, "abcde")
    assert shape(tree) == {"abc": [[0, 1, 2], [50, 51, 52]], "abcde": [None, [53, 54]]}
    assert lengths(m) == (3, 5)
    assert lengths(match(tree, "abcdx")) == (3, 4)
    assert lengths(match(tree, "abx")) == (2, 2)


def test_a_node_that_left_the_device_with_its_backup_in_flight_matches_nowhere():
    tree = HiRadixTree(1)
    top = insert(tree, "abc", 0).node
    low = insert(tree, "de", 3, below=top).node
    load_all(tree, [top], HOST, 50, seq=0)
    fill(tree, [low], HOST, 53, seq=1)
    evict(tree, DEVICE, 2)
    assert lengths(match(tree, "abcde")) == (3, 3) and path_of(match(tree, "abcde")) == ["abc"]
    tree.commit(Ticket(D2H, 1), HOST)
    assert lengths(match(tree, "abcde")) == (3, 5)


def test_a_node_that_is_being_loaded_matches_as_on_the_device():
    tree = HiRadixTree(1)
    node = insert(tree, "abc", 0).node
    load_all(tree, [node], HOST, 50, seq=0)
    evict(tree, DEVICE, 3)
    assert lengths(match(tree, "abc")) == (0, 3)
    ticket = fill(tree, [node], DEVICE, 10, seq=0)
    assert lengths(match(tree, "abc")) == (3, 3), "whoever waits for the ticket finds it there"
    assert tree.nodes_of(ticket) == [node] and both(node.tickets) == [ticket, None]


def test_namespaces_never_meet():
    tree = HiRadixTree(1)
    insert(tree, "abc", 0, ns="a")
    insert(tree, "abx", 3, ns="b")
    assert lengths(match(tree, "abc", "a")) == (3, 3)
    assert lengths(match(tree, "abc", "b")) == (2, 2)
    assert lengths(match(tree, "abc", "")) == (0, 0)
    assert list(tree.roots) == ["a", "b"]


# -- insert ----------------------------------------------------------------------------------------------------


def test_publish_creates_one_node():
    tree = HiRadixTree(2)
    result = insert(tree, "aabbcc", 5, fence=3, now=9)
    node = result.node
    assert result.end == 6 and result.created == (node,)
    assert result.frames.tolist() == [5, 6, 7] and result.duplicates.tolist() == []
    assert (text_of(node), node.frames[DEVICE].tolist(), both(node.fences)) == ("aabbcc", [5, 6, 7], [3, -1])
    assert (node.last_access, node.lock) == (9, 0)
    assert tree.resident_pages(DEVICE) == tree.evictable_pages(DEVICE) == 3


def test_publish_nothing():
    tree = HiRadixTree(2)
    top = insert(tree, "aabb", 5).node
    result = insert(tree, "", 0, below=top)
    assert (result.node, result.end, result.created) == (top, 0, ())


def test_publish_what_is_there_returns_duplicates():
    tree = HiRadixTree(1)
    first = insert(tree, "abcd", 0, fence=1)
    again = insert(tree, "abcd", 10, fence=2, now=4)
    assert again.node is first.node and again.end == 4 and again.created == ()
    assert again.frames.tolist() == [0, 1, 2, 3] and again.duplicates.tolist() == [10, 11, 12, 13]
    assert first.node.fences[DEVICE] == 1 and first.node.last_access == 4


def test_publish_splits_where_it_leaves_a_node():
    tree = HiRadixTree(1)
    old = insert(tree, "abcdef", 0).node
    result = insert(tree, "abcxy", 10)
    assert result.end == 5
    assert result.frames.tolist() == [0, 1, 2, 13, 14] and result.duplicates.tolist() == [10, 11, 12]
    assert [text_of(n) for n in result.created] == ["xy"]
    assert shape(tree) == {"abc": [[0, 1, 2], None], "abcdef": [[3, 4, 5], None], "abcxy": [[13, 14], None]}
    assert text_of(old) == "def", "the lower half keeps the identity"


def test_publish_a_prefix_splits_and_creates_nothing():
    tree = HiRadixTree(1)
    old = insert(tree, "abcdef", 0).node
    result = insert(tree, "abc", 10)
    assert result.node is old.parent and text_of(result.node) == "abc" and result.created == ()
    assert result.frames.tolist() == [0, 1, 2] and result.duplicates.tolist() == [10, 11, 12]


def test_publish_keeps_slices_of_the_tokens():
    tree = HiRadixTree(1)
    text = tokens("abcdef")
    node = tree.insert_prefix("", None, text, pages(0, 6), 0, 0).node
    assert np.shares_memory(node.key, text)
    insert(tree, "abcx", 10)
    assert np.shares_memory(node.key, text) and np.shares_memory(node.parent.key, text)


def test_publish_adopts_for_a_node_that_only_the_host_has():
    tree = HiRadixTree(1)
    node = insert(tree, "abcd", 0, fence=1).node
    load_all(tree, [node], HOST, 50, seq=0)
    evict(tree, DEVICE, 4)
    assert shape(tree) == {"abcd": [None, [50, 51, 52, 53]]}
    result = insert(tree, "abcdef", 10, fence=8)
    assert result.end == 6 and result.frames.tolist() == [10, 11, 12, 13, 14, 15]
    assert result.duplicates.tolist() == []
    assert [text_of(n) for n in result.created] == ["abcd", "ef"] and result.created[0] is node
    assert both(node.fences) == [8, 1]
    assert shape(tree) == {"abcd": [[10, 11, 12, 13], [50, 51, 52, 53]], "abcdef": [[14, 15], None]}


def test_publish_adopts_a_part_of_a_host_node():
    tree = HiRadixTree(1)
    node = insert(tree, "abcd", 0).node
    load_all(tree, [node], HOST, 50, seq=0)
    evict(tree, DEVICE, 4)
    result = insert(tree, "abx", 10)
    assert result.frames.tolist() == [10, 11, 12]
    assert shape(tree) == {"ab": [[10, 11], [50, 51]], "abcd": [None, [52, 53]], "abx": [[12], None]}


def test_publish_mixes_duplicates_adopted_and_new():
    tree = HiRadixTree(1)
    top = insert(tree, "ab", 0).node
    low = insert(tree, "cd", 2, below=top).node
    load_all(tree, [top, low], HOST, 50, seq=0)
    evict(tree, DEVICE, 2)
    result = insert(tree, "abcdef", 10)
    assert result.frames.tolist() == [0, 1, 12, 13, 14, 15]
    assert result.duplicates.tolist() == [10, 11]
    assert [text_of(n) for n in result.created] == ["cd", "ef"]


def test_publish_stops_at_a_node_that_is_being_filled():
    tree = HiRadixTree(1)
    top = insert(tree, "ab", 0).node
    low = insert(tree, "cd", 2, below=top).node
    load_all(tree, [top, low], HOST, 50, seq=0)
    evict(tree, DEVICE, 2)
    ticket = fill(tree, [low], DEVICE, 20, seq=0)
    result = insert(tree, "abcdef", 10)
    assert result.end == 2 and result.node is top
    assert result.frames.tolist() == [0, 1] and result.duplicates.tolist() == [10, 11]
    assert insert(tree, "cxx", 12, below=top).end == 0, "not even beside it: the page may be a part of it"
    tree.commit(ticket, DEVICE)
    assert insert(tree, "abcdef", 10).end == 6


def test_a_backup_in_flight_stops_nobody():
    tree = HiRadixTree(1)
    node = insert(tree, "abcd", 0).node
    ticket = fill(tree, [node], HOST, 50, seq=0)
    result = insert(tree, "abxy", 10)
    assert result.end == 4
    assert both(node.tickets) == [None, ticket] and both(node.parent.tickets) == [None, ticket]


# -- locks ------------------------------------------------------------------------------------------------------


def test_a_lock_splits_its_last_node_and_counts_on_all_ancestors():
    tree = HiRadixTree(1)
    top = insert(tree, "ab", 0).node
    low = insert(tree, "cdef", 2, below=top).node
    receipt = tree.lock(match(tree, "abcdx"), launch=5)
    tree.check_invariants()
    upper = receipt.node
    assert text_of(upper) == "cd" and text_of(low) == "ef" and low.parent is upper
    assert (upper.lock, top.lock, low.lock, tree.roots[""].lock) == (1, 1, 0, 1)
    assert (upper.last_access, top.last_access, low.last_access) == (5, 5, 0)
    assert tree.evictable_pages(DEVICE) == 2 and tree.resident_pages(DEVICE) == 6


def test_a_split_under_a_lock_keeps_the_receipt_valid():
    tree = HiRadixTree(1)
    insert(tree, "abcdef", 0)
    receipt = tree.lock(match(tree, "abcdef"), launch=1)
    other = tree.lock(match(tree, "abcx"), launch=2)
    assert text_of(receipt.node) == "def" and text_of(other.node) == "abc"
    assert (other.node.lock, receipt.node.lock) == (2, 1)
    tree.check_invariants()
    assert tree.evictable_pages(DEVICE) == 0
    tree.unlock(receipt, launch=3, fence=7)
    tree.check_invariants()
    assert (other.node.lock, receipt.node.lock) == (1, 0) and tree.evictable_pages(DEVICE) == 3
    tree.unlock(other, launch=4, fence=9)
    tree.check_invariants()
    assert (other.node.last_use, receipt.node.last_use) == (9, 7)
    assert tree.evictable_pages(DEVICE) == 6


def test_a_receipt_is_used_once():
    tree = HiRadixTree(1)
    insert(tree, "abc", 0)
    receipt = tree.lock(match(tree, "abc"), launch=1)
    tree.unlock(receipt, launch=1, fence=-1)
    with pytest.raises(AssertionError, match="not locked"):
        tree.unlock(receipt, launch=1, fence=-1)


def test_locking_a_miss_keeps_the_root():
    tree = HiRadixTree(1)
    receipt = tree.lock(match(tree, "abc", "tenant"), launch=0)
    assert receipt.node is tree.roots["tenant"] and receipt.node.lock == 1
    node = insert(tree, "abc", 0, below=receipt.node, ns="tenant").node
    tree.drop([node], DEVICE)
    assert "tenant" in tree.roots, "a locked root stays, empty or not"
    tree.unlock(receipt, launch=0, fence=-1)
    assert tree.roots == {}


def test_a_root_goes_with_its_last_node():
    tree = HiRadixTree(1)
    insert(tree, "abc", 0, ns="tenant")
    insert(tree, "xyz", 3, ns="tenant")
    evict(tree, DEVICE, 3)
    assert list(tree.roots) == ["tenant"]
    evict(tree, DEVICE, 3)
    assert tree.roots == {} and tree.num_nodes == 0
    tree.check_invariants()


def test_what_locking_a_match_takes_from_the_evictable():
    tree = HiRadixTree(2)
    top = insert(tree, "aabb", 0).node
    insert(tree, "ccddee", 2, below=top)
    assert tree.evictable_pages(DEVICE) == 5
    m = match(tree, "aabbccdd")
    assert tree.evictable_pages_in(m) == 4
    assert tree.evictable_pages_in(match(tree, "aabb")) == 2
    assert tree.evictable_pages_in(match(tree, "zz")) == 0
    receipt = tree.lock(m, launch=0)
    assert tree.evictable_pages(DEVICE) == 1
    assert tree.evictable_pages_in(match(tree, "aabbccddee")) == 1
    assert tree.evictable_pages_in(match(tree, "aabbcc")) == 0
    tree.unlock(receipt, 0, -1)
    assert tree.evictable_pages(DEVICE) == 5


# -- tickets ----------------------------------------------------------------------------------------------------


def test_fill_and_commit_several_nodes_in_order():
    tree = HiRadixTree(2)
    top = insert(tree, "aabb", 0, fence=3).node
    low = insert(tree, "cc", 2, below=top, fence=4).node
    ticket = fill(tree, [top, low], HOST, 50, seq=7)
    assert top.frames[HOST].tolist() == [50, 51] and low.frames[HOST].tolist() == [52]
    assert (top.fences[HOST], low.fences[HOST]) == (3, 4), "as old as its source"
    assert tree.resident_pages(HOST) == 3 and tree.evictable_pages(HOST) == 0
    assert tree.commit(ticket, HOST) == [top, low]
    tree.check_invariants()
    assert tree.evictable_pages(HOST) == 3 and tree.nodes_of(ticket) == [] and both(top.tickets) == [None, None]
    assert tree.commit(ticket, HOST) == []


def test_a_split_under_a_ticket_gives_it_to_both_halves():
    tree = HiRadixTree(1)
    node = insert(tree, "abcd", 0, fence=6).node
    ticket = fill(tree, [node], HOST, 50, seq=0)
    receipt = tree.lock(match(tree, "abx"), launch=0)
    tree.check_invariants()
    upper = receipt.node
    assert both(upper.tickets) == both(node.tickets) == [None, ticket] and both(upper.fences) == both(
        node.fences
    ) == [6, 6]
    assert upper.frames[HOST].tolist() == [50, 51] and node.frames[HOST].tolist() == [52, 53]
    assert set(tree.nodes_of(ticket)) == {upper, node}
    assert set(tree.commit(ticket, HOST)) == {upper, node}
    tree.check_invariants()


def test_a_node_dropped_while_filling_is_not_committed():
    tree = HiRadixTree(1)
    top = insert(tree, "ab", 0).node
    low = insert(tree, "cd", 2, below=top).node
    ticket = fill(tree, [top, low], HOST, 50, seq=0)
    dropped = tree.drop([low], HOST)
    assert filling(dropped) == [([52, 53], ticket)] and dropped.cached == []
    tree.check_invariants()
    assert tree.commit(ticket, HOST) == [top]
    assert shape(tree) == {"ab": [[0, 1], [50, 51]], "abcd": [[2, 3], None]}


def test_a_ticket_without_nodes_is_forgotten():
    tree = HiRadixTree(1)
    node = insert(tree, "ab", 0).node
    for seq in range(3):
        fill(tree, [node], HOST, 50, seq)
        tree.drop([node], HOST)
    assert tree._by_ticket == {}, "failed operations would pile up"


# -- evict ------------------------------------------------------------------------------------------------------


def test_evict_takes_the_leaf_used_least_recently():
    tree = HiRadixTree(1)
    insert(tree, "abc", 0, fence=1, now=1)
    insert(tree, "xy", 3, fence=2, now=2)
    insert(tree, "pq", 5, fence=3, now=3)
    tree.unlock(tree.lock(match(tree, "abc"), launch=4), launch=4, fence=9)
    assert cached(evict(tree, DEVICE, 2)) == [([3, 4], 2)]
    assert cached(evict(tree, DEVICE, 2)) == [([5, 6], 3)]
    assert cached(evict(tree, DEVICE, 3)) == [([0, 1, 2], 9)], "the reader's fence counts"
    assert cached(evict(tree, DEVICE, 1)) == []
    tree.check_invariants()


def test_evict_goes_from_the_leaves_up():
    tree = HiRadixTree(1)
    top = insert(tree, "ab", 0, now=1).node
    insert(tree, "cd", 2, below=top, now=5)
    insert(tree, "xy", 4, now=3)
    assert cached(evict(tree, DEVICE, 4)) == [([4, 5], 0), ([2, 3], 0)]
    assert cached(evict(tree, DEVICE, 9)) == [([0, 1], 0)]
    assert tree.num_nodes == 0


def test_evict_splits_the_last_leaf():
    tree = HiRadixTree(2)
    node = insert(tree, "aabbccdd", 0).node
    assert cached(evict(tree, DEVICE, 1)) == [([3], 0)]
    assert shape(tree) == {"aabbcc": [[0, 1, 2], None]}
    assert node.parent is None, "the lower half is the old node, and it is gone"
    assert cached(evict(tree, DEVICE, 2)) == [([1, 2], 0)]
    assert shape(tree) == {"aa": [[0], None]}


def test_evict_leaves_locked_paths():
    tree = HiRadixTree(1)
    top = insert(tree, "ab", 0).node
    insert(tree, "cd", 2, below=top)
    receipt = tree.lock(match(tree, "ab"), launch=0)
    assert cached(evict(tree, DEVICE, 10)) == [([2, 3], 0)]
    tree.unlock(receipt, launch=0, fence=4)
    assert cached(evict(tree, DEVICE, 10)) == [([0, 1], 4)]


def test_evict_leaves_kept_nodes():
    tree = HiRadixTree(1)
    top = insert(tree, "ab", 0).node
    low = insert(tree, "cd", 2, below=top).node
    insert(tree, "xy", 4, now=7)
    load_all(tree, [top, low], HOST, 50, seq=0)
    load_all(tree, [tree.match("", tokens("xy")).path[0]], HOST, 54, seq=1)
    assert cached(evict(tree, HOST, 10, {top.id, low.id})) == [([54, 55], -1)]
    tree.check_invariants()
    assert tree.evictable_pages(HOST, [top, low]) == 0 and tree.evictable_pages(HOST, [low]) == 2
    assert cached(evict(tree, HOST, 10, {low.id})) == [([50, 51], -1)], "the prefix of a kept node need not be kept"
    tree.check_invariants()
    assert cached(evict(tree, HOST, 10)) == [([52, 53], -1)], "kept once, not for ever"


def test_evict_from_the_device_leaves_the_host_copy():
    tree = HiRadixTree(1)
    node = insert(tree, "abcd", 0).node
    load_all(tree, [node], HOST, 50, seq=0)
    assert cached(evict(tree, DEVICE, 3)) == [([1, 2, 3], 0)]
    assert shape(tree) == {"a": [[0], [50]], "abcd": [None, [51, 52, 53]]}
    assert lengths(match(tree, "abcd")) == (1, 4)


def test_evict_from_the_host_takes_locked_nodes_too():
    """A lock keeps device frames; whoever reads host frames pins them."""
    tree = HiRadixTree(1)
    node = insert(tree, "ab", 0).node
    load_all(tree, [node], HOST, 50, seq=0)
    tree.lock(match(tree, "ab"), launch=0)
    assert cached(evict(tree, HOST, 2)) == [([50, 51], -1)]
    assert shape(tree) == {"ab": [[0, 1], None]}


def test_evict_spares_what_is_being_filled_and_the_source_of_a_load():
    tree = HiRadixTree(1)
    node = insert(tree, "ab", 0).node
    backup = fill(tree, [node], HOST, 50, seq=0)
    assert cached(evict(tree, HOST, 2)) == []
    tree.commit(backup, HOST)
    evict(tree, DEVICE, 2)
    load = fill(tree, [node], DEVICE, 10, seq=0)
    assert cached(evict(tree, DEVICE, 2)) == [] and cached(evict(tree, HOST, 2)) == []
    tree.commit(load, DEVICE)
    assert cached(evict(tree, HOST, 2)) == [([50, 51], -1)]
    assert cached(evict(tree, DEVICE, 2)) == [([10, 11], 0)]
    assert tree.num_nodes == 0


def test_what_was_locked_to_be_loaded_may_leave_the_host_once_somebody_computed_it():
    tree = HiRadixTree(1)
    node = insert(tree, "ab", 0).node
    load_all(tree, [node], HOST, 100, 0)
    evict(tree, DEVICE, 2)
    tree.lock(match(tree, "ab"), 0)
    assert cached(evict(tree, HOST, 2)) == [], "it is about to be loaded"
    insert(tree, "ab", 7, fence=1)
    tree.check_invariants()
    assert cached(evict(tree, HOST, 2)) == [([100, 101], -1)]


def test_a_parent_can_be_evicted_when_its_last_resident_child_has_gone():
    tree = HiRadixTree(1)
    top = insert(tree, "ab", 0).node
    low = insert(tree, "cd", 2, below=top).node
    load_all(tree, [top, low], HOST, 50, seq=0)
    evict(tree, DEVICE, 2)
    assert low.parent is top, "it is on the host still"
    assert cached(evict(tree, DEVICE, 2)) == [([0, 1], 0)]
    assert shape(tree) == {"ab": [None, [50, 51]], "abcd": [None, [52, 53]]}


def test_eviction_candidates_do_not_pile_up():
    tree = HiRadixTree(1)
    insert(tree, "abc", 0)
    for now in range(2000):
        tree.unlock(tree.lock(match(tree, "abc"), now), now, -1)
    assert sum(map(len, tree.order._heaps[DEVICE].ranks().values())) < 100
    assert cached(evict(tree, DEVICE, 3)) == [([0, 1, 2], 0)]


# -- eviction on peers -------------------------------------------------------------------------------------------


def move(tree: HiRadixTree, nodes: list[Node], source: Tier, tier: Tier, first: int) -> None:
    """Fill nodes between device and peer, and commit."""
    ticket = Ticket(P2D if source == PEER else D2P, first)
    n = sum(len(node.key) for node in nodes) // tree.page_size
    tree.begin_fill(nodes, source, tier, pages(first, n), ticket)
    tree.check_invariants()
    tree.commit(ticket, tier)
    tree.check_invariants()


def three_on_a_peer(policy: str = "lru") -> tuple[HiRadixTree, list[Node]]:
    """On device 0-5, on the peer 20-25; the first is the oldest."""
    tree = HiRadixTree(1, policy)
    nodes = [insert(tree, text, 2 * i, now=i).node for i, text in enumerate(("aa", "bb", "cc"))]
    for i, node in enumerate(nodes):
        move(tree, [node], DEVICE, PEER, 20 + 2 * i)
    return tree, nodes


def frames_given_up(tree: HiRadixTree, tier: Tier, *num_pages: int) -> list[int]:
    found = []
    for n in num_pages:
        found += [f for frames, _ in cached(evict(tree, tier, n)) for f in frames]
        tree.check_invariants()
    return found


def test_a_peer_gives_up_what_the_device_has_before_what_it_lacks():
    tree, (a, b, _) = three_on_a_peer()
    assert frames_given_up(tree, DEVICE, 4) == [0, 1, 2, 3]
    # Only c is on the device still, and the youngest.
    assert frames_given_up(tree, PEER, 1, 1, 2, 2) == [25, 24, 20, 21, 22, 23]
    assert a.parent is None and b.parent is None and match(tree, "cc").device_len == 2


def test_what_the_device_has_goes_from_a_peer_by_age():
    tree, _ = three_on_a_peer()
    tree.unlock(tree.lock(match(tree, "aa"), 9), 9, -1)
    assert frames_given_up(tree, PEER, 2, 2, 2) == [22, 23, 24, 25, 20, 21]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_the_device_comes_before_the_policy(policy: str):
    tree, (_, _, c) = three_on_a_peer(policy)
    frames_given_up(tree, DEVICE, 4)
    tree.count_use(c, priority=5)
    assert frames_given_up(tree, PEER, 2, 2, 2) == [24, 25, 20, 21, 22, 23]


@pytest.mark.parametrize("loaded", [True, False])
def test_what_comes_back_to_the_device_goes_first_from_then_on(loaded: bool):
    """Loaded from the peer, or computed anew."""
    tree, (_, _, c) = three_on_a_peer()
    assert frames_given_up(tree, DEVICE, 6) == [0, 1, 2, 3, 4, 5]
    assert frames_given_up(tree, PEER, 2) == [20, 21]
    if loaded:
        move(tree, [c], PEER, DEVICE, 10)
    else:
        insert(tree, "cc", 10, now=9)
    assert frames_given_up(tree, PEER, 2, 2) == [24, 25, 22, 23]
    assert match(tree, "cc").device_len == 2


def test_what_the_device_evicts_loses_its_place_on_the_peer():
    tree, _ = three_on_a_peer()
    assert frames_given_up(tree, DEVICE, 2) == [0, 1]
    assert frames_given_up(tree, PEER, 2, 2, 2) == [22, 23, 24, 25, 20, 21]


def test_a_peer_gives_up_what_the_device_has_also_above_what_only_the_peer_has():
    tree = HiRadixTree(1)
    top = insert(tree, "aa", 0, now=1).node
    low = insert(tree, "bb", 2, below=top, now=1).node
    others = [insert(tree, text, first, now=now).node for text, first, now in (("xx", 4, 0), ("yy", 6, 2))]
    for node, first in zip(others, (40, 60)):
        move(tree, [node], DEVICE, PEER, first)
    move(tree, [top, low], DEVICE, PEER, 20)
    tree.unlock(tree.lock(match(tree, "aa"), 9), 9, -1)
    for node in (low, *others):
        tree.drop([node], DEVICE)
    # `top` is the youngest, and no leaf there.
    assert frames_given_up(tree, PEER, 2, 2, 2, 2) == [20, 21, 40, 41, 22, 23, 60, 61]


def test_a_peer_gives_up_what_is_in_use_on_the_device():
    tree, _ = three_on_a_peer()
    frames_given_up(tree, DEVICE, 4)
    tree.lock(match(tree, "cc"), 5)
    assert frames_given_up(tree, PEER, 2, 2, 2) == [24, 25, 20, 21, 22, 23]


def test_a_load_that_failed_leaves_the_order_as_it_was():
    tree, (_, _, c) = three_on_a_peer()
    frames_given_up(tree, DEVICE, 6)
    tree.begin_fill([c], PEER, DEVICE, pages(10, 2), Ticket(P2D, 9))
    assert filling(tree.drop([c], DEVICE)) == [([10, 11], Ticket(P2D, 9))]
    assert frames_given_up(tree, PEER, 2, 2, 2) == [20, 21, 22, 23, 24, 25]


def test_the_host_gives_up_by_age_whatever_the_device_has():
    tree = HiRadixTree(1)
    nodes = [insert(tree, text, 2 * i, now=i).node for i, text in enumerate(("aa", "bb"))]
    for i, node in enumerate(nodes):
        load_all(tree, [node], HOST, 50 + 2 * i, seq=i)
    assert frames_given_up(tree, DEVICE, 2) == [0, 1]
    assert frames_given_up(tree, HOST, 2, 2) == [50, 51, 52, 53]


# -- drop -------------------------------------------------------------------------------------------------------


def test_drop_takes_a_subtree_off_the_device_and_one_node_off_others():
    tree = HiRadixTree(1)
    top = insert(tree, "ab", 0, fence=1).node
    low = insert(tree, "cd", 2, below=top, fence=2).node
    insert(tree, "xy", 4, below=top, fence=3)
    load_all(tree, [top, low], HOST, 50, seq=0)
    dropped = tree.drop([low], DEVICE)
    assert cached(dropped) == [([2, 3], 2)]
    assert shape(tree) == {"ab": [[0, 1], [50, 51]], "abcd": [None, [52, 53]], "abxy": [[4, 5], None]}
    assert sorted(cached(tree.drop([top], DEVICE))) == [([0, 1], 1), ([4, 5], 3)]
    assert shape(tree) == {"ab": [None, [50, 51]], "abcd": [None, [52, 53]]}
    assert cached(tree.drop([top], HOST)) == [([50, 51], -1)]
    assert shape(tree) == {"ab": [None, None], "abcd": [None, [52, 53]]}, "a hole"
    assert cached(tree.drop([top], HOST)) == [], "what is gone drops nothing"
    assert cached(tree.drop([low], HOST)) == [([52, 53], -1)]
    assert tree.num_nodes == 0 and tree.roots == {}, "the hole goes with the last node below it"
    assert cached(tree.drop([low], HOST)) == []


def test_drop_refuses_locked_nodes():
    tree = HiRadixTree(1)
    node = insert(tree, "ab", 0).node
    tree.lock(match(tree, "ab"), launch=0)
    with pytest.raises(AssertionError, match="end the holds of its readers first"):
        tree.drop([node], DEVICE)


# -- compact ----------------------------------------------------------------------------------------------------


def chain(tree: HiRadixTree, *texts: str, fence: int = 0) -> list[Node]:
    nodes: list[Node] = []
    first = 0
    for text in texts:
        nodes.append(insert(tree, text, first, below=nodes[-1] if nodes else None, fence=fence).node)
        first += len(text) // tree.page_size
    return nodes


def test_compact_merges_a_chain_into_its_end():
    tree = HiRadixTree(2)
    top, middle, low = chain(tree, "aabb", "cc", "ddee")
    insert(tree, "xx", 20, below=low, fence=3)
    insert(tree, "yy", 21, below=low, fence=3)
    top.last_use, top.fences[DEVICE] = 7, 2
    tree.compact(low, done=3)
    assert shape(tree) == {
        "aabbccddee": [[0, 1, 2, 3, 4], None],
        "aabbccddeexx": [[20], None],
        "aabbccddeeyy": [[21], None],
    }
    assert low.parent is tree.roots[""] and (low.last_use, low.fences[DEVICE]) == (7, 2)
    assert top.parent is None and middle.parent is None
    assert lengths(match(tree, "aabbccddeeyy")) == (12, 12)
    assert cached(evict(tree, DEVICE, 9)) == [([20], 3), ([21], 3), ([0, 1, 2, 3, 4], 7)]


def test_compact_joins_neighbours_without_a_copy():
    tree = HiRadixTree(1)
    text = tokens("abcdef")
    top = tree.insert_prefix("", None, text[:2], pages(0, 2), 0, 0).node
    low = tree.insert_prefix("", top, text[2:], pages(2, 4), 0, 0).node
    tree.compact(low, done=1)
    assert text_of(low) == "abcdef" and np.shares_memory(low.key, text)
    top = tree.insert_prefix("", None, tokens("xy"), pages(6, 2), 0, 0).node
    low = tree.insert_prefix("", top, tokens("zz"), pages(8, 2), 0, 0).node
    tree.compact(low, done=1)
    assert text_of(low) == "xyzz" and shape(tree)["xyzz"] == [[6, 7, 8, 9], None]


def test_compact_stops_at_a_fork():
    tree = HiRadixTree(1)
    top, low = chain(tree, "ab", "cd")
    insert(tree, "xy", 10, below=top)
    tree.compact(low, done=9)
    assert list(shape(tree)) == ["ab", "abcd", "abxy"]


def test_compact_stops_at_a_lock_that_ends_inside():
    tree = HiRadixTree(1)
    _, _, low = chain(tree, "ab", "cd", "ef")
    inside = tree.lock(match(tree, "ab"), launch=0)
    end = tree.lock(match(tree, "abcdef"), launch=0)
    tree.compact(low, done=9)
    assert list(shape(tree)) == ["ab", "abcdef"] and low.lock == 1 and inside.node.lock == 2
    tree.unlock(inside, launch=0, fence=-1)
    tree.compact(low, done=9)
    assert list(shape(tree)) == ["abcdef"] and low.lock == 1 and end.node is low
    tree.unlock(end, launch=0, fence=-1)
    tree.check_invariants()


def test_compact_waits_for_launches_and_transfers():
    tree = HiRadixTree(1)
    top, low = chain(tree, "ab", "cd", fence=5)
    tree.compact(low, done=5)
    assert tree.num_nodes == 2
    ticket = fill(tree, [top], HOST, 50, seq=0)
    tree.compact(low, done=6)
    assert tree.num_nodes == 2, "the upper node is being filled"
    tree.commit(ticket, HOST)
    tree.compact(low, done=6)
    assert tree.num_nodes == 2, "one has a host copy, one has not"
    load_all(tree, [low], HOST, 52, seq=1)
    tree.compact(low, done=6)
    assert shape(tree) == {"abcd": [[0, 1, 2, 3], [50, 51, 52, 53]]}
    assert cached(evict(tree, DEVICE, 4)) == [([0, 1, 2, 3], 5)]
    assert cached(evict(tree, HOST, 4)) == [([50, 51, 52, 53], -1)]
    assert tree.num_nodes == 0


def test_compact_leaves_out_the_end_that_is_in_flight():
    tree = HiRadixTree(1)
    _, middle = chain(tree, "ab", "cd")
    low = insert(tree, "ef", 10, below=middle, fence=7).node
    tree.compact(low, done=7)
    assert list(shape(tree)) == ["abcd", "abcdef"] and low.parent is middle
    tree.compact(low, done=8)
    assert shape(tree) == {"abcdef": [[0, 1, 2, 3, 10, 11], None]}


def test_compact_a_host_only_chain():
    tree = HiRadixTree(1)
    top, low = chain(tree, "ab", "cd")
    load_all(tree, [top, low], HOST, 50, seq=0)
    evict(tree, DEVICE, 4)
    tree.compact(low, done=1)
    assert shape(tree) == {"abcd": [None, [50, 51, 52, 53]]}


def test_a_compacted_node_can_be_split_again():
    tree = HiRadixTree(1)
    _, low = chain(tree, "ab", "cd")
    tree.compact(low, done=1)
    insert(tree, "abcx", 10)
    assert shape(tree) == {"abc": [[0, 1, 2], None], "abcd": [[3], None], "abcx": [[13], None]}


# -- the invariants themselves ----------------------------------------------------------------------------------


def lock_out_of_nothing(tree: HiRadixTree, top: Node, low: Node) -> None:
    low.lock = 3


def forget_a_page(tree: HiRadixTree, top: Node, low: Node) -> None:
    low.frames[DEVICE] = low.frames[DEVICE][:-1]


def orphan_on_the_device(tree: HiRadixTree, top: Node, low: Node) -> None:
    top.frames[DEVICE] = None


def wrong_count(tree: HiRadixTree, top: Node, low: Node) -> None:
    tree.counts.resident[DEVICE] += 1


def stray_ticket(tree: HiRadixTree, top: Node, low: Node) -> None:
    low.tickets[HOST] = Ticket(D2H, 9)


def not_offered(tree: HiRadixTree, top: Node, low: Node) -> None:
    tree.order._heaps[DEVICE]._entries.clear()


def a_hole_with_nothing_below_it(tree: HiRadixTree, top: Node, low: Node) -> None:
    low.frames[DEVICE] = None
    top.num_device_children = 0
    tree.counts.resident[DEVICE] -= 2
    tree.counts.evictable[DEVICE] -= 2


def a_locked_hole(tree: HiRadixTree, top: Node, low: Node) -> None:
    load_all(tree, [low], HOST, 50, seq=0)
    tree.drop([top], DEVICE)
    tree.check_invariants()
    top.lock = 1


def a_hole_above_what_the_device_has(tree: HiRadixTree, top: Node, low: Node) -> None:
    load_all(tree, [low], HOST, 50, seq=0)
    tree.drop([low], DEVICE)
    tree.drop([top], DEVICE)
    tree.check_invariants()
    tree._set_frames(low, DEVICE, pages(2, 2), None, 0)
    tree._offer(low, DEVICE)


def lossy_above_exact(tree: HiRadixTree, top: Node, low: Node) -> None:
    top.is_lossy = True


def miscounted_nodes(tree: HiRadixTree, top: Node, low: Node) -> None:
    tree.num_nodes += 1


def wrong_key(tree: HiRadixTree, top: Node, low: Node) -> None:
    low.key = tokens("zz")


@pytest.mark.parametrize(
    "corrupt",
    [
        lock_out_of_nothing,
        forget_a_page,
        orphan_on_the_device,
        wrong_count,
        stray_ticket,
        not_offered,
        a_hole_with_nothing_below_it,
        a_locked_hole,
        a_hole_above_what_the_device_has,
        lossy_above_exact,
        miscounted_nodes,
        wrong_key,
    ],
)
def test_check_invariants_notices(corrupt):
    tree = HiRadixTree(1)
    top, low = chain(tree, "ab", "cd")
    tree.check_invariants()
    corrupt(tree, top, low)
    with pytest.raises((AssertionError, KeyError)):
        tree.check_invariants()


# -- blocks, as storage names them --------------------------------------------------------------------------------

NAMES = BlockKeys(b"secret", 4)


def named_tree(page_size: int = 1) -> HiRadixTree:
    tree = HiRadixTree(page_size)
    tree.rename_blocks(NAMES)
    return tree


def names_of(node: Node) -> list[str]:
    """A node's names, told by the whole text up to the end of each block."""
    text, step = "", node
    while step is not None:
        text, step = text_of(step) + text, step.parent
    known = {k.tobytes(): text[4 * i : 4 * i + 4] for i, k in enumerate(NAMES.of_prompt("", tokens(text)))}
    return [known[k.tobytes()] for k in node.block_keys]


def path_names(tree: HiRadixTree, text: str) -> list[list[str] | None]:
    tree.check_invariants()
    path = tree.match("", tokens(text), fetching=True).path
    return [None if n.block_keys is None else names_of(n) for n in path]


def fetch(tree: HiRadixTree, text: str, first: int, seq: int = 0, is_lossy: bool = False, now: int = 1) -> Node:
    """Fetch what lies behind the match, to the end of the text."""
    m = tree.match("", tokens(text), fetching=True)
    keys = NAMES.of_prompt("", tokens(text))[m.total_len // 4 :]
    n = (len(text) - m.total_len) // tree.page_size
    run = FilledRun(tokens(text[m.total_len :]), pages(first, n), Ticket(FETCH, seq), NO_LAUNCH)
    node, _ = tree.begin_fetch(m, run, keys, now, is_lossy)
    tree.check_invariants()
    return node


def test_a_block_belongs_to_the_node_that_holds_its_last_token():
    tree = named_tree()
    top = insert(tree, "aaaabb", 0).node
    middle = insert(tree, "b", 6, below=top).node
    low = insert(tree, "bccccdddde", 7, below=middle).node
    tree.names.name_path(low)
    assert path_names(tree, "aaaabbbbccccdddde") == [["aaaa"], [], ["bbbb", "cccc", "dddd"]]
    assert [n.stored.tolist() for n in (top, middle, low)] == [[False], [], [False] * 3]


def test_names_are_given_piece_by_piece_and_once():
    tree = named_tree()
    top = insert(tree, "aaaabb", 0).node
    tree.names.name_path(top)
    keys = top.block_keys
    low = insert(tree, "bbccccd", 6, below=top).node
    assert low.block_keys is None
    tree.names.name_path(low)
    assert path_names(tree, "aaaabbbbccccd") == [["aaaa"], ["bbbb", "cccc"]]
    assert top.block_keys is keys


def test_names_of_namespaces_differ():
    tree = named_tree()
    nodes = [insert(tree, "aaaa", 4 * i, ns=ns).node for i, ns in enumerate(("", "tenant"))]
    for node in nodes:
        tree.names.name_path(node)
    assert nodes[0].block_keys.tobytes() != nodes[1].block_keys.tobytes()


def test_a_split_slices_names_and_what_is_stored():
    tree = named_tree()
    node = insert(tree, "aaaabbbbccccd", 0).node
    tree.names.name_path(node)
    node.stored[:] = [True, False, True]
    tree.unlock(tree.lock(match(tree, "aaaabb"), 0), 0, -1)
    upper = match(tree, "aaaabb").path[-1]
    assert path_names(tree, "aaaabbbbccccd") == [["aaaa"], ["bbbb", "cccc"]]
    assert (upper.stored.tolist(), node.stored.tolist()) == ([True], [False, True])
    node.stored[0] = True
    upper.stored[0] = False
    tree.compact(node, 10)
    assert path_names(tree, "aaaabbbbccccd") == [["aaaa", "bbbb", "cccc"]]
    assert node.stored.tolist() == [False, True, True]


def test_what_is_named_and_what_is_not_are_not_merged():
    tree = named_tree()
    top = insert(tree, "aaaa", 0).node
    low = insert(tree, "bbbb", 4, below=top).node
    tree.names.name_path(top)
    tree.compact(low, 10)
    assert tree.num_nodes == 2
    tree.names.name_path(low)
    tree.compact(low, 10)
    assert path_names(tree, "aaaabbbb") == [["aaaa", "bbbb"]]


def test_another_storage_forgets_all_names():
    tree = named_tree()
    node = insert(tree, "aaaabbbb", 0).node
    tree.names.name_path(node)
    tree.rename_blocks(BlockKeys(b"other", 8))
    assert node.block_keys is None and node.stored is None
    tree.names.name_path(node)
    assert len(node.block_keys) == 1
    tree.rename_blocks(None)
    assert tree.names.keys is None and node.block_keys is None


def test_what_is_fetched_matches_for_those_who_wait_alone():
    tree = named_tree()
    node = fetch(tree, "aaaabbbb", 50)
    assert shape(tree) == {"aaaabbbb": [None, [50, 51, 52, 53, 54, 55, 56, 57]]}
    assert both(node.tickets) == [None, Ticket(FETCH, 0)] and node.stored.tolist() == [True, True]
    assert lengths(match(tree, "aaaabbbb")) == (0, 0)
    assert tree.match("", tokens("aaaabbxx"), fetching=True).total_len == 6
    assert tree.resident_pages(HOST) == 8 and tree.evictable_pages(HOST) == 0
    assert tree.commit(Ticket(FETCH, 0), HOST) == [node]
    assert lengths(match(tree, "aaaabbbb")) == (0, 8) and tree.evictable_pages(HOST) == 8


def test_a_fetch_continues_a_path_within_a_block():
    tree = named_tree()
    load_all(tree, [insert(tree, "aaaabbxx", 0).node], HOST, 50, seq=0)
    node = fetch(tree, "aaaabbbbcccc", 60)
    assert text_of(node) == "bbcccc" and path_names(tree, "aaaabbbbcccc") == [None, ["bbbb", "cccc"]]
    tree.names.name_path(node)
    assert path_names(tree, "aaaabbbbcccc") == [["aaaa"], ["bbbb", "cccc"]]


def test_a_fetch_continues_what_the_host_lacks():
    tree = named_tree()
    top = insert(tree, "aa", 0).node
    fetch(tree, "aaaabbbb", 50)
    assert shape(tree) == {"aa": [[0, 1], None], "aaaabbbb": [None, list(range(50, 56))]}
    assert cached(evict(tree, DEVICE, 2)) == [([0, 1], 0)] and top.frames == [None] * 3, "a hole above a fetch"
    tree.check_invariants()
    tree.commit(Ticket(FETCH, 0), HOST)
    assert lengths(match(tree, "aaaabbbb")) == (0, 0)
    insert(tree, "aa", 10)
    assert lengths(match(tree, "aaaabbbb")) == (2, 8)


def test_cut_drops_what_did_not_come():
    tree = named_tree()
    node = fetch(tree, "aaaabbbbcccc", 50)
    assert filling(tree.cut(Ticket(FETCH, 0), HOST, 8)) == [([58, 59, 60, 61], Ticket(FETCH, 0))]
    (kept,) = tree.commit(Ticket(FETCH, 0), HOST)
    assert kept is not node and shape(tree) == {"aaaabbbb": [None, list(range(50, 58))]}
    assert path_names(tree, "aaaabbbb") == [["aaaa", "bbbb"]]


def test_cut_of_everything_and_of_nothing():
    tree = named_tree()
    fetch(tree, "aaaabbbb", 50)
    dropped = tree.cut(Ticket(FETCH, 0), HOST, 8)
    assert dropped == Dropped() and tree.num_nodes == 1
    assert len(filling(tree.cut(Ticket(FETCH, 0), HOST, 0))) == 1
    assert tree.num_nodes == 0 and not tree.roots and tree.nodes_of(Ticket(FETCH, 0)) == []


def test_cut_takes_what_is_fetched_below_and_leaves_what_was_computed():
    tree = named_tree()
    top = fetch(tree, "aaaabbbb", 50)
    fetch(tree, "aaaabbbbcccc", 60, seq=1)
    insert(tree, "aaaabb", 0)
    dropped = tree.cut(Ticket(FETCH, 0), HOST, 4)
    tree.check_invariants()
    assert sorted(t.seq for _, t in dropped.filling) == [0, 0, 1]
    assert [text_of(n) for n in dropped.staying if n.parent is not None] == ["bb"], "it stays on the device"
    tree.commit(Ticket(FETCH, 0), HOST)
    assert shape(tree) == {"aaaa": [[0, 1, 2, 3], [50, 51, 52, 53]], "aaaabb": [[4, 5], None]}
    assert top.frames == [None] * 3 and tree.nodes_of(Ticket(FETCH, 1)) == []


def test_what_is_computed_while_it_is_fetched_is_on_both():
    tree = named_tree()
    fetch(tree, "aaaabbbb", 50)
    result = insert(tree, "aaaab", 0)
    assert [len(n.key) for n in result.created] == [5] and not len(result.duplicates)
    assert lengths(match(tree, "aaaabbbb")) == (5, 5)
    assert path_names(tree, "aaaabbbb") == [["aaaa"], ["bbbb"]]
    assert len(tree.nodes_of(Ticket(FETCH, 0))) == 2
    tree.commit(Ticket(FETCH, 0), HOST)
    assert lengths(match(tree, "aaaabbbb")) == (5, 8)


def test_next_unmatched_is_what_left_the_device_while_its_backup_is_under_way():
    tree = named_tree()
    top = insert(tree, "aaaa", 0).node
    low = insert(tree, "bbbb", 4, below=top).node
    load_all(tree, [top], HOST, 50, seq=0)
    fill(tree, [low], HOST, 54, seq=1)

    def next_unmatched(text: str) -> Node | None:
        return tree.next_unmatched(tree.match("", tokens(text), fetching=True), tokens(text))

    assert next_unmatched("aaaabbbbcccc") is None, "it is on the device"
    evict(tree, DEVICE, 4)
    assert next_unmatched("aaaabbbb") is low and next_unmatched("aaaabxxx") is low
    assert [next_unmatched(text) for text in ("aaxx", "aaaaxxxx", "xxxx")] == [None] * 3
    tree.commit(Ticket(D2H, 1), HOST)
    assert next_unmatched("aaaabbbbcccc") is None
    tree.drop([top], HOST)
    tree.drop([top], DEVICE)
    assert next_unmatched("aaaabbbb") is top and next_unmatched("aaxx") is top, "a hole"


def test_the_least_important_goes_first():
    tree = HiRadixTree(1, "priority")
    insert(tree, "aaaa", 0, now=1)
    insert(tree, "bbbb", 4, now=2)
    insert(tree, "cccc", 8, now=3)
    for now, text, priority in ((4, "aa", 5), (5, "bbbb", 1), (6, "aaaa", 0)):
        receipt = tree.lock(match(tree, text), now)
        tree.count_use(receipt.node, priority)
        tree.unlock(receipt, now, -1)
    tree.check_invariants()
    gone = [cached(evict(tree, DEVICE, 2)) for _ in range(6)]
    frames = [f for drops in gone for ids, _ in drops for f in ids]
    assert frames == [10, 11, 8, 9, 2, 3, 6, 7, 4, 5, 0, 1], "unused, then by priority, then the oldest"


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_what_is_retired_goes_first(policy: str):
    tree = HiRadixTree(1, policy)
    insert(tree, "aabb", 0, now=1)
    node = insert(tree, "ccdd", 10, ns="gone", now=2).node
    insert(tree, "ccddee", 20, ns="gone", now=3)
    for _ in range(3):
        tree.count_use(node, priority=5)
    evict(tree, Tier.DEVICE, 0)
    tree.retire("gone")
    tree.retire("never there")
    assert sorted(f for frames, _ in cached(evict(tree, Tier.DEVICE, 6)) for f in frames) == [10, 11, 12, 13, 24, 25]
    assert list(tree.roots) == [""]
    tree.check_invariants()


def test_what_is_retired_goes_first_from_a_peer_too():
    tree, _ = three_on_a_peer()
    node = insert(tree, "dd", 10, ns="gone", now=9).node
    move(tree, [node], DEVICE, PEER, 40)
    tree.drop([node], DEVICE)
    tree.retire("gone")
    assert frames_given_up(tree, PEER, 2, 2) == [40, 41, 20, 21]


def test_what_is_in_use_is_not_retired():
    tree = HiRadixTree(1)
    insert(tree, "aabb", 0)
    tree.lock(match(tree, "aabb"), 1)
    with pytest.raises(AssertionError, match="in use"):
        tree.retire("")


def test_what_is_retired_goes_first_whatever_the_policy(monkeypatch: pytest.MonkeyPatch):
    """Also with a policy from outside that gives up the newest."""
    monkeypatch.setitem(EVICTION_POLICIES, "newest", lambda node, last_access: (-last_access,))
    tree = HiRadixTree(1, "newest")
    tree.insert_prefix("gone", None, tokens("abc"), pages(0, 3), 0, 1)
    insert(tree, "xyz", 3)
    tree.retire("gone")
    tree.check_invariants()
    assert cached(evict(tree, DEVICE, 3)) == [([0, 1, 2], 0)]
