"""`Server`: a running server, as commands talk to it. Owns nothing."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from typing import Any

import httpx

DEFAULT_URL = "http://127.0.0.1:30000"
KEY_VARIABLE = "SGLANG_ADMIN_API_KEY"
# For an answer that waits for no storage medium and for no computing.
PATIENCE_S = 30.0


class CommandError(Exception):
    """What a person has to know, in a sentence."""


def check_number(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Raises CommandError unless the value is finite and within the bounds."""
    # No comparison with nan is true. An integer may be beyond each float.
    if not least <= value <= min(most, sys.float_info.max):
        shown = f"{value:g}" if isinstance(value, float) else str(value)[:20]
        upto = "up" if most == math.inf else f"to {most:g}"
        raise CommandError(f"{name} is {shown}, but it must be a number from {least:g} {upto}")


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=os.environ.get("SGLANG_URL", DEFAULT_URL), help=f"default: {DEFAULT_URL}")
    parser.add_argument(
        "--admin-api-key",
        default=os.environ.get(KEY_VARIABLE) or os.environ.get("SGLANG_API_KEY"),
        help=f"of the server; better in the environment variable {KEY_VARIABLE}, which other users do not see",
    )


class Server:
    """args: with the fields of `add_server`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._url = args.url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {args.admin_api_key}"} if args.admin_api_key else {}

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, patience_s: float | None = PATIENCE_S
    ) -> Any:
        """The answer: JSON if it is some, else a text. patience_s: None waits for it without end. Raises
        CommandError."""
        headers, content = self._headers, None
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
            content = _encoded(body)
        timeout = httpx.Timeout(patience_s, connect=PATIENCE_S)
        try:
            reply = httpx.request(
                method, self._url + path, content=content, headers=headers, timeout=timeout, trust_env=False
            )
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            done = "" if method == "GET" else ", but it may still do this"
            raise CommandError(
                f"{self._url} does not answer within {patience_s:g} s{done}: look at its log"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CommandError(f"{self._url} cannot be reached ({error}): name the server with --url") from error
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        answer = reply.json() if is_json else reply.text.strip()
        if reply.status_code == 401:
            raise CommandError(f"the server wants its admin key: set {KEY_VARIABLE}")
        if reply.status_code >= 400:
            raise CommandError(_message_of(answer))
        return answer


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise CommandError(f"this cannot be sent ({error}): give finite numbers, and texts in UTF-8") from None


def _message_of(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def shown(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, indent=2)
