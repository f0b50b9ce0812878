"""`PageLayout`: the shape of a page as one object, which pools, links, blocks, codecs, slabs and files take.

Owns nothing. Pure arithmetic over one frozen shape: imports no torch, so that the offload proxy can use it.
`page_memory.py` lays tensors over memory by it.

A page holds the KV of page_size tokens, all layers, as a list of *components*. Ordinary attention has two, K and V,
each (num_kv_heads, head_dim) per token. Other forms of attention have others: one latent vector per token, or scales
per page. A *run* is one component of one page and one layer. Runs lie in memory in one of two orders:

    page-first    page 0 | K: layer 0, 1, ... | V: layer 0, 1, ... | padding ||  page 1 | ...
    layer-first   K | layer 0: page 0, 1, ... | layer 1: page 0, 1, ... ||  V | ...

A page-first page is the layer-first memory of a single page. Padding exists only where dtypes of different sizes
meet.

Who takes which layouts:

    pools, links, transfers, slabs, swap file, buffers of streamed layers    any
    file store, plugins (opaque records in two halves), the remote tier      any
    codecs raw and lossless                                                  any
    codec binned                  K and V with heads; refuses others with ValueError, at start-up with StoreError
    attention backends            K and V with heads, as `KVView.k` and `KVView.v`, and latents, as `k` alone
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Bytes per element, by torch's names.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class PageLayoutError(ValueError):
    """A layout that cannot be, or that a part does not serve; the message names the layout."""


@dataclass(frozen=True)
class Component:
    """What a page holds per layer. Raises PageLayoutError."""

    # Such as K, V, latent, scale.
    name: str
    # Of one token, or of one page if per_page; at least one dimension.
    shape: tuple[int, ...]
    # A name of ITEM_BYTES.
    dtype: str
    # One per page, not one per token.
    per_page: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise PageLayoutError(f"{self.name} of dtype {self.dtype!r}: use one of {', '.join(ITEM_BYTES)}")
        if not self.shape or min(self.shape) < 1:
            raise PageLayoutError(f"{self.name} of shape {self.shape} is empty")

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.name} {shape} {self.dtype} per {'page' if self.per_page else 'token'}"


@dataclass(frozen=True)
class PageLayout:
    """What a page holds. All sizes and offsets are in bytes. Raises PageLayoutError."""

    components: tuple[Component, ...]
    num_layers: int
    # In tokens.
    page_size: int

    def __post_init__(self) -> None:
        if not self.components or self.num_layers < 1 or self.page_size < 1:
            raise PageLayoutError(
                f"a page of {len(self.components)} components, {self.num_layers} layers and {self.page_size} tokens "
                "is empty"
            )

    @staticmethod
    def kv(page_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str | torch.dtype) -> PageLayout:
        """Ordinary attention: K and V of (num_kv_heads, head_dim) per token and layer."""
        name = str(dtype).removeprefix("torch.")
        return PageLayout(
            tuple(Component(each, (num_kv_heads, head_dim), name) for each in ("K", "V")), num_layers, page_size
        )

    @staticmethod
    def latents(page_size: int, num_layers: int, cached_dim: int, dtype: str | torch.dtype) -> PageLayout:
        """Latent attention: one vector of cached_dim per token and layer, which is the key of the only KV head."""
        name = str(dtype).removeprefix("torch.")
        return PageLayout((Component("latent", (1, cached_dim), name),), num_layers, page_size)

    @cached_property
    def run_bytes(self) -> tuple[int, ...]:
        """Of each component: one page, one layer."""
        return tuple(math.prod(self.run_shape(each)) * each.item_bytes for each in self.components)

    def run_shape(self, component: Component) -> tuple[int, ...]:
        """Elements of one page and one layer: (page_size, *shape), or shape where there is one per page."""
        return component.shape if component.per_page else (self.page_size, *component.shape)

    @cached_property
    def per_token(self) -> tuple[int, ...]:
        """The components, by index, that pages hold one of per token."""
        return tuple(i for i, each in enumerate(self.components) if not each.per_page)

    @cached_property
    def layer_bytes(self) -> int:
        """One page, one layer, all components."""
        return sum(self.run_bytes)

    @cached_property
    def page_bytes(self) -> int:
        """One page-first page, padding included."""
        return _round_up(self.offsets()[-1] + self.num_layers * self.run_bytes[-1], self.alignment)

    @cached_property
    def alignment(self) -> int:
        """Pages begin at a multiple of this."""
        return max(each.item_bytes for each in self.components)

    def offsets(self, num_pages: int = 1) -> tuple[int, ...]:
        """Where each component begins in the layer-first memory of num_pages pages; with one, in a page-first page.
        num_pages * page_bytes is enough memory in either order."""
        offsets, end = [], 0
        for component, run_bytes in zip(self.components, self.run_bytes):
            offsets.append(_round_up(end, component.item_bytes))
            end = offsets[-1] + num_pages * self.num_layers * run_bytes
        return tuple(offsets)

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of the bytes of a page-first page that belong to no component."""
        ends = [start + self.num_layers * size for start, size in zip(self.offsets(), self.run_bytes)]
        gaps = zip(ends, (*self.offsets()[1:], self.page_bytes))
        return tuple((end, start) for end, start in gaps if end < start)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all components have one shape and dtype, so that one tensor holds them all."""
        return len({(each.shape, each.dtype, each.per_page) for each in self.components}) == 1

    @cached_property
    def dtype(self) -> str:
        """The dtype of all components, or uint8, that is bytes, where they differ."""
        dtypes = {each.dtype for each in self.components}
        return dtypes.pop() if len(dtypes) == 1 else "uint8"

    @cached_property
    def kv_shape(self) -> tuple[int, int] | None:
        """(num_kv_heads, head_dim) of a layout that is what `kv` makes, with a floating-point dtype; else None."""
        first = self.components[0]
        if len(first.shape) != 2 or "float" not in first.dtype:
            return None
        heads, dim = first.shape
        is_kv = self == PageLayout.kv(self.page_size, self.num_layers, heads, dim, first.dtype)
        return (heads, dim) if is_kv else None

    @cached_property
    def contents(self) -> str:
        """What a page holds, but for its size in tokens; part of the namespace of stored blocks. Of K and V it is the
        dtype alone: the model's fingerprint stands beside it there and determines their shape."""
        return f"torch.{self.dtype}" if self.kv_shape is not None else self._described

    @cached_property
    def fingerprint(self) -> str:
        """What stored pages depend on beside the model; two engines share blocks only if theirs are equal."""
        return f"{self.contents} page {self.page_size}"

    @property
    def _described(self) -> str:
        return f"{', '.join(map(str, self.components))}, {self.num_layers} layers"

    def __str__(self) -> str:
        return f"pages of {self.page_size} tokens: {self._described}"

    def as_dict(self) -> dict[str, Any]:
        """For a message to another process; `from_dict` is the inverse."""
        return asdict(self)

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> PageLayout:
        """Raises PageLayoutError, or TypeError, KeyError or ValueError where the fields are others."""
        components = tuple(
            Component(str(each["name"]), tuple(map(int, each["shape"])), str(each["dtype"]), bool(each["per_page"]))
            for each in fields["components"]
        )
        return PageLayout(components, int(fields["num_layers"]), int(fields["page_size"]))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
