"""/generate, SGLang's own endpoint, and the answers of the offline Engine, in upstream's shape. Stateless.

In a stream, each event holds the whole answer so far, as upstream's do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from sglang.srt.entrypoints.request_fields import (
    MAX_ANSWERS,
    UNSUPPORTED_NATIVE_SAMPLING,
    SamplingFields,
    cache_mode,
    check_name,
    check_num_answers,
    did_you_mean,
    namespace,
    refuse_unsupported,
    sampling_params,
    session_id,
    shown,
    split_prompts,
)
from sglang.srt.entrypoints.streams import close, merge
from sglang.srt.entrypoints.usage import cached_tokens_details
from sglang.srt.managers.tokenizer_manager import Chunk, GenerateRequest, TokenizerManager
from sglang.srt.sampling.logprob_types import LogprobSpec, TokenLogprob
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.token_texts import TokenTexts

MAX_TOP_LOGPROBS = 1024
MAX_TOKEN_IDS_LOGPROB = 1024

Event = dict[str, Any]
Triple = tuple[float | None, int, str | None]


class GenerateReqInput(msgspec.Struct, frozen=True, kw_only=True):
    """text or input_ids: one prompt or a list. sampling_params, rid and the fields about log-probabilities: one value
    for all prompts, or a list."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = False
    extra_key: str | None = None
    cache_salt: str | None = None
    cache: str | None = None
    return_computed_tokens_details: bool | None = False
    priority: int | None = None
    session_id: str | None = None

    def is_batch(self) -> bool:
        prompt = self.text if self.text is not None else self.input_ids
        return isinstance(prompt, list) and not (self.text is None and isinstance((prompt or [None])[0], int))


async def serve_generate(
    req: GenerateReqInput, manager: TokenizerManager, max_answers: int = MAX_ANSWERS
) -> AsyncIterator[Event | list[Event]]:
    """One prompt with one answer gives an event. Several give a list of events, with a prompt's answers side by side.
    In a stream there is an event per piece, with its `index` in that list."""
    requests = _generate_requests(req, max_answers)
    is_list = req.is_batch() or len(requests) > 1
    texts = manager.token_texts if req.return_text_in_logprobs else None
    with_reasons = bool(req.return_computed_tokens_details)
    answers = [_Answer(request.logprobs, texts, with_reasons) for request in requests]
    chunks = merge(manager.generate_all(requests))
    events: list[Event] = [{} for _ in requests]
    try:
        async for index, chunk in chunks:
            mine = answers[index]
            events[index] = await manager.threads.run_if_many(mine.num_logprobs(chunk), mine.take, chunk)
            if req.stream:
                yield {**events[index], "index": index} if is_list else events[index]
        if not req.stream:
            yield events if is_list else events[0]
    finally:
        await close(chunks)


def _generate_requests(req: GenerateReqInput, max_answers: int) -> list[GenerateRequest]:
    if (req.text is None) == (req.input_ids is None):
        raise RequestError("give either text or input_ids", param="text")
    prompts: list[str | list[int]]
    if req.text is not None:
        prompts = split_prompts(req.text, "text")
    else:
        prompts = split_prompts(req.input_ids or [], "input_ids")
    check_num_answers(len(prompts), max_answers)

    def per_prompt(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list):
            return [value] * len(prompts)
        if len(value) != len(prompts):
            raise RequestError(f"{name} holds {len(value)} entries for {len(prompts)} prompts", param=name)
        return value

    if isinstance(req.rid, str) and len(prompts) > 1:
        raise RequestError("rid must be a list if there are several prompts", param="rid")
    token_ids: list[Any] | None = req.token_ids_logprob
    if token_ids is not None and len(token_ids) > max(len(prompts), MAX_TOKEN_IDS_LOGPROB):
        raise _too_many_token_ids(len(token_ids))
    if token_ids is not None and all(isinstance(token, int) for token in token_ids):
        token_ids = [token_ids] * len(prompts)
    columns = zip(
        prompts,
        per_prompt(req.sampling_params, "sampling_params"),
        per_prompt(req.rid, "rid"),
        per_prompt(req.return_logprob, "return_logprob"),
        per_prompt(req.logprob_start_len, "logprob_start_len"),
        per_prompt(req.top_logprobs_num, "top_logprobs_num"),
        per_prompt(token_ids, "token_ids_logprob"),
    )
    requests: list[GenerateRequest] = []
    for prompt, params, rid, wanted, start, top, ids in columns:
        fields = sampling_fields(params or {})
        request = GenerateRequest(
            prompt=prompt,
            params=sampling_params(fields),
            logprobs=_logprob_spec(start, top, ids) if wanted else None,
            rid=check_name(rid, "rid"),
            extra_key=namespace(req.cache_salt, req.extra_key),
            cache=cache_mode(req.cache),
            priority=req.priority,
            session_id=session_id(req.session_id),
            stream=bool(req.stream),
        )
        check_num_answers(len(requests) + (fields.n or 1), max_answers)
        requests += request.copies(fields.n or 1)
    return requests


def sampling_fields(body: dict[str, Any]) -> SamplingFields:
    """Unlike in other bodies, an unknown name is an error, as upstream has it."""
    refuse_unsupported(body, UNSUPPORTED_NATIVE_SAMPLING)
    known = {name: value for name, value in body.items() if name not in UNSUPPORTED_NATIVE_SAMPLING}
    for name in known:
        if name not in SamplingFields.__struct_fields__:
            likely = did_you_mean(name, (*SamplingFields.__struct_fields__, *UNSUPPORTED_NATIVE_SAMPLING))
            raise RequestError(f"sampling_params has no field {shown(name)}{likely}", param="sampling_params")
    try:
        return msgspec.convert(known, SamplingFields, str_keys=True)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling_params: {error}".replace("`$.", "`"), param="sampling_params") from None


def _logprob_spec(start: int | None, top: int | None, token_ids: list[int] | None) -> LogprobSpec:
    start, top, token_ids = -1 if start is None else start, top or 0, token_ids or []
    if start < -1:
        raise RequestError(
            f"logprob_start_len is {start}, but it must be a place in the prompt, or -1 for no part of it",
            param="logprob_start_len",
        )
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestError(
            f"top_logprobs_num is {top}, but it must be from 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs_num"
        )
    if len(token_ids) > MAX_TOKEN_IDS_LOGPROB:
        raise _too_many_token_ids(len(token_ids))
    return LogprobSpec(top=top, token_ids=tuple(token_ids), prompt_from=None if start == -1 else start)


def _too_many_token_ids(number: int) -> RequestError:
    return RequestError(
        f"token_ids_logprob holds {number} ids, at most {MAX_TOKEN_IDS_LOGPROB} are allowed",
        param="token_ids_logprob",
    )


class _Answer:
    """One answer so far. texts: None leaves the texts out of the log-probabilities. with_reasons: why prompt tokens
    were computed."""

    def __init__(self, spec: LogprobSpec | None, texts: TokenTexts | None, with_reasons: bool) -> None:
        self._spec = spec
        self._with_reasons = with_reasons
        self._texts = texts
        self._text = ""
        self._output_ids: list[int] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._logprobs: list[TokenLogprob] = []

    def num_logprobs(self, chunk: Chunk) -> int:
        """The number of log-probabilities in the event for everything up to this chunk."""
        before = len(self._prompt_logprobs) + len(self._logprobs)
        return before + len(chunk.prompt_logprobs) + len(chunk.logprobs)

    def take(self, chunk: Chunk) -> Event:
        """The event for everything up to this chunk."""
        self._text += chunk.text
        self._output_ids += chunk.output_ids
        self._prompt_logprobs += chunk.prompt_logprobs
        self._logprobs += chunk.logprobs
        reason = chunk.finish_reason
        return {
            "text": self._text,
            "output_ids": list(self._output_ids),
            "meta_info": {
                "id": chunk.rid,
                "finish_reason": msgspec.to_builtins(reason) if reason is not None else None,
                "prompt_tokens": chunk.prompt_tokens,
                "completion_tokens": chunk.completion_tokens,
                "cached_tokens": chunk.cached_tokens,
                "cached_tokens_details": cached_tokens_details(chunk.cached_tokens_details),
                "weight_version": "default",
                "e2e_latency": chunk.latency_s,
                **({"computed_tokens_details": dict(chunk.computed_tokens_details)} if self._with_reasons else {}),
                **self._logprob_fields(),
            },
        }

    def _logprob_fields(self) -> Event:
        if self._spec is None:
            return {}
        found: Event = {}
        for side, entries in (("input", self._prompt_logprobs), ("output", self._logprobs)):
            found[f"{side}_token_logprobs"] = [self._triple(entry.logprob, entry.token) for entry in entries]
            if self._spec.top:
                found[f"{side}_top_logprobs"] = [self._triples(entry, entry.top) for entry in entries]
            if self._spec.token_ids:
                found[f"{side}_token_ids_logprobs"] = [self._triples(entry, entry.token_ids) for entry in entries]
        return found

    def _triples(self, entry: TokenLogprob, pairs: list[tuple[float, int]]) -> list[Triple] | None:
        """None where nothing was predicted, as for a prompt's first token."""
        return None if entry.logprob is None else [self._triple(logprob, token) for logprob, token in pairs]

    def _triple(self, logprob: float | None, token: int) -> Triple:
        return logprob, token, self._texts.text(token) if self._texts is not None else None
