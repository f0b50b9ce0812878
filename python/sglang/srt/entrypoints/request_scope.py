"""`RequestScope`: what surrounds every HTTP request: its id, its number in the metrics, its trace, CORS.

It is the outermost part of the application, so that errors, refusals of keys and preflights pass through it too.
It owns no state but the metrics' and the tracer's; it reads no body.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.observability.http_metrics import HttpMetrics
from sglang.srt.observability.trace import NO_TRACE, Tracer
from sglang.srt.utils.errors import RETRY_AFTER_S
from sglang.srt.utils.log import REQUEST_ID

REQUEST_ID_HEADER = "x-request-id"
# Printable ASCII without spaces: it goes into log lines and headers as it is.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
# Replies' headers that a page of another origin may read.
_EXPOSED = (REQUEST_ID_HEADER, "retry-after", "warning")


def request_id_of(given: str | None) -> str:
    """The client's id if it may be used, else a drawn one."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class RequestScope:
    """metrics, tracer: None and NO_TRACE where nothing is counted and traced."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics | None = None, tracer: Tracer = NO_TRACE) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers.get(REQUEST_ID_HEADER))
        status = 0

        async def send_(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = MutableHeaders(scope=message)
                own[REQUEST_ID_HEADER] = request_id
                if status == 503 and "retry-after" not in own:
                    own["retry-after"] = str(RETRY_AFTER_S)
            await send(message)

        REQUEST_ID.set(request_id)
        if self._metrics is not None:
            self._metrics.began()
        try:
            with self._tracer.request(scope["method"], scope["path"], request_id, headers) as span:
                try:
                    await self._app(scope, receive, send_)
                finally:
                    span.end(_route_of(scope), status)
        finally:
            if self._metrics is not None:
                self._metrics.ended(_route_of(scope), scope["method"], status)


def _route_of(scope: Scope) -> str:
    """The path's template; "" where no route answers the path."""
    return getattr(scope.get("route"), "path", "")


def with_cors(app: ASGIApp, origins: str | None) -> ASGIApp:
    """origins: separated by commas, or *. A key travels in the Authorization header, which pages set themselves. So
    browsers need not send cookies, and * is allowed."""
    if origins is None:
        return app
    return CORSMiddleware(
        app,
        allow_origins=[origin.strip() for origin in origins.split(",")],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
    )
