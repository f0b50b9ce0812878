"""`Channel`: a session's way to its engine, for messages and for the bytes of pages. `LocalChannel` is the one of an
engine on this machine, whose host pool is mapped here; tcp_channel.py has the other."""

from __future__ import annotations

import hmac
import os
import socket
from typing import Protocol

import numpy as np

from sglang.srt.offload import wire
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.proxy.origin import Origin, PoolPages
from sglang.srt.offload.proxy.plane import FrameLink, PlaneSession, PoolLink
from sglang.srt.utils.shared_memory import SharedMemory


class SessionRefusedError(Exception):
    """The session cannot begin; the message is sent to the engine."""


class Channel(Protocol):
    def begin(self) -> wire.Hello:
        """The first message, from an engine that has shown that it may come. Raises SessionRefusedError and
        WireError, as the others."""
        ...

    def attach(self, hello: wire.Hello, layout: BlockLayout) -> None:
        """The session begins, with blocks of this layout."""
        ...

    def receive(self) -> wire.ToProxy: ...

    def send(self, message: wire.Welcome | wire.Refused | wire.ToEngine) -> None: ...

    def link(self) -> PoolLink | FrameLink:
        """Where the data plane delivers. Once, after `attach` and before the first `send`."""
        ...

    def linked(self, session: PlaneSession) -> None:
        """The data plane has the link: from now on messages to an engine elsewhere are sent through it."""
        ...

    def check_get(self, message: wire.Get, num_blocks: int) -> None:
        """Raises WireError if the message does not name places of the engine's pool."""
        ...

    def origin(self, message: wire.Put, num_blocks: int) -> Origin:
        """As `check_get`."""
        ...

    def shut(self) -> None:
        """End the session, from any thread: `receive` raises."""
        ...

    def end_waits(self) -> None:
        """Nothing is received any more: what is still to be sent is not, and reading from an origin whose bytes have
        not come raises."""
        ...

    def close(self) -> None:
        """After the last use of every origin, and of the link."""
        ...


class LocalChannel:
    """token: the engine has to show it."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self._sock = sock
        self._token = token
        self._pool: SharedMemory | None = None

    def begin(self) -> wire.Hello:
        hello, fds = wire.receive(self._sock, wire.Hello, max_fds=1)
        for fd in fds:
            # From here on the mapping owns the descriptor.
            self._pool = _map(fd, hello)
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise SessionRefusedError("the token is not this proxy's")
        return hello

    def attach(self, hello: wire.Hello, layout: BlockLayout) -> None:
        if self._pool is None or self._pool.size_bytes != hello.num_pages * layout.page.page_bytes:
            raise SessionRefusedError("the memory that came with the first message is not the pool that it names")
        self._num_pages, self._layout = hello.num_pages, layout

    def receive(self) -> wire.ToProxy:
        message, _ = wire.receive(self._sock, wire.ToProxy)
        return message

    def send(self, message: wire.Welcome | wire.Refused | wire.ToEngine) -> None:
        wire.send(self._sock, message)

    def link(self) -> PoolLink:
        assert self._pool is not None
        return PoolLink(self._pool.fd, self._num_pages, self._sock.fileno())

    def linked(self, session: PlaneSession) -> None:
        pass

    def check_get(self, message: wire.Get, num_blocks: int) -> None:
        self.pages(message, num_blocks)

    @property
    def memory(self) -> np.ndarray:
        """The pool, (bytes,) uint8."""
        assert self._pool is not None
        return self._pool.memory

    def pages(self, message: wire.Get | wire.Put, num_blocks: int) -> PoolPages:
        """Those that the message names. Raises WireError if they are not the pool's."""
        assert self._pool is not None
        pages, layout = np.frombuffer(message.pages, np.int32), self._layout
        fits = len(pages) == num_blocks * layout.num_pages
        if not fits or not len(pages) or pages.min() < 0 or pages.max() >= self._num_pages:
            raise wire.WireError(f"{type(message).__name__} {message.id} names pages that are not the pool's")
        return PoolPages(self._pool.memory, layout.page.page_bytes, pages.reshape(num_blocks, -1))

    def origin(self, message: wire.Put, num_blocks: int) -> PoolPages:
        return self.pages(message, num_blocks)

    def shut(self) -> None:
        try:
            # Only this way: the end of the other tells the engine that no more writes to its pages follow.
            self._sock.shutdown(socket.SHUT_RD)
        except OSError:
            pass

    def end_waits(self) -> None:
        pass

    def close(self) -> None:
        self._sock.close()
        self._pool = None


def _map(fd: int, hello: wire.Hello) -> SharedMemory | None:
    try:
        return SharedMemory(fd, hello.pool_bytes)
    except (OSError, ValueError, OverflowError):
        os.close(fd)
        return None
