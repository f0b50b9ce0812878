"""Whether a string is text. Stateless."""

from __future__ import annotations


def is_unicode(text: str) -> bool:
    """Whether all of it is characters. JSON may name halves of surrogate pairs; bytes of the command line
    that are no UTF-8 stand as such."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
