"""Calls as a JSON array: what an answer is constrained to where the server has no parser of the model's own format.

    [{"name": "get_weather", "parameters": {"city": "Paris"}}]

The form is SGLang's (its documentation of `tool_choice`). A single object is read as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.function_call.base_format_detector import BaseFormatDetector, calls_format, schema_tag
from sglang.srt.function_call.core_types import Tool
from sglang.srt.function_call.json_call import CallEnd
from sglang.srt.function_call.text_reader import Steps


class JsonArrayParser(BaseFormatDetector):
    def _read(self) -> Steps[None]:
        self.reader.set_mark()
        yield from self.reader.skip_space()
        yield from self.reader.take("[")
        yield from self.reader.skip_space()
        end = yield from self.json_call()
        while end is CallEnd.COMPLETE:
            self.reader.set_mark()
            yield from self.reader.skip_space()
            yield from self.reader.take(",")
            yield from self.reader.skip_space()
            end = yield from self.json_call()
        if end is CallEnd.NO_CALL:
            self.reader.rewind()
            if self.output.num_calls:
                yield from self.reader.skip_space()
                yield from self.reader.take("]")
        yield from self.text_before(())

    @classmethod
    def matches_template(cls, template: str) -> bool:
        return False

    @classmethod
    def call_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        # One tag per call, so that a schema's own `$ref` finds its definitions.
        tags = [schema_tag(f'{{"name": "{tool.name}", "parameters": ', tool, "}") for tool in tools]
        ends = [{"type": "const_string", "value": text} for text in "[]"]
        return {"type": "sequence", "elements": [ends[0], calls_format(tags, ", ", single), ends[1]]}
