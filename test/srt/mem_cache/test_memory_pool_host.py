"""The host pool: what a page's bytes are, in both layouts and every dtype, and what storage gets to see of them."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import (
    HostMemoryError,
    MHATokenToKVPoolHost,
    cuda_register,
    host_pages_that_fit,
    pin_memory,
)
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.page_memory import ORDERS
from support.pool_pages import pages_of, poison

LAYERS, HEADS, DIM, PAGES = 3, 2, 4, 12


def make_pool(layout: str, page_size: int = 2, dtype: torch.dtype = torch.float32) -> MHATokenToKVPoolHost:
    """Every byte random, so that no two pages are alike."""
    device = MHATokenToKVPool(2, PageLayout.kv(page_size, LAYERS, HEADS, DIM, dtype))
    pool = MHATokenToKVPoolHost(device, PAGES, layout)
    raw = pool.kv.view(-1).view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(5)))
    return pool


def canonical(pool: MHATokenToKVPoolHost) -> np.ndarray:
    """The model: all pages as (num_pages, page_bytes) uint8, gathered value by value."""
    kv = pool.kv if pool.layout == "page_first" else torch.stack([pool.kv[:, :, p] for p in range(PAGES)])
    return kv.contiguous().view(-1).view(torch.uint8).reshape(PAGES, -1).numpy().copy()


def ids(*frames: int) -> np.ndarray:
    return np.array(frames, np.int32)


def test_the_shapes_are_the_layouts():
    page_first, layer_first = make_pool("page_first"), make_pool("layer_first")
    assert page_first.kv.shape == (PAGES, 2, LAYERS, 2, HEADS, DIM)
    assert layer_first.kv.shape == (2, LAYERS, PAGES, 2, HEADS, DIM)
    for pool in (page_first, layer_first):
        assert (pool.page_size, pool.page_bytes) == (2, 2 * LAYERS * 2 * HEADS * DIM * 4)
        assert pool.kv_pages.k.shape == (LAYERS, PAGES, 2, HEADS, DIM)
        assert pool.kv_pages.k.data_ptr() == pool.kv.data_ptr()


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="'page_head' is none of page_first, layer_first"):
        make_pool("page_head")


def test_buffers_are_the_pages_themselves_and_merge_ascending_neighbours():
    pool = make_pool("page_first")
    before = canonical(pool)
    buffers = pool.buffers(ids(3, 4, 5, 9, 8, 0, 1))
    assert [len(b) // pool.page_bytes for b in buffers] == [3, 1, 1, 2]
    assert all(b.format == "B" and b.contiguous and not b.readonly for b in buffers)
    assert b"".join(buffers) == before[[3, 4, 5, 9, 8, 0, 1]].tobytes()
    buffers[1][:] = bytes(pool.page_bytes)
    after = canonical(pool)
    assert not after[9].any()
    assert np.array_equal(np.delete(after, 9, 0), np.delete(before, 9, 0))
    assert pool.buffers(ids()) == []
    assert make_pool("layer_first").buffers(ids(1)) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("layout", ORDERS)
def test_copies_are_exact_and_canonical(layout: str, page_size: int, dtype: torch.dtype):
    pool = make_pool(layout, page_size, dtype)
    model = canonical(pool)
    rng = random.Random(page_size)
    for _ in range(30):
        frames = np.array(rng.sample(range(PAGES), rng.randrange(PAGES + 1)), np.int32)
        if rng.random() < 0.5:
            frames.sort()
        out = np.empty(len(frames) * pool.page_bytes, np.uint8)
        pool.copy_out(frames, out)
        assert np.array_equal(out, model[frames].ravel())
        data = np.frombuffer(rng.randbytes(len(out)), np.uint8)  # read-only, as from a socket
        pool.copy_in(frames, data)
        model[frames] = data.reshape(-1, pool.page_bytes)
        assert np.array_equal(canonical(pool), model), "exactly these pages"


@pytest.mark.parametrize("layout", ORDERS)
def test_one_layouts_bytes_are_the_others(layout: str):
    """Blocks that one server stored are read by one with the other layout."""
    source, target = make_pool("page_first"), make_pool(layout)
    frames, there = ids(7, 2, 3), ids(0, 5, 6)
    data = np.empty(3 * source.page_bytes, np.uint8)
    source.copy_out(frames, data)
    target.copy_in(there, data)
    assert torch.equal(
        pages_of(target, torch.from_numpy(there).long()).view(torch.uint8),
        pages_of(source, torch.from_numpy(frames).long()).view(torch.uint8),
    )


@pytest.mark.parametrize("layout", ORDERS)
def test_poison_fills_whole_pages_and_no_others(layout: str):
    pool = make_pool(layout, dtype=torch.float64)
    pool.kv.zero_()
    poison(pool, torch.tensor([4, 9]))
    bad = pages_of(pool, torch.arange(PAGES)).isnan().flatten(1)
    assert bad.all(1).nonzero().ravel().tolist() == bad.any(1).nonzero().ravel().tolist() == [4, 9]


@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize("frames", [ids(PAGES), ids(3, -1), ids(PAGES - 1, PAGES)])
def test_frames_beyond_the_pool_are_a_bug(layout: str, frames: np.ndarray):
    pool = make_pool(layout)
    data = np.zeros(len(frames) * pool.page_bytes, np.uint8)
    before = canonical(pool)
    with pytest.raises(AssertionError, match="beyond the pool"):
        pool.copy_in(frames, data)
    with pytest.raises(AssertionError, match="beyond the pool"):
        pool.copy_out(frames, data)
    if layout == "page_first":
        with pytest.raises(AssertionError, match="beyond the pool"):
            pool.buffers(frames)
    assert np.array_equal(canonical(pool), before)


@pytest.mark.parametrize("layout", ORDERS)
def test_bytes_of_another_size_are_a_bug(layout: str):
    pool = make_pool(layout)
    with pytest.raises(ValueError, match="reshape"):
        pool.copy_in(ids(1, 2), np.zeros(2 * pool.page_bytes - 1, np.uint8))


def test_pinning_takes_the_whole_pool_once_and_says_how_long(caplog):
    asked: list[tuple[int, int]] = []
    device = MHATokenToKVPool(2, PageLayout.kv(2, LAYERS, HEADS, DIM, torch.float32))
    with caplog.at_level("INFO"):
        pool = MHATokenToKVPoolHost(device, PAGES, register=lambda address, size: asked.append((address, size)))
    assert asked == [(pool.kv.data_ptr(), PAGES * pool.page_bytes)]
    assert [r.getMessage()[:16] for r in caplog.records] == ["hicache: pinning", "hicache: pinned "]
    caplog.clear()
    times = iter((10.0, 42.5))
    with caplog.at_level("INFO"):
        pin_memory(torch.empty(30_000_000, dtype=torch.int16), lambda address, size: None, lambda: next(times))
    assert [r.getMessage() for r in caplog.records] == [
        "hicache: pinning 60.00 MB of host memory",
        "hicache: pinned 60.00 MB in 32.5 s",
    ]


def test_without_a_gpu_nothing_is_pinned(caplog):
    with caplog.at_level("INFO"):
        make_pool("page_first")
    assert not caplog.records


def test_memory_that_cannot_be_pinned_says_what_to_lower(monkeypatch):
    runtime = mock.Mock()
    runtime.cudaHostRegister.return_value = 2
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(HostMemoryError, match=r"pin 64\.00 GB .* \(error 2\): lower --hicache-size"):
        cuda_register(4096, 64_000_000_000)
    runtime.cudaHostRegister.assert_called_once_with(4096, 64_000_000_000, 0)
    runtime.cudaHostRegister.return_value = 0
    cuda_register(4096, 8192)


@pytest.mark.parametrize(
    ("is_pinned", "available_gib", "fitting_gib"),
    [(False, 10, 8), (True, 20, 12), (True, 128, 115.2), (True, 8, 0), (False, 1, 0)],
)
def test_the_pool_leaves_the_system_memory(is_pinned: bool, available_gib: float, fitting_gib: float) -> None:
    page = 1 << 20
    found, limited = host_pages_that_fit(1 << 20, page, 2.0, 0.0, int(available_gib * 2**30), is_pinned)
    assert limited and found == int(fitting_gib * 1024)
    # What fits is not made smaller.
    if fitting_gib:
        assert host_pages_that_fit(100, page, 2.0, 0.0, int(available_gib * 2**30), is_pinned) == (200, False)
