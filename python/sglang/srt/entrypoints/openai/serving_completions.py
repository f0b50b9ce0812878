"""/v1/completions: one prompt or several in, OpenAI's events or reply out. Stateless."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any

from sglang.srt.entrypoints.openai.protocol import CompletionRequest, choice_end, usage
from sglang.srt.entrypoints.streams import close, merge
from sglang.srt.managers.tokenizer_manager import Chunk, GenerateRequest, TokenizerManager

Event = dict[str, Any]


async def serve_completions(req: CompletionRequest, manager: TokenizerManager, model: str) -> AsyncIterator[Event]:
    """Chunks if req.stream, else one whole reply. Choice i answers prompt i."""
    params = req.sampling_params(req.max_tokens)
    sources = [
        manager.generate(
            GenerateRequest(
                prompt=prompt,
                params=params,
                fill_context=req.max_tokens is None,
                extra_key=req.namespace,
                stream=bool(req.stream),
            )
        )
        for prompt in req.prompts()
    ]
    common = {
        "id": req.rid or uuid.uuid4().hex,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }
    last: dict[int, Chunk] = {}
    chunks = merge(sources)
    try:
        async for index, chunk in chunks:
            last[index] = chunk
            if req.stream and (chunk.text or chunk.finish_reason is not None):
                spent = _usage(req, [chunk]) if req.usage_in_every_chunk else None
                yield {**common, "choices": [_choice(index, chunk)], "usage": spent}
        if not req.stream:
            choices = [_choice(index, last[index]) for index in sorted(last)]
            yield {**common, "choices": choices, "usage": _usage(req, last.values())}
        elif req.include_usage:
            yield {**common, "choices": [], "usage": _usage(req, last.values())}
    finally:
        await close(chunks)


def _choice(index: int, chunk: Chunk) -> Event:
    return {"index": index, "text": chunk.text, "logprobs": None, **choice_end(chunk.finish_reason)}


def _usage(req: CompletionRequest, chunks: Iterable[Chunk]) -> Event:
    """The sum over the prompts; each chunk is the last of its prompt."""
    prompt = completion = cached = 0
    details: Counter[str] = Counter()
    for chunk in chunks:
        prompt += chunk.prompt_tokens
        completion += chunk.completion_tokens
        cached += chunk.cached_tokens
        details.update(chunk.cached_tokens_details)
    return usage(prompt, completion, cached, details if req.return_cached_tokens_details else None)
