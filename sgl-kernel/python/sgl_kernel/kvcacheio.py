"""Transfers of KV pages between a layer-first device pool and a page-first host pool: the reference in torch.

Owns no memory and no order: the caller says when source and destination are ready. Function names are SGLang's
(`lf` layer-first, `pf` page-first). This reference defines the result; faster kernels must match it byte for byte.

Layouts: device k, v of one layer (num_pages, page_size, num_kv_heads, head_dim); host buffer
(num_pages, 2, num_layers, page_size, num_kv_heads, head_dim), K and V being index 0 and 1 of its second dimension.
"""

from __future__ import annotations

import torch


def transfer_kv_per_layer_pf_lf(
    host: torch.Tensor,
    dst_k: torch.Tensor,
    dst_v: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    layer_id: int,
) -> None:
    """Load one layer: host pages src_pages (n,) int64 to device pages dst_pages (n,) int64."""
    dst_k.index_copy_(0, dst_pages, host[:, 0, layer_id].index_select(0, src_pages))
    dst_v.index_copy_(0, dst_pages, host[:, 1, layer_id].index_select(0, src_pages))


def transfer_kv_all_layer_lf_pf(
    src_k: torch.Tensor,
    src_v: torch.Tensor,
    host: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
) -> None:
    """Back up all layers. src_k, src_v: (num_layers, num_pages, page_size, num_kv_heads, head_dim)."""
    pages = torch.stack((src_k.index_select(1, src_pages), src_v.index_select(1, src_pages)))
    # (2, num_layers, n, ...) -> (n, 2, num_layers, ...): one contiguous run per page.
    host.index_copy_(0, dst_pages, pages.movedim(2, 0))
