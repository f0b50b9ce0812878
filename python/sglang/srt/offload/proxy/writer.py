"""`Writer`: encodes blocks from the engine's pages and stores them, on threads of its own. Reads go first.

Owns the blocks that are to be written. Between two pieces it lets fetches go first, as long as there are any.
"""

from __future__ import annotations

import queue
import threading
import time
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


class Writer:
    """is_reading: whether fetches wait."""

    def __init__(self, settings: ProxySettings, is_reading: Callable[[], bool]) -> None:
        self._is_reading = is_reading
        self._limit = RateLimit(settings.max_write_gbps)
        self._writes: queue.SimpleQueue[Write] = queue.SimpleQueue()
        self.raw_bytes = 0
        self.stored_bytes = 0
        self.waited_s = 0.0
        self._lock = threading.Lock()
        for i in range(settings.write_threads):
            start_thread(f"write-{i}", settings.cores.get("write"), i, self._run, i)

    def submit(self, write: Write) -> None:
        self._writes.put(write)

    def stats(self) -> dict[str, int]:
        """raw: before coding."""
        return {
            "write_queue": self._writes.qsize(),
            "write_raw_bytes": self.raw_bytes,
            "write_bytes": self.stored_bytes,
            "write_waited_us": int(1e6 * self.waited_s),
        }

    def _run(self, thread: int) -> None:
        raw, coded = np.empty(PIECE_BYTES, np.uint8), np.empty(0, np.uint8)
        while True:
            write = self._writes.get()
            sink, count = write.sink, 0
            # Blocks that are there, or that another engine has stored meanwhile, are not encoded.
            stored = sink.store.stored(write.keys) if not write.is_given_up else []
            room = sink.layout.num_pieces * sink.codec.max_stored_bytes(sink.layout.piece_bytes)
            if len(coded) < room:
                coded = np.empty(room, np.uint8)
            while count < len(write.keys) and not write.is_given_up:
                if not stored[count]:
                    try:
                        pieces = self._encoded(write, count, raw, coded)
                    except OriginLostError:
                        break
                    if not sink.block_writer(thread).write(write.keys[count], pieces):
                        break
                count += 1
            write.on_end(count)

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
            with self._lock:
                self.raw_bytes += end - start
                self.stored_bytes += size
        return pieces

    def _give_way(self) -> None:
        began = time.monotonic()
        while self._is_reading() and time.monotonic() - began < MAX_PATIENCE_S:
            time.sleep(_LOOK_AGAIN_S)
        with self._lock:
            self.waited_s += time.monotonic() - began
