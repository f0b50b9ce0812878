"""What a server tells of itself before a run: whether it is there, its model, its tokenizer, its longest request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.serving_benchmark.http_stream import HttpError, Server, send_json

_POLL_S = 0.5
_ANSWER_S = 30.0
_FLUSH_TIMEOUT_S = 60.0


class ServerError(Exception):
    """The server cannot be measured; the message is one sentence for the user."""


@dataclass(frozen=True)
class ServerFacts:
    # What requests name it by; None: it lists no model.
    model: str | None
    # A directory or a hub name, as the server has it; None: it does not tell.
    tokenizer: str | None
    # Tokens of a prompt with its answer; None: it does not tell.
    max_total_len: int | None
    # Of /get_server_info; None: there is none.
    info: dict[str, Any] | None


async def wait_ready(server: Server, timeout_s: float, tell: Callable[[str], None]) -> None:
    """Until /v1/models answers. Raises `ServerError`. tell: gets a sentence if that takes time."""
    deadline = time.monotonic() + timeout_s
    told = False
    while True:
        try:
            left_s = min(_ANSWER_S, max(1.0, deadline - time.monotonic()))
            status, _ = await send_json(server, "GET", "/v1/models", left_s)
            problem = f"/v1/models answers with status {status}"
            if status in (401, 403):
                raise ServerError(f"{server.url} wants a key: set OPENAI_API_KEY.")
            if status < 500:
                return
        except HttpError as error:
            problem = str(error)
        if time.monotonic() >= deadline:
            raise ServerError(
                f"{server.url} is not ready: {problem}. Start the server, or name another with --base-url, or --host "
                "and --port."
            )
        if not told:
            tell(f"{problem}; waiting up to {timeout_s:g} s (--ready-check-timeout-sec)")
            told = True
        await asyncio.sleep(_POLL_S)


async def ask_facts(server: Server) -> ServerFacts:
    """What the server does not tell is None. Raises `ServerError` if it is gone."""
    models = await _get(server, "/v1/models")
    about = await _get(server, "/get_model_info")
    info = await _get(server, "/get_server_info")
    cards = (models or {}).get("data")
    card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
    about = about or {}
    longest = [card.get("max_model_len"), about.get("max_context_length")]
    # The pool of a small device may be shorter than the model's context. One token is left for the answer.
    input_len = (info or {}).get("max_req_input_len")
    longest.append(input_len + 1 if isinstance(input_len, int) else None)
    known = [each for each in longest if isinstance(each, int)]
    return ServerFacts(
        model=card.get("id"),
        tokenizer=about.get("tokenizer_path") or about.get("model_path") or card.get("root") or card.get("id"),
        max_total_len=min(known, default=None),
        info=info,
    )


async def _get(server: Server, path: str) -> dict[str, Any] | None:
    try:
        status, content = await send_json(server, "GET", path)
    except HttpError as error:
        raise ServerError(f"{server.url} does not answer any more: {error}.") from None
    return content if status == 200 and isinstance(content, dict) else None


async def check_alive(server: Server) -> None:
    """Raises `ServerError` unless it answers."""
    try:
        status, _ = await send_json(server, "GET", "/v1/models")
    except HttpError as error:
        raise ServerError(f"{server.url} does not answer any more: {error}.") from None
    if status >= 500:
        raise ServerError(f"{server.url} does not answer any more: /v1/models answers with status {status}.")


async def flush_cache(server: Server, path: str) -> None:
    """Raises `ServerError`. A server that is still busy is asked again."""
    deadline = time.monotonic() + _FLUSH_TIMEOUT_S
    while True:
        try:
            status, _ = await send_json(server, "POST", path, _FLUSH_TIMEOUT_S)
        except HttpError as error:
            raise ServerError(f"--flush-cache failed: {error}.") from None
        if status == 200:
            return
        if status != 400 or time.monotonic() >= deadline:
            hint = " vLLM has it with VLLM_SERVER_DEV_MODE=1." if path == "/reset_prefix_cache" else ""
            raise ServerError(f"--flush-cache failed: {path} answers with status {status}.{hint}")
        await asyncio.sleep(_POLL_S)
