"""A conversation's messages as the chat template of gpt-oss takes them. Pure.

The template reads an assistant's reasoning under the name `thinking`, renders the first call of a message only, gives
each result of a tool the name of the call before it, and refuses a message with a call that has both a text and a
reasoning. It renders either of them as reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def harmony_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """messages: as `template_messages` makes them. Each call becomes a message of its own, with its result behind it.
    Results that belong to no call of the turn stay behind the last call."""
    made: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message = _with_thinking(messages[at])
        at += 1
        calls = message.get("tool_calls", ())
        if not calls:
            made.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(dict(messages[at]))
            at += 1
        for call in calls:
            made.append({**message, "tool_calls": [call]})
            mine = [each for each in results if "id" in call and each.get("tool_call_id") == call["id"]]
            made += mine
            results = [each for each in results if each not in mine]
            message = {key: value for key, value in message.items() if key != "thinking"} | {"content": ""}
        made += results
    return made


def _with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(message)
    if made["role"] != "assistant":
        return made
    # Newer versions of transformers would fill `thinking` from the other names again.
    found = [made.pop(name, None) for name in ("thinking", "reasoning_content", "reasoning")]
    thinking = next(filter(None, found), None)
    if isinstance(thinking, str) and thinking:
        made["thinking"] = thinking
        if made.get("tool_calls") and made["content"]:
            made["thinking"] = f"{thinking}\n\n{made['content']}"
            made["content"] = ""
    return made
