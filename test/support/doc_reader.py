"""Does what a page tells its reader, from top to bottom: starts its servers, runs its commands and programs.

A block that starts a server keeps it running, in place of an earlier one on the same port, until the page ends or the
marker `stop the servers`. Ports of the page stand for free ones. `make` uses the interpreter of the tests.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from support.doc_pages import ROOT, Block
from support.server_fixture import NO_TLS, PATIENCE_S, free_port

_SERVERS = re.compile(r"-m sglang\.(launch_server|router)\b")
_PORTS = re.compile(r"\b(30000|30001|8000)\b")
_DEFAULT_PORT = "30000"
_STOP = "stop the servers"
_ERROR = "answers with an error"
MARKERS = (_STOP, _ERROR)
# curl's exit code for a status of 400 and more, which it has with the option below.
_CURL_HTTP_ERROR = 22
_COMMAND_S = 600.0


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        """Children that a server has started end with it."""
        assert self.process.poll() is None, self.log.read_text()
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        assert code in (0, -signal.SIGTERM), self.log.read_text()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Reader:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="docs-")
        self._home = Path(self._folder.name)
        self._ports: dict[str, str] = {}
        self._servers: dict[str, _Running] = {}
        (self._home / ".curlrc").write_text("fail-with-body\nno-progress-meter\n")
        # The folder of the interpreter first, so that nothing depends on what is installed elsewhere.
        self._env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CURL_HOME": str(self._home),
            "TMPDIR": str(self._home),
        }

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.kill()
        self._folder.cleanup()

    def follow(self, block: Block) -> None:
        if block.marker == _STOP:
            self.stop_servers()
        text = _PORTS.sub(lambda match: self._port(match[0]), block.text)
        if block.language == "python":
            self._run_program(block, text)
        elif _SERVERS.search(text):
            self._start(block, text)
        else:
            self._run_commands(block, text)

    def stop_servers(self) -> None:
        while self._servers:
            _, server = self._servers.popitem()
            server.stop()

    def _port(self, written: str) -> str:
        return self._ports.setdefault(written, str(free_port()))

    def _run_program(self, block: Block, text: str) -> None:
        if saved := re.search(r"Save this as `(\w+\.py)`:\s*\Z", block.before):
            (self._home / saved[1]).write_text(text)
        self._run(block, [sys.executable, "-c", text])

    def _run_commands(self, block: Block, text: str) -> None:
        if block.language == "console":
            text = "\n".join(re.findall(r"^\$ (.*)$", text, re.M))
        make = f"make -C {ROOT} --no-print-directory -o .venv/.setup-done PY={sys.executable} "
        self._run(block, _bash(re.sub(r"^make ", make, text, flags=re.M)))

    def _run(self, block: Block, command: list[str]) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, env=self._env, cwd=self._home
        )
        shown = f"{block.name}\n{done.stdout}\n{done.stderr}"
        is_error = block.marker == _ERROR
        assert done.returncode == (_CURL_HTTP_ERROR if is_error else 0), shown
        assert ('"object":"error"' in done.stdout) == is_error, shown

    def _start(self, block: Block, text: str) -> None:
        port = re.search(r"--port (\d+)", text)
        number = port[1] if port else self._port(_DEFAULT_PORT)
        if number in self._servers:
            self._servers.pop(number).stop()
        command = text.rstrip() + ("" if port else f" --port {number}")
        log = self._home / f"log-{block.line}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                _bash(command), stdout=output, stderr=output, env=self._env, cwd=self._home, start_new_session=True
            )
        self._servers[number] = server = _Running(process, log)
        deadline = time.monotonic() + PATIENCE_S
        while not _is_up(number):
            assert process.poll() is None and time.monotonic() < deadline, f"{block.name}\n{server.log.read_text()}"
            time.sleep(0.05)


def _bash(text: str) -> list[str]:
    return ["bash", "-e", "-o", "pipefail", "-c", text]


def _is_up(port: str) -> bool:
    answer: Any = None
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S, verify=NO_TLS)
    except httpx.TransportError:
        return False
    return answer.status_code == 200
