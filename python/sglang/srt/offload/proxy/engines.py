"""`StageEngine`: does the work of each stage. The pipeline decides which piece is worked on, when and on which
thread.

An engine for a SmartNIC implements the same calls over its accelerators: see docs/design/remote.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from sglang.srt.offload.codec.base import Codec
from sglang.srt.offload.codec.header import PieceHeader
from sglang.srt.offload.proxy.destination import Destination
from sglang.srt.offload.store.object_store import PieceReader


class StageEngine(Protocol):
    """Called from several threads at once, for different pieces. Buffers are the caller's, until the call is over."""

    def receive(self, reader: PieceReader, buffer: np.ndarray) -> int | None:
        """Read the next requested piece into buffer, (n,) uint8. Returns its size, or None if it is missing. Raises
        the reader's errors."""
        ...

    def decompress(self, codec: Codec, stored: np.ndarray, header: PieceHeader, mid: np.ndarray) -> None:
        """Raises CodecError."""
        ...

    def dequantize(
        self, codec: Codec, stored: np.ndarray, header: PieceHeader, mid: np.ndarray, out: np.ndarray
    ) -> None: ...

    def deliver(
        self, to: Destination, block: int, start: int, data: np.ndarray, on_end: Callable[[bool], None]
    ) -> None:
        """As `Destination.submit`."""
        ...


class SoftwareEngine:
    """Libraries and loops that run without the interpreter's lock, on the cores of the calling threads."""

    def receive(self, reader: PieceReader, buffer: np.ndarray) -> int | None:
        return reader.receive(buffer.data)

    def decompress(self, codec: Codec, stored: np.ndarray, header: PieceHeader, mid: np.ndarray) -> None:
        codec.decompress(stored, header, mid)

    def dequantize(
        self, codec: Codec, stored: np.ndarray, header: PieceHeader, mid: np.ndarray, out: np.ndarray
    ) -> None:
        codec.dequantize(stored, header, mid, out)

    def deliver(
        self, to: Destination, block: int, start: int, data: np.ndarray, on_end: Callable[[bool], None]
    ) -> None:
        to.submit(block, start, data, on_end)


class EmulatedEngine:
    """Does the work as `inner` does, and makes each stage take at least as long as an accelerator that processes one
    piece after another. The shape of a pipeline that it shows is emulated, not measured.

    rates: stage -> bytes per second of its output (receive: of its input). A stage without a rate is not slowed.
    poll_s: the time between two questions to the accelerator whether it is done.
    """

    def __init__(
        self,
        inner: StageEngine,
        rates: Mapping[str, float],
        poll_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._rates = dict(rates)
        self._poll_s = poll_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = dict.fromkeys(rates, 0.0)
        self._lock = threading.Lock()

    def receive(self, reader: PieceReader, buffer: np.ndarray) -> int | None:
        began = self._clock()
        size = self._inner.receive(reader, buffer)
        self._take_time("receive", size or 0, began)
        return size

    def decompress(self, codec: Codec, stored: np.ndarray, header: PieceHeader, mid: np.ndarray) -> None:
        began = self._clock()
        self._inner.decompress(codec, stored, header, mid)
        self._take_time("decompress", header.mid_bytes, began)

    def dequantize(
        self, codec: Codec, stored: np.ndarray, header: PieceHeader, mid: np.ndarray, out: np.ndarray
    ) -> None:
        began = self._clock()
        self._inner.dequantize(codec, stored, header, mid, out)
        self._take_time("dequantize", len(out), began)

    def deliver(
        self, to: Destination, block: int, start: int, data: np.ndarray, on_end: Callable[[bool], None]
    ) -> None:
        began = self._clock()

        def end(is_delivered: bool) -> None:
            self._take_time("deliver", len(data), began)
            on_end(is_delivered)

        self._inner.deliver(to, block, start, data, end)

    def _take_time(self, stage: str, num_bytes: int, began: float) -> None:
        rate = self._rates.get(stage)
        if rate is None:
            return
        with self._lock:
            end = self._free_at[stage] = max(began, self._free_at[stage]) + num_bytes / rate
        while (left := end - self._clock()) > 0:
            self._sleep(max(left, self._poll_s))
