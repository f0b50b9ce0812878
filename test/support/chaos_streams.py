"""A stream of events joined, to be compared with the reply to the same body that is no stream."""

from __future__ import annotations

import json
from typing import Any

Parts = dict[str, Any]


def can_stream(path: str) -> bool:
    return "embeddings" not in path


def parts_of(path: str, reply: Any) -> list[Parts]:
    """Of a reply that is no stream, what a stream brings, too: one for each answer."""
    if path == "/generate":
        return reply if isinstance(reply, list) else [reply]
    if path == "/v1/messages":
        texts = "".join(block.get("text", "") for block in reply["content"])
        return [{"text": texts, "stop_reason": reply["stop_reason"]}]
    if path == "/v1/responses":
        return [reply]
    return [_parts_of_choice(choice) for choice in reply["choices"]]


def _parts_of_choice(choice: dict[str, Any]) -> Parts:
    message = choice.get("message") or {}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {
        "text": choice.get("text") or message.get("content") or "",
        "calls": [[call["name"], call["arguments"]] for call in calls],
        "logprobs": _lists(choice.get("logprobs")),
        "finish_reason": choice["finish_reason"],
    }


def _lists(logprobs: dict[str, Any] | None) -> dict[str, list[Any]]:
    return {name: entries for name, entries in (logprobs or {}).items() if isinstance(entries, list)}


def joined(path: str, lines: list[str]) -> list[Parts]:
    """Of the lines of a stream, as `parts_of`. Asserts that it has come to its end."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    is_openai = path not in ("/v1/messages", "/v1/responses")
    if is_openai:
        assert data and data[-1] == "[DONE]", data[-3:]
        data.pop()
    events = [json.loads(each) for each in data]
    if path == "/generate":
        last = {event.pop("index", 0): event for event in events}
        return [last[index] for index in sorted(last)]
    if path == "/v1/messages":
        assert events[-1]["type"] == "message_stop", events[-3:]
        deltas = [event["delta"] for event in events if "delta" in event]
        text = "".join(delta.get("text", "") for delta in deltas)
        return [{"text": text, "stop_reason": next(d["stop_reason"] for d in deltas if d.get("stop_reason"))}]
    if path == "/v1/responses":
        assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-3:]
        return [events[-1]["response"]]
    choices: dict[int, Parts] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        empty: Parts = {"text": "", "calls": [], "logprobs": {}, "finish_reason": None}
        _add(choices.setdefault(choice["index"], empty), choice)
    return [choices[index] for index in sorted(choices)]


def _add(parts: Parts, choice: dict[str, Any]) -> None:
    delta = choice.get("delta") or {}
    assert parts["finish_reason"] is None, "a choice goes on after its end"
    parts["text"] += choice.get("text") or delta.get("content") or ""
    for call in delta.get("tool_calls") or ():
        if call["index"] == len(parts["calls"]):
            parts["calls"].append(["", ""])
        mine, function = parts["calls"][call["index"]], call["function"]
        mine[0] += function.get("name") or ""
        mine[1] += function.get("arguments") or ""
    for name, entries in _lists(choice.get("logprobs")).items():
        parts["logprobs"].setdefault(name, []).extend(entries)
    parts["finish_reason"] = choice.get("finish_reason")
