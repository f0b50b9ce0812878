"""What the parsers of tool calls take and give. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A chain of references that is longer, or a loop of them, is followed no further.
_MAX_REFERENCES = 16


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    # A JSON schema of an object.
    parameters: Mapping[str, Any]
    # The arguments must keep to the schema.
    strict: bool = False

    def property_schema(self, name: str) -> Any:
        """The schema of one argument; None if the tool has no such argument."""
        properties = self.parameters.get("properties")
        return properties.get(name) if isinstance(properties, Mapping) else None

    def resolved(self, schema: Any) -> Any:
        """What the `$ref` of a schema within the parameters names; the schema itself if it has none. None if there is
        no such schema."""
        for _ in range(_MAX_REFERENCES):
            if not (isinstance(schema, Mapping) and "$ref" in schema):
                return schema
            schema = self._referred(schema["$ref"])
        return None

    def _referred(self, reference: Any) -> Any:
        if not isinstance(reference, str) or reference.partition("/")[0] != "#":
            return None
        found: Any = self.parameters
        for name in reference.split("/")[1:]:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


@dataclass(frozen=True)
class ToolCallItem:
    """A part of a call. The first part of a call has its name, later parts have only text of its arguments.

    tool_index: the call's place in the answer. parameters: text of the JSON object of the arguments. call_id: only
    from formats in which the model names the call before its arguments."""

    tool_index: int
    name: str | None = None
    parameters: str = ""
    call_id: str | None = None


@dataclass(frozen=True)
class StreamingParseResult:
    """What has become known: text that belongs to no call, and parts of calls."""

    normal_text: str = ""
    calls: tuple[ToolCallItem, ...] = ()
