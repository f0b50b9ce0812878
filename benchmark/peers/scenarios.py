"""What is asked of each server, and what is measured of it. Owns no process; talks to a URL.

Every prompt is token ids, so that all servers compute the same. A number in a prompt's salt makes its first tokens
its own: nothing is cached that is not meant to be.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np

# Ids of ordinary words.
FIRST_ID, LAST_ID = 1000, 40000


@dataclass(frozen=True)
class Reply:
    # Seconds since the request was sent, of each token.
    token_times: list[float]
    # When it was sent, on the clock of time.perf_counter.
    sent: float
    cached_tokens: int
    text: str

    @property
    def first_token_s(self) -> float:
        return self.token_times[0]

    @property
    def step_s(self) -> float:
        """Seconds per token after the first."""
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)


class Prompts:
    """Random prompts, the same in every run and for every server."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def text(self, length: int) -> list[int]:
        return self._rng.integers(FIRST_ID, LAST_ID, length).tolist()


async def ask(client: httpx.AsyncClient, model: str, prompt: Sequence[int], num_tokens: int) -> Reply:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    times: list[float] = []
    text, cached, counted = "", 0, 0
    sent = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError((await reply.aread()).decode(errors="replace")[:500])
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or {}
            new = (usage.get("completion_tokens") or 0) - counted
            if new > 0:
                times += [time.perf_counter() - sent] * new
                counted += new
            details = usage.get("prompt_tokens_details") or {}
            cached = max(cached, details.get("cached_tokens") or 0)
            text += "".join(choice["text"] for choice in event["choices"])
    if counted != num_tokens:
        raise RuntimeError(f"{counted} tokens came, {num_tokens} were asked for")
    return Reply(times, sent, cached, text)


def ask_all(url: str, model: str, prompts: Sequence[Sequence[int]], num_tokens: int, at_once: int) -> list[Reply]:
    """All prompts, at_once of them under way at a time, in order."""

    async def run() -> list[Reply]:
        limit = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:

            async def one(prompt: Sequence[int]) -> Reply:
                async with limit:
                    return await ask(client, model, prompt, num_tokens)

            return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    return asyncio.run(run())


def decode_step_s(replies: Sequence[Reply]) -> float:
    """Seconds of a step with all requests running: between the last first token and the first last token, the median
    over requests of the mean step."""
    begin = max(reply.sent + reply.token_times[0] for reply in replies)
    end = min(reply.sent + reply.token_times[-1] for reply in replies)
    steps = []
    for reply in replies:
        inside = [t for t in (reply.sent + each for each in reply.token_times) if begin <= t <= end]
        if len(inside) > 1:
            steps.append((inside[-1] - inside[0]) / (len(inside) - 1))
    return statistics.median(steps)
