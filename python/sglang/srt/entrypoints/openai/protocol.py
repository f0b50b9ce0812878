"""The requests of OpenAI's API that this engine serves, and the parts that replies share. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang.srt.entrypoints.request_fields import namespace, sampling_params, split_prompts
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.sampling.sampling_params import SamplingParams

_OPENAI_NAMES = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both endpoints share. None means the default, as a client may send null for any."""

    model: str | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    return_cached_tokens_details: bool | None = False
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    user: str | None = None

    def sampling_params(self, max_new_tokens: int | None) -> SamplingParams:
        return sampling_params(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            no_stop_trim=bool(self.no_stop_trim),
            sampling_seed=self.seed,
            names=_OPENAI_NAMES,
        )

    @property
    def namespace(self) -> str:
        return namespace(self.cache_salt, self.extra_key)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatCompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """prompt: a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16

    def prompts(self) -> list[str | list[int]]:
        return split_prompts(self.prompt, "prompt")


def usage(
    prompt_tokens: int, completion_tokens: int, cached: int, details: Mapping[str, int] | None
) -> dict[str, Any]:
    """details: tier -> tokens, if the request asked for them."""
    cached_part: dict[str, Any] = {"cached_tokens": cached}
    if details is not None:
        cached_part["cached_tokens_details"] = dict(details)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": cached_part,
    }


def choice_end(reason: FinishReason | None) -> dict[str, Any]:
    """The fields of a choice that say why it ended."""
    return {"finish_reason": reason and reason.type, "matched_stop": reason and reason.matched}
