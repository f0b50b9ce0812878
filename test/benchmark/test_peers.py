"""The comparison with other servers: that it leaves none running, and that bad arguments end it before any starts."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest
from benchmark.peers import __main__ as peers
from benchmark.peers.servers import OURS, RunningServer, Setting

# A server that never answers, and what starts it as `main` does.
SCRIPT = """
import sys
from pathlib import Path
from benchmark.peers.__main__ import stop_on_signals
from benchmark.peers.servers import RunningServer, ServerKind, Setting

code = "import os; print(os.getpid(), flush=True); import time; time.sleep(600)"
class Shown(RunningServer):
    def _is_healthy(self):
        if not self.shown:
            print(self._process.pid, flush=True)
        self.shown = True
        return False
    shown = False

stop_on_signals()
server = Shown(ServerKind("silent", lambda setting, port: [sys.executable, "-c", code], lambda setting: {}),
               Setting(Path("."), 1, 1, Path(".")))
try:
    server.start()
finally:
    server.stop()
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_a_server_starts_leaves_none_running(number: int) -> None:
    ours = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert ours.stdout is not None
    server = int(ours.stdout.readline())
    assert psutil.pid_exists(server)
    ours.send_signal(number)
    assert ours.wait(60) == 128 + number
    assert not psutil.pid_exists(server)


def test_a_server_that_was_not_started_is_stopped(tmp_path) -> None:
    RunningServer(OURS, Setting(tmp_path, 1, 1, tmp_path)).stop()


@pytest.mark.parametrize(
    "args, message", [(["--rounds", "0"], "less than 1"), (["--only", "nonsense"], "no scenario")]
)
def test_bad_arguments_end_it_at_once(args, message, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(peers, "make_model", lambda: tmp_path)
    monkeypatch.setattr(peers, "stop_on_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["peers", *args])
    with pytest.raises(SystemExit) as stopped:
        peers.main()
    assert stopped.value.code == 2 and message in capsys.readouterr().err
