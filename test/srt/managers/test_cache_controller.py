"""`HiCacheController` by example: what each call does to frames, pins, tickets and the tree."""

from __future__ import annotations

import numpy as np
import pytest

from sglang.srt.managers.cache_controller import SELECTIVE_HITS
from sglang.srt.managers.slab_withdrawal import SlabWithdrawal
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.node import Node, Receipt, is_hole
from sglang.srt.mem_cache.slab_ledger import SlabLedger, SlabReport
from sglang.srt.mem_cache.transfer import (
    D2H,
    D2P,
    H2D,
    P2D,
    P2H,
    Ticket,
    Tier,
    TransferOp,
)
from sglang.srt.utils.time_units import Seconds
from support.controller_rig import Rig, load, ops_of
from support.storage_rig import DEVICE, HOST, PEER, tokens

# -- backup -----------------------------------------------------------------------------------------------------


def test_a_backup_from_begin_to_commit():
    rig = Rig(device=4, host=4)
    node = rig.insert("abc", fence=5)
    ticket = rig.at(0).begin_backup(node)
    assert ticket == Ticket(D2H, 0) and [node.tickets[DEVICE], node.tickets[HOST]] == [None, ticket]
    assert (rig.states(DEVICE), rig.states(HOST)) == ("CCCF", "IIIF")
    assert rig.device.pins.tolist() == [1, 1, 1, 0] == rig.host.pins.tolist()
    ((op,), cancels) = rig.ledger.take_ops()
    assert cancels == () and (op.src, op.dst, op.after, op.size_bytes) == (DEVICE, HOST, 5, 300)
    assert (op.src_frames.tolist(), op.dst_frames.tolist()) == ([0, 1, 2], [0, 1, 2])
    assert rig.ledger.take_ops() == ((), ()), "each is handed out once"
    rig.at(6).commit(ticket)
    assert (rig.states(DEVICE), rig.states(HOST)) == ("CCCF", "CCCF")
    assert not rig.device.pins.any() and not rig.host.pins.any() and rig.ledger.in_flight == {}
    assert rig.controller.counters == {"backup_tokens": 3}


def test_a_backup_takes_the_part_of_the_path_that_the_host_lacks():
    rig = Rig()
    top = rig.insert("ab", fence=1)
    rig.back_up(top)
    middle = rig.insert("cd", below=top, fence=7)
    low = rig.insert("e", below=middle, fence=3)
    ticket = rig.at(0).begin_backup(low)
    assert ops_of(rig) == [(ticket, [2, 3, 4], [2, 3, 4], 7)], "after the latest launch that writes"
    assert rig.at(0).begin_backup(low) is None, "it is on its way"
    assert rig.at(0).begin_backup(top) is None, "it is there"
    assert ops_of(rig) == []


def test_the_numbers_of_operations_count_by_link():
    rig = Rig()
    a, b = rig.on_host_only("ab"), rig.on_host_only("xy")
    assert load(rig, [a]) == Ticket(H2D, 0)
    assert load(rig, [b]) == Ticket(H2D, 1)
    assert rig.at(0).begin_backup(rig.insert("pq")) == Ticket(D2H, 2)


def test_a_backup_makes_room_on_the_host():
    rig = Rig(host=4)
    old = rig.insert("abc", now=1)
    rig.back_up(old)
    new = rig.insert("xyz", now=2)
    ticket = rig.at(0).begin_backup(new)
    assert ops_of(rig) == [(ticket, [3, 4, 5], [1, 2, 3], 0)]
    assert rig.states(HOST) == "CIII"
    assert rig.controller.counters["evicted_tokens_host"] == 2
    assert rig.lengths("abc") == (3, 3), "it is still on the device"


def test_a_backup_never_evicts_the_path_it_continues():
    rig = Rig(host=3)
    top = rig.insert("abc")
    rig.back_up(top)
    low = rig.insert("de", below=top)
    assert rig.at(0).begin_backup(low) is None
    assert rig.states(HOST) == "CCC" and rig.controller.counters["backup_dropped_tokens"] == 2
    assert low.frames[HOST] is None and low.tickets == [None] * 3


def test_a_backup_takes_the_room_of_others_not_of_its_own_path():
    rig = Rig(host=5)
    top = rig.insert("abc", now=1)
    rig.back_up(top)
    rig.back_up(rig.insert("xy", now=9))
    low = rig.insert("de", below=top, now=9)
    ticket = rig.at(0).begin_backup(low)
    assert ops_of(rig) == [(ticket, [5, 6], [3, 4], 0)], "the path is older, and stays"
    assert top.frames[HOST].tolist() == [0, 1, 2]


def test_a_backup_that_cannot_fit_evicts_nothing():
    rig = Rig(host=4)
    rig.back_up(rig.insert("abc"))
    assert rig.at(0).begin_backup(rig.insert("uvwxyz")) is None
    assert rig.states(HOST) == "CCCF", "nothing is gained by throwing this away"
    assert rig.controller.counters["backup_dropped_tokens"] == 6


def test_without_a_host_there_is_no_backup():
    rig = Rig(host=0)
    assert not rig.controller.has_host
    assert rig.at(0).begin_backup(rig.insert("abc")) is None
    assert ops_of(rig) == []


def test_a_failed_backup_leaves_the_device_copy():
    rig = Rig(device=4, host=4)
    node = rig.insert("abc")
    ticket = rig.at(0).begin_backup(node)
    rig.at(9, next=10).abort(ticket)
    assert (rig.states(DEVICE), rig.states(HOST)) == ("CCCF", "DDDF")
    rig.host.reap(0)
    assert rig.states(HOST) == "FFFF" and not rig.device.pins.any()
    assert rig.lengths("abc") == (3, 3) and rig.controller.counters["failed_ops"] == 1
    assert rig.at(0).begin_backup(node) == Ticket(D2H, 1), "it may be tried again"


def test_eviction_during_a_backup_keeps_the_bytes_until_it_ends():
    rig = Rig(device=4, host=4)
    node = rig.insert("abc")
    ticket = rig.at(1).begin_backup(node)
    rig.at(1).evict(DEVICE, 3)
    assert rig.states(DEVICE) == "DDDF", "the backup still reads them"
    assert rig.lengths("abc") == (0, 0)
    rig.at(1).commit(ticket)
    rig.device.reap(1)
    assert (rig.states(DEVICE), rig.states(HOST)) == ("FFFF", "CCCF")
    assert rig.lengths("abc") == (0, 3)


def test_a_backup_of_a_node_that_left_the_device_and_fails_loses_the_node():
    rig = Rig(device=4, host=4)
    ticket = rig.at(1).begin_backup(rig.insert("abc"))
    rig.at(1).evict(DEVICE, 3)
    rig.at(0, next=1).abort(ticket)
    for table in (rig.device, rig.host):
        table.reap(1)
    assert (rig.states(DEVICE), rig.states(HOST)) == ("FFFF", "FFFF")
    assert rig.tree.num_nodes == 0


# -- load -------------------------------------------------------------------------------------------------------


def test_a_load_from_begin_to_commit():
    rig = Rig(device=6, host=4)
    node = rig.on_host_only("abc")
    assert rig.states(DEVICE) == "FFFFFF" and rig.lengths("abc") == (0, 3)
    ticket = load(rig, [node])
    assert (rig.states(DEVICE), rig.states(HOST)) == ("IIIFFF", "CCCF")
    assert ops_of(rig) == [(Ticket(H2D, 0), [0, 1, 2], [0, 1, 2], None)]
    assert rig.lengths("abc") == (3, 3)
    assert rig.controller.counters["load_back_tokens"] == 3
    rig.at(10).evict(DEVICE, 3)
    rig.at(10).evict(HOST, 3)
    assert (rig.states(DEVICE), rig.states(HOST)) == ("IIIFFF", "CCCF"), "neither side can be evicted"
    rig.at(10).commit(ticket)
    assert rig.states(DEVICE) == "CCCFFF" and not rig.device.pins.any() and not rig.host.pins.any()


def test_one_load_of_several_nodes_is_merged_when_it_is_there():
    rig = Rig()
    top = rig.insert("ab")
    low = rig.insert("cd", below=top)
    rig.back_up(top)
    rig.back_up(low)
    rig.at(10).evict(DEVICE, 4)
    nodes = list(rig.tree.match("", tokens("abcd")).path)
    ticket = load(rig, nodes)
    assert ops_of(rig) == [(ticket, [0, 1, 2, 3], [0, 1, 2, 3], None)]
    rig.at(10).commit(ticket)
    rig.check()
    assert rig.tree.num_nodes == 1 and rig.lengths("abcd") == (4, 4)


def test_a_failed_load_loses_its_source_too():
    rig = Rig(device=6, host=6)
    top = rig.insert("ab")
    rig.back_up(top)
    low = rig.insert("cd", below=top)
    rig.back_up(low)
    rig.at(10).evict(DEVICE, 2)
    ticket = load(rig, [low])
    rig.at(12, next=13).abort(ticket)
    assert (rig.states(DEVICE), rig.states(HOST)) == ("CCDDFF", "CCDDFF")
    assert rig.lengths("abcd") == (2, 2)
    rig.device.reap(12)
    assert rig.states(DEVICE) == "CCDDFF", "launch 12 may wait for it"
    rig.device.reap(13)
    rig.host.reap(13)
    assert (rig.states(DEVICE), rig.states(HOST)) == ("CCFFFF", "CCFFFF")


def test_a_failed_load_leaves_a_hole_and_cancels_the_loads_below_it_once():
    rig = Rig(device=6, host=6)
    low = rig.on_host_only("abcdef")
    top = rig.tree.lock(rig.tree.match("", tokens("ab")), 0).node  # splits; a lock that reads nothing
    rig.tree.unlock(Receipt(top), 0, -1)
    first, second = load(rig, [top]), load(rig, [low])
    rig.tree.unlock(rig.tree.lock(rig.tree.match("", tokens("abcd")), 0), 0, -1)
    assert len(rig.tree.nodes_of(second)) == 2, "the second load fills two nodes by now"
    rig.ledger.take_ops()
    rig.at(0, next=1).abort(first)
    rig.check()
    assert is_hole(top) and low.frames[HOST].tolist() == [4, 5] and rig.lengths("abcdef") == (0, 0)
    assert rig.ledger.take_ops() == ((), (second,))
    assert rig.states(HOST) == "DDCCCC", "what lies below stays on the host"
    for table in (rig.device, rig.host):
        table.reap(5)
    assert (rig.states(DEVICE), rig.states(HOST)) == ("FFDDDD", "FFCCCC"), "the second load is still copying"
    rig.at(5).commit(second)
    for table in (rig.device, rig.host):
        table.reap(5)
    assert (rig.states(DEVICE), rig.states(HOST)) == ("FFFFFF", "FFCCCC")
    rig.insert("ab")
    assert rig.lengths("abcdef") == (2, 6), "found again when the hole is filled"


def test_a_load_needs_room_and_a_ready_source():
    rig = Rig(device=4)
    node = rig.on_host_only("abc")
    rig.insert("xy")
    with pytest.raises(AssertionError, match="make room first"):
        load(rig, [node])
    rig = Rig()
    node = rig.insert("abc")
    rig.at(0).begin_backup(node)
    with pytest.raises(AssertionError, match="ready nowhere"):
        load(rig, [node])


# -- evict and drop ---------------------------------------------------------------------------------------------


def test_evict_frees_what_no_launch_reads():
    rig = Rig(device=6)
    rig.insert("ab", fence=3, now=1)
    rig.insert("cd", fence=8, now=2)
    rig.at(4).evict(DEVICE, 4)
    assert rig.states(DEVICE) == "FFDDFF"
    assert rig.controller.counters["evicted_tokens_device"] == 4
    rig.device.reap(9)
    assert rig.states(DEVICE) == "FFFFFF"


def test_evict_less_than_asked_counts_what_it_was():
    rig = Rig(device=6)
    rig.insert("ab")
    rig.at(1).evict(DEVICE, 5)
    rig.at(1).evict(DEVICE, 5)
    assert rig.controller.counters["evicted_tokens_device"] == 2


def test_evicting_page_by_page_does_not_crumble_the_tree():
    """A full device gives up a page per decode step; what stays on the host must not become a node per page."""
    rig = Rig(device=8, host=8)
    node = rig.insert("abcdef")
    rig.back_up(node)
    for left in (5, 4, 3, 2, 1):
        rig.at(10).evict(DEVICE, 1)
        rig.check()
        rig.controller.tidy()
        rig.check()
        assert rig.lengths("abcdef") == (left, 6) and rig.tree.num_nodes == 2
    match = rig.tree.match("", tokens("abcdef"))
    assert [n.frames[HOST].tolist() for n in match.path] == [[0], [1, 2, 3, 4, 5]]
    rig.at(10).evict(DEVICE, 1)
    assert rig.tree.num_nodes == 2, "while others may look at nodes, none are merged"
    rig.controller.tidy()
    rig.check()
    assert rig.lengths("abcdef") == (0, 6) and rig.tree.num_nodes == 1


def test_turns_evicted_one_by_one_become_one_node():
    rig = Rig(device=8, host=8)
    top = rig.insert("ab")
    middle = rig.insert("cd", below=top)
    low = rig.insert("ef", below=middle)
    other = rig.insert("xy", below=top)
    rig.at(0).commit(rig.controller.begin_backup(low))
    rig.at(0).commit(rig.controller.begin_backup(other))
    rig.check()
    rig.at(10).evict(DEVICE, 4)
    rig.at(10).evict(DEVICE, 2)
    rig.at(10).evict(DEVICE, 2)
    rig.controller.tidy()
    rig.check()
    match = rig.tree.match("", tokens("abcdef"))
    assert [len(n.key) for n in match.path] == [2, 4], "the fork stays, the chain below it is one node"


def test_drop_cancels_an_operation_that_fills_nothing_any_more():
    rig = Rig()
    top = rig.insert("ab")
    low = rig.insert("cd", below=top)
    ticket = rig.at(0).begin_backup(low)
    rig.ledger.take_ops()
    rig.at(0, next=6).drop(low, HOST)
    rig.check()
    assert rig.ledger.take_ops() == ((), ()), "the upper half is still wanted"
    rig.at(0, next=6).drop(top, HOST)
    rig.check()
    assert rig.ledger.take_ops() == ((), (ticket,))
    assert ticket in rig.ledger.in_flight and rig.host.pins.sum() == 4
    rig.at(0).commit(ticket)
    rig.host.reap(0)
    assert rig.states(HOST) == "FFFFFFFF" and not rig.device.pins.any()


def test_a_cancel_of_an_operation_that_has_ended_is_not_passed_on():
    rig = Rig()
    node = rig.insert("ab")
    ticket = rig.at(0).begin_backup(node)
    rig.ledger.take_ops()
    rig.at(0, next=6).drop(node, HOST)
    rig.at(0).commit(ticket)
    assert rig.ledger.take_ops() == ((), ())


def test_filling_device_frames_wait_for_the_last_launch():
    rig = Rig(device=4)
    node = rig.on_host_only("ab")
    ticket = load(rig, [node])
    rig.at(0, next=8).drop(node, DEVICE)
    rig.at(7).commit(ticket)
    rig.device.reap(7)
    assert rig.states(DEVICE) == "DDFF"
    rig.device.reap(8)
    assert rig.states(DEVICE) == "FFFF" and rig.lengths("ab") == (0, 2)


# -- the invariants themselves ----------------------------------------------------------------------------------


def lose_a_page(rig: Rig) -> None:
    rig.device.transition(rig.device.allocate(1), FrameState.HELD, FrameState.CACHED)


def forget_a_pin(rig: Rig) -> None:
    rig.device.unpin(np.array([2], np.int32))


def forget_an_operation(rig: Rig) -> None:
    rig.ledger.in_flight.clear()


def use_a_frame_twice(rig: Rig) -> None:
    rig.tree.match("", tokens("xy")).path[0].frames[DEVICE][0] = 3


def free_under_the_tree(rig: Rig) -> None:
    rig.device.free_after(np.array([0], np.int32), FrameState.CACHED, -1)
    rig.device.reap(0)


@pytest.mark.parametrize(
    "corrupt", [lose_a_page, forget_a_pin, forget_an_operation, use_a_frame_twice, free_under_the_tree]
)
def test_check_invariants_notices(corrupt):
    rig = Rig(device=7)
    rig.insert("xy")
    rig.at(0).begin_backup(rig.insert("abc"))
    rig.check()
    corrupt(rig)
    with pytest.raises(AssertionError):
        rig.ledger.check_invariants()


def test_operations_are_plain_data():
    rig = Rig()
    rig.at(0).begin_backup(rig.insert("abc"))
    ((op,), _) = rig.ledger.take_ops()
    assert isinstance(op, TransferOp) and op.src_frames.dtype == op.dst_frames.dtype == np.int32


def test_write_back_saves_what_leaves_the_device() -> None:
    rig = Rig(write_policy="write_back")
    node = rig.insert("abcd")
    rig.at(10).back_up_inserted(node)
    assert rig.ledger.take_ops()[0] == ()
    rig.at(10).evict(DEVICE, 4)
    (op,) = rig.ledger.take_ops()[0]
    # The device frames stay until they are read, and nobody finds the node meanwhile.
    assert op.ticket == Ticket(D2H, 0) and rig.device.counts[FrameState.PENDING_FREE] == 4
    assert rig.lengths("abcd") == (0, 0)
    rig.at(10).commit(op.ticket)
    rig.device.reap(10)
    assert rig.device.counts[FrameState.PENDING_FREE] == 0 and rig.lengths("abcd") == (0, 4)


def test_write_back_saves_what_leaves_and_its_prefix_when_that_leaves() -> None:
    rig = Rig(write_policy="write_back")
    upper = rig.insert("ab")
    lower = rig.insert("cd", upper)
    rig.at(10).evict(DEVICE, 2)
    assert ops_of(rig) == [(Ticket(D2H, 0), [2, 3], [0, 1], 0)]
    rig.at(10).commit(Ticket(D2H, 0))
    assert rig.lengths("abcd") == (2, 4) and upper.frames[HOST] is None
    rig.at(10).evict(DEVICE, 2)
    assert ops_of(rig) == [(Ticket(D2H, 1), [0, 1], [2, 3], 0)]
    assert rig.lengths("abcd") == (0, 0), "on its way"
    rig.at(10).commit(Ticket(D2H, 1))
    assert rig.lengths("abcd") == (0, 4) and lower.parent is upper


def test_write_back_saves_several_victims_by_one_operation() -> None:
    rig = Rig(write_policy="write_back")
    upper = rig.insert("ab")
    rig.insert("cd", upper)
    rig.insert("ef", upper)
    rig.at(10).evict(DEVICE, 6)
    ((_, src, dst, _),) = ops_of(rig)
    assert src[:2] == [0, 1] and sorted(src) == sorted(dst) == [0, 1, 2, 3, 4, 5], "what the others need is first"


def test_what_write_back_has_no_room_for_is_lost_and_what_is_below_it_is_behind_a_hole() -> None:
    """Of what leaves, that is saved which the rest needs; later evictions still never refuse."""
    rig = Rig(host=2, write_policy="write_back")
    upper = rig.insert("ab")
    lower = rig.insert("cd", upper)
    rig.at(10).evict(DEVICE, 4)
    assert ops_of(rig) == [(Ticket(D2H, 0), [0, 1], [0, 1], 0)]
    assert rig.controller.counters["backup_dropped_tokens"] == 2 and lower.parent is None
    rig.at(10).abort(Ticket(D2H, 0))
    rig.check()
    assert rig.tree.num_nodes == 0, "nothing is below the hole"


@pytest.mark.parametrize("trouble", ["hangs", "fails"])
@pytest.mark.parametrize("write_policy", ["write_back", "write_through", "write_through_selective"])
def test_a_link_that_hangs_or_fails_is_given_no_copies_and_the_host_keeps_what_it_has(
    write_policy: str, trouble: str
) -> None:
    rig = Rig(device=8, host=4, write_policy=write_policy)
    rig.on_host_only("wxyz")
    links = rig.controller.links
    if trouble == "hangs":
        links.late = frozenset((D2H,))
    else:
        for _ in range(3):
            links.failing.note_ended(D2H, is_ok=False)
        links.failing.update(Seconds(0.0))
    for _ in range(3):
        node = rig.insert("abcd")
        node.hits = SELECTIVE_HITS
        rig.at(10).back_up_inserted(node)
        rig.at(10).back_up_reused(node)
        rig.at(10).evict(DEVICE, 4)
        rig.check()
        assert not rig.ledger.in_flight and rig.device.num_free == 8 and rig.lengths("wxyz") == (0, 4)
    assert rig.controller.counters["backup_dropped_tokens"] == 12 * (write_policy == "write_back")
    links.late = frozenset()
    links.failing.update(Seconds(2.0))
    node = rig.insert("abcd")
    node.hits = SELECTIVE_HITS
    rig.at(10).back_up_inserted(node)
    rig.at(10).back_up_reused(node)
    rig.at(10).evict(DEVICE, 4)
    assert len(ops_of(rig)) == 1


def test_a_failed_backup_leaves_a_hole() -> None:
    rig = Rig(write_policy="write_back")
    upper = rig.insert("ab")
    lower = rig.insert("cd", upper)
    rig.copy(lower, HOST)
    rig.at(10).evict(DEVICE, 4)
    ticket = Ticket(D2H, 1)
    assert rig.ledger.in_flight.keys() == {ticket} and upper.tickets[HOST] == ticket
    rig.at(10).abort(ticket)
    rig.check()
    assert is_hole(upper) and lower.frames[HOST] is not None and rig.lengths("abcd") == (0, 0)


def test_selective_writing_waits_for_a_second_use() -> None:
    rig = Rig(write_policy="write_through_selective")
    node = rig.insert("abcd")
    rig.at(10).back_up_inserted(node)
    assert rig.ledger.take_ops()[0] == ()
    receipt = rig.tree.lock(rig.tree.match("", tokens("ab")), 1)
    rig.tree.count_use(receipt.node)
    rig.at(10).back_up_reused(receipt.node)
    (op,) = rig.ledger.take_ops()[0]
    assert len(op.src_frames) == 2
    rig.at(10).commit(op.ticket)
    rig.tree.unlock(receipt, 1, -1)
    rig.at(10).evict(DEVICE, 4)
    assert rig.lengths("abcd") == (0, 2)


def test_the_least_frequently_used_goes_first() -> None:
    for eviction, gone in (("lru", "abc"), ("lfu", "xyz")):
        rig = Rig(host=0, eviction=eviction)
        rig.insert("abc", now=0)
        for _ in range(2):
            receipt = rig.tree.lock(rig.tree.match("", tokens("abc")), 1)
            rig.tree.count_use(receipt.node)
            rig.tree.unlock(receipt, 1, -1)
        rig.insert("xyz", now=2)
        rig.at(10).evict(DEVICE, 3)
        assert rig.lengths(gone) == (0, 0) and rig.lengths("xyz" if gone == "abc" else "abc") == (3, 3)


def test_an_unknown_write_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="write_through"):
        Rig(write_policy="sometimes")


# -- peers --------------------------------------------------------------------------------------------------------


class PeerRig(Rig):
    def on_peer(self, text: str, below: Node | None = None) -> Node:
        """What was computed, and evicted to the peer; the host has it if it is backed up before."""
        node = self.insert(text, below)
        self.at(10).evict(DEVICE, len(text))
        (op,), _ = self.ledger.take_ops()
        self.at(10).commit(op.ticket)
        self.device.reap(10)
        self.check()
        assert node.frames[DEVICE] is None and node.frames[PEER] is not None
        return node

    def withdraw(self, readable: bytes = b"\1") -> SlabWithdrawal:
        """The pages of the peer go, in as many slabs as there are bytes; no request reads them."""
        assert self.peer is not None
        size = self.peer.num_pages // len(readable)
        frames = [(i * size, (i + 1) * size) for i in range(len(readable))]
        withdrawal = SlabWithdrawal(self.controller, SlabLedger(self.peer, frames, mapped=True))
        withdrawal.update(SlabReport(bytes(len(readable)), readable=readable), losing=lambda ids: None)
        assert withdrawal.counters["slabs_withdrawn"] == len(readable)
        return withdrawal


def test_what_leaves_the_device_goes_to_the_peer():
    rig = PeerRig(device=4, peer=4)
    node = rig.insert("abc", fence=5)
    rig.at(6).evict(DEVICE, 2)
    ticket = Ticket(D2P, 0)
    assert ops_of(rig) == [(ticket, [1, 2], [0, 1], 5)], "not what is before it: that is on the device"
    assert (rig.states(DEVICE), rig.states(PEER), rig.states(HOST)) == ("CDDF", "IIFF", "F" * 8)
    assert rig.lengths("abc") == (1, 1), "what is on its way to the peer is nowhere yet"
    rig.at(6).commit(ticket)
    rig.device.reap(6)
    assert (rig.states(DEVICE), rig.states(PEER)) == ("CFFF", "CCFF") and rig.lengths("abc") == (1, 3)
    assert rig.controller.counters["peer_backup_tokens"] == 2
    rig.at(6).evict(DEVICE, 1)
    assert ops_of(rig) == [(Ticket(D2P, 1), [0], [2], 5)]
    rig.at(6).commit(Ticket(D2P, 1))
    assert node.frames[HOST] is None and rig.lengths("abc") == (0, 3)
    rig.at(6).commit(load(rig, [n for n in rig.tree.walk()]))
    rig.ledger.take_ops()
    rig.at(6).evict(DEVICE, 3)
    assert [t for t, *_ in ops_of(rig) if t.link == D2P] == [], "it has that already"


def test_a_path_that_peer_and_host_have_in_turn_is_loaded_by_two_operations():
    rig = PeerRig(peer=4)
    first = rig.insert("a")
    second = rig.insert("b", below=first)
    third = rig.insert("c", below=second)
    fourth = rig.insert("d", below=third)
    for node, tier in zip((first, second, third, fourth), (PEER, HOST, PEER, HOST)):
        rig.copy(node, tier)
    rig.controller.drop(first, DEVICE)
    rig.device.reap(1000)
    rig.check()
    match = rig.tree.match("", tokens("abcd"))
    assert (match.device_len, match.peer_runs, match.total_len) == (0, ((0, 1), (2, 3)), 4)
    near, far = rig.controller.begin_load(list(match.path))
    assert (near, far) == (Ticket(P2D, 0), Ticket(H2D, 0))
    ops = rig.ledger.take_ops()[0]
    assert [(op.src, op.src_frames.tolist()) for op in ops] == [(PEER, [0, 1]), (HOST, [0, 1])]
    assert [n.tickets[DEVICE] for n in match.path] == [near, far, near, far]
    rig.at(10).commit(far)
    rig.at(10).commit(near)
    rig.check()
    assert rig.lengths("abcd") == (4, 4) and rig.controller.counters["load_peer_tokens"] == 2
    assert rig.controller.counters["load_back_tokens"] == 4


def test_a_tier_that_is_not_read_any_more_is_loaded_from_only_where_no_other_has_it():
    rig = PeerRig(peer=4)
    both = rig.insert("ab")
    alone = rig.insert("cd", below=both)
    for node, tier in ((both, PEER), (both, HOST), (alone, PEER)):
        rig.copy(node, tier)
    rig.controller.drop(both, DEVICE)
    rig.device.reap(1000)
    rig.tree.set_load_order((PEER, HOST), unread=frozenset({PEER}))
    far, near = rig.controller.begin_load([both, alone])
    assert (far, near) == (Ticket(H2D, 0), Ticket(P2D, 0)) and both.tickets[DEVICE] == far


def test_a_failed_load_of_what_two_tiers_have_in_turn_leaves_a_hole_where_it_failed():
    rig = PeerRig(peer=4)
    top = rig.insert("ab")
    low = rig.insert("cd", below=top)
    rig.copy(top, PEER)
    rig.copy(low, HOST)
    rig.controller.drop(top, DEVICE)
    rig.device.reap(1000)
    near, far = rig.controller.begin_load([top, low])
    rig.ledger.take_ops()
    rig.at(0, next=0).abort(near)
    rig.check()
    assert is_hole(top) and low.frames[HOST] is not None and low.frames[DEVICE] is None
    assert rig.ledger.take_ops() == ((), (far,)), "behind a hole a load brings nothing"
    rig.at(10).commit(far)
    rig.device.reap(10)
    assert rig.states(DEVICE) == "F" * 12 and rig.lengths("abcd") == (0, 0)


def test_a_lost_slab_leaves_a_hole():
    rig = PeerRig(peer=4)
    top = rig.insert("ab")
    low = rig.insert("cd", below=top)
    rig.copy(top, PEER)
    rig.copy(low, HOST)
    rig.controller.drop(top, DEVICE)
    assert rig.lengths("abcd") == (0, 4)
    rig.controller.links.is_worth_copying = lambda tier, start, end: False
    rig.withdraw()
    rig.check()
    assert rig.ledger.take_ops()[0] == (), "it is not worth a copy on the host"
    assert is_hole(top) and low.frames[HOST] is not None and rig.lengths("abcd") == (0, 0)
    rig.controller.drop(low, HOST)
    rig.check()
    assert rig.tree.num_nodes == 0


def test_what_a_lost_slab_alone_had_moves_to_the_host():
    rig = PeerRig(peer=4)
    top = rig.insert("ab")
    low = rig.insert("cd", below=top)
    for tier in (PEER, HOST):
        rig.copy(low, tier)
    rig.copy(top, PEER)
    rig.controller.drop(top, DEVICE)
    rig.withdraw()
    assert ops_of(rig) == [(Ticket(P2H, 0), [2, 3], [2, 3], None)], "the host has the other one"
    rig.peer.reap(10)
    assert top.frames[PEER] is None and rig.states(PEER) == "LLDD" and rig.lengths("abcd") == (0, 0)
    rig.at(10).commit(Ticket(P2H, 0))
    rig.peer.reap(10)
    assert rig.states(PEER) == "LLLL" and rig.lengths("abcd") == (0, 4)


def test_what_cannot_be_read_is_not_moved_to_the_host():
    rig = PeerRig(peer=4)
    top = rig.insert("ab")
    low = rig.insert("cd", below=top)
    rig.copy(low, HOST)
    rig.copy(top, PEER)
    rig.controller.drop(top, DEVICE)
    rig.withdraw(b"\0")
    rig.check()
    assert rig.ledger.take_ops()[0] == () and is_hole(top) and low.frames[HOST] is not None


def test_slabs_that_cannot_be_read_any_more_are_dropped_and_others_are_moved():
    rig = PeerRig(peer=6)
    lost, moved = (rig.insert(text) for text in ("abc", "xyz"))
    for node in (lost, moved):
        rig.copy(node, PEER)
        rig.controller.drop(node, DEVICE)
    rig.withdraw(b"\0\1")
    rig.check()
    assert ops_of(rig) == [(Ticket(P2H, 0), [3, 4, 5], [0, 1, 2], None)] and lost.parent is None


def test_a_move_to_the_host_takes_no_copy_of_what_leaves_the_device():
    """The device gives up new. For its copy the peer gives up old, which would take new's room on the host."""
    rig = PeerRig(device=8, host=3, peer=2)
    old = rig.insert("ab", now=5)
    rig.copy(old, PEER)
    rig.controller.drop(old, DEVICE)
    new = rig.insert("xyz", now=1)
    rig.copy(new, HOST)
    rig.at(10).evict(DEVICE, 2)
    rig.check()
    assert rig.lengths("xyz") == (1, 3), "the whole copy is on the host"
    assert [(t.link, len(src)) for t, src, _, _ in ops_of(rig)] == [(D2P, 2)] and old.parent is None


def test_a_move_to_the_host_that_fails_leaves_a_hole():
    rig = PeerRig(peer=4)
    top = rig.insert("ab")
    low = rig.insert("cd", below=top)
    rig.copy(low, HOST)
    rig.copy(top, PEER)
    rig.controller.drop(top, DEVICE)
    rig.withdraw()
    rig.at(10).abort(Ticket(P2H, 0))
    rig.check()
    assert is_hole(top) and low.frames[HOST] is not None


def test_without_a_host_a_lost_slab_is_lost():
    rig = PeerRig(peer=4, host=0)
    rig.on_peer("ab")
    rig.withdraw()
    rig.check()
    assert rig.tree.num_nodes == 0


def test_a_failed_load_from_the_peer_loses_the_peer_s_copy_and_not_the_host_s():
    rig = PeerRig(peer=4)
    node = rig.insert("abc")
    rig.back_up(node)
    rig.at(10).evict(DEVICE, 3)
    rig.at(10).commit(Ticket(D2P, 0))
    ticket = load(rig, [node])
    assert ticket == Ticket(P2D, 0)
    rig.at(0, next=0).abort(ticket)
    rig.check()
    assert [f is not None for f in node.frames] == [False, False, True]
    assert load(rig, [node]) == Ticket(H2D, 0), "the next one asks the host"


def test_a_failed_backup_to_the_peer_leaves_what_others_have():
    rig = PeerRig(peer=4)
    node = rig.insert("abc")
    rig.back_up(node)
    rig.at(10).evict(DEVICE, 3)
    rig.at(0, next=0).abort(Ticket(D2P, 0))
    for table in rig.controller.tables.values():
        table.reap(10)
    assert (rig.states(DEVICE), rig.states(PEER), rig.states(HOST)) == ("F" * 12, "FFFF", "CCCFFFFF")


def test_a_full_peer_gives_up_its_oldest_and_what_never_fits_is_dropped():
    rig = PeerRig(peer=4, host=0)
    rig.on_peer("abc")
    rig.on_peer("xyz")
    assert rig.lengths("abc") == (0, 1) and rig.lengths("xyz") == (0, 3)
    rig.insert("uvwpqr")
    rig.at(10).evict(DEVICE, 6)
    assert rig.ledger.take_ops()[0] == () and rig.controller.counters["peer_backup_dropped_tokens"] == 6
    assert rig.lengths("uvwpqr") == (0, 0) and rig.lengths("xyz") == (0, 3)


def test_what_only_the_peer_had_follows_to_the_host_when_it_is_back():
    rig = PeerRig(peer=4)
    node = rig.on_peer("abc")
    ticket = load(rig, [node])
    low = rig.insert("d", below=node)
    rig.ledger.take_ops()
    assert rig.at(10).begin_backup(low) == Ticket(D2H, 0)
    assert [src for _, src, _, _ in ops_of(rig)] == [low.frames[DEVICE].tolist()], (
        "its prefix is not there to be read"
    )
    rig.at(10).commit(ticket)
    assert list(rig.ledger.in_flight) == [Ticket(D2H, 0), Ticket(D2H, 1)]
    rig.at(10).commit(Ticket(D2H, 0))
    rig.at(10).commit(Ticket(D2H, 1))
    assert rig.lengths("abcd") == (4, 4) and rig.states(HOST) == "CCCCFFFF"


@pytest.mark.parametrize("tiers", [[PEER, HOST], [HOST]])
def test_peers_are_lacking_only_where_they_may_take_what_leaves_the_device(tiers: list[Tier]) -> None:
    rig = Rig(device=8, host=8, peer=8)
    node = rig.insert("ab")
    rig.back_up(node)
    rig.tree.lock(rig.tree.match("", tokens("ab")), 1)
    rig.at(10).demote(node, 2, tiers)
    assert (rig.controller.num_short_of_peers > 0) == (PEER in tiers)


@pytest.mark.parametrize("write_policy", ["auto", "write_back"])
def test_only_the_policy_auto_takes_back_what_went_to_slow_peers(
    write_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(device=8, host=8, peer=8, write_policy=write_policy)
    node = rig.insert("ab")
    ticket = rig.at(10).back_up([node], PEER)
    monkeypatch.setattr(rig.controller.links, "is_worth_copying", lambda tier, start, end: tier != PEER)
    rig.at(10).commit(ticket)
    assert (node.frames[PEER] is None) == (write_policy == "auto")
    rig.check()


def test_what_is_below_a_node_that_streams_leaves_the_device_with_it() -> None:
    rig = Rig(device=8, host=8)
    top = rig.insert("ab")
    rig.back_up(top)
    rig.insert("cd", below=top)
    receipt = rig.tree.lock(rig.tree.match("", tokens("ab")), 1)
    rig.at(10).demote(top, 2, [HOST])
    rig.check()
    rig.device.reap(1000)
    assert rig.device.num_free == 8 and rig.lengths("abcd") == (0, 2)
    rig.tree.unlock(receipt, 2, -1)
    rig.check()


@pytest.mark.parametrize("is_streamed", [True, False])
def test_what_is_streamed_while_it_is_loaded_keeps_its_source(is_streamed: bool) -> None:
    """A launch may read it from there before the load has ended."""
    rig = PeerRig(peer=4)
    node = rig.on_peer("ab")
    rig.tree.lock(rig.tree.match("", tokens("ab")), 1)
    if is_streamed:
        rig.tree.note_stream(node, 5)
    ticket = load(rig, [node])
    withdrawal = rig.withdraw()
    assert (node.frames[PEER] is not None) == is_streamed
    rig.at(10).commit(ticket)
    withdrawal.note_end()
    withdrawal.update(SlabReport(b"\0"), losing=lambda ids: None)
    assert node.frames[PEER] is None and node.frames[DEVICE] is not None
    rig.check()


@pytest.mark.parametrize("drops", [False, True])
def test_a_copy_that_was_cancelled_says_nothing_of_its_link(drops: bool):
    """As where its launch failed."""
    rig = Rig(8, 8)
    node = rig.insert("ab")
    ticket = rig.controller.begin_backup(node)
    assert ticket is not None
    if drops:
        rig.controller.drop(node, HOST)
    was_cancelled = rig.ledger.is_cancelled(ticket)
    assert was_cancelled == drops
    rig.at(10).abort(ticket, was_cancelled)
    rig.controller.links.failing.update(Seconds(0.0))
    assert rig.controller.links.is_sound(HOST) == drops
    rig.check()
