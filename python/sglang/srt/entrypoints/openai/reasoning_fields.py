"""How a chat's fields set a model's reasoning: as variables of its chat template. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sglang.srt.utils.errors import RequestError

MAX_EFFORT = 0.99
MAX_EFFORT_CHARS = 64
# Of `thinking`, by its type; "adaptive" and none leave it to the other fields.
_THINKING = {"enabled": True, "disabled": False, "adaptive": None, None: None}
_ON = frozenset({"1", "true", "yes", "y", "on"})


def reasoning_variables(
    effort: str | float | None,
    reasoning: Mapping[str, Any] | None,
    thinking: Mapping[str, Any] | bool | None = None,
) -> dict[str, Any]:
    """Each is a field of a chat. `thinking` overrides `effort` in `reasoning`, and that overrides effort.
    Models call the switch `thinking` (DeepSeek, Kimi) or `enable_thinking` (Qwen, GLM). Raises RequestError that
    names the field."""
    reasoning = reasoning or {}
    own = _first_given(reasoning, "effort", "reasoning_effort")
    if own is not None:
        effort = _checked(own, "reasoning.effort")
    elif effort is not None:
        effort = _checked(effort, "reasoning_effort")
    enabled = _first_given(reasoning, "enabled", "enable")
    if isinstance(enabled, str):
        enabled = enabled.strip().lower() in _ON
    elif enabled is not None and not isinstance(enabled, bool | int):
        raise RequestError("reasoning.enabled must be true or false", param="reasoning")
    if effort is not None:
        enabled = effort != "none" and enabled not in (False, 0)
    if isinstance(thinking, Mapping):
        kind = thinking.get("type")
        if not isinstance(kind, str | None) or kind not in _THINKING:
            raise RequestError("thinking.type must be enabled, disabled or adaptive", param="thinking")
        if (stated := _THINKING[kind]) is not None:
            enabled = stated
    elif thinking is not None:
        enabled = thinking
    if enabled is None:
        return {}
    variables = {"thinking": bool(enabled), "enable_thinking": bool(enabled)}
    # "none" goes on, too: else templates and the server's own variables would put another effort in its place.
    is_of_use = effort is not None and bool(enabled) == (effort != "none")
    return variables | {"reasoning_effort": effort} if is_of_use else variables


def _first_given(table: Mapping[str, Any], *names: str) -> Any:
    return next((table[name] for name in names if table.get(name) is not None), None)


def _checked(effort: Any, name: str) -> str | float:
    """A text, or a number that may be written as a text."""
    try:
        number = float(effort) if not isinstance(effort, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        if isinstance(effort, str) and 0 < len(effort) <= MAX_EFFORT_CHARS:
            return "none" if effort.lower() == "none" else effort
        number = math.nan
    if not 0 <= number <= MAX_EFFORT:
        raise RequestError(
            f"{name} must be a text such as none, low, medium or high, or a number from 0 to {MAX_EFFORT}",
            param=name.partition(".")[0],
        )
    return number
