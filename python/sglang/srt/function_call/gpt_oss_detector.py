"""gpt-oss's answers, which are messages in the harmony format: a header, `<|message|>`, and a text.

    <|channel|>analysis<|message|>The user wants …<|end|>
    <|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{"in": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is noon.<|return|>

The line breaks are not part of it. Source: OpenAI's description of the harmony format, and the chat template of
openai/gpt-oss-20b, which writes the recipient before the channel. The prompt ends with `<|start|>assistant`. The
marks are special tokens. `<|call|>` and `<|return|>` end the generation, and are then not in the text.

The channel `analysis` is the reasoning. A message to a function is a call. All other messages are text, with a blank
line between two. No mark is text, nor is a header, even if an answer is cut off within it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.function_call.base_format_detector import BaseFormatDetector, loose
from sglang.srt.function_call.core_types import Tool
from sglang.srt.function_call.text_reader import Steps

_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"
_ENDS = (_END, "<|call|>", "<|return|>")
_MARKS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
# A message may end with a character that begins a mark. So many characters at the end of an answer are no text.
_SHORTEST_CUT = 2
_TO, _FUNCTIONS = "to=", "functions."
_RECIPIENT = re.compile(rf"{_TO}([^\s<]{{1,300}})")
_CHANNEL_NAME = re.compile(rf"{re.escape(_CHANNEL)}\s*(\w+)")
_BLANK_LINE = "\n\n"

ANALYSIS = f"{_CHANNEL}analysis{_MESSAGE}"
_PREAMBLE = f"{_CHANNEL}commentary{_MESSAGE}"
FINAL = f"{_CHANNEL}final{_MESSAGE}"
ANALYSIS_END = MESSAGE_END = _END
_NEXT = f"{_END}{_START}assistant"


class Begin(enum.Enum):
    """Where an answer begins."""

    HEADER = "header"
    # In a message of the channel `analysis`.
    ANALYSIS = "analysis"
    # In a message for the user.
    TEXT = "text"


class Place(enum.Enum):
    """Where in an answer the text ends that was read."""

    HEADER = "header"
    ANALYSIS = "analysis"
    OTHER = "other"


_FIRST_PLACES = {Begin.HEADER: Place.HEADER, Begin.ANALYSIS: Place.ANALYSIS, Begin.TEXT: Place.OTHER}


@dataclass(frozen=True)
class _Header:
    channel: str = ""
    recipient: str = ""

    @classmethod
    def of(cls, text: str) -> _Header:
        channel, recipient = _CHANNEL_NAME.search(text), _RECIPIENT.search(text)
        return cls(channel[1] if channel else "", recipient[1] if recipient else "")


class _Paragraphs:
    """The texts of several messages as one."""

    def __init__(self, out: Callable[[str], None]) -> None:
        self._out = out
        self._has_text = False
        self._is_new = False

    def begin(self) -> None:
        self._is_new = True

    def add(self, text: str) -> None:
        if self._is_new and self._has_text:
            self._out(_BLANK_LINE)
        self._is_new, self._has_text = False, True
        self._out(text)


class GptOssDetector(BaseFormatDetector):
    markers = _MARKS
    ends_behind_call = True

    def __init__(
        self,
        tools: Sequence[Tool],
        begin: Begin = Begin.HEADER,
        reasoning_out: Callable[[str], None] | None = None,
        reads_calls: bool = True,
    ) -> None:
        """reasoning_out: takes the reasoning; None: it is text. reads_calls: else calls are text, without their
        headers."""
        super().__init__(tools)
        self._begin = begin
        self._reads_calls = reads_calls
        self._text = _Paragraphs(self.output.text)
        self._reasoning = self._text if reasoning_out is None else _Paragraphs(reasoning_out)
        self.place = _FIRST_PLACES[begin]

    def _read(self) -> Steps[None]:
        header = _Header("analysis" if self._begin is Begin.ANALYSIS else "final")
        if self._begin is Begin.HEADER:
            header = yield from self._first_header()
        while mark := (yield from self._message(header)):
            if mark in _ENDS:
                self.place = Place.OTHER
                yield from self.reader.skip_space()
                header = _Header()
            elif mark != _MESSAGE:
                header = yield from self._header(mark)

    def _first_header(self) -> Steps[_Header]:
        """The prompt has its first mark. Where nothing of a header comes, the answer is text."""
        self.reader.set_mark()
        yield from self.reader.skip_space()
        if (yield from self.reader.take(_TO)):
            self.reader.drop_mark()
            return (yield from self._header(_TO))
        self.reader.rewind()
        return _Header()

    def _header(self, mark: str) -> Steps[_Header]:
        """The header that begins with the mark, which was passed over."""
        self.place = Place.HEADER
        parts = [mark]
        while True:
            mark = yield from self.reader.until(_MARKS, parts.append)
            if mark not in (_CHANNEL, _CONSTRAIN):
                break
            self.reader.skip(len(mark))
            parts.append(mark)
        if mark == _MESSAGE:
            self.reader.skip(len(mark))
        return _Header.of("".join(parts))

    def _message(self, header: _Header) -> Steps[str]:
        """The text behind a header. Returns the mark that ends it, which is passed over; empty at the end."""
        is_reasoning = header.channel == "analysis"
        name = self._function(header)
        if name and (yield from self._call(name)):
            is_reasoning = False
        self.place = Place.ANALYSIS if is_reasoning else Place.OTHER
        paragraphs = self._reasoning if is_reasoning else self._text
        paragraphs.begin()
        # Where no header has come, a mark is expected.
        shortest_cut = _SHORTEST_CUT if header.channel else 1
        mark = yield from self.reader.until(_MARKS, paragraphs.add, shortest_cut)
        self.reader.skip(len(mark))
        return mark

    def _function(self, header: _Header) -> str:
        """The function that a message is for; empty if it is for none. Built-in tools of the model have names without
        `functions.`, and are none of the client's unless it has one of that name."""
        if not self._reads_calls:
            return ""
        if header.recipient.startswith(_FUNCTIONS):
            return header.recipient.removeprefix(_FUNCTIONS)
        return header.recipient if header.recipient in self.tools else ""

    def _call(self, name: str) -> Steps[bool]:
        self.place = Place.OTHER
        yield from self.reader.skip_space()
        if (yield from self.reader.starts_with("{")):
            self.output.begin_call(name)
            yield from self.reader.json_container(self.output.arguments)
            return True
        for end in _ENDS:
            if (yield from self.reader.starts_with(end)):
                self.output.begin_call(name)
                self.output.arguments("{}")
                return True
        return False

    @classmethod
    def matches_template(cls, template: str) -> bool:
        return all(mark in template for mark in (_START, _CHANNEL, _MESSAGE))

    @classmethod
    def call_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        """Of one call: the mark behind it ends the generation."""
        return {"type": "or", "elements": [_one_call(tool) for tool in tools]}

    @classmethod
    def strict_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        """Of what follows the reasoning."""
        call = cls.call_format([loose(tool) for tool in tools], template, single)
        preambles = _any_number(_sequence(_free_message(_PREAMBLE), _any_number(_free_message(ANALYSIS))))
        final = _sequence(_const(FINAL), {"type": "any_text"})
        return _sequence(preambles, {"type": "or", "elements": [final, call]})


def harmony_format(begin: Begin, call: dict[str, Any] | None, text: dict[str, Any] | None) -> dict[str, Any]:
    """xgrammar's structural format of an answer whose reasoning is free. call, text: the formats of a call with its
    header and of what the user reads, of which the answer has one; None: it may not have that."""
    is_text = begin is Begin.TEXT
    choices = []
    if call is not None:
        choices.append(_sequence(_const(_NEXT), call) if is_text else call)
    if text is not None:
        choices.append(text if is_text else _sequence(_const(FINAL), text))
    answer = choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}
    if is_text:
        return answer
    reasoning = _any_number(_free_message(ANALYSIS))
    if begin is Begin.ANALYSIS:
        return _sequence(_free_message(""), reasoning, answer)
    return _sequence(reasoning, answer)


def _one_call(tool: Tool) -> dict[str, Any]:
    """With the headers that the model and its template write."""
    to = f"to={_FUNCTIONS}{tool.name}"
    headers = [
        f"{_CHANNEL}commentary {to} {_CONSTRAIN}json{_MESSAGE}",
        f"{_CHANNEL}commentary {to}{_CONSTRAIN}json{_MESSAGE}",
        f" {to}{_CHANNEL}commentary {_CONSTRAIN}json{_MESSAGE}",
        f" {to}{_CHANNEL}commentary json{_MESSAGE}",
    ]
    arguments = {"type": "json_schema", "json_schema": dict(tool.parameters), "style": "json"}
    return _sequence({"type": "or", "elements": [_const(header) for header in headers]}, arguments)


def _free_message(begin: str) -> dict[str, Any]:
    """A message with any text, and the beginning of the next one."""
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": _NEXT}


def _any_number(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "star", "content": content}


def _sequence(*elements: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}
