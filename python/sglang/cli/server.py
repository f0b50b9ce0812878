"""`Server`: a running server, as commands talk to it. Owns nothing."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from typing import Any, cast

import httpx

from sglang.serving_benchmark.http_stream import key_header

DEFAULT_URL = "http://127.0.0.1:30000"
KEY_VARIABLE = "SGLANG_ADMIN_API_KEY"
# For an answer that waits for no storage medium and for no computing.
PATIENCE_S = 30.0


class CommandError(Exception):
    """What a person has to know, in a sentence."""


def check_number(name: str, value: object, least: float, most: float = math.inf) -> None:
    """Raises CommandError unless the value is a finite number within the bounds."""
    # No comparison with nan is true. An integer may be beyond each float.
    if not (isinstance(value, int | float) and least <= value <= min(most, sys.float_info.max)):
        if isinstance(value, float):
            shown = f"{value:g}"
        else:
            # What else a server answers may be large, or nested too deeply to be shown.
            shown = str(value)[:20] if isinstance(value, int | str | None) else type(value).__name__
        upto = "up" if most == math.inf else f"to {most:g}"
        raise CommandError(f"{name} is {shown}, but it must be a number from {least:g} {upto}")


def number_in(reply: object, *names: str, least: float = 0, most: float = 1e12) -> float:
    """What is below these names in a server's reply. Raises CommandError."""
    for name in names:
        reply = reply.get(name) if isinstance(reply, dict) else None
    check_number(f"{'.'.join(names)} in the server's reply", reply, least, most)
    return cast(float, reply)


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
        try:
            self._headers = key_header(args.admin_api_key)
        except ValueError as error:
            raise CommandError(f"the server's key {error}: set {KEY_VARIABLE}") from None

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, patience_s: float | None = PATIENCE_S
    ) -> Any:
        """The answer: a JSON object or a text. patience_s: None waits for it without end. Raises CommandError, even
        if it is neither."""
        headers, content, url = self._headers, None, self._url + path
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
            content = _encoded(body)
        timeout = httpx.Timeout(patience_s, connect=PATIENCE_S)
        try:
            reply = httpx.request(method, url, content=content, headers=headers, timeout=timeout, trust_env=False)
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            done = "" if method == "GET" else ", but it may still do this"
            raise CommandError(
                f"{self._url} does not answer within {patience_s:g} s{done}: look at its log"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise CommandError(f"{self._url} cannot be reached ({error}): name the server with --url") from error
        answer = _content_of(reply)
        if reply.status_code == 401:
            raise CommandError(f"the server wants its admin key ({url}, status 401): set {KEY_VARIABLE}")
        if not reply.is_success:
            reason = "" if answer is None else f": {_message_of(answer)}"
            raise CommandError(f"{url} answers with status {reply.status_code}{reason}")
        if answer is None:
            raise _not_a_server(url, "neither a JSON object nor a text")
        return answer

    def ask_object(self, method: str, path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As `ask`, for what is answered with a JSON object."""
        answer = self.ask(method, path, *args, **kwargs)
        if not isinstance(answer, dict):
            raise _not_a_server(self._url + path, "no JSON object")
        return answer


def _not_a_server(url: str, problem: str) -> CommandError:
    return CommandError(f"{url} answers with {problem}: name the server with --url")


def _content_of(reply: httpx.Response) -> dict[str, Any] | str | None:
    """None: it has neither a JSON object nor a text."""
    kind = reply.headers.get("content-type", "")
    try:
        if kind.startswith("application/json"):
            found = json.loads(reply.content)
            return found if isinstance(found, dict) else None
        return reply.content.decode().strip() or None if kind.startswith("text/plain") else None
    except (ValueError, RecursionError):
        return None


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise CommandError(f"this cannot be sent ({error}): give finite numbers, and texts in UTF-8") from None


def _message_of(answer: dict[str, Any] | str) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def shown(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, indent=2)
