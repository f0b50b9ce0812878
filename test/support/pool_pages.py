"""Pages of a pool by their numbers, whatever the pool and its order: a copy of them, and poison in them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from sgl_kernel.kvcacheio import KVPages
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.page_memory import PageMemory
from sglang.srt.peer.memory.borrowed_pool import BorrowedPool
from sglang.srt.utils.device import to_device


class Pool(Protocol):
    page_layout: PageLayout
    kv: torch.Tensor

    @property
    def kv_pages(self) -> KVPages: ...


def pages_of(pool: Pool, frames: torch.Tensor) -> torch.Tensor:
    """A copy of pages `frames` (n,) int64, page-first, as `kv` of a page-first `PageMemory` of n pages. It reads no
    other page: there may be none behind its number."""
    size = len(frames) * pool.page_layout.page_bytes
    memory = torch.zeros(size, dtype=torch.uint8, device=pool.kv.device)
    copy = PageMemory(pool.page_layout, len(frames), memory, "page_first")
    for to, of in zip(copy.kv_pages.components, pool.kv_pages.components):
        # An index, because `index_select` may copy all of what does not lie together.
        to.view(torch.uint8).copy_(of.view(torch.uint8).transpose(0, 1)[frames].transpose(0, 1))
    return copy.kv


def poison(pool: Pool, frames: np.ndarray | torch.Tensor) -> None:
    """Set every bit of pages `frames` (n,), which makes floats NaN: reading them before they are written shows.
    Pages that are not mapped here are left out."""
    if isinstance(frames, np.ndarray):
        frames = to_device(frames.astype(np.int64), pool.kv.device)
    if isinstance(pool, BorrowedPool):
        is_mapped = np.array([not pool.is_strict(place) for place in range(pool.slabs.num_slabs)])
        pages = np.flatnonzero(is_mapped.repeat(pool.num_pages // pool.slabs.num_slabs))
        frames = frames[torch.isin(frames, to_device(pages, frames.device))]
    for component in pool.kv_pages.components:
        component.view(torch.uint8).index_fill_(1, frames, 255)
