"""/generate, SGLang's own endpoint, and what the offline Engine returns: upstream's shape. Stateless.

Streamed, each event holds the whole answer so far, as upstream's do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from sglang.srt.entrypoints.request_fields import (
    UNSUPPORTED_NATIVE_SAMPLING,
    namespace,
    refuse_unsupported,
    sampling_params,
    split_prompts,
)
from sglang.srt.entrypoints.streams import close, merge
from sglang.srt.managers.tokenizer_manager import Chunk, GenerateRequest, TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.errors import RequestError

Event = dict[str, Any]


class NativeSamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None


class GenerateReqInput(msgspec.Struct, frozen=True, kw_only=True):
    """text or input_ids: one prompt or a list. sampling_params, rid: one for all, or a list."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = False
    extra_key: str | None = None
    cache_salt: str | None = None

    def is_batch(self) -> bool:
        prompt = self.text if self.text is not None else self.input_ids
        return isinstance(prompt, list) and not (self.text is None and isinstance((prompt or [None])[0], int))


async def serve_generate(req: GenerateReqInput, manager: TokenizerManager) -> AsyncIterator[Event | list[Event]]:
    """Streamed: an event per piece, with `index` in a batch. Else one event, a list for a batch."""
    requests = _generate_requests(req)
    chunks = merge([manager.generate(request) for request in requests])
    texts = [""] * len(requests)
    ids: list[list[int]] = [[] for _ in requests]
    events: list[Event] = [{} for _ in requests]
    try:
        async for index, chunk in chunks:
            texts[index] += chunk.text
            ids[index] += chunk.output_ids
            events[index] = _event(chunk, texts[index], ids[index])
            if req.stream:
                yield {**events[index], "index": index} if req.is_batch() else events[index]
        if not req.stream:
            yield events if req.is_batch() else events[0]
    finally:
        await close(chunks)


def _generate_requests(req: GenerateReqInput) -> list[GenerateRequest]:
    if (req.text is None) == (req.input_ids is None):
        raise RequestError("give either text or input_ids", param="text")
    prompts: list[str | list[int]]
    if req.text is not None:
        prompts = split_prompts(req.text, "text")
    else:
        prompts = split_prompts(req.input_ids or [], "input_ids")

    def per_prompt(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list):
            return [value] * len(prompts)
        if len(value) != len(prompts):
            raise RequestError(f"{name} holds {len(value)} entries for {len(prompts)} prompts", param=name)
        return value

    if isinstance(req.rid, str) and len(prompts) > 1:
        raise RequestError("rid must be a list if there are several prompts", param="rid")
    return [
        GenerateRequest(
            prompt=prompt,
            params=native_sampling_params(params or {}),
            rid=rid,
            extra_key=namespace(req.cache_salt, req.extra_key),
            stream=bool(req.stream),
        )
        for prompt, params, rid in zip(
            prompts, per_prompt(req.sampling_params, "sampling_params"), per_prompt(req.rid, "rid")
        )
    ]


def native_sampling_params(body: dict[str, Any]) -> SamplingParams:
    """Unlike elsewhere, a name that nobody knows is an error, as upstream has it."""
    refuse_unsupported(body, UNSUPPORTED_NATIVE_SAMPLING)
    known = {name: value for name, value in body.items() if name not in UNSUPPORTED_NATIVE_SAMPLING}
    for name in known:
        if name not in NativeSamplingParams.__struct_fields__:
            raise RequestError(f"sampling_params has no field {name!r}", param="sampling_params")
    try:
        checked = msgspec.convert(known, NativeSamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling_params: {error}".replace("`$.", "`"), param="sampling_params") from None
    return sampling_params(**msgspec.structs.asdict(checked))


def _event(chunk: Chunk, text: str, output_ids: list[int]) -> Event:
    reason = chunk.finish_reason
    return {
        "text": text,
        "output_ids": list(output_ids),
        "meta_info": {
            "id": chunk.rid,
            "finish_reason": msgspec.to_builtins(reason) if reason is not None else None,
            "prompt_tokens": chunk.prompt_tokens,
            "completion_tokens": chunk.completion_tokens,
            "cached_tokens": chunk.cached_tokens,
            "cached_tokens_details": dict(chunk.cached_tokens_details),
            "weight_version": "default",
            "e2e_latency": chunk.latency_s,
        },
    }
