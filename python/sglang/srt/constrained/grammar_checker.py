"""`GrammarChecker`: whether a client's grammar can be used, found out in processes that may die of it.

Owns those processes, one per thread, and what they have found. It belongs to the HTTP process; check_process.py is
the other end. The processes start with the first request that has a grammar.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from sglang.srt.constrained.check_process import CheckResult, CheckSettings, read_frame, write_frame
from sglang.srt.constrained.xgrammar_backend import is_installed
from sglang.srt.sampling.sampling_params import GrammarSpec
from sglang.srt.utils.errors import RequestError

CHECK_COMMAND = (sys.executable, "-m", "sglang.srt.constrained.check_process")
# Characters of a grammar's text.
MAX_SOURCE_CHARS = 1 << 18
# A hostile grammar holds up one of them.
_NUM_PROCESSES = 2
# The most that may wait for them.
_MAX_WAITING = 256
# Results that are remembered, and the bytes of their grammars.
_MAX_KNOWN = 4096
_MAX_KNOWN_BYTES = 16 << 20
# A process that is silent for so long does not get the processor: its own limit counts the processor's seconds.
_TIMEOUT_S = 60.0
# It imports torch first, and reads the tokenizer.
_START_TIMEOUT_S = 300.0

logger = logging.getLogger(__name__)


class GrammarChecker:
    def __init__(self, settings: CheckSettings, command: Sequence[str] = CHECK_COMMAND) -> None:
        """command: of a process that behaves as check_process.py does; it gets the settings as JSON."""
        self._command = (*command, msgspec.json.encode(settings).decode())
        self._known: OrderedDict[GrammarSpec, str] = OrderedDict()
        self._known_bytes = 0
        self._checking: dict[GrammarSpec, asyncio.Task[str]] = {}
        self._pool = ThreadPoolExecutor(_NUM_PROCESSES, thread_name_prefix="grammar")
        self._of_thread = threading.local()
        self._processes: list[_CheckProcess] = []
        self._is_closed = False

    async def check(self, spec: GrammarSpec) -> None:
        """Return if the grammar can be used. Raises RequestError: 400 if it cannot, 501 if this server lacks what it
        takes, 503 if too many wait. Grammars that are being checked already are not checked twice."""
        if not is_installed():
            raise RequestError(
                "structured output needs the package xgrammar on the server: pip install xgrammar", 501
            )
        if len(spec.source) > MAX_SOURCE_CHARS:
            raise RequestError(
                f"{spec.kind} has {len(spec.source)} characters, but at most {MAX_SOURCE_CHARS} are allowed",
                param=spec.kind,
            )
        message = self._known.get(spec)
        if message is None:
            message = await self._find_out(spec)
        else:
            self._known.move_to_end(spec)
        if message:
            raise RequestError(message, param=spec.kind)

    async def _find_out(self, spec: GrammarSpec) -> str:
        task = self._checking.get(spec)
        if task is None:
            if len(self._checking) >= _MAX_WAITING:
                raise RequestError("too many grammars are waiting to be compiled: try again later", 503)
            task = self._checking[spec] = asyncio.create_task(self._check(spec))
        return await asyncio.shield(task)

    async def _check(self, spec: GrammarSpec) -> str:
        try:
            message = await asyncio.get_running_loop().run_in_executor(self._pool, self._check_in_thread, spec)
        finally:
            del self._checking[spec]
        self._known[spec] = message
        self._known_bytes += len(spec.source)
        while len(self._known) > _MAX_KNOWN or self._known_bytes > _MAX_KNOWN_BYTES:
            oldest, _ = self._known.popitem(last=False)
            self._known_bytes -= len(oldest.source)
        return message

    def _check_in_thread(self, spec: GrammarSpec) -> str:
        process = getattr(self._of_thread, "process", None)
        if process is None:
            process = self._of_thread.process = _CheckProcess(self._command)
            self._processes.append(process)
        if self._is_closed:
            raise RequestError("the server is shutting down", 503)
        return process.check(spec)

    def close(self) -> None:
        """End the processes. Checks that are under way fail."""
        self._is_closed = True
        for process in self._processes:
            process.end()
        self._pool.shutdown(wait=False, cancel_futures=True)


class _CheckProcess:
    """A process that is started anew after one that a grammar has ended. Used by one thread; `end` by any."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, spec: GrammarSpec) -> str:
        """Why the grammar cannot be used; "" if it can. Raises RequestError where nothing was found out."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            write_frame(process.stdin, spec)
            return self._read(process, _TIMEOUT_S).message
        except (BrokenPipeError, EOFError):
            pass
        self._give_up()
        code = process.returncode
        logger.warning("a client's %s ended the process that compiled it (exit code %d)", spec.kind, code)
        if code == -signal.SIGXCPU:
            return f"{spec.kind} takes too long to compile: simplify it"
        return f"{spec.kind} takes too much memory to compile: simplify it"

    def _start(self) -> None:
        self._process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # One thread of each library: the processes have two cores at most, and a limit of address space.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        try:
            result = self._read(process, _START_TIMEOUT_S)
        except EOFError:
            self._give_up()
            raise RequestError(
                "the process that compiles grammars does not start: see the server's log", 500
            ) from None
        if result.message:
            raise RequestError(result.message, 501)

    def _read(self, process: subprocess.Popen[bytes], timeout_s: float) -> CheckResult:
        """Raises EOFError where the process has ended, RequestError where it is silent."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            self._give_up()
            raise RequestError("no grammar can be compiled now, because the machine is too busy: try later", 503)
        data = read_frame(process.stdout)
        if data is None:
            raise EOFError
        return msgspec.msgpack.decode(data, type=CheckResult)

    def _give_up(self) -> None:
        process, self._process = self._process, None
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()

    def end(self) -> None:
        """Its thread then finds that it has ended."""
        process = self._process
        if process is not None:
            process.kill()
