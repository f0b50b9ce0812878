"""Shared parts of all benchmarks: percentiles, tables for the terminal, JSON reports with the hardware and the
versions.

Owns the folder bench-out/, or the one that BENCH_OUT names. Measures nothing itself.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

# Engines without sockets are part of the tests' support, which is no installed package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test"))
OUT = Path(os.environ.get("BENCH_OUT") or Path(__file__).resolve().parent.parent / "bench-out").resolve()
_PACKAGES = ("sglang", "numpy", "torch", "triton", "cupy-cuda13x", "transformers", "msgspec", "pyzmq")


def percentiles(samples: Sequence[float], *ranks: float) -> list[float]:
    """The given percentiles (0..100) of the samples, each a sample that occurred."""
    return np.percentile(np.asarray(samples, np.float64), ranks, method="inverted_cdf").tolist()


def summary(samples_s: Sequence[float]) -> dict[str, float]:
    """Median and p99 in µs of durations in seconds, and how many there were."""
    median, p99 = percentiles(samples_s, 50, 99)
    return {"median_us": median * 1e6, "p99_us": p99 * 1e6, "num_samples": len(samples_s)}


def timed(work: Callable[[], Any]) -> float:
    """Seconds of work()."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def time_each(work: Callable[[Any], Any], items: Sequence[Any], rounds: int) -> list[float]:
    """Seconds of work(item), one sample per item and round. The items take turns, so that none stays in the cache."""
    clock = time.perf_counter
    samples = []
    for _ in range(rounds):
        for item in items:
            start = clock()
            work(item)
            samples.append(clock() - start)
    return samples


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Rows as an aligned Markdown table; the columns are the keys of the first row."""
    if not rows:
        return
    columns = list(rows[0])
    cells = [[_format(row.get(c)) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    print(f"\n## {title}\n")
    print("| " + " | ".join(c.ljust(w) for c, w in zip(columns, widths)) + " |")
    print("|" + "|".join("-" * (w + 2) for w in widths) + "|")
    for line in cells:
        print("| " + " | ".join(c.rjust(w) for c, w in zip(line, widths)) + " |")


def environment() -> dict[str, Any]:
    """Where and when a number was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": ", ".join([f"{os.cpu_count()} cores of {_cpu_name()}", *_gpu_names()]),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))} | _cuda_version(),
        "load_average": os.getloadavg()[0],
    }


def write_json(
    name: str, settings: dict[str, Any], rows: Sequence[dict[str, Any]], complete: bool = True, **more: Any
) -> Path:
    """Write bench-out/<name>.json and return its path. complete: False for an interim report, in case the benchmark
    is killed. more: values that belong to no row."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    report = {"benchmark": name, **environment(), "complete": complete, "settings": settings, **more}
    text = json.dumps(report | {"rows": list(rows)}, indent=1, ensure_ascii=False) + "\n"
    # Replaced in one step: a process that is killed while it writes leaves the last whole report.
    scratch = path.with_suffix(".part")
    scratch.write_text(text)
    scratch.replace(path)
    if complete:
        print(f"\nwritten to {path.relative_to(OUT.parent)}")
    return path


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def _cpu_name() -> str:
    """With its vectors, if they are wide."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return name + next(
        (f", {title}" for flag, title in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), ""
    )


def _gpu_names() -> list[str]:
    """For reports of benchmarks that use torch."""
    torch = sys.modules.get("torch")
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch is not None else []


def _cuda_version() -> dict[str, str]:
    """The platform that torch was built for."""
    torch = sys.modules.get("torch")
    return {"cuda": torch.version.cuda} if torch is not None and torch.version.cuda else {}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
