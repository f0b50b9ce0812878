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
THREADS = 1024
# What a warp copies at a time: long enough to divide its index arithmetic by, short enough to share a few pages out.
SEGMENT_BYTES = 4096
_MAX_SEGMENTS = (1 << 31) - 1


def copy_pages(
    src: KVPages, dst: KVPages, src_pages: torch.Tensor, dst_pages: torch.Tensor, *, num_ctas: int, stream: Any = None
) -> None:
    """See `kvcacheio.copy_pages`. Host memory, on either side, is pinned; the kernel reads it through its mapping."""
    import cupy

    device = dst.k.device if dst.k.is_cuda else src.k.device
    stream = stream or torch.cuda.current_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        # Through the stream's allocator: memory of these two is not reused before the kernel is done.
        indices = [pages.to(device, torch.int64, non_blocking=True).contiguous() for pages in (src_pages, dst_pages)]
        arguments = kernel_arguments(src, dst, indices, device_address)
        grid = min(num_ctas, -(-int(arguments[-1]) // (THREADS // 32)))
        with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(stream.cuda_stream):
            _kernel(device.index)((grid,), (THREADS,), arguments)


def kernel_arguments(src: KVPages, dst: KVPages, indices: list[torch.Tensor], address: Any) -> tuple[Any, ...]:
    """The kernel's arguments in its order; address maps a tensor to the pointer that a kernel may use."""
    (src_k, src_v), (dst_k, dst_v) = addresses(src), addresses(dst)
    k_bytes, v_bytes = src.run_bytes
    k_segments, v_segments = -(-k_bytes // SEGMENT_BYTES), -(-v_bytes // SEGMENT_BYTES)
    num_segments = len(indices[0]) * src.num_layers * (k_segments + v_segments)
    if num_segments > _MAX_SEGMENTS:
        raise KVLayoutError(f"{len(indices[0])} pages are too many for one launch: copy them in parts")
    pointers = [np.uint64(address(t)) for t in (src.k, src.v, dst.k, dst.v, *indices)]
    strides = [np.int64(s) for side in (src_k, src_v, dst_k, dst_v) for s in (side.layer_stride, side.page_stride)]
    sizes = [np.int64(k_bytes), np.int64(v_bytes)]
    counts = [np.int32(n) for n in (src.num_layers, k_segments, v_segments, SEGMENT_BYTES, num_segments)]
    return (*pointers, *strides, *sizes, *counts)


def device_address(t: torch.Tensor) -> int:
    """Where a kernel finds t: its address on a GPU, or where its pinned host memory is mapped."""
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
