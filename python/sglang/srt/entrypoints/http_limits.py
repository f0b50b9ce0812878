"""What one client may cost the HTTP server: bytes and seconds, before a route sees the request.

Owns the count of bytes that are being received, and a deadline per connection. Knows no route and no model.

    connect --head within HEAD_TIMEOUT_S--> request --body within BODY_TIMEOUT_S and MAX_BODY_BYTES--> route -> reply
       ^                                                                                                         |
       +------------------------------- KEEP_ALIVE_S, then HEAD_TIMEOUT_S from here -----------------------------+

A head that misses its deadline ends the connection. A body that misses its deadline ends the request with 408. The
kernel deals with a client that does not read its reply: READ_TIMEOUT_S is set on the listening socket, and
connections inherit it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from types import TracebackType
from typing import Any

import h11
import msgspec
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang.srt.entrypoints.error_bodies import error_body
from sglang.srt.utils.errors import RequestError

# A prompt of a million tokens has some 8 MB as ids, and less as text.
MAX_BODY_BYTES = 16 << 20
# For all bodies together that have not arrived in whole yet.
MAX_INCOMING_BYTES = 1 << 30
# From the request line to the empty line.
MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 60.0
KEEP_ALIVE_S = 5
READ_TIMEOUT_S = 60

_SITE_PACKAGES = str(Path(h11.__file__).parents[1])

logger = logging.getLogger(__name__)


def limit_unread_replies(listener: socket.socket) -> None:
    """End connections whose client acknowledges or reads nothing, where the kernel can."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, READ_TIMEOUT_S * 1000)


class Front:
    """Wraps the whole application: counts the bytes of bodies, and handles the errors that nothing else handled."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.incoming_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        body = _Body(self, scope, receive)
        try:
            await self._app(scope, body.receive, send_)
        except asyncio.CancelledError:  # uvicorn cancels requests when the drain is over
            if not started:
                error = RequestError("the server is shutting down", 503)
                await JSONResponse(error_body(scope["path"], error), 503, error.headers())(scope, receive, send)
        except Exception as error:
            # A bug. The client has its answer; log it once, from the first of our frames on.
            error.__traceback__ = _without_libraries(error.__traceback__)
            logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
        finally:
            body.release()


class _Body:
    """One request's body while it arrives. Raises RequestError to its reader."""

    def __init__(self, front: Front, scope: Scope, receive: Receive) -> None:
        self._front = front
        self._receive = receive
        length = Headers(scope=scope).get("content-length", "")
        self._announced = int(length) if length.isdecimal() else 0
        self._size = 0
        self._whole = False
        self._deadline: float | None = None

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        self._check_size(self._announced)
        self._deadline = self._deadline or asyncio.get_running_loop().time() + BODY_TIMEOUT_S
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise RequestError(f"the body did not come within {BODY_TIMEOUT_S:g} s", 408) from None
        if message["type"] == "http.disconnect":
            raise RequestError("the client left before its request was complete", 499)
        size = len(message.get("body", b""))
        self._size += size
        self._front.incoming_bytes += size
        if not message.get("more_body", False):
            self._whole = True
            self.release()
        self._check_size(self._size)
        if self._front.incoming_bytes > MAX_INCOMING_BYTES:
            raise RequestError("too many large requests are coming in at once: try again later", 503)
        return message

    def _check_size(self, size: int) -> None:
        if size > MAX_BODY_BYTES:
            raise RequestError(
                f"the body is over {MAX_BODY_BYTES >> 20} MiB, the most that one request may have", 413
            )

    def release(self) -> None:
        self._front.incoming_bytes -= self._size
        self._size = 0


def _without_libraries(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is neither this file's nor a library's; all of it if there is none."""
    rest = traceback
    while rest is not None:
        name = rest.tb_frame.f_code.co_filename
        if name != __file__ and not name.startswith(_SITE_PACKAGES):
            return rest
        rest = rest.tb_next
    return traceback


class _Connection(h11.Connection):
    """h11 limits a head only while it is incomplete. One that arrives whole may have any size."""

    def next_event(self) -> Any:
        if self.their_state is not h11.IDLE:
            return super().next_event()
        size = len(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request) and size - len(self.trailing_data[0]) > MAX_HEAD_BYTES:
            raise h11.RemoteProtocolError("the head is too long", error_status_hint=431)
        return event


class LimitedProtocol(H11Protocol):
    """A connection with a deadline for the next request's head. uvicorn's own timer ends with the first byte, so that
    a client could keep a connection for ever by sending a byte now and then. The rest of a refused body has the same
    deadline."""

    _head_deadline: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Connection(h11.SERVER, MAX_HEAD_BYTES)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_deadline is not None and self.cycle is not None and not self.cycle.response_complete:
            self._head_deadline.cancel()
            self._head_deadline = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next request has come already
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
        self._head_deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._close)

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, in the shape of all errors. Within a reply that has begun, send nothing."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(RequestError("this is no valid HTTP/1.1 request").body())
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason="Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self._close()
