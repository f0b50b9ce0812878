"""The failures of a store's client: one class per kind, each with a sentence for the user."""

from __future__ import annotations


class StoreFailure(Exception):
    """A store did not carry out an operation."""


class StoreTimeout(StoreFailure):
    """The store did not answer, or not completely, within timeout_s."""


class StoreLost(StoreFailure):
    """The store is not there, closed the connection, or speaks another protocol."""


class StoreRefused(StoreFailure):
    """The store does not accept this client, or its certificate does not verify. It lasts until a user changes
    something; the message names the remedy."""


class PasswordMissing(StoreRefused):
    """The server wants a password, and none was given."""


class ErrorReply(StoreFailure):
    """The store answered with an error. code: the reply's first word, as in `OOM command not allowed …`."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


class ValueTooLarge(StoreFailure):
    """A value is larger than the buffer for it. No byte was written to the buffer, and the connection goes on."""
