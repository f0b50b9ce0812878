"""`RareLog`: lines of a kind at most once a minute, with the number of those that were left out."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

INTERVAL_S = 60.0


class RareLog:
    """For all threads. clock: seconds."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        # By kind: when the next one may be logged, and how many were not.
        self._next: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warn(self, kind: str, text: str, *args: object) -> None:
        """text, args: as of `Logger.warning`."""
        self.log(logging.WARNING, kind, text, *args)

    def log(self, level: int, kind: str, text: str, *args: object) -> None:
        with self._lock:
            now = self._clock()
            if now < self._next.get(kind, now):
                self._left_out[kind] += 1
                return
            self._next[kind] = now + INTERVAL_S
            left_out = self._left_out.pop(kind, 0)
        more = f" ({left_out} more of this kind since the last line)" if left_out else ""
        self._logger.log(level, text + more, *args)
