"""`RespConnection`: one connection to a server that speaks the Redis protocol (RESP2), for one thread.

Owns its transport and the operations in flight on it. A value's bytes are copied only once, between the socket, or
the decrypted record of TLS, and the caller's buffers. Knows no keys, blocks or clusters.

An endpoint that is the name of a master is looked up with the sentinels at each attempt to connect.

Each operation (one call of a method) ends within `timeout_s`, however slowly the server sends its bytes. Each failure
is a `StoreFailure`:

    StoreTimeout, StoreLost, StoreRefused   the connection is closed, and with it all that was in flight
    ErrorReply, ValueTooLarge               an answer; the connection goes on

The next use connects again. If that fails too, all uses fail at once for a time, at first BACKOFF_S, then twice as
long, up to MAX_BACKOFF_S. Therefore no caller waits for a store that is down, and no method sleeps.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from sglang.srt.offload.store.address import Endpoint, StoreAddress, is_host
from sglang.srt.offload.store.failures import (
    ErrorReply,
    PasswordMissing,
    StoreFailure,
    StoreLost,
    StoreRefused,
    StoreTimeout,
    ValueTooLarge,
)
from sglang.srt.offload.store.sentinel import MasterFinder
from sglang.srt.offload.store.tls import explain, no_tls_remedy, start_tls
from sglang.srt.offload.store.transport import PlainTransport, Transport

Arg: TypeAlias = bytes | str | int
Buffer: TypeAlias = bytes | bytearray | memoryview
Reply: TypeAlias = "bytes | int | list[Reply] | ErrorReply | None"

BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
# Redis' own limit for a value.
MAX_VALUE_BYTES = 512 << 20
# Limits of replies that are kept as Python objects: lists of keys and texts, no values.
_MAX_REPLY_BYTES = 64 << 20
_MAX_ELEMENTS = 1 << 20
_MAX_DEPTH = 8
_BUFFER_BYTES = 64 << 10
# Bytes that are read at once to find the length of a value. Bytes beyond the length's line are copied.
_HEADER_BYTES = 32
# The first bytes of a TLS alert. No reply of RESP begins so.
_TLS_ALERT = b"\x15\x03"
# First words of error replies that persist until a user changes something.
_REFUSALS = ("NOAUTH", "WRONGPASS", "NOPERM", "DENIED")


class RespConnection:
    """timeout_s: of each operation. name: what `CLIENT LIST` shows. clock: seconds, for the time between attempts.
    on_timeout: called with the endpoint when an operation has timed out.

    Several `send…` may be followed by as many `receive…`, in order. Not for two threads at a time.
    """

    def __init__(
        self,
        address: StoreAddress,
        timeout_s: float,
        endpoint: Endpoint | None = None,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
        on_timeout: Callable[[Endpoint], None] = lambda endpoint: None,
    ) -> None:
        assert timeout_s > 0
        self.endpoint = endpoint or address.endpoints[0]
        self.timeout_s = timeout_s
        # The number of replies that have not been received yet.
        self.pending = 0
        self._address = address
        self._name = name
        self._clock = clock
        self._on_timeout = on_timeout
        self._transport: Transport | None = None
        self._master_finder = MasterFinder(address, _ask_sentinel) if self.endpoint.master else None
        # The server, for messages. A master's host is known after it was looked up.
        self._where = str(self.endpoint)
        # The bytes from start to end were read and not used yet.
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0
        self._crlf = memoryview(bytearray(2))
        # Failures in a row since the last reply.
        self._failures = 0
        self._last_failure = ""
        self._not_before = -float("inf")

    # -- commands ---------------------------------------------------------------------------------------------------

    def call(self, *args: Arg) -> Reply:
        """Also raises ErrorReply."""
        reply = self.pipeline([args])[0]
        if isinstance(reply, ErrorReply):
            raise reply
        return reply

    def pipeline(self, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        """One round trip. An ErrorReply stands in its command's place. Use the methods below for large values."""
        assert not self.pending
        with self._operation() as deadline:
            self._send_commands(commands, deadline)
            return [self._receive(deadline) for _ in commands]

    def send(self, commands: Sequence[Sequence[Arg]]) -> None:
        with self._operation() as deadline:
            self._send_commands(commands, deadline)

    def receive(self) -> Reply:
        """The next reply; an ErrorReply is returned."""
        assert self.pending
        with self._operation() as deadline:
            return self._receive(deadline)

    def receive_all(self) -> list[Reply]:
        """All replies that are still outstanding, in one operation."""
        with self._operation() as deadline:
            return [self._receive(deadline) for _ in range(self.pending)]

    def refuse_sentinel(self) -> None:
        """Raises StoreRefused if the server is a sentinel, which stores nothing. A server that does not name its role
        is accepted, because a user may lack the right to ask."""
        try:
            role = self.call("ROLE")
        except StoreFailure:
            return
        if isinstance(role, list) and role[:1] == [b"sentinel"]:
            raise StoreRefused(
                f"{self._where} is a sentinel, which stores nothing: name the master too in the store's URL, as "
                f"{self._address.scheme}+sentinel://{self._where}/NAME, where NAME is the master's name in the "
                "sentinels' settings"
            )

    # -- values -----------------------------------------------------------------------------------------------------

    def send_get(self, key: bytes, ttl_s: int = 0) -> None:
        """ttl_s: the value lives so long from now on; 0: as before."""
        self.send([(b"GETEX", key, b"EX", ttl_s) if ttl_s else (b"GET", key)])

    def receive_into(self, buffer: memoryview) -> int | None:
        """Receive the value of an earlier send_get to the start of buffer. Returns its number of bytes; None if the
        key does not exist.

        buffer: contiguous bytes, writable. It is written up to the value's length; after a failure it may hold
        anything. Also raises ErrorReply and ValueTooLarge.
        """
        assert self.pending
        with self._operation() as deadline:
            line = self._line(deadline, _HEADER_BYTES)
            if line[:1] == b"-":
                error = self._error(line)
                self._answered()
                raise error
            if line[:1] != b"$":
                raise StoreLost(f"{self._where} answered {bytes(line[:20])!r} where a value should be")
            size = self._length(line, MAX_VALUE_BYTES)
            if size is None:
                self._answered()
                return None
            if size > len(buffer):
                self._skip(size, deadline)
                self._answered()
                raise ValueTooLarge(f"a value of {self._where} has {size} bytes, {len(buffer)} are expected at most")
            self._read_bulk(buffer[:size], deadline)
            self._answered()
            return size

    def send_set(self, key: bytes, parts: Sequence[Buffer], ttl_s: int = 0) -> None:
        """parts: the value's pieces, which are sent without a copy. They may change when this returns."""
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(map(len, views))
        tail = (b"PX", ttl_s * 1000) if ttl_s else ()
        head = b"*%d\r\n%b$%d\r\n" % (3 + len(tail), encode_args((b"SET", key)), size)
        with self._operation() as deadline:
            self._connect_if_needed(deadline)
            self.pending += 1
            self._send_all([memoryview(head), *views, memoryview(b"\r\n" + encode_args(tail))], deadline)

    def set(self, key: bytes, parts: Sequence[Buffer], ttl_s: int = 0) -> None:
        """Also raises ErrorReply."""
        self.send_set(key, parts, ttl_s)
        reply = self.receive()
        if isinstance(reply, ErrorReply):
            raise reply

    # -- connections that are given away ----------------------------------------------------------------------------

    def hand_over(self) -> socket.socket:
        """Connect, log in, and give the connection away: blocking, without TLS, and with nothing in flight. The next
        use connects again."""
        assert not self.pending
        with self._operation() as deadline:
            self._connect_if_needed(deadline)
        assert self._transport is not None
        transport, self._transport = self._transport, None
        return transport.as_plain_socket()

    def note_lost(self, failure: StoreFailure, has_answered: bool) -> None:
        """A connection that was handed over has failed. has_answered: after it had been of use."""
        if has_answered:
            self._failures = 0
        self._failed(failure)

    @property
    def where(self) -> str:
        """The server, for messages."""
        return self._where

    def close(self) -> None:
        """Forget the operations in flight. The next use connects again."""
        self.pending = 0
        self._start = self._end = 0
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # -- connecting -------------------------------------------------------------------------------------------------

    @contextmanager
    def _operation(self) -> Iterator[float]:
        """Yields the deadline. An error after which the position in the stream of replies is unknown closes the
        connection."""
        if self._transport is None and (wait_s := self._not_before - self._clock()) > 0:
            raise StoreLost(f"{self._last_failure} (the next attempt is in {wait_s:.1f} s)")
        try:
            yield time.monotonic() + self.timeout_s
        except (ErrorReply, ValueTooLarge):
            raise
        except StoreFailure as error:
            self._failed(error)
            raise
        except OSError as error:
            failure = self._failure_of(error)
            self._failed(failure)
            raise failure from None
        except BaseException:
            self.close()
            raise

    def _failed(self, error: StoreFailure) -> None:
        self.close()
        if isinstance(error, StoreTimeout):
            self._on_timeout(self.endpoint)
        self._failures += 1
        self._last_failure = str(error)
        # A restarted server may be up at once, so that the first attempt does not wait.
        if self._failures > 1:
            wait_s = min(BACKOFF_S * 2.0 ** min(self._failures - 2, 30), MAX_BACKOFF_S)
            self._not_before = self._clock() + wait_s

    def _answered(self) -> None:
        self.pending -= 1
        self._failures = 0

    def _failure_of(self, error: OSError) -> StoreFailure:
        if isinstance(error, TimeoutError):
            return StoreTimeout(f"{self._where} did not answer in full within {self.timeout_s:g} s")
        if isinstance(error, ssl.SSLError):
            return explain(error, self._where, self._address)
        advice = ""
        if isinstance(error, ConnectionRefusedError | FileNotFoundError | socket.gaierror):
            advice = ": start it, or correct the store's URL"
        return StoreLost(f"{self._where}: {error.strerror or error}{advice}")

    def _connect_if_needed(self, deadline: float) -> None:
        if self._transport is None:
            self._transport = self._open(deadline)
            self._greet(deadline)
        if not self.pending and self._start != self._end:
            raise StoreLost(f"{self._where} has sent more than was asked for: {self._sample()!r}")

    def _greet(self, deadline: float) -> None:
        """Log in, and check that this is the server that is meant."""
        hello: list[tuple[Arg, ...]] = [(b"PING",)]
        if self._master_finder is not None:
            hello.insert(0, (b"ROLE",))
        if self._address.db:
            hello.insert(0, (b"SELECT", self._address.db))
        if self._name:
            hello.insert(0, (b"CLIENT", b"SETNAME", self._name))
        if self._address.password:
            user = (self._address.user,) if self._address.user else ()
            hello.insert(0, (b"AUTH", *user, self._address.password))
        for command, reply in zip(hello, self._hello_replies(hello, deadline)):
            # A name is a comfort, and a user may lack the right to ask for the role.
            if isinstance(reply, ErrorReply) and command[0] not in (b"CLIENT", b"ROLE"):
                raise self._refusal(command[0], reply)
            if command[0] == b"ROLE" and isinstance(reply, list) and reply[:1] != [b"master"]:
                raise StoreLost(f"{self._where} is a replica: the sentinels have not agreed on a new master yet")
            if command[0] == b"PING" and reply != b"PONG":
                raise StoreLost(f"{self._where} answers PING with {reply!r:.40}: it is no Redis server")

    def _hello_replies(self, hello: Sequence[Sequence[Arg]], deadline: float) -> Iterator[Reply]:
        try:
            self._send_all([memoryview(b"".join(map(encode, hello)))], deadline)
            first = self._parse(deadline, 0, [0])
        except (StoreLost, ConnectionError):
            if self._end:
                raise
            raise StoreLost(f"{self._where} closed the connection before its first reply: {self._remedy()}") from None
        yield first
        try:
            for _ in hello[1:]:
                yield self._parse(deadline, 0, [0])
        except (StoreLost, ConnectionError):
            if not isinstance(first, ErrorReply):
                raise
            raise StoreLost(f"{self._where} closed the connection after its reply: {first}") from None

    def _remedy(self) -> str:
        """For a server that closes the connection without a word."""
        if self._address.tls is None:
            return "if it speaks TLS, write rediss:// in place of redis:// in the store's URL"
        if not self._address.tls.cert:
            return "perhaps it wants a client certificate: name it in the store's URL with cert= and key="
        return "its log may say why"

    def _open(self, deadline: float) -> Transport:
        server = self.endpoint
        if self._master_finder is not None:
            server = self._master_finder.find(self.endpoint.master, deadline)
            self._where = f"the master {self.endpoint.master} at {server}"
        connection = self._connect(server, deadline)
        if self._address.tls is None:
            return PlainTransport(connection)
        try:
            return start_tls(connection, server.host, self._address.tls, deadline)
        except TimeoutError:
            raise StoreTimeout(
                f"{self._where} did not finish the handshake of TLS within {self.timeout_s:g} s: "
                f"if it speaks no TLS, {no_tls_remedy()}"
            ) from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError):
            raise StoreLost(
                f"{self._where} closed the connection within the handshake of TLS: if it speaks no TLS, "
                f"{no_tls_remedy()}"
            ) from None

    def _connect(self, server: Endpoint, deadline: float) -> socket.socket:
        """A socket that is connected, and blocking from now on."""
        failure: Exception | None = None
        targets = _targets(server)
        for i, (family, target) in enumerate(targets):
            # An address that is silent leaves time for the others.
            left_s = (deadline - time.monotonic()) / (len(targets) - i)
            if left_s <= 0:
                break
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.settimeout(left_s)
                connection.connect(target)
                connection.settimeout(None)
                if family != socket.AF_UNIX:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
            except OSError as error:
                connection.close()
                failure = error
        if failure is None or isinstance(failure, TimeoutError):
            raise StoreTimeout(f"{self._where} did not take a connection within {self.timeout_s:g} s")
        raise failure

    def _refusal(self, command: Arg, reply: ErrorReply) -> StoreFailure:
        # A server that does not know AUTH quotes its arguments.
        text = str(reply).replace(self._address.password, "***") if self._address.password else str(reply)
        if reply.code == "NOAUTH":
            return PasswordMissing(f"{self._where} wants a password: put it into the store's URL, as :password@host")
        if command == b"AUTH":
            return StoreRefused(
                f"{self._where} does not accept the user and password of the store's URL ({text}): correct them, "
                "or leave them out if it has none"
            )
        if command == b"SELECT" and reply.code == "NOPERM":
            return StoreRefused(
                f"{self._where} does not let this user select database {self._address.db} ({text}): allow the "
                "command select (+select), or leave the database out of the store's URL"
            )
        if command == b"SELECT":
            return StoreRefused(f"{self._where} does not have database {self._address.db} ({text}): leave it out")
        if reply.code in _REFUSALS:
            return StoreRefused(f"{self._where} refuses this client ({text}): allow it in the server's settings")
        return StoreLost(f"{self._where} is not ready: {text}")

    # -- bytes out --------------------------------------------------------------------------------------------------

    def _send_commands(self, commands: Sequence[Sequence[Arg]], deadline: float) -> None:
        self._connect_if_needed(deadline)
        self.pending += len(commands)
        self._send_all([memoryview(b"".join(map(encode, commands)))], deadline)

    def _send_all(self, views: list[memoryview], deadline: float) -> None:
        assert self._transport is not None
        self._transport.send_all(views, deadline)

    # -- bytes in ---------------------------------------------------------------------------------------------------

    def _receive(self, deadline: float) -> Reply:
        reply = self._parse(deadline, 0, [0])
        self._answered()
        return reply

    def _parse(self, deadline: float, depth: int, used: list[int]) -> Reply:
        """One reply. used: its bytes and elements so far. They are limited, so that one reply cannot take all
        memory."""
        line = self._line(deadline, _BUFFER_BYTES)
        kind, text = line[:1], line[1:]
        used[0] += len(line)
        if used[0] > _MAX_REPLY_BYTES:
            raise StoreLost(f"{self._where} sends a reply of more than {_MAX_REPLY_BYTES} bytes")
        if kind == b"+":
            return bytes(text)
        if kind == b"-":
            return self._error(line)
        if kind == b":":
            return self._integer(text)
        if kind == b"$":
            size = self._length(line, _MAX_REPLY_BYTES - used[0])
            if size is None:
                return None
            used[0] += size
            value = bytearray(size)
            self._read_bulk(memoryview(value), deadline)
            return bytes(value)
        if kind == b"*":
            count = self._length(line, _MAX_ELEMENTS)
            if count is None:
                return None
            if depth == _MAX_DEPTH:
                raise StoreLost(f"{self._where} sends lists within lists, {_MAX_DEPTH} deep")
            return [self._parse(deadline, depth + 1, used) for _ in range(count)]
        raise StoreLost(f"{self._where} speaks another protocol: it sent {bytes(line[:20])!r}")

    def _line(self, deadline: float, read_bytes: int) -> bytearray:
        """The bytes up to the next CRLF. read_bytes: how many bytes to read at once if none are buffered."""
        while True:
            start, size = self._start, self._end - self._start
            end = self._bytes.find(b"\r\n", start, self._end)
            if end > start:
                self._start = end + 2
                return self._bytes[start:end]
            if self._bytes[start : start + 2] == _TLS_ALERT:
                raise StoreLost(f"{self._where} speaks TLS: write rediss:// in place of redis:// in the store's URL")
            if end == start or size == _BUFFER_BYTES:
                raise StoreLost(f"{self._where} speaks another protocol: it sent {self._sample()!r}")
            # The rest of a line moves to the front.
            self._bytes[:size] = self._bytes[start : self._end]
            self._start, self._end = 0, size
            self._end += self._recv([self._buffer[size : size + read_bytes]], deadline)

    def _error(self, line: bytearray) -> ErrorReply:
        """Raises StoreLost where the reply shows that another server is the master now."""
        error = ErrorReply(line[1:].decode("utf-8", "replace"))
        if error.code == "READONLY" and self._master_finder is not None:
            raise StoreLost(f"{self._where} is a replica now: the sentinels are asked again")
        return error

    def _sample(self) -> bytes:
        return bytes(self._buffer[self._start : self._end][:20])

    def _integer(self, text: bytearray) -> int:
        digits = text[1:] if text[:1] == b"-" else text
        if not digits.isdigit() or len(digits) > 19:
            raise StoreLost(f"{self._where} speaks another protocol: it sent {bytes(text[:20])!r} as a number")
        return int(text)

    def _length(self, line: bytearray, limit: int) -> int | None:
        size = self._integer(line[1:])
        if size == -1:
            return None
        if not 0 <= size <= limit:
            raise StoreLost(f"{self._where} announces {size} bytes or elements, outside of 0 to {limit}")
        return size

    def _read_bulk(self, out: memoryview, deadline: float) -> None:
        """Fill `out`, and read the CRLF after it."""
        here = min(len(out), self._end - self._start)
        out[:here] = self._buffer[self._start : self._start + here]
        self._start += here
        crlf = min(2, self._end - self._start) if here == len(out) else 0
        self._crlf[:crlf] = self._buffer[self._start : self._start + crlf]
        self._start += crlf
        rest, ending = out[here:], self._crlf[crlf:]
        while len(rest) or len(ending):
            count = self._recv([rest, ending], deadline, wait_all=True)
            in_rest = min(count, len(rest))
            rest, ending = rest[in_rest:], ending[count - in_rest :]
        if self._crlf != b"\r\n":
            raise StoreLost(f"{self._where} sent a value that is longer than the announced length")

    def _skip(self, size: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(size, 1 << 20)))
        here = min(size, self._end - self._start)
        self._start += here
        size -= here
        while size > len(scratch):
            size -= self._recv([scratch], deadline, wait_all=True)
        self._read_bulk(scratch[:size], deadline)

    def _recv(self, buffers: list[memoryview], deadline: float, wait_all: bool = False) -> int:
        assert self._transport is not None
        count = self._transport.recv_into(buffers, deadline, wait_all)
        if not count:
            raise StoreLost(f"{self._where} closed the connection")
        return count


def _targets(server: Endpoint) -> list[tuple[socket.AddressFamily, tuple | str]]:
    if server.path:
        return [(socket.AF_UNIX, server.path)]
    if not is_host(server.host):
        raise StoreLost(f"{server} cannot be looked up: this is no name of a host; correct it")
    found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    return [(family, target) for family, _, _, _, target in found]


def _ask_sentinel(address: StoreAddress, sentinel: Endpoint, timeout_s: float, command: Sequence[Arg]) -> Reply:
    connection = RespConnection(address, timeout_s, sentinel)
    try:
        return connection.call(*command)
    finally:
        connection.close()


def encode(args: Sequence[Arg]) -> bytes:
    return b"*%d\r\n%b" % (len(args), encode_args(args))


def encode_args(args: Sequence[Arg]) -> bytes:
    raws = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
    return b"".join([b"$%d\r\n%b\r\n" % (len(raw), raw) for raw in raws])
