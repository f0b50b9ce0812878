"""Collects what a parser finds. Owns the text and the parts of calls that were found since the last `take`, and
white space beside calls that may still turn out to be layout.

White space between a call and the end or another call is the format's layout and is dropped. White space between two
texts stays, even if a call stands between them.

A model may write half of a surrogate pair as an escape. It is no character, and cannot be sent: it becomes an escape
again in arguments, and a replacement mark in a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem

_HALF_PAIR = re.compile("[\\ud800-\\udfff]")


@dataclass
class _Part:
    index: int
    name: str | None
    call_id: str | None = None
    texts: list[str] = field(default_factory=list)


class CallOutput:
    def __init__(self) -> None:
        self.num_calls = 0
        self._texts: list[str] = []
        self._parts: list[_Part] = []
        self._space: list[str] = []
        self._has_text = False
        # White space at the end is text, unless a call came last.
        self._call_is_last = False

    def text(self, text: str) -> None:
        """Text that belongs to no call."""
        body = text.rstrip()
        if body:
            before = "".join(self._space)
            self._texts.append(before + body if self._has_text or self.num_calls == 0 else body.lstrip())
            self._has_text, self._call_is_last = True, False
            self._space.clear()
        self._space.append(text[len(body) :])

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        call_id = None if call_id is None else _HALF_PAIR.sub("\ufffd", call_id)
        self._parts.append(_Part(self.num_calls, _HALF_PAIR.sub("\ufffd", name), call_id))
        self.num_calls += 1
        self._call_is_last = True

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if text and not self._parts:
            self._parts.append(_Part(self.num_calls - 1, None))
        if text:
            self._parts[-1].texts.append(_HALF_PAIR.sub(lambda half: f"\\u{ord(half[0]):04x}", text))

    def take(self, final: bool) -> StreamingParseResult:
        if final and not self._call_is_last:
            self._texts += self._space
            self._space.clear()
        calls = tuple(ToolCallItem(part.index, part.name, "".join(part.texts), part.call_id) for part in self._parts)
        text = "".join(self._texts)
        self._texts, self._parts = [], []
        return StreamingParseResult(text, calls)
