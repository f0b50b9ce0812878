"""What a trace of single prompts is like, and the generator that is as much like it as a few numbers allow.

    python -m benchmark.simulator.trace_statistics --fit FILE --check FILE [--seeds 3]

Measures both files, fits `ReuseSpec` to the first, and compares hits per capacity: generated beside its own trace,
beside the other one, and with the other's lengths and shares but the first one's lags, which is what a reuse distance
fitted on one trace is worth on another. Stack distances are those of `hicache advise` (`sglang.cli.reuse`). Reads the
form of Mooncake's traces, which have no text. Runs no engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmark.common import print_table, write_json
from benchmark.simulator.traces import read_prompts
from benchmark.simulator.workloads import BLOCK, Lengths, Prompt, ReuseSpec

from sglang.cli.reuse import HitCurve, ReferenceLog

WINDOW_S = 60.0
# Tokens of caches, from a fraction of a GPU's to more than both traces have.
CAPACITIES = tuple(2.0**i * 1e6 for i in range(-2, 8))


@dataclass(frozen=True)
class TraceStatistics:
    num_requests: int
    rate: float
    # Variance over mean of the requests in a minute.
    dispersion: float
    input: Lengths
    longest: int
    output: Lengths
    # Share of the distinct blocks that one request uses.
    used_once: float
    # Blocks that nearly every prompt begins with.
    num_common: int
    # Of the requests, those that the most popular tenth of all beginnings has.
    popular: float
    # As in `ReuseSpec`.
    single: float
    continued: float
    single_input: Lengths
    first_input: Lengths
    added: Lengths
    whole: float
    kept_mean: float
    kept_sd: float
    lag_median: float
    lag_sigma: float


def measure(prompts: Sequence[Prompt]) -> TraceStatistics:
    """prompts: by time."""
    starts = np.array([p.start for p in prompts])
    lengths = np.array([p.input_len for p in prompts])
    outputs = np.array([p.output_len for p in prompts])
    sizes = np.array([len(p.blocks) for p in prompts])
    _, uses = np.unique(np.concatenate([p.blocks for p in prompts]), return_counts=True)
    common = _num_common(prompts)
    found, sources = _reuse(prompts)
    goes_on = found > common
    assert goes_on.any(), "no request goes on from another: there is nothing to fit"
    is_source = np.isin(np.arange(len(prompts)), sources[goes_on])
    lags = np.log(np.arange(len(prompts)) - sources)[goes_on]
    whole = found >= sizes[sources] - 1
    kept = (found / sizes[sources])[goes_on & ~whole]
    span = float(starts[-1] - starts[0])
    return TraceStatistics(
        num_requests=len(prompts),
        rate=(len(prompts) - 1) / span if span else float("inf"),
        dispersion=dispersion(starts - starts[0]),
        input=_lengths(lengths),
        longest=int(lengths.max()),
        output=_lengths(outputs),
        used_once=float((uses == 1).mean()),
        num_common=common,
        popular=_popular(prompts, common),
        single=float((~goes_on & ~is_source).mean()),
        continued=float(goes_on.mean()),
        single_input=_lengths(lengths[~goes_on & ~is_source]),
        first_input=_lengths(lengths[~goes_on & is_source]),
        added=_lengths(np.maximum(1, lengths - BLOCK * found)[goes_on]),
        whole=float(whole[goes_on].mean()),
        kept_mean=float(kept.mean()) if len(kept) else 0.5,
        kept_sd=float(kept.std()) if len(kept) > 1 else 0.25,
        lag_median=float(np.exp(np.median(lags))),
        lag_sigma=float(lags.std()),
    )


def dispersion(times: np.ndarray, window_s: float = WINDOW_S) -> float:
    """Variance over mean of the events in whole windows from 0; 1 for a Poisson process."""
    counts = np.bincount((times // window_s).astype(np.int64))[:-1]
    return float(counts.var() / counts.mean()) if len(counts) > 1 else 1.0


def _lengths(lengths: np.ndarray) -> Lengths:
    return (
        Lengths(float(lengths.mean()), float(lengths.std() / lengths.mean())) if len(lengths) else Lengths(1.0, 0.0)
    )


def _num_common(prompts: Sequence[Prompt]) -> int:
    """Blocks that nearly every prompt begins with; a few requests of a service are always of another kind."""
    n = 0
    while True:
        here = [int(p.blocks[n]) for p in prompts if len(p.blocks) > n]
        if len(here) < 0.9 * len(prompts) or max(np.unique(here, return_counts=True)[1]) < 0.9 * len(prompts):
            return n
        n += 1


def _popular(prompts: Sequence[Prompt], common: int) -> float:
    beginnings = [int(p.blocks[min(common, len(p.blocks) - 1)]) for p in prompts]
    counts = np.sort(np.unique(beginnings, return_counts=True)[1])[::-1]
    return float(counts[: max(1, len(counts) // 10)].sum() / counts.sum())


def _reuse(prompts: Sequence[Prompt]) -> tuple[np.ndarray, np.ndarray]:
    """(n,) each: blocks that an endless cache finds, and the request that used the deepest of them last; -1: none."""
    last: dict[int, int] = {}
    found, sources = np.zeros(len(prompts), np.int64), np.full(len(prompts), -1)
    for i, prompt in enumerate(prompts):
        blocks = prompt.blocks.tolist()
        while found[i] < len(blocks) and blocks[found[i]] in last:
            found[i] += 1
        if found[i]:
            sources[i] = last[blocks[found[i] - 1]]
        last.update(dict.fromkeys(blocks, i))
    return found, sources


def fit(statistics: TraceStatistics, name: str) -> ReuseSpec:
    """The numbers that both have in common."""
    known = vars(statistics)
    return ReuseSpec(name, **{f.name: known[f.name] for f in fields(ReuseSpec) if f.name in known})


def curve_of(prompts: Sequence[Prompt]) -> HitCurve:
    """Hits by capacity. A cut last block counts as what is in it, and an answer as cached and never asked for."""
    log = ReferenceLog()
    numbers: dict[tuple[int, int], int] = {}
    for i, prompt in enumerate(prompts):
        sizes = np.full(len(prompt.blocks), BLOCK, np.int64)
        sizes[-1] = prompt.input_len - BLOCK * (len(sizes) - 1)
        keys = zip(prompt.blocks.tolist(), sizes.tolist(), strict=True)
        path = [numbers.setdefault(key, len(numbers)) for key in keys]
        answer = numbers.setdefault((-1 - i, 0), len(numbers))
        log.add_request(prompt.input_len, prompt.input_len)
        log.use([*path, answer], [*sizes.tolist(), prompt.output_len], len(path))
    return log.curve()


def shares(curve: HitCurve) -> np.ndarray:
    """Percent of the prompt tokens that a cache of each capacity finds."""
    return np.array([100 * curve.hits(size) / curve.prompt_tokens for size in CAPACITIES])


def compare(first: Path, second: Path, num_seeds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of statistics, and of curves with their distance from the trace's, in percentage points."""
    traces = {path.name.split(".")[0]: read_prompts(path) for path in (first, second)}
    (a, b), (of_a, of_b) = traces, (measure(prompts) for prompts in traces.values())
    real = {name: shares(curve_of(prompts)) for name, prompts in traces.items()}
    moved = replace(fit(of_b, "moved"), lag_median=of_a.lag_median, lag_sigma=of_a.lag_sigma)
    cases = (
        (f"fitted on {a}", fit(of_a, a), a),
        (f"fitted on {a}", fit(of_a, a), b),
        (f"{b} with the lags of {a}", moved, b),
        (f"fitted on {b}", fit(of_b, b), b),
    )
    statistics = [{"of": a, **vars(of_a)}, {"of": b, **vars(of_b)}]
    rows = [_row(name, "-", own) for name, own in real.items()]
    generated: dict[ReuseSpec, np.ndarray] = {}
    for label, spec, beside in cases:
        if spec not in generated:
            made = [spec.prompts(seed) for seed in range(num_seeds)]
            generated[spec] = np.mean([shares(curve_of(prompts)) for prompts in made], axis=0)
            statistics.append({"of": label, **vars(measure(made[0]))})
        away = np.abs(generated[spec] - real[beside])
        row = _row(f"generated, {label}", beside, generated[spec])
        rows.append(row | {"mean distance": away.mean(), "most": away.max()})
    return statistics, rows


def _row(name: str, beside: str, own: np.ndarray) -> dict[str, Any]:
    sizes = {f"{size / 1e6:g} M": round(float(share), 1) for size, share in zip(CAPACITIES, own, strict=True)}
    return {"": name, "beside": beside, **sizes, "mean distance": None, "most": None}


def _shown(value: Any) -> Any:
    return f"{value.mean:,.0f}, CV {value.cv:.2f}" if isinstance(value, Lengths) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, required=True, help="a trace in Mooncake's form")
    parser.add_argument("--check", type=Path, required=True, help="another")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    statistics, rows = compare(args.fit, args.check, args.seeds)
    columns = [str(row["of"]) for row in statistics]
    names = [name for name in statistics[0] if name != "of"]
    table = [{"": n, **{c: _shown(row[n]) for c, row in zip(columns, statistics, strict=True)}} for n in names]
    print_table("Statistics of traces, and of what is generated (seed 0)", table)
    print_table("Percent of prompt tokens found, by tokens of the cache (stack distances)", rows)
    write_json("trace_statistics", {"fit": args.fit.name, "check": args.check.name, "seeds": args.seeds}, rows)


if __name__ == "__main__":
    main()
