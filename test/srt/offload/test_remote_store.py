"""The remote tier with real stores and proxies: what it brings is right, and whatever dies, hangs or lies costs time
only. The proxy is a process where that makes a difference."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

from sglang.srt.mem_cache.block_store import ExistsFailed, OverlappingStore, StoreError
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.offload import remote_store, wire
from sglang.srt.offload.proxy_process import OwnProxy
from sglang.srt.offload.remote_store import RemoteStore, _Read
from sglang.srt.offload.store.embedded import EmbeddedStore
from support.children import children, wait_until
from support.remote_fixture import BLOCK, BUFFERS, NUM, Remote, connection

SOME = range(4)
PROCESS = {"in_process": False}


def until(condition: Callable[[], Any]) -> None:
    wait_until(condition, "it does not come true")


@pytest.fixture
def remote(tmp_path):
    opened = []

    def make(**config):
        opened.append(Remote(tmp_path, **config))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def proxy_pid(one: Remote) -> int:
    place = one.store._place
    assert isinstance(place, OwnProxy) and place.pid is not None
    return place.pid


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "config",
    [
        PROCESS,
        {"codec": "raw"},
        {"codec": {"codec": "lossless", "coder": "deflate"}},
        {"proxy": {"pipelined": False}, **PROCESS},
        {"proxy": {"preallocated": False, "direct": False}},
        {"proxy": {"profile": "bluefield-3-emulated"}},
        {"proxy": {"write_threads": 4}},
        {"proxy": {"ttl_s": 1000, "max_read_gbps": 5, "max_write_gbps": 5.0}},
    ],
)
def test_what_was_stored_comes_back(remote, config):
    one = remote(**config)
    assert isinstance(one.store, OverlappingStore)
    assert one.exists(SOME) == 0 and one.get(SOME) == 0
    assert one.put(SOME) == 4
    assert one.exists(range(6)) == 4
    assert one.get(range(6)) == 4 and one.came(SOME)
    assert one.store.clear()
    assert one.exists(SOME) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(remote, dtype):
    one = remote(dtype=dtype)
    assert one.put(SOME) == 4 and one.get(SOME) == 4 and one.came(SOME)


def test_a_lossy_codec_is_near(remote):
    one = remote(codec="binned")
    assert one.put(SOME) == 4 and one.get(SOME) == 4
    have = one.pool.kv[torch.from_numpy(one.target(SOME)).long()].float()
    want = one.pool.kv[torch.from_numpy(one.frames(SOME)).long()].float()
    assert 0 < (have - want).abs().max() < 0.05


def test_several_reads_are_under_way_at_once(remote):
    one = remote(**PROCESS)
    assert one.put(range(8)) == 8
    counts, ended = {}, threading.Semaphore(0)

    def end(i: int, count: int) -> None:
        counts[i] = count
        ended.release()

    for i in range(8):
        one.store.start_get([one.key(i)], one.target(range(i, i + 1)), partial(end, i))
    for _ in range(8):
        assert ended.acquire(timeout=120)
    assert counts == dict.fromkeys(range(8), 1)
    assert all(one.came(range(i, i + 1)) for i in range(8))


def test_a_read_that_is_given_up_ends(remote):
    one = remote()
    assert one.put(range(4)) == 4
    counts: list[int] = []
    os.kill(one.embedded.pid, signal.SIGSTOP)
    give_up = one.store.start_get(one.keys(SOME), one.target(SOME), counts.append)
    give_up()
    os.kill(one.embedded.pid, signal.SIGCONT)
    until(lambda: counts)
    assert counts[0] < 4
    assert one.get(range(1)) == 1 and one.came(range(1))


def test_a_read_that_is_given_up_while_it_is_asked_again_is_cancelled():
    store = RemoteStore.__new__(RemoteStore)
    store._lock, store._unanswered, told, ends = threading.Lock(), [], [], []
    read = _Read(Mock(), ends.append)

    def ask(make: object, on_end: Callable[[int], None]) -> int:
        store._give_up(read)
        return 7

    store._client = SimpleNamespace(ask=ask, tell=told.append)
    store._ask_read(read)
    assert told == [wire.Cancel(7)] and not ends, "it ends when the proxy has answered"


def test_stats_move(remote):
    one = remote()
    one.put(SOME)
    one.get(SOME)
    until(lambda: one.store.stats().get("deliver_pieces") == 4 and one.store.stats()["blocks"] == 4)
    stats = one.store.stats()
    assert stats["receive_bytes"] < stats["deliver_bytes"] == 4 * BLOCK * one.pool.page_bytes
    assert stats["size_bytes"] > stats["write_bytes"] and stats["limit_bytes"] > 0
    assert stats["compressed_slots_used"] == stats["deliver_queue"] == 0


def test_a_proxy_in_this_process_leaves_nothing_behind(tmp_path):
    store = EmbeddedStore.start(tmp_path / "store", 1 << 28)
    process, threads = psutil.Process(), set(threading.enumerate())

    def cycle() -> None:
        one = Remote(tmp_path, url=str(store.address))
        assert one.put(SOME) == 4 and one.get(SOME) == 4
        one.close()
        # The thread of the data plane ends after those that it has started.
        until(lambda: set(threading.enumerate()) <= threads)

    def used() -> tuple[int, int, int]:
        gc.collect()  # the pool of each cycle
        return process.num_fds(), process.num_threads(), process.memory_info().rss

    try:
        cycle()
        num_fds, num_threads, rss = used()
        for _ in range(3):
            cycle()
        until(lambda: used()[1] <= num_threads)
        assert used()[0] <= num_fds
        assert used()[2] - rss < sum(BUFFERS.values()), "the buffers of a proxy are still there"
    finally:
        store.stop()


# -- the proxy fails ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("data_plane", ["threads", "process"])
def test_a_proxy_that_is_killed_in_the_middle_is_replaced(remote, data_plane):
    slow = {"engine": "emulated", "rates_gbps": {"receive": 0.05}}
    one = remote(**PROCESS, proxy={"data_plane": data_plane, **slow})
    assert one.put(range(8)) == 8
    counts: list[int] = []
    target = one.target(range(8))
    one.store.start_get(one.keys(range(8)), target, counts.append)
    until(lambda: not one.pool.kv[torch.from_numpy(target[:BLOCK]).long()].isnan().any())
    # What is still to come does not: the store stands still.
    os.kill(one.embedded.pid, signal.SIGSTOP)
    first = proxy_pid(one)
    os.kill(first, signal.SIGKILL)
    until(lambda: one.store._client is None)
    assert not counts, "the next session is asked"
    one.wipe()
    os.kill(one.embedded.pid, signal.SIGCONT)
    until(lambda: counts)
    assert counts == [8] and one.came(range(8)) and proxy_pid(one) != first
    assert one.store.stats()["proxy_sessions"] == 2


def test_limits_of_tenants_hold_in_the_sessions_that_follow(remote):
    one = remote(**PROCESS)

    def put(blocks: range) -> None:
        assert one.store.set(one.keys(blocks), one.frames(blocks), b"alice---") == len(blocks)

    def num_stored() -> int:
        return sum(one.store.exists([one.key(b)]) for b in range(12))

    put(range(6))
    assert one.store.limit(b"alice---", 3, Tier.REMOTE) and num_stored() == 3
    first = proxy_pid(one)
    os.kill(first, signal.SIGKILL)
    until(lambda: one.store._client is None)
    assert not one.store.limit(b"bob-----", 1, Tier.REMOTE), "there is no proxy"
    assert not one.store.limit(b"alice---", 1, Tier.REMOTE), "the one before holds on"
    until(lambda: one.store._client is not None)
    put(range(6, 12))
    assert num_stored() == 3
    assert one.store.limit(b"alice---", -1, Tier.REMOTE)
    put(range(6))
    assert num_stored() == 9


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["proxy", "proxy with a program", "program"])
def test_a_proxy_that_hangs_is_killed_and_replaced(remote, clock, what):
    one = remote(**PROCESS, hang_timeout_s=1000.0, proxy={"data_plane": "threads" if what == "proxy" else "process"})
    one.store._clock = clock
    assert one.put(SOME) == 4
    hung = psutil.Process(proxy_pid(one))
    if what == "program":
        (hung,) = hung.children()
    hung.suspend()
    counts: list[int] = []
    one.store.start_get(one.keys(SOME), one.target(SOME), counts.append)
    clock.later_s = 1000.0
    until(lambda: counts)
    assert counts == [4] and one.came(SOME), "the next proxy is asked"
    assert one.store.stats()["proxy_hangs"] == 1


def test_a_proxy_that_hangs_and_is_another_s_is_left_alone(remote, clock, monkeypatch):
    monkeypatch.setattr(OwnProxy, "stop_hung_proxy", lambda place: "")
    one = remote(**PROCESS, hang_timeout_s=1000.0)
    one.store._clock = clock
    assert one.put(SOME) == 4
    os.kill(proxy_pid(one), signal.SIGSTOP)
    counts: list[int] = []
    one.store.start_get(one.keys(SOME), one.target(SOME), counts.append)
    found: list[int | None] = []
    question = threading.Thread(target=lambda: found.append(one.exists(SOME)))
    question.start()
    clock.later_s = 1000.0
    question.join()
    assert found == [None] and not counts, "the proxy may write into the pages of the read"
    assert one.exists(SOME) is None and one.get(range(1)) == 0 and one.put(range(1)) == 0
    with pytest.raises(ExistsFailed):
        one.store.touch(one.keys(SOME))
    os.kill(proxy_pid(one), signal.SIGCONT)
    until(lambda: counts)
    assert counts == [4] and one.came(SOME)
    one.wipe()
    until(lambda: one.exists(SOME) == 4)
    assert one.get(SOME) == 4 and one.came(SOME)
    assert one.store.stats()["proxy_hangs"] == 1 and one.store.stats()["proxy_sessions"] == 1


def test_an_engine_that_stands_still_takes_no_proxy_for_hung(remote):
    """When it moves again, an answer may lie in the socket: the proxy is asked and looked at once more."""
    one = remote(hang_timeout_s=30.0)
    # The watching thread looks no more.
    look, one.store._look_at = one.store._look_at, lambda client: None
    client = SimpleNamespace(silent_s=0.0, stats={}, request_stats=Mock(), leave_alone=Mock())
    looks = ((29, 1, False), (60, 2, False), (0, 3, False), (30, 4, False), (30.5, 4, True), (31, 4, True))
    for silent_s, num_asked, is_left_alone in looks:
        client.silent_s = silent_s
        look(client)
        assert (client.request_stats.call_count, client.leave_alone.called) == (num_asked, is_left_alone), silent_s
    assert client.leave_alone.call_count == one.store.stats()["proxy_hangs"] == 1
    for _ in range(2):
        client.silent_s = 0.0
        look(client)
    assert client.request_stats.call_count == 6, "it is heard again"


def test_attempts_to_begin_a_session_become_rare(remote, monkeypatch):
    """The clock moves only here: whatever is tried too early is seen."""
    monkeypatch.setattr(remote_store, "_CHECK_INTERVAL_S", 0.01)
    one = remote()
    store, now, attempts, looks = one.store, [time.monotonic()], [], []
    store._clock = lambda: now[0]
    store._place.keep_alive = lambda: looks.append(now[0])

    def refuse() -> None:
        attempts.append(now[0])
        raise StoreError("it is not there")

    store._place.connect = refuse
    store._client.shut()
    until(lambda: store._client is None and store._retry_at)
    pauses = []
    for num in range(1, 9):
        now[0] = store._retry_at
        until(lambda n=num: len(attempts) == n and not store._is_connecting)
        pauses.append(store._retry_at - now[0])
    assert pauses == sorted(pauses) and pauses[0] < 1 < pauses[-1] == pytest.approx(remote_store.MAX_RETRY_S)
    now[0] = store._retry_at - 0.01
    num_looks = len(looks)
    until(lambda: len(looks) >= num_looks + 2)
    assert len(attempts) == 8


@pytest.mark.parametrize("what", ["thread", "descriptor"])
def test_a_system_that_has_nothing_left_ends_no_attempts(remote, monkeypatch, caplog, what: str):
    monkeypatch.setattr(remote_store, "_CHECK_INTERVAL_S", 0.01)
    one = remote()
    store, start, connect, refused = one.store, threading.Thread.start, one.store._place.connect, []

    def refuse() -> None:
        refused.append(store)
        raise OSError("Too many open files") if what == "descriptor" else RuntimeError("can't start new thread")

    if what == "thread":
        monkeypatch.setattr(
            threading.Thread, "start", lambda each: refuse() if each.name == "proxy-connect" else start(each)
        )
    else:
        store._place.connect = refuse
    store._client.shut()
    until(lambda: len(refused) >= 2 and "the remote tier is out of reach" in caplog.text)
    monkeypatch.setattr(threading.Thread, "start", start)
    store._place.connect = connect
    until(lambda: store._client is not None)
    assert one.put(SOME) == 4 and one.get(SOME) == 4


def read_slowly(say: Callable[..., None], folder: Path) -> None:
    """As an engine."""
    one = Remote(folder, **PROCESS, proxy={"engine": "emulated", "rates_gbps": {"receive": 0.05}})
    assert one.put(range(8)) == 8
    one.store.start_get(one.keys(range(8)), one.target(range(8)), lambda count: None)
    say("reads", proxy_pid(one), one.embedded.pid)
    while True:
        time.sleep(60)


def test_the_proxy_ends_with_the_engine(tmp_path):
    """An engine that is killed while the proxy writes into its pages."""
    with children() as start:
        engine = start(read_slowly, tmp_path)
        _, *pids = engine.wait_for("reads")
        processes = [psutil.Process(pid) for pid in pids]
        engine.kill()
        _gone, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive


def test_closing_leaves_no_process(remote):
    one = remote(**PROCESS)
    processes = [psutil.Process(pid) for pid in (proxy_pid(one), one.embedded.pid)]
    one.close()
    _gone, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


# -- the store fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_process", [True, False])
def test_a_store_that_dies_comes_back_empty(remote, in_process):
    one = remote(in_process=in_process)
    assert one.put(SOME) == 4
    os.kill(one.embedded.pid, signal.SIGKILL)
    assert one.get(SOME) == 0 and not one.exists(SOME)
    until(lambda: one.put(SOME) == 4)
    assert one.get(SOME) == 4 and one.came(SOME)


def test_a_store_that_stalls_costs_its_timeout(remote):
    """On a busy machine that may be over in time too, and is tried again."""
    one = remote(proxy={"store_timeout_s": 0.5})
    until(lambda: one.put(SOME) == 4)
    os.kill(one.embedded.pid, signal.SIGSTOP)
    try:
        assert one.get(SOME) == 0
        assert not one.exists(SOME)
        assert not one.store.clear()
    finally:
        os.kill(one.embedded.pid, signal.SIGCONT)
    until(lambda: one.exists(SOME) == 4)
    until(lambda: one.get(SOME) == 4)
    assert one.came(SOME)


def test_a_store_that_is_full_takes_no_more_and_serves_what_it_has(remote):
    one = remote(codec="raw")
    assert one.put(range(2)) == 2
    store = connection(one.embedded.address)
    store.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    store.call("CONFIG", "SET", "maxmemory", "1mb")
    assert one.put(range(2, 6)) == 0
    assert one.store.stats()["write_errors"] == 1
    assert one.get(range(2)) == 2 and one.came(range(2))


def test_what_was_evicted_in_the_middle_ends_the_run(remote):
    one = remote()
    assert one.put(SOME) == 4
    store = connection(one.embedded.address)
    before = set(one.names())
    one.put(range(9, 10))
    of_nine = set(one.names()) - before
    assert len(of_nine) == 2
    piece = next(n for n in of_nine if n.endswith(b":0"))
    other = piece.replace(one.key(9).hex().encode(), one.key(2).hex().encode())
    assert store.call("DEL", other) == 1
    assert one.exists(SOME) == 4, "its manifest is there"
    assert one.get(SOME) == 2 and one.came(range(2))
    until(lambda: one.exists(SOME) == 2)
    assert one.put(SOME) == 4 and one.get(SOME) == 4 and one.came(SOME), "it is stored anew"


def test_what_was_evicted_is_found_when_it_is_in_use(remote, monkeypatch):
    """A block without all of its pieces is forgotten, and stored anew."""
    monkeypatch.setattr(remote_store, "_TOUCHED_AT_ONCE", 2)
    one = remote()
    keys = one.keys(range(5))
    assert one.put(range(5)) == 5 and one.store.touch(keys) == 5 and one.store.touch([]) == 0
    assert one.store.touch(keys[3:] + one.keys(range(9, 10)) + keys[:1]) == 2
    store = connection(one.embedded.address)
    piece = next(name for name in one.names() if keys[1].hex().encode() in name and name.endswith(b":0"))
    assert store.call("DEL", piece) == 1
    assert one.store.touch(keys) == 1
    until(lambda: one.store.exists(keys) == 1)
    assert one.store.touch(keys[2:]) == 3
    assert one.put(range(5)) == 5 and one.store.touch(keys) == 5


def test_what_is_there_is_not_written_again_behind_what_is_not(remote):
    one = remote()
    assert one.put(SOME) == 4
    until(lambda: one.store.stats().get("written_blocks") == 4)
    store = connection(one.embedded.address)
    (manifest,) = [name for name in one.names() if one.key(0).hex().encode() in name and name.endswith(b":m")]
    assert store.call("DEL", manifest) == 1
    assert one.put(SOME) == 4 and one.exists(SOME) == 4
    until(lambda: one.store.stats()["written_blocks"] == 5)
    assert one.get(SOME) == 4 and one.came(SOME)


def test_a_store_that_is_gone_does_not_tell_what_it_has(remote):
    one = remote()
    assert one.put(SOME) == 4
    os.kill(one.embedded.pid, signal.SIGKILL)
    with pytest.raises(ExistsFailed):
        one.store.touch(one.keys(SOME))
    one.store._client.shut()
    with pytest.raises(ExistsFailed):
        until(lambda: one.store.touch(one.keys(SOME)) < 0)


def test_a_store_that_evicts_has_no_room(remote):
    one = remote(codec="raw")
    assert one.put(range(2)) == 2
    until(lambda: one.store.stats()["size_bytes"] > 2 * 2**21)
    assert one.store.has_room
    limit_bytes = int(1.03 * one.store.stats()["size_bytes"])
    connection(one.embedded.address).call("CONFIG", "SET", "maxmemory", limit_bytes)
    until(lambda: not one.store.has_room)


def test_a_store_that_has_evicted_is_full_until_much_of_it_is_free(remote):
    """One that evicts whole pieces may stay well below its limit."""
    one = remote()
    # The watching thread looks no more.
    look, one.store._look_for_room = one.store._look_for_room, lambda stats: None
    look({})  # the store has not answered
    for size_bytes, num_evicted, has_room in (
        *(
            (50, 6, True),
            (50, 7, False),
            (80, 7, False),
            (74, 7, True),
            (94, 7, True),
            (80, 8, False),
            (80, 8, False),
        ),
        *((96, 8, False), (80, 8, False), (10, 0, True), (96, 0, False)),
    ):
        look({"limit_bytes": 100, "size_bytes": size_bytes, "evicted_keys": num_evicted})
        assert one.store.has_room == has_room, (size_bytes, num_evicted)
        look({})
        assert one.store.has_room == has_room, (size_bytes, num_evicted)


SPOILT = (
    lambda value: b"",
    lambda value: b"not a piece at all" * 100,
    lambda value: value[: len(value) // 2],
    lambda value: value + b"more",
    lambda value: value * 3,
    lambda value: bytes(len(value)),
    lambda value: value[:-1] + bytes([value[-1] ^ 1]),
    lambda value: value[:28] + b"\xff\xff\xff\x7f" + value[32:],
    lambda value: value[:36] + b"\xff\xff\xff\xff" + value[40:],
    lambda value: b"\0" * (40 << 20),
)


def test_foreign_bytes_are_no_kv_and_the_block_is_stored_anew(remote):
    """Also headers that lie about sizes, and values larger than any slot."""
    one = remote()
    assert one.put(SOME) == 4
    store = connection(one.embedded.address)
    name = next(n for n in one.names() if n.endswith(b":0") and one.key(2).hex().encode() in n)
    value = store.call("GET", name)
    assert isinstance(value, bytes)
    for i, spoil in enumerate(SPOILT):
        one.wipe()
        store.call("SET", name, spoil(value))
        assert one.get(SOME) == 2 and one.came(range(2)), i
        assert torch.isnan(one.pool.kv[(NUM + 4) * BLOCK :]).all(), "nobody's pages are touched"
        until(lambda: one.exists(SOME) == 2)
        assert one.put(SOME) == 4 and one.get(SOME) == 4 and one.came(SOME), i


# -- start and access -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"url": "http://x"}, "redis://"),
        ({"url": "unix:///nowhere/redis.sock", **PROCESS}, "cannot be used"),
        ({"url": 7}, "url is 7, but it has to be a string"),
        ({"codec": "mp3"}, "mp3"),
        ({"proxy": {"threads": 3}}, "threads is no setting"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"limit_gb": "many"}, "limit_gb"),
        ({"synchronous": "yes"}, "true or false"),
    ],
)
def test_what_cannot_start_says_why(tmp_path, config, says):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(StoreError, match=says):
        Remote(tmp_path, **config)
    _, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=60)
    assert not alive


def test_a_store_that_refuses_us_is_named_at_the_start(tmp_path):
    server = EmbeddedStore.start(tmp_path / "store", 1 << 28)
    try:
        path = server.address.endpoints[0].path
        connection(server.address).call("CONFIG", "SET", "requirepass", "hush-hush")
        with pytest.raises(StoreError, match="password") as caught:
            Remote(tmp_path, url=f"unix://:wrong-one@{path}")
        assert "wrong-one" not in str(caught.value) and "hush-hush" not in str(caught.value)
        one = Remote(tmp_path, url=f"unix://:hush-hush@{path}")
        assert one.put(SOME) == 4 and one.get(SOME) == 4 and one.came(SOME)
        one.close()
    finally:
        server.stop()


def test_a_proxy_that_gets_no_shared_memory_tells_it_in_a_line():
    """A limit of file sizes holds for shared memory too."""
    command = [sys.executable, "-m", "sglang.srt.offload.proxy", "--fd", "0", "--store", "redis://127.0.0.1:1"]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the offload proxy gets no shared memory (") and done.stderr.count("\n") == 1


def test_only_who_has_the_token_is_served(tmp_path):
    """A proxy that runs by itself: its socket is its user's alone, and a session needs the token."""
    server = EmbeddedStore.start(tmp_path / "store", 1 << 28)
    token, path = tmp_path / "token", tmp_path / "proxy.sock"
    token.write_text("the-token\n")
    command = [sys.executable, "-m", "sglang.srt.offload.proxy", "--socket", str(path), "--token-file", str(token)]
    url = f"unix://{server.address.endpoints[0].path}"
    proxy = subprocess.Popen([*command, "--store", url], stderr=subprocess.PIPE, text=True)
    try:
        until(path.is_socket)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        again = subprocess.run([*command, "--store", url], capture_output=True, text=True, timeout=120)
        assert again.returncode == 1 and "another proxy listens" in again.stderr
        (tmp_path / "wrong").write_text("a-guess")
        with pytest.raises(StoreError, match="token"):
            Remote(tmp_path, backend="bluefield", proxy=str(path), token_file=str(tmp_path / "wrong"))
        one = Remote(tmp_path, backend="bluefield", proxy=str(path), token_file=str(token))
        assert one.put(SOME) == 4 and one.get(SOME) == 4 and one.came(SOME)
        # Somebody who does not know how to speak.
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
        assert one.get(SOME) == 4
        os.kill(proxy.pid, signal.SIGKILL)
        proxy.wait()
        assert one.get(SOME) == 0 and one.exists(SOME) is None
        proxy = subprocess.Popen([*command, "--store", url], stderr=subprocess.PIPE, text=True)
        until(lambda: one.exists(SOME) == 4)
        one.close()
    finally:
        proxy.kill()
        proxy.wait()
        server.stop()


def test_pages_outside_of_the_pool_end_the_session(remote):
    one = remote()
    assert one.put(SOME) == 4
    client = one.store._client
    assert client is not None
    for pages in ([-1] * BLOCK, [2 * NUM * BLOCK] * BLOCK, [0] * (BLOCK - 1), []):
        counts: list[int] = []
        until(lambda: one.exists(SOME) == 4)
        client = one.store._client
        assert client is not None
        client.ask(lambda id, p=pages: wire.Get(id, one.key(0), np.array(p, np.int32).tobytes()), counts.append)
        until(lambda c=counts: c)
        assert counts == [0]
    until(lambda: one.exists(SOME) == 4)
    assert one.get(SOME) == 4 and one.came(SOME)


def test_a_synchronous_store_says_so(remote):
    one = remote(synchronous=True)
    assert one.store.is_synchronous
    assert one.put(SOME) == 4 and one.get(SOME) == 4 and one.came(SOME)
