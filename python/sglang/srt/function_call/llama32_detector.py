"""Calls of Llama 3.1, 3.2 and 3.3: a JSON object that is the whole answer, or follows `<|python_tag|>`.

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

Source: the chat template of meta-llama/Llama-3.1-8B-Instruct, which asks for `{"name": function name, "parameters":
dictionary of argument name and its value}`; Meta's page of prompt formats, which has `<|python_tag|>` as the special
token of calls; SGLang's documentation of `llama3`, for several calls separated by semicolons.

Without the special token the object must be the beginning of the answer and name one of the tools, because an answer
may be JSON as well. Llama's calls of built-in tools (`brave_search.call(…)`) are no functions of a client, and stay
text.
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

_TAG = "<|python_tag|>"


class Llama32Detector(BaseFormatDetector):
    markers = (_TAG,)

    def _read(self) -> Steps[None]:
        yield from self._calls("", known_only=True)
        while (yield from self.text_before(self.markers)):
            yield from self._calls(_TAG, known_only=False)

    def _calls(self, marker: str, known_only: bool) -> Steps[None]:
        """Calls that begin with the marker here, or text. The reader stands at the marker."""
        self.reader.set_mark()
        self.reader.skip(len(marker))
        yield from self.reader.skip_space()
        end = yield from self.json_call(known_only, self.markers)
        if end is CallEnd.NO_CALL:
            self.give_back(marker)
            return
        while end is CallEnd.COMPLETE:
            self.reader.set_mark()
            yield from self.reader.skip_space()
            yield from self.reader.take(";")
            yield from self.reader.skip_space()
            end = yield from self.json_call(known_only, self.markers)
            if end is CallEnd.NO_CALL:
                yield from self._behind_the_last()
                return
        self.reader.drop_mark()

    def _behind_the_last(self) -> Steps[None]:
        """A semicolon behind the last call is layout, if nothing else follows."""
        self.reader.rewind()
        self.reader.set_mark()
        yield from self.reader.skip_space()
        yield from self.reader.take(";")
        yield from self.reader.skip_space()
        if not (yield from self.reader.more()) or (yield from self.reader.starts_with(_TAG)):
            self.reader.drop_mark()
        else:
            self.reader.rewind()

    @classmethod
    def matches_template(cls, template: str) -> bool:
        return '"parameters": ' in template and "ipython" in template

    @classmethod
    def call_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        return calls_format([_tag("", tool) for tool in tools], "; ", single)

    @classmethod
    def strict_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        return triggered_format(_TAG, [_tag(_TAG, loose(tool)) for tool in tools], single)


def _tag(marker: str, tool: Tool) -> dict[str, Any]:
    return schema_tag(f'{marker}{{"name": "{tool.name}", "parameters": ', tool, "}")
