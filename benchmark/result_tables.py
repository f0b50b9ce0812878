"""Fill the tables of the documentation from the results in docs/records/results: `python -m benchmark.result_tables`.

A table whose numbers were measured or simulated has a comment above it, which tells where each cell comes from:

    <!-- results: {"file": "strata_fig9", "columns": {"requests/s": "{points[system=<row>].requests/s:.2f}"}} -->
    | | requests/s |
    |---|--:|
    | Strata | 11.14 |

columns: by heading, the template of its cells. rows: by a row's first cell, the templates of all its other cells, or
one template for all; they go before columns, and "" leaves a cell to its author. heads: the table's headings, needed
where rows have lists, so that neither can be exchanged alone. In a template <row> is the row's first cell, <column>
the heading, both without Markdown and commas in numbers, and <number> counts the rows from 0: then another column has
a text of the file, so that rows and labels cannot part.
{path:format} is a value of the file, formatted
as Python does: names with dots between them, and after a list [field=value & field=value], which picks its one
element with those values, or [number]. {other/path:format} is a value of the file other.json. none: what a cell has
where one of its values is null.

Cells without a template stay as they are written: what a paper says, what was predicted, remarks. A test compares
all tables with their files, so that neither changes alone. A comment that is nearly one is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "records" / "results"
_COMMENT = re.compile(r"^<!-- results: (\{.*?\}) -->\n", re.MULTILINE | re.DOTALL)
# What an author may have meant as one, in any writing.
_MEANT = re.compile(r"<!-*\s*results?\b", re.IGNORECASE)
_KEYS = {"file", "rows", "columns", "heads", "none"}
_PLACE = re.compile(r"\{([^{}]+)\}")


class ResultError(ValueError):
    """A table names what its file does not have; the message tells where."""


def pages() -> list[Path]:
    """All that may have such tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page with the cells as their files have them. Raises ResultError."""
    parts: list[str] = []
    end = 0
    known = {comment.start() for comment in _COMMENT.finditer(text)}
    for meant in _MEANT.finditer(text):
        if meant.start() not in known:
            line = text.count("\n", 0, meant.start()) + 1
            raise ResultError(f"line {line}: a comment of results is <!-- results: {{...}} --> alone on its lines")
    for comment in _COMMENT.finditer(text):
        table_end = text.find("\n\n", comment.end())
        table = text[comment.end() : table_end if table_end >= 0 else len(text)].rstrip("\n")
        where = f"the table below line {text.count(chr(10), 0, comment.end())}"
        try:
            new = _fill(json.loads(comment[1]), table)
        except (ValueError, LookupError) as error:
            raise ResultError(f"{where}: {error}") from error
        parts += [text[end : comment.end()], new]
        end = comment.end() + len(table)
    return "".join([*parts, text[end:]])


def _fill(binding: dict[str, Any], table: str) -> str:
    lines = table.split("\n")
    if unknown := binding.keys() - _KEYS:
        raise ResultError(f"{', '.join(sorted(unknown))} is none of {', '.join(sorted(_KEYS))}")
    if len(lines) < 3 or not all(line.startswith("|") for line in lines) or set(lines[1]) - set("|-: "):
        raise ResultError("the table has to follow in the next line, and an empty line has to follow it")
    heads = _cells(lines[0])
    columns, rows = binding.get("columns", {}), binding.get("rows", {})
    num_filled, has_text = 0, False
    if missing := columns.keys() - set(map(_plain, heads)):
        raise ResultError(f"there is no column {', '.join(sorted(missing))}; there are {', '.join(heads)}")
    if any(isinstance(row, list) for row in rows.values()) and binding.get("heads") != heads:
        raise ResultError(f"heads must be {json.dumps(heads, ensure_ascii=False)}, the headings of the table")
    for name, row in rows.items():
        if isinstance(row, list) and len(row) != len(heads) - 1:
            raise ResultError(f"row {name} has {len(row)} templates for {len(heads) - 1} cells")
    labels = {_plain(_cells(line)[0]) for line in lines[2:] if line.startswith("|")}
    if missing := rows.keys() - labels:
        raise ResultError(f"there is no row {', '.join(sorted(missing))}")
    for i, line in enumerate(lines[2:], 2):
        if not line.startswith("|"):
            continue
        cells = _cells(line)
        label = _plain(cells[0])
        mine = rows.get(label)
        for j, head in enumerate(map(_plain, heads)):
            template = columns.get(head, "")
            if j and mine is not None:
                template = mine if isinstance(mine, str) else mine[j - 1] if j - 1 < len(mine) else ""
            if template:
                text = template.replace("<row>", label).replace("<column>", head).replace("<number>", str(i - 2))
                places = _PLACE.findall(text)
                values = [_value(binding.get("file", ""), place) for place in places]
                if not places:
                    raise ResultError(f"the template {text!r} has no value of a file")
                num_filled += len(places)
                has_text |= any(isinstance(value, str) for value, _ in values)
                if "none" in binding and any(value is None for value, _ in values):
                    cells[j] = binding["none"]
                else:
                    shown = iter([_shown(*each, place) for each, place in zip(values, places, strict=True)])
                    cells[j] = _PLACE.sub(lambda _, shown=shown: next(shown), text)  # type: ignore[misc]
        lines[i] = f"| {' | '.join(cells)} |".replace("|  |", "| |")
    if not num_filled:
        raise ResultError("no cell has a value of a file")
    if "<number>" in str(columns) and not has_text:
        raise ResultError("<number> needs a column with a text of the file, which tells the rows apart")
    return "\n".join(lines)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _plain(cell: str) -> str:
    """Without Markdown, and without commas between a number's thousands."""
    return re.sub(r"(?<=\d),(?=\d{3})", "", cell.replace("*", "").replace("`", ""))


def _value(file: str, place: str) -> tuple[Any, str]:
    """What a place of a template names, and the format that it asks for."""
    # Names, and what is in brackets, may have colons, with a space behind them.
    found = re.search(r":([^:\s\]]*)$", place)
    path, form = (place[: found.start()], found[1]) if found else (place, "")
    if (other := re.match(r"([a-z0-9_]+)/(.*)", path)) and (RESULTS / f"{other[1]}.json").exists():
        file, path = other[1], other[2]
    return lookup(_loaded(file), path), form


def _shown(value: Any, form: str, place: str) -> str:
    try:
        return format(value, form)
    except (TypeError, ValueError) as error:
        raise ResultError(f"{place} is {value!r}, which cannot be shown as {form!r}") from error


@cache
def _loaded(file: str) -> Any:
    path = RESULTS / f"{file}.json"
    if not path.exists():
        raise ResultError(f"there is no {path.name} in {RESULTS.relative_to(ROOT)}")
    return json.loads(path.read_text())


def lookup(value: Any, path: str) -> Any:
    """What a path of a template names. Raises ResultError."""
    for name, pick in _steps(path):
        if name:
            if not isinstance(value, dict) or name not in value:
                has = ", ".join(map(repr, value)) if isinstance(value, dict) else f"{value!r:.60}"
                raise ResultError(f"{path}: there is no {name!r} in {has}")
            value = value[name]
        if pick is not None:
            value = _picked(value, pick, path)
    return value


def _steps(path: str) -> Iterator[tuple[str, str | None]]:
    """(name, what is in brackets behind it). A dot inside of brackets, or beside a digit, belongs to a name."""
    for step in re.finditer(r"((?:[^.\[\]]|(?<=\d)\.(?=\d))*)(?:\[([^\]]*)\])?(?:\.(?!$)|$)", path):
        if step[0]:
            yield step[1], step[2]


def _picked(value: Any, pick: str, path: str) -> Any:
    if not isinstance(value, list):
        raise ResultError(f"{path}: what [{pick}] picks from is no list")
    if pick.lstrip("-").isdigit():
        return value[int(pick)]
    wanted = [part.split("=", 1) for part in pick.split(" & ")]
    found = [row for row in value if all(len(w) == 2 and _plain(str(row.get(w[0]))) == _plain(w[1]) for w in wanted)]
    if len(found) != 1:
        raise ResultError(f"{path}: {len(found)} elements have {pick}, and it has to be one")
    return found[0]


def stale(paths: Sequence[Path]) -> list[Path]:
    """The pages whose tables differ from their results. Raises ResultError."""
    return [path for path in paths if filled(text := path.read_text()) != text]


def main() -> None:
    for path in stale(pages()):
        path.write_text(filled(path.read_text()))
        print(f"{path.relative_to(ROOT)}: filled anew")


if __name__ == "__main__":
    main()
