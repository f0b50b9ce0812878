"""Errors in the shape of the API to which a path belongs. Pure."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.anthropic import protocol as anthropic
from sglang.srt.utils.errors import RequestError


def error_body(path: str, error: RequestError) -> dict[str, Any]:
    is_anthropic = path in anthropic.PATHS or path.startswith("/v1/messages/")  # also what is not served
    return anthropic.error_body(error) if is_anthropic else error.body()
