"""The slab channel: a Unix socket over which a lender gives a borrower the memory of a lease, and over which each
learns which process the other is. Owns how such sockets are made. The coordinators decide what is sent to whom.

One datagram is one message (`Fetch`; `Slab` or `Refused`). The end of a process is seen at its pidfd. Only that
proves that its mappings are gone; the end of a connection does not. A borrower therefore neither passes the memory on
nor lets children inherit the mapping (MADV_DONTFORK). In strict mode, copies are asked for here too (`copier.py`).
"""

from __future__ import annotations

import os
import socket
import struct
import weakref
from typing import Any

import msgspec

from sglang.srt.peer.protocol.messages import MAX_COPY_PAGES

# A Copy's pages and the rest of it.
_MAX_MESSAGE_BYTES = 4 * MAX_COPY_PAGES + 4096
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
_encoder = msgspec.msgpack.Encoder()


class ChannelError(Exception):
    """The other side has gone, is another user's process, or sends what is no message."""


class Process:
    """Another process on this machine. pidfd: readable once the process has ended; open as long as this object
    exists."""

    def __init__(self, pid: int) -> None:
        """Raises ChannelError if there is no such process."""
        self.pid = pid
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise ChannelError(f"process {pid} cannot be watched: {error}") from error
        weakref.finalize(self, os.close, self.pidfd)


def listen(path: str) -> socket.socket:
    """A new socket with mode 0600. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        listener.bind(path)
        os.chmod(path, 0o600)  # no process can connect before `listen`
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def connect(path: str) -> socket.socket:
    """Raises ChannelError."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise ChannelError(f"no socket can be made: {error}") from error
    try:
        sock.setblocking(False)
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise ChannelError(f"no process listens on {path}: {error}") from error
    return sock


def peer_process(sock: socket.socket) -> Process:
    """The process that connected, or listened. Raises ChannelError, also for another user's process.

    The process may end, and its number go to another process, before it can be watched. Then the other process is
    watched. A slab thus comes back late, never early, because a process that has ended maps nothing."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise ChannelError(f"process {pid} is of user {uid}")
    return Process(pid)


def send(sock: socket.socket, message: msgspec.Struct, fd: int | None = None) -> bool:
    """fd: sent along; it stays the caller's. False: the socket has no room now. Raises ChannelError."""
    try:
        socket.send_fds(sock, [_encoder.encode(message)], [] if fd is None else [fd])
    except BlockingIOError:
        return False
    except OSError as error:
        raise ChannelError(f"the other side has gone ({error})") from error
    return True


def receive(sock: socket.socket, kind: Any) -> tuple[Any, int | None]:
    """The next message, and the file descriptor that came with it, which the caller closes. kind: the message's type,
    or a union. Raises BlockingIOError if there is no message yet, and ChannelError, also for another type."""
    fds: list[int] = []
    try:
        data, fds, _, _ = socket.recv_fds(sock, _MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise ChannelError("the other side has gone")
        return msgspec.msgpack.decode(data, type=kind), fds.pop() if fds else None
    except msgspec.DecodeError as error:
        raise ChannelError(f"not a message of this version: {error}") from error
    except BlockingIOError:
        raise
    except OSError as error:
        raise ChannelError(f"the other side has gone ({error})") from error
    finally:
        for fd in fds:
            os.close(fd)
