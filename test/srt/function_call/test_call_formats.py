"""The grammars of required and strict calls: the parsers read what they allow, and they keep to the schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import Tool
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS, FunctionCallParser
from sglang.srt.function_call.gpt_oss_detector import Begin, harmony_format
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.reasoning_parser import REASONING_PARSERS, ReasoningParser, Start, reasoning_format
from support.tool_texts import TEMPLATES

SEED = 21
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
}
TOOLS = (Tool("get_weather", SCHEMA, strict=True), Tool("g", {"type": "object", "properties": {}}))

# Name -> (detector, template); each that has a grammar.
FORMATS: dict[str, tuple[type[BaseFormatDetector], str]] = {
    **{name: (TOOL_CALL_PARSERS[parser], template) for name, (parser, template) in TEMPLATES.items()},
    "array": (JsonArrayParser, ""),
}
del FORMATS["llama-3.2"]


def compiled(form: dict[str, Any]) -> xgrammar.Grammar:
    return xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": form}))


def call_format(name: str, single: bool) -> dict[str, Any]:
    detector, template = FORMATS[name]
    form = detector.call_format(TOOLS, template, single)
    assert form is not None
    return form


def random_answers(grammar: xgrammar.Grammar, rng: random.Random, number: int) -> list[str]:
    """Texts of random tokens that the grammar allows, up to its end."""
    chars = [chr(code) for code in range(32, 127)] + ["\n", "é"]
    vocabulary = ["</s>", *chars, '": ', '", ', "}}", "</", "[{", "]\n", "true", "tool_call>", "12"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info)
    allowed = compiler.compile_grammar(grammar)
    answers: list[str] = []
    while len(answers) < number:
        matcher = xgrammar.GrammarMatcher(allowed)
        mask = xgrammar.allocate_token_bitmask(1, len(vocabulary))
        text = ""
        for _ in range(1500):
            matcher.fill_next_token_bitmask(mask)
            words = mask[0].tolist()
            choices = [token for token in range(len(vocabulary)) if words[token // 32] >> (token % 32) & 1]
            # An answer of random letters would not end.
            ends = [token for token in choices if vocabulary[token][0] in '"}]<0\n,12']
            token = 0 if 0 in choices else rng.choice(ends if ends and rng.random() < 0.7 else choices)
            assert matcher.accept_token(token)
            if token == 0:
                answers.append(text)
                break
            text += vocabulary[token]
    return answers


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("single", [True, False])
def test_what_the_grammar_allows_is_calls_alone(name: str, single: bool) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    grammar = compiled(call_format(name, single))
    for text in random_answers(grammar, rng, 6):
        found = FunctionCallParser(FORMATS[name][0], TOOLS).parse_non_stream(text)
        assert found.calls and found.normal_text == "", text
        assert not single or len(found.calls) == 1
        for call in found.calls:
            arguments = json.loads(call.parameters)
            assert call.name in ("get_weather", "g"), text
            if call.name == "get_weather":
                assert isinstance(arguments["city"], str) and len(arguments["city"]) <= 4, text
                assert set(arguments) <= set(SCHEMA["properties"]), text
                assert isinstance(arguments.get("days", 1), int) and arguments.get("unit", "C") in ("C", "F")
                assert isinstance(arguments.get("place", {"x": True})["x"], bool)


SHORT = {"type": "string", "maxLength": 4}
ENDS_WITH_SPACE = ["a\nb", " lead", "trail\n"]


@pytest.mark.parametrize(
    ("schema", "is_right"),
    [
        (SHORT, lambda value: len(value) <= 4),
        ({"type": "string", "minLength": 3, "maxLength": 5}, lambda value: 3 <= len(value) <= 5),
        ({"type": "string", "pattern": "^[a-z]{3}$"}, lambda value: value.isalpha() and len(value) == 3),
        ({"enum": ENDS_WITH_SPACE}, lambda value: value in ENDS_WITH_SPACE),
        ({"const": "x y"}, lambda value: value == "x y"),
        ({"enum": ["1", 1]}, lambda value: value in ("1", 1)),
        ({"anyOf": [SHORT, {"type": "null"}]}, lambda value: value is None or len(value) <= 4),
        ({"$ref": "#/$defs/short"}, lambda value: len(value) <= 4),
        ({"type": "object", "properties": {"x": SHORT}, "required": ["x"]}, lambda value: len(value["x"]) <= 4),
    ],
)
def test_white_space_around_the_strings_of_elements_is_none_of_them(
    schema: dict[str, Any], is_right: Callable[[Any], bool]
) -> None:
    """Their grammar allows it, where JSON has quotes."""
    print(f"seed {SEED}")
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": {"short": SHORT}}
    tools = (Tool("f", parameters | {"additionalProperties": False}, strict=True),)
    detector, template = FORMATS["qwen3-coder"]
    form = detector.call_format(tools, template, single=True)
    assert form is not None
    for text in random_answers(compiled(form), random.Random(SEED), 20):
        (call,) = FunctionCallParser(detector, tools).parse_non_stream(text).calls
        assert is_right(json.loads(call.parameters)["a"]), repr(text)


def answer(name: str, arguments: str, function: str = "get_weather") -> str:
    """A call as the format's template writes it."""
    if name == "qwen3-coder":
        values = json.loads(arguments)
        parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
        return f"<tool_call>\n<function={function}>\n{''.join(parts)}</function>\n</tool_call>"
    key = "parameters" if name in ("llama-3.1", "array") else "arguments"
    call = f'{{"name": "{function}", "{key}": {arguments}}}'
    return {
        "qwen2.5": f"<tool_call>\n{call}\n</tool_call>",
        "mistral-v3": f"[TOOL_CALLS] [{call}]",
        "mistral-v11": f"[TOOL_CALLS]{function}[CALL_ID]abcdefghi[ARGS]{arguments}",
        "mistral-v13": f"[TOOL_CALLS]{function}[ARGS]{arguments}",
        "llama-3.1": call,
        "gpt-oss": f"<|channel|>commentary to=functions.{function} <|constrain|>json<|message|>{arguments}",
        "array": f"[{call}]",
    }[name]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_break_the_schema_are_not_allowed(name: str) -> None:
    grammar = compiled(call_format(name, single=True))

    def accepts(text: str) -> bool:
        return bool(_is_grammar_accept_string(grammar, text))

    good = answer(name, '{"city": "Rome", "days": 2}')
    assert accepts(good)
    assert not accepts("") and not accepts("Rome") and not accepts(good + good) and not accepts("Well: " + good)
    assert not accepts(answer(name, '{"days": 2}')), "a required argument is missing"
    assert not accepts(answer(name, '{"city": "Rome", "days": "x"}'))
    assert not accepts(answer(name, '{"city": "Rome", "other": 2}'))
    assert not accepts(answer(name, '{"city": "Rome"}', "no_tool"))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("array", "gpt-oss")])
def test_strict_tools_are_constrained_within_free_text(name: str) -> None:
    detector, template = FORMATS[name]
    form = detector.strict_format(TOOLS, template, False)
    assert form is not None
    grammar = compiled(form)
    mark = "<|python_tag|>" if name == "llama-3.1" else ""
    good, bad = (mark + answer(name, text) for text in ('{"city": "Rome"}', '{"days": 2}'))
    loose = mark + answer(name, "{}" if name == "qwen3-coder" else '{"any": 2}', "g")
    assert _is_grammar_accept_string(grammar, "No call.") and _is_grammar_accept_string(grammar, "Look: " + good)
    assert _is_grammar_accept_string(grammar, loose), "a tool that is not strict may have any arguments"
    assert not _is_grammar_accept_string(grammar, "Look: " + bad)
    single = detector.strict_format(TOOLS, template, True)
    assert single is not None and single["stop_after_first"]
    if "[TOOL_CALLS] [" in good:
        assert not _is_grammar_accept_string(grammar, good + " More."), "the array of calls ends the answer"


@pytest.mark.parametrize(
    ("start", "texts", "others"),
    [
        (Start.INSIDE, ["so </think>\n\n", "</think>"], ["", "<think>so"]),
        (Start.BEFORE, ["<think>so </think>\n\n", ""], ["so </think>\n\n", "so"]),
        (Start.BEHIND, [""], ["<think>so </think>\n\n"]),
    ],
)
def test_reasoning_is_free_before_the_calls(start: Start, texts: list[str], others: list[str]) -> None:
    form = REASONING_PARSERS["qwen3"]
    grammar = compiled(reasoning_format(form, start, call_format("qwen2.5", single=True)))
    call = answer("qwen2.5", '{"city": "Rome"}')
    for text in texts:
        assert _is_grammar_accept_string(grammar, text + call), text
        assert ReasoningParser(form, start).parse_non_stream(text + call).normal_text == call
    for text in others:
        assert not _is_grammar_accept_string(grammar, text + call), text


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
PREAMBLE, NEXT = "<|channel|>commentary<|message|>", "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("begin", "texts", "others"),
    [
        (Begin.HEADER, ["", f"{ANALYSIS}so{NEXT}", f"{ANALYSIS}so{NEXT}{ANALYSIS}{NEXT}"], ["so", f"{ANALYSIS}so"]),
        (Begin.ANALYSIS, [f"so{NEXT}", f"{NEXT}{ANALYSIS}so{NEXT}"], ["", f"{ANALYSIS}so", "so<|end|>"]),
        (Begin.TEXT, [""], [f"{ANALYSIS}so{NEXT}"]),
    ],
)
def test_a_call_or_a_text_of_gpt_oss_follows_its_reasoning(begin: Begin, texts: list[str], others: list[str]) -> None:
    grammar = compiled(harmony_format(begin, call_format("gpt-oss", False), {"type": "regex", "pattern": "[a-c]+"}))
    arguments = '{"city": "Rome"}'
    front = NEXT if begin is Begin.TEXT else ""
    calls = [
        answer("gpt-oss", arguments),
        f" to=functions.get_weather<|channel|>commentary json<|message|>{arguments}",
        f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{arguments}",
    ]
    words = "abc" if begin is Begin.TEXT else f"{FINAL}abc"
    for text in texts:
        for last in (*(front + call for call in calls), words):
            assert _is_grammar_accept_string(grammar, text + last), text + last
        for last in (words + "d", front + answer("gpt-oss", "{}"), front + calls[0] + calls[0], ""):
            assert not _is_grammar_accept_string(grammar, text + last), text + last
    for text in others:
        assert not _is_grammar_accept_string(grammar, text + front + calls[0]), text
        assert not _is_grammar_accept_string(grammar, text + words), text


def test_strict_tools_of_gpt_oss_are_constrained_beside_other_messages() -> None:
    detector, template = FORMATS["gpt-oss"]
    grammar = compiled(harmony_format(Begin.HEADER, detector.strict_format(TOOLS, template, False), None))
    good, bad, loose = (
        answer("gpt-oss", *given) for given in (('{"city": "Rome"}',), ('{"days": 2}',), ('{"any": 2}', "g"))
    )
    for front in (
        "",
        f"{ANALYSIS}to=functions.{NEXT}",
        f"<|channel|>commentary<|message|>Look.{NEXT}{ANALYSIS}{NEXT}",
    ):
        for text in (good, loose, f"{FINAL}No call."):
            assert _is_grammar_accept_string(grammar, front + text), front + text
        assert not _is_grammar_accept_string(grammar, front + bad), front
    assert not _is_grammar_accept_string(grammar, "No header.")
