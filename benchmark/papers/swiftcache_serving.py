"""SwiftCache's figures 7, 10 and 11, from the scheduler with a peer tier on the simulator, and 8, a cost model.

What the paper prints stands beside each number with its section; docs/records/papers.md has what was predicted.
The paper's request rates cannot be read from its figures: RATES are ours.
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
from benchmark.papers.sensitivity import Headline
from benchmark.papers.swiftcache_runs import COMPARED, DATASETS, MASTERS, ServingOutcome, ServingSettings, workload_of
from benchmark.simulator.cost_models import DMA, Gpu, ModelShape, load_seconds, pass_cost
from benchmark.simulator.profiles import H20X4, MODELS

# Requests per second: few at once, and about half of what decoding permits with whole contexts on the device.
RATES = {
    "ShareGPT": {"LWM-7B": (0.1, 0.3), "Qwen3-14B": (0.4, 1.0), "Qwen3-32B": (0.05, 0.15)},
    "L-Eval": {"LWM-7B": (0.4, 1.0), "Qwen3-14B": (1.0, 3.0), "Qwen3-32B": (0.2, 0.5)},
}
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


def _usual(system: str) -> ServingSettings:
    return ServingSettings(system, "Qwen3-14B", "L-Eval", RATES["L-Eval"]["Qwen3-14B"][0])


HEADLINES = (
    Headline("below HiCache, %", (_usual(SWIFTCACHE), _usual(HICACHE)), reduction),
    Headline("below LMCache, %", (_usual(SWIFTCACHE), _usual(LMCACHE)), reduction),
    Headline("below HiCache with kernels, %", (_usual(SWIFTCACHE), _usual("SGLang (HiCache, kernels)")), reduction),
    Headline("ours below SwiftCache, %", (_usual(OURS), _usual(SWIFTCACHE)), reduction),
)
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as usual", {}),
    ("two GPUs load from the host at once", {"sharers": 2}),
    ("four GPUs load from the host at once", {"sharers": 4}),
    ("conversations fill 0.6 of the least tier", {"working_set": 0.6}),
    ("conversations fill 1.1 of it", {"working_set": 1.1}),
    ("conversations fill 1.5 of it", {"working_set": 1.5}),
    ("workers lend as many tokens more as the device has", {"lend_device": True}),
    ("workers lend half", {"lent": 0.5}),
    ("half the device's capacity", {"device": 0.5}),
    ("matrices and attention at 0.5 of the peak", {"efficiency": 0.5}),
    ("half the answers' lengths", {"answers": 0.5}),
    ("twice the answers' lengths", {"answers": 2.0}),
    ("another seed", {"seed": 2}),
    ("yet another", {"seed": 3}),
)


def figure7(runs: Runs) -> Result:
    """P99 TTFT: three masters, two data sets, two rates each."""
    cases = [(dataset, model, rate) for dataset in DATASETS for model in MASTERS for rate in RATES[dataset][model]]
    settings = {case: [ServingSettings(name, case[1], case[0], case[2]) for name in COMPARED] for case in cases}
    runs([s for some in settings.values() for s in some])
    found = {case: dict(zip(COMPARED, runs(some), strict=True)) for case, some in settings.items()}
    claims, rows = [], []
    for dataset in DATASETS:
        for better, other in ((SWIFTCACHE, HICACHE), (SWIFTCACHE, LMCACHE), (OURS, SWIFTCACHE), (OURS, HICACHE)):
            cuts = [reduction((o[better], o[other])) for case, o in found.items() if case[0] == dataset]
            printed = f"about {FIG7_PRINTED[dataset, other]}" if better == SWIFTCACHE else "-"
            claims.append(
                Claim(
                    f"{dataset}: P99 TTFT, {better} below {other}, %",
                    printed,
                    f"{np.mean(cuts):.0f} ({min(cuts):.0f} to {max(cuts):.0f})",
                    "5.1; of which model and rate it does not say" if printed != "-" else "",
                )
            )
    for (dataset, model, rate), outcomes in found.items():
        rows.append(
            {"dataset": dataset, "master": model, "requests/s": rate}
            | {f"{name}, P99 s": o.p99_ttft_s for name, o in outcomes.items()}
            | {
                f"{name}, hits %": " / ".join(f"{100 * r:.0f}" for r in o.hit_rates.values())
                for name, o in outcomes.items()
            }
        )
    panels = [
        Panel(
            f"{model}, {dataset}",
            "requests/s",
            "P99 TTFT, s",
            {
                name: (
                    list(RATES[dataset][model]),
                    [found[dataset, model, r][name].p99_ttft_s for r in RATES[dataset][model]],
                )
                for name in COMPARED
            },
            log_y=True,
        )
        for dataset in DATASETS
        for model in MASTERS
    ]
    return Result(
        "papers_swiftcache_fig7",
        "Fig. 7, P99 TTFT",
        "simulated",
        claims,
        [row for case, some in settings.items() for row in points(some, list(found[case].values()))],
        panels,
        rows,
        HEADLINES,
        CHANGES,
        notes="Hits: device / peer / host. Mean over masters and rates, in brackets the least and the most. 100 "
        "requests per run, so P99 is the second slowest. Sensitivity: Qwen3-14B, L-Eval, 1 request per second.",
    )


# -- figure 8 -------------------------------------------------------------------------------------------------------

# Master, its inputs, its workers, and the printed increases of a worker's TTFT and TPOT, in percent (5.2: "Qwen3-14B
# as the worker", "Qwen3-32B as the worker"; and of Qwen3-32B as the master, whose worker it does not name).
FIG8 = (
    ("LWM-7B", (16_384, 32_768, 65_536), (("Qwen3-14B", 9.7, 6.5), ("Qwen3-32B", 7.9, 6.4))),
    ("Qwen3-32B", (16_384, 32_768, 40_960), (("LWM-7B", 7.7, 5.6), ("Qwen3-14B", 7.7, 5.6))),
)


def figure8(runs: Runs) -> Result:
    """What a worker loses while a master reads from its memory, and writes to it."""
    rows: list[dict[str, Any]] = []
    for master, lengths, workers in FIG8:
        rate = max(RATES[dataset][master][-1] for dataset in DATASETS)
        for length in lengths:
            busy_s = rate * load_seconds(MODELS[master], H20X4.peer_link, DMA, length, 1, num_runs=1)
            for worker, _, _ in workers:
                row: dict[str, Any] = {
                    "master": master,
                    "tokens": length,
                    "worker": worker,
                    "link busy %": 100 * min(1.0, busy_s),
                }
                for said, wires in (("reads", 1), ("reads and writes", 2)):
                    traffic = wires * H20X4.peer_link.wire
                    row |= {
                        f"TTFT +%, {said}": _slower(MODELS[worker], length, False, traffic),
                        f"TPOT +%, {said}": _slower(MODELS[worker], length, True, traffic),
                    }
                row["TPOT +%, reads, as busy"] = row["TPOT +%, reads"] * min(1.0, busy_s)
                rows.append(row)
    claims = [
        Claim(
            "a peer's reads, % of what HBM gives",
            '"a negligible fraction"',
            100 * H20X4.peer_link.wire / (H20X4.gpu.hbm_bytes_per_s * H20X4.gpu.hbm_efficiency),
            "5.2",
        )
    ]
    for master, _, workers in FIG8:
        for worker, ttft, tpot in workers:
            some = [r for r in rows if (r["master"], r["worker"]) == (master, worker)]
            for what, printed in (("TTFT", ttft), ("TPOT", tpot)):
                most = [max(r[f"{what} +%, {said}"] for r in some) for said in ("reads", "reads and writes")]
                claims.append(
                    Claim(
                        f"{worker} beside {master}, {what}, +% while it reads / and writes",
                        f"up to {printed}",
                        " / ".join(f"{each:.1f}" for each in most),
                        "5.2" if master == "LWM-7B" else "5.2; the worker is not named",
                    )
                )
    series = {
        f"{what}, {said}": (
            [f"{r['worker']} by {r['master']}" for r in rows if r["tokens"] == 16_384],
            [r[f"{what} +%, {said}"] for r in rows if r["tokens"] == 16_384],
        )
        for what in ("TTFT", "TPOT")
        for said in ("reads", "reads and writes")
    }
    return Result(
        "papers_swiftcache_fig8",
        "Fig. 8, what workers lose",
        "cost model",
        claims,
        rows,
        [Panel("16,384 tokens", "", "% slower", series, kind="bars")],
        rows,
        notes="A bound: the link never rests, all of it goes to one worker, and copies come first at the memory. The "
        "last column rests as the link does at the highest rate of figure 7. Compute and the prefill's schedule lose "
        "nothing; what reclaiming memory takes is not in it.",
    )


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


def _breakdown(model: str, dataset: str) -> ServingSettings:
    return ServingSettings(SWIFTCACHE, model, dataset, RATES[dataset][model][0])


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
    """Phases of a prefill: Qwen3-32B with SwiftCache."""
    settings = [_breakdown("Qwen3-32B", dataset) for dataset in DATASETS]
    outcomes = runs(settings)
    rows, claims = [], []
    for dataset, o in zip(DATASETS, outcomes, strict=True):
        total = _total(o)
        rows.append(
            {
                "dataset": dataset,
                "queue %": 100 * o.queue_s / total,
                "load %": load_share(o),
                "execute %": 100 * o.execute_s / total,
                "store %": store_share(o),
                "stall % of TTFT": stall_share(o),
            }
        )
        claims += [
            Claim(f"{dataset}: loads, % of all phases", "below 1.4", load_share(o), "5.4"),
            Claim(f"{dataset}: stores, % of all phases", "below 1.1", store_share(o), "5.4"),
            Claim(f"{dataset}: waiting for KV, % of TTFT", "below 0.1", stall_share(o), "5.4"),
        ]
    series = {
        phase: (list(DATASETS), [r[f"{phase} %"] for r in rows]) for phase in ("queue", "load", "execute", "store")
    }
    headlines = [
        Headline(f"{dataset}: {what}", (s,), lambda o, share=share: share(o[0]))  # type: ignore[misc]
        for dataset, s in zip(DATASETS, settings, strict=True)
        for what, share in (("loads, %", load_share), ("stores, %", store_share), ("waiting, %", stall_share))
    ]
    return Result(
        "papers_swiftcache_fig10",
        "Fig. 10, phases of a prefill",
        "simulated",
        claims,
        points(settings, outcomes),
        [Panel("Qwen3-32B, SwiftCache", "", "% of all phases", series, kind="bars")],
        rows,
        headlines,
        [change for change in CHANGES if not change[0].startswith(("two GPUs", "four GPUs", "half the device"))],
        notes="Copies as if nothing overlapped, but for the last column. Stores: whatever leaves the device.",
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
        notes="Of every copy over NVLink while nothing else is on it. New KV is no run, but the cost model for every "
        "message.",
    )


def _new_kv_seconds(settings: ServingSettings) -> np.ndarray:
    """Of each request, what its message's KV takes over NVLink."""
    model = MODELS[settings.model]
    lengths = [len(turn.message) for talk in workload_of(settings).conversations for turn in talk.turns]
    return np.array([load_seconds(model, H20X4.peer_link, DMA, n, 1, num_runs=1) for n in lengths])


def _cdf(values: np.ndarray) -> tuple[list[float], list[float]]:
    return np.sort(values).tolist(), (np.arange(1, len(values) + 1) / max(1, len(values))).tolist()
