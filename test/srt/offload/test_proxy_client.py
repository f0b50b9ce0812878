"""The engine's end of a session, against a proxy that is a socket of the test."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from sglang.srt.offload import wire
from sglang.srt.offload.proxy_client import ProxyClient
from support.children import wait_until
from support.clocks import LaterClock

HELLO = wire.Hello(token="t", num_pages=1, pool_bytes=4096, layout={}, codec={}, namespace=b"n")


@pytest.fixture
def session(clock: LaterClock) -> Iterator[tuple[ProxyClient, socket.socket]]:
    """A client, and the proxy's end, which has welcomed it."""
    ours, theirs = socket.socketpair()
    with theirs, open(os.devnull, "rb") as memory:
        wire.send(theirs, wire.Welcome("raw"))
        client = ProxyClient(ours, HELLO, memory.fileno(), lambda: None, "the proxy")
        _, fds = wire.receive(theirs, wire.Hello, max_fds=1)
        os.close(fds[0])
        yield client, theirs
        client.shut()
    wait_until(lambda: client.is_lost, "the end")


def test_a_proxy_that_was_asked_nothing_is_not_silent(session: tuple[ProxyClient, socket.socket], clock: LaterClock):
    """Neither while the first answer takes its time, nor while the engine stands still."""
    client, proxy = session
    clock.later_s = 1000.0
    assert client.silent_s == 0
    client.request_stats()
    assert wire.receive(proxy, wire.ToProxy)[0] == wire.GetStats()
    clock.later_s = 1500.0
    client.request_stats()
    client.ask(partial(wire.Exists, keys=b""), lambda count: None)
    clock.later_s = 2000.0
    assert 1000 <= client.silent_s < 1400, "since the first of these questions"
    wire.send(proxy, wire.Stats({"blocks": 7}))
    wait_until(lambda: client.silent_s == 0, "the answer to be read")
    clock.later_s = 3000.0
    assert client.silent_s == 0


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_proxy_that_is_left_alone_can_be_heard_again(session: tuple[ProxyClient, socket.socket], is_asked: bool):
    client, proxy = session
    counts: list[int] = []
    if is_asked:
        client.ask(partial(wire.Exists, keys=b""), counts.append)
        wire.receive(proxy, wire.Exists)
    client.leave_alone()
    client.ask(partial(wire.Exists, keys=b""), counts.append)
    assert counts == [0] * (1 + is_asked)
    assert wire.receive(proxy, wire.ToProxy)[0] == wire.GetStats(), "nothing else would show that it lives"
    wire.send(proxy, wire.Stats({}))
    wait_until(lambda: not client._is_left_alone, "the answer to be read")
    client.ask(partial(wire.Exists, keys=b""), counts.append)
    asked = wire.receive(proxy, wire.Exists)[0]
    wire.send(proxy, wire.Done(asked.id, 5))
    wait_until(lambda: counts[-1:] == [5], "an answer")


@pytest.mark.parametrize("name", ["proxy-messages", "proxy-replies"])
def test_a_session_that_lacks_a_thread_leaves_nothing(monkeypatch: pytest.MonkeyPatch, name: str):
    start, others = threading.Thread.start, set(threading.enumerate())

    def started(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    ours, theirs = socket.socketpair()
    with theirs, open(os.devnull, "rb") as memory:
        wire.send(theirs, wire.Welcome("raw"))
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
            patch.setattr(threading.Thread, "start", started)
            ProxyClient(ours, HELLO, memory.fileno(), lambda: None, "the proxy")
        _, fds = wire.receive(theirs, wire.Hello, max_fds=1)
        os.close(fds[0])
        theirs.settimeout(10)
        assert theirs.recv(1) == b"", "the proxy sees the end"
    wait_until(lambda: set(threading.enumerate()) <= others, "the thread that was started to end")
