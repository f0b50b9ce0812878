"""`MHATokenToKVPoolHost`: the host tier's memory, page-first, so that a page is one run for K and one for V."""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

# Left for the system when the host pool is sized.
HOST_MEMORY_RESERVE_BYTES = 2 << 30


class MHATokenToKVPoolHost:
    """kv: (num_pages, 2, num_layers, page_size, num_kv_heads, head_dim), like one device pool; pinned where there is
    a GPU. Written by backups and read by loads, on their links."""

    def __init__(self, device_pool: MHATokenToKVPool, num_pages: int) -> None:
        _, num_layers, _, page_size, num_kv_heads, head_dim = device_pool.kv.shape
        self.num_pages = num_pages
        self.kv = torch.empty(
            num_pages,
            2,
            num_layers,
            page_size,
            num_kv_heads,
            head_dim,
            dtype=device_pool.kv.dtype,
            pin_memory=device_pool.kv.is_cuda,
        )

    def pages(self, frames: torch.Tensor) -> torch.Tensor:
        """A copy of pages `frames` (n,) int64."""
        return self.kv.index_select(0, frames)

    def poison(self, frames: torch.Tensor) -> None:
        self.kv.index_fill_(0, frames, float("nan"))


def host_pages_that_fit(
    num_device_pages: int, page_bytes: int, ratio: float, size_gb: float, available_bytes: int
) -> tuple[int, bool]:
    """Pages of the host pool, and whether free memory was what limited them.

    ratio: host size over device size; size_gb, in 1e9 bytes, wins over it where it is not 0. At most what is
    available less a reserve.
    """
    wanted = int(size_gb * 1e9) // page_bytes if size_gb else int(num_device_pages * ratio)
    fitting = max(0, available_bytes - HOST_MEMORY_RESERVE_BYTES) // page_bytes
    return min(wanted, fitting), fitting < wanted
