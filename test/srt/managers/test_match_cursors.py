"""What is remembered of a queued request holds exactly as long as a fresh match would say the same."""

from __future__ import annotations

import numpy as np

from sglang.srt.managers.match_cursors import MatchCursors
from sglang.srt.managers.schedule_policy import Candidate
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.transfer import D2H, H2D, Ticket, Tier
from support.evictions import evict


def tokens(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)


class Rig:
    """A tree of letters and one request that waits for "abcdef" and its own last token."""

    def __init__(self) -> None:
        self.tree = HiRadixTree(1)
        self.cursors = MatchCursors(self.tree)
        self.num_frames = 0
        self.tickets = 0

    def insert(self, text: str, namespace: str = "") -> Node:
        frames = np.arange(self.num_frames, self.num_frames + len(text), dtype=np.int32)
        self.num_frames += len(text)
        return self.tree.insert_prefix(namespace, None, tokens(text), frames, 0, 0).node

    def back_up(self, node: Node, commit: bool = True) -> Ticket:
        self.tickets += 1
        ticket = Ticket(D2H, self.tickets)
        self.tree.begin_fill(
            [node], Tier.DEVICE, Tier.HOST, np.arange(len(node.key), dtype=np.int32) + 100 * self.tickets, ticket
        )
        if commit:
            self.tree.commit(ticket, Tier.HOST)
        return ticket

    def find(self) -> Candidate:
        return self.cursors.find("r", "", tokens("abcdef"), 7)

    @property
    def is_known(self) -> bool:
        self.cursors.check_invariants({"r": ("", tokens("abcdef"), 7)})
        return "r" in self.cursors.candidates


def test_what_is_cached_is_neither_loaded_nor_computed() -> None:
    rig = Rig()
    assert rig.find() == Candidate(7)
    node = rig.insert("abcd")
    assert not rig.is_known
    assert rig.find() == Candidate(3, prefix=4)
    rig.back_up(node)
    evict(rig.tree, Tier.DEVICE, 4)
    assert not rig.is_known
    assert rig.find() == Candidate(3, ((node.id, 4),), prefix=4)
    ticket = Ticket(H2D, 0)
    rig.tree.begin_fill([node], Tier.HOST, Tier.DEVICE, np.arange(4, dtype=np.int32) + 50, ticket)
    assert not rig.is_known
    assert rig.find() == Candidate(3, prefix=4, loading=(ticket,)), (
        "what is on its way to the device is loaded by somebody else"
    )


def test_only_a_child_that_continues_the_match_matters() -> None:
    rig = Rig()
    rig.insert("abcd")
    rig.find()
    rig.insert("abcdxyz")
    rig.insert("zzz")
    rig.insert("abcdef", namespace="tenant")
    assert rig.is_known
    rig.insert("abcdeq")
    assert not rig.is_known
    assert rig.find() == Candidate(2, prefix=5)


def test_the_first_child_of_a_namespace_and_of_another() -> None:
    rig = Rig()
    rig.find()
    rig.insert("ab", namespace="tenant")
    assert rig.is_known
    rig.insert("ab")
    assert not rig.is_known


def test_a_node_that_is_cut_or_evicted_is_matched_again() -> None:
    rig = Rig()
    rig.insert("abcdefgh")
    assert rig.find() == Candidate(1, prefix=6)
    other = rig.insert("abq")
    assert not rig.is_known
    rig.find()
    rig.tree.drop([other], Tier.DEVICE)
    assert rig.is_known
    evict(rig.tree, Tier.DEVICE, 4)
    assert not rig.is_known
    assert rig.find() == Candidate(3, prefix=4)


def test_a_backup_that_arrives_after_the_device_gave_up_its_copy() -> None:
    rig = Rig()
    node = rig.insert("abcd")
    ticket = rig.back_up(node, commit=False)
    evict(rig.tree, Tier.DEVICE, 4)
    assert rig.find() == Candidate(7), "it is nowhere yet"
    rig.tree.commit(ticket, Tier.HOST)
    assert not rig.is_known
    assert rig.find() == Candidate(3, ((node.id, 4),), prefix=4)


def test_who_waits_no_more_leaves_nothing_behind() -> None:
    rig = Rig()
    rig.insert("abcd")
    rig.find()
    rig.cursors.forget("r")
    rig.cursors.forget("r")
    assert not rig.is_known and not rig.cursors._dependants and not rig.cursors._depends
