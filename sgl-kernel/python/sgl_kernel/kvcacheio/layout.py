"""`KVPages`: K and V of a pool as two five-dimensional views, whatever the pool's memory looks like.

Owns no memory. Knows layouts, shapes and byte strides; never copies a byte and never reads an index array's source.
Every layout becomes the same thing, so that each backend is written once:

    k: (num_layers, num_pages, page_size, num_kv_heads, head_dim)     any strides of the first two dimensions
    v: the same, but for head_dim, which may differ

    layer-first  (2, L, P, page_size, heads, dim)    K | L0 p0 p1 p2 | L1 p0 p1 p2 |  V | L0 p0 p1 p2 | L1 p0 p1 p2 |
    page-first   (P, 2, L, page_size, heads, dim)    p0 | K L0 L1 | V L0 L1 |  p1 | K L0 L1 | V L0 L1 |
    block-major  (P, L, 2, page_size, heads, dim)    p0 | L0 K V | L1 K V |    p1 | L0 K V | L1 K V |

A *run* is K or V of one page and one layer: page_size * num_kv_heads * head_dim elements without a gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


class KVLayoutError(ValueError):
    """Source, destination or index arrays do not fit each other; the message says what would."""


@dataclass(frozen=True)
class KVPages:
    """k, v: (num_layers, num_pages, page_size, num_kv_heads, head_dim), views that share their pool's memory.

    One dtype, one device. Where the pool has one layer's view only, num_layers is 1.
    """

    k: torch.Tensor
    v: torch.Tensor

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        if k.dim() != 5 or v.dim() != 5:
            raise KVLayoutError(
                "K and V must be (num_layers, num_pages, page_size, num_kv_heads, head_dim), "
                f"not {tuple(k.shape)} and {tuple(v.shape)}"
            )
        if k.shape[:3] != v.shape[:3]:
            raise KVLayoutError(
                f"K {tuple(k.shape)} and V {tuple(v.shape)} must agree in num_layers, num_pages and page_size"
            )
        if k.dtype != v.dtype or k.device != v.device:
            raise KVLayoutError(f"K is {k.dtype} on {k.device}, V is {v.dtype} on {v.device}: they must agree")

    @staticmethod
    def layer_first(kv: torch.Tensor) -> KVPages:
        """kv: (2, num_layers, num_pages, page_size, num_kv_heads, head_dim)."""
        _expect(kv, 0, "layer-first (2, num_layers, num_pages, page_size, num_kv_heads, head_dim)")
        return KVPages(kv[0], kv[1])

    @staticmethod
    def page_first(kv: torch.Tensor) -> KVPages:
        """kv: (num_pages, 2, num_layers, page_size, num_kv_heads, head_dim), the host pool, a landing buffer or the
        elastic pool."""
        _expect(kv, 1, "page-first (num_pages, 2, num_layers, page_size, num_kv_heads, head_dim)")
        return KVPages(kv[:, 0].transpose(0, 1), kv[:, 1].transpose(0, 1))

    @staticmethod
    def block_major(kv: torch.Tensor) -> KVPages:
        """kv: (num_pages, num_layers, 2, page_size, num_kv_heads, head_dim), another order of page-first."""
        _expect(kv, 2, "block-major (num_pages, num_layers, 2, page_size, num_kv_heads, head_dim)")
        return KVPages(kv[:, :, 0].transpose(0, 1), kv[:, :, 1].transpose(0, 1))

    @staticmethod
    def page_first_uneven(
        pages: torch.Tensor, num_layers: int, page_size: int, k_shape: tuple[int, int], v_shape: tuple[int, int]
    ) -> KVPages:
        """Page-first where K and V differ in size. pages: (num_pages, elements of one page): K of all layers, then V.

        k_shape, v_shape: (num_kv_heads, head_dim).
        """
        k_size = num_layers * page_size * k_shape[0] * k_shape[1]
        v_size = num_layers * page_size * v_shape[0] * v_shape[1]
        if pages.dim() != 2 or pages.shape[1] != k_size + v_size:
            raise KVLayoutError(f"pages must be (num_pages, {k_size + v_size}), not {tuple(pages.shape)}")
        k = pages[:, :k_size].unflatten(1, (num_layers, page_size, *k_shape))
        v = pages[:, k_size:].unflatten(1, (num_layers, page_size, *v_shape))
        return KVPages(k.transpose(0, 1), v.transpose(0, 1))

    @property
    def num_layers(self) -> int:
        return self.k.shape[0]

    @property
    def num_pages(self) -> int:
        return self.k.shape[1]

    @property
    def run_bytes(self) -> tuple[int, int]:
        """Bytes of K and of V of one page and one layer."""
        itemsize = self.k.dtype.itemsize
        return self.k.shape[2:].numel() * itemsize, self.v.shape[2:].numel() * itemsize

    def layer(self, layer_id: int) -> KVPages:
        """The same pages, one layer."""
        if not 0 <= layer_id < self.num_layers:
            raise KVLayoutError(f"layer {layer_id} of a pool with layers 0 to {self.num_layers - 1}")
        return KVPages(self.k[layer_id : layer_id + 1], self.v[layer_id : layer_id + 1])


@dataclass(frozen=True)
class Addresses:
    """Where the runs of one of K and V lie: address = base + layer * layer_stride + page * page_stride, in bytes."""

    base: int
    layer_stride: int
    page_stride: int


def addresses(pages: KVPages) -> tuple[Addresses, Addresses]:
    """Of K and V. Raises KVLayoutError where a page of one layer is not one run: only the reference copies those."""
    return _addresses(pages.k, "K"), _addresses(pages.v, "V")


def _addresses(t: torch.Tensor, name: str) -> Addresses:
    if not page_is_one_run(t):
        raise KVLayoutError(
            f"{name} of a page and layer (page_size, num_kv_heads, head_dim) must be without gaps, but the strides "
            f"are {t.stride()[2:]}; use the reference backend for such a pool"
        )
    layer_stride, page_stride = (stride * t.dtype.itemsize for stride in t.stride()[:2])
    return Addresses(t.data_ptr(), layer_stride, page_stride)


def page_is_one_run(t: torch.Tensor) -> bool:
    return t.numel() == 0 or t[0, 0].is_contiguous()


def check_fit(src: KVPages, dst: KVPages) -> None:
    """Raise KVLayoutError unless pages of src can be copied to pages of dst."""
    for name, s, d in (("K", src.k, dst.k), ("V", src.v, dst.v)):
        if s.dtype != d.dtype:
            raise KVLayoutError(f"{name} is {s.dtype} in the source and {d.dtype} in the destination")
        if s.shape[0] != d.shape[0]:
            raise KVLayoutError(f"{name} has {s.shape[0]} layers in the source and {d.shape[0]} in the destination")
        if s.shape[2:] != d.shape[2:]:
            raise KVLayoutError(
                f"a page of {name} is (page_size, num_kv_heads, head_dim) = {tuple(s.shape[2:])} in the source and "
                f"{tuple(d.shape[2:])} in the destination"
            )


def check_indices(src: KVPages, dst: KVPages, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    """Raise KVLayoutError unless both are (n,) int32 or int64 with pages that exist.

    The values are read only where they lie in host memory: on a GPU that would wait for the device.
    """
    for name, pages, pool in (("src_pages", src_pages, src), ("dst_pages", dst_pages, dst)):
        if pages.dim() != 1 or pages.dtype not in (torch.int64, torch.int32):
            raise KVLayoutError(f"{name} must be (n,) int64 or int32, not {tuple(pages.shape)} {pages.dtype}")
        if pages.is_cpu and len(pages):
            low, high = bounds(pages)
            if low < 0 or high >= pool.num_pages:
                raise KVLayoutError(
                    f"{name} has pages {low} to {high}, index out of range for a pool of {pool.num_pages}"
                )
    if len(src_pages) != len(dst_pages):
        raise KVLayoutError(f"{len(src_pages)} source pages and {len(dst_pages)} destination pages")


def bounds(pages: torch.Tensor) -> tuple[int, int]:
    if len(pages) <= 16:  # numpy's fixed cost is that of so many numbers
        few = pages.tolist()
        return min(few), max(few)
    array: np.ndarray = pages.numpy()
    return int(array.min()), int(array.max())


def _expect(kv: torch.Tensor, kv_dim: int, layout: str) -> None:
    if kv.dim() != 6 or kv.shape[kv_dim] != 2:
        raise KVLayoutError(f"expected {layout}, got {tuple(kv.shape)}")
