"""Sessions that do not begin: nothing of them is left, and an engine that is still there is told why."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.offload import wire
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.frames import FrameConnection
from sglang.srt.offload.proxy.plane import PlaneSession
from sglang.srt.offload.proxy.server import ProxyServer
from sglang.srt.offload.proxy.settings import ProxySettings
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
    begin = PlaneSession._open

    def open_too_large(self: PlaneSession, link: Any) -> None:
        vars(self._source.layout)["piece_bytes"] = 4 << 20
        begin(self, link)

    monkeypatch.setattr(PlaneSession, "_open", open_too_large)
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
