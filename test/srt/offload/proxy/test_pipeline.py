"""The pipeline against a dict of pieces: what comes is right, what does not come leaves nothing behind."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from sglang.srt.offload.proxy.destination import PoolPages
from sglang.srt.offload.proxy.engines import EmulatedEngine, SoftwareEngine
from sglang.srt.offload.proxy.pipeline import Fetch, Pipeline
from sglang.srt.offload.proxy.settings import ProxySettings
from sglang.srt.offload.store.resp import ErrorReply, StoreFailure, ValueTooLarge
from support.codec_cases import kv_block
from support.fake_source import FakeReader, FakeRequest, FakeSource

# 8 pieces of 2 pages in a block.
LAYOUT = kv_block(
    num_pages=16, num_layers=2, page_size=1, num_kv_heads=2, head_dim=8, dtype="float32", max_piece_bytes=512
)


def pipeline(**settings) -> Pipeline:
    """With the smallest buffers that its threads can do with; without pipelining, a block's pieces fit in."""
    size = 4 * (settings.get("receive_threads", ProxySettings.receive_threads) + 1) << 20
    if not settings.get("pipelined", True):
        size = 24 << 20
    buffers = {f"{name}_buffer_bytes": size for name in ("compressed", "decompressed", "dequantized")}
    return Pipeline(ProxySettings(**buffers, **settings), SoftwareEngine())


@dataclass
class Asked:
    source: FakeSource
    blocks: list[int]
    pages: np.ndarray
    ended: threading.Event = field(default_factory=threading.Event)
    counts: list[int] = field(default_factory=list)
    fetch: Fetch = field(init=False)

    def __post_init__(self) -> None:
        keys = [self.source.keys[b] for b in self.blocks]
        pages = PoolPages(self.source.memory, self.source.layout.page.page_bytes, self.pages)
        self.fetch = Fetch(self.source, keys, pages, self._end)

    def _end(self, count: int) -> None:
        self.counts.append(count)
        self.ended.set()

    def wait(self) -> int:
        assert self.ended.wait(120), "the fetch does not end"
        return self.counts[0]

    def got(self, block: int) -> np.ndarray:
        return self.source.memory.reshape(-1, LAYOUT.page.page_bytes)[self.pages[block]].ravel()


def ask(source: FakeSource, blocks: list[int], rng: random.Random, runs: bool = False) -> Asked:
    num_pages = len(source.memory) // LAYOUT.page.page_bytes
    if runs:
        starts = rng.sample(range(num_pages // LAYOUT.num_pages), len(blocks))
        pages = np.array([[s * LAYOUT.num_pages + i for i in range(LAYOUT.num_pages)] for s in starts])
    else:
        pages = np.array(rng.sample(range(num_pages), len(blocks) * LAYOUT.num_pages)).reshape(len(blocks), -1)
    return Asked(source, blocks, pages.astype(np.int32))


def settled(line: Pipeline) -> bool:
    return all(slots.num_free == slots.num_slots for slots in line.slots.values())


VARIANTS = {
    "as usual": {},
    "one thread each": {"receive_threads": 1, "decompress_threads": 1, "window": 1},
    "many threads": {"receive_threads": 3, "decompress_threads": 3, "dequantize_threads": 3, "deliver_threads": 2},
    "staged": {"direct": False},
    "no pipeline": {"pipelined": False},
    "no preallocation": {"preallocated": False},
}


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_come_whole_and_nothing_else_is_touched(variant, runs):
    source, rng = FakeSource(1, 6, LAYOUT, late=0.001), random.Random(1)
    line = pipeline(**VARIANTS[variant])
    asked = ask(source, [3, 0, 5], rng, runs)
    line.submit(asked.fetch)
    assert asked.wait() == 3
    for i, block in enumerate(asked.blocks):
        assert (asked.got(i) == source.expected[block]).all()
    others = np.ones(len(source.memory) // LAYOUT.page.page_bytes, bool)
    others[asked.pages] = False
    assert (source.memory.reshape(-1, LAYOUT.page.page_bytes)[others] == 0xEE).all()
    assert settled(line)
    stats = line.stats()
    assert stats["receive_pieces"] == stats["deliver_pieces"] == 3 * LAYOUT.num_pieces
    assert stats["dequantize_bytes"] == 3 * LAYOUT.block_bytes


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_block_that_lacks_a_piece_ends_the_run_before_it(variant):
    source = FakeSource(2, 4, LAYOUT)
    del source.pieces[source.keys[2], 5]
    line = pipeline(**VARIANTS[variant])
    asked = ask(source, [0, 1, 2, 3], random.Random(2))
    line.submit(asked.fetch)
    assert asked.wait() == 2
    assert all((asked.got(i) == source.expected[i]).all() for i in range(2))
    assert settled(line) and not source.damages and set(source.incompletes) == {source.keys[2]}


@pytest.mark.parametrize("at", [0, 5, 30, 45, 70, 100, -1])
def test_a_damaged_piece_is_reported_and_not_delivered(at):
    source = FakeSource(3, 2, LAYOUT)
    value = bytearray(source.pieces[source.keys[1], 3])
    value[at] ^= 0x40
    source.pieces[source.keys[1], 3] = bytes(value)
    line = pipeline()
    asked = ask(source, [0, 1], random.Random(3))
    line.submit(asked.fetch)
    assert asked.wait() == 1
    assert source.damages == [source.keys[1]]
    assert settled(line)


@pytest.mark.parametrize(
    ("error", "num_damaged"),
    [(ErrorReply("NOPERM no GETEX"), 0), (ErrorReply("WRONGTYPE a list"), 1), (ValueTooLarge("too large"), 1)],
)
def test_an_error_of_the_store_is_no_damage(error: StoreFailure, num_damaged: int, monkeypatch: pytest.MonkeyPatch):
    """Else a right that a user of the store lacks would delete blocks that others share."""

    def fail(*args: object) -> None:
        raise error

    source, line = FakeSource(3, 2, LAYOUT), pipeline()
    monkeypatch.setattr(line.engine, "receive", fail)
    monkeypatch.setattr(FakeReader, "request", lambda *args: FakeRequest((b"", 0)))
    asked = ask(source, [0], random.Random(3))
    line.submit(asked.fetch)
    assert asked.wait() == 0
    assert set(source.damages) == ({source.keys[0]} if num_damaged else set())
    assert settled(line)


def test_a_piece_of_another_block_is_noticed():
    source = FakeSource(4, 2, LAYOUT)
    source.pieces[source.keys[0], 0] = source.pieces[source.keys[1], 0]
    line = pipeline()
    asked = ask(source, [0], random.Random(4))
    line.submit(asked.fetch)
    assert asked.wait() == 0 and source.damages == [source.keys[0]]


@pytest.mark.parametrize("pipelined", [True, False])
def test_what_is_given_up_ends_and_writes_nothing_afterwards(pipelined):
    source = FakeSource(5, 4, LAYOUT)
    line = pipeline(pipelined=pipelined)
    source.hold.clear()
    asked, after = (ask(source, [0, 1, 2, 3], random.Random(seed)) for seed in (5, 6))
    line.submit(asked.fetch)
    asked.fetch.give_up()
    line.submit(after.fetch)
    source.hold.set()
    assert asked.wait() == 0
    assert after.wait() == 4
    assert asked.counts == [0]
    assert settled(line)


class StalledPages(PoolPages):
    """Of an engine that takes nothing until it is told to."""

    can_stall = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: list[Callable[[], None]] = []
        self.is_stalled = True
        self.lock = threading.Lock()

    def window(self, block: int, start: int, end: int) -> np.ndarray | None:
        return None

    def submit(self, block: int, start: int, data: np.ndarray, on_end: Callable[[bool], None]) -> None:
        deliver = partial(super().submit, block, start, data, on_end)
        with self.lock:
            if self.is_stalled:
                self.held.append(deliver)
                return
        deliver()

    def go_on(self) -> None:
        with self.lock:
            self.is_stalled = False
        for deliver in self.held:
            deliver()


def test_engines_that_take_nothing_do_not_hold_up_others():
    """Three of them, with more to bring than there are slots; each has a part, and the last one comes."""
    stalled = [FakeSource(seed, 6, LAYOUT) for seed in (1, 2, 3)]
    other, line = FakeSource(4, 6, LAYOUT), pipeline()
    fetches = []
    for source in stalled:
        asked = ask(source, list(range(6)), random.Random(1))
        pages = StalledPages(source.memory, LAYOUT.page.page_bytes, asked.pages)
        asked.fetch.destination = pages
        line.submit(asked.fetch)
        fetches.append((asked, pages))
    asked = ask(other, list(range(6)), random.Random(4))
    line.submit(asked.fetch)
    assert asked.wait() == 6 and all((asked.got(i) == other.expected[i]).all() for i in range(6))
    for each, pages in fetches:
        assert not each.counts and len(pages.held) < line._num_slots
        pages.go_on()
    for each, _ in fetches:
        assert each.wait() == 6 and all((each.got(i) == each.source.expected[i]).all() for i in range(6))
    assert settled(line) and not line._of_source


def test_a_fetch_may_be_larger_than_all_buffers():
    layout = kv_block(
        num_pages=16,
        num_layers=2,
        page_size=16,
        num_kv_heads=8,
        head_dim=64,
        dtype="float32",
        max_piece_bytes=1 << 20,
    )
    source = FakeSource(7, 6, layout, codec="raw")
    line = pipeline()
    pages = np.arange(6 * 16, dtype=np.int32).reshape(6, 16)
    asked = Asked(source, list(range(6)), pages)
    assert 6 * layout.num_pieces > 2 * line.slots["compressed"].num_slots
    line.submit(asked.fetch)
    assert asked.wait() == 6
    assert (source.memory[: source.expected.size] == source.expected.ravel()).all()


def test_an_accelerator_takes_its_time_one_piece_after_another():
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    engine = EmulatedEngine(SoftwareEngine(), {"deliver": 1e6}, 1e-5, lambda: now[0], sleep)
    data, out, ended = np.arange(200, dtype=np.uint8), np.zeros(200, np.uint8), []
    pages = PoolPages(out, 50, np.array([[1, 0, 2, 3]], np.int32))
    engine.deliver(pages, 0, 0, data, ended.append)
    assert (out == np.concatenate([data[50:100], data[:50], data[100:]])).all() and ended == [True]
    assert now[0] == pytest.approx(200e-6, abs=2e-5)
    engine.deliver(pages, 0, 0, data, ended.append)
    assert now[0] == pytest.approx(400e-6, abs=4e-5)
    source = FakeSource(1, 1, LAYOUT)
    reader = source.reader(0)
    reader.request(source.keys[0], 0)
    engine.receive(reader, np.empty(4096, np.uint8))
    assert now[0] == pytest.approx(400e-6, abs=4e-5), "only the stages that have a rate are slowed"


@pytest.mark.parametrize(
    ("pages", "start", "end", "lengths"),
    [
        ([0, 1, 2, 3], 0, 40, [40]),
        ([3, 2, 1, 0], 0, 40, [10, 10, 10, 10]),
        ([5, 6, 1, 2], 0, 40, [20, 20]),
        ([5, 6, 1, 2], 3, 38, [17, 18]),
        ([5, 6, 1, 2], 12, 17, [5]),
        ([5, 7, 1, 2], 9, 11, [1, 1]),
    ],
)
def test_where_the_bytes_of_a_block_lie(pages, start, end, lengths):
    memory = np.arange(80, dtype=np.uint8)
    runs = PoolPages(memory, 10, np.array([pages], np.int32)).runs(0, start, end)
    assert [len(r) for r in runs] == lengths
    block = np.concatenate([memory[p * 10 : p * 10 + 10] for p in pages])
    assert (np.concatenate(runs) == block[start:end]).all()


@pytest.mark.parametrize("seed", range(int(os.environ.get("SEED", 0)), int(os.environ.get("SEED", 0)) + 6))
def test_random_faults(seed):
    """Connections break, pieces are missing and damaged, fetches are given up, several at once: each ends once, what
    it says came is right, and all slots are free afterwards."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    settings = rng.choice(list(VARIANTS.values()))
    line = pipeline(**settings)
    source = FakeSource(seed, 8, LAYOUT, late=0.002, lost=rng.choice([0, 0.01, 0.1]))
    for _ in range(rng.randrange(4)):
        source.pieces.pop((rng.choice(source.keys), rng.randrange(LAYOUT.num_pieces)), None)
    for _ in range(rng.randrange(4)):
        name = rng.choice(list(source.pieces))
        value = bytearray(source.pieces[name])
        value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
        source.pieces[name] = bytes(value)
    pages = list(range(len(source.memory) // LAYOUT.page.page_bytes))
    rng.shuffle(pages)
    everyone = []
    for _ in range(4):
        blocks = [rng.randrange(8) for _ in range(rng.randint(1, 5))]
        mine = [pages.pop() for _ in range(len(blocks) * LAYOUT.num_pages)]
        asked = Asked(source, blocks, np.array(mine, np.int32).reshape(len(blocks), -1))
        everyone.append(asked)
        line.submit(asked.fetch)
        if rng.random() < 0.3:
            asked.fetch.give_up()
    for asked in everyone:
        count = asked.wait()
        for i in range(count):
            assert (asked.got(i) == source.expected[asked.blocks[i]]).all()
    assert all(len(asked.counts) == 1 for asked in everyone)
    assert settled(line)
    assert (source.memory.reshape(-1, LAYOUT.page.page_bytes)[pages] == 0xEE).all(), "somebody else's pages"
