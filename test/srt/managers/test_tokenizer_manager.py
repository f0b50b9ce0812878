"""The tokenizer manager by itself: outputs are handed to it as the detokenizer would, and nothing is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchStrOutput,
    FinishReason,
    SchedulerReady,
    StrOutput,
    TokenizedGenerateReqInput,
    decode_to_scheduler,
    encode,
    ids_to_bytes,
)
from sglang.srt.managers.tokenizer_manager import Chunk, GenerateRequest, TokenizerManager
from sglang.srt.observability.metrics_collector import MetricsCollector
from sglang.srt.sampling.logprob_types import LogprobSpec, TokenLogprob
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.errors import RequestError


class Harness:
    """sent: what the manager told the scheduler."""

    def __init__(self) -> None:
        words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        self.sent: list[object] = []
        self.metrics = MetricsCollector("m")
        self.manager = TokenizerManager(
            ServerArgs(model_path="m", random_seed=1),
            tokenizer=PreTrainedTokenizerFast(tokenizer_object=words),
            vocab_size=10,
            context_length=1000,
            send=lambda data: self.sent.append(decode_to_scheduler(data)),
            metrics=self.metrics,
        )
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._task = asyncio.create_task(self.manager.receive_forever(self._queue.get))
        self.tell(SchedulerReady(max_total_num_tokens=1000, max_req_input_len=999))

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


def run(test: Callable[[Harness], Awaitable[None]]) -> None:
    async def main() -> None:
        harness = Harness()
        await harness.settle()
        try:
            async with asyncio.timeout(10):
                await test(harness)
        finally:
            harness._task.cancel()
            harness.manager.close()

    asyncio.run(main())


def test_an_abort_after_the_stop_string_changes_nothing():
    """The stop string's abort comes back while a slow client has not read its last chunk yet."""

    async def test(h: Harness) -> None:
        chunks = h.manager.generate(GenerateRequest(prompt=[1], params=SamplingParams(stop=("x",)), stream=True))
        first = asyncio.ensure_future(anext(chunks))
        message = await h.until_sent(1)
        assert isinstance(message, TokenizedGenerateReqInput)
        h.output(message.rid, "a", [0])
        await first
        h.output(message.rid, "b", [1], FinishReason(type="stop", matched="x"))
        h.output(message.rid, "", [], FinishReason(type="abort", message="the request was aborted", status_code=499))
        await h.settle()
        assert isinstance(h.sent[1], AbortReq)
        last = await anext(chunks)
        assert (last.text, last.finish_reason) == ("b", FinishReason(type="stop", matched="x"))
        await chunks.aclose()
        assert h.count("num_requests_total") == 1 and h.count("num_aborted_requests_total") == 0

    run(test)


def test_abort_answers_with_what_there_is():
    async def test(h: Harness) -> None:
        mine, other = h.start(rid="mine"), h.start(rid="other")
        message, neighbour = await h.until_sent(1), await h.until_sent(2)
        assert isinstance(message, TokenizedGenerateReqInput) and isinstance(neighbour, TokenizedGenerateReqInput)
        assert message.rid != "mine"
        h.output(message.rid, "a", [0])
        h.manager.abort("nobody")
        h.manager.abort("mine")
        assert await h.until_sent(3) == AbortReq(rid=message.rid)
        h.output(message.rid, "", [], FinishReason(type="abort", message="the request was aborted", status_code=499))
        chunks = await mine
        assert "".join(chunk.text for chunk in chunks) == "a"
        assert chunks[-1].finish_reason.type == "abort" and chunks[-1].rid == "mine"
        assert not other.done()
        h.manager.abort(None)
        assert await h.until_sent(4) == AbortReq(rid=neighbour.rid)
        h.output(neighbour.rid, "", [], FinishReason(type="abort", status_code=499))
        assert [chunk.text for chunk in await other] == [""]
        assert h.count("num_aborted_requests_total") == 2 and not h.manager._states

    run(test)


def test_an_abort_while_the_prompt_is_tokenised_is_not_lost():
    async def test(h: Harness) -> None:
        task = h.start(prompt="a b", rid="mine")
        await asyncio.sleep(0)
        assert not h.sent
        h.manager.abort("mine")
        message = await h.until_sent(1)
        assert await h.until_sent(2) == AbortReq(rid=message.rid)
        h.output(message.rid, "", [], FinishReason(type="abort", status_code=499))
        assert (await task)[-1].finish_reason.type == "abort"

    run(test)


def test_an_abort_that_nobody_asked_for_is_an_error():
    async def test(h: Harness) -> None:
        task = h.start()
        message = await h.until_sent(1)
        h.output(message.rid, "", [], FinishReason(type="abort", message="too long", status_code=400))
        with pytest.raises(RequestError, match="too long"):
            await task

    run(test)


def test_a_refused_request_leaves_nothing():
    async def test(h: Harness) -> None:
        for fields in (
            {"prompt": [10]},
            {"params": SamplingParams(logit_bias={1 << 70: 1.0})},
            {"params": SamplingParams(max_new_tokens=4, min_new_tokens=5)},
            {"logprobs": LogprobSpec(token_ids=(-1,))},
            {"logprobs": LogprobSpec(prompt_from=2)},
        ):
            with pytest.raises(RequestError):
                await h.start(**fields)
        assert not h.sent and not h.manager._states and await h.manager.drained(0.1)
        assert h.count("num_requests_total") == 0

    run(test)


def test_logprobs_are_joined_over_unread_outputs():
    async def test(h: Harness) -> None:
        task = h.start(stream=False, logprobs=LogprobSpec(prompt_from=0))
        message = await h.until_sent(1)
        assert message.logprobs == LogprobSpec(prompt_from=0)
        entries = [TokenLogprob(token, -0.5) for token in range(4)]
        h.output(message.rid, "a", [0], logprobs=entries[:1], prompt_logprobs=[TokenLogprob(1, None)])
        h.output(message.rid, "b", [1, 2, 3], FinishReason(type="length"), logprobs=entries[1:])
        (chunk,) = await task
        assert chunk.logprobs == entries and chunk.prompt_logprobs == [TokenLogprob(1, None)]

    run(test)


def test_seeds_of_several_answers():
    def seeds(seed: int | None, n: int) -> list[int | None]:
        copies = GenerateRequest(prompt=[1], params=SamplingParams(sampling_seed=seed)).copies(n)
        return [copy.params.sampling_seed for copy in copies]

    assert seeds(7, 3) == [7, 8, 9]
    assert seeds(None, 2) == [None, None]
    biggest = (1 << 63) - 1
    assert seeds(biggest, 2) == [biggest, -(1 << 63)]
