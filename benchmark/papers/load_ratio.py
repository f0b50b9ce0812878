"""`--hicache-load-ratio`: `auto` (seconds over seconds) against the paper's 100 and against no limit.

All else is as in the row *ours*. Strata's data sets at their peak and at a steady rate, slower and faster links, and
the union's tiers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmark.papers.figures import Result
from benchmark.papers.runs import Outcome, Runs, RunSettings, points
from benchmark.papers.union import BUSY
from benchmark.papers.union_runs import UnionOutcome, UnionSettings

from benchmark.papers import runs as strata_runs
from benchmark.papers import union_runs

RATIOS: dict[str, float | str] = {"auto": "auto", "100": 100.0, "0": 0.0}
# Share of the data sets' contexts and queries; pools are as much smaller.
SHARE = 0.3
STRATA: dict[str, RunSettings] = {
    "LooGLE, 8B": RunSettings("ours", "Llama-3.1-8B"),
    "LooGLE, 14B": RunSettings("ours"),
    "LooGLE, 14B, 2 requests/s": RunSettings("ours", rate=2.0),
    "LooGLE, 70B": RunSettings("ours", "Llama-3.1-70B"),
    "LooGLE, 14B, GH200": RunSettings("ours", machine="gh200"),
    "LooGLE, 14B, link 4 times as fast": RunSettings("ours", bandwidth=4.0),
    "LooGLE, 14B, a quarter of the link": RunSettings("ours", bandwidth=0.25),
    "LooGLE, 14B, a sixteenth of the link": RunSettings("ours", bandwidth=1 / 16),
    "NarrativeQA, 14B": RunSettings("ours", dataset="NarrativeQA"),
    "ReviewMT, 14B": RunSettings("ours", dataset="ReviewMT"),
    "ReviewMT, 14B, 2 requests/s": RunSettings("ours", dataset="ReviewMT", rate=2.0),
}
UNION: dict[str, UnionSettings] = {
    f"union's figure, {tiers}, working set {size:g}": UnionSettings(tiers, size, BUSY, share=SHARE)
    for tiers in ("host", "union")
    for size in (0.5, 1.0)
}


def simulate(settings: RunSettings | UnionSettings) -> Outcome | UnionOutcome:
    if isinstance(settings, UnionSettings):
        return union_runs.simulate(settings)
    return strata_runs.simulate(settings)


def figure(runs: Runs) -> Result:
    cases: dict[str, Any] = {name: replace(s, counts=SHARE) for name, s in STRATA.items()} | UNION
    settings = [replace(s, load_ratio=ratio) for s in cases.values() for ratio in RATIOS.values()]
    outcomes = runs(settings)
    rows = []
    for i, name in enumerate(cases):
        auto, paper, none = outcomes[i * len(RATIOS) : (i + 1) * len(RATIOS)]
        row: dict[str, Any] = {"case": name}
        for ratio, other in (("100", paper), ("0", none)):
            row |= {
                f"mean TTFT over {ratio}": auto.mean_ttft_s / other.mean_ttft_s,
                f"P99 TTFT over {ratio}": auto.p99_ttft_s / other.p99_ttft_s,
                f"requests/s over {ratio}": auto.requests_per_s / other.requests_per_s,
            }
        rows.append(row)
    return Result(
        "papers_load_ratio",
        "the load ratio: auto, 100 and none",
        "simulated",
        [],
        points(settings, outcomes),
        [],
        rows,
        notes="`auto` over the other two. All at once where no rate is named.",
    )
