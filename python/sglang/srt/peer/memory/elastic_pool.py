"""`ElasticPool`: a device pool that can be lent slab by slab, without moving a byte (SwiftCache 3.4, Figure 6).

Owns how pages lie in a range of slabs. The frame table knows which page is whose, the ledger which slab is lent; the
range owns the memory itself.

Block-major: all layers of a page lie together, in the order of the host pool's pages, so that a page is one run of
bytes on both sides of a copy, and a slab holds whole pages and nothing of any other:

    slab 0                      slab 1                      stride
    | page 0 | page 1 | page 2 . | page 4 | page 5 | page 6 . |       .  padding: the numbers 3 and 7
                                                                         are no pages

Behind the last slab there may be a scratch page: it has the number after all others, is always mapped, and belongs to
no slab. A frame table does not know it.

Layers with a window may have a pool of their own (`HybridPages`). It lies outside the slabs and is not lent.

Replaces `MHATokenToKVPool`: attention, links and executor read both through the strides of `KVView`. The same class
is a borrower's pool over the slabs that it has mapped, with the borrower's page size and shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sgl_kernel import elementwise
from sgl_kernel.cpu.elementwise import store_in_pages, takes_rows
from sgl_kernel.kvcacheio import KVPages
from sglang.srt.mem_cache.hybrid_pages import HybridPages, regions_of
from sglang.srt.mem_cache.kv_view import KVView
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.page_memory import PageMemory, indexable
from sglang.srt.peer.memory.slabs import Slabs


class ElasticPool:
    """Pages of any `PageLayout`, page-first. kv: as of `PageMemory`; of K and V, (num_pages, 2, num_layers,
    page_size, num_kv_heads, head_dim), a view of the range's memory. Touch pages of mapped slabs only, by name; an
    operation on all of kv ends the process where a page is not mapped. On the device that the slabs are of.

    num_pages: of the whole range, mapped or not, padding included; `frames_of` has those that are pages of a slab.
    slab_pages: usable pages of one slab. scratch_slot: in the scratch page, which is where the slabs have a tail, and
    counts in kv, not in num_pages. Which slabs are lent, `SlabLedger` knows. Raises ValueError where pages of the
    range have no single stride, see `elastic_units.stride_bytes`, or a tail no room for a page.

    windowed, num_windowed_pages: see `MHATokenToKVPool`; kv is the memory of the slabs then, as bytes. page_bytes: of
    a page in a slab.
    """

    def __init__(
        self, slabs: Slabs, layout: PageLayout, windowed: Sequence[bool] = (), num_windowed_pages: int = 0
    ) -> None:
        self.slabs = slabs
        self.page_layout = layout
        self.page_size = layout.page_size
        self.num_windowed_pages = num_windowed_pages
        regions = regions_of(layout, 0, windowed, num_windowed_pages)
        in_slabs = regions[0][1]
        self.page_bytes = in_slabs.page_bytes
        if slabs.stride_bytes % self.page_bytes or slabs.slab_bytes < self.page_bytes:
            raise ValueError(
                f"slabs of {slabs.slab_bytes:,} bytes, {slabs.stride_bytes:,} apart, have no room for pages of "
                f"{self.page_bytes:,} bytes with one stride: raise --peer-slab-size, or lower --page-size"
            )
        if 0 < slabs.tail_bytes < self.page_bytes:
            raise ValueError(f"{slabs.tail_bytes:,} bytes behind the slabs have no room for {self.page_bytes:,}")
        self.slab_pages = slabs.slab_bytes // self.page_bytes
        self._stride_pages = slabs.stride_bytes // self.page_bytes
        self.num_pages = slabs.num_slabs * self._stride_pages
        has_scratch = slabs.tail_bytes > 0
        self.scratch_slot = self.windowed_scratch_slot = self.num_pages * self.page_size if has_scratch else None
        num_in_memory = self.num_pages + has_scratch
        memory = slabs.tensor()[: num_in_memory * self.page_bytes]
        pages = PageMemory(in_slabs, num_in_memory, memory, "page_first")
        self.kv: torch.Tensor = pages.kv
        self.kv_pages: KVPages | HybridPages = pages.kv_pages
        if num_windowed_pages:
            self.windowed_scratch_slot = num_windowed_pages * self.page_size if has_scratch else None
            num_own, of_windows = num_windowed_pages + has_scratch, regions[1][1]
            own = torch.zeros(num_own * of_windows.page_bytes, dtype=torch.uint8, device=memory.device)
            own_pages = PageMemory(of_windows, num_own, own, "layer_first").kv_pages
            self.kv, self.kv_pages = memory, HybridPages(pages.kv_pages, own_pages, windowed)
        self._views = [KVView.of_layer(self.kv_pages.part(range(i, i + 1))) for i in range(layout.num_layers)]

    @property
    def slab_padding_bytes(self) -> int:
        """The end of each slab, which has no room for a page."""
        return self.slabs.slab_bytes % self.page_bytes

    def frames_of(self, slab: int) -> np.ndarray:
        """(slab_pages,) int32, the pages that lie in a slab."""
        first = slab * self._stride_pages
        return np.arange(first, first + self.slab_pages, dtype=np.int32)

    @property
    def slab_frames(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of the pages in each slab, for `SlabLedger`."""
        firsts = range(0, self.num_pages, self._stride_pages)
        return tuple((first, first + self.slab_pages) for first in firsts)

    def view(self, layer_id: int) -> KVView:
        return self._views[layer_id]

    def store(self, layer_id: int, loc: torch.Tensor, *values: torch.Tensor) -> None:
        view = self._views[layer_id]
        tokens = [view.components[i] for i in self.page_layout.per_token]
        assert len(values) == len(tokens), f"{len(values)} values for {len(tokens)} components"
        if len(values) == 2 and elementwise.has_store_kernel(values[0], values[1]):
            elementwise.store_kv(tokens[0], tokens[1], loc, values[0], values[1])
            return
        for pages, value in zip(tokens, values):
            cast = elementwise.saturating_cast(value, pages.dtype)
            if takes_rows(cast):
                store_in_pages(pages, loc, cast)
            elif self.page_size == 1:
                indexable(pages)[:, 0].index_copy_(0, loc, indexable(cast))
            else:
                indexable(pages).index_put_((loc // self.page_size, loc % self.page_size), indexable(cast))
