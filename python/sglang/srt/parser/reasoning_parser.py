"""Splits an answer into what the model thinks and what it answers. Pure; one object reads one answer in pieces.

    <think>
    The user wants …
    </think>

    Paris.

Source: the chat templates of deepseek-ai/DeepSeek-R1 and of Qwen/Qwen3-8B (with `<think>` and `</think>`), and
SGLang's documentation of `--reasoning-parser`. Some templates write `<think>` at the end of the prompt
(DeepSeek-R1, Qwen3-Thinking-2507, Qwen 3.5). The answer then begins inside of the reasoning. Qwen 3 without thinking
gets a prompt that ends with `</think>`, and its answer is no reasoning.

White space at the ends of the reasoning and before the answer is layout and is dropped. The result does not depend on
how the text is cut.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.function_call.gpt_oss_detector import ANALYSIS, ANALYSIS_END, FINAL, GptOssDetector
from sglang.srt.function_call.text_reader import Steps, TextReader

AUTO = "auto"

_SPACE = re.compile(r"\s*")
_MAX_SPACE = 1 << 20


@dataclass(frozen=True)
class ReasoningFormat:
    begin: str
    end: str
    # Answers begin inside of the reasoning, unless the prompt has closed it.
    forced: bool
    # The answer is messages with the marks of gpt-oss, and a `HarmonyParser` reads it.
    is_harmony: bool = False


HARMONY = ReasoningFormat(ANALYSIS, ANALYSIS_END, forced=False, is_harmony=True)
_THINK = ReasoningFormat("<think>", "</think>", forced=False)
_ALWAYS_THINK = ReasoningFormat("<think>", "</think>", forced=True)

# Names of --reasoning-parser. `auto` takes `gpt-oss` or `qwen3` where the chat template has its marks: what the
# prompt and the answer show decides the rest.
REASONING_PARSERS: dict[str, ReasoningFormat | None] = {
    AUTO: None,
    "deepseek-r1": _ALWAYS_THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _ALWAYS_THINK,
    "gpt-oss": HARMONY,
}


def find_reasoning_format(name: str | None, template: str) -> ReasoningFormat | None:
    """The format that --reasoning-parser names; None if it names none, or `auto` finds none."""
    if name is None:
        return None
    if name != AUTO:
        return REASONING_PARSERS[name]
    if GptOssDetector.matches_template(template):
        return HARMONY
    return _THINK if _THINK.end in template else None


class Start(enum.Enum):
    """Where an answer begins."""

    # Inside of the reasoning: the prompt has opened it.
    INSIDE = "inside"
    # Before it: the answer may open it.
    BEFORE = "before"
    # Behind it: the prompt has closed it, and the answer has none.
    BEHIND = "behind"


def find_start(form: ReasoningFormat, prompt: str, continued: Mapping[str, Any] | None = None) -> Start:
    """prompt: the rendered conversation. continued: the message that the answer continues, if it does."""
    text = (continued or {}).get("content")
    if isinstance(text, str) and text:
        return Start.INSIDE if text.rfind(form.begin) > text.rfind(form.end) else Start.BEHIND
    prompt = prompt.rstrip()
    if prompt.endswith(form.begin):
        return Start.INSIDE
    if prompt.endswith(form.end) or (form.is_harmony and prompt.endswith(FINAL)):
        return Start.BEHIND
    return Start.INSIDE if form.forced else Start.BEFORE


@dataclass(frozen=True)
class ReasoningParseResult:
    """New parts. calls: of a format that marks calls and reasoning alike."""

    reasoning_text: str = ""
    normal_text: str = ""
    calls: tuple[ToolCallItem, ...] = ()


class ReasoningParser:
    """stream: pass the reasoning on as it comes, not only when it is whole. raw: the reasoning is everything before
    the answer as the model wrote it, with marks and white space."""

    def __init__(self, form: ReasoningFormat, start: Start, *, stream: bool = True, raw: bool = False) -> None:
        self._format = form
        self._start = start
        self._stream = stream
        self._raw = raw
        self._reader = TextReader()
        self._reasoning: list[str] = []
        self._normal: list[str] = []
        self._space: list[str] = []
        self._has_text = False
        # Whether the answer has a reasoning; False while that is open.
        self.has_reasoning = False
        self.ended = start is Start.BEHIND
        self._steps = self._read()

    def parse_stream_chunk(self, text: str, final: bool = False) -> ReasoningParseResult:
        self._reader.push(text, final)
        next(self._steps, None)
        reasoning = ""
        if self._stream or self.ended:
            reasoning, self._reasoning = "".join(self._reasoning), []
        normal, self._normal = "".join(self._normal), []
        return ReasoningParseResult(reasoning, normal)

    def parse_non_stream(self, text: str) -> ReasoningParseResult:
        return self.parse_stream_chunk(text, final=True)

    def _read(self) -> Steps[None]:
        if self._start is not Start.BEHIND and (yield from self._opened()):
            self.has_reasoning = True
            found = yield from self._reader.until((self._format.end,), self._add)
            self._reader.skip(len(found))
            self.ended = True
            self._add_layout(found + (yield from self._reader.take_while(_SPACE, _MAX_SPACE)))
        self.ended = True
        yield from self._reader.until((), lambda text: self._normal.append(text))

    def _opened(self) -> Steps[bool]:
        """Whether the answer goes on inside of the reasoning. Passes over the mark that opens it; some models write
        it although the prompt has."""
        self._reader.set_mark()
        space = yield from self._reader.take_while(_SPACE, _MAX_SPACE)
        if (yield from self._reader.take(self._format.begin)):
            self._reader.drop_mark()
            self._add_layout(space + self._format.begin)
            return True
        self._reader.rewind()
        return self._start is Start.INSIDE

    def _add_layout(self, text: str) -> None:
        if self._raw:
            self._reasoning.append(text)

    def _add(self, text: str) -> None:
        if self._raw:
            self._reasoning.append(text)
            return
        body = text.rstrip()
        if body:
            self._reasoning.append("".join(self._space) + body if self._has_text else body.lstrip())
            self._has_text = True
            self._space.clear()
        self._space.append(text[len(body) :])


def reasoning_format(form: ReasoningFormat, start: Start, answer: dict[str, Any]) -> dict[str, Any]:
    """xgrammar's structural format of an answer whose reasoning is free and whose rest is constrained. answer: the
    format of the rest."""
    if start is Start.BEHIND:
        return answer
    free = {"type": "any_text"}
    space = {"type": "regex", "pattern": r"\s{0,4}"}
    if start is Start.INSIDE:
        reasoning: list[dict[str, Any]] = [{"type": "tag", "begin": "", "content": free, "end": form.end}, space]
    else:
        tag = {"type": "tag", "begin": form.begin, "content": free, "end": form.end}
        reasoning = [{"type": "optional", "content": {"type": "sequence", "elements": [tag, space]}}]
    return {"type": "sequence", "elements": [*reasoning, answer]}
