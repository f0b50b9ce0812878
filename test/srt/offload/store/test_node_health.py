"""`NodeHealth`: servers that are silent, gone, or well again, behind connections that the test commands."""

from __future__ import annotations

import threading

import pytest

from sglang.srt.offload.store.address import Endpoint
from sglang.srt.offload.store.node_health import NodeHealth
from sglang.srt.offload.store.resp import StoreLost, StoreTimeout
from support.children import wait_until

ONE, OTHER = Endpoint("h", 1), Endpoint("h", 2)


class Ping:
    """A PING times out when `may_end` is set, unless the server is `well`. threads: those that ping."""

    well: set[Endpoint]
    may_end: threading.Event
    began: threading.Event
    threads: set[threading.Thread]

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def call(self, *command: str) -> bytes:
        if self._endpoint in self.well:
            return b"PONG"
        self.threads.add(threading.current_thread())
        self.began.set()
        assert self.may_end.wait(60)
        raise StoreTimeout("silent")

    def close(self) -> None:
        pass


def is_sick(health: NodeHealth, endpoint: Endpoint) -> bool:
    try:
        health.check(endpoint)
    except StoreLost:
        return True
    return False


@pytest.fixture(autouse=True)
def pings() -> None:
    Ping.well, Ping.threads = set(), set()
    Ping.may_end, Ping.began = threading.Event(), threading.Event()


def test_a_server_that_no_thread_is_left_for_is_asked_on(monkeypatch: pytest.MonkeyPatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    health = NodeHealth(Ping)  # type: ignore[arg-type]
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        health.note_timeout(ONE)
    assert not is_sick(health, ONE)
    health.note_timeout(ONE)
    assert is_sick(health, ONE)
    Ping.may_end.set()
    Ping.well = {ONE}
    wait_until(lambda: not is_sick(health, ONE), "the silent server to be used again")


def test_a_silent_server_does_not_hold_up_the_others():
    health = NodeHealth(Ping)  # type: ignore[arg-type]
    health.note_timeout(ONE)
    assert Ping.began.wait(60)
    Ping.well = {OTHER}
    health.note_timeout(OTHER)
    wait_until(lambda: not is_sick(health, OTHER), "the healthy server to be used again")
    assert is_sick(health, ONE)
    Ping.well = {ONE, OTHER}
    Ping.may_end.set()
    wait_until(lambda: not is_sick(health, ONE), "the silent server to be used again")


def test_a_server_that_has_gone_is_forgotten():
    used = {ONE}
    health = NodeHealth(Ping, lambda endpoint: endpoint in used)  # type: ignore[arg-type]
    Ping.may_end.set()
    health.note_timeout(ONE)
    health.note_timeout(OTHER)
    wait_until(lambda: not is_sick(health, OTHER), "the server that is not used to be forgotten")
    assert is_sick(health, ONE)
    used.clear()
    wait_until(lambda: not is_sick(health, ONE), "the server that has gone to be forgotten")
    for pinging in Ping.threads:
        pinging.join(60)
        assert not pinging.is_alive()


def test_one_thread_pings_a_server_until_the_store_is_closed():
    health = NodeHealth(Ping)  # type: ignore[arg-type]
    for _ in range(5):
        health.note_timeout(ONE)
    assert Ping.began.wait(60)
    health.close()
    Ping.may_end.set()
    (pinging,) = Ping.threads
    pinging.join(60)
    assert not pinging.is_alive()
    health.note_timeout(OTHER)
    assert Ping.threads == {pinging} and is_sick(health, ONE) and not is_sick(health, OTHER)
