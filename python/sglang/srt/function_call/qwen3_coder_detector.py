"""Calls of Qwen3-Coder and Qwen 3.5: elements instead of JSON.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Source: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct, which writes one line break at each end of a value,
tables and lists as JSON, and other values as Python's str() does (True, None).

The tool's schema decides what a value is: it becomes a number, a truth value, null, a table or a list where the
schema allows that and the text is one, and a string otherwise. Strings are passed on as they come, unless the schema
restricts them: a grammar puts white space around those, which is none of the value. A value ends at the
`</parameter>` behind which another element comes: a value may hold the same text itself. The models sometimes leave
out `<tool_call>`; then the function must be one of the tools.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.function_call.base_format_detector import (
    BaseFormatDetector,
    calls_format,
    loose,
    schema_tag,
    triggered_format,
)
from sglang.srt.function_call.core_types import Tool
from sglang.srt.function_call.text_reader import Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\s]*")
# Of an argument: a schema may have spaces in it.
_KEY = re.compile(r"[^<>\n]*")
_MAX_NAME = 256
# The parts of one argument's schema that are looked at: it may be deep, or refer to itself.
_MAX_SCHEMAS = 256
_JSON_KINDS: dict[type, str] = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


class Qwen3CoderDetector(BaseFormatDetector):
    markers = (_BEGIN,)

    def _read(self) -> Steps[None]:
        while marker := (yield from self.text_before((_BEGIN, _FUNCTION))):
            self.reader.set_mark()
            if marker == _BEGIN:
                self.reader.skip(len(_BEGIN))
                yield from self.reader.skip_space()
            if not (yield from self._function(known_only=marker != _BEGIN)):
                self.give_back(marker)
                continue
            yield from self._skip(_END)

    def _skip(self, word: str) -> Steps[bool]:
        """Pass over the word, and over white space before it, if it comes next."""
        self.reader.set_mark()
        yield from self.reader.skip_space()
        found = yield from self.reader.take_cut(word)
        if found:
            self.reader.drop_mark()
        else:
            self.reader.rewind()
        return found

    def _function(self, known_only: bool) -> Steps[bool]:
        name = yield from self._element(_FUNCTION, _NAME)
        if not name or (known_only and name not in self.tools):
            return False
        tool = self.tools.get(name)
        self.output.begin_call(name)
        self.output.arguments("{")
        self.reader.drop_mark()
        separator = ""
        while True:
            if (yield from self._skip(_FUNCTION_END)):
                self.output.arguments("}")
                return True
            self.reader.set_mark()
            yield from self.reader.skip_space()
            key = yield from self._element(_PARAMETER, _KEY)
            if not key:
                self.reader.rewind()
                # At the end of the text the call is unfinished; before other text it has ended.
                self.output.arguments("}" if (yield from self._text_follows()) else "")
                return True
            self.reader.drop_mark()
            self.output.arguments(f"{separator}{_dumps(key)}: ")
            separator = ", "
            if not (yield from self._value(tool, key)):
                return True

    def _text_follows(self) -> Steps[bool]:
        self.reader.set_mark()
        yield from self.reader.skip_space()
        # An element that is cut off is no text.
        cut = yield from self.reader.starts_with_cut(_PARAMETER)
        found = not cut and (yield from self.reader.more())
        self.reader.rewind()
        return found

    def _element(self, begin: str, pattern: re.Pattern[str]) -> Steps[str]:
        """The name in `<function=name>`, which is passed over; empty if that does not come next."""
        if not (yield from self.reader.take(begin)):
            return ""
        name = yield from self.reader.take_while(pattern, _MAX_NAME)
        return name if (yield from self.reader.take(">")) else ""

    def _value(self, tool: Tool | None, key: str) -> Steps[bool]:
        """A value and its end. Returns whether the end came."""
        yield from self.reader.take("\n")
        schema = tool.property_schema(key) if tool else None
        kinds = allowed_kinds(schema, tool.resolved) if tool else frozenset()
        fits = _Restriction.of(schema, tool.resolved) if tool else None
        if kinds <= {"string"} and fits is None:
            self.output.arguments('"')
            complete = yield from self._text(lambda text: self.output.arguments(_dumps(text)[1:-1]))
            self.output.arguments('"' if complete else "")
            return complete
        texts: list[str] = []
        complete = yield from self._text(texts.append)
        text = "".join(texts)
        self.output.arguments(_dumps(converted(text, kinds, fits)) if complete else text)
        return complete

    def _text(self, out: Callable[[str], None]) -> Steps[bool]:
        """The text of a value, without its last line break."""
        held = ""

        def hold(text: str) -> None:
            nonlocal held
            text = held + text
            keep = 1 if text.endswith("\n") else 0
            held = text[len(text) - keep :]
            if len(text) > keep:
                out(text[: len(text) - keep])

        while (yield from self.reader.until((_PARAMETER_END,), hold, shortest_cut=1)):
            self.reader.skip(len(_PARAMETER_END))
            if (yield from self._is_end()):
                return True
            hold(_PARAMETER_END)
        out(held)
        return False

    def _is_end(self) -> Steps[bool]:
        """Whether another element, or nothing, comes next."""
        self.reader.set_mark()
        yield from self.reader.skip_space()
        found = not (yield from self.reader.more())
        for word in (_PARAMETER, _FUNCTION_END, _END):
            found = found or (yield from self.reader.starts_with_cut(word))
        self.reader.rewind()
        return found

    @classmethod
    def matches_template(cls, template: str) -> bool:
        # Seed-OSS writes the same elements between marks of its own.
        return all(mark in template for mark in (_BEGIN, _FUNCTION, _PARAMETER))

    @classmethod
    def call_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        return calls_format([_tag(tool) for tool in tools], "\n", single)

    @classmethod
    def strict_format(cls, tools: Sequence[Tool], template: str, single: bool) -> dict[str, Any] | None:
        return triggered_format(_BEGIN, [_tag(loose(tool)) for tool in tools], single)


def _tag(tool: Tool) -> dict[str, Any]:
    begin = f"{_BEGIN}\n{_FUNCTION}{tool.name}>\n"
    # The grammar of the arguments has white space at its end. One line break at each place is what models write.
    return schema_tag(begin, tool, f"{_FUNCTION_END}\n{_END}", style="qwen_xml", max_whitespace_cnt=1)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def allowed_kinds(schema: Any, resolved: Callable[[Any], Any]) -> frozenset[str]:
    """JSON's kinds that a schema allows; empty: it does not tell, and the value is a string. A client's schema may be
    malformed. resolved: follows the schema's `$ref`; what one leads to that is not there may be a table or a list."""
    found: set[str] = set()
    schemas = deque([schema])
    for _ in range(_MAX_SCHEMAS):
        if not schemas:
            break
        one = schemas.popleft()  # the nearest first
        if isinstance(one, Mapping) and "$ref" in one:
            one = resolved(one)
            if not isinstance(one, Mapping):
                found |= {"object", "array"}
        if not isinstance(one, Mapping):
            continue
        kinds = [kind for kind in _listed(one.get("type")) if isinstance(kind, str)]
        if kinds:
            found.update(kinds)
            continue
        for key in ("anyOf", "oneOf", "allOf"):
            branches = one.get(key)
            schemas += branches if isinstance(branches, list) else ()
        found.update(map(_kind, _choices(one)))
    return frozenset(found)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _kind(value: Any) -> str:
    return "null" if value is None else _JSON_KINDS.get(type(value), "string")


def _choices(schema: Any) -> list[Any]:
    """The only values that a schema allows, if it lists them."""
    if not isinstance(schema, Mapping):
        return []
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    return found if isinstance(found, list) else []


@dataclass(frozen=True)
class _Restriction:
    """What a schema demands of a string. choices: the only values, if it lists them."""

    choices: tuple[str, ...] = ()
    min_len: int = 0
    max_len: float = math.inf

    @classmethod
    def of(cls, schema: Any, resolved: Callable[[Any], Any]) -> _Restriction | None:
        """None: it demands nothing. Of several branches, the first that is about strings and demands something."""
        schemas = deque([schema])
        for _ in range(_MAX_SCHEMAS):
            if not schemas:
                return None
            one = schemas.popleft()
            one = resolved(one) if isinstance(one, Mapping) and "$ref" in one else one
            if not isinstance(one, Mapping):
                continue
            if choices := tuple(each for each in _choices(one) if isinstance(each, str)):
                return cls(choices)
            if one.keys() & {"minLength", "maxLength", "pattern", "format"} and "string" in _listed(
                one.get("type", "string")
            ):
                lengths = [one.get(key) for key in ("minLength", "maxLength")]
                least, most = (each if isinstance(each, int) else None for each in lengths)
                return cls((), least or 0, math.inf if most is None else most)
            for key in ("anyOf", "oneOf", "allOf"):
                branches = one.get(key)
                schemas += branches if isinstance(branches, list) else ()
        return None

    def meant(self, text: str) -> str:
        """The string in a text that has white space around it; the text itself if none is seen."""
        if self.choices:
            alike = [choice for choice in self.choices if choice.strip() == text.strip()]
            return max([choice for choice in alike if choice in text], key=len, default=alike[0] if alike else text)
        bare = text.strip()
        # White space belongs to it where it is too short without.
        start = text.find(bare)
        while len(bare) < self.min_len and len(bare) < len(text):
            start = max(0, start - 1)
            bare = text[start : start + len(bare) + 1]
        return bare if len(bare) <= self.max_len else text


def converted(text: str, kinds: frozenset[str], restriction: _Restriction | None = None) -> Any:
    """The value that a text stands for, of one of the kinds; the text itself if it stands for none. restriction: of
    strings, around which white space is not meant then."""
    if restriction is not None and text.strip() in map(str.strip, restriction.choices):
        return restriction.meant(text)
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            continue  # no number of JSON
        kind = _kind(value)
        if kind == "string":  # in quotes, which belong to the text
            break
        if kind in kinds or (kind == "integer" and "number" in kinds):
            return value if _is_json(value) else text
        if kind == "number" and "integer" in kinds and value == int(value):
            return int(value)
    return restriction.meant(text) if restriction is not None else text


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
