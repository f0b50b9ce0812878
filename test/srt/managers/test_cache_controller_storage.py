"""`HiCacheController` and `StorageController` by example: fetches, writes, and what storage does not take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang.srt.managers import block_writer
from sglang.srt.mem_cache.node import is_hole
from sglang.srt.mem_cache.transfer import (
    D2H,
    FETCH,
    PROBE,
    STORE,
    StorageAction,
    StorageOp,
    Ticket,
)
from support.controller_rig import LETTERS, NAMES, StorageRig, load
from support.storage_rig import DEVICE, HOST, PEER, tokens


def test_a_fetch_from_begin_to_end() -> None:
    rig = StorageRig(host=6)
    ticket = rig.fetch("abcd")
    assert rig.begun() == [(FETCH, 0, ["ab", "cd"], [0, 1, 2, 3])] and ticket == Ticket(FETCH, 0)
    assert rig.states(HOST) == "IIIIFF" and rig.host.pins.tolist() == [1, 1, 1, 1, 0, 0]
    assert rig.lengths("abcd") == (0, 0) and rig.storage.stores.fetching_pages == 4
    assert rig.storage.has_outstanding
    rig.end_fetch(ticket, 2)
    assert rig.states(HOST) == "CCCCFF" and not rig.host.pins.any() and rig.lengths("abcd") == (0, 4)
    assert rig.storage.stores.fetching_pages == 0 and not rig.ledger.in_flight
    assert rig.storage.counters == {"prefetched_tokens": 4}
    assert rig.begun() == [], "storage has it: it is not written back"


@pytest.mark.parametrize(("count", "states", "found_len"), [(0, "FFFFFF", 0), (1, "CCFFFF", 2), (2, "CCCCFF", 4)])
def test_a_fetch_that_comes_in_part(count: int, states: str, found_len: int) -> None:
    rig = StorageRig(host=6)
    rig.end_fetch(rig.fetch("abcd"), count)
    assert rig.states(HOST) == states and rig.lengths("abcd") == (0, found_len)


def test_the_head_of_a_block_that_begins_above_is_read_for_nobody() -> None:
    rig = StorageRig(host=8)
    rig.back_up(rig.insert("abc"))
    rig.begun()
    ticket = rig.fetch("abcdef", start=3)
    assert rig.begun() == [(FETCH, 0, ["cd", "ef"], [3, 4, 5, 6])]
    assert rig.states(HOST) == "CCCDIIIF", "frame 3 takes what the tree has already"
    rig.host.reap(10)
    assert rig.states(HOST) == "CCCDIIIF" and rig.host.pins.tolist() == [1, 1, 0, 1, 1, 1, 1, 0], (
        "it is being read into"
    )
    rig.end_fetch(ticket, 2)
    assert rig.states(HOST) == "CCCFCCCF" and rig.lengths("abcdef") == (3, 6)


def test_a_part_that_ends_within_the_node_above() -> None:
    rig = StorageRig(host=8)
    rig.back_up(rig.insert("abc"))
    rig.end_fetch(rig.fetch("abcdef", start=3), 0)
    assert rig.lengths("abcdef") == (3, 3) and rig.states(HOST) == "CCCFFFFF"


def test_a_fetch_that_is_given_up_keeps_its_memory_until_it_is_over() -> None:
    rig = StorageRig(host=6)
    ticket = rig.fetch("abcd")
    rig.begun()
    rig.storage._cancel_fetch(ticket)
    rig.host.reap(10)
    assert rig.states(HOST) == "DDDDFF" and rig.tree.num_nodes == 0
    assert rig.ledger.take_ops() == ((), (ticket,))
    rig.fetch("ab")
    rig.end_fetch(ticket, 2)
    assert rig.lengths("abcd") == (0, 0), "what came is not wanted"
    assert rig.states(HOST) == "FFFFII" and rig.storage.stores.fetching_pages == 2


def test_giving_up_a_fetch_gives_up_what_is_fetched_below() -> None:
    rig = StorageRig()
    first, second = rig.fetch("ab"), rig.fetch("abcd", start=2)
    rig.begun()
    rig.storage._cancel_fetch(first)
    rig.check()
    assert rig.ledger.take_ops() == ((), (first, second))
    assert rig.tree.num_nodes == 0
    rig.end_fetch(first, 1)
    rig.end_fetch(second, 1)
    assert rig.states(HOST) == "F" * 16 and rig.tree.num_nodes == 0


def test_what_is_computed_while_it_is_fetched() -> None:
    rig = StorageRig()
    ticket = rig.fetch("abcd")
    node = rig.insert("abc")
    assert node.frames[DEVICE].tolist() == [0, 1, 2] and node.tickets[HOST] == ticket
    assert rig.lengths("abcd") == (3, 3), "the rest is not there yet"
    rig.end_fetch(ticket, 2)
    assert rig.lengths("abcd") == (3, 4) and rig.states(HOST)[:5] == "CCCCF"


def test_what_is_computed_below_a_fetch_is_backed_up_at_once() -> None:
    rig = StorageRig()
    ticket = rig.fetch("abcd")
    low = rig.insert("abcdef")
    rig.begun()
    assert rig.at(10).begin_backup(low) == Ticket(D2H, 0)
    assert rig.begun() == [(D2H, 0, [], [4, 5])], "not what storage brings"
    rig.commit(0)
    assert rig.begun() == [(STORE, 0, ["ef"], [4, 5])]
    rig.end_fetch(ticket, 1)
    ((link, _, _, frames),) = rig.begun()
    assert link == D2H and len(frames) == 2, "what did not come, and was computed"
    rig.commit(1)
    assert rig.begun() == [(STORE, 1, ["cd"], frames)], "storage has lost it"
    assert rig.lengths("abcdef") == (6, 6)


def test_what_does_not_come_and_was_computed_is_backed_up_and_stored_anew() -> None:
    rig = StorageRig()
    ticket = rig.fetch("abcd")
    rig.insert("abcd")
    rig.begun()
    rig.end_fetch(ticket, 1)
    ((link, _, _, frames),) = rig.begun()
    assert link == D2H and len(frames) == 2
    rig.commit(0)
    assert rig.begun() == [(STORE, 0, ["cd"], frames)], "storage has lost it"


def test_a_fetch_that_is_given_up_after_it_was_computed_is_backed_up() -> None:
    rig = StorageRig()
    ticket = rig.fetch("abcd")
    rig.insert("abcd")
    rig.begun()
    rig.storage._cancel_fetch(ticket)
    rig.check()
    assert [link for link, *_ in rig.begun()] == [D2H] and rig.lengths("abcd") == (4, 4)


def test_a_fetch_needs_room() -> None:
    rig = StorageRig(host=4)
    rig.back_up(rig.insert("uvw"))
    assert not rig.at(10).make_room(HOST, 5, ())
    assert rig.states(HOST) == "CCCF", "nothing is gained by throwing this away"
    assert rig.at(10).make_room(HOST, 2, ()) and rig.states(HOST) == "CCFF"
    rig.fetch("ab")
    assert not rig.at(10).make_room(HOST, 3, ()), "what is being filled stays"
    with pytest.raises(AssertionError, match="make room first"):
        rig.fetch("pqrs")


def test_each_block_is_written_once_from_the_host_pages() -> None:
    rig = StorageRig()
    node = rig.insert("abcde")
    rig.at(10).begin_backup(node)
    assert [link for link, *_ in rig.begun()] == [D2H]
    rig.commit(0)
    assert rig.begun() == [(STORE, 0, ["ab", "cd"], [0, 1, 2, 3])], "the last letter is no whole block"
    assert rig.host.pins.tolist()[:6] == [1, 1, 1, 1, 0, 0] and rig.storage.stores.near.writer.storing_pages == 4
    # While it is written, the path grows: the block that began in the node above is written with its head.
    rig.back_up(rig.insert("fgh", below=rig.tree.match("", tokens("abcde")).path[-1]))
    assert rig.begun() == [(STORE, 1, ["ef", "gh"], [4, 5, 6, 7])]
    rig.end_store(0, 2)
    rig.end_store(1, 2)
    assert not rig.host.pins.any() and rig.storage.stores.near.writer.storing_pages == 0
    assert rig.storage.counters["backuped_tokens"] == 8
    rig.back_up(rig.insert("xy", below=rig.tree.lock(rig.tree.match("", tokens("abcd")), 0).node))
    assert [len(keys) for _, _, keys, _ in _named(rig)] == [1], "only the new branch"


def _named(rig: StorageRig) -> list[tuple[str, int, list[bytes], list[int]]]:
    ops = rig.ledger.take_ops()[0]
    return [
        (op.ticket.link, op.ticket.seq, [k.tobytes() for k in op.keys], op.frames.tolist())
        for op in ops
        if isinstance(op, StorageOp)
    ]


def test_operations_are_of_a_few_blocks() -> None:
    rig = StorageRig(blocks_per_op=2)
    rig.back_up(rig.insert("abcdefghij"))
    assert rig.begun() == [
        (STORE, 0, ["ab", "cd"], [0, 1, 2, 3]),
        (STORE, 1, ["ef", "gh"], [4, 5, 6, 7]),
        (STORE, 2, ["ij"], [8, 9]),
    ]


def test_eviction_from_the_host_keeps_what_is_being_written() -> None:
    rig = StorageRig(host=4)
    rig.back_up(rig.insert("abcd"))
    rig.begun()
    rig.at(10).evict(HOST, 4)
    assert rig.states(HOST) == "DDDD", "the bytes stay"
    rig.end_store(0, 2)
    rig.host.reap(10)
    assert rig.states(HOST) == "FFFF"


def test_what_storage_did_not_take_is_counted_and_not_tried_again() -> None:
    rig = StorageRig()
    node = rig.insert("abcd")
    rig.back_up(node)
    rig.begun()
    rig.end_store(0, 1)
    assert rig.storage.counters["backuped_tokens"] == 2
    assert rig.storage.counters["storage_backup_failed_tokens"] == 2
    rig.back_up(rig.insert("ef", below=node))
    assert rig.begun() == [(STORE, 1, ["ef"], [4, 5])]


def test_too_much_at_once_is_stored_later() -> None:
    rig = StorageRig(store=4, blocks_per_op=1)
    rig.back_up(rig.insert("abcdefgh"))
    assert rig.begun() == [(STORE, 0, ["ab"], [0, 1]), (STORE, 1, ["cd"], [2, 3])]
    rig.back_up(rig.insert("uv"))
    assert rig.begun() == [] and rig.storage.stores.near.writer.storing_pages == 4
    rig.end_store(0)
    assert rig.begun() == [(STORE, 2, ["ef"], [4, 5])]
    rig.end_store(1)
    rig.end_store(2)
    assert sorted(keys[0] for _, _, keys, _ in rig.begun()) == ["gh", "uv"]
    rig.end_store(3)
    rig.end_store(4)
    assert rig.begun() == [] and rig.storage.stores.near.writer.storing_pages == 0


def test_what_is_gone_by_then_is_not_stored() -> None:
    rig = StorageRig(store=2)
    rig.back_up(rig.insert("ab"))
    rig.back_up(rig.insert("uvwx", now=1))
    rig.begun()
    for tier in (DEVICE, HOST):
        rig.controller.drop(rig.tree.match("", tokens("uv")).path[0], tier)
    rig.end_store(0)
    assert rig.begun() == []


def test_of_a_path_that_lost_its_end_the_rest_is_stored() -> None:
    rig = StorageRig(store=2, host=8)
    rig.back_up(rig.insert("ab", now=9))
    rig.back_up(rig.insert("uvwx"))
    rig.begun()
    rig.at(10).evict(HOST, 2)
    rig.end_store(0)
    assert [keys for _, _, keys, _ in rig.begun()] == [["uv"]]


def test_a_path_to_be_stored_that_is_merged_into_what_is_fetched_below() -> None:
    rig = StorageRig(store=2)
    rig.back_up(rig.insert("uv"))
    rig.end_fetch(rig.fetch("ab"), 1)
    # Storage has lost it, and can take no more.
    node = rig.tree.match("", tokens("ab")).path[-1]
    rig.tree.names.forget_stored(node)
    rig.storage.stores.near.writer.store_path(node)
    rig.begun()
    # What has soft pins is merged with nothing.
    rig.storage.stores.near.writer.unpin()
    rig.at(10).evict(DEVICE, 2)
    rig.end_fetch(rig.fetch("abcd", start=2), 1)
    assert rig.tree.num_nodes == 2
    rig.begun()
    rig.end_store(0)
    assert [keys for _, _, keys, _ in rig.begun()] == [["ab"]]


def test_what_waits_to_be_stored_does_not_keep_what_has_left_the_tree() -> None:
    rig = StorageRig(store=2, host=8)
    rig.back_up(rig.insert("ab"))
    for _ in range(1000):
        node = rig.insert("uvwx")
        rig.at(10).commit(rig.controller.begin_backup(node))
        for tier in (DEVICE, HOST):
            rig.controller.drop(node, tier)
            rig.controller.tables[tier].reap(10)
    assert len(rig.storage.stores.near.writer._deferred) <= 2 * 64
    rig.end_store(0)
    rig.check()


def test_closing_gives_up_what_is_on_its_way() -> None:
    rig = StorageRig()
    rig.back_up(rig.insert("uvwx"))
    fetch = rig.fetch("abcd")
    low = rig.insert("abcdef")
    probe = rig.storage.ledger.begin_storage_op(PROBE, StorageAction.EXISTS, NAMES.of_prompt("", tokens("pqrs")))
    rig.begun()
    rig.storage.close()
    rig.check()
    ops, cancels = rig.ledger.take_ops()
    assert set(cancels) == {fetch, probe, Ticket(STORE, 0)}
    assert [op.ticket.link for op in ops] == [D2H], "what was computed while it was fetched is backed up now"
    rig.at(10).commit(ops[0].ticket)
    rig.check()
    assert rig.begun() == [], "nothing new is begun"
    with pytest.raises(AssertionError):
        rig.storage.administer(StorageAction.DETACH)
    rig.end_fetch(fetch, 2)
    rig.end_store(0, 0)
    rig.ledger.end(probe)
    assert not rig.storage.has_outstanding and low.parent.frames[HOST] is not None
    ticket = rig.storage.administer(StorageAction.DETACH)
    assert ticket == Ticket(PROBE, 1)
    rig.ledger.end(ticket)
    rig.storage.detach_storage()
    rig.check()
    assert all(n.block_keys is None and n.stored is None for n in rig.tree.walk())
    rig.back_up(rig.insert("pq"))
    assert [link for link, *_ in rig.begun()] == [], "there is no storage"


def test_another_storage_knows_nothing() -> None:
    rig = StorageRig()
    node = rig.insert("abcd")
    rig.back_up(node)
    rig.begun()
    rig.end_store(0, 2)
    rig.storage.close()
    rig.attach()
    rig.check()
    rig.back_up(rig.insert("ef", below=node))
    assert rig.begun() == [(STORE, 1, ["ab", "cd", "ef"], [0, 1, 2, 3, 4, 5])]


def forget_what_is_fetched(rig: StorageRig) -> None:
    rig.storage.stores.near.fetching_pages -= 1


def forget_what_is_stored(rig: StorageRig) -> None:
    rig.storage.stores.near.writer.storing_pages = 0


def forget_a_fetch(rig: StorageRig) -> None:
    rig.storage.stores.near.fetches.clear()


def unpin_a_fetch(rig: StorageRig) -> None:
    rig.host.unpin(np.array([4], np.int32))


def a_fetch_fills_other_pages(rig: StorageRig) -> None:
    op = rig.ledger.in_flight[Ticket(FETCH, 0)]
    op.frames[:] = op.frames[::-1] - 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "corrupt",
    [
        forget_what_is_fetched,
        forget_what_is_stored,
        forget_a_fetch,
        unpin_a_fetch,
        a_fetch_fills_other_pages,
    ],
)
def test_check_invariants_notices_what_is_wrong_with_storage(corrupt) -> None:
    rig = StorageRig()
    rig.back_up(rig.insert("uvwx"))
    rig.fetch("abcd")
    rig.insert("abcdef")
    rig.check()
    corrupt(rig)
    with pytest.raises(AssertionError):
        rig.check()


def test_lossy_kv_and_what_was_computed_from_it_is_never_stored_as_exact() -> None:
    rig = StorageRig(device=32, host=32)
    rig.attach(is_lossy=True)
    rig.back_up(rig.insert("ab"))
    assert [blocks for _, _, blocks, _ in rig.begun() if blocks] == [["ab"]]
    rig.end_store(0)
    rig.end_fetch(rig.fetch("abcd", start=2), 1)
    rig.begun()
    # Another storage, which is exact, is attached; a prompt goes on below what came from the lossy one.
    rig.storage.detach_storage()
    rig.attach()
    rig.at(10).commit(load(rig, [n for n in rig.tree.walk() if n.frames[DEVICE] is None]))
    rig.back_up(rig.insert("abcdef"))
    # The canary tells by node where KV came from.
    assert {rig.tree.path_of(n)[-1].end: n.is_lossy for n in rig.tree.walk()} == {2: False, 4: True, 6: True}
    assert [blocks for _, _, blocks, _ in rig.begun() if blocks] == [["ab"]], (
        "only what was computed from nothing else"
    )
    rig.end_store(1)
    # Another prompt splits a lossy node; a lossy storage takes all of it.
    rig.attach(is_lossy=True)
    rig.back_up(rig.insert("abcdexyz"))
    assert all(n.is_lossy == (n.start >= 2) for n in rig.tree.walk()) and rig.tree.num_nodes > 3
    stored = [op.keys for op in rig.ledger.take_ops()[0] if isinstance(op, StorageOp)]
    assert {LETTERS.get(key.tobytes()) for keys in stored for key in keys} == {"ab", "cd", None}
    rig.check()


def test_a_hole_that_is_computed_counts_as_stored_no_more() -> None:
    """Storage did not take it, or has lost it: a request has missed it there."""
    rig = StorageRig()
    node = rig.insert("abcdef")
    rig.back_up(node)
    rig.begun()
    rig.end_store(0, 0)  # storage took none of the blocks
    rig.tree.split(node, 2)
    hole = rig.tree.split(node, 2)
    for tier in (DEVICE, HOST):
        rig.controller.drop(hole, tier)
    rig.check()
    assert is_hole(hole) and hole.stored is not None and hole.stored.all()
    assert rig.insert("cd", below=hole.parent) is hole and not hole.stored.any()
    rig.back_up(hole)
    assert ["cd"] in [blocks for link, _, blocks, _ in rig.begun() if link == STORE]


def test_the_oldest_path_of_too_many_that_wait_to_be_stored_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_writer, "_MAX_DEFERRED_STORES", 2)
    rig = StorageRig(device=16, host=16, store=2)
    writer = rig.storage.stores.near.writer
    writer._tidy_at = 2
    rig.back_up(rig.insert("ab"))  # holds all that may be written at once
    nodes = [rig.insert(text) for text in ("uv", "pq", "kl")]
    for node in nodes:
        rig.back_up(node)
    assert list(writer._deferred.values()) == nodes[1:] == list(writer.pinned.values())
    assert [node.soft_pins for node in nodes] == [0, 1, 1]
    assert rig.storage.counters["storage_backup_dropped_paths"] == 1
    rig.check()


def test_what_a_tenant_may_have_no_more_of_on_the_host_is_not_copied_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = StorageRig()
    free, full = rig.insert("uv"), rig.insert("ab")
    monkeypatch.setattr(rig.controller, "is_over_quota", lambda node, tier: tier == HOST and node is full)
    assert rig.controller.begin_backup(full) is None
    assert rig.controller.back_up([full, free], HOST) is not None
    assert full.frames[HOST] is None and free.frames[HOST] is not None
    assert rig.controller.counters["backup_dropped_tokens"] == 0
    rig.check()


def test_where_the_link_takes_less_than_a_block_a_part_of_one_is_written_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = StorageRig(write_policy="auto")
    monkeypatch.setattr(rig.tree.order, "cut_tokens", 4)
    monkeypatch.setattr(rig.controller.links, "num_allowed", lambda tier: 1)
    node = rig.insert("abcd")
    rig.controller.back_up_inserted(node)
    assert [(link, frames) for link, _, _, frames in rig.begun()] == [(D2H, [0])]
    assert [len(n.key) for n in rig.tree.path_of(node)] == [1, 3]
    rig.check()


def test_what_the_host_has_too_is_not_kept_on_peers_for_being_unstored() -> None:
    rig = StorageRig(16, 16, write_policy="auto", peer=4)
    node = rig.insert("abcd")
    rig.copy(node, PEER)
    rig.copy(node, HOST)
    rig.controller.drop(node, DEVICE)
    assert node.stored is not None
    node.stored[:] = False  # storage has not taken it
    assert rig.controller._unstored([node]) == []
    assert rig.controller.make_room(PEER, 4, ())
    assert node.frames[PEER] is None and node.frames[HOST] is not None


def test_a_full_exclusive_store_gets_what_the_host_gives_up_next() -> None:
    rig = StorageRig(16, 4)
    rig.storage.stores.near.writer.setup = replace(rig.storage.setup, write_policy="auto")
    rig.storage.note_room((False, True))
    rig.on_host_only("ab")
    rig.begun()
    rig.storage.stores.near.writer.begin_step(2)
    assert rig.begun() == [], "two pages are free"
    rig.storage.stores.near.writer.begin_step(3)
    assert [(link, blocks) for link, _, blocks, _ in rig.begun()] == [(STORE, ["ab"])]
    rig.storage.stores.near.writer.begin_step(3)
    assert rig.begun() == [], "it is on its way"
    rig.end_store(0)
    rig.storage.stores.near.writer.begin_step(3)
    assert rig.begun() == [], "it was not used since"


def test_what_is_closed_stores_nothing_more() -> None:
    rig = StorageRig(store=2)
    rig.back_up(rig.insert("ab"))
    rig.back_up(rig.insert("uv"))  # waits for the first
    rig.begun()
    rig.storage.close()
    rig.back_up(rig.insert("pq"))
    rig.end_store(0)
    assert [blocks for _, _, blocks, _ in rig.begun() if blocks] == []
    assert not any(node.soft_pins for node in rig.tree.walk())
