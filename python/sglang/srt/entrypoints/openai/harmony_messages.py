"""A conversation's messages as the chat template of gpt-oss takes them. Pure.

The template reads instructions from the first message alone, and an assistant's reasoning under the name `thinking`.
It renders the first call of a message only, gives each result of a tool the name of the call before it, and refuses a
message with a call that has both a text and a reasoning. It renders either of them as reasoning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTIONS = ("system", "developer")
_BLANK_LINE = "\n\n"


def harmony_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """messages: as `template_messages` makes them. All instructions become one message, the first. Each call becomes
    a message of its own, with its result behind it; see `_results_of_calls`."""
    made: list[dict[str, Any]] = []
    instructions = [message for message in messages if message["role"] in _INSTRUCTIONS]
    if instructions:
        texts = [text for each in instructions if isinstance(text := each.get("content"), str) and text]
        made.append({**instructions[0], "content": _BLANK_LINE.join(texts)})
    others = [message for message in messages if message["role"] not in _INSTRUCTIONS]
    at = 0
    while at < len(others):
        message = _with_thinking(others[at])
        at += 1
        calls = message.get("tool_calls", ())
        if not calls:
            made.append(message)
            continue
        results = []
        while at < len(others) and others[at]["role"] == "tool":
            results.append(dict(others[at]))
            at += 1
        for call, of_call in zip(calls, _results_of_calls(calls, results), strict=True):
            made += ({**message, "tool_calls": [call]}, *of_call)
            message = {key: value for key, value in message.items() if key != "thinking"} | {"content": ""}
    return made


def _results_of_calls(
    calls: Sequence[Mapping[str, Any]], results: Sequence[dict[str, Any]]
) -> list[list[dict[str, Any]]]:
    """Those of each call: by its id, where no other call has the same. Results without an id, or of an id that
    several calls have, go to calls without a result, in their order. All others go to the last call."""
    ids = [_id_of(call, "id") for call in calls]
    counts = Counter(ids)
    places = {each: place for place, each in enumerate(ids) if each is not None and counts[each] == 1}
    found: list[list[dict[str, Any]]] = [[] for _ in calls]
    in_order, unknown = [], []
    for result in results:
        of = _id_of(result, "tool_call_id")
        if of in places:
            found[places[of]].append(result)
        elif of is None or of in counts:
            in_order.append(result)
        else:
            unknown.append(result)
    free = iter([of_call for of_call in found if not of_call])
    for result in in_order:
        next(free, found[-1]).append(result)
    found[-1] += unknown
    return found


def _id_of(message: Mapping[str, Any], name: str) -> str | int | None:
    found = message.get(name)
    return found if isinstance(found, str | int) else None


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
            made["thinking"] = f"{thinking}{_BLANK_LINE}{made['content']}"
            made["content"] = ""
    return made
