"""Answers that take a while: server-sent events, clients that leave, several answers as one stream.

Every path out of a function here closes the generators that it was given. Closing them aborts their requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.utils.errors import RequestError

T = TypeVar("T")
Event = dict[str, Any]

DONE = b"data: [DONE]\n\n"
# Items of merged answers that are read before other clients have a turn.
_EVENTS_AT_ONCE = 64


def encode_event(event: Event) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def encode_named_event(event: Event) -> bytes:
    """Under the name of its type, as Anthropic's and OpenAI's newer streams have it."""
    return b"event: " + event["type"].encode() + b"\n" + encode_event(event)


@dataclass(frozen=True)
class StreamForm:
    """How an API writes its streams."""

    encode: Callable[[Event], bytes]
    # Behind the last event.
    end: bytes
    error: Callable[[RequestError], Event]


OPENAI_STREAM = StreamForm(encode_event, DONE, lambda error: {"error": error.body()})

logger = logging.getLogger(__name__)


async def merge(sources: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """(index of the source, item) as they come. The first error ends all sources."""
    if len(sources) == 1:
        try:
            async for item in sources[0]:
                yield 0, item
        finally:
            await close(sources[0])
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def drain(index: int, source: AsyncIterator[T]) -> None:
        try:
            async for item in source:
                queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
        finally:
            await close(source)

    tasks = [asyncio.create_task(drain(index, source)) for index, source in enumerate(sources)]
    try:
        left, taken = len(tasks), 0
        while left:
            event = await queue.get()
            taken += 1
            if taken % _EVENTS_AT_ONCE == 0:
                # A queue that is not empty never waits, and the reader may take long over each item.
                await asyncio.sleep(0)
            if event is None:
                left -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def close(source: AsyncIterator[Any]) -> None:
    if hasattr(source, "aclose"):
        await source.aclose()


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T | None:
    """The work's result; None once the client has left, after the work is cancelled."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. An error after the first event is an event too, because the status is
    sent."""

    media_type = "text/event-stream"

    def __init__(self, first: Event, rest: AsyncIterator[Event], form: StreamForm = OPENAI_STREAM) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        finally:
            await close(self._rest)

    async def _send(self, send: Send) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        form = self._form
        await body(form.encode(self._first))
        try:
            async for event in self._rest:
                await body(form.encode(event))
        except RequestError as error:
            await body(form.encode(form.error(error)))
        except Exception:
            logger.exception("a streamed answer failed")
            await body(form.encode(form.error(RequestError("internal error", 500))))
        await body(form.end, more=False)


async def answer(
    receive: Receive, events: AsyncIterator[Any], stream: bool, form: StreamForm = OPENAI_STREAM
) -> Response:
    """events: JSON values; exactly one unless `stream` is set. Raises the RequestError of an answer that fails before
    its first event."""
    first = await _first_event(receive, events)
    if first is None:
        return Response(status_code=499)
    if stream:
        return EventStream(first, events, form)
    await close(events)
    return Response(msgspec.json.encode(first), media_type="application/json")


async def _first_event(receive: Receive, events: AsyncIterator[Any]) -> Any:
    first: Callable[[], Awaitable[Any]] = events.__anext__
    try:
        event = await unless_disconnected(receive, first())
    except BaseException:
        await close(events)
        raise
    if event is None:
        await close(events)
    return event
