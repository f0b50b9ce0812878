"""What a server's chat template and flags make of its answers: which format its calls and its reasoning have."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.function_call_parser import find_detector
from sglang.srt.parser.reasoning_parser import ReasoningFormat, find_reasoning_format


@dataclass(frozen=True)
class ChatFormat:
    # All of the model's templates as one text.
    template: str = ""
    # None: the server parses no calls.
    detector: type[BaseFormatDetector] | None = None
    # None: the server splits off no reasoning.
    reasoning: ReasoningFormat | None = None

    @classmethod
    def of(cls, template: str, tool_call_parser: str | None, reasoning_parser: str | None) -> ChatFormat:
        return cls(
            template, find_detector(tool_call_parser, template), find_reasoning_format(reasoning_parser, template)
        )
