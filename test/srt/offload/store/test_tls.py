"""A store behind TLS: values, refusals with their remedies, and servers that stop within a record."""

from __future__ import annotations

import os
import random
import re
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sglang.srt.offload.store.address import StoreAddress, TlsFiles
from sglang.srt.offload.store.cluster import NUM_SLOTS
from sglang.srt.offload.store.object_store import ObjectStore
from sglang.srt.offload.store.resp import RespConnection, StoreFailure, StoreLost, StoreRefused, StoreTimeout
from support.codec_cases import SMALL, kv_block
from support.plane_rig import Asked, PieceSource, plane, some_pages
from support.store_servers import FakeConnection, FakeServer, RedisServer
from support.tls_servers import TLS_STORE_SERVER, Certificates, TlsRedisServer, TlsTerminator

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates need the command openssl")

MIB = 1 << 20
TIMEOUT_S = 0.5
NUM_PIECES = 2
Secure = Callable[..., StoreAddress]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def secure(redis: RedisServer, certificates: Certificates, tmp_path) -> Iterator[Secure]:
    """Gives what starts a server with TLS, and returns its address, of which the host is `host`."""
    started: list[TlsTerminator | TlsRedisServer] = []

    def start(host: str = "127.0.0.1", certificate: str = "server", client_ca: str = "") -> StoreAddress:
        own, client = certificates.path(f"{certificate}.pem"), certificates.path(client_ca) if client_ca else None
        if TLS_STORE_SERVER:
            server = TlsRedisServer(tmp_path, own, certificates.path("ca.pem"), client)
            started.append(server)
            port = server.tls_port
        else:
            terminator = TlsTerminator(redis.unix_address.endpoints[0], own, client)
            started.append(terminator)
            port = terminator.port
        return StoreAddress.parse(f"rediss://{host}:{port}?ca={certificates.path('ca.pem')}")

    start.started = started  # type: ignore[attr-defined]
    yield start
    for server in started:
        server.close() if isinstance(server, TlsTerminator) else server.kill()


def with_files(address: StoreAddress, certificates: Certificates, **names: str) -> StoreAddress:
    """names: of ca, cert and key; "" removes one."""
    paths = {what: str(certificates.path(name)) if name else "" for what, name in names.items()}
    assert address.tls is not None
    return replace(address, tls=replace(address.tls, **paths))


def refused(address: StoreAddress, kind: type[StoreFailure] = StoreRefused, timeout_s: float = 10.0) -> str:
    with pytest.raises(kind) as failure:
        RespConnection(address, timeout_s).call("PING")
    return str(failure.value)


# -- what works -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_calls_pipelines_and_values(secure, host):
    connection = RespConnection(secure(host), 10.0, name="a-name")
    assert connection.call("CLIENT", "GETNAME") == b"a-name"
    assert connection.pipeline([("SET", "n", 41), ("INCR", "n"), ("GET", "none")]) == [b"OK", 42, None]
    values = [os.urandom(size) for size in (0, 1, 31, 32, 33, 16383, 16384, 16385, 64 << 10, 2 * MIB, 2 * MIB + 1)]
    for i, value in enumerate(values):
        connection.send_set(b"v%d" % i, [value[:5], memoryview(value)[5:]])
    assert connection.receive_all() == [b"OK"] * len(values)
    for i in range(len(values)):
        connection.send_get(b"v%d" % i)
    memory = bytearray(b"." * (2 * MIB + 21))
    buffer = memoryview(memory)[10:-10]
    for value in values:
        assert connection.receive_into(buffer) == len(value) and buffer[: len(value)] == value
    assert memory[:10] == memory[-10:] == b"." * 10 and connection.pending == 0
    value = values[-1]
    connection.set(b"v", [value[i : i + 700] for i in range(0, len(value), 700)])
    assert connection.call("GET", "v") == value
    connection.close()
    assert connection.call("PING") == b"PONG"


def test_blocks_behind_tls(secure):
    store = ObjectStore(secure(), b"model", NUM_PIECES, timeout_s=10.0)
    store.check()
    keys = [i.to_bytes(16, "little") for i in range(5)]
    writer, reader = store.writer(), store.reader()
    values = {(key, piece): os.urandom(300_000) for key in keys for piece in range(NUM_PIECES)}
    assert all(writer.write(key, [[values[key, p][:100], values[key, p][100:]] for p in range(2)]) for key in keys)
    assert store.leading(keys) == 5
    for key, piece in values:
        reader.request(key, piece)
    buffer = memoryview(bytearray(300_000))
    for value in values.values():
        assert reader.receive(buffer) == len(value) and buffer == value
    store.clear()
    assert store.leading(keys) == 0
    for each in (store, writer, reader):
        each.close()


@pytest.mark.usefixtures("close_sources")
def test_the_data_plane_reads_behind_tls(secure):
    """Small pieces and large ones; and a server that goes is a lost connection."""
    for layout in (SMALL, kv_block(16, 2, 16, 8, 64, "float32", max_piece_bytes=1 << 20)):
        source = PieceSource(1, 4, layout, server=SimpleNamespace(address=secure()), timeout_s=10.0)
        connection = RespConnection(source.store.address, 10.0)
        for name, value in source.pieces.items():
            connection.set(name, [value])
        connection.close()
        with plane() as line:
            session = source.open(line)
            for number in range(3):
                asked = Asked(source, session, number, range(4), some_pages(source, 4, random.Random(number)))
                assert asked.wait() == 4 and asked.came(4)
            server = secure.started.pop()
            server.close() if isinstance(server, TlsTerminator) else server.kill()
            assert Asked(source, session, 3, [0], asked.pages[:1]).wait() == 0
            session.close()
    while any(thread.name == "tls" for thread in threading.enumerate()):
        time.sleep(0.01)


def test_received_bytes_go_straight_to_the_buffer(secure, monkeypatch):
    connection = RespConnection(secure(), 10.0)
    connection.set(b"v", [bytes(MIB)])
    memory = bytearray(MIB)
    sizes = []
    receive = connection._transport.socket.recv_into
    monkeypatch.setattr(
        connection._transport.socket,
        "recv_into",
        lambda view: sizes.append((view.obj is memory, receive(view))) or sizes[-1][1],
    )
    connection.send_get(b"v")
    assert connection.receive_into(memoryview(memory)) == MIB
    assert sum(size for straight, size in sizes if straight) >= MIB - 32


def test_the_authorities_of_this_machine_count_by_default(secure, certificates, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.path("ca.pem")))
    assert RespConnection(with_files(secure(), certificates, ca=""), 10.0).call("PING") == b"PONG"


@pytest.mark.parametrize("one_file", [False, True])
def test_a_client_with_a_certificate(secure, certificates, one_file):
    address = secure(client_ca="ca.pem")
    files = {"cert": "client.pem", "key": "client.key"}
    if one_file:
        text = certificates.path("client.key").read_text() + certificates.path("client.pem").read_text()
        certificates.path("both.pem").write_text(text)
        files = {"cert": "both.pem"}
    connection = RespConnection(with_files(address, certificates, **files), 10.0)
    assert connection.pipeline([("SET", "x", 1), ("GET", "x")]) == [b"OK", b"1"]


@pytest.mark.skipif(bool(TLS_STORE_SERVER), reason="a terminator's connections are dropped")
def test_a_lost_connection_and_a_renewed_certificate(secure, certificates):
    address = secure()
    connection = RespConnection(address, 10.0)
    assert connection.call("PING") == b"PONG"
    (terminator,) = secure.started
    terminator.use(certificates.sign("renewed", "IP:127.0.0.1", ca="other-ca"))
    ca = certificates.path("renewed-ca.pem")
    shutil.copy(certificates.path("ca.pem"), ca)
    renewing = RespConnection(with_files(address, certificates, ca=ca.name), 10.0)
    with pytest.raises(StoreRefused):
        renewing.call("PING")
    # The same file with another content: no restart is needed.
    shutil.copy(certificates.path("other-ca.pem"), ca)
    assert renewing.call("PING") == b"PONG"
    terminator.drop_connections()
    with pytest.raises(StoreLost):
        renewing.call("PING")
    assert renewing.call("PING") == b"PONG"


# -- refusals -------------------------------------------------------------------------------------------------------


def test_certificates_that_do_not_verify(secure, certificates):
    address = secure()
    with_other = refused(with_files(address, certificates, ca="other-ca.pem"))
    assert "other-ca.pem" in with_other and "?ca=/path/ca.pem" in with_other
    assert "a CA that this machine trusts" in refused(with_files(address, certificates, ca=""))


def test_a_certificate_of_another_host(secure, certificates):
    certificates.sign("elsewhere", "DNS:elsewhere.example,IP:10.0.0.1")
    for host in ("127.0.0.1", "localhost"):
        message = refused(secure(host, certificate="elsewhere"))
        assert "is for another host" in message and host in message and "write the name" in message
    assert "cluster-announce-hostname" in refused(replace(secure(certificate="elsewhere"), cluster=True))


def test_a_certificate_that_has_expired(secure, certificates):
    certificates.sign("old", "IP:127.0.0.1", days=-1)
    assert "has expired: renew it" in refused(secure(certificate="old"))


def test_a_server_that_wants_a_certificate(secure, certificates):
    address = secure(client_ca="ca.pem")
    for _ in range(3):
        message = str(_failure(address))
        assert "wants a client certificate" in message and "cert=" in message
    certificates.sign("stranger", "DNS:client", ca="other-ca")
    stranger = with_files(address, certificates, cert="stranger.pem", key="stranger.key")
    message = str(_failure(stranger))
    assert "does not accept the client certificate" in message or "its log may say why" in message


def _failure(address: StoreAddress) -> StoreFailure:
    """A real server sends an alert, which is StoreRefused. A terminator may close the connection before."""
    with pytest.raises(StoreRefused if TLS_STORE_SERVER else (StoreRefused, StoreLost)) as failure:
        RespConnection(address, 10.0).call("PING")
    return failure.value


def test_files_that_cannot_be_used(secure, certificates):
    address = secure()
    (certificates.path("garbage.pem")).write_text("no certificate\n")
    certificates.sign("locked", "DNS:client", passphrase="a-passphrase")
    for ca in ("none.pem", "garbage.pem"):
        message = refused(with_files(address, certificates, ca=ca))
        assert ca in message and "correct ca=" in message
    no_key = "the key cannot be read: it may be locked by a passphrase"
    for cert, key, reason in (
        ("none.pem", "", "No such file"),
        ("client.pem", "none.key", "No such file"),
        ("client.pem", "", no_key),
        ("client.pem", "garbage.pem", no_key),
        ("client.pem", "server.key", "KEY_VALUES_MISMATCH"),
        ("garbage.pem", "client.key", "the certificate cannot be read"),
        ("locked.pem", "locked.key", no_key),
    ):
        message = refused(with_files(address, certificates, cert=cert, key=key))
        assert cert in message and "correct cert= and key=" in message, message
        assert reason in message and "_ssl.c" not in message, message
    message = refused(StoreAddress.parse(f"rediss://127.0.0.1:{address.endpoints[0].port}?ca=/a%00b"))
    assert "correct ca=" in message


def test_a_plain_server_behind_rediss(redis, fake, certificates):
    """Redis waits for the end of a line; others answer at once."""
    address = StoreAddress.parse(f"rediss://127.0.0.1:{redis.port}")
    assert re.search("handshake.*write redis://", refused(address, StoreTimeout, TIMEOUT_S))

    def answer(connection: FakeConnection) -> None:
        connection.socket.recv(1000)
        connection.send(b"-ERR Protocol error\r\n")
        connection.socket.recv(1000)

    def leave(connection: FakeConnection) -> None:
        connection.socket.recv(1000)

    address = replace(fake(leave).address, tls=TlsFiles())
    assert re.search("closed.*handshake.*write redis://", refused(address, StoreLost))
    address = replace(fake(answer).address, tls=TlsFiles())
    assert re.search("speaks no TLS.*write redis://", refused(address, StoreLost))


def test_a_server_with_tls_behind_redis(secure):
    address = replace(secure(), tls=None)
    assert "write rediss://" in refused(address, StoreLost)


def test_an_alert_is_recognized(fake):
    def alert(connection: FakeConnection) -> None:
        connection.send(b"\x15\x03\x01\x00\x02\x02\x46")
        connection.socket.recv(1000)

    assert "speaks TLS: write rediss://" in refused(fake(alert).address, StoreLost)


# -- time -----------------------------------------------------------------------------------------------------------


class CutLine:
    """Passes bytes between a client and a server on. `stop_after`: what the server sends after as many bytes more is
    kept back."""

    def __init__(self, fake: Callable[..., FakeServer], port: int) -> None:
        self.stop_after = 1 << 40
        self._port = port
        self.server = fake(self._serve)
        self.port = self.server.address.endpoints[0].port

    def _serve(self, connection: FakeConnection) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as behind:
            while True:
                ready = select.select([connection.socket, behind], [], [], 5.0)[0]
                for source, target in ((connection.socket, behind), (behind, connection.socket)):
                    if source not in ready:
                        continue
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if source is behind:
                        data = data[: self.stop_after]
                        self.stop_after -= len(data)
                    target.sendall(data)


@pytest.mark.parametrize("stop_after", [0, 3, 5000, 40_000])
def test_a_server_that_stops_within_a_record_is_a_timeout(secure, fake, stop_after):
    address = secure()
    line = CutLine(fake, address.endpoints[0].port)
    connection = RespConnection(
        replace(address, endpoints=(replace(address.endpoints[0], port=line.port),)), TIMEOUT_S
    )
    connection.timeout_s = 10.0
    connection.set(b"v", [bytes(100_000)])
    connection.timeout_s = TIMEOUT_S
    line.stop_after = stop_after
    start = time.monotonic()
    connection.send_get(b"v")
    with pytest.raises(StoreTimeout):
        connection.receive_into(memoryview(bytearray(100_000)))
    assert time.monotonic() - start > TIMEOUT_S - 0.01
    # Within the handshake, too.
    with pytest.raises(StoreTimeout, match="handshake"):
        connection.call("PING")
    line.stop_after = 1 << 40


def test_a_server_that_drips_is_a_timeout(secure, fake):
    """One byte of a record after the other."""
    address = secure()

    def drip(connection: FakeConnection) -> None:
        with socket.create_connection(("127.0.0.1", address.endpoints[0].port)) as behind:
            hello = connection.socket.recv(1 << 16)
            behind.sendall(hello)
            connection.drip(behind.recv(1 << 16), 0.05)

    dripping = replace(address, endpoints=fake(drip).address.endpoints)
    start = time.monotonic()
    refused(dripping, StoreTimeout, TIMEOUT_S)
    assert time.monotonic() - start > TIMEOUT_S - 0.01


def test_a_server_that_reads_nothing_is_a_timeout(secure, fake):
    address = secure()
    stopped = False

    def relay(connection: FakeConnection) -> None:
        with socket.create_connection(("127.0.0.1", address.endpoints[0].port)) as behind:
            while not stopped:
                for source, target in ((connection.socket, behind), (behind, connection.socket)):
                    if select.select([source], [], [], 0.01)[0]:
                        target.sendall(source.recv(1 << 16))
            connection._closed.wait()

    connection = RespConnection(replace(address, endpoints=fake(relay).address.endpoints), 10.0)
    assert connection.call("PING") == b"PONG"
    stopped, connection.timeout_s = True, TIMEOUT_S
    with pytest.raises(StoreTimeout):
        for _ in range(20):
            connection.send_set(b"v", [bytes(2 * MIB)])


def test_a_slow_server_is_no_failure(fake, secure):
    """Records that come in pieces."""
    address = secure()
    RespConnection(address, 10.0).set(b"v", [bytes(100)])

    def drip(connection: FakeConnection) -> None:
        with socket.create_connection(("127.0.0.1", address.endpoints[0].port)) as behind:
            while True:
                ready = select.select([connection.socket, behind], [], [], 5.0)[0]
                if connection.socket in ready:
                    if not (request := connection.socket.recv(1 << 16)):
                        return
                    behind.sendall(request)
                if behind in ready:
                    data = behind.recv(1 << 16)
                    for i in range(0, len(data), 100):
                        connection.send(data[i : i + 100])
                        time.sleep(0.002)

    connection = RespConnection(replace(address, endpoints=fake(drip).address.endpoints), 60.0)
    assert connection.call("GET", "v") == bytes(100)


# -- a cluster ------------------------------------------------------------------------------------------------------


def test_a_cluster_behind_tls(redis, fake, certificates):
    """Every node, the ones that are only named by others as well, is spoken to over TLS."""
    terminators: list[TlsTerminator] = []

    def node(connection: FakeConnection) -> None:
        while command := connection.read():
            if command[0] == b"CLUSTER":
                middle = NUM_SLOTS // 2
                parts = ((0, middle - 1, terminators[0].port), (middle, NUM_SLOTS - 1, terminators[1].port))
                entries = [b"*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\nlocalhost\r\n:%d\r\n" % part for part in parts]
                connection.send(b"*2\r\n" + b"".join(entries))
            elif command[0] == b"TOUCH":
                connection.send(b":1\r\n")
            else:
                connection.send(b"+PONG\r\n")

    nodes = [fake(node) for _ in range(2)]
    certificate = certificates.path("server.pem")
    terminators += [TlsTerminator(server.address.endpoints[0], certificate) for server in nodes]
    try:
        ca = certificates.path("ca.pem")
        store = ObjectStore(
            StoreAddress.parse(f"rediss+cluster://127.0.0.1:{terminators[0].port}?ca={ca}"), b"m", 1, timeout_s=10.0
        )
        keys = [i.to_bytes(16, "little") for i in range(30)]
        assert store.leading(keys) == len(keys)
        assert all(any(request[0] == b"TOUCH" for request in server.requests) for server in nodes)
    finally:
        for terminator in terminators:
            terminator.close()
