"""Blocks do not depend on how an answer was cut, and lose nothing but white space around other blocks."""

from __future__ import annotations

import random
from itertools import pairwise

from sglang.srt.entrypoints.answer_blocks import (
    AnswerBlocks,
    BlockDelta,
    BlockEnd,
    BlockKind,
    BlockStart,
    whole_blocks,
)
from sglang.srt.entrypoints.answer_parts import AnswerDelta, CallDelta

REASONING, TEXT, CALL = BlockKind.REASONING, BlockKind.TEXT, BlockKind.CALL


def text(content: str) -> AnswerDelta:
    return AnswerDelta(content=content)


def call(index: int, *parts: str) -> list[AnswerDelta]:
    first = AnswerDelta(calls=(CallDelta(index, f"id{index}", f"f{index}", ""),))
    return [first, *(AnswerDelta(calls=(CallDelta(index, None, None, part),)) for part in parts)]


def blocks_of(deltas: list[AnswerDelta], with_reasoning: bool = True) -> list[tuple[BlockKind, str, str]]:
    """(kind, name, text), after a check that events come in order."""
    blocks = AnswerBlocks(with_reasoning)
    events = []
    for delta in deltas:
        events += blocks.push(delta, final=False)
    events += blocks.push(AnswerDelta(), final=True)
    found = []
    is_open = False
    pieces: list[str] = []
    for event in events:
        assert event.block.index == len(found)
        if isinstance(event, BlockStart):
            assert not is_open
            is_open, pieces = True, []
        elif isinstance(event, BlockDelta):
            assert is_open and event.text
            pieces.append(event.text)
        elif isinstance(event, BlockEnd):
            assert is_open and "".join(pieces) == event.text
            is_open = False
            found.append((event.block.kind, event.block.name, event.text))
    assert not is_open
    return found


def test_blocks_follow_each_other():
    deltas = [
        *(AnswerDelta(reasoning=part) for part in ("thin", "king")),
        *(text(part) for part in ("\n", "\n", "Hel", "lo ", " ")),
        *call(0, '{"a"', ": 1}"),
        text("\n"),
        *call(1),
        text("end"),
    ]
    assert blocks_of(deltas) == [
        (REASONING, "", "thinking"),
        (TEXT, "", "\n\nHello  "),
        (CALL, "f0", '{"a": 1}'),
        (CALL, "f1", ""),
        (TEXT, "", "end"),
    ]
    assert blocks_of(deltas, with_reasoning=False)[0] == (TEXT, "", "\n\nHello  ")


def test_white_space_alone_is_no_block():
    assert blocks_of([text(" \n"), *call(0, "{}"), text("\n")]) == [(CALL, "f0", "{}")]
    assert blocks_of([text(" "), text("\n")]) == []


def test_any_cut_gives_the_same_blocks():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        parts = [
            (rng.choice([REASONING, TEXT, CALL]), "".join(rng.choices("ab \n", k=rng.randrange(1, 6))))
            for _ in range(4)
        ]
        cuts: list[list[AnswerDelta]] = []
        for at_once in (True, False):
            deltas: list[AnswerDelta] = []
            for index, (kind, content) in enumerate(parts):
                pieces = [content] if at_once else list(content)
                if kind is REASONING:
                    deltas += [AnswerDelta(reasoning=piece) for piece in pieces]
                elif kind is TEXT:
                    deltas += map(text, pieces)
                else:
                    deltas += call(index, *pieces)
            cuts.append(deltas)
        assert blocks_of(cuts[0]) == blocks_of(cuts[1]), f"seed {seed}"
        for (kind, *_), (other, *_) in pairwise(blocks_of(cuts[0])):
            assert kind is not other or kind is CALL


def test_a_whole_answer():
    calls = (CallDelta(0, "id", "f", "{}"), CallDelta(1, "id1", "g", ""))
    found = whole_blocks(AnswerDelta("thought", "text", calls))
    assert [(each.block.kind, each.text) for each in found] == [
        (REASONING, "thought"),
        (TEXT, "text"),
        (CALL, "{}"),
        (CALL, ""),
    ]
