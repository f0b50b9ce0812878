"""Pages of a file that a GPU does not reach: what comes back is what was written, however late the device is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.link import CopyLink, CopyOptions
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.staged_pages import StagedPages
from sglang.srt.mem_cache.swap_file import SwapFile
from sglang.srt.mem_cache.transfer import D2S, Ticket, Tier, TransferOp
from sglang.srt.utils.cuda_stream import make_stream
from support.device_emulator import emulated_device
from support.page_layouts import LAYOUTS
from support.pool_pages import pages_of

DEVICE = torch.device("cuda:0")
NUM_PAGES, SEED = 23, 5


@pytest.mark.sampled(36)
@pytest.mark.parametrize("half_pages", [1, 3, 100])
@pytest.mark.parametrize("io_backend", ["kernel", "dma"])
@pytest.mark.parametrize("layout", [each for each in LAYOUTS.values() if each.page_size < 16], ids=str)
def test_what_a_link_writes_a_layer_stream_reads(
    tmp_path: Path, layout: PageLayout, io_backend: str, half_pages: int
) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    mine, there = (rng.permutation(NUM_PAGES)[:17] for _ in range(2))
    with emulated_device(SEED):
        pool, back = (MHATokenToKVPool(NUM_PAGES, layout, DEVICE) for _ in range(2))
        values = torch.from_numpy(rng.integers(0, 256, NUM_PAGES * layout.page_bytes, np.uint8))
        pool.kv.copy_(values.view(pool.kv.dtype).view(pool.kv.shape))
        wanted, before = (pages_of(each, torch.from_numpy(mine).to(DEVICE)).cpu() for each in (pool, back))
        swap = SwapFile(tmp_path, NUM_PAGES, layout)
        staged = StagedPages(swap.kv_pages, layout, DEVICE, half_pages * layout.page_bytes)
        swaps, loads = (make_stream(name, DEVICE) for name in (D2S, "layer-stream"))
        link = CopyLink(D2S, pool, staged, swaps, lambda launch: None, options=CopyOptions(io_backend))
        frames = (each.astype(np.int32) for each in (mine, there))
        link.submit(TransferOp(Ticket(D2S, 0), Tier.DEVICE, Tier.DISK, *frames, size_bytes=1))
        swaps.close()
        assert [(result.ok, result.error) for result in link.poll()] == [(True, "")]

        def load() -> None:
            for layer in range(layout.num_layers):
                pages = back.kv_pages.part(range(layer, layer + 1))
                staged.load_layer(layer, pages, torch.from_numpy(there), torch.from_numpy(mine), io_backend)

        loads.enqueue(load)
        loads.when_done(lambda: None)  # else the device may be later than the thread, and than what reads here
        loads.close()
        loads.raise_if_dead()
        found = pages_of(back, torch.from_numpy(mine).to(DEVICE)).cpu()
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    assert not torch.equal(before.view(torch.uint8), wanted.view(torch.uint8))
