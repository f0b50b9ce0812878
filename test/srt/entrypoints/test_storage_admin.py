"""Storage and tiers, as an administrator changes them over HTTP, before the fake scheduler."""

from __future__ import annotations

import httpx
import pytest

from support.server_fixture import NO_TLS, PATIENCE_S, Server

ROOT = {"Authorization": "Bearer root"}
PATH = "/hicache/storage-backend"
TIERS = "/hicache/tiers"


@pytest.fixture(scope="module")
def server():
    with Server("--admin-api-key", "root", "--hicache", fake=[]) as server:
        yield server


def ask(server: Server, method: str, path: str = PATH, body: object = None, headers: dict | None = ROOT):
    return httpx.request(method, server.url + path, json=body, headers=headers, timeout=PATIENCE_S, verify=NO_TLS)


def attached(server: Server) -> dict:
    return ask(server, "GET").json()


def test_routers_are_told_that_blocks_have_no_names_for_them(server):
    found = ask(server, "GET", "/get_hicache_l3_cache_layout").json()
    assert found["enabled"] is False and found["hicache_object_layout"] == {"pools": []}
    assert (found["backend"], found["page_size"], found["reason"]) == (None, 16, "storage is not attached")


def test_the_sample_of_prompts_is_the_administrators(server):
    body = {"input_ids": list(range(1, 131)), "sampling_params": {"max_new_tokens": 2}}
    for _ in range(2):
        assert ask(server, "POST", "/generate", body).status_code == 200
    assert ask(server, "GET", "/hicache/sample", headers=None).status_code == 401
    sample = ask(server, "GET", "/hicache/sample").json()
    first, second = (each for each in sample["events"] if not each["is_answer"])
    assert (sample["block_tokens"], sample["rate"], first["prompt_tokens"]) == (64, 1.0, 130)
    assert first["blocks"] == second["blocks"] and len(first["blocks"]) == 2


def test_attach_look_clear_and_detach(server):
    nothing = {
        "hicache_storage_backend": None,
        "hicache_storage_prefetch_policy": None,
        "hicache_write_policy": "auto",
    }
    assert attached(server) == nothing
    settings = '{"path": "/there"}'
    reply = ask(
        server,
        "PUT",
        body={
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config_json": settings,
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_write_policy": "write_back",
        },
    )
    assert reply.status_code == 200, reply.text
    assert attached(server) == {
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_write_policy": "write_back",
    }
    assert server.state()["storage"]["extra_config"] == settings
    again = ask(server, "PUT", body={"hicache_storage_backend": "file"})
    assert again.status_code == 400 and "detach it first" in again.text
    assert ask(server, "POST", PATH + "/clear").status_code == 200
    assert ask(server, "DELETE").status_code == 200
    assert attached(server) == nothing
    for method, path in (("DELETE", PATH), ("POST", PATH + "/clear")):
        reply = ask(server, method, path)
        assert reply.status_code == 400 and "no storage backend is attached" in reply.text


def test_what_is_left_out_is_as_the_server_was_started(server):
    assert ask(server, "PUT", body={"hicache_storage_backend": "dynamic"}).status_code == 200
    assert attached(server) == {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "timeout",
        "hicache_write_policy": "auto",
    }
    assert server.state()["storage"]["extra_config"] == ""
    assert ask(server, "DELETE").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"hicache_storage_backend": 5},
        {"hicache_storage_backend": None},
        {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": {"path": "/"}},
        {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": 1},
    ],
)
def test_a_body_that_says_something_else(server, body):
    assert ask(server, "PUT", body=body).status_code == 400
    assert attached(server)["hicache_storage_backend"] is None


def test_half_a_character_is_refused_and_harms_nobody(server):
    reply = httpx.put(
        server.url + PATH,
        content=b'{"hicache_storage_backend": "\\ud800"}',
        headers=ROOT,
        timeout=PATIENCE_S,
        verify=NO_TLS,
    )
    assert reply.status_code == 400
    assert server.get("/health").status_code == 200


def test_tiers_are_turned_off_and_on(server):
    on = {"reads": True, "writes": True}
    assert ask(server, "GET", TIERS).json() == {"device": on, "host": on}
    reply = ask(server, "PUT", TIERS + "/host", {"reads": False})
    assert reply.status_code == 200 and reply.text == "The tier host is switched.\n"
    assert ask(server, "GET", TIERS).json() == {"device": on, "host": {"reads": False, "writes": True}}
    assert 'sglang:hicache_tier_on{model_name="embedded",tier="host",what="reads"} 0.0' in server.get("/metrics").text
    assert ask(server, "PUT", TIERS + "/host", {"reads": True}).status_code == 200
    assert ask(server, "GET", TIERS).json() == {"device": on, "host": on}


@pytest.mark.parametrize("body", [None, [], {}, {"reads": None}, {"reads": "no"}, {"reads": 1}, {"on": True}])
def test_a_switch_that_is_none(server, body):
    assert ask(server, "PUT", TIERS + "/host", body).status_code == 400
    assert ask(server, "GET", TIERS).json()["host"] == {"reads": True, "writes": True}


def test_a_tier_that_is_not_there(server):
    reply = ask(server, "PUT", TIERS + "/tape", {"reads": False})
    assert reply.status_code == 400 and "no tier 'tape'" in reply.text


@pytest.mark.parametrize("headers", [None, {"Authorization": "Bearer user"}])
def test_without_the_key_nothing_is_said_or_done(server, headers):
    for method, path in (("GET", PATH), ("PUT", PATH), ("DELETE", PATH), ("POST", PATH + "/clear")):
        reply = ask(server, method, path, {"hicache_storage_backend": "file"} if method == "PUT" else None, headers)
        assert reply.status_code == 401, (method, path)
    assert attached(server)["hicache_storage_backend"] is None
    assert ask(server, "PUT", TIERS + "/host", {"reads": False}, headers).status_code == 401


def test_a_server_without_any_key_lets_nobody_change_storage(echo_server):
    """A plugin is code that the server runs."""
    for method, path in (("PUT", PATH), ("DELETE", PATH), ("POST", PATH + "/clear")):
        body = {"hicache_storage_backend": "file"} if method == "PUT" else None
        reply = ask(echo_server, method, path, body, None)
        assert reply.status_code == 400 and "--admin-api-key" in reply.text
    assert ask(echo_server, "PUT", TIERS + "/host", {"reads": False}, None).status_code == 400
    assert ask(echo_server, "GET", headers=None).status_code == 200
