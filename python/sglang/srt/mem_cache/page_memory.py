"""`PageMemory`: pages of one layout in one run of bytes, as tensors. Every pool, file and buffer of pages has one.

Owns no memory: lays views over what it is given. Which page is whose is the frame table's business.
"""

from __future__ import annotations

from functools import cached_property

import torch

from sgl_kernel.kvcacheio import KVPages
from sglang.srt.mem_cache.page_layout import PageLayout

ORDERS = ("page_first", "layer_first")


class PageMemory:
    """num_pages pages of `layout` in `memory`: (num_pages * page_bytes,) uint8, at a multiple of the layout's
    alignment.

    order: of ORDERS; ValueError for another.

    kv_pages: one view per component. kv: all of it. Where the components are alike (K and V) that is one tensor,
    page-first (num_pages, components, num_layers, page_size, ...) or layer-first (components, num_layers, num_pages,
    page_size, ...); else it is the memory, page-first (num_pages, page_bytes) or layer-first as it was given, uint8.
    """

    def __init__(self, layout: PageLayout, num_pages: int, memory: torch.Tensor, order: str) -> None:
        if order not in ORDERS:
            raise ValueError(f"layout {order!r} is none of {', '.join(ORDERS)}")
        self.layout = layout
        self.order = order
        self.num_pages = num_pages
        self.memory = memory
        offsets = layout.offsets(1 if self.page_is_one_run else num_pages)
        components = []
        for component, start, run_bytes in zip(layout.components, offsets, layout.run_bytes):
            dtype, run = torch_dtype(component.dtype), layout.run_shape(component)
            size = layout.num_layers * run_bytes
            if self.page_is_one_run:
                part = self._rows[:, start : start + size].view(dtype)
                components.append(part.unflatten(1, (layout.num_layers, *run)).transpose(0, 1))
            else:
                part = memory[start : start + num_pages * size].view(dtype)
                components.append(part.view(layout.num_layers, num_pages, *run))
        self.kv_pages = KVPages(*components)

    @cached_property
    def kv(self) -> torch.Tensor:
        """See the class. Made when first asked for."""
        layout, first = self.layout, self.layout.components[0]
        if not layout.is_uniform:
            return self._rows if self.page_is_one_run else self.memory
        shape = [len(layout.components), layout.num_layers, *layout.run_shape(first)]
        shape.insert(0 if self.page_is_one_run else 2, self.num_pages)
        return self.memory.view(torch_dtype(first.dtype)).view(shape)

    @property
    def page_is_one_run(self) -> bool:
        """Whether all bytes of a page lie together."""
        return self.order == "page_first"

    @property
    def _rows(self) -> torch.Tensor:
        """Page-first memory as (num_pages, page_bytes) uint8."""
        return self.memory.view(self.num_pages, self.layout.page_bytes)


def torch_dtype(name: str) -> torch.dtype:
    """By a name of `page_layout.ITEM_BYTES`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def indexable(x: torch.Tensor) -> torch.Tensor:
    """The same elements, as bytes where they are of 8 bits: torch does not index those types."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
