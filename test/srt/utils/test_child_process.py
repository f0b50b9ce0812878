"""How a child ends: what it has to close is closed, and no thread keeps it or brings it down."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from sglang.srt.utils.child_process import ChildArgs, is_for_the_user, one_sentence

CHILD = """
import os, signal, sys, threading, time
from sglang.srt.utils.child_process import StartupError, run_child, without_stopping

def close():
    time.sleep(0.05)  # signals that come now change nothing
    print("closed", flush=True)

def start(args, on_exit):
    on_exit.callback(close)
    # As a thread that computes: not a daemon, so that an orderly end of the interpreter would wait for it.
    threading.Thread(target=threading.Event().wait).start()
    {start}
    def serve():
        {serve}
    return serve

run_child(start)
"""


def run(args: ChildArgs, start: str, serve: str) -> subprocess.CompletedProcess[str]:
    command, settings = [sys.executable, "-c", CHILD.format(start=start, serve=serve)], msgspec.json.encode(args)
    return subprocess.run(command, input=settings.decode(), capture_output=True, text=True, timeout=120)


STOP = "os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR1)"


@pytest.mark.parametrize(
    ("start", "serve", "code", "error"),
    [
        ("pass", STOP, 0, ""),
        (STOP, "pass", 0, ""),
        ("pass", "pass", 0, ""),
        ("raise StartupError('no room')", "pass", 1, "no room"),
        ("pass", "raise RuntimeError('broken')", 1, "broken"),
        (
            "os.kill(os.getpid(), signal.SIGTERM)",
            "os.kill(os.getpid(), signal.SIGINT); raise OSError('last')",
            1,
            "last",
        ),
    ],
    ids=["told", "told while it starts", "done", "cannot start", "breaks", "other signals"],
)
def test_a_child_closes_what_it_has_and_ends(start: str, serve: str, code: int, error: str, tmp_path: Path) -> None:
    args = ChildArgs(server_args={}, ipc={}, error_file=str(tmp_path / "error"))
    done = run(args, start, serve)
    assert (done.returncode, done.stdout) == (code, "closed\n"), done.stderr
    assert (tmp_path / "error").exists() == bool(error)
    assert not error or (tmp_path / "error").read_text() == error
    assert ("Traceback" in done.stderr or "uncaught" in done.stderr) == (error in ("broken", "last"))


def test_what_must_not_be_half_made_is_not_interrupted(tmp_path: Path) -> None:
    start = f"""
    with without_stopping():
        {STOP}
        print("made", flush=True)
    """
    args = ChildArgs(server_args={}, ipc={})
    done = run(args, start, STOP)
    assert (done.returncode, done.stdout) == (0, "made\nclosed\n"), done.stderr


def test_a_signal_before_the_server_handles_any_ends_it() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        code = f"import os, sglang.launch_server as l; l.stop_at_once(); os.kill(os.getpid(), {int(number)}); input()"
        done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.PIPE, capture_output=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, b"")


def test_standard_streams_that_are_closed_are_given_to_no_file(tmp_path: Path) -> None:
    """Not even in children, which inherit them."""
    child = "import os; [os.fstat(fd) for fd in range(3)]"
    code = (
        "import os, subprocess, sys, sglang.launch_server as l; l.fill_standard_streams(); "
        f"os._exit(os.open('/', 0) <= 2 or subprocess.call([sys.executable, '-c', {child!r}]))"
    )
    for closed in ("0<&- 1>&- 2>&-", "2>&-", "0<&-", ""):
        script = f'exec "$0" -c "$1" {closed}'
        done = subprocess.run(["sh", "-c", script, sys.executable, code], stdin=subprocess.DEVNULL, timeout=120)
        assert done.returncode == 0, closed


def test_a_start_without_threads_is_one_sentence() -> None:
    usual = threading.stack_size(1 << 47)  # more than there are addresses
    try:
        with pytest.raises(RuntimeError) as refusal:
            threading.Thread(target=print).start()
    finally:
        threading.stack_size(usual)
    assert is_for_the_user(refusal.value)
    assert one_sentence(refusal.value).endswith("raise the limit of processes (ulimit -u, pids.max)")
    assert not is_for_the_user(RuntimeError("another"))
