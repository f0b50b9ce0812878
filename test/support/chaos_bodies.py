"""Bodies that a chaos' clients send to every API of the server, and what of a reply must be the same each time."""

from __future__ import annotations

import random
from typing import Any

_TEXT = "When does the library open, and why does it close at noon? " * 8
_FUNCTION = {
    "name": "open_library",
    "description": "Opens it.",
    "parameters": {"type": "object", "properties": {"day": {"enum": ["Monday", "Friday"]}}, "required": ["day"]},
}
_SAMPLED = {"seed": 7, "top_p": 0.9, "frequency_penalty": 0.3, "presence_penalty": 0.2}
_ASK = [{"role": "user", "content": _TEXT}]
_USER, _ASSISTANT = {"role": "user", "content": "Tell me more."}, {"role": "assistant", "content": "At nine."}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
# What is another one each time.
_VARIES = {"id", "created", "created_at", "completed_at", "usage", "rid", "call_id"}
_VARIES |= {"e2e_latency", "cached_tokens", "cached_tokens_details"}


def bodies(prompts: list[list[int]], temperature: float) -> list[tuple[str, dict[str, Any]]]:
    """Of paths. prompts: token ids whose KV others share. temperature: of what is sampled."""
    sampled = {"temperature": temperature, **_SAMPLED}
    greedy = {"temperature": 0, "ignore_eos": True}
    penalized = {"temperature": temperature, "repetition_penalty": 1.1}
    native = {"input_ids": prompts[:2], "return_logprob": True}
    return [
        ("/v1/completions", {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": 0}),
        ("/v1/completions", {"prompt": prompts[-1], "n": 3, "logprobs": 1, "max_tokens": 5, **sampled}),
        ("/v1/completions", {"prompt": [_TEXT, _TEXT * 2], "max_tokens": 9, "stop": [" ", "e"], **greedy}),
        ("/v1/embeddings", {"input": [prompts[0], prompts[-1]]}),
        ("/v1/embeddings", {"input": _TEXT, "dimensions": 8}),
        ("/v1/responses", {"instructions": "Be brief.", "input": _TEXT, "max_output_tokens": 8, "temperature": 0}),
        ("/v1/responses", {"input": _TEXT, "max_output_tokens": 40, "temperature": 0, "tool_choice": "required"}
         | {"tools": [{"type": "function", **_FUNCTION}]}),
        ("/v1/messages", {"system": "Be brief.", "messages": _ASK, "max_tokens": 8, "temperature": 0}),
        ("/v1/messages", {"messages": [*_ASK, _ASSISTANT, _USER], "max_tokens": 6, "temperature": 0}),
        ("/v1/chat/completions", {"messages": _ASK, "max_tokens": 40, "temperature": 0, "tools": _TOOLS}
         | {"tool_choice": "required"}),
        ("/v1/chat/completions", {"messages": [*_ASK, _ASSISTANT, _USER], "n": 2, "max_tokens": 6, "logprobs": True}
         | {"top_logprobs": 2, **sampled}),
        ("/generate", {**native, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}),
        ("/generate", {**native, "logprob_start_len": 100, "top_logprobs_num": 2, "token_ids_logprob": [300, 301]}
         | {"sampling_params": {"max_new_tokens": 4, "n": 2, "sampling_seed": 3, **penalized}}),
        ("/generate", {"text": _TEXT, "sampling_params": {"regex": "[a-f]{3}(no|yes)", "max_new_tokens": 9}
         | {"temperature": 0}}),
    ]  # fmt: skip


# Each is refused with a status below 500, and leaves nothing.
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"input_ids": [300] * 40_000}),
    ("/generate", {"input_ids": [10**9]}),
    ("/generate", {"text": _TEXT, "sampling_params": {"temperature": -1}}),
    ("/generate", {"input_ids": [[300] * 100, []]}),
    ("/v1/completions", {"prompt": _TEXT, "best_of": 3}),
    ("/v1/chat/completions", {"messages": _ASK, "response_format": {"type": "json_schema", "json_schema": {}}}),
    ("/v1/messages", {"messages": _ASK}),
    ("/v1/responses", {"input": _TEXT, "previous_response_id": "one"}),
    ("/v1/embeddings", {"input": []}),
]


def drawn_fields(rng: random.Random) -> dict[str, Any]:
    """Fields that change no answer."""
    fields: dict[str, Any] = {}
    if rng.random() < 0.4:
        fields["priority"] = rng.choice((-20, 0, 20))
    if rng.random() < 0.4:
        fields["session_id"] = f"session {rng.randrange(4)}"
    if rng.random() < 0.1:
        fields["cache"] = rng.choice(("no_store", "bypass"))
    return fields


def difference(found: Any, wanted: Any, tolerance: float, at: str = "") -> str:
    """Where two replies to the same body differ, or "". tolerance: of log-probabilities and embeddings."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        pairs = {key: (found.get(key), wanted.get(key)) for key in found | wanted if key not in _VARIES}
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = dict(enumerate(zip(found, wanted)))  # type: ignore[arg-type]
    elif isinstance(found, float) and isinstance(wanted, (float, int)):
        return "" if abs(found - wanted) <= tolerance else f"{at}: {found} is not {wanted}"
    else:
        return "" if found == wanted else f"{at}: {found!r} is not {wanted!r}"
    return next(filter(None, (difference(*pair, tolerance, f"{at}.{key}") for key, pair in pairs.items())), "")
