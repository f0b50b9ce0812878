"""The end that all waits of a run share. Starts no timer: each wait asks how long it may take."""

from __future__ import annotations

import time
from collections.abc import Callable

# A wait that ends this close to the end was ended by it.
_CLOSE_S = 0.001


class OutOfTime(Exception):
    """The run has used its time."""


class Deadline:
    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """limit_s: from now."""
        self._clock = clock
        self._end = clock() + limit_s

    def within(self, limit_s: float) -> float:
        """limit_s, or what is left of the run if that is less. Raises `OutOfTime` if nothing is left."""
        left = self._end - self._clock()
        if left < _CLOSE_S:
            raise OutOfTime
        return min(limit_s, left)

    def check(self) -> None:
        """Raises `OutOfTime` if nothing is left."""
        self.within(0.0)
