"""`LoopThread`: an event loop in a thread of its own, which callers of any thread use.

submit, run, run_async, post ──coroutines──► the loop ──last──► the loop ends, and fails what is left
                                               ▲
                                      stop ────┘ waits for the thread's end, however often it is called
"""

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
    """what: the owner, in the sentence of errors. error: raised for callers that come after the end, or from a fork
    of this process."""

    def __init__(self, what: str, error: type[Exception]) -> None:
        self._what = what
        self._error = error
        self._pid = os.getpid()
        # Reentrant: garbage collection may close a stream, and a signal may stop the loop, at any place.
        self._lock = threading.RLock()
        # Of callers that wait.
        self._futures: set[Future[Any]] = set()
        # What runs last, once the end has been asked for.
        self._last: Coroutine[Any, Any, None] | None = None
        self._last_error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name=f"loop of {what}", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        # Before the lock, which another thread may have held at the fork.
        if os.getpid() == self._pid:
            with self._lock:
                if self._last is None:
                    future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
                    self._futures.add(future)
                    future.add_done_callback(self._futures.discard)
                    return future
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

    async def run_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """`run` for a caller on another loop, which cancels it if it is cancelled."""
        future = self.submit(coroutine)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._last is None or (task is not None and task.cancelling()):
                raise
            raise self._ended() from None

    def post(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Begin it, and wait for nothing, so that the loop's own thread may call this, too. After the end it is
        dropped."""
        with contextlib.suppress(self._error):
            self.submit(coroutine)

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, then end the loop and what still runs on it; raises what `last` raised. Other calls wait for
        the same end, also one from a signal handler within this one, and one after this one was interrupted."""
        assert threading.current_thread() is not self._thread, "the loop's thread would wait for itself"
        if os.getpid() != self._pid:
            last.close()
            return
        with self._lock:
            if is_first := self._last is None:
                self._last = last
                self._loop.call_soon_threadsafe(self._end.set)
        if not is_first:
            last.close()
        self._thread.join()
        if is_first and self._last_error is not None:
            raise self._last_error

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._live())
        for future in list(self._futures):
            future.cancel()  # of tasks that would not be cancelled
        self._loop.close()

    async def _live(self) -> None:
        await self._end.wait()
        assert self._last is not None
        try:
            await self._last
        except BaseException as error:
            self._last_error = error
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)

    def _ended(self) -> Exception:
        if os.getpid() != self._pid:
            return self._error(f"{self._what} was made by the process of which this is a fork: make one here")
        return self._error(f"{self._what} was shut down")
