"""What workloads are drawn from: times, lengths, and numbers that stand for tokens. Pure functions of a generator.

The simulator's workloads (`benchmark/simulator`) draw from the same functions.
"""

from __future__ import annotations

import numpy as np


def poisson_times(rng: np.random.Generator, n: int, rate: float) -> np.ndarray:
    """n times of a Poisson process, in seconds; an infinite rate: all at 0."""
    if np.isinf(rate):
        return np.zeros(n)
    return np.cumsum(rng.exponential(1 / rate, n))


def bursty_times(
    rng: np.random.Generator, n: int, rate: float, dispersion: float, window_s: float = 60.0
) -> np.ndarray:
    """n times, in seconds, of a Poisson process whose rate is drawn anew for every window, from a gamma distribution.
    dispersion: variance over mean of the events in a window; at most 1: a Poisson process of one rate."""
    if dispersion <= 1:
        return poisson_times(rng, n, rate)
    mean = rate * window_s
    shape = mean / (dispersion - 1)
    times = np.empty(0)
    window = 0
    while len(times) < n:
        num_events = rng.poisson(rng.gamma(shape, mean / shape))
        times = np.append(times, np.sort(window + rng.random(num_events)) * window_s)
        window += 1
    return times[:n]


def lengths_with_mean(
    rng: np.random.Generator,
    n: int,
    mean: float,
    cv: float,
    longest: int | None = None,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """n log-normal lengths of at least 1, scaled so that their (weighted) mean is `mean`. cv: before scaling."""
    if mean < 1:
        raise ValueError(f"a mean length of {mean:.1f} tokens is below 1")
    sigma = np.sqrt(np.log(1 + cv * cv))
    raw = rng.lognormal(np.log(mean) - sigma * sigma / 2, sigma, n)
    weights = np.ones(n) if weights is None else weights
    return scale_to_mean(raw, mean, weights, float(weights.sum()), longest)


def scale_to_mean(
    lengths: np.ndarray, mean: float, weights: np.ndarray, of: float, longest: int | None = None
) -> np.ndarray:
    """Whole lengths in 1..longest, in proportion to the given ones, with sum(weights * lengths) / of nearly `mean`.
    Cutting and rounding move the mean, so the scale is found by bisection."""
    low, high = 0.0, 2.0
    scaled = lambda by: np.clip(np.round(lengths * by), 1, longest).astype(np.int64)  # noqa: E731
    total = lambda by: float((weights * scaled(by)).sum()) / of  # noqa: E731
    while total(high) < mean and high < 1e6:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) < mean else (low, middle)
    return scaled(high)


def lengths_in_range(rng: np.random.Generator, n: int, longest: int, ratio: float) -> np.ndarray:
    """n uniform lengths in [longest * ratio, longest], at least 1: what upstream's range ratios mean."""
    return rng.integers(max(1, int(longest * ratio)), longest + 1, n)


def zipf_ranks(rng: np.random.Generator, n: int, num_items: int, alpha: float) -> np.ndarray:
    """n draws from 0..num_items-1; rank r comes with a probability in proportion to 1 / (r + 1) ** alpha."""
    weights = 1 / np.arange(1, num_items + 1) ** alpha
    return rng.choice(num_items, n, p=weights / weights.sum())


def splitmix64(numbers: np.ndarray) -> np.ndarray:
    """uint64 to well mixed uint64, each for itself (Steele et al., 2014)."""
    x = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
