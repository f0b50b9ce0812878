"""Buffers of a layer: what is read is what was asked for, in whatever order the streams run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sgl_kernel.kvcacheio import KVPages, transfer_kv_per_layer_pf_lf
from sglang.srt.mem_cache.layer_stream_cache import FilledPiece, LayerStreamCache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.transfer import LoadFailedError, Tier
from support.pool_pages import pages_of
from support.stream_emulator import StreamEmulator

LAYERS, PAGE = 3, 2


def pools() -> dict[Tier, MHATokenToKVPoolHost]:
    """Every value is different: page, K or V, layer and token can be told from it."""
    device = MHATokenToKVPool(4, PageLayout.kv(PAGE, LAYERS, 1, 2, torch.float64))
    found = {}
    for tier in (Tier.PEER, Tier.HOST):
        pool = found[tier] = MHATokenToKVPoolHost(device, 20, "page_first")
        pool.kv.copy_(torch.arange(pool.kv.numel(), dtype=torch.float64).view(pool.kv.shape) + 10_000 * tier)
    return found


def cache(emulator: StreamEmulator, num_buffers: int, buffer_pages: int) -> LayerStreamCache:
    device = MHATokenToKVPool(4, PageLayout.kv(PAGE, LAYERS, 1, 2, torch.float64))
    made = LayerStreamCache(num_buffers, buffer_pages, device, pools(), emulator.stream("layer-stream"))
    made.kv.view(torch.uint8).fill_(255)
    return made


def ids(*frames: int) -> np.ndarray:
    return np.array(frames, np.int32)


def test_pieces_are_cut_at_buffers_and_hold_pages_of_several_tiers():
    made = cache(StreamEmulator(0), 2, 3)
    pieces = made.pieces([(Tier.PEER, ids(7, 8)), (Tier.HOST, ids(1, 0, 5)), (Tier.PEER, ids(2, 3))])
    assert [p.num_pages for p in pieces] == [3, 3, 1]
    found = [[(t, src.tolist(), dst.tolist()) for t, src, dst in p.copies] for p in pieces]
    assert found == [
        [(Tier.PEER, [7, 8], [0, 1]), (Tier.HOST, [1], [2])],
        [(Tier.HOST, [0, 5], [0, 1]), (Tier.PEER, [2], [2])],
        [(Tier.PEER, [3], [0])],
    ]


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_reader_finds_its_own_piece(num_buffers: int, seed: int):
    print(f"seed {seed}")
    rng, emulator = random.Random(seed), StreamEmulator(seed)
    made, compute = cache(emulator, num_buffers, 2), emulator.stream("compute")
    sources, read = pools(), []
    for _ in range(4):
        parts = [
            (rng.choice((Tier.PEER, Tier.HOST)), ids(*rng.sample(range(20), rng.randrange(1, 5))))
            for _ in range(rng.randrange(1, 4))
        ]
        pieces = made.pieces(parts)
        pages = torch.cat([pages_of(sources[tier], torch.from_numpy(frames).long()) for tier, frames in parts])
        for layer in range(LAYERS):
            pos = 0
            for piece in pieces:
                filled = made.fill(layer, piece)
                wanted = pages[pos : pos + piece.num_pages, :, layer]
                pos += piece.num_pages
                compute.wait(filled.ready)

                def look(filled: FilledPiece = filled, wanted: torch.Tensor = wanted) -> None:
                    filled.check()
                    assert filled.segment.length == len(wanted) * PAGE
                    rows = filled.segment.pages
                    assert torch.equal(torch.stack((filled.view.k[rows], filled.view.v[rows]), 1), wanted)
                    read.append(len(wanted))

                compute.enqueue(look)
                made.has_read(compute.record())
            emulator.run(rng.choice((0, 3, 50)))
    emulator.run(10_000)
    assert len(read) >= 4 * LAYERS and emulator.unrecorded_waits == 0


def test_copies_run_ahead_by_as_many_pieces_as_there_are_buffers():
    emulator = StreamEmulator(0)
    made, compute = cache(emulator, 2, 1), emulator.stream("compute")
    blocker = StreamEmulator(0).stream("another").record()
    compute.wait(blocker)
    filled = []
    for layer in range(LAYERS):
        filled.append(made.fill(layer, made.pieces([(Tier.HOST, ids(3))])[0]))
        compute.wait(filled[-1].ready)
        made.has_read(compute.record())
    emulator.run(100)
    assert [f.ready.query() for f in filled] == [True, True, False], "the third waits until the first was read"
    blocker.passed = True
    emulator.run(100)
    assert filled[2].ready.query()


def test_a_copy_that_fails_is_told_to_who_reads_it():
    emulator = StreamEmulator(0)
    made = cache(emulator, 2, 2)
    (bad,), (good,) = made.pieces([(Tier.HOST, ids(99))]), made.pieces([(Tier.HOST, ids(1))])
    first, second = made.fill(1, bad), made.fill(1, good)
    emulator.run(100)
    with pytest.raises(LoadFailedError, match="layer 1 cannot be streamed"):
        first.check()
    second.check()
    assert first.ready.query() and second.ready.query(), "the stream goes on"


class CopyingPool:
    """Its pages cannot be reached from outside: kv_pages have no content."""

    page_numbers_on_host = False

    def __init__(self, pool: MHATokenToKVPoolHost) -> None:
        self._pool = pool
        self.kv_pages = KVPages(*(torch.full_like(each, float("nan")) for each in pool.kv_pages.components))
        self.error = ""

    def load_layer(self, layer: int, pages: KVPages, src: torch.Tensor, dst: torch.Tensor, backend: str) -> None:
        if self.error:
            raise LoadFailedError(self.error)
        transfer_kv_per_layer_pf_lf(self._pool.kv_pages, pages, src, dst, layer, backend=backend)

    def back_up(self, pages: KVPages, src: torch.Tensor, dst: torch.Tensor, backend: str) -> None:
        raise AssertionError("nothing is written by a layer stream")


def test_a_pool_that_copies_its_pages_itself_is_asked_for_them():
    emulator, sources = StreamEmulator(0), pools()
    device = MHATokenToKVPool(4, PageLayout.kv(PAGE, LAYERS, 1, 2, torch.float64))
    peer, host = CopyingPool(sources[Tier.PEER]), sources[Tier.HOST]
    made = LayerStreamCache(2, 4, device, {Tier.PEER: peer, Tier.HOST: host}, emulator.stream("layer-stream"))
    made.kv.view(torch.uint8).fill_(255)
    (piece,) = made.pieces([(Tier.HOST, ids(3)), (Tier.PEER, ids(7, 2))])
    for layer in range(LAYERS):
        filled = made.fill(layer, piece)
        emulator.run(100)
        filled.check()
        made.has_read(emulator.stream("compute").record())
        rows = filled.segment.pages
        wanted = torch.cat([pages_of(host, torch.tensor([3])), pages_of(sources[Tier.PEER], torch.tensor([7, 2]))])[
            :, :, layer
        ]
        assert torch.equal(torch.stack((filled.view.k[rows], filled.view.v[rows]), 1), wanted)
        emulator.run(100)
    peer.error = "the worker that has it is left alone"
    failed = made.fill(1, piece)
    emulator.run(100)
    with pytest.raises(LoadFailedError, match="layer 1 cannot be streamed: the worker that has it is left alone"):
        failed.check()


@pytest.mark.parametrize("sizes", [(0, 3), (2, 0)])
def test_no_buffers(sizes: tuple[int, int]):
    with pytest.raises(ValueError, match="at least one buffer"):
        cache(StreamEmulator(0), *sizes)
