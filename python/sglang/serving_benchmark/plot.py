"""A picture of load against latency over several rates. matplotlib is optional, and loaded here alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMATS = (".svg", ".png", ".pdf")
_PERCENTILES = {"median": ("p50", "-", "o"), "p90": ("p90", "--", "s"), "p99": ("p99", ":", "^")}
_PANELS = {"ttft": "time to first token (ms)", "tpot": "time per output token (ms)"}
# Latencies that lie further apart are drawn on a logarithmic scale.
_WIDE = 20


def problem_with(path: str) -> str | None:
    """Why no picture can be drawn there, as a sentence."""
    if Path(path).suffix not in FORMATS:
        return f"--plot {path} must end in {', '.join(FORMATS)}."
    if not Path(path).absolute().parent.is_dir():
        return f"--plot {path} lies in a folder that does not exist."
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib, which is not installed: pip install matplotlib."
    return None


def draw(results: Sequence[dict[str, Any]], path: str, notes: Sequence[str]) -> None:
    """results: lines of the JSON file, one per rate. A rate at which nothing was measured has no point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = sorted(results, key=lambda r: r["request_throughput"])
    load = [r["request_throughput"] for r in shown]
    figure, axes = pyplot.subplots(1, len(_PANELS), figsize=(10, 4.2), layout="constrained")
    for axis, (name, label) in zip(axes, _PANELS.items(), strict=True):
        drawn: list[float] = []
        for key, (text, line, marker) in _PERCENTILES.items():
            points = [(x, r[f"{key}_{name}_ms"]) for x, r in zip(load, shown, strict=True)]
            points = [point for point in points if point[1] is not None]
            drawn += [y for _, y in points]
            axis.plot(*(zip(*points, strict=True) if points else ((), ())), line, marker=marker, label=text)
        if drawn and max(drawn) > _WIDE * max(min(drawn), 1e-9):
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.set_xlabel("achieved load (requests/s)")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend()
    first = results[0]
    title = f"{first['dataset_name']} on {first['model']} ({first['backend']})"
    figure.suptitle("\n".join([title, *notes]), fontsize=10)
    figure.savefig(path)
    pyplot.close(figure)
