"""Calls of Qwen 2.5, Qwen 3 and Hermes: a JSON object between `<tool_call>` and `</tool_call>`.

    Let me look.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Source: the chat templates of Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B, which write a line break inside of each
marker; the README of NousResearch/Hermes-Function-Calling, whose models write "arguments" before "name"; the template
of hermes3 in Ollama's library, which puts several objects between one pair of markers.

A missing end marker is forgiven. A function that is not among the tools is still a call: the client can tell the
model that there is none.
"""

from __future__ import annotations

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

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Qwen25Detector(BaseFormatDetector):
    markers = (_BEGIN,)

    def _read(self) -> Steps[None]:
        while (yield from self.text_before(self.markers)):
            self.reader.set_mark()
            self.reader.skip(len(_BEGIN))
            yield from self.reader.skip_space()
            end = yield from self.json_call()
            if end is CallEnd.NO_CALL:
                self.give_back(_BEGIN)
                continue
            self.reader.drop_mark()
            if end is CallEnd.COMPLETE:
                yield from self._end_of_calls()

    def _end_of_calls(self) -> Steps[None]:
        """The end marker, or more objects before it."""
        while True:
            self.reader.set_mark()
            yield from self.reader.skip_space()
            if (yield from self.reader.take_cut(_END)):
                self.reader.drop_mark()
                return
            end = yield from self.json_call()
            if end is CallEnd.NO_CALL:
                self.reader.rewind()
                return
            self.reader.drop_mark()
            if end is CallEnd.BROKEN:
                return

    @classmethod
    def matches_template(cls, template: str) -> bool:
        # Other formats put elements between the same marks: Qwen3-Coder's <function=…>, GLM's <arg_key>.
        others = ("<function=", "<arg_key>")
        return _BEGIN in template and "arguments" in template and not any(other in template for other in others)

    @classmethod
    def call_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        return calls_format([_tag(tool) for tool in tools], "\n", single)

    @classmethod
    def strict_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        return triggered_format(_BEGIN, [_tag(loose(tool)) for tool in tools], single)


def _tag(tool: Tool) -> dict[str, Any]:
    return schema_tag(f'{_BEGIN}\n{{"name": "{tool.name}", "arguments": ', tool, f"}}\n{_END}")
