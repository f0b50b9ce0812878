"""A `Source` whose pieces lie in a dict: some are missing, damaged or late, in a seeded way."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.codec.registry import make_codec
from sglang.srt.offload.store.resp import StoreLost


@dataclass
class FakeRequest:
    name: tuple[bytes, int]
    is_lost: bool = False


class FakeReader:
    def __init__(self, source: FakeSource) -> None:
        self.source = source
        self._asked: deque[FakeRequest] = deque()

    def request(self, key: bytes, piece: int) -> FakeRequest:
        self._fail()
        self._asked.append(request := FakeRequest((key, piece)))
        return request

    def receive(self, buffer: memoryview) -> int | None:
        asked = self._asked.popleft()
        self.source.wait(asked.name)
        self._fail()
        value = self.source.pieces.get(asked.name)
        if value is None:
            return None
        assert len(value) <= len(buffer)
        buffer[: len(value)] = value
        return len(value)

    def _fail(self) -> None:
        if self.source.is_lost():
            for asked in self._asked:
                asked.is_lost = True
            self._asked.clear()
            raise StoreLost("gone, in a test")


class FakeSource:
    """num_blocks blocks of random KV; expected: (num_blocks, block bytes) uint8, what a fetch has to bring."""

    def __init__(
        self,
        seed: int,
        num_blocks: int,
        layout: BlockLayout,
        codec: str = "lossless",
        late: float = 0,
        lost: float = 0,
    ) -> None:
        self.random = random.Random(seed)
        self.layout = layout
        self.codec = make_codec({"codec": codec}, layout)
        self.keys = [i.to_bytes(16, "little") for i in range(num_blocks)]
        self.memory = np.full(4 * num_blocks * layout.block_bytes, 0xEE, np.uint8)
        self.late, self.lost = late, lost
        self.damages: list[bytes] = []
        self.incompletes: list[bytes] = []
        self.hold = threading.Event()
        self.hold.set()
        self._lock = threading.Lock()
        values = np.random.default_rng(seed).standard_normal((num_blocks, layout.block_bytes // 4), np.float32)
        self.expected = values.view(np.uint8)
        self.pieces: dict[tuple[bytes, int], bytes] = {}
        for key, block in zip(self.keys, self.expected):
            for i in range(layout.num_pieces):
                start, end = layout.piece(i)
                out = np.empty(self.codec.max_stored_bytes(end - start), np.uint8)
                self.pieces[key, i] = out[: self.codec.encode(block[start:end], i, key, out)].tobytes()

    def reader(self, thread: int) -> FakeReader:
        if not hasattr(self, "_readers"):
            self._readers: dict[int, FakeReader] = {}
        return self._readers.setdefault(thread, FakeReader(self))

    def damaged(self, key: bytes, why: str) -> None:
        self.damages.append(key)

    def incomplete(self, key: bytes) -> None:
        self.incompletes.append(key)

    def wait(self, asked: tuple[bytes, int]) -> None:
        self.hold.wait(120)
        if self.late:
            with self._lock:
                seconds = self.random.random() * self.late
            time.sleep(seconds)

    def is_lost(self) -> bool:
        with self._lock:
            return self.random.random() < self.lost
