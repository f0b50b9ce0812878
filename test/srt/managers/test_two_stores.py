"""A near and a far store: neither waits for the other, and each has what it can take. Letters are tokens, blocks have
four. What reads and writes share with a single store is in test_storage_controller.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang.srt.managers.attached_store import AttachedStore
from sglang.srt.managers.storage_advice import StorageAdvice
from sglang.srt.managers.storage_breaker import FAILURES_IN_A_ROW
from sglang.srt.managers.storage_setup import StorageLimits
from sglang.srt.managers.tier_switches import TierSwitches
from sglang.srt.mem_cache.block_names import NOT_STORED, STORED
from sglang.srt.mem_cache.storage.guarded_store import LONGEST_LIMIT_S
from sglang.srt.mem_cache.transfer import (
    FETCH,
    FETCH_FAR,
    PROBE,
    STORE,
    STORE_FAR,
    StorageAction,
    StorageOp,
    Ticket,
    Tier,
)
from sglang.srt.utils.time_units import Seconds
from support.storage_rig import StorageRig, keys_of, tokens

TEXT, OTHER = "aaaabbbbccccddddeeee", "vvvvwwwwxxxxyyyy"
TWO = (Tier.DISK, Tier.REMOTE)


def rig_of(**options: object) -> StorageRig:
    return StorageRig(TEXT, OTHER, tiers=TWO, **options)  # type: ignore[arg-type]


def on_host(rig: StorageRig, text: str) -> list[Ticket]:
    """Copied to the host. Returns the writes that begin."""
    ticket = rig.controller.begin_backup(rig.insert(text))
    assert ticket is not None
    rig.collect()
    return rig.finish(ticket)


def stored_in(rig: StorageRig, text: str, place: int) -> list[int]:
    path = rig.tree.match("", tokens(text), fetching=True).path
    return rig.tree.names.stored_in(path, place).tolist()


def lose(rig: StorageRig, store: AttachedStore, switches: TierSwitches | None = None) -> None:
    """Its reads fail, or are switched off."""
    if switches is not None:
        switches.turn(TWO[store.place], reads=False, writes=None)
        rig.storage.obey_switches()
        return
    for _ in range(FAILURES_IN_A_ROW):
        store.reads.end(store.fetch_link, succeeded=False)
    rig.storage.watch()


# -- writes ---------------------------------------------------------------------------------------------------------


def test_each_store_is_written_by_operations_of_its_own():
    rig = rig_of(blocks_per_op=8)
    near, far = on_host(rig, "qqqqrrrr")
    assert [(near.link, keys_of(rig, near)), (far.link, keys_of(rig, far))] == [(STORE, 2), (STORE_FAR, 2)]
    assert [op.skips for op in rig.ops.values() if isinstance(op, StorageOp)] == [(1,), (0,)]
    rig.finish(near)
    # What goes on to the first store does not wait for the second one.
    assert [t.link for t in on_host(rig, "sssstttt")] == [STORE, STORE_FAR]
    rig.assert_nothing_left()


def test_a_far_store_that_takes_nothing_more_holds_back_no_write_to_the_near_one():
    rig = rig_of(max_store_pages=4)
    on_host(rig, "qqqq")
    for i in range(5):
        written = on_host(rig, 4 * chr(1000 + i))
        near = [t for t in rig.ops if t.link == STORE]
        assert [t.link for t in written] == [] or i == 0 or written == near
        for ticket in near:
            rig.finish(ticket)
    assert rig.storage.stores.far.writer.storing_pages == 4 and not rig.storage.stores.far.writer.pinned
    assert not rig.storage.stores.near.writer.storing_pages
    rig.assert_nothing_left()


def test_what_is_not_worth_it_on_one_store_goes_to_the_other():
    rig = rig_of()
    rig.storage.set_advice(StorageAdvice(is_worth_storing=lambda place, start, end: place == 0))
    rig.controller.write_policy = "auto"
    text = "qqqqrrrrssss"
    near = [t for t in on_host(rig, text) if t.link == STORE]
    assert sum(keys_of(rig, t) for t in near) == 3
    assert stored_in(rig, text, 0) == [STORED] * 3
    assert stored_in(rig, text, 1) == [STORED, NOT_STORED, NOT_STORED], "one shows whether it has become faster"
    rig.finish_all()


def test_a_full_disk_and_memory_hold_different_blocks_while_the_far_store_gets_all():
    rig = rig_of(host=12)
    storage = rig.storage
    assert storage.setup is not None
    storage.attach_storage(replace(storage.setup, write_policy="auto"))
    storage.note_room((False, True))
    assert storage.stores.near.writer.stores_late and not storage.stores.far.writer.stores_late
    assert [t.link for t in on_host(rig, "qqqqrrrr")] == [STORE_FAR]
    rig.finish_all()
    rig.controller.evict(Tier.DEVICE, 8)
    storage.stores.begin_step(8)
    rig.collect()
    written = [op for op in rig.ops.values() if isinstance(op, StorageOp) and op.action == StorageAction.SET]
    assert [op.ticket.link for op in written] == [STORE], "what the host gives up next"
    assert storage.stores.has_room == (False, True)
    rig.assert_nothing_left()


# -- reads ----------------------------------------------------------------------------------------------------------


def test_a_fetch_reads_one_store_and_a_busy_one_holds_up_none_of_the_other():
    rig = rig_of(blocks_per_op=1, fetch_window_ops=1)
    (probe,) = rig.begin("far", TEXT)
    assert [t.link for t in rig.finish(probe, 5, far_count=4)] == [FETCH, FETCH_FAR]
    assert rig.finish(Ticket(FETCH, 0)) == [], "its next block is behind the one that comes from the far store"
    # The far store's link has all it may have. The near one's has not.
    (probe,) = rig.begin("near", OTHER)
    assert [t.link for t in rig.finish(probe, 4, far_count=0)] == [FETCH]
    rig.finish_all()
    assert rig.over("far", "near") == [True, True]
    assert rig.storage.found_by_tier("far") == (((0, 4),), ((4, 20),))
    for rid in ("far", "near"):
        rig.detach(rid)
    rig.assert_nothing_left()


def test_what_the_near_store_has_lost_is_asked_for_again():
    rig = rig_of(blocks_per_op=8)
    (probe,) = rig.begin("r", TEXT)
    (fetch,) = rig.finish(probe, 5, far_count=0)
    rig.finish(fetch, count=2)
    assert rig.over("r") == [True] and rig.found("r") == (0, 8)
    assert rig.storage.ask_again("r", 8, Seconds(0.0))
    (probe,) = (t for t in rig.collect() if t.link == PROBE)
    assert [t.link for t in rig.finish(probe, 3, far_count=3) if t.link != STORE] == [FETCH_FAR]
    rig.finish_all()
    assert rig.over("r") == [True] and rig.found("r") == (0, 20)
    rig.detach("r")
    rig.assert_nothing_left()


@pytest.mark.parametrize("why", ["fails", "switched off"])
def test_without_the_near_store_what_comes_from_the_far_one_comes(why: str):
    switches = TierSwitches()
    rig = rig_of(blocks_per_op=8, switches=switches)
    rig.finish(rig.begin("far", TEXT)[0], 5, far_count=5)
    rig.finish(rig.begin("near", OTHER)[0], 4, far_count=0)
    lose(rig, rig.storage.stores.near, switches if why == "switched off" else None)
    rig.collect()
    assert rig.over("far", "near") == [False, True] and rig.cancelled == [Ticket(FETCH, 0)]
    # What it was to read there may be on the far store, too.
    assert rig.storage.ask_again("near", 0, Seconds(0.0))
    (probe,) = (t for t in rig.collect() if t.link == PROBE)
    assert [t.link for t in rig.finish(probe, 4, far_count=4)] == [FETCH_FAR]
    rig.finish_all()
    assert rig.found("far") == (0, 20) and rig.found("near") == (0, 16)
    for rid in ("far", "near"):
        rig.detach(rid)
    rig.assert_nothing_left()


@pytest.mark.parametrize("why", ["fails", "switched off"])
def test_without_the_far_store_requests_get_what_the_near_one_has(why: str):
    switches = TierSwitches()
    rig = rig_of(blocks_per_op=1, fetch_window_ops=2, switches=switches)
    rig.finish(rig.begin("both", TEXT)[0], 5, far_count=2)
    rig.finish(rig.begin("near", OTHER)[0], 4, far_count=0)
    (probe,) = rig.begin("asking", "aaaaqqqqrrrrssss")
    lose(rig, rig.storage.stores.far, switches if why == "switched off" else None)
    rig.storage.begin_fetches()
    rig.collect()
    assert rig.over("both", "near", "asking") == [False] * 3
    # It was asked before. What it answered is not fetched.
    rig.finish(probe, 3, far_count=2)
    rig.finish_all()
    assert not any(t.link == FETCH_FAR for t in rig.ops)
    assert rig.found("both") == (0, 12) and rig.found("near") == (0, 16)
    assert rig.over("both", "near", "asking") == [True] * 3
    (probe,) = (t for t in rig.begin("next", "zzzzzzzz") if keys_of(rig, t) == 2)
    assert isinstance(op := rig.ops[probe], StorageOp) and op.skips == (1,)
    for rid in ("both", "near", "asking", "next"):
        rig.detach(rid)
    rig.assert_nothing_left()


def test_without_the_near_store_the_far_one_is_read():
    rig = rig_of()
    lose(rig, rig.storage.stores.near)
    probe = next(t for t in rig.begin("r", TEXT) if keys_of(rig, t) == 5)
    assert isinstance(op := rig.ops[probe], StorageOp) and op.skips == (0,)
    assert {t.link for t in rig.finish(probe, 5, far_count=5)} == {FETCH_FAR}
    rig.finish(Ticket(FETCH_FAR, 0))
    # It is not known that the near one lacks it, as it was not asked.
    assert stored_in(rig, TEXT[:8], 0) == [STORED] * 2
    rig.finish_all()
    rig.detach("r")
    rig.assert_nothing_left()


@pytest.mark.parametrize(("slow", "skips"), [((0,), (0,)), ((1,), (1,)), ((0, 1), ())])
def test_of_two_stores_one_that_is_slower_than_computing_is_not_asked(slow: tuple[int, ...], skips: tuple[int, ...]):
    rig = rig_of()
    rig.storage.set_advice(StorageAdvice(fetch_gain_s=lambda place, start, end: -1.0 if place in slow else 1.0))
    probes = [op for op in map(rig.ops.get, rig.begin("r", TEXT)) if isinstance(op, StorageOp)]
    assert [op.skips for op in probes if len(op.keys) == 5] == [skips]
    # Its first block is read now and then, which shows when it has become faster.
    trials = [store.place for store in rig.storage.stores if store.trial.ticket is not None]
    assert trials == list(slow)
    rig.finish_all()
    rig.detach("r")
    rig.assert_nothing_left()


def test_a_probe_that_waits_for_the_far_store_is_no_sign_of_a_near_one_that_hangs():
    rig = rig_of(policy="timeout", timeout_base_s=0.2)
    assert rig.storage.stores.near.reads.hang_s > LONGEST_LIMIT_S
    assert rig.storage.stores.far.reads.hang_s == 0.2
    assert StorageRig(TEXT, policy="timeout", timeout_base_s=0.2).storage.stores.near.reads.hang_s == 0.2


def test_what_ranks_have_on_different_stores_is_read_from_the_far_one():
    """And where that lacks it, from the near one, which may have more on one rank than on another."""
    rig = rig_of(blocks_per_op=8)
    (probe,) = rig.begin("r", TEXT)
    (fetch,) = rig.finish(probe, 5, far_count=5)
    op = rig.ops[fetch]
    assert isinstance(op, StorageOp) and op.skips == (0,) and op.falls_back
    rig.finish_all()
    rig.detach("r")
    rig.assert_nothing_left()


def test_a_store_that_hangs_holds_half_of_what_one_alone_may():
    alone = StorageLimits.of_host(12_800, 4, 64)
    each = StorageLimits.of_host(12_800, 4, 64, num_stores=2)
    assert (2 * each.max_fetch_pages, 2 * each.max_store_pages) == (alone.max_fetch_pages, alone.max_store_pages)
    assert StorageLimits.of_host(4, 4, 64, num_stores=2).max_fetch_pages == 4, "a block always"
