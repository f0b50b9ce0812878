"""What all registries share: options, and objects that are named by text and imported when they are used.

A registry is one dict in one file, from a name to an entry. An entry holds what flags, `--help`, checks and the
reference need, and names the code behind it as "module:attribute". A new entry is one new file and one line.
Owns nothing.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of a value that a sentence repeats.
_MAX_SHOWN = 80


class OptionError(ValueError):
    """An option is unknown, or has a value that it does not accept."""


@dataclass(frozen=True)
class Kind:
    """The values that an option accepts."""

    # As in "but it has to be WORDS".
    words: str
    # Called with a value from JSON.
    accepts: Callable[[Any], bool]


STRING = Kind("a string", lambda value: isinstance(value, str))
NAME = Kind("a string that is not empty", lambda value: isinstance(value, str) and value != "")
BOOLEAN = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("a JSON object", lambda value: isinstance(value, dict))
WHOLE_NUMBER = Kind("a whole number", lambda value: type(value) is int)
POSITIVE_NUMBER = Kind("a number above 0 and below 1e9", lambda value: is_number(value) and 0 < value < 1e9)


@dataclass(frozen=True)
class Option:
    """One setting of an entry, as a user gives it in JSON."""

    name: str
    kind: Kind
    # What the entry gets where the option is left out. A user may give it too, unless it is None.
    default: Any
    # One sentence, without its full stop.
    help: str
    # What a reader sees as the default, where the value itself does not tell.
    unset: str = ""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def one_of(names: Sequence[str]) -> Kind:
    return Kind("one of " + ", ".join(names), lambda value: isinstance(value, str) and value in names)


def whole_number(least: int, most: int) -> Kind:
    return Kind(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


class EntryError(Exception):
    """What a registry names cannot be loaded; the message names it and the reason."""


def load_object(path: str) -> Any:
    """path: "module:attribute". Raises EntryError."""
    module, colon, attribute = path.partition(":")
    if not colon:
        raise EntryError(f'{path!r} has to be written like "module:attribute"')
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise EntryError(f"{path} cannot be imported: {error}; install what it needs") from error
    except AttributeError as error:
        raise EntryError(f"{path} is not there: {error}") from error


def read_options(options: Sequence[Option], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The value of every option. where: how a sentence that refuses one begins. Raises OptionError."""
    known = [option.name for option in options]
    if unknown := sorted(config.keys() - set(known)):
        raise OptionError(
            f"{where} has no option {', '.join(map(repr, unknown))}; its options are {', '.join(known) or 'none'}"
        )
    return {option.name: read_option(option, config, where) for option in options}


def read_option(option: Option, config: Mapping[str, Any], where: str) -> Any:
    """Raises OptionError."""
    if option.name not in config:
        return option.default
    value = config[option.name]
    is_default = value == option.default and not isinstance(value, bool) and value is not None
    if not option.kind.accepts(value) and not is_default:
        raise OptionError(f"{where}: {option.name} is {shown(value)}, but it has to be {option.kind.words}")
    return value


def shown(value: Any) -> str:
    """A value of JSON in a sentence."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
