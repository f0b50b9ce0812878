"""How a server starts, and the one sentence with which it does not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from server_fixture import Server

pytestmark = pytest.mark.e2e


def failed_start(*flags: str, fake: list[str] | None = None, model: str = "embedded", code: int = 1) -> str:
    """What a server that cannot start prints: one sentence, and nothing is left."""
    with Server(*flags, fake=fake, model=model, wait=False) as server:
        assert server.wait() == code, server.output()
        output = server.output()
        assert "Traceback" not in output
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, output
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


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    assert "config.json" in failed_start(model=str(tmp_path))


def test_a_child_that_cannot_start_tells_why() -> None:
    sentence = "there is not enough memory: lower --max-total-tokens"
    assert failed_start(fake=["--fail", sentence]) == f"error: {sentence}"


def test_wrong_flags() -> None:
    assert "--pp-size" in failed_start("--pp-size", "2", fake=[], code=2)
