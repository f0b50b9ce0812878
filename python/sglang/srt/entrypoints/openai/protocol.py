"""The requests of OpenAI's API that this engine serves, and the parts that replies share. Pure data."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang.srt.entrypoints.openai.grammar_fields import GrammarFields
from sglang.srt.entrypoints.openai.reasoning_fields import reasoning_variables
from sglang.srt.entrypoints.request_fields import (
    SamplingFields,
    StreamOptions,
    check_name,
    namespace,
    sampling_params,
    split_prompts,
)
from sglang.srt.entrypoints.usage import cached_tokens_details
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.tokenizer_manager import Chunk
from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.errors import RequestError

_OPENAI_NAMES = {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}
MAX_TOP_LOGPROBS = 20

Event = dict[str, Any]


class EngineFields(msgspec.Struct, frozen=True, kw_only=True):
    """This engine's own fields, in requests of other APIs, which become chats."""

    rid: str | None = None
    session_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    cache: str | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def engine_fields(self, **template_kwargs: Any) -> dict[str, Any]:
        """As fields of a `ChatCompletionRequest`. template_kwargs: variables of the chat template that the API's own
        fields stand for; the client's go first."""
        given = {name: getattr(self, name) for name in EngineFields.__struct_fields__}
        return given | {"chat_template_kwargs": {**template_kwargs, **(self.chat_template_kwargs or {})}}


class OpenAIRequest(GrammarFields, frozen=True, kw_only=True):
    """Fields that both endpoints share. None means the default, because a client may send null for any field."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    # vLLM's name of no_stop_trim.
    include_stop_str_in_output: bool | None = False
    return_cached_tokens_details: bool | None = False
    return_computed_tokens_details: bool | None = False
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    cache: str | None = None
    priority: int | None = None
    session_id: str | None = None
    user: str | None = None

    def sampling_params(
        self, max_new_tokens: int | None, least_new_tokens: int = 0, limit_name: str = "max_tokens"
    ) -> SamplingParams:
        """limit_name: the field that max_new_tokens comes from. See the function of that name."""
        fields = SamplingFields(
            n=self.n,
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            no_stop_trim=self.no_stop_trim or self.include_stop_str_in_output,
            sampling_seed=self.seed,
            **self.grammar(),
        )
        try:
            return sampling_params(fields, {**_OPENAI_NAMES, "max_new_tokens": limit_name}, least_new_tokens)
        except RequestError as error:
            raise self.named(error) from None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def namespace(self) -> str:
        return namespace(self.cache_salt, self.extra_key)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def reply_id(self) -> str:
        """The id of the reply and of its requests, so that a client can abort by the id that it sees."""
        return check_name(self.rid, "rid") or uuid.uuid4().hex


class ChatCompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    continue_final_message: bool | None = False
    # False: the prompt ends with the last message, and opens no answer.
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | float | None = None
    reasoning: dict[str, Any] | None = None
    thinking: dict[str, Any] | bool | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    separate_reasoning: bool | None = True
    stream_reasoning: bool | None = True

    def with_defaults(self, defaults: Mapping[str, float]) -> ChatCompletionRequest:
        """defaults: by the names of fields."""
        return msgspec.structs.replace(
            self, **{name: value for name, value in defaults.items() if getattr(self, name) is None}
        )

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the template is given beside messages and tools; one that does not know a variable ignores it. The
        client's own go first."""
        stated = reasoning_variables(self.reasoning_effort, self.reasoning, self.thinking)
        return stated | (self.chat_template_kwargs or {})

    def logprob_spec(self) -> LogprobSpec | None:
        top = self.top_logprobs or 0
        _check_top_logprobs("top_logprobs", top)
        if top and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return LogprobSpec(top=top) if self.logprobs else None


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """prompt: a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16
    best_of: int | None = None
    echo: bool | None = False
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        return split_prompts(self.prompt, "prompt")

    def logprob_spec(self) -> LogprobSpec | None:
        if self.logprobs is None:
            return None
        _check_top_logprobs("logprobs", self.logprobs)
        return LogprobSpec(top=self.logprobs, prompt_from=0 if self.echo else None)

    def check_best_of(self) -> None:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise RequestError(
                f"best_of is {self.best_of}, but it must be {self.num_choices}, which is n: every answer is returned",
                param="best_of",
            )


def _check_top_logprobs(name: str, value: int) -> None:
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{name} is {value}, but it must be from 0 to {MAX_TOP_LOGPROBS}", param=name)


class UsageOfChoices:
    """Counts the tokens of a reply's choices. A prompt with several answers counts once, with the cached tokens of
    its first answer."""

    def __init__(self, req: OpenAIRequest) -> None:
        self._choices_per_prompt = req.num_choices
        self._with_details = bool(req.return_cached_tokens_details)
        self._with_reasons = bool(req.return_computed_tokens_details)
        self._last: dict[int, Chunk] = {}
        self._reasoning: dict[int, int] = {}

    def add(self, index: int, chunk: Chunk, reasoning_tokens: int | None = None) -> None:
        """reasoning_tokens: those of the choice so far; None: they are not counted."""
        self._last[index] = chunk
        if reasoning_tokens is not None:
            self._reasoning[index] = reasoning_tokens

    def extension(self) -> Event:
        """SGLang's field of a reply, or of one event of a stream, that has the cached tokens per tier."""
        if not self._with_details:
            return {}
        # SGLang always has these two.
        return {"sglext": {"cached_tokens_details": {"device": 0, "host": 0} | _cached_by_tier(self._firsts())}}

    def _firsts(self) -> list[Chunk]:
        """One chunk of each prompt."""
        return [chunk for index, chunk in self._last.items() if index % self._choices_per_prompt == 0]

    def total(self) -> Event:
        usage = self._usage(self._firsts(), sum(chunk.completion_tokens for chunk in self._last.values()))
        return usage | _reasoning_usage(sum(self._reasoning.values()) if self._reasoning else None)

    def of(self, index: int, chunk: Chunk) -> Event:
        """The usage of one choice so far."""
        return self._usage([chunk], chunk.completion_tokens) | _reasoning_usage(self._reasoning.get(index))

    def _usage(self, prompts: list[Chunk], completion_tokens: int) -> Event:
        prompt_tokens = sum(chunk.prompt_tokens for chunk in prompts)
        cached: Event = {"cached_tokens": sum(chunk.cached_tokens for chunk in prompts)}
        if self._with_details:
            cached["cached_tokens_details"] = _cached_by_tier(prompts)
        if self._with_reasons:
            reasons: Counter[str] = Counter()
            for chunk in prompts:
                reasons.update(chunk.computed_tokens_details)
            cached["computed_tokens_details"] = dict(reasons)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": cached,
        }


def _cached_by_tier(prompts: list[Chunk]) -> dict[str, int]:
    details: Counter[str] = Counter()
    for chunk in prompts:
        details.update(chunk.cached_tokens_details)
    return cached_tokens_details(details)


def _reasoning_usage(tokens: int | None) -> Event:
    """OpenAI's field and SGLang's."""
    if tokens is None:
        return {}
    return {"completion_tokens_details": {"reasoning_tokens": tokens}, "reasoning_tokens": tokens}


def choice_end(reason: FinishReason | None, name: str | None = None) -> Event:
    """The fields of a choice that give the reason of its end. name: the reason's, where it is not the engine's."""
    return {"finish_reason": reason and (name or reason.type), "matched_stop": reason and reason.matched}
