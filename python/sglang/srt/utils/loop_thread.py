"""`LoopThread`: an event loop in a thread of its own, which callers of any thread use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")

# How long what is cancelled at the end may take.
_CANCEL_TIMEOUT_S = 5.0


class LoopThread:
    """error: raised with a sentence for callers that come after the end, or from a fork of this process."""

    def __init__(self, name: str, error: type[Exception]) -> None:
        self._name = name
        self._error = error
        self._pid = os.getpid()
        # Both are reentrant: garbage collection may close a stream, and a signal may stop the loop, at any place.
        self._submitting = threading.RLock()
        self._stopping = threading.RLock()
        self._is_stopping = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        # Before the lock, which another thread may have held at the fork.
        if os.getpid() == self._pid:
            with self._submitting:
                if not self._is_stopping:
                    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise self._ended()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result. A caller that is interrupted, as by Ctrl-C, cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise self._ended() from None
        finally:
            future.cancel()  # changes nothing if it is done

    def post(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Begin it, and wait for nothing, so that the loop's own thread may call this, too. After the end it is
        dropped."""
        with contextlib.suppress(self._error):
            self.submit(coroutine)

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, then end the loop and what still runs on it. Others that call this meanwhile wait for the
        end."""
        if os.getpid() != self._pid:
            last.close()
            return
        with self._stopping:
            if not self._thread.is_alive():
                last.close()
                return
            with self._submitting:
                self._is_stopping = True
            asyncio.run_coroutine_threadsafe(self._end(last), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        try:
            await last
        finally:
            if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)

    def _ended(self) -> Exception:
        if os.getpid() != self._pid:
            return self._error(f"{self._name} was made by the process of which this is a fork: make one here")
        return self._error(f"{self._name} was shut down")
