"""`MHATokenToKVPool`: the device pool's memory, layer-first. Which page is whose is the frame table's business.

`DevicePool` is what the engine asks of it; `peer.elastic_pool.ElasticPool` is another.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sgl_kernel.kvcacheio import KVPages
from sglang.srt.mem_cache.kv_view import KVView
from sglang.srt.utils.device import CPU


class DevicePool(Protocol):
    """num_pages: of page_size tokens, numbered as in the frame table. kv: all memory; its shape is the pool's own
    business. kv_pages: the same for `sgl_kernel.kvcacheio`. scratch_slot: one that is no page's, if there is one."""

    num_pages: int
    page_size: int
    num_layers: int
    kv: torch.Tensor
    kv_pages: KVPages
    scratch_slot: int | None

    def view(self, layer_id: int) -> KVView: ...

    def store(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v: (num_tokens, num_kv_heads, head_dim) into slots loc: (num_tokens,) int64, where slot
        page * page_size + i is token i of that page."""
        ...

    def pages(self, frames: torch.Tensor) -> torch.Tensor:
        """A copy of pages `frames` (n,) int64, page-first as on the host."""
        ...

    def poison(self, frames: torch.Tensor) -> None:
        """Fill pages with NaN: whatever reads them before they are written shows it."""
        ...


class MHATokenToKVPool:
    """kv: (2, num_layers, num_pages, page_size, num_kv_heads, head_dim). Written by launches, on the compute stream,
    and by loads, on theirs; the scheduler's fences and tickets keep them apart. has_scratch: one more page behind the
    others, for what has to be written somewhere and is never read; scratch_slot is in it."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        has_scratch: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.scratch_slot = num_pages * page_size if has_scratch else None
        self.page_size = page_size
        self.num_layers = num_layers
        shape = (2, num_layers, num_pages + has_scratch, page_size, num_kv_heads, head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.kv_pages = KVPages.layer_first(self.kv)
        self._views = [KVView(self.kv[0, layer], self.kv[1, layer]) for layer in range(num_layers)]
        self._slots = [(view.k.flatten(0, 1), view.v.flatten(0, 1)) for view in self._views]

    @staticmethod
    def page_bytes(page_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """K and V of one page, all layers, in bytes."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    def view(self, layer_id: int) -> KVView:
        return self._views[layer_id]

    def store(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        k_slots, v_slots = self._slots[layer_id]
        k_slots.index_copy_(0, loc, k)
        v_slots.index_copy_(0, loc, v)

    def pages(self, frames: torch.Tensor) -> torch.Tensor:
        return self.kv.index_select(2, frames).movedim(2, 0).contiguous()

    def poison(self, frames: torch.Tensor) -> None:
        self.kv.index_fill_(2, frames, float("nan"))
