"""`HttpMetrics`: requests and replies of the HTTP server. Owns its three metrics in the registry that it is given.

Labels are bounded: a path is its route's template, and what no route answers is one label.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
# Of a client that left before its reply began, as nginx has it.
_LEFT = 499


class HttpMetrics:
    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        names = list(labels)
        self._labels = labels
        self._requests = Counter(
            "sglang:http_requests", "HTTP requests, by route.", [*names, "endpoint", "method"], registry=registry
        )
        self._responses = Counter(
            "sglang:http_responses",
            "HTTP replies, by route and status.",
            [*names, "endpoint", "method", "status_code"],
            registry=registry,
        )
        self._active = Gauge(
            "sglang:http_requests_active", "HTTP requests that are being answered.", names, registry=registry
        ).labels(**labels)

    def began(self) -> None:
        self._active.inc()

    def ended(self, route: str, method: str, status: int) -> None:
        """route: "" where no route answers the path. status: 0 where no reply has begun."""
        self._active.dec()
        labels = {
            **self._labels,
            "endpoint": route or "other",
            "method": method if method in _METHODS else "other",
        }
        self._requests.labels(**labels).inc()
        self._responses.labels(**labels, status_code=str(status or _LEFT)).inc()
