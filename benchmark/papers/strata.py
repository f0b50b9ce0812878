"""Strata's evaluation: figures 1, 2, 8 to 11, 13 and 14, each a function from runs to a `Result`.

What the paper prints stands beside each number with its section; docs/records/papers.md has what was predicted.
The paper's request rates cannot be read from its figures: RATES are ours, and ALL_AT_ONCE is the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from benchmark.papers.curves import Curve, largest_ratio, peak_ratio
from benchmark.papers.figures import Claim, Result
from benchmark.papers.plots import Panel
from benchmark.papers.runs import ALL_AT_ONCE, Outcome, Runs, RunSettings, points
from benchmark.papers.sensitivity import CHANGES, Headline
from benchmark.papers.strata_headlines import PRELOADS, RATES, TODAY, curve, gain, peak, sweep, ttft_ratio
from benchmark.papers.strata_micro import figure3, figure12
from benchmark.simulator.workloads import Order

from benchmark.papers import strata_headlines

MODELS = ("Llama-3.1-8B", "Qwen2.5-14B", "Llama-3.1-70B")
HIERARCHIES = ("SGLang-HiCache", TODAY, "vLLM-LMCache", "TensorRT-HiCache", "Strata", PRELOADS, "ours")
# Which systems run which data set in figure 8. NarrativeQA: TensorRT cannot be warmed up (5.2.2).
FIG8_SYSTEMS = {
    "LooGLE": ("no hierarchy", *HIERARCHIES),
    "NarrativeQA": ("SGLang-HiCache", TODAY, "vLLM-LMCache", "Strata", PRELOADS, "ours"),
    "ReviewMT": ("no hierarchy", *HIERARCHIES),
    "ShareGPT": ("no hierarchy", "SGLang-HiCache", "Strata", "ours"),
}
# Printed ratios of throughput at equal TTFT, Strata over each (5.2.1, 5.2.2).
FIG8_PRINTED = {
    ("LooGLE", "Llama-3.1-8B"): {"SGLang-HiCache": 3.2, "vLLM-LMCache": 2.6, "TensorRT-HiCache": 1.9},
    ("LooGLE", "Qwen2.5-14B"): {"SGLang-HiCache": 3.9, "vLLM-LMCache": 2.1, "TensorRT-HiCache": 1.9},
    ("LooGLE", "Llama-3.1-70B"): {"SGLang-HiCache": 5.0, "vLLM-LMCache": 5.0, "TensorRT-HiCache": 3.75},
    ("ReviewMT", "Llama-3.1-8B"): {"SGLang-HiCache": 1.7, "vLLM-LMCache": 2.3, "TensorRT-HiCache": 2.3},
    ("NarrativeQA", "Llama-3.1-8B"): {"vLLM-LMCache": 2.3},
    ("NarrativeQA", "Qwen2.5-14B"): {"vLLM-LMCache": 2.6},
    ("NarrativeQA", "Llama-3.1-70B"): {"vLLM-LMCache": 2.5},
}
RATIO_BINS = (0, 1, 3, 10, 30, 100, 300, 1000, np.inf)


def _curve_panel(title: str, curves: dict[str, Curve]) -> Panel:
    series = {name: ([x for x, _ in c], [t for _, t in c]) for name, c in curves.items()}
    return Panel(title, "output tokens/s", "mean TTFT, s", series, log_y=True)


# -- figure 1 -------------------------------------------------------------------------------------------------------


def figure1(runs: Runs) -> Result:
    """Stalls by the load/compute ratio of prefill batches: Qwen2.5-14B, LooGLE."""
    settings = [peak(name) for name in ("SGLang-HiCache", "Strata-IO", "oracle")]
    outcomes = copies, kernel, oracle = runs(settings)
    rows, series = [], {}
    for s, outcome in zip(settings[:2], outcomes):
        binned = _by_ratio(outcome.batches)
        rows += [{"system": s.system, **row} for row in binned]
        series[s.system] = _stalls(outcome.batches)
    begins = [r["ratio from"] for r in _by_ratio(kernel.batches) if r["stall %"] >= 5]
    claims = [
        Claim("SGLang-HiCache, stalled % of prefill time", "74", 100 * copies.stall_share, "1"),
        Claim("Strata-IO, stalled % of prefill time", "up to 24", 100 * kernel.stall_share, "1, 3.2"),
        Claim("Strata-IO, the lowest ratio with 5 % of stalls", "100", begins[0] if begins else "none", "4.3.2"),
        Claim(
            "throughput lost to copies, times (oracle over SGLang-HiCache)",
            "up to 4",
            oracle.requests_per_s / copies.requests_per_s,
            "1",
        ),
    ]
    headlines = [
        Headline("HiCache, stalled %", (settings[0],), lambda o: 100 * o[0].stall_share),
        Headline("Strata-IO, stalled %", (settings[1],), lambda o: 100 * o[0].stall_share),
    ]
    panel = Panel(
        "Qwen2.5-14B, LooGLE, each prefill batch",
        "tokens loaded / tokens computed",
        "% of its time stalled",
        series,
        kind="points",
        log_x=True,
    )
    return Result(
        "papers_strata_fig1",
        "Fig. 1, stalls by load/compute ratio",
        "simulated",
        claims,
        [*rows, *points(settings, outcomes)],
        [panel],
        rows,
        headlines,
        notes="Shares are over the whole run, with the batches that compute documents for the first time.",
    )


def _by_ratio(batches: np.ndarray) -> list[dict[str, Any]]:
    """batches: as in `Outcome`."""
    ratio = batches[:, 1] / batches[:, 0]
    rows = []
    for low, high in pairwise(RATIO_BINS):
        some = batches[(ratio >= low) & (ratio < high)]
        if len(some):
            computed, stalled = some[:, 2].sum(), some[:, 3].sum()
            rows.append(
                {
                    "ratio from": low,
                    "batches": len(some),
                    "tokens computed": float(some[:, 0].mean()),
                    "tokens loaded": float(some[:, 1].mean()),
                    "stall %": max(0.0, 100 * float(stalled / (computed + stalled))),
                }
            )
    return rows


def _stalls(batches: np.ndarray) -> tuple[list[float], list[float]]:
    some = batches[batches[:, 1] > 0]
    return (some[:, 1] / some[:, 0]).tolist(), (100 * some[:, 3] / (some[:, 2] + some[:, 3])).tolist()


# -- figure 2 -------------------------------------------------------------------------------------------------------


def figure2(runs: Runs) -> Result:
    """Page size on a short workload: Mistral-24B, ShareGPT. The text (3.1) names model, data set and the ends of the
    sweep, but neither the rate nor whether there was a host tier: 8 queries per second and none, here."""
    pages = (1, 16, 32, 64, 256, 1024)
    settings = [_chat(page) for page in pages]
    outcomes = runs(settings)
    rows = [
        {"page size": page, "hits %": 100 * o.hit_rate, "mean TTFT s": o.mean_ttft_s, "p90 TTFT s": o.p90_ttft_s}
        for page, o in zip(pages, outcomes)
    ]
    first, last = outcomes[0], outcomes[-1]
    claims = [
        Claim("mean TTFT, page 1,024 over 1", "up to 2", last.mean_ttft_s / first.mean_ttft_s, "3.1"),
        Claim("P90 TTFT, page 1,024 over 1", "up to 2.9", last.p90_ttft_s / first.p90_ttft_s, "3.1"),
        Claim(
            "hit rate, page 1 / 32 / 1,024, %",
            '"a significant drop"',
            " / ".join(f"{100 * outcomes[pages.index(p)].hit_rate:.0f}" for p in (1, 32, 1024)),
            "3.1",
        ),
    ]
    panels = [
        Panel("Mistral-24B, ShareGPT", "page size", what, {what: (pages, [r[what] for r in rows])}, log_x=True)
        for what in ("hits %", "mean TTFT s", "p90 TTFT s")
    ]
    ratio = Headline("mean TTFT, page 1,024 over 1", (_chat(1024), _chat(1)), ttft_ratio)
    asked = ("as usual", "matrices", "half the device's", "twice the device's")
    changes = [c for c in CHANGES if c[0].startswith(asked)]
    changes += [("4 queries per second", {"rate": 4.0}), ("16 queries per second", {"rate": 16.0})]
    return Result(
        "papers_strata_fig2",
        "Fig. 2, page sizes on ShareGPT",
        "simulated",
        claims,
        points(settings, outcomes),
        panels,
        rows,
        [ratio],
        changes,
        notes="Rate and host tier are not printed: 8 queries per second and none are assumed.",
    )


def _chat(page: int) -> RunSettings:
    return RunSettings("no hierarchy", "Mistral-24B", dataset="ShareGPT", rate=8.0, page_size=page)


# -- figure 8 -------------------------------------------------------------------------------------------------------


def figure8(runs: Runs) -> Result:
    """Throughput against TTFT: three models, four data sets."""
    keys = [(d, m, s) for d, systems in FIG8_SYSTEMS.items() for m in MODELS for s in systems]
    sweeps = {(d, m, s): sweep(s, m, d, RATES[d]) for d, m, s in keys}
    runs([s for sweep in sweeps.values() for s in sweep])
    outcomes = {key: runs(sweep) for key, sweep in sweeps.items()}
    claims, panels = [], []
    rows: list[dict[str, Any]] = []
    for dataset, systems in FIG8_SYSTEMS.items():
        for model in MODELS:
            found = {name: outcomes[dataset, model, name] for name in systems}
            curves = {name: curve(o) for name, o in found.items()}
            panels.append(_curve_panel(f"{model}, {dataset}", curves))
            claims += _fig8_claims(dataset, model, found, curves)
            rows += [_fig8_row(dataset, model, name, found, curves) for name in systems]
    return Result(
        "papers_strata_fig8",
        "Fig. 8, throughput against TTFT",
        "simulated",
        claims,
        [row for key, sweep in sweeps.items() for row in points(sweep, outcomes[key])],
        panels,
        rows,
        strata_headlines.figure8(RATES),
        fragile=strata_headlines.fragile8(),
        notes="Mean TTFT counts from when a request is sent, at most 128 being in flight, and holds the cold start. "
        "Sensitivity: Qwen2.5-14B, LooGLE, all at once.",
    )


def _fig8_row(
    dataset: str, model: str, name: str, found: dict[str, list[Outcome]], curves: dict[str, Curve]
) -> dict[str, Any]:
    """`peak` is the highest rate, which is all at once but for ShareGPT."""
    strata, outcomes = curves["Strata"], found[name]
    at_two = [o.mean_ttft_s for rate, o in zip(RATES[dataset], outcomes, strict=True) if rate == 2.0]
    return {
        "data set": dataset,
        "model": model,
        "system": name,
        **strata_headlines.peak_row(outcomes[-1]),
        "mean TTFT s at 2/s": at_two[0] if at_two else None,
        "Strata over it at equal TTFT": largest_ratio(strata, curves[name])[0],
        "Strata over it at the peak": peak_ratio(strata, curves[name]),
    }


def _fig8_claims(dataset: str, model: str, found: dict[str, list[Outcome]], curves: dict[str, Curve]) -> list[Claim]:
    where = f"{model}, {dataset}"
    if dataset == "ShareGPT":
        slowest = [s.mean_ttft_s / h.mean_ttft_s for s, h in zip(found["Strata"], found["SGLang-HiCache"])]
        return [Claim(f"{where}: mean TTFT, Strata over HiCache", '"comparable"', max(slowest), "5.2.3")]
    printed = FIG8_PRINTED.get((dataset, model), {})
    claims = []
    for other in curves:
        if other in ("Strata", PRELOADS, "ours"):
            continue
        ratio, ttft_s = largest_ratio(curves["Strata"], curves[other])
        claims.append(
            Claim(
                f"{where}: Strata over {other}, at equal TTFT (peak)",
                f"up to {printed[other]:g}" if other in printed else "-",
                f"{ratio:.2f} at {ttft_s:.2g} s ({peak_ratio(curves['Strata'], curves[other]):.2f})",
                "5.2.2" if dataset == "NarrativeQA" else "5.2.1",
            )
        )
    for name in (PRELOADS, "ours"):
        claims.append(
            Claim(f"{where}: {name} over Strata, peak", "-", peak_ratio(curves[name], curves["Strata"]), "")
        )
    if dataset == "LooGLE":
        claims.append(Claim(f"{where}: hit rate of Strata, %", "95", 100 * found["Strata"][-1].hit_rate, "5.2.1"))
    return claims


# -- figures 9 to 11 ------------------------------------------------------------------------------------------------


def figure9(runs: Runs) -> Result:
    """I/O and scheduling apart: Qwen2.5-14B, LooGLE."""
    scheduling = "Strata-Schedule-Only"
    parts = (scheduling, f"{scheduling} + preloads", "Strata-IO", "Strata-IO-LPM", *HIERARCHIES, "oracle")
    sweeps = {name: sweep(name, "Qwen2.5-14B", "LooGLE", RATES["LooGLE"]) for name in parts}
    runs([s for some in sweeps.values() for s in some])
    outcomes = {name: runs(some) for name, some in sweeps.items()}
    curves = {name: curve(o) for name, o in outcomes.items()}
    base = curves["SGLang-HiCache"]
    claims = [
        Claim("scheduling only over SGLang-HiCache, peak", "up to 1.8", _peaks(curves, scheduling), "5.3.1"),
        Claim("the same with preloads", "-", _peaks(curves, f"{scheduling} + preloads"), ""),
        Claim("Strata-IO over SGLang-HiCache, peak", "up to 2.3", _peaks(curves, "Strata-IO"), "5.3.1"),
        Claim("Strata-IO-LPM over Strata-IO, peak", "no gain", _peaks(curves, "Strata-IO-LPM", "Strata-IO"), "5.3.1"),
        Claim("Strata over Strata-IO-LPM, peak", "above 1", _peaks(curves, "Strata", "Strata-IO-LPM"), "5.3.1"),
        Claim("Strata-IO over vLLM-LMCache, peak", "above 1", _peaks(curves, "Strata-IO", "vLLM-LMCache"), "5.3.1"),
        Claim(
            "Strata over SGLang-HiCache, equal TTFT", "up to 3.9", largest_ratio(curves["Strata"], base)[0], "5.2.1"
        ),
        Claim("Strata over SGLang-HiCache 0.5.21, peak", "-", _peaks(curves, "Strata", TODAY), ""),
        Claim(
            "Strata over SGLang-HiCache 0.5.21, equal TTFT",
            "-",
            largest_ratio(curves["Strata"], curves[TODAY])[0],
            "",
        ),
        Claim("Strata + preloads over Strata, peak", "-", _peaks(curves, PRELOADS, "Strata"), ""),
        Claim("ours over Strata, peak", "-", _peaks(curves, "ours", "Strata"), ""),
        Claim("Strata over the oracle, peak", "near, on GH200", _peaks(curves, "Strata", "oracle"), "5.4"),
    ]
    rows = [
        {
            "system": name,
            **strata_headlines.peak_row(o[-1]),
            "mean TTFT s, second lowest rate": o[min(1, len(o) - 1)].mean_ttft_s,
            "stalled %, second lowest rate": 100 * o[min(1, len(o) - 1)].stall_share,
        }
        for name, o in outcomes.items()
    ]
    return Result(
        "papers_strata_fig9",
        "Fig. 9, I/O and scheduling apart",
        "simulated",
        claims,
        [row for name, some in sweeps.items() for row in points(some, outcomes[name])],
        [_curve_panel("Qwen2.5-14B, LooGLE", curves)],
        rows,
        strata_headlines.figure9(RATES),
        fragile=strata_headlines.fragile9(),
        notes="All at once where nothing else is written.",
    )


def _peaks(curves: dict[str, Curve], name: str, other: str = "SGLang-HiCache") -> float:
    return peak_ratio(curves[name], curves[other])


def figure10(runs: Runs) -> Result:
    """Page sizes of SGLang-HiCache against Strata-IO at page size 1."""
    pages = (1, 16, 32, 64, 128, 256, 512, 1024)
    settings = [peak("Strata-IO"), *(peak("SGLang-HiCache", page_size=page) for page in pages)]
    reference, *outcomes = runs(settings)
    rows = [
        {
            "page size": page,
            "% of Strata-IO": 100 * o.requests_per_s / reference.requests_per_s,
            "hits %": 100 * o.hit_rate,
            "loading GB/s": o.load_bytes_per_s / 1e9,
        }
        for page, o in zip(pages, outcomes)
    ]
    best = max(rows, key=lambda r: r["% of Strata-IO"])
    at_512 = rows[pages.index(512)]
    claims = [
        Claim("best page size of SGLang-HiCache", "512", best["page size"], "5.3.2"),
        Claim("its peak, % of Strata-IO's", "93", best["% of Strata-IO"], "5.3.2"),
        Claim("page 512, hits lost against page 1, %", "2.4", 100 * reference.hit_rate - at_512["hits %"], "5.3.2"),
        Claim("page 32, % of Strata-IO", "-", rows[pages.index(32)]["% of Strata-IO"], ""),
    ]
    series = {"SGLang-HiCache": (pages, [r["% of Strata-IO"] for r in rows])}
    return Result(
        "papers_strata_fig10",
        "Fig. 10, page sizes of SGLang-HiCache",
        "simulated",
        claims,
        points(settings, [reference, *outcomes]),
        [Panel("Qwen2.5-14B, LooGLE, peak", "page size", "% of Strata-IO", series, log_x=True)],
        rows,
        [
            gain(
                "HiCache at page 512 / Strata-IO",
                peak("SGLang-HiCache", page_size=512),
                peak("Strata-IO"),
                is_varied=True,
            )
        ],
    )


STEPS = ("SGLang-HiCache", "+ deferral", "+ I/O", "+ balance", "Strata")
FIG11_PRINTED = {
    Order.MINIMUM: ("+42 %", "-", "-", "-"),
    Order.SHUFFLE: ("-", "+76 %", "+11 %", "+8 %"),
    Order.MAXIMUM: ("nothing", "+95 %", "+12 %", "+3 %"),
}


def figure11(runs: Runs) -> Result:
    """One mechanism after another, by cache distance. The last step, stall hiding, is Strata."""
    more = (PRELOADS, "ours")
    settings = {order: [peak(name, order=order) for name in (*STEPS, *more)] for order in Order}
    runs([s for some in settings.values() for s in some])
    claims: list[Claim] = []
    rows: list[dict[str, Any]] = []
    names = ("deferral", "I/O", "balance", "stall hiding")
    for order, some in settings.items():
        rates = [o.requests_per_s for o in runs(some)]
        for i, (name, paper) in enumerate(zip(names, FIG11_PRINTED[order])):
            gain = f"{100 * (rates[i + 1] / rates[i] - 1):+.0f} %"
            claims.append(Claim(f"{order} distance: {name}", paper, gain, "5.3.3"))
        balance, strata, *others = rates[3:]
        preloads = f"{100 * (others[0] / balance - 1):+.0f} %"
        claims.append(Claim(f"{order} distance: stall hiding by preloads", "-", preloads, ""))
        for name, rate in zip(more, others, strict=True):
            claims.append(
                Claim(f"{order} distance: {name} over Strata", "-", f"{100 * (rate / strata - 1):+.0f} %", "")
            )
        rows.append({"order": str(order), **dict(zip((*STEPS, *more), rates, strict=True))})
    series = {step: ([str(o) for o in Order], [r[step] for r in rows]) for step in (*STEPS, *more)}
    return Result(
        "papers_strata_fig11",
        "Fig. 11, mechanisms by cache distance",
        "simulated",
        claims,
        [row for some in settings.values() for row in points(some, runs(some))],
        [Panel("Qwen2.5-14B, LooGLE, peak", "cache distance", "requests/s", series, kind="bars")],
        rows,
        strata_headlines.figure11(),
    )


# -- figures 13 and 14 ----------------------------------------------------------------------------------------------

GH_SYSTEMS = ("SGLang-HiCache", "Strata-IO", "Strata", "ours", "oracle")
GH_RATES = (4.0, 8.0, 16.0, ALL_AT_ONCE)


def _said(rate: float) -> str:
    return "once" if rate == ALL_AT_ONCE else f"{rate:g}/s"


def _on(machine: str, system: str, rate: float = ALL_AT_ONCE) -> RunSettings:
    return RunSettings(system, "Llama-3.1-8B", machine, rate=rate)


def figure13(runs: Runs) -> Result:
    """PCIe 5 and Grace Hopper: Llama-3.1-8B, LooGLE, mean TTFT."""
    keys = [(machine, system) for machine in ("h200", "gh200") for system in GH_SYSTEMS]
    sweeps = {key: [_on(*key, rate) for rate in GH_RATES] for key in keys}
    runs([s for sweep in sweeps.values() for s in sweep])
    outcomes = {key: runs(sweep) for key, sweep in sweeps.items()}
    rows = [
        {"machine": machine, "system": system}
        | {f"TTFT s at {_said(rate)}": o.mean_ttft_s for rate, o in zip(GH_RATES, outcomes[machine, system])}
        for machine, system in keys
    ]

    def over(one: tuple[str, str], other: tuple[str, str]) -> str:
        ratios = [a.mean_ttft_s / b.mean_ttft_s for a, b in zip(outcomes[one], outcomes[other])]
        return " / ".join(f"{r:.2f}" for r in ratios)

    at = ", mean TTFT at " + " / ".join(map(_said, GH_RATES))
    claims = [
        Claim(
            f"HiCache on GH200 over Strata-IO on H200{at}",
            "above 1",
            over(("gh200", "SGLang-HiCache"), ("h200", "Strata-IO")),
            "5.4",
        ),
        Claim(
            "Strata-IO on GH200 over Strata on H200",
            "1 or more",
            over(("gh200", "Strata-IO"), ("h200", "Strata")),
            "5.4",
        ),
        Claim(
            "Strata on GH200 over the oracle there",
            '"near-oracle"',
            over(("gh200", "Strata"), ("gh200", "oracle")),
            "5.4",
        ),
        Claim("ours on GH200 over the oracle there", "-", over(("gh200", "ours"), ("gh200", "oracle")), ""),
    ]
    series = {f"{s}, {m}": curve(outcomes[m, s]) for m, s in keys}
    return Result(
        "papers_strata_fig13",
        "Fig. 13, PCIe 5 and Grace Hopper",
        "simulated",
        claims,
        [row for key, sweep in sweeps.items() for row in points(sweep, outcomes[key])],
        [_curve_panel("Llama-3.1-8B, LooGLE", series)],
        rows,
        strata_headlines.figure13(),
        fragile=strata_headlines.fragile13(),
    )


def figure14(runs: Runs) -> Result:
    """Bandwidth of loads for the same task, all at once."""
    keys = [
        (machine, system) for machine in ("h200", "gh200") for system in ("SGLang-HiCache", "Strata-IO", "Strata")
    ]
    settings = [_on(*key) for key in keys]
    outcomes = runs(settings)
    rows: list[dict[str, Any]] = [
        {
            "machine": machine,
            "system": system,
            "GB/s while loading": o.load_bytes_per_s / 1e9,
            "GB/s over the run": o.sustained_bytes_per_s / 1e9,
        }
        for (machine, system), o in zip(keys, outcomes)
    ]
    rate = {key: o.load_bytes_per_s / 1e9 for key, o in zip(keys, outcomes)}
    claims = [
        Claim("SGLang-HiCache on GH200, GB/s while loading", "40", rate["gh200", "SGLang-HiCache"], "5.4"),
        Claim("Strata-IO on GH200, GB/s while loading", "150", rate["gh200", "Strata-IO"], "5.4"),
    ]
    series = {
        what: ([f"{s}, {m}" for m, s in keys], [r[what] for r in rows])
        for what in ("GB/s while loading", "GB/s over the run")
    }
    headlines = [
        Headline(f"{s} on GH200, GB/s over the run", (_on("gh200", s),), lambda o: o[0].sustained_bytes_per_s / 1e9)
        for s in ("SGLang-HiCache", "Strata-IO")
    ]
    return Result(
        "papers_strata_fig14",
        "Fig. 14, bandwidth of loads",
        "simulated",
        claims,
        points(settings, outcomes),
        [Panel("Llama-3.1-8B, LooGLE, all at once", "", "GB/s", series, kind="bars")],
        rows,
        headlines,
    )


SIMULATED: dict[str, Callable[[Runs], Result]] = {
    "1": figure1,
    "2": figure2,
    "8": figure8,
    "9": figure9,
    "10": figure10,
    "11": figure11,
    "13": figure13,
    "14": figure14,
}
FIGURES = ("1", "2", "3", "8", "9", "10", "11", "12", "13", "14")


def reproduce(number: str, runs: Runs, quick: bool) -> Result:
    if number == "3":
        return figure3()
    if number == "12":
        return figure12(quick)
    return SIMULATED[number](runs)
