"""`Scrubber`: overwrites slabs with zeros, on a thread of its own.

Owns that thread and the slabs that it is given until they are taken back. A slab of 64 MiB takes some milliseconds,
for which no step of the scheduler waits. Knows no leases: the caller remembers why a slab is overwritten.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable

_CLOSE_TIMEOUT_S = 10.0


class Scrubber:
    """scrub: overwrites one slab, before it returns. notify: called from the thread when slabs are done."""

    def __init__(self, scrub: Callable[[int], None], notify: Callable[[], None]) -> None:
        self._scrub = scrub
        self._notify = notify
        # None ends the thread.
        self._todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done: deque[int] = deque()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="peer-scrubber", daemon=True)
        self._thread.start()

    def submit(self, slabs: Iterable[int]) -> None:
        """These slabs are the thread's until `take_done` returns them, in this order."""
        for slab in slabs:
            self._todo.put(slab)

    def take_done(self) -> list[int]:
        """Slabs that were overwritten since the last call. Raises RuntimeError if one could not be."""
        if self._error is not None:
            raise RuntimeError("a slab could not be overwritten") from self._error
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Slabs that were not overwritten yet stay as they are. May be called twice."""
        self._todo.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while (slab := self._todo.get()) is not None:
                self._scrub(slab)
                self._done.append(slab)
                self._notify()
        except BaseException as error:
            self._error = error
            self._notify()
