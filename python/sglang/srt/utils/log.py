"""One line per event with time and level, on stderr; and the id of the request that a line is about, at its end."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

# The x-request-id of the HTTP request that is being answered, "" where there is none. It follows the request into
# the tasks that are made for it.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")


def configure_logging(level: str, prefix: str = "") -> None:
    name = f" {prefix}" if prefix else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _WithRequestId(f"[%(asctime)s{name}] %(levelname)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _WithRequestId(logging.Formatter):
    """Appends the request's id to the first line, before any traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        request_id = REQUEST_ID.get()
        return f"{text} [request {request_id}]" if request_id else text
