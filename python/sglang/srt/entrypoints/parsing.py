"""/parse_function_call and /separate_reasoning: the parsers for a text that a client has. Stateless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from sglang.srt.entrypoints.tool_request import tool_request
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS, FunctionCallParser
from sglang.srt.parser.chat_format import ChatFormat
from sglang.srt.parser.harmony_parser import HarmonyParser
from sglang.srt.parser.reasoning_parser import REASONING_PARSERS, ReasoningParser, Start
from sglang.srt.utils.errors import RequestError

T = TypeVar("T")


class ParseFunctionCallReq(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    tools: list[Any]
    tool_call_parser: str | None = None


class SeparateReasoningReqInput(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    reasoning_parser: str | None = None


def parse_function_call(req: ParseFunctionCallReq, server: ChatFormat) -> dict[str, Any]:
    """Without tool_call_parser, by the server's own."""
    detector = server.detector
    if req.tool_call_parser is not None:
        detector = _named(TOOL_CALL_PARSERS, "tool_call_parser", req.tool_call_parser)
    if detector is None:
        raise RequestError("this server has no --tool-call-parser: name a tool_call_parser", param="tool_call_parser")
    tools = tool_request(req.tools, None, None).tools
    found = FunctionCallParser(detector, tools).parse_non_stream(req.text)
    calls = [
        {"tool_index": call.tool_index, "name": call.name, "parameters": call.parameters} for call in found.calls
    ]
    return {"normal_text": found.normal_text, "calls": calls}


def _named(parsers: Mapping[str, T | None], field: str, name: str) -> T:
    found = parsers.get(name)
    if found is None:
        names = ", ".join(each for each, parser in parsers.items() if parser is not None)
        raise RequestError(f"{field} is {name!r}, but it must be one of {names}", param=field)
    return found


def separate_reasoning(req: SeparateReasoningReqInput, server: ChatFormat) -> dict[str, Any]:
    """Without reasoning_parser, by the server's own."""
    form = server.reasoning
    if req.reasoning_parser is not None:
        form = _named(REASONING_PARSERS, "reasoning_parser", req.reasoning_parser)
    if form is None:
        raise RequestError("this server has no --reasoning-parser: name a reasoning_parser", param="reasoning_parser")
    start = Start.INSIDE if form.forced else Start.BEFORE
    parser = HarmonyParser(start) if form.is_harmony else ReasoningParser(form, start)
    found = parser.parse_non_stream(req.text)
    return {"reasoning_text": found.reasoning_text, "text": found.normal_text}
