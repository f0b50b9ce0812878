"""`GrammarManager`: requests that wait until rank 0 has compiled their grammars.

    add(request) --grammar is there--> held --release, when the request has ended--> may be given up
        |-- not, or too much is held --> waits; take_ready() looks again

Owns the thread that compiles. The scheduler hears of a request only when its grammar is there, and it stays there
until the request has ended, so that no batch waits for one. Every grammar has been compiled before, within limits, by
the HTTP process (grammar_checker.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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
        self._compiling: dict[GrammarSpec, Future[Any]] = {}
        # In the order of arrival, by request id.
        self._waiting: dict[str, TokenizedGenerateReqInput] = {}
        # Of requests that the scheduler knows, by request id.
        self._held: dict[str, GrammarSpec] = {}

    def add(self, request: TokenizedGenerateReqInput) -> bool:
        """Whether the request can go to the scheduler now. If not, `take_ready` returns it later."""
        spec = request.sampling_params.grammar
        if spec is None:
            return True
        if self._cache.hold(spec):
            self._held[request.rid] = spec
            return True
        self._waiting[request.rid] = request
        self._compile(spec)
        return False

    def _compile(self, spec: GrammarSpec) -> None:
        if spec in self._cache or spec in self._compiling:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar", initializer=_yield_to_others)
        future = self._compiling[spec] = self._pool.submit(self._cache.get, spec)
        future.add_done_callback(lambda _: self._notify())

    def take_ready(self) -> tuple[list[TokenizedGenerateReqInput], list[tuple[str, str]]]:
        """Requests whose grammar is there now, and ids of those whose grammar cannot be had, with the reason."""
        ready: list[TokenizedGenerateReqInput] = []
        failed: list[tuple[str, str]] = []
        if not self._waiting:
            return ready, failed
        done = {spec: future.exception() for spec, future in self._compiling.items() if future.done()}
        for each in done:
            del self._compiling[each]
        for rid, request in list(self._waiting.items()):
            spec = request.sampling_params.grammar
            assert spec is not None
            if (error := done.get(spec)) is not None:
                failed.append((rid, str(error)))
                if not isinstance(error, GrammarError):
                    logger.error("a grammar could not be compiled: %r", error)
            elif self._cache.hold(spec):
                self._held[rid] = spec
                ready.append(request)
            else:  # it waits for room, or was given up before it could be held
                self._compile(spec)
                continue
            del self._waiting[rid]
        return ready, failed

    def release(self, rid: str) -> None:
        """A request has ended."""
        if (spec := self._held.pop(rid, None)) is not None:
            self._cache.release(spec)

    def abort(self, rid: str) -> bool:
        """Whether the request was waiting here. It is forgotten then."""
        return self._waiting.pop(rid, None) is not None
