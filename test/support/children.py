"""`Child`: a process of its own that costs no imports. It is forked from a server that has done them once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import psutil

# Nothing that waits for another process or thread takes so long, however busy the machine is.
DEADLINE_S = 120.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "sglang.srt.offload.remote_store",
        "sglang.srt.peer.memory.borrowed_memory",
        "sglang.srt.peer.borrower_coordinator",
        "sglang.srt.peer.lender_coordinator",
        "sglang.srt.peer.memory.cuda_slabs",
        "sglang.srt.peer.memory.lent_memory",
        "support.fake_cuda_driver",
    ]
)


def child_environment() -> dict[str, str]:
    """The environment of a process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def wait_until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited for nothing: {what}"
        time.sleep(0.005)


class Child:
    """Runs work(say, *arguments), a module's function. said: what it has told so far, a list per call of say."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self.said: list[list[Any]] = []
        ours, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_run, args=(theirs, work, arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def _read(self, ours: Connection) -> None:
        with ours:
            try:
                while True:
                    self.said.append(ours.recv())
            except (EOFError, OSError):
                return

    def wait_for(self, *what: Any) -> list[Any]:
        """The first that it says and that begins so."""

        def found() -> list[list[Any]]:
            return [line for line in self.said if line[: len(what)] == [*what]]

        wait_until(lambda: found() or not self.is_alive, f"{what} from {self.said}")
        assert found(), f"it has ended, and said {self.said}"
        return found()[0]

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def stop(self) -> None:
        """It stands still from here on."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED, "the child to stand still")

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self.join()

    def join(self) -> int:
        """Waits for its end. Returns its exit code, -n for signal n."""
        self._process.join(DEADLINE_S)
        assert self._process.exitcode is not None, "the child does not end"
        return self._process.exitcode


@contextmanager
def children() -> Iterator[Callable[..., Child]]:
    """Gives what starts one; all end with it."""
    started: list[Child] = []

    def start(work: Callable[..., None], *arguments: Any) -> Child:
        started.append(Child(work, *arguments))
        return started[-1]

    yield start
    for child in started:
        child.kill()


def _run(theirs: Connection, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_the_test, args=(theirs,), daemon=True).start()
    work(lambda *what: theirs.send(list(what)), *arguments)


def _end_with_the_test(theirs: Connection) -> None:
    try:
        theirs.recv()
    except (EOFError, OSError):
        os._exit(0)
