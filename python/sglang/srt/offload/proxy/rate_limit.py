"""`RateLimit`: keeps what several threads move below a rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RateLimit:
    """gbps: 10^9 bits per second; 0: no limit. clock, sleep: seconds."""

    def __init__(
        self,
        gbps: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = gbps * 1e9 / 8
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, num_bytes: int) -> None:
        """So many bytes were moved: wait as long as they may take, after those before."""
        if not self._bytes_per_s:
            return
        now = self._clock()
        with self._lock:
            self._free_at = max(now, self._free_at) + num_bytes / self._bytes_per_s
            wait_s = self._free_at - now
        self._sleep(wait_s)
