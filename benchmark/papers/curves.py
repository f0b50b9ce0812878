"""Throughput against time to first token: what a system reaches at a TTFT, and how two compare. Pure functions.

A curve is a sequence of (throughput, mean TTFT in seconds), in order of rising request rate. Between neighbours it is
taken as a straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Curve = Sequence[tuple[float, float]]


def throughput_at(curve: Curve, ttft_s: float) -> float | None:
    """The highest throughput at a TTFT of at most ttft_s; None if the curve is never that fast. A system that would
    be faster than that even when saturated gives its peak."""
    reached = [x for x, t in curve if t <= ttft_s]
    for (x0, t0), (x1, t1) in pairwise(curve):
        if min(t0, t1) <= ttft_s < max(t0, t1):
            reached.append(x0 + (x1 - x0) * (ttft_s - t0) / (t1 - t0))
    return max(reached, default=None)


def largest_ratio(ours: Curve, theirs: Curve) -> tuple[float, float]:
    """The largest ratio of throughputs at equal TTFT, and that TTFT in seconds: the paper's "up to". Looked at are
    the TTFTs of all points, as far as both systems get down to them. It depends on the rates: where the slower one
    comes down only at its lowest rate, that rate is what the other is divided by. `peak_ratio` does not."""
    ratios = []
    for ttft_s in sorted({t for curve in (ours, theirs) for _, t in curve}):
        mine, other = throughput_at(ours, ttft_s), throughput_at(theirs, ttft_s)
        if mine is not None and other is not None:
            ratios.append((mine / other, ttft_s))
    return max(ratios)


def peak_ratio(ours: Curve, theirs: Curve) -> float:
    return max(x for x, _ in ours) / max(x for x, _ in theirs)
