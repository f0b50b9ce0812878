"""`Plane`: the proxy's side of its data plane, which is C (`sgl_kernel.kvplane`): four stages that bring pieces from
a store to engines.

Owns the socket to it, its threads or process, and the counters that both see. Each `PlaneSession` is one engine's: it
hands fetches over, and connections to the store when the plane asks for them. Python touches no piece but one that a
cluster redirects.

    fetch ──► Get ──► plane: receive ─► decompress ─► dequantize ─► deliver ──► Ended ──► on_end(count)
                        │ Need: no connection to this node    │ Bad: a block is damaged, or lacks a piece
                        ▼                                     ▼
                      PieceConnections                      Source.note_damaged, .note_incomplete
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sgl_kernel import kvplane
from sglang.srt.mem_cache.block_keys import KEY_BYTES
from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload.codec.base import Codec
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.proxy.settings import BUFFERS, PIECE_BYTES, STAGES, ProxySettings
from sglang.srt.offload.store.failures import ErrorReply, StoreFailure, ValueTooLarge
from sglang.srt.offload.store.object_store import ObjectStore
from sglang.srt.offload.store.piece_connections import PieceConnections
from sglang.srt.utils.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

# Messages to the plane and from it, as csrc/kvplane/control.c has them.
_CONFIGURE, _OPEN, _ROUTES, _CONNECTED, _GET, _GIVE_UP, _BROUGHT, _SEND, _CLOSE, _PING = range(1, 11)
_OPENED, _NEED, _ENDED, _BAD, _FAILED, _REDIRECT, _LINK_ENDED, _CLOSED, _PONG = range(1, 10)
# The id of no session: of the plane itself.
_PLANE = 0
_HEAD = struct.Struct("<IB")
_ID = struct.Struct("<I")
_BEGIN = struct.Struct("<IBI")
_SESSION = struct.Struct("<BBBIIQQIIIIIId?32s?32sQ")
_NEEDED = struct.Struct("<II")
_END = struct.Struct("<QIQQQ")
_FAILURE = struct.Struct("<IIBI?")
_PLACE = struct.Struct("<QII")
_DAMAGED, _INCOMPLETE, _REFUSED = range(3)
# A piece that does not shrink is stored as it is, behind its header.
_SLOT_BYTES = PIECE_BYTES + 4096
_CODERS = {"": 0, "zstd": 1, "deflate": 2}
_DTYPES = {"bfloat16": 1, "float16": 2, "float32": 3}
_COUNTERS = (
    *(f"{stage}_{what}" for what in ("bytes", "pieces", "us", "queue") for stage in STAGES),
    *(f"{name}_{what}" for what in ("slots", "slots_used") for name in BUFFERS),
    "is_reading",
)


class PlaneRefused(Exception):
    """The plane cannot serve a session; the message has the remedy."""


class Source(Protocol):
    """A session as the plane sees it: how its blocks are coded and laid out, and where they are stored."""

    layout: BlockLayout
    codec: Codec
    store: ObjectStore

    def note_damaged(self, key: bytes, why: str) -> None:
        """A block did not verify."""
        ...

    def note_incomplete(self, key: bytes) -> None:
        """A block lacks a piece, because the store has evicted it or never had it."""
        ...

    def note_alive(self) -> None:
        """The plane has answered a ping. On a thread that must not wait."""
        ...


@dataclass(frozen=True)
class PoolLink:
    """Pieces are delivered into pages of this memory. until_closed: an engine's connection, of which the plane keeps
    a copy open until it writes into no page any more."""

    memory_fd: int
    num_pages: int
    until_closed: int


@dataclass(frozen=True)
class FrameLink:
    """Pieces are delivered as frames (frames.py) over a connected socket. key: of 32 bytes, with which the next
    frame, `number`, is authenticated."""

    fd: int
    key: bytes
    number: int


class Plane:
    """The data plane of one proxy, for all its sessions."""

    def __init__(self, settings: ProxySettings) -> None:
        """Raises StoreError if there is no C compiler, or no memory or threads for the settings."""
        settings.check_memory()
        self.num_slots = min(getattr(settings, f"{name}_buffer_bytes") for name in BUFFERS) // _SLOT_BYTES
        try:
            self._memory = SharedMemory.allocate(8 * len(_COUNTERS), "kvplane-counters")
        except OSError as error:
            raise StoreError(
                f"the offload proxy gets no shared memory ({error}): look at the limits of the process"
            ) from error
        self._counters = self._memory.memory.view(np.uint64)
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._sessions: dict[int, PlaneSession] = {}
        self._next_id = 1
        self._is_closing = False
        # Why the plane cannot work, once; "" if it can.
        self._configured: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start(settings.data_plane, theirs)
        except (OSError, subprocess.SubprocessError) as error:
            self._socket.close()
            reason = getattr(error, "stderr", None) or error
            raise StoreError(f"the remote tier's data plane cannot be compiled ({reason}): install gcc") from error
        self.send(_configuration(settings), _CONFIGURE, fds=[self._memory.fd])
        self._reader = threading.Thread(target=self._read, name="plane-events", daemon=True)
        self._reader.start()
        if why := self._configured.get():
            self.close()
            raise StoreError(f"the remote tier's data plane cannot start: {why}")

    def open(self, source: Source, link: PoolLink | FrameLink) -> PlaneSession:
        """Raises PlaneRefused."""
        with self._lock:
            session = self._sessions[self._next_id] = PlaneSession(self, self._next_id, source)
            self._next_id += 1
        try:
            session.begin(link)
        except BaseException:
            self.forget(session.id)
            raise
        return session

    def stats(self) -> dict[str, int]:
        """Totals since the start, and the current fill of rings and buffers. Bytes of receive are what came; of the
        other stages, what they gave. us: at work, without waits for a slot."""
        values = dict(zip(_COUNTERS, self._counters.tolist()))
        del values["is_reading"], values["receive_queue"]
        return values

    @property
    def is_reading(self) -> bool:
        """Whether a piece waits to be received, and may be."""
        return bool(self._counters[-1])

    @property
    def pid(self) -> int | None:
        """Of the program."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """End its threads or process, and free its buffers. After all sessions."""
        self._is_closing = True
        self._socket.shutdown(socket.SHUT_WR)
        self._reader.join()
        if self._process is not None:
            self._process.wait()
        # The descriptor is closed now, and not when the cycle of references is collected.
        del self._counters, self._memory

    # -- for sessions -----------------------------------------------------------------------------------------------

    def send(
        self, message: bytes | bytearray, kind: int, session: int | None = None, fds: Sequence[int] = ()
    ) -> None:
        ids = b"" if session is None else _ID.pack(session)
        parts = [_HEAD.pack(1 + len(ids) + len(message), kind) + ids, message]
        with self._send_lock:
            try:
                if not fds:
                    self._socket.sendall(b"".join(parts))
                    return
                sent = socket.send_fds(self._socket, parts, list(fds))
                self._socket.sendall(b"".join(parts)[sent:])
            except (BrokenPipeError, ConnectionResetError):
                self._ended()

    def forget(self, session: int) -> None:
        with self._lock:
            self._sessions.pop(session, None)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _start(self, kind: str, theirs: socket.socket) -> None:
        if kind == "process":
            with theirs:
                fd = theirs.fileno()
                program = kvplane.program()
                self._process = subprocess.Popen([program, str(fd)], stdin=subprocess.DEVNULL, pass_fds=(fd,))
            return
        kvplane.LIBRARY.function("kvplane_run")  # compiled here, where a failure is this call's
        threading.Thread(target=kvplane.run, args=(theirs.detach(),), name="plane", daemon=True).start()

    def _read(self) -> None:
        """Events. It sends nothing itself: else both sides could wait for each other."""
        try:
            self._take_events()
        except BaseException:
            logger.critical("the thread of the data plane's events died", exc_info=True)
        self._ended()

    def _take_events(self) -> None:
        with self._socket, self._socket.makefile("rb") as stream:
            while len(head := stream.read(_BEGIN.size)) == _BEGIN.size:
                size, kind, number = _BEGIN.unpack(head)
                body = stream.read(size - 1 - _ID.size)
                self._pass_on(number, kind, body)

    def _pass_on(self, number: int, kind: int, body: bytes) -> None:
        if number == _PLANE and kind == _OPENED:
            self._configured.put(body.decode())
            return
        # Not in the loop, which would keep a closed session, and its engine's memory, until the next event.
        with self._lock:
            session = self._sessions.get(number)
        if session is not None:
            session.take(kind, body)

    def _ended(self) -> None:
        if not self._is_closing:
            # A proxy without it would never answer.
            logger.critical("the data plane has ended")
            os._exit(1)


class PlaneSession:
    """One engine's fetches. Made by `Plane.open`."""

    def __init__(self, plane: Plane, id: int, source: Source) -> None:
        self._plane = plane
        self.id = id
        self._source = source
        self._connections = PieceConnections(source.store)
        self._opened: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # Held while a route is made and sent, so that a newer one follows.
        self._route_lock = threading.Lock()
        self._ends: dict[int, Callable[[int], None]] = {}
        # What asks the store, one after another: what became of blocks, redirected pieces, and ends of fetches behind
        # these, since an engine may store a block again when it has the answer.
        self._later: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._num_later = 0
        self._later_thread = threading.Thread(target=self._do_later, name="plane-later", daemon=True)
        self._buffer: np.ndarray | None = None

    def get(self, operation: int, keys: bytes, pages: bytes, on_end: Callable[[int], None]) -> None:
        """Fetch blocks. keys: 16 bytes each. pages: int32, of the pool, block after block; of frames none. on_end(how
        many of the leading blocks came) follows, from any thread; from then on nothing is written into the pages."""
        with self._lock:
            self._ends[operation] = on_end
        head = struct.pack("<QI", operation, len(keys) // KEY_BYTES)
        self._plane.send(b"".join((head, keys, pages)), _GET, self.id)

    def give_up(self, operation: int) -> None:
        """Begin no new piece of a fetch, and deliver no more; it ends soon."""
        self._plane.send(struct.pack("<Q", operation), _GIVE_UP, self.id)

    def ping(self) -> None:
        """`Source.note_alive` follows if the plane does its work."""
        self._plane.send(b"", _PING, self.id)

    def send(self, payload: bytes) -> None:
        """Send a message to an engine elsewhere soon, before data, in order."""
        self._plane.send(payload, _SEND, self.id)

    def close(self) -> None:
        """After the ends of all fetches. Messages to an engine elsewhere are sent first."""
        self._end_later()
        self._plane.send(b"", _CLOSE, self.id)
        self._closed.wait()
        self._plane.forget(self.id)
        self._connections.close()

    # -- for the plane ----------------------------------------------------------------------------------------------

    def begin(self, link: PoolLink | FrameLink) -> None:
        """Raises PlaneRefused."""
        try:
            # Now: the thread that reads the events cannot wait until one is left.
            self._later_thread.start()
        except RuntimeError as error:
            raise PlaneRefused(f"the proxy has no thread for it: {error}") from error
        try:
            self._open(link)
        except BaseException:
            self._end_later()
            raise

    def take(self, kind: int, body: bytes) -> None:
        """An event, on the thread that reads them, which must not wait."""
        if kind == _NEED:
            # A store that does not answer holds up only those who wait for it.
            try:
                threading.Thread(target=self._connect, args=_NEEDED.unpack(body), name="connect", daemon=True).start()
            except RuntimeError:  # no thread is left: others wait too
                self._do_soon(kind, body)
        elif kind == _FAILED:
            thread, node, how, error, has_answered = _FAILURE.unpack_from(body)
            text = body[_FAILURE.size :].decode("utf-8", "replace")
            self._connections.note_failed(thread, node, how, error, has_answered, text)
        elif kind == _OPENED:
            self._opened.put(body.decode())
        elif kind == _CLOSED:
            self._closed.set()
        elif kind == _PONG:
            self._source.note_alive()
        elif kind == _ENDED and not self._num_later:
            self._end(body)
        elif kind in (_ENDED, _BAD, _REDIRECT):
            self._do_soon(kind, body)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _end_later(self) -> None:
        self._later.put(None)
        self._later_thread.join()

    def _open(self, link: PoolLink | FrameLink) -> None:
        source, codec, layout = self._source, self._source.codec, self._source.layout
        store, shape = source.store, source.layout.page.kv_shape
        fds = [link.memory_fd, link.until_closed] if isinstance(link, PoolLink) else [link.fd]
        fields = _SESSION.pack(
            codec.codec_id,
            _CODERS[codec.coder_name],
            _DTYPES.get(layout.page.dtype, 0),
            layout.value_bytes,
            shape[1] if shape is not None else 0,
            codec.fingerprint,
            layout.block_bytes,
            layout.piece_bytes,
            layout.num_pieces,
            layout.page.page_bytes,
            link.num_pages if isinstance(link, PoolLink) else 0,
            layout.num_pages,
            store.pieces_ttl_s,
            store.timeout_s,
            bool(codec.mac_key),
            codec.mac_key,
            isinstance(link, FrameLink),
            link.key if isinstance(link, FrameLink) else b"",
            link.number if isinstance(link, FrameLink) else 0,
        )
        self._plane.send(fields + store.prefix, _OPEN, self.id, fds)
        if reason := self._opened.get():
            raise PlaneRefused(f"the proxy's data plane cannot serve it: {reason}")

    def _do_soon(self, kind: int, body: bytes) -> None:
        with self._lock:
            self._num_later += 1
        self._later.put((kind, body))

    def _connect(self, thread: int, hash_slot: int) -> None:
        try:
            node, connection = self._connections.connect(thread, hash_slot)
            with connection:
                self._send_route()
                self._plane.send(_NEEDED.pack(thread, node), _CONNECTED, self.id, [connection.fileno()])
        except Exception as failure:  # also of the system: a piece that waits for a connection gets an answer
            if not isinstance(failure, StoreFailure):
                logger.exception("the data plane gets no connection")
            self._plane.send(_NEEDED.pack(thread, 0), _CONNECTED, self.id)

    def _send_route(self) -> None:
        """If it is another one than before."""
        with self._route_lock:
            route = self._connections.changed_route()
            if route is not None:
                self._plane.send(bytes([route.is_cluster]) + route.node_of_slot, _ROUTES, self.id)

    def _do_later(self) -> None:
        work = {
            _ENDED: self._end,
            _BAD: self._note_bad,
            _REDIRECT: self._bring,
            _NEED: lambda body: self._connect(*_NEEDED.unpack(body)),
        }
        while (event := self._later.get()) is not None:
            kind, body = event
            try:
                work[kind](body)
            except Exception:
                logger.exception("what became of a block is not known")
            with self._lock:
                self._num_later -= 1

    def _end(self, body: bytes) -> None:
        operation, count, read, missing, size = _END.unpack(body)
        with self._lock:
            on_end = self._ends.pop(operation)
        self._source.store.count(read_pieces=read, missing_pieces=missing, read_bytes=size)
        on_end(count)

    def _note_bad(self, body: bytes) -> None:
        kind, key, text = body[0], body[1 : 1 + KEY_BYTES], body[1 + KEY_BYTES :].decode("utf-8", "replace")
        if kind == _REFUSED:
            self._note_refused(key, ErrorReply(text))
        elif kind == _DAMAGED:
            self._source.note_damaged(key, text)
        else:
            self._source.note_incomplete(key)

    def _note_refused(self, key: bytes, failure: StoreFailure) -> None:
        """A piece that the store does not give. It is a fault of the block only where it is no piece at all."""
        self._source.store.note_failure("reading a piece", failure)
        if isinstance(failure, ErrorReply) and failure.code == "WRONGTYPE":
            self._source.note_damaged(key, str(failure))

    def _bring(self, body: bytes) -> None:
        """A piece that a node does not have any more, or not yet."""
        _, _, index = _PLACE.unpack_from(body)
        key = body[_PLACE.size :]
        if self._buffer is None:
            self._buffer = np.empty(_SLOT_BYTES, np.uint8)
        layout, size = self._source.layout, None
        room = self._source.codec.max_stored_bytes(layout.raw_bytes(index))
        try:
            size = self._connections.follow(key, index, self._buffer.data[:room])
            self._send_route()
            if size is None:
                self._source.note_incomplete(key)
        except ValueTooLarge as failure:
            self._source.note_damaged(key, str(failure))
        except ErrorReply as failure:
            self._note_refused(key, failure)
        except StoreFailure:
            pass  # counted and logged
        finally:
            piece = b"" if size is None else self._buffer[:size].tobytes()
            self._plane.send(body[: _PLACE.size] + bytes([size is not None]) + piece, _BROUGHT, self.id)


def _configuration(settings: ProxySettings) -> bytes:
    def rate(gbps: float) -> float:
        return gbps * 1e9 / 8

    rates = settings.rates_gbps if settings.engine == "emulated" else {}
    numbers = [
        *(settings.threads(stage) for stage in STAGES),
        *(getattr(settings, f"{name}_buffer_bytes") // _SLOT_BYTES for name in BUFFERS),
        settings.window,
        settings.direct,
        settings.pipelined,
        settings.preallocated,
    ]
    speeds = [*(rate(rates.get(stage, 0)) for stage in STAGES), settings.poll_us * 1e-6, rate(settings.max_read_gbps)]
    packed = struct.pack(f"<{len(numbers)}I{len(speeds)}d", *numbers, *speeds)
    for stage in STAGES:
        cores = settings.cores.get(stage, [])
        packed += struct.pack(f"<I{len(cores)}H", len(cores), *cores)
    return packed
