"""Fill the tables of the documentation from the results in docs/records/results: `python -m benchmark.result_tables`.

A table whose numbers were measured or simulated has a comment above it, which tells where each cell comes from:

    <!-- results: {"file": "strata_fig9", "columns": {"requests/s": "{points[system=<row>].requests/s:.2f}"}} -->
    | | requests/s |
    |---|--:|
    | Strata | 11.14 |

columns: by heading, the template of its cells. rows: by a row's first cell, the templates of its other cells, or one
template for all; they go before columns, and "" leaves a cell to its author. In a template <row> is the row's first
cell, <column> the heading, both without Markdown and commas in numbers, and <number> counts the rows from 0.
{path:format} is a value of the file, formatted
as Python does: names with dots between them, and after a list [field=value & field=value], which picks its one
element with those values, or [number]. {other/path:format} is a value of the file other.json.

Cells without a template stay as they are written: what a paper says, what was predicted, remarks. A test compares
all tables with their files, so that neither changes alone.
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
    for comment in _COMMENT.finditer(text):
        table_end = text.find("\n\n", comment.end())
        table = text[comment.end() : table_end if table_end >= 0 else len(text)]
        where = f"the table below line {text.count(chr(10), 0, comment.end())}"
        try:
            new = _fill(json.loads(comment[1]), table)
        except ValueError as error:
            raise ResultError(f"{where}: {error}") from error
        parts += [text[end : comment.end()], new]
        end = comment.end() + len(table)
    return "".join([*parts, text[end:]])


def _fill(binding: dict[str, Any], table: str) -> str:
    lines = table.split("\n")
    heads = _cells(lines[0])
    columns, rows = binding.get("columns", {}), binding.get("rows", {})
    if missing := columns.keys() - set(map(_plain, heads)):
        raise ResultError(f"there is no column {', '.join(sorted(missing))}; there are {', '.join(heads)}")
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
                cells[j] = _PLACE.sub(lambda place: _shown(binding.get("file", ""), place[1]), text)
        lines[i] = f"| {' | '.join(cells)} |".replace("|  |", "| |")
    return "\n".join(lines)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _plain(cell: str) -> str:
    """Without Markdown, and without commas between a number's thousands."""
    return re.sub(r"(?<=\d),(?=\d{3})", "", cell.replace("*", "").replace("`", ""))


def _shown(file: str, place: str) -> str:
    # What is in brackets may have colons.
    at = place.find(":", place.rfind("]") + 1)
    path, form = (place, "") if at < 0 else (place[:at], place[at + 1 :])
    if (other := re.match(r"([a-z0-9_]+)/(.*)", path)) and (RESULTS / f"{other[1]}.json").exists():
        file, path = other[1], other[2]
    value = lookup(_loaded(file), path)
    try:
        return format(value, form)
    except (TypeError, ValueError) as error:
        raise ResultError(f"{path} is {value!r}, which cannot be shown as {form!r}") from error


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
    found = [row for row in value if all(len(w) == 2 and str(row.get(w[0])) == w[1] for w in wanted)]
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
