"""What commands send, how long they wait, and the sentences that they end with; of a server that is a stub."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang.cli import server as server_module
from sglang.cli.__main__ import main

Asked = list[tuple[str, str, dict[str, Any]]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Every request, answered with an empty object."""
    found: Asked = []

    def request(method: str, url: str, **kwargs: Any) -> httpx.Response:
        found.append((method, url.removeprefix("http://127.0.0.1:30000"), kwargs))
        return httpx.Response(200, json={})

    monkeypatch.setattr(httpx, "request", request)
    return found


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    ("command", "waits"),
    [
        (["state"], False),
        (["policies", "hicache_load_ratio=2"], False),
        (["retain", "n", "FILE", "--ttl", "5"], False),
        (["tier", "disk", "--reads", "off"], False),
        (["flush"], True),
        (["attach", "file"], True),
        (["detach"], True),
        (["clear"], True),
        (["warm", "FILE"], True),
        (["erase", "--salt", "s"], True),
        (["quota", "--salt", "s", "disk=5"], True),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_may_take_long_is_waited_for(command: list[str], waits: bool, asked: Asked, tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_text("a prompt")
    assert main(["hicache", *(str(file) if word == "FILE" else word for word in command)]) == 0
    (_, _, sent) = asked[0]
    assert (sent["timeout"].read is None) == waits and sent["timeout"].connect == server_module.PATIENCE_S


def test_a_server_that_hangs(
    silent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_module.Server.ask, "__defaults__", (None, 0.05))
    assert main(["hicache", "tiers", "--url", silent]) == 1
    assert "does not answer within 0.05 s: look" in capsys.readouterr().err
    assert main(["hicache", "release", "n", "--url", silent]) == 1
    assert "but it may still do this" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["retain", "n", "-", "--ttl", "nan"], "--ttl is nan"),
        (["retain", "n", "-", "--ttl", "inf"], "--ttl is inf"),
        (["policies", "hicache_load_ratio=NaN"], "hicache_load_ratio is nan"),
        (["policies", "hicache_load_ratio=1e999"], "hicache_load_ratio is inf"),
        (["quota", "--salt", "s", "host=" + "9" * 5000], "is no TIER=TOKENS"),
        (["erase", "--salt", "\udcff"], "texts in UTF-8"),
        (["release", ".."], "'..' is no name"),
        (["unlabel", ""], "'' is no name"),
    ],
    ids=lambda value: value[:16] if isinstance(value, str) else None,
)
def test_what_is_not_sent(
    command: list[str], sentence: str, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hicache", *command]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and not asked


def test_a_name_with_a_slash(asked: Asked) -> None:
    assert main(["hicache", "release", "a/b"]) == 0
    assert asked[0][:2] == ("DELETE", "/hicache/retention/a%2Fb")
