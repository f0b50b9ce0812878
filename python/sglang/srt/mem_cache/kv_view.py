"""How attention sees KV memory: views of pools and segments of a sequence.

Owns no memory. A pool hands out `KVView`s, the executor builds `KVSegment`s, an attention backend reads both;
none of them knows which tier a page came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, overload

import numpy as np
import torch

from sgl_kernel.kvcacheio import KVPages


class KVView:
    """One layer of a pool, immutable.

    components: in the order of the pool's `PageLayout`, (num_pages, page_size, *shape) each, or (num_pages, *shape)
    where pages hold one per page, with any outer strides: layer-first and block-major pools look alike. Ordinary
    attention has k and v: (num_pages, page_size, num_kv_heads, head_dim), whose innermost two dimensions are
    contiguous. Latent attention has k alone, and reads `with_values_in_keys`.
    """

    __slots__ = ("components",)

    def __init__(self, *components: torch.Tensor) -> None:
        self.components = components

    @staticmethod
    def of_layer(pages: KVPages) -> KVView:
        """pages: of one layer."""
        assert pages.num_layers == 1, f"{pages.num_layers} layers"
        return KVView(*(each[0] for each in pages.components))

    def with_values_in_keys(self, value_dim: int) -> KVView:
        """The same keys, whose first value_dim values are v, in the same memory."""
        return KVView(self.k, self.k[..., :value_dim])

    @property
    def k(self) -> torch.Tensor:
        """Of ordinary attention, as `v`."""
        return self.components[0]

    @property
    def v(self) -> torch.Tensor:
        return self.components[1]

    @property
    def rotary(self) -> torch.Tensor | None:
        """The rest of a key, which all heads share: (num_pages, page_size, 1, rotary_dim). None where k is whole."""
        return None

    @property
    def page_size(self) -> int:
        return self.k.shape[1]


class ExpandedView(KVView):
    """Keys and values that were made of latents for each head: k, v and rotary."""

    __slots__ = ()

    @property
    def rotary(self) -> torch.Tensor:
        return self.components[2]


@dataclass(frozen=True)
class KVSegment:
    """A run of one request's tokens, in pages of one pool.

    pages: (ceil((skip + length) / page_size),) int64. The segment's tokens are `length` tokens after the first
    `skip` of pages[0]. causal: queries and keys are the same tokens, query i sees keys 0..i; only the last segment
    of a request may be causal, and its length equals the number of queries. An empty segment has length 0.
    """

    pages: torch.Tensor
    length: int
    causal: bool = False
    skip: int = 0


@dataclass(frozen=True, eq=False)
class PagedSegments(Sequence[list[KVSegment]]):
    """The segments of a batch as arrays, for backends that work on all requests at once. Request i attends to the
    first kv_lens[i] tokens of the pages table[starts[i]:], of which its queries are the last q_lens[i]; kv_lens[i] is
    0 where all its keys come from elsewhere. As a sequence it is what any other batch is: a list of `KVSegment`s per
    request, made when first asked for.

    table: pages of many requests, integers, on the device. starts, kv_lens, q_lens: (num_reqs,) int64 numpy.
    device_starts, device_kv_lens: the same (num_reqs,) int64 on the table's device. The owner of a CUDA graph writes
    to them, and to table, before each replay; to q_lens, too, if it is of a prefill.
    """

    table: torch.Tensor
    page_size: int
    starts: np.ndarray
    kv_lens: np.ndarray
    q_lens: np.ndarray
    device_starts: torch.Tensor
    device_kv_lens: torch.Tensor
    _lists: list[list[KVSegment]] = field(default_factory=list, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> list[KVSegment]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[KVSegment]]: ...
    def __getitem__(self, index: int | slice) -> list[KVSegment] | list[list[KVSegment]]:
        if len(self._lists) != len(self):
            per_req = zip(self.starts.tolist(), self.kv_lens.tolist(), self.q_lens.tolist())
            self._lists[:] = [self._segments(*each) for each in per_req]
        return self._lists[index]

    def _segments(self, start: int, kv_len: int, q_len: int) -> list[KVSegment]:
        def run(first: int, end: int, causal: bool) -> KVSegment:
            page = self.page_size
            pages = self.table[start + first // page : start - (-end // page)]
            return KVSegment(pages, end - first, causal, first % page)

        if not kv_len:
            return []
        if q_len == 1:
            return [run(0, kv_len, False)]
        before = kv_len - q_len
        own = run(before, kv_len, True)
        return [run(0, before, False), own] if before else [own]


def segment_slots(segments: list[KVSegment], page_size: int) -> list[torch.Tensor]:
    """The slots of each segment's tokens, (length,) int64 each."""
    for segment in segments:
        assert segment.pages.shape[0] * page_size >= segment.skip + segment.length, "a segment with too few pages"
    if page_size == 1:
        return [segment.pages[segment.skip : segment.skip + segment.length] for segment in segments]
    # All segments at once: a handful of operations per batch, not per request.
    pages = torch.cat([segment.pages for segment in segments])
    offsets = torch.arange(page_size, dtype=torch.int64, device=pages.device)
    slots = (pages[:, None] * page_size + offsets).view(-1)
    runs, base = [], 0
    for segment in segments:
        runs.append(slots[base + segment.skip : base + segment.skip + segment.length])
        base += segment.pages.shape[0] * page_size
    return runs


class KVPool(Protocol):
    """The part of a device pool that a model uses."""

    def view(self, layer_id: int) -> KVView: ...

    def store(self, layer_id: int, loc: torch.Tensor, *values: torch.Tensor) -> None:
        """Write K and V, or latents, (num_tokens, num_kv_heads, head_dim) each, into slots loc: (num_tokens,)
        int64."""
        ...
