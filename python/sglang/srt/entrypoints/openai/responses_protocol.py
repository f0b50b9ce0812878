"""OpenAI's Responses API: its request as a chat. Pure.

This engine keeps no responses: a client sends the whole conversation each time, and the cache makes that cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.entrypoints.openai.chat_messages import content_of, join_parts
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, EngineFields
from sglang.srt.entrypoints.request_fields import shown
from sglang.srt.utils.errors import RequestError

UNSUPPORTED_RESPONSES: dict[str, tuple[Any, ...]] = {
    # They need what an earlier response has left on the server.
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "top_logprobs": (0,),
    "max_tool_calls": (),
    "lora_path": (),
    # A response is named by this engine.
    "request_id": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "routed_dp_rank": (),
    "disagg_prefill_dp_rank": (),
    "data_parallel_rank": (),
}

_LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(EngineFields, frozen=True, kw_only=True):
    """The fields of POST /v1/responses, and this engine's own beside them. input: a text, or items."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Upstream's, beside OpenAI's.
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    # These change nothing here. They ask OpenAI's service for storage, prices, checks or its own caching.
    # "auto" drops no items: a conversation that is too long is refused.
    store: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    stream_options: dict[str, Any] | None = None

    def chat(self) -> ChatCompletionRequest:
        """Raises RequestError that names the field."""
        limit = self.max_output_tokens
        if limit is not None and limit < 1:
            raise RequestError(f"max_output_tokens is {limit}, but it must be at least 1", param="max_output_tokens")
        if self.truncation not in (None, "auto", "disabled"):
            raise RequestError(
                f"truncation is {shown(self.truncation)}, but it must be auto or disabled", param="truncation"
            )
        if _LOGPROBS in (self.include or ()):
            raise RequestError(
                f"include holds {_LOGPROBS}, which this engine does not give here: use /v1/chat/completions",
                param="include",
            )
        return ChatCompletionRequest(
            messages=_messages(self.instructions, self.input),
            max_completion_tokens=limit,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=self.stop,
            stream=self.stream,
            tools=[_chat_tool(tool, f"tools[{at}]") for at, tool in enumerate(self.tools or ())],
            tool_choice=_chat_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_response_format(self.text),
            **self.engine_fields(),
            reasoning_effort=_effort(self.reasoning),
        )


def _messages(instructions: str | None, items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not items:
        raise RequestError("input is empty: give a text or an item", param="input")
    found = [] if instructions is None else [{"role": "system", "content": instructions}]
    for at, item in enumerate(items):
        _add_item(found, item, f"input[{at}]")
    # Templates take one system message, in front.
    fronts = 0
    while fronts < len(found) and found[fronts]["role"] == "system":
        fronts += 1
    if fronts > 1:
        merged = "\n\n".join(join_parts(message["content"]) for message in found[:fronts])
        found[:fronts] = [{"role": "system", "content": merged}]
    return found


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    """An answer's reasoning, text and calls are items of their own there, and one message of a chat."""
    kind = item.get("type", "message")
    if kind == "message":
        role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
        if role not in ("system", "user", "assistant"):
            raise RequestError(
                f"{place}.role is {str(role)[:40]!r}, but it must be user, assistant, system or developer",
                param="input",
            )
        content = _content(item.get("content"), f"{place}.content")
        if role == "assistant":
            answer = _open_answer(messages)
            answer["content"] += join_parts(content)
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list):
            raise RequestError(f"{place} must have its content or summary as a list of parts", param="input")
        text = "".join(
            part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        )
        if text:
            answer = _open_answer(messages)
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text
    elif kind == "function_call":
        if not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
            raise RequestError(f"{place} must have a name, and arguments as a text", param="input")
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": str(item.get("call_id")), "type": "function", "function": function}
        _open_answer(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content})
    else:
        raise RequestError(
            f"{place} has the type {str(kind)[:40]!r}: this engine takes message, reasoning, function_call and "
            "function_call_output",
            param="input",
        )


def _open_answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(content: Any, place: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} must be a text or a list of parts", param="input")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(text, str):
            raise RequestError(
                f"{place}[{at}] has the type {str(kind)[:40]!r}: this engine takes input_text and output_text",
                param="input",
            )
        texts.append(text)
    return content_of(texts)


def _chat_tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"{place} has the type {str(tool.get('type'))[:40]!r}: this engine runs no tools, give functions",
            param="tools",
        )
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    if function.get("strict") is None:
        function.pop("strict", None)
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise RequestError(
            f"tool_choice has the type {str(choice.get('type'))[:40]!r}, but it must be a function, or one of none, "
            "auto and required",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    form = (text or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise RequestError("text.format must be an object with a type", param="text")
    kind, schema = form.get("type"), form.get("schema")
    if kind not in ("text", "json_object", "json_schema"):
        has = "no type" if kind is None else f"the type {shown(str(kind))}"
        raise RequestError(
            f"text.format has {has}, but it must be text, json_object or json_schema",
            param="text",
        )
    if kind != "json_schema":
        return {"type": kind}
    if not isinstance(schema, dict | bool):
        raise RequestError(
            'text.format of type json_schema must be {"type": "json_schema", "name": …, "schema": {…}}', param="text"
        )
    return {"type": kind, "json_schema": {"name": form.get("name"), "schema": schema}}


def _effort(reasoning: Mapping[str, Any] | None) -> str | None:
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestError("reasoning.effort must be a text", param="reasoning")
    return effort
