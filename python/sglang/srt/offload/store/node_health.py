"""`NodeHealth`: which servers of a store do not answer. Nothing is asked of one that let an operation time out until
it has answered a PING, so that a stopped server costs one timeout, and other servers of a cluster nothing.

Owns the list of sick servers, and the thread that pings them while there are any. A server that refuses connections
is none of them: that costs no time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sglang.srt.offload.store.address import Endpoint
from sglang.srt.offload.store.resp import RespConnection, StoreFailure, StoreLost, StoreTimeout

_PING_INTERVAL_S = 0.25


class NodeHealth:
    """connect: a connection of its own, not open yet."""

    def __init__(self, connect: Callable[[Endpoint], RespConnection]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._sick: set[Endpoint] = set()
        self._is_pinging = False
        self._closed = threading.Event()

    @property
    def num_sick(self) -> int:
        return len(self._sick)

    def check(self, endpoint: Endpoint) -> None:
        """Raises StoreLost for a sick server."""
        if endpoint in self._sick:
            raise StoreLost(f"{endpoint} has not answered in time; it is asked again when it answers a PING")

    def note_timeout(self, endpoint: Endpoint) -> None:
        with self._lock:
            self._sick = {*self._sick, endpoint}
            if self._is_pinging or self._closed.is_set():
                return
            self._is_pinging = True
        threading.Thread(target=self._ping_all, name="store-ping", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _ping_all(self) -> None:
        while True:
            for endpoint in sorted(self._sick):
                if self._answers(endpoint):
                    with self._lock:
                        self._sick = self._sick - {endpoint}
            with self._lock:
                if not self._sick or self._closed.is_set():
                    self._is_pinging = False
                    return
            self._closed.wait(_PING_INTERVAL_S)

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
