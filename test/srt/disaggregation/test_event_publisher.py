"""The publisher against real subscribers, over sockets."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from sglang.srt.disaggregation.event_publisher import END, ZmqEventPublisher
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, EventBatch, KVCacheEvent, KVEventsConfig
from sglang.srt.utils import rare_log
from support.kv_subscriber import KvSubscriber
from support.server_fixture import free_port

WAIT_MS = 20_000


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def stored(*hashes: int, parent: int | None = None) -> BlockStored:
    return BlockStored(list(hashes), parent, [7] * len(hashes), 1, None, medium="GPU")


def batch(*events: KVCacheEvent) -> EventBatch:
    return EventBatch(0.5, events)


def subscribe(context: zmq.Context, endpoint: str, topic: bytes = b"") -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.rcvtimeo = WAIT_MS
    socket.subscribe(topic)
    socket.connect(endpoint)
    return socket


def replayed(context: zmq.Context, endpoint: str, first: int) -> list[list[bytes]]:
    """As a consumer asks: an empty frame and the first number."""
    socket = context.socket(zmq.DEALER)
    socket.rcvtimeo = WAIT_MS
    socket.connect(endpoint)
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    found = []
    while (frames := socket.recv_multipart())[2] != END:
        assert frames[0] == b""
        found.append(frames[1:])
    assert frames == [b"", b"", END, b""]
    socket.close()
    return found


def numbers(frames: list[list[bytes]]) -> list[int]:
    return [int.from_bytes(number, "big") for _, number, _ in frames]


def until_heard(publisher: ZmqEventPublisher, socket: zmq.Socket[bytes]) -> int:
    """Publish until the publisher knows the subscriber, who misses what was sent before. Returns the number heard."""
    socket.rcvtimeo = 50
    deadline = time.monotonic() + WAIT_MS / 1000
    while time.monotonic() < deadline:
        publisher.publish(batch())
        try:
            number = int.from_bytes(socket.recv_multipart()[1], "big")
        except zmq.Again:
            continue
        socket.rcvtimeo = WAIT_MS
        return number
    raise AssertionError("nothing comes")


def test_one_who_comes_late_replays_and_goes_on(context: zmq.Context, tmp_path: Path):
    config = KVEventsConfig("zmq", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", topic="kv")
    publisher = ZmqEventPublisher(config)
    publisher.publish(batch(stored(1, 2)))
    publisher.publish(batch(stored(3, parent=2), BlockRemoved([2], "GPU")))
    socket = subscribe(context, config.endpoint, b"kv")
    heard = until_heard(publisher, socket)
    publisher.publish(batch(stored(4, parent=3)))
    found = KvSubscriber()
    frames = replayed(context, str(config.replay_endpoint), 0)
    assert numbers(frames)[: heard + 1] == list(range(heard + 1))
    for topic, number, payload in frames:
        assert topic == b"kv"
        found.take(number, payload)
    while 4 not in found.blocks["GPU"]:
        _, number, payload = socket.recv_multipart()
        found.take(number, payload)
    assert found.blocks == {"GPU": {1, 3, 4}} and not found.gaps
    assert found.prompts[4] == (7,) * 4
    publisher.close()


def test_a_gap_shows_what_was_dropped(context: zmq.Context, tmp_path: Path):
    """A queue of one batch, and a thread that is held up by nothing but its start."""
    config = KVEventsConfig("zmq", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", max_queue_size=1)
    publisher = ZmqEventPublisher(config)
    for number in range(20_000):
        publisher.publish(batch(stored(number)))
        if publisher.num_dropped:
            break
    assert publisher.num_dropped == 1
    dropped = number
    deadline = time.monotonic() + WAIT_MS / 1000
    while True:
        assert time.monotonic() < deadline
        publisher.publish(batch())
        sent = numbers(replayed(context, str(config.replay_endpoint), 0))
        if sent and sent[-1] > dropped:
            break
    assert dropped not in sent
    found = KvSubscriber()
    for _, n, payload in replayed(context, str(config.replay_endpoint), 0):
        found.take(n, payload)
    assert any(first <= dropped < end for first, end in found.gaps)
    publisher.close()


def test_the_oldest_batches_are_forgotten(context: zmq.Context, tmp_path: Path):
    config = KVEventsConfig("zmq", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", buffer_steps=2)
    publisher = ZmqEventPublisher(config)
    deadline = time.monotonic() + WAIT_MS / 1000
    for number in range(4):
        publisher.publish(batch(stored(number)))
    while (kept := [int.from_bytes(n, "big") for _, n, _ in replayed(context, str(config.replay_endpoint), 0)]) != [
        2,
        3,
    ]:
        assert time.monotonic() < deadline, kept
    assert [int.from_bytes(n, "big") for _, n, _ in replayed(context, str(config.replay_endpoint), 3)] == [3]
    publisher.close()


def test_a_long_replay_reaches_one_who_reads_it_late(context: zmq.Context, tmp_path: Path):
    """More than sockets keep by default."""
    config = KVEventsConfig("zmq", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    publisher = ZmqEventPublisher(config)
    count, endpoint = 2600, str(config.replay_endpoint)
    for number in range(count):
        publisher.publish(batch(stored(*range(40 * number, 40 * number + 40))))
    while len(replayed(context, endpoint, count - 1)) < 1:
        pass
    late = context.socket(zmq.DEALER)
    late.rcvtimeo = WAIT_MS
    late.connect(endpoint)
    late.send_multipart([b"", (0).to_bytes(8, "big")])
    assert late.poll(WAIT_MS)
    # Who asks next is answered behind it.
    assert numbers(replayed(context, endpoint, count - 2)) == [count - 2, count - 1]
    found = [late.recv_multipart()[2] for _ in range(count + 1)]
    assert found == [*(n.to_bytes(8, "big") for n in range(count)), END]
    publisher.close()


def test_who_asks_and_does_not_read_delays_no_batch(
    context: zmq.Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = KVEventsConfig("zmq", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    publisher, endpoint = ZmqEventPublisher(config), str(config.replay_endpoint)
    socket = subscribe(context, config.endpoint)
    until_heard(publisher, socket)
    for number in range(1000):
        publisher.publish(batch(stored(*range(400 * number, 400 * number + 400))))
    while len(replayed(context, endpoint, 1000)) < 1:
        pass
    stranger = context.socket(zmq.DEALER)
    stranger.set_hwm(1)
    stranger.connect(endpoint)
    for _ in range(100):
        stranger.send_multipart([b"", bytes(8)])
    # After a while one of its answers is broken off, and what it asks behind that is passed over.
    while "broken off" not in caplog.text:
        assert len(replayed(context, endpoint, 0)) > 1000
    for _ in range(100):
        assert len(replayed(context, endpoint, 1000)) > 0
    assert caplog.text.count("broken off") == 1
    last = publisher._next
    publisher.publish(batch())
    while int.from_bytes(socket.recv_multipart()[1], "big") < last:
        pass
    stranger.close(linger=0)
    publisher.close()


def test_who_asks_wrongly_disturbs_no_other(
    context: zmq.Context, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rare_log, "INTERVAL_S", math.inf)
    config = KVEventsConfig("zmq", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    publisher = ZmqEventPublisher(config)
    publisher.publish(batch(stored(1)))
    stranger = context.socket(zmq.DEALER)
    stranger.connect(str(config.replay_endpoint))
    for frames in ([b"hello"], [b"", b"1"], [b"", b"", b"", b""]):
        stranger.send_multipart(frames)
    while not (frames := replayed(context, str(config.replay_endpoint), 0)):
        pass
    assert len(frames) == 1
    publisher.close()
    assert caplog.text.count("a request for replay has to be 8 bytes") == 1


def test_an_address_in_use_tells_what_to_do():
    port = free_port()
    config = KVEventsConfig("zmq", f"tcp://127.0.0.1:{port}")
    first = ZmqEventPublisher(config)
    with pytest.raises(ValueError, match="choose another port"):
        ZmqEventPublisher(config)
    first.close()
    ZmqEventPublisher(config).close()


def test_the_log_tells_what_an_open_address_gives_away(caplog: pytest.LogCaptureFixture):
    for endpoint, is_told in ((f"tcp://127.0.0.1:{free_port()}", False), (f"tcp://*:{free_port()}", True)):
        caplog.clear()
        ZmqEventPublisher(KVEventsConfig("zmq", endpoint)).close()
        assert ("token ids of all prompts" in caplog.text) == is_told, endpoint
