"""`dma` and `direct`: plans of `plan.py`, executed by the copy engines on a GPU and by numpy without one.

Owns the plans that were used last, and no other memory.

On a GPU all linear copies of a plan are one batch (`memcpy_batch.py`). 2-D copies are issued one by one, through
CuPy. So are all copies where they are one or two, on the default stream, and with a driver before CUDA 13.0. One by
one, a copy takes 3.7 to 4.7 µs to issue, and a load of scattered pages reaches 0.12 of a large copy's rate with 32
KiB per page and layer, and 0.24 with 128 KiB. In batches it reaches 0.5 and 0.98 (H200, 2026-11-27).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from sgl_kernel.kvcacheio.layout import KVLayoutError, KVPages, addresses
from sgl_kernel.kvcacheio.memcpy_batch import memcpy_batch
from sgl_kernel.kvcacheio.plan import CopyPlan, PlanCache, PoolPair, Side, execute, plan_copies

_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses
# So few linear copies are no batch, which has calls of its own around it.
_FEW_COPIES = 2
# Of single layers: a load asks for the same plan once per layer. A plan takes about 90 bytes per copy.
_plans = PlanCache(max_bytes=32 << 20)
# The pages of a pool's layers live as long as the pool.
_sides: WeakKeyDictionary[KVPages, Side] = WeakKeyDictionary()


def copy_pages(
    src: KVPages, dst: KVPages, src_pages: torch.Tensor, dst_pages: torch.Tensor, *, merge: bool, stream: Any = None
) -> None:
    """See `kvcacheio.copy_pages`; merge: adjacent pages become one copy. Index arrays lie in host memory."""
    pools = PoolPair(_side(src), _side(dst), src.run_bytes, src.num_layers)
    indices = host_indices(src_pages), host_indices(dst_pages)
    # Several layers are copied by one call, whose plan would not be asked for again.
    copies = _plans.plan(*indices, pools, merge) if pools.num_layers == 1 else _planned(*indices, pools, merge)
    if not src.is_cuda and not dst.is_cuda:
        execute(copies.copies, host_bytes(src), host_bytes(dst))
        return
    issue(copies, bases(src), bases(dst), _cuda_stream(stream, dst.device if dst.is_cuda else src.device))


def plan(
    src: KVPages, dst: KVPages, src_pages: torch.Tensor, dst_pages: torch.Tensor, merge: bool = True
) -> np.ndarray:
    """The copies that `copy_pages` carries out, (n,) COPY, offsets counted from `bases`. Made anew by each call."""
    src_indices, dst_indices = host_indices(src_pages), host_indices(dst_pages)
    return plan_copies(src_indices, dst_indices, PoolPair(side(src), side(dst), src.run_bytes, src.num_layers), merge)


def _planned(src_pages: np.ndarray, dst_pages: np.ndarray, pools: PoolPair, merge: bool) -> CopyPlan:
    return CopyPlan.of(plan_copies(src_pages, dst_pages, pools, merge))


def _side(pages: KVPages) -> Side:
    found = _sides.get(pages)
    if found is None:
        found = _sides[pages] = side(pages)
    return found


def side(pages: KVPages) -> Side:
    where = addresses(pages)
    is_shared = len({each.untyped_storage().data_ptr() for each in pages.components}) == 1
    return Side(
        tuple(each.layer_stride for each in where),
        tuple(each.page_stride for each in where),
        tuple(each.base - where[0].base for each in where) if is_shared else None,
    )


def bases(pages: KVPages) -> list[int]:
    """Addresses of the components that a plan's offsets are counted from."""
    return [each.data_ptr() for each in pages.components]


def host_indices(pages: torch.Tensor) -> np.ndarray:
    if not pages.is_cpu:
        raise KVLayoutError("dma and direct plan on the CPU: src_pages and dst_pages must lie in host memory")
    return pages.numpy()


def host_bytes(pages: KVPages) -> list[np.ndarray]:
    """Bytes of each component in host memory, from its first element to the end of its storage."""
    return [_bytes_from(each) for each in pages.components]


def _bytes_from(t: torch.Tensor) -> np.ndarray:
    storage = t.untyped_storage()
    offset = t.storage_offset() * t.dtype.itemsize
    raw = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (storage.nbytes() - offset,), (1,))  # type: ignore[call-overload]
    return raw.numpy()


def issue(plan: CopyPlan, src: Sequence[int], dst: Sequence[int], stream: int) -> None:
    """Enqueue a plan's copies on a CUDA stream. src, dst: addresses of the components. Needs CuPy, unless all copies
    are one batch. Raises MemcpyError, or CuPy's CUDARuntimeError, where the driver refuses a copy."""
    batch = memcpy_batch() if plan.linear.shape[1] > _FEW_COPIES else None
    if batch is None or not batch.accepts(stream):
        _issue_one_by_one(plan.copies, src, dst, stream)
        return
    batch.enqueue(plan.table(src, dst), stream)
    if len(plan.strided):
        _issue_one_by_one(plan.strided, src, dst, stream)


def _issue_one_by_one(copies: np.ndarray, src: Sequence[int], dst: Sequence[int], stream: int) -> None:
    from cupy.cuda import runtime

    for c, s, d, width, height, src_pitch, dst_pitch in copies.tolist():
        if height == 1:
            runtime.memcpyAsync(dst[c] + d, src[c] + s, width, _MEMCPY_DEFAULT, stream)
        else:
            runtime.memcpy2DAsync(
                dst[c] + d, dst_pitch, src[c] + s, src_pitch, width, height, _MEMCPY_DEFAULT, stream
            )


def _cuda_stream(stream: Any, device: torch.device) -> int:
    return (stream or torch.cuda.current_stream(device)).cuda_stream
