"""/v1/completions: one prompt or several in, OpenAI's events or reply out. Stateless."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.entrypoints.openai.logprobs import LogprobStream, completion_logprobs
from sglang.srt.entrypoints.openai.protocol import CompletionRequest, UsageOfChoices, choice_end
from sglang.srt.entrypoints.request_fields import cache_mode, check_num_answers, session_id
from sglang.srt.entrypoints.streams import close, merge
from sglang.srt.managers.tokenizer_manager import Chunk, GenerateRequest, TokenizerManager
from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.utils.errors import RequestError

Event = dict[str, Any]


async def serve_completions(req: CompletionRequest, manager: TokenizerManager, model: str) -> AsyncIterator[Event]:
    """Chunks if req.stream, else one whole reply. Prompt p's answers are choices p * n to p * n + n - 1."""
    requests = _generate_requests(req)
    common = {
        "id": requests[0].rid,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }
    builders = [_ChoiceBuilder(i, req, each, manager) for i, each in enumerate(requests)]
    usage = UsageOfChoices(req)
    chunks = merge(manager.generate_all(requests))
    choices: dict[int, Event] = {}
    num_running = len(requests)
    try:
        async for index, chunk in chunks:
            usage.add(index, chunk)
            num_running -= chunk.finish_reason is not None
            choice = await builders[index].take(chunk)
            if choice is None:
                continue
            if req.stream:
                spent = usage.of(index, chunk) if req.usage_in_every_chunk else None
                # Not in an event without choices, as upstream's: its own benchmark cannot read that.
                extension = {} if num_running else usage.extension()
                yield {**common, "choices": [choice], "usage": spent, **extension}
            else:
                choices[index] = choice
        if not req.stream:
            in_order = [choices[index] for index in sorted(choices)]
            yield {**common, "choices": in_order, "usage": usage.total(), **usage.extension()}
        elif req.include_usage:
            yield {**common, "choices": [], "usage": usage.total()}
    except RequestError as error:
        raise req.named(error) from None
    finally:
        await close(chunks)


def _generate_requests(req: CompletionRequest) -> list[GenerateRequest]:
    params = req.sampling_params(req.max_tokens)
    req.check_best_of()
    logprobs = req.logprob_spec()
    rid = req.reply_id()
    prompts = req.prompts()
    check_num_answers(len(prompts) * req.num_choices)
    return [
        each
        for prompt in prompts
        for each in GenerateRequest(
            prompt=prompt,
            params=params,
            logprobs=logprobs,
            fill_context=req.max_tokens is None,
            rid=rid,
            extra_key=req.namespace,
            cache=cache_mode(req.cache),
            priority=req.priority,
            session_id=session_id(req.session_id),
            stream=bool(req.stream),
        ).copies(req.num_choices)
    ]


@dataclass(frozen=True)
class _Echo:
    """A prompt's text, and where its tokens are in it, see `LogprobStream.begin_with_prompt`."""

    text: str
    spans: list[tuple[int, int]] | None


class _ChoiceBuilder:
    """Makes one choice's events from its chunks."""

    def __init__(
        self, index: int, req: CompletionRequest, request: GenerateRequest, manager: TokenizerManager
    ) -> None:
        self._index = index
        self._manager = manager
        self._params = request.params
        self._spec = request.logprobs
        self._add_special_tokens = request.add_special_tokens
        # None: it is not echoed, or it is sent.
        self._prompt = request.prompt if req.echo else None
        self._logprobs = LogprobStream(manager.token_texts, request.params.skip_special_tokens)

    async def take(self, chunk: Chunk) -> Event | None:
        """None if there is nothing to send yet."""
        echo = await self._echoed()
        text = (echo.text if echo is not None else "") + chunk.text
        final = chunk.finish_reason is not None
        logprobs = None
        if self._spec is not None:
            logprobs = await self._manager.threads.run_if_many(
                len(chunk.prompt_logprobs) + len(chunk.logprobs), self._logprob_fields, self._spec, chunk, echo, text
            )
        if not (text or final):
            return None
        return {"index": self._index, "text": text, "logprobs": logprobs, **choice_end(chunk.finish_reason)}

    def _logprob_fields(self, spec: LogprobSpec, chunk: Chunk, echo: _Echo | None, text: str) -> Event:
        if echo is not None:
            self._logprobs.begin_with_prompt(chunk.prompt_logprobs, echo.text, echo.spans)
        placed = self._logprobs.take(chunk.logprobs, text, final=chunk.finish_reason is not None)
        return completion_logprobs(placed, self._manager.token_texts, spec.top)

    async def _echoed(self) -> _Echo | None:
        """The prompt, once."""
        prompt, self._prompt = self._prompt, None
        if prompt is None:
            return None
        if not isinstance(prompt, str):
            return _Echo(await self._manager.detokenize(prompt, self._params.skip_special_tokens), None)
        if self._spec is None:
            return _Echo(prompt, None)
        return _Echo(prompt, await self._manager.token_spans(prompt, self._add_special_tokens))
