"""Variables of chat templates that only the engine sets. Pure. Imports nothing: the command line is read with it."""

from __future__ import annotations

from collections.abc import Iterable

# Arguments of transformers that the engine passes, or that change its answer's form. A client's own template is
# refused too: it is a program that may not end.
_RESERVED = frozenset(
    {
        *(
            "chat_template",
            "tokenize",
            "add_generation_prompt",
            "continue_final_message",
            "tools",
            "messages",
            "self",
        ),
        *("conversation", "conversations", "return_assistant_tokens_mask"),
    }
)


def reserved_variable(variables: Iterable[str]) -> str | None:
    """The first of the variables that neither a request nor a flag may set."""
    return next((name for name in variables if name in _RESERVED), None)
