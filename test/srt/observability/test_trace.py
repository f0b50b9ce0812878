"""Traces: the spans of a request with their times, and a collector that answers, or does not."""

from __future__ import annotations

import asyncio
import http.server
import sys
import threading
from typing import Any

import httpx
import pytest

from sglang.srt.entrypoints.http_limits import Front
from sglang.srt.entrypoints.http_routes import make_app
from sglang.srt.entrypoints.request_scope import RequestScope
from sglang.srt.managers.io_struct import ReqTimes
from sglang.srt.observability.trace import GeneratedTrace, OtelTracer, open_tracer
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.errors import RequestError
from support.one_word import OneWord
from support.server_fixture import Server, wait_until

sdk = pytest.importorskip("opentelemetry.sdk.trace.export", reason="the extra 'trace' is not installed")

TIMES = ReqTimes(queue_s=2.0, storage_s=1.5, loads_s={"host": 0.25}, stall_s=0.1, compute_s=0.5, prefill_s=1.0)
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01", "x-request-id": "abc"}


class Traced(OneWord):
    """error: what a request ends with."""

    def __init__(self, tracer: OtelTracer, times: ReqTimes | None = TIMES, error: RequestError | None = None) -> None:
        self._tracer = tracer
        self._times = times
        self._error = error

    async def generate(self, req):
        if self._error is None:
            async for chunk in super().generate(req):
                yield chunk
        self._tracer.generated(
            GeneratedTrace(
                rid="r",
                arrived=100.0,
                sent=100.5,
                first=103.6,
                last=105.0,
                ended=105.5,
                params=SamplingParams(max_new_tokens=7),
                prompt_tokens=10,
                completion_tokens=3,
                cached_tokens={"device": 4, "host": 2},
                finish_reason="stop" if self._error is None else self._error.message,
                is_error=self._error is not None,
                times=self._times,
            )
        )
        if self._error is not None:
            raise self._error


def ask(tracer: OtelTracer, manager: Any, path: str = "/v1/chat/completions", **kwargs: Any) -> httpx.Response:
    app = RequestScope(Front(make_app(ServerArgs(model_path="m"), manager, {})), tracer=tracer)
    body = {"messages": [{"role": "user", "content": "a"}], **kwargs}

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            await client.get("/health")
            return await client.post(path, json=body, headers=PARENT)

    return asyncio.run(main())


def spans_of(stream: bool, times: ReqTimes | None = TIMES, error: RequestError | None = None) -> dict[str, Any]:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = OtelTracer("m", sdk.SimpleSpanProcessor(exporter))
    reply = ask(tracer, Traced(tracer, times, error), stream=stream)
    assert reply.status_code == (200 if error is None else error.status_code)
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_span_for_each_of_its_times(stream):
    spans = spans_of(stream)
    whole = spans["chat m"]

    def seconds(name: str) -> tuple[float, float]:
        span = spans[name]
        return tuple(round((at - whole.start_time) / 1e9, 3) for at in (span.start_time, span.end_time))

    assert {name: seconds(name) for name in spans if " /" not in name} == {
        "chat m": (0.0, 5.5),
        "tokenize": (0.0, 0.5),
        "queue": (0.5, 2.5),
        "storage": (0.5, 2.0),
        "load host": (2.5, 2.75),
        "prefill": (2.5, 3.5),
        "decode": (3.5, 5.0),
    }
    http_span = spans["POST /v1/chat/completions"]
    parents = {name: span.parent.span_id for name, span in spans.items()}
    assert (
        f"{http_span.parent.trace_id:032x}" == TRACE_ID and f"{http_span.parent.span_id:016x}" == "b7ad6b7169203331"
    )
    assert parents["chat m"] == http_span.context.span_id and parents["storage"] == spans["queue"].context.span_id
    assert parents["queue"] == parents["decode"] == whole.context.span_id
    assert {span.context.trace_id for span in spans.values()} == {int(TRACE_ID, 16)}


def test_the_attributes_are_those_of_generative_models():
    spans = spans_of(False)
    found = spans["chat m"].attributes
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 6,
        "gen_ai.response.finish_reasons": ("stop",),
        "sglang.cached_tokens.host": 2,
        "sglang.request_id": "abc",
    }
    assert {name: found[name] for name in wanted} == wanted
    assert spans["prefill"].attributes["sglang.stall_seconds"] == 0.1
    outer = spans["POST /v1/chat/completions"].attributes
    assert outer["http.response.status_code"] == 200 and outer["http.request.header.x-request-id"] == ("abc",)


def test_a_request_without_a_token_has_waited_to_its_end():
    spans = spans_of(False, times=None)
    assert "prefill" not in spans and spans["queue"].end_time == spans["chat m"].end_time


@pytest.mark.parametrize("status", [400, 503])
def test_a_failed_request_and_a_fault_of_the_server_are_errors(status):
    """What a client did wrong is none of the HTTP span."""
    spans = spans_of(False, error=RequestError("the queue is full", status))
    assert not spans["chat m"].status.is_ok and spans["chat m"].status.description == "the queue is full"
    assert spans["POST /v1/chat/completions"].status.is_ok == (status < 500)


class Collector:
    """Takes OTLP over HTTP, and answers with a status."""

    def __init__(self, status: int = 200) -> None:
        self.names: list[str] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    data = gzip.decompress(data)
                for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                    collector.names += [span.name for scope in resource.scope_spans for span in scope.spans]
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_traces_reach_a_collector_over_http():
    with Collector() as collector:
        tracer = open_tracer("m", collector.url)
        assert ask(tracer, Traced(tracer)).status_code == 200
        tracer.close()
    assert {"POST /v1/chat/completions", "chat m", "storage"} <= set(collector.names)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_server_sends_its_traces_to_a_collector():
    with Collector() as collector:
        with Server("--enable-trace", "--otlp-traces-endpoint", collector.url, fake=[]) as server:
            assert (
                server.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}).status_code == 200
            )
            assert server.events("/v1/completions", {"prompt": "a", "max_tokens": 2})
            server.stop()  # sends what is left
        wait_until(lambda: len(collector.names) >= 6)
    assert {"POST /generate", "POST /v1/completions"} <= set(collector.names)
    assert {"generate_content embedded", "text_completion embedded", "tokenize", "queue"} <= set(collector.names)


def test_a_dead_collector_costs_spans_and_requests_nothing(caplog):
    tracer = open_tracer("m", "http://127.0.0.1:1/v1/traces")
    for _ in range(3):
        assert ask(tracer, Traced(tracer)).status_code == 200
    tracer.close()
    assert sum("trace_exporter" in record.name for record in caplog.records) <= 1


def test_without_the_sdk_the_start_is_refused_with_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ValueError, match="install the extra 'trace'"):
        open_tracer("m", "http://localhost:4318/v1/traces")
