"""`PieceSource`: blocks of random KV in a server that the test commands, an engine's memory, and fetches into it."""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from sgl_kernel.kvcodec import ITEM_BYTES
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.codec.registry import make_codec
from sglang.srt.offload.frames import FrameConnection
from sglang.srt.offload.proxy.plane import FrameLink, Plane, PlaneSession, PoolLink
from sglang.srt.offload.proxy.settings import ProxySettings
from sglang.srt.offload.store.object_store import ObjectStore
from sglang.srt.utils.shared_memory import SharedMemory
from support.codec_cases import normal_kv
from support.store_servers import FakeConnection, FakeServer, single

TIMEOUT_S = 120.0
# Those that `close_sources` has not closed.
_made: list[PieceSource] = []


@pytest.fixture
def close_sources() -> Iterator[None]:
    """At the end of a test, which has closed the sessions: a process of all tests has few descriptors."""
    yield
    while _made:
        _made.pop().close()


@contextmanager
def plane(**settings: object) -> Iterator[Plane]:
    """With the smallest buffers that its threads can do with; without pipelining, a block's pieces fit in. All slots
    are free at the end."""
    size = 4 * (settings.get("receive_threads", ProxySettings.receive_threads) + 1) << 20  # type: ignore[operator]
    if not settings.get("pipelined", True):
        size = 24 << 20
    buffers = {f"{name}_buffer_bytes": size for name in ("compressed", "decompressed", "dequantized")}
    made = Plane(ProxySettings(**buffers, **settings))  # type: ignore[arg-type]
    yield made
    assert is_settled(made)
    made.close()


def is_settled(plane: Plane) -> bool:
    stats = plane.stats()
    return not plane.is_reading and not any(v for name, v in stats.items() if name.endswith(("_used", "_queue")))


class PieceSource:
    """A `Source`. expected: (num_blocks, block bytes) uint8, what a fetch has to bring. pieces: by name in the store;
    a test changes them. reply: what the server sends in place of a value. asked: set by the first command.
    hold: cleared, the server waits. late: the
    most seconds for a piece. lost: how often a connection breaks. server: another one's."""

    def __init__(
        self,
        seed: int,
        num_blocks: int,
        layout: BlockLayout,
        codec: dict[str, object] | None = None,
        mac_key: bytes = b"",
        late: float = 0,
        lost: float = 0,
        timeout_s: float = TIMEOUT_S,
        server: FakeServer | None = None,
        ttl_s: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        self.layout = layout
        self.codec = make_codec(codec or {"codec": "lossless"}, layout, mac_key)
        self.keys = [i.to_bytes(16, "little") for i in range(num_blocks)]
        self.pool = SharedMemory.allocate(max(1, 4 * num_blocks) * layout.block_bytes, "pool")
        self.memory = self.pool.memory
        self.memory[:] = 0xEE
        self.late, self.lost = late, lost
        self.reply = b""
        self.damages: list[tuple[bytes, str]] = []
        self.incompletes: list[bytes] = []
        self.pongs: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.hold = threading.Event()
        self.hold.set()
        self.asked = threading.Event()
        self._lock = threading.Lock()
        self.server = server or FakeServer(single(self._answer))
        self._engines: list[socket.socket] = []
        _made.append(self)
        self.store = ObjectStore(self.server.address, b"test", layout.num_pieces, timeout_s, self.codec.spec, ttl_s)
        self.pieces: dict[bytes, bytes] = {}
        blocks = []
        for at, key in enumerate(self.keys):
            raw = normal_kv(layout, seed + at) if layout.page.dtype in ITEM_BYTES else few_bytes(layout, seed + at)
            decoded = np.empty_like(raw)
            for i in range(layout.num_pieces):
                start, end = layout.piece(i)
                out = np.empty(self.codec.max_stored_bytes(end - start), np.uint8)
                stored = out[: self.codec.encode(raw[start:end], i, key, out)]
                self.pieces[self.store.name_of(key, i)] = stored.tobytes()
                decoded[start:end] = self.decoded(stored, i, key)
            blocks.append(decoded)
        self.expected = np.array(blocks)

    def decoded(self, stored: np.ndarray, piece: int, key: bytes) -> np.ndarray:
        """As the codec's reference has it. Raises CodecError."""
        header = self.codec.parse(stored, piece, key)
        stages = np.empty(header.mid_bytes, np.uint8), np.empty(header.raw_bytes, np.uint8)
        self.codec.decompress(stored, header, stages[0])
        self.codec.dequantize(stored, header, *stages)
        return stages[1]

    def name(self, block: int, piece: int) -> bytes:
        return self.store.name_of(self.keys[block], piece)

    def change(self, block: int, piece: int, at: int, bits: int = 0x40) -> None:
        value = bytearray(self.pieces[self.name(block, piece)])
        value[at] ^= bits
        self.pieces[self.name(block, piece)] = bytes(value)

    @property
    def pages(self) -> np.ndarray:
        return self.memory.reshape(-1, self.layout.page.page_bytes)

    def open(self, plane: Plane) -> PlaneSession:
        mine, theirs = socket.socketpair()
        self._engines.append(mine)
        with theirs:
            return plane.open(self, PoolLink(self.pool.fd, len(self.pages), theirs.fileno()))

    def engine_sees_the_end(self) -> bool:
        self._engines[-1].settimeout(TIMEOUT_S)
        return self._engines[-1].recv(1) == b""

    def close(self) -> None:
        self.store.close()
        if isinstance(self.server, FakeServer):
            self.server.close()
        for engine in self._engines:
            engine.close()

    def note_damaged(self, key: bytes, why: str) -> None:
        self.damages.append((key, why))

    def note_incomplete(self, key: bytes) -> None:
        self.incompletes.append(key)

    def note_alive(self) -> None:
        self.pongs.put(None)

    def _answer(self, connection: FakeConnection, command: list[bytes]) -> None:
        assert command[0] == b"GET" or (command[0], command[2:]) == (
            b"GETEX",
            [b"EX", b"%d" % self.store.pieces_ttl_s],
        )
        self.asked.set()
        self.hold.wait(TIMEOUT_S)
        with self._lock:
            is_lost, seconds = self.random.random() < self.lost, self.random.random() * self.late
        time.sleep(seconds)
        if is_lost:
            raise OSError
        value = self.pieces.get(command[1])
        reply = b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
        connection.send(self.reply or reply)


class Asked:
    """A fetch. counts: what it ended with, which happens once."""

    def __init__(
        self, source: PieceSource, session: PlaneSession, number: int, blocks: Sequence[int], pages: np.ndarray
    ) -> None:
        self.source = source
        self.blocks = blocks
        self.pages = pages
        self.counts: list[int] = []
        self._ended = threading.Event()
        keys = b"".join(source.keys[b] for b in blocks)
        session.get(number, keys, pages.astype(np.int32).tobytes(), self._end)

    def wait(self) -> int:
        assert self._ended.wait(TIMEOUT_S), "the fetch does not end"
        return self.counts[0]

    def came(self, count: int) -> bool:
        """Whether the first blocks are as stored."""
        return all(
            (self.source.pages[self.pages[i]].ravel() == self.source.expected[self.blocks[i]]).all()
            for i in range(count)
        )

    def _end(self, count: int) -> None:
        self.counts.append(count)
        self._ended.set()


def few_bytes(layout: BlockLayout, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4, layout.block_bytes, np.uint8)


def some_pages(source: PieceSource, num_blocks: int, rng: random.Random, in_runs: bool = False) -> np.ndarray:
    """(num_blocks, pages of a block), all different."""
    num = source.layout.num_pages
    if in_runs:
        starts = rng.sample(range(len(source.pages) // num), num_blocks)
        return np.array([[s * num + i for i in range(num)] for s in starts])
    return np.array(rng.sample(range(len(source.pages)), num_blocks * num)).reshape(num_blocks, -1)


def frame_pair(secret: bytes = b"secret") -> tuple[FrameConnection, FrameConnection]:
    """A relay's and a proxy's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    made: list[FrameConnection] = []
    greeting = threading.Thread(target=lambda: made.append(FrameConnection(theirs, secret, is_proxy=True)))
    greeting.start()
    relay = FrameConnection(ours, secret, is_proxy=False)
    greeting.join()
    return relay, made[0]


def frame_link(proxy: FrameConnection) -> FrameLink:
    return FrameLink(*proxy.hand_over())
