"""A gate that threads pass to act, and that another thread closes while none of them may."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """Open at first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_closed = False

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        """Waits while the gate is closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Begins once all that have passed are out again."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._num_inside)
        try:
            yield
        finally:
            with self._changed:
                self._is_closed = False
                self._changed.notify_all()
