"""The headlines of Strata's figures 8, 9, 11 and 13, and the assumptions that they hang on most.

They can be run without the figures' curves (`headlines_only`). All are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmark.papers.curves import Curve, largest_ratio
from benchmark.papers.figures import Result
from benchmark.papers.runs import ALL_AT_ONCE, Outcome, Runs, RunSettings, points
from benchmark.papers.sensitivity import Fragile, Headline, Setting
from benchmark.simulator.workloads import LOOGLE_CLOZE, Order

# Queries per second, from idle to saturated.
RATES = {
    "LooGLE": (1.0, 2.0, 4.0, 8.0, ALL_AT_ONCE),
    "NarrativeQA": (1.0, 2.0, 4.0, ALL_AT_ONCE),
    "ReviewMT": (1.0, 2.0, ALL_AT_ONCE),
    "ShareGPT": (4.0, 16.0),
}
HICACHE, TODAY, LMCACHE, TENSORRT = "SGLang-HiCache", "SGLang-HiCache 0.5.21", "vLLM-LMCache", "TensorRT-HiCache"
STRATA, PRELOADS = "Strata", "Strata + preloads"
SCHEDULING = "Strata-Schedule-Only"
# Short names of models.
SIZES = {"Llama-3.1-8B": "8B", "Qwen2.5-14B": "14B", "Llama-3.1-70B": "70B"}


def peak(system: str, **changes: Any) -> RunSettings:
    return RunSettings(system, rate=ALL_AT_ONCE, **changes)


def sweep(system: str, model: str, dataset: str, rates: Sequence[float]) -> list[RunSettings]:
    """NarrativeQA begins with all documents on the host (5.2.2)."""
    warm = dataset == "NarrativeQA"
    return [RunSettings(system, model, dataset=dataset, rate=rate, warm=warm) for rate in rates]


def curve(outcomes: Sequence[Outcome]) -> Curve:
    return [(o.output_tokens_per_s, o.mean_ttft_s) for o in outcomes]


def gain(name: str, better: RunSettings, worse: RunSettings, is_varied: bool = False) -> Headline:
    """How many times as many requests per second."""
    return Headline(name, (better, worse), _throughput_ratio, is_varied)


def _throughput_ratio(outcomes: Sequence[Outcome]) -> float:
    return outcomes[0].requests_per_s / outcomes[1].requests_per_s


def ttft_ratio(outcomes: Sequence[Outcome]) -> float:
    return outcomes[0].mean_ttft_s / outcomes[1].mean_ttft_s


def at_equal_ttft(name: str, better: Sequence[RunSettings], worse: Sequence[RunSettings]) -> Headline:
    """The paper's "up to": the largest ratio of throughputs at equal TTFT, over whole curves."""

    def ratio(outcomes: Sequence[Outcome]) -> float:
        return largest_ratio(curve(outcomes[: len(better)]), curve(outcomes[len(better) :]))[0]

    return Headline(name, (*better, *worse), ratio, is_varied=False, is_of_curves=True)


def figure8(rates: Mapping[str, Sequence[float]] = RATES) -> list[Headline]:
    """Peaks of each model and data set, and the 70B's "fivefold" at equal TTFT."""
    others = {
        "LooGLE": (HICACHE, TODAY, LMCACHE, TENSORRT),
        "NarrativeQA": (TODAY, LMCACHE),
        "ReviewMT": (HICACHE, TODAY, LMCACHE),
    }
    headlines = []
    for dataset, systems in others.items():
        for model, size in SIZES.items():
            # The paper prints ReviewMT of the 8B alone (5.2.1).
            if dataset == "ReviewMT" and size != "8B":
                continue
            warm = {"warm": True} if dataset == "NarrativeQA" else {}
            case = {"model": model, "dataset": dataset, **warm}
            for other in systems:
                is_varied = (dataset, size) == ("LooGLE", "14B") and other in (HICACHE, LMCACHE)
                name = f"{dataset}, {size}: Strata / {other}, peak"
                headlines.append(gain(name, peak(STRATA, **case), peak(other, **case), is_varied))
    seventy = "Llama-3.1-70B"
    strata, hicache = (sweep(name, seventy, "LooGLE", rates["LooGLE"]) for name in (STRATA, HICACHE))
    headlines.append(at_equal_ttft(f"LooGLE, 70B: {_EQUAL}", strata, hicache))
    return headlines


_OF_CURVES = "equal TTFT"
_EQUAL = f"Strata / SGLang-HiCache, {_OF_CURVES}"


def figure9(rates: Mapping[str, Sequence[float]] = RATES) -> list[Headline]:
    """Qwen2.5-14B, LooGLE: what each part gains; and with its cloze questions, which are longer."""
    base, cloze = peak(HICACHE), {"dataset": LOOGLE_CLOZE.name}
    systems = (STRATA, HICACHE, TODAY, "ours")
    strata, hicache, today, ours = (sweep(name, "Qwen2.5-14B", "LooGLE", rates["LooGLE"]) for name in systems)
    return [
        gain("scheduling only / SGLang-HiCache, peak", peak(SCHEDULING), base, is_varied=True),
        gain("scheduling only + preloads / SGLang-HiCache, peak", peak(f"{SCHEDULING} + preloads"), base),
        gain("Strata-IO / SGLang-HiCache, peak", peak("Strata-IO"), base, is_varied=True),
        gain("Strata-IO-LPM / Strata-IO, peak", peak("Strata-IO-LPM"), peak("Strata-IO")),
        gain("Strata / SGLang-HiCache, peak", peak(STRATA), base),
        gain("Strata / SGLang-HiCache 0.5.21, peak", peak(STRATA), peak(TODAY)),
        gain("Strata + preloads / Strata, peak", peak(PRELOADS), peak(STRATA)),
        gain("ours / SGLang-HiCache 0.5.21, peak", peak("ours"), peak(TODAY)),
        gain("ours / Strata, peak", peak("ours"), peak(STRATA)),
        gain("Strata / oracle, peak", peak(STRATA), peak("oracle")),
        gain("LooGLE cloze: Strata / SGLang-HiCache, peak", peak(STRATA, **cloze), peak(HICACHE, **cloze)),
        gain("LooGLE cloze: ours / SGLang-HiCache 0.5.21, peak", peak("ours", **cloze), peak(TODAY, **cloze)),
        at_equal_ttft(_EQUAL, strata, hicache),
        at_equal_ttft("Strata / SGLang-HiCache 0.5.21, equal TTFT", strata, today),
        at_equal_ttft("ours / SGLang-HiCache 0.5.21, equal TTFT", ours, today),
    ]


def figure11() -> list[Headline]:
    """Gains of single mechanisms; the paper's stall hiding gains 8 % at shuffle and 3 % at maximum distance. ReviewMT
    is not in its figure."""
    low, high, mixed = ({"order": order} for order in (Order.MINIMUM, Order.MAXIMUM, Order.SHUFFLE))
    headlines = [
        gain("deferral, minimum distance", peak("+ deferral", **low), peak(HICACHE, **low), is_varied=True),
        gain("I/O, maximum distance", peak("+ I/O", **high), peak("+ deferral", **high), is_varied=True),
    ]
    cases: dict[str, dict[str, Any]] = {
        "shuffle": mixed,
        "maximum distance": high,
        "ReviewMT": {"dataset": "ReviewMT"},
    }
    for name, case in cases.items():
        balance = peak("+ balance", **case)
        headlines += [
            gain(f"stall hiding, {name}", peak(STRATA, **case), balance),
            gain(f"stall hiding by preloads, {name}", peak(PRELOADS, **case), balance),
        ]
    return headlines


def _on(machine: str, system: str) -> RunSettings:
    return RunSettings(system, "Llama-3.1-8B", machine)


def figure13() -> list[Headline]:
    pcie, hopper = (_on(machine, STRATA) for machine in ("h200", "gh200"))
    return [
        Headline("TTFT, IO-GH / Strata-PCIe", (_on("gh200", "Strata-IO"), pcie), ttft_ratio),
        Headline("TTFT, Strata-GH / oracle-GH", (hopper, _on("gh200", "oracle")), ttft_ratio),
        Headline("TTFT, Strata-PCIe / oracle-PCIe", (pcie, _on("h200", "oracle")), ttft_ratio),
    ]


def fragile8() -> list[Fragile]:
    """At tp 4 a piece has 16 KiB. Of 64 KiB it would cost a quarter per byte."""
    case = {"model": "Llama-3.1-70B"}
    return [
        Fragile(
            "what a copied piece costs at tp 4",
            (gain("LooGLE, 70B: Strata / SGLang-HiCache, peak", peak(STRATA, **case), peak(HICACHE, **case)),),
            Setting("0.9 µs, or 3.5 µs for pieces of 64 KiB", {"copy_cost": 0.25}),
            Setting("3.5 µs, pieces of 16 KiB", {}),
            Setting("7 µs", {"copy_cost": 2.0}),
        )
    ]


IN_FLIGHT = (Setting("32", {"in_flight": 32}), Setting("128", {}), Setting("256", {"in_flight": 256}))


def fragile9() -> list[Fragile]:
    """How near the oracle a scheduler comes hangs on how many requests it can choose from."""
    oracle = peak("oracle")
    headlines = [gain(f"{name} / oracle, peak", peak(name), oracle) for name in (STRATA, PRELOADS)]
    scheduling = gain("scheduling only / SGLang-HiCache, peak", peak(SCHEDULING), peak(HICACHE))
    return [Fragile("requests in flight, PCIe 5", (*headlines, scheduling), *IN_FLIGHT)]


def fragile13() -> list[Fragile]:
    return [Fragile("requests in flight", tuple(figure13()), *IN_FLIGHT)]


# Figure -> its title, headlines and ranges.
_HEADLINES: dict[str, tuple[str, Callable[[], list[Headline]], Callable[[], list[Fragile]]]] = {
    "8": ("Fig. 8, throughput against TTFT", figure8, fragile8),
    "9": ("Fig. 9, I/O and scheduling apart", figure9, fragile9),
    "11": ("Fig. 11, mechanisms by cache distance", figure11, list),
    "13": ("Fig. 13, PCIe 5 and Grace Hopper", figure13, fragile13),
}
FIGURES = tuple(_HEADLINES)


def headlines_only(number: str, runs: Runs, only: str = "") -> Result:
    """Of a figure, without its curves. Its table has the runs of the headlines with the first seed. only: words that
    a headline's name must have, or it is not run. Those of whole curves take long, and are run where the words are
    theirs: "equal TTFT"."""
    title, headlines, fragile = _HEADLINES[number]
    name = f"papers_strata_fig{number}_headlines"
    wanted = [headline for headline in headlines() if only in headline.name]
    chosen = [headline for headline in wanted if not headline.is_of_curves or only == _OF_CURVES]
    peaks = [headline for headline in chosen if not headline.is_of_curves]
    settings = list(dict.fromkeys(s for headline in peaks for s in headline.settings))
    outcomes = runs(settings)
    table = [s.describe() | peak_row(o) for s, o in zip(settings, outcomes, strict=True)]
    return Result(name, title, "simulated", (), points(settings, outcomes), (), table, chosen, fragile=fragile())


def peak_row(outcome: Outcome) -> dict[str, float]:
    return {
        "requests/s": outcome.requests_per_s,
        "mean TTFT s": outcome.mean_ttft_s,
        "stalled %": 100 * outcome.stall_share,
        "hits %": 100 * outcome.hit_rate,
    }
