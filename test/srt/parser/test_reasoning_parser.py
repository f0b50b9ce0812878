from __future__ import annotations

import random

import pytest

from sglang.srt.parser.reasoning_parser import (
    AUTO,
    HARMONY,
    REASONING_PARSERS,
    ReasoningParser,
    Start,
    find_reasoning_format,
    find_start,
)

THINK, ALWAYS = REASONING_PARSERS["qwen3"], REASONING_PARSERS["deepseek-r1"]
SEED = 22


def read(pieces: list[str], start: Start, **options: bool) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, answer, and both per piece."""
    one = ReasoningParser(THINK, start, **options)
    parts = [*(one.parse_stream_chunk(piece) for piece in pieces), one.parse_stream_chunk("", final=True)]
    found = [(part.reasoning_text, part.normal_text) for part in parts]
    return "".join(a for a, _ in found), "".join(b for _, b in found), found


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "answer"),
    [
        (Start.BEFORE, "<think>\nA b\n\nc\n</think>\n\nParis. <think>", "A b\n\nc", "Paris. <think>"),
        (Start.BEFORE, "\n<think></think>Paris", "", "Paris"),
        (Start.BEFORE, "Paris </think> <think>", "", "Paris </think> <think>"),
        (Start.BEFORE, " Paris", "", " Paris"),
        (Start.BEFORE, "<think>cut of", "cut of", ""),
        (Start.BEFORE, "<thin", "", "<thin"),
        (Start.BEFORE, "<think>a </thin", "a </thin", ""),
        (Start.INSIDE, "A\n</think>\n\nParis</think>", "A", "Paris</think>"),
        (Start.INSIDE, "<think>\nA</think>Paris", "A", "Paris"),
        (Start.INSIDE, "cut off ", "cut off", ""),
        (Start.BEHIND, "<think>A</think>Paris", "", "<think>A</think>Paris"),
        (Start.BEHIND, " \n", "", " \n"),
    ],
)
def test_an_answer_is_split_whatever_its_pieces(start: Start, text: str, reasoning: str, answer: str) -> None:
    cuts = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for pieces in [[text], list(text), *cuts]:
        assert read(pieces, start)[:2] == (reasoning, answer)
        raw = read(pieces, start, raw=True)
        assert raw[0] + raw[1] == text, "raw loses nothing"


def test_random_texts_are_split_whatever_their_pieces() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for _ in range(500):
        text = "".join(rng.choices(["<think>", "</think>", "\n", " ", "a", "<", "think>"], k=rng.randint(0, 8)))
        start = rng.choice(list(Start))
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        assert read(pieces, start)[:2] == read([text], start)[:2], (start, text, pieces)


def test_reasoning_is_held_until_it_is_whole_if_it_is_not_to_stream() -> None:
    pieces = ["<think>a", " b", "</think>", "c"]
    assert [each for each, _ in read(pieces, Start.BEFORE)[2]] == ["a", " b", "", "", ""]
    assert [each for each, _ in read(pieces, Start.BEFORE, stream=False)[2]] == ["", "", "a b", "", ""]
    assert read(["<think>a", " b"], Start.BEFORE, stream=False)[:2] == ("a b", "")


@pytest.mark.parametrize(
    ("prompt", "start", "forced_start"),
    [
        ("…<|im_start|>assistant\n", Start.BEFORE, Start.INSIDE),
        ("…<|im_start|>assistant\n<think>\n", Start.INSIDE, Start.INSIDE),
        ("…<|im_start|>assistant\n<think>\n\n</think>\n\n", Start.BEHIND, Start.BEHIND),
        ("what does <think> mean?<|im_start|>assistant\n", Start.BEFORE, Start.INSIDE),
    ],
)
def test_the_prompt_tells_where_an_answer_begins(prompt: str, start: Start, forced_start: Start) -> None:
    assert find_start(THINK, prompt) is start and find_start(ALWAYS, prompt) is forced_start


@pytest.mark.parametrize(
    ("content", "start"),
    [("<think>so far", Start.INSIDE), ("<think>a</think>b", Start.BEHIND), ("b", Start.BEHIND), ("", Start.BEFORE)],
)
def test_a_continued_message_tells_where_its_answer_begins(content: str, start: Start) -> None:
    assert find_start(THINK, "…assistant\n" + content, {"role": "assistant", "content": content}) is start


def test_auto_finds_the_marks_in_the_template() -> None:
    assert find_reasoning_format(AUTO, "{{ '<think>\n\n</think>' }}") is THINK
    assert find_reasoning_format(AUTO, "<|start|><|channel|>analysis<|message|>") is HARMONY
    assert find_reasoning_format(AUTO, "{{ messages }}") is None
    assert find_reasoning_format(None, "</think>") is None
    assert find_reasoning_format("qwen3-thinking", "") is ALWAYS
