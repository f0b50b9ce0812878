"""The stream emulator, first of the three nets: streams whose work runs late, in any order that CUDA would permit.

On the CPU torch is synchronous, so bugs of stream order cannot show themselves. Here closures wait in queues until
`run` picks one, at random but by seed, among the streams whose head may run: program order within a stream and
events between streams hold, nothing else does.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable

from sglang.srt.utils.stream import Event


class EmulatedEvent:
    """Waiting for an event that was never recorded is a no-op, as in CUDA, and flagged."""

    def __init__(self) -> None:
        self.recorded = False
        self.passed = False

    def query(self) -> bool:
        return self.passed


class EmulatedStream:
    """clock: what its marks are of, in seconds."""

    def __init__(self, name: str, emulator: StreamEmulator, clock: Callable[[], float]) -> None:
        self.name = name
        self._emulator = emulator
        self._clock = clock
        self._queue: deque[Callable[[], None] | EmulatedEvent] = deque()

    def enqueue(self, work: Callable[[], None], always: bool = False) -> None:
        self._queue.append(work)

    def when_done(self, work: Callable[[], None]) -> None:
        self.enqueue(work)

    def mark(self) -> float:
        return self._clock()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait_for_mark(self, mark: float) -> None:
        """What was enqueued before has run."""

    def record(self) -> EmulatedEvent:
        event = EmulatedEvent()
        event.recorded = True

        def passed() -> None:
            event.passed = True

        self._queue.append(passed)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, EmulatedEvent)
        if not event.recorded:
            self._emulator.unrecorded_waits += 1
            return
        self._queue.append(event)

    def raise_if_dead(self) -> None:
        """Work that raises does so in `run`."""

    def can_run(self) -> bool:
        while self._queue and isinstance(self._queue[0], EmulatedEvent) and self._queue[0].passed:
            self._queue.popleft()
        return bool(self._queue) and not isinstance(self._queue[0], EmulatedEvent)

    def run_one(self) -> None:
        work = self._queue.popleft()
        assert not isinstance(work, EmulatedEvent)
        work()


class StreamEmulator:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: list[EmulatedStream] = []
        self.unrecorded_waits = 0

    def stream(self, name: str, clock: Callable[[], float] = time.perf_counter) -> EmulatedStream:
        stream = EmulatedStream(name, self, clock)
        self._streams.append(stream)
        return stream

    def run(self, n: int) -> int:
        """Run up to n closures; returns how many there were."""
        for i in range(n):
            ready = [stream for stream in self._streams if stream.can_run()]
            if not ready:
                return i
            self._random.choice(ready).run_one()
        return n
