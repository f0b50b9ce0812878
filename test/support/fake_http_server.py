"""A server that answers with exactly the bytes that a test gives it, cut where the test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sglang.serving_benchmark.http_stream import Server

Write = Callable[[bytes], Awaitable[None]]


def event(content: Any) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def chunked(body: bytes, size: int) -> bytes:
    """As a chunked body, in pieces of so many bytes."""
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x;x=y\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def stream_of(events: Sequence[Any], size: int = 7, end: bytes = b"0\r\nx-trailer: 1\r\n\r\n") -> bytes:
    """A reply of server-sent events, then [DONE]."""
    body = b": a comment\n\n" + b"".join(map(event, [*events, b"[DONE]"]))
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(body, size) + end


def reply_of(content: Any, status: str = "200 OK") -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class FakeServer:
    """answer: the bytes for a request (path, body). requests: the ones that came. cut: of how many bytes it sends at
    a time."""

    def __init__(self, answer: Callable[[str, Any], bytes], cut: int = 1 << 20) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[str] = []
        self.num_open = 0
        self.most_open = 0
        self._answer = answer
        self._cut = cut

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield Server("127.0.0.1", server.sockets[0].getsockname()[1], headers={"Authorization": "Bearer k"})
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(h.split(":")[1]) for h in head.split("\r\n") if h.startswith("Content-Length")), 0)
            body = await reader.readexactly(length)
            path = head.split()[1]
            self.headers.append(head)
            self.requests.append((path, json.loads(body) if body else None))
            answer = self._answer(*self.requests[-1])
            for i in range(0, len(answer), self._cut):
                writer.write(answer[i : i + self._cut])
                await writer.drain()
                await asyncio.sleep(0)
        finally:
            self.num_open -= 1
            writer.close()
