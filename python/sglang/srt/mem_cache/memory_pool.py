"""`MHATokenToKVPool`: the device pool's memory, layer-first. Which page is whose is the frame table's business.

`DevicePool` is what the engine asks of it; `peer.memory.elastic_pool.ElasticPool` is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sgl_kernel import elementwise
from sgl_kernel.cpu.elementwise import store_rows, takes_rows
from sgl_kernel.cpu.huge_pages import ask_for_huge_pages
from sgl_kernel.kvcacheio import KVPages
from sglang.srt.mem_cache.hybrid_pages import HybridPages, regions_of
from sglang.srt.mem_cache.kv_view import KVView
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.page_memory import PageMemory, indexable
from sglang.srt.utils.device import CPU


class DevicePool(Protocol):
    """num_pages: of page_size tokens, numbered as in the frame table. kv: all memory; its shape is the pool's own
    business. kv_pages: the same for `sgl_kernel.kvcacheio`. scratch_slot: one that is no page's, if there is one.

    num_windowed_pages: of a pool of its own for layers with a window; 0: there is none. Slots and pages of such
    layers are those of that pool. windowed_scratch_slot: its scratch_slot, or that of the only pool."""

    page_layout: PageLayout
    num_pages: int
    page_size: int
    num_windowed_pages: int
    kv: torch.Tensor
    scratch_slot: int | None
    windowed_scratch_slot: int | None

    @property
    def kv_pages(self) -> KVPages | HybridPages: ...

    def view(self, layer_id: int) -> KVView: ...

    def store(self, layer_id: int, loc: torch.Tensor, *values: torch.Tensor) -> None:
        """Write tokens into slots loc: (num_tokens,) int64, where slot page * page_size + i is token i of that page.
        Values of another dtype are rounded to the pool's; what is beyond its largest value becomes that.

        values: one for each component that pages hold per token, (num_tokens, *shape): K and V, each (num_tokens,
        num_kv_heads, head_dim), of ordinary attention. Components per page are written through `view`.
        """
        ...


class MHATokenToKVPool:
    """Pages of any `PageLayout`, zeros at first. Written by launches, on the compute stream, and by loads, on theirs;
    the scheduler's fences and tickets keep them apart.

    kv: as of `PageMemory`; of K and V, (2, num_layers, num_pages, page_size, num_kv_heads, head_dim). has_scratch:
    one more page behind the others, for what has to be written somewhere and is never read; scratch_slot is in it.

    windowed: of each layer, whether it has a window. With num_windowed_pages these layers have pages of their own,
    and a scratch page; there are layers of both kinds then, and kv is bytes, see `HybridPages`.
    """

    def __init__(
        self,
        num_pages: int,
        layout: PageLayout,
        device: torch.device = CPU,
        has_scratch: bool = False,
        windowed: Sequence[bool] = (),
        num_windowed_pages: int = 0,
    ) -> None:
        self.page_layout = layout
        self.num_pages = num_pages
        self.num_windowed_pages = num_windowed_pages
        self.page_size = layout.page_size
        regions = regions_of(layout, num_pages, windowed, num_windowed_pages)
        slots = [count * layout.page_size if has_scratch else None for count, _ in regions]
        self.scratch_slot, self.windowed_scratch_slot = slots[0], slots[-1]
        sizes = [(count + has_scratch) * of_region.page_bytes for count, of_region in regions]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        if memory.is_cpu:
            ask_for_huge_pages(memory)
        memory.zero_()
        pages = [
            PageMemory(of_region, count + has_scratch, part, "layer_first")
            for (count, of_region), part in zip(regions, memory.split(sizes))
        ]
        self.kv: torch.Tensor
        self.kv_pages: KVPages | HybridPages
        if num_windowed_pages:
            self.kv, self.kv_pages = memory, HybridPages(pages[0].kv_pages, pages[1].kv_pages, windowed)
        else:
            self.kv, self.kv_pages = pages[0].kv, pages[0].kv_pages
        self._views = [KVView.of_layer(self.kv_pages.part(range(i, i + 1))) for i in range(layout.num_layers)]
        self._slots = [[view.components[i].flatten(0, 1) for i in layout.per_token] for view in self._views]

    def view(self, layer_id: int) -> KVView:
        return self._views[layer_id]

    def store(self, layer_id: int, loc: torch.Tensor, *values: torch.Tensor) -> None:
        components = self._slots[layer_id]
        assert len(values) == len(components), f"{len(values)} values for {len(components)} components"
        if len(values) == 2 and elementwise.has_store_kernel(values[0], values[1]):
            k_pages, v_pages = (self._views[layer_id].components[i] for i in self.page_layout.per_token)
            elementwise.store_kv(k_pages, v_pages, loc, values[0], values[1])
            return
        for slots, value in zip(components, values):
            cast = elementwise.saturating_cast(value, slots.dtype)
            if takes_rows(cast):
                store_rows(slots, loc, cast)
            else:
                indexable(slots).index_copy_(0, loc, indexable(cast))
