"""An event loop for callers of any thread: interrupted callers, the end, forks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import NoReturn

import pytest

from sglang.srt.utils import loop_thread
from sglang.srt.utils.loop_thread import LoopThread


class TooLateError(Exception):
    pass


async def nothing() -> None:
    pass


@contextlib.contextmanager
def handling(interrupt: Callable[..., None]) -> Iterator[None]:
    """Python calls it in the main thread, whichever thread sends the signal."""
    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("the loop", TooLateError)
    yield made
    made.stop(nothing())


def test_results_and_errors(loop: LoopThread) -> None:
    async def fails() -> NoReturn:
        raise KeyError("a")

    assert loop.run(asyncio.sleep(0, 3)) == 3
    with pytest.raises(KeyError):
        loop.run(fails())


def test_a_caller_that_is_interrupted_cancels(loop: LoopThread) -> None:
    ended = threading.Event()

    async def waits() -> None:
        try:
            while True:  # a signal that comes right before the main thread waits does not wake it
                os.kill(os.getpid(), signal.SIGUSR2)
                await asyncio.sleep(0.02)
        finally:
            ended.set()

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is Future.result.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    with handling(interrupt):
        with pytest.raises(KeyboardInterrupt):
            loop.run(waits())
        assert ended.wait(60)


def test_its_own_thread_may_post(loop: LoopThread) -> None:
    """As garbage collection does, which closes a stream in any thread."""
    done = threading.Event()

    async def sets() -> None:
        done.set()

    async def posts() -> None:
        loop.post(sets())

    loop.run(posts())
    assert done.wait(60)


def test_the_end_comes_once_and_for_all() -> None:
    loop = LoopThread("the loop", TooLateError)
    began, found, ends = threading.Event(), [], []

    async def waits() -> None:
        began.set()
        await asyncio.Event().wait()

    async def last() -> None:
        ends.append("last")
        with pytest.raises(TooLateError, match="the loop was shut down"):
            loop.submit(nothing())

    def caller() -> None:
        with pytest.raises(TooLateError, match="the loop was shut down") as error:
            loop.run(waits())
        found.append(error)

    running = threading.Thread(target=caller)
    running.start()
    began.wait()
    stopping = [threading.Thread(target=lambda: loop.stop(last())) for _ in range(8)]
    for thread in stopping:
        thread.start()
    for thread in (running, *stopping):
        thread.join(60)
        assert not thread.is_alive()
    assert len(found) == 1 and ends == ["last"]
    with pytest.raises(TooLateError):
        loop.run(nothing())
    loop.post(nothing())


def test_an_interrupted_end_goes_on() -> None:
    """A signal handler that ends the loop once more, and a call after Ctrl-C, wait for the same end."""
    loop = LoopThread("the loop", TooLateError)
    ends: list[str] = []

    async def last() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)  # Python handles it in the main thread, which waits
        await asyncio.sleep(0.05)
        ends.append("last")

    def interrupt(*_: object) -> NoReturn:
        loop.stop(nothing())
        assert ends == ["last"]
        raise KeyboardInterrupt

    with handling(interrupt), pytest.raises(KeyboardInterrupt):
        loop.stop(last())
    loop.stop(nothing())
    assert ends == ["last"]


def test_an_end_that_fails_ends_the_loop_all_the_same() -> None:
    loop = LoopThread("the loop", TooLateError)

    async def fails() -> NoReturn:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        loop.stop(fails())
    with pytest.raises(TooLateError):
        loop.run(nothing())


def test_a_task_that_does_not_end_keeps_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "_CANCEL_TIMEOUT_S", 0.0)
    loop, found = LoopThread("the loop", TooLateError), []
    began = threading.Event()

    async def stays() -> None:
        began.set()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    def caller() -> None:
        with pytest.raises(TooLateError) as error:
            loop.run(stays())
        found.append(error)

    thread = threading.Thread(target=caller)
    thread.start()
    began.wait()
    loop.stop(nothing())
    thread.join(60)
    assert len(found) == 1


def test_callers_on_another_loop() -> None:
    loop = LoopThread("the loop", TooLateError)
    began = threading.Event()

    async def waits() -> None:
        began.set()
        await asyncio.Event().wait()

    async def main() -> None:
        assert await loop.run_async(asyncio.sleep(0, 3)) == 3
        cancelled = asyncio.create_task(loop.run_async(waits()))
        ended = asyncio.create_task(loop.run_async(waits()))
        await asyncio.to_thread(began.wait)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await asyncio.to_thread(loop.stop, nothing())
        with pytest.raises(TooLateError):
            await ended

    asyncio.run(main())


def test_a_fork_has_no_loop(loop: LoopThread) -> None:
    child = os.fork()
    if child == 0:
        try:
            loop.run(nothing())
        except TooLateError as error:
            loop.stop(nothing())
            os._exit(0 if "fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
