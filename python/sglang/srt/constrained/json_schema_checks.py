"""Refuses JSON schemas of which xgrammar 0.2.8 silently drops a part, or for which it allows what is no JSON.

Pure: reads the schema's text alone. It follows a schema as xgrammar does: `$ref` by a path of plain names, `const`
before `enum`, and nothing below the keywords that xgrammar does not read (`not`, `if`, `contains`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import msgspec

_REFERENCES = ("$dynamicRef", "$recursiveRef")
# xgrammar takes the first of them that a schema has, and drops the schema's other keywords.
_COMBINERS = ("$ref", "anyOf", "oneOf", "allOf")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
_SINGLE = (
    "items",
    "additionalItems",
    "unevaluatedItems",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
)
_OTHER_PROPERTIES = ("additionalProperties", "unevaluatedProperties")
_LENGTHS = ("minLength", "maxLength")
# What xgrammar enforces where there is a type.
_NEED_TYPE = (
    *_LENGTHS,
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minItems",
    "maxItems",
    "required",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
)
# From which xgrammar infers the type.
_IMPLY_TYPE = ("properties", "items", "prefixItems", *(each for each in _SINGLE if each != "propertyNames"))
_CONSTRAINTS = frozenset(("type", "enum", "const", *_COMBINERS, *_NEED_TYPE, *_IMPLY_TYPE))
# The formats that xgrammar knows. It ignores the others, and then keeps to the length and the pattern.
_FORMATS = frozenset(
    ("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference")
    + ("uri-template", "json-pointer", "relative-json-pointer")
)
# The longest URL that browsers know; pydantic's HttpUrl has such a maximum.
_URL_LENGTH = 2048
# From here on a double does not hold each number of six decimals, and xgrammar's ranges are wrong.
_MAX_BOUND = 10**15
_MILLION = 10**6
_MAX_REFERENCES = 32


def check_schema(source: str) -> None:
    """Raises ValueError with a sentence that names the keyword and the remedy."""
    root = msgspec.json.decode(source)
    values: list[tuple[Any, bool]] = [(root, False)]
    seen: set[int] = set()
    while values:
        schema, is_name = values.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        _check_references(schema)
        _check_structure(schema, root, is_name)
        _check_strings(schema)
        if "number" in _listed(schema.get("type")):
            _check_bounds(schema)
        values += _parts(schema)
        values.append((_resolved(schema, root), is_name))


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    """The schemas within one, and whether each is one of names, which are strings without a type."""
    for key in _LISTS:
        part = schema.get(key)
        yield from ((each, False) for each in part) if isinstance(part, list) else ()
    for key in _MAPS:
        part = schema.get(key)
        yield from ((each, False) for each in part.values()) if isinstance(part, dict) else ()
    for key in _SINGLE:
        yield schema.get(key), key == "propertyNames"


def _resolved(schema: Mapping[str, Any], root: Any) -> Any:
    """What a schema's `$ref` names; the schema itself if it has none, None if there is no such schema."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    found = root
    for name in reference.split("/")[1:]:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_references(schema: Mapping[str, Any]) -> None:
    for key in _REFERENCES:
        if key in schema:
            raise ValueError(f"{key} is not followed: use $ref with a path such as #/$defs/name")
    reference = schema.get("$ref")
    if not isinstance(reference, str) or reference == "#" or reference.startswith("#/"):
        return
    if reference.startswith("#"):
        raise ValueError(f"the $ref {reference[:100]!r} is an anchor: write it as a path such as #/$defs/name")
    raise ValueError(f"the $ref {reference[:100]!r} leads out of the schema: put what it names into $defs")


def _check_structure(schema: Mapping[str, Any], root: Any, is_name: bool) -> None:
    combiners = [key for key in _COMBINERS if key in schema]
    if combiners:
        _check_combiner(combiners[0], schema, root)
        return
    if schema.get("type") == []:
        raise ValueError("type is an empty list: name at least one type")
    kinds = [kind for kind in _listed(schema.get("type")) if isinstance(kind, str)]
    values = _values(schema)
    if values is not None:
        _check_values(schema, kinds, values)
        return
    if "type" not in schema and not is_name and not any(key in schema for key in _IMPLY_TYPE):
        dropped = next((key for key in _NEED_TYPE if key in schema), None)
        if dropped is not None:
            raise ValueError(f"{dropped} has no effect without type: give the schema a type")
    if "type" not in schema or "object" in kinds:
        _check_required(schema)
        _check_names(schema)


def _check_combiner(key: str, schema: Mapping[str, Any], root: Any) -> None:
    others = sorted(_CONSTRAINTS & schema.keys() - {key})
    if key != "$ref":
        branches = schema[key] if isinstance(schema[key], list) else []
        if branches == [] and schema[key] == []:
            raise ValueError(f"{key} is an empty list: give it at least one schema")
        if key == "allOf" and len(branches) > 1:
            raise ValueError("allOf with several schemas is not enforced: merge them into one schema")
    else:
        branches = [schema]
    if others == ["type"] and _keep_to(schema["type"], branches, root):
        return
    if others:
        raise ValueError(f"{others[0]} beside {key} is not enforced: move it into the schemas of {key}")


def _keep_to(kind: Any, branches: list[Any], root: Any) -> bool:
    """Whether each of the schemas has a type of its own, which is allowed."""
    allowed = _listed(kind)
    for branch in branches:
        for _ in range(_MAX_REFERENCES):
            if not (isinstance(branch, dict) and "$ref" in branch):
                break
            branch = _resolved(branch, root)
        own = branch.get("type") if isinstance(branch, dict) and "$ref" not in branch else None
        if own is None or not all(each in allowed for each in _listed(own)):
            return False
    return True


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _check_values(schema: Mapping[str, Any], kinds: list[str], values: list[Any]) -> None:
    key = "const" if "const" in schema else "enum"
    for value in values if kinds else ():
        if not any(_is_of(value, kind) for kind in kinds):
            raise ValueError(f"{key} has a value that type does not allow: take it out, or widen the type")
    listed = schema.get("enum")
    if key == "const" and isinstance(listed, list) and schema["const"] not in listed:
        raise ValueError("const is none of the values of enum: leave one of the two out")


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int):
        return kind in ("integer", "number")
    if isinstance(value, float):
        return kind == "number" or (kind == "integer" and value.is_integer())
    if isinstance(value, str):
        return kind == "string"
    if isinstance(value, dict):
        return kind == "object"
    return kind == ("null" if value is None else "array")


def _check_required(schema: Mapping[str, Any]) -> None:
    properties = schema.get("properties", {})
    required = schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return  # xgrammar refuses it, if it reads it
    for name in required:
        if isinstance(name, str) and name not in properties:
            raise ValueError(f"required names {name[:100]!r}, which properties lacks: add it to properties")


def _check_names(schema: Mapping[str, Any]) -> None:
    """Of properties. xgrammar keeps others from the names that are listed only if these are plain."""
    listed, patterns, names = (schema.get(key) for key in ("properties", "patternProperties", "propertyNames"))
    for key, value in (("properties", listed), ("patternProperties", patterns)):
        if value and names not in (None, True, {}):
            raise ValueError(f"propertyNames beside {key} is not enforced: leave it out")
    for name in listed if isinstance(listed, dict) else ():
        if any(_may_match(pattern, name) for pattern in (patterns if isinstance(patterns, dict) else ())):
            raise ValueError(
                f"patternProperties has a pattern for the property {name[:100]!r}, which may then have either form: "
                "take the name out of the pattern, or out of properties"
            )
    others = next((key for key in _OTHER_PROPERTIES if schema.get(key, False) is not False), None)
    if others is None or not isinstance(listed, dict) or not listed:
        return
    if patterns:
        raise ValueError(f"{others} is not kept from the names of patternProperties: set it to false")
    for name in listed:
        if not name.isascii() or not name.isprintable() or '"' in name or "\\" in name:
            raise ValueError(
                f"{others} is not kept from the property {name[:100]!r}, as its name is not plain ASCII: set it to "
                "false, or rename the property"
            )


def _may_match(pattern: str, name: str) -> bool:
    """As a whole, which is how xgrammar takes a pattern. Also if Python cannot read it."""
    try:
        return re.fullmatch(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return True


def _check_strings(schema: Mapping[str, Any]) -> None:
    form = schema.get("format")
    is_known = isinstance(form, str) and form in _FORMATS
    if "pattern" in schema and is_known:
        raise ValueError("pattern beside format is not enforced: leave one of the two out")
    for key in _LENGTHS:
        bound = schema.get(key)
        if bound is None or not ("pattern" in schema or is_known) or _is_implied(key, bound, form):
            continue
        other = "pattern" if "pattern" in schema else "format"
        remedy = "write the length into the pattern, as in ^[a-z]{1,8}$" if other == "pattern" else "leave it out"
        raise ValueError(f"{key} beside {other} is not enforced: {remedy}")
    patterns = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
        if isinstance(pattern, str):
            _check_pattern(pattern)


def _is_implied(key: str, bound: Any, form: Any) -> bool:
    """Whether a text of a URI keeps to the bound anyway."""
    if form != "uri" or not isinstance(bound, int):
        return False
    return bound <= 1 if key == "minLength" else bound >= _URL_LENGTH


def _check_bounds(schema: Mapping[str, Any]) -> None:
    """Of a number. xgrammar makes a range of numbers with six decimals, and writes the bounds so."""
    lower: list[int] = []
    upper: list[int] = []
    for key, bounds, step in (
        ("minimum", lower, 0),
        ("exclusiveMinimum", lower, 1),
        ("maximum", upper, 0),
        ("exclusiveMaximum", upper, -1),
    ):
        bound = schema.get(key)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue  # xgrammar refuses it, if there is one
        if abs(bound) >= _MAX_BOUND:
            raise ValueError(f"{key} of a number must be below 1e15 in size: use a smaller one, or leave it out")
        written = Decimal(f"{bound:.6f}")
        if written != Decimal(repr(bound)):
            raise ValueError(f"{key} of a number may have six decimals: round it, or use another unit")
        bounds.append(int(written * _MILLION) + step)
    if lower and upper and max(lower) > min(upper):
        raise ValueError("minimum and maximum leave no number of six decimals: widen the range")


# In a string of JSON these characters are escaped, and xgrammar writes what a pattern matches as it is.
_FORBIDDEN = frozenset((*range(0x20), ord('"'), ord("\\")))
_ASCII = frozenset(range(0x80))
_BEYOND = 0x80
_LETTERS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "0": 0, "a": 7, "e": 27}
_DIGITS = frozenset(range(ord("0"), ord("9") + 1))
_WORD = frozenset(code for code in range(0x80) if chr(code).isalnum()) | {ord("_")}
_SPACE = frozenset((9, 10, 11, 12, 13, 32))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}


def _check_pattern(pattern: str) -> None:
    """Where each element of a pattern allows some character that needs no escape, xgrammar leaves out the others."""
    at = 0
    while at < len(pattern):
        if pattern[at] == "[":
            found, at = _class_has_plain(pattern, at + 1)
        elif pattern[at] == "\\":
            code, at = _escape(pattern, at + 1, in_class=False)
            found = code is None or _is_plain(code)
        else:
            found = _is_plain(ord(pattern[at]))
            at += 1
        if not found:
            raise ValueError(
                "pattern has a quotation mark, a backslash, a control character or half of a surrogate pair, which "
                "cannot stand in a JSON string as it is: take it out of the pattern"
            )


def _is_plain(code: int) -> bool:
    return code not in _FORBIDDEN and not 0xD800 <= code <= 0xDFFF


def _escape(pattern: str, at: int, in_class: bool) -> tuple[int | None, int]:
    """What an escape stands for, from behind its backslash, and where it ends. None: it is no single character."""
    letter = pattern[at : at + 1]
    at += 1
    if letter in ("x", "u"):
        end = at + (2 if letter == "x" else 4)
        digits = pattern[at:end]
        if pattern[at : at + 1] == "{":
            end = pattern.find("}", at) + 1
            digits = pattern[at + 1 : end - 1]
        try:
            return int(digits, 16), end or len(pattern)
        except ValueError:
            return None, at  # xgrammar refuses it
    if letter == "c":
        return ord(pattern[at : at + 1] or "A") & 0x1F, at + 1
    if letter == "b":
        return (8 if in_class else None), at
    if letter in _LETTERS:
        return _LETTERS[letter], at
    if not letter or letter.isalnum():
        return None, at  # a class, or what xgrammar refuses
    return ord(letter), at


def _class_has_plain(pattern: str, at: int) -> tuple[bool, int]:
    """Whether a class allows a character that needs no escape, from behind its bracket, and where it ends."""
    negated = pattern.startswith("^", at)
    at += negated
    if negated and pattern.startswith("]", at):
        return False, at + 1  # `[^]`, of which xgrammar leaves nothing out
    codes: set[int] = set()
    some_beyond = all_beyond = False
    while at < len(pattern) and pattern[at] != "]":
        low, begin = None, at
        low, at = _class_member(pattern, at)
        if low is None:
            name = pattern[begin + 1 : at]
            negative = name.lower() in _CLASSES and name.isupper()
            codes |= _ASCII - _CLASSES[name.lower()] if negative else _CLASSES.get(name, frozenset((ord("a"),)))
            some_beyond, all_beyond = some_beyond or negative, all_beyond or negative
            continue
        high = low
        if pattern.startswith("-", at) and pattern[at + 1 : at + 2] not in ("", "]"):
            end, behind = _class_member(pattern, at + 1)
            if end is not None:
                high, at = end, behind
        codes.update(range(low, min(high, _BEYOND - 1) + 1))
        some_beyond = some_beyond or (high >= _BEYOND and any(map(_is_plain, (low, high))))
        all_beyond = all_beyond or (low <= _BEYOND and high >= 0xFFFF)
    if negated:
        return not all_beyond or any(code not in codes for code in _ASCII - _FORBIDDEN), at + 1
    return some_beyond or any(map(_is_plain, codes)), at + 1


def _class_member(pattern: str, at: int) -> tuple[int | None, int]:
    if pattern[at] == "\\":
        return _escape(pattern, at + 1, in_class=True)
    return ord(pattern[at]), at + 1
