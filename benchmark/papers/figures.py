"""What a reproduced figure is: claims of the paper beside ours, points, panels, headlines; and how it is reported.

Owns the files bench-out/papers_*.json and .png, and the records of them in docs/records/results/.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from benchmark.common import OUT, print_table, write_json
from benchmark.papers.plots import Panel, draw
from benchmark.papers.runs import Runs
from benchmark.papers.sensitivity import CHANGES, SEEDS, Fragile, Headline, over_seeds, ranges, sensitivity

RECORDS = Path(__file__).resolve().parents[2] / "docs" / "records" / "results"
# Of a number in a record.
DIGITS = 4


@dataclass(frozen=True)
class Claim:
    """paper: the number or the words that it prints. ours: the same, from the simulator. source: section, and the
    words if few."""

    what: str
    paper: str
    ours: float | str
    source: str


@dataclass(frozen=True)
class Result:
    """kind: `simulated`, `cost model` (no engine runs) or `measured`. points: rows behind the figure; those of runs
    are only written, `table` is printed. headlines: shown over three seeds, and in a sensitivity table under
    `changes`. fragile: assumptions shown as ranges."""

    name: str
    title: str
    kind: str
    claims: Sequence[Claim]
    points: Sequence[dict[str, Any]]
    panels: Sequence[Panel]
    table: Sequence[dict[str, Any]] = ()
    headlines: Sequence[Headline] = ()
    changes: Sequence[tuple[str, dict[str, Any]]] = field(default=CHANGES)
    fragile: Sequence[Fragile] = ()
    notes: str = ""

    def with_only(self, words: str) -> Result:
        """With those of its headlines, also in ranges, whose names have these words."""
        fragile = [replace(f, headlines=tuple(h for h in f.headlines if words in h.name)) for f in self.fragile]
        return replace(self, headlines=[h for h in self.headlines if words in h.name], fragile=fragile)


def report(
    result: Result, runs: Runs, settings: dict[str, Any], with_sensitivity: bool = True, with_record: bool = False
) -> list[dict[str, Any]]:
    """Print the tables, write bench-out/<name>.json and .png; returns the claims as rows. with_record: also write
    what the tables have to docs/records/results/<name>.json."""
    heading = f"{result.kind.capitalize()}: {result.title}"
    claims = [
        {"what": c.what, "paper": c.paper, f"ours ({result.kind})": c.ours, "source": c.source} for c in result.claims
    ]
    tables = {
        "headlines": over_seeds(runs, result.headlines),
        "fragile": ranges(runs, result.fragile),
        "sensitivity": sensitivity(runs, result.headlines, result.changes) if with_sensitivity else [],
    }
    print_table(heading, claims)
    print_table(f"{heading}, points", result.table)
    for name, rows in tables.items():
        print_table(f"{heading}, {name}", [{k: v for k, v in row.items() if k != "by seed"} for row in rows])
    if result.notes:
        print(f"\n{result.notes}")
    everything = {"claims": [asdict(c) for c in result.claims], "table": list(result.table), **tables}
    shown = {"kind": result.kind, "title": heading, "notes": result.notes}
    write_json(result.name, settings | shown, [everything | {"points": list(result.points)}])
    if with_record:
        record(result.name, {k: v for k, v in settings.items() if k != "systems"} | shown, everything)
    if result.panels:
        draw(OUT / f"{result.name}.png", heading, result.panels)
    return claims


def record(name: str, settings: dict[str, Any], everything: dict[str, list[dict[str, Any]]]) -> None:
    """Write docs/records/results/<name>.json, with when and of which commit. Of a run with --only, whose words are in
    settings, headlines, ranges and runs replace their namesakes in the file, and what it has besides stays."""
    file = RECORDS / f"{name}.json"
    made = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": _commit(),
        "only": settings["only"],
        "seeds": list(SEEDS),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    runs = [made]
    rows = _rounded(everything)
    if settings["only"] and file.exists():
        before = json.loads(file.read_text())
        runs = [*before.get("runs", []), made]
        of_headlines = ("headlines", "fragile", "table")
        for each, new in rows.items():
            old = before.get(each, [])
            rows[each] = _replaced(old, new) if each in of_headlines else new or old
    settings = {key: value for key, value in settings.items() if key != "only"}
    RECORDS.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": name, "runs": runs, "settings": settings, **rows}
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _replaced(rows: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows are namesakes if all their texts are the same. Where texts do not tell rows apart, they are the table of
    whole curves, which replaces the old one."""

    def name(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple((key, value) for key, value in row.items() if isinstance(value, str | bool))

    of_name = {name(row): row for row in new}
    if len(of_name) < len(new):
        return new
    kept = [of_name.pop(name(row), row) for row in rows]
    return [*kept, *of_name.values()]


def _commit() -> str:
    """With a + behind it where files differ, other than records."""
    root = RECORDS.parents[2]

    def git(*args: str) -> str | None:
        done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("+" if git("status", "--porcelain", "--", ".", f":!{RECORDS.relative_to(root)}") else "")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
