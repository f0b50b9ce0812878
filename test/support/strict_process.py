"""A lender or a borrower in strict mode, as a `Child`, which reports what happens to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.transfer import LoadFailedError
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig
from sglang.srt.peer.memory.lent_memory import LentMemory, LentOptions, allocate_pool
from sglang.srt.utils.peer_timing import PeerTiming

LAYOUT = PageLayout.kv(4, 3, 2, 8, torch.float32)
PAGE_BYTES = LAYOUT.page_bytes
SLAB_BYTES, NUM_SLABS = 1 << 16, 3
# What a borrower writes, and a lender's own.
FOREIGN, OWN = 7.0, 0x2A


def borrowed_memory(
    endpoints: list[str], name: str, num_slabs: int = NUM_SLABS, layout: PageLayout = LAYOUT
) -> BorrowedMemory:
    return BorrowedMemory(endpoints, name, SlabsConfig(num_slabs, SLAB_BYTES), layout)


def lent_memory(endpoint: str, directory: Path, strict: bool = True, recall_s: float = 10.0) -> LentMemory:
    """A lender's memory, with pages of another shape. Slabs wait for a borrower."""
    layout = PageLayout.kv(2, 5, 1, 24, torch.bfloat16)
    options = LentOptions(strict, PeerTiming(recall=recall_s, grace=recall_s, offer=1e6))
    return LentMemory(endpoint, directory, allocate_pool(SlabsConfig(NUM_SLABS, SLAB_BYTES), layout), options=options)


def lend(say: Callable[..., None], endpoint: str, directory: Path) -> None:
    """Lends all its slabs."""
    memory = lent_memory(endpoint, directory)
    memory.lend(range(NUM_SLABS))
    say("ready")
    while True:
        memory.poll_mapped()
        time.sleep(0.01)


def borrow(say: Callable[..., None], endpoint: str) -> None:
    """Writes sevens to what it is lent and reads it, again and again, and gives back recalled slabs."""
    # More threads than one would wait for each other.
    torch.set_num_threads(1)
    memory = borrowed_memory([endpoint], "child")
    device = MHATokenToKVPool(memory.pool.slab_pages, LAYOUT)
    device.kv.fill_(FOREIGN)
    pages, mover = torch.arange(memory.pool.slab_pages), memory.pool.mover()
    said: list[object] = []
    while True:
        is_mapped = np.frombuffer(memory.poll_mapped().mapped, np.uint8)
        mapped = np.flatnonzero(is_mapped)
        memory.give_back(np.flatnonzero(is_mapped == 0).tolist())
        try:
            for place in mapped.tolist():
                frames = torch.from_numpy(memory.pool.frames_of(place)).long()
                mover.back_up(device.kv_pages.part(range(LAYOUT.num_layers)), pages, frames, "auto")
                for layer in range(LAYOUT.num_layers):
                    mover.load_layer(layer, device.kv_pages.part(range(layer, layer + 1)), frames, pages, "auto")
                assert (device.kv == FOREIGN).all(), "what comes back is not what was written"
            found: list[object] = ["has", len(mapped)]
        except LoadFailedError:
            found = ["failed"]
        time.sleep(0.002)
        if found != said:
            say(*found)
            said = found
