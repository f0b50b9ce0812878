"""What a service manager is told, over a socket as systemd opens it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang.srt.entrypoints.service_manager import READY, notify
from support.server_fixture import PATIENCE_S, Server


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(PATIENCE_S)
        sock.bind(str(tmp_path / "notify"))
        yield sock


def test_without_a_manager_nothing_is_sent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify(READY, "ready")
    assert caplog.records == []


def test_a_name_without_a_file_is_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(PATIENCE_S)
        sock.bind(f"\0{tmp_path}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{tmp_path}")
        notify(READY, "ready")
        assert sock.recv(100) == b"READY=1\nSTATUS=ready\n"


def test_a_manager_that_is_gone_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    with caplog.at_level(logging.WARNING):
        notify(READY, "ready")
    assert [record.getMessage() for record in caplog.records] == [
        "the service manager was not told READY=1: No such file or directory"
    ]


@pytest.mark.e2e
def test_a_server_tells_when_it_is_ready_and_when_it_stops(manager: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": manager.getsockname()}
    with Server(fake=[], environment=environment, wait=False) as server:
        assert manager.recv(100).startswith(b"READY=1\n")
        assert server.get("/health").status_code == 200
        server.wait_ready()
        server.send()
        assert manager.recv(100).startswith(b"STOPPING=1\n")
        assert server.wait() == 0


@pytest.mark.e2e
@pytest.mark.slow
def test_a_server_that_loses_a_process_tells_it(manager: socket.socket) -> None:
    with Server(fake=[], environment={"NOTIFY_SOCKET": manager.getsockname()}) as server:
        assert manager.recv(100).startswith(b"READY=1\n")
        server.child("detokenizer").kill()
        assert manager.recv(100) == b"STOPPING=1\nSTATUS=a process of the server has ended\n"
        assert server.wait() == 1
