"""`TenantLimits`: how many blocks tenants may have in a namespace of the store.

Owns the limits, and in the store an index of each tenant that has one: a sorted set of its blocks, by the time at
which they were stored. Servers that share the store and have the limit write into one index, so they count together.

    sglang-kv1:{<namespace>t<tenant>}:t
                 as of blocks, and the tenant in hex

A block that the store has evicted stays in the index until a look at the oldest finds it gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from sglang.srt.offload.store.resp import Arg, Reply, StoreFailure

# (key, command) each, as `NodeConnections.pipeline`.
Ask: TypeAlias = "Callable[[Sequence[tuple[bytes, Sequence[Arg]]]], list[Reply | StoreFailure]]"

INDEX = b"t"
# What is over a limit goes with that share of the limit, so that the next block does not cause the same again.
_SHARE_AHEAD = 1 / 32
# A tenant with all but this share of its limit counts as full: what it lost is not written again for being in use.
_SHARE_OF_FULL = 1 / 16
# To find the least recently used, so many of the oldest are looked at for one that goes, and some more.
_LOOKED_AT, _MORE = 4, 64
# Blocks that are remembered with their tenant.
_MAX_REMEMBERED = 1 << 17


class TenantLimits:
    """For all threads. prefix: of the namespace's names. names_of: of a block, its manifest first. clock: seconds
    since 1970, as on the other servers."""

    def __init__(
        self, prefix: bytes, names_of: Callable[[bytes], list[bytes]], clock: Callable[[], float] = time.time
    ) -> None:
        self._prefix = prefix
        self._names_of = names_of
        self._clock = clock
        self._lock = threading.Lock()
        # Tenant -> the most blocks, and how many it had when it was last looked at.
        self._limits: dict[bytes, int] = {}
        self._counts: dict[bytes, int] = {}
        # Blocks that this process has stored, or would have -> whose they are, oldest first.
        self._tenants: dict[bytes, bytes] = {}

    def set(self, tenant: bytes, num_blocks: int) -> None:
        with self._lock:
            self._limits[tenant] = num_blocks

    def remove(self, tenant: bytes) -> None:
        with self._lock:
            self._limits.pop(tenant, None)
            self._counts.pop(tenant, None)
            self._tenants = {key: whose for key, whose in self._tenants.items() if whose != tenant}

    def has(self, tenant: bytes) -> bool:
        return tenant in self._limits

    def refuses(self, tenant: bytes, key: bytes) -> bool:
        """Whether the tenant may have no block at all. This one counts as stored from now on."""
        if self._limits.get(tenant) != 0:
            return False
        with self._lock:
            self._remember(tenant, [key])
        return True

    def counts_as_stored(self, key: bytes) -> bool:
        """Whether the block, if it is not stored, is so for the sake of a limit: it must not be written again and
        again because it is in use."""
        tenant = self._tenants.get(key, b"")
        limit = self._limits.get(tenant)
        return limit is not None and self._counts.get(tenant, 0) >= limit - int(limit * _SHARE_OF_FULL)

    def index_of(self, tenant: bytes) -> bytes:
        return b"%b%b%b}:%b" % (self._prefix, INDEX, tenant.hex().encode(), INDEX)

    def add(self, tenant: bytes, keys: Sequence[bytes], ask: Ask) -> bool:
        """Blocks that are stored now; what is over the limit goes, the least recently used of the oldest first.
        Returns whether the store has lost the index, so that it has to be made again. Raises StoreFailure."""
        index = self.index_of(tenant)
        with self._lock:
            if (limit := self._limits.get(tenant)) is None:
                return False
            self._remember(tenant, keys)
            at = b"%d" % self._clock()
            members = [arg for key in keys for arg in (at, key)]
            commands: list[tuple[bytes, Sequence[Arg]]] = [(index, (b"ZADD", index, *members))] if members else []
            count = _checked(ask([*commands, (index, (b"ZCARD", index))]))[-1]
            assert isinstance(count, int)
            before, is_lost = self._counts.get(tenant, 0), False
            if count > limit:
                count -= self._evict(index, count - limit, int(limit * _SHARE_AHEAD), ask)
            elif keys:
                is_lost = count == len(keys) < before
            self._counts[tenant] = count
            return is_lost

    def _remember(self, tenant: bytes, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._tenants.pop(key, None)
            self._tenants[key] = tenant
        while len(self._tenants) > _MAX_REMEMBERED:
            del self._tenants[next(iter(self._tenants))]

    def _evict(self, index: bytes, num_over: int, num_ahead: int, ask: Ask) -> int:
        """Returns how many blocks have left the index."""
        last = b"%d" % (_LOOKED_AT * (num_over + num_ahead) + _MORE)
        (oldest,) = _checked(ask([(index, (b"ZRANGE", index, b"0", last))]))
        assert isinstance(oldest, list)
        keys = [key for key in oldest if isinstance(key, bytes)]
        manifests = [self._names_of(key)[0] for key in keys]
        idle = ask([(name, (b"OBJECT", b"IDLETIME", name)) for name in manifests])
        gone = [key for key, reply in zip(keys, idle) if reply is None]
        there = [(reply, key) for key, reply in zip(keys, idle) if reply is not None]
        # A store that does not tell how long a block was idle gives up the oldest; the sort keeps their order.
        there.sort(key=lambda pair: -pair[0] if isinstance(pair[0], int) else 0)
        num_left = num_over - len(gone)
        going = [key for _, key in there[: num_left + num_ahead]] if num_left > 0 else []
        names = [self._names_of(key) for key in going]
        commands = [(whole[0], (b"UNLINK", *whole)) for whole in names]
        if leaving := [*gone, *going]:
            _checked(ask([*commands, (index, (b"ZREM", index, *leaving))]))
        return len(leaving)


def _checked(replies: list[Reply | StoreFailure]) -> list[Reply | StoreFailure]:
    """Raises the first StoreFailure."""
    for reply in replies:
        if isinstance(reply, StoreFailure):
            raise reply
    return replies
