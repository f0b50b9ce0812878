"""A conversation's messages, from OpenAI's form to what chat templates take. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.entrypoints.openai.harmony_messages import harmony_messages
from sglang.srt.function_call.gpt_oss_detector import GptOssDetector
from sglang.srt.parser.chat_format import ChatFormat
from sglang.srt.utils.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# An assistant's message may be a call alone, and a tool may give nothing back.
_MAY_LACK_CONTENT = ("assistant", "tool", "function")


def content_of(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """A message's content of several texts, in the form of chats."""
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def join_parts(content: str | Sequence[Mapping[str, Any]]) -> str:
    """A content as one text, as upstream makes it for templates that take no parts."""
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)


def template_messages(messages: Sequence[Mapping[str, Any]], form: ChatFormat) -> list[dict[str, Any]]:
    """Each content is one text, or a list of parts where the template takes them. The arguments of calls are objects,
    as the templates expect. A tool's message gets the name of its function. What most templates would leave out takes
    the form that they know: a developer's message becomes one of the system, unless the template has that role, and
    the `function_call` and role `function` of older clients become a call and a tool's message with an id, which some
    templates demand. Thoughts among an assistant's parts become its `reasoning_content`. The template of gpt-oss gets
    what `harmony_messages` makes of them. Other fields stay as they are."""
    made = []
    template = form.template
    is_harmony = GptOssDetector.matches_template(template)
    names: dict[str, str] = {}
    # By function, of the last call that came without one.
    ids: dict[str, str] = {}
    for at, message in enumerate(messages):
        if isinstance(role := message.get("role"), str):
            message = {**message, "role": role.lower()}
        made.append(_message(message, at))
        if message["role"] == "developer" and "developer" not in template:
            made[-1]["role"] = "system"
        if is_harmony or made[-1]["role"] not in form.roles_of_parts:
            made[-1]["content"] = join_parts(made[-1]["content"])
        for call in made[-1].get("tool_calls", ()):
            names[str(call.get("id"))] = call["function"]["name"]
        if message.get("function_call") and not message.get("tool_calls"):
            (call,) = made[-1]["tool_calls"]
            # Mistral's templates take nine letters and digits.
            call["id"] = ids[call["function"]["name"]] = f"call{at:05}"
        if message.get("role") == "function" and (call_id := ids.get(str(message.get("name")))) is not None:
            made[-1].setdefault("tool_call_id", call_id)
        if message.get("role") == "tool" and (name := names.get(str(message.get("tool_call_id")))) is not None:
            made[-1].setdefault("name", name)
    return harmony_messages(made) if is_harmony else made


def _message(message: Mapping[str, Any], at: int) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role == "assistant" and not content and isinstance(message.get("refusal"), str):
        content = message["refusal"]  # as OpenAI's answers have it
    if role not in ROLES:
        raise RequestError(f"messages[{at}] has the role {role!r}; use one of {', '.join(ROLES)}", param="messages")
    if content is None and role not in _MAY_LACK_CONTENT:
        raise RequestError(f"messages[{at}] has no content, which a {role}'s may not lack", param="messages")
    thoughts = None
    if isinstance(content, list):
        texts, thoughts = _parts(content, role, f"messages[{at}]")
        content = content_of(texts)
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{at}].content must be a text or a list of parts", param="messages")
    made = {**message, "content": content if content is not None else ""}
    if thoughts and not made.get("reasoning_content"):
        made["reasoning_content"] = "\n".join(thoughts)
    if role == "function":
        made["role"] = "tool"
    calls, called = made.pop("tool_calls", None), made.pop("function_call", None)
    if calls:  # a template may take an empty list for calls
        made["tool_calls"] = _calls(calls, f"messages[{at}].tool_calls")
    elif called:
        made["tool_calls"] = [_call({"type": "function", "function": called}, f"messages[{at}].function_call")]
    return made


def _parts(parts: Sequence[Any], role: str, place: str) -> tuple[list[str], list[str]]:
    """The texts of a content's parts, and the thoughts. A refusal of the model is a text."""
    texts, thoughts = [], []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            texts.append(_text_of(part, ("text",), place))
        elif role == "assistant" and kind == "refusal":
            texts.append(_text_of(part, ("refusal",), place))
        elif role == "assistant" and kind in ("thinking", "reasoning"):
            thoughts.append(_text_of(part, ("thinking", "text"), place))
        else:
            also = ", refusal and thinking are" if role == "assistant" else " is"
            raise RequestError(f"{place} has a part of type {kind!r}: only text{also} supported", param="messages")
    return texts, thoughts


def _text_of(part: Mapping[str, Any], names: Sequence[str], place: str) -> str:
    text = next((part[name] for name in names if part.get(name) is not None), None)
    if not isinstance(text, str):
        raise RequestError(f"{place} has a part of type {part['type']} without `{names[0]}`", param="messages")
    return text


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{place} must be a list", param="messages")
    return [_call(call, f"{place}[{at}]") for at, call in enumerate(calls)]


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place} has no function with a name", param="messages")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> Any:
    """The object of which a client has the text. A text that is no object, which a model may have written, stays."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
