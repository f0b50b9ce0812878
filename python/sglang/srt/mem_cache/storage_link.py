"""`StorageLink`: operations on a `BlockStore`, in order, on a stream of their own. All links share one store, or two.

Owns its operations until they are polled, and the attached store through its `StoreSlot`. Never decides what moves,
never touches frame states. An operation that is cancelled before it starts does nothing. An operation that raises
counts 0 blocks; no store should raise.

A store that can have several reads under way (`OverlappingStore`) gets all reads at once. They may end in any order
and on any thread. The link reports them in the order of their submission.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from sglang.srt.mem_cache.block_keys import to_bytes
from sglang.srt.mem_cache.block_store import (
    ExistsFailed,
    OverlappingStore,
    StoreError,
    TenantStore,
    TouchedStore,
    has_room,
)
from sglang.srt.mem_cache.rate_limit import RateLimit
from sglang.srt.mem_cache.storage.tiered_store import AnyStore, FallbackReads, TieredStore, parts_of
from sglang.srt.mem_cache.storage.windowed_store import find
from sglang.srt.mem_cache.transfer import (
    PROBE_FAILED,
    STORE_LINKS,
    GateError,
    LayerGate,
    OpResult,
    StorageAction,
    StorageOp,
    Ticket,
)
from sglang.srt.utils.stream import Stream

logger = logging.getLogger(__name__)


class StoreSlot:
    """The store that a rank's storage links use, or None. open_store: setup (see StorageOp) -> a store; raises
    StoreError. last_error: the reason why the last attachment failed, for the answer to its request."""

    def __init__(self, open_store: Callable[[str], AnyStore], store: AnyStore | None = None) -> None:
        self.store = store
        self.last_error = ""
        self._open_store = open_store

    def attach(self, setup: str) -> bool:
        # A store that was opened when other ranks could not open theirs. It may hold a lock that the new one needs.
        self.detach()
        try:
            self.store = self._open_store(setup)
        except StoreError as error:
            logger.warning("storage cannot be attached: %s", error)
            self.last_error = str(error)
            return False
        return True

    def detach(self) -> None:
        store, self.store = self.store, None
        if store is not None:
            store.close()


@dataclass
class _Begun:
    """An operation between its start and its report."""

    seq: int
    # Seconds of the clock when it began; None if it was cancelled before.
    at: float | None = None
    result: OpResult | None = None
    # Hints to the store that the result is not needed any more; None while the store is still starting the operation.
    give_up: Callable[[], None] | None = None
    # Whether it was cancelled after it began. A store that is still starting the operation gets the hint afterwards.
    is_unwanted: bool = False


class HasWindowed(Protocol):
    """A host pool; see `MHATokenToKVPoolHost`."""

    def set_windowed(self, frames: np.ndarray, windowed: np.ndarray) -> None: ...


class StorageLink:
    """notify: called after every operation, from the stream or a thread of the store. rate_limit: for the bytes that
    move, for experiments; an overlapping store has its own. clock: in seconds. The seconds of an operation count from
    its beginning, or from the end of the operation before if that is later. host_pool: what the store reads and
    writes, where layers with a window have pages of their own there."""

    def __init__(
        self,
        name: str,
        slot: StoreSlot,
        stream: Stream,
        notify: Callable[[], None] = lambda: None,
        rate_limit: RateLimit | None = None,
        clock: Callable[[], float] = time.perf_counter,
        host_pool: HasWindowed | None = None,
    ) -> None:
        self.name = name
        self.slot = slot
        self.stream = stream
        self.notify = notify
        self.rate_limit = rate_limit
        self._clock = clock
        self._host_pool = host_pool
        self._last_end = float("-inf")
        self._next_seq = 0
        # Operations that have begun; touched on the stream only.
        self._num_started = 0
        self._cancelled: set[int] = set()
        self._begun: deque[_Begun] = deque()
        self._lock = threading.Lock()

    def submit(self, op: StorageOp) -> None:
        link, seq = op.ticket
        assert link == self.name and seq == self._next_seq, f"{op.ticket} out of order, {self._next_seq} expected"
        self._next_seq += 1
        if op.windowed is not None:
            assert self._host_pool is not None, "pages of layers with a window are in the host's pool"
            self._host_pool.set_windowed(op.frames, op.windowed)
        if op.action == StorageAction.GET and self._is_synchronous:
            self._run(op)
        else:
            self.stream.enqueue(partial(self._run, op))

    def cancel(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket.seq >= self._num_started:
                self._cancelled.add(ticket.seq)
                return
            begun = next((b for b in self._begun if b.seq == ticket.seq and b.result is None), None)
            if begun is None:
                return
            begun.is_unwanted = True
            give_up = begun.give_up
        if give_up is not None:
            give_up()

    def gate(self, ticket: Ticket) -> LayerGate:
        raise GateError(f"{ticket}: a launch may not wait for storage; requests wait for it before they start")

    def poll(self) -> list[OpResult]:
        self.stream.raise_if_dead()
        results = []
        with self._lock:
            while self._begun and (result := self._begun[0].result) is not None:
                self._begun.popleft()
                results.append(result)
        return results

    # -- on the stream ------------------------------------------------------------------------------------------

    def _run(self, op: StorageOp) -> None:
        with self._lock:
            self._num_started = op.ticket.seq + 1
            begun = _Begun(op.ticket.seq)
            self._begun.append(begun)
            is_cancelled = op.ticket.seq in self._cancelled
            self._cancelled.discard(op.ticket.seq)
        if is_cancelled:
            self._end(begun, 0, error="cancelled")
            return
        begun.at = self._clock()
        reader = self._reader_for(op)
        try:
            is_read = op.action == StorageAction.GET
            if not is_read or self._is_synchronous or not isinstance(reader, OverlappingStore):
                self._end(begun, *self._carry_out(op))
                return
            give_up = reader.start_get(to_bytes(op.keys), op.frames, partial(self._end, begun))
        except Exception as raised:
            logger.warning("%s of %d blocks failed: %r", op.action.name, len(op.keys), raised)
            self._end(begun, 0, error=str(raised) or type(raised).__name__)
            return
        with self._lock:
            begun.give_up = give_up
            is_unwanted = begun.is_unwanted
        if is_unwanted:
            give_up()

    def _reader_for(self, op: StorageOp) -> AnyStore | FallbackReads | None:
        store = self.slot.store
        return FallbackReads(store) if op.falls_back and isinstance(store, TieredStore) else self._store_for(op)

    def _store_for(self, op: StorageOp) -> AnyStore | None:
        """Of two stores the one that an operation reads, writes or tells."""
        store, is_of_one = self.slot.store, op.action in (StorageAction.GET, StorageAction.SET, StorageAction.TOUCH)
        return store.only(op.skips) if is_of_one and isinstance(store, TieredStore) else store

    @property
    def has_room(self) -> bool:
        """Of a link for writes, whether its store has."""
        parts = parts_of(self.slot.store) if self.slot.store is not None else []
        place = STORE_LINKS.index(self.name) if self.name in STORE_LINKS else 0
        return has_room(parts[place]) if place < len(parts) else True

    @property
    def _is_synchronous(self) -> bool:
        """Whether the scheduler waits for each read and decides nothing meanwhile. A store asks for this to measure
        the benefit of asynchronous fetching (ShadowServe 6.4)."""
        return getattr(self.slot.store, "is_synchronous", False)

    def _end(self, begun: _Begun, count: int, far_count: int = 0, part_count: int = 0, *, error: str = "") -> None:
        with self._lock:
            seconds = 0.0
            if begun.at is not None:
                now = self._clock()
                seconds, self._last_end = now - max(begun.at, self._last_end), now
            begun.result = OpResult(begun.seq, not error, error, count, far_count, part_count, seconds)
        self.notify()

    def _carry_out(self, op: StorageOp) -> tuple[int, ...]:
        """The count of the operation's result, and of a probe the far count and the part count."""
        store = self._store_for(op)
        if op.action == StorageAction.ATTACH:
            return int(self.slot.attach(op.setup)), 0
        if store is None:
            return 0, 0
        if op.action == StorageAction.EXISTS:
            keys = to_bytes(op.keys)
            if not isinstance(store, TieredStore):
                try:
                    count, part = find(store, keys)
                except ExistsFailed:
                    return PROBE_FAILED, 0
                return count, 0, part
            near, far, part = store.locate(keys, op.skips)
            return near + far, far, part
        if op.action == StorageAction.TOUCH:
            try:
                return 1 + (store.touch(to_bytes(op.keys)) if isinstance(store, TouchedStore) else len(op.keys)), 0
            except ExistsFailed:
                return 0, 0
        if op.action == StorageAction.CLEAR:
            return int(store.clear()), 0
        if op.action == StorageAction.DETACH:
            self.slot.detach()
            return 1, 0
        if op.action in (StorageAction.ERASE, StorageAction.LIMIT):
            if not isinstance(store, TenantStore):
                logger.warning("the storage backend %s does not know whose blocks are whose: clear it", store.name)
                return 0, 0
            if op.action == StorageAction.LIMIT:
                return int(store.limit(op.tenant, op.limit, op.tier)), 0
            return int(store.erase(op.tenant, op.tier)), 0
        assert not isinstance(store, TieredStore)
        with self.rate_limit.transfer(op.size_bytes) if self.rate_limit is not None else nullcontext():
            if op.action == StorageAction.GET:
                reader = self._reader_for(op)
                assert reader is not None and not isinstance(reader, TieredStore)
                return reader.get(to_bytes(op.keys), op.frames), 0
            return store.set(to_bytes(op.keys), op.frames, op.tenant), 0
