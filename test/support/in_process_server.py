"""`InProcessServer`: every endpoint and the offline `Engine` around a `LocalEngine`, in one process. For tests.

The HTTP routes, the tokenizer manager and the detokenizer are the server's own. What is missing are the sockets
between them and the processes: messages are encoded, decoded and handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import httpx

from sglang.srt.entrypoints import engine as engine_module
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.http_routes import make_app
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    TokenizedGenerateReqInput,
    decode_to_scheduler,
    detokenize_req,
    encode,
)
from sglang.srt.managers.scheduler_process import ready_message
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.observability.metrics_collector import MetricsCollector
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.clock import monotonic
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from support.local_engine import LocalEngine

T = TypeVar("T")


class _Processes:
    """In the place of `EngineProcesses`. cached_tokens_details: of the request that ended last."""

    def __init__(self, args: ServerArgs, rank: LocalEngine) -> None:
        self.ready_info: dict[str, Any] = {}
        self.cached_tokens_details: dict[str, int] = {}
        self._args = args
        self._rank = rank
        self._new: list[TokenizedGenerateReqInput] = []
        self._aborts: list[str] = []

    async def start(self) -> None:
        tokenizer = get_tokenizer(self._args.model_path)
        backend = tokenizer.backend_tokenizer
        self._detokenizer = DetokenizerManager(lambda ids, skip: backend.decode(ids, skip_special_tokens=skip))
        self._to_tokenizer: asyncio.Queue[bytes] = asyncio.Queue()
        self._asked = asyncio.Event()
        config = self._rank.model_config
        self.manager = TokenizerManager(
            self._args,
            tokenizer=tokenizer,
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            send=self._send,
            metrics=MetricsCollector(self._args.model_name),
        )
        self._tasks = [
            asyncio.create_task(self.manager.receive_forever(self._to_tokenizer.get)),
            asyncio.create_task(self._drive()),
        ]
        self._to_tokenizer.put_nowait(encode(ready_message(self._rank.core.scheduler)))
        await self.manager.ready

    async def wait_for_death(self) -> str:
        (task, *_), _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return f"a task has ended: {task.exception()!r}"

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, data: bytes) -> None:
        message = decode_to_scheduler(data)
        if isinstance(message, TokenizedGenerateReqInput):
            self._detokenizer.handle(detokenize_req(message))
            self._new.append(message)
        else:
            assert isinstance(message, AbortReq), "the rest of administration is not needed here"
            self._aborts.append(message.rid)
        self._asked.set()

    async def _drive(self) -> None:
        """What a scheduler process does."""
        core = self._rank.core
        while True:
            if core.is_idle and not self._new:
                self._asked.clear()
                await self._asked.wait()
            new, self._new, aborts, self._aborts = self._new, [], self._aborts, []
            progress = core.progress()
            if new or aborts or core.has_work(monotonic()):
                outputs = core.step(monotonic(), progress, new, aborts).outputs
                for output in outputs:
                    if output.finish_reason is not None:
                        self.cached_tokens_details = output.cached_tokens_details
                texts = self._detokenizer.handle(BatchTokenIDOutput(outputs=list(outputs)))
                if texts is not None:
                    self._to_tokenizer.put_nowait(encode(texts))
            await asyncio.sleep(0.0002)


class InProcessServer:
    """path: a directory with the tokenizer of rank's model."""

    def __init__(self, path: str, rank: LocalEngine) -> None:
        self.rank = rank
        args = ServerArgs(model_path=path)
        self._processes = _Processes(args, rank)
        with mock.patch.object(engine_module, "EngineProcesses", lambda *_: self._processes):
            self.engine = Engine(model_path=path)
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(make_app(args, self._processes.manager, {})), base_url="http://here"
        )

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = self.engine._loop.run(self._client.post(path, json=body))
        assert reply.status_code == 200, reply.text
        return reply.json()

    @property
    def cached_tokens_details(self) -> dict[str, int]:
        """tier -> tokens that the last request found there."""
        return self._processes.cached_tokens_details

    def on_rank(self, work: Callable[[LocalEngine], T]) -> T:
        """On the thread that steps the rank, between its steps."""

        async def call() -> T:
            return work(self.rank)

        return self.engine._loop.run(call())

    def close(self) -> None:
        self.engine.shutdown()
        self.rank.close()
