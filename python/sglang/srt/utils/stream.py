"""`Stream` and `Event`: work in order, and order between works. CUDA's semantics, on any device.

Owns the worker thread of a CPU stream. A closure that raises kills its stream: whoever polls it raises too. Work
that may fail in an expected way catches its own errors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol


class Event(Protocol):
    """A point in a stream. `recorded` says that the point has been enqueued, `query` that it has been passed."""

    @property
    def recorded(self) -> bool: ...

    def query(self) -> bool: ...


class Stream(Protocol):
    name: str

    def enqueue(self, work: Callable[[], None]) -> None:
        """Run work after everything enqueued before it."""
        ...

    def record(self) -> Event:
        """An event that passes when everything enqueued before it has run."""
        ...

    def wait(self, event: Event) -> None:
        """Later work runs after the event. As in CUDA, waiting for an event that was never recorded does nothing."""
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
    """A CPU stream: one daemon thread that runs closures in order. on_death: called once, from the thread; whoever
    sleeps until work completes must wake and poll, for none will."""

    def __init__(self, name: str, on_death: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._on_death = on_death
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def record(self) -> ThreadEvent:
        event = ThreadEvent()
        self._queue.put(event.set)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, ThreadEvent)
        if not event.query():
            self._queue.put(event.synchronize)

    def raise_if_dead(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"stream {self.name} died: {self._error}") from self._error

    def close(self) -> None:
        """Run what is enqueued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._error is not None and not isinstance(getattr(work, "__self__", None), ThreadEvent):
                continue  # dead: only events still pass, so that nobody waits for ever
            try:
                work()
            except BaseException as error:  # kept for raise_if_dead
                self._error = error
                with contextlib.suppress(Exception):
                    self._on_death()
