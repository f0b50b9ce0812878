"""What a server's chat template and flags make of its answers: which format its calls and its reasoning have."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.function_call_parser import find_detector
from sglang.srt.parser.reasoning_parser import ReasoningFormat, find_reasoning_format

# Roles whose messages may have several parts in a template. Other roles' messages are one text.
_ROLES_OF_PARTS = ("system", "developer", "user")
_PARTS = [{"type": "text", "text": "one part"}, {"type": "text", "text": "another part"}]
_SHOWN_PARTS = re.compile(r"one part\s*another part")
_TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class ChatFormat:
    # All of the model's templates as one text.
    template: str = ""
    # None: the server parses no calls.
    detector: type[BaseFormatDetector] | None = None
    # None: the server splits off no reasoning.
    reasoning: ReasoningFormat | None = None
    # See `find_roles_of_parts`.
    roles_of_parts: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        template: str,
        tool_call_parser: str | None,
        reasoning_parser: str | None,
        roles_of_parts: frozenset[str] = frozenset(),
    ) -> ChatFormat:
        return cls(
            template,
            find_detector(tool_call_parser, template),
            find_reasoning_format(reasoning_parser, template),
            roles_of_parts,
        )


def find_roles_of_parts(render: Callable[[list[dict[str, Any]], Sequence[Any] | None], str]) -> frozenset[str]:
    """The roles whose messages the template takes as lists of parts. It is tried, because a template may take them of
    one role and not of another, or only without tools. render: of messages and tools, raises what it likes."""
    found = set()
    for role in _ROLES_OF_PARTS:
        parts = {"role": role, "content": _PARTS}
        end = [{"role": "assistant", "content": "b"}, parts] if role == "user" else [{"role": "user", "content": "a"}]
        num_parts = 2 if role == "user" else 1
        try:
            shown = [render([parts, *end], tools) for tools in (None, [_TOOL])]
        except Exception:  # a template may raise anything
            continue
        if all(len(_SHOWN_PARTS.findall(each)) == num_parts for each in shown):
            found.add(role)
    return frozenset(found)
