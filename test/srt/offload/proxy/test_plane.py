"""The data plane against a server of pieces, on threads and as a program: what comes is right, and what does not come
leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import queue
import random
import resource
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import psutil
import pytest
import xxhash

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload import wire
from sglang.srt.offload.codec import CodecError
from sglang.srt.offload.codec.header import HEADER_BYTES
from sglang.srt.offload.codec.registry import CODECS
from sglang.srt.offload.frames import FrameKind
from sglang.srt.offload.proxy.plane import Plane, PlaneRefused, PlaneSession
from sglang.srt.offload.proxy.settings import ProxySettings
from sglang.srt.offload.store.cluster import slot_of
from support.children import wait_until
from support.codec_cases import CONFIGS, CUT, SMALL, kv_block
from support.plane_rig import TIMEOUT_S, Asked, PieceSource, frame_link, frame_pair, is_settled, plane, some_pages
from support.remote_fixture import BUFFERS
from support.store_servers import NO_CLUSTER, FakeConnection, FakeServer, single

pytestmark = pytest.mark.usefixtures("close_sources")

# 8 pieces of 2 pages in a block.
LAYOUT = kv_block(
    num_pages=16, num_layers=2, page_size=1, num_kv_heads=2, head_dim=8, dtype="float32", max_piece_bytes=512
)
VARIANTS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "one thread each": {"receive_threads": 1, "decompress_threads": 1, "window": 1},
    "many threads": {"receive_threads": 3, "decompress_threads": 3, "dequantize_threads": 3, "deliver_threads": 2},
    "staged": {"direct": False},
    "no pipeline": {"pipelined": False},
    "no preallocation": {"preallocated": False},
    "a program": {"data_plane": "process"},
    "emulated": {"engine": "emulated", "direct": False, "rates_gbps": {"decompress": 1.0, "deliver": 1.0}},
}


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_come_whole_and_nothing_else_is_touched(variant, runs):
    source, rng = PieceSource(1, 6, LAYOUT, late=0.001), random.Random(1)
    with plane(**VARIANTS[variant]) as line:
        session = source.open(line)
        asked = Asked(source, session, 7, [3, 0, 5], some_pages(source, 3, rng, runs))
        assert asked.wait() == 3 and asked.came(3)
        others = np.ones(len(source.pages), bool)
        others[asked.pages] = False
        assert (source.pages[others] == 0xEE).all()
        stats = line.stats()
        assert stats["receive_pieces"] == stats["deliver_pieces"] == 3 * LAYOUT.num_pieces
        assert stats["dequantize_bytes"] == 3 * LAYOUT.block_bytes
        assert source.store.stats()["read_pieces"] == 3 * LAYOUT.num_pieces
        session.close()
        assert source.engine_sees_the_end()


def test_connections_are_made_where_no_thread_can_be_started(monkeypatch):
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name == "connect":
            raise RuntimeError("can't start new thread")
        start(thread)

    source = PieceSource(1, 3, LAYOUT)
    with plane() as line:
        session = source.open(line)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", started)
            asked = Asked(source, session, 1, [0, 1, 2], some_pages(source, 3, random.Random(1)))
            assert asked.wait() == 3 and asked.came(3)
        session.close()


@pytest.mark.parametrize("layout", [SMALL, CUT], ids=["small", "cut"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_codec_gives_what_its_reference_does(config, layout):
    """And with authenticated pieces, and pages in any order."""
    rng = random.Random(2)
    with plane() as line:
        for mac_key in (b"", bytes(range(32))):
            source = PieceSource(2, 3, layout, CONFIGS[config], mac_key)
            session = source.open(line)
            for in_runs in (False, True):
                asked = Asked(source, session, in_runs, [0, 1, 2], some_pages(source, 3, rng, in_runs))
                assert asked.wait() == 3 and asked.came(3), source.damages
            session.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "uint8"])
def test_every_size_of_values(dtype):
    layout = kv_block(4, 2, 4, 2, 8, dtype)
    with plane() as line:
        for codec in CODECS if dtype != "uint8" else ("raw", "lossless"):
            source = PieceSource(3, 2, layout, {"codec": codec})
            session = source.open(line)
            asked = Asked(source, session, 1, [0, 1], some_pages(source, 2, random.Random(1)))
            assert asked.wait() == 2 and asked.came(2), source.damages
            session.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_block_that_lacks_a_piece_ends_the_run_before_it(variant):
    source = PieceSource(2, 4, LAYOUT)
    del source.pieces[source.name(2, 5)]
    with plane(**VARIANTS[variant]) as line:
        session = source.open(line)
        asked = Asked(source, session, 1, [0, 1, 2, 3], some_pages(source, 4, random.Random(2)))
        assert asked.wait() == 2 and asked.came(2)
        session.close()
    assert not source.damages and set(source.incompletes) == {source.keys[2]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mac_key", [b"", b"k" * 32])
def test_a_damaged_piece_is_reported_and_not_delivered(mac_key):
    """Whatever byte of it is changed, and wherever it is cut."""
    source = PieceSource(3, 2, LAYOUT, mac_key=mac_key)
    name = source.name(1, 3)
    whole = source.pieces[name]
    damages = [whole[:at] for at in (0, 1, 63, 64, 65, len(whole) - 1)]
    damages += [whole + b"\0"]
    for at in range(len(whole)):
        damages.append(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
    with plane() as line:
        session = source.open(line)
        pages = some_pages(source, 2, random.Random(3))
        for number, value in enumerate(damages):
            source.pieces[name] = value
            asked = Asked(source, session, number, [0, 1], pages)
            assert asked.wait() == 1 and asked.came(1)
            assert source.damages.pop()[0] == source.keys[1] and not source.damages, number
        session.close()


def test_what_a_writer_forges_is_refused_as_the_reference_does():
    """Payloads of any bytes under right checksums: the sizes are the reader's, and nothing else is written."""
    rng = np.random.default_rng(int(os.environ.get("SEED", 0)))
    with plane() as line:
        for config in CONFIGS:
            source = PieceSource(4, 1, SMALL, CONFIGS[config])
            session, name = source.open(line), source.name(0, 0)
            whole = source.pieces[name]
            for number in range(40):
                payload = bytearray(whole[HEADER_BYTES:])
                for _ in range(rng.integers(1, 4)):
                    payload[rng.integers(len(payload))] ^= 1 << rng.integers(8)
                forged = np.frombuffer(with_payload(whole, bytes(payload)), np.uint8)
                try:
                    expected = source.decoded(forged, 0, source.keys[0])
                except CodecError:
                    expected = None
                source.pieces[name] = forged.tobytes()
                source.memory[:] = 0xEE
                pages = some_pages(source, 1, random.Random(number))
                asked = Asked(source, session, number, [0], pages)
                has_come = asked.wait()
                # Versions of zstd make different bytes of what is no stream of theirs. Level 0 of Deflate is ours.
                if source.codec.coder_name != "zstd" and CONFIGS[config].get("level", 0) == 0:
                    assert has_come == (expected is not None), (config, number)
                    assert expected is None or (source.pages[pages[0]].ravel() == expected).all(), (config, number)
                others = np.ones(len(source.pages), bool)
                others[pages] = False
                assert (source.pages[others] == 0xEE).all(), (config, number)
            session.close()


def with_payload(piece: bytes, payload: bytes) -> bytes:
    """A piece's header with right checksums over another payload of the same size."""
    fields = piece[:48] + struct.pack("<Q", xxhash.xxh3_64_intdigest(payload))
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields)) + payload


@pytest.mark.parametrize(
    ("reply", "is_damage"),
    [
        (b"-NOPERM no GETEX\r\n", False),
        (b"-WRONGTYPE a list\r\n", True),
        (b"$100000\r\n" + bytes(100000) + b"\r\n", True),
    ],
    ids=["no right", "a list", "too large"],
)
def test_an_error_of_the_store_is_no_damage(reply: bytes, is_damage: bool):
    """Else a right that a user of the store lacks would delete blocks that others share."""
    source = PieceSource(3, 2, LAYOUT)
    source.reply = reply
    with plane() as line:
        session = source.open(line)
        pages = some_pages(source, 1, random.Random(3))
        assert Asked(source, session, 1, [0], pages).wait() == 0
        assert {key for key, _ in source.damages} == ({source.keys[0]} if is_damage else set())
        source.reply = b""
        assert Asked(source, session, 2, [0], pages).wait() == 1, "the connection goes on"
        session.close()


@pytest.mark.parametrize(
    "reply", [b":1\r\n", b"hello\r\n", b"$abc\r\n", b"$-2\r\n", b"$99999999999\r\n", b"$5\r\nabcdefgh", b"x" * 5000]
)
def test_what_is_no_reply_ends_the_connection(reply: bytes, caplog: pytest.LogCaptureFixture):
    source = PieceSource(3, 2, LAYOUT)
    source.reply = reply
    with plane() as line:
        session = source.open(line)
        assert Asked(source, session, 1, [0], some_pages(source, 1, random.Random(3))).wait() == 0
        assert "another protocol" in caplog.text and not source.damages
        session.close()


def test_a_server_that_is_silent_costs_the_timeout_and_is_left_alone_then(caplog):
    source = PieceSource(3, 2, LAYOUT, timeout_s=0.3)
    source.hold.clear()
    with plane(receive_threads=1) as line:
        session = source.open(line)
        pages = some_pages(source, 1, random.Random(3))
        began = time.monotonic()
        assert Asked(source, session, 1, [0], pages).wait() == 0
        assert time.monotonic() - began >= 0.3
        assert "did not answer in full within 0.3 s" in caplog.text
        num_asked = len(source.server.requests)
        source.hold.set()
        assert Asked(source, session, 2, [0], pages).wait() in (0, 1)
        while not Asked(source, session, 3, [0], pages).wait():
            time.sleep(0.01)
        assert len(source.server.requests) > num_asked
        session.close()


@pytest.mark.parametrize("other", [(1, 0), (0, 1)], ids=["block", "place"])
def test_a_piece_of_another_block_or_place_loses_the_connection_and_no_block(other, caplog):
    source = PieceSource(4, 2, LAYOUT)
    whole = source.pieces[source.name(0, 0)]
    source.pieces[source.name(0, 0)] = source.pieces[source.name(*other)]
    with plane(receive_threads=1) as line:
        session = source.open(line)
        pages = some_pages(source, 1, random.Random(4))
        assert Asked(source, session, 1, [0], pages).wait() == 0
        assert "has sent what was not asked for" in caplog.text
        source.pieces[source.name(0, 0)] = whole
        asked = Asked(source, session, 2, [0], pages)
        assert asked.wait() == 1 and asked.came(1)
        session.close()
    assert not source.damages and not source.incompletes


@pytest.mark.parametrize("stray", [b"$-1\r\n", b"$5\r\nhello\r\n"])
@pytest.mark.parametrize("is_buffered", [False, True])
def test_a_reply_to_no_question_costs_a_connection_and_no_block(
    stray: bytes, is_buffered: bool, caplog: pytest.LogCaptureFixture
):
    """is_buffered: it comes with the last piece of the fetch before."""
    asked_on: list[FakeConnection] = []

    def answer(connection: FakeConnection, command: list[bytes]) -> None:
        asked_on.append(connection)
        value = source.pieces[command[1]]
        more = stray if is_buffered and len(asked_on) == LAYOUT.num_pieces else b""
        connection.send(b"$%d\r\n%b\r\n" % (len(value), value) + more)

    server = FakeServer(single(answer))
    source = PieceSource(4, 2, LAYOUT, server=server)
    with plane(receive_threads=1) as line:
        session = source.open(line)
        pages = some_pages(source, 2, random.Random(4))
        assert Asked(source, session, 1, [0], pages[:1]).wait() == 1
        if not is_buffered:
            asked_on[-1].send(stray)
            wait_until(lambda: not num_under_way(asked_on[-1].socket), "the reply to arrive")
        asked = Asked(source, session, 2, [0, 1], pages)
        assert asked.wait() == 2 and asked.came(2)
        assert "has sent what was not asked for" in caplog.text
        assert len(set(map(id, asked_on))) == 2 and not source.damages and not source.incompletes
        session.close()


def num_under_way(connection: socket.socket) -> int:
    """Bytes that the other side's kernel has not acknowledged."""
    return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_pieces_live_on_as_long_as_their_blocks_are_read():
    source = PieceSource(4, 1, LAYOUT, ttl_s=100)
    with plane() as line:
        session = source.open(line)
        assert Asked(source, session, 1, [0], some_pages(source, 1, random.Random(4))).wait() == 1
        session.close()
    assert any(command[0] == b"GETEX" for command in source.server.requests)


@pytest.mark.parametrize("pipelined", [True, False])
def test_what_is_given_up_ends_and_writes_nothing_afterwards(pipelined):
    source = PieceSource(5, 4, LAYOUT)
    with plane(pipelined=pipelined) as line:
        session = source.open(line)
        source.hold.clear()
        pages = some_pages(source, 8, random.Random(5))
        asked = Asked(source, session, 1, [0, 1, 2, 3], pages[:4])
        session.give_up(1)
        after = Asked(source, session, 2, [0, 1, 2, 3], pages[4:])
        source.hold.set()
        assert asked.wait() == 0
        assert after.wait() == 4 and after.came(4)
        assert asked.counts == [0]
        session.give_up(1)  # long ended
        session.close()


def test_a_fetch_of_no_blocks_ends():
    source = PieceSource(5, 1, LAYOUT)
    with plane() as line:
        session = source.open(line)
        assert Asked(source, session, 1, [], np.empty((0, 16))).wait() == 0
        session.close()


def test_a_fetch_may_be_larger_than_all_buffers():
    layout = kv_block(16, 2, 16, 8, 64, "float32", max_piece_bytes=1 << 20)
    source = PieceSource(7, 6, layout, {"codec": "raw"})
    with plane() as line:
        session = source.open(line)
        assert 6 * layout.num_pieces > 2 * line.num_slots
        asked = Asked(source, session, 1, range(6), np.arange(6 * 16).reshape(6, 16))
        assert asked.wait() == 6 and asked.came(6)
        session.close()


def test_an_accelerator_takes_its_time_and_has_several_pieces_at_once():
    """8 pieces of 256 KiB at 10 MB/s take 0.2 s; each of them, with nothing in flight beside it, took 26 ms more for
    the way to the accelerator and back."""
    layout = kv_block(16, 2, 16, 8, 64, "bfloat16", max_piece_bytes=256 << 10)
    source = PieceSource(7, 1, layout, {"codec": "raw"})
    with plane(engine="emulated", rates_gbps={"dequantize": 0.08}, poll_us=1.0) as line:
        session = source.open(line)
        began = time.monotonic()
        assert Asked(source, session, 1, [0], np.arange(16).reshape(1, 16)).wait() == 1
        assert time.monotonic() - began >= layout.block_bytes / 1e7
        session.close()


def test_several_engines_share_the_plane_and_one_that_ends_disturbs_no_other():
    sources = [PieceSource(seed, 4, LAYOUT, late=0.001) for seed in range(3)]
    with plane() as line:
        sessions = [source.open(line) for source in sources]
        for number in range(5):
            asked = [
                Asked(source, session, number, range(4), some_pages(source, 4, random.Random(number)))
                for source, session in zip(sources, sessions)
            ]
            assert all(each.wait() == 4 and each.came(4) for each in asked)
            if number == 2:
                sessions.pop().close()
                assert sources.pop().engine_sees_the_end()
        for session in sessions:
            session.close()


def test_a_plane_that_gets_no_descriptors_names_the_limit_and_leaves_nothing():
    with plane():
        pass  # the library is compiled and loaded
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # So many are left that the receiving threads do not get one each.
    limit = list(islice((fd for fd in range(soft) if fd not in used), 9))[-1]
    threads = psutil.Process().num_threads()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with pytest.raises(StoreError, match=r"data plane cannot start: .* raise the limit of open files"):
            Plane(ProxySettings(receive_threads=16, **dict.fromkeys(BUFFERS, 72 << 20)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) <= len(used)
    wait_until(lambda: psutil.Process().num_threads() <= threads, "the plane's threads to end")


@pytest.mark.parametrize(
    "slow",
    [{"max_read_gbps": 0.01}, {"engine": "emulated", "rates_gbps": {"receive": 0.01}}],
    ids=["cap", "emulated"],
)
def test_a_slow_plane_is_no_silent_server(slow):
    """The second piece has come long before it is looked at, which is later than a server may take."""
    layout = kv_block(4, 2, 16, 8, 512, "float32")
    source = PieceSource(3, 1, layout, {"codec": "raw"}, timeout_s=1.2)
    assert layout.num_pieces == 2
    with plane(receive_threads=1, **slow) as line:
        session = source.open(line)
        assert Asked(source, session, 1, [0], some_pages(source, 1, random.Random(3))).wait() == 1
        assert not source.store.stats()["failures"]
        session.close()


@pytest.mark.parametrize("num_sick", [1, 2])
def test_silent_servers_hold_up_no_other_session(num_sick):
    """Two would take all slots of the smallest buffers, if each session got as much as its connections take."""
    well, sick = PieceSource(4, 4, LAYOUT), [PieceSource(5 + i, 6, LAYOUT) for i in range(num_sick)]
    with plane() as line:
        sessions = [source.open(line) for source in (well, *sick)]
        stuck = []
        for source, session in zip(sick, sessions[1:], strict=True):
            source.hold.clear()
            stuck.append(Asked(source, session, 1, range(6), some_pages(source, 6, random.Random(1))))
            assert source.asked.wait(TIMEOUT_S)
        for number in range(10):
            asked = Asked(well, sessions[0], number, range(4), some_pages(well, 4, random.Random(number)))
            assert asked.wait() == 4 and asked.came(4) and not any(fetch.counts for fetch in stuck)
        for source, fetch in zip(sick, stuck, strict=True):
            source.hold.set()
            assert fetch.wait() == 6
        for session in sessions:
            session.close()


def test_a_master_no_more_is_asked_nothing_more():
    """Behind sentinels the next connection is to the new one."""
    source = PieceSource(4, 1, LAYOUT, ttl_s=100)
    source.reply = b"-READONLY You can't write against a read only replica.\r\n"
    with plane(receive_threads=1) as line:
        session = source.open(line)
        pages = some_pages(source, 1, random.Random(4))
        assert Asked(source, session, 1, [0], pages).wait() == 0 and not source.damages
        num_connections = source.server.num_connections
        source.reply = b""
        number = 2
        while not Asked(source, session, number, [0], pages).wait():
            number += 1
        assert source.server.num_connections > num_connections
        session.close()


# -- frames ---------------------------------------------------------------------------------------------------------


def test_an_engine_elsewhere_gets_messages_and_bytes_in_frames():
    source = PieceSource(8, 4, CUT)
    relay, proxy = frame_pair()
    with plane() as line:
        session = line.open(source, frame_link(proxy))
        proxy.send_through(session.send)
        proxy.send(wire.Welcome("first"))
        ended, counts = threading.Event(), []
        session.get(5, b"".join(source.keys), b"", lambda count: (counts.append(count), ended.set()))
        assert wire.decode(relay.receive().payload, wire.Welcome).codec == "first"
        came = np.zeros((4, CUT.block_bytes), np.uint8)
        num = np.zeros((4, CUT.block_bytes), np.uint8)
        while num.sum() < came.size:
            frame = relay.receive()
            assert (frame.kind, frame.operation) == (FrameKind.DATA, 5)
            at = slice(frame.start, frame.start + len(frame.payload))
            came[frame.block, at] = np.frombuffer(frame.payload, np.uint8)
            num[frame.block, at] += 1
        assert (num == 1).all() and (came == source.expected).all()
        assert ended.wait(120) and counts == [4]
        proxy.send(wire.Done(5, 4))
        assert wire.decode(relay.receive().payload, wire.Done).count == 4
        session.close()
    proxy.close()
    relay.close()


def test_engines_that_take_nothing_do_not_hold_up_others():
    """Three of them, with more to bring than there are slots; each has a part, and the last one comes."""
    layout = kv_block(16, 2, 16, 8, 64, "float32", max_piece_bytes=1 << 20)
    stalled = [PieceSource(seed, 6, layout, {"codec": "raw"}) for seed in (1, 2, 3)]
    other = PieceSource(4, 6, LAYOUT)
    pairs = [frame_pair() for _ in stalled]
    with plane() as line:
        ends: list[int] = []
        sessions = []
        for source, (_, proxy) in zip(stalled, pairs):
            session = line.open(source, frame_link(proxy))
            session.get(1, b"".join(source.keys), b"", ends.append)
            sessions.append(session)
        own = other.open(line)
        asked = Asked(other, own, 1, range(6), some_pages(other, 6, random.Random(4)))
        assert asked.wait() == 6 and asked.came(6) and not ends
        own.close()
        # The first comes, the second is given up and its session ends, and the third one's engine goes.
        sessions[1].give_up(1)
        pairs[1][1].shut()
        pairs[2][0].close()
        relay, came = pairs[0][0], 0
        while came < 6 * layout.block_bytes:
            came += len(relay.receive().payload)
        for session in sessions:
            while session._ends:
                time.sleep(0.001)
            session.close()
        assert sorted(ends)[-1] == 6 and len(ends) == 3
    for relay, proxy in pairs:
        proxy.close()
        relay.close()


# -- clusters -------------------------------------------------------------------------------------------------------


class TwoNodes:
    """A cluster of two servers of the same pieces. ranges: (first slot, last slot, node) each. redirect:
    what the first node answers to a GET, if anything but a piece. asked: which node, for each GET."""

    def __init__(self) -> None:
        self.ranges = [(0, 8191, 0), (8192, 16383, 1)]
        self.redirect: Callable[[], bytes] | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.asked: list[int] = []
        self.num_asking = 0
        self.servers = [FakeServer(single(partial(self._answer, i), self._slots)) for i in range(2)]
        self.ports = [server.address.endpoints[0].port for server in self.servers]
        self.source = PieceSource(6, 32, LAYOUT, server=self.servers[0])
        first = [slot_of(self.source.name(i, 0)) < 8192 for i in range(32)]
        self.blocks = [[i for i in range(32) if first[i]], [i for i in range(32) if not first[i]]]

    def ask(self, session: PlaneSession, number: int, blocks: Sequence[int]) -> Asked:
        pages = some_pages(self.source, len(blocks), random.Random(number))
        return Asked(self.source, session, number, blocks, pages)

    def move_all_to_the_first(self) -> None:
        """And the store learns it, as it does when another block is looked for."""
        self.ranges = [(0, 16383, 0)]
        self.source.store._map.mark_outdated()
        self.source.store._map._next_refresh = 0.0
        self.source.store.stored(self.source.keys[:1])

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def _slots(self) -> bytes:
        host = b"$9\r\n127.0.0.1\r\n"
        lines = [b"*3\r\n:%d\r\n:%d\r\n*2\r\n%b:%d\r\n" % (f, l, host, self.ports[i]) for f, l, i in self.ranges]
        return b"*%d\r\n" % len(lines) + b"".join(lines)

    def _answer(self, node: int, connection: FakeConnection, command: list[bytes]) -> None:
        if command[0] == b"ASKING":
            self.num_asking += 1
            connection.send(b"+OK\r\n")
        elif command[0] != b"GET":
            connection.send(b":0\r\n")
        elif node == 0 and self.redirect is not None:
            connection.send(self.redirect())
        else:
            self.hold.wait(120)
            self.asked.append(node)
            self.source._answer(connection, command)


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    made = TwoNodes()
    yield made
    made.close()


def test_blocks_are_asked_of_the_nodes_that_have_them(nodes):
    with plane() as line:
        session = nodes.source.open(line)
        for node in (1, 0, 1):
            nodes.asked.clear()
            asked = nodes.ask(session, len(nodes.servers[0].requests), nodes.blocks[node][:3])
            assert asked.wait() == 3 and asked.came(3) and set(nodes.asked) == {node}
        session.close()


@pytest.mark.parametrize("kind", ["MOVED", "ASK"])
def test_pieces_that_are_on_another_node_are_followed(nodes, kind):
    nodes.redirect = lambda: b"-%b 1 127.0.0.1:%d\r\n" % (kind.encode(), nodes.ports[1])
    with plane() as line:
        session = nodes.source.open(line)
        for number in range(3):
            asked = nodes.ask(session, number, nodes.blocks[0][:4])
            assert asked.wait() == 4 and asked.came(4)
        session.close()
    assert bool(nodes.num_asking) == (kind == "ASK")


@pytest.mark.parametrize(
    "target", [b"127.0.0.1:10000000000000000000000000", b"127.0.0.1:0", b"a" * 70 + b":1", b"no port"]
)
def test_a_redirect_to_what_is_no_node_ends_the_block(nodes, target):
    nodes.redirect = lambda: b"-MOVED 1 %b\r\n" % target
    with plane() as line:
        session = nodes.source.open(line)
        for number in range(2):
            assert nodes.ask(session, number, nodes.blocks[0][:1]).wait() == 0
        assert nodes.ask(session, 3, nodes.blocks[1][:1]).wait() == 1
        session.close()


def test_a_slot_that_has_moved_is_asked_for_where_requests_are_under_way(nodes):
    with plane(receive_threads=1) as line:
        session = nodes.source.open(line)
        assert nodes.ask(session, 1, nodes.blocks[0][:1]).wait() == 1
        nodes.move_all_to_the_first()
        nodes.hold.clear()
        asked = nodes.ask(session, 2, [nodes.blocks[0][0], nodes.blocks[1][0]])
        while nodes.servers[0].requests[-1][0] != b"GET":
            time.sleep(0.001)
        nodes.hold.set()
        assert asked.wait() == 2 and asked.came(2) and set(nodes.asked) == {0}
        session.close()


def test_a_store_that_is_a_cluster_no_more(nodes):
    with plane() as line:
        session = nodes.source.open(line)
        assert nodes.ask(session, 1, [nodes.blocks[0][0], nodes.blocks[1][0]]).wait() == 2
        nodes._slots = lambda: NO_CLUSTER
        for server in nodes.servers:
            server._serve = single(partial(nodes._answer, 0), lambda: NO_CLUSTER)
        nodes.source.store._map.mark_outdated()
        nodes.source.store._map._next_refresh = 0.0
        nodes.source.lost = 1.0  # of the connections that there are
        assert nodes.ask(session, 2, [nodes.blocks[1][0]]).wait() == 0
        nodes.source.lost = 0.0
        number = 3
        while not nodes.ask(session, number, [nodes.blocks[1][0]]).wait():
            number += 1
        session.close()


def test_a_cluster_with_more_nodes_than_the_plane_has_room_for(nodes, monkeypatch, caplog):
    monkeypatch.setattr("sglang.srt.offload.store.piece_connections._MAX_NODES", 1)
    with plane() as line:
        session = nodes.source.open(line)
        assert nodes.ask(session, 1, nodes.blocks[0][:1]).wait() == 0
        assert nodes.ask(session, 2, nodes.blocks[1][:1]).wait() == 0
        session.close()
    assert "more than 1 nodes" in caplog.text


# -- the plane itself -----------------------------------------------------------------------------------------------


def test_a_session_that_the_plane_cannot_serve_is_refused():
    source = PieceSource(6, 1, kv_block(4, 1, 1, 1, 8, "float32"))
    vars(source.layout)["piece_bytes"] = 4 << 20
    with plane() as line, pytest.raises(PlaneRefused, match="does not describe a session"):
        source.open(line)


def test_vectors_that_binned_does_not_make_smaller_are_refused():
    layout = kv_block(1 << 11, 1, 256, 2, 1, "bfloat16")
    assert layout.piece_bytes == 2 << 20
    source = PieceSource(6, 0, layout, {"codec": "binned"})
    with plane() as line, pytest.raises(PlaneRefused, match="too short for codec binned"):
        source.open(line)


def test_a_plane_that_works_says_so():
    source = PieceSource(1, 1, LAYOUT)
    with plane(data_plane="process") as line:
        session = source.open(line)
        session.ping()
        source.pongs.get(timeout=TIMEOUT_S)
        os.kill(line.pid, signal.SIGSTOP)
        session.ping()
        with pytest.raises(queue.Empty):
            source.pongs.get(timeout=0.2)
        os.kill(line.pid, signal.SIGCONT)
        source.pongs.get(timeout=TIMEOUT_S)
        session.close()


def test_the_program_ends_with_its_control_plane():
    with plane(data_plane="process") as line:
        pid = line.pid
        assert pid is not None
        source = PieceSource(1, 1, LAYOUT)
        session = source.open(line)
        os.kill(pid, signal.SIGTERM)  # the proxy's own end comes first
        assert Asked(source, session, 1, [0], some_pages(source, 1, random.Random(1))).wait() == 1
        session.close()
    assert line._process.returncode == 0


@pytest.mark.parametrize("seed", range(int(os.environ.get("SEED", 0)), int(os.environ.get("SEED", 0)) + 6))
def test_random_faults(seed):
    """Connections break, pieces are missing and damaged, fetches are given up, several at once: each ends once, what
    it says came is right, and all slots are free afterwards."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    variant = rng.choice(list(VARIANTS.values()))
    source = PieceSource(seed, 8, LAYOUT, late=0.002, lost=rng.choice([0, 0.01, 0.1]))
    for _ in range(rng.randrange(4)):
        source.pieces.pop(rng.choice(list(source.pieces)), None)
    for _ in range(rng.randrange(4)):
        name = rng.choice(list(source.pieces))
        value = bytearray(source.pieces[name])
        value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
        source.pieces[name] = bytes(value)
    left = list(range(len(source.pages)))
    rng.shuffle(left)
    with plane(**variant) as line:
        session = source.open(line)
        everyone = []
        for number in range(4):
            blocks = [rng.randrange(8) for _ in range(rng.randint(1, 5))]
            mine = [left.pop() for _ in range(len(blocks) * LAYOUT.num_pages)]
            asked = Asked(source, session, number, blocks, np.array(mine).reshape(len(blocks), -1))
            everyone.append(asked)
            if rng.random() < 0.3:
                session.give_up(number)
        for asked in everyone:
            assert asked.came(asked.wait())
        session.close()
        assert all(len(asked.counts) == 1 for asked in everyone)
        assert is_settled(line)
    assert (source.pages[left] == 0xEE).all(), "pages of no fetch"
