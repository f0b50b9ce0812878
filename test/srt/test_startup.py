"""How a server starts, what it prints meanwhile, and the one sentence with which it does not start."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from pathlib import Path

import pytest

import sglang
from sglang.srt.entrypoints import engine as engine_module
from support.server_fixture import HERE, Server, wait_until

pytestmark = pytest.mark.e2e

FAKE = (sys.executable, str(HERE / "fake_scheduler.py"))


def failed_start(*flags: str, fake: list[str] | None = None, model: str = "embedded", code: int = 1) -> str:
    """What a server that cannot start prints: one sentence, and nothing is left."""
    with Server(*flags, fake=fake, model=model, wait=False) as server:
        assert server.wait() == code, server.output()
        output = server.output()
        assert "Traceback" not in output
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, output
        # What the parent can see is said before any child is started.
        assert ("starting 2 processes" in output) == (fake is not None and code == 1), output
        server.assert_nothing_left()
    return errors[0]


def test_a_busy_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sentence = failed_start("--port", str(port))
    assert str(port) in sentence and "choose another --port" in sentence


def test_a_missing_model() -> None:
    assert "/nowhere/model" in failed_start(model="/nowhere/model")


def test_a_storage_key_of_a_wrong_size(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"short")
    extra = json.dumps({"path": str(tmp_path)})
    flags = ("--hicache", "--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", extra)
    assert "holds 5 bytes instead of 32" in failed_start(*flags)


def test_a_child_that_cannot_start_tells_why() -> None:
    sentence = "there is not enough memory: lower --max-total-tokens"
    assert failed_start(fake=["--fail", sentence]) == f"error: {sentence}"


def test_wrong_flags() -> None:
    assert "--pp-size" in failed_start("--pp-size", "2", fake=[], code=2)


def test_a_start_that_takes_long_tells_what_it_is_doing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_module, "_PROGRESS_INTERVAL_S", 0.01)
    caplog.set_level(logging.INFO)
    started = tmp_path / "started"
    engines: list[sglang.Engine] = []
    # Stands still at its start until its file is gone.
    command = (*FAKE, "--start-hold", str(started))
    thread = threading.Thread(
        target=lambda: engines.append(sglang.Engine(model_path="embedded", scheduler_command=command))
    )
    thread.start()
    wait_until(lambda: "s: importing what the scheduler process needs" in caplog.text)
    wait_until(lambda: "s: standing still" in caplog.text)
    started.unlink()
    thread.join()
    engines[0].shutdown()
    others = [line for line in caplog.messages if "still starting, after " not in line]
    assert others == ["starting 2 processes"]
