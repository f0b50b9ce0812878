"""How a chat's fields set a model's reasoning: as variables of its chat template. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sglang.srt.utils.errors import RequestError

MAX_EFFORT = 0.99
# Of `thinking`, by its type.
_THINKING = {"enabled": True, "disabled": False}
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
    if effort is not None:
        enabled = effort != "none"
    if isinstance(thinking, Mapping):
        # "adaptive" leaves it to the model.
        enabled = _THINKING.get(str(thinking.get("type")), enabled)
    elif thinking is not None:
        enabled = thinking
    if enabled is None:
        return {}
    variables = {"thinking": bool(enabled), "enable_thinking": bool(enabled)}
    return variables | {"reasoning_effort": effort} if enabled and effort not in (None, "none") else variables


def _first_given(table: Mapping[str, Any], *names: str) -> Any:
    return next((table[name] for name in names if table.get(name) is not None), None)


def _checked(effort: Any, name: str) -> str | float:
    """A text, or a number that may be written as a text."""
    try:
        number = float(effort) if not isinstance(effort, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        if isinstance(effort, str):
            return effort
        number = math.nan
    if not 0 <= number <= MAX_EFFORT:
        raise RequestError(
            f"{name} must be a text such as none, low, medium or high, or a number from 0 to {MAX_EFFORT}",
            param=name.partition(".")[0],
        )
    return number
