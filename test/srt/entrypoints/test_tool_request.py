"""Which tools and choices of tools are taken, and the sentences about the others."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.entrypoints.openai.chat_messages import template_messages
from sglang.srt.entrypoints.tool_request import MAX_TOOLS, MAX_TOOLS_BYTES, tool_request
from sglang.srt.parser.chat_format import ChatFormat
from sglang.srt.utils.errors import RequestError


def tool(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("tools", "choice", "kind", "called"),
    [
        (None, None, "none", []),
        (None, "auto", "none", []),
        ([], "none", "none", []),
        ([tool()], None, "auto", ["f"]),
        ([tool()], "none", "none", []),
        ([tool(), tool("g.h-1_")], "required", "required", ["f", "g.h-1_"]),
        ([tool(), tool("g")], NAMED, "named", ["f"]),
    ],
)
def test_what_a_request_wants_of_its_tools(tools: Any, choice: Any, kind: str, called: list[str]) -> None:
    found = tool_request(tools, choice, None)
    assert found.choice == kind and [each.name for each in found.callable_tools] == called
    assert found.is_forced == (kind in ("required", "named")) and found.parallel
    assert not tool_request(tools, choice, False).parallel or kind == "none"


def test_what_the_template_gets() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    found = tool_request([tool("f", description="d", parameters=schema, strict=True), tool("g")], None, None)
    assert [each.strict for each in found.tools] == [True, False]
    first, second = (each["function"] for each in found.rendered)
    assert first == {"name": "f", "description": "d", "parameters": schema}
    assert second == {"name": "g", "description": "", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("tools", "choice", "param", "words"),
    [
        (["f"], None, "tools", "tools[0] has no function"),
        ([tool(), {"type": "function"}], None, "tools", "tools[1] has no function"),
        ([{"type": "web_search", "function": {"name": "f"}}], None, "tools", "only 'function'"),
        ([tool("")], None, "tools", "tools[0].function.name"),
        ([tool(3)], None, "tools", "tools[0].function.name"),
        ([tool("a b")], None, "tools", "letters, digits"),
        ([tool("a" * 129)], None, "tools", "1 to 128"),
        ([tool(), tool()], None, "tools", "tools[1].function.name is 'f' once more"),
        ([tool(parameters=[])], None, "tools", "JSON schema"),
        ([tool(parameters={"type": "string"})], None, "tools", "of type 'object'"),
        ([tool(parameters={"properties": []})], None, "tools", "properties must be an object"),
        ([tool(strict="yes")], None, "tools", "strict"),
        ([tool(str(i)) for i in range(MAX_TOOLS + 1)], None, "tools", f"{MAX_TOOLS} is the most"),
        ([tool(description="x" * MAX_TOOLS_BYTES)], None, "tools", "shorten"),
        ([tool()], "any", "tool_choice", "must be one of none, auto, required"),
        ([tool()], {"type": "function"}, "tool_choice", "tool_choice must be"),
        ([tool()], {"type": "function", "function": {"name": "g"}}, "tool_choice", "'g', which is not among tools"),
        (None, NAMED, "tool_choice", "not among tools"),
        (None, "required", "tool_choice", "there are no tools"),
    ],
)
def test_what_is_refused(tools: Any, choice: Any, param: str, words: str) -> None:
    with pytest.raises(RequestError) as error:
        tool_request(tools, choice, None)
    assert words in error.value.message and error.value.param == param and error.value.status_code == 400


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ({"a": 1}, {"a": 1}), ("[1]", "[1]"), ('{"cut', '{"cut')],
)
def test_templates_get_the_arguments_of_calls_as_objects(arguments: Any, shown: Any) -> None:
    given = [{"role": "assistant", "content": None, "tool_calls": [call(arguments)], "reasoning_content": "r"}]
    (made,) = template_messages(given, ChatFormat())
    assert made["content"] == "" and made["reasoning_content"] == "r"
    assert made["tool_calls"][0]["function"] == {"name": "f", "arguments": shown}
    assert given[0]["tool_calls"] == [call(arguments)], "the request's own messages stay as they are"


def test_a_tools_message_gets_the_name_of_its_function() -> None:
    answered = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "12"}]}
    made = template_messages([{"role": "assistant", "tool_calls": [call("{}")]}, answered], ChatFormat())
    assert made[1] == {"role": "tool", "tool_call_id": "1", "content": "12", "name": "f"}
    assert (
        "tool_calls"
        not in template_messages([{"role": "assistant", "content": "a", "tool_calls": []}], ChatFormat())[0]
    )


def test_a_developers_message_is_one_of_the_system_unless_the_template_has_the_role() -> None:
    given = [{"role": "developer", "content": "Be brief."}]
    assert template_messages(given, ChatFormat("{% if role == 'system' %}")) == [
        {"role": "system", "content": "Be brief."}
    ]
    assert template_messages(given, ChatFormat("{% if role == 'developer' %}")) == given
    assert given[0]["role"] == "developer"


def test_a_call_and_its_answer_of_an_older_client_take_the_form_that_templates_know() -> None:
    called = {"name": "f", "arguments": '{"a": 1}'}
    given = [
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "f", "content": "12"},
        {"role": "assistant", "content": "a", "function_call": None},
    ]
    call_made, answer, plain = template_messages(given, ChatFormat())
    function = {"name": "f", "arguments": {"a": 1}}
    assert call_made["tool_calls"] == [{"id": "call00000", "type": "function", "function": function}]
    assert answer == {"role": "tool", "name": "f", "content": "12", "tool_call_id": "call00000"}
    assert "function_call" not in call_made and plain == {"role": "assistant", "content": "a"}
    both = {"role": "assistant", "tool_calls": [call("{}"), call("{}")], "function_call": called}
    assert [each["id"] for each in template_messages([both], ChatFormat())[0]["tool_calls"]] == ["1", "1"]
    (alone,) = template_messages([{"role": "function", "name": "f", "content": "12"}], ChatFormat())
    assert alone == {"role": "tool", "name": "f", "content": "12"}


@pytest.mark.parametrize("calls", ["f", [{"id": "1"}], [{"function": {"arguments": "{}"}}], [3]])
def test_calls_without_a_function_are_refused(calls: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls") as error:
        template_messages([{"role": "assistant", "tool_calls": calls}], ChatFormat())
    assert error.value.param == "messages"


@pytest.mark.parametrize("called", ["f", {"arguments": "{}"}])
def test_a_call_of_an_older_client_without_a_function_is_refused_by_its_own_name(called: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.function_call has no function with a name"):
        template_messages([{"role": "assistant", "function_call": called}], ChatFormat())


GPT_OSS = "<|start|><|channel|><|message|>"


def test_the_template_of_gpt_oss_gets_one_call_in_a_message_and_its_result_behind_it() -> None:
    calls = [{**call("{}"), "id": name} for name in ("1", "2", "3")]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("3", "1", "x")]
    asked = {"role": "user", "content": "?"}
    given = [
        asked,
        {"role": "assistant", "content": "Look.", "reasoning_content": "Hm.", "tool_calls": calls},
        *results,
        {"role": "assistant", "content": "Done.", "reasoning_content": "So."},
    ]
    made = template_messages(given, ChatFormat(GPT_OSS))
    assert [(each["role"], each.get("tool_call_id"), each["content"]) for each in made] == [
        ("user", None, "?"),
        ("assistant", None, ""),
        ("tool", "1", "1"),
        ("assistant", None, ""),
        ("assistant", None, ""),
        ("tool", "3", "3"),
        ("tool", "x", "x"),
        ("assistant", None, "Done."),
    ]
    assert [[each["id"] for each in message.get("tool_calls", ())] for message in made[1:6:2]] == [["1"], ["2"], []]
    assert [message.get("thinking") for message in made] == [None, "Hm.\n\nLook.", *[None] * 5, "So."]
    assert not any("reasoning_content" in message for message in made)
    assert given[1]["reasoning_content"] == "Hm.", "the request's own messages stay as they are"


@pytest.mark.parametrize(
    ("fields", "content", "thinking"),
    [
        ({"content": "a"}, "a", None),
        ({"content": "a", "thinking": None, "reasoning_content": ""}, "a", None),
        ({"content": None, "thinking": "b", "reasoning_content": "c"}, "", "b"),
        ({"content": "a", "reasoning": "b"}, "", "b\n\na"),
        ({"content": "a", "reasoning": {"effort": "low"}}, "a", None),
    ],
)
def test_the_template_of_gpt_oss_gets_a_reasoning_or_a_text_beside_a_call(
    fields: Any, content: str, thinking: str | None
) -> None:
    (made,) = template_messages([{"role": "assistant", "tool_calls": [call("{}")], **fields}], ChatFormat(GPT_OSS))
    assert (made["content"], made.get("thinking")) == (content, thinking)
    assert not made.keys() & {"reasoning_content", "reasoning"}
