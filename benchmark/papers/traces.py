"""Whole traces, system by system: where the mechanisms help, where they do not, and how far each is from a device
that keeps everything. No paper has it; docs/records/papers.md has what was predicted.

What the trace itself bounds stands beside the hits: stack distances (`sglang.cli.reuse`) give what a cache of any
size that evicts the least recently used blocks can find.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.papers.figures import Claim, Result
from benchmark.papers.plots import Panel
from benchmark.papers.runs import Outcome, Runs, points
from benchmark.papers.traces_runs import (
    MODEL,
    TRACES,
    UNLIMITED,
    TraceSettings,
    capacities,
    system_of,
    trace_name,
    workload_of,
)

from sglang.cli.reference_sources import read_trace
from sglang.cli.reuse import HitCurve
from sglang.cli.server import CommandError

# Beside the checkout. The files are not in the repository.
FOLDER = Path(__file__).parents[2] / ".." / "shared" / "traces"
SYSTEM_NAMES = ("no hierarchy", "SGLang-HiCache", "vLLM-LMCache", "Strata", "ours", "oracle", UNLIMITED)
QUICK = {"share": 0.02}
# A difference of mean times below it is none: an exchange of two requests moves as much.
MARGIN = 0.03


def paths_of(trace: str, folder: Path) -> list[Path]:
    """The files that --trace names. Those that are not there are told, and left out."""
    if trace != "all":
        wanted = [Path(trace)]
    else:
        wanted = [folder / f"{name}.jsonl.gz" for name in TRACES]
    for path in wanted:
        if not path.is_file():
            print(f"There is no trace {path}; it is skipped: --trace takes a file, --trace-folder the folder of all.")
    return [path for path in wanted if path.is_file()]


def figure(runs: Runs, path: Path, systems: Sequence[str] = SYSTEM_NAMES, first: int | None = None) -> Result:
    """first: requests or sessions; None: the whole trace."""
    """Raises CommandError, before anything is run, where the file is no trace."""
    settings = [TraceSettings(name, path, first=first, dataset=trace_name(path)) for name in systems]
    ran = runs.scaled(settings[0])
    curve = curve_of(ran)
    outcomes = runs(settings)
    found = dict(zip(systems, outcomes, strict=True))
    name = trace_name(path)
    known = TRACES.get(name)
    about = f"{known.kind}: {known.what}" if known else "not one of the three that docs/records/papers.md describes"
    part = "whole trace" if first is None else f"the first {first} of trace"
    return Result(
        f"papers_traces_{name}" if first is None else f"papers_traces_{name}_first_{first}",
        f"{part} {name} ({about}), {MODEL} on {ran.tp} {ran.machine.upper()}",
        "simulated",
        _claims(found, curve, ran),
        points(settings, outcomes),
        _panels(found),
        [_row(each, found) for each in found],
        notes="Hits: percent of prompt tokens. Gap closed: of the mean time to first token between no hierarchy and "
        f"unlimited device memory. Differences below {100 * MARGIN:.0f} % are called none.",
    )


def curve_of(settings: TraceSettings) -> HitCurve:
    """By the trace alone, of as much of it as is run."""
    # All of it, since the simulator's own reader expects a trace.
    if not read_trace(settings.path, sys.maxsize)[0].num_requests:
        raise CommandError(f"{settings.path} has no requests")
    log, _ = read_trace(settings.path, workload_of(settings).stats().num_queries)
    return log.curve()


def _row(name: str, found: Mapping[str, Outcome]) -> dict[str, Any]:
    own = found[name]
    row: dict[str, Any] = {
        "system": name,
        "device hits %": 100 * own.hit_rates["device"],
        "host hits %": 100 * own.hit_rates["host"],
        "mean TTFT s": own.mean_ttft_s,
        "p90 TTFT s": own.p90_ttft_s,
        "p99 TTFT s": own.p99_ttft_s,
        "requests/s": own.requests_per_s,
        "tokens/s": own.output_tokens_per_s,
        "stall % of prefill": 100 * own.stall_share,
    }
    if UNLIMITED in found:
        bound = found[UNLIMITED]
        row["mean TTFT / unlimited"] = own.mean_ttft_s / bound.mean_ttft_s
        if "no hierarchy" in found:
            row["gap closed %"] = gap_closed(own, found["no hierarchy"], bound)
    return row


def gap_closed(own: Outcome, without: Outcome, bound: Outcome) -> float | None:
    """Percent; None where there is no gap."""
    gap = without.mean_ttft_s - bound.mean_ttft_s
    return 100 * (without.mean_ttft_s - own.mean_ttft_s) / gap if gap > MARGIN * bound.mean_ttft_s else None


def _claims(found: Mapping[str, Outcome], curve: HitCurve, settings: TraceSettings) -> list[Claim]:
    device, host = capacities(settings)
    claims = []
    for name, own in found.items():
        size = curve.distinct_tokens if name == UNLIMITED else host if system_of(name).has_host else device
        bound = 100 * curve.hits(size) / curve.prompt_tokens
        claims.append(Claim(f"{name}: hits, %", f"{bound:.1f}", 100 * own.hit_rate, "stack distances of the trace"))
    pairs = (("SGLang-HiCache", "no hierarchy"), ("Strata", "SGLang-HiCache"), ("ours", "SGLang-HiCache"))
    for better, worse in pairs:
        if better in found and worse in found:
            ratio = found[worse].mean_ttft_s / found[better].mean_ttft_s
            claims.append(Claim(f"mean TTFT, {worse} over {better}", "-", ratio, verdict(ratio)))
    return claims


def verdict(ratio: float) -> str:
    if abs(ratio - 1) < MARGIN:
        return "no difference"
    return "helps" if ratio > 1 else "harms"


def _panels(found: Mapping[str, Outcome]) -> list[Panel]:
    names = list(found)

    def bars(values: Mapping[str, list[float]]) -> dict[str, tuple[Sequence[float | str], Sequence[float]]]:
        return {label: (names, own) for label, own in values.items()}

    hits = {f"{tier} hits": [100 * found[n].hit_rates[tier] for n in names] for tier in ("device", "host")}
    times = {
        "mean": [found[n].mean_ttft_s for n in names],
        "P90": [found[n].p90_ttft_s for n in names],
        "P99": [found[n].p99_ttft_s for n in names],
    }
    return [
        Panel("time to first token", "", "s", bars(times), kind="bars"),
        Panel("hits by tier", "", "% of prompt tokens", bars(hits), kind="bars"),
    ]
