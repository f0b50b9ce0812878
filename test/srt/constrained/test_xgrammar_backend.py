"""What grammars of each kind allow, by texts, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sglang.srt.constrained.check_process import check
from sglang.srt.constrained.xgrammar_backend import GrammarCompiler, GrammarError
from sglang.srt.sampling.sampling_params import GrammarSpec
from support.grammars import write_vocabulary

xgrammar = pytest.importorskip("xgrammar")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vocabulary(tmp_path_factory.mktemp("grammar") / "vocabulary.json").read_text()


def accepts(vocabulary: str, kind: str, source: Any, text: str, max_whitespace: int | None = None) -> bool:
    """Whether the text is complete."""
    source = source if isinstance(source, str) else json.dumps(source)
    compiled = GrammarCompiler(vocabulary, max_whitespace).compile(GrammarSpec(kind, source))
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.is_completed()


@pytest.mark.parametrize(
    "text, is_json",
    [
        ('"ab"', True),
        ('"abcd"', False),
        ('""', False),
        ('"é🎉 "', True),
        ('"a\tb"', False),
        ('"a\x00"', False),
        ('"a\x1f"', False),
        ('"a\nb"', False),
        ('"a\\q"', False),
    ],
)
def test_strings_of_bounded_length_are_json(vocabulary: str, text: str, is_json: bool):
    schema = {"type": "string", "minLength": 1, "maxLength": 3}
    assert accepts(vocabulary, "json_schema", schema, text) == is_json
    if is_json:
        assert 1 <= len(json.loads(text)) <= 3


@pytest.mark.parametrize("least, most", [(0, 1), (1, 1), (0, 2), (2, 2), (1, None)])
def test_no_bound_lets_control_characters_in(vocabulary: str, least: int, most: int | None):
    """xgrammar has other rules where at most one character is allowed."""
    schema = {"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most})
    for character in 'a \x7fé\t\n\x00\x1f"\\':
        is_json = character >= " " and character not in '"\\'
        text = f'"{character * max(1, least)}"'
        assert accepts(vocabulary, "json_schema", schema, text) == is_json, repr(character)
        names = {"type": "object", "additionalProperties": {"type": "null"}, "propertyNames": schema}
        assert accepts(vocabulary, "json_schema", names, f"{{{text}:null}}") == is_json, repr(character)


def test_the_rule_of_bounded_strings_is_found_in_no_other_text(vocabulary: str):
    """A value that looks like the rule stays what it is."""
    value = '\nx ::= (([^"\\\r\n]))\n'
    schema = {"enum": [value]}
    assert accepts(vocabulary, "json_schema", schema, json.dumps(value))


@pytest.mark.parametrize("max_whitespace, allowed", [(None, 5), (2, 2), (1, 1)])
def test_white_space(vocabulary: str, max_whitespace: int | None, allowed: int):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for number in range(6):
        text = '{"a":' + " " * number + "3}"
        assert accepts(vocabulary, "json_schema", schema, text, max_whitespace) == (number <= allowed)


def test_structural_tags_of_both_forms(vocabulary: str):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    older = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]}
    content = {"type": "json_schema", "json_schema": schema}
    newer = {"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
    for tag in (older, newer):
        assert accepts(vocabulary, "structural_tag", tag, '<f>{"a": 1}</f>')
        assert not accepts(vocabulary, "structural_tag", tag, '<f>{"b": 1}</f>')
    assert accepts(vocabulary, "structural_tag", older, 'text <f>{"a": 1}</f> text')


@pytest.mark.parametrize("whitespace, allowed", [(None, True), (2, False)])
def test_a_schema_in_a_structural_tag_allows_what_it_allows_alone(
    vocabulary: str, whitespace: int | None, allowed: bool
):
    schemas = [
        {"type": "object", "properties": {"a": {"type": "string", **limit}}} for limit in ({}, {"maxLength": 3})
    ]
    for schema in schemas:
        older = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]}
        tag = {
            "type": "tag",
            "begin": "<f>",
            "content": {"type": "json_schema", "json_schema": schema},
            "end": "</f>",
        }
        for source in (older, {"type": "structural_tag", "format": {"type": "sequence", "elements": [tag]}}):
            for text, good in (('{"a": "é"}', True), ('{"a": "b\t"}', False), ('{"a":     "b"}', allowed)):
                found = accepts(vocabulary, "structural_tag", source, f"<f>{text}</f>", whitespace)
                assert found == good == accepts(vocabulary, "json_schema", schema, text, whitespace), (source, text)


@pytest.mark.parametrize(
    "kind, source, message",
    [
        ("regex", "(a", "regex is not usable: .*parenthesis"),
        ("ebnf", "root ::= other", '"other" is not defined'),
        ("json_schema", {"type": "nonsense"}, "nonsense"),
        ("json_schema", {"anyOf": [{"$ref": "http://example.com"}]}, "http://example.com.*\\$defs"),
        (
            "structural_tag",
            {"format": {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": {"$ref": "x:y"}}]}},
            "x:y.*\\$defs",
        ),
        ("structural_tag", [], "structural_tag is not usable"),
        ("structural_tag", {"structures": [{"begin": "a"}], "triggers": []}, "'schema' is missing"),
        ("structural_tag", {"structures": 3}, "structural_tag is not usable"),
        ("structural_tag", {"structures": 5, "triggers": []}, "structures and triggers are lists"),
        ("json_schema", '{"type": "integer", "minimum": -1' + "0" * 400 + "}", "64 bits at most"),
    ],
)
def test_what_is_wrong_is_told(vocabulary: str, kind: str, source: Any, message: str):
    with pytest.raises(GrammarError, match=message) as error:
        accepts(vocabulary, kind, source, "")
    assert "/project/" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "kind, source, is_usable",
    [
        ("regex", r"a\ud83db", False),
        # Whole pairs are two halves.
        ("regex", r"\ud83d\ude00", False),
        ("regex", r"a|[\ud800-\udfff]", False),
        ("regex", r"[\ud800\udc00-\udfff]x", False),
        ("regex", r"[^\ud800-\udfff]+", True),
        ("regex", r"[a\ud800]", True),
        ("regex", r"[\u0000-\uffff]", True),
        ("regex", r"\u{1F600}\\ud800", True),
        ("ebnf", r'root ::= "a" "\"\ud83d"', False),
        ("ebnf", r'root ::= "\\ud83d" [b\]]', True),
        ("structural_tag", {"type": "structural_tag", "format": {"type": "regex", "pattern": r"\ud800"}}, False),
        ("json_schema", {"enum": ["\\ud83d"]}, True),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(vocabulary: str, kind: str, source: Any, is_usable: bool):
    spec = GrammarSpec(kind, source if isinstance(source, str) else json.dumps(source))
    message = check(GrammarCompiler(vocabulary), spec).message
    assert message == "" if is_usable else re.search(r"half of a surrogate pair.*\\u\{1F600\} in a regex", message)


def test_references_within_a_schema(vocabulary: str):
    tree = {"type": "object", "properties": {"$ref": {"type": "string"}, "next": {"$ref": "#"}}}
    assert accepts(vocabulary, "json_schema", tree, '{"$ref": "a", "next": {"$ref": "b"}}')
