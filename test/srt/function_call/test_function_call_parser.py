"""Each format reads its examples, whole and cut anywhere, and what templates write comes back from them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable

import msgspec
import pytest

from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.entrypoints.openai.chat_messages import template_messages
from sglang.srt.function_call.core_types import StreamingParseResult, Tool
from sglang.srt.function_call.function_call_parser import (
    AUTO,
    TOOL_CALL_PARSERS,
    FunctionCallParser,
    find_detector,
    joined,
)
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.function_call.text_reader import TextReader
from sglang.srt.managers.detokenizer_manager import IncrementalDecoder, load_decode
from sglang.srt.parser.chat_format import ChatFormat
from support.tool_texts import ENDS, EXAMPLES, TEMPLATES, TOOLS, Example, render, shown

SEED = 20


def parse(parser: str, pieces: Iterable[str], tools: tuple[Tool, ...] = TOOLS) -> list[StreamingParseResult]:
    one = FunctionCallParser(TOOL_CALL_PARSERS[parser], tools)
    return [*(one.parse_stream_chunk(piece) for piece in pieces), one.parse_stream_chunk("", final=True)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.parser}-{example.text[:40]!r}")
def test_an_example_is_read_whatever_its_pieces(example: Example) -> None:
    whole = FunctionCallParser(TOOL_CALL_PARSERS[example.parser], TOOLS).parse_non_stream(example.text)
    assert shown(whole) == (example.content, example.calls)
    text = example.text
    cuts = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for pieces in [list(text), *cuts]:
        assert joined(*parse(example.parser, pieces)) == whole


def test_an_example_is_read_token_by_token() -> None:
    path = ensure_embedded_model() / "tokenizer.json"
    decode = load_decode(str(path))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    for example in EXAMPLES:
        decoder = IncrementalDecoder(decode, skip_special_tokens=False)
        ids = tokenizer.encode(example.text, add_special_tokens=False).ids
        pieces = [*(decoder.push([token]) for token in ids), decoder.push([], final=True)]
        assert shown(joined(*parse(example.parser, pieces))) == (example.content, example.calls), example


def test_random_texts_are_read_whatever_their_pieces() -> None:
    """Parts of all formats in any order. Where no call is found the text stays as it is."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    parts = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "abcdefghi", "<|python_tag|>"]
    parts += ['{"name": "f", ', '"arguments": ', '"parameters": ', '{"a": 1}', '{"a": "', '\\"', "}", "{", "[", "]"]
    parts += ["</parameter>", "</function>", "a=1", ")", ", ", "; ", "x", "\n", '{"a": 1}}']
    begins = [
        '<tool_call>{"name": "f", "arguments": ',
        "<tool_call><function=f>",
        "<parameter=b>",
        "[f(",
        "[TOOL_CALLS]f",
    ]
    begins += ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": ', "<|python_tag|>{"]
    found = 0
    for _ in range(1500):
        text = "".join(rng.choices([*parts, *begins * 2], k=rng.randint(1, 12)))
        parser = rng.choice([name for name in TOOL_CALL_PARSERS if name != AUTO])
        whole = FunctionCallParser(TOOL_CALL_PARSERS[parser], TOOLS).parse_non_stream(text)
        at, pieces = 0, []
        while at < len(text):
            size = rng.randint(1, 8)
            pieces.append(text[at : at + size])
            at += size
        assert joined(*parse(parser, pieces)) == whole, (parser, text, pieces)
        found += bool(whole.calls)
        assert whole.calls or whole.normal_text == text, (parser, text)
    assert found > 100


# Each looks like the beginning of a call, or leaves a format's next marker far away.
LONG_TEXTS = [
    *(
        "[f(",
        "[f(a=",
        "[a-(",
        "[a.(x=",
        "[f(a=\\\n",
        "[f(a='",
        "[f(a=\\'",
        "[f(a='\"",
        "[f(a=[",
        "[f(a=1)]",
        "<|python_start|>[",
    ),
    *("<tool_call>", '<tool_call>{"name":"f","arguments":{}}</tool_call>', '<tool_call>{"arguments":{"a":[{"'),
    *("<function=f><parameter=a>1", "<tool_call><function=f><parameter=a>", '[TOOL_CALLS][{"arguments":{"a'),
    *("<|channel|>", "<|end|>", "<|", "<|message|>a", "to=", "<|channel|>final to=functions.f<|message|>{}<|end|>"),
    *('{"name":"f","parameters":{}};', '{"parameters":"', '{"parameters":{"', "[   ", "<tool_call>   "),
]


@pytest.mark.parametrize("parser", ["pythonic", "llama3", "qwen25", "qwen3_coder", "mistral", "gpt-oss"])
def test_a_long_text_takes_time_in_proportion(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In calls of functions, and in characters that are searched for markers."""
    next_place = TextReader._next_place
    searched = 0

    def search(reader: TextReader, word: str) -> int:
        nonlocal searched
        before = reader._found.get(word)
        place = next_place(reader, word)
        searched += place - reader._at if reader._found[word] is not before else 0
        return place

    monkeypatch.setattr(TextReader, "_next_place", search)

    def effort(text: str) -> tuple[int, int]:
        nonlocal searched
        searched = num_calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += event == "call"

        one = FunctionCallParser(
            TOOL_CALL_PARSERS[parser], [Tool(name, {"type": "object"}) for name in ("f", "a-", "a.")]
        )
        sys.setprofile(count)
        try:
            one.parse_non_stream(text)
        finally:
            sys.setprofile(None)
        return num_calls, searched

    for unit in LONG_TEXTS:
        (calls, chars), (more_calls, more_chars) = effort(unit * 50), effort(unit * 200)
        assert more_calls < 5 * calls + 200 and more_chars < 5 * chars + 200 * len(unit), unit


def test_a_word_is_found_again_after_going_back() -> None:
    reader, texts = TextReader(), []
    reader.push("a<b<c", final=True)

    def until() -> str:
        with pytest.raises(StopIteration) as end:
            next(reader.until(("<",), texts.append))
        return end.value.value

    reader.set_mark()
    assert until() == "<"
    reader.skip(1)
    assert until() == "<"
    reader.rewind()
    assert until() == "<" and texts == ["a", "b", "a"]


def test_arguments_are_passed_on_as_they_come() -> None:
    for parser, text in (
        ("qwen25", '<tool_call>\n{"name": "f", "arguments": {"a": "long'),
        ("llama3", '{"name": "f", "parameters": {"a": "long'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "long'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "long'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nlong"),
        ("gpt-oss", '<|channel|>commentary to=functions.f<|message|>{"a": "long'),
    ):
        one = FunctionCallParser(TOOL_CALL_PARSERS[parser], TOOLS)
        parts = [one.parse_stream_chunk(char) for char in text]
        items = [item for part in parts for item in part.calls]
        assert items[0].name == "f" and all(item.name is None for item in items[1:]), "the name comes once and first"
        assert "".join(item.parameters for item in items) == '{"a": "long', parser
        assert parts[-1].calls[-1].parameters == "g"


def test_a_long_answer_in_json_that_is_no_call_is_passed_on() -> None:
    one = FunctionCallParser(TOOL_CALL_PARSERS["llama3"], TOOLS)
    assert one.parse_stream_chunk('{"rows": [1, 2').normal_text == '{"rows": [1, 2'


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    parser, template = TEMPLATES[name]
    assert find_detector(AUTO, template) is TOOL_CALL_PARSERS[parser]
    given = [
        (
            "get_weather",
            {"city": 'a "b" \\ é🎉\n</tool_call>', "days": 3, "metric": True, "filter": {"k": [None, 1.5]}},
        ),
        ("f", {}),
    ]
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": function, "arguments": arguments}}
        for i, (function, arguments) in enumerate(given)
    ]
    text = "" if name in ("mistral-v3", "llama-3.1") else "Let me look."  # these write no text beside calls
    asked = [{"role": "user", "content": "?"}]
    before = render(template, asked)
    answer = {"role": "assistant", "content": text, "tool_calls": calls}
    rendered = render(template, template_messages([*asked, answer], ChatFormat(template))).removeprefix(before)
    for head in ("<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"):
        rendered = rendered.removeprefix(head)
    rendered = rendered.rstrip("\n")
    assert rendered.endswith(ENDS)
    rendered = rendered.removesuffix(next(end for end in ENDS if rendered.endswith(end)))
    found = joined(*parse(parser, rendered))
    assert [(call.name, json.loads(call.parameters)) for call in found.calls] == given
    assert found.normal_text == text
    if name == "mistral-v11":
        assert [call.call_id for call in found.calls] == ["abcdefgh0", "abcdefgh1"]


def test_auto_finds_nothing_in_a_template_without_calls() -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert find_detector(AUTO, template) is None and find_detector(None, TEMPLATES["qwen2.5"][1]) is None
    glm = "<tool_call>{{ name }}<arg_key>{{ key }}</arg_key></tool_call>{{ arguments }}"
    assert find_detector(AUTO, glm) is None, "it is Qwen's marks with another format in them"
    seed = "<seed:tool_call><function={{ name }}><parameter={{ key }}></parameter></function></seed:tool_call>"
    assert find_detector(AUTO, seed) is None, "they are Qwen3-Coder's elements between other marks"
    assert find_detector(AUTO, "{# role ipython #}{{ message.content }}") is None
    assert find_detector(AUTO, '{{ tools }} is {"name": "f", "parameters": {}}') is None


def test_auto_knows_the_marks_of_a_list() -> None:
    assert find_detector(AUTO, "<|python_start|>[{{ calls }}]<|python_end|>") is TOOL_CALL_PARSERS["pythonic"]


def test_one_call_where_several_are_not_wanted() -> None:
    text = "<tool_call>" + "</tool_call><tool_call>".join(['{"name": "f", "arguments": {}}'] * 3) + "</tool_call> end"
    one = FunctionCallParser(TOOL_CALL_PARSERS["qwen25"], TOOLS, single=True)
    assert shown(one.parse_non_stream(text)) == ("end", (("f", "{}"),))


def test_ids_are_those_that_clients_and_templates_take() -> None:
    def new_id(parser: str) -> str:
        return FunctionCallParser(TOOL_CALL_PARSERS[parser], TOOLS).new_call_id()

    assert new_id("qwen25").startswith("call_") and new_id("qwen25") != new_id("qwen25")
    assert len(new_id("mistral")) == 9 and new_id("mistral").isalnum()
    for written, taken in (("abcdefghi", "abcdefghi"), ("abc", None)):
        (call,) = joined(*parse("mistral", [f"[TOOL_CALLS]f[CALL_ID]{written}[ARGS]{{}}"])).calls
        assert call.call_id == taken


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[{"name": "f", "parameters": {"a": 1}}]', "", [("f", '{"a": 1}')]),
        ('[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]\n', "", [("f", "{}"), ("g", "{}")]),
        ('{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('[{"name": "f", "parameters": {"a": ', "", [("f", '{"a": ')]),
        ("no array", "no array", []),
        ('[{"x": 1}]', '[{"x": 1}]', []),
    ],
)
def test_a_json_array_of_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        one = JsonArrayParser(TOOLS)
        found = joined(
            *(one.parse_streaming_increment(piece) for piece in pieces), one.parse_streaming_increment("", True)
        )
        assert shown(found) == (content, tuple(calls))


DEFS = {
    "level": {"type": "integer", "enum": [1, 2, 3]},
    "alias": {"$ref": "#/$defs/level"},
    "color": {"enum": ["red"]},
    "loop": {"$ref": "#/$defs/loop"},
    "tree": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/tree"}, {"anyOf": [{"$ref": "#/$defs/tree"}] * 3}]},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        (None, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "12.0", 12),
        ({"type": "integer"}, "12.5", "12.5"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "true", "true"),
        ({"type": "number"}, "9" * 5000, "9" * 5000),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, '"quoted"', '"quoted"'),
        ({"anyOf": [{"type": "boolean"}, {"type": "array"}]}, "False", False),
        ({"$ref": "#/$defs/missing"}, "{'a': True}", {"a": True}),
        ({"$ref": "#/$defs/missing"}, "free text", "free text"),
        ({"$ref": "#/$defs/level"}, "3", 3),
        ({"$ref": "#/$defs/alias"}, "3", 3),
        ({"anyOf": [{"$ref": "#/$defs/alias"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"$ref": "#/$defs/alias"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/color"}, " red", "red"),
        ({"$ref": "#/$defs/color"}, "3", "3"),
        ({"$ref": "#/$defs/loop"}, "3", "3"),
        ({"$ref": "#/$defs/tree"}, "3", 3),
        ({"$ref": 5}, "[3]", [3]),
        ({"const": 3}, "3", 3),
        ({"enum": [1, None]}, "None", None),
        ({"anyOf": 5}, "3", "3"),
        ({"anyOf": {"a": 1}}, "3", "3"),
        ({"anyOf": [5, "a", {"type": ["integer", 5, []]}]}, "3", 3),
        ({"enum": 5, "type": {"a": 1}}, "3", "3"),
        (5, "3", "3"),
        ({"enum": ["a", "b"]}, " a\n", "a"),
        ({"const": "a"}, "a ", "a"),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "array"}, "[NaN]", "[NaN]"),
        ({"type": "integer"}, "1e400", "1e400"),
        ({"type": "string", "minLength": 3}, "  a ", "  a"),
        ({"type": "string", "minLength": 2}, "a  ", "a "),
        ({"type": "string", "minLength": 2}, "  a", " a"),
        ({"type": "string", "minLength": "3"}, " a ", "a"),
    ],
)
def test_a_value_of_an_element_is_what_its_schema_allows(schema: object, text: str, value: object) -> None:
    properties = {} if schema is None else {"x": schema}
    tools = (Tool("f", {"type": "object", "properties": properties, "$defs": DEFS}),)
    answer = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = joined(*parse("qwen3_coder", [answer], tools)).calls
    assert json.loads(call.parameters) == {"x": value}


def test_a_schema_of_any_depth_is_taken() -> None:
    schema: object = {"type": "integer"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    tools = (Tool("f", {"properties": {"x": schema}}),)
    answer = "<tool_call>\n<function=f>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>"
    (call,) = joined(*parse("qwen3_coder", [answer], tools)).calls
    assert json.loads(call.parameters) == {"x": "3"}


@pytest.mark.parametrize(
    "parser, text",
    [
        ("pythonic", r'[f(a="\ud800")]'),
        ("qwen3_coder", '<tool_call>\n<function=f>\n<parameter=a>\n["\\ud800"]\n</parameter>\n</function>'),
        ("qwen25", r'<tool_call>{"name": "f", "arguments": {"a": "\ud800"}}</tool_call>'),
        ("qwen25", r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}</tool_call>'),
        ("qwen25", r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'),
        ("mistral", r'[TOOL_CALLS][{"name": "\ud800", "arguments": {}}]'),
    ],
)
def test_half_a_surrogate_pair_can_be_sent(parser: str, text: str) -> None:
    tools = (Tool("f", {"properties": {"a": {"type": ["array", "string"]}}}),)
    (call,) = joined(*parse(parser, [text], tools)).calls
    msgspec.json.encode([call.name, call.parameters])
    values = json.loads(call.parameters)
    assert call.name == "\ufffd" if not values else "\ud800" in values["a"]
