"""The one error that reading a dataset ends with."""

from __future__ import annotations


class DatasetError(Exception):
    """The message is one sentence for the user."""
