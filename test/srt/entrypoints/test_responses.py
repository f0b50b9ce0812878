"""/v1/responses around the fake scheduler: what OpenAI's client makes of a response and of its events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import openai
import pytest

from sglang.srt.entrypoints.openai.responses_protocol import UNSUPPORTED_RESPONSES, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import _status, _why_incomplete
from sglang.srt.entrypoints.request_fields import convert
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.utils.errors import RequestError
from support.scripted_server import CALLS, FIRST, SECOND, Scripted
from support.tool_texts import WEATHER_SCHEMA

TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "d", "parameters": WEATHER_SCHEMA, "strict": None},
    {"type": "function", "name": "f", "parameters": None},
]
ANSWER = "<think>Hm, hm.</think>\n\nLet me look." + CALLS


def ask(server: Scripted, **fields: Any) -> Any:
    return server.client.responses.create(**{"model": "default", "input": "Weather?", **fields})


def parts_of(response: Any) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, item.arguments))
        else:
            found.append((item.type, "".join(part.text for part in item.content)))
    return found


EXPECTED = [("reasoning", "Hm, hm."), ("message", "Let me look."), ("get_weather", FIRST), ("f", SECOND)]


def test_a_whole_response(scripted: Scripted) -> None:
    number = scripted.answer(ANSWER)
    response = ask(scripted, tools=TOOLS, metadata={"a": "b"}, instructions="Be brief.", store=True)
    assert parts_of(response) == EXPECTED
    assert response.status == "completed" and response.error is None and response.incomplete_details is None
    assert response.output_text == "Let me look."
    assert response.metadata == {"a": "b"} and response.store is False and response.instructions == "Be brief."
    assert len({item.id for item in response.output}) == 4
    usage = response.usage
    assert usage.output_tokens == number + 1 and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < number
    assert 0 < usage.input_tokens_details.cached_tokens < usage.input_tokens
    assert "Be brief." in scripted.prompt() and "<tools>" in scripted.prompt()


def test_a_stream_has_each_items_events_in_order(scripted: Scripted) -> None:
    scripted.answer(ANSWER)
    events = list(ask(scripted, tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert events[-1].type == "response.completed" and parts_of(events[-1].response) == EXPECTED
    deltas: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
    assert list(deltas.values()) == [text for _, text in EXPECTED]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output and [item.id for item in done] == list(deltas)
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert added == [0, 1, 2, 3]
    with scripted.client.responses.stream(model="default", input="Weather?", tools=TOOLS) as stream:
        assert parts_of(stream.get_final_response()) == EXPECTED


def test_a_conversation_of_items(scripted: Scripted) -> None:
    """A response's items, sent back with the results, are one answer in the prompt."""
    scripted.answer(ANSWER)
    first = ask(scripted, tools=TOOLS)
    calls = [item for item in first.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"result {call.name}"} for call in calls
    ]
    items: list[Any] = [
        {"role": "developer", "content": "Rule one."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        *first.output,
        *results,
        {"type": "message", "role": "user", "content": "Go on."},
    ]
    scripted.answer("Rain.")
    response = ask(scripted, tools=TOOLS, input=items, instructions="Rule zero.")
    assert response.output_text == "Rain."
    prompt = scripted.prompt()
    places = [prompt.index(text) for text in ("Rule zero.", "Rule one.", "Let me look.", FIRST, "result get_weather")]
    assert places == sorted(places) and prompt.count("<|im_start|>assistant") == 2


def test_formats_and_limits(scripted: Scripted) -> None:
    scripted.answer("abc def ghi jkl")
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    response = ask(scripted, text=text, max_output_tokens=2)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.text.format.type == "json_schema"
    grammar = scripted.grammar()
    assert grammar is not None
    events = list(ask(scripted, max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "absent"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}, "tools": TOOLS}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text"),
        ({"text": {"format": {"type": "structural_tag"}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "middle"}, "truncation"),
        ({"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, "include"),
    ],
)
def test_what_is_refused(scripted: Scripted, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(scripted, **fields)
    assert error.value.body["param"] == param  # type: ignore[index]


@pytest.mark.parametrize(
    "kind, status, reason", [("length", "incomplete", "max_output_tokens"), ("abort", "incomplete", "abort")]
)
def test_an_answer_that_is_cut_is_not_complete(kind: str, status: str, reason: str) -> None:
    chunk: Any = SimpleNamespace(finish_reason=FinishReason(type=kind))
    assert (_status(chunk), _why_incomplete(chunk)) == (status, reason)


def test_upstreams_sampling_fields_are_those_of_chats() -> None:
    fields = {"top_k": 3, "min_p": 0.25, "stop": "x", "presence_penalty": 1.0, "frequency_penalty": 0.5}
    request = convert({"input": "a", "repetition_penalty": 1.5, **fields}, ResponsesRequest, UNSUPPORTED_RESPONSES)
    params = request.chat().sampling_params(8)
    assert (params.top_k, params.min_p, params.stop, params.repetition_penalty) == (3, 0.25, ("x",), 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, 0.5)


def test_the_effort_is_that_of_chats() -> None:
    request = convert({"input": "a", "reasoning": {"effort": "high"}}, ResponsesRequest, UNSUPPORTED_RESPONSES)
    assert request.chat().template_variables == {
        "reasoning_effort": "high",
        "thinking": True,
        "enable_thinking": True,
    }
    request = convert({"input": "a", "reasoning": {"effort": 3}}, ResponsesRequest, UNSUPPORTED_RESPONSES)
    with pytest.raises(RequestError, match="effort must be a text"):
        request.chat()
