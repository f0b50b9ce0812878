"""`Writer`: encodes blocks from the engine's pages and stores them, on threads of its own. Reads go first.

Owns the blocks that are to be written. Between two pieces it lets fetches go first, as long as there are any.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sglang.srt.offload.codec.base import Codec
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.proxy.origin import Origin, OriginLostError
from sglang.srt.offload.proxy.settings import PIECE_BYTES, ProxySettings, limit_of
from sglang.srt.offload.store.object_store import ObjectStore, ObjectWriter

logger = logging.getLogger(__name__)

# Seconds after which a write does not give way any more, because its pages would stay pinned as long as others read.
MAX_PATIENCE_S = 1.0
_LOOK_AGAIN_S = 0.002


class Sink(Protocol):
    """A session as the writer sees it: how its blocks are coded, and where they are stored."""

    layout: BlockLayout
    codec: Codec
    store: ObjectStore

    def block_writer(self, thread: int) -> ObjectWriter:
        """The connection of one writing thread to the store."""
        ...


class Write:
    """Blocks to store. It ends once, from a thread of the writer, with the number of leading blocks that are stored.
    keys: 16 bytes each, of the origin's blocks. tenant: whose they are."""

    def __init__(
        self,
        sink: Sink,
        keys: Sequence[bytes],
        origin: Origin,
        on_end: Callable[[int], None],
        tenant: bytes = b"",
    ) -> None:
        self.sink = sink
        self.keys = keys
        self.origin = origin
        self.on_end = on_end
        self.tenant = tenant
        self.is_given_up = False
        # Blocks from this one on are not stored.
        self.limit = len(keys)
        # Blocks that no thread has ended.
        self.num_open = 0


@dataclass(eq=False)
class _Block:
    """A block that is being encoded. coded: memory for its pieces, piece_room bytes for each. sizes: what each takes
    of that. next_piece: the first that no thread has taken. num_open: pieces that have not ended."""

    write: Write
    block: int
    coded: np.ndarray
    piece_room: int
    sizes: list[int]
    num_open: int
    next_piece: int = 0
    is_lost: bool = False

    def piece(self, index: int) -> np.ndarray:
        """(piece_room,) uint8"""
        return self.coded[index * self.piece_room : (index + 1) * self.piece_room]


class Writer:
    """is_reading: whether fetches wait. A thread has a block, of the oldest write first. Threads without one encode
    pieces of others' blocks, so that one block uses all of them."""

    def __init__(self, settings: ProxySettings, is_reading: Callable[[], bool]) -> None:
        self._is_reading = is_reading
        self._limit = limit_of(settings.max_write_gbps)
        # Held for everything below.
        self._changed = threading.Condition()
        self._writes: deque[Write] = deque()
        # Blocks that no thread has; and those with pieces that no thread has.
        self._waiting: deque[tuple[Write, int]] = deque()
        self._encoding: deque[_Block] = deque()
        self.raw_bytes = 0
        self.stored_bytes = 0
        self.waited_s = 0.0
        self._is_closed = False
        self._threads = [
            _start_thread(f"write-{i}", settings.cores.get("write"), i, self._run, i)
            for i in range(settings.write_threads)
        ]

    def submit(self, write: Write) -> None:
        with self._changed:
            self._writes.append(write)
            # All, as threads that wait for the pieces of a block wait here too.
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads. After the last write has ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def stats(self) -> dict[str, int]:
        """raw: before coding."""
        with self._changed:
            return {
                "write_queue": len(self._writes),
                "write_raw_bytes": self.raw_bytes,
                "write_bytes": self.stored_bytes,
                "write_waited_us": int(1e6 * self.waited_s),
            }

    def _run(self, thread: int) -> None:
        raw, coded = np.empty(PIECE_BYTES, np.uint8), np.empty(0, np.uint8)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._encoding or self._writes or self._is_closed)
                if self._is_closed:
                    return
                # Blocks first: a thread that has one stores it in the time in which others encode.
                unit = self._waiting.popleft() if self._waiting else None
                begun = self._encoding[0] if unit is None and self._encoding else None
                new = self._writes.popleft() if unit is None and begun is None else None
            if begun is not None:
                self._encode_pieces(begun, raw)
            elif new is not None:
                self._begin(new)
            elif unit is not None:
                write, block = unit
                layout = write.sink.layout
                room = layout.num_pieces * write.sink.codec.max_stored_bytes(layout.piece_bytes)
                if len(coded) < room:
                    coded = np.empty(room, np.uint8)
                self._end_block(write, block, self._store(thread, write, block, raw, coded))

    def _begin(self, write: Write) -> None:
        """Blocks that are there, or that another engine has stored meanwhile, are not encoded."""
        stored: list[bool] = []
        with self._end_alone():
            stored = write.sink.store.stored(write.keys) if not write.is_given_up else []
        lacking = [block for block, is_stored in enumerate(stored) if not is_stored]
        with self._changed:
            write.num_open = len(lacking)
            self._waiting.extend((write, block) for block in lacking)
            self._changed.notify_all()
        if not lacking:
            write.on_end(len(stored))

    def _store(self, thread: int, write: Write, block: int, raw: np.ndarray, coded: np.ndarray) -> bool:
        if write.is_given_up or block >= write.limit:
            return False
        pieces = self._encoded(write, block, raw, coded)
        if pieces is not None:
            with self._end_alone():
                return write.sink.block_writer(thread).write(write.keys[block], pieces, write.tenant)
        return False

    @contextmanager
    def _end_alone(self) -> Iterator[None]:
        """A fault in the store of one session ends its write, and not this thread, which writes for all."""
        try:
            yield
        except Exception:
            logger.exception("a write ends, because of a fault in the proxy")

    def _end_block(self, write: Write, block: int, is_stored: bool) -> None:
        with self._changed:
            write.num_open -= 1
            if not is_stored:
                write.limit = min(write.limit, block)
            is_over = not write.num_open
        if is_over:
            write.on_end(write.limit)

    def _encoded(self, write: Write, block: int, raw: np.ndarray, coded: np.ndarray) -> list[list[memoryview]] | None:
        """The pieces of a block, in `coded`; None if its origin is lost. raw: a buffer for pieces that do not lie in
        one run."""
        layout = write.sink.layout
        num = layout.num_pieces
        piece_room = write.sink.codec.max_stored_bytes(layout.piece_bytes)
        begun = _Block(write, block, coded, piece_room, [0] * num, num)
        with self._changed:
            self._encoding.append(begun)
            self._changed.notify_all()
        self._encode_pieces(begun, raw)
        with self._changed:
            self._changed.wait_for(lambda: not begun.num_open)
        if begun.is_lost:
            return None
        return [[begun.piece(index)[:size].data] for index, size in enumerate(begun.sizes)]

    def _encode_pieces(self, begun: _Block, raw: np.ndarray) -> None:
        """Until no piece is left that no thread has."""
        write, layout = begun.write, begun.write.sink.layout
        while True:
            with self._changed:
                index = begun.next_piece
                begun.next_piece += 1
                if begun.next_piece >= layout.num_pieces and begun in self._encoding:
                    self._encoding.remove(begun)
            if index >= layout.num_pieces:
                return
            start, end = layout.piece(index)
            size, is_lost = 0, begun.is_lost
            try:
                if not is_lost:
                    self._give_way()
                    data = write.origin.read(begun.block, start, end, raw)
                    size = write.sink.codec.encode(data, index, write.keys[begun.block], begun.piece(index))
                    if self._limit is not None:
                        self._limit.wait(size)
            except OriginLostError:
                is_lost = True
            with self._changed:
                begun.sizes[index] = size
                begun.is_lost |= is_lost
                begun.num_open -= 1
                self.raw_bytes += end - start if size else 0
                self.stored_bytes += size
                self._changed.notify_all()

    def _give_way(self) -> None:
        began = time.monotonic()
        while self._is_reading() and time.monotonic() - began < MAX_PATIENCE_S:
            time.sleep(_LOOK_AGAIN_S)
        with self._changed:
            self.waited_s += time.monotonic() - began


def _start_thread(
    name: str, cores: Sequence[int] | None, index: int, run: Callable[..., None], *args: Any
) -> threading.Thread:
    """Start a daemon thread, on one of `cores` if there are any. Its death ends the process, because a writer without
    one of its threads would never answer."""

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
