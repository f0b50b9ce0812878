"""`PieceConnections`: what the data plane reads pieces through. It connects and logs in here, follows redirects here,
and reads on connections that it was given.

Owns one `NodeConnections` per receiving thread, which have the pauses after failures and know sick servers, and the
numbers by which the plane knows nodes.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass

import numpy as np

from sglang.srt.offload.store.address import Endpoint
from sglang.srt.offload.store.cluster import NUM_SLOTS, NodeConnections
from sglang.srt.offload.store.failures import StoreFailure, StoreLost, StoreTimeout
from sglang.srt.offload.store.object_store import ObjectStore, PieceReader

# How a connection of the plane's has failed, as csrc/kvplane/plane.h has it.
_TIMED_OUT, _CLOSED, _SYSTEM_ERROR = 5, 6, 7


@dataclass(frozen=True)
class Route:
    """node_of_slot: int16, (NUM_SLOTS,), numbers of nodes, -1 where none is known; of a store that is no cluster
    empty: all is node 0's."""

    is_cluster: bool
    node_of_slot: bytes


class PieceConnections:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._by_thread: dict[int, NodeConnections] = {}
        self._numbers: dict[Endpoint, int] = {}
        self._sent: Route | None = None
        self._reader: PieceReader | None = None

    def connect(self, thread: int, hash_slot: int) -> tuple[Route | None, int, socket.socket]:
        """A new connection of a receiving thread to the node that serves a slot, logged in, the node's number, and
        the route if it is another one than before. Raises StoreFailure, which has been counted and logged."""
        with self._lock:
            connections = self._by_thread.get(thread)
            if connections is None:
                connections = self._by_thread[thread] = self._store.connections()
        try:
            connection = connections.for_slot(hash_slot)
            plain = connection.hand_over()
        except StoreFailure as failure:
            connections.note_failed()
            self._store.failed("reading a piece", failure)
            raise
        with self._lock:
            return self._changed_route(), self._number(connection.endpoint), plain

    def failed(self, thread: int, node: int, how: int, error: int, has_answered: bool, text: str) -> None:
        """A connection that was handed over has failed. has_answered: a value had come before."""
        with self._lock:
            connections = self._by_thread[thread]
            endpoint = next(each for each, number in self._numbers.items() if number == node)
        connection = connections.to_node(endpoint)
        where = connection.where
        failure: StoreFailure
        if how == _TIMED_OUT:
            failure = StoreTimeout(f"{where} did not answer in full within {self._store.timeout_s:g} s")
        elif how == _CLOSED:
            failure = StoreLost(f"{where} closed the connection")
        elif how == _SYSTEM_ERROR:
            failure = StoreLost(f"{where}: {os.strerror(error)}")
        else:
            failure = StoreLost(f"{where} speaks another protocol: it sent {text!r}")
        connection.note_lost(failure, has_answered)
        connections.note_failed()
        self._store.failed("reading a piece", failure)

    def follow(self, key: bytes, index: int, buffer: memoryview) -> tuple[int | None, Route | None]:
        """Read a piece that was redirected, as `PieceReader`; and the route where it has changed. For one thread."""
        if self._reader is None:
            self._reader = self._store.reader()
        self._reader.request(key, index)
        size = self._reader.receive(buffer)
        with self._lock:
            return size, self._changed_route()

    def close(self) -> None:
        for connections in self._by_thread.values():
            connections.close()
        if self._reader is not None:
            self._reader.close()

    # -- inside, with the lock ------------------------------------------------------------------------------------

    def _number(self, endpoint: Endpoint) -> int:
        return self._numbers.setdefault(endpoint, len(self._numbers))

    def _changed_route(self) -> Route | None:
        is_cluster, nodes, slots = self._store.slots()
        table = b""
        if is_cluster:
            numbers = np.array([*(self._number(endpoint) for endpoint in nodes), -1], np.int16)
            table = numbers[np.frombuffer(slots, np.int16)].tobytes()
            assert len(table) == 2 * NUM_SLOTS
        route = Route(is_cluster, table)
        if route == self._sent:
            return None
        self._sent = route
        return route
