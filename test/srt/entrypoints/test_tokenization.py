"""/tokenize and /detokenize of a client that leaves. The application alone, without a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sglang.srt.entrypoints.http_routes import make_app
from sglang.srt.server_args import ServerArgs
from support.one_word import OneWord


class Endless(OneWord):
    """Its work ends only by being cancelled."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.calls: list[Any] = []
        self.cancelled = 0

    async def tokenize(self, text, add_special_tokens) -> Any:
        self.calls.append(text)
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    detokenize = tokenize


@pytest.mark.parametrize(
    "path, body, first",
    [("/tokenize", {"prompt": ["a", "b"]}, "a"), ("/v1/detokenize", {"tokens": [[1], [2]]}, [1])],
)
def test_the_work_of_a_client_that_has_left_is_cancelled(path, body, first):
    async def main() -> None:
        manager = Endless()
        app = make_app(ServerArgs(model_path="m"), manager, {})
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        sent = []

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await manager.started.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        async with asyncio.timeout(120):
            await app(scope, receive, send)
        assert manager.calls == [first] and manager.cancelled == 1
        assert sent[0]["status"] == 499

    asyncio.run(main())
