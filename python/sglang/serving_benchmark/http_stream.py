"""Requests over HTTP/1.1 whose replies are read piece by piece, and server-sent events out of the pieces.

A connection of its own per request, on asyncio's streams. What the client computes adds to the latencies that it
measures. An event of a stream takes less than half of the CPU time that it takes with httpx
(docs/records/measurements.md).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from sglang.srt.utils.api_key import KEY_RULE, is_key

# Of one line of a reply's head or of a chunk's size.
_MAX_LINE = 1 << 20


def key_header(key: str | None) -> dict[str, str]:
    """The header of a server's key; none for no key. Raises ValueError with the end of a sentence; the key, which is
    secret, does not stand in it."""
    if not key:
        return {}
    if not is_key(key):
        raise ValueError(f"must be {KEY_RULE}")
    return {"Authorization": f"Bearer {key}"}


class HttpError(Exception):
    """No whole reply came; the message is a short reason that is equal for equal failures."""


@dataclass(frozen=True)
class Server:
    """The address of a server."""

    host: str
    port: int
    # Stands before every path, without a slash at its end.
    base_path: str = ""
    uses_tls: bool = False
    # Of every request, as for a key.
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_url(cls, url: str, headers: Mapping[str, str]) -> Server:
        """Raises ValueError if url is none of HTTP."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server, such as http://127.0.0.1:30000")
        uses_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if uses_tls else 80), path, uses_tls, headers)

    @property
    def authority(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http{'s' if self.uses_tls else ''}://{self.authority}{self.base_path}"


class Reply:
    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        """headers: their names in lower case."""
        self.status = status
        self._headers = headers
        self._reader = reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `HttpError` if the connection ends before it."""
        if "chunked" in self._headers.get("transfer-encoding", "").lower():
            while size := await self._chunk_size():
                piece = await self._reader.readexactly(size + 2)
                yield piece[:-2]
            while (await self._reader.readline()).strip():  # trailers
                pass
        elif (length := self._headers.get("content-length")) is not None:
            yield await self._reader.readexactly(int(length))
        else:
            while piece := await self._reader.read(1 << 16):
                yield piece

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def _chunk_size(self) -> int:
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise HttpError("the server closed the connection in the middle of the answer")
        return int(line.split(b";")[0], 16)


@asynccontextmanager
async def send(server: Server, method: str, path: str, body: bytes | None = None) -> AsyncIterator[Reply]:
    """Send a request; what is inside reads the reply. Raises `HttpError`."""
    writer: asyncio.StreamWriter | None = None
    try:
        context = ssl.create_default_context() if server.uses_tls else None
        reader, writer = await asyncio.open_connection(server.host, server.port, ssl=context, limit=_MAX_LINE)
        writer.write(_head(server, method, path, body) + (body or b""))
        await writer.drain()
        yield await _begin(reader)
    except asyncio.IncompleteReadError:
        raise HttpError("the server closed the connection in the middle of the answer") from None
    except (ConnectionRefusedError, TimeoutError):
        raise HttpError(f"nothing answers at {server.url}") from None
    except (ConnectionError, BrokenPipeError):
        raise HttpError("the server closed the connection") from None
    except OSError as error:  # names that do not resolve, certificates, no free file descriptors
        raise HttpError(f"no connection to {server.url}: {error.strerror or error}") from None
    except ValueError:
        raise HttpError("what answers does not speak HTTP") from None
    finally:
        if writer is not None:
            writer.close()
            with suppress(Exception):  # the connection may be broken already
                writer.transport.abort()


async def send_json(
    server: Server, method: str, path: str, timeout_s: float = 30.0, body: bytes | None = None
) -> tuple[int, Any]:
    """(status, the reply's JSON; None if it is none). Raises `HttpError`."""
    try:
        async with asyncio.timeout(timeout_s), send(server, method, path, body) as reply:
            content = await reply.read()
            try:
                return reply.status, orjson.loads(content)
            except orjson.JSONDecodeError:
                return reply.status, None
    except TimeoutError:
        raise HttpError(f"{server.url}{path} did not answer within {timeout_s:g} s") from None


def _head(server: Server, method: str, path: str, body: bytes | None) -> bytes:
    lines = [f"{method} {server.base_path}{path} HTTP/1.1", f"Host: {server.authority}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in server.headers.items()]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode()


async def _begin(reader: asyncio.StreamReader) -> Reply:
    """The reply's head."""
    while True:
        line = (await reader.readline()).split(None, 2)
        if not line:
            raise HttpError("the server closed the connection without an answer")
        if len(line) < 2 or not line[0].startswith(b"HTTP/1."):
            raise HttpError("what answers does not speak HTTP")
        headers: dict[str, str] = {}
        while text := (await reader.readline()).decode("latin-1").strip():
            name, _, value = text.partition(":")
            headers[name.strip().lower()] = value.strip()
        status = int(line[1])
        if status >= 200:  # before it come 100 and its kind
            return Reply(status, headers, reader)


class EventReader:
    """Cuts a stream into the data of its events, wherever the pieces are cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the lines that are whole now. Comments and other fields are left out."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
