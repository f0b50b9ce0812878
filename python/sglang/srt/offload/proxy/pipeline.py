"""`Pipeline`: fetches pieces through four stages at once, each on threads of its own.

Owns the threads, the buffers and the pieces on their way. Knows neither sockets nor engines.

    next piece ─► receive ──────► decompress ──────► dequantize ──────► deliver ─► block whole
                  store → slot    slot → slot        slot → slot, or    slot → the destination
                                                     → its window
                  compressed      decompressed       dequantized

A piece holds a slot of each buffer from the stage that fills it to the stage that has read it. A stage without a free
slot waits for later stages, and never for earlier ones. Therefore the pipeline cannot lock up, and a fetch may be
larger than all buffers: slots are used again piece by piece. (ShadowServe 4.3 fetches in rounds, because its
destination is such a buffer. Here it is the engine's host pool.)

An engine behind TCP may take its bytes slowly, or not at all. Therefore it gets a share of the slots, and others'
fetches pass its own once it has used that up.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from sglang.srt.offload.codec.base import Codec
from sglang.srt.offload.codec.header import CodecError, PieceHeader
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.proxy.destination import Destination
from sglang.srt.offload.proxy.engines import StageEngine
from sglang.srt.offload.proxy.settings import PIECE_BYTES, STAGES, ProxySettings, limit_of
from sglang.srt.offload.proxy.slots import FreshSlots, Slot, SlotPool
from sglang.srt.offload.store.object_store import PieceReader
from sglang.srt.offload.store.resp import ErrorReply, StoreFailure, ValueTooLarge

logger = logging.getLogger(__name__)


class Requested(Protocol):
    """A piece that a reader has requested. is_lost: it will not be received."""

    is_lost: bool


class Source(Protocol):
    """A session as the pipeline sees it: where its pieces come from, and how they are coded and laid out."""

    layout: BlockLayout
    codec: Codec

    def reader(self, thread: int) -> PieceReader:
        """The connection of one receiving thread."""
        ...

    def damaged(self, key: bytes, why: str) -> None:
        """A block did not verify."""
        ...

    def incomplete(self, key: bytes) -> None:
        """A block lacks a piece, because the store has evicted it or never had it."""
        ...


class Fetch:
    """Blocks on their way to a destination. Ends once: `on_end(count)`, from any thread.

    keys: 16 bytes each, of the destination's blocks. `limit`: blocks from this one on are given up. They are not
    delivered after `on_end` was called.
    """

    def __init__(
        self, source: Source, keys: Sequence[bytes], destination: Destination, on_end: Callable[[int], None]
    ) -> None:
        self.source = source
        self.keys = keys
        self.destination = destination
        self.limit = len(keys)
        self._on_end = on_end
        self._lock = threading.Lock()
        self._next = 0
        self._num_pieces = source.layout.num_pieces
        self._under_way = 0
        self._missing = [self._num_pieces] * len(keys)

    def take(self) -> Piece | None:
        """The next piece; None if there is none left."""
        with self._lock:
            block, index = divmod(self._next, self._num_pieces)
            if block >= self.limit:
                return None
            self._next += 1
            self._under_way += 1
            return Piece(self, block, index)

    def end_piece(self, piece: Piece, ok: bool) -> None:
        with self._lock:
            self._under_way -= 1
            if ok:
                self._missing[piece.block] -= 1
            else:
                self.limit = min(self.limit, piece.block)
        self._end_if_over()

    def give_up(self) -> None:
        """Let pieces on their way end, and begin no new ones."""
        with self._lock:
            self.limit = 0
        self.destination.give_up()
        self._end_if_over()

    def wants(self, piece: Piece) -> bool:
        return piece.block < self.limit

    def _end_if_over(self) -> None:
        with self._lock:
            if self._on_end is _ended or self._under_way or self._next < self.limit * self._num_pieces:
                return
            on_end, self._on_end = self._on_end, _ended
            count = next((i for i in range(self.limit) if self._missing[i]), self.limit)
        on_end(count)


def _ended(count: int) -> None:
    raise AssertionError("a fetch ended twice")


@dataclass(eq=False)
class Piece:
    """One piece, and the slots that it holds."""

    fetch: Fetch
    block: int
    index: int
    stored: np.ndarray | None = None
    header: PieceHeader | None = None
    slots: dict[str, Slot] = field(default_factory=dict)


@dataclass
class StageCounters:
    """Counters of one thread, which alone writes them; but a delivery is counted by the thread that ends it. bytes:
    the output of the stage. busy_s: seconds at work, without waits for a slot."""

    pieces: int = 0
    bytes: int = 0
    busy_s: float = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.busy_s += time.perf_counter() - began


class Pipeline:
    def __init__(self, settings: ProxySettings, engine: StageEngine) -> None:
        self.settings = settings
        self.engine = engine
        self._read_limit = limit_of(settings.max_read_gbps)
        make = SlotPool if settings.preallocated else FreshSlots
        # A piece that does not shrink is stored as it is, behind its header.
        slot_bytes = PIECE_BYTES + 4096
        self.slots: dict[str, SlotPool] = {
            "compressed": make(settings.compressed_buffer_bytes // slot_bytes, slot_bytes),
            "decompressed": make(settings.decompressed_buffer_bytes // slot_bytes, slot_bytes),
            "dequantized": make(settings.dequantized_buffer_bytes // PIECE_BYTES, PIECE_BYTES),
        }
        self._num_slots = min(slots.num_slots for slots in self.slots.values())
        self.counters: dict[str, list[StageCounters]] = {stage: [] for stage in STAGES}
        self._fetches: deque[Fetch] = deque()
        self._more = threading.Condition()
        self._queues: dict[str, queue.SimpleQueue[Piece]] = {stage: queue.SimpleQueue() for stage in STAGES[1:]}
        # Without pipelining: how many pieces of the current block have not ended, the pieces of it that no thread has
        # taken, and the pieces that wait for the others before the next stage.
        self._under_way = 0
        # Pieces under way of sources whose destinations can stall, by the source.
        self._of_source: Counter[Source] = Counter()
        self._untaken: deque[Piece] = deque()
        self._parked: list[tuple[Piece, str]] = []
        steps: dict[str, Callable[[Piece, StageCounters], None]] = {
            "decompress": self._decompress,
            "dequantize": self._dequantize,
        }
        for stage in STAGES:
            for i in range(settings.threads(stage)):
                counters = StageCounters()
                self.counters[stage].append(counters)
                run: Callable[..., None] = self._work
                args: tuple[Any, ...] = (stage, steps.get(stage), counters)
                if stage == "receive":
                    run, args = self._receive, (i, counters)
                elif stage == "deliver":
                    run, args = self._deliver, (counters,)
                start_thread(f"{stage}-{i}", settings.cores.get(stage), i, run, *args)

    def submit(self, fetch: Fetch) -> None:
        """Fetches are served in the order of submission."""
        with self._more:
            self._fetches.append(fetch)
            self._more.notify_all()
        fetch._end_if_over()

    @property
    def is_reading(self) -> bool:
        """Whether a piece waits to be received, and may be."""
        with self._more:
            return any(map(self._may_take, self._fetches))

    def stats(self) -> dict[str, int]:
        """Totals since the start, and the current fill of queues and buffers."""
        values = {}
        for stage, threads in self.counters.items():
            values[f"{stage}_bytes"] = sum(c.bytes for c in threads)
            values[f"{stage}_pieces"] = sum(c.pieces for c in threads)
            values[f"{stage}_us"] = int(1e6 * sum(c.busy_s for c in threads))
        for stage, waiting in self._queues.items():
            values[f"{stage}_queue"] = waiting.qsize()
        for name, slots in self.slots.items():
            values[f"{name}_slots"] = slots.num_slots
            values[f"{name}_slots_used"] = slots.num_slots - slots.num_free
        return values

    # -- on the threads -----------------------------------------------------------------------------------------

    def _receive(self, thread: int, counters: StageCounters) -> None:
        # The pieces that this thread has requested, in the order of their arrival.
        asked: deque[tuple[PieceReader, Piece, Requested]] = deque()
        slots = self.slots["compressed"]
        while True:
            while len(asked) < self.settings.window:
                # A thread with nothing in flight waits for work, and then for room. A thread with requests in flight
                # waits for neither.
                slot = slots.acquire(block=False) if asked else None
                piece = self._next_piece(block=not asked) if slot is not None or not asked else None
                if piece is None:
                    if slot is not None:
                        slots.release(slot)
                    break
                slot = slot if slot is not None else slots.acquire()
                assert slot is not None
                piece.slots["compressed"] = slot
                reader = piece.fetch.source.reader(thread)
                try:
                    requested = reader.request(piece.fetch.keys[piece.block], piece.index)
                except StoreFailure:
                    self._end(piece, ok=False)
                    self._forget_lost(asked)
                else:
                    asked.append((reader, piece, requested))
            if asked:
                reader, piece, _ = asked.popleft()
                self._receive_one(reader, piece, counters)
                self._forget_lost(asked)

    def _receive_one(self, reader: PieceReader, piece: Piece, counters: StageCounters) -> None:
        buffer = piece.slots["compressed"].memory
        source = piece.fetch.source
        bound = min(len(buffer), source.codec.max_stored_bytes(source.layout.raw_bytes(piece.index)))
        size = None
        try:
            with counters.working():
                size = self.engine.receive(reader, buffer[:bound])
        except StoreFailure as error:
            # Else it is no fault of the block. The store has counted and logged it.
            if isinstance(error, ValueTooLarge) or (isinstance(error, ErrorReply) and error.code == "WRONGTYPE"):
                source.damaged(piece.fetch.keys[piece.block], str(error))
        else:
            if size is None:
                source.incomplete(piece.fetch.keys[piece.block])
        if size is None:
            self._end(piece, ok=False)
            return
        counters.bytes += size
        counters.pieces += 1
        piece.stored = buffer[:size]
        self._pass_on(piece, "decompress")
        if self._read_limit is not None:
            self._read_limit.wait(size)

    def _forget_lost(self, asked: deque[tuple[PieceReader, Piece, Requested]]) -> None:
        """Forget what was requested on connections that have failed."""
        lost = [entry for entry in asked if entry[2].is_lost]
        for entry in lost:
            asked.remove(entry)
            self._end(entry[1], ok=False)

    def _next_piece(self, block: bool) -> Piece | None:
        with self._more:
            while True:
                if self._untaken:
                    return self._untaken.popleft()
                fetch = None
                if self.settings.pipelined or not self._under_way:
                    fetch = next(filter(self._may_take, self._fetches), None)
                if fetch is None:
                    if not block:
                        return None
                    self._more.wait()
                    continue
                piece = fetch.take()
                if piece is None:
                    self._fetches.remove(fetch)
                elif self.settings.pipelined:
                    if fetch.destination.can_stall:
                        self._of_source[fetch.source] += 1
                    return piece
                else:
                    self._take_block(piece)

    def _may_take(self, fetch: Fetch) -> bool:
        """Whether a fetch has not used up its engine's share of the slots."""
        if not fetch.destination.can_stall:
            return True
        # Half of what is left, and never the last one.
        return self._of_source[fetch.source] < self._num_slots - self._of_source.total() - 1

    def _take_block(self, first: Piece) -> None:
        self._untaken.append(first)
        for _ in range(first.fetch.source.layout.num_pieces - 1):
            if (piece := first.fetch.take()) is None:
                break
            self._untaken.append(piece)
        self._under_way = len(self._untaken)

    def _work(self, stage: str, step: Callable[[Piece, StageCounters], None], counters: StageCounters) -> None:
        """One thread of a stage between the first and the last."""
        waiting = self._queues[stage]
        while True:
            piece = waiting.get()
            if not piece.fetch.wants(piece):
                self._end(piece, ok=False)
                continue
            try:
                step(piece, counters)
            except CodecError as error:
                piece.fetch.source.damaged(piece.fetch.keys[piece.block], str(error))
                self._end(piece, ok=False)
                continue
            counters.pieces += 1
            counters.bytes += _bytes_out(stage, piece)
            self._pass_on(piece, STAGES[STAGES.index(stage) + 1])

    def _decompress(self, piece: Piece, counters: StageCounters) -> None:
        source, stored = piece.fetch.source, piece.stored
        assert stored is not None
        with counters.working():
            piece.header = source.codec.parse(stored, piece.index, piece.fetch.keys[piece.block])
        slot = self.slots["decompressed"].acquire()
        assert slot is not None
        piece.slots["decompressed"] = slot
        with counters.working():
            self.engine.decompress(source.codec, stored, piece.header, slot.memory)

    def _dequantize(self, piece: Piece, counters: StageCounters) -> None:
        source, stored, header = piece.fetch.source, piece.stored, piece.header
        assert stored is not None and header is not None
        start, end = source.layout.piece(piece.index)
        out = piece.fetch.destination.window(piece.block, start, end) if self.settings.direct else None
        if out is None:
            slot = self.slots["dequantized"].acquire()
            assert slot is not None
            piece.slots["dequantized"] = slot
            out = slot.memory[: end - start]
        with counters.working():
            self.engine.dequantize(source.codec, stored, header, piece.slots["decompressed"].memory, out)
        for name in ("compressed", "decompressed"):
            self.slots[name].release(piece.slots.pop(name))

    def _deliver(self, counters: StageCounters) -> None:
        waiting = self._queues["deliver"]
        while True:
            piece = waiting.get()
            fetch, slot = piece.fetch, piece.slots.get("dequantized")
            if not fetch.wants(piece):
                self._end(piece, ok=False)
            elif slot is None:
                self._delivered(piece, counters, ok=True)
            else:
                start, end = fetch.source.layout.piece(piece.index)
                data, on_end = slot.memory[: end - start], partial(self._delivered, piece, counters)
                with counters.working():
                    self.engine.deliver(fetch.destination, piece.block, start, data, on_end)

    def _delivered(self, piece: Piece, counters: StageCounters, ok: bool) -> None:
        with self._more:
            counters.pieces += ok
            counters.bytes += ok * piece.fetch.source.layout.raw_bytes(piece.index)
        self._end(piece, ok)

    def _pass_on(self, piece: Piece, stage: str) -> None:
        if self.settings.pipelined:
            self._queues[stage].put(piece)
            return
        with self._more:
            self._parked.append((piece, stage))
            self._go_on_together()

    def _end(self, piece: Piece, ok: bool) -> None:
        for name, slot in piece.slots.items():
            self.slots[name].release(slot)
        piece.slots.clear()
        piece.stored = None
        fetch = piece.fetch
        if self.settings.pipelined and fetch.destination.can_stall:
            with self._more:
                self._of_source[fetch.source] -= 1
                if not self._of_source[fetch.source]:
                    del self._of_source[fetch.source]
                self._more.notify_all()
        fetch.end_piece(piece, ok)
        if not self.settings.pipelined:
            with self._more:
                self._under_way -= 1
                self._go_on_together()
                self._more.notify_all()

    def _go_on_together(self) -> None:
        """Without pipelining: begin the next stage once all pieces of the block have ended the one before."""
        if len(self._parked) == self._under_way:
            parked, self._parked = self._parked, []
            for piece, stage in parked:
                self._queues[stage].put(piece)


def _bytes_out(stage: str, piece: Piece) -> int:
    if stage == "decompress":
        assert piece.header is not None
        return piece.header.mid_bytes
    return piece.fetch.source.layout.raw_bytes(piece.index)


def start_thread(
    name: str, cores: Sequence[int] | None, index: int, run: Callable[..., None], *args: Any
) -> threading.Thread:
    """Start a daemon thread, on one of `cores` if there are any. Its death ends the process, because a pipeline
    without one of its threads would never answer."""

    def body() -> None:
        if cores:
            core = cores[index % len(cores)]
            try:
                os.sched_setaffinity(0, {core})
            except (AttributeError, OSError) as error:
                logger.warning("thread %s is not pinned to core %d: %s", name, core, error)
        try:
            run(*args)
        except BaseException:
            logger.critical("thread %s died", name, exc_info=True)
            os._exit(1)

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread
