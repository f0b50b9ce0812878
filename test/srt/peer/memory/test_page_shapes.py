"""Lender and borrower with pages of different heads, sizes and dtypes: each counts the pages that fit into a slab and
its own padding, whole slabs go there and come back, and the lender's other slabs stay as they are."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.slab_ledger import SlabReport
from sglang.srt.peer.lent_places import LentOptions
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig
from sglang.srt.peer.memory.lent_memory import LentMemory, allocate_pool
from support.children import wait_until
from support.page_layouts import LAYOUTS, are_equal, contents, fill

SLAB_BYTES, NUM_SLABS = 1 << 17, 3
SHAPES = {
    "8 heads of 16, bfloat16, page 16": PageLayout.kv(16, 4, 8, 16, torch.bfloat16),
    "1 head of 24, float32, page 1": PageLayout.kv(1, 3, 1, 24, torch.float32),
    "2 heads of 40, float16, page 4": PageLayout.kv(4, 5, 2, 40, torch.float16),
    "latent 37, page 3": LAYOUTS["latent 37, page 3"],
}


@pytest.mark.parametrize("strict", [False, True], ids=["mapped", "strict"])
@pytest.mark.parametrize(("lender", "borrower"), list(permutations(SHAPES, 2)))
def test_slabs_hold_whole_pages_of_either_side(lender: str, borrower: str, strict: bool, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint, rng = f"ipc://{tmp_path}/peers", np.random.default_rng(1)
    config = SlabsConfig(NUM_SLABS, SLAB_BYTES)
    lent = LentMemory(endpoint, tmp_path, allocate_pool(config, SHAPES[lender]), options=LentOptions(strict))
    borrowed = BorrowedMemory([endpoint], "here", config, SHAPES[borrower])
    for memory, layout in ((lent, SHAPES[lender]), (borrowed, SHAPES[borrower])):
        pages, padding = divmod(SLAB_BYTES, layout.page_bytes)
        assert memory.pool.slab_pages == pages > 0
        assert memory.state()["slab_padding_bytes"] == padding < layout.page_bytes
    for slab in range(NUM_SLABS):
        lent.slabs.slab(slab)[:] = slab + 1
    lent.lend([1])
    reports: list[SlabReport] = []
    wait_until(lambda: [lent.poll_mapped(), reports.append(borrowed.poll_mapped()), any(reports[-1].mapped)][2], "it")
    frames = borrowed.pool.frames_of(reports[-1].mapped.index(1))
    device = MHATokenToKVPool(2 * len(frames), SHAPES[borrower])
    fill(device, rng)
    pages, back = np.split(rng.permutation(2 * len(frames)), 2)
    wanted = contents(SHAPES[borrower], device, pages)
    to_slab, index = torch.from_numpy(frames).long(), [torch.from_numpy(each) for each in (pages, back)]
    mover = borrowed.pool.mover()
    mover.back_up(device.kv_pages, index[0], to_slab, "auto")
    for layer in range(SHAPES[borrower].num_layers):
        mover.load_layer(layer, device.kv_pages.layer(layer), to_slab, index[1], "auto")
    assert are_equal(contents(SHAPES[borrower], device, back), wanted)
    # Other pages to the same slab, some layers at a time, as from a hybrid pool.
    fill(device, rng)
    wanted, num_layers = contents(SHAPES[borrower], device, back), SHAPES[borrower].num_layers
    for layers in (range(2), range(2, num_layers)):
        mover.back_up(device.kv_pages.part(layers), index[1], to_slab, "auto", layers)
    for layer in range(num_layers):
        mover.load_layer(layer, device.kv_pages.layer(layer), to_slab, index[0], "auto")
    assert are_equal(contents(SHAPES[borrower], device, pages), wanted)
    assert (lent.slabs.slab(0) == 1).all() and (lent.slabs.slab(2) == 3).all()
    padding = borrowed.pool.slab_padding_bytes
    assert not lent.slabs.slab(1)[SLAB_BYTES - padding :].any(), "the borrower wrote to its padding"
    borrowed.close()
    lent.close()
