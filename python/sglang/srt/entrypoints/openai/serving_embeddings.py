"""/v1/embeddings: the last hidden state of a text's last token, as a vector of length 1. Stateless.

That is how decoder models that are trained to embed are read (Qwen3-Embedding, e5-mistral). The prompt's KV cache is
shared with all other requests.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from sglang.srt.entrypoints.request_fields import (
    cache_mode,
    check_name,
    check_num_answers,
    namespace,
    split_prompts,
)
from sglang.srt.entrypoints.streams import close, merge
from sglang.srt.managers.tokenizer_manager import Chunk, GenerateRequest, TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.errors import RequestError

Event = dict[str, Any]

_ENCODINGS = ("float", "base64")


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """input: a text, token ids, or a list of either."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    cache: str | None = None
    priority: int | None = None


async def serve_embeddings(req: EmbeddingRequest, manager: TokenizerManager, model: str) -> AsyncIterator[Event]:
    """One reply, with an embedding for each input in its order."""
    encoding = req.encoding_format or "float"
    if encoding not in _ENCODINGS:
        raise RequestError(
            f"encoding_format is {encoding[:40]!r}, but it must be {' or '.join(_ENCODINGS)}", param="encoding_format"
        )
    if req.dimensions is not None and req.dimensions < 1:
        raise RequestError(f"dimensions is {req.dimensions}, but it must be at least 1", param="dimensions")
    found: dict[int, Chunk] = {}
    chunks = merge(manager.generate_all(_requests(req)))
    try:
        async for index, chunk in chunks:
            if not chunk.embedding:
                raise RequestError("the request was aborted", 499)
            found[index] = chunk
    finally:
        await close(chunks)
    in_order = [found[index] for index in sorted(found)]
    num_values = sum(len(chunk.embedding) for chunk in in_order) // 4
    data = await manager.threads.run_if_many(num_values, _data, in_order, encoding, req.dimensions)
    num_tokens = sum(chunk.prompt_tokens for chunk in in_order)
    cached = sum(chunk.cached_tokens for chunk in in_order)
    yield {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


def _requests(req: EmbeddingRequest) -> list[GenerateRequest]:
    inputs = split_prompts(req.input, "input")
    check_num_answers(len(inputs))
    shared = GenerateRequest(
        prompt="",
        params=SamplingParams(max_new_tokens=0, temperature=0.0),
        is_embedding=True,
        rid=check_name(req.rid, "rid"),
        extra_key=namespace(req.cache_salt, req.extra_key),
        cache=cache_mode(req.cache),
        priority=req.priority,
    )
    return [replace(shared, prompt=each) for each in inputs]


def _data(chunks: list[Chunk], encoding: str, dimensions: int | None) -> list[Event]:
    return [
        {"object": "embedding", "index": index, "embedding": _encoded(chunk.embedding, encoding, dimensions)}
        for index, chunk in enumerate(chunks)
    ]


def _encoded(embedding: bytes, encoding: str, dimensions: int | None) -> str | list[float]:
    """dimensions: the first ones, made to have length 1 again, as models that are trained for it expect (Kusupati et
    al., Matryoshka Representation Learning)."""
    values = np.frombuffer(embedding, np.float32)
    if dimensions is not None:
        if dimensions > len(values):
            raise RequestError(
                f"dimensions is {dimensions}, but this model's embeddings have {len(values)}", param="dimensions"
            )
        values = values[:dimensions] / max(float(np.linalg.norm(values[:dimensions])), 1e-12)
    if encoding == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
    return values.tolist()
