"""`GrammarManager`: requests that wait until rank 0 has compiled their grammars.

    add(request) --grammar is there--> held --release, when the request has ended--> may be given up
        |-- not, or too much is held --> waits; take_ready() looks again

Owns the threads that compile. The scheduler hears of a request only when its grammar is there, and it stays there
until the request has ended, so that no batch waits for one. Every grammar has been compiled before, within limits, by
the HTTP process (grammar_checker.py). Each of its lanes has a thread here too, so that a grammar waits for none that
takes much longer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from sglang.srt.constrained.grammar_cache import GrammarCache
from sglang.srt.constrained.grammar_checker import LANES, TOO_MANY
from sglang.srt.constrained.xgrammar_backend import GrammarError
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.mem_cache.namespaces import salt_of
from sglang.srt.sampling.sampling_params import GrammarSpec
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.pools import submit

# Of the threads that compile: the requests of the batch go first.
_NICENESS = 10

logger = logging.getLogger(__name__)


def _yield_to_others() -> None:
    with contextlib.suppress(AttributeError, OSError):  # Linux alone counts it for a thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class _Compilation(NamedTuple):
    future: Future[Any]
    # Of the checker, see `LANES`.
    lane: int


class GrammarManager:
    """Belongs to the scheduler process's main thread. notify: called from another thread when something compiled."""

    def __init__(self, cache: GrammarCache, notify: Callable[[], None]) -> None:
        self._cache = cache
        self._notify = notify
        # One thread each, by lane.
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._compiling: dict[GrammarSpec, _Compilation] = {}
        # In the order of arrival, by request id.
        self._waiting: dict[str, TokenizedGenerateReqInput] = {}
        # Of requests that the scheduler knows, by request id.
        self._held: dict[str, GrammarSpec] = {}

    def add(self, request: TokenizedGenerateReqInput) -> bool:
        """Whether the request can go to the scheduler now. If not, `take_ready` returns it later. Raises RequestError
        where too many grammars wait, or no thread can be started."""
        spec = request.sampling_params.grammar
        if spec is None:
            return True
        if self._cache.hold(spec):
            self._held[request.rid] = spec
            return True
        if not self._is_on_its_way(spec) and self._is_full(request.grammar_lane):
            raise RequestError(TOO_MANY, 503)
        self._compile(spec, request.grammar_lane)
        self._waiting[request.rid] = request
        return False

    def _is_on_its_way(self, spec: GrammarSpec) -> bool:
        return spec in self._cache or spec in self._compiling

    def _is_full(self, lane: int) -> bool:
        _, most = LANES[lane]
        return sum(each.lane == lane for each in self._compiling.values()) >= most

    def _compile(self, spec: GrammarSpec, lane: int) -> None:
        """Raises RequestError where no thread can be started."""
        if self._is_on_its_way(spec):
            return
        if lane not in self._pools:
            self._pools[lane] = ThreadPoolExecutor(1, thread_name_prefix="grammar", initializer=_yield_to_others)
        future = submit(self._pools[lane], self._cache.get, spec)
        self._compiling[spec] = _Compilation(future, lane)
        future.add_done_callback(lambda _: self._notify())

    def take_ready(self) -> tuple[list[TokenizedGenerateReqInput], list[tuple[str, str]]]:
        """Requests whose grammar is there now, and ids of those whose grammar cannot be had, with the reason."""
        ready: list[TokenizedGenerateReqInput] = []
        failed: list[tuple[str, str]] = []
        if not self._waiting and not self._compiling:
            return ready, failed
        done = {spec: each.future.exception() for spec, each in self._compiling.items() if each.future.done()}
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
                try:
                    self._compile(spec, request.grammar_lane)
                    continue
                except RequestError as no_compilation:
                    failed.append((rid, no_compilation.message))
            del self._waiting[rid]
        return ready, failed

    def release(self, rid: str) -> None:
        """A request has ended."""
        if (spec := self._held.pop(rid, None)) is not None:
            self._cache.release(spec)

    def waiting_of(self, salt: str) -> list[str]:
        """Ids of requests with this `cache_salt` that wait here."""
        return [rid for rid, request in self._waiting.items() if salt_of(request.extra_key) == salt]

    def abort(self, rid: str) -> bool:
        """Whether the request was waiting here. It is forgotten then, and so is a grammar that no other waits for and
        no thread has begun."""
        request = self._waiting.pop(rid, None)
        if request is None:
            return False
        spec = request.sampling_params.grammar
        assert spec is not None
        if all(other.sampling_params.grammar != spec for other in self._waiting.values()):
            compilation = self._compiling.get(spec)
            if compilation is not None and compilation.future.cancel():
                del self._compiling[spec]
        return True
