"""Large, slow, broken and silent clients, before a small application in this process.

The server's event loop has a clock that a test moves: no deadline passes by itself, however slow the machine is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from sglang.srt.entrypoints import http_limits
from sglang.srt.entrypoints.http_routes import make_app
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.errors import RequestError
from support.one_word import OneWord
from support.server_fixture import NO_TLS, PATIENCE_S, wait_until


async def size(request: Request):
    return PlainTextResponse(str(len(await request.body())))


async def deaf(request: Request):
    return PlainTextResponse("not read")


async def bug(request: Request):
    raise KeyError("a bug of ours")


async def endless(request: Request):
    async def pieces():
        while True:
            yield b"x" * 65536
            await asyncio.sleep(0)  # to hear that nobody listens

    return StreamingResponse(pieces())


async def on_error(_: Request, error: Exception):
    if not isinstance(error, RequestError):
        error = RequestError("internal error", 500)
    return JSONResponse(error.body(), error.status_code)


class MovableClock(asyncio.SelectorEventLoop):
    """An event loop whose timers also run because a test says that it is later."""

    later_s = 0.0

    def time(self) -> float:
        return super().time() + self.later_s


# Seconds that pass only if a test says so.
DEADLINE_S = 100_000.0


class Running:
    def __init__(self):
        routes = [Route(f"/{f.__name__}", f, methods=["GET", "POST"]) for f in (size, deaf, bug, endless)]
        handlers = {RequestError: on_error, HTTPException: on_error, Exception: on_error}
        self.front = http_limits.Front(Starlette(routes=routes, exception_handlers=handlers))
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        http_limits.limit_unread_replies(self.listener)
        self.address = self.listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        config = uvicorn.Config(
            self.front,
            http=http_limits.LimitedProtocol,
            log_config=None,
            timeout_keep_alive=2 * int(DEADLINE_S),
            lifespan="off",
        )
        self.server = uvicorn.Server(config)
        self.loop = MovableClock()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self.server.serve(sockets=[self.listener]))

    def wait(self, seconds: float) -> None:
        """Lets so much time pass, for the server alone."""

        async def later() -> None:
            self.loop.later_s += seconds

        asyncio.run_coroutine_threadsafe(later(), self.loop).result(PATIENCE_S)

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self.address)
        sock.settimeout(PATIENCE_S)
        return sock

    def connections(self) -> list[http_limits.LimitedProtocol]:
        return list(self.server.server_state.connections)

    def wait_for_head(self, data: bytes) -> None:
        """Until the only connection's parser holds these bytes, which are no whole head."""
        wait_until(lambda: [c.conn.trailing_data[0] for c in self.connections()] == [data])

    def assert_alive(self):
        assert httpx.post(self.url + "/size", content=b"12345", timeout=PATIENCE_S, verify=NO_TLS).text == "5"


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setattr(http_limits, "HEAD_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(http_limits, "BODY_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(http_limits, "MAX_BODY_BYTES", 1 << 20)
    monkeypatch.setattr(http_limits, "READ_TIMEOUT_S", 1)
    running = Running()
    yield running
    running.assert_alive()
    assert running.front.incoming_bytes == 0
    running.server.force_exit = running.server.should_exit = True
    running.thread.join()


def reply_of(sock: socket.socket) -> tuple[int, dict]:
    """Status and body of what comes until the connection ends."""
    data = b""
    while piece := sock.recv(65536):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def chunks(num: int):
    for _ in range(num):
        yield b" " * 65536


def test_bodies_up_to_the_limit(running):
    assert httpx.post(running.url + "/size", content=b" " * (1 << 20), timeout=PATIENCE_S, verify=NO_TLS).text == str(
        1 << 20
    )
    assert httpx.post(running.url + "/size", content=chunks(16), timeout=PATIENCE_S, verify=NO_TLS).text == str(
        1 << 20
    )


@pytest.mark.parametrize("content", [b" " * ((1 << 20) + 1), chunks(64)], ids=["announced", "chunked"])
def test_a_body_over_the_limit_is_a_413(running, content):
    response = httpx.post(running.url + "/size", content=content, timeout=PATIENCE_S, verify=NO_TLS)
    assert response.status_code == 413
    assert response.json()["type"] == "RequestTooLargeError" and "1 MiB" in response.json()["message"]


def test_an_announced_size_is_refused_before_it_comes(running):
    with running.connect() as sock:
        sock.sendall(b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 413")


def test_bodies_that_come_in_share_a_limit(running, monkeypatch):
    monkeypatch.setattr(http_limits, "MAX_INCOMING_BYTES", 100_000)
    with running.connect() as one:
        one.sendall(b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: 90001\r\n\r\n" + b" " * 90_000)
        wait_until(lambda: running.front.incoming_bytes == 90_000)
        assert (
            httpx.post(running.url + "/size", content=chunks(2), timeout=PATIENCE_S, verify=NO_TLS).status_code == 503
        )
        one.sendall(b" ")
        assert one.recv(15) == b"HTTP/1.1 200 OK"


def test_a_body_that_dribbles_is_a_408(running):
    with running.connect() as sock:
        sock.sendall(b"POST /size HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 100\r\n\r\n")
        for size in range(1, 6):  # no byte moves the deadline
            sock.sendall(b" ")
            wait_until(lambda size=size: running.front.incoming_bytes == size)
            running.wait(0.19 * DEADLINE_S)
        assert running.front.incoming_bytes == 5, "not before the deadline"
        running.wait(0.06 * DEADLINE_S)
        status, error = reply_of(sock)
        assert status == 408 and error["type"] == "RequestTimeoutError"


def dribble_past_the_deadline(running: Running, sock: socket.socket, head: bytes) -> None:
    """Sends the beginning of a head, and more of it later: the server hangs up at the deadline of the first byte."""
    sock.sendall(head)
    running.wait_for_head(head)
    running.wait(0.6 * DEADLINE_S)
    sock.sendall(b"x")
    running.wait_for_head(head + b"x")
    running.wait(0.6 * DEADLINE_S)
    assert sock.recv(65536) == b""


def test_a_head_that_dribbles_ends_the_connection(running):
    with running.connect() as sock:
        dribble_past_the_deadline(running, sock, b"GET /size HTTP/1.1\r\nx: ")


def test_so_it_does_after_a_first_request(running):
    with running.connect() as sock:
        sock.sendall(b"GET /size HTTP/1.1\r\nhost: x\r\n\r\n")
        read_until(sock, b"\r\n\r\n0")
        dribble_past_the_deadline(running, sock, b"GET /size HTTP/1.1\r\nx: ")


def test_the_rest_of_a_body_that_is_not_read_has_a_deadline(running):
    with running.connect() as sock:
        sock.sendall(b"POST /deaf HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\n")
        read_until(sock, b"not read")
        sock.sendall(b"x")
        running.wait(0.9 * DEADLINE_S)
        assert len(running.connections()) == 1
        running.wait(0.2 * DEADLINE_S)
        wait_until(lambda: not running.connections())


def test_a_connection_between_two_requests_has_a_deadline(running):
    with running.connect() as sock:
        for _ in range(2):
            sock.sendall(b"GET /size HTTP/1.1\r\nhost: x\r\n\r\n")
            read_until(sock, b"\r\n\r\n0")
            running.wait(0.9 * DEADLINE_S)
        running.wait(0.2 * DEADLINE_S)
        assert sock.recv(65536) == b""


def read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        piece = sock.recv(65536)
        assert piece, data
        data += piece
    return data


def test_slow_requests_on_one_connection_live(running):
    with running.connect() as sock:
        for _ in range(4):  # longer in all than any deadline
            sock.sendall(b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\na")
            wait_until(lambda: running.front.incoming_bytes == 1)
            running.wait(0.7 * DEADLINE_S)
            sock.sendall(b"b")
            assert read_until(sock, b"\r\n\r\n2").startswith(b"HTTP/1.1 200")
            running.wait(0.7 * DEADLINE_S)


def test_pipelined_requests(running):
    with running.connect() as sock:
        sock.sendall(b"GET /size HTTP/1.1\r\nhost: x\r\n\r\n" * 5)
        data = b""
        while data.count(b"HTTP/1.1 200") < 5:
            data += sock.recv(65536)
        running.wait(1.1 * DEADLINE_S)
        while piece := sock.recv(65536):
            data += piece
        assert data.count(b"HTTP/1.1 200") == 5


def test_many_silent_connections_disturb_nobody(running):
    socks = [running.connect() for _ in range(300)]
    for i, sock in enumerate(socks):
        sock.sendall(b"POST /size HTTP/1.1\r\ncontent-length: 9\r\nhost: x\r\n" + b"\r\n" * (i % 2))
    wait_until(lambda: len(running.connections()) == 300)
    running.assert_alive()
    running.wait(1.1 * DEADLINE_S)  # ends those without a head; the others get a 408
    wait_until(lambda: all(c.cycle is not None and c.cycle.response_complete for c in running.connections()))
    running.wait(1.1 * DEADLINE_S)  # ends those that have still not sent their body
    wait_until(lambda: not running.connections())
    for sock in socks:
        sock.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such time-out")
def test_a_client_that_does_not_read_is_let_go(running):
    with running.connect() as sock:
        sock.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_until(lambda: len(running.connections()) == 1)
        wait_until(lambda: not running.connections())


def test_a_client_that_leaves_within_its_body_is_no_error(running, caplog):
    with running.connect() as sock:
        sock.sendall(b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc")
        wait_until(lambda: running.front.incoming_bytes == 3)
    wait_until(lambda: running.front.incoming_bytes == 0)
    assert not caplog.records


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"hello\r\n\r\n",
        b"GET /size HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"GET /size HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /size HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["tls", "words", "negative", "two lengths", "bad chunk"],
)
def test_what_is_no_http_gets_an_error_in_the_usual_shape(running, data, caplog):
    with running.connect() as sock:
        sock.sendall(data)
        status, error = reply_of(sock)
        assert status == 400 and error["object"] == "error"
    assert all(record.levelno < logging.ERROR for record in caplog.records)


def test_a_head_without_end(running):
    with running.connect() as sock, pytest.raises(OSError):
        while True:  # the server hangs up; what is on its way then resets the connection
            sock.sendall(b"GET /size HTTP/1.1\r\nx: " + b"a" * 65536)


class Sent:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str) -> None:
        return None


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("piece", [1 << 20, 1000])
def test_a_head_over_the_limit_is_refused_however_it_arrives(beyond, piece):
    """The body that comes with it does not count."""
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\nx: "
    head += b"a" * (http_limits.MAX_HEAD_BYTES + beyond - len(head) - 4) + b"\r\n\r\n"
    data, requests = head + b"b" * 1000, []

    async def app(scope, receive, send):
        requests.append(scope["path"])

    async def main() -> Sent:
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        config.load()
        protocol = http_limits.LimitedProtocol(config, uvicorn.server.ServerState(), {})
        sent = Sent()
        protocol.connection_made(sent)
        for start in range(0, len(data), piece):
            if not sent.closed:
                protocol.data_received(data[start : start + piece])
        await asyncio.sleep(0)
        protocol.connection_lost(None)
        return sent

    sent = asyncio.run(main())
    assert requests == ([] if beyond else ["/"])
    assert sent.data.startswith(b"HTTP/1.1 400") == bool(beyond)
    assert not beyond or sent.closed


def test_a_bug_is_logged_once_and_from_our_first_line_on(running, caplog):
    assert httpx.get(running.url + "/bug", timeout=PATIENCE_S, verify=NO_TLS).json()["code"] == 500
    wait_until(lambda: caplog.records)
    (record,) = caplog.records
    assert record.getMessage() == "GET /bug failed"
    frames = []
    tb = record.exc_info[2]
    while tb is not None:
        frames.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    assert frames == ["bug"]


# The whole application


@pytest.fixture(scope="module")
def send():
    front = http_limits.Front(make_app(ServerArgs(model_path="m"), OneWord(), {}))

    def send(method: str, path: str, **fields) -> httpx.Response:
        async def main() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://test") as client:
                return await client.request(method, path, **fields)

        return asyncio.run(main())

    return send


@pytest.mark.parametrize("path", ["/server_info", "/hicache/state"])
def test_the_wall_clock_does_not_change_how_long_the_server_is_up(send, monkeypatch, path):
    async def no_state(_: OneWord) -> dict:
        return {}

    monkeypatch.setattr(OneWord, "get_internal_state", no_state, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 0.0)
        reply = send("GET", path)
    assert reply.status_code == 200, reply.text
    assert reply.json()["uptime_seconds"] >= 0


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/generate", 405),
        ("PATCH", "/health", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nowhere", 404),
        ("BREW", "/coffee", 404),
    ],
)
def test_wrong_methods_and_paths_have_the_shape(send, method, path, status):
    response = send(method, path)
    assert response.status_code == status
    assert response.json()["object"] == "error" and response.json()["code"] == status
    assert status != 405 or response.headers["allow"]


def test_content_types(send):
    def post(kind):
        headers = {"content-type": kind} if kind is not None else {}
        content = b'{"prompt": [100], "max_tokens": 1}'
        return send("POST", "/v1/completions", content=content, headers=headers)

    for kind in (None, "application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert post(kind).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert post(kind).status_code == 415 and post(kind).json()["object"] == "error"


@pytest.mark.parametrize(("coding", "status"), [("identity", 200), ("gzip", 415)])
def test_content_encodings(send, coding, status):
    headers = {"content-type": "application/json", "content-encoding": coding}
    reply = send("POST", "/v1/completions", content=b'{"prompt": [100], "max_tokens": 1}', headers=headers)
    assert reply.status_code == status


def test_an_oversized_body(send):
    body = b'{"prompt": "' + b"a" * http_limits.MAX_BODY_BYTES + b'"}'
    assert send("POST", "/v1/completions", content=body).status_code == 413


def test_names_of_clients_are_bounded(send):
    long = "x" * 2000
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"})):
        for name in ("rid", "cache_salt", "extra_key"):
            response = send("POST", path, json={**body, name: long})
            assert response.status_code == 400 and response.json()["param"] == name
    error = send("POST", "/v1/completions", json={"prompt": "a", "model": long}).json()
    assert error["code"] == 404 and len(error["message"]) < 1100
