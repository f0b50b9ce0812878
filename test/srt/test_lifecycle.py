"""How a server ends, whatever ends it: signals, deaths of any process, clients that leave; and what the log says."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import SINGLE_RANK
from sglang.srt.entrypoints.engine import private_directory
from sglang.srt.managers.startup import device as device_setup
from sglang.srt.managers.startup import sizes as startup_sizes
from sglang.srt.utils.child_process import StartupError, log_uncaught
from support.server_fixture import NO_TLS, PATIENCE_S, Server, wait_until

pytestmark = pytest.mark.e2e

SLOW = ["--delay-s", "0.02"]
# 3000 tokens take ten minutes.
ENDLESS = ["--delay-s", "0.2"]


class Stream(threading.Thread):
    """A client that reads a long answer to its end. events: what came."""

    def __init__(self, server: Server, tokens: int, wait: bool = True, **params) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.body = {
            "text": "so long",
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, **params},
            "stream": True,
        }
        self.events: list[dict] = []
        self.cut = self.done = False
        self.start()
        if wait:
            wait_until(lambda: bool(self.events))

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", self.server.url + "/generate", json=self.body, timeout=PATIENCE_S, verify=NO_TLS
            ) as response:
                for line in response.iter_lines():
                    self.done = line == "data: [DONE]" or (self.done and not line)
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError:
            self.cut = True

    def last(self) -> dict:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.events[-1]


class Waiting(threading.Thread):
    """A client that waits for the whole of an answer."""

    def __init__(self, server: Server, tokens: int) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.body = {"text": "so long", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        self.result: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.result = self.server.post("/generate", self.body)

    def reply(self) -> httpx.Response:
        self.join(PATIENCE_S)
        assert self.result is not None
        return self.result


def errors_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if "ERROR" in line]


def running(server: Server) -> int:
    return server.state()["queues"]["running"]


# Signals


def test_what_runs_is_drained_and_nothing_new_is_taken(tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    with Server(fake=["--hold", str(hold)], drain_s=600) as server:
        stream, waiting = Stream(server, 60, wait=False), Waiting(server, 50)
        wait_until(lambda: running(server) == 2)
        server.process.send_signal(signal.SIGTERM)
        for child in server.children:
            child.send_signal(signal.SIGTERM)  # as a service manager does
        wait_until(server.is_stopping)
        refused = server.post("/generate", {"text": "so long", "sampling_params": {"max_new_tokens": 5}})
        assert refused.status_code == 503 and refused.json()["object"] == "error"
        hold.unlink()
        assert stream.last()["meta_info"]["completion_tokens"] == 60
        assert waiting.reply().json()["meta_info"]["completion_tokens"] == 50
        assert server.wait() == 0
        server.assert_clean_log()
        server.assert_nothing_left()


def test_balancers_see_the_end_before_requests_are_refused():
    with Server("--drain-delay", "600", fake=[]) as server:
        server.send()
        wait_until(server.is_stopping)
        taken = server.post("/generate", {"text": "so long", "sampling_params": {"max_new_tokens": 5}})
        assert taken.status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        server.assert_clean_log()


def test_the_drain_is_bounded(tmp_path):
    hold = tmp_path / "hold"
    with Server(fake=["--hold", str(hold)], drain_s=0.5) as server:
        hold.touch()
        waiting = Waiting(server, 20)
        wait_until(lambda: running(server) == 1)
        server.stop()
        assert waiting.reply().status_code == 503


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGTERM, signal.SIGINT), pytest.param((signal.SIGINT, signal.SIGTERM), marks=pytest.mark.slow)],
)
def test_a_second_signal_ends_requests_at_once(numbers):
    with Server(fake=ENDLESS, drain_s=600) as server:
        streams = [Stream(server, 3000), Stream(server, 3000, n=3)]
        waiting = Waiting(server, 3000)
        wait_until(lambda: running(server) == 5)
        server.stop(*numbers)
        for stream in streams:
            assert stream.last()["error"]["code"] == 503
        assert waiting.reply().status_code == 503


@pytest.mark.slow
def test_a_client_that_reads_nothing_does_not_hold_up_the_end():
    with Server(fake=SLOW, drain_s=600) as server:
        params = {"max_new_tokens": 3000, "ignore_eos": True}
        body = json.dumps({"text": ["so long " * 20] * 64, "sampling_params": params, "stream": True}).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)

            def buffers_are_full() -> bool:
                """Each event holds the whole answer so far: 64 of them make 30 KB a step and more."""
                time.sleep(0.1)
                return server.state()["counters"]["steps"] >= 150

            wait_until(buffers_are_full)
            server.send(signal.SIGTERM, signal.SIGTERM)
            assert server.wait() == 0
        assert "Traceback" not in server.output(), server.output()[-3000:]
        server.assert_nothing_left()


def test_a_scheduler_that_does_not_stop_is_killed():
    with Server(fake=["--stuck"]) as server:
        server.stop()


def test_a_signal_while_the_children_start(tmp_path):
    started = tmp_path / "started"
    with Server(fake=["--start-hold", str(started)], wait=False) as server:
        wait_until(started.exists)
        server.children = psutil.Process(server.process.pid).children(recursive=True)
        assert server.children
        server.stop()
        assert "stopped before the server was ready" in server.output()


# Deaths


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "fake, error, warning",
    [
        (["--kill-at", "20"], "the scheduler process was killed by SIGKILL; shutting down", "about the scheduler"),
        (["--crash-at", "20"], "ended with exit code 1: RuntimeError: the fake scheduler was told to crash", None),
    ],
    ids=["killed", "raises"],
)
def test_the_log_names_who_died_and_says_why_once(fake, error, warning, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    with Server(fake=[*fake, "--hold", str(hold)]) as server:
        stream, waiting = Stream(server, 500, wait=False), [Waiting(server, 500) for _ in range(2)]
        wait_until(lambda: running(server) == 3)
        hold.unlink()
        assert "the scheduler process" in stream.last()["error"]["message"] and stream.done
        for reply in (each.reply() for each in waiting):
            assert reply.status_code == 500 and "the scheduler process" in reply.json()["message"]
        assert server.wait() == 1
        output = server.output()
        (line,) = [line for line in errors_in(output) if "the scheduler process" in line]
        assert error in line
        assert output.count("told to crash") == (
            0 if warning else 3
        )  # the line that raised, what it raised, who died
        assert len([line for line in output.splitlines() if "WARNING" in line]) == (1 if warning else 0)
        assert not warning or warning in output
        server.assert_nothing_left()


def test_a_dead_detokenizer_ends_the_server():
    with Server(fake=[]) as server:
        server.child("detokenizer_manager").kill()
        assert server.wait() == 1
        assert "the detokenizer process was killed by SIGKILL" in server.output()
        server.assert_nothing_left()


def test_nothing_is_left_of_a_killed_parent():
    with Server(fake=ENDLESS) as server:
        stream = Stream(server, 3000)
        server.process.kill()
        _, alive = psutil.wait_procs(server.children, timeout=PATIENCE_S)
        assert not alive
        stream.join(PATIENCE_S)
        assert stream.cut
        server.process.wait()
        server.assert_nothing_left()


def test_the_next_start_removes_what_a_massacre_left(monkeypatch, tmp_path):
    code = "from sglang.srt.entrypoints.engine import private_directory as d; print(d()[0], flush=True); input()"
    command = [sys.executable, "-c", code]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    other = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    theirs = other.stdout.readline().strip()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path, lock = private_directory()
    assert os.path.isdir(theirs), "it lives"
    other.kill()
    other.wait()
    again, second = private_directory()
    assert not os.path.exists(theirs) and os.path.isdir(path)
    for descriptor in (lock, second):
        os.close(descriptor)
    shutil.rmtree(path)
    shutil.rmtree(again)


# Two ranks


@pytest.mark.slow
def test_two_ranks_free_what_clients_leave_and_stop_at_the_second_signal():
    shared_memory = set(os.listdir("/dev/shm"))
    with Server("--tp-size", "2", "--hicache", "--max-total-tokens", "2048") as server:
        body = {"text": "so long", "sampling_params": {"max_new_tokens": 400, "n": 3, "ignore_eos": True}}
        with httpx.stream(
            "POST", server.url + "/generate", json={**body, "stream": True}, timeout=PATIENCE_S, verify=NO_TLS
        ) as response:
            pieces = response.iter_raw()
            next(pieces)
            assert server.state()["queues"]["running"] == 3
        wait_until(lambda: not any(server.state()["queues"].values()))
        wait_until(lambda: server.state()["tiers"]["device"]["pages"]["held"] == 0)
        drained = Stream(server, 100)
        endless = Stream(server, 1900)
        server.process.terminate()
        assert drained.last()["meta_info"]["completion_tokens"] == 100
        server.stop()
        assert endless.last()["error"]["code"] == 503
        output = server.output()
        assert "TP0] INFO: weights: " in output and "TP1] INFO: weights: " in output
    assert set(os.listdir("/dev/shm")) <= shared_memory


# Memory


def test_weights_that_do_not_fit_end_start_up_with_a_sentence(monkeypatch, caplog):
    model = ModelConfig.from_pretrained("embedded", "float32", None)
    with caplog.at_level(logging.INFO):
        startup_sizes.check_weights_fit(model, SINGLE_RANK)
    assert re.search(r"weights: 16\.\d\d MB of \d+\.\d\d GB of free memory", caplog.text)
    monkeypatch.setattr(device_setup, "available_memory", lambda: 1000)
    with pytest.raises(StartupError, match=r"the weights need 16\.\d\d MB, but 1\.00 kB of memory are free"):
        startup_sizes.check_weights_fit(model, SINGLE_RANK)


# Tracebacks


def fails(message: str) -> None:
    raise KeyError(message)


def test_an_uncaught_exception_is_logged_once_in_our_own_frames(caplog):
    try:
        try:
            fails("the cause")
        except KeyError as cause:
            raise RuntimeError("stream compute died: the cause") from cause
    except RuntimeError as error:
        log_uncaught(error)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.count("the cause") == 2 and "compute" not in text  # the line that raised, and the error
    assert text.splitlines()[-1] == "KeyError: 'the cause'"


def test_the_loss_of_another_rank_is_a_line(caplog):
    log_uncaught(RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:24716"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "\n" not in record.getMessage()
