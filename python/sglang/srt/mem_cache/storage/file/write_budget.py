"""`WriteBudget`: what this process has written to the disk, and how much more it may write.

Owns the counts of bytes since the start, those of the last 24 hours, and the credit for copying blocks forward. A
start begins with nothing counted. Safe between threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

DEFAULT_REWRITE_SHARE = 0.25
_HOUR_S = 3600.0
_WINDOW_HOURS = 24


class WriteBudget:
    """rewrite_share: bytes that may be copied forward per byte that requests store. max_credit_bytes: the most credit
    that is kept. daily_bytes: the most that may be written in 24 hours; 0 for no limit. clock: seconds."""

    def __init__(
        self,
        rewrite_share: float = 0.0,
        max_credit_bytes: int = 0,
        daily_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.daily_bytes = daily_bytes
        self._rewrite_share = rewrite_share
        self._max_credit_bytes = max_credit_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._stored_bytes = 0
        self._copied_bytes = 0
        self._device_bytes = 0
        self._credit_bytes = 0.0
        # Bytes per hour in which some were written, [number of the hour, bytes], oldest first.
        self._hours: deque[list[int]] = deque()

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
            hour = int(self._clock() // _HOUR_S)
            if not self._hours or self._hours[-1][0] != hour:
                self._hours.append([hour, 0])
            self._hours[-1][1] += num_bytes

    @property
    def credit_bytes(self) -> int:
        """What may be copied forward now."""
        with self._lock:
            return max(0, int(self._credit_bytes))

    @property
    def is_used_up(self) -> bool:
        """Whether nothing may be written until part of the last 24 hours is over."""
        return bool(self.daily_bytes) and self._last_day_bytes() >= self.daily_bytes

    def stats(self) -> dict[str, int]:
        last_day_bytes = self._last_day_bytes()
        with self._lock:
            return {
                "written_bytes": self._stored_bytes,
                "copied_bytes": self._copied_bytes,
                "device_written_bytes": self._device_bytes,
                "last_day_written_bytes": last_day_bytes,
                "daily_limit_bytes": self.daily_bytes,
            }

    def _last_day_bytes(self) -> int:
        """In steps of an hour."""
        with self._lock:
            oldest = int(self._clock() // _HOUR_S) - _WINDOW_HOURS
            while self._hours and self._hours[0][0] <= oldest:
                self._hours.popleft()
            return sum(num_bytes for _, num_bytes in self._hours)
