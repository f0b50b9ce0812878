"""`KVPages`: the pages of a pool as one view per component, for every order in the pool's memory.

Owns no memory. Knows shapes and byte strides; never copies a byte and never reads an index array's source.

A *component* is the part of a page and layer with one meaning: K, V, a latent vector, scales. Every pool becomes the
same views, so that each backend is written once:

    component    (num_layers, num_pages, ...)     any strides of the first two dimensions
    K, V         (num_layers, num_pages, page_size, num_kv_heads, head_dim)

K and V in the usual pools:

    layer-first  (2, L, P, page_size, heads, dim)    K | L0 p0 p1 p2 | L1 p0 p1 p2 |  V | L0 p0 p1 p2 | L1 p0 p1 p2 |
    page-first   (P, 2, L, page_size, heads, dim)    p0 | K L0 L1 | V L0 L1 |  p1 | K L0 L1 | V L0 L1 |
    block-major  (P, L, 2, page_size, heads, dim)    p0 | L0 K V | L1 K V |    p1 | L0 K V | L1 K V |

A *run* is one component of one page and one layer: bytes without a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


class KVLayoutError(ValueError):
    """Source, destination or index arrays do not fit each other; the message describes what would fit."""


class KVPages:
    """The pages of a pool, immutable.

    components: (num_layers, num_pages, ...) each, at least three dimensions, views that share their pool's memory.
    Each has a dtype of its own; all are on one device and agree in num_layers and num_pages. For one layer of a pool
    num_layers is 1. Raises KVLayoutError for other shapes.
    """

    def __init__(self, *components: torch.Tensor) -> None:
        if not components:
            raise KVLayoutError("pages need one component at least")
        first = components[0]
        for each in components:
            if each.dim() < 3:
                raise KVLayoutError(
                    "a component must be (num_layers, num_pages, ...), as K and V are (num_layers, num_pages, "
                    f"page_size, num_kv_heads, head_dim), not {tuple(each.shape)}"
                )
            if each.shape[:2] != first.shape[:2]:
                raise KVLayoutError(
                    f"components {tuple(first.shape)} and {tuple(each.shape)} must agree in num_layers and num_pages"
                )
            if each.device != first.device:
                raise KVLayoutError(f"components are on {first.device} and on {each.device}: they must agree")
        self.components = components

    @staticmethod
    def layer_first(kv: torch.Tensor) -> KVPages:
        """kv: (2, num_layers, num_pages, page_size, num_kv_heads, head_dim)."""
        _expect(kv, 0, "layer-first (2, num_layers, num_pages, page_size, num_kv_heads, head_dim)")
        return KVPages(*kv)

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

    @property
    def k(self) -> torch.Tensor:
        """The first component, for pools of K and V."""
        return self.components[0]

    @property
    def v(self) -> torch.Tensor:
        """The second component, for pools of K and V."""
        return self.components[1]

    @property
    def device(self) -> torch.device:
        return self.components[0].device

    @property
    def is_cuda(self) -> bool:
        return self.components[0].is_cuda

    @property
    def num_layers(self) -> int:
        return self.components[0].shape[0]

    @property
    def num_pages(self) -> int:
        return self.components[0].shape[1]

    @cached_property
    def run_bytes(self) -> tuple[int, ...]:
        """Bytes of each component of one page and one layer."""
        return tuple(each.shape[2:].numel() * each.dtype.itemsize for each in self.components)

    @cached_property
    def format(self) -> tuple[tuple[torch.dtype, int, torch.Size], ...]:
        """Of each component: dtype, num_layers, and the shape of a page. Pages of equal formats can be copied."""
        return tuple((each.dtype, each.shape[0], each.shape[2:]) for each in self.components)

    @cached_property
    def layers(self) -> tuple[KVPages, ...]:
        """The same pages, layer by layer."""
        return tuple(
            KVPages(*(each[layer : layer + 1] for each in self.components)) for layer in range(self.num_layers)
        )

    def layer(self, layer_id: int) -> KVPages:
        """The same pages, one layer. Raises KVLayoutError where there is no such layer."""
        if not 0 <= layer_id < self.num_layers:
            raise KVLayoutError(f"layer {layer_id} of a pool with layers 0 to {self.num_layers - 1}")
        return self.layers[layer_id]

    def part(self, layers: range) -> KVPages:
        """The same pages, some layers that follow each other. The same object each time."""
        if len(layers) == 1:
            return self.layer(layers[0])
        if layers not in self._parts:
            if not 0 <= layers.start < layers.stop <= self.num_layers or layers.step != 1:
                raise KVLayoutError(f"layers {layers} of a pool with layers 0 to {self.num_layers - 1}")
            self._parts[layers] = KVPages(*(each[layers.start : layers.stop] for each in self.components))
        return self._parts[layers]

    @cached_property
    def _parts(self) -> dict[range, KVPages]:
        return {}

    def name(self, index: int) -> str:
        """The name of a component, for messages."""
        return "KV"[index] if len(self.components) == 2 else f"component {index}"


@dataclass(frozen=True)
class Addresses:
    """The places of one component's runs: address = base + layer * layer_stride + page * page_stride, in bytes."""

    base: int
    layer_stride: int
    page_stride: int


def addresses(pages: KVPages) -> tuple[Addresses, ...]:
    """One per component. Raises KVLayoutError where a page of one layer is not one run. Only the reference copies
    such pages."""
    return tuple(_addresses(each, pages.name(i)) for i, each in enumerate(pages.components))


def _addresses(t: torch.Tensor, name: str) -> Addresses:
    if not page_is_one_run(t):
        raise KVLayoutError(
            f"{name} of a page and layer must be without gaps, but the strides are {t.stride()[2:]}; use the "
            "reference backend for such a pool"
        )
    layer_stride, page_stride = (stride * t.dtype.itemsize for stride in t.stride()[:2])
    return Addresses(t.data_ptr(), layer_stride, page_stride)


def page_is_one_run(t: torch.Tensor) -> bool:
    """Whether a page of one layer lies in memory without gaps. Goes by strides: each copy asks, and to make a view
    takes longer."""
    length = 1
    for size, stride in zip(reversed(t.shape[2:]), reversed(t.stride()[2:])):
        if size != 1 and stride != length:
            return t.numel() == 0
        length *= size
    return True


def check_fit(src: KVPages, dst: KVPages) -> None:
    """Raise KVLayoutError unless pages of src can be copied to pages of dst."""
    if src.format == dst.format:
        return
    if len(src.components) != len(dst.components):
        raise KVLayoutError(
            f"a page has {len(src.components)} components in the source and {len(dst.components)} in the destination"
        )
    for i, (s, d) in enumerate(zip(src.components, dst.components)):
        if s.dtype != d.dtype:
            raise KVLayoutError(f"{src.name(i)} is {s.dtype} in the source and {d.dtype} in the destination")
        if s.shape[0] != d.shape[0]:
            raise KVLayoutError(
                f"{src.name(i)} has {s.shape[0]} layers in the source and {d.shape[0]} in the destination"
            )
        if s.shape[2:] != d.shape[2:]:
            raise KVLayoutError(
                f"a page of {src.name(i)} is {tuple(s.shape[2:])} in the source and {tuple(d.shape[2:])} in the "
                "destination"
            )


def check_indices(src: KVPages, dst: KVPages, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    """Raise KVLayoutError unless both are (n,) int32 or int64 with pages that exist.

    The values are read only where they lie in host memory: on a GPU that would wait for the device.
    """
    for name, pages, pool in (("src_pages", src_pages, src), ("dst_pages", dst_pages, dst)):
        if pages.dim() != 1 or pages.dtype not in (torch.int64, torch.int32):
            raise KVLayoutError(f"{name} must be (n,) int64 or int32, not {tuple(pages.shape)} {pages.dtype}")
        if pages.is_cpu and not _all_exist(pages, pool.num_pages):
            low, high = bounds(pages)
            raise KVLayoutError(
                f"{name} has pages {low} to {high}, index out of range for a pool of {pool.num_pages}"
            )
    if src_pages.shape != dst_pages.shape:
        raise KVLayoutError(f"{len(src_pages)} source pages and {len(dst_pages)} destination pages")


def _all_exist(pages: torch.Tensor, num_pages: int) -> bool:
    """pages: (n,) int32 or int64 in host memory."""
    if pages.shape[0] <= 16:  # numpy's fixed cost is that of so many numbers
        few = pages.tolist()
        return not few or (min(few) >= 0 and max(few) < num_pages)
    array: np.ndarray = pages.numpy()
    # Without a sign, a negative number is larger than all pages: one pass is enough.
    return bool(np.maximum.reduce(array.view(np.uint64 if array.itemsize == 8 else np.uint32)) < num_pages)


def bounds(pages: torch.Tensor) -> tuple[int, int]:
    """The smallest and the largest of pages, (n,) in host memory, n > 0."""
    array: np.ndarray = pages.numpy()
    return int(array.min()), int(array.max())


def _expect(kv: torch.Tensor, kv_dim: int, layout: str) -> None:
    if kv.dim() != 6 or kv.shape[kv_dim] != 2:
        raise KVLayoutError(f"expected {layout}, got {tuple(kv.shape)}")
