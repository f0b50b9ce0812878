"""What a figure's headline becomes when one assumption changes: one at a time, the others as usual.

The assumptions are those of docs/records/simulator.md that no microbenchmark pins, and settings that the paper does
not print.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmark.papers.runs import Runs


@dataclass(frozen=True)
class Headline:
    """A number of a figure. value: from the outcomes of its settings, in order."""

    name: str
    settings: tuple[Any, ...]
    value: Callable[[Sequence[Any]], float]


# (what changes, fields of the settings); these are Strata's.
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as usual", {}),
    ("matrices and attention at 0.5 of the peak", {"efficiency": 0.5}),
    ("matrices and attention at 0.8 of the peak", {"efficiency": 0.8}),
    ("half the link's bandwidth", {"bandwidth": 0.5}),
    ("twice the link's bandwidth", {"bandwidth": 2.0}),
    ("batches of 2,048 tokens", {"batch_tokens": 2048}),
    ("batches of 4,096 tokens", {"batch_tokens": 4096}),
    ("batches of 16,384 tokens", {"batch_tokens": 16384}),
    ("32 requests in flight", {"in_flight": 32}),
    ("256 requests in flight", {"in_flight": 256}),
    ("half the device's capacity", {"device": 0.5}),
    ("twice the device's capacity", {"device": 2.0}),
    ("100 tokens per question", {"question": 100}),
    ("300 tokens per question", {"question": 300}),
)


def sensitivity(
    runs: Runs, headlines: Sequence[Headline], changes: Sequence[tuple[str, dict[str, Any]]] = CHANGES
) -> list[dict[str, Any]]:
    """A row per change, a column per headline."""
    wanted = [replace(s, **change) for _, change in changes for headline in headlines for s in headline.settings]
    runs(wanted)
    rows = []
    for name, change in changes:
        row: dict[str, Any] = {"with": name}
        for headline in headlines:
            row[headline.name] = headline.value(runs([replace(s, **change) for s in headline.settings]))
        rows.append(row)
    return rows
