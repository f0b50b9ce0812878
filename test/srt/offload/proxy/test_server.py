"""Sessions that do not begin: nothing of them is left, and an engine that is still there is told why. And sessions
that fail: each ends alone."""

from __future__ import annotations

import errno
import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sglang.srt.offload import wire
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.frames import FrameConnection
from sglang.srt.offload.proxy import server as server_module
from sglang.srt.offload.proxy.plane import PlaneSession
from sglang.srt.offload.proxy.server import ProxyServer
from sglang.srt.offload.proxy.session import Session
from sglang.srt.offload.proxy.settings import ProxySettings
from sglang.srt.offload.store.address import Endpoint
from sglang.srt.offload.store.object_store import ObjectStore
from sglang.srt.utils.shared_memory import SharedMemory
from support.codec_cases import kv_block
from support.remote_fixture import BUFFERS
from support.store_servers import FakeConnection, FakeServer, single

TOKEN = "5e7c" * 16


def hello(layout: BlockLayout, **fields: Any) -> wire.Hello:
    values = {"token": TOKEN, "num_pages": 64, "pool_bytes": 64 * layout.page.page_bytes, "codec": {}}
    return wire.Hello(
        **{**values, "layout": layout.as_dict(), "namespace": b"n", "engine": b"e", "epoch": 1, **fields}
    )


@pytest.fixture
def server() -> Iterator[ProxyServer]:
    store = FakeServer(single(lambda connection, command: connection.send(b"$-1\r\n")))
    made = ProxyServer(ProxySettings(**BUFFERS), store.address, TOKEN)
    yield made
    assert not made.plane._sessions
    made.close()
    store.close()


LAYOUT = kv_block(4, 2, 4, 2, 8, "float32")


@contextmanager
def served(server: ProxyServer, layout: BlockLayout = LAYOUT, **fields: Any) -> Iterator[tuple[socket.socket, Any]]:
    """The engine's socket, and the first answer."""
    ours, theirs = socket.socketpair()
    pool = SharedMemory.allocate(64 * layout.page.page_bytes, "pool")
    serving = threading.Thread(target=server.serve, args=(theirs,))
    serving.start()
    with ours:
        ours.settimeout(60.0)
        wire.send(ours, hello(layout, is_first=False, **fields), (pool.fd,))
        yield ours, wire.receive(ours, wire.Welcome | wire.Refused)[0]
    serving.join()


@pytest.mark.parametrize("token", ["", TOKEN[:-1], TOKEN + "5", TOKEN.upper()])
def test_an_engine_on_this_machine_has_to_show_the_token(server: ProxyServer, token: str):
    with served(server, token=token) as (_, refused):
        assert isinstance(refused, wire.Refused) and "token is not this proxy's" in refused.reason
    with served(server) as (_, answer):
        assert isinstance(answer, wire.Welcome)


@pytest.mark.parametrize("pipelined", [True, False])
def test_without_pipelining_a_block_has_to_fit_into_the_buffers(pipelined: bool):
    store = FakeServer(single(lambda connection, command: connection.send(b"$-1\r\n")))
    server = ProxyServer(ProxySettings(**BUFFERS, pipelined=pipelined), store.address, TOKEN)
    large = kv_block(4, 32, 4, 2, 8, "float32", max_piece_bytes=512)
    assert LAYOUT.num_pieces == 1 and large.num_pieces > server.plane.num_slots
    with served(server) as (_, answer):
        assert isinstance(answer, wire.Welcome)
    with served(server, large, epoch=2) as (_, answer):
        assert isinstance(answer, wire.Welcome if pipelined else wire.Refused)
    server.close()
    store.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clear", wire.Clear(1)),
        ("erase", wire.Erase(1, b"tenant")),
        ("limit", wire.Limit(1, b"tenant", 1)),
        ("usage", wire.GetStats()),
        ("leading", wire.Exists(1, b"k" * 16)),
        ("touch", wire.Touch(1, b"k" * 16)),
    ],
)
def test_a_thread_that_dies_ends_its_session(
    server: ProxyServer, monkeypatch: pytest.MonkeyPatch, name: str, message: Any
):
    monkeypatch.setattr(ObjectStore, name, Mock(side_effect=RecursionError))
    with served(server) as (engine, _):
        wire.send(engine, message)
        with pytest.raises(wire.WireError, match="has gone"):
            while True:
                wire.receive(engine, wire.Stats)
    with served(server, epoch=2) as (_, answer):
        assert isinstance(answer, wire.Welcome)


def test_an_answer_that_cannot_be_sent_ends_its_session(server: ProxyServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Session, "_stats", lambda session: {"number": 2**64})
    with served(server) as (engine, _):
        wire.send(engine, wire.GetStats())
        with pytest.raises(wire.WireError, match="has gone"):
            wire.receive(engine, wire.Stats)


def test_the_store_may_name_any_number(server: ProxyServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ObjectStore, "usage", lambda store: {"keys": 7, "limit_bytes": 2**70})
    with served(server) as (engine, _):
        values: dict[str, int] = {}
        while "limit_bytes" not in values:
            wire.send(engine, wire.GetStats())
            values = wire.receive(engine, wire.Stats)[0].values
    assert values["keys"] == 7 and values["limit_bytes"] == 2**63 - 1


def test_a_proxy_without_descriptors_goes_on(server: ProxyServer, monkeypatch: pytest.MonkeyPatch):
    class EndOfTestError(Exception):
        pass

    ours, theirs = socket.socketpair()
    failure = OSError(errno.EMFILE, "Too many open files")
    listener = Mock(accept=Mock(side_effect=[failure, failure, (theirs, ""), EndOfTestError]))
    monkeypatch.setattr(server_module, "open_listener", lambda path: listener)
    monkeypatch.setattr(server_module, "_ACCEPT_PAUSE_S", 0)
    with pytest.raises(EndOfTestError):
        server.listen(Path("proxy.sock"))
    with ours:
        ours.shutdown(socket.SHUT_WR)
        assert ours.recv(1) == b"", "it is served"


def refuse_threads(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The system starts no more threads with these names."""
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name in names:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)


@pytest.mark.parametrize("is_tcp", [False, True])
def test_a_proxy_without_threads_goes_on(server: ProxyServer, monkeypatch: pytest.MonkeyPatch, is_tcp: bool):
    class EndOfTestError(Exception):
        pass

    ours, theirs = socket.socketpair()
    name = Mock(return_value=("127.0.0.1", 1))
    listener = Mock(accept=Mock(side_effect=[(theirs, ("127.0.0.1", 2)), EndOfTestError]), getsockname=name)
    monkeypatch.setattr(server_module, "open_listener", lambda path: listener)
    monkeypatch.setattr(server_module.socket, "create_server", lambda *_, **__: listener)
    refuse_threads(monkeypatch, "session")
    with pytest.raises(EndOfTestError):
        if is_tcp:
            server.listen_tcp(Endpoint("127.0.0.1", 1))
        else:
            server.listen(Path("proxy.sock"))
    with ours:
        assert ours.recv(1) == b"", "it is closed"
    assert not server._strangers


@pytest.mark.parametrize("name", ["session_send", "session_answer_questions", "session_do_chores", "plane-later"])
def test_a_session_that_lacks_a_thread_leaves_none(server: ProxyServer, monkeypatch: pytest.MonkeyPatch, name: str):
    threads = set(threading.enumerate())
    with monkeypatch.context() as patch:
        refuse_threads(patch, name)
        with served(server) as (engine, answer):
            if name == "plane-later":
                assert isinstance(answer, wire.Refused) and "has no thread" in answer.reason
            assert engine.recv(1) == b""
    assert set(threading.enumerate()) <= threads
    with served(server, epoch=2) as (_, answer):
        assert isinstance(answer, wire.Welcome)


@pytest.mark.parametrize(("name", "message"), [("clear", wire.Clear(1)), ("erase", wire.Erase(1, b"tenant"))])
def test_nothing_is_erased_while_an_older_session_may_write(monkeypatch: pytest.MonkeyPatch, name: str, message: Any):
    """As one whose connection is lost, and whose write the store has not answered."""
    erased, may_end, end = Mock(), threading.Event(), Session._end

    def end_late(session: Session) -> None:
        may_end.wait()
        end(session)

    monkeypatch.setattr(ObjectStore, name, erased)
    monkeypatch.setattr(Session, "_end", end_late)
    store = FakeServer(single(lambda connection, command: connection.send(b"$-1\r\n")))
    server = ProxyServer(ProxySettings(**BUFFERS, store_timeout_s=0.05), store.address, TOKEN)
    with served(server) as (older, _), served(server, epoch=2) as (engine, _):
        wire.send(engine, message)
        assert wire.receive(engine, wire.Done)[0] == wire.Done(1, 0) and not erased.called
        may_end.set()
        assert older.recv(1) == b""
        while not erased.called:
            wire.send(engine, message)
            count = wire.receive(engine, wire.Done)[0].count
        assert count == 1
    server.close()
    store.close()


def test_an_engine_that_goes_before_it_is_welcome_leaves_nothing(server: ProxyServer):
    layout = kv_block(4, 2, 4, 2, 8, "float32")
    for _ in range(3):
        ours, theirs = socket.socketpair()
        pool = SharedMemory.allocate(64 * layout.page.page_bytes, "pool-of-one-that-goes")
        with ours:
            wire.send(ours, hello(layout), (pool.fd,))
        server.serve(theirs)
        del pool
    assert not server.plane._sessions
    gc.collect()
    assert "pool-of-one-that-goes" not in Path("/proc/self/maps").read_text()


def test_an_engine_elsewhere_is_told_why_the_plane_refuses_it(server: ProxyServer, monkeypatch: pytest.MonkeyPatch):
    begin = PlaneSession.begin

    def open_too_large(self: PlaneSession, link: Any) -> None:
        vars(self._source.layout)["piece_bytes"] = 4 << 20
        begin(self, link)

    monkeypatch.setattr(PlaneSession, "begin", open_too_large)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, peer = listener.accept()
    serving = threading.Thread(target=server._greet, args=(theirs, peer))
    serving.start()
    relay = FrameConnection(ours, TOKEN.encode(), is_proxy=False)
    relay.send(hello(kv_block(4, 2, 4, 2, 8, "float32"), token="", pool_bytes=0))
    refused = wire.decode(relay.receive().payload, wire.Welcome | wire.Refused)
    assert isinstance(refused, wire.Refused) and "does not describe a session" in refused.reason
    relay.close()
    serving.join()


def test_a_key_of_another_size_is_refused(server: ProxyServer):
    layout = kv_block(4, 2, 4, 2, 8, "float32")
    ours, theirs = socket.socketpair()
    pool = SharedMemory.allocate(64 * layout.page.page_bytes, "pool")
    with ours:
        wire.send(ours, hello(layout, mac_key=b"k" * 33), (pool.fd,))
        server.serve(theirs)
        refused, _ = wire.receive(ours, wire.Refused)
    assert "mac_key has 33 bytes" in refused.reason


def test_closing_ends_the_sessions_and_the_threads(server: ProxyServer):
    layout = kv_block(4, 2, 4, 2, 8, "float32")
    threads = set(threading.enumerate())
    pool = SharedMemory.allocate(64 * layout.page.page_bytes, "pool")
    ours, theirs = socket.socketpair()
    serving = threading.Thread(target=server.serve, args=(theirs,))
    serving.start()
    with ours:
        wire.send(ours, hello(layout, is_first=False), (pool.fd,))
        assert isinstance(wire.receive(ours, wire.Welcome | wire.Refused)[0], wire.Welcome)
        server.close()
        assert ours.recv(1) == b""
    serving.join()
    assert set(threading.enumerate()) <= threads
    assert not any(thread.name.startswith(("write-", "plane-events")) for thread in threading.enumerate())
    # A session that begins later.
    ours, theirs = socket.socketpair()
    server.serve(theirs)
    with ours:
        assert ours.recv(1) == b""


@pytest.mark.parametrize(
    "role", [b"*2\r\n$8\r\nsentinel\r\n*0\r\n", b"-NOPERM no permissions to run the 'role' command\r\n"]
)
def test_a_store_that_is_a_sentinel_is_refused(role: bytes):
    asked: list[bytes] = []

    def answer(connection: FakeConnection, command: list[bytes]) -> None:
        asked.append(command[0])
        connection.send(role if command[0] == b"ROLE" else b"$-1\r\n")

    store = FakeServer(single(answer))
    server = ProxyServer(ProxySettings(**BUFFERS), store.address, TOKEN)
    layout = kv_block(4, 2, 4, 2, 8, "float32")
    pool = SharedMemory.allocate(64 * layout.page.page_bytes, "pool")
    ours, theirs = socket.socketpair()
    threading.Thread(target=server.serve, args=(theirs,)).start()
    with ours:
        wire.send(ours, hello(layout), (pool.fd,))
        reply, _ = wire.receive(ours, wire.Welcome | wire.Refused)
    is_sentinel = b"sentinel" in role
    assert isinstance(reply, wire.Refused) == is_sentinel and b"ROLE" in asked
    assert not is_sentinel or "redis+sentinel://" in reply.reason
    server.close()
    store.close()
