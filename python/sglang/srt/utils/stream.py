"""`Stream` and `Event`: work in order, and order between works. CUDA's semantics, on any device.

Owns the worker thread of a CPU stream. A closure that raises kills its stream: polling it raises too. Work
that may fail in an expected way catches its own errors.

Work is what gives a device something to do: on a GPU (`CudaStream`) it has run when the device has been told, and the
device is done later. What has to see the device's results on the host, or wants to know that they are there, is
given to `when_done` instead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol


class Event(Protocol):
    """A point in a stream. `recorded`: the point has been enqueued. `query`: it has been passed."""

    @property
    def recorded(self) -> bool: ...

    def query(self) -> bool: ...


class Stream(Protocol):
    name: str

    def enqueue(self, work: Callable[[], None], always: bool = False) -> None:
        """Run work after everything enqueued before it. What it starts on the device is over in the same order.
        always: on a dead stream, too."""
        ...

    def when_done(self, work: Callable[[], None]) -> None:
        """Run work on the host once the device is done with everything enqueued before. What is enqueued later does
        not wait for it."""
        ...

    def record(self) -> Event:
        """An event that passes when everything enqueued before it has run."""
        ...

    def wait(self, event: Event) -> None:
        """Later work runs after the event. As in CUDA, waiting for an event that was never recorded does nothing."""
        ...

    def mark(self) -> Any:
        """A point in time, for `seconds`. Called by work on this stream: when the device gets there, not the host."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks of this stream, both of which have been passed (see `when_done`)."""
        ...

    def wait_for_mark(self, mark: Any) -> None:
        """Block the host until the mark has been passed. Called by work on this stream: what was enqueued between the
        two goes on meanwhile."""
        ...

    def raise_if_dead(self) -> None: ...


class ThreadEvent:
    recorded = True

    def __init__(self) -> None:
        self._passed = threading.Event()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self._passed.wait()

    def set(self) -> None:
        self._passed.set()


class ThreadStream:
    """A CPU stream: one daemon thread that runs closures in order. on_death: called once, from the thread; a
    thread that sleeps until work completes must then wake and poll, for no work will."""

    def __init__(self, name: str, on_death: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._on_death = on_death
        # Work, and whether it runs on a dead stream, too: events still pass, so that no thread waits for ever.
        self._queue: SimpleQueue[tuple[Callable[[], None], bool] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], None], always: bool = False) -> None:
        self._queue.put((work, always))

    def when_done(self, work: Callable[[], None]) -> None:
        self.enqueue(work)

    def record(self) -> Event:
        event = ThreadEvent()
        self.enqueue(event.set, always=True)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, ThreadEvent)
        if not event.query():
            self.enqueue(event.synchronize, always=True)

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        return end - begin

    def wait_for_mark(self, mark: Any) -> None:
        """The thread that calls it is the stream."""

    def raise_if_dead(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"stream {self.name} died: {self._error}") from self._error

    def close(self) -> None:
        """Run what is enqueued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, always = item
            if self._error is None or always:
                self._try(work)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # kept for raise_if_dead
            if self._error is None:
                self._error = error
                with contextlib.suppress(Exception):
                    self._on_death()
