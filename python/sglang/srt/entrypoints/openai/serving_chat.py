"""/v1/chat/completions: a conversation in, OpenAI's events or reply out. Stateless."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, choice_end, usage
from sglang.srt.entrypoints.streams import close
from sglang.srt.managers.tokenizer_manager import Chunk, GenerateRequest, TokenizerManager
from sglang.srt.utils.errors import RequestError

Event = dict[str, Any]


async def serve_chat(req: ChatCompletionRequest, manager: TokenizerManager, model: str) -> AsyncIterator[Event]:
    """Chunks if req.stream, else one whole reply."""
    chunks = manager.generate(await _generate_request(req, manager))
    try:
        if req.stream:
            async for event in _chunk_events(req, chunks, model):
                yield event
        else:
            async for chunk in chunks:
                yield _reply(req, chunk, model)
    finally:
        await close(chunks)


async def _generate_request(req: ChatCompletionRequest, manager: TokenizerManager) -> GenerateRequest:
    if not req.messages:
        raise RequestError("messages is empty: give at least one", param="messages")
    limit = req.max_completion_tokens if req.max_completion_tokens is not None else req.max_tokens
    params = req.sampling_params(limit)  # before the template's work: it may refuse
    messages = [_template_message(message, at) for at, message in enumerate(req.messages)]
    prompt = await manager.render_chat(messages, req.chat_template_kwargs or {}, bool(req.continue_final_message))
    return GenerateRequest(
        prompt=prompt,
        params=params,
        fill_context=limit is None,
        add_special_tokens=False,  # the template writes them
        rid=req.rid,
        extra_key=req.namespace,
        stream=bool(req.stream),
    )


def _template_message(message: dict[str, Any], at: int) -> dict[str, Any]:
    """Content as one text, which every template takes; the other fields as they are."""
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


def _usage(req: ChatCompletionRequest, chunk: Chunk) -> Event:
    details = chunk.cached_tokens_details if req.return_cached_tokens_details else None
    return usage(chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens, details)


def _reply(req: ChatCompletionRequest, chunk: Chunk, model: str) -> Event:
    return {
        "id": chunk.rid,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": chunk.text},
                "logprobs": None,
                **choice_end(chunk.finish_reason),
            }
        ],
        "usage": _usage(req, chunk),
    }


async def _chunk_events(req: ChatCompletionRequest, chunks: AsyncIterator[Chunk], model: str) -> AsyncIterator[Event]:
    created = int(time.time())
    started = False
    async for chunk in chunks:
        common = {"id": chunk.rid, "object": "chat.completion.chunk", "created": created, "model": model}

        def event(delta: Event, last: bool, chunk: Chunk = chunk, common: Event = common) -> Event:
            choice = {
                "index": 0,
                "delta": delta,
                "logprobs": None,
                **choice_end(chunk.finish_reason if last else None),
            }
            spent = _usage(req, chunk) if req.usage_in_every_chunk else None
            return {**common, "choices": [choice], "usage": spent}

        if not started:
            started = True
            yield event({"role": "assistant", "content": ""}, last=False)
        if chunk.text:
            yield event({"content": chunk.text}, last=False)
        if chunk.finish_reason is not None:
            yield event({}, last=True)
            if req.include_usage:
                yield {**common, "choices": [], "usage": _usage(req, chunk)}
