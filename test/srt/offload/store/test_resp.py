"""`RespConnection`: values and replies over real sockets, and servers that are slow, gone, foreign or hostile."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
import time

import pytest

from sglang.srt.offload.store import resp
from sglang.srt.offload.store.address import Endpoint, StoreAddress
from sglang.srt.offload.store.resp import (
    BACKOFF_S,
    MAX_BACKOFF_S,
    ErrorReply,
    RespConnection,
    StoreFailure,
    StoreLost,
    StoreRefused,
    StoreTimeout,
    ValueTooLarge,
)
from support.store_servers import PONG, Clock, FakeServer, answering

MIB = 1 << 20
TIMEOUT_S = 0.5


def connect(server: FakeServer, timeout_s: float = 5.0, **options: object) -> RespConnection:
    return RespConnection(server.address, timeout_s, **options)  # type: ignore[arg-type]


def get(connection: RespConnection, size_bytes: int = 100) -> bytes | None:
    memory = bytearray(b"." * (size_bytes + 20))
    connection.send_get(b"key")
    try:
        size = connection.receive_into(memoryview(memory)[10:-10])
    finally:
        assert memory[:10] == memory[-10:] == b"." * 10
    return None if size is None else bytes(memory[10 : 10 + size])


# -- what works -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_calls_pipelines_and_values(redis, kind):
    connection = RespConnection(redis.address if kind == "tcp" else redis.unix_address, 5.0, name="a-name")
    assert connection.call("CLIENT", "GETNAME") == b"a-name"
    assert connection.call("SET", "n", 41) == b"OK" and connection.call("INCR", b"n") == 42
    replies = connection.pipeline([("GET", "n"), ("LPUSH", "n", "x"), ("GET", "none"), ("MGET", "n", "none")])
    assert replies[0] == b"42" and replies[2] is None and replies[3] == [b"42", None]
    assert isinstance(replies[1], ErrorReply) and replies[1].code == "WRONGTYPE"
    with pytest.raises(ErrorReply, match="unknown command"):
        connection.call("NONSENSE")
    values = [os.urandom(size) for size in (0, 1, 31, 32, 33, 64 << 10, 2 * MIB, 2 * MIB + 1)]
    for i, value in enumerate(values):
        connection.set(b"v%d" % i, [value[:5], memoryview(value)[5:]])
    for i in range(len(values)):
        connection.send_get(b"v%d" % i)
    buffer = memoryview(bytearray(2 * MIB + 1))
    for value in values:
        assert connection.receive_into(buffer) == len(value) and buffer[: len(value)] == value
    assert connection.pending == 0
    connection.close()
    assert connection.call("PING") == b"PONG"


def test_a_value_of_thousands_of_parts(redis):
    connection = RespConnection(redis.unix_address, 5.0)
    value = os.urandom(3 * MIB)
    connection.set(b"v", [value[i : i + 700] for i in range(0, len(value), 700)])
    assert connection.call("GET", "v") == value


def test_tcp_does_not_wait_for_more(redis):
    connection = RespConnection(redis.address, 5.0)
    connection.call("PING")
    assert connection._transport.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_who_may_come_in(start_redis):
    server = start_redis(password="right")
    server.connection().call("ACL", "SETUSER", "me", "on", ">mine", "+@all", "~*")
    for who in (":right", "default:right", "me:mine"):
        address = StoreAddress.parse(f"redis://{who}@127.0.0.1:{server.port}/3")
        connection = RespConnection(address, 5.0)
        assert connection.call("SET", who, "x") == b"OK"
    for who, words in (("", "wants a password"), (":wrong@", "correct them"), ("me:wrong@", "correct them")):
        address = StoreAddress.parse(f"redis://{who}127.0.0.1:{server.port}")
        with pytest.raises(StoreRefused, match=words) as refused:
            RespConnection(address, 5.0).call("PING")
        assert "wrong" not in str(refused.value)
    with pytest.raises(StoreRefused, match="database 99"):
        RespConnection(StoreAddress.parse(f"redis://:right@127.0.0.1:{server.port}/99"), 5.0).call("PING")


def test_a_user_who_may_not_select_a_database(start_redis):
    server = start_redis()
    server.connection().call("ACL", "SETUSER", "me", "on", ">mine", "~*", "+@all", "-select")
    with pytest.raises(StoreRefused, match=r"select database 3 \(NOPERM.*: allow the command select") as refused:
        RespConnection(StoreAddress.parse(f"redis://me:mine@127.0.0.1:{server.port}/3"), 5.0).call("PING")
    assert "does not have database" not in str(refused.value)


def test_a_password_for_a_server_that_has_none(redis):
    address = StoreAddress.parse(f"redis://me:secret@127.0.0.1:{redis.port}")
    with pytest.raises(StoreRefused, match="correct them, or leave them out"):
        RespConnection(address, 5.0).call("PING")


def test_a_server_that_quotes_the_password(fake):
    def serve(connection):
        command = connection.read()
        connection.send(b"-ERR unknown command `AUTH`, with args beginning with: `%b`\r\n" % command[1])
        connection.send(PONG)

    address = StoreAddress.parse(str(fake(serve).address).replace("redis://", "redis://:hunter2@"))
    with pytest.raises(StoreRefused) as refused:
        RespConnection(address, 5.0).call("PING")
    assert "hunter2" not in str(refused.value) and "***" in str(refused.value)


@pytest.mark.parametrize("seed", range(3))
def test_replies_cut_at_any_byte(fake, seed):
    random_ = random.Random(seed)
    value = random_.randbytes(300)
    stream = b"$300\r\n%b\r\n$-1\r\n$0\r\n\r\n-ERR no\r\n*2\r\n:-7\r\n*2\r\n$2\r\n\r\n\r\n+x\r\n" % value

    def serve(connection):
        connection.handshake()
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(5):
            connection.read()
        cuts = sorted(random_.sample(range(1, len(stream)), 25))
        for start, end in zip([0, *cuts], [*cuts, len(stream)]):
            connection.send(stream[start:end])
            time.sleep(random_.choice([0, 0.001]))

    connection = connect(fake(serve))
    for _ in range(4):
        connection.send_get(b"key")
    connection.send([(b"LIST",)])
    buffer = memoryview(bytearray(300))
    assert connection.receive_into(buffer) == 300 and bytes(buffer) == value
    assert connection.receive_into(buffer) is None
    assert connection.receive_into(buffer[:0]) == 0
    with pytest.raises(ErrorReply, match="ERR no"):
        connection.receive_into(buffer)
    assert connection.receive() == [-7, [b"\r\n", b"x"]]


# -- what can go wrong ----------------------------------------------------------------------------------------------


def test_a_value_larger_than_the_buffer_is_passed_over(redis):
    connection = RespConnection(redis.address, 5.0)
    connection.set(b"large", [bytes(3 * MIB)])
    connection.set(b"small", [b"small"])
    for key in (b"large", b"small", b"large", b"small"):
        connection.send_get(key)
    memory = bytearray(b"." * 2000)
    for size in (1000, 0):
        with pytest.raises(ValueTooLarge, match="3145728"):
            connection.receive_into(memoryview(memory)[500 : 500 + size])
        assert memory == b"." * 2000
        assert connection.receive_into(memoryview(memory)[500:505]) == 5 and memory[500:505] == b"small"
        memory[500:505] = b"....."
    connection.send_get(b"small")
    with pytest.raises(ValueTooLarge):  # by one byte
        connection.receive_into(memoryview(memory)[500:504])
    assert connection.pending == 0 and memory == b"." * 2000


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\r\n",
        b"\0" * 40,
        b"\xff\x00\x7f$\x01" + b"\r\n" * 20,
        b"+OK\r\n",
        b":7\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"$-2\r\n",
        b"$+5\r\nhello\r\n",
        b"$1_0\r\n",
        b"$ 5\r\nhello\r\n",
        b"$\r\n",
        b"$99999999999999999999999\r\n",
        b"$536870913\r\n",
        b"$5\r\nhelloXY$5\r\n",
        b"$5\nhello\n" + b"x" * 100,
        b"$" + b"1" * 70000,
    ],
    ids=itertools.count(),
)
def test_garbage_where_a_value_should_be(fake, reply):
    server = fake(answering(reply))
    connection = connect(server, TIMEOUT_S)
    with pytest.raises((StoreLost, StoreTimeout)):
        get(connection)
    assert connection.pending == 0
    with pytest.raises((StoreLost, StoreTimeout)):
        get(connection)
    assert server.num_connections == 2


@pytest.mark.parametrize(
    "reply",
    [
        b"*1\r\n" * 100 + b"+x\r\n",
        b"*-2\r\n",
        b"*1048577\r\n",
        b"$67108865\r\n",
        b"*3\r\n$30000000\r\n" + bytes(30000000) + b"\r\n$40000000\r\n",
        b"!5\r\nhello\r\n",
        b"+" + b"x" * 70000,
    ],
    ids=itertools.count(),
)
def test_hostile_replies_to_a_call(fake, reply):
    with pytest.raises(StoreLost):
        connect(fake(answering(reply))).call("LIST")


@pytest.mark.parametrize("use", [lambda c: c.hand_over(), lambda c: c.call("PING")], ids=["hand over", "call"])
def test_a_reply_that_nobody_asked_for_loses_one_connection(fake, use):
    def serve(connection):
        connection.read()
        connection.send(PONG + (b"+OK\r\n" if server.num_connections == 1 else b""))
        while connection.read():
            connection.send(PONG)

    server = fake(serve)
    connection = connect(server)
    with pytest.raises(StoreLost, match="more than was asked for"):
        use(connection)
    use(connection)
    assert server.num_connections == 2
    connection.close()


def test_a_server_that_takes_no_more_clients_is_quoted(fake):
    def serve(connection):
        connection.send(b"-ERR max number of clients reached\r\n")

    connection = RespConnection(fake(serve).address, 5.0, name="sglang")
    with pytest.raises(StoreLost, match=r"closed the connection after its reply: ERR max number of clients"):
        connection.call("PING")


def test_a_peer_that_is_no_redis_server(fake):
    def web(connection):
        connection.socket.recv(1000)
        connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with pytest.raises(StoreLost, match="another protocol"):
        connect(fake(web)).call("GET", "x")


@pytest.mark.parametrize("size_bytes", range(0, 11, 2))
def test_a_connection_that_ends_within_a_value(fake, size_bytes):
    cut = b"$5\r\nhello\r\n"[:size_bytes]

    def serve(connection):
        connection.handshake()
        connection.read()
        connection.send(cut)

    with pytest.raises(StoreLost, match="closed"):
        get(connect(fake(serve)))


def test_a_server_that_drips_is_a_timeout_as_one_that_says_nothing(fake):
    """It would go on for a quarter of an hour."""

    def in_the_header(connection):
        connection.handshake()
        connection.read()
        connection.drip(b"$" + b"0" * 20_000, 0.05)

    def in_the_value(connection):
        connection.handshake()
        connection.read()
        connection.send(b"$20000\r\n")
        connection.drip(b"x" * 20_000, 0.05)

    def in_the_handshake(connection):
        connection.drip(b"+" + b"P" * 20_000, 0.05)

    def in_a_skipped_value(connection):
        connection.handshake()
        connection.read()
        connection.send(b"$3000000\r\n")
        connection.drip(b"x" * 20_000, 0.05)

    def in_silence(connection):
        connection.handshake()
        connection.hold()

    for serve in (in_the_header, in_the_value, in_the_handshake, in_a_skipped_value, in_silence):
        connection = connect(fake(serve), TIMEOUT_S)
        start = time.monotonic()
        with pytest.raises(StoreTimeout):
            get(connection)
        assert time.monotonic() - start > TIMEOUT_S - 0.01, serve.__name__


def test_a_slow_server_is_no_failure_while_it_is_in_time(fake):
    def serve(connection):
        connection.handshake()
        while connection.read():
            connection.drip(b"$10\r\n0123456789\r\n", 0.01)

    connection = connect(fake(serve), 120.0)
    assert [get(connection) for _ in range(3)] == [b"0123456789"] * 3


def test_a_server_that_reads_nothing_is_a_timeout(start_redis):
    server = start_redis()
    for address in (server.address, server.unix_address):
        connection = RespConnection(address, 4 * TIMEOUT_S)  # long enough for the first PING
        connection.call("PING")
        server.pause()
        with pytest.raises(StoreTimeout):
            for _ in range(50):
                connection.send_set(b"v", [bytes(2 * MIB)])
        with pytest.raises(StoreTimeout):
            connection.call("PING")
        server.resume()


def test_attempts_become_rare_while_a_server_is_away(start_redis):
    server = start_redis()
    clock = Clock()
    connection = RespConnection(server.address, 5.0, clock=clock)
    assert connection.call("PING") == b"PONG"
    server.kill()
    with pytest.raises(StoreLost):
        connection.call("PING")
    waits = []
    for _ in range(8):
        with pytest.raises(StoreLost, match="refused"):
            connection.call("PING")
        start = clock.now
        # Asked at once again, it does not try; the clock alone brings the next attempt.
        with pytest.raises(StoreLost, match="next attempt"):
            connection.call("PING")
        while connection._not_before > clock.now:
            clock.now += BACKOFF_S / 4
        waits.append(clock.now - start)
    assert waits[0] == pytest.approx(BACKOFF_S, abs=BACKOFF_S / 4)
    assert waits[2] == pytest.approx(4 * BACKOFF_S, abs=BACKOFF_S / 4)
    assert max(waits) == pytest.approx(MAX_BACKOFF_S, abs=BACKOFF_S)
    server.start()
    assert connection.call("PING") == b"PONG"
    # The next loss is the first one again: nobody waits.
    server.kill()
    with pytest.raises(StoreLost):
        connection.call("PING")
    server.start()
    assert connection.call("PING") == b"PONG"


def test_a_server_that_was_started_anew_is_used_at_once(start_redis):
    server = start_redis()
    connection = server.connection()
    connection.call("SET", "x", "y")
    server.kill()
    server.start()
    with pytest.raises(StoreFailure):
        connection.call("GET", "x")
    assert connection.call("GET", "x") is None


@pytest.mark.parametrize("host", ["redis..example", "a" * 64, "..h", "a\0b"])
def test_a_host_that_cannot_be_looked_up(host):
    """A URL with one is refused. Others, such as a sentinel, may name it too."""
    connection = RespConnection(StoreAddress((Endpoint(host, 6379),)), 5.0)
    with pytest.raises(StoreLost, match="cannot be looked up"):
        connection.call("PING")


def test_a_host_that_is_nowhere():
    with pytest.raises(StoreLost, match=r"nowhere\.invalid"):
        RespConnection(StoreAddress.parse("redis://nowhere.invalid"), 5.0).call("PING")


def test_addresses_that_are_silent_leave_time_for_the_others(fake, monkeypatch):
    """As an unreachable IPv6 address before one of IPv4."""
    timeouts_s: list[float | None] = []

    class Socket(socket.socket):
        def connect(self, target) -> None:
            if target == "silent":
                timeouts_s.append(self.gettimeout())
                raise TimeoutError
            super().connect(target)

    server = fake(answering(PONG))
    (live,) = resp._targets(server.address.endpoints[0])
    monkeypatch.setattr(resp, "_targets", lambda server: [(live[0], "silent")] * 2 + [live])
    monkeypatch.setattr(socket, "socket", Socket)
    assert connect(server, 60.0).call("PING") == b"PONG"
    first_s, second_s = timeouts_s
    assert first_s <= 20.0 and second_s <= 30.0


def test_a_signal_in_the_middle_of_a_value_leaves_no_half_of_it_behind(fake):
    def serve(connection):
        connection.handshake()
        connection.read()
        if server.num_connections == 1:
            connection.send(b"$50\r\nhalf")
            time.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
            connection.hold()
        connection.send(b"$3\r\nnew\r\n")
        connection.hold()

    class Stopped(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGUSR2, stop)
    try:
        server = fake(serve)
        connection = connect(server)
        with pytest.raises(Stopped):
            get(connection)
        assert get(connection) == b"new"
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_encoding():
    assert resp.encode(("SET", b"k\r\n", 12)) == b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$2\r\n12\r\n"
