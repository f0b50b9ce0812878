"""The tokenizer manager by itself: outputs are handed to it as the detokenizer would, and nothing is started."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang.srt.entrypoints.streams import merge
from sglang.srt.managers import tokenizer_manager, tokenizer_threads
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchStrOutput,
    BlockNaming,
    ControlReqOutput,
    FinishReason,
    PromptKeys,
    ReqTimes,
    RequestTimesOutput,
    SchedulerReady,
    StrOutput,
    TokenizedGenerateReqInput,
    bytes_to_ids,
)
from sglang.srt.managers.tokenizer_manager import Chunk, GenerateRequest
from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.sampling.logprob_types import LogprobSpec, TokenLogprob
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.log import REQUEST_ID
from support.tokenizer_manager_harness import Harness, run
from support.tokenizers_by_hand import SPECIAL, llama_bpe

TEXT = {"add_special_tokens": False}


def run_with_text(test: Callable[[Harness], Awaitable[None]], **settings: Any) -> None:
    """With a tokenizer for any text."""
    run(test, tokenizer=llama_bpe(), **settings)


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
        assert h.count("num_aborted_requests_total") == h.count("num_requests_total") == 2 and not h.manager._states

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
        assert h.sent == [message] and h.count("num_aborted_requests_total") == 1, "it is not aborted again"

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
        assert not h.sent and not h.manager._states and await h.manager.drained(60)
        assert h.count("num_requests_total") == 0

    run(test)


def test_a_text_that_cannot_fit_is_not_tokenised():
    async def test(h: Harness) -> None:
        limit = h.manager.context_length
        with pytest.raises(RequestError, match=f"{limit} tokens or more, which leaves no room") as early:
            await h.start(prompt="é" * (limit * len(SPECIAL[0])), **TEXT)
        with pytest.raises(RequestError, match=f"{limit} tokens, which leaves no room") as late:
            await h.start(prompt=SPECIAL[1] * limit, **TEXT)
        assert early.value.status_code == late.value.status_code == 400 and early.value.param is late.value.param
        assert h.encoded == [SPECIAL[1] * limit]

    run_with_text(test)


@pytest.mark.parametrize("prompt", [[1] * 1000, SPECIAL[1] * 1000])
def test_a_prompt_without_an_answer_may_be_as_long_as_the_context(prompt):
    params = SamplingParams(max_new_tokens=0)

    async def test(h: Harness) -> None:
        fields = {**TEXT, "prompt": prompt, "params": params}
        with pytest.raises(RequestError, match="1000 tokens, but at most 999 fit into the model's context"):
            await h.start(**fields)
        ready = h.manager.ready.result()
        h.manager.ready = asyncio.Future()
        h.manager.ready.set_result(msgspec.structs.replace(ready, max_unanswered_len=1000))
        task = h.start(**fields)
        message = await h.until_sent(1)
        assert len(message.input_ids) == 4000 and message.sampling_params.max_new_tokens == 0
        h.output(message.rid, "", [], FinishReason(type="length", length=0))
        assert (await task)[-1].finish_reason.type == "length"
        with pytest.raises(RequestError, match="1001 tokens, but at most 1000 fit into the model's context"):
            await h.start(**{**fields, "prompt": prompt + prompt[: len(prompt) // 1000]})
        with pytest.raises(RequestError, match="1000 tokens, which leaves no room for an answer"):
            await h.start(**{**fields, "params": SamplingParams(max_new_tokens=1)})
        with pytest.raises(RequestError, match="1000 tokens, which leaves no room for an answer"):
            await h.start(**{**fields, "fill_context": True})

    run_with_text(test)


def test_only_a_request_that_asks_for_it_is_as_long_as_peers_may_lend():
    """The server has room for 20 tokens, and for 60 with what peers may lend."""

    async def test(h: Harness) -> None:
        await h.manager.ready
        h.manager.ready = asyncio.Future()
        h.manager.ready.set_result(SchedulerReady(max_total_num_tokens=20, max_req_input_len=59, max_unlent_len=20))
        limit = h.manager._max_new_tokens
        assert (limit(5, None), limit(5, 55), limit(30, 4), limit(30, None)) == (15, 55, 4, 30)
        for num_tokens, wanted in ((5, 56), (60, 1)):
            with pytest.raises(RequestError, match="the 60 tokens that the KV cache can hold"):
                limit(num_tokens, wanted)

    run(test)


def test_the_longest_text_that_fits_is_served():
    async def test(h: Harness) -> None:
        task = h.start(prompt=SPECIAL[0] * 999, params=SamplingParams(max_new_tokens=1), **TEXT)
        assert len((await h.until_sent(1)).input_ids) == 4 * 999
        task.cancel()

    run_with_text(test)


def test_a_text_is_refused_where_no_thread_can_be_started(monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def test(h: Harness) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RequestError, match="no thread for this request") as refusal:
                await anext(h.manager.generate(GenerateRequest(prompt="a", params=SamplingParams(), **TEXT)))
            assert refusal.value.status_code == 503
        assert not h.manager.is_active
        assert len(await h.manager.tokenize("a"))

    run_with_text(test)


def test_earlier_turns_are_tokenised_once():
    async def test(h: Harness) -> None:
        turn = SPECIAL[1] + "the library opens at nine " * 20 + SPECIAL[2]

        async def reused(turns: int, extra_key: str) -> bool:
            before, number = h.count("tokenizer_reused_tokens_total"), len(h.sent) + 1
            fields = {"prompt": turn * turns, "extra_key": extra_key, "params": SamplingParams(max_new_tokens=1)}
            task = h.start(**fields, **TEXT)
            message = await h.until_sent(number)
            expected = h.manager._tokenizer.encode(turn * turns, add_special_tokens=False)
            assert bytes_to_ids(message.input_ids).tolist() == expected
            task.cancel()
            await h.until_sent(number + 1)  # its abort
            return h.count("tokenizer_reused_tokens_total") > before

        assert [await reused(1, ""), await reused(2, ""), await reused(2, "b")] == [False, True, False]
        assert await reused(2, "")
        for success in (False, True):
            flushing = asyncio.create_task(h.manager.control.flush_cache())
            question = await h.until_sent(len(h.sent) + 1)
            h.tell(ControlReqOutput(id=question.id, success=success))
            assert (await flushing).success == success
            assert await reused(2, "") != success

    run_with_text(test, context_length=5000)


def test_a_flush_waits_for_the_last_request():
    async def test(h: Harness) -> None:
        running = h.start()
        message = await h.until_sent(1)
        flushing = asyncio.create_task(h.manager.flush_cache(1e300))
        left = asyncio.create_task(h.manager.flush_cache(1e300))
        await h.settle()
        assert len(h.sent) == 1, "the scheduler would refuse it"
        left.cancel()
        h.output(message.rid, "a", [0], FinishReason(type="stop"))
        await running
        # It still ends a request that was aborted before.
        question = await h.until_sent(2)
        h.tell(ControlReqOutput(id=question.id, success=False, message="busy"))
        question = await h.until_sent(3)
        h.tell(ControlReqOutput(id=question.id, success=True))
        assert (await flushing).success
        await h.settle()
        assert len(h.sent) == 3 and left.cancelled(), "nothing is left of a client that has gone"

    run(test)


@pytest.mark.parametrize("timeout_s", [0.0, 0.02])
def test_a_flush_is_refused_in_the_end(timeout_s):
    async def test(h: Harness) -> None:
        running = h.start()
        await h.until_sent(1)
        flushing = asyncio.create_task(h.manager.flush_cache(timeout_s))
        question = await h.until_sent(2)
        h.tell(ControlReqOutput(id=question.id, success=False, message="busy"))
        assert await flushing == ControlReqOutput(id=question.id, success=False, message="busy")
        running.cancel()

    run(test)


def test_a_full_queue():
    async def test(h: Harness) -> None:
        waiting = h.start()
        message = await h.until_sent(1)
        with pytest.raises(RequestError, match="the queue is full") as error:
            await h.start()
        assert error.value.status_code == 503
        h.output(message.rid, "a", [0])
        await h.settle()
        running = h.start()  # the first one waits no longer
        await h.until_sent(2)
        for task in (waiting, running):
            task.cancel()

    run(test, args=ServerArgs(model_path="m", max_queued_requests=1))


def test_waiting_requests_are_counted():
    """Without a walk over all of them: the count follows every way out of the queue."""

    async def test(h: Harness) -> None:
        tasks = [h.start() for _ in range(4)]
        messages = [await h.until_sent(number) for number in (1, 2, 3, 4)]
        assert h.manager._num_waiting == 4
        h.output(messages[0].rid, "a", [0])
        h.output(messages[0].rid, "a", [0])
        h.output(messages[1].rid, "a", [0], FinishReason(type="length"))
        h.output(messages[2].rid, "", [], FinishReason(type="abort", message="too long", status_code=400))
        await h.settle()
        await tasks[1]
        with pytest.raises(RequestError):
            await tasks[2]
        assert h.manager._num_waiting == 1
        for task in (tasks[0], tasks[3]):
            task.cancel()
        with pytest.raises(RequestError, match="vocabulary"):
            await h.start(prompt=[10])
        assert await h.manager.drained(60) and h.manager._num_waiting == 0

    run(test)


def test_the_scheduler_tells_what_the_model_s_config_leaves_out():
    """Context and vocabulary, which transformers' defaults fill in there."""

    async def test(h: Harness) -> None:
        await h.manager.ready
        assert h.manager.context_length == 1000
        h.manager.ready = asyncio.Future()
        told = {"max_total_num_tokens": 5000, "max_req_input_len": 1999, "context_len": 2000, "vocab_size": 300}
        h.tell(SchedulerReady(**told))
        await h.manager.ready
        assert h.manager.context_length == 2000
        h.manager._check_vocabulary("input_ids", [299])
        with pytest.raises(RequestError, match="vocabulary"):
            h.manager._check_vocabulary("input_ids", [300])

    run(test)


def test_nothing_is_sent_before_all_prompts_are_valid():
    async def test(h: Harness) -> None:
        async def answers(*prompts) -> list[tuple[int, Chunk]]:
            requests = [GenerateRequest(prompt=prompt, params=SamplingParams()) for prompt in prompts]
            return [each async for each in merge(h.manager.generate_all(requests))]

        for bad in ([10], [], [1] * 1000, [-1]):
            for prompts in ([[1], "a b", bad], [bad, [1]]):
                with pytest.raises(RequestError):
                    await answers(*prompts)
        assert not h.sent and not h.manager._states and not h.manager.threads._shared
        both = asyncio.create_task(answers([0], [1]))
        messages = [await h.until_sent(number) for number in (1, 2)]
        assert [bytes_to_ids(message.input_ids).tolist() for message in messages] == [[0], [1]]
        for message in messages:
            h.output(message.rid, "a", [0], FinishReason(type="length"))
        assert sorted(index for index, _ in await both) == [0, 1]

    run(test)


def test_texts_of_clients_that_have_left_are_not_tokenised(monkeypatch):
    monkeypatch.setattr(tokenizer_threads, "_LONG_TEXT", 10)

    async def test(h: Harness) -> None:
        go_on = threading.Event()
        for pool in (h.manager.threads._pool, h.manager.threads._pool, h.manager.threads._long_pool):
            pool.submit(go_on.wait)
        long = "a " * 10
        left = [h.start(prompt="a b"), h.start(prompt="a b"), asyncio.create_task(h.manager.tokenize(long))]
        while (
            not h.manager.threads._pool._work_queue.qsize() == h.manager.threads._long_pool._work_queue.qsize() == 1
        ):
            await asyncio.sleep(0.001)
        left[0].cancel()
        await asyncio.wait(left[:1])
        assert h.manager.threads._shared, "the other request waits for it"
        for task in left[1:]:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        again = h.start(prompt="a b")
        last = asyncio.create_task(h.manager.tokenize("a " + long))
        await asyncio.sleep(0)
        go_on.set()
        assert isinstance(await h.until_sent(1), TokenizedGenerateReqInput)
        await last
        assert h.encoded.count("a b") == 1 and long not in h.encoded and not h.manager.threads._shared
        again.cancel()

    run(test)


def test_ids_are_checked_beside_the_event_loop(monkeypatch):
    async def test(h: Harness) -> None:
        threads = []
        check = h.manager._check_vocabulary
        monkeypatch.setattr(
            h.manager,
            "_check_vocabulary",
            lambda name, ids: threads.append((threading.current_thread(), type(ids))) or check(name, ids),
        )
        assert await h.manager.detokenize([0, 1] * 70_000) == " ".join("ab" * 70_000)
        for ids, words in (([0] * 70_000 + [10], "10 at position 70000"), ([1 << 70], "whole numbers"), ([-1], "-1")):
            with pytest.raises(RequestError, match=words) as error:
                await h.manager.detokenize(ids)
            assert error.value.param == "tokens"
        assert {kind for _, kind in threads} == {np.ndarray}
        assert threading.current_thread() not in {thread for thread, _ in threads}

    run(test)


def test_pieces_of_the_stream_interval():
    async def test(h: Harness) -> None:
        task = h.start()
        message = await h.until_sent(1)
        for i in range(33):
            h.output(message.rid, "a", [0], FinishReason(type="length") if i == 32 else None)
            await h.settle()
        assert [len(chunk.output_ids) for chunk in await task] == [1, 8, 8, 8, 8]

    run(test, args=ServerArgs(model_path="m", stream_interval=8))


def test_metrics_do_not_wait_for_a_busy_scheduler(monkeypatch):
    monkeypatch.setattr(tokenizer_manager, "_METRICS_TIMEOUT_S", 0.01)

    async def test(h: Harness) -> None:
        assert b"sglang:num_requests_total" in await h.manager.render_metrics()
        assert len(h.sent) == 1, "it was asked"

    run(test)


def test_the_prompt_of_several_answers_is_tokenised_once():
    """And they come to the scheduler in order, also if the first one's client has left."""

    async def test(h: Harness) -> None:
        fields = {"prompt": "a b", "extra_key": "k"}
        seeds = range(9)
        left, *tasks = [h.start(params=SamplingParams(sampling_seed=seed), **fields) for seed in seeds]
        other = h.start(prompt="a b", extra_key="other")
        await asyncio.sleep(0)
        left.cancel()
        messages = [await h.until_sent(number) for number in range(1, 1 + len(tasks) + 1)]
        assert [m.sampling_params.sampling_seed for m in messages if m.extra_key == "k"] == list(seeds)[1:]
        assert h.encoded == ["a b", "a b"] and not h.manager.threads._shared
        for task in (*tasks, other):
            task.cancel()

    run(test)


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
def test_priorities_are_taken_by_every_server(policy):
    async def test(h: Harness) -> None:
        task = h.start(priority=-7)
        assert (await h.until_sent(1)).priority == -7
        task.cancel()
        for priority in (1 << 31, -(1 << 31) - 1):
            with pytest.raises(RequestError, match="32-bit"):
                await h.start(priority=priority)
        await h.until_sent(2)  # the first one's abort
        for number, priority in ((3, (1 << 31) - 1), (5, -(1 << 31))):
            task = h.start(priority=priority)
            assert (await h.until_sent(number)).priority == priority
            task.cancel()
            await h.until_sent(number + 1)

    run(test, args=ServerArgs(model_path="m", random_seed=1, radix_eviction_policy=policy))


def test_other_work_has_its_turn_within_a_step_of_many_outputs():
    async def test(h: Harness) -> None:
        turn, seen = 0, []
        h.manager._on_output = lambda output, now: seen.append((output.rid, turn))
        outputs = [
            StrOutput(
                rid=str(i),
                text="",
                output_ids=b"",
                finish_reason=None,
                prompt_tokens=1,
                completion_tokens=0,
                cached_tokens=0,
            )
            for i in range(300)
        ]
        h.tell(BatchStrOutput(outputs=outputs))
        while len(seen) < len(outputs):
            turn += 1
            await asyncio.sleep(0)
        assert [rid for rid, _ in seen] == [str(i) for i in range(300)]
        assert max(Counter(turn for _, turn in seen).values()) <= 128

    run(test)


def test_other_work_has_its_turn_while_merged_answers_are_read():
    async def at_once() -> AsyncIterator[int]:
        for i in range(200):
            yield i

    async def work() -> None:
        turn = 0

        async def count_turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        seen = [turn async for _ in merge([at_once(), at_once()])]
        counting.cancel()
        assert len(seen) == 400 and max(Counter(seen).values()) <= 64

    asyncio.run(work())


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


def test_prompts_come_with_the_names_of_their_blocks():
    async def work() -> None:
        harness, names = Harness(), BlockKeys(b"secret", 4)
        naming = BlockNaming(secret=b"secret", block_tokens=4)

        async def keys_of(ids: list[int], **fields: str) -> PromptKeys | None:
            request = GenerateRequest(prompt=ids, params=SamplingParams(max_new_tokens=1), **fields)
            return (await harness.manager._tokenized("r", request)).prompt_keys

        await harness.manager.ready
        assert await keys_of([1] * 9) is None, "no storage is attached"
        harness.tell(naming)
        while harness.manager._names is None:
            await asyncio.sleep(0)
        assert await keys_of([1] * 3) is None, "no whole block"
        assert await keys_of([1] * 9, cache="bypass") is None
        for salt in ("", "tenant"):
            assert await keys_of([1] * 9, extra_key=salt) == PromptKeys.make(names, salt, np.ones(9, np.int32))
        harness.tell(BlockNaming())
        while harness.manager._names is not None:
            await asyncio.sleep(0)
        assert await keys_of([1] * 9) is None

    asyncio.run(work())


# Limits of time, and whose turn it is


def test_a_request_over_its_time_ends_and_frees_its_memory() -> None:
    async def test(harness: Harness) -> None:
        task = harness.start()
        req = await harness.until_sent(1)
        harness.output(req.rid, "a", [1])
        await harness.settle()
        (state,) = harness.manager._states.values()
        harness.manager._time_out(state, 3.0)  # what the timer of --request-timeout calls
        with pytest.raises(RequestError, match="not complete after 3 s") as caught:
            await task
        assert caught.value.status_code == 504
        assert harness.sent[1:] == [AbortReq(rid=req.rid)] and harness.count("num_aborted_requests_total") == 1

    run(test, args=ServerArgs(model_path="m", request_timeout=1e6))


def test_the_time_counts_from_arrival() -> None:
    """It is over before the prompt has been tokenised, which waits for the others of its body."""

    async def test(harness: Harness) -> None:
        both = [GenerateRequest(prompt=[1], params=SamplingParams()) for _ in range(2)]
        first, _ = harness.manager.generate_all(both)
        with pytest.raises(RequestError) as caught:
            await anext(first)
        assert caught.value.status_code == 504 and harness.sent == []

    run(test, args=ServerArgs(model_path="m", request_timeout=0.01))


def test_a_request_waits_until_its_first_token_is_known_not_until_its_text_comes() -> None:
    """Answers that are not streamed bring their text in large pieces."""

    async def test(harness: Harness) -> None:
        running = harness.start()
        req = await harness.until_sent(1)
        with pytest.raises(RequestError, match="the queue is full"):
            await harness.start()
        harness.tell(RequestTimesOutput(times={req.rid: times(queue_s=0.0)}))
        await harness.settle()
        (state,) = harness.manager._states.values()
        first = state.first
        assert first is not None
        assert harness.count("queue_time_seconds_count") == 1
        waiting = harness.start()
        await harness.until_sent(2)
        harness.output(req.rid, "a", [1], FinishReason(type="stop"))
        await running
        assert state.first == first, "the time to the first token ends with the token"
        with pytest.raises(RequestError, match="the queue is full"):
            await harness.start()
        waiting.cancel()

    run(test, args=ServerArgs(model_path="m", max_queued_requests=1))


def test_the_requests_of_one_body_find_the_queue_full_together_or_not_at_all() -> None:
    async def test(harness: Harness) -> None:
        bodies = [
            harness.manager.generate_all([GenerateRequest(prompt=[1], params=SamplingParams()) for _ in range(3)])
            for _ in range(2)
        ]
        tasks = [asyncio.ensure_future(anext(each)) for each in bodies[0]]
        await harness.until_sent(3)
        with pytest.raises(RequestError, match="the queue is full"):
            await anext(bodies[1][0])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test, args=ServerArgs(model_path="m", max_queued_requests=1))


def test_a_full_queue_tells_when_to_ask_again() -> None:
    async def test(harness: Harness) -> None:
        waiting = harness.start()
        await harness.until_sent(1)
        for seconds, header in ((None, "5"), (12.2, "13"), (1e4, "60")):
            if seconds is not None:
                harness.manager._queue_time_s = None
                harness.tell(RequestTimesOutput(times={"x": times(queue_s=seconds)}))
                await harness.settle()
            with pytest.raises(RequestError, match="the queue is full") as caught:
                await harness.start()
            assert caught.value.headers() == {"retry-after": header}
        waiting.cancel()

    run(test, args=ServerArgs(model_path="m", max_queued_requests=1))


def times(**changes: float) -> ReqTimes:
    numbers = dict.fromkeys(("queue_s", "storage_s", "stall_s", "compute_s", "prefill_s"), 0.0)
    return ReqTimes(**{**numbers, **changes}, loads_s={})


def test_a_higher_priority_takes_a_place_in_a_full_queue() -> None:
    async def test(harness: Harness) -> None:
        low, middle = harness.start(priority=-5), harness.start()  # the second has the default priority, 2
        await harness.until_sent(2)
        with pytest.raises(RequestError, match="the queue is full"):
            await harness.start(priority=-5)  # of equals the one that came first stays
        high = harness.start(priority=3)
        with pytest.raises(RequestError, match="of higher priority took the place") as caught:
            await low
        assert caught.value.status_code == 503
        sent = [message for message in harness.sent if isinstance(message, TokenizedGenerateReqInput)]
        assert [message.priority for message in sent] == [-5, 2, 3]
        assert AbortReq(rid=sent[0].rid) in harness.sent
        for task in (middle, high):
            task.cancel()

    flags = {"enable_priority_scheduling": True, "default_priority_value": 2, "max_queued_requests": 2}
    run(test, args=ServerArgs(model_path="m", **flags))


def test_priorities_may_be_refused() -> None:
    async def test(harness: Harness) -> None:
        with pytest.raises(RequestError, match="takes no priorities") as caught:
            await harness.start(priority=1)
        assert caught.value.param == "priority"

    run(test, args=ServerArgs(model_path="m", abort_on_priority_when_disabled=True))


@pytest.mark.parametrize("rid", [None, "drawn for the reply"])
def test_the_x_request_id_is_a_name_of_the_request(rid: str | None) -> None:
    """Replies of OpenAI's form always have another id besides."""

    async def test(harness: Harness) -> None:
        REQUEST_ID.set("abc")
        task = harness.start(rid=rid)
        req = await harness.until_sent(1)
        harness.manager.abort("abc")
        assert harness.sent[1:] == [AbortReq(rid=req.rid)]
        task.cancel()

    run(test)


def test_of_equals_the_one_that_came_last_loses_its_place() -> None:
    async def test(h: Harness) -> None:
        old, new = h.start(priority=0), h.start(priority=0)
        await h.until_sent(2)
        high = h.start(priority=5)
        await h.until_sent(3)
        await asyncio.wait((old, new), return_when=asyncio.FIRST_COMPLETED)
        assert new.done() and not old.done()
        for task in (old, high):
            task.cancel()

    run(test, args=ServerArgs(model_path="m", max_queued_requests=2, enable_priority_scheduling=True))
