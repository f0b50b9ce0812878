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
from sglang.srt.offload.store.failures import ErrorReply, StoreFailure, StoreLost, StoreTimeout
from sglang.srt.offload.store.object_store import ObjectStore, PieceReader

# How a connection of the plane's has failed, as csrc/kvplane/plane.h has it.
_TIMED_OUT, _CLOSED, _SYSTEM_ERROR, _NOT_THE_MASTER, _UNASKED = 5, 6, 7, 9, 10
# The plane has room for so many. A number is not used again.
_MAX_NODES = 4096


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
        self._route: Route | None = None
        self._reader: PieceReader | None = None

    def connect(self, thread: int, hash_slot: int) -> tuple[int, socket.socket]:
        """A new connection of a receiving thread to the node that serves a slot, logged in, and the node's number.
        Raises StoreFailure, which has been counted and logged, and OSError."""
        with self._lock:
            connections = self._by_thread.get(thread)
            if connections is None:
                connections = self._by_thread[thread] = self._store.connections()
        try:
            connection = connections.for_slot(hash_slot)
            with self._lock:
                number = self._number(connection.endpoint)
            return number, connection.hand_over()
        except StoreFailure as failure:
            connections.note_failed()
            self._store.note_failure("reading a piece", failure)
            raise

    def note_failed(self, thread: int, node: int, how: int, error: int, has_answered: bool, text: str) -> None:
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
        elif how == _NOT_THE_MASTER:
            failure = ErrorReply(text)
        elif how == _UNASKED:
            failure = StoreLost(f"{where} has sent what was not asked for")
        else:
            failure = StoreLost(f"{where} speaks another protocol: it sent {text!r}")
        connection.note_lost(failure, has_answered)
        connections.note_failed()
        self._store.note_failure("reading a piece", failure)

    def follow(self, key: bytes, index: int, buffer: memoryview) -> int | None:
        """Read a piece that was redirected, as `PieceReader`. For one thread."""
        if self._reader is None:
            self._reader = self._store.reader()
        self._reader.request(key, index)
        return self._reader.receive(buffer)

    def changed_route(self) -> Route | None:
        """None if it is the same as at the last call."""
        is_cluster, nodes, slots = self._store.slots()
        table = b""
        if is_cluster:
            with self._lock:
                numbers = np.array([*map(self._number, nodes), -1], np.int16)
            table = numbers[np.frombuffer(slots, np.int16)].tobytes()
            assert len(table) == 2 * NUM_SLOTS
        route = Route(is_cluster, table)
        if route == self._route:
            return None
        self._route = route
        return route

    def close(self) -> None:
        for connections in self._by_thread.values():
            connections.close()
        if self._reader is not None:
            self._reader.close()

    # -- inside, with the lock ------------------------------------------------------------------------------------

    def _number(self, endpoint: Endpoint) -> int:
        """Raises StoreLost."""
        if endpoint not in self._numbers and len(self._numbers) >= _MAX_NODES:
            raise StoreLost(f"the cluster has had more than {_MAX_NODES} nodes: restart the proxy")
        return self._numbers.setdefault(endpoint, len(self._numbers))
