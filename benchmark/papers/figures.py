"""What a reproduced figure is: claims of the paper beside ours, points, panels, headlines; and how it is reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmark.common import OUT, print_table, write_json
from benchmark.papers.plots import Panel, draw
from benchmark.papers.runs import Runs
from benchmark.papers.sensitivity import CHANGES, Headline, sensitivity


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
    are only written, `table` is printed. headlines: what a sensitivity table shows; changes: and under what."""

    name: str
    title: str
    kind: str
    claims: Sequence[Claim]
    points: Sequence[dict[str, Any]]
    panels: Sequence[Panel]
    table: Sequence[dict[str, Any]] = ()
    headlines: Sequence[Headline] = ()
    changes: Sequence[tuple[str, dict[str, Any]]] = field(default=CHANGES)
    notes: str = ""


def report(
    result: Result, runs: Runs, settings: dict[str, Any], with_sensitivity: bool = True
) -> list[dict[str, Any]]:
    """Print the tables, write bench-out/<name>.json and .png; returns the claims as rows."""
    heading = f"{result.kind.capitalize()}: {result.title}"
    claims = [
        {"what": c.what, "paper": c.paper, f"ours ({result.kind})": c.ours, "source": c.source} for c in result.claims
    ]
    print_table(heading, claims)
    if result.table:
        print_table(f"{heading}, points", result.table)
    rows: list[dict[str, Any]] = []
    if result.headlines and with_sensitivity:
        rows = sensitivity(runs, result.headlines, result.changes)
        print_table(f"{heading}, sensitivity", rows)
    if result.notes:
        print(f"\n{result.notes}")
    write_json(
        result.name,
        {**settings, "kind": result.kind, "title": heading, "notes": result.notes},
        [{"claims": [asdict(c) for c in result.claims], "points": list(result.points), "sensitivity": rows}],
    )
    if result.panels:
        draw(OUT / f"{result.name}.png", heading, result.panels)
    return claims
