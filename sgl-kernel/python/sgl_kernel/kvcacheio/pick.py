"""Which backend carries out a transfer. Pure decisions; imports no backend and starts no device.

`auto` has not been measured on a GPU: it is the kernel until a measurement speaks against it.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from sgl_kernel.cpu.library import LIBRARY
from sgl_kernel.kvcacheio.layout import KVLayoutError

# Those that copy in host memory only.
HOST_BACKENDS = ("cpu", "reference")
# Compute capability.
_BULK_FROM = (9, 0)
# The names that a user may request. cuda and triton are the two implementations of kernel; bulk, by the copies that
# Hopper makes by itself, is for comparison.
BACKENDS = ("auto", "kernel", "dma", "direct", "cuda", "triton", "bulk", *HOST_BACKENDS)


def pick_backend(requested: str, device: torch.device | str) -> str:
    """The backend that carries out a transfer: of BACKENDS, but not auto.

    device: the GPU's, or cpu if no GPU is involved. On the CPU `auto` and all kernels are `cpu`, or
    the reference where nothing can be compiled; `dma` and `direct` execute their plans in numpy. On a GPU, `auto` is
    `dma` where no kernel can be compiled (neither CuPy nor Triton is installed), else `kernel`.
    """
    if requested not in BACKENDS:
        raise KVLayoutError(f"backend {requested!r} is none of {', '.join(BACKENDS)}")
    if torch.device(device).type == "cpu":
        if requested in ("dma", "direct", "reference"):
            return requested
        return "cpu" if LIBRARY.is_available() else "reference"
    if requested != "auto":
        return requested
    return "kernel" if _installed("cupy") or _installed("triton") else "dma"


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
        needs_gpu = requested in ("kernel", "cuda", "triton", "bulk")
        return "it needs a GPU; on the CPU use auto, dma or direct" if needs_gpu else None
    if requested in HOST_BACKENDS:
        return "it copies in host memory only; use auto, kernel, dma or direct"
    if requested == "triton":
        return None if _installed("triton") else "it needs Triton"
    if _installed("cupy"):
        if requested == "bulk" and torch.cuda.get_device_capability(device) < _BULK_FROM:
            return "it needs a GPU of compute capability 9.0 or more"
        return None
    if requested in ("dma", "direct", "cuda", "bulk"):
        return "it needs CuPy (pip install cupy-cuda13x)"
    return None if _installed("triton") else "it needs CuPy (pip install cupy-cuda13x) or Triton"


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
