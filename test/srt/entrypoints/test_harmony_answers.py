"""gpt-oss's answers on each endpoint: a tokenizer with its special tokens, its template's rules, the engine's own
tokenizer manager and detokenizer, and a model that gives the answer that a test has set."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from typing import Any

import pytest
import xgrammar
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang.srt.constrained.xgrammar_backend import GrammarCompiler, make_vocabulary
from sglang.srt.entrypoints.answer_parts import AnswerFormat
from sglang.srt.entrypoints.anthropic.protocol import MessagesRequest
from sglang.srt.entrypoints.anthropic.serving import serve_messages
from sglang.srt.entrypoints.openai.harmony_messages import harmony_messages
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_chat import serve_chat
from sglang.srt.entrypoints.openai.serving_responses import serve_responses
from sglang.srt.entrypoints.parsing import (
    ParseFunctionCallReq,
    SeparateReasoningReqInput,
    parse_function_call,
    separate_reasoning,
)
from sglang.srt.entrypoints.tool_request import tool_request
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import (
    BatchTokenIDOutput,
    FinishReason,
    TokenizedGenerateReqInput,
    TokenOutput,
    bytes_to_ids,
    detokenize_req,
    ids_to_bytes,
)
from sglang.srt.parser.chat_format import ChatFormat
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.token_texts import TokenTexts
from support.tokenizer_manager_harness import Harness, run
from support.tool_texts import TEMPLATES

TEMPLATE = TEMPLATES["gpt-oss"][1]
MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
ENDS = ("<|return|>", "<|call|>")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
ARGUMENTS = '{"city": "Zürich 🎉"}'
TO_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
TEXT = f"{ANALYSIS}Rain, I think.{NEXT}{FINAL}It rains.<|return|>"
CALL = f"{ANALYSIS}Look it up.{NEXT}{TO_WEATHER}{ARGUMENTS}<|call|>"
FUNCTION = {"name": "get_weather", "description": "d", "parameters": {"type": "object"}}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
ASKED: Any = [{"role": "user", "content": "Weather?"}]
BOTH = {"tool_call_parser": "auto", "reasoning_parser": "auto"}
Event = dict[str, Any]


@cache
def tokenizer() -> Any:
    alphabet = {char: at for at, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    made = PreTrainedTokenizerFast(tokenizer_object=backend)
    made.chat_template = TEMPLATE
    return made


class Model:
    """size: tokens of one output. prompts: of all requests, in order."""

    def __init__(self, harness: Harness, size: int) -> None:
        self.manager: Any = harness.manager
        self.prompts: list[str] = []
        self._harness = harness
        self._size = size
        self._ids: list[int] = []
        backend = tokenizer().backend_tokenizer
        self._detokenizer = DetokenizerManager(lambda ids, skip: backend.decode(ids, skip_special_tokens=skip))

    def answer(self, text: str) -> int:
        self._ids = tokenizer().encode(text, add_special_tokens=False)
        return len(self._ids)

    async def serve(self) -> None:
        at = 0
        while True:
            while at == len(self._harness.sent):
                await asyncio.sleep(0.0005)
            message = self._harness.sent[at]
            at += 1
            if isinstance(message, TokenizedGenerateReqInput):
                self._generate(message)

    def _generate(self, message: TokenizedGenerateReqInput) -> None:
        prompt = bytes_to_ids(message.input_ids).tolist()
        self.prompts.append(tokenizer().decode(prompt, skip_special_tokens=False))
        self._detokenizer.handle(detokenize_req(message))
        params = message.sampling_params
        ends = {*params.stop_token_ids, *tokenizer().convert_tokens_to_ids(list(ENDS))}
        ids = self._ids[: params.max_new_tokens]
        stops = [at for at, token in enumerate(ids) if token in ends]
        ids = ids[: stops[0] + 1] if stops else ids
        end = FinishReason(type="stop", matched=ids[-1]) if stops else FinishReason(type="length", length=len(ids))
        for start in range(0, len(ids), self._size):
            new = ids[start : start + self._size]
            output = TokenOutput(
                rid=message.rid,
                output_ids=ids_to_bytes(new),
                finish_reason=end if start + self._size >= len(ids) else None,
                prompt_tokens=len(prompt),
                completion_tokens=start + len(new),
                cached_tokens=0,
            )
            found = self._detokenizer.handle(BatchTokenIDOutput(outputs=[output]))
            if found is not None:
                self._harness.tell(found)


def with_model(test: Callable[[Model], Awaitable[None]], size: int = 3, **flags: Any) -> None:
    async def started(harness: Harness) -> None:
        model = Model(harness, size)
        serving = asyncio.create_task(model.serve())
        try:
            await test(model)
        finally:
            serving.cancel()

    args = ServerArgs(model_path="m", random_seed=1, **{**BOTH, **flags})
    run(started, args=args, tokenizer=tokenizer(), context_length=4000)


async def collect(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


def assembled(events: list[Event]) -> dict[int, Event]:
    """Choice -> its message, from the events of a stream."""
    made: dict[int, Event] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        message = made.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": [], "end": None})
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                message["calls"].append([part["function"]["name"], ""])
            message["calls"][part["index"]][1] += part["function"]["arguments"]
        message["end"] = choice["finish_reason"] or message["end"]
    return made


def whole(choice: Event) -> Event:
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    reasoning = message.get("reasoning_content", "")
    end = choice["finish_reason"]
    return {"content": message["content"] or "", "reasoning": reasoning, "calls": calls, "end": end}


async def chat(model: Model, **fields: Any) -> Event:
    """The message of each choice, which is the same in a stream."""
    body = {"messages": ASKED, "max_tokens": 3000, **fields}
    (reply,) = await collect(serve_chat(ChatCompletionRequest(**body), model.manager, "m"))
    stream = assembled(await collect(serve_chat(ChatCompletionRequest(**body, stream=True), model.manager, "m")))
    found = [whole(choice) for choice in reply["choices"]]
    assert [stream[at] for at in range(len(found))] == found
    assert all(each == found[0] for each in found)
    return {**found[0], "usage": reply["usage"], "num": len(found)}


def parts(found: Event) -> tuple[str, str, list[list[str]], str]:
    return found["reasoning"], found["content"], found["calls"], found["end"]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_chats(size: int) -> None:
    async def test(model: Model) -> None:
        model.answer(TEXT)
        found = await chat(model, tools=TOOLS, n=2)
        assert parts(found) == ("Rain, I think.", "It rains.", [], "stop") and found["num"] == 2
        assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * len("xxxanalysisRain, I think.")
        model.answer(CALL)
        assert parts(await chat(model, tools=TOOLS)) == (
            "Look it up.",
            "",
            [["get_weather", ARGUMENTS]],
            "tool_calls",
        )
        model.answer(f"{ANALYSIS}A{NEXT}<|channel|>commentary<|message|>Let me look.{NEXT}{TO_WEATHER}{{}}<|call|>")
        assert parts(await chat(model, tools=TOOLS)) == ("A", "Let me look.", [["get_weather", "{}"]], "tool_calls")

    with_model(test, size)


def test_responses_and_messages() -> None:
    async def test(model: Model) -> None:
        manager = model.manager
        model.answer(CALL)
        flat: Any = [{"type": "function", **FUNCTION}]
        fields: Any = {"input": "Weather?", "tools": flat}
        (reply,) = await collect(serve_responses(ResponsesRequest(**fields), manager, "m"))
        kinds = [item["type"] for item in reply["output"]]
        assert kinds == ["reasoning", "function_call"] and reply["output"][1]["arguments"] == ARGUMENTS
        events = await collect(serve_responses(ResponsesRequest(**fields, stream=True), manager, "m"))
        last = events[-1]["response"]["output"]
        assert [item["type"] for item in last] == kinds and last[1]["arguments"] == ARGUMENTS
        assert (
            last[0]["content"] == reply["output"][0]["content"] == [{"type": "reasoning_text", "text": "Look it up."}]
        )
        model.answer(TEXT)
        (reply,) = await collect(serve_responses(ResponsesRequest(input="Weather?"), manager, "m"))
        assert reply["output"][1]["content"][0]["text"] == "It rains."

        theirs: Any = [{"name": "get_weather", "input_schema": {"type": "object"}}]
        asked: Any = {"messages": ASKED, "max_tokens": 3000, "tools": theirs}
        for text, block in (
            (TEXT, {"type": "text", "text": "It rains."}),
            (CALL, {"type": "tool_use", "name": "get_weather", "input": json.loads(ARGUMENTS)}),
        ):
            model.answer(text)
            thinking: Any = {"type": "enabled", "budget_tokens": 1024}
            (message,) = await collect(serve_messages(MessagesRequest(**asked, thinking=thinking), manager, "m"))
            assert [each["type"] for each in message["content"]] == ["thinking", block["type"]]
            assert block.items() <= message["content"][1].items()
            (message,) = await collect(serve_messages(MessagesRequest(**asked), manager, "m"))
            assert [each["type"] for each in message["content"]] == [block["type"]]
            events = await collect(serve_messages(MessagesRequest(**asked, stream=True), manager, "m"))
            texts = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            shown = "".join(delta.get("text", "") + delta.get("partial_json", "") for delta in texts)
            assert shown == ("It rains." if text == TEXT else ARGUMENTS)

    with_model(test)


def test_an_answer_that_ends_anywhere_has_no_marks_in_its_parts() -> None:
    async def test(model: Model) -> None:
        number = model.answer(CALL)
        for limit in range(1, number, 3):
            reasoning, content, calls, end = parts(await chat(model, tools=TOOLS, max_tokens=limit))
            assert "Look it up.".startswith(reasoning) and content == "" and end == "length"
            assert not calls or ARGUMENTS.startswith(calls[0][1].rstrip("\ufffd"))
        model.answer(TEXT)
        assert parts(await chat(model, stop="I th")) == ("Rain, ", "", [], "stop")
        assert parts(await chat(model, stop="nnel|>final")) == ("Rain, I think.", "", [], "stop")
        assert parts(await chat(model, stop=["rai"]))[:2] == ("Rain, I think.", "It ")
        end = tokenizer().convert_tokens_to_ids("<|end|>")
        assert parts(await chat(model, stop_token_ids=[end])) == ("Rain, I think.", "", [], "stop")
        assert parts(await chat(model, no_stop_trim=True))[:2] == ("Rain, I think.", "It rains.")

    with_model(test)


def test_calls_are_text_where_they_are_not_wanted() -> None:
    async def test(model: Model) -> None:
        model.answer(CALL)
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            assert parts(await chat(model, **fields)) == ("Look it up.", ARGUMENTS, [], "stop")
            assert "# Tools" not in model.prompts[-1]

    with_model(test)


def test_the_reasoning_is_text_where_it_is_not_to_be_apart() -> None:
    async def test(model: Model) -> None:
        model.answer(TEXT)
        assert parts(await chat(model, separate_reasoning=False))[:2] == ("", "Rain, I think.\n\nIt rains.")
        model.answer(CALL)
        found = await chat(model, separate_reasoning=False, tools=TOOLS)
        assert parts(found)[1:3] == ("Look it up.", [["get_weather", ARGUMENTS]])

    with_model(test)


def test_one_parser_alone() -> None:
    async def only_calls(model: Model) -> None:
        model.answer(CALL)
        found = await chat(model, tools=TOOLS)
        assert parts(found) == ("", "Look it up.", [["get_weather", ARGUMENTS]], "tool_calls")
        model.answer(TEXT)
        assert parts(await chat(model))[:2] == ("", "analysisRain, I think.assistantfinalIt rains.")

    async def only_reasoning(model: Model) -> None:
        model.answer(TEXT)
        assert parts(await chat(model))[:2] == ("Rain, I think.", "It rains.")

    async def neither(model: Model) -> None:
        model.answer(TEXT)
        assert parts(await chat(model))[:2] == ("", "analysisRain, I think.assistantfinalIt rains.")
        raw = await chat(model, skip_special_tokens=False)
        assert raw["content"] == TEXT.removesuffix("<|return|>")

    with_model(only_calls, reasoning_parser=None, tool_call_parser="gpt-oss")
    with_model(only_reasoning, tool_call_parser=None, reasoning_parser="gpt-oss")
    with_model(neither, tool_call_parser=None, reasoning_parser=None)


def test_a_conversation_with_calls_is_rendered() -> None:
    """By a template that takes one call, and either a reasoning or a text beside it."""

    def call(call_id: str, arguments: str) -> Event:
        return {"id": call_id, "type": "function", "function": {"name": f"f{call_id}", "arguments": arguments}}

    turns: Any = [
        *ASKED,
        {
            "role": "assistant",
            "content": "Let me.",
            "reasoning_content": "Rain?",
            "tool_calls": [call("1", '{"a": 1}'), call("2", "{}")],
        },
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
    ]

    async def test(model: Model) -> None:
        model.answer(TEXT)
        await chat(model, messages=turns, tools=TOOLS, reasoning_effort="high")
        assert "Reasoning: high" in model.prompts[-1]
        assert model.prompts[-1].endswith(
            f"<|start|>assistant{ANALYSIS}Rain?\n\nLet me.<|end|>"
            '<|start|>assistant to=functions.f1<|channel|>commentary json<|message|>{"a": 1}<|call|>'
            '<|start|>functions.f1 to=assistant<|channel|>commentary<|message|>"one"<|end|>'
            "<|start|>assistant to=functions.f2<|channel|>commentary json<|message|>{}<|call|>"
            '<|start|>functions.f2 to=assistant<|channel|>commentary<|message|>"two"<|end|>'
            "<|start|>assistant"
        )
        thought = [{"type": "thinking", "thinking": "Rain?", "signature": ""}]
        used = [{"type": "tool_use", "id": "1", "name": "f1", "input": {"a": 1}}]
        result = [{"type": "tool_result", "tool_use_id": "1", "content": "one"}]
        theirs: Any = [*ASKED, {"role": "assistant", "content": thought + used}, {"role": "user", "content": result}]
        await collect(serve_messages(MessagesRequest(messages=theirs, max_tokens=3000), model.manager, "m"))
        assert f"{ANALYSIS}Rain?<|end|><|start|>assistant to=functions.f1" in model.prompts[-1]
        model.answer(" rains.<|return|>")
        begun: Any = [*ASKED, {"role": "assistant", "content": "It"}]
        assert parts(await chat(model, messages=begun, continue_final_message=True))[:2] == ("", " rains.")
        assert model.prompts[-1].endswith(f"{FINAL}It")

    with_model(test)


def test_a_call_without_arguments_is_whole_where_its_end_was_drawn() -> None:
    async def test(model: Model) -> None:
        model.answer(f"{TO_WEATHER}<|call|>")
        assert parts(await chat(model, tools=TOOLS))[1:3] == ("", [["get_weather", "{}"]])
        # Cut off by length, or by a string, it may have gone on.
        model.answer(TO_WEATHER)
        assert parts(await chat(model, tools=TOOLS))[1:3] == ("", [])
        model.answer(f'{TO_WEATHER}{{"a": "x;y"}}<|call|>')
        assert parts(await chat(model, tools=TOOLS, stop=";"))[2] == [["get_weather", '{"a": "x']]

    with_model(test)


def test_reasoning_tokens_do_not_count_a_call_in_the_channel_of_reasoning() -> None:
    async def test(model: Model) -> None:
        model.answer('<|channel|>analysis to=functions.get_weather <|message|>{"a": 1}<|call|>')
        found = await chat(model, tools=TOOLS)
        assert parts(found)[2] == [["get_weather", '{"a": 1}']]
        assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0

    with_model(test)


def a_call(name: str, **fields: Any) -> Event:
    return {"type": "function", "function": {"name": name, "arguments": {}}, **fields}


def results_of(calls: list[Event], results: list[Event]) -> list[str]:
    """The texts behind each call."""
    made = harmony_messages([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
    behind: list[str] = []
    for message in made:
        if message["role"] == "assistant":
            behind.append("")
        else:
            behind[-1] += message["content"]
    return behind


@pytest.mark.parametrize(
    ("ids", "results", "behind"),
    [
        ((None, None), [(None, "A"), (None, "B")], ["A", "B"]),
        (("x", "x"), [("x", "A"), ("x", "B")], ["A", "B"]),
        (("x", "y"), [("y", "B"), ("x", "A")], ["A", "B"]),
        (("x", "y"), [("y", "B"), ("z", "A")], ["", "BA"]),
        (([], {}), [([], "A"), ({}, "B")], ["A", "B"]),
        (("x", None), [(None, "B"), ("x", "A"), ("w", "C")], ["A", "BC"]),
        (("x", "y"), [("x", "A"), ("x", "a")], ["Aa", ""]),
    ],
)
def test_results_of_tools_go_to_their_calls(ids, results, behind) -> None:
    calls = [a_call("f", **({} if each is None else {"id": each})) for each in ids]
    texts = [
        {"role": "tool", "content": text, **({} if each is None else {"tool_call_id": each})}
        for each, text in results
    ]
    assert results_of(calls, texts) == behind


def test_instructions_are_one_message() -> None:
    """The template reads no others."""
    first, second = {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "In verse."}
    made = harmony_messages([first, *ASKED, second])
    assert made == [{"role": "system", "content": "Be brief.\n\nIn verse."}, *ASKED]
    assert harmony_messages(ASKED) == ASKED


def test_parsers_for_a_text_that_a_client_has() -> None:
    server = ChatFormat.of(TEMPLATE, "auto", "auto")
    found = parse_function_call(ParseFunctionCallReq(text=CALL, tools=TOOLS), server)
    assert found["normal_text"] == "Look it up." and found["calls"][0]["parameters"] == ARGUMENTS
    req = SeparateReasoningReqInput(text=TEXT, reasoning_parser="gpt-oss")
    assert separate_reasoning(req, ChatFormat()) == {"reasoning_text": "Rain, I think.", "text": "It rains."}


def test_a_grammar_lets_the_special_tokens_through_and_ends_where_the_call_does() -> None:
    """As the scheduler compiles and follows it."""
    form = AnswerFormat.of(
        ChatFormat.of(TEMPLATE, "auto", "auto"), tool_request(TOOLS, "required", None), "…<|start|>assistant"
    )
    texts = TokenTexts(tokenizer())
    params = form.sampling_params(SamplingParams(), texts)
    assert not params.skip_special_tokens and params.grammar is not None
    compiler = GrammarCompiler(make_vocabulary(tokenizer(), len(tokenizer())))
    ends = tokenizer().convert_tokens_to_ids(list(ENDS))
    matcher = xgrammar.GrammarMatcher(compiler.compile(params.grammar), override_stop_tokens=ends)
    for token in tokenizer().encode(CALL, add_special_tokens=False):
        assert not matcher.is_terminated() and matcher.accept_token(token), texts.text(token)
    assert matcher.is_terminated()
