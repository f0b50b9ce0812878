"""`HostKVCache`: what a storage plugin sees as the host pool, under upstream's name.

Owns *staging* memory, not the host pool: a plugin never holds a pointer to KV that a request may read. One page of
it holds one *record*, the bytes that `PluginStore` keeps under one key; what is inside is not the plugin's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

# Runs begin and end at multiples of this, so that plugins may use O_DIRECT and register whole memory pages.
RUN_ALIGNMENT_BYTES = 4096


class HostKVCache:
    """Pages of `page_size` tokens in upstream's page_first layout, for a model with one layer and one head.

    A page is two runs of equal size, which plugins call K and V. Sizes agree in every way that a plugin may compute
    them: kv_buffer: (2, size, layer_num = 1, head_num = 1, head_dim), contiguous; a page is
    `size_per_token * page_size` bytes, a run half of that; token index = page number * page_size.

    Not here, so that a plugin that needs it fails with its name: allocation (`alloc`, `free`), transfers to the
    device, `device_pool`, split heads, and what pools for MLA, hybrid and NPU models have.
    """

    layout = "page_first"
    device = "cpu"
    pin_memory = False
    layer_num = 1
    start_layer = 0
    end_layer = 1
    head_num = 1
    dcp_size = 1
    dcp_rank = 0
    mtp_draft_device_pools: tuple = ()
    # What upstream adds to the model's name where a page has a form of its own.
    storage_format_tag: str | None = None

    def __init__(self, page_num: int, page_size: int, min_page_bytes: int, dtype: torch.dtype) -> None:
        """min_page_bytes: what a page has to hold; it becomes larger, until both runs are aligned."""
        self.page_num = page_num
        self.page_size = page_size
        self.size = page_num * page_size
        self.dtype = dtype
        step = int(np.lcm(RUN_ALIGNMENT_BYTES, page_size * dtype.itemsize))
        self.run_bytes = -(-min_page_bytes // (2 * step)) * step
        self.page_bytes = 2 * self.run_bytes
        self.head_dim = self.run_bytes // (page_size * dtype.itemsize)
        self.size_per_token = self.get_size_per_token()
        # Untouched pages of it cost no memory.
        memory = torch.empty(page_num * self.page_bytes + RUN_ALIGNMENT_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % RUN_ALIGNMENT_BYTES
        memory = memory[start : start + page_num * self.page_bytes]
        self.kv_buffer = memory.view(dtype).view(2, self.size, self.layer_num, self.head_num, self.head_dim)
        # (2, page_num, run_bytes) uint8
        self._runs = memory.numpy().reshape(2, page_num, self.run_bytes)

    @property
    def k_buffer(self) -> torch.Tensor:
        return self.kv_buffer[0]

    @property
    def logical_size(self) -> int:
        """Tokens of all ranks that share a page, which are one here."""
        return self.size

    @property
    def logical_page_size(self) -> int:
        return self.page_size

    @property
    def v_buffer(self) -> torch.Tensor:
        return self.kv_buffer[1]

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """All memory that a plugin may have to register."""
        return [self.k_buffer, self.v_buffer]

    def get_size_per_token(self) -> int:
        return self.page_bytes // self.page_size

    def get_ksize_per_token(self) -> int:
        return self.run_bytes // self.page_size

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int:
        """Bytes behind one pointer of `get_page_buffer_meta`."""
        if split_factor != 1:
            raise NotImplementedError("pages are not split by heads here")
        return self.run_bytes

    def get_page_buffer_meta(self, indices: torch.Tensor | Sequence[int]) -> tuple[list[int], list[int]]:
        """Addresses and sizes in bytes of the runs of pages: K, V of the first, K, V of the second, ...

        indices: token indices, `page_size` per page, of which the first counts.
        """
        tokens = indices.tolist() if isinstance(indices, torch.Tensor) else list(indices)
        if len(tokens) % self.page_size:
            raise ValueError(f"{len(tokens)} indices are not whole pages of {self.page_size} tokens")
        pages = [self._page(token) for token in tokens[:: self.page_size]]
        pointers = [int(self._runs[run, page].ctypes.data) for page in pages for run in (0, 1)]
        return pointers, [self.run_bytes] * len(pointers)

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        return RUN_ALIGNMENT_BYTES % page_size_bytes == 0

    def get_data_page(self, index: int | torch.Tensor, flat: bool = True) -> torch.Tensor:
        """The page that begins at token `index`. flat: a copy, K before V, that the caller may keep; else a view
        (2, page_size, 1, 1, head_dim) of the staging memory, whose halves are contiguous."""
        start = self._page(index) * self.page_size
        page = self.kv_buffer[:, start : start + self.page_size]
        return torch.cat((page[0].flatten(), page[1].flatten())) if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A page of zeros of the caller's own, flat."""
        return torch.zeros(self.page_bytes // self.dtype.itemsize, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int | torch.Tensor, data_page: torch.Tensor) -> None:
        self.write(self._page(index), bytes_of(data_page))

    def read(self, page: int, out: np.ndarray) -> None:
        """Copy a page, by its number, to out: (page_bytes,) uint8."""
        out[: self.run_bytes] = self._runs[0, page]
        out[self.run_bytes :] = self._runs[1, page]

    def write(self, page: int, data: np.ndarray) -> None:
        if data.nbytes != self.page_bytes:
            raise ValueError(f"{data.nbytes} bytes are not a page of {self.page_bytes}")
        self._runs[0, page] = data[: self.run_bytes]
        self._runs[1, page] = data[self.run_bytes :]

    def wipe_end(self, page: int, size_bytes: int) -> None:
        """Zero the last bytes of a page."""
        self._runs[1, page, -size_bytes:] = 0

    def _page(self, index: int | torch.Tensor) -> int:
        page, rest = divmod(int(index), self.page_size)
        if rest or not 0 <= page < self.page_num:
            raise IndexError(f"token index {int(index)} is not the start of one of {self.page_num} pages")
        return page


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor on the host, (size,) uint8: itself if it is contiguous there, else a copy."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
