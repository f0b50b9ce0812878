"""What is asked of each server, and what is measured of it. Owns no process; talks to a URL.

Every prompt is token ids, so that all servers compute the same. A number in a prompt's salt makes its first tokens
its own: nothing is cached that is not meant to be.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang.serving_benchmark.backends import BACKENDS, Ask, Settings
from sglang.serving_benchmark.http_stream import Server
from sglang.serving_benchmark.records import RequestRecord
from sglang.serving_benchmark.runner import Target, send_ask

# Ids of ordinary words.
FIRST_ID, LAST_ID = 1000, 40000


class Prompts:
    """Random prompts, the same in every run and for every server."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def text(self, length: int) -> list[int]:
        return self._rng.integers(FIRST_ID, LAST_ID, length).tolist()


class RequestError(RuntimeError):
    """A request failed; the message is the reason."""


@dataclass(frozen=True)
class Asking:
    """How prompts are sent."""

    url: str
    model: str
    # Tokens of each answer.
    num_tokens: int
    # Prompts under way at a time.
    at_once: int
    # Called when a request begins: the seconds that it may take.
    limit_s: Callable[[], float]


def ask_all(asking: Asking, prompts: Sequence[Sequence[int]]) -> list[RequestRecord]:
    """All prompts, in order. The first that fails ends it, with `RequestError`."""
    server = Server.from_url(asking.url, {})

    async def run() -> list[RequestRecord]:
        limit = asyncio.Semaphore(asking.at_once)

        async def one(prompt: Sequence[int]) -> RequestRecord:
            async with limit:
                settings = Settings(asking.model, timeout_s=asking.limit_s())
                ask = Ask(prompt, asking.num_tokens)
                record = await send_ask(Target(server, BACKENDS["vllm"], settings), ask, len(prompt))
            if record.error is not None:
                # The client's flag, which this program does not have.
                raise RequestError(record.error.removesuffix(" (--request-timeout-sec)"))
            if record.output_len != asking.num_tokens:
                raise RequestError(f"{record.output_len} tokens came, {asking.num_tokens} were asked for")
            return record

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    return asyncio.run(run())


def first_token_s(record: RequestRecord) -> float:
    assert record.ttft_s is not None, "the answer has no text"
    return record.ttft_s


def cached_share(records: Sequence[RequestRecord]) -> float | None:
    """Of the prompts' tokens, those that were cached. None if the server does not report them."""
    cached = [record.cached_tokens for record in records if record.cached_tokens is not None]
    return sum(cached) / sum(record.prompt_len for record in records) if len(cached) == len(records) else None


def decode_step_s(records: Sequence[RequestRecord]) -> float:
    """Seconds of a step with all requests running: between the last first token and the first last token, the median
    over requests of the mean step."""
    times = [record.start_s + np.cumsum([first_token_s(record), *record.itl_s]) for record in records]
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    inside = [each[(each >= begin) & (each <= end)] for each in times]
    return statistics.median((each[-1] - each[0]) / (len(each) - 1) for each in inside if len(each) > 1)
