"""A real server with a disk and a remote store, changed by the commands of `python -m sglang.cli`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang.cli.__main__ import main
from support.server_fixture import Server, wait_until
from support.store_servers import RedisServer

pytestmark = pytest.mark.e2e

KEY = "a-key"
TEXT = "The quick brown fox jumps over the lazy dog, and then it rests. " * 12


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def server(redis: RedisServer, disk: Path) -> Iterator[Server]:
    config = {
        "file": {"path": str(disk)},
        "remote": {"url": redis.url},
        "block_tokens": 16,
        "secret": "s",
        "prefetch_threshold": 1,
    }
    flags = ["--hicache", "--page-size", "4", "--max-total-tokens", "4096", "--hicache-size", "0.02"]
    flags += ["--admin-api-key", KEY, "--hicache-storage-backend", "file,remote"]
    with Server(*flags, "--hicache-storage-backend-extra-config", json.dumps(config)) as server:
        yield server
        server.stop()


@pytest.fixture
def run(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("SGLANG_URL", server.url)
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", KEY)

    def run(*argv: str, fails: bool = False) -> Any:
        assert main(["hicache", *argv]) == int(fails), capsys.readouterr()
        printed = capsys.readouterr()
        text = printed.err if fails else printed.out
        return json.loads(text) if text.startswith(("{", "[")) else text

    return run


def ask(server: Server, salt: str, text: str = TEXT) -> dict[str, int]:
    body = {"text": text, "cache_salt": salt, "return_cached_tokens_details": True}
    body["sampling_params"] = {"max_new_tokens": 3, "temperature": 0}
    reply = server.post("/generate", body)
    assert reply.status_code == 200, reply.text
    details: dict[str, int] = reply.json()["meta_info"]["cached_tokens_details"]
    return details


def settle(server: Server) -> None:
    wait_until(lambda: not any(link["operations_in_flight"] for link in server.state()["links"].values()))


def keys(redis: RedisServer) -> set[bytes]:
    return set(redis.connection().call("KEYS", "*"))


def blocks_on_disk(server: Server) -> int:
    return server.state()["tiers"]["disk"]["blocks"]


def store_prompt_of(server: Server, redis: RedisServer, salt: str) -> None:
    """Ask until both stores have more blocks than before, and nothing is on its way."""
    before, on_disk = len(keys(redis)), blocks_on_disk(server)

    def is_stored() -> bool:
        # What a store that was slow for a moment did not take is stored when it is used again.
        ask(server, salt)
        settle(server)
        return len(keys(redis)) > before and blocks_on_disk(server) > on_disk

    wait_until(is_stored)
    settle(server)


def test_a_salt_is_erased_from_all_tiers(server: Server, redis: RedisServer, disk: Path, run) -> None:
    # On a busy machine it might be sooner computed than fetched.
    run("policies", "hicache_load_or_recompute=false", "hicache_storage_prefetch_policy=wait_complete")
    store_prompt_of(server, redis, "bob")
    of_bob, on_disk = keys(redis), blocks_on_disk(server)
    store_prompt_of(server, redis, "alice")
    erased = run("erase", "--salt", "alice")
    assert erased["erased_tokens"]["device"] > 0 and erased["erased_tokens"]["host"] > 0
    assert keys(redis) >= of_bob and blocks_on_disk(server) >= on_disk > 0, "and of bob's nothing"
    assert sum(ask(server, "alice").values()) == 0 and ask(server, "bob")["device"] > 0
    settle(server)
    # Nothing but storage has it, and then nothing has.
    run("flush")
    assert ask(server, "bob")["disk"] > 0
    settle(server)
    run("flush")
    run("tier", "disk", "--reads", "off")
    assert ask(server, "bob")["remote"] > 0
    run("tier", "disk", "--reads", "on")
    assert run("erase", "--salt", "bob") and run("erase", "--salt", "alice")
    run("flush")
    assert not keys(redis) and blocks_on_disk(server) == 0
    assert sum(ask(server, "bob").values()) == 0


def test_prompts_are_warmed_and_kept(server: Server, run, tmp_path: Path) -> None:
    prompt, lines = tmp_path / "prompt", tmp_path / "lines"
    prompt.write_text(TEXT)
    lines.write_text("A line of text that is warmed, with some words.\n" + json.dumps(list(range(50, 80))) + "\n")
    first, second = (run("warm", str(prompt), "--salt", "carol")["prompts"][0] for _ in range(2))
    assert first["cached_tokens"] == 0 < second["cached_tokens"]
    assert [each["prompt_tokens"] for each in run("warm", str(lines), "--lines")["prompts"]][1] == 30
    assert ask(server, "carol")["device"] > 0
    assert "are kept for 60 s" in run("retain", "system", str(prompt), "--ttl", "60", "--salt", "carol")
    (shown,) = run("retained")["prefixes"]
    assert shown["name"] == "system" and shown["cached_tokens"] == shown["tokens"]
    assert "kept no longer" in run("release", "system")
    assert "no prefix is kept" in run("release", "system", fails=True)


def test_policies_and_quotas(server: Server, run) -> None:
    before = run("policies")
    assert before["hicache_bubble_filling"] == "on"
    after = run("policies", "hicache_load_ratio=auto", "hicache_bubble_filling=false", "schedule-policy=lpm")
    assert after == before | {
        "hicache_load_ratio": "auto",
        "hicache_bubble_filling": "off",
        "schedule_policy": "lpm",
    }
    assert "fcfs, lpm" in run("policies", "schedule_policy=newest", fails=True)
    assert "detach it, and attach it again" in run("policies", "hicache_write_policy=write_back", fails=True)
    run("quota", "--salt", "dave", "device=64", "host=64", "disk=32")
    for i in range(4):
        ask(server, "dave", f"{i} {TEXT}")
        settle(server)
    wait_until(lambda: max(run("quota", "--salt", "dave")["used_tokens"].values()) <= 64)
    assert run("quota", "--salt", "dave")["quotas"] == {"device": 64, "host": 64, "disk": 32}
    assert run("quota", "--salt", "dave", "remote=32")["quotas"] == {"remote": 32}
    assert run("quota", "--salt", "dave", "--none")["quotas"] == {}


def test_storage_and_tiers(server: Server, run, disk: Path) -> None:
    assert "detached" in run("detach")
    assert run("state", "storage").strip() == "null"
    assert "attached" in run("attach", "file", json.dumps({"path": str(disk / "other")}))
    assert run("state", "storage")["tiers"] == ["disk"]
    assert "cleared" in run("clear")
    assert "has no tier" in run("tier", "remote", "--reads", "off", fails=True)
    assert run("tiers")["disk"] == {"reads": True, "writes": True}
    assert "no part" in run("state", "nothing", fails=True)


def test_each_change_leaves_a_line_without_salts(server: Server, run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("quota", "--salt", "a very secret salt", "device=100")
    monkeypatch.delenv("SGLANG_ADMIN_API_KEY")
    assert "wants its admin key" in run("flush", fails=True)
    monkeypatch.setenv("SGLANG_URL", "http://127.0.0.1:1")
    assert "cannot be reached" in run("flush", fails=True)
    # Another line cannot be forged.
    assert server.post("/hicache/x%0aWARNING:%20AUDIT:%20forged%1b").status_code == 401
    log = Path(server.log.name)
    # Lines come after the answers.
    wait_until(lambda: "AUDIT: POST /hicache/x\\nWARNING: AUDIT: forged\\x1b from" in log.read_text())
    lines = [line for line in log.read_text().splitlines() if "AUDIT: " in line]
    assert any("PUT /hicache/quotas (salt " in line and "device 100" in line and "200" in line for line in lines)
    assert any("POST /flush_cache" in line and "401" in line for line in lines)
    assert "a very secret salt" not in log.read_text()
    assert not any(line.startswith("WARNING: AUDIT: forged") for line in lines)
