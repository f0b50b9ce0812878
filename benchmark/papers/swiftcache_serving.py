"""SwiftCache's figures 7, 8, 10 and 11, from the schedulers of a master and two workers on the simulator.

What the paper prints stands beside each number with its section; docs/records/papers.md has what was predicted.
The paper's request rates, and how much of the memory its conversations fill, cannot be read from its figures: RATES
and WORKING_SETS are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from benchmark.common import percentiles
from benchmark.papers.figures import Claim, Result
from benchmark.papers.plots import Panel
from benchmark.papers.runs import Runs, points
from benchmark.papers.sensitivity import Fragile, Headline, Setting
from benchmark.papers.swiftcache_runs import (
    ALONE,
    COMPARED,
    DATASETS,
    MASTERS,
    TODAY,
    ServingOutcome,
    ServingSettings,
    workload_of,
)
from benchmark.simulator.cost_models import DMA, Gpu, ModelShape, load_seconds, pass_cost
from benchmark.simulator.profiles import H20X4, MODELS

# Requests per second: few at once, and about half of what decoding permits with whole contexts on the device.
RATES = {
    "ShareGPT": {"LWM-7B": (0.1, 0.3), "Qwen3-14B": (0.4, 1.0), "Qwen3-32B": (0.05, 0.15)},
    "L-Eval": {"LWM-7B": (0.4, 1.0), "Qwen3-14B": (1.0, 3.0), "Qwen3-32B": (0.2, 0.5)},
}
# Of what the host of a baseline, or device and idle workers together, hold; whichever is less.
WORKING_SETS = (0.5, 0.75, 1.0, 1.5, 2.0)
# The one of figures 8, 10 and 11, of both rates of figure 7, and of the sensitivity.
USUAL_SET = 0.75
HICACHE, LMCACHE, SWIFTCACHE, OURS = COMPARED
# 5.1, in percent of P99 TTFT.
FIG7_PRINTED = {
    ("ShareGPT", HICACHE): 67,
    ("L-Eval", HICACHE): 69,
    ("ShareGPT", LMCACHE): 54,
    ("L-Eval", LMCACHE): 58,
}


def reduction(outcomes: Sequence[ServingOutcome]) -> float:
    """By how many percent the first one's P99 TTFT is below the second one's."""
    return 100 * (1 - outcomes[0].p99_ttft_s / outcomes[1].p99_ttft_s)


def alone(settings: ServingSettings) -> ServingSettings:
    """The workers of a run without its master."""
    usual = ServingSettings(ALONE, settings.model, settings.dataset, settings.rate)
    return replace(usual, requests=settings.requests, seed=settings.seed, bursts=settings.bursts)


def loss(outcomes: Sequence[ServingOutcome], what: str, workers: Sequence[str] = MASTERS) -> float:
    """By how many percent the workers' own `what` is longer than alone: mean of those that had requests. outcomes:
    with the master, and of `alone`. NaN: none had."""
    lent, home = (outcome.workers for outcome in outcomes)
    ratios = [getattr(lent[name], what) / getattr(home[name], what) for name in workers if name in home]
    return 100 * (float(np.mean(ratios)) - 1) if ratios else float("nan")


def _usual(system: str, bursts: float = 1.0) -> ServingSettings:
    rate = RATES["L-Eval"]["Qwen3-14B"][0]
    return ServingSettings(system, "Qwen3-14B", "L-Eval", rate, working_set=USUAL_SET, bursts=bursts)


def _below(better: str, other: str, bursts: float = 1.0) -> Headline:
    idle = "" if bursts else ", workers idle"
    return Headline(f"{better} below {other}, %{idle}", (_usual(better, bursts), _usual(other)), reduction)


# With idle workers, as the paper's may have been; and with bursts of their own.
IDLE = tuple(_below(SWIFTCACHE, other, 0.0) for other in (HICACHE, LMCACHE, TODAY))
HEADLINES = (
    *IDLE,
    *(_below(better, HICACHE) for better in (SWIFTCACHE, OURS)),
    *(_below(OURS, other) for other in (LMCACHE, TODAY, SWIFTCACHE)),
    *(
        Headline(f"workers' TTFT, {name}, +%", (_usual(name), alone(_usual(name))), lambda o: loss(o, "mean_ttft_s"))
        for name in (SWIFTCACHE, OURS)
    ),
)
FRAGILE = (
    Fragile(
        "tokens of all sessions, of what the least tier holds",
        (*IDLE, _below(OURS, HICACHE), _below(OURS, TODAY)),
        *(Setting(f"{size:g}", {"working_set": size}) for size in (0.5, USUAL_SET, 1.0)),
    ),
)
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as usual", {}),
    ("two GPUs load from the host at once", {"sharers": 2}),
    ("four GPUs load from the host at once", {"sharers": 4}),
    ("workers are idle but for one conversation a burst", {"bursts": 0.05}),
    ("workers' bursts are twice as large", {"bursts": 2.0}),
    ("workers lend half", {"lent": 0.5}),
    ("half the device's capacity", {"device": 0.5}),
    ("matrices and attention at 0.5 of the peak", {"efficiency": 0.5}),
    ("half the answers' lengths", {"answers": 0.5}),
    ("twice the answers' lengths", {"answers": 2.0}),
    ("another seed", {"seed": 2}),
    ("yet another", {"seed": 3}),
)


# Row of figure 7 -> system, and the factor of its workers' bursts.
ROWS = {name: (name, 1.0) for name in COMPARED} | {
    f"{name}, workers idle": (name, 0.0) for name in (SWIFTCACHE, OURS)
}
SWIFTCACHE_IDLE, OURS_IDLE = list(ROWS)[-2:]


def figure7(runs: Runs) -> Result:
    """P99 TTFT of three masters on two data sets, by the working set, and at a second rate; and what it costs their
    workers."""
    cases = [
        (dataset, model, rates[i], size)
        for dataset in DATASETS
        for model, rates in RATES[dataset].items()
        for i, size in [(0, size) for size in WORKING_SETS] + [(1, USUAL_SET)]
    ]
    settings = {
        case: [
            ServingSettings(name, case[1], case[0], case[2], working_set=case[3], bursts=bursts)
            for name, bursts in ROWS.values()
        ]
        for case in cases
    }
    runs([s for some in settings.values() for s in (*some, alone(some[0]))])
    found = {case: dict(zip(ROWS, runs(some), strict=True)) for case, some in settings.items()}
    at_home = {case: runs([alone(some[0])])[0] for case, some in settings.items()}
    claims, rows = [], []
    for dataset in DATASETS:
        for better, other in (
            (SWIFTCACHE, HICACHE),
            (SWIFTCACHE, LMCACHE),
            (SWIFTCACHE_IDLE, HICACHE),
            (SWIFTCACHE_IDLE, LMCACHE),
            (OURS, SWIFTCACHE),
            (OURS, HICACHE),
            (OURS, LMCACHE),
            (OURS_IDLE, SWIFTCACHE_IDLE),
        ):
            printed = f"about {FIG7_PRINTED[dataset, other]}" if better in (SWIFTCACHE, SWIFTCACHE_IDLE) else "-"
            for size in WORKING_SETS:
                cuts = [reduction((o[better], o[other])) for c, o in found.items() if (c[0], c[3]) == (dataset, size)]
                claims.append(
                    Claim(
                        f"{dataset}, {size:g}: P99 TTFT, {better} below {other}, %",
                        printed,
                        f"{np.mean(cuts):.0f} ({min(cuts):.0f} to {max(cuts):.0f})",
                        "5.1; of which model, rate and working set it does not say" if printed != "-" else "",
                    )
                )
        for name in (SWIFTCACHE, OURS):
            for what, field in (("TTFT", "mean_ttft_s"), ("TPOT", "tpot_s")):
                lost = [loss((o[name], at_home[c]), field) for c, o in found.items() if c[0] == dataset]
                claims.append(
                    Claim(
                        f"{dataset}: workers' {what}, {name}, +%",
                        "up to 9.7" if (name, what) == (SWIFTCACHE, "TTFT") else "-",
                        f"{np.mean(lost):.1f} ({min(lost):.1f} to {max(lost):.1f})",
                        "5.2" if name == SWIFTCACHE else "",
                    )
                )
    for case, outcomes in found.items():
        dataset, model, rate, size = case
        row: dict[str, Any] = {"dataset": dataset, "master": model, "requests/s": rate, "working set": size}
        row |= {f"{name}, P99 s": o.p99_ttft_s for name, o in outcomes.items()}
        row |= {f"{name}, s/token": o.tpot_s for name, o in outcomes.items()}
        row |= {
            f"{name}, hits %": " / ".join(f"{100 * r:.0f}" for r in o.hit_rates.values())
            for name, o in outcomes.items()
        }
        for name in (SWIFTCACHE, OURS):
            row[f"{name}, borrowed tokens"] = outcomes[name].borrowed_tokens
            for what, field in (("TTFT", "mean_ttft_s"), ("P99 TTFT", "p99_ttft_s"), ("TPOT", "tpot_s")):
                row[f"{name}, workers' {what} +%"] = loss((outcomes[name], at_home[case]), field)
        rows.append(row)
    lines = {
        (dataset, model): [
            r for r in rows if (r["dataset"], r["master"], r["requests/s"]) == (dataset, model, rates[0])
        ]
        for dataset in DATASETS
        for model, rates in RATES[dataset].items()
    }
    panels = [
        Panel(
            f"{model}, {dataset}",
            "working set",
            "P99 TTFT, s",
            {name: (list(WORKING_SETS), [r[f"{name}, P99 s"] for r in some]) for name in ROWS},
            log_y=True,
        )
        for (dataset, model), some in lines.items()
    ] + [
        Panel(
            f"workers of {model}, {dataset}",
            "working set",
            "own TTFT, % longer",
            {
                name: (list(WORKING_SETS), [r[f"{name}, workers' TTFT +%"] for r in some])
                for name in (SWIFTCACHE, OURS)
            },
        )
        for (dataset, model), some in lines.items()
    ]
    return Result(
        "papers_swiftcache_fig7",
        "Fig. 7, P99 TTFT, and what it costs the workers",
        "simulated",
        claims,
        [row for case, some in settings.items() for row in points(some, list(found[case].values()))],
        panels,
        rows,
        HEADLINES,
        CHANGES,
        fragile=FRAGILE,
        notes="Hits: device / peer / host. Mean over masters, in brackets the least and the most. Workers: mean of "
        "both, over the same workers alone. Sensitivity: Qwen3-14B, L-Eval, 1 request per second, working set 0.75.",
    )


def headlines_only(number: str, runs: Runs) -> Result:
    """Of figure 7, without its points."""
    name, title = f"papers_swiftcache_fig{number}_headlines", f"Fig. {number}, P99 TTFT: Qwen3-14B, L-Eval"
    return Result(name, title, "simulated", (), (), (), headlines=HEADLINES, changes=CHANGES, fragile=FRAGILE)


# -- figure 8 -------------------------------------------------------------------------------------------------------

# Master, its inputs, its workers, and the printed increases of a worker's TTFT and TPOT, in percent (5.2: "Qwen3-14B
# as the worker", "Qwen3-32B as the worker"; and of Qwen3-32B as the master, whose worker it does not name).
FIG8 = (
    ("LWM-7B", (16_384, 32_768, 65_536), (("Qwen3-14B", 9.7, 6.5), ("Qwen3-32B", 7.9, 6.4))),
    ("Qwen3-32B", (16_384, 32_768, 40_960), (("LWM-7B", 7.7, 5.6), ("Qwen3-14B", 7.7, 5.6))),
)


def figure8(runs: Runs) -> Result:
    """What workers lose while a master with inputs of one length borrows from them: their own bursts against the same
    bursts alone. Beside it a bound, by the cost model."""
    settings = {
        (master, length): [
            ServingSettings(name, master, "L-Eval", RATES["L-Eval"][master][-1], working_set=USUAL_SET, length=length)
            for name in (SWIFTCACHE, OURS)
        ]
        for master, lengths, _ in FIG8
        for length in lengths
    }
    runs([s for some in settings.values() for s in (*some, alone(some[0]))])
    rows: list[dict[str, Any]] = []
    for master, lengths, workers in FIG8:
        for length in lengths:
            some = settings[master, length]
            home = runs([alone(some[0])])[0]
            for worker, _, _ in workers:
                row: dict[str, Any] = {"master": master, "tokens": length, "worker": worker}
                for name, lent in zip((SWIFTCACHE, OURS), runs(some), strict=True):
                    for what, field in (("TTFT", "mean_ttft_s"), ("P99 TTFT", "p99_ttft_s"), ("TPOT", "tpot_s")):
                        row[f"{what} +%, {name}"] = loss((lent, home), field, [worker])
                    row[f"hits %, {name}"] = hits_of(lent, worker)
                row["hits %, alone"] = hits_of(home, worker)
                for said, wires in (("reads", 1), ("reads and writes", 2)):
                    traffic = wires * H20X4.peer_link.wire
                    row |= {
                        f"bound: TTFT +%, {said}": _slower(MODELS[worker], length, False, traffic),
                        f"bound: TPOT +%, {said}": _slower(MODELS[worker], length, True, traffic),
                    }
                rows.append(row)
    claims = [
        Claim(
            "a peer's reads, % of what HBM gives",
            '"a negligible fraction"',
            100 * H20X4.peer_link.wire / (H20X4.gpu.hbm_bytes_per_s * H20X4.gpu.hbm_efficiency),
            "5.2; cost model",
        )
    ]
    for master, _, workers in FIG8:
        for worker, ttft, tpot in workers:
            found = [r for r in rows if (r["master"], r["worker"]) == (master, worker)]
            for what, printed in (("TTFT", ttft), ("TPOT", tpot)):
                most = [max(r[f"{what} +%, {name}"] for r in found) for name in (SWIFTCACHE, OURS)]
                claims.append(
                    Claim(
                        f"{worker} beside {master}, {what}, +%, {SWIFTCACHE} / {OURS}",
                        f"up to {printed}",
                        " / ".join(f"{each:.1f}" for each in most),
                        "5.2" if master == "LWM-7B" else "5.2; the worker is not named",
                    )
                )
    series = {
        f"{what}, {name}": (
            [f"{r['worker']} by {r['master']}" for r in rows if r["tokens"] == 16_384],
            [r[f"{what} +%, {name}"] for r in rows if r["tokens"] == 16_384],
        )
        for what in ("TTFT", "TPOT")
        for name in (SWIFTCACHE, OURS)
    }
    return Result(
        "papers_swiftcache_fig8",
        "Fig. 8, what workers lose",
        "simulated",
        claims,
        [row for some in settings.values() for row in points(some, runs(some))],
        [Panel("16,384 tokens", "", "% longer", series, kind="bars")],
        rows,
        notes="Each worker's own bursts, over the same bursts alone. Bound, a cost model: the "
        "link never rests, all of it goes to one worker, and copies come first at the memory.",
    )


def hits_of(outcome: ServingOutcome, worker: str) -> float:
    return 100 * outcome.workers[worker].hit_rate if worker in outcome.workers else float("nan")


def _slower(worker: ModelShape, length: int, decode: bool, traffic: float) -> float:
    """By how many percent a pass takes longer if so many bytes per second of the memory are taken: a prompt of that
    length, or one token behind it."""
    gpu = H20X4.gpu
    left = replace(gpu, hbm_bytes_per_s=gpu.hbm_bytes_per_s - traffic / gpu.hbm_efficiency)
    starts, lens = np.array([length if decode else 0]), np.array([1 if decode else length])

    def seconds(on: Gpu) -> float:
        return pass_cost(worker, on, starts, lens, decode=decode).seconds

    return 100 * (seconds(left) / seconds(gpu) - 1)


# -- figures 10 and 11 ----------------------------------------------------------------------------------------------


def _breakdown(model: str, dataset: str, system: str = SWIFTCACHE) -> ServingSettings:
    return ServingSettings(system, model, dataset, RATES[dataset][model][0], working_set=USUAL_SET)


def load_share(outcome: ServingOutcome) -> float:
    """Percent of queueing, loading, executing and storing, as if nothing overlapped."""
    return 100 * float(outcome.loads_s.sum()) / _total(outcome)


def store_share(outcome: ServingOutcome) -> float:
    return 100 * float(outcome.stores_s.sum()) / _total(outcome)


def stall_share(outcome: ServingOutcome) -> float:
    """Percent of the time to first token in which a launch waits for KV."""
    return 100 * outcome.stall_s / (outcome.queue_s + outcome.stall_s + outcome.execute_s)


def _total(outcome: ServingOutcome) -> float:
    return outcome.queue_s + outcome.execute_s + float(outcome.loads_s.sum() + outcome.stores_s.sum())


def figure10(runs: Runs) -> Result:
    """Phases of a prefill: Qwen3-32B with SwiftCache, and with ours."""
    cases = [(dataset, system) for system in (SWIFTCACHE, OURS) for dataset in DATASETS]
    settings = [_breakdown("Qwen3-32B", dataset, system) for dataset, system in cases]
    outcomes = runs(settings)
    rows, claims = [], []
    for (dataset, system), o in zip(cases, outcomes, strict=True):
        total = _total(o)
        rows.append(
            {
                "case": f"{dataset}, {system}",
                "queue %": 100 * o.queue_s / total,
                "load %": load_share(o),
                "execute %": 100 * o.execute_s / total,
                "store %": store_share(o),
                "stall % of TTFT": stall_share(o),
            }
        )
        is_theirs = system == SWIFTCACHE
        claims += [
            Claim(f"{dataset}, {system}: {what}", printed if is_theirs else "-", share(o), "5.4" if is_theirs else "")
            for what, printed, share in (
                ("loads, % of all phases", "below 1.4", load_share),
                ("stores, % of all phases", "below 1.1", store_share),
                ("waiting for KV, % of TTFT", "below 0.1", stall_share),
            )
        ]
    series = {
        phase: ([r["case"] for r in rows], [r[f"{phase} %"] for r in rows])
        for phase in ("queue", "load", "execute", "store")
    }
    headlines = [
        Headline(f"{dataset}: {what}", (s,), lambda o, share=share: share(o[0]))  # type: ignore[misc]
        for (dataset, _), s in zip(cases[:2], settings[:2], strict=True)
        for what, share in (("loads, %", load_share), ("stores, %", store_share), ("waiting, %", stall_share))
    ]
    return Result(
        "papers_swiftcache_fig10",
        "Fig. 10, phases of a prefill",
        "simulated",
        claims,
        points(settings, outcomes),
        [Panel("Qwen3-32B", "", "% of all phases", series, kind="bars")],
        rows,
        headlines,
        [change for change in CHANGES if not change[0].startswith(("two GPUs", "four GPUs", "half the device"))],
        notes="Copies as if nothing overlapped, but for the last column. Loads: copies to the device, and what "
        "prefills stream. Stores: whatever leaves the device. Sensitivity: SwiftCache.",
    )


def figure11(runs: Runs) -> Result:
    """How long loads and stores take: three models with SwiftCache, both data sets together."""
    settings = {model: [_breakdown(model, dataset) for dataset in DATASETS] for model in MASTERS}
    outcomes = {model: runs(some) for model, some in settings.items()}
    loads = {m: 1e3 * np.concatenate([o.loads_s for o in some]) for m, some in outcomes.items()}
    stores = {m: 1e3 * np.concatenate([o.stores_s for o in some]) for m, some in outcomes.items()}
    new = {m: 1e3 * np.concatenate([_new_kv_seconds(s) for s in some]) for m, some in settings.items()}
    rows = [
        {"model": m}
        | {
            f"{what} {rank}": value
            for what, each in (("loads", loads[m]), ("stores", stores[m]), ("new KV", new[m]))
            for rank, value in zip(
                ("p50 ms", "p99 ms"), percentiles(each.tolist(), 50, 99) if len(each) else (0.0, 0.0)
            )
        }
        | {"loads": len(loads[m]), "stores": len(stores[m])}
        for m in MASTERS
    ]
    last = rows[-1]
    claims = [
        Claim("Qwen3-32B: 99 % of loads, ms", "under 11", last["loads p99 ms"], "5.4"),
        Claim("Qwen3-32B: 99 % of stores, ms", "under 6", last["stores p99 ms"], "5.4"),
        Claim("the same, if only a prompt's new tokens are stored, ms", "under 6", last["new KV p99 ms"], "5.4"),
        Claim(
            "Qwen3-32B: ms for 20,000 tokens over NVLink",
            "-",
            1e3 * load_seconds(MODELS["Qwen3-32B"], H20X4.peer_link, DMA, 20_000, 1, num_runs=1),
            "cost model",
        ),
    ]
    panels = [
        Panel(what, "ms", "share of operations", {m: _cdf(each[m]) for m in MASTERS})
        for what, each in (("loads", loads), ("stores", stores))
    ]
    return Result(
        "papers_swiftcache_fig11",
        "Fig. 11, how long loads and stores take",
        "simulated",
        claims,
        [row for m, some in settings.items() for row in points(some, outcomes[m])],
        panels,
        rows,
        notes="Of every copy over NVLink while nothing else is on it; what a prefill streams is one. New KV is no "
        "run, but the cost model for every message.",
    )


def _new_kv_seconds(settings: ServingSettings) -> np.ndarray:
    """Of each request, what its message's KV takes over NVLink."""
    model = MODELS[settings.model]
    lengths = [len(turn.message) for talk in workload_of(settings).conversations for turn in talk.turns]
    return np.array([load_seconds(model, H20X4.peer_link, DMA, n, 1, num_runs=1) for n in lengths])


def _cdf(values: np.ndarray) -> tuple[list[float], list[float]]:
    return np.sort(values).tolist(), (np.arange(1, len(values) + 1) / max(1, len(values))).tolist()
