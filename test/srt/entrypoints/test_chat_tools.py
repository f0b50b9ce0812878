"""Tool calls and reasoning over HTTP, around the fake scheduler with a scripted answer: what OpenAI's client makes of
a reply and of its stream."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest

from sglang.srt.entrypoints.answer_parts import AnswerFormat, AnswerParser
from sglang.srt.entrypoints.anthropic.protocol import MessagesRequest
from sglang.srt.entrypoints.anthropic.serving import serve_messages
from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import serve_responses
from sglang.srt.parser.chat_format import ChatFormat
from support.one_word import OneWord
from support.scripted_server import ASKED, BROKEN, CALLS, FIRST, NAMED, SECOND, SEED, TOOLS, Scripted
from support.server_fixture import Server
from support.tool_texts import TEMPLATES, render


def streamed(chunks: Any) -> dict[int, dict[str, Any]]:
    """Choice -> its message, assembled as agents do it."""
    messages: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            message = messages.setdefault(
                choice.index, {"content": "", "reasoning": "", "calls": [], "end": None, "tokens": 0}
            )
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            message["tokens"] += len(choice.logprobs.content) if choice.logprobs else 0
            for part in choice.delta.tool_calls or ():
                if part.id:
                    assert part.index == len(message["calls"]) and part.type == "function"
                    message["calls"].append([part.id, part.function.name, ""])
                message["calls"][part.index][2] += part.function.arguments
            message["end"] = choice.finish_reason or message["end"]
    return messages


def test_calls_in_a_reply_and_in_its_stream(scripted: Scripted) -> None:
    number = scripted.answer("Let me look." + CALLS)
    reply = scripted.ask(tools=TOOLS, n=2, logprobs=True)
    for choice in reply.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
        calls = choice.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("get_weather", FIRST),
            ("f", SECOND),
        ]
        assert len({call.id for call in calls}) == 2 and len(choice.logprobs.content) == number + 1
    messages = streamed(scripted.ask(tools=TOOLS, n=2, logprobs=True, stream=True))
    assert sorted(messages) == [0, 1]
    for message in messages.values():
        assert [call[1:] for call in message["calls"]] == [["get_weather", FIRST], ["f", SECOND]]
        assert (message["content"], message["end"], message["tokens"]) == ("Let me look.", "tool_calls", number + 1)


def test_a_reply_of_calls_alone_has_no_content(scripted: Scripted) -> None:
    scripted.answer(CALLS)
    message = scripted.ask(tools=TOOLS).choices[0].message
    assert message.content is None and len(message.tool_calls) == 2
    one = scripted.ask(tools=TOOLS, parallel_tool_calls=False)
    assert [call.function.name for call in one.choices[0].message.tool_calls] == ["get_weather"]


def test_calls_are_text_where_they_are_not_wanted(scripted: Scripted) -> None:
    scripted.answer(CALLS)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = scripted.ask(**fields).choices[0]
        assert choice.message.tool_calls is None and choice.finish_reason == "stop"
        assert choice.message.content == CALLS
        assert "<tools>" not in scripted.prompt() and scripted.grammar() is None


def test_a_call_that_is_cut_off_or_broken(scripted: Scripted) -> None:
    scripted.answer("A" + CALLS)
    assert scripted.ask(tools=TOOLS, stop='"days"').choices[0].message.tool_calls[0].function.arguments == (
        '{"city": "Zürich 🎉", '
    )
    short = scripted.ask(tools=TOOLS, max_tokens=12).choices[0]
    assert short.finish_reason == "length"
    scripted.answer("<tool_call>\nnothing\n</tool_call>")
    choice = scripted.ask(tools=TOOLS).choices[0]
    assert choice.message.content == "<tool_call>\nnothing\n</tool_call>" and choice.finish_reason == "stop"


def test_reasoning_in_a_reply_and_in_its_stream(scripted: Scripted) -> None:
    scripted.answer("<think>\nRain?\n</think>\n\nWell." + CALLS)
    reply = scripted.ask(tools=TOOLS)
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content, len(message.tool_calls)) == ("Rain?", "Well.", 2)
    number = reply.usage.completion_tokens_details.reasoning_tokens
    assert 0 < number < reply.usage.completion_tokens and reply.usage.reasoning_tokens == number
    (found,) = streamed(scripted.ask(tools=TOOLS, stream=True)).values()
    assert (found["reasoning"], found["content"], len(found["calls"])) == ("Rain?", "Well.", 2)
    whole = scripted.ask(extra_body={"separate_reasoning": False}).choices[0].message
    assert whole.content == "<think>\nRain?\n</think>\n\nWell." + CALLS
    chunks = list(scripted.ask(stream=True, extra_body={"stream_reasoning": False}))
    held = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks]
    assert [each for each in held if each] == ["Rain?"]
    last = list(scripted.ask(stream=True, stream_options={"include_usage": True}))[-1]
    assert last.usage.completion_tokens_details.reasoning_tokens == number


def test_a_conversation_with_calls_is_rendered_and_continued(scripted: Scripted) -> None:
    scripted.answer("It rains.")
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    turns: Any = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    assert scripted.ask(messages=turns, tools=TOOLS).choices[0].message.content == "It rains."
    shown = [
        {**turns[1], "content": "", "tool_calls": [{**calls[0], "function": {"name": "f", "arguments": {"a": 1}}}]}
    ]
    expected = render(TEMPLATES["qwen2.5"][1], [turns[0], *shown, turns[2]], add_generation_prompt=True)
    assert scripted.prompt().endswith(expected) and "<tools>" in scripted.prompt()
    assert '"strict"' not in scripted.prompt()
    started: Any = [*ASKED, {"role": "assistant", "content": "<think>I know. It"}]
    scripted.answer(" does.</think>Rain.")
    message = scripted.ask(messages=started, extra_body={"continue_final_message": True}).choices[0].message
    assert (message.reasoning_content, message.content) == ("does.", "Rain.")
    assert scripted.prompt().endswith("<think>I know. It")


def test_a_developers_message_is_in_the_prompt(scripted: Scripted) -> None:
    scripted.answer("It rains.")
    scripted.ask(messages=[{"role": "developer", "content": "Be brief."}, *ASKED])
    assert "<|im_start|>system\nBe brief." in scripted.prompt()


def test_forced_calls_come_with_a_grammar(scripted: Scripted) -> None:
    scripted.answer(CALLS.strip())
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        found = scripted.ask(tools=TOOLS, tool_choice=choice).choices[0]
        assert found.finish_reason == "tool_calls"
        kind, source = scripted.grammar()
        assert kind == "structural_tag" and ("get_weather" in source) == (choice == "required")
        assert json.loads(source)["format"]["elements"][0]["type"] == "optional", "it may think first"
    scripted.ask(tools=TOOLS)
    assert "triggered_tags" in scripted.grammar()[1], "one of the tools is strict"


def test_what_is_wrong_with_tools_is_a_400(scripted: Scripted) -> None:
    for fields, param in (
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": "f"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required", "extra_body": {"min_tokens": 2}}, "min_tokens"),
        ({"tools": TOOLS, "parallel_tool_calls": False, "extra_body": {"min_tokens": 2}}, "min_tokens"),
        ({"tools": BROKEN, "tool_choice": "required"}, "tools"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"conversation": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            scripted.ask(**fields)
        assert error.value.param == param


def test_an_answer_that_may_go_on_behind_a_strict_call_may_have_a_least_length(scripted: Scripted) -> None:
    scripted.answer("It rains.")
    assert scripted.ask(tools=TOOLS, extra_body={"min_tokens": 2}).choices[0].message.content == "It rains."


def test_parsers_for_a_text_that_a_client_has(scripted: Scripted) -> None:
    body = {"text": "A" + CALLS, "tools": TOOLS}
    found = scripted.server.post("/parse_function_call", body).json()
    assert found["normal_text"] == "A" and found["calls"][1] == {"tool_index": 1, "name": "f", "parameters": "{}"}
    bare = {"text": "[f(a=1)]", "tools": TOOLS, "tool_call_parser": "pythonic"}
    assert scripted.server.post("/parse_function_call", bare).json()["calls"][0]["parameters"] == '{"a": 1}'
    assert scripted.server.post("/parse_function_call", {**body, "tool_call_parser": "x"}).status_code == 400
    thought = {"text": "a</think>b", "reasoning_parser": "deepseek-r1"}
    for path, named in (("/parse_function_call", body), ("/separate_reasoning", thought)):
        refused = scripted.server.post(path, {**named, "text": "a" * 10_000_000})
        assert refused.status_code == 400 and "longer than any answer" in refused.json()["message"]
    assert scripted.server.post("/separate_reasoning", thought).json() == {"reasoning_text": "a", "text": "b"}
    assert scripted.server.post("/separate_reasoning", {"text": "<think>a</think>b"}).json()["text"] == "b"


def test_a_server_without_a_parser(echo_server: Server) -> None:
    """It names the flag; forced calls work by their grammar alone."""
    client = openai.OpenAI(base_url=echo_server.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as error:
        client.chat.completions.create(model="echo", messages=ASKED, tools=TOOLS)
    assert error.value.param == "tools"
    client.chat.completions.create(model="echo", messages=ASKED, tools=TOOLS, tool_choice="required", max_tokens=3)
    kind, source = echo_server.state()["grammars"][-1]
    assert kind == "structural_tag" and json.loads(source)["format"]["elements"][0]["value"] == "["
    assert echo_server.post("/parse_function_call", {"text": "a", "tools": TOOLS}).status_code == 400
    assert echo_server.post("/separate_reasoning", {"text": "a"}).status_code == 400


@pytest.mark.e2e
@pytest.mark.slow
def test_a_model_that_is_forced_to_call() -> None:
    """The real engine follows the grammar: a model with random weights writes a call that keeps to its schema."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    with Server("--tool-call-parser", "qwen25") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        reply = client.chat.completions.create(
            model="default", messages=ASKED, tools=tools, tool_choice=NAMED, max_tokens=400, seed=SEED
        )
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
        assert reply.choices[0].finish_reason == "tool_calls" and reply.choices[0].message.content is None


def off(function: Any, *args: Any) -> Any:
    """As `TokenizerThreads.run`."""

    async def call() -> Any:
        with ThreadPoolExecutor(1, thread_name_prefix="off") as pool:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *args)

    return call()


def noting(threads: list[str], function: Any) -> Any:
    def call(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return function(*args)

    return call


def test_tools_and_their_grammar_are_made_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be a megabyte."""
    threads: list[str] = []

    class Manager:
        chat_format = ChatFormat.of("", "hermes", None)
        sampling_defaults: dict[str, float] = {}
        token_texts = SimpleNamespace(is_special_text=lambda text: False)
        threads = SimpleNamespace(run=off)

        async def render_chat(self, *_: Any) -> str:
            return "prompt"

    monkeypatch.setattr(serving_chat, "tool_request", noting(threads, serving_chat.tool_request))
    monkeypatch.setattr(AnswerFormat, "sampling_params", noting(threads, AnswerFormat.sampling_params))
    chat = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], tools=TOOLS, tool_choice="required")
    request, _ = asyncio.run(serving_chat.chat_request(chat, cast(Any, Manager())))
    assert request.params.grammar is not None and len(threads) == 2
    assert all(name.startswith("off") for name in threads)


@pytest.mark.parametrize("stream", [False, True])
def test_long_answers_are_parsed_off_the_event_loop(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """By each endpoint that reads calls. A stream whose client reads slowly has many tokens at once, too."""
    threads: list[str] = []

    class Manager(OneWord):
        async def run_if_many(self, num_tokens: int, function: Any, *args: Any) -> Any:
            assert num_tokens == 1
            return await off(function, *args)

    monkeypatch.setattr(AnswerParser, "push", noting(threads, AnswerParser.push))
    manager = cast(Any, Manager())

    async def read(events: Any) -> None:
        assert [event async for event in events]

    messages = [{"role": "user", "content": "a"}]
    chat = ChatCompletionRequest(messages=messages, stream=stream)
    asyncio.run(read(serving_chat.serve_chat(chat, manager, "m")))
    asyncio.run(read(serve_responses(ResponsesRequest(input="a", stream=stream), manager, "m")))
    asyncio.run(read(serve_messages(MessagesRequest(messages=messages, max_tokens=5, stream=stream), manager, "m")))
    assert len(threads) == 3 and all(name.startswith("off") for name in threads)
