"""What is asked of each server, and what is measured of it. Owns no process; talks to a URL.

Every prompt is token ids, so that all servers compute the same. A number in a prompt's salt makes its first tokens
its own: nothing is cached that is not meant to be.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

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


def ask_all(
    url: str, model: str, prompts: Sequence[Sequence[int]], num_tokens: int, at_once: int
) -> list[RequestRecord]:
    """All prompts, at_once of them under way at a time, in order. Raises RuntimeError if one fails."""
    target = Target(Server.from_url(url, {}), BACKENDS["vllm"], Settings(model))

    async def run() -> list[RequestRecord]:
        limit = asyncio.Semaphore(at_once)

        async def one(prompt: Sequence[int]) -> RequestRecord:
            async with limit:
                return await send_ask(target, Ask(prompt, num_tokens), len(prompt))

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    records = asyncio.run(run())
    for record in records:
        if record.error is not None or record.output_len != num_tokens:
            raise RuntimeError(record.error or f"{record.output_len} tokens came, {num_tokens} were asked for")
    return records


def first_token_s(record: RequestRecord) -> float:
    assert record.ttft_s is not None, "the answer has no text"
    return record.ttft_s


def decode_step_s(records: Sequence[RequestRecord]) -> float:
    """Seconds of a step with all requests running: between the last first token and the first last token, the median
    over requests of the mean step."""
    times = [record.start_s + np.cumsum([first_token_s(record), *record.itl_s]) for record in records]
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    inside = [each[(each >= begin) & (each <= end)] for each in times]
    return statistics.median((each[-1] - each[0]) / (len(each) - 1) for each in inside if len(each) > 1)
