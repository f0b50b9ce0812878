"""Anthropic's Messages API: its request as a chat of OpenAI's form, and the shape of its errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sglang.srt.entrypoints.openai.chat_messages import content_of
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, EngineFields
from sglang.srt.utils.errors import RequestError

PATHS = ("/v1/messages", "/v1/messages/count_tokens")

UNSUPPORTED_MESSAGES: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "output_format": (),
}
# Of `thinking`.
_THINKING = ("enabled", "adaptive", "disabled")

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesRequest(EngineFields, frozen=True, kw_only=True):
    """The fields of POST /v1/messages, and this engine's own beside them."""

    messages: list[dict[str, Any]]
    # Only counting does without.
    max_tokens: int | None = None
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None

    @property
    def wants_thinking(self) -> bool:
        return (self.thinking or {}).get("type", "disabled") != "disabled"

    def chat(self) -> ChatCompletionRequest:
        """Raises RequestError that names the field."""
        messages = [] if self.system is None else [{"role": "system", "content": _content(self.system, "system")}]
        for at, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages[{at}]")
        choice = self.tool_choice or {}
        if self.thinking is not None and self.thinking.get("type") not in _THINKING:
            raise RequestError(f"thinking.type must be one of {', '.join(_THINKING)}", param="thinking")
        return ChatCompletionRequest(
            messages=messages,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            stream=self.stream,
            tools=[_chat_tool(tool, f"tools[{at}]") for at, tool in enumerate(self.tools or ())],
            tool_choice=_chat_tool_choice(choice),
            parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
            response_format=_response_format(self.output_config),
            # The last message may be the front of the answer.
            continue_final_message=bool(messages) and messages[-1]["role"] == "assistant",
            # Templates that know it let the model answer at once.
            **self.engine_fields(thinking=self.wants_thinking, enable_thinking=self.wants_thinking),
        )


def error_body(error: RequestError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
    message = (
        error.message if error.param is None or error.param in error.message else f"{error.param}: {error.message}"
    )
    return {"type": "error", "error": {"type": kind, "message": message}}


def _blocks(content: Any, place: str) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RequestError(f"{place} must be a text or a list of blocks", param=place)
    return content


def _content(content: Any, place: str) -> str | list[dict[str, Any]]:
    """Of blocks that are text alone."""
    texts = []
    for at, block in enumerate(_blocks(content, place)):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise _unsupported(block, f"{place}[{at}]")
        texts.append(block["text"])
    return content_of(texts)


def _unsupported(block: Mapping[str, Any], place: str) -> RequestError:
    return RequestError(
        f"{place} has the type {str(block.get('type'))[:40]!r}, or lacks what belongs to it: this engine takes text, "
        "tool_use, tool_result and thinking",
        param=place,
    )


def _chat_messages(message: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    role = message.get("role")
    if role == "assistant":
        return [_assistant(_blocks(message.get("content"), f"{place}.content"), f"{place}.content")]
    if role in ("user", "system"):
        return _user(role, _blocks(message.get("content"), f"{place}.content"), f"{place}.content")
    raise RequestError(f"{place}.role is {str(role)[:40]!r}, but it must be user or assistant", param=f"{place}.role")


def _user(role: str, blocks: list[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own there."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            messages.append({"role": role, "content": content_of(texts)})
            texts.clear()

    for at, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_result" and isinstance(block.get("tool_use_id"), str):
            end_text()
            result = _content(block.get("content") or "", f"{place}[{at}].content")
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
        elif kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        else:
            raise _unsupported(block, f"{place}[{at}]")
    end_text()
    return messages or [{"role": role, "content": ""}]


def _assistant(blocks: list[Mapping[str, Any]], place: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for at, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "redacted_thinking":
            pass  # it is for the model that wrote it
        elif kind == "tool_use" and isinstance(block.get("name"), str) and isinstance(block.get("input"), Mapping):
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        else:
            raise _unsupported(block, f"{place}[{at}]")
    message: dict[str, Any] = {"role": "assistant", "content": content_of(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _chat_tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise RequestError(
            f"{place} has the type {str(tool['type'])[:40]!r}: this engine runs no tools, give your own, with a name "
            "and an input_schema",
            param="tools",
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    for name in ("description", "strict"):
        if name in tool:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: Mapping[str, Any]) -> str | dict[str, Any] | None:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    choices: dict[Any, str | None] = {None: None, "auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str | None) or kind not in choices:
        raise RequestError(
            f"tool_choice has the type {str(kind)[:40]!r}, but it must be auto, any, tool or none",
            param="tool_choice",
        )
    return choices[kind]


def _response_format(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    form = (config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise RequestError(
            'output_config.format must be {"type": "json_schema", "schema": {…}}', param="output_config"
        )
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
