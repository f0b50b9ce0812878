"""`MHATokenToKVPoolHost`: the host tier's memory. Which page is whose is the frame table's business.

Owns the memory and knows its order. Whatever the order, the bytes of a page that leaves for storage are the
*canonical* ones, a page-first pool's (`page_layout.py`); of K and V (2, num_layers, page_size, num_kv_heads,
head_dim).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from sgl_kernel.cpu.huge_pages import ask_for_huge_pages, populate
from sgl_kernel.kvcacheio import KVPages
from sglang.srt.mem_cache.border_slabs import BorderSlabs
from sglang.srt.mem_cache.hybrid_pages import HybridPages, regions_of, runs_alike
from sglang.srt.mem_cache.memory_pool import DevicePool
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.page_memory import PageMemory
from sglang.srt.utils.byte_sizes import shown_size
from sglang.srt.utils.shared_memory import SharedMemory

# Left for the system when the host pool is sized. The system cannot take pinned memory back, and a process beside a
# GPU has more to keep: weights on their way, and buffers of the tiers below.
_RESERVE_BYTES = 2 << 30
_RESERVE_BYTES_BESIDE_PINNED = 8 << 30

_POPULATING_THREADS = 8
# Its memory's name in /proc.
HOST_POOL = "hicache-host-pool"

logger = logging.getLogger(__name__)


class MHATokenToKVPoolHost:
    """One host pool in the device pool's layout; pinned where there is a GPU. Written by backups and by reads from
    storage, read by loads and by writes to storage, each on its link; tickets keep them apart.

    layout: the order, "page_first" or "layer_first". page_layout: what a page holds; page_bytes: of one page. kv,
    kv_pages: as of `PageMemory`; of K and V, kv is page-first (num_pages, 2, num_layers, page_size, num_kv_heads,
    head_dim), or layer-first (2, num_layers, num_pages, page_size, num_kv_heads, head_dim). shared: the memory
    itself, for another process; it begins at a page of the system, as reads and writes past the page cache and GPUs
    want it; by default it is allocated. register: see `pin_memory`; by default CUDA's where the device pool is on a
    GPU. Raises ValueError for another order.

    num_windowed_pages: above 0, layers with a window have so many pages of their own, see `HybridPages`. windowed: of
    each layer, whether it has one. kv is the memory then, bytes. A store names pages by their frames alone:
    `set_windowed` tells which they are in layers with a window. border: where slabs of the memory are either's;
    page-first.
    """

    # See `HostRegion`.
    first_page = 0

    def __init__(
        self,
        device_pool: DevicePool,
        num_pages: int,
        layout: str = "page_first",
        register: Callable[[int, int], None] | None = None,
        shared: SharedMemory | None = None,
        num_windowed_pages: int = 0,
        windowed: Sequence[bool] = (),
        border: BorderSlabs | None = None,
    ) -> None:
        assert border is None or layout == "page_first", "a slab is one run of bytes for pages of both kinds"
        self.page_layout = device_pool.page_layout
        self.num_pages = num_pages
        self.num_windowed_pages = num_windowed_pages
        self.windowed = tuple(windowed)
        self.page_size = self.page_layout.page_size
        self.page_bytes = self.page_layout.page_bytes
        self.layout = layout
        regions = regions_of(self.page_layout, num_pages, windowed, num_windowed_pages)
        begins, size_bytes = _places_of(regions, border)
        # Given to the offload proxy, where there is one, which writes what it fetches into it.
        self.shared = shared or SharedMemory.allocate(size_bytes, HOST_POOL)
        assert self.shared.size_bytes == size_bytes, f"{self.shared.size_bytes} bytes of {size_bytes}"
        memory = torch.from_numpy(self.shared.memory)
        # Of layers with full attention and of those with a window, or of all layers.
        self.regions = [
            HostRegion(
                PageMemory(of_region, count, memory[begin : begin + count * of_region.page_bytes], layout),
                self.shared,
                begin // of_region.page_bytes,
            )
            for (count, of_region), begin in zip(regions, begins, strict=True)
        ]
        self.kv: torch.Tensor
        self.kv_pages: KVPages | HybridPages
        if num_windowed_pages:
            full, of_windows = (each.memory.kv_pages for each in self.regions)
            self.kv, self.kv_pages = memory, HybridPages(full, of_windows, windowed)
            self._parts = _parts_of(self.page_layout, [each.page_layout for each in self.regions], windowed)
        else:
            self.kv, self.kv_pages = self.regions[0].memory.kv, self.regions[0].memory.kv_pages
        # By page, -1 for none; of pages that operations of storage read or write.
        self._windowed_of = np.full(num_pages if num_windowed_pages else 0, -1, np.int32)
        if register is None and device_pool.kv.is_cuda:
            register = cuda_register
            # CUDA must let go before the memory does.
            weakref.finalize(self, cuda_unregister, memory.data_ptr()).atexit = False
        if register is not None:
            pin_memory(memory, register)

    def set_windowed(self, frames: np.ndarray, windowed: np.ndarray) -> None:
        """What pages `frames` (n,) int32 are in layers with a window, (n,) int32; -1: what is written there of such
        layers is left out."""
        self._windowed_of[frames] = windowed

    def windowed_of(self, frames: np.ndarray) -> np.ndarray:
        """The same, as it was set."""
        return self._windowed_of[frames]

    def buffers(self, frames: np.ndarray) -> list[memoryview] | None:
        """See `HostRegion`; None also where layers with a window have pages of their own."""
        return None if self.num_windowed_pages else self.regions[0].buffers(frames)

    def copy_out(self, frames: np.ndarray, out: np.ndarray) -> None:
        """Copy pages `frames` (n,) int32 to out: (n * page_bytes,) uint8, page after page."""
        if not self.num_windowed_pages:
            self.regions[0].copy_out(frames, out)
            return
        assert out.flags.c_contiguous, "the copy would go to a temporary"
        pages = out.reshape(len(frames), self.page_bytes)
        for start, end in self.page_layout.padding:
            pages[:, start:end] = 0
        by_region = []
        for region, numbers in zip(self.regions, (frames, self.windowed_of(frames)), strict=True):
            by_region.append(np.empty((len(frames), region.page_bytes), np.uint8))
            region.copy_out(numbers, by_region[-1])
        for place, start, end, at in self._parts:
            pages[:, at : at + end - start] = by_region[place][:, start:end]

    def copy_in(self, frames: np.ndarray, data: np.ndarray) -> None:
        """Overwrite pages `frames` (n,) int32, each once, with data: (n * page_bytes,) uint8, page after page."""
        if not self.num_windowed_pages:
            self.regions[0].copy_in(frames, data)
            return
        pages = data.reshape(len(frames), self.page_bytes)
        by_region = [np.zeros((len(frames), region.page_bytes), np.uint8) for region in self.regions]
        for place, start, end, at in self._parts:
            by_region[place][:, start:end] = pages[:, at : at + end - start]
        windowed = self.windowed_of(frames)
        self.regions[0].copy_in(frames, by_region[0])
        self.regions[1].copy_in(windowed[windowed >= 0], by_region[1][windowed >= 0])


class HostRegion:
    """Pages of a host pool that lie in one piece of its memory, `shared`: a `HostPages`. first_page: how many such
    pages would lie before them."""

    def __init__(self, memory: PageMemory, shared: SharedMemory, first_page: int) -> None:
        self.memory = memory
        self.shared = shared
        self.first_page = first_page
        self.layout = memory.order
        self.page_layout = memory.layout
        self.num_pages = memory.num_pages
        self.page_size = self.page_layout.page_size
        self.page_bytes = self.page_layout.page_bytes
        self._bytes = memory.memory.numpy()
        self._parts = self._canonical_parts()
        # Of canonical pages; part of the memory only where pages lie in it as they are.
        self._padding = () if memory.page_is_one_run else self.page_layout.padding

    def buffers(self, frames: np.ndarray) -> list[memoryview] | None:
        """The memory of pages `frames` (n,) int32 itself, in this order and without a copy: writable, adjacent
        ascending frames as one buffer. None where a page is not one run of bytes (layer-first)."""
        if not self.memory.page_is_one_run:
            return None
        size, memory = self.page_bytes, self._bytes.data
        return [memory[first * size : (first + n) * size] for _, first, n in self._runs(frames)]

    def copy_out(self, frames: np.ndarray, out: np.ndarray) -> None:
        """Copy pages `frames` (n,) int32 to out: (n * page_bytes,) uint8, page after page."""
        assert out.flags.c_contiguous, "the copy would go to a temporary"
        pages = out.reshape(len(frames), self.page_bytes)
        for start, end in self._padding:
            pages[:, start:end] = 0
        runs = list(self._runs(frames))
        for mine, start, end in self._parts:
            part = pages[:, start:end].reshape(len(frames), *mine.shape[1:])
            for at, first, n in runs:
                np.copyto(part[at : at + n], mine[first : first + n])

    def copy_in(self, frames: np.ndarray, data: np.ndarray) -> None:
        """Overwrite pages `frames` (n,) int32, each once, with data: (n * page_bytes,) uint8, page after page."""
        pages = data.reshape(len(frames), self.page_bytes)
        runs = list(self._runs(frames))
        for mine, start, end in self._parts:
            part = pages[:, start:end].reshape(len(frames), *mine.shape[1:])
            for at, first, n in runs:
                np.copyto(mine[first : first + n], part[at : at + n])

    def _canonical_parts(self) -> list[tuple[np.ndarray, int, int]]:
        """The memory as runs of canonical bytes: views (num_pages, ...) uint8, and the first and last byte of a
        canonical page that each is."""
        if self.memory.page_is_one_run:
            return [(self._bytes.reshape(self.num_pages, self.page_bytes), 0, self.page_bytes)]
        layout, parts = self.page_layout, []
        if layout.is_uniform:
            shape = (len(layout.components), layout.num_layers, self.num_pages, layout.run_bytes[0])
            return [(np.moveaxis(self._bytes.reshape(shape), 2, 0), 0, self.page_bytes)]
        begins = layout.offsets(self.num_pages)
        for begin, start, run_bytes in zip(begins, layout.offsets(), layout.run_bytes):
            size = layout.num_layers * run_bytes
            runs = self._bytes[begin : begin + self.num_pages * size]
            by_page = runs.reshape(layout.num_layers, self.num_pages, run_bytes).swapaxes(0, 1)
            parts.append((by_page, start, start + size))
        return parts

    def _runs(self, frames: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """(position in frames, first frame, length) of each run of adjacent ascending frames."""
        if len(frames) == 0:
            return iter(())
        # A slice past the end would be shortened, one from below 0 would count from the end.
        assert frames.min() >= 0 and frames.max() < self.num_pages, (
            f"frames beyond the pool of {self.num_pages} pages"
        )
        starts = np.concatenate(([0], np.flatnonzero(np.diff(frames) != 1) + 1))
        lengths = np.diff(starts, append=len(frames))
        return zip(starts.tolist(), frames[starts].tolist(), lengths.tolist())


def _parts_of(
    whole: PageLayout, regions: Sequence[PageLayout], windowed: Sequence[bool]
) -> list[tuple[int, int, int, int]]:
    """Where the bytes of a region's canonical pages stand in those of all layers: (which region, their start and end
    there, their start here)."""
    parts = []
    for layers in runs_alike(windowed):
        region = int(windowed[layers.start])
        first = list(windowed[: layers.start]).count(windowed[layers.start])
        for here, there, run_bytes in zip(whole.offsets(), regions[region].offsets(), whole.run_bytes, strict=True):
            start = there + first * run_bytes
            parts.append((region, start, start + len(layers) * run_bytes, here + layers.start * run_bytes))
    return parts


def _places_of(regions: Sequence[tuple[int, PageLayout]], border: BorderSlabs | None = None) -> tuple[list[int], int]:
    """Where each region begins, and the bytes of all. A region begins as if its pages were the whole memory's, and
    with the slabs that are either's."""
    begins, end = [], 0
    for count, layout in regions:
        begins.append(-(-end // layout.page_bytes) * layout.page_bytes)
        end = begins[-1] + count * layout.page_bytes
    if border is not None:
        (count, full), (num_windowed, of_windows) = regions
        begins[1] = (count - border.num_full) * full.page_bytes
        end = begins[1] + num_windowed * of_windows.page_bytes
        assert border.num_full * full.page_bytes == border.num_windowed * of_windows.page_bytes, "slabs differ"
        assert begins[1] % of_windows.page_bytes == 0, "slabs begin within a page"
    return begins, end


def host_pool_bytes(
    layout: PageLayout,
    num_pages: int,
    windowed: Sequence[bool] = (),
    num_windowed_pages: int = 0,
    border: BorderSlabs | None = None,
) -> int:
    """Of the memory of a host pool, see `MHATokenToKVPoolHost`. windowed: of each layer, whether it has a window."""
    return _places_of(regions_of(layout, num_pages, windowed, num_windowed_pages), border)[1]


class HostMemoryError(RuntimeError):
    """The host pool's memory cannot be allocated as requested; the message names the remedy."""


def pin_memory(
    memory: torch.Tensor, register: Callable[[int, int], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Lock memory for a GPU, and log how long that took: seconds per 10 GB.

    register(address, size_bytes). In one piece, since a copy may not cross the border of two. Not through
    `torch.empty(pin_memory=True)`, which takes the next power of two: 64 GiB for 40. The memory is brought into being
    before, by several threads on huge pages where the system has them: registering does that with one.
    """
    size_bytes = memory.numel() * memory.element_size()
    logger.info("hicache: pinning %s of host memory", shown_size(size_bytes))
    start = clock()
    ask_for_huge_pages(memory)
    populate(memory, _POPULATING_THREADS)
    register(memory.data_ptr(), size_bytes)
    logger.info("hicache: pinned %s in %.1f s", shown_size(size_bytes), clock() - start)


def cuda_register(address: int, size_bytes: int) -> None:
    """Pin memory that exists. Raises HostMemoryError."""
    error = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    if error:
        raise HostMemoryError(
            f"CUDA cannot pin {shown_size(size_bytes)} of host memory (error {error}): lower --hicache-size or "
            "--hicache-ratio"
        )


def cuda_unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def host_pages_that_fit(
    num_device_pages: int, page_bytes: int, ratio: float, size_gb: float, available_bytes: int, is_pinned: bool
) -> tuple[int, bool]:
    """Pages of the host pool, and whether free memory was what limited them.

    ratio: host size over device size; size_gb, in 1e9 bytes, wins over it where it is not 0. At most what is
    available less a reserve: of a pinned pool the larger of 8 GiB and a tenth.
    """
    wanted = int(size_gb * 1e9) // page_bytes if size_gb else int(num_device_pages * ratio)
    reserve = max(_RESERVE_BYTES_BESIDE_PINNED, available_bytes // 10) if is_pinned else _RESERVE_BYTES
    fitting = max(0, available_bytes - reserve) // page_bytes
    return min(wanted, fitting), fitting < wanted
