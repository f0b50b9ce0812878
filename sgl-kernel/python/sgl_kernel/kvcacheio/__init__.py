"""Transfers of KV pages between pools: device, host, landing buffers, another GPU's pool.

Owns no memory and no order: the caller knows when source and destination are ready. Names are SGLang's where the
meaning is the same (`lf` layer-first, `pf` page-first). The arguments are this package's own: indices name pages, not
tokens, and `KVPages` carries shapes and strides.

Contract of every function here:

- Bytes are copied, never values; any dtype. Source and destination have the same components, each of the same dtype
  and shape per page; the components of one page may differ. Outer strides (layer, page) are free, see `KVPages`.
- src_pages, dst_pages: (n,) int64 or int32, as many of each. In host memory they are checked against the pools. On a
  GPU they are not, because the check would wait for the device. `dma` and `direct` need them in host memory.
- A source page may be named twice. A destination page must not be (not checked: either content may stay), and no
  destination page may share memory with a source page.
- stream: the `torch.cuda.Stream` to run on, by default the current one; on the CPU the copy is done on return. Until
  the stream has passed the copy, the source pages must not be written and the destination pages must not be touched.
  Other pages are neither read nor written.
- num_warps: the number of warps that `kernel` may use, in blocks of eight; None for `default_warps`. `bulk` has one
  warp in the place of 32.
- Bad arguments raise `KVLayoutError` (a ValueError) before a byte has moved.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch

from sgl_kernel.kvcacheio import reference
from sgl_kernel.kvcacheio.layer_flags import LayerFlags, LayerFlagsError
from sgl_kernel.kvcacheio.layout import KVLayoutError, KVPages, check_fit, check_indices
from sgl_kernel.kvcacheio.pick import (
    BACKENDS,
    HOST_BACKENDS,
    KERNELS,
    available_kernel,
    page_size_for_dma,
    pick_backend,
    pick_between,
    why_not,
)

__all__ = [
    "BACKENDS",
    "BACKUP_WARPS",
    "KERNELS",
    "LOAD_WARPS",
    "KVLayoutError",
    "KVPages",
    "LayerFlags",
    "LayerFlagsError",
    "copy_pages",
    "default_warps",
    "load_layers",
    "page_size_for_dma",
    "pick_backend",
    "pick_between",
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_pf_lf",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_pf_lf",
    "why_not",
]

LOAD_WARPS = 64
# More are hardly faster, and fill what leads to the link: 32 slowed a decode on an H200 by half, 16 by 3 %
# (docs/records/measurements.md).
BACKUP_WARPS = 16


def copy_pages(
    src: KVPages,
    dst: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    *,
    backend: str = "auto",
    num_warps: int | None = None,
    stream: Any = None,
) -> None:
    """dst[layer, dst_pages[i]] = src[layer, src_pages[i]] for all layers and components of src and dst.

    All other functions are this one with their layouts filled in. backend: see `pick_backend`.
    """
    check_fit(src, dst)
    check_indices(src, dst, src_pages, dst_pages)
    if not len(src_pages) or not src.num_layers:
        return
    device = dst.device if dst.is_cuda else src.device
    num_warps = default_warps(src.is_cuda, dst.is_cuda) if num_warps is None else num_warps
    chosen = pick_between(backend, src, dst)
    if chosen in HOST_BACKENDS and device.type != "cpu":
        raise KVLayoutError(f"the {chosen} backend copies in host memory only; use auto, kernel, dma or direct")
    if chosen == "reference":
        reference.copy_pages(src, dst, src_pages, dst_pages)
    elif chosen == "cpu":
        from sgl_kernel.kvcacheio import cpu_kernels

        cpu_kernels.copy_pages(src, dst, src_pages, dst_pages)
    elif chosen in ("dma", "direct"):
        from sgl_kernel.kvcacheio import dma

        dma.copy_pages(src, dst, src_pages, dst_pages, merge=chosen == "dma", stream=stream)
    elif chosen in ("bulk", "persistent") or available_kernel(chosen) == "cuda":
        from sgl_kernel.kvcacheio import cuda_kernels

        is_bulk = chosen == "bulk"
        cuda_kernels.copy_pages(src, dst, src_pages, dst_pages, num_warps=num_warps, is_bulk=is_bulk, stream=stream)
    else:
        from sgl_kernel.kvcacheio import triton_kernels

        triton_kernels.copy_pages(src, dst, src_pages, dst_pages, num_warps=num_warps, stream=stream)


def default_warps(from_gpu: bool, to_gpu: bool) -> int:
    """Few for what leaves a GPU for host memory: a backup, or what only a peer has and gives up. Strata 4.2 has 2
    blocks of 1,024 threads for loads, which are 64 warps, and 1 for backups."""
    return BACKUP_WARPS if from_gpu and not to_gpu else LOAD_WARPS


def load_layers(
    src: KVPages,
    dst: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    flags: LayerFlags,
    *,
    num_warps: int = LOAD_WARPS,
    stream: Any = None,
) -> int:
    """`copy_pages` by one kernel that goes through the layers in order, group by group of `flags`, which is this
    stream's alone. Pages are on the GPU, at least one. Returns what to wait for, see `LayerFlags.wait`."""
    from sgl_kernel.kvcacheio import cuda_kernels

    check_fit(src, dst)
    check_indices(src, dst, src_pages, dst_pages)
    assert len(src_pages), "a load of no pages"
    return cuda_kernels.load_layers(src, dst, src_pages, dst_pages, flags, num_warps=num_warps, stream=stream)


class CopyOptions(TypedDict, total=False):
    """See `copy_pages`."""

    backend: str
    num_warps: int | None
    stream: Any


def transfer_kv_per_layer_pf_lf(
    host: KVPages,
    dst: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    layer_id: int,
    **options: Unpack[CopyOptions],
) -> None:
    """Load one layer from a page-first pool.

    host: all layers, pinned for a GPU; other layouts than page-first will do. dst: one layer of the device pool.
    """
    copy_pages(host.layer(layer_id), dst, src_pages, dst_pages, **options)


def transfer_kv_per_layer(
    src: KVPages,
    dst: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    **options: Unpack[CopyOptions],
) -> None:
    """Copy between pools of one layer each: a layer of a layer-first host pool, or of another GPU's pool."""
    copy_pages(src, dst, src_pages, dst_pages, **options)


def transfer_kv_all_layer_lf_pf(
    src: KVPages,
    host: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    **options: Unpack[CopyOptions],
) -> None:
    """Back up all layers to a page-first pool.

    src: the device pool. host: pinned for a GPU; other layouts than page-first will do.
    """
    copy_pages(src, host, src_pages, dst_pages, **options)


def transfer_kv_all_layer_pf_lf(
    landing: KVPages,
    dst: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    **options: Unpack[CopyOptions],
) -> None:
    """Load all layers of pages in the host's page layout, in pinned memory, or in a landing buffer of the device.

    Upstream has no such function. landing: page-first; dst: the device pool; both may be some of the layers
    (`KVPages.part`).
    """
    copy_pages(landing, dst, src_pages, dst_pages, **options)


def transfer_kv_all_layer(
    src: KVPages,
    dst: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    **options: Unpack[CopyOptions],
) -> None:
    """Copy all layers between two pools: to and from a peer's, or a layer-first host pool."""
    copy_pages(src, dst, src_pages, dst_pages, **options)
