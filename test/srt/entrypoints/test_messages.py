"""/v1/messages around the fake scheduler, in Anthropic's shapes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from sglang.srt.entrypoints.anthropic.protocol import MessagesRequest, error_body
from sglang.srt.entrypoints.request_fields import convert
from sglang.srt.utils.errors import RequestError
from support.scripted_server import CALLS, FIRST, SECOND, Scripted
from support.server_fixture import NO_TLS, Server
from support.tool_texts import WEATHER_SCHEMA

TOOLS = [
    {"name": "get_weather", "description": "d", "input_schema": WEATHER_SCHEMA},
    {"type": "custom", "name": "f", "input_schema": {"type": "object"}},
]
ANSWER = "<think>Hm, hm.</think>\n\nLet me look." + CALLS
THINKING = {"type": "enabled", "budget_tokens": 1024}
USER = [{"role": "user", "content": "Weather?"}]


def post(server: Scripted | Server, path: str = "/v1/messages", headers: Any = None, **fields: Any) -> httpx.Response:
    url = (server.server if isinstance(server, Scripted) else server).url
    body = {"model": "default", "max_tokens": 400, "messages": USER, **fields}
    return httpx.post(url + path, json=body, headers=headers, timeout=60, verify=NO_TLS)


def test_the_names_of_errors() -> None:
    kinds = {status: error_body(RequestError("x", status))["error"]["type"] for status in (409, 500, 503, 504)}
    assert kinds == {409: "invalid_request_error", 500: "api_error", 503: "overloaded_error", 504: "api_error"}


@pytest.mark.parametrize(("thinking", "is_on"), [(THINKING, True), ({"type": "disabled"}, False), (None, False)])
def test_thinking_sets_both_switches_of_templates(thinking: Any, is_on: bool) -> None:
    request = convert({"model": "m", "max_tokens": 4, "messages": USER, "thinking": thinking}, MessagesRequest, {})
    variables = request.chat().template_variables
    assert (variables["thinking"], variables["enable_thinking"]) == (is_on, is_on)


def test_a_whole_message(scripted: Scripted) -> None:
    number = scripted.answer(ANSWER)
    message = post(scripted, tools=TOOLS, thinking=THINKING, system="Be brief.").json()
    ids = [block.pop("id") for block in message["content"][2:]]
    assert len(set(ids)) == 2
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm, hm.", "signature": ""},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "name": "get_weather", "input": json.loads(FIRST)},
        {"type": "tool_use", "name": "f", "input": json.loads(SECOND)},
    ]
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "tool_use")
    assert message["usage"]["output_tokens"] == number + 1
    assert message["usage"]["input_tokens"] > 0 and message["usage"]["cache_read_input_tokens"] > 0
    assert "Be brief." in scripted.prompt()
    without = post(scripted, tools=TOOLS).json()
    assert [block["type"] for block in without["content"]] == ["text", "tool_use", "tool_use"]


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    events = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_stream_gives_the_same_message(scripted: Scripted) -> None:
    scripted.answer(ANSWER)
    whole = post(scripted, tools=TOOLS, thinking=THINKING).json()
    events = events_of(post(scripted, tools=TOOLS, thinking=THINKING, stream=True))
    assert events[0]["type"] == "message_start" and events[0]["message"]["content"] == []
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                blocks[event["index"]][name] += delta[name]
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    for block in [*blocks, *whole["content"]]:
        block.pop("id", None)
    assert blocks == whole["content"]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == whole["usage"]


def test_a_conversation_with_results(scripted: Scripted) -> None:
    scripted.answer("Rain.")
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "wet"}]},
                {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    message = post(scripted, tools=TOOLS, messages=messages, system=[{"type": "text", "text": "Be brief."}]).json()
    assert message["content"] == [{"type": "text", "text": "Rain."}] and message["stop_reason"] == "end_turn"
    prompt = scripted.prompt()
    places = [prompt.index(each) for each in ("Be brief.", "Let me look.", '"Ulm"', "wet", "And now?")]
    assert places == sorted(places)


def test_an_answer_goes_on_where_the_client_began_it(scripted: Scripted) -> None:
    scripted.answer(" is Paris.")
    messages = [*USER, {"role": "assistant", "content": "The capital"}]
    assert post(scripted, messages=messages).json()["content"][0]["text"] == " is Paris."
    assert scripted.prompt().endswith("The capital")


def test_why_an_answer_ended(scripted: Scripted) -> None:
    scripted.answer("one two three four")
    assert post(scripted, max_tokens=1).json()["stop_reason"] == "max_tokens"
    stopped = post(scripted, stop_sequences=["three"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "three")
    assert stopped["content"] == [{"type": "text", "text": "one two "}]


def test_choices_of_tools_and_formats_become_grammars(scripted: Scripted) -> None:
    scripted.answer("x")
    for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
        post(scripted, tools=TOOLS, tool_choice=choice)
        assert scripted.grammar() is not None
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    post(scripted, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert scripted.grammar() is not None
    post(scripted, tools=TOOLS, tool_choice={"type": "none"})
    assert scripted.grammar() is None and "<tools>" not in scripted.prompt()


def test_tokens_are_counted_as_they_are_computed(scripted: Scripted) -> None:
    scripted.answer("x")
    counted = post(scripted, "/v1/messages/count_tokens", tools=TOOLS, system="Be brief.").json()
    usage = post(scripted, tools=TOOLS, system="Be brief.").json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    "fields, status, words",
    [
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "image"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "content"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "web_search"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, 400, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, 400, "tool_choice"),
        ({"mcp_servers": [{}]}, 400, "mcp_servers"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, 400, "output_format"),
        ({"thinking": {"type": "much"}}, 400, "thinking.type must be one of enabled, adaptive, disabled"),
        ({"temperature": -1}, 400, "temperature"),
        ({"model": "other"}, 404, "other"),
    ],
)
def test_errors_have_anthropics_shape(scripted: Scripted, fields: Any, status: int, words: str) -> None:
    for stream in (False, True):
        reply = post(scripted, **fields, stream=stream)
        assert reply.status_code == status, reply.text
        body = reply.json()
        kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
        assert body["type"] == "error" and body["error"]["type"] == kind and words in body["error"]["message"]


def test_a_wrong_method_has_anthropics_shape(scripted: Scripted) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = scripted.server.get(path)
        assert (reply.status_code, reply.json()["type"]) == (405, "error")


def test_keys_in_anthropics_header(keyed_server: Server) -> None:
    assert post(keyed_server).status_code == 401
    assert post(keyed_server).json()["error"]["type"] == "authentication_error"
    assert post(keyed_server, headers={"x-api-key": "wrong"}).status_code == 401
    for headers in ({"x-api-key": "user"}, {"Authorization": "Bearer user"}):
        assert post(keyed_server, headers=headers).status_code == 200
