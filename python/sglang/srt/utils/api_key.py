"""Which keys a server takes, and a client may send."""

from __future__ import annotations

KEY_RULE = "printable ASCII without spaces, as a header carries it"


def is_key(text: str) -> bool:
    """Whether it fits KEY_RULE."""
    return text != "" and text.isascii() and text.isprintable() and " " not in text
