"""`SimulatedLink`, `SimulatedStorageLink`: links that only take time. They move nothing, and own when operations
begin and end. `SimulatedStorage`: the names of the stored blocks, and which of them it evicts.

Every number that comes out of it is simulated.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sglang.srt.mem_cache.block_keys import to_bytes
from sglang.srt.mem_cache.transfer import (
    STORE_LINKS,
    GateError,
    LoadFailedError,
    OpResult,
    StorageAction,
    StorageOp,
    Ticket,
    TransferOp,
)


@dataclass(frozen=True)
class _Timing:
    """When the bytes move, in seconds; layers arrive evenly between."""

    start: float
    end: float
    ok: bool


class SimulatedGate:
    def __init__(self, timing: _Timing, num_layers: int, ticket: Ticket) -> None:
        self._timing = timing
        self._num_layers = num_layers
        self._ticket = ticket

    def ready_at(self, layer: int) -> float:
        """Seconds of virtual time at which the layer has arrived."""
        timing = self._timing
        if layer == self._num_layers - 1:
            return timing.end  # not a rounding before
        return timing.start + (timing.end - timing.start) * (layer + 1) / self._num_layers

    def has_failed(self, now: float) -> bool:
        """Whether the load is known to have failed then."""
        return not self._timing.ok and self._timing.end <= now

    def wait(self, layer: int, stream: Any) -> None:
        """Time passes in the executor's account; nothing blocks."""

    def check(self) -> None:
        if not self._timing.ok:
            raise LoadFailedError(f"{self._ticket}: failed in the simulation")


def at_bandwidth(bandwidth: float) -> Callable[[TransferOp], float]:
    """Seconds of an operation's bytes at this many bytes per second."""
    return lambda op: op.size_bytes / bandwidth


# (operation, when its bytes begin to move, seconds that they usually take) -> when it ends, and whether it succeeds.
Outcome = Callable[[TransferOp, float, float], tuple[float, bool]]


def on_time(op: TransferOp, begin: float, seconds: float) -> tuple[float, bool]:
    """The `Outcome` of a healthy link."""
    return begin + seconds, True


class SimulatedLink:
    """One operation after another: start when the link is free and the source is ready, then latency_s, then
    seconds(op) for the bytes.

    now: the virtual clock. launch_end: launch number -> when it completes, for backups. outcome: for a link that is
    slow, hangs or fails.
    """

    def __init__(
        self,
        name: str,
        now: Callable[[], float],
        seconds: Callable[[TransferOp], float],
        latency_s: float,
        num_layers: int,
        launch_end: Callable[[int], float],
        outcome: Outcome = on_time,
    ) -> None:
        self.name = name
        self.busy_s = 0.0
        self._now = now
        self._seconds = seconds
        self._latency_s = latency_s
        self._num_layers = num_layers
        self._launch_end = launch_end
        self._outcome = outcome
        self._free_at = 0.0
        self._next_seq = 0
        self._timings: dict[int, _Timing] = {}
        self._pending: deque[int] = deque()

    def submit(self, op: TransferOp) -> None:
        link, seq = op.ticket
        assert link == self.name and seq == self._next_seq, f"{op.ticket} out of order, {self._next_seq} expected"
        self._next_seq += 1
        start = max(self._now(), self._free_at)
        if op.after is not None:
            start = max(start, self._launch_end(op.after))
        start += self._latency_s
        end, succeeds = self._outcome(op, start, self._seconds(op))
        self._timings[seq] = _Timing(start, end, succeeds)
        self._free_at = end
        self.busy_s += end - start
        self._pending.append(seq)

    def cancel(self, ticket: Ticket) -> None:
        """A hint that is not taken: the operation ends as planned."""

    def gate(self, ticket: Ticket) -> SimulatedGate:
        timing = self._timings.get(ticket.seq)
        if timing is None:
            raise GateError(f"{ticket} is awaited but was never submitted")
        return SimulatedGate(timing, self._num_layers, ticket)

    def poll(self) -> list[OpResult]:
        results = []
        while self._pending and self._timings[self._pending[0]].end <= self._now():
            seq = self._pending.popleft()
            timing = self._timings[seq]
            results.append(OpResult(seq, timing.ok, seconds=timing.end - timing.start))
        return results

    def busy_between(self, start: float, end: float) -> float:
        """Seconds of [start, end) in which bytes move, as far as operations are submitted."""
        busy = 0.0
        for seq in reversed(self._pending):
            timing = self._timings[seq]
            busy += max(0.0, min(end, timing.end) - max(start, timing.start))
            if timing.start <= start:
                break
        return busy

    def next_end(self) -> float | None:
        """When the next operation completes; None if none is under way."""
        return self._timings[self._pending[0]].end if self._pending else None


class SimulatedStorage:
    """The names of the stored blocks; the store of a simulation's storage links.

    max_blocks: None for no limit. Above it, the least recently written or read block goes. Of one operation the last
    block is touched first, so that the front of a prompt goes last. is_exclusive: when it is full, what is read goes
    first, see `StorageSetup`; block by block, where the file store sometimes gives up a whole file.
    """

    def __init__(self, max_blocks: int | None = None, is_exclusive: bool = False) -> None:
        # In the order of use, the least recent first.
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.num_evicted = 0
        self._max_blocks = max_blocks
        self._is_exclusive = is_exclusive

    @property
    def has_room(self) -> bool:
        return self._max_blocks is None or len(self.blocks) < 0.95 * self._max_blocks

    def add(self, keys: np.ndarray) -> None:
        """keys: (n, 16) uint8."""
        self._touch(to_bytes(keys))
        while self._max_blocks is not None and len(self.blocks) > self._max_blocks:
            del self.blocks[next(iter(self.blocks))]
            self.num_evicted += 1

    def count(self, keys: np.ndarray) -> int:
        """How many of the leading blocks are stored."""
        found = (i for i, key in enumerate(to_bytes(keys)) if key not in self.blocks)
        return next(found, len(keys))

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self.blocks.pop(key, None)
            self.blocks[key] = None

    def _demote(self, keys: Sequence[bytes]) -> None:
        """These go first, the last of them before all others."""
        for key in keys:
            self.blocks.move_to_end(key, last=False)

    def carry_out(self, op: StorageOp) -> int:
        """The count of a `StorageOp`'s result. Attaching, detaching and clearing always succeed."""
        if op.action == StorageAction.SET:
            self.add(op.keys)
        if op.action in (StorageAction.EXISTS, StorageAction.GET):
            keys, count = to_bytes(op.keys), self.count(op.keys)
            if op.action == StorageAction.GET and self._is_exclusive and not self.has_room:
                self._demote(keys[:count])
            elif op.action == StorageAction.GET:
                self._touch(keys[:count])
            return count
        if op.action == StorageAction.TOUCH:
            keys = to_bytes(op.keys)
            self._touch([key for key in keys if key in self.blocks])
            return 1 + next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
        if op.action == StorageAction.CLEAR:
            self.blocks.clear()
        return len(op.keys) if op.action == StorageAction.SET else 1


class SimulatedStorageLink:
    """One of the links to one or two `SimulatedStorage`. Their content is looked up when an operation ends.

    ends: (operation, virtual time of its submission in seconds) -> when it ends, and whether it succeeds. It is
    called when the operation before has ended. A model of storage that works on several operations at once may answer
    a time shortly after that. Operations that were cancelled by then take no time. One that does not succeed counts
    no block.
    """

    def __init__(
        self,
        name: str,
        now: Callable[[], float],
        stores: Sequence[SimulatedStorage],
        ends: Callable[[StorageOp, float], tuple[float, bool]],
    ) -> None:
        self.name = name
        self.busy_s = 0.0
        self._now = now
        self._stores = stores
        self._ends = ends
        self._next_seq = 0
        # Operations that are not over, with the times of their submission.
        self._waiting: deque[tuple[StorageOp, float]] = deque()
        # Beginning and end of the first of them, if it is under way, and whether it succeeds.
        self._current: tuple[float, float, bool] | None = None
        self._free_at = 0.0
        # busy_s, with the part of the current operation, when `busy_between` was last called.
        self._asked = 0.0
        self._cancelled: set[int] = set()

    @property
    def has_room(self) -> bool:
        place = STORE_LINKS.index(self.name) if self.name in STORE_LINKS else 0
        return self._stores[place].has_room if place < len(self._stores) else True

    def submit(self, op: StorageOp) -> None:
        link, seq = op.ticket
        assert link == self.name and seq == self._next_seq, f"{op.ticket} out of order, {self._next_seq} expected"
        self._next_seq += 1
        self._waiting.append((op, self._now()))
        self._begin_next()

    def cancel(self, ticket: Ticket) -> None:
        if self._waiting and ticket.seq > self._waiting[0][0].ticket.seq:
            self._cancelled.add(ticket.seq)

    def gate(self, ticket: Ticket) -> Any:
        raise GateError(f"{ticket}: a launch may not wait for storage; requests wait for it before they start")

    def poll(self) -> list[OpResult]:
        results = []
        while self._current is not None and self._current[1] <= self._now():
            begin, end, succeeds = self._current
            op, _ = self._waiting.popleft()
            cancelled = op.ticket.seq in self._cancelled
            self._cancelled.discard(op.ticket.seq)
            count, far_count = self._carry_out(op) if succeeds and not cancelled else (0, 0)
            self.busy_s += end - begin
            results.append(OpResult(op.ticket.seq, not cancelled, "", count, far_count, seconds=end - begin))
            self._free_at, self._current = end, None
            self._begin_next()
        return results

    def _carry_out(self, op: StorageOp) -> tuple[int, int]:
        """The count, and of a probe how many of the last counted blocks are in the second store."""
        stores = [store for place, store in enumerate(self._stores) if place not in op.skips]
        if op.action != StorageAction.EXISTS:
            return min(store.carry_out(op) for store in stores), 0
        near = stores[0].carry_out(op)
        if len(stores) == 1:
            return near, near if stores[0] is not self._stores[0] else 0
        far = stores[1].carry_out(replace(op, keys=op.keys[near:]))
        return near + far, far

    def busy_between(self, start: float, end: float) -> float:
        """Seconds of [start, end) in which operations are under way. Operations of the future are not known. For a
        window that begins later than now, the answer is the busy time since the last call."""
        now = self._now()
        busy_s = self.busy_s + (now - self._current[0] if self._current is not None else 0.0)
        passed, self._asked = busy_s - self._asked, busy_s
        if start > now:
            return min(end - start, max(0.0, passed))
        return max(0.0, min(end, self._current[1]) - start) if self._current is not None else 0.0

    def next_end(self) -> float | None:
        """When the next operation completes; None if none is under way."""
        return None if self._current is None else self._current[1]

    def _begin_next(self) -> None:
        if self._current is not None or not self._waiting:
            return
        op, submitted = self._waiting[0]
        begin = max(self._free_at, submitted)
        if op.ticket.seq in self._cancelled:
            self._current = begin, begin, True
            return
        end, succeeds = self._ends(op, submitted)
        self._current = begin, max(begin, end), succeeds
