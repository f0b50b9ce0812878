"""`StorageController` by example: letters are tokens, blocks have four, storage is a set of names."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sglang.srt.managers.lost_hits import Lookup, LostHits
from sglang.srt.managers.schedule_policy import FETCH_PATIENCE
from sglang.srt.managers.storage_advice import StorageAdvice
from sglang.srt.managers.storage_breaker import FAILURES_IN_A_ROW, TRIAL_PAUSE_S
from sglang.srt.managers.tier_switches import TierSwitches
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.node import Node, is_hole, path_of
from sglang.srt.mem_cache.transfer import (
    D2P,
    FETCH,
    FETCH_FAR,
    PROBE,
    PROBE_FAILED,
    STORE,
    Ticket,
    Tier,
)
from sglang.srt.utils.time_units import LaunchSeq, Seconds
from support.storage_rig import StorageRig as Rig
from support.storage_rig import expire, keys_of, tokens

DEVICE, PEER, HOST = Tier.DEVICE, Tier.PEER, Tier.HOST
TWO = (Tier.DISK, Tier.REMOTE)
TEXT = "aaaabbbbccccddddeeee"


# -- one request ------------------------------------------------------------------------------------------------


def test_from_the_question_to_the_host():
    rig = Rig(TEXT)
    assert rig.begin("r", TEXT + "xy") == [Ticket(PROBE, 0)]
    assert keys_of(rig, Ticket(PROBE, 0)) == 5 and rig.over("r") == [False]
    assert rig.finish(Ticket(PROBE, 0)) == [Ticket(FETCH, 0), Ticket(FETCH, 1), Ticket(FETCH, 2)]
    assert [keys_of(rig, Ticket(FETCH, i)) for i in range(3)] == [2, 2, 1]
    assert rig.on_host(TEXT) == 0 and rig.storage.num_waiting == 1
    for i, there in enumerate((8, 16, 20)):
        assert rig.over("r") == [False]
        assert rig.finish(Ticket(FETCH, i)) == []
        assert rig.on_host(TEXT) == there and rig.found("r") == (0, there)
    assert rig.over("r") == [True] and rig.storage.num_waiting == 0
    assert rig.tree.num_nodes == 1, "pieces of one path are merged"
    rig.detach("r")
    assert rig.found("r") == (0, 0)
    assert rig.storage.counters == {"storage_probes": 1, "storage_hit_tokens": 20, "prefetched_tokens": 20}
    rig.assert_nothing_left()


@pytest.mark.parametrize(("stored", "count"), [("", 0), (TEXT[:8], 2), (TEXT, 5), (TEXT + "zzzz", 5)])
def test_what_the_answer_says_is_fetched(stored: str, count: int):
    rig = Rig(stored, blocks_per_op=10)
    rig.begin("r", TEXT)
    begun = rig.finish(Ticket(PROBE, 0))
    assert [keys_of(rig, t) for t in begun] == ([count] if count else [])
    assert rig.over("r") == [count == 0]
    rig.finish_all()
    assert rig.on_host(TEXT) == 4 * count and rig.over("r") == [True]
    rig.detach("r")
    rig.assert_nothing_left()


def test_only_whole_blocks_beyond_what_is_there_are_asked_for():
    rig = Rig(TEXT, threshold=8)
    rig.insert("aaaabb")
    assert rig.begin("few", "aaaabbbbcccc") == [], "6 tokens are below the threshold"
    assert rig.begin("none", "aaa") == []
    assert rig.over("few", "none") == [True, True]
    (probe,) = rig.begin("enough", "aaaabbbbccccddddx")
    assert keys_of(rig, probe) == 3, "the block that begins on the device is asked for as a whole"
    assert rig.finish(probe) == [Ticket(FETCH, 0), Ticket(FETCH, 1)], "what is above need not be on the host"
    assert rig.over("enough") == [False]
    rig.finish_all()
    assert rig.on_host("aaaabbbbccccdddd") == 16 and rig.found("enough") == (6, 16)
    assert rig.host.counts[FrameState.CACHED] == 10
    rig.detach("enough")
    rig.assert_nothing_left()


def test_what_does_not_come_ends_the_wait():
    rig = Rig(TEXT)
    rig.begin("r", TEXT)
    rig.finish(Ticket(PROBE, 0))
    rig.finish(Ticket(FETCH, 0), count=1)
    # What lies below what did not come is given up as well.
    assert rig.cancelled == [Ticket(FETCH, 1), Ticket(FETCH, 2)]
    rig.finish(Ticket(FETCH, 1))
    rig.finish(Ticket(FETCH, 2), count=0)
    assert rig.over("r") == [True] and rig.on_host(TEXT) == 4 and rig.found("r") == (0, 4)
    rig.detach("r")
    rig.assert_nothing_left()


def test_somebody_computes_it_between_question_and_answer():
    rig = Rig(TEXT)
    (probe,) = rig.begin("r", TEXT)
    rig.insert(TEXT[:18])
    assert rig.finish(probe) == [Ticket(FETCH, 0)] and keys_of(rig, Ticket(FETCH, 0)) == 1, "what is still lacking"
    rig.finish_all()
    assert rig.found("r") == (18, 20) and rig.on_host(TEXT) == 20
    rig.detach("r")
    (probe,) = rig.begin("s", TEXT + "ffffgggg")
    rig.insert(TEXT + "ffffgggg")
    rig.finish(probe, count=1)
    assert rig.over("s") == [True], "nothing is lacking any more"
    rig.detach("s")
    rig.assert_nothing_left()


def test_it_waits_for_a_node_that_is_nowhere_yet():
    rig = Rig(TEXT)
    node = rig.insert(TEXT[:10])
    backup = rig.controller.begin_backup(node)
    rig.controller.evict(DEVICE, 10)
    assert rig.collect() == [backup] and rig.on_host(TEXT) == 0
    (probe,) = rig.begin("r", TEXT)
    assert rig.finish(probe) == [] and rig.over("r") == [False]
    begun = rig.finish(backup)
    assert [keys_of(rig, t) for t in begun if t.link == FETCH] == [2, 1]
    rig.finish_all()
    assert rig.found("r") == (10, 20)
    rig.detach("r")
    rig.assert_nothing_left()


def test_below_a_prefix_that_only_a_peer_has_the_rest_is_fetched():
    rig = Rig(TEXT, peer=16)
    node = rig.insert(TEXT[:10])
    rig.controller.evict(DEVICE, 10)
    rig.collect()
    rig.finish_all()
    assert [node.frames[tier] is not None for tier in (DEVICE, PEER, HOST)] == [False, True, False]
    (probe,) = rig.begin("r", TEXT)
    assert rig.finish(probe) == [Ticket(FETCH, 0), Ticket(FETCH, 1)] and rig.over("r") == [False]
    rig.finish_all()
    assert rig.over("r") == [True] and rig.found("r") == (10, 20)
    match = rig.tree.match("", tokens(TEXT))
    assert (match.total_len, match.peer_runs) == (20, ((0, 10),)) and node.frames[HOST] is None
    rig.detach("r")
    rig.assert_nothing_left()


def test_it_waits_for_a_prefix_that_is_on_its_way_to_a_peer():
    rig = Rig(TEXT, peer=16)
    node = rig.insert(TEXT[:10])
    rig.controller.evict(DEVICE, 10)
    assert rig.collect() == [Ticket(D2P, 0)] and node.frames[DEVICE] is None
    (probe,) = rig.begin("r", TEXT)
    assert rig.finish(probe) == [] and rig.over("r") == [False]
    assert rig.finish(Ticket(D2P, 0)) == [Ticket(FETCH, 0), Ticket(FETCH, 1)] and rig.over("r") == [False]
    rig.finish_all()
    assert rig.over("r") == [True] and rig.found("r") == (10, 20)
    rig.detach("r")
    rig.assert_nothing_left()


@pytest.mark.parametrize("is_copied", [True, False])
def test_what_only_a_peer_has_that_is_not_read_is_fetched(is_copied: bool):
    """As a hole is. is_copied: before the request comes."""
    rig = Rig(TEXT, peer=16)
    node = rig.insert(TEXT[:10])
    rig.controller.evict(DEVICE, 10)
    rig.tree.set_load_order(rig.tree.order.load_order, frozenset({PEER}))
    (copy,) = rig.collect()
    if is_copied:
        rig.finish(copy)
    (probe,) = rig.begin("r", TEXT)
    first, *_ = rig.finish(probe)
    assert keys_of(rig, first) == 2 and rig.over("r") == [False]
    rig.finish_all()
    assert rig.over("r") == [True] and rig.found("r") == (0, 20) and rig.on_host(TEXT) == 20
    assert node.frames[PEER] is not None and node.frames[HOST] is not None
    rig.detach("r")
    rig.assert_nothing_left()


@pytest.mark.parametrize("count", [0, 1])
def test_what_does_not_come_of_it_stays_on_the_peer_alone(count: int):
    rig = Rig(TEXT, peer=16)
    rig.insert(TEXT[:10])
    rig.controller.evict(DEVICE, 10)
    (copy,) = rig.collect()
    rig.finish(copy)
    rig.tree.set_load_order(rig.tree.order.load_order, frozenset({PEER}))
    (probe,) = rig.begin("r", TEXT)
    first, *_ = rig.finish(probe)
    rig.finish(first, count=count)
    rig.finish_all()
    assert rig.over("r") == [True] and rig.found("r") == (0, 4 * count) and rig.on_host(TEXT) == 4 * count
    rig.tree.set_load_order(rig.tree.order.load_order, frozenset())
    match = rig.tree.match("", tokens(TEXT))
    assert match.total_len == 10, "what the peer has is found once it is read again"
    rig.detach("r")
    rig.assert_nothing_left()


def on_an_unread_peer(rig: Rig, text: str) -> Node:
    rig.controller.unwritten = frozenset({HOST})
    node = rig.insert(text)
    rig.controller.evict(DEVICE, 10)
    (copy,) = rig.collect()
    rig.finish(copy)
    rig.tree.set_load_order(rig.tree.order.load_order, frozenset({PEER}))
    return node


@pytest.mark.parametrize("count", [0, 2])
def test_what_a_peer_has_stays_as_exact_and_as_much_used(count: int):
    """Its pages came from another storage, which is lossy; those that are fetched beside them are exact."""
    rig = Rig(TEXT, peer=16)
    node = on_an_unread_peer(rig, TEXT[:8])
    node.is_lossy, node.hits = True, 5
    (probe,) = rig.begin("r", TEXT)
    fetch, *_ = rig.finish(probe)
    rig.finish(fetch, count=count)
    rig.finish_all()
    assert node.frames[PEER] is not None and node.is_lossy and node.hits == 5
    assert all(each.is_lossy for each in rig.tree.walk_below(node)), "what comes behind it counts as lossy, too"
    rig.detach("r")
    rig.assert_nothing_left()


@pytest.mark.parametrize("what", ["lossy storage", "a reader"])
def test_what_only_an_unread_peer_has_is_computed_beside(what: str):
    rig = Rig(TEXT, peer=16)
    node = on_an_unread_peer(rig, TEXT[:8])
    if what == "lossy storage":
        assert rig.storage.setup is not None
        rig.storage.setup = replace(rig.storage.setup, is_lossy=True)
    else:
        receipt = rig.tree.lock_node(node, LaunchSeq(20))
    (probe,) = rig.begin("r", TEXT)
    assert rig.finish(probe) == [] and rig.over("r") == [True] and not node.is_lossy
    rig.detach("r")
    if what == "a reader":
        rig.tree.unlock(receipt, LaunchSeq(20), LaunchSeq(-1))
    rig.assert_nothing_left()


def test_what_a_peer_has_between_two_fetches_is_not_storages():
    rig = Rig(TEXT, peer=16)
    rig.controller.unwritten = frozenset({HOST})
    above = rig.insert(TEXT[:4])
    rig.insert(TEXT[4:8], above)
    rig.controller.evict(DEVICE, 10)
    rig.finish_all()
    rig.controller.drop(above, PEER)
    rig.collect()
    (probe,) = rig.begin("r", TEXT)
    rig.finish(probe)
    rig.finish_all()
    assert rig.storage.found_by_tier("r") == (((0, 4), (8, 20)), ())
    assert rig.tree.match("", tokens(TEXT)).peer_runs == ((4, 8),)
    rig.detach("r")
    rig.assert_nothing_left()


def test_a_hole_is_filled_by_an_operation_of_its_own():
    """aaaab | bbbc | cccdddd: the blocks around the hole begin before it and end behind it."""
    rig = Rig(TEXT, host=32, blocks_per_op=8)
    top = rig.insert(TEXT[:5])
    hole = rig.insert(TEXT[5:9], below=top)
    low = rig.insert(TEXT[9:16], below=hole)
    rig.controller.feeds_storage = False  # else the page before `low` is copied with it, as a part of its block
    for node in (top, low):
        ticket = rig.controller.back_up([node], HOST)
        rig.collect()
        rig.finish(ticket)
    rig.finish_all()
    rig.controller.drop(top, DEVICE)
    rig.check()
    assert is_hole(hole) and rig.on_host(TEXT) == 5 and rig.host.counts[FrameState.CACHED] == 12
    (probe,) = rig.begin("r", TEXT)
    begun = rig.finish(probe)
    assert [keys_of(rig, t) for t in begun] == [2, 1], "bbbb and cccc for the hole, then what is lacking below"
    first = rig.ops[begun[0]]
    pages = first.frames.tolist()
    assert hole.frames[HOST].tolist() == pages[1:5], "the rest is read into pages that no node gets"
    assert [rig.host.state[pages[i]] for i in (0, 5, 6, 7)] == [FrameState.PENDING_FREE] * 4
    rig.finish_all()
    assert rig.over("r") == [True] and rig.on_host(TEXT) == 20 and rig.host.counts[FrameState.CACHED] == 20
    rig.detach("r")
    rig.assert_nothing_left()


def test_a_hole_whose_fetch_fails_stays_and_its_request_computes():
    rig = Rig(TEXT, host=32, blocks_per_op=8)
    top = rig.insert(TEXT[:4])
    hole = rig.insert(TEXT[4:8], below=top)
    low = rig.insert(TEXT[8:12], below=hole)
    ticket = rig.controller.back_up([low], HOST)
    rig.collect()
    rig.finish(ticket)
    rig.finish_all()
    rig.controller.drop(hole, DEVICE)
    (probe,) = rig.begin("r", TEXT[:12])
    (fetch,) = rig.finish(probe, count=2)
    assert keys_of(rig, fetch) == 1
    rig.finish(fetch, count=0)
    assert rig.over("r") == [True] and is_hole(hole) and low.frames[HOST] is not None
    rig.detach("r")
    rig.finish_all()
    assert rig.on_host(TEXT) == 4


def test_what_is_computed_below_a_fetch_does_not_hold_up_what_storage_has_beyond():
    """The path: fetched (computed meanwhile), computed, then what storage has beyond."""
    rig = Rig(TEXT)
    (probe,) = rig.begin("r", TEXT[:8])
    (fetch,) = rig.finish(probe)
    rig.insert(TEXT[:14])
    (probe,) = rig.begin("s", TEXT)
    (beyond,) = rig.finish(probe)
    assert keys_of(rig, beyond) == 2 and rig.over("r", "s") == [False, False]
    assert rig.finish(fetch) == [] and rig.over("r", "s") == [True, False]
    rig.finish(beyond)
    assert rig.over("s") == [True] and rig.on_host(TEXT) == 20
    assert rig.found("s")[1] == 20
    for rid in "rs":
        rig.detach(rid)
    rig.assert_nothing_left()


def test_without_room_on_the_host_the_rest_is_computed():
    rig = Rig(TEXT, host=10)
    rig.begin("r", TEXT)
    assert rig.finish(Ticket(PROBE, 0)) == [Ticket(FETCH, 0)]
    rig.finish_all()
    assert rig.storage.counters["prefetch_dropped_tokens"] == 12
    assert rig.over("r") == [True] and rig.on_host(TEXT) == 8
    rig.detach("r")
    rig.assert_nothing_left()


def test_without_room_for_the_page_above_the_rest_is_computed():
    rig = Rig(TEXT, host=4)
    rig.insert(TEXT[:8])
    rig.begin("r", TEXT)
    assert rig.finish(Ticket(PROBE, 0)) == [] and rig.over("r") == [True]
    rig.detach("r")
    rig.assert_nothing_left()


def test_no_fetch_waits_for_pages_of_a_write_that_is_late():
    rig = Rig("ccccdddd", host=12, blocks_per_op=1)
    for text in ("aaaa", "bbbb"):
        rig.controller.begin_backup(rig.insert(text))
        for ticket in rig.collect():
            rig.finish(ticket)
    rig.finish(Ticket(STORE, 1))
    (written,) = rig.tree.match("", tokens("aaaa")).path
    rig.controller.drop(written, HOST)
    rig.storage.watch()
    rig.storage.set_now(Seconds(3.0))
    rig.storage.watch()
    assert rig.storage.stores.near.writes.is_late and rig.host.counts[FrameState.PENDING_FREE] == 4
    rig.begin("r", "ccccdddd", 3.0)
    assert rig.finish(Ticket(PROBE, 0)) == [Ticket(FETCH, 0), Ticket(FETCH, 1)], "the other text makes room"
    rig.detach("r")
    rig.assert_nothing_left()


def test_room_is_made_from_others_not_from_the_path():
    rig = Rig(TEXT, host=16)
    for text in (TEXT[:4], "zzzzzzzz"):
        rig.controller.begin_backup(rig.insert(text))
        rig.collect()
        rig.finish_all()
    rig.controller.evict(DEVICE, 12)
    rig.begin("r", TEXT)
    rig.finish_all()
    assert rig.on_host(TEXT) == 12 and rig.on_host("zzzzzzzz") == 4, "for the last operation there was too little"
    rig.detach("r")
    rig.assert_nothing_left()


# -- several requests -------------------------------------------------------------------------------------------


def test_requests_share_what_is_fetched():
    rig = Rig(TEXT)
    first, second = rig.begin("r", TEXT), rig.begin("s", TEXT)
    assert len(rig.finish(first[0])) == 3
    assert rig.finish(second[0]) == [], "all of it is on its way"
    # One that comes later finds it there, and has nothing to ask for.
    assert rig.begin("t", TEXT + "x") == [] and rig.over("t") == [False]
    (probe,) = rig.begin("u", TEXT[:12] + "ffff")
    assert keys_of(rig, probe) == 1
    rig.finish(Ticket(FETCH, 0))
    rig.finish(Ticket(FETCH, 1))
    rig.finish(probe)
    # The last one shares three blocks only, two operations: it need not wait for the third.
    assert rig.over("r", "s", "t", "u") == [False, False, False, True]
    rig.finish(Ticket(FETCH, 2))
    assert rig.over("r", "s", "t") == [True] * 3
    assert [rig.found(rid) for rid in "rst"] == [(0, 20)] * 3
    for rid in "rstu":
        rig.detach(rid)
    assert rig.storage.counters["prefetched_tokens"] == 20
    rig.assert_nothing_left()


def test_a_transfer_is_cancelled_when_its_last_waiter_leaves():
    rig = Rig(TEXT)
    rig.finish(rig.begin("r", TEXT)[0])
    rig.begin("s", TEXT[:8])
    rig.detach("r")
    assert rig.cancelled == [Ticket(FETCH, 2), Ticket(FETCH, 1)], "the last of the path first"
    assert rig.over("s") == [False]
    rig.finish(Ticket(FETCH, 0))
    assert rig.over("s") == [True] and rig.on_host(TEXT) == 8
    rig.detach("s")
    rig.finish(Ticket(FETCH, 1))
    assert rig.on_host(TEXT) == 8, "what comes all the same is not kept"
    rig.assert_nothing_left()


def test_what_was_given_up_may_be_fetched_again_at_once():
    rig = Rig(TEXT, blocks_per_op=8)
    rig.finish(rig.begin("r", TEXT)[0])
    rig.detach("r")
    rig.finish(rig.begin("s", TEXT)[0])
    assert rig.cancelled == [Ticket(FETCH, 0)] and Ticket(FETCH, 1) in rig.ops
    rig.finish(Ticket(FETCH, 0))
    assert rig.on_host(TEXT) == 0 and rig.over("s") == [False]
    rig.finish(Ticket(FETCH, 1))
    assert rig.on_host(TEXT) == 20
    rig.detach("s")
    rig.assert_nothing_left()


def test_a_question_that_nobody_asks_any_more_is_cancelled():
    rig = Rig(TEXT)
    (probe,) = rig.begin("r", TEXT)
    rig.detach("r")
    assert rig.cancelled == [probe], "else the next one would wait behind it"
    assert rig.finish(probe) == []
    rig.detach("r")
    rig.assert_nothing_left()


def test_closing_lets_all_requests_go():
    rig = Rig(TEXT, max_fetch_pages=8)
    rig.finish(rig.begin("r", TEXT)[0])
    rig.begin("s", "zzzzyyyy")
    rig.storage.close()
    rig.collect()
    assert rig.over("r", "s") == [True, True] and len(set(rig.cancelled)) == 2
    rig.assert_nothing_left()


def test_a_copy_brings_the_front_of_its_block_along():
    """aaaabb | bbccccdddd: without `bb` of the upper node, storage would lack a block, and find none behind it."""
    rig = Rig()
    top = rig.insert(TEXT[:6])
    low = rig.insert(TEXT[6:16], below=top)
    copy = rig.controller.back_up([low], HOST)
    rig.collect()
    stores = rig.finish(copy)
    assert sum(keys_of(rig, store) for store in stores) == 3
    rig.finish_all()
    assert [(n.start, n.frames[HOST] is not None) for n in path_of(low)] == [(0, False), (4, True)]
    rig.assert_nothing_left()


def test_eviction_leaves_whole_blocks():
    rig = Rig(device=1024)
    node = rig.insert(TEXT[:14])
    assert [n.start for n in rig.tree.victims(DEVICE, 1)] == [12], "a page more, and the block is whole"
    assert [n.start for n in rig.tree.victims(DEVICE, 3)] == [12, 8]
    rig.storage.detach_storage()
    assert [n.start for n in rig.tree.victims(DEVICE, 1)] == [13], "without storage there are no blocks"
    assert node.end == 14


def test_a_device_of_few_blocks_is_cut_between_pages():
    """The device has 16 blocks."""
    rig = Rig()
    rig.insert(TEXT[:14])
    assert [n.start for n in rig.tree.victims(DEVICE, 1)] == [13]


# -- limits -----------------------------------------------------------------------------------------------------

LONG, OTHER = "aaaabbbbccccdddd", "ppppqqqqrrrrssss"


def test_what_is_too_much_goes_on_later_oldest_first():
    rig = Rig(LONG, OTHER, "tttt", blocks_per_op=1, max_fetch_pages=8)
    begun = [rig.finish(rig.begin(rid, text)[0]) for rid, text in (("r", LONG), ("s", OTHER), ("t", "tttt"))]
    assert begun == [[Ticket(FETCH, 0), Ticket(FETCH, 1)], [], []]
    order = []
    while rig.ops:
        ticket = min(rig.ops)
        before = {rid: rig.found(rid) for rid in "rst"}
        rig.finish(ticket)
        order += [rid for rid in "rst" if rig.found(rid) != before[rid]]
        assert rig.storage.stores.fetching_pages <= 8
        rig.start_ready("rst")
    assert order == list("rrrrsssst")
    rig.assert_nothing_left()


def test_a_small_one_does_not_overtake_when_there_is_room_for_it_alone():
    rig = Rig(LONG, OTHER, "tttt", blocks_per_op=2, max_fetch_pages=12)
    rig.finish(rig.begin("r", LONG[:8])[0])
    assert rig.finish(rig.begin("s", OTHER)[0]) == [], "8 and 8 are more than 12"
    assert rig.finish(rig.begin("t", "tttt")[0]) == [], "4 would fit, but somebody is older"
    assert rig.finish(Ticket(FETCH, 0)) == [] and rig.over("r") == [True], "r has not started, and keeps its blocks"
    assert [keys_of(rig, t) for t in rig.detach("r")] == [2], "of s"
    rig.finish_all()
    assert rig.over("s", "t") == [True, False], "4 and 16 are more than 12"
    rig.detach("s")
    rig.finish_all()
    assert rig.over("t") == [True] and rig.on_host("tttt") == 4
    rig.detach("t")
    rig.assert_nothing_left()


def test_one_operation_may_always_run():
    rig = Rig(LONG, blocks_per_op=2, max_fetch_pages=1)
    assert rig.finish(rig.begin("r", LONG)[0]) == [Ticket(FETCH, 0)]
    assert rig.finish(Ticket(FETCH, 0)) == [Ticket(FETCH, 1)]
    rig.finish_all()
    assert rig.on_host(LONG) == 16
    rig.detach("r")
    rig.assert_nothing_left()


def test_one_that_leaves_the_queue_does_not_stop_it():
    rig = Rig(LONG, OTHER, blocks_per_op=1, max_fetch_pages=4)
    rig.finish(rig.begin("r", LONG)[0])
    rig.finish(rig.begin("s", OTHER)[0])
    rig.detach("r")
    assert rig.storage.stores.fetching_pages == 4, "its operation still runs"
    assert rig.finish(Ticket(FETCH, 0)) == [Ticket(FETCH, 1)]
    rig.finish_all()
    assert rig.on_host(OTHER) == 16 and rig.on_host(LONG) == 0
    rig.detach("s")
    rig.assert_nothing_left()


# -- who is next ------------------------------------------------------------------------------------------------


def ends(rig: Rig, rids: str) -> str:
    """The order in which what is begun comes, by whose it is."""
    order = ""
    while rig.ops:
        ticket = min(rig.ops)
        waiters = rig.storage._waiters.get(ticket, {})
        order += "".join(rid for rid in rids if rid in waiters) if ticket.link == FETCH else ""
        rig.finish(ticket)
    return order


@pytest.mark.parametrize(("fetch_order", "order"), [("fifo", "rrrrsssst"), ("sjf", "rrtrrssss")])
def test_a_window_lets_the_shortest_job_pass(fetch_order: str, order: str):
    """Two of r's have been begun when the others come; t lacks less than what is left of r."""
    rig = Rig(LONG, OTHER, "tttt", blocks_per_op=1, fetch_window_ops=2, fetch_order=fetch_order)
    begun = [rig.finish(rig.begin(rid, text)[0]) for rid, text in (("r", LONG), ("s", OTHER), ("t", "tttt"))]
    assert [len(tickets) for tickets in begun] == [2, 0, 0]
    assert ends(rig, "rst") == order
    for rid in "rst":
        rig.detach(rid)
    rig.assert_nothing_left()


def test_a_long_job_is_not_passed_for_ever():
    """One block at a time; a short one comes whenever one has been begun. The long one has 2 blocks to go."""
    rig = Rig(LONG[:8], *(f"{c}" * 4 for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"), fetch_window_ops=1, fetch_order="sjf")
    rig.finish(rig.begin("A", "AAAA")[0])
    rig.finish(rig.begin("long", LONG[:8])[0])
    passed = 0
    for c in "BCDEFGHIJKLMNOPQRSTUVWXYZ":
        rig.finish(rig.begin(c, c * 4)[0])
        (ticket,) = (t for t in rig.ops if t.link == FETCH)
        if "long" in rig.storage._waiters[ticket]:
            break
        passed += 1
        rig.finish(ticket)
    assert 2 <= passed <= 2 * FETCH_PATIENCE + 1
    rig.finish_all()
    for rid in ("long", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"):
        rig.detach(rid)
    rig.assert_nothing_left()


def test_who_lacks_the_same_block_joins_before_its_turn():
    rig = Rig(LONG, OTHER, LONG[:8] + "yyyy", blocks_per_op=1, fetch_window_ops=1)
    rig.finish(rig.begin("s", OTHER)[0])
    for rid, text in (("r", LONG), ("twin", LONG), ("head", LONG[:4]), ("fork", LONG[:8] + "yyyy")):
        assert rig.finish(rig.begin(rid, text)[0]) == []
    # r's four blocks come for the twin as well; the one that shares two of them has its own behind.
    for wanted in ("s", "s", "s", "s"):
        (ticket,) = rig.ops
        assert list(rig.storage._waiters[ticket]) == [wanted]
        rig.finish(ticket)
    waiters = []
    while rig.ops:
        (ticket,) = rig.ops
        waiters.append(set(rig.storage._waiters[ticket]))
        rig.finish(ticket)
        if len(waiters) == 1:
            assert rig.over("r", "twin", "head", "fork") == [False, False, True, False]
    assert waiters == [{"r", "twin", "head", "fork"}, {"r", "twin", "fork"}, {"r", "twin"}, {"r", "twin"}, {"fork"}]
    assert rig.over("r", "twin", "head", "fork") == [True] * 4
    for rid in ("r", "s", "twin", "head", "fork"):
        rig.detach(rid)
    rig.assert_nothing_left()


def test_who_joins_another_keeps_its_fetch_alive():
    rig = Rig(LONG, OTHER, blocks_per_op=1, fetch_window_ops=1)
    rig.finish(rig.begin("s", OTHER[:4])[0])
    for rid in ("r", "twin"):
        rig.finish(rig.begin(rid, LONG)[0])
    rig.finish(Ticket(FETCH, 0))
    rig.detach("r")
    assert rig.cancelled == []
    rig.finish_all()
    assert rig.on_host(LONG) == 16 and rig.over("twin") == [True]
    for rid in ("s", "twin"):
        rig.detach(rid)
    rig.assert_nothing_left()


def test_who_joins_a_fetch_joins_those_above_it():
    rig = Rig(LONG, OTHER, blocks_per_op=1, fetch_window_ops=2)
    rig.finish(rig.begin("s", OTHER[:4])[0])
    (probe,) = rig.begin("twin", LONG)
    rig.finish(rig.begin("r", LONG)[0])
    assert keys_of(rig, Ticket(FETCH, 0)) == keys_of(rig, Ticket(FETCH, 1)) == 1 and rig.ops.keys() >= {probe}
    # In one step another's fetch ends and the answer comes: r begins its second block, which twin joins.
    for ticket in (Ticket(FETCH, 0), probe):
        del rig.ops[ticket]
    rig.storage.end_fetch(Ticket(FETCH, 0), 1)
    rig.storage.end_probe(probe, 4)
    rig.storage.begin_fetches()
    rig.collect()
    rig.detach("r")
    assert rig.cancelled == [], "the first block is the twin's as well"
    rig.finish_all()
    assert rig.on_host(LONG) == 16 and rig.found("twin") == (0, 16)
    for rid in ("s", "twin"):
        rig.detach(rid)
    rig.assert_nothing_left()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
def test_everybody_is_served_in_any_order(seed: int):
    rng = random.Random(seed)
    texts = ["".join(rng.choice("ab") * 4 for _ in range(rng.randrange(1, 7))) for _ in range(30)]
    rig = Rig(
        *texts,
        host=400,
        blocks_per_op=rng.choice((1, 2)),
        fetch_window_ops=rng.choice((1, 2, 8)),
        max_fetch_pages=rng.choice((4, 20, 64)),
        fetch_order=rng.choice(("fifo", "sjf")),
    )
    waiting: list[str] = []
    left = set()
    for i, text in enumerate(texts):
        rig.begin(str(i), text)
        waiting.append(str(i))
        for _ in range(rng.randrange(3)):
            if rig.ops:
                rig.finish(min(t for t in rig.ops if t.seq == min(o.seq for o in rig.ops if o.link == t.link)))
        if rng.random() < 0.2:
            left.add(gone := rng.choice(waiting))
            waiting.remove(gone)
            rig.detach(gone)
    while waiting:
        rig.finish_all()
        ready = [rid for rid in waiting if rig.over(rid) == [True]]
        assert ready, f"{waiting} wait for each other"
        for rid in ready:
            assert rig.on_host(texts[int(rid)]) == len(texts[int(rid)])
            rig.detach(rid)
            waiting.remove(rid)
    rig.assert_nothing_left()


# -- time -------------------------------------------------------------------------------------------------------


def test_deadlines_pass_in_order():
    rig = Rig(TEXT, policy="timeout", timeout_base_s=1.0, timeout_per_ki_token_s=1024 / 4)
    assert rig.storage.next_deadline is None
    rig.begin("late", TEXT, now=10.0)  # 1 + 5
    rig.begin("early", TEXT[:8], now=11.0)  # 1 + 2
    assert rig.storage.next_deadline == 14.0
    expire(rig, 13.9)
    assert rig.over("early", "late") == [False, False]
    expire(rig, 14.0)
    assert rig.over("early", "late") == [True, False] and rig.storage.next_deadline == 16.0
    assert rig.cancelled == [Ticket(PROBE, 1)]
    expire(rig, 99.0)
    assert rig.over("late") == [True] and rig.storage.next_deadline is None
    assert rig.storage.counters["prefetch_timeouts"] == 2
    for ticket in list(rig.ops):
        assert rig.finish(ticket) == [], "an answer that comes too late begins nothing"
    rig.detach("early")
    rig.detach("late")
    rig.assert_nothing_left()


def test_what_has_come_in_time_is_kept():
    rig = Rig(TEXT, policy="timeout", timeout_base_s=1.0, timeout_per_ki_token_s=0.0)
    rig.finish(rig.begin("r", TEXT, now=0.0)[0])
    rig.finish(Ticket(FETCH, 0))
    expire(rig, 1.0)
    assert rig.over("r") == [True] and rig.found("r") == (0, 8) and rig.on_host(TEXT) == 8
    rig.finish_all()
    assert rig.found("r") == (0, 8) and rig.on_host(TEXT) == 8
    rig.detach("r")
    rig.assert_nothing_left()


def test_those_who_left_or_are_ready_have_no_deadline():
    rig = Rig(TEXT, policy="timeout", timeout_base_s=1.0)
    (first,) = rig.begin("gone", TEXT, now=0.0)
    (second,) = rig.begin("ready", "zzzz", now=0.1)
    rig.detach("gone")
    rig.finish(second)
    assert rig.over("ready") == [True]
    assert rig.storage.next_deadline is None, "no request has a deadline"
    rig.begin("gone", TEXT, now=5.0)  # a name may come again
    expire(rig, 2.0)
    assert rig.over("gone") == [False] and rig.storage.next_deadline > 6.0
    rig.finish(first)
    for rid in ("gone", "ready"):
        rig.detach(rid)
    rig.assert_nothing_left()


def test_even_waiting_for_everything_ends():
    rig = Rig(TEXT)
    rig.begin("r", TEXT, now=1.0)
    assert rig.storage.next_deadline == 61.0
    expire(rig, 61.0)
    assert rig.over("r") == [True]
    rig.detach("r")
    rig.assert_nothing_left()


def test_best_effort_waits_for_nothing():
    rig = Rig(TEXT, policy="best_effort")
    rig.finish(rig.begin("r", TEXT)[0])
    assert rig.over("r") == [True] and rig.storage.num_waiting == 1
    rig.finish(Ticket(FETCH, 0))
    rig.detach("r")
    assert rig.on_host(TEXT) == 8
    rig.assert_nothing_left()


def test_an_expired_one_gives_its_place_up():
    rig = Rig(LONG, OTHER, policy="timeout", timeout_base_s=1.0, blocks_per_op=1, max_fetch_pages=4)
    rig.finish(rig.begin("r", LONG, now=0.0)[0])
    rig.finish(rig.begin("s", OTHER, now=5.0)[0])
    expire(rig, 3.0)
    rig.finish_all()
    assert rig.on_host(LONG) == 0 and rig.on_host(OTHER) == 16
    for rid in "rs":
        rig.detach(rid)
    rig.assert_nothing_left()


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="best_effort"):
        Rig(policy="sometimes")


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="fifo, sjf"):
        Rig(fetch_order="longest")


def test_without_storage_nobody_waits():
    rig = Rig(TEXT)
    rig.storage.close()
    assert rig.begin("r", TEXT) == [] and rig.over("r") == [True]
    rig.assert_nothing_left()


def test_what_came_is_told_apart_by_storage_tier():
    """The first two blocks lie near, the other three far."""
    rig = Rig(TEXT, tiers=TWO)
    (probe,) = rig.begin("r", TEXT)
    fetches = rig.finish(probe, 5, far_count=3)
    assert rig.storage.found_by_tier("r") == ()
    assert [(t.link, keys_of(rig, t), rig.ops[t].skips) for t in fetches] == [
        (FETCH, 2, (1,)),
        (FETCH_FAR, 2, (0,)),
        (FETCH_FAR, 1, (0,)),
    ]
    seen, begun = [], []
    for ticket in fetches:
        begun += rig.finish(ticket)
        seen.append(rig.storage.found_by_tier("r"))
    assert seen == [(((0, 8),), ()), (((0, 8),), ((8, 16),)), (((0, 8),), ((8, 20),))]
    # The near store gets what the far one had; that of the near one is believed to be on both.
    assert [(t.link, keys_of(rig, t), rig.ops[t].skips) for t in begun] == [(STORE, 2, (1,)), (STORE, 1, (1,))]
    rig.detach("r")
    rig.assert_nothing_left()


def test_who_has_ceased_to_wait_is_told_once():
    rig = Rig(TEXT)
    (probe,) = rig.begin("first", TEXT)
    rig.begin("second", "x" + TEXT)
    assert rig.storage.take_let_start() == []
    rig.finish(probe, 0)
    assert rig.storage.take_let_start() == ["first"] and rig.storage.take_let_start() == []
    rig.begin("third", "y" + TEXT)
    rig.detach("third")
    rig.storage.set_prefetch_policy("best_effort")
    assert rig.storage.take_let_start() == ["third", "second"]
    for rid in ("first", "second"):
        rig.detach(rid)
    rig.assert_nothing_left()


def test_a_request_that_joins_a_fetch_is_told_the_storage_tier_too():
    """It has asked storage itself for nothing."""
    rig = Rig(TEXT, tiers=TWO)
    (probe,) = rig.begin("first", TEXT)
    fetches = rig.finish(probe, 5, far_count=3)
    rig.begin("second", TEXT)
    while fetches:
        fetches += rig.finish(fetches.pop(0))
    assert rig.storage.found_by_tier("second") == (((0, 8),), ((8, 20),))
    rig.detach("first")
    rig.detach("second")
    rig.assert_nothing_left()


def test_one_trial_of_slow_storage_at_a_time():
    rig = Rig(TEXT)
    trial, breaker = rig.storage.stores.near.trial, rig.storage.stores.near.reads
    key = rig.tree.names.keys.of_prompt("", tokens(TEXT)[:4])
    breaker.now = 10.0
    trial.begin_doubt(key, is_slow=True)
    rig.collect()
    probe = trial.ticket
    assert probe is not None and probe.link == PROBE
    breaker.now = 100.0
    trial.begin_doubt(key, is_slow=True)
    assert trial.ticket == probe
    rig.finish(probe)
    read = trial.ticket
    assert read is not None and read.link == FETCH
    breaker.now = 1000.0
    trial.begin_doubt(key, is_slow=True)
    assert trial.ticket == read, "its end would be taken for that of a request's read"
    rig.finish(read)
    assert trial.ticket is None
    rig.assert_nothing_left()


def rig_left_alone(host: int = 64) -> Rig:
    """After probes that failed, when a trial is due."""
    rig = Rig(TEXT, host=host)
    for i in range(FAILURES_IN_A_ROW):
        (probe,) = rig.begin(f"failed {i}", TEXT)
        rig.finish(probe, PROBE_FAILED)
        rig.detach(f"failed {i}")
    assert rig.storage.stores.near.reads.is_open
    rig.storage.set_now(Seconds(100.0))
    rig.storage.watch()
    return rig


def test_failures_let_those_go_that_wait():
    rig = Rig(TEXT, OTHER, fetch_window_ops=1)
    rig.finish(rig.begin("fetching", TEXT)[0])
    rig.finish(rig.begin("to begin", OTHER)[0])
    (probe,) = rig.begin("asking", "zzzz")
    assert rig.over("fetching", "to begin", "asking") == [False] * 3
    for _ in range(FAILURES_IN_A_ROW):
        rig.storage.stores.near.reads.end(PROBE, succeeded=False)
    rig.storage.watch()
    rig.collect()
    assert rig.over("fetching", "to begin", "asking") == [True] * 3
    assert sorted(rig.cancelled) == [Ticket(FETCH, 0), probe]
    for rid in ("fetching", "to begin", "asking"):
        rig.detach(rid)
    rig.assert_nothing_left()


@pytest.mark.parametrize("why", ["fails", "switched off"])
def test_an_answer_that_is_not_waited_for_begins_nothing_where_nothing_is_read(why: str):
    switches = TierSwitches()
    rig = Rig(TEXT, switches=switches, policy="timeout")
    (first,) = rig.begin("first", "zzzz")
    rig.storage.set_now(Seconds(1.0))
    rig.finish(first)
    # A probe takes longer than what it may save.
    rig.storage.set_advice(StorageAdvice(fetch_gain_s=lambda place, start, end: 1e-6))
    (probe,) = rig.begin("r", TEXT, now=1.0)
    assert rig.over("first", "r") == [True, True]
    if why == "fails":
        for _ in range(FAILURES_IN_A_ROW):
            rig.storage.stores.near.reads.end(PROBE, succeeded=False)
        rig.storage.watch()
    else:
        switches.turn(HOST, reads=False, writes=None)
        rig.storage.obey_switches()
    assert rig.finish(probe) == [] and rig.over("r") == [True]
    for rid in ("first", "r"):
        rig.detach(rid)
    rig.assert_nothing_left()


def test_requests_of_one_step_begin_one_trial():
    rig = rig_left_alone()
    begun = [rig.begin(f"r{i}", TEXT) for i in range(5)]
    assert [len(each) for each in begun] == [1, 0, 0, 0, 0] and rig.storage.counters["storage_trials"] == 1
    (read,) = rig.finish(*begun[0])
    rig.finish(read)
    assert not rig.storage.stores.near.reads.is_open
    rig.assert_nothing_left()


def test_a_trial_without_room_is_followed_by_a_pause():
    rig = rig_left_alone(host=4)
    assert rig.host.allocate(4) is not None
    for now, num_begun in ((100.0, 1), (100.5, 0), (100.0 + TRIAL_PAUSE_S, 1)):
        rig.storage.set_now(Seconds(now))
        rig.storage.watch()
        begun = rig.begin(f"at {now}", TEXT)
        assert len(begun) == num_begun, now
        for probe in begun:
            assert rig.finish(probe) == []


def test_what_would_come_too_late_counts_as_recomputed():
    times: dict[str, object] = {"policy": "timeout", "timeout_base_s": 1.0, "timeout_per_ki_token_s": 0.0}
    rig = Rig(TEXT, window_reach=4, windowed=64, windowed_host=64, **times)
    storage = rig.storage
    assert storage.setup is not None
    storage.attach_storage(replace(storage.setup, has_windowed_store=True))
    storage.set_advice(StorageAdvice(fetch_s=lambda place, num_tokens: 5.0))
    (probe,) = rig.begin("r", TEXT)
    assert rig.finish(probe, 5) == [] and rig.over("r") == [True]
    assert storage.counters["fetches_cut"] == 1 and storage.counters["fetch_cut_tokens"] == 20
    found = Lookup("", tokens(TEXT), 0, storage.outcome("r"))
    assert LostHits(rig.tree, 1).explain(found, 21, 0) == {"recomputed": 20, "last_token": 1}
