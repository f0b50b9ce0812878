"""Splits an answer of gpt-oss into reasoning, text and calls at once: their messages may come in any order, and have
the same marks. Pure; one object reads one answer in pieces. `GptOssDetector` has the format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sglang.srt.function_call.core_types import Tool
from sglang.srt.function_call.gpt_oss_detector import Begin, GptOssDetector, Place
from sglang.srt.parser.reasoning_parser import ReasoningParseResult, Start

_MARK_BYTES = max(map(len, GptOssDetector.markers))
BEGINS = {Start.INSIDE: Begin.ANALYSIS, Start.BEFORE: Begin.HEADER, Start.BEHIND: Begin.TEXT}


class HarmonyParser:
    """As `ReasoningParser`."""

    def __init__(
        self,
        start: Start,
        tools: Sequence[Tool] | None = None,
        *,
        single: bool = False,
        stream: bool = True,
        separate: bool = True,
    ) -> None:
        """tools: None: calls are text. single: calls after the first are dropped. stream: pass the reasoning on as it
        comes, not only when a message of it is whole. separate: else the reasoning is a part of the text."""
        self._held: list[str] = []
        self._detector = GptOssDetector(
            tools or (), BEGINS[start], self._held.append if separate else None, tools is not None
        )
        self._single = single
        self._stream = stream
        # More reasoning may follow until the answer ends.
        self.ended = False
        # `HarmonyTokens` counts nothing else.
        self.has_reasoning = True

    def parse_stream_chunk(self, text: str, final: bool = False) -> ReasoningParseResult:
        found = self._detector.parse_streaming_increment(text, final)
        calls = tuple(call for call in found.calls if not self._single or call.tool_index == 0)
        reasoning = ""
        if self._stream or final or self._detector.place is not Place.ANALYSIS:
            reasoning = "".join(self._held)
            self._held.clear()
        return ReasoningParseResult(reasoning, found.normal_text, calls)

    def parse_non_stream(self, text: str) -> ReasoningParseResult:
        return self.parse_stream_chunk(text, final=True)


class HarmonyTokens:
    """Counts the tokens of the messages that are reasoning, with their headers and marks."""

    def __init__(self, start: Start, data: Callable[[int], bytes]) -> None:
        """data: the bytes of a token."""
        self.number = 0
        self._data = data
        self._detector = GptOssDetector((), BEGINS[start], lambda text: None)
        # Those of a header that is not whole.
        self._waiting = 0
        # The last bytes, as many as a mark has.
        self._tail = b""

    def add(self, ids: Iterable[int]) -> None:
        for token in ids:
            data = self._data(token)
            near = self._tail + data
            self._tail = near[-_MARK_BYTES:]
            before = self._detector.place
            if before is Place.HEADER or b"<" in near:  # most tokens are near no mark
                self._detector.parse_streaming_increment(data.decode(errors="ignore"))
            after = self._detector.place
            if Place.ANALYSIS in (before, after):
                self.number += 1 + self._waiting
                self._waiting = 0
            else:
                self._waiting = self._waiting + 1 if after is Place.HEADER else 0
