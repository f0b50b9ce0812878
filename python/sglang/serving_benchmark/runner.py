"""Sends the sessions of a workload at their times and records every request.

session: wait for its start ──► turn: wait, render ──► at most max_concurrency ──► send, read ──► record
                                  ▲                                                              │
                                  └────────────── its text joins the history ────────────────────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import orjson

from sglang.serving_benchmark.backends import DONE, AnswerError, Ask, Backend, Settings, error_message
from sglang.serving_benchmark.http_stream import EventReader, HttpError, Reply, Server, send
from sglang.serving_benchmark.records import RequestRecord
from sglang.serving_benchmark.vocabulary import Vocabulary
from sglang.serving_benchmark.workload import Message, Session, Workload

_MAX_REASON = 300


@dataclass(frozen=True)
class Target:
    """Whom to ask, and how."""

    server: Server
    backend: Backend
    settings: Settings
    # Send token ids in place of texts.
    sends_ids: bool = False
    # Put a text through the model's chat template.
    applies_template: bool = False


@dataclass
class Outcome:
    records: list[RequestRecord] = field(default_factory=list)
    # From the first session's start to the end of the last request.
    duration_s: float = 0.0
    # Turns that were not sent because one before them in their session failed.
    num_not_sent: int = 0
    # Requests that an interrupt or the time limit cut off, or kept from being sent.
    num_unfinished: int = 0
    # CPU seconds of this process meanwhile.
    cpu_s: float = 0.0


class History:
    """What a session's next prompt begins with, in the form that the backend takes."""

    def __init__(self, target: Target, vocabulary: Vocabulary, salt: int) -> None:
        self._target = target
        self._vocabulary = vocabulary
        self._salt = salt
        self._messages: list[dict[str, str]] = []
        self._text = ""
        self._ids: list[int] = []

    def add_question(self, *parts: Message) -> None:
        if self._target.sends_ids:
            self._ids += [i for part in parts for i in part.ids_in(self._vocabulary, self._salt)]
            return
        text = "".join(part.text_in(self._vocabulary, self._salt) for part in parts)
        self._messages.append({"role": "user", "content": text})
        self._text += text

    def add_answer(self, record: RequestRecord) -> None:
        self._messages.append({"role": "assistant", "content": record.text})
        self._text += record.text
        if self._target.sends_ids:
            known = record.output_ids
            self._ids += self._vocabulary.encode(record.text) if known is None else known

    def prompt(self) -> str | list[int] | list[dict[str, str]]:
        if self._target.backend.is_chat:
            return list(self._messages)
        if self._target.sends_ids:
            return list(self._ids)
        if self._target.applies_template:
            return self._vocabulary.apply_chat_template(self._messages)
        return self._text


class Runner:
    """salt: of the texts that are made up. max_duration_s: a run is cut off then; None: it ends by itself. on_end:
    called with every record that is complete."""

    def __init__(
        self,
        target: Target,
        vocabulary: Vocabulary,
        *,
        max_concurrency: int | None = None,
        max_duration_s: float | None = None,
        salt: int = 0,
        on_end: Callable[[RequestRecord], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target = target
        self._vocabulary = vocabulary
        self._max_concurrency = max_concurrency
        self._max_duration_s = max_duration_s
        self._salt = salt
        self._on_end = on_end
        self._clock = clock

    async def run(self, workload: Workload, starts: Sequence[float], stop: asyncio.Event | None = None) -> Outcome:
        """starts: seconds from now, of each session. stop: when it is set, requests under way are cut off."""
        outcome = Outcome()
        slots = asyncio.Semaphore(self._max_concurrency) if self._max_concurrency else None
        begun, cpu = self._clock(), time.process_time()
        tasks = [
            asyncio.create_task(self._session(session, begun + start, slots, outcome))
            for session, start in zip(workload.sessions, starts, strict=True)
        ]
        everything = asyncio.create_task(asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))
        stopped = asyncio.create_task((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait(
                (everything, stopped), timeout=self._max_duration_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (*tasks, everything, stopped):
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        outcome.duration_s = self._clock() - begun
        outcome.cpu_s = time.process_time() - cpu
        outcome.num_unfinished = workload.num_requests - len(outcome.records) - outcome.num_not_sent
        return outcome

    async def ask_once(self, message: Message, output_len: int) -> RequestRecord:
        """One request by itself, as for a warm-up."""
        history = History(self._target, self._vocabulary, self._salt)
        history.add_question(message)
        return await send_ask(self._target, Ask(history.prompt(), output_len), message.num_tokens, self._clock)

    async def _session(
        self, session: Session, start_at: float, slots: asyncio.Semaphore | None, outcome: Outcome
    ) -> None:
        history = History(self._target, self._vocabulary, self._salt)
        prompt_len = 0
        await asyncio.sleep(max(0.0, start_at - self._clock()))
        for number, turn in enumerate(session.turns):
            if turn.delay_s:
                await asyncio.sleep(turn.delay_s)
            async with AsyncExitStack() as stack:
                if slots is not None:
                    await stack.enter_async_context(slots)
                parts = [turn.message] if number or session.context is None else [session.context, turn.message]
                history.add_question(*parts)
                prompt_len += sum(part.num_tokens for part in parts)
                record = await send_ask(self._target, Ask(history.prompt(), turn.output_len), prompt_len, self._clock)
            outcome.records.append(record)
            self._on_end(record)
            if not record.has_succeeded:
                outcome.num_not_sent += len(session.turns) - number - 1
                return
            prompt_len += record.output_len
            history.add_answer(record)


async def send_ask(
    target: Target, ask: Ask, prompt_len: int, clock: Callable[[], float] = time.perf_counter
) -> RequestRecord:
    """Send one request and read its answer to the end. A failure stands in the record."""
    body = orjson.dumps(target.backend.request_body(ask, target.settings))
    record = RequestRecord(prompt_len, clock())
    try:
        timeout = asyncio.timeout(target.settings.timeout_s)
        async with timeout, send(target.server, "POST", target.backend.path, body) as reply:
            if reply.status != 200:
                record.error = _refusal(reply.status, await reply.read())
            elif target.settings.stream:
                await _read_stream(target.backend, reply, record, clock)
            else:
                record.add(target.backend.read(_parsed(await reply.read()), ""), None)
    except TimeoutError:
        record.error = f"no whole answer within {target.settings.timeout_s:g} s (--request-timeout-sec)"
    except HttpError as error:
        record.error = str(error)
    except AnswerError as error:
        record.error = str(error)[:_MAX_REASON]
    record.finish(clock())
    return record


async def _read_stream(backend: Backend, reply: Reply, record: RequestRecord, clock: Callable[[], float]) -> None:
    """Raises `HttpError` or `AnswerError`."""
    events = EventReader()
    is_done = False
    async for piece in reply.pieces():
        now = clock()
        for data in events.feed(piece):
            if data == DONE:
                is_done = True
            else:
                record.add(backend.read(_parsed(data), record.text), now)
    if not is_done:
        raise HttpError("the stream ended without [DONE]")


def _parsed(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        raise AnswerError("an answer that is not JSON") from None


def _refusal(status: int, content: bytes) -> str:
    try:
        reason = error_message(orjson.loads(content))
    except orjson.JSONDecodeError:
        reason = None
    return f"HTTP {status}: {reason}"[:_MAX_REASON] if reason else f"HTTP {status}"
