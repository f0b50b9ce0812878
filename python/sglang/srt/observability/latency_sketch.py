"""`LatencySketch`: quantiles of latencies since they were last taken, in bounded memory. Owns the counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

# Buckets per doubling: a quantile is wrong by 5 % at most.
_PER_DOUBLING = 8
# Shorter and longer times count as these.
_LEAST_S, _MOST_S = 1e-5, 1e5


class LatencySketch:
    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[math.floor(math.log2(min(max(seconds, _LEAST_S), _MOST_S)) * _PER_DOUBLING)] += count

    def take(self, parts: Sequence[float]) -> list[float]:
        """The latencies that these parts of all (ascending) do not exceed; nan if there are none. Forgets them."""
        counts, self._counts = self._counts, Counter()
        total, passed = sum(counts.values()), 0
        found: list[float] = []
        for bucket, count in sorted(counts.items()):
            passed += count
            while len(found) < len(parts) and passed >= parts[len(found)] * total:
                found.append(2.0 ** ((bucket + 0.5) / _PER_DOUBLING))
        return found or [math.nan] * len(parts)
