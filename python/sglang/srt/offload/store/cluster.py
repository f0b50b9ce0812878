"""Which server holds a key: `SlotMap`, shared by all threads of a store, and `NodeConnections`, one thread's.

Owns the map of a cluster's 16,384 slots and each thread's connections. A single server has one connection and uses
nothing else of this module. The nodes are asked for the map at the first use, after a server was lost, and after a
server answered MOVED.

    GET key --for_key--> node's connection --value--> caller
                              | MOVED: the map was old        ASK: the slot is on its way to another node
                              v                                v
                          follow: the same command on the node that was named, on a connection kept for this

A node's connection keeps its replies in order, whatever other connections do: a command that follows a redirect goes
over a connection of its own.
"""

from __future__ import annotations

import binascii
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from sglang.srt.offload.store.address import Endpoint, StoreAddress
from sglang.srt.offload.store.resp import Arg, ErrorReply, Reply, RespConnection, StoreFailure, StoreLost

NUM_SLOTS = 16384
# Seconds between two requests for the map after one has failed.
REFRESH_S = 0.5
_MAX_HOPS = 4
_NO_NODE = -1
_T = TypeVar("_T")


def slot_of(key: bytes) -> int:
    """The slot of a key. The part between the first { and the next } decides, if it is not empty, else the whole
    key."""
    start = key.find(b"{") + 1
    end = key.find(b"}", start) if start else -1
    tag = key[start:end] if end > start else key
    return binascii.crc_hqx(tag, 0) % NUM_SLOTS


class SlotMap:
    """The map of one store. nodes: the servers that serve slots; a store that is no cluster has one."""

    def __init__(self, address: StoreAddress, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        # None: the nodes were not asked yet.
        self.is_cluster: bool | None = None
        self.nodes: tuple[Endpoint, ...] = ()
        self.slots = array("h")
        self._clock = clock
        self._lock = threading.Lock()
        self._stale = True
        self._next_refresh = -float("inf")

    def ready(self) -> bool:
        return not self._stale

    def mark_outdated(self) -> None:
        """A node was lost, or redirected a command."""
        self._stale = self.is_cluster is not False

    def refresh(self, connect: Callable[[Endpoint], RespConnection]) -> None:
        """Ask the nodes, one after another, unless another thread has just done so. Raises StoreFailure if none
        answers."""
        with self._lock:
            if not self._stale or (self.nodes and self._clock() < self._next_refresh):
                return
            self._next_refresh = self._clock() + REFRESH_S
            failure: StoreFailure | None = None
            for endpoint in dict.fromkeys((*self.nodes, *self.address.endpoints)):
                try:
                    reply = connect(endpoint).call("CLUSTER", "SLOTS")
                except ErrorReply as error:
                    if self.address.cluster:
                        failure = StoreLost(
                            f"{endpoint} is no node of a cluster ({error}): use redis:// with one host"
                        )
                        continue
                    self.is_cluster, self.nodes, self._stale = False, (endpoint,), False
                    return
                except StoreFailure as error:
                    failure = error
                    continue
                self.nodes, self.slots = parse_slots(reply, endpoint)
                self.is_cluster, self._stale = True, False
                return
            assert failure is not None
            if not self.nodes:
                raise failure

    def node_of(self, slot: int) -> Endpoint:
        """Raises StoreLost."""
        with self._lock:
            node = self.slots[slot]
            if node == _NO_NODE:
                self._stale = True
                raise StoreLost(f"no node of the cluster {self.address} serves slot {slot}")
            return self.nodes[node]

    def moved(self, slot: int, endpoint: Endpoint) -> None:
        """A node named the server of a slot. The whole map is requested soon."""
        with self._lock:
            self._stale = True
            if endpoint not in self.nodes:
                self.nodes = (*self.nodes, endpoint)
            if self.slots:
                self.slots[slot] = self.nodes.index(endpoint)


def parse_slots(reply: Reply, asked: Endpoint) -> tuple[tuple[Endpoint, ...], array[int]]:
    """reply: of CLUSTER SLOTS, [[first, last, [host, port, …] of the master, …], …]. Raises StoreLost."""
    slots = array("h", [_NO_NODE]) * NUM_SLOTS
    nodes: list[Endpoint] = []
    try:
        entries = msgspec.convert(reply, type=list[list[Any]])
        for first, last, (host, port, *_), *_ in entries:
            # A node that does not know its own address means the address under which it was asked.
            known = host not in (None, b"", b"?")
            endpoint = Endpoint(host.decode() if known else asked.host, int(port))
            if not 0 <= first <= last < NUM_SLOTS:
                raise ValueError
            if endpoint not in nodes:
                nodes.append(endpoint)
            slots[first : last + 1] = array("h", [nodes.index(endpoint)]) * (last - first + 1)
    except (AttributeError, TypeError, ValueError):
        raise StoreLost(f"{asked} describes its cluster in a way that is not understood") from None
    return tuple(nodes), slots


class NodeConnections:
    """One thread's connections to the nodes of a store. make: a connection that is not open yet."""

    def __init__(self, slot_map: SlotMap, make: Callable[[Endpoint], RespConnection]) -> None:
        self._map = slot_map
        self._make = make
        self._nodes: dict[Endpoint, RespConnection] = {}
        # For redirected commands and for requests of the map. Nothing stays in flight on these connections.
        self._redirect_connections: dict[Endpoint, RespConnection] = {}

    def for_key(self, key: bytes) -> RespConnection:
        """Raises StoreFailure."""
        return self._for_keys([key])[0]

    def every_node(self) -> list[RespConnection]:
        """A connection to each server that serves slots. Raises StoreFailure."""
        self._refresh()
        return [self._to(endpoint) for endpoint in self._map.nodes]

    def pipeline(self, commands: Sequence[tuple[bytes, Sequence[Arg]]]) -> list[Reply]:
        """(key, command) each; one round trip, to all nodes at once. Errors are returned as values, redirects are
        followed.

        Raises StoreFailure.
        """
        parts: dict[RespConnection, list[int]] = {}
        connections = self._for_keys([key for key, _ in commands])
        for i, connection in enumerate(connections):
            parts.setdefault(connection, []).append(i)
        replies: list[Reply] = [None] * len(commands)
        try:
            for connection, indices in parts.items():
                connection.send([commands[i][1] for i in indices])
            for connection, indices in parts.items():
                for i, reply in zip(indices, connection.receive_all()):
                    replies[i] = reply
        except BaseException:
            self.reset()
            raise
        for i, (_, command) in enumerate(commands):
            reply = replies[i]
            if isinstance(reply, ErrorReply) and is_redirect(reply):
                replies[i] = self.follow(reply, connections[i], lambda c, command=command: c.pipeline([command])[0])  # type: ignore[misc]
        return replies

    def follow(
        self, error: ErrorReply, connection: RespConnection, work: Callable[[RespConnection], _T]
    ) -> _T | ErrorReply:
        """Do the work on the node that the connection's error names. An ErrorReply of the work, raised or not, is
        returned."""
        reply: _T | ErrorReply = error
        for _ in range(_MAX_HOPS):
            if not (isinstance(reply, ErrorReply) and is_redirect(reply)):
                break
            endpoint, slot = _target(reply, connection.endpoint)
            if reply.code == "MOVED":
                self._map.moved(slot, endpoint)
            connection = self._redirect_connection(endpoint)
            try:
                if reply.code == "ASK":
                    connection.call("ASKING")
                reply = work(connection)
            except ErrorReply as answer:
                reply = answer
        return reply

    def reset(self) -> None:
        """After a failure: forget everything in flight, and request the map again."""
        for connection in self._nodes.values():
            if connection.pending:
                connection.close()
        self._map.mark_outdated()

    def close(self) -> None:
        self._close_redirect_connections()
        for connection in self._nodes.values():
            connection.close()

    def _close_redirect_connections(self) -> None:
        for connection in self._redirect_connections.values():
            connection.close()

    def _for_keys(self, keys: Sequence[bytes]) -> list[RespConnection]:
        self._refresh()
        if not self._map.is_cluster:
            return [self._to(self._map.nodes[0])] * len(keys)
        return [self._to(self._map.node_of(slot_of(key))) for key in keys]

    def _refresh(self) -> None:
        if not self._map.ready():
            self._map.refresh(self._redirect_connection)
            if not self._map.is_cluster:
                self._close_redirect_connections()
            if not self._map.nodes:
                raise StoreLost(f"no node of {self._map.address} serves any slot")

    def _to(self, endpoint: Endpoint) -> RespConnection:
        if endpoint not in self._nodes:
            self._nodes[endpoint] = self._make(endpoint)
        return self._nodes[endpoint]

    def _redirect_connection(self, endpoint: Endpoint) -> RespConnection:
        if endpoint not in self._redirect_connections:
            self._redirect_connections[endpoint] = self._make(endpoint)
        return self._redirect_connections[endpoint]


def is_redirect(error: ErrorReply) -> bool:
    return error.code in ("MOVED", "ASK")


def _target(error: ErrorReply, asked: Endpoint) -> tuple[Endpoint, int]:
    """The node and slot of an error such as `MOVED 3999 127.0.0.1:6381`. Without a host, it is the node that was
    asked. Raises StoreLost."""
    try:
        _, slot, where = str(error).split()
        host, _, port = where.rpartition(":")
        if not 0 <= int(slot) < NUM_SLOTS:
            raise ValueError
        return Endpoint(host or asked.host, int(port)), int(slot)
    except ValueError:
        raise StoreLost(f"a redirect is not understood: {str(error)[:60]!r}") from None
