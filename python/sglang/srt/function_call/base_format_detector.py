"""What all formats of tool calls share: one object reads one answer, in pieces of any size.

push(text) -> TextReader -> a format's `_read` -> CallOutput -> text and parts of calls
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from sglang.srt.function_call.call_output import CallOutput
from sglang.srt.function_call.core_types import StreamingParseResult, Tool
from sglang.srt.function_call.json_call import CallEnd, JsonCall
from sglang.srt.function_call.text_reader import Steps, TextReader
from sglang.srt.utils.call_ids import openai_call_id


class BaseFormatDetector(ABC):
    """The result does not depend on how the text is cut, and no text is lost: what is no call is normal text."""

    # Texts that begin a call. If one is a special token, the detokenizer must not drop special tokens.
    markers: ClassVar[tuple[str, ...]] = ()
    # An answer ends behind its first call.
    ends_behind_call: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.reader = TextReader()
        self.output = CallOutput()
        self._steps = self._read()

    def parse_streaming_increment(self, text: str, final: bool = False) -> StreamingParseResult:
        """final: the answer ends with this text."""
        self.reader.push(text, final)
        next(self._steps, None)
        return self.output.take(final)

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Read the answer to its end."""

    @classmethod
    @abstractmethod
    def matches_template(cls, template: str) -> bool:
        """Whether a chat template writes calls in this format."""

    @classmethod
    def call_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        """xgrammar's structural format of an answer that is one call (single) or several; None: the format has no
        grammar, and calls are constrained to a JSON array instead."""
        return None

    @classmethod
    def strict_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        """The same for an answer of text and calls, in which each call keeps to its tool's schema."""
        return None

    @staticmethod
    def new_call_id() -> str:
        return openai_call_id()

    # For formats

    def json_call(self, known_only: bool = False, stops: Sequence[str] = ()) -> Steps[CallEnd]:
        """Read a call that is a JSON object. known_only: a name that is no tool's makes it no call."""
        known = self.tools if known_only else None
        return (yield from JsonCall(self.reader, self.output, known, stops).read())

    def text_before(self, markers: Sequence[str]) -> Steps[str]:
        """Put out the text before the next marker. Returns the marker, which comes next; empty at the end."""
        return (yield from self.reader.until(markers, self.output.text))

    def give_back(self, marker: str) -> None:
        """What was read since the mark is no call: its marker is text, and the rest is read again."""
        self.reader.rewind()
        self.reader.skip(len(marker))
        self.output.text(marker)


def schema_tag(begin: str, tool: Tool, end: str, **more: Any) -> dict[str, Any]:
    """xgrammar's tag of one call: its arguments, by their schema, between fixed texts. more: of the `json_schema`
    format."""
    content = {"type": "json_schema", "json_schema": dict(tool.parameters), "style": "json", **more}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def loose(tool: Tool) -> Tool:
    """The tool as an answer with strict tools holds it: one that is not strict may have any arguments."""
    return tool if tool.strict else Tool(tool.name, {"type": "object"})


def calls_format(tags: Sequence[dict[str, Any]], separator: str, single: bool) -> dict[str, Any]:
    """One call, or several with a separator."""
    if single:
        return {"type": "or", "elements": list(tags)}
    return {"type": "tags_with_separator", "tags": list(tags), "separator": separator, "at_least_one": True}


def triggered_format(trigger: str, tags: Sequence[dict[str, Any]], single: bool) -> dict[str, Any]:
    """Text, and a call wherever the trigger stands."""
    return {"type": "triggered_tags", "triggers": [trigger], "tags": list(tags), "stop_after_first": single}
