"""Ids of tool calls."""

from __future__ import annotations

import secrets
import string

_ALPHANUMERIC = string.ascii_letters + string.digits


def openai_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    """Mistral's templates refuse an id that has not nine letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
