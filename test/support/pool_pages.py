"""Pages of a pool by their numbers, whatever the pool and its order: a copy of them, and poison in them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from sgl_kernel.kvcacheio import KVPages
from sglang.srt.mem_cache.hybrid_pages import HybridPages, runs_alike
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.page_memory import PageMemory
from sglang.srt.peer.memory.borrowed_pool import BorrowedPool
from sglang.srt.utils.device import to_device


class Pool(Protocol):
    page_layout: PageLayout
    kv: torch.Tensor

    @property
    def kv_pages(self) -> KVPages | HybridPages: ...


def pages_of(pool: Pool, frames: torch.Tensor, windowed_frames: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of pages `frames` (n,) int64, page-first, as `kv` of a page-first `PageMemory` of n pages. It reads no
    other page: there may be none behind its number. windowed_frames: the pages' frames in the pool for layers with a
    window, if there is one; None: these layers are zeros."""
    size = len(frames) * pool.page_layout.page_bytes
    memory = torch.zeros(size, dtype=torch.uint8, device=pool.kv.device)
    copy = PageMemory(pool.page_layout, len(frames), memory, "page_first")
    for layers in _runs_of(pool):
        pages = pool.kv_pages.part(layers)
        there: torch.Tensor | None = frames
        if isinstance(pool.kv_pages, HybridPages) and pool.kv_pages.windowed[layers.start]:
            there = windowed_frames
        for to, of in zip(copy.kv_pages.part(layers).components, pages.components):
            if there is not None:
                # An index, because `index_select` may copy all of what does not lie together.
                to.view(torch.uint8).copy_(of.view(torch.uint8).transpose(0, 1)[there].transpose(0, 1))
    return copy.kv


def fill_all(pool: Pool, value: float) -> None:
    """All pages of a pool, in whatever memory layers have."""
    for layers in _runs_of(pool):
        for component in pool.kv_pages.part(layers).components:
            component.fill_(value)


def poison(pool: Pool, frames: np.ndarray | torch.Tensor) -> None:
    """Set every bit of pages `frames` (n,), which makes floats NaN: reading them before they are written shows.
    Pages that are not mapped here are left out. In a hybrid pool, only layers with full attention."""
    if isinstance(frames, np.ndarray):
        frames = to_device(frames.astype(np.int64), pool.kv.device)
    if isinstance(pool, BorrowedPool):
        is_mapped = np.array([not pool.is_strict(place) for place in range(pool.slabs.num_slabs)])
        pages = np.flatnonzero(is_mapped.repeat(pool.num_pages // pool.slabs.num_slabs))
        frames = frames[torch.isin(frames, to_device(pages, frames.device))]
    _poison(pool.kv_pages.full if isinstance(pool.kv_pages, HybridPages) else pool.kv_pages, frames)


def poison_windowed(pool: Pool, frames: np.ndarray) -> None:
    """The same for frames of the pool for layers with a window."""
    assert isinstance(pool.kv_pages, HybridPages)
    _poison(pool.kv_pages.of_windows, to_device(frames.astype(np.int64), pool.kv.device))


def _poison(pages: KVPages, frames: torch.Tensor) -> None:
    for component in pages.components:
        component.view(torch.uint8).index_fill_(1, frames, 255)


def _runs_of(pool: Pool) -> list[range]:
    """Layers whose pages have the same numbers."""
    pages = pool.kv_pages
    return runs_alike(pages.windowed) if isinstance(pages, HybridPages) else [range(pages.num_layers)]
