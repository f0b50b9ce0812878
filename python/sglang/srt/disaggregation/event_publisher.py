"""`ZmqEventPublisher`: sends batches of KV events over ZeroMQ, and again to those who ask for what they missed.

Owns two sockets, a thread that alone uses them, and the last batches. A scheduler never waits for it: where the
thread does not keep up, batches are dropped. Subscribers see a gap in the sequence, and `has_gap` is set.

    PUB     topic, sequence number (8 bytes, big-endian), batch
    ROUTER  asked with the first number that is wanted; answers topic, number, batch for each that is kept, and at the
            end an empty topic, -1 and an empty batch
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque

import msgspec
import zmq

from sglang.srt.disaggregation.kv_events import Address, EventBatch, KVEventsConfig
from sglang.srt.utils.rare_log import RareLog

END = (-1).to_bytes(8, "big", signed=True)
_CLOSE_LIMIT_S = 2.0
_LINGER_MS = 1000
# An answer is broken off after so long in which its client has read nothing, and how often it is looked at.
_REPLAY_LIMIT_S = 1.0
_REPLAY_LOOK_MS = 5
# What a client asks that has not read an answer is passed over for so long.
_BROKEN_OFF_S = 60.0

logger = logging.getLogger(__name__)


class ZmqEventPublisher:
    """Raises ValueError if an endpoint cannot be used, with what to do."""

    def __init__(self, config: KVEventsConfig) -> None:
        self._topic = config.topic.encode()
        self._queue: queue.SimpleQueue[tuple[int, EventBatch] | None] = queue.SimpleQueue()
        self._max_queued = config.max_queue_size
        self._next = 0
        self.num_dropped = 0
        # Whether a batch was dropped since all blocks were told.
        self.has_gap = False
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        try:
            self._publisher = self._open(zmq.PUB, config.endpoint, config.hwm, config.bind)
            self._replay = None
            if config.replay_endpoint is not None:
                # An answer has room as a whole, for one who reads it late.
                self._replay = self._open(zmq.ROUTER, config.replay_endpoint, config.buffer_steps + 1, True)
                # Without it, what a client has no room for is lost without a word.
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._wake = self._context.socket(zmq.PULL)
            self._wake.set_hwm(0)
            self._wake.bind("inproc://wake")
            self._waker = self._context.socket(zmq.PUSH)
            self._waker.set_hwm(0)
            self._waker.connect("inproc://wake")
        except ValueError:
            self._context.destroy(linger=0)
            raise
        # The answer that is under way: its client, the messages that it still has to get, and until when.
        self._answer: tuple[bytes, deque[tuple[bytes, ...]]] | None = None
        self._answer_until = 0.0
        # Clients whose answers were broken off, and when.
        self._broken_off: dict[bytes, float] = {}
        # Any client of the replay endpoint can cause these lines.
        self._log = RareLog(logger)
        self._thread = threading.Thread(target=self._work, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: EventBatch) -> None:
        """Never waits. A number that is dropped is never sent."""
        number = self._next
        self._next += 1
        if self._queue.qsize() >= self._max_queued:
            self.num_dropped += 1
            self.has_gap = True
            if self.num_dropped & (self.num_dropped - 1) == 0:
                logger.warning("KV events: %d batches were dropped, the publisher does not keep up", self.num_dropped)
            return
        events.attn_dp_rank = 0
        self._queue.put((number, events))
        self._waker.send(b"")

    @property
    def keeps_up(self) -> bool:
        """Whether nothing waits to be sent."""
        return self._queue.empty()

    def close(self) -> None:
        """Send what waits, within a limit."""
        self._queue.put(None)
        self._waker.send(b"")
        self._thread.join(_CLOSE_LIMIT_S)
        self._waker.close(linger=0)
        if not self._thread.is_alive():
            self._context.term()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _open(self, kind: int, endpoint: str, hwm: int, bind: bool | None) -> zmq.Socket[bytes]:
        address = Address.parse(endpoint)
        binds = address.is_wildcard or address.is_local if bind is None else bind
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        if "[" in address.host or address.host == "::":
            socket.setsockopt(zmq.IPV6, 1)
        try:
            if binds:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"{endpoint} cannot be used ({error}): choose another port or path") from error
        if binds and not address.is_local:
            logger.warning(
                "KV events at %s are open to the network: they hold the token ids of all prompts and answers; bind "
                "127.0.0.1, or keep others out",
                endpoint,
            )
        return socket

    def _work(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        while True:
            # One answer at a time, which no batch waits for.
            if self._replay is not None:
                poller.register(self._replay, zmq.POLLIN if self._answer is None else 0)
            ready = dict(poller.poll(None if self._answer is None else _REPLAY_LOOK_MS))
            if self._replay is not None:
                if self._replay in ready:
                    self._begin_answer(self._replay)
                self._go_on_with_answer(self._replay)
            if self._wake in ready:
                self._wake.recv()
                if (queued := self._queue.get()) is None:
                    break
                number, batch = queued[0].to_bytes(8, "big"), encoder.encode(queued[1])
                self._kept.append((number, batch))
                self._publisher.send_multipart((self._topic, number, batch))
        self._publisher.close(linger=_LINGER_MS)
        self._wake.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)

    def _begin_answer(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            self._log.warn("request", "KV events: a request for replay has to be 8 bytes behind an empty frame")
            return
        client, empty, first = frames
        now = time.monotonic()
        self._broken_off = {each: at for each, at in self._broken_off.items() if now < at + _BROKEN_OFF_S}
        if client in self._broken_off:
            return
        wanted = [(client, empty, self._topic, number, batch) for number, batch in self._kept if number >= first]
        self._answer = client, deque([*wanted, (client, empty, b"", END, b"")])
        self._answer_until = now + _REPLAY_LIMIT_S

    def _go_on_with_answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send as much as its client has room for."""
        if self._answer is None:
            return
        client, messages = self._answer
        try:
            while messages:
                replay.send_multipart(messages[0], zmq.NOBLOCK)
                messages.popleft()
                self._answer_until = time.monotonic() + _REPLAY_LIMIT_S
        except zmq.Again:
            if time.monotonic() < self._answer_until:
                return
            self._log.warn("unread", "KV events: a replay was broken off, its client does not read it")
            self._broken_off[client] = time.monotonic()
        except zmq.ZMQError as error:
            self._log.warn("failed", "KV events: a replay was broken off (%s)", error)
        self._answer = None
