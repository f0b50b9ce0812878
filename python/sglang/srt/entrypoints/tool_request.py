"""A request's tools and what it wants of them, from OpenAI's fields to checked values. Pure.

Endpoints with other shapes build `ToolRequest` from their own fields by way of `make_tool`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.function_call.core_types import Tool
from sglang.srt.utils.errors import RequestError

MAX_TOOLS = 512
MAX_TOOLS_BYTES = 1 << 20
# OpenAI allows letters, digits, underscores and dashes, 64 at most; servers of the Model Context Protocol have longer
# names and dots.
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class ToolRequest:
    tools: tuple[Tool, ...] = ()
    # none, auto, required, or `named` with the tool in `name`.
    choice: str = "none"
    name: str | None = None
    # Whether an answer may have several calls.
    parallel: bool = True
    # As the chat template gets them.
    rendered: tuple[Mapping[str, Any], ...] = ()

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Those that the answer may call."""
        return tuple(tool for tool in self.tools if self.name in (None, tool.name))

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")


def tool_request(
    tools: Sequence[Any] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ToolRequest:
    """From the fields of a chat. Raises RequestError that names the field."""
    if tools and len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries, but {MAX_TOOLS} is the most", param="tools")
    if tools and len(msgspec.json.encode(tools)) > MAX_TOOLS_BYTES:
        raise RequestError(f"tools is longer than {MAX_TOOLS_BYTES} bytes of JSON: shorten schemas", param="tools")
    made: dict[str, Tool] = {}
    rendered = []
    for at, entry in enumerate(tools or ()):
        place = f"tools[{at}]"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("function"), Mapping):
            raise RequestError(f"{place} has no function: give its name and parameters there", param="tools")
        if entry.get("type", "function") != "function":
            raise RequestError(f"{place}.type is {entry['type']!r}, but only 'function' is supported", param="tools")
        function = entry["function"]
        tool = make_tool(
            f"{place}.function", function.get("name"), function.get("parameters"), function.get("strict")
        )
        if tool.name in made:
            raise RequestError(f"{place}.function.name is {tool.name!r} once more: names must differ", param="tools")
        made[tool.name] = tool
        rendered.append({"type": "function", "function": _shown(function, tool)})
    kind, name = _choice(choice, bool(made))
    if name is not None and name not in made:
        raise RequestError(f"tool_choice names {name!r}, which is not among tools", param="tool_choice")
    if kind == "required" and not made:
        raise RequestError("tool_choice is 'required', but there are no tools", param="tool_choice")
    if kind == "none":
        return ToolRequest()
    return ToolRequest(tuple(made.values()), kind, name, parallel is not False, tuple(rendered))


def make_tool(place: str, name: Any, parameters: Any, strict: Any) -> Tool:
    """place: that of the function in the request, for messages."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{place}.name must be 1 to 128 letters, digits, underscores, dots and dashes", param="tools"
        )
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(f"{place}.parameters must be a JSON schema of type 'object'", param="tools")
    properties = parameters.get("properties")
    if properties is not None and not isinstance(properties, Mapping):
        raise RequestError(f"{place}.parameters.properties must be an object", param="tools")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{place}.strict must be true or false", param="tools")
    return Tool(name, {"type": "object", **parameters}, bool(strict))


def _shown(function: Mapping[str, Any], tool: Tool) -> dict[str, Any]:
    """A function as templates write it into the prompt: `strict` is for the server, and templates expect a schema."""
    shown = {key: value for key, value in function.items() if key != "strict" and value is not None}
    shown.setdefault("description", "")
    shown.setdefault("parameters", dict(tool.parameters))
    return shown


def _choice(choice: str | Mapping[str, Any] | None, has_tools: bool) -> tuple[str, str | None]:
    if choice is None:
        return ("auto" if has_tools else "none"), None
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise RequestError(
                f"tool_choice is {choice!r}, but it must be one of {', '.join(_CHOICES)}, or name a function",
                param="tool_choice",
            )
        return (choice if has_tools or choice == "required" else "none"), None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}',
            param="tool_choice",
        )
    return "named", name
