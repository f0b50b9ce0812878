"""Limits of tenants in a real store: what goes, what several servers count, what is not written again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sglang.srt.offload.store.object_store import ObjectStore
from sglang.srt.offload.store.resp import ErrorReply, StoreFailure, StoreLost
from sglang.srt.offload.store.tenant_limits import TenantLimits
from support.store_servers import RedisServer, manifest_of

NUM_PIECES = 2
ALICE, BOB = b"alice---", b"bob-----"


def key_of(i: int) -> bytes:
    return i.to_bytes(16, "little")


def open_store(redis: RedisServer) -> ObjectStore:
    return ObjectStore(redis.address, b"model", NUM_PIECES, timeout_s=60.0)


def write(store: ObjectStore, numbers: Sequence[int], tenant: bytes = ALICE) -> bool:
    writer = store.writer()
    pieces = [[b"a piece", bytes([p]) * 100] for p in range(NUM_PIECES)]
    done = [writer.write(key_of(i), pieces, tenant) for i in numbers]
    writer.close()
    assert len(set(done)) == 1
    return done[0]


def stored(store: ObjectStore, numbers: Sequence[int]) -> set[int]:
    return {i for i in numbers if manifest_of(store, key_of(i)) is not None}


def test_what_is_over_the_limit_goes_and_no_other_tenants(redis):
    store = open_store(redis)
    assert write(store, range(1000, 1010), BOB) and write(store, range(2000, 2010), b"") and write(store, range(20))
    store.limit(ALICE, 8)
    assert len(stored(store, range(20))) == 8
    assert write(store, range(20, 40))
    # Those that were stored last.
    assert stored(store, range(40)) == set(range(32, 40))
    assert len(stored(store, range(1000, 2010))) == 20
    keys = redis.connection().call("DBSIZE")
    assert keys == 28 * (NUM_PIECES + 1) + 1, "no piece of what has gone, and one index"
    store.limit(ALICE, -1)
    assert write(store, range(40, 60)) and len(stored(store, range(60))) == 28
    assert redis.connection().call("TTL", store.limits.index_of(ALICE)) > 24 * 3600


def test_the_least_recently_used_goes(redis):
    store = open_store(redis)
    store.limit(ALICE, 4)
    assert write(store, range(4))
    assert store.leading([key_of(0)]) == 1 and store.touch([key_of(1)])[0] == 1
    assert write(store, [4, 5]) and stored(store, range(6)) == {0, 1, 4, 5}


def test_the_front_of_a_prompt_stays(redis):
    """Also of one that is written in parts, as its chunks are computed."""
    store, keys = open_store(redis), [key_of(i) for i in range(12)]
    store.limit(ALICE, 5)
    assert store.leading(keys[:8]) == 0
    for part in (range(3), range(3, 6), range(6, 8)):
        store.limits.begin_write(ALICE, [key_of(i) for i in part])
        assert write(store, part)
    assert stored(store, range(8)) == set(range(5))
    # And of one that was not looked up, if it is written at once.
    store.limits.begin_write(ALICE, keys[8:])
    assert write(store, range(8, 12)) and stored(store, range(12)) == {0, 8, 9, 10, 11}
    # When it was found in the store, by what is known there.
    store.limit(ALICE, 3)
    assert stored(store, range(12)) == {8, 9, 10}


def test_servers_with_the_limit_count_together(redis):
    one, other, without = open_store(redis), open_store(redis), open_store(redis)
    one.limit(ALICE, 10)
    other.limit(ALICE, 10)
    for i in range(0, 40, 2):
        assert write(one, [i]) and write(other, [i + 1])
    assert stored(one, range(40)) == set(range(30, 40))
    # Until it has the limit too.
    assert write(without, range(100, 120)) and len(stored(one, range(120))) == 30
    without.limit(ALICE, 10)
    assert len(stored(one, range(120))) == 10


def test_what_a_limit_keeps_out_counts_as_stored_for_those_who_use_it(redis):
    """Otherwise a server with more of the tenant in memory would write without end."""
    store, other = open_store(redis), open_store(redis)
    for each in (store, other):
        each.limit(ALICE, 32)
    keys = [key_of(i) for i in range(40)]
    assert write(store, range(40))
    assert store.touch(keys)[0] == 40 and store.leading(keys) == 0 and stored(store, range(40)) == set(range(8, 40))
    # What the other server pushes out is not fought for either.
    assert write(other, range(100, 132)) and not stored(store, range(40))
    assert store.touch(keys)[0] == 40
    # What the store itself has lost is stored again.
    redis.connection().call("FLUSHALL")
    assert store.touch(keys)[0] == 0 and write(store, range(3)) and stored(store, range(3)) == {0, 1, 2}


def test_a_limit_of_nothing(redis):
    store = open_store(redis)
    assert write(store, range(5)) and write(store, [7], BOB)
    store.limit(ALICE, 0)
    assert write(store, range(5, 10)) and stored(store, range(10)) == {7}
    assert store.touch([key_of(i) for i in range(5, 7)])[0] == 2
    store.limit(ALICE, -1)
    assert store.touch([key_of(5)])[0] == 0 and write(store, [5]) and stored(store, range(10)) == {5, 7}


def test_blocks_that_the_store_has_evicted_leave_the_index_first(redis):
    store, connection = open_store(redis), redis.connection()
    store.limit(ALICE, 10)
    assert write(store, range(10))
    for i in range(5):
        connection.call("DEL", *[store.name_of(key_of(i), what) for what in (b"m", 0, 1)])
    assert write(store, range(10, 15)) and stored(store, range(15)) == set(range(5, 15))


@pytest.mark.parametrize("how", ["index", "all"])
def test_an_index_that_the_store_has_lost_is_made_again(redis, how: str):
    store, other, connection = open_store(redis), open_store(redis), redis.connection()
    for each in (store, other):
        each.limit(ALICE, 10)
    assert write(store, range(9))
    connection.call("FLUSHDB") if how == "all" else connection.call("DEL", store.limits.index_of(ALICE))
    # By who has not written before, and by who has.
    assert write(other, [9]) and write(store, range(10, 15)) and write(other, range(15, 18))
    assert len(stored(store, range(18))) == (9 if how == "all" else 10)
    assert connection.call("ZCARD", store.limits.index_of(ALICE)) == len(stored(store, range(18)))


def test_a_limit_that_another_server_drops_holds_on(redis):
    store, other = open_store(redis), open_store(redis)
    for each in (store, other):
        each.limit(ALICE, 10)
    assert write(store, range(10))
    other.limit(ALICE, -1)
    assert write(store, range(10, 20)) and stored(store, range(20)) == set(range(10, 20))


def test_erasing_takes_the_index_and_clearing_all(redis):
    store, connection = open_store(redis), redis.connection()
    store.limit(ALICE, 10)
    store.limit(BOB, 10)
    assert write(store, range(10)) and write(store, range(20, 30), BOB)
    store.erase(ALICE)
    assert connection.call("DBSIZE") == 10 * (NUM_PIECES + 1) + 1
    assert write(store, range(20)) and len(stored(store, range(20))) == 10, "the limit holds on"
    store.clear()
    assert connection.call("DBSIZE") == 0


@pytest.mark.parametrize("reply", [None, b"7", [], 7])
def test_replies_that_are_not_understood_are_a_failure(reply):
    """7: to ZRANGE."""
    limits = TenantLimits(b"prefix{", lambda key: [key])
    limits.set(ALICE, 5)
    with pytest.raises(StoreLost, match=r"(ZCARD|ZRANGE) is not understood"):
        limits.add(ALICE, [key_of(0)], lambda commands: [reply] * len(commands))


def test_without_permission_a_limit_is_refused_with_the_reason(start_redis):
    redis = start_redis()
    redis.connection().call("ACL", "SETUSER", "default", "-zadd")
    store = open_store(redis)
    assert write(store, [0])
    with pytest.raises(StoreFailure, match="zadd"):
        store.limit(ALICE, 10)
    # And the tenant has no block that is not counted.
    assert not write(store, [1]) and stored(store, [1]) == set() and write(store, [2], BOB)
    store.limit(ALICE, -1)
    assert write(store, [1])


def test_a_store_that_does_not_tell_idle_times(start_redis):
    redis = start_redis()
    redis.connection().call("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
    with pytest.raises(ErrorReply):
        redis.connection().call("SET", "a", "b")
        redis.connection().call("OBJECT", "IDLETIME", "a")
    store = open_store(redis)
    assert write(store, range(10))
    store.limit(ALICE, 4)
    assert len(stored(store, range(10))) == 4
    assert write(store, range(10, 14)) and stored(store, range(14)) == {10, 11, 12, 13}
