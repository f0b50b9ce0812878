"""`GrammarChecker`: whether a client's grammar can be used, found out in processes that may die of it.

    new grammar --> 0.1 s --over its time--> 1 s --over its time--> 20 s --> what is found is kept

Owns those processes, one per lane, and what they have found. It belongs to the HTTP process; check_process.py is the
other end. A process starts with the first grammar that comes to its lane. Several lanes, so that a few grammars that
take long do not hold up all others.
"""

from __future__ import annotations

import contextlib
import logging
import select
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import NamedTuple

import msgspec

from sglang.srt.constrained.check_process import CheckOrder, CheckResult, CheckSettings, read_frame, write_frame
from sglang.srt.constrained.xgrammar_backend import is_installed
from sglang.srt.sampling.sampling_params import GrammarSpec
from sglang.srt.setting_sources import environment_without_keys
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.pools import run_in_pool
from sglang.srt.utils.shared_tasks import SharedTasks

CHECK_COMMAND = (sys.executable, "-m", "sglang.srt.constrained.check_process")
# Characters of a grammar's text.
MAX_SOURCE_CHARS = 1 << 18
# Of each lane: the processor's seconds for one grammar, and how many may be there. Most take milliseconds; a string
# of bounded length takes 2 s with 49,152 tokens, and longer with more.
LANES = ((0.1, 256), (1.0, 64), (20.0, 16))
TOO_MANY = "too many grammars are waiting to be compiled: try again later"
# Results that are remembered, and the characters of their grammars.
_MAX_KNOWN = 4096
_MAX_KNOWN_CHARS = 16 << 20
# A process that is silent for so long does not get the processor: its own limit counts the processor's seconds.
_TIMEOUT_S = 180.0
# It imports torch first, and reads the tokenizer.
_START_TIMEOUT_S = 300.0

logger = logging.getLogger(__name__)


class _Found(NamedTuple):
    # Why the grammar cannot be used; "" if it can.
    message: str
    # Where it was found out.
    lane: int


class GrammarChecker:
    def __init__(self, settings: CheckSettings, command: Sequence[str] = CHECK_COMMAND) -> None:
        """command: of a process that behaves as check_process.py does; it gets the settings as JSON."""
        command = (*command, msgspec.json.encode(settings).decode())
        self._lanes = [_Lane(command, cpu_s, max_waiting) for cpu_s, max_waiting in LANES]
        self._known: OrderedDict[GrammarSpec, _Found] = OrderedDict()
        self._num_known_chars = 0
        self._checking = SharedTasks[GrammarSpec, _Found]()

    async def check(self, spec: GrammarSpec) -> int:
        """Return if the grammar can be used, and the lane in which it was compiled. Raises RequestError: 400 if it
        cannot, 501 if this server lacks what it takes, 503 if too many wait or the machine is too busy. Requests with
        the same grammar share a check."""
        if not is_installed():
            raise RequestError("structured output needs the package xgrammar here: pip install xgrammar", 501)
        if len(spec.source) > MAX_SOURCE_CHARS:
            raise RequestError(
                f"{spec.kind} has {len(spec.source)} characters, but at most {MAX_SOURCE_CHARS} are allowed",
                param=spec.kind,
            )
        found = self._known.get(spec)
        if found is None:
            # Where no process has begun it, it is dropped once all requests have left.
            found = await self._checking.get(spec, lambda: self._check(spec))
        else:
            self._known.move_to_end(spec)
        if found.message:
            raise RequestError(found.message, param=spec.kind)
        return found.lane

    async def _check(self, spec: GrammarSpec) -> _Found:
        lane = 0
        while (result := await self._lanes[lane].check(spec)).is_over_time and lane + 1 < len(self._lanes):
            lane += 1
        found = self._known[spec] = _Found(result.message, lane)
        self._num_known_chars += len(spec.source)
        while len(self._known) > _MAX_KNOWN or self._num_known_chars > _MAX_KNOWN_CHARS:
            oldest, _ = self._known.popitem(last=False)
            self._num_known_chars -= len(oldest.source)
        return found

    def close(self) -> None:
        """End the processes. Checks that are under way fail."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """A process, which is started anew if it has ended, and the one thread that speaks with it. `close` is called by
    another."""

    def __init__(self, command: Sequence[str], cpu_s: float, max_waiting: int) -> None:
        self._command = command
        self._cpu_s = cpu_s
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._is_closed = False

    async def check(self, spec: GrammarSpec) -> CheckResult:
        if self._num_waiting >= self._max_waiting:
            raise RequestError(TOO_MANY, 503)
        # In the context of the request, whose id is then in the log.
        run = copy_context().run
        self._num_waiting += 1
        try:
            return await run_in_pool(self._pool, run, self._check, spec)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check(self, spec: GrammarSpec) -> CheckResult:
        """Twice, if others have ended the process, as the kernel does when memory runs out."""
        for _ in range(2):
            if self._is_closed:
                raise RequestError("the server is shutting down", 503)
            result = self._ask(spec)
            if not result.is_killed:
                return result
            logger.warning("a process that compiled a client's %s was killed", spec.kind)
        raise RequestError(
            f"{spec.kind} cannot be compiled now, because its process was killed: try again later", 503
        )

    def _ask(self, spec: GrammarSpec) -> CheckResult:
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            write_frame(process.stdin, CheckOrder(spec, self._cpu_s))
            return self._read(process, _TIMEOUT_S)
        except (BrokenPipeError, EOFError):
            self._give_up()
            return CheckResult(is_killed=True)

    def _start(self) -> None:
        try:
            self._process = process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                # One thread of each library: it is going to fork, and has a limit of address space.
                env={**environment_without_keys(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError as error:
            what = f"the process that compiles grammars cannot be started ({error.strerror})"
            logger.warning("%s: raise the limits of open files and processes (ulimit -n, ulimit -u)", what)
            raise RequestError(f"{what}: try again later", 503) from None
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
        # Not select, which refuses descriptors from 1024 on: a server has as many clients.
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        if not poll.poll(1000 * timeout_s):
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
