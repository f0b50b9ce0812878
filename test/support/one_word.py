"""In the tokenizer manager's place, for tests of what stands before it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from sglang.srt.managers.io_struct import ControlReqOutput, FinishReason
from sglang.srt.managers.tokenizer_manager import Chunk
from sglang.srt.parser.chat_format import ChatFormat
from sglang.srt.utils.errors import RequestError


class OneWord:
    """Every answer is one word."""

    is_ready = True
    is_active = False
    context_length = 100
    token_texts = None
    chat_format = ChatFormat()
    sampling_defaults: dict[str, float] = {}

    @property
    def token_came(self) -> asyncio.Event:
        return asyncio.Event()

    def check_prompt_length(self, num_tokens, has_answer) -> None:
        if num_tokens >= self.context_length:
            raise RequestError("too long")

    def generate_all(self, requests):
        return [self.generate(req) for req in requests]

    async def generate(self, req):
        yield Chunk(
            rid="r",
            text="word",
            output_ids=[1],
            finish_reason=FinishReason(type="length", length=1),
            prompt_tokens=1,
            completion_tokens=1,
            cached_tokens=0,
            cached_tokens_details={},
            computed_tokens_details={},
            latency_s=0.0,
            logprobs=[],
            prompt_logprobs=[],
            embedding=b"",
        )

    async def render_chat(self, messages, kwargs, continue_final, opens_answer) -> str:
        return "prompt"

    async def tokenize(self, text, add_special_tokens) -> np.ndarray:
        return np.array([1])

    async def render_metrics(self) -> bytes:
        return b""

    @property
    def control(self) -> OneWord:
        return self

    async def flush_cache(self, timeout_s=0.0) -> ControlReqOutput:
        return ControlReqOutput(id="1", success=True)

    def abort(self, rid) -> None: ...

    @property
    def threads(self) -> OneWord:
        return self

    async def run_if_many(self, num_tokens, function, *args) -> Any:
        return function(*args)
