"""`kernel` in CUDA C++: compiles `csrc/kvcacheio.cu` at first use, through CuPy and NVRTC, and launches it.

Owns the compiled module, one per device, and the addresses of pools between which it has copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from sgl_kernel.kvcacheio.layer_flags import LayerFlags
from sgl_kernel.kvcacheio.layout import KVLayoutError, KVPages, addresses

SOURCE = Path(__file__).resolve().parent.parent / "csrc" / "kvcacheio.cu"
KERNEL = "sgl_kv_copy_pages"
BULK_KERNEL = "sgl_kv_copy_pages_bulk"
LOAD_KERNEL = "sgl_kv_load_layers"
# A quarter of a multiprocessor's registers, so that what computes can share it.
THREADS = 256
WARPS = THREADS // 32
# 16 for each lane. A warp copies so many segments at a time.
SEGMENT_BYTES = 512
SEGMENTS_AT_ONCE = 8
_MAX_SEGMENTS = (1 << 31) - 1
# As in the source: a block's ring, and the places in it that a lane has.
BULK_RING_BYTES = 128 << 10
BULK_SLOTS = 4
# What a lane copies at a time: a run, within these limits.
LEAST_BULK_BYTES, MOST_BULK_BYTES = 1024, 8192
# Warps of `kernel` in whose place one of `bulk` comes.
_WARPS_PER_BULK_BLOCK = 32


def copy_pages(
    src: KVPages,
    dst: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    *,
    num_warps: int,
    is_bulk: bool = False,
    stream: Any = None,
) -> None:
    """See `kvcacheio.copy_pages`. is_bulk: by Hopper's bulk copies. Host memory, on either side, is pinned; the
    kernel reads it through its mapping."""
    with _current(src, dst, stream) as device:
        indices = _on_device(device, src_pages, dst_pages)
        kernel = _kernel(device.index, BULK_KERNEL if is_bulk else KERNEL)
        segment_bytes = bulk_segment_bytes(src.run_bytes) if is_bulk else SEGMENT_BYTES
        for launch in _prepared(src, dst, segment_bytes):
            arguments = launch.arguments(indices, device_address)
            num_segments = int(arguments[-1])
            if is_bulk:
                lanes = min(32, BULK_RING_BYTES // (BULK_SLOTS * segment_bytes))
                grid = min(-(-num_warps // _WARPS_PER_BULK_BLOCK), -(-num_segments // lanes))
                kernel((grid,), (32,), arguments, shared_mem=BULK_RING_BYTES)
            else:
                kernel((_num_blocks(num_warps, num_segments),), (THREADS,), arguments)


def load_layers(
    src: KVPages,
    dst: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    flags: LayerFlags,
    *,
    num_warps: int,
    stream: Any = None,
) -> int:
    """See `kvcacheio.load_layers`. No launch has more blocks than the largest group of layers keeps busy."""
    with _current(src, dst, stream) as device:
        indices = _on_device(device, src_pages, dst_pages)
        kernel, value = _kernel(device.index, LOAD_KERNEL), 0
        groups = (np.uint64(flags.ends.data_ptr()), np.uint64(flags.words.data_ptr()), np.int32(len(flags)))
        for launch in _prepared(src, dst, SEGMENT_BYTES):
            arguments = launch.arguments(indices, device_address)
            grid = _num_blocks(num_warps, int(arguments[-1]) * flags.most_layers // src.num_layers)
            kernel((grid,), (THREADS,), (*arguments, *groups))
            # At once: if the next launch fails, this one counts all the same.
            value = flags.count(grid)
        return value


def _num_blocks(num_warps: int, num_segments: int) -> int:
    return min(-(-num_warps // WARPS), -(-num_segments // (WARPS * SEGMENTS_AT_ONCE)))


@contextmanager
def _current(src: KVPages, dst: KVPages, stream: Any) -> Iterator[torch.device]:
    """Torch and CuPy use this stream, by default the current one, of the GPU on either side, which is returned."""
    import cupy

    device = dst.device if dst.is_cuda else src.device
    stream = stream or torch.cuda.current_stream(device)
    with (
        torch.cuda.device(device),
        torch.cuda.stream(stream),
        cupy.cuda.Device(device.index),
        cupy.cuda.ExternalStream(stream.cuda_stream),
    ):
        yield device


def _on_device(device: torch.device, *indices: torch.Tensor) -> list[torch.Tensor]:
    """Allocated in the stream's order: the memory is not reused before the kernel is done."""
    return [pages.to(device, torch.int64, non_blocking=True).contiguous() for pages in indices]


def bulk_segment_bytes(run_bytes: Sequence[int]) -> int:
    """What a lane copies at a time, a power of two. run_bytes: of each component's page and layer."""
    whole = 1 << (max(run_bytes) - 1).bit_length()
    return min(max(whole, LEAST_BULK_BYTES), MOST_BULK_BYTES)


@dataclass(frozen=True)
class Launch:
    """The kernel's arguments that all copies between two pools share, in its order: components are addresses, numbers
    strides and sizes. segments: of a page."""

    components: tuple[np.uint64, ...]
    numbers: tuple[np.int64 | np.int32, ...]
    segments: int

    @staticmethod
    def of(
        src: KVPages, dst: KVPages, address: Callable[[torch.Tensor], int], segment_bytes: int = SEGMENT_BYTES
    ) -> Launch:
        """Of one or two components, which the kernel calls K and V. With one, V has no bytes. address: the pointer
        to a tensor that a kernel may use."""
        # With one component, the first is the last too.
        sides = [side[index] for side in (addresses(src), addresses(dst)) for index in (0, -1)]
        tensors = [side.components[index] for side in (src, dst) for index in (0, -1)]
        k_bytes, v_bytes = (*src.run_bytes, 0)[:2]
        k_segments, v_segments = -(-k_bytes // segment_bytes), -(-v_bytes // segment_bytes)
        strides = [np.int64(s) for side in sides for s in (side.layer_stride, side.page_stride)]
        counts = [np.int32(n) for n in (src.num_layers, k_segments, v_segments, segment_bytes)]
        return Launch(
            tuple(np.uint64(address(t)) for t in tensors),
            (*strides, np.int64(k_bytes), np.int64(v_bytes), *counts),
            src.num_layers * (k_segments + v_segments),
        )

    def arguments(self, indices: list[torch.Tensor], address: Callable[[torch.Tensor], int]) -> tuple[Any, ...]:
        """All arguments. indices: pages of the source and of the destination, (n,) int64. Raises KVLayoutError for
        more than the kernel counts."""
        num_segments = len(indices[0]) * self.segments
        if num_segments > _MAX_SEGMENTS:
            raise KVLayoutError(f"{len(indices[0])} pages are too many for one launch: copy them in parts")
        pointers = [np.uint64(address(pages)) for pages in indices]
        return (*self.components, *pointers, *self.numbers, np.int32(num_segments))


# By source, destination and segment_bytes. Finding addresses takes the host longer than launching. The pages of a
# pool's layers live as long as the pool.
_launches: WeakKeyDictionary[KVPages, WeakKeyDictionary[KVPages, dict[int, list[Launch]]]] = WeakKeyDictionary()


def _prepared(src: KVPages, dst: KVPages, segment_bytes: int) -> list[Launch]:
    by_size = _launches.setdefault(src, WeakKeyDictionary()).setdefault(dst, {})
    if segment_bytes not in by_size:
        by_size[segment_bytes] = [Launch.of(*pair, device_address, segment_bytes) for pair in pairs(src, dst)]
    return by_size[segment_bytes]


def pairs(src: KVPages, dst: KVPages) -> list[tuple[KVPages, KVPages]]:
    """The components that each launch copies: two, K and V, or the last one alone."""
    firsts = range(0, len(src.components), 2)
    return [(KVPages(*src.components[i : i + 2]), KVPages(*dst.components[i : i + 2])) for i in firsts]


def device_address(t: torch.Tensor) -> int:
    """The address of t for a kernel: its address on a GPU, or the mapping of its pinned host memory."""
    if t.is_cuda:
        return t.data_ptr()
    from cupy.cuda import runtime

    if not t.is_pinned():
        raise KVLayoutError(
            "a kernel reads and writes pinned host memory only: allocate the pool with pin_memory=True"
        )
    return runtime.pointerGetAttributes(t.data_ptr()).devicePointer


@cache
def _kernel(device_index: int, name: str) -> Any:
    kernel = _module(device_index).get_function(name)
    if name == BULK_KERNEL:
        kernel.max_dynamic_shared_size_bytes = BULK_RING_BYTES
    return kernel


@cache
def _module(device_index: int) -> Any:
    import cupy

    del device_index  # one module per device
    return cupy.RawModule(code=SOURCE.read_text(), options=("--std=c++17",))
