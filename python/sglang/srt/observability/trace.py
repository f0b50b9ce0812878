"""Traces of requests for an OpenTelemetry collector (`--enable-trace`), or of none. Owns the exporter.

    POST /v1/chat/completions              the HTTP request, under the client's `traceparent`
      chat <model>                         one prompt with one answer; its attributes are gen_ai.* and sglang.*
        tokenize                           until the scheduler gets the request
        queue                              until its first launch
          storage                          as long as it waited for storage
        load <tier>                        what loads from a tier took; they overlap with the rest
        prefill                            until its first token
        decode                             until its last

A request is told here once, when it ends: nothing is done per token. Spans go to a queue of fixed length, which a
thread of the SDK empties. A collector that does not answer costs spans, and a request nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from sglang.srt.managers.io_struct import ReqTimes
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.log import REQUEST_ID

# What the operation of a path is called in OpenTelemetry's conventions for generative models.
_OPERATIONS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/responses"), "chat"),
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_OTHER_OPERATION = "generate_content"
_UNTRACED_METHODS = ("GET", "HEAD", "OPTIONS")
# Seconds between two lines of the log about a collector that does not answer.
_COMPLAIN_EVERY_S = 60.0
_CLOSE_TIMEOUT_S = 2.0

_PATH: ContextVar[str] = ContextVar("traced_path", default="")


@dataclass(frozen=True, kw_only=True)
class GeneratedTrace:
    """A request of one prompt and one answer that has ended. Seconds of a monotonic clock."""

    rid: str
    arrived: float
    # When the scheduler got it, its first token came, and its last; None if it ended before.
    sent: float | None
    first: float | None
    last: float | None
    ended: float
    params: SamplingParams
    prompt_tokens: int
    completion_tokens: int
    # Tier -> tokens.
    cached_tokens: Mapping[str, int]
    # stop, length or abort, or the error's type.
    finish_reason: str
    is_error: bool
    # None of a request without a token.
    times: ReqTimes | None


class RequestSpan(Protocol):
    def end(self, route: str, status: int) -> None:
        """route: "" where no route answers the path. status: 0 where no reply has begun."""


class Tracer(Protocol):
    def request(
        self, method: str, path: str, request_id: str, headers: Mapping[str, str]
    ) -> contextlib.AbstractContextManager[RequestSpan]:
        """While an HTTP request is answered."""

    def generated(self, what: GeneratedTrace) -> None:
        """An answer of the HTTP request in whose context this is called."""

    def close(self) -> None: ...


class _NoSpan:
    def end(self, route: str, status: int) -> None: ...


class NoTracer:
    @contextlib.contextmanager
    def request(self, method: str, path: str, request_id: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        yield _NoSpan()

    def generated(self, what: GeneratedTrace) -> None: ...

    def close(self) -> None: ...


NO_TRACE: Tracer = NoTracer()


class OtelTracer:
    """processor: takes the spans that have ended."""

    def __init__(self, model_name: str, processor: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._model = model_name
        provider = TracerProvider(
            resource=Resource.create({"service.name": "sglang", "sglang.model": model_name}), shutdown_on_exit=False
        )
        provider.add_span_processor(processor)
        self._provider = provider
        self._tracer = provider.get_tracer("sglang")
        self._propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def request(self, method: str, path: str, request_id: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        if method in _UNTRACED_METHODS:
            yield _NoSpan()
            return
        span = self._tracer.start_span(
            method,
            context=self._propagator.extract(headers),
            kind=self._api.SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "url.path": path,
                "http.request.header.x-request-id": (request_id,),
            },
        )
        _PATH.set(path)
        with self._api.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            yield _HttpSpan(span, self._api, method)

    def generated(self, what: GeneratedTrace) -> None:
        parent = self._api.get_current_span()
        if not parent.is_recording():
            return
        # The spans' times are those of the system's clock.
        offset_ns = time.time_ns() - time.perf_counter_ns()

        def ns(seconds: float) -> int:
            return offset_ns + int(seconds * 1e9)

        def span(name: str, start: float, end: float, under: Any, attributes: Mapping[str, Any] = {}) -> Any:
            made = self._tracer.start_span(
                name, self._api.set_span_in_context(under), start_time=ns(start), attributes=dict(attributes)
            )
            made.end(ns(end))
            return made

        operation = _OPERATIONS.get(_PATH.get(), _OTHER_OPERATION)
        whole = self._tracer.start_span(
            f"{operation} {self._model}",
            self._api.set_span_in_context(parent),
            start_time=ns(what.arrived),
            attributes=self._attributes(operation, what),
        )
        if what.is_error:
            whole.set_status(self._api.StatusCode.ERROR, what.finish_reason)
        span("tokenize", what.arrived, what.ended if what.sent is None else what.sent, whole)
        if what.sent is not None:
            times = what.times
            started = what.ended if times is None else what.sent + times.queue_s
            queue = span("queue", what.sent, started, whole)
            if times is not None:
                if times.storage_s:
                    span("storage", what.sent, what.sent + times.storage_s, queue)
                for tier, seconds in times.loads_s.items():
                    tokens = {"sglang.tokens": what.cached_tokens.get(tier, 0)}
                    span(f"load {tier}", started, started + seconds, whole, tokens)
                first = started + times.prefill_s
                numbers = {"sglang.compute_seconds": times.compute_s, "sglang.stall_seconds": times.stall_s}
                span("prefill", started, first, whole, numbers)
                if what.last is not None:
                    span("decode", first, max(first, what.last), whole)
        whole.end(ns(what.ended))

    def _attributes(self, operation: str, what: GeneratedTrace) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "sglang",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": what.rid,
            "gen_ai.response.finish_reasons": (what.finish_reason,),
            "gen_ai.request.temperature": what.params.temperature,
            "gen_ai.request.top_p": what.params.top_p,
            "gen_ai.usage.input_tokens": what.prompt_tokens,
            "gen_ai.usage.output_tokens": what.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": sum(what.cached_tokens.values()),
            "sglang.request_id": REQUEST_ID.get(),
            **{f"sglang.cached_tokens.{tier}": tokens for tier, tokens in what.cached_tokens.items()},
        }
        if what.params.max_new_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = what.params.max_new_tokens
        if what.first is not None:
            attributes["gen_ai.response.time_to_first_token"] = what.first - what.arrived
        if (times := what.times) is not None:
            attributes["sglang.queue_seconds"] = times.queue_s
            attributes["sglang.storage_seconds"] = times.storage_s
        return attributes

    def close(self) -> None:
        """Send what is left. A collector that does not answer is not waited for longer than a moment."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


class _HttpSpan:
    def __init__(self, span: Any, api: Any, method: str) -> None:
        self._span = span
        self._api = api
        self._method = method

    def end(self, route: str, status: int) -> None:
        if route:
            self._span.update_name(f"{self._method} {route}")
            self._span.set_attribute("http.route", route)
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(self._api.StatusCode.ERROR)
        self._span.end()


class _Rarely(logging.Filter):
    """Lets a line pass now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _COMPLAIN_EVERY_S
        record.exc_info = None
        return True


def open_tracer(model_name: str, endpoint: str) -> Tracer:
    """Raises ValueError where the SDK is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(
            f"--enable-trace needs the OpenTelemetry SDK ({error.name} is missing): install the extra 'trace', which "
            "brings opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
        ) from None
    logging.getLogger(trace_exporter.__name__).addFilter(_Rarely())
    return OtelTracer(model_name, BatchSpanProcessor(trace_exporter.OTLPSpanExporter(endpoint, timeout=2)))
