"""What surrounds every request: its id on replies and in the log, its count in the metrics, CORS, Retry-After."""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from starlette.types import ASGIApp

from sglang.srt.entrypoints.http_limits import Front
from sglang.srt.entrypoints.http_routes import make_app
from sglang.srt.entrypoints.request_scope import RequestScope, request_id_of, with_cors
from sglang.srt.managers.tokenizer_manager import GenerateRequest
from sglang.srt.observability.http_metrics import HttpMetrics
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.log import REQUEST_ID, configure_logging
from support.one_word import OneWord


class Failing(OneWord):
    """Every answer is this error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def generate(self, req):
        logging.getLogger("test").warning("about to fail")
        raise self.error
        yield


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    """Tests here configure the log of the whole process."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def whole(manager: OneWord | None = None, metrics: HttpMetrics | None = None, **flags: Any) -> ASGIApp:
    args = ServerArgs(model_path="m", **flags)
    app = Front(make_app(args, manager or OneWord(), {}))
    return RequestScope(with_cors(app, args.cors_allow_origins), metrics)


def ask(app: ASGIApp, *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.request(method, path, **kwargs) for method, path, kwargs in requests]

    return asyncio.run(main())


def generate(**headers: str) -> tuple[str, str, dict[str, Any]]:
    return "POST", "/generate", {"json": {"text": "a"}, "headers": headers}


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        pytest.param(generate(), 200, id="whole"),
        pytest.param(("POST", "/generate", {"json": {"text": "a", "stream": True}}), 200, id="stream"),
        pytest.param(("POST", "/generate", {"json": {}}), 400, id="refused"),
        pytest.param(("GET", "/nowhere", {}), 404, id="nowhere"),
        pytest.param(("GET", "/generate", {}), 405, id="method"),
        pytest.param(("GET", "/health", {}), 200, id="health"),
    ],
)
def test_the_id_of_the_client_is_on_every_reply(request_, status):
    method, path, kwargs = request_
    (reply,) = ask(whole(), (method, path, {**kwargs, "headers": {"X-Request-Id": "abc-1"}}))
    assert reply.status_code == status and reply.headers.get_list("x-request-id") == ["abc-1"]


def test_refused_keys_and_bugs_have_the_id_too():
    (reply,) = ask(whole(api_key="secret"), generate(**{"x-request-id": "abc"}))
    assert (reply.status_code, reply.headers["x-request-id"]) == (401, "abc")
    (reply,) = ask(whole(Failing(KeyError("a bug"))), generate(**{"x-request-id": "abc"}))
    assert (reply.status_code, reply.headers["x-request-id"]) == (500, "abc")


@pytest.mark.parametrize("bad", ["", "two words", "ä", "x" * 129, "a\tb"])
def test_an_id_that_no_log_line_should_have_is_replaced(bad):
    assert re.fullmatch("[0-9a-f]{32}", request_id_of(bad))
    assert request_id_of("x" * 128) == "x" * 128
    first, second = ask(whole(), generate(), generate())
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


def test_log_lines_about_a_request_have_its_id(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    before = logging.getLogger().handlers[:]
    configure_logging("warning")
    try:
        ask(whole(Failing(KeyError("a bug"))), generate(**{"x-request-id": "abc"}))
        logging.getLogger("test").warning("about no request")
    finally:
        logging.getLogger().handlers[:] = before
    lines = log.getvalue().splitlines()
    assert any(line.endswith("WARNING: about to fail [request abc]") for line in lines)
    assert any(line.endswith("ERROR: POST /generate failed [request abc]") for line in lines)
    assert lines[-1].endswith("WARNING: about no request")


def test_every_503_tells_when_to_ask_again():
    (reply,) = ask(whole(Failing(RequestError("full", 503, retry_after_s=17))), generate())
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "17")
    manager = OneWord()
    manager.is_ready = False
    (reply,) = ask(whole(manager), ("GET", "/health", {}))
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    (reply,) = ask(whole(), generate())
    assert "retry-after" not in reply.headers


def preflight(origin: str) -> tuple[str, str, dict[str, Any]]:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    return "OPTIONS", "/v1/chat/completions", {"headers": headers}


def test_pages_of_other_origins_are_let_in_where_they_are_named():
    app = whole(api_key="secret", cors_allow_origins="https://a.example, https://b.example")
    allowed, refused = ask(app, preflight("https://b.example"), preflight("https://c.example"))
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://b.example"
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    reply, bare = ask(
        app,
        generate(origin="https://a.example", authorization="Bearer secret"),
        generate(origin="https://a.example"),
    )
    assert (reply.status_code, bare.status_code) == (200, 401)
    for each in (reply, bare):  # a page may read why it was refused
        assert each.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-request-id" in each.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in reply.headers


def test_all_origins_and_none():
    (reply,) = ask(whole(cors_allow_origins="*"), generate(origin="https://a.example"))
    assert reply.headers["access-control-allow-origin"] == "*"
    (reply,) = ask(whole(), generate(origin="https://a.example"))
    assert "access-control-allow-origin" not in reply.headers


def test_replies_are_counted_by_route_and_status():
    registry = CollectorRegistry()
    metrics = HttpMetrics(registry, {"model_name": "m"})
    ask(
        whole(metrics=metrics),
        generate(),
        ("GET", "/v1/models/m", {}),
        ("GET", "/v1/models/other", {}),
        ("GET", "/nowhere/1", {}),
        ("GET", "/nowhere/2", {}),
        ("BREW", "/nowhere", {}),
    )
    text = generate_latest(registry).decode()

    def count(endpoint: str, method: str, status: int) -> float | None:
        labels = f'{{endpoint="{endpoint}",method="{method}",model_name="m",status_code="{status}"}}'
        found = re.search(re.escape("sglang:http_responses_total" + labels) + r" (\S+)", text)
        return float(found[1]) if found else None

    assert count("/generate", "POST", 200) == 1
    assert count("/v1/models/{model:path}", "GET", 200) == count("/v1/models/{model:path}", "GET", 404) == 1
    assert count("other", "GET", 404) == 2 and count("other", "other", 404) == 1
    assert "nowhere" not in text and 'sglang:http_requests_active{model_name="m"} 0.0' in text


def test_the_id_reaches_what_makes_the_answer():
    seen = []

    class Looking(OneWord):
        async def generate(self, req: GenerateRequest):
            assert isinstance(req.params, SamplingParams)
            seen.append(REQUEST_ID.get())
            async for chunk in super().generate(req):
                yield chunk

    ask(whole(Looking()), generate(**{"x-request-id": "abc"}), generate(**{"x-request-id": "def"}))
    assert seen == ["abc", "def"] and REQUEST_ID.get() == ""


@pytest.mark.parametrize("level", ["info", "critical"])
def test_changes_are_logged_at_any_level(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(level)
    ask(whole(), ("POST", "/flush_cache", {}))
    assert "AUDIT: POST /flush_cache from" in capsys.readouterr().err
