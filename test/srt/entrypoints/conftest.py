"""Servers that the tests of several files ask, around the fake scheduler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.scripted_server import Scripted, scripted_server
from support.server_fixture import Server


@pytest.fixture(scope="session")
def echo_server() -> Iterator[Server]:
    """Without a key. Slow enough to be seen streaming."""
    with Server("--served-model-name", "echo", fake=["--delay-s", "0.001"]) as server:
        yield server


@pytest.fixture(scope="session")
def keyed_server() -> Iterator[Server]:
    """With the keys "user" and "root"."""
    keys = {"SGLANG_API_KEY": "user", "SGLANG_ADMIN_API_KEY": "root"}
    with Server(fake=[], environment=keys) as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """Whose answers a test sets."""
    yield from scripted_server(tmp_path_factory.mktemp("scripted"))
