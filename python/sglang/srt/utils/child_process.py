"""How a child process of the engine lives and ends. Owns signals, the parent's watch and the start-up report.

The protocol, for whoever writes a child:

    python -m sglang.srt.managers.<child> '<json of ChildArgs>'

- The child calls `run_child(start)` under `if __name__ == "__main__"`. start(ChildArgs) builds everything and returns
  `serve`, a function without arguments that runs until the parent asks it to stop. The process that reads a socket
  binds it (`open_pull`), who writes connects (`open_push`): ZeroMQ keeps what is sent before the peer binds, so the
  order of starts does not matter.
- The scheduler says that it is ready by sending SchedulerReady. An error in `start` that a user can mend is raised as
  ValueError, OSError, StartupError or any exception type of this package, with one sentence that says what to do: it
  is written to `error_file`, the exit code is 1, nothing is printed, and the parent repeats the sentence once. Any
  other exception, and any in `serve`, also prints its traceback.
- SIGINT and SIGTERM mean nothing to a child: the parent drains first, then asks with SIGUSR1, again and again, whose
  first raises SystemExit in the main thread (`finally` blocks run), and in the end kills a child that has not left.
- A child dies with its parent, however that died: with the parent's thread that started it, as Linux has it.
- Logging goes to stderr, which the parent passes on; its last line is the hint that the parent gives if a child dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import zmq

from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.log import configure_logging

STOP_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


class StartupError(Exception):
    """The engine cannot start; the message is one sentence for the user."""


class ChildArgs(msgspec.Struct, frozen=True, kw_only=True):
    """ipc: socket name -> address. extra: what only one kind of child needs. parent_pid 0: started by hand."""

    server_args: dict[str, Any]
    ipc: dict[str, str]
    error_file: str = ""
    parent_pid: int = 0
    extra: dict[str, Any] = {}

    def parsed_server_args(self) -> ServerArgs:
        return ServerArgs(**self.server_args)


def open_pull(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.PULL)
    # No limit: a limit would block the sender or drop; the number of requests is bounded at admission instead.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    return socket


def open_push(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    # The peer may bind seconds later; do not make the first message wait for a long retry.
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.connect(address)
    return socket


def run_child(start: Callable[[ChildArgs], Callable[[], None]], argv: list[str] | None = None) -> NoReturn:
    args = msgspec.json.decode((argv or sys.argv)[1], type=ChildArgs)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(STOP_SIGNAL, _stop)
    if args.parent_pid:
        _die_with_parent(args.parent_pid)
    configure_logging(args.server_args.get("log_level", "info"))
    serving = False
    try:
        serve = start(args)
        serving = True
        serve()
    except Exception as error:
        if serving or not is_for_the_user(error):
            traceback.print_exc()
        if args.error_file:
            with open(args.error_file, "w") as file:
                file.write(one_sentence(error))
        sys.exit(1)
    sys.exit(0)


def _stop(*_: object) -> None:
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)  # the parent repeats it: do not disturb what ends us
    sys.exit(0)


def is_for_the_user(error: BaseException) -> bool:
    """A start-up error that says what to do; anything else is a bug and deserves its traceback."""
    return isinstance(error, ValueError | OSError) or type(error).__module__.split(".")[0] == "sglang"


def one_sentence(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _die_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it died before the line above took effect
        os._exit(1)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(1)
