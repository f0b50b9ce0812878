"""/v1/chat/completions: a conversation in, OpenAI's events or reply out. Stateless."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from sglang.srt.entrypoints.openai.logprobs import LogprobStream, chat_logprobs
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, UsageOfChoices, choice_end
from sglang.srt.entrypoints.request_fields import cache_mode
from sglang.srt.entrypoints.streams import close, merge
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.tokenizer_manager import Chunk, GenerateRequest, TokenizerManager
from sglang.srt.sampling.logprob_types import TokenLogprob
from sglang.srt.utils.errors import RequestError

Event = dict[str, Any]
Chunks = AsyncIterator[tuple[int, Chunk]]

# Arguments that the engine sets itself. A client's own template is refused too: it is a program that may not end.
_NOT_FOR_CLIENTS = ("chat_template", "tokenize", "add_generation_prompt", "continue_final_message")


async def serve_chat(req: ChatCompletionRequest, manager: TokenizerManager, model: str) -> AsyncIterator[Event]:
    """Chunks if req.stream, else one whole reply. Choice i is the conversation's i-th answer."""
    request = await _generate_request(req, manager)
    reply = _Reply(req, manager, {"id": request.rid, "created": int(time.time()), "model": model})
    chunks = merge(manager.generate_all(request.copies(req.num_choices)))
    try:
        if req.stream:
            async for event in reply.events(chunks):
                yield event
        else:
            yield await reply.whole(chunks)
    finally:
        await close(chunks)


async def _generate_request(req: ChatCompletionRequest, manager: TokenizerManager) -> GenerateRequest:
    if not req.messages:
        raise RequestError("messages is empty: give at least one", param="messages")
    limit = req.max_completion_tokens if req.max_completion_tokens is not None else req.max_tokens
    # These checks come before the template's work.
    params, logprobs = req.sampling_params(limit), req.logprob_spec()
    kwargs = req.chat_template_kwargs or {}
    for name in _NOT_FOR_CLIENTS:
        if name in kwargs:
            raise RequestError(f"chat_template_kwargs may not hold {name}", param="chat_template_kwargs")
    messages = [_template_message(message, at) for at, message in enumerate(req.messages)]
    prompt = await manager.render_chat(messages, kwargs, bool(req.continue_final_message))
    return GenerateRequest(
        prompt=prompt,
        params=params,
        logprobs=logprobs,
        fill_context=limit is None,
        add_special_tokens=False,  # the template writes them
        rid=req.reply_id(),
        extra_key=req.namespace,
        cache=cache_mode(req.cache),
        priority=req.priority,
        stream=bool(req.stream),
    )


def _template_message(message: dict[str, Any], at: int) -> dict[str, Any]:
    """The message with its content as one text, which every template takes, and its other fields as they are."""
    if not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{at}] has no role", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else None
                raise RequestError(
                    f"messages[{at}] has a part of type {kind!r}: only text is supported", param="messages"
                )
            texts.append(part["text"])
        content = " ".join(texts)
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{at}].content must be a text or a list of parts", param="messages")
    return {**message, "content": content if content is not None else ""}


class _Reply:
    """Builds one reply. common: the fields that its events share."""

    def __init__(self, req: ChatCompletionRequest, manager: TokenizerManager, common: Event) -> None:
        self._req = req
        self._texts = manager.token_texts
        self._common = common
        self._usage = UsageOfChoices(req)

    def _logprobs(self, entries: list[TokenLogprob]) -> Event | None:
        return chat_logprobs(entries, self._texts) if self._req.logprobs else None

    async def whole(self, chunks: Chunks) -> Event:
        choices = {}
        async for index, chunk in chunks:
            self._usage.add(index, chunk)
            choices[index] = {
                "index": index,
                "message": {"role": "assistant", "content": chunk.text},
                "logprobs": self._logprobs(chunk.logprobs),
                **choice_end(chunk.finish_reason),
            }
        return {
            **self._common,
            "object": "chat.completion",
            "choices": [choices[index] for index in sorted(choices)],
            "usage": self._usage.total(),
        }

    async def events(self, chunks: Chunks) -> AsyncIterator[Event]:
        skip_special_tokens = self._req.skip_special_tokens is not False
        streams: dict[int, LogprobStream] = {}
        async for index, chunk in chunks:
            self._usage.add(index, chunk)
            if index not in streams:
                streams[index] = LogprobStream(self._texts, skip_special_tokens)
                yield self._event(index, chunk, {"role": "assistant", "content": ""})
            final = chunk.finish_reason is not None
            logprobs = [entry for _, entry in streams[index].take(chunk.logprobs, chunk.text, final)]
            if chunk.text:
                yield self._event(index, chunk, {"content": chunk.text}, logprobs)
                logprobs = []
            if final:
                yield self._event(index, chunk, {}, logprobs, chunk.finish_reason)
        if self._req.include_usage:
            yield {
                **self._common,
                "object": "chat.completion.chunk",
                "choices": [],
                "usage": self._usage.total(),
            }

    def _event(
        self,
        index: int,
        chunk: Chunk,
        delta: Event,
        logprobs: list[TokenLogprob] | None = None,
        reason: FinishReason | None = None,
    ) -> Event:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            **choice_end(reason),
        }
        return {
            **self._common,
            "object": "chat.completion.chunk",
            "choices": [choice],
            "usage": self._usage.of(chunk) if self._req.usage_in_every_chunk else None,
        }
