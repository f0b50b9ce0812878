"""A tokenizer manager whose scheduler and detokenizer are the test's own hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang.srt.managers.io_struct import (
    BatchStrOutput,
    FinishReason,
    SchedulerReady,
    StrOutput,
    decode_to_scheduler,
    encode,
    ids_to_bytes,
)
from sglang.srt.managers.tokenizer_manager import Chunk, GenerateRequest, TokenizerManager
from sglang.srt.observability.metrics_collector import MetricsCollector
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


class Harness:
    """sent: what the manager told the scheduler."""

    def __init__(
        self,
        args: ServerArgs | None = None,
        tokenizer: Any = None,
        context_length: int = 1000,
    ) -> None:
        if tokenizer is None:
            words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
            words.pre_tokenizer = pre_tokenizers.Whitespace()
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        self.sent: list[object] = []
        self.metrics = MetricsCollector("m")
        self.manager = TokenizerManager(
            args or ServerArgs(model_path="m", random_seed=1),
            tokenizer=tokenizer,
            vocab_size=max(10, len(tokenizer)),
            context_length=context_length,
            send=lambda data: self.sent.append(decode_to_scheduler(data)),
            metrics=self.metrics,
        )
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._task = asyncio.create_task(self.manager.receive_forever(self._queue.get))
        self.tell(SchedulerReady(max_total_num_tokens=context_length, max_req_input_len=context_length - 1))
        # Every text that was tokenised.
        self.encoded: list[str] = []
        encode_text = self.manager.threads.encoder.encode

        def noting(text: str, **kwargs: Any) -> Any:
            self.encoded.append(text)
            return encode_text(text, **kwargs)

        self.manager.threads.encoder.encode = noting  # type: ignore[method-assign]

    def tell(self, message: object) -> None:
        self._queue.put_nowait(encode(message))

    def output(self, rid: str, text: str, ids: list[int], reason: FinishReason | None = None, **fields) -> None:
        output = StrOutput(
            rid=rid,
            text=text,
            output_ids=ids_to_bytes(ids),
            finish_reason=reason,
            prompt_tokens=1,
            completion_tokens=len(ids),
            cached_tokens=0,
            **fields,
        )
        self.tell(BatchStrOutput(outputs=[output]))

    async def until_sent(self, number: int) -> object:
        while len(self.sent) < number:
            await asyncio.sleep(0.001)
        return self.sent[number - 1]

    async def settle(self) -> None:
        while not self._queue.empty():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)

    def count(self, name: str) -> float:
        return self.metrics._registry.get_sample_value(f"sglang:{name}", {"model_name": "m"}) or 0

    def start(self, **fields) -> asyncio.Task[list[Chunk]]:
        request = GenerateRequest(**{"prompt": [1], "params": SamplingParams(), "stream": True, **fields})

        async def collect(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
            return [chunk async for chunk in chunks]

        return asyncio.create_task(collect(self.manager.generate(request)))


def run(test: Callable[[Harness], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        harness = Harness(**settings)
        await harness.settle()
        try:
            async with asyncio.timeout(120):
                await test(harness)
        finally:
            harness._task.cancel()
            harness.manager.close()

    asyncio.run(main())
