"""A store behind sentinels: real failovers, a master that was demoted, and sentinels that are gone, slow or wrong."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.offload.store.object_store import ObjectStore
from sglang.srt.offload.store.resp import RespConnection, StoreLost, StoreRefused
from support.children import wait_until
from support.store_servers import PONG, FakeConnection, FakeServer, RedisSentinel, RedisServer, free_port
from support.tls_servers import Certificates, TlsTerminator

NUM_PIECES = 2
KEYS = [i.to_bytes(16, "little") for i in range(10)]
TIMEOUT_S = 0.5


def pieces_of(key: bytes) -> list[list[bytes]]:
    return [[key, bytes([piece]) * 500] for piece in range(NUM_PIECES)]


def open_store(url: str, **options: object) -> ObjectStore:
    return ObjectStore(StoreAddress.parse(url), b"model", NUM_PIECES, **{"timeout_s": 5.0, **options})  # type: ignore[arg-type]


def check_blocks(store: ObjectStore, keys: list[bytes]) -> None:
    assert store.leading(keys) == len(keys)
    with closing(store.reader()) as reader:
        for key in keys:
            reader.request(key, 1)
        buffer = memoryview(bytearray(1000))
        for key in keys:
            size = reader.receive(buffer)
            assert size is not None and bytes(buffer[:size]) == b"".join(pieces_of(key)[1])


# -- real sentinels -------------------------------------------------------------------------------------------------


class Watched:
    """A master, its replica, and a sentinel. url: it names a sentinel that is not there, and this one."""

    def __init__(self, folder: Path, start: Callable[..., RedisServer], password: str = "") -> None:
        # Replicas come one by one, so none waits for others.
        self.master = start(password=password, repl_diskless_sync_delay="0")
        self.replica = start(password=password, **({"masterauth": password} if password else {}))
        self.replica.connection().call("REPLICAOF", "127.0.0.1", self.master.port)
        self.sentinel = RedisSentinel(folder, self.master, password)
        wait_until(lambda: self.sentinel.knows(1), "the sentinel to know the replica")
        user = f":{password}@" if password else ""
        self.url = f"redis+sentinel://{user}127.0.0.1:{free_port()},127.0.0.1:{self.sentinel.port}/mymaster"

    def wait_for_copies(self) -> None:
        with closing(self.master.connection()) as connection:
            connection.call("SET", "last", 1)
            assert connection.call("WAIT", 1, 60_000) == 1


@pytest.fixture
def watched(tmp_path, start_redis) -> Iterator[Callable[..., Watched]]:
    started: list[Watched] = []

    def start(**options: str) -> Watched:
        started.append(Watched(tmp_path, start_redis, **options))
        return started[-1]

    yield start
    for each in started:
        each.sentinel.kill()


@pytest.mark.parametrize("password", ["", "secret"])
def test_a_master_that_dies_is_followed_by_its_replica(watched, password):
    servers = watched(password=password)
    store = open_store(servers.url)
    store.check()
    writer, reader = store.writer(), store.reader()
    assert all(writer.write(key, pieces_of(key)) for key in KEYS)
    check_blocks(store, KEYS)
    reader.request(KEYS[0], 0)
    assert reader.receive(memoryview(bytearray(1000)))
    servers.wait_for_copies()
    servers.master.kill()
    assert store.leading(KEYS) is None
    wait_until(lambda: store.leading(KEYS) == len(KEYS), "the new master to be found")
    check_blocks(store, KEYS)
    new = bytes(16)
    wait_until(lambda: writer.write(new, pieces_of(new)), "a writer to find the new master")
    assert servers.replica.connection().call("EXISTS", store.name_of(new, 0)) == 1

    def reads() -> bool:
        try:
            reader.request(KEYS[3], 0)
            return reader.receive(memoryview(bytearray(1000))) is not None
        except StoreLost:
            return False

    wait_until(reads, "a reader to find the new master")
    assert servers.sentinel.master_port() == servers.replica.port


@pytest.mark.slow
def test_a_failover_while_both_live(watched):
    servers = watched()
    store = open_store(servers.url)
    writer = store.writer()
    assert writer.write(KEYS[0], pieces_of(KEYS[0]))
    servers.wait_for_copies()
    with closing(servers.sentinel.connection()) as connection:
        # It asks the replica for its state every 10 s. Before that it has none to promote.
        wait_until(
            lambda: connection.pipeline([("SENTINEL", "FAILOVER", "mymaster")]) == [b"OK"], "the failover's start"
        )
    wait_until(lambda: servers.sentinel.master_port() == servers.replica.port, "the failover")

    def is_demoted() -> bool:
        try:
            return servers.master.connection().call("ROLE")[0] == b"slave"
        except StoreLost:
            return False  # a server that is demoted ends its connections

    wait_until(is_demoted, "the master to be demoted")
    wait_until(lambda: writer.write(KEYS[1], pieces_of(KEYS[1])), "a writer to find the new master")
    assert servers.replica.connection().call("EXISTS", store.name_of(KEYS[1], 0)) == 1
    wait_until(lambda: store.leading(KEYS[:2]) == 2, "the blocks")
    assert store.stats()["refused_writes"] == store.stats()["paused_writes"] == 0


# -- sentinels that only pretend to be some -------------------------------------------------------------------------


def names(where: Callable[[], int | None]) -> Callable[[FakeConnection], None]:
    """A sentinel that names this port of 127.0.0.1 as the master; None: it knows no master."""

    def serve(connection: FakeConnection) -> None:
        while command := connection.read():
            if command[0] != b"SENTINEL":
                connection.send(PONG)
            elif (port := where()) is None:
                connection.send(b"*-1\r\n")
            else:
                connection.send(b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%d\r\n" % (len(str(port)), port))

    return serve


def url_of(*sentinels: FakeServer | int) -> str:
    """int: a port."""
    ports = [each if isinstance(each, int) else each.address.endpoints[0].port for each in sentinels]
    return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in ports)}/mymaster"


def test_a_master_that_answers_readonly_is_asked_for_again(fake, start_redis, caplog, monkeypatch):
    """The demoted master keeps its connections open. Only a write shows what it is now."""
    monkeypatch.setattr("sglang.srt.utils.rare_log.INTERVAL_S", 0.0)  # all failures are logged
    old, new = start_redis(), start_redis()
    master = old
    sentinel = fake(names(lambda: master.port))
    store = open_store(url_of(sentinel))
    writer = store.writer()
    assert writer.write(KEYS[0], pieces_of(KEYS[0]))
    old.connection().call("REPLICAOF", "127.0.0.1", new.port)
    # The sentinel is late.
    assert not writer.write(KEYS[1], pieces_of(KEYS[1]))
    assert "is a replica now" in caplog.text
    assert not writer.write(KEYS[1], pieces_of(KEYS[1]))
    assert "have not agreed on a new master" in caplog.text
    master = new
    wait_until(lambda: writer.write(KEYS[1], pieces_of(KEYS[1])), "the pause after two failures")
    assert new.connection().call("EXISTS", store.name_of(KEYS[1], b"m")) == 1
    # Writes are not paused, as they are where a store is full.
    assert store.stats()["refused_writes"] == store.stats()["paused_writes"] == 0


def test_what_a_single_connection_sends(fake, redis):
    sentinel = fake(names(lambda: redis.port))
    connection = RespConnection(StoreAddress.parse(url_of(sentinel) + "/3"), 5.0, name="a-name")
    assert connection.call("CLIENT", "GETNAME") == b"a-name"
    assert b" db=3 " in connection.call("CLIENT", "LIST")
    connection.call("PING")
    # One question per connection; a sentinel has no databases.
    assert sentinel.requests == [[b"PING"], [b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", b"mymaster"]]
    connection.close()
    connection.call("PING")
    assert len(sentinel.requests) == 4


def test_a_user_who_may_not_ask_for_the_role(fake, start_redis):
    server = start_redis()
    server.connection().call("ACL", "SETUSER", "me", "on", ">mine", "~*", "+@all", "-role")
    url = url_of(fake(names(lambda: server.port))).replace("://", "://me:mine@")
    assert RespConnection(StoreAddress.parse(url), 5.0).call("PING") == b"PONG"


def test_a_url_that_names_a_sentinel_as_the_server(fake, start_redis, tmp_path):
    server = start_redis()
    sentinel = RedisSentinel(tmp_path, server)
    try:
        wait_until(lambda: sentinel.knows(0), "the sentinel to answer")
        where = f"127.0.0.1:{sentinel.port}"
        with closing(sentinel.connection()) as connection, pytest.raises(StoreRefused) as refused:
            connection.refuse_sentinel()
        assert f"{where} is a sentinel" in str(refused.value)
        assert f"redis+sentinel://{where}/NAME" in str(refused.value)
    finally:
        sentinel.kill()
    server.connection().call("ACL", "SETUSER", "me", "on", ">mine", "~*", "+@all", "-role")
    for user in ("", "me:mine@"):
        RespConnection(StoreAddress.parse(f"redis://{user}127.0.0.1:{server.port}"), 5.0).refuse_sentinel()
    # A server that does not like the question.
    RespConnection(fake(lambda c: [c.handshake(), c.read()]).address, 5.0).refuse_sentinel()


@pytest.mark.parametrize(
    ("host", "port"), [("..h", "1"), *(("127.0.0.1", port) for port in ("0", "-1", "65536", "1" * 25))]
)
def test_a_master_whose_host_or_port_cannot_be_one(fake, host, port):
    answer = f"*2\r\n${len(host)}\r\n{host}\r\n${len(port)}\r\n{port}\r\n".encode()
    odd = fake(lambda c: [c.handshake(), c.read(), c.send(answer), c.hold()])
    with pytest.raises(StoreLost, match="not understood"):
        RespConnection(StoreAddress.parse(url_of(odd)), 5.0).call("PING")


def test_sentinels_without_an_answer(fake, redis):
    def refused(*sentinels: FakeServer | int) -> str:
        with pytest.raises((StoreRefused, StoreLost)) as failure:
            RespConnection(StoreAddress.parse(url_of(*sentinels)), 5.0).call("PING")
        return f"{'StoreRefused' if isinstance(failure.value, StoreRefused) else 'StoreLost'} {failure.value}"

    unknown = fake(names(lambda: None))
    assert "StoreRefused" in refused(unknown) and "correct the master's name" in refused(unknown, unknown)
    assert "StoreRefused" in refused(redis.port) and "is no sentinel" in refused(redis.port)
    odd = fake(lambda c: [c.handshake(), c.read(), c.send(b"*1\r\n:7\r\n"), c.hold()])
    assert "StoreLost" in refused(odd) and "not understood" in refused(odd)
    gone = free_port()
    # A sentinel that may know the master is not there: this may pass.
    assert "StoreLost" in refused(gone, unknown) and "StoreLost" in refused(unknown, gone)


def test_a_password_is_sent_only_to_a_sentinel_that_wants_it(fake, start_redis):
    server = start_redis(password="secret")

    def locked(connection: FakeConnection) -> None:
        while command := connection.read():
            if command[0] == b"AUTH":
                connection.send(b"+OK\r\n" if command[1:] == [b"secret"] else b"-WRONGPASS no\r\n")
                break
            connection.send(b"-NOAUTH Authentication required.\r\n")
        names(lambda: server.port)(connection)

    for serve, num_auths in ((names(lambda: server.port), 0), (locked, 1)):
        sentinel = fake(serve)
        url = url_of(sentinel).replace("://", "://:secret@")
        assert RespConnection(StoreAddress.parse(url), 5.0).call("PING") == b"PONG"
        assert [request[0] for request in sentinel.requests].count(b"AUTH") == num_auths
    with pytest.raises(StoreRefused, match="wants a password"):
        RespConnection(StoreAddress.parse(url_of(sentinel)), 5.0).call("PING")


def test_a_sentinel_that_hangs_leaves_time_for_the_others(fake, redis):
    hanging = fake(lambda connection: connection.hold())
    connection = RespConnection(StoreAddress.parse(url_of(hanging, fake(names(lambda: redis.port)))), 3.0)
    start = time.monotonic()
    assert connection.call("PING") == b"PONG"
    assert time.monotonic() - start < 2.9
    # The one that has answered is asked first from now on.
    connection.close()
    connection.call("PING")
    assert hanging.num_connections == 1
    start = time.monotonic()
    with pytest.raises(StoreLost, match="no sentinel names the master"):
        RespConnection(StoreAddress.parse(url_of(hanging, hanging)), TIMEOUT_S).call("PING")
    assert time.monotonic() - start < 2 * TIMEOUT_S


def test_a_master_that_does_not_take_connections(fake):
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        sentinel = fake(names(lambda: full.getsockname()[1]))
        with pytest.raises(StoreLost, match=r"the master mymaster at 127\.0\.0\.1"):
            RespConnection(StoreAddress.parse(url_of(sentinel)), 5.0).call("PING")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates need the command openssl")
def test_sentinels_and_master_behind_tls(fake, redis, tmp_path):
    certificates = Certificates(tmp_path)
    master = TlsTerminator(redis.unix_address.endpoints[0], certificates.server)
    sentinel = fake(names(lambda: master.port))
    secured = TlsTerminator(sentinel.address.endpoints[0], certificates.server)
    try:
        url = f"rediss+sentinel://127.0.0.1:{secured.port}/mymaster?ca={certificates.path('ca.pem')}"
        store = open_store(url)
        assert store.writer().write(KEYS[0], pieces_of(KEYS[0]))
        check_blocks(store, KEYS[:1])
        with pytest.raises(StoreRefused, match="or write rediss:// for a single server"):
            RespConnection(StoreAddress.parse(url.replace(str(secured.port), str(master.port))), 5.0).call("PING")
    finally:
        master.close()
        secured.close()
