"""Transfers of KV pages between pools: device, host, landing buffers, another GPU's pool.

Owns no memory and no order: the caller says when source and destination are ready. Names are SGLang's where the
meaning is the same (`lf` layer-first, `pf` page-first); the arguments are ours: indices name pages, not tokens, and
tensors carry their shapes, so that no sizes or strides are passed.

Contract of every function here:

- One dtype, any; bytes are copied, never values. page_size, num_kv_heads and head_dim of source and destination
  agree; K and V may differ in the last two. Outer strides (layer, page) are free, see `layout.KVPages`.
- src_pages, dst_pages: (n,) int64 or int32, as many of each. In host memory they are checked against the pools; on a
  GPU they are not, since that would wait for the device. `dma` and `direct` need them in host memory.
- A source page may be named twice. A destination page must not be (not checked: either content may stay), and no
  destination page may share memory with a source page.
- stream: the `torch.cuda.Stream` to run on, by default the current one; on the CPU the copy is done on return. Until
  the stream has got there nobody may write the source pages or touch the destination pages. Pages that are not named
  are neither read nor written.
- num_ctas: how many blocks of 1,024 threads `kernel` may use (Strata 4.2: 2 for loads, 1 for backups).
- Bad arguments raise `KVLayoutError` (a ValueError) before a byte has moved.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch

from sgl_kernel.kvcacheio import reference
from sgl_kernel.kvcacheio.layout import KVLayoutError, KVPages, check_fit, check_indices
from sgl_kernel.kvcacheio.pick import BACKENDS, available_kernel, pick_backend, why_not

__all__ = [
    "BACKENDS",
    "BACKUP_CTAS",
    "LOAD_CTAS",
    "KVLayoutError",
    "KVPages",
    "copy_pages",
    "pick_backend",
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_pf_lf",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_pf_lf",
    "why_not",
]

LOAD_CTAS = 2
BACKUP_CTAS = 1


def copy_pages(
    src: KVPages,
    dst: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    *,
    backend: str = "auto",
    num_ctas: int = LOAD_CTAS,
    stream: Any = None,
) -> None:
    """dst[layer, dst_pages[i]] = src[layer, src_pages[i]] for all layers of src and dst, K and V.

    All other functions are this one with their layouts filled in. backend: see `pick_backend`.
    """
    check_fit(src, dst)
    check_indices(src, dst, src_pages, dst_pages)
    if not len(src_pages) or not src.num_layers:
        return
    device = dst.k.device if dst.k.is_cuda else src.k.device
    chosen = pick_backend(backend, max(src.run_bytes), len(src_pages), device)
    if chosen == "reference":
        if device.type != "cpu":
            raise KVLayoutError("the reference backend copies in host memory only; use auto, kernel, dma or direct")
        reference.copy_pages(src, dst, src_pages, dst_pages)
    elif chosen in ("dma", "direct"):
        from sgl_kernel.kvcacheio import dma

        dma.copy_pages(src, dst, src_pages, dst_pages, merge=chosen == "dma", stream=stream)
    elif available_kernel(chosen) == "cuda":
        from sgl_kernel.kvcacheio import cuda_kernels

        cuda_kernels.copy_pages(src, dst, src_pages, dst_pages, num_ctas=num_ctas, stream=stream)
    else:
        from sgl_kernel.kvcacheio import triton_kernels

        triton_kernels.copy_pages(src, dst, src_pages, dst_pages, num_ctas=num_ctas, stream=stream)


class CopyOptions(TypedDict, total=False):
    """See `copy_pages`."""

    backend: str
    num_ctas: int
    stream: Any


def transfer_kv_per_layer_pf_lf(
    host: torch.Tensor | KVPages,
    dst_k: torch.Tensor,
    dst_v: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    layer_id: int,
    **options: Unpack[CopyOptions],
) -> None:
    """Load one layer from a page-first pool.

    host: (num_pages, 2, num_layers, page_size, num_kv_heads, head_dim), pinned for a GPU, or `KVPages` of any layout.
    dst_k, dst_v: the layer's (num_pages, page_size, num_kv_heads, head_dim), any stride between pages.
    """
    copy_pages(
        _page_first(host).layer(layer_id),
        KVPages(dst_k[None], dst_v[None]),
        src_pages,
        dst_pages,
        **options,
    )


def transfer_kv_per_layer(
    src_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_k: torch.Tensor,
    dst_v: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    **options: Unpack[CopyOptions],
) -> None:
    """Copy one layer between pools whose layers are views: a layer-first host pool, another GPU's pool.

    All four: the layer's (num_pages, page_size, num_kv_heads, head_dim), any stride between pages.
    """
    copy_pages(
        KVPages(src_k[None], src_v[None]),
        KVPages(dst_k[None], dst_v[None]),
        src_pages,
        dst_pages,
        **options,
    )


def transfer_kv_all_layer_lf_pf(
    src_k: torch.Tensor,
    src_v: torch.Tensor,
    host: torch.Tensor | KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    **options: Unpack[CopyOptions],
) -> None:
    """Back up all layers to a page-first pool.

    src_k, src_v: (num_layers, num_pages, page_size, num_kv_heads, head_dim), any strides of layers and pages.
    host: (num_pages, 2, num_layers, page_size, num_kv_heads, head_dim), pinned for a GPU, or `KVPages` of any layout.
    """
    options.setdefault("num_ctas", BACKUP_CTAS)
    copy_pages(KVPages(src_k, src_v), _page_first(host), src_pages, dst_pages, **options)


def transfer_kv_all_layer_pf_lf(
    landing: torch.Tensor | KVPages,
    dst_k: torch.Tensor,
    dst_v: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    **options: Unpack[CopyOptions],
) -> None:
    """Scatter a landing buffer: all layers of pages that arrived in the host page layout, in device memory or pinned.

    Not one of upstream's. landing: as `host` of `transfer_kv_all_layer_lf_pf`; dst_k, dst_v: as its src_k, src_v.
    """
    copy_pages(
        _page_first(landing),
        KVPages(dst_k, dst_v),
        src_pages,
        dst_pages,
        **options,
    )


def transfer_kv_all_layer(
    src_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_k: torch.Tensor,
    dst_v: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    **options: Unpack[CopyOptions],
) -> None:
    """Copy all layers between two pools: to and from a peer's, or a layer-first host pool.

    All four: (num_layers, num_pages, page_size, num_kv_heads, head_dim), any strides of layers and pages.
    """
    copy_pages(
        KVPages(src_k, src_v),
        KVPages(dst_k, dst_v),
        src_pages,
        dst_pages,
        **options,
    )


def _page_first(host: torch.Tensor | KVPages) -> KVPages:
    return host if isinstance(host, KVPages) else KVPages.page_first(host)
