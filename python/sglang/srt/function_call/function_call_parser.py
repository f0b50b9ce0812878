"""The registry of formats of tool calls, and one answer's parser. A new format is a file here and an entry below."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import StreamingParseResult, Tool, ToolCallItem
from sglang.srt.function_call.gpt_oss_detector import GptOssDetector
from sglang.srt.function_call.llama32_detector import Llama32Detector
from sglang.srt.function_call.mistral_detector import MistralDetector
from sglang.srt.function_call.pythonic_detector import PythonicDetector
from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector
from sglang.srt.function_call.qwen25_detector import Qwen25Detector

AUTO = "auto"

# Names of --tool-call-parser. `auto` takes the first of the others whose format the chat template writes.
TOOL_CALL_PARSERS: dict[str, type[BaseFormatDetector] | None] = {
    AUTO: None,
    "qwen3_coder": Qwen3CoderDetector,
    "qwen25": Qwen25Detector,
    "qwen": Qwen25Detector,
    "hermes": Qwen25Detector,
    "mistral": MistralDetector,
    "pythonic": PythonicDetector,
    "llama3": Llama32Detector,
    "gpt-oss": GptOssDetector,
}


def find_detector(name: str | None, template: str) -> type[BaseFormatDetector] | None:
    """The format that --tool-call-parser names; None if it names none, or `auto` finds none."""
    if name is None:
        return None
    if name != AUTO:
        return TOOL_CALL_PARSERS[name]
    return next((each for each in TOOL_CALL_PARSERS.values() if each and each.matches_template(template)), None)


class FunctionCallParser:
    """One answer. single: calls after the first are dropped, for `parallel_tool_calls: false`."""

    def __init__(self, detector: type[BaseFormatDetector], tools: Sequence[Tool], single: bool = False) -> None:
        self._detector = detector(tools)
        self._single = single

    def parse_stream_chunk(self, text: str, final: bool = False) -> StreamingParseResult:
        found = self._detector.parse_streaming_increment(text, final)
        if not self._single:
            return found
        return StreamingParseResult(found.normal_text, tuple(call for call in found.calls if call.tool_index == 0))

    def parse_non_stream(self, text: str) -> StreamingParseResult:
        """Each call is one item."""
        return joined(self.parse_stream_chunk(text, final=True))

    def new_call_id(self) -> str:
        return self._detector.new_call_id()


def joined(*parts: StreamingParseResult) -> StreamingParseResult:
    """The parts of a stream as one result, in which each call is one item."""
    calls: dict[int, ToolCallItem] = {}
    texts: dict[int, list[str]] = {}
    for item in (item for part in parts for item in part.calls):
        calls.setdefault(item.tool_index, item)
        texts.setdefault(item.tool_index, []).append(item.parameters)
    whole = (ToolCallItem(at, call.name, "".join(texts[at]), call.call_id) for at, call in calls.items())
    return StreamingParseResult("".join(part.normal_text for part in parts), tuple(whole))
