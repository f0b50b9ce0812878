"""`ObjectStore`: blocks of KV as objects in a store, a key per piece and a manifest that is written last.

Owns the names of keys, the content of manifests, and the counters. Never looks into a piece: its own header and
checksum decide whether it is valid (`offload/codec`). Never waits longer than `timeout_s` for one value.

    sglang-kv1:{<namespace><block>}:0   :1   …   :n-1   :m
                 hash of the          pieces, pipelined  manifest: only after every piece was accepted
                 namespace, 32 hex

The braces keep a block on one node of a cluster. A block exists if its manifest does. A store that evicts may drop
any of its keys at any time. A block whose piece is missing counts as missing.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from sglang.srt.mem_cache.block_store import longest_seen
from sglang.srt.offload.store.address import Endpoint, StoreAddress
from sglang.srt.offload.store.cluster import NodeConnections, SlotMap, is_redirect
from sglang.srt.offload.store.node_health import NodeHealth
from sglang.srt.offload.store.resp import (
    Arg,
    Buffer,
    ErrorReply,
    Reply,
    RespConnection,
    StoreFailure,
    StoreLost,
    ValueTooLarge,
)
from sglang.srt.offload.store.tenant_limits import INDEX, TenantLimits, checked
from sglang.srt.utils.rare_log import RareLog

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
DEFAULT_TIMEOUT_S = 2.0
# After the store has refused a piece, none is written for this many seconds: a full store costs one block's transfer
# per pause.
WRITE_PAUSE_S = 10.0
# Pieces outlive their manifest by this many seconds, so that a block with a manifest has its pieces.
_PIECES_OUTLIVE_S = 60
_MANIFEST = b"m"
_SCAN_COUNT = 1000
# Over all nodes, while slots move.
_MAX_PASSES = 5
_MAX_COUNT = (1 << 63) - 1
# What stands between the prefix and the colon of a block's names.
_BLOCK = re.compile(rb"[0-9a-f]{32}}")
_CLIENT_NAME = "sglang-kv"
_COUNTERS = (
    *("probed_blocks", "found_blocks", "read_pieces", "missing_pieces", "read_bytes"),
    *("written_blocks", "written_bytes", "refused_writes", "paused_writes", "failures"),
)


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """The entry that marks a block as complete. Its existence is what counts; its content serves users and tools.
    codec: the spec with which its pieces were written. size_bytes: of all pieces, as stored. tenant: whose it is, see
    `BlockKeys.tenant`."""

    version: int
    num_pieces: int
    codec: str
    size_bytes: int
    tenant: bytes = b""


class ObjectStore:
    """One namespace's blocks in a store, for all threads; each takes a reader or a writer of its own.

    namespace: everything that two engines must have in common to share KV. num_pieces: of every block. codec: the
    spec that manifests name. ttl_s: a block disappears after this many seconds without use; 0: never. clock: seconds,
    for the time between attempts.

    It opens no connection at first: a store that is down is treated as an empty store.
    """

    def __init__(
        self,
        address: StoreAddress,
        namespace: bytes,
        num_pieces: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        codec: str = "",
        ttl_s: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert num_pieces > 0 and ttl_s >= 0
        self.address = address
        self.num_pieces = num_pieces
        self.timeout_s = timeout_s
        self.codec = codec
        self.ttl_s = ttl_s
        # Blocks of another format or another number of pieces have other names, whatever their key.
        shape = b"%d %d " % (FORMAT_VERSION, num_pieces)
        self.prefix = b"sglang-kv1:{" + hashlib.blake2b(shape + namespace, digest_size=16).hexdigest().encode()
        self.limits = TenantLimits(self.prefix, self._names_of)
        self._clock = clock
        self._map = SlotMap(address, clock)
        self._health = NodeHealth(self._ping_connection, self._map.has)
        # The caller's threads share one connection for everything but pieces.
        self._lock = threading.Lock()
        self._control = self.connections()
        # Those that ask about the whole store, which may take long, have another.
        self._usage_lock = threading.Lock()
        self._usage_connections = self.connections()
        self._stats_lock = threading.Lock()
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._no_write_before = -float("inf")
        self._log = RareLog(logger, clock)

    # -- all blocks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check at the start that the store is up and accepts this client. One node of a cluster is enough. Raises
        StoreFailure."""
        with self._lock:
            _, failures = self._control.ask_nodes(lambda connection: connection.call("PING"))
        for failure in failures:
            self.note_failure("asking whether a node is up", failure)

    def leading(self, keys: Sequence[bytes], num_seen: int = 0) -> int | None:
        """How many of the leading blocks have a manifest, or None if the store fails. One round trip. num_seen: see
        `wire.Exists`."""
        found = self._found(keys)
        if found is None:
            return None
        return longest_seen(found, num_seen) if num_seen else _num_leading(found)

    def stored(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks have a manifest; none if the store fails. One round trip."""
        return self._found(keys) or [False] * len(keys)

    def _found(self, keys: Sequence[bytes]) -> list[bool] | None:
        if not keys:
            return []
        # TOUCH is an EXISTS that counts as a use. A block that is looked up is read soon. Its manifest is never read,
        # and without TOUCH a store would evict it while the block is in use. The front of a prompt is touched last.
        commands = [(name, (b"TOUCH", name)) for name in (self.name_of(key, _MANIFEST) for key in reversed(keys))]
        try:
            with self._lock:
                replies = self._asked([*commands, *self.limits.use(keys)], len(keys))[::-1]
        except StoreFailure as failure:
            self.note_failure("looking for blocks", failure)
            self.count(probed_blocks=len(keys))
            return None
        found = [reply == 1 for reply in replies]
        count = _num_leading(found)
        if count < len(replies) and isinstance(error := replies[count], StoreFailure):
            self.note_failure("looking for blocks", error)
        self.count(probed_blocks=len(keys), found_blocks=count)
        return found

    def _asked(self, commands: Sequence[tuple[bytes, Sequence[Arg]]], num: int) -> list[Reply | StoreFailure]:
        """The first `num` replies. Raises StoreFailure if the store fails, but not where only the node of the keys
        does: others may be of use."""
        try:
            replies = self._control.pipeline(commands)[:num]
        except StoreFailure as failure:
            replies = [failure] * num
        failures = [reply for reply in replies if isinstance(reply, StoreFailure)]
        if failures and len(failures) == len(replies):
            if not self._map.is_cluster or not all(map(_is_of_one_node, failures)):
                raise failures[0]
            self._control.ask_nodes(lambda connection: connection.call("PING"))
        return replies

    def touch(self, keys: Sequence[bytes]) -> tuple[int | None, list[bytes]]:
        """These blocks are in use, though none is read. keys: of any number of prompts, each in order.

        Returns how many of the leading blocks are stored whole, or None if the store fails; and the blocks that have
        a manifest but lack a piece. Those of a node that fails, or whose slot moves, count as stored. One round trip.
        """
        commands: list[tuple[bytes, Sequence[Arg]]] = []
        # The front of a prompt last, and of a block the manifest first: without it the pieces are not looked for.
        for key in reversed(keys):
            name, *pieces = self._names_of(key)
            uses: list[Sequence[Arg]] = [(b"TOUCH", name), (b"TOUCH", *pieces)]
            if self.ttl_s:
                uses = [(b"EXPIRE", name, self.ttl_s), *((b"EXPIRE", p, self.pieces_ttl_s) for p in pieces)]
            commands += [(name, command) for command in uses]
        try:
            with self._lock:
                replies = self._asked([*commands, *self.limits.use(keys)], len(commands))[::-1]
        except StoreFailure as failure:
            self.note_failure("marking blocks as used", failure)
            return None, []
        if (lost := next((reply for reply in replies if isinstance(reply, StoreFailure)), None)) is not None:
            self.note_failure("marking blocks as used", lost)
        # Of each block: its pieces, and then its manifest.
        per_block = len(commands) // len(keys) if keys else 1
        is_whole: list[bool] = []
        incomplete: list[bytes] = []
        for key, at in zip(keys, range(0, len(replies), per_block)):
            *of_pieces, manifest = replies[at : at + per_block]
            is_unknown = any(isinstance(reply, StoreFailure) for reply in (*of_pieces, manifest))
            num_pieces = sum(n for n in of_pieces if isinstance(n, int))
            is_whole.append(is_unknown or (bool(manifest) and num_pieces == self.num_pieces))
            if manifest and not is_whole[-1]:
                incomplete.append(key)
        return _num_leading(self._with_given_up(keys, is_whole)), incomplete

    def _with_given_up(self, keys: Sequence[bytes], are_stored: Sequence[bool]) -> list[bool]:
        """With those that a tenant's limit keeps out, see `TenantLimits.counts_as_stored`."""
        given_up = [key for key, stored in zip(keys, are_stored) if not stored and self.limits.counts_as_stored(key)]
        if given_up:
            try:
                with self._lock:
                    self.limits.count_again(given_up, self._control.pipeline)
            except StoreFailure as failure:
                self.note_failure("counting tenants' blocks", failure)
        return [stored or self.limits.counts_as_stored(key) for key, stored in zip(keys, are_stored)]

    def renew(self, keys: Sequence[bytes]) -> None:
        """These blocks were read, which has renewed their pieces: so are their manifests. Nothing without ttl_s."""
        if not self.ttl_s or not keys:
            return
        names = [self.name_of(key, _MANIFEST) for key in keys]
        try:
            with self._usage_lock:
                self._usage_connections.pipeline([(name, (b"EXPIRE", name, self.ttl_s)) for name in names])
        except StoreFailure as failure:
            self.note_failure("renewing blocks", failure)

    @property
    def pieces_ttl_s(self) -> int:
        """Seconds that a piece lives without use; 0: for ever."""
        return self.ttl_s + _PIECES_OUTLIVE_S if self.ttl_s else 0

    def reader(self) -> PieceReader:
        return PieceReader(self)

    def writer(self) -> ObjectWriter:
        return ObjectWriter(self)

    def forget(self, key: bytes) -> None:
        """Drop the manifest of a block that does not verify, then its pieces, so that it can be stored again."""
        try:
            with self._lock:
                checked(self._control.pipeline(self.unlink_commands(key)))
        except StoreFailure as failure:
            self.note_failure("forgetting a block", failure)

    def clear(self) -> None:
        """Drop every block of this namespace, and of no other. Raises StoreFailure."""
        connections = self.connections()
        try:
            self._unlink(connections, lambda names: names)
        finally:
            connections.close()

    def erase(self, tenant: bytes) -> None:
        """Drop every block of a tenant in this namespace, and pieces without a manifest, which may be the tenant's.
        Raises StoreFailure."""
        whats = [_MANIFEST, *(b"%d" % i for i in range(self.num_pieces))]
        connections = self.connections()

        def of_tenant(names: list[bytes]) -> list[bytes]:
            mine, parts = self._blocks_of(connections, names, tenant)
            return [b"%b:%b" % (block, what) for block in (*mine, *parts) for what in whats]

        try:
            self._unlink(connections, of_tenant)
            name = self.limits.index_of(tenant)
            checked(connections.pipeline([(name, (b"UNLINK", name))]))
        finally:
            connections.close()

    def _unlink(self, connections: NodeConnections, chosen: Callable[[list[bytes]], list[bytes]]) -> None:
        """Drop what is chosen of this namespace's names, on all nodes. Raises StoreFailure if some may be left."""
        for number in range(_MAX_PASSES):
            num_redirects = 0
            self._map.expect_new_nodes()
            for connection in connections.every_node():
                for names in _scan(connection, self.prefix + b"*"):
                    # One by one: in a cluster they lie in many slots, and of a slot that moves on two nodes.
                    commands = [(name, (b"UNLINK", name)) for name in chosen(names)]
                    before = connections.num_redirects
                    checked(connections.pipeline(commands))
                    num_redirects += connections.num_redirects - before
            # A slot may move with its keys from a node that is asked later to one that was asked before.
            if not self._map.is_cluster or (number and not num_redirects):
                return
        raise StoreLost(f"slots of {self.address} move: some blocks may be left; try again when they have moved")

    def limit(self, tenant: bytes, num_blocks: int) -> None:
        """Keep at most so many blocks of a tenant, below 0 as many as there are. Raises StoreFailure: the limit holds
        all the same, for what is stored from now on."""
        connections = self.connections()
        try:
            if num_blocks < 0:
                self.limits.remove(tenant)
            else:
                self.limits.set(tenant, num_blocks)
                self.make_index(tenant, connections)
        finally:
            connections.close()

    def make_index(self, tenant: bytes, connections: NodeConnections) -> None:
        """Count the blocks that the store has. Raises StoreFailure."""
        num_before = len(self.prefix)
        for connection in connections.every_node():
            for names in _scan(connection, self.prefix + b"*"):
                blocks, _ = self._blocks_of(connections, names, tenant)
                found = {
                    bytes.fromhex(block[num_before:-1].decode()): seconds
                    for block, seconds in blocks.items()
                    if _BLOCK.fullmatch(block, num_before)
                }
                self.limits.add_found(tenant, found, connections.pipeline)
        self.limits.add_found(tenant, {}, connections.pipeline)

    def _blocks_of(
        self, connections: NodeConnections, names: list[bytes], tenant: bytes
    ) -> tuple[dict[bytes, int], list[bytes]]:
        """Of blocks with these names, by their names up to the colon: the tenant's, with the seconds for which each
        was not used, 0 where the store does not tell; and those without a manifest, or with a damaged one, which can
        still be read. Raises StoreFailure."""
        parts = [name.rpartition(b":") for name in names]
        blocks = list(dict.fromkeys(block for block, _, what in parts if what != INDEX))
        names_of = [b"%b:%b" % (block, _MANIFEST) for block in blocks]
        # Before it is read, which is a use. An error tells that the store does not know.
        idle = connections.pipeline([(name, (b"OBJECT", b"IDLETIME", name)) for name in names_of])
        manifests = checked(connections.pipeline([(name, (b"GET", name)) for name in names_of]))
        mine = {
            block: seconds if isinstance(seconds, int) else 0
            for block, seconds, reply in zip(blocks, idle, manifests)
            if isinstance(reply, bytes) and _tenant_of(reply) == tenant
        }
        lost = [b for b, r in zip(blocks, manifests) if r is None or (isinstance(r, bytes) and _decoded(r) is None)]
        return mine, lost

    def usage(self) -> dict[str, int]:
        """Of the whole store, all namespaces: size_bytes, limit_bytes (0: no limit, or unknown), keys (num_pieces + 1
        per block), evicted_keys. They are sums over the nodes of a cluster that answer. Empty if the store fails."""
        asked = [(b"INFO", b"memory"), (b"INFO", b"stats"), (b"DBSIZE",)]
        try:
            with self._usage_lock:
                answers, failures = self._usage_connections.ask_nodes(lambda connection: connection.pipeline(asked))
        except StoreFailure as failure:
            self.note_failure("asking for the usage", failure)
            return {}
        for each in failures:
            self.note_failure("asking for the usage", each)
        return {
            "size_bytes": _sum(_info(memory, b"used_memory") for memory, _, _ in answers),
            "limit_bytes": _sum(_info(memory, b"maxmemory") for memory, _, _ in answers),
            "keys": _sum(keys for _, _, keys in answers if isinstance(keys, int)),
            "evicted_keys": _sum(_info(stats, b"evicted_keys") for _, stats, _ in answers),
        }

    def stats(self) -> dict[str, int]:
        """Counters since the start, for metrics; from any thread."""
        with self._stats_lock:
            return dict(self._counters)

    def close(self) -> None:
        """Close the connections of this object. Threads close their readers and writers themselves."""
        self._health.close()
        with self._lock:
            self._control.close()
        with self._usage_lock:
            self._usage_connections.close()

    # -- for readers and writers ------------------------------------------------------------------------------------

    def slots(self) -> tuple[bool, tuple[Endpoint, ...], array[int]]:
        """As `SlotMap.table`."""
        return self._map.table()

    def connections(self) -> NodeConnections:
        """For one thread."""
        return NodeConnections(self._map, self._health, self._connection)

    def name_of(self, key: bytes, what: bytes | int) -> bytes:
        """The store's name for a piece of block `key`, or for its manifest. In hex, because a brace or a star in the
        key would have a meaning for the store."""
        return b"%b%b}:%b" % (self.prefix, key.hex().encode(), what if isinstance(what, bytes) else b"%d" % what)

    def unlink_commands(self, key: bytes) -> list[tuple[bytes, Sequence[Arg]]]:
        """One by one: while the block's slot moves, some of its keys are on another node. The manifest first."""
        return [(name, (b"UNLINK", name)) for name in self._names_of(key)]

    def _names_of(self, key: bytes) -> list[bytes]:
        """Of the manifest and of every piece."""
        return [self.name_of(key, what) for what in (_MANIFEST, *range(self.num_pieces))]

    def may_write(self) -> bool:
        if self._clock() >= self._no_write_before:
            return True
        self.count(paused_writes=1)
        return False

    def note_refusal(self, failure: StoreFailure) -> None:
        self._no_write_before = self._clock() + WRITE_PAUSE_S
        self.count(refused_writes=1)
        self.note_failure("storing a block", failure)

    def note_failure(self, what: str, failure: StoreFailure) -> None:
        self.count(failures=1)
        # What is left out of the log has the same reason.
        reason = failure.code if isinstance(failure, ErrorReply) else type(failure).__name__
        self._log.warn(
            f"{what}: {reason}",
            "the store %s failed in %s: %s%s; requests go on without it",
            self.address,
            what,
            failure,
            _advice(failure),
        )

    def count(self, **amounts: int) -> None:
        with self._stats_lock:
            for name, amount in amounts.items():
                self._counters[name] += amount

    def _connection(self, endpoint: Endpoint) -> RespConnection:
        return RespConnection(
            self.address, self.timeout_s, endpoint, _CLIENT_NAME, self._clock, self._health.note_timeout
        )

    def _ping_connection(self, endpoint: Endpoint) -> RespConnection:
        return RespConnection(self.address, self.timeout_s, endpoint, _CLIENT_NAME)


@dataclass(eq=False)
class RequestedPiece:
    """is_lost: its connection has failed, so that it will not be received."""

    connection: RespConnection
    name: bytes
    is_lost: bool = False


class PieceReader:
    """Reads pieces, in the order in which they are requested. For one thread."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._connections = store.connections()
        self._in_flight: deque[RequestedPiece] = deque()

    def request(self, key: bytes, piece: int) -> RequestedPiece:
        """Request a piece. Several may be requested before the first is received. Raises StoreFailure, as receive."""
        assert 0 <= piece < self._store.num_pieces
        name = self._store.name_of(key, piece)
        connection: RespConnection | None = None
        try:
            connection = self._connections.for_key(name)
            connection.send_get(name, self._store.pieces_ttl_s)
        except BaseException as error:
            self._note_failed(connection, error)
            raise
        self._in_flight.append(requested := RequestedPiece(connection, name))
        return requested

    def receive(self, buffer: memoryview) -> int | None:
        """Receive the oldest requested piece that is not lost to the start of buffer. Returns its number of bytes;
        None if it is missing.

        buffer: contiguous bytes, written only in this call; after a failure it may hold anything. Raises ErrorReply
        and ValueTooLarge, about this piece, and the other kinds of StoreFailure, after which what was requested on
        the same connection is lost.
        """
        requested = self._in_flight.popleft()
        connection, name = requested.connection, requested.name
        try:
            try:
                size = connection.receive_into(buffer)
            except ErrorReply as error:
                if not is_redirect(error):
                    raise
                answer = self._connections.follow(error, connection, lambda c: self._get(c, name, buffer))
                if isinstance(answer, ErrorReply):
                    raise answer from None
                size = answer
        except BaseException as error:
            self._note_failed(connection, error)
            raise
        self._store.count(read_pieces=size is not None, missing_pieces=size is None, read_bytes=size or 0)
        return size

    def _get(self, connection: RespConnection, name: bytes, buffer: memoryview) -> int | None:
        connection.send_get(name, self._store.pieces_ttl_s)
        return connection.receive_into(buffer)

    def close(self) -> None:
        self._in_flight.clear()
        self._connections.close()

    def _note_failed(self, connection: RespConnection | None, error: BaseException) -> None:
        """connection: what was requested on it is lost, unless the error is an answer; None: there was none."""
        if not isinstance(error, (ErrorReply, ValueTooLarge)):
            if connection is not None:
                connection.close()
            for requested in self._in_flight:
                requested.is_lost |= requested.connection is connection
            self._in_flight = deque(each for each in self._in_flight if not each.is_lost)
            self._connections.note_failed()
        if isinstance(error, StoreFailure):
            self._store.note_failure("reading a piece", error)


class ObjectWriter:
    """Writes whole blocks. For one thread."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._connections = store.connections()

    def write(self, key: bytes, pieces: Sequence[Sequence[Buffer]], tenant: bytes = b"") -> bool:
        """Store a block. Each piece is a list of buffers, which are sent without a copy and may change when this
        returns. tenant: whose it is. False: the store did not take all of it. The reason is counted and logged, and
        no part of a new block stays. True too for one that a limit of no blocks keeps out."""
        store = self._store
        assert len(pieces) == store.num_pieces
        if store.limits.refuses(tenant, key):
            return True
        if not store.may_write():
            return False
        size_bytes = sum(memoryview(part).nbytes for parts in pieces for part in parts)
        manifest = msgspec.msgpack.encode(Manifest(FORMAT_VERSION, store.num_pieces, store.codec, size_bytes, tenant))
        values = [(store.name_of(key, i), parts) for i, parts in enumerate(pieces)]
        try:
            error = self._set(values, store.pieces_ttl_s) or self._set(
                [(store.name_of(key, _MANIFEST), [manifest])], store.ttl_s
            )
        except StoreFailure as failure:
            self._connections.reset()
            store.note_failure("storing a block", failure)
            return False
        except BaseException:
            self._connections.reset()
            raise
        if error is not None:
            store.note_refusal(error)
            self._remove_block(key)
            return False
        if store.limits.has(tenant) and not self._count(tenant, key):
            self._remove_block(key)
            return False
        store.count(written_blocks=1, written_bytes=size_bytes)
        return True

    def close(self) -> None:
        self._connections.close()

    def _set(self, values: Iterable[tuple[bytes, Sequence[Buffer]]], ttl_s: int) -> ErrorReply | None:
        """Store values of one block, pipelined. Returns the first error that is no redirect. Raises StoreFailure."""
        values = list(values)
        connection = self._connections.for_key(values[0][0])
        for name, parts in values:
            connection.send_set(name, parts, ttl_s)
        replies = [connection.receive() for _ in values]
        for (name, parts), reply in zip(values, replies):
            if isinstance(reply, ErrorReply) and is_redirect(reply):
                reply = self._connections.follow(reply, connection, lambda c, n=name, p=parts: _set(c, n, p, ttl_s))  # type: ignore[misc]
            if isinstance(reply, ErrorReply):
                return reply
        return None

    def _count(self, tenant: bytes, key: bytes) -> bool:
        """False: the store does not count the block, so that it must not have it."""
        store = self._store
        try:
            if store.limits.add(tenant, [key], self._connections.pipeline):
                store.make_index(tenant, self._connections)
            return True
        except StoreFailure as failure:
            store.note_failure("counting a tenant's blocks", failure)
            return False

    def _remove_block(self, key: bytes) -> None:
        """Remove what was written of a block. It would only fill the store."""
        try:
            self._connections.pipeline(self._store.unlink_commands(key))
        except StoreFailure:
            pass  # The store evicts it in time.


def _is_of_one_node(failure: StoreFailure) -> bool:
    """Whether another node of a cluster may work."""
    return not isinstance(failure, ErrorReply) or failure.code in ("CLUSTERDOWN", "TRYAGAIN")


def _decoded(manifest: bytes) -> Manifest | None:
    """None: it is none."""
    try:
        return msgspec.msgpack.decode(manifest, type=Manifest)
    except (ValueError, RecursionError):
        return None


def _tenant_of(manifest: bytes) -> bytes | None:
    found = _decoded(manifest)
    return found.tenant if found is not None else None


def _num_leading(are: list[bool]) -> int:
    return are.index(False) if False in are else len(are)


def _set(connection: RespConnection, name: bytes, parts: Sequence[Buffer], ttl_s: int) -> Reply:
    connection.send_set(name, parts, ttl_s)
    return connection.receive()


def _scan(connection: RespConnection, pattern: bytes) -> Iterable[list[bytes]]:
    cursor: bytes = b"0"
    while True:
        reply = connection.call(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT)
        if not (isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], list)):
            raise ErrorReply(f"SCAN is not understood: {reply!r:.60}")
        if names := [name for name in reply[1] if isinstance(name, bytes)]:
            yield names
        if reply[0] == b"0" or not isinstance(reply[0], bytes):
            return
        cursor = reply[0]


def _info(reply: Reply, name: bytes) -> int:
    """The number in a line `name:123` of INFO; 0 if the store does not have it."""
    lines = reply.splitlines() if isinstance(reply, bytes) else []
    value = next((line.partition(b":")[2] for line in lines if line.startswith(name + b":")), b"")
    return int(value[:20]) if value.isdigit() else 0


def _sum(numbers: Iterable[int]) -> int:
    """At most what a message and a metric can hold, whatever the servers tell."""
    return min(sum(numbers), _MAX_COUNT)


def _advice(failure: StoreFailure) -> str:
    if not isinstance(failure, ErrorReply):
        return ""
    return {
        "OOM": " (raise its maxmemory, or let it evict: maxmemory-policy allkeys-lru)",
        "MISCONF": " (its disk is full or it cannot save: free space, or turn its snapshots off)",
        "READONLY": " (it is a replica: give the master's address)",
        "NOPERM": " (allow its user what docs/guides/remote.md lists, on these keys)",
    }.get(failure.code, "")
