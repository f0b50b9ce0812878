"""An answer as blocks, one after the other: reasoning, text, calls. APIs that have such blocks build on this. Pure.

AnswerDelta --AnswerBlocks.push--> BlockStart, BlockDelta ..., BlockEnd, BlockStart, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang.srt.entrypoints.answer_parts import AnswerDelta


class BlockKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(frozen=True)
class Block:
    # Its place in the answer.
    index: int
    kind: BlockKind
    # Of a call.
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class BlockStart:
    block: Block


@dataclass(frozen=True)
class BlockDelta:
    block: Block
    # More of the text, of the reasoning or of the call's arguments. Not empty.
    text: str


@dataclass(frozen=True)
class BlockEnd:
    block: Block
    # The whole.
    text: str


BlockEvent = BlockStart | BlockDelta | BlockEnd


class AnswerBlocks:
    """One answer's blocks so far. Text that is white space alone becomes a block only with text behind it: models
    write line breaks around their reasoning and their calls."""

    def __init__(self, with_reasoning: bool = True) -> None:
        """with_reasoning: else reasoning is left out."""
        self._with_reasoning = with_reasoning
        self._num_blocks = 0
        self._open: Block | None = None
        self._text = ""
        # White space that waits for text behind it.
        self._held = ""

    def push(self, delta: AnswerDelta, final: bool) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        if delta.reasoning and self._with_reasoning:
            self._add(events, BlockKind.REASONING, delta.reasoning)
        if delta.content:
            self._add_text(events, delta.content)
        for call in delta.calls:
            if call.name is not None:
                self._start(events, BlockKind.CALL, call.call_id or "", call.name)
            if call.arguments:
                self._add(events, BlockKind.CALL, call.arguments)
        if final:
            self._end(events)
        return events

    def _add_text(self, events: list[BlockEvent], text: str) -> None:
        if self._open is None or self._open.kind is not BlockKind.TEXT:
            text = self._held + text
            self._held = ""
            if not text.strip():
                self._held = text
                return
        self._add(events, BlockKind.TEXT, text)

    def _add(self, events: list[BlockEvent], kind: BlockKind, text: str) -> None:
        if self._open is None or self._open.kind is not kind:
            self._start(events, kind)
        assert self._open is not None
        self._text += text
        events.append(BlockDelta(self._open, text))

    def _start(self, events: list[BlockEvent], kind: BlockKind, call_id: str = "", name: str = "") -> None:
        self._end(events)
        self._held = ""
        self._open = Block(self._num_blocks, kind, call_id, name)
        self._num_blocks += 1
        events.append(BlockStart(self._open))

    def _end(self, events: list[BlockEvent]) -> None:
        if self._open is not None:
            events.append(BlockEnd(self._open, self._text))
        self._open, self._text = None, ""


def whole_blocks(delta: AnswerDelta, with_reasoning: bool = True) -> list[BlockEnd]:
    """The blocks of an answer that came as one piece."""
    events = AnswerBlocks(with_reasoning).push(delta, final=True)
    return [event for event in events if isinstance(event, BlockEnd)]
