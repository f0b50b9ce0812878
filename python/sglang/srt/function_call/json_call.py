"""Reads one call that is a JSON object, `{"name": "f", "arguments": {…}}`, and passes its arguments on as they come.

A call counts from the point where its name and the beginning of its arguments are known. Before that point it may
turn out to be no call, and its text is then given back. After that point its arguments are what the model wrote, even
if they are unfinished or no JSON, as in OpenAI's API.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Container, Sequence
from typing import Any

from sglang.srt.function_call.call_output import CallOutput
from sglang.srt.function_call.text_reader import Steps, TextReader

# The key differs: Qwen, Hermes and Mistral write "arguments", Llama writes "parameters".
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


class CallEnd(enum.Enum):
    # The object is whole.
    COMPLETE = "complete"
    # The call counts, but its object is cut off or broken; the text goes on behind what was understood.
    BROKEN = "broken"
    # It is no call; nothing was put out.
    NO_CALL = "no call"


class JsonCall:
    """known: the functions that may be called; None: any. With known ones the object may have a call's keys alone, so
    that other JSON is recognised by its first key. stops: texts that end broken JSON."""

    def __init__(
        self, reader: TextReader, output: CallOutput, known: Container[str] | None, stops: Sequence[str] = ()
    ) -> None:
        self._reader = reader
        self._output = output
        self._known = known
        self._stops = stops
        self._name: str | None = None
        # Arguments that came before the name.
        self._early: list[str] | None = None
        self._begun = False

    def read(self) -> Steps[CallEnd]:
        """The reader stands where the object has to begin."""
        reader = self._reader
        if not (yield from reader.take("{")):
            return CallEnd.NO_CALL
        yield from reader.skip_space()
        while not (yield from reader.take("}")):
            if not (yield from self._pair()):
                return self._broken()
            yield from reader.skip_space()
            if not (yield from reader.take(",")) and not (yield from reader.starts_with("}")):
                return self._broken()
            yield from reader.skip_space()
        if self._name is not None and self._early is None:
            self._early = ["{}"]  # a call without arguments
            self._begin()
        return CallEnd.COMPLETE if self._begun else CallEnd.NO_CALL

    def _broken(self) -> CallEnd:
        return CallEnd.BROKEN if self._begun else CallEnd.NO_CALL

    def _pair(self) -> Steps[bool]:
        """A key and its value. Returns whether the object may go on behind them."""
        key = yield from self._value()
        if not isinstance(key, str):
            return False
        yield from self._reader.skip_space()
        if not (yield from self._reader.take(":")):
            return False
        yield from self._reader.skip_space()
        if self._known is not None and key not in _KEYS:
            return False
        is_first = self._early is None
        if key in _ARGUMENTS and is_first and (yield from self._reader.starts_with("{")):
            return (yield from self._read_arguments())
        value = yield from self._value()
        if value is _NO_VALUE:
            return False
        if key == "name" and self._name is None:
            if not isinstance(value, str) or not value or (self._known is not None and value not in self._known):
                return False
            self._name = value
            self._begin()
        elif key in _ARGUMENTS and is_first:
            text = _object_text(value)
            if text is None:
                return False
            self._early = [text]
            self._begin()
        return True

    def _read_arguments(self) -> Steps[bool]:
        self._early = []
        self._begin()

        def out(text: str) -> None:
            if self._begun:
                self._output.arguments(text)
            elif self._early is not None:
                self._early.append(text)

        return (yield from self._reader.json_container(out, self._stops))

    def _begin(self) -> None:
        """Put out the call, if its name is known and its arguments have begun."""
        if self._begun or self._name is None or self._early is None:
            return
        self._begun = True
        self._reader.drop_mark()
        self._output.begin_call(self._name)
        for text in self._early:
            self._output.arguments(text)

    def _value(self) -> Steps[Any]:
        """A JSON value, whole; _NO_VALUE if it is none."""
        texts: list[str] = []
        if not (yield from self._reader.json_value(texts.append, self._stops)):
            return _NO_VALUE
        try:
            return json.loads("".join(texts))
        except (ValueError, RecursionError):
            return _NO_VALUE


_NO_VALUE = object()


def _object_text(value: Any) -> str | None:
    """Arguments that are no JSON object: null, or the object's text as a string, as some models write it."""
    if value is None:
        return "{}"
    if isinstance(value, str):
        try:
            return value if isinstance(json.loads(value), dict) else None
        except (ValueError, RecursionError):
            return None
    return None
