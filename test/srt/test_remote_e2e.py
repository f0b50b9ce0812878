"""A real server with a remote store: what one has computed another finds, and whatever dies costs time only."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sglang.srt.offload.proxy_process import STORE_VARIABLE
from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.offload.store.embedded import EmbeddedStore
from support.children import child_environment
from support.server_fixture import PATIENCE_S, Server, wait_until
from support.store_servers import free_port
from support.tls_servers import Certificates, TlsTerminator

pytestmark = pytest.mark.e2e

# With a model so small, computing may be sooner done than fetching.
FLAGS = "--hicache --max-total-tokens 2048 --hicache-storage-prefetch-policy wait_complete"
FLAGS += " --hicache-load-or-recompute off"
PROMPT = [300 + i * 7 % 1500 for i in range(400)]
# Of 64 tokens: six of them are stored.
CONFIG = {"block_tokens": 64, "prefetch_threshold": 64}


def start(backend: str = "remote", *flags: str, **config: object) -> Server:
    extra = json.dumps({**CONFIG, **config})
    storage = ["--hicache-storage-backend", backend, "--hicache-storage-backend-extra-config", extra]
    return Server(*FLAGS.split(), *storage, *flags)


def generate(server: Server, ids: list[int] = PROMPT) -> dict:
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


def details(reply: dict) -> dict[str, int]:
    found = reply["meta_info"]["cached_tokens_details"]
    assert found.pop("storage") == found["remote"], "upstream's name for the same"
    return found


def check_that_it_comes_back(server: Server) -> list[int]:
    """What a prompt has stored is fetched for the next one. Returns the answer."""
    first = generate(server)
    wait_until(lambda: stored(server) >= 384)
    again = generate(server)
    assert details(again) == {"device": 0, "host": 0, "remote": 384}
    assert again["output_ids"] == first["output_ids"]
    return first["output_ids"]


def stored(server: Server) -> int:
    return server.state()["counters"].get("backuped_tokens", 0)


def proxies(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [c for c in children if c.status() != psutil.STATUS_ZOMBIE and "sglang.srt.offload.proxy" in c.cmdline()]


@pytest.fixture
def store(tmp_path: Path):
    server = EmbeddedStore.start(tmp_path / "store", 1 << 28)
    yield f"unix://{server.address.endpoints[0].path}"
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["its own", pytest.param("another's", marks=pytest.mark.slow)])
def test_a_server_finds_what_was_stored(store, whose: str):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(start(url=store))
        first = generate(server)
        assert details(first) == {"device": 0, "host": 0, "remote": 0}
        wait_until(lambda: stored(server) >= 384)
        wait_until(lambda: server.state()["tiers"]["remote"]["blocks"] == 6)
        assert server.state()["storage"]["tiers"] == ["remote"]
        if whose == "its own":
            wait_until(lambda: server.post("/flush_cache", {}).status_code == 200)
        else:
            stack.pop_all().close()
            server = stack.enter_context(start(url=store))
        again = generate(server)
        assert details(again) == {"device": 0, "host": 0, "remote": 384}
        assert (again["text"], again["output_ids"]) == (first["text"], first["output_ids"])
        # Part of it on the device, part remote, part nowhere.
        longer = generate(server, PROMPT + PROMPT[::-1])
        assert details(longer) == {"device": 400, "host": 0, "remote": 0}
        metrics = server.get("/metrics").text
        assert 'cache_source="remote"' in metrics and "sglang:hicache_storage_tokens{" in metrics
        wait_until(lambda: server.state()["tiers"]["remote"].get("deliver_bytes", 0) > 0)
        samples = dict(line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines() if line[:1] != "#")
        of_stage = {k: float(v) for k, v in samples.items() if k.startswith("sglang:hicache_remote_stage_bytes{")}
        assert len(of_stage) == 4 and all(of_stage.values())
        server.stop()


@pytest.mark.slow
def test_a_store_over_tls(store, tmp_path: Path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    certificates = Certificates(tmp_path)
    terminator = TlsTerminator(StoreAddress.parse(store).endpoints[0], certificates.path("server.pem"))
    url = f"rediss://127.0.0.1:{terminator.port}?ca={certificates.path('ca.pem')}"
    try:
        with start("remote", "--hicache-bypass-local", url=url) as server:
            check_that_it_comes_back(server)
            server.stop()
    finally:
        terminator.close()


@contextlib.contextmanager
def proxy_over_tcp(store: str, token: Path, port: int) -> Iterator[str]:
    """An offload proxy by itself. Yields its address."""
    command = [sys.executable, "-m", "sglang.srt.offload.proxy", "--listen", f"tcp://127.0.0.1:{port}"]
    environment = {**child_environment(), STORE_VARIABLE: store}
    with subprocess.Popen([*command, "--token-file", str(token)], env=environment) as process:
        try:
            wait_until(lambda: _is_open(port))
            yield f"tcp://127.0.0.1:{port}"
        finally:
            process.kill()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_proxy_elsewhere_serves_all_ranks_and_costs_time_only(store, tmp_path: Path, tp_size: int):
    token, port = tmp_path / "token", free_port()
    token.write_text("5e7c" * 16)
    config = {"proxy": f"tcp://127.0.0.1:{port}", "token_file": str(token), "secret": "of the deployment"}
    flags = ("--tp-size", str(tp_size), "--hicache-bypass-local")
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(contextlib.ExitStack())
        proxy.enter_context(proxy_over_tcp(store, token, port))
        server = stack.enter_context(start("bluefield", *flags, **config))
        expected = check_that_it_comes_back(server)
        proxy.close()
        lost = generate(server)
        assert details(lost)["remote"] == 0 and lost["output_ids"] == expected
        proxy.enter_context(proxy_over_tcp(store, token, port))
        wait_until(lambda: details(found := generate(server))["remote"] == 384 and found)
        assert generate(server)["output_ids"] == expected
        server.stop()


@pytest.mark.slow
def test_every_request_fetches_with_bypass_local(store):
    with start("remote", "--hicache-bypass-local", url=store) as server:
        first = generate(server)
        wait_until(lambda: stored(server) >= 384)
        for _ in range(3):
            again = generate(server)
            assert details(again) == {"device": 0, "host": 0, "remote": 384}
            assert again["output_ids"] == first["output_ids"]


@pytest.mark.slow
def test_the_store_is_started_where_no_url_is_given_and_leaves_nothing():
    with start() as server:
        first = generate(server)
        wait_until(lambda: stored(server) >= 384)
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert any("redis-server" in " ".join(c.cmdline()) for c in children) and len(proxies(server)) == 1
        server.children = children
        os.kill(proxies(server)[0].pid, signal.SIGKILL)
        again = generate(server, PROMPT[::-1])
        assert details(again)["remote"] == 0
        before = stored(server)
        wait_until(lambda: server.state()["tiers"]["remote"]["proxy_sessions"] == 2 and len(proxies(server)) == 1)

        # Writes have failed, so that nothing is written until a trial has shown that they work again.
        others = iter(range(9, 400))

        def is_stored_again() -> bool:
            generate(server, PROMPT[next(others) :])
            return stored(server) > before

        wait_until(is_stored_again)
        assert generate(server)["output_ids"] == first["output_ids"]
        server.stop()


@pytest.mark.slow
def test_a_killed_server_leaves_no_process_and_no_file():
    with start() as server:
        generate(server)
        server.children = psutil.Process(server.process.pid).children(recursive=True)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        _, alive = psutil.wait_procs(server.children, timeout=PATIENCE_S)
        assert not alive
        wait_until(lambda: not [n for n in os.listdir(server.temp) if n.startswith("sglang-")])


@pytest.mark.slow
def test_what_cannot_start_is_one_sentence():
    extra = json.dumps({**CONFIG, "url": "redis://127.0.0.1:1"})
    storage = ["--hicache-storage-backend", "remote", "--hicache-storage-backend-extra-config", extra]
    with Server(*FLAGS.split(), *storage, wait=False) as server:
        assert server.wait() == 1
        lines = [line for line in server.output().splitlines() if "ERROR" in line or "error" in line]
        assert any("cannot be used" in line for line in lines), server.output()
        assert "Traceback" not in server.output()


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", ["2", "4"])
def test_ranks_have_a_proxy_for_each_host_pool(store, tp_size: str):
    """Two: the model has two KV heads."""
    with start("remote", "--tp-size", tp_size, url=store) as server:
        first = generate(server)
        assert len(proxies(server)) == 2
        wait_until(lambda: stored(server) >= 384)
    with start("remote", "--tp-size", tp_size, url=store) as server:
        again = generate(server)
        assert details(again)["remote"] == 384 and again["output_ids"] == first["output_ids"]


@pytest.mark.slow
def test_disk_and_remote_store_of_one_server(store, tmp_path):
    """The disk loses half of what it has; a prompt comes from both, and from nowhere the rest."""
    extra = json.dumps({**CONFIG, "file": {"path": str(tmp_path / "kv")}, "remote": {"url": store}})
    storage = ["--hicache-storage-backend", "file,remote", "--hicache-storage-backend-extra-config", extra]
    short = json.dumps({**CONFIG, "secret": "", "url": store})
    with Server(*FLAGS.split(), *storage) as server:
        first = generate(server, PROMPT[:192])
        assert first["meta_info"]["cached_tokens_details"] == {
            "device": 0,
            "host": 0,
            "disk": 0,
            "remote": 0,
            "storage": 0,
        }
        wait_until(lambda: stored(server) >= 192)
        tiers = server.state()["tiers"]
        assert tiers["disk"]["blocks"] == 3
        wait_until(lambda: server.state()["tiers"]["remote"]["blocks"] == 3)
    # Another server, without the disk, goes on with the prompt.
    other = ["--hicache-storage-backend", "remote", "--hicache-storage-backend-extra-config", short]
    with Server(*FLAGS.split(), *other) as server:
        whole = generate(server)
        assert details(whole)["remote"] == 192
        wait_until(lambda: stored(server) >= 192)
        wait_until(lambda: server.state()["tiers"]["remote"]["blocks"] == 6)
    with Server(*FLAGS.split(), *storage) as server:
        again = generate(server)
        found = again["meta_info"]["cached_tokens_details"]
        assert found == {"device": 0, "host": 0, "disk": 192, "remote": 192, "storage": 384}
        assert again["output_ids"] == whole["output_ids"]
        counters = server.state()["counters"]
        assert (counters["hit_tokens_disk"], counters["hit_tokens_remote"]) == (192, 192)
