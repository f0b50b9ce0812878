"""How each kind of server is asked, and what its answers mean. Builds bodies and parses events; sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.serving_benchmark.records import Progress, tiers_of

DONE = b"[DONE]"


@dataclass(frozen=True)
class Ask:
    """One request."""

    # A text, token ids, or a chat's messages, as the backend takes them.
    prompt: str | Sequence[int] | Sequence[Mapping[str, str]]
    output_len: int


@dataclass(frozen=True)
class Settings:
    """What all requests of a run have in common."""

    model: str
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    # Of one request, to the end of its answer.
    timeout_s: float = 3600.0
    # Laid over every body; an object in it is laid over the body's object of that name.
    extra_body: Mapping[str, Any] = field(default_factory=dict)


class AnswerError(Exception):
    """An event tells that the request failed; the message is the server's."""


def error_message(content: Any) -> str | None:
    """The server's reason in a reply or an event; None: it has none."""
    if not isinstance(content, dict):
        return None
    error = content.get("error")
    if error is None and content.get("object") != "error":
        return str(content["detail"]) if "detail" in content else None
    found = error if error is not None else content
    return str(found.get("message", found)) if isinstance(found, dict) else str(found)


@dataclass(frozen=True)
class Backend:
    path: str
    default_port: int
    # Whether prompts are messages.
    is_chat: bool
    # Where the cache is flushed.
    flush_path: str
    body: Callable[[Ask, Settings], dict[str, Any]]
    # (content of an event or reply, the text so far) -> what it tells. Raises KeyError, TypeError or IndexError.
    parse: Callable[[dict[str, Any], str], Progress]

    def request_body(self, ask: Ask, settings: Settings) -> dict[str, Any]:
        body = self.body(ask, settings)
        for name, value in settings.extra_body.items():
            known = body.get(name)
            body[name] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
        return body

    def read(self, content: Any, text: str) -> Progress:
        """Raises `AnswerError`."""
        message = error_message(content)
        if message is not None:
            raise AnswerError(message)
        try:
            found = self.parse(content, text)
            for count in (found.num_tokens, found.prompt_tokens, found.cached_tokens):
                if count is not None and not isinstance(count, int):
                    raise TypeError("a count that is no number")
            return found
        except (KeyError, TypeError, IndexError, AttributeError):
            raise AnswerError("an answer of another kind of server: choose another --backend") from None


def _generate_body(ask: Ask, settings: Settings) -> dict[str, Any]:
    prompt = {"text": ask.prompt} if isinstance(ask.prompt, str) else {"input_ids": ask.prompt}
    params = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_new_tokens": ask.output_len,
        "ignore_eos": settings.ignore_eos,
    }
    return {**prompt, "sampling_params": params, "stream": settings.stream}


def _generate_parse(content: dict[str, Any], text: str) -> Progress:
    meta = content["meta_info"]
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise AnswerError(str(reason.get("message") or "the server aborted the request"))
    return Progress(
        text=content["text"][len(text) :],
        num_tokens=meta["completion_tokens"],
        prompt_tokens=meta["prompt_tokens"],
        output_ids=content.get("output_ids"),
        cached_tokens=meta.get("cached_tokens"),
        cached_tokens_by_tier=tiers_of(meta.get("cached_tokens_details")),
    )


def _openai_body(ask: Ask, settings: Settings, prompt: dict[str, Any], has_tiers: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": settings.model,
        **prompt,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": ask.output_len,
        "ignore_eos": settings.ignore_eos,
        "stream": settings.stream,
    }
    if settings.stream:
        # The counts in each event tell how many tokens it brought.
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if has_tiers:
        body["return_cached_tokens_details"] = True
    return body


def _openai_parse(content: dict[str, Any], text_of: Callable[[dict[str, Any]], str | None]) -> Progress:
    usage = content.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    choices = content["choices"]
    return Progress(
        text=(text_of(choices[0]) or "") if choices else "",
        num_tokens=usage.get("completion_tokens"),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens"),
        cached_tokens_by_tier=tiers_of(details.get("cached_tokens_details")),
    )


def _chat_text(choice: dict[str, Any]) -> str | None:
    message = choice["delta"] if "delta" in choice else choice["message"]
    return message.get("content") or message.get("reasoning_content")


def _completions(default_port: int, flush_path: str, has_tiers: bool) -> Backend:
    return Backend(
        "/v1/completions",
        default_port,
        False,
        flush_path,
        lambda ask, settings: _openai_body(ask, settings, {"prompt": ask.prompt}, has_tiers),
        lambda content, _: _openai_parse(content, lambda choice: choice["text"]),
    )


def _chat(default_port: int, flush_path: str, has_tiers: bool) -> Backend:
    return Backend(
        "/v1/chat/completions",
        default_port,
        True,
        flush_path,
        lambda ask, settings: _openai_body(ask, settings, {"messages": ask.prompt}, has_tiers),
        lambda content, _: _openai_parse(content, _chat_text),
    )


_SGLANG = (30000, "/flush_cache")
_VLLM = (8000, "/reset_prefix_cache")

BACKENDS = {
    "sglang": Backend("/generate", _SGLANG[0], False, _SGLANG[1], _generate_body, _generate_parse),
    "sglang-oai": _completions(*_SGLANG, has_tiers=True),
    "sglang-oai-chat": _chat(*_SGLANG, has_tiers=True),
    "vllm": _completions(*_VLLM, has_tiers=False),
    "vllm-chat": _chat(*_VLLM, has_tiers=False),
}
