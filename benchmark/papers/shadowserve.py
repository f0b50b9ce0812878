"""ShadowServe's evaluation: figures 9 to 15, each a function from runs to a `Result`, and what ours adds.

What the paper prints stands beside each number with its section; docs/records/papers.md has what was predicted.
Request rates are ours: UNLOADED, so rare that requests do not meet, and ALL_AT_ONCE, which gives the peak and the
loaded TPOT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmark.papers.figures import Claim, Result
from benchmark.papers.plots import Panel
from benchmark.papers.runs import ALL_AT_ONCE, Runs, points
from benchmark.papers.sensitivity import Fragile, Headline, Setting
from benchmark.papers.shadowserve_runs import UNLOADED, RemoteOutcome, RemoteSettings
from benchmark.papers.shadowserve_size import GBPS
from benchmark.simulator.data_plane import Codec, smart_nic_stages
from benchmark.simulator.profiles import (
    CACHEGEN_SIZE,
    CHUNK_COMPRESSED_SHARE,
    CHUNK_QUANTIZED_SHARE,
    CHUNK_TOKENS,
    L40S_BLUEFIELD3,
    MODELS,
)

from benchmark.papers import shadowserve_size

OUTPUTS = (4, 8, 16, 32, 64, 128)
RATES = (UNLOADED, 0.5, 1.0, 2.0, 4.0, 6.0, ALL_AT_ONCE)
SS, CA = "ShadowServe", "CacheGen-Async"
_KV = CHUNK_TOKENS * MODELS["Llama-3.1-8B"].kv_bytes_per_token
# The settings' fields that a sensitivity table changes: what no microbenchmark in the paper pins.
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as usual", {}),
    ("12 MB per chunk", {"compressed": 12e6 / _KV}),
    ("15 MB per chunk (8-bit bins, Deflate gains 1.1)", {"compressed": 15e6 / _KV}),
    ("23 MB per chunk (what 502 ms would be)", {"compressed": 23e6 / _KV}),
    ("CacheGen's chunk as small as Deflate's", {"cachegen_size": 1.0}),
    ("CacheGen's chunk 1.5 times Deflate's", {"cachegen_size": 1.5}),
    ("the SmartNIC's network at 30 Gbit/s", {"network": 30.0}),
    ("GPU decompression costs 25 % on both sides", {"loss": 0.25}),
    ("GPU decompression costs 45 % on both sides", {"loss": 0.45}),
    ("matrices and attention at 0.5 of the peak", {"efficiency": 0.5}),
    ("matrices and attention at 0.8 of the peak", {"efficiency": 0.8}),
    ("half the device's capacity", {"device": 0.5}),
)

ASSUMED = f"Assumed: CacheGen's chunk is {CACHEGEN_SIZE} times ShadowServe's. The figure `size` has the range."


def _loaded(system: str, **changes: Any) -> RemoteSettings:
    return RemoteSettings(system, **changes)


def _unloaded(system: str, **changes: Any) -> RemoteSettings:
    """The first token does not depend on how many follow."""
    return RemoteSettings(system, **{**changes, "rate": UNLOADED, "output": 4})


def _tpot(outcomes: Sequence[RemoteOutcome]) -> float:
    return outcomes[0].mean_tpot_s / outcomes[1].mean_tpot_s


def _ttft(outcomes: Sequence[RemoteOutcome]) -> float:
    return outcomes[0].mean_ttft_s / outcomes[1].mean_ttft_s


def _throughput(outcomes: Sequence[RemoteOutcome]) -> float:
    return outcomes[0].requests_per_s / outcomes[1].requests_per_s


def _between(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def _ms(outcomes: Sequence[RemoteOutcome], name: str) -> str:
    return " / ".join(f"{1e3 * getattr(o, name):.0f}" for o in outcomes)


HEADLINES = (
    Headline("TTFT, CacheGen / ShadowServe, 20 Gbit/s", (_unloaded(CA), _unloaded(SS)), _ttft),
    Headline("TTFT, the same at 40", (_unloaded(CA, gbps=40.0), _unloaded(SS, gbps=40.0)), _ttft),
    Headline("loaded TPOT, CacheGen / ShadowServe", (_loaded(CA), _loaded(SS)), _tpot),
    Headline("peak, ShadowServe / CacheGen", (_loaded(SS), _loaded(CA)), _throughput),
    Headline("TTFT of ShadowServe, ms", (_unloaded(SS),), lambda o: 1e3 * o[0].mean_ttft_s),
)
FRAGILE = (
    Fragile(
        "CacheGen's chunk over ShadowServe's",
        HEADLINES[:4],
        Setting(f"{shadowserve_size.LEAST:.2f}", {"cachegen_size": shadowserve_size.LEAST}),
        Setting(f"{CACHEGEN_SIZE:.2f}", {}),
        Setting(f"{shadowserve_size.MOST:.2f}", {"cachegen_size": shadowserve_size.MOST}),
    ),
    Fragile(
        "a chunk of ShadowServe",
        # No source has less than the paper's own.
        HEADLINES,
        Setting("6 MB (6.3)", {}),
        Setting("6 MB (6.3)", {}),
        Setting("23 MB (what 502 ms would be)", {"compressed": 23e6 / _KV}),
    ),
)


# -- figures 9 to 12 ------------------------------------------------------------------------------------------------


def figure9(runs: Runs) -> Result:
    """Load against latency: Llama-8B, NarrativeQA, 32 tokens, 20 Gbit/s."""
    systems = (SS, CA, "vLLM", "raw")
    sweeps = {name: [RemoteSettings(name, rate=rate) for rate in RATES] for name in systems}
    runs([s for sweep in sweeps.values() for s in sweep])
    outcomes = {name: runs(sweep) for name, sweep in sweeps.items()}
    first = {name: o[0] for name, o in outcomes.items()}
    last = {name: o[-1] for name, o in outcomes.items()}

    def pair(of: dict[str, RemoteOutcome], name: str) -> str:
        return f"{1e3 * getattr(of[SS], name):.0f} / {1e3 * getattr(of[CA], name):.0f}"

    claims = [
        Claim("unloaded TTFT, ShadowServe / CacheGen-Async, ms", "502 / 601", pair(first, "mean_ttft_s"), "6.2.1"),
        Claim("the same, lower by %", "16", 100 * (1 - _ttft([first[SS], first[CA]])), "6.2.1"),
        Claim("loaded TPOT, ms", "41.8 / 52.0", pair(last, "mean_tpot_s"), "6.2.1"),
        Claim("the same, lower by %", "20", 100 * (1 - _tpot([last[SS], last[CA]])), "6.2.1"),
        Claim("peak, requests/s", "1.78 / 1.51", _between([last[n].requests_per_s for n in (SS, CA)]), "6.2.1"),
        Claim("the same, higher by %", "18", 100 * (_throughput([last[SS], last[CA]]) - 1), "6.2.1"),
        Claim("vLLM: unloaded TTFT ms", '"high latency"', 1e3 * first["vLLM"].mean_ttft_s, "6.2.1"),
        Claim("vLLM: peak, requests/s", "far below", last["vLLM"].requests_per_s, "6.2.1"),
        Claim(
            "raw: unloaded TTFT ms, peak",
            "-",
            f"{1e3 * first['raw'].mean_ttft_s:.0f}, {last['raw'].requests_per_s:.2f}",
            "",
        ),
        *shadowserve_size.claims_between_sources(runs),
    ]
    panels = [
        Panel(
            "Llama-8B, NarrativeQA",
            "requests/s",
            label,
            {name: ([x.requests_per_s for x in o], [getattr(x, field) for x in o]) for name, o in outcomes.items()},
            log_y=True,
        )
        for label, field in (("mean TTFT, s", "mean_ttft_s"), ("mean TPOT, s", "mean_tpot_s"))
    ]
    settings = [s for w in sweeps.values() for s in w]
    return _result("9", "load against latency", claims, settings, runs, panels, fragile=FRAGILE)


def headlines_only(number: str, runs: Runs) -> Result:
    """Of figure 9, without its points."""
    name, title = f"papers_shadowserve_fig{number}_headlines", f"Fig. {number}, load against latency"
    return Result(name, title, "simulated", (), (), (), headlines=HEADLINES, changes=CHANGES, fragile=FRAGILE)


def figure10(runs: Runs) -> Result:
    """Output lengths and bandwidths: Llama-8B, NarrativeQA."""
    loaded = {(n, out, g): _loaded(n, output=out, gbps=g) for n in (SS, CA) for out in OUTPUTS for g in GBPS}
    unloaded = {(n, g): _unloaded(n, gbps=g) for n in (SS, CA) for g in GBPS}
    settings = [*loaded.values(), *unloaded.values()]
    runs(settings)
    of = {key: runs([s])[0] for key, s in loaded.items()}
    ttft = [_ttft(runs([unloaded[CA, g], unloaded[SS, g]])) for g in GBPS]
    tpot = {out: [_tpot([of[CA, out, g], of[SS, out, g]]) for g in GBPS] for out in OUTPUTS}
    peak = {out: [_throughput([of[SS, out, g], of[CA, out, g]]) for g in GBPS] for out in OUTPUTS}
    every = [x for row in tpot.values() for x in row]
    low = [peak[out][i] for out in (4, 8) for i in (0, 1)]
    high = [peak[out][i] for out in (4, 8) for i in (2, 3)]
    long = [x for out in OUTPUTS if out >= 16 for x in peak[out]]
    claims = [
        Claim(
            "TPOT, CacheGen / ShadowServe, least and most",
            "1.06 to 2.19",
            _between([min(every), max(every)]),
            "6.2.2",
        ),
        *(
            Claim(f"the same, output {o}, at 10 / 20 / 30 / 40", p, _between(tpot[o]), "6.2.2")
            for o, p in ((4, "up to 2.19"), (16, "1.14 to 1.61"), (32, "1.24 at 20"), (128, "1.06 to 1.09"))
        ),
        Claim(
            "unloaded TTFT, CacheGen / ShadowServe, 10 / 20 / 30 / 40",
            "1.20 to 1.38 / 1.20 / 0.81 to 0.90 both",
            _between(ttft),
            "6.2.2",
        ),
        Claim(
            "peak, ShadowServe / CacheGen, 4 and 8 tokens, 10 and 20",
            "1.16 to 1.35",
            _between([min(low), max(low)]),
            "6.2.2",
        ),
        Claim("the same, 30 and 40", "0.83 to 0.91", _between([min(high), max(high)]), "6.2.2"),
        Claim("the same, 16 tokens and more", "1.01 to 1.34", _between([min(long), max(long)]), "6.2.2"),
    ]
    rows = [
        {"output": out}
        | {f"TPOT gain at {g:g}": x for g, x in zip(GBPS, tpot[out])}
        | {f"peak gain at {g:g}": x for g, x in zip(GBPS, peak[out])}
        for out in OUTPUTS
    ]
    panels = [
        Panel("ShadowServe over CacheGen-Async", "Gbit/s", what, {f"{o} tokens": (GBPS, gain[o]) for o in OUTPUTS})
        for what, gain in (("loaded TPOT, times lower", tpot), ("peak, times higher", peak))
    ]
    return _result("10", "output lengths and bandwidths", claims, settings, runs, panels, table=rows, headlines=())


def figure11(runs: Runs) -> Result:
    """Absolute values of figure 10."""
    loaded = {n: [_loaded(n, output=16, gbps=g) for g in GBPS] for n in (SS, CA)}
    unloaded = {n: [_unloaded(n, gbps=g) for g in GBPS] for n in (SS, CA)}
    settings = [s for some in (*loaded.values(), *unloaded.values()) for s in some]
    runs(settings)
    claims = [
        Claim(
            "loaded TPOT, 16 tokens, 10 / 20 / 30 / 40, CacheGen, ms",
            "36.5 … 61.8",
            _ms(runs(loaded[CA]), "mean_tpot_s"),
            "6.2.2",
        ),
        Claim("the same, ShadowServe", "32.1 … 38.5", _ms(runs(loaded[SS]), "mean_tpot_s"), "6.2.2"),
        Claim(
            "unloaded TTFT, CacheGen, ms",
            "falls to 40, by 11 % from 30",
            _ms(runs(unloaded[CA]), "mean_ttft_s"),
            "6.2.2",
        ),
        Claim("the same, ShadowServe", "about 500 from 20 on", _ms(runs(unloaded[SS]), "mean_ttft_s"), "6.2.2"),
    ]
    panels = [
        Panel(
            "Llama-8B, NarrativeQA",
            "Gbit/s",
            label,
            {n: (GBPS, [getattr(o, field) for o in runs(some[n])]) for n in (SS, CA)},
        )
        for label, some, field in (
            ("loaded TPOT, s", loaded, "mean_tpot_s"),
            ("unloaded TTFT, s", unloaded, "mean_ttft_s"),
        )
    ]
    return _result("11", "absolute values", claims, settings, runs, panels, headlines=())


def figure12(runs: Runs) -> Result:
    """Another data set and another model, 32 tokens."""
    cases = {"Llama-8B, TriviaQA": {"dataset": "TriviaQA"}, "Mistral-7B, NarrativeQA": {"model": "Mistral-7B"}}
    paper = {"Llama-8B, TriviaQA": "1.11 to 1.33", "Mistral-7B, NarrativeQA": "1.12 to 1.49"}
    settings = [
        make(n, gbps=g, **case)
        for case in cases.values()
        for g in GBPS
        for n in (SS, CA)
        for make in (_loaded, _unloaded)
    ]
    runs(settings)
    claims, rows = [], []
    for name, case in cases.items():
        tpot = [_tpot(runs([_loaded(CA, gbps=g, **case), _loaded(SS, gbps=g, **case)])) for g in GBPS]
        ttft = [_ttft(runs([_unloaded(CA, gbps=g, **case), _unloaded(SS, gbps=g, **case)])) for g in GBPS]
        peak = [_throughput(runs([_loaded(SS, gbps=g, **case), _loaded(CA, gbps=g, **case)])) for g in GBPS]
        at = ", 10 / 20 / 30 / 40"
        claims += [
            Claim(f"{name}: loaded TPOT, CacheGen / ShadowServe{at}", paper[name], _between(tpot), "6.2.3"),
            Claim(f"{name}: unloaded TTFT", "1.17 to 1.38, then 0.83 to 0.94", _between(ttft), "6.2.3"),
            Claim(f"{name}: peak, ShadowServe / CacheGen", "1.08 to 1.37", _between(peak), "6.2.3"),
        ]
        rows += [
            {"": name, "Gbit/s": g, "TPOT": a, "TTFT": b, "peak": c} for g, a, b, c in zip(GBPS, tpot, ttft, peak)
        ]
    series = {n: (GBPS, [r["TPOT"] for r in rows if r[""] == n]) for n in cases}
    panels = [Panel("32 tokens", "Gbit/s", "loaded TPOT, times lower", series)]
    return _result("12", "another model and data set", claims, settings, runs, panels, table=rows, headlines=())


# -- figures 13 to 15 -----------------------------------------------------------------------------------------------


def figure13(runs: Runs) -> Result:
    """Stages of the data plane: what the model was made of, and what follows for a chunk."""
    nic, codec = L40S_BLUEFIELD3.nic, Codec(CHUNK_QUANTIZED_SHARE, CHUNK_COMPRESSED_SHARE)
    assert nic is not None
    rows = []
    for kind, rates in (("alone", nic.alone), ("together", nic.together)):
        for stage in smart_nic_stages(rates, codec, float("inf")):
            rows.append(
                {
                    "stage": stage.name,
                    "": kind,
                    "Gbit/s": 8e-9 * rates[stage.name],
                    "ms per chunk": 1e3 * stage.seconds(_KV, False),
                }
            )
    slowest = {
        kind: max((r for r in rows if r[""] == kind), key=lambda r: r["ms per chunk"])["stage"]
        for kind in ("alone", "together")
    }
    taken = "6.3; the model is made of it"
    claims = [
        Claim("network together, Gbit/s", "20.6", 8e-9 * nic.together["network"], taken),
        Claim("bottleneck of a chunk, together", "network", slowest["together"], "6.3"),
        Claim("bottleneck of a chunk, alone", "network", slowest["alone"], "6.3"),
        Claim(
            "KV per second, together, Gbit/s",
            "-",
            8e-9 * _KV / max(r["ms per chunk"] / 1e3 for r in rows if r[""] == "together"),
            "",
        ),
    ]
    series = {
        kind: ([r["stage"] for r in rows if r[""] == kind], [r["ms per chunk"] for r in rows if r[""] == kind])
        for kind in ("alone", "together")
    }
    panel = Panel("256 tokens of Llama-3.1-8B", "", "ms per chunk", series, kind="bars")
    return Result(
        "papers_shadowserve_fig13", "Fig. 13, stages of the SmartNIC", "cost model", claims, rows, [panel], rows
    )


def figure14(runs: Runs) -> Result:
    """Ablations: 32 tokens."""
    parts = ("No AF", "No CP", "No MM")
    loaded = {n: [_loaded(n, gbps=g) for g in GBPS] for n in (SS, *parts)}
    unloaded = {n: [_unloaded(n, gbps=g) for g in GBPS] for n in (SS, *parts)}
    settings = [s for some in (*loaded.values(), *unloaded.values()) for s in some]
    runs(settings)

    def over(
        some: dict[str, list[RemoteSettings]], name: str, ratio: Callable[[Sequence[RemoteOutcome]], float]
    ) -> str:
        return _between([ratio([a, b]) for a, b in zip(runs(some[name]), runs(some[SS]))])

    at = ", 10 / 20 / 30 / 40"
    claims = [
        Claim(
            f"No AF: loaded TPOT over ShadowServe's{at}",
            "1.39 to 2.03, more at low",
            over(loaded, "No AF", _tpot),
            "6.4",
        ),
        Claim("No AF: unloaded TTFT", '"not affected"', over(unloaded, "No AF", _ttft), "6.4"),
        Claim("No CP: unloaded TTFT", "1.56 to 1.86", over(unloaded, "No CP", _ttft), "6.4"),
        Claim("No MM: unloaded TTFT", "6.96 to 11.73", over(unloaded, "No MM", _ttft), "6.4"),
        Claim("No CP: loaded TPOT", "0.86 to 0.88", over(loaded, "No CP", _tpot), "6.4"),
        Claim("No MM: loaded TPOT", "0.69 to 0.79", over(loaded, "No MM", _tpot), "6.4"),
        *(
            Claim(
                f"{n}: peak of ShadowServe over it",
                "1.2 to 4.5",
                _between([_throughput([a, b]) for a, b in zip(runs(loaded[SS]), runs(loaded[n]))]),
                "6.4",
            )
            for n in parts
        ),
    ]
    headlines = (
        Headline("No AF, TPOT at 20", (_loaded("No AF"), _loaded(SS)), _tpot),
        Headline("No CP, TTFT at 20", (_unloaded("No CP"), _unloaded(SS)), _ttft),
        Headline("No MM, TTFT at 20", (_unloaded("No MM"), _unloaded(SS)), _ttft),
    )
    changes = [c for c in CHANGES if not any(word in c[0] for word in ("CacheGen", "GPU dec"))]
    changes.append(("registering makes everything 10 times slower", {"slower": 10.0}))
    panels = [
        Panel(
            "Llama-8B, NarrativeQA",
            "Gbit/s",
            label,
            {n: (GBPS, [getattr(o, field) for o in runs(some[n])]) for n in (SS, *parts)},
        )
        for label, some, field in (
            ("loaded TPOT, s", loaded, "mean_tpot_s"),
            ("unloaded TTFT, s", unloaded, "mean_ttft_s"),
            ("peak, requests/s", loaded, "requests_per_s"),
        )
    ]
    return _result("14", "ablations", claims, settings, runs, panels, headlines=headlines, changes=changes)


def figure15(runs: Runs) -> Result:
    """Model computation in the default stream: 32 tokens, 20 Gbit/s. What the GPU does with priorities is not
    printed: taken as decoding that loses nothing, and decompression that loses twice as much."""
    names = (CA, f"{CA}-d", SS, f"{SS}-d")
    settings = [make(n) for n in names for make in (_loaded, _unloaded)]
    runs(settings)
    of = {n: runs([_loaded(n)])[0] for n in names}
    claims = [
        Claim("CacheGen-d over CacheGen, loaded TPOT", "0.65", _tpot([of[f"{CA}-d"], of[CA]]), "A"),
        Claim("the same, unloaded TTFT", "1.48", _ttft(runs([_unloaded(f"{CA}-d"), _unloaded(CA)])), "A"),
        Claim("CacheGen-d over ShadowServe, loaded TPOT", "0.80", _tpot([of[f"{CA}-d"], of[SS]]), "A"),
        Claim("the same, peak", "0.54", _throughput([of[f"{CA}-d"], of[SS]]), "A"),
        Claim("ShadowServe-d over ShadowServe, loaded TPOT", "0.92", _tpot([of[f"{SS}-d"], of[SS]]), "A"),
        Claim("the same, unloaded TTFT", "1.09", _ttft(runs([_unloaded(f"{SS}-d"), _unloaded(SS)])), "A"),
    ]
    series = {
        n: (["TPOT", "peak"], [of[n].mean_tpot_s / of[SS].mean_tpot_s, _throughput([of[n], of[SS]])]) for n in names
    }
    panel = Panel("32 tokens, 20 Gbit/s", "", "over ShadowServe's", series, kind="bars")
    return _result(
        "15", "streams", claims, settings, runs, [panel], headlines=(), notes=f"{figure15.__doc__} {ASSUMED}"
    )


# -- ours -----------------------------------------------------------------------------------------------------------

STEPS = (SS, "+ partial hits", "+ streaming", "+ SJF", "ours")


def ours(runs: Runs) -> Result:
    """What the engine adds to the paper: all at once, by network and by what storage has."""
    cases = [(stored, gbps) for stored in ("all", "mixed") for gbps in (2.0, 5.0, 10.0, 20.0)]
    settings = [_loaded(n, gbps=g, stored=stored) for stored, g in cases for n in STEPS]
    runs(settings)
    claims, rows = [], []
    for stored, g in cases:
        found = runs([_loaded(n, gbps=g, stored=stored) for n in STEPS])
        where = f"{stored}, {g:g} Gbit/s"
        for i, (name, o) in enumerate(zip(STEPS, found)):
            rows.append(
                {
                    "stored": stored,
                    "Gbit/s": g,
                    "": name,
                    "requests/s": o.requests_per_s,
                    "mean TTFT s": o.mean_ttft_s,
                    "TPOT ms": 1e3 * o.mean_tpot_s,
                    "fetched %": 100 * o.remote_share,
                    "cut": o.counters.get("fetches_cut", 0),
                }
            )
            if i:
                gain = f"{_throughput([o, found[i - 1]]):.2f}, {_ttft([o, found[i - 1]]):.2f}"
                claims.append(Claim(f"{where}: {name}, peak and mean TTFT over the step before", "-", gain, ""))
    panels = [
        Panel(
            f"storage has {stored}",
            "Gbit/s",
            "peak, requests/s",
            {
                n: (
                    [r["Gbit/s"] for r in rows if r[""] == n and r["stored"] == stored],
                    [r["requests/s"] for r in rows if r[""] == n and r["stored"] == stored],
                )
                for n in STEPS
            },
        )
        for stored in ("all", "mixed")
    ]
    return _result(
        "ours",
        "what partial hits, streaming, SJF and recomputing add",
        claims,
        settings,
        runs,
        panels,
        table=rows,
        headlines=(),
    )


def _result(
    number: str,
    title: str,
    claims: Sequence[Claim],
    settings: Sequence[RemoteSettings],
    runs: Runs,
    panels: Sequence[Panel],
    **changed: Any,
) -> Result:
    """changed: further fields of the `Result`."""
    name = f"Fig. {number}, {title}" if number.isdigit() else title.capitalize()
    unique = list(dict.fromkeys(settings))
    rows = points(unique, runs(unique))
    file = f"papers_shadowserve_fig{number}" if number.isdigit() else f"papers_shadowserve_{number}"
    notes = ASSUMED if any(s.system.startswith(CA) for s in unique) else ""
    more = {"headlines": HEADLINES, "changes": CHANGES, "notes": notes} | changed
    return Result(file, name, "simulated", claims, rows, panels, **more)


FIGURES: dict[str, Callable[[Runs], Result]] = {
    "9": figure9,
    "10": figure10,
    "11": figure11,
    "12": figure12,
    "13": figure13,
    "14": figure14,
    "15": figure15,
    "size": shadowserve_size.figure,
    "ours": ours,
}
