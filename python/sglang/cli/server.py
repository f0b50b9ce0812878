"""`Server`: a running server, as commands talk to it. Owns nothing."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import httpx

DEFAULT_URL = "http://127.0.0.1:30000"
KEY_VARIABLE = "SGLANG_ADMIN_API_KEY"


class CommandError(Exception):
    """What a person has to know, in a sentence."""


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

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer: JSON if it is some, else a text. Raises CommandError."""
        try:
            # It may wait for a storage medium, or compute long prompts.
            reply = httpx.request(
                method, self._url + path, json=body, headers=self._headers, timeout=None, trust_env=False
            )
        except httpx.HTTPError as error:
            raise CommandError(f"{self._url} cannot be reached ({error}): name the server with --url") from error
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        answer = reply.json() if is_json else reply.text.strip()
        if reply.status_code == 401:
            raise CommandError(f"the server wants its admin key: set {KEY_VARIABLE}")
        if reply.status_code >= 400:
            raise CommandError(_message_of(answer))
        return answer


def _message_of(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def shown(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, indent=2)
