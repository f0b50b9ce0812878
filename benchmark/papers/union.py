"""The union's figure: the three papers' tiers together against each of them alone and each pair, working set by
working set. No paper has it; docs/records/papers.md has what was predicted.

TTFTs are compared at a rate that recomputing everything permits, and tokens per second at one that it does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.papers.figures import Claim, Result
from benchmark.papers.plots import Panel
from benchmark.papers.runs import Runs, points
from benchmark.papers.sensitivity import Headline
from benchmark.papers.union_runs import MODEL, TIERS, UnionOutcome, UnionSettings

# Over the sum of device, peers and host.
WORKING_SETS = (0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
QUICK_SETS = (1.0, 2.0)
# Requests per second: recomputing every conversation keeps the device about as busy as it can be at the first.
LIGHT, BUSY = 0.1, 1.0
RATES = (LIGHT, BUSY)
# By how much a row may be behind another one before the table names it.
MARGIN = 0.05
PARTS = tuple(tiers for tiers in TIERS.values() if tiers.is_part_of(TIERS["union"]) and tiers.name != "union")
Found = Mapping[tuple[str, float, float], UnionOutcome]


def cases(sizes: Sequence[float]) -> list[UnionSettings]:
    return [UnionSettings(name, size, rate) for rate in RATES for size in sizes for name in TIERS]


def best_part(found: Found, size: float, rate: float) -> str:
    """The part of the union with the least mean TTFT."""
    return min((tiers.name for tiers in PARTS), key=lambda name: found[name, size, rate].mean_ttft_s)


def figure(runs: Runs, sizes: Sequence[float] = WORKING_SETS) -> Result:
    settings = cases(sizes)
    outcomes = runs(settings)
    found = {(s.tiers, s.working_set, s.rate): o for s, o in zip(settings, outcomes, strict=True)}
    rows = [_row(s, o) for s, o in zip(settings, outcomes, strict=True)]
    return Result(
        "papers_union",
        f"the union of the tiers, {MODEL} on H20",
        "simulated",
        [claim for rate in RATES for size in sizes for claim in _claims(found, size, rate)],
        points(settings, outcomes),
        _panels(found, sizes),
        rows,
        HEADLINES,
        CHANGES,
        notes="Hits: percent of prompt tokens. Bound: the sum of the row's tiers over the working set, at most 100; "
        "the remote tier has no limit. Every conversation is equally probable to come next.",
    )


def _row(settings: UnionSettings, outcome: UnionOutcome) -> dict[str, Any]:
    return {
        "requests/s": settings.rate,
        "working set": settings.working_set,
        "tiers": settings.tiers,
        "device / peer / host / remote hits %": " / ".join(f"{100 * r:.0f}" for r in outcome.hit_rates.values()),
        "hits %": 100 * outcome.hit_rate,
        "bound %": 100 * outcome.bound,
        "mean TTFT s": outcome.mean_ttft_s,
        "p99 TTFT s": outcome.p99_ttft_s,
        "tokens/s": outcome.output_tokens_per_s,
    }


def _claims(found: Found, size: float, rate: float) -> list[Claim]:
    union, name = found["union", size, rate], best_part(found, size, rate)
    part = found[name, size, rate]
    where = f"{rate:g} requests/s, working set {size:g}"
    ratio = union.mean_ttft_s / part.mean_ttft_s
    return [
        Claim(f"{where}: mean TTFT over that of the best part", f"at most {1 + MARGIN:g}", ratio, f"best: {name}"),
        Claim(f"{where}: P99", f"at most {1 + MARGIN:g}", union.p99_ttft_s / part.p99_ttft_s, f"best: {name}"),
    ]


def _panels(found: Found, sizes: Sequence[float]) -> list[Panel]:
    def series(rate: float, value: str) -> dict[str, tuple[Sequence[float | str], Sequence[float]]]:
        return {name: (sizes, [getattr(found[name, x, rate], value) for x in sizes]) for name in TIERS}

    x_label = "working set / (device + peers + host)"
    lines = [
        Panel(f"{rate:g} requests/s", x_label, y_label, series(rate, value), log_x=True, log_y=log_y)
        for rate, value, y_label, log_y in (
            (LIGHT, "hit_rate", "share of prompt tokens found", False),
            (LIGHT, "mean_ttft_s", "mean TTFT, s", True),
            (LIGHT, "p99_ttft_s", "P99 TTFT, s", True),
            (BUSY, "mean_ttft_s", "mean TTFT, s", True),
            (BUSY, "p99_ttft_s", "P99 TTFT, s", True),
            (BUSY, "output_tokens_per_s", "output tokens/s", False),
        )
    ]
    names = [f"{size:g}" for size in sizes]
    tiers = found["union", sizes[0], LIGHT].hit_rates
    by_tier = {
        f"{tier} hits": (names, [100 * found["union", x, LIGHT].hit_rates[tier] for x in sizes]) for tier in tiers
    }
    lines.append(Panel("the union's hits by tier", x_label, "% of prompt tokens", by_tier, kind="bars"))
    return lines


def _usual(tiers: str) -> UnionSettings:
    return UnionSettings(tiers, 1.0, LIGHT)


def _ratio(outcomes: Sequence[UnionOutcome]) -> float:
    """The first one's mean TTFT over the least of the others'."""
    return outcomes[0].mean_ttft_s / min(o.mean_ttft_s for o in outcomes[1:])


def _p99_ratio(outcomes: Sequence[UnionOutcome]) -> float:
    return outcomes[0].p99_ttft_s / outcomes[1].p99_ttft_s


def _largest(tiers: str) -> UnionSettings:
    return UnionSettings(tiers, WORKING_SETS[-1], BUSY)


HEADLINES = (
    Headline(
        "P99 over that of host+remote, largest set, busy",
        (_largest("union"), _largest("host+remote")),
        _p99_ratio,
        is_varied=False,
    ),
    Headline("mean TTFT over the best part's", (_usual("union"), *(_usual(t.name) for t in PARTS)), _ratio),
    Headline("union, mean TTFT s", (_usual("union"),), lambda o: o[0].mean_ttft_s),
    Headline("union, hits %", (_usual("union"),), lambda o: 100 * o[0].hit_rate),
)
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as usual", {}),
    ("load ratio 100", {"load_ratio": 100.0}),
    ("no balanced batches", {"load_ratio": 0.0}),
    ("write-through", {"write_policy": "write_through"}),
    ("write-back", {"write_policy": "write_back"}),
    ("another seed", {"seed": 2}),
    ("yet another", {"seed": 3}),
)
