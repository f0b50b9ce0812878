"""Calls of Mistral's models, which all begin with the special token `[TOOL_CALLS]`.

    v2, v3, v7    [TOOL_CALLS] [{"name": "f", "arguments": {…}, "id": "abcdefghi"}, …]
    v11           [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{…}[TOOL_CALLS]…
    v13           [TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]…

Source: the chat templates v3, v7, v11 and v13 of mistralai/mistral-common. `[CALL_ID]` and `[ARGS]` are special
tokens as well. The templates refuse ids that have not nine characters.

An id behind the arguments comes too late for a stream. It is dropped, and the call gets a new one, as it does where
the model gave none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sglang.srt.function_call.base_format_detector import (
    BaseFormatDetector,
    calls_format,
    loose,
    schema_tag,
    triggered_format,
)
from sglang.srt.function_call.core_types import Tool
from sglang.srt.function_call.json_call import CallEnd
from sglang.srt.function_call.text_reader import Steps
from sglang.srt.utils.call_ids import mistral_call_id

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w./:-]*")
_MAX_NAME = 256
_CALL_ID = re.compile("[a-zA-Z0-9]*")
_CALL_ID_LENGTH = 9


class MistralDetector(BaseFormatDetector):
    markers = (_CALLS, _ID, _ARGS)

    def _read(self) -> Steps[None]:
        while (yield from self.text_before((_CALLS,))):
            self.reader.set_mark()
            self.reader.skip(len(_CALLS))
            yield from self.reader.skip_space()
            char = yield from self.reader.peek()
            if char in ("[", "{"):
                found = yield from self._json_calls(char)
            else:
                found = yield from self._named_call()
            if found:
                self.reader.drop_mark()
            else:
                self.give_back(_CALLS)

    def _json_calls(self, char: str) -> Steps[bool]:
        """An array of calls, or one call. Returns whether there is one."""
        if char == "{":
            return (yield from self.json_call(stops=(_CALLS,))) is not CallEnd.NO_CALL
        self.reader.skip(1)
        yield from self.reader.skip_space()
        if (yield from self.json_call(stops=(_CALLS,))) is CallEnd.NO_CALL:
            return False
        while True:
            self.reader.set_mark()
            yield from self.reader.skip_space()
            if (yield from self.reader.take("]")):
                return True
            if (yield from self.reader.take(",")):
                yield from self.reader.skip_space()
                if (yield from self.json_call(stops=(_CALLS,))) is not CallEnd.NO_CALL:
                    continue
            self.reader.rewind()
            return True

    def _named_call(self) -> Steps[bool]:
        """What may follow a name begins with a bracket: without a name it is no named call."""
        name = yield from self.reader.take_while(_NAME, _MAX_NAME)
        call_id = None
        if (yield from self.reader.take(_ID)):
            call_id = yield from self.reader.take_while(_CALL_ID, _CALL_ID_LENGTH)
        if not (yield from self.reader.take(_ARGS)):
            return False
        yield from self.reader.skip_space()
        if not (yield from self.reader.starts_with("{")):
            return False
        self.output.begin_call(name, call_id if call_id and len(call_id) == _CALL_ID_LENGTH else None)
        self.reader.drop_mark()
        yield from self.reader.json_container(self.output.arguments, (_CALLS,))
        return True

    @classmethod
    def matches_template(cls, template: str) -> bool:
        return _CALLS in template

    @classmethod
    def call_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        if _ARGS in template:
            return calls_format([_named_tag(tool, template) for tool in tools], "", single)
        calls = calls_format([_json_tag(tool) for tool in tools], ", ", single)
        return {"type": "sequence", "elements": [_text(f"{_CALLS} ["), calls, _text("]")]}

    @classmethod
    def strict_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        tools = [loose(tool) for tool in tools]
        if _ARGS in template:
            return triggered_format(_CALLS, [_named_tag(tool, template) for tool in tools], single)
        calls = calls_format([_json_tag(tool) for tool in tools], ", ", single)
        tag = {"type": "tag", "begin": f"{_CALLS} [", "content": calls, "end": "]"}
        return triggered_format(_CALLS, [tag], True)

    @staticmethod
    def new_call_id() -> str:
        return mistral_call_id()


def _text(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _json_tag(tool: Tool) -> dict[str, Any]:
    return schema_tag(f'{{"name": "{tool.name}", "arguments": ', tool, "}")


def _named_tag(tool: Tool, template: str) -> dict[str, Any]:
    if _ID not in template:
        return schema_tag(f"{_CALLS}{tool.name}{_ARGS}", tool, "")
    call_id = {"type": "regex", "pattern": f"[a-zA-Z0-9]{{{_CALL_ID_LENGTH}}}"}
    arguments = {"type": "json_schema", "json_schema": dict(tool.parameters)}
    content = {"type": "sequence", "elements": [call_id, _text(_ARGS), arguments]}
    return {"type": "tag", "begin": f"{_CALLS}{tool.name}{_ID}", "content": content, "end": ""}
