"""`MemcpyBatch`: many linear copies by few calls of the CUDA driver, as of cuda.h 13.0.

Owns the binding to libcuda. Knows addresses, not pools. Imports no torch.

One call of the driver enqueues up to MAX_COPIES copies, without Python's lock. The copies of a batch may run in any
order, and at the same time. The batch as a whole keeps the stream's order. Host memory goes by its own address, which
is no address for the GPU on WSL 2 if the memory was registered (SGLang issue 40232).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from sgl_kernel.libcuda import MemLocation, bind, error_of

FUNCTION = "cuMemcpyBatchAsync_v2"
# A driver of CUDA 13.0 crashed in one call with 51,828 copies (vLLM issue 49276).
MAX_COPIES = 4096
# Of cuda.h. Source pages are read in the stream's order, because what the stream did before may have written them.
SOURCE_IN_STREAM_ORDER = 1
# A hint: the driver prefers a copy that leaves the multiprocessors to kernels, thus the copy engines.
PREFER_OVERLAP_WITH_COMPUTE = 1
# The legacy default stream, by torch's number and by cuda.h's. The driver refuses batches on it.
_LEGACY_STREAMS = (0, 1)


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. The hints stay 0, which is no location: the driver reads them for managed and for pageable
    memory only, and a pool is neither."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", MemLocation),
        ("dstLocHint", MemLocation),
        ("flags", ctypes.c_uint),
    )


_int, _size, _void_p, _to = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.POINTER

# What each function takes; all return a CUresult. Contexts, streams and arrays are pointers.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    FUNCTION: (_void_p, _void_p, _void_p, _size, _to(MemcpyAttributes), _to(_size), _size, _void_p),
    "cuStreamGetCtx": (_void_p, _to(_void_p)),
    "cuCtxPushCurrent_v2": (_void_p,),
    "cuCtxPopCurrent_v2": (_to(_void_p),),
    "cuGetErrorName": (_int, _to(ctypes.c_char_p)),
}


class MemcpyError(RuntimeError):
    """The driver refused a copy; the message names the function and the error."""


@cache
def memcpy_batch() -> MemcpyBatch | None:
    """None where the driver is older than CUDA 13.0, or there is none. CUDA 12.8 has the function without _v2, with
    another parameter; it is not used."""
    try:
        return MemcpyBatch(bind(SIGNATURES, short=SIGNATURES.keys() - {FUNCTION}))
    except OSError:
        return None


class MemcpyBatch:
    """libcuda: functions under the names of SIGNATURES."""

    def __init__(self, libcuda: Any) -> None:
        self._libcuda = libcuda
        self._attributes = MemcpyAttributes(srcAccessOrder=SOURCE_IN_STREAM_ORDER, flags=PREFER_OVERLAP_WITH_COMPUTE)
        # The attributes hold from the first copy on.
        self._attributes_from = ctypes.c_size_t(0)

    @staticmethod
    def accepts(stream: int) -> bool:
        """Whether batches can be enqueued on this CUDA stream."""
        return stream not in _LEGACY_STREAMS

    def enqueue(self, table: np.ndarray, stream: int) -> None:
        """Enqueue n copies on a CUDA stream that `accepts` is true of.

        table: (3, n) uint64, rows without gaps: destination addresses, source addresses, sizes in bytes, none of them
        0. It may be changed on return. Raises MemcpyError; copies of earlier calls of the driver are then enqueued.
        """
        assert table.dtype == np.uint64 and table.shape[0] == 3 and table.flags.c_contiguous
        num_copies = table.shape[1]
        dst = table.ctypes.data
        src, sizes = dst + table.strides[0], dst + 2 * table.strides[0]
        context = ctypes.c_void_p()
        self._call("cuStreamGetCtx", stream, ctypes.byref(context))
        # This thread may have no context yet, or another GPU's.
        self._call("cuCtxPushCurrent_v2", context)
        try:
            for first in range(0, num_copies, MAX_COPIES):
                at = first * table.itemsize
                count = min(MAX_COPIES, num_copies - first)
                self._call(
                    FUNCTION,
                    dst + at,
                    src + at,
                    sizes + at,
                    count,
                    ctypes.byref(self._attributes),
                    ctypes.byref(self._attributes_from),
                    1,
                    stream,
                )
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        if error := error_of(self._libcuda, name, *arguments):
            raise MemcpyError(error)
