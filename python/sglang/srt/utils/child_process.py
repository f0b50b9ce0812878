"""How a child process of the engine lives and ends. Owns signals, the parent's watch and the start-up report.

The protocol of a child:

    python -m sglang.srt.managers.<child> <name> < <json of ChildArgs>

- Settings come on stdin, as other users of the machine can read a command line. The name is for readers of `ps`.
- The child calls `run_child(start)` under `if __name__ == "__main__"`. start(ChildArgs, on_exit) builds everything
  and returns `serve`, a function without arguments that runs until the parent asks it to stop. The process that reads
  a socket binds it (`open_pull`), the one that writes connects (`open_push`): ZeroMQ keeps what is sent before the
  peer binds, so the order of starts does not matter.
- on_exit, an ExitStack, holds what has to be closed before the process ends. It is unwound however the process ends,
  during start-up too. Then the process exits at once, by `exit_now`.
- The scheduler sends SchedulerReady when it is ready. An error in `start` that a user can mend is raised as
  ValueError, OSError, StartupError or any exception type of this package, with one sentence about what to do. It
  is written to `error_file`, the exit code is 1, nothing is printed, and the parent repeats the sentence once. Any
  other exception, and any in `serve`, also logs a traceback: once, of where it happened, in our own frames.
- SIGINT and SIGTERM mean nothing to a child: the parent drains first, then asks with SIGUSR1, again and again, whose
  first raises SystemExit in the main thread (`finally` blocks run), and in the end kills a child that has not left.
  What must not be left half made is made `without_stopping`.
- A child dies with its parent, however that died: with the parent's thread that started it, as Linux has it. One
  child (`remove_directory`) notices that by itself, and removes what the parent can no longer remove.
- Logging goes to stderr, which the parent passes on; its last line is the hint that the parent gives if a child dies.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import msgspec
import zmq

from sglang.srt.utils.log import configure_logging

STOP_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1
# Python's words, of a RuntimeError.
_NO_THREAD = "can't start new thread"
# Words of gloo on one rank when another has gone.
_PEER_IS_GONE = ("closed by peer", "reset by peer", "Broken pipe")

logger = logging.getLogger(__name__)


class StartupError(Exception):
    """The engine cannot start; the message is one sentence for the user."""


class ChildArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent passes to a child."""

    # The fields of `ServerArgs`.
    server_args: dict[str, Any]
    # Name of a socket -> its address.
    ipc: dict[str, str]
    # Where the child writes why it cannot start.
    error_file: str = ""
    # 0: the child was started by hand.
    parent_pid: int = 0
    # The directory that this child removes if the parent dies.
    remove_directory: str = ""
    # Put in front of each line of the log.
    log_prefix: str = ""
    # Where the child writes the step of its start-up.
    stage_file: str = ""
    # Columns of the terminal on which the parent shows the child's stderr; 0 if that is no terminal.
    columns: int = 0
    # What only one kind of child needs.
    extra: dict[str, Any] = {}


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


def run_child(start: Callable[[ChildArgs, ExitStack], Callable[[], None]]) -> NoReturn:
    args = msgspec.json.decode(sys.stdin.buffer.read(), type=ChildArgs)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(STOP_SIGNAL, _stop)
    if args.parent_pid:
        die_with_parent(args.parent_pid, args.remove_directory)
    configure_logging(args.server_args.get("log_level", "info"), args.log_prefix)
    serving = False
    on_exit = ExitStack()
    code = 0
    try:
        serve = start(args, on_exit)
        serving = True
        serve()
    except SystemExit:
        pass
    except Exception as error:
        if serving or not is_for_the_user(error):
            log_uncaught(error)
        if args.error_file:
            with open(args.error_file, "w") as file:
                file.write(one_sentence(error))
        code = 1
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)
    try:
        on_exit.close()
    except Exception as error:
        log_uncaught(error)
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Ends the process without taking the interpreter down. A thread that computes in C++ meanwhile would abort the
    process (its frames end by pthread_exit when it asks for the interpreter's lock), and one that tokenises would be
    waited for."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # it is closed, or has no reader any more
            pass
    os._exit(code)


@contextmanager
def without_stopping() -> Iterator[None]:
    """What is made in here, and entered into on_exit, is not interrupted by the signal to stop. The parent repeats
    it."""
    before = signal.signal(STOP_SIGNAL, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(STOP_SIGNAL, before)


def _stop(*_: object) -> None:
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)  # the parent repeats it: do not disturb what ends us
    sys.exit(0)


def is_for_the_user(error: BaseException) -> bool:
    """A start-up error with a sentence about what to do; anything else is a bug and deserves its traceback."""
    is_known = isinstance(error, ValueError | OSError) or type(error).__module__.split(".")[0] == "sglang"
    return is_known or str(error) == _NO_THREAD


def one_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text != _NO_THREAD else f"{text}: raise the limit of processes (ulimit -u, pids.max)"


def log_uncaught(error: BaseException) -> None:
    """Once, of where it happened: without those that heard of it later, and without the libraries' frames. The last
    line is the error itself."""
    while error.__cause__ is not None:
        error = error.__cause__
    what = "".join(traceback.format_exception_only(error)).rstrip()
    if "gloo" in what and any(words in what for words in _PEER_IS_GONE):
        logger.warning("another rank is gone: %s", one_sentence(error))  # that rank logs why
        return
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    logger.error("uncaught exception, latest call last:\n%s%s", "".join(traceback.format_list(ours)), what)


def die_with_parent(parent_pid: int, remove_directory: str = "") -> None:
    """remove_directory: a directory that this process removes if the parent has died."""
    if sys.platform == "linux" and not remove_directory:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid, remove_directory), daemon=True).start()
        return
    if os.getppid() != parent_pid:  # it died before the line above took effect
        os._exit(1)


def _watch_parent(parent_pid: int, remove_directory: str) -> None:
    try:
        poll = select.poll()
        poll.register(os.pidfd_open(parent_pid), select.POLLIN)
        poll.poll()
    except (AttributeError, OSError):  # not on this system, or it is dead already
        pass
    while os.getppid() == parent_pid:
        time.sleep(0.1)
    if remove_directory:
        time.sleep(0.2)  # the others die at the same moment, and should write no more
        shutil.rmtree(remove_directory, ignore_errors=True)
    os._exit(1)
