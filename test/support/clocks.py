"""Clocks for tests of what takes its time from a function."""

from __future__ import annotations

import time


class LaterClock:
    """The system's, and later_s."""

    later_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.later_s
