"""The router before tiny servers that say, count and break what a test needs, all on one event loop."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from sglang import router as router_module
from sglang.router import Router, make_server
from sglang.srt.entrypoints.http_server import bind

Write = Callable[[bytes], Awaitable[None]]
CHAT = "/v1/chat/completions"


def reply(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Fake:
    """A server of some models. tokens: the demand that its state tells, None if it has no such page. root: the path
    of the models. odd: by path, the bytes that come in place of the usual reply. answer: writes what comes for a
    request; `left` is set if the router hangs up meanwhile. requests: path, headers, body."""

    def __init__(self, *models: str, tokens: int | None = 0, key: str = "", root: str | None = None) -> None:
        self.models = models
        self.tokens = tokens
        self.key = key
        self.root = {"root": root} if root else {}
        self.odd: dict[str, bytes] = {}
        # The Authorization header of the last request.
        self.authorization: str | None = None
        self.health = "200 OK"
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.answer: Callable[[Write], Awaitable[None]] = self.echo
        self.left = asyncio.Event()
        self.url = ""
        self.server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> Fake:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        if self.server is not None:
            self.server.close()
            await self.server.wait_closed()
            self.server = None

    async def echo(self, write: Write) -> None:
        await write(reply(self.requests[-1][2]))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            path = head[0].split()[1]
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.authorization = headers.get("authorization")
            if path in self.odd:
                await write(self.odd[path])
            elif self.key and path != "/health" and headers.get("authorization") != f"bearer {self.key}":
                await write(reply(b"{}", "401 Unauthorized"))
            elif path == "/health":
                await write(reply(b"", self.health))
            elif path == "/v1/models":
                cards = [{"id": model, "object": "model", **self.root} for model in self.models]
                await write(reply(json.dumps({"object": "list", "data": cards}).encode()))
            elif path == "/hicache/state":
                state = {"tiers": {"device": {"used_tokens": self.tokens}}, "transient": {"in_queue_tokens": 0}}
                await write(reply(b"{}" if self.tokens is None else json.dumps(state).encode()))
            else:
                self.requests.append((path, headers, body))
                answering = asyncio.create_task(self.answer(write))  # type: ignore[arg-type]
                leaving = asyncio.create_task(reader.read())
                await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    self.left.set()
                    answering.cancel()
                leaving.cancel()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def running(*fakes: Fake, key: str | None = None) -> AsyncIterator[tuple[httpx.AsyncClient, Router]]:
    """A router in front of fakes, of which those that were not started have no listener: a client of it, and it."""
    sock = bind("127.0.0.1", 0)
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(Router([fake.url for fake in fakes], key))
        server = make_server(router)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", trust_env=False, timeout=120)
        try:
            await until(lambda: server.started)
            yield await stack.enter_async_context(client), router
        finally:
            server.should_exit = True
            await serving
            for fake in fakes:
                await fake.stop()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not true():
            await asyncio.sleep(0.005)


async def started(*fakes: Fake) -> Sequence[Fake]:
    return [await fake.start() for fake in fakes]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def body(model: str | None = None, text: str = "Good morning.") -> dict[str, Any]:
    return {"prompt": text} | ({"model": model} if model else {})


def test_a_request_goes_to_a_server_of_its_model_and_comes_back_byte_for_byte() -> None:
    async def test() -> None:
        a, b = await started(Fake("a", "c"), Fake("b", tokens=None))
        async with running(a, b) as (client, _):
            sent = b'{"model":  "b", "prompt": "\xc3\xbc"}'
            headers = {"Authorization": "Bearer mine", "Accept-Encoding": "identity", "X-Own": "1"}
            got = await client.post("/generate?x=1", content=sent, headers=headers)
            assert (got.status_code, got.content) == (200, sent) and got.headers["content-type"] == "application/json"
            ((path, seen, content),) = b.requests
            assert (path, content) == ("/generate?x=1", sent) and not a.requests
            assert seen["authorization"] == "bearer mine" and seen["x-own"] == "1"
            assert seen["host"] == b.url.removeprefix("http://") and seen["accept-encoding"] == "identity"
            models = (await client.get("/v1/models")).json()
            assert [card["id"] for card in models["data"]] == ["a", "b", "c"] and models["object"] == "list"
            assert (await client.get("/v1/models/c")).json() == {"id": "c", "object": "model"}
            unknown = await client.get("/v1/models/a/d")
            assert unknown.status_code == 404 and unknown.json()["message"].endswith("the models here are: a, b, c")

    run(test)


def test_errors_are_passed_on_as_they_are() -> None:
    async def test() -> None:
        (fake,) = await started(Fake("a"))

        async def refuse(write: Write) -> None:
            await write(reply(b'{"message": "no"}', "400 Bad Request"))

        fake.answer = refuse
        async with running(fake) as (client, _):
            got = await client.post(CHAT, json=body("a"))
            assert (got.status_code, got.content) == (400, b'{"message": "no"}')

    run(test)


def test_a_stream_comes_as_it_is_made() -> None:
    async def test() -> None:
        (fake,) = await started(Fake("a"))
        go_on = asyncio.Event()

        async def stream(write: Write) -> None:
            await write(STREAM_HEAD + chunk(b"data: 1\n\n"))
            await go_on.wait()
            await write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        fake.answer = stream
        async with running(fake) as (client, router), client.stream("POST", CHAT, json=body("a")) as got:
            pieces = got.aiter_raw()
            assert await anext(pieces) == b"data: 1\n\n"
            assert router.backends[0].demand > 0
            go_on.set()
            assert await anext(pieces) == b"data: [DONE]\n\n"
            assert [piece async for piece in pieces] == []
            await until(lambda: router.backends[0].demand == 0)

    run(test)


@pytest.mark.parametrize("has_begun", [False, True])
def test_who_hangs_up_ends_the_request_at_the_server(has_begun: bool) -> None:
    async def test() -> None:
        (fake,) = await started(Fake("a"))

        async def never_end(write: Write) -> None:
            if has_begun:
                await write(STREAM_HEAD + chunk(b"data: 1\n\n"))
            await asyncio.Event().wait()

        fake.answer = never_end
        async with running(fake) as (client, router):
            asking = asyncio.create_task(client.post(CHAT, json=body("a")))
            await until(lambda: fake.requests)
            asking.cancel()
            async with asyncio.timeout(120):
                await fake.left.wait()
            await until(lambda: router.backends[0].demand == 0)

    run(test)


def test_the_server_with_the_least_demand_is_asked() -> None:
    async def test() -> None:
        a, b, c = await started(Fake("m", tokens=900), Fake("m", tokens=100), Fake("other"))
        release = asyncio.Event()

        async def wait(write: Write) -> None:
            await release.wait()
            await write(reply(b"{}"))

        a.answer = b.answer = wait
        async with running(a, b, c) as (client, _):
            asked: list[asyncio.Task[httpx.Response]] = []
            # Some 600 tokens each: b has 100, 700 and then 1300 of them.
            for a_has, b_has in ((0, 1), (0, 2), (1, 2), (1, 3)):
                asked.append(asyncio.create_task(client.post(CHAT, json=body("m", "x" * 2400))))
                await until(lambda: len(a.requests) + len(b.requests) == len(asked))
                assert (len(a.requests), len(b.requests)) == (a_has, b_has)
            release.set()
            assert {got.status_code for got in await asyncio.gather(*asked)} == {200} and not c.requests
            shown = (await client.get("/workers")).json()["workers"]
            assert [(each["is_healthy"], each["requests"]) for each in shown] == [(True, 1), (True, 3), (True, 0)]
            assert shown[1]["demand_tokens"] == 100

    run(test)


def test_a_request_names_one_of_the_models() -> None:
    async def test() -> None:
        a, b = await started(Fake("a"), Fake("b"))
        async with running(a, b) as (client, _):
            unknown, none = await client.post(CHAT, json=body("z")), await client.post(CHAT, json=body())
            wrong = await client.post(CHAT, json={"model": 3})
            assert unknown.status_code == 404 and unknown.json()["message"].endswith("the models here are: a, b")
            assert none.status_code == 400 and none.json()["param"] == "model"
            assert wrong.status_code == 400 and (await client.post(CHAT, content=b"[]")).status_code == 400
            assert not a.requests + b.requests
        (only,) = await started(Fake("a"))
        async with running(only) as (client, _):
            assert (await client.post(CHAT, json=body())).status_code == 200
            assert (await client.post(CHAT, json=body("default"))).status_code == 200

    run(test)


def test_a_model_is_named_as_at_its_server() -> None:
    """By its name, by its path, and by words for the only one. A name goes before a path."""

    async def test() -> None:
        a, b = await started(Fake("a", root="path"), Fake("path", root="path", tokens=1))
        async with running(a, b) as (client, _):
            for name, times in (("a", 1), ("path", 1), ("path", 2)):
                assert (await client.post(CHAT, json=body(name))).status_code == 200
                assert len(a.requests) == 1 and len(b.requests) == times - (name == "a")
            for name in ("unknown", "default"):
                assert (await client.post(CHAT, json=body(name))).json()["param"] == "model"
                assert (await client.get(f"/v1/models/{name}")).status_code == 400
            assert (await client.get("/v1/models/path")).json()["id"] == "path"
        (only,) = await started(Fake("a", root="/a/path"))
        async with running(only) as (client, _):
            for name in ("unknown", "default", "/a/path", "a"):
                assert (await client.post(CHAT, json=body(name))).status_code == 200
                assert (await client.get(f"/v1/models/{name}")).json()["id"] == "a"
            assert (await client.post(CHAT, json=body("/a"))).status_code == 404

    run(test)


NESTED = b"[" * 100_000 + b"]" * 100_000
# By path, replies that no server should give, and how the problem begins; None where there is none.
ODD_REPLIES = [
    *(
        ("/v1/models", reply(content), "its /v1/models does not answer")
        for content in (
            *(b'{"data": [{"id": %s}]}' % each for each in (b"null", b"5", b"[1]", b'""', b'"\\ud800"', NESTED)),
            *(
                b'{"data": "abc"}',
                b'{"data": {"id": "a"}}',
                b'{"data": []}',
                b'{"data": [5]}',
                b"{}",
                b"[]",
                b"",
                NESTED,
            ),
            *(b'{"data": [{"id": "a", "created": NaN}]}', b'{"data": [{"id": "a", "root": "\\ud800"}]}'),
        )
    ),
    *(
        ("/hicache/state", reply(content), None)
        for content in (
            *(
                b'{"tiers": {"device": {"used_tokens": %s}}, "transient": {"in_queue_tokens": %s}}' % (each, each)
                for each in (b'"a"', b'"%s"' % (b"9" * 4300), b"1e308", b"1e999", b"9" * 5000, b"[]", b"null", NESTED)
            ),
            *(b'{"tiers": [], "transient": 1}', b'"abc"', b"", NESTED),
        )
    ),
    ("/health", b"What is this?\r\n\r\n", "it cannot be reached (its reply is cut off or not HTTP)"),
    ("/v1/models", reply(b"{}")[:-1], "it cannot be reached (its reply is cut off or not HTTP)"),
]


def test_a_server_with_odd_replies_does_not_disturb_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "CHECK_INTERVAL_S", 1e9)

    async def test() -> None:
        odd, good = await started(Fake("m"), Fake("good", tokens=None))
        path, data, _ = ODD_REPLIES[0]
        odd.odd = {path: data}
        async with running(odd, good) as (client, router):
            backend = router.backends[0]
            for path, data, problem in ODD_REPLIES:
                odd.odd = {path: data}
                await router.check(backend)
                assert (backend.problem or "None").startswith(str(problem)), data[:80]
                names = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
                assert names == (["good"] if problem else ["good", "m"])
                assert backend.demand == 0
            for model, status in (("good", 200), ("m", 503)):
                assert (await client.post(CHAT, json=body(model))).status_code == status
            odd.odd = {"/v1/models": reply(b'{"data": [{"id": null}, {"id": "m", "root": 5}, 5]}')}
            await router.check(backend)
            assert backend.problem is None and list(backend.cards) == ["m"]

    run(test)


def test_a_check_that_fails_in_any_way_is_followed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router_module, "CHECK_INTERVAL_S", 0.001)

    async def test() -> None:
        (fake,) = await started(Fake("m"))
        async with running(fake) as (client, router):
            ask, num_failed = router._ask, 0

            async def fail(backend: router_module.Backend, path: str) -> httpx.Response:
                nonlocal num_failed
                num_failed += 1
                raise UnicodeError("label too long")

            monkeypatch.setattr(router, "_ask", fail)
            await until(lambda: num_failed > 2)
            got = await client.post(CHAT, json=body("m"))
            assert got.status_code == 503 and "its check failed" in got.json()["message"]
            assert "too long" not in got.text and caplog.text.count("Traceback") == 1
            monkeypatch.setattr(router, "_ask", ask)
            await until(lambda: router.backends[0].problem is None)
            assert (await client.post(CHAT, json=body("m"))).status_code == 200

    run(test)


def test_a_check_does_not_wait_for_the_rest_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """That comes piece by piece, each in time."""
    monkeypatch.setattr(router_module, "CHECK_TIMEOUT_S", 0.05)

    async def trickle(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async def test() -> None:
        router = Router(["http://127.0.0.1:9"])
        monkeypatch.setattr(router._client, "get", trickle)
        await router.check(router.backends[0])
        assert router.backends[0].misses == 1

    run(test)


def test_a_password_in_a_url_is_used_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def test() -> None:
        (fake,) = await started(Fake("m"))
        plain, fake.url = fake.url, fake.url.replace("://", "://user:p%40ss@")
        async with running(fake) as (client, _):
            basic = "basic " + base64.b64encode(b"user:p@ss").decode().lower()
            assert fake.authorization == basic
            texts = [(await client.post(CHAT, json=body("m"))).text, (await client.get("/workers")).text]
            assert fake.requests[0][1]["authorization"] == basic

            async def break_off(write: Write) -> None:
                await write(STREAM_HEAD + chunk(b"data: 1\n\n"))

            fake.answer = break_off
            texts += [(await client.post(CHAT, json=body("m"))).text]
            await fake.stop()
            texts += [(await client.post(path, json=body("m"))).text for path in (CHAT, CHAT, "/abort_request")]
            shown = "\n".join([*texts, caplog.text])
            assert plain in shown and not any(each in shown for each in ("p@ss", "p%40ss", "user"))

    run(test)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port 99999", "--port is 99999, but it must be from 1 to 65535"),
        ("--port 0", "--port is 0, but it must be from 1 to 65535"),
        ("--api-key \u00e9", "--api-key must be printable ASCII without spaces, as a header carries it"),
        ("--api-key=", "--api-key must be printable ASCII without spaces, as a header carries it"),
        ("--worker-urls http://[::1", "'http://[::1' is no URL of a server: write it as http://HOST:PORT"),
        ("--worker-urls http://u:1/secret@h", "'h' is no URL of a server: write it as http://HOST:PORT"),
        ("--worker-urls http://u:secret@h:x", "'h:x' is no URL of a server: write it as http://HOST:PORT"),
        *(
            (f"--worker-urls {url}", f"{url!r} is no URL of a server: write it as http://HOST:PORT")
            for url in (
                "http://",
                "http://h:99999",
                "http://h?x",
                "ftp://h",
                "h:1",
                f"http://{'h' * 64}",
                "http://a..b",
            )
        ),
    ],
)
def test_wrong_flags_are_refused_with_a_sentence(
    flags: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["router", "--worker-urls", "http://h", *flags.split(" ")])
    monkeypatch.delattr(router_module, "serve")
    with pytest.raises(SystemExit) as ended:
        router_module.main()
    assert ended.value.code == 2 and capsys.readouterr().err == f"error: {message}\n"


def test_servers_that_are_down_are_left_out_until_they_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "CHECK_INTERVAL_S", 0.02)

    async def test() -> None:
        a, b = await started(Fake("m", tokens=5), Fake("m"))
        async with running(a, b) as (client, router):
            b.health = "503 Service Unavailable"
            await until(lambda: router.backends[1].problem)
            assert (await client.post(CHAT, json=body("m"))).status_code == 200 and len(a.requests) == 1
            await a.stop()
            await until(lambda: router.backends[0].problem)
            got = await client.post(CHAT, json=body("m"))
            assert got.status_code == 503 and (await client.get("/health")).status_code == 503
            assert (await client.get("/v1/models")).json()["data"] == []
            message = got.json()["message"]
            assert (
                f"{a.url}: it cannot be reached" in message and f"{b.url}: /health answers with status 503" in message
            )
            assert "start a server" in message
            b.health = "200 OK"
            await until(lambda: not router.backends[1].problem)
            assert (await client.post(CHAT, json=body("m"))).status_code == 200 and len(b.requests) == 1
            assert (await client.get("/health")).status_code == 200

    run(test)


def test_who_has_not_begun_is_followed_by_the_next() -> None:
    """The router has not noticed yet that one is gone; another takes no more."""

    async def test() -> None:
        gone, full, last = await started(Fake("m", tokens=1), Fake("m", tokens=2), Fake("m", tokens=3))

        async def refuse(write: Write) -> None:
            await write(reply(b"full", "503 Service Unavailable"))

        full.answer = refuse
        async with running(gone, full, last) as (client, router):
            await gone.stop()
            got = await client.post(CHAT, json=body("m"))
            assert got.status_code == 200 and len(full.requests) == len(last.requests) == 1
            assert router.backends[0].problem and not router.backends[1].problem
            await last.stop()
            got = await client.post(CHAT, json=body("m"))
            assert got.status_code == 503 and f"{full.url}: it answers with status 503; {last.url}: " in got.text
            await until(lambda: router.backends[2].problem)
            got = await client.post(CHAT, json=body("m"))
            assert (got.status_code, got.content) == (503, b"full"), "the only one's own word"

    run(test)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"])
def test_each_endpoint_with_a_model_is_routed_by_it(path: str) -> None:
    async def test() -> None:
        a, b = await started(Fake("a"), Fake("b"))
        async with running(a, b) as (client, _):
            sent = b'{"model": "b", "input": "x", "previous_response_id": "resp_1"}'
            got = await client.post(path, content=sent)
            assert (got.status_code, got.content) == (200, sent) and not a.requests
            assert [(seen, content) for seen, _, content in b.requests] == [(path, sent)]
            error = (await client.post(path, json=body("z"))).json()
            is_anthropic = path.startswith("/v1/messages")
            assert "the models here are: a, b" in (error["error"] if is_anthropic else error)["message"]

    run(test)


def test_paths_that_are_not_passed_on_get_a_sentence_in_the_shape_of_their_api() -> None:
    async def test() -> None:
        (fake,) = await started(Fake("a"))
        async with running(fake) as (client, _):
            for method, path, sentence in (
                (
                    "POST",
                    "/flush_cache",
                    "the router does not pass on /flush_cache: ask a server, /workers lists them",
                ),
                ("GET", "/v1/responses/resp_1", "responses are not kept: send the whole conversation"),
                ("DELETE", "/v1/responses/resp_1", "responses are not kept: send the whole conversation"),
                ("POST", "/v1/responses/resp_1/cancel", "close the connection to cancel"),
            ):
                got = await client.request(method, path)
                assert got.status_code == 404 and sentence in got.json()["message"], path
            got = await client.post("/v1/messages/batches")
            error = got.json()["error"]
            assert (got.status_code, error["type"]) == (404, "not_found_error")
            assert "does not pass on" in error["message"]
            assert not fake.requests

    run(test)


def test_an_abort_reaches_each_server_even_one_that_is_left_out() -> None:
    async def test() -> None:
        a, b, gone = await started(Fake("a"), Fake("b"), Fake("b"))

        async def refuse(write: Write) -> None:
            await write(reply(b'{"message": "no"}', "400 Bad Request"))

        async def take(write: Write) -> None:
            await write(reply(b""))

        async with running(a, b, gone) as (client, router):
            await gone.stop()
            router.backends[0].set_problem("left out")
            a.answer, b.answer = refuse, take
            got = await client.post("/abort_request", json={"rid": "r"}, headers={"Authorization": "Bearer mine"})
            assert got.status_code == 200
            for fake in (a, b):
                ((path, headers, content),) = fake.requests
                assert (path, json.loads(content)) == ("/abort_request", {"rid": "r"})
                assert headers["authorization"] == "bearer mine"
            b.answer = refuse
            got = await client.post("/abort_request", json={})
            assert (got.status_code, got.content) == (400, b'{"message": "no"}')

            async def break_off(write: Write) -> None:
                pass

            a.answer, b.answer = break_off, take
            got = await client.post("/abort_request", json={"rid": "r"})
            assert got.status_code == 502 and f"{a.url} did not answer" in got.json()["message"]
            await a.stop()
            await b.stop()
            got = await client.post("/abort_request", json={"rid": "r"})
            assert got.status_code == 503 and a.url in got.json()["message"]

    run(test)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_stream_that_breaks_off_ends_with_an_error_of_its_api(path: str) -> None:
    async def test() -> None:
        (fake,) = await started(Fake("m"))

        async def break_off(write: Write) -> None:
            await write(STREAM_HEAD + chunk(b'event: ping\ndata: {"type": "ping"}\n') + chunk(b"\n"))

        fake.answer = break_off
        async with running(fake) as (client, _):
            lines = [line for line in (await client.post(path, json=body("m"))).text.split("\n") if line]
            assert lines[:3] == ["event: ping", 'data: {"type": "ping"}', "event: error"] and len(lines) == 4
            error = json.loads(lines[3].removeprefix("data: "))
            assert error["type"] == "error"
            if path == "/v1/messages":
                assert error["error"]["type"] == "api_error"
            else:
                assert (error["code"], error["sequence_number"]) == ("server_error", 1)
            assert "has broken off" in (error["error"] if path == "/v1/messages" else error)["message"]

    run(test)


@pytest.mark.parametrize("kind", ["nothing", "stream", "json"])
def test_a_server_that_breaks_off_is_not_asked_twice_and_the_client_hears_of_it(kind: str) -> None:
    async def test() -> None:
        a, b = await started(Fake("m"), Fake("m", tokens=1))

        async def break_off(write: Write) -> None:
            if kind == "stream":
                await write(STREAM_HEAD + chunk(b"data: 1\n\n"))
            elif kind == "json":
                await write(reply(b"x" * 100)[:-50])

        a.answer = break_off
        async with running(a, b) as (client, router):
            if kind == "json":
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.post(CHAT, json=body("m"))
            else:
                got = await client.post(CHAT, json=body("m"))
                if kind == "nothing":
                    assert got.status_code == 502
                    assert got.json()["message"] == "the server that took the request has broken off"
                else:
                    first, error, done = [line for line in got.text.split("\n") if line]
                    assert (first, done) == ("data: 1", "data: [DONE]")
                    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502
            await until(lambda: router.backends[0].demand == 0)
            assert not b.requests

    run(test)


def test_the_key_of_the_servers_is_needed_and_asked_for() -> None:
    async def test() -> None:
        (fake,) = await started(Fake("a", key="secret"))
        async with running(fake) as (client, _):
            got = await client.post(CHAT, json=body("a"))
            assert got.status_code == 503 and "--api-key" in got.json()["message"]
        (fake,) = await started(Fake("a", key="secret"))
        async with running(fake, key="secret") as (client, _):
            key = {"Authorization": "Bearer secret"}
            for path in ("/v1/models", "/workers"):
                assert (await client.get(path)).status_code == 401
                assert (await client.get(path, headers=key)).status_code == 200
            assert (await client.post(CHAT, json=body("a"))).status_code == 401, "the server's word"
            assert (await client.post(CHAT, json=body("a"), headers=key)).status_code == 200

    run(test)


def test_a_path_that_ends_with_a_line_break_is_none() -> None:
    async def test() -> None:
        fake = await Fake("a").start()
        async with running(fake) as (client, _):
            asked = len(fake.requests)
            assert (await client.post(f"{CHAT}%0a", json=body("a"))).status_code == 404
            assert (await client.get("/workers%0a")).status_code == 404 and len(fake.requests) == asked

    run(test)


def make_late(monkeypatch: pytest.MonkeyPatch, router: Router) -> set[tuple[int, str]]:
    """Looks that run out of time: the number of the server, and the path. No other look is taken than the test's."""
    monkeypatch.setattr(router_module, "CHECK_INTERVAL_S", 1e9)
    ask, late = router._ask, set[tuple[int, str]]()

    async def sometimes(backend: router_module.Backend, path: str) -> httpx.Response:
        if (router.backends.index(backend), path) in late:
            raise httpx.ReadTimeout("late")
        return await ask(backend, path)

    monkeypatch.setattr(router, "_ask", sometimes)
    return late


@pytest.mark.parametrize("path", ["/health", "/hicache/state"])
def test_a_server_that_is_late_three_times_in_a_row_is_left_out_until_it_answers(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of it may hang: its scheduler answers its state, and no other page that is looked at."""

    async def test() -> None:
        (fake,) = await started(Fake("a", tokens=7))
        router = Router([fake.url])
        (backend,) = router.backends
        await router.check(backend)
        assert (backend.problem, backend.demand) == (None, 7)
        late = make_late(monkeypatch, router)
        for _ in range(2):
            late.add((0, path))
            for _ in range(router_module.MAX_MISSES - 1):
                await router.check(backend)
                assert backend.problem is None
            late.clear()
            await router.check(backend)
            assert (backend.problem, backend.misses) == (None, 0)
        late.add((0, path))
        for _ in range(router_module.MAX_MISSES):
            await router.check(backend)
        who = "it" if path == "/health" else "its scheduler or detokenizer"
        assert backend.problem == f"{who} has not answered within 5 s, 3 times in a row"
        late.clear()
        await router.check(backend)
        assert (backend.problem, backend.demand) == (None, 7)
        await fake.stop()

    run(test)


def test_a_server_with_a_late_scheduler_gets_what_no_other_takes_and_in_the_end_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its step may be long, or it hangs."""
    monkeypatch.setattr(router_module, "CHECK_INTERVAL_S", 1e9)

    async def test() -> None:
        a, b = await started(Fake("m"), Fake("m", tokens=900))
        async with running(a, b) as (client, router):
            late = make_late(monkeypatch, router)

            async def look() -> None:
                for backend in router.backends:
                    await router.check(backend)

            async def ask(status: int = 200) -> None:
                assert (await client.post(CHAT, json=body("m"))).status_code == status

            await ask()
            assert (len(a.requests), len(b.requests)) == (1, 0)
            late.add((0, "/hicache/state"))
            await look()
            assert router.backends[0].problem is None
            await ask()
            assert (len(a.requests), len(b.requests)) == (1, 1), "the busier one has answered"
            for _ in range(router_module.MAX_MISSES):
                await look()
            await ask()
            assert (len(a.requests), len(b.requests)) == (1, 2)
            assert [each["is_healthy"] for each in (await client.get("/workers")).json()["workers"]] == [False, True]
            await b.stop()
            await look()
            await ask()
            assert len(a.requests) == 2 and (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).json()["data"]
            while router.backends[0].misses < router_module.MAX_STEP_MISSES:
                await look()
            await ask(503)
            assert len(a.requests) == 2 and (await client.get("/health")).status_code == 503
            late.clear()
            await look()
            await ask()
            assert len(a.requests) == 3

    run(test)


def test_the_command_serves_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "sglang.router", "--worker-urls"]
    refused = subprocess.run([*command, "127.0.0.1:1"], capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2 and "http://HOST:PORT" in refused.stderr
    sock = bind("127.0.0.1", 0)
    sock.listen()
    port = str(sock.getsockname()[1])
    taken = subprocess.run(
        [*command, "http://127.0.0.1:9", "--port", port], capture_output=True, text=True, timeout=120
    )
    assert taken.returncode == 1 and taken.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}")
    sock.close()
    process = subprocess.Popen([*command, "http://127.0.0.1:9", "--port", port], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "The router is ready" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0 and "Traceback" not in process.stderr.read()
    process.stderr.close()
