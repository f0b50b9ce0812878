"""`Writer`: encodes blocks from the engine's pages and stores them, on threads of its own. Reads go first.

Owns the blocks that are to be written. Between two pieces it lets fetches go first, as long as there are any.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from sglang.srt.offload.codec.base import Codec
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.proxy.destination import Origin, OriginLostError
from sglang.srt.offload.proxy.pipeline import start_thread
from sglang.srt.offload.proxy.rate_limit import RateLimit
from sglang.srt.offload.proxy.settings import PIECE_BYTES, ProxySettings
from sglang.srt.offload.store.object_store import BlockWriter, ObjectStore

# Seconds after which a write does not give way any more, because its pages would stay pinned as long as others read.
MAX_PATIENCE_S = 1.0
_LOOK_AGAIN_S = 0.002


class Sink(Protocol):
    """A session as the writer sees it: how its blocks are coded, and where they are stored."""

    layout: BlockLayout
    codec: Codec
    store: ObjectStore

    def block_writer(self, thread: int) -> BlockWriter:
        """The connection of one writing thread to the store."""
        ...


class Write:
    """Blocks to store. It ends once, from a thread of the writer, with the number of leading blocks that are stored.
    keys: 16 bytes each, of the origin's blocks."""

    def __init__(self, sink: Sink, keys: Sequence[bytes], origin: Origin, on_end: Callable[[int], None]) -> None:
        self.sink = sink
        self.keys = keys
        self.origin = origin
        self.on_end = on_end
        self.is_given_up = False
        # Blocks from this one on are not stored.
        self.limit = len(keys)
        # Blocks that no thread has ended.
        self.num_open = 0


class Writer:
    """is_reading: whether fetches wait. The threads take block after block, of the oldest write first, so that one
    write uses all of them."""

    def __init__(self, settings: ProxySettings, is_reading: Callable[[], bool]) -> None:
        self._is_reading = is_reading
        self._limit = RateLimit(settings.max_write_gbps)
        # Held for everything below.
        self._changed = threading.Condition()
        self._writes: deque[Write] = deque()
        self._blocks: deque[tuple[Write, int]] = deque()
        self.raw_bytes = 0
        self.stored_bytes = 0
        self.waited_s = 0.0
        for i in range(settings.write_threads):
            start_thread(f"write-{i}", settings.cores.get("write"), i, self._run, i)

    def submit(self, write: Write) -> None:
        with self._changed:
            self._writes.append(write)
            self._changed.notify()

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
                self._changed.wait_for(lambda: self._blocks or self._writes)
                write, block = self._blocks.popleft() if self._blocks else (self._writes.popleft(), None)
            if block is None:
                self._begin(write)
                continue
            layout = write.sink.layout
            room = layout.num_pieces * write.sink.codec.max_stored_bytes(layout.piece_bytes)
            if len(coded) < room:
                coded = np.empty(room, np.uint8)
            self._end_block(write, block, self._store(thread, write, block, raw, coded))

    def _begin(self, write: Write) -> None:
        """Blocks that are there, or that another engine has stored meanwhile, are not encoded."""
        stored = write.sink.store.stored(write.keys) if not write.is_given_up else []
        lacking = [block for block, is_stored in enumerate(stored) if not is_stored]
        with self._changed:
            write.num_open = len(lacking)
            self._blocks.extend((write, block) for block in lacking)
            self._changed.notify_all()
        if not lacking:
            write.on_end(len(stored))

    def _store(self, thread: int, write: Write, block: int, raw: np.ndarray, coded: np.ndarray) -> bool:
        if write.is_given_up or block >= write.limit:
            return False
        try:
            pieces = self._encoded(write, block, raw, coded)
        except OriginLostError:
            return False
        return write.sink.block_writer(thread).write(write.keys[block], pieces)

    def _end_block(self, write: Write, block: int, is_stored: bool) -> None:
        with self._changed:
            write.num_open -= 1
            if not is_stored:
                write.limit = min(write.limit, block)
            is_over = not write.num_open
        if is_over:
            write.on_end(write.limit)

    def _encoded(self, write: Write, block: int, raw: np.ndarray, coded: np.ndarray) -> list[list[memoryview]]:
        """The pieces of a block, in `coded`. raw: a buffer for pieces that do not lie in one run. Raises
        OriginLostError."""
        sink, pieces, at = write.sink, [], 0
        layout = sink.layout
        for index in range(layout.num_pieces):
            self._give_way()
            start, end = layout.piece(index)
            data = write.origin.read(block, start, end, raw)
            size = sink.codec.encode(data, index, write.keys[block], coded[at:])
            pieces.append([coded.data[at : at + size]])
            at += size
            self._limit.wait(size)
            with self._changed:
                self.raw_bytes += end - start
                self.stored_bytes += size
        return pieces

    def _give_way(self) -> None:
        began = time.monotonic()
        while self._is_reading() and time.monotonic() - began < MAX_PATIENCE_S:
            time.sleep(_LOOK_AGAIN_S)
        with self._changed:
            self.waited_s += time.monotonic() - began
