"""The data plane as a program for another machine, and the end of its frames beside an engine. What the plane does is
tested in test/srt/offload/proxy/test_plane.py."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sgl_kernel.kvplane import FrameError, FrameReceiver
from sglang.srt.offload import wire
from sglang.srt.offload.frames import _HEADER, FrameConnection, FrameKind, _tag
from support.plane_rig import frame_pair

EM_AARCH64 = 183


def compiler_for_aarch64() -> str | None:
    if found := shutil.which("aarch64-linux-gnu-gcc"):
        return found
    if importlib.util.find_spec("ziglang") is not None:
        return f"{sys.executable} -m ziglang cc -target aarch64-linux-gnu.2.31"
    return None


@pytest.mark.slow
def test_it_compiles_for_the_cores_of_a_bluefield(tmp_path: Path):
    compiler = compiler_for_aarch64()
    if compiler is None:
        pytest.skip("no C compiler for aarch64: pip install ziglang")
    out = tmp_path / "kvplane"
    arguments = ["--out", str(out), "--compiler", f"{compiler} -Wall -Werror"]
    subprocess.run([sys.executable, "-m", "sgl_kernel.kvplane", *arguments], check=True)
    program = out.read_bytes()
    assert program[:4] == b"\x7fELF" and struct.unpack_from("<H", program, 18) == (EM_AARCH64,)
    assert b"libpython" not in program


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path):
    arguments = ["--out", str(tmp_path / "kvplane"), "--compiler", "no-such-cc"]
    done = subprocess.run([sys.executable, "-m", "sgl_kernel.kvplane", *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and "no-such-cc" in done.stderr and "Traceback" not in done.stderr


# -- frames beside an engine ----------------------------------------------------------------------------------------

PAGE, PAGES_PER_BLOCK, PIECE, NUM_PIECES, NUM_BLOCKS = 1000, 6, 2200, 3, 4
BLOCK = PAGE * PAGES_PER_BLOCK


class Beside:
    """An engine's pool of 40 pages, a receiver, and a proxy that sends to it."""

    def __init__(self) -> None:
        self.pool = np.full(40 * PAGE, 0xEE, np.uint8)
        self.relay, self.proxy = frame_pair()
        self.receiver = FrameReceiver(
            *self.relay.hand_over_receiving(),
            self.pool,
            block_bytes=BLOCK,
            page_bytes=PAGE,
            pages_per_block=PAGES_PER_BLOCK,
            piece_bytes=PIECE,
            num_pieces=NUM_PIECES,
        )
        self.sent = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, BLOCK), np.uint8)

    def pages(self, seed: int) -> np.ndarray:
        chosen = random.Random(seed).sample(range(40), NUM_BLOCKS * PAGES_PER_BLOCK)
        return np.array(chosen, np.int32).reshape(NUM_BLOCKS, -1)

    def send(self, operation: int, block: int, start: int, end: int) -> None:
        self.proxy.send_data(operation, block, start, self.sent[block, start:end])

    def receive_until_message(self) -> bytes:
        # After the data, which messages would pass.
        while self.proxy._data:
            pass
        self.proxy.send(wire.Done(1, 1))
        return self.receiver.receive()


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside()
    yield made
    made.proxy.shut()
    made.relay.shut()
    made.receiver.close()
    made.proxy.close()
    made.relay.close()


def test_bytes_come_to_their_pages_and_messages_to_the_caller(beside: Beside):
    pages = beside.pages(1)
    beside.receiver.open(7, pages)
    places = [(block, piece * PIECE) for block in range(NUM_BLOCKS) for piece in range(NUM_PIECES)]
    random.Random(2).shuffle(places)
    for block, start in places:
        end = min(start + PIECE, BLOCK)
        cut = start + random.Random(start).randint(1, end - start - 1)
        beside.send(7, block, start, cut)
        beside.send(7, block, cut, end)
    assert wire.decode(beside.receive_until_message(), wire.Done) == wire.Done(1, 1)
    memory = beside.pool.reshape(-1, PAGE)
    assert all((memory[pages[i]].ravel() == beside.sent[i]).all() for i in range(NUM_BLOCKS))
    others = np.ones(40, bool)
    others[pages] = False
    assert (memory[others] == 0xEE).all()
    assert beside.receiver.end(7) == NUM_BLOCKS and beside.receiver.end(7) is None
    large = wire.Stats({f"{i}": i for i in range(100_000)})
    beside.proxy.send(large)
    assert wire.decode(beside.receiver.receive(), wire.Stats) == large


def test_what_has_not_come_whole_does_not_count(beside: Beside):
    beside.receiver.open(7, beside.pages(1))
    beside.receiver.open(8, beside.pages(1))
    for start in (0, PIECE):
        beside.send(7, 0, start, start + PIECE)
    for piece in range(NUM_PIECES):
        beside.send(8, 1, piece * PIECE, min((piece + 1) * PIECE, BLOCK))
        beside.send(8, 0, piece * PIECE, min((piece + 1) * PIECE, BLOCK))
    beside.receive_until_message()
    assert beside.receiver.end(7) == 0 and beside.receiver.end(8) == 2


def test_bytes_of_an_ended_fetch_are_dropped(beside: Beside):
    beside.receiver.open(7, beside.pages(1))
    assert beside.receiver.end(7) == 0
    beside.send(7, 0, 0, PIECE)
    beside.receive_until_message()
    assert (beside.pool == 0xEE).all()


@pytest.mark.parametrize(
    ("block", "start", "end"),
    [(0, 100, 200), (NUM_BLOCKS, 0, 10), (0, 0, PIECE + 1), (0, NUM_PIECES * PIECE, NUM_PIECES * PIECE + 10)],
    ids=["not the next bytes", "no block", "more than a piece", "no piece"],
)
def test_bytes_that_nothing_asked_for_end_the_session(beside: Beside, block: int, start: int, end: int):
    beside.receiver.open(7, beside.pages(1))
    data = np.zeros(end - start, np.uint8)
    beside.proxy.send_data(7, block, start, data)
    with pytest.raises(FrameError, match="for no piece"):
        beside.receiver.receive()
    assert (beside.pool == 0xEE).all()


@pytest.mark.parametrize("seed", range(int(os.environ.get("SEED", 0)), int(os.environ.get("SEED", 0)) + 20))
def test_changed_bytes_end_the_session_and_are_not_written(beside: Beside, seed: int):
    print(f"seed {seed}")
    beside.receiver.open(7, beside.pages(1))
    rng = random.Random(seed)
    frame = bytearray(made_frame(beside.proxy, 7, beside.sent[0, :PIECE]))
    frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    beside.proxy._sock.sendall(frame)
    beside.proxy.shut()
    with pytest.raises(FrameError):
        beside.receiver.receive()
    assert (beside.pool == 0xEE).all()


def test_a_frame_comes_once(beside: Beside):
    beside.receiver.open(7, beside.pages(1))
    frame = made_frame(beside.proxy, 7, beside.sent[0, :100])
    beside.proxy._sock.sendall(frame + frame)
    with pytest.raises(FrameError, match="this side's key"):
        beside.receiver.receive()


def made_frame(proxy: FrameConnection, operation: int, data: np.ndarray) -> bytes:
    header = _HEADER.pack(len(data), 0, 0, FrameKind.DATA, operation)
    return header + data.tobytes() + _tag(proxy._send_key, proxy._num_sent, header, data.tobytes())
