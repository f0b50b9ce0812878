"""`kernel` in CUDA C++: compiles `csrc/kvcacheio.cu` at first use, through CuPy and NVRTC, and launches it.

Owns the compiled module, one per device. Compiled for sm_90 in the tests; has not run on a GPU.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl_kernel.kvcacheio.layout import KVLayoutError, KVPages, addresses

SOURCE = Path(__file__).resolve().parent.parent / "csrc" / "kvcacheio.cu"
KERNEL = "sgl_kv_copy_pages"
# A quarter of a multiprocessor's registers, so that what computes can share it.
THREADS = 256
WARPS = THREADS // 32
# 16 for each lane. A warp copies so many segments at a time.
SEGMENT_BYTES = 512
SEGMENTS_AT_ONCE = 8
_MAX_SEGMENTS = (1 << 31) - 1


def copy_pages(
    src: KVPages,
    dst: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    *,
    num_warps: int,
    stream: Any = None,
) -> None:
    """See `kvcacheio.copy_pages`. Host memory, on either side, is pinned; the kernel reads it through its mapping."""
    import cupy

    device = dst.device if dst.is_cuda else src.device
    stream = stream or torch.cuda.current_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        # Allocated in the stream's order: the memory of both is not reused before the kernel is done.
        indices = [pages.to(device, torch.int64, non_blocking=True).contiguous() for pages in (src_pages, dst_pages)]
        launches = [kernel_arguments(*pair, indices, device_address) for pair in pairs(src, dst)]
        with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(stream.cuda_stream):
            for arguments in launches:
                grid = min(-(-num_warps // WARPS), -(-int(arguments[-1]) // (WARPS * SEGMENTS_AT_ONCE)))
                _kernel(device.index)((grid,), (THREADS,), arguments)


def pairs(src: KVPages, dst: KVPages) -> list[tuple[KVPages, KVPages]]:
    """The components that each launch copies: two, K and V, or the last one alone."""
    firsts = range(0, len(src.components), 2)
    return [(KVPages(*src.components[i : i + 2]), KVPages(*dst.components[i : i + 2])) for i in firsts]


def kernel_arguments(src: KVPages, dst: KVPages, indices: list[torch.Tensor], address: Any) -> tuple[Any, ...]:
    """The kernel's arguments in its order, for one or two components, which the kernel calls K and V. With one
    component, V has no bytes. address maps a tensor to the pointer that a kernel may use."""
    # With one component, the first is the last too.
    sides = [side[index] for side in (addresses(src), addresses(dst)) for index in (0, -1)]
    tensors = [side.components[index] for side in (src, dst) for index in (0, -1)]
    k_bytes, v_bytes = (*src.run_bytes, 0)[:2]
    k_segments, v_segments = -(-k_bytes // SEGMENT_BYTES), -(-v_bytes // SEGMENT_BYTES)
    num_segments = len(indices[0]) * src.num_layers * (k_segments + v_segments)
    if num_segments > _MAX_SEGMENTS:
        raise KVLayoutError(f"{len(indices[0])} pages are too many for one launch: copy them in parts")
    pointers = [np.uint64(address(t)) for t in (*tensors, *indices)]
    strides = [np.int64(s) for side in sides for s in (side.layer_stride, side.page_stride)]
    sizes = [np.int64(k_bytes), np.int64(v_bytes)]
    counts = [np.int32(n) for n in (src.num_layers, k_segments, v_segments, SEGMENT_BYTES, num_segments)]
    return (*pointers, *strides, *sizes, *counts)


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
def _kernel(device_index: int) -> Any:
    import cupy

    del device_index  # one module per device
    return cupy.RawModule(code=SOURCE.read_text(), options=("--std=c++17",)).get_function(KERNEL)
