"""`WriteBudget`: what a store of this process has written to the disk, and how much more it may write.

Owns the counts of bytes since the start, and the credit for copying blocks forward; `LastDay` those of the last 24
hours, which several stores may share. A start begins with nothing counted. Safe between threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

DEFAULT_REWRITE_SHARE = 0.25
_HOUR_S = 3600.0
_WINDOW_HOURS = 24


class LastDay:
    """limit_bytes: the most that may be written in 24 hours; 0 for no limit. clock: seconds."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float]) -> None:
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._lock = threading.Lock()
        # Bytes per hour in which some were written, [number of the hour, bytes], oldest first.
        self._hours: deque[list[int]] = deque()

    def count(self, num_bytes: int) -> None:
        with self._lock:
            hour = int(self._clock() // _HOUR_S)
            if not self._hours or self._hours[-1][0] != hour:
                self._hours.append([hour, 0])
            self._hours[-1][1] += num_bytes

    @property
    def written_bytes(self) -> int:
        """In steps of an hour."""
        with self._lock:
            oldest = int(self._clock() // _HOUR_S) - _WINDOW_HOURS
            while self._hours and self._hours[0][0] <= oldest:
                self._hours.popleft()
            return sum(num_bytes for _, num_bytes in self._hours)


class WriteBudget:
    """rewrite_share: bytes that may be copied forward per byte that requests store. max_credit_bytes: the most credit
    that is kept. daily_bytes, clock: see LastDay. beside: the budget of a store with which this one shares these."""

    def __init__(
        self,
        rewrite_share: float = 0.0,
        max_credit_bytes: int = 0,
        daily_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        beside: WriteBudget | None = None,
    ) -> None:
        self._rewrite_share = rewrite_share
        self._max_credit_bytes = max_credit_bytes
        self._last_day: LastDay = beside._last_day if beside is not None else LastDay(daily_bytes, clock)
        self._lock = threading.Lock()
        self._stored_bytes = 0
        self._copied_bytes = 0
        self._device_bytes = 0
        self._credit_bytes = 0.0

    def count_stored(self, num_bytes: int) -> None:
        """Requests have stored blocks of so many bytes."""
        with self._lock:
            self._stored_bytes += num_bytes
            self._credit_bytes = min(self._credit_bytes + self._rewrite_share * num_bytes, self._max_credit_bytes)

    def count_copied(self, num_bytes: int) -> None:
        """Blocks of so many bytes were copied forward."""
        with self._lock:
            self._copied_bytes += num_bytes
            self._credit_bytes -= num_bytes

    def count_written(self, num_bytes: int) -> None:
        """The device was given so many bytes, of whatever kind."""
        with self._lock:
            self._device_bytes += num_bytes
        self._last_day.count(num_bytes)

    @property
    def credit_bytes(self) -> int:
        """What may be copied forward now."""
        with self._lock:
            return max(0, int(self._credit_bytes))

    @property
    def daily_bytes(self) -> int:
        return self._last_day.limit_bytes

    @property
    def is_used_up(self) -> bool:
        """Whether nothing may be written until part of the last 24 hours is over."""
        return bool(self.daily_bytes) and self._last_day.written_bytes >= self.daily_bytes

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "written_bytes": self._stored_bytes,
                "copied_bytes": self._copied_bytes,
                "device_written_bytes": self._device_bytes,
                "last_day_written_bytes": self._last_day.written_bytes,
                "daily_limit_bytes": self.daily_bytes,
            }
