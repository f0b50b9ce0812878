"""What a run prints and writes: upstream's table and JSON lines, with ours added. Formats; measures nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_WIDTH = 50
_TITLES = {
    "e2e_latency": ("End-to-End Latency", "E2E Latency"),
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-Token Latency", "ITL"),
}
_STATISTICS = {"mean": "Mean", "median": "Median", "p90": "P90", "p95": "P95", "p99": "P99"}
_MAX_ERRORS = 5
# Above it the client itself may be what a request waits for.
_BUSY_CLIENT = 0.7


def rate_text(rate: float | str) -> str:
    return rate if isinstance(rate, str) else f"{rate:g}"


def table(result: dict[str, Any], notes: Sequence[str]) -> str:
    """result: a line of the JSON file. notes: sentences that belong to it."""
    lines = ["", " Serving Benchmark Result ".center(_WIDTH, "=")]
    add = lambda label, value: lines.append(f"{label + ':':<40} {value}")  # noqa: E731
    add("Backend", result["backend"])
    add("Dataset", result["dataset_name"])
    add("Traffic request rate", rate_text(result["request_rate"]))
    add("Max request concurrency", result["max_concurrency"] or "not set")
    add("Successful requests", result["completed"])
    for label, key in (
        ("Failed requests", "failed"),
        ("Not sent after a failed turn", "not_sent"),
        ("Unfinished requests", "unfinished"),
        ("Dropped requests (too long)", "dropped"),
    ):
        if result[key] or key == "failed":
            add(label, result[key])
    add("Benchmark duration (s)", _number(result["duration"]))
    add("Total input tokens", result["total_input_tokens"])
    add("Total generated tokens", result["total_output_tokens"])
    add("Request throughput (req/s)", _number(result["request_throughput"]))
    add("Input token throughput (tok/s)", _number(result["input_throughput"]))
    add("Output token throughput (tok/s)", _number(result["output_throughput"]))
    add("Peak output token throughput (tok/s)", _number(result["max_output_tokens_per_s"]))
    add("Total token throughput (tok/s)", _number(result["total_throughput"]))
    add("Concurrency", _number(result["concurrency"]))
    add("Peak concurrent requests", result["max_concurrent_requests"])
    for name, (title, label) in _TITLES.items():
        lines.append(title.center(_WIDTH, "-"))
        for key, statistic in _STATISTICS.items():
            add(f"{statistic} {label} (ms)", _number(result[f"{key}_{name}_ms"]))
    lines.append("Cache Hits".center(_WIDTH, "-"))
    lines += _hits(result)
    lines.append("=" * _WIDTH)
    if result["error_counts"]:
        lines.append("Errors:")
        counts = list(result["error_counts"].items())
        lines += [f"{count:>6} x {reason}" for reason, count in counts[:_MAX_ERRORS]]
        if len(counts) > _MAX_ERRORS:
            lines.append(f"       and {len(counts) - _MAX_ERRORS} other kinds")
    lines += [f"Note: {note}" for note in notes]
    if result["client_cpu_share"] > _BUSY_CLIENT:
        lines.append(
            f"Note: this client used {result['client_cpu_share']:.0%} of a core, so that latencies include its own "
            "delays."
        )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _hits(result: dict[str, Any]) -> list[str]:
    if result["total_cached_tokens"] is None:
        return [f"{'Cached prompt tokens:':<40} not reported"]
    lines = [f"{'Cached prompt tokens:':<40} {result['total_cached_tokens']} ({result['cached_share']:.1%})"]
    if result["cached_tokens_by_tier"] is None:
        return [*lines, f"{'  By tier:':<40} not reported"]
    for tier, tokens in result["cached_tokens_by_tier"].items():
        share = result["cached_share_by_tier"][tier]
        lines.append(f"{'  ' + tier.capitalize() + ':':<40} {tokens} ({share:.1%})")
    return lines


def comparison(results: Sequence[dict[str, Any]]) -> str:
    """One row per rate."""
    head = (
        f"{'rate':>8} {'req/s':>8} {'tok/s':>9} {'TTFT p50':>10} {'p90':>9} {'p99':>9} {'TPOT p50':>10} {'p90':>9} "
        f"{'p99':>9} {'hits':>7} {'failed':>7}"
    )
    lines = ["", " Load against Latency (ms) ".center(len(head), "="), head]
    for result in results:
        ttft, tpot = (
            [_cell(result[f"{key}_{name}_ms"]) for key in ("median", "p90", "p99")] for name in ("ttft", "tpot")
        )
        hits = "-" if result["cached_share"] is None else f"{result['cached_share']:.1%}"
        lines.append(
            f"{rate_text(result['request_rate']):>8} {result['request_throughput']:>8.2f} "
            f"{result['output_throughput']:>9.1f} {ttft[0]:>10} {ttft[1]:>9} {ttft[2]:>9} {tpot[0]:>10} {tpot[1]:>9} "
            f"{tpot[2]:>9} {hits:>7} {result['failed']:>7}"
        )
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def json_ready(value: Any) -> Any:
    """JSON has no infinity: upstream's own lines are read as Python reads them, others need a text."""
    if isinstance(value, dict):
        return {key: json_ready(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
