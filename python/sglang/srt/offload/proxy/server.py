"""`ProxyServer`: the proxy's sockets and its sessions. Owns data plane and writer, which all sessions share."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload import wire
from sglang.srt.offload.frames import FrameConnection
from sglang.srt.offload.proxy.channel import Channel, LocalChannel, SessionRefusedError
from sglang.srt.offload.proxy.plane import Plane
from sglang.srt.offload.proxy.session import Session
from sglang.srt.offload.proxy.settings import ProxySettings
from sglang.srt.offload.proxy.tcp_channel import TcpChannel
from sglang.srt.offload.proxy.writer import Writer
from sglang.srt.offload.store.address import Endpoint, StoreAddress
from sglang.srt.utils.rare_log import RareLog

logger = logging.getLogger(__name__)

# Connections over TCP that have not shown the key yet. Another one ends the oldest.
_MAX_STRANGERS = 32
_ACCEPT_PAUSE_S = 0.5


class ProxyServer:
    """token: engines on this machine have to show it, and with others it is the shared key. address: the store's.
    Raises StoreError."""

    def __init__(self, settings: ProxySettings, address: StoreAddress, token: str) -> None:
        self._settings = settings
        self._address = address
        self._token = token
        self._lock = threading.Condition()
        # Sessions that have not ended -> their engines; b"": not known, or not yet.
        self._running: dict[Session, bytes] = {}
        self._is_closed = False
        # By engine: the number of its newest session, and that session.
        self._sessions: dict[bytes, tuple[int, Session]] = {}
        self._strangers: deque[socket.socket] = deque()
        self._log = RareLog(logger)
        self.plane = Plane(settings)
        self.writer = Writer(settings, lambda: self.plane.is_reading)

    def serve(self, sock: socket.socket) -> None:
        """Serve one engine on this machine until its session ends. The session owns sock from then on."""
        self._run(LocalChannel(sock, self._token))

    def listen(self, path: Path) -> None:
        """Serve engines on this machine, for ever. Raises StoreError if the socket cannot be made."""
        listener = open_listener(path)
        logger.info("offload proxy listens on %s", path)
        while True:
            sock, _ = self._accept(listener)
            self._start(sock, self.serve, sock)

    def listen_tcp(self, endpoint: Endpoint) -> None:
        """Serve relays of engines on other machines, for ever. Raises StoreError as `listen`."""
        try:
            listener = socket.create_server((endpoint.host, endpoint.port), family=family_of(endpoint))
        except OSError as error:
            raise StoreError(f"the proxy cannot listen on {endpoint} ({error}): choose another --listen") from error
        logger.info("offload proxy listens on tcp://%s", Endpoint(*listener.getsockname()[:2]))
        while True:
            sock, peer = self._accept(listener)
            with self._lock:
                oldest = self._strangers.popleft() if len(self._strangers) >= _MAX_STRANGERS else None
                self._strangers.append(sock)
            if oldest is not None:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            if not self._start(sock, self._greet, sock, peer):
                with self._lock, contextlib.suppress(ValueError):
                    self._strangers.remove(sock)

    def close(self) -> None:
        """End all sessions, then the threads of the writer and of the data plane, whose buffers are freed.

        A session ends when the store has answered what it was asked, or has let its timeout pass. One that begins
        later is closed at once.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            sessions = list(self._running)
        for session in sessions:
            session.channel.shut()
        with self._lock:
            self._lock.wait_for(lambda: not self._running)
        self.writer.close()
        self.plane.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> tuple[socket.socket, Any]:
        while True:
            try:
                return listener.accept()
            except OSError as error:  # no descriptors are left, for now
                self._log.warn("accept", "a connection cannot be accepted: %s", error)
                time.sleep(_ACCEPT_PAUSE_S)

    def _start(self, sock: socket.socket, serve: Callable[..., None], *args: Any) -> bool:
        """Begin a session, unless no thread can be started: then it is closed, and its engine comes again."""
        try:
            threading.Thread(target=serve, args=args, name="session", daemon=True).start()
            return True
        except RuntimeError as error:
            self._log.warn("thread", "a connection cannot be served: %s", error)
            sock.close()
            return False

    def _greet(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        try:
            frames = FrameConnection(sock, self._token.encode(), is_proxy=True)
            channel = TcpChannel(frames, self._settings.store_timeout_s)
            try:
                channel.receive_hello()
            except wire.WireError:
                channel.close()
                raise
        except wire.WireError as error:
            self._log.warn("stranger", "a connection from %s was no engine's: %s", peer[0], error)
            return
        finally:
            with self._lock:
                if sock in self._strangers:
                    self._strangers.remove(sock)
        self._run(channel)

    def _run(self, channel: Channel) -> None:
        session = Session(channel, self._admit, self._address, self.plane, self.writer, self._settings)
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._running[session] = b""
        if is_closed:
            channel.close()
            return
        try:
            session.run()
        finally:
            with self._lock:
                del self._running[session]
                self._lock.notify_all()
                self._sessions = {engine: each for engine, each in self._sessions.items() if each[1] is not session}

    def _admit(self, hello: wire.Hello, session: Session) -> Callable[[float], bool]:
        """One session per engine: a newer one ends the older, whose connection may be dead without a sign. Returns a
        function that waits so many seconds for the end of all older ones, and tells whether they have ended."""
        if not hello.engine:
            return lambda timeout_s: True
        with self._lock:
            epoch, last = self._sessions.get(hello.engine, (-1, None))
            if epoch >= hello.epoch:
                raise SessionRefusedError("the engine has begun a newer session")
            self._sessions[hello.engine] = hello.epoch, session
            older = weakref.WeakSet(each for each, engine in self._running.items() if engine == hello.engine)
            self._running[session] = hello.engine
        if last is not None:
            last.channel.shut()

        def have_ended(timeout_s: float) -> bool:
            with self._lock:
                return self._lock.wait_for(lambda: self._running.keys().isdisjoint(older), timeout_s)

        return have_ended


def open_listener(path: Path) -> socket.socket:
    """A listening socket to which only this user can connect. It replaces a socket that a dead proxy left behind."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if path.is_socket():
        try:
            listener.connect(os.fspath(path))
        except OSError:
            path.unlink(missing_ok=True)
        else:
            raise StoreError(f"another proxy listens on {path}: stop it, or choose another --socket")
        listener.close()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    except OSError as error:
        raise StoreError(f"the proxy cannot listen on {path}: {error}; choose another --socket") from error
    finally:
        os.umask(before)
    listener.listen()
    return listener


def family_of(endpoint: Endpoint) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
