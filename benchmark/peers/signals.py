"""A run that gets a signal stops its servers before it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmark.peers.servers import STOP_TIMEOUT_S, RunningServer, stop_all

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def stop_on_signals() -> None:
    """SystemExit, so that the servers are stopped. Signals after the first are ignored, so that nothing interrupts
    that."""

    def stop(number: int, _frame: object) -> None:
        ignore_signals()
        os.write(2, f"\nStopping the servers, which takes at most {STOP_TIMEOUT_S:.0f} s.\n".encode())
        sys.exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, stop)


def ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def running(server: RunningServer) -> Iterator[None]:
    """Started, and in the end stopped, also by a signal. Servers may run one after the other. Raises ServerError."""
    stop_on_signals()
    try:
        server.start()
        yield
    finally:
        stop_undisturbed([server])


def stop_undisturbed(servers: Sequence[RunningServer]) -> None:
    try:
        ignore_signals()
    finally:  # a first signal may come before they are ignored
        stop_all(servers, STOP_TIMEOUT_S)
