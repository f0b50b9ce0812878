"""ShadowServe's headlines over the size of CacheGen's chunk, which the paper does not print.

Owns what is known of that size, `SOURCES`, and the figure `size`. Each headline is a line over the size, and its
claim names the size at which the two systems are equal. All headlines are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from benchmark.papers.figures import Claim, Result
from benchmark.papers.plots import Panel
from benchmark.papers.runs import ALL_AT_ONCE, Runs, points
from benchmark.papers.shadowserve_runs import UNLOADED, RemoteSettings
from benchmark.simulator.profiles import CACHEGEN_SIZE, CHUNK_COMPRESSED_SHARE, CHUNK_QUANTIZED_SHARE

SHADOWSERVE, CACHEGEN = "ShadowServe", "CacheGen-Async"
GBPS = (10.0, 20.0, 30.0, 40.0)
# Simulated sizes, between which a headline is interpolated.
SIZES = (0.55, 0.65, 0.8, 1.0, 1.1, CACHEGEN_SIZE, 1.4, 1.6, 1.8)


@dataclass(frozen=True)
class Source:
    """A reason for a size: CacheGen's chunk over the 6 MB of ShadowServe's."""

    name: str
    least: float
    most: float


_EIGHT_BITS = CHUNK_QUANTIZED_SHARE / CHUNK_COMPRESSED_SHARE
SOURCES = (
    # benchmark/bench_chunk_size.py: one KV under both coders. LMCache stores the tables in each chunk.
    Source("LMCache, no tables (measured)", 0.57, 0.74),
    # CacheGen's abstract: "3.5-4.3x" smaller than systems that reuse KV. Assumed: those keep 8 bits.
    Source("CacheGen: 3.5-4.3 below 8 bits", _EIGHT_BITS / 4.3, _EIGHT_BITS / 3.5),
    # binned, cachegen: 5.39 on synthetic KV and 4.42 on SmolLM2's. Its coder is Deflate.
    Source("its bins, Deflate (measured)", 1 / 5.39 / CHUNK_COMPRESSED_SHARE, 1 / 4.42 / CHUNK_COMPRESSED_SHARE),
    # 6.2.1: Deflate has "a better compression ratio".
    Source("ShadowServe: more than 1", 1.0, SIZES[-1]),
    # 6.2.2, up to 20 Gbit/s. Assumed: nothing but the network takes time.
    Source("ShadowServe: TTFT 1.20-1.38", 1.20, 1.38),
    Source("LMCache, tables (measured)", 1.27, 1.31),
)
# What has a bound on both sides.
LEAST, MOST = min(s.least for s in SOURCES), max(s.most for s in SOURCES if s.most < SIZES[-1])


@dataclass(frozen=True)
class Line:
    """A headline: CacheGen's field over ShadowServe's, or the inverse where more is better."""

    name: str
    field: str
    gbps: float
    rate: float
    more_is_better: bool = False

    def settings(self, size: float) -> tuple[RemoteSettings, RemoteSettings]:
        """Of CacheGen with this size, and of ShadowServe. The first token does not depend on how many follow."""
        output = 4 if self.rate == UNLOADED else 32
        cachegen = RemoteSettings(CACHEGEN, gbps=self.gbps, output=output, rate=self.rate, cachegen_size=size)
        return cachegen, RemoteSettings(SHADOWSERVE, gbps=self.gbps, output=output, rate=self.rate)

    def values(self, runs: Runs, sizes: Sequence[float] = SIZES) -> list[float]:
        found = []
        for size in sizes:
            cachegen, shadowserve = (getattr(o, self.field) for o in runs(self.settings(size)))
            found.append(shadowserve / cachegen if self.more_is_better else cachegen / shadowserve)
        return found


TTFT = {g: Line(f"TTFT, {g:g} Gbit/s", "mean_ttft_s", g, UNLOADED) for g in GBPS}
TPOT = Line("loaded TPOT", "mean_tpot_s", 20.0, ALL_AT_ONCE)
PEAK = Line("peak (inverse)", "requests_per_s", 20.0, ALL_AT_ONCE, more_is_better=True)


def size_at(values: Sequence[float], level: float = 1.0, sizes: Sequence[float] = SIZES) -> float | None:
    """The size at which a headline rises through level. None if no size does that."""
    for (a, b), (x, y) in zip(pairwise(sizes), pairwise(values)):
        if x < level <= y:
            return a + (b - a) * (level - x) / (y - x)
    return None


def described(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def claims_between_sources(runs: Runs) -> list[Claim]:
    """Three headlines at the least and the most size that a source gives."""
    lines = ((TTFT[20.0], "1.20"), (TPOT, "1.24"), (PEAK, "1.18"))
    return [
        Claim(
            f"CacheGen / ShadowServe, {line.name}, sizes {LEAST:.2f} to {MOST:.2f}",
            paper,
            " to ".join(f"{value:.2f}" for value in line.values(runs, (LEAST, MOST))),
            "6.2.1",
        )
        for line, paper in lines
    ]


def figure(runs: Runs) -> Result:
    """Llama-8B, NarrativeQA; TPOT and peak with 32 tokens and 20 Gbit/s."""
    lines = [*TTFT.values(), TPOT, PEAK]
    settings = list(dict.fromkeys(s for line in lines for size in SIZES for s in line.settings(size)))
    runs(settings)
    values = {line.name: line.values(runs) for line in lines}
    ttft = {g: values[line.name] for g, line in TTFT.items()}
    equal = size_at(ttft[20.0])
    claims = [
        Claim(
            "equal unloaded TTFT at a size of, 10 / 20 / 30 / 40 Gbit/s",
            "its own lies above the first two, below the others",
            " / ".join(described(size_at(ttft[g])) for g in GBPS),
            "6.2.2",
        ),
        Claim("TTFT of 1.20 at 20 Gbit/s, at a size of", "-", described(size_at(ttft[20.0], 1.20)), "6.2.1"),
        Claim("TTFT of 1.38 at 10 Gbit/s, at a size of", "-", described(size_at(ttft[10.0], 1.38)), "6.2.2"),
        *(
            Claim(f"{line.name}, all sizes", paper, _range(values[line.name]), "6.2.1")
            for line, paper in ((TPOT, "1.24"), (PEAK, "1.18"))
        ),
        *claims_between_sources(runs),
    ]
    table = [{"size": size} | {name: found[i] for name, found in values.items()} for i, size in enumerate(SIZES)]
    mark = None if equal is None else (f"TTFT equal: {equal:.2f}", equal)
    axis = "CacheGen's chunk over ShadowServe's"
    panels = [
        Panel(
            "unloaded TTFT, and the size at which both are equal",
            axis,
            "CacheGen over ShadowServe",
            {f"{g:g} Gbit/s: {described(size_at(ttft[g]))}": (SIZES, ttft[g]) for g in GBPS},
            level=1.0,
            mark=mark,
        ),
        Panel(
            "20 Gbit/s, 32 tokens, all at once",
            axis,
            "CacheGen over ShadowServe",
            {line.name: (SIZES, values[line.name]) for line in (TPOT, PEAK)},
            level=1.0,
            mark=mark,
        ),
        Panel(
            "where a size comes from",
            axis,
            "",
            {source.name: ((source.least, source.most), ()) for source in SOURCES},
            kind="ranges",
            mark=mark,
        ),
    ]
    rows = points(settings, runs(settings))
    notes = " ".join(
        f"{source.name}: {source.least:.2f} to {source.most:.2f}, TTFT at 20 Gbit/s "
        + _range(np.interp((source.least, source.most), SIZES, ttft[20.0]).tolist())
        + " (simulated)."
        for source in SOURCES
    )
    title = "CacheGen over ShadowServe, by the size of CacheGen's chunk (above 1: ShadowServe is better)"
    return Result("papers_shadowserve_size", title, "simulated", claims, rows, panels, table, notes=notes)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
