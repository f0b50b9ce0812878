"""Settings that do not stand on the command line: a YAML file (`--config`) and environment variables. Stateless.

    command line, over SGLANG_<FLAG>, over the file, over the default

Both are read against the kinds of the settings that exist, and a scalar is read as the command line reads it. What a
file has beyond them is refused, because it is a mistake. Variables beyond them are ignored, because others use the
prefix too.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.missing_flags import missing_flag

if TYPE_CHECKING:
    import yaml

PREFIX = "SGLANG_"
# Names the file where `--config` does not.
CONFIG_VARIABLE = PREFIX + "CONFIG"
MAX_FILE_BYTES = 1 << 20
# Tables and lists within each other. Each level takes frames of the stack.
MAX_DEPTH = 32
# Values, tables and lists in all. Parsing them takes a second.
MAX_VALUES = 10_000
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
# Kubernetes sets SGLANG_PORT=tcp://... in pods beside a Service that is named sglang.
_OF_KUBERNETES = ("tcp://", "udp://")
_YAML_TAG = "tag:yaml.org,2002:"

logger = logging.getLogger(__name__)

# Name of a setting -> the type of its value, without None.
Kinds = Mapping[str, type]
# Another name of a setting -> the setting.
Aliases = Mapping[str, str]


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def environment_without_keys() -> dict[str, str]:
    """For child processes, which have no use for the server's keys: storage plugins run in one of them."""
    keys = variable_of("api_key"), variable_of("admin_api_key")
    return {name: value for name, value in os.environ.items() if name not in keys}


def from_environment(
    kinds: Kinds, aliases: Aliases, environ: Mapping[str, str], overridden: Collection[str]
) -> dict[str, Any]:
    """overridden: settings whose variables are not looked at. An empty variable counts as one that is not set. Raises
    ValueError that names the variable."""
    values: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for alias, name in [*((name, name) for name in kinds), *aliases.items()]:
        variable, kind = variable_of(alias), kinds[name]
        text = environ.get(variable, "")
        if not text or name in overridden:
            continue
        if kind in (int, float) and text.startswith(_OF_KUBERNETES):
            logger.warning("%s is ignored: Kubernetes set it to %s, for a Service of that name", variable, text)
            continue
        if name in values:
            raise ValueError(f"{variables[name]} and {variable} set the same flag: keep one of the two")
        values[name], variables[name] = _converted(variable, text, kind), variable
    return values


def from_file(path: str, kinds: Kinds, aliases: Aliases) -> dict[str, Any]:
    """Raises ValueError that names the file and the key."""
    import yaml  # here, so that a start without a file does not read it

    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"--config {path} is over {MAX_FILE_BYTES >> 20} MiB: name a file that holds flags")
    try:
        text = data.decode()
        _check_events(path, yaml.parse(text, Loader=yaml.SafeLoader))
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except _RefusedError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last ones are bad escapes
        raise ValueError(f"--config {path} is no YAML: {' '.join(str(error).split())}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"--config {path} must hold names and values, as in 'port: 30000'")
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key_node, node in root.value:
        key = _text_of(path, key_node)
        name = key.lstrip("-").replace("-", "_")
        name = aliases.get(name, name)
        if name not in kinds:
            missing = missing_flag("--" + name.replace("_", "-"))
            unknown = f"{key!r} is not a flag of this engine{_did_you_mean(name, kinds)}"
            raise ValueError(f"{path}: {missing or unknown}")
        if name in keys:
            both = f"{keys[name]!r} and {key!r} set the same flag" if keys[name] != key else f"{key!r} is there twice"
            raise ValueError(f"{path}: {both}: keep one of the two")
        keys[name] = key
        if node.tag != _YAML_TAG + "null":
            where = f"{path}: {key}"
            values[name] = _converted(where, _text_of_value(where, node, kinds[name]), kinds[name])
    return values


class _RefusedError(ValueError):
    """YAML, but not what a file of flags may have."""


def _check_events(path: str, events: Iterable[yaml.Event]) -> None:
    """Before anything is built: what makes a small file a large value, or a deep one."""
    import yaml

    depth = num_values = 0
    for event in events:
        if isinstance(event, yaml.NodeEvent):
            num_values += 1
            if event.anchor or getattr(event, "tag", None):
                raise _RefusedError(f"--config {path} has an anchor, an alias or a tag: write the values out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _RefusedError(f"--config {path} has more than {MAX_DEPTH} tables or lists within each other")
        if num_values > MAX_VALUES:
            raise _RefusedError(f"--config {path} has more than {MAX_VALUES} values")


def _text_of(where: str, node: yaml.Node) -> str:
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"{where}: a list or a table stands where a name or a value must be")
    return str(node.value)


def _text_of_value(where: str, node: yaml.Node, kind: type) -> str:
    """A value as the flag has it: a scalar's own text, a list's texts with commas between them, a table as JSON."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    if kind is not str:
        raise _no_collection(where, kind)
    if isinstance(node, yaml.SequenceNode):
        return ",".join(_text_of(where, each) for each in node.value)
    for name in _duplicates(node):
        raise ValueError(f"{where}: {name!r} is there twice: keep one of the two")
    try:
        table = yaml.constructor.SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError):
        raise _no_json(where) from None
    return _json(where, table)


def text_of_python_value(where: str, value: Any, kind: type) -> Any:
    """A keyword's value as the flag has it: a mapping as JSON, as in a file. Raises ValueError that begins with
    where."""
    if isinstance(value, Mapping) and kind is str:
        return _json(where, dict(value))
    if isinstance(value, Mapping | list | tuple | set):
        raise _no_collection(where, kind)
    return value


def _json(where: str, table: Any) -> str:
    try:
        return json.dumps(table, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise _no_json(where) from None


def _no_json(where: str) -> ValueError:
    return ValueError(f"{where} holds what JSON does not have, such as a date: put it in quotes")


def _no_collection(where: str, kind: type) -> ValueError:
    return ValueError(f"{where} is a list or a table, but it must be {_NAMES[kind]}")


def _duplicates(node: yaml.Node) -> Iterator[str]:
    """Names that stand twice in a table, or in a table within it."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        yield from (name for name, count in counts.items() if count > 1)
        for _, value in node.value:
            yield from _duplicates(value)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _duplicates(each)


def _did_you_mean(name: str, kinds: Iterable[str]) -> str:
    likely = difflib.get_close_matches(name, kinds, n=1)
    return f": did you mean {likely[0].replace('_', '-')!r}?" if likely else "; --help lists those that are"


def _converted(where: str, text: str, kind: type) -> Any:
    """A text as a setting of this kind, as the command line reads it. A switch has words."""
    try:
        return _WORDS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{where} is {text!r}, but it must be {_NAMES[kind]}") from None
