"""An answer of gpt-oss becomes reasoning, text and calls, whatever its pieces, and no mark is in any of them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

import pytest

from sglang.srt.function_call.core_types import Tool
from sglang.srt.parser.harmony_parser import HarmonyParser, HarmonyTokens
from sglang.srt.parser.reasoning_parser import HARMONY, Start, find_start

SEED = 24
TOOLS = (Tool("f", {}), Tool("python", {}))
MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
PREAMBLE, NEXT = "<|channel|>commentary<|message|>", "<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CALL = ("f", '{"a": 1}')


@dataclass(frozen=True)
class Parts:
    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def read(pieces: list[str], start: Start = Start.BEFORE, tools: Any = TOOLS, **options: bool) -> Parts:
    parser = HarmonyParser(start, tools, **options)
    found = [*map(parser.parse_stream_chunk, pieces), parser.parse_stream_chunk("", final=True)]
    calls: list[tuple[str, str]] = []
    for item in (item for part in found for item in part.calls):
        if item.name is not None:
            assert item.tool_index == len(calls)
            calls.append((item.name, ""))
        name, arguments = calls[item.tool_index]
        calls[item.tool_index] = name, arguments + item.parameters
    texts = "".join(part.reasoning_text for part in found), "".join(part.normal_text for part in found)
    return Parts(*texts, tuple(calls))


EXAMPLES = (
    (f"{ANALYSIS}Rain?{NEXT}{FINAL}It rains.<|return|>", Parts("Rain?", "It rains.")),
    (f"{FINAL}It rains.", Parts("", "It rains.")),
    (f'{ANALYSIS}Rain?{NEXT}{TO_F}{{"a": 1}}<|call|>', Parts("Rain?", "", (CALL,))),
    (
        f'{ANALYSIS}Rain?{NEXT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}',
        Parts("Rain?", "", (CALL,)),
    ),
    (f'{TO_F}{{"a": 1}}<|call|><|start|>assistant{TO_F}{{}}<|call|>', Parts("", "", (CALL, ("f", "{}")))),
    (
        f'{ANALYSIS}A{NEXT}{PREAMBLE}Let me look.{NEXT}{ANALYSIS}B{NEXT}{TO_F}{{"a": 1}}',
        Parts("A\n\nB", "Let me look.", (CALL,)),
    ),
    ('<|channel|>final <|constrain|>json<|message|>{"a": 1}', Parts("", '{"a": 1}')),
    (f"{PREAMBLE}Let me look.{NEXT}{FINAL}It rains.", Parts("", "Let me look.\n\nIt rains.")),
    (f"{ANALYSIS}to=functions.f{NEXT}{FINAL}Yes.", Parts("to=functions.f", "Yes.")),
    (f"<|channel|>analysis to=browser.search code<|message|>{{}}{NEXT}{FINAL}Yes.", Parts("{}", "Yes.")),
    ('<|channel|>analysis to=python code<|message|>{"a": 1}<|call|>', Parts("", "", (("python", '{"a": 1}'),))),
    (f"{ANALYSIS}cut o", Parts("cut o")),
    (f"{ANALYSIS}cut<|en", Parts("cut")),
    (f"{ANALYSIS}Rain?{NEXT}<|channel|>fin", Parts("Rain?")),
    ("It rains.", Parts("", "It rains.")),
    ("", Parts()),
)


@pytest.mark.parametrize(("text", "parts"), EXAMPLES, ids=lambda each: repr(each)[:50])
def test_an_answer_is_split_whatever_its_pieces(text: str, parts: Parts) -> None:
    cuts = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for pieces in [[text], list(text), *cuts]:
        assert read(pieces) == parts
    whole = read([text], separate=False)
    assert (whole.reasoning, whole.calls) == ("", parts.calls)
    assert sorted(whole.text.split("\n\n")) == sorted(f"{parts.reasoning}\n\n{parts.text}".strip().split("\n\n"))


def test_an_answer_that_is_cut_off_anywhere_has_the_front_of_its_parts() -> None:
    for text, parts in EXAMPLES:
        for at in range(len(text)):
            cut = read([text[:at]])
            # A message may end with the character that begins a mark.
            assert parts.reasoning.startswith(cut.reasoning.removesuffix("<")), text[:at]
            assert parts.text.startswith(cut.text.removesuffix("<")), text[:at]
            assert [name for name, _ in cut.calls] == [name for name, _ in parts.calls][: len(cut.calls)]
            for (_, front), (_, whole) in zip(cut.calls, parts.calls):
                assert whole.startswith(front)
                assert front in ("", whole) or at <= text.rindex(whole[-1]), "only the end of the answer is missing"


def test_random_messages_are_read_whatever_their_pieces() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    parts = [
        *MARKS,
        "<",
        "<|",
        "|>",
        "assistant",
        "analysis",
        "final",
        "commentary",
        " to=functions.f",
        " to=g",
        "\n",
    ]
    parts += [" ", "a", '{"a": 1}', '{"a": "<|end|>', '"}', ANALYSIS, FINAL, NEXT, " json", "to="]
    parts += [TO_F, f'{TO_F}{{"a"'] * 3
    num_calls = 0
    for _ in range(1500):
        text = "".join(rng.choices(parts, k=rng.randint(1, 12)))
        start, tools, separate = rng.choice(list(Start)), rng.choice([None, TOOLS]), rng.random() < 0.8
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        whole = read([text], start, tools, separate=separate)
        assert read(pieces, start, tools, separate=separate) == whole, (text, start, pieces)
        num_calls += len(whole.calls)
        if not re.search(r"<(?!\||$)", text) and "<<" not in text:
            assert not any(mark in whole.reasoning + "\0" + whole.text for mark in MARKS), text
    assert num_calls > 100


def test_calls_are_text_where_they_are_not_wanted() -> None:
    text = f'{ANALYSIS}Rain?{NEXT}{TO_F}{{"a": 1}}<|call|>'
    assert read([text], tools=None) == Parts("Rain?", '{"a": 1}')
    assert read([text + f"<|start|>assistant{TO_F}{{}}"], single=True) == Parts("Rain?", "", (CALL,))


@pytest.mark.parametrize(
    ("start", "text", "parts"),
    [
        (Start.BEHIND, " does.<|return|>", Parts("", " does.")),
        (Start.BEHIND, "to=f", Parts("", "to=f")),
        (Start.BEHIND, f'.{NEXT}{TO_F}{{"a": 1}}', Parts("", ".", (CALL,))),
        (Start.INSIDE, f"Rain?{NEXT}{FINAL}Yes.", Parts("Rain?", "Yes.")),
        (Start.INSIDE, "Rain", Parts("Rain")),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ends(start: Start, text: str, parts: Parts) -> None:
    for pieces in ([text], list(text)):
        assert read(pieces, start) == parts


def test_the_prompt_tells_where_an_answer_begins() -> None:
    assert find_start(HARMONY, "…<|end|><|start|>assistant") is Start.BEFORE
    assert find_start(HARMONY, f"…<|start|>assistant{ANALYSIS}") is Start.INSIDE
    continued = {"role": "assistant", "content": "It"}
    assert find_start(HARMONY, f"…<|start|>assistant{FINAL}It", continued) is Start.BEHIND
    assert find_start(HARMONY, f"…<|start|>assistant{FINAL}", {"role": "assistant", "content": ""}) is Start.BEHIND


def test_reasoning_is_held_until_it_is_whole_if_it_is_not_to_stream() -> None:
    pieces = [f"{ANALYSIS}a", " b", NEXT, f"{ANALYSIS}c", f"{NEXT}{FINAL}d", "e"]
    for stream, found in ((True, ["a", " b", "", "\n\nc", "", ""]), (False, ["", "", "a b", "", "\n\nc", ""])):
        parser = HarmonyParser(Start.BEFORE, TOOLS, stream=stream)
        assert [parser.parse_stream_chunk(piece).reasoning_text for piece in pieces] == found
    parser = HarmonyParser(Start.BEFORE, TOOLS, stream=False)
    parser.parse_stream_chunk(f"{ANALYSIS}cut")
    assert parser.parse_stream_chunk("", final=True).reasoning_text == "cut"


def test_arguments_stream_as_they_come_and_are_valid_when_whole() -> None:
    parser = HarmonyParser(Start.BEFORE, TOOLS)
    arguments = json.dumps({"a": '<|call|> \\ "é', "b": [{}]}, ensure_ascii=False)
    parser.parse_stream_chunk(TO_F)
    found = [item for char in arguments for item in parser.parse_stream_chunk(char).calls]
    assert [item.parameters for item in found] != [arguments] and found[0].name == "f"
    assert "".join(item.parameters for item in found) == arguments


def test_the_tokens_of_reasoning_are_counted_with_their_headers() -> None:
    def count(*tokens: str, start: Start = Start.BEFORE) -> int:
        counter = HarmonyTokens(start, lambda token: tokens[token].encode())
        for token in range(len(tokens)):
            counter.add([token])
        return counter.number

    analysis, final = ("<|channel|>", "analysis", "<|message|>"), ("<|channel|>", "final", "<|message|>")
    end, begin = "<|end|>", ("<|start|>", "assistant")
    assert count(*analysis, "a", "b", end, *begin, *final, "c") == 6
    assert count(*analysis, "a", end, *begin, *analysis, "b", end, *begin, *final, "c") == 5 + 7
    assert count(*analysis, "a") == 4 and count(*final, "a", end) == 0 and count("a", "b") == 0
    assert count("a", end, *begin, *final, "c", start=Start.INSIDE) == 2
    assert count("a", start=Start.BEHIND) == 0
    assert count(*analysis, "a", "b<", "|e", "nd|>", "c" * 50, *begin, *final, "c") == 3 + 4
