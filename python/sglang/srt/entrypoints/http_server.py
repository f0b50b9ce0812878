"""The HTTP server: its routes, and its life from a free port to an exit code. Owns the listening socket and signals.

bind port -> start processes -> serve --SIGTERM/SIGINT--> refuse new, finish running -> stop, exit code 0
                                  |----a child dies-----> fail all waiting            -> stop, exit code 1
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

import sglang
from sglang.srt.entrypoints.engine import SCHEDULER_COMMAND, EngineProcesses
from sglang.srt.entrypoints.native import GenerateReqInput, serve_generate
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import serve_chat
from sglang.srt.entrypoints.openai.serving_completions import serve_completions
from sglang.srt.entrypoints.request_fields import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_GENERATE,
    convert,
    decode_body,
)
from sglang.srt.entrypoints.streams import answer
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError, is_for_the_user, one_sentence
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.log import configure_logging

DRAIN_TIMEOUT_S = 60.0
# What a connection gets to write its last answer.
_GRACE_S = 3

logger = logging.getLogger(__name__)


def make_app(args: ServerArgs, manager: TokenizerManager, ready_info: dict[str, Any]) -> FastAPI:
    app = FastAPI(title="SGLang-compatible engine", version=sglang.__version__)
    created = int(time.time())
    started = time.time()
    accepted_names = {args.model_name, args.model_path, "default"}

    def check_model(name: str | None) -> None:
        if name and name not in accepted_names:
            raise RequestError(f"the model {name!r} is not served here, {args.model_name!r} is", 404, param="model")

    def model_card() -> dict[str, Any]:
        return {
            "id": args.model_name,
            "object": "model",
            "created": created,
            "owned_by": "sglang",
            "root": args.model_path,
            "parent": None,
            "max_model_len": manager.context_length,
        }

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        req = convert(decode_body(await request.body()), ChatCompletionRequest, UNSUPPORTED_CHAT)
        check_model(req.model)
        return await answer(request.receive, serve_chat(req, manager, args.model_name), bool(req.stream))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        req = convert(decode_body(await request.body()), CompletionRequest, UNSUPPORTED_COMPLETION)
        check_model(req.model)
        return await answer(request.receive, serve_completions(req, manager, args.model_name), bool(req.stream))

    @app.api_route("/generate", methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        req = convert(decode_body(await request.body()), GenerateReqInput, UNSUPPORTED_GENERATE)
        return await answer(request.receive, serve_generate(req, manager), bool(req.stream))

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if manager.accepts else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        check_model(model)
        return JSONResponse(model_card())

    @app.get("/get_model_info")
    @app.get("/model_info")
    async def model_info() -> Response:
        return JSONResponse(
            {
                "model_path": args.model_path,
                "tokenizer_path": args.tokenizer_path or args.model_path,
                "served_model_name": args.model_name,
                "is_generation": True,
                "max_context_length": manager.context_length,
                "weight_version": "default",
            }
        )

    @app.get("/get_server_info")
    @app.get("/server_info")
    async def server_info() -> Response:
        state = await manager.get_internal_state()
        info = {
            **asdict(args),
            **ready_info,
            "version": sglang.__version__,
            "uptime_seconds": time.time() - started,
            "internal_states": [state],
        }
        return Response(msgspec.json.encode(info), media_type="application/json")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await manager.render_metrics(), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        result = await manager.flush_cache()
        default = "Cache flushed." if result.success else "The cache was not flushed: requests are running."
        return PlainTextResponse((result.message or default) + "\n", status_code=200 if result.success else 400)

    @app.get("/hicache/state")
    async def hicache_state() -> Response:
        return Response(msgspec.json.encode(await manager.get_internal_state()), media_type="application/json")

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        return JSONResponse(error.body(), status_code=error.status_code)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        body = RequestError(str(error.detail), error.status_code).body()
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def internal_error(_: Request, error: Exception) -> Response:
        return JSONResponse(RequestError("internal error", 500).body(), status_code=500)

    return app


class HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # ours drain first


def bind(args: ServerArgs) -> socket.socket:
    """The port, taken before anything slow is done. Raises StartupError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise StartupError(f"--host {args.host} is no address of this machine: {error.strerror}") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restart may follow at once: connections of the last server still linger on the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_listen(args, error) from None
    return sock


def _cannot_listen(args: ServerArgs, error: OSError) -> StartupError:
    return StartupError(
        f"cannot listen on {args.host}:{args.port} ({os.strerror(error.errno or 0)}): choose another --port or --host"
    )


async def serve(args: ServerArgs, scheduler_command: Sequence[str], drain_timeout_s: float) -> int:
    sock = bind(args)
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)

    processes = EngineProcesses(args, scheduler_command)
    with contextlib.closing(sock):
        started = time.perf_counter()
        starting = asyncio.create_task(processes.start())
        if await _first(starting, asyncio.create_task(stop.wait())) is not starting:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            logger.info("stopped before the server was ready")
            return 0
        starting.result()
        try:
            try:
                sock.listen(2048)
            except OSError as error:
                raise _cannot_listen(args, error) from None
            seconds = time.perf_counter() - started
            return await _serve_until_the_end(args, processes, sock, stop, hurry, drain_timeout_s, seconds)
        finally:
            await processes.stop()


async def _serve_until_the_end(
    args: ServerArgs,
    processes: EngineProcesses,
    sock: socket.socket,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    drain_timeout_s: float,
    seconds: float,
) -> int:
    manager = processes.manager
    server = HttpServer(
        uvicorn.Config(
            make_app(args, manager, processes.ready_info),
            log_config=None,
            log_level=(args.log_level_http or args.log_level),
            loop="uvloop",
            timeout_keep_alive=5,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its start and stop lines repeat ours
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    died = asyncio.create_task(processes.wait_for_death())
    stopping = asyncio.create_task(stop.wait())
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    logger.info("The server is up after %.1f s and ready for requests at %s", seconds, url(args))

    done = await _first(died, stopping, serving)
    if done is stopping:
        manager.refuse()
        logger.info("stopping: no new requests, the running ones get %g s to finish", drain_timeout_s)
        drained = asyncio.create_task(manager.drained(drain_timeout_s))
        done = await _first(drained, died, asyncio.create_task(hurry.wait()))
        if done is not died and not (drained.done() and drained.result()):
            logger.warning("stopping with unfinished requests")
            manager.fail_all("the server is shutting down", 503)
    if done is died:
        logger.error("%s; shutting down", died.result())
        manager.fail_all(died.result())
    elif done is serving:
        logger.error("the HTTP server ended unexpectedly: %r", serving.exception() if serving.done() else None)
    await manager.drained(_GRACE_S)  # until each waiter has its error
    server.should_exit = True
    await asyncio.gather(serving, return_exceptions=True)
    logger.info("stopped")
    return 1 if done in (died, serving) else 0


async def _first(*tasks: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """The task of these that is done first; in the order given if several are."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return next(task for task in tasks if task.done())


def url(args: ServerArgs) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(args.host, f"[{args.host}]" if ":" in args.host else args.host)
    return f"http://{host}:{args.port}"


def launch_server(
    args: ServerArgs,
    scheduler_command: Sequence[str] = SCHEDULER_COMMAND,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
) -> int:
    """Runs a server in this thread until it ends. Returns the process's exit code; has said why if it is not 0."""
    configure_logging(args.log_level)
    logger.info("SGLang-compatible engine %s: serving %s", sglang.__version__, args.model_path)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(args, scheduler_command, drain_timeout_s))
    except Exception as error:
        if not is_for_the_user(error):
            raise
        sys.stderr.write(f"error: {one_sentence(error)}\n")
        return 1
