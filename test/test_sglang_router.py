"""Other people's routers, sglang-router and its successor smg, in front of two servers of one model that share a disk
and a store. They are installed for `make test-clients`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.server_fixture import NO_TLS, PATIENCE_S, Server, free_port, wait_until
from support.store_servers import RedisServer

pytestmark = [pytest.mark.clients, pytest.mark.e2e]

ROUTERS = {"sglang_router": "sglang-router", "smg": "smg"}
# As docs/guides/router.md has them, but for the policy. A server that is back is used again within seconds. A request
# is tried five times, at the dead server each time perhaps, until that has failed as often as the threshold.
ROUTER_FLAGS = (
    "--policy round_robin --health-check-interval-secs 1 --health-failure-threshold 1 --health-success-threshold 1 "
    "--cb-failure-threshold 2 --cb-timeout-duration-secs 2 --cb-success-threshold 1 --worker-startup-check-interval 1"
)
# Answers are compared, and launches of other sizes round otherwise.
SERVER_FLAGS = (
    "--hicache --dtype float32 --max-total-tokens 4096 --hicache-load-or-recompute off "
    "--hicache-storage-prefetch-policy wait_complete --hicache-write-policy write_through --admin-api-key admin"
)
BLOCK = 32
ADMIN = {"Authorization": "Bearer admin"}


class Replicas:
    """Two servers that share a folder and a store."""

    def __init__(self, folder: Path, store: RedisServer) -> None:
        config = {
            "block_tokens": BLOCK,
            "prefetch_threshold": BLOCK,
            "secret": "of the tests",
            "file": {"path": str(folder / "kv"), "limit_gb": 0.5},
            "remote": {"url": store.url},
        }
        self._flags = (
            *SERVER_FLAGS.split(),
            *("--hicache-storage-backend", "file,remote"),
            *("--hicache-storage-backend-extra-config", json.dumps(config)),
        )
        self._stack = ExitStack()
        self.servers = [self._stack.enter_context(Server(*self._flags, wait=False)) for _ in range(2)]
        for server in self.servers:
            server.wait_ready()

    def restart(self, server: Server) -> Server:
        """At the same port, which its clients know."""
        again = self._stack.enter_context(Server(*self._flags, "--port", str(server.port), wait=False))
        again.port, again.url = server.port, server.url
        again.wait_ready()
        self.servers[self.servers.index(server)] = again
        return again

    def num_stored(self) -> int:
        return sum(server.state()["counters"].get("backuped_tokens", 0) for server in self.servers)

    def wait_stored(self, num_tokens: int) -> None:
        """Until so many tokens are stored since the start, and no more are on their way."""
        wait_until(lambda: self.num_stored() >= num_tokens)
        wait_until(lambda: not any(server.state()["storage"]["storing_tokens"] for server in self.servers))

    def close(self) -> None:
        self._stack.close()


def switch_disk_reads(server: Server, on: bool) -> None:
    reply = httpx.put(f"{server.url}/hicache/tiers/disk", json={"reads": on}, headers=ADMIN, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text


def running(server: Server) -> int:
    number: int = server.state()["queues"]["running"]
    return number


def num_requests(server: Server) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:num_requests_total"))


@contextmanager
def routed(package: str, servers: list[Server], log: Path) -> Iterator[str]:
    """The router's address, once it has found all servers."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{ROUTERS[package]} is not installed: make test-clients installs it")
    port, prometheus_port = free_port(), free_port()
    command = [sys.executable, "-m", f"{package}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus_port), *ROUTER_FLAGS.split()]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--worker-urls", *(server.url for server in servers)], stdout=output, stderr=output
        )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            workers = httpx.get(f"{url}/workers", verify=NO_TLS).json()["workers"]
        except (httpx.TransportError, KeyError, ValueError):
            return False
        return len(workers) == len(servers) and all(worker["is_healthy"] for worker in workers)

    try:
        wait_until(is_ready)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    if all(importlib.util.find_spec(package) is None for package in ROUTERS):
        pytest.skip("neither sglang-router nor smg is installed: make test-clients installs them")
    folder = tmp_path_factory.mktemp("shared")
    store = RedisServer(folder)
    both = Replicas(folder, store)
    try:
        yield both
    finally:
        both.close()
        store.kill()


def ask(client: openai.OpenAI, prompt: str, **params: Any) -> Any:
    """A completion: sglang-router drops from chats what it does not know, as these details."""
    return client.completions.create(
        model="embedded",
        prompt=prompt,
        temperature=0,
        max_tokens=8,
        extra_body={"ignore_eos": True, "return_cached_tokens_details": True},
        **params,
    )


def details(reply: Any) -> dict[str, int]:
    found: dict[str, int] = reply.usage.prompt_tokens_details.cached_tokens_details
    return found


@pytest.mark.parametrize("package", ROUTERS)
def test_what_one_server_computed_is_a_hit_on_the_other(package: str, replicas: Replicas, tmp_path: Path) -> None:
    with routed(package, replicas.servers, tmp_path / "log") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for source, reads_disk in (("disk", True), ("remote", False)):
            for server in replicas.servers:
                switch_disk_reads(server, reads_disk)
            before = [num_requests(server) for server in replicas.servers]
            prompt = f"{package}, {source}. " + "What the one has computed, the other one finds. " * 12
            num_stored = replicas.num_stored()
            first = ask(client, prompt)
            replicas.wait_stored(num_stored + 4 * BLOCK)
            second = ask(client, prompt)
            assert [num_requests(server) for server in replicas.servers] == [number + 1 for number in before]
            assert first.usage.prompt_tokens_details.cached_tokens < BLOCK
            assert second.choices[0].text == first.choices[0].text
            found = details(second)
            assert found[source] >= 4 * BLOCK and found["device"] + found["host"] < BLOCK, found
        for server in replicas.servers:
            switch_disk_reads(server, True)


class Load:
    """Conversations by several clients, until the context ends. Every answer must come, and be the right one.

    broken: streams that broke off after they had begun, which their client asked again."""

    def __init__(self, url: str, num_clients: int = 4) -> None:
        self._url = url
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._texts: dict[str, str] = {}
        self.num_answers = 0
        self.broken: list[str] = []
        self._pool = ThreadPoolExecutor(num_clients)
        self._clients = [self._pool.submit(self._run, i) for i in range(num_clients)]

    def _run(self, number: int) -> None:
        client = openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        turn = 0
        while not self._closed.is_set():
            messages: list[Any] = [{"role": "user", "content": f"Conversation {number % 2}. " * 20}]
            for _ in range(3):
                text = (self._streamed if turn % 2 else self._whole)(client, messages)
                turn += 1
                with self._lock:
                    self.num_answers += 1
                    assert self._texts.setdefault(str(messages), text) == text
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]

    def _body(self, messages: list[Any]) -> dict[str, Any]:
        body = {"model": "embedded", "messages": messages, "temperature": 0, "max_tokens": 24}
        return body | {"extra_body": {"ignore_eos": True}}

    def _whole(self, client: openai.OpenAI, messages: list[Any]) -> str:
        reply = client.chat.completions.create(**self._body(messages))
        assert reply.usage.completion_tokens == 24
        return reply.choices[0].message.content

    def _streamed(self, client: openai.OpenAI, messages: list[Any]) -> str:
        pieces: list[str] = []
        try:
            for chunk in client.chat.completions.create(**self._body(messages), stream=True):
                if chunk.choices:
                    pieces.append(chunk.choices[0].delta.content or "")
                    if chunk.choices[0].finish_reason:
                        return "".join(pieces)
        except openai.APIError as error:
            assert pieces, "a stream that has not begun can be asked elsewhere"
            with self._lock:
                self.broken.append(repr(error))
        else:
            raise AssertionError("a stream ended early, and no error told it")
        return self._whole(client, messages)

    def wait_for_answers(self, number: int) -> None:
        enough = self.num_answers + number
        self.wait_until(lambda: self.num_answers >= enough)

    def wait_until(self, true: Callable[[], bool]) -> None:
        def is_over() -> bool:
            for client in self._clients:
                if client.done():
                    client.result()
            return true()

        wait_until(is_over)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()


@pytest.mark.parametrize("package", ROUTERS)
def test_every_request_is_answered_while_one_server_is_killed_and_the_other_drained(
    package: str, replicas: Replicas, tmp_path: Path
) -> None:
    with routed(package, replicas.servers, tmp_path / "log") as url, Load(url) as load:
        load.wait_for_answers(12)
        killed, drained = replicas.servers
        load.wait_until(lambda: running(killed) > 0)
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait()
        load.wait_for_answers(12)
        again = replicas.restart(killed)
        load.wait_until(lambda: num_requests(again) >= 3)
        assert len(load.broken) <= 4, "one of each client, at most"
        num_broken = len(load.broken)
        load.wait_until(lambda: running(drained) > 0)
        drained.send()
        assert drained.wait() == 0
        drained.assert_clean_log()
        load.wait_for_answers(12)
        again = replicas.restart(drained)
        load.wait_until(lambda: num_requests(again) >= 3)
        assert len(load.broken) == num_broken, "a drain breaks no stream"
