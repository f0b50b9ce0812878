"""From chunks to parts of an answer, and what a request's grammar becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from sglang.srt.entrypoints.answer_parts import AnswerFormat, AnswerParser
from sglang.srt.entrypoints.tool_request import ToolRequest, tool_request
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.function_call.mistral_detector import MistralDetector
from sglang.srt.function_call.pythonic_detector import PythonicDetector
from sglang.srt.function_call.qwen25_detector import Qwen25Detector
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.tokenizer_manager import Chunk
from sglang.srt.parser.chat_format import ChatFormat
from sglang.srt.parser.reasoning_parser import REASONING_PARSERS
from sglang.srt.sampling.sampling_params import GrammarSpec, SamplingParams
from sglang.srt.utils.errors import RequestError
from support.tool_texts import TEMPLATES

THINK = REASONING_PARSERS["qwen3"]
PLAIN = ChatFormat()
QWEN = ChatFormat(TEMPLATES["qwen2.5"][1], Qwen25Detector, THINK)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
# A token per character, and one special token.
TEXTS: Any = SimpleNamespace(
    is_special_text=lambda text: text in ("[TOOL_CALLS]", "<s>"), data=lambda token: chr(token).encode()
)


def tools(choice: Any = None, parallel: bool = True, **fields: Any) -> ToolRequest:
    return tool_request([{"type": "function", "function": {"name": "f", **fields}}], choice, parallel)


def chunk(text: str, reason: str | None = None) -> Chunk:
    empty: Any = {}
    return Chunk(
        rid="r",
        text=text,
        output_ids=[ord(char) for char in text],
        finish_reason=None if reason is None else FinishReason(type=reason),
        prompt_tokens=1,
        completion_tokens=len(text),
        cached_tokens=0,
        cached_tokens_details=empty,
        computed_tokens_details=empty,
        latency_s=0.0,
        logprobs=[],
        prompt_logprobs=[],
        embedding=b"",
    )


def read(form: AnswerFormat, text: str, size: int, reason: str = "stop") -> tuple[str, str, list[Any], AnswerParser]:
    parser = form.parser(TEXTS)
    chunks = [chunk(text[at : at + size]) for at in range(0, len(text), size)]
    deltas = [parser.push(each) for each in [*chunks, chunk("", reason)]]
    calls: list[Any] = []
    for part in (call for delta in deltas for call in delta.calls):
        if part.name is not None:
            assert part.index == len(calls) and part.call_id
            calls.append([part.name, ""])
        calls[part.index][1] += part.arguments
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas), calls, parser


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_text_and_calls_of_one_answer(size: int) -> None:
    form = AnswerFormat.of(QWEN, tools(), "…assistant\n")
    reasoning, content, calls, parser = read(form, f"<think>\nCall {CALL}?\n</think>\n\nWell.\n{CALL}", size)
    assert (reasoning, content, calls) == (f"Call {CALL}?", "Well.", [["f", '{"a": 1}']])
    assert parser.reasoning_tokens == len(f"<think>\nCall {CALL}?\n</think>")
    assert parser.finish_reason(FinishReason(type="stop")) == "tool_calls"
    assert parser.finish_reason(FinishReason(type="length")) == "length"
    whole = replace(form, separate_reasoning=False)
    text = f"<think>\nCall\n</think>\n\n{CALL}"
    assert read(whole, text, size)[:3] == ("", "<think>\nCall\n</think>\n\n", [["f", '{"a": 1}']])


@pytest.mark.parametrize("size", [1, 1000])
def test_a_forced_call_that_is_cut_off_leaves_no_content(size: int) -> None:
    form = AnswerFormat.of(PLAIN, tools("required"), "…")
    text = '[{"name": "f", "parameters": {"a": 1}}, {"na'
    assert read(form, text, size, "length")[:3] == ("", "", [["f", '{"a": 1}']])
    assert read(form, '[{"na', size, "length")[:3] == ("", "", [])


def test_an_answer_without_reasoning_has_no_reasoning_tokens() -> None:
    assert read(AnswerFormat.of(QWEN, ToolRequest(), "…"), f"No. {CALL}", 2)[:2] == ("", f"No. {CALL}")
    assert read(AnswerFormat.of(QWEN, ToolRequest(), "…"), "No.", 2)[3].reasoning_tokens == 0
    assert read(AnswerFormat.of(PLAIN, ToolRequest(), "…"), "No.", 2)[3].reasoning_tokens is None


def grammar(server: ChatFormat, request: ToolRequest, prompt: str = "…", **params: Any) -> Any:
    made = AnswerFormat.of(server, request, prompt).sampling_params(SamplingParams(**params), TEXTS).grammar
    if made is not None and made.kind == "structural_tag":
        return json.loads(made.source)["format"]
    return made


def test_which_requests_get_a_grammar() -> None:
    no_thinking = ChatFormat(QWEN.template, Qwen25Detector)
    assert grammar(no_thinking, ToolRequest()) is None and grammar(no_thinking, tools()) is None
    assert grammar(no_thinking, tools("required"))["type"] == "tags_with_separator"
    assert grammar(no_thinking, tools("required", parallel=False))["type"] == "or"
    assert grammar(no_thinking, tools({"type": "function", "function": {"name": "f"}}))["type"] == "or"
    assert grammar(no_thinking, tools(strict=True))["type"] == "triggered_tags"


@pytest.mark.parametrize("server", [PLAIN, ChatFormat("", PythonicDetector)])
def test_without_a_grammar_of_its_own_a_forced_call_is_a_json_array(server: ChatFormat) -> None:
    form = AnswerFormat.of(server, tools("required"), "…")
    assert form.detector is JsonArrayParser
    assert grammar(server, tools("required"))["elements"][0] == {"type": "const_string", "value": "["}
    assert read(form, '[{"name": "f", "parameters": {}}]', 4)[1:3] == ("", [["f", "{}"]])


def test_a_grammar_leaves_the_reasoning_free() -> None:
    schema = GrammarSpec("json_schema", '{"type": "object"}')
    assert grammar(PLAIN, ToolRequest(), grammar=schema) == schema
    assert grammar(QWEN, ToolRequest(), "…<think>\n\n</think>\n\n", grammar=schema) == schema
    for kind, source, last in (
        ("json_schema", "{}", {"type": "json_schema", "json_schema": {}}),
        ("regex", "a+", {"type": "regex", "pattern": "a+"}),
        ("ebnf", 'root ::= "a"', {"type": "grammar", "grammar": 'root ::= "a"'}),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}', {"type": "any_text"}),
    ):
        made = grammar(QWEN, ToolRequest(), grammar=GrammarSpec(kind, source))
        assert made["type"] == "sequence" and made["elements"][-1] == last
    assert grammar(QWEN, tools("required"), "…<think>\n")["elements"][0]["end"] == "</think>"
    older = GrammarSpec("structural_tag", '{"type": "structural_tag", "structures": [], "triggers": []}')
    assert (
        AnswerFormat.of(QWEN, ToolRequest(), "…").sampling_params(SamplingParams(grammar=older), TEXTS).grammar
        == older
    )


def test_an_answer_in_a_form_may_also_be_a_call() -> None:
    schema = GrammarSpec("json_schema", '{"type": "object"}')
    no_thinking = ChatFormat(QWEN.template, Qwen25Detector)
    either = grammar(no_thinking, tools(), grammar=schema)
    assert either["type"] == "or"
    assert either["elements"] == [
        {"type": "json_schema", "json_schema": {"type": "object"}},
        grammar(no_thinking, tools("required")),
    ]
    assert grammar(no_thinking, tools("required"), grammar=schema) == grammar(no_thinking, tools("required"))
    assert grammar(no_thinking, ToolRequest(), grammar=schema) == schema
    behind = grammar(QWEN, tools(), grammar=schema)
    assert behind["type"] == "sequence" and behind["elements"][-1] == either


def test_two_grammars_for_one_answer_are_refused() -> None:
    with pytest.raises(RequestError, match="use one") as error:
        grammar(PLAIN, tools("required"), grammar=GrammarSpec("regex", "a"))
    assert error.value.param == "tool_choice"


def test_special_tokens_that_mark_calls_stay_in_the_text() -> None:
    def skips(server: ChatFormat, request: ToolRequest) -> bool:
        return AnswerFormat.of(server, request, "…").sampling_params(SamplingParams(), TEXTS).skip_special_tokens

    mistral = ChatFormat("", MistralDetector)
    assert not skips(mistral, tools()) and skips(mistral, ToolRequest())
    assert skips(QWEN, tools()), "its marks are ordinary tokens"


GPT_OSS = ChatFormat.of(TEMPLATES["gpt-oss"][1], "auto", "auto")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
TO_F = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("server", "choice", "text", "found"),
    [
        (GPT_OSS, "auto", f"{ANALYSIS}A{NEXT}{TO_F}", ("A", "", [["f", '{"a": 1}']])),
        (GPT_OSS, "required", f"{ANALYSIS}A{NEXT}{TO_F}", ("A", "", [["f", '{"a": 1}']])),
        (replace(GPT_OSS, reasoning=None), "auto", f"{ANALYSIS}A{NEXT}{TO_F}", ("", "A", [["f", '{"a": 1}']])),
        (replace(GPT_OSS, reasoning=None), "required", f"{ANALYSIS}A{NEXT}{TO_F}", ("", "", [["f", '{"a": 1}']])),
        (
            replace(GPT_OSS, detector=None),
            "required",
            f'{ANALYSIS}A{NEXT}{FINAL}[{{"name": "f", "parameters": {{"a": 1}}}}]',
            ("A", "", [["f", '{"a": 1}']]),
        ),
        (
            replace(GPT_OSS, detector=Qwen25Detector),
            "auto",
            f"{ANALYSIS}A{NEXT}{FINAL}B{CALL}",
            ("A", "B", [["f", '{"a": 1}']]),
        ),
    ],
)
def test_an_answer_of_gpt_oss_by_each_pair_of_parsers(
    server: ChatFormat, choice: str, text: str, found: Any, size: int
) -> None:
    form = AnswerFormat.of(server, tools(choice), "…<|start|>assistant")
    assert read(form, text, size)[:3] == found
    assert read(replace(form, separate_reasoning=False), text, size)[0] == ""


def with_a(choice: Any = None, **fields: Any) -> ToolRequest:
    return tools(choice, parameters={"type": "object", "properties": {"a": {"type": "integer"}}}, **fields)


def accepts(form: Any, text: str) -> bool:
    compiled = xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
    return bool(_is_grammar_accept_string(compiled, text))


def test_a_grammar_of_gpt_oss_is_about_what_its_messages_hold() -> None:
    schema = GrammarSpec("json_schema", '{"type": "object", "properties": {}, "additionalProperties": false}')
    only_calls, only_reasoning = replace(GPT_OSS, reasoning=None), replace(GPT_OSS, detector=None)
    analysis, words, array = f"{ANALYSIS}A{NEXT}", FINAL + "{}", FINAL + '[{"name": "f", "parameters": {"a": 1}}]'
    for server, request, given, rights, wrongs in (
        (GPT_OSS, ToolRequest(), schema, [words], ["{}", TO_F, FINAL + "x"]),
        (GPT_OSS, with_a(), schema, [words, TO_F], ["{}", FINAL + "x"]),
        (GPT_OSS, with_a("required"), None, [TO_F], [words, TO_F + NEXT + TO_F, ""]),
        (GPT_OSS, with_a({"type": "function", "function": {"name": "f"}}), None, [TO_F], [words, ""]),
        (only_calls, with_a("required"), None, [TO_F], [words, ""]),
        (only_calls, with_a(), schema, [words, TO_F], ["{}", FINAL + "x"]),
        (only_reasoning, ToolRequest(), schema, [words], ["{}"]),
        (only_reasoning, with_a("required"), None, [array], [TO_F, words]),
        (GPT_OSS, with_a(strict=True), None, [TO_F, FINAL + "x"], ["x"]),
    ):
        form = grammar(server, request, "…<|start|>assistant", grammar=given)
        for front in ("", analysis):
            assert all(accepts(form, front + text) for text in rights), (rights, form)
            assert not any(accepts(form, front + text) for text in wrongs), (wrongs, form)
    # Without one of its parsers in use, the answer is taken as it is.
    assert grammar(only_calls, ToolRequest(), grammar=schema) == schema


def test_a_grammar_of_gpt_oss_goes_on_where_the_message_that_is_continued_ends() -> None:
    schema = GrammarSpec("json_schema", '{"type": "object", "properties": {}, "additionalProperties": false}')
    prompt = f"…<|start|>assistant{FINAL}It"
    continued = {"role": "assistant", "content": "It"}

    def form(request: ToolRequest, given: GrammarSpec | None) -> Any:
        made = AnswerFormat.of(GPT_OSS, request, prompt, continued)
        return made.sampling_params(SamplingParams(grammar=given), TEXTS).grammar

    assert form(ToolRequest(), schema) == schema and form(with_a(strict=True), None) is None
    either = json.loads(form(with_a(), schema).source)["format"]
    assert accepts(either, "{}") and accepts(either, NEXT + TO_F) and not accepts(either, TO_F)
    forced = json.loads(form(with_a("required"), None).source)["format"]
    assert accepts(forced, NEXT + TO_F) and not accepts(forced, "{}")


def test_an_answer_of_gpt_oss_that_a_call_may_end_has_no_least_length() -> None:
    for request in (with_a("required"), with_a(strict=True)):
        with pytest.raises(RequestError, match="leave min_tokens out"):
            grammar(GPT_OSS, request, min_new_tokens=2)
    assert grammar(GPT_OSS, with_a(), min_new_tokens=2) is None
