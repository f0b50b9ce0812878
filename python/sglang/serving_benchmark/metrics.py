"""Numbers of a run, from its records. Keys are those of upstream's JSON lines where the meaning is the same. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang.serving_benchmark.records import RequestRecord
from sglang.serving_benchmark.runner import Outcome


def latency_samples(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Seconds. tpot: of a request, per token after the first text."""
    done = [record for record in records if record.has_succeeded]
    timed = [(record, record.ttft_s) for record in done if record.ttft_s is not None]
    return {
        "e2e_latency": [record.latency_s for record in done],
        "ttft": [ttft for _, ttft in timed],
        "tpot": [(r.latency_s - ttft) / (r.output_len - 1) for r, ttft in timed if r.output_len > 1],
        "itl": [each for record in done for each in record.itl_s],
    }


def summarize(outcome: Outcome) -> dict[str, Any]:
    """Numbers that nothing was measured for are None. Failed requests count in `failed` and `error_counts` alone."""
    done = [record for record in outcome.records if record.has_succeeded]
    seconds = max(outcome.duration_s, 1e-9)
    num_in, num_out = sum(r.prompt_len for r in done), sum(r.output_len for r in done)
    result: dict[str, Any] = {
        "duration": outcome.duration_s,
        "completed": len(done),
        "failed": len(outcome.records) - len(done),
        "not_sent": outcome.num_not_sent,
        "unfinished": outcome.num_unfinished,
        "error_counts": dict(Counter(r.error for r in outcome.records if r.error is not None).most_common()),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(done) / seconds,
        "input_throughput": num_in / seconds,
        "output_throughput": num_out / seconds,
        "total_throughput": (num_in + num_out) / seconds,
        "concurrency": sum(r.latency_s for r in done) / seconds,
        "client_cpu_share": outcome.cpu_s / seconds,
    }
    for name, samples in latency_samples(outcome.records).items():
        result |= _statistics(name, np.array(samples) * 1000)
    result["max_output_tokens_per_s"], result["max_concurrent_requests"] = _peaks(done)
    return result | _hits(done)


def _statistics(name: str, values: np.ndarray) -> dict[str, float | None]:
    """values: milliseconds."""
    percentiles = {f"p{p}": p for p in (90, 95, 99)}
    keys = [f"{each}_{name}_ms" for each in ("mean", "median", "std", *percentiles, "max")]
    if not len(values):
        return dict.fromkeys(keys)
    found = [values.mean(), np.median(values), values.std(), *np.percentile(values, list(percentiles.values()))]
    return dict(zip(keys, map(float, [*found, values.max()]), strict=True))


def _peaks(done: Sequence[RequestRecord]) -> tuple[float, int]:
    """(most tokens that came in one second, most requests under way at one time). Seconds count from the first
    request's start."""
    if not done:
        return 0.0, 0
    begun = min(r.start_s for r in done)
    tokens = np.zeros(math.ceil(max(r.start_s + r.latency_s for r in done) - begun) + 1)
    for r in done:
        if r.ttft_s is not None:
            times = r.start_s - begun + r.ttft_s + np.cumsum([0.0, *r.itl_s])
            np.add.at(tokens, np.minimum(times.astype(int), len(tokens) - 1), 1)
    # An end comes before a start at the same time.
    edges = sorted([(r.start_s, 1) for r in done] + [(r.start_s + r.latency_s, -1) for r in done])
    return float(tokens.max()), int(np.cumsum([step for _, step in edges]).max())


def _hits(done: Sequence[RequestRecord]) -> dict[str, Any]:
    """Cached tokens over the requests that report them; None: none does."""
    reported = [r for r in done if r.cached_tokens is not None]
    by_tier: Counter[str] = Counter()
    for r in done:
        by_tier.update(r.cached_tokens_by_tier or {})
    prompt_tokens = sum(r.prompt_len for r in reported)
    cached = sum(r.cached_tokens or 0 for r in reported)
    has_tiers = any(r.cached_tokens_by_tier is not None for r in done)

    def share(tokens: int) -> float:
        return tokens / prompt_tokens if prompt_tokens else 0.0

    return {
        "total_cached_tokens": cached if reported else None,
        "cached_share": share(cached) if reported else None,
        "cached_tokens_by_tier": dict(by_tier) if has_tiers else None,
        "cached_share_by_tier": {tier: share(n) for tier, n in by_tier.items()} if has_tiers else None,
    }


def details(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """One entry per request, in the order of their ends. Seconds; starts count from the first one."""
    begun = min((r.start_s for r in records), default=0.0)
    return {
        "input_lens": [r.prompt_len for r in records],
        "output_lens": [r.output_len if r.has_succeeded else 0 for r in records],
        "start_times": [r.start_s - begun for r in records],
        "latencies": [r.latency_s for r in records],
        "ttfts": [r.ttft_s for r in records],
        "itls": [r.itl_s for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error or "" for r in records],
        "cached_tokens": [r.cached_tokens for r in records],
        "cached_tokens_details": [r.cached_tokens_by_tier for r in records],
    }
