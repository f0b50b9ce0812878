"""`FakeMemcpyDriver`: the CUDA driver's batched copies in this process's memory, which checks the rules of their
interface.

Functions are called through C pointers of the true signatures. A copy may only touch memory that a test has named.
Copies run at once, the last one first, because a batch has no order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sgl_kernel.kvcacheio.memcpy_batch import (
    PREFER_OVERLAP_WITH_COMPUTE,
    SIGNATURES,
    SOURCE_IN_STREAM_ORDER,
)

CONTEXT = 0xC0
_NAMES = {1: "CUDA_ERROR_INVALID_VALUE", 700: "CUDA_ERROR_ILLEGAL_ADDRESS"}


class FakeMemcpyDriver:
    """In the place of libcuda and of CuPy's runtime. memory: tensors of the CPU whose storages copies may touch.

    batches: sizes in bytes of the copies of each call. singles: copies that were made one by one, as (width, height).
    fail: name of the function whose next call answers with an illegal address. broken: rules that were."""

    def __init__(self, *memory: torch.Tensor) -> None:
        self.batches: list[list[int]] = []
        self.singles: list[tuple[int, int]] = []
        self.streams: set[int] = set()
        self.fail: str | None = None
        self.broken: list[str] = []
        self.contexts: list[int] = []
        storages = [each.untyped_storage() for each in memory]
        self._memory = [(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages]
        for name, takes in SIGNATURES.items():
            function = self._call(name, getattr(self, "_" + name.removesuffix("_v2")))
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *takes)(function))

    # -- CuPy's runtime -----------------------------------------------------------------------------------------

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self.memcpy2DAsync(dst, size, src, size, size, 1, kind, stream)

    def memcpy2DAsync(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        assert kind == 4 and width <= min(dst_pitch, src_pitch)
        self.streams.add(stream)
        self.singles.append((width, height))
        for row in range(height):
            self._move(dst + row * dst_pitch, src + row * src_pitch, width)

    # -- libcuda ------------------------------------------------------------------------------------------------

    def _call(self, name: str, function: Callable[..., None]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if self.fail == name:
                self.fail = None
                return 700
            try:
                function(*arguments)
            except Exception as error:
                self.broken.append(f"{name}: {error!r}")
                return 1
            return 0

        return call

    def _cuGetErrorName(self, code: int, out: Any) -> None:
        out[0] = _NAMES[code].encode()

    def _cuStreamGetCtx(self, stream: int, out: Any) -> None:
        out[0] = CONTEXT

    def _cuCtxPushCurrent(self, context: int) -> None:
        self.contexts.append(context)

    def _cuCtxPopCurrent(self, out: Any) -> None:
        out[0] = self.contexts.pop()

    def _cuMemcpyBatchAsync(
        self, dst: int, src: int, sizes: int, count: int, attrs: Any, attrs_from: Any, num_attrs: int, stream: int
    ) -> None:
        assert self.contexts == [CONTEXT], "the stream's context is not the current one"
        assert stream not in (None, 0, 1), "the legacy default stream"
        assert num_attrs == 1 and attrs_from[0] == 0 and count > 0
        assert attrs[0].srcAccessOrder == SOURCE_IN_STREAM_ORDER and attrs[0].flags == PREFER_OVERLAP_WITH_COMPUTE
        columns = [_array(each, count) for each in (dst, src, sizes)]
        self.streams.add(stream)
        self.batches.append(columns[2])
        for to, of, size in reversed(list(zip(*columns))):
            assert size > 0
            self._move(to, of, size)

    def _move(self, dst: int, src: int, size: int) -> None:
        for address in (dst, src):
            assert any(a <= address and address + size <= b for a, b in self._memory), "a copy leaves its pool"
        ctypes.memmove(dst, src, size)


def _array(address: int, count: int) -> list[int]:
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address)).tolist()
