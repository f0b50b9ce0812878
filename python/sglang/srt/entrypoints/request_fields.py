"""From a JSON body to something checked: decoding, fields we refuse, sampling parameters.

A field that upstream has and this engine does not is refused by name if it asks for something: a value that changes
nothing passes. A field that nobody knows is ignored, as OpenAI and upstream do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.errors import RequestError

T = TypeVar("T")

# Field -> the values, beside null, that ask for nothing.
_UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "structural_tag": (),
    "stop_regex": ([],),
    "custom_params": ({},),
}
UNSUPPORTED_NATIVE_SAMPLING = {
    **_UNSUPPORTED_SAMPLING,
    "min_new_tokens": (0,),
    "beam_width": (0, 1),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (),
}
_UNSUPPORTED_ROUTING: dict[str, tuple[Any, ...]] = {
    "lora_path": (),
    "session_id": (),
    "session_params": (),
    "custom_logit_processor": (),
    "images_config": ({},),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "routed_dp_rank": (),
    "disagg_prefill_dp_rank": (),
    "data_parallel_rank": (),
    "priority": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "return_sampling_mask": (False,),
    "sampling_logprobs_mode": (),
}
_UNSUPPORTED_OPENAI: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED_SAMPLING,
    **_UNSUPPORTED_ROUTING,
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
    "return_spec_tokens_details": (False,),
    "return_token_ids": (False,),
}
UNSUPPORTED_CHAT = {
    **_UNSUPPORTED_OPENAI,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "return_prompt_token_ids": (False,),
    "return_meta_info": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_output_ids_in_sglext": (False,),
    "reasoning_effort": (),
    "task": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "use_audio_in_video": (False,),
    "video_config": ({},),
    "input_ids": (),
}
UNSUPPORTED_COMPLETION = {
    **_UNSUPPORTED_OPENAI,
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
    "custom_labels": ({},),
}
UNSUPPORTED_GENERATE = {
    **_UNSUPPORTED_ROUTING,
    "input_embeds": (),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "modalities": (),
    "return_logprob": (False,),
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": (),
    "return_text_in_logprobs": (False, True),
    "return_indexer_topk": (False,),
    "lora_id": (),
    "require_reasoning": (False,),
    "max_thinking_tokens": (),
    "background": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "return_prompt_token_ids": (False,),
    "positional_embed_overrides": (),
}

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
_INT64 = range(-(1 << 63), 1 << 63)
_FIELD_IN_MESSAGE = re.compile(r"`\$\.([A-Za-z_]+)")


def decode_body(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("the body is not valid JSON: it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def convert(body: Mapping[str, Any], kind: type[T], unsupported: Mapping[str, Sequence[Any]]) -> T:
    """The body as a struct. Raises RequestError that names the field."""
    refuse_unsupported(body, unsupported)
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        found = _FIELD_IN_MESSAGE.search(str(error))
        message = str(error).replace("`$.", "`").replace(" | null`", "`")
        raise RequestError(message, param=found.group(1) if found else None) from None


def refuse_unsupported(body: Mapping[str, Any], unsupported: Mapping[str, Sequence[Any]]) -> None:
    for name, harmless in unsupported.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise RequestError(f"{name} is not supported by this engine yet: leave it out", param=name)


def sampling_params(
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    skip_special_tokens: bool = True,
    no_stop_trim: bool = False,
    sampling_seed: int | None = None,
    names: Mapping[str, str] = {},
) -> SamplingParams:
    """None means the default. names: what the client calls a parameter, where that differs. Raises RequestError with
    the range that was missed."""

    def require(ok: bool, name: str, value: Any, rule: str) -> None:
        if not ok:
            name = names.get(name, name)
            raise RequestError(f"{name} is {value!r}, but it must be {rule}", param=name)

    default = SamplingParams()
    max_new_tokens = default.max_new_tokens if max_new_tokens is None else max_new_tokens
    temperature = default.temperature if temperature is None else temperature
    top_p = default.top_p if top_p is None else top_p
    top_k = default.top_k if top_k is None else top_k
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    require(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "at least 1")
    require(math.isfinite(temperature) and temperature >= 0, "temperature", temperature, "a finite number from 0")
    require(0 < top_p <= 1, "top_p", top_p, "above 0 and at most 1")
    require(top_k == -1 or 1 <= top_k <= 1 << 31, "top_k", top_k, "at least 1, or -1 for the whole vocabulary")
    require(len(stops) <= MAX_STOP_STRINGS, "stop", f"a list of {len(stops)}", f"at most {MAX_STOP_STRINGS} strings")
    for each in stops:
        require(1 <= len(each) <= MAX_STOP_LENGTH, "stop", each[:40], f"strings of 1 to {MAX_STOP_LENGTH} characters")
    require(
        sampling_seed is None or sampling_seed in _INT64, "sampling_seed", sampling_seed, "a whole number of 64 bits"
    )
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        # Dividing logits by less would overflow, and nobody means it.
        temperature=0.0 if temperature < 1e-6 else temperature,
        top_p=top_p,
        top_k=top_k,
        stop=stops,
        stop_token_ids=tuple(stop_token_ids or ()),
        ignore_eos=ignore_eos,
        skip_special_tokens=skip_special_tokens,
        no_stop_trim=no_stop_trim,
        sampling_seed=sampling_seed,
    )


def split_prompts(prompt: str | Sequence[Any], name: str) -> list[str | list[int]]:
    """A text, token ids, or a list of either, as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(part) for part in prompt}
    if kinds == {int}:
        return [[int(token) for token in prompt]]
    if kinds == {str} or kinds == {list}:
        return list(prompt)
    raise RequestError(f"{name} must be a text, token ids, or a list of either, and not empty", param=name)


def namespace(cache_salt: str | None, extra_key: str | None) -> str:
    """What keeps the cache of requests apart. Encoded so that no two pairs give the same string."""
    if not cache_salt and not extra_key:
        return ""
    return msgspec.json.encode([cache_salt or "", extra_key or ""]).decode()
