"""A message of several parts has one prompt in all APIs of chats."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.entrypoints.anthropic.protocol import MessagesRequest
from sglang.srt.entrypoints.openai.chat_messages import template_messages
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest
from sglang.srt.parser.chat_format import ChatFormat
from sglang.srt.utils.errors import RequestError

TEXTS = ChatFormat("{{ messages }}")
LISTS = ChatFormat("{{ messages }}", roles_of_parts=frozenset({"system", "user"}))
HARMONY = ChatFormat("<|start|><|channel|><|message|>", roles_of_parts=frozenset({"system", "user"}))


def parts(*texts: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text} for text in texts]


def chats(*texts: str) -> list[list[dict[str, Any]]]:
    """The messages of one conversation, by each API."""
    answer = {"role": "assistant", "content": parts(*texts)}
    given = parts(*texts, kind="input_text")
    items = [
        {"role": "system", "content": given},
        {"role": "user", "content": given},
        {"role": "assistant", "content": parts(*texts, kind="output_text")},
        {"role": "user", "content": "go on"},
    ]
    messages = [{"role": "user", "content": parts(*texts)}, answer, {"role": "user", "content": "go on"}]
    made = [
        ChatCompletionRequest(messages=[{"role": "system", "content": parts(*texts)}, *messages]).messages,
        ResponsesRequest(input=items).chat().messages,
        MessagesRequest(system=parts(*texts), messages=messages).chat().messages,
    ]
    return [list(each) for each in made]


def conversation(content: Any, answer: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": content},
        {"role": "user", "content": content},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "go on"},
    ]


@pytest.mark.parametrize("form", [TEXTS, HARMONY])
def test_a_template_that_takes_texts_gets_the_parts_as_one(form: ChatFormat) -> None:
    for messages in chats("one", "two"):
        made = template_messages(messages, form)
        assert made == conversation("one two", "one two")
    for messages in chats("one"):
        assert template_messages(messages, form) == conversation("one", "one")


def test_a_template_that_takes_parts_gets_them() -> None:
    for messages in chats("one", "two"):
        assert template_messages(messages, LISTS) == conversation(parts("one", "two"), "one two")
    for messages in chats("one"):
        assert template_messages(messages, LISTS) == conversation("one", "one")


@pytest.mark.parametrize("form", [TEXTS, LISTS])
def test_results_of_tools_are_one_text(form: ChatFormat) -> None:
    """Of a message without a part, the text is empty."""
    for texts, text in ((["one", "two"], "one two"), ([], "")):
        messages = [
            ChatCompletionRequest(
                messages=[{"role": "tool", "tool_call_id": "1", "content": parts(*texts)}]
            ).messages,
            ResponsesRequest(
                input=[{"type": "function_call_output", "call_id": "1", "output": parts(*texts, kind="input_text")}]
            )
            .chat()
            .messages,
            MessagesRequest(
                messages=[
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "1", "content": parts(*texts)}],
                    }
                ]
            )
            .chat()
            .messages,
        ]
        for each in messages:
            assert template_messages(each, form) == [{"role": "tool", "tool_call_id": "1", "content": text}]


def assistant(*given: dict[str, Any], **fields: Any) -> dict[str, Any]:
    (made,) = template_messages([{"role": "assistant", "content": list(given), **fields}], TEXTS)
    return made


def test_refusals_are_texts_and_thoughts_are_reasoning() -> None:
    refusal, thinking = {"type": "refusal", "refusal": "No."}, {"type": "thinking", "thinking": "Hm."}
    assert assistant(refusal) == {"role": "assistant", "content": "No."}
    assert assistant(*parts("one"), refusal)["content"] == "one No."
    made = assistant(thinking, *parts("one"), {"type": "reasoning", "text": "So."})
    assert made == {"role": "assistant", "content": "one", "reasoning_content": "Hm.\nSo."}
    assert assistant(thinking)["content"] == ""
    whole = {"role": "assistant", "content": None, "refusal": "I cannot."}
    assert template_messages([whole], TEXTS)[0]["content"] == "I cannot."
    assert template_messages([whole | {"content": "Yes."}], TEXTS)[0]["content"] == "Yes."
    assert assistant(thinking, reasoning_content="Mine.")["reasoning_content"] == "Mine."
    (harmony,) = template_messages([{"role": "assistant", "content": [thinking, *parts("one")]}], HARMONY)
    assert (harmony["thinking"], harmony["content"]) == ("Hm.", "one")
    for part in ({"type": "refusal"}, {"type": "thinking", "thinking": 1}, {"type": "text"}):
        with pytest.raises(RequestError, match=f"a part of type {part['type']} without `{part['type']}`"):
            assistant(part)
    for role in ("user", "system", "tool"):
        for part in (refusal, thinking):
            with pytest.raises(RequestError, match="only text is supported"):
                template_messages([{"role": role, "content": [part]}], TEXTS)


def test_roles_in_another_case_and_tools_that_give_nothing_back() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "Developer", "content": "a"},
        {"role": "USER", "content": "b"},
        {"role": "Assistant", "tool_calls": [call]},
        {"role": "Tool", "tool_call_id": "1", "content": None},
        {"role": "Assistant", "function_call": {"name": "g", "arguments": "{}"}},
        {"role": "Function", "name": "g", "content": None},
    ]
    made = template_messages(messages, TEXTS)
    lowered = [{**message, "role": message["role"].lower()} for message in messages]
    assert made == template_messages(lowered, TEXTS)
    assert [message["role"] for message in made] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert made[3] == {"role": "tool", "tool_call_id": "1", "content": "", "name": "f"} and made[5]["content"] == ""
    with pytest.raises(RequestError, match="has no content, which a user's may not lack"):
        template_messages([{"role": "User", "content": None}], TEXTS)
    with pytest.raises(RequestError, match="has the role 'nobody'"):
        template_messages([{"role": "Nobody", "content": "a"}], TEXTS)


def test_instructions_and_a_message_of_the_system_are_one_text() -> None:
    items = [{"role": "developer", "content": parts("one", "two", kind="input_text")}]
    asked = ResponsesRequest(instructions="Be brief.", input=[*items, {"role": "user", "content": "a"}]).chat()
    assert asked.messages[0] == {"role": "system", "content": "Be brief.\n\none two"}
