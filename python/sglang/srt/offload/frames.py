"""`FrameConnection`: authenticated frames over TCP, between the relay beside an engine and a proxy elsewhere.

Owns the socket, what waits to be sent, and one thread that sends it. Control messages (wire.py) go before data, which
is cut into frames of 256 KiB, so that no question waits behind a fetch.

    both sides   magic and version, 32 random bytes
    a frame      header: payload bytes, kind; of data also operation, block, first byte in it | payload | tag

The tag is HMAC-SHA256, cut to 16 bytes, over the frame's number, header and payload. Its key is derived from the
shared key, the direction and both sides' random bytes. A frame that is changed, repeated, left out, or of another
session therefore ends the session. Nothing is encrypted but what a caller has masked.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from sglang.srt.offload import wire
from sglang.srt.offload.wire import WireError

DATA_BYTES = 256 << 10
# The first frame, which a stranger may have sent, is a `Hello`.
_MAX_FIRST_BYTES = 64 << 10
# A side that is silent for so many seconds has gone. An engine asks its proxy for a sign of life twice a second.
SILENCE_S = 30.0
# For both sides' first bytes together, and for a proxy also for the first frame, however slowly they come.
_GREETING_TIMEOUT_S = 5.0
_MAGIC = b"sglang-kv %03d\n" % wire.WIRE_VERSION
_NONCE_BYTES = 32
_TAG_BYTES = 16
_HEADER = struct.Struct("<IIIBxxxQ")
_NUMBER = struct.Struct("<Q")


class FrameKind(IntEnum):
    CONTROL = 0
    DATA = 1
    # Without a valid tag, from a proxy that has another key.
    WRONG_KEY = 2


class WrongKeyError(WireError):
    """The first frame was not made with this side's key."""


@dataclass(frozen=True)
class Frame:
    """operation, block, start: of data, else 0. payload: valid until the next frame is received."""

    kind: FrameKind
    operation: int
    block: int
    start: int
    payload: memoryview


@dataclass(eq=False)
class _Data:
    """Data to send, from `at` on."""

    operation: int
    block: int
    start: int
    view: memoryview
    at: int = 0


class FrameConnection:
    """sock: connected, and this object's from now on. secret: the shared key."""

    def __init__(self, sock: socket.socket, secret: bytes, is_proxy: bool) -> None:
        """Raises WireError if the other side does not greet in time, or has another version."""
        self._sock = sock
        self._scratch = memoryview(bytearray(DATA_BYTES))
        self._num_received = self._num_sent = 0
        self._control: deque[bytes] = deque()
        self._data: deque[_Data] = deque()
        self._more = threading.Condition()
        self._is_closed = self._is_handed_over = False
        # When the other side must have shown its key; None: it has.
        self._deadline: float | None = time.monotonic() + _GREETING_TIMEOUT_S
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # What is not on its way yet is not the system's: a question passes it.
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_NOTSENT_LOWAT", 25), DATA_BYTES)
            sock.settimeout(_GREETING_TIMEOUT_S)
            mine = os.urandom(_NONCE_BYTES)
            sock.sendall(_MAGIC + mine)
            greeting = self._exactly(memoryview(bytearray(len(_MAGIC) + _NONCE_BYTES)))
            if not is_proxy:
                # The proxy asks its store before it answers.
                self._deadline = time.monotonic() + SILENCE_S
            sock.settimeout(SILENCE_S)
        except (OSError, WireError) as error:
            sock.close()
            raise WireError(f"the other side does not greet ({error})") from error
        if greeting[: len(_MAGIC)] != _MAGIC:
            sock.close()
            raise WireError("the other side is no offload proxy or engine of this version")
        theirs = bytes(greeting[len(_MAGIC) :])
        nonces = theirs + mine if is_proxy else mine + theirs
        to_proxy, to_engine = (hmac.digest(secret, way + nonces, "sha256") for way in (b"to proxy", b"to engine"))
        self._mask = hmac.digest(secret, b"mask" + nonces, "sha256")
        self._send_key, self._receive_key = (to_engine, to_proxy) if is_proxy else (to_proxy, to_engine)
        self._send_elsewhere: Callable[[bytes], None] | None = None
        self._sender = threading.Thread(target=self._send_all, name="frames", daemon=True)
        self._sender.start()

    def masked(self, data: bytes) -> bytes:
        """data, of 32 bytes at most, as only the two sides can read it; and the other way round. For one message of a
        connection: each byte is added to one of a key that is not used again."""
        assert len(data) <= len(self._mask)
        return bytes(a ^ b for a, b in zip(data, self._mask))

    def hand_over(self) -> tuple[int, bytes, int]:
        """Send nothing more from here, where nothing waits to be sent. Returns the socket's descriptor, which stays
        this object's, the key of this side's frames, and the number of the next one."""
        assert not self._control and not self._data
        with self._more:
            self._is_handed_over = True
            self._more.notify()
        self._sender.join()
        return self._sock.fileno(), self._send_key, self._num_sent

    def hand_over_receiving(self) -> tuple[int, bytes, int]:
        """Receive nothing more here. Returns the same as `hand_over`, of the other side's frames."""
        return self._sock.fileno(), self._receive_key, self._num_received

    def send_through(self, send: Callable[[bytes], None]) -> None:
        """After `hand_over`: how messages are sent."""
        self._send_elsewhere = send

    def send(self, message: msgspec.Struct) -> None:
        """Send a message soon, in order. Raises WireError only after `hand_over`."""
        data = wire.encode(message)
        if self._send_elsewhere is not None:
            self._send_elsewhere(data)
            return
        if self._is_handed_over:  # to a data plane that has refused it
            try:
                self._send_control(data)
            except OSError as error:
                raise WireError(f"the other side has gone ({error})") from error
            return
        with self._more:
            self._control.append(data)
            self._more.notify()

    def send_data(self, operation: int, block: int, start: int, data: np.ndarray) -> None:
        """Send data, (n,) uint8, soon, in order. It must not change any more."""
        with self._more:
            if not self._is_closed:
                self._data.append(_Data(operation, block, start, data.data))
                self._more.notify()

    def receive(self) -> Frame:
        """The next frame. For one thread. Raises WireError."""
        header = bytes(self._exactly(memoryview(bytearray(_HEADER.size))))
        size, block, start, kind, operation = _HEADER.unpack(header)
        is_first, number = self._num_received == 0, self._num_received
        self._num_received += 1
        if is_first and kind == FrameKind.WRONG_KEY:
            raise WrongKeyError("the proxy has another key")
        most = DATA_BYTES if kind == FrameKind.DATA else _MAX_FIRST_BYTES if is_first else wire.MAX_FRAME_BYTES
        if kind not in (FrameKind.CONTROL, FrameKind.DATA) or size > most:
            raise WireError("not a frame")
        memory = self._scratch if size <= len(self._scratch) else memoryview(bytearray(size))
        payload = self._exactly(memory[:size])
        tag = bytes(self._exactly(memoryview(bytearray(_TAG_BYTES))))
        if not hmac.compare_digest(tag, _tag(self._receive_key, number, header, payload)):
            raise (WrongKeyError if is_first else WireError)("a frame was not made with this side's key")
        self._deadline = None
        return Frame(FrameKind(kind), operation, block, start, payload)

    def refuse_key(self) -> None:
        """Tell the other side, whose first frame has another key."""
        try:
            self._sock.sendall(_HEADER.pack(0, 0, 0, FrameKind.WRONG_KEY, 0))
        except OSError:
            pass

    def shut(self) -> None:
        """End the connection: `receive` ends, and what waits to be sent is not."""
        with self._more:
            self._is_closed = True
            self._more.notify()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """After the last `receive`. Sends the messages that wait, and no data."""
        with self._more:
            self._is_closed = True
            self._more.notify()
        self._sender.join()
        self._sock.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        entry: _Data | None = None
        while True:
            with self._more:
                self._more.wait_for(lambda: self._control or self._data or self._is_closed or self._is_handed_over)
                if self._is_handed_over:
                    return
                message = self._control.popleft() if self._control else None
                if message is None and self._is_closed:
                    break
                if message is None:
                    entry = self._data[0]
            try:
                if message is not None:
                    self._send_control(message)
                    continue
                assert entry is not None
                part = entry.view[entry.at : entry.at + DATA_BYTES]
                place = (entry.block, entry.start + entry.at, FrameKind.DATA, entry.operation)
                self._send_frame((len(part), *place), part)
                entry.at += len(part)
            except (OSError, struct.error):
                break
            if entry.at == len(entry.view):
                with self._more:
                    self._data.popleft()
        self.shut()
        with self._more:
            self._data.clear()

    def _send_control(self, message: bytes) -> None:
        self._send_frame((len(message), 0, 0, FrameKind.CONTROL, 0), message)

    def _send_frame(self, header: tuple[int, ...], payload: Any) -> None:
        head = _HEADER.pack(*header)
        tag = _tag(self._send_key, self._num_sent, head, payload)
        self._num_sent += 1
        sent = self._sock.sendmsg([head, payload, tag])
        if sent < len(head) + len(payload) + len(tag):
            self._sock.sendall(b"".join((head, payload, tag))[sent:])

    def _exactly(self, memory: memoryview) -> memoryview:
        got = 0
        try:
            while got < len(memory):
                if self._deadline is not None:
                    self._sock.settimeout(max(0.001, self._deadline - time.monotonic()))
                n = self._sock.recv_into(memory[got:])
                if not n:
                    raise WireError("the other side has gone")
                got += n
            if self._deadline is not None:
                self._sock.settimeout(SILENCE_S)
        except OSError as error:
            raise WireError(f"the other side has gone ({error})") from error
        return memory


def _tag(key: bytes, number: int, header: bytes, payload: Any) -> bytes:
    mac = hmac.new(key, _NUMBER.pack(number), hashlib.sha256)
    mac.update(header)
    mac.update(payload)
    return mac.digest()[:_TAG_BYTES]
