"""/v1/completions: one prompt or several in, OpenAI's events or reply out. Stateless."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from sglang.srt.entrypoints.openai.logprobs import LogprobStream, completion_logprobs
from sglang.srt.entrypoints.openai.protocol import CompletionRequest, UsageOfChoices, choice_end
from sglang.srt.entrypoints.request_fields import cache_mode, check_num_answers, session_id
from sglang.srt.entrypoints.streams import close, merge
from sglang.srt.managers.tokenizer_manager import Chunk, GenerateRequest, TokenizerManager
from sglang.srt.sampling.logprob_types import LogprobSpec, TokenLogprob

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
    try:
        async for index, chunk in chunks:
            usage.add(index, chunk)
            choice = await builders[index].take(chunk)
            if choice is None:
                continue
            if req.stream:
                spent = usage.of(index, chunk) if req.usage_in_every_chunk else None
                yield {**common, "choices": [choice], "usage": spent}
            else:
                choices[index] = choice
        if not req.stream:
            yield {**common, "choices": [choices[index] for index in sorted(choices)], "usage": usage.total()}
        elif req.include_usage:
            yield {**common, "choices": [], "usage": usage.total()}
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


class _ChoiceBuilder:
    """Makes one choice's events from its chunks."""

    def __init__(
        self, index: int, req: CompletionRequest, request: GenerateRequest, manager: TokenizerManager
    ) -> None:
        self._index = index
        self._manager = manager
        self._params = request.params
        self._spec = request.logprobs
        self._echo = request.prompt if req.echo else None
        self._logprobs = LogprobStream(manager.token_texts, request.params.skip_special_tokens)

    async def take(self, chunk: Chunk) -> Event | None:
        """None if there is nothing to send yet."""
        text = await self._echoed() + chunk.text
        final = chunk.finish_reason is not None
        logprobs = None
        if self._spec is not None:
            entries = [*chunk.prompt_logprobs, *chunk.logprobs]
            logprobs = await self._manager.threads.run_if_many(
                len(entries), self._logprob_fields, self._spec, entries, text, final
            )
        if not (text or final):
            return None
        return {"index": self._index, "text": text, "logprobs": logprobs, **choice_end(chunk.finish_reason)}

    def _logprob_fields(self, spec: LogprobSpec, entries: list[TokenLogprob], text: str, final: bool) -> Event:
        placed = self._logprobs.take(entries, text, final)
        return completion_logprobs(placed, self._manager.token_texts, spec.top)

    async def _echoed(self) -> str:
        """The prompt's text, once."""
        prompt, self._echo = self._echo, None
        if prompt is None or isinstance(prompt, str):
            return prompt or ""
        return await self._manager.detokenize(prompt, self._params.skip_special_tokens)
