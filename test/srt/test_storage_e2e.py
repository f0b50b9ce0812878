"""A real server with storage on a disk: killed, started again, changed while it runs."""

from __future__ import annotations

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.server_fixture import NO_TLS, PATIENCE_S, Server, wait_until

pytestmark = pytest.mark.e2e

ROOT = {"Authorization": "Bearer root"}
# With a model so small, computing may be sooner done than fetching.
FLAGS = (
    "--hicache --max-total-tokens 2048 --admin-api-key root --hicache-storage-prefetch-policy wait_complete "
    "--hicache-load-or-recompute off"
)
PROMPT = [300 + i * 7 % 1500 for i in range(400)]


def start(folder: Path | None, *more: str, **settings: object) -> Server:
    flags = [*FLAGS.split(), *more]
    if folder is not None:
        config = json.dumps({"path": str(folder), "prefetch_threshold": 64, **settings})
        flags += ["--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", config]
    return Server(*flags)


def generate(server: Server, ids: list[int] = PROMPT, **fields: object) -> dict:
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": params, **fields}
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


def metric(server: Server, name: str) -> float:
    for line in server.get("/metrics").text.splitlines():
        if line.startswith(f"sglang:{name}{{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"there is no metric {name}")


def details(reply: dict) -> dict[str, int]:
    found = reply["meta_info"]["cached_tokens_details"]
    assert found.pop("storage", 0) == found.get("disk", 0), "upstream's name for the same"
    return found


def admin(server: Server, method: str, path: str = "/hicache/storage-backend", body: object = None) -> httpx.Response:
    return httpx.request(method, server.url + path, json=body, headers=ROOT, timeout=PATIENCE_S, verify=NO_TLS)


def kill(server: Server) -> None:
    """All of it at once, as a machine that loses its power."""
    for child in server.children:
        child.kill()
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()


@pytest.mark.slow
def test_a_killed_server_leaves_what_the_next_one_needs(tmp_path):
    with start(tmp_path / "kv") as server:
        first = generate(server)
        assert details(first) == {"device": 0, "host": 0, "disk": 0}
        wait_until(lambda: metric(server, "backuped_tokens_total") >= 384)
        assert metric(server, "hicache_storage_tokens") == 384
        assert metric(server, "hicache_storage_size_bytes") > 0
        kill(server)
    with start(tmp_path / "kv") as server:
        assert metric(server, "prefetched_tokens_total") == 0
        again = generate(server)
        assert details(again) == {"device": 0, "host": 0, "disk": 384}
        assert (again["text"], again["output_ids"]) == (first["text"], first["output_ids"])
        assert metric(server, "prefetched_tokens_total") == 384
        assert metric(server, "storage_prefetch_hit_tokens_total") == 384
        assert metric(server, "hicache_storage_probes_total") == 1
        assert details(generate(server)) == {"device": 384 + 15, "host": 0, "disk": 0}
        assert server.state()["tiers"]["disk"]["cached_tokens"] == 384
        server.stop()


@pytest.mark.slow
def test_damaged_files_cost_time_only(tmp_path):
    with start(tmp_path / "kv") as server:
        first = generate(server)
        wait_until(lambda: metric(server, "backuped_tokens_total") >= 384)
    for path in (tmp_path / "kv").rglob("*.kv"):
        data = bytearray(path.read_bytes())
        for at in range(len(data) // 2, len(data), 4096):
            data[at] ^= 0xFF
        path.write_bytes(data)
    with start(tmp_path / "kv") as server:
        again = generate(server)
        assert again["output_ids"] == first["output_ids"]
        assert details(again)["disk"] < 384
        assert server.get("/health").status_code == 200


@pytest.mark.slow
def test_storage_is_attached_cleared_and_detached_while_the_server_runs(tmp_path):
    with start(None) as server:
        assert "disk" not in details(generate(server))
        bad = admin(server, "PUT", body={"hicache_storage_backend": "mooncake"})
        assert bad.status_code == 400 and "is not built in" in bad.text
        for settings, says in (
            ("[" * 50_000, "has to be JSON"),
            ("@\0", "cannot read"),
            ('{"prefetch_threshold": 1e400}', "whole number"),
            ('{"path": "/proc/nowhere"}', "/proc/nowhere"),
            ('{"no_such_setting": 1}', "no_such_setting"),
        ):
            body = {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": settings}
            reply = admin(server, "PUT", body=body)
            assert reply.status_code == 400 and says in reply.text, (settings[:40], reply.text)
        config = json.dumps({"path": str(tmp_path / "kv"), "prefetch_threshold": 64})
        body = {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": config}
        assert admin(server, "PUT", body=body).status_code == 200
        assert "detach it first" in admin(server, "PUT", body=body).text
        first = generate(server, PROMPT[::-1])
        wait_until(lambda: metric(server, "backuped_tokens_total") >= 384)
        assert admin(server, "POST", "/flush_cache").status_code == 200
        again = generate(server, PROMPT[::-1])
        assert details(again)["disk"] == 384 and again["output_ids"] == first["output_ids"]
        assert admin(server, "POST", "/hicache/storage-backend/clear").status_code == 200
        assert admin(server, "POST", "/flush_cache").status_code == 200
        assert details(generate(server, PROMPT[::-1]))["disk"] == 0
        assert admin(server, "DELETE").status_code == 200
        assert server.state()["storage"] is None
        assert "disk" not in server.state()["tiers"]
        assert admin(server, "PUT", body=body).status_code == 200, "its folder is free again"
        server.stop()


@pytest.mark.slow
def test_two_servers_share_a_folder_and_one_is_killed_while_both_write(tmp_path):
    """With other page sizes. Each finds what the other has stored, and both together keep the limit."""
    folder, rng = tmp_path / "kv", random.Random(7)
    limit = {"limit_gb": 0.02, "segment_mb": 1}

    def prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(10, 2000) for _ in range(400)] for _ in range(count)]

    def ask(server: Server, texts: list[list[int]]) -> int:
        """Tokens from the disk. Every answer is that of a server without a cache."""
        found = 0
        for text in texts:
            reply = generate(server, text)
            assert reply["output_ids"] == generate(server, text, cache="bypass")["output_ids"]
            found += details(reply)["disk"]
        return found

    def size_bytes() -> int:
        return sum(path.stat().st_size for path in folder.rglob("*.kv"))

    # With `auto` a full disk lacks what memory has.
    flags = ("--hicache-write-policy", "write_through")
    with start(folder, *flags, **limit) as one, start(folder, *flags, "--page-size", "16", **limit) as other:
        texts = prompts(4)
        assert ask(one, texts) == 0
        wait_until(lambda: metric(one, "backuped_tokens_total") >= 4 * 384)
        assert ask(other, texts) == 4 * 384
        stored = other.state()["tiers"]["disk"]["blocks"]
        assert stored == one.state()["tiers"]["disk"]["blocks"], "each block once"
        with ThreadPoolExecutor(2) as pool:
            mine, theirs = prompts(60), prompts(60)
            running = [pool.submit(ask, one, mine), pool.submit(ask, other, theirs)]
            wait_until(lambda: one.state()["counters"]["requests"] > 30)
            kill(one)
            with pytest.raises(httpx.TransportError):
                running[0].result()
            running[1].result()
        wait_until(lambda: not other.state()["storage"]["storing_tokens"])
        assert size_bytes() <= 0.02e9 + 2 * 1e6
        with start(folder, **limit) as again:
            assert ask(again, theirs[-3:]) == 3 * 384, "what the survivor has stored"
            again.stop()
        other.stop()
