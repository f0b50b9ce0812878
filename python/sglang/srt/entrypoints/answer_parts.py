"""From an answer's text to its parts: reasoning, content and tool calls. The seam between parsers and endpoints.

AnswerFormat.of(the server's format, the request's tools, the prompt) --parser()--> AnswerParser, one per answer
Chunk --parse(AnswerParser)--> AnswerDelta
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from sglang.srt.entrypoints.tool_request import ToolRequest
from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.gpt_oss_detector import MESSAGE_END, GptOssDetector, harmony_format
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.tokenizer_manager import Chunk, TokenizerManager
from sglang.srt.parser.chat_format import ChatFormat
from sglang.srt.parser.harmony_parser import BEGINS, HarmonyParser, HarmonyTokens
from sglang.srt.parser.reasoning_parser import (
    HARMONY,
    ReasoningFormat,
    ReasoningParser,
    Start,
    find_start,
    reasoning_format,
)
from sglang.srt.sampling.sampling_params import GrammarSpec, SamplingParams
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.token_texts import TokenTexts


@dataclass(frozen=True)
class CallDelta:
    """The first part of a call has its id and name, later parts have text of its arguments."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class AnswerDelta:
    """What a chunk adds."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to one request are read and constrained."""

    tools: ToolRequest
    # None: calls are not looked for.
    detector: type[BaseFormatDetector] | None
    template: str
    reasoning: ReasoningFormat | None
    start: Start
    # The reasoning is a part of its own, not of the content.
    separate_reasoning: bool = True
    stream_reasoning: bool = True

    @classmethod
    def of(
        cls,
        server: ChatFormat,
        tools: ToolRequest,
        prompt: str,
        continued: Mapping[str, Any] | None = None,
        *,
        separate_reasoning: bool = True,
        stream_reasoning: bool = True,
    ) -> AnswerFormat:
        """prompt: the rendered conversation. continued: the message that the answer continues."""
        detector = server.detector
        if tools.is_forced and (detector is None or detector.call_format(tools.tools, server.template, True) is None):
            detector = JsonArrayParser
        detector = detector if tools.tools else None
        reasoning = server.reasoning
        if reasoning is None and _is_harmony(detector):
            # Its calls have the same marks as the reasoning, which is a part of the text then.
            reasoning, separate_reasoning = HARMONY, False
        start = Start.BEHIND if reasoning is None else find_start(reasoning, prompt, continued)
        return cls(
            tools=tools,
            detector=detector,
            template=server.template,
            reasoning=reasoning,
            start=start,
            separate_reasoning=separate_reasoning,
            stream_reasoning=stream_reasoning,
        )

    @property
    def _single(self) -> bool:
        return not self.tools.parallel or self.tools.choice == "named"

    def sampling_params(self, params: SamplingParams, texts: TokenTexts) -> SamplingParams:
        """The request's parameters with what its tools and its reasoning need: a grammar, and special tokens in the
        text. Raises RequestError."""
        grammar = self._grammar(params)
        if grammar is not None:
            tag = json.dumps({"type": "structural_tag", "format": grammar})
            params = msgspec.structs.replace(params, grammar=GrammarSpec("structural_tag", tag))
        if params.skip_special_tokens and any(texts.is_special_text(each) for each in self._markers):
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        return params

    def _grammar(self, params: SamplingParams) -> dict[str, Any] | None:
        """That of the whole answer; None: the request's own, if it has one."""
        calls = self._call_format(params)
        own = None
        if params.grammar is not None and not self.tools.is_forced:
            own = _structural_format(params.grammar)
        if calls is None and (own is None or self.start is Start.BEHIND):
            return None
        if self.reasoning is not None and self.reasoning.is_harmony:
            if self._reads_all:
                return harmony_format(BEGINS[self.start], calls, own)
            return harmony_format(BEGINS[self.start], None, _either(own, calls))
        answer = _either(own, calls)
        return answer if self.reasoning is None else reasoning_format(self.reasoning, self.start, answer)

    def _call_format(self, params: SamplingParams) -> dict[str, Any] | None:
        """The format of an answer with calls; None: calls are not constrained."""
        tools = self.tools
        if self.detector is None:
            return None
        if tools.is_forced:
            # A schema is for answers without calls.
            if params.grammar is not None and params.grammar.kind != "json_schema":
                raise RequestError(
                    "tool_choice constrains the whole answer, and so does the request's other grammar: use one",
                    param="tool_choice",
                )
            _refuse_min_tokens(params, "tool_choice constrains where the answer may end")
            return self.detector.call_format(tools.callable_tools, self.template, self._single)
        if params.grammar is not None:
            # The model calls, or answers in the form that was asked for.
            if _structural_format(params.grammar) is None:
                return None
            return self.detector.call_format(tools.tools, self.template, self._single)
        if any(tool.strict for tool in tools.tools):
            if self._reads_all and self.start is Start.BEHIND:
                return None  # a text that is continued has begun the last message
            found = self.detector.strict_format(tools.tools, self.template, self._single)
            if found is not None and (self.detector.ends_behind_call or found.get("stop_after_first")):
                _refuse_min_tokens(params, "an answer ends behind the call of a strict tool")
            return found
        return None

    @property
    def _reads_all(self) -> bool:
        """The parser of the reasoning reads the calls too."""
        return self.reasoning is not None and self.reasoning.is_harmony and _is_harmony(self.detector)

    @property
    def _markers(self) -> tuple[str, ...]:
        reasoning = (self.reasoning.begin, self.reasoning.end) if self.reasoning else ()
        return (*(self.detector.markers if self.detector else ()), *reasoning)

    def parser(self, texts: TokenTexts) -> AnswerParser:
        return AnswerParser(self, texts)

    def reasoning_parser(self) -> ReasoningParser | HarmonyParser | None:
        if self.reasoning is None:
            return None
        separate = self.separate_reasoning
        stream = self.stream_reasoning or not separate
        if not self.reasoning.is_harmony:
            return ReasoningParser(self.reasoning, self.start, stream=stream, raw=not separate)
        tools = self.tools.tools if self._reads_all else None
        return HarmonyParser(self.start, tools, single=self._single, stream=stream, separate=separate)

    def token_counter(self, texts: TokenTexts) -> _TokenCounter | None:
        """Of the reasoning's tokens."""
        if self.reasoning is None:
            return None
        if self.reasoning.is_harmony:
            return HarmonyTokens(self.start, texts.data)
        return _ReasoningTokens(self.reasoning.end, texts)

    def call_parser(self) -> FunctionCallParser | None:
        """None: calls are not looked for, or the parser of the reasoning reads them."""
        if self.detector is None or self._reads_all:
            return None
        return FunctionCallParser(self.detector, self.tools.tools, self._single)


class AnswerParser:
    """Reads one answer. Owns how far its reasoning has come and how many calls it has."""

    def __init__(self, form: AnswerFormat, texts: TokenTexts) -> None:
        self._separate = form.separate_reasoning
        self._has_content = not form.tools.is_forced
        self._detector = form.detector
        self._calls = form.call_parser()
        self._reasoning = form.reasoning_parser()
        self._tokens = form.token_counter(texts)
        self.num_calls = 0

    def push(self, chunk: Chunk) -> AnswerDelta:
        end = chunk.finish_reason
        final, reasoning, text = end is not None, "", chunk.text
        if isinstance(self._reasoning, HarmonyParser) and end is not None and isinstance(end.matched, int):
            # The token that ended the message is not in the text: a call without arguments is whole.
            text += MESSAGE_END
        items: tuple[ToolCallItem, ...] = ()
        if self._reasoning is not None and self._tokens is not None:
            if not self._reasoning.ended:
                self._tokens.add(chunk.output_ids)
            result = self._reasoning.parse_stream_chunk(text, final)
            reasoning, text, items = result.reasoning_text, result.normal_text, result.calls
        if self._calls is not None:
            found = self._calls.parse_stream_chunk(text, final)
            text, items = found.normal_text, found.calls
        if not self._has_content:
            # Where an answer has to be calls, what is left of one that was cut off is no content.
            text = ""
        calls = tuple(map(self._call, items))
        self.num_calls += sum(call.name is not None for call in calls)
        if not self._separate:
            reasoning, text = "", reasoning + text
        return AnswerDelta(reasoning, text, calls)

    def _call(self, item: ToolCallItem) -> CallDelta:
        call_id = None
        if item.name is not None:
            assert self._detector is not None
            call_id = item.call_id or self._detector.new_call_id()
        return CallDelta(item.tool_index, call_id, item.name, item.parameters)

    @property
    def reasoning_tokens(self) -> int | None:
        """Those so far, with the mark that ends the reasoning; None if the server splits off no reasoning."""
        if self._reasoning is None or self._tokens is None:
            return None
        return self._tokens.number if self._reasoning.has_reasoning else 0

    def finish_reason(self, reason: FinishReason) -> str:
        """OpenAI's name of the reason."""
        return "tool_calls" if reason.type == "stop" and self.num_calls else reason.type


async def parse(parser: AnswerParser, chunk: Chunk, manager: TokenizerManager) -> AnswerDelta:
    """push, off the event loop for many tokens: a whole answer full of calls may take a second."""
    return await manager.threads.run_if_many(len(chunk.output_ids), parser.push, chunk)


class _TokenCounter(Protocol):
    number: int

    def add(self, ids: list[int]) -> None: ...


class _ReasoningTokens:
    """Counts the tokens up to the one that completes the end mark."""

    def __init__(self, end: str, texts: TokenTexts) -> None:
        self.number = 0
        self._end = end.encode()
        self._texts = texts
        self._tail = b""
        self._done = False

    def add(self, ids: list[int]) -> None:
        for token in ids:
            if self._done:
                return
            self.number += 1
            self._tail += self._texts.data(token)
            self._done = self._end in self._tail
            self._tail = self._tail[-len(self._end) :]


def _is_harmony(detector: type[BaseFormatDetector] | None) -> bool:
    return detector is not None and issubclass(detector, GptOssDetector)


def _either(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any]:
    """One of two formats, of which one may be missing."""
    if first is None or second is None:
        found = first or second
        assert found is not None
        return found
    return {"type": "or", "elements": [first, second]}


def _refuse_min_tokens(params: SamplingParams, why: str) -> None:
    """Where only an end may follow, and is not allowed yet, no token can be drawn."""
    if params.min_new_tokens:
        raise RequestError(f"{why}: leave min_tokens out", param="min_tokens")


def _structural_format(grammar: GrammarSpec) -> dict[str, Any] | None:
    """A grammar as a part of a structural tag; None if it is a structural tag of the older form."""
    if grammar.kind == "json_schema":
        return {"type": "json_schema", "json_schema": json.loads(grammar.source)}
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.source}
    if grammar.kind == "ebnf":
        return {"type": "grammar", "grammar": grammar.source}
    found: dict[str, Any] | None = json.loads(grammar.source).get("format")
    return found
