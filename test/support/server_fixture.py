"""A server in a process of its own: started on a free port, spoken to over HTTP, and looked at when it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from sglang.demo_common import free_port

HERE = Path(__file__).parent


# Of a machine on which much else is running. No test waits so long for what is to happen.
PATIENCE_S = 120.0
# For `verify` of httpx: no server of a test is asked over TLS. To read the certificates of all authorities for each
# request takes 20 times the processor time of the request.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def wait_until(true: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Server:
    """fake: flags of the fake scheduler; None starts the real engine, by a script of this folder if one is named.
    environment: on top of this process's."""

    def __init__(
        self,
        *flags: str,
        fake: list[str] | None = None,
        drain_s: float = 5,
        model: str = "embedded",
        wait: bool = True,
        environment: dict[str, str] | None = None,
        script: str = "",
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.temp = tempfile.mkdtemp(prefix="test-")
        command = [sys.executable, "-m", "sglang.launch_server"]
        if script:
            command = [sys.executable, str(HERE / script)]
        if fake is not None:
            command = [sys.executable, str(HERE / "serve_fake.py"), json.dumps(fake), str(drain_s)]
        self.log = open(f"{self.temp}/log", "w+")  # noqa: SIM115
        self._command = [*command, "--model-path", model, "--port", str(self.port), *flags]
        self._environment = {**os.environ, **(environment or {}), "TMPDIR": self.temp}
        self.children: list[psutil.Process] = []
        self.start()
        if wait:
            self.wait_ready()

    def start(self) -> None:
        """At first, or again once it has ended."""
        self.process = subprocess.Popen(self._command, stdout=self.log, stderr=self.log, env=self._environment)

    def kill(self) -> None:
        """As the system does. Its children end by themselves; what they left behind goes."""
        self.process.kill()
        self.process.wait()
        psutil.wait_procs(self.children, PATIENCE_S)
        assert not [child for child in self.children if child.is_running()], self.output()
        for name in os.listdir(self.temp):
            if name != "log":
                shutil.rmtree(f"{self.temp}/{name}")

    def wait_ready(self, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            try:
                if httpx.get(self.url + "/health", timeout=PATIENCE_S, verify=NO_TLS).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        if body is not None:
            kwargs["json"] = body
        return httpx.post(self.url + path, timeout=PATIENCE_S, verify=NO_TLS, **kwargs)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S, verify=NO_TLS)

    def state(self) -> dict[str, Any]:
        return self.get("/hicache/state").json()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        with httpx.stream(
            "POST", self.url + path, json={**body, "stream": True}, timeout=PATIENCE_S, verify=NO_TLS
        ) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def child(self, name: str) -> psutil.Process:
        return next(c for c in self.children if any(name in word for word in c.cmdline()))

    def output(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def is_stopping(self) -> bool:
        """It has heard the first signal: it takes no new requests."""
        return self.get("/health").status_code == 503

    def send(self, *numbers: signal.Signals) -> None:
        first, *rest = numbers or (signal.SIGTERM,)
        self.process.send_signal(first)
        for number in rest:
            wait_until(self.is_stopping)
            self.process.send_signal(number)

    def stop(self, *numbers: signal.Signals) -> None:
        """Ends it by these signals (SIGTERM), the second once the first has been heard. The end is clean: exit code
        0, no trace of an error in the log, nothing left."""
        self.send(*numbers)
        assert self.wait() == 0, self.output()
        self.assert_clean_log()
        self.assert_nothing_left()

    def assert_clean_log(self) -> None:
        """What only goes wrong at the end is not seen by clients. "terminate" is C++'s last word."""
        output = self.output()
        assert not [word for word in ("ERROR", "Traceback", "Exception", "terminate", " died") if word in output], (
            output
        )

    def assert_nothing_left(self) -> None:
        """After the end: no process, no file, no listener."""
        assert not [c for c in self.children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
        # torch makes a cache that belongs to the user, not to the server.
        assert [name for name in os.listdir(self.temp) if not name.startswith("torchinductor")] == ["log"]
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", self.port)) != 0

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()
        shutil.rmtree(self.temp)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
