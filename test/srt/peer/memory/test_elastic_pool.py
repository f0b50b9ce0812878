"""`ElasticPool` beside `MHATokenToKVPool`: the same KV through other strides, in attention, links and an engine."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from sgl_kernel.kvcacheio import copy_pages
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import WINDOW_TILE, AttentionMetadata
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hybrid_pages import regions_of
from sglang.srt.mem_cache.kv_view import KVSegment
from sglang.srt.mem_cache.link import CopyLink
from sglang.srt.mem_cache.memory_pool import DevicePool, MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.transfer import D2H, H2D, OpResult, Ticket, Tier, TransferOp
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig, reserve_slabs
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from sglang.srt.peer.memory.lent_memory import allocate_pool
from sglang.srt.peer.memory.slabs import GRANULARITY, SlabRange
from sglang.srt.peer.protocol.elastic_units import stride_bytes
from support.local_engine import LocalEngine
from support.page_layouts import layouts
from support.pool_pages import pages_of, poison
from support.stream_emulator import StreamEmulator
from support.windowed_model import write_windowed_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")

LAYERS, HEADS, DIM = 3, 2, 16


def elastic(num_slabs: int = 4, page_size: int = 2, dtype: torch.dtype = torch.float32) -> ElasticPool:
    """Slabs with padding: the stride is more than the slab, and the slab no multiple of the page."""
    layout = PageLayout.kv(page_size, LAYERS, HEADS, DIM, dtype)
    page_bytes = layout.page_bytes
    slab_bytes = -(-page_bytes // GRANULARITY) * GRANULARITY
    slabs = SlabRange.owned(num_slabs, slab_bytes, stride_bytes(slab_bytes, page_bytes, GRANULARITY))
    return ElasticPool(slabs, layout)


def usable(pool: ElasticPool) -> np.ndarray:
    return np.concatenate([pool.frames_of(slab) for slab in range(pool.slabs.num_slabs)])


def padding(pool: ElasticPool) -> np.ndarray:
    """(n,) int32, the numbers that are no pages: a frame table lends them for good."""
    return np.setdiff1d(np.arange(pool.num_pages, dtype=np.int32), usable(pool))


def random_kv(num_tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, num_tokens, HEADS, DIM, generator=generator).to(dtype)
    return k, v


def fill(pool: DevicePool, frames: np.ndarray) -> None:
    """The i-th of frames has the same KV in every pool."""
    slots = (torch.from_numpy(frames).long()[:, None] * pool.page_size + torch.arange(pool.page_size)).view(-1)
    for layer in range(pool.page_layout.num_layers):
        pool.store(layer, slots, *random_kv(len(slots), layer, pool.kv.dtype))


def layer_first(num_pages: int, page_size: int = 2, dtype: torch.dtype = torch.float32) -> MHATokenToKVPool:
    return MHATokenToKVPool(num_pages, PageLayout.kv(page_size, LAYERS, HEADS, DIM, dtype))


def test_where_pages_lie():
    pool = elastic()
    assert pool.page_bytes == 1536 and pool.slabs.slab_bytes == 4096 and pool.slabs.stride_bytes == 12288
    assert (pool.slab_pages, pool.num_pages) == (2, 32) and pool.kv.shape == (32, 2, LAYERS, 2, HEADS, DIM)
    assert [pool.frames_of(i).tolist() for i in range(4)] == [[0, 1], [8, 9], [16, 17], [24, 25]]
    assert padding(pool).tolist() == [f for f in range(32) if f % 8 > 1]
    assert pool.frames_of(0).dtype == padding(pool).dtype == np.int32
    pool.slabs.slab(1)[pool.page_bytes :] = 0xFF
    assert pages_of(pool, torch.tensor([8])).sum() == 0 and torch.isnan(pages_of(pool, torch.tensor([9]))).all()


def test_pages_need_one_stride():
    with pytest.raises(ValueError, match="raise --peer-slab-size, or lower --page-size"):
        ElasticPool(SlabRange(2, 4096), PageLayout.kv(2, LAYERS, HEADS, DIM, torch.float32))
    with pytest.raises(ValueError, match="no room for pages of 12,288"):
        ElasticPool(SlabRange(2, 4096, 12288), PageLayout.kv(16, LAYERS, HEADS, DIM, torch.float32))


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_store_pages_and_poison_are_those_of_the_other_pool(page_size: int, dtype: torch.dtype):
    pool = elastic(page_size=page_size, dtype=dtype)
    frames = np.random.default_rng(1).permutation(usable(pool))
    other = layer_first(len(frames), page_size, dtype)
    fill(pool, frames)
    fill(other, np.arange(len(frames)))
    here, there = torch.from_numpy(frames).long(), torch.arange(len(frames))
    assert torch.equal(pages_of(pool, here), pages_of(other, there)) and pages_of(pool, here).is_contiguous()
    for layer in range(LAYERS):
        a, b = pool.view(layer), other.view(layer)
        assert a.page_size == page_size and a.k.stride()[-2:] == b.k.stride()[-2:]
        assert torch.equal(a.k[here], b.k) and torch.equal(a.v[here], b.v)
    poison(pool, here[:2])
    assert torch.isnan(pages_of(pool, here[:2])).all() and torch.equal(
        pages_of(pool, here[2:]), pages_of(other, there[2:])
    )


def test_only_pages_that_are_named_are_touched():
    """Every operation on a pool of which one slab is mapped: any other touch would end the process."""
    unit = SlabRange(5, 4096, 12288)
    pool = ElasticPool(unit, PageLayout.kv(2, LAYERS, HEADS, DIM, torch.float32))
    unit.allocate(2)
    frames = pool.frames_of(2)
    fill(pool, frames)
    there = torch.from_numpy(frames).long()
    assert pages_of(pool, there).isfinite().all()
    other = layer_first(2)
    copy_pages(pool.kv_pages, other.kv_pages, there, torch.arange(2))
    copy_pages(other.kv_pages, pool.kv_pages, torch.arange(2), there.flip(0))
    assert torch.equal(pages_of(pool, there.flip(0)), pages_of(other, torch.arange(2)))
    segments = [[KVSegment(there, 4)]]
    q = torch.randn(1, 4, DIM)
    out = TorchNativeAttnBackend().forward(q, pool.view(1), segments, AttentionMetadata((1,), 0.25))
    assert out.isfinite().all()
    poison(pool, there)
    assert torch.isnan(pages_of(pool, there)).all()


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_attention_gives_the_same_bits(page_size: int):
    pool = elastic(num_slabs=12, page_size=page_size)
    frames = np.random.default_rng(2).permutation(usable(pool))
    other = layer_first(len(frames), page_size)
    fill(pool, frames)
    fill(other, np.arange(len(frames)))
    # A decode, a prefill behind a prefix that begins within a page, and a prompt of its own.
    third = len(frames) // 3
    assert third * page_size >= 8

    def segments(pages: torch.Tensor) -> list[list[KVSegment]]:
        first, second, last = pages[:third], pages[third : 2 * third], pages[2 * third :]
        own = -(-4 // page_size)
        prefix = second[:-own]
        skip = page_size // 2
        return [
            [KVSegment(first, third * page_size - 1)],
            [KVSegment(prefix, len(prefix) * page_size - skip, skip=skip), KVSegment(second[-own:], 4, causal=True)],
            [KVSegment(last, 7, causal=True)],
        ]

    meta = AttentionMetadata((1, 4, 7), 0.25)
    q = torch.randn(12, 4, DIM, generator=torch.Generator().manual_seed(5))
    for layer in range(LAYERS):
        a, b = TorchNativeAttnBackend(), TorchNativeAttnBackend()
        mine = a.forward(q, pool.view(layer), segments(torch.from_numpy(frames).long()), meta)
        theirs = b.forward(q, other.view(layer), segments(torch.arange(len(frames))), meta)
        assert torch.equal(mine, theirs) and mine.isfinite().all()
        segment = KVSegment(torch.from_numpy(frames[:third]).long(), 5)
        out, lse = a.partial(q, pool.view(layer), segment, 0.25)
        want, want_lse = b.partial(q, other.view(layer), KVSegment(torch.arange(third), 5), 0.25)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("page_size", [1, 2])
def test_links_load_and_back_up(layout: str, page_size: int):
    pool = elastic(page_size=page_size)
    host = MHATokenToKVPoolHost(pool, 8, layout)
    frames = np.random.default_rng(3).permutation(usable(pool))[:8].astype(np.int32)
    fill(pool, frames)
    before = pages_of(pool, torch.from_numpy(frames).long())
    emulator = StreamEmulator(4)
    stream = emulator.stream("link")
    d2h, h2d = (CopyLink(name, pool, host, stream, lambda seq: None) for name in (D2H, H2D))
    places = np.arange(8, dtype=np.int32)[::-1].copy()
    d2h.submit(TransferOp(Ticket(D2H, 0), Tier.DEVICE, Tier.HOST, frames, places, 8 * pool.page_bytes))
    emulator.run(1 << 30)
    assert d2h.poll() == [OpResult(0, True)]
    assert torch.equal(pages_of(host, torch.from_numpy(places).long()), before)
    poison(pool, torch.from_numpy(frames).long())
    h2d.submit(TransferOp(Ticket(H2D, 0), Tier.HOST, Tier.DEVICE, places, frames, 8 * pool.page_bytes))
    emulator.run(1 << 30)
    assert h2d.poll() == [OpResult(0, True)]
    assert torch.equal(pages_of(pool, torch.from_numpy(frames).long()), before)


SCRATCH_LAYOUTS = {
    "page 1": PageLayout.kv(1, LAYERS, HEADS, DIM, torch.float32),
    "page 16, float8": PageLayout.kv(16, LAYERS, HEADS, DIM, torch.float8_e4m3fn),
    "page 64": PageLayout.kv(64, LAYERS, HEADS, DIM, torch.bfloat16),
    "latent": layouts(16)["latent and rotated key"],
}


@pytest.mark.parametrize("layout", SCRATCH_LAYOUTS.values(), ids=SCRATCH_LAYOUTS)
def test_a_scratch_page_lies_behind_all_slabs_and_is_never_lent(layout: PageLayout):
    page_bytes, num_slabs = layout.page_bytes, 3
    slab_bytes = -(-page_bytes // GRANULARITY) * GRANULARITY + GRANULARITY
    slabs = reserve_slabs(SlabsConfig(num_slabs, slab_bytes, has_scratch=True), page_bytes)
    slabs.allocate_all()
    pool = ElasticPool(slabs, layout)
    assert pool.scratch_slot == pool.num_pages * pool.page_size
    assert pool.scratch_slot // pool.page_size not in {*usable(pool).tolist(), *padding(pool).tolist()}
    assert len(usable(pool)) + len(padding(pool)) == pool.num_pages == pool.slab_frames[-1][0] + pool._stride_pages
    # All are lent, and full of the borrower's bytes.
    borrower = SlabRange(num_slabs, slab_bytes)
    for slab in range(num_slabs):
        slabs.scrub(slab)
        borrower.map(slab, slabs.fileno(slab))
    borrower.memory[:] = 7
    slots = torch.arange(pool.page_size) + pool.scratch_slot
    rows = {}
    for layer in range(layout.num_layers):
        components = [pool.view(layer).components[i] for i in layout.per_token]
        rows[layer] = [torch.rand(pool.page_size, *each.shape[2:]).to(each.dtype) for each in components]
        pool.store(layer, slots, *rows[layer])
    assert (borrower.memory == 7).all()
    for slab in range(num_slabs):
        borrower.unmap(slab)
        slabs.scrub(slab)
    poison(pool, torch.from_numpy(usable(pool)).long())
    slabs.close()
    for layer, stored in rows.items():
        for i, row in zip(layout.per_token, stored):
            found = pool.view(layer).components[i][-1]
            assert torch.equal(found.contiguous().view(torch.uint8), row.view(torch.uint8))


def test_a_pool_without_a_tail_has_no_scratch_page():
    assert elastic().scratch_slot is None
    layout = PageLayout.kv(32, LAYERS, HEADS, DIM, torch.float32)
    with pytest.raises(ValueError, match="4,096 bytes behind the slabs have no room for 24,576"):
        ElasticPool(SlabRange(1, layout.page_bytes, tail_bytes=4096), layout)


@pytest.mark.parametrize("has_scratch", [False, True])
@pytest.mark.parametrize("layout", SCRATCH_LAYOUTS.values(), ids=SCRATCH_LAYOUTS)
def test_layers_with_a_window_lie_outside_the_slabs(layout: PageLayout, has_scratch: bool):
    kinds = [layer != 1 for layer in range(layout.num_layers)]
    config = SlabsConfig(3, 4 * GRANULARITY, has_scratch=has_scratch)
    pool = allocate_pool(config, layout, kinds, num_windowed_pages=5)
    assert pool.page_bytes * layout.num_layers == layout.page_bytes and pool.num_windowed_pages == 5
    scratch = (pool.num_pages * pool.page_size, 5 * pool.page_size) if has_scratch else (None, None)
    assert (pool.scratch_slot, pool.windowed_scratch_slot) == scratch
    slabs = [torch.from_numpy(pool.slabs.slab(slab)) for slab in range(3)]
    for slab in slabs:
        slab[:] = 7
    loc = torch.arange(5 * pool.page_size)
    rows = {}
    for layer, is_windowed in enumerate(kinds):
        components = [pool.view(layer).components[i] for i in layout.per_token]
        assert all(len(each) == (5 if is_windowed else pool.num_pages) + has_scratch for each in components)
        if is_windowed:
            rows[layer] = [torch.rand(len(loc), *each.shape[2:]).to(each.dtype) for each in components]
            pool.store(layer, loc, *rows[layer])
    assert all((slab == 7).all() for slab in slabs), "a slab that is lent has changed"
    pool.store(1, loc[:1], *(torch.zeros(1, *pool.view(1).components[i].shape[2:]) for i in layout.per_token))
    assert not (slabs[0] == 7).all() and (slabs[1] == 7).all() and (slabs[2] == 7).all()
    for layer, stored in rows.items():
        for i, row in zip(layout.per_token, stored):
            found = pool.view(layer).components[i][:5].flatten(0, 1).contiguous()
            assert torch.equal(found.view(torch.uint8), row.view(torch.uint8))


def engine_pool(
    num_pages: int,
    layout: PageLayout,
    device: torch.device,
    windowed: Sequence[bool] = (),
    num_windowed_pages: int = 0,
) -> ElasticPool:
    """In slabs that pages fill, so that the engine may use every page, and as many of them as it wants at least."""
    page_bytes = regions_of(layout, 0, windowed, num_windowed_pages)[0][1].page_bytes
    slab_bytes = math.lcm(page_bytes, GRANULARITY)
    num_slabs, rest = divmod(num_pages * page_bytes, slab_bytes)
    assert rest == 0
    return ElasticPool(SlabRange.owned(num_slabs, slab_bytes), layout, windowed, num_windowed_pages)


def test_an_engine_gives_the_same_tokens():
    """Prompts with shared prefixes, eviction, loads and backups, with poison and all invariants on."""
    config = ModelConfig.from_pretrained("embedded")
    rng = np.random.default_rng(6)
    prefix = rng.integers(3, 500, 20).tolist()
    prompts = [prefix + rng.integers(3, 500, n).tolist() for n in (3, 40, 60)] * 2
    answers, loads, model = [], [], None
    for make_pool in (MHATokenToKVPool, engine_pool):
        engine = LocalEngine(config, 96, num_host_pages=1024, page_size=1, make_pool=make_pool, model=model)
        model = engine.model
        try:
            assert isinstance(engine.device_pool, ElasticPool) == (make_pool is engine_pool)
            results = [engine.generate([prompt])[0] for prompt in prompts]
        finally:
            engine.close()
        answers.append([result.tokens for result in results])
        loads.append(sum(result.cached_tokens_details["host"] for result in results))
    assert answers[0] == answers[1] and len(answers[0][0]) == 16
    assert min(loads) > 0, "some came from the host"


def test_an_engine_with_a_pool_for_windows_gives_the_same_tokens(tmp_path: Path):
    """Of four layers the first has no window."""
    config = ModelConfig.from_pretrained(str(write_windowed_model(tmp_path / "model", 9)))
    rng = np.random.default_rng(6)
    prefix = rng.integers(3, 500, 250).tolist()
    prompts = [prefix + rng.integers(3, 500, n).tolist() for n in (3, 140, 160)] * 2
    answers, model = [], None
    for make_pool, num_windowed in ((MHATokenToKVPool, 0), (engine_pool, 256)):
        engine = LocalEngine(
            config,
            512,
            num_host_pages=2048,
            num_windowed_pages=num_windowed,
            page_size=1,
            chunked_prefill_size=16,
            window_tile=WINDOW_TILE,
            make_pool=make_pool,
            model=model,
        )
        model = engine.model
        try:
            results = [engine.generate([prompt])[0] for prompt in prompts]
            counters = engine.scheduler.state()["counters"]
        finally:
            engine.close()
        answers.append([result.tokens for result in results])
        assert sum(result.cached_tokens_details["host"] for result in results) > 0
        assert (counters.get("evicted_tokens_windowed", 0) > 0) == (num_windowed > 0)
    assert answers[0] == answers[1]


def test_a_lent_slab_shows_nothing_and_comes_back_clean():
    """Frame table, pools and slabs of both sides together: drained, scrubbed, lent, used, given back."""
    lender = elastic()
    table = FrameTable(lender.num_pages, lowest_first=True)
    table.lend(padding(lender))
    everything = table.allocate(8)
    assert everything is not None and everything.tolist() == usable(lender).tolist()
    fill(lender, everything)
    kept = pages_of(lender, torch.from_numpy(everything[:6]).long())

    # Slab 3 is drained and lent.
    assert np.flatnonzero(table.state[24:] == FrameState.HELD).tolist() == [0, 1]
    table.free_after(everything[6:], FrameState.HELD, fence=0)
    table.reap(1)
    assert lender.frames_of(3)[0] == 24 and not (table.state[24:] == FrameState.HELD).any()
    table.lend(24 + np.flatnonzero(table.state[24:] == FrameState.FREE).astype(np.int32))
    lender.slabs.scrub(3)
    fd = os.dup(lender.slabs.fileno(3))
    assert table.allocate(1) is None and table.counts[FrameState.LENT] == 32 - 6

    # The borrower has pages of another shape, and its own stride.
    layout = PageLayout.kv(1, 2, 1, 40, torch.bfloat16)
    page_bytes = layout.page_bytes
    slabs = SlabRange(2, 4096, stride_bytes(4096, page_bytes, GRANULARITY))
    borrower = ElasticPool(slabs, layout)
    slabs.map(1, fd)
    os.close(fd)
    frames = torch.from_numpy(borrower.frames_of(1)).long()
    assert len(frames) == 4096 // page_bytes == 12
    assert not pages_of(borrower, frames).any(), "the lender's bytes are not there"
    generator = torch.Generator().manual_seed(7)
    own = torch.randn(12, 2, 2, 1, 1, 40, generator=generator).to(torch.bfloat16)
    borrower.kv[frames] = own
    assert torch.equal(pages_of(lender, torch.from_numpy(everything[:6]).long()), kept), "nor within its reach"
    assert torch.equal(pages_of(borrower, frames), own)

    # And back.
    slabs.unmap(1)
    lender.slabs.scrub(3)
    table.reclaim(lender.frames_of(3))
    table.check_invariants()
    again = table.allocate(2)
    assert again is not None and again.tolist() == [24, 25]
    assert not pages_of(lender, torch.from_numpy(again).long()).any(), "the borrower's bytes are gone"
