"""What the routes of administration refuse before the scheduler is asked, and the names that they pass on."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from sglang.srt.entrypoints.http_routes import make_app
from sglang.srt.managers.io_struct import ControlReqOutput
from sglang.srt.server_args import ServerArgs
from support.one_word import OneWord


class Recording(OneWord):
    """Each change is noted, and succeeds unless there is a message. A prompt's ids are its letters."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.changes: list[tuple[Any, ...]] = []

    async def render_chat(self, messages, kwargs, continue_final):
        return "".join(f"{each['role']}: {each['content']};" for each in messages)

    async def prompt_ids(self, prompt, add_special_tokens, namespace):
        return np.array([ord(letter) for letter in prompt])

    async def get_internal_state(self) -> dict[str, Any]:
        return {"admin": {"policies": {"hicache_bubble_filling": True, "hicache_load_or_recompute": False}}}

    async def flush_cache(self, timeout_s: float) -> ControlReqOutput:
        return await self._changed("flush", timeout_s)

    async def _changed(self, *change: Any) -> ControlReqOutput:
        self.changes.append(change)
        return ControlReqOutput(id="1", success=not self.message, message=self.message)

    retain_prefix = label_prefix = set_policies = set_quota = _changed


def ask(
    method: str, path: str, body: Any = None, key: str = "k", message: str = "", **flags: Any
) -> tuple[httpx.Response, list[tuple[Any, ...]]]:
    manager = Recording(message)
    app = make_app(ServerArgs(model_path="m", admin_api_key="k", **flags), manager, {})

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})

    return asyncio.run(main()), manager.changes


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("quotas", {"cache_salt": "s", "tokens": {"device": 10**30}}, "a quota is 0 to"),
        ("quotas", {"cache_salt": "s", "tokens": {"device": -1}}, "a quota is 0 to"),
        ("policies", {"hicache_deferral_threshold": 10**30}, "must be a number from 0 to"),
        ("policies", {"hicache_load_ratio": 1e300}, "must be a number from 0 to"),
        ("policies", {"hicache_bubble_filling": "decode"}, "start the server with decode"),
        ("policies", {"hicache_load_or_recompute": "perhaps"}, "hicache_load_or_recompute"),
        ("policies", {"hicache_load_ratio": 10**400}, "hicache_load_ratio"),
        ("policies", {"hicache_load_ratio": -1}, "must be a number from 0 to"),
        ("retention/n", {"text": "a", "ttl_s": 0}, "send DELETE"),
        ("retention/n", {"text": "a", "ttl_s": -5}, "send DELETE"),
        ("retention/", {"text": "a", "ttl_s": 5}, "no name for a prefix"),
        ("retention/a/%2E%2E", {"text": "a", "ttl_s": 5}, "no name for a prefix"),
        ("labels/", {"text": "a"}, "no name for a prefix"),
    ],
)
def test_what_is_refused(path: str, body: dict[str, Any], sentence: str) -> None:
    reply, changes = ask("PUT", f"/hicache/{path}", body)
    assert reply.status_code == 400 and sentence in reply.text and not changes


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("PUT", "quotas", {"cache_salt": "s", "disk": 64}, "`disk`"),
        ("POST", "erase", {"cache_salt": "s", "abort": True}, "`abort`"),
        ("POST", "warm", {"prompts": [{"text": "a", "cache_salt": "s"}]}, "`cache_salt` - at `prompts[0]`"),
        ("PUT", "labels/n", {"text": "a", "salt": "s"}, "`salt`"),
        ("PUT", "tiers/disk", {"read": False}, "`read`"),
        ("PUT", "policies", {"policy": "lpm"}, "`policy`"),
    ],
)
def test_a_field_that_no_change_has_is_refused(method: str, path: str, body: dict[str, Any], field: str) -> None:
    reply, changes = ask(method, f"/hicache/{path}", body)
    assert reply.status_code == 400 and f"unknown field {field}" in reply.text and not changes


@pytest.mark.parametrize("kind", ["retention", "labels"])
def test_a_name_may_have_a_slash(kind: str) -> None:
    body = {"text": "a"} | ({"ttl_s": 5} if kind == "retention" else {})
    for path in ("a%2Fb", "a/b"):
        reply, (change,) = ask("PUT", f"/hicache/{kind}/{path}", body)
        assert reply.status_code == 200 and change[0] == "a/b"
        reply, (change,) = ask("DELETE", f"/hicache/{kind}/{path}")
        assert reply.status_code == 200 and change[0] == "a/b" and len(change[2]) == 0


def test_the_messages_of_a_prefix_are_those_of_a_chat() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    _, ((_, _, ids),) = ask("PUT", "/hicache/labels/n", {"messages": messages})
    assert "".join(map(chr, ids)) == "system: Be brief.;user: a b;"
    reply, changes = ask("PUT", "/hicache/labels/n", {"messages": [{"role": "nobody", "content": "a"}]})
    assert reply.status_code == 400 and "'nobody'" in reply.text and not changes


@pytest.mark.parametrize("kind", ["labels", "retention"])
def test_a_name_that_there_is_not_is_not_found(kind: str) -> None:
    reply, _ = ask("DELETE", f"/hicache/{kind}/a", message="no prefix has it")
    assert reply.status_code == 404 and reply.json()["message"] == "no prefix has it"
    body = {"text": "a"} | ({"ttl_s": 5} if kind == "retention" else {})
    reply, _ = ask("PUT", f"/hicache/{kind}/a", body, message="too long")
    assert reply.status_code == 400


@pytest.mark.parametrize("end", ["%0a", "%0d%0a", "%00"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/hicache/labels/a"),
        ("DELETE", "/hicache/labels/a"),
        ("PUT", "/hicache/retention/a"),
        ("DELETE", "/hicache/retention/a"),
        ("PUT", "/hicache/tiers/host"),
        ("POST", "/hicache/erase"),
        ("GET", "/v1/models/m"),
    ],
)
def test_a_path_with_a_control_character_is_no_other_path(method: str, path: str, end: str) -> None:
    reply, changes = ask(method, path + end, {"text": "a", "ttl_s": 5})
    assert reply.status_code == 404 and "leave out the control characters" in reply.text and not changes


def test_a_line_break_is_no_way_around_the_key() -> None:
    """Keys are asked for by the path, before a route takes it."""
    for end, status in (("", 401), ("%0a", 404)):
        reply, changes = ask("POST", "/flush_cache" + end, key="")
        assert (reply.status_code, changes) == (status, [])
    assert ask("POST", "/flush_cache")[1] == [("flush", 0.0)]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_how_long_a_flush_waits(method: str) -> None:
    for query, timeout_s in (("", 0.0), ("?timeout=0", 0.0), ("?timeout=2.5", 2.5), ("?timeout=1e300", 1e300)):
        reply, changes = ask(method, "/flush_cache" + query)
        assert (reply.status_code, changes) == (200, [("flush", timeout_s)])
    for wrong in ("", "-1", "nan", "inf", "soon", "1s"):
        reply, changes = ask(method, f"/flush_cache?timeout={wrong}")
        assert reply.status_code == 400 and not changes
        assert reply.json()["message"] == f"timeout is {wrong!r}, but it must be a number of seconds from 0"


def test_a_flush_whose_client_has_left_waits_no_more() -> None:
    class Busy(Recording):
        async def flush_cache(self, timeout_s: float) -> ControlReqOutput:
            try:
                await asyncio.Event().wait()
            finally:
                self.changes.append(("ended", timeout_s))
            raise AssertionError

    manager = Busy("")
    app = make_app(ServerArgs(model_path="m"), manager, {})  # type: ignore[arg-type]
    messages = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
    scope = {
        **{"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "server": ("test", 80)},
        **{"path": "/flush_cache", "raw_path": b"/flush_cache", "query_string": b"timeout=9", "headers": []},
    }

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        pass

    asyncio.run(app(scope, receive, send))
    assert manager.changes == [("ended", 9.0)]


def test_switches_have_the_values_of_their_flags() -> None:
    for value, is_on in (("on", True), ("off", False), (True, True), (False, False)):
        names = ("hicache_bubble_filling", "hicache_load_or_recompute")
        reply, changes = ask("PUT", "/hicache/policies", dict.fromkeys(names, value))
        assert reply.status_code == 200 and changes == [(dict.fromkeys(names, is_on),)]


@pytest.mark.parametrize("given", ["on", "decode"])
def test_policies_are_shown_as_flags(given: str) -> None:
    reply, _ = ask("GET", "/hicache/policies", hicache_bubble_filling=given)
    assert reply.json() == {"hicache_bubble_filling": given, "hicache_load_or_recompute": "off"}
    again, changes = ask("PUT", "/hicache/policies", reply.json(), hicache_bubble_filling=given)
    assert again.status_code == 200
    assert changes == [({"hicache_bubble_filling": True, "hicache_load_or_recompute": False},)]
    # What this server cannot be without a new start.
    other = "on" if given == "decode" else "decode"
    reply, changes = ask("PUT", "/hicache/policies", {"hicache_bubble_filling": other}, hicache_bubble_filling=given)
    assert reply.status_code == 400 and f"start the server with {other}" in reply.text and not changes


def test_the_largest_numbers_are_passed_on() -> None:
    _, changes = ask("PUT", "/hicache/quotas", {"cache_salt": "s", "tokens": {"device": 1 << 62}})
    assert changes == [("s", {"device": 1 << 62})]
    _, changes = ask("PUT", "/hicache/policies", {"hicache_load_ratio": "auto", "hicache_deferral_threshold": 0})
    assert changes == [({"hicache_load_ratio": "auto", "hicache_deferral_threshold": 0},)]
