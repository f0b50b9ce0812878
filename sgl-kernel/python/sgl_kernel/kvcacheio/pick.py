"""Which backend carries out a transfer. Pure decisions; starts no device.

`auto` follows measurements on an H200 (docs/records/measurements.md). Beside a large product of matrices, which holds
all multiprocessors, a kernel's load gets 7 GB/s; copy engines get 34 to 43 from pages with 32 KiB per layer, 51
with 128. A decode loses 1 to 3 % beside their loads and nothing beside their backups, 7 and 3 % beside a kernel's.
Scattered small pieces are the kernel's: a batch needs more than a microsecond for each.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from sgl_kernel.cpu.library import LIBRARY
from sgl_kernel.kvcacheio import layer_flags
from sgl_kernel.kvcacheio.layout import KVLayoutError, KVPages
from sgl_kernel.kvcacheio.memcpy_batch import memcpy_batch
from sgl_kernel.kvcacheio.plan import MAX_PITCH

# Those that copy in host memory only.
HOST_BACKENDS = ("cpu", "reference")
# Those that run on a GPU's multiprocessors.
KERNELS = ("kernel", "cuda", "triton", "bulk", "persistent")
# Major compute capabilities of GPUs with bulk copies on which a block may have `BULK_RING_BYTES` of shared memory.
_WITH_BULK = (9, 10, 11)
# Bytes of a page and layer from which on `auto` is `dma`, and the same where a page is one 2-D copy, as in backups to
# the host unless a layer of either pool is larger than a pitch may be.
_DMA_FROM = 64 << 10
_DMA_ROWS_FROM = 16 << 10
# The names that a user may request. cuda and triton are the two implementations of kernel; bulk, by the copies that
# Hopper makes by itself, is for comparison. persistent is cuda, but a load is one kernel for all layers.
BACKENDS = ("auto", "kernel", "dma", "direct", "cuda", "triton", "bulk", "persistent", *HOST_BACKENDS)


def pick_between(requested: str, src: KVPages, dst: KVPages) -> str:
    """`pick_backend` for copies between two pools."""
    device = dst.device if dst.is_cuda else src.device
    of_both = (*src.components, *dst.components)
    is_short = max(each.stride(0) * each.dtype.itemsize for each in of_both) <= MAX_PITCH
    return pick_backend(requested, device, max(src.run_bytes), in_rows=not dst.is_cuda and is_short)


def pick_backend(requested: str, device: torch.device | str, run_bytes: int = 0, in_rows: bool = False) -> str:
    """The backend that carries out a transfer: of BACKENDS, but not auto.

    device: the GPU's, or cpu if no GPU is involved. in_rows: each page is one 2-D copy, whose rows are its layers. On
    the CPU `auto` and all kernels are `cpu`, or the reference where nothing can be compiled; `dma` and `direct`
    execute their plans in numpy. On a GPU, `auto` is `kernel`, but `dma` for large runs of a page and layer
    (run_bytes), where the driver takes copies in batches, and where no kernel can be compiled (neither CuPy nor
    Triton is installed).
    """
    if requested not in BACKENDS:
        raise KVLayoutError(f"backend {requested!r} is none of {', '.join(BACKENDS)}")
    if torch.device(device).type == "cpu":
        if requested in ("dma", "direct", "reference"):
            return requested
        return "cpu" if LIBRARY.is_available() else "reference"
    if requested != "auto":
        return requested
    if run_bytes >= (_DMA_ROWS_FROM if in_rows else _DMA_FROM) and _copies_in_batches():
        return "dma"
    return "kernel" if _installed("cupy") or _installed("triton") else "dma"


def page_size_for_dma(token_bytes: int) -> int:
    """The smallest page, a power of two, that `auto` loads by copy engines. token_bytes: of the largest component of
    a token and layer."""
    return 1 << (-(-_DMA_FROM // token_bytes) - 1).bit_length()


def available_kernel(requested: str) -> str:
    """The implementation of `kernel`: cuda where CuPy is installed, else triton. An explicit name stays."""
    if requested in ("cuda", "triton"):
        return requested
    if _installed("cupy"):
        return "cuda"
    if _installed("triton"):
        return "triton"
    raise KVLayoutError("backend kernel needs CuPy (pip install cupy-cuda13x) or Triton; use dma instead")


def why_not(requested: str, device: torch.device | str) -> str | None:
    """The reason why a requested backend cannot run with pools on this device; None if it can.

    It is stricter than `pick_backend`: a user who requests a kernel on the CPU does not mean the reference.
    """
    if requested not in BACKENDS:
        return f"it is none of {', '.join(BACKENDS)}"
    if torch.device(device).type == "cpu":
        needs_gpu = requested in KERNELS
        return "it needs a GPU; on the CPU use auto, dma or direct" if needs_gpu else None
    if requested in HOST_BACKENDS:
        return "it copies in host memory only; use auto, kernel, dma or direct"
    if requested == "triton":
        return None if _installed("triton") else "it needs Triton"
    if _installed("cupy"):
        if requested == "bulk" and torch.cuda.get_device_capability(device)[0] not in _WITH_BULK:
            return "it needs a GPU of compute capability 9, 10 or 11; use kernel"
        if requested == "persistent" and layer_flags.driver() is None:
            return "it needs a driver of CUDA 11.7 or more"
        return None
    if requested in ("dma", "direct", "cuda", "bulk", "persistent"):
        return "it needs CuPy (pip install cupy-cuda13x)"
    return None if _installed("triton") else "it needs CuPy (pip install cupy-cuda13x) or Triton"


def _copies_in_batches() -> bool:
    return _installed("cupy") and memcpy_batch() is not None


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
