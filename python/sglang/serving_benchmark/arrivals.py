"""When sessions begin: Poisson times, or those of a trace. Pure."""

from __future__ import annotations

import numpy as np

from sglang.serving_benchmark.draws import poisson_times
from sglang.serving_benchmark.workload import Workload


def poisson_starts(workload: Workload, rate: float, seed: int) -> list[float]:
    """Seconds, the first 0. rate: requests per second in the long run. Sessions begin as much rarer as they have
    turns; inf: all at once."""
    num_sessions = len(workload.sessions)
    if not num_sessions:
        return []
    # A stream of numbers of its own: the same sessions come at any rate.
    rng = np.random.default_rng([seed, 1])
    times = poisson_times(rng, num_sessions, rate * num_sessions / workload.num_requests)
    return (times - times[0]).tolist()


def trace_starts(workload: Workload, slowdown: float) -> list[float]:
    """Seconds, the first 0. slowdown: 2 takes twice as long. Every session has a time."""
    times = [session.start_s for session in workload.sessions if session.start_s is not None]
    assert len(times) == len(workload.sessions), "the dataset has no times"
    return [(time - min(times)) * slowdown for time in times]
