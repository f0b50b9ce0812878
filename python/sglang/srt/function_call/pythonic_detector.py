"""Calls that are a Python list, as Llama 3.2 and 4 write them where the prompt asks for it.

    [get_weather(city="Paris", days=3), get_time()]

Source: Meta's page of prompt formats for Llama 3.2 (zero-shot function calling) and Llama 4, which puts the list
between `<|python_start|>` and `<|python_end|>`; SGLang's documentation of `pythonic`.

A list counts as calls if its first function is one of the tools. Arguments have names; their values are Python's
literals, or JSON's true, false and null. A call is put out when it is whole, because Python's text becomes JSON.

What is no call is read again from its bracket on. That takes time in proportion to the text, because arguments end
where no literal goes on: at the next call, unless that stands in a string. What begins a string in one reading ends
it in another, so that few readings are under way at any place.
"""

from __future__ import annotations

import ast
import io
import json
import keyword
import re
import tokenize
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.text_reader import Steps

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.-]*")
_NAME_AT_END = re.compile(r"[\w.-]*\Z")
_MAX_NAME = 256
# What takes part in finding the end of the arguments; any other text is passed over.
_OTHER = re.compile(r"""[^()\[\]{}"'\\]*""")
_MAX_ARGUMENTS = 1 << 20
# Words of Python that stand where an argument's name does, or look so; and what is written before such a name.
_KEYWORD_NAME = re.compile(rf"\b(?:{'|'.join(keyword.kwlist)})\s*=")
_MARK = "_name_"
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicDetector(BaseFormatDetector):
    markers = (_START, _END)

    def _read(self) -> Steps[None]:
        while marker := (yield from self.text_before(("[", _START))):
            self.reader.set_mark()
            if marker == _START:
                self.reader.skip(len(_START))
                yield from self.reader.skip_space()
            if not (yield from self.reader.take("[")) or not (yield from self._list()):
                self.give_back(marker)

    def _list(self) -> Steps[bool]:
        """Calls up to the end of the list. Returns whether there is one."""
        yield from self.reader.skip_space()
        if not (yield from self._call()):
            return False
        while True:
            self.reader.set_mark()
            yield from self.reader.skip_space()
            if (yield from self.reader.take("]")):
                break
            if (yield from self.reader.take(",")):
                yield from self.reader.skip_space()
                if (yield from self.reader.take("]")):  # behind a comma
                    break
                if (yield from self._call()):
                    continue
            self.reader.rewind()
            return True
        self.reader.set_mark()
        yield from self.reader.skip_space()
        if (yield from self.reader.take_cut(_END)):
            self.reader.drop_mark()
        else:
            self.reader.rewind()
        return True

    def _call(self) -> Steps[bool]:
        name = yield from self.reader.take_while(_NAME, _MAX_NAME)
        if name not in self.tools or not (yield from self.reader.take("(")):
            return False
        text = yield from self._arguments_text()
        arguments = None if text is None else json_arguments(text)
        if arguments is None:
            return False
        self.output.begin_call(name)
        self.output.arguments(arguments)
        return True

    def _is_call(self, text: str) -> bool:
        """Whether a parenthesis behind the text begins a call's arguments, and no tuple."""
        found = _NAME_AT_END.search(text)
        name = found[0] if found else ""
        return name in self.tools or name[-1:].isidentifier() or name[-1:].isdigit()

    def _arguments_text(self) -> Steps[str | None]:
        """The text up to the closing parenthesis, which is passed over; None if there is none."""
        parts: list[str] = []
        closing = [")"]
        quote = end = ""
        while True:
            parts.append((yield from self.reader.take_while(_OTHER, _MAX_ARGUMENTS)))
            end = (end + parts[-1])[-_MAX_NAME:]
            char = yield from self.reader.peek()
            if not char or (char == "(" and not quote and self._is_call(end)):
                return None
            self.reader.skip(1)
            if quote:
                if char == "\\":
                    parts.append(char)
                    char = yield from self.reader.peek()
                    self.reader.skip(len(char))
                elif char == quote:
                    quote = ""
            elif char == "\\":  # only between two lines
                if not (yield from self.reader.take("\n")):
                    return None
                char += "\n"
            elif char in "\"'":
                quote = char
            elif char in "([{":
                closing.append({"(": ")", "[": "]", "{": "}"}[char])
            elif char in ")]}":
                if char != closing.pop():
                    return None
                if not closing:
                    return "".join(parts)
            parts.append(char)
            end += char

    @classmethod
    def matches_template(cls, template: str) -> bool:
        return _START in template or "func_name1(params_name1=" in template


def json_arguments(text: str) -> str | None:
    """Python's named arguments as a JSON object; None if they are not literals with names."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an unknown escape in a string
            call = ast.parse(_marked(f"f({text}\n)"), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values: dict[str, Any] = {}
        for argument in call.keywords:
            if argument.arg is None:
                return None
            name = argument.arg.removeprefix(_MARK)
            values[name if keyword.iskeyword(name) else argument.arg] = _value(argument.value)
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, tokenize.TokenError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _marked(source: str) -> str:
    """With a mark before each argument's name that is a word of Python, such as `from`: a schema may have it."""
    if not _KEYWORD_NAME.search(source):
        return source
    lines = io.StringIO(source).readlines()
    tokens = list(tokenize.generate_tokens(iter(lines).__next__))
    for token, behind in reversed(list(pairwise(tokens))):
        if keyword.iskeyword(token.string) and behind.string == "=":
            row, column = token.start
            lines[row - 1] = f"{lines[row - 1][:column]}{_MARK}{lines[row - 1][column:]}"
    return "".join(lines)


def _value(node: ast.expr) -> Any:
    """As `ast.literal_eval`, with JSON's names of constants at any depth. Raises ValueError."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys: Sequence[ast.expr | None] = node.keys
        if any(key is None for key in keys):
            raise ValueError("an unpacked table is no literal")
        return {_value(key): _value(value) for key, value in zip(keys, node.values) if key is not None}
    return ast.literal_eval(node)
