"""How far a figure's headlines can be trusted: over three seeds, and when one assumption changes.

The assumptions are those of docs/records/simulator.md that no microbenchmark pins, and settings that the paper does
not print. Those on which a headline hangs most are ranges with three values each (`Fragile`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from benchmark.papers.runs import Runs


@dataclass(frozen=True)
class Headline:
    """A number of a figure. value: from the outcomes of its settings, in order."""

    name: str
    settings: tuple[Any, ...]
    value: Callable[[Sequence[Any]], float]
    # Whether a sensitivity table shows it. Seeds are run for every headline.
    is_varied: bool = True
    # Whether it needs a run at each rate, and so takes long.
    is_of_curves: bool = False

    def under(self, runs: Runs, **change: Any) -> float:
        """With these fields of all its settings changed."""
        return self.value(runs([replace(s, **change) for s in self.settings]))


@dataclass(frozen=True)
class Setting:
    """One value of an assumption: in words, and as fields of the settings."""

    words: str
    change: dict[str, Any]


@dataclass(frozen=True)
class Fragile:
    """An assumption that no source pins, its range, and the headlines that hang on it."""

    assumption: str
    headlines: tuple[Headline, ...]
    low: Setting
    usual: Setting
    high: Setting


# Of the workloads.
SEEDS = (1, 2, 3)


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
    """A row per change, a column per headline that is varied; empty if none is."""
    varied = [headline for headline in headlines if headline.is_varied]
    if not varied:
        return []
    runs([replace(s, **change) for _, change in changes for headline in varied for s in headline.settings])
    return [
        {"with": name} | {headline.name: headline.under(runs, **change) for headline in varied}
        for name, change in changes
    ]


def over_seeds(runs: Runs, headlines: Sequence[Headline], seeds: Sequence[int] = SEEDS) -> list[dict[str, Any]]:
    """A row per headline: mean, lowest and highest over the seeds of its workloads. A headline without a workload is
    the same under every seed, and has one."""
    runs([replace(s, seed=seed) for seed in seeds for h in headlines if _has_seeds(h) for s in h.settings])
    rows = []
    for headline in headlines:
        found = (
            [headline.under(runs, seed=seed) for seed in seeds] if _has_seeds(headline) else [headline.under(runs)]
        )
        row = {"headline": headline.name, "mean": float(np.mean(found)), "lowest": min(found), "highest": max(found)}
        rows.append(row | {"by seed": found})
    return rows


def _has_seeds(headline: Headline) -> bool:
    return all(hasattr(s, "seed") for s in headline.settings)


def ranges(runs: Runs, fragile: Sequence[Fragile]) -> list[dict[str, Any]]:
    """A row per assumption and headline: the headline with the low, the usual and the high value."""
    rows = []
    for each in fragile:
        settings = {"low": each.low, "usual": each.usual, "high": each.high}
        for headline in each.headlines:
            row: dict[str, Any] = {"assumption": each.assumption, "headline": headline.name}
            for end, setting in settings.items():
                row |= {end: setting.words, f"at {end}": headline.under(runs, **setting.change)}
            rows.append(row)
    return rows
