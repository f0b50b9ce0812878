"""`dma` and `direct`: plans of `plan.py`, executed by the copy engines on a GPU and by numpy without one.

Owns no memory; the staging buffer is the caller's. Issuing on a GPU is a loop over the plan and has not run on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sgl_kernel.kvcacheio.layout import KVLayoutError, KVPages, addresses, check_fit, check_indices
from sgl_kernel.kvcacheio.plan import COPY, PoolPair, Side, execute, plan_copies, plan_staged

_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses


def copy_pages(
    src: KVPages, dst: KVPages, src_pages: torch.Tensor, dst_pages: torch.Tensor, *, merge: bool, stream: Any = None
) -> None:
    """See `kvcacheio.copy_pages`; merge: adjacent pages become one copy. Index arrays lie in host memory."""
    copies = plan(src, dst, src_pages, dst_pages, merge)
    if not src.is_cuda and not dst.is_cuda:
        execute(copies, host_bytes(src), host_bytes(dst))
        return
    issue(copies, bases(src), bases(dst), _cuda_stream(stream))


def copy_pages_staged(
    host: torch.Tensor,
    dst: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    staging: torch.Tensor,
    *,
    stream: Any = None,
) -> None:
    """Load all layers of page-first pages through a device buffer: large copies of whole pages, then a scatter there.

    host: (num_pages, 2, num_layers, page_size, num_kv_heads, head_dim), pages without gaps. staging: the same shape
    except for num_pages, on dst's device, without gaps. It is overwritten, and must not be used elsewhere until the
    stream has passed the load.
    """
    from sgl_kernel import kvcacheio

    if staging.shape[1:] != host.shape[1:] or staging.dtype != host.dtype or not staging.is_contiguous():
        raise KVLayoutError(
            f"staging must be (n, {', '.join(map(str, host.shape[1:]))}) {host.dtype} without gaps, "
            f"not {tuple(staging.shape)} {staging.dtype}"
        )
    page_bytes = host[0].numel() * host.dtype.itemsize
    if not host[0].is_contiguous():
        raise KVLayoutError("pages of the page-first pool must be without gaps")
    landing = KVPages.page_first(staging)
    check_fit(landing, dst)
    check_indices(KVPages.page_first(host), dst, src_pages, dst_pages)
    rounds = plan_staged(
        host_indices(src_pages),
        host_indices(dst_pages),
        host.stride(0) * host.dtype.itemsize,
        page_bytes,
        staging.shape[0],
    )
    for one in rounds:
        if dst.is_cuda:
            issue(one.copies, [host.data_ptr()], [staging.data_ptr()], _cuda_stream(stream))
        else:
            execute(one.copies, [_bytes_from(host)], [_bytes_from(staging)])
        n = len(one.dst_pages)
        to = torch.from_numpy(one.dst_pages)
        kvcacheio.copy_pages(landing, dst, torch.arange(n), to, backend="kernel", stream=stream)


def plan(
    src: KVPages, dst: KVPages, src_pages: torch.Tensor, dst_pages: torch.Tensor, merge: bool = True
) -> np.ndarray:
    """The copies that `copy_pages` carries out, offsets counted from `bases`."""
    src_indices, dst_indices = host_indices(src_pages), host_indices(dst_pages)
    return plan_copies(src_indices, dst_indices, PoolPair(side(src), side(dst), src.run_bytes, src.num_layers), merge)


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


def issue(copies: np.ndarray, src: Sequence[int], dst: Sequence[int], stream: int) -> None:
    """Enqueue a plan's copies on a CUDA stream. src, dst: addresses of the components. Needs CuPy."""
    from cupy.cuda import runtime

    assert copies.dtype == COPY
    for c, s, d, width, height, src_pitch, dst_pitch in copies.tolist():
        if height == 1:
            runtime.memcpyAsync(dst[c] + d, src[c] + s, width, _MEMCPY_DEFAULT, stream)
        else:
            runtime.memcpy2DAsync(
                dst[c] + d, dst_pitch, src[c] + s, src_pitch, width, height, _MEMCPY_DEFAULT, stream
            )


def _cuda_stream(stream: Any) -> int:
    return (stream or torch.cuda.current_stream()).cuda_stream
