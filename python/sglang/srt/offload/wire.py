"""The messages between an engine and its offload proxy. They carry descriptors, never KV.

Over a Unix socket a frame has four bytes (length, little-endian) and one msgpack-coded struct. The first one,
`Hello`, carries the file descriptor of the engine's host pool beside it. Over TCP, between the engine's relay and a
proxy elsewhere, the same messages go in the frames of frames.py, without descriptor and page numbers, and two more:
`Pull` and `NoData`. Replies come in any order; `Done` has the id of the message that it answers.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import ExitStack
from typing import Any

import msgspec

WIRE_VERSION = 7
# A Get of 256 blocks of 256 one-token pages is 270 KB.
MAX_FRAME_BYTES = 16 << 20
MAC_KEY_BYTES = 32
_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """token: what the proxy was started with. num_pages: of the host pool, whose memory, pool_bytes of it,
    comes with this message.

    layout: of `BlockLayout.as_dict`. codec: as for `make_codec`. namespace: what the bytes of a block depend on
    beside its key. is_first: the engine starts, and wants to know whether the store can be reached; later it goes on
    without. mac_key: with which blocks are authenticated, or empty; masked over TCP. engine: random bytes, of this
    engine and rank. epoch: counts its sessions; a newer one ends an older."""

    token: str
    num_pages: int
    pool_bytes: int
    layout: dict[str, Any]
    codec: dict[str, Any]
    namespace: bytes
    is_first: bool = True
    mac_key: bytes = b""
    engine: bytes = b""
    epoch: int = 0
    version: int = WIRE_VERSION


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """codec: its canonical description."""

    codec: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The session does not begin. reason: a sentence for the user."""

    reason: str


class Exists(msgspec.Struct, tag=True, frozen=True):
    """How many of the leading blocks are stored? keys: 16 bytes each. num_seen: above 0, how many there are up to the
    last one before which so many are stored, see `WindowStore`."""

    id: int
    keys: bytes
    num_seen: int = 0


class Touch(msgspec.Struct, tag=True, frozen=True):
    """These blocks are in use. A block that lacks a part is forgotten. keys: as in `Exists`, but from any number of
    prompts."""

    id: int
    keys: bytes


class Get(msgspec.Struct, tag=True, frozen=True):
    """Fetch blocks into pages of the pool. pages: int32, block after block. The proxy may write into them until it
    has answered."""

    id: int
    keys: bytes
    pages: bytes


class Put(msgspec.Struct, tag=True, frozen=True):
    """Store blocks from pages of the pool, as in `Get`; the proxy may read them until it has answered. tenant: whose
    they are, see `BlockKeys.tenant`."""

    id: int
    keys: bytes
    pages: bytes
    tenant: bytes = b""


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """The result of the Get or Put `id` is not needed any more. It is answered all the same."""

    id: int


class Clear(msgspec.Struct, tag=True, frozen=True):
    """Forget every block of the session's namespace."""

    id: int


class Erase(msgspec.Struct, tag=True, frozen=True):
    """Drop every block of a tenant in the session's namespace. Behind the tenant's Puts."""

    id: int
    tenant: bytes


class Limit(msgspec.Struct, tag=True, frozen=True):
    """Keep at most num_blocks blocks of a tenant, below 0 as many as there are. Until the session ends."""

    id: int
    tenant: bytes
    num_blocks: int


class GetStats(msgspec.Struct, tag=True, frozen=True):
    """Asks for `Stats`. The answer also shows that the proxy is alive."""


class Done(msgspec.Struct, tag=True, frozen=True):
    """count: how many leading blocks are stored (Put), or were read whole and verified (Get). Exists, Touch: one more
    than are stored, or 0 if the store did not tell."""

    id: int
    count: int


class Pull(msgspec.Struct, tag=True, frozen=True):
    """To a relay: send bytes start..end of a block of the Put `id`, as data."""

    id: int
    block: int
    start: int
    end: int


class NoData(msgspec.Struct, tag=True, frozen=True):
    """From a relay: what was pulled does not come, because the Put `id` has been given up."""

    id: int


class Stats(msgspec.Struct, tag=True, frozen=True):
    values: dict[str, int]


ToProxy = Exists | Touch | Get | Put | Cancel | Clear | Erase | Limit | GetStats
ToEngine = Done | Stats
_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class WireError(Exception):
    """The other side has gone, or has sent an invalid message."""


def send(sock: socket.socket, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
    """Raises WireError."""
    data = encode(message)
    frame = _LENGTH.pack(len(data)) + data
    try:
        sent = socket.send_fds(sock, [frame], list(fds)) if fds else 0
        if sent < len(frame):
            sock.sendall(frame[sent:])
    except OSError as error:
        raise WireError(f"the other side has gone ({error})") from error


def receive(sock: socket.socket, kind: Any, max_fds: int = 0) -> tuple[Any, list[int]]:
    """The next message, and the descriptors that came with it, which the caller must close. kind: the message's type,
    or a union. Raises WireError, also for another type."""
    fds: list[int] = []
    head = b""
    try:
        with ExitStack() as on_failure:
            if max_fds:
                # The descriptors come with the first byte.
                head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, max_fds)
                for fd in fds:
                    on_failure.callback(os.close, fd)
            head += _exactly(sock, _LENGTH.size - len(head)) if not max_fds or head else b""
            if len(head) < _LENGTH.size:
                raise WireError("the other side has gone")
            (length,) = _LENGTH.unpack(head)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a message of {length} bytes is no message")
            message = decode(_exactly(sock, length), kind)
            on_failure.pop_all()
        return message, fds
    except TimeoutError:
        raise WireError(f"it is silent for {sock.gettimeout():g} s: if it hangs, stop it and start it anew") from None
    except OSError as error:
        raise WireError(f"the other side has gone ({error})") from error


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """A message of this type, or of a union. Raises WireError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise WireError(f"not a message of this version: {error}") from error


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        n = sock.recv_into(view[got:])
        if not n:
            raise WireError("the other side has gone")
        got += n
    return bytes(data)
