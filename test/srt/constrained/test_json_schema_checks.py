"""What a schema may hold. xgrammar itself shows that a pattern which passes allows only JSON."""

from __future__ import annotations

import datetime
import decimal
import enum
import inspect
import json
import uuid
from typing import Annotated, Any, Literal

import pytest

from sglang.srt.constrained.json_schema_checks import check_schema


def check(schema: Any) -> None:
    check_schema(json.dumps(schema))


def number(**bounds: Any) -> dict[str, Any]:
    return {"type": "number", **bounds}


def text(**limits: Any) -> dict[str, Any]:
    return {"type": "string", **limits}


INTEGER = {"type": "integer"}


def named(name: str, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: INTEGER}, **others}


DEFS = {"$defs": {"t": {"$anchor": "tt", "type": "string"}}}


@pytest.mark.parametrize(
    "schema, message",
    [
        (number(minimum=1e-8, maximum=2e-8), "minimum of a number may have six decimals"),
        (number(maximum=0.1234567), "maximum of a number may have six"),
        (number(minimum=1e15), "minimum of a number must be below 1e15"),
        (number(exclusiveMaximum=-(10**400)), "exclusiveMaximum of a number must be below"),
        (number(minimum=3, maximum=1), "leave no number of six decimals"),
        (number(exclusiveMinimum=0, exclusiveMaximum=0.000001), "leave no number"),
        ({"type": ["null", "number"], "minimum": 1e-9}, "six decimals"),
        (text(pattern="^[a-z]+$", maxLength=3), "maxLength beside pattern"),
        (text(format="email", minLength=1), "minLength beside format"),
        (text(format="date", pattern="^2"), "pattern beside format"),
        ({"allOf": [INTEGER, {"minimum": 5}]}, "allOf with several"),
        ({"allOf": [INTEGER], "minimum": 5}, "minimum beside allOf"),
        ({"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}]}, "properties beside anyOf"),
        ({"type": "object", "anyOf": [{"properties": {}}]}, "type beside anyOf"),
        ({"anyOf": [INTEGER], "oneOf": [INTEGER]}, "oneOf beside anyOf"),
        ({"oneOf": []}, "oneOf is an empty list"),
        ({"$ref": "#/$defs/t", "maxLength": 2, **DEFS}, "maxLength beside \\$ref"),
        ({"$ref": "#tt", **DEFS}, "'#tt' is an anchor"),
        ({"$ref": "http://a/b"}, "leads out of the schema"),
        ({"$dynamicRef": "#/$defs/t", **DEFS}, "\\$dynamicRef is not followed"),
        ({"type": "object", "required": ["q"]}, "required names 'q'"),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, "required names 'b'"),
        ({"type": "integer", "enum": [1, "a"]}, "enum has a value that type"),
        ({"type": "string", "const": 1}, "const has a value that type"),
        ({"type": ["number", "array"], "const": True}, "const has a value that type"),
        ({"type": "array", "const": {}}, "const has a value that type"),
        ({"const": 1, "enum": [2]}, "none of the values of enum"),
        ({"minLength": 2}, "minLength has no effect without type"),
        ({"type": []}, "type is an empty list"),
        (named("é", additionalProperties=True), "additionalProperties is not kept from the property 'é'"),
        (named('a"b', additionalProperties=INTEGER), "not plain ASCII"),
        (named("a\\b", unevaluatedProperties={}), "unevaluatedProperties is not kept from"),
        (named("a", patternProperties={"^x": {}}, additionalProperties={}), "kept from the names of patternPropert"),
        (named("ab", patternProperties={"^x": {}, "^a.*$": text()}), "a pattern for the property 'ab'"),
        (named("a", patternProperties={r"\p{L}": text()}), "a pattern for the property 'a'"),
        (named("a", propertyNames=text(pattern="^a")), "propertyNames beside properties"),
        (named("a", propertyNames=text(pattern="^a"), additionalProperties={}), "propertyNames beside properties"),
        ({"type": "object", "patternProperties": {"^x": {}}, "propertyNames": text()}, "beside patternProperties"),
    ],
)
def test_what_is_not_enforced_is_refused_wherever_it_stands(schema: Any, message: str) -> None:
    wraps = [
        schema,
        {"type": "object", "properties": {"p": schema}},
        {"type": "object", "patternProperties": {"^p$": schema}},
        {"type": "array", "items": schema},
        {"type": "array", "prefixItems": [schema]},
        {"anyOf": [{"type": "null"}, schema]},
        {"type": "object", "additionalProperties": schema},
        {"$ref": "#/else/where", "else": {"where": schema}},
    ]
    for wrapped in wraps:
        with pytest.raises(ValueError, match=message):
            check(wrapped)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "nonsense"},  # xgrammar tells
        number(minimum=0.1, maximum=0.3),
        number(minimum=1, maximum=1),
        number(exclusiveMinimum=0, exclusiveMaximum=0.000002),
        number(minimum=-999999999999999),
        {"type": "integer", "minimum": 10**18},
        {"$ref": "#/$defs/t", "description": "d", "default": "x", **DEFS},
        {"type": "object", "oneOf": [{"type": "object"}, {"$ref": "#/$defs/o"}], "$defs": {"o": {"type": "object"}}},
        {"properties": {"pattern": {"type": "string"}, "$ref": {"type": "null"}, "allOf": {"type": "null"}}},
        {"enum": [{"$ref": "http://a", "pattern": "\n", "type": []}]},
        {"default": {"$ref": "http://a"}, "type": "object"},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": ["boolean", "object", "array", "integer"], "enum": [True, {}, [], 2.0]},
        {"const": "a", "enum": ["a"], "type": "string"},
        text(format="password", maxLength=3),
        text(format="uri", minLength=1, maxLength=2083),
        {"properties": {"next": {"$ref": "#"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        named("é", additionalProperties=False),
        named("a", patternProperties={"^x": INTEGER}),
        named("a b~", additionalProperties=INTEGER, propertyNames=True),
        {"type": "object", "additionalProperties": INTEGER, "propertyNames": text(maxLength=3)},
    ],
)
def test_what_passes(schema: Any) -> None:
    check(schema)


def test_a_schema_may_be_deep() -> None:
    depth = 900
    with pytest.raises(ValueError, match="leads out"):
        check_schema('{"items":' * depth + '{"$ref":"a"}' + "}" * depth)


_ALLOWED = (
    *(
        "^a$",
        ".*",
        r"^\S+\s\W$",
        "^[^a]?$",
        r'^["a]*x$',
        r'^[\s"]+$',
        r"^[\na]{2,3}$",
        r"^(a|[\n ])*$",
        r"^[\s\S]{0,5}$",
    ),
    *(r"^[\x00- ]*$", r"^[!-~]+$", r"^\x41\u00e9\u{1f600}$", r"^[A-z]$", r"^\.\-\/$", r"^[^\n\\]*$", r"^[\w.-]+@x$"),
    *(r"^[^\x20-\x7e]$", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "^é[à-ü]$"),
)
_REFUSED = (
    *('^"$', '^(a|")b$', r"^\"$", r"^\\[a-z]$", "^\n$", "^a\x1f$", r"^\n\t$", r"^\x0a$", r"^\x22$", r"^\u005c$"),
    *(r"^\u{22}$", r"^\0$", r"^\v$", r"^\cJ$", r"^\e$", '^["]$', r"^[\\]a$", r"^[\n]$", r"^[\x00-\x1f]$", r"^[\b]$"),
    *("^[^]$", r'^["\\]*a$', r"^[^\s\S]$", "^[^ !#-[\\]-\uffff]$", r"\ud800", "a\\ud83d\\ude00"),
)


@pytest.mark.parametrize("pattern", _REFUSED)
def test_patterns_of_what_a_json_string_cannot_hold_are_refused(pattern: str) -> None:
    for schema in (text(pattern=pattern), {"type": "object", "patternProperties": {pattern: {}}}):
        with pytest.raises(ValueError, match="pattern has a quotation mark"):
            check(schema)


def test_patterns_that_pass_allow_only_json() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    tokens = [chr(code) for code in range(0x80)]
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo([*tokens, "</s>"], vocab_size=len(tokens) + 1, stop_token_ids=[len(tokens)]),
        max_threads=1,
    )
    bad = [*map(chr, range(0x20)), "\\"]
    for pattern in _ALLOWED:
        schema = text(pattern=pattern)
        check(schema)
        compiled = compiler.compile_json_schema(json.dumps(schema))
        for before in ("", "a", "x", " ", "aa", "A"):
            matcher = xgrammar.GrammarMatcher(compiled)
            if not matcher.accept_string(f'"{before}'):
                continue
            for char in (*bad, '""'):
                assert not xgrammar.GrammarMatcher(compiled).accept_string(f'"{before}{char}'), (
                    pattern,
                    before,
                    char,
                )


def test_schemas_that_pydantic_makes_pass() -> None:
    pydantic = pytest.importorskip("pydantic")
    field = pydantic.Field

    class Color(enum.Enum):
        RED = "red"
        BLUE = "blue"

    class Level(enum.IntEnum):
        LOW = 1
        HIGH = 2

    class Cat(pydantic.BaseModel):
        kind: Literal["cat"]
        lives: int = field(9, ge=0, le=9)

    class Dog(pydantic.BaseModel):
        kind: Literal["dog"]
        weight: Annotated[float, field(gt=0, lt=100.5)]

    class Node(pydantic.BaseModel):
        value: int
        children: list[Node] = []

    class Model(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        name: str = field(min_length=1, max_length=20, description="d", examples=["a"])
        code: str = field(pattern=r"^[A-Z]{2}-\d+$")
        color: Color = Color.RED
        level: Level | None = field(None, description="d")
        pet: Cat | Dog = field(discriminator="kind")
        other: Cat | Dog | None = None
        mixed: Literal["a", 1, None]
        tags: set[str] = field(default_factory=set, max_length=3)
        pair: tuple[int, str]
        names: dict[str, int] = {}
        by_color: dict[Color, list[float]]
        by_code: dict[Annotated[str, field(pattern="^[a-z]+$")], int]
        when: datetime.datetime
        day: datetime.date
        at: datetime.time
        spent: datetime.timedelta
        key: uuid.UUID
        price: decimal.Decimal = field(ge=0, le=1000)
        url: pydantic.HttpUrl
        secret: pydantic.SecretStr = field(min_length=3)
        blob: bytes
        anything: Any = None
        number: float = field(0.5, ge=0.0, le=1.0)
        step: int = field(multiple_of=5)

    class Root(pydantic.RootModel[Cat | Dog]):
        pass

    def function(city: str, days: int = 3, unit: Literal["C", "F"] = "C", where: Cat | None = None) -> None: ...

    names = {"Node": Node, "Cat": Cat}
    Node.model_rebuild(_types_namespace=names)
    parameters = {
        name: (each.annotation, ... if each.default is each.empty else each.default)
        for name, each in inspect.signature(function, eval_str=True, locals=names).parameters.items()
    }
    tool = pydantic.create_model("function", **parameters)
    Model.model_rebuild(_types_namespace={**names, "Dog": Dog, "Color": Color, "Level": Level, "field": field})
    xgrammar = pytest.importorskip("xgrammar")
    for model in (Model, Node, Root, tool):
        source = json.dumps(model.model_json_schema())
        check_schema(source)
        xgrammar.Grammar.from_json_schema(source)
