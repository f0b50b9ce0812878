"""What the device can do, and how its work is timed: CUDA events on a GPU, the clock on the CPU.

Owns no memory beyond a measurement. Devices are "cpu" and "cuda"; nothing here picks one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Free all unused memory, pinned memory too."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Of work and what it enqueues on the current stream, which is idle before. On a GPU from the stream's first
    event to its last, so waiting for the host to issue counts, and waking the host up does not."""
    if device != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def median_seconds(work: Callable[[], object], device: str, rounds: int, most_s: float = float("inf")) -> float:
    """The first round warms up. Fewer rounds, one at least, where they would take longer than most_s together."""
    seconds_of(work, device)
    samples: list[float] = []
    while len(samples) < rounds and (not samples or sum(samples) + samples[-1] <= most_s):
        samples.append(seconds_of(work, device))
    return statistics.median(samples)


def matrix_flops(device: str, dtype: torch.dtype, rounds: int = 10) -> float:
    """Multiplications and additions per second of a large product of random matrices."""
    n = 8192 if device == "cuda" else 512
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    return 2 * n**3 / median_seconds(lambda: a @ b, device, rounds)


def memory_bytes_per_s(device: str, rounds: int = 10) -> float:
    """Read and written by a copy within the device's memory."""
    size = (4 << 30) if device == "cuda" else (1 << 26)
    a, b = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / median_seconds(lambda: b.copy_(a), device, rounds)
