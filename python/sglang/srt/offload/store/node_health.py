"""`NodeHealth`: which servers of a store do not answer. Nothing is asked of one that let an operation time out until
it has answered a PING, so that a stopped server costs one timeout, and other servers of a cluster nothing.

Owns the list of sick servers, and for each a thread that pings it while it is sick. A server that the store has no
more is forgotten. One that refuses connections is none of them: that costs no time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from sglang.srt.offload.store.address import Endpoint
from sglang.srt.offload.store.resp import RespConnection, StoreFailure, StoreLost, StoreTimeout

_PING_INTERVAL_S = 0.25


class NodeHealth:
    """connect: a connection of its own, not open yet. is_used: whether the store has the server still."""

    def __init__(
        self,
        connect: Callable[[Endpoint], RespConnection],
        is_used: Callable[[Endpoint], bool] = lambda endpoint: True,
    ) -> None:
        self._connect = connect
        self._is_used = is_used
        self._lock = threading.Lock()
        self._sick: set[Endpoint] = set()
        self._closed = threading.Event()

    def check(self, endpoint: Endpoint) -> None:
        """Raises StoreLost for a sick server."""
        if endpoint in self._sick:
            raise StoreLost(f"{endpoint} has not answered in time; it is asked again when it answers a PING")

    def note_timeout(self, endpoint: Endpoint) -> None:
        thread = threading.Thread(target=self._ping, args=(endpoint,), name="store-ping", daemon=True)
        with self._lock:
            if endpoint in self._sick or self._closed.is_set():
                return
            with contextlib.suppress(RuntimeError):  # no thread is left: it is asked on, until its next timeout
                thread.start()
                self._sick = {*self._sick, endpoint}

    def close(self) -> None:
        self._closed.set()

    def _ping(self, endpoint: Endpoint) -> None:
        while not self._answers(endpoint) and self._is_used(endpoint):
            if self._closed.wait(_PING_INTERVAL_S):
                return
        with self._lock:
            self._sick = self._sick - {endpoint}

    def _answers(self, endpoint: Endpoint) -> bool:
        connection = self._connect(endpoint)
        try:
            connection.call("PING")
        except StoreTimeout:
            return False
        except StoreFailure:
            pass  # to fail costs no time
        finally:
            connection.close()
        return True
