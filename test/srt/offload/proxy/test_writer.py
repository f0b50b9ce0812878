"""The writer against a store in a dict: all threads work on one write, and a write counts its leading blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from sglang.srt.offload.codec.registry import make_codec
from sglang.srt.offload.proxy.origin import OriginLostError
from sglang.srt.offload.proxy.settings import ProxySettings
from sglang.srt.offload.proxy.writer import Write, Writer
from support.children import wait_until
from support.codec_cases import SMALL, kv_block

NUM = 6
KEYS = [bytes([i]) * 16 for i in range(NUM)]


class FakeStore:
    """refused: blocks that it does not take."""

    def __init__(self, *there: int, refused: Sequence[int] = ()) -> None:
        self.there = {KEYS[i] for i in there}
        self.refused = {KEYS[i] for i in refused}
        self.layout, self.codec = SMALL, make_codec({"codec": "raw"}, SMALL)
        self.store = SimpleNamespace(stored=lambda keys: [key in self.there for key in keys])

    def block_writer(self, thread: int) -> Any:
        return SimpleNamespace(write=self._write)

    def _write(self, key: bytes, pieces: Sequence[Sequence[memoryview]], tenant: bytes) -> bool:
        if key in self.refused:
            return False
        self.there.add(key)
        return True


class FakeOrigin:
    def __init__(self, before_read: Callable[[int], object] = lambda block: None) -> None:
        self._before_read = before_read
        self.blocks_read: list[int] = []

    def read(self, block: int, start: int, end: int, buffer: np.ndarray) -> np.ndarray:
        self._before_read(block)
        self.blocks_read.append(block)
        return np.full(end - start, block, np.uint8)


def store_all(sink: FakeStore, origin: FakeOrigin, **settings: int) -> int:
    counts: list[int] = []
    ended = threading.Event()

    def end(count: int) -> None:
        counts.append(count)
        ended.set()

    writer = Writer(ProxySettings(**settings), lambda: False)
    writer.submit(Write(sink, KEYS, origin, end))  # type: ignore[arg-type]
    assert ended.wait(120) and len(counts) == 1
    writer.close()
    return counts[0]


def test_the_blocks_of_one_write_are_encoded_by_all_threads_at_once() -> None:
    together = threading.Barrier(3)
    sink = FakeStore()
    assert store_all(sink, FakeOrigin(lambda block: together.wait(120)), write_threads=3) == NUM
    assert sink.there == set(KEYS)


def test_the_pieces_of_one_block_are_encoded_by_all_threads_at_once() -> None:
    together = threading.Barrier(3)
    sink = FakeStore(*range(1, NUM))
    sink.layout = kv_block(6, 1, 4, 2, 8, "float32", max_piece_bytes=512)
    assert sink.layout.num_pieces == 6
    sink.codec = make_codec({"codec": "raw"}, sink.layout)
    assert store_all(sink, FakeOrigin(lambda block: together.wait(120)), write_threads=3) == NUM


@pytest.mark.parametrize("num_threads", [1, 3])
def test_what_is_stored_is_not_encoded(num_threads: int) -> None:
    sink, origin = FakeStore(0, 1, 4), FakeOrigin()
    assert store_all(sink, origin, write_threads=num_threads) == NUM
    assert set(origin.blocks_read) == {2, 3, 5}
    assert store_all(FakeStore(*range(NUM)), origin) == NUM


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_refused_block_ends_the_count(num_threads: int) -> None:
    assert store_all(FakeStore(0, refused=[2]), FakeOrigin(), write_threads=num_threads) == 2
    assert store_all(FakeStore(refused=[0]), FakeOrigin(), write_threads=num_threads) == 0


@pytest.mark.parametrize("name", ["stored", "write"])
def test_a_fault_in_one_session_s_store_ends_its_write_alone(name: str) -> None:
    """It would end the proxy."""
    sink, ended = FakeStore(0), threading.Semaphore(0)
    counts: list[int] = []

    def end(count: int) -> None:
        counts.append(count)
        ended.release()

    setattr(
        sink.store if name == "stored" else sink, name.replace("write", "_write"), Mock(side_effect=RecursionError)
    )
    writer = Writer(ProxySettings(write_threads=1), lambda: False)
    for each in (sink, FakeStore()):
        writer.submit(Write(each, KEYS, FakeOrigin(), end))  # type: ignore[arg-type]
        assert ended.acquire(timeout=120)
    assert counts == [int(name == "write"), NUM]
    writer.close()


def test_an_origin_that_is_lost_ends_the_count() -> None:
    def lose(block: int) -> None:
        if block == 3:
            raise OriginLostError("gone")

    assert store_all(FakeStore(), FakeOrigin(lose)) == 3


def test_a_write_does_not_wait_for_another_whose_bytes_are_slow() -> None:
    """One thread waits for a piece that another one has, and a third has nothing to do."""
    slow, ended, begun = threading.Event(), threading.Event(), threading.Event()
    sink = FakeStore(*range(1, NUM))
    sink.layout = kv_block(2, 1, 4, 2, 8, "float32", max_piece_bytes=512)
    assert sink.layout.num_pieces == 2
    sink.codec = make_codec({"codec": "raw"}, sink.layout)
    together = threading.Barrier(2)

    class SlowOrigin(FakeOrigin):
        def read(self, block: int, start: int, end: int, buffer: np.ndarray) -> np.ndarray:
            together.wait(120)
            if start:
                begun.set()
                assert slow.wait(120)
            return super().read(block, start, end, buffer)

    writer = Writer(ProxySettings(write_threads=3), lambda: False)
    writer.submit(Write(sink, KEYS, SlowOrigin(), lambda count: None))  # type: ignore[arg-type]
    assert begun.wait(120)
    # Several times, as which thread waits first changes.
    for _ in range(20):
        wait_until(lambda: len(writer._changed._waiters) == 2, "two threads that wait")  # type: ignore[attr-defined]
        ended.clear()
        writer.submit(Write(FakeStore(), KEYS, FakeOrigin(), lambda count: ended.set()))  # type: ignore[arg-type]
        assert ended.wait(60), "the thread that has nothing to do is woken"
    slow.set()
    writer.close()


def test_a_write_that_is_given_up_ends() -> None:
    write: list[Write] = []

    def give_up(block: int) -> None:
        write[0].is_given_up = block == 1

    counts: list[int] = []
    ended = threading.Event()

    def end(count: int) -> None:
        counts.append(count)
        ended.set()

    write.append(Write(FakeStore(), KEYS, FakeOrigin(give_up), end))  # type: ignore[arg-type]
    writer = Writer(ProxySettings(write_threads=1), lambda: False)
    writer.submit(write[0])
    assert ended.wait(120) and counts == [2]
    writer.close()
