"""The HTTP server's life, from a free port to an exit code. Owns the listening socket and signals; routes are in
http_routes.py.

bind port -> start processes -> serve --SIGTERM/SIGINT--> /health 503 -> refuse new, finish running -> stop, exit 0
                                  |----a child dies-----> fail all waiting                          -> stop, exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
import uvloop

import sglang
from sglang.srt.entrypoints.engine import SCHEDULER_COMMAND, EngineProcesses
from sglang.srt.entrypoints.http_limits import KEEP_ALIVE_S, Front, LimitedProtocol, limit_unread_replies
from sglang.srt.entrypoints.http_routes import make_app
from sglang.srt.entrypoints.request_scope import RequestScope, with_cors
from sglang.srt.entrypoints.service_manager import READY, STOPPING, notify
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError, is_for_the_user, one_sentence
from sglang.srt.utils.log import configure_logging

DRAIN_TIMEOUT_S = 60.0
# Seconds that a connection gets to write its last answer.
_GRACE_S = 3

logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # ours drain first


def bind(host: str, port: int) -> socket.socket:
    """Take the port before anything slow is done. Raises StartupError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise StartupError(f"--host {host} is no address of this machine: {error.strerror}") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A new server may start at once, while connections of the last one still linger on the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        limit_unread_replies(sock)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from None
    return sock


def listen(sock: socket.socket, host: str, port: int) -> None:
    """Listen on the socket that `bind` has returned. Raises StartupError."""
    try:
        sock.listen(2048)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> StartupError:
    return StartupError(
        f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}): choose another --port or --host"
    )


def allow_connections() -> None:
    """Allow as many open files as the system permits. The usual first limit is 1024 connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS reports a hard limit that it does not grant
        logger.warning("no more than %d open files are allowed: further connections are closed", soft)


async def serve(args: ServerArgs, scheduler_command: Sequence[str], drain_timeout_s: float) -> int:
    sock = bind(args.host, args.port)
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
            listen(sock, args.host, args.port)
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
            RequestScope(
                with_cors(Front(make_app(args, manager, processes.ready_info)), args.cors_allow_origins),
                manager.metrics.http,
                processes.tracer,
            ),
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=(args.log_level_http or args.log_level),
            loop="uvloop",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its start and stop lines repeat ours
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    history = asyncio.create_task(manager.keep_history())
    died = asyncio.create_task(processes.wait_for_death())
    stopping = asyncio.create_task(stop.wait())
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    logger.info("The server is up after %.1f s and ready for requests at %s", seconds, url(args.host, args.port))
    notify(READY, "ready for requests")

    done = await _first(died, stopping, serving)
    if done is not serving:
        notify(STOPPING, "finishing what runs" if done is stopping else "a process of the server has ended")
    hurrying = asyncio.create_task(hurry.wait())
    if done is stopping and args.drain_delay:
        manager.announce_end()
        logger.info("/health answers 503; new requests are refused in %g s", args.drain_delay)
        await asyncio.wait((died, hurrying), timeout=args.drain_delay, return_when=asyncio.FIRST_COMPLETED)
        done = died if died.done() else stopping
    if done is stopping:
        manager.refuse()
        logger.info("stopping: no new requests, the running ones get %g s to finish", drain_timeout_s)
        drained = asyncio.create_task(manager.drained(drain_timeout_s))
        done = await _first(drained, died, hurrying)
        if done is not died and not (drained.done() and drained.result()):
            logger.warning("stopping with unfinished requests")
            manager.fail_all("the server is shutting down", 503)
    if done is died:
        logger.error("%s; shutting down", died.result())
        manager.fail_all(died.result())
    elif done is serving:
        logger.error("the HTTP server ended unexpectedly: %r", serving.exception() if serving.done() else None)
    await manager.drained(_GRACE_S)  # until each waiter has its error
    history.cancel()
    died.cancel()  # from here on children end because the parent stops them
    server.should_exit = True
    await asyncio.gather(serving, history, return_exceptions=True)
    logger.info("stopped")
    return 1 if done in (died, serving) else 0


async def _first(*tasks: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """Wait for the first task that is done. Of several, return the first in the order given."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return next(task for task in tasks if task.done())


def url(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def launch_server(
    args: ServerArgs,
    scheduler_command: Sequence[str] = SCHEDULER_COMMAND,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
) -> int:
    """Run a server in this thread until it ends. Returns the process's exit code, and has printed the reason if it is
    not 0. The caller should then end the process at once (`exit_now`): threads may still be reading a tokenizer or a
    prompt."""
    configure_logging(args.log_level)
    logger.info("SGLang-compatible engine %s: serving %s", sglang.__version__, args.model_path)
    allow_connections()
    try:
        # The loop stays open: closing it would wait for its threads, and return signals to Python's own handlers.
        return uvloop.new_event_loop().run_until_complete(serve(args, scheduler_command, drain_timeout_s))
    except Exception as error:
        if not is_for_the_user(error):
            raise
        sys.stderr.write(f"error: {one_sentence(error)}\n")
        return 1
