"""Large, slow, broken and silent clients, before a small application in this process; deadlines are short here."""

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
from server_fixture import Server, wait_until
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from sglang.srt.entrypoints import http_limits
from sglang.srt.utils.errors import RequestError


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


class Running:
    def __init__(self):
        routes = [Route(f"/{f.__name__}", f, methods=["GET", "POST"]) for f in (size, deaf, bug, endless)]
        handlers = {RequestError: on_error, HTTPException: on_error, Exception: on_error}
        self.front = http_limits.Front(Starlette(routes=routes, exception_handlers=handlers))
        self.listener = socket.create_server(("127.0.0.1", 0))
        http_limits.limit_unread_replies(self.listener)
        self.address = self.listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        config = uvicorn.Config(
            self.front, http=http_limits.LimitedProtocol, log_config=None, timeout_keep_alive=1, lifespan="off"
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve(sockets=[self.listener])), daemon=True
        )
        self.thread.start()
        wait_until(lambda: self.server.started)

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self.address)
        sock.settimeout(10)
        return sock

    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    def assert_alive(self):
        assert httpx.post(self.url + "/size", content=b"12345").text == "5"


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setattr(http_limits, "HEAD_TIMEOUT_S", 0.6)
    monkeypatch.setattr(http_limits, "BODY_TIMEOUT_S", 0.6)
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
    assert httpx.post(running.url + "/size", content=b" " * (1 << 20)).text == str(1 << 20)
    assert httpx.post(running.url + "/size", content=chunks(16)).text == str(1 << 20)


@pytest.mark.parametrize("content", [b" " * ((1 << 20) + 1), chunks(64)], ids=["announced", "chunked"])
def test_a_body_over_the_limit_is_a_413(running, content):
    response = httpx.post(running.url + "/size", content=content)
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
        assert httpx.post(running.url + "/size", content=chunks(2)).status_code == 503
        one.sendall(b" ")
        assert one.recv(15) == b"HTTP/1.1 200 OK"


def test_a_body_that_dribbles_is_a_408(running):
    with running.connect() as sock:
        sock.sendall(b"POST /size HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 100\r\n\r\n")
        started = time.monotonic()
        for _ in range(5):
            time.sleep(0.1)
            sock.sendall(b" ")
        status, error = reply_of(sock)
        assert status == 408 and error["type"] == "RequestTimeoutError"
        assert 0.5 < time.monotonic() - started < 10


def dribble(sock: socket.socket, data: bytes = b"x") -> float:
    """Sends a byte now and then. Seconds until the server hangs up."""
    started = time.monotonic()
    sock.settimeout(0.1)
    while time.monotonic() - started < 5:
        try:
            sock.sendall(data)
            if sock.recv(65536) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - started


def test_a_head_that_dribbles_ends_the_connection(running):
    with running.connect() as sock:
        sock.sendall(b"GET /size HTTP/1.1\r\nx: ")
        assert dribble(sock) < 2


def test_so_it_does_after_a_first_request(running):
    with running.connect() as sock:
        sock.sendall(b"GET /size HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(10) == b"HTTP/1.1 2"
        sock.sendall(b"GET /size HTTP/1.1\r\nx: ")
        assert dribble(sock) < 2


def test_the_rest_of_a_body_that_nobody_reads_has_a_deadline(running):
    with running.connect() as sock:
        sock.sendall(b"POST /deaf HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\n")
        assert dribble(sock) < 2


def test_slow_requests_on_one_connection_live(running):
    with running.connect() as sock:
        for _ in range(4):  # longer in all than any deadline
            sock.sendall(b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")
            time.sleep(0.3)
            sock.sendall(b"ab")
            reply = b""
            while not reply.endswith(b"\r\n\r\n2"):
                reply += sock.recv(65536)
            assert reply.startswith(b"HTTP/1.1 200")


def test_pipelined_requests(running):
    with running.connect() as sock:
        sock.sendall(b"GET /size HTTP/1.1\r\nhost: x\r\n\r\n" * 5)
        data = b""
        while piece := sock.recv(65536):
            data += piece
        assert data.count(b"HTTP/1.1 200") == 5


class _Counted(set):
    """Remembers how many there were at the most: the server may let the first ones go before anybody looks."""

    most = 0

    def add(self, connection):
        super().add(connection)
        self.most = max(self.most, len(self))


def test_many_silent_connections_disturb_nobody(running):
    state = running.server.server_state
    state.connections = connections = _Counted(state.connections)
    socks = [running.connect() for _ in range(300)]
    for i, sock in enumerate(socks):
        sock.sendall(b"POST /size HTTP/1.1\r\ncontent-length: 9\r\nhost: x\r\n" + b"\r\n" * (i % 2))
    wait_until(lambda: connections.most >= 200)
    started = time.monotonic()
    running.assert_alive()
    assert time.monotonic() - started < 8
    wait_until(lambda: running.num_connections() < 10)
    for sock in socks:
        sock.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such time-out")
def test_a_client_that_does_not_read_is_let_go(running):
    with running.connect() as sock:
        sock.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_until(lambda: running.num_connections() == 1)
        wait_until(lambda: running.num_connections() == 0, timeout_s=20)


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


def test_a_bug_is_logged_once_and_from_our_first_line_on(running, caplog):
    assert httpx.get(running.url + "/bug").json()["code"] == 500
    wait_until(lambda: caplog.records)
    (record,) = caplog.records
    assert record.getMessage() == "GET /bug failed"
    frames = []
    tb = record.exc_info[2]
    while tb is not None:
        frames.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    assert frames == ["bug"]


# The whole server


@pytest.fixture(scope="module")
def server():
    with Server(fake=[]) as server:
        yield server


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
def test_wrong_methods_and_paths_have_the_shape(server, method, path, status):
    response = httpx.request(method, server.url + path)
    assert response.status_code == status
    assert response.json()["object"] == "error" and response.json()["code"] == status
    assert status != 405 or response.headers["allow"]


def test_content_types(server):
    def post(kind):
        headers = {"content-type": kind} if kind is not None else {}
        content = b'{"prompt": [100], "max_tokens": 1}'
        return httpx.post(server.url + "/v1/completions", content=content, headers=headers)

    for kind in (None, "application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert post(kind).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert post(kind).status_code == 415 and post(kind).json()["object"] == "error"


def test_an_oversized_body(server):
    body = b'{"prompt": "' + b"a" * http_limits.MAX_BODY_BYTES + b'"}'
    assert server.post("/v1/completions", content=body).status_code == 413


def test_names_of_clients_are_bounded(server):
    long = "x" * 2000
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"})):
        for name in ("rid", "cache_salt", "extra_key"):
            response = server.post(path, {**body, name: long})
            assert response.status_code == 400 and response.json()["param"] == name
    error = server.post("/v1/completions", {"prompt": "a", "model": long}).json()
    assert error["code"] == 404 and len(error["message"]) < 1100
