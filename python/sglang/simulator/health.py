"""`LinkHealth`: how a simulated link deviates from its usual speed over time: slow, hung, flapping, failing.

Pure functions over virtual time. Owns no operation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkHealth:
    """The default is a link that is always healthy."""

    # (seconds, rate), ascending: from then on bytes move at this share of the usual speed. Before the first: 1.
    rates: tuple[tuple[float, float], ...] = ()
    # [begin, end) windows, in seconds: an operation that is under way in one of them fails, at its usual end.
    failing: tuple[tuple[float, float], ...] = ()
    # An operation that has not ended after so many seconds ends then, and fails. None: it is never given up.
    timeout_s: float | None = None

    def outcome(self, begin: float, seconds: float) -> tuple[float, bool]:
        """When an operation ends that takes `seconds` on the healthy link, and whether it succeeds. The end is
        infinite if the link hangs for ever."""
        end = self._end(begin, seconds)
        if self.timeout_s is not None and end > begin + self.timeout_s:
            return begin + self.timeout_s, False
        return end, not any(begin < last and first <= end for first, last in self.failing)

    def _end(self, begin: float, seconds: float) -> float:
        left, now, rate = seconds, begin, 1.0
        for at, next_rate in self.rates:
            if at > now:
                if rate and left <= (at - now) * rate:
                    break
                left -= (at - now) * rate
                now = at
            rate = next_rate
        return now + left / rate if rate else float("inf")


HEALTHY = LinkHealth()
