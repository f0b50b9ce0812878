"""`UpstreamNames`: the names of one version of upstream that clients, plugins and scripts depend on. Data only.

Read from a wheel, a folder or a JSON file. A JSON file is what `as_json` wrote, or one entry of a file that holds
several versions, named as in FILE.json:0.5.23.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang.rebase.reader import Sources, UnreadableError, read_sources

# The version that the tables of this engine stand on.
RECORDED = Path(__file__).with_name("upstream.json")


@dataclass(frozen=True)
class FlagFacts:
    # As it is written in the source; "" where it is None.
    default: str = ""
    # None where any value is taken, or where they are computed when upstream starts.
    choices: list[str] | None = None
    # The flag that this is another name of.
    alias_of: str | None = None


@dataclass(frozen=True)
class UpstreamNames:
    version: str
    flags: dict[str, FlagFacts] = field(default_factory=dict)
    # Path -> methods.
    endpoints: dict[str, list[str]] = field(default_factory=dict)
    # Class of a request -> its fields.
    fields: dict[str, list[str]] = field(default_factory=dict)
    # With the prefix, as they are exposed.
    metrics: list[str] = field(default_factory=list)
    # Class of an interface -> member -> a method's parameters, a constant's value; "" for a field.
    members: dict[str, dict[str, str]] = field(default_factory=dict)
    # Python files, relative to the package; of the recorded version, those that this engine has too.
    files: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        """One table to a line: one name to a line would be thousands."""
        lines = []
        for name, value in asdict(self).items():
            if name == "flags":
                value = {flag: {k: v for k, v in facts.items() if v} for flag, facts in value.items()}
            lines.append(f'"{name}": {json.dumps(value, separators=(",", ":"))}')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def load_names(source: str) -> UpstreamNames:
    """source: a wheel, the folder that it was unpacked to, or JSON. Raises UnreadableError with a sentence."""
    name, _, version = source.partition(".json:")
    path = Path(f"{name}.json" if version else name)
    if not path.exists():
        raise UnreadableError(f"{path} is not there: give a wheel, the folder of one, or a JSON file of names")
    if path.suffix == ".json":
        return _from_json(path, version)
    return UpstreamNames(**_with_facts(read_sources(_open(path))))


def _open(path: Path) -> Sources:
    if path.is_dir():
        folder = path / "sglang" if (path / "sglang").is_dir() else path
        files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.py")}
        version = next((each.name.split("-")[1] for each in path.glob("sglang-*.dist-info")), path.name)
        return Sources(version, sorted(files), _text_of(lambda name: files[name].read_bytes()))
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise UnreadableError(f"{path} is no wheel: it is not a zip archive") from None
    names = sorted(name for name in archive.namelist() if name.startswith("sglang/") and name.endswith(".py"))
    version = (path.name.split("-") + [path.name])[1]
    files_in = [name.removeprefix("sglang/") for name in names]
    return Sources(version, files_in, _text_of(lambda name: archive.read(f"sglang/{name}")))


def _text_of(read: Callable[[str], bytes]) -> Callable[[str], str]:
    return lambda name: read(name).decode(errors="replace")


def _from_json(path: Path, version: str) -> UpstreamNames:
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise UnreadableError(f"{path} is no JSON: {error}") from None
    no_names = UnreadableError(f"{path} is no file of names: give one that --names has printed")
    if not isinstance(values, dict):
        raise no_names
    if version and version not in values:
        raise UnreadableError(f"{path} has no version {version}; it has {', '.join(values)}")
    try:
        if version:
            return UpstreamNames(**_with_facts({"version": version, **_adapted(values[version])}))
        if "version" in values:
            return UpstreamNames(**_with_facts(values))
    except (AttributeError, KeyError, TypeError):
        raise no_names from None
    if not any(isinstance(each, dict) and "flags" in each for each in values.values()):
        raise no_names
    raise UnreadableError(f"{path} holds several versions: name one, as in {path}:0.5.23")


def _adapted(values: dict[str, Any]) -> dict[str, Any]:
    """Lists of plain names, as another tool may have written them: nothing is known of defaults and methods."""
    return {
        "flags": {flag: {} for flag in values.get("flags", ())},
        "endpoints": {path: [] for path in values.get("endpoints", ())},
        "fields": {
            kind: [name for name in names if not name.startswith("_")]
            for kind, names in values.get("request_fields", {}).items()
        },
        "metrics": list(values.get("metrics", ())),
        "members": values.get("storage", {}),
        "files": list(values.get("files", ())),
    }


def _with_facts(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "flags": {flag: FlagFacts(**facts) for flag, facts in values["flags"].items()}}


def parameters_of(signature: str) -> Iterator[str]:
    """The names of a method's parameters, from its text; of a field or a constant none."""
    if signature.startswith("("):
        for part in signature[1 : signature.rindex(")")].split(","):
            name = part.split(":")[0].split("=")[0].strip()
            if name.isidentifier():
                yield name
