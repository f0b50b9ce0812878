"""The fields that give an answer a form, of OpenAI's API, of SGLang's and of vLLM's, as one grammar. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sglang.srt.entrypoints.request_fields import shown
from sglang.srt.utils.errors import RequestError

# What {"type": "json_object"} asks for.
ANY_OBJECT = {"type": "object", "additionalProperties": True}
# Field -> the kind of grammar that its value is.
_KINDS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
}


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`. At most one of the first six."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    # It changes nothing here.
    disable_fallback: bool | None = None
    # Refused where they ask for something.
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def grammars(self) -> dict[str, tuple[str, Any]]:
        """Key -> a kind of grammar and its source. Raises RequestError."""
        for key in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, key):
                raise RequestError(
                    f"structured_outputs.{key} is not supported by this engine yet: leave it out",
                    param="structured_outputs",
                )
        kinds = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}
        found = {key: (kind, getattr(self, key)) for key, kind in kinds.items() if getattr(self, key) is not None}
        if self.choice is not None:
            found["choice"] = "ebnf", _alternatives(self.choice, "structured_outputs")
        if self.json_object:
            found["json_object"] = "json_schema", ANY_OBJECT
        return found


class GrammarFields(msgspec.Struct, frozen=True, kw_only=True):
    """At most one of them. guided_*: vLLM's names before it had `structured_outputs`."""

    response_format: dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def grammar(self) -> dict[str, Any]:
        """As a field of `SamplingFields`; empty: the answer is free. Raises RequestError that names the fields."""
        return dict(self._grammars().values())

    def named(self, error: RequestError) -> RequestError:
        """An error about a kind of grammar, with the field that the client sent in the kind's place."""
        for name, (kind, _) in self._grammars().items():
            if error.param == kind != name:
                rest = error.message.removeprefix(kind)
                message = name + rest if rest != error.message else f"{name}: {error.message}"
                return RequestError(message, error.status_code, name.partition(".")[0], error.retry_after_s)
        return error

    def _grammars(self) -> dict[str, tuple[str, Any]]:
        """Field -> a kind of grammar and its source: one at most."""
        found = {
            name: (kind, getattr(self, name)) for name, kind in _KINDS.items() if getattr(self, name) is not None
        }
        if (form := _response_format(self.response_format or {})) is not None:
            found = {"response_format": form, **found}
        if self.guided_choice is not None:
            found["guided_choice"] = "ebnf", _alternatives(self.guided_choice, "guided_choice")
        if self.structured_outputs is not None:
            grammars = self.structured_outputs.grammars()
            found |= {f"structured_outputs.{key}": grammar for key, grammar in grammars.items()}
        if len(found) > 1:
            raise RequestError(
                f"{' and '.join(found)} exclude each other: give one of them",
                param=next(iter(found)).partition(".")[0],
            )
        return found


def _alternatives(texts: Sequence[str], name: str) -> str:
    """EBNF of an answer that is one of the texts. xgrammar reads JSON's escapes, but for that of a NUL."""
    if not texts or any("\0" in text for text in texts):
        raise RequestError(f"{name} must have at least one text to choose, and none with a NUL", param=name)
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))


def _response_format(given: Mapping[str, Any]) -> tuple[str, Any] | None:
    """A kind of grammar and its source; None: the answer is free."""
    kind = given.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        # Some servers' clients give it a schema, too.
        return "json_schema", given["schema"] if isinstance(given.get("schema"), dict) else ANY_OBJECT
    if kind == "json_schema":
        # Some clients put the schema beside the type, as the Responses API has it.
        wrapped = given.get("json_schema") or given
        schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
        if not isinstance(schema, dict | bool):
            raise RequestError(
                'response_format of type json_schema must be {"type": "json_schema", "json_schema": '
                '{"name": …, "schema": {…}}}',
                param="response_format",
            )
        return "json_schema", schema
    if kind == "structural_tag":
        return "structural_tag", given
    raise RequestError(
        f"response_format has the type {shown(str(kind))}, but it must be text, json_object, json_schema or "
        "structural_tag",
        param="response_format",
    )
