"""What commands send, how long they wait, and the sentences that they end with; of a server that is a stub."""

from __future__ import annotations

import io
import json
import os
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
        (["label", "\udcff", "-"], "no name in UTF-8"),
        (["tier", "\udcff"], "no name in UTF-8"),
        (["flush", "--admin-api-key", "é"], "the server's key must be printable ASCII"),
        (["flush", "--admin-api-key", "a\nb"], "the server's key must be printable ASCII"),
        (["release", ".."], "'..' is no name"),
        (["unlabel", ""], "'' is no name"),
    ],
    ids=lambda value: value[:16] if isinstance(value, str) else None,
)
def test_what_is_not_sent(
    command: list[str],
    sentence: str,
    asked: Asked,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a prompt"))
    assert main(["hicache", *command]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and not asked


def test_a_name_with_a_slash(asked: Asked) -> None:
    assert main(["hicache", "release", "a/b"]) == 0
    assert asked[0][:2] == ("DELETE", "/hicache/retention/a%2Fb")


JSON, TEXT, HTML = "application/json", "text/plain", "text/html"


@pytest.mark.parametrize(
    ("command", "status", "kind", "content", "sentence"),
    [
        (["flush"], 302, TEXT, b"", "/flush_cache answers with status 302"),
        (["erase", "--salt", "s"], 307, HTML, b"<html>", "/hicache/erase answers with status 307"),
        (["flush"], 500, TEXT, b"", "/flush_cache answers with status 500"),
        (["flush"], 502, HTML, b"<html>", "/flush_cache answers with status 502"),
        (["flush"], 400, JSON, b'{"error": {"message": "it is busy"}}', "with status 400: it is busy"),
        (["flush"], 200, TEXT, b" ", "answers with neither a JSON object nor a text: name the server with --url"),
        (["flush"], 200, HTML, b"<html>", "with neither a JSON object nor a text"),
        (["state"], 200, JSON, b'{"a": ', "with neither a JSON object nor a text"),
        (["state"], 200, JSON, b"[1]", "with neither a JSON object nor a text"),
        (["state"], 200, JSON, b'"\xe9"', "with neither a JSON object nor a text"),
        (["state"], 200, JSON, b"[" * 100_000, "with neither a JSON object nor a text"),
        (["state"], 200, TEXT, b"hello", "/hicache/state answers with no JSON object: name the server"),
        (["tiers"], 200, TEXT, b"hello", "/hicache/tiers answers with no JSON object"),
        (["advise"], 200, TEXT, b"hello", "/hicache/state answers with no JSON object"),
        (["advise"], 200, JSON, b"{}", "block_tokens in the server's reply is None"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_answer_of_the_server(
    command: list[str],
    status: int,
    kind: str,
    content: bytes,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reply = httpx.Response(status, headers={"content-type": kind}, content=content)
    monkeypatch.setattr(httpx, "request", lambda *_, **__: reply)
    assert main(["hicache", *command]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and sentence in printed.err
    assert printed.err.count("\n") == 1 and not printed.out


def test_json_that_is_nested_too_deeply_is_a_text(asked: Asked, tmp_path: Path) -> None:
    deep = "[" * 100_000
    file = tmp_path / "lines"
    file.write_text(deep)
    assert main(["hicache", "warm", "--lines", str(file)]) == 0 and main(["hicache", "policies", f"a={deep}"]) == 0
    bodies = [json.loads(sent["content"]) for _, _, sent in asked]
    assert bodies == [{"prompts": [deep]}, {"a": deep}]


def test_an_interrupt_has_the_code_of_shells(monkeypatch: pytest.MonkeyPatch) -> None:
    def request(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(httpx, "request", request)
    assert main(["hicache", "state"]) == 130


def test_an_answer_that_cannot_be_written(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["hicache", "state"]) == 1
    assert capsys.readouterr().err == "error: the answer cannot be written: No space left on device\n"
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(["hicache", "state"]) == 0
    assert capsys.readouterr().err == ""
