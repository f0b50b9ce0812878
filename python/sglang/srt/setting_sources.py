"""Settings that do not stand on the command line: a YAML file (`--config`) and environment variables. Stateless.

    command line, over SGLANG_<FLAG>, over the file, over the default

Both are read against the kinds of the settings that exist. What a file has beyond them is refused, because it is a
mistake. Variables beyond them are ignored, because others use the prefix too.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

PREFIX = "SGLANG_"
# Names the file where `--config` does not.
CONFIG_VARIABLE = PREFIX + "CONFIG"
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

# Name of a setting -> the type of its value, without None.
Kinds = Mapping[str, type]


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def from_environment(kinds: Kinds, environ: Mapping[str, str]) -> dict[str, Any]:
    """Raises ValueError that names the variable. An empty variable counts as one that is not set."""
    given = {name: environ[variable_of(name)] for name in kinds if environ.get(variable_of(name), "") != ""}
    return {name: _converted(variable_of(name), value, kinds[name]) for name, value in given.items()}


def from_file(path: str, kinds: Kinds, aliases: Mapping[str, str]) -> dict[str, Any]:
    """aliases: another name of a setting -> the setting. Raises ValueError that names the file and the key."""
    import yaml  # here, so that a start without a file does not read it

    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is no YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"--config {path} must hold names and values, as in 'port: 30000'")
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).lstrip("-").replace("-", "_")
        name = aliases.get(name, name)
        if name not in kinds:
            raise ValueError(f"{path}: {key!r} is not a flag of this engine{_did_you_mean(name, kinds)}")
        if name in values:
            raise ValueError(f"{path}: {key!r} sets {name} for the second time: keep one of the two")
        if value is not None:
            values[name] = _converted(f"{path}: {key}", value, kinds[name])
    return values


def _did_you_mean(name: str, kinds: Iterable[str]) -> str:
    likely = difflib.get_close_matches(name, kinds, n=1)
    return f": did you mean {likely[0].replace('_', '-')!r}?" if likely else "; --help lists those that are"


def _converted(where: str, value: Any, kind: type) -> Any:
    """A text of the environment, or what YAML made of it, as a setting of this kind. A list of texts is joined by
    commas, and a table becomes JSON, as the flags have them."""
    if kind is str and isinstance(value, dict):
        return json.dumps(value)
    if kind is str and isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        return ",".join(str(each) for each in value)
    if kind is bool and isinstance(value, str):
        value = _WORDS.get(value.lower(), value)
    try:
        if isinstance(value, dict | list) or isinstance(value, bool) != (kind is bool):
            raise ValueError
        if kind is int and isinstance(value, float) and value != int(value):
            raise ValueError
        return kind(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{where} is {value!r}, but it must be {_NAMES[kind]}") from None
