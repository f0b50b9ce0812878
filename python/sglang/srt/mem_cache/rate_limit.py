"""`RateLimit`: keeps what moves below a rate: a link in experiments, or a store's share of a network. Owns no thread:
the thread that moves bytes sleeps in it.

A transfer takes the longer of its real time and its bytes over the rate. Transfers of one link follow each other,
even where several threads carry them out. Time in which nothing moves is lost, as on a real link.

    rate       |---- a ----|---- b ----|            |---- c ----|
    really     |-a-|.......|--b--|.....|            |-c-|.......|       . asleep
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RateLimit:
    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a rate must be above 0 bytes per second, not {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()
        # A sleep ends late by some 60 us, in which 600 KB move at 10 GB/s. The next transfer begins earlier by that
        # time.
        self._overslept = 0.0

    def wait(self, size_bytes: int) -> None:
        """So many bytes have been moved: wait as long as a link of this rate would have taken, after those before."""
        with self.transfer(size_bytes):
            pass

    @contextmanager
    def transfer(self, size_bytes: int) -> Iterator[None]:
        """Move size_bytes within this context. It ends when a link of this rate would have moved them."""
        with self._lock:
            begin = max(self._free_at, self._clock() - self._overslept)
            end = self._free_at = begin + size_bytes / self.bytes_per_s
        yield
        left = end - self._clock()
        if left > 0:
            self._sleep(left)
            self._overslept = max(0.0, self._clock() - end)
