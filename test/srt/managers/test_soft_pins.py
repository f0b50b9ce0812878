"""Soft pins: what a request has fetched stays until it starts; and asking storage again."""

from __future__ import annotations

import pytest

from sglang.srt.managers.storage_controller import MAX_ASKED
from sglang.srt.managers.storage_setup import PrefetchConfig
from sglang.srt.managers.tenant_quotas import TenantQuotas
from sglang.srt.mem_cache.block_keys import to_bytes
from sglang.srt.mem_cache.namespaces import namespace_of
from sglang.srt.mem_cache.transfer import D2H, FETCH, Tier
from sglang.srt.utils.time_units import Seconds
from support.storage_rig import NAMES, expire, tokens
from support.storage_rig import StorageRig as Rig

HOST = Tier.HOST
TEXT, LONG, OTHER = "aaaabbbbccccddddeeee", "aaaabbbbccccdddd", "ppppqqqqrrrrssss"


def test_what_was_fetched_goes_last_until_its_request_starts():
    rig = Rig(LONG, OTHER, host=36)
    rig.storage.begin("old", "", tokens(OTHER), 0.0)
    rig.collect()
    rig.finish_all()
    rig.detach("old")
    rig.finish(rig.begin("r", LONG)[0])
    rig.finish_all()
    assert rig.over("r") == [True] and rig.tree.counts.soft_pinned[HOST] == 16
    assert not rig.controller.make_room(HOST, 28, (), spares_pinned=True) and rig.on_host(OTHER) == 16
    assert rig.controller.make_room(HOST, 12, (), spares_pinned=True)
    assert rig.on_host(LONG) == 16 and rig.on_host(OTHER) == 8
    assert rig.controller.make_room(HOST, 36, ()), "a soft pin yields to what must have room"
    rig.check()
    rig.detach("r")
    rig.assert_nothing_left()


def test_a_request_waits_while_too_much_is_pinned_and_its_deadline_is_put_off():
    rig = Rig(LONG, OTHER, policy="timeout", timeout_base_s=1.0, timeout_per_ki_token_s=0.0, max_fetch_pages=20)
    rig.finish(rig.begin("r", LONG, now=0.0)[0])
    rig.finish_all()
    assert rig.finish(rig.begin("s", OTHER, now=0.5)[0]) == [], "16 and 16 are more than 20"
    for now in (1.5, 2.5):
        expire(rig, now)
        assert rig.over("s") == [False] and rig.storage.next_deadline == now + 1.0
    assert len(rig.detach("r")) == 2
    expire(rig, 3.0)
    rig.finish_all()
    assert rig.over("s") == [True] and rig.found("s") == (0, 16)
    assert rig.storage.counters["prefetch_timeouts"] == 0
    rig.detach("s")
    rig.assert_nothing_left()


def test_no_deadline_is_put_off_while_storage_hangs():
    rig = Rig(LONG, OTHER, policy="timeout", timeout_base_s=1.0, timeout_per_ki_token_s=0.0, max_fetch_pages=20)
    rig.finish(rig.begin("r", LONG, now=0.0)[0])
    assert rig.finish(rig.begin("s", OTHER, now=0.5)[0]) == []
    expire(rig, 1.5)
    assert rig.over("r", "s") == [True, True], "r's fetches have not ended"
    for rid in "rs":
        rig.detach(rid)
    rig.assert_nothing_left()


def test_a_deadline_of_no_time_is_put_off_by_some():
    rig = Rig(LONG, OTHER, max_fetch_pages=20)
    rig.finish(rig.begin("r", LONG)[0])
    rig.finish_all()
    rig.storage.set_config(PrefetchConfig("timeout", 1, timeout_base_s=0.0, timeout_per_ki_token_s=0.0))
    rig.finish(rig.begin("s", OTHER, now=0.5)[0])
    expire(rig, 0.5)
    assert rig.storage.next_deadline == 1.5
    for rid in "rs":
        rig.detach(rid)
    rig.assert_nothing_left()


def test_storage_is_asked_again_when_less_is_cached_than_before():
    rig = Rig(TEXT)
    rig.finish(rig.begin("r", TEXT)[0])
    rig.finish_all()
    assert not rig.storage.ask_again("r", 20, 0.0), "all is there"
    for times in range(MAX_ASKED - 1):
        assert rig.controller.make_room(HOST, 64, ())
        assert rig.on_host(TEXT) == 0
        assert rig.storage.ask_again("r", 0, 1.0) and rig.over("r") == [False]
        assert not rig.storage.ask_again("r", 0, 1.0), "it waits for the answer"
        rig.collect()
        rig.finish_all()
        assert rig.over("r") == [True] and rig.on_host(TEXT) == 20
        assert rig.storage.counters["storage_asked_again"] == times + 1
    assert rig.controller.make_room(HOST, 64, ())
    assert not rig.storage.ask_again("r", 0, 2.0), "not for ever"
    rig.detach("r")
    rig.assert_nothing_left()


def test_a_quota_takes_what_was_fetched_once_its_request_has_started():
    """And not before: storage would bring it again and again, and others wait behind that."""
    rig, alice = Rig(OTHER, blocks_per_op=1, fetch_window_ops=1), namespace_of("alice", "")
    rig.stored |= set(to_bytes(NAMES.of_prompt(alice, tokens(TEXT))))
    quotas = TenantQuotas(rig.tree, (HOST,), rig.clock, rig.controller.evict_of, rig.storage.awaited_ids)
    assert not quotas.set("alice", {HOST: 4})

    def on_host() -> int:
        return rig.tree.match(alice, tokens(TEXT)).total_len

    rig.storage.begin("a", alice, tokens(TEXT), Seconds(0))
    rig.begin("b", OTHER)
    num_ended = 0
    while rig.ops:
        rig.finish(min(rig.ops, key=lambda t: (t.link, t.seq)))
        quotas.note(alice)
        quotas.enforce(is_idle=True)
        rig.check()
        num_ended += 1
        assert num_ended < 40
    assert rig.over("a", "b") == [True, True]
    assert on_host() == 20 and rig.on_host(OTHER) == 16
    assert rig.storage.counters["prefetched_tokens"] == 20 + 16
    rig.detach("a")
    quotas.enforce(is_idle=True)
    assert on_host() <= 4 and rig.on_host(OTHER) == 16
    rig.detach("b")
    rig.assert_nothing_left()


@pytest.mark.parametrize("num_waiting", [1, 2])
def test_what_is_gone_again_is_not_fetched_without_end(num_waiting: int):
    """Whatever takes it while a request waits for the rest. One that could start asks anew, as often as others."""
    rig, waiting = Rig(TEXT, blocks_per_op=1, fetch_window_ops=1), "rst"[:num_waiting]
    for rid in waiting:
        rig.begin(rid, TEXT)
    for times in range(MAX_ASKED):
        num_fetches = 0
        while rig.ops:
            ticket = min(rig.ops, key=lambda t: (t.link, t.seq))
            num_fetches += ticket.link == FETCH
            assert num_fetches < 20
            rig.finish(ticket)
            rig.controller.evict(HOST, 64)
        assert all(rig.over(*waiting))
        assert [rig.storage.outcome(rid).reason for rid in waiting] == ["no_room"] * num_waiting
        asked_again = [rig.storage.ask_again(rid, 0, Seconds(1)) for rid in waiting]
        assert asked_again == [times + 1 < MAX_ASKED] * num_waiting
        rig.collect()
    for rid in waiting:
        rig.detach(rid)
    rig.assert_nothing_left()


def test_storage_is_asked_for_what_was_there_at_first_and_has_gone():
    """It was cached when the request came, so nothing was asked."""
    rig = Rig(TEXT)
    rig.finish(rig.begin("old", TEXT)[0])
    rig.finish_all()
    rig.detach("old")
    assert rig.begin("r", TEXT) == [] and rig.over("r") == [True]
    assert rig.controller.make_room(HOST, 64, ())
    assert rig.storage.ask_again("r", 0, 1.0)
    rig.collect()
    rig.finish_all()
    assert rig.on_host(TEXT) == 20
    rig.detach("r")
    rig.assert_nothing_left()


@pytest.mark.parametrize(("policy", "stored"), [("best_effort", TEXT), ("wait_complete", "")])
def test_storage_is_not_asked_again_in_vain(policy: str, stored: str):
    """Where requests wait for nothing, and where storage had nothing."""
    rig = Rig(stored, policy=policy)
    rig.finish(rig.begin("r", TEXT)[0])
    rig.finish_all()
    rig.controller.make_room(HOST, 64, ())
    assert not rig.storage.ask_again("r", 0, 1.0)
    rig.detach("r")
    rig.assert_nothing_left()


def test_a_prompt_as_large_as_the_host_comes_whole():
    """Its own soft pins do not stand in its way."""
    old, new = "".join(c * 4 for c in "ABCDEFGHIJKLMNOP"), "".join(c * 4 for c in "abcdefghijklmno")
    rig = Rig(old, new, fetch_window_ops=1)
    rig.finish(rig.begin("old", old)[0])
    rig.finish_all()
    rig.detach("old")
    rig.finish(rig.begin("r", new)[0])
    rig.finish_all()
    assert rig.on_host(new) == 60 and rig.storage.counters["prefetch_dropped_tokens"] == 0
    rig.detach("r")
    rig.assert_nothing_left()


def test_one_behind_a_request_that_waits_for_room_is_put_off_too():
    rig = Rig(
        LONG, OTHER, "tttt", policy="timeout", timeout_base_s=1.0, timeout_per_ki_token_s=0.0, max_fetch_pages=24
    )
    rig.finish(rig.begin("r", LONG)[0])
    rig.finish_all()
    rig.finish(rig.begin("s", OTHER, now=0.5)[0])
    assert rig.finish(rig.begin("t", "tttt", now=0.5)[0]) == [], "it would fit, and s is older"
    expire(rig, 1.5)
    assert rig.over("s", "t") == [False, False]
    assert [ticket.link for ticket in rig.detach("s")] == ["fetch"], "t goes on when s has gone"
    rig.finish_all()
    assert rig.over("t") == [True] and rig.found("t") == (0, 4)
    for rid in "rt":
        rig.detach(rid)
    rig.assert_nothing_left()


def test_no_request_is_put_off_for_one_behind_it():
    texts = LONG, "tttt", "ppppqqqqrrrrssss"
    one_by_one = {"max_fetch_pages": 20, "fetch_window_ops": 1, "blocks_per_op": 1}
    rig = Rig(*texts, policy="timeout", timeout_base_s=1.0, timeout_per_ki_token_s=0.0, **one_by_one)
    fetches = rig.finish(rig.begin("r", LONG[:20], now=0.9)[0])
    rig.finish(rig.begin("s", texts[1], now=0.2)[0])
    rig.finish(rig.begin("t", texts[2], now=0.9)[0])
    rig.finish(fetches[0])
    expire(rig, 1.25)
    assert rig.over("s", "t") == [True, False], "s waits for its turn, and t for room"
    for rid in "rst":
        rig.detach(rid)
    rig.finish_all()
    rig.assert_nothing_left()


def test_no_request_is_put_off_for_ever():
    rig = Rig(LONG, OTHER, policy="timeout", timeout_base_s=1.0, timeout_per_ki_token_s=0.0, max_fetch_pages=20)
    rig.finish(rig.begin("r", LONG)[0])
    rig.finish_all()
    rig.finish(rig.begin("s", OTHER)[0])
    for now in range(1, 60):
        expire(rig, float(now))
        assert rig.over("s") == [False]
    expire(rig, 60.0)
    assert rig.over("s") == [True]
    for rid in "rs":
        rig.detach(rid)
    rig.assert_nothing_left()


def test_a_storage_that_is_too_slow_is_not_asked_again():
    """The second request joins the first one's fetch."""
    rig = Rig(LONG, policy="timeout", timeout_base_s=1.0, timeout_per_ki_token_s=0.0)
    rig.finish(rig.begin("r", LONG, now=0.0)[0])
    rig.begin("s", LONG, now=0.5)
    expire(rig, 2.0)
    assert rig.over("r", "s") == [True, True]
    assert not any(rig.storage.ask_again(rid, 0, 2.0) for rid in "rs")
    for rid in "rs":
        rig.detach(rid)
    rig.assert_nothing_left()


def test_a_copy_for_which_there_is_room_does_not_fail_for_its_blocks_front():
    rig = Rig(host=3)
    top = rig.insert(TEXT[:2])
    low = rig.insert(TEXT[2:4], below=top)
    assert rig.controller.back_up([low], HOST) is not None
    rig.collect()
    rig.finish_all()


def backed_up(rig: Rig, text: str) -> None:
    rig.controller.begin_backup(rig.insert(text))
    for ticket in rig.collect():
        if ticket.link == D2H:
            rig.finish(ticket)


def test_what_waits_to_be_stored_goes_last():
    rig = Rig(LONG, OTHER, max_store_pages=8, max_fetch_pages=32, host=40)
    for text in (LONG, OTHER):
        backed_up(rig, text)
    assert rig.storage.stores.near.writer.storing_pages == 8 and rig.tree.counts.soft_pinned[HOST] == 32
    other = "qrstuvwx"
    backed_up(rig, other)
    assert rig.tree.counts.soft_pinned[HOST] == 32, "so much is pinned that no more is"
    rig.controller.evict(Tier.DEVICE, 40)
    assert rig.controller.make_room(HOST, 8, (), spares_pinned=True)
    assert (rig.on_host(LONG), rig.on_host(OTHER), rig.on_host(other)) == (16, 16, 0)
    rig.finish_all()
    assert rig.tree.counts.soft_pinned[HOST] == 0 and rig.storage.counters["backuped_tokens"] == 32
    rig.assert_nothing_left()


def test_nothing_is_kept_for_writes_that_hang():
    rig = Rig(LONG, max_store_pages=8)
    backed_up(rig, OTHER)
    assert rig.tree.counts.soft_pinned[HOST] == 16
    for now in (0.0, 1000.0):
        rig.storage.set_now(Seconds(now))
        rig.storage.watch()
    assert rig.storage.stores.near.writes.is_open and rig.tree.counts.soft_pinned[HOST] == 0
    backed_up(rig, "qrstuvwx")
    assert rig.tree.counts.soft_pinned[HOST] == 0
    rig.finish_all()
    assert rig.tree.counts.soft_pinned[HOST] == 0
    rig.assert_nothing_left()


def test_nothing_stays_pinned_once_storage_is_detached():
    rig = Rig(max_store_pages=8)
    backed_up(rig, OTHER)
    rig.storage.stores.near.writer.close()
    assert rig.tree.counts.soft_pinned[HOST] == 0
    rig.finish_all()
    rig.check()
