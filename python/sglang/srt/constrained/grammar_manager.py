"""`GrammarManager`: requests that wait until rank 0 has compiled their grammars.

    add(request) --grammar is there--> ready
        |-- not --> waits; the compiling thread --notify--> take_ready()

Owns the thread that compiles. The scheduler hears of a request only when its grammar is there, so that no batch waits
for one. Every grammar has been compiled before, within limits, by the HTTP process (grammar_checker.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from sglang.srt.constrained.grammar_cache import GrammarCache
from sglang.srt.constrained.xgrammar_backend import GrammarError
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import GrammarSpec

# Of the thread that compiles: the requests of the batch go first.
_NICENESS = 10

logger = logging.getLogger(__name__)


def _yield_to_others() -> None:
    with contextlib.suppress(AttributeError, OSError):  # Linux alone counts it for a thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class GrammarManager:
    """Belongs to the scheduler process's main thread. notify: called from another thread when something compiled."""

    def __init__(self, cache: GrammarCache, notify: Callable[[], None]) -> None:
        self._cache = cache
        self._notify = notify
        self._pool: ThreadPoolExecutor | None = None
        self._compiling: dict[GrammarSpec, Future[None]] = {}
        # In the order of arrival, by request id.
        self._waiting: dict[str, TokenizedGenerateReqInput] = {}

    def add(self, request: TokenizedGenerateReqInput) -> bool:
        """Whether the request can go to the scheduler now. If not, `take_ready` returns it later."""
        spec = request.sampling_params.grammar
        if spec is None or spec in self._cache:
            return True
        self._waiting[request.rid] = request
        if spec not in self._compiling:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar", initializer=_yield_to_others)
            future = self._compiling[spec] = self._pool.submit(self._compile, spec)
            future.add_done_callback(lambda _: self._notify())
        return False

    def _compile(self, spec: GrammarSpec) -> None:
        self._cache.get(spec)

    def take_ready(self) -> tuple[list[TokenizedGenerateReqInput], list[tuple[str, str]]]:
        """Requests whose grammar is there now, and ids of those whose grammar cannot be had, with the reason."""
        done = {spec: future for spec, future in self._compiling.items() if future.done()}
        if not done:
            return [], []
        ready, failed = [], []
        for rid, request in list(self._waiting.items()):
            spec = request.sampling_params.grammar
            if spec is None or spec not in done:
                continue
            del self._waiting[rid]
            if (error := done[spec].exception()) is None:
                ready.append(request)
            else:
                failed.append((rid, str(error)))
                if not isinstance(error, GrammarError):
                    logger.error("a grammar could not be compiled: %r", error)
        for spec in done:
            del self._compiling[spec]
        return ready, failed

    def abort(self, rid: str) -> bool:
        """Whether the request was waiting here. It is forgotten then."""
        return self._waiting.pop(rid, None) is not None

    def __len__(self) -> int:
        return len(self._waiting)
