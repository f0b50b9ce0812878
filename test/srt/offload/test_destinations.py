"""One suite for every way in which a proxy by itself delivers into an engine's pages: shared memory, TCP, and TCP
over a shaped link into another network namespace. What comes is right, what is under way when something fails counts
nothing, and pages are the engine's again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload import remote_store, wire
from sglang.srt.offload.frames import FrameConnection
from sglang.srt.offload.proxy_client import ProxyClient
from sglang.srt.offload.proxy_process import OtherProxy, ProxyElsewhere
from support.children import wait_until
from support.clocks import LaterClock
from support.network import Elsewhere, elsewhere
from support.proxy_rig import KINDS, ProxyRig
from support.remote_fixture import BLOCK, NUM, Remote, connection
from support.server_fixture import PATIENCE_S

SOME = range(4)
MEGABITS = 1000


def until(condition: Callable[[], Any]) -> None:
    wait_until(condition, "it does not come true")


@pytest.fixture(scope="session")
def other_machine() -> Iterator[Elsewhere]:
    with ExitStack() as stack:
        try:
            there = stack.enter_context(elsewhere(MEGABITS))
        except RuntimeError as error:
            pytest.skip(f"no other network namespace: {error}")
        yield there


@pytest.fixture(params=[*KINDS[:2], pytest.param(KINDS[2], marks=pytest.mark.slow)])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProxyRig]:
    there = request.getfixturevalue("other_machine") if request.param == "tcp elsewhere" else None
    one = ProxyRig(tmp_path, request.param, there)
    yield one
    one.close()


over_tcp = pytest.mark.parametrize("rig", KINDS[1:], indirect=True)
over_a_link = pytest.mark.parametrize("rig", KINDS[2:], indirect=True)


@pytest.fixture(autouse=True)
def little_patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test waits for reads to end without another session."""
    if not any(word in request.node.name for word in ("restarted", "dies", "on_the_way")):
        monkeypatch.setattr(remote_store, "ASK_AGAIN_S", 0.1)


def start_get(one: Remote, blocks: range) -> tuple[list[int], Callable[[], None]]:
    counts: list[int] = []
    return counts, one.store.start_get(one.keys(blocks), one.target(blocks), counts.append)


def relay_of(one: Remote) -> psutil.Process:
    place = one.store._place
    assert isinstance(place, ProxyElsewhere) and place.pid is not None
    return psutil.Process(place.pid)


def storage_place(one: Remote) -> OtherProxy | ProxyElsewhere:
    """Another way to the engine's proxy."""
    place = one.store._place
    if isinstance(place, ProxyElsewhere):
        return ProxyElsewhere(place._endpoint, place._key)
    assert isinstance(place, OtherProxy)
    return place


def slow_store(rig: ProxyRig) -> None:
    """A proxy that receives 50 Mbit/s."""
    rig.stop_proxy()
    rig.start_proxy(engine="emulated", rates_gbps={"receive": 0.05})


def first_block_came(one: Remote, blocks: range) -> bool:
    return not one.pool.kv[torch.from_numpy(one.target(blocks)[:BLOCK]).long()].isnan().any()


# -- conformance ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec",
    [
        "lossless",
        *(pytest.param(c, marks=pytest.mark.slow) for c in ("raw", {"codec": "lossless", "coder": "deflate"})),
    ],
)
def test_what_was_stored_comes_back(rig: ProxyRig, codec: Any):
    one = rig.engine(codec=codec)
    assert one.exists(SOME) == 0 and one.get(SOME) == 0
    assert one.put(SOME) == 4
    assert one.exists(range(6)) == 4
    before = one.pool.kv.clone()
    assert one.get(range(6)) == 4 and one.came(SOME)
    others = np.setdiff1d(np.arange(2 * NUM * BLOCK), one.target(SOME))
    assert torch.equal(
        one.pool.kv[torch.from_numpy(others)].view(torch.uint8), before[torch.from_numpy(others)].view(torch.uint8)
    ), "no other page is touched"
    until(lambda: one.store.stats().get("deliver_pieces") == 4)
    one.store.clear()
    assert one.exists(SOME) == 0


@pytest.mark.sampled(1)
def test_pieces_of_another_rank_are_not_taken(rig: ProxyRig):
    """A client of the store gives one rank the pieces of another, which have the names of its blocks."""
    ranks = [rig.engine(mac_key=b"k" * 32, namespace=f"rank {i} of 2") for i in range(2)]
    assert all(rank.put(SOME) == 4 and rank.get(SOME) == 4 for rank in ranks)
    store = connection(rig.store.address)
    names: dict[bytes, list[bytes]] = {}
    for name in store.call("KEYS", "*"):  # type: ignore[union-attr]
        if not name.endswith(b":m"):
            names.setdefault(name.partition(b"{")[2][32:], []).append(name)
    assert len(names) == 4
    for one, other in names.values():
        values = [store.call("GET", name) for name in (one, other)]
        store.call("SET", one, values[1])
        store.call("SET", other, values[0])
    assert [rank.get(SOME) for rank in ranks] == [0, 0]


@pytest.mark.sampled(1)
@over_tcp
def test_blocks_of_another_secret_are_not_taken(rig: ProxyRig):
    """Not even under the names of one's own: a client of the store has put them there."""
    one, other = rig.engine(mac_key=b"k" * 32), rig.engine(mac_key=b"x" * 32)
    assert one.put(SOME) == 4 and one.get(SOME) == 4 and one.came(SOME)
    assert other.exists(SOME) == 4 and other.get(SOME) == 0
    until(lambda: other.store.stats().get("damaged_blocks", 0) > 0)
    until(lambda: other.put(SOME) == 4 and other.get(SOME) == 4)
    assert other.came(SOME) and one.get(SOME) == 0


@pytest.mark.slow
def test_two_engines_share_a_proxy(rig: ProxyRig):
    one, two = rig.engine(), rig.engine()
    assert one.put(range(6)) == 6 and two.exists(range(6)) == 6
    ended = threading.Semaphore(0)
    counts: dict[tuple[int, int], int] = {}
    for i in range(6):
        for name, each in enumerate((one, two)):

            def end(count: int, key: tuple[int, int] = (name, i)) -> None:
                counts[key] = count
                ended.release()

            each.store.start_get([each.key(i)], each.target(range(i, i + 1)), end)
    for _ in range(12):
        assert ended.acquire(timeout=120)
    assert set(counts.values()) == {1}
    assert all(each.came(range(i, i + 1)) for i in range(6) for each in (one, two))


@pytest.mark.slow
def test_a_write_of_what_is_there_moves_nothing(rig: ProxyRig):
    one = rig.engine()
    assert one.put(range(2)) == 2
    until(lambda: one.store.stats().get("write_raw_bytes"))
    raw_bytes = one.store.stats()["write_raw_bytes"]
    assert one.put(range(4)) == 4
    until(lambda: one.store.stats()["write_raw_bytes"] > raw_bytes)
    assert one.store.stats()["write_raw_bytes"] == 2 * raw_bytes


# -- what fails -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
def test_a_read_that_is_given_up_ends(rig: ProxyRig):
    one = rig.engine()
    assert one.put(SOME) == 4
    os.kill(rig.store.pid, signal.SIGSTOP)
    counts, give_up = start_get(one, SOME)
    give_up()
    if rig.over_tcp:
        until(lambda: counts)  # although the store stands still
    os.kill(rig.store.pid, signal.SIGCONT)
    until(lambda: counts)
    assert counts[0] < 4
    assert one.get(range(1)) == 1 and one.came(range(1))


@pytest.mark.sampled(1)
def test_a_proxy_that_is_killed_in_the_middle(rig: ProxyRig):
    slow_store(rig)
    one = rig.engine()
    assert one.put(range(8)) == 8
    counts, _ = start_get(one, range(8))
    until(lambda: first_block_came(one, range(8)))
    rig.stop_proxy()
    until(lambda: counts)
    assert counts == [0], "a session that is lost has brought nothing, and there was no other in time"
    assert one.exists(SOME) is None and one.get(SOME) == 0 and one.put(SOME) == 0
    rig.start_proxy()
    one.wipe()
    until(lambda: one.exists(range(8)) == 8)
    assert one.get(range(8)) == 8 and one.came(range(8))


@pytest.mark.sampled(1)
def test_a_proxy_that_is_restarted_is_asked_again(rig: ProxyRig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_store, "ASK_AGAIN_S", PATIENCE_S)
    slow_store(rig)
    one = rig.engine()
    assert one.put(range(8)) == 8
    counts, _ = start_get(one, range(8))
    given_up, give_up = start_get(one, range(2))
    until(lambda: first_block_came(one, range(8)))
    rig.stop_proxy()
    until(lambda: one.store._client is None)
    give_up()
    assert given_up == [0], "while it waits for the next session"
    one.wipe()
    rig.start_proxy()
    until(lambda: counts)
    assert counts == [8] and one.came(range(8)) and given_up == [0]


@pytest.mark.sampled(1)
@over_tcp
def test_a_proxy_that_hangs_keeps_no_pages(rig: ProxyRig, clock: LaterClock):
    one = rig.engine()
    one.store._clock = clock
    assert one.put(SOME) == 4
    child = psutil.Process(rig.proxy.pid)
    child.suspend()
    counts, _ = start_get(one, SOME)
    clock.later_s = 1000.0
    until(lambda: counts)
    assert counts == [0] and one.exists(SOME) is None
    assert one.store.stats()["proxy_hangs"] == 1
    child.resume()
    clock.later_s = 3000.0  # the pause before the next attempt is over
    until(lambda: one.exists(SOME) == 4)
    assert one.get(SOME) == 4 and one.came(SOME)


@pytest.mark.slow
@over_tcp
def test_a_relay_that_dies_is_replaced(rig: ProxyRig):
    slow_store(rig)
    one = rig.engine()
    assert one.put(range(8)) == 8
    counts, _ = start_get(one, range(8))
    until(lambda: first_block_came(one, range(8)))
    relay_of(one).kill()
    until(lambda: counts)
    assert counts == [8] and one.came(range(8)), "the next one has asked again"
    assert one.store.stats()["proxy_sessions"] == 2


@pytest.mark.sampled(1)
def test_an_engine_has_one_session_and_the_newest_counts(rig: ProxyRig):
    """Its older connection may be dead without a sign."""
    one = rig.engine()
    assert one.put(SOME) == 4
    store, lost = one.store, threading.Event()
    places = [storage_place(one) for _ in range(2)]
    with pytest.raises(StoreError, match="has begun a newer session"):
        ProxyClient(places[0].connect(), msgspec.structs.replace(store._hello, epoch=0), store._fd, lambda: None, "")
    newer = msgspec.structs.replace(store._hello, epoch=store._hello.epoch + 1)
    ProxyClient(places[1].connect(), newer, store._fd, lost.set, "")
    until(lambda: store.stats()["proxy_sessions"] == 2)
    assert lost.wait(120), "the next one of the engine ended it"
    until(lambda: one.get(SOME) == 4)
    assert one.came(SOME)
    for place in places:
        place.close()


@pytest.mark.sampled(1)
@over_tcp
def test_who_has_another_key_version_or_layout_is_told(rig: ProxyRig, monkeypatch: pytest.MonkeyPatch):
    wrong = rig.folder / "wrong"
    wrong.write_text("a" * 64)
    with pytest.raises(StoreError, match="another token: use the same token_file"):
        rig.engine(token_file=str(wrong))
    wrong.write_text("short")
    with pytest.raises(StoreError, match="at least 32 characters"):
        rig.engine(token_file=str(wrong))
    with pytest.raises(StoreError, match=r'there is none at tcp://.*correct "proxy"'):
        rig.engine(proxy=rig.address.rsplit(":", 1)[0] + ":1")
    with pytest.raises(StoreError, match="has to be tcp://host:port"):
        rig.engine(proxy="http://10.0.0.1:80")
    with pytest.raises(StoreError, match="bins for 10 layers"):
        rig.engine(codec={"codec": "binned", "bins": [[10, 32]]})


@pytest.mark.sampled(1)
@over_tcp
def test_a_stranger_does_not_hold_anything(rig: ProxyRig):
    one = rig.engine()
    assert one.put(SOME) == 4
    host, port = rig.address.removeprefix("tcp://").rsplit(":", 1)
    silent = [socket.create_connection((host, int(port))) for _ in range(4)]
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass
    # More than may wait: they send a byte now and then, and none is one of the key's.
    slow = [socket.create_connection((host, int(port))) for _ in range(40)]
    for each in slow:
        with contextlib.suppress(OSError):
            each.sendall(b"sglang")
    two = rig.engine()
    assert two.get(SOME) == 4 and two.came(SOME)
    with socket.create_connection((host, int(port))) as stranger:
        frames = FrameConnection(stranger, b"a guess", is_proxy=False)
        frames.send(wire.GetStats())
        with pytest.raises(wire.WireError, match="another key"):
            frames.receive()
        frames.close()
    assert one.get(SOME) == 4 and one.came(SOME)
    for each in (*silent, *slow):
        each.close()


class Middle:
    """Passes on what an engine and a proxy send each other; `change` sees each part of what the proxy sends."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self._target = host, int(port)
        self.change: Callable[[bytes], bytes] = lambda data: data
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                engine, _ = self._listener.accept()
            except OSError:
                return
            proxy = socket.create_connection(self._target)
            for source, target, is_proxy in ((engine, proxy, False), (proxy, engine, True)):
                threading.Thread(target=self._pass_on, args=(source, target, is_proxy), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_proxy: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(self.change(data) if is_proxy else data)
        except OSError:
            pass
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("rig", KINDS[1:2], indirect=True)
@pytest.mark.parametrize(
    "how", ["a bit", *(pytest.param(h, marks=pytest.mark.slow) for h in ("twice", "left out", "cut off"))]
)
def test_bytes_that_are_changed_on_the_way_end_the_session(rig: ProxyRig, how: str):
    middle = Middle(rig.address)
    one = rig.engine(proxy=middle.address, codec="raw")
    assert one.put(SOME) == 4
    seen = [0]

    def change(data: bytes) -> bytes:
        before, seen[0] = seen[0], seen[0] + len(data)
        if not before <= 3 << 20 < seen[0]:
            return data
        at = len(data) // 2
        if how == "cut off":
            raise OSError
        changed = {"a bit": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "twice": data + data, "left out": b""}
        return changed[how]

    middle.change = change
    counts, _ = start_get(one, SOME)
    until(lambda: counts)
    assert counts == [4] and one.came(SOME), "the next session brings what this one has spoilt"
    assert one.store.stats()["proxy_sessions"] == 2
    middle.close()


# -- the link -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@over_a_link
def test_a_question_passes_a_fetch_on_a_slow_link(rig: ProxyRig):
    one = rig.engine(codec="raw")
    assert one.put(range(8)) == 8
    rig.there.limit(40)
    try:
        counts, _ = start_get(one, range(8))
        until(lambda: first_block_came(one, range(8)))
        assert one.exists(range(8)) == 8 and not counts
        until(lambda: counts)
        assert counts == [8] and one.came(range(8))
    finally:
        rig.there.limit(MEGABITS)


@over_a_link
@pytest.mark.parametrize("relay_dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_partition(rig: ProxyRig, clock: LaterClock, relay_dies: bool):
    """In the middle of a fetch; neither side is told. Where the relay dies, too, the proxy never hears of it."""
    one = rig.engine(codec="raw")
    one.store._clock = clock
    assert one.put(range(8)) == 8
    rig.there.limit(40)
    try:
        counts, _ = start_get(one, range(8))
        until(lambda: first_block_came(one, range(8)))
        rig.there.cut()
        if relay_dies:
            relay_of(one).kill()
        clock.later_s = 1000.0
        until(lambda: counts)
        assert counts == [0] and one.exists(SOME) is None
        assert one.get(SOME) == 0
    finally:
        rig.there.mend()
        rig.there.limit(MEGABITS)
    one.wipe()
    clock.later_s = 3000.0
    until(lambda: one.exists(range(8)) == 8)
    assert one.get(range(8)) == 8 and one.came(range(8))
