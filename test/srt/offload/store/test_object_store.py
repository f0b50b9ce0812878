"""`ObjectStore` on real servers: round trips, holes, writes that end in the middle, full stores, namespaces."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest

from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.offload.store.object_store import WRITE_PAUSE_S, Manifest, ObjectStore
from sglang.srt.offload.store.resp import (
    ErrorReply,
    StoreFailure,
    StoreLost,
    StoreRefused,
    StoreTimeout,
    ValueTooLarge,
)
from support.children import wait_until
from support.store_servers import Clock, RedisServer, manifest_of, single

MIB = 1 << 20
NUM_PIECES = 3
# Long enough for what a server does before it stands still.
TIMEOUT_S = 2.0


def key_of(i: int) -> bytes:
    return i.to_bytes(16, "little")


def pieces_of(i: int, size_bytes: int = 1000) -> list[list[bytes]]:
    """Each in two parts, the first of them 16 bytes."""
    return [[bytes([i % 256, p]) * 8, bytes([p]) * (size_bytes - 16)] for p in range(NUM_PIECES)]


def open_store(server: RedisServer | StoreAddress, namespace: bytes = b"model A", **options: object) -> ObjectStore:
    address = server if isinstance(server, StoreAddress) else server.address
    return ObjectStore(address, namespace, NUM_PIECES, **{"timeout_s": 60.0, **options})  # type: ignore[arg-type]


def write(store: ObjectStore, *numbers: int) -> None:
    writer = store.writer()
    assert all(writer.write(key_of(i), pieces_of(i)) for i in numbers)
    writer.close()


def read(store: ObjectStore, i: int, piece: int) -> bytes | None:
    reader = store.reader()
    buffer = memoryview(bytearray(4 * MIB))
    try:
        reader.request(key_of(i), piece)
        size = reader.receive(buffer)
    finally:
        reader.close()
    return None if size is None else bytes(buffer[:size])


def expected(i: int, piece: int) -> bytes:
    return b"".join(pieces_of(i)[piece])


def test_what_is_written_is_read_in_the_order_of_the_requests(redis):
    for address in (redis.address, redis.unix_address):
        store = open_store(address, b"of " + str(address).encode())
        write(store, 1, 2)
        reader = store.reader()
        wanted = [(2, 0), (1, 2), (9, 1), (1, 0), (2, 2)]
        requested = [reader.request(key_of(i), piece) for i, piece in wanted]
        buffer = memoryview(bytearray(1000))
        for i, piece in wanted:
            size = reader.receive(buffer)
            assert (size is None) == (i == 9)
            if size is not None:
                assert bytes(buffer[:size]) == expected(i, piece)
        assert not any(each.is_lost for each in requested)
        assert store.stats()["read_pieces"] == 4 and store.stats()["missing_pieces"] == 1


def test_pieces_of_2_mib(redis):
    store = open_store(redis)
    values = [os.urandom(2 * MIB) for _ in range(NUM_PIECES)]
    parts = [[memoryview(v)[:MIB], bytearray(v[MIB : MIB + 7]), b"", v[MIB + 7 :]] for v in values]
    assert store.writer().write(key_of(1), parts)
    reader = store.reader()
    for piece in range(NUM_PIECES):
        reader.request(key_of(1), piece)
    # Nothing is written outside of the buffer that is given.
    memory = bytearray(b"x" * (2 * MIB + 200))
    for value in values:
        assert reader.receive(memoryview(memory)[100 : 100 + 2 * MIB]) == 2 * MIB
        assert memory[100:-100] == value and memory[:100] == memory[-100:] == b"x" * 100
    assert store.stats()["written_bytes"] == store.stats()["read_bytes"] == 6 * MIB


def test_leading_ends_at_the_first_hole(redis):
    store = open_store(redis)
    keys = [key_of(i) for i in range(6)]
    assert store.leading(keys) == 0 and store.leading([]) == 0
    write(store, 0, 1, 2, 4, 5)
    assert store.leading(keys) == 3
    write(store, 3)
    assert store.leading(keys) == 6
    # A store that evicts may drop the manifest in the middle.
    assert redis.connection().call("DEL", store.name_of(keys[2], b"m")) == 1
    assert store.leading(keys) == 2
    assert store.leading(keys[3:]) == 3


def server_that_waits_for(fake, num_touches: int, answers: bytes):
    """It answers only when all have come."""

    def answer(connection, command):
        while len([r for r in server.requests if r[0] == b"TOUCH"]) < num_touches:
            connection.read()
        connection.send(answers)

    server = fake(single(answer))
    return server


def touched(server) -> list[list[bytes]]:
    return [request[1:] for request in server.requests if request[0] == b"TOUCH"]


def test_leading_is_one_round_trip_that_counts_as_a_use(fake):
    server = server_that_waits_for(fake, 50, b":1\r\n" * 50)
    store = open_store(server.address)
    keys = [key_of(i) for i in range(50)]
    assert store.leading(keys) == 50
    assert touched(server) == [[store.name_of(key, b"m")] for key in reversed(keys)], "the front of a prompt last"


def test_probing_keeps_a_manifest_from_being_evicted(redis):
    store = open_store(redis)
    write(store, 1)
    connection = redis.connection()
    name = store.name_of(key_of(1), b"m")

    def idle_s() -> int:
        return connection.call("OBJECT", "IDLETIME", name)

    wait_until(lambda: idle_s() >= 1, "a second to go by")
    # Tried again, should it take a second to look.
    wait_until(lambda: store.leading([key_of(1)]) == 1 and idle_s() == 0, "a use")


def test_marking_as_used_is_one_round_trip(fake):
    server = server_that_waits_for(fake, 20, b":1\r\n:3\r\n" * 10)
    store = open_store(server.address)
    keys = [key_of(i) for i in range(10)]
    assert store.touch(keys) == (10, [])
    names = [[store.name_of(key, what) for what in (b"m", 0, 1, 2)] for key in reversed(keys)]
    assert touched(server) == [part for name in names for part in (name[:1], name[1:])], "the front of a prompt last"


def test_a_block_in_use_is_not_evicted(redis):
    """Nor is any part of it."""
    store = open_store(redis)
    write(store, 1)
    connection = redis.connection()

    def idle_s() -> list[int]:
        return [connection.call("OBJECT", "IDLETIME", store.name_of(key_of(1), what)) for what in (b"m", 0, 1, 2)]

    wait_until(lambda: min(idle_s()) >= 1, "a second to go by")
    # Tried again, should it take a second to look.
    wait_until(lambda: store.touch([key_of(1)]) == (1, []) and max(idle_s()) == 0, "a use")


def test_marking_as_used_finds_what_was_evicted(redis):
    store = open_store(redis)
    keys = [key_of(i) for i in range(6)]
    assert store.touch(keys) == (0, []) and store.touch([]) == (0, [])
    write(store, 0, 1, 2, 3, 5)
    assert store.touch(keys) == (4, [])
    connection = redis.connection()
    for i, what in ((1, 2), (2, b"m")):
        assert connection.call("DEL", store.name_of(keys[i], what)) == 1
    # Without its manifest a block is not there, and its pieces are nothing to remove: another may be writing it.
    assert store.touch(keys) == (1, [keys[1]])
    assert store.touch(keys[2:]) == (0, []) and store.touch(keys[3:]) == (1, [])


def test_a_store_that_fails_does_not_tell_what_is_used(fake, caplog):
    server = fake(single(lambda connection, command: connection.send(b"-NOPERM no\r\n")))
    store = open_store(server.address)
    assert store.touch([key_of(1)]) == (None, [])
    assert "marking blocks as used: NOPERM" in caplog.text
    server.close()
    assert store.touch([key_of(1)]) == (None, []) and store.stats()["failures"] == 2


def test_a_manifest_says_what_is_stored(redis):
    store = open_store(redis, codec="lossless:zstd")
    assert manifest_of(store, key_of(1)) is None
    write(store, 1)
    assert manifest_of(store, key_of(1)) == Manifest(1, 3, "lossless:zstd", 3000)


def test_a_block_whose_writer_dies_between_pieces_does_not_exist(fake, caplog):
    stored: dict[bytes, bytes] = {}

    def answer(connection, command):
        if command[0] == b"SET":
            if len(stored) == 2:
                connection.socket.close()
                raise OSError
            stored[command[1]] = command[2]
            connection.send(b"+OK\r\n")
        else:
            connection.send(b":%d\r\n" % (command[1] in stored))

    store = open_store(fake(single(answer)).address)
    assert not store.writer().write(key_of(1), pieces_of(1))
    assert len(stored) == 2 and not any(name.endswith(b":m") for name in stored)
    assert store.leading([key_of(1)]) == 0
    assert store.stats()["failures"] == 1 and "storing a block" in caplog.text


def test_no_manifest_is_sent_before_every_piece_was_accepted(fake):
    released = threading.Event()
    seen: list[bytes] = []

    def answer(connection, command):
        seen.append(command[1][-1:])
        if command[1].endswith(b":2"):
            assert released.wait(120)
            connection.send(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")
        else:
            connection.send(b"+OK\r\n")

    store = open_store(fake(single(answer)).address)
    result: list[bool] = []
    thread = threading.Thread(target=lambda: result.append(store.writer().write(key_of(1), pieces_of(1))))
    thread.start()
    wait_until(lambda: len(seen) == 3, "the pieces")
    time.sleep(0.05)
    assert seen == [b"0", b"1", b"2"]
    released.set()
    thread.join(120)
    # The last ones give back what was stored of it, the manifest first.
    assert result == [False] and seen == [b"0", b"1", b"2", b"m", b"0", b"1", b"2"]


def test_forget_drops_the_manifest_and_the_pieces(redis):
    store = open_store(redis)
    write(store, 1, 2)
    store.forget(key_of(1))
    assert store.leading([key_of(1)]) == 0 and read(store, 1, 0) is None
    assert store.leading([key_of(2)]) == 1 and read(store, 2, 0) == expected(2, 0)
    store.forget(key_of(1))
    assert redis.connection().call("DBSIZE") == NUM_PIECES + 1
    assert store.unlink_commands(key_of(1))[0][0].endswith(b":m")
    write(store, 1)
    assert read(store, 1, 2) == expected(1, 2)


def test_namespaces_never_meet(redis):
    a, b = open_store(redis, b"model A"), open_store(redis, b"model A with salt")
    other_shape = ObjectStore(redis.address, b"model A", NUM_PIECES + 1)
    write(a, 1)
    for other in (b, other_shape):
        assert other.leading([key_of(1)]) == 0 and read(other, 1, 0) is None
        other.forget(key_of(1))
    assert a.leading([key_of(1)]) == 1


def test_clear_leaves_other_namespaces_and_other_peoples_keys_alone(redis):
    a, b = open_store(redis, b"a"), open_store(redis, b"b")
    write(a, *range(500))
    write(b, *range(20))
    connection = redis.connection()
    connection.call("SET", "somebody's", "1")
    a.clear()
    assert a.leading([key_of(i) for i in range(500)]) == 0
    assert b.leading([key_of(i) for i in range(20)]) == 20
    assert connection.call("DBSIZE") == 20 * (NUM_PIECES + 1) + 1


def test_one_tenants_blocks_are_erased(redis):
    """Those of other tenants, of no tenant, of other namespaces and other people's keys stay; pieces that have lost
    their manifest, or have a damaged one, may be the tenant's, and go."""
    store, other = open_store(redis, b"a"), open_store(redis, b"b")
    for each in (store, other):
        writer = each.writer()
        for i, tenant in enumerate([b"alice---", b"bob-----", b"", b"alice---"] * 300):
            assert writer.write(key_of(i), pieces_of(i), tenant)
        writer.close()
    connection = redis.connection()
    connection.call("SET", "another's", "1")
    connection.call("DEL", store.name_of(key_of(1), b"m"))
    connection.call("SET", store.name_of(key_of(2), b"m"), b"damaged")
    store.erase(b"alice---")
    found = [i for i in range(1200) if store.stored([key_of(i)])[0]]
    assert found == [i for i in range(1200) if i % 4 in (1, 2) and i not in (1, 2)]
    assert read(store, 1, 0) is None and read(store, 0, 0) is None and read(store, 6, 0)
    assert connection.call("DBSIZE") == (598 + 1200) * (NUM_PIECES + 1) + 1
    assert manifest_of(store, key_of(5)).tenant == b"bob-----"


@pytest.mark.parametrize("odd", [b"not hex", b"AB" * 16, b"g" * 32, b"\xff" * 32, b"ab" * 17])
def test_names_of_no_block_are_not_counted(redis, odd):
    store, connection = open_store(redis), redis.connection()
    writer = store.writer()
    assert all(writer.write(key_of(i), pieces_of(i), b"alice---") for i in range(3))
    connection.call("SET", store.prefix + odd + b"}:m", connection.call("GET", store.name_of(key_of(0), b"m")))
    store.limit(b"alice---", 2)
    assert sum(store.stored([key_of(i) for i in range(3)])) == 2
    assert connection.call("ZCARD", store.limits.index_of(b"alice---")) == 2


@pytest.mark.parametrize(
    "manifest",
    [
        b"\x96\x01\x01\xa0\x01\xc4\x00" + b"\x91" * 100_000 + b"\xc0",
        b"\x95\x01\x01\xa1\xff\x01\xc4\x00",
    ],
    ids=["lists in lists", "no UTF-8"],
)
def test_a_manifest_that_cannot_be_read_stops_nothing(redis, manifest):
    store = open_store(redis)
    writer = store.writer()
    assert all(writer.write(key_of(i), pieces_of(i), b"alice---") for i in range(2))
    redis.connection().call("SET", store.name_of(key_of(1), b"m"), manifest)
    store.limit(b"alice---", 5)
    store.erase(b"alice---")
    assert redis.connection().call("DBSIZE") == 0


def test_keys_of_any_bytes_are_keys(redis):
    store = open_store(redis)
    keys = [b"}" * 16, b"{}*?[" + bytes(11), b"\r\n" * 8, bytes([255]) * 16]
    writer = store.writer()
    for i, key in enumerate(keys):
        assert writer.write(key, pieces_of(i))
    assert store.leading(keys) == 4
    store.clear()
    assert redis.connection().call("DBSIZE") == 0


def test_with_a_time_to_live_the_manifest_goes_first(redis):
    store = open_store(redis, ttl_s=100)
    write(store, 1)
    connection = redis.connection()
    assert 90 < connection.call("TTL", store.name_of(key_of(1), b"m")) <= 100
    assert all(150 < connection.call("TTL", store.name_of(key_of(1), p)) <= 160 for p in range(NUM_PIECES))


def test_use_renews_the_time_to_live(redis):
    """Of pieces when they are read, of manifests behind that, and of all when memory serves a block."""
    store, connection = open_store(redis, ttl_s=100), redis.connection()
    write(store, 1, 2)
    names = {i: [store.name_of(key_of(i), what) for what in (*range(NUM_PIECES), b"m")] for i in (1, 2)}

    def age() -> None:
        for name in (*names[1], *names[2]):
            connection.call("EXPIRE", name, 50)

    def ttls(i: int) -> list[int]:
        return [int(connection.call("TTL", name)) for name in names[i]]

    age()
    reader, buffer = store.reader(), memoryview(bytearray(1000))
    reader.request(key_of(1), 0)
    assert reader.receive(buffer) == 1000
    assert ttls(1)[0] > 150 and max(ttls(1)[1:]) <= 50
    store.renew([key_of(1)])
    assert 90 < ttls(1)[-1] <= 100
    age()
    assert store.touch([key_of(1), key_of(2), key_of(3)]) == (2, [])
    assert all(min(ttls(i)[:-1]) > 150 and 90 < ttls(i)[-1] <= 100 for i in (1, 2))
    connection.call("DEL", names[2][1])
    assert store.touch([key_of(1), key_of(2)]) == (1, [key_of(2)])


def test_usage(redis):
    store = open_store(redis)
    write(store, 1, 2)
    usage = store.usage()
    assert usage["keys"] == 2 * (NUM_PIECES + 1)
    assert usage["size_bytes"] > 100_000 and usage["limit_bytes"] == 0 and usage["evicted_keys"] == 0


@pytest.mark.parametrize("num_digits", [19, 20, 5000])
def test_usage_beyond_what_a_message_can_hold(fake, num_digits):
    info = b"used_memory:%b\r\nmaxmemory:%b\r\nevicted_keys:1\r\n" % ((b"9" * num_digits,) * 2)
    replies = {b"INFO": b"$%d\r\n%b\r\n" % (len(info), info), b"DBSIZE": b":%b\r\n" % (b"9" * 19)}
    server = fake(single(lambda connection, command: connection.send(replies[command[0]])))
    largest = (1 << 63) - 1
    expected = {"size_bytes": largest, "limit_bytes": largest, "keys": largest, "evicted_keys": 1}
    assert open_store(server.address).usage() == expected


# -- what can go wrong ----------------------------------------------------------------------------------------------


def test_a_full_store_is_a_false_with_a_reason_and_a_pause(start_redis, caplog):
    server = start_redis(maxmemory="6mb", maxmemory_policy="noeviction")
    clock = Clock()
    store = open_store(server, clock=clock)
    writer = store.writer()
    block = [[bytes(MIB)] for _ in range(NUM_PIECES)]
    with caplog.at_level(logging.WARNING):
        written = [writer.write(key_of(i), block) for i in range(4)]
    assert written[0] and not written[-1]
    full = written.index(False)
    assert store.leading([key_of(i) for i in range(4)]) == full
    # Nothing is left of what was refused, and the store is asked once per pause.
    assert server.connection().call("DBSIZE") == full * (NUM_PIECES + 1)
    assert store.stats()["refused_writes"] == 1 and store.stats()["paused_writes"] == 4 - full - 1
    assert "OOM" in caplog.text
    assert len(caplog.records) == 1 and "allkeys-lru" in caplog.text
    store.forget(key_of(0))
    assert not writer.write(key_of(9), block)
    clock.now += WRITE_PAUSE_S
    assert writer.write(key_of(9), block)


@pytest.mark.parametrize(
    ("reply", "advice"),
    [
        (b"-READONLY You can't write against a read only replica.\r\n", "give the master's address"),
        (b"-MISCONF Redis is configured to save RDB snapshots, but it is unable to persist\r\n", "disk is full"),
        (b"-NOPERM this user has no permissions to run the 'set' command\r\n", "allow its user"),
    ],
)
def test_other_refusals_of_a_write(fake, caplog, reply, advice):
    store = open_store(fake(single(lambda connection, command: connection.send(reply))).address)
    assert not store.writer().write(key_of(1), pieces_of(1))
    assert advice in caplog.text
    assert store.leading([key_of(1)]) is None


def test_a_real_replica_is_read_and_not_written(redis, start_redis, caplog):
    write(open_store(redis), 1)
    replica = start_redis()
    replica.connection().call("REPLICAOF", "127.0.0.1", redis.port)
    store = open_store(replica)
    wait_until(lambda: store.leading([key_of(1)]), "the copy")
    assert read(store, 1, 1) == expected(1, 1)
    assert not store.writer().write(key_of(2), pieces_of(2))
    assert "READONLY" in caplog.text


def test_a_store_killed_in_mid_transfer_and_started_again_is_empty(start_redis):
    server = start_redis()
    store = open_store(server)
    big = [[bytes(2 * MIB)] for _ in range(NUM_PIECES)]
    assert store.writer().write(key_of(1), big)
    reader = store.reader()
    buffer = memoryview(bytearray(2 * MIB))
    requested = [reader.request(key_of(1), 0) for _ in range(8)]
    assert reader.receive(buffer) == 2 * MIB
    server.kill()
    with pytest.raises(StoreLost):
        for _ in range(7):
            reader.receive(buffer)
    assert requested[-1].is_lost
    assert store.leading([key_of(1)]) is None
    server.start()
    reader.request(key_of(1), 0)
    assert reader.receive(buffer) is None
    writer = store.writer()
    assert writer.write(key_of(1), big)
    server.kill()
    assert not writer.write(key_of(1), big)
    server.start()
    assert writer.write(key_of(1), big) and store.leading([key_of(1)]) in (0, 1)


def test_a_store_that_stands_still_is_a_timeout_and_then_nothing(start_redis, caplog):
    server = start_redis()
    clock = Clock()
    store = open_store(server, timeout_s=TIMEOUT_S, clock=clock)
    write(store, 1)
    reader = store.reader()
    buffer = memoryview(bytearray(1000))
    reader.request(key_of(1), 0)
    assert reader.receive(buffer) == 1000
    server.pause()
    reader.request(key_of(1), 0)
    reader.request(key_of(1), 1)
    with pytest.raises(StoreTimeout):
        reader.receive(buffer)
    assert store.leading([key_of(1)]) is None
    assert not store.writer().write(key_of(2), pieces_of(2, 4 * MIB))
    # It is left alone until it answers a PING.
    for _ in range(3):
        assert store.leading([key_of(1)]) is None
    assert "asked again when it answers a PING" in caplog.text
    server.resume()
    clock.now += 100.0
    wait_until(lambda: store.leading([key_of(1)]) == 1, "it is asked again")
    reader.request(key_of(1), 1)
    assert reader.receive(buffer) == 1000 and bytes(buffer) == expected(1, 1)


def test_a_reader_starts_anew_after_a_failure(fake):
    """Replies to what was asked before a failure are never taken for what is asked after it."""
    scripts = iter([[b"$4\r\nold1\r\n", b"what?\r\n", b"$4\r\nold3\r\n"], [b"$4\r\nnew1\r\n"]])
    answers: dict[object, Iterator[bytes]] = {}

    def answer(connection, command):
        if connection not in answers:
            answers[connection] = iter(next(scripts))
        connection.send(next(answers[connection]))

    reader = open_store(fake(single(answer)).address).reader()
    buffer = memoryview(bytearray(10))
    requested = [reader.request(key_of(1), piece) for piece in range(3)]
    assert reader.receive(buffer) == 4
    with pytest.raises(StoreLost):
        reader.receive(buffer)
    assert requested[2].is_lost
    reader.request(key_of(2), 0)
    assert reader.receive(buffer) == 4 and bytes(buffer[:4]) == b"new1"


def test_a_piece_that_is_too_large_or_no_string_concerns_this_piece_alone(redis):
    store = open_store(redis)
    write(store, 1)
    connection = redis.connection()
    connection.call("SET", store.name_of(key_of(1), 0), bytes(5000))
    connection.call("DEL", store.name_of(key_of(1), 1))
    connection.call("LPUSH", store.name_of(key_of(1), 1), b"x")
    reader = store.reader()
    buffer = memoryview(bytearray(1000))
    for piece in range(NUM_PIECES):
        reader.request(key_of(1), piece)
    with pytest.raises(ValueTooLarge, match="5000"):
        reader.receive(buffer)
    with pytest.raises(ErrorReply, match="WRONGTYPE"):
        reader.receive(buffer)
    assert reader.receive(buffer) == 1000 and bytes(buffer) == expected(1, 2)


@pytest.mark.parametrize(
    "reply",
    [b"$1\r\n0\r\n", b"*1\r\n$1\r\n0\r\n", b"*2\r\n$1\r\n0\r\n$1\r\nx\r\n", b":7\r\n", b"$-1\r\n"],
    ids=["text", "one", "no list", "number", "none"],
)
def test_a_scan_that_is_not_understood_is_a_failure(fake, reply):
    server = fake(single(lambda connection, command: connection.send(reply)))
    with pytest.raises(StoreFailure, match="SCAN is not understood"):
        open_store(server.address).clear()


def test_the_password_is_in_no_log_and_no_failure(start_redis, caplog):
    server = start_redis(password="hunter2-right")
    write(open_store(server), 1)
    for url in (f"redis://127.0.0.1:{server.port}", f"redis://:hunter2-wrong@127.0.0.1:{server.port}"):
        store = open_store(StoreAddress.parse(url))
        with pytest.raises(StoreRefused) as refused:
            store.check()
        assert store.leading([key_of(1)]) is None and not store.writer().write(key_of(2), pieces_of(2))
        with pytest.raises(StoreFailure):
            store.reader().request(key_of(1), 0)
        assert store.usage() == {}
        assert "hunter2" not in f"{refused.value} {caplog.text}"
    assert caplog.records


def test_check_says_what_is_wrong_at_the_start(redis, tmp_path):
    open_store(redis).check()
    with pytest.raises(StoreLost, match="No such file"):
        open_store(StoreAddress.parse(f"unix://{tmp_path}/none.sock")).check()


def test_readers_writers_and_probes_of_many_threads(redis):
    store = open_store(redis)
    write(store, *range(10))
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            reader, writer = store.reader(), store.writer()
            buffer = memoryview(bytearray(1000))
            for n in range(30):
                i = (seed * 7 + n) % 10
                assert store.leading([key_of(i)]) == 1
                for piece in range(NUM_PIECES):
                    reader.request(key_of(i), piece)
                assert writer.write(key_of(i), pieces_of(i))
                for piece in range(NUM_PIECES):
                    assert reader.receive(buffer) == 1000 and bytes(buffer) == expected(i, piece)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert store.stats()["read_pieces"] == 4 * 30 * NUM_PIECES and store.stats()["failures"] == 0
