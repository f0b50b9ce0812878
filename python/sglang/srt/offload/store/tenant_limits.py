"""`TenantLimits`: how many blocks tenants may have in a namespace of the store.

Owns the limits, and in the store an index of each tenant that has one: a sorted set of its blocks, by their last use.
Servers that share the store and have the limit write into one index, so they count together.

    sglang-kv1:{<namespace>t<tenant>}:t
                 as of blocks, and the tenant in hex

What was not used for the longest time goes first. Of blocks that were used together, as those of a prompt are, the
front counts as used last, so that it stays. A block that the store has evicted stays in the index until it is its
turn. An index into which no server writes any more disappears after a week.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from sglang.srt.offload.store.resp import Arg, Reply, StoreFailure, StoreLost

# For the key's node.
Command: TypeAlias = tuple[bytes, Sequence[Arg]]
# As `NodeConnections.pipeline`.
Ask: TypeAlias = "Callable[[Sequence[Command]], list[Reply | StoreFailure]]"

Value = TypeVar("Value")

INDEX = b"t"
# What is over a limit goes with that share of the limit, so that the next block does not cause the same again.
_SHARE_AHEAD = 1 / 32
# A tenant with all but this share of its limit counts as full: what it lost is not written again for being in use.
_SHARE_OF_FULL = 1 / 16
_INDEX_LIVES_S = 7 * 24 * 3600
# Blocks that are remembered with their tenant, and as many with their last use.
_MAX_REMEMBERED = 1 << 17
# What is written was used when its prompt was looked up, not longer ago than this.
_LOOKED_UP_US = 60_000_000


class TenantLimits:
    """For all threads. prefix: of the namespace's names. names_of: of a block, its manifest first. clock: seconds
    since 1970, as on the other servers."""

    def __init__(
        self, prefix: bytes, names_of: Callable[[bytes], list[bytes]], clock: Callable[[], float] = time.time
    ) -> None:
        self._prefix = prefix
        self._names_of = names_of
        self._clock = clock
        # Never held while the store is asked, which may not answer.
        self._lock = threading.Lock()
        # One thread evicts at a time.
        self._evicting = threading.Lock()
        # Tenant -> the most blocks, and how many it had when it was last looked at.
        self._limits: dict[bytes, int] = {}
        self._counts: dict[bytes, int] = {}
        # Blocks that this process has seen stored, or would have stored -> whose they are, oldest first.
        self._tenants: dict[bytes, bytes] = {}
        # Blocks that were asked for -> when, in microseconds. Stored or not: what is not may be written next.
        self._used_at: dict[bytes, int] = {}

    def set(self, tenant: bytes, num_blocks: int) -> None:
        with self._lock:
            self._limits[tenant] = num_blocks

    def remove(self, tenant: bytes) -> None:
        """Its index stays: other servers may have the limit still."""
        with self._lock:
            self._limits.pop(tenant, None)
            self._counts.pop(tenant, None)
            self._tenants = {key: whose for key, whose in self._tenants.items() if whose != tenant}
            if not self._limits:
                self._used_at.clear()

    def has(self, tenant: bytes) -> bool:
        return tenant in self._limits

    def refuses(self, tenant: bytes, key: bytes) -> bool:
        """Whether the tenant may have no block at all. This one counts as stored from now on."""
        if self._limits.get(tenant) != 0:
            return False
        with self._lock:
            _remember(self._tenants, {key: tenant})
        return True

    def counts_as_stored(self, key: bytes) -> bool:
        """Whether the block, if it is not stored, is so for the sake of a limit: it must not be written again and
        again because it is in use."""
        tenant = self._tenants.get(key, b"")
        limit = self._limits.get(tenant)
        return limit is not None and self._counts.get(tenant, 0) >= limit - int(limit * _SHARE_OF_FULL)

    def index_of(self, tenant: bytes) -> bytes:
        return b"%b%b%b}:%b" % (self._prefix, INDEX, tenant.hex().encode(), INDEX)

    # -- use --------------------------------------------------------------------------------------------------------

    def use(self, keys: Sequence[bytes]) -> list[Command]:
        """Blocks are in use, those of a prompt in order. Returns what the store has to be told for that."""
        if not self._limits:
            return []
        now = self._now()
        with self._lock:
            _remember(self._used_at, {key: now - i for i, key in enumerate(keys)})
            told: dict[bytes, list[Arg]] = {}
            for i, key in enumerate(keys):
                if (tenant := self._tenants.get(key, b"")) in self._limits:
                    told.setdefault(self.index_of(tenant), []).extend((b"%d" % (now - i), key))
        return [(index, (b"ZADD", index, b"XX", *members)) for index, members in told.items()]

    def begin_write(self, tenant: bytes, keys: Sequence[bytes]) -> None:
        """A part of a prompt is about to be written. Of what was not looked up before, this is the use."""
        if tenant in self._limits:
            now = self._now()
            with self._lock:
                unknown = {key: now - i for i, key in enumerate(keys) if not self._was_looked_up(key, now)}
                _remember(self._used_at, unknown)

    def _was_looked_up(self, key: bytes, now: int) -> bool:
        return self._used_at.get(key, 0) > now - _LOOKED_UP_US

    def _now(self) -> int:
        """In microseconds, so that there is an order among the blocks of a prompt."""
        return int(self._clock() * 1e6)

    # -- what is stored ---------------------------------------------------------------------------------------------

    def add(self, tenant: bytes, keys: Sequence[bytes], ask: Ask) -> bool:
        """Blocks that were written; what is over the limit goes. Returns whether the store has lost the index, and it
        has to be made again. Raises StoreFailure."""
        now = self._now()
        with self._lock:
            at = {key: self._used_at[key] if self._was_looked_up(key, now) else now for key in keys}
        return self._add(tenant, at, (), ask)

    def add_found(self, tenant: bytes, idle_s: dict[bytes, int], ask: Ask) -> None:
        """Blocks that were found in the store, and for how long each was not used, in seconds. What the index has
        already stays as it is there. Raises StoreFailure."""
        now = self._now()
        self._add(tenant, {key: now - 1_000_000 * seconds for key, seconds in idle_s.items()}, (b"NX",), ask)

    def _add(self, tenant: bytes, used_at: dict[bytes, int], how: Sequence[Arg], ask: Ask) -> bool:
        index = self.index_of(tenant)
        with self._lock:
            if (limit := self._limits.get(tenant)) is None:
                return False
            _remember(self._tenants, dict.fromkeys(used_at, tenant))
            before = self._counts.get(tenant, 0)
        members = [arg for key, at in used_at.items() for arg in (b"%d" % at, key)]
        commands: list[Sequence[Arg]] = [(b"ZADD", index, *how, *members)] if members else []
        count = self._count(index, [*commands, (b"EXPIRE", index, _INDEX_LIVES_S)], ask)
        num_ahead = int(limit * _SHARE_AHEAD)
        # It was empty, or has lost more than an eviction takes.
        is_lost = bool(used_at) and (count == len(used_at) or count < min(before, limit - num_ahead))
        if count > limit:
            with self._evicting:
                count = self._count(index, [], ask)  # another thread may have done it
                if count > limit:
                    count -= self._evict(index, count - limit + num_ahead, ask)
        with self._lock:
            self._counts[tenant] = count
        return is_lost

    def _count(self, index: bytes, before: Sequence[Sequence[Arg]], ask: Ask) -> int:
        """before: commands that are carried out first."""
        count = checked(ask([(index, command) for command in (*before, (b"ZCARD", index))]))[-1]
        if not isinstance(count, int):
            raise StoreLost(f"ZCARD is not understood: {count!r:.60}")
        return count

    def _evict(self, index: bytes, num: int, ask: Ask) -> int:
        """Returns how many blocks have left the index."""
        (oldest,) = checked(ask([(index, (b"ZRANGE", index, b"0", b"%d" % (num - 1)))]))
        if not isinstance(oldest, list):
            raise StoreLost(f"ZRANGE is not understood: {oldest!r:.60}")
        going = [key for key in oldest if isinstance(key, bytes)]
        names = [self._names_of(key) for key in going]
        commands: list[Command] = [(name, (b"UNLINK", name)) for whole in names for name in whole]
        if going:
            checked(ask([*commands, (index, (b"ZREM", index, *going))]))
        return len(going)

    def count_again(self, keys: Sequence[bytes], ask: Ask) -> None:
        """These blocks count as stored, and are not: look how many their tenants have. Raises StoreFailure."""
        tenants = [tenant for tenant in {self._tenants.get(key, b"") for key in keys} if self.has(tenant)]
        indexes = [self.index_of(tenant) for tenant in tenants]
        counts = checked(ask([(index, (b"ZCARD", index)) for index in indexes])) if tenants else []
        with self._lock:
            self._counts.update((tenant, n) for tenant, n in zip(tenants, counts) if isinstance(n, int))


def _remember(where: dict[bytes, Value], what: dict[bytes, Value]) -> None:
    for key in what:
        where.pop(key, None)
    where.update(what)
    while len(where) > _MAX_REMEMBERED:
        del where[next(iter(where))]


def checked(replies: list[Reply | StoreFailure]) -> list[Reply | StoreFailure]:
    """Raises the first StoreFailure."""
    for reply in replies:
        if isinstance(reply, StoreFailure):
            raise reply
    return replies
