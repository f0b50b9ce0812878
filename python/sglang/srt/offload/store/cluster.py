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

from sglang.srt.offload.store.address import Endpoint, StoreAddress, is_host
from sglang.srt.offload.store.node_health import NodeHealth
from sglang.srt.offload.store.resp import (
    Arg,
    ErrorReply,
    Reply,
    RespConnection,
    StoreFailure,
    StoreLost,
    StoreRefused,
)

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

    def has(self, endpoint: Endpoint) -> bool:
        """Whether it serves slots, or is asked for the map."""
        return endpoint in self.nodes or endpoint in self.address.endpoints

    def mark_outdated(self) -> None:
        """A node was lost, or redirected a command."""
        self._stale = self.is_cluster is not False

    def expect_new_nodes(self) -> None:
        """The next command asks for the map, however lately it was asked for."""
        with self._lock:
            self._next_refresh = -float("inf")
            self.mark_outdated()

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
                    connection = connect(endpoint)
                    try:
                        reply = connection.call("CLUSTER", "SLOTS")
                    except ErrorReply as error:
                        self._check_single(connection, error)
                        self.is_cluster, self.nodes, self._stale = False, (endpoint,), False
                        return
                    nodes, slots = parse_slots(reply, endpoint)
                except StoreFailure as error:
                    failure = error  # also of a sick node
                    continue
                if not nodes:
                    # It has left the cluster, of which the other nodes know.
                    failure = failure or StoreLost(f"no node of {self.address} serves any slot")
                    continue
                self.nodes, self.slots, self.is_cluster, self._stale = nodes, slots, True, False
                return
            assert failure is not None
            if not self.nodes:
                raise failure

    def _check_single(self, connection: RespConnection, error: ErrorReply) -> None:
        """A server that does not tell its cluster's slots is used alone. Raises StoreFailure where it must not be."""
        is_node = self.address.cluster
        if error.code == "NOPERM" and (is_node or _is_cluster_node(connection)):
            raise StoreRefused(
                f"{connection.endpoint} is a node of a cluster, and does not tell this user who serves which slot "
                f"({error}): allow it cluster|slots"
            )
        if is_node:
            raise StoreLost(
                f"{connection.endpoint} is no node of a cluster ({error}): use {self.address.scheme}:// with one host"
            )

    def node_of(self, slot: int) -> Endpoint:
        """Raises StoreLost."""
        with self._lock:
            node = self.slots[slot]
            if node == _NO_NODE:
                self._stale = True
                raise StoreLost(f"no node of the cluster {self.address} serves slot {slot}")
            return self.nodes[node]

    def table(self) -> tuple[bool, tuple[Endpoint, ...], array[int]]:
        """Whether it is a cluster; its nodes; and of each slot the index of its node, or -1."""
        with self._lock:
            return bool(self.is_cluster), self.nodes, self.slots[:]

    def note_moved(self, slot: int, endpoint: Endpoint) -> None:
        """A node named the server of a slot. The whole map is requested soon."""
        with self._lock:
            self._stale = True
            if endpoint not in self.nodes:
                self.nodes = (*self.nodes, endpoint)
            if self.slots:
                self.slots[slot] = self.nodes.index(endpoint)


def _is_cluster_node(connection: RespConnection) -> bool:
    """False where it does not tell."""
    try:
        reply = connection.call("INFO", "cluster")
    except ErrorReply:
        return False
    return isinstance(reply, bytes) and b"cluster_enabled:1" in reply


def parse_slots(reply: Reply, asked: Endpoint) -> tuple[tuple[Endpoint, ...], array[int]]:
    """reply: of CLUSTER SLOTS, [[first, last, [host, port, …] of the master, …], …]. Raises StoreLost."""
    slots = array("h", [_NO_NODE]) * NUM_SLOTS
    nodes: list[Endpoint] = []
    try:
        entries = msgspec.convert(reply, type=list[list[Any]])
        for first, last, (host, port, *_), *_ in entries:
            # A node that does not know its own address means the address under which it was asked.
            known = host not in (None, b"", b"?")
            endpoint = _endpoint(host.decode() if known else asked.host, int(port))
            if not 0 <= first <= last < NUM_SLOTS:
                raise ValueError
            if endpoint not in nodes:
                nodes.append(endpoint)
            slots[first : last + 1] = array("h", [nodes.index(endpoint)]) * (last - first + 1)
    except (AttributeError, TypeError, ValueError):
        raise StoreLost(f"{asked} describes its cluster in a way that is not understood") from None
    return tuple(nodes), slots


class NodeConnections:
    """One thread's connections to the nodes of a store. make: a connection that is not open yet. A sick node fails at
    once, as StoreLost."""

    def __init__(self, slot_map: SlotMap, health: NodeHealth, make: Callable[[Endpoint], RespConnection]) -> None:
        self._map = slot_map
        self._health = health
        self._make = make
        self._nodes: dict[Endpoint, RespConnection] = {}
        # For redirected commands and for requests of the map. Nothing stays in flight on these connections.
        self._redirect_connections: dict[Endpoint, RespConnection] = {}
        # Redirects that were followed.
        self.num_redirects = 0

    def for_key(self, key: bytes) -> RespConnection:
        """Raises StoreFailure."""
        return self.for_slot(slot_of(key))

    def for_slot(self, slot: int) -> RespConnection:
        """Raises StoreFailure."""
        self._refresh()
        return self._to(self._map.node_of(slot) if self._map.is_cluster else self._map.nodes[0])

    def to_node(self, endpoint: Endpoint) -> RespConnection:
        """The connection to a node, which there is, sick or not."""
        return self._nodes[endpoint]

    def every_node(self) -> list[RespConnection]:
        """A connection to each server that serves slots. Raises StoreFailure."""
        self._refresh()
        return [self._to(endpoint) for endpoint in self._map.nodes]

    def ask_nodes(self, ask: Callable[[RespConnection], _T]) -> tuple[list[_T], list[StoreFailure]]:
        """What the servers that serve slots answer, and the failures of those that do not answer. Raises StoreFailure
        if none answers, or if one refuses this client."""
        answers: list[_T] = []
        failures: list[StoreFailure] = []
        self._refresh()
        for endpoint in self._map.nodes:
            try:
                answers.append(ask(self._to(endpoint)))
            except StoreRefused:
                raise
            except StoreFailure as failure:
                failures.append(failure)
        if not answers:
            raise failures[0]
        return answers, failures

    def pipeline(self, commands: Sequence[tuple[bytes, Sequence[Arg]]]) -> list[Reply | StoreFailure]:
        """(key, command) each; one round trip, to all nodes at once. Redirects are followed. Errors are returned as
        values, and so is the failure of a node in the place of each of its replies, unless all nodes failed.

        Raises StoreFailure.
        """
        parts: dict[RespConnection, list[int]] = {}
        replies: list[Reply | StoreFailure] = [None] * len(commands)
        failures: list[StoreFailure] = []
        connections: list[RespConnection | None] = []
        for i, (key, _) in enumerate(commands):
            try:
                connection = self.for_key(key)
            except StoreFailure as failure:
                if not self._map.is_cluster:
                    raise
                replies[i] = failure
                failures.append(failure)
                connections.append(None)
            else:
                parts.setdefault(connection, []).append(i)
                connections.append(connection)
        sent: list[tuple[RespConnection, list[int]]] = []
        try:
            for connection, indices in parts.items():
                try:
                    connection.send([commands[i][1] for i in indices])
                    sent.append((connection, indices))
                except StoreFailure as failure:
                    failures.append(failure)
                    self._note_failure(failure, indices, replies)
            for connection, indices in sent:
                try:
                    for i, reply in zip(indices, connection.receive_all()):
                        replies[i] = reply
                except StoreFailure as failure:
                    failures.append(failure)
                    self._note_failure(failure, indices, replies)
        except BaseException:
            self.reset()
            raise
        if failures and all(isinstance(r, StoreFailure) and not isinstance(r, ErrorReply) for r in replies):
            raise failures[0]
        for i, (_, command) in enumerate(commands):
            answer, asked = replies[i], connections[i]
            if isinstance(answer, ErrorReply) and answer.code == "CLUSTERDOWN":
                # Its slots may have another node by now.
                self._map.mark_outdated()
            elif isinstance(answer, ErrorReply) and is_redirect(answer) and asked is not None:
                try:
                    replies[i] = self.follow(answer, asked, lambda c, command=command: c.pipeline([command])[0])  # type: ignore[misc]
                except StoreFailure as failure:
                    replies[i] = failure
        return replies

    def _note_failure(self, failure: StoreFailure, indices: list[int], replies: list[Reply | StoreFailure]) -> None:
        """A node has failed: its replies are this failure."""
        for i in indices:
            replies[i] = failure
        self._map.mark_outdated()

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
            self.num_redirects += 1
            if reply.code == "MOVED":
                self._map.note_moved(slot, endpoint)
            connection = self._redirect_connection(endpoint)
            try:
                if reply.code == "ASK":
                    connection.call("ASKING")
                reply = work(connection)
            except ErrorReply as answer:
                reply = answer
        return reply

    def note_failed(self) -> None:
        """A connection has failed: the map is requested again."""
        self._map.mark_outdated()

    def reset(self) -> None:
        """Forget everything in flight, and request the map again."""
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

    def _refresh(self) -> None:
        if not self._map.ready():
            self._map.refresh(self._redirect_connection)
            if not self._map.is_cluster:
                self._close_redirect_connections()

    def _to(self, endpoint: Endpoint) -> RespConnection:
        self._health.check(endpoint)
        if endpoint not in self._nodes:
            self._nodes[endpoint] = self._make(endpoint)
        return self._nodes[endpoint]

    def _redirect_connection(self, endpoint: Endpoint) -> RespConnection:
        self._health.check(endpoint)
        if endpoint not in self._redirect_connections:
            self._redirect_connections[endpoint] = self._make(endpoint)
        return self._redirect_connections[endpoint]


def is_redirect(error: ErrorReply) -> bool:
    return error.code in ("MOVED", "ASK")


def _endpoint(host: str, port: int) -> Endpoint:
    """Raises ValueError, also for a name that cannot be one."""
    if not is_host(host) or not 0 < port < 1 << 16:
        raise ValueError
    return Endpoint(host, port)


def _target(error: ErrorReply, asked: Endpoint) -> tuple[Endpoint, int]:
    """The node and slot of an error such as `MOVED 3999 127.0.0.1:6381`. Without a host, it is the node that was
    asked. Raises StoreLost."""
    try:
        _, slot, where = str(error).split()
        host, _, port = where.rpartition(":")
        if not 0 <= int(slot) < NUM_SLOTS:
            raise ValueError
        return _endpoint(host or asked.host, int(port)), int(slot)
    except ValueError:
        raise StoreLost(f"a redirect is not understood: {str(error)[:60]!r}") from None
