"""`TcpChannel`: a session's way to an engine on another machine, through the relay beside that engine.

A `Get` is a credit: the proxy may send its blocks' bytes until it has answered, and nothing else. The relay has the
pages, which the proxy never learns, and writes only what a credit covers that is still open there. Of a `Put` the
proxy pulls one piece after another, a few ahead.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import msgspec
import numpy as np

from sglang.srt.offload import wire
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.frames import FrameConnection, FrameKind, WrongKeyError
from sglang.srt.offload.proxy.origin import Origin, OriginLostError
from sglang.srt.offload.proxy.plane import FrameLink, PlaneSession

# Pieces of a write that are asked for at a time.
_PULLED_AHEAD = 3


class TcpChannel:
    """frames: the other side has greeted. patience_s: how long an engine may take for a piece of a
    write that it was asked for."""

    def __init__(self, frames: FrameConnection, patience_s: float) -> None:
        self._frames = frames
        self._patience_s = patience_s
        self._origins: dict[int, _TcpOrigin] = {}

    def receive_hello(self) -> None:
        """Before the session. Raises WireError for a stranger."""
        try:
            frame = self._frames.receive()
        except WrongKeyError:
            self._frames.refuse_key()
            raise
        hello: wire.Hello = wire.decode(frame.payload, wire.Hello)
        if len(hello.mac_key) > wire.MAC_KEY_BYTES:
            raise wire.WireError("the first message has a key that is too long")
        self._hello = msgspec.structs.replace(hello, mac_key=self._frames.masked(hello.mac_key))

    def begin(self) -> wire.Hello:
        return self._hello

    def attach(self, hello: wire.Hello, layout: BlockLayout) -> None:
        self._layout = layout

    def receive(self) -> wire.ToProxy:
        while True:
            frame = self._frames.receive()
            if frame.kind == FrameKind.DATA:
                if (origin := self._origins.get(frame.operation)) is not None:
                    origin.take(frame.block, frame.start, np.frombuffer(frame.payload, np.uint8))
                continue
            message = wire.decode(frame.payload, wire.ToProxy | wire.NoData)
            if not isinstance(message, wire.NoData):
                return message
            if (origin := self._origins.get(message.id)) is not None:
                origin.lose()

    def send(self, message: wire.Welcome | wire.Refused | wire.ToEngine) -> None:
        if isinstance(message, wire.Done):
            self._origins.pop(message.id, None)
        self._frames.send(message)

    def link(self) -> FrameLink:
        return FrameLink(*self._frames.hand_over())

    def linked(self, session: PlaneSession) -> None:
        self._frames.send_through(session.send)

    def check_get(self, message: wire.Get, num_blocks: int) -> None:
        _check(message, num_blocks)

    def origin(self, message: wire.Put, num_blocks: int) -> Origin:
        _check(message, num_blocks)
        origin = self._origins[message.id] = _TcpOrigin(self._frames, message.id, self._layout, self._patience_s)
        return origin

    def shut(self) -> None:
        self._frames.shut()

    def end_waits(self) -> None:
        self._frames.shut()
        for origin in list(self._origins.values()):
            origin.lose()

    def close(self) -> None:
        self._frames.close()


def _check(message: wire.Get | wire.Put, num_blocks: int) -> None:
    if message.pages or not num_blocks:
        raise wire.WireError(f"{type(message).__name__} {message.id} names pages, or no blocks")


@dataclass
class _Pulled:
    """A piece of `size` bytes that was asked for. memory: (at least size,) uint8. missing: bytes that have not come;
    they come in order."""

    memory: np.ndarray
    size: int
    missing: int


class _TcpOrigin:
    def __init__(self, frames: FrameConnection, id: int, layout: BlockLayout, patience_s: float) -> None:
        self._frames = frames
        self._id = id
        self._layout = layout
        self._patience_s = patience_s
        self._changed = threading.Condition()
        # By block and first byte.
        self._pulled: dict[tuple[int, int], _Pulled] = {}
        # By block: the first piece that was not asked for.
        self._next: dict[int, int] = {}
        # Memory of pieces that were read, to be used again.
        self._spare: list[np.ndarray] = []
        # What each thread has read last.
        self._reading: dict[int, np.ndarray] = {}
        self._is_lost = False

    def read(self, block: int, start: int, end: int, buffer: np.ndarray) -> np.ndarray:
        layout, thread = self._layout, threading.get_ident()
        until = min(start // layout.piece_bytes + _PULLED_AHEAD, layout.num_pieces)
        with self._changed:
            if (read_before := self._reading.pop(thread, None)) is not None:
                self._spare.append(read_before)
            # Another thread may have asked for these, and a faster one may have read them.
            lacking = range(self._next.get(block, 0), until)
            self._next[block] = max(lacking.start, until)
            for each in lacking:
                self._expect(block, *layout.piece(each))
        for each in lacking:
            self._frames.send(wire.Pull(self._id, block, *layout.piece(each)))
        with self._changed:
            pulled = self._pulled[block, start]
            # In all, as another engine's writes may wait behind it.
            if not self._changed.wait_for(lambda: not pulled.missing or self._is_lost, self._patience_s):
                raise OriginLostError("the engine is too slow")
            if self._is_lost:
                raise OriginLostError("the engine has gone, or has given the write up")
            del self._pulled[block, start]
            self._reading[thread] = pulled.memory
        return pulled.memory[: end - start]

    def take(self, block: int, start: int, data: np.ndarray) -> None:
        """Bytes that have come. Raises WireError unless they were asked for."""
        first = start - start % self._layout.piece_bytes
        with self._changed:
            pulled = self._pulled.get((block, first))
            if pulled is None or len(data) > pulled.missing or start - first != pulled.size - pulled.missing:
                raise wire.WireError("bytes of a write came that were not asked for, or out of order")
            pulled.memory[start - first :][: len(data)] = data
            pulled.missing -= len(data)
            self._changed.notify_all()

    def lose(self) -> None:
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()

    def _expect(self, block: int, start: int, end: int) -> None:
        memory = self._spare.pop() if self._spare else np.empty(self._layout.piece_bytes, np.uint8)
        self._pulled[block, start] = _Pulled(memory, end - start, end - start)
