"""`Transport`: moves bytes over one connected socket, each call until a deadline. `PlainTransport`: without TLS.

Owns the socket. Knows no commands and no replies. A deadline is a time of `time.monotonic`. When it has passed, a
call raises TimeoutError. Other failures of the socket are other kinds of OSError.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Protocol

# Buffers per sendmsg; Linux takes 1,024.
_MAX_BUFFERS = 512
# A timeout of zero would mean no limit.
_MIN_TIMEOUT_S = 0.001


class Transport(Protocol):
    def send_all(self, views: Sequence[memoryview], deadline: float) -> None:
        """views: sent one after the other. They may change when this returns."""

    def recv_into(self, buffers: Sequence[memoryview], deadline: float, wait_all: bool = False) -> int:
        """Receive to the buffers, the first one first, at least one byte. Returns the number of bytes; 0: the peer
        has closed the connection.

        wait_all: wait for more than what is there. The buffers may still be filled only in part, so a caller repeats.
        """

    def as_plain_socket(self) -> socket.socket:
        """A blocking socket with the same bytes, unencrypted. It is the caller's, and the transport is not used any
        more."""

    def close(self) -> None: ...


class PlainTransport:
    """connection: connected and blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send_all(self, views: Sequence[memoryview], deadline: float) -> None:
        views = [view for view in views if len(view)]
        first = 0
        while first < len(views):
            try:
                sent = self.socket.sendmsg(views[first : first + _MAX_BUFFERS], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                wait_for(self.socket, select.POLLOUT, deadline)
                continue
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def recv_into(self, buffers: Sequence[memoryview], deadline: float, wait_all: bool = False) -> int:
        # The kernel counts this down over the whole call, even where MSG_WAITALL waits several times. A value
        # therefore comes in one call, and ends in time.
        left_s = max(seconds_left(deadline), _MIN_TIMEOUT_S)
        limit = struct.pack("@ll", int(left_s), int(left_s % 1 * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            return self.socket.recvmsg_into(buffers, 0, socket.MSG_WAITALL if wait_all else 0)[0]
        except BlockingIOError:
            raise TimeoutError from None

    def as_plain_socket(self) -> socket.socket:
        return self.socket

    def close(self) -> None:
        self.socket.close()


def wait_for(connection: socket.socket, event: int, deadline: float) -> None:
    """event: POLLIN or POLLOUT. Raises TimeoutError."""
    poll = select.poll()
    poll.register(connection, event)
    if not poll.poll(max(1, seconds_left(deadline) * 1000)):
        raise TimeoutError


def seconds_left(deadline: float) -> float:
    """More than 0. Raises TimeoutError."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
